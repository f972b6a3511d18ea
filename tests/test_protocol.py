"""The rules of PROTOCOL.md stood in the very code that made each run which they decide, as they stand today."""

import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from gcpo import paths
from gcpo.reports import records
from gcpo.reports.report import CONTROLS
from gcpo.runs.grids import expand

WORLDS = ("world_a", "world_b")
PARTS = [("The real model", "real", grid) for grid in ("real_figure1", "real_step", "real_training")]
PARTS += [("Planted noise", world, "planted_noise") for world in WORLDS]
DECIDING = 100  # seeds from here on decide
DECIDED = ("Two worlds", "The gate and the controls", "Runs", "What is decided", "Statistics")


def sections(text: str) -> dict[str, str]:
    """Return a page's sections by heading."""
    return dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, flags=re.M))


def choosing(text: str) -> str:
    """Return the numbered rule by which the operating point is chosen."""
    return "".join(re.findall(r"^\d\. .*\n(?:   .*\n)*", sections(text)["The operating point"], flags=re.M))


def unamended(rules: str, amendments: str) -> str:
    """Return rules as they were before the page's amendments, each of which quotes the item that it replaced."""
    for item, name in re.findall(r"^  > (- \*\*(.*?)\*\*.*\n)", amendments, flags=re.M):
        rules = re.sub(rf"^- \*\*{re.escape(name)}\*\*.*\n(?:  .*\n)*", lambda _, item=item: item, rules, flags=re.M)
    return rules


def changed(then: str, now: str, deciding: bool) -> list[str]:
    """Return the headings of the rules for such a run that are other ones than they were, amendments left out."""
    old, new = sections(then), sections(now)
    if deciding:
        return [name for name in DECIDED if old.get(name) not in (new[name], unamended(new[name], new["Amendments"]))]
    return [] if choosing(then) == choosing(now) else ["The operating point"]


NOW = (paths.ROOT / "PROTOCOL.md").read_text()


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("world", WORLDS)
def test_the_rules_are_older_than_the_runs_that_they_decide(world: str) -> None:
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the history is not whole")
    runs = records.find(world, reference=True)
    commits = (runs["seed"] >= DECIDING).groupby(runs["commit"]).agg(set).to_dict()
    assert commits and not runs["dirty"].any()
    for commit, kinds in commits.items():
        for deciding in kinds:
            assert changed(git("show", f"{commit}:PROTOCOL.md"), NOW, deciding) == [], commit


def test_rules_of_later_parts_and_the_real_model_s_questions_are_older_than_the_runs_that_they_decide() -> None:
    named = pd.read_csv(paths.PARAMS / "statistics" / "real_questions.csv").groupby("task")["query"].agg(set)
    asked = [plan.params for plan in expand("real_figure1", "real") if not plan.params.at_step]
    assert {params.task: params.eval_limit for params in asked} == named.map(len).to_dict()
    if len(runs := records.find("real", "real_figure1", reference=True)):
        assert {*records.gather(runs, "queries", ["task"])["query"]} <= set.union(*named)
    for part, profile, grid in PARTS:
        for commit in {*records.find(profile, grid, reference=True).get("commit", ())}:
            then, now = ({*sections(text)[part].splitlines()} for text in (git("show", f"{commit}:PROTOCOL.md"), NOW))
            assert then <= now and all(line.startswith("| as it comes |") for line in now - then), commit  # its gate


def test_a_rule_that_was_changed_is_named() -> None:
    assert changed(NOW, NOW, True) == changed(NOW, NOW, False) == []
    assert changed(NOW.replace("Seeds from", "Seeds of").replace("corrected by Holm", "as they are"), NOW, True) == [
        "The gate and the controls"
    ]
    assert changed(NOW.replace("128 validation questions", "all questions"), NOW, False) == []  # told, and no rule
    assert changed(NOW.replace("gains less than a point", "gains less than two"), NOW, False) == ["The operating point"]


@pytest.mark.parametrize("grid", ["headline", "others", "steps", "checkpoints"])
def test_grids_that_decide_have_the_seeds_that_the_protocol_names(grid: str) -> None:
    first, last = re.findall(rf"`{grid}` \| (\d+) to (\d+) \|", sections(NOW)["Runs"])[0]
    for world in WORLDS:
        asked = [plan.params for plan in expand(grid, world)]
        assert {params.training_seed or params.seed for params in asked} == {*range(int(first), int(last) + 1)}
        assert grid != "headline" or {name.split()[0] for name in CONTROLS} <= {params.method for params in asked}


@pytest.mark.parametrize("profile", ["laptop", "world_a", "world_b"])
def test_the_reference_can_be_published_again(profile: str, outputs: Path) -> None:  # with no runs of this machine
    kept = {run.manifest["id"] for run in records.to_publish(profile)}
    assert kept == {run.manifest["id"] for run in records.runs(profile, reference=True)}
