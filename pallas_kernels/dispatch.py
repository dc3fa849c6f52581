"""Which form of a kernel runs: one rule for every kernel folder.

A kernel has a `reference` form (jnp, runs everywhere) and device forms such as `mosaic`. A caller names one
or says `auto`, which takes the first form of the kernel's preference list that this platform and these shapes
support, and says so once in the log `ula_jax`. A form named outright that cannot run raises with the reason.
Nothing is exchanged for something else in silence.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu

LOG = logging.getLogger("ula_jax")

_assumed: ContextVar[str | None] = ContextVar("assumed_platform", default=None)
_announced: set[tuple[str, str, str]] = set()
_heard: ContextVar["list[Choice] | None"] = ContextVar("choices_heard", default=None)


class Choice(NamedTuple):
    """What `choose` decided for one call of a kernel."""

    kernel: str
    form: str | None
    """None: it raised, as no form (or not the one named) can run."""
    others: dict[str, str]
    """Why each other form was not taken."""


@contextmanager
def explaining() -> Iterator[list[Choice]]:
    """The choices made within, in order. What JAX has traced before with the same shapes may not be made again."""
    choices: list[Choice] = []
    token = _heard.set(choices)
    try:
        yield choices
    finally:
        _heard.reset(token)


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what programs traced now are meant for."""
    return _assumed.get() or jax.default_backend()


def assuming() -> bool:
    """Whether programs are traced for a platform that need not be here (`assume_platform`)."""
    return _assumed.get() is not None


@contextmanager
def assume_platform(name: str) -> Iterator[None]:
    """Trace for another platform than this machine's, as when lowering for CUDA on a machine without a GPU.

    JAX keys its trace cache by the function, not by this setting: trace a function not traced before.
    """
    token = _assumed.set(name)
    try:
        yield
    finally:
        _assumed.reset(token)


def needs(wanted: str) -> str | None:
    """None on platform `wanted`, otherwise the reason why a form for it cannot run."""
    found = platform()
    return None if found == wanted else f"it needs platform {wanted!r}, found {found!r}"


def choose(
    kernel: str, implementation: str, forms: Mapping[str, str | None], prefer: Sequence[str] = ("reference",)
) -> str:
    """Name of the form to run.

    `forms` maps each form to None, or to the reason why it cannot run here; `prefer` orders the forms that
    `auto` may take. Raises ValueError for an unknown name, NotImplementedError for a form that cannot run.
    """
    heard = _heard.get()
    try:
        form = _choose(kernel, implementation, forms, prefer)
    except NotImplementedError:
        if heard is not None:
            heard.append(Choice(kernel, None, {name: why or "it can run" for name, why in forms.items()}))
        raise
    if heard is not None:
        can = "it can run, but was not named" if implementation != "auto" else f"it can run, but `auto` takes {form!r}"
        heard.append(Choice(kernel, form, {name: why or can for name, why in forms.items() if name != form}))
    return form


def _choose(kernel: str, implementation: str, forms: Mapping[str, str | None], prefer: Sequence[str]) -> str:
    if implementation != "auto":
        if implementation not in forms:
            raise ValueError(
                f"{kernel}: expected implementation 'auto' or in {sorted(forms)}, found {implementation!r}"
            )
        if reason := forms[implementation]:
            usable = sorted(name for name, why in forms.items() if why is None)
            raise NotImplementedError(
                f"{kernel}: implementation {implementation!r} cannot run: {reason}; use 'auto' or one of {usable}"
            )
        return implementation
    for position, name in enumerate(prefer):
        if forms[name] is None:
            _announce(kernel, name, [f"{other}: {forms[other]}" for other in prefer[:position]])
            return name
    raise NotImplementedError(f"{kernel}: no form can run here: {dict(forms)}")


def _announce(kernel: str, name: str, skipped: Sequence[str]) -> None:
    key = (kernel, name, platform())
    if key not in _announced:
        _announced.add(key)
        why = f" (not {'; '.join(skipped)})" if skipped else ""
        LOG.info("%s: auto chose %r on %s%s", kernel, name, platform(), why)


def gpu_interpreter() -> Any:
    """What `interpret=` takes to run a Mosaic GPU kernel on a CPU. JAX 0.10 keeps the class in a private
    place."""
    params = getattr(mosaic_gpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params()
