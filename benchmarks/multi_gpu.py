"""Several GPUs of one host under TP, in one command of less than eight minutes: bits, links, throughput.

1. The shipped model decodes under TP and DP with every placement: logits equal `gpu_only`'s bit for bit, those of
   `owner_computes` up to rounding. RuntimeError if not.
2. What brings rows to their readers, or queries to the rows' owners, is timed beside an all-gather of long arrays,
   which says what the link can do.
3. The GLM-5.3 slice (`benchmarks.glm_slice`, each GPU with its share of the experts, heads divided) decodes under TP
   with every placement in equal memory, from one request to the most that fit, driven by calibrated selections.

Prints tables; writes OUT/multi_gpu.json and .png.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P
from rich.table import Table

from benchmarks.driven import Requests, Streams, calibrated, rounds_needed
from benchmarks.glm_slice import LAYERS, layer_slice, share
from models import TINY, Decoder, init_model, load_checkpoint
from ula_jax import links, memory
from ula_jax.capacity import admitted, architecture, spread
from ula_jax.engine import Engine, EngineConfig
from ula_jax.metrics import Totals
from ula_jax.parallel import TP, Parallel, force_cpu_devices, make_mesh
from ula_jax.placements import make_placement
from ula_jax.placements.base import Attended, fitting
from ula_jax.placements.owner_computes import all_heads, own_heads
from ula_jax.placements.selected_buffer import EXCHANGES, round_rows, to_all
from ula_jax.report import UserError, environment, or_exit, print_table, report, stderr
from ula_jax.rows import RowFormat
from ula_jax.runner import Runner
from ula_jax.scheduler import SamplingParams
from ula_jax.spec import Budget, KVSpec

FIRST_LAYER, SLICE = 2, 8
PAGE = 64


@dataclass(frozen=True)
class Config:
    devices: int = 8
    placements: tuple[str, ...] = ("gpu_only", "hisparse", "ula", "ula:buffer=6144", "owner_computes")
    batches: tuple[int, ...] = (1, 8, 32, 96)
    """Each placement runs those that it can hold, and the most that it can hold."""
    shortest: int = 65_536
    """Tokens of the shortest request at its end."""
    longest: int = 131_072
    warmup: int = 16
    steps: int = 32
    rows: tuple[int, ...] = (256, 2048, 16_384, 65_536)
    """Selected rows of a step whose way is timed: a layer's, of all requests."""
    megabytes: int = 256
    """What each device contributes to the long all-gather."""
    rehearse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """All of it in miniature, on forced CPU devices: times mean nothing."""
    out: Path = Path("results")


def run(config: Config) -> dict[str, Any]:
    if config.devices < 2:
        raise UserError(f"devices: expected at least 2, found {config.devices}; one GPU is what `throughput` measures")
    start, found = time.perf_counter(), {}
    for name, part in (("bits", bits), ("links", link_times), ("throughput", throughput)):
        found[name] = part(config)
        stderr.print(f"{name}: done after {time.perf_counter() - start:.0f} s")
    return {**found, "seconds": time.perf_counter() - start, "rehearsal": config.rehearse, **environment()}


def bits(config: Config) -> list[dict[str, Any]]:
    """One row for each mode and placement. RuntimeError where logits differ from `gpu_only`'s."""
    rows, prompt, new = [], 24 if config.rehearse else 96, 4 if config.rehearse else 16
    for mode in ("tp", "dp"):
        parallel = Parallel.of(mode, config.devices)
        mesh = make_mesh(parallel)
        model = load_checkpoint(TINY, mesh, parallel, index_topk=4 if config.rehearse else 16)
        spec = KVSpec.of(model.config, max_context=prompt + new)
        whole = 2 * spec.table_width * spec.page_size
        some = 2 * spec.rows_needed(prompt + new) + spec.page_size
        budgets = {"gpu_only": (whole, 0)}
        reference: list[np.ndarray] = []
        for name in ("gpu_only", "hisparse", "ula", f"ula:buffer={spec.topk + 1}", "owner_computes"):
            if mode == "dp" and (":" in name or name == "owner_computes"):
                continue
            device, host = budgets.get(name, (some + (2 * (spec.topk + 1) if ":" in name else 0), whole))
            budget = Budget(device * spec.row_bytes + whole * spec.index_bytes, host * spec.row_bytes)
            logits, totals = _decode(model, name, spec, budget, mesh, prompt, new)
            reference = reference or logits
            exact = getattr(make_placement(name, parallel), "exact", True)
            worst = max(float(np.abs(a - b).max()) for a, b in zip(logits, reference, strict=True))
            scale = max(float(np.abs(a).max()) for a in reference)
            if worst > (0 if exact else 1e-5 * scale):
                raise RuntimeError(f"{mode} {name}: expected the logits of gpu_only, found a difference of {worst}")
            moved = {key: totals.count(key) for key in ("host_fetches", "peer_rows", "buffer_hits")}
            rows.append({"mode": mode, "placement": name, "largest_difference": worst, "exact": exact, **moved})
    return rows


def _decode(
    model: Decoder, name: str, spec: KVSpec, budget: Budget, mesh: Any, prompt: int, new: int
) -> tuple[list[np.ndarray], Totals]:
    """Logits of every step of two requests a rank, and what moved while they were decoded."""
    parallel = model.parallel
    engine = Engine(
        model, make_placement(name, parallel), spec, budget, mesh,
        EngineConfig(max_requests=2, prefill_rows=2, prefill_chunk=2, trace=True), model.config.vocab_size,
    )  # fmt: skip
    found: list[np.ndarray] = []
    engine.on_step = lambda rows, batch, output: found.append(np.asarray(output.logits))
    draw = np.random.default_rng(0)
    for _ in range(2 * parallel.dp):
        engine.submit(draw.integers(0, 128, prompt).tolist(), SamplingParams(max_tokens=new))
    list(engine.run())
    if engine.most_running < 2 * parallel.dp:
        raise RuntimeError(f"{name}: expected all requests to run at once, found {engine.most_running}; this is a bug")
    return found, engine.totals["decode"]


def link_times(config: Config) -> dict[str, Any]:
    """Microseconds of each way for one layer group of four layers (fetch) or one layer (owners compute), and the rate
    at which a device received by the best long all-gather."""
    parallel = Parallel(tp=config.devices)
    mesh, devices = make_mesh(parallel), config.devices
    row = RowFormat("fp8", 512, 64)
    words, heads = sum(row.lanes), 64

    def timed(body: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
        """Median seconds of `body` on each device's part of random arrays."""
        over = jax.shard_map(body, mesh=mesh, in_specs=P(TP), out_specs=P(TP), check_vma=False)
        place = memory.sharding(mesh, P(TP))
        draw = jax.jit(
            lambda: [jax.random.normal(jax.random.key(n), (devices, *shape)) for n, shape in enumerate(shapes)],
            out_shardings=[place] * len(shapes),
        )
        program, arrays = jax.jit(over), draw()
        jax.block_until_ready(program(*arrays))
        times, calls = [], 2 if config.rehearse else 10
        for _ in range(5):
            start = time.perf_counter()
            results = [program(*arrays) for _ in range(calls)]
            jax.block_until_ready(results)
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)

    floats = config.megabytes * 2**20 // 4
    long = timed(lambda x: jax.lax.all_gather(x[0], TP)[None, :, :1], (floats,))
    found = []
    for rows in config.rows:
        sent = round_rows(rows, devices)
        ways = {
            way: timed(lambda x, way=way: to_all(x[0], devices, way)[None], (4, sent, words)) for way in EXCHANGES
        }
        tokens = max(1, rows // 2048)

        def owners(query: jax.Array, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, ...]:
            back = own_heads(Attended(output[0], lse[0]))
            return all_heads(query[0])[None], back.output[None], back.lse[None]

        shapes = ((tokens, 1, heads // devices, 576), (tokens, 1, heads, 512), (tokens, 1, heads))
        fetched = (devices - 1) * 4 * sent * words * 4
        asked = 4 * tokens * heads * (576 + 513) * (devices - 1) // devices
        found.append({
            "rows": rows, "bytes_fetched": fetched, "bytes_of_owners": asked,
            **{f"{way}_us": 1e6 * seconds for way, seconds in ways.items()},
            "owner_computes_us": 1e6 * timed(owners, *shapes),
        })  # fmt: skip
    return {"link_bytes_per_s": (devices - 1) * floats * 4 / long, "ways": found}


def throughput(config: Config) -> list[dict[str, Any]]:
    """One row for each placement and batch."""
    tiny, parallel = config.rehearse, Parallel(tp=config.devices)
    shape = layer_slice(FIRST_LAYER, SLICE, tiny, gpus=config.devices)
    shape.check(parallel)
    mesh = make_mesh(parallel)
    model = init_model(shape, mesh, parallel, seed=0, dtype=jnp.bfloat16)
    longest = -(-config.longest // PAGE) * PAGE
    spec = KVSpec.of(shape, rows="fp8", page_size=PAGE, max_context=longest)
    budget = _budget(config, spec)
    steps = config.warmup + 2 * config.steps
    contexts = spread(config.shortest, config.longest, 8)
    placements = {name: make_placement(name, parallel) for name in config.placements}
    held = {name: admitted(fitting(p, spec, budget), contexts) for name, p in placements.items()}
    histories = tuple(context - steps for context in contexts)
    rounds = rounds_needed(steps, max(held.values()), len(spec.groups), len(histories))
    streams = calibrated(histories, rounds, spec.topk, config.out / "multi_gpu")
    rows = []
    for name, placement in placements.items():
        for batch in sorted({n for n in (*config.batches, held[name]) if 0 < n <= held[name]}):
            rows.append({
                "placement": name, "batch": batch, "most": held[name],
                **_point(config, Runner(model, placement, spec, budget, mesh), streams, batch, steps),
            })  # fmt: skip
            stderr.print(f"{name} x {batch}: {rows[-1]['tokens_per_s']:,.0f} tokens/s")
    return rows


def _budget(config: Config, spec: KVSpec) -> Budget:
    if config.rehearse:
        rows = 3 * config.longest // 2
        return Budget(rows * spec.row_bytes // 2 + 4 * rows * spec.index_bytes, 2 * rows * spec.row_bytes)
    weights = architecture("glm-5.3").weights(Parallel(tp=config.devices), draft=True)
    experts_left_out = (8 - config.devices) / 8  # of fewer GPUs each has its eighth of the experts all the same
    parts = architecture("glm-5.3").parts(Parallel(tp=config.devices), draft=True)["experts"]
    return share(0.90 * 143_771 * 2**20 - (weights - parts * experts_left_out), 128e9, SLICE)


def _point(config: Config, runner: Runner, streams: Streams, batch: int, steps: int) -> dict[str, Any]:
    """Speeds, hits and bytes of one placement at one batch."""
    spec = runner.spec
    requests = Requests(runner, streams, batch, steps)
    requests.fill()
    jax.block_until_ready([requests.step().tokens for _ in range(config.warmup)])
    start = time.perf_counter()
    together = [requests.step() for _ in range(config.steps)]
    jax.block_until_ready(together[-1])
    step_s, waits, one_by_one = (time.perf_counter() - start) / config.steps, [], []
    for _ in range(config.steps):
        start = time.perf_counter()
        one_by_one.append(requests.step())
        jax.block_until_ready(one_by_one[-1].tokens)
        waits.append(time.perf_counter() - start)
    requests.check()
    totals = Totals(spec)
    for output in together + one_by_one:
        totals.add(np.asarray(output.counters), batch)
    received = links.received(runner.placement, totals, config.devices, batch, 64 if not config.rehearse else 8)
    return {
        "tokens_per_s": batch / step_s, "step_ms": 1e3 * step_s, "tpot_ms": 1e3 * statistics.median(waits),
        "hit_rate": totals.device_hit_rate, "buffer_hit_rate": totals.buffer_hit_rate,
        "h2d_bytes": totals.h2d_bytes / totals.steps, "d2h_bytes": totals.d2h_bytes / totals.steps,
        "peer_bytes": totals.peer_bytes / totals.steps, "link_bytes": received / totals.steps,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    table = Table(title="logits beside gpu_only's", title_justify="left")
    for header in ("mode", "placement", "largest difference", "from host", "from peers", "in buffers"):
        table.add_column(header)
    for row in result["bits"]:
        moved = (f"{row[key]:,}" for key in ("host_fetches", "peer_rows", "buffer_hits"))
        table.add_row(row["mode"], row["placement"], f"{row['largest_difference']:g}", *moved)
    print_table(table)
    rate = result["links"]["link_bytes_per_s"]
    table = Table(title=f"ways of a step; a device receives at most {rate / 1e9:.0f} GB/s", title_justify="left")
    for header in ("rows", *(f"{way} us" for way in EXCHANGES), "of the link", "owners compute us", "of the link"):
        table.add_column(header, justify="right")
    for way in result["links"]["ways"]:
        fetch, owner = (way[f"{EXCHANGES[0]}_us"], way["owner_computes_us"])
        shares = (way["bytes_fetched"] / (1e-6 * fetch) / rate, way["bytes_of_owners"] / (1e-6 * owner) / rate)
        times = (f"{way[f'{name}_us']:.0f}" for name in EXCHANGES)
        table.add_row(f"{way['rows']:,}", *times, f"{shares[0]:.0%}", f"{owner:.0f}", f"{shares[1]:.0%}")
    print_table(table)
    table = Table(title=f"{SLICE} of {LAYERS} layers of GLM-5.3 under TP", title_justify="left")
    headers = ("placement", "requests", "tokens/s", "step ms", "TPOT ms", "hits", "in buffer", "H2D MB", "links MB")
    for header in headers:
        table.add_column(header, justify="left" if header == "placement" else "right")
    for row in result["throughput"]:
        full = " (full)" if row["batch"] == row["most"] else ""
        table.add_row(
            row["placement"], f"{row['batch']}{full}", f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.2f}",
            f"{row['tpot_ms']:.2f}", f"{row['hit_rate']:.1%}", f"{row['buffer_hit_rate']:.1%}",
            f"{row['h2d_bytes'] / 1e6:.1f}", f"{row['link_bytes'] / 1e6:.1f}",
        )  # fmt: skip
    print_table(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput over the batch, and the times of the ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name in dict.fromkeys(row["placement"] for row in result["throughput"]):
        mine = [row for row in result["throughput"] if row["placement"] == name]
        left.plot([row["batch"] for row in mine], [row["tokens_per_s"] for row in mine], marker="o", label=name)
    left.set(title="GLM-5.3 slice under TP", xlabel="requests", ylabel="tokens/s", xscale="log")
    ways = result["links"]["ways"]
    for key in (*(f"{way}_us" for way in EXCHANGES), "owner_computes_us"):
        right.plot([way["rows"] for way in ways], [way[key] for way in ways], marker="o", label=key.removesuffix("_us"))
    right.set(title="one round for a layer group; one layer of owners", xlabel="selected rows", ylabel="us")
    right.set(xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.suptitle("a rehearsal: times mean nothing" if result["rehearsal"] else f"{result['platform']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def rehearsal(config: Config) -> Config:
    return replace(
        config, placements=tuple(name.replace("6144", "17") for name in config.placements), batches=(1,),
        shortest=512, longest=1024, warmup=2, steps=3, rows=(64,), megabytes=1,
    )  # fmt: skip


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.rehearse:
        force_cpu_devices(config.devices)
        config = rehearsal(config)
    result = or_exit(run, config)
    plot(result, config.out / "multi_gpu.png")
    show(result)
    report(result, config.out, "multi_gpu")


if __name__ == "__main__":
    main()
