"""Random batches as engines hand them over: rows out of order, groups that lack some, and rows of padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gcpo.rollouts import Rollouts

GROUPS, SIZE, LONGEST, PADS = 5, 4, 7, 3


@dataclass
class Batch:
    """N rows; ``groups`` are the numbers of each group's rows, in the order in which groups and rows appear."""

    keys: list[str]
    rewards: Tensor
    mask: Tensor
    features: dict[str, Tensor]
    groups: list[list[int]]

    def of(self, rows: Tensor) -> dict[str, Tensor]:
        """Features of rows (B, G), where -1 is no row, of which a method must not read anything."""
        there = rows >= 0
        known = {}
        for name, values in self.features.items():
            taken = values[rows]
            taken[~there] = 0
            known[name] = taken
        pairs = self.nli[rows[:, :, None], rows[:, None, :]]
        return known | {"nli": pairs}

    @property
    def nli(self) -> Tensor:
        return torch.rand(len(self.keys), len(self.keys), 3, generator=torch.Generator().manual_seed(9)).softmax(-1)

    @property
    def rollouts(self) -> Rollouts:
        """Rollouts of the same completions; a group that lacks some has rewards that are NaN."""
        rows = torch.tensor([[*group, *[-1] * (SIZE - len(group))] for group in self.groups])
        rewards = self.rewards[rows].masked_fill(rows < 0, torch.nan)
        mask = self.mask[rows] * (rows >= 0).unsqueeze(2)
        return Rollouts(rewards, reward_range=(0, 1), mask=mask, max_completion_length=LONGEST + 1, **self.of(rows))


def batch(seed: int) -> Batch:
    """Two groups lack one and two rows; rows of padding have a key of their own and no token."""
    g = torch.Generator().manual_seed(seed)
    names = [f"u{group}" for group in range(GROUPS) for _ in range(SIZE)]
    left_out = {1, 2 * SIZE, 2 * SIZE + 3}
    kept = [row for row in torch.randperm(len(names), generator=g).tolist() if row not in left_out]
    keys = [names[row] for row in kept] + ["pad0"] * PADS
    order = torch.randperm(len(keys), generator=g).tolist()
    keys = [keys[row] for row in order]
    rows, real = len(keys), torch.tensor([key != "pad0" for key in keys])
    lengths = torch.randint(1, LONGEST + 1, (rows,), generator=g)
    mask = ((torch.arange(LONGEST) < lengths.unsqueeze(1)) & real.unsqueeze(1)).float()
    rewards = torch.rand(rows, generator=g) if seed % 2 else torch.randint(0, 2, (rows,), generator=g).float()
    tokens = {name: torch.rand(rows, LONGEST, generator=g) for name in ("logps", "entropies", "answer_mask")}
    labels = ("clusters", "exact_clusters", "math_clusters", "task_clusters", "answered")
    features = {
        "logps": -tokens["logps"],
        "entropies": tokens["entropies"],
        "answer_mask": (tokens["answer_mask"] > 0.5).float(),
        "embeddings": torch.randn(rows, 6, generator=g),
        **{name: torch.randint(0, 2 if name == "answered" else 3, (rows,), generator=g) for name in labels},
    }
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        if key != "pad0":
            groups.setdefault(key, []).append(row)
    return Batch(keys, rewards, mask, features, list(groups.values()))
