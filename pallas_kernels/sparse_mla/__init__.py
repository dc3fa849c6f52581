"""Attention of absorbed MLA queries over the rows that each token selected, read from the pool where they lie.

`implementation`: `auto`, `reference` (jnp, any platform; gathers the rows and multiplies float32 numbers), `triton`
(Hopper; bf16 and fp8 rows of 512 + 64 numbers) or `triton_interpret` (the same kernel in the CPU interpreter: slow, for
tests).
"""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import triton_call
from pallas_kernels.dispatch import assuming, choose, platform
from pallas_kernels.sparse_mla import reference
from pallas_kernels.sparse_mla.reference import EMPTY, HostLanes, Lanes, RowFormat

PREFER = ("triton", "reference")
LATENT, ROPE = 512, 64
"""The rows of DeepSeek-V3.2 and GLM-5.x, for which the Triton form's tiles fill a Hopper's shared memory."""


def sparse_mla(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "layers slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    *,
    scale: float,
    implementation: str = "auto",
) -> tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]]:
    """Softmax attention of each token over its own rows: keys are whole rows, values their first `latent` numbers.

    Returns the weighted latents and the natural log-sum-exp of the scaled scores. EMPTY (-1, or anything negative) may
    stand anywhere among the slots and weighs nothing; a token that has no row gets output 0 and log-sum-exp -inf.

    Args:
      lanes: the pool, as many arrays as the row format has. Rows that are already gathered are a pool of one layer.
      layer: number of the pool's layer.
      slots: slots of the selected rows. The same rows in the same order give the same bits wherever they lie. (The
        Triton form cuts the list into as many shares as fill the card, which `batch` times `steps` decides.)
      fmt: row format (`ula_jax.rows`).
      scale: factor of the scores.

    The reference computes in float32. The Triton form rounds queries, weights and the scaled fp8 latents to float16 (11
    bits): a score is off by about 2e-4 of its size, and the output by 3e-4 to 1e-3 of its norm, the more the larger the
    scores are. bf16 latents beyond 65504 overflow there.

    ValueError if queries or lanes do not fit the format, IndexError for a layer outside the pool.
    """
    _check(query, lanes, layer, fmt)
    return _form("sparse_mla", implementation, fmt)(query, lanes, layer, slots, fmt, scale=scale)


def sparse_mla_and_fetch(
    query: Float[Array, "batch steps heads width"],
    lanes: tuple[UInt32[Array, "depth slots _"], ...],
    layer: int,
    slots: Int32[Array, "batch steps selected"],
    fmt: RowFormat,
    device: Lanes,
    host: HostLanes,
    source: Int32[Array, " n"],
    target: Int32[Array, " n"],
    *,
    scale: float,
    implementation: str = "auto",
) -> tuple[tuple[Float32[Array, "batch steps heads latent"], Float32[Array, "batch steps heads"]], Lanes]:
    """`sparse_mla` and, while it runs, `sparse_gather.fetch` into another pool: ((output, log-sum-exp), that pool).

    The first four and `scale` are `sparse_mla`'s, whose bits the output has; `device` to `target` are those of `fetch`,
    whose errors hold here too. In the Triton form one kernel does both: a few programs beside those that attend move
    the rows. `device` is changed in place if the caller donates it and it is not the pool that is attended to: if it
    is, XLA copies it, and attention sees what it held before."""
    _check(query, lanes, layer, fmt)
    form = _form("sparse_mla_and_fetch", implementation, fmt)
    return form(query, lanes, layer, slots, fmt, device, host, source, target, scale=scale)


def _form(name: str, implementation: str, fmt: RowFormat) -> Callable:
    forms = {"reference": None, **triton_call.forms(_unsupported(fmt))}
    chosen = choose(name, implementation, forms, PREFER)
    if chosen == "reference":
        return getattr(reference, name)
    from pallas_kernels.sparse_mla import triton

    return partial(getattr(triton, name), interpret=chosen == "triton_interpret")


def _check(query: Array, lanes: tuple[Array, ...], layer: int, fmt: RowFormat) -> None:
    if query.shape[-1] != fmt.latent + fmt.rope:
        raise ValueError(
            f"sparse_mla: expected queries of {fmt.latent} + {fmt.rope} numbers, found {query.shape[-1]}; absorb them, "
            "and join the roped part to the latent one"
        )
    found = [lane.shape for lane in lanes]
    expected = [(*lanes[0].shape[:2], words) for words in fmt.lanes]
    if found != expected:
        raise ValueError(f"sparse_mla: expected {fmt.name} lanes {expected}, found {found}; pass all lanes of a pool")
    if not 0 <= layer < lanes[0].shape[0]:
        raise IndexError(
            f"layer: expected 0 to {lanes[0].shape[0] - 1}, found {layer}; count from the pool's first layer"
        )


def _unsupported(fmt: RowFormat) -> str | None:
    if fmt.name == "fp32":
        return "matrix units multiply 16-bit numbers, and the rows are fp32"
    if (fmt.latent, fmt.rope) != (LATENT, ROPE):
        return f"it needs rows of {LATENT} + {ROPE} numbers, found {fmt.latent} + {fmt.rope}"
    if platform() == "gpu" and not assuming():
        capability = jax.devices()[0].compute_capability
        if capability != "9.0":
            return f"it needs compute capability 9.0 (Hopper), found {capability}"
    return None


__all__ = ["EMPTY", "HostLanes", "Lanes", "RowFormat", "sparse_mla", "sparse_mla_and_fetch"]
