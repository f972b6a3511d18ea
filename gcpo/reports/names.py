"""Names of methods as people read them."""

from __future__ import annotations

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

    A label that does not begin with a method's name stays as it is.
    """
    method, _, settings = label.partition(" ")
    if method not in METHODS:
        return label
    name = NAMES.get(method, method.upper().replace("_", "-"))
    return f"{name} ({settings})" if settings else name
