"""Every method against its paper's formula in plain Python, and against groups small enough to compute by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pvariance, stdev
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gcpo.methods import METHODS, advantages, get_method, modulate, weights
from gcpo.rollouts import Rollouts

NAN = math.nan
THERE, BACK = (0.9, 0.06, 0.04), (0.5, 0.3, 0.2)  # NLI of an answer and a later one of its cluster, and back
EDGE = 0.9 + 0.06 / 2 + 0.5 + 0.3 / 2


@dataclass(frozen=True)
class Response:
    """One sampled response; its lists have one entry per token."""

    reward: float = 0.0  # in [0, 2]; NaN where there is none
    angle: float = 0.0  # of its embedding in the plane, degrees
    meaning: int = 0  # its cluster by entailment
    text: int = 0  # its cluster by equal text
    answered: bool = True
    logps: Sequence[float] = ()
    entropies: Sequence[float] = ()
    ref_logps: Sequence[float] = ()
    ratios: Sequence[float] = ()
    answer: Sequence[bool] = ()

    @property
    def known(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def correct(self) -> bool:
        """F1 above 1/2, strictly, for rewards of 2 F1."""
        return self.reward > 1


Group = Sequence[Response]


def spoken(nll: float, reward: float = 0.0, tokens: int = 1, **fields: Any) -> Response:
    """A response whose tokens have this negative log-likelihood, and this entropy, on average."""
    values = [nll * (2 * i + 1) / tokens for i in range(tokens)]
    return Response(reward, logps=[-x for x in values], entropies=values, **fields)


def as_rollouts(groups: Sequence[Group], **fields: Any) -> Rollouts:
    """Tensors of groups of one size. Positions without a token hold NaN: nothing may read them."""
    length = max((len(r.logps or r.ratios or r.ref_logps) for g in groups for r in g), default=0)

    def tokens(name: str, missing: float = NAN) -> torch.Tensor:
        rows = [[[*getattr(r, name), *[missing] * (length - len(getattr(r, name)))] for r in g] for g in groups]
        return torch.tensor(rows, dtype=torch.float64)

    def each(name: str) -> torch.Tensor:
        values = torch.tensor([[getattr(r, name) for r in g] for g in groups], dtype=torch.float64)
        return values if name in ("reward", "angle") else values.long()

    def entailment(first: int, second: int, a: Response, b: Response) -> tuple[float, float, float]:
        return (0, 0, 1) if a.meaning != b.meaning else THERE if first < second else BACK

    radians = each("angle").deg2rad()
    lengths = torch.arange(1.0, 1.0 + radians.shape[1]).unsqueeze(-1)
    nli = [[[entailment(i, j, a, b) for j, b in enumerate(g)] for i, a in enumerate(g)] for g in groups]
    counts = torch.tensor([[len(r.logps or r.ratios or r.ref_logps) for r in g] for g in groups])
    return Rollouts(
        each("reward"),
        **{
            "embeddings": lengths * torch.stack([radians.cos(), radians.sin()], -1),  # measures are of directions
            "clusters": each("meaning"),
            "exact_clusters": each("text"),
            "nli": torch.tensor(nli, dtype=torch.float64),
            "answered": each("answered"),
            "mask": torch.arange(length) < counts.unsqueeze(-1),
            "answer_mask": tokens("answer", 1.0),
            **{name: tokens(name) for name in ("logps", "entropies", "ref_logps", "ratios")},
            **fields,
        },
    )


# --- what the papers say --------------------------------------------------------------------------------------------


def known(g: Group) -> list[Response]:
    return [r for r in g if r.known]


def clip(x: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(max(x, low), high)


def shares(labels: Sequence[int]) -> dict[int, float]:
    return {k: labels.count(k) / len(labels) for k in labels}


def entropy(probabilities: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities)


def cd(g: Group) -> float:
    """GCPO Eq. 7: all ordered pairs, i = j too."""
    distances = [1 - math.cos(math.radians(a.angle - b.angle)) for a in g for b in g]
    return fmean(clip(d) for d in distances)


def direction(vectors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = sum(v[0] for v in vectors), sum(v[1] for v in vectors)
    length = math.hypot(x, y)
    assume(length > 1e-4)  # Eq. 9 is 0/0 where directions cancel
    return x / length, y / length


def bot(g: Group) -> float:
    """GCPO Eq. 9 and 10, step by step."""
    unit = [(math.cos(math.radians(r.angle)), math.sin(math.radians(r.angle))) for r in g]
    mass = shares([r.meaning for r in g])
    centroid = {k: direction([u for u, r in zip(unit, g, strict=True) if r.meaning == k]) for k in mass}
    barycentre = direction([(mass[k] * centroid[k][0], mass[k] * centroid[k][1]) for k in mass])
    return sum(mass[k] * (1 - centroid[k][0] * barycentre[0] - centroid[k][1] * barycentre[1]) / 2 for k in mass)


def spread(rewards: Sequence[float]) -> float:
    return sum(abs(r - fmean(rewards)) for r in rewards)


def rd(g: Group) -> float:
    """GCPO Eq. 11; the largest spread in [0, 2] has half of the rewards at either end."""
    half = len(g) // 2
    return spread([r.reward for r in g]) / spread([0.0] * half + [2.0] * (len(g) - half)) if len(g) > 1 else 0.0


def se_counts(g: Group) -> float:
    return entropy(list(shares([r.meaning for r in g]).values()))


def se_rao(g: Group) -> float:
    """SEED-GRPO's code: shares of likelihoods, normalised by length, of equal texts."""
    likelihood = [(r.text, math.exp(fmean(r.logps))) for r in g if r.logps]
    total = sum(p for _, p in likelihood)
    texts = {text for text, _ in likelihood}
    return entropy([sum(p for text, p in likelihood if text == k) / total for k in texts])


def vne(g: Group) -> float:
    """The graph falls apart into clusters of n answers, each with all edges of one weight w. Its Laplacian has the
    eigenvalues 0 and, n - 1 times, n w there, and so the kernel 1 and c = exp(-0.3 n w), with the diagonal
    (1 + (n - 1) c)/n."""
    labels = [r.meaning for r in g]
    eigenvalues = []
    for n in (labels.count(k) for k in set(labels)):
        c = math.exp(-0.3 * n * EDGE)
        scale = len(g) * (1 + (n - 1) * c) / n
        eigenvalues += [1 / scale] + [c / scale] * (n - 1)
    return entropy(eigenvalues)


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean, over the rewards that exist."""
    there = [r for r in rewards if not math.isnan(r)]
    return [0.0 if math.isnan(r) else r - fmean(there) for r in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """GCPO Eq. 1 with the n - 1 deviation and TRL's epsilon; exactly 0 for equal rewards."""
    there = [r for r in rewards if not math.isnan(r)]
    if len(set(there)) < 2:
        return [0.0] * len(rewards)
    return [a / (stdev(there) + 1e-4) for a in dr_grpo(rewards)]


def own(g: Group) -> list[float]:
    return [r.reward for r in g]


def reinforced(g: Group) -> list[float]:
    """EGPO Eq. 13: A = -1 where nothing known is right."""
    if not known(g) or any(r.correct for r in known(g)):
        return grpo(own(g))
    return [-1.0 if r.known else 0.0 for r in g]


def shannon(r: Response) -> float:
    return fmean(r.entropies)


def nll(r: Response) -> float:
    """EGPO Eq. 5."""
    return -fmean(r.logps)


def calibrated(
    g: Group,
    correct: tuple[float, float],
    wrong: tuple[float, float],
    before: bool = False,
    after: bool = False,
) -> list[float]:
    """EGPO Eq. 7 to 9: mean H / (H + 1e-5), clamped by the outcome, divided by the mean before or after that."""
    there = [r for r in known(g) if r.logps]
    if not there:
        return [1.0] * len(g)
    ratio = [fmean(map(nll, there)) / (nll(r) + 1e-5) for r in there]
    if before:
        ratio = [min(x, 10) for x in ratio]
        ratio = [x / fmean(ratio) for x in ratio]
    weight = [clip(x, *(correct if r.correct else wrong)) for x, r in zip(ratio, there, strict=True)]
    if after:
        weight = [w / fmean(weight) for w in weight]
    found = dict(zip(map(id, there), weight, strict=True))
    return [found.get(id(r), 1.0) for r in g]


def edge(g: Group) -> list[float]:
    """EDGE-GRPO: mean entropy over own entropy, of Shannon's entropies."""
    there = [shannon(r) for r in known(g) if r.logps]
    return [fmean(there) / shannon(r) if r.known and r.logps else 1.0 for r in g]


def gate(g: Group) -> list[float]:
    """EG-SPO-style: the inverse, within [0.5, 1]."""
    return [clip(1 / x, 0.5, 1) if r.known and r.logps else 1.0 for x, r in zip(edge(g), g, strict=True)]


def kernel(g: Group) -> list[list[float]]:
    """CW-GRPO, section 2.3."""
    there = [(r, a) for r, a in zip(g, grpo(own(g)), strict=True) if r.known]
    tokens = [x for r, _ in there for x in r.logps]
    if not tokens or len({r.reward for r, _ in there}) < 2:
        return [[1.0] * len(r.logps) for r in g]
    mean = fmean(a for _, a in there)
    covariance = {id(r): [(x - fmean(tokens)) * (a - mean) for x in r.logps] for r, a in there}
    flat = [c for row in covariance.values() for c in row]
    sigma2 = pvariance(flat)
    if sigma2 < 1e-20:
        assume(max(map(abs, flat)) < 1e-12)  # equal covariances have a test of their own
        return [[1.0] * len(r.logps) for r in g]
    raw = {key: [math.exp(-(c**2) / (2 * sigma2)) for c in row] for key, row in covariance.items()}
    total = sum(sum(row) for row in raw.values())
    return [[w * len(tokens) / total for w in raw[id(r)]] if r.known else [1.0] * len(r.logps) for r in g]


def covariances(groups: Sequence[Group]) -> list[list[list[float]]]:
    """Cui et al.: (log pi - mean)(A - mean), means over the tokens of the batch, pi the policy of this very step."""
    rows = [(r, a) for g in groups for r, a in zip(g, grpo(own(g)), strict=True)]
    tokens = [
        (lp + math.log(rho), a) for r, a in rows if r.known for lp, rho in zip(r.logps, r.ratios, strict=True)
    ] or [(0.0, 0.0)]
    mean_lp, mean_a = fmean(lp for lp, _ in tokens), fmean(a for _, a in tokens)

    def of(r: Response, a: float) -> list[float]:
        current = [lp + math.log(rho) for lp, rho in zip(r.logps, r.ratios, strict=True)]
        return [(lp - mean_lp) * (a - mean_a) for lp in current]

    return [[of(r, a) for r, a in zip(g, grpo(own(g)), strict=True)] for g in groups]


def stopped(a: float, rho: float) -> bool:
    """PPO's clip at 0.2 already holds this token."""
    return rho > 1.2 if a > 0 else a < 0 and rho < 0.8


def clip_cov(groups: Sequence[Group]) -> list[list[list[float]]]:
    """All candidates of Clip-Cov dropped: those of a covariance in (1, 5) that PPO's clip does not hold."""

    def of(g: Group, rows: list[list[float]]) -> list[list[float]]:
        return [
            [float(not (r.known and 1 < c < 5) or stopped(a, rho)) for c, rho in zip(row, r.ratios, strict=True)]
            for r, a, row in zip(g, grpo(own(g)), rows, strict=True)
        ]

    return [of(g, rows) for g, rows in zip(groups, covariances(groups), strict=True)]


def kl_cov(groups: Sequence[Group]) -> list[list[list[float]]]:
    """KL-Cov with its 2e-3 of fewer than 1000 tokens: 1 for the one of the largest covariance, 0 for the others."""
    pairs = [list(zip(g, rows, strict=True)) for g, rows in zip(groups, covariances(groups), strict=True)]
    there = [c for group in pairs for r, row in group if r.known for c in row]
    top = max(there, default=NAN)
    assume(there.count(top) < 2)
    return [[[float(r.known and c == top) for c in row] for r, row in group] for group in pairs]


def empo(g: Group) -> list[float]:
    """EMPO: |C(i)| / G; 0 without an answer, and for all where no two agree."""
    meanings = [r.meaning for r in known(g)]
    agree = len(set(meanings)) < len(meanings) or len(meanings) == 1
    return [meanings.count(r.meaning) / len(meanings) * (agree and r.answered) if r.known else NAN for r in g]


def care(g: Group) -> list[float]:
    """GRPO-CARE: 0.5 acc more for accurate responses about as likely, under the reference, as accurate ones are."""

    def confidence(r: Response) -> float:
        answer = [lp for lp, counts in zip(r.ref_logps, r.answer, strict=True) if counts]
        return min(math.exp(fmean(answer)), 0.95)

    accuracy = {id(r): r.reward / 2 for r in known(g)}
    accurate = [r for r in known(g) if accuracy[id(r)] > 0.1 and accuracy[id(r)] >= fmean(accuracy.values())]
    accurate = [r for r in accurate if any(r.answer)]
    likely = [id(r) for r in accurate if confidence(r) >= fmean(map(confidence, accurate)) - 0.01]
    return [r.reward + 0.5 * accuracy[id(r)] * 2 if id(r) in likely else r.reward for r in g]  # rewards span 2


def care_agreement(g: Group) -> list[float]:
    """GCPO, App. E.2: the same bonus for right responses that agree with the others at least as much as the mean."""

    def agreement(r: Response) -> float:
        others = [math.cos(math.radians(r.angle - o.angle)) for o in known(g) if o is not r]
        return fmean(others) if others else 0.0

    least = fmean(map(agreement, known(g))) - 1e-6 if known(g) else NAN
    return [r.reward + 0.5 * r.reward * (r.known and r.correct and agreement(r) >= least) for r in g]


def overlong(g: Group, longest: int = 4) -> list[float]:
    """DAPO Eq. 13 with a cache of a fifth of the length; rewards that span 2 are in the unit of its own, -1 and 1."""
    if len({r.reward for r in known(g)}) < 2:
        return own(g)
    cache = longest / 5
    return [r.reward + clip((longest - cache - len(r.logps)) / cache, -1, 0) for r in g]


def per_group(weight: Callable[[Group, float], float], alpha: float = 0.6, divided: bool = True) -> Any:
    """One weight per group, made from the responses that have a reward, and alpha / log G."""

    def each(groups: Sequence[Group], own_alpha: float | None) -> list[list[float]]:
        strength = [(alpha if own_alpha is None else own_alpha) / (math.log(len(g)) if divided else 1) for g in groups]
        return [[weight(known(g), a) if known(g) else 1.0] * len(g) for g, a in zip(groups, strength, strict=True)]

    return each


def per_response(weight: Callable[[Group], list[Any]]) -> Any:
    return lambda groups, alpha: [weight(g) for g in groups]


def gcpo_bot(g: Group, a: float) -> float:
    return clip(1 - a * bot(g) ** 2) * (1 + a * rd(g))


def qhawkeye(g: Group, a: float) -> float:
    return 1 - a * pvariance([r.reward for r in g]) / (2 / 2) ** 2


@dataclass(frozen=True)
class Paper:
    """A method as its source writes it: the weights of groups, responses or tokens, the advantage before them, and the
    coefficients of a penalty; ``options`` make what is drawn at random certain."""

    source: str
    weight: Any = field(default=per_response(lambda g: [1.0] * len(g)))
    advantage: Callable[[Group], list[float]] = lambda g: grpo(own(g))
    penalty: Callable[[Sequence[Group]], list[list[list[float]]]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


CALM, BOLD, BOTH = (0.8, 1.0), (1.0, 2.0), (0.8, 2.0)


def egpo(source: str, *bounds: tuple[float, float], **renorm: bool) -> Paper:
    return Paper(source, per_response(lambda g: calibrated(g, *bounds, **renorm)), reinforced)


PAPERS: dict[str, Paper] = {
    "grpo": Paper("GCPO Eq. 1"),
    "dr_grpo": Paper("Dr. GRPO", advantage=lambda g: dr_grpo(own(g))),
    "dapo": Paper("DAPO Eq. 13", advantage=lambda g: grpo(overlong(g))),
    "se": Paper("SEED-GRPO Eq. 6, linear", per_group(lambda g, a: clip(1 - a * se_counts(g)))),
    "seed_grpo": Paper(
        "SEED-GRPO's code", per_group(lambda g, a: 1 / (1 + a * se_rao(g)), 0.0417), lambda g: dr_grpo(own(g))
    ),
    "kle": Paper("kernel language entropy, linear", per_group(lambda g, a: clip(1 - a * vne(g)))),
    "cd_only": Paper("GCPO Eq. 8, CD", per_group(lambda g, a: clip(1 - a * cd(g) ** 2))),
    "bot_only": Paper("GCPO Eq. 8, BoT", per_group(lambda g, a: clip(1 - a * bot(g) ** 2))),
    "rd_only": Paper("GCPO Eq. 11", per_group(lambda g, a: 1 + a * rd(g))),
    "gcpo_cd": Paper("GCPO section 3.4", per_group(lambda g, a: clip(1 - a * cd(g) ** 2) * (1 + a * rd(g)))),
    "gcpo_bot": Paper("GCPO section 3.4", per_group(gcpo_bot)),
    # Two groups can only swap their weights.
    "gcpo_shuffled": Paper("our control", lambda groups, alpha: per_group(gcpo_bot)(groups, alpha)[::-1]),
    "qhawkeye": Paper("GCPO App. G, Q-Hawkeye", per_group(lambda g, a: clip(qhawkeye(g, a)), 0.2, divided=False)),
    "empo": Paper("EMPO", advantage=lambda g: grpo(empo(g))),
    "care": Paper("GRPO-CARE", advantage=lambda g: grpo(care(g))),
    "care_agreement": Paper("GCPO App. E.2", advantage=lambda g: grpo(care_agreement(g))),
    "egspo": Paper("GCPO App. G, EG-SPO", per_response(gate)),
    "edge_grpo": Paper("EDGE-GRPO", per_response(edge)),
    "egpo": egpo("EGPO Eq. 8", BOLD, CALM),
    "egpo_c1": egpo("EGPO Table 2", BOTH, BOTH),
    "egpo_c2": egpo("EGPO Table 2", BOTH, CALM),
    "egpo_c3": egpo("EGPO Table 2", BOLD, BOTH),
    "egpo_c4": Paper(
        "EGPO Table 2",
        per_response(lambda g: calibrated(g, BOLD, CALM) if any(r.correct for r in known(g)) else [1.0] * len(g)),
        reinforced,
    ),
    "egpo_c5": egpo("EGPO Eq. 9", BOLD, CALM, after=True),
    "egpo_c6": egpo("EGPO Table 2", BOLD, CALM, before=True),
    "r2vpo": Paper(
        "GCPO App. G, R2VPO",
        per_response(lambda g: [1 / (1 + pvariance(r.ratios)) if r.known and r.logps else 1.0 for r in g]),
    ),
    "cw_grpo": Paper("CW-GRPO section 2.3", per_response(kernel)),
    "clip_cov": Paper("Cui et al., Clip-Cov", lambda groups, alpha: clip_cov(groups), options={"share": 1.0}),
    "kl_cov": Paper("Cui et al., KL-Cov", penalty=kl_cov),
}
every_paper = pytest.mark.parametrize("method", [pytest.param(m, id=f"{m}: {p.source}") for m, p in PAPERS.items()])


def sampled(seed: int) -> list[Group]:
    """Two groups of four to six responses, of which some have no reward, no answer or no token."""
    rng = random.Random(seed)
    size = rng.randint(4, 6)

    def response(best: float) -> Response:
        n = rng.choice([0, 1, 2, 2, 3, 3, 4, 4])
        scale = rng.choice([0.1, 0.5, 1, 2])
        return Response(
            reward=NAN if rng.random() < 0.1 else rng.choice([r for r in (0, 0.25, 0.5, 1, 1.25, 1.5, 2) if r <= best]),
            angle=rng.uniform(0, 360),
            meaning=rng.randint(-2, 1) * 7,
            text=rng.randint(0, 3),
            answered=rng.random() < 0.8,
            logps=[-scale * rng.uniform(0.1, 3) for _ in range(n)],
            entropies=[rng.choice([0.2, 1, 3]) * rng.uniform(0.1, 1) for _ in range(n)],
            ref_logps=[-rng.choice([0.01, 0.3, 1.5]) * rng.uniform(0.1, 1) for _ in range(n)],
            ratios=[math.exp(rng.uniform(-0.5, 0.5)) for _ in range(n)],
            answer=[rng.random() < 0.6 for _ in range(n)],
        )

    return [[response(best) for _ in range(size)] for best in rng.choices([1, 2, 2], k=2)]


def for_all(**strategies: st.SearchStrategy) -> Callable:
    """A property test without a time limit: the first call also pays for what the libraries load lazily."""
    return lambda test: settings(deadline=None, max_examples=25)(given(**strategies)(test))


seeds = st.integers(0, 2**31 - 1)


def padded(rows: list[list[Any]], like: torch.Tensor, missing: float) -> torch.Tensor:
    """Nested lists as a tensor; token lists are filled up."""
    if like.ndim == 3:
        rows = [[[*tokens, *[missing] * (like.shape[2] - len(tokens))] for tokens in group] for group in rows]
    return torch.tensor(rows, dtype=torch.float64).view(like.shape)


def test_every_method_has_a_formula() -> None:
    assert set(PAPERS) == set(METHODS)


@every_paper
@for_all(seed=seeds)
def test_weights_and_advantages_are_those_of_the_paper(method: str, seed: int) -> None:
    groups, paper = sampled(seed), PAPERS[method]
    rollouts = as_rollouts(groups, max_completion_length=4)
    # 2.5 reaches the clip at 0 of the linear forms; methods without alpha do not read it.
    for alpha in (None, 2.5):
        found = weights(method, rollouts, alpha=alpha, **paper.options)
        expected = padded(paper.weight(groups, alpha), found, 1.0)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)

        base = torch.tensor([paper.advantage(g) for g in groups], dtype=torch.float64)
        base = base.unsqueeze(-1) if expected.ndim == 3 else base
        trained = advantages(method, rollouts, alpha=alpha, **paper.options)
        torch.testing.assert_close(trained, base * expected, atol=1e-6, rtol=1e-6)


@for_all(seed=seeds)
def test_kl_cov_makes_the_token_of_the_largest_covariance_pay(seed: int) -> None:
    groups = sampled(seed)
    rollouts = as_rollouts(groups)
    base = torch.tensor([grpo(own(g)) for g in groups], dtype=torch.float64)
    found = METHODS["kl_cov"].penalty.coefficients(rollouts, base)
    torch.testing.assert_close(found, padded(PAPERS["kl_cov"].penalty(groups), found, 0.0), atol=0, rtol=0)


# --- group weights --------------------------------------------------------------------------------------------------

# Two answers twice, at right angles, one right and one wrong.
PAIRS = [Response(2, 0, 0, 0), Response(2, 0, 0, 0), Response(0, 90, 1, 1), Response(0, 90, 1, 1)]


def test_weights_of_two_orthogonal_pairs() -> None:
    """Every score is a round number: CD = 8/16, BoT = (1 - sqrt(1/2))/2, RD = 1, SE = log 2 = (log 4)/2, Var = 1."""
    a = 0.6 / math.log(4)
    w_cd, w_bot, w_rd = 1 - a / 4, 1 - a * (1 - math.sqrt(0.5)) ** 2 / 4, 1 + a
    expected = {"se": 0.7, "cd_only": w_cd, "bot_only": w_bot, "rd_only": w_rd, "gcpo_cd": w_cd * w_rd}
    expected |= {"gcpo_bot": w_bot * w_rd, "qhawkeye": 0.8}
    for method, weight in expected.items():
        assert weights(method, as_rollouts([PAIRS]))[0].tolist() == pytest.approx([weight] * 4, abs=1e-7), method


def test_alpha_of_gcpo_is_0_6_by_default() -> None:
    rollouts = as_rollouts(sampled(1))
    assert torch.equal(weights("gcpo_bot", rollouts), weights("gcpo_bot", rollouts, alpha=0.6))
    assert not torch.equal(weights("gcpo_bot", rollouts), weights("gcpo_bot", rollouts, alpha=0.5))


def test_the_reward_range_normalises_reward_dispersion_and_variance() -> None:
    wide, narrow = as_rollouts([PAIRS], reward_range=(-1.0, 3.0)), as_rollouts([PAIRS])
    gains = [weights("rd_only", rollouts)[0, 0].item() - 1 for rollouts in (wide, narrow)]
    assert gains == pytest.approx([0.3 / math.log(4), 0.6 / math.log(4)])
    losses = [1 - weights("qhawkeye", rollouts)[0, 0].item() for rollouts in (wide, narrow)]
    assert losses == pytest.approx([0.2 / 4, 0.2])


def test_gcpo_appendix_g_q_hawkeye_is_1_minus_0_2_u_without_log_g() -> None:
    """Var_pop of one right answer in four is 2^2 * 3/16, over (2/2)^2."""
    one_in_four = [Response(2), Response(0), Response(0), Response(0)]
    assert weights("qhawkeye", as_rollouts([one_in_four]))[0, 0].item() == pytest.approx(1 - 0.2 * 0.75)
    assert weights("qhawkeye", as_rollouts([one_in_four * 3]))[0, 0].item() == pytest.approx(1 - 0.2 * 0.75)
    own_form = weights("qhawkeye", as_rollouts([one_in_four]), form="exponential")[0, 0].item()
    assert own_form == pytest.approx(math.exp(-0.2 * 0.75))  # Q-Hawkeye's


# --- SEED-GRPO ------------------------------------------------------------------------------------------------------


def test_seed_grpo_of_distinct_and_equally_likely_answers_is_1_over_1_0417() -> None:
    distinct = [spoken(0.7, text=i, tokens=1 + i) for i in range(5)]
    assert weights("seed_grpo", as_rollouts([distinct])).flatten().tolist() == pytest.approx([1 / 1.0417] * 5)


def test_seed_grpo_of_one_answer_is_exactly_1() -> None:
    rollouts = as_rollouts([[spoken(0.1 * i, text=3, meaning=i) for i in range(1, 6)]])
    assert weights("seed_grpo", rollouts).eq(1).all()


# Three answers: 1 and 3 with log-likelihoods log 4 and log 2 below the second's, per token.
LIKELY = [
    spoken(math.log(8), 2, tokens=3, text=0, meaning=0),
    spoken(math.log(2), 0, tokens=1, text=1, meaning=0),
    spoken(math.log(8), 0, tokens=2, text=0, meaning=5),
    spoken(math.log(4), 1, tokens=4, text=2, meaning=5),
]
RAO = entropy([2 / 8, 4 / 8, 2 / 8])  # likelihoods 1/8 + 1/8, 1/2 and 1/4 per token, of 1 in all
COUNTS = entropy([1 / 2, 1 / 4, 1 / 4])
MC = fmean([math.log(4), math.log(2), math.log(4)])  # Eq. 5: mean over clusters of -log p(C_k)


@pytest.mark.parametrize(("estimator", "score"), [("rao", RAO), ("counts", COUNTS), ("mc", MC)])
def test_seed_grpo_estimators_on_length_normalised_likelihoods(estimator: str, score: float) -> None:
    row = get_method("seed_grpo", estimator=estimator)
    columns = modulate(row, as_rollouts([LIKELY])).columns
    assert columns["se"].tolist() == pytest.approx([score], rel=1e-6)
    assert columns["w_se"].tolist() == pytest.approx([1 / (1 + 0.0417 / math.log(4) * score)], rel=1e-6)


def test_seed_grpo_eq5_is_cut_at_0() -> None:
    """Five times the same likely answer: p(C) = 5 * 0.8 is above 1, and -log p(C) below 0."""
    rollouts = as_rollouts([[spoken(-math.log(0.8)) for _ in range(5)]])
    assert weights("seed_grpo", rollouts, estimator="mc").eq(1).all()


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        ("linear", lambda x: 1 - x),
        ("exponential", lambda x: math.exp(-x)),
        ("focal", lambda x: (1 - x) ** 2),
        ("reciprocal", lambda x: 1 / (1 + x)),
    ],
)
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_seed_grpo_eq6_forms(form: str, weight: Callable[[float], float], alpha: float | None) -> None:
    x = (alpha or 0.0417) * RAO / math.log(4)
    found = weights("seed_grpo", as_rollouts([LIKELY]), alpha=alpha, form=form)
    assert found[0].tolist() == pytest.approx([weight(x)] * 4, rel=1e-9)


def test_clusters_are_of_the_kind_that_is_asked_for() -> None:
    """Each kind has its own labels here, with a share of 1, 2, 3 or 4 quarters for the first cluster."""
    one, two, three, four = ([[0] * n + list(range(1, 5 - n))] for n in (1, 2, 3, 4))
    rollouts = Rollouts(
        torch.zeros(1, 4),
        clusters=torch.tensor(one),
        exact_clusters=torch.tensor(two),
        math_clusters=torch.tensor(three),
        task_clusters=torch.tensor(four),
    )
    score = {
        kind: modulate(get_method("se", clusters=kind), rollouts).columns["se"].item()
        for kind in ("nli", "exact", "math", "task")
    }
    by_hand = {"nli": [1 / 4] * 4, "exact": [1 / 2, 1 / 4, 1 / 4], "math": [3 / 4, 1 / 4], "task": [1.0]}
    assert score == pytest.approx({kind: entropy(masses) for kind, masses in by_hand.items()}, abs=1e-6)
    assert modulate(METHODS["se"], rollouts).columns["se"].item() == pytest.approx(score["nli"])  # as for BoT
    found = modulate(get_method("seed_grpo", estimator="counts"), rollouts).columns["se"].item()
    assert found == pytest.approx(score["exact"])
    # A kind that was not given is what was.
    plain = Rollouts(torch.zeros(1, 4), clusters=torch.tensor(two))
    assert modulate(get_method("se", clusters="math"), plain).columns["se"].item() == pytest.approx(score["exact"])


# --- entropies of responses -----------------------------------------------------------------------------------------

# Mean H is 4, and mean H / H is 4, 1.6, 0.5 for the right responses and 2, 8/9, 2/3 for the wrong ones.
SIX = [spoken(1, 2), spoken(2.5, 1.5, 2), spoken(8, 2, 3), spoken(2, 0.5), spoken(4.5, 1, 4), spoken(6, 0, 2)]
EGPO_WEIGHTS = [2, 1.6, 1, 1, 8 / 9, 0.8]
RATIO_MEAN = (4 + 1.6 + 0.5 + 2 + 8 / 9 + 2 / 3) / 6
TABLE_2 = {
    "edge_grpo": [4, 1.6, 0.5, 2, 8 / 9, 2 / 3],
    "egspo": [0.5, 0.625, 1, 0.5, 1, 1],
    "egpo": EGPO_WEIGHTS,
    "egpo_c1": [2, 1.6, 0.8, 2, 8 / 9, 0.8],
    "egpo_c2": [2, 1.6, 0.8, 1, 8 / 9, 0.8],
    "egpo_c3": [2, 1.6, 1, 2, 8 / 9, 0.8],
    "egpo_c4": EGPO_WEIGHTS,
    "egpo_c5": [w / fmean(EGPO_WEIGHTS) for w in EGPO_WEIGHTS],
    "egpo_c6": [2, 1, 1, 1, 0.8, 0.8],  # 1.6 over the mean ratio, 1.609, is below 1
}


@pytest.mark.parametrize("method", TABLE_2)
def test_egpo_table_2_edge_grpo_and_eg_spo_on_a_mixed_group(method: str) -> None:
    assert 1.6 < RATIO_MEAN < 1.61
    # epsilon = 1e-5 moves a ratio by less than 4e-5 here
    assert weights(method, as_rollouts([SIX]))[0].tolist() == pytest.approx(TABLE_2[method], abs=5e-5)


EGPOS = [name for name in METHODS if name.startswith("egpo")]


@pytest.mark.parametrize("method", EGPOS)
def test_egpo_eq13_entirely_wrong_groups_get_minus_1_times_the_weight(method: str) -> None:
    """Rewards of at most 1, the middle of the range, are wrong, also where they differ."""
    # Mean H is 2; ratios 4, 1, 2/3 and 10/11.
    wrong = [spoken(0.5, 0), spoken(2, 1), spoken(3, 0.25), spoken(2.2, 0), spoken(2.3, 1)]
    ratio = [4, 1, 2 / 3, 2 / 2.2, 2 / 2.3]
    expected = {
        "egpo_c1": [2, 1, 0.8, 2 / 2.2, 2 / 2.3],
        "egpo_c3": [2, 1, 0.8, 2 / 2.2, 2 / 2.3],
        "egpo_c4": [1] * 5,
        "egpo_c6": [clip(x / fmean(ratio), 0.8, 1) for x in ratio],
    }
    weight = expected.get(method, [1, 1, 0.8, 2 / 2.2, 2 / 2.3])
    if method == "egpo_c5":
        weight = [w / fmean(weight) for w in weight]
    found = advantages(method, as_rollouts([wrong]))[0].tolist()
    assert found == pytest.approx([-w for w in weight], abs=5e-5)


def test_egpo_c4_gives_entirely_wrong_groups_exactly_minus_1() -> None:
    wrong = [spoken(nll, 0.5) for nll in (0.1, 1, 2, 4)]
    assert advantages("egpo_c4", as_rollouts([wrong, SIX[:4]]))[0].eq(-1).all()


@pytest.mark.parametrize("method", EGPOS)
def test_egpo_groups_that_are_entirely_right_have_advantage_0(method: str) -> None:
    right = [spoken(nll, 2) for nll in (0.1, 1, 2, 4)]
    assert advantages(method, as_rollouts([right])).eq(0).all()


@pytest.mark.parametrize("method", [name for name in METHODS if name not in EGPOS])
def test_no_other_method_reinforces_entirely_wrong_groups(method: str) -> None:
    wrong = [replace(spoken(nll, 0.0, ratios=[1.0], answer=[True], ref_logps=[-1.0])) for nll in (1, 1, 1, 1)]
    assert advantages(method, as_rollouts([wrong, wrong])).eq(0).all()


@pytest.mark.parametrize("method", EGPOS)
def test_right_and_wrong_are_said_by_correctness_where_it_is_given(method: str) -> None:
    rewards = as_rollouts([SIX])
    flipped = as_rollouts([SIX], correctness=torch.tensor([[0.0, 0.2, 0.5, 0.0, 0.0, 0.0]]))
    assert advantages(method, rewards)[0, 0] > 0
    assert advantages(method, flipped).lt(0).all()  # entirely wrong


@pytest.mark.parametrize("method", EGPOS)
def test_egpo_eq13_a_response_that_nobody_calls_wrong_is_not_reinforced_as_wrong(method: str) -> None:
    """Its correctness is not known, but it has a reward, from another function, and the highest one."""
    correctness = torch.tensor([[0.0, 0.2, NAN, 0.0, 0.0, 0.0]])
    found = advantages(method, as_rollouts([SIX], correctness=correctness))[0]
    assert found[[0, 1, 3, 4, 5]].lt(0).all()
    assert found[2] >= 0


def test_egpo_c4_locks_groups_that_are_known_to_be_wrong_alone() -> None:
    unknown = torch.full((1, 6), NAN)
    found, locked = (weights(m, as_rollouts([SIX], correctness=unknown)) for m in ("egpo", "egpo_c4"))
    assert found.min() < 0.9
    assert torch.equal(found, locked)


def test_egpo_eq7_epsilon_is_1e_5() -> None:
    """Mean H is 3e-5: 3/2 and 3/6, where without epsilon they would be 3 and 3/5."""
    rollouts = as_rollouts([[spoken(1e-5, 2), spoken(5e-5, 0)]])
    assert weights("egpo_c1", rollouts)[0].tolist() == pytest.approx([1.5, 0.8])
    open_ended = {"correct": (0, math.inf), "wrong": (0, math.inf)}
    assert weights("egpo_c1", rollouts, **open_ended)[0].tolist() == pytest.approx([1.5, 0.5])
    assert weights("egpo_c1", rollouts, epsilon=1e-4, **open_ended)[0].tolist() == pytest.approx([3 / 11, 3 / 15])


def test_egpo_eq5_is_the_likelihood_of_the_sampled_tokens_and_edge_grpo_the_entropy_of_the_policy() -> None:
    pair = [Response(2, logps=[-1, -3], entropies=[0.5, 0.3]), Response(0, logps=[-4], entropies=[1.2])]
    rollouts = as_rollouts([pair])
    assert modulate(METHODS["egpo"], rollouts).columns["entropy"][0].tolist() == pytest.approx([2, 4])
    for method in ("edge_grpo", "egspo"):
        assert modulate(METHODS[method], rollouts).columns["entropy"][0].tolist() == pytest.approx([0.4, 1.2])


def test_egpo_c6_cuts_a_ratio_at_10_before_the_mean() -> None:
    """One response is next to certain; its ratio of about 1200 would set all others to the lowest weight."""
    certain = [spoken(0.001, 2), spoken(2.4, 2), spoken(0.6, 0), spoken(1.799, 0)]  # mean H is 1.2
    mean = (10 + 0.5 + 2 + 1.2 / 1.799) / 4
    found = weights("egpo_c6", as_rollouts([certain]), wrong=(0, 5))[0].tolist()
    assert found == pytest.approx([2, 1, 2 / mean, 1.2 / 1.799 / mean], abs=1e-4)


def test_entropies_scope_counts_the_answer_or_what_comes_before_it() -> None:
    """Table 3's signals: all tokens, the reasoning, the answer; the second response has no reasoning, the third no
    answer: all of their tokens count."""
    group = [
        Response(2, logps=[-1, -3, -8], answer=[False, False, True]),
        Response(0, logps=[-2, -4], answer=[True, True]),
        Response(0, logps=[-5, -7], answer=[False, False]),
    ]
    rollouts = as_rollouts([group])
    expected = {"joint": [4, 3, 6], "thinking": [2, 3, 6], "answer": [8, 3, 6]}
    for scope, entropies in expected.items():
        found = modulate(get_method("egpo", scope=scope), rollouts).columns["entropy"][0].tolist()
        assert found == pytest.approx(entropies), scope


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_r2vpo_of_ratios_half_above_and_half_below() -> None:
    """Var of (0.5, 1.5) is 1/4; of one token, 0; of (1, 1, 2.5), 1/2."""
    group = [Response(2, ratios=[0.5, 1.5]), Response(0, ratios=[3.0]), Response(0, ratios=[1, 1, 2.5])]
    rollouts = as_rollouts([group])
    assert weights("r2vpo", rollouts)[0].tolist() == pytest.approx([1 / 1.25, 1, 1 / 1.5])
    assert weights("r2vpo", rollouts, lambda_=3)[0].tolist() == pytest.approx([1 / 1.75, 1, 1 / 2.5])


def test_cw_grpo_section_2_3_on_two_responses() -> None:
    """With a = A_1 = -A_2, c is (2a, 0) and (a, a): its mean is a, sigma^2 = a^2/2, so the exponents are 4, 0, 1, 1."""
    rollouts = as_rollouts([[Response(2, logps=[0, -2]), Response(0, logps=[-3, -3])]])
    raw = [math.exp(-4), 1, math.exp(-1), math.exp(-1)]
    expected = [4 * w / sum(raw) for w in raw]
    assert weights("cw_grpo", rollouts).flatten().tolist() == pytest.approx(expected)


def test_cw_grpo_means_of_tokens_and_of_responses() -> None:
    """The mean of log pi is over tokens, that of A over responses: with three tokens and one they are not the same."""
    rollouts = as_rollouts([[Response(2, logps=[-1, -2, -6]), Response(0, logps=[-3])]])
    # Mean log pi is -3 and mean A is 0: c is (2, 1, -3) a and 0, its mean 0 and sigma^2 = 14/4 a^2.
    raw = [math.exp(-4 / 7), math.exp(-1 / 7), math.exp(-9 / 7), 1]
    found = weights("cw_grpo", rollouts)[0]
    assert [*found[0].tolist(), found[1, 0].item()] == pytest.approx([4 * w / sum(raw) for w in raw])
    assert found[1, 1:].eq(1).all()  # no tokens there


def test_cw_grpo_equal_tokens_weigh_1_and_an_outlier_least() -> None:
    equal = [Response(2, logps=[-1.1] * 3), Response(0, logps=[-1.1])]
    assert weights("cw_grpo", as_rollouts([equal])).eq(1).all()
    outlier = [Response(2, logps=[-1.1, -1.1, -9]), Response(0, logps=[-1.1, -1.2, -1.0])]
    assert weights("cw_grpo", as_rollouts([outlier])).flatten().argmin() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("half", [1, 2, 3, 8])
@pytest.mark.parametrize(("yes", "no"), [(-0.4, -1.2), (-0.1, -2.3), (-3.3, -0.04)])
def test_cw_grpo_sigma_0_up_to_rounding_weighs_1(yes: float, no: float, half: int, dtype: torch.dtype) -> None:
    """Answers of one token, half of them "yes" and right, half "no" and wrong: c = A_i (log pi - mean) is the same for
    all, and what is left of sigma is rounding."""
    group = [Response(2, logps=[yes])] * half + [Response(0, logps=[no])] * half
    exact = as_rollouts([group])
    rollouts = Rollouts(exact.rewards.to(dtype), logps=exact.logps.to(dtype), mask=exact.mask)
    found = weights("cw_grpo", rollouts)
    torch.testing.assert_close(found, torch.ones_like(found), atol=1e-3, rtol=0)


def test_cw_grpo_of_covariances_far_from_0_and_close_together_does_not_underflow() -> None:
    """Every exponent is below -10^6, where the kernel itself is 0 in floating point."""
    found = weights("cw_grpo", as_rollouts([[Response(2, logps=[0, 0]), Response(0, logps=[-2, -2.00001])]]))
    mean = -4.00001 / 4
    c = [-mean, -mean, 2 + mean, 2.00001 + mean]
    exponents = [-(x**2) / (2 * pvariance(c)) for x in c]
    assert max(exponents) < -1e6
    raw = [math.exp(x - max(exponents)) for x in exponents]
    assert found.flatten().tolist() == pytest.approx([4 * w / sum(raw) for w in raw], rel=1e-3)


# A is a, a, -a, -a, with a = 0.866; its mean over these ten tokens is a/5.
WIDE = [
    Response(2, logps=[-7, -9, -10, -1], ratios=[1, 1, 1, 1]),
    Response(2, logps=[-7.5, -10], ratios=[1.25, 1]),
    Response(0, logps=[-10.5, -12], ratios=[1, 1]),
    Response(0, logps=[-10.6, -12.1], ratios=[1, 0.75]),
]


def clip_cov_zeros(**options: Any) -> list[list[int]]:
    """Where Clip-Cov drops a token: [response, token]."""
    return weights("clip_cov", as_rollouts([WIDE]), **options)[0].eq(0).nonzero().tolist()


def test_clip_cov_candidates_are_tokens_in_the_band_that_ppo_does_not_stop() -> None:
    """log pi is log pi_old + log ratio, here -7.5 + 0.223 and -12.1 - 0.288, and its mean -8.976. 4/5 a = 0.693 times
    the deviations of the first two responses is 1.37, -0.02, -0.71, 5.53 and 1.18, -0.71; -6/5 a times those of the
    others, 1.58, 3.14 and 1.69, 3.54. A ratio of 1.25 is stopped where A > 0, and one of 0.75 where A < 0."""
    everything = clip_cov_zeros(share=1.0)
    assert everything == [[0, 0], [2, 0], [2, 1], [3, 0]]
    assert clip_cov_zeros(share=1.0, band=(1.5, 3.0)) == [[2, 0], [3, 0]]
    assert clip_cov_zeros(share=1.0, band=[1.0, 6.0]) == sorted([*everything, [0, 3]])
    assert clip_cov_zeros(share=1.0, clip=(0.3, 0.3)) == sorted([*everything, [1, 0], [3, 1]])
    assert clip_cov_zeros(share=1.0, clip=(0.2, 0.28)) == sorted([*everything, [1, 0]])


def test_clip_cov_drops_a_share_of_all_tokens_and_at_least_one() -> None:
    candidates = clip_cov_zeros(share=1.0)
    for share, count in ((2e-4, 1), (0.19, 1), (0.2, 2), (0.35, 3), (0.45, 4), (0.9, 4)):  # of ten tokens
        dropped = clip_cov_zeros(share=share)
        assert len(dropped) == count
        assert all(token in candidates for token in dropped)


def test_clip_cov_default_share_is_2e_4_of_the_tokens() -> None:
    """Of 15000 tokens, about a third of which is in the band, three are dropped."""
    rng = random.Random(0)
    logps = [[-rng.uniform(0, 6) for _ in range(3750)] for _ in range(4)]
    group = [Response(r, logps=lp, ratios=[1.0] * 3750) for r, lp in zip((2, 2, 0, 0), logps, strict=True)]
    assert weights("clip_cov", as_rollouts([group])).eq(0).sum() == 3


def test_clip_cov_draws_by_its_seed_alone() -> None:
    rollouts = as_rollouts([WIDE])
    drawn = set()
    for seed in range(40):
        first, again = (weights("clip_cov", rollouts, seed=seed) for _ in range(2))
        assert torch.equal(first, again)
        drawn.add(first.flatten().argmin().item())
    assert len(drawn) == 4  # every candidate comes up
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    weights("clip_cov", rollouts)
    assert torch.equal(torch.rand(2), expected)


def test_clip_cov_without_a_candidate_drops_nothing() -> None:
    calm = [Response(2, logps=[-1, -1.1], ratios=[1, 1]), Response(0, logps=[-1, -1.1], ratios=[1, 1])]
    assert weights("clip_cov", as_rollouts([calm])).eq(1).all()


def paid(share: float | None = None, **options: Any) -> list[list[int]]:
    options |= {} if share is None else {"share": share}
    rollouts = as_rollouts([WIDE])
    base = torch.tensor([grpo(own(WIDE))], dtype=torch.float64)
    found = get_method("kl_cov", **options).penalty.coefficients(rollouts, base)[0]
    assert set(found.flatten().tolist()) <= {0.0, options.get("coefficient", 1.0)}
    return found.nonzero().tolist()


def test_kl_cov_of_the_same_tokens() -> None:
    """The largest covariances are 5.53, 3.54, 3.14 and 1.69, whatever PPO's clip does; at least one token pays."""
    assert paid() == [[0, 3]]
    assert paid(0.2) == [[0, 3], [3, 1]]
    assert paid(0.45) == [[0, 3], [2, 1], [3, 0], [3, 1]]
    assert paid(0.2, coefficient=0.1) == [[0, 3], [3, 1]]
    every = [[i, t] for i, r in enumerate(WIDE) for t in range(len(r.logps))]
    assert paid(1.0) == paid(2.0) == every  # also those below 0, and never what is no token


def test_kl_cov_default_share_is_2e_3_of_the_tokens() -> None:
    logps = [-0.001 * i for i in range(1250)]
    long = [Response(reward, logps=logps, ratios=[1.0] * 1250) for reward in (2, 0)]
    base = torch.tensor([grpo(own(long))], dtype=torch.float64)
    found = METHODS["kl_cov"].penalty.coefficients(as_rollouts([long]), base)
    assert found.sum() == 5  # of 2500


# --- rewards --------------------------------------------------------------------------------------------------------


def rewards_of(method: str, group: Group, **fields: Any) -> list[float]:
    """What the method makes of the task's rewards."""
    stage = METHODS[method].reward
    assert stage is not None
    return stage(as_rollouts([group], **fields))[0].tolist()


def test_empo_rewards_the_share_of_the_own_cluster() -> None:
    answers = [Response(0, meaning=4), Response(2, meaning=4), Response(0, meaning=1), Response(2, meaning=-3)]
    silent = Response(0, meaning=9, answered=False)
    assert rewards_of("empo", [*answers, silent]) == pytest.approx([2 / 5, 2 / 5, 1 / 5, 1 / 5, 0])
    assert rewards_of("empo", [*answers, replace(silent, reward=NAN)])[:4] == pytest.approx([0.5, 0.5, 0.25, 0.25])


def test_empo_gives_nothing_where_no_two_answers_agree() -> None:
    assert rewards_of("empo", [Response(2, meaning=i) for i in range(5)]) == [0] * 5
    assert rewards_of("empo", [Response(2, meaning=0)]) == [1]
    assert rewards_of("empo", [Response(2, meaning=0), Response(NAN, meaning=0)])[0] == 1


def test_empo_reads_the_tasks_clusters() -> None:
    group = [Response(0, meaning=i) for i in range(4)]
    assert rewards_of("empo", group, task_clusters=torch.tensor([[0, 0, 0, 1]])) == [0.75, 0.75, 0.75, 0.25]
    rollouts = as_rollouts([group], math_clusters=torch.tensor([[0, 0, 1, 1]]))
    assert get_method("empo", clusters="math").reward(rollouts)[0].tolist() == [0.5] * 4


def sure(reward: float, confidence: float, **fields: Any) -> Response:
    """A response whose answer has this likelihood under the reference; a token of the reasoning has another one."""
    half = math.log(confidence) / 2
    return Response(reward, ref_logps=[-3.0, half * 3, half], answer=[False, True, True], logps=[0.0] * 3, **fields)


def test_grpo_care_bonus_by_hand() -> None:
    """Mean accuracy is 0.5: accurate are the first four. Their confidences, 0.95 at most, have the mean 0.6975, and
    those from 0.6875 on earn half of their accuracy, times the range of 2."""
    group = [sure(2, 0.99), sure(2, 0.69), sure(1, 0.68), sure(1, 0.47), sure(0, 0.9), sure(0, 0.9)]
    assert rewards_of("care", group) == pytest.approx([3, 3, 1, 1, 0, 0])
    # With 0.75 for the third, the mean is 0.715 and the second is too far below it.
    assert rewards_of("care", [*group[:2], sure(1, 0.75), *group[3:]]) == pytest.approx([3, 2, 1.5, 1, 0, 0])
    assert rewards_of("care", [*group, sure(NAN, 1e-9)])[:6] == pytest.approx([3, 3, 1, 1, 0, 0])


def test_grpo_care_confidence_is_capped_at_0_95() -> None:
    """Without the cap the mean were 0.98 and the second would be more than 0.01 below it."""
    assert rewards_of("care", [sure(2, 1.0), sure(2, 0.96)]) == pytest.approx([3, 3])
    # With the cap at 0.95 the mean is 0.9445, and 0.939 is within 0.01 of it; 0.929 is not.
    assert rewards_of("care", [sure(2, 1.0), sure(2, 0.939)]) == pytest.approx([3, 3])
    assert rewards_of("care", [sure(2, 1.0), sure(2, 0.929)]) == pytest.approx([3, 2])


def test_grpo_care_accurate_is_above_0_1_and_at_least_the_mean() -> None:
    assert rewards_of("care", [sure(0.2, 0.5), sure(0.2, 0.5)]) == pytest.approx([0.2, 0.2])  # acc = 0.1
    assert rewards_of("care", [sure(0.22, 0.5), sure(0.22, 0.5)]) == pytest.approx([0.33, 0.33])
    assert rewards_of("care", [sure(1.0, 0.5), sure(2, 0.5), sure(1.2, 0.5)]) == pytest.approx([1, 3, 1.2])
    assert rewards_of("care", [sure(1.0, 0.5), sure(2, 0.5), sure(1.5, 0.5)]) == pytest.approx([1, 3, 2.25])


@for_all(ninths=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@example(ninths=[1, 1, 1, 2, 5])  # the mean of these in floating point is above 2/9
@example(ninths=[1, 1, 3, 7])
def test_grpo_care_an_accuracy_that_is_the_mean_counts_as_accurate(ninths: list[int]) -> None:
    """F1 scores are fractions such as 1/3, whose mean is rounded; the bonus should not hang on that."""
    found = rewards_of("care", [sure(2 * x / 9, 0.5) for x in ninths])
    accurate = [x * len(ninths) >= sum(ninths) for x in ninths]
    assert found == pytest.approx([2 * x / 9 * (1.5 if a else 1) for x, a in zip(ninths, accurate, strict=True)])


def test_grpo_care_constants_are_options_and_the_bonus_has_the_unit_of_the_rewards() -> None:
    group = [sure(2, 0.8), sure(2, 0.6), sure(0, 0.1)]
    rollouts = as_rollouts([group])
    assert get_method("care", coefficient=1.0).reward(rollouts)[0].tolist() == pytest.approx([4, 2, 0])
    assert get_method("care", margin=0.1).reward(rollouts)[0].tolist() == pytest.approx([3, 3, 0])
    assert get_method("care", cap=0.6).reward(rollouts)[0].tolist() == pytest.approx([3, 3, 0])
    # From -1 to 3: acc is 3/4, 3/4 and 1/4, and half of it, times 4, is 1.5.
    assert rewards_of("care", group, reward_range=(-1.0, 3.0)) == pytest.approx([3.5, 2, 0])


def test_grpo_care_an_empty_answer_is_not_accurate() -> None:
    silent = Response(2, ref_logps=[-0.01] * 3, answer=[False] * 3, logps=[0.0] * 3)
    assert rewards_of("care", [sure(2, 0.5), silent, sure(0, 0.5)]) == pytest.approx([3, 2, 0])
    assert rewards_of("care", [sure(0, 0.5), sure(0, 0.9)]) == [0, 0]  # no accurate response, no mean


def test_gcpo_appendix_e2_agreement_bonus_by_hand() -> None:
    """Mean cosines with the three others, at 0, 0, 60 and 90 degrees: 1/2, 1/2, (1 + sqrt(3)/2)/3 = 0.62 and 0.29,
    0.477 on average."""
    group = [Response(2, angle=0), Response(1, angle=0), Response(1.5, angle=60), Response(2, angle=90)]
    assert rewards_of("care_agreement", group) == pytest.approx([3, 1, 2.25, 2])  # 1 is not right, 2 does not agree
    assert rewards_of("care_agreement", [*group, Response(NAN, angle=90)])[:4] == pytest.approx([3, 1, 2.25, 2])
    rollouts = as_rollouts([group])
    assert get_method("care_agreement", coefficient=1).reward(rollouts)[0].tolist() == pytest.approx([4, 1, 3, 2])
    # From 0 to 3: acc is 2/3, 1/3, 1/2 (not right) and 2/3.
    assert rewards_of("care_agreement", group, reward_range=(0.0, 3.0)) == pytest.approx([3, 1, 1.5, 2])


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_gcpo_appendix_e2_answers_that_agree_equally_agree(size: int) -> None:
    """Equal answers, and answers evenly round the circle, whose mean cosines differ by rounding alone."""
    for first in (0.0, 0.1, 17.0, 233.0):
        assert rewards_of("care_agreement", [Response(2, angle=first)] * size) == [3] * size
        around = [Response(2, angle=first + 360 * i / size) for i in range(size)]
        assert rewards_of("care_agreement", around) == [3] * size


def long(tokens: int, reward: float) -> Response:
    return Response(reward, logps=[-1.0] * tokens)


def test_dapo_eq13_soft_overlong_punishment() -> None:
    """Up to 16 of 20 tokens are free, 20 cost 1."""
    group = [long(0, 2), long(16, 2), long(17, 0), long(18, 2), long(20, 0)]
    expected = [2, 2, -0.25, 1.5, -1]
    assert rewards_of("dapo", group) == pytest.approx(expected)  # the longest response is as long as can be
    assert rewards_of("dapo", group, max_completion_length=20) == pytest.approx(expected)
    assert rewards_of("dapo", group, max_completion_length=40) == own(group)
    # At 19 tokens 15.2 are free and 3.8 lie between; 20 tokens cannot cost more than 1.
    assert rewards_of("dapo", group, max_completion_length=19) == pytest.approx(
        [2, 2 - 0.8 / 3.8, -1.8 / 3.8, 2 - 2.8 / 3.8, -1]
    )
    rollouts = as_rollouts([group], max_completion_length=20)
    assert get_method("dapo", share=0.5).reward(rollouts)[0].tolist() == pytest.approx([2, 1.4, -0.7, 1.2, -1])
    # Rewards that span 4 are twice DAPO's own, -1 and 1.
    assert rewards_of("dapo", group, reward_range=(-1.0, 3.0)) == pytest.approx([2, 2, -0.5, 1, -2])


def test_dapo_leaves_groups_of_equal_rewards_untouched() -> None:
    group = [long(1, 1.3), long(5, 1.3), long(5, NAN)]
    rollouts = as_rollouts([group])
    assert METHODS["dapo"].reward(rollouts)[0, :2].tolist() == [1.3, 1.3]
    assert advantages("dapo", rollouts).eq(0).all()
