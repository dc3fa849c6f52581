"""Exact top-k of float32 scores: `top_k` by rank, `select` in ascending order of position.

Both go by one order: scores by value (-0 and subnormal numbers as 0), NaN as if it were the lowest finite number, so
that a poisoned score can push out nothing but -inf; of equal scores the one at the lowest position is the larger.

`implementation`: `auto`, `reference` (`lax.top_k`, any platform), `triton` (CUDA) or `triton_interpret` (the same
kernels in Triton's CPU interpreter: slow, for tests).
"""

from jaxtyping import Array, Float32, Int32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import choose
from pallas_kernels.topk import reference
from pallas_kernels.topk.reference import EMPTY

PREFER = ("triton", "reference")


def top_k(scores: Float32[Array, "*batch length"], k: int) -> Int32[Array, "*batch k"]:
    """Positions of the k largest scores, largest first. Raises ValueError if k is not from 1 to length."""
    length = scores.shape[-1]
    if not 1 <= k <= length:
        raise ValueError(f"top-k: expected k from 1 to the {length} scores, found {k}; pass min(k, length)")
    return reference.top_k(scores, k)


def select(
    scores: Float32[Array, "*batch length"],
    k: int,
    lengths: Int32[Array, "*batch"],
    *,
    implementation: str = "auto",
) -> Int32[Array, "*batch best"]:
    """Positions of the `min(k, length)` largest among the first `lengths[b]` scores of each row, in ascending order.

    Where a row has fewer, EMPTY (-1) follows. What stands behind a row's length does not matter. Raises ValueError if k
    is not positive.
    """
    if k < 1:
        raise ValueError(f"select: expected k of 1 or more, found {k}; without a selection there is nothing to call")
    chosen = choose("topk.select", implementation, {"reference": None, **triton_call.forms()}, PREFER)
    if chosen == "reference":
        return reference.select(scores, k, lengths)
    from pallas_kernels.topk import triton

    return triton.select(scores, k, lengths, interpret=chosen == "triton_interpret")


__all__ = ["EMPTY", "select", "top_k"]
