"""Inner products of rollouts' gradients from one forward pass of all rollouts and one backward pass per temperature.

The gradient of a linear layer's weight is, for each rollout, the sum over its tokens of (output gradient) x (input), so
that inputs and output gradients of layers hold all of it: no weight's gradient is made by autograd, and none is kept.
`gcpo.gradients.gradient_gram` runs every rollout alone, and is what models fall back to whose layers mix rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gcpo.gradients import Row, accumulator, chosen_parameters, distinct_rows, dropout_off, gradient_gram, keeps

CHUNK = 2**22  # numbers of materialised gradients at a time, of all rows together
CHUNK_GPU = 2**26  # a small one leaves a GPU waiting for the next
PIECE = 2**14  # numbers of a row that are summed in float32: over a million, rounding would show in the fifth digit


class _Call(NamedTuple):
    """One call of a module that owns chosen parameters."""

    module: nn.Module
    names: tuple[str, ...]  # of the chosen parameters within the module
    given: Tensor
    version: int  # of `given`: a layer that changes it in place spoils it
    output: GradientEdge
    apart: bool  # whether the call treats rows one by one, as far as shapes tell


class _Outer(NamedTuple):
    """Gradients of a matrix, (N, out, in): for each row, the sum over tokens of `output` times `given`."""

    given: Float[Tensor, "N T in"]
    output: Float[Tensor, "N T out"]

    def part(self, span: slice) -> Float[Tensor, "N part in"]:
        return self.output[..., span].transpose(1, 2) @ self.given


class _Looked(NamedTuple):
    """Gradients of a table, (N, rows, d): for each token, `output` in the row that it looks up."""

    ids: Int[Tensor, "N T"]
    output: Float[Tensor, "N T d"]
    size: int

    def part(self, span: slice) -> Float[Tensor, "N part d"]:
        start, end, _ = span.indices(self.size)
        inside = (self.ids >= start) & (self.ids < end)
        place = (self.ids - start).where(inside, 0).unsqueeze(-1).expand_as(self.output)
        found = self.output.new_zeros(len(self.ids), end - start, self.output.shape[-1])
        return found.scatter_add_(1, place, self.output * inside.unsqueeze(-1))


class _Whole(NamedTuple):
    """Gradients of a parameter of any shape, (N, ...)."""

    values: Float[Tensor, "N ..."]

    def part(self, span: slice) -> Float[Tensor, "N ..."]:
        return self.values[:, span]


_Use = _Outer | _Looked | _Whole


def gradient_grams(
    model: nn.Module,
    input_ids: Int[Tensor, "G T"],
    attention_mask: Shaped[Tensor, "G T"],
    completion_mask: Shaped[Tensor, "G T"],
    *,
    params: str | Iterable[str] | None = None,
    temperatures: Sequence[float] = (1.0,),
) -> list[Float[Tensor, "G G"]]:
    """Return `gcpo.gradients.gradient_gram` at each temperature, up to rounding, several times as fast.

    Arguments and errors as there; V(q) of Eq. 20 follows by `gram_decomposition`. Linear layers, embeddings and layers
    with one input that treat rows one by one (norms) are known, tied weights add up, and every use of a parameter in
    the graph is accounted for: with one that is not (experts that see tokens of several rows, tables of adapters,
    shared weights outside their layer), the result is that of `gradient_gram`, row by row. Memory: the activations
    of a batch of G rows. Products are summed in the parameters' type, or float32 if that has more digits, over pieces,
    and these in float64.
    """
    for temperature in temperatures:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected that of sampling, above 0")
    parameters = chosen_parameters(model, params)
    rows = distinct_rows(input_ids, attention_mask, completion_mask)
    if not rows:
        return [torch.zeros(len(input_ids), len(input_ids), dtype=torch.float64) for _ in temperatures]
    with dropout_off(model):
        found = _grams(model, list(rows), parameters, temperatures)
    if found is None:
        by_row = partial(gradient_gram, model, input_ids, attention_mask, completion_mask, params=params)
        return [by_row(temperature=temperature) for temperature in temperatures]
    place = torch.full((len(input_ids),), len(rows))  # a row of zeros
    for number, members in enumerate(rows.values()):
        place[members] = number
    return [nn.functional.pad(gram, (0, 1, 0, 1))[place][:, place] for gram in found]


@torch.enable_grad()
def _grams(
    model: nn.Module, rows: Sequence[Row], parameters: Sequence[nn.Parameter], temperatures: Sequence[float]
) -> list[Float[Tensor, "N N"]] | None:
    """Return the inner products of distinct rows at each temperature, None where a use of a parameter is unknown."""
    with _calls(model, parameters, len(rows)) as calls:
        logits, targets, scored = _logits(model, rows)
    if not _complete(logits, calls, parameters):
        return None
    logits = logits.to(accumulator(logits))
    found = []
    for number, temperature in enumerate(temperatures, start=1):
        loss = nn.functional.cross_entropy((logits / temperature).flatten(0, 1), targets.flatten(), reduction="none")
        log_likelihood = -loss[scored.flatten()].sum()
        edges = [call.output for call in calls]
        outputs = torch.autograd.grad(log_likelihood, edges, retain_graph=number < len(temperatures))
        found.append(_inner_products(calls, outputs, len(rows)))
    return found


def _logits(model: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits from the first that any row is scored by, the tokens they predict, and which are scored."""
    device, width = next(model.parameters()).device, max(len(row.ids) for row in rows)
    ids, attended, completion = (
        torch.tensor([[*values, *[0] * (width - len(values))] for values in part], device=device, dtype=torch.long)
        for part in zip(*rows, strict=True)
    )
    positions = torch.arange(width, device=device).expand_as(ids)
    start = min(row.completion.index(True) for row in rows)
    options = {"logits_to_keep": width - start + 1} if keeps(model) else {}
    logits = model(input_ids=ids, attention_mask=attended, position_ids=positions, **options).logits
    return logits[:, start - width - 1 : -1], ids[:, start:], completion[:, start:].bool()


# --- what layers were given, and the gradients of what they returned --------------------------------------------------


@contextmanager
def _calls(model: nn.Module, parameters: Sequence[nn.Parameter], rows: int) -> Iterator[list[_Call]]:
    """Record the calls of modules that own chosen parameters, while the context lasts."""
    chosen, calls, handles = {id(p) for p in parameters}, [], []

    def record(names: tuple[str, ...], module: nn.Module, args: Any, options: Any, output: Any) -> None:
        tensors = [value for value in (*args, output) if isinstance(value, Tensor)]
        apart = len(args) == 1 and len(tensors) == 2 and not options and not any(module.children())
        if apart and output.requires_grad:
            # A layer that took (tokens, features), or part of a batch, would have another shape.
            apart = all(len(values) == rows and values.ndim >= 2 for values in tensors)
            apart = apart and (type(module) is not nn.Linear or args[0].ndim == 3)
            given = args[0].detach()
            calls.append(_Call(module, names, given, given._version, get_gradient_edge(output), apart))

    for module in model.modules():
        if names := tuple(name for name, p in module.named_parameters(recurse=False) if id(p) in chosen):
            handles.append(module.register_forward_hook(partial(record, names), with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _complete(logits: Tensor, calls: Sequence[_Call], parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the calls are all uses that the graph has of the parameters, and each of them can be told by
    rows."""
    used: Counter[int] = Counter()
    seen, waiting = set(), [logits.grad_fn]
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if isinstance(leaf := getattr(following, "variable", None), Tensor):
                used[id(leaf)] += 1
            waiting.append(following)
    known = Counter(id(getattr(call.module, name)) for call in calls for name in call.names)
    fresh = all(call.apart and call.given._version == call.version and call.output.node in seen for call in calls)
    return fresh and all(used[id(p)] == known[id(p)] for p in parameters)


def _inner_products(calls: Sequence[_Call], outputs: Sequence[Tensor], rows: int) -> Float[Tensor, "N N"]:
    """Return the inner products over all parameters; the uses of a tied one are summed first."""
    uses: dict[int, tuple[nn.Parameter, list[_Use]]] = {}
    for call, output in zip(calls, outputs, strict=True):
        for name, use in _uses(call, output):
            parameter = getattr(call.module, name)
            uses.setdefault(id(parameter), (parameter, []))[1].append(use)
    gram = torch.zeros(rows, rows, dtype=torch.float64)
    for parameter, parts in uses.values():
        gram += _of_parameter(parameter, parts)
    return gram


def _uses(call: _Call, output: Tensor) -> Iterator[tuple[str, _Use]]:
    module, given = call.module, call.given
    output = output.to(accumulator(output))
    if type(module) is nn.Linear:
        if "weight" in call.names:
            yield "weight", _Outer(given.to(output.dtype), output)
        if "bias" in call.names:
            yield "bias", _Whole(output.sum(1))
    elif type(module) is nn.Embedding and not module.scale_grad_by_freq:
        if module.padding_idx is not None:
            output = output * (given != module.padding_idx).unsqueeze(-1)
        yield "weight", _Looked(given, output, module.num_embeddings)
    else:  # small: the layer is run again, and its own gradient taken row by row
        parameters = [getattr(module, name) for name in call.names]
        found = [
            torch.autograd.grad(again := module(x[None]), parameters, y[None].to(again.dtype))
            for x, y in zip(given, output, strict=True)
        ]
        for number, name in enumerate(call.names):
            yield name, _Whole(torch.stack([parts[number] for parts in found]))


def _of_parameter(parameter: nn.Parameter, uses: list[_Use]) -> Float[Tensor, "N N"]:
    """Return the inner products of a parameter's gradients, made in parts unless tokens' products are less work."""
    (first, *others), size = uses, len(parameter)
    if isinstance(first, _Outer) and not others:
        rows, tokens, width = first.given.shape
        if rows * tokens**2 * (width + size) < 2 * (tokens + rows) * width * size:
            return _by_tokens(first)
    if isinstance(first, _Looked) and not others:  # rows of the table that nobody looks up are zero
        looked, ids = first.ids.unique(return_inverse=True)
        uses, size = [_Looked(ids, first.output, len(looked))], len(looked)
    rows, on_gpu = len(first[0]), parameter.is_cuda
    gram = torch.zeros(rows, rows, dtype=torch.float64, device=parameter.device if on_gpu else "cpu")
    step = max(1, (CHUNK_GPU if on_gpu else CHUNK) * len(parameter) // (rows * parameter.numel()))
    for start in range(0, size, step):
        part = reduce(torch.add, (use.part(slice(start, start + step)) for use in uses)).flatten(1)
        _add_products(gram, part, at_once=on_gpu)
    return gram.cpu()


def _add_products(gram: Float[Tensor, "N N"], part: Float[Tensor, "N columns"], at_once: bool) -> None:
    """Add the inner products of rows, summed over pieces: over all of them at once, so that a GPU need not wait for the
    next, or one after the other."""
    count = part.shape[1] // PIECE if at_once else 0
    if count:
        pieces = part[:, : count * PIECE].unflatten(1, (count, PIECE)).transpose(0, 1)
        gram += (pieces @ pieces.mT).double().sum(0)
    for piece in part[:, count * PIECE :].split(PIECE, dim=1):
        gram += (piece @ piece.T).to(gram.device)


def _by_tokens(use: _Outer) -> Float[Tensor, "N N"]:
    """Return sum_st (x_is . x_jt)(y_is . y_jt), row by row and once for each pair."""
    rows = len(use.given)
    gram = torch.zeros(rows, rows, dtype=torch.float64)
    for i, (given, output) in enumerate(zip(*use, strict=True)):
        products = (given @ use.given[i:].flatten(0, 1).T).mul_(output @ use.output[i:].flatten(0, 1).T)
        gram[i, i:] = gram[i:, i] = products.unflatten(1, (rows - i, -1)).sum((0, 2)).cpu()
    return gram
