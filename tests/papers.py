"""Every formula once, as its paper prints it: the oracle that the package is tested against.

Plain loops over numbers, and nothing from the package. ``METHODS`` says what each method makes of a batch of groups, in
which every response has a reward in [0, 2]; what becomes of the others is tested as a property of every method.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pvariance, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import expm

Vector = Sequence[float]

TOP = 2.0  # of the range of rewards, which begins at 0
LONGEST = 4  # tokens that a response can have
TOKENS = ("logps", "entropies", "ref_logps", "ratios", "answer_mask")


def clip(x: float, low: float = 0.0, high: float = 1.0) -> float:
    return min(max(x, low), high)


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(vector: Vector) -> list[float]:
    return [x / math.sqrt(dot(vector, vector)) for x in vector]


def total(vectors: Iterable[Vector]) -> list[float]:
    return [sum(column) for column in zip(*vectors, strict=True)]


def entropy(probabilities: Iterable[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)


# --- base advantages ------------------------------------------------------------------------------------------------


def dr_grpo(rewards: Vector) -> list[float]:
    """Dr. GRPO: r - mean."""
    return [r - fmean(rewards) for r in rewards]


def grpo(rewards: Vector, batch: Vector | None = None) -> list[float]:
    """GCPO Eq. 1: (r - mean) / (std + epsilon), with TRL's n - 1 and 1e-4; std of the group, or of the whole batch."""
    if len(set(rewards)) < 2:
        return [0.0 for _ in rewards]
    return [a / (stdev(batch or rewards) + 1e-4) for a in dr_grpo(rewards)]


def egpo_eq13(rewards: Vector) -> list[float]:
    """EGPO Eq. 13: A = -1 in an entirely wrong group."""
    return grpo(rewards) if any(right(rewards)) else [-1.0 for _ in rewards]


def right(rewards: Vector) -> list[bool]:
    """F1 above 1/2, strictly, for rewards of 2 F1."""
    return [r / TOP > 0.5 for r in rewards]


# --- disagreement of a group ----------------------------------------------------------------------------------------


def alpha_g(alpha: float, size: int) -> float:
    """GCPO section 3.4: alpha_base / log G."""
    return alpha / math.log(size)


def cd(embeddings: Sequence[Vector]) -> float:
    """GCPO Eq. 7: sum_ij pi_i pi_j D_ij, with pi = 1/G and D_ij = clip(1 - mu_i mu_j, 0, 1); i = j counts."""
    mu = [unit(e) for e in embeddings]
    return sum(clip(1 - dot(a, b)) for a in mu for b in mu) / len(mu) ** 2


def bot(embeddings: Sequence[Vector], clusters: Sequence[int]) -> float:
    """GCPO Eqs. 9-10: the mean cost (1 - cos)/2 of moving the clusters' centroids to their barycentre."""
    mu = [unit(e) for e in embeddings]
    mass = {k: clusters.count(k) / len(clusters) for k in clusters}
    centroid = {k: unit(total(m for m, z in zip(mu, clusters, strict=True) if z == k)) for k in mass}
    star = unit(total([mass[k] * x for x in centroid[k]] for k in mass))
    return sum(mass[k] * (1 - dot(centroid[k], star)) / 2 for k in mass)


def omega_geo(u: float, strength: float) -> float:
    """GCPO Eq. 8, and the same for BoT: clip(1 - alpha_G u^2, 0, 1)."""
    return clip(1 - strength * u**2)


def rd(rewards: Vector, low: float = 0.0, high: float = TOP) -> float:
    """GCPO Eq. 11: sum |r - mean| over RD_max, its value for half of the rewards at either end."""

    def spread(values: Vector) -> float:
        return sum(abs(r - fmean(values)) for r in values)

    half = len(rewards) // 2
    return clip(spread(rewards) / spread([low] * half + [high] * (len(rewards) - half))) if half else 0.0


def omega_rd(rewards: Vector, strength: float) -> float:
    """GCPO Eq. 11: 1 + alpha_G RD."""
    return 1 + strength * rd(rewards)


def se_counts(clusters: Sequence[int]) -> float:
    """GCPO section 2.1: the entropy of cluster shares n_k/G."""
    return entropy(clusters.count(k) / len(clusters) for k in set(clusters))


def masses(clusters: Sequence[int], logps: Vector) -> list[float]:
    """SEED-GRPO Eq. 5: p(C_k), the likelihood of a cluster's members."""
    return [sum(math.exp(lp) for lp, z in zip(logps, clusters, strict=True) if z == k) for k in set(clusters)]


def se_rao(clusters: Sequence[int], logps: Vector) -> float:
    """SEED-GRPO's code: the entropy of the clusters' shares of likelihood."""
    return entropy(p / sum(masses(clusters, logps)) for p in masses(clusters, logps))


def se_mean(clusters: Sequence[int]) -> float:
    """That equation with the shares of the clusters that were seen: SE = 0 for one of them, at most log G."""
    return -fmean(math.log(clusters.count(label) / len(clusters)) for label in {*clusters})


def se_mc(clusters: Sequence[int], logps: Vector) -> float:
    """SEED-GRPO Eq. 5: -(1/K) sum_k log p(C_k)."""
    return -fmean(math.log(p) for p in masses(clusters, logps))


def bidirectional(nli: Sequence[Sequence[Vector]], answered: Sequence[bool]) -> list[int]:
    """Kuhn et al. 2023: a response joins the first cluster whose first member it entails, and is entailed by: both
    times the likeliest of entailment, neutral and contradiction. No answer is alone."""
    first: list[int] = []  # of each cluster
    labels = []
    for i, row in enumerate(nli):
        same = [
            answered[i] and answered[j] and max(nli[j][i]) == nli[j][i][0] and max(row[j]) == row[j][0] for j in first
        ]
        if True not in same:
            first.append(i)
        labels.append([*same, True].index(True))
    return labels


def kle(nli: Sequence[Sequence[Vector]], kernel: str = "heat", t: float = 0.3) -> float:
    """Nikitin et al. 2024: the von Neumann entropy of a graph kernel. Edges weigh entailment + neutral/2, both ways."""
    size = range(len(nli))
    one_way = [[nli[i][j][0] + nli[i][j][1] / 2 if i != j else 0.0 for j in size] for i in size]
    weight = np.array([[one_way[i][j] + one_way[j][i] for j in size] for i in size])
    laplacian = np.diag(weight.sum(1)) - weight
    k = expm(-t * laplacian) if kernel == "heat" else np.linalg.inv(2 * np.eye(len(nli)) + laplacian)
    density = [[k[i, j] / math.sqrt(k[i, i] * k[j, j]) / len(nli) for j in size] for i in size]
    return entropy(np.linalg.eigvalsh(density))


def nearest_neighbour(embeddings: Sequence[Vector], tau: float = 1.0) -> float:
    """Nguyen et al. 2025: -(1/n) sum_i log sum_j exp(similarity / tau), with cosines."""
    rows = [unit(row) for row in embeddings]
    return -fmean(math.log(sum(math.exp(dot(a, b) / tau) for b in rows)) for a in rows)


def eigenscore(embeddings: Sequence[Vector], alpha: float = 1e-3) -> float:
    """Chen et al. 2024: the mean log eigenvalue of Z^T J_d Z + alpha I, responses as columns of Z."""
    z = np.array(embeddings).T
    centring = np.eye(len(z)) - 1 / len(z)
    return fmean(np.log(np.linalg.eigvalsh(z.T @ centring @ z + alpha * np.eye(z.shape[1]))))


def _similar(nli: Sequence[Sequence[Vector]], affinity: str) -> np.ndarray:
    size = range(len(nli))
    one_way = [[nli[i][j][0] if affinity == "entail" else 1 - nli[i][j][2] for j in size] for i in size]
    return np.array([[1.0 if i == j else (one_way[i][j] + one_way[j][i]) / 2 for j in size] for i in size])


def _laplacian(similar: np.ndarray) -> np.ndarray:
    root = np.diag(similar.sum(1) ** -0.5)
    return np.eye(len(similar)) - root @ similar @ root


def degree(nli: Sequence[Sequence[Vector]], affinity: str = "entail") -> float:
    """Lin et al. 2024: trace(m I - D) / m^2."""
    degrees = _similar(nli, affinity).sum(1)
    return sum(len(nli) - d for d in degrees) / len(nli) ** 2


def eigenvalues(nli: Sequence[Sequence[Vector]], affinity: str = "entail") -> float:
    """Lin et al. 2024: the sum of max(0, 1 - eigenvalue)."""
    return sum(max(0.0, 1 - value) for value in np.linalg.eigvalsh(_laplacian(_similar(nli, affinity))))


def eccentricity(nli: Sequence[Sequence[Vector]], affinity: str = "entail", threshold: float = 0.9) -> float:
    """Lin et al. 2024: |[v_1 - mean, ..., v_m - mean]|, v_j the j-th entries of the informative eigenvectors."""
    values, vectors = np.linalg.eigh(_laplacian(_similar(nli, affinity)))
    places = vectors[:, values < threshold]
    return float(np.sqrt(sum(np.sum((row - places.mean(0)) ** 2) for row in places)))


def density(nli: Sequence[Sequence[Vector]], logps: Vector, answers: Sequence[int]) -> float:
    """Qiu & Miikkulainen 2024: 1 - the mean density of the responses; equal answers share a weight."""
    size, weight = range(len(nli)), [math.exp(lp) / answers.count(of) for lp, of in zip(logps, answers, strict=True)]

    def squared(i: int, j: int) -> float:
        return 0.0 if i == j else fmean(nli[a][b][2] + nli[a][b][1] / 2 for a, b in ((i, j), (j, i)))

    return 1 - fmean(sum(weight[i] * max(0.0, 1 - squared(i, j)) for i in size) / sum(weight) for j in size)


def sequence_mean(logps: Vector, lengths: Iterable[int]) -> float:
    """-(1/G) sum of per-token mean log-likelihoods, of the responses that have a token."""
    means = [lp / n for lp, n in zip(logps, lengths, strict=True) if n]
    return -fmean(means) if means else 0.0


def qhawkeye(rewards: Vector, low: float = 0.0, high: float = TOP) -> float:
    """Q-Hawkeye's u: the population variance over (range/2)^2."""
    return clip(pvariance(rewards) / ((high - low) / 2) ** 2)


# --- uncertainty of a response --------------------------------------------------------------------------------------

CALM, BOLD, BOTH = (0.8, 1.0), (1.0, 2.0), (0.8, 2.0)


def edge_grpo(entropies: Vector, epsilon: float = 0.0) -> list[float]:
    """EDGE-GRPO: mean entropy over own entropy."""
    return [fmean(entropies) / (h + epsilon) for h in entropies]


def egspo(entropies: Vector, epsilon: float = 0.0) -> list[float]:
    """EG-SPO-style (GCPO App. G): own over mean entropy, within [0.5, 1]."""
    return [clip(h / (fmean(entropies) + epsilon), 0.5, 1) for h in entropies]


def egpo_eq5(logps: Vector) -> float:
    """EGPO Eq. 5: the mean negative log-likelihood of a response's tokens."""
    return -fmean(logps)


def egpo_eq7(entropies: Vector) -> list[float]:
    """EGPO Eq. 7: mean H / (H + 1e-5)."""
    return [fmean(entropies) / (h + 1e-5) for h in entropies]


def egpo_eq8(ratios: Vector, rewards: Vector, correct: Vector = BOLD, wrong: Vector = CALM) -> list[float]:
    """EGPO Eq. 8: right responses within [1, 2], wrong ones within [0.8, 1]."""
    return [clip(x, *(correct if ok else wrong)) for x, ok in zip(ratios, right(rewards), strict=True)]


def egpo_eq9(weights: Vector) -> list[float]:
    """EGPO Eq. 9: over the group's mean."""
    return [w / fmean(weights) for w in weights]


def r2vpo(ratios: Vector) -> float:
    """R2VPO-style (GCPO App. G): 1 / (1 + lambda Var_t rho), lambda = 1."""
    return 1 / (1 + pvariance(ratios))


# --- rewards --------------------------------------------------------------------------------------------------------


def dapo_eq13(length: int, longest: int) -> float:
    """DAPO Eq. 13, soft overlong punishment: the last fifth of the allowed length costs up to 1; rewards span 2."""
    cache = longest / 5
    return clip((longest - cache - length) / cache, -1, 0)


def empo(clusters: Sequence[int], answered: Sequence[bool]) -> list[float]:
    """EMPO: the share of the own cluster; 0 without an answer, and for all where no two agree."""
    agree = len(set(clusters)) < len(clusters)
    return [clusters.count(z) / len(clusters) * agree * ok for z, ok in zip(clusters, answered, strict=True)]


def care(accuracy: Vector, answers: Sequence[Vector]) -> list[float]:
    """GRPO-CARE: accurate responses (above 0.1, and at the mean) whose answer's tokens are about as likely under the
    reference as those of accurate ones earn half of their accuracy."""
    accurate = [bool(row) and acc > 0.1 and acc >= fmean(accuracy) for acc, row in zip(accuracy, answers, strict=True)]
    confidence = [min(math.exp(fmean(row)), 0.95) if row else 0.0 for row in answers]
    level = fmean([c for c, ok in zip(confidence, accurate, strict=True) if ok] or [0.0])
    return [0.5 * a * (ok and c >= level - 0.01) for a, ok, c in zip(accuracy, accurate, confidence, strict=True)]


def care_agreement(accuracy: Vector, embeddings: Sequence[Vector]) -> list[float]:
    """GCPO App. E.2: the same bonus for right answers whose mean cosine with the others reaches the group's mean."""
    mu = [unit(e) for e in embeddings]
    cosine = [fmean(dot(a, b) for b in mu if b is not a) for a in mu]
    return [0.5 * acc * (acc > 0.5 and c >= fmean(cosine)) for acc, c in zip(accuracy, cosine, strict=True)]


# --- tokens ---------------------------------------------------------------------------------------------------------


def cw_grpo(logps: Sequence[Vector], advantages: Vector) -> list[list[float]]:
    """CW-GRPO section 2.3: exp(-c^2 / 2 sigma^2) over its mean, c = (log pi - mean)(A - mean); 1 where sigma = 0."""
    level, middle = fmean(x for row in logps for x in row), fmean(advantages)
    c = [[(x - level) * (a - middle) for x in row] for row, a in zip(logps, advantages, strict=True)]
    sigma2, square = pvariance([x for row in c for x in row]), fmean(x**2 for row in c for x in row)
    if sigma2 <= 1e-28 * square:
        return [[1.0 for _ in row] for row in c]
    kernel = [[math.exp(-(x**2) / (2 * sigma2)) for x in row] for row in c]
    mean = fmean(w for row in kernel for w in row)
    return [[w / mean for w in row] for row in kernel]


def covariances(logps: Sequence[Vector], advantages: Vector) -> list[list[float]]:
    """Cui et al. 2025: (log pi - mean)(A - mean) of a batch of responses, with both means over all of its tokens."""
    rows = list(zip(logps, advantages, strict=True))
    level, middle = fmean(x for row, _ in rows for x in row), fmean(a for row, a in rows for _ in row)
    return [[(x - level) * (a - middle) for x in row] for row, a in rows]


def ppo_stops(advantage: float, ratio: float) -> bool:
    """PPO's clip at 0.2 holds this token already."""
    return (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)


# --- methods --------------------------------------------------------------------------------------------------------


class Group(SimpleNamespace):
    """The responses to one prompt: lists with an entry each, and of tokens one per token, named as in ``Rollouts``."""

    @property
    def accuracy(self) -> list[float]:
        return [r / TOP for r in self.rewards]

    def means(self, name: str) -> list[float]:
        return [fmean(row) for row in getattr(self, name)]

    def answers(self) -> list[list[float]]:
        """The reference's log-probabilities of the answer's tokens."""
        rows = zip(self.ref_logps, self.answer_mask, strict=True)
        return [[x for x, counts in zip(row, mask, strict=True) if counts] for row, mask in rows]


class Expected(NamedTuple):
    """Results of a method on a batch: lists by group and response, and by token where it weighs tokens."""

    base: list[list[float]]  # the advantages that are weighed
    weights: list[list[Any]]
    paid: list[list[list[float]]] | None = None  # 1 for tokens that may pay a penalty in the loss


Method = Callable[[Sequence[Group], float | None], Expected]
Base = Callable[[Group], list[float]]


def eq1(g: Group) -> list[float]:
    return grpo(g.rewards)


def centred(g: Group) -> list[float]:
    return dr_grpo(g.rewards)


def each(base: Base = eq1, weigh: Callable[[Group], list[Any]] = lambda g: [1.0] * len(g.rewards)) -> Method:
    """A method that looks at one group at a time and has no alpha."""
    return lambda groups, alpha: Expected([base(g) for g in groups], [weigh(g) for g in groups])


def per_group(
    weigh: Callable[[Group, float], float], base: Base = eq1, alpha: float = 0.6, divided: bool = True
) -> Method:
    """One weight for all of a group, made at the strength alpha / log G."""

    def method(groups: Sequence[Group], own: float | None) -> Expected:
        def weights(g: Group) -> list[float]:
            size, strength = len(g.rewards), alpha if own is None else own
            return [weigh(g, alpha_g(strength, size) if divided else strength)] * size

        return each(base, weights)(groups, None)

    return method


def damped(score: Callable[[Group], float], **how: Any) -> Method:
    """A weight of clip(1 - alpha u, 0, 1)."""
    return per_group(lambda g, a: clip(1 - a * score(g)), **how)


def geometric(score: Callable[[Group], float]) -> Method:
    """GCPO Eq. 8 alone."""
    return per_group(lambda g, a: omega_geo(score(g), a))


def strong(groups: Sequence[Group], alpha: float | None) -> Expected:
    """Our control: gcpo_bot's weights to the power of 16."""
    found = METHODS["gcpo_bot"](groups, alpha)
    return found._replace(weights=[[w**16 for w in row] for row in found.weights])


def half(groups: Sequence[Group], alpha: float | None) -> Expected:
    """Our control: weight 0 for half of the groups, by a permutation of theirs that seed 0 draws."""
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
    dropped = order[: len(groups) // 2]
    found = each()(groups, None)
    weights = [[float(place not in dropped) for _ in g.rewards] for place, g in enumerate(groups)]
    return found._replace(weights=weights)


def shuffled(of: str) -> Method:
    """Our control: another group's weights of a method. Two groups can only swap them."""
    return lambda groups, alpha: each()(groups, None)._replace(weights=METHODS[of](groups, alpha).weights[::-1])


def rewarded(bonus: Callable[[Group], list[float]]) -> Method:
    """GRPO on rewards with a bonus, which is in the unit of the accuracy."""
    return each(lambda g: grpo([r + TOP * b for r, b in zip(g.rewards, bonus(g), strict=True)]))


def dapo(g: Group) -> list[float]:
    """Groups of equal rewards are dropped before lengths are looked at."""
    costs = [dapo_eq13(len(row), LONGEST) for row in g.logps]
    return grpo([r + c for r, c in zip(g.rewards, costs, strict=True)]) if any(grpo(g.rewards)) else grpo(g.rewards)


def egpo(correct: Vector = BOLD, wrong: Vector = CALM, *, renorm: str = "", locked: bool = False) -> Method:
    """EGPO, and Table 2's C1 to C6."""

    def weights(g: Group) -> list[float]:
        ratios = egpo_eq7([egpo_eq5(row) for row in g.logps])
        if renorm == "before":
            ratios = egpo_eq9([min(x, 10) for x in ratios])  # our ceiling: one certain response would rule the mean
        found = egpo_eq8(ratios, g.rewards, correct, wrong)
        if locked and not any(right(g.rewards)):
            return [1.0 for _ in found]
        return egpo_eq9(found) if renorm == "after" else found

    return each(lambda g: egpo_eq13(g.rewards), weights)


def rows_of(groups: Sequence[Group]) -> tuple[list[float], list[Vector], list[list[float]]]:
    """Return advantage, ratios and covariances of all responses under the policy of this very step, pi = pi_old rho."""
    advantages = [a for g in groups for a in grpo(g.rewards)]
    pairs = [pair for g in groups for pair in zip(g.logps, g.ratios, strict=True)]
    now = [[x + math.log(rho) for x, rho in zip(*pair, strict=True)] for pair in pairs]
    return advantages, [ratios for _, ratios in pairs], covariances(now, advantages)


def by_group(rows: Iterable[Any], groups: Sequence[Group]) -> list[list[Any]]:
    one = iter(rows)
    return [[next(one) for _ in g.rewards] for g in groups]


def clip_cov(groups: Sequence[Group], alpha: float | None) -> Expected:
    """Clip-Cov: 0 for every candidate, a token of a covariance in (1, 5) that PPO's clip does not hold."""
    base, *rows = rows_of(groups)
    weights = [
        [0.0 if 1 < c < 5 and not ppo_stops(a, rho) else 1.0 for rho, c in zip(*tokens, strict=True)]
        for a, *tokens in zip(base, *rows, strict=True)
    ]
    return Expected(by_group(base, groups), by_group(weights, groups))


def kl_cov(groups: Sequence[Group], alpha: float | None) -> Expected:
    """KL-Cov: of fewer than 1000 tokens one pays, one of the largest covariance."""
    _, _, rows = rows_of(groups)
    largest = max(c for row in rows for c in row)
    paid = [[float(c == largest) for c in row] for row in rows]
    return each()(groups, None)._replace(paid=by_group(paid, groups))


METHODS: dict[str, Method] = {
    "grpo": each(),
    "dr_grpo": each(centred),
    "dapo": each(dapo),
    # one weight per group
    "se": damped(lambda g: se_counts(g.clusters)),
    "seed_grpo": per_group(
        lambda g, a: 1 / (1 + a * se_rao(g.exact_clusters, g.means("logps"))), base=centred, alpha=0.0417
    ),
    "kle": damped(lambda g: kle(g.nli)),
    "cd_only": geometric(lambda g: cd(g.embeddings)),
    "bot_only": geometric(lambda g: bot(g.embeddings, g.clusters)),
    "rd_only": per_group(lambda g, a: omega_rd(g.rewards, a)),
    "gcpo_cd": per_group(lambda g, a: omega_geo(cd(g.embeddings), a) * omega_rd(g.rewards, a)),
    "gcpo_bot": per_group(lambda g, a: omega_geo(bot(g.embeddings, g.clusters), a) * omega_rd(g.rewards, a)),
    "gcpo_shuffled": shuffled("gcpo_bot"),
    "gcpo_strong": strong,
    "se_shuffled": shuffled("se"),
    "drop_half": half,
    "qhawkeye": damped(lambda g: qhawkeye(g.rewards), alpha=0.2, divided=False),
    # other rewards
    "empo": each(lambda g: grpo(empo(g.clusters, g.answered))),
    "care": rewarded(lambda g: care(g.accuracy, g.answers())),
    "care_agreement": rewarded(lambda g: care_agreement(g.accuracy, g.embeddings)),
    # one weight per response
    "egspo": each(weigh=lambda g: egspo(g.means("entropies"))),
    "edge_grpo": each(weigh=lambda g: edge_grpo(g.means("entropies"))),
    "egpo": egpo(),
    "egpo_c1": egpo(BOTH, BOTH),
    "egpo_c2": egpo(BOTH, CALM),
    "egpo_c3": egpo(BOLD, BOTH),
    "egpo_c4": egpo(locked=True),
    "egpo_c5": egpo(renorm="after"),
    "egpo_c6": egpo(renorm="before"),
    "r2vpo": each(weigh=lambda g: [r2vpo(row) for row in g.ratios]),
    # one weight per token
    "cw_grpo": each(weigh=lambda g: cw_grpo(g.logps, grpo(g.rewards))),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def gcpo_bot(geo: float | None = None, rd: float | None = None, divided: bool = True) -> Method:
    """GCPO with a strength of its own for either factor."""

    def weigh(g: Group, a: float) -> float:
        strengths = [a if own is None else alpha_g(own, len(g.rewards)) if divided else own for own in (geo, rd)]
        return omega_geo(bot(g.embeddings, g.clusters), strengths[0]) * omega_rd(g.rewards, strengths[1])

    return per_group(weigh, divided=divided)


def both_ways(g: Group) -> list[int]:
    return bidirectional(g.nli, g.answered)


# What options make of a method: the method, its options, and the rule.
OPTIONS: dict[str, tuple[str, dict[str, Any], Method]] = {
    "alpha_geo 0": ("gcpo_bot", {"alpha_geo": 0.0, "alpha_rd": None}, gcpo_bot(geo=0.0)),
    "alphas undivided": (
        "gcpo_bot",
        {"alpha_geo": 1.7, "alpha_rd": 0.1, "alpha_norm": "none"},
        gcpo_bot(1.7, 0.1, divided=False),
    ),
    "qhawkeye over log G": ("qhawkeye", {"alpha_norm": "log_g"}, damped(lambda g: qhawkeye(g.rewards), alpha=0.2)),
    "SEED-GRPO Eq. 6 as printed": (
        "seed_grpo",
        {"form": "linear", "estimator": "counts", "alpha_norm": "none"},
        damped(lambda g: se_counts(g.exact_clusters), base=centred, alpha=0.0417, divided=False),
    ),
    "se, both ways": ("se", {"clusters": "bidirectional"}, damped(lambda g: se_counts(both_ways(g)))),
    "bot_only, both ways": (
        "bot_only",
        {"clusters": "bidirectional"},
        geometric(lambda g: bot(g.embeddings, both_ways(g))),
    ),
    "empo, both ways": ("empo", {"clusters": "bidirectional"}, each(lambda g: grpo(empo(both_ways(g), g.answered)))),
    "kle, t": ("kle", {"t": 0.05}, damped(lambda g: kle(g.nli, t=0.05))),
    "kle, kernel": ("kle", {"kernel": "matern"}, damped(lambda g: kle(g.nli, "matern"))),
    "edge_grpo, epsilon": ("edge_grpo", {"epsilon": 0.3}, each(weigh=lambda g: edge_grpo(g.means("entropies"), 0.3))),
    "egspo, epsilon": ("egspo", {"epsilon": 0.3}, each(weigh=lambda g: egspo(g.means("entropies"), 0.3))),
}


# --- groups to try them on ------------------------------------------------------------------------------------------


def features(*groups: Group) -> dict[str, torch.Tensor]:
    """The arguments of ``Rollouts``. Where a response has no token there is NaN: nothing may read it."""
    found: dict[str, torch.Tensor] = {}
    for name in vars(groups[0]):
        rows = [getattr(g, name) for g in groups]
        if name in TOKENS:
            longest = max(len(row) for g in rows for row in g)
            found["mask"] = torch.tensor([[[t < len(row) for t in range(longest)] for row in g] for g in rows])
            rows = [[[*row, *[math.nan] * (longest - len(row))] for row in g] for g in rows]
        found[name] = torch.tensor(rows, dtype=torch.long if "clusters" in name else torch.float64)
    return found


def sampled(seed: int, groups: int, size: int, shortest: int = 1) -> list[Group]:
    """Random groups; some of them are entirely wrong. The first response of each has a token, whatever the shortest."""
    rng = random.Random(seed)

    def group(rewards: Sequence[float]) -> Group:
        def draw(one: Callable[[], Any]) -> list[Any]:
            return [one() for _ in range(size)]

        lengths = [rng.randint(max(shortest, i == 0), LONGEST) for i in range(size)]
        scales = draw(lambda: rng.choice([0.1, 0.5, 1.0, 2.0]))

        def tokens(one: Callable[[float], Any]) -> list[list[Any]]:
            return [[one(scale) for _ in range(n)] for n, scale in zip(lengths, scales, strict=True)]

        def verdict() -> list[float]:
            weights = [rng.random() ** 3 for _ in range(3)]
            return [w / sum(weights) for w in weights]

        return Group(
            rewards=draw(lambda: rng.choice(rewards)),
            embeddings=draw(lambda: [rng.gauss(0, 1) for _ in range(3)]),
            clusters=draw(lambda: rng.randint(-2, 1) * 7),
            exact_clusters=draw(lambda: rng.randint(0, 3)),
            nli=draw(lambda: draw(verdict)),
            answered=draw(lambda: rng.random() < 0.8),
            logps=tokens(lambda scale: -scale * rng.uniform(0.1, 3)),
            entropies=tokens(lambda scale: scale * rng.uniform(0.1, 2)),
            ref_logps=tokens(lambda scale: -scale * rng.uniform(0.01, 1)),
            ratios=tokens(lambda scale: math.exp(rng.uniform(-0.5, 0.5))),
            answer_mask=tokens(lambda scale: rng.random() < 0.6),
        )

    return [group(rng.choice([(0, 0.25, 0.5, 1), (0, 0.5, 1, 1.25, 2), (0, 0.25, 1, 1.5, 2)])) for _ in range(groups)]
