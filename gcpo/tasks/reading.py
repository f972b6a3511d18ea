"""Rows of public benchmarks: from a folder or the Hub, checked field by field, in an order that the seed decides."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from gcpo import io, seeds
from gcpo.mathematics import read_gold
from gcpo.rewards import boxed_answer
from gcpo.tasks.base import DATA_DIR, Row, Split

CONVERTED = "refs/convert/parquet"
"""Revision under which the Hub keeps a data set that it has converted to parquet files."""

Records = Iterator[tuple[str, Any]]  # each with its place; lines of a file as bytes
Choose = Callable[[Callable[[Row], bool], Iterable[Row]], Iterable[Row]]  # which of the rows that can be used


class MalformedRowError(ValueError):
    """A row of a benchmark lacks a field, or a field has a wrong value."""


Anything = Annotated[str, StringConstraints(pattern="")]  # a pattern makes pydantic refuse what is not Unicode
Text = Annotated[str, StringConstraints(pattern=r"[^\s\x1c-\x1f]")]


class Fields(BaseModel):
    """Fields of a record, or of a part of one, that a task reads, with strict types; there may be others."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def of(cls, record: Any) -> Self:
        """Return the fields, checked; ``MalformedRowError`` names the first wrong one, its value and what it should
        be."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field, value = ".".join(map(str, first["loc"])), reprlib.repr(first["input"])
            why = {
                "missing": "is missing",
                "string_pattern_mismatch": f"is {value}: it should not be blank",
                "string_unicode": f"is {value}: it should not have half of a surrogate pair",
            }.get(first["type"], f"is {value}: {first['msg'].replace('Input', 'it')}")
            raise MalformedRowError(f"field {field!r} {why}") from None


class Record(Fields, ABC):
    """A record of a data set."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return its questions; ``MalformedRowError`` where fields contradict one another."""


@dataclass(frozen=True)
class Source:
    """Place of a split: its folder below ``$GCPO_DATA_DIR``, its name there and on the Hub, and the Hub's data set,
    configuration and revision. ``columns``: those to load, of parquet files whose others are large. ``more``: where the
    rest of the split's records is."""

    record: type[Record]
    folder: str
    split: str
    dataset: str
    config: str | None = None
    revision: str | None = None
    columns: tuple[str, ...] = ()
    more: tuple[Source, ...] = ()

    def file(self, folder: str | Path) -> Path:
        """Return its file below a folder such as ``$GCPO_DATA_DIR`` names."""
        return Path(folder) / self.folder / f"{self.split}.jsonl"

    def probe(self, revision: str | None = None) -> dict[str, Any]:
        """Return where the split is read from, after reading each source as far as its first row and no further.

        ``revision`` is the data set's on the Hub. Raises as a :func:`reader`.
        """
        records, origin = _records(self, revision, whole=False)
        if not any(_rows(self, where, record) for where, record in records):
            raise ValueError(f"{self.folder}/{self.split} has no usable row")
        return origin | ({"more": [one.probe(revision) for one in self.more]} if self.more else {})


def boxed_gold(solution: str) -> str:
    """Return the boxed answer of a solution; ``MalformedRowError`` without one."""
    answer = boxed_answer(solution)
    if answer is None:
        raise MalformedRowError("field 'solution' has no closed \\boxed{...} that is not empty")
    return answer


def text_id(text: str) -> str:
    """Return an id for a row of a data set that numbers none: 12 digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def reader(
    sources: Mapping[str, Source], keep: Callable[[str, Row], bool] = lambda split, row: True, choose: Choose = filter
) -> Callable[..., Split]:
    """Return the ``load`` of a public benchmark, whose splits have sources.

    Rows are read from ``$GCPO_DATA_DIR/<folder>/<split>.jsonl`` if the variable is set, else from the Hub at
    ``revision``, and checked with the record class of the source; ``keep`` says whether a row belongs to a split. Rows
    come in the order of a hash of the seed and their id, so the first ``limit`` rows (at most; ``None``: all) are the
    same in either source and lie within those of any larger limit. A repeated id is numbered ("id-2"). Gold answers of
    mathematics take long to try: a row with one that no answer can equal is malformed where it would be chosen, which
    ``choose`` says of rows in order and a function that tries one.
    ``source["revision"]`` is the resolved commit of a Hub data set, ``None`` if the Hub does not tell it;
    ``source["cut"]`` counts rows whose context was cut.

    The function raises ``ValueError`` for a split that is not there, with those that are, or if there is no row;
    ``MalformedRowError`` naming file, line and field for a malformed row (with ``skip_malformed`` it is left out and
    counted in ``source["skipped"]`` instead); ``FileNotFoundError`` listing what there is for a missing file; and
    ``OSError`` if the Hub's data set cannot be read.
    """

    def load(
        split: str, *, limit: int | None, seed: int = 0, revision: str | None = None, skip_malformed: bool = False
    ) -> Split:
        if split not in sources:
            known = ", ".join(f"{name} ({source.dataset}, {source.split})" for name, source in sources.items())
            raise ValueError(f"there is no split {split!r} here: {known}. A run without it says so: *_limit 0.")
        name = f"{sources[split].folder}/{sources[split].split}"
        parts = [(source, *_records(source, revision)) for source in (sources[split], *sources[split].more)]
        origin, *others = (found for _, _, found in parts)
        rows: dict[str, Row] = {}
        places: dict[str, str] = {}
        skipped = 0

        def tried(read: Callable[..., list[Row]], *of: Any) -> list[Row]:
            nonlocal skipped
            try:
                return read(*of)
            except MalformedRowError:
                if not skip_malformed:
                    raise
                skipped += 1
                return []

        for source, where, record in ((source, *one) for source, records, _ in parts for one in records):
            for row in tried(_rows, source, where, record):
                if keep(split, row):
                    numbered = itertools.chain([row.id], (f"{row.id}-{number}" for number in itertools.count(2)))
                    unique = next(name for name in numbered if name not in rows)
                    rows[unique], places[unique] = replace(row, id=unique), where
        usable = choose(lambda row: bool(tried(_graded, places[row.id], row)), in_order(rows.values(), seed))
        chosen = tuple(itertools.islice(usable, limit))
        if not chosen:
            raise ValueError(f"{name} has no usable row ({skipped} malformed rows skipped)")
        counts = {"skipped": skipped, "cut": sum(row.cut for row in chosen)}
        return Split(chosen, origin | ({"more": others} if others else {}) | counts)

    return load


def in_order(rows: Iterable[Row], seed: int) -> tuple[Row, ...]:
    """Return rows in the order of a hash of the seed and their id."""
    return tuple(sorted(rows, key=lambda row: seeds.place(seed, row.id)))


def _rows(source: Source, where: str, record: Any) -> list[Row]:
    try:
        return source.record.of(_decode(record) if isinstance(record, bytes) else record).rows()
    except MalformedRowError as error:
        way = "Repair the row, or set skip_malformed: true, which leaves such rows out and counts them."
        raise MalformedRowError(f"{where}: {error}. {way}") from None


def _graded(where: str, row: Row) -> list[Row]:
    """Return a row, if an answer can be right; ``MalformedRowError`` otherwise."""
    try:
        if row.mathematics:
            read_gold(row.references[0])
    except ValueError as error:
        raise MalformedRowError(f"{where}, id {row.id!r}: {error}, as skip_malformed: true does") from None
    return [row]


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedRowError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise MalformedRowError(f"a JSON {type(record).__name__}, not an object with fields")
    return record


def _records(source: Source, revision: str | None, whole: bool = True) -> tuple[Records, dict[str, Any]]:
    folder = os.environ.get(DATA_DIR)
    return _from_folder(Path(folder), source) if folder else _from_hub(source, revision or source.revision, whole)


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


def _from_hub(source: Source, revision: str | None, whole: bool) -> tuple[Records, dict[str, Any]]:
    import huggingface_hub

    dataset, config, split = source.dataset, source.config, source.split
    commit: str | None = None
    with contextlib.suppress(Exception):  # the HTTP library's own errors included; a cached data set can still be read
        commit = huggingface_hub.dataset_info(dataset, revision=revision).sha
    origin = {"dataset": dataset, "config": config, "split": split, "requested": revision, "revision": commit}
    return _hub_records(source, commit or revision, whole), origin


def hub_records(source: Source, revision: str | None = None) -> Records:
    """Yield the records of a split on the Hub as they come, each with its place; raises ``OSError`` as a
    :func:`reader`."""
    return _hub_records(source, revision or source.revision, whole=False)


def _hub_records(source: Source, revision: str | None, whole: bool) -> Records:
    """Yield the records of a split on the Hub; unless ``whole`` as they are asked for, without loading the others."""
    import datasets  # slow to import, and not needed by the generated tasks

    dataset, split = source.dataset, source.split
    try:
        if source.columns:
            some = functools.partial(_columns, dataset, source.config, split, revision, source.columns)
            table: Any = datasets.Dataset.from_generator(some) if whole else some()  # the former keeps them on disk
        else:
            table = datasets.load_dataset(dataset, source.config, split=split, revision=revision, streaming=not whole)
        for number, record in enumerate(table, 1):
            yield f"{dataset} ({split}), row {number}", record
    except Exception as error:  # of many libraries: the Hub's, those of HTTP, and what files are read with
        raise OSError(
            f"{dataset} ({split}) could not be read from the Hub: {_cause(error)}. Without the Hub, set {DATA_DIR} to "
            f"a folder that has {source.folder}/{split}.jsonl in the same fields; for another revision, data_revision "
            f"({CONVERTED} has the Hub's own conversion to parquet files); for a gated data set, HF_TOKEN."
        ) from error


def _columns(
    dataset: str, config: str | None, split: str, revision: str | None, columns: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the records of a split's parquet files on the Hub with some columns alone: only their bytes are loaded."""
    import huggingface_hub
    from pyarrow.parquet import ParquetFile

    files = huggingface_hub.HfFileSystem()
    pattern = f"datasets/{dataset}@{(revision or 'main').replace('/', '%2F')}/{config or 'data'}/{split}-*.parquet"
    paths = files.glob(pattern)
    if not paths:
        raise FileNotFoundError(f"there is no {pattern}")
    for path in paths:
        with files.open(path, cache_type="none") as file:
            for batch in ParquetFile(file, pre_buffer=True).iter_batches(columns=list(columns)):
                yield from batch.to_pylist()


def _cause(error: BaseException) -> str:
    """Return an error's first cause in one line."""
    while error.__cause__:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
