"""Meaning of texts: embeddings, entailment, the clusterings made from them, and features of whole groups."""

from gcpo.clustering import (
    THRESHOLD,
    bidirectional_clusters,
    cluster_nli,
    exact_clusters,
    greedy_clusters,
    math_clusters,
)
from gcpo.semantics.features import (
    NO_ANSWER,
    TextFeatures,
    answer_mask,
    cluster_groups,
    cluster_texts,
    from_texts,
    group_nli,
)
from gcpo.semantics.loading import explain_loading
from gcpo.semantics.models import Embedder, Entailment

__all__ = [
    "NO_ANSWER",
    "THRESHOLD",
    "Embedder",
    "Entailment",
    "TextFeatures",
    "answer_mask",
    "bidirectional_clusters",
    "cluster_groups",
    "cluster_nli",
    "cluster_texts",
    "exact_clusters",
    "explain_loading",
    "from_texts",
    "greedy_clusters",
    "group_nli",
    "math_clusters",
]
