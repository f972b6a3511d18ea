"""Verdicts on claims, as notebooks show them."""

from __future__ import annotations

import pandas as pd
from IPython.display import display

WORDS = {True: "holds", False: "does not hold", None: "cannot tell"}  # by what a check returns


class Verdicts:
    """The verdicts of a notebook: each is shown as it is reached, all of them in a table at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def __call__(self, source: str, claim: str, holds: bool | None, because: str) -> None:
        """Show and keep a verdict: `holds` is what the check returned, None when the data cannot decide."""
        word = WORDS[None if holds is None else bool(holds)]
        text = f"**Verdict on “{claim}” ({source}): {word}.** {because}"
        display({"text/markdown": text, "text/plain": text.replace("**", "")}, raw=True)
        self.rows.append({"source": source, "claim": claim, "verdict": word})

    def table(self) -> pd.DataFrame:
        """One row per verdict, in order: source, claim, verdict."""
        return pd.DataFrame(self.rows).set_index("source")
