"""OpenR1-Math's stable 10k: EGPO's training problems (Hub: open-r1/OpenR1-Math-220k), tested on MATH-500.

Built by EGPO's App. A.2 as far as it is written. A problem needs at least two generations, of which Math-Verify found
one right: then its box agrees with the answer. It is "mixed" if one is wrong too, else "entirely correct". Its answer
is one value, its text has 4,096 characters at most (the paper: 1,024 tokens), and no earlier problem is a near
duplicate of it, by MinHash. 85 % are of the configuration default and 15 % of extended, of each 60 % mixed, 10,000 in
all; 128 of them are the validation split. How many generations and tokens of a solution the paper asked for is
lost from its text. Of its decontamination, which it calls optional, equal questions alone are refused.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gcpo.tasks import math
from gcpo.tasks.base import Row, Split, math_row, math_task
from gcpo.tasks.reading import Anything, Rows, Source, Text, fields, in_order, reader

POOL, VALIDATION = 10_000, 128
SHARES = {"default-mixed": 0.51, "default-correct": 0.34, "extended-mixed": 0.09, "extended-correct": 0.06}
"""Shares of the pool, by how ids begin: 0.85 and 0.15 of the configurations, of each 0.6 and 0.4 of the buckets."""

LONGEST = 4096
"""Characters of a problem; 1,024 tokens at the four characters a token that English has."""

SEVERAL = re.compile(r"[,;]\s|\\pm|\\text\s*{\s*(?:and|or)\b|\b(?:and|or)\b")
"""What tells several values in an answer."""

BANDS, ROWS = 9, 13
"""Of hashes: 117 of the paper's 128, by which a pair of similarity 0.82 is found half of the time."""

_FACTORS = np.random.default_rng(0).integers(1, 2**61 - 1, (2, BANDS * ROWS), dtype=np.uint64) | np.uint64(1)


def rows_of(subset: str) -> Rows:
    """Return the function that makes the problem of a record of a configuration, with an id that begins with its bucket
    if it belongs to one."""

    @fields
    def rows(
        uuid: Text, problem: Text, answer: Anything, correctness_math_verify: list[bool | None] | None
    ) -> list[Row]:
        right = correctness_math_verify or []
        single = answer.strip() and not SEVERAL.search(answer.strip())
        if len(right) < 2 or not any(right) or not single or len(problem) > LONGEST:
            return []
        return [math_row(f"{subset}-{'correct' if all(right) else 'mixed'}-{uuid}", problem, answer.strip())]

    return rows


READ = ("uuid", "problem", "answer", "correctness_math_verify")  # the generations are most of 10 GB
_HUB = Source(rows_of("default"), "openr1", "train", "open-r1/OpenR1-Math-220k", columns=READ)
_MORE = replace(_HUB, rows=rows_of("extended"), folder="openr1_extended", config="extended")
_TRAIN = replace(_HUB, more=(_MORE,))
SPLITS = {"train": _TRAIN, "validation": _TRAIN, "test": math.SPLITS["test"]}


def signature(text: str) -> list[bytes]:
    """Return the bands of a text's MinHash, over its words in lower case."""
    found = {word: hashlib.sha256(word.encode()).digest()[:8] for word in re.findall(r"\w+", text.lower())}
    hashes = np.array([int.from_bytes(value) for value in found.values()] or [0], dtype=np.uint64)
    with np.errstate(over="ignore"):  # modulo 2**64
        lowest = (hashes[:, None] * _FACTORS[0] + _FACTORS[1]).min(axis=0)
    return [band.tobytes() for band in lowest.reshape(BANDS, ROWS)]


def pool(usable: Callable[[Row], bool], rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the usable rows that fill the shares of :data:`POOL`, without near duplicates of earlier ones."""
    left = {start: round(share * POOL) for start, share in SHARES.items()}
    seen: set[tuple[int, bytes]] = set()
    for row in rows:
        start = "-".join(row.id.split("-")[:2])
        if left[start]:
            bands = {*enumerate(signature(row.parts["problem"]))}
            if not bands & seen:
                if not usable(row):
                    continue
                left[start] -= 1
                yield row
            seen |= bands


_read, _pool = reader(SPLITS), reader(SPLITS, choose=pool)


def load(split: str, *, limit: int | None, seed: int = 0, **how: Any) -> Split:
    """Return rows of a split, as :func:`gcpo.tasks.reading.reader` has it; the pool does not depend on the seed."""
    if split not in ("train", "validation"):
        return _read(split, limit=limit, seed=seed, **how)
    found = _pool(split, limit=None, **how)
    held_out = len(found.rows) * VALIDATION // POOL
    rows = in_order(found.rows[:held_out] if split == "validation" else found.rows[held_out:], seed)[:limit]
    if not rows:
        raise ValueError(f"openr1/{split} is empty: the {len(found.rows)} problems here are too few for it")
    return Split(rows, found.source)


TASK = math_task("openr1", load)
