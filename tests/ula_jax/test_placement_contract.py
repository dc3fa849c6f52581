"""Every registered placement, in every layout: what attention reads is what was stored, wherever it was kept."""

import functools

import numpy as np
import pytest

from tests.ula_jax.support import GROUPS, Want, World, harness, kinds

# Prefill chunks have a compiled step of their own in two layouts (HiSparse then reads the host in place).
LAYOUTS = {
    ("dp", 1, "fp32"): 4,
    ("tp", 1, "bf16"): 2,
    ("dp", 2, "fp8"): 2,
    ("tp", 2, "fp8"): 4,
    ("dp", 8, "bf16"): 2,
    ("tp", 8, "fp32"): 2,
}
CASES = [(kind, layout) for layout in LAYOUTS for kind in kinds()]
CASES += [(kind, layout) for layout in (("tp", 2, "fp8"), ("dp", 8, "bf16")) for kind in kinds(("lru", "pb_lru"))]
CASES = list(dict.fromkeys(CASES))


def name_of(kind, layout):
    return "-".join([*filter(None, kind), f"{layout[0]}{layout[1]}", layout[2]])


class Story:
    """Random steps of two requests on each rank: the same for every placement of a layout."""

    def __init__(self, world, chunk=2, share=False):
        self.world, self.chunk, self.share, self.rng = world, chunk, share, np.random.default_rng(7)
        h = world.h
        self.room, self.stripe, self.page = 10, h.devices if h.tp else 1, h.spec.page_size
        pages = h.requests * h.spec.max_context // self.page
        self.free = [list(self.rng.permutation(pages)) for _ in range(h.ranks)]
        self.shared = 0
        self.pages = [{} for _ in range(h.ranks)]
        self.length = [{} for _ in range(h.ranks)]

    def tell(self):
        self.start(0, 64)
        self.start(1, 56)
        self.grow(52, self.chunk)
        self.grow(6)
        for number in (0, 1):
            self.finish(number)
            self.start(number, 24)
            self.grow(12, self.chunk)
            self.grow(5)
        return self.world.outputs

    def start(self, number, limit):
        for rank in range(self.world.h.ranks):
            self.pages[rank][number] = [int(self.free[rank].pop(0)) for _ in range(-(-limit // self.page))]
            self.length[rank][number] = 0

    def finish(self, number):
        ranks = range(self.world.h.ranks)
        self.world.release([self.addresses(rank, number, 0, self.length[rank].pop(number)) for rank in ranks])
        for rank in ranks:
            self.free[rank] += self.pages[rank].pop(number)

    def addresses(self, rank, number, start, stop):
        pages = self.pages[rank][number]
        return [pages[p // self.page] * self.page + p % self.page for p in range(start, stop)]

    def grow(self, tokens, chunk=1):
        for _ in range(0, tokens, chunk):
            plans = [self.plan(rank, chunk) for rank in range(self.world.h.ranks)]
            self.world.step(plans, steps=max(chunk, 1 if self.chunk > 2 else self.chunk))

    def plan(self, rank, chunk):
        """What each request of a rank stores and reads; one in ten decoding requests only reads."""
        fresh = {}
        for number, length in self.length[rank].items():
            left = len(self.pages[rank][number]) * self.page - length
            count = min(left, chunk if chunk > 1 else int(self.rng.random() < 0.9))
            fresh[number] = self.addresses(rank, number, length, length + count)
        everything = sum(fresh.values(), [])
        needed = [
            {owner: {a for a in everything if a % self.stripe == owner} for owner in range(self.stripe)} for _ in GROUPS
        ]
        plan = {}
        for number, new in fresh.items():
            own = self.addresses(rank, number, 0, self.length[rank][number])
            others = [n for n in fresh if n != number] if self.share else []
            shared = [a for n in others for a in self.addresses(rank, n, 0, self.length[rank][n])]
            steps = range(max(1, len(new)))
            plan[number] = Want(new, [[self.choose(own + new[: s + 1] + shared, needed[g]) for s in steps] for g in range(2)])
        for number, new in fresh.items():
            self.length[rank][number] += len(new)
        read = [{a for step in want.selected[0] for a in step} for want in plan.values()]
        self.shared += len(set.intersection(*read))
        return plan

    def choose(self, candidates, needed):
        """Up to topk of the candidates; now and then few, or all with one owner. No more than a device has room for."""
        topk, picks = self.world.h.spec.topk, []
        most = topk if self.rng.random() < 0.8 else int(self.rng.integers(topk))
        owner = self.rng.integers(self.stripe) if self.rng.random() < 0.3 else None
        for at in self.rng.permutation(len(candidates)):
            address = candidates[at]
            rows = needed[address % self.stripe]
            if len(picks) < most and owner in (None, address % self.stripe) and len(rows | {address}) <= self.room:
                rows.add(address)
                picks.append(at)
        return [candidates[at] for at in sorted(picks)]


@functools.cache
def told(kind, layout):
    return Story(World(harness(*kind, *layout)), LAYOUTS[layout]).tell()


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[name_of(*case) for case in CASES])
def test_a_random_story_reads_back_what_it_stored(kind, layout):
    """The world checks rows, attention, counters and invariants after every step."""
    for outputs, reference in zip(told(kind, layout), told(("gpu_only", None), layout), strict=True):
        for one, other in zip(outputs, reference, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


SHARING = [case for case in CASES if case[1] in (("dp", 2, "fp8"), ("tp", 2, "fp8")) and not case[0][1]]


@pytest.mark.parametrize(("kind", "layout"), SHARING, ids=[name_of(*case) for case in SHARING])
def test_requests_may_select_the_same_rows(kind, layout):
    """Except where each request has a private buffer."""
    world = World(harness(*kind, *layout))
    if world.h.capacity.quotas is None:
        story = Story(world, LAYOUTS[layout], share=True)
        story.tell()
        assert story.shared > 50
