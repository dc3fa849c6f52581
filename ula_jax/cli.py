"""The command `ula`: replay traces against policies, draw miss-ratio curves, make traces, examine the machine."""

import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import tyro
from rich.table import Table

from ula_jax import capacity, doctor, results
from ula_jax.policies import POLICIES, make_policy
from ula_jax.policies.base import NEVER, depth
from ula_jax.replay import check_sizes, replay
from ula_jax.report import UserError, environment, or_exit, print_table, progress_bar, report
from ula_jax.traces import Trace, TraceConfig, generate, load, save
from ula_jax.traces.statistics import ring_for, stack_distances, summary
from ula_jax.types import EMPTY


@dataclass(frozen=True)
class Replay:
    """Play a trace against policies at several pool sizes; finished (policy, size) pairs are not played again."""

    trace: tyro.conf.Positional[Path]
    """Parquet trace, oracleGeneral (.oracleGeneral, .bin; .zst) or CSV."""
    policies: tuple[str, ...] = ()
    """Names with parameters, or path.py:Class; empty: every registered policy that the trace allows."""
    sizes: tuple[str, ...] = ("1.5k", "2k", "4k")
    """Slots of a pool; `2k` is twice what one round selects at most, over all requests."""
    warmup: int = 0
    """First rounds that do not count."""
    out: Path = Path("results")


@dataclass(frozen=True)
class Mrc:
    """Miss-ratio curves: replay at many sizes, evenly spaced on a logarithmic axis."""

    trace: tyro.conf.Positional[Path]
    policies: tuple[str, ...] = ("lru", "pb_lru", "belady")
    points: int = 10
    largest: str = "8k"
    warmup: int = 0
    out: Path = Path("results")


@dataclass(frozen=True)
class Policies:
    """List the replacement policies and their parameters."""

    out: Path = Path("results")


@dataclass(frozen=True)
class Doctor:
    """Say what this machine offers, which form of each kernel runs on it, and why no other."""

    out: Path = Path("results")


@dataclass(frozen=True)
class Synthetic:
    """Make a calibrated synthetic trace."""

    path: tyro.conf.Positional[Path]
    config: tyro.conf.OmitArgPrefixes[TraceConfig] = dataclasses.field(default_factory=TraceConfig)
    out: Path = Path("results")


@dataclass(frozen=True)
class Stats:
    """Sizes, overlap, working sets and reuse of a trace.

    Stack distances are in selections (k): half of the reuses have less than `stack_distance_50%` of other rows between.
    """

    trace: tyro.conf.Positional[Path]
    out: Path = Path("results")


@dataclass(frozen=True)
class Convert:
    """Read a trace in one format and write it in another; the file names decide."""

    source: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    stream: int | None = None
    """Which stream to write where the target's format holds one."""
    rounds: Literal["time", "record"] = "time"
    """What a round is in a foreign source: all records of one time, or each record."""
    out: Path = Path("results")


def run_replay(config: Replay) -> dict[str, Any]:
    trace = load(config.trace)
    policies = config.policies or tuple(name for name in POLICIES if _playable(make_policy(name), trace))
    sizes = [_slots(size, trace) for size in config.sizes]
    return _compare(trace, config.trace.stem, policies, sizes, config.warmup, config.out, "replay")


def run_mrc(config: Mrc) -> dict[str, Any]:
    trace = load(config.trace)
    if config.points < 2:
        raise UserError(f"points: expected at least 2, found {config.points}; ask for more")
    sizes = np.geomspace(trace.largest_round, _slots(config.largest, trace), config.points).astype(int)
    return _compare(trace, config.trace.stem, config.policies, sizes.tolist(), config.warmup, config.out, "mrc")


def run_policies(config: Policies) -> dict[str, Any]:
    table = Table(title="policies: name:parameter=value,... or path.py:Class", title_justify="left")
    for header in ("name", "parameters", "what it evicts"):
        table.add_column(header)
    rows = []
    for name, cls in POLICIES.items():
        parameters = ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(cls))  # pyright: ignore
        what = (sys.modules[cls.__module__].__doc__ or "").partition("\n")[0]
        table.add_row(name, parameters, what)
        rows.append({"policy": name, "parameters": parameters, "about": what})
    print_table(table)
    return {"rows": rows}


def run_doctor(config: Doctor) -> dict[str, Any]:
    found = doctor.examine()
    doctor.show(found)
    return found


def run_capacity(config: capacity.Config) -> dict[str, Any]:
    result = capacity.run(config)
    capacity.show(result)
    return {**result, **environment()}


def run_synthetic(config: Synthetic) -> dict[str, Any]:
    trace = generate(config.config)
    save(dataclasses.replace(trace, meta={**trace.meta, **environment()}), config.path)
    return _describe(trace, config.path)


def run_stats(config: Stats) -> dict[str, Any]:
    return _describe(load(config.trace), config.trace)


def run_convert(config: Convert) -> dict[str, Any]:
    trace = load(config.source, config.rounds)
    save(trace, config.target, config.stream)
    return _describe(trace, config.target)


def _compare(
    trace: Trace, name: str, policies: tuple[str, ...], sizes: list[int], warmup: int, out: Path, command: str
) -> dict[str, Any]:
    """Play what is missing, then show, draw and return the summary."""
    policies = tuple(dict.fromkeys((*policies, "belady")))
    sizes = sorted(set(sizes))
    check_sizes(trace, sizes)
    made = {policy: make_policy(policy) for policy in policies}
    store = results.Store(out / f"replay-{name}.parquet", trace, warmup)
    about = environment()
    with progress_bar("rounds") as progress:
        for text, policy in made.items():
            todo = store.missing(text, sizes)
            if not todo:
                continue
            task = progress.add_task(text, total=trace.num_rounds * len(trace.positions))
            table = replay(
                policy, trace, todo, warmup=warmup, name=text, on_rounds=lambda n, t=task: progress.advance(t, n)
            )
            store.add(text, table, about)
    table = store.table(policies, sizes)
    rows = results.summarize(table)
    counted = (trace.num_rounds - warmup) * len(trace.positions)
    print_table(results.miss_table(rows, trace.largest_round, counted))
    picture = out / f"{command}-{name}.png"
    results.draw(table, rows, trace.largest_round, warmup, picture, f"{name}: {len(made)} policies")
    return {"rows": rows, "trace": {**summary(trace), "meta": trace.meta}, "warmup": warmup, **about}


def _playable(policy: Any, trace: Trace) -> bool:
    return depth(policy) <= (trace.depth if trace.scores is not None else 1.0)


def _slots(text: str, trace: Trace) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)", text)
    if not found:
        raise UserError(f"sizes: expected slots (4096) or multiples of a selection (2k), found {text!r}; write it so")
    return int(float(found[1]) * (trace.largest_round if found[2] else 1))


def _describe(trace: Trace, path: Path) -> dict[str, Any]:
    facts = summary(trace)
    if trace.num_rounds <= 10_000:  # the time grows with the square of the rounds
        distances = stack_distances(trace)
        known = distances[(distances != NEVER) & (distances != EMPTY)] / trace.largest_round
        if known.size:
            facts |= {f"stack_distance_{q}%": float(np.percentile(known, q)) for q in (50, 90, 99)}
    facts |= {f"ring_{size}k": ring_for(trace, int(size * trace.largest_round)) for size in (1.5, 2, 4)}
    table = Table(title=str(path), title_justify="left", show_header=False)
    for key, value in facts.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    print_table(table)
    return {**facts, "meta": trace.meta}


TraceCommand = (
    Annotated[Synthetic, tyro.conf.subcommand("synthetic")]
    | Annotated[Stats, tyro.conf.subcommand("stats")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
)


@dataclass(frozen=True)
class TraceTools:
    """Make, inspect and convert traces. `python -m experiments.capture_trace` captures one from a model."""

    command: TraceCommand


Command = (
    Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Mrc, tyro.conf.subcommand("mrc")]
    | Annotated[TraceTools, tyro.conf.subcommand("trace")]
    | Annotated[Policies, tyro.conf.subcommand("policies")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[capacity.Config, tyro.conf.subcommand("capacity")]
)

RUN: dict[type, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    Replay: ("replay", run_replay),
    Mrc: ("mrc", run_mrc),
    Policies: ("policies", run_policies),
    Doctor: ("doctor", run_doctor),
    capacity.Config: ("capacity", run_capacity),
    Synthetic: ("trace", run_synthetic),
    Stats: ("trace", run_stats),
    Convert: ("trace", run_convert),
}


def main(arguments: list[str] | None = None) -> None:
    command: Any = tyro.cli(Command, args=arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    if isinstance(command, TraceTools):
        command = command.command
    name, run = RUN[type(command)]
    result = or_exit(run, command, OSError, pa.ArrowException)
    report(result, command.out, name)
    if problems := result.get("problems"):
        sys.exit("\n".join(f"error: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
