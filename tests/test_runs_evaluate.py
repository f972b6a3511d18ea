"""Whole evaluations: what is in their tables, parts of an answer, resumption, and the command."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from record_builders import smoke

from gcpo import world
from gcpo.runs.evaluate import certainty, evaluation, scores
from gcpo.tasks import get_task
from gcpo.tasks.sampling import load_policy

# --- parts of an answer ---------------------------------------------------------------------------------------------

WORDS = ["<think>", " two", " and", " two", "</think>", " four", "<end>"]


def test_an_answer_begins_after_the_last_end_of_thought_and_a_part_without_tokens_has_no_number() -> None:
    """Each token's surprise is 1, 2, 4, ... nats, and the entropy it is drawn with ten times that."""
    ids = [[0, 1, 2, 3, 4, 5, 6], [1, 4, 5, 4, 5], [5, 6], [0, 1, 4]]
    surprise = (2.0 ** torch.arange(7)).expand(4, 7)
    mask = torch.tensor([[int(place < len(row)) for place in range(7)] for row in ids])
    found = certainty(-surprise, 10 * surprise, mask, ids, lambda some: "".join(WORDS[i] for i in some))
    nan = math.nan
    np.testing.assert_allclose(found["nll"], [127 / 7, 31 / 5, 3 / 2, 7 / 3])
    np.testing.assert_allclose(found["nll_thinking"], [31 / 5, 15 / 4, nan, 7 / 3])
    np.testing.assert_allclose(found["nll_answer"], [(32 + 64) / 2, 16, 3 / 2, nan])
    for part in ("", "_thinking", "_answer"):
        np.testing.assert_allclose(found[f"entropy{part}"], 10 * np.array(found[f"nll{part}"]))


def test_scores_are_means_over_questions_with_the_estimator_of_pass_at_k() -> None:
    right = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 0], "c": [1, 0, 0, 0]}
    lines = [("a", "greedy", 0, 1), ("b", "greedy", 0, 0), ("c", "greedy", 0, 0)]
    lines += [(query, "sampled", n, value) for query, values in right.items() for n, value in enumerate(values)]
    table = pd.DataFrame(lines, columns=["query", "decoding", "sample", "accuracy"])
    found = scores(table, ["accuracy"]).set_index("statistic")
    assert list(found.index) == ["greedy", "avg@4", "pass@2", "pass@4"]
    # Of 6 pairs, 1 of a's and 3 of c's have no right answer.
    np.testing.assert_allclose(found["value"], [1 / 3, 3 / 12, (5 / 6 + 0 + 3 / 6) / 3, 2 / 3])
    assert (found["low"] <= found["value"]).all() and (found["value"] <= found["high"]).all()
    greedy = table[table["decoding"] == "greedy"]
    assert list(scores(greedy, ["accuracy"])["statistic"]) == ["greedy"]


# --- runs -----------------------------------------------------------------------------------------------------------


def params(**changes: Any) -> Any:
    return smoke(**{"policy": "scratch", "eval_limit": 5, "eval_samples": 3, **changes})


def answers_of(run: Any) -> pd.DataFrame:
    return pd.read_csv(run.folder / "answers.csv")


@torch.no_grad()
def by_hand(policy: tuple[Any, Any], prompt: str, text_ids: list[int], heat: float) -> tuple[float, float]:
    """Mean surprise and mean entropy of a completion, from one forward pass of it alone."""
    model, tokens = policy
    chat = tokens.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    before = tokens.encode(chat, add_special_tokens=False)
    logits = model(torch.tensor([before + text_ids])).logits[0, len(before) - 1 : -1] / heat
    chances = torch.softmax(logits.double(), -1)
    own = chances[torch.arange(len(text_ids)), torch.tensor(text_ids)]
    return float(-own.log().mean()), float(-(chances * chances.log()).sum(-1).mean())


@pytest.mark.slow
def test_every_answer_has_a_line_and_its_numbers_are_those_of_a_pass_of_it_alone(outputs: Path) -> None:
    values = params(temperature=0.7)
    run = evaluation(values)
    table, texts = answers_of(run), pd.read_parquet(run.folder / "completions.parquet")
    assert run.finished and len(table) == 5 * (1 + 3)
    assert (texts[["query", "decoding", "sample"]] == table[["query", "decoding", "sample"]]).all(axis=None)
    task, policy = get_task("tinyqa"), load_policy(world.resolve("scratch", "policy"))
    rows = {row.id: row for row in task.load("test", limit=5).rows}
    cut = table[table["cut_off"]]
    assert len(cut) > 5 and (cut["tokens"] == values.max_completion_length).all()
    assert table["nll_thinking"].isna().all() and (table["nll_answer"] == table["nll"]).all()
    seen = 0
    for (_, line), text in zip(table.iterrows(), texts["completion"], strict=True):
        answer = task.extract(text)
        assert line["answered"] == (answer is not None)
        assert {name: line[name] for name in task.metrics} == task.score(answer, rows[line["query"]].references)
        ids = policy[1].encode(text, add_special_tokens=False)
        if len(ids) == line["tokens"] and line["cut_off"]:  # bytes that are no text do not come back as they were
            expected = by_hand(policy, rows[line["query"]].prompt, ids, 0.7)
            np.testing.assert_allclose(line[["nll", "entropy"]].astype(float), expected, rtol=1e-4)
            seen += 1
    assert seen > 0
    assert run.manifest["results"]["greedy_f1"] == table[table["decoding"] == "greedy"]["f1"].mean()
    assert evaluation(values).manifest["attempts"] == 1  # a finished run is only read


@pytest.mark.slow
def test_the_command_prints_the_scores_of_a_folder_s_policy(outputs: Path, call: Any) -> None:
    small = ["-p", "eval_limit", "3", "-p", "eval_samples", "2", "-p", "task", "tinymath"]
    said = call("evaluate", "-p", "policy", world.resolve("scratch", "policy"), *small).out
    assert {"avg@2", "pass@2", "accuracy"} <= {*said.split()} and "tinymath-evaluate-0-" in said
