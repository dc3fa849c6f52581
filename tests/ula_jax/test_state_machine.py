"""Random lives of two requests over few slots; the invariants and all contents are checked after every rule."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.ula_jax.story import Story
from tests.ula_jax.support import GROUPS, Want, World, harness
from ula_jax.address import PageAllocator

CASES = {
    "ula-dp": ("ula", None, "dp", 1, "fp32"),
    "ula-tp": ("ula", None, "tp", 2, "bf16"),
    "hisparse-dp": ("hisparse", None, "dp", 1, "fp32"),
    "resident_hot-dp": ("resident_hot", None, "dp", 1, "fp32"),
}
seeds = st.integers(0, 2**32 - 1)


class Life(RuleBasedStateMachine):
    """Pages come from the allocator under test. Eight device slots (nine of each request under HiSparse) of 32 rows."""

    case: tuple

    @initialize()
    def empty(self):
        self.world = World(harness(*self.case, requests=2, topk=3, context=16, page=4))
        self.story = Story(self.world, chunk=2, room=8)
        self.allocator = PageAllocator(8, 4)

    @rule(number=st.integers(0, 1), tokens=st.integers(1, 16))
    def allocate(self, number, tokens):
        """Two full contexts always fit: what the first may hold is reserved."""
        if number not in self.story.pages[0]:
            assert self.allocator.can_allocate(tokens)
            self.story.pages[0][number] = self.allocator.allocate(tokens)
            self.story.length[0][number] = 0
            held = [page for pages in self.story.pages[0].values() for page in pages]
            assert len(set(held)) == len(held) == 8 - self.allocator.free_pages

    def grow(self, tokens, appends, seed):
        self.story.rng, self.story.appends = np.random.default_rng(seed), appends
        self.story.grow(tokens, tokens)

    @precondition(lambda self: self.story.length[0])
    @rule(seed=seeds)
    def append(self, seed):
        """A prefill chunk: every request stores two tokens, each reading up to three rows."""
        self.grow(2, 1.0, seed)

    @precondition(lambda self: self.story.length[0])
    @rule(seed=seeds)
    def decode(self, seed):
        self.grow(1, 0.7, seed)

    @precondition(lambda self: self.story.length[0])
    @rule(seed=seeds)
    def select(self, seed):
        """Only reads, which moves rows between the tiers."""
        self.grow(1, 0.0, seed)

    @precondition(lambda self: self.story.length[0])
    @rule(which=st.integers(0, 1))
    def free(self, which):
        """A finished request and an aborted one are the same here: some of its pages are full, some were never used."""
        numbers = list(self.story.length[0])
        number = numbers[which % len(numbers)]
        pages = self.story.pages[0][number]
        self.story.finish(number)
        self.allocator.free(pages)
        with pytest.raises(ValueError, match="held"):
            self.allocator.free(pages)

    def teardown(self):
        """Everything stored can be read; then it is released, and every pool is empty again."""
        story, steps = self.story, []
        for number, length in story.length[0].items():
            rows = story.addresses(0, number, 0, length)
            steps += [(number, rows[at : at + 3]) for at in range(0, length, 3)]
        for number, rows in steps:
            self.world.step([{number: Want([], [[rows]] * len(GROUPS))}], steps=2)
        for number in list(story.length[0]):
            story.finish(number)
        for device in range(self.world.h.devices):
            for group in range(len(GROUPS)):
                assert self.world.resident(group, device) == set()


@pytest.mark.parametrize("name", CASES)
def test_a_life_of_allocating_appending_selecting_and_freeing(name):
    machine = type(name, (Life,), {"case": CASES[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_machine_reaches_full_tiers():
    """Twelve appends of two requests fill 32 rows, far beyond the device."""
    life = type("life", (Life,), {"case": CASES["ula-dp"]})()
    life.empty()
    life.allocate(0, 16)
    life.allocate(1, 16)
    for seed in range(8):
        life.append(seed)
    assert len(life.world.live[0]) == life.world.h.capacity.addresses == 32
    assert len(life.world.resident()) == life.world.h.capacity.device_slots == 8
    life.select(1)
    life.free(0)
    life.allocate(0, 9)
    life.append(3)
    life.teardown()
