"""Loading, drawing and saving weights: every layout of checkpoint, each device its own part, errors by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import (
    CheckpointError,
    ModelConfig,
    abstract_model,
    init_model,
    load_checkpoint,
    save_checkpoint,
)
from models.tensor_files import TensorFiles
from tests.models.running import GOLDEN, load
from ula_jax.parallel import Parallel, make_mesh

SMALL = dict(hidden_size=160, q_lora_rank=136, kv_lora_rank=40, intermediate_size=192, moe_intermediate_size=136)


def small_config():
    """Two layers, whose shapes are not multiples of 128."""
    hub = json.loads((GOLDEN / "glm_moe_dsa" / "config.json").read_text()) | SMALL
    listed = dict(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"], indexer_types=["full"] * 2)
    return ModelConfig.from_hub(hub | listed)


def leaves(model):
    return {
        (p.get_metadata()["tensor"], p.get_metadata()["layout"]): np.asarray(p[...])
        for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=str(name))


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a golden checkpoint to damage: (directory, tensors)."""
    directory = tmp_path / "glm_moe_dsa"
    shutil.copytree(GOLDEN / "glm_moe_dsa", directory)
    return directory, load_file(directory / "model.safetensors")


def load_one(directory, **options):
    return load_checkpoint(directory, make_mesh(), Parallel(), **options)


@pytest.mark.parametrize(("mode", "size"), [("tp", 8), ("dp", 8), ("tp", 2)])
def test_every_device_holds_its_part_of_the_same_model(mode, size):
    model, _ = load("glm_moe_dsa_share", mode, size)
    same(model, load("glm_moe_dsa_share")[0])
    attention, moe = model.layers[1].self_attn, model.layers[1].mlp
    heads = 8 // size if mode == "tp" else 8
    parts = {
        (heads * 24, 48): attention.q_b_proj,
        (heads, 16, 32): attention.w_uk,
        (heads, 24, 32): attention.w_uv,
        (64, heads * 24): attention.o_proj,
        (48, 64): attention.q_a_proj,
        (8 // size, 32, 64): moe.gate_proj,
        (8, 64): moe.router.gate,
        (heads * 4, 64): moe.shared_experts.up_proj,
        (64, heads * 12): model.layers[0].mlp.down_proj,
        (heads * 32, 64): model.lm_head,
    }
    for shape, parameter in parts.items():
        assert {shard.data.shape for shard in parameter[...].addressable_shards} == {shape}


def test_abstract_model_has_the_shapes_and_shardings_of_a_loaded_one():
    model, mesh = load("deepseek_v3", "tp", 8)
    abstract = abstract_model(model.config, mesh, model.parallel, mtp=True)
    described = [
        [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(nnx.state(either))]
        for either in (model, abstract)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("mode", ["tp", "dp"])
def test_each_device_reads_only_its_part(mode, monkeypatch):
    reads = {}

    def spy(self, name, slices, read=TensorFiles.read):
        value = read(self, name, slices)
        reads.setdefault(name, []).append(value.shape)
        return value

    monkeypatch.setattr(TensorFiles, "read", spy)
    load_checkpoint(GOLDEN / "glm_moe_dsa", make_mesh(Parallel.of(mode, 8)), Parallel.of(mode, 8))
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    tp = mode == "tp"
    assert reads[f"{attention}q_b_proj.weight"] == ([(24, 48)] * 8 if tp else [(192, 48)])
    assert reads[f"{attention}o_proj.weight"] == ([(64, 24)] * 8 if tp else [(64, 192)])
    # Once for the keys and once for the values, by whole heads.
    assert reads[f"{attention}kv_b_proj.weight"] == ([(40, 32)] * 16 if tp else [(320, 32)] * 2)
    assert reads[f"{attention}q_a_proj.weight"] == [(48, 64)]
    for expert in range(8):
        assert reads[f"{mlp}experts.{expert}.down_proj.weight"] == [(64, 32)]
    assert not any("model.layers.4." in name for name in reads)  # the MTP layer was not asked for


def quantised(directory, target, rng):
    """`directory` as block-scaled fp8 in `target`/fp8 and dequantised by plain numpy in `target`/plain."""
    stored, scaled, plain = load_file(directory / "model.safetensors"), {}, {}
    for name, weight in stored.items():
        scaled[name] = plain[name] = weight
        if weight.ndim < 2 or name.endswith(("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")):
            continue
        blocks = tuple(-(-size // 128) for size in weight.shape)
        scale = rng.uniform(0.5, 2, blocks).astype(np.float32)
        wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: weight.shape[0], : weight.shape[1]]
        scaled[name] = weight.astype(ml_dtypes.float8_e4m3fn)
        scaled[f"{name}_scale_inv"] = scale
        plain[name] = scaled[name].astype(np.float32) * wide
    for kind, tensors in (("fp8", scaled), ("plain", plain)):
        (target / kind).mkdir()
        shutil.copyfile(directory / "config.json", target / kind / "config.json")
        save_file(tensors, target / kind / "model.safetensors")


def test_trap_19_fp8_blocks_load_as_their_dequantised_values(tmp_path):
    model = init_model(small_config(), make_mesh(), Parallel(), seed=3)
    save_checkpoint(model, tmp_path / "made")
    quantised(tmp_path / "made", tmp_path, np.random.default_rng(0))
    for mode, size in (("tp", 8), ("dp", 2)):
        parallel = Parallel.of(mode, size)
        mesh = make_mesh(parallel)
        fp8 = load_checkpoint(tmp_path / "fp8", mesh, parallel)
        same(fp8, load_checkpoint(tmp_path / "plain", mesh, parallel))
    bf16 = load_one(tmp_path / "fp8", dtype=jnp.bfloat16)
    assert bf16.layers[0].mlp.up_proj.dtype == jnp.bfloat16


def test_trap_19_fp8_without_its_scale_is_refused(checkpoint):
    directory, tensors = checkpoint
    name = "model.layers.0.mlp.up_proj.weight"
    fp8 = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors | {name: fp8}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"expected tensor {name}_scale_inv beside the F8_E4M3 tensor"):
        load_one(directory)
    bad = {name: fp8, f"{name}_scale_inv": np.ones((2, 1), np.float32)}
    save_file(tensors | bad, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}_scale_inv of shape \[1, 1\], found \[2, 1\]"):
        load_one(directory)


def test_damaged_checkpoints_name_file_and_tensor(checkpoint):
    directory, tensors = checkpoint
    file = directory / "model.safetensors"
    whole = file.read_bytes()

    def expect(message):
        with pytest.raises(CheckpointError, match=message):
            load_one(directory)

    name = "model.layers.2.self_attn.kv_b_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    expect(rf"expected tensor {name} of shape \[320, 32\], found .* as the nearest name; complete the download")
    save_file(tensors | {name: tensors[name].T.copy()}, file)
    expect(rf"model\.safetensors: expected tensor {name} of shape \[320, 32\], found \[32, 320\]; use the config")
    save_file(tensors | {name: tensors[name].astype(np.int32)}, file)
    expect(rf"model\.safetensors: expected tensor {name} in one of F32, .*, found I32; convert")
    file.write_bytes(whole[:-100])
    expect(r"model\.safetensors: expected tensor \S+ at bytes \d+ to \d+, found a file of \d+ bytes; it is cut short")
    file.write_bytes(whole[:100])
    expect(r"model\.safetensors: expected a header of \d+ bytes, found a file of 100 bytes; it is cut short")
    file.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    expect(r"model\.safetensors: expected a header in JSON")
    file.unlink()
    expect(r"model\.safetensors: expected a safetensors file, found none; complete the download")


def test_index_that_names_an_absent_file(checkpoint):
    directory, tensors = checkpoint
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: expected a safetensors file"):
        load_one(directory)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: expected weight_map in JSON"):
        load_one(directory)


def test_mtp_of_a_model_without_one_is_refused():
    with pytest.raises(ValueError, match=r"mtp: expected a model with a multi-token-prediction layer"):
        load_one(GOLDEN / "deepseek_v2", mtp=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("max_file_bytes", [1 << 30, 1 << 19])
def test_saved_model_loads_the_same(tmp_path, dtype, max_file_bytes):
    model = load("glm_moe_dsa", "tp", 8, **({} if dtype == jnp.float32 else {"dtype": dtype}))[0]
    save_checkpoint(model, tmp_path, max_file_bytes=max_file_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_file_bytes < 1 << 20)
    again = load_one(tmp_path, dtype=dtype, mtp=True)
    assert again.config == model.config
    same(model, again)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert names == load_file(GOLDEN / "glm_moe_dsa" / "model.safetensors").keys()


def test_random_model_is_the_same_on_every_number_of_devices():
    hub = json.loads((GOLDEN / "glm_moe_dsa" / "config.json").read_text())
    equal = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "intermediate_size", "moe_intermediate_size"), 64)
    config = ModelConfig.from_hub(hub | equal)  # fewer shapes to compile
    layouts = [Parallel(), Parallel(tp=8), Parallel(dp=4), Parallel(2, 4)]
    models = [init_model(config, make_mesh(parallel), parallel, seed=7, mtp=True) for parallel in layouts]
    for other in models[1:]:
        same(models[0], other)
    assert len(models[1].layers[0].self_attn.w_uk[...].addressable_shards) == 8
    assert models[1].layers[0].self_attn.w_uk[...].addressable_shards[0].data.shape == (1, 16, 64)
    values = leaves(models[0])
    for (name, _), value in values.items():
        expected = 1.0 if "embed" in name else 0.1 if value.ndim == 1 else value.shape[-1] ** -0.5
        expected = 0.05 if name.endswith("correction_bias") else expected
        assert 0.4 < value.std() / expected < 1.7, name
    other = leaves(init_model(config, make_mesh(), Parallel(), seed=8, mtp=True))
    assert not any(np.array_equal(other[name], values[name]) for name in values)
