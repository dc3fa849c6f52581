"""Address resolution: the reference against dictionaries, the Triton form against the reference."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import resolve, triton_call
from pallas_kernels.resolve import EMPTY, NOWHERE, Counts, Tables
from pallas_kernels.resolve.shapes import CARDS, SMALL, Shape

INTERPRET = triton_call.forms()["triton_interpret"] is None


def tables(shape: Shape, copies: bool, full: float, rng) -> Tables:
    """Pools filled to a share `full`. Without copies host slots are random; with them a slot is the row's address."""
    addresses = shape.host if copies else shape.device + shape.host
    location = np.full(addresses, NOWHERE, np.int32)
    device, host = np.full(shape.device, EMPTY, np.int32), np.full(shape.host, EMPTY, np.int32)
    order = rng.permutation(addresses).astype(np.int32)
    here = order[: min(int(full * shape.device), addresses)]
    slots = rng.permutation(shape.device)[: here.size]
    location[here], device[slots] = slots, here
    there = order[here.size :][: int(full * shape.host)]
    refuge = there if copies else rng.permutation(shape.host)[: there.size]
    location[there], host[refuge] = ~refuge, there
    if copies:
        kept = here[rng.random(here.size) < 0.5]
        host[kept] = kept
    free = rng.permutation(np.flatnonzero(host == EMPTY)) if not copies else np.zeros(0, np.int32)
    stack = np.full(shape.host, EMPTY, np.int32)
    stack[: free.size] = free
    return Tables(*map(jnp.asarray, (location, device, host, stack, np.int32(free.size))))


def asked(shape: Shape, known: Tables, rng, hits: float = 0.5):
    """Selected addresses with repeats and padding, and new ones, some of which are selected too or stored already."""
    location = np.asarray(known.location)
    stored, nowhere = np.flatnonzero(location != NOWHERE), np.flatnonzero(location == NOWHERE)
    # No more distinct rows than there are device slots, unless the shape is meant to overflow.
    few = shape.selected if shape == SMALL["more_than_fit"] else max(0, shape.device - shape.new)
    here, there = stored[location[stored] >= 0], stored[location[stored] < 0]
    known_rows = [rng.permutation(here)[: int(few * hits)], rng.permutation(there)[: few - int(few * hits)]]
    choice = np.concatenate([*known_rows, [EMPTY]])
    new = np.full(shape.new, EMPTY, np.int32)
    real = rng.random(shape.new) < 0.8
    fresh = rng.permutation(nowhere)[: real.sum()]
    new[np.flatnonzero(real)[: fresh.size]] = fresh
    if shape.new > 2 and choice.size > 1:
        new[0] = choice[0]
    selected = rng.choice(np.concatenate([choice, new]), shape.selected).astype(np.int32)
    return jnp.asarray(selected), jnp.asarray(new)


def given(known: Tables, found, rng):
    """Slots as a policy gives them: free ones first, then any that the step does not need."""
    device = np.asarray(known.device_address)
    idle = np.setdiff1d(np.flatnonzero(device != EMPTY), np.asarray(found.slots))
    order = np.concatenate([rng.permutation(np.flatnonzero(device == EMPTY)), rng.permutation(idle)])
    slots = np.full(found.arriving.shape[0], EMPTY, np.int32)
    some = order[: int(found.count)]
    slots[: some.size] = some
    return jnp.asarray(slots)


@cache
def compiled(form: str):
    return (
        jax.jit(partial(resolve.find, implementation=form)),
        jax.jit(partial(resolve.move, implementation=form), static_argnames="copies"),
        jax.jit(partial(resolve.slots_of, implementation=form)),
    )


def step(known: Tables, selected, new, rng, form: str, copies: bool):
    """Everything that one step computes."""
    find, move, slots_of = compiled(form)
    found = find(known, selected, new)
    slots = given(known, found, rng)
    moves, after, counts = move(known, found.arriving, found.source, slots, found.counts, copies=copies)
    return found, slots, moves, after, Counts(*counts), slots_of(after.location, selected, new)


def settings(shape: Shape, seed: int):
    """Pools from empty to full, in both ways to use the host."""
    rng = np.random.default_rng(seed)
    for full in (0.0, 0.6, 0.9, 1.0):
        for copies in (False, True):
            known = tables(shape, copies, full, rng)
            yield known, *asked(shape, known, rng), copies


def stored(known: Tables) -> dict[int, int]:
    location = np.asarray(known.location)
    return {int(a): int(location[a]) for a in np.flatnonzero(location != NOWHERE)}


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_equals_dictionaries(name):
    for seed in range(3):
        for known, selected, new, copies in settings(SMALL[name], seed):
            found, slots, moves, after, counts, (placed, places) = step(
                known, selected, new, np.random.default_rng(seed), "reference", copies
            )
            _compare(stored(known), known, selected, new, copies, found, slots, moves, after, counts)
            where = stored(after)
            assert placed.tolist() == [max(where.get(a, EMPTY), EMPTY) for a in selected.tolist()]
            assert places.tolist() == [max(where.get(a, EMPTY), EMPTY) for a in new.tolist()]


def _compare(where, known, selected, new, copies, found, slots, moves, after, counts):
    asked = (set(selected.tolist()) | set(new.tolist())) - {EMPTY}
    hits = sorted(where[a] for a in asked if where.get(a, EMPTY) >= 0)
    misses = sorted((~where[a], a) for a in asked if where.get(a, 0) < 0)
    fresh = [a for a in new.tolist() if a != EMPTY and a not in where]
    most = found.arriving.shape[0]
    assert found.slots.tolist() == hits + [EMPTY] * (2 * most - len(hits))
    wanted = (fresh + [a for _, a in misses])[:most]
    assert found.arriving.tolist() == wanted + [EMPTY] * (most - len(wanted))
    assert found.source.tolist() == ([EMPTY] * len(fresh) + [slot for slot, _ in misses] + [EMPTY] * most)[:most]
    assert int(found.count) == len(wanted)
    assert counts[:5] == (
        sum(a >= 0 for a in selected.tolist()), len(hits), len(misses), len(fresh), int(known.host_free_count)
    )  # fmt: skip

    held, device = np.asarray(known.host_address), np.asarray(known.device_address)
    stack = np.asarray(known.host_free)[: int(known.host_free_count)].tolist()
    expected, victims, freed = [], 0, []
    for address, slot, source in zip(wanted, slots.tolist(), found.source.tolist(), strict=False):
        pair = [slot if source >= 0 and slot >= 0 else EMPTY, EMPTY, EMPTY]
        if slot >= 0:
            victim = int(device[slot])
            where[address] = slot
            if victim >= 0:
                victims += 1
                refuge = victim if copies else source if source >= 0 else EMPTY
                if not copies and source < 0:
                    refuge = 0  # whichever was free: see below
                where[victim] = ~refuge
                if not (copies and held[victim] >= 0):
                    pair[1:] = [slot, refuge]
            elif source >= 0 and not copies:
                freed.append(source)
        expected.append(pair)
    found_moves = np.stack(moves, axis=1)[: len(wanted)].tolist()
    for pair, move, source in zip(expected, found_moves, found.source.tolist(), strict=False):
        if not copies and source < 0 and pair[1] >= 0:
            assert move[2] in stack, "a fresh row's victim goes to a slot that was free"
            stack.remove(move[2])
            where[int(device[pair[1]])] = ~move[2]
            pair[2] = move[2]
        assert move == pair
    assert np.all(np.stack(moves)[:, len(wanted) :] == EMPTY)
    lost = len(fresh) + len(misses) - int((slots >= 0).sum())
    assert counts[5:] == (victims, int((moves.victim >= 0).sum()), lost)
    if lost:
        return

    assert stored(after) == where
    tier = {a: s for a, s in where.items() if s >= 0}
    occupied = np.asarray(after.device_address)
    assert {int(occupied[s]): int(s) for s in np.flatnonzero(occupied >= 0)} == tier
    holders = np.asarray(after.host_address)
    if copies:
        for address, place in where.items():
            assert place >= 0 or holders[address] == address
        assert np.all(holders[held >= 0] == held[held >= 0])
    else:
        left = {a: ~s for a, s in where.items() if s < 0}
        assert {int(holders[s]): int(s) for s in np.flatnonzero(holders >= 0)} == left
        free = np.asarray(after.host_free)[: int(after.host_free_count)].tolist()
        assert sorted(free) == sorted(stack + freed)


@pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", SMALL)
def test_triton_interpreted_equals_reference(name):
    for case in settings(SMALL[name], seed=7):
        _same(case, "triton_interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *CARDS])
def test_triton_equals_reference_on_a_gpu(name):
    for case in settings({**SMALL, **CARDS}[name], seed=8):
        _same(case, "triton")


def _same(case, form):
    *arguments, copies = case
    expected = step(*arguments, np.random.default_rng(1), "reference", copies)
    found = step(*arguments, np.random.default_rng(1), form, copies)
    # Lost rows stop the engine: where they lie afterwards means nothing.
    compared = 3 if int(expected[4].lost) else len(expected)
    for one, other in zip(
        jax.tree.leaves((found[:compared], found[4])), jax.tree.leaves((expected[:compared], expected[4])), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_find_leaves_out_what_is_nowhere():
    known = tables(Shape(4, 4, 0, 0), False, 0.0, np.random.default_rng(0))
    found = resolve.find(known, jnp.asarray([3, 2], jnp.int32), jnp.asarray([2, -1], jnp.int32))
    assert found.arriving.tolist() == [2, -1, -1, -1]
    assert Counts(*found.counts.tolist())[:4] == (2, 0, 0, 1)
