"""The policy and the placement that the README shows run from outside the tree, change no token, and stand there."""

from pathlib import Path

import pytest

from tests.ula_jax.engines import documents, greedy, make_engine, small_model
from ula_jax.parallel import Parallel
from ula_jax.placements import make_placement
from ula_jax.policies import make_policy

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def tokens(placement, device_rows: int, host_rows: int) -> list[list[int]]:
    engine = make_engine(small_model("tp", 1), placement, device_rows, host_rows)
    ids = [engine.submit(prompt, greedy(8)) for prompt in documents(3, 36)]
    list(engine.run())
    assert engine.most_running > 1
    return [engine.requests[i].output for i in ids]


def test_outside_policy_and_placement_change_no_token():
    parallel = Parallel()
    expected = tokens("gpu_only", 200, 0)
    assert tokens(make_placement(f"{EXAMPLES / 'host_only.py'}:HostOnly", parallel), 40, 200) == expected
    fifo = make_policy(f"{EXAMPLES / 'fifo.py'}:Fifo")
    assert tokens(make_placement("ula", parallel, policy=fifo), 75, 150) == expected


@pytest.mark.parametrize(
    ("name", "lines", "page"),
    [("fifo.py", 30, "README.md"), ("fifo.py", 30, "docs/add_a_policy.md"), ("host_only.py", 50, "README.md")],
)
def test_pages_show_the_examples_as_they_are(name, lines, page):
    text = (EXAMPLES / name).read_text()
    assert f"```python\n{text}```" in (ROOT / page).read_text()
    assert len(text.splitlines()) <= lines


def test_fifo_evicts_the_first_arrival_not_the_least_recently_used():
    """a, b, c arrive in this order, a is read again: FIFO still gives up a."""
    import jax.numpy as jnp

    from ula_jax.policies import Touch

    policy = make_policy(f"{EXAMPLES / 'fifo.py'}:Fifo")
    state = policy.init(3)
    nothing = jnp.full(1, -1, jnp.int32)
    arrived = []
    for _ in range(3):
        state = policy.touch(state, Touch(nothing))
        slots, state = policy.evict(state, jnp.int32(1), 1)
        state = policy.touch(state, Touch(slots, inserted=True))
        arrived.append(int(slots[0]))
    state = policy.touch(state, Touch(jnp.array([arrived[0]], jnp.int32)))
    state = policy.touch(state, Touch(nothing))
    assert policy.evict(state, jnp.int32(1), 1)[0].tolist() == arrived[:1]
