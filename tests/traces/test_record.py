"""Captured traces against a full forward pass that knows nothing of engines: order, scores, seats."""

import numpy as np
import pytest

from tests.models.running import forward
from tests.ula_jax.engines import make_engine, small_model
from ula_jax.parallel import make_mesh
from ula_jax.scheduler import SamplingParams

DEPTH = 2.0


@pytest.fixture(scope="module", params=["tp", "dp"])
def recorded(request):
    """Five requests in four seats (two ranks of two under DP, two seats and a queue under TP), on two devices."""
    from ula_jax.traces import Recorder

    model = small_model(request.param, 2)
    engine = make_engine(model, "gpu_only", 200, 0, max_requests=2, prefill_chunk=40, capture=DEPTH, verify=False)
    recorder = Recorder(engine)
    rng = np.random.default_rng(0)
    for length, new in ((40, 8), (37, 3), (30, 12), (36, 11), (33, 9)):
        engine.submit(rng.integers(0, 64, length).tolist(), SamplingParams(new))
    seats, steps = [], []
    inner = engine.on_step

    def watch(rows, batch, output):
        inner(rows, batch, output)
        if any(r.output for rank in rows for r, _ in rank):
            seats.append([{r.number: r.id for r, _ in rank} for rank in rows])
            steps.append([{r.number: r.computed for r, _ in rank} for rank in rows])

    engine.on_step = watch
    for _ in engine.run():
        pass
    return engine, recorder.trace(model="small"), seats, steps


def test_ranks_and_scores_are_those_of_a_full_forward(recorded):
    engine, trace, seats, steps = recorded
    parallel = engine.placement.parallel
    tokens = np.zeros((6, 48), np.int32)
    for request in engine.requests.values():
        tokens[request.id, : len(request.tokens)] = request.tokens
    scores = forward(small_model(parallel.mode, parallel.size), make_mesh(parallel), tokens).scores
    depth, compared = int(DEPTH * trace.k), 0
    for t, ranks in enumerate(seats):
        for rank, row in enumerate(ranks):
            for seat, request in row.items():
                position = steps[t][rank][seat]
                for group in (0, 1):
                    stream = rank * 2 + group
                    expected = np.asarray(scores[group])[request, position, : position + 1]
                    order = np.argsort(-expected, kind="stable")[:depth]
                    found, rest = np.split(trace.positions[stream, t, seat], [len(order)])
                    assert set(rest) <= {-1}, "a context shorter than the depth"
                    assert set(found[: trace.k]) == set(order[: trace.k])
                    assert set(found) == set(order)
                    np.testing.assert_allclose(
                        trace.scores[stream, t, seat, : len(order)], expected[order], atol=2e-5
                    )
                    compared += 1
    assert compared == 2 * sum(r.params.max_tokens - 1 for r in engine.requests.values())


def test_idle_seats_are_empty_and_new_tenants_are_marked(recorded):
    engine, trace, seats, _ = recorded
    assert trace.num_rounds == len(seats)
    marks = 0
    for t, ranks in enumerate(seats):
        for rank, row in enumerate(ranks):
            for seat in range(trace.seats):
                positions = trace.positions[rank * 2 : rank * 2 + 2, t, seat]
                assert (positions.max() >= 0) == (seat in row)
                before = seats[t - 1][rank].get(seat) if t else None
                left = before is not None and row.get(seat) != before
                assert trace.finished[rank * 2, t, seat] == left
                marks += left
    assert marks
    assert trace.k == 16
    assert trace.length == engine.spec.max_context
    assert trace.row_bytes[:2] == (24 * 4, 2 * 24 * 4)


def test_an_engine_that_does_not_capture_is_refused():
    from ula_jax.traces import Recorder

    engine = make_engine(small_model("tp", 2), "gpu_only", 200, 0, verify=False)
    with pytest.raises(ValueError, match=r"expected an engine that captures, found capture = 0"):
        Recorder(engine)
    with pytest.raises(ValueError, match=r"expected capture of 0 or at least 1 .* found 0\.5"):
        make_engine(small_model("tp", 2), "gpu_only", 200, 0, capture=0.5)
