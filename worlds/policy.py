"""The starting policy of the embedded world: tokenizer, corpus and supervised learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import corpus
import torch

from gcpo import seeds
from gcpo.tasks import get_task, tinymath, tinyqa
from gcpo.tasks.base import Row, Task
from gcpo.tasks.sampling import grade, load_policy, sample

PAD, SYSTEM, USER, ASSISTANT, END, SEP = SPECIAL = tuple(
    f"<|{name}|>" for name in ("pad", "system", "user", "assistant", "end", "sep")
)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    """Settings of the two models; ``version`` is raised when the code that trains them changes."""

    version: int = 2
    seed: int = 0
    corpus: int = 2000  # texts of each task that the tokenizer is trained on
    architecture: Literal["qwen2", "llama"] = "qwen2"
    hidden: int = 128
    layers: int = 4
    think: bool = False  # the policy's solutions have their steps inside <think> ... </think>
    policy_steps: int = 450
    qa_batch: int = 12
    math_batch: int = 24
    clean_share: float = 0.6  # of the steps with right answers only, before the noisy corpus
    slip: float = 0.03  # probability of each step to end in a neighbouring number, in the noisy corpus
    entailment_hidden: int = 96
    entailment_layers: int = 2
    entailment_steps: int = 1300
    entailment_batch: int = 64
    rate: float = 3e-3  # AdamW, embeddings and norms of the policy
    muon_rate: float = 2e-2  # Muon, matrices
    entailment_slower: float = 0.5  # times both rates: at the policy's, luck decides which kinds of pair it learns
    init: float = 0.08
    quality_queries: int = 150  # queries of each task behind the policy's quality figures, 16 samples each
    quality_pairs: int = 2000
    threads: int = 1  # part of the settings: sums are split over threads


def tokenizer(settings: Settings) -> Any:
    """Return a byte-level BPE tokenizer of the generated corpus, of Qwen2's own class.

    For a model of type qwen2, AutoTokenizer rebuilds this class around the saved vocabulary, with Qwen2's own splitting
    rule, whatever class was saved. Training with that rule makes the round trip give the same ids.
    """
    rng = random.Random(settings.seed)
    learnt = []
    for _ in range(settings.corpus):
        asked = tinyqa.questions(rng, tinyqa.passage(rng, "train"))
        learnt.append(" ".join([asked[0].passage.text, *(f"{q.text} {' '.join(q.references)}" for q in asked)]))
        drawn = tinymath.problem(rng, "train")
        learnt.append(f"{tinymath.text(rng, drawn)} {corpus.solution(rng, drawn, think=settings.think)}")
    return tokenizer_of(learnt)


def tokenizer_of(texts: list[str], size: int = 4000) -> Any:
    """Return a tokenizer of at most ``size`` tokens trained on texts; on none, every byte is a token of its own."""
    from transformers import Qwen2Tokenizer

    empty = Qwen2Tokenizer(vocab={PAD: 0}, merges=[], unk_token=PAD, pad_token=PAD, eos_token=PAD)
    tokens = empty.train_new_from_iterator(
        texts, vocab_size=size, new_special_tokens=list(SPECIAL), show_progress=False
    )
    tokens.pad_token, tokens.eos_token, tokens.padding_side = PAD, END, "left"
    tokens.chat_template = CHAT_TEMPLATE
    return tokens


def save(model: Any, tokens: Any, folder: Path) -> None:
    """Save a policy and its tokenizer in Hub format, with the tokens that end and pad."""
    model.generation_config.update(eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def conversations(rng: random.Random, settings: Settings, clean: bool) -> list[list[str]]:
    """Return a batch of conversations, user and assistant in turns; all questions about a passage share one."""
    batch = []
    for _ in range(settings.qa_batch):
        about = tinyqa.passage(rng, "train")
        turns: list[str] = []
        for question in tinyqa.questions(rng, about):
            reply = rng.choice(question.references) if clean else corpus.noisy_answer(rng, question)
            turns += [question.text if turns else f"{about.text} {question.text}", reply]
        batch.append(turns)
    for _ in range(settings.math_batch):
        drawn = tinymath.problem(rng, "train")
        read, slip = (None, 0.0) if clean else (corpus.misread(rng, drawn), settings.slip)
        solution = corpus.solution(rng, drawn, read, slip=slip, think=settings.think)
        batch.append([tinymath.text(rng, drawn), solution])
    return batch


def untrained(
    tokens: Any,
    *,
    hidden: int,
    layers: int,
    longest: int,
    init: float,
    architecture: str = "qwen2",
    heads: tuple[int, int] = (4, 4),
) -> Any:
    """Return a small causal language model for a tokenizer's vocabulary, before it has learnt anything.

    ``heads`` are those of attention, and of keys and values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        initializer_range=init,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_policy(settings: Settings, draft: Path) -> dict[str, Any]:
    """Train the starting policy, save it in ``draft`` and return its quality on each task."""
    tokens = tokenizer(settings)
    torch.manual_seed(settings.seed)
    shape = {name: getattr(settings, name) for name in ("architecture", "hidden", "layers", "init")}
    model = untrained(tokens, longest=512, **shape)
    rng = random.Random(settings.seed)

    def loss(step: int) -> torch.Tensor:
        ids, labels = [], []
        for turns in conversations(rng, settings, step < settings.clean_share * settings.policy_steps):
            row, wanted = [], []
            for user, assistant in zip(turns[::2], turns[1::2], strict=True):
                asked = tokens.encode(f"{USER}{user}{END}{ASSISTANT}")
                reply = tokens.encode(f"{assistant}{END}")
                row += asked + reply
                wanted += [-100] * len(asked) + reply
            ids.append(torch.tensor(row))
            labels.append(torch.tensor(wanted))
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokens.pad_token_id)
        targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        return model(input_ids=padded, attention_mask=(padded != tokens.pad_token_id).long(), labels=targets).loss

    fit(model, loss, settings.policy_steps, settings)
    save(model, tokens, draft / "policy")
    return policy_quality(settings, draft)


def policy_quality(settings: Settings, draft: Path) -> dict[str, Any]:
    """Return shares of questions or groups of each task, G = 16, validation split, temperature 0.9.

    accuracy (of samples) and greedy; none_right and all_right (groups); zero_variance (groups of equal reward);
    lower_quarter and upper_quarter: success rates that a quarter of the groups is below or above.
    """
    model, tokens = load_policy(str(draft / "policy"))
    figures = {}
    for name, longest in (("tinyqa", 12), ("tinymath", 48)):
        task = get_task(name)
        rows = task.load("validation", limit=settings.quality_queries, seed=seeds.of_world(0, settings.seed)).rows
        prompts = [row.prompt for row in rows]
        torch.manual_seed(settings.seed)
        groups = [
            sample(model, tokens, prompts, n=n, temperature=temperature, max_new_tokens=longest)
            for n, temperature in ((16, 0.9), (1, 0.0))
        ]
        (rewards, accuracy), (_, greedy) = (_graded(task, rows, texts) for texts in groups)
        rates = accuracy.mean(1)
        shares = {
            "accuracy": rates,
            "greedy": greedy,
            "none_right": rates == 0,
            "all_right": rates == 1,
            "zero_variance": rewards.amax(1) == rewards.amin(1),
            "lower_quarter": rates.quantile(0.25),
            "upper_quarter": rates.quantile(0.75),
        }
        figures[name] = {key: round(share.float().mean().item(), 4) for key, share in shares.items()}
    return figures


def _graded(task: Task, rows: Sequence[Row], groups: list[list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the metric behind the reward and the accuracy of every text, (questions, samples) each."""
    scores = grade(task, rows, groups)
    rewards, accuracy = (
        torch.tensor([[score[key] for score in group] for group in scores]) for key in (task.reward_metric, "accuracy")
    )
    return rewards, accuracy


def fit(
    model: torch.nn.Module, loss: Callable[[int], torch.Tensor], steps: int, settings: Settings, slower: float = 1.0
) -> None:
    """Train by Muon for matrices and AdamW for the rest; linear warm-up over 30 steps, then decay to a twentieth.

    ``slower`` multiplies both rates.
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=slower * settings.muon_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=slower * settings.rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / 30, max(0.05, 1 - step / steps)))
        for o in optimizers
    ]
    model.train()
    for step in range(steps):
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % 50 == 49:
            print(f"  {type(model).__name__}: step {step + 1} of {steps}, loss {value.item():.3f}", flush=True)
    model.eval()
