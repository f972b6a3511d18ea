"""Components of methods: weights of groups, responses and tokens, and rules that change rewards.

Every class here is a frozen set of constants with one function of the rollouts. A weight reads the task's own rewards
and the base advantages A; responses without a reward take no part in any mean, and their weight is 1.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.errors import one_of
from gcpo.masked import mean
from gcpo.methods.forms import check_alpha
from gcpo.rollouts import Rollouts

ROUNDING = 1e-6  # tolerance for "at or above the mean"
# Rules of equal meaning: the first response of a cluster entails the others (GCPO, App. E.3), responses entail one
# another, texts are equal (SEED-GRPO), Math-Verify finds answers equal, or the task's own rule ("math" for mathematics,
# "greedy" elsewhere).
CLUSTERS = ("greedy", "bidirectional", "exact", "math", "task")


@functools.cache
def choices(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the valid values of a dataclass's fields, of those that are literals."""
    hints = get_type_hints(cls)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def is_correct(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Return True for responses whose correctness is strictly above 1/2 (for F1, the papers' accuracy)."""
    return rollouts.scorable & (rollouts.correctness > 0.5)


def is_graded(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Return True for responses whose correctness is known."""
    return rollouts.scorable & ~rollouts.correctness.isnan()


def entirely_incorrect(rollouts: Rollouts) -> Bool[Tensor, "B 1"]:
    """Return True for groups with a graded response and no correct one (EGPO, section 3.2)."""
    return is_graded(rollouts).any(1, keepdim=True) & ~is_correct(rollouts).any(1, keepdim=True)


def likelihoods(rollouts: Rollouts) -> tuple[Float[Tensor, "B G"], Bool[Tensor, "B G"]]:
    """Return each response's length-normalised log-likelihood, and True for responses that have a token."""
    tokens = rollouts.mask.bool()
    return mean(rollouts.logps, tokens).squeeze(-1), tokens.any(-1)


@dataclass(frozen=True, kw_only=True)
class Component(ABC):
    """A frozen set of constants with one function of the rollouts, and the properties that the trainer asks for.

    ``kind`` names the rule in the ids of runs, and never changes, whatever the class is called. ``OPTIONS`` are the
    constants that a user may set; of them ``NOT_NEGATIVE`` are finite numbers of at least 0, and ``SHARES`` above 0 and
    at most 1. Names are literals of the fields' types. ``reads`` are the features that are needed beside rewards.
    """

    kind: ClassVar[str]
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = ()
    SHARES: ClassVar[tuple[str, ...]] = ()
    has_alpha: ClassVar[bool] = False  # the component has a strength called alpha
    alpha_key: ClassVar[Literal["", "geo", "rd"]] = ""  # alpha_geo, alpha_rd; a shuffle's name
    needs_off_policy_steps: ClassVar[bool] = False  # the weight is 1 while pi = pi_old
    reads_range: ClassVar[bool] = False  # the component reads the range that rewards can reach

    clusters: str | None = None  # a key of CLUSTERS, for a component that reads clusters

    def __post_init__(self) -> None:
        one_of("clusters", self.clusters, (None, *CLUSTERS))
        for name, valid in choices(type(self)).items():
            one_of(name, getattr(self, name), valid)
        for name in self.NOT_NEGATIVE:
            check_alpha(getattr(self, name), name)
        for name in self.SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a share above 0 and at most 1.")

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the features that the component reads, beside rewards."""
        return frozenset()

    @property
    def labels(self) -> frozenset[str]:
        """Return the name of the feature that holds the component's clusters."""
        return frozenset({"nli" if self.clusters == "bidirectional" else "clusters"})

    @property
    @abstractmethod
    def direction(self) -> str:
        """Return a short phrase for the component's effect on advantages."""

    @property
    def needs_correctness(self) -> bool:
        """Return True if the component reads the correctness of responses."""
        return False

    @property
    def negative_reinforcement(self) -> bool:
        """Return True if groups without a correct response get A = -1 (negative-sample reinforcement, EGPO Eq. 13)."""
        return False


@dataclass(frozen=True, kw_only=True)
class Factor(Component):
    """One weight of a method, w(rollouts, A). ``measure`` and ``weight`` name its columns in logs."""

    stage: ClassVar[Literal["advantage", "loss"]] = "advantage"
    granularity: ClassVar[Literal["group", "response", "token"]]

    measure: str
    weight: str

    @abstractmethod
    def bounds(self, group_size: int) -> tuple[float, float]:
        """Return the lowest and the highest weight for G of at least 2."""

    def seeded(self, seed: int) -> Self:
        """Return the factor with another seed, if the factor draws random numbers."""
        changes: dict[str, Any] = {"seed": seed} if hasattr(self, "seed") else {}
        return replace(self, **changes)

    @abstractmethod
    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        """Return the measure and the weight by column: (B,), (B, G) or (B, G, T) as ``granularity`` says."""


@dataclass(frozen=True, kw_only=True)
class RewardStage(Component):
    """A rule that changes rewards before they are normalised to advantages."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        """Return the changed rewards, (B, G); NaN stays NaN."""
