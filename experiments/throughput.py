"""Decode throughput of every placement on one GPU of a DP node, over the batch, with equal memory.

The model is a slice of GLM-5.3 at its real widths with random bf16 weights (`benchmarks.glm_slice`), the requests have
made-up histories of 64K to 128K tokens, and a trace says what they read, while the indexer, its scores and the top-k
still run (`benchmarks.driven`). A point is one placement at one batch: a process of its own, whose result is kept in
OUT/throughput and not measured again by the same code.

`tokens_per_s` and `step_ms` are of steps sent to the device without waiting for any; `tpot_ms` waits for the tokens of
each, as an engine does that hands them out. Both are wall clock and count everything: the trace that is put in place of
the picks (about 10 us) too. `stages_ms` are device times read from a profile, one step's (`experiments.stage_times`);
`idle` is what is left of `step_ms`. A link's rate is its bytes over the `exchange` stage, where the program names it,
and over the whole step (`_in_step`).

Weights are bf16 where GLM-5.3 is served in fp8, and `models.moe` runs its experts on every token: at such batches
experts are bound by reading weights, of which there are thus twice as many bytes. That hides some of what placements
differ by.
"""

import gc
import hashlib
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.driven import Requests, Streams, calibrated, captured, rounds_needed
from benchmarks.glm_slice import layer_slice, share
from experiments import throughput_report
from experiments.stage_times import NO_GRAPHS, stage_times
from models import Decoder, init_model
from ula_jax import verify
from ula_jax.capacity import admitted, spread
from ula_jax.metrics import Totals
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import Placement, make_placement
from ula_jax.placements.base import Counters, fitting
from ula_jax.report import UserError, environment, or_exit, progress_bar, replacing, report
from ula_jax.runner import Runner, StepOutput
from ula_jax.spec import Budget, Capacity, KVSpec

PARALLEL = Parallel()
MINE = ("benchmarks/driven", "benchmarks/glm_slice", "experiments/stage_times", "experiments/throughput")
"""Modules beside the product that decide a result."""


@dataclass(frozen=True)
class Config:
    """Memory is that of one GPU for the whole model, of which a slice gets the share of its layers."""

    placements: tuple[str, ...] = ("gpu_only", "hisparse", "resident_hot", "ula")
    """Names, with parameters if wanted (hisparse:buffer=10240), or path.py:Class."""
    batches: tuple[int, ...] = (1, 8, 16)
    """Each placement runs those that it can hold."""
    most: bool = True
    """Run also the most that each placement can hold, with all that can."""
    first_layer: int = 2
    layers: int = 8
    device_bytes: float = 0.90 * 143_771 * 2**20 - 113.3e9
    """An H200 but for what serving leaves unused and the weights of DP attention and 32 experts a layer."""
    host_bytes: float = 128e9
    shortest: int = 65_536
    """Tokens of the shortest request at its end."""
    longest: int = 131_072
    contexts: int = 8
    """Different lengths, evenly spaced; requests take them from the middle outwards: any batch has about their mean."""
    trace: Path | None = None
    """Drive selections by this trace file, whose length is then every request's; None: calibrated ones."""
    warmup: int = 64
    """Steps before any is timed."""
    steps: int = 64
    """Steps timed together, and as many one by one."""
    profiled: int = 4
    """Further steps for the split into stages."""
    page_size: int = 64
    in_process: bool = False
    """Measure all points in this process: faster, and one that fails ends the others."""
    tiny: bool = False
    """GLM's shape with tiny widths, for CPUs."""
    check: bool = False
    """Check the placement's invariants before and after (slow)."""
    out: Path = Path("results")
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """All of it in miniature, on a CPU."""

    @property
    def steps_in_all(self) -> int:
        return self.warmup + 2 * self.steps + self.profiled

    @property
    def folder(self) -> Path:
        return self.out / "throughput"


def run(config: Config) -> dict[str, Any]:
    """Every point, measured now or before; the result is what is printed and written."""
    if config.smoke:
        config = smoke(config)
    points = plan(config)
    selections(config)  # kept in a file before processes ask for it
    results = []
    with progress_bar("points") as progress:
        task = progress.add_task("throughput", total=len(points))
        for name, batch in points:
            progress.update(task, description=f"{name} x {batch}")
            results.append(finished(config, name, batch) or measured(config, name, batch))
            progress.advance(task)
    most = {name: admits(config, name) for name in config.placements}
    about = {key: results[0][key] for key in environment()} if results else {}
    return {"points": results, "admitted": most, "bars": throughput_report.bars(results), **about}


def smoke(config: Config) -> Config:
    return replace(
        config, smoke=False, tiny=True, check=True, in_process=True, batches=(3,), most=False, layers=2,
        device_bytes=3e6, host_bytes=2e7, shortest=160, longest=256, contexts=2, page_size=16, warmup=4, steps=3,
        profiled=2,
    )  # fmt: skip


def plan(config: Config) -> list[tuple[str, int]]:
    """(placement, batch) of every point: each placement at all batches that it holds, one after the other."""
    most = {name: admits(config, name) for name in config.placements}
    batches = sorted({*config.batches, *(most.values() if config.most else ())} - {0})
    points = [(name, batch) for name in config.placements for batch in batches if batch <= most[name]]
    if not points:
        raise UserError(f"batches: expected one that fits, found {batches} where {most} fit; raise the memory")
    return points


def admits(config: Config, name: str) -> int:
    """The most requests, in the order in which batches take them, that the placement can hold."""
    return admitted(capacity_of(config, name), [history + config.steps_in_all for history in histories(config)])


def histories(config: Config) -> tuple[int, ...]:
    """Tokens that requests have at the start, request by request; after the last the first follows again."""
    if config.trace:
        return selections(config).histories
    return tuple(end - config.steps_in_all for end in spread(config.shortest, config.longest, config.contexts))


def selections(config: Config) -> Streams:
    """What drives the requests."""
    k, groups = spec_of(config).topk, len(spec_of(config).groups)
    if config.trace:
        return captured(config.trace, config.steps_in_all, k)
    rounds = rounds_needed(config.steps_in_all, max(batch for _, batch in plan(config)), groups, config.contexts)
    return calibrated(histories(config), rounds, k, config.folder)


def spec_of(config: Config) -> KVSpec:
    model = layer_slice(config.first_layer, config.layers, config.tiny)
    return KVSpec.of(model, rows="fp8", page_size=config.page_size, max_context=config.longest)


def budget_of(config: Config) -> Budget:
    return share(config.device_bytes, config.host_bytes, config.layers)


def placement_of(name: str) -> Placement:
    return make_placement(name, PARALLEL)


def capacity_of(config: Config, name: str) -> Capacity:
    return fitting(placement_of(name), spec_of(config), budget_of(config))


def point_file(config: Config, name: str, batch: int) -> Path:
    """Names settings and code: another file for another result."""
    same = {"placements", "batches", "most", "out", "in_process", "check", "smoke"}
    settings = {key: str(value) for key, value in asdict(config).items() if key not in same}
    digest = hashlib.sha256(f"{settings} {name} {batch} {_code()}".encode()).hexdigest()[:12]
    plain = "".join(c if c.isalnum() or c in "_=-" else "-" for c in name)
    return config.folder / f"{plain}-{batch}-{digest}.json"


@cache
def _code() -> str:
    code, here = hashlib.sha256(), Path(__file__).parent
    product = (file for name in ("pallas_kernels", "ula_jax", "models") for file in (here.parent / name).rglob("*.py"))
    for file in (*sorted(product), *(here.parent / f"{name}.py" for name in MINE)):
        code.update(file.read_bytes())
    return code.hexdigest()


def finished(config: Config, name: str, batch: int) -> dict[str, Any] | None:
    file = point_file(config, name, batch)
    return json.loads(file.read_text()) if file.is_file() else None


def measured(config: Config, name: str, batch: int) -> dict[str, Any]:
    if config.in_process:
        return measure(config, name, batch)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_alone, config, name, batch).result()


def _alone(config: Config, name: str, batch: int) -> dict[str, Any]:
    """In a new process: programs that points share, such as those that draw weights, are compiled only once."""
    jax.config.update("jax_compilation_cache_dir", str(config.folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return measure(config, name, batch)


def measure(config: Config, name: str, batch: int) -> dict[str, Any]:
    """Measure one point and keep its result."""
    start = time.perf_counter()
    spec, placement = spec_of(config), placement_of(name)
    runner = Runner(_model(config), placement, spec, budget_of(config), make_mesh())
    requests = Requests(runner, selections(config), batch, config.steps_in_all)
    requests.fill()
    if config.check:
        verify.check(placement, runner.state, [requests.live_addresses()])
    warm = [requests.step() for _ in range(config.warmup)]
    jax.block_until_ready(warm[-1])
    ready = time.perf_counter() - start
    result = {
        "placement": name, "batch": batch, "contexts": _range(requests.histories), "admitted": admits(config, name),
        **_timed(config, requests, batch), **_memory(runner, spec), "ready_s": ready, **environment(),
    }  # fmt: skip
    requests.check()
    if config.check:
        verify.check(placement, runner.state, [requests.live_addresses()])
    del runner, requests, warm
    gc.collect()
    with replacing(point_file(config, name, batch)) as scratch:
        scratch.write_text(json.dumps(result) + "\n")
    return result


def _timed(config: Config, requests: Requests, batch: int) -> dict[str, Any]:
    """Run the timed steps; speeds, rows that moved, stages."""
    start = time.perf_counter()
    together = [requests.step() for _ in range(config.steps)]
    jax.block_until_ready(together[-1])
    step_s = (time.perf_counter() - start) / config.steps
    one_by_one, waits = [], []
    for _ in range(config.steps):
        start = time.perf_counter()
        one_by_one.append(requests.step())
        jax.block_until_ready(one_by_one[-1].tokens)
        waits.append(time.perf_counter() - start)
    moved = _moved(requests.runner.spec, together + one_by_one)
    stages: dict[str, float] = {}
    if config.profiled:
        runner: Any = requests.runner
        lowered = runner.step_function.lower(*requests.arguments(), resident=requests.resident)
        program = lowered.compile(compiler_options=NO_GRAPHS)
        runner.step_function = lambda *arguments, resident: program(*arguments)
        stages = stage_times(requests.step, config.profiled, str(program.as_text()))
        stages["idle"] = max(0.0, step_s - sum(stages.values()))
    rates = {}
    for link in ("h2d", "d2h"):
        moved_bytes = moved[f"{link}_bytes"]
        exchange = stages.get("exchange")
        rates[f"{link}_gb_s"] = moved_bytes / exchange / 1e9 if exchange and moved_bytes else None
        rates[f"{link}_gb_s_in_step"] = moved_bytes / step_s / 1e9
    return {
        "tokens_per_s": batch / step_s, "step_ms": step_s * 1e3,
        "tpot_ms": statistics.median(waits) * 1e3, "tpot_p95_ms": float(np.percentile(waits, 95)) * 1e3,
        **moved, **rates, "stages_ms": {name: seconds * 1e3 for name, seconds in stages.items()},
    }  # fmt: skip


def _moved(spec: KVSpec, outputs: list[StepOutput]) -> dict[str, Any]:
    """Of one step: rows of a token in a layer group, and bytes of all layers. RuntimeError if a row was lost."""
    totals = Totals(spec)
    for output in outputs:
        totals.add(np.asarray(output.counters), output.tokens.size)
    if lost := totals.count("dropped"):
        raise RuntimeError(f"placement: expected a place for every row, found none for {lost}; this is a bug")
    steps = totals.steps
    others = ("dropped", "peer_rows", "buffer_hits", "rounds")
    rows = {name: totals.count(name) / steps for name in Counters._fields if name not in others}
    return {
        "hit_rate": totals.device_hit_rate, "h2d_bytes": totals.h2d_bytes / steps,
        "d2h_bytes": totals.d2h_bytes / steps, "rows": rows,
    }  # fmt: skip


def _memory(runner: Runner, spec: KVSpec) -> dict[str, Any]:
    """Bytes of what history takes, and of all that the device held at most."""
    groups = runner.state.groups
    lanes = {tier: sum(lane.nbytes for group in groups for lane in getattr(group, tier)) for tier in ("device", "host")}
    books = jax.tree.leaves([(group.mapping, group.policy) for group in groups])
    (device,) = runner.mesh.devices.flat
    return {
        "device_rows_bytes": lanes["device"], "host_rows_bytes": lanes["host"],
        "index_key_bytes": sum(lane.nbytes for lane in jax.tree.leaves(runner.state.index_keys)),
        "books_bytes": sum(array.nbytes for array in books),
        "slots": {"device": runner.capacity.device_slots, "host": runner.capacity.host_slots},
        "row_bytes": spec.row_bytes, "device_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }  # fmt: skip


@cache
def _models(first: int, layers: int, tiny: bool) -> Decoder:
    return init_model(layer_slice(first, layers, tiny), make_mesh(), PARALLEL, seed=0, dtype=jnp.bfloat16)


def _model(config: Config) -> Decoder:
    return _models(config.first_layer, config.layers, config.tiny)


def _range(lengths: np.ndarray) -> dict[str, float]:
    return {"shortest": int(lengths.min()), "mean": float(lengths.mean()), "longest": int(lengths.max())}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    throughput_report.show(result)
    throughput_report.plot(result, config.out / "throughput.png")
    report(result, config.out, "throughput")


if __name__ == "__main__":
    main()
