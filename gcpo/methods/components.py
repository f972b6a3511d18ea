"""What methods are made of: weights of groups, responses and tokens, and rules that change rewards.

Every class here is a frozen set of constants with one function of the rollouts. A weight reads the task's own rewards
and the base advantages A; responses without a reward take no part in any mean, and their weight is 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from jaxtyping import Bool, Float
from torch import Tensor

from gcpo.errors import one_of
from gcpo.masked import mean
from gcpo.rollouts import Rollouts

ROUNDING = 1e-6  # what is this little below a mean is at the mean
# Which responses mean the same: those that the first of a cluster entails (GCPO, App. E.3), those that entail one
# another, equal texts (SEED-GRPO), equal mathematical answers by Math-Verify, or as the task does it ("math" for
# mathematics, "greedy" elsewhere).
CLUSTERS = ("greedy", "bidirectional", "exact", "math", "task")


def check_share(share: float, of: str) -> None:
    """Refuse what is no share, or none of anything."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}, expected a share of {of}, above 0 and at most 1.")


def right(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Where a response is right: its correctness is above 1/2, strictly (for F1, the papers' accuracy)."""
    return rollouts.scorable & (rollouts.correctness > 0.5)


def judged(rollouts: Rollouts) -> Bool[Tensor, "B G"]:
    """Where it is known whether a response is right."""
    return rollouts.scorable & ~rollouts.correctness.isnan()


def entirely_wrong(rollouts: Rollouts) -> Bool[Tensor, "B 1"]:
    """Groups with at least one response that is known to be wrong and none that is right (EGPO, section 3.2)."""
    return judged(rollouts).any(1, keepdim=True) & ~right(rollouts).any(1, keepdim=True)


def likelihoods(rollouts: Rollouts) -> tuple[Float[Tensor, "B G"], Bool[Tensor, "B G"]]:
    """Length-normalised log-likelihood of each response, and which responses have a token at all."""
    tokens = rollouts.mask.bool()
    return mean(rollouts.logps, tokens).squeeze(-1), tokens.any(-1)


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """A frozen set of constants with one function of the rollouts, and what the rest must know of it.

    ``kind`` names the rule in the ids of runs, and never changes, whatever the class is called. ``OPTIONS`` are the
    constants that a user may set; ``reads`` the features of the rollouts it needs beside rewards.
    """

    kind: ClassVar[str]
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    has_alpha: ClassVar[bool] = False  # a strength that is called alpha
    side: ClassVar[Literal["", "geo", "rd"]] = ""  # which factor of GCPO's two: the end of alpha_geo, a shuffle's name
    needs_steps: ClassVar[bool] = False  # does nothing while pi = pi_old

    clusters: str | None = None  # a key of CLUSTERS, for a part that reads clusters

    def __post_init__(self) -> None:
        one_of("clusters", self.clusters, (None, *CLUSTERS))

    @property
    @abstractmethod
    def reads(self) -> frozenset[str]:
        """The features of the rollouts it reads, beside rewards."""

    @property
    def labels(self) -> frozenset[str]:
        """The feature that its clusters are."""
        return frozenset({"nli" if self.clusters == "bidirectional" else "clusters"})

    @property
    @abstractmethod
    def direction(self) -> str:
        """What it makes smaller or larger, in a few words."""

    @property
    def judges(self) -> bool:
        """Whether it needs to know which responses are right."""
        return False

    @property
    def reinforces(self) -> bool:
        """Whether it sets the advantage of groups that are entirely wrong (EGPO, Eq. 13)."""
        return False


@dataclass(frozen=True, kw_only=True)
class Factor(Part):
    """One weight of a method, w(rollouts, A). ``measure`` and ``weight`` name its columns in logs."""

    stage: ClassVar[Literal["advantage", "loss"]] = "advantage"
    granularity: ClassVar[Literal["group", "response", "token"]]

    measure: str
    weight: str

    @abstractmethod
    def bounds(self, group_size: int) -> tuple[float, float]:
        """The lowest and the highest weight for G of at least 2."""

    def seeded(self, seed: int) -> Self:
        """Itself, or with another seed where it draws random numbers."""
        return self

    @abstractmethod
    def columns(self, rollouts: Rollouts, base: Float[Tensor, "B G"]) -> dict[str, Tensor]:
        """The weight and what it is made from, by column: (B,), (B, G) or (B, G, T) as ``granularity`` says."""


@dataclass(frozen=True, kw_only=True)
class RewardStage(Part):
    """A rule that changes rewards before they are normalised to advantages."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B G"]:
        """New rewards; NaN stays NaN."""
