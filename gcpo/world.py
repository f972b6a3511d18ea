"""The embedded world: a starting policy and an entailment model, made from nothing in a few minutes.

Both are ordinary Hugging Face models saved in Hub format, so that every line that runs here also runs on Qwen2.5 and
roberta-large-mnli. The policy (Qwen2 architecture) learns tinyqa and tinymath by supervised learning, first from right
answers, then from a noisy corpus, which leaves room to learn; the entailment model learns from generated pairs.
Two choices make the budget suffice. Initial weights are drawn wider than the library's default (0.08 against 0.02),
which was made for wide models. And the queries and keys of the entailment model start equal, so that equal tokens
attend to one another from the first step, which is where comparing two answers begins.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from gcpo import paths
from gcpo.tasks import tinymath, tinyqa

TINY = "tiny"  # the name of both models in parameter files
SCRATCH = "scratch"  # the name of an untrained policy that reads and writes any text

PAD, SYSTEM, USER, ASSISTANT, END, SEP = SPECIAL = tuple(
    f"<|{name}|>" for name in ("pad", "system", "user", "assistant", "end", "sep")
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LABELS = ("contradiction", "neutral", "entailment")  # in the order of roberta-large-mnli


@dataclass(frozen=True)
class Settings:
    """What decides the two models; ``version`` is raised when the code that trains them changes."""

    version: int = 1
    seed: int = 0
    corpus: int = 2000  # texts of each task that the tokenizer is trained on
    hidden: int = 128
    layers: int = 4
    policy_steps: int = 400
    qa_batch: int = 12
    math_batch: int = 24
    clean_share: float = 0.6  # of the steps with right answers only, before the noisy corpus
    slip: float = 0.3  # probability of a wrong step in the noisy mathematics corpus
    entailment_hidden: int = 96
    entailment_layers: int = 2
    entailment_steps: int = 350
    entailment_batch: int = 64
    rate: float = 3e-3  # AdamW, embeddings and norms
    muon_rate: float = 2e-2  # Muon, matrices
    init: float = 0.08
    quality_queries: int = 60  # queries of each task behind the policy's quality figures, 16 samples each
    quality_pairs: int = 2000
    threads: int = 1  # part of the settings: sums are split over threads


@dataclass(frozen=True)
class World:
    """The folders of the two models and their measured quality."""

    policy: Path
    entailment: Path
    quality: dict[str, Any]


def resolve(name: str, kind: str) -> str:
    """A model's name as given, or the folder of an embedded one: "tiny", or "scratch" for a policy.

    ``kind`` is "policy" or "entailment".
    """
    if name == SCRATCH and kind == "policy":
        return str(scratch_policy())
    return str(getattr(bootstrap(), kind)) if name == TINY else name


def key(settings: Settings) -> str:
    """The hash that names a world: of its settings and of a sample of what the generators draw."""
    rng = random.Random(0)
    drawn = [_conversations(rng, settings, clean) for clean in (True, False) for _ in range(4)]
    pairs = [entailment_pair(rng) for _ in range(100)]
    return hashlib.sha256(json.dumps([asdict(settings), drawn, pairs]).encode()).hexdigest()[:12]


@functools.cache
def bootstrap(settings: Settings = Settings(), root: Path | None = None) -> World:
    """Make both models, or find them made; repeats on one machine agree bit for bit.

    Raises:
        RuntimeError: a model failed to train, or its quality is outside what the project relies on.
    """
    folder = (root or paths.WORLDS) / key(settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "quality.json").exists():
            _make(settings, folder)
    quality = json.loads((folder / "quality.json").read_text())
    return World(folder / "policy", folder / "entailment", quality)


def _make(settings: Settings, folder: Path) -> None:
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    start = time.monotonic()
    print(f"Making the embedded policy and entailment model in {folder} (a few minutes, once) ...", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    with torch.random.fork_rng(devices=[]):
        quality = {"policy": _policy(settings, draft), "entailment": _entailment(settings, draft)}
    torch.set_num_threads(threads)
    check_quality(quality)
    (draft / "quality.json").write_text(json.dumps(quality, indent=1))
    draft.rename(folder)
    print(f"Made in {time.monotonic() - start:.0f} s: {json.dumps(quality)}", flush=True)


def check_quality(quality: dict[str, Any]) -> None:
    """The figures every later result relies on: room to learn in both tasks, and a trustworthy entailment model.

    Raises:
        RuntimeError: a figure outside its bounds.
    """
    for task, figures in quality["policy"].items():
        if not 0.3 <= figures["accuracy"] <= 0.6:
            raise RuntimeError(
                f"The starting policy's accuracy on {task} is {figures['accuracy']:.3f}, not in [0.3, 0.6]."
            )
        if figures["zero_variance"] >= 0.5:
            raise RuntimeError(f"{figures['zero_variance']:.0%} of the groups on {task} have no reward variance.")
    if quality["entailment"]["accuracy"] < 0.9:
        raise RuntimeError(
            f"The entailment model's held-out accuracy is {quality['entailment']['accuracy']:.3f} < 0.9."
        )


@functools.cache
def scratch_policy(root: Path | None = None) -> Path:
    """The folder of an untrained policy of 30k parameters with a byte-level tokenizer and a chat template.

    It knows nothing, but takes any text: a real run on a real benchmark can be tried with it in seconds.
    """
    from transformers import Qwen2ForCausalLM

    folder = (root or paths.WORLDS) / SCRATCH
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            tokens = _tokenizer_of([])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = Qwen2ForCausalLM(_policy_config(tokens, hidden=32, layers=2, longest=8192, init=0.08))
            _save(model, tokens, folder)
    return folder


# --- tokenizer ------------------------------------------------------------------------------------------------------


def tokenizer(settings: Settings) -> Any:
    """A byte-level BPE tokenizer of the generated corpus, of Qwen2's own class.

    For a model of type qwen2, AutoTokenizer rebuilds this class around the saved vocabulary, with Qwen2's own splitting
    rule, whatever class was saved. Training with that rule makes the round trip give the same ids.
    """
    rng = random.Random(settings.seed)
    corpus = []
    for _ in range(settings.corpus):
        asked = tinyqa.questions(rng, tinyqa.passage(rng, "train"))
        corpus.append(" ".join([asked[0].passage.text, *(f"{q.text} {' '.join(q.references)}" for q in asked)]))
        drawn = tinymath.problem(rng, "train")
        corpus.append(f"{tinymath.text(rng, drawn)} {tinymath.solution(rng, drawn, settings.slip)}")
    return _tokenizer_of(corpus)


def _tokenizer_of(corpus: list[str]) -> Any:
    """A tokenizer trained on texts; on none, every byte is a token of its own."""
    from transformers import Qwen2Tokenizer

    empty = Qwen2Tokenizer(vocab={PAD: 0}, merges=[], unk_token=PAD, pad_token=PAD, eos_token=PAD)
    tokens = empty.train_new_from_iterator(
        corpus, vocab_size=4000, new_special_tokens=list(SPECIAL), show_progress=False
    )
    tokens.pad_token, tokens.eos_token, tokens.padding_side = PAD, END, "left"
    tokens.chat_template = CHAT_TEMPLATE
    return tokens


def _save(model: Any, tokens: Any, folder: Path) -> None:
    model.generation_config.update(eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


# --- starting policy ------------------------------------------------------------------------------------------------


def _conversations(rng: random.Random, settings: Settings, clean: bool) -> list[list[str]]:
    """One batch of conversations, user and assistant in turns; all questions about a passage share one."""
    batch = []
    for _ in range(settings.qa_batch):
        about = tinyqa.passage(rng, "train")
        turns: list[str] = []
        for question in tinyqa.questions(rng, about):
            reply = rng.choice(question.references) if clean else tinyqa.noisy_answer(rng, question)
            turns += [question.text if turns else f"{about.text} {question.text}", reply]
        batch.append(turns)
    for _ in range(settings.math_batch):
        drawn = tinymath.problem(rng, "train")
        batch.append([tinymath.text(rng, drawn), tinymath.solution(rng, drawn, 0.0 if clean else settings.slip)])
    return batch


def _policy_config(tokens: Any, *, hidden: int, layers: int, longest: int, init: float) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        initializer_range=init,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )


def _policy(settings: Settings, draft: Path) -> dict[str, Any]:
    from transformers import Qwen2ForCausalLM

    tokens = tokenizer(settings)
    torch.manual_seed(settings.seed)
    config = _policy_config(tokens, hidden=settings.hidden, layers=settings.layers, longest=512, init=settings.init)
    model = Qwen2ForCausalLM(config)
    rng = random.Random(settings.seed)

    def loss(step: int) -> torch.Tensor:
        ids, labels = [], []
        for turns in _conversations(rng, settings, step < settings.clean_share * settings.policy_steps):
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

    _fit(model, loss, settings.policy_steps, settings)
    _save(model, tokens, draft / "policy")
    return _policy_quality(settings, draft)


def _policy_quality(settings: Settings, draft: Path) -> dict[str, Any]:
    """Mean accuracy and share of groups without reward variance, G = 16, validation split, temperature 0.9."""
    from gcpo.evaluation import load_policy, sample
    from gcpo.tasks import get_task

    model, tokens = load_policy(str(draft / "policy"))
    figures = {}
    for name, longest in (("tinyqa", 12), ("tinymath", 48)):
        task = get_task(name)
        rows = task.load("validation", limit=settings.quality_queries).rows
        torch.manual_seed(settings.seed)
        groups = sample(model, tokens, [r.prompt for r in rows], n=16, temperature=0.9, max_new_tokens=longest)
        scores = [
            [task.score(task.extract(text), row.references) for text in group]
            for row, group in zip(rows, groups, strict=True)
        ]
        rewards = torch.tensor([[s[task.reward_metric] for s in group] for group in scores])
        accuracy = torch.tensor([[s["accuracy"] for s in group] for group in scores])
        figures[name] = {
            "accuracy": round(accuracy.mean().item(), 4),
            "zero_variance": round((rewards.amax(1) == rewards.amin(1)).float().mean().item(), 4),
        }
    return figures


# --- entailment model -----------------------------------------------------------------------------------------------


def entailment_pair(rng: random.Random) -> tuple[str, str, str]:
    """(premise, hypothesis, label): two answers of tinyqa, or two solutions of one problem of tinymath.

    Answers entail one another when they word the same value, and an answer entails what is left of it when an
    attribute is dropped (the reverse is neutral); another value of the same relation contradicts, another relation is
    neutral. Solutions entail one another when they end in the same number.
    """
    kind = rng.random()
    if kind < 0.25:
        drawn = tinymath.problem(rng, "train")
        first, second = (tinymath.solution(rng, drawn, 0.3) for _ in range(2))
        same = first.split("{")[1] == second.split("{")[1]
        return first, second, "entailment" if same else "contradiction"
    relation = rng.choice(list(tinyqa.RELATIONS))
    spec = tinyqa.RELATIONS[relation]
    value = (rng.randrange(len(spec.first)), rng.randrange(len(spec.second)))
    form, other_form = rng.randrange(2), rng.randrange(2)
    premise = spec.wording(value, form)
    if kind < 0.52:
        return premise, spec.wording(value, other_form), "entailment"
    if kind < 0.63:
        general = spec.general.format(a=spec.first[value[0]][other_form], b=spec.second[value[1]][other_form])
        return (premise, general, "entailment") if rng.random() < 0.5 else (general, premise, "neutral")
    if kind < 0.88:
        return premise, spec.wording(tinyqa.near_miss(rng, relation, value), other_form), "contradiction"
    relation = rng.choice([name for name in tinyqa.RELATIONS if name != relation])
    return (
        premise,
        tinyqa.RELATIONS[relation].wording(rng.choice(tinyqa.values("", relation, "train")), form),
        "neutral",
    )


def _held_out(premise: str, hypothesis: str) -> bool:
    """Whether a pair belongs to the test set: one in five, by a hash."""
    return hashlib.sha256(f"{premise}\n{hypothesis}".encode()).digest()[0] < 51


def _pairs(rng: random.Random, size: int, held_out: bool) -> list[tuple[str, str, str]]:
    drawn = (entailment_pair(rng) for _ in iter(int, 1))
    return list(itertools.islice((pair for pair in drawn if _held_out(*pair[:2]) == held_out), size))


def _entailment(settings: Settings, draft: Path) -> dict[str, Any]:
    from tokenizers import processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    # The plain class, asked for token types, which tell premise and hypothesis apart; Qwen2's gives none.
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(settings).backend_tokenizer,
        pad_token=PAD,
        model_max_length=256,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEP} $A {SEP}",
        pair=f"{SEP} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(SEP, tokens.convert_tokens_to_ids(SEP))],
    )
    torch.manual_seed(settings.seed)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=settings.entailment_hidden,
        intermediate_size=2 * settings.entailment_hidden,
        num_hidden_layers=settings.entailment_layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=settings.init,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokens.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, query in weights.items():
            if name.endswith("query.weight"):
                weights[name.replace("query", "key")].copy_(query)

    def logits(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        premises, hypotheses, _ = zip(*pairs, strict=True)
        return model(**tokens(list(premises), list(hypotheses), padding=True, return_tensors="pt")).logits

    def wanted(pairs: Sequence[tuple[str, str, str]]) -> torch.Tensor:
        return torch.tensor([LABELS.index(label) for _, _, label in pairs])

    rng = random.Random(settings.seed)

    def loss(step: int) -> torch.Tensor:
        batch = _pairs(rng, settings.entailment_batch, held_out=False)
        return torch.nn.functional.cross_entropy(logits(batch), wanted(batch))

    _fit(model, loss, settings.entailment_steps, settings)
    model.save_pretrained(draft / "entailment")
    tokens.save_pretrained(draft / "entailment")
    test = _pairs(rng, settings.quality_pairs, held_out=True)
    with torch.no_grad():
        right = logits(test).argmax(1) == wanted(test)
    answers = torch.tensor(["boxed" not in pair[0] for pair in test])
    return {
        "accuracy": round(right.float().mean().item(), 4),
        "answers": round(right[answers].float().mean().item(), 4),
        "solutions": round(right[~answers].float().mean().item(), 4),
    }


def _fit(model: torch.nn.Module, loss: Callable[[int], torch.Tensor], steps: int, settings: Settings) -> None:
    """Muon for matrices, AdamW for the rest; linear warm-up over 30 steps, then linear decay to a twentieth."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=settings.muon_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01),
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
