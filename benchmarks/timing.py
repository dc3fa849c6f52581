"""How the benchmarks time: many distinct calls in one compiled program, medians, everything compared in one run."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.case import Case

AHEAD = 4
"""Programs that a measurement times beyond the one that it takes to start."""
SHORT, ENOUGH = 0.05, 2.0
"""Seconds: of a program that takes longer one is enough, and a form is not timed for longer."""


class Timing(NamedTuple):
    """Microseconds of one call."""

    us: float
    """By the host's clock: median."""
    spread: float
    """Between the quartiles."""
    device_us: float | None
    """By the card's clock: None where the profiler sees no card."""


def per_call(case: Case, form: str, repeats: int = 9) -> Timing:
    """Time a form.

    The calls run back to back in one program, and a few programs are dispatched before the first is waited for. Even so
    the host may take longer to launch a short kernel than the kernel runs; the card's own clock then says what a longer
    program would pay.
    """
    once = _program(case, form)

    def seconds(programs: int) -> float:
        start = time.perf_counter()
        for _ in range(programs - 1):
            once()
        jax.block_until_ready(once())
        return time.perf_counter() - start

    seconds(2)
    ahead = AHEAD if (one := seconds(1)) < SHORT else 1
    repeats = max(2, min(repeats, int(ENOUGH / ((ahead + 2) * one))))
    times = [1e6 * (seconds(ahead + 1) - seconds(1)) / (ahead * len(case.calls)) for _ in range(repeats)]
    quarters = statistics.quantiles(times, n=4)
    spans = _device_spans(once, PROFILED)
    device_us = 1e6 * statistics.median(spans) / len(case.calls) if spans else None
    return Timing(statistics.median(times), quarters[2] - quarters[0], device_us)


PROFILED = 3
"""Programs that the profiler sees."""


def _program(case: Case, form: str) -> Callable[[], Any]:
    """Runs all the case's calls. What it returns is ready when all of them are done, also those that only change the
    state."""
    function = case.forms[form]
    if case.state is None:
        program = jax.jit(lambda calls: [function(*call) for call in calls])
        return lambda: program(list(case.calls))
    program = jax.jit(lambda state, calls: _chain(function, state, calls), donate_argnums=0)
    held = [case.state()]

    def once() -> Any:
        held[:] = program(held[0], list(case.calls))
        return held

    return once


def _device_spans(once: Callable[[], Any], times: int) -> list[float]:
    """Seconds from the first kernel of each run to the end of its last."""
    spans = []
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    for _ in range(times if jax.default_backend() == "gpu" else 0):
        planes = [plane for plane in profile(once, options).planes if "GPU" in plane.name]
        streams = [line for plane in planes for line in plane.lines if "Stream" in line.name]
        events = [(e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events]
        if events:
            spans.append((max(end for _, end in events) - min(start for start, _ in events)) / 1e9)
    return spans


def profile(run: Callable[[], Any], options: Any = None) -> Any:
    """What the profiler saw (`jax.profiler.ProfileData`) until the result of `run` was there."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (found,) = Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(found))


def first_result(case: Case, form: str) -> Any:
    """What the form returns for its first call, from a fresh state."""
    function, call = case.forms[form], case.calls[0]
    if case.state is None:
        return jax.jit(function)(*call)
    return jax.jit(function, donate_argnums=0)(case.state(), *call)


def _chain(function: Callable[..., Any], state: Any, calls: Sequence[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
    results = []
    for call in calls:
        state, result = function(state, *call)
        results.append(result)
    return state, results
