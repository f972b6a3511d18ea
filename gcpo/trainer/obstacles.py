"""Why a model cannot share prompts: what is known beforehand, and what a small batch finds."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gcpo.gradients import dropout_off

# What to do about draws at random.
WAY_OUT = "set it to 0: LoraConfig(lora_dropout=0), or model_init_kwargs; disable_dropout=True reaches nn.Dropout alone"
NOISE = "NEFTune's noise goes by a row's length, and one row has all prompts (leave neftune_noise_alpha out)"

# The batch that is tried: two prompts, padded on the left, and three completions of each, cut on the right.
PROMPTS, _COMPLETIONS, _PLACE = (3, 7), (5, 4, 2, 5, 3, 1), (0, 1, 0, 1, 1, 0)
_DRAWS = re.compile("drop|jitter|noise")  # in names of settings
_LIMITS = re.compile("(window|chunk)(_size)?$")  # likewise, of how far a token sees


def known_beforehand(model: PreTrainedModel, attention: Any, adapters: Iterable[Any]) -> str | None:
    """Return why a model cannot share prompts, as far as that is known without a pass of it.

    Args:
        model: without adapters.
        attention: the function that transformers takes for its attention.
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
    if getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return NOISE
    if text.model_type == "opt":  # by little in one that is trained: in half precision a batch would not show it
        return "it counts positions from the mask"
    for adapter in adapters:
        if adapter.is_prompt_learning:
            return "its adapters put learnt prompts before each row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its activated LoRA looks for its invocation tokens in every row (alora_invocation_tokens)"
    return None


def layer_kinds(config: Any) -> list[str]:
    """Return how far the layers of a model see: "full_attention", or another kind or setting, of each layer or of
    all."""
    settings = {} if getattr(config, "use_sliding_window", True) is False else config.to_dict()
    limits = [name for name, value in settings.items() if _LIMITS.search(name) and value]
    return getattr(config, "layer_types", None) or [*limits, "full_attention"][:1]


def tried(model: PreTrainedModel, sharing: contextlib.AbstractContextManager[None]) -> str | None:
    """Return what a small batch says against sharing, a context in which a model shares prompts: a pass draws at
    random, or shared prompts change log-probabilities or, unless gradients are off, the gradient of a parameter, beyond
    rounding."""
    with _untouched(model):
        try:
            return _compared(model, sharing)
        except Exception as error:  # of any library: a model that cannot do this is trained as it is
            lines = str(error).strip().splitlines() or [""]
            return f"a small batch of it ends with {type(error).__name__}: {lines[0]}"


def _compared(model: PreTrainedModel, sharing: contextlib.AbstractContextManager[None]) -> str | None:
    batch = _batch(model)
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad and torch.is_grad_enabled()}
    torch.manual_seed(0)
    undrawn = _next(model)
    torch.manual_seed(0)
    plain = _scores(model, batch)
    if not _next(model).equal(undrawn):
        rates = _rates(model) or "unnamed"
        return f"it draws at random in training, once for rows that draw apart ({rates}): {WAY_OUT}"
    norms = _gradients(plain, learns)
    types = {p.dtype for p in model.parameters() if p.is_floating_point()} | {torch.float32}  # in which norms compute
    allowed = max(torch.finfo(one).eps for one in types) ** (2 / 3)  # what rounding may do to a log-probability
    with sharing:
        shared = _scores(model, batch)
    # In the mean: where rounding sends a token to another expert, that token is far.
    apart = ((plain - shared).abs() / (1 + plain.abs())).mean().item()
    if not apart <= allowed:
        return f"its log-probabilities with shared prompts are {apart:.2g} from those without"
    rests = _gradients(-shared, learns)
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    for name, norm in norms.items():
        if not rests[name] <= 3 * allowed * (norm + 0.01 * whole):
            rest = f"{rests[name]:.2g} of {norm:.2g}"
            return f"the gradient of {name} is another one with shared prompts ({rest})"
    return None


def _batch(model: PreTrainedModel) -> dict[str, Any]:
    """Return what is given to the backbone: ids and mask, and a wish to see what routers say of all tokens."""
    size, width, length = model.config.get_text_config().vocab_size, max(PROMPTS), max(_COMPLETIONS)
    draw = torch.Generator().manual_seed(0)
    heads = torch.randint(size, (len(PROMPTS), width), generator=draw)[list(_PLACE)]
    ids = torch.cat([heads, torch.randint(size, (len(_PLACE), length), generator=draw)], dim=1)
    before = torch.arange(width) >= width - torch.tensor(PROMPTS)[list(_PLACE), None]
    mask = torch.cat([before, torch.arange(length) < torch.tensor(_COMPLETIONS)[:, None]], dim=1).long()
    experts = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device), "use_cache": False, **experts}


def _scores(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the log-probabilities of the completions' tokens and, of experts, what their routers say of all tokens.

    The head is asked apart from the rest of the model, as TRL's fused head does.
    """
    outputs, width = model.base_model(**batch), max(PROMPTS)
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    logits = model.get_output_embeddings()(outputs.last_hidden_state[:, width - 1 : -1])
    logps = logits.float().log_softmax(-1).gather(2, ids[:, width:, None]).squeeze(2)
    routers = getattr(outputs, "router_logits", None) or ()
    routed = [one.reshape(*ids.shape, -1)[mask].flatten() for one in routers]
    return torch.cat([logps[mask[:, width:]], *routed])


def _next(model: PreTrainedModel) -> Tensor:
    """Return the next random numbers of the CPU and of a model's device, which are others once a pass has drawn."""
    return torch.cat([torch.rand(4), torch.rand(4, device=model.device).cpu()])


def _gradients(values: Tensor, learns: dict[str, nn.Parameter]) -> dict[str, float]:
    """Add the gradient of a sum that weighs every value differently to that of every parameter, and return the norms;
    a missing one has none."""
    if learns:
        (values * torch.linspace(-1, 1, len(values), device=values.device)).sum().backward()
    return {name: 0.0 if p.grad is None else p.grad.norm().item() for name, p in learns.items()}


def _rates(model: PreTrainedModel) -> str:
    """Return the settings, and the layers, by which a model may draw at random."""
    settings = model.config.get_text_config().to_dict().items()
    rates = {name: value for name, value in settings if _DRAWS.search(name) and isinstance(value, float) and value}
    rates |= {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p}
    return ", ".join(f"{name}={value}" for name, value in list(rates.items())[:3])


@contextlib.contextmanager
def _untouched(model: PreTrainedModel) -> Iterator[None]:
    """Let a model train, without autocast; then restore its modes, gradients and buffers, and what draws at random."""
    gradients, buffers = [(p, p.grad) for p in model.parameters()], [(b, b.clone()) for b in model.buffers()]
    forked = torch.random.fork_rng([model.device] if model.device.type == "cuda" else [])
    with dropout_off(model), forked, torch.autocast(model.device.type, enabled=False):
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
