"""The ways to install agree with one another, and the papers' numbers with the papers."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import yaml

from gcpo import paths
from gcpo.reports import tables


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=;@ ]", requirement)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (paths.ROOT / "requirements.lock").read_text().split()
    assert all("==" in line for line in lines)
    return {name_of(line): line for line in lines}


def project() -> dict:
    return tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]


def needed(*extras: str) -> set[str]:
    """Names of the packages that the project and these extras ask for."""
    listed = [project()["dependencies"], *(project()["optional-dependencies"][extra] for extra in extras)]
    return {name_of(requirement) for part in listed for requirement in part} - {"gcpo"}


def test_lock_pins_every_dependency_and_the_cpu_neutral_torch() -> None:
    assert needed("trl", "repro", "dev") <= set(pins())
    assert pins()["torch"] == "torch==2.13.0"
    assert not [pin for pin in pins().values() if "+" in pin]


def test_conda_environment_has_the_same_pins_as_the_lock() -> None:
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    pinned = {name_of(line): line for line in pip if "==" in line}
    assert pinned == {name: pins()[name] for name in pinned}
    assert set(pinned) == needed("trl", "repro")


@pytest.mark.skipif("GCPO_PAPERS_DIR" not in os.environ, reason="needs GCPO_PAPERS_DIR, a folder with gcpo.txt")
def test_reported_numbers_are_the_papers() -> None:
    text = (Path(os.environ["GCPO_PAPERS_DIR"]) / "gcpo.txt").read_text()
    table1 = tables.reported("gcpo_table1")
    columns = "narrativeqa accuracy bleu f1 qasper accuracy bleu f1 hotpotqa f1 em".split()
    tasks = {"narrativeqa", "qasper", "hotpotqa"}
    order, current = [], ""
    for word in columns:
        current = word if word in tasks else current
        if word not in tasks:
            order.append((current, word))
    for label, rows in table1.groupby("label", sort=False):
        printed = label.replace("GRPO +", "w/t")
        line = next(line for line in text.splitlines() if line.startswith(f"{printed}\t") and "±" in line)
        cells = rows.set_index(["task", "metric"])
        expected = [
            f"{cells.loc[key, 'mean']:.2f}±{cells.loc[key, 'std']:.2f}" if key in cells.index else "n/a"
            for key in order
        ]
        assert line.split("\t")[1:] == expected
    for number, title in ((3, "w/t Success Rate"), (4, "w/t Gradient Variance")):
        part = text[text.index(title) :]
        for task, rows in tables.reported(f"gcpo_table{number}").groupby("task"):
            line = next(line for line in part.splitlines() if line.startswith(f"{task.title()} (Rho)"))
            assert [float(cell) for cell in line.split("\t")[1:]] == rows["spearman"].tolist()


def test_reported_tables_have_no_holes() -> None:
    for path in (paths.ROOT / "src" / "gcpo" / "reported").glob("*.csv"):
        assert not pd.read_csv(path).isna().any().any(), path.name
