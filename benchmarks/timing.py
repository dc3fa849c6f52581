"""How the benchmarks time: many distinct calls in one compiled program, medians, everything compared in one run."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.case import Case

AHEAD = 4
"""Programs that a measurement times beyond the one that it takes to start."""


def per_call(case: Case, form: str, repeats: int = 9) -> tuple[float, float]:
    """Microseconds of one call: (median, spread between the quartiles).

    The calls run back to back in one program, and a few programs are dispatched before the first is waited for: the
    card never waits for the host, and a call's dispatch, about 30 us, is in no figure.
    """
    function = case.forms[form]
    if case.state is None:
        program = jax.jit(lambda calls: [function(*call) for call in calls])
        once: Callable[[], Any] = lambda: program(list(case.calls))  # noqa: E731
    else:
        program = jax.jit(lambda state, calls: _chain(function, state, calls), donate_argnums=0)
        held = [case.state()]

        def once() -> Any:
            held[0], results = program(held[0], list(case.calls))
            return results

    def seconds(programs: int) -> float:
        start = time.perf_counter()
        for _ in range(programs - 1):
            once()
        jax.block_until_ready(once())
        return time.perf_counter() - start

    seconds(2)
    times = [1e6 * (seconds(AHEAD + 1) - seconds(1)) / (AHEAD * len(case.calls)) for _ in range(repeats)]
    quarters = statistics.quantiles(times, n=4)
    return statistics.median(times), quarters[2] - quarters[0]


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
