"""Row formats: how the KV of one token in one layer becomes 32-bit words.

An MLA row is the normalised latent (C numbers) followed by the roped key (r numbers). A format packs it into *lanes*,
parallel uint32 arrays, so that one code path moves every format. fp8 follows FlashMLA's 656-byte layout but keeps the
scales in a lane of their own: 640-byte rows stay 128-byte aligned, which host reads need to run at link speed.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ula_jax.types import Array, Float32, Lanes

FormatName = Literal["fp32", "bf16", "fp8"]
E4M3_MAX = 448.0
SCALE_GROUP = 128
"""Latent numbers that share one fp8 scale."""


@dataclass(frozen=True)
class RowFormat:
    """Packs rows of `latent + rope` numbers.

    `fp32` and `bf16` are one lane of words; `fp8` is e4m3 latent and bf16 rope in one lane and one fp32 scale for
    each 128 latent numbers in a second.
    """

    name: FormatName
    latent: int
    rope: int

    def __post_init__(self):
        if self.name not in ("fp32", "bf16", "fp8"):
            raise ValueError(f"row format: expected fp32, bf16 or fp8, found {self.name!r}; choose one of them")
        per_word = {"fp32": 1, "bf16": 2, "fp8": 4}[self.name]
        rope_per_word = 1 if self.name == "fp32" else 2
        if self.latent <= 0 or self.latent % per_word or self.rope < 0 or self.rope % rope_per_word:
            raise ValueError(
                f"{self.name} rows: expected latent a positive multiple of {per_word} and rope a multiple of "
                f"{rope_per_word} (rows are whole 32-bit words), found latent {self.latent}, rope {self.rope}; "
                "use fp32 rows for this model"
            )
        if self.name == "fp8" and self.latent > SCALE_GROUP and self.latent % SCALE_GROUP:
            raise ValueError(
                f"fp8 rows: expected latent below or a multiple of {SCALE_GROUP}, found {self.latent}; use bf16 rows"
            )

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.latent + self.rope

    @property
    def lanes(self) -> tuple[int, ...]:
        """Words of each lane."""
        if self.name == "fp32":
            return (self.width,)
        if self.name == "bf16":
            return (self.width // 2,)
        return (self.latent // 4 + self.rope // 2, self._groups)

    @property
    def nbytes(self) -> int:
        """Bytes of one row, all lanes."""
        return 4 * sum(self.lanes)

    @property
    def _groups(self) -> int:
        return max(1, self.latent // SCALE_GROUP)

    def pack(self, row: Float32[Array, "*batch width"]) -> Lanes:
        """Rows of float32 numbers as lanes of words [*batch, lane]."""
        if self.name == "fp32":
            return (_words(row),)
        if self.name == "bf16":
            return (_words(row.astype(jnp.bfloat16)),)
        latent, rope = row[..., : self.latent], row[..., self.latent :]
        grouped = latent.reshape(*latent.shape[:-1], self._groups, -1)
        amax = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
        scale = jnp.where(amax > 0, amax / E4M3_MAX, 1.0)
        codes = jnp.clip(grouped / scale, -E4M3_MAX, E4M3_MAX).reshape(latent.shape).astype(jnp.float8_e4m3fn)
        words = [_words(codes)] + ([_words(rope.astype(jnp.bfloat16))] if self.rope else [])
        return jnp.concatenate(words, axis=-1), _words(scale[..., 0])

    def unpack(self, lanes: Lanes) -> Float32[Array, "*batch width"]:
        """The numbers that attention reads; the inverse of `pack` up to the format's rounding."""
        if self.name == "fp32":
            return _numbers(lanes[0], jnp.float32)
        if self.name == "bf16":
            return _numbers(lanes[0], jnp.bfloat16).astype(jnp.float32)
        words, scale_words = lanes
        split = self.latent // 4
        codes = _numbers(words[..., :split], jnp.float8_e4m3fn).astype(jnp.float32)
        scale = _numbers(scale_words, jnp.float32)
        grouped = codes.reshape(*codes.shape[:-1], self._groups, -1) * scale[..., None]
        rope = _numbers(words[..., split:], jnp.bfloat16).astype(jnp.float32)
        return jnp.concatenate([grouped.reshape(codes.shape), rope], axis=-1)


def _words(x: Array) -> Array:
    """[..., n] numbers -> [..., n * itemsize / 4] words."""
    per_word = 4 // x.dtype.itemsize
    if per_word == 1:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, per_word), jnp.uint32)


def _numbers(words: Array, dtype) -> Array:
    numbers = jax.lax.bitcast_convert_type(words, dtype)
    return numbers if numbers.ndim == words.ndim else numbers.reshape(*words.shape[:-1], -1)
