"""From selected addresses to slots: `find` says which rows are on the device and which must come, `move` changes the
map once a policy has given slots for those, and `slots_of` looks the slots up.

Requests and query tokens may select the same row; repeats are removed by bitmaps over the slots of both tiers, which
also bring the rows of the host into the order in which a link reads them fastest. Nothing is sorted.

`implementation`: `auto`, `reference` (jnp, any platform), `triton` (CUDA) or `triton_interpret` (the same kernels in
Triton's interpreter: slow, for tests).
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Int32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import choose
from pallas_kernels.resolve import reference
from pallas_kernels.resolve.tables import EMPTY, NOWHERE, Counts, Found, Moves, Tables, limit

PREFER = ("triton", "reference")


def find(
    tables: Tables, selected: Int32[Array, " n"], new: Int32[Array, " new"], *, implementation: str = "auto"
) -> Found:
    """The rows that a step needs: those of the addresses `selected` (EMPTY anywhere, repeats allowed) and `new` (EMPTY
    anywhere, distinct). New rows that are nowhere yet are fresh; selected ones that are nowhere are left out."""
    return _form("find", implementation)(tables, selected, new)


def move(
    tables: Tables,
    arriving: Int32[Array, " arrivals"],
    source: Int32[Array, " arrivals"],
    given: Int32[Array, " arrivals"],
    counts: Int32[Array, " counts"],
    *,
    copies: bool = False,
    implementation: str = "auto",
) -> tuple[Moves, Tables, Int32[Array, " counts"]]:
    """Put each address of `arriving` (from host slot `source`, as `Found` has both) into the device slot `given` at its
    place. What to move, the tables after it, and `counts` with victims, rows written and rows lost added.

    The slots are distinct, none of a needed row, those first that hold nothing, and EMPTY where there is no address.
    Without `copies` a row that leaves goes to the host slot of the row that takes its place; for fresh rows free host
    slots are used up, and where a device slot was free the host slot of the row becomes free. With `copies` the host
    slot of a row is its address and stays its own, and a row that is there already is not written again.
    """
    return _form("move", implementation)(tables, arriving, source, given, counts, copies)


def slots_of(
    location: Int32[Array, " addresses"],
    selected: Int32[Array, " n"],
    new: Int32[Array, " new"],
    *,
    implementation: str = "auto",
) -> tuple[Int32[Array, " n"], Int32[Array, " new"]]:
    """Device slots of both lists of addresses; EMPTY where an address is EMPTY or its row is elsewhere."""
    return _form("slots_of", implementation)(location, selected, new)


def _form(name: str, implementation: str) -> Any:
    chosen = choose(f"resolve.{name}", implementation, {"reference": None, **triton_call.forms()}, PREFER)
    if chosen == "reference":
        return getattr(reference, name)
    from pallas_kernels.resolve import triton

    return partial(getattr(triton, name), interpret=chosen == "triton_interpret")


__all__ = ["EMPTY", "NOWHERE", "Counts", "Found", "Moves", "Tables", "find", "limit", "move", "slots_of"]
