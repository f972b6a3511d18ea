"""V(q) against an independent two-pass computation, and everything that must not change it."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import for_all, seeds
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcpo import gradients
from gcpo.gradients import GradientStats, gradient_gram, gradient_variance, variance_decomposition

VOCABULARY = 23
PROMPT, LENGTH = 3, 9

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
SIZE: dict[str, Any] = {**SIZES, **LAYERS}


def qwen2(tied: bool = False, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZE, tie_word_embeddings=tied, attention_dropout=dropout)
    return Qwen2ForCausalLM(config).to(dtype)


class Absolute(nn.Module):
    """A language model that feels absolute positions and records what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token, self.position = nn.Embedding(VOCABULARY, 6), nn.Embedding(32, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.unused = nn.Parameter(torch.ones(3))
        self.calls: list[SimpleNamespace] = []
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> SimpleNamespace:
        self.calls.append(SimpleNamespace(ids=input_ids, mask=attention_mask, positions=position_ids))
        state = (self.token(input_ids) + self.position(position_ids)) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=self.logits(input_ids, state.cumsum(1).tanh()))

    def logits(self, ids: Tensor, state: Tensor) -> Tensor:
        return self.head(state)


def rollouts(size: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """A prompt with completions of several lengths, padded on the right; all tokens are attended up to there."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (size, LENGTH), generator=rng)
    ids[:, :PROMPT] = ids[0, :PROMPT].clone()
    ends = torch.randint(PROMPT + 1, LENGTH + 1, (size, 1), generator=rng)
    column = torch.arange(LENGTH)
    attended = column < ends
    completion = attended & (column >= PROMPT)
    return {"input_ids": ids, "attention_mask": attended.long(), "completion_mask": completion.long()}


def advantages_of(size: int = 6) -> Tensor:
    return torch.linspace(-1.3, 1.7, size, dtype=torch.float64)


def padded(batch: dict[str, Tensor], left: int, right: int, token: int = 5) -> dict[str, Tensor]:
    values = {"input_ids": token, "attention_mask": 0, "completion_mask": 0}
    return {name: nn.functional.pad(x, (left, right), value=values[name]) for name, x in batch.items()}


def reference_gradients(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> np.ndarray:
    """One .backward() per row on the whole, padded row; the sum of log-probabilities is written out token by token."""
    model = copy.deepcopy(model).eval()
    gradients = []
    for ids, attended, completion in zip(*batch.values(), strict=True):
        model.zero_grad()
        positions = torch.arange(len(ids)).unsqueeze(0)
        output = model(input_ids=ids[None], attention_mask=attended[None], position_ids=positions)
        logits = output.logits[0] / temperature
        total = torch.zeros((), dtype=logits.dtype)
        for t in range(1, len(ids)):
            if completion[t]:
                total = total + logits[t - 1, ids[t]] - logits[t - 1].exp().sum().log()
        if completion.any():
            total.backward()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradients.append(torch.cat([g.flatten() for g in flat]).double().numpy())
    return np.array(gradients)


def score_gradients(model: nn.Module, params: Any = None, **batch: Tensor) -> Tensor:
    """The gradients of the module under test, a row each."""
    parameters = gradients.chosen_parameters(model, params)
    found = torch.zeros(len(batch["input_ids"]), sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    with gradients.dropout_off(model):
        for row, members in gradients.distinct_rows(**batch).items():
            found[members] = torch.cat([g.flatten() for g in gradients._score_gradient(model, row, parameters)])
    return found


def check(stats: GradientStats, gradients: np.ndarray, advantages: Tensor, rel: float = 1e-10) -> None:
    """Statistics of explicit gradients, in two passes: first the mean, then the deviations from it."""
    vectors = advantages.numpy()[:, None] * gradients
    mean = vectors.mean(0)
    assert stats.variance == pytest.approx(((vectors - mean) ** 2).sum(1).mean(), rel=rel)
    assert stats.squared_norms.numpy() == pytest.approx((vectors**2).sum(1), rel=rel)
    assert stats.mean_squared_norm == pytest.approx((mean**2).sum(), rel=rel)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq20_is_the_two_pass_variance_of_explicit_gradients(tied: bool, dtype: torch.dtype) -> None:
    model, batch, advantages = qwen2(tied, dtype), rollouts(), advantages_of()
    gradients = reference_gradients(model, batch)
    check(gradient_variance(model, **batch, advantages=advantages), gradients, advantages, rel=1e-5)
    explicit = score_gradients(model, **batch)
    torch.testing.assert_close(explicit.double(), torch.from_numpy(gradients), rtol=1e-4, atol=1e-5)


def test_logits_of_the_prompt_are_left_out_where_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert gradients._keeps(qwen2(), gpu) and not gradients._keeps(qwen2(), torch.device("cpu"))
    assert not gradients._keeps(Absolute(), gpu)  # whose forward pass cannot
    adapted = get_peft_model(qwen2(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert gradients._keeps(adapted, gpu)
    monkeypatch.setattr(gradients, "_keeps", lambda model, device: True)
    model, batch, advantages = qwen2(), rollouts(), advantages_of()
    batch["completion_mask"][0, PROMPT] = 0  # a tool's token
    expected = reference_gradients(model, batch)
    asked: list[int] = []
    model.lm_head.register_forward_hook(lambda module, given, found: asked.append(given[0].shape[1]))
    check(gradient_variance(model, **batch, advantages=advantages), expected, advantages)
    assert asked and max(asked) <= LENGTH - PROMPT + 1


def test_eq20_is_of_the_distribution_at_the_temperature_of_sampling() -> None:
    model, batch, advantages = qwen2(), rollouts(), advantages_of()
    stats = gradient_variance(model, **batch, advantages=advantages, temperature=0.7)
    check(stats, reference_gradients(model, batch, 0.7), advantages, rel=1e-9)


# --- padding, positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [qwen2, Absolute])
@pytest.mark.parametrize(("left", "right"), [(4, 0), (0, 3), (2, 5)])
def test_padding_on_either_side_changes_nothing(make: Callable[[], nn.Module], left: int, right: int) -> None:
    model, batch = make(), rollouts()
    expected = gradient_variance(model, **batch, advantages=advantages_of())
    stats = gradient_variance(model, **padded(batch, left, right), advantages=advantages_of())
    assert stats.variance == expected.variance > 0
    assert stats.squared_norms.tolist() == expected.squared_norms.tolist()


def test_a_gap_in_the_attention_mask_is_kept() -> None:
    model, batch = Absolute(), rollouts(1)
    batch["attention_mask"][0, 1] = 0
    score_gradients(model, **batch)
    assert model.calls[0].mask[0, :3].tolist() == [1, 0, 1]
    gradients = reference_gradients(model, batch)
    torch.testing.assert_close(score_gradients(model, **batch), torch.from_numpy(gradients))


# --- shared and idle rows -------------------------------------------------------------------------------------------


def test_equal_rows_share_one_pass_whatever_their_padding() -> None:
    batch = rollouts(3)
    doubled = {name: torch.cat([padded(batch, 2, 0)[name], padded(batch, 0, 2)[name]]) for name in batch}
    model, advantages = Absolute(), advantages_of(6)
    stats = gradient_variance(model, **doubled, advantages=advantages)
    assert len(model.calls) == 3
    gradients = np.tile(reference_gradients(model, batch), (2, 1))
    check(stats, gradients, advantages)


def test_rows_that_differ_only_in_their_completion_mask_are_distinct() -> None:
    model, batch = Absolute(), {name: x.repeat(2, 1) for name, x in rollouts(1).items()}
    batch["completion_mask"][1, PROMPT] = 0
    gradients = score_gradients(model, **batch)
    assert len(model.calls) == 2
    assert not torch.allclose(gradients[0], gradients[1])


def test_rows_without_advantage_or_completion_need_no_pass_and_count_as_zero_vectors() -> None:
    model, batch, advantages = Absolute(), rollouts(), advantages_of()
    advantages[1] = 0
    batch["completion_mask"][4] = 0
    stats = gradient_variance(model, **batch, advantages=advantages)
    assert len(model.calls) == 4
    check(stats, reference_gradients(model, batch), advantages)
    assert stats.squared_norms[[1, 4]].tolist() == [0, 0]


def test_a_small_variance_around_a_large_mean_keeps_its_digits() -> None:
    # Equal gradients with advantages 1e7 - 1 and 1e7 + 1: the variance is |g|^2, 14 digits below the mean square.
    model = Absolute()
    for p in (model.token.weight, model.position.weight):
        p.data.zero_()  # the gradient of the bias is then the same after any prompt
    same = {name: x.repeat(2, 1) for name, x in rollouts(1).items()}
    other_prompt = same["input_ids"].clone()
    other_prompt[1, 0] += 1
    for batch in (same, {**same, "input_ids": other_prompt}):
        bias = reference_gradients(model, batch)[:, -VOCABULARY:]
        assert bias[0] == pytest.approx(bias[1], abs=1e-15)
        model.calls.clear()
        stats = gradient_variance(model, **batch, advantages=[1e7 - 1, 1e7 + 1], params="head.bias")
        assert stats.variance == pytest.approx(float((bias[0] ** 2).sum()), rel=1e-7)
        assert len(model.calls) == (1 if batch is same else 2)


# --- the model is untouched -----------------------------------------------------------------------------------------


def test_dropout_is_off_and_every_mode_is_restored() -> None:
    model, batch = qwen2(dropout=0.5).train(), rollouts()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert any(before) and not all(before)
    stats = gradient_variance(model, **batch, advantages=advantages_of())
    assert [module.training for module in model.modules()] == before
    assert stats.variance == gradient_variance(model.eval(), **batch, advantages=advantages_of()).variance


def test_grad_fields_are_left_as_they_were_and_no_grad_is_no_obstacle() -> None:
    model, batch = qwen2(), rollouts()
    marked = model.lm_head.weight
    marked.grad = torch.full_like(marked, 3)
    expected = gradient_variance(model, **batch, advantages=advantages_of())
    with torch.no_grad():
        assert gradient_variance(model, **batch, advantages=advantages_of()).variance == expected.variance
        assert score_gradients(model, **batch).abs().sum() > 0
    assert (marked.grad == 3).all()
    assert all(p.grad is None for p in model.parameters() if p is not marked)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_gradients_that_exceed_a_limit_of_memory_are_refused_before_any_pass() -> None:
    model, batch, passes = qwen2(), padded(rollouts(), 2, 0), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(MemoryError, match=r"6 rows of up to 9 tokens: .* GB .* take 1e-06 GB \(memory_limit\)"):
        gradient_gram(model, **batch, memory_limit=1e3)
    assert not passes and gradient_gram(model, **batch, memory_limit=1e9).shape == (6, 6)


# --- choice of parameters -------------------------------------------------------------------------------------------


UP = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("params", "tied", "expected"),
    [
        ("model.norm.weight", False, ["model.norm.weight"]),
        ("norm.weight", False, ["model.norm.weight"]),
        ("up_proj.weight", False, UP),
        ("model.layers.*.mlp.up_proj.weight", False, UP),
        (["layers.1.mlp.up*"], False, UP[1:]),
        ((*UP, "up_proj.weight"), False, UP),  # each once
        (HEAD, False, [HEAD]),
        (HEAD, True, [TABLE]),  # one matrix
        ([HEAD, "embed_tokens.weight"], True, [TABLE]),
    ],
)
def test_params_takes_names_trailing_parts_and_globs(params: Any, tied: bool, expected: list[str]) -> None:
    model, batch = qwen2(tied), rollouts()
    own = dict(model.named_parameters())
    assert list(map(id, gradients.chosen_parameters(model, params))) == [id(own[name]) for name in expected]
    for name, p in own.items():
        p.requires_grad_(name in expected)
    plain, named = (gradient_variance(model, **batch, advantages=advantages_of(), params=of) for of in (None, params))
    assert plain.variance == named.variance > 0  # what requires no gradient has no part


def test_a_full_name_is_not_read_as_a_trailing_part() -> None:
    model = Absolute()
    model.block = nn.Module()
    model.block.unused = nn.Parameter(torch.ones(5))
    assert score_gradients(model, **rollouts(), params="unused").shape == (6, 3)
    assert score_gradients(model, **rollouts(), params="*unused").shape == (6, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"completion_mask": torch.ones(6, LENGTH - 1)}, r"completion_mask .*\(6, 8\)"),
        ({"completion_mask": torch.ones(6, LENGTH)}, "row 0: completion_mask has a token .* that nothing precedes"),
        ({"params": "haed.bias"}, "'haed.bias' fits no parameter that requires grad; nearest names: head.bias"),
        *(({"temperature": t}, f"temperature is {t}, expected that of sampling") for t in (0.0, float("inf"))),
    ],
)
def test_what_has_no_gradients_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradient_variance(Absolute(), **{**rollouts(), "advantages": advantages_of(), **changes})


# --- law of total variance ------------------------------------------------------------------------------------------


def random_groups(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    gradients = torch.randn(2, size, 4, generator=rng, dtype=torch.float64)
    clusters = torch.randint(-2, 2, (2, size), generator=rng) * 10
    weights = torch.rand(2, size, generator=rng, dtype=torch.float64) * (torch.rand(2, size, generator=rng) < 0.8)
    weights[:, 0] += 0.1
    return gradients, clusters, weights


@for_all(seed=seeds, size=st.integers(1, 10), weighted=st.booleans())
def test_eq2_eq3_intra_and_inter_add_up_to_the_total(seed: int, size: int, weighted: bool) -> None:
    gradients, clusters, weights = random_groups(seed, size)
    intra, inter = variance_decomposition(gradients, clusters, weights if weighted else None)
    for group in range(2):
        g, z = gradients[group].numpy(), clusters[group].numpy()
        p = weights[group].numpy() if weighted else np.ones(size)
        total = np.trace(np.atleast_2d(np.cov(g.T, aweights=p, ddof=0)))
        assert (intra + inter)[group].item() == pytest.approx(total, abs=1e-12)
        within = 0.0
        for k in np.unique(z[p > 0]):
            members = (z == k) & (p > 0)
            share = p[members].sum() / p.sum()
            within += share * np.trace(np.atleast_2d(np.cov(g[members].T, aweights=p[members], ddof=0)))
        assert intra[group].item() == pytest.approx(within, abs=1e-12)


@for_all(seed=seeds, size=st.integers(1, 8))
def test_eq4_inter_is_half_the_mean_squared_distance_of_singletons(seed: int, size: int) -> None:
    gradients, _, weights = random_groups(seed, size)
    intra, inter = variance_decomposition(gradients, torch.arange(size).expand(2, size), weights)
    p = (weights / weights.sum(-1, keepdim=True)).numpy()
    g = gradients.numpy()
    squared = ((g[:, :, None] - g[:, None]) ** 2).sum(-1)
    assert inter.numpy() == pytest.approx(0.5 * np.einsum("bi,bj,bij->b", p, p, squared), abs=1e-12)
    assert intra.numpy() == pytest.approx(np.zeros(2), abs=1e-12)
