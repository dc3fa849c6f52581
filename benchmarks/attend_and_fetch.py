"""Attention with a fetch riding along, against the same two one after the other.

The rows of one layer group come from the host while another is attended to. Rows and pools are those of
`benchmarks.sparse_mla` and `benchmarks.host_rows`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import host_rows, sparse_mla
from benchmarks.case import Case
from benchmarks.host_rows import Pools
from pallas_kernels import sparse_gather as sg
from pallas_kernels.sparse_mla import shapes, sparse_mla_and_fetch
from ula_jax.rows import RowFormat

FMT = RowFormat("fp8", sparse_mla.LATENT, sparse_mla.ROPE)
MISSES = {"64_requests": (2, 102, 410), "32_requests": (102,)}
"""Rows that each request fetches, of the four layers of a group."""
CALLS = 6


def cases(rng: np.random.Generator, small: bool) -> Iterator[Case]:
    if small:
        yield case("one_block", shapes.SMALL["one_block"], host_rows.Shape(2, 40, 20, 12, 9), rng, True)
        return
    for name, misses in MISSES.items():
        for each in misses:
            shape = shapes.CARDS[name]
            yield case(name, shape, host_rows.FOUR(n := shape.batch * each, n), rng, False)


def case(name: str, shape: shapes.Shape, rows: host_rows.Shape, rng: np.random.Generator, small: bool) -> Case:
    attending = sparse_mla.case(name, shape, FMT, rng, small)
    layer, suffix = shape.layers - 1, "_interpret" if small else ""
    forms: dict[str, Any] = {"apart": f"triton{suffix}", f"triton{suffix}": f"triton{suffix}"}
    if small:
        forms = {"reference": "reference"} | forms
    return Case(
        kernel="sparse_mla_and_fetch",
        shape=f"{attending.shape}, {rows.name}",
        forms={name: partial(_apart if name == "apart" else _together, form, layer) for name, form in forms.items()},
        calls=[(*call, *host_rows.lists(rows, rng)) for call in attending.calls[:CALLS]],
        state=partial(host_rows.start, rows),
        check=partial(_wrong, attending, rows),
        device_bytes=attending.device_bytes,
        link_bytes=rows.real * rows.layers * host_rows.ROW,
        flops=attending.flops,
        base="reference" if small else "apart",
    )


def _together(form: str, layer: int, state: Pools, query, pool, slots, source, target) -> tuple[Pools, Any]:
    device, host = state
    attended, device = sparse_mla_and_fetch(
        query, pool, layer, slots, FMT, device, host, source, target, scale=sparse_mla.SCALE, implementation=form
    )
    return (device, host), attended


def _apart(form: str, layer: int, state: Pools, query, pool, slots, source, target) -> tuple[Pools, Any]:
    device, host = state
    attended = sparse_mla._attend(form, FMT, layer, query, pool, slots)
    return (sg.fetch(device, host, source, target, implementation=form), host), attended


def _wrong(attending: Case, rows: host_rows.Shape, form: str, result: Any, call: tuple) -> str | None:
    state, attended = result
    assert attending.check
    return attending.check(form, attended, call[:3]) or host_rows.wrong("fetch", rows, form, (state, None), call[3:])
