"""Shared prompts against the pass that reads every prompt anew: the same numbers, from fewer tokens."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ACCUMULATED, OFF_POLICY, SPLIT, for_all, make_trainer, seeds
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.trainer.utils import disable_dropout_in_model

from gcpo.trainer.obstacles import layer_kinds
from gcpo.trainer.prefix import distinct, obstacle, shared

VOCABULARY, PAD = 61, 0
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 128}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
SHAPE: dict[str, Any] = {**SIZES, **LAYERS, "head_dim": 8, "pad_token_id": PAD}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
WINDOW = {"use_sliding_window": True, "max_window_layers": 2}
QUIET = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
FEW = {**SHAPE, "ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.3}
# Models that can share prompts: their kind, and what they have beside their size or in its place.
SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral, with a window": ("mistral", {"sliding_window": 4}),
    "gemma 3, with a window in most layers": (
        "gemma3_text",
        {"num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 3},
    ),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "gpt_neox": ("gpt_neox", {}),
    "cohere, which scales its logits": ("cohere", {"logit_scale": 0.3}),
    "qwen3_moe, experts": ("qwen3_moe", EXPERTS),
}

# What a model does that shared prompts would get wrong, the kind of model, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers that drop what they are told": ("nemotron", {}, "none of its layers learns which prompts"),
    "dropout that disable_dropout leaves": ("gpt_bigcode", {"n_embd": 16, "n_head": 2, "n_layer": 2}, "attn_pdrop=0.1"),
    "dropout of attention": ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "noise between routers' equals, of which few tokens have none": ("phimoe", EXPERTS, "router_jitter_noise=0.01"),
    "positions counted from the mask": ("opt", {**FEW, "dropout": 0.0}, "positions from the mask"),
    "draws without a setting": ("phimoe", {**EXPERTS, **QUIET}, "draws at random in training"),
    "masks made of values": ("doge", {}, "a mask of their own"),
    "tokens that see later ones": ("gemma3_text", {"use_bidirectional_attention": True}, "from those without"),
    "a wide window in the mask": ("qwen2_moe", {**EXPERTS, **WINDOW, "sliding_window": 4096}, "sliding_attention"),
    "soft caps": ("gemma2", {}, "no way to replace its attention"),
    "an encoder": ("t5", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "decoder of text"),
    "no attention": ("mamba", {"state_size": 4}, "attention"),
    "eager attention": ("qwen2", {"attn_implementation": "eager"}, '"sdpa"'),
    "an attention of one's own": ("qwen2", {"attn_implementation": "own"}, 'is "own", of test_prefix'),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def made(kind: str = "qwen2", size: int = VOCABULARY, **changes: Any) -> Any:
    """A model of random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **changes, "vocab_size": size})
    return (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config).train()


def policy(name: str = "qwen2", **fused: Any) -> Any:
    """A policy with TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head  # since 1.16; passes of older ones are compared in trainings

    kind, changes = SHARING[name]
    model = made(kind, **changes)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"), **fused)
    assert obstacle(model) is None  # now, and not amid what is counted
    return model


def batch(seed: int = 0, prompts: int = 3, size: int = 4, width: int = 7, length: int = 5) -> tuple[Tensor, Tensor]:
    """Ids and mask of groups in any order, prompts padded on the left and completions on the right; some are empty."""
    draw = torch.Generator().manual_seed(seed)
    which = torch.arange(prompts).repeat_interleave(size)[torch.randperm(prompts * size, generator=draw)]
    heads = torch.randint(1, VOCABULARY, (prompts, width), generator=draw)
    lengths = torch.randint(1, width + 1, (prompts,), generator=draw)
    tails = torch.randint(1, VOCABULARY, (len(which), length), generator=draw)
    ends = torch.randint(0, length + 1, (len(which), 1), generator=draw)
    before = (torch.arange(width) >= width - lengths.unsqueeze(1)).long()
    mask = torch.cat([before[which], (torch.arange(length) < ends).long()], dim=1)
    return torch.cat([heads[which], tails], dim=1) * mask, mask


def scores(model: Any, ids: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completions, as TRL asks for them."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :width] = -100
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    keep = ids.shape[1] - width
    return outputs.log_probs[:, -keep:], outputs.entropy[:, -keep:]


def gradients(model: Any, logps: Tensor) -> Tensor:
    """The gradient of a sum of log-probabilities that weighs every row differently, of every weight."""
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps), dtype=logps.dtype).unsqueeze(1)).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def check_equal(model: Any, ids: Tensor, mask: Tensor, width: int, tolerance: float = 2e-5) -> None:
    """Compare log-probabilities, entropies and gradients of the two passes."""
    found = []
    for context in (contextlib.nullcontext(), shared(model, width)):
        with context:
            logps, entropies = scores(model, ids, mask, width)
        found.append((logps.detach(), entropies.detach(), gradients(model, logps)))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=tolerance, atol=tolerance)
    assert found[0][2].abs().max() > 0.1  # else nothing was compared


@contextlib.contextmanager
def tokens_read(model: Any) -> Iterator[list[int]]:
    """How many tokens the first layer reads, call by call."""
    read: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].numel()))
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize("name", SHARING)
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(name: str) -> None:
    check_equal(policy(name), *batch(), width=7)


@for_all(
    seed=seeds,
    prompts=st.integers(1, 4),
    size=st.sampled_from([2, 3, 8, 64]),
    width=st.integers(1, 9),
    length=st.integers(1, 6),
    start=st.integers(0, 5),
)
def test_groups_of_any_size_cut_freely(seed: int, prompts: int, size: int, width: int, length: int, start: int) -> None:
    ids, mask = batch(seed, prompts, size, width, length)
    start = min(start, len(ids) // 2)
    some = slice(start, start + max(2, len(ids) // 2))  # a micro-batch that cuts through groups
    ids, mask = ids[some], mask[some]
    mask[0, width] = 1  # one completion at least has a token
    check_equal(policy(), ids, mask, width)


def test_each_distinct_prompt_is_read_once() -> None:
    model, (ids, mask) = policy(), batch()
    with tokens_read(model) as read, shared(model, 7):
        scores(model, ids, mask, 7)
    assert read == [3 * 7 + 12 * 5]
    with tokens_read(model) as read:  # and the model is as before
        scores(model, ids, mask, 7)
    assert read == [12 * 12] and "forward" not in model.model.__dict__


def test_prompts_that_differ_in_their_mask_alone_are_two() -> None:
    first, place = distinct(torch.tensor([[4, 4], [4, 4], [4, 4]]), torch.tensor([[1, 1], [0, 1], [1, 1]]))
    assert sorted(first.tolist()) == [0, 1] and place[0] == place[2] != place[1]


def test_positions_given_for_each_row_are_those_of_its_own_prompt() -> None:
    model, (ids, mask) = policy(), batch()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 6}
    plain = model(**given).logits
    with shared(model, 7):
        found = model(**given).logits
    seen = mask[:, 6:].bool()  # what padding computes, nobody reads
    torch.testing.assert_close(found[seen], plain[seen], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("padded", [True, False])  # without padding generate drops the mask
def test_samples_are_the_same_and_prompts_are_read_once(padded: bool) -> None:
    model, (ids, mask) = policy().eval(), batch()
    mask = mask if padded else torch.ones_like(mask)
    drawn = []
    for context in (contextlib.nullcontext(), shared(model)):
        torch.manual_seed(1)
        with context, tokens_read(model) as read:
            drawn.append(model.generate(ids[:, :7], attention_mask=mask[:, :7], max_new_tokens=4, do_sample=True))
        assert drawn[0].shape[1] > 9
    assert torch.equal(*drawn)
    assert read[:2] == [3 * 7, 12]


def test_a_head_in_float32_below_autocast() -> None:
    model, (ids, mask) = policy(cast_lm_head_to_fp32=True), batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain, _ = scores(model, ids, mask, 7)
        with shared(model, 7):
            other, _ = scores(model, ids, mask, 7)
    assert plain.dtype == other.dtype == torch.float32
    torch.testing.assert_close(other, plain, rtol=0.02, atol=0.02)  # three digits of bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_packed_layers_again(reentrant: bool) -> None:
    model, (ids, mask) = policy(), batch()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # reentrant checkpoints need it
    with tokens_read(model) as read:
        check_equal(model, ids, mask, 7)
    assert read == [12 * 12, 3 * 7 + 12 * 5]


def test_a_pass_that_asks_for_more_than_states_is_plain() -> None:
    model, (ids, mask) = policy(), batch()
    with shared(model, 7), tokens_read(model) as read:
        states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert read == [12 * 12] and len(states) == 3


# --- models that cannot share -----------------------------------------------------------------------------------------


def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """transformers' attention, of values twice as large."""
    return sdpa_attention_forward(module, query, key, 2 * value, mask, **options)


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    """An attention of one's own, and transformers' as they were."""
    before = dict(AttentionInterface._global_mapping)
    AttentionInterface.register("own", own)
    yield
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(before)


@pytest.mark.parametrize(("kind", "changes", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_share_prompts_says_why_and_stays_plain(kind: str, changes: dict[str, Any], why: str) -> None:
    model, (ids, mask) = made(kind, **changes), batch()
    if kind == "gpt_bigcode":
        disable_dropout_in_model(model)
    assert why in str(obstacle(model))
    if not model.config.is_encoder_decoder:
        model.eval()
        plain = model(input_ids=ids, attention_mask=mask).logits
        with pytest.warns(UserWarning, match="reads its prompt anew"), shared(model, 7):
            assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, plain)


def test_layers_that_do_not_see_everything_are_known_by_their_settings() -> None:
    for settings, kinds in (
        ({"sliding_window": 4096}, ["sliding_window"]),
        ({"sliding_window": 4096, "use_sliding_window": False}, ["full_attention"]),
        ({"attention_chunk_size": 8192}, ["attention_chunk_size"]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "chunked"]}, ["full_attention", "chunked"]),
    ):
        assert layer_kinds(PreTrainedConfig(**settings)) == kinds


def test_an_attention_in_the_place_of_transformers_is_not_taken_for_it() -> None:
    model = policy()
    AttentionInterface.register("sdpa", own)
    assert "of test_prefix" in str(obstacle(model))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (LoraConfig(target_modules="all-linear", alora_invocation_tokens=[5]), "alora_invocation_tokens"),
        (LoraConfig(target_modules="all-linear", lora_dropout=0.1), "lora_dropout.default=0.1"),
        (PromptTuningConfig(num_virtual_tokens=2), "learnt prompts"),
    ],
)
def test_adapters_that_cannot_share(adapter: Any, said: str) -> None:
    adapter.task_type = "CAUSAL_LM"
    assert said in str(obstacle(get_peft_model(policy(), adapter)))


class Late(torch.nn.Linear):
    """A layer whose weight takes no part in the gradient of a single row."""

    def forward(self, given: Tensor) -> Tensor:
        return torch.nn.functional.linear(given, self.weight.detach() if len(given) == 1 else self.weight)


def test_a_gradient_that_shared_prompts_lose_is_seen_though_all_numbers_agree() -> None:
    model = made()
    layer = model.model.layers[1].mlp
    layer.down_proj = Late(24, 16, bias=False)
    assert "gradient of model.layers.1.mlp.down_proj.weight" in str(obstacle(model))
    with torch.no_grad():  # in which nobody asks for gradients
        assert obstacle(made()) is None


def test_a_model_is_tried_once_and_again_when_it_has_changed() -> None:
    model = made()
    with tokens_read(model) as read:
        for n, change in enumerate((model.float, model.double, lambda: model.add_adapter(LoraConfig(r=2), "one")), 1):
            change()
            assert obstacle(model) is None
            with torch.no_grad(), shared(model, 7):  # without gradients it asks for no more
                assert obstacle(model) is None
            assert len(read) == 2 * n
    model.set_attn_implementation("eager")
    assert '"eager"' in str(obstacle(model))


def test_trying_leaves_a_model_and_random_numbers_as_they_were() -> None:
    model = made()
    model.model.layers[0].eval()
    weight = model.lm_head.weight
    weight.grad = torch.ones_like(weight)
    before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert obstacle(model) is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert torch.equal(weight.grad, torch.ones_like(weight)) and model.model.embed_tokens.weight.grad is None
    assert model.training and not model.model.layers[0].training


# --- in the trainer -------------------------------------------------------------------------------------------------

IN_TWO_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 6}


SETTINGS: dict[str, dict[str, Any]] = {
    "clip_cov, in the loss": {"method": "clip_cov"},
    "a reference": {"beta": 0.1},
    "off-policy, in parts": {**OFF_POLICY, **SPLIT},
    "accumulated, in two steps": IN_TWO_STEPS,
    "gradient checkpointing": {"gradient_checkpointing": True},
    "adapters, and entropies": {"peft_config": LoraConfig(target_modules="all-linear"), "beta": 0.1, "method": "egpo"},
    "experts, with a loss that balances them": {**ACCUMULATED, "made": partial(made, "qwen3_moe", **EXPERTS)},
}


def trained(scratch: Path, folder: Path, share: bool | None, **changes: Any) -> list[dict[str, float]]:
    trainer = make_trainer(scratch, folder, **{"method": "grpo", "optim": "sgd", **changes}, share_prompts=share)
    with tokens_read(trainer.model) as read:
        trainer.train()
    return [*trainer.state.log_history, {"read": sum(read)}]


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_a_training_is_the_same_and_reads_fewer_tokens(scratch: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    *plain, before = trained(scratch, tmp_path / "plain", False, **changes)
    *found, after = trained(scratch, tmp_path / "shared", None, **changes)
    for one, other in zip(found, plain, strict=True):
        same = {name for name in one if "time" not in name and "per_second" not in name}
        assert {name: one[name] for name in same} == pytest.approx({name: other[name] for name in same}, abs=1e-4)
    assert after["read"] < 0.8 * before["read"]


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        (ACCUMULATED, 1),
        (IN_TWO_STEPS, 3),
        ({**ACCUMULATED, "loss_type": "bnpo"}, 3),
        ({**ACCUMULATED, "top_entropy_quantile": 0.5}, 3),
        ({**ACCUMULATED, **OFF_POLICY, "method": "clip_cov"}, 3),
        ({**ACCUMULATED, "share_prompts": False}, 3),
    ],
    ids=["one step", "two steps", "bnpo", "entropies compared", "in the loss", "not shared"],
)
def test_a_micro_batch_has_few_prompts_where_the_loss_does_not_compare_its_rows(
    scratch: Path, tmp_path: Path, changes: dict[str, Any], most: int
) -> None:
    trainer = make_trainer(scratch, tmp_path, **{"method": "grpo", "share_prompts": True, **changes})
    trainer.train()
    buffered: Any = trainer._buffered_inputs
    counts = [len(distinct(one["prompt_ids"], one["prompt_mask"])[0]) for one in buffered]
    assert max(counts) <= most and (most == 1 or max(counts) > 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"made": partial(made, "qwen2", attention_dropout=0.1), "disable_dropout": True}, "attention_dropout=0.1"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_policy_that_cannot_share_is_trained_bit_for_bit_as_without(
    scratch: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    *plain, _ = trained(scratch, tmp_path / "plain", False, **changes)
    assert said not in caplog.text
    *found, _ = trained(scratch, tmp_path / "shared", None, **changes)
    assert said in caplog.text
    with pytest.raises(ValueError, match=rf"share_prompts=True: .*{said}"):
        trained(scratch, tmp_path / "wanted", True, **changes)
    for one, other in zip(found[:-1], plain[:-1], strict=True):
        assert {k: v for k, v in one.items() if "time" not in k} == {k: v for k, v in other.items() if "time" not in k}
