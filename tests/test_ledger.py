"""The ledger: claims as declared, verdicts as notebooks reached them, and what they come to."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gcpo import io, paths
from gcpo.reports import ledger, records
from gcpo.reports.claims import Verdict, Verdicts
from gcpo.runs.profiles import ParameterError, yaml_text
from gcpo.runs.runner import execute

CLAIM = {
    "id": "gcpo-one",
    "paper": "gcpo",
    "place": "Eq. 1",
    "quote": "more is better",
    "kind": "finding",
    "scope": "theorem",
    "checks": ["more", "most"],
}


def declared(folder: Path, *entries: Any) -> list[ledger.Claim]:
    path = folder / "claims.yaml"
    path.write_text(yaml_text([*entries]))
    return ledger.claims(path)


def written(folder: Path, notebook: str, *verdicts: tuple[str, str, str]) -> None:
    """Write the verdicts of a notebook, of (id, place, label); an id is its own heading."""
    found = Verdicts(notebook, "runs of p")
    for check, place, label in verdicts:
        found(check, place, check, Verdict(label, "By 1."))
    found.write(folder)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs and verdicts of the test's own; returns the folder of a profile's reports."""
    for name in ("VERDICTS", "OUTPUTS", "REFERENCE"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    return tmp_path / "outputs" / "p" / "reports"


# --- what is declared -----------------------------------------------------------------------------------------------

WRONG = {
    "no list": ({"a": 1}, "expected a list of claims, got dict"),
    "no mapping": (["a"], r"claim 1: Input should be a valid dictionary .* \(got 'a'\)"),
    "an unknown key": ([{**CLAIM, "chekcs": []}], r"claim 1 \(gcpo-one\): chekcs: no such key. Did you mean 'checks'"),
    "a key missing": ([{"id": "x", "paper": "gcpo"}], r"claim 1 \(x\): place: Field required"),
    "no id": ([{"paper": "gcpo"}], r"claim 1 \(no id\): id: Field required"),
    "an unknown paper": ([{**CLAIM, "paper": "gpco"}], r"paper: Input should be 'gcpo', .* \(got 'gpco'\)"),
    "an unknown scope": ([{**CLAIM, "scope": "theory"}], r"scope: Input should be 'theorem', .* \(got 'theory'\)"),
    "an unknown kind": ([{**CLAIM, "kind": "guess"}], r"kind: Input should be 'finding', .* \(got 'guess'\)"),
    "an unknown subject": (
        [{**CLAIM, "about": "poetry"}],
        "about: Input should be 'question answering' or 'mathematics'",
    ),
    "a long quote": ([{**CLAIM, "quote": "word " * 26}], "quote: the quote has 26 words, 25 at most"),
    "checks as text": ([{**CLAIM, "checks": "more"}], r"checks: Input should be a valid tuple \(got 'more'\)"),
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
    assert ledger.unmatched_checks(claims, ledger.read_verdicts("laptop", reference=True)) == []


def test_a_claim_is_decided_by_the_verdict_of_its_own_id_unless_others_are_named(tmp_path: Path) -> None:
    own = {key: value for key, value in CLAIM.items() if key != "checks"}
    found = declared(tmp_path, own, {**own, "id": "none", "checks": []}, {**CLAIM, "id": "two"})
    assert [claim.checks for claim in found] == [("gcpo-one",), (), ("more", "most")]


def test_an_id_is_of_one_check_in_one_notebook() -> None:
    found = ledger.read_verdicts("laptop", reference=True)
    assert found["id"].str.fullmatch(r"[a-z0-9_.-]+").all()
    checks = found[["id", "notebook", "heading"]].drop_duplicates()
    assert not checks["id"].duplicated().any() and not checks[["notebook", "heading"]].duplicated().any()
    for claim in ledger.claims():  # the verdict with a claim's name decides that claim, and no other
        assert claim.id in claim.checks or claim.id not in set(found["id"])
        assert all(claim.id not in other.checks for other in ledger.claims() if other.id != claim.id)


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


def two_notebooks(folder: Path) -> pd.DataFrame:
    written(folder, "01_a", ("more", "Eq. 1", "holds"))
    written(folder, "21_b", ("most", "Eq. 1, tinyqa", "holds"), ("most", "Eq. 1, tinymath", "inconclusive"))
    return ledger.read_verdicts("p")


def test_verdicts_are_read_as_written_and_a_claim_is_as_good_as_its_worst_check(places: Path, tmp_path: Path) -> None:
    found = two_notebooks(places)
    assert found["id"].tolist() == ["more", "most", "most"]
    claims = declared(tmp_path, CLAIM, {**CLAIM, "id": "two", "checks": ["more"]})
    table = ledger.ledger(claims, found).set_index("id")
    assert table["verdict"].to_dict() == {"gcpo-one": "inconclusive", "two": "holds"}
    assert table.loc["gcpo-one", "because"] == (
        "01: more (Eq. 1): holds. By 1. / 21: most (Eq. 1, tinyqa): holds. By 1. / "
        "21: most (Eq. 1, tinymath): inconclusive. By 1."
    )


def test_other_headings_change_no_verdict_of_the_reference() -> None:
    found = ledger.read_verdicts("laptop", reference=True)
    claims, shown = ledger.claims(), ["because", "found", "brief"]
    before, after = (ledger.ledger(claims, table) for table in (found, found.assign(heading="reworded")))
    assert (before["because"] != after["because"]).sum() > 100
    pd.testing.assert_frame_equal(before.drop(columns=shown), after.drop(columns=shown))


def test_what_was_found_is_that_of_the_deciding_checks_with_the_words_of_the_others(
    places: Path, tmp_path: Path
) -> None:
    none = {**CLAIM, "id": "none", "checks": [], "scope": "real model"}
    table = ledger.ledger(declared(tmp_path, CLAIM, none), two_notebooks(places)).set_index("id")
    words = "By 1. However, more (Eq. 1): holds. However, most (Eq. 1, tinyqa): holds."
    assert table["found"].to_dict() == {"gcpo-one": words, "none": ""}
    assert table["notebook"].to_dict() == {"gcpo-one": "21_b", "none": ""}


@pytest.mark.parametrize(
    ("about", "verdict", "beside"),
    [
        ("question answering", "holds", "tinymath"),
        ("mathematics", "fails", "tinyqa"),
        (None, "fails", None),
    ],
)
def test_a_claim_is_decided_on_the_tasks_that_it_is_about(
    about: str | None, verdict: str, beside: str | None, places: Path, tmp_path: Path
) -> None:
    found = Verdicts("21_b", "runs of p")
    for task, label in (("tinyqa", "holds"), ("tinymath", "fails")):
        found("more", "Eq. 1", "more", Verdict(label, "By 1."), task=task)
    found.write(places)
    claims = declared(tmp_path, {**CLAIM, "checks": ["more"], **({"about": about} if about else {})})
    row = ledger.ledger(claims, ledger.read_verdicts("p")).iloc[0]
    assert row["verdict"] == verdict
    assert ("Beside it, 21: " in row["because"]) == (beside is not None)
    assert beside is None or f"On {beside}, which the paper's sentence is not about: " in row["found"]


def test_a_claim_without_a_verdict_on_its_own_tasks_is_not_tested(places: Path, tmp_path: Path) -> None:
    found = Verdicts("21_b", "runs of p")
    found("more", "Eq. 1", "more", Verdict("holds", "By 1."), task="tinymath")
    found.write(places)
    claims = declared(tmp_path, {**CLAIM, "checks": ["more"], "about": "question answering"})
    assert ledger.ledger(claims, ledger.read_verdicts("p"))["verdict"].tolist() == ["not tested"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["holds", "fails", "not tested"], "fails"),
        (["holds", "not tested", "ruled out"], "ruled out"),
        (["holds", "not tested", "inconclusive"], "not tested"),
        (["holds", "holds"], "holds"),
    ],
)
def test_the_words_of_checks_have_an_order(words: list[str], expected: str, places: Path, tmp_path: Path) -> None:
    written(places, "01_a", *(("more", f"task {n}", word) for n, word in enumerate(words)))
    claims = declared(tmp_path, {**CLAIM, "checks": ["more"]})
    table = ledger.ledger(claims, ledger.read_verdicts("p"))
    assert table["verdict"].tolist() == [expected]


def test_a_check_that_was_not_reached_is_not_tested_and_one_that_does_not_exist_is_named(
    places: Path, tmp_path: Path
) -> None:
    written(places, "01_a", ("more", "Eq. 1", "holds"))
    found = ledger.read_verdicts("p")
    without = {**CLAIM, "checks": [], "scope": "real model"}
    claims = declared(tmp_path, CLAIM, {**without, "id": "real"}, {**without, "id": "later", "note": "It needs it."})
    table = ledger.ledger(claims, found)
    assert table["verdict"].tolist() == ["not tested"] * 3
    assert set(ledger.ledger(ledger.claims(), found.iloc[:0])["verdict"]) == {"not tested"}
    assert "most: not executed on these runs" in table["because"][0]
    assert table["because"].tolist()[1:] == ["No check decides it."] * 2 and table["note"][2] == "It needs it."
    assert ledger.unmatched_checks(claims, found) == ["gcpo-one: no notebook gives the verdict 'most'."]


def test_the_history_of_verdicts_ends_where_the_ledger_is() -> None:
    history = pd.read_csv(paths.VERDICTS.parent / "verdict_history.csv", dtype=str, keep_default_na=False)
    assert set(history["because"]) == {"data", "rule", "wording", "scope"} and (history["old"] != history["new"]).all()
    now = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv").set_index("id")["verdict"]
    last = history.groupby("id")["new"].last()
    gone = last.index.difference(now.index)
    assert last[gone].str.match("dropped|merged into ").all()
    assert last.drop(gone).to_dict() == now[last.index.difference(gone)].to_dict()


def test_no_claim_of_a_paper_is_decided_by_a_reading_of_ours() -> None:
    found = ledger.read_verdicts("laptop", reference=True)
    own = set(found.loc[found["place"].str.match(r"(?i)(varied|ours|our)\b"), "id"])
    assert own and {check for claim in ledger.claims() for check in claim.checks} & own == set()


def test_verdicts_of_reports_are_those_of_the_runs_that_are_asked_for(places: Path) -> None:
    read = Verdicts("01_a")
    read("read", "Eq. 1", "read", True)
    read.write(paths.VERDICTS)
    written(paths.REFERENCE / "p", "21_b", ("committed", "Eq. 1", "holds"))
    assert ledger.read_verdicts("p", reference=True)["id"].tolist() == ["read", "committed"]
    assert ledger.read_verdicts("p")["id"].tolist() == ["read"]  # never the reference's in place of one's own
    written(places, "21_b", ("own", "Eq. 1", "holds"))
    assert ledger.read_verdicts("p")["id"].tolist() == ["read", "own"]


@pytest.mark.parametrize(
    ("read", "a", "b", "word", "found"),
    [
        ("holds", "holds", "holds", "holds", ["By 1.", "In world A: By 1.", "In world B: By 1."]),
        (
            "holds",
            "fails",
            "holds",
            "differs",
            ["In world A: By 1.", "In world B: By 1.", "However, more (Eq. 1): ho"],
        ),
        ("holds", "holds", "not tested", "holds", ["By 1.", "However, most (Eq. 1, tinyqa, world B): not tested."]),
        ("holds", "not tested", "not tested", "not tested", ["However, more (Eq. 1): holds."]),
        ("fails", "holds", "not tested", "fails", ["By 1.", "However, most (Eq. 1, tinyqa, world B): not tested."]),
    ],
)
def test_two_worlds_are_two_answers(
    read: str, a: str, b: str, word: str, found: list[str], places: Path, tmp_path: Path
) -> None:
    written(paths.VERDICTS, "01_a", ("more", "Eq. 1", read))
    for world, label in (("world_a", a), ("world_b", b)):
        written(paths.REFERENCE / world, "21_b", ("most", "Eq. 1, tinyqa", label))
    verdicts = ledger.read_verdicts("p", reference=True)
    (row,) = ledger.ledger(declared(tmp_path, CLAIM), verdicts).to_dict("records")
    worlds = [ledger.overall([read, label]) for label in (a, b)]
    assert (row["verdict"], row["worlds"]) == (word, "world A: {}; world B: {}".format(*worlds))
    assert all(part in row["found"] for part in found) and row["fixed"] == "yes"
    assert ledger.source(verdicts, "p", reference=True) == "reference of profile p and of world A and of world B"
    own = ledger.source(ledger.read_verdicts("p"), "p")
    assert own == "this machine's runs of profile p"  # which has no part in a reference


@pytest.mark.parametrize(("b", "beside"), [("holds", "holds"), ("fails", "holds in world A, fails in world B")])
def test_what_two_worlds_share_is_said_once(b: str, beside: str, places: Path, tmp_path: Path) -> None:
    promise = "Four of five such experiments would say it."
    for world, label in (("world_a", "holds"), ("world_b", b)):
        found = Verdicts("21_b", "runs of p")
        for task, word in (("tinyqa", "holds"), ("tinymath", label)):
            made = Verdict(word, f"By 1. {promise}", brief=f"By {world}.", power=promise)
            found("more", "Eq. 1", "more", made, task=task)
        found.write(paths.REFERENCE / world)
    claims = declared(tmp_path, {**CLAIM, "checks": ["more"], "about": "question answering"})
    (row,) = ledger.ledger(claims, ledger.read_verdicts("p", reference=True)).to_dict("records")
    both = "In world A: By world_a. In world B: By world_b."
    assert row["brief"] == f"{both} {promise} On tinymath, which the paper's sentence is not about: {beside}."


def test_of_several_checks_beside_a_claim_each_is_named(places: Path, tmp_path: Path) -> None:
    for world in ("world_a", "world_b"):
        found = Verdicts("21_b", "runs of p")
        for check, word in (("more", "fails"), ("most", "holds")):
            found(check, "Eq. 1", f"{check} of it", Verdict("holds", "By 1."), task="tinyqa")
            found(check, "Eq. 1", f"{check} of it", Verdict(word, "By 1."), task="tinymath")
        found.write(paths.REFERENCE / world)
    claims = declared(tmp_path, {**CLAIM, "checks": ["more", "most"], "about": "question answering"})
    (row,) = ledger.ledger(claims, ledger.read_verdicts("p", reference=True)).to_dict("records")
    assert "not about: fails (more of it); holds (most of it)." in row["brief"]


LEAST = "The least favourable of 2 comparisons is GCPO-CD minus "
IN_A = "-0.94 points (95 % CI -1.94 to +0.06) in world A"
IN_B = "+0.03 points (95 % CI -0.97 to +1.03) in world B"


@pytest.mark.parametrize(
    ("label", "effect", "rival", "brief"),
    [
        ("ruled out", 1.6, "care", f"{LEAST}CARE: {IN_A} and {IN_B}, where the paper has +1.60."),
        ("ruled out", math.nan, "care", f"{LEAST}CARE: {IN_A} and {IN_B}, where 2 would matter."),
        ("fails", math.nan, "care", f"{LEAST}CARE: {IN_A} and {IN_B}."),
        ("ruled out", 1.6, "se", "In world A: By A. In world B: By B."),  # not the comparison that decided in world A
    ],
)
def test_a_comparison_that_decides_in_both_worlds_is_one_sentence(
    label: str, effect: float, rival: str, brief: str, places: Path, tmp_path: Path
) -> None:
    for world, against, estimate in (("world_a", "care", -0.94), ("world_b", rival, 0.03)):
        made = Verdict(label, "By 1.", estimate, estimate - 1, estimate + 1, effect, subject="gcpo_cd", against=against)
        made = replace(made, level=0.95, unit="points", parts=("a", "b"), brief=f"By {world[-1].upper()}.")
        found = Verdicts("21_b", "runs of p")
        found("more", "Eq. 1", "more", made, task="tinyqa")
        found.write(paths.REFERENCE / world)
    claim = {**CLAIM, "checks": ["more"]}
    (row,) = ledger.ledger(declared(tmp_path, claim), ledger.read_verdicts("p", reference=True)).to_dict("records")
    assert row["brief"] == brief


def test_a_verdict_says_whether_its_rules_are_older_than_its_runs(places: Path, tmp_path: Path) -> None:
    claims = declared(tmp_path, *({**CLAIM, "id": name, "checks": [name]} for name in ("a", "b", "c")))
    written(paths.VERDICTS, "01_a", ("a", "Eq. 1", "holds"))
    written(paths.REFERENCE / "laptop", "20_b", ("b", "Eq. 1", "holds"))
    written(paths.REFERENCE / "world_b", "21_c", ("c", "Eq. 1", "holds"))
    found = ledger.ledger(claims, ledger.read_verdicts("laptop", reference=True)).set_index("id")
    assert found["fixed"].to_dict() == {"a": "", "b": "no", "c": "yes"}
    assert found["worlds"].to_dict() == {"a": "", "b": "", "c": "world B: holds"}


def test_counts_have_findings_first_and_definitions_apart() -> None:
    table = pd.DataFrame(
        {
            "paper": ["GCPO", "EGPO", "GCPO", "GCPO"],
            "verdict": ["holds", "not tested", "fails", "holds"],
            "kind": ["definition", "finding", "finding", "finding"],
            "scope": "toy",
        }
    )
    found = ledger.counts(table)
    assert list(found) == ["kind", "paper", "holds", "fails", "not tested", "claims"]
    assert found.to_numpy().tolist() == [
        ["finding", "GCPO", 1, 1, 0, 2], ["finding", "EGPO", 0, 0, 1, 1], ["definition", "GCPO", 1, 0, 0, 1],
    ]  # fmt: skip
    assert ledger.counts(table, "scope")["claims"].tolist() == [3, 1]


def test_one_in_twenty_verdicts_that_rest_on_an_interval_may_be_wrong(places: Path) -> None:
    found = Verdicts("21_b", "runs of p")
    for level in [0.95] * 30 + [0.99] * 10:  # a family's members are held to more, so that the family errs as often
        found("more", "Eq. 1", "more", Verdict("holds", "By 1.", 1, 0.5, 1.5, level=level))
    found("exact", "Eq. 1", "exact", True)
    found.write(places)
    assert ledger.expected_errors(ledger.read_verdicts("p")) == (40, pytest.approx(2))


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
    shown = {"profile": "laptop", "grid": "table1", "reference": True}
    execute("21_table1", tmp_path / "before.ipynb", {**shown, "write_to": str(tmp_path / "before")})
    scores.to_parquet(reference / "eval.parquet", index=False)
    io.seal(reference)
    monkeypatch.setenv("GCPO_REFERENCE", str(reference.parent))
    execute("21_table1", tmp_path / "after.ipynb", {**shown, "write_to": str(tmp_path / "after")})
    before, after = (
        pd.read_csv(tmp_path / name / "verdicts_21.csv").set_index(["heading", "place"])["label"]
        for name in ("before", "after")
    )
    assert (before != after).sum() >= 3
    flipped = after["GCPO beats all baselines"]
    assert flipped.filter(like="tinyqa").tolist() == ["holds"]
    assert flipped.filter(like="tinymath").tolist() == ["fails"]
