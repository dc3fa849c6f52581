"""Rows between the pools in Triton, as XLA compiles it for an H200: no pool is copied, and nothing that reads or writes
a host pool can run at another time than it should.

Needs TRITON_INTERPRET=0: kernels that are to be interpreted cannot be compiled."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import sparse_gather as sg
from pallas_kernels import triton_call
from pallas_kernels.dispatch import assume_platform
from pallas_kernels.sparse_mla import sparse_mla_and_fetch
from tests.aot.h200 import compile_step
from tests.aot.hlo import Shape, large_buffers, triton_calls, unaliased
from tests.aot.steps import read
from ula_jax import memory
from ula_jax.parallel import make_mesh
from ula_jax.rows import RowFormat

with assume_platform("gpu"):
    WHY_NOT = triton_call.forms()["triton"]
pytestmark = [pytest.mark.aot, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

LAYERS, DEVICE, HOST, ROWS = 4, 5000, 20_000, 64
FP8, BF16 = (160, 4), (288,)
LISTS = 4


def compiled(function, words, donate=(0, 1)):
    """(program, bytes of temporaries) of `function(device lanes, host lanes, *four lists)`."""
    mesh = make_mesh()

    def shape(dims, dtype=jnp.uint32, host=False):
        place = memory.sharding(mesh, jax.sharding.PartitionSpec(), host=host)
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    device = tuple(shape((LAYERS, DEVICE, n)) for n in words)
    host = tuple(shape((HOST, LAYERS, n), host=True) for n in words)
    lists = [shape((ROWS,), jnp.int32)] * LISTS
    step = jax.jit(lambda *a: function(*a), donate_argnums=donate)
    return read(compile_step(step, device, host, *lists, devices=1))


def lanes(words, device=True, host=True):
    return [Shape("u32", (LAYERS, DEVICE, n)) for n in words if device] + [
        Shape("u32", (HOST, LAYERS, n), host=True) for n in words if host
    ]


def limit(words):
    """Bytes of a layer of the smallest lane."""
    return 4 * DEVICE * min(words)


def exchange(device, host, source, target, victim, refuge):
    return sg.exchange(device, host, source, target, victim, refuge, implementation="triton")


def fetch(device, host, source, target, *_):
    return sg.fetch(device, host, source, target, implementation="triton")


def fetch_in_attention(device, host, source, target, *_):
    fmt = RowFormat("fp8", 512, 64)
    attended_to = tuple(jnp.ones((1, 20, words), jnp.uint32) for words in fmt.lanes)
    query, slots = jnp.ones((1, 1, 8, 576)), jnp.ones((1, 1, 64), jnp.int32)
    return sparse_mla_and_fetch(
        query, attended_to, 0, slots, fmt, device, host, source, target, scale=1.0, implementation="triton"
    )


def write_back(device, host, victim, refuge, *_):
    return sg.write_back(device, host, victim, refuge, implementation="triton")


def write_host(device, host, slots, *_):
    rows = jnp.ones((ROWS, host[0].shape[2]), jnp.uint32)
    return sg.write_host(host[0], 1, slots, rows, implementation="triton")


def steps_in_a_scan(device, host, *lists):
    def step(pools, turn):
        pools = exchange(*pools, lists[0] + turn, *lists[1:])
        return pools, sg.gather(pools[0][0], 1, lists[1]).sum()

    return jax.lax.scan(step, (device, host), jnp.arange(3, dtype=jnp.int32))


def reads_between(device, host, *lists):
    """The pool is read before and after it changes; barriers say that it changes after the read."""
    seen = []
    for _ in range(2):
        rows = sg.read_host(host[0], 2, lists[0], implementation="triton")
        rows, host = jax.lax.optimization_barrier((rows, host))
        device, host = exchange(device, host, *lists)
        seen.append(rows)
    return device, host, seen


@pytest.mark.parametrize("words", [FP8, BF16])
@pytest.mark.parametrize("step", [exchange, steps_in_a_scan, reads_between], ids=lambda step: step.__name__)
def test_exchanged_pools_are_not_copied(step, words):
    program, temporary = compiled(step, words)
    assert large_buffers(program, {(s.dtype, s.size) for s in lanes(words)}, limit(words)) == []
    assert unaliased(program, lanes(words)) == []
    assert temporary < limit(words)


@pytest.mark.parametrize(
    ("step", "donate", "pools"),
    [
        (fetch, 0, lanes(FP8, host=False)),
        (fetch_in_attention, 0, lanes(FP8, host=False)),
        (write_back, 1, lanes(FP8, device=False)),
        (write_host, 1, lanes(FP8[:1], device=False)),
    ],
    ids=["fetch", "fetch_in_attention", "write_back", "write_host"],
)
def test_one_way_neither(step, donate, pools):
    program, temporary = compiled(step, FP8, donate)
    assert large_buffers(program, {(s.dtype, s.size) for s in lanes(FP8)}, limit(FP8)) == []
    assert unaliased(program, pools) == []
    assert temporary < limit(FP8)


def test_the_host_pools_pass_by_the_exchange_before_and_after_it():
    """Each lane is taken over before the kernel and again after it, and the second time needs a result of the kernel:
    XLA knows of no other reason to keep this order, and must not lose it."""
    program, _ = compiled(exchange, FP8)
    calls = [(call.name, call.operands) for call in triton_calls(program)]
    assert len(calls) == 5
    names = [name for name, _ in calls]
    (at,) = [n for n, (_, operands) in enumerate(calls) if len(operands) == 8]
    assert at == 2
    claimed = set(names[:2])
    assert claimed < set(calls[at][1])
    parts = {i.name for i in program.executed() if i.opcode == "get-tuple-element" and names[at] in i.operands}
    for _, (token, pool) in calls[3:]:
        assert token in parts
        assert pool in claimed


def test_a_reader_without_a_barrier_makes_xla_copy_and_not_misread():
    """It reads the pool as it was: XLA may run it when it likes, and so keeps the pool for it."""

    def late(device, host, *lists):
        rows = sg.read_host(host[0], 2, lists[0], implementation="triton")
        return *exchange(device, host, *lists), rows

    program, temporary = compiled(late, FP8)
    assert any("on the host" in line for line in large_buffers(program, (), limit(FP8)))
    assert temporary >= limit(FP8)


@pytest.mark.parametrize("words", [FP8, BF16])
def test_a_pool_that_is_kept_is_copied_before_the_first_call(words):
    program, _ = compiled(exchange, words, donate=())
    assert len(unaliased(program, lanes(words))) == 2 * len(words)
    order = [i for i in program.executed() if i.opcode in ("copy", "custom-call")]
    calls = {call.name for call in triton_calls(program)}
    for pool in (s for s in lanes(words) if s.host):
        copied = next(n for n, i in enumerate(order) if i.opcode == "copy" and i.shapes[0] == pool)
        first = next(n for n, i in enumerate(order) if i.name in calls and pool in i.shapes)
        assert copied < first
        assert order[copied].name in order[first].operands
