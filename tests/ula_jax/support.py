"""Drives a placement without a model, next to a table of plain numpy rows that says what it must give back."""

import functools
from dataclasses import dataclass, field

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ula_jax import verify
from ula_jax.history import KVState
from ula_jax.parallel import DEVICES, DP, Parallel, make_mesh
from ula_jax.placements import PLACEMENTS, make_placement
from ula_jax.placements.base import Counters, Query, Selection
from ula_jax.policies import make_policy
from ula_jax.policies.base import depth
from ula_jax.rows import RowFormat
from ula_jax.spec import Budget, KVSpec

GROUPS = ((0,), (1, 2))
LAYERS = 3
LATENT, ROPE = 8, 4
HEADS, SCALE = 2, 0.5


def kinds(policies=()):
    """(placement, policy) of every registered placement: with its own default policy (None) and those of `policies`."""
    found = [(name, None) for name in PLACEMENTS]
    for name, placement in PLACEMENTS.items():
        if default := getattr(placement(), "policy", None):
            found += [(name, policy) for policy in policies if make_policy(policy) != default]
    return found


def random_rows(rng, fmt, count):
    """`count` rows as words, lane by lane, and the numbers that they stand for."""
    numbers = rng.standard_normal((count, LATENT + ROPE)).astype(np.float32)
    if fmt == "fp32":
        return (numbers.view(np.uint32),), numbers
    if fmt == "bf16":
        short = numbers.astype(ml_dtypes.bfloat16)
        return (short.view(np.uint32),), short.astype(np.float32)
    codes = numbers[:, :LATENT].astype(ml_dtypes.float8_e4m3fn)
    rope = numbers[:, LATENT:].astype(ml_dtypes.bfloat16)
    scale = rng.uniform(0.5, 2.0, (count, 1)).astype(np.float32)
    words = np.concatenate([codes.view(np.uint32), rope.view(np.uint32)], axis=1)
    read = np.concatenate([codes.astype(np.float32) * scale, rope.astype(np.float32)], axis=1)
    return (words, scale.view(np.uint32)), read


def attention64(query, rows, valid, scale, latent):
    """Softmax attention and log-sum-exp in float64: query [..., H, W], rows [..., K, W], valid [..., K]."""
    rows = np.where(valid[..., None], rows.astype(np.float64), 0.0)
    weights = np.exp(np.einsum("...hw,...kw->...hk", query.astype(np.float64), rows) * scale) * valid[..., None, :]
    total = weights.sum(-1)
    output = np.einsum("...hk,...kc->...hc", weights, rows[..., :latent]) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        return output, np.log(total)


@dataclass(frozen=True)
class Dealt:
    """Which device has which of a rank's addresses, by dealing them out block by block."""

    devices: int
    width: int

    @functools.cached_property
    def hands(self):
        """Addresses of each device in the order of their numbers."""
        hands = [[] for _ in range(self.devices)]
        for block in range(4096 // self.width):
            hands[block % self.devices] += range(block * self.width, (block + 1) * self.width)
        return np.array([hand[: min(map(len, hands))] for hand in hands])

    @functools.cached_property
    def places(self):
        """(device, number) of each address."""
        return {a: (device, n) for device, hand in enumerate(self.hands.tolist()) for n, a in enumerate(hand)}

    def owner(self, addresses):
        return np.array([self.places[a][0] for a in np.ravel(addresses).tolist()], int).reshape(np.shape(addresses))

    def number(self, addresses):
        return np.array([self.places[a][1] for a in addresses.tolist()], int)


@dataclass(frozen=True)
class Spy(RowFormat):
    """A row format that keeps the words which attention is about to read."""

    seen: list = field(default_factory=list, compare=False)

    def unpack(self, lanes):
        self.seen.append(lanes)
        return RowFormat(self.name, self.latent, self.rope).unpack(lanes)


@dataclass
class Want:
    """One request in one step: addresses of its new tokens, and `selected[group][step]`, the addresses each reads."""

    new: list
    selected: list

    @classmethod
    def same(cls, selected, new=()):
        """One token, which reads the same rows in both groups."""
        return cls(list(new), [[list(selected)]] * len(GROUPS))


class Harness:
    """One placement with compiled functions for its steps, in the smallest budget for `requests` full contexts."""

    def __init__(self, name, policy, mode, devices, fmt, *, requests=2, topk=4, context=64, page=8, **parameters):
        if policy is not None:
            parameters["policy"] = make_policy(policy)
        self.placement = make_placement(name, Parallel.of(mode, devices), **parameters)
        self.spec = KVSpec(GROUPS, RowFormat(fmt, LATENT, ROPE), topk, 0, page, context)
        self.requests, self.devices, self.tp = requests, devices, self.placement.parallel.tp
        self.dealt = Dealt(self.tp, parameters.get("stripe", 1))
        """How stories count rows, whether the placement stripes or not."""
        self.budget, self.capacity = self._smallest()
        self.ranks, self.striped = self.capacity.ranks, self.placement.striping.devices > 1
        self.mesh = make_mesh(self.placement.parallel)
        self.split = self.striped and not getattr(self.placement, "exact", True)
        """Each device attends to its own rows alone, and the parts are merged."""
        looks = depth(getattr(self.placement, "policy", None))
        self.ranks_seen = int(looks * topk) if looks > 1 else 0
        """Ranks that the policy is shown of each request's scores."""
        self.in_place = {}
        """Whether steps of so many tokens read the host in place."""
        self.traces = []
        """Tokens of a step, for each time that one was traced and compiled."""
        by_rank = P(DP)
        over = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=False)

        make = over(lambda: _expand(self.placement.init(self.spec, self.budget)), in_specs=(), out_specs=P(DEVICES))
        self.start = jax.jit(make, out_shardings=self._shardings(jax.eval_shape(make)))
        donating = functools.partial(jax.jit, donate_argnums=0)
        self.step = donating(over(self._step, in_specs=(P(DEVICES), *[by_rank] * 7), out_specs=P(DEVICES)))
        self.release = donating(over(self._release, in_specs=(P(DEVICES), by_rank), out_specs=P(DEVICES)))

    def _smallest(self):
        """Budget and capacity that hold every request, and the rows that one step of a Story may need."""
        spec, need = self.spec, self.requests * self.spec.max_context
        row, room = spec.row_bytes, self.requests * spec.rows_needed(spec.max_context)
        for device in range(1, need + 1):
            for host in sorted({0, max(0, need // self.placement.striping.devices - device), need}):
                budget = Budget(device * row, host * row)
                try:
                    capacity = self.placement.capacity(spec, budget)
                except ValueError:
                    continue
                # Stories count what a step needs by owner, as striping deals rows; who does not stripe needs all of it.
                enough = (capacity.working_set or need * self.tp) * capacity.striping.devices >= room * self.tp
                if enough and capacity.addresses >= need and capacity.fits([spec.max_context] * self.requests):
                    return budget, capacity
        raise AssertionError(f"no budget found for {self.placement}")

    def _shardings(self, groups):
        def place(path, leaf):
            host = any(getattr(key, "name", None) == "host" for key in path) and leaf.size
            return NamedSharding(self.mesh, P(DEVICES), memory_kind="pinned_host" if host else "device")

        return jax.tree_util.tree_map_with_path(place, groups)

    def _step(self, groups, selected, new, requests, ranked, margins, rows, query):
        self.traces.append(new.shape[-1])
        groups = list(_squeeze(groups))
        selected, new, requests, ranked, margins, rows, query = _squeeze(
            (selected, new, requests, ranked, margins, rows, query)
        )
        words, outputs, counters = [], [], []
        for g, layers in enumerate(GROUPS):
            selection = Selection(selected[g], new, requests, ranked[g], margins[g])
            readable, groups[g], counted = self.placement.resolve(groups[g], selection)
            self.in_place[new.shape[1]] = readable.in_place
            counters.append(jax.numpy.stack(counted))
            for place, layer in enumerate(layers):
                spy = Spy(self.spec.row.name, LATENT, ROPE)
                groups[g] = self.placement.append(groups[g], place, readable, rows[layer])
                attended = self.placement.attend(groups[g], place, readable, Query(query[layer], SCALE, spy))
                words.append(spy.seen.pop())
                outputs.append(tuple(attended))
        return _expand((tuple(groups), words, outputs, jax.numpy.stack(counters)))

    def _release(self, groups, addresses):
        return _expand(tuple(self.placement.release(group, addresses[0]) for group in _squeeze(groups)))


@functools.cache
def harness(name, policy, mode, devices, fmt, **options):
    """Shared by all tests of a session: compiling costs more than running."""
    return Harness(name, policy, mode, devices, fmt, **options)


class World:
    """A placement's state beside a table of the rows that were stored; every step compares what was read.

    The table, the live addresses and all expected values are plain numpy; a rank's addresses belong to it alone.
    """

    def __init__(self, harness):
        self.h, self.rng, self.ranking = harness, np.random.default_rng(0), np.random.default_rng(1)
        self.every = 3 if harness.devices == 8 else 1
        """Invariants are checked after so many steps, and after every release."""
        self.groups = harness.start()
        size, fmt = harness.capacity.addresses, harness.spec.row
        self.words = [[np.zeros((harness.ranks, size, w), np.uint32) for w in fmt.lanes] for _ in range(LAYERS)]
        self.numbers = np.zeros((LAYERS, harness.ranks, size, LATENT + ROPE), np.float32)
        self.live = [set() for _ in range(harness.ranks)]
        self.owner = [{} for _ in range(harness.ranks)]
        """Request that stored each address."""
        self.outputs = []
        """(output, lse) of each step, layer and device."""

    def step(self, plans, steps=1, rows=None):
        """Run one step of up to `steps` tokens a request and check everything; `plans[rank]` is {number: Want}.

        `rows` are (words, numbers) of each layer as `random_rows` makes them, one for each token of the batch, padding
        included. Returns counters int [devices, groups, len(Counters)].
        """
        h = self.h
        shape = (h.ranks, h.requests, steps)
        selected = np.full((len(GROUPS), *shape, h.spec.topk), -1, np.int32)
        new, requests = np.full(shape, -1, np.int32), np.full(shape[:2], -1, np.int32)
        for rank, plan in enumerate(plans):
            for number, want in plan.items():
                requests[rank, number] = number
                new[rank, number, : len(want.new)] = want.new
                for group, tokens in enumerate(want.selected):
                    for step, chosen in enumerate(tokens):
                        selected[group, rank, number, step, : len(chosen)] = chosen
        rows = rows or [random_rows(self.rng, h.spec.row.name, new.size) for _ in range(LAYERS)]
        query = self.rng.standard_normal((LAYERS, *shape, HEADS, LATENT + ROPE)).astype(np.float32)

        before = [(self.locations(group), self.on_host(group)) for group in self.groups]
        ranked, margins = self._rank_rows(selected, new)
        lanes = [tuple(lane.reshape(h.ranks, -1, lane.shape[-1]) for lane in words) for words, _ in rows]
        self.groups, *found = h.step(
            self.groups, tuple(selected), new, requests, tuple(ranked), tuple(margins), lanes, tuple(query)
        )
        words, outputs, counters = jax.tree.map(np.asarray, found)
        self._store(new, rows)
        for group, layers in enumerate(GROUPS):
            for layer in layers:
                self._compare(layer, selected[group], words[layer], outputs[layer], query[layer])
            for device in range(h.devices):
                was, held = (table[device] for table in before[group])
                arrived = np.sum(self.on_host(self.groups[group])[device] & ~held)
                self._compare_counters(device, was, arrived, selected[group], new, counters[device, group])
        self.outputs.append(outputs)
        if len(self.outputs) % self.every == 0:
            self.check()
        return counters

    def release(self, addresses):
        """Forget `addresses[rank]`."""
        padded = np.full((self.h.ranks, self.h.spec.table_width * self.h.spec.page_size), -1, np.int32)
        for rank, gone in enumerate(addresses):
            padded[rank, : len(gone)] = list(gone)
            self.live[rank] -= set(gone)
        self.groups = self.h.release(self.groups, padded)
        self.check()

    def check(self):
        """The invariants, and the memory kind of the host pools."""
        live = [np.array(sorted(addresses), np.int32) for addresses in self.live]
        verify.check(self.h.placement, self.state, live)
        for group in self.groups:
            assert all(lane.sharding.memory_kind == "pinned_host" for lane in group.host if lane.size)

    @property
    def state(self):
        return KVState(self.groups, ())

    def locations(self, group):
        """What each device knows: location [devices, addresses of one stripe]."""
        return np.asarray(group.mapping.location)

    def on_host(self, group):
        """Addresses whose row each device's host pool holds: bool [devices, addresses of one stripe]."""
        devices, addresses = group.mapping.location.shape
        found = np.zeros((devices, addresses), bool)
        device, slot = np.nonzero(np.asarray(group.mapping.host_address) >= 0)
        found[device, np.asarray(group.mapping.host_address)[device, slot]] = True
        return found

    def resident(self, group=0, device=0):
        """Addresses whose row is in a slot of the device, in all of its pool."""
        here = np.flatnonzero(self.locations(self.groups[group])[device] >= 0)
        return set(self.h.dealt.hands[device % self.h.tp][here].tolist() if self.h.striped else here.tolist())

    def _rank_rows(self, selected, new):
        """What the indexer might have said of each request's last token: its selection, then others of its rows."""
        k, shape = self.h.spec.topk, (*selected.shape[:3], self.h.ranks_seen)
        ranked, margins = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        margins[:] = np.sort(self.ranking.standard_normal(shape).astype(np.float32))[..., ::-1]
        for group, rank, number in np.ndindex(*shape[:3]) if self.h.ranks_seen else ():
            tokens = [row[row >= 0] for row in selected[group, rank, number]]
            last = next((row for row in reversed(tokens) if row.size), np.zeros(0, np.int32))
            if last.size < k:
                ranked[group, rank, number, : last.size] = last
                continue
            own = {address for address in self.live[rank] if self.owner[rank][address] == number}
            own |= set(new[rank, number][new[rank, number] >= 0].tolist())  # also rows that others of its tokens need
            others = self.ranking.permutation(sorted(own - set(last.tolist())))[: shape[3] - k]
            best = np.concatenate([last, others]).astype(np.int32)
            ranked[group, rank, number, : best.size] = best
        return ranked, np.where(ranked >= 0, margins, -np.inf).astype(np.float32)

    def _rank(self, device):
        return device // self.h.tp

    def _owned(self, addresses, device):
        """Which of them lie on the device."""
        everywhere = np.ones(np.shape(addresses), bool)
        return self.h.dealt.owner(np.maximum(addresses, 0)) == device % self.h.tp if self.h.striped else everywhere

    def _store(self, new, rows):
        for rank in range(self.h.ranks):
            real = new[rank].reshape(-1) >= 0
            at = new[rank].reshape(-1)[real]
            self.live[rank] |= set(at.tolist())
            for number, addresses in enumerate(new[rank]):
                self.owner[rank].update(dict.fromkeys(addresses[addresses >= 0].tolist(), number))
            for layer, (words, numbers) in enumerate(rows):
                for table, lane in zip(self.words[layer], words, strict=True):
                    table[rank, at] = lane.reshape(self.h.ranks, real.size, -1)[rank, real]
                self.numbers[layer, rank, at] = numbers.reshape(self.h.ranks, real.size, -1)[rank, real]

    def _compare(self, layer, selected, words, outputs, query):
        """What every device read, bit for bit, and what it made of it."""
        for device in range(self.h.devices):
            rank = self._rank(device)
            chosen, valid = selected[rank], selected[rank] >= 0
            assert set(chosen[valid].tolist()) <= self.live[rank], "the test selects a row that was never stored"
            here = valid & self._owned(chosen, device) if self.h.split else valid
            for table, lane in zip(self.words[layer], words, strict=True):
                read = lane[device].reshape(*chosen.shape, -1)
                np.testing.assert_array_equal(read[here], table[rank, chosen[here]], err_msg=f"layer {layer}")
                assert not read[valid & ~here].any()
            output, lse = attention64(query[rank], self.numbers[layer, rank, chosen], valid, SCALE, LATENT)
            np.testing.assert_allclose(outputs[0][device], output, atol=1e-5)
            np.testing.assert_allclose(outputs[1][device], lse, atol=1e-5)

    def _compare_counters(self, device, location, arrived, selected, new, counters):
        rank, slots = self._rank(device), self.h.capacity.device_slots
        entries = selected[rank][selected[rank] >= 0]
        own = entries[self._owned(entries, device)]
        fresh = new[rank][new[rank] >= 0]
        fresh = fresh[self._owned(fresh, device)]
        stored = np.setdiff1d(own, fresh)
        found = Counters(*counters.tolist())
        assert found.dropped == 0
        assert found.selected == len(entries)
        assert found.peer_rows == (0 if self.h.split else len(entries) - len(own))
        assert found.hits + found.host_fetches - found.prefetched == found.unique
        if self.h.in_place[selected.shape[2]]:
            assert (found.unique, found.hits) == (len(entries), 0)
        elif not self.h.capacity.host_slots:
            assert (found.unique, found.hits) == (len(entries), len(entries))
        else:
            hits = int((location[self.h.dealt.number(stored) if self.h.striped else stored] >= 0).sum())
            assert (found.unique, found.hits) == (len(stored), hits)
            if self.h.capacity.quotas is None:
                occupied, arriving = int((location >= 0).sum()), len(stored) - hits + len(fresh) + found.prefetched
                assert found.evictions == max(0, occupied + arriving - slots)
        assert found.written_back == arrived


def _squeeze(tree):
    return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), tree)


def _expand(tree):
    return jax.tree.map(lambda leaf: jax.lax.expand_dims(leaf, (0,)), tree)
