"""Values of a parameter file that need care: fields of TRL's GRPOConfig (``grpo``, by grpo.yaml), and secrets."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gcpo.errors import nearest
from gcpo.runs.profiles import ParameterError, read_yaml

KNOWN: dict[str, Any] = read_yaml(Path(__file__).with_name("grpo.yaml"))
PINNED: dict[str, Any] = KNOWN["pinned"]
WRITTEN: dict[str, Any] = KNOWN["written"]
DECIDED: dict[str, str] = KNOWN["decided"]
REFUSED = {name: why for why, names in KNOWN["refused"].items() for name in names.split()}
BOUNDS = {name: Field(**bounds) for bounds, names in KNOWN["ranges"] for name in names.split()}
ADDRESSES = frozenset(KNOWN["addresses"].split())
GENERATION = {name: what for what, names in KNOWN["generation"].items() for name in names.split()}
TEMPLATE = frozenset(KNOWN["template"].split())
# Texts that nobody is to read: user:password@host, and tokens in URLs, in headers, or by what they begin with.
SECRET = re.compile(
    r"(?i)(?::/{2}(?:[^/\s@]+|[^/\s:@]+:(?!\d*/)[^\s@]+)|^[^/\s:@]+:[^/\s@]+)@"
    r"|[?&;#](?:[\w-]*[_-])?(?:token|key|apikey|secret|password|passwd|pwd|sig|signature|credential)=[^&\s]"
    r"|\bauthorization\W{1,4}\w+\s+\S{8}|\bbearer\s+[\w.~+/-]{16}"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-)\w{20}|\bsk-(?=[\w-]*\d)[\w-]{20}"
)
_SECRETS = re.compile(r"(?i)(.+[_-])?(api[_-]?key|authorization|passw(or)?d|secret)|((access|auth|hf)[_-])?token")


def refuse_secrets(values: Mapping[str, Any], where: str = "") -> None:
    """Raise :class:`ParameterError` that names the key, and not the value, of a text with a password or a token."""
    left: list[tuple[str, Any]] = [("", values)]
    seen: set[int] = set()  # one object may stand in several places of a file, and in itself
    for key, value in left:
        if isinstance(value, str):
            name = key.rpartition(".")[2]
            if SECRET.search("://" * (name in ADDRESSES) + value) or (value and _SECRETS.fullmatch(name)):
                why = "a password or token, which every record would keep: set it in the environment"
                raise ParameterError(f"{where}{key or 'a key'}: {why}")
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += [(key, one) for one in value]
            if isinstance(value, Mapping):
                left += [(f"{key}.{name}".lstrip("."), one) for name, one in value.items()]


def no_truth(value: Any) -> Any:
    """Refuse a truth value as a number, which pydantic would read as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def typed(fields: Mapping[str, Any], parameters: Container[str]) -> dict[str, Any]:
    """Return fields of GRPOConfig as values of the types that TRL declares, within their ranges.

    Raises:
        ValueError: a field that there is not, that one of our own ``parameters`` decides, or that a run leaves alone.
    """
    from trl import GRPOConfig  # seconds to import, so only when used

    valid = get_type_hints(GRPOConfig)
    for name in fields:
        if name in REFUSED:
            raise ValueError(f"{name!r} {REFUSED[name]}")
        if name in DECIDED or name in parameters:
            raise ValueError(f"{name!r} is set by the parameter {DECIDED.get(name, name)!r}; set that instead")
        if name not in valid:
            raise ValueError(f"GRPOConfig has no field {name!r}.{nearest(name, sorted(valid))[:200]}")
    found = {name: _typed(name, value, valid[name]) for name, value in fields.items()}
    _check_generation(found.get("generation_kwargs") or {}, found.get("use_vllm", False))
    return found


def _typed(name: str, value: Any, kind: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    if str in kinds and dict in [get_origin(one) or one for one in kinds]:
        kind = dict[str, Any] | None  # a text would be JSON, or a file, that no record has
    try:
        if bool not in kinds and {int, float}.intersection(kinds):
            no_truth(value)
        kind = Annotated[kind, BOUNDS[name]] if name in BOUNDS else kind
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValueError as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ValueError(f"{name}: {said} (got {value!r:.400})") from None


def _check_generation(given: Mapping[str, Any], by_vllm: bool) -> None:
    """Refuse keys of generation_kwargs that would override other settings, or that nothing reads."""
    from transformers import GenerationConfig

    valid = sorted(name for name in vars(GenerationConfig()).keys() - GENERATION.keys() if name[0] != "_")
    for name in given:
        if name in GENERATION:
            raise ValueError(f"generation_kwargs: {name!r} {GENERATION[name]}")
        if name not in valid and not by_vllm:  # whose names only vLLM knows
            raise ValueError(f"generation_kwargs: there is no {name!r}.{nearest(name, valid)[:200]}")
