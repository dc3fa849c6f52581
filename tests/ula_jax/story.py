"""Random lives of requests, told to a World."""

import numpy as np

from tests.ula_jax.support import GROUPS, Want


class Story:
    """Random steps of up to two requests on each rank: the same for every placement of a layout.

    `chunk` tokens are prefilled at once; one compiled step serves decoding too unless there are more than two. `share`:
    requests also select each other's rows. No step needs more than `room` rows on a device.
    """

    def __init__(self, world, chunk=2, share=False, room=10):
        self.world, self.chunk, self.share, self.rng = world, chunk, share, np.random.default_rng(7)
        h = world.h
        self.room, self.dealt, self.page = room, h.dealt, h.spec.page_size
        self.appends = 0.9
        """Share of decoding requests that store a token; the others only read."""
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
        """What each request of a rank stores and reads."""
        fresh = {}
        for number, length in self.length[rank].items():
            left = len(self.pages[rank][number]) * self.page - length
            count = min(left, chunk if chunk > 1 else int(self.rng.random() < self.appends))
            fresh[number] = self.addresses(rank, number, length, length + count)
        everything = [a for new in fresh.values() for a in new]
        owners, places = range(self.dealt.devices), self.dealt.places
        needed = [{owner: {a for a in everything if places[a][0] == owner} for owner in owners} for _ in GROUPS]
        plan = {}
        for number, new in fresh.items():
            own = self.addresses(rank, number, 0, self.length[rank][number])
            others = [n for n in fresh if n != number] if self.share else []
            shared = [a for n in others for a in self.addresses(rank, n, 0, self.length[rank][n])]
            seen = [own + new[: step + 1] + shared for step in range(max(1, len(new)))]
            plan[number] = Want(new, [[self.choose(candidates, rows) for candidates in seen] for rows in needed])
        for number, new in fresh.items():
            self.length[rank][number] += len(new)
        read = [{a for step in want.selected[0] for a in step} for want in plan.values()]
        self.shared += len(set.intersection(*read))
        return plan

    def choose(self, candidates, needed):
        """Up to topk of the candidates; now and then few, or all with one owner. No more than a device has room for."""
        topk, picks = self.world.h.spec.topk, []
        most = topk if self.rng.random() < 0.8 else int(self.rng.integers(topk))
        owner = self.rng.integers(self.dealt.devices) if self.rng.random() < 0.3 else None
        for at in self.rng.permutation(len(candidates)):
            address = candidates[at]
            home = self.dealt.places[address][0]
            rows = needed[home]
            if len(picks) < most and owner in (None, home) and len(rows | {address}) <= self.room:
                rows.add(address)
                picks.append(at)
        return [candidates[at] for at in sorted(picks)]
