"""Whether this machine computes what the stored outputs of the read notebooks were computed with, bit for bit.

`python tests/arithmetic.py` prints the digest; whoever executes those notebooks on another kind of machine puts it into
`tests/golden/arithmetic.txt`; `arithmetic_of_replays.txt` has the kinds, one a line, on which runs made again have the
reference's tables.
"""

import hashlib
from pathlib import Path

import torch

STORED = Path(__file__).with_name("golden") / "arithmetic.txt"
REPLAYED = STORED.with_name("arithmetic_of_replays.txt")


def digest() -> str:
    """Hash of the embedded models after a few optimiser steps of the policy and one look of the entailment model.

    Another kind of processor rounds differently, and training magnifies the last bit; other models differ at once.
    """
    from gcpo import world
    from gcpo.semantics import Entailment
    from gcpo.tasks.sampling import load_policy

    made, threads = world.bootstrap(), torch.get_num_threads()
    torch.set_num_threads(1)
    policy, _ = load_policy(str(made.policy))
    numbers = torch.arange(16 * 64).reshape(16, 64) * 7919 % policy.config.vocab_size
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for _ in range(5):
        policy(numbers, labels=numbers).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    found = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in policy.parameters()))
    texts = ["a black cat", "a cat that is black", "a grey cat", "in the garden"]
    found.update(Entailment(str(made.entailment)).pairwise(texts).numpy().tobytes())
    torch.set_num_threads(threads)
    return found.hexdigest()


def same(stored: Path = STORED) -> bool:
    return digest() in stored.read_text().split()


if __name__ == "__main__":
    print(digest())
