"""Bucketed LRU in Triton: one launch to touch, two to find and take the victims, however many there are."""

from pallas_kernels.pb_lru.triton.moves import forget, rotate, touch
from pallas_kernels.pb_lru.triton.victims import evict, find_set

__all__ = ["evict", "find_set", "forget", "rotate", "touch"]
