"""How parameters lie in a hub checkpoint: fp8 by blocks, single experts, keys and values in kv_b_proj."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.tensor_files import CheckpointError, Slices, TensorFiles


class HubTensors:
    """Reads slices of parameters, by parameter, from a checkpoint directory."""

    def __init__(self, directory: str | Path, config: ModelConfig):
        self.files, self.config = TensorFiles(directory), config
        hub = json.loads((Path(directory) / "config.json").read_text())
        quantization = hub.get("quantization_config") or {}
        self.block: tuple[int, ...] = tuple(quantization.get("weight_block_size") or (128, 128))

    def check(self, parameter: nnx.Param) -> None:
        """Raise CheckpointError unless all of the parameter's tensors are there in their shapes."""
        for name, shape in tensors_of(parameter, self.config):
            entry = self.files.entry(name, shape)
            scale = f"{name}_scale_inv"
            # A config can name modules that do not exist as unquantised: the tensors themselves decide.
            if scale in self.files:
                rows_and_columns = zip(shape, self.block, strict=True)
                self.files.entry(scale, tuple(-(-size // block) for size, block in rows_and_columns))
            elif entry.dtype == "F8_E4M3":
                raise CheckpointError(
                    f"{entry.file}: expected tensor {scale} beside the F8_E4M3 tensor {name}, found none; "
                    "use a block-scaled fp8 checkpoint or convert it to bf16"
                )

    def read(self, parameter: nnx.Param, slices: Slices) -> np.ndarray:
        """A slice of a parameter as float32 (or as stored, unless it is scaled); reads nothing else."""
        meta = parameter.get_metadata()
        name, layout = meta["tensor"], meta["layout"]
        slices = tuple(slice(*part.indices(size)) for part, size in zip(slices, parameter.shape, strict=True))
        if layout == "plain":
            return self._read_tensor(name, slices)
        if layout == "experts":
            own = range(*slices[0].indices(parameter.shape[0]))
            return np.stack([self._read_tensor(name.format(expert), slices[1:]) for expert in own])
        head = _head_rows(self.config)
        rows = slice(slices[0].start * head, slices[0].stop * head)
        heads = self._read_tensor(name, (rows, slices[2]))
        return heads.reshape(-1, head, heads.shape[-1])[:, _rows_of(layout, self.config)][:, slices[1]]

    def _read_tensor(self, name: str, slices: Slices) -> np.ndarray:
        stored = self.files.read(name, slices)
        scale = f"{name}_scale_inv"
        if scale not in self.files:
            return stored
        blocks = [np.arange(part.start, part.stop) // block for part, block in zip(slices, self.block, strict=True)]
        covering = tuple(slice(block[0], block[-1] + 1) for block in blocks)
        factors = self.files.read(scale, covering).astype(np.float32)
        return stored.astype(np.float32) * factors[np.ix_(*(block - block[0] for block in blocks))]


def tensors_of(parameter: nnx.Param, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the hub tensors that make up a parameter."""
    meta, shape = parameter.get_metadata(), tuple(parameter.shape)
    if meta["layout"] == "experts":
        for expert in range(shape[0]):
            yield meta["tensor"].format(expert), shape[1:]
    elif meta["layout"] == "plain":
        yield meta["tensor"], shape
    else:
        yield meta["tensor"], (shape[0] * _head_rows(config), shape[2])


def write_tensors(
    parameter: nnx.Param, value: np.ndarray, config: ModelConfig, halves: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """A parameter's hub tensors. The two parts of kv_b_proj meet in `halves`; the second yields the whole."""
    meta = parameter.get_metadata()
    name = meta["tensor"]
    if meta["layout"] == "experts":
        for expert, tensor in enumerate(value):
            yield name.format(expert), np.ascontiguousarray(tensor)
    elif meta["layout"] == "plain":
        yield name, value
    elif name not in halves:
        halves[name] = value
    else:
        parts = {meta["layout"]: value, _other(meta["layout"]): halves.pop(name)}
        whole = np.concatenate([parts["key_heads"], parts["value_heads"]], 1)
        yield name, whole.reshape(-1, whole.shape[-1])


def _other(layout: str) -> str:
    return "value_heads" if layout == "key_heads" else "key_heads"


def _head_rows(config: ModelConfig) -> int:
    """Rows of kv_b_proj that belong to one head."""
    return config.qk_nope_head_dim + config.v_head_dim


def _rows_of(layout: str, config: ModelConfig) -> slice:
    keys = config.qk_nope_head_dim
    return slice(0, keys) if layout == "key_heads" else slice(keys, None)
