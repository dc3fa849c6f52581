"""The interface of a placement: where rows are stored, and how a step reaches those that attention reads.

The two rules that carry everything: a placement is a pure function of a pytree state, and it may never change *what*
attention reads, only *where*. Attention is one function, `sparse_mla`: a placement points it at rows in its pool, in
selection order (`attend_slots`), or hands it the rows (`attend_rows`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.pytree import pytree
from pallas_kernels.sparse_mla import sparse_mla
from ula_jax.parallel import Parallel
from ula_jax.pool import Group
from ula_jax.rows import RowFormat
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import UNSTRIPED, Striping
from ula_jax.types import EMPTY, Array, Bool, Float32, Int32, Lanes, Scalar

MOST_BYTES = 2**44
"""More memory than any machine has: no setting beyond it is proposed."""


@pytree(meta=("resident",))
@dataclass(frozen=True)
class Selection:
    """What one layer group needs in this step. `batch` are requests, `steps` their tokens in this step."""

    addresses: Int32[Array, "batch steps topk"]
    """Rows that each token attends to, by ascending position, EMPTY padded."""
    new: Int32[Array, "batch steps"]
    """Addresses of this step's own tokens, EMPTY for padding. Their rows come later, layer by layer."""
    requests: Int32[Array, " batch"]
    """Number of each request within its rank, EMPTY for padding."""
    ranked: Int32[Array, "batch depth"]
    """Each request's best-scored rows at its last token of this step, best first, EMPTY padded: as many as the policy
    wants to see (`policies.base.depth`), none if it does not look at scores."""
    margins: Float32[Array, "batch depth"]
    """Index scores of `ranked` minus the lowest selected score."""
    resident: bool = False
    """The caller knows that no row of this history is on the host, and that the new ones fit the device beside the
    others. Nothing then moves, and a placement may leave out all that only prepares for it."""


@pytree(meta=("in_place",))
@dataclass(frozen=True)
class Readable:
    """Where the selected rows can be read in this step, and where the new rows go."""

    locations: Int32[Array, "batch steps topk"]
    """Locations (ula_jax.mapping) on this device; EMPTY or NOWHERE where it has nothing to read."""
    valid: Bool[Array, "batch steps topk"]
    new_device: Int32[Array, " tokens"]
    """Device slots of the new rows (batch times steps of them), EMPTY where none."""
    new_host: Int32[Array, " tokens"]
    """Host slots of the new rows, EMPTY where none."""
    new_buffer: Int32[Array, " tokens"] | None = None
    """Slots of the new rows in the selected buffer, where the placement has one."""
    in_place: bool = False
    """True: every selected row is on the host and is read there."""


class Counters(NamedTuple):
    """Rows of one layer group in one step on one device. Rows of all its layers move together."""

    selected: Scalar
    """Entries of all selections, repeats counted."""
    unique: Scalar
    """Stored rows that this device looked up (its own stripe under striping), repeats removed if any may be moved."""
    hits: Scalar
    """Of those, rows that were on the device."""
    host_fetches: Scalar
    """Rows that came from the host."""
    prefetched: Scalar
    """Of those, rows that no token asked for yet."""
    evictions: Scalar
    """Rows that left the device to make room."""
    written_back: Scalar
    """Rows written to the host: evicted rows of exclusive placements, new rows of inclusive ones."""
    peer_rows: Scalar
    """Selected entries that came from other devices."""
    buffer_hits: Scalar
    """Selected entries that were in the device's selected buffer, whoever owns them."""
    rounds: Scalar
    """Rounds in which owners sent what selected buffers missed; the same number on every device of a stripe."""
    dropped: Scalar
    """Rows for which no slot was found. Always 0: anything else is a bug and stops the engine."""

    @classmethod
    def zero(cls, **counts: Any) -> "Counters":
        return cls(**{name: jnp.int32(counts.get(name, 0)) for name in cls._fields})


@pytree(meta=("scale", "row"))
@dataclass(frozen=True)
class Query:
    """Absorbed queries of one layer."""

    vectors: Float32[Array, "batch steps heads width"]
    scale: float
    row: RowFormat


class Attended(NamedTuple):
    """Latent output and natural log-sum-exp, so that partial attentions can be merged."""

    output: Float32[Array, "batch steps heads latent"]
    lse: Float32[Array, "batch steps heads"]


@runtime_checkable
class Placement(Protocol):
    """A frozen, hashable dataclass. Runs inside shard_map: arrays are one device's part, `Group` is its state."""

    @property
    def parallel(self) -> Parallel: ...

    @property
    def striping(self) -> Striping:
        """How the addresses of one rank are dealt over devices; index keys are striped alike."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether a device and its host pool never hold the same row. Of placements for which they may, the host holds
        every row, unless `write_back` (optional) says that new rows are written to the device alone.

        `exact = False` (optional): under TP logits equal those of other placements up to rounding, not to the bit."""
        ...

    def capacity(self, spec: KVSpec, budget: Budget) -> Capacity:
        """What fits. ValueError if not even one token's selection does."""
        ...

    def init(self, spec: KVSpec, budget: Budget) -> tuple[Group, ...]:
        """Empty state, one Group for each layer group."""
        ...

    def resolve(self, group: Group, selection: Selection) -> tuple[Readable, Group, Counters]:
        """Make the selected rows readable and find room for the new ones; may move rows."""
        ...

    def append(self, group: Group, layer: int, readable: Readable, rows: Lanes) -> Group:
        """Store the new rows [tokens, words] of one layer (its number within the group)."""
        ...

    def attend(self, group: Group, layer: int, readable: Readable, query: Query) -> Attended:
        """Attention of each token over its selected rows of one layer."""
        ...

    def release(self, group: Group, addresses: Int32[Array, " n"]) -> Group:
        """The rows of these addresses (EMPTY padded) are not wanted any more."""
        ...


def attend_slots(query: Query, pool: Lanes, layer: int, slots: Int32[Array, "batch steps topk"]) -> Attended:
    """Attention over rows of one layer of a pool on the device, in selection order, read where they lie."""
    return Attended(*sparse_mla(query.vectors, pool, layer, slots, query.row, scale=query.scale))


def attend_rows(query: Query, rows: Lanes, valid: Bool[Array, "batch steps topk"]) -> Attended:
    """Attention over rows [batch * steps * topk, words] in selection order, whatever place they were read from.

    As a pool of one layer they go through the same kernel as rows that are read in place, to the same bits.
    """
    pool = tuple(row[None] for row in jax.lax.optimization_barrier(rows))
    slots = jnp.arange(valid.size, dtype=jnp.int32).reshape(valid.shape)
    return attend_slots(query, pool, 0, jnp.where(valid, slots, EMPTY))


def merged(parts: Attended) -> Attended:
    """Attention over the union of disjoint sets of rows, of which `parts` [sets, ...] are the attentions to each. A set
    without rows (log-sum-exp of -inf) weighs nothing; without any row the output is zero."""
    top = jnp.max(parts.lse, axis=0)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(parts.lse - top)
    total = jnp.sum(weights, axis=0)
    output = jnp.sum(weights[..., None] * parts.output, axis=0) / jnp.where(total > 0, total, 1.0)[..., None]
    return Attended(output, jnp.log(total) + top)


def check_room(name: str, found: int, spec: KVSpec, budget: Budget) -> None:
    """Raise unless `found` slots hold the rows of one decode token: its selection and its own row."""
    least = spec.rows_needed(spec.max_context)
    if found < least:
        raise ValueError(
            f"{name}: budget too small for one request's selection: expected device memory for at least {least} rows "
            f"of {spec.row_bytes} bytes beside the index keys, found room for {max(found, 0)} in {budget.device} "
            "bytes; raise the device budget or lower max_context"
        )


def fitting(placement: Placement, spec: KVSpec, budget: Budget) -> Capacity:
    """`placement.capacity`; the message of its ValueError goes on with the nearest settings that would fit."""

    def fits(context: int = spec.max_context, device: int = budget.device, host: int = budget.host) -> bool:
        shorter = replace(spec, max_context=context, topk=min(spec.topk, context))
        try:
            placement.capacity(shorter, Budget(device, host))
        except ValueError:
            return False
        return True

    def first(text: str, values: range, fits: Callable[[int], bool]) -> list[str]:
        at = bisect_left(values, True, key=fits)
        return [text.format(values[at])] if at < len(values) else []

    try:
        return placement.capacity(spec, budget)
    except ValueError as wrong:
        ways = [
            *first("max_context {}", range(spec.max_context, 0, -1), lambda context: fits(context)),
            *first("{} device bytes", range(budget.device, MOST_BYTES), lambda device: fits(device=device)),
            *first("{} host bytes", range(budget.host, MOST_BYTES), lambda host: fits(host=host)),
        ]
        raise ValueError(f"{wrong} (what would fit: {', or '.join(ways)})" if ways else str(wrong)) from wrong


def decodable(spec: KVSpec, device_bytes: int, striping: Striping = UNSTRIPED) -> int:
    """Rows of history of one device beyond which more history means fewer requests.

    Index keys of all n rows lie on the device, and so must all that one step may select. With f the largest share of a
    request's rows that one step needs, all that is stored can also be decoded at once as long as n keys and f n rows
    fit. Where n is less than a request, the keys leave room for one selection.
    """
    row, key, context = spec.row_bytes, spec.index_bytes, spec.max_context
    share = min(1.0, spec.rows_needed(context, striping=striping) * striping.devices / context)
    rows = int(device_bytes / (share * row + key))
    return min(rows, max(0, device_bytes - spec.rows_needed(context) * row) // key) if key else rows


def whole_pages(addresses: int, spec: KVSpec) -> int:
    return addresses // spec.page_size * spec.page_size
