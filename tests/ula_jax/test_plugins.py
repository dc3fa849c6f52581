"""Classes by name and from files outside the tree, with parameters."""

from dataclasses import dataclass

import pytest

from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import GpuOnly, HiSparse, make_placement
from ula_jax.plugins import make


@dataclass(frozen=True)
class Knobs:
    count: int = 1
    share: float = 0.5
    on: bool = False
    name: str = "x"
    limit: int | None = None
    given: str = ""


KNOWN = {"knobs": Knobs, "other": Knobs}
FILE = """
from dataclasses import dataclass
from ula_jax.placements import GpuOnly

@dataclass(frozen=True)
class Mine(GpuOnly):
    knob: int = 0

@dataclass(frozen=True)
class NoPlacement:
    parallel: object = None

class Plain:
    pass
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def test_parameters_are_read_as_the_type_of_their_default():
    assert make("thing", KNOWN, "knobs") == Knobs()
    found = make("thing", KNOWN, "other:count=3,share=1,on=True,name=3,limit=7", given="y")
    assert found == Knobs(3, 1.0, True, "3", 7, "y")
    assert isinstance(found.share, float)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("c", r"thing: expected one of \['knobs', 'other'\] or 'path.py:Class', found 'c'"),
        ("mine.txt:Mine", "found 'mine.txt'"),
        ("nowhere.py:Mine", "expected a Python file, found nothing at nowhere.py; check the path"),
        ("mine.py", r"expected a dataclass of mine.py \(\['Mine', 'NoPlacement'\]\), found ''; write path"),
        ("mine.py:Yours", "found 'Yours'"),
        ("mine.py:Plain", "found 'Plain'"),
        ("knobs:size=1", r"expected parameter=value of \['count', .*found 'size=1'"),
        ("knobs:count", "expected parameter=value of .*found 'count'"),
        ("knobs:count=a", "expected count to be of type int, found 'a'"),
        ("knobs:on=1", "expected on to be of type bool, found '1'"),
    ],
)
def test_errors_say_what_was_expected(spec, message, file):
    with pytest.raises(ValueError, match=message):
        make("thing", KNOWN, spec)


def test_placements_by_name_and_from_a_file(file):
    assert make_placement("hisparse:buffer=9", Parallel(dp=2)) == HiSparse(Parallel(dp=2), buffer=9)
    found = make_placement(f"{file}:Mine:knob=3", Parallel(dp=2))
    assert isinstance(found, GpuOnly)
    assert (found.knob, found.parallel) == (3, Parallel(dp=2))
    with pytest.raises(ValueError, match=r"placement: expected one of \['gpu_only', .*found 'gpu'"):
        make_placement("gpu", Parallel())
    with pytest.raises(ValueError, match=r"placement: NoPlacement in .* lacks append, attend, capacity"):
        make_placement(f"{file}:NoPlacement", Parallel())


def test_layouts_that_cannot_be(unchecked):
    with pytest.raises(ValueError, match=r"mode: expected one of \['dp', 'tp', '2x2'\] for 4 devices, found 'pp'"):
        Parallel.of("pp", 4)
    with pytest.raises(ValueError, match="devices: expected at least 1 along dp and tp, found 1 and 0"):
        Parallel(tp=0)
    with pytest.raises(ValueError, match=r"expected 1 to 8.*found 9.*device_count=9"):
        make_mesh(Parallel(9))
    assert make_mesh(Parallel(tp=4)).shape == {"dp": 1, "tp": 4}


def test_a_platform_that_is_not_here_is_named(monkeypatch):
    def nothing():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr("jax.devices", nothing)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS='cuda', found none \(Unable to init.*set JAX_PLATFORMS=cpu"):
        make_mesh()
