"""Memory kinds bit for bit, and host pools that are read and written where they are."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ula_jax import memory
from ula_jax.parallel import make_mesh

LAYERS, SLOTS, WORDS = 3, 11, 5


def pool(seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (LAYERS, SLOTS, WORDS), np.uint32)


def on_host(array):
    return jax.device_put(array, memory.sharding(make_mesh(1), P(), host=True))


def kind(array):
    return array.sharding.memory_kind


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.uint32, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("jitted", [False, True])
def test_f24_every_bit_survives_every_memory_kind(dtype, jitted):
    array = np.arange(3 * 8 * 128).reshape(3, 8, 128).astype(np.uint16 if dtype != np.uint32 else np.uint32)
    array = array.view(dtype) if dtype == ml_dtypes.bfloat16 else array.astype(dtype)
    there, back = (jax.jit(f) if jitted else f for f in (memory.to_host, memory.to_device))
    hosted = there(jnp.asarray(array))
    assert kind(hosted) == "pinned_host"
    returned = back(hosted)
    assert kind(returned) == "device"
    for copy in (hosted, returned, on_host(array)):
        np.testing.assert_array_equal(np.asarray(copy).view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("devices", [1, 8])
def test_f24_shards_keep_their_bits_and_kind(devices):
    array = np.arange(8 * 64, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(8, 64)
    for host in (False, True):
        sharded = jax.device_put(array, memory.sharding(make_mesh(devices), P("kv"), host=host))
        assert kind(sharded) == ("pinned_host" if host else "device")
        assert len(sharded.addressable_shards) == devices
        for shard in sharded.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data).view(np.uint16), array[shard.index].view(np.uint16))


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_host_gather_equals_numpy(layer):
    data, slots = pool(), np.array([4, -1, 0, 10, 4, -1], np.int32)
    found = jax.jit(functools.partial(memory.host_gather, layer=layer))(on_host(data), slots)
    assert kind(found) == "device"
    expected = np.where((slots >= 0)[:, None], data[:, slots], 0)
    np.testing.assert_array_equal(found, expected if layer is None else expected[layer])


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_host_scatter_equals_numpy_and_stays_on_the_host(layer):
    data, slots = pool(), np.array([4, -1, 0, 10, -1], np.int32)
    rows = pool(1)[:, :5] if layer is None else pool(1)[layer, :5]
    expected = data.copy()
    expected[slice(None) if layer is None else layer, slots[slots >= 0]] = rows[..., slots >= 0, :]
    written = jax.jit(functools.partial(memory.host_scatter, layer=layer))(on_host(data), slots, rows)
    assert kind(written) == "pinned_host"
    assert written.shape == data.shape
    np.testing.assert_array_equal(written, expected)


def test_nothing_but_empty_changes_nothing():
    data, nothing = pool(), np.full(4, -1, np.int32)
    assert not np.asarray(jax.jit(memory.host_gather)(on_host(data), nothing)).any()
    written = jax.jit(memory.host_scatter)(on_host(data), nothing, pool(1)[:, :4])
    np.testing.assert_array_equal(written, data)


def pool_copies(function, donate, *arguments):
    """Operations of the compiled program that make another pool, and whether the result is the donated buffer."""
    compiled = jax.jit(function, donate_argnums=0 if donate else ()).lower(*arguments).compile()
    text = compiled.as_text()
    sizes = {f"u32[{LAYERS},{SLOTS},{WORDS}]", f"u32[{LAYERS * SLOTS},{WORDS}]"}
    copies = re.findall(r"= (u32\[[\d,]+\])\S* copy\(", text)
    return [copy for copy in copies if copy in sizes], "may-alias" in text or "must-alias" in text


@pytest.mark.parametrize("layer", [None, 1])
def test_a_donated_host_pool_is_written_in_place(layer):
    slots = np.array([3, -1], np.int32)
    rows = pool(1)[:, :2] if layer is None else pool(1)[0, :2]
    scatter = functools.partial(memory.host_scatter, layer=layer)
    assert pool_copies(scatter, True, on_host(pool()), slots, rows) == ([], True)
    copies, aliased = pool_copies(scatter, False, on_host(pool()), slots, rows)
    assert copies
    assert not aliased
    before = jax.jit(memory.host_scatter, donate_argnums=())(on_host(pool()), slots, pool(1)[:, :2])  # JAX's own buffer
    address = before.unsafe_buffer_pointer()
    after = jax.jit(scatter, donate_argnums=0)(before, slots, rows)
    assert after.unsafe_buffer_pointer() == address
    assert before.is_deleted()


@pytest.mark.parametrize("layer", [None, 1])
def test_a_read_copies_rows_and_not_the_pool(layer):
    gather = functools.partial(memory.host_gather, layer=layer)
    assert pool_copies(gather, False, on_host(pool()), np.array([3, -1], np.int32))[0] == []
