"""The ledger: claims as declared, verdicts as notebooks reached them, and what they come to."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

from gcpo import io, paths
from gcpo.reports import ledger, records
from gcpo.reports.claims import MIME
from gcpo.runs.params import ParameterError, yaml_text
from gcpo.runs.runner import execute

CLAIM = {
    "id": "gcpo-one",
    "paper": "gcpo",
    "place": "Eq. 1",
    "quote": "more is better",
    "scope": "theorem",
    "checks": ["01: more", "21: most"],
}


def declared(folder: Path, *entries: Any) -> list[ledger.Claim]:
    path = folder / "claims.yaml"
    path.write_text(yaml_text([*entries]))
    return ledger.claims(path)


def notebook(path: Path, *verdicts: tuple[str, str, str]) -> None:
    """An executed notebook with verdicts of (place, claim, word)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    outputs = [
        nbformat.v4.new_output(
            "display_data", {MIME: {"source": place, "claim": claim, "verdict": word, "because": "By 1."}}
        )
        for place, claim, word in verdicts
    ]
    cells = [nbformat.v4.new_markdown_cell("text"), nbformat.v4.new_code_cell("", outputs=outputs)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


# --- what is declared -----------------------------------------------------------------------------------------------

WRONG = {
    "no list": ({"a": 1}, "expected a list of claims, got dict"),
    "no mapping": (["a"], "claim 1: expected a mapping, got 'a'"),
    "an unknown key": ([{**CLAIM, "chekcs": []}], r"claim 1 \(gcpo-one\): chekcs: no such key. Did you mean 'checks'"),
    "a key missing": ([{"id": "x", "paper": "gcpo"}], r"claim 1 \(x\): place, quote, scope, checks missing"),
    "an unknown paper": ([{**CLAIM, "paper": "gpco"}], "paper: no such one as 'gpco'. Did you mean 'gcpo'"),
    "an unknown scope": ([{**CLAIM, "scope": "theory"}], "scope: no such one as 'theory'. Did you mean 'theorem'"),
    "a long quote": ([{**CLAIM, "quote": "word " * 26}], "the quote has 26 words, 25 at most"),
    "checks as text": ([{**CLAIM, "checks": "01: more"}], "checks: expected a list of names of verdicts"),
    "an id twice": ([CLAIM, CLAIM], "gcpo-one: two claims have this id"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_claims_that_are_none_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    entries, message = WRONG[fault]
    path = tmp_path / "claims.yaml"
    path.write_text(yaml_text(entries))
    with pytest.raises(ParameterError, match=message) as raised:
        ledger.claims(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_the_ledger_has_claims_of_every_paper_and_their_checks_exist() -> None:
    claims = ledger.claims()
    assert {claim.paper for claim in claims} == set(ledger.PAPERS)
    assert sum(bool(claim.checks) for claim in claims) >= 60
    assert all(claim.checks or claim.note or claim.scope == "real model" for claim in claims)
    assert ledger.unknown(claims, ledger.reached(ledger.executed("laptop", reference=True))) == []


@pytest.mark.skipif("GCPO_PAPERS_DIR" not in os.environ, reason="needs GCPO_PAPERS_DIR, a folder with the papers' text")
@pytest.mark.parametrize("paper", ledger.PAPERS)
def test_every_quote_is_the_papers_words(paper: str) -> None:
    def plain(text: str) -> str:
        """Letters and digits alone: extraction breaks lines, words and mathematics in its own ways."""
        return re.sub(r"[\W_]+", "", text.replace("\\", "")).lower()

    text = plain((Path(os.environ["GCPO_PAPERS_DIR"]) / f"{paper.replace('_', '-')}.txt").read_text())
    for claim in ledger.claims():
        if claim.paper == paper:
            for part in claim.quote.split(" ... "):
                assert plain(part) in text, f"{claim.id}: {part}"


# --- what was found -------------------------------------------------------------------------------------------------


def test_verdicts_are_read_from_outputs_and_a_claim_is_as_good_as_its_worst_check(tmp_path: Path) -> None:
    notebook(tmp_path / "01_a.ipynb", ("Eq. 1", "more", "holds"))
    notebook(tmp_path / "21_b.ipynb", ("Eq. 1, tinyqa", "most", "holds"), ("Eq. 1, tinymath", "most", "cannot tell"))
    found = ledger.reached(sorted(tmp_path.glob("*.ipynb")))
    assert found["check"].tolist() == ["01: more", "21: most", "21: most"]
    claims = declared(tmp_path, CLAIM, {**CLAIM, "id": "two", "checks": ["01: more"]})
    table = ledger.ledger(claims, found).set_index("id")
    assert table["verdict"].to_dict() == {"gcpo-one": "cannot tell", "two": "holds"}
    assert table.loc["gcpo-one", "because"] == (
        "01: more (Eq. 1): holds. By 1. / 21: most (Eq. 1, tinyqa): holds. By 1. / "
        "21: most (Eq. 1, tinymath): cannot tell. By 1."
    )


def test_what_was_found_is_that_of_the_deciding_checks_with_the_words_of_the_others(tmp_path: Path) -> None:
    notebook(tmp_path / "01_a.ipynb", ("Eq. 1", "more", "holds"))
    notebook(tmp_path / "21_b.ipynb", ("Eq. 1, tinyqa", "most", "holds"), ("Eq. 1, tinymath", "most", "cannot tell"))
    found = ledger.reached(sorted(tmp_path.glob("*.ipynb")))
    none = {**CLAIM, "id": "none", "checks": [], "scope": "real model"}
    table = ledger.ledger(declared(tmp_path, CLAIM, none), found).set_index("id")
    words = "Eq. 1, tinymath: By 1. But Eq. 1, more: holds. But Eq. 1, tinyqa, most: holds."
    assert table["found"].to_dict() == {"gcpo-one": words, "none": ""}
    assert table["notebook"].to_dict() == {"gcpo-one": "21_b", "none": ""}
    assert ledger.shown(table).columns.tolist() == ["scope", "place", "quote", "verdict", "because", "note"]
    assert ledger.shown(table.iloc[::-1])["scope"].tolist() == ["theorem", "real model"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["holds", "does not hold", "not tested"], "does not hold"),
        (["holds", "not tested", "effect excluded"], "not tested"),
        (["holds", "effect excluded", "cannot tell"], "effect excluded"),
        (["holds", "holds"], "holds"),
    ],
)
def test_the_words_of_checks_have_an_order(words: list[str], expected: str, tmp_path: Path) -> None:
    notebook(tmp_path / "01_a.ipynb", *((f"task {n}", "more", word) for n, word in enumerate(words)))
    claims = declared(tmp_path, {**CLAIM, "checks": ["01: more"]})
    table = ledger.ledger(claims, ledger.reached([tmp_path / "01_a.ipynb"]))
    assert table["verdict"].tolist() == [expected]


def test_a_check_that_was_not_reached_is_not_tested_and_one_that_does_not_exist_is_named(tmp_path: Path) -> None:
    notebook(tmp_path / "01_a.ipynb", ("Eq. 1", "more", "holds"))
    found = ledger.reached([tmp_path / "01_a.ipynb"])
    without = {**CLAIM, "checks": [], "scope": "real model"}
    claims = declared(tmp_path, CLAIM, {**without, "id": "real"}, {**without, "id": "later", "note": "It needs it."})
    table = ledger.ledger(claims, found)
    assert table["verdict"].tolist() == ["not tested"] * 3
    assert "21: most: not executed on these runs" in table["because"][0]
    assert table["because"].tolist()[1:] == ["No check decides it."] * 2 and table["note"][2] == "It needs it."
    assert ledger.unknown(claims, found) == [
        "gcpo-one: no notebook gives the verdict '21: most'. Did you mean '01: more'?"
    ]


def test_no_claim_of_a_paper_is_decided_by_a_reading_of_ours() -> None:
    found = ledger.reached(sorted(paths.NOTEBOOKS.glob("*.ipynb")))
    own = set(found.loc[found["source"].str.match(r"(?i)(varied|ours|our)\b"), "check"])
    assert own and {check for claim in ledger.claims() for check in claim.checks} & own == set()


def test_verdicts_of_reports_are_those_of_the_runs_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOTEBOOKS", "OUTPUTS", "REFERENCE"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    for name in ("01_a", "21_b", "90_claims"):
        notebook(paths.NOTEBOOKS / f"{name}.ipynb")
    read, committed = paths.NOTEBOOKS / "01_a.ipynb", paths.NOTEBOOKS / "21_b.ipynb"
    assert ledger.executed("p", reference=True) == [read, committed]
    assert ledger.executed("p") == [read]  # never the reference's in place of one's own
    own = paths.OUTPUTS / "p" / "reports" / "21_b.ipynb"
    notebook(own)
    assert ledger.executed("p") == [read, own]
    notebook(paths.REFERENCE / "21_b.ipynb")  # as while it is published
    assert ledger.executed("p", reference=True) == [read, paths.REFERENCE / "21_b.ipynb"]


def test_counts_have_a_row_per_paper_and_a_column_per_word() -> None:
    table = pd.DataFrame(
        {"paper": ["GCPO", "EGPO", "GCPO"], "verdict": ["holds", "not tested", "does not hold"], "scope": "toy"}
    )
    found = ledger.counts(table)
    assert list(found) == ["paper", "holds", "does not hold", "not tested", "claims"]
    assert found.to_numpy().tolist() == [["GCPO", 1, 1, 0, 2], ["EGPO", 0, 0, 1, 1]]
    assert ledger.counts(table, "scope")["claims"].tolist() == [3]


@pytest.mark.slow
def test_claims_flip_when_records_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCPO is made perfect on one task and useless on the other, in the reference's own tables."""
    reference = tmp_path / "reference" / "laptop"
    shutil.copytree(paths.REFERENCE / "laptop", reference)
    runs = records.find("laptop", "table1", reference=True)
    scores = pd.read_parquet(reference / "eval.parquet")
    for task, metric, score in (("tinyqa", "f1", 1.0), ("tinymath", "accuracy", 0.0)):
        own = runs.loc[(runs["task"] == task) & runs["method"].isin(["gcpo_cd", "gcpo_bot"]), "id"]
        scores.loc[scores["run"].isin(own), metric] = score
    scores.to_parquet(reference / "eval.parquet", index=False)
    io.seal(reference)
    monkeypatch.setenv("GCPO_REFERENCE", str(reference.parent))
    execute("21_table1", tmp_path / "21_table1.ipynb", {})
    committed = next(paths.NOTEBOOKS.glob("21_*.ipynb"))
    before, after = (
        ledger.reached([path]).set_index(["claim", "source"])["verdict"]
        for path in (committed, tmp_path / "21_table1.ipynb")
    )
    assert (before != after).sum() >= 3
    flipped = after["GCPO beats RD alone"]
    assert flipped.filter(like="tinyqa").tolist() == ["holds"] and flipped.filter(like="tinymath").tolist() == [
        "does not hold"
    ]
