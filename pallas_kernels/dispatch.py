"""Which form of a kernel runs: one rule for every kernel folder.

A kernel has a `reference` form (jnp, runs everywhere) and device forms such as `mosaic`. A caller names one or says
`auto`. `auto` takes the first form of the kernel's own preference list that this platform and these shapes support
and says so once in the log `ula_jax`; a form named outright that cannot run raises with the reason. Nothing is
exchanged for something else in silence.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax

LOG = logging.getLogger("ula_jax")

_assumed: ContextVar[str | None] = ContextVar("assumed_platform", default=None)
_announced: set[tuple[str, str, str]] = set()


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what programs traced now are meant for."""
    return _assumed.get() or jax.default_backend()


@contextmanager
def assume_platform(name: str) -> Iterator[None]:
    """Trace for another platform than this machine's, as when lowering for CUDA on a machine without a GPU.

    JAX keys its trace cache by the function, not by this setting: trace a function that was not traced before.
    """
    token = _assumed.set(name)
    try:
        yield
    finally:
        _assumed.reset(token)


def needs(wanted: str) -> str | None:
    """None on platform `wanted`, otherwise the reason why a form for it cannot run."""
    found = platform()
    return None if found == wanted else f"it needs platform {wanted!r}, and this program is traced for {found!r}"


def choose(
    kernel: str, implementation: str, forms: Mapping[str, str | None], prefer: Sequence[str] = ("reference",)
) -> str:
    """Name of the form to run.

    `forms` maps each form to None, or to the reason why it cannot run here; `prefer` orders the forms for `auto`.
    Raises ValueError for an unknown name and NotImplementedError for a form that cannot run.
    """
    if implementation != "auto":
        if implementation not in forms:
            raise ValueError(
                f"{kernel}: expected implementation 'auto' or one of {sorted(forms)}, found {implementation!r}"
            )
        if reason := forms[implementation]:
            usable = sorted(name for name, why in forms.items() if why is None)
            raise NotImplementedError(
                f"{kernel}: implementation {implementation!r} cannot run: {reason}. Use 'auto' or one of {usable}"
            )
        return implementation
    for name in prefer:
        if forms[name] is None:
            _announce(kernel, name, [f"{skipped}: {forms[skipped]}" for skipped in prefer[: prefer.index(name)]])
            return name
    raise NotImplementedError(f"{kernel}: no form can run here: {dict(forms)}")


def _announce(kernel: str, name: str, skipped: Sequence[str]) -> None:
    key = (kernel, name, platform())
    if key not in _announced:
        _announced.add(key)
        why = f" (not {'; '.join(skipped)})" if skipped else ""
        LOG.info("%s: auto chose %r on %s%s", kernel, name, platform(), why)
