"""The frame of the benchmarks: it reports what is wrong, fails or misses its bar, and knows every kernel."""

import importlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.__main__ import Config, _measure, modules, run
from benchmarks.card import Rates
from benchmarks.case import Case
from benchmarks.timing import first_result, per_call

RATES = Rates(copy=1e9, to_device=2e9, to_host=1e9, matmul=1e12)


def adding(number):
    return lambda x: x + number


def case(**changes):
    given = dict(
        kernel="add",
        shape="small",
        forms={"reference": adding(1), "other": adding(1.0), "wrong": adding(2), "failing": lambda x: x @ jnp.ones(7)},
        calls=[(jnp.arange(8.0) + i,) for i in range(3)],
        check=lambda form, result, call: None if (result == call[0] + 1).all() else f"{form} is off",
    )
    return Case(**(given | changes))


def measured(case, **config):
    return {row["form"]: row for row in _measure(case, RATES, Config(repeats=2, **config))}


@pytest.mark.parametrize("name", modules())
def test_every_kernel_is_right_in_its_base_form(name):
    found = list(importlib.import_module(f"benchmarks.{name}").cases(np.random.default_rng(0), True))
    assert all(case.check and case.bar is None for case in found)
    for case in found[::3]:
        (row,) = _measure(replace(case, outside=None), RATES, Config(small=True, forms=("base",), repeats=2))
        assert row["wrong"] is None
        assert row["us"] is not None


def test_the_result_holds_every_row_and_the_rates():
    result = run(Config(only=("topk",), small=True, forms=("base",), repeats=2))
    assert {row["kernel"] for row in result["rows"]} == {"topk.select"}
    assert all(rate > 0 for rate in result["rates"].values())


def test_forms_that_are_wrong_or_fail_are_results():
    rows = measured(case())
    assert rows["reference"]["wrong"] is rows["other"]["wrong"] is None
    assert rows["wrong"]["wrong"] == "wrong is off"
    assert rows["failing"]["wrong"].startswith("TypeError")
    assert "us" not in rows["failing"]
    assert measured(case(check=None))["reference"]["wrong"] == "not checked"
    assert measured(case(forms={"reference": adding(3)}), small=True)["reference"]["wrong"] == "reference is off"


def test_ratios_bars_and_floors():
    outside = {"twice": lambda: 2e9, "half": lambda: 1e9}
    rows = measured(case(outside=outside, bar=1.5e9, base="twice", device_bytes=10**6))
    assert [rows[name]["met"] for name in ("twice", "half")] == [False, True]
    assert rows["half"]["bar"] == "1500000000 us"
    assert "speedup" in rows["reference"]
    relative = measured(case(outside=outside, ratio=1.5, base="twice"))
    assert [relative[name]["met"] for name in ("twice", "half")] == [False, True]
    assert relative["half"]["bar"] == "1.50 x"
    assert rows["half"]["of_floor"] == pytest.approx(1e3 / 1e9)  # 1 MB at 1 GB/s takes 1000 us
    assert RATES.floor(0, 10**6, 0) == pytest.approx(1e3)
    assert RATES.floor(0, 10**3, 10**9) == pytest.approx(1e3)


def test_only_named_forms_run_besides_the_base():
    assert set(measured(case(), forms=("other",))) == {"reference", "other"}


def test_bars_alone_leaves_out_the_rest(monkeypatch):
    cases = [case(shape="bar", bar=1e9), case(shape="ratio", ratio=2.0), case(shape="neither")]
    monkeypatch.setattr("benchmarks.topk.cases", lambda rng, small: cases)
    result = run(Config(only=("topk",), forms=("base",), small=True, bars=True, repeats=2))
    assert [row["shape"] for row in result["rows"]] == ["bar", "ratio"]


def test_state_goes_from_call_to_call():
    held = case(forms={"reference": lambda state, x: (state + x[0], state)}, state=lambda: jnp.float32(5))
    after, before = first_result(held, "reference")
    assert (float(after), float(before)) == (5.0, 5.0)  # the first call adds 0
    timing = per_call(held, "reference", 2)
    assert timing.device_us is None  # this is no card


def test_unknown_modules_are_named():
    with pytest.raises(ValueError, match=r"only: expected some of .*topk.*, found .'tokp'.; correct the names"):
        run(Config(only=("tokp",), small=True))
