"""The kernel timings: every form is compared with its reference before it is timed."""

from experiments import time_kernels


def test_every_reference_runs_and_is_timed():
    rows = time_kernels.run(time_kernels.Config(blocks=1, calls=1))["rows"]
    assert {row["kernel"] for row in rows} == {"sparse_gather.gather_layers", "pb_lru.evict"}
    assert all(row["equal"] and row["us"] > 0 for row in rows)


def test_a_wrong_form_is_reported_as_unequal(monkeypatch):
    wrong = {"reference": lambda: 1, "mosaic": lambda: 2}
    monkeypatch.setattr(time_kernels, "_gathers", lambda *_: wrong)
    rows = time_kernels.run(time_kernels.Config(blocks=1, calls=1))["rows"]
    assert {row["equal"] for row in rows if row["form"] == "mosaic"} == {False}
