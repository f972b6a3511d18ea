"""Write the explorer's answers with their embeddings, docs/pieces/explorer.json: run this file.

Measures of a group read nothing of the embeddings but their inner products. So each answer is stored as its row of the
Cholesky factor of those products: as many numbers as there are answers before it, at the same angles to all others as
MiniLM's own 384 numbers, to four decimals.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gcpo.semantics import Embedder

FILE = Path(__file__).resolve().parent / "pieces" / "explorer.json"
SCENES = {
    "Lena lives in what?": "a house on the coast; a house by the sea; a house near the forest; a house close to the "
    "woods; a flat in the city; a flat in the town; a boat by the sea; a cabin up the mountain; a cabin in the hills; "
    "a dog that is black; a black dog; a spotted parrot; a black cat; a white cat; no answer",
    "Where is the key?": "in the garden; out in the garden; the garden; in the cellar; in the basement; under the "
    "mat; in her pocket; on the kitchen table; a letter",
    "What is six times seven?": "42; forty-two; the answer is 42; 43; 41; 48; 24; 13; 67; about forty",
    "What is the capital of France?": "Paris; Paris, France; It is Paris.; Lyon; Marseille; London; Rome; Berlin; "
    "a country in Europe; I do not know",
    "Why is the sky blue?": "air scatters blue light more than red light; because blue light is scattered the most; "
    "Rayleigh scattering; it reflects the sea; because the ocean is blue; the sun is yellow; nobody knows; it is not "
    "blue at night",
}


def answers() -> dict[str, list[list[float]] | list[str]]:
    """Return the texts and their rows, of one more number each."""
    texts = [text.strip() for scene in SCENES.values() for text in scene.split(";")]
    unit = torch.nn.functional.normalize(Embedder("all-MiniLM-L6-v2")(texts).double(), dim=1)
    factor = torch.linalg.cholesky(unit @ unit.T)
    rows = [[round(value, 4) for value in row[: place + 1].tolist()] for place, row in enumerate(factor)]
    return {"texts": texts, "rows": rows}


if __name__ == "__main__":
    FILE.write_text(json.dumps(answers(), separators=(",", ":")) + "\n")
