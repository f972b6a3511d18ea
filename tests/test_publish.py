"""A reference is built beside the old one, which stays until the new one is whole; numbers beside a reference's."""

import gzip
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from record_builders import finished, write_grid, write_profile
from record_builders import publish as publish_records

from gcpo import io, paths
from gcpo.cli import main
from gcpo.reports import publish, records, replay, templates
from gcpo.runs.record import RecordError

pytestmark = pytest.mark.usefixtures("places")

TABLES = {"queries": pd.DataFrame({"query": ["a"], "V": [1.0]})}
REPORT = "20_figure1"
LEDGER = "90_claims"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """One report, of profile "laptop" unless told otherwise; what its kernel would have seen at each execution."""
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    shutil.copy(paths.NOTEBOOKS / f"{REPORT}.ipynb", notebooks)
    monkeypatch.setattr(paths, "NOTEBOOKS", notebooks)
    (tmp_path / "reports.yaml").write_text(f"{REPORT}: {{grid: figure1, profile: laptop}}\n")
    monkeypatch.setattr(publish, "REPORTS", tmp_path / "reports.yaml")
    monkeypatch.setattr(paths, "WORLDS", tmp_path / "world")
    for profile in ("p", "laptop"):
        write_profile(profile, {})
    write_grid("figure1", [{"kind": "gradients", "seed": [0]}])
    seen: list[dict[str, Any]] = []

    def execute(name: str, output: Path, parameters: dict[str, Any]) -> None:
        root = Path(os.environ["GCPO_REFERENCE"])
        old, new = (list(folder.glob(f"*/{records.RUNS}")) for folder in (paths.REFERENCE, root))
        made = [gzip.decompress(path.read_bytes()) for path in new]
        seen.append({**parameters, "old": [path.read_bytes() for path in old], "new": made})
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text((notebooks / f"{name}.ipynb").read_text().replace("# 20 ·", "# 20 · new ·"))
        if "write_to" in parameters:
            (Path(parameters["write_to"]) / "table.csv").write_text(f"page {len(seen)}\n")

    monkeypatch.setattr(publish, "execute", execute)
    monkeypatch.setattr(templates, "write_pages", lambda: seen.append({"pages": "written"}))
    return seen


def lines_of(profile: str) -> list[bytes]:
    return gzip.decompress((paths.REFERENCE / profile / records.RUNS).read_bytes()).splitlines()


def reference_of(profile: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (paths.REFERENCE / profile).rglob("*") if path.is_file()}


def test_a_reference_is_built_beside_and_swapped_in_of_runs_of_grids(pages: list[dict[str, Any]], capsys: Any) -> None:
    old = paths.REFERENCE / "laptop"
    old.mkdir(parents=True)
    (old / records.RUNS).write_text("the old one")
    run = finished("gradients", tables=TABLES, profile="laptop")
    stray = finished("gradients", tables=TABLES, profile="laptop", seed=3)
    assert main(["publish", "--profile", "laptop"]) == 0
    assert stray.manifest["id"] in capsys.readouterr().out
    page, written = pages
    assert written == {"pages": "written"}
    (new,) = page["new"]
    assert page["old"] == [b"the old one"] and len(new.splitlines()) == 1
    found = reference_of("laptop")
    assert set(found) == {records.RUNS, "queries.parquet", io.SUMS, "table.csv"} and io.broken(old) is None
    assert json.loads(lines_of("laptop")[0])["sha256"] == run.manifest["sha256"]
    assert len(records.find("laptop", "figure1", reference=True)) == 1
    assert "# 20 · new ·" in (paths.NOTEBOOKS / f"{REPORT}.ipynb").read_text()
    (old / "of_no_report.csv").write_text("")
    os.utime(old / "of_no_report.csv", (1, 1))
    assert publish.pages_again("laptop") == 1 and set(reference_of("laptop")) == set(found)
    assert not paths.REFERENCE.with_name(".reference.draft").exists() and "GCPO_REFERENCE" not in os.environ


def test_nothing_is_published_with_a_password(pages: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """A record that was made before parameters were refused for it, or by hand."""
    run = finished("gradients", tables=TABLES, profile="laptop")
    run.manifest["params"]["grpo"] = {"vllm_server_base_url": "http://bob:SECRET@host"}
    run.write()
    assert main(["publish", "--profile", "laptop"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert run.manifest["id"] in line and "params.grpo.vllm_server_base_url" in line and "SECRET" not in line
    assert not any(b"SECRET" in text for text in reference_of("laptop").values())
    assert not paths.REFERENCE.with_name(".reference.draft").exists()


def test_a_committed_page_reads_as_if_executed_with_its_own_parameters(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(f"{n}", execution_count=n) for n in (1, 2, 3)]
    cells[0].metadata["tags"], cells[1].metadata["tags"] = ["parameters"], ["injected-parameters"]
    cells[2].outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "3"}, execution_count=3)]
    cells[2].metadata["papermill"] = {"duration": 1.0}
    page = nbformat.v4.new_notebook(cells=[cells[0], cells[1], nbformat.v4.new_markdown_cell("text"), cells[2]])
    nbformat.write(page, tmp_path / "page.ipynb")
    publish.clean(tmp_path / "page.ipynb")
    left = nbformat.read(tmp_path / "page.ipynb", as_version=4)
    assert [cell.source for cell in left.cells] == ["1", "text", "3"]
    assert left.cells[2].execution_count == left.cells[2].outputs[0].execution_count == 2
    assert "papermill" not in left.cells[2].metadata


def test_a_reference_grows(pages: list[dict[str, Any]]) -> None:
    write_grid("figure1", [{"kind": "gradients", "seed": [0, 1, 2]}])
    for seed in (0, 1):
        finished("gradients", tables=TABLES, profile="laptop", seed=seed)
    assert publish.publish("laptop", partial=True) == 2
    before = lines_of("laptop")
    shutil.rmtree(paths.OUTPUTS)
    more = {"queries": pd.DataFrame({"query": ["a"], "V": [2.0], "new": [0.5]})}
    for seed in (1, 2):  # one is made again
        finished("gradients", tables=more, profile="laptop", seed=seed)
    assert publish.publish("laptop") == 3
    after, page = lines_of("laptop"), reference_of("laptop")["table.csv"]
    assert before[0] in after and before[1] not in after
    found = records.gather(records.find("laptop", "figure1", reference=True), "queries", ["seed"])
    assert dict(zip(found["seed"], found["V"], strict=True)) == {0: 1.0, 1: 2.0, 2: 2.0}
    shutil.rmtree(paths.OUTPUTS)
    assert publish.publish("laptop") == 3 and lines_of("laptop") == after
    assert reference_of("laptop")["table.csv"] != page  # where nothing has run the pages alone are made again


def test_what_fails_on_the_way_changes_nothing(pages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    finished("gradients", tables=TABLES, profile="laptop")
    assert publish.publish("laptop") == 1
    before, notebook = reference_of("laptop"), (paths.NOTEBOOKS / f"{REPORT}.ipynb").read_text()
    write_grid("figure1", [{"kind": "gradients", "seed": [0, 1]}])
    finished("gradients", tables=TABLES, profile="laptop", seed=1)

    def dies(name: str, output: Path, parameters: dict[str, Any]) -> None:
        Path(parameters["write_to"], "half.csv").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publish, "execute", dies)
        assert main(["publish", "--profile", "laptop"]) == 130
    assert reference_of("laptop") == before and "GCPO_REFERENCE" not in os.environ
    assert (paths.NOTEBOOKS / f"{REPORT}.ipynb").read_text() == notebook
    assert publish.publish("laptop") == 2  # what the interrupt left is in nobody's way


def test_a_report_on_two_worlds_shows_the_first_and_the_ledger_reads_both(pages: list[dict[str, Any]]) -> None:
    """Each world has its own records; the ledger lies where ``reports.yaml`` says, and is made again with either."""
    publish.REPORTS.write_text(
        f"{REPORT}: {{grid: figure1, profile: p, also: q}}\nother: {{grid: none, profile: laptop}}\n"
        f"{LEDGER}: {{profile: laptop}}\n"
    )
    shutil.copy(paths.NOTEBOOKS / f"{REPORT}.ipynb", paths.NOTEBOOKS / f"{LEDGER}.ipynb")
    (paths.REFERENCE / "laptop").mkdir(parents=True)
    (paths.REFERENCE / "laptop" / "answers.parquet").write_text("kept")
    for profile in ("p", "q"):
        write_profile(profile, {})
        finished("gradients", tables=TABLES, profile=profile)
        assert publish.publish(profile) == 1
    asked = [(page["profile"], Path(page["write_to"]).name) for page in pages if "write_to" in page]
    own, ledger = ("p", "p"), ("laptop", "laptop")
    assert asked == [own, ledger, own, ledger]  # the first shows both
    assert (paths.REFERENCE / "laptop" / "answers.parquet").read_text() == "kept"
    assert (paths.REFERENCE / "laptop" / "table.csv").read_text() == "page 5\n"
    assert len(reference_of("p")) > len(reference_of("q")) > 0 and not (paths.REFERENCE / "p").is_symlink()
    assert "# 20 · new ·" in (paths.NOTEBOOKS / f"{LEDGER}.ipynb").read_text()


def test_nothing_is_published_while_a_report_lacks_a_run_unless_asked(pages: list[dict[str, Any]], capsys: Any) -> None:
    old = paths.REFERENCE / "laptop" / records.RUNS
    old.parent.mkdir(parents=True)
    old.write_text("precious")
    write_grid("figure1", [{"kind": "gradients", "seed": [0, 1]}])
    run = finished("gradients", tables=TABLES, profile="laptop")
    made = (run.folder / "queries.csv").read_text()
    for text, count, partial in (("query,V\na,2\n", 0, True), (made, 1, False)):  # edited by hand; whole
        (run.folder / "queries.csv").write_text(text)
        with pytest.raises(RecordError, match=f"figure1 has {count} of 2 runs finished with laptop.*--partial"):
            publish.publish("laptop", partial)
    assert old.read_text() == "precious" and pages == []
    assert publish.publish("laptop", partial=True) == 1
    assert len(records.find("laptop", "figure1", reference=True)) == 1


def test_a_report_on_rates_is_left_out_where_a_grid_has_one(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile("p", {})
    write_grid("sweep", [{"kind": "train", "method": ["grpo"], "learning_rate": [0.001, 0.002]}])
    write_grid("one", [{"kind": "train", "method": ["grpo"]}])
    made: list[str] = []
    monkeypatch.setattr(publish, "reports", lambda: {"23_sweep": {"grid": "sweep"}})
    monkeypatch.setattr(publish, "execute", lambda name, *_: made.append(name))
    finished(method="grpo", learning_rate=0.001)
    assert main(["report", "--profile", "p", "--grid", "one"]) == 1
    said = capsys.readouterr().out
    assert "23_sweep: grid one" in said and "learning_rate" in said and made == []
    assert main(["report", "--profile", "p"]) == 0 and made == ["23_sweep"]


# --- numbers beside the committed ones ------------------------------------------------------------------------------


def scored(f1: float, **values: Any) -> None:
    table = pd.DataFrame({"query": ["a"], "decoding": ["sampled"], "f1": [f1]})
    finished(results={"greedy_f1": 0.1, "sampled_f1": f1}, tables={"eval": table}, max_steps=4, **values)


@pytest.mark.parametrize(("f1", "found"), [(0.55, replay.WITHIN), (0.80, replay.OUTSIDE)])
def test_numbers_stand_beside_the_committed_ones(f1: float, found: str) -> None:
    """Four committed seeds of two methods, of which two are made here again: one alike, one far from what it was."""
    write_grid("few", [{"kind": "train", "method": ["grpo", "se", "kle"], "seed": [0, 1]}])
    for seed, value in enumerate((0.50, 0.52, 0.54, 0.56)):
        for method in ("grpo", "se"):
            scored(value, method=method, seed=seed)
    publish_records()
    for run in records.runs("p"):
        if run.manifest["params"]["method"] == "se" or run.manifest["params"]["seed"] > 1:
            (run.folder / "manifest.json").unlink()
    for method in ("se", "kle"):  # of which the latter is not committed
        scored(f1, method=method, seed=0)
    table = replay.compare("p", "few").set_index("run")
    assert table["found"].to_dict() == {"grpo": replay.IDENTICAL, "se": found}
    assert table.loc["se", ["runs", "here", "committed"]].tolist() == ["1 of 2", round(100 * f1, 1), 50.0]
    # Mean 53, deviation 2.582, t(3; 0.975) = 3.1824: 3.1824 * 2.582 * sqrt(1/4 + 1/2) = 7.12, of one fresh seed 9.19.
    assert table["expected"].tolist() == ["45.9 to 60.1", "43.8 to 62.2"]
    assert math.isnan(replay.predicted([1.0], 2)[0])


@pytest.mark.parametrize(
    ("kind", "results", "figure"),
    [
        ("evaluate", {"avg@4_f1": 0.5, "greedy_f1": 0.4, "questions": 9}, "avg@4_f1"),
        ("gradients", {"queries": 9, "pair_spearman": 0.5}, "pair_spearman"),
        ("one_step", {"batches": 3, "gain_rd_only": 0.4, "gain_gcpo_bot": 0.5}, "gain_gcpo_bot"),
        ("one_step", {"batches": 3}, ""),
    ],
)
def test_runs_of_every_kind_have_a_number_to_compare(kind: str, results: dict[str, float], figure: str) -> None:
    write_grid("few", [{"kind": kind, "seed": [0, 1], "eval_samples": [4]}])
    for seed in (0, 1):
        finished(kind, results, {"eval": pd.DataFrame({"query": ["a"]})}, seed=seed, eval_samples=4)
    publish_records()
    (row,) = replay.compare("p", "few").to_dict("records")
    assert (row["figure"], row["runs"], row["found"]) == (figure, "2 of 2", replay.IDENTICAL)
    assert row["here"] == 50.0 if figure else math.isnan(row["here"])
