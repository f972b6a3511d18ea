"""Costs of single parts: shared prompts over their length, gradient variance, entailment, measures, start-up, records.

Times of the ways to do the same thing alternate in one process; a figure is the median of their ratios over rounds, of
the processor's time on a CPU. `python benchmarks/parts.py NAME...` runs some parts, without a name all of them; it
writes a table of each to `benchmarks/results`, and ends with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import math
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Line, alternating, children, peak, quartiles, ratio, report
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from gcpo import measures, paths, records, world
from gcpo.clustering import cluster_nli
from gcpo.gradients import gradient_gram, gradient_variance
from gcpo.one_pass import gradient_grams
from gcpo.runs.evaluate import ask
from gcpo.runs.params import validate
from gcpo.runs.plan import Plan, digest
from gcpo.runs.policies import quiet
from gcpo.runs.profiles import load_profile
from gcpo.runs.record import Run
from gcpo.semantics import Entailment, TextFeatures
from gcpo.tasks.sampling import load_policy
from gcpo.trainer.prefix import shared, sharing, together

# Sizes of policies: width, width within layers, layers, vocabulary.
SIZES = {"1M": (128, 384, 4, 786), "19M": (512, 1024, 6, 8000), "100M": (768, 2048, 12, 24_000)}


def policy(size: str, tied: bool = True, **options: Any) -> PreTrainedModel:
    """Return a policy with random weights."""
    torch.manual_seed(0)
    width, inner, layers, vocabulary = SIZES[size]
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=tied, **options)).eval()


def group(
    model: PreTrainedModel, size: int, prompt: int, answer: int, prompts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention and completion of answers to one prompt, or to some in turn."""
    ids = torch.randint(model.config.vocab_size, (size, prompt + answer), device=model.device)
    ids[:, :prompt] = ids[torch.arange(size) % prompts, :prompt].clone()
    completion = torch.ones_like(ids)
    completion[:, :prompt] = 0
    return ids, torch.ones_like(ids), completion


def scored(size: str) -> PreTrainedModel:
    """Return a policy with TRL's fused head, which scores completions in its trainers."""
    model = policy(size)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs",))
    return model


def loss_of_group(model: PreTrainedModel, ids: Tensor, width: int, shares: bool) -> None:
    """Compute the loss of a group and its gradient, with a prompt that is read once or by every row."""
    labels = torch.cat([torch.full_like(ids[:, :width], -100), ids[:, width:]], dim=1)
    with sharing(shares, model, width):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    outputs.log_probs[:, width - ids.shape[1] :].mean().neg().backward()


# --- parts ------------------------------------------------------------------------------------------------------------


def prompts(rounds: int) -> list[Line]:
    """A loss and its gradient with prompts that are read once, over TRL's own pass."""
    model, lines = scored("1M"), []
    for width, size in itertools.product((64, 256, 512), (4, 16)):
        ids = group(model, size, width, 64)[0]
        calls = {
            "plain": functools.partial(loss_of_group, model, ids, width, False),
            "shared": functools.partial(loss_of_group, model, ids, width, True),
        }
        found = ratio("shared", "plain", alternating(calls, rounds), limit=0.25 if (width, size) == (512, 16) else None)
        lines.append(found._replace(case=f"prompt of {width} tokens, G = {size}"))
    return lines


def micro_batches(rounds: int) -> list[Line]:
    """A step in micro-batches of 8 rows: shuffled over 8 prompts, as TRL has them, and those of one prompt together."""
    model, count, rows, width = scored("1M"), 8, 8, 512
    torch.manual_seed(0)
    ids = torch.cat([group(model, 16, width, 64)[0] for _ in range(count)])
    given = ids[torch.randperm(len(ids))].split(rows)
    shuffled = [{"prompt_ids": part[:, :width], "prompt_mask": torch.ones(rows, width), "all": part} for part in given]
    ordered = together(shuffled, len(shuffled))

    def step(batches: list[dict[str, Tensor]], shares: bool) -> None:
        for batch in batches:
            loss_of_group(model, batch["all"], width, shares)

    calls = {
        "TRL's own": functools.partial(step, shuffled, False),
        "shared, shuffled": functools.partial(step, shuffled, True),
        "shared, one prompt after the other": functools.partial(step, ordered, True),
    }
    times = alternating(calls, rounds)
    return [ratio(name, "TRL's own", times) for name in list(calls)[1:]]


def variance(rounds: int, size: str) -> list[Line]:
    """V(q) at two temperatures from one pass, over two of every rollout alone, and over torch.func's gradients."""
    lines = []
    for tied in (True, False):
        model = policy(size, tied)
        batch = group(model, 16, 48, 16)
        calls: dict[str, Callable[[], Any]] = {
            "one pass": functools.partial(gradient_grams, model, *batch, temperatures=(0.9, 1.0)),
            "loop": functools.partial(_loop, model, batch),
        }
        if size == "1M":
            calls["torch.func"] = functools.partial(
                _by_function, policy(size, tied, attn_implementation="eager"), batch
            )
        times = alternating(calls, rounds)
        for other in list(calls)[1:]:
            found = ratio("one pass", other, times, 1.0 if other == "loop" else None)
            lines.append(found._replace(case=f"{size}, {'tied' if tied else 'untied'}"))
    return lines


def _loop(model: PreTrainedModel, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    gradient_gram(model, *batch, temperature=0.9)
    gradient_variance(model, *batch, torch.linspace(-1.0, 1.5, len(batch[0])))


def variance_135m(_: int) -> list[Line]:
    """V(q) of a model of SmolLM2's shape, 16 answers of 12 tokens to a prompt of 300, of ten of thirty layers and of
    all: seconds of one thread, memory, and work over that of 16 plain backward passes; and torch.func's way for ten."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
    config = LlamaConfig(**shape)
    model = LlamaForCausalLM(config).eval()
    batch, lines, limit = group(model, 16, 300, 12), list[Line](), {"memory_limit": 6e9}
    for name, chosen in {"ten layers": ["*.layers.2[0-9].*"], "all layers": None}.items():
        call = functools.partial(gradient_grams, model, *batch, params=chosen, reads=functools.partial(shared, model))
        plain = functools.partial(gradient_gram, model, *(part[:1] for part in batch), params=chosen)
        call()  # what is tried once is tried
        seconds = alternating({"one pass": functools.partial(call, **limit)}, 1, warm=0)["one pass"]
        lines.append(Line(f"{name}, seconds", "", *quartiles(seconds), unit="s"))
        taken = peak(functools.partial(call, **limit)) / 1e9
        lines.append(Line(f"{name}, memory", "", *quartiles([taken]), unit="GB", limit=6.0))
        work = [_work(functools.partial(call, **limit)), 16 * _work(plain)]
        lines.append(Line(f"{name}, work", "16 backward passes", *quartiles([work[0] / work[1]]), limit=1.3))
    eager = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    upper = [name for name, _ in eager.named_parameters() if ".layers.2" in name and ".layers.2." not in name]
    call = functools.partial(_by_function, eager, batch, upper, (1.0,))
    [seconds] = alternating({"torch.func": call}, 1, warm=0).values()
    lines.append(Line("ten layers, torch.func, seconds", "", *quartiles(seconds), unit="s"))
    return [*lines, Line("ten layers, torch.func, memory", "", *quartiles([peak(call) / 1e9]), unit="GB")]


def _work(call: Callable[[], Any]) -> int:
    """Return how many floating-point operations a call makes in products."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def _by_function(
    model: PreTrainedModel,
    batch: tuple[Tensor, Tensor, Tensor],
    only: Collection[str] = (),
    temperatures: Sequence[float] = (0.9, 1.0),
) -> None:
    weights = {name: weight.detach() for name, weight in model.named_parameters() if name in (only or [name])}
    ids, _, completion = batch
    width = int((completion == 0).sum(1)[0])

    def score(weights: dict[str, Tensor], row: Tensor, temperature: float) -> Tensor:
        # A mask of its own: the model's is made by looking at values, which no batched function can.
        sees = torch.ones(len(row), len(row)).triu(1).mul(-1e9)[None, None]
        given = {"input_ids": row[None], "attention_mask": sees, "use_cache": False}
        logits = torch.func.functional_call(model, weights, (), given).logits[0, width - 1 : -1] / temperature
        return -cross_entropy(logits, row[width:], reduction="sum")

    for temperature in temperatures:
        gradients = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0, None))(weights, ids, temperature)
        rows = torch.cat([part.flatten(1) for part in gradients.values()], dim=1)
        rows @ rows.T


def pairs(_: int) -> list[Line]:
    """Pairs that the entailment model is asked, over all ordered pairs; and those that the greedy rule would read."""
    lines = []
    for task in ("tinyqa", "tinymath"):
        plan = Plan("train", validate({**load_profile("laptop"), "task": task}))
        model, tokens = load_policy(world.resolve(plan.params.policy, "policy"))
        rows, size = plan.task.load("train", limit=32).rows, plan.params.group_size
        torch.manual_seed(0)
        sampled = ask(plan, model, tokens, rows, size, plan.params.temperature)
        entailment = Entailment(world.resolve(plan.params.entailment, "entailment"))
        settings = {"extract": plan.task.extract, "full_completion": plan.task.full_completion, "embedder": None}
        threshold = plan.params.entailment_threshold
        of = [TextFeatures([g], **settings, entailment=entailment, threshold=threshold) for g in sampled.groups(size)]
        shares, greedy = [], []
        for features in of:
            before = entailment.misses
            cluster_nli(features.nli, features.answered, threshold)
            shares.append((entailment.misses - before) / (size * (size - 1)))
            greedy.append(_read_by_greedy(features.shown[0], features.clusters[0].tolist()) / (size * (size - 1)))
        for case, values in {"asked": shares, "read by the greedy rule": greedy}.items():
            lines.append(Line(f"{task}, {case}", "all pairs", *quartiles(values), rounds=len(values)))
    return lines


def _read_by_greedy(texts: Any, clusters: list[int]) -> int:
    """Return how many pairs the rule compares: each new distinct text with the first text of every cluster before."""
    seen: set[str] = set()
    opened: set[int] = set()
    count = 0
    for text, cluster in zip(texts, clusters, strict=True):
        if text is not None and text not in seen:
            seen.add(text)
            count += len(opened)
            opened.add(cluster)
    return count


def dispersion(rounds: int) -> list[Line]:
    """Measures of 256 groups at once, over a loop of one group at a time, and over lm-polygraph's own loop."""
    torch.manual_seed(0)
    clusters, embeddings = torch.randint(4, (256, 16)), torch.randn(256, 16, 384)
    nli, tokens = torch.rand(256, 16, 16, 3).softmax(-1), torch.rand(256, 16, 40)
    kinds: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "semantic entropy": (measures.semantic_entropy, (clusters,)),
        "cosine dispersion": (measures.cosine_dispersion, (embeddings,)),
        "barycentric transport": (measures.barycentric_transport, (embeddings, clusters)),
        "kernel language entropy": (measures.kernel_language_entropy, (nli,)),
        "token entropy": (measures.token_entropy, (tokens, torch.ones_like(tokens).bool())),
    }
    lines = []
    for name, (measure, given) in kinds.items():

        def loop(measure: Callable[..., Any] = measure, given: tuple[Tensor, ...] = given) -> None:
            for i in range(256):
                measure(*(values[i : i + 1] for values in given))

        times = alternating({"batch": functools.partial(measure, *given), "loop": loop}, rounds)
        lines.append(ratio("batch", "loop", times, limit=1.0)._replace(case=name))
    if (theirs := _polygraph(clusters, nli, tokens)) is None:
        print("lm-polygraph is left out: it is not installed (pip install --no-deps lm-polygraph)")
        return lines
    for name, (other, unit) in theirs.items():
        measure, given = kinds[name]
        own = measure(*given).double()
        assert torch.allclose(own, torch.as_tensor(other()).double() * unit, atol=1e-4), f"{name} differs"
        times = alternating({"batch": functools.partial(measure, *given), "lm-polygraph": other}, rounds)
        lines.append(ratio("batch", "lm-polygraph", times, limit=1.0)._replace(case=name))
    return lines


def _polygraph(clusters: Tensor, nli: Tensor, tokens: Tensor) -> dict[str, tuple[Callable[[], Any], float]] | None:
    """Return lm-polygraph's estimators of the same groups, and what one of their units is in nats; None without it."""
    found = importlib.util.find_spec("lm_polygraph")
    if found is None or not found.submodule_search_locations:
        return None
    for name in ("", ".estimators", ".utils"):  # whose own imports need much that no estimator here does
        package = types.ModuleType("lm_polygraph" + name)
        package.__path__ = [str(Path(found.submodule_search_locations[0], name.removeprefix(".")))]
        sys.modules[package.__name__] = package

    def estimator(module: str, name: str, **options: Any) -> Any:
        return getattr(importlib.import_module(f"lm_polygraph.estimators.{module}"), name)(**options)

    groups, size = clusters.shape
    members = [[(row == label).nonzero().flatten().tolist() for label in row.unique()] for row in clusters]
    classes = {
        "class_to_sample": members,
        "sample_to_class": [row.unique(return_inverse=True)[1].tolist() for row in clusters],
    }
    entail, _, contradict = nli.double().numpy().transpose(3, 0, 1, 2)
    given = {
        "sample_texts": [[""] * size] * groups,
        "semantic_classes_entail": classes,
        "semantic_matrix_entail": entail,
        "semantic_matrix_contra": contradict,
        "entropy": list(tokens.flatten(0, 1).numpy()),
    }
    entropy = estimator("semantic_entropy", "SemanticEntropy", class_probability_estimation="frequency")
    kernel = estimator("kernel_language_entropy", "KernelLanguageEntropy")
    by_token = estimator("token_entropy", "MeanTokenEntropy")
    return {
        "semantic entropy": (lambda: entropy(given), 1.0),
        "kernel language entropy": (lambda: kernel(given), math.log(size)),  # which theirs is a share of
        "token entropy": (lambda: by_token(given).reshape(groups, size).mean(1), 1.0),
    }


def start(rounds: int) -> list[Line]:
    """Processor seconds before anything is done."""
    commands = {
        "import torch": ["-c", "import torch"],
        "import gcpo": ["-c", "import gcpo"],
        "gcpo --help": ["-m", "gcpo", "--help"],
        "import gcpo.runs.train": ["-c", "import gcpo.runs.train"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _, (name, command) in itertools.product(range(min(rounds, 5)), commands.items()):
        before = children()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        seconds[name].append(children() - before)
    limits = {"gcpo --help": 0.5}
    return [
        Line(name, "", *quartiles(own), unit="s", limit=limits.get(name), rounds=len(own))
        for name, own in seconds.items()
    ]


def find(rounds: int) -> list[Line]:
    """Processor seconds of `records.find` on many runs, of the reference's manifests with other seeds."""
    manifests = [run.manifest for run in records.runs("laptop", reference=True) if run.finished]
    lines = []
    for number in (1_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            paths.OUTPUTS = Path(folder)
            for seed, manifest in itertools.islice(enumerate(itertools.cycle(manifests), start=1_000), number):
                resolved = {**manifest["resolved"], "copy": seed}
                name = f"{manifest['id'].rsplit('-', 1)[0]}-{digest(resolved)}"
                copied = {**manifest, "id": name, "resolved": resolved, "files": {}, "contents": {}}
                Run(Path(folder) / "laptop" / "runs" / name, copied).write()
            calls = {"find": lambda: records.find("laptop", any_code=True)}
            seconds = alternating(calls, min(rounds, 3), warm=0)["find"]
            assert len(records.find("laptop", any_code=True)) == number
        lines.append(Line(f"records.find of {number} runs", "", *quartiles(seconds), unit="s", rounds=len(seconds)))
    return lines


PARTS: dict[str, Callable[[int], list[Line]]] = {
    "prompts": prompts,
    "micro_batches": micro_batches,
    **{f"variance_{size}": functools.partial(variance, size=size) for size in SIZES},
    "variance_135M": variance_135m,
    "pairs": pairs,
    "measures": dispersion,
    "start": start,
    "find": find,
}


def main() -> int:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none is named")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    return 1 if sum([report(name, PARTS[name](options.rounds)) for name in options.parts or PARTS]) else 0


if __name__ == "__main__":
    sys.exit(main())
