"""Check every kernel form against its reference on fresh random inputs, and time both in one run.

Times are medians of blocks of calls in a row, so a call's dispatch (about 30 us on a GPU host) bounds them from below.
On a CPU only the references run: nothing to compare, but the command works.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track
from rich.table import Table

from pallas_kernels import pb_lru, sparse_gather
from pallas_kernels.pb_lru import shapes as pb_lru_shapes
from pallas_kernels.sparse_gather import shapes as gather_shapes
from ula_jax.report import environment, print_table, report, stderr


@dataclass(frozen=True)
class Config:
    blocks: int = 9
    """Blocks of calls; the median is reported."""
    calls: int = 20
    """Calls in a block."""
    seed: int = 0
    out: Path = Path("results")


def run(config: Config) -> dict[str, Any]:
    """One row for each kernel, shape and form."""
    on_gpu = jax.default_backend() == "gpu"
    cases: list[tuple[str, str, dict[str, Callable[[], Any]]]] = []
    rng = np.random.default_rng(config.seed)
    shapes = gather_shapes.CARDS if on_gpu else gather_shapes.SMALL
    for name, shape in shapes.items():
        cases.append(("sparse_gather.gather_layers", name, _gathers(shape, rng, on_gpu)))
    for name, shape in (pb_lru_shapes.CARDS if on_gpu else pb_lru_shapes.SMALL).items():
        cases.append(("pb_lru.evict", name, _evictions(shape, rng, on_gpu)))
    rows = []
    for kernel, name, forms in track(cases, "kernels", console=stderr):
        expected = jax.tree.leaves(forms["reference"]())
        base = 0.0
        for form, call in forms.items():
            same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(call()), expected, strict=True))
            took = _median(call, config)
            base = base or took
            rows.append(
                {"kernel": kernel, "shape": name, "form": form, "us": took * 1e6, "ratio": base / took, "equal": same}
            )
    return {"rows": rows, **environment()}


def _gathers(shape: gather_shapes.Shape, rng: np.random.Generator, on_gpu: bool) -> dict[str, Callable[[], Any]]:
    words = rng.integers(1, 2**32, (shape.layers, shape.slots, shape.words), dtype=np.uint32)
    pool = jnp.asarray(words)
    slots = jnp.asarray(rng.integers(0, shape.slots, shape.n), jnp.int32)
    function = jax.jit(sparse_gather.gather_layers, static_argnames="implementation")
    forms = ("reference", "mosaic") if on_gpu else ("reference",)
    return {form: lambda form=form: function(pool, slots, implementation=form) for form in forms}


def _evictions(shape: pb_lru_shapes.Shape, rng: np.random.Generator, on_gpu: bool) -> dict[str, Callable[[], Any]]:
    """A pool used for a while: every slot filled, then rounds of touches."""
    state = pb_lru.create(shape.slots, shape.rounds)
    touch, rotate = jax.jit(pb_lru.touch), jax.jit(pb_lru.rotate)
    state = touch(rotate(state), jnp.arange(shape.slots, dtype=jnp.int32))
    for _ in range(2 * shape.rounds):
        used = rng.choice(shape.slots, max(1, shape.slots // 100), replace=False)
        state = touch(rotate(state), jnp.asarray(used, jnp.int32))
    state = rotate(state)
    function = jax.jit(pb_lru.evict, static_argnums=2, static_argnames="implementation")
    count = jnp.int32(min(shape.limit, shape.slots))
    forms = ("reference", "triton") if on_gpu else ("reference",)
    return {form: lambda form=form: function(state, count, shape.limit, implementation=form) for form in forms}


def _median(call: Callable[[], Any], config: Config) -> float:
    """Seconds of one call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(config.blocks):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(config.calls)])
        times.append((time.perf_counter() - start) / config.calls)
    return statistics.median(times)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = run(config)
    table = Table("kernel", "shape", "form", "us", "speed-up", "equal", title=result["devices"], title_justify="left")
    for row in result["rows"]:
        table.add_row(
            row["kernel"], row["shape"], row["form"], f"{row['us']:.0f}", f"{row['ratio']:.2f}", str(row["equal"])
        )
    print_table(table)
    report(result, config.out, "time_kernels")


if __name__ == "__main__":
    main()
