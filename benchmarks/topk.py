"""Exact selection of the largest scores of long rows, in ascending order of position."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.topk import select
from pallas_kernels.topk.shapes import CARDS, SMALL, Shape

BARS = {"decode_1": 74.0, "decode_64": 79.0}
"""What SGLang's radix top-k takes, on an H200."""
CALLS = 10


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    for name, shape in (SMALL if small else CARDS).items():
        for kind, draw in (("normal", jax.random.normal), ("relu", _sums_of_relu)):
            yield case(f"{name} {kind}", shape, draw, rng, BARS.get(name), small)


def case(
    name: str, shape: Shape, draw: Callable, rng: np.random.Generator, bar: float | None = None, small: bool = False
) -> Case:
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 2 if small else CALLS)
    lengths = jnp.full(shape.rows, shape.length, jnp.int32)
    calls = [(jax.jit(draw, static_argnums=1)(key, (shape.rows, shape.length)), lengths) for key in keys]
    forms = ["reference", "triton_interpret" if small else "triton"]
    k = min(shape.k, shape.length)
    return Case(
        kernel="topk.select",
        shape=name,
        forms={form: partial(_select, shape.k, form) for form in forms},
        calls=calls,
        check=partial(_wrong, k),
        device_bytes=4 * shape.rows * (shape.length + k),
        bar=bar,
        outside={} if small or find_spec("torch") is None else {"torch.topk": partial(_torch, shape, k)},
    )


def _select(k: int, form: str, scores: jax.Array, lengths: jax.Array) -> jax.Array:
    return select(scores, k, lengths, implementation=form)


def _sums_of_relu(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """As index scores are: 1.2 % are positive, which is fewer than 2048 of 131072, and the rest is 0."""
    heads = [jax.nn.relu(jax.random.normal(k, shape) - 2.5) for k in jax.random.split(key)]
    return heads[0] + heads[1]


def _wrong(k: int, form: str, result: jax.Array, call: tuple) -> str | None:
    """By numpy's sort, on a few rows."""
    for row in {0, len(result) // 2, len(result) - 1}:
        best = np.sort(np.argsort(-np.asarray(call[0][row], np.float64), kind="stable")[:k])
        if not np.array_equal(result[row], best):
            return f"row {row}: {np.sum(np.asarray(result[row]) != best)} positions of {k} are not those of a sort"
    return None


def _torch(shape: Shape, k: int, rounds: int = 20) -> float:
    """`torch.topk`, without order of positions or ranks."""
    import torch  # pyright: ignore[reportMissingImports]

    drawn = [torch.randn(shape.rows, shape.length, device="cuda") for _ in range(4)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(2 * rounds):
        if number == rounds:
            start.record()
        torch.topk(drawn[number % 4], k, sorted=False)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / rounds * 1e3
