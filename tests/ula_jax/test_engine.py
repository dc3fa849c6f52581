"""Continuous batching: tokens, streaming, stops, aborts, admission and bad input."""

from functools import partial

import numpy as np
import pytest

from tests.ula_jax.engines import Recorder, documents, greedy, make_engine, small_model
from ula_jax.engine import Engine
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import PLACEMENTS, GpuOnly, Ula
from ula_jax.policies import make_policy
from ula_jax.runner import Runner
from ula_jax.scheduler import SamplingParams, Status
from ula_jax.spec import Budget, KVSpec

BUDGETS = [("gpu_only", 260, 0), ("hisparse", 260, 260), ("resident_hot", 110, 260), ("ula", 110, 200)]
MODES = [("tp", 2), ("dp", 2)]


def outputs(engine: Engine, prompts, params) -> list[list[int]]:
    ids = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    list(engine.run())
    return [engine.requests[i].output for i in ids]


@pytest.mark.parametrize(("mode", "devices"), MODES)
def test_every_placement_decodes_the_same_tokens_and_leaves_nothing_behind(mode, devices):
    """Seven requests of different lengths over room for fewer, sampled and greedy; invariants after every step."""
    model = small_model(mode, devices)
    prompts = [document[: 20 + 3 * i] for i, document in enumerate(documents(7, 40))]
    params = [SamplingParams(max_tokens=6 + i, temperature=float(i % 2), seed=i) for i in range(7)]
    every = []
    for placement, device_rows, host_rows in BUDGETS:
        if (mode, placement) == ("dp", "resident_hot"):
            continue  # under TP its devices are as much by themselves
        engine = make_engine(model, placement, device_rows, host_rows, max_requests=3, fast_path=True)
        every.append(outputs(engine, prompts, params))
        assert [len(tokens) for tokens in every[-1]] == [6 + i for i in range(7)]
        assert 1 < engine.most_running <= 7
        state = engine.runner.state
        for group in state.groups:
            assert not np.any(np.asarray(group.mapping.device_address) >= 0)
            assert not np.any(np.asarray(group.mapping.host_address) >= 0)
        assert all(a.free_pages == a.num_pages for a in engine.scheduler.allocators)
    assert all(tokens == every[0] for tokens in every)


def spied(step, seen, batch, sampling, resident):
    seen.append((batch.tokens.shape, resident))
    return step(batch, sampling, resident)


@pytest.mark.parametrize("placement", ["resident_hot", "ula"])
def test_the_fast_path_changes_no_token_and_ends_when_the_device_is_full(placement):
    """Rows of three requests fit the device until they grow; when all are done everything fits again."""
    model, prompts = small_model("dp", 1), documents(4, 24)
    params = [SamplingParams(max_tokens=16, temperature=float(i % 2), seed=i) for i in range(4)]
    every, paths = [], []
    for name, fast in ((placement, True), (placement, False), ("gpu_only", True)):
        engine = make_engine(model, name, 260 if name == "gpu_only" else 110, 200, max_requests=3, fast_path=fast)
        seen = []
        engine.runner.step = partial(spied, engine.runner.step, seen)
        every.append(outputs(engine, prompts[:3], params[:3]) + outputs(engine, prompts[3:], params[3:]))
        assert engine.runner.step_function._cache_size() == len(set(seen)), "nothing is compiled twice"
        paths.append([resident for _, resident in seen])
    assert every[0] == every[1] == every[2]
    turns = [a for a, b in zip(paths[0], [*paths[0][1:], None], strict=True) if a != b]
    assert turns == [True, False, True]
    assert not any(paths[1] + paths[2])


@pytest.mark.parametrize("policy", ["pb_lru", "pb_score"])
def test_what_devices_gather_to_select_changes_no_bit(policy):
    """`pb_score` looks at the ranking, too."""
    model, prompts, found = small_model("tp", 2), documents(3, 48), []
    for gather in ("scores", "candidates"):
        engine = make_engine(
            model, Ula(model.parallel, make_policy(policy)), 60, 200, max_requests=3, trace=True, gather=gather
        )
        recorder = Recorder(engine)
        tokens = outputs(engine, prompts, [greedy(16)] * 3)
        found.append((tokens, [recorder.stacked(r) for r in range(3)], recorder.selected, engine.totals["decode"]))
    (tokens, logits, rows, totals), (others, same, picked, counted) = found
    assert tokens == others
    assert rows == picked
    for a, b in zip(logits, same, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    assert totals.count("evictions") == counted.count("evictions") > 0


@pytest.mark.parametrize(("placement", "device_rows", "host_rows"), BUDGETS)
@pytest.mark.parametrize(("mode", "devices"), MODES)
def test_as_many_are_admitted_as_capacity_says(mode, devices, placement, device_rows, host_rows):
    """Admission goes through pages, quotas and working set one request at a time; capacity() is arithmetic."""
    engine = make_engine(small_model(mode, devices), placement, device_rows, host_rows, max_requests=64)
    for context in (24, 40, 64):
        most = engine.runner.capacity.requests(context)
        assert most >= 1
        ids = [engine.submit([1] * (context - 4), greedy(4)) for _ in range(most + 3)]
        assert len(engine.scheduler.admit()) == most
        for request in ids:
            engine.abort(request)
        assert not engine.busy


def test_f13_two_growing_requests_with_both_tiers_full():
    """Room for one and a half: the second waits, and finishes later with the tokens it has when alone."""
    model = small_model("tp", 1)
    prompts = documents(2, 40)
    alone = [outputs(make_engine(model, "gpu_only", 200, 0), [p], [greedy(20)])[0] for p in prompts]
    engine = make_engine(model, "ula", 40, 60, max_requests=2)
    assert engine.runner.capacity.requests(60) == 1
    ids = [engine.submit(p, greedy(20)) for p in prompts]
    engine.step()
    assert [engine.requests[i].status for i in ids] == [Status.RUNNING, Status.WAITING]
    list(engine.run())
    assert [engine.requests[i].output for i in ids] == alone


@pytest.fixture(scope="module")
def engine():
    """One engine for the tests of a request's life: each leaves it idle."""
    return make_engine(small_model("dp", 2), "ula", 90, 100, max_requests=2)


@pytest.fixture
def idle(engine):
    assert not engine.busy
    yield engine
    assert not engine.busy
    assert all(a.free_pages == a.num_pages for a in engine.scheduler.allocators)


def test_streaming_hands_out_tokens_one_by_one(idle):
    prompt = documents(1, 30)[0]
    stream = idle.stream(prompt, greedy(5))
    first = next(stream)
    assert idle.busy, "expected the first token before the request is done"
    tokens = [first, *stream]
    assert [t.finish_reason for t in tokens] == [None] * 4 + ["length"]
    assert [t.token for t in tokens] == idle.requests[first.request].output


def test_eos_stops_a_request(idle):
    prompt = documents(1, 30)[0]
    tokens = outputs(idle, [prompt], [greedy(8)])[0]
    eos = tokens[3]
    stopped = outputs(idle, [prompt], [SamplingParams(max_tokens=8, eos=eos)])[0]
    assert stopped == tokens[: tokens.index(eos) + 1]
    assert idle.requests[len(idle.requests) - 1].finish_reason == "eos"


def test_abort_of_waiting_running_and_finished_requests(idle):
    prompts = documents(6, 24)
    kept = outputs(idle, prompts[:1], [greedy(12)])[0]
    ids = [idle.submit(p, greedy(12)) for p in prompts]
    idle.step()
    running = [i for i in ids if idle.requests[i].status is Status.RUNNING]
    waiting = [i for i in ids if idle.requests[i].status is Status.WAITING]
    assert len(running) == 4
    assert len(waiting) == 2
    idle.abort(running[1])
    idle.abort(waiting[0])
    idle.verify()
    list(idle.run())
    assert idle.requests[ids[0]].output == kept
    for aborted in (running[1], waiting[0]):
        assert idle.requests[aborted].finish_reason == "abort"
        assert len(idle.requests[aborted].output) < 12
    idle.abort(ids[0])
    assert idle.requests[ids[0]].finish_reason == "length"
    with pytest.raises(ValueError, match="expected a submitted request's id, found 999"):
        idle.abort(999)


def test_temperature_is_reproducible_and_a_matter_of_the_seed(idle):
    prompt = documents(1, 24)[0]
    warm = [SamplingParams(max_tokens=10, temperature=1.5, seed=seed) for seed in (5, 5, 6)]
    alone = outputs(idle, [prompt], warm[:1])[0]
    together = outputs(idle, [prompt] * 3, warm)
    assert together[0] == together[1] == alone
    assert together[2] != alone


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(4), "expected at least one prompt token, found none"),
        ([3, 64], greedy(4), "expected tokens from 0 to 63, found 64"),
        ([3, -1], greedy(4), "expected tokens from 0 to 63, found -1"),
        ([1] * 62, greedy(4), r"expected prompt and output of at most max_context = 64 tokens, found 62 \+ 4 = 66"),
    ],
)
def test_bad_requests_are_refused_while_others_go_on(idle, prompt, params, message):
    good = documents(1, 24)[0]
    expected = outputs(idle, [good], [greedy(6)])[0]
    running = idle.submit(good, greedy(6))
    idle.step()
    with pytest.raises(ValueError, match=message) as error:
        idle.submit(prompt, params)
    assert "\n" not in str(error.value)
    list(idle.run())
    assert idle.requests[running].output == expected


def test_a_prompt_longer_than_the_capacity_is_refused():
    engine = make_engine(small_model("tp", 1), "gpu_only", 40, 0, max_context=200)
    message = r"at most 40 tokens to fit the capacity of 40 tokens, found 60 \+ 4 = 64; shorten the prompt"
    with pytest.raises(ValueError, match=message):
        engine.submit([1] * 60, greedy(4))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_budget_too_small_for_one_selection_is_refused(placement):
    message = r"budget too small for one request's selection: expected device .*\(what would fit: .* device bytes"
    with pytest.raises(ValueError, match=message):
        make_engine(small_model("tp", 1), placement, 9, 100)


def test_model_placement_and_mesh_must_agree():
    model = small_model("dp", 2)
    with pytest.raises(ValueError, match=r"model: expected it loaded for Parallel\(dp=1, tp=2"):
        make_engine(model, GpuOnly(Parallel(tp=2)), 100, 0)
    with pytest.raises(ValueError, match=r"mesh: expected Parallel\(dp=2, tp=1\) .*, found axes {'dp': 1, 'tp': 1}"):
        Runner(model, GpuOnly(model.parallel), KVSpec.of(model.config, max_context=64), Budget(10**6), make_mesh())


@pytest.mark.parametrize(("temperature", "tokens"), [(-1.0, 4), (0.0, 0)])
def test_impossible_sampling_is_refused(temperature, tokens):
    with pytest.raises(ValueError, match="expected max_tokens of at least 1 and temperature of at least 0"):
        SamplingParams(max_tokens=tokens, temperature=temperature)
