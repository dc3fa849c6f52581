"""What a policy that looks at scores is shown inside the compiled step, against a full forward pass."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.running import forward
from tests.ula_jax.engines import documents, greedy, make_engine, small_model
from ula_jax.address import page_table
from ula_jax.parallel import make_mesh
from ula_jax.policies import LRU
from ula_jax.policies.books import Books

K, DEPTH, REQUESTS = 16, 1.5, 2
RANKS = int(K * DEPTH)


class Seen(NamedTuple):
    books: Books
    slots: jnp.ndarray
    addresses: jnp.ndarray
    requests: jnp.ndarray
    ranks: jnp.ndarray
    margins: jnp.ndarray


@dataclass(frozen=True)
class Looker:
    """LRU that keeps the last ranking of a decode step in its state."""

    entries: int
    depth: ClassVar[float] = DEPTH

    def init(self, num_slots):
        numbers = jnp.full(self.entries, -7, jnp.int32)
        return Seen(LRU().init(num_slots), numbers, numbers, numbers, numbers, numbers.astype(jnp.float32))

    def touch(self, state, touch):
        return state._replace(books=LRU().touch(state.books, touch))

    def observe(self, state, ranking):
        if ranking.slots.size != self.entries:  # a prefill step: another shape
            return state
        assert ranking.k == K
        return Seen(state.books, ranking.slots, ranking.addresses, ranking.requests, ranking.ranks, ranking.margins)

    def evict(self, state, count, limit):
        slots, books = LRU().evict(state.books, count, limit)
        return slots, state._replace(books=books)

    def forget(self, state, slots):
        return state._replace(books=LRU().forget(state.books, slots))


@pytest.fixture(scope="module", params=["ula", "hisparse"])
def seen(request):
    """(rows, location of each address before the step, what was seen) of every decode step, and the engine.

    HiSparse plays a round for each request by itself, on the slots of its buffer.
    """
    rows, entries = ((45, 80), REQUESTS * RANKS) if request.param == "ula" else ((80, 100), RANKS)
    engine = make_engine(
        small_model("tp", 1), request.param, *rows, max_context=48, max_requests=REQUESTS, prefill_chunk=20,
        verify=False, policy=Looker(entries), **({"buffer": 24} if request.param == "hisparse" else {}),
    )  # fmt: skip
    for prompt in documents(2, 34):
        engine.submit(prompt, greedy(8))
    steps, before = [], []

    def watch(rows, batch, output):
        if any(request.output for request, _ in rows[0]):
            here = [(request, request.computed, list(request.pages)) for request, _ in rows[0]]
            states = [group.policy for group in engine.runner.state.groups]
            steps.append((here, before[-1], [[np.asarray(leaf)[0] for leaf in state[1:]] for state in states]))
        before.append([np.asarray(group.mapping.location)[0] for group in engine.runner.state.groups])

    engine.on_step = watch
    list(engine.run())
    return engine, steps


def test_rows_ranks_and_margins_are_those_of_a_full_forward(seen):
    engine, steps = seen
    tokens = np.zeros((2, 42), np.int32)
    for request in engine.requests.values():
        tokens[request.id, : len(request.tokens)] = request.tokens
    scores = forward(small_model("tp", 1), make_mesh(), tokens).scores
    compared = resident = 0
    private = engine.runner.capacity.quotas is not None
    for rows, locations, groups in steps:
        for group, state in enumerate(groups):
            slots, addresses, requests, ranks, margins = (leaf.reshape(-1, RANKS)[:REQUESTS] for leaf in state)
            for request, position, pages in rows:
                row = request.number
                expected = np.asarray(scores[group])[request.id, position, : position + 1]
                order = np.argsort(-expected, kind="stable")[:RANKS]
                table = page_table(pages, engine.spec.table_width)
                page = engine.spec.page_size
                assert addresses[row].tolist() == (table[order // page] * page + order % page).tolist()
                assert ranks[row].tolist() == list(range(RANKS))
                assert set(requests[row]) == {0 if private else row}
                np.testing.assert_allclose(margins[row], expected[order] - expected[order[K - 1]], atol=2e-5)
                where = locations[group][addresses[row]]
                assert slots[row].tolist() == np.where(where >= 0, where - (24 * row if private else 0), -1).tolist()
                resident, compared = resident + int((slots[row] >= 0).sum()), compared + RANKS
    assert len(steps) >= 7
    assert 0 < resident < compared, "some rows are on the device and some are not"
