"""TRL's own tests of GRPO, with GCPOTrainer in the place of GRPOTrainer. Not a part of the test suite, because TRL's
tests are not in its package: they come from a clone::

    git clone --depth 1 https://github.com/huggingface/trl /tmp/trl
    python tests/trl_own.py /tmp/trl

They run four times against the installed TRL: with TRL's trainer; with ours, method "grpo", each row reading its own
prompt; with ours, prompts shared; and with ours and CW-GRPO, which reads the policy's log-probabilities and weighs
tokens. The models and data sets that the tests ask of the Hub are made here, with the same names and random weights:
the tests find them as folders. Tests that need files of the Hub's (pictures, tools, remote code) are skipped.

It writes the counts to ``benchmarks/results/trl_tests.csv``, and ends with 1 where our trainer fails a test that TRL's
passes.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
import trl  # now: later the clone, whose folder pytest puts first, would be taken for it

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "trl_tests.csv"
TRAINER = "GCPO_TRL_OWN"  # the variable that tells pytest's process whose trainer it tests
OURS: dict[str, dict[str, Any]] = {
    "GCPOTrainer, grpo, own prompts": {"method": "grpo", "share_prompts": False},
    "GCPOTrainer, grpo, shared prompts": {"method": "grpo"},
    "GCPOTrainer, cw_grpo, shared prompts": {"method": "cw_grpo"},
}
TRL = "GRPOTrainer"

# --- stand-ins for the Hub --------------------------------------------------------------------------------------------

HUB = "trl-internal-testing"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 32, **HEADS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Name on the Hub: transformers' model type, and what its configuration needs beside the size.
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "LlamaForCausalLM-3.2": ("llama", {}),
    "MistralForCausalLM-0.2": ("mistral", {}),
    "Gemma2ForCausalLM": ("gemma2", {"head_dim": 8}),
    "Cohere2ForCausalLM": ("cohere2", {"logit_scale": 1.0}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {"num_experts": 4, **EXPERTS}),
    "Glm4MoeForCausalLM": ("glm4_moe", {"n_routed_experts": 4, "head_dim": 2, **EXPERTS}),
    "GptOssForCausalLM": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
CLASSIFIERS = {
    "Qwen2ForSequenceClassification-2.5": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
    "LlamaForSequenceClassification-3.2": "llama",
}
ABSENT = {
    "VLM": "pictures need a processor of the Hub's",
    "trust_remote_code": "code on the Hub",
    "Nemotron": "its mixture of Mamba layers has no stand-in",
    "continuous_batching": "needs an accelerator",
    "prepare_input": "names the prompts of the Hub's data set",
    "mask_truncated": "writes ids of the Hub's tokenizer",
    "multiple_dataloader_workers": "its workers import torch anew in every epoch: minutes",
}


def hub(folder: Path) -> None:
    """Write models and data sets with the Hub's names into a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokens = tokenizer()
    special = {"pad_token_id": tokens.pad_token_id, "eos_token_id": tokens.eos_token_id, "bos_token_id": None}
    for name, (kind, options) in {**POLICIES, **{name: (kind, {}) for name, kind in CLASSIFIERS.items()}}.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=len(tokens), **SIZE, **options, **special)
        config.num_labels = 1
        made = AutoModelForSequenceClassification if name in CLASSIFIERS else AutoModelForCausalLM
        model = made.from_config(config)
        for module in model.modules():  # TRL's own way, with which gradients are large enough to be seen
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
        model.to(torch.bfloat16).save_pretrained(folder / HUB / f"tiny-{name}")
        tokens.save_pretrained(folder / HUB / f"tiny-{name}")
    zen(folder / HUB / "zen")


def tokenizer() -> Any:
    """Return a tokenizer of bytes with the special tokens and the chat template of Qwen 2.5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokens.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<tool_call>", "</tool_call>"]})
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokens.chat_template = template.read_text(encoding="utf-8")
    return tokens


def zen(folder: Path) -> None:
    """Write a data set of four and two prompts, in the two forms that the tests ask for; the Hub's has 17 and 2."""
    prompts = [f"{word} is better than" for word in ("Beautiful", "Explicit", "Simple", "Flat", "Sparse", "Now")]
    forms = {
        "standard_prompt_only": [{"prompt": text} for text in prompts],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": text}]} for text in prompts],
    }
    described = []
    for form, rows in forms.items():
        files = []
        for split, part in {"train": rows[:4], "test": rows[4:]}.items():
            path = folder / form / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(map(json.dumps, part)))
            files.append({"split": split, "path": str(path.relative_to(folder))})
        described.append({"config_name": form, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(described)}\n---\n")


# --- within pytest ----------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Put our trainer and its config in the place of TRL's, before the tests import them."""
    import_utils = importlib.import_module("trl.import_utils")

    # Tests of another version ask for packages that this TRL no longer knows.
    import_utils.__getattr__ = unknown  # type: ignore[attr-defined]
    if options := OURS.get(os.environ.get(TRAINER, "")):
        from gcpo import GCPOConfig, GCPOTrainer

        def config(*given: Any, **named: Any) -> GCPOConfig:
            """Return a GCPOConfig with TRL's defaults."""
            usual = {} if given else {"output_dir": "trainer_output"}
            return GCPOConfig(*given, **{**usual, "loss_type": "dapo", "scale_rewards": "group", **options, **named})

        class Trainer(GCPOTrainer):
            """GCPOTrainer with the config above where none is given."""

            def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **named: Any):
                super().__init__(model, reward_funcs, args or config(), *rest, **named)

        trl.GRPOConfig, trl.GRPOTrainer = config, Trainer  # type: ignore[misc, assignment]


def unknown(name: str) -> Any:
    if name.startswith("is_"):
        return lambda: False
    raise AttributeError(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, why in ABSENT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=why))


# --- the script -------------------------------------------------------------------------------------------------------


def outcomes(trainer: str, clone: Path, folder: Path, chosen: str) -> dict[str, str]:
    """Return what became of each test with one trainer."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", str(clone / "tests" / "test_grpo_trainer.py"), "-q", "-p", "trl_own"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short", "--durations=12", "-k", chosen]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    variables = {**os.environ, TRAINER: trainer, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if not report.exists():
        sys.exit(f"no test of {clone} ran:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"] = failed
    report.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="TRL's repository")
    parser.add_argument("-k", default="", help="as pytest's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hub(Path(folder))
        columns = {name: outcomes(name, options.clone.resolve(), Path(folder), options.k) for name in (TRL, *OURS)}
    found = pd.DataFrame(columns)
    counts = found.apply(pd.Series.value_counts).reindex(["passed", "failed", "skipped"]).fillna(0).astype(int).T
    print(counts)
    failed = found[list(OURS)].eq("failed")
    differing = failed[found[TRL].ne("failed") & failed.any(axis=1)]
    print(differing.to_string() if len(differing) else "TRL's own trainer fails in the same tests")
    if not options.k:
        version = options.clone / "VERSION"
        tests = version.read_text().strip() if version.exists() else "unknown"
        counts = counts.assign(trl=importlib.metadata.version("trl"), tests=tests)
        counts.to_csv(RESULTS, index_label="trainer", lineterminator="\n")
    sys.exit(1 if len(differing) else 0)


if __name__ == "__main__":
    main()
