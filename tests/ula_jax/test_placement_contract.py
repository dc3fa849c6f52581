"""Every registered placement, in every layout: what attention reads is what was stored, wherever it was kept."""

import functools

import numpy as np
import pytest

from tests.ula_jax.support import CHUNK, GROUPS, Want, World, harness, kinds
from ula_jax import verify

LAYOUTS = [("dp", 1, "fp32"), ("tp", 1, "bf16"), ("dp", 2, "fp8"), ("tp", 2, "fp8"), ("dp", 8, "bf16"), ("tp", 8, "fp32")]
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}{layout[1]}-{layout[2]}")
of_every_kind = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: "-".join(filter(None, kind)))


class Story:
    """Random steps of two requests on each rank: the same for every placement of a layout."""

    def __init__(self, world, share=False):
        self.world, self.share, self.rng = world, share, np.random.default_rng(7)
        h = world.h
        self.room, self.stripe, self.page = 10, h.devices if h.tp else 1, h.spec.page_size
        pages = h.requests * h.spec.max_context // self.page
        self.free = [list(self.rng.permutation(pages)) for _ in range(h.ranks)]
        self.pages = [{} for _ in range(h.ranks)]
        self.length = [{} for _ in range(h.ranks)]

    def tell(self):
        for rank in range(self.world.h.ranks):
            self.start(rank, 0, 64)
            self.start(rank, 1, 56)
        for _ in range(15):
            self.grow(CHUNK)
        for _ in range(6):
            self.grow(1)
        for number in (0, 1, 0):
            self.finish(number)
            for rank in range(self.world.h.ranks):
                self.start(rank, number, int(self.rng.integers(20, 40)))
            for _ in range(3):
                self.grow(CHUNK)
            for _ in range(4):
                self.grow(1)
        return self.world.outputs

    def start(self, rank, number, limit):
        self.pages[rank][number] = [int(self.free[rank].pop(0)) for _ in range(-(-limit // self.page))]
        self.length[rank][number] = 0

    def finish(self, number):
        gone = [self.addresses(rank, number) for rank in range(self.world.h.ranks)]
        self.world.release(gone)
        for rank in range(self.world.h.ranks):
            self.free[rank] += self.pages[rank].pop(number)

    def addresses(self, rank, number, stop=None):
        stop = self.length[rank][number] if stop is None else stop
        return [self.pages[rank][number][p // self.page] * self.page + p % self.page for p in range(stop)]

    def grow(self, steps):
        plans = []
        for rank, requests in enumerate(self.length):
            needed = [{} for _ in GROUPS]
            counts = {n: self.new_tokens(rank, n, steps) for n in requests}
            fresh = {n: self.addresses(rank, n, requests[n] + c)[requests[n] :] for n, c in counts.items()}
            for taken in needed:
                for address in sum(fresh.values(), []):
                    taken.setdefault(address % self.stripe, set()).add(address)
            plans.append({n: self.want(rank, n, fresh[n], steps, needed) for n in requests})
            for n, count in counts.items():
                requests[n] += count
        self.world.step(plans)

    def new_tokens(self, rank, number, steps):
        left = len(self.pages[rank][number]) * self.page - self.length[rank][number]
        return min(left, steps if steps > 1 else int(self.rng.random() < 0.9))

    def want(self, rank, number, fresh, steps, needed):
        stored, others = self.length[rank][number], []
        if self.share and steps == 1:
            others = [a for n in self.length[rank] if n != number for a in self.addresses(rank, n)]
        chosen = []
        for taken in needed:
            seen = [self.addresses(rank, number) + fresh[: s + 1] + others for s in range(max(1, len(fresh)))]
            chosen.append([self.choose(candidates, taken) for candidates in seen])
            if steps > 1:
                chosen[-1] += [[]] * (steps - len(chosen[-1]))
        assert stored + len(fresh) or not any(map(any, chosen))
        return Want(fresh, chosen)

    def choose(self, candidates, taken):
        """Up to four of the candidates; now and then all with one owner. Never more than a device has room for."""
        topk, picks = self.world.h.spec.topk, []
        owner = self.rng.integers(self.stripe) if self.rng.random() < 0.3 else None
        for at in self.rng.permutation(len(candidates)):
            address = candidates[at]
            rows = taken.setdefault(address % self.stripe, set())
            fits = address in rows or len(rows) < self.room
            if len(picks) < topk and fits and (owner is None or address % self.stripe == owner):
                rows.add(address)
                picks.append(at)
        picks = sorted(picks[: int(self.rng.integers(topk // 2, topk + 1))] if self.rng.random() < 0.3 else picks)
        return [candidates[at] for at in picks]


@functools.cache
def told(kind, layout):
    return Story(World(harness(*kind, *layout))).tell()


@in_every_layout
@of_every_kind
def test_a_random_story_reads_back_what_it_stored(kind, layout):
    """The world checks rows, attention, counters and invariants after every step."""
    for outputs, reference in zip(told(kind, layout), told(("gpu_only", None), layout), strict=True):
        for one, other in zip(outputs, reference, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])
