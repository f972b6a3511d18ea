"""gcpo: a reproducible companion of four papers on uncertainty-aware policy optimisation of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcpo.measures import barycentric_transport, cosine_dispersion, reward_dispersion, semantic_entropy
    from gcpo.trainer import GCPOConfig, GCPOTrainer

__version__ = "0.1.0"
__all__ = [
    "GCPOConfig",
    "GCPOTrainer",
    "barycentric_transport",
    "cosine_dispersion",
    "reward_dispersion",
    "semantic_entropy",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, TRL more: the command line speaks before either.
    if name in __all__ and not name.startswith("GCPO"):
        from gcpo import measures

        return getattr(measures, name)
    if name in ("GCPOConfig", "GCPOTrainer"):
        try:
            from gcpo import trainer
        except ModuleNotFoundError as error:
            raise ImportError(
                f'gcpo.{name} needs the extra trl ({error}): in a checkout of this project, pip install ".[trl]"'
            ) from error
        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
