"""The rule by which a form of a kernel is chosen."""

import logging

import pytest

from pallas_kernels.dispatch import Choice, assume_platform, choose, explaining, needs, platform

FORMS = {"reference": None, "fast": "it needs rows of 16 bytes, found 12"}


def test_a_form_named_outright_runs_or_says_why_not():
    assert choose("kernel", "reference", FORMS) == "reference"
    with pytest.raises(NotImplementedError, match=r"kernel: implementation 'fast' cannot run: it needs rows"):
        choose("kernel", "fast", FORMS)
    with pytest.raises(ValueError, match=r"expected implementation 'auto' or in .*found 'slow'"):
        choose("kernel", "slow", FORMS)


def test_auto_says_once_what_it_chose_and_why(caplog):
    with caplog.at_level(logging.INFO, logger="ula_jax"):
        for _ in range(2):
            assert choose("said once", "auto", FORMS, ("fast", "reference")) == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "said once: auto chose 'reference' on cpu (not fast: it needs rows of 16 bytes, found 12)"
    ]


def test_auto_without_any_form_raises():
    with pytest.raises(NotImplementedError, match="no form can run here"):
        choose("kernel", "auto", FORMS, ("fast",))


def test_the_platform_can_be_assumed():
    assert platform() == "cpu"
    assert needs("gpu") == "it needs platform 'gpu', found 'cpu'"
    with assume_platform("gpu"):
        assert platform() == "gpu"
        assert needs("gpu") is None
    assert platform() == "cpu"


def test_choices_are_heard_where_somebody_listens():
    forms = {**FORMS, "slow": None}
    choose("before", "auto", forms, ("fast", "reference"))
    with explaining() as choices:
        choose("kernel", "auto", forms, ("fast", "reference"))
        choose("kernel", "slow", forms)
        with pytest.raises(NotImplementedError):
            choose("kernel", "fast", forms)
    choose("after", "auto", forms, ("fast", "reference"))
    why = forms["fast"]
    assert choices == [
        Choice("kernel", "reference", {"fast": why, "slow": "it can run, but `auto` takes 'reference'"}),
        Choice("kernel", "slow", {"reference": "it can run, but was not named", "fast": why}),
        Choice("kernel", None, {"reference": "it can run", "fast": why, "slow": "it can run"}),
    ]
