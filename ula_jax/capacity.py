"""What fits: requests that each placement admits on a machine, and what keeps it from admitting more.

Admission is the placements' own (`Placement.capacity`): the engine admits by the same arithmetic. What is added here is
how much memory is left for the history: what a machine has, less what serving leaves unused, less weights.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ula_jax.index_keys import KeyFormat
from ula_jax.known_models import KNOWN
from ula_jax.parallel import DEVICES, Mode, Parallel
from ula_jax.placements import PLACEMENTS, make_placement
from ula_jax.placements.base import fitting
from ula_jax.report import UserError, print_table
from ula_jax.rows import FormatName, RowFormat
from ula_jax.spec import Budget, Capacity, KVSpec

CARDS = {"B300": (275_040 * 2**20, 192e9), "H200": (143_771 * 2**20, 128e9)}
"""Bytes of a card, as nvidia-smi counts them, and of host memory for each card of a node (UlaCache's set-ups)."""
LENGTHS = 8
"""Different lengths of a range of contexts."""
FP8, BF16 = 1, 2
MLA = ("glm_moe_dsa", "deepseek_v32", "deepseek_v3", "deepseek_v2")
GQA = {"qwen3_moe": ("num_experts", "moe_intermediate_size"), "mixtral": ("num_local_experts", "intermediate_size")}
"""Model types, as the hub names them; of the second kind also how experts and their width are named."""


@dataclass(frozen=True)
class Config:
    """Everything is for one node, whose devices are equal."""

    hardware: str = "8xB300"
    """COUNTxCARD: a card of the list, or any name with --device-gb and --host-gb."""
    model: str = "glm-5.3"
    """A name of the list, or a hub config.json."""
    mode: str = "both"
    """`dp`, `tp`, both of them, or ranks x devices of a rank, like `2x4`."""
    context: str = "96k"
    """Tokens of a request at its end: 96k, 131072, or a range (64k-128k) over which eight lengths are spread evenly."""
    placements: tuple[str, ...] = ()
    """Names, with parameters if wanted; empty: every registered one, and `ula` with a selected buffer under TP."""
    buffer: int = 6144
    """Rows per request of that buffer: SGLang's example for HiSparse, and three query tokens of 2048."""
    rows: FormatName = "fp8"
    page_size: int = 64
    usable: float = 0.90
    """Share of a device's memory that serving gives to weights and history."""
    draft: bool = True
    """With the model's draft (MTP) layer: its weights, and of each token its row and index key, on the device."""
    device_gb: float | None = None
    """Memory of a device in 10^9 bytes, instead of the card's."""
    host_gb: float | None = None
    """Host memory for each device in 10^9 bytes, instead of the card's."""
    out: Path = Path("results")


@dataclass(frozen=True)
class Machine:
    devices: int
    device_bytes: float
    host_bytes: float
    """For each device."""


def machine(config: Config) -> Machine:
    """UserError unless the name is COUNTxCARD with a known card or sizes of its own."""
    found = re.fullmatch(r"(\d+)x(\w+)", config.hardware)
    if not found or not int(found[1]):
        raise UserError(f"hardware: expected COUNTxCARD like 8xH200, found {config.hardware!r}; write it so")
    given = [None if gb is None else gb * 1e9 for gb in (config.device_gb, config.host_gb)]
    card = CARDS.get(found[2], (None, None))
    device, host = (mine if mine is not None else its for mine, its in zip(given, card, strict=True))
    if device is None or host is None:
        raise UserError(
            f"hardware: expected one of {sorted(CARDS)}, found {found[2]!r}; choose one of them, or give --device-gb "
            "and --host-gb"
        )
    return Machine(int(found[1]), float(device), float(host))


class Architecture:
    """Sizes of a model, read from its hub config.json. A row is an MLA latent with its roped key, or all keys and
    values of grouped-query attention (GQA)."""

    def __init__(self, hub: Mapping[str, Any]):
        self.hub, kind = hub, hub.get("model_type")
        if kind not in (*MLA, *GQA):
            raise UserError(
                f"model: expected a config.json of type {', '.join((*MLA, *GQA))}, found {kind!r}; the history of "
                "others (compressed, windows, recurrent layers) is not modelled"
            )
        try:
            self.hidden, self.layers, self.heads, self.vocabulary = (
                int(hub[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            )
            if kind in MLA:
                self.kv_heads = 1
                self.latent, self.rope = int(hub["kv_lora_rank"]), int(hub["qk_rope_head_dim"])
                self.nope, self.value = int(hub["qk_nope_head_dim"]), int(hub["v_head_dim"])
            else:
                self.kv_heads = int(hub["num_key_value_heads"])
                self.value = int(hub.get("head_dim") or self.hidden // self.heads)
                self.latent, self.rope, self.nope = 2 * self.kv_heads * self.value, 0, self.value
        except (KeyError, TypeError) as wrong:
            raise UserError(
                f"model: expected the config.json of a {kind}, found none of {wrong} in it; use the hub's own file"
            ) from wrong
        self.index_dim = int(hub.get("index_head_dim") or 0)
        self.drafts = int(hub.get("num_nextn_predict_layers") or 0)
        names = GQA.get(kind, ("n_routed_experts", "moe_intermediate_size"))
        self.experts, self.expert_width = (int(hub.get(name) or 0) for name in names)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share a selection: from one with an indexer to the next."""
        every, offset = self.hub.get("index_topk_freq") or 1, self.hub.get("index_skip_topk_offset") or 1
        own = [i for i in range(self.layers) if not max(i - offset + 1, 0) % every] if self.index_dim else [0]
        ends = [*own[1:], self.layers]
        return tuple(tuple(range(start, end)) for start, end in zip(own, ends, strict=True))

    def parts(self, parallel: Parallel, draft: bool) -> dict[str, float]:
        """Bytes of weights on each device by kind: linear layers in fp8, embeddings, indexers and W_UK, W_UV for
        absorbed decoding in bf16. Experts are sharded over all devices; heads, dense layers and embeddings over those
        of a rank. (SGLang's layout.)"""
        hub, hidden = self.hub, self.hidden
        extra = self.drafts if draft else 0
        layers, dense = self.layers + extra, int(hub.get("first_k_dense_replace") or 0)
        lora = int(hub.get("q_lora_rank") or 0)
        down = hidden * (lora + self.latent + self.rope) / self.row_parts(parallel)
        up = self.latent * self.heads * (self.nope + self.value) if hub["model_type"] in MLA else 0
        by_head = self.heads * ((lora or hidden) * (self.nope + self.rope) + self.value * hidden)
        attention = (by_head + up) * FP8 + up * BF16  # of one layer
        expert = 3 * hidden * self.expert_width
        shared = (layers - dense) * int(hub.get("n_shared_experts") or 0) * expert
        wide = dense * 3 * hidden * int(hub["intermediate_size"])
        indexer = int(hub.get("index_n_heads") or 0) * ((lora or hidden) * self.index_dim + hidden)
        table = self.vocabulary * hidden * BF16
        return {
            "experts": (layers - dense) * self.experts * expert / parallel.size,
            "by_head": (shared + layers * attention + wide) / parallel.tp,
            "by_layer": layers * down,
            "indexers": (len(self.groups) + extra) * (indexer + hidden * self.index_dim) * BF16 * bool(self.index_dim),
            "embedding": table / parallel.tp,
            "head": table / parallel.size,
        }

    def row_parts(self, parallel: Parallel) -> int:
        """Parts into which the devices of a rank divide a row by heads, where they do not divide positions."""
        return math.gcd(parallel.tp, self.kv_heads)

    def weights(self, parallel: Parallel, draft: bool) -> float:
        """Bytes on each device."""
        return sum(self.parts(parallel, draft).values())

    def spec(self, config: Config, longest: int) -> KVSpec:
        """The history of contexts up to `longest`."""
        row, key = RowFormat(config.rows, self.latent, self.rope), KeyFormat(config.rows, self.index_dim)
        topk = min(int(self.hub.get("index_topk") or longest), longest)
        drafts = (self.drafts if config.draft else 0) * (row.nbytes + key.nbytes)
        return KVSpec(self.groups, row, topk, self.index_dim, config.page_size, longest, drafts)


def architecture(name: str) -> Architecture:
    """UserError unless it is a known model or the path of a config.json."""
    if name in KNOWN:
        return Architecture(KNOWN[name])
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(f"model: expected one of {sorted(KNOWN)} or a hub config.json, found {name!r}; choose one")
    return Architecture(json.loads(path.read_text()))


def lengths(text: str) -> list[int]:
    """Contexts of `96k`, `131072` or `64k-128k`."""
    found = [re.fullmatch(r"(\d+)(k?)", part) for part in text.lower().split("-")]
    ends = [int(part[1]) * (1024 if part[2] else 1) for part in found if part]
    if len(ends) != len(found) or len(ends) > 2 or min(ends) < 1 or ends != sorted(ends):
        raise UserError(f"context: expected tokens like 96k, 131072 or 64k-128k, found {text!r}; write them so")
    return spread(ends[0], ends[1], LENGTHS) if len(ends) == 2 else ends


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths evenly spaced, from the middle outwards: any first few have about the mean of all."""
    found, middle = np.linspace(shortest, longest, count).astype(int).tolist(), (count - 1) / 2
    return [found[i] for i in sorted(range(count), key=lambda i: abs(i - middle))]


def admitted(capacity: Capacity, contexts: list[int]) -> int:
    """Requests that all ranks hold at once, taking these contexts in turn."""
    if len(contexts) == 1:
        return capacity.requests(contexts[0])
    held: list[int] = []
    while capacity.fits([*held, contexts[len(held) % len(contexts)]]):
        held.append(contexts[len(held) % len(contexts)])
    return capacity.ranks * len(held)


@dataclass(frozen=True)
class Row:
    """One placement in one mode."""

    placement: str
    mode: Mode
    context: str
    admitted: int
    binds: str
    """What more or less of would admit more: `host` memory; else, of placements with both tiers, the `working set` (the
    rows that one step may need at worst) or `index keys` (what else of each token stays on the device included); else
    the `device`."""
    distinct_share: float
    """Distinct rows over rows stored when every slot is full."""
    device_slots: int
    """Of one layer group on one device."""
    host_slots: int
    weights_gb: float
    """On each device, in 10^9 bytes."""


def run(config: Config) -> dict[str, Any]:
    """A row for each placement and mode; the result is what is printed and written."""
    model, node, contexts = architecture(config.model), machine(config), lengths(config.context)
    spec = model.spec(config, max(contexts))
    modes = DEVICES if config.mode == "both" else (config.mode,)
    rows = []
    for parallel in [_parallel(mode, node.devices) for mode in modes]:
        weights = model.weights(parallel, config.draft)
        left = node.device_bytes * config.usable - weights
        if left <= 0:
            raise UserError(
                f"hardware: expected more than the {weights / 1e9:.1f} GB of weights on each device ({parallel.mode}), "
                f"found {node.device_bytes * config.usable / 1e9:.1f} usable; take more devices or larger ones"
            )
        budget = Budget(int(left), int(node.host_bytes))
        parts = model.row_parts(parallel)
        rows += [
            plan(name, parallel, spec, budget, config.context, weights, parts)
            for name in names(config, parallel, spec)
        ]  # fmt: skip
    about = {
        "hardware": {**asdict(node), "usable": config.usable}, "model": config.model,
        "draft_layer": config.draft and model.drafts > 0,
        "row_bytes": spec.row_bytes, "device_bytes_per_token": spec.index_bytes,
    }  # fmt: skip
    return {"rows": [asdict(row) for row in rows], "assumptions": about}


def _parallel(mode: Mode, devices: int) -> Parallel:
    try:
        return Parallel.of(mode, devices)
    except ValueError as wrong:
        raise UserError(str(wrong)) from wrong


def names(config: Config, parallel: Parallel, spec: KVSpec) -> tuple[str, ...]:
    """Dense attention selects everything: no buffer smaller than the history holds that."""
    if config.placements:
        return config.placements
    buffered = parallel.tp > 1 and config.buffer > spec.topk
    return (*PLACEMENTS, *((f"ula:buffer={config.buffer}",) if buffered else ()))


def plan(
    name: str, parallel: Parallel, spec: KVSpec, budget: Budget, context: str, weights: float, parts: int = 1
) -> Row:
    """`parts`: of a row (`Architecture.row_parts`), if the placement does not stripe positions."""
    placement, contexts = make_placement(name, parallel), lengths(context)
    if placement.striping.devices > 1:
        parts = 1
    spec = replace(spec, row=replace(spec.row, latent=spec.row.latent // parts))
    capacity = fitting(placement, spec, budget)
    number = admitted(capacity, contexts)

    def relaxed(spec: KVSpec = spec, budget: Budget = budget) -> int:
        return admitted(placement.capacity(spec, budget), contexts)

    without = {
        "working set": relaxed(replace(spec, topk=1)),
        "index keys": relaxed(replace(spec, index_dim=0, draft_bytes=0)),
    }
    most = max(without, key=lambda name: without[name])
    if relaxed(budget=replace(budget, host=2 * budget.host)) > number:
        binds = "host"
    else:
        binds = most if capacity.host_slots and without[most] > number else "device"
    slots = capacity.device_slots + capacity.host_slots + (capacity.buffer_slots or 0)
    return Row(
        name, parallel.mode, context, number, binds, parts * capacity.tokens / (parallel.size * slots),
        capacity.device_slots, capacity.host_slots, weights / 1e9,
    )  # fmt: skip


def show(result: dict[str, Any]) -> None:
    about = result["assumptions"]
    node = about["hardware"]
    print(
        f"{node['devices']} devices of {node['device_bytes'] / 1e9:.1f} GB, {node['usable']:.0%} of it usable, and "
        f"{node['host_bytes'] / 1e9:.0f} GB of host memory for each; {about['model']}, weights in fp8, "
        f"{'with' if about['draft_layer'] else 'without'} its draft layer. Of each token {about['row_bytes']:,} bytes "
        f"of rows, and {about['device_bytes_per_token']:,} that stay on the device. Activations, maps and policies are "
        "in what is not usable."
    )
    table = Table(title="requests held at once", title_justify="left")
    headers = (
        "placement",
        "mode",
        "context",
        "admitted",
        "binds",
        "distinct",
        "device slots",
        "host slots",
        "weights GB",
    )
    for header in headers:
        table.add_column(header, justify="left" if header in ("placement", "mode", "binds") else "right")
    for row in result["rows"]:
        table.add_row(
            row["placement"], row["mode"], row["context"], f"{row['admitted']:,}", row["binds"],
            f"{row['distinct_share']:.1%}", f"{row['device_slots']:,}", f"{row['host_slots']:,}",
            f"{row['weights_gb']:.1f}",
        )  # fmt: skip
    print_table(table)
