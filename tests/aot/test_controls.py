"""Programs that do what a step must not: each is found out by the checks of `test_step_hlo.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import sparse_gather
from tests.aot.h200 import compile_step
from tests.aot.hlo import Shape, collectives, host_programs, large_buffers, unaliased
from tests.aot.steps import DEVICES, read
from ula_jax import memory, pool
from ula_jax.parallel import DEVICES as AXES
from ula_jax.parallel import TP, Parallel, make_mesh
from ula_jax.rows import RowFormat

pytestmark = pytest.mark.aot

FORMAT = RowFormat("fp32", 32, 8)
LAYERS, SLOTS, WORDS, ROWS = 2, 5000, 40, 64
LIMIT = SLOTS * WORDS * 4
LANE = Shape("u32", (1, LAYERS, SLOTS, WORDS))
HOST_LANE = Shape("u32", (1, SLOTS, LAYERS, WORDS), True)


def over_devices(function, *args, host=(), donate=()):
    """(program, bytes of temporary memory) of `function` on each device's part of arrays [devices, ...]."""
    mesh = make_mesh(Parallel(tp=DEVICES))

    def local(*parts):
        results = function(*(part[0] for part in parts))
        return jax.tree.map(lambda leaf: jax.lax.expand_dims(leaf, (0,)), results)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    given = [
        jax.ShapeDtypeStruct(
            (DEVICES, *shape), dtype, sharding=memory.sharding(mesh, P(AXES), host=number in host)
        )
        for number, (shape, dtype) in enumerate(args)
    ]
    return read(compile_step(jax.jit(mapped, donate_argnums=donate), *given, devices=DEVICES))


POOL = ((LAYERS, SLOTS, WORDS), jnp.uint32)
HOST_POOL = ((SLOTS, LAYERS, WORDS), jnp.uint32)
SLOT_LIST = ((ROWS,), jnp.int32)


def exchange(device, host, *slots):
    empty = pool.init(LAYERS, FORMAT, 1, 1, 1)
    group = pool.Group((device,), (host,), empty.mapping)
    group = pool.exchange(group, *slots)
    return group.device[0], group.host[0]


def compile_exchange(donate=(0, 1), host=(1,)):
    return over_devices(exchange, POOL, HOST_POOL, *[SLOT_LIST] * 4, host=host, donate=donate)


def test_an_exchange_of_rows_is_clean():
    program, temporary = compile_exchange()
    assert large_buffers(program, (), LIMIT) == []
    assert unaliased(program, [LANE, HOST_LANE]) == []
    assert host_programs(program) == []
    assert temporary < LIMIT


def move(device, source, target, barrier):
    rows = sparse_gather.gather_layers(device, source)
    if barrier:
        rows = jax.lax.optimization_barrier(rows)
    return sparse_gather.scatter_layers(device, target, rows), rows


def test_a_pool_read_late_is_copied_and_a_barrier_cures_it():
    """Data order is not enough: XLA puts the gather into the scatter's kernel, which then needs the pool twice."""
    program, temporary = over_devices(partial(move, barrier=False), POOL, SLOT_LIST, SLOT_LIST, donate=(0,))
    found = large_buffers(program, (), LIMIT)
    assert found
    assert all(line.startswith(f"copy makes {LANE.dtype}") for line in found)
    assert temporary >= LIMIT
    program, temporary = over_devices(partial(move, barrier=True), POOL, SLOT_LIST, SLOT_LIST, donate=(0,))
    assert large_buffers(program, (), LIMIT) == []
    assert temporary < LIMIT


def test_a_host_pool_read_after_it_was_written_is_copied():
    def late(host, source, target):
        written = sparse_gather.write_host(host, 0, target, jnp.ones((ROWS, WORDS), jnp.uint32))
        first = sparse_gather.read_host(written, 0, target)[0, 0].astype(jnp.int32)
        return written, sparse_gather.read_host(host, 0, source + first)

    program, temporary = over_devices(late, HOST_POOL, SLOT_LIST, SLOT_LIST, host=(0,), donate=(0,))
    found = large_buffers(program, (), LIMIT)
    assert found
    assert all(line.startswith("copy makes") and "on the host" in line for line in found)
    assert temporary >= LIMIT


def test_a_pool_that_is_not_donated_is_copied():
    program, _ = compile_exchange(donate=())
    assert len(unaliased(program, [LANE, HOST_LANE])) == 2
    found = [line.split(":")[0] for line in large_buffers(program, (), LIMIT)]
    assert sorted(found) == [f"copy makes {LANE}", f"copy makes {HOST_LANE}"]


def test_a_lane_of_few_words_is_known_by_its_size():
    def write(scales, slots):
        return scales.at[:, slots].set(jnp.uint32(0), mode="drop"), scales[0, :ROWS]

    program, _ = over_devices(write, ((LAYERS, SLOTS, 1), jnp.uint32), SLOT_LIST)
    assert large_buffers(program, (), LIMIT) == []
    assert large_buffers(program, {("u32", LAYERS * SLOTS)}, LIMIT)


def test_one_layer_cut_out_of_a_pool_is_found():
    def cut(device, slots):
        layer = jax.lax.optimization_barrier(device[1])
        return layer.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False)

    program, _ = over_devices(cut, POOL, SLOT_LIST)
    assert large_buffers(program, (), LIMIT)


def test_a_pass_over_a_whole_pool_is_found_without_a_copy():
    program, _ = over_devices(lambda device, keep: jnp.where(keep[0] > 0, device, 0), POOL, SLOT_LIST, donate=(0,))
    assert unaliased(program, [LANE]) == []
    found = large_buffers(program, (), LIMIT)
    assert found
    assert all(line.startswith("fusion") for line in found)


def test_a_pool_on_the_wrong_side_is_found():
    program, _ = over_devices(
        lambda rows, slots: rows.at[:, slots].set(jnp.uint32(0), mode="drop"), POOL, SLOT_LIST, donate=(0,)
    )
    assert unaliased(program, [LANE]) == []
    assert unaliased(program, [LANE._replace(host=True)])


def test_history_gathered_from_all_devices_is_found():
    """The stripe axis reshaped away: XLA then gathers the array before it reads a few rows of it."""
    mesh = make_mesh(Parallel(tp=DEVICES))

    @jax.jit
    def take(rows, positions):
        return rows.reshape(-1, WORDS)[positions]

    rows = jax.ShapeDtypeStruct(
        (SLOTS, DEVICES, WORDS), jnp.uint32, sharding=NamedSharding(mesh, P(None, TP, None))
    )
    positions = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=NamedSharding(mesh, P()))
    program, _ = read(compile_step(take, rows, positions, devices=DEVICES))
    assert max(nbytes for _, nbytes in collectives(program)) == DEVICES * SLOTS * WORDS * 4
    assert any("all-gather" in line for line in large_buffers(program, (), LIMIT))


def test_a_gather_run_by_the_cpu_is_found():
    from jax.experimental import compute_on

    run_on = getattr(compute_on, "compute_on2", None) or compute_on.compute_on  # renamed in JAX 0.11 or 0.12

    def fetch(host, slots):
        gather = run_on(
            lambda rows, index: rows.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False),
            compute_type="device_host",
            out_memory_spaces=jax.memory.Space.Host,
        )
        return memory.to_device(gather(host, memory.to_host(slots)))

    program, _ = over_devices(fetch, POOL, SLOT_LIST, host=(0,))
    assert host_programs(program)


def test_reader_sees_every_instruction():
    """A line that the reader could not take apart would be a line unchecked."""
    program, _ = compile_exchange()
    lines = [line for line in program.text.splitlines() if " = " in line and line.startswith("  ")]
    assert len(lines) == sum(map(len, program.computations.values()))
