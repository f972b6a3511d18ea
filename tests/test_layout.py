"""The layout: who may import whom, how little the core needs, and that nothing is imported late to hide a circle."""

import ast
import json
import math
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import script

import gcpo
from gcpo.runs.profiles import read_yaml

code_lines = script("benchmarks/lines.py").code_lines
PACKAGE = Path(gcpo.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# From the ground up: a file imports its own room and what is below it.
FLOORS = [
    {"errors", "grader", "io", "masked", "papers", "paths", "processes", "seeds"},
    {"clustering", "mathematics", "measures", "statistics", "gradients", "one_pass", "rewards"},
    {"rollouts"},
    {"methods"},
    {"toys", "weights", "updates"},
    {"semantics"},
    {"trainer", "verl"},
    {"tasks"},
    {"world"},
    {"runs"},
    {"reports"},
    {"records"},
    {"cli"},
    {"__main__", "__init__"},
]
HEAVY = """transformers trl accelerate datasets peft sentence_transformers sacrebleu math_verify cachetools pandas
    pydantic papermill""".split()


def name_of(path: Path) -> str:
    """gcpo.measures, gcpo.methods, gcpo.methods.table ..."""
    parts = ("gcpo", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def floor(module: str) -> int:
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@cache
def imports(path: Path) -> dict[str, bool]:
    """The modules of this package that a file imports when it runs, and whether it does so inside a function."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gcpo":
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in below]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "gcpo"]
        for name in names:
            found[name] = found.get(name, True) and inside
        inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text()), False)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_its_own_room_and_what_is_below(module: str) -> None:
    for other in imports(MODULES[module]):
        same_room = other.split(".")[:2] == module.split(".")[:2]
        assert same_room or floor(other) < floor(module) or (floor(other) == floor(module) <= 1), other


def test_there_is_no_circle() -> None:
    graph = {module: set(imports(path)) - {module} for module, path in MODULES.items()}
    # A room's __init__ gathers its files; a file that imports its own room would be a circle through it.
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) >= set(MODULES)


# Each import in them would be paid for by those who need another.
LAZY = ("gcpo", "gcpo.__main__", "gcpo.cli", "gcpo.reports", "gcpo.tasks")


@pytest.mark.parametrize("module", [module for module in MODULES if module not in LAZY])
def test_nothing_of_the_package_is_imported_inside_a_function(module: str) -> None:
    assert [other for other, inside in imports(MODULES[module]).items() if inside] == []


def test_the_core_is_there_without_any_extra() -> None:
    script = f"""
import json, sys
import torch
for name in {HEAVY}:
    sys.modules[name] = None  # as if it were not installed
import gcpo.measures, gcpo.methods, gcpo.gradients
slow = [name for name in ("scipy", "sklearn") if name in sys.modules]  # a second or more to import
import gcpo.rewards, gcpo.rollouts, gcpo.statistics, gcpo.weights
rollouts = gcpo.rollouts.Rollouts(torch.tensor([[2.0, 0.0, 2.0, 0.0]]))
print(json.dumps([slow, *gcpo.methods.weights("rd_only", rollouts)[0].tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    slow, *weights = json.loads(done.stdout)
    assert slow == []
    assert weights == pytest.approx([1 + 0.6 / math.log(4)] * 4)  # 1 + alpha / log G, at the largest dispersion


def test_no_file_has_more_than_300_lines_of_code_and_no_function_more_than_40() -> None:
    for path in FILES:
        lines, tree = code_lines(path), ast.parse(path.read_text())
        assert len(lines) <= 300, path.name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert len(lines & {*range(node.lineno, node.end_lineno + 1)}) <= 40, f"{path.name}: {node.name}"


BUDGET: dict[str, int] = read_yaml(Path(__file__).with_name("budget.yaml"))


@pytest.mark.parametrize("room", BUDGET)
def test_no_room_has_more_lines_of_code_than_its_budget(room: str) -> None:
    path = PACKAGE.parent / room
    lines = sum(len(code_lines(file)) for file in (path.rglob("*.py") if path.is_dir() else [path]))
    assert lines <= BUDGET[room], f"{room} has {lines} lines: what comes in goes out elsewhere (CONTRIBUTING.md)"


def test_every_file_of_the_package_is_in_a_room_with_a_budget() -> None:
    for path in FILES:
        inside = path.relative_to(PACKAGE.parent)
        assert {str(inside), *map(str, inside.parents)} & ({*BUDGET} - {"gcpo"}), f"{inside} has no budget"


def test_a_room_has_no_budget_of_a_file_that_is_gone() -> None:
    assert [room for room in BUDGET if not (PACKAGE.parent / room).exists()] == []
