"""How long a replay takes, beside the same policy written as a libCacheSim plug-in in Python, in one run.

The trace is synthetic, with the sizes of the published GLM-5.1 replay: 2048 accesses a round. The plug-in replays one
size of it, access by access, so it may push out a row that is used later in the same round; its miss ratio differs in
the second digit. Rates are accesses per second, sizes counted.
"""

import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from ula_jax.policies import make_policy
from ula_jax.replay import replay
from ula_jax.report import UserError, environment, or_exit, print_table, progress_bar, report, stderr
from ula_jax.traces import Trace, TraceConfig, generate, save


@dataclass(frozen=True)
class Config:
    rounds: int = 1800
    positions: int = 100_384
    k: int = 2048
    sizes: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
    """Pool sizes in selections."""
    policies: tuple[str, ...] = ("pb_lru",)
    plug_in_rounds: int = 200
    """Rounds (of those above) that the plug-in replays at the middle size; 0: leave it out."""
    out: Path = Path("results")


def run(config: Config) -> dict[str, Any]:
    """One row for each policy, and one for the plug-in."""
    if not config.policies:
        raise UserError("policies: expected at least one, found none; name some")
    trace = generate(TraceConfig(1, config.positions, config.rounds, config.k, None, churn=0.0, shortest=1.0))
    sizes = [int(size * config.k) for size in config.sizes]
    accesses, rows = trace.num_rounds * config.k, []
    with progress_bar("rounds") as progress:
        for policy in config.policies:
            task = progress.add_task(policy, total=trace.num_rounds)
            start = time.perf_counter()
            table = replay(make_policy(policy), trace, sizes, on_rounds=lambda n, t=task: progress.advance(t, n))
            seconds = time.perf_counter() - start
            ratios = [miss / accesses for miss in table["misses"].to_pylist()]
            rows.append(
                {"form": policy, "sizes": len(sizes), "accesses": accesses * len(sizes), "seconds": seconds,
                 "per_second": accesses * len(sizes) / seconds, "miss_ratios": ratios}
            )  # fmt: skip
    if config.plug_in_rounds:
        rows.append(_plug_in(trace, sizes[len(sizes) // 2], config.plug_in_rounds))
    for row in rows:
        row["ratio"] = row["per_second"] / rows[-1]["per_second"]
    return {"rows": rows, **environment()}


def _plug_in(trace: Trace, size: int, rounds: int) -> dict[str, Any]:
    try:
        import libcachesim  # pyright: ignore
    except ImportError as missing:
        raise UserError(
            f"libcachesim: expected the package for the comparison, found none ({missing}); install it, or pass "
            "--plug-in-rounds 0"
        ) from missing
    part = Trace(trace.positions[:, :rounds], trace.finished[:, :rounds], trace.k, trace.length)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.oracleGeneral"
        save(part, path)
        package: Any = libcachesim
        reader = package.TraceReader(str(path), package.TraceType.ORACLE_GENERAL_TRACE)
        cache = plug_in(size, reader)
        stderr.print(f"plug-in: {rounds} rounds at {size} slots")
        start = time.perf_counter()
        miss_ratio, _ = cache.process_trace(reader)
        seconds = time.perf_counter() - start
    accesses = part.num_rounds * trace.k
    return {
        "form": "libCacheSim plug-in", "sizes": 1, "accesses": accesses, "seconds": seconds,
        "per_second": accesses / seconds, "miss_ratios": [miss_ratio],
    }  # fmt: skip


def plug_in(size: int, reader: Any) -> Any:
    """A libCacheSim cache of `size` bytes that runs `BucketedLRU`."""
    import libcachesim

    return libcachesim.PluginCache(
        size,
        lambda _: BucketedLRU(),
        BucketedLRU.hit,
        BucketedLRU.miss,
        BucketedLRU.evict,
        BucketedLRU.remove,
        lambda _: None,
        reader=reader,
    )


class BucketedLRU:
    """PB-LRU with as many buckets as there are rounds, an access at a time: a bucket for each round, oldest first."""

    def __init__(self):
        self.bucket_of: dict[int, int] = {}
        self.buckets: OrderedDict[int, dict[int, None]] = OrderedDict()

    def hit(self, request: Any) -> None:
        self.remove(request.obj_id)
        self.miss(request)

    def miss(self, request: Any) -> None:
        self.bucket_of[request.obj_id] = request.clock_time
        self.buckets.setdefault(request.clock_time, {})[request.obj_id] = None

    def evict(self, _: Any) -> int:
        oldest = next(iter(self.buckets.values()))
        victim = next(iter(oldest))
        self.remove(victim)
        return victim

    def remove(self, obj_id: int) -> None:
        bucket = self.bucket_of.pop(obj_id)
        del self.buckets[bucket][obj_id]
        if not self.buckets[bucket]:
            del self.buckets[bucket]


def show(result: dict[str, Any]) -> None:
    table = Table(title="replay speed", title_justify="left")
    for header in ("form", "sizes", "accesses", "seconds", "accesses/s", "ratio"):
        table.add_column(header, justify="left" if header == "form" else "right")
    for row in result["rows"]:
        table.add_row(
            row["form"], str(row["sizes"]), f"{row['accesses']:,}", f"{row['seconds']:.1f}",
            f"{row['per_second']:,.0f}", f"{row['ratio']:.1f}",
        )  # fmt: skip
    print_table(table)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    show(result)
    report(result, config.out, "time_replay")


if __name__ == "__main__":
    main()
