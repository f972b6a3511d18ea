"""Meaning of texts: embeddings, entailment, the clusterings made from them, and features of whole groups."""

from gcpo.clustering import bidirectional_clusters, cluster_nli, exact_clusters, greedy_clusters, math_clusters
from gcpo.semantics.features import NO_ANSWER, TextFeatures, answer_mask, cluster_texts, from_texts, group_nli
from gcpo.semantics.models import Embedder, Entailment

__all__ = ["NO_ANSWER", "Embedder", "Entailment", "TextFeatures", "answer_mask", "cluster_texts", "from_texts"]
__all__ += ["bidirectional_clusters", "cluster_nli", "exact_clusters", "greedy_clusters", "group_nli", "math_clusters"]
