"""Prompts and rewards in a paper's own words: the same in training as in evaluation, and ends that a template names."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gcpo.rewards import keeps_format
from gcpo.runs.evaluate import ask
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan
from gcpo.runs.policies import starting_policy
from gcpo.runs.profiles import ParameterError
from gcpo.runs.train import build_trainer, format_reward
from gcpo.tasks import get_task
from gcpo.tasks.base import Row, math_row
from gcpo.tasks.sampling import check_lengths, ends, load_policy

ROW = math_row("a", " 1 + 1 ? ", "2")
# Ends a turn with a token that ends no text of the policy, and says so if it is told to think.
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|sep|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def base_model(scratch: Path, tmp_path: Path) -> str:
    shutil.copytree(scratch, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    return str(tmp_path / "base")


def test_a_template_puts_the_parts_of_a_question_into_other_words() -> None:
    asked = ROW.asked(r"Q: {problem} Use \boxed{x}, as in {{1}}.", "Be brief.")
    assert asked.prompt == r"Q: 1 + 1 ? Use \boxed{x}, as in {{1}}."
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert ROW.asked("{prompt} /think", None).prompt == f"{ROW.prompt} /think"
    assert ROW.asked(None, None) == ROW and ROW.messages == [{"role": "user", "content": ROW.prompt}]


def test_a_template_that_asks_for_what_a_question_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"questions of this task have no \{context\}, only \{problem\}, \{prompt\}"):
        ROW.asked("{context} {problem}", None)
    with pytest.raises(ParameterError, match=r"prompt_template: .*Answer in"):
        validate({"prompt_template": r"Answer in \boxed{x}"})
    with pytest.raises(ParameterError, match="'chat_template_kwargs' is set by the parameter"):
        validate({"grpo": {"chat_template_kwargs": {"thinking": True}}})


def plan(**changes: Any) -> Plan:
    few = {"max_completion_length": 4, "policy": "scratch", "entailment": "tiny", "method": "grpo"}
    return Plan("train", validate({**few, **changes}))


def test_training_and_evaluation_read_the_same_words(base_model: str, tmp_path: Path) -> None:
    own = {"system_prompt": "Be brief.", "prompt_template": "Say: {prompt}", "chat_template_kwargs": {"thinking": True}}
    made = plan(policy=base_model, **own)
    model, tokens = starting_policy(made)
    rows = made.load("train", 1).rows
    trainer = build_trainer(made, model, tokens, rows, tmp_path / "run")
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * made.params.group_size)
    trained_on = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]
    sampled = ask(made, model, tokens, rows, 1, 1.0)
    prompt = (sampled.attention - sampled.completion).bool()[0]
    assert trained_on.tolist() == sampled.ids[0][prompt].tolist()
    question = get_task("tinyqa").load("train", limit=1).rows[0].prompt
    expected = f"<|system|>Be brief.<|sep|>\n<|user|>Say: {question}<|sep|>\n<|assistant|><think>"
    assert tokens.decode(trained_on) == expected


def test_an_answer_ends_where_the_template_ends_a_turn(base_model: str, scratch: Path, tmp_path: Path) -> None:
    model, tokens = load_policy(base_model)
    end, turn = tokens.convert_tokens_to_ids(["<|end|>", "<|sep|>"])
    assert tokens.eos_token_id == end and set(ends(model, tokens)) == {end, turn}
    made = plan(policy=base_model)
    trainer = build_trainer(made, model, tokens, made.load("train", 2).rows, tmp_path / "run")
    assert set(trainer.generation_config.eos_token_id) == {end, turn}
    assert set(ends(*load_policy(str(scratch)))) == {end}  # whose template ends turns as its texts end


def test_vllm_is_told_where_to_end(base_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(*given: Any, **_: Any) -> Any:
        return SimpleNamespace(args=given[2], remove_callback=id)

    monkeypatch.setattr("gcpo.runs.train.GCPOTrainer", trainer)
    made = plan(policy=base_model, grpo={"use_vllm": True, "generation_kwargs": {"stop": ["x"]}})
    model, tokens = load_policy(base_model)
    args = build_trainer(made, model, tokens, made.load("train", 2).rows, tmp_path).args
    assert args.generation_kwargs == {"stop_token_ids": ends(model, tokens), "stop": ["x"]}


def test_what_a_template_does_not_read_is_refused(base_model: str) -> None:
    with pytest.raises(ValueError, match=r"template reads no 'enable_thinking'\. Leave it out of chat_template_kwargs"):
        load_policy(base_model, template={"enable_thinking": False})
    Path(base_model, "chat_template.jinja").write_text("<|user|>{{ messages[-1]['content'] }}<|assistant|>")
    model, tokens = load_policy(base_model)
    with pytest.raises(ValueError, match=r"leaves the system's message out\. Put it into prompt_template"):
        check_lengths(model, tokens, [Row("a", "b", ("c",), system="Be brief.")], 4)


# --- the reward of a format -----------------------------------------------------------------------------------------

COMPLETIONS = {
    "<think>a</think>b": (True, False),
    "a</think> b": (True, False),  # the chat template has written the opening tag
    "\n<think>a</think>\n<answer>b</answer>\n": (True, True),
    "a</think><answer>b</answer>": (True, True),
    "a</think><answer>b</answer> c": (True, False),
    "a</think><answer>b</answer><answer>c</answer>": (True, False),
    "<answer>b</answer>": (False, False),
    "<think>a": (False, False),
    "a<think>b</think>": (False, False),
    "<think>a</think>b</think>": (False, False),
    "<think><think>a</think>": (False, False),
    "": (False, False),
}


@pytest.mark.parametrize(("completion", "expected"), COMPLETIONS.items())
def test_tags_are_properly_matched_or_not(completion: str, expected: tuple[bool, bool]) -> None:
    assert (keeps_format(completion, "think"), keeps_format(completion, "think_answer")) == expected
    (given,) = format_reward(get_task("math"), "think")([completion])
    assert given == 2 * expected[0]


def test_a_format_counts_beside_the_answer_and_says_nothing_of_its_correctness(tmp_path: Path) -> None:
    made = plan(method="egpo", format_reward="think", format_weight=0.5, reward="binary")
    trainer = build_trainer(made, *starting_policy(made), made.load("train", 2).rows, tmp_path)
    scores = trainer.collector.scores
    assert scores.names == ["tinyqa_accuracy", "format_think"] and scores.range == (0, 3)
    rewards, correctness = scores(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    assert rewards.tolist() == [2, 1] and correctness is not None and correctness.tolist() == [1, 0]
    assert plan().id == plan(format_weight=1.0).id != plan(format_reward="think").id
