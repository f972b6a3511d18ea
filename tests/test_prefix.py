"""Shared prompts against the pass that reads every prompt anew: the same numbers, from fewer tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ACCUMULATED, OFF_POLICY, SPLIT, dataset, for_all, make_trainer, reward, seeds, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from gcpo import GCPOConfig, GCPOTrainer
from gcpo.tasks.sampling import load_policy
from gcpo.trainer.prefix import beside, distinct, obstacle, shared

VOCABULARY, PAD = 61, 0
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=1),
    "qwen2, tied": Qwen2Config(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=None),
    "mistral, with a window": MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=4),
    "gemma 3, with a window in most layers": Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=5,
        sliding_window_pattern=3,
    ),
    "phi": PhiConfig(**SHAPE),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "cohere, which scales its logits": CohereConfig(**SHAPE, num_key_value_heads=1, logit_scale=0.3),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def policy(name: str = "qwen2", **fused: Any) -> Any:
    """A policy of random weights with TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head  # since 1.16; passes of older ones are compared in trainings

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]).train()
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"), **fused)
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


def causal(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def check_equal(model: Any, ids: Tensor, mask: Tensor, width: int, tolerance: float = 2e-5) -> None:
    """Compare log-probabilities, entropies and gradients of the two passes."""
    found = []
    for context in (contextlib.nullcontext(), shared(causal(model), width)):
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


@pytest.mark.parametrize("name", ARCHITECTURES)
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
def test_groups_of_any_size_cut_anywhere(
    seed: int, prompts: int, size: int, width: int, length: int, start: int
) -> None:
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


def test_rows_without_a_common_prompt() -> None:
    check_equal(policy(), *batch(size=1), width=7)


def test_positions_given_for_each_row_are_those_of_its_own_prompt() -> None:
    model, (ids, mask) = policy(), batch()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 6}
    plain = model(**given).logits
    with shared(model, 7):
        found = model(**given).logits
    seen = mask[:, 6:].bool()  # what padding computes, nobody reads
    torch.testing.assert_close(found[seen], plain[seen], rtol=2e-5, atol=2e-5)


def test_samples_are_the_same_and_prompts_are_read_once() -> None:
    model, (ids, mask) = policy().eval(), batch()
    drawn = []
    for context in (contextlib.nullcontext(), shared(model)):
        torch.manual_seed(1)
        with context, tokens_read(model) as read:
            drawn.append(model.generate(ids[:, :7], attention_mask=mask[:, :7], max_new_tokens=4, do_sample=True))
        assert drawn[0].shape[1] > 9
    assert torch.equal(*drawn)
    assert read[:2] == [3 * 7, 12]


def test_adapters() -> None:
    torch.manual_seed(0)
    model = get_peft_model(policy(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    check_equal(model, *batch(), width=7)


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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), "decoder of text alone"),
        (Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=8), "no way to replace its attention"),
        (MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4), "attention"),
        (Qwen2Config(**SHAPE, num_key_value_heads=1, attn_implementation="eager"), '"sdpa"'),
        (Qwen2Config(**SHAPE, num_key_value_heads=1, attention_dropout=0.1), "dropout"),
        (PhiConfig(**SHAPE, resid_pdrop=0.1), "dropout"),
    ],
    ids=["encoder", "soft-capped attention", "no attention", "eager", "dropout of attention", "dropout of a layer"],
)
def test_what_cannot_share_prompts_says_why(config: PreTrainedConfig, said: str) -> None:
    make = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    assert said in str(obstacle(make.from_config(config)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_usual_decoders_have_no_obstacle(name: str) -> None:
    assert obstacle(AutoModelForCausalLM.from_config(ARCHITECTURES[name])) is None


# --- in the trainer -------------------------------------------------------------------------------------------------

IN_TWO_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gcpo_bot, which reads meanings": {"method": "gcpo_bot"},
    "egpo, which reads entropies": {"method": "egpo"},
    "clip_cov, in the loss": {"method": "clip_cov"},
    "a reference": {"beta": 0.1},
    "off-policy, in parts": {**OFF_POLICY, **SPLIT},
    "accumulated": ACCUMULATED,
    "accumulated, in two steps": IN_TWO_STEPS,
    "gradient checkpointing": {"gradient_checkpointing": True},
    "adapters": {"peft_config": LoraConfig(target_modules="all-linear"), "beta": 0.1},
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
    assert after["read"] < 0.7 * before["read"]


@for_all(seed=seeds, count=st.sampled_from([1, 2, 3, 6]))
def test_rows_of_one_prompt_are_put_beside_each_other(seed: int, count: int) -> None:
    ids, mask = batch(seed)
    rows = {"prompt_ids": ids[:, :7], "prompt_mask": mask[:, :7], "completion_ids": ids[:, 7:], "row": torch.arange(12)}
    given = [
        {**{k: v[i::count] for k, v in rows.items()}, "count": torch.tensor(5), "none": None} for i in range(count)
    ]
    found = beside(given, count)
    assert len(found) == count and all(one["count"] == 5 and one["none"] is None for one in found)
    order = torch.cat([one["row"] for one in found])
    assert order.sort().values.equal(rows["row"])
    for name, values in rows.items():
        assert torch.cat([one[name] for one in found]).equal(values[order])
    place = distinct(rows["prompt_ids"], rows["prompt_mask"])[1][order]
    assert count == 1 or len(place.unique_consecutive()) == len(place.unique())


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


def test_thirty_steps_of_adam_have_the_same_rewards(scratch: Path, tmp_path: Path) -> None:
    runs = [
        trained(scratch, tmp_path / str(share), share, method="gcpo_bot", optim="adamw_torch", max_steps=30)
        for share in (False, True)
    ]
    rewards = [[entry["reward"] for entry in run if "reward" in entry] for run in runs]
    assert rewards[0] == rewards[1] and len({*rewards[0]}) > 5


def test_a_model_that_cannot_share_prompts_is_trained_as_before(
    scratch: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"share_prompts=True: .* as its attention is \"eager\""):
        trainer_of(scratch, tmp_path, True)
    trainer = trainer_of(scratch, tmp_path, None)
    assert "prompts are not shared" in caplog.text
    trainer.train()


def trainer_of(scratch: Path, folder: Path, share: bool | None) -> Any:
    model, tokens = load_policy(str(scratch))
    model.set_attn_implementation("eager")
    args = GCPOConfig(method="grpo", **settings(folder, share_prompts=share))
    return GCPOTrainer(model, reward, args, train_dataset=dataset(), processing_class=tokens)
