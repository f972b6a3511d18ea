"""Parameter files: profiles, grids and configurations of accelerate by name or path, and their YAML, read strictly."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gcpo import paths
from gcpo.errors import UserError, nearest

TOY = "-toy"  # ends the name of a profile with params/toy.yaml laid over it


class ParameterError(UserError):
    """A parameter is unknown, of the wrong type or impossible; the message names the key, the value and the way out."""


def is_file_name(name: str) -> bool:
    """Return True if a profile or grid is given by the path of its file, and not by its name."""
    return name.removesuffix(TOY).endswith((".yaml", ".yml"))


def names_in(folder: Path) -> list[str]:
    """Return the names of the parameter files in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def profiles() -> list[str]:
    """Return the names of the profiles in ``params/``."""
    return names_in(paths.PARAMS)


def file_of(name: str, kind: str, folder: Path) -> Path:
    """Return the file of a profile or grid (``kind``): the path as given, or ``<folder>/<name>.yaml``.

    Raises:
        ParameterError: no such file, with the nearest name there is.
    """
    path = Path(name) if is_file_name(name) else folder / f"{name}.yaml"
    if not path.is_file():
        raise ParameterError(f"Unknown {kind} {name!r}.{nearest(name, names_in(folder))}")
    return path


def accelerate_file(name: str) -> Path:
    """Return the file of a configuration of accelerate, by its name in ``params/accelerate`` or its path; raises as
    :func:`file_of`."""
    return file_of(name, "configuration of accelerate", paths.PARAMS / "accelerate")


def load_profile(name: str) -> dict[str, Any]:
    """Return the values of ``params/<name>.yaml`` (or of a path to a YAML file), unchecked.

    A name or path that ends in "-toy" gives them with ``params/toy.yaml`` laid over them.

    Raises:
        ParameterError: no such profile (with the nearest name), or not a mapping.
    """
    if (whole := name.removesuffix(TOY)) != name:
        values = load_profile(whole)
        own = values.get("profile", "smoke") if is_file_name(whole) else whole  # a file names itself
        return over(values, load_profile("toy"), {"profile": f"{own}{TOY}"})
    path = file_of(name, "profile", paths.PARAMS)
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ParameterError(f"{path}: expected a mapping of parameter names to values, got {type(values).__name__}.")
    return values


def over(base: Mapping[str, Any], *more: Mapping[str, Any]) -> dict[str, Any]:
    """Return values laid over those of a profile, the last on top; of ``grpo`` each field by itself."""
    laid = dict(base)
    for values in more:
        below = laid.get("grpo")
        laid |= values
        if isinstance(below, Mapping) and isinstance(laid["grpo"], Mapping):
            laid["grpo"] = {**below, **laid["grpo"]}
    return laid


def read_yaml(path: Path) -> Any:
    """Return the one document of a YAML file, plain values only.

    Raises:
        ParameterError: in one line that names file and line: not UTF-8 or not readable, not YAML, several documents, a
            key twice, or a tag.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParameterError(f"{path} cannot be read: {reason}.") from None


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML 1.2 text; ``where`` names the text in errors, as in :func:`read_yaml`."""
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ParameterError(f"{where}{line}: {' '.join((error.problem or error.context).split())}.") from None
    except (YAMLError, ValueError, RecursionError) as error:  # a forbidden character, 5,000 digits, a deep nest
        raise ParameterError(f"{where}: not readable as YAML ({' '.join(str(error).split())[:120]}).") from None


def yaml_text(values: Any) -> str:
    """Return plain values as YAML, keys in their order."""
    text = io.StringIO()
    _yaml().dump(values, text)
    return text.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    return yaml
