"""Call a Triton kernel from JAX: compiled on a GPU, or run by Triton's interpreter on a CPU.

A kernel's parameters are the arrays it reads, then the arrays it writes, then constants. The interpreter hands it numpy
buffers in the same order, so one kernel and one call serve both; there, an output that is neither zeroed nor an alias
starts as garbage.
"""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.dispatch import assuming, needs

INTERPRET = "TRITON_INTERPRET"
GARBAGE = 0xA5
"""Every byte of an output before the interpreter runs."""


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the function as written: what a type checker's import hook has wrapped around it, Triton cannot
    read."""
    import triton

    return triton.jit(inspect.unwrap(function))


def forms(unsupported: str | None = None) -> dict[str, str | None]:
    """The two Triton forms of a kernel, for `dispatch.choose`: why each cannot run here, or None."""
    return {
        "triton": unsupported or needs("gpu") or _missing("jax_triton") or _missing("triton") or _interpreting(False),
        "triton_interpret": unsupported or needs("cpu") or _missing("triton") or _interpreting(True),
    }


def like(array: Any) -> jax.ShapeDtypeStruct:
    """An output of the array's shape and type."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 output."""
    return jax.ShapeDtypeStruct(shape, np.dtype("int32"))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below n: tiles must have such a size."""
    return 1 << max(n - 1, 0).bit_length()


def call(
    function: Any,
    *arrays: Array,
    grid: Sequence[int],
    out: Sequence[jax.ShapeDtypeStruct],
    alias: Mapping[int, int] | None = None,
    zeroed: Sequence[int] = (),
    warps: int = 4,
    stages: int = 2,
    interpret: bool = False,
    **constants: Any,
) -> tuple[Array, ...]:
    """The outputs of `function(*arrays, *outputs, **constants)` run on every point of `grid`.

    `alias` maps arrays to the outputs that take their place: in place where the caller donates or no longer needs them.
    `zeroed` outputs are filled with zeros first.
    """
    alias = dict(alias or {})
    if interpret:
        run = functools.partial(_interpret, function, tuple(grid), tuple(out), alias, tuple(zeroed), constants)
        return tuple(jax.pure_callback(run, tuple(out), *arrays, vmap_method="sequential"))
    import jax_triton

    _lower_typed()
    return tuple(
        jax_triton.triton_call(
            *arrays,
            kernel=function,
            out_shape=tuple(out),
            grid=tuple(grid),  # pyright: ignore[reportArgumentType]
            input_output_aliases=alias,
            zeroed_outputs=tuple(zeroed),
            num_warps=warps,
            num_stages=stages,
            compute_capability=HOPPER if assuming() else None,
            **constants,
        )
    )


HOPPER = 90
"""Compute capability to compile for where there is no card to ask (`dispatch.assume_platform`)."""


@functools.cache
def _lower_typed() -> None:
    """Have jax-triton's calls lowered to the typed handler that jaxlib has for them.

    jax-triton 0.3 lowers to the untyped one. XLA cannot record that into a CUDA graph, and each launch takes the host
    as long as a short kernel runs (5.7 us a launch against 1.9, on an H200 of JAX 0.11.2).
    """
    from jax.extend.mlir import ir
    from jax.interpreters import mlir
    from jax_triton import triton_lib

    def lower(ctx: Any, *operands: Any, **parameters: Any) -> Any:
        results: Any = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *operands, **parameters)
        call = results[0].owner
        call.attributes["call_target_name"] = ir.StringAttr.get("triton_kernel_call_ffi")
        call.attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), TYPED)
        call.attributes["backend_config"] = ir.DictAttr.get({"opaque": call.attributes["backend_config"]})
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")


TYPED = 4
"""`api_version` of a typed custom call."""


def _missing(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed: pip install 'ula-jax[cuda12]'"
    return None


def _interpreting(wanted: bool) -> str | None:
    """Triton decides when a kernel is defined whether it will be compiled or interpreted."""
    if (os.environ.get(INTERPRET, "0") == "1") == wanted:
        return None
    return f"Triton reads {INTERPRET} when kernels are imported: {'set it to 1' if wanted else 'unset it'} before"


def _interpret(
    function: Any,
    grid: tuple[int, ...],
    out: tuple[jax.ShapeDtypeStruct, ...],
    alias: dict[int, int],
    zeroed: tuple[int, ...],
    constants: dict[str, Any],
    *arrays: Array,
) -> tuple[np.ndarray, ...]:
    given = [np.array(a) for a in arrays]
    taken = {output: given[position] for position, output in alias.items()}
    outputs = []
    for number, shape in enumerate(out):
        fresh = np.zeros(shape.shape, shape.dtype)
        if number not in zeroed:
            fresh.reshape(-1).view(np.uint8).fill(GARBAGE)
        outputs.append(taken.get(number, fresh))
    function[grid](*map(_Buffer, [*given, *outputs]), **constants)
    return tuple(outputs)


class _Buffer:
    """What Triton's interpreter asks of a torch tensor, over a numpy array; storage is shared."""

    device = "cpu"

    def __init__(self, array: np.ndarray):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

    def size(self) -> int:
        return self.array.nbytes

    nbytes = size

    def itself(self, *_: Any, **__: Any) -> "_Buffer":
        return self

    untyped_storage = cpu = new_empty = set_ = itself

    def copy_(self, other: "_Buffer") -> None:
        """Nothing to do: both share their storage."""

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(step // self.array.itemsize for step in self.array.strides)
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        return True

    def storage_offset(self) -> int:
        return 0

