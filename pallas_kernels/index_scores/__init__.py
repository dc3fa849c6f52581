"""Lightning-indexer scores of every position."""

from pallas_kernels.index_scores.reference import index_scores

__all__ = ["index_scores"]
