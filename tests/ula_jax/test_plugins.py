"""Classes by name and from files outside the tree."""

import pytest

from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import GpuOnly, make_placement
from ula_jax.plugins import load

KNOWN = {"b": dict, "a": list}


def test_known_names_and_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    number = 41 + 1\n")
    assert load("thing", KNOWN, "a") is list
    assert load("thing", KNOWN, f"{file}:Mine").number == 42


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c", "thing: expected one of a, b or path.py:Class, found 'c'"),
        ("mine.py", "expected one of a, b or path.py:Class, found 'mine.py'"),
        ("mine.txt:Mine", "expected one of a, b or path.py:Class"),
        ("nowhere.py:Mine", "expected a Python file before the colon of 'nowhere.py:Mine', found none at nowhere.py"),
        ("mine.py:Yours", "expected a class Yours in mine.py, found none; check the name"),
    ],
)
def test_errors_say_what_was_expected(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load("thing", KNOWN, name)


def test_a_placement_from_a_file_gets_its_parameters(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom ula_jax.placements import GpuOnly\n"
        "@dataclass(frozen=True)\nclass Mine(GpuOnly):\n    knob: int = 0\n"
    )
    found = make_placement(f"{file}:Mine", Parallel("dp", 2), knob=3)
    assert isinstance(found, GpuOnly)
    assert (found.knob, found.parallel) == (3, Parallel("dp", 2))
    with pytest.raises(ValueError, match=r"placement: expected one of gpu_only, .* found 'gpu'"):
        make_placement("gpu", Parallel())


def test_layouts_that_cannot_be(unchecked):
    with pytest.raises(ValueError, match="mode: expected 'dp' or 'tp', found 'pp'"):
        Parallel("pp")
    with pytest.raises(ValueError, match="devices: expected at least 1, found 0"):
        Parallel("tp", 0)
    with pytest.raises(ValueError, match=r"expected 1 to 8.*found 9.*device_count=9"):
        make_mesh(9)
    assert make_mesh(4).shape == {"kv": 4}
