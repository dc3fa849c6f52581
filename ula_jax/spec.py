"""What has to be stored (KVSpec), what there is to store it in (Budget), and what then fits (Capacity)."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ula_jax.index_keys import KeyFormat
from ula_jax.rows import FormatName, RowFormat
from ula_jax.striping import UNSTRIPED, Striping


@runtime_checkable
class ModelShape(Protocol):
    """What placement needs to know of a model's config."""

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def has_indexer(self) -> bool: ...
    @property
    def index_topk(self) -> int: ...
    @property
    def index_head_dim(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...


@dataclass(frozen=True)
class Budget:
    """Bytes on each device, and bytes of host memory for each device, that hold KV rows and index keys.

    Maps and policy state (about 12 bytes per address and layer group) are not charged.
    """

    device: int
    host: int = 0

    def __post_init__(self):
        if self.device <= 0 or self.host < 0:
            raise ValueError(
                f"budget: expected device bytes above 0 and host bytes at least 0, found device {self.device}, "
                f"host {self.host}; give bytes per device"
            )


@dataclass(frozen=True)
class KVSpec:
    """The KV history of one model: which layers share a selection, and how big everything is."""

    groups: tuple[tuple[int, ...], ...]
    row: RowFormat
    topk: int
    """Rows that one token attends to at most; `max_context` for dense models."""
    index_dim: int
    """Numbers in an index key; 0 for dense models."""
    page_size: int
    max_context: int
    draft_bytes: int = 0
    """Bytes of one token for a draft layer, whose row and key stay on the device. Nothing here stores them yet: what
    they take is left free."""

    def __post_init__(self):
        if self.page_size < 1 or self.max_context < 1:
            raise ValueError(
                f"expected page_size and max_context of at least 1, found {self.page_size} and {self.max_context}"
            )

    @classmethod
    def of(cls, model: ModelShape, *, rows: FormatName = "fp32", page_size: int = 16, max_context: int) -> "KVSpec":
        """The spec of a model for contexts of up to `max_context` tokens."""
        return cls(
            groups=model.layer_groups,
            row=RowFormat(rows, model.kv_lora_rank, model.qk_rope_head_dim),
            topk=min(model.index_topk, max_context) if model.has_indexer else max_context,
            index_dim=model.index_head_dim if model.has_indexer else 0,
            page_size=page_size,
            max_context=max_context,
        )

    @property
    def table_width(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_context // self.page_size)

    @property
    def num_layers(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def index_key(self) -> KeyFormat:
        """Index keys have the precision of the rows."""
        return KeyFormat(self.row.name, self.index_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all layers."""
        return self.num_layers * self.row.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of one token that stay on the device: its index keys, and what a draft layer has of it."""
        return len(self.groups) * self.index_key.nbytes + self.draft_bytes

    def rows_needed(self, context: int, tokens: int = 1, striping: Striping = UNSTRIPED) -> int:
        """Most distinct rows that one device must hold for a step of `tokens` tokens ending at `context`.

        Each token needs its selection and its own row; under striping a device owns a part of the positions. The worst
        case (all selected rows on one owner) is meant: no step may ever find the pool too small.
        """
        return min(striping.share(context), tokens * (min(self.topk, context) + 1))


@dataclass(frozen=True)
class Capacity:
    """What a placement can hold in a budget. A rank is one device under DP and the whole mesh under TP."""

    spec: KVSpec
    ranks: int
    addresses: int
    """Logical addresses of one rank: tokens of history, a multiple of the page."""
    device_slots: int
    """Slots of one layer group on one device."""
    host_slots: int
    striping: Striping = UNSTRIPED
    """Devices that share one address space, and how."""
    quotas: int | None = None
    """Requests that can hold a private hot buffer, for placements that give each one."""
    working_set: int | None = None
    """Rows that one step may need on one device; None where any step fits."""
    buffer_slots: int | None = None
    """Slots of one layer group's selected buffer on one device, which must hold all that a step selects; None where
    there is none."""
    resident: int | None = None
    """Rows that one device holds before the first of them leaves it for the host; None where rows go there at once, or
    never."""

    @property
    def tokens(self) -> int:
        return self.ranks * self.addresses

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits, prompt and output; 0 if none does."""
        contexts = range(self.spec.max_context, 0, -1)
        return contexts[at] if (at := bisect_left(contexts, True, key=lambda c: self.fits([c]))) < len(contexts) else 0

    def fits(self, contexts: list[int]) -> bool:
        """Whether one rank holds requests of these (final) contexts at once, and can decode them in one step."""
        pages = sum(-(-c // self.spec.page_size) for c in contexts)
        if pages * self.spec.page_size > self.addresses:
            return False
        if self.quotas is not None and len(contexts) > self.quotas:
            return False
        return self.step_fits([(c, 1) for c in contexts])

    def step_fits(self, requests: list[tuple[int, int]]) -> bool:
        """Whether one rank can run a step of requests, each of (context at its end, tokens that are computed)."""
        return all(
            sum(self.spec.rows_needed(context, tokens, striping) for context, tokens in requests) <= most
            for most, striping in self._limits
        )

    @property
    def _limits(self) -> list[tuple[int, Striping]]:
        """Rows that a step may need, and how they are dealt out."""
        limits = ((self.working_set, self.striping), (self.buffer_slots, UNSTRIPED))
        return [(most, striping) for most, striping in limits if most is not None]

    def requests(self, context: int) -> int:
        """Requests of `context` tokens (prompt and output) that are held at once, over all ranks."""
        pages = -(-context // self.spec.page_size)
        most = self.addresses // (pages * self.spec.page_size)
        if self.quotas is not None:
            most = min(most, self.quotas)
        for limit, striping in self._limits:
            most = min(most, limit // self.spec.rows_needed(context, striping=striping))
        return self.ranks * most
