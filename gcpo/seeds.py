"""Every seed that is derived from a run's one seed."""

import hashlib


def of_step(seed: int, step: int) -> int:
    """Return the seed of what a method draws in an optimiser step; a resumed run goes on with the same ones."""
    return seed + step


def of_noise(seed: int, batch: int) -> int:
    """Return the seed of the noise that is planted in the rewards of a batch, apart from what methods draw."""
    return int.from_bytes(_hash(seed, f"noise {batch}")[:4])


def of_chunk(seed: int, first: int) -> int:
    """Return a seed below 2^32 for the questions from number ``first`` on that are asked together: chunks and runs draw
    apart, and a resumed run as an uninterrupted one."""
    return int.from_bytes(_hash(seed, first)[:4])


def of_world(seed: int, world: int) -> int:
    """Return the seed by which a generated task draws questions in the world of a seed; world 0 draws by ``seed``."""
    return int.from_bytes(_hash(seed, f"world {world}")[:4]) if world else seed


def place(seed: int, row_id: str) -> bytes:
    """Return the key that rows of a split are sorted by: an order that depends on the seed and the rows' ids alone."""
    return _hash(seed, row_id)


def _hash(seed: int, what: object) -> bytes:
    return hashlib.sha256(f"{seed}:{what}".encode()).digest()
