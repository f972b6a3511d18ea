"""The API reference: docstrings as they are, with the defaults of GCPOConfig's fields beside them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from sphinx.application import Sphinx


def connect(app: Sphinx) -> None:
    """Let Sphinx's autodoc hand over each docstring, each signature and each member of a class."""
    app.connect("autodoc-process-docstring", written)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skipped)


def written(_app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    """Change a docstring's lines in place: fields get their default, and bars mean a norm, not a substitution."""
    fields = {field.name: field.default for field in dataclasses.fields(thing)} if is_dataclass(thing) else {}
    for number, line in enumerate(lines):
        parts = re.split(r"(``[^`]*``|`[^`]*`)", line)
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[number] = re.sub(r"^:param (\w+): ", lambda found: defaulted(found, fields), "".join(parts))


def defaulted(found: re.Match[str], fields: dict[str, Any]) -> str:
    """Return the head of a parameter's description, followed by its default if it is a field."""
    return f"{found[0]}(default ``{fields[found[1]]!r}``) " if found[1] in fields else found[0]


def signature(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, _own: str, _result: str
) -> tuple[str, str] | None:
    """Leave out the signature of a dataclass: its fields are described one by one, and GCPOConfig has TRL's too."""
    return ("", "") if is_dataclass(thing) else None


def skipped(_app: Sphinx, _what: str, _name: str, thing: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out fields of named tuples, which stand in the signature and have no docstrings of ours."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def is_dataclass(thing: Any) -> bool:
    """Return True for a class, and not for an object of it."""
    return isinstance(thing, type) and dataclasses.is_dataclass(thing)
