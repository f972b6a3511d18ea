"""Names of methods as people read them."""

from __future__ import annotations

import re

from gcpo.methods import METHODS

# Those that are not the method's name in capitals.
NAMES = {
    "bot_only": "BoT alone",
    "care_agreement": "CARE (agreement)",
    "cd_only": "CD alone",
    "clip_cov": "Clip-Cov",
    "dr_grpo": "Dr. GRPO",
    "drop_half": "half of the questions dropped",
    "egspo": "EG-SPO",
    "gcpo_bot": "GCPO-BoT",
    "gcpo_shuffled": "GCPO-BoT with shuffled weights",
    "gcpo_strong": "GCPO-BoT to a power",
    "kl_cov": "KL-Cov",
    "qhawkeye": "Q-Hawkeye",
    "rd_only": "RD alone",
    "se_shuffled": "SE with shuffled weights",
}


def people(label: str) -> str:
    """Return the label of a kind of run as people read it: "GCPO-BoT (alpha=0.3)" for "gcpo_bot alpha=0.3".

    Methods are named where a label begins with one, and wherever else their names stand ("late gain of cw_grpo").
    """
    method, _, settings = label.partition(" ")
    if method in METHODS:
        return f"{_named(method)} ({settings})" if settings else _named(method)
    return re.sub(r"\w+", lambda found: _named(found[0]) if found[0] in METHODS else found[0], label)


def _named(method: str) -> str:
    return NAMES.get(method, method.upper().replace("_", "-"))
