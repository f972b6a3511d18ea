# ruff: noqa: F811 (fixtures of another module)
"""Answers by vLLM: a stand-in with its interface decodes request by request, and everything around it is ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from test_runs_evaluate import answers_of, params
from test_sampling import LONGEST, PROMPTS, ends, folder, greedy_by_hand, policy, prompt_ids  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcpo.errors import UserError
from gcpo.runs import evaluate as module
from gcpo.runs.evaluate import evaluation
from gcpo.runs.gradients import gradient_statistics
from gcpo.runs.plan import Plan
from gcpo.tasks import vllm as engine
from gcpo.tasks.sampling import generate, texts, token_statistics

ASKED: list[tuple[list[int], Any]] = []  # every request that a stand-in was sent


@dataclass
class SamplingParams:
    """Those of vLLM's settings that are used, with its defaults and its refusal."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: list[int] = field(default_factory=list)
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert self.temperature > 0 or self.n == 1, "n must be 1 when using greedy sampling"


class LLM:
    """Answers each request by itself, by forward passes over the whole of it."""

    def __init__(self, model: str, *, dtype: str, max_model_len: int, gpu_memory_utilization: float) -> None:
        self.weights = AutoModelForCausalLM.from_pretrained(model).float().eval()
        self.tokens, self.longest = AutoTokenizer.from_pretrained(model), max_model_len
        assert dtype == "bfloat16" and 0 < gpu_memory_utilization < 1

    @torch.no_grad()
    def generate(self, prompts: list[Any], sampling_params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        made = []
        for prompt, how in zip(prompts, sampling_params, strict=True):
            ids = list(prompt["prompt_token_ids"])
            ASKED.append((list(ids), how))
            start, draw = len(ids), torch.Generator().manual_seed(how.seed)
            while len(ids) - start < how.max_tokens and (len(ids) == start or ids[-1] not in how.stop_token_ids):
                logits = self.weights(torch.tensor([ids])).logits[0, -1]
                chances = (logits / how.temperature).softmax(-1) if how.temperature else None
                likeliest = int(logits.argmax())
                ids.append(likeliest if chances is None else int(torch.multinomial(chances, 1, generator=draw)))
            assert len(ids) <= self.longest
            made.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids[start:]))]))
        return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    ASKED.clear()


def by_vllm(policy: tuple[Any, Any]) -> Callable[..., Any]:
    longest = max(len(prompt_ids(policy[1], prompt)) for prompt in PROMPTS) + LONGEST
    return engine.by_vllm(*policy, longest=longest)


@pytest.mark.usefixtures("vllm")
def test_greedy_answers_and_their_masks_are_those_of_transformers(policy: tuple[Any, Any]) -> None:
    how: dict[str, Any] = {"n": 1, "temperature": 0.0, "max_new_tokens": LONGEST}
    found, expected = by_vllm(policy)(*policy, PROMPTS, **how), generate(*policy, PROMPTS, **how)
    assert len({len(prompt) for prompt, _ in ASKED}) > 1  # prompts of several lengths, sent without padding
    assert [prompt for prompt, _ in ASKED] == [prompt_ids(policy[1], prompt) for prompt in PROMPTS]
    width = found[0].shape[1]  # no wider than the longest answer
    for own, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(own, theirs[:, :width]) and not theirs[:, width:].any()
    assert torch.equal(found[0][found[1].bool()], expected[0][expected[1].bool()])


@pytest.mark.usefixtures("vllm")
def test_every_answer_is_a_request_whose_seed_torch_s_generator_draws(policy: tuple[Any, Any]) -> None:
    generates, how = by_vllm(policy), {"n": 5, "temperature": 0.8, "max_new_tokens": LONGEST}
    torch.manual_seed(3)
    ids, _, completion = generates(*policy, PROMPTS, **how)
    first = [(prompt, how.seed) for prompt, how in ASKED]
    assert len(first) == len({seed for _, seed in first}) == 5 * len(PROMPTS)
    assert [prompt for prompt, _ in first[::5]] == [prompt for prompt, _ in first[4::5]]  # neighbours
    assert all(how.temperature == 0.8 and how.stop_token_ids[:2] == ends(policy[1]) for _, how in ASKED)
    torch.manual_seed(3)
    again = generates(*policy, PROMPTS, **how)
    assert torch.equal(again[0], ids) and len({*texts(policy[1], ids, completion)}) > len(PROMPTS)


def test_statistics_without_what_pads_all_answers_are_the_same(
    policy: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = policy
    torch.manual_seed(1)
    made = generate(model, tokens, PROMPTS, n=3, temperature=1.0, max_new_tokens=LONGEST)
    whole = token_statistics(model, *made, 0.8)
    widths: list[int] = []
    seen = model.register_forward_pre_hook(
        lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr("gcpo.tasks.sampling.TOKENS", made[0].shape[1])  # one answer in a pass
    trimmed = token_statistics(model, *made, 0.8, trim=True)
    seen.remove()
    assert len({*widths}) > 2 and max(widths) <= made[0].shape[1]
    kept = whole[2].bool()
    assert torch.equal(trimmed[2], whole[2])
    for some, all_of_them in zip(trimmed[:2], whole[:2], strict=True):
        torch.testing.assert_close(some[kept], all_of_them[kept], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("numbers", [1, 50, 10**6])
def test_long_answers_are_measured_some_columns_at_a_time(
    policy: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    numbers: int,
) -> None:
    made = generate(*policy, PROMPTS, n=1, temperature=0.0, max_new_tokens=LONGEST)
    expected = token_statistics(policy[0], *made, 0.8)
    monkeypatch.setattr("gcpo.tasks.sampling.LOGITS", numbers)
    for some, whole in zip(token_statistics(policy[0], *made, 0.8), expected, strict=True):
        torch.testing.assert_close(some, whole)


def test_without_vllm_there_is_one_line_with_the_way_out(policy: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=r"^engine: vllm, .*pip install '.\[vllm\]'.*engine: transformers.*$"):
        by_vllm(policy)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_an_evaluation_has_the_same_questions_and_greedy_answers_and_draws_by_the_run_s_seed(outputs: Any) -> None:
    own, values = evaluation(params()), params(engine="vllm")
    assert Plan("evaluate", values).id != Plan("evaluate", params()).id
    made = evaluation(values)
    one, other = answers_of(own), answers_of(made)
    assert list(one.columns) == list(other.columns) and (one["query"].unique() == other["query"].unique()).all()
    greedy = [table[table["decoding"] == "greedy"].reset_index(drop=True) for table in (one, other)]
    pd.testing.assert_frame_equal(*greedy, rtol=1e-4, atol=1e-5)
    asked = len(ASKED)
    (made.folder / "manifest.json").unlink()
    pd.testing.assert_frame_equal(answers_of(evaluation(values)), other)
    assert len(ASKED) == 2 * asked == 2 * 5 * (1 + 3)


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_thirty_questions_are_asked_64_times_each_in_few_calls(outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 640)
    calls: list[int] = []
    answer = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *a, **k: calls.append(len(a[1])) or answer(*a, **k))
    run = evaluation(params(engine="vllm", eval_limit=30, eval_samples=64, max_completion_length=2))
    scores = pd.read_csv(run.folder / "scores.csv")
    assert {"avg@64", "pass@64"} <= set(scores["statistic"]) and len(answers_of(run)) == 30 * 65
    assert calls == [10, 640] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_gradient_statistics_are_of_the_answers_that_vllm_gave(outputs: Any) -> None:
    values = params(engine="vllm", group_size=4, eval_limit=3, max_completion_length=6, lora_rank=2)
    run = gradient_statistics(values)
    table = pd.read_csv(run.folder / "queries.csv")
    assert len(table) == 3 and len(ASKED) == 12 and table["V"].notna().all()
    assert table["mean_tokens"].between(1, 6).all()
