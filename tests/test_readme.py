"""The README's own code runs as printed, and its results are the reference's."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from gcpo import paths
from gcpo.reports import pages, records, replay, tables
from gcpo.reports.report import WORLDS
from gcpo.runs.grids import expand
from gcpo.runs.profiles import read_yaml

BLOCKS = re.findall(r"```python\n(.*?)```", (paths.ROOT / "README.md").read_text(), flags=re.S)


def test_there_are_two_examples() -> None:
    assert ["GCPOTrainer" in block for block in BLOCKS] == [True, False]


def test_the_mathematics_without_a_trainer() -> None:
    *lines, last = BLOCKS[1].strip().splitlines()
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    weight = eval(last, names)
    assert weight.shape == (1, 4)
    assert (weight > 1).all()  # rewards that differ are boosted more than geometry can damp


def test_the_results_are_those_of_the_reference_tables_and_say_so() -> None:
    readme = (paths.ROOT / "README.md").read_text()
    (block,) = re.findall(f"{pages.START}.*?{pages.END}", readme, flags=re.S)
    assert block == pages.readme_results("laptop"), "a number edited by hand, or tables newer than the README"
    assert block.count("reference of profile laptop") == 1


def test_the_page_of_results_is_that_of_the_reference_tables() -> None:
    page = (paths.ROOT / "RESULTS.md").read_text()
    assert page == pages.results_page("laptop"), "a number edited by hand, or tables newer than RESULTS.md"
    exhibits = (paths.ROOT / "docs" / "exhibits.md").read_text()
    assert exhibits == pages.exhibits_page(), "python -m gcpo publish"


def test_the_answer_in_words_is_that_of_the_ledger() -> None:
    """The first screen says that entropy is blind, that filters take the most, that gains are ruled out, and what a
    step with RD or CD alone gains."""
    verdicts = pages.table_of("laptop", "headlines")["verdict"].tolist()
    assert verdicts[:2] == ["holds", "holds"] and verdicts[3:] == ["ruled out", "ruled out"]
    for world in WORLDS:
        controls = pages.table_of(world, "table1_controls").query("control == 'half of the questions dropped'")
        assert controls["task"].tolist() == ["tinyqa", "tinymath"] and (controls["seen"] == "True").all()
        gains = pages.table_of(world, "table1_pairs").query("task == 'tinymath'").set_index("label")
        gains = gains.loc[["GCPO-CD minus GRPO", "GCPO-BoT minus GRPO"], ["low", "high"]].astype(float)
        assert (gains["low"] < 0).all() and gains["high"].between(1.5, 4.5).all()  # two to four points are possible
        step = tables.written(world, "one_step_table", reference=True).query("policy == 'starting policy'")
        gain = step.query("task == 'tinyqa'").set_index("method")
        assert gain.loc["rd_only", "low"] > 0 > gain.loc["cd_only", "high"]
        assert -gain.loc["cd_only", "gain"] > gain.loc["rd_only", "gain"]
    readme = (paths.ROOT / "README.md").read_text()
    assert readme.count("\n") <= 180
    typed = readme.partition("## Reproduce")[0].replace(pages.readme_results("laptop"), "")
    assert not re.search(r"\d (?:%|points)", typed.replace("95 %", "")), "numbers are written by the package"


def test_what_a_run_needs_is_measured_or_estimated_by_the_package() -> None:
    readme = (paths.ROOT / "README.md").read_text()
    (block,) = re.findall(f"{pages.NEEDS}.*?{pages.END_NEEDS}", readme, flags=re.S)
    assert block == pages.readme_needs("laptop"), "a number edited by hand, or a profile newer than the README"
    known = pages.needs_table("laptop").groupby("profile")["known by"].agg(set)
    assert known["single_gpu"] == {"estimated"}
    assert known["paper"] == {"estimated", "measured (3 steps; random weights)"}
    assert all(said.startswith("measured (") for said in known["laptop"])


def test_a_measured_run_on_a_gpu_is_listed_with_its_name_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = records.find("laptop", reference=True)
    one = found[(found["method"] == "grpo") & (found["max_steps"] > 0)].head(1)
    on_a_gpu = one.assign(
        hardware=[{"cores": 16, "gpus": ["NVIDIA H200"]}], peak_memory_gb=40.0, peak_gpu_memory_gb=3.3
    )
    monkeypatch.setattr(records, "find", lambda *_, **__: on_a_gpu)
    first = pages.needs_table("laptop").iloc[0]
    assert (first["hardware"], first["memory"]) == ("NVIDIA H200", "3.3 GB")


def test_links_to_a_public_repository_stand_once_it_is_named_and_what_to_cite_has_version_and_date() -> None:
    readme, about = (paths.ROOT / "README.md").read_text(), {"version": "1.2", "date-released": "2030-01-02"}
    for start, end, made in (
        (pages.PUBLIC, pages.END_PUBLIC, pages.public_links),
        (pages.CITE, pages.END_CITE, pages.citation),
    ):
        assert made(read_yaml(paths.ROOT / "CITATION.cff")) in readme and readme.count(start) == readme.count(end) == 1
    assert "gcpo 1.2 (2030-01-02), [CITATION.cff]" in pages.citation(about)
    assert pages.public_links(about) == pages.PUBLIC + pages.END_PUBLIC
    links = pages.public_links({"repository-code": "https://github.com/some/where/"})
    assert "(https://mybinder.org/v2/gh/some/where/main?urlpath=lab/tree/notebooks/00_start_here.ipynb)" in links
    assert "(https://some.github.io/where/)" in links and (paths.ROOT / "notebooks" / "00_start_here.ipynb").exists()


def test_the_numbers_of_runs_are_those_of_the_grids() -> None:
    readme = (paths.ROOT / "README.md").read_text()
    for target, grid, profile in (("reproduce", "reproduce", "world_a"), ("reproduce-all", "reproduce_all", "laptop")):
        (said,) = re.findall(rf"^make {target} .* (\d+) runs", readme, flags=re.M)
        assert int(said) == len(expand(grid, profile))
        commands = subprocess.run(["make", "-n", target], cwd=paths.ROOT, capture_output=True, text=True, check=True)
        assert f" -m gcpo grid {grid} --profile {profile} " in commands.stdout


@pytest.mark.parametrize(("grid", "profile"), [("reproduce", "world_a"), ("reproduce_all", "laptop")])
def test_what_make_reproduce_makes_stands_beside_the_reference(
    grid: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "runs", partial(records.runs, reference=True))  # as if this machine had made them
    table = replay.compare(profile, grid)
    plans = expand(grid, profile)
    assert len(table) == len({(plan.params.task, plan.label) for plan in plans})
    assert set(table["found"]) == {replay.IDENTICAL} and table["here"].notna().all()


@pytest.mark.slow
def test_the_example_of_a_trl_run_trains_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(BLOCKS[0], names)
    steps = [entry for entry in names["trainer"].state.log_history if "loss" in entry]  # type: ignore[attr-defined]
    assert len(steps) == 5
    assert all(0.9 < step["gcpo/weight"] < 1.3 for step in steps) and any(step["reward"] > 0 for step in steps)
