"""The methods in engines other than TRL: which methods can run there, with which settings, and whether verl knows them.

verl (:mod:`gcpo.engines.verl`) and SkyRL (:mod:`gcpo.engines.skyrl`) hand over rows with the key of a group each, which
:mod:`gcpo.engines.rows` turns into groups. Nothing here imports either of the two before it is asked for.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from gcpo.errors import UserError
from gcpo.methods import BASES, Method, get_method
from gcpo.methods.reward import OverlongPenalty

MODE = "gcpo_sync"  # verl's trainer mode that hands estimators what they read beside rewards
TESTED = ("0.9.0", "0.9.1")  # the oldest and the newest verl that the tests have seen
# verl's words for TRL's loss_type.
_LOSSES = {
    "grpo": ["loss_agg_mode=seq-mean-token-mean"],
    "dr_grpo": ["loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor=${data.max_response_length}"],
    "dapo": ["loss_agg_mode=token-mean"],
}


def refusal(row: Method) -> str:
    """Return why a method cannot run in another engine, or an empty text."""
    if row.in_loss:
        return "acts in the loss, of which an engine's estimator of advantages sees nothing"
    return "needs settings of TRL's trainer, such as a reference model that moves" if row.trl else ""


def asks(row: Method) -> list[str]:
    """Return what a method needs beside the rewards and tokens of its rows."""
    draws = row.permuted or any(factor.seeded(1) != factor.seeded(2) for factor in row.factors)
    longest = isinstance(row.reward, OverlongPenalty)
    return [*sorted(row.reads - {"mask"}), *["max_completion_length"] * longest, *["the number of the step"] * draws]


def checked(method: str, **constants: Any) -> Method:
    """Return a method's row; raises ``ValueError`` for a method that is unknown or cannot run in another engine."""
    row = get_method(method, **constants)
    if why := refusal(row):
        raise UserError(f"{method} {why}: train it with gcpo.GCPOTrainer.")
    return row


def settings(method: str) -> list[str]:
    """Return verl's settings for a method, as for its command line."""
    row = checked(method)
    base = BASES[row.base]
    clip = f"clip_ratio_high={base.get('epsilon_high', 0.2)}"
    return [
        f"algorithm.adv_estimator=gcpo/{method}",
        *["+algorithm.gcpo.reward_range=[0,1]"] * (row.reads_range or row.needs_correctness),
        *(f"actor_rollout_ref.actor.{setting}" for setting in (*_LOSSES[base["loss_type"]], clip)),
        *["algorithm.filter_groups.enable=true"] * row.drops_equal,
        *[f"trainer.v1.trainer_mode={MODE}"] * bool(asks(row)),
    ]


def untried(version: str) -> str:
    """Return a line about a verl that the tests have not seen, or an empty text."""
    from packaging.version import Version  # which no dependency of the core brings

    oldest, newest = TESTED
    tried = Version(oldest) <= Version(version) <= Version(newest)
    return "" if tried else f"verl {version}: gcpo was tried with {oldest} to {newest}; pip install verl=={newest}."


def loaded() -> str:
    """Say that verl knows the methods; raises ``UserError`` with the reason if not, of which verl itself is silent."""
    try:
        import verl
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        if "gcpo" in ADV_ESTIMATOR_REGISTRY:
            return f"verl {verl.__version__} has loaded gcpo's plugin"
        entry_points(group="verl.plugins")["gcpo"].load()
    except KeyError:
        raise UserError("gcpo is not installed as a plugin of verl: in its folder, pip install --no-deps .") from None
    except ImportError as error:
        raise UserError(f"verl or its plugin cannot be imported ({error}): pip install verl=={TESTED[1]}.") from error
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
    raise UserError(f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps gcpo's plugin out of verl: unset it, or add gcpo to it.")
