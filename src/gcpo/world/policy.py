"""The starting policy of the embedded world: tokenizer, corpus and supervised learning."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gcpo.tasks import get_task, tinymath, tinyqa
from gcpo.tasks.evaluation import load_policy, sample

PAD, SYSTEM, USER, ASSISTANT, END, SEP = SPECIAL = tuple(
    f"<|{name}|>" for name in ("pad", "system", "user", "assistant", "end", "sep")
)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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
    return tokenizer_of(corpus)


def tokenizer_of(corpus: list[str]) -> Any:
    """A tokenizer trained on texts; on none, every byte is a token of its own."""
    from transformers import Qwen2Tokenizer

    empty = Qwen2Tokenizer(vocab={PAD: 0}, merges=[], unk_token=PAD, pad_token=PAD, eos_token=PAD)
    tokens = empty.train_new_from_iterator(
        corpus, vocab_size=4000, new_special_tokens=list(SPECIAL), show_progress=False
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


def policy_config(tokens: Any, *, hidden: int, layers: int, longest: int, init: float) -> Any:
    """A Qwen2 configuration for a tokenizer's vocabulary."""
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


def make_policy(settings: Settings, draft: Path) -> dict[str, Any]:
    """Train the starting policy, save it in ``draft`` and return its quality on each task."""
    from transformers import Qwen2ForCausalLM

    tokens = tokenizer(settings)
    torch.manual_seed(settings.seed)
    config = policy_config(tokens, hidden=settings.hidden, layers=settings.layers, longest=512, init=settings.init)
    model = Qwen2ForCausalLM(config)
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
    """Mean accuracy and share of groups without reward variance, G = 16, validation split, temperature 0.9."""
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


def fit(model: torch.nn.Module, loss: Callable[[int], torch.Tensor], steps: int, settings: Settings) -> None:
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
