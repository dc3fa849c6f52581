"""Address resolution in jnp: the meaning, the CPU path and the oracle of the other forms."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.pb_lru import first_set, pack
from pallas_kernels.resolve.tables import EMPTY, NOWHERE, Counts, Found, Moves, Tables, limit


def find(tables: Tables, selected: Int32[Array, " n"], new: Int32[Array, " new"]) -> Found:
    most = limit(selected.shape[0], new.shape[0], tables)
    location = lookup(tables.location, jnp.concatenate([selected, new]), NOWHERE)
    stored = location != NOWHERE
    # Each tier as a bitmap: repeats fall together, and its bits are read off in ascending order.
    hits, hit = _members(jnp.maximum(location, EMPTY), tables.device_address.shape[0], most)
    on_host = _only(stored & (location < 0), ~location)
    misses, missed = _members(on_host, tables.host_address.shape[0], most)

    is_fresh = (new >= 0) & ~stored[selected.shape[0] :]
    fresh, nothing = _count(is_fresh), jnp.full(most, EMPTY, jnp.int32)
    behind = _only(misses >= 0, fresh + jnp.arange(most, dtype=jnp.int32))
    arriving = store(nothing, _places(is_fresh), new)
    arriving = store(arriving, behind, lookup(tables.host_address, misses, EMPTY))
    source = store(nothing, behind, misses)
    count = jnp.minimum(fresh + missed, most)
    counts = Counts(
        entries=_count(selected >= 0),
        hits=hit,
        misses=missed,
        fresh=fresh,
        free=tables.host_free_count,
        victims=jnp.int32(0),
        written=jnp.int32(0),
        lost=fresh + missed - count,
    )
    return Found(jnp.concatenate([hits, nothing]), arriving, source, count, jnp.stack(counts))


def move(
    tables: Tables,
    arriving: Int32[Array, " arrivals"],
    source: Int32[Array, " arrivals"],
    given: Int32[Array, " arrivals"],
    counts: Int32[Array, " counts"],
    copies: bool,
) -> tuple[Moves, Tables, Int32[Array, " counts"]]:
    total = Counts(*counts)
    comes = (arriving >= 0) & (given >= 0)
    victim = lookup(tables.device_address, jnp.where(comes, given, EMPTY), EMPTY)
    leaves, from_host = victim >= 0, comes & (source >= 0)
    if copies:
        written = leaves & (lookup(tables.host_address, victim, EMPTY) < 0)
        refuge, host_address, host_free, free = victim, tables.host_address, tables.host_free, total.free
    else:
        swaps, pushed, popped = leaves & from_host, from_host & ~leaves, leaves & ~from_host
        # Free slots are given first, and to new rows first: while rows are pushed, none has to be popped.
        top = total.free - _count(popped)
        refuge = jnp.where(popped, top + _places(popped), EMPTY)
        refuge = jnp.where(swaps, source, lookup(tables.host_free, refuge, EMPTY))
        written = refuge >= 0
        host_address = store(tables.host_address, _only(pushed, source), jnp.full_like(given, EMPTY))
        host_free = store(tables.host_free, _only(pushed, top + _places(pushed)), source)
        free = total.free + _count(pushed) - _count(popped & written)

    location = store(tables.location, _only(refuge >= 0, victim), ~refuge)
    after = Tables(
        location=store(location, _only(comes, arriving), given),
        device_address=store(tables.device_address, _only(comes, given), arriving),
        host_address=store(host_address, refuge, victim),
        host_free=host_free,
        host_free_count=free,
    )
    total = total._replace(
        victims=total.victims + _count(leaves),
        written=total.written + _count(written),
        lost=total.lost + _count((arriving >= 0) & ~comes) + _count(leaves & (refuge < 0)),
    )
    return Moves(_only(from_host, given), _only(written, given), _only(written, refuge)), after, jnp.stack(total)


def slots_of(
    location: Int32[Array, " addresses"], selected: Int32[Array, " n"], new: Int32[Array, " new"]
) -> tuple[Int32[Array, " n"], Int32[Array, " new"]]:
    found = lookup(location, selected, EMPTY), lookup(location, new, EMPTY)
    return jnp.maximum(found[0], EMPTY), jnp.maximum(found[1], EMPTY)


def _members(at: Int32[Array, " n"], size: int, limit: int) -> tuple[Int32[Array, " limit"], Int32[Array, ""]]:
    """The distinct numbers below `size`, ascending, EMPTY padded, and how many there are."""
    held = store(jnp.zeros(size, bool), at, True)
    count = _count(held)
    return first_set(pack(held), count, limit), count


def _places(members: Bool[Array, " n"]) -> Int32[Array, " n"]:
    """Number of each member among the members, EMPTY for the others."""
    return jnp.where(members, jnp.cumsum(members, dtype=jnp.int32) - 1, EMPTY)


def _only(members: Bool[Array, " n"], values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    return jnp.where(members, values, EMPTY)


def _count(members: Bool[Array, " n"]) -> Int32[Array, ""]:
    return jnp.sum(members, dtype=jnp.int32)


def lookup(table: Int32[Array, " size"], index: Int32[Array, "*n"], missing: int) -> Int32[Array, "*n"]:
    """table[index], `missing` where index is EMPTY."""
    if not table.shape[0]:  # JAX cannot gather from nothing, as when there is no host tier
        return jnp.full_like(index, missing)
    found = table.at[index].get(mode="fill", fill_value=missing, wrap_negative_indices=False)
    return lax.optimization_barrier(found)  # fused into a later write of the table, it would cost a copy of it


def store(table: Array, index: Int32[Array, " n"], values: Array | bool) -> Array:
    """The table with values at distinct indices (or one value at any); EMPTY dropped."""
    return table.at[index].set(values, mode="drop", wrap_negative_indices=False) if table.shape[0] else table
