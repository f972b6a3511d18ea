"""The ways to install agree with one another."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from gcpo import paths
from gcpo.reports.real_answers import FOLDER
from gcpo.runs.profiles import read_yaml

PACKED = (paths.NOTEBOOKS, paths.PARAMS, paths.MEASURED, paths.READY, FOLDER)


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


def test_a_wheel_has_what_an_installed_copy_looks_for() -> None:
    built = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    inside = {str(place): f"gcpo/{place}" for place in (p.relative_to(paths.ROOT) for p in PACKED)}
    assert built["wheel"]["force-include"] == inside


def test_a_release_has_one_version_and_one_date() -> None:
    cited, version = read_yaml(paths.ROOT / "CITATION.cff"), project()["version"]
    released = re.findall(r"^## \[([\d.]+)\] - (.+)$", (paths.ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == (version, str(cited["date-released"])) and cited["version"] == version


def test_lock_pins_every_dependency_and_the_cpu_neutral_torch() -> None:
    assert needed("trl", "repro", "dev") <= set(pins())
    assert pins()["torch"] == "torch==2.13.0"
    assert not [pin for pin in pins().values() if "+" in pin]


def test_conda_environment_has_the_same_pins_as_the_lock() -> None:
    environment = read_yaml(paths.ROOT / "environment.yml")
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    pinned = {name_of(line): line for line in pip if "==" in line}
    assert pinned == {name: pins()[name] for name in needed("trl", "repro")}


def test_an_installed_copy_keeps_all_outputs_where_it_is_called(tmp_path: Path) -> None:
    package, called = tmp_path / "site" / "gcpo", tmp_path / "called"
    for folder in (package, called):
        folder.mkdir(parents=True)
    shutil.copy(str(paths.__file__), package)
    show = f"import sys; sys.path = {[str(package), *sys.path]}; import paths; print(paths.OUTPUTS, paths.PARAMS)"
    both = f"{show}; import subprocess; subprocess.run([sys.executable, '-c', {show!r}], cwd='/')"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GCPO_")}
    done = subprocess.run([sys.executable, "-uc", both], cwd=called, env=clean, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{called / 'outputs'} {package / 'params'}"] * 2, done.stderr
