"""The one file that knows memory kinds and how JAX versions differ about them.

Pools on the host are arrays of memory kind `pinned_host`; JAX types their memory space, so an ordinary op may not mix
them with device arrays. On CPU devices the kinds are typed alike but share one memory: types are checked, not speed.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ula_jax.report import progress_bar
from ula_jax.types import Array

T = TypeVar("T")

HOST = "pinned_host"
DEVICE = "device"

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable that JAX reads when it starts: the most pinned host memory that it takes on a GPU machine, for
all devices of the process together, in GiB."""
HOST_LIMIT_DEFAULT = 64
SPARE = 4
"""GiB of pinned memory that JAX needs for other things, such as copies on their way to a device."""
SLOW = 4 << 30
"""Bytes of host memory that take long enough (about a second a GiB) for a progress bar."""


def to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


def sharding(mesh: Mesh, spec: PartitionSpec, host: bool = False) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=HOST if host else DEVICE)


def build(make: Callable[[], T], places: T) -> T:
    """What `make` returns, each leaf where `places` (shardings of one mesh) puts it; those on the host must be zeros.

    They are made there: jitted as a whole, `make` would fill them on the device and copy. ValueError, before anything
    is allocated, if device or host memory is too small.
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(make))
    where = tree.flatten_up_to(places)
    hosted = [place.memory_kind == HOST for place in where]
    devices = sorted(where[0].addressable_devices, key=lambda device: device.id)
    size = {True: 0, False: 0}
    for leaf, place, host in zip(leaves, where, hosted, strict=True):
        size[host] += leaf.dtype.itemsize * prod(place.shard_shape(leaf.shape))
    check_room(devices, size[False], size[True])

    def on_device() -> list[Array]:
        return [leaf for leaf, host in zip(jax.tree.leaves(make()), hosted, strict=True) if not host]

    made = iter(jax.jit(on_device, out_shardings=[p for p, host in zip(where, hosted, strict=True) if not host])())
    try:
        _pin(devices, size[True] * len(devices))
        made = [
            zeros_on_host(leaf.shape, leaf.dtype, place) if host else next(made)
            for leaf, place, host in zip(leaves, where, hosted, strict=True)
        ]
        return jax.block_until_ready(tree.unflatten(made))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"host memory: JAX found no {_gib(size[True])} for each of {len(devices)} devices within the "
            f"{_gib(host_limit())} that it may pin; free what else is on the host, raise {HOST_LIMIT}, or lower the "
            "host budget"
        ) from error


def check_room(devices: Sequence[Any], device: int, host: int) -> None:
    """ValueError unless each device has `device` bytes free and the machine `host` bytes for each of them."""
    for one in devices:
        stats = one.memory_stats() or {}
        if (limit := stats.get("bytes_limit")) and device > (free := limit - stats.get("bytes_in_use", 0)):
            raise ValueError(
                f"device memory: expected {_gib(device)} free on {one} for rows, index keys and maps, found "
                f"{_gib(free)} of the {_gib(limit)} that JAX may take; lower the device budget by {device - free} "
                "bytes, or let JAX have more of the card (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 unless set)"
            )
    if devices[0].platform == "cpu":  # both tiers are in the machine's memory
        device, host = 0, device + host
    count, limit, free = len(devices), host_limit(), host_free()
    if free is not None:
        free += _pinned.get(devices[0].platform, 0)
    total = taken = host * count
    pools = f"host pools of {_gib(host)} for each of {count} devices, {_gib(total)} in all"
    enough = f"{HOST_LIMIT}={ceil(total / 2**30) + SPARE} in the environment before Python starts"
    if devices[0].platform == "gpu":
        if total > limit:
            raise ValueError(
                f"host memory: expected at most {_gib(limit)}, all that JAX pins while {HOST_LIMIT} is {limit >> 30}, "
                f"found {pools}; set {enough}, or lower the host budget to "
                f"{max(0, limit - (SPARE << 30)) // count} bytes"
            )
        taken = min(limit, 1 << (total - 1).bit_length()) if total else 0  # a power of two, if it is allowed so much
    if free is not None and taken > free:
        advice = f"lower the host budget to {int(0.9 * free) // count} bytes, or free memory"
        if total <= free:
            advice = f"JAX takes a power of two unless less is allowed: set {enough}"
        raise ValueError(f"host memory: expected {_gib(taken)} available, found {_gib(free)} for {pools}; {advice}")


def host_limit() -> int:
    """Bytes of pinned host memory that JAX takes at most on a GPU machine."""
    return int(os.environ.get(HOST_LIMIT) or HOST_LIMIT_DEFAULT) << 30


def host_free() -> int | None:
    """Bytes of host memory that can be taken without swapping: MemAvailable, or what is left of the container's. None
    where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        container = container_memory()
    except (OSError, StopIteration):
        return None
    return min(free, container[0] - container[1]) if container else free


def container_memory() -> tuple[int, int] | None:
    """Bytes that the container may have and those that it has taken; None where nothing limits it."""
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    most = limit.read_text().strip() if limit.is_file() else "max"
    return None if most == "max" else (int(most), int(used.read_text()))


def zeros_on_host(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Array:
    """Zeros in host memory. XLA writes them there; `jnp.zeros` it would fill on the device and copy."""
    return _zeros_on_host(shape, dtype, place)()


@cache
def _zeros_on_host(shape: tuple[int, ...], dtype: Any, place: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.broadcast_to(to_host(jnp.zeros((), dtype)), shape), out_shardings=place)


_pinned: dict[str, int] = {}
"""Bytes that JAX has pinned and keeps."""


def _pin(devices: Sequence[Any], size: int) -> None:
    """Have JAX pin host memory in one piece.

    Asked for array after array it takes pieces of twice the size each time, and what no array fits into is lost. It
    never gives memory back: what is pinned here serves the pools, and those that come after them.
    """
    platform = devices[0].platform
    if platform != "gpu" or size <= _pinned.get(platform, 0):
        return
    _pinned[platform] = size
    place = NamedSharding(Mesh(devices[:1], ("one",)), PartitionSpec(), memory_kind=HOST)
    piece = jax.jit(lambda: to_host(jax.lax.empty((-(-size // 2**20), 2**18), jnp.uint32)), out_shardings=place)
    before = host_free()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: jax.block_until_ready(piece()).delete())
        if size >= SLOW and before is not None:
            with progress_bar("GiB") as bar:
                task = bar.add_task("pinning host memory", total=size >> 30)
                while wait([done], timeout=0.2).not_done:
                    bar.update(task, completed=min(size, max(0, before - (host_free() or before))) >> 30)
                bar.update(task, completed=size >> 30)
        done.result()


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
