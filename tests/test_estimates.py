"""Estimates of memory, tokens and time: against torch's own counts, and against what runs took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gcpo import records
from gcpo.cli import main
from gcpo.runs import preflight
from gcpo.runs.estimates import KNOWN, Estimate, policy
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.profiles import load_profile
from gcpo.tasks import GENERATED, TASKS
from gcpo.tasks.sampling import load_policy


def plan(profile: str = "paper", kind: str = "train", **changes: Any) -> Plan:
    return Plan(kind, validate({**load_profile(profile), **changes}))


def estimate(profile: str = "paper", kind: str = "train", gpu: float = 80.0, **changes: Any) -> Estimate:
    return Estimate(plan(profile, kind, **changes), gpu)


def test_the_weights_of_the_papers_policies_are_those_of_their_cards() -> None:
    counts = {name.partition("/")[2]: policy(name)[1] for name in KNOWN.policies}
    assert counts["Qwen2.5-0.5B-Instruct"] == 494_032_768 and counts["Qwen2.5-1.5B-Instruct"] == 1_543_714_304
    assert {name: f"{count / 1e9:.2f}B" for name, count in counts.items()} == {
        "Qwen2.5-0.5B-Instruct": "0.49B",
        "Qwen2.5-1.5B-Instruct": "1.54B",
        "Qwen2.5-Math-1.5B": "1.54B",
        "DeepSeek-R1-Distill-Qwen-1.5B": "1.78B",
        "Qwen2.5-3B-Instruct": "3.09B",
        "Qwen2.5-Math-7B": "7.62B",
        "Qwen2.5-Math-7B-Instruct": "7.62B",
        "DeepSeek-R1-Distill-Qwen-7B": "7.62B",
        "Llama-3.2-1B-Instruct": "1.24B",
    }


def test_weights_gradients_and_states_are_what_torch_has(scratch: Any) -> None:
    model, _ = load_policy(str(scratch))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    found = estimate(policy=str(scratch)).memory
    assert found["weights"] == found["reference"] == sum(p.nbytes for p in model.parameters())
    states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert found["optimizer"] == sum(tensor.nbytes for tensor in [*states, *(p.grad for p in model.parameters())])
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found = estimate(policy=str(scratch), lora_rank=8).memory
    assert found["optimizer"] == 3 * adapters and found["reference"] == 0
    assert found["weights"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("smaller", "part"),
    [
        ({"micro_batch": 4}, "backward"),
        ({"max_completion_length": 32}, "generation"),
        ({"beta": 0}, "reference"),
        ({"dtype": "bfloat16"}, "weights"),
        ({"lora_rank": 32}, "optimizer"),
        ({"prompts_per_step": 4}, "generation"),
    ],
)
def test_each_setting_that_saves_memory_does(smaller: dict[str, Any], part: str) -> None:
    less, more = estimate(**smaller), estimate()
    assert less.memory[part] < more.memory[part] and less.peak <= more.peak


def test_processes_share_time_and_only_where_they_shard_memory() -> None:
    one, copies = estimate(), estimate(processes=8)
    zero, fsdp = (estimate(processes=8, accelerate=name) for name in ("zero3", "fsdp"))
    assert copies.memory["optimizer"] == one.memory["optimizer"] == 8 * zero.memory["optimizer"]
    assert zero.memory["weights"] == fsdp.memory["weights"] == one.memory["weights"] / 8
    whole = one.memory["weights"]  # which TRL puts together to generate where DeepSpeed has shared it out
    assert zero.memory["generation"] == pytest.approx(one.memory["generation"] / 8 + whole)
    assert fsdp.memory["generation"] == copies.memory["generation"] == one.memory["generation"] / 8
    assert copies.seconds["train"] == one.seconds["train"] / 8
    assert one.hours < copies.hours < 8 * one.hours  # all are paid for while each token of generation takes its time
    assert fsdp.peak < copies.peak == one.peak  # both of a backward pass of micro_batch completions


def test_checkpointing_takes_less_memory_and_more_time() -> None:
    less, more = (estimate(grpo={"bf16": True, "gradient_checkpointing": on}) for on in (True, False))
    assert less.memory["backward"] < more.memory["backward"] / 5
    assert less.seconds["train"] > more.seconds["train"]


def test_training_alone_computes_in_another_type_than_the_weights() -> None:
    def seconds(bf16: bool, **values: Any) -> dict[str, float]:
        return estimate(grpo={"bf16": bf16, "gradient_checkpointing": False}, **values).seconds

    rounded, exact = seconds(True), seconds(False)
    assert rounded["train"] == pytest.approx(exact["train"] * 67 / 989)
    assert rounded["evaluate"] == exact["evaluate"]
    assert seconds(True, kind="gradients") == seconds(False, kind="gradients")


def test_vllm_keeps_its_share_of_the_gpu_in_place_of_a_cache() -> None:
    fields = {"bf16": True, "gradient_checkpointing": True, "use_vllm": True}
    own, beside = (estimate(grpo={**fields, "vllm_mode": mode}) for mode in ("server", "colocate"))
    assert own.memory["generation"] == own.memory["vllm"] == 0 and beside.peak == own.peak + 0.3 * 80e9
    assert "vllm 72.0" in str(estimate(grpo={**fields, "vllm_gpu_memory_utilization": 0.9}).misfit())


def test_vllm_answers_hundreds_of_questions_in_the_steps_of_one() -> None:
    # DeepSeek-R1-Distill, 500 questions of MATH-500, one greedy and eight sampled answers of up to 16,384 tokens: 4,500
    # answers in 18 waves of 256, each 16,384 steps of 15 ms. By transformers 16,384 steps of 30 ms for each batch.
    asked: dict[str, Any] = {"kind": "evaluate", "task": "math", "eval_samples": 8, "max_completion_length": 16384}
    own, theirs = (estimate("paper_egpo", engine=name, **asked) for name in ("vllm", "transformers"))
    once = own.answers * 2 * (own.weights + 28 * 1536 * own.context) * own.context / (0.35 * 67e12)  # each measured
    assert own.seconds["evaluate"] == pytest.approx(18 * 16384 * 0.015 + once)
    assert theirs.seconds["evaluate"] > 5 * own.seconds["evaluate"]
    assert own.memory["vllm"] == 0.5 * 80e9 and own.memory["generation"] == 0


def test_the_entailment_model_reads_every_ordered_pair_of_a_group() -> None:
    # MATH: 2,000 steps of 8 groups of 16, two solutions of up to 1,024 tokens each, of which it reads 512. A token
    # takes two operations for each of 303M weights, and in 24 layers of 1,024 four for each of 512; 35 % of 989e12.
    pairs, tokens = 2000 * 8 * 16 * 15, 512
    hours = pairs * tokens * (2 * 303e6 + 4 * 24 * 1024 * 512) / (0.35 * 989e12) / 3600
    assert hours == pytest.approx(1.03, abs=0.01)
    found = estimate(task="math")
    assert found.seconds["judge"] == pytest.approx(3600 * hours) and found.memory["judges"] > 0
    assert found.hours == pytest.approx(sum(found.seconds.values()) / 3600)
    # NarrativeQA: two answers of up to 64 tokens. Statistics: one group for each of 1,000 questions.
    short = estimate().seconds["judge"]
    assert short == pytest.approx(pairs * 128 * (2 * 303e6 + 4 * 24 * 1024 * 128) / (0.35 * 989e12))
    asked = estimate(kind="gradients", eval_limit=1000).seconds["judge"]
    assert asked == pytest.approx(short * 1000 / (2000 * 8))
    without = estimate(task="math", method="grpo")
    assert without.seconds["judge"] == without.memory["judges"] == estimate(kind="evaluate").seconds["judge"] == 0


def test_a_measured_training_has_generated_no_more_than_is_estimated() -> None:
    made = plan("laptop", task="tinymath", method="grpo")
    runs = records.find("laptop", reference=True)
    metrics = records.gather(runs[runs["id"] == made.id], "metrics", ["id"])
    completions, group = 64 * 4 * 16, 4 * 16
    asked = (300 + 5 * 64) * (1 + 4)  # of the test and validation splits, greedily and four times
    # An answer has 40 tokens at most; a question is taken to have 192 bytes, four a token.
    assert len(metrics) == 64 and Estimate(made).tokens == (48 + 40) * (completions + asked)
    assert 10 * completions < group * metrics["completions/mean_length"].sum() < 40 * completions


def test_the_papers_profiles_fit_the_gpus_they_are_for() -> None:
    for task in ("narrativeqa", "qasper", "hotpotqa", "math", "olympiadbench"):
        assert estimate(task=task).misfit() is None and estimate("single_gpu", task=task, gpu=24).misfit() is None
    assert "GB of 24 (weights 6.2" in str(estimate(gpu=24).misfit())
    assert set(KNOWN.benchmarks) <= set(TASKS) - set(GENERATED)


def test_a_gradient_of_each_answer_is_held() -> None:
    whole, part = (estimate(kind="gradients", gradient_parameters=some) for some in (None, ["*.27.*"]))
    assert whole.memory["gradients"] > 16 * whole.memory["weights"] > 80e9  # one of each answer, G = 16, by all weights
    assert part.memory["gradients"] < whole.memory["gradients"] / 28


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_says_what_a_grid_takes_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "paper_figure1", "--profile", "paper"]) == 0
    said = capsys.readouterr().out
    assert "estimated, not measured, for a GPU of 80 GB as fast as an H100" in said
    header, *rows = [line.split() for line in said.splitlines()[3:9]]
    assert "  GPU-hours by GPU: H100 " in said and "RTX 4090 too small" in said
    assert header == ["task", "runs", "GPU", "disk", "checkpoints", "tokens", "GPU-hours"]
    runs, hours = ([int(row[place]) for row in rows] for place in (1, 6))
    assert [row[0] for row in rows] == ["narrativeqa", "qasper", "math", "olympiadbench", "all"]
    assert runs == [3, 3, 3, 3, 12]
    assert abs(sum(hours[:4]) - hours[4]) <= 2  # rounded
    assert main(["check", "paper_figure1", "--profile", "paper", "--gpu-memory", "8"]) == 1
    misfits = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DOES NOT FIT")]
    assert len(misfits) == 4 and "DOES NOT FIT: qasper-gradients-0-" in misfits[1]  # the largest of each task
    assert main(["check", "--profile", "papr"]) == 2


@pytest.mark.parametrize("size", ["0", "-3", "nan", "inf"])
def test_check_asks_for_a_gpu_that_there_can_be(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "paper_figure1", "--profile", "paper", "--gpu-memory", size]) == 2
    assert f"--gpu-memory {size}: give the GB of a GPU, a number above 0" in capsys.readouterr().err


def test_check_knows_the_gpu_of_a_profile_and_what_adapters_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "paper_table1", "--profile", "single_gpu"]) == 1
    said = capsys.readouterr().out
    assert "for a GPU of 24 GB as fast as an RTX 4090" in said and "DOES NOT FIT" not in said
    (why,) = (line for line in said.splitlines() if line.startswith("TRL refuses"))
    assert why.startswith("TRL refuses narrativeqa-care-0-") and why.endswith("there is none: set lora_rank: 0")


def test_a_policy_of_unknown_size_is_an_error_that_says_so() -> None:
    with pytest.raises(
        OSError, match=r"policy model 'no/such' \(a Hub name, as no such path exists\) cannot be loaded"
    ):
        estimate(policy="no/such")


def test_what_trl_refuses_is_said_before_anything_runs() -> None:
    assert preflight.refused([plan(), plan("single_gpu", task="math")]) == []
    (said,) = preflight.refused([plan(grpo={"steps_per_generation": 2, "generation_batch_size": 64})] * 2)
    assert said.startswith("TRL refuses narrativeqa-gcpo_bot-0-") and "generation_batch_size" in said
