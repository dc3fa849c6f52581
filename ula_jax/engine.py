"""Continuous batching over a placement: schedule -> step -> postprocess."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ula_jax import verify
from ula_jax.address import page_table
from ula_jax.history import Batch
from ula_jax.index_keys import Gather
from ula_jax.metrics import Residency, Totals
from ula_jax.placements.base import Counters, Placement
from ula_jax.runner import Runner, StepOutput
from ula_jax.sampling import Sampling
from ula_jax.scheduler import Request, SamplingParams, Scheduler, Status
from ula_jax.spec import Budget, KVSpec
from ula_jax.types import EMPTY


@dataclass(frozen=True)
class EngineConfig:
    """Shapes of the compiled steps, and what is watched."""

    max_requests: int
    """Requests of one rank in a decode step."""
    prefill_rows: int = 1
    """Requests of one rank in a prefill step."""
    prefill_chunk: int = 64
    """Prompt tokens of one request in a prefill step."""
    trace: bool = False
    """Keep all logits and selections in each step's output (see `Engine.on_step`)."""
    verify: bool = False
    """Check the placement's invariants after every step (slow)."""
    capture: float = 0.0
    """Ranks to keep of each selection in each step's output, in units of `topk` (see `ula_jax.traces.Recorder`)."""
    fast_path: bool = True
    """Leave out what only prepares for moving rows in steps in which no row can move, until the device is full for the
    first time. Policies do not see what is used in such steps."""
    gather: Gather = "scores"
    """What devices that stripe one history send each other to select from it: all scores, or the best of each."""

    def __post_init__(self):
        if min(self.max_requests, self.prefill_rows, self.prefill_chunk) < 1:
            raise ValueError(f"engine: expected sizes of at least 1, found {self}; raise the one below 1")
        if self.capture and self.capture < 1:
            raise ValueError(f"engine: expected capture of 0 or at least 1 (units of topk), found {self.capture}")


class Token(NamedTuple):
    """One sampled token, in the order of sampling."""

    request: int
    token: int
    finish_reason: str | None


class Engine:
    """Serves requests over one model and one placement.

    `on_step(rows, batch, output)`, if set, sees every step: `rows[rank]` are its (request, tokens), in batch order.
    """

    def __init__(
        self,
        model: nnx.Module,
        placement: Placement,
        spec: KVSpec,
        budget: Budget,
        mesh: Mesh,
        config: EngineConfig,
        vocab_size: int,
    ):
        self.config, self.spec, self.placement, self.vocab_size = config, spec, placement, vocab_size
        self.runner = Runner(model, placement, spec, budget, mesh, config.trace, config.capture, config.gather)
        self.scheduler = Scheduler(self.runner.capacity, config.max_requests)
        self.requests: dict[int, Request] = {}
        self.totals = {"prefill": Totals(spec), "decode": Totals(spec)}
        self.on_step: Callable[[list[list[tuple[Request, int]]], Batch, StepOutput], None] | None = None
        self.most_running = 0
        """Most requests that were held at once."""

    def submit(self, prompt: list[int], params: SamplingParams | None = None) -> int:
        """Queue a request and return its id. ValueError if it can never run; the engine goes on with the others."""
        number = len(self.requests)
        if not prompt:
            raise ValueError(f"request {number}: expected at least one prompt token, found none; give it a prompt")
        wrong = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"request {number}: expected tokens from 0 to {self.vocab_size - 1}, found {wrong}; "
                "use the model's own vocabulary"
            )
        request = Request(number, len(prompt), list(prompt), params or SamplingParams())
        self.scheduler.check(request)
        self.requests[number] = request
        self.scheduler.waiting.append(request)
        return number

    def abort(self, request_id: int) -> None:
        """End a request now and forget its rows. Finished ones stay as they are."""
        if request_id not in self.requests:
            raise ValueError(f"abort: expected a submitted request's id, found {request_id}; use what submit returned")
        request = self.requests[request_id]
        if request.status is not Status.FINISHED:
            self._finish(request, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting) or any(self.scheduler.running)

    def step(self) -> list[Token]:
        """Admit what fits, then run one prefill step and one decode step, each if there is work for it."""
        self.scheduler.admit()
        self.most_running = max(self.most_running, sum(map(len, self.scheduler.running)))
        ranks = range(self.runner.ranks)
        config = self.config
        decoding = [[(r, 1) for r in self.scheduler.decode(rank)] for rank in ranks]
        prefill = [self.scheduler.prefill(rank, config.prefill_rows, config.prefill_chunk) for rank in ranks]
        tokens = self._run("prefill", prefill, config.prefill_rows, config.prefill_chunk)
        return tokens + self._run("decode", decoding, config.max_requests, 1)

    def run(self) -> Iterator[Token]:
        """Step until nothing is left, handing out tokens as they come."""
        while self.busy:
            yield from self.step()

    def stream(self, prompt: list[int], params: SamplingParams | None = None) -> Iterator[Token]:
        """Submit a prompt and hand out its tokens as they come; other requests advance with it."""
        request = self.submit(prompt, params)
        for token in self.run():
            if token.request == request:
                yield token
                if token.finish_reason:
                    return

    def residency(self) -> Residency:
        """Copies of rows stored now."""
        return verify.residency(self.placement, self.runner.state, self._live(), self.spec)

    def verify(self) -> None:
        """Raise InvariantError if the stored state contradicts itself."""
        verify.check(self.placement, self.runner.state, self._live())

    def _run(self, phase: str, rows: list[list[tuple[Request, int]]], width: int, steps: int) -> list[Token]:
        if not any(rows):
            return []
        # A decoding request keeps its batch row for life: its arithmetic does not depend on who comes and goes.
        places = [[r.number if phase == "decode" else i for i, (r, _) in enumerate(row)] for row in rows]
        batch, sampling = self._batch(rows, places, width, steps)
        resident = self.scheduler.resident(rows) and self.config.fast_path
        output = self.runner.step(batch, sampling, resident)
        counters, sampled = np.asarray(output.counters), np.asarray(output.tokens)
        self.totals[phase].add(counters, sum(count for rank in rows for _, count in rank))
        lost = int(counters[..., Counters._fields.index("dropped")].sum())
        if lost:
            raise RuntimeError(f"placement: expected a place for every row, found none for {lost}; this is a bug")
        if self.on_step:
            self.on_step(rows, batch, output)
        tokens = []
        for rank, row in enumerate(rows):
            for (request, count), place in zip(row, places[rank], strict=True):
                request.computed += count
                if request.computed == len(request.tokens):
                    tokens.append(self._accept(request, int(sampled[rank, place])))
        if self.config.verify:
            self.verify()
        return tokens

    def _accept(self, request: Request, token: int) -> Token:
        request.tokens.append(token)
        reason = None
        if token == request.params.eos:
            reason = "eos"
        elif len(request.output) == request.params.max_tokens:
            reason = "length"
        if reason:
            self._finish(request, reason)
        return Token(request.id, token, reason)

    def _finish(self, request: Request, reason: str) -> None:
        rank = request.rank
        addresses = self.scheduler.finish(request, reason)
        if addresses.size:
            every = np.full((self.runner.ranks, self.spec.table_width * self.spec.page_size), EMPTY, np.int32)
            every[rank, : addresses.size] = addresses
            self.runner.release(every)

    def _batch(
        self, rows: list[list[tuple[Request, int]]], places: list[list[int]], width: int, steps: int
    ) -> tuple[Batch, Sampling]:
        """Arrays [ranks, width, ...] with each row at its place."""
        shape = (len(rows), width)
        tokens = np.zeros((*shape, steps), np.int32)
        start, count, seed = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        numbers = np.full(shape, EMPTY, np.int32)
        tables = np.full((*shape, self.spec.table_width), EMPTY, np.int32)
        temperature = np.zeros(shape, np.float32)
        for rank, row in enumerate(rows):
            for (request, length), place in zip(row, places[rank], strict=True):
                at = rank, place
                tokens[at][:length] = request.tokens[request.computed : request.computed + length]
                start[at], count[at], numbers[at] = request.computed, length, request.number
                tables[at] = page_table(request.pages, self.spec.table_width)
                temperature[at], seed[at] = request.params.temperature, request.params.seed
        return Batch(tokens, start, count, tables, numbers), Sampling(temperature, seed)

    def _live(self) -> list[np.ndarray]:
        return [self.scheduler.live_addresses(rank) for rank in range(self.runner.ranks)]
