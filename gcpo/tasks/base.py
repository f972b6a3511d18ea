"""Tasks, and the reader of a benchmark's rows.

A benchmark is one small module with a ``TASK`` and its name in ``gcpo.tasks.TASKS``. The module says which fields make
a prompt and its references; reading, checking, choosing and recording rows happens here, once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from gcpo import io, seeds
from gcpo.measures import REWARD_RANGE
from gcpo.rewards import bleu1, boxed_answer, exact_match, math_correct, token_f1

DATA_DIR = "GCPO_DATA_DIR"
"""The environment variable that names a folder of ``<benchmark>/<split>.jsonl`` to read instead of the Hub."""

CHARACTERS_PER_WORD = 10
"""Characters of a context per word of the budget, space included."""

Record = Mapping[str, Any]
T = TypeVar("T")


class MalformedRowError(ValueError):
    """A row of a benchmark lacks a field, or a field has the wrong type."""


@dataclass(frozen=True)
class Row:
    """One question: the user's message, the accepted answers (mathematics: the gold answer alone, and after it the
    tolerance that the benchmark states for it), and whether its context was cut."""

    id: str
    prompt: str
    references: tuple[str, ...]
    cut: bool = False


@dataclass(frozen=True)
class Source:
    """Place of a split: its folder below ``$GCPO_DATA_DIR``, its name there and on the Hub, and the Hub's data set and
    configuration. ``unread``: large columns that are not loaded."""

    folder: str
    split: str
    dataset: str
    config: str | None = None
    unread: tuple[str, ...] = ()

    def file(self, folder: str | Path) -> Path:
        """Return its file below a folder such as ``$GCPO_DATA_DIR`` names."""
        return Path(folder) / self.folder / f"{self.split}.jsonl"


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

    def __post_init__(self) -> None:
        if self.reward_metric not in self.metrics:
            raise ValueError(f"task {self.name!r}: reward_metric {self.reward_metric!r} is not among {self.metrics}")

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


def hotpot_scores(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return accuracy (F1 above 0.5), exact match, and F1 with the rule that yes and no must be equal, as HotpotQA's
    official evaluation has both."""
    f1 = token_f1(prediction, references, yes_no_rule=True)
    return {"accuracy": float(f1 > 0.5), "em": exact_match(prediction, references), "f1": f1}


def math_scores(prediction: str | None, references: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of a mathematical answer against the gold answer, within the tolerance after it if there is
    one."""
    gold, tolerance = references if len(references) == 2 else (*references, "0")
    return {"accuracy": math_correct(prediction, gold, absolute=float(tolerance))}


MATH_PROMPT = """Solve the problem step by step. Put the final answer in \\boxed{{}}.

{problem}"""


def math_row(row_id: str, problem: str, *references: str) -> Row:
    r"""Return a question that asks for steps and a ``\boxed{...}`` answer."""
    return Row(row_id, MATH_PROMPT.format(problem=problem.strip()), references)


def gold_answer(record: Record, path: str) -> str:
    """Return the boxed answer of the solution in a field; ``MalformedRowError`` without one."""
    answer = boxed_answer(field(record, path, str))
    if answer is None:
        raise MalformedRowError(f"field {path!r} has no closed \\boxed{{...}} that is not empty")
    return answer


def generator(
    name: str, splits: Iterable[str], draw: Callable[[random.Random, str], tuple[str, Sequence[str]]]
) -> Callable[..., Split]:
    """Return the ``load`` of a generated task: ``limit`` questions (default 1000), the same for one split and seed.

    ``draw`` makes the next question of a split, and its references. There is no revision, and no row is malformed.
    """

    def load(
        split: str,
        *,
        limit: int | None = None,
        seed: int = 0,
        revision: str | None = None,
        skip_malformed: bool = False,
    ) -> Split:
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}.")
        rng = random.Random(f"{name} {split} {seed}")
        rows = []
        for number in range(1000 if limit is None else limit):
            prompt, references = draw(rng, split)
            rows.append(Row(f"{split}-{seed}-{number}", prompt, tuple(references)))
        return Split(tuple(rows), {"dataset": name, "split": split, "generator_seed": seed})

    return load


def reader(
    sources: Mapping[str, Source],
    convert: Callable[[Record], Iterable[Row]],
    keep: Callable[[str, Row], bool] = lambda split, row: True,
) -> Callable[..., Split]:
    """Return the ``load`` of a public benchmark, whose splits have sources.

    Rows are read from ``$GCPO_DATA_DIR/<folder>/<split>.jsonl`` if the variable is set, else from the Hub at
    ``revision``. ``convert`` makes the rows of one record, reading it with :func:`field`; ``keep`` says whether a row
    belongs to a split. Rows come in the order of a hash of the seed and their id, so the first ``limit`` rows (at most;
    ``None``: all) are the same in either source and lie within those of any larger limit. A repeated id is numbered
    ("id-2"). ``source["revision"]`` is the resolved commit of a Hub data set, ``None`` if the Hub does not tell it;
    ``source["cut"]`` counts rows whose context was cut.

    The function raises ``ValueError`` for a split that is not there, with those that are, if there is no row, or for a
    limit below 1; ``MalformedRowError`` naming file, line and field for a malformed row (with ``skip_malformed`` it is
    left out and counted in ``source["skipped"]`` instead); ``FileNotFoundError`` listing what there is for a missing
    file; and ``OSError`` if the Hub cannot be reached.
    """

    def load(
        split: str, *, limit: int | None, seed: int = 0, revision: str | None = None, skip_malformed: bool = False
    ) -> Split:
        if split not in sources:
            known = ", ".join(f"{name} ({source.dataset}, {source.split})" for name, source in sources.items())
            raise ValueError(f"there is no split {split!r} here: {known}. A run without it says so: *_limit 0.")
        source = sources[split]
        name = f"{source.folder}/{source.split}"
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}; give at least 1, or None for all rows of {name}")
        folder = os.environ.get(DATA_DIR)
        records, origin = _from_folder(Path(folder), source) if folder else _from_hub(source, revision)
        rows: dict[str, Row] = {}
        skipped = 0
        for where, record in records:
            try:
                converted = list(convert(_decode(record) if isinstance(record, bytes) else record))
            except MalformedRowError as error:
                if not skip_malformed:
                    way = "Repair the row, or set skip_malformed: true, which leaves such rows out and counts them."
                    raise MalformedRowError(f"{where}: {error}. {way}") from error
                skipped += 1
                continue
            for row in converted:
                if keep(split, row):
                    numbered = itertools.chain([row.id], (f"{row.id}-{number}" for number in itertools.count(2)))
                    unique = next(name for name in numbered if name not in rows)
                    rows[unique] = replace(row, id=unique)
        if not rows:
            raise ValueError(f"{name} has no usable row ({skipped} malformed rows skipped)")
        ordered = sorted(rows.values(), key=lambda row: seeds.place(seed, row.id))
        chosen = tuple(ordered[:limit])
        return Split(chosen, origin | {"skipped": skipped, "cut": sum(row.cut for row in chosen)})

    return load


def text_id(text: str) -> str:
    """Return an id for a row of a data set that numbers none: 12 digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def words(text: str, most: int) -> tuple[str, bool]:
    """Return the first ``most`` words of a text, of :data:`CHARACTERS_PER_WORD` characters at most, and whether it was
    cut: a text of few and endless words is no shorter for that. English has about 6, space included."""
    listed = text.split()
    kept = " ".join(listed[:most]) if len(listed) > most else text
    return kept[: CHARACTERS_PER_WORD * most], len(listed) > most or len(kept) > CHARACTERS_PER_WORD * most


def field(record: Record, path: str, kind: type[T], *, empty: bool = False) -> T:
    """Return the value at a dotted path of a record, e.g. ``answers.0.text``, checked; it may be the name of a field.

    Raises ``MalformedRowError`` that names the field if it is missing, not of type ``kind``, or (unless ``empty``) a
    blank string or an empty list.
    """
    value: Any = record
    for part in [path] if path in record else path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise MalformedRowError(f"field {path!r}: {part!r} is missing") from None
    if not isinstance(value, kind):
        raise MalformedRowError(f"field {path!r} is {value!r:.80}, not of type {kind.__name__}")
    if not empty and not (value.strip() if isinstance(value, str) else value != []):
        raise MalformedRowError(f"field {path!r} is empty")
    return value


def _decode(line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MalformedRowError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise MalformedRowError(f"a JSON {type(record).__name__}, not an object with fields")
    return record


Records = Iterator[tuple[str, bytes | Record]]  # each with its place


def _from_folder(folder: Path, source: Source) -> tuple[Records, dict[str, Any]]:
    path = source.file(folder)
    name = path.relative_to(folder).as_posix()
    if not path.is_file():
        files = sorted(file.relative_to(folder).as_posix() for file in folder.glob("*/*.jsonl"))
        own = [file for file in files if file.startswith(f"{source.folder}/")]
        found = ", ".join(own or files) or "no <benchmark>/<split>.jsonl"
        raise FileNotFoundError(
            f"{path} does not exist. {DATA_DIR}={folder} has {found}. "
            f"Choose another split, add the file, or unset {DATA_DIR} to read the Hub."
        )
    origin = {"dataset": source.folder, "split": source.split, "file": name, "sha256": io.sha256(path)}
    return _lines(path), origin


def _lines(path: Path) -> Records:
    """Yield the lines that are not blank, each with its place; one at a time, as they can be hundreds of MB."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def _from_hub(source: Source, revision: str | None) -> tuple[Records, dict[str, Any]]:
    import datasets  # slow to import, and not needed by the generated tasks
    import huggingface_hub

    dataset, config, split = source.dataset, source.config, source.split
    commit: str | None
    try:
        commit = huggingface_hub.dataset_info(dataset, revision=revision).sha
    except Exception:  # the HTTP library's own errors included; a cached data set can still be read
        commit = None
    try:
        table = datasets.load_dataset(dataset, config, split=split, revision=commit or revision)
    except OSError as error:
        raise OSError(
            f"{dataset} ({split}) could not be read from the Hub: {error}. Without the Hub, set {DATA_DIR} to a folder "
            f"that has {source.folder}/{split}.jsonl in the same fields."
        ) from error
    if source.unread:
        table = table.flatten()
        table = table.select_columns([name for name in table.column_names if name not in source.unread])
    records = ((f"{dataset} ({split}), row {number}", record) for number, record in enumerate(table, 1))
    return records, {"dataset": dataset, "config": config, "split": split, "requested": revision, "revision": commit}
