"""Sampling and scoring with a tiny random Qwen2: masks, decoding against forward passes by hand, seeds and modes."""

import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from gcpo.tasks import sampling as module
from gcpo.tasks.base import Row, Split, Task
from gcpo.tasks.sampling import batches, evaluate, generate, load_policy, sample, token_statistics

PAD, END, STOP, USER, ASSISTANT = SPECIAL = tuple(f"<|{name}|>" for name in ("pad", "end", "stop", "user", "assistant"))
LETTERS = "abcdefgh"
PROMPTS = ["ab", "hgfedc ba ba", "c d", "a", "eeee fff", "h"]
LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of a few thousand weights, drawn wide enough to prefer some letters, in Hub format."""
    path = tmp_path_factory.mktemp("policy")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS, "Ġ"])}
    tokens = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=PAD, pad_token=PAD, eos_token=END)
    tokens.add_special_tokens({"additional_special_tokens": [STOP, USER, ASSISTANT]})
    tokens.chat_template = (
        "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            eos_token_id=tokens.eos_token_id,
        )
    )
    # As many a policy on the Hub does, this one ends at either of two tokens and asks for a decoding of its own.
    model.generation_config.update(
        eos_token_id=tokens.convert_tokens_to_ids([END, STOP]),
        pad_token_id=tokens.pad_token_id,
        do_sample=True,
        temperature=0.3,
        top_k=2,
        top_p=0.5,
        repetition_penalty=3.0,
    )
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy(folder: Path) -> tuple[Any, Any]:
    return load_policy(str(folder))


def prompt_ids(tokens: Any, prompt: str) -> list[int]:
    return tokens.encode(f"{USER}{prompt}{END}{ASSISTANT}")


def ends(tokens: Any) -> list[int]:
    return tokens.convert_tokens_to_ids([END, STOP])


@torch.no_grad()
def greedy_by_hand(model: Any, tokens: Any, prompt: str, longest: int) -> list[int]:
    """The likeliest token of a forward pass of the prompt alone, appended again and again."""
    ids = prompt_ids(tokens, prompt)
    start = len(ids)
    while len(ids) - start < longest and (len(ids) == start or ids[-1] not in ends(tokens)):
        ids.append(model(torch.tensor([ids], device=model.device)).logits[0, -1].argmax().item())
    return ids[start:]


# --- generate -------------------------------------------------------------------------------------------------------


def test_greedy_decoding_is_the_likeliest_token_of_each_step(policy: tuple[Any, Any]) -> None:
    model, tokens = policy
    ids, _, completion = generate(model, tokens, PROMPTS, n=1, temperature=0.0, max_new_tokens=LONGEST)
    found = [row[kept.bool()].tolist() for row, kept in zip(ids, completion, strict=True)]
    expected = [greedy_by_hand(model, tokens, prompt, LONGEST) for prompt in PROMPTS]
    assert found == expected
    assert len({tuple(row) for row in expected}) > 1
    again = generate(model, tokens, PROMPTS, n=1, temperature=0.0, max_new_tokens=LONGEST)[0]
    assert torch.equal(ids, again)


def test_masks_cover_the_prompt_and_the_completion_up_to_its_end(policy: tuple[Any, Any]) -> None:
    model, tokens = policy
    torch.manual_seed(0)
    ids, attention, completion = generate(model, tokens, PROMPTS, n=8, temperature=1.0, max_new_tokens=LONGEST)
    assert ids.shape == attention.shape == completion.shape
    assert len(ids) == 8 * len(PROMPTS)
    ended = []
    rows = zip(ids.tolist(), attention.tolist(), completion.tolist(), strict=True)
    for number, (row, seen, generated) in enumerate(rows):
        expected = prompt_ids(tokens, PROMPTS[number // 8])  # the samples of a prompt are neighbours
        start = generated.index(1)
        left = start - len(expected)
        assert row[left:start] == expected
        assert seen[:start] == [0] * left + [1] * len(expected)  # padding is on the left
        length = sum(generated)
        assert generated == [0] * start + [1] * length + [0] * (len(row) - start - length)
        assert seen[start:] == generated[start:]  # what follows the end is not attended to
        tokens_made = row[start : start + length]
        assert not set(tokens_made[:-1]) & set(ends(tokens))
        ended.append(tokens_made[-1] in ends(tokens))
        assert ended[-1] or length == LONGEST
    # All kinds occur: cut off, ended by either token.
    assert 0 < sum(ended) < len(ended)
    assert set(ends(tokens)) <= set(ids[:, -LONGEST:].flatten().tolist())


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_samples_follow_the_softmax_at_the_temperature(policy: tuple[Any, Any], temperature: float) -> None:
    """And not at the model's own settings: gradients of log-probabilities are only right for what was sampled."""
    model, tokens = policy
    prompt, n = "hgfedc ba ba", 4000
    torch.manual_seed(0)
    ids, _, _ = generate(model, tokens, [prompt], n=n, temperature=temperature, max_new_tokens=1)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids(tokens, prompt)])).logits[0, -1]
    expected = (logits / temperature).softmax(-1)
    counts = Counter(ids[:, -1].tolist())
    found = torch.tensor([counts[token] / n for token in range(len(tokens))])
    # Total variation of n draws from 14 outcomes is about sqrt(14/(2 pi n)) = 0.024 at the most.
    assert 0.5 * (found - expected).abs().sum() < 0.04


# --- sample ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_at_once", [1, 100, 2**16])
def test_samples_come_in_the_order_of_the_prompts(
    policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tokens_at_once: int
) -> None:
    model, tokens = policy
    monkeypatch.setattr(module, "TOKENS", tokens_at_once)
    found = sample(model, tokens, PROMPTS, n=2, temperature=0.0, max_new_tokens=LONGEST)
    expected = [tokens.decode(greedy_by_hand(model, tokens, p, LONGEST), skip_special_tokens=True) for p in PROMPTS]
    assert found == [[text, text] for text in expected]


# --- batches and token statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "longest"), [(1, 5), (3, 5), (3, 50), (40, 200)])
def test_a_batch_holds_a_bounded_number_of_tokens_or_one_prompt(
    policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, n: int, longest: int
) -> None:
    monkeypatch.setattr(module, "TOKENS", 900)
    prompts = [LETTERS[: 1 + (7 * number) % 8] for number in range(70)]
    found = list(batches(policy[1], prompts, n=n, max_new_tokens=longest))
    assert [place for part in found for place in range(len(prompts))[part]] == list(range(len(prompts)))

    def size(part: slice) -> int:
        lengths = [len(prompt_ids(policy[1], prompt)) + longest for prompt in prompts[part]]
        return n * len(lengths) * max(lengths)

    assert all(size(part) <= 900 or part.stop - part.start == 1 for part in found)
    for part, after in pairwise(found):  # none is smaller than it must be
        assert after.start % 32 == 0 or size(slice(part.start, after.start + 1)) > 900
    assert all(part.start // 32 == (part.stop - 1) // 32 for part in found)


@pytest.mark.parametrize(("at_once", "numbers"), [(1, 10**6), (3, 10**6), (64, 2000), (64, 50), (64, 1)])
def test_token_statistics_are_those_of_each_answer_alone_however_much_is_held_at_a_time(
    policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, at_once: int, numbers: int
) -> None:
    model, tokens = policy
    torch.manual_seed(1)
    ids, attention, completion = generate(model, tokens, PROMPTS, n=2, temperature=0.8, max_new_tokens=LONGEST)
    monkeypatch.setattr(module, "TOKENS", at_once * ids.shape[1])
    monkeypatch.setattr(module, "LOGITS", numbers)
    logps, entropies, mask = token_statistics(model, ids, attention, completion, 0.8)
    assert logps.shape == entropies.shape == mask.shape and (mask.sum(1) == completion.sum(1)).all()
    for row in range(len(ids)):
        own = ids[row][attention[row].bool()]
        length = int(completion[row].sum())
        with torch.no_grad():
            chances = (model(own[None]).logits[0, -length - 1 : -1].double() / 0.8).softmax(-1)
        expected = chances[torch.arange(length), own[-length:]].log(), -(chances * chances.log()).sum(-1)
        kept = mask[row].bool()
        found = logps[row][kept].double(), entropies[row][kept].double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# --- evaluate -------------------------------------------------------------------------------------------------------


def score(answer: str | None, references: Any) -> dict[str, float]:
    """The share of the reference's letters that the answer has, and whether it has them all."""
    share = sum(letter in (answer or "") for letter in references[0]) / len(references[0])
    return {"all": float(share == 1), "share": share}


TASK = Task(
    "letters", ("all", "share"), lambda: Split((), {}), lambda text: text.strip() or None, score, "share", "short"
)
ROWS = [Row(f"q{number}", prompt, (LETTERS[number:],)) for number, prompt in enumerate(PROMPTS)]


def scores_of(policy: tuple[Any, Any], **changes: Any) -> pd.DataFrame:
    options: dict[str, Any] = {"n": 4, "temperature": 0.9, "max_new_tokens": LONGEST, "seed": 0} | changes
    return evaluate(*policy, TASK, ROWS, **options)


def test_evaluate_scores_the_greedy_answer_and_the_mean_of_the_samples(policy: tuple[Any, Any]) -> None:
    model, tokens = policy
    found = scores_of(policy)
    torch.manual_seed(0)
    sampled = sample(model, tokens, PROMPTS, n=4, temperature=0.9, max_new_tokens=LONGEST)
    expected = []
    for decoding in ("greedy", "sampled"):
        for row, group in zip(ROWS, sampled, strict=True):
            ids = greedy_by_hand(model, tokens, row.prompt, LONGEST)
            made = group if decoding == "sampled" else [tokens.decode(ids, skip_special_tokens=True)]
            each = [score(TASK.extract(text), row.references) for text in made]
            means = {name: sum(s[name] for s in each) / len(each) for name in ("all", "share")}
            answered = sum(bool(text.strip()) for text in made) / len(made)
            expected.append({"query": row.id, "decoding": decoding, **means, "answered": answered})
    pd.testing.assert_frame_equal(found, pd.DataFrame(expected))
    assert found["share"].between(0.01, 0.99).any()


def test_evaluate_is_decided_by_its_seed(policy: tuple[Any, Any]) -> None:
    first = scores_of(policy)
    torch.rand(7)
    pd.testing.assert_frame_equal(scores_of(policy), first)
    other = scores_of(policy, seed=1)
    greedy = first["decoding"] == "greedy"
    pd.testing.assert_frame_equal(other[greedy], first[greedy])
    assert not other[~greedy].equals(first[~greedy])
    pd.testing.assert_frame_equal(scores_of(policy, n=0), first[greedy])


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_global_generator_and_the_mode_of_the_model_as_they_were(
    policy: tuple[Any, Any], training: bool
) -> None:
    model, _ = policy
    modes = []
    handle = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    try:
        model.train(training)
        before = torch.get_rng_state()
        scores_of(policy)
        assert model.training is training and torch.equal(torch.get_rng_state(), before)
        assert modes and not any(modes)
    finally:
        handle.remove()
        model.eval()


# --- load_policy ----------------------------------------------------------------------------------------------------


def test_a_policy_is_loaded_ready_to_generate_in_the_wanted_precision(policy: tuple[Any, Any], folder: Path) -> None:
    model, tokens = policy
    assert not model.training and model.dtype == torch.float32
    assert load_policy(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert tokens.padding_side == "left"
    assert tokens.pad_token == PAD
    assert prompt_ids(tokens, "a b") == [3, 5, 13, 6, 1, 4]  # the ids it was saved with


def test_a_policy_without_padding_pads_with_its_end_token(policy: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = policy
    tokens = Qwen2Tokenizer(vocab={END: 0, "a": 1}, merges=[], unk_token=END, pad_token=None, eos_token=END)
    tokens.chat_template = "{{ messages[0]['content'] }}"
    model.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    assert load_policy(str(tmp_path))[1].pad_token == END


def test_a_policy_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(OSError, match=r"policy model 'no/such-policy' \(a Hub name"):
        load_policy("no/such-policy")


TEMPLATES = {
    "": "leaves the question out",
    "{% for m in messages %}": r"fails \(TemplateSyntaxError: ",
    "{{ raise_exception('no user') }}": r"fails \(TemplateError: no user\)",
    "{% for n in range(10**9) %}{% endfor %}": r"fails \(OverflowError: ",
}


@pytest.mark.parametrize(("template", "said"), TEMPLATES.items())
def test_a_chat_template_that_cannot_be_used_is_one_line_that_names_the_model(
    folder: Path, tmp_path: Path, template: str, said: str
) -> None:
    shutil.copytree(folder, tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=rf"^policy model '.*/policy' cannot be used: its chat template {said}.*$"):
        load_policy(str(tmp_path / "policy"))
