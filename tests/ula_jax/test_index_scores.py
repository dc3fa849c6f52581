"""Lightning-indexer scores against float64, and striped over devices against a loop over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.index_scores import index_scores
from ula_jax import index_keys
from ula_jax.parallel import Parallel, make_mesh
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_equal_float64(dtype):
    query, weights = normal(2, 3, HEADS, DIM), normal(2, 3, HEADS, seed=1)
    keys = np.asarray(jnp.asarray(normal(2, 40, DIM, seed=2)).astype(dtype).astype(jnp.float32))
    found = jax.jit(index_scores)(jnp.asarray(query), jnp.asarray(weights), jnp.asarray(keys).astype(dtype))
    expected = np.stack([scores64(query[b], weights[b], keys[b]) for b in range(2)])
    assert found.dtype == jnp.float32
    assert (expected < 0).any()  # weights may be negative; relu comes before them
    np.testing.assert_allclose(found, expected, atol=2e-6)


def striped(devices, tables, steps):
    """Append keys step by step to shards on `devices`, then score: [devices, batch, steps, length] and the shards."""
    striping, mesh = Striping(devices), make_mesh(devices)

    def body(keys):
        rank, keys = jax.lax.axis_index("kv"), keys[0]
        for addresses, new in steps:
            keys = index_keys.append(keys, jnp.asarray(addresses), jnp.asarray(new), striping, rank)
        query, weights = jnp.asarray(normal(2, 1, HEADS, DIM)), jnp.asarray(normal(2, 1, HEADS, seed=1))
        parallel = Parallel("tp", devices)
        return index_keys.scores(keys, jnp.asarray(tables), PAGE, query, weights, striping, parallel)[None], keys[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("kv"), out_specs=P("kv"), check_vma=False)
    empty = np.zeros((devices, 64 // devices, DIM), np.float32)
    return jax.tree.map(np.asarray, jax.jit(mapped)(empty))


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_f17_striped_keys_equal_unstriped_ones(devices):
    """Two requests on scattered pages, one shorter than its table; a step writes one of them and padding."""
    tables = np.array([[5, 0, 6, -1], [2, 7, -1, -1]], np.int32)
    address = [[t * PAGE + i for t in row if t >= 0 for i in range(PAGE)] for row in tables.tolist()]
    first = np.full((2, 20), -1, np.int32)
    first[0, :20], first[1, :9] = address[0][:20], address[1][:9]
    second = np.array([[address[0][20]], [-1]], np.int32)
    steps = [(first, normal(2, 20, DIM, seed=3)), (second, normal(2, 1, DIM, seed=4))]
    table = np.zeros((64, DIM), np.float32)
    for addresses, new in steps:
        for at, key in zip(addresses.reshape(-1), new.reshape(-1, DIM), strict=True):
            if at >= 0:
                table[at] = key

    scores, keys = striped(devices, tables, steps)
    np.testing.assert_array_equal(keys.transpose(1, 0, 2).reshape(64, DIM), table)  # address t is t // P of t % P
    query, weights = normal(2, 1, HEADS, DIM), normal(2, 1, HEADS, seed=1)
    for device in range(devices):
        for b, held in enumerate(address):
            expected = scores64(query[b], weights[b], table[held])
            np.testing.assert_allclose(scores[device, b, :, : len(held)], expected, atol=2e-6)
            assert not scores[device, b, :, len(held) :].any()  # no page: key 0, score 0
    for device in range(1, devices):  # or devices would select different rows
        np.testing.assert_array_equal(scores[device], scores[0])
    np.testing.assert_allclose(scores[0], striped(1, tables, steps)[0][0], atol=2e-6)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_striped_score_has_the_bits_of_an_unstriped_one(dim, steps):
    """A device with a stripe of the keys and one with all of them: or near ties would be broken differently."""
    pages, devices = 32, 8
    table = jnp.asarray(np.random.default_rng(0).permutation(pages)[None], jnp.int32)
    keys = normal(pages * PAGE, dim, seed=2)
    query, weights = jnp.asarray(normal(1, steps, HEADS, dim)), jnp.asarray(normal(1, steps, HEADS, seed=1))

    def score(striping):
        def body(shard):
            return index_keys.scores(
                shard[0], table, PAGE, query, weights, striping, Parallel("tp", devices)
            )[None]  # fmt: skip

        shards = keys.reshape(-1, striping.devices, dim).swapaxes(0, 1)
        shards = np.broadcast_to(shards, (devices, *shards.shape[1:])) if striping.devices == 1 else shards
        mapped = jax.shard_map(body, mesh=make_mesh(devices), in_specs=P("kv"), out_specs=P("kv"), check_vma=False)
        return np.asarray(jax.jit(mapped)(shards))

    whole, striped = score(Striping(1)), score(Striping(devices))
    np.testing.assert_array_equal(whole.view(np.uint32), striped.view(np.uint32))


def test_addresses_of_positions():
    table = jnp.array([[5, 0, -1], [-1, -1, -1]], jnp.int32)
    positions = jnp.array([[0, 7, 8, 15, 16, 23, 24]], jnp.int32)
    found = index_keys.address(table, 8, jnp.broadcast_to(positions, (2, 7)))
    assert found.tolist() == [[40, 47, 0, 7, -1, -1, -1], [-1] * 7]
