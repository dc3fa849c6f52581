"""Attention of decode tokens over their selected rows, which lie scattered over a pool."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case
from pallas_kernels.sparse_mla import EMPTY, sparse_mla
from pallas_kernels.sparse_mla.shapes import CARDS, SMALL, Shape
from ula_jax.rows import RowFormat

LATENT, ROPE, SCALE = 512, 64, 576**-0.5
BARS = {
    ("fp8", "1_request"): 42.0,
    ("fp8", "32_requests"): 75.0,
    ("fp8", "64_requests"): 105.0,
    ("fp8", "64_requests_3_tokens"): 230.0,
    ("bf16", "64_requests"): 77.0,
}
"""FlashMLA takes 35, 65, 92 and 200 us of fp8 rows; of bf16 rows its time is the bar (on an H200)."""
CALLS = 12
"""At least; of short calls more, so that the dispatch of a program, about 30 us, counts for little."""
ERROR = {"reference": 1e-5, "jnp_bf16": 1e-2}
"""Allowed of the norm, 1e-3 of forms that are not named. Scores are of the order of 1."""


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    for name, shape in {"one_block": SMALL["one_block"]}.items() if small else CARDS.items():
        for rows in ("fp8", "bf16") if name in ("one_block", "64_requests") else ("fp8",):
            yield case(name, shape, RowFormat(rows, LATENT, ROPE), rng, small)


def case(name: str, shape: Shape, fmt: RowFormat, rng: np.random.Generator, small: bool = False) -> Case:
    tokens = shape.batch * shape.steps
    pool = stored(shape, fmt, int(rng.integers(2**31)))
    calls = [
        (
            jnp.asarray(rng.standard_normal((shape.batch, shape.steps, shape.heads, fmt.width), np.float32)),
            pool,
            jnp.asarray(rng.integers(EMPTY, shape.slots, (shape.batch, shape.steps, shape.selected), np.int32)),
        )
        for _ in range(2 if small else max(CALLS, 24 // tokens))
    ]
    layer = shape.layers - 1
    forms: dict[str, Any] = {
        form: partial(_attend, form, fmt, layer) for form in ("reference", "triton_interpret" if small else "triton")
    }
    return Case(
        kernel="sparse_mla",
        shape=f"{fmt.name} {name}",
        forms=forms | {"jnp_bf16": partial(_plain, fmt, layer)},
        calls=calls,
        check=partial(_wrong, fmt, layer),
        device_bytes=tokens * (shape.selected * (fmt.nbytes + 4) + 4 * shape.heads * (fmt.width + LATENT)),
        flops=2 * tokens * shape.selected * shape.heads * (fmt.width + LATENT),
        bar=BARS.get((fmt.name, name)),
    )


def stored(shape: Shape, fmt: RowFormat, seed: int) -> tuple[jax.Array, ...]:
    """A pool of random rows, of different sizes, drawn on the device."""

    @jax.jit
    def draw():
        number, size = jax.random.split(jax.random.key(seed))
        sizes = 2 ** jax.random.uniform(size, (shape.layers, shape.slots, 1), minval=-1, maxval=1)
        return fmt.pack(sizes * jax.random.normal(number, (shape.layers, shape.slots, fmt.width)))

    return draw()


def _attend(form: str, fmt: RowFormat, layer: int, query, pool, slots):
    return sparse_mla(query, pool, layer, slots, fmt, scale=SCALE, implementation=form)


def _plain(fmt: RowFormat, layer: int, query, pool, slots):
    """As one writes it down first, in bf16."""
    valid = slots >= 0
    rows = fmt.unpack(tuple(lane[layer, jnp.maximum(slots, 0)] for lane in pool)).astype(jnp.bfloat16)
    scores = jnp.einsum("bshd,bskd->bshk", query.astype(jnp.bfloat16), rows, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, :, None], scores * SCALE, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]).astype(jnp.bfloat16)
    values = rows[..., : fmt.latent]
    return jnp.einsum("bshk,bskc->bshc", weights, values, preferred_element_type=jnp.float32), lse


def _wrong(fmt: RowFormat, layer: int, form: str, result: Any, call: tuple) -> str | None:
    """Compares the first and the last token with float64."""
    query, pool, slots = call
    limit = ERROR.get(form, 1e-3)
    for at in ((0, 0), (-1, -1)):
        chosen = slots[at]
        rows = fmt.unpack(tuple(lane[layer, chosen[chosen >= 0]] for lane in pool))
        kept = np.asarray(rows, np.float64)
        scores = np.asarray(query[at], np.float64) @ kept.T * SCALE
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - top)
        output = weights @ kept[:, : fmt.latent] / weights.sum(-1, keepdims=True)
        lse = np.log(weights.sum(-1)) + top[:, 0]
        error = np.linalg.norm(np.asarray(result[0][at]) - output) / np.linalg.norm(output)
        off = np.abs(np.asarray(result[1][at]) - lse).max()
        if not (error < limit and off < 10 * limit):
            return f"token {at}: off by {error:.1e} of the norm (allowed {limit:.0e}), log-sum-exp by {off:.1e}"
    return None
