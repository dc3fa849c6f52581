"""What this machine offers and which form of each kernel runs on it: `ula doctor`.

No list of kernels is kept: decode and prefill steps are traced, without being run, and `choose` is listened to.
"""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from pallas_kernels.dispatch import explaining
from ula_jax.history import Batch, History
from ula_jax.memory import HOST_LIMIT, HOST_LIMIT_DEFAULT, container_memory
from ula_jax.parallel import Parallel, make_mesh, visible_devices
from ula_jax.placements import make_placement
from ula_jax.report import print_table
from ula_jax.rows import FormatName, RowFormat
from ula_jax.runner import Runner
from ula_jax.sampling import Sampling
from ula_jax.spec import Budget, KVSpec
from ula_jax.types import Array

PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "jax-triton")
TUNED_FOR = "9.0"
"""Compute capability (Hopper) for which block sizes were chosen."""


@dataclass(frozen=True)
class Shape:
    """What kernels see of a model."""

    name: str
    rows: FormatName
    heads: int
    latent: int
    rope: int
    index_heads: int
    index_dim: int
    topk: int
    page_size: int

    @property
    def spec(self) -> KVSpec:
        """Two layers that share a selection."""
        row = RowFormat(self.rows, self.latent, self.rope)
        return KVSpec(((0, 1),), row, self.topk, self.index_dim, self.page_size, 2 * self.topk)


SHAPES = (
    Shape("models/tiny", "fp32", 8, 64, 16, 8, 32, 128, 16),
    Shape("GLM-5.x", "fp8", 64, 512, 64, 32, 128, 2048, 64),
)
STEPS = (("ula", 1), ("ula", 16), ("hisparse", 1))
"""Placement, and tokens of each request: between them they move rows in every way that there is."""


class Asker(nnx.Module):
    """Asks a history for what a decoder of this shape would, and computes nothing else."""

    def __init__(self, shape: Shape):
        self.shape = shape

    def __call__(self, tokens: Array, positions: Array, history: History) -> Array:
        shape = self.shape

        def numbers(*sizes: int) -> Array:
            return jnp.zeros((*tokens.shape, *sizes), jnp.float32)

        for group, layers in enumerate(shape.spec.groups):
            key = numbers(shape.index_dim)
            history.select(group, numbers(shape.index_heads, shape.index_dim), numbers(shape.index_heads), key)
            for layer in layers:
                row = numbers(shape.latent + shape.rope)
                history.attend(layer, numbers(shape.heads, shape.latent + shape.rope), row, 1.0)
        return numbers(1)

    def logits(self, hidden: Array) -> Array:
        return hidden


def examine() -> dict[str, Any]:
    """All that the command prints; `problems` are the reasons why something cannot run at all."""
    found: dict[str, Any] = {"machine": machine(), "devices": [], "kernels": [], "problems": []}
    try:
        found["devices"] = [device(one) for one in visible_devices()]
    except ValueError as wrong:
        found["problems"].append(str(wrong))
        return found
    for shape in SHAPES:
        with explaining() as choices:
            for placement, tokens in STEPS:
                try:
                    trace(shape, placement, tokens)
                except Exception as wrong:  # whatever it is, the rest is still worth knowing
                    found["problems"].append(f"{shape.name}, {placement}: {type(wrong).__name__}: {wrong}")
        for choice in choices:
            row = {"kernel": choice.kernel, "model": shape.name, "form": choice.form, "others": choice.others}
            if row not in found["kernels"]:
                found["kernels"].append(row)
    return found


def trace(shape: Shape, placement: str, tokens: int, requests: int = 2) -> None:
    """Trace one step. Pools are allocated, in the smallest size that holds the requests."""
    spec = shape.spec
    context = requests * spec.max_context
    budget = Budget(context * (spec.row_bytes + spec.index_bytes), context * spec.row_bytes)
    runner = Runner(Asker(shape), make_placement(placement, Parallel()), spec, budget, make_mesh())

    def zeros(*sizes: int) -> np.ndarray:
        return np.zeros((1, requests, *sizes), np.int32)

    batch = Batch(zeros(tokens), zeros(), zeros(), zeros(spec.table_width), zeros())
    sampling = Sampling(np.zeros((1, requests), np.float32), zeros())
    runner.step_function.eval_shape(runner.params, runner.state, batch, sampling)


def machine() -> dict[str, Any]:
    """Versions, and memory of the host in bytes."""
    total, free = host_memory()
    return {
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
        "cpus": os.cpu_count(),
        "host_bytes": total,
        "host_free_bytes": free,
        HOST_LIMIT: os.environ.get(HOST_LIMIT),
    }


def host_memory() -> tuple[int, int]:
    """Bytes in all and free ones, of the container where there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    if container := container_memory():
        limit, used = container
        total, free = min(total, limit), min(free, limit - used)
    return total, free


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device(one: Any) -> dict[str, Any]:
    """One device: what it is, its memories, and the bytes that JAX may take of it."""
    memory = one.memory_stats() or {}
    limit, used = memory.get("bytes_limit"), memory.get("bytes_in_use", 0)
    return {
        "device": one.device_kind,
        "platform": one.platform,
        "compute_capability": getattr(one, "compute_capability", None),
        "memories": [space.kind for space in one.addressable_memories()],
        "bytes": limit,
        "free_bytes": limit - used if limit else None,
    }


def show(found: dict[str, Any]) -> None:
    """`examine`'s findings as tables."""
    about = Table(title="machine", title_justify="left", show_header=False)
    for name, value in found["machine"].items():
        about.add_row(name, readable(name, value))
    about.add_row("", host_limit(found["machine"][HOST_LIMIT]))
    print_table(about)
    devices = Table(title="devices", title_justify="left")
    for header in ("device", "platform", "compute capability", "memories", "for JAX", "free of it"):
        devices.add_column(header)
    for row in found["devices"]:
        capability = row["compute_capability"] or "-"
        note = "" if capability in ("-", TUNED_FOR) else f" (kernels are tuned for {TUNED_FOR}, Hopper)"
        devices.add_row(
            row["device"], row["platform"], capability + note, ", ".join(row["memories"]),
            readable("bytes", row["bytes"]), readable("bytes", row["free_bytes"]),
        )  # fmt: skip
    print_table(devices)
    kernels = Table(title="kernels", title_justify="left")
    for header in ("kernel", "model", "form", "why no other"):
        kernels.add_column(header)
    for row in found["kernels"]:
        why = "\n".join(f"{form}: {reason}" for form, reason in row["others"].items())
        kernels.add_row(row["kernel"], row["model"], row["form"] or "NONE", why)
    print_table(kernels)


def host_limit(value: str | None) -> str:
    """What the variable means."""
    now = f"{value} GB" if value else f"{HOST_LIMIT_DEFAULT} GB unless it is set"
    return f"on a GPU, all pools in host memory together stop at {now}; it is read when JAX starts"


def readable(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:.1f} GB" if name.endswith("bytes") else str(value)
