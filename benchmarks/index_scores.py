"""Lightning-indexer scores of whole histories, read through a page table."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.index_scores import numbers, paged_index_scores
from pallas_kernels.index_scores.shapes import CARDS, SMALL, Shape
from ula_jax.index_keys import KeyFormat, Keys

BARS = {"decode_1": 27.0, "decode_8": 52.0, "decode_32": 170.0}
"""DeepGEMM takes 22, 52 and 153 on the same card."""
CALLS = 12
"""At least: of short calls more, because a program of several calls takes a fifth of a millisecond to start."""
ERROR = {"reference": 1e-5, "fp8": 5e-4, "bf16": 2e-5}
"""Allowed of the norm: float32 products, or queries of 11 or 16 bits."""
TOPK, OVERLAP = 2048, 0.998


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    for name, shape in (SMALL if small else CARDS).items():
        yield case(name, shape, rng, small)


def case(name: str, shape: Shape, rng: np.random.Generator, small: bool = False) -> Case:
    """Requests of full length; consecutive calls read other pages."""
    fmt = KeyFormat(shape.keys, shape.dim)
    count = 2 if small else max(CALLS, 24 // (shape.batch * shape.steps))
    requests = max(count, 2 * shape.batch)
    keys = stored(fmt, requests * shape.length, int(rng.integers(2**31)))
    pages = rng.permutation(requests * shape.pages).astype(np.int32).reshape(requests, shape.pages)
    sees = shape.length - shape.steps + 1 + np.arange(shape.steps, dtype=np.int32)
    lengths = jnp.broadcast_to(jnp.asarray(np.maximum(sees, 0)), (shape.batch, shape.steps))

    def draw(*dims: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims, np.float32))

    calls = [
        (
            draw(shape.batch, shape.steps, shape.heads, shape.dim),
            draw(shape.batch, shape.steps, shape.heads) * shape.heads**-0.5,
            keys,
            jnp.asarray(pages[(np.arange(shape.batch) + number * shape.batch) % requests]),
            lengths,
        )
        for number in range(count)
    ]
    names = ("reference", "triton_interpret" if small else "triton")
    forms = {form: partial(_scores, shape.page_size, form) for form in names}
    return Case(
        kernel="index_scores",
        shape=name,
        forms=forms,
        calls=calls,
        check=partial(_wrong, shape),
        device_bytes=shape.batch * shape.length * (fmt.nbytes + 4 * shape.steps),
        flops=2 * shape.batch * shape.steps * shape.length * shape.heads * shape.dim,
        bar=BARS.get(name),
    )


def stored(fmt: KeyFormat, addresses: int, seed: int) -> Keys:
    """Random keys, drawn on the device piece by piece."""
    piece = min(addresses, 1 << 20)

    @partial(jax.jit, donate_argnums=0)
    def fill(keys, number):
        drawn = jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), (piece, fmt.dim))
        first = jnp.minimum(number * piece, addresses - piece)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(lane, new, first, 0)
            for lane, new in zip(keys, fmt.pack(drawn), strict=True)
        )

    keys = fmt.init(addresses)
    for number in range(-(-addresses // piece)):
        keys = fill(keys, number)
    return keys


def accuracy(shape: Shape, result: jax.Array, call: tuple, request: int, step: int) -> tuple[float, float]:
    """Error of one token's scores against float64, of their norm, and the part of the true top-k that they pick."""
    query, weights, keys, table, lengths = call
    length = int(lengths[request, step])
    rows = (np.asarray(table[request])[:, None] * shape.page_size + np.arange(shape.page_size)).reshape(-1)[:length]
    key = np.asarray(jax.jit(numbers)(tuple(lane[rows] for lane in keys)), np.float64)
    dots = np.maximum(key @ np.asarray(query[request, step], np.float64).T * shape.dim**-0.5, 0)
    right = dots @ np.asarray(weights[request, step], np.float64)
    found = np.asarray(result[request, step, :length])
    k = min(TOPK, length)
    best, picked = (set(np.argpartition(-scores, k - 1)[:k].tolist()) for scores in (right, found))
    size = max(float(np.linalg.norm(right)), 1e-30)
    return float(np.linalg.norm(found - right)) / size, len(best & picked) / k


def _scores(page_size: int, form: str, query, weights, keys, table, lengths) -> jax.Array:
    return paged_index_scores(query, weights, keys, table, page_size, lengths, implementation=form)


def _wrong(shape: Shape, form: str, result: jax.Array, call: tuple) -> str | None:
    lengths = np.asarray(call[-1])
    seen = np.arange(shape.length) < lengths[..., None]
    if not bool(jnp.array_equal(jnp.isfinite(result), seen)):
        return "a score that is not seen is not -inf, or one that is seen is not finite"
    for request, step in {(0, 0), (shape.batch - 1, shape.steps - 1)}:
        if not lengths[request, step]:
            continue
        error, overlap = accuracy(shape, result, call, request, step)
        bound = ERROR.get(form, ERROR.get(shape.keys, 0.0))
        if not (error <= bound and (overlap >= OVERLAP or shape.length < TOPK)):
            return f"error {error:.1e} of the norm (at most {bound:.0e}), {overlap:.2%} of the top {TOPK}"
    return None
