"""Policies by name."""

import pytest

from ula_jax.policies import LRU, PBLRU, make_policy
from ula_jax.policies.prefetch import Prefetch

OWN = """
from dataclasses import dataclass
from ula_jax.policies import LRU

@dataclass(frozen=True)
class Mine(LRU):
    half_life: float = 2.0
    eager: bool = False

@dataclass(frozen=True)
class NoPolicy:
    pass
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_by_name():
    assert make_policy("lru") == LRU()
    assert make_policy("pb_lru") == PBLRU(32)
    assert make_policy("pb_lru:rounds=8,implementation=reference") == PBLRU(8, "reference")
    assert make_policy("prefetch:policy=lru,share=0.5") == Prefetch("lru", 0.5)


def test_from_a_file(own):
    assert make_policy(f"{own}:Mine").half_life == 2.0
    mine = make_policy(f"{own}:Mine:half_life=3,eager=true")
    assert (mine.half_life, mine.eager) == (3.0, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fifo9", r"expected one of \['belady', .*'lru', 'pb_lru'.*found 'fifo9'"),
        ("pb_lru:turns=8", r"expected parameter=value of \['implementation', 'rounds'\], found 'turns=8'"),
        ("pb_lru:rounds", "found 'rounds'"),
        ("pb_lru:rounds=many", "expected rounds to be of type int, found 'many'"),
        ("pb_lru:rounds=0", "rounds: expected 1 to 254, found 0"),
        ("nowhere.py:Mine", "found nothing at nowhere.py"),
    ],
)
def test_a_wrong_name_says_what_is_known(spec, message):
    with pytest.raises(ValueError, match=message):
        make_policy(spec)


def test_a_wrong_class_says_what_the_file_has(own):
    with pytest.raises(ValueError, match=r"\['Mine', 'NoPolicy'\]\), found 'Other'"):
        make_policy(f"{own}:Other")
    with pytest.raises(ValueError, match="expected eager to be of type bool, found 'perhaps'"):
        make_policy(f"{own}:Mine:eager=perhaps")
    with pytest.raises(ValueError, match=r"NoPolicy.*needs the methods init, touch, evict and forget"):
        make_policy(f"{own}:NoPolicy")
