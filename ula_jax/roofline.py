"""The time of a decode step by a model: bytes over rates, and what the parts of a step take at least.

A model, not a measurement. Rates of one card and times of its kernels are measured (`docs/results/h200.md`), links of
several cards and what is not measured of a B300 are as published or assumed; `Card` says which.
"""

from dataclasses import dataclass

from ula_jax import links
from ula_jax.capacity import Architecture
from ula_jax.index_keys import Gather
from ula_jax.placements.base import Placement
from ula_jax.spec import Capacity, KVSpec

KEYS = 131_072
"""Keys that the timed kernels of selection looked at in each row."""


@dataclass(frozen=True)
class Card:
    """Seconds and bytes a second of one device of a node."""

    memory: float
    """Weights as a step reads them."""
    products: float
    """bf16 products, FLOP/s."""
    host: float
    """Rows between device and host, in each direction while both go on."""
    link: float
    """Bytes that a device receives from the others."""
    collective: float = 10e-6
    """Assumed: a collective of eight devices that sends next to nothing, within a CUDA graph."""
    kernel: float = 1.0
    """How much longer the timed kernels take than on an H200."""


H200 = Card(memory=4.25e12, products=0.62e15, host=36.2e9, link=450e9)
"""Measured: memory (17 GB of a slice's weights in 4 ms), products, host (an exchange in a step). Published: link."""
B300 = Card(
    memory=H200.memory * 8.0 / 4.8, products=H200.products * 2.5, host=2 * H200.host, link=900e9, kernel=4.8 / 8.0
)
"""Nothing is measured: an H200's rates, scaled by what is published of memory (8.0 against 4.8 TB/s), bf16 (2.5 x),
links and PCIe 6."""
CARDS = {"H200": H200, "B300": B300}


def linear(at: float | int, one: tuple[float, float], other: tuple[float, float]) -> float:
    """The line through two measured points, in microseconds, at another place: seconds."""
    (x, y), (stop, end) = one, other
    return (y + (end - y) * (at - x) / (stop - x)) * 1e-6


def step_time(
    card: Card,
    model: Architecture,
    placement: Placement,
    spec: KVSpec,
    capacity: Capacity,
    requests: int,
    context: int,
    *,
    hit_rate: float,
    kept: float = 0.893,
    gather: Gather = "scores",
    draft: bool = True,
) -> dict[str, float]:
    """Seconds of each part of a step in which every rank decodes `requests` requests of `context` tokens.

    `hit_rate`: share of the rows looked up that are in the device pool. `kept`: share of what a step selects that a
    selected buffer has (LRU, two selections a request: `docs/policies.md`).
    """
    parallel, stripe = placement.parallel, placement.striping.devices
    layers, groups = spec.num_layers, len(spec.groups)
    topk, owners = min(spec.topk, context), not getattr(placement, "exact", True)
    read, flops = _model(model, parallel.dp * requests, requests, placement, draft)
    looked_at = context / stripe / KEYS
    entries = requests * topk / (stripe if owners else 1)  # rows that one device's attention reads
    found = {
        "weights": max(read / card.memory, flops / card.products),
        "attend": layers * linear(entries / 2048, (1.0, 14.7), (64.0, 74.3)) * card.kernel,
        "index scores": groups * (5e-6 + linear(requests, (1.0, 5.0), (32.0, 159.5)) * looked_at) * card.kernel,
        "top-k": groups * linear(requests, (1.0, 33.6), (64.0, 54.4)) * max(1.0, context / KEYS) * card.kernel,
    }
    stored = -(-requests * context // stripe)
    if capacity.host_slots and stored > (capacity.resident or 0):
        missed = requests * topk * (1 - hit_rate) / stripe
        missed *= 1 - kept if capacity.buffer_slots else 1
        found["resolve"] = groups * linear(requests, (28.0, 40.0), (64.0, 45.0)) * card.kernel
        found["host"] = missed * spec.row_bytes / card.host
    sent = links.collectives(placement, spec, requests, model.heads, gather)
    if capacity.buffer_slots:  # rows that miss, not whole rounds
        sent = [one for one in sent if one.purpose == "select"]
        missing = (1 - kept) * requests * topk * spec.row_bytes * (stripe - 1) / stripe
        rounds = groups
    else:
        missing, rounds = 0.0, 0
    nbytes, count = _between_layers(model, placement, requests)
    found["links"] = (nbytes + missing + sum(one.received(stripe) for one in sent)) / card.link
    found["floors"] = (count + rounds + sum(one.count for one in sent)) * card.collective
    return found


def _model(model: Architecture, tokens: int, own: int, placement: Placement, draft: bool) -> tuple[float, float]:
    """Bytes of weights that a device reads for a step, and its FLOP: of the experts those that any token chose."""
    parallel = placement.parallel
    parts = model.parts(parallel, draft)
    experts, chosen = max(1, model.experts), int(model.hub.get("num_experts_per_tok") or 0)
    touched = 1 - (1 - chosen / experts) ** tokens
    always = parts["by_head"] + parts["by_layer"] + parts["indexers"] + parts["head"]
    flops = 2 * (own * always + tokens * parts["experts"] * chosen / experts)
    return always + touched * parts["experts"], flops


def _between_layers(model: Architecture, placement: Placement, requests: int) -> tuple[float, int]:
    """Bytes that a device receives in a step besides history, and the number of collectives: `models`' own."""
    parallel, nbytes, count = placement.parallel, 0.0, 0
    hidden, sparse = 4 * requests * model.hidden, model.layers - int(model.hub.get("first_k_dense_replace") or 0)
    if parallel.tp > 1:
        away = (parallel.tp - 1) / parallel.tp
        nbytes += (2 * model.layers * 2 * hidden + 4 * requests * model.vocabulary) * away
        count += 2 * model.layers + 1
    if parallel.dp > 1:
        gates = 4 * requests * model.experts
        nbytes += sparse * (2 * hidden + gates) * (parallel.dp - 1)
        count += 3 * sparse
    return nbytes, count
