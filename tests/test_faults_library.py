"""Bad input to the library: an error that names what is wrong, never a silent 0 or a weight turned around."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gcpo import GCPOConfig, measures
from gcpo import statistics as s
from gcpo.gradients import variance_decomposition
from gcpo.methods import advantages, get_method, weights
from gcpo.rollouts import Rollouts
from gcpo.semantics import cluster_nli, from_texts
from gcpo.weights import alpha_g, weight_range

INF, NAN = math.inf, math.nan
REWARDS = torch.tensor([[2.0, 0.0, 1.0, 0.0]])
LABELS = torch.tensor([[0.0, NAN, 1.0, 1.0]])
NLI = torch.full((2, 2, 3), 1 / 3)
PAIRS = r"\(3, 4, 3\).*\(\.\.\., G, G, 3\)"
Z, LOGPS, ONES = torch.arange(3), torch.tensor([-1.0, -2.0, 0.0]), torch.ones(3, 2)


@pytest.mark.parametrize("alpha", [-5, -1e-9, INF, NAN])
def test_an_alpha_that_would_turn_a_weight_around_is_refused(alpha: float) -> None:
    for call in (
        lambda: alpha_g(alpha, 4),
        lambda: get_method("gcpo_bot", alpha=alpha),
        lambda: weights("rd_only", Rollouts(REWARDS), alpha=alpha),
        lambda: advantages("grpo", Rollouts(REWARDS), alpha=alpha),
        lambda: weight_range("se", alpha, 4),
        lambda: GCPOConfig("x", alpha=alpha, use_cpu=True, bf16=False),
    ):
        with pytest.raises(ValueError, match=f"alpha .*{alpha}"):
            call()


def zeros(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(shape), np.zeros(shape)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "labels that are NaN, SE": (lambda: measures.semantic_entropy(LABELS), "labels.*not finite"),
    "labels that are NaN, BoT": (lambda: measures.barycentric_transport(torch.eye(4)[None], LABELS), "not finite"),
    "labels that are NaN, consistency": (lambda: measures.self_consistency(LABELS), "not finite"),
    "t below 0": (lambda: measures.kernel_language_entropy(NLI, t=-1.0), "t is -1.0"),
    "t infinite": (lambda: measures.kernel_language_entropy(NLI, t=INF), "t is inf"),
    "no response, CD": (lambda: measures.cosine_dispersion(torch.zeros(3, 0, 5)), "0 responses"),
    "no response, SE": (lambda: measures.semantic_entropy(torch.zeros(3, 0).int()), "0 responses"),
    "infinite reward, RD": (lambda: measures.reward_dispersion(torch.tensor([1.0, INF])), "infinite"),
    "infinite reward": (lambda: Rollouts(torch.tensor([[1.0, 2.0], [0.0, -INF]])), "response 1 of group 1"),
    "infinite range": (lambda: Rollouts(REWARDS, reward_range=(0, INF)), "reward_range .*inf"),
    "a range without a width": (lambda: Rollouts(REWARDS, reward_range=(1.0, 1.0)), "reward_range must be"),
    "a mask of another shape": (
        lambda: measures.self_consistency(torch.arange(4), mask=torch.ones(3) > 0),
        r"mask has shape \(3,\), expected \(4,\)",
    ),
    "an estimator": (lambda: measures.semantic_entropy(Z, estimator="shannon"), "'shannon', expected one of counts, "),
    "no logps": (lambda: measures.semantic_entropy(Z, estimator="mc"), "give logps"),
    "logps": (
        lambda: measures.semantic_entropy(Z, torch.zeros(2), estimator="rao"),
        r"logps .*\(2,\), expected \(3,\)",
    ),
    "logps, density": (lambda: measures.semantic_density(NLI, torch.zeros(3)), r"logps .*\(3,\), expected \(2,\)"),
    "groups, density": (lambda: measures.semantic_density(NLI, groups=Z), r"groups .*\(3,\), expected \(2,\)"),
    "tau": (lambda: measures.nearest_neighbour_entropy(torch.eye(2), tau=0), "tau is 0"),
    "alpha": (lambda: measures.eigenscore(torch.eye(2), alpha=-1), "alpha is -1"),
    "an affinity": (lambda: measures.degree_uncertainty(NLI, affinity="jaccard"), "jaccard.*entail, contradict"),
    "pairs, eccentricity": (lambda: measures.eccentricity(torch.rand(3, 4, 3)), PAIRS),
    "pairs, KLE": (lambda: measures.kernel_language_entropy(torch.rand(3, 4, 3)), PAIRS),
    "clusters": (lambda: measures.barycentric_transport(torch.ones(4, 2), Z), r"clusters.*\(3,\).*\(4,\)"),
    "tokens": (lambda: measures.token_entropy(torch.ones(2, 2, 2), torch.ones(2, 2)), r"mask .*\(2, 2\), expected"),
    "no lengths": (lambda: measures.sequence_entropy(LOGPS, normalise=True), "normalise=True .*: give lengths"),
    "lengths": (
        lambda: measures.sequence_entropy(LOGPS, normalise=True, lengths=Z[:2]),
        r"lengths .*\(2,\), expected \(3,\)",
    ),
    "likelihoods for answers": (lambda: measures.predictive_entropy(LOGPS), "float32.*sequence_entropy"),
    **{
        f"{measure.__name__}, {ends}": (lambda measure=measure, ends=ends: measure(REWARDS, ends), "reward_range is")
        for measure in (measures.reward_dispersion, measures.reward_variance)
        for ends in ((1.0, 1.0), (0.0, INF))
    },
    "pairs, clusters": (lambda: cluster_nli(torch.zeros(2, 3, 3)), r"shape \(2, 3\)"),
    "weights": (lambda: variance_decomposition(ONES, Z, torch.ones(1)), r"weights .*\(1,\), expected \(3,\)"),
    "weights of 0": (lambda: variance_decomposition(ONES, Z, torch.zeros(3)), "at least one above 0"),
    "another number of seeds": (lambda: s.training_difference(zeros(3, 5)[0], zeros(10, 5)[0]), r"a is \(3, 5\) and b"),
    "no seeds": (lambda: s.training_difference(*zeros(5)), r"expected \(seeds, questions\)"),
    "one seed": (lambda: s.training_draws(*zeros(1, 5)), r"a is \(1, 5\).*at least 2 seeds"),
    "two questions": (lambda: s.minimal_detectable(*zeros(3, 2)), r"a is \(3, 2\).*3 questions"),
    "not finite": (lambda: s.training_difference([[1, 2, NAN]] * 2, np.zeros((2, 3))), "a has 2 that are not"),
    "level": (lambda: s.minimal_detectable(*zeros(3, 5), level=1.0), "level 1.0"),
    "power": (lambda: s.minimal_detectable(*zeros(3, 5), power=1.0), "power is 1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_its_value(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("answer", [4, ["4"], b"4", 4.0])
def test_an_extractor_that_returns_no_text_is_named_with_the_completion(answer: Any) -> None:
    settings: dict[str, Any] = {"full_completion": False, "embedder": None, "entailment": None, "threshold": 0.35}
    groups = [["the answer is 4", "b", "c", "d"]]
    with pytest.raises(TypeError, match=r"answer_extractor .*4.*'the answer is 4'"):
        from_texts(REWARDS, groups, extract=lambda _: answer, reward_range=(0.0, 2.0), **settings)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30, 3e37])
def test_the_length_of_embeddings_changes_nothing_however_long(scale: float) -> None:
    embeddings = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    clusters = torch.tensor([0, 1, 0, 2]).expand(5, 4)
    for measure in (measures.cosine_dispersion, lambda rows: measures.barycentric_transport(rows, clusters)):
        torch.testing.assert_close(measure(embeddings * scale), measure(embeddings), rtol=1e-5, atol=1e-6)


def test_a_method_of_which_no_weight_is_finite_stops_the_training(make: Callable[..., Any]) -> None:
    trainer = make("cd_only", embedder=lambda texts: torch.zeros(len(texts), 4))  # no text has a direction
    with pytest.raises(ValueError, match=r"cd_only.*finite.*embeddings"):
        trainer.train()
