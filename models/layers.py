"""Parts that every layer is made of: parameters, projections, norms, rotary embedding, the dense MLP."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32
from numpy.typing import DTypeLike

from models.config import RopeConfig
from ula_jax.parallel import TP, total

if TYPE_CHECKING:
    from ula_jax.history import History
else:
    History = Any  # any object with its `select`, `select_all` and `attend` will do

HIGHEST = jax.lax.Precision.HIGHEST
"""Without it a GPU multiplies float32 in TF32, and ten mantissa bits flip selections."""


def parameter(
    tensor: str,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    spec: P | None = None,
    layout: str = "plain",
    init: str = "fan_in",
) -> nnx.Param:
    """An abstract parameter that knows its partition and where in a hub checkpoint it comes from.

    Args:
      tensor: its name on the hub; `{}` stands for the expert.
      layout: how the hub stores it: "plain", "experts" (one tensor each), "key_heads" or "value_heads" (the
        two parts of each head in kv_b_proj).
      init: of a random model: "fan_in", "norm", "bias", "router_bias" or "embedding".
    """
    abstract = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    # eager_sharding=False: weights arrive by shards later, and inside shard_map there is no mesh to ask for.
    return nnx.Param(abstract, out_sharding=spec or P(), eager_sharding=False, tensor=tensor, layout=layout, init=init)


def contract(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float32[Array, "..."]:
    """An einsum of two arrays of one dtype, summed and left in float32."""
    if x.dtype == jnp.float32:
        return jnp.einsum(equation, x, y, precision=HIGHEST)

    def narrow(x, y):
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)

    def wide(x, y):  # XLA:CPU has no products of bf16 with sums in float32
        return jnp.einsum(equation, x.astype(jnp.float32), y.astype(jnp.float32), precision=HIGHEST)

    return jax.lax.platform_dependent(x, y, cpu=wide, default=narrow)


def linear(x: Float[Array, "... i"], weight: Float[Array, "o i"]) -> Float[Array, "... o"]:
    """x Wᵀ in the dtype of x; weights lie as on the hub, [out, in]."""
    return linear_f32(x, weight).astype(x.dtype)


def linear_f32(x: Float[Array, "... i"], weight: Float[Array, "o i"]) -> Float32[Array, "... o"]:
    """x Wᵀ in float32: sums that go on over devices, logits, router and index scores."""
    return contract("...i,oi->...o", x, weight)


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """Computed in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], bias: Float[Array, " d"], eps: float
) -> Float[Array, "... d"]:
    """Computed in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Angles(NamedTuple):
    """Cosine and sine of every rotation of every token, times YaRN's attention factor."""

    cos: Float32[Array, "B S half"]
    sin: Float32[Array, "B S half"]


def rope_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Rotations per token, [dim/2]. YaRN keeps the fast ones and slows the others by `factor`."""
    frequencies = rope.theta ** (-np.arange(0, dim, 2) / dim)
    if rope.kind == "yarn":

        def pair_that_turns(turns: float) -> float:
            return dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(rope.beta_slow)), dim - 1)
        slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        frequencies = frequencies / rope.factor * slowed + frequencies * (1 - slowed)
    return frequencies.astype(np.float32)


def rope_angles(rope: RopeConfig, dim: int, positions: Int32[Array, "B S"]) -> Angles:
    angle = positions.astype(jnp.float32)[..., None] * rope_frequencies(rope, dim)
    factor = jnp.float32(rope.attention_factor)
    return Angles(jnp.cos(angle) * factor, jnp.sin(angle) * factor)


def apply_rope(x: Float[Array, "B S H r"], angles: Angles, interleave: bool) -> Float[Array, "B S H r"]:
    """Rotate pairs (0, 1), (2, 3), ... when interleaved, else (0, r/2), (1, r/2 + 1), ...

    Either way the result lies half-split, first members then second members, as transformers caches it: dot
    products do not care, cached bytes do.
    """
    wide = x.astype(jnp.float32)
    if interleave:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, -1)
    cos, sin = angles.cos[:, :, None], angles.sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Mlp(nnx.Module):
    """SwiGLU. Under TP each device holds a share of the width, and its output is a partial sum."""

    def __init__(self, prefix: str, hidden: int, width: int, dtype: DTypeLike):
        rows, columns = P(TP, None), P(None, TP)
        self.gate_proj = parameter(f"{prefix}gate_proj.weight", (width, hidden), dtype, rows)
        self.up_proj = parameter(f"{prefix}up_proj.weight", (width, hidden), dtype, rows)
        self.down_proj = parameter(f"{prefix}down_proj.weight", (hidden, width), dtype, columns)

    def __call__(self, x: Float[Array, "*B D"]) -> Float32[Array, "*B D"]:
        """[..., D] -> [..., D] float32, to be summed over the devices under TP."""
        inner = jax.nn.silu(linear(x, self.gate_proj[...])) * linear(x, self.up_proj[...])
        return linear_f32(inner, self.down_proj[...])


def sum_over_heads(partial: Float32[Array, "*B D"]) -> Float32[Array, "*B D"]:
    """The sum of the partial results of a rank's devices.

    In float32 at every parameter dtype, so that a result hardly depends on the number of devices.
    """
    return total(partial, TP)
