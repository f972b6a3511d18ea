"""Rules with advantages of their own, on groups small enough to compute by hand."""

from __future__ import annotations

import math
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from papers import Group, features

from gcpo.methods import METHODS, advantages, get_method, weights
from gcpo.rollouts import Rollouts
from gcpo.trainer.collect import logit_pass

NAN = math.nan


def found(method: str, *groups: Group, **options: Any) -> list[Any]:
    return advantages(method, Rollouts(**features(*groups)), **options).tolist()


# --- NSR and W-REINFORCE --------------------------------------------------------------------------------------------


def test_nsr_and_w_reinforce_have_no_baseline() -> None:
    """A reward of 1 is not above the middle of 0 to 2: wrong."""
    mixed, wrong, right = (Group(rewards=rewards) for rewards in ([2, 0, 1, 1.5], [0, 0.5, 1, 0], [2, 2, 1.2, 2]))
    assert found("nsr", mixed, wrong, right) == [[0, -1, -1, 0], [-1] * 4, [0] * 4]
    expected = [[0.1, -1, -1, 0.1], [-1] * 4, [0.1] * 4]
    assert found("w_reinforce", mixed, wrong, right) == [pytest.approx(row) for row in expected]
    assert found("nsr", mixed, positive=1.0) == [[1, -1, -1, 1]]  # plain REINFORCE


def test_a_response_without_reward_or_known_correctness_is_not_reinforced() -> None:
    assert found("nsr", Group(rewards=[0, NAN, 0, 2], correctness=[0.0, 0.0, NAN, 1.0])) == [[-1, 0, 0, 0]]


# --- GTPO -----------------------------------------------------------------------------------------------------------

# At the first place the right ones have entropies 3 and 1, which is 3/4 and 1/4 of their sum, times 2; at the second
# place only the first has a token. Of the wrong ones the inverses count: 1/4 and 1 are 1/5 and 4/5, times 2.
FOUR = Group(rewards=[2, 2, 0, 0], entropies=[[3, 2], [1], [4, 1], [1, 4]])
SHAPED = [[1.15, 1.1], [1.05], [-1.04, -1.16], [-1.16, -1.04]]


def test_gtpo_eq3_and_eq5_normalised_over_the_tokens_of_the_group() -> None:
    every = [r for row in SHAPED for r in row]
    middle, spread = sum(every) / 7, stdev(every) + 1e-4
    expected = [[(r - middle) / spread for r in row] for row in SHAPED]
    expected[1].append(0.0)  # where the second has no token
    assert found("gtpo", FOUR) == [[pytest.approx(row) for row in expected]]


def test_gtpo_without_its_bonus_is_grpos_advantage_over_tokens() -> None:
    """Three tokens of +1 and four of -1: the mean is -1/7."""
    spread = stdev([1, 1, 1, -1, -1, -1, -1]) + 1e-4
    (first, *_, last) = found("gtpo", FOUR, bonus=0.0)[0]
    assert first == pytest.approx([8 / 7 / spread] * 2) and last == pytest.approx([-6 / 7 / spread] * 2)


def test_gtpo_certain_tokens_share_the_bonus_and_groups_without_variance_have_none() -> None:
    certain = Group(rewards=[2, 2, 0, 0], entropies=[[0, 0]] * 4)  # all shares are equal: +-1.1
    assert found("gtpo", certain) == [[pytest.approx([x, x], rel=1e-3) for x in (0.9354, 0.9354, -0.9354, -0.9354)]]
    assert found("gtpo", Group(rewards=[0, 0], entropies=[[1, 2], [3, 4]])) == [[[0, 0], [0, 0]]]


# --- UCAS -----------------------------------------------------------------------------------------------------------


def test_ucas_in_two_stages() -> None:
    """Certainties sum to 6 and 2: z is +-1/sqrt(2). Logits from 1 to 9 are 0, 1/2, 1 and 1/4 of the way."""
    group = Group(rewards=[2, 0], certainties=[[4, 2], [1, 1]], token_logits=[[1, 5], [9, 3]])
    a, z = 1 / (math.sqrt(2) + 1e-4), 1 / math.sqrt(2)
    up, down = a * math.exp(-0.25 * z), -a * math.exp(-0.35 * z)
    expected = [[up, up - 0.025], [down - 0.05, down - 0.0125]]
    assert found("ucas", group) == [[pytest.approx(row, rel=1e-5) for row in expected]]


def test_ucas_never_turns_a_response_that_does_better_around() -> None:
    """The penalty of 3 takes the right one to 0 and no further; without z, and without variance, it is all there is."""
    group = Group(rewards=[2, 0], certainties=[[1], [1]], token_logits=[[9], [1]])
    ((up,), (down,)) = found("ucas", group, penalty=3.0)[0]
    assert up == 0 and down == pytest.approx(-1 / (math.sqrt(2) + 1e-4))
    equal = Group(rewards=[2, 2], certainties=[[1], [3]], token_logits=[[9], [1]])
    assert found("ucas", equal) == [[pytest.approx([-0.05], rel=1e-5), [0]]]
    alike = Group(rewards=[2, 2], certainties=[[1], [3]], token_logits=[[4], [4]])
    assert found("ucas", alike) == [[[pytest.approx(-0.025)], [pytest.approx(-0.025)]]]  # logits that are equal are 1/2


# --- rules and weights together -------------------------------------------------------------------------------------


def test_a_rule_by_token_is_weighed_by_response_and_by_token() -> None:
    group = Group(**vars(FOUR), embeddings=[[1, 0], [0, 1], [1, 0], [0, 1]], logps=[[-1, -2], [-1], [-3, -1], [-1, -1]])
    rollouts = Rollouts(**features(group))
    own = torch.tensor(found("gtpo", group))
    product = advantages("gtpo*cd_only", rollouts)
    torch.testing.assert_close(product, own * weights("cd_only", rollouts).unsqueeze(-1).float(), check_dtype=False)
    assert METHODS["gtpo"].granularity == "token" and METHODS["nsr"].granularity == "response"


@pytest.mark.parametrize("product", ["nsr*ucas", "nsr*egpo", "egpo*gtpo", "nsr*dapo"])
def test_two_rules_for_one_advantage_are_refused(product: str) -> None:
    with pytest.raises(ValueError, match=r"each in its own way|different base advantages|that \w+ reinforces"):
        get_method(product)


def test_the_pass_for_ucas_reads_certainties_at_the_temperature_and_logits_before_it() -> None:
    """At temperature 2, logits (2 log 2, 0) have certainty log(2 + 1) - log(2) / 2; equal ones have log 2."""
    high = 2 * math.log(2)
    table = torch.tensor([[high, 0.0], [5.0, 5.0]])  # after token 0 and after token 1

    def model(input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        return SimpleNamespace(logits=table[input_ids][:, -logits_to_keep:])

    ids = {
        "prompt_ids": torch.tensor([[1, 0], [0, 1], [0, 0]]),
        "completion_ids": torch.tensor([[0, 1], [1, 0], [1, 1]]),
    }
    output = ids | {"prompt_mask": torch.ones(3, 2), "completion_mask": torch.ones(3, 2)}
    certainties, logits = logit_pass(model, output, at_once=2, temperature=2.0)
    sure, torn = math.log(3) - math.log(2) / 2, math.log(2)
    assert certainties.tolist() == [pytest.approx(row) for row in ([sure, sure], [torn, torn], [sure, torn])]
    assert logits.tolist() == [pytest.approx(row) for row in ([high, 0], [5, 5], [0, 5])]
