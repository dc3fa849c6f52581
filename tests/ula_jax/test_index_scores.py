"""Index keys as they are stored and scored, on one device and striped over several, against a loop over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.index_scores import numbers
from ula_jax import index_keys
from ula_jax.index_keys import KeyFormat
from ula_jax.parallel import TP, Parallel, make_mesh
from ula_jax.striping import Striping

HEADS, DIM, PAGE, PAGES = 3, 16, 8, 4


def scores64(query, weights, keys):
    """By a loop over heads: query [S, H, D], weights [S, H], keys [T, D]."""
    total = 0.0
    for head in range(query.shape[1]):
        dots = query[:, head].astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(query.shape[2])
        total = total + weights[:, head, None].astype(np.float64) * np.maximum(dots, 0.0)
    return total


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_what_a_key_is_stored_as(name):
    fmt, new = KeyFormat(name, DIM), normal(40, DIM, seed=2)
    new[3] = 0
    new[4] *= 1e6
    keys = jax.jit(fmt.pack)(new)
    assert sum(lane.nbytes for lane in keys) == 40 * fmt.nbytes == 40 * {"fp32": 64, "bf16": 32, "fp8": 20}[name]
    assert [(lane.shape, lane.dtype) for lane in fmt.init(40)] == [(lane.shape, lane.dtype) for lane in keys]
    found = np.asarray(numbers(keys))
    assert not found[3].any()
    if name == "fp8":
        codes, scales = (np.asarray(lane, np.float32) for lane in keys)
        np.testing.assert_allclose(scales, np.where(np.arange(40) == 3, 1, np.abs(new).max(1) / 448), rtol=1e-6)
        assert (np.abs(codes).max(1) == np.where(np.arange(40) == 3, 0, 448)).all()
    # Half a unit in the last place; of the smallest fp8 numbers, which have no more exponent, 2^-10 of a scale.
    bound = {"fp32": 0, "bf16": 2.0**-8, "fp8": 2.0**-4}[name] * np.abs(new)
    bound = np.maximum(bound, 2.0**-10 * np.abs(new).max(1, keepdims=True) / 448 if name == "fp8" else 0)
    assert (np.abs(found - new) <= bound * 1.00001).all()


def test_a_model_without_an_indexer_stores_no_keys():
    assert KeyFormat("fp8", 0).nbytes == 0
    assert KeyFormat("fp8", 0).init(40) == ()


def striped(devices, fmt, tables, steps, lengths):
    """Append keys step by step to shards on `devices`, then score: [devices, batch, steps, length] and the shards."""
    striping, mesh = Striping(devices), make_mesh(Parallel(tp=devices))

    def body(keys):
        rank, keys = jax.lax.axis_index(TP), jax.tree.map(lambda lane: lane[0], keys)
        for addresses, new in steps:
            keys = index_keys.append(fmt, keys, jnp.asarray(addresses), jnp.asarray(new), striping, rank)
        query, weights = jnp.asarray(normal(2, 1, HEADS, DIM)), jnp.asarray(normal(2, 1, HEADS, seed=1))
        scored = index_keys.score(
            keys, jnp.asarray(tables), PAGE, query, weights, jnp.asarray(lengths), striping, Parallel(tp=devices)
        )
        return scored.scores[None], jax.tree.map(lambda lane: lane[None], keys)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(TP), out_specs=P(TP), check_vma=False)
    empty = jax.tree.map(lambda lane: lane.reshape(devices, -1, *lane.shape[1:]), fmt.init(64))
    return jax.tree.map(np.asarray, jax.jit(mapped)(empty))


@pytest.mark.parametrize(("devices", "rows"), [(1, "fp8"), (4, "fp8"), (8, "fp32"), (8, "bf16"), (8, "fp8")])
def test_f17_striped_keys_equal_unstriped_ones(devices, rows):
    """Two requests on scattered pages, one shorter than its table; a step writes one of them and padding."""
    tables = np.array([[5, 0, 6, -1], [2, 7, -1, -1]], np.int32)
    address = [[t * PAGE + i for t in row if t >= 0 for i in range(PAGE)] for row in tables.tolist()]
    first = np.full((2, 20), -1, np.int32)
    first[0, :20], first[1, :9] = address[0][:20], address[1][:9]
    second = np.array([[address[0][20]], [-1]], np.int32)
    steps = [(first, normal(2, 20, DIM, seed=3)), (second, normal(2, 1, DIM, seed=4))]
    fmt, table = KeyFormat(rows, DIM), np.zeros((64, DIM), np.float32)
    for addresses, new in steps:
        for at, key in zip(addresses.reshape(-1), new.reshape(-1, DIM), strict=True):
            if at >= 0:
                table[at] = numbers(jax.jit(fmt.pack)(key[None]))[0]

    lengths = np.array([[21], [9]], np.int32)
    scores, keys = striped(devices, fmt, tables, steps, lengths)
    found = np.asarray(numbers(tuple(jnp.asarray(lane.swapaxes(0, 1)) for lane in keys)))
    np.testing.assert_array_equal(found.reshape(64, DIM), table)  # address t is t // P of t % P
    query, weights = normal(2, 1, HEADS, DIM), normal(2, 1, HEADS, seed=1)
    for device in range(devices):
        for b, length in enumerate(lengths[:, 0]):
            expected = scores64(query[b], weights[b], table[address[b][:length]])
            np.testing.assert_allclose(scores[device, b, :, :length], expected, atol=2e-6)
            assert (scores[device, b, :, length:] == -np.inf).all()
    for device in range(1, devices):  # or devices would select different rows
        np.testing.assert_array_equal(scores[device], scores[0])
    np.testing.assert_allclose(scores[0], striped(1, fmt, tables, steps, lengths)[0][0], atol=2e-6)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("rows", ["fp32", "fp8"])
def test_a_striped_score_has_the_bits_of_an_unstriped_one(dim, steps, rows):
    """A device with a stripe of the keys and one with all of them: or near ties would be broken differently."""
    pages, devices = 32, 8
    table = jnp.asarray(np.random.default_rng(0).permutation(pages)[None], jnp.int32)
    keys = KeyFormat(rows, dim).pack(jnp.asarray(normal(pages * PAGE, dim, seed=2)))
    query, weights = jnp.asarray(normal(1, steps, HEADS, dim)), jnp.asarray(normal(1, steps, HEADS, seed=1))
    lengths = jnp.full((1, steps), pages * PAGE - 3, jnp.int32)

    def score(striping):
        def body(shard):
            mine = jax.tree.map(lambda lane: lane[0], shard)
            scored = index_keys.score(
                mine, table, PAGE, query, weights, lengths, striping, Parallel(tp=devices)
            )
            return scored.scores[None]

        def shards(lane):
            parts = lane.reshape(-1, striping.devices, *lane.shape[1:]).swapaxes(0, 1)
            return jnp.broadcast_to(parts, (devices, *parts.shape[1:]))

        mesh = make_mesh(Parallel(tp=devices))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P(TP), out_specs=P(TP), check_vma=False)
        return np.asarray(jax.jit(mapped)(jax.tree.map(shards, keys)))

    whole, striped = score(Striping(1)), score(Striping(devices))
    np.testing.assert_array_equal(whole.view(np.uint32), striped.view(np.uint32))


SEEN = np.array([0, 1, 7, 9, 100, 250, 256], np.int32)
"""Positions that each request sees: shards own none, one, or thirty-two of them."""


def selected(devices, gather, k, ranks):
    """The k best positions and the best ranks with their scores, by every device; and all scores."""
    pages, striping = 32, Striping(devices)
    keys = normal(pages * PAGE, DIM, seed=2)
    keys[np.random.default_rng(3).integers(0, len(keys), 200)] = keys[:5].repeat(40, axis=0)  # many scores are equal
    table = jnp.arange(pages, dtype=jnp.int32)[None].repeat(len(SEEN), 0)
    query, weights = (jnp.asarray(normal(len(SEEN), 1, *shape, seed=9)) for shape in ((HEADS, DIM), (HEADS,)))

    def body(shard):
        scored = index_keys.score(
            (shard[0],), table, PAGE, query, weights, jnp.asarray(SEEN[:, None]), striping, Parallel(tp=devices),
            gather, max(k, ranks),
        )  # fmt: skip
        every = scored.scores[None] if scored.positions is None else jnp.zeros(1)
        return scored.best(k)[None], *(array[None] for array in scored.ranked(ranks)), every

    mapped = jax.shard_map(body, mesh=make_mesh(Parallel(tp=devices)), in_specs=P(TP), out_specs=P(TP), check_vma=False)
    shards = jnp.asarray(keys).reshape(-1, devices, DIM).swapaxes(0, 1)
    return [np.asarray(array) for array in jax.jit(mapped)(shards)]


@pytest.mark.parametrize(("k", "ranks"), [(1, 1), (16, 16), (16, 24), (40, 5), (300, 300)])
@pytest.mark.parametrize("devices", [2, 8])
def test_what_is_gathered_changes_no_selection(devices, k, ranks):
    """All scores, or the best of each device: both are the selection by a stable sort, ties to the lowest position."""
    *_, every = selected(devices, "scores", k, ranks)
    for gather in ("scores", "candidates"):
        best, positions, scores, _ = selected(devices, gather, k, ranks)
        for request, seen in enumerate(SEEN):
            row = every[0, request, 0]
            order = np.argsort(-row[:seen], kind="stable")
            chosen = np.sort(order[:k])
            for device in range(devices):
                assert best[device, request, 0, : len(chosen)].tolist() == chosen.tolist(), (gather, seen)
                assert (best[device, request, 0, len(chosen) :] == -1).all()
                there = scores[device, request, 0] > -np.inf
                assert positions[device, request, 0][there].tolist() == order[:ranks].tolist()
                np.testing.assert_array_equal(scores[device, request, 0][there], row[order[:ranks]])


def test_addresses_of_positions():
    table = jnp.array([[5, 0, -1], [-1, -1, -1]], jnp.int32)
    positions = jnp.array([[0, 7, 8, 15, 16, 23, 24]], jnp.int32)
    found = index_keys.address(table, 8, jnp.broadcast_to(positions, (2, 7)))
    assert found.tolist() == [[40, 47, 0, 7, -1, -1, -1], [-1] * 7]
