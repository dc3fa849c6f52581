"""Random weights by element: each number is a hash of its index, so a shard draws its own part and no more.

jax.random could do the same, but its Threefry takes five times as long to compile, and a model has some thirty shapes.
Enough for weights; not a generator for anything that is measured.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32


def normal(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Standard normal numbers, the same under any sharding."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    bits = _mix(_mix(index ^ _mix(key[0])) + _mix(key[1]))
    # 23 bits, in the middle of their intervals: exact in float32 and never -1 or 1, where the inverse is infinite.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-22) - 1.0
    return jax.lax.erf_inv(uniform) * jnp.float32(2**0.5)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The 32-bit finaliser lowbias32 of C. Wellons' hash-prospector: every input bit flips each output bit evenly."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
