"""Attention of absorbed MLA queries over selected rows."""

from pallas_kernels.sparse_mla.reference import sparse_mla

__all__ = ["sparse_mla"]
