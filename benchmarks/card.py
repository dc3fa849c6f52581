"""What the card and its link can do at best, measured in the run that measures everything else."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ula_jax import memory


@dataclass(frozen=True)
class Rates:
    """Bytes or operations per second."""

    copy: float
    """Device memory, bytes read plus bytes written."""
    to_device: float
    """Bulk DMA from pinned host memory."""
    to_host: float
    matmul: float
    """bf16 matrix product of random numbers."""

    def floor(self, device_bytes: int, link_bytes: int, flops: int) -> float:
        """Microseconds below which no form can come: the slowest of the three parts."""
        link = min(self.to_device, self.to_host)
        return 1e6 * max(device_bytes / self.copy, link_bytes / link, flops / self.matmul)


def measure(megabytes: int = 2048, side: int = 8192) -> Rates:
    """Rates of the default device."""
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, (megabytes << 20) // 4, dtype=np.uint32))
    copy = _seconds(jax.jit(lambda x: x + jnp.uint32(1)), words)
    pinned = memory.to_host(words)
    a, b = (jnp.asarray(rng.standard_normal((side, side)), jnp.bfloat16) for _ in range(2))
    product = _seconds(jax.jit(jnp.matmul), a, b)
    return Rates(
        copy=2 * words.nbytes / copy,
        to_device=words.nbytes / _seconds(jax.jit(memory.to_device), pinned),
        to_host=words.nbytes / _seconds(jax.jit(memory.to_host), words),
        matmul=2 * side**3 / product,
    )


def _seconds(function: Callable[..., Any], *args: Any, repeats: int = 7) -> float:
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
