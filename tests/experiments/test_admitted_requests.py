"""Admitted requests over contexts: what UlaCache's admission model says, from the notes' reference, and the figure."""

from experiments import admitted_requests
from ula_jax.capacity import Config


def test_counts_fall_with_the_context_and_are_those_of_the_admission_model(tmp_path):
    """Reference, B = 6144, in fractions of requests: TP of eight B300, 64K / 96K / 128K."""
    node = Config(mode="tp", out=tmp_path)
    result = admitted_requests.run(admitted_requests.Config(node, ("64k", "96k", "128k")))
    found = {name: [row["admitted"] for row in result["rows"] if row["placement"] == name]
             for name in ("gpu_only", "hisparse", "ula:buffer=6144")}  # fmt: skip
    assert found["gpu_only"] == [45, 30, 22]
    assert found["hisparse"] == [57, 38, 28]
    for ours, theirs in zip(found["ula:buffer=6144"], (466.0, 360.1, 293.5), strict=True):
        assert ours <= theirs
        # Ours leave room for the worst case of a step too, all that is selected on one owner.
        binds = next(row["binds"] for row in result["rows"] if row["admitted"] == ours)
        assert ours >= 0.98 * theirs or binds == "working set"
    assert found["ula:buffer=6144"][2] == 293
    admitted_requests.plot(result, tmp_path / "figure.png", node.hardware)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
