"""The planner beside published figures of UlaCache and of serving GLM-5.x, and beside what an engine admits."""

import json
from dataclasses import replace

import pytest

from models import ModelConfig
from tests.ula_jax.engines import documents, greedy, make_engine, small_model
from ula_jax import cli
from ula_jax.capacity import MLA, Architecture, Config, admitted, architecture, lengths, machine, plan, run
from ula_jax.known_models import KNOWN
from ula_jax.parallel import Parallel
from ula_jax.placements import PLACEMENTS, make_placement
from ula_jax.report import UserError
from ula_jax.spec import Budget

GLM, K = architecture("glm-5.3"), 1024


def rows_of(**settings):
    return {(row["placement"], row["mode"]): row for row in run(Config(**settings))["rows"]}


@pytest.mark.parametrize(("mode", "with_draft", "without"), [("dp", 113.3, 111.8), ("tp", 96.2, 94.9)])
def test_weights_of_glm_on_each_of_eight_devices(mode, with_draft, without):
    """With the draft layer as SGLang lays them out; without as `reference/capacity_numpy.py` of the notes has them."""
    assert GLM.weights(Parallel.of(mode, 8), draft=True) / 1e9 == pytest.approx(with_draft, rel=0.005)
    assert GLM.weights(Parallel.of(mode, 8), draft=False) / 1e9 == pytest.approx(without, rel=0.005)


def test_bytes_of_a_token_are_those_of_published_offload_buffers():
    """vLLM recipes 893: two buffers of eight ranks that each hold every token, byte for byte."""
    spec = GLM.spec(Config(draft=False), 128 * K)
    token = spec.row_bytes + spec.index_bytes
    assert token == 53_940
    assert 8 * token * 138_496 == 59_763_793_920
    assert 8 * token * 44_288 == 19_111_157_760
    assert GLM.spec(Config(), 128 * K).index_bytes == 21 * 132 + 656 + 132


def test_a_mesh_of_two_ranks_lies_between():
    """Each of two ranks has a half of every request, in four copies where rows are not striped."""
    found = rows_of(mode="2x4", placements=("gpu_only", "ula"), device_gb=1000.0)
    assert found["gpu_only", "2x4"]["distinct_share"] == pytest.approx(1 / 4)
    assert found["ula", "2x4"]["distinct_share"] == 1
    dp, both, tp = (GLM.weights(Parallel.of(mode, 8), True) for mode in ("dp", "2x4", "tp"))
    assert tp < both < dp
    assert both == pytest.approx(tp + (dp - tp) / 7, rel=1e-9)  # a quarter of what DP has whole, where TP has an eighth
    with pytest.raises(UserError, match=r"mode: expected one of .*'2x4', '4x2'\] for 8 devices, found '3x3'"):
        run(Config(mode="3x3"))


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
def test_tensor_parallel_copies_leave_one_part_in_p(devices):
    found = rows_of(hardware=f"{devices}xB300", mode="tp", placements=("gpu_only", "ula"), device_gb=1000.0)
    assert found["gpu_only", "tp"]["distinct_share"] == pytest.approx(1 / devices)
    assert found["ula", "tp"]["distinct_share"] == 1


def test_positions_that_eight_b300_hold():
    """30.0 M in the host, 23.3 M beside the weights, 53.3 M in all."""
    row = GLM.spec(Config(), 96 * K).row_bytes
    host = rows_of(mode="dp", placements=("hisparse",))["hisparse", "dp"]["host_slots"] * 8
    node = machine(Config())
    device = 8 * (node.device_bytes * 0.9 - GLM.weights(Parallel(dp=8), True)) / row
    assert host == pytest.approx(30.0e6, rel=0.001)
    assert device == pytest.approx(23.3e6, rel=0.02)
    assert host + device == pytest.approx(53.3e6, rel=0.01)


def test_ula_admits_over_nine_times_as_many_requests_as_hisparse_on_b300_under_tp():
    found = rows_of(mode="tp", context="96k")
    hisparse, ula = (found[name, "tp"]["admitted"] for name in ("hisparse", "ula:buffer=6144"))
    assert ula / hisparse == pytest.approx(9.4, abs=0.1)
    assert found["hisparse", "tp"]["binds"] == "host"
    assert found["ula", "tp"]["admitted"] > ula, "a selected buffer takes room"


def test_ula_holds_a_tenth_more_than_hisparse_on_h200_under_dp():
    """Of positions: the number of whole requests on one device (28 and 25) is coarser than the figure."""
    found = rows_of(hardware="8xH200", mode="dp", context="96k", placements=("hisparse", "ula"))
    held = {name: row["device_slots"] * (name == "ula") + row["host_slots"] for (name, _), row in found.items()}
    assert held["ula"] / held["hisparse"] == pytest.approx(1.10, abs=0.01)
    assert found["hisparse", "dp"]["admitted"] == 200


def test_what_binds():
    tight = rows_of(hardware="8xH200", mode="dp", placements=("gpu_only", "hisparse", "ula"), host_gb=4000.0)
    assert tight["gpu_only", "dp"]["binds"] == "device"
    assert tight["ula", "dp"]["binds"] == "index keys"
    assert tight["hisparse", "dp"]["binds"] == "index keys"
    assert rows_of(mode="dp", placements=("ula",))["ula", "dp"]["binds"] == "host"
    short = rows_of(mode="tp", context="4k", placements=("ula",), host_gb=20.0)
    assert short["ula", "tp"]["binds"] == "device", "all that is stored must be decodable at once"


def test_a_range_of_contexts_admits_as_many_as_its_mean():
    spread = lengths("64k-128k")
    assert sorted(spread)[0] == 64 * K
    assert sorted(spread)[-1] == 128 * K
    assert sum(spread[:2]) / 2 == pytest.approx(96 * K, rel=0.01)
    few, many = (rows_of(mode="tp", context=c, placements=("ula",))["ula", "tp"]["admitted"] for c in ("128k", "64k"))
    mixed = rows_of(mode="tp", context="64k-128k", placements=("ula",))["ula", "tp"]["admitted"]
    even = rows_of(mode="tp", context="96k", placements=("ula",))["ula", "tp"]["admitted"]
    assert few < mixed < many
    assert mixed == pytest.approx(even, rel=0.03)


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name]["model_type"] in MLA])
def test_groups_of_known_models_are_those_that_the_model_code_reads(name):
    defaults = dict(rope_theta=1e4, rms_norm_eps=1e-6, num_experts_per_tok=8, n_group=1, topk_group=1,
                    norm_topk_prob=True, routed_scaling_factor=1.0)  # fmt: skip
    config = ModelConfig.from_hub(defaults | KNOWN[name])
    assert architecture(name).groups == config.layer_groups
    assert (architecture(name).latent, architecture(name).index_dim) == (config.kv_lora_rank, config.index_head_dim)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, mode) for name in PLACEMENTS for mode in ("dp", "tp")), ("ula:buffer=24", "tp"), ("ula", "2x2")],
)
def test_an_engine_admits_exactly_as_many(name, mode):
    model = small_model(mode, 4 if mode == "2x2" else 2)
    placement = make_placement(name, model.parallel)
    engine = make_engine(model, placement, 150, 120, max_context=48, max_requests=40, prefill_rows=2, verify=False)
    budget = Budget(150 * (engine.spec.row_bytes + engine.spec.index_bytes), 120 * engine.spec.row_bytes)
    expected = plan(name, model.parallel, engine.spec, budget, "48", 0.0)
    assert 0 < expected.admitted < 40
    for prompt in documents(expected.admitted + 1, 44):
        engine.submit(prompt, greedy(4))
    engine.step()
    assert engine.most_running == expected.admitted
    assert admitted(engine.runner.capacity, [48, 48]) == expected.admitted


def test_command(tmp_path, capsys):
    cli.main(["capacity", "--hardware", "8xH200", "--mode", "tp", "--context", "64k-128k", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["placement"] for row in rows] == [*PLACEMENTS, "ula:buffer=6144"]
    assert set(rows[0]) == {
        "placement", "mode", "context", "admitted", "binds", "distinct_share", "device_slots", "host_slots",
        "weights_gb",
    }  # fmt: skip
    assert "90% of it usable" in out
    assert json.loads((tmp_path / "capacity.json").read_text())["rows"] == rows


def test_a_config_of_the_hub_and_hardware_of_ones_own(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KNOWN["deepseek-v3.2"]))
    own = Config(model=str(path), hardware="4xMine", device_gb=400.0, host_gb=100.0, mode="dp", placements=("ula",))
    assert run(own)["rows"] == run(replace(own, model="deepseek-v3.2"))["rows"]
    assert run(own)["assumptions"]["hardware"]["devices"] == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(hardware="B300"), "expected COUNTxCARD like 8xH200, found 'B300'"),
        (dict(hardware="8xB200"), "expected one of .'B300', 'H200'., found 'B200'; .* --device-gb"),
        (dict(model="glm-6"), "expected one of .*'glm-5.3'.* found 'glm-6'"),
        (dict(context="128k-64k"), "expected tokens like 96k, 131072 or 64k-128k, found '128k-64k'"),
        (dict(context="long"), "found 'long'"),
        (dict(hardware="1xH200"), "expected more than the .* GB of weights on each device"),
        (dict(placements=("ulla",)), "expected one of"),
        (dict(mode="tp", placements=("ula:buffer=2000",)), "expected a buffer of at least 2049 rows"),
        (dict(hardware="3xB300", device_gb=900.0, mode="tp", placements=("ula",)), "expected a multiple of the 3"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises((UserError, ValueError), match=message):
        run(Config(**settings))


@pytest.mark.parametrize(
    ("name", "parameters", "gigabytes"), [("qwen3-30b-a3b", 30.5e9, 103.079), ("mixtral-8x7b", 46.7e9, 137.439)]
)
def test_grouped_query_models_as_published(name, parameters, gigabytes):
    """Parameters from the model cards; the cache of 32 requests of 32K in bf16 from WriteScope's table."""
    model = architecture(name)
    embeddings = 2 * model.vocabulary * model.hidden
    assert model.weights(Parallel(), True) - embeddings == pytest.approx(parameters, rel=0.002)  # they are in bf16
    assert 32 * 32 * K * model.spec(Config(rows="bf16"), 32 * K).row_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-5)


def test_heads_divide_the_rows_of_grouped_queries_as_far_as_they_go():
    """Four heads on eight devices: two copies of each, unless positions are striped. One device in eight has an eighth
    of the striped rows and a quarter of every other one."""
    found = rows_of(model="qwen3-30b-a3b", mode="tp", context="32k", rows="bf16", placements=("gpu_only", "ula"))
    assert found["gpu_only", "tp"]["distinct_share"] == pytest.approx(1 / 2)
    assert found["ula", "tp"]["distinct_share"] == 1
    left = machine(Config()).device_bytes * 0.9 - architecture("qwen3-30b-a3b").weights(Parallel(tp=8), True)
    assert found["gpu_only", "tp"]["admitted"] == int(left / (48 * 2 * 128 * 2) / (32 * K))
    whole = rows_of(model="mixtral-8x7b", mode="tp", context="32k", rows="bf16", placements=("gpu_only",))
    assert whole["gpu_only", "tp"]["distinct_share"] == pytest.approx(1)


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_has_a_plan(name):
    found = rows_of(model=name, context="32k")
    assert {"gpu_only", "ula", "owner_computes"} <= {placement for placement, _ in found}
    sparse = "index_topk" in KNOWN[name]
    assert sparse == (("ula:buffer=6144", "tp") in found), "only a selection fits in a buffer"
    assert all(row["admitted"] > 0 for row in found.values())


def test_models_of_another_kind_are_refused():
    with pytest.raises(UserError, match=r"expected the config.json of a glm_moe_dsa, found none of 'kv_lora_rank'"):
        Architecture({name: value for name, value in KNOWN["glm-5.3"].items() if name != "kv_lora_rank"})
    with pytest.raises(UserError, match=r"expected a config.json of type glm_moe_dsa, .*, found 'deepseek_v4'"):
        Architecture(dict(model_type="deepseek_v4", num_key_value_heads=1, head_dim=512))
