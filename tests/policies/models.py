"""The policies' rules in plain Python, one slot after the other: what the vectorised ones must agree with."""

import numpy as np

SIZE = 40
"""Slots, those included that were taken away."""
REQUESTS = 3


class Model:
    """The slots that are free, those used in this round, and the round of each row's last use."""

    def __init__(self, slots):
        self.slots, self.free, self.now = set(slots), set(slots), 0
        self.used: dict[int, int] = {}
        self.found: list[int] = []  # what the policy gave
        self.start()

    def start(self): ...
    def came(self, slot, address, request): ...
    def hit(self, slot): ...
    def gone(self, slot): ...
    def opened(self, missing, active): ...
    def observe(self, ranked): ...
    def order(self, need):
        """The first `need` rows to give up, after the free ones."""
        raise NotImplementedError

    def idle(self, slot):
        return slot in self.used and self.used[slot] < self.now

    def forget(self, slots):
        for slot in slots:
            self.gone(slot)
            del self.used[slot]
            self.free.add(slot)

    def open(self, slots, missing, active):
        self.now += 1
        self.opened(missing, active)
        for slot in slots:
            self.used[slot] = self.now
            self.hit(slot)

    def evict(self, count):
        victims = sorted(self.free)[:count]
        self.free -= set(victims)
        rows = self.order(count - len(victims)) if count > len(victims) else []
        for slot in rows:
            self.gone(slot)
            del self.used[slot]
        return victims + rows

    def insert(self, slots, addresses, requests):
        for slot, address, request in zip(slots, addresses, requests, strict=True):
            self.used[slot] = self.now
            self.came(slot, address, request)

    def sorted_by(self, key, need):
        return sorted(filter(self.idle, self.used), key=lambda slot: (*key(slot), slot))[:need]


class Fifo(Model):
    def start(self):
        self.arrived = {}

    def came(self, slot, address, request):
        self.arrived[slot] = self.now

    def order(self, need):
        return self.sorted_by(lambda slot: (self.arrived[slot],), need)


class Clock(Model):
    def start(self):
        self.marked, self.hand = set(), 0

    def came(self, slot, address, request):
        self.marked.discard(slot)

    def hit(self, slot):
        self.marked.add(slot)

    def order(self, need):
        out = []
        while len(out) < need:
            if self.idle(self.hand) and self.hand not in out:
                if self.hand in self.marked:
                    self.marked.remove(self.hand)
                else:
                    out.append(self.hand)
            self.hand = (self.hand + 1) % SIZE
        return out


class Sieve(Model):
    def start(self):
        self.queue, self.marked, self.pointer = [], set(), None  # the pointer is the next slot to look at

    def came(self, slot, address, request):
        self.queue.append(slot)
        self.marked.discard(slot)

    def hit(self, slot):
        self.marked.add(slot)

    def _next(self, slot):
        newer = self.queue[self.queue.index(slot) + 1 :]
        return newer[0] if newer else None

    def gone(self, slot):
        if slot in self.queue:
            if slot == self.pointer:
                self.pointer = self._next(slot)
            self.queue.remove(slot)

    def order(self, need):
        out = []
        while len(out) < need:
            slot = self.queue[0] if self.pointer is None else self.pointer
            self.pointer = self._next(slot)
            if self.idle(slot):
                if slot in self.marked:
                    self.marked.remove(slot)
                else:
                    self.queue.remove(slot)
                    out.append(slot)
        return out


class S3Fifo(Model):
    """`s3_fifo:small=40`, so that rows are in the small queue for long enough to be promoted."""

    def start(self):
        self.small, self.main, self.ghost, self.leaving = [], [], [], []
        self.uses, self.address, self.full = {}, {}, False
        self.share = len(self.slots) * 4 // 10

    def opened(self, missing, active):
        self.ghost = (self.ghost + self.leaving)[-(len(self.slots) * 9 // 10) :]
        self.leaving = []

    def hit(self, slot):
        self.uses[slot] = min(self.uses[slot] + 1, 3)

    def came(self, slot, address, request):
        self.uses[slot], self.address[slot] = 0, address
        if address in self.ghost:
            self.ghost.remove(address)
            self.main.append(slot)
        elif self.full or len(self.small) < self.share:
            self.small.append(slot)
        else:
            self.main.append(slot)

    def gone(self, slot):
        for queue in (self.small, self.main):
            if slot in queue:
                queue.remove(slot)

    def order(self, need):
        self.full = True
        waiting = list(filter(self.idle, self.small))
        small, from_main = [], 0
        while len(small) + from_main < need:
            if len(self.main) - from_main > len(self.slots) - self.share or not waiting:
                from_main += 1
                continue
            while waiting and self.uses[waiting[0]] >= 2:
                slot = waiting.pop(0)
                self.small.remove(slot)
                self.main.append(slot)
                self.uses[slot] = 0
            small += waiting[:1]
            waiting = waiting[1:]
        main = []
        while len(main) < from_main and any(map(self.idle, self.main)):
            slot = self.main.pop(0)
            if not self.idle(slot):
                self.main.append(slot)
            elif self.uses[slot]:
                self.uses[slot] -= 1
                self.main.append(slot)
            else:
                main.append(slot)
        rest = [slot for slot in self.small if self.idle(slot) and slot not in small]
        rest = rest[: need - len(small) - len(main)]
        self.leaving += [self.address[slot] for slot in small + rest]
        return small + main + rest


class Lrfu(Model):
    """Weights in float64: among nearly equal ones, float32 may choose another."""

    def start(self):
        self.uses = {}

    def came(self, slot, address, request):
        self.uses[slot] = [self.now]

    def hit(self, slot):
        self.uses[slot].append(self.now)

    def order(self, need):
        weight = {slot: sum(0.9 ** (self.now - use) for use in self.uses[slot]) for slot in self.used}
        rows = self.sorted_by(lambda slot: (weight[slot],), need)
        found = self.found[-need:]
        assert all(map(self.idle, found))
        np.testing.assert_allclose([weight[slot] for slot in found], [weight[slot] for slot in rows], rtol=1e-4)
        return found


class Score(Model):
    def start(self):
        self.margin = {}

    def observe(self, ranked):
        self.margin = {slot: margin for slot, _, margin in ranked}

    def order(self, need):
        return self.sorted_by(
            lambda slot: (1, self.margin[slot]) if slot in self.margin else (0, self.used[slot]), need
        )


class ScoreClasses(Model):
    EDGES = (8.8, 10, 12, 16, 20, 24, 32)  # of K = 8

    def start(self):
        self.kind, self.hand = {}, 0

    def came(self, slot, address, request):
        self.kind[slot] = 0

    def hit(self, slot):
        self.kind[slot] = 0

    def observe(self, ranked):
        rank_of = {slot: rank for slot, rank, _ in ranked}
        for slot in filter(self.idle, self.used):
            rank = rank_of.get(slot, 1000)
            self.kind[slot] = sum(rank >= int(edge) for edge in self.EDGES)

    def order(self, need):
        def key(slot):
            return -self.kind[slot], (slot - self.hand) % SIZE if self.kind[slot] == 7 else slot

        out = self.sorted_by(key, need)
        cold = [slot for slot in out if self.kind[slot] == 7]
        if cold:
            self.hand = (cold[-1] + 1) % SIZE
        return out


class Growing(Model):
    """`pb_lru_exp:buckets=5,width=2`: sets of slots, oldest first, each for 2 ** size rounds."""

    def start(self):
        self.buckets, self.cold, self.hand = [(0, set())], set(), 0

    def opened(self, missing, active):
        size = 0
        while len(same := [i for i, (other, _) in enumerate(self.buckets) if other == size]) > 2:
            (_, old), (_, new) = self.buckets[same[0]], self.buckets.pop(same[1])
            self.buckets[same[0]] = (size + 1, old | new)
            size += 1
        if len(self.buckets) > 5:
            self.cold |= self.buckets.pop(0)[1]
        self.buckets.append((0, set()))

    def came(self, slot, address, request):
        self.hit(slot)

    def hit(self, slot):
        self.gone(slot)
        self.buckets[-1][1].add(slot)

    def gone(self, slot):
        for bucket in (self.cold, *(bucket for _, bucket in self.buckets)):
            bucket.discard(slot)

    def order(self, need):
        cold = sorted(self.cold, key=lambda slot: (slot - self.hand) % SIZE)[:need]
        if cold:
            self.hand = (cold[-1] + 1) % SIZE
        return (cold + [slot for _, bucket in self.buckets[:-1] for slot in sorted(bucket)])[:need]


class Quota(Model):
    """One victim after the other, from whoever is most over the quota."""

    def start(self):
        self.owner = {}

    def came(self, slot, address, request):
        self.owner[slot] = request

    def opened(self, missing, active):
        self.missing = missing
        quota = len(self.slots) // max(len(active), 1)
        self.quota = {request: quota if request in active else 0 for request in range(REQUESTS)}

    def order(self, need):
        out = []
        rows = {r: self.sorted_by(lambda slot: (self.used[slot],), SIZE) for r in range(REQUESTS)}
        rows = {r: [slot for slot in rows[r] if self.owner[slot] == r] for r in rows}
        over = {r: sum(self.owner[slot] == r for slot in self.used) - self.quota[r] for r in rows}
        for request in self.missing:
            over[request] += 1
        while len(out) < need:
            request = max((r for r in rows if rows[r]), key=lambda r: (over[r], -rows[r][0]))
            over[request] -= 1
            out.append(rows[request].pop(0))
        return out


class Recency(Model):
    def order(self, need):
        return self.sorted_by(lambda slot: (self.used[slot],), need)


MODELS = {
    "lru": Recency,
    "fifo": Fifo,
    "clock": Clock,
    "sieve": Sieve,
    "s3_fifo": S3Fifo,
    "lrfu": Lrfu,
    "score_now": Score,
    "pb_score": ScoreClasses,
    "pb_lru_exp": Growing,
    "quota_lru": Quota,
}
