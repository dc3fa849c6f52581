"""Admission and the end of requests, in plain Python."""

import numpy as np
import pytest

from ula_jax.rows import RowFormat
from ula_jax.scheduler import Request, SamplingParams, Scheduler, Status
from ula_jax.spec import Capacity, KVSpec
from ula_jax.striping import Striping

PAGE = 4


def capacity(pages, *, ranks=1, topk=8, max_context=320, **limits):
    spec = KVSpec(((0,),), RowFormat("fp32", 8, 4), topk, 0, PAGE, max_context)
    return Capacity(spec, ranks, pages * PAGE, limits.pop("device_slots", pages * PAGE), pages * PAGE, **limits)


def request(number, prompt, output):
    return Request(number, prompt, [1] * prompt, SamplingParams(max_tokens=output))


def scheduler(*requests, pages=8, max_requests=4, **options):
    made = Scheduler(capacity(pages, **options), max_requests)
    for one in requests:
        made.check(one)
        made.waiting.append(one)
    return made


def untouched(made):
    """Every pool as it was at the start: pages, numbers and the running sets."""
    pages = made.capacity.addresses // PAGE
    full = all(a.free_pages == pages for a in made.allocators)
    full &= all(sorted(a.allocate(pages * PAGE)) == list(range(pages)) for a in made.allocators)
    numbers = all(sorted(n) == list(range(made.max_requests)) for n in made._numbers)
    return full and numbers and not any(made.running)


def run(made, chunk=4, rows=1):
    """Steps as the engine takes them, until nothing is left; the ids in the order in which they end."""
    ended = []
    while made.waiting or any(made.running):
        made.admit()
        moved = False
        for rank in range(len(made.running)):
            decoding = made.decode(rank)
            plan = made.prefill(rank, rows, chunk) + [(one, 1) for one in decoding]
            for one, tokens in plan:
                moved = True
                one.computed += tokens
                if one.computed == len(one.tokens):
                    one.tokens.append(0)
                    if len(one.output) == one.params.max_tokens:
                        assert len(made.finish(one, "length")) == one.longest - 1
                        ended.append(one.id)
        assert moved, "a step with nothing to do while requests wait: deadlock"
    return ended


def test_f12_three_requests_of_three_pages_in_eight():
    """The third waits for all of its pages; afterwards every pool is full again."""
    requests = [request(n, 8, 4) for n in range(3)]
    made = scheduler(*requests)
    assert made.admit() == requests[:2]
    assert (made.allocators[0].free_pages, requests[2].status, requests[2].pages) == (2, Status.WAITING, [])
    assert made.admit() == []
    assert run(made) == [0, 1, 2]
    assert untouched(made)


@pytest.mark.parametrize("limit", [dict(quotas=2), dict(working_set=18), dict(max_requests=2)])
def test_f12_admission_looks_at_every_pool(limit):
    """Pages for eight, but buffers, device rows for two selections of 8 + 1, or batch rows for two."""
    requests = [request(n, 10, 2) for n in range(4)]
    made = scheduler(*requests, pages=24, **limit)
    assert made.admit() == requests[:2]
    assert made.allocators[0].free_pages == 18
    assert sorted(run(made, chunk=2)) == [0, 1, 2, 3]
    assert untouched(made)


def test_f13_a_request_that_could_not_grow_is_held_and_finishes_later():
    """Two of 16 tokens in a pool of 24 rows: admitted together by their prompts they would block each other."""
    first, second = request(0, 4, 12), request(1, 4, 12)
    made = scheduler(first, second, pages=6, working_set=9, device_slots=9)
    assert made.admit() == [first]
    for _ in range(5):
        assert made.admit() == []
        for one, tokens in made.prefill(0, 1, 4) or [(one, 1) for one in made.decode(0)]:
            one.computed += tokens
            one.tokens.append(0)
    assert (first.computed, second.computed, second.status) == (8, 0, Status.WAITING)
    assert run(made) == [0, 1]
    assert [len(one.output) for one in (first, second)] == [12, 12]
    assert untouched(made)


def test_f18_a_request_may_be_larger_than_one_rank_of_a_stripe():
    """100 rows on each of four devices: a request of 300 runs."""
    big = request(0, 290, 10)
    made = scheduler(big, pages=100, striping=Striping(4), device_slots=20, working_set=20)
    assert made.admit() == [big]
    assert len(big.pages) == 75
    assert run(made, chunk=64) == [0]
    assert untouched(made)


def test_requests_go_to_the_emptiest_rank_first_come_first_served():
    requests = [request(0, 12, 4), request(1, 4, 4), request(2, 4, 4), request(3, 28, 4), request(4, 2, 2)]
    made = scheduler(*requests, ranks=2)
    assert made.admit() == requests[:3]
    assert [one.rank for one in requests[:3]] == [0, 1, 1]
    assert requests[4].status is Status.WAITING  # it would fit, but 3 is before it
    made.finish(requests[0], "abort")
    assert made.admit() == requests[3:5]
    assert [one.rank for one in requests[3:5]] == [0, 1]


def test_numbers_are_unique_in_a_rank_and_the_lowest_is_reused():
    requests = [request(n, 2, 2) for n in range(5)]
    made = scheduler(*requests, max_requests=3)
    made.admit()
    assert [one.number for one in requests[:3]] == [0, 1, 2]
    made.finish(requests[1], "eos")
    made.admit()
    assert requests[3].number == 1
    assert list(made.running[0]) == [0, 2, 1]


def test_live_addresses_are_those_computed_and_finish_gives_them_back():
    one, two = request(0, 6, 2), request(1, 3, 1)
    made = scheduler(one, two)
    made.admit()
    one.computed, two.computed = 5, 2
    assert one.pages == [0, 1]
    assert made.live_addresses(0).tolist() == [0, 1, 2, 3, 4, 8, 9]
    gone = made.finish(one, "abort")
    assert gone.tolist() == [0, 1, 2, 3, 4]
    assert gone.dtype == np.int32
    assert (one.status, one.finish_reason, one.pages) == (Status.FINISHED, "abort", [])
    assert made.live_addresses(0).tolist() == [8, 9]
    made.finish(two, "eos")
    assert untouched(made)


def test_aborting_a_waiting_request_takes_nothing():
    requests = [request(n, 16, 16) for n in range(2)]
    made = scheduler(*requests)
    made.admit()
    assert made.finish(requests[1], "abort").tolist() == []
    assert not made.waiting
    assert run(made) == [0]
    assert untouched(made)


def test_prefill_chunks_need_no_more_rows_than_the_device_has():
    """Each token may need eight selected rows and its own: 20 rows are enough for two tokens of a long context, or
    for all of a short one."""
    one, two = request(0, 30, 2), request(1, 30, 2)
    made = scheduler(one, two, pages=32, working_set=20, device_slots=20)
    made.admit()
    assert made.prefill(0, 2, 16) == [(one, 16), (two, 4)]  # twenty rows in all, whatever is selected
    one.computed = 16
    assert made.prefill(0, 2, 16) == [(one, 4)]  # 16 + 5 of context could need min(21, 5 * 9) > 20
    for one.computed in range(30):
        plan = made.prefill(0, 2, 16)
        assert plan[0][0] is one
        assert 0 < sum(min(r.computed + tokens, 9 * tokens) for r, tokens in plan) <= 20
    assert [r.id for r, _ in plan] == [0, 1]  # the last token of one leaves room for some of two
    assert [r.id for r, _ in made.prefill(0, 1, 16)] == [0]
    one.computed = 30
    one.tokens.append(0)
    assert made.decode(0) == [one]
    assert made.prefill(0, 2, 16) == [(two, 16)]


def test_what_can_never_run_is_refused_and_takes_nothing():
    made = scheduler(pages=8, max_context=40)
    with pytest.raises(ValueError, match=r"request 3: .* at most max_context = 40 tokens, found 38 \+ 3 = 41"):
        made.check(request(3, 38, 3))
    with pytest.raises(ValueError, match=r"request 4: .* capacity of 32 tokens, found 30 \+ 3 = 33"):
        made.check(request(4, 30, 3))
    made.check(request(5, 30, 2))
    assert untouched(made)
    with pytest.raises(ValueError, match="expected max_tokens of at least 1 and temperature of at least 0, found 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match=r"found 32 and -0\.5"):
        SamplingParams(temperature=-0.5)


def test_everything_is_resident_until_a_device_is_full_and_again_when_its_rank_is_empty():
    requests = [request(0, 8, 4), request(1, 4, 4), request(2, 4, 4)]
    made = scheduler(*requests, ranks=2, resident=8, device_slots=8)
    made.admit()
    assert [one.rank for one in requests] == [0, 1, 1]

    def store(*counts):
        step = [[(one, tokens) for one, tokens in zip(requests, counts, strict=True) if one.rank == r] for r in (0, 1)]
        found = made.resident(step)
        for one, tokens in zip(requests, counts, strict=True):
            one.computed += tokens
        return found

    assert store(8, 4, 4), "eight rows each"
    assert store(0, 0, 0)
    assert not store(0, 1, 0), "nine rows of the second rank"
    made.finish(requests[1], "eos")
    assert not store(0, 0, 0), "any four of the nine may be on the host"
    assert not made.resident([[], [(requests[2], 1)]])
    made.finish(requests[2], "eos")
    assert store(0, 0, 0), "nothing of the second rank is left"
    assert not store(1, 0, 0)


def test_a_stripe_holds_each_request_in_nearly_equal_parts():
    requests = [request(0, 5, 3), request(1, 3, 5)]
    made = scheduler(*requests, pages=100, striping=Striping(4), resident=3, device_slots=3)
    made.admit()
    assert made.resident([[(requests[0], 5), (requests[1], 3)]]), "two rows and one on the first device"
    assert not made.resident([[(requests[0], 5), (requests[1], 5)]])


def test_placements_whose_rows_leave_at_other_times_are_never_resident():
    made = scheduler(one := request(0, 2, 2), device_slots=100)
    made.admit()
    assert not made.resident([[(one, 2)]])
