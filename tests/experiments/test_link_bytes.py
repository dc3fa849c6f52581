"""Bytes between devices under TP, beside arithmetic by hand on GLM-5.3's published sizes."""

import json

import pytest

from experiments import link_bytes
from ula_jax.links import collectives
from ula_jax.parallel import Parallel
from ula_jax.placements import PLACEMENTS, make_placement
from ula_jax.rows import RowFormat
from ula_jax.spec import KVSpec

SPEC = KVSpec(((0,), (1, 2)), RowFormat("fp8", 512, 64), 2048, 128, 64, 8192)


def test_table_of_glm(tmp_path, capsys):
    result = link_bytes.run(link_bytes.Config(out=tmp_path))
    link_bytes.show(result)
    assert [(row["scores"], row["candidates"]) for row in result["selecting"]] == [
        (21 * 4 * context * 7 / 8, 21 * 8 * 7 * min(2048, context // 8)) for context in (8192, 131072, 1048576)
    ]
    one, *_, many = result["attending"]
    assert one["ula"] == 78 * 2048 * (512 + 16 + 128) * 2 * 7 / 8
    assert one["owner_computes"] == pytest.approx(78 * 64 * 4 * (576 + 513) * 7 / 8)
    assert many["ula"] == 256 * one["ula"]
    assert many["missing"]["0.9"] == pytest.approx(0.1 * 256 * 78 * 2048 * 656 * 7 / 8)
    assert result["crossover"] == {"context_of_candidates": 32768, "kept": pytest.approx(0.792, abs=1e-3)}
    assert "from contexts of 32K on" in capsys.readouterr().out
    json.dumps(result)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_that_do_not_stripe_send_no_history(name):
    placements = [make_placement(name, Parallel.of(mode, size)) for mode, size in (("dp", 8), ("tp", 8), ("tp", 1))]
    assert not any(collectives(p, SPEC, 4, 64) for p in placements if p.striping.devices == 1)
    assert sum(bool(collectives(p, SPEC, 4, 64)) for p in placements) == (name in ("ula", "owner_computes"))
