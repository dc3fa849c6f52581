"""Decode real documents under every placement with the same bytes, and compare what each can hold.

Prompts are modules of Python's own library, read as bytes. Every row decodes the same documents on the same devices
with the same budget; the tokens must not differ. `make demo` runs it on eight forced CPU devices.
"""

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.table import Table

from experiments.documents import read_documents
from models import TINY, Decoder, ModelConfig, load_checkpoint
from ula_jax import links
from ula_jax.engine import Engine, EngineConfig
from ula_jax.parallel import Mode, Parallel, force_cpu_devices, make_mesh
from ula_jax.placements import make_placement
from ula_jax.placements.base import fitting
from ula_jax.policies import make_policy
from ula_jax.processes import Launch, agree, together
from ula_jax.report import UserError, environment, or_exit, print_table, progress_bar, report
from ula_jax.rows import FormatName
from ula_jax.scheduler import SamplingParams
from ula_jax.spec import Budget, Capacity, KVSpec


@dataclass(frozen=True)
class Config:
    """Budgets are bytes of KV rows and index keys on (or, for the host, beside) each device."""

    model: Path = TINY
    """Hub directory of a byte-level model."""
    topk: int | None = None
    """Rows that a token attends to. None: what the model was trained for, but 16 for the shipped one: its 128 are too
    many of these short documents to show anything."""
    documents: tuple[Path, ...] = ()
    """Files to decode; empty: the longest modules of Python's library."""
    devices: int = 8
    placements: tuple[str, ...] = ("gpu_only", "hisparse", "resident_hot", "ula")
    """Names, or path.py:Class. gpu_only is always run: its tokens are what the others' must equal."""
    modes: tuple[Mode, ...] = ("tp", "dp")
    policy: str | None = None
    """Replacement policy of the placements that take one; None: each one's own."""
    budget_device: int = 2_400_000
    budget_host: int = 4_000_000
    prompt: int = 352
    """Bytes of each prompt."""
    new_tokens: int = 32
    rows: FormatName = "fp32"
    page_size: int = 16
    requests: int | None = None
    """Documents to decode; None: one more than the most that any row can hold at once."""
    out: Path = Path("results")
    launch: Annotated[Launch, tyro.conf.OmitArgPrefixes] = Launch()
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A short run that shows the same things: four devices, TP alone, shorter prompts, smaller budgets."""


@dataclass
class Row:
    """One placement in one mode: the figures of the table."""

    placement: str
    mode: Mode
    devices: int
    budget_device: int
    budget_host: int
    admitted: int = 0
    capacity_requests: int = 0
    capacity_tokens: int = 0
    distinct_share: float = 1.0
    duplicate_bytes: int = 0
    device_hit_rate: float = 1.0
    buffer_hit_rate: float | None = None
    """Of placements with a selected buffer."""
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    peer_bytes: int = 0
    """Rows that devices asked each other for."""
    link_bytes: float = 0.0
    """What the collectives that find and read the history brought all devices."""
    steps: int = 0
    decoded_tokens: int = 0
    ms_per_step: float = 0.0
    tokens_identical: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict, repr=False)


def run(config: Config) -> dict[str, Any]:
    """Every row of the comparison; the result holds what is printed and written."""
    if config.smoke:
        config = smoke(config)
    topk = config.topk or (16 if config.model == TINY else None)
    changes: dict[str, Any] = {"index_topk": topk} if topk else {}
    model_config = ModelConfig.from_hub(config.model, **changes)
    spec = KVSpec.of(
        model_config, rows=config.rows, page_size=config.page_size, max_context=config.prompt + config.new_tokens
    )
    for mode in config.modes:
        model_config.check(Parallel.of(mode, config.devices))
    rows = plan(config)
    capacities = [capacity(row, spec, config) for row in rows]
    context = config.prompt + config.new_tokens
    for row, size in zip(rows, capacities, strict=True):
        row.capacity_requests, row.capacity_tokens = size.requests(context), size.tokens
        if not row.capacity_requests:
            raise UserError(
                f"{row.placement} {row.mode}: expected room for one request of {context} tokens, found room for one of "
                f"{size.longest}; raise the budget or shorten --prompt"
            )
    held = {mode: max((r.capacity_requests for r in rows if r.mode == mode), default=0) for mode in config.modes}
    count = config.requests or max(held.values()) + 1
    prompts = read_documents(config.documents, config.prompt, count)
    agree("settings and documents", (replace(config, launch=Launch()), prompts))
    unknown = max(max(prompt) for prompt in prompts)
    if unknown >= model_config.vocab_size:
        raise UserError(
            f"documents: expected bytes below the model's vocabulary of {model_config.vocab_size}, found {unknown}; "
            "use a byte-level model or other documents"
        )
    with progress_bar("tokens") as progress:
        for mode in config.modes:
            # One decode shape for all rows of a mode: a token's arithmetic is then the same in each.
            parallel = Parallel.of(mode, config.devices)
            share = -(-held[mode] // parallel.dp)
            model = load_checkpoint(config.model, make_mesh(parallel), parallel, **changes)
            reference: dict[int, list[int]] | None = None
            for row in rows:
                if row.mode != mode:
                    continue
                task = progress.add_task(label(row), total=count * (config.prompt + config.new_tokens - 1))
                decode(row, config, model, spec, prompts, share, lambda n, t=task: progress.advance(t, n))
                reference = reference or row.tokens
                row.tokens_identical = row.tokens == reference
    public = [{k: v for k, v in vars(row).items() if k != "tokens"} for row in rows]
    return {"rows": public, "context": context, "topk": spec.topk, "documents": count, **environment()}


def smoke(config: Config) -> Config:
    changes = dict(
        devices=4, prompt=144, new_tokens=8, budget_device=600_000, budget_host=900_000, modes=("tp",)
    )
    return Config(**{**vars(config), **changes, "smoke": False})


def plan(config: Config) -> list[Row]:
    """gpu_only first, then the others; `ula` under TP also without host memory, to show striping alone."""
    names = ("gpu_only", *(name for name in config.placements if name != "gpu_only"))
    rows = []
    for mode in config.modes:
        for name in names:
            alone = name == "ula" and Parallel.of(mode, config.devices).tp > 1 and config.budget_host
            hosts = (0, config.budget_host) if alone else (config.budget_host,)
            hosts = (0,) if name == "gpu_only" else hosts
            rows += [Row(name, mode, config.devices, config.budget_device, host) for host in hosts]
    return rows


def placement(row: Row, config: Config):
    policy = {"policy": make_policy(config.policy)} if config.policy else {}
    return make_placement(row.placement, Parallel.of(row.mode, config.devices), policy)


def capacity(row: Row, spec: KVSpec, config: Config) -> Capacity:
    return fitting(placement(row, config), spec, Budget(row.budget_device, row.budget_host))


def decode(row: Row, config: Config, model: Decoder, spec: KVSpec, prompts, max_requests: int, advance) -> None:
    """Decode every prompt and fill the row's figures."""
    engine = Engine(
        model,
        placement(row, config),
        spec,
        Budget(row.budget_device, row.budget_host),
        make_mesh(model.parallel),
        EngineConfig(max_requests=max_requests, prefill_rows=1 if model.parallel.dp > 1 else 4, prefill_chunk=64),
        vocab_size=model.config.vocab_size,
    )
    params = SamplingParams(max_tokens=config.new_tokens)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    times, seen, most = [], 0, -1
    totals = engine.totals
    while engine.busy:
        before, start = totals["prefill"].steps, time.perf_counter()
        engine.step()
        if totals["prefill"].steps == before:
            times.append(time.perf_counter() - start)
        done = totals["prefill"].tokens + totals["decode"].tokens
        advance(done - seen)
        seen = done
        copies = engine.residency()
        if copies.distinct > most:  # the fullest moment
            most, row.distinct_share, row.duplicate_bytes = (
                copies.distinct, copies.distinct_share, copies.duplicate_bytes,
            )  # fmt: skip
    decoding = totals["decode"]
    row.admitted, row.steps, row.decoded_tokens = engine.most_running, decoding.steps, decoding.tokens
    row.device_hit_rate = decoding.device_hit_rate
    if engine.runner.capacity.buffer_slots:
        row.buffer_hit_rate = decoding.buffer_hit_rate
    row.h2d_bytes, row.d2h_bytes, row.peer_bytes = decoding.h2d_bytes, decoding.d2h_bytes, decoding.peer_bytes
    row.link_bytes = links.received(
        engine.placement, decoding, row.devices, max_requests, model.config.num_heads, engine.config.gather
    )
    row.ms_per_step = float(np.median(times)) * 1e3 if times else 0.0
    row.tokens = {i: engine.requests[request].output for i, request in enumerate(ids)}


def label(row: Row) -> str:
    return f"{row.mode} {row.placement}" + ("" if row.placement == "gpu_only" or row.budget_host else " (no host)")


def show(result: dict[str, Any], rows: list[Row]) -> None:
    first = rows[0]
    table = Table(
        title=f"{result['documents']} documents of {result['context']} tokens, top-{result['topk']}, "
        f"{first.devices} devices, {first.budget_device / 1e6:g} MB device memory each",
        title_justify="left",
    )
    headers = (
        "placement", "mode", "host MB", "admitted", "capacity", "distinct", "duplicate MB", "hit rate",
        "H2D B/token", "D2H B/token", "peer B/token", f"ms/step ({result['platform']})", "tokens identical",
    )  # fmt: skip
    buffers = any(row.buffer_hit_rate is not None for row in rows)
    widest = max(12, *(len(row.placement) for row in rows))
    for header in (*headers, *(["in buffer"] if buffers else [])):
        justify = "left" if header in ("placement", "mode") else "right"
        table.add_column(header, justify=justify, min_width=widest if header == "placement" else None)
    for row in rows:
        moved = (row.h2d_bytes, row.d2h_bytes, row.peer_bytes)
        per_token = [b / max(1, row.decoded_tokens) for b in moved]
        table.add_row(
            row.placement, row.mode, f"{row.budget_host / 1e6:g}", str(row.admitted), str(row.capacity_requests),
            f"{row.distinct_share:.1%}", f"{row.duplicate_bytes / 1e6:.2f}", f"{row.device_hit_rate:.1%}",
            *(f"{b:,.0f}" for b in per_token), f"{row.ms_per_step:.1f}", "yes" if row.tokens_identical else "NO",
            *(["" if row.buffer_hit_rate is None else f"{row.buffer_hit_rate:.1%}"] if buffers else []),
        )  # fmt: skip
    print_table(table)


def plot(result: dict[str, Any], rows: list[Row], path: Path) -> None:
    """Requests held, and bytes over each link, for every row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 0.45 * len(rows) + 1.8), layout="constrained")
    names = [label(row) for row in rows]
    places = np.arange(len(rows))
    bars = left.barh(places, [row.admitted for row in rows], color="tab:blue")
    left.bar_label(bars, padding=3)
    left.set(title="requests held at once", yticks=places, yticklabels=names)
    start = np.zeros(len(rows))
    for name, color in (("h2d", "tab:orange"), ("d2h", "tab:red"), ("peer", "tab:green")):
        size = np.array([getattr(row, f"{name}_bytes") / max(1, row.decoded_tokens) / 1e3 for row in rows])
        right.barh(places, size, left=start, label=name, color=color)
        start += size
    right.set(title="kB per decoded token", yticks=places, yticklabels=[])
    right.legend()
    for axes in (left, right):
        axes.invert_yaxis()
        axes.margins(x=0.12)
    figure.suptitle(f"equal bytes: {result['context']}-token contexts, {rows[0].devices} devices, tokens identical")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    force_cpu_devices(-(-config.devices // max(1, config.launch.processes)))
    with together(config.launch) as first:
        result = or_exit(run, config)
        rows = [Row(**row) for row in result["rows"]]
        if first:
            config.out.mkdir(parents=True, exist_ok=True)
            plot(result, rows, config.out / "compare_placements.png")
            show(result, rows)
            report(result, config.out, "compare_placements")
        if not all(row.tokens_identical for row in rows):
            sys.exit("error: a placement changed tokens, which none may do")


if __name__ == "__main__":
    main()
