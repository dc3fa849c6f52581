"""How one model runs over a mesh of devices: by requests along its axis `dp`, by heads along its axis `tp`."""

import os
import re
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float32

DP, TP = "dp", "tp"
DEVICES = (DP, TP)
"""Mesh axes that together count all devices."""
Mode = str
"""`dp`, `tp`, or both as in `2x4`: two ranks of four devices."""


@dataclass(frozen=True)
class Parallel:
    """`dp` ranks of `tp` devices each. A rank has its own requests and one address space; within it heads are sharded
    and requests replicated. Experts are sharded over all devices."""

    dp: int = 1
    tp: int = 1

    def __post_init__(self):
        if min(self.dp, self.tp) < 1:
            raise ValueError(
                f"devices: expected at least 1 along dp and tp, found {self.dp} and {self.tp}; pass positive numbers"
            )

    @classmethod
    def of(cls, mode: Mode, devices: int) -> "Parallel":
        """All devices as ranks (`dp`), as one rank (`tp`), or RANKSxDEVICES of a rank. ValueError for other modes."""
        if mode in DEVICES:
            return cls(**{mode: devices})
        sizes = re.fullmatch(r"(\d+)x(\d+)", mode)
        if not sizes or int(sizes[1]) * int(sizes[2]) != devices:
            shapes = [f"{n}x{devices // n}" for n in range(2, devices) if devices % n == 0]
            raise ValueError(
                f"mode: expected one of {[*DEVICES, *shapes]} for {devices} devices, found {mode!r}; choose one of them"
            )
        return cls(int(sizes[1]), int(sizes[2]))

    @property
    def mode(self) -> Mode:
        if self.dp > 1 and self.tp > 1:
            return f"{self.dp}x{self.tp}"
        return DP if self.dp > 1 else TP

    @property
    def size(self) -> int:
        return self.dp * self.tp


def make_mesh(parallel: Parallel = Parallel()) -> Mesh:
    """A mesh of `dp` x `tp` over the first devices; of several processes, over the first few of each."""
    devices = parallel.size
    found, processes = visible_devices(), jax.process_count()
    each = -(-devices // processes)
    if devices > len(found):
        raise ValueError(
            f"devices: expected 1 to {len(found)} (what JAX sees), found {devices}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(each, 1)} before Python starts"
        )
    if each * processes != devices:
        raise ValueError(
            f"devices: expected a multiple of the {processes} processes, found {devices}; take {each * processes}, or "
            "another number of processes"
        )
    chosen = [[d for d in found if d.process_index == process][:each] for process in range(processes)]
    return Mesh(np.asarray(chosen).reshape(parallel.dp, parallel.tp), DEVICES, axis_types=(AxisType.Auto,) * 2)


def total(x: Float32[Array, "..."], axis: str) -> Float32[Array, "..."]:
    """The sum over the devices of an axis, whole on each. To be called inside shard_map.

    Between processes, Gloo's and NCCL's sums round by where in an array a number stands, and thus by a request's
    company: there, the parts are added in the order of the devices, as XLA does on a CPU. No more bytes are sent.
    """
    devices = jax.lax.axis_size(axis)
    if devices == 1:
        return x
    if jax.process_count() == 1:
        return jax.lax.psum(x, axis)
    parts = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
    return jax.lax.all_gather(_add_in_order(parts, axis), axis, tiled=True)[: x.size].reshape(x.shape)


def scattered_total(x: Float32[Array, "N ..."], axis: str) -> Float32[Array, "M ..."]:
    """The same sum, of which each device keeps its part of the first dimension: M = N / devices."""
    devices = jax.lax.axis_size(axis)
    if devices == 1:
        return x
    if jax.process_count() == 1:
        return jax.lax.psum_scatter(x, axis, tiled=True)
    return _add_in_order(x.reshape(devices, -1, *x.shape[1:]), axis)


def _add_in_order(parts: Array, axis: str) -> Array:
    """Parts [devices, ...], one for each device, from all devices -> this one's part of the sum. The barrier keeps XLA
    from fusing it with what follows, as a collective would."""
    return jax.lax.optimization_barrier(reduce(jnp.add, jax.lax.all_to_all(parts, axis, 0, 0)))


def visible_devices() -> list[Any]:
    """What JAX sees. ValueError if that is nothing."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as wrong:  # JAX 0.10 asserts where it has no plugin for the platform
        asked, reason = os.environ.get("JAX_PLATFORMS", ""), str(wrong) or "JAX has no plugin for it"
        raise ValueError(
            f"devices: expected one of JAX_PLATFORMS={asked!r}, found none ({reason}); install jax[cuda12] or "
            "jax[cuda13] on a machine with a GPU, or set JAX_PLATFORMS=cpu"
        ) from wrong


def force_cpu_devices(devices: int) -> None:
    """Let the CPU platform show at least `devices` devices. Call before JAX makes its client; GPUs are not touched."""
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={devices}".strip()
    os.environ.setdefault("PJRT_NPROC", "32")  # JAX 0.10.2 deadlocks with eight devices on two cores without it
