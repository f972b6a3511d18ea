"""Tasks: how a question is asked, answered and graded. Rows of public benchmarks are read by ``gcpo.tasks.reading``."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gcpo.measures import REWARD_RANGE
from gcpo.rewards import bleu1, boxed_answer, final_answer, math_correct, token_f1

DATA_DIR = "GCPO_DATA_DIR"
"""The environment variable that names a folder of ``<benchmark>/<split>.jsonl`` to read instead of the Hub."""

MAX_SUPPORTING_WORDS = 180
"""Words of the passages that support an answer which a prompt keeps with ``context: supporting``: prompts of at most
380 tokens of SmolLM2, but for one in fifty."""


@dataclass(frozen=True)
class Row:
    """One question: the user's message, the accepted answers (mathematics: the gold answer alone, and after it the
    tolerance that the benchmark states for it), whether its context was cut, the parts that the message is made of, the
    system's message before it, whether it is mathematics, and the document it is about, of which others may be too."""

    id: str
    prompt: str
    references: tuple[str, ...]
    cut: bool = False
    parts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    system: str | None = None
    mathematics: bool = field(default=False, compare=False, repr=False)
    document: str = field(default="", compare=False, repr=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that a policy is to continue."""
        before = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*before, {"role": "user", "content": self.prompt}]

    def asked(self, template: str | None, system: str | None) -> Row:
        """Return the question in the words of a template, which names its parts in braces ({prompt} is the task's own
        message), after a system's message.

        Raises:
            ValueError: the template names a part that the question has not.
        """
        parts = {**self.parts, "prompt": self.prompt}
        if unknown := [name for name in _PART.findall(template or "") if name not in parts]:
            listed = ", ".join(f"{{{name}}}" for name in parts)
            raise ValueError(f"prompt_template: questions of this task have no {{{unknown[0]}}}, only {listed}.")
        prompt = self.prompt if template is None else _PART.sub(lambda found: parts[found[1]], template)
        return replace(self, prompt=prompt, system=system)


_PART = re.compile(r"(?<!\w)\{([a-z]+)\}")  # after a letter it is an argument of LaTeX's, as in \boxed{x}


def made_of(
    template: str, row_id: str, references: Sequence[str], *, cut: bool = False, document: str = "", **parts: str
) -> Row:
    """Return the question whose message a task's template makes of its parts."""
    return Row(row_id, template.format(**parts), tuple(references), cut, parts, document=document)


@dataclass(frozen=True)
class Split:
    """Rows and where they come from, as a run record keeps it: the data set, the split, and what pins the content
    (a file's SHA-256, a Hub commit, or a generator's settings). What is not known is ``None``, never invented."""

    rows: tuple[Row, ...]
    source: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """How a benchmark is read and graded.

    ``metrics`` are the keys of ``score`` in the order of the papers' tables. ``load(split, *, limit, seed=0,
    revision=None, skip_malformed=False)`` gives a ``Split``; ``extract`` the answer of a completion, ``None`` if it has
    none; ``score(answer, references)`` every metric, each in [0, 1]. With ``full_completion`` (mathematics, GCPO
    App. E.3) it is the whole completion that is embedded and clustered, else the extracted answer. The reward goes from
    one end of ``reward_range`` to the other as ``reward_metric`` goes from 0 to 1; nothing else says what it can reach.
    ``answer_length`` says how much a completion has to hold: "short" is a name, a number or a few short lines,
    "solution" the worked steps of a problem.
    """

    name: str
    metrics: tuple[str, ...]
    load: Callable[..., Split]
    extract: Callable[[str], str | None]
    score: Callable[[str | None, Sequence[str]], dict[str, float]]
    reward_metric: str
    answer_length: Literal["short", "solution"]
    full_completion: bool = False
    reward_range: tuple[float, float] = REWARD_RANGE

    def reward(self, completion: str, references: Sequence[str]) -> float:
        """Return the training reward of a completion."""
        return self.reward_of(self.score(self.extract(completion), references))

    def reward_of(self, scores: Mapping[str, float]) -> float:
        """Return the training reward for scores: ``reward_metric`` stretched to ``reward_range``, which is 2 x F1 or
        2 x accuracy in GCPO (Table 5)."""
        low, high = self.reward_range
        return low + (high - low) * scores[self.reward_metric]


def qa_scores(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return accuracy (F1 strictly above 0.5, GCPO Table 5), BLEU-1 and F1 of a free-form answer."""
    f1 = token_f1(prediction, references)
    return {"accuracy": float(f1 > 0.5), "bleu1": bleu1(prediction, references), "f1": f1}


def math_scores(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of a mathematical answer against the gold answer, within the tolerance after it if there is
    one."""
    gold, tolerance = references if len(references) == 2 else (*references, "0")
    return {"accuracy": math_correct(prediction, gold, absolute=float(tolerance))}


def text_task(name: str, load: Callable[..., Split], **others: Any) -> Task:
    """Return a task whose answers are a few words; ``others`` are what differs from most such tasks."""
    return replace(Task(name, ("accuracy", "bleu1", "f1"), load, final_answer, qa_scores, "f1", "short"), **others)


def math_task(name: str, load: Callable[..., Split], **others: Any) -> Task:
    """Return a task of mathematics, whose answers stand in a box; ``others`` are what differs from most such tasks."""
    task = Task(name, ("accuracy",), load, boxed_answer, math_scores, "accuracy", "solution", full_completion=True)
    return replace(task, **others)


MATH_PROMPT = """Solve the problem step by step. Put the final answer in \\boxed{{}}.

{problem}"""


def math_row(row_id: str, problem: str, *references: str) -> Row:
    r"""Return a question that asks for steps and a ``\boxed{...}`` answer."""
    return replace(made_of(MATH_PROMPT, row_id, references, problem=problem.strip()), mathematics=True)


SHARES = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
"""What the splits of a generated task have of all facts or problems, in the order of a hash."""


def generator(name: str, draw: Callable[[random.Random, str], tuple[str, Sequence[str]]]) -> Callable[..., Split]:
    """Return the ``load`` of a generated task: ``limit`` questions (default 1000), the same for one split and seed.

    ``draw`` makes the next question of a split, and its references. There is no revision, and no row is malformed: what
    is said of files counts for nothing.
    """

    def load(split: str, *, limit: int | None = None, seed: int = 0, **of_files: Any) -> Split:
        if split not in SHARES:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(SHARES)}.")
        rng = random.Random(f"{name} {split} {seed}")
        drawn = (draw(rng, split) for _ in range(1000 if limit is None else limit))
        rows = (Row(f"{split}-{seed}-{number}", asked, (*right,)) for number, (asked, right) in enumerate(drawn))
        return Split(tuple(rows), {"dataset": name, "split": split, "generator_seed": seed})

    return load


def _folded(question: str) -> str:
    """Return a question whose copies in other case, or with other space between its words, are the same."""
    return " ".join(question.casefold().split())


def check_disjoint(splits: Mapping[str, Split], *, skip: bool) -> dict[str, Split]:
    """Return the splits of a run, by their part in it ("train", "eval", ...), of which no question stands in two,
    whatever the case of its letters and the space between its words.

    With ``skip``, questions that are held out elsewhere are left out of "train", and counted in its source.

    Raises:
        ValueError: with both splits, how many questions they share, and the id of the first.
    """
    found = dict(splits)
    for one, other in itertools.combinations(splits, 2):
        mine, held_out = found[one], {_folded(row.prompt) for row in splits[other].rows}
        shared = {row.id: row for row in mine.rows if _folded(row.prompt) in held_out}
        kept = tuple(row for row in mine.rows if row.id not in shared)
        if not shared:
            continue
        if not (skip and kept and one == "train"):
            first, second = (f"{source['dataset']}/{source['split']}" for source in (mine.source, splits[other].source))
            way = "set skip_malformed: true, which leaves them out of training" if one == "train" else "take another"
            raise ValueError(
                f"{len(shared)} of {len(mine.rows)} questions of {first} ({one}) are questions of {second} ({other}) "
                f"too, the first has id {next(iter(shared))!r}. Take them out of one split, or {way}."
            )
        found[one] = Split(kept, mine.source | {"skipped": mine.source["skipped"] + len(shared)})
    return found


def words(text: str, most: int) -> tuple[str, bool]:
    """Return the first ``most`` words of a text, and whether it was cut."""
    listed = text.split()
    return (" ".join(listed[:most]), True) if len(listed) > most else (text, False)
