"""gcpo: a reproducible companion of four papers on uncertainty-aware policy optimisation of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcpo.measures import barycentric_transport, cosine_dispersion, reward_dispersion, semantic_entropy
    from gcpo.trainer import GCPOConfig, GCPOTrainer

__all__ = [
    "GCPOConfig",
    "GCPOTrainer",
    "barycentric_transport",
    "cosine_dispersion",
    "reward_dispersion",
    "semantic_entropy",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of pyproject.toml: a release changes no file that runs are hashed with
        return import_module("importlib.metadata").version("gcpo")
    # torch takes seconds to import, TRL more: the command line speaks before either.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("gcpo.trainer" if name.startswith("GCPO") else "gcpo.measures"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f'gcpo.{name} needs the extra trl ({error}): in a checkout, pip install ".[trl]"') from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
