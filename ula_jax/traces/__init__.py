"""Traces of what sparse attention selects: made up, captured from an engine, read from and written to files."""

from ula_jax.traces.files import load, save
from ula_jax.traces.record import Recorder
from ula_jax.traces.synthetic import TraceConfig, fit_fluctuation, generate
from ula_jax.traces.trace import Trace

__all__ = ["Recorder", "Trace", "TraceConfig", "fit_fluctuation", "generate", "load", "save"]
