"""Score-function gradients of rollouts and their variance V(q), the target quantity of GCPO App. D.

g_i is the gradient of the SUM of the completion's log-probabilities, so it grows with length; they are those of
softmax(logits / temperature), the distribution that is sampled from. Each row is stripped of its padding and run alone,
without dropout: neither the other rows nor the padding can change g_i.
"""

import fnmatch
import inspect
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

COLUMNS = 2**16  # of gradients that are multiplied at a time
AMPLE = 4e9  # bytes: gradients that would take more are made in a way that takes less, though more may be free


class GradientStats(NamedTuple):
    """Statistics of the G vectors A_i g_i of one prompt, in squared gradient units.

    `variance` is V(q) (GCPO Eq. 20) and equals the mean of `squared_norms` less `mean_squared_norm`.
    """

    variance: float
    squared_norms: Float[Tensor, " G"]  # |A_i g_i|^2, float64, on the CPU
    mean_squared_norm: float  # |(1/G) sum_j A_j g_j|^2


class Row(NamedTuple):
    """One rollout from its first to its last attended token; equal rows have equal gradients."""

    ids: tuple[int, ...]
    attended: tuple[bool, ...]
    completion: tuple[bool, ...]


def gradient_variance(
    model: nn.Module,
    input_ids: Int[Tensor, "G T"],
    attention_mask: Shaped[Tensor, "G T"],
    completion_mask: Shaped[Tensor, "G T"],
    advantages: Float[Tensor, " G"] | Sequence[float],
    *,
    params: str | Iterable[str] | None = None,
    temperature: float = 1.0,
) -> GradientStats:
    """Sample-level gradient variance V(q), GCPO Eq. 20: (1/G) sum_i |A_i g_i - mean_j A_j g_j|^2 over all G rows.

    `completion_mask` has the shape of `input_ids`, non-zero on the tokens whose log-probabilities are summed. Positions
    count from the first attended token, so padding on either side changes nothing. `model(input_ids, attention_mask,
    position_ids).logits` must work.

    `params` names what the gradient covers: None for every parameter that requires grad (a tied one once), else full
    names, trailing parts of names ("lm_head.weight") or glob patterns ("*.layers.1.*").

    Equal rows share one backward pass; rows with advantage 0 or without a completion token need none and count as zero
    vectors. The variance is accumulated around a running mean, so it keeps its digits where the mean gradient is large.
    Memory: two gradients. The model's train or eval mode and its `.grad` fields are left as they were.

    Raises ValueError for shapes that do not match, an advantage that is not finite, a completion token that is not
    attended or that nothing precedes, a name in `params` that fits no trainable parameter, and a `temperature` that is
    not above 0.
    """
    parameters = chosen_parameters(model, params)
    rows = distinct_rows(input_ids, attention_mask, completion_mask)
    scale = _advantages(advantages, len(input_ids))
    active = {row: kept for row, members in rows.items() if (kept := [i for i in members if scale[i] != 0])}
    squared_norms = torch.zeros(len(scale), dtype=torch.float64)
    mean = [torch.zeros_like(p, dtype=accumulator(p), requires_grad=False) for p in parameters]
    count = len(scale) - sum(map(len, active.values()))
    deviation = 0.0
    with dropout_off(model):
        for row, members in active.items():
            gradient = _score_gradient(model, row, parameters, temperature)
            squared_norm = _squared_norm(map(_norm, gradient))
            shared = scale[members]
            centre = shared.mean()
            squared_norms[members] = shared.square() * squared_norm
            # Chan's update: merge the row's equal gradients, a block of its own mean and spread, into the running ones.
            total = count + len(members)
            norms = []
            for running, part in zip(mean, gradient, strict=True):
                step = part.to(running.dtype) * centre.item() - running
                norms.append(_norm(step))
                running.add_(step, alpha=len(members) / total)
            deviation += float((shared - centre).square().sum()) * squared_norm
            deviation += _squared_norm(norms) * count * len(members) / total
            count = total
    return GradientStats(deviation / len(scale), squared_norms, _squared_norm(map(_norm, mean)))


def variance_decomposition(
    gradients: Float[Tensor, "*groups G P"],
    clusters: Int[Tensor, "*groups G"],
    weights: Float[Tensor, "*groups G"] | None = None,
) -> tuple[Float[Tensor, "*groups"], Float[Tensor, "*groups"]]:
    """(intra, inter): variance within and between clusters, GCPO Eq. 2-3 (law of total variance, trace form).

    Their sum is the total population variance, sum_i p_i |g_i - mean|^2. `weights` are the probabilities p_i up to
    a factor, 1/G by default; rows of A_i g_i instead of g_i split the V(q) of Eq. 20. Squared units, at least 0.
    Raises ValueError for shapes that do not match and for weights that are negative or all 0.
    """
    if weights is None:
        weights = gradients.new_ones(gradients.shape[:-1])
    for name, values in (("clusters", clusters), ("weights", weights)):
        if values.shape != gradients.shape[:-1]:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(gradients.shape[:-1])}")
    if (weights < 0).any() or (weights.sum(-1) <= 0).any():
        raise ValueError("weights must not be negative, with at least one above 0 in every group")
    share = (weights / weights.sum(-1, keepdim=True)).to(gradients.dtype)
    joint = (clusters.unsqueeze(-1) == clusters.unsqueeze(-2)) * share.unsqueeze(-2)
    # A cluster without weight has no mean, and no part in either sum.
    cluster_mean = joint @ gradients / joint.sum(-1, keepdim=True).clamp(min=torch.finfo(gradients.dtype).tiny)
    mean = share.unsqueeze(-2) @ gradients
    intra = (share * (gradients - cluster_mean).square().sum(-1)).sum(-1)
    inter = (share * (cluster_mean - mean).square().sum(-1)).sum(-1)
    return intra, inter


def gradient_gram(
    model: nn.Module,
    input_ids: Int[Tensor, "G T"],
    attention_mask: Shaped[Tensor, "G T"],
    completion_mask: Shaped[Tensor, "G T"],
    *,
    params: str | Iterable[str] | None = None,
    temperature: float = 1.0,
    memory_limit: float | None = None,
) -> Float[Tensor, "G G"]:
    """Inner products <g_i, g_j> of the rollouts' gradients, float64, on the CPU: all that distances and variances need.

    With advantages A, `A[:, None] * A * gram` is that of A_i g_i; `gram_decomposition` and `gram_distances` take
    either. Arguments and errors as in `gradient_variance`; a row without a completion token is a zero vector. Memory:
    one gradient for each distinct row, in the parameters' type; products are accumulated in float64. Raises MemoryError
    where an estimate of that exceeds a `memory_limit` in bytes.
    """
    parameters = chosen_parameters(model, params)
    rows = distinct_rows(input_ids, attention_mask, completion_mask)
    first, size = parameters[0], sum(p.numel() for p in parameters)
    width, scored = lengths(rows, _keeps(model, first.device))
    need = pass_bytes(model, 1, width, scored) + (len(rows) + 3) * size * accumulator(first).itemsize
    if memory_limit is not None and need > memory_limit:
        raise too_much(f"{len(rows)} rows of up to {width} tokens", need, memory_limit)
    gradients = torch.zeros(len(rows) + 1, size, dtype=accumulator(first), device=first.device)
    gram, precision = torch.zeros(len(gradients), len(gradients), dtype=torch.float64), _precision(gradients)
    with dropout_off(model):
        for row, own in zip(rows, gradients, strict=False):
            own.copy_(torch.cat([of.flatten() for of in _score_gradient(model, row, parameters, temperature)]))
    for some in torch.split(gradients, COLUMNS, dim=1):
        gram += (some.to(precision) @ some.to(precision).T).cpu()
    return spread(gram, rows, len(input_ids))


def spread(gram: Float[Tensor, "R R"], rows: dict[Row, list[int]], size: int) -> Float[Tensor, "G G"]:
    """Return the inner products of all rows from those of the distinct ones and, after them, of a row of zeros."""
    place = torch.full((size,), len(rows))
    for number, members in enumerate(rows.values()):
        place[members] = number
    return gram[place][:, place]


def gram_distances(gram: Float[Tensor, "*groups G G"]) -> Float[Tensor, "*groups G G"]:
    """Euclidean distances |g_i - g_j| (GCPO Eq. 4, App. C) from the inner products; exactly 0 between equal vectors."""
    norms = gram.diagonal(dim1=-2, dim2=-1)
    return (norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram).clamp(min=0).sqrt()


def gram_decomposition(
    gram: Float[Tensor, "*groups G G"], clusters: Int[Tensor, "*groups G"]
) -> tuple[Float[Tensor, "*groups"], Float[Tensor, "*groups"]]:
    """`variance_decomposition`, GCPO Eq. 2-3, from inner products: (intra, inter), rows of equal weight.

    Of A_i g_i their sum is V(q), Eq. 20; of g_i it is the V(x) of Eq. 3. With all rows in one cluster, inter is 0 and
    intra that sum. Raises ValueError for shapes that do not match.
    """
    if gram.shape != (*clusters.shape, clusters.shape[-1]):
        raise ValueError(f"gram has shape {tuple(gram.shape)}, clusters {tuple(clusters.shape)}: expected (G, G), (G,)")
    same = (clusters.unsqueeze(-1) == clusters.unsqueeze(-2)).to(gram.dtype)
    # 1/G sum_i |g_i|^2, then that of the cluster means in place of g_i, then that of the overall mean.
    rows = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    means = (gram * same / same.sum(-1, keepdim=True)).sum(-1).mean(-1)
    return (rows - means).clamp(min=0), (means - gram.mean((-2, -1))).clamp(min=0)


def _score_gradient(
    model: nn.Module, row: Row, parameters: Sequence[Tensor], temperature: float = 1.0
) -> tuple[Tensor, ...]:
    check_temperature(temperature)
    with torch.enable_grad():
        logits, targets, scored = logits_of(model, [row], _keeps(model, parameters[0].device))
        logits = logits[scored]
        logits = logits.to(accumulator(logits)) / temperature
        log_likelihood = -nn.functional.cross_entropy(logits, targets[scored], reduction="sum")
        return torch.autograd.grad(log_likelihood, parameters, allow_unused=True, materialize_grads=True)


def logits_of(model: Any, rows: Sequence[Row], kept: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits from the first that any row is scored by, the tokens they predict, and which are scored; the
    model makes no other logits if only those that are needed are `kept`."""
    device, width = next(model.parameters()).device, max(len(row.ids) for row in rows)
    ids, attended, completion = (
        torch.tensor([[*values, *[0] * (width - len(values))] for values in part], device=device, dtype=torch.long)
        for part in zip(*rows, strict=True)
    )
    positions = torch.arange(width, device=device).expand_as(ids)
    start = min(row.completion.index(True) for row in rows)
    options |= {"logits_to_keep": width - start + 1} if kept else {}
    logits = model(input_ids=ids, attention_mask=attended, position_ids=positions, **options).logits
    return logits[:, start - width - 1 : -1], ids[:, start:], completion[:, start:].bool()


def keeps(model: Any) -> bool:
    """Return True where a model can leave out the prompt's logits, most of the memory."""
    forward = model.get_base_model().forward if hasattr(model, "get_base_model") else model.forward  # of adapters
    return "logits_to_keep" in inspect.signature(forward).parameters


def _keeps(model: Any, device: torch.device) -> bool:
    """Return True where the prompt's logits are left out.

    Off on CPU: another matmul shape changes the last bit of recorded values.
    """
    return device.type != "cpu" and keeps(model)


# --- memory -----------------------------------------------------------------------------------------------------------


def pass_bytes(
    model: nn.Module, rows: int, width: int, scored: int, layers: Sequence[nn.Module] = (), below: int = 0
) -> float:
    """Estimate the bytes of a forward and backward pass beside the model: what layers, but for those `below` the first
    that is asked for, keep of `rows` rows of `width` tokens, or the inputs of `layers` that are computed again and what
    one of them keeps; and logits of `scored` tokens of each row."""
    tables = [module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)]
    table, config = max(tables, key=math.prod, default=(1, 1)), getattr(model, "config", None)  # the vocabulary's
    each = 1.75 * sum(sum(p.shape[-2:]) for p in model.parameters() if p.shape != table)
    if config is not None and getattr(config, "_attn_implementation", None) == "eager":
        each += 2 * width * config.num_attention_heads * config.num_hidden_layers
    known = max(len(checkpointed(model)), 1)
    each *= (known - below - len(layers) + bool(layers)) / known
    each += len(layers) * min(table) + 2 * width  # and a mask
    return accumulator(next(model.parameters())).itemsize * rows * (width * each + 7 * scored * max(table))


def lengths(rows: Iterable[Row], kept: bool) -> tuple[int, int]:
    """Return the most tokens of a row, and of how many there are logits if only those that are needed are `kept`."""
    width = max((len(row.ids) for row in rows), default=0)
    return width, width - min((row.completion.index(True) for row in rows), default=0) + 1 if kept else width


def too_much(what: str, need: float, limit: float) -> MemoryError:
    """Return the error of gradients that do not fit."""
    way_out = "name fewer gradient_parameters, or take shorter prompts, a smaller G or another memory_limit"
    sizes = f"gradients need {need / 1e9:.3g} GB and may take {limit / 1e9:.3g} GB (memory_limit)"
    return MemoryError(f"{what}: {sizes}: {way_out}")


def checkpointed(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that transformers knows to compute again."""
    return [module for module in model.modules() if getattr(type(module), "gradient_checkpointing", None) is False]


@contextmanager
def computed_again(layers: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Let layers keep their inputs alone, and compute the rest again in the backward pass; yields what the model is
    called with for that."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    with ExitStack() as patched:
        for layer in layers:
            patched.enter_context(patch.object(layer, "forward", partial(again, layer.forward)))
        yield {"use_cache": False} if layers else {}


# --- rows and parameters ----------------------------------------------------------------------------------------------


def distinct_rows(input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor) -> dict[Row, list[int]]:
    """The distinct rows that have a completion, each with the indices where it occurs."""
    shapes = [tuple(values.shape) for values in (input_ids, attention_mask, completion_mask)]
    if len({*shapes}) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"input_ids, attention_mask, completion_mask have the shapes {shapes}, expected (G, T) of all")
    columns = (input_ids.tolist(), attention_mask.bool().tolist(), completion_mask.bool().tolist())
    rows: dict[Row, list[int]] = {}
    for index, (ids, attended, completion) in enumerate(zip(*columns, strict=True)):
        if not any(completion):
            continue
        first = attended.index(True) if any(attended) else 0
        if completion[first] or any(map(operator.gt, completion, attended)):
            raise ValueError(f"row {index}: completion_mask has a token that is not attended or that nothing precedes")
        span = slice(first, len(attended) - attended[::-1].index(True))
        rows.setdefault(Row(tuple(ids[span]), tuple(attended[span]), tuple(completion[span])), []).append(index)
    return rows


def _advantages(advantages: Tensor | Sequence[float], group_size: int) -> Tensor:
    values = torch.as_tensor(advantages).detach().cpu().double()
    if values.shape != (group_size,) or not values.isfinite().all():
        raise ValueError(
            f"advantages are {values.tolist()}, expected {group_size} numbers: 0 for a row without a reward"
        )
    return values


def chosen_parameters(model: nn.Module, params: str | Iterable[str] | None) -> list[nn.Parameter]:
    """The parameters of a model that require a gradient and fit names or patterns (`None`: all that require one), each
    once. Raises ValueError for a pattern that none fits."""
    named = dict(model.named_parameters(remove_duplicate=False))
    patterns = ["*"] if params is None else [params] if isinstance(params, str) else params
    chosen = set[int]()
    for pattern in patterns:
        names = (
            [pattern] if pattern in named else fnmatch.filter(named, pattern) + fnmatch.filter(named, f"*.{pattern}")
        )
        trainable = {id(named[name]) for name in names if named[name].requires_grad}
        if not trainable:
            nearest = ", ".join(names or get_close_matches(pattern, named, n=3, cutoff=0))
            raise ValueError(f"params: {pattern!r} fits no parameter that requires grad; nearest names: {nearest}")
        chosen |= trainable
    if not chosen:
        raise ValueError("params is empty: name a parameter, or give None for all that require grad")
    return [p for p in model.parameters() if id(p) in chosen]  # tied weights are one object under several names


def check_temperature(temperature: float) -> None:
    """Raise ValueError for what is no temperature of sampling."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, expected that of sampling, above 0")


def accumulator(values: Tensor) -> torch.dtype:
    """Return the type that sums are made in: float32, or that of the values if it has more digits."""
    return torch.promote_types(values.dtype, torch.float32)


def _precision(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def _norm(values: Tensor) -> Float[Tensor, ""]:
    return torch.linalg.vector_norm(values.detach(), dtype=_precision(values))


def _squared_norm(norms: Iterable[Tensor]) -> float:
    """|v|^2 from the norms of v's parts, for which a device waits once."""
    parts = list(norms)
    return sum(norm**2 for norm in torch.stack([part.to(parts[0].device) for part in parts]).tolist())


@contextmanager
def dropout_off(model: nn.Module, only: Iterable[Tensor] | None = None) -> Iterator[None]:
    """Put a model into its mode of evaluation, in which `only` these parameters require a gradient if they are given,
    and restore every module's own."""
    modes, kept = [(module, module.training) for module in model.modules()], {id(p) for p in only or ()}
    others = [p for p in model.parameters() if p.requires_grad and only is not None and id(p) not in kept]
    model.eval()
    try:
        for p in others:
            p.requires_grad_(False)
        yield
    finally:
        for p in others:
            p.requires_grad_(True)
        for module, training in modes:
            module.training = training
