"""Prompts that several rows of a batch share, computed once.

All G completions of a prompt begin with the same tokens, whose states, keys and values are equal in every row. Here a
model's backbone reads one row: every distinct prompt once, then every completion. All but attention treats each token
by itself; attention lets a prompt see itself, and a completion its own prompt and itself. Gradients of a prompt's uses
add up. What stands above the backbone (head, temperature, scaling of logits) and around it (adapters, autocast,
gradient checkpointing, the wrappers of DDP and FSDP) is the caller's own, unchanged. Results equal the plain pass's up
to rounding.

``generate`` reads prompts once too: its first pass fills the cache for the distinct ones, and every row takes a copy.

No model is taken on trust: before its first shared pass a small batch runs plain and shared, and unless the two agree,
passes stay plain (:func:`obstacle`).

TRL shuffles the rows of a generation before it cuts them into micro-batches, so that a micro-batch has rows of many
prompts and little to share: :func:`together` puts those of one prompt side by side.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import split_tensor_dict

from gcpo.trainer.config import GCPOConfig
from gcpo.trainer.obstacles import NOISE, PROMPTS, known_beforehand, layer_kinds, tried

logger = get_logger("trl.gcpo")

# Inputs of a backbone with a value for each token, and for the whole call; a call with others (pictures, states that
# are to be returned) is not shared.
_BY_TOKEN = ("input_ids", "attention_mask", "position_ids")
_BY_CALL = ("use_cache", "past_key_values", "return_dict", "output_router_logits")

# What is known of models, by what may change of them; of a model that is in parts by now, under None.
_known: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def obstacle(model: Any) -> str | None:
    """Return why a model, with adapters or without, cannot share prompts, or None if it can.

    Where nothing is known to be in the way, two prompts with three completions each run plain and shared, in the mode
    of training: all passes must agree up to rounding, in log-probabilities and, unless gradients are off, in the
    gradient of every parameter. The answer is kept until the model's adapters, attention or type change. Nothing of the
    model is left changed, and no random number is used up.
    """
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    model = _bare(model)
    known = _known.setdefault(model, {})
    if None in known:
        return known[None]
    attention = ALL_ATTENTION_FUNCTIONS.get(str(model.config.get_text_config()._attn_implementation))
    plain = attention.plain if isinstance(attention, Attention) else attention
    state = plain, model.dtype, *adapters
    key = state, (state, True) in known or torch.is_grad_enabled()
    if key not in known:
        why = known_beforehand(model, plain, adapters.values())
        known[key] = why or tried(model, _sharing(model, max(PROMPTS)))
    return known[key]


def shares(args: GCPOConfig, model: Any, reference: Any = None) -> bool:
    """Return whether a trainer's passes share prompts: as ``args`` wants, or where the policy can if that is None, and
    say once why not. Processes that train together do as the first of them decides.

    Args:
        args: of the trainer.
        model: the policy, before it is wrapped.
        reference: the reference model, of the same kind. Where processes are going to share the two out, this is the
            answer for good: no part of a model can be tried alone.

    Raises:
        ValueError: it is wanted, and the model cannot.
    """
    if args.share_prompts is False:
        return False
    # Trainers add noise to the embeddings from their first step on.
    [why] = broadcast_object_list([NOISE if args.neftune_noise_alpha else obstacle(model)])
    for one in filter(None, (model, reference)) if args.shards else ():
        _known.setdefault(_bare(one), {})[None] = why
    if why and args.share_prompts:
        raise ValueError(f"share_prompts=True: this model cannot share prompts, as {why}. Leave share_prompts out.")
    if why:
        logger.warning(f"Every row reads its prompt anew: prompts are not shared, as {why}.")
    return not why


def _bare(model: Any) -> PreTrainedModel:
    """Return the model that adapters are on, or the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def sharing(wanted: bool, model: Any, width: int = 0) -> contextlib.AbstractContextManager[None]:
    """Return :func:`shared` of a model where it is wanted, else nothing."""
    return shared(model, width) if wanted else contextlib.nullcontext()


def shared(model: Any, width: int = 0) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a model computes each distinct prompt once, if it has no :func:`obstacle`; else its
    passes stay as they are, and a warning says why.

    Args:
        model: an unwrapped causal language model, with adapters or without.
        width: columns of ``input_ids`` that are prompt, in passes without a cache; 0 where all passes are those of
            ``generate``, whose first one reads prompts alone.

    A pass that TRL's fused head scores gives it the completions' states and labels alone, so that prompts are not
    scored on a CPU either; its outputs have the completions' columns.
    """
    if why := obstacle(model):
        warnings.warn(f"Every row reads its prompt anew, as {why}.", stacklevel=2)
        return contextlib.nullcontext()
    return _sharing(_bare(model), width)


@contextlib.contextmanager
def _sharing(model: PreTrainedModel, width: int) -> Iterator[None]:
    body: Any = model.base_model
    plain, scores, kinds = body.forward, model.forward, layer_kinds(model.config.get_text_config())
    name: str = model.config.get_text_config()._attn_implementation
    if not isinstance(attention := ALL_ATTENTION_FUNCTIONS[name], Attention):
        AttentionInterface.register(name, Attention(attention))  # which takes a packing from now on

    def forward(*arguments: Any, cut: bool = False, **inputs: Any) -> Any:
        past, shareable = inputs.get("past_key_values"), not arguments and _shareable(inputs)
        if shareable and past is not None and not past.get_seq_length():
            return _first_pass(plain, inputs)
        packs = shareable and past is None and width > 0 and inputs.get("attention_mask") is not None
        outputs = _packed_pass(plain, inputs, width, kinds) if packs else plain(*arguments, **inputs)
        if cut:
            outputs.last_hidden_state = outputs.last_hidden_state[:, width - 1 : -1]
        return outputs

    def scored(*arguments: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return scores(*arguments, **inputs)
        labels = inputs.pop("labels")[:, width:]
        return scores(*arguments, **inputs, shift_labels=labels, fused_lm_head=True, cut=True)

    # Of the model only in passes without a cache: ``generate`` reads the signature of its forward.
    head = patch.object(model, "forward", scored) if width else contextlib.nullcontext()
    with patch.object(body, "forward", forward), head:
        yield


def _shareable(inputs: dict[str, Any]) -> bool:
    """Return True for a call on the ids of several rows and tokens with a plain mask or, of rows without padding in
    ``generate``, none."""
    names = {name for name, value in inputs.items() if value is not None and value is not False}
    if "input_ids" not in names or names - {*_BY_TOKEN, *_BY_CALL} or min(inputs["input_ids"].shape) < 2:
        return False
    mask = inputs.get("attention_mask")
    return mask is None or (isinstance(mask, Tensor) and mask.shape == inputs["input_ids"].shape)


def distinct(ids: Int[Tensor, "N P"], mask: Int[Tensor, "N P"] | None) -> tuple[Int[Tensor, " D"], Int[Tensor, " N"]]:
    """Return the first row of each distinct prompt, and for every row the place of its prompt among these."""
    _, place = torch.unique(ids if mask is None else torch.cat([ids, mask], 1), dim=0, return_inverse=True)
    first = torch.full((int(place.max()) + 1,), len(ids), device=ids.device)
    return first.scatter_reduce_(0, place, torch.arange(len(ids), device=ids.device), "amin"), place


def together(batches: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return micro-batches of the same rows in another order: those of one prompt one after the other. Rows stay among
    the ``size`` micro-batches of one optimiser step."""
    if size == 1:
        return list(batches)
    sorted_batches: list[dict[str, Any]] = []
    for start in range(0, len(batches), size):
        step = batches[start : start + size]
        whole: dict[str, Any] = dict(step[0])  # what has no rows is the same in all
        by_row = [key for key, value in whole.items() if isinstance(value, Tensor) and value.ndim]
        whole |= {key: torch.cat([batch[key] for batch in step]) for key in by_row}
        order = distinct(whole["prompt_ids"], whole["prompt_mask"])[1].argsort(stable=True)
        sorted_batches += split_tensor_dict(whole | {key: whole[key][order] for key in by_row}, len(step))
    return sorted_batches


def _first_pass(plain: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Return ``generate``'s pass of the prompts; its cache is filled for every row."""
    first, place = distinct(inputs["input_ids"], inputs.get("attention_mask"))
    if len(first) == len(place):
        return plain(**inputs)
    parts = {name: inputs[name][first] for name in _BY_TOKEN if inputs.get(name) is not None}
    outputs = plain(**{**inputs, **parts})
    outputs.past_key_values.batch_select_indices(place)
    outputs.last_hidden_state = outputs.last_hidden_state.index_select(0, place)
    return outputs


# --- one row of prompts and completions -------------------------------------------------------------------------------


@dataclass
class Packing:
    """The places of prompts and completions in the one row that is computed, and the tokens that each token may see.

    Args:
        place: (N,), the prompt of each completion.
        prompts: (D, 1, P, P), True where a prompt's token (row) sees one of its own (column).
        completions: (N, 1, T, P + T), True where a completion's token sees one of its prompt's, or of its own.
        kinds: how far layers see (:func:`gcpo.trainer.obstacles.layer_kinds`).
        calls: of attention, which has taken this packing.
    """

    place: Int[Tensor, " N"]
    prompts: Bool[Tensor, "D 1 P P"]
    completions: Bool[Tensor, "N 1 T P+T"]
    kinds: Sequence[str]
    calls: int = 0

    def split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return (..., M, d) in its prompts, (D, ..., P, d), and its completions, (N, ..., T, d), with M = DP + NT."""
        (d, _, p, _), (n, _, t, _) = self.prompts.shape, self.completions.shape
        prompts, completions = row.split([d * p, n * t], dim=-2)
        return prompts.unflatten(-2, (d, p)).movedim(-3, 0), completions.unflatten(-2, (n, t)).movedim(-3, 0)


def _packed_pass(plain: Callable[..., Any], inputs: dict[str, Any], width: int, kinds: Sequence[str]) -> Any:
    """Return the states of all columns, from a pass of one row: the distinct prompts, then all completions."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first, place = distinct(ids[:, :width], mask[:, :width])
    columns = torch.arange(ids.shape[1], device=ids.device)
    known = inputs.get("position_ids")
    positions = (columns if known is None else known).expand_as(ids)
    # A token of padding sees itself, or its softmax would be over nothing.
    sees = (columns <= columns[:, None]) & (mask.bool()[:, None] | (columns == columns[:, None]))
    packing = Packing(place, sees[first, None, :width, :width], sees[:, None, width:], kinds)

    def packed(rows: Tensor) -> Tensor:
        return torch.cat([rows[first, :width].flatten(), rows[:, width:].flatten()]).unsqueeze(0)

    def unpacked(row: Tensor) -> Tensor:
        """Return (1, M, d) as (N, T, d), and (M, d), of a router, as (N T, d)."""
        prompts, completions = packing.split(row.reshape(-1, row.shape[-1]))
        rows = torch.cat([prompts.index_select(0, place), completions], dim=1)
        return rows if row.ndim == 3 else rows.flatten(0, 1)

    unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)  # a mask that the model need not make
    given = {"input_ids": packed(ids), "position_ids": packed(positions), "attention_mask": unread}
    outputs = plain(**{**inputs, **given, "use_cache": False}, packing=packing)
    if not packing.calls:
        raise ValueError("none of its layers learns which prompts are shared")
    outputs.last_hidden_state = unpacked(outputs.last_hidden_state)
    if routed := getattr(outputs, "router_logits", None):
        outputs.router_logits = tuple(map(unpacked, routed))
    return outputs


class Attention:
    """transformers' attention of a name, which also takes a packing, as layers hand it down with their other arguments.
    It stays in its place, and computes as before without one: a checkpointed layer is computed again in the backward
    pass."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, module: nn.Module, *states: Any, packing: Packing | None = None, **options: Any) -> Any:
        attend = self.plain if packing is None else partial(_attend, packing)
        return attend(module, *states, **options)


def _attend(
    packing: Packing, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return attention within prompts, and of completions to their prompts and themselves, (1, M, heads, d), of states
    (1, heads, M, d). A layer that few tokens would not show to be wrong is refused."""
    packing.calls += 1
    if attention_mask is None or attention_mask.numel() != 1:
        raise ValueError("its layers make a mask of their own")
    window, layer = options.pop("sliding_window", None), getattr(module, "layer_idx", None)
    kind = packing.kinds[layer if layer is not None and layer < len(packing.kinds) else -1]
    if window is None and kind != "full_attention":
        raise ValueError(f"a layer ({kind}) does not hand over how far it sees")
    (q, k, v), (qs, ks, vs) = zip(*(packing.split(states[0]) for states in (query, key, value)), strict=True)
    ks, vs = (torch.cat([one.index_select(0, packing.place), rest], dim=-2) for one, rest in ((k, ks), (v, vs)))
    parts = []
    for heads, sees in ((q, k, v), packing.prompts), ((qs, ks, vs), packing.completions):
        if window is not None:
            rows, columns = (torch.arange(length, device=sees.device) for length in sees.shape[-2:])
            sees = sees & (rows[:, None] + len(columns) - len(rows) - columns < window)
        parts.append(sdpa_attention_forward(module, heads[0], heads[1], heads[2], sees, **options)[0].flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None
