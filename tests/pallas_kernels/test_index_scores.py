"""Index scores of keys in order and behind a page table, against float64; the Triton form against the reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import index_scores, numbers, paged_index_scores
from pallas_kernels.index_scores.shapes import CARDS, SMALL, Shape

ERROR = {"fp32": 2e-6, "bf16": 2e-5, "fp8": 5e-4}
"""Error allowed, of the scores' norm: of the Triton form, whose query has 16 bits for bf16 keys and 11 for fp8 keys."""


def inputs(shape: Shape, seed: int = 0):
    """Query, weights, keys, page table, page size and lengths: scattered pages, short and empty rows."""
    rng = np.random.default_rng(seed)
    pages = shape.batch * shape.pages + 3
    new = rng.standard_normal((pages * shape.page_size, shape.dim)).astype(np.float32)
    new *= 2.0 ** rng.integers(-8, 8, (len(new), 1))
    if shape.keys == "fp8":
        scales = np.abs(new).max(1) / 448
        keys = (jnp.asarray(new / scales[:, None]).astype(jnp.float8_e4m3fn), jnp.asarray(scales, jnp.float32))
    else:
        keys = (jnp.asarray(new).astype(jnp.float32 if shape.keys == "fp32" else jnp.bfloat16),)
    table = rng.permutation(pages)[: shape.batch * shape.pages].reshape(shape.batch, -1).astype(np.int32)
    lengths = rng.integers(0, shape.length + 1, (shape.batch, shape.steps)).astype(np.int32)
    lengths[0, 0] = shape.length
    if shape.batch > 1:
        lengths[-1, 0] = 0
    table[np.arange(shape.pages) * shape.page_size >= lengths.max(1)[:, None]] = -1
    query = rng.standard_normal((shape.batch, shape.steps, shape.heads, shape.dim)).astype(np.float32)
    query *= 10.0 ** rng.integers(-3, 4, (shape.batch, shape.steps, shape.heads, 1))
    query[0, 0, 0] = 0
    weights = rng.standard_normal((shape.batch, shape.steps, shape.heads)).astype(np.float32)
    return (jnp.asarray(query), jnp.asarray(weights), keys, jnp.asarray(table), shape.page_size, jnp.asarray(lengths))


def scored(arguments, **options) -> np.ndarray:
    query, weights, keys, table, page_size, lengths = arguments
    call = jax.jit(lambda q, w, k, t, n: paged_index_scores(q, w, k, t, page_size, n, **options))
    return np.asarray(call(query, weights, keys, table, lengths))


def scored64(arguments) -> np.ndarray:
    """One position at a time."""
    query, weights, keys, table, page_size, lengths = (np.asarray(a) if hasattr(a, "shape") else a for a in arguments)
    key = np.asarray(numbers(keys), np.float64)
    batch, steps, _, dim = query.shape
    found = np.full((batch, steps, table.shape[1] * page_size), -np.inf)
    for b, s in np.ndindex(batch, steps):
        for t in range(lengths[b, s]):
            dots = query[b, s].astype(np.float64) @ key[table[b, t // page_size] * page_size + t % page_size]
            found[b, s, t] = weights[b, s].astype(np.float64) @ np.maximum(dots / dim**0.5, 0)
    return found


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Row by row, as rows are as large as their queries."""
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    assert not np.isnan(found).any()
    seen = np.isfinite(expected)
    for row in np.ndindex(found.shape[:-1]):
        mine, right = (x[row][seen[row]].astype(np.float64) for x in (found, expected))
        assert np.linalg.norm(mine - right) <= bound * np.linalg.norm(right), row


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_of_keys_in_order_equal_float64(dtype):
    rng = np.random.default_rng(0)
    query, weights, keys = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 3, 16), (2, 3, 3), (2, 40, 16)))
    keys = jnp.asarray(keys).astype(dtype)
    found = jax.jit(index_scores)(query, weights, keys)
    dots = np.einsum("bshd,btd->bsht", query.astype(np.float64), np.asarray(keys, np.float64)) / 4
    expected = np.einsum("bsh,bsht->bst", weights, np.maximum(dots, 0))
    assert found.dtype == jnp.float32
    assert (expected < 0).any()  # weights may be negative; relu comes before them
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("keys", ["fp32", "bf16", "fp8"])
def test_the_reference_equals_float64(keys, parts):
    arguments = inputs(replace(SMALL["three_tokens"], keys=keys))
    assert_close(scored(arguments, parts=parts, implementation="reference"), scored64(arguments), 2e-6)


@pytest.mark.parametrize("name", SMALL)
def test_triton_interpreted_equals_float64(name):
    arguments = inputs(SMALL[name], seed=1)
    assert_close(scored(arguments, implementation="triton_interpret"), scored64(arguments), ERROR[SMALL[name].keys])


def test_what_does_not_fit_is_refused():
    query, weights, keys, *rest = inputs(SMALL["whole_pages"])
    call = lambda keys, query=query, **options: paged_index_scores(query, weights, keys, *rest, **options)  # noqa: E731
    with pytest.raises(ValueError, match=r"for a query of 128 numbers, found .*64"):
        call((keys[0][:, :64], keys[1]))
    with pytest.raises(ValueError, match=r"index keys: expected one of .*found \('float8_e4m3fn\[\d+, 128\]',\)"):
        call(keys[:1])
    with pytest.raises(NotImplementedError, match="the keys are float32"):
        call((numbers(keys),), implementation="triton_interpret")
    with pytest.raises(NotImplementedError, match=r"a number of numbers in .*, found 24"):
        call((keys[0][:, :24], keys[1]), query[..., :24], implementation="triton_interpret")
    with pytest.raises(NotImplementedError, match="'triton' cannot run: it needs platform 'gpu', found 'cpu'"):
        call(keys, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *CARDS])
def test_triton_equals_the_reference_on_a_gpu(name):
    shape = {**SMALL, **CARDS}[name]
    if name in CARDS:  # the reference gathers float32 keys
        shape = replace(shape, batch=min(shape.batch, 3), steps=min(shape.steps, 9), pages=shape.pages // 4 - 1)
    for seed in range(2):
        arguments = inputs(shape, seed)
        expected = scored(arguments, implementation="reference")
        assert_close(scored(arguments, implementation="triton"), expected, ERROR[shape.keys])


@pytest.mark.gpu
def test_the_bits_of_a_score_depend_on_its_key_and_query_alone():
    """Not on other requests, other tokens, pages, striping or the length of the table."""
    shape = Shape(4, 4, 32, 128, 64, 40)
    query, weights, keys, table, page, lengths = inputs(shape)
    table, lengths = jnp.arange(160, dtype=jnp.int32).reshape(4, 40)[::-1], jnp.full((4, 4), shape.length, jnp.int32)
    every = scored((query, weights, keys, table, page, lengths), implementation="triton").view(np.uint32)
    for b, s in ((0, 0), (2, 3)):
        one = slice(b, b + 1), slice(s, s + 1)
        alone = (query[one], weights[one], keys, table[one[0]], page, lengths[one])
        np.testing.assert_array_equal(scored(alone, implementation="triton").view(np.uint32)[0, 0], every[b, s])
        stripe = tuple(lane[5::8] for lane in keys)
        striped = (query[one], weights[one], stripe, table[one[0]][:, :31], 8, lengths[one] // 8)
        found = scored(striped, implementation="triton").view(np.uint32)[0, 0]
        np.testing.assert_array_equal(found[: 31 * 8], every[b, s, 5 : 31 * 64 : 8][: 31 * 8])
