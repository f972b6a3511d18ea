"""Inner products of gradients from one pass, against those of gradients that are made row by row."""

import weakref
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_gradients import SIZE as QWEN2
from test_gradients import VOCABULARY, Absolute, padded, qwen2, rollouts, score_gradients
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gcpo import gradients, one_pass
from gcpo.gradients import checkpointed, distinct_rows, dropout_off, lengths, pass_bytes
from gcpo.one_pass import gradient_grams

pytestmark = pytest.mark.usefixtures("one_thread")

pads = st.integers(0, 3)

# What a kind of model has beside its size, or in its place.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},
    "gpt_neox": {"hidden_dropout": 0.1},
    "gemma": {"head_dim": 8},
    "gpt2": {"max_position_embeddings": 512},
    "mixtral": {"num_local_experts": 2},
}


def made(kind: str, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(2)
    config = AutoConfig.for_model(kind, **QWEN2 | KINDS[kind], pad_token_id=3, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config)


def adapted(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    kept = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(made("llama"), LoraConfig(r=2, lora_dropout=0.1, **kept, **options))


llama, gpt_neox, gemma, gpt2, mixtral = (partial(made, kind) for kind in KINDS)
MODELS = {"qwen2": qwen2, "llama": llama, "gpt_neox": gpt_neox, "gemma": gemma, "gpt2": gpt2}


def explicit(model: nn.Module, batch: dict[str, Tensor], params: Any = None) -> Tensor:
    gradients = score_gradients(model, **batch, params=params).double()
    return gradients @ gradients.T


def close(found: Tensor, expected: Tensor, rel: float = 1e-5) -> bool:
    """Return True if products are as near as ``rel`` of the two gradients' norms, and not all are zero: products of
    nearly orthogonal gradients have no digits of their own."""
    norms = expected.diagonal().sqrt()
    return bool(((found - expected).abs() <= rel * norms[:, None] * norms).all() and norms.max() > 0)


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is run row by row."""
    monkeypatch.setattr(one_pass, "gradient_gram", None)


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_inner_products_are_those_of_explicit_gradients(name: str, tied: bool, dtype: torch.dtype) -> None:
    model, batch = MODELS[name](tied).to(dtype), rollouts()
    batch["input_ids"][:2, PAD] = 3  # a completion with the padding's token, which some tables do not learn
    (gram,) = gradient_grams(model, **batch)
    assert gram.dtype == torch.float64
    assert close(gram, explicit(model, batch), 1e-5 if dtype == torch.float32 else 1e-12)


PAD = 4  # a column of completions


@pytest.mark.usefixtures("in_one_pass")
@for_all(seed=seeds, size=st.integers(1, 7), left=pads, right=pads, name=st.sampled_from([*MODELS]), tied=st.booleans())
def test_padding_empty_and_repeated_rows(seed: int, size: int, left: int, right: int, name: str, tied: bool) -> None:
    model, rng = MODELS[name](tied).double(), torch.Generator().manual_seed(seed)
    batch = rollouts(size, seed)
    order = torch.randint(size, (size + 2,), generator=rng)
    batch = {part: values[order] for part, values in batch.items()}
    batch["completion_mask"][torch.rand(size + 2, generator=rng) < 0.2] = 0
    first, others = padded(batch, 4, 0), padded(batch, 0, 4)
    batch = padded({part: torch.cat([first[part][:1], others[part][1:]]) for part in batch}, left, right)
    (gram,) = gradient_grams(model, **batch)
    expected = explicit(model, batch)
    torch.testing.assert_close(gram, expected, rtol=1e-9, atol=1e-9 * float(expected.max()))
    for i in range(len(order)):
        same = order == order[i]
        same &= batch["completion_mask"].any(1) == batch["completion_mask"][i].any()
        assert (gram[same] == gram[i]).all()  # exactly, so that their distance is 0


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("params", ["lm_head.weight", "embed_tokens.weight", "norm.weight", "bias", "*.layers.1.*"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_part_of_the_parameters(params: str, tied: bool) -> None:
    model, batch = qwen2(tied), rollouts()
    assert close(gradient_grams(model, **batch, params=params)[0], explicit(model, batch, params), 1e-12)


@pytest.mark.usefixtures("in_one_pass")
def test_adapters_are_covered_and_frozen_weights_are_not() -> None:
    model, batch = adapted(target_modules="all-linear"), rollouts()
    assert close(gradient_grams(model, **batch)[0], explicit(model, batch))


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("by_tokens", [True, False])
def test_both_ways_to_a_matrix_and_small_chunks(by_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, rows = torch.Generator().manual_seed(0), 4
    given, output = (torch.randn(rows, 5, width, generator=rng, dtype=torch.float64) for width in (30, 40))
    explicit = torch.einsum("nto,nti->noi", output, given).flatten(1)
    use = one_pass._Outer(given, output)
    monkeypatch.setattr(one_pass, "CHUNK", 7 * 30 * rows)
    if not by_tokens:
        monkeypatch.setattr(one_pass, "_by_tokens", None)
        use = one_pass._Outer(given.repeat(1, 40, 1), output.repeat(1, 40, 1) / 40)  # 200 tokens: more work by tokens
    found = one_pass._of_parameter(nn.Parameter(torch.zeros(40, 30)), [use])
    torch.testing.assert_close(found, explicit @ explicit.T)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("columns", [5, 2**14, 2**15 + 3, 2**20])
def test_pieces_add_up_at_once_and_one_by_one(columns: int, at_once: bool) -> None:
    values, before = torch.rand(3, columns, generator=torch.Generator().manual_seed(0)), torch.rand(3, 3).double()
    gram = before.clone()
    one_pass._add_products(gram, values, at_once)
    torch.testing.assert_close(gram - before, values.double() @ values.double().T, rtol=1e-6, atol=1e-9)


# --- memory -----------------------------------------------------------------------------------------------------------


def long_rows(size: int = 5) -> dict[str, Tensor]:
    """Completions of several lengths to a prompt that is most of each row, padded on both sides."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (size, 48), generator=rng)
    ids[:, :40] = ids[0, :40].clone()
    attended = (torch.arange(48) < 42 + torch.arange(size)[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": attended, "completion_mask": attended * (torch.arange(48) >= 40)}
    return padded(batch, 3, 1)


def needs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the estimates for all rows at once, as they are and with layers that are computed again."""
    rows = distinct_rows(**batch)
    plain, again = (pass_bytes(model, len(rows), *lengths(rows, True), of) for of in ([], checkpointed(model)))
    return plain, again


@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("params", [None, "*.1.*", "*down_proj.weight", "*norm*.weight"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [llama, gpt_neox, gemma, gpt2, lambda tied: adapted(target_modules="all-linear")])
def test_layers_that_are_computed_again_give_the_same_bits(
    make: Callable[..., nn.Module], tied: bool, params: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make(tied), long_rows()
    if params and not any(fnmatch(name, params) for name, p in model.named_parameters() if p.requires_grad):
        pytest.skip("no such parameter")
    options: dict[str, Any] = {"params": params, "temperatures": (0.7, 1.0)}
    expected, whole = gradient_grams(model, **batch, **options), gradients.computed_again
    used: list[int] = []
    monkeypatch.setattr(gradients, "computed_again", lambda layers: used.append(len(layers)) or whole(layers))
    plain, again = needs(model, batch)
    assert again < plain
    found = gradient_grams(model, **batch, **options, memory_limit=(plain + again) / 2)
    assert used == [0 if params == "*.1.*" else 2] and all(
        torch.equal(*pair) for pair in zip(found, expected, strict=True)
    )
    assert gradient_grams(model, **batch, **options, memory_limit=plain)[0].equal(expected[0]) and used[1] == 0
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules())
    assert all(p.requires_grad for p in model.parameters()) or make not in (llama, gpt_neox, gemma, gpt2)


def test_nothing_of_a_pass_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, held, read = llama(), long_rows(), [], one_pass._Call.read
    monkeypatch.setattr(one_pass._Call, "read", lambda call, *of: held.append(weakref.ref(call)) or read(call, *of))
    for limit, calls in ((None, 20), (1.01 * needs(model, batch)[1], 20 + 18)):
        held.clear()
        gradient_grams(model, **batch, memory_limit=limit)
        assert len(held) >= calls and not any(call() for call in held)  # before any collection of garbage


@pytest.mark.parametrize("make", [llama, gpt_neox, gemma, gpt2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_estimate_covers_what_a_pass_takes(make: Callable[..., PreTrainedModel], attention: str) -> None:
    model, batch = make(True), {name: values.repeat_interleave(8, 1) for name, values in long_rows().items()}
    model.set_attn_implementation(attention)
    rows = distinct_rows(**batch)
    for layers, estimate in zip(([], checkpointed(model)), needs(model, batch), strict=True):
        with dropout_off(model):
            call = partial(one_pass._grams, model, list(rows), [*model.parameters()], (0.9, 1.0), layers)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                assert call()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        taken = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
        assert taken < 1.1 * estimate < 5 * taken


# --- what is run row by row -------------------------------------------------------------------------------------------


class Reused(Absolute):
    """Its head is used by itself once more, which no layer shows."""

    def logits(self, ids: Tensor, state: Tensor) -> Tensor:
        return self.head(state) + self.token(ids) @ self.head.weight.T


class Changed(Absolute):
    """A layer's input is changed in place after the layer has read it."""

    def logits(self, ids: Tensor, state: Tensor) -> Tensor:
        first = self.head(state)
        with torch.no_grad():
            state.mul_(2)
        return first


class Mixing(Absolute):
    """A layer that reads the tokens of all rows at once."""

    def logits(self, ids: Tensor, state: Tensor) -> Tensor:
        return self.head(state.flatten(0, 1)).unflatten(0, state.shape[:2])


@pytest.mark.parametrize(("make", "params"), [(Reused, "head.*"), (Mixing, "head.*"), (mixtral, None)])
def test_a_model_with_other_uses_is_run_row_by_row(make: Any, params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, asked = make(), rollouts(), []
    plain = one_pass.gradient_gram

    def counted(*args: Any, temperature: float, **options: Any) -> Tensor:
        asked.append(temperature)
        return plain(*args, temperature=temperature, **options)

    monkeypatch.setattr(one_pass, "gradient_gram", counted)
    grams = gradient_grams(model, **batch, params=params, temperatures=(1.0, 0.5))
    assert asked == [1.0, 0.5]
    assert close(grams[0], explicit(model, batch, params))


def test_an_input_that_is_changed_in_place_is_not_read() -> None:
    model, batch = Changed(), rollouts()
    rows = list(distinct_rows(**batch))
    with dropout_off(model, model.head.parameters()):
        assert one_pass._grams(model, rows, [*model.head.parameters()], [1.0]) is None


def test_tables_of_adapters_are_run_row_by_row() -> None:
    model, batch = adapted(target_modules=["embed_tokens", "q_proj"]), rollouts()
    assert close(gradient_grams(model, **batch)[0], explicit(model, batch))


# --- the model is untouched, and what is refused ----------------------------------------------------------------------


@pytest.mark.usefixtures("in_one_pass")
def test_modes_grad_fields_and_hooks_are_left_as_they_were() -> None:
    model, batch = gpt_neox().train(), rollouts()
    with torch.no_grad():
        first, second = (gradient_grams(model, **batch)[0] for _ in range(2))
    assert torch.equal(first, second)  # without dropout
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    batch["input_ids"][0, 0] = VOCABULARY + 1
    with pytest.raises(IndexError):
        gradient_grams(model, **batch)
    assert model.training and not any(module._forward_hooks for module in model.modules())


def test_no_completion_at_all_is_a_matrix_of_zeros() -> None:
    batch = rollouts(3)
    batch["completion_mask"][:] = 0
    assert torch.equal(gradient_grams(qwen2(), **batch)[0], torch.zeros(3, 3, dtype=torch.float64))
