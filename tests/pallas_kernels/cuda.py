"""Lowering for CUDA on a machine without a GPU."""

import contextlib

import jax

from pallas_kernels.dispatch import assume_platform


def lower_cuda(function, *arguments, **jit_options) -> str:
    """StableHLO of `function` (traced anew) for a CUDA device; arguments may be jax.ShapeDtypeStruct."""
    fresh = jax.jit(lambda *a: function(*a), **jit_options)
    with tracing_for_an_h200():
        return fresh.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@contextlib.contextmanager
def tracing_for_an_h200():
    """Kernels are chosen as on a GPU, and Pallas Triton, which from JAX 0.11.2 on asks which one, is told."""
    with assume_platform("gpu"):
        try:
            from jax._src.pallas.triton import gpu_info
        except ImportError:
            yield
            return
        gpu_info.registry["cpu"] = lambda: gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H200)
        try:
            yield
        finally:
            del gpu_info.registry["cpu"]
