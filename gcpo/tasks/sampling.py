"""Sampling from a policy and scoring it on held-out questions, apart from training and its reward."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from gcpo.gradients import dropout_off
from gcpo.semantics.loading import PROBE, check_tokenizer, explain_loading, load_model, refused
from gcpo.tasks.base import Row, Task

TOKENS = 2**16  # of a batch, padding included: prompts of thousands of tokens come fewer at a time
REPAIR = "Repair its chat_template.jinja, or take another model"
Prompt = str | list[dict[str, str]]  # a user's message, or a conversation
LOGITS = 2**27  # numbers held at a time where every token's distribution is asked for: half a gigabyte


def load_policy(
    name: str, *, revision: str | None = None, dtype: str = "float32", template: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer, by path or Hub name.

    The tokenizer keeps ``template``, what its chat template is given beside messages, as ``chat_template_kwargs``; and
    the model's generation ends where that template ends a turn, which a base model's own configuration leaves out.

    Raises:
        OSError: it cannot be loaded; says whether the name is a path or a Hub name, and the way out.
        ValueError: it lacks tensors, its tokenizer or a chat template, or has numbers that are not finite; or its chat
            template does not read what it is given.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with explain_loading(name, "policy"):
        tokens = AutoTokenizer.from_pretrained(name, revision=revision, padding_side="left")
    model = load_model(AutoModelForCausalLM, name, "policy", revision=revision, dtype=dtype)
    check_tokenizer(tokens, model, name, "policy")
    if tokens.chat_template is None:
        way = "Take a model that was made for chat, or add the file chat_template.jinja to it"
        raise refused(name, "policy", "its tokenizer has no chat template", way)
    if tokens.pad_token is None:
        tokens.pad_token = tokens.eos_token
    tokens.chat_template_kwargs = dict(template or {})
    if unread := [key for key in tokens.chat_template_kwargs if key not in str(tokens.chat_template)]:
        way = "Leave it out of chat_template_kwargs"
        raise refused(name, "policy", f"its chat template reads no {unread[0]!r}", way)
    if PROBE not in (chat := _chats(tokens, [PROBE])[0]):
        raise refused(name, "policy", "its chat template leaves the question out", REPAIR)
    _end_with_turns(model, tokens)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    inputs = tokens(chat, return_tensors="pt", add_special_tokens=False).to(model.device)
    with torch.no_grad():
        logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits
    if not logits.isfinite().all():
        raise refused(name, "policy", f"its logits are not finite with dtype {dtype}", "Use another dtype")
    return model, tokens


def check_lengths(model: Any, tokens: Any, rows: Sequence[Row], max_new_tokens: int) -> None:
    """Refuse questions that a policy has no positions for, before memory for them is asked for.

    A model whose configuration does not limit its positions (max_position_embeddings) is not checked.

    Raises:
        ValueError: a prompt, as the policy reads it, and ``max_new_tokens`` after it are longer than the model allows;
            or the chat template leaves a system's message out.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    chats = [*zip(rows, _chats(tokens, [row.messages for row in rows]), strict=True)]
    if any((row.system or "").strip() not in chat for row, chat in chats):
        way = "Put it into prompt_template, before {prompt}, in place of system_prompt"
        raise refused(tokens.name_or_path, "policy", "its chat template leaves the system's message out", way)
    # No token is less than a byte, so that most prompts need not be tokenised to know that they fit.
    perhaps = [row for row, chat in chats if len(chat.encode()) + max_new_tokens > longest]
    lengths = zip(perhaps, map(len, prompt_ids(tokens, [row.messages for row in perhaps])), strict=True)
    if wrong := [(row, length) for row, length in lengths if length + max_new_tokens > longest]:
        row, length = wrong[0]
        raise ValueError(
            f"row {row.id!r} ({len(wrong)} of {len(rows)} rows): a prompt of {length} tokens and max_completion_length "
            f"{max_new_tokens} are more than the {longest} positions of the policy (max_position_embeddings). Lower "
            "max_completion_length, take a policy with more positions, or leave the row out."
        )


@torch.no_grad()
def generate(
    model: Any, tokens: Any, prompts: Sequence[Prompt], *, n: int, temperature: float, max_new_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Generate ``n`` completions of each prompt; temperature 0 is greedy decoding.

    Returns:
        input_ids, attention_mask, completion_mask: all (prompts * n, L), the rows of a prompt next to one another;
        the completion includes its end-of-sequence token and nothing after it.
    """
    chats = [chat for chat in _chats(tokens, prompts) for _ in range(n)]
    inputs = tokens(chats, padding=True, return_tensors="pt", add_special_tokens=False).to(model.device)
    # A Hub policy brings decoding settings of its own; left in, they would change what "a sample" means, and TRL's
    # training samples are without them.
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokens.pad_token_id,
        repetition_penalty=1.0,
        **(drawn if temperature else {"do_sample": False}),
    )
    start = inputs.input_ids.shape[1]
    ended = torch.isin(ids[:, start:], torch.as_tensor(ends(model, tokens), device=ids.device))
    # Everything up to and including the first end token is completion.
    kept = (ended.cumsum(1) - ended.int()) == 0
    completion = torch.cat([torch.zeros_like(inputs.attention_mask), kept.long()], dim=1)
    attention = torch.cat([inputs.attention_mask, kept.long()], dim=1)
    return ids, attention, completion


@torch.no_grad()
def token_statistics(
    model: Any, ids: Tensor, attention: Tensor, completion: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Measure every completion token under softmax(logits / temperature), the distribution that samples are drawn from.

    Args:
        model: the policy.
        ids: (N, L), as all three are what :func:`generate` returns.
        attention: (N, L).
        completion: (N, L).
        temperature: above 0.

    Returns:
        log-probabilities (at most 0) and entropies (at least 0), in nats, and which tokens are the completion's: all
        (N, T), of the columns from the first that a completion has, on the CPU.
    """
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    start = int(completion.any(0).float().argmax())
    length, width = ids.shape[1], ids.shape[1] - start
    at_once = min(64, TOKENS // length, LOGITS // (width * model.config.get_text_config().vocab_size))
    kept = []
    for rows in torch.arange(len(ids)).split(max(1, at_once)):
        outputs = model(
            input_ids=ids[rows],
            attention_mask=attention[rows],
            position_ids=positions[rows],
            logits_to_keep=width + 1,  # those of prompts would be most of the memory
        )
        kept.append(_of_tokens(outputs.logits[:, :-1], ids[rows, start:], temperature))
    logps, entropies = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return logps, entropies, completion[:, start:].cpu()


def _of_tokens(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of tokens, on the CPU, from :data:`LOGITS` numbers at a time or one
    column."""
    columns = max(1, LOGITS // (len(ids) * logits.shape[-1]))
    chosen, entropies = [], []
    for some, own in zip(logits.split(columns, 1), ids.split(columns, 1), strict=True):
        logs = (some.float() / temperature).log_softmax(-1)
        chosen.append(logs.gather(-1, own.unsqueeze(-1)).squeeze(-1).cpu())
        entropies.append(-(logs.exp() * logs).sum(-1).cpu())
    return torch.cat(chosen, 1), torch.cat(entropies, 1)


def prompt_ids(tokens: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of the prompts as the policy reads them."""
    return [tokens(chat, add_special_tokens=False, verbose=False)["input_ids"] for chat in _chats(tokens, prompts)]


def _chats(tokens: Any, prompts: Sequence[Prompt]) -> list[str]:
    """Return the prompts as the policy reads them; raises ``ValueError`` where its chat template fails."""
    asked = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
    how = {"tokenize": False, "add_generation_prompt": True, **getattr(tokens, "chat_template_kwargs", {})}
    try:
        return [tokens.apply_chat_template(chat, **how) for chat in asked]
    except Exception as error:  # a template is a program: it can fail in any way
        why = f"its chat template fails ({type(error).__name__}: {' '.join(str(error).split())})"
        raise refused(tokens.name_or_path, "policy", why, REPAIR) from error


def _end_with_turns(model: Any, tokens: Any) -> None:
    """Let generation end at the special token with which the chat template ends an answer, here and in TRL, which both
    ask the model's generation configuration."""
    said = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        chat = tokens.apply_chat_template(said, tokenize=False, **tokens.chat_template_kwargs)
    except Exception:  # a template may have no place for answers: it is asked for the next one alone
        return
    after = tokens(chat.rpartition(PROBE)[2], add_special_tokens=False)["input_ids"][:1]
    if after and tokens.added_tokens_decoder.get(after[0]) and after[0] not in ends(model, tokens):
        model.generation_config.eos_token_id = [*dict.fromkeys([*ends(model, tokens), *after])]


def ends(model: Any, tokens: Any) -> list[int]:
    """Return the tokens that end a completion."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [] if own is None else [own]
    return [*listed, tokens.eos_token_id]


def texts(tokens: Any, ids: Tensor, completion: Tensor) -> list[str]:
    """Return the completions as text, without special tokens."""
    rows = zip(ids, completion.bool(), strict=True)
    return tokens.batch_decode([row[kept] for row, kept in rows], skip_special_tokens=True)


def batches(
    tokens: Any, prompts: Sequence[Prompt], *, n: int, max_new_tokens: int, batch_size: int = 32
) -> Iterator[slice]:
    """Yield the parts of the prompts, in their order, whose ``n`` answers are generated together.

    Each has ``batch_size`` prompts, or fewer where they would be more than :data:`TOKENS` tokens with their answers and
    padding; the answers to one prompt stay together, however long.
    """
    lengths = [len(ids) + max_new_tokens for ids in prompt_ids(tokens, prompts)]
    for start in range(0, len(prompts), batch_size):
        first, stop = start, min(start + batch_size, len(prompts))
        for place in range(start + 1, stop):
            if n * (place + 1 - first) * max(lengths[first : place + 1]) > TOKENS:
                yield slice(first, place)
                first = place
        yield slice(first, stop)


def sample(
    model: Any,
    tokens: Any,
    prompts: Sequence[Prompt],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[str]]:
    """Return ``n`` completions of each prompt as text, in the prompts' order, generated in :func:`batches`.

    ``progress`` gets how many there are after each."""
    sampled: list[list[str]] = []
    for part in batches(tokens, prompts, n=n, max_new_tokens=max_new_tokens):
        some = prompts[part]
        ids, _, completion = generate(model, tokens, some, n=n, temperature=temperature, max_new_tokens=max_new_tokens)
        flat = texts(tokens, ids, completion)
        sampled += [flat[n * i : n * (i + 1)] for i in range(len(some))]
        progress(n * len(sampled))
    return sampled


def grade(task: Task, rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> list[list[dict[str, float]]]:
    """Return the task's metrics of every text of each question's group."""
    asked = zip(rows, groups, strict=True)
    return [[task.score(task.extract(text), row.references) for text in group] for row, group in asked]


def evaluate(
    model: Any,
    tokens: Any,
    task: Task,
    rows: Sequence[Row],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Score the greedy answer and ``n`` sampled answers of every question.

    ``progress`` gets how many answers there are, and how many it will be.

    Returns:
        one line per question and decoding ("greedy", "sampled"): the metrics of the task, each in [0, 1] and averaged
        over the samples, and "answered", the share of completions with an answer. Sampling is seeded and leaves the
        global generator as it was.
    """
    lines: list[dict[Any, Any]] = []
    prompts, before = [row.messages for row in rows], 0

    def more(done: int) -> None:
        progress(before + done, (1 + n) * len(rows))

    with dropout_off(model), torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for decoding, count, heat in (("greedy", 1, 0.0), ("sampled", n, temperature))[: 1 + bool(n)]:
            how: dict[str, Any] = {"n": count, "temperature": heat, "max_new_tokens": max_new_tokens}
            groups = sample(model, tokens, prompts, progress=more, **how)
            for row, group in zip(rows, groups, strict=True):
                answers = [task.extract(text) for text in group]
                scores = pd.DataFrame([task.score(answer, row.references) for answer in answers]).mean()
                answered = sum(answer is not None for answer in answers) / count
                lines.append({"query": row.id, "decoding": decoding, **scores.to_dict(), "answered": answered})
            before = len(rows)
    return pd.DataFrame(lines)
