"""The way from JAX to a Triton kernel, by kernels small enough to see through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

tl = pytest.importorskip("triton.language")

from pallas_kernels import triton_call  # noqa: E402

INTERPRET = triton_call.forms()["triton_interpret"] is None
GPU = triton_call.forms()["triton"] is None


@triton_call.kernel
def count_into(x, seen, held, sums, untouched, counts, N: tl.constexpr):  # pyright: ignore
    i = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(sums + i, value + 1)
    tl.atomic_add(counts + value, 1)
    tl.atomic_or(held + value, 1)


def run(interpret: bool):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 8, 32), jnp.int32)
    held = jnp.full(8, 4, jnp.int32)

    @jax.jit
    def step(x, held):
        return triton_call.call(
            count_into,
            x,
            held,
            grid=(2,),
            out=[
                jax.ShapeDtypeStruct((8,), jnp.int32),
                jax.ShapeDtypeStruct((32,), jnp.int32),
                jax.ShapeDtypeStruct((4,), jnp.uint32),
                jax.ShapeDtypeStruct((8,), jnp.int32),
            ],
            alias={1: 0},
            zeroed=[3],
            interpret=interpret,
            N=16,
        )

    return x, held, step(x, held)


@pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
def test_interpreted():
    x, held, (after, sums, untouched, counts) = run(interpret=True)
    np.testing.assert_array_equal(sums, np.asarray(x) + 1)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=8))
    np.testing.assert_array_equal(after, np.where(np.bincount(x, minlength=8) > 0, 5, 4))
    np.testing.assert_array_equal(held, 4)  # the caller's array is its own
    np.testing.assert_array_equal(untouched, 0xA5A5A5A5)  # what a kernel does not write is not zero


@pytest.mark.gpu
def test_compiled():
    x, _, (after, sums, _, counts) = run(interpret=False)
    np.testing.assert_array_equal(sums, np.asarray(x) + 1)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=8))
    np.testing.assert_array_equal(after, np.where(np.bincount(x, minlength=8) > 0, 5, 4))


def test_forms_say_what_is_missing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "set it to 1 before" in str(triton_call.forms()["triton_interpret"])
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'ula-jax[cuda12]'" in str(triton_call.forms()["triton_interpret"])
    assert triton_call.forms("it is Tuesday")["triton"] == "it is Tuesday"
