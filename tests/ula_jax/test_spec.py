"""Sizes and capacities against numbers worked out by hand."""

import itertools
import re
from dataclasses import replace

import pytest

from ula_jax.parallel import Parallel
from ula_jax.placements import PLACEMENTS, make_placement
from ula_jax.placements.base import fitting
from ula_jax.rows import RowFormat
from ula_jax.spec import Budget, Capacity, KVSpec
from ula_jax.striping import Striping

# 24 bytes a row and layer, 72 a token; index keys of 16 bf16 numbers in two groups: 64 a token.
SPEC = KVSpec(((0,), (1, 2)), RowFormat("bf16", 8, 4), topk=8, index_dim=16, page_size=16, max_context=64)


def test_sizes_of_one_token():
    assert (SPEC.num_layers, SPEC.table_width, SPEC.row_bytes, SPEC.index_bytes) == (3, 4, 72, 64)
    exact = KVSpec(SPEC.groups, RowFormat("fp32", 8, 4), 8, 16, 16, 65)
    assert (exact.table_width, exact.row_bytes, exact.index_bytes) == (5, 144, 128)
    small = KVSpec(SPEC.groups, RowFormat("fp8", 8, 4), 8, 16, 16, 64)
    assert (small.row_bytes, small.index_bytes) == (60, 40)  # codes and a scale
    for rows in ("fp32", "bf16", "fp8"):
        assert KVSpec(SPEC.groups, RowFormat(rows, 8, 4), 64, 0, 16, 64).index_bytes == 0


def test_spec_of_a_model():
    class Model:
        layer_groups = ((0,), (1, 2))
        has_indexer = True
        index_topk, index_head_dim, kv_lora_rank, qk_rope_head_dim = 2048, 128, 512, 64

    class Dense(Model):
        has_indexer = False

    sparse = KVSpec.of(Model(), rows="fp8", page_size=64, max_context=131072)
    assert (sparse.topk, sparse.index_dim, sparse.row.nbytes, sparse.row_bytes) == (2048, 128, 656, 1968)
    assert sparse.index_bytes == 2 * 132
    assert KVSpec.of(Model(), max_context=100).topk == 100
    dense = KVSpec.of(Dense(), max_context=100)
    assert (dense.topk, dense.index_dim) == (100, 0)


def test_rows_needed_is_the_worst_case():
    assert SPEC.rows_needed(64) == 9  # eight selected and the new one
    assert SPEC.rows_needed(5) == 5  # the new one is among the five
    assert SPEC.rows_needed(64, tokens=4) == 36
    assert SPEC.rows_needed(30, tokens=4) == 30
    assert SPEC.rows_needed(64, striping=Striping(8)) == 8  # a stripe owns no more than these
    assert SPEC.rows_needed(65, striping=Striping(8)) == 9
    assert SPEC.rows_needed(640, striping=Striping(8)) == 9


@pytest.mark.parametrize(("mode", "ranks"), [("tp", 1), ("dp", 8)])
def test_gpu_only_holds_whole_pages_of_rows_and_keys(mode, ranks):
    found = make_placement("gpu_only", Parallel.of(mode, 8)).capacity(SPEC, Budget(device=100 * (72 + 64), host=10**6))
    assert found == Capacity(SPEC, ranks, addresses=96, device_slots=96, host_slots=0)
    assert found.tokens == 96 * ranks
    assert found.requests(48) == 2 * ranks
    assert found.fits([48, 48])
    assert not found.fits([48, 33, 16])  # 3 + 3 + 1 pages


@pytest.mark.parametrize(("mode", "ranks"), [("tp", 1), ("dp", 8)])
def test_hisparse_holds_a_buffer_a_request_and_the_history_on_the_host(mode, ranks):
    """24 rows of 72 and 64 keys of 64 bytes a request: 5824 of 20,000 device bytes go three times. 200 host rows are
    twelve pages; the 14,816 bytes beside the buffers hold keys of 231."""
    placement = make_placement("hisparse", Parallel.of(mode, 8))
    found = placement.capacity(SPEC, Budget(device=20_000, host=200 * 72))
    assert found == Capacity(SPEC, ranks, addresses=192, device_slots=72, host_slots=192, quotas=3)
    assert found.requests(64) == 3 * ranks
    assert found.requests(16) == 3 * ranks
    assert found.fits([16] * 3)
    assert not found.fits([16] * 4)  # no fourth buffer
    more = placement.capacity(SPEC, Budget(device=20_000, host=1000 * 72))
    assert more.addresses == 224  # no keys for a fifteenth page


def test_ula_adds_the_tiers_up():
    """20,000 device bytes, keys of 200 host rows taken off: 7200 hold 52 rows with their keys."""
    alone = make_placement("ula", Parallel(dp=8)).capacity(SPEC, Budget(device=20_000, host=200 * 72))
    assert alone == Capacity(SPEC, 8, addresses=240, device_slots=52, host_slots=188, working_set=52, resident=52)
    assert alone.requests(64) == 3 * 8
    assert alone.requests(16) == 5 * 8  # five selections of nine in 52 rows
    assert alone.fits([64] * 3)
    assert not alone.fits([64] * 4)
    assert alone.fits([16] * 5)
    assert not alone.fits([16] * 6)
    long = replace(SPEC, max_context=640)
    striped = make_placement("ula", Parallel(tp=8)).capacity(long, Budget(device=20_000, host=200 * 72))
    rows = dict(device_slots=52, host_slots=200, working_set=52, resident=52)
    assert striped == Capacity(long, 1, addresses=2016, striping=Striping(8), **rows)
    assert striped.requests(640) == 3
    assert striped.requests(64) == 6  # 2016 addresses would hold 31; 8 rows each of one device's 52
    everything = make_placement("ula", Parallel()).capacity(SPEC, Budget(device=20_000))
    assert everything == Capacity(SPEC, 1, addresses=144, device_slots=144, host_slots=0, working_set=None)


def test_ula_leaves_host_rows_unused_that_no_step_could_reach():
    """Keys of host rows take room that selections need. Of 1000 host rows 231 are used (then whole pages), so that
    the 38 device slots serve as many selections of nine as there are contexts of 64. Striped over eight devices any
    64 tokens may be selected as a whole: no host row helps."""
    budget = Budget(device=20_000, host=1000 * 72)
    alone = make_placement("ula", Parallel()).capacity(SPEC, budget)
    assert (alone.device_slots, alone.host_slots, alone.addresses) == (38, 218, 256)
    assert alone.requests(64) == 38 // 9 == 256 // 64
    striped = make_placement("ula", Parallel(tp=8)).capacity(SPEC, budget)
    assert (striped.device_slots, striped.host_slots, striped.addresses) == (146, 0, 8 * 146)


@pytest.mark.parametrize(("mode", "ranks"), [("tp", 1), ("dp", 8)])
def test_resident_hot_holds_what_the_host_holds_or_else_what_the_device_does(mode, ranks):
    """200 host rows are twelve pages, the keys of which leave 107 rows of 20,000 device bytes. Of 1000 host rows 269
    (sixteen pages) could all be decoded: a selection of nine in 50 rows for each context of 64. 147 rows fit beside
    their keys: a host of 150 holds no page more."""
    placement = make_placement("resident_hot", Parallel.of(mode, 8))
    found = placement.capacity(SPEC, Budget(device=20_000, host=200 * 72))
    rows = dict(device_slots=107, host_slots=192, working_set=107, resident=107)
    assert found == Capacity(SPEC, ranks, addresses=192, **rows)
    more = placement.capacity(SPEC, Budget(device=20_000, host=1000 * 72))
    assert more == Capacity(SPEC, ranks, addresses=256, device_slots=50, host_slots=256, working_set=50, resident=50)
    assert more.requests(64) == 256 // 64 * ranks
    for host in (0, 100, 150):
        alone = placement.capacity(SPEC, Budget(device=20_000, host=host * 72))
        assert alone == Capacity(SPEC, ranks, addresses=144, device_slots=144, host_slots=0)


@pytest.mark.parametrize("name", ["hisparse", "resident_hot", "ula"])
def test_more_host_memory_never_refuses_what_less_allows(name):
    """Keys of host rows leave the device room for a selection."""
    placement = make_placement(name, Parallel())
    for device in range(600, 8000, 72):
        held = []
        for host in (0, 20, 64, 10_000):
            try:
                held.append(placement.capacity(SPEC, Budget(device, host * 72)).addresses)
            except ValueError:
                held.append(0)
        assert held == sorted(held), f"{device} device bytes"


def test_f18_a_stripe_holds_what_one_rank_cannot():
    spec = KVSpec(((0,),), RowFormat("bf16", 8, 4), topk=8, index_dim=0, page_size=4, max_context=320)
    found = make_placement("ula", Parallel(tp=4)).capacity(spec, Budget(device=20 * 24, host=80 * 24))
    assert (found.device_slots + found.host_slots, found.addresses) == (100, 400)
    assert found.fits([300])


@pytest.mark.parametrize("name", PLACEMENTS)
def test_capacity_never_exceeds_the_budget(name):
    """Over many budgets: whole pages, rows and index keys within the bytes, no slot without an address."""
    accepted = 0
    layouts = (("dp", 1), ("tp", 2), ("tp", 8))
    for (mode, devices), topk, page, keys in itertools.product(layouts, (4, 40), (8, 16), (0, 16)):
        spec = KVSpec(SPEC.groups, SPEC.row, topk, keys, page, 40)
        placement = make_placement(name, Parallel.of(mode, devices))
        for device, host in itertools.product(range(16, 300, 17), (0, 1, 20, 63, 200)):
            budget = Budget(device * 72 + 7, host * 72)
            try:
                found = placement.capacity(spec, budget)
            except ValueError:
                continue
            accepted += 1
            held = found.addresses // found.striping.devices
            assert found.addresses % page == 0
            assert found.fits([1])
            assert found.device_slots * 72 + held * spec.index_bytes <= budget.device
            assert found.host_slots * 72 <= budget.host
            assert found.device_slots + found.host_slots >= held
    assert accepted > 200


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("rows", [1, 8, 15])
def test_a_budget_below_one_page_or_one_selection_is_refused(name, rows):
    spec = KVSpec(SPEC.groups, SPEC.row, 8 if rows < 9 else 4, 0, 16, 64)
    with pytest.raises(ValueError, match=f"{name}: .*budget"):
        make_placement(name, Parallel()).capacity(spec, Budget(rows * 72))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_budget_that_is_too_small_is_refused_with_settings_that_fit(name):
    """Each of them, and none of its neighbours."""
    placement, spec = make_placement(name, Parallel(tp=2)), replace(SPEC, page_size=2)
    budget = Budget(device=700, host=64 * 72)
    with pytest.raises(ValueError, match=r"^[^(]*: .*expected [^(]*, found [^(]* \(what would fit: [^(]*\)$") as error:
        fitting(placement, spec, budget)
    ways = str(error.value).partition("what would fit: ")[2]
    context, device = int(ways.split()[1].strip(",")), int(re.findall(r"(\d+) device bytes", ways)[0])

    def fits(context=spec.max_context, device=budget.device):
        try:
            return placement.capacity(replace(spec, max_context=context, topk=min(8, context)), Budget(device, 64 * 72))
        except ValueError:
            return None

    assert fits(context=context)
    assert not fits(context=context + 1)
    assert fits(device=device)
    assert not fits(device=device - 1)


def test_settings_that_no_memory_mends_are_refused_as_they_are():
    with pytest.raises(ValueError, match=r"found 16; use 15$"):
        fitting(make_placement("ula", Parallel(tp=3)), SPEC, Budget(10**6))


def test_the_longest_request():
    sizes = dict(addresses=48, device_slots=20, host_slots=28)
    assert Capacity(SPEC, 1, **sizes).longest == 48
    assert Capacity(SPEC, 1, **sizes, working_set=9).longest == 48
    assert Capacity(SPEC, 1, **sizes, working_set=8).longest == 8
    assert Capacity(SPEC, 1, **sizes, working_set=7).longest == 7
    assert Capacity(SPEC, 1, **sizes, quotas=0).longest == 0


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="expected device bytes above 0 and host bytes at least 0, found device 0"):
        Budget(0)
    with pytest.raises(ValueError, match="found device 1, host -1"):
        Budget(1, -1)
    with pytest.raises(ValueError, match="page_size and max_context of at least 1, found 0 and 64"):
        KVSpec(SPEC.groups, SPEC.row, 8, 16, 0, 64)
    with pytest.raises(ValueError, match=r"a multiple of the 3 addresses .* 3 devices, found 16; use 15"):
        make_placement("ula", Parallel(tp=3)).capacity(SPEC, Budget(10**6))
