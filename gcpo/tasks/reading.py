"""Rows of public benchmarks: from a folder or the Hub, checked field by field, in an order that the seed decides."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, validate_call

from gcpo import io, seeds
from gcpo.mathematics import read_gold
from gcpo.rewards import boxed_answer
from gcpo.tasks.base import DATA_DIR, Row, Split, math_row

CONVERTED = "refs/convert/parquet"
"""Revision under which the Hub keeps a data set that it has converted to parquet files."""

GENERATED = "generated"
"""The revision of rows that are made up where a benchmark is not at hand."""

STRICT = ConfigDict(strict=True, frozen=True)
Anything = Annotated[str, StringConstraints(pattern="")]  # a pattern makes pydantic refuse what is not Unicode
Text = Annotated[str, StringConstraints(pattern=r"[^\s\x1c-\x1f]")]  # not blank

Records = Iterator[tuple[str, Any]]  # each with its place; lines of a file as bytes
Rows = Callable[[dict[str, Any]], list[Row]]  # from a record to its questions
Choose = Callable[[Callable[[Row], bool], Iterable[Row]], Iterable[Row]]  # which of the rows that can be used


class MalformedRowError(ValueError):
    """A row of a benchmark lacks a field, or a field has a wrong value."""


class Fields(BaseModel):
    """Fields of a part of a record, with strict types; there may be others."""

    model_config = STRICT


def fields(rows: Callable[..., list[Row]]) -> Rows:
    """Make a function of fields, whose annotations say what they may be, one of a record, which may have others.

    It raises ``MalformedRowError`` that names the first wrong field, its value and what it should be.
    """
    names, checked = inspect.signature(rows).parameters, validate_call(config=STRICT)(rows)

    @functools.wraps(rows)
    def of(record: dict[str, Any]) -> list[Row]:
        try:
            return checked(**{name: record[name] for name in names if name in record})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = {"string_pattern_mismatch": "it should not be blank"}.get(first["type"], first["msg"])
            said = "missing" if "missing" in first["type"] else f"{reprlib.repr(first['input'])}: {why}"
            raise MalformedRowError(f"field {'.'.join(map(str, first['loc']))!r} is {said}") from None

    return of


@dataclass(frozen=True)
class Source:
    """Place of a split: its folder below ``$GCPO_DATA_DIR``, its name there and on the Hub, and the Hub's data set,
    configuration and revision; ``rows`` makes questions of a record. ``columns``: those to load, of parquet files whose
    others are large. ``more``: where the rest of the split's records is."""

    rows: Rows
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


def boxed_gold(solution: str) -> str:
    """Return the boxed answer of a solution; ``MalformedRowError`` without one."""
    if (answer := boxed_answer(solution)) is None:
        raise MalformedRowError("field 'solution' has no closed \\boxed{...} that is not empty")
    return answer


def text_id(text: str) -> str:
    """Return an id for a row of a data set that numbers none: 12 digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def reader(sources: Mapping[str, Source], choose: Choose = filter, rows: Rows | None = None) -> Callable[..., Split]:
    """Return the ``load`` of a public benchmark, whose splits have sources; ``rows`` takes the place of all of theirs.

    Rows are read from ``$GCPO_DATA_DIR/<folder>/<split>.jsonl`` if the variable is set, else from the Hub at
    ``revision``. They come in the order of a hash of the seed and their id, so the first ``limit`` rows (at most;
    ``None``: all) are the same in either source and lie within those of any larger limit. A repeated id is numbered
    ("id-2"). Gold answers of mathematics take long to try: a row with one that no answer can equal is malformed where
    it would be chosen, which ``choose`` says of rows in order and a function that tries one.
    ``source["revision"]`` is the resolved commit of a Hub data set, ``None`` if the Hub does not tell it;
    ``source["cut"]`` counts rows whose context was cut.

    The function raises ``ValueError`` for a split that is not there, with those that are, or if there is no row;
    ``MalformedRowError`` naming file, line and field for a malformed row (with ``skip_malformed`` it is left out and
    counted in ``source["skipped"]`` instead); ``FileNotFoundError`` listing what there is for a missing file; and
    ``OSError`` if the Hub's data set cannot be read.
    """
    if rows:
        sources = {name: replace(source, rows=rows) for name, source in sources.items()}

    def load(
        split: str, *, limit: int | None, seed: int = 0, revision: str | None = None, skip_malformed: bool = False
    ) -> Split:
        if split not in sources:
            known = ", ".join(f"{name} ({source.dataset}, {source.split})" for name, source in sources.items())
            raise ValueError(f"there is no split {split!r} here: {known}. A run without it says so: *_limit 0.")
        at_hand = (one.file(os.environ.get(DATA_DIR, "")).is_file() for one in (sources[split], *sources[split].more))
        if revision == GENERATED and not all(at_hand):
            return generated(f"{sources[split].folder}, {split}", limit)
        found: dict[str, Row] = {}
        places: dict[str, str] = {}
        origins: list[dict[str, Any]] = []
        skipped: list[MalformedRowError] = []

        def tried(read: Callable[..., list[Row]], *of: Any) -> list[Row]:
            try:
                return read(*of)
            except MalformedRowError as error:
                if not skip_malformed:
                    raise
                skipped.append(error)
                return []

        for source in (sources[split], *sources[split].more):
            records, origin = _records(source, revision)
            origins.append(origin)
            for where, record in records:
                for row in tried(_rows, source, where, record):
                    numbered = itertools.chain([row.id], (f"{row.id}-{number}" for number in itertools.count(2)))
                    unique = next(name for name in numbered if name not in found)
                    found[unique], places[unique] = replace(row, id=unique), where
        usable = choose(lambda row: bool(tried(_graded, places[row.id], row)), in_order(found.values(), seed))
        chosen = tuple(itertools.islice(usable, limit))
        if not chosen:
            name = f"{sources[split].folder}/{sources[split].split}"
            raise ValueError(f"{name} has no usable row ({len(skipped)} malformed rows skipped)")
        more = {"more": origins[1:]} if origins[1:] else {}
        return Split(chosen, origins[0] | more | {"skipped": len(skipped), "cut": sum(row.cut for row in chosen)})

    return load


def generated(name: str, limit: int | None) -> Split:
    """Return a hundred sums in the place of a split that is not at hand: for rehearsals, of which no number counts."""
    rows = tuple(math_row(str(n), f"Sum {n} of {name}: what is {n} + {n}?", str(2 * n)) for n in range(100)[:limit])
    return Split(rows, {"dataset": GENERATED, "split": name, "skipped": 0, "cut": 0})


def in_order(rows: Iterable[Row], seed: int) -> tuple[Row, ...]:
    """Return rows in the order of a hash of the seed and their id."""
    return tuple(sorted(rows, key=lambda row: seeds.place(seed, row.id)))


def _rows(source: Source, where: str, record: Any) -> list[Row]:
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
        if not isinstance(record, dict):
            raise MalformedRowError(f"{reprlib.repr(record)} is not an object with fields")
        return source.rows(record)
    except (ValueError, RecursionError) as error:
        said = error if isinstance(error, MalformedRowError) else f"not JSON ({error})"
        way = "Repair the row, or set skip_malformed: true, which leaves such rows out and counts them."
        raise MalformedRowError(f"{where}: {said}. {way}") from None


def _graded(where: str, row: Row) -> list[Row]:
    """Return a row, if an answer can be right; ``MalformedRowError`` otherwise."""
    try:
        if row.mathematics:
            read_gold(row.references[0])
    except ValueError as error:
        raise MalformedRowError(f"{where}, id {row.id!r}: {error}, as skip_malformed: true does") from None
    return [row]


def _records(source: Source, revision: str | None) -> tuple[Records, dict[str, Any]]:
    """Return the records of a source, and where they come from as a run record keeps it."""
    if folder := os.environ.get(DATA_DIR):
        path = source.file(folder)
        if not path.is_file():
            files = sorted(file.relative_to(folder).as_posix() for file in Path(folder).glob("*/*.jsonl"))
            found = ", ".join(file for file in files if file.startswith(f"{source.folder}/")) or ", ".join(files)
            raise FileNotFoundError(
                f"{path} does not exist. {DATA_DIR}={folder} has {found or 'no <benchmark>/<split>.jsonl'}. "
                f"Choose another split, add the file, or unset {DATA_DIR} to read the Hub."
            )
        name = path.relative_to(folder).as_posix()
        return _lines(path), {"dataset": source.folder, "split": source.split, "file": name, "sha256": io.sha256(path)}
    import huggingface_hub

    commit, revision = None, revision or source.revision
    with contextlib.suppress(Exception):  # the HTTP library's own errors included; a cached data set can still be read
        commit = huggingface_hub.dataset_info(source.dataset, revision=revision).sha
    origin = {"dataset": source.dataset, "config": source.config, "split": source.split}
    return _hub_records(source, commit or revision), origin | {"requested": revision, "revision": commit}


def _lines(path: Path) -> Records:
    """Yield the lines that are not blank, each with its place; one at a time, as they can be hundreds of MB."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def _hub_records(source: Source, revision: str | None) -> Records:
    """Yield the records of a split on the Hub, each with its place; raises ``OSError`` as a :func:`reader`."""
    import datasets  # slow to import, and not needed by the generated tasks

    dataset, split = source.dataset, source.split
    try:
        if source.columns:
            which = (dataset, source.config or "data", split, revision or "main", [*source.columns])
            some = functools.partial(_columns, *which)  # of these alone, by which its cache is known
            table: Any = datasets.Dataset.from_generator(some)  # keeps them on disk
        else:
            table = datasets.load_dataset(dataset, source.config, split=split, revision=revision)
        for number, record in enumerate(table, 1):
            yield f"{dataset} ({split}), row {number}", record
    except Exception as error:  # of many libraries: the Hub's, those of HTTP, and what files are read with
        first = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        why = " ".join(f"{type(first).__name__}: {first}".split()).rstrip(": .")
        raise OSError(
            f"{dataset} ({split}) could not be read from the Hub: {why}. Without the Hub, set {DATA_DIR} to a folder "
            f"that has {source.folder}/{split}.jsonl in the same fields; for another revision, data_revision "
            f"({CONVERTED} has the Hub's own conversion to parquet files); for a gated data set, HF_TOKEN."
        ) from error


def _columns(dataset: str, folder: str, split: str, revision: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a split's parquet files on the Hub with some columns alone: only their bytes are loaded."""
    import huggingface_hub
    from pyarrow.parquet import ParquetFile

    files = huggingface_hub.HfFileSystem()
    pattern = f"datasets/{dataset}@{revision.replace('/', '%2F')}/{folder}/{split}-*.parquet"
    if not (paths := files.glob(pattern)):
        raise FileNotFoundError(f"there is no {pattern}")
    for path in paths:
        with files.open(path, cache_type="none") as file:
            for batch in ParquetFile(file, pre_buffer=True).iter_batches(columns=columns):
                yield from batch.to_pylist()
