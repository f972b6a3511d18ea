"""Rules that every notebook keeps, whatever it says; nbval executes them and compares what they print."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from helpers import script

from gcpo import paths
from gcpo.reports import publish
from gcpo.runs.params import Params

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
RUN = {path.stem for path in NOTEBOOKS if re.match("1[0-9]_", path.stem)}
WORDS = "Holds|Fails|Ruled out|Inconclusive|Not tested"
INSTALL = 'if not find_spec("gcpo"):  # in Colab\n    %pip install --quiet "gcpo[repro]"\n'  # nowhere else


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def compared(cell: nbformat.NotebookNode, path: Path) -> bool:
    """Whether nbval compares its outputs: always, or, in read notebooks, where the embedded models are the same.

    On another processor a sum differs in a last bit, and what the policy then samples is another text.
    """
    tags = set(cell.metadata.get("tags", []))
    return "nbval-check-output" in tags or (path.stem[0] in "03" and "compared-in-the-same-world" in tags)


def shows_results(cell: nbformat.NotebookNode) -> bool:
    """Whether the stored outputs hold a number in words or tables, or a verdict; figures are not compared."""
    shown = [output.get("data", {"text/plain": output.get("text", "")}) for output in cell.outputs]
    texts = [data[kind] for data in shown if "image/png" not in data for kind in data if kind.startswith("text/")]
    return any(re.search(rf"\d|<table|^\*\*(?:{WORDS}): ", text) for text in texts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_links_to_its_neighbours_and_to_the_choices_that_it_rests_on(self, path: Path) -> None:
        cells = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
        assert script("docs/links.py").line(path.stem) in cells[0].splitlines(), "python docs/links.py"
        assert any("](../DEVIATIONS.md)" in text for text in cells)

    def test_is_executed_top_to_bottom_or_a_run_notebook_without_outputs(self, path: Path) -> None:
        cells = code(read(path))
        counts = [cell.execution_count for cell in cells]
        if path.stem in RUN:
            assert counts == [None] * len(cells) and not any(cell.outputs for cell in cells)
        else:
            assert counts == list(range(1, len(cells) + 1))

    def test_shows_no_error_and_nothing_on_stderr(self, path: Path) -> None:
        outputs = [output for cell in code(read(path)) for output in cell.outputs]
        assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]

    def test_shows_no_object_as_python_would_print_it(self, path: Path) -> None:
        shown = [output.get("data", {}) for cell in code(read(path)) for output in cell.outputs]
        texts = [data.get("text/plain", "") for data in shown if "image/png" not in data]
        assert not [text for text in texts if re.search(r"^\[?(Text\(|<[\w.]+ (object )?at 0x)", text)]

    def test_keeps_to_the_limits_of_length(self, path: Path) -> None:
        notebook = read(path)
        assert len(notebook.cells) <= 30
        for cell in code(notebook):
            lines = cell.source.splitlines()
            # A run notebook names every parameter of a run, each in a line of its own, as papermill reads them.
            every = path.stem in RUN and "parameters" in cell.metadata.get("tags", [])
            longest = len(Params.model_fields) if every else 30
            assert len(lines) <= longest and max(map(len, lines)) <= 110, cell.source[:80]
        kinds = "".join("c" if cell.cell_type == "code" else "m" for cell in notebook.cells)
        assert "cccc" not in kinds, "more than three code cells in a row"

    def test_begins_with_title_question_and_parameters_of_literals_only(self, path: Path) -> None:
        notebook = read(path)
        assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
        assert "?*" in notebook.cells[0].source.split("|")[0], "the head asks one question, in italics"
        tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        assert len(tagged) == 1 and tagged[0] is code(notebook)[0]
        for node in ast.parse(tagged[0].source).body:
            assert isinstance(node, ast.Assign)
            ast.literal_eval(node.value)

    def test_has_every_result_compared(self, path: Path) -> None:
        assert not [cell.id for cell in code(read(path)) if shows_results(cell) and not compared(cell, path)]

    def test_depends_on_no_place_and_no_environment(self, path: Path) -> None:
        source = "\n".join(cell.source for cell in code(read(path))).replace(INSTALL, "")
        for banned in ("pip install", "getcwd", "Path.cwd", "os.environ", "/home/", "/tmp/", "google.colab"):
            assert banned not in source

    def test_is_clean_of_traces_of_execution(self, path: Path) -> None:
        notebook = read(path)
        assert notebook.metadata.kernelspec.name == "python3"
        assert "papermill" not in notebook.metadata
        assert not [c for c in notebook.cells if set(c.metadata) - {"tags"}]
        assert path.stat().st_size < 1_000_000


EXAMPLES = paths.ROOT / "outputs" / "reference" / "examples"


@pytest.mark.parametrize("name", sorted(RUN))
def test_a_run_notebook_is_shown_executed_with_its_own_code_and_linked_from_its_head(name: str) -> None:
    path = EXAMPLES / f"{name}.ipynb"
    original, shown = read(paths.NOTEBOOKS / path.name), read(path)
    again = f"make it again: make examples, or python docs/run_examples.py {name}"
    sources = [[cell.source for cell in code(notebook)[1:]] for notebook in (original, shown)]  # parameters apart
    assert sources[0] == sources[1], again
    assert [cell.execution_count for cell in code(shown)] == list(range(1, len(sources[0]) + 2)), again
    outputs = [output for cell in code(shown) for output in cell.outputs]
    assert outputs and not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"], again
    assert not re.search(r"/(work|tmp|home|root)/", path.read_text()), again
    assert path.stat().st_size < 1_000_000
    assert f"[Executed example](../outputs/reference/examples/{path.name})" in original.cells[0].source
    texts = "\n".join(cell.source for cell in shown.cells if cell.cell_type == "markdown")
    assert all((EXAMPLES / target).exists() for target in re.findall(r"\]\((\.\./[^)#]+)", texts)), again


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    command += ["--nbval-sanitize-with", str(Path(__file__).with_name("sanitize.cfg")), "-p", "conftest", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}  # where that conftest is
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=path.parent, env=environment)


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem[0] in "24"], ids=lambda path: path.stem)
def test_a_report_says_whose_runs_it_shows_and_hands_it_on(path: Path) -> None:
    cells = code(read(path))
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    shows = publish.reports()[path.stem]
    shown = f"reference of profile {shows['profile']}{' and of world B' * ('also' in shows)}\n"
    source = "the tables of make bench" if path.stem == "29_speed" else shown
    assert printed.startswith(f"All tables and figures below are made from: {source}")
    written = re.findall(r"^(?:tables\.write_table|figures\.save)\(.*", "\n".join(c.source for c in cells), flags=re.M)
    assert written and all(line.endswith((", source)", ", of_first)")) for line in written)


READ = [path for path in NOTEBOOKS if path.stem[0] in "03"]


@pytest.mark.slow
@pytest.mark.second_world
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_notebook_to_read_asserts_nothing_that_holds_in_one_world_alone(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "papermill", path.name, str(tmp_path / path.name), "--cwd", str(tmp_path)]
    places = {"GCPO_WORLD_SEED": "1", "GCPO_OUTPUTS": str(tmp_path), "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env={**os.environ, **places})
    assert done.returncode == 0, done.stderr[-3000:]


def number(text: str) -> str:
    """The text with its last digit changed."""
    return re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), text)


def word(text: str) -> str:
    """The text with its verdict changed."""
    return re.sub(WORDS, "Proven", text)


# What is changed by hand: in which representation of an output, where it stands, and how.
EDITS = {
    "a verdict as shown": ("text/markdown", rf"^\*\*({WORDS}): ", word),
    "a verdict as text": ("text/plain", rf"^({WORDS}): ", word),
    "a number of a verdict": ("text/markdown", r"\A\*\*.*\d", number),
    "a cell of a table as shown": ("text/html", r"<td>[^<]*\d", number),
    "a cell of a table as text": ("text/plain", r"\A\s[^:]*\n.*\d", number),
    "a printed number": ("text", r"\d", number),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "kinds"),
    [
        ("24", list(EDITS)),
        ("01", ["a verdict as shown", "a number of a verdict", "a cell of a table as shown"]),
        ("00", ["a cell of a table as text", "a cell of a table as shown"]),  # which the embedded policy sampled
    ],
    ids=["report", "read", "sampled"],
)
def test_nbval_names_every_cell_with_a_result_changed_by_hand(tmp_path: Path, start: str, kinds: list[str]) -> None:
    original = next(path for path in NOTEBOOKS if path.stem.startswith(start))
    notebook, changed = read(original), []
    for key, place, change in (EDITS[kind] for kind in kinds):
        for index, cell in enumerate(code(notebook)):
            holders = [output if key == "text" else output.get("data", {}) for output in cell.outputs]
            holder = next((holder for holder in holders if re.search(place, holder.get(key, ""))), None)
            if holder and index not in changed:
                holder[key] = re.sub(place, lambda found, change=change: change(found[0]), holder[key], count=1)
                changed.append(index)
                break
    assert len(changed) == len(kinds), "nothing to change"
    nbformat.write(notebook, tmp_path / original.name)
    done = nbval(tmp_path / original.name)
    failed = re.findall(r"^FAILED .*::Cell (\d+)", done.stdout, flags=re.M)
    if "cells not compared" in done.stdout:  # where what the models sampled is not compared
        changed = [i for i in changed if "compared-in-the-same-world" not in code(notebook)[i].metadata.get("tags", [])]
    assert sorted(map(int, failed)) == sorted(changed), done.stdout
    # Not in the summary, which repeats each failure where the environment says that it is CI.
    assert done.stdout.partition("short test summary")[0].count("mismatch") == len(changed)
