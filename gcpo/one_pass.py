"""Inner products of rollouts' gradients from one forward pass of all rollouts and one backward pass per temperature.

The gradient of a linear layer's weight is, for each rollout, the sum over its tokens of (output gradient) x (input), so
that inputs and output gradients of layers hold all of it: no weight's gradient is made by autograd, and none is kept.
They are multiplied as soon as the backward pass has them; where memory is short, inputs are computed a second time.
`gcpo.gradients.gradient_gram` runs every rollout alone, and is what models fall back to whose layers mix rollouts.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gcpo import gradients
from gcpo.gradients import Row, accumulator, gradient_gram, keeps, logits_of

CHUNK = 2**22  # numbers of materialised gradients at a time, of all rows together
CHUNK_GPU = 2**26  # a small one leaves a GPU waiting for the next
PIECE = 2**14  # numbers of a row that are summed in float32: over a million, rounding would show in the fifth digit


@dataclass(eq=False)
class _Call:
    """One call of a module that owns chosen parameters and treats rows one by one, as far as shapes tell."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]  # the chosen ones, by their names within the module
    output: GradientEdge
    lowest: bool  # whether no chosen parameter has a part in what is given
    again: bool  # whether that is computed again in the backward pass, and not kept
    given: Any = None  # a tensor
    version: int = 0  # of `given`: a layer that changes it in place spoils it
    take: Any = None  # what the gradient of the output goes to

    def read(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.given is None:
            self.given, self.version = args[0].detach(), args[0]._version


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
    memory_limit: float | None = None,
    reads: Callable[[int], AbstractContextManager[None]] = lambda width: nullcontext(),
) -> list[Float[Tensor, "G G"]]:
    """Return `gcpo.gradients.gradient_gram` at each temperature, up to rounding, several times as fast.

    Arguments and errors as there; V(q) of Eq. 20 follows by `gram_decomposition`. Linear layers, embeddings and layers
    with one input that treat rows one by one (norms) are known, tied weights add up, and every use of a parameter in
    the graph is accounted for: with one that is not (experts that see tokens of several rows, tables of adapters,
    shared weights outside their layer), the result is that of `gradient_gram`, row by row. Products are summed in the
    parameters' type, or float32 if that has more digits, over pieces, and these in float64.

    Layers below the first one with a chosen parameter are computed before and without gradients, within `reads` of the
    number of tokens that all rows begin with: `gcpo.trainer.prefix.shared` of the model reads these once.

    Memory: the activations of a batch of G rows. Where an estimate of them exceeds a `memory_limit` in bytes, or with
    any limit 4 GB, a part of the layers, or all, keep their inputs alone and compute the rest again, for the same
    numbers in up to a third more time; where that exceeds the limit as well, the result is that of `gradient_gram`
    within it.
    """
    parameters = gradients.chosen_parameters(model, params)
    rows = gradients.distinct_rows(input_ids, attention_mask, completion_mask)
    width, scored = gradients.lengths(rows, keeps(model))
    limit = math.inf if memory_limit is None else memory_limit
    ample = limit if memory_limit is None else min(limit, gradients.AMPLE)
    layers, found = gradients.checkpointed(model), None
    below = _below(layers, parameters[0])
    for quarters in range(5 if rows else 0):
        again = layers[below : below + math.ceil((len(layers) - below) * quarters / 4)]
        need = gradients.pass_bytes(model, len(rows), width, scored, again, below)
        if need <= (limit if quarters else ample):
            with gradients.dropout_off(model, parameters), _entered(model, layers[: below + 1], list(rows), reads):
                found = _grams(model, list(rows), parameters, temperatures, again)
            break
    if found is None:
        by_row = partial(gradient_gram, model, input_ids, attention_mask, completion_mask, params=params)
        return [by_row(temperature=temperature, memory_limit=memory_limit) for temperature in temperatures]
    return [gradients.spread(nn.functional.pad(gram, (0, 1, 0, 1)), rows, len(input_ids)) for gram in found]


def _below(layers: Sequence[nn.Module], lowest: Tensor) -> int:
    """Return how many layers are computed before the lowest of the chosen parameters is used; 0 if it is in none."""
    places = (place for place, layer in enumerate(layers) if any(p is lowest for p in layer.parameters()))
    return next(places, 0)


class _Reached(Exception):  # noqa: N818 (no error)
    """A pass has come to the layer that was to be reached, with these states."""


@contextmanager
def _entered(
    model: nn.Module, layers: Sequence[nn.Module], rows: Sequence[Row], reads: Callable[[int], AbstractContextManager]
) -> Iterator[None]:
    """Let passes of these rows begin at the last of the layers: what it is given is computed before."""
    given = _given(model, layers, rows, reads) if len(layers) > 1 else None
    with ExitStack() as patched:
        for layer in layers[:-1] if given is not None else []:
            patched.enter_context(patch.object(layer, "forward", lambda *_, **__: given))
        yield


@torch.no_grad()
def _given(
    model: nn.Module, layers: Sequence[nn.Module], rows: Sequence[Row], reads: Callable[[int], AbstractContextManager]
) -> Float[Tensor, "N T d"] | None:
    """Return what the last layer is given in a pass of rows; None where layers return more than their states."""
    width, outputs = min(row.completion.index(True) for row in rows), list[Any]()
    alike = len({(row.ids[:width], row.attended[:width]) for row in rows}) == 1

    def reached(states: Tensor, *_: Any, **__: Any) -> None:
        raise _Reached(states)

    with reads(width) if alike else nullcontext():  # which may try the whole model first
        seen = layers[0].register_forward_hook(lambda module, given, output: outputs.append(output))
        with seen, patch.object(layers[-1], "forward", reached):
            try:
                logits_of(model, rows, keeps(model))
            except _Reached as end:
                (states,) = end.args
    if len(states) < len(rows):  # one row: what all begin with, and then the rest of each
        begun, rest = states[:, :width], states[:, width:].unflatten(1, (len(rows), -1))[0]
        states = torch.cat([begun.expand(len(rows), -1, -1), rest], dim=1)
    return states if isinstance(outputs[0], Tensor) else None


@torch.enable_grad()
def _grams(
    model: nn.Module,
    rows: Sequence[Row],
    parameters: Sequence[nn.Parameter],
    temperatures: Sequence[float],
    again: Sequence[nn.Module] = (),
) -> list[Float[Tensor, "N N"]] | None:
    """Return the inner products of distinct rows at each temperature, None where a use of a parameter is unknown; the
    layers `again` are computed again in the backward pass."""
    found = list[Tensor]()
    with gradients.computed_again(again) as options:
        with _calls(model, parameters, len(rows), again) as calls:
            logits, targets, scored = logits_of(model, rows, keeps(model), **options)
        if not _complete(logits, calls, parameters):
            return None
        logits = logits.to(accumulator(logits))
        for number, temperature in enumerate(temperatures, start=1):
            gradients.check_temperature(temperature)
            scaled = (logits / temperature).flatten(0, 1)
            loss = nn.functional.cross_entropy(scaled, targets.flatten(), reduction="none")[scored.flatten()]
            found.extend(_inner_products(calls, -loss.sum(), len(rows), retain_graph=number < len(temperatures)))
            del scaled, loss  # and what they keep
    return found if len(found) == len(temperatures) else None


# --- what layers were given, and the gradients of what they returned --------------------------------------------------


@contextmanager
def _calls(
    model: nn.Module, parameters: Sequence[nn.Parameter], rows: int, again: Sequence[nn.Module]
) -> Iterator[list[_Call]]:
    """Record the calls of modules that own chosen parameters, while the context lasts; calls that may mix rows are
    left out."""
    chosen, calls = set(parameters), list[_Call]()
    inside = {module for layer in again for module in layer.modules()}

    def record(own: dict[str, nn.Parameter], module: nn.Module, args: Any, options: Any, output: Any) -> None:
        tensors = [value for value in (*args, output) if isinstance(value, Tensor)]
        apart = len(args) == 1 and len(tensors) == 2 and not options and not any(module.children())
        # A layer that took (tokens, features), or part of a batch, would have another shape.
        apart = apart and all(values.ndim >= 2 and len(values) == rows for values in tensors)
        if apart and output.requires_grad and (type(module) is not nn.Linear or args[0].ndim == 3):
            call = _Call(module, own, get_gradient_edge(output), not args[0].requires_grad, module in inside)
            calls.append(call)
            weak = weakref.proxy(call)  # a circle through the graph would never be freed
            output.register_hook(lambda gradient: weak.take(gradient))
            if not call.again:
                call.read(module, args, output)

    with ExitStack() as hooks:
        for module in model.modules():
            if own := {name: p for name, p in module.named_parameters(recurse=False) if p in chosen}:
                hooks.enter_context(module.register_forward_hook(partial(record, own), with_kwargs=True))
        yield calls


def _complete(logits: Tensor, calls: Sequence[_Call], parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the calls are all uses that the graph has of the parameters."""
    used, seen = Counter[Tensor](), set[Any]([logits.grad_fn] if logits.requires_grad else [])
    waiting = [*seen]
    while waiting:
        following = [node for node, _ in waiting.pop().next_functions if node is not None]
        used.update(node.variable for node in following if hasattr(node, "variable"))  # leaves
        waiting += set(following) - seen
        seen.update(following)
    known = Counter[Tensor](p for call in calls for p in call.parameters.values())
    again = [call.module for call in calls if call.again]  # each once, or it is unclear whose input is computed
    told = all(call.output.node in seen for call in calls) and len(again) == len(set(again))
    return told and any(call.lowest for call in calls) and all(used[p] == known[p] for p in parameters)


def _inner_products(
    calls: Sequence[_Call], log_likelihood: Tensor, rows: int, **options: Any
) -> list[Float[Tensor, "N N"]]:
    """Return the inner products over all parameters, nothing if an input was changed: those of a parameter are made as
    soon as the backward pass has all its uses, which are summed first."""
    known = Counter[Tensor](p for call in calls for p in call.parameters.values())
    uses: dict[Tensor, dict[int, _Use]] = {p: {} for p in known}
    waiting, grams = dict[_Call, Tensor](), dict[Tensor, Tensor]()

    def multiply() -> None:
        for call in [one for one in waiting if one.given is not None]:
            output = waiting.pop(call)
            for p, use in _uses(call, output) if call.given._version == call.version else ():
                uses[p][calls.index(call)] = use
                if len(uses[p]) == known[p]:
                    grams[p] = _of_parameter(p, [uses[p].pop(place) for place in sorted(uses[p])])
            if call.again:
                call.given = None

    def take(call: _Call, gradient: Tensor) -> None:
        waiting[call] = gradient
        multiply()

    with ExitStack() as hooks:
        for call in calls:
            call.take = partial(take, call)
            hooks.callback(setattr, call, "take", None)
            hooks.enter_context(call.module.register_forward_hook(call.read))  # of those that are computed again
        # A layer is computed again only for what lies below its outputs.
        ends: list[Any] = [
            next(iter(call.parameters.values())) if call.again else call.output for call in calls if call.lowest
        ]
        torch.autograd.grad(log_likelihood, ends, **options)
    multiply()
    total = sum((grams[p] for p in known if p in grams), torch.zeros(rows, rows, dtype=torch.float64))
    return [total] if len(grams) == len(known) else []


def _uses(call: _Call, output: Tensor) -> Iterator[tuple[Tensor, _Use]]:
    module, given = call.module, call.given
    output = output.to(accumulator(output))
    if type(module) is nn.Linear:
        for name, p in call.parameters.items():
            yield p, _Outer(given.to(output.dtype), output) if name == "weight" else _Whole(output.sum(1))
    elif type(module) is nn.Embedding and not module.scale_grad_by_freq:
        if module.padding_idx is not None:
            output = output * (given != module.padding_idx).unsqueeze(-1)
        yield module.weight, _Looked(given, output, module.num_embeddings)
    else:  # small: the layer is run again, and its own gradient taken row by row
        parameters = [*call.parameters.values()]
        with torch.enable_grad():
            found = [
                torch.autograd.grad(again := module(x[None]), parameters, y[None].to(again.dtype))
                for x, y in zip(given, output, strict=True)
            ]
        for p, parts in zip(parameters, zip(*found, strict=True), strict=True):
            yield p, _Whole(torch.stack(parts))


def _of_parameter(parameter: Tensor, uses: list[_Use]) -> Float[Tensor, "N N"]:
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
