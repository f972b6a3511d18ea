"""Parts of error messages that several rooms share."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error whose message says all that its user needs: the command line prints it, and nothing else."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest valid one, and all of them."""
    valid = list(valid)
    lower = {other.lower(): other for other in valid}
    begun = [other for other in lower if name and other.startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6) or begun
    hint = f" Did you mean {lower[close[0]]!r}?" if close else ""
    return f"{hint} Valid names: {', '.join(valid)}."


def one_of(name: str, value: object, valid: Iterable[object]) -> None:
    """Refuse a value that is not among the valid ones; raises ``ValueError`` that lists those."""
    if value not in valid:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(str(v) for v in valid if v)}.")
