"""The selected buffer: the same bits as without, whatever it holds, and rows fetched only when it lacks them."""

import jax
import numpy as np
import pytest

from models import ModelConfig, init_model
from tests.ula_jax.engines import SMALL, Recorder, documents, greedy, make_engine
from ula_jax import links, verify
from ula_jax.metrics import Totals
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import GpuOnly, Ula
from ula_jax.placements.base import Counters
from ula_jax.policies import LRU, PBLRU, make_policy
from ula_jax.spec import Budget
from ula_jax.types import NOWHERE

TOPK, PROMPT, NEW = 16, 40, 24
LEAST = TOPK + 1


def decode(devices, placement, device_rows, *, requests=3, rows="fp32", gather="scores", prompt=PROMPT, new=NEW):
    """Requests come and go two at a time, so that addresses are used again. One step shape for prompt and output."""
    parallel = Parallel(tp=devices)
    config = ModelConfig.from_hub(SMALL | dict(num_attention_heads=8, n_routed_experts=8))
    engine = make_engine(
        init_model(config, make_mesh(parallel), parallel, seed=3), placement, device_rows, 300, rows=rows,
        max_context=prompt + new, max_requests=2, prefill_rows=2, prefill_chunk=2, trace=True, gather=gather,
        fast_path=rows == "fp8",
    )  # fmt: skip
    recorder = Recorder(engine)
    ids = [engine.submit(tokens, greedy(new)) for tokens in documents(requests, prompt)]
    tokens = sorted((token[:2] for token in engine.run()), key=lambda token: token[0])
    return [recorder.stacked(request) for request in ids], tokens, engine


def rows_for(devices, buffer, requests=2):
    """Device rows of a budget in which that many requests fit beside the buffer, some of their rows on the host."""
    return requests * buffer + max(2 * LEAST, requests * (PROMPT + NEW) // devices // 2) + 8


@pytest.mark.parametrize(("devices", "rows"), [(2, "fp8"), (4, "fp32"), (8, "bf16")])
def test_logits_equal_gpu_only_bit_for_bit_with_a_buffer_that_evicts(devices, rows):
    parallel = Parallel(tp=devices)
    expected, tokens, _ = decode(devices, GpuOnly(parallel), 3 * (PROMPT + NEW), rows=rows)
    placement, gather = Ula(parallel, buffer=LEAST), "candidates" if devices == 4 else "scores"
    found, same, engine = decode(devices, placement, rows_for(devices, LEAST), rows=rows, gather=gather)
    capacity = engine.runner.capacity
    assert 2 * LEAST <= capacity.buffer_slots < 2 * (PROMPT + NEW)
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    count = engine.totals["decode"].count
    assert count("buffer_hits") > 0
    assert count("peer_rows") > 0
    # Each device finds a selected row in its buffer, owns it, gets it from a peer, or makes it in this step.
    assert count("selected") > count("buffer_hits") + count("peer_rows")


@pytest.mark.parametrize("gather", ["scores", "candidates"])
def test_devices_that_own_nothing_of_a_request(gather):
    """Five tokens at most, on eight devices: three own none of them, and all have all in their buffers."""
    parallel = Parallel(tp=8)
    sizes = dict(prompt=3, new=2, requests=2, gather=gather)
    expected, tokens, _ = decode(8, GpuOnly(parallel), 64, **sizes)
    found, same, engine = decode(8, Ula(parallel, buffer=LEAST), 64, **sizes)
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    counters = engine.totals["decode"]
    assert counters.count("buffer_hits") > 0
    assert counters.count("host_fetches") == 0


@pytest.mark.parametrize("policy", ["lru", "clock", "pb_lru:rounds=4"])
def test_a_buffer_that_holds_everything_fetches_only_what_is_new_to_it(policy):
    """After prefill every decode step finds all old rows: nothing comes from peers or the host."""
    parallel, everything = Parallel(tp=2), PROMPT + NEW
    placement = Ula(parallel, make_policy(policy), buffer=everything)
    _, _, engine = decode(2, placement, rows_for(2, everything), requests=2)
    count = engine.totals["decode"].count
    assert engine.runner.capacity.buffer_slots >= 2 * everything
    assert count("peer_rows") == count("host_fetches") == 0
    own = (
        len(engine.spec.groups) * 2 * engine.totals["decode"].tokens
    )  # on both devices, where tokens select themselves
    assert 0 < count("selected") - count("buffer_hits") <= own


def test_buffers_of_all_devices_hold_the_rows_of_their_owners():
    """Word by word, wherever owners keep them."""
    devices = 4
    _, _, engine = decode(devices, Ula(Parallel(tp=devices), LRU(), buffer=LEAST), rows_for(devices, LEAST))
    engine.submit(documents(1, PROMPT, seed=5)[0], greedy(NEW))
    for _ in range(PROMPT // 2 + 5):
        engine.step()
    checked = 0
    for group in jax.tree.map(np.asarray, engine.runner.state.groups):
        for device in range(devices):
            slots = np.flatnonzero(group.buffer.mapping.device_address[device] >= 0)
            for slot, address in zip(slots, group.buffer.mapping.device_address[device, slots], strict=True):
                owner, number = address % devices, address // devices
                place = group.mapping.location[owner, number]
                for mine, here, there in zip(group.buffer.device, group.device, group.host, strict=True):
                    row = here[owner, :, place] if place >= 0 else there[owner, ~place]
                    np.testing.assert_array_equal(mine[device, :, slot], row)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize(("devices", "rows"), [(2, "fp8"), (4, "fp32")])
def test_an_all_to_all_brings_the_same_rows_and_bytes(devices, rows):
    parallel, budget = Parallel(tp=devices), rows_for(devices, LEAST)
    expected, tokens, gathered = decode(devices, Ula(parallel, buffer=LEAST), budget, rows=rows)
    found, same, engine = decode(devices, Ula(parallel, buffer=LEAST, exchange="all-to-all"), budget, rows=rows)
    assert same == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    first, second = (
        links.received(each.placement, each.totals["decode"], devices, 2, 8) for each in (gathered, engine)
    )
    assert first == second > 0


def test_rounds_are_those_of_the_owner_of_most_missing_rows(monkeypatch):
    """Recounted step by step from what the buffer held before, and the bytes with them."""
    devices, groups = 4, 2
    placement = Ula(Parallel(tp=devices), buffer=LEAST)
    _, _, engine = decode(devices, placement, rows_for(devices, LEAST), requests=1)
    spec, run, counted = engine.spec, engine.runner.step, np.zeros(groups, int)

    def step(batch, *rest):
        before = [np.array(group.buffer.mapping.location[0]) for group in engine.runner.state.groups]
        output = run(batch, *rest)
        for group, location in enumerate(before):
            picks, table = np.asarray(output.selected[group])[0], np.asarray(batch.page_table)[0]
            pages = table[np.arange(len(table))[:, None, None], np.maximum(picks, 0) // spec.page_size]
            addresses = np.unique((pages * spec.page_size + picks % spec.page_size)[picks >= 0])
            missing = addresses[(location[addresses] < 0) & (location[addresses] != NOWHERE)]
            most = max(np.sum(missing % devices == owner) for owner in range(devices))
            rounds = -(-most // -(-(picks.size // spec.topk * (spec.topk + 1)) // (8 * devices)))
            assert (np.asarray(output.counters)[:, group, Counters._fields.index("rounds")] == rounds).all()
            if np.shape(batch.tokens)[-1] == 1:
                counted[group] += rounds
        return output

    monkeypatch.setattr(engine.runner, "step", step)
    engine.totals["decode"] = Totals(spec)
    engine.submit(documents(1, PROMPT, seed=5)[0], greedy(NEW))
    engine.submit(documents(1, PROMPT, seed=6)[0], greedy(NEW))
    assert len(list(engine.run())) == 2 * NEW
    assert counted.min() > 0
    totals = engine.totals["decode"]
    sent = -(-2 * (spec.topk + 1) // (8 * devices)) * spec.row.nbytes  # rows that an owner sends in a round, per layer
    layers = np.array([len(group) for group in spec.groups])
    scores = 2 * spec.table_width * spec.page_size * 4 * groups * (devices - 1) / devices * totals.steps
    by_hand = devices * ((devices - 1) * sent * int(counted @ layers) + scores)
    assert links.received(placement, totals, devices, 2, 8) == pytest.approx(by_hand)


def test_verify_finds_a_row_left_in_a_buffer():
    _, _, engine = decode(2, Ula(Parallel(tp=2), buffer=LEAST), rows_for(2, LEAST), requests=1)
    verify.check(engine.placement, engine.runner.state, [np.zeros(0, np.int32)])

    def stale(path, leaf):
        return leaf.at[1, 3].set(0) if jax.tree_util.keystr(path).endswith("buffer.mapping.location") else leaf

    broken = jax.tree_util.tree_map_with_path(stale, engine.runner.state)
    with pytest.raises(verify.InvariantError, match="device 1, buffer: location: expected exactly the live addresses"):
        verify.check(engine.placement, broken, [np.zeros(0, np.int32)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ula(Parallel(dp=2), buffer=64), "expected a buffer of 0 where a device owns all rows"),
        (lambda: Ula(Parallel(), buffer=64), "expected a buffer of 0 where a device owns all rows"),
        (lambda: Ula(Parallel(tp=2), make_policy("prefetch:policy=lru"), 64), "fetches nothing ahead"),
    ],
)  # fmt: skip
def test_buffers_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_exchange_that_is_none_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"expected an exchange of \['all-gather', 'all-to-all'\], found 'ring'"):
        Ula(Parallel(tp=2), exchange="ring")  # pyright: ignore[reportArgumentType]


def test_a_buffer_below_one_selection_is_refused_with_the_least():
    _, _, engine = decode(2, Ula(Parallel(tp=2), PBLRU(), LEAST), rows_for(2, LEAST), requests=1)
    with pytest.raises(ValueError, match=f"expected a buffer of at least {LEAST} rows .*, found {LEAST - 1}"):
        Ula(Parallel(tp=2), buffer=LEAST - 1).capacity(engine.spec, Budget(10**6, 10**6))
