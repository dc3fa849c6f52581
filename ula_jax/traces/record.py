"""Traces of a running engine: what every decoding request selected in every step, and its runners-up."""

from typing import Any

import numpy as np

from ula_jax.engine import Engine
from ula_jax.history import Batch
from ula_jax.runner import StepOutput
from ula_jax.scheduler import Request
from ula_jax.traces.trace import Trace
from ula_jax.types import EMPTY


class Recorder:
    """Listens to an engine made with `EngineConfig(capture=depth)`; a round is a decode step, a seat a batch row.

    Prefill is not recorded: a trace starts with the history in place and no row selected yet.
    """

    def __init__(self, engine: Engine):
        if not engine.config.capture:
            raise ValueError("recorder: expected an engine that captures, found capture = 0; make it with capture=1.0")
        if not engine.spec.index_dim:
            raise ValueError("recorder: expected a model with indexers, found dense attention; use another model")
        self.engine = engine
        self._seats = engine.config.max_requests
        self._occupants: list[np.ndarray] = []
        self._ranked: list[tuple[np.ndarray, np.ndarray]] = []
        engine.on_step = self._on_step

    def trace(self, **meta: Any) -> Trace:
        """What was recorded so far: a stream for each (rank, layer group). ValueError if nothing was decoded."""
        if not self._occupants:
            raise ValueError("recorder: expected decode steps, found none; run the engine first")
        occupants = np.stack(self._occupants)  # [rounds, ranks, seats]
        before = np.concatenate([np.full_like(occupants[:1], EMPTY), occupants[:-1]])
        finished = (before != EMPTY) & (before != occupants)
        # [rounds, groups, ranks, seats, depth] -> [ranks, groups, rounds, seats, depth]
        positions, scores = (np.stack(part).transpose(2, 1, 0, 3, 4) for part in zip(*self._ranked, strict=True))
        ranks, groups = positions.shape[:2]
        idle = (occupants == EMPTY).transpose(1, 0, 2)[:, None, :, :, None]
        spec = self.engine.spec
        return Trace(
            positions=np.where(idle, EMPTY, positions).reshape(ranks * groups, *positions.shape[2:]),
            finished=np.repeat(finished.transpose(1, 0, 2), groups, axis=0),
            k=spec.topk,
            length=spec.max_context,
            scores=np.where(idle, -np.inf, scores).astype(np.float32).reshape(ranks * groups, *scores.shape[2:]),
            streams=tuple(f"rank {r} group {g}" for r in range(ranks) for g in range(groups)),
            row_bytes=tuple(len(layers) * spec.row.nbytes for layers in spec.groups) * ranks,
            meta=meta,
        )

    def _on_step(self, rows: list[list[tuple[Request, int]]], batch: Batch, output: StepOutput) -> None:
        if not any(request.output for rank in rows for request, _ in rank):
            return  # prefill
        occupants = np.full((len(rows), self._seats), EMPTY, np.int64)
        for rank, row in enumerate(rows):
            for request, _ in row:
                occupants[rank, request.number] = request.id
        self._occupants.append(occupants)
        positions, scores = zip(*output.ranked, strict=True)
        self._ranked.append((np.stack([np.asarray(p) for p in positions]), np.stack([np.asarray(s) for s in scores])))
