"""Exact top-k positions."""

from pallas_kernels.topk.reference import top_k

__all__ = ["top_k"]
