"""Memory kinds bit for bit; state that is built where it belongs, or refused with the numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ula_jax import memory
from ula_jax.parallel import DEVICES, Parallel, make_mesh

GIB = 1 << 30


def on_host(array):
    return jax.device_put(array, memory.sharding(make_mesh(), P(), host=True))


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
        sharded = jax.device_put(array, memory.sharding(make_mesh(Parallel(tp=devices)), P(DEVICES), host=host))
        assert kind(sharded) == ("pinned_host" if host else "device")
        assert len(sharded.addressable_shards) == devices
        for shard in sharded.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data).view(np.uint16), array[shard.index].view(np.uint16))


def state():
    return {"books": jnp.arange(16, dtype=jnp.int32).reshape(8, 2), "rows": jnp.zeros((8, 3, 5), jnp.uint32)}


def places(devices, host=True):
    mesh = make_mesh(Parallel(tp=devices))
    return {"books": memory.sharding(mesh, P(DEVICES)), "rows": memory.sharding(mesh, P(DEVICES), host=host)}


@pytest.mark.parametrize("devices", [1, 8])
def test_state_is_built_where_it_belongs(devices):
    made = memory.build(state, places(devices))
    assert {name: kind(leaf) for name, leaf in made.items()} == {"books": "device", "rows": "pinned_host"}
    assert all(len(leaf.addressable_shards) == devices for leaf in made.values())
    np.testing.assert_array_equal(made["books"], state()["books"])
    np.testing.assert_array_equal(made["rows"], state()["rows"])


class Card:
    """A GPU with so much memory."""

    platform = "gpu"

    def __init__(self, total, used=0):
        self.stats = {"bytes_limit": total, "bytes_in_use": used}

    def memory_stats(self):
        return self.stats

    def __str__(self):
        return "cuda:0"


def refused(monkeypatch, device, host, cards=1, limit=None, free=1000 * GIB):
    monkeypatch.delenv(memory.HOST_LIMIT, raising=False)
    if limit:
        monkeypatch.setenv(memory.HOST_LIMIT, str(limit))
    monkeypatch.setattr(memory, "host_free", lambda: free)
    monkeypatch.setattr(memory, "_pinned", {})
    with pytest.raises(ValueError, match="expected") as error:
        memory.check_room([Card(100 * GIB, 30 * GIB)] * cards, device, host)
    return str(error.value)


def test_too_little_device_memory_is_told_with_what_fits(monkeypatch):
    message = refused(monkeypatch, 70 * GIB + 5, 0)
    assert "expected 70.00 GiB free on cuda:0" in message
    assert "found 70.00 GiB of the 100.00 GiB" in message
    assert "lower the device budget by 5 bytes" in message
    memory.check_room([Card(100 * GIB, 30 * GIB)], 70 * GIB, 0)


def test_more_than_jax_pins_names_the_variable_and_both_ways_out(monkeypatch):
    """Two cards of 40 GiB each where JAX pins 64 in all."""
    message = refused(monkeypatch, 0, 40 * GIB, cards=2)
    assert "expected at most 64.00 GiB" in message
    assert "found host pools of 40.00 GiB for each of 2 devices, 80.00 GiB in all" in message
    assert "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=84" in message
    assert f"lower the host budget to {30 * GIB} bytes" in message
    monkeypatch.setenv(memory.HOST_LIMIT, "84")
    memory.check_room([Card(100 * GIB)] * 2, 0, 40 * GIB)


def test_memory_that_the_machine_does_not_have_is_refused(monkeypatch):
    message = refused(monkeypatch, 0, 40 * GIB, free=30 * GIB)
    assert "expected 64.00 GiB available, found 30.00 GiB" in message, "JAX takes a power of two"
    assert f"lower the host budget to {27 * GIB} bytes" in message
    message = refused(monkeypatch, 0, 40 * GIB, free=50 * GIB)
    assert "JAX takes a power of two unless less is allowed: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=44" in message
    monkeypatch.setenv(memory.HOST_LIMIT, "44")
    memory.check_room([Card(100 * GIB)], 0, 40 * GIB)


def test_both_tiers_of_a_cpu_are_one_memory():
    with pytest.raises(ValueError, match=r"host memory: expected .* GiB available, found"):
        memory.build(lambda: {"rows": jnp.zeros((1, 2**45, 5), jnp.uint32)}, {"rows": places(1, host=False)["rows"]})


def test_pinning_that_fails_is_told_like_the_rest(monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")

    monkeypatch.setattr(memory, "zeros_on_host", fails)
    with pytest.raises(ValueError, match=f"host memory: JAX found no 0.00 GiB .* raise {memory.HOST_LIMIT}"):
        memory.build(state, places(1))
