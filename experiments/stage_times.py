"""Where the time of a compiled step goes, read from a profile of it.

Each kernel of a profile names its HLO instruction, and the instruction's metadata the `jax.named_scope`s that it was
traced in. A kernel belongs to the innermost scope that is a stage; a fusion over several scopes to that of its root.
Within a CUDA graph (XLA's command buffer) kernels name the graph alone: a step to be profiled is compiled without
(`NO_GRAPHS`). Gaps between kernels are longer then, and sums are of the kernels alone.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.timing import profile

STAGES = ("index_scores", "top_k", "resolve", "exchange", "append", "attend", "mlp", "lm_head", "attention")
"""Scopes of `ula_jax.history`, `ula_jax.pool` and `models`. What is left of `attention` are its projections, the
indexer's among them; what is left of `resolve` is finding hits, victims and slots."""

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}
"""Compiler options; no other platform looks at them."""

CONTROL = re.compile(r"(while|conditional|call|async)([.-]|$)")
"""Instructions whose time is that of others."""


def stage_times(step: Callable[[], Any], steps: int, hlo: str) -> dict[str, float]:
    """Seconds of each stage in one step, and `other`: the mean of `steps` runs of the step whose text is `hlo`."""
    data = profile(lambda: [step() for _ in range(steps)][-1])
    module, scopes = hlo.split("HloModule ", 1)[1].split(",", 1)[0], scopes_of(hlo)
    times: dict[str, float] = defaultdict(float)
    for name, nanoseconds in _instructions(data, module):
        times[stage_of(scopes.get(name, ""))] += nanoseconds / steps / 1e9
    return dict(times)


def scopes_of(hlo: str) -> dict[str, str]:
    """Instruction -> scopes, `/` between them, of a compiled program's text."""
    found = re.finditer(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', hlo, re.MULTILINE)
    return {match[1]: match[2] for match in found}


def stage_of(scopes: str) -> str:
    return next((scope for scope in reversed(scopes.split("/")) if scope in STAGES), "other")


def _instructions(data: Any, module: str):
    """(instruction, nanoseconds) of everything that ran of a module. GPUs repeat streams in summary lines."""
    for plane in data.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == module and not CONTROL.match(name := str(stats.get("hlo_op", ""))):
                    yield name, event.duration_ns
