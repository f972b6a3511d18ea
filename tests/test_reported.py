"""The papers' tables as data: cells copied from the papers once more, and each row held against their text."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import gcpo
from gcpo import io
from gcpo.reports import tables

FOLDER = Path(gcpo.__file__).with_name("reported")
IDENTIFYING = ["method", "label", "model", "task", "metric", "measure", "setting"]

GOLDEN = Path(__file__).with_name("golden") / "reported"
# A changed number changes its file's checksum: look it up in the paper again before you change the checksum too.
SHA256 = dict(reversed(line.split()) for line in (GOLDEN / "SHA256SUMS").read_text().splitlines())
TABLES = [name.removesuffix(".csv") for name in SHA256]
# Read in the papers' texts, not in the files: words that identify a number, and the number as printed there.
SPOTS = pd.read_csv(GOLDEN / "cells.csv", dtype=str)


def read(name: str) -> pd.DataFrame:
    """A file as it is, every cell a string."""
    return pd.read_csv(FOLDER / f"{name}.csv", dtype=str, keep_default_na=False)


def identifying(table: pd.DataFrame) -> list[str]:
    return [column for column in IDENTIFYING if column in table]


def select(address: str) -> pd.DataFrame:
    """The rows of "table: word|word" that have each word in one of their identifying columns."""
    name, _, words = address.partition(": ")
    table = read(name)
    for word in words.split("|"):
        table = table[(table[identifying(table)] == word).any(axis=1)]
    return table


# --- the files ------------------------------------------------------------------------------------------------------


def test_every_table_has_its_checksum_and_its_spots() -> None:
    assert io.hashes(FOLDER) == SHA256
    assert set(SPOTS["table"]) == set(TABLES) and SPOTS["table"].value_counts().ge(4).all()


@pytest.mark.parametrize("name", TABLES)
def test_cells_are_as_the_paper_prints_them(name: str) -> None:
    for spot in SPOTS[SPOTS["table"] == name].itertuples():
        found = select(f"{name}: {spot.words}")
        printed = found["value"] + ("±" + found["spread"]).where(found["spread"] != "", "")
        assert printed.tolist() == [spot.printed], spot.words


IN_SENTENCES = {"gcpo_table5", "egpo_appendix_a2", "egpo_appendix_a3"}


@pytest.mark.skipif("GCPO_PAPERS_DIR" not in os.environ, reason="needs GCPO_PAPERS_DIR, a folder with the papers' text")
@pytest.mark.parametrize("name", sorted({*TABLES} - IN_SENTENCES))
def test_every_row_stands_in_the_papers_text(name: str) -> None:
    """Letters and digits alone are compared: what parts the columns, and a minus, differs from text to text."""
    paper = name.rpartition("_")[0].replace("_", "-")
    text = (Path(os.environ["GCPO_PAPERS_DIR"]) / f"{paper}.txt").read_text()
    text = re.sub(r"\[([^\]]*)\]\(http[^)]*\)", r"\1", text)  # links
    text = re.sub(r"\\([^a-zA-Z])", r"\1", text.replace(r"\alpha", "α"))
    text = re.sub(r"</?\w+>|\\[a-zA-Z]+|\([A-Z][^()]*\d{4}[a-z]?\)|\(Avg@32\)", "", text)  # tags, commands, citations
    text = re.sub(r"[^\w.]", "", text)
    table = read(name)
    table = table[~table["value"].str.contains("e")].copy()  # a power of ten is written in LaTeX
    table["cell"] = table["value"].str.lstrip("-") + table["unit"].map({"thousands": "k"}).fillna("") + table["spread"]
    row = [column for column in ("method", "label", "model", "setting") if column in table]
    for key, cells in itertools.groupby(table.to_dict("records"), key=lambda line: [line[column] for column in row]):
        line = list(cells)
        printed = [re.sub(r"[^\w.]", "", part) for part in (line[0]["label"], "".join(c["cell"] for c in line))]
        assert re.search(r"\D*".join(map(re.escape, printed)), text), key


# --- reading them ---------------------------------------------------------------------------------------------------


def test_a_table_is_read_with_numbers_and_empty_words() -> None:
    first = tables.reported("gcpo_table2").iloc[0]
    assert (first["method"], first["value"], first["copied_from"]) == ("", 61.8, "SEED-GRPO paper, Table 2")
    assert pd.isna(first["spread"])
    assert tables.reported("seed_grpo_table4b")["label"].tolist()[:2] == ["0.01", "0.01"]
    found = tables.paper_means("gcpo_table6", task="narrativeqa", metric="f1")
    assert found == {"qhawkeye": 71.63, "egspo": 71.84, "r2vpo": 72.52, "gcpo_cd": 73.25, "gcpo_bot": 73.82}


@pytest.mark.parametrize(
    ("name", "where", "error", "said"),
    [
        ("gcpo_table1", {"task": "narrativeqa"}, ValueError, "gcpo_table1 has 27 numbers"),
        ("gcpo_table1", {"task": "gsm8k"}, ValueError, "gcpo_table1 has 0 numbers"),
        ("gcpo_table1", {"tsk": "qasper"}, KeyError, "tsk"),
    ],
)
def test_means_that_are_not_one_per_method_are_refused(name: str, where: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        tables.paper_means(name, **where)
