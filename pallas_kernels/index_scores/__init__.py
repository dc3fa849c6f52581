"""Lightning-indexer scores: of keys that lie in order, and of keys that are read through a page table.

`implementation` of `paged_index_scores`: `auto`, `reference` (jnp, any platform; gathers the keys into a buffer as
large as they are), `triton` (CUDA; reads bf16 and fp8 keys in place, page by page) or `triton_interpret` (the same
kernel in Triton's CPU interpreter: slow, for tests).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import choose
from pallas_kernels.index_scores import reference
from pallas_kernels.index_scores.reference import EMPTY, address, index_scores, numbers

PREFER = ("triton", "reference")
STORED = ("float32", "bfloat16", "float8_e4m3fn")
DIMS = (16, 32, 64, 128, 256)
MOST_HEADS = 128
"""What the Triton form can take."""


def paged_index_scores(
    query: Float32[Array, "batch steps heads dim"],
    weights: Float32[Array, "batch steps heads"],
    keys: tuple[Array, ...],
    page_table: Int32[Array, "batch pages"],
    page_size: int,
    lengths: Int32[Array, "batch steps"],
    *,
    parts: int = 1,
    implementation: str = "auto",
) -> Float32[Array, "batch steps length"]:
    """Score of each position below `lengths`, where the page table must have a page; -inf of all other positions.

    Args:
      keys: by address, (float32 or bfloat16 [addresses, dim],) or, codes and the scale of each key, (float8_e4m3fn
        [addresses, dim], float32 [addresses]).
      page_table: position t of a request has address `page_table[t // page_size] * page_size + t % page_size`; EMPTY
        (-1) pads it. `length` is all that the table covers.
      lengths: positions that each token sees.
      parts: the reference scores positions in so many parts, part r being positions r mod `parts`, so that its bits
        are those of a device that owns one part (see `index_scores`). Triton's never depend on what stands beside a
        key.

    ValueError if keys and query do not fit together.
    """
    _check(query, keys)
    forms = {"reference": None, **triton_call.forms(_unsupported(query, keys))}
    chosen = choose("paged_index_scores", implementation, forms, PREFER)
    if chosen == "reference":
        return reference.paged_index_scores(query, weights, keys, page_table, page_size, lengths, parts)
    from pallas_kernels.index_scores import triton

    return triton.paged_index_scores(
        query, weights, keys, page_table, page_size, lengths, interpret=chosen == "triton_interpret"
    )


def _check(query: Array, keys: tuple[Array, ...]) -> None:
    form = tuple(f"{lane.dtype}[{', '.join(map(str, lane.shape))}]" for lane in keys)
    addresses, dim = keys[0].shape[0], query.shape[-1]
    scales = (f"float32[{addresses}]",)
    allowed = [(f"{name}[{addresses}, {dim}]", *scales[: name.startswith("float8")]) for name in STORED]
    if form not in allowed:
        raise ValueError(
            f"index keys: expected one of {allowed} for a query of {dim} numbers, found {form}; store them with "
            "ula_jax.index_keys.KeyFormat"
        )


def _unsupported(query: Array, keys: tuple[Array, ...]) -> str | None:
    heads, dim = query.shape[2:]
    if keys[0].dtype == jnp.float32:
        return "matrix units multiply numbers of 16 and 8 bits, and the keys are float32"
    if dim not in DIMS:
        return f"it needs keys of a number of numbers in {DIMS}, found {dim}"
    if heads > MOST_HEADS:
        return f"it needs at most {MOST_HEADS} heads, found {heads}"
    return None


__all__ = ["EMPTY", "address", "index_scores", "numbers", "paged_index_scores"]
