"""Uncertainty measures of the G responses to one prompt.

Each function reduces a group, (..., G, ...) -> (...), for any leading batch dimensions, on CPU or GPU. float64 stays
float64, any other input is read as float32. Entropies are in nats, a higher value always means more disagreement.

`mask` leaves responses out: with False at row i, row i enters no mean, no cluster and no pair, whatever its values
(NaN included). Fewer than two responses cannot disagree, so a measure of disagreement is then 0.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor

from gcpo.errors import one_of
from gcpo.masked import deviations, mean

Estimator = Literal["counts", "mean", "rao", "mc"]
COUNTED = ("counts", "mean")  # which read no likelihoods
Affinity = Literal["entail", "contradict"]
Kernel = Literal["heat", "matern"]
Mask = Bool[Tensor, "*groups G"] | None
REWARD_RANGE = (0.0, 2.0)  # 2 F1 or 2 accuracy (GCPO, Table 5)

# Function of a Laplacian eigenvalue and t; the Matern kernel (2 nu / kappa^2 + eigenvalue)^-nu has nu = kappa = 1.
KERNELS: dict[Kernel, Callable[[Tensor, float], Tensor]] = {
    "heat": lambda eigenvalue, t: torch.exp(-t * eigenvalue),
    "matern": lambda eigenvalue, t: 1 / (2 + eigenvalue),
}

# The mean of unit vectors is rounding noise below this length, and has no direction.
SHORTEST_CENTROID = 1e-6


def _real(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _check_shape(name: str, values: Tensor, shape: torch.Size) -> None:
    if values.shape != shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(shape)}")


def _kept(mask: Tensor | None, like: Tensor, shape: torch.Size) -> Tensor:
    if shape[-1:] == (0,):
        raise ValueError("a group of 0 responses has no measure: every group needs at least one")
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    _check_shape("mask", mask, shape)
    return mask.bool()


def _pairs(kept: Tensor) -> Tensor:
    return kept.unsqueeze(-1) & kept.unsqueeze(-2)


def _kept_in_pairs(nli: Tensor, mask: Tensor | None) -> Tensor:
    if nli.ndim < 3 or nli.shape[-1] != 3 or nli.shape[-2] != nli.shape[-3]:
        raise ValueError(f"nli has shape {tuple(nli.shape)}, expected (..., G, G, 3): entail, neutral, contradict")
    return _kept(mask, nli, nli.shape[:-2])


def _same_cluster(clusters: Tensor, kept: Tensor) -> Tensor:
    if clusters.is_floating_point() and not clusters[kept].isfinite().all():
        raise ValueError("clusters has labels that are not finite: label every response, or leave it out with mask")
    return (clusters.unsqueeze(-1) == clusters.unsqueeze(-2)) & _pairs(kept)


def _unit_rows(embeddings: Tensor, kept: Tensor) -> Tensor:
    rows = _real(embeddings).masked_fill(~kept.unsqueeze(-1), 1)
    # Lengths whose squares leave the type's range are scaled first, by a power of two: that rounds nothing.
    exponent = torch.frexp(rows.detach().abs().amax(-1, keepdim=True)).exponent.clamp(-100, 100)
    rows = rows * torch.exp2(-exponent.to(rows.dtype))
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)


def cosine_dispersion(embeddings: Float[Tensor, "*groups G d"], *, mask: Mask = None) -> Float[Tensor, "*groups"]:
    """Cosine dispersion CD(q), GCPO Eq. 7: the mean over all G^2 ordered pairs, i = j included, of clip(1 - cos, 0, 1).

    Dimensionless, in [0, (G - 1)/G]; exactly 0 for identical rows. Rows are L2-normalised here, so their lengths are
    free; a row of zeros has no direction and makes its group NaN.
    """
    kept = _kept(mask, embeddings, embeddings.shape[:-1])
    unit = _unit_rows(embeddings, kept)
    # For unit vectors 1 - cos is half the squared chord, which loses no digits when the vectors are close.
    chord = torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")
    distance = (chord.square() / 2).clamp(0, 1)
    pairs = _pairs(kept)
    return (distance * pairs).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1)


def barycentric_transport(
    embeddings: Float[Tensor, "*groups G d"], clusters: Int[Tensor, "*groups G"], *, mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Barycentric transport BoT(q), GCPO Eq. 9-10: the mean cost (1 - cos)/2 from the clusters to their barycentre.

    With unit centroids mu_k and cluster shares Pi_k, inserting Eq. 9 in Eq. 10 gives (1 - |sum_k Pi_k mu_k|)/2, which
    is what is computed: it is in [0, 1/2], dimensionless, and reaches its limit 1/2 where the barycentre vanishes and
    Eq. 9 is 0/0. A cluster whose members cancel (antipodal embeddings) has no centroid direction: its mu_k is the zero
    vector, at cost 1/2 from any barycentre. Cluster labels are arbitrary integers. A row of zeros makes its group NaN.

    Raises ValueError when `clusters` is not shaped like `embeddings` without its last axis.
    """
    _check_shape("clusters", clusters, embeddings.shape[:-1])
    kept = _kept(mask, embeddings, clusters.shape)
    unit = _unit_rows(embeddings, kept)
    same = _same_cluster(clusters, kept)
    centroid = same.to(unit.dtype) @ unit / same.sum(-1, keepdim=True).clamp(min=1)
    centroid = centroid / torch.linalg.vector_norm(centroid, dim=-1, keepdim=True).clamp(min=SHORTEST_CENTROID)
    count = kept.sum(-1)
    # Each row carries its cluster's centroid, so the mean over rows weighs cluster k by Pi_k.
    barycentre = centroid.sum(-2) / count.unsqueeze(-1).clamp(min=1)
    transport = (1 - torch.linalg.vector_norm(barycentre, dim=-1)) / 2
    return torch.where(count > 1, transport.clamp(min=0), 0)


def semantic_entropy(
    clusters: Int[Tensor, "*groups G"],
    logps: Float[Tensor, "*groups G"] | None = None,
    *,
    estimator: Estimator = "counts",
    mask: Mask = None,
) -> Float[Tensor, "*groups"]:
    """Semantic entropy SE(q) in nats: the entropy of the answer over its meanings, GCPO section 2.1.

    `clusters` are arbitrary integer labels; `logps` are log-likelihoods of the responses, summed over tokens or
    averaged (length-normalised), as the caller decides.

    - "counts": -sum_k (n_k/G) log(n_k/G), in [0, log G]; `logps` is not used.
    - "mean": -(1/K) sum_k log(n_k/G), SEED-GRPO Eq. 5 over the K clusters that were seen, in [0, log G]; likewise.
    - "rao": -sum_k p_k log p_k with p_k the cluster's share of the softmax of `logps`, in [0, log G].
    - "mc": -(1/K) sum_k log sum_{i in k} exp(logps_i), that equation of likelihoods as they are; unbounded and not 0
      for a single cluster, nor for a single response. No response at all gives 0.

    Raises ValueError for another estimator; "rao" and "mc" also for `logps` absent or not shaped like `clusters`.
    """
    one_of("estimator", estimator, get_args(Estimator))
    kept = _kept(mask, clusters, clusters.shape)
    same = _same_cluster(clusters, kept)
    if estimator in COUNTED:
        weight = kept.to(torch.get_default_dtype())
    else:
        if logps is None:
            raise ValueError(f'estimator="{estimator}" weighs responses by likelihood: give logps, or use "counts"')
        _check_shape("logps", logps, clusters.shape)
        logps = _real(logps).masked_fill(~kept, -torch.inf)
        if estimator == "mc":
            log_mass = torch.where(same, logps.unsqueeze(-2), -torch.inf).logsumexp(-1)
            first_of_cluster = kept & ~same.tril(-1).any(-1)
            return -torch.where(first_of_cluster, log_mass, 0).sum(-1) / first_of_cluster.sum(-1).clamp(min=1)
        weight = logps.softmax(-1).masked_fill(~kept, 0)
    tiny = torch.finfo(weight.dtype).tiny  # below it 1 / p_k is infinite
    total = weight.sum(-1, keepdim=True).clamp(min=tiny)
    cluster_share = ((same * weight.unsqueeze(-2)).sum(-1) / total).clamp(min=tiny)
    each = weight / same.sum(-1).clamp(min=1) if estimator == "mean" else weight  # the mean counts a cluster once
    return torch.xlogy(each / each.sum(-1, keepdim=True).clamp(min=tiny), 1 / cluster_share).sum(-1).clamp(min=0)


def kernel_language_entropy(
    nli: Float[Tensor, "*groups G G 3"], *, kernel: Kernel = "heat", t: float = 0.3, mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Kernel language entropy KLE(q), the von Neumann entropy of a kernel on the entailment graph: nats, in [0, log G].

    `nli[..., i, j, :]` holds the probabilities that response i entails, is neutral to, contradicts response j. An edge
    weighs entail + neutral/2, summed over both directions; the diagonal is not read. With the Laplacian L = D - W the
    kernel is K = exp(-t L) ("heat", t >= 0) or (2 I + L)^-1 ("matern", nu = kappa = 1, t not used); the density matrix
    is K_ij / (sqrt(K_ii K_jj) G). Source: Kernel Language Entropy (Nikitin et al., 2024), used in GCPO Tables 1 and 2.

    At a fixed t the value depends on G, and identical answers do not give 0: compare groups of one size only. A group
    with an edge that is not finite is NaN.

    Raises ValueError for another kernel, for t < 0, and for a tensor not shaped (..., G, G, 3).
    """
    one_of("kernel", kernel, KERNELS)
    if not 0 <= t < math.inf:
        raise ValueError(f"t is {t!r}, expected a diffusion time of at least 0")
    kept = _kept_in_pairs(nli, mask)
    pairs = _pairs(kept)
    entail, neutral, _ = _real(nli).unbind(-1)
    edges = entail + neutral / 2
    itself = torch.eye(nli.shape[-2], dtype=torch.bool, device=nli.device)
    graph = (edges + edges.mT).masked_fill(~pairs | itself, 0)
    broken = ~graph.isfinite().all(-1).all(-1)  # an error of the eigensolver for the whole batch, if left in
    graph = graph.masked_fill(broken[..., None, None], 0)
    eigenvalues, vectors = torch.linalg.eigh(torch.diag_embed(graph.sum(-1)) - graph)
    spectrum = KERNELS[kernel](eigenvalues.clamp(min=0), t)
    similarity = (vectors * spectrum.unsqueeze(-2)) @ vectors.mT
    scale = similarity.diagonal(dim1=-2, dim2=-1).rsqrt()
    count = kept.sum(-1).clamp(min=1).to(scale.dtype)
    density = similarity * scale.unsqueeze(-1) * scale.unsqueeze(-2) * pairs / count[..., None, None]
    entropy = torch.special.entr(torch.linalg.eigvalsh(density).clamp(min=0)).sum(-1)
    return torch.minimum(entropy.clamp(min=0), count.log()).masked_fill(broken, torch.nan)


def token_entropy(
    entropies: Float[Tensor, "*groups G T"], mask: Shaped[Tensor, "*groups G T"]
) -> Float[Tensor, "*groups"]:
    """Token entropy in nats: the mean over a response's tokens, then the mean over responses (GCPO App. D.3).

    `entropies` are Shannon entropies of the next-token distribution, `mask` (bool, int or float) is non-zero on the
    tokens that count; masked values are not read. In [0, log V] for V tokens. A response without a token has no mean
    and is left out; a group without any token gives 0. Raises ValueError when the shapes differ.
    """
    _check_shape("mask", mask, entropies.shape)
    valid = mask.bool()
    response_means = mean(_real(entropies), valid).squeeze(-1)
    return response_means.sum(-1) / valid.any(-1).sum(-1).clamp(min=1)


def predictive_entropy(groups: Int[Tensor, "*groups G"], *, mask: Mask = None) -> Float[Tensor, "*groups"]:
    """Predictive entropy in nats, GCPO section 2.1: -sum_k q_k log q_k, with q_k the mass of prediction groups, n_k/G.

    `groups` are arbitrary integer labels of exactly equal answers (``gcpo.semantics.exact_clusters``); of semantic
    clusters it would be :func:`semantic_entropy`. In [0, log G]. Raises ValueError for labels that are no integers.
    """
    if groups.is_floating_point():
        raise ValueError(f"groups are {groups.dtype}, expected integer labels: give likelihoods to sequence_entropy")
    return semantic_entropy(groups, mask=mask)


def sequence_entropy(
    logps: Float[Tensor, "*groups G"],
    *,
    normalise: bool = False,
    lengths: Real[Tensor, "*groups G"] | None = None,
    mask: Mask = None,
) -> Float[Tensor, "*groups"]:
    """Sequence entropy in nats: -(1/G) sum_i logps_i, the Monte-Carlo estimate of the entropy of the response.

    `logps` are log-likelihoods of sequences, summed over tokens; with `normalise` each is divided by its number of
    tokens, `lengths`, and a response without a token is left out. (Means over tokens may also be given as `logps`.) At
    least 0 for log-likelihoods; no response gives 0. The usual sample estimate.

    Raises ValueError with `normalise` for `lengths` absent or not shaped like `logps`.
    """
    kept, logps = _kept(mask, logps, logps.shape), _real(logps)
    if normalise:
        if lengths is None:
            raise ValueError("normalise=True divides by the number of tokens: give lengths, one per response")
        _check_shape("lengths", lengths, logps.shape)
        kept, logps = kept & (lengths > 0), logps / lengths
    return -torch.where(kept, logps, 0).sum(-1) / kept.sum(-1).clamp(min=1)


def self_consistency(clusters: Int[Tensor, "*groups G"], *, mask: Mask = None) -> Float[Tensor, "*groups"]:
    """Self-consistency as an uncertainty: 1 - max_k n_k/G, the share of responses outside the largest cluster.

    Dimensionless, in [0, (G - 1)/G]: 0 when all agree. `clusters` are arbitrary integer labels.
    """
    kept = _kept(mask, clusters, clusters.shape)
    count = kept.sum(-1)
    largest = _same_cluster(clusters, kept).sum(-1).amax(-1)
    return (count - largest) / count.clamp(min=1)


def reward_dispersion(
    rewards: Real[Tensor, "*groups G"], reward_range: tuple[float, float] = REWARD_RANGE
) -> Float[Tensor, "*groups"]:
    """Reward dispersion RD(q), GCPO Eq. 11: sum_i |r_i - mean| over the largest value it can take in `reward_range`.

    RD_max = (2/G) floor(G/2) ceil(G/2) (high - low), reached with half of the rewards at either end. Dimensionless, in
    [0, 1]; exactly 0 for equal rewards, clipped to 1 for rewards outside the range. NaN marks a response that could not
    be scored: it is left out and G counts the others. Raises ValueError when the range is empty.
    """
    deviation, count = _reward_deviations(rewards, reward_range)
    maximum = 2 / count * (count / 2).floor() * (count / 2).ceil() * (reward_range[1] - reward_range[0])
    return torch.where(count > 1, deviation.abs().sum(-1) / maximum, 0).clamp(0, 1)


def reward_variance(
    rewards: Real[Tensor, "*groups G"], reward_range: tuple[float, float] = REWARD_RANGE
) -> Float[Tensor, "*groups"]:
    """Variance of the rewards over the largest one in `reward_range`: Var_pop / (range / 2)^2 (Q-Hawkeye's u).

    Dimensionless, in [0, 1]; equals :func:`reward_dispersion` for rewards at the two ends and even G. Clipped to 1
    for rewards outside the range. NaN rewards are left out. Raises ValueError when the range is empty.
    """
    deviation, count = _reward_deviations(rewards, reward_range)
    variance = deviation.square().sum(-1) / count.clamp(min=1)
    return (variance / ((reward_range[1] - reward_range[0]) / 2) ** 2).clamp(0, 1)


def _reward_deviations(rewards: Tensor, reward_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """r_i - mean, 0 for NaN, and the number of rewards that are not NaN."""
    low, high = reward_range
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"reward_range is {reward_range}, expected two finite numbers, (low, high) with low < high")
    rewards = _real(rewards)
    if rewards.isinf().any():
        raise ValueError("rewards has an infinite one: give NaN to a response that could not be scored")
    valid = ~rewards.isnan()
    return deviations(rewards, valid), valid.sum(-1).to(rewards.dtype)


# --- rivals: measures that other papers propose for the same groups (spread of embeddings, graphs of entailment) ------


def nearest_neighbour_entropy(
    embeddings: Float[Tensor, "*groups G d"], *, tau: float = 1.0, mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Semantic nearest neighbour entropy: -(1/G) sum_i log sum_j exp(cos_ij / tau), j = i included.

    Nats, in [-1/tau - log G, -log(exp(1/tau) + (G - 1) exp(-1/tau))]: at its lowest where all answers are one. At a
    fixed tau the value depends on G: compare groups of one size only. Rows are L2-normalised here. Source: Beyond
    Semantic Entropy (Nguyen et al., 2025), which GCPO's App. A.1 names, with cosines of embeddings as its similarity.

    Raises ValueError for tau <= 0.
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau!r}, expected a temperature above 0")
    kept = _kept(mask, embeddings, embeddings.shape[:-1])
    unit = _unit_rows(embeddings, kept)
    near = (unit @ unit.mT / tau).masked_fill(~kept.unsqueeze(-2), -torch.inf).logsumexp(-1)
    return -torch.where(kept, near, 0).sum(-1) / kept.sum(-1).clamp(min=1)


def eigenscore(
    embeddings: Float[Tensor, "*groups G d"], *, alpha: float = 1e-3, mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """EigenScore: (1/G) log det(Z J Z^T + alpha I), with the embeddings as rows of Z, each centred over its d entries.

    In nats, at least log(alpha); not 0 for a single response. Lengths of rows count. Source: INSIDE (Chen et al.,
    2024), which takes hidden states of the policy where we have embeddings of the answers.

    Raises ValueError for alpha <= 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha!r}, expected a regulariser above 0")
    kept = _kept(mask, embeddings, embeddings.shape[:-1])
    rows = _real(embeddings).masked_fill(~kept.unsqueeze(-1), 0)
    centred = (rows - rows.mean(-1, keepdim=True)).double()  # alpha is small beside what float32 rounds away
    itself = torch.eye(kept.shape[-1], dtype=centred.dtype, device=centred.device)
    spread = torch.linalg.slogdet(centred @ centred.mT + alpha * itself).logabsdet
    left_out = (~kept).sum(-1).double() * math.log(alpha)  # of rows of zeros
    count = kept.sum(-1)
    return ((spread - left_out) / count.clamp(min=1)).masked_fill(count == 0, 0).to(rows.dtype)


def degree_uncertainty(
    nli: Float[Tensor, "*groups G G 3"], *, affinity: Affinity = "entail", mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Degree uncertainty: trace(G I - D) / G^2, one minus the mean similarity of two responses; in [0, (G - 1)/G].

    W_ij is the probability that i entails j ("entail"), or that it does not contradict it ("contradict"), the mean of
    both directions and 1 for i = j, and D the diagonal of its row sums. `nli` is that of
    :func:`kernel_language_entropy`. Source: Generating with Confidence (Lin et al., 2024), as for the next two.

    Raises ValueError for another affinity, and for a tensor not shaped (..., G, G, 3).
    """
    graph, kept = _similarities(nli, affinity, mask)
    count = kept.sum(-1)
    return (1 - graph.sum((-2, -1)) / count.square().clamp(min=1)).masked_fill(count == 0, 0)


def eccentricity(
    nli: Float[Tensor, "*groups G G 3"], *, affinity: Affinity = "entail", threshold: float = 0.9, mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Eccentricity: how far responses lie from their centre, in the eigenvectors of the graph's normalised Laplacian.

    The Frobenius norm of the (G, k) matrix of the k eigenvectors whose eigenvalue is below `threshold`, each less its
    mean; in [0, sqrt(G)], 0 where all responses are alike. Graph, source and errors as :func:`degree_uncertainty`.
    """
    graph, kept = _similarities(nli, affinity, mask)
    eigenvalues, vectors = _spectrum(graph)
    off_centre = 1 - (vectors * kept.unsqueeze(-1)).sum(-2).square() / kept.sum(-1, keepdim=True).clamp(min=1)
    informative = torch.where(1 - eigenvalues < threshold, off_centre.clamp(min=0), 0 * eigenvalues)
    return informative.sum(-1).sqrt()


def eigenvalue_uncertainty(
    nli: Float[Tensor, "*groups G G 3"], *, affinity: Affinity = "entail", mask: Mask = None
) -> Float[Tensor, "*groups"]:
    """Sum over eigenvalues of the graph's normalised Laplacian of max(0, 1 - eigenvalue): how many meanings there are.

    In [1, G] (a single response has one meaning, no response none): K where K sets of responses are alike within and
    not between. Graph, source and errors as :func:`degree_uncertainty`.
    """
    return _spectrum(_similarities(nli, affinity, mask)[0])[0].clamp(min=0).sum(-1)


def semantic_density(
    nli: Float[Tensor, "*groups G G 3"],
    logps: Float[Tensor, "*groups G"] | None = None,
    *,
    groups: Int[Tensor, "*groups G"] | None = None,
    mask: Mask = None,
) -> Float[Tensor, "*groups"]:
    """Semantic density as an uncertainty: 1 - the mean over responses j of sum_i p_i K_ij / sum_i p_i; in [0, 1).

    K_ij = 1 - (contradict + neutral/2), Epanechnikov's kernel of the distance in meaning, the mean of both directions
    and 1 for i = j. p_i is exp(`logps`), log-likelihoods averaged over tokens; alike without. The source's responses
    are distinct: with `groups`, labels of equal answers, each answer counts once. Source: Semantic Density (Qiu &
    Miikkulainen, 2024), which gives one response its density and thereby its confidence.

    Raises ValueError for `logps` or `groups` not shaped (..., G), and for a tensor not shaped (..., G, G, 3).
    """
    kept = _kept_in_pairs(nli, mask)
    _, neutral, contradict = _real(nli).unbind(-1)
    kernel = _symmetric(1 - (contradict + neutral / 2), kept).clamp(min=0)
    weight = kept.to(kernel.dtype)
    if logps is not None:
        _check_shape("logps", logps, kept.shape)
        weight = _real(logps).masked_fill(~kept, -torch.inf).softmax(-1).masked_fill(~kept, 0)
    if groups is not None:
        _check_shape("groups", groups, kept.shape)
        weight = weight / _same_cluster(groups, kept).sum(-1).clamp(min=1)
    density = (kernel * weight.unsqueeze(-2)).sum(-1) / weight.sum(-1, keepdim=True).clamp(min=1e-30)
    count = kept.sum(-1)
    return (1 - density.sum(-1) / count.clamp(min=1)).masked_fill(count == 0, 0)


def _symmetric(similar: Tensor, kept: Tensor) -> Tensor:
    """Return the mean of both directions, with 1 on the diagonal, and 0 for responses that are left out."""
    itself = torch.eye(similar.shape[-1], dtype=torch.bool, device=similar.device)
    return ((similar + similar.mT) / 2).masked_fill(itself, 1).masked_fill(~_pairs(kept), 0)


def _similarities(nli: Tensor, affinity: str, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Lin's graph W of each group, and the responses that are kept."""
    one_of("affinity", affinity, get_args(Affinity))
    kept = _kept_in_pairs(nli, mask)
    entail, _, contradict = _real(nli).unbind(-1)
    return _symmetric(entail if affinity == "entail" else 1 - contradict, kept), kept


def _spectrum(graph: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of D^-1/2 W D^-1/2, whose Laplacian has 1 less these; NaN of a broken group.

    A response that is left out has eigenvalue 0, which is 1 of the Laplacian, and counts for nothing.
    """
    degrees = graph.sum(-1)
    scale = degrees.rsqrt().masked_fill(degrees == 0, 0)
    scaled = graph * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    broken = ~scaled.isfinite().all(-1).all(-1)  # an error of the eigensolver for the whole batch, if left in
    eigenvalues, vectors = torch.linalg.eigh(scaled.masked_fill(broken[..., None, None], 0))
    return eigenvalues.masked_fill(broken[..., None], torch.nan), vectors
