"""Placement and replacement of the KV cache of sparse-attention language models."""
