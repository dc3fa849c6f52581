"""What a benchmark measures: one function at one shape, in all its forms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """Forms that compute the same, and the calls they are timed on.

    A form is called as `form(*call)` and returns its result, or, where `state` is given, as `form(state, *call)` and
    returns the next state and its result; the state is donated. Calls are distinct, so that no call's data is in the
    cache because the call before left it there, and XLA cannot merge two calls into one.
    """

    kernel: str
    shape: str
    forms: Mapping[str, Callable[..., Any]]
    calls: Sequence[tuple[Any, ...]]
    state: Callable[[], Any] | None = None
    """Makes a fresh state."""
    check: Callable[[str, Any, tuple[Any, ...]], str | None] | None = None
    """From a form's name, its first result (after the state, where there is one) and its first call: what is wrong with
    the result, None if nothing is."""
    device_bytes: int = 0
    """Least bytes that one call reads and writes in device memory."""
    link_bytes: int = 0
    """Least bytes that one call moves over the link to the host, in the busier direction."""
    flops: int = 0
    """Least operations on 16-bit numbers."""
    bar: float | None = None
    """Microseconds that the fastest form should not exceed."""
    ratio: float | None = None
    """Speed-up over the base form that the fastest form should reach."""
    base: str = "reference"
    """The form that ratios are against."""
    outside: Mapping[str, Callable[[], float]] | None = None
    """Forms that are timed by themselves (torch, a DMA copy): each returns microseconds a call."""
