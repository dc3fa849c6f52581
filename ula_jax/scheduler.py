"""Which requests run, and which of their tokens come next. Plain Python, between steps.

Admission is first come, first served, by the placement's own capacity, and reserves pages for a request's longest
possible output. So a running request always finishes and two growing ones cannot block each other; what does not fit
waits. (The price is room reserved for output that an early EOS leaves unused.)
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ula_jax.address import PageAllocator, addresses_of
from ula_jax.spec import Capacity


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded. `temperature` 0 is greedy; `eos` None means that only the length stops it."""

    max_tokens: int = 32
    temperature: float = 0.0
    eos: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"sampling: expected max_tokens of at least 1 and temperature of at least 0, found "
                f"{self.max_tokens} and {self.temperature}; correct the request"
            )


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Request:
    """One document being decoded. `tokens` are prompt and output; the first `computed` have stored rows."""

    id: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    status: Status = Status.WAITING
    finish_reason: str | None = None
    """`length`, `eos` or `abort`."""
    computed: int = 0
    rank: int = -1
    number: int = -1
    """Number within the rank: row of the decode batch, quota of placements that have quotas."""
    pages: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Positions it may come to hold. The last token's row is never needed but is reserved."""
        return self.prompt_length + self.params.max_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def decoding(self) -> bool:
        """Every token but the newest has its rows."""
        return self.computed == len(self.tokens) - 1 and self.computed >= self.prompt_length


class Scheduler:
    """Requests of all ranks. `max_requests` is per rank."""

    def __init__(self, capacity: Capacity, max_requests: int):
        self.capacity, self.max_requests = capacity, max_requests
        page = capacity.spec.page_size
        self.allocators = [PageAllocator(capacity.addresses // page, page) for _ in range(capacity.ranks)]
        self.running: list[dict[int, Request]] = [{} for _ in range(capacity.ranks)]
        self._numbers = [list(range(max_requests)) for _ in range(capacity.ranks)]
        self._spilled = [False] * capacity.ranks
        self.waiting: deque[Request] = deque()

    def check(self, request: Request) -> None:
        """Raise if the request could never run, however empty the pools."""
        spec, longest = self.capacity.spec, request.longest
        if longest > spec.max_context:
            raise ValueError(
                f"request {request.id}: expected prompt and output of at most max_context = {spec.max_context} tokens, "
                f"found {request.prompt_length} + {request.params.max_tokens} = {longest}; shorten the prompt or raise "
                "max_context"
            )
        if not self.capacity.fits([longest]):
            raise ValueError(
                f"request {request.id}: expected prompt and output of at most {self.capacity.longest} tokens to fit "
                f"the capacity of {self.capacity.addresses} tokens, found {request.prompt_length} + "
                f"{request.params.max_tokens} = {longest}; shorten the prompt or raise the budget"
            )

    def admit(self) -> list[Request]:
        """Move waiting requests to running while the next in line fits; the emptiest rank takes it."""
        admitted = []
        while self.waiting:
            request = self.waiting[0]
            order = sorted(range(len(self.running)), key=lambda r: -self.allocators[r].free_pages)
            rank = next((r for r in order if self._fits(r, request)), None)
            if rank is None:
                break
            self.waiting.popleft()
            request.status, request.rank = Status.RUNNING, rank
            request.number = heapq.heappop(self._numbers[rank])
            request.pages = self.allocators[rank].allocate(request.longest)
            self.running[rank][request.number] = request
            admitted.append(request)
        return admitted

    def prefill(self, rank: int, rows: int, chunk: int) -> list[tuple[Request, int]]:
        """Up to `rows` requests of a rank that still have prompt to store, and how many tokens each, such that the
        rows that this one step needs fit the device."""
        plan: list[tuple[Request, int]] = []
        needs: list[tuple[int, int]] = []
        for request in self.running[rank].values():
            if request.decoding or len(plan) == rows:
                continue
            most = min(chunk, len(request.tokens) - request.computed)
            for tokens in range(most, 0, -1):
                need = request.computed + tokens, tokens
                if self.capacity.step_fits([*needs, need]):
                    plan.append((request, tokens))
                    needs.append(need)
                    break
        return plan

    def decode(self, rank: int) -> list[Request]:
        return [request for request in self.running[rank].values() if request.decoding]

    def resident(self, step: list[list[tuple[Request, int]]]) -> bool:
        """Whether every row is on the device and stays there in this step, `step[rank]` being its (request, tokens).
        To be asked before every step: from the first that fills a device, rows of its rank may be on the host until
        the rank has none left."""
        room = self.capacity.resident
        if room is None:
            return False
        for rank, running in enumerate(self.running):
            if not any(request.computed for request in running.values()):
                self._spilled[rank] = False
            new = {request.id: tokens for request, tokens in step[rank]}
            held = (request.computed + new.get(request.id, 0) for request in running.values())
            if sum(map(self.capacity.striping.share, held)) > room:
                self._spilled[rank] = True
        return not any(self._spilled)

    def finish(self, request: Request, reason: str) -> np.ndarray:
        """End a request. Returns the addresses whose rows are to be forgotten, int32 [computed]."""
        addresses = np.empty(0, np.int32)
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            addresses = addresses_of(request.pages, self.capacity.spec.page_size, 0, request.computed)
            self.allocators[request.rank].free(request.pages)
            del self.running[request.rank][request.number]
            heapq.heappush(self._numbers[request.rank], request.number)
        request.status, request.finish_reason, request.pages = Status.FINISHED, reason, []
        return addresses

    def live_addresses(self, rank: int) -> np.ndarray:
        """Addresses of a rank that hold rows, int32."""
        page = self.capacity.spec.page_size
        held = [addresses_of(r.pages, page, 0, r.computed) for r in self.running[rank].values()]
        return np.concatenate(held) if held else np.empty(0, np.int32)

    def _fits(self, rank: int, request: Request) -> bool:
        contexts = [other.longest for other in self.running[rank].values()]
        return (
            bool(self._numbers[rank])
            and self.allocators[rank].can_allocate(request.longest)
            and self.capacity.fits([*contexts, request.longest])
        )
