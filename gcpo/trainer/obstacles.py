"""Why a model cannot share prompts: what is known beforehand, and what a small batch finds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gcpo.gradients import dropout_off

# What to do about draws at random.
WAY_OUT = "set it to 0, in model_init_kwargs or for adapters in theirs; disable_dropout=True reaches nn.Dropout alone"

# The batch that is tried: two prompts, padded on the left, and three completions of each, cut on the right.
PROMPTS, _COMPLETIONS, _PLACE = (3, 7), (5, 4, 2, 5, 3, 1), (0, 1, 0, 1, 1, 0)
_DRAWS = re.compile("drop|jitter|noise")  # in names of settings
_LIMITS = re.compile("(window|chunk)(_size)?$")  # likewise, of how far a token sees


class Verdict(NamedTuple):
    """Whether a model can share prompts, and how."""

    why_not: str | None = None
    counts: bool = False  # whether a model that is given no positions counts them from the mask, as OPT does


class Call(NamedTuple):
    """One call of a layer's attention."""

    layer: int | None
    packed: bool  # whether prompts are shared in it
    dtype: torch.dtype
    window: Any  # that the layer hands over
    mask: Any  # likewise


# A context in which passes note their calls: plain ones for None; else shared ones, and whether positions are counted.
Passes = Callable[[bool | None], contextlib.AbstractContextManager[list[Call]]]


def known_beforehand(model: PreTrainedModel, attention: Any, noise: Any, adapters: Iterable[Any]) -> str | None:
    """Return why a model cannot share prompts, as far as that is known without a pass of it.

    Args:
        model: without adapters.
        attention: the function that transformers takes for its attention.
        noise: that NEFTune adds to its embeddings.
        adapters: the configurations of its adapters.
    """
    text = model.config.get_text_config()
    if model.config is not text or getattr(model.config, "is_encoder_decoder", False):
        return "it is no decoder of text alone"
    if not (getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)):
        return "transformers offers no way to replace its attention"
    if not (origin := getattr(attention, "__module__", None) or "").startswith("transformers.integrations."):
        by = f", of {origin}" if origin else ""
        return f'its attention is "{text._attn_implementation}"{by} (attn_implementation="sdpa")'
    layers = {type(layer) for layer in DynamicCache(config=text).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if layers:
        return f"its cache keeps more than keys and values ({', '.join(sorted(kind.__name__ for kind in layers))})"
    for adapter in adapters:
        if adapter.is_prompt_learning:
            return "its adapters put learnt prompts before each row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its activated LoRA looks for its invocation tokens in every row (alora_invocation_tokens)"
    if noise:
        return "NEFTune's noise goes by a row's length, and one row has all prompts (leave neftune_noise_alpha out)"
    return None


def tried(model: PreTrainedModel, passes: Passes) -> Verdict:
    """Return what a small batch says: its passes draw nothing at random, and shared prompts change neither
    log-probabilities nor, unless gradients are off, the gradient of any parameter, beyond rounding; and what so few
    tokens cannot show is as it should be (:func:`_unfit`)."""
    with _untouched(model):
        try:
            return _compared(model, passes)
        except Exception as error:  # of any library: a model that cannot do this is trained as it is
            lines = str(error).strip().splitlines() or [""]
            return Verdict(f"a small batch of it ends with {type(error).__name__}: {lines[0]}")


def _compared(model: PreTrainedModel, passes: Passes) -> Verdict:
    batch, apart = _batch(model), dict[bool, float]()
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad and torch.is_grad_enabled()}
    before = _random_state(model)
    with passes(None) as calls, _forked(model):
        values = _scores(model, *batch)
        after, plain = _random_state(model), list(calls)
        norms = _gradients(values, learns)
        with torch.no_grad():
            again = _scores(model, *batch)
    allowed, rates = _rounding(model, plain), _rates(model)
    draws = Verdict(f"it draws at random in training, once for rows that draw apart ({rates or 'unnamed'}): {WAY_OUT}")
    if not before.equal(after) and (rates or not values.equal(again)):
        return draws
    if not _distance(values, again) <= allowed:
        return Verdict("two plain passes of it differ")
    for counts in (False, True):
        with passes(counts) as calls, _forked(model), torch.no_grad():
            apart[counts] = _distance(values, _scores(model, *batch))
            if not after.equal(_random_state(model)):  # for each token, though it changed nothing in so small a batch
                return draws
            if why := _unfit(model.config.get_text_config(), plain, calls):
                return Verdict(why)
    counts = allowed / 8 < apart[False] > apart[True]  # where positions are relative, both are near
    if not apart[counts] <= allowed:
        return Verdict(f"its log-probabilities with shared prompts are {apart[counts]:.2g} from those without")
    with passes(counts):
        rests = _gradients(-_scores(model, *batch), learns)
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    for name, norm in norms.items():
        if not rests[name] <= 3 * allowed * (norm + 0.01 * whole):
            rest = f"{rests[name]:.2g} of {norm:.2g}"
            return Verdict(f"the gradient of {name} is another one with shared prompts ({rest})")
    return Verdict(counts=counts)


def _batch(model: PreTrainedModel) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return ids and mask of the batch, and what else its passes are asked for."""
    size, width, length = model.config.get_text_config().vocab_size, max(PROMPTS), max(_COMPLETIONS)
    draw = torch.Generator().manual_seed(0)
    heads = torch.randint(size, (len(PROMPTS), width), generator=draw)[list(_PLACE)]
    ids = torch.cat([heads, torch.randint(size, (len(_PLACE), length), generator=draw)], dim=1)
    before = torch.arange(width) >= width - torch.tensor(PROMPTS)[list(_PLACE), None]
    mask = torch.cat([before, torch.arange(length) < torch.tensor(_COMPLETIONS)[:, None]], dim=1).long()
    experts = hasattr(model.config, "output_router_logits")
    return ids.to(model.device), mask.to(model.device), {"output_router_logits": True} if experts else {}


def _scores(model: Any, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the log-probabilities of the completions' tokens and, of experts, what their routers say of all tokens.

    The head is asked apart from the rest of the model, as TRL's fused head does.
    """
    outputs, width = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **options), max(PROMPTS)
    logits = model.get_output_embeddings()(outputs.last_hidden_state[:, width - 1 : -1])
    logps = logits.float().log_softmax(-1).gather(2, ids[:, width:, None]).squeeze(2)
    routed = [
        one.reshape(*ids.shape, -1)[mask.bool()].flatten() for one in getattr(outputs, "router_logits", None) or ()
    ]
    return torch.cat([logps[mask[:, width:].bool()], *routed])


def _gradients(values: Tensor, learns: dict[str, nn.Parameter]) -> dict[str, float]:
    """Add the gradient of a sum that weighs every value differently to that of every parameter, and return the norms;
    a missing one has none."""
    if learns:
        (values * torch.linspace(-1, 1, len(values), device=values.device)).sum().backward()
    return {name: 0.0 if p.grad is None else p.grad.norm().item() for name, p in learns.items()}


def _distance(values: Tensor, others: Tensor) -> float:
    """Return how far two passes are apart in the mean: where rounding sends a token to another expert, that token is
    far."""
    return ((values - others).abs() / (1 + values.abs())).mean().item()


def _rounding(model: nn.Module, calls: Sequence[Call]) -> float:
    """Return what rounding may do to a log-probability, by the coarsest type that is computed in."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()} | {call.dtype for call in calls}
    coarsest = max(torch.finfo(one).eps for one in {*types, torch.float32})  # in which norms compute anyway
    return float(coarsest ** (2 / 3))


def _rates(model: PreTrainedModel) -> str:
    """Return the settings, and the layers, by which a model may draw at random."""
    settings = model.config.get_text_config().to_dict().items()
    rates = {name: value for name, value in settings if _DRAWS.search(name) and isinstance(value, float) and value}
    rates |= {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p}
    return ", ".join(f"{name}={value}" for name, value in list(rates.items())[:3])


def _unfit(text: Any, plain: Sequence[Call], calls: Sequence[Call]) -> str | None:
    """Return what is wrong with the calls of attention in a shared pass, whatever the batch."""
    packed, count = [call for call in calls if call.packed], max(len(plain), len(calls))
    if not packed or len(packed) < count:
        return f"of the {count} calls of its attention {len(packed)} learn which prompts are shared"
    if any(not isinstance(call.mask, Tensor) or call.mask.numel() != 1 for call in packed):
        return "its layers make a mask of their own"
    settings = {} if getattr(text, "use_sliding_window", True) is False else text.to_dict()
    limits = [name for name, value in settings.items() if _LIMITS.search(name) and value]
    kinds = getattr(text, "layer_types", None) or [*limits, "full_attention"][:1]
    for call in packed:
        kind = kinds[call.layer if call.layer is not None and call.layer < len(kinds) else -1]
        if kind != "full_attention" and call.window is None:
            return f"a layer ({kind}) does not hand over how far it sees"
    return None


def _devices(model: nn.Module) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)


def _random_state(model: nn.Module) -> Tensor:
    others = (torch.get_device_module(device).get_rng_state(device) for device in _devices(model))
    return torch.cat([torch.get_rng_state(), *others])


def _forked(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context that uses up no random number."""
    devices = _devices(model)
    return torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda")


@contextlib.contextmanager
def _untouched(model: PreTrainedModel) -> Iterator[None]:
    """Let a model train, without autocast; then restore its modes, gradients and buffers, and what draws at random."""
    gradients, buffers = [(p, p.grad) for p in model.parameters()], [(b, b.clone()) for b in model.buffers()]
    with dropout_off(model), _forked(model), torch.autocast(model.device.type, enabled=False):
        model.train()  # until dropout_off restores modes
        for p, _ in gradients:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for buffer, values in buffers:
                buffer.copy_(values)
