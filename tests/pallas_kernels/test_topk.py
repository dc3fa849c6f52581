"""Exact top-k against a Python sort, and the Triton form against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import triton_call
from pallas_kernels.topk import EMPTY, select, top_k
from pallas_kernels.topk.shapes import CARDS, SMALL, Shape

INTERPRET = triton_call.forms()["triton_interpret"] is None
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")

LOWEST = float(np.finfo(np.float32).min)
AWKWARD = (
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-38,
    2.0**-126,
    -(2.0**-126),
    1.0,
    -1.0,
    -LOWEST,
    LOWEST,
    np.inf,
    -np.inf,
    np.nan,
    -np.nan,
)

ranked = jax.jit(top_k, static_argnums=1)
selected = jax.jit(select, static_argnums=1, static_argnames="implementation")


def best(scores, k: int) -> list[int]:
    """Positions by descending score, ties to the lowest; NaN with the lowest finite number, subnormal ones with 0."""
    value = [LOWEST if s != s else 0.0 if abs(s) < 2.0**-126 else s for s in np.asarray(scores).tolist()]
    return sorted(range(len(value)), key=lambda i: (-value[i], i))[:k]


def ascending(scores, k: int, length: int) -> list[int]:
    k = min(k, len(scores))
    found = sorted(best(scores[: max(length, 0)], k))
    return found + [EMPTY] * (k - len(found))


def rows_of_every_kind(shape: Shape, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and lengths, the kinds of rows and of lengths taking turns."""
    rng = np.random.default_rng(seed)
    scores, lengths = np.empty((shape.rows, shape.length), np.float32), np.empty(shape.rows, np.int32)
    normal = lambda: rng.standard_normal(shape.length).astype(np.float32)  # noqa: E731
    kinds = [
        normal,
        lambda: np.maximum(normal() - 2, 0),  # ties at 0
        lambda: np.full(shape.length, 3.0),
        lambda: rng.choice(AWKWARD, shape.length),
        lambda: np.full(shape.length, np.nan),
        lambda: 1 + normal() * 1e-6,
        lambda: np.sort(normal()),
        lambda: np.full(shape.length, -np.inf),
        lambda: normal() * np.float32(1e-41),
        lambda: np.where(rng.random(shape.length) < 0.9, np.nan, normal()),
        lambda: rng.choice((1.0, 2.0), shape.length),
        lambda: normal() * np.exp2(rng.integers(-120, 120, shape.length)),
    ]
    for row in range(shape.rows):
        scores[row] = kinds[(row + seed) % len(kinds)]()
        lengths[row] = (shape.length, rng.integers(shape.length + 1), min(shape.k, shape.length), 0)[row // 3 % 4]
    return scores, lengths


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_reference_is_a_sort(data):
    """Few lengths, so that few programs are compiled."""
    length, k = data.draw(st.sampled_from([(1, 1), (6, 3), (17, 4), (17, 17), (40, 12)]))
    numbers = st.floats(width=32) | st.sampled_from(AWKWARD) | st.integers(-2, 2).map(float)
    scores = np.array(data.draw(st.lists(numbers, min_size=length, max_size=length)), np.float32)
    seen = data.draw(st.integers(0, length))
    assert ranked(scores, k).tolist() == best(scores, k)
    assert selected(scores, k, np.int32(seen), implementation="reference").tolist() == ascending(scores, k, seen)


def test_nan_never_displaces_a_number():
    """3000 of 4096 scores are NaN; then a shorter step, which may show nothing of the one before."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 4096)).astype(np.float32)
    scores[0, rng.permutation(4096)[:3000]] = np.nan
    found = np.asarray(ranked(scores, 1024))
    assert found.tolist() == [best(row, 1024) for row in scores]
    assert not np.isnan(scores[0, found[0]]).any()
    again = np.asarray(ranked(scores[:, :1200], 1024))
    assert again.tolist() == [best(row[:1200], 1024) for row in scores]


def test_a_crowded_threshold_loses_nobody():
    """5000 of 8192 scores lie in [1.000, 1.001]: the multiset of the best 2048 is that of a sort."""
    rng = np.random.default_rng(1)
    scores = rng.standard_normal(8192).astype(np.float32) - 4
    scores[rng.permutation(8192)[:5000]] = 1 + rng.random(5000, np.float32) / 1000
    found = np.asarray(ranked(scores, 2048))
    np.testing.assert_array_equal(np.sort(scores[found]), np.sort(scores)[-2048:])
    assert len(set(found.tolist())) == 2048


def test_a_million_normal_scores():
    scores = np.random.default_rng(2).standard_normal(1_000_000).astype(np.float32)
    found = np.asarray(ranked(scores, 2048))
    np.testing.assert_array_equal(np.sort(scores[found]), np.sort(np.partition(scores, -2048)[-2048:]))


def test_ties_go_to_the_lowest_position():
    assert ranked(jnp.array([1.0, 2.0, 2.0, 1.0, 2.0, 2.0]), 3).tolist() == [1, 2, 4]
    assert ranked(jnp.zeros(64), 5).tolist() == [0, 1, 2, 3, 4]
    assert ranked(jnp.array([-0.0, 0.0, -0.0]), 2).tolist() == [0, 1]


@pytest.mark.parametrize(("length", "k"), [(3, 4), (3, 0), (0, 1)])
def test_ranks_beyond_the_scores_are_an_error(length, k):
    with pytest.raises(ValueError, match=f"expected k from 1 to the {length} scores, found {k}"):
        top_k(jnp.zeros((2, length)), k)


def test_a_selection_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="expected k of 1 or more, found 0"):
        select(jnp.zeros((2, 3)), 0, jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("form", ["reference", pytest.param("triton_interpret", marks=interpreted)])
def test_any_batch(form):
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((3, 2, 7)).astype(np.float32)
    lengths = np.array([[7, 2], [0, 5], [-1, 99]], np.int32)
    found = selected(scores, 4, lengths, implementation=form)
    assert found.shape == (3, 2, 4)
    for at in np.ndindex(3, 2):
        assert found[at].tolist() == ascending(scores[at], 4, lengths[at])
    assert selected(scores[:0], 4, lengths[:0], implementation=form).shape == (0, 2, 4)
    assert selected(scores[..., :0], 4, lengths, implementation=form).shape == (3, 2, 0)


@interpreted
@pytest.mark.parametrize("name", SMALL)
def test_triton_interpreted_equals_the_reference(name):
    scores, lengths = rows_of_every_kind(SMALL[name])
    found = selected(scores, SMALL[name].k, lengths, implementation="triton_interpret")
    np.testing.assert_array_equal(found, selected(scores, SMALL[name].k, lengths, implementation="reference"))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that short rows take every path; the kernels get them as arguments, when they are traced."""
    triton = pytest.importorskip("pallas_kernels.topk.triton")
    for name, value in {"SAMPLES": 64, "DIRECT": 100, "SEGMENT": 128, "TILE": 256}.items():
        monkeypatch.setattr(triton, name, value)
    return triton


@interpreted
@pytest.mark.parametrize(("length", "k"), [(999, 1), (1024, 40), (1500, 100), (1500, 1300)])
def test_rows_of_every_kind_by_sample(small_blocks, length, k):
    scores, lengths = rows_of_every_kind(Shape(12, length, k), seed=length)
    found = small_blocks.select(jnp.asarray(scores), k, jnp.asarray(lengths), interpret=True)
    np.testing.assert_array_equal(found, selected(scores, k, lengths, implementation="reference"))


def marked(triton, scores: np.ndarray, k: int) -> np.ndarray:
    lengths = jnp.full(len(scores), scores.shape[1], jnp.int32)
    _, marks = triton._marks(jnp.asarray(scores), k, lengths, True)
    return np.unpackbits(np.asarray(marks).view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]].sum(1)


@interpreted
def test_a_sample_leaves_few_whatever_the_scores(small_blocks):
    """At least k, so that no second look is needed, and at most as many as there is room for."""
    scores, _ = rows_of_every_kind(Shape(12, 4000, 60), seed=1)
    room = small_blocks._room(4000, 60)
    found = marked(small_blocks, scores, 60)
    assert (found >= 60).all()
    assert (found <= room).all()
    assert room < 4000


@interpreted
def test_a_sample_that_misleads_costs_only_time(small_blocks):
    """All that it looks at is large, or small: too few are marked, or more than there is room for."""
    length, k, stretch = 1600, 40, 25
    i = np.arange(small_blocks.SAMPLES, dtype=np.uint32)
    mixed = i * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
    looked_at = i * stretch + (mixed ^ (mixed >> 13)) % stretch
    scores = np.random.default_rng(0).standard_normal((2, length)).astype(np.float32)
    scores[0, looked_at] += 100
    scores[1, looked_at] -= 100
    few, many = marked(small_blocks, scores, k)
    assert few < k
    assert many > small_blocks._room(length, k)
    lengths = jnp.full(2, length, jnp.int32)
    found = small_blocks.select(jnp.asarray(scores), k, lengths, interpret=True)
    np.testing.assert_array_equal(found, selected(scores, k, lengths, implementation="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *CARDS])
def test_triton_equals_the_reference_on_a_gpu(name):
    shape = {**SMALL, **CARDS}[name]
    shape = Shape(24 if name in CARDS else shape.rows, shape.length, shape.k)
    for seed in range(2):
        scores, lengths = rows_of_every_kind(shape, seed)
        found = selected(scores, shape.k, lengths, implementation="triton")
        np.testing.assert_array_equal(found, selected(scores, shape.k, lengths, implementation="reference"))


@pytest.mark.gpu
def test_a_gpu_repeats_itself():
    scores, lengths = rows_of_every_kind(Shape(24, 131072, 2048))
    runs = [np.asarray(selected(scores, 2048, lengths, implementation="triton")) for _ in range(10)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])
