"""What every notebook must be, whatever it says; nbval executes them and compares what they print."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gcpo import paths

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
RUN = {path.stem for path in NOTEBOOKS if re.match("1[0-9]_", path.stem)}
SANITIZE = Path(__file__).with_name("sanitize.cfg")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_map_is_complete() -> None:
    assert {path.stem[:2] for path in NOTEBOOKS} >= {"00", "01", "02", "03", "04", "10", "11", "20", "21"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
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
        assert len(notebook.cells) <= 45
        for cell in code(notebook):
            lines = cell.source.splitlines()
            assert len(lines) <= 30 and max(map(len, lines)) <= 110, cell.source[:80]
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

    def test_depends_on_no_place_and_no_environment(self, path: Path) -> None:
        source = "\n".join(cell.source for cell in code(read(path)))
        for banned in ("pip install", "getcwd", "Path.cwd", "os.environ", "/home/", "/tmp/", "google.colab"):
            assert banned not in source

    def test_is_clean_of_traces_of_execution(self, path: Path) -> None:
        notebook = read(path)
        assert notebook.metadata.kernelspec.name == "python3"
        assert "papermill" not in notebook.metadata
        assert not [c for c in notebook.cells if set(c.metadata) - {"tags"}]
        assert path.stat().st_size < 1_000_000


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    command += ["--nbval-sanitize-with", str(SANITIZE), str(path)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=path.parent)


@pytest.mark.slow
def test_nbval_fails_when_a_stored_number_is_changed_by_hand(tmp_path: Path) -> None:
    original = next(path for path in NOTEBOOKS if path.stem.startswith("01"))
    copy = tmp_path / original.name
    shutil.copy(original, copy)
    assert nbval(copy).returncode == 0
    notebook = read(copy)
    checked = [cell for cell in code(notebook) if "nbval-check-output" in cell.metadata.get("tags", [])]
    changed = 0
    for cell in checked:
        for output in cell.outputs:
            holder = output if "text" in output else output.get("data", {})
            key = "text" if "text" in output else "text/plain"
            if not changed and (found := re.search(r"\d\.\d+", holder.get(key, ""))):
                digit = "1" if found[0][-1] != "1" else "2"
                holder[key] = holder[key].replace(found[0], found[0][:-1] + digit, 1)
                changed += 1
    assert changed, "no checked number to change"
    nbformat.write(notebook, copy)
    done = nbval(copy)
    assert done.returncode != 0 and "mismatch" in done.stdout
