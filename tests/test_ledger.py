"""The ledger: claims as declared, verdicts as notebooks reached them, and what they come to."""

import os
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports import ledger
from gcpo.reports.verdicts import Verdicts
from gcpo.runs.profiles import ParameterError, yaml_text

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


def written(folder: Path, notebook: str, *verdicts: tuple[str, str, str], **decisive: Any) -> None:
    """Write the verdicts of a notebook, of (id, task, label), and the numbers that decided them."""
    found = Verdicts(notebook, "runs of p")
    for check, task, label in verdicts:
        found.add(check, "Eq. 1", f"{check} it is", {"verdict": label, "because": "By 1.", **decisive}, task=task)
    found.write(folder)


@pytest.fixture
def reports(places: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outputs and verdicts of the test's own; returns the folder of a profile's reports."""
    monkeypatch.setattr(paths, "VERDICTS", places / "verdicts")
    return paths.OUTPUTS / "p" / "reports"


# --- what is declared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"a": 1}, "valid list.*'a': 1"),
        ([CLAIM, {**CLAIM, "chekcs": []}], r"1\.chekcs\b"),
        ([{**CLAIM, "paper": "gpco"}], r"0\.paper\b.*'gcpo'.*'gpco'"),
    ],
)
def test_claims_that_are_none_are_refused_by_file_claim_and_key(entries: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml_text(entries))
    with pytest.raises(ParameterError, match=f"(?s){path}.*{said}"):
        ledger.claims(path)


def test_the_ledger_has_claims_of_every_paper_and_their_checks_exist() -> None:
    claims = ledger.claims()
    assert {claim.paper for claim in claims} == set(ledger.PAPERS)
    assert len({claim.id for claim in claims}) == len(claims)
    assert max(len(claim.quote.split()) for claim in claims) <= 25
    assert sum(bool(claim.checks) for claim in claims) >= 60
    assert all(claim.checks or claim.note or claim.scope == "real model" for claim in claims)
    assert {check for claim in claims for check in claim.checks} <= {
        *ledger.read_verdicts("laptop", reference=True)["id"]
    }


def test_a_claim_is_decided_by_the_verdict_of_its_own_id_unless_others_are_named(tmp_path: Path) -> None:
    own = {key: value for key, value in CLAIM.items() if key != "checks"}
    found = declared(tmp_path, own, {**own, "id": "none", "checks": []}, {**CLAIM, "id": "two"})
    assert [claim.checks for claim in found] == [("gcpo-one",), (), ("more", "most")]


def test_an_id_is_of_one_check_in_one_notebook() -> None:
    found, claims = ledger.read_verdicts("laptop", reference=True), ledger.claims()
    assert found["id"].str.fullmatch(r"[a-z0-9_.-]+").all()
    checks = found[["id", "notebook", "heading"]].drop_duplicates()
    assert not checks["id"].duplicated().any() and not checks[["notebook", "heading"]].duplicated().any()
    for claim in claims:  # the verdict with a claim's name decides that claim, and no other
        assert claim.id in claim.checks or claim.id not in set(found["id"])
        assert all(claim.id not in other.checks for other in claims if other.id != claim.id)


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


def test_a_claim_is_as_good_as_its_worst_check_whose_numbers_it_has(reports: Path, tmp_path: Path) -> None:
    written(reports, "01_a", ("more", "", "holds"))
    numbers = {"estimate": 0.5, "low": -0.5, "high": 1.5, "level": 0.95, "label": "se"}
    written(reports, "21_b", ("most", "tinymath", "inconclusive"), **numbers)
    names = {"two": ["more"], "none": [], "gone": ["more", "moist"]}
    claims = declared(tmp_path, CLAIM, *({**CLAIM, "id": name, "checks": checks} for name, checks in names.items()))
    table = ledger.ledger(claims, ledger.read_verdicts("p")).set_index("id")
    assert table["verdict"].tolist() == ["inconclusive", "holds", "not tested", "not tested"]
    assert table["notebook"].tolist() == ["21_b", "01_a", "", ""] and table["because"].tolist()[1] == "By 1."
    shown = table.loc["gcpo-one", ["task", "label", "estimate", "low", "high", "level"]]
    assert shown.tolist() == ["tinymath", "se", "0.5", "-0.5", "1.5", "0.95"]


@pytest.mark.parametrize(
    ("about", "words", "verdict", "beside"),
    [
        ("question answering", {"tinyqa": "holds", "tinymath": "fails"}, "holds", "tinymath: fails"),
        ("mathematics", {"tinyqa": "holds", "tinymath": "fails"}, "fails", "tinyqa: holds"),
        ("question answering", {"tinymath": "holds"}, "not tested", "tinymath: holds"),
        (None, {"tinyqa": "holds", "tinymath": "fails", "gsm8k": "not tested"}, "fails", ""),
        (None, {"tinyqa": "holds", "tinymath": "not tested", "gsm8k": "ruled out"}, "ruled out", ""),
        (None, {"tinyqa": "holds", "tinymath": "not tested", "gsm8k": "inconclusive"}, "not tested", ""),
    ],
)
def test_a_claim_is_decided_by_the_worst_on_the_tasks_that_it_is_about(
    about: str | None, words: dict[str, str], verdict: str, beside: str, reports: Path, tmp_path: Path
) -> None:
    written(reports, "21_b", *(("more", *of_task) for of_task in words.items()))
    claims = declared(tmp_path, {**CLAIM, "checks": ["more"], **({"about": about} if about else {})})
    row = ledger.ledger(claims, ledger.read_verdicts("p")).iloc[0]
    assert (row["verdict"], row["beside"]) == (verdict, beside)


def test_the_history_of_verdicts_ends_where_the_ledger_is() -> None:
    history = pd.read_csv(paths.VERDICTS.parent / "verdict_history.csv", dtype=str, keep_default_na=False)
    assert set(history["because"]) == {"data", "rule", "pooling", "wording", "scope"} and history["commit"].all()
    assert (history["old"] != history["new"]).all()
    now = pd.read_csv(paths.REFERENCE / "laptop" / "ledger.csv").set_index("id")["verdict"]
    last = history.groupby("id")["new"].last()
    gone = last.index.difference(now.index)
    assert last[gone].str.match("dropped|merged into ").all()
    assert last.drop(gone).to_dict() == now[last.index.difference(gone)].to_dict()


def test_no_claim_of_a_paper_is_decided_by_a_reading_of_ours() -> None:
    found = ledger.read_verdicts("laptop", reference=True)
    own = set(found.loc[found["place"].str.match(r"(?i)(varied|ours|our)\b"), "id"])
    assert own and {check for claim in ledger.claims() for check in claim.checks} & own == set()


def test_verdicts_of_reports_are_those_of_the_runs_that_are_asked_for(reports: Path) -> None:
    written(paths.VERDICTS, "01_a", ("read", "", "holds"))
    written(paths.REFERENCE / "p", "21_b", ("committed", "", "holds"))
    assert ledger.read_verdicts("p", reference=True)["id"].tolist() == ["read", "committed"]
    assert ledger.read_verdicts("p")["id"].tolist() == ["read"]  # never the reference's in place of one's own
    written(reports, "21_b", ("own", "", "holds"))
    assert ledger.read_verdicts("p")["id"].tolist() == ["read", "own"]


def test_a_verdict_says_whether_its_rules_are_older_than_its_runs(reports: Path, tmp_path: Path) -> None:
    claims = [{**CLAIM, "id": name, "checks": [name]} for name in "abce"]
    claims = declared(tmp_path, *claims, {**CLAIM, "id": "d", "checks": ["c"], "changed": "abc: fails became holds"})
    for folder, check in (("verdicts", "a"), ("laptop", "b"), ("world_a", "c"), ("real", "e")):
        written(paths.REFERENCE / folder, "21_b", (check, "", "holds"))
    verdicts = ledger.read_verdicts("laptop", reference=True)
    found = ledger.ledger(claims, verdicts).set_index("id")
    assert found["fixed"].to_dict() == {"a": "", "b": "no", "c": "but for pooling", "e": "yes", "d": "no"}
    assert found["changed"].to_dict() == {"a": "", "b": "", "c": "", "e": "", "d": "abc: fails became holds"}
    shown = ledger.source(verdicts, "laptop", reference=True)
    assert shown == "reference of profile laptop and of world A and of world B and of the real model"
