"""Models from hub checkpoints or from a seed, sharded as they come into being; and back to checkpoints."""

import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.decoder import Decoder
from models.draws import normal
from models.hub_config import write_hub_config
from models.hub_tensors import HubTensors, tensors_of, write_tensors
from ula_jax.parallel import Parallel


def abstract_model(
    config: ModelConfig,
    mesh: Mesh,
    parallel: Parallel,
    *,
    dtype: DTypeLike = jnp.float32,
    mtp: bool = False,
) -> Decoder:
    """A model of sharded shapes: what `load_checkpoint` fills, and enough to compile a step ahead of time."""

    def shape(parameter: nnx.Param) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=_sharding(parameter, mesh))

    return _fill(Decoder(config, parallel, dtype, mtp=mtp), shape)


def load_checkpoint(
    directory: str | Path,
    mesh: Mesh,
    parallel: Parallel,
    *,
    dtype: DTypeLike = jnp.float32,
    mtp: bool = False,
    **changes: Any,
) -> Decoder:
    """A model from a hub directory: config.json and one or many safetensors files, float or block-scaled fp8.

    Each device reads its own part of each tensor and no more.

    Args:
      dtype: of the parameters and activations; routers stay float32.
      mtp: also load the multi-token-prediction layer.
      changes: fields of ModelConfig to override, such as latent_norm_eps.

    Raises:
      CheckpointError: a tensor is missing or misshapen, or a file cut short.
      ValueError: the config is of an unknown family or does not divide over the devices.
    """
    config = ModelConfig.from_hub(directory, **changes)
    model = Decoder(config, parallel, dtype, mtp=mtp)
    tensors = HubTensors(directory, config)
    for parameter in _parameters(model):
        tensors.check(parameter)  # all of them before the first byte is read

    def load(parameter: nnx.Param) -> jax.Array:
        @functools.cache  # replicas on one host share a read
        def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
            return tensors.read(parameter, tuple(slice(*pair) for pair in bounds)).astype(parameter.dtype)

        def read_slices(slices: Any) -> np.ndarray:
            pairs = zip(slices, parameter.shape, strict=True)
            return read(tuple(part.indices(size)[:2] for part, size in pairs))

        return jax.make_array_from_callback(parameter.shape, _sharding(parameter, mesh), read_slices)

    return _fill(model, load)


def init_model(
    config: ModelConfig,
    mesh: Mesh,
    parallel: Parallel,
    seed: int,
    *,
    dtype: DTypeLike = jnp.float32,
    mtp: bool = False,
) -> Decoder:
    """A random model, drawn shard by shard; the same for every number of devices and both modes.

    Projections are scaled by their fan-in, and norms and biases are random too, so that selections and
    routing are as uneven as a trained model's: zeros and ones would hide errors.
    """

    def draw(parameter: nnx.Param) -> jax.Array:
        meta = parameter.get_metadata()
        name = zlib.crc32(f"{meta['tensor']} {meta['layout']}".encode())
        make = _draw(parameter.shape, parameter.dtype, meta["init"], _sharding(parameter, mesh))
        return make(np.array([seed % 2**32, name], np.uint32))

    return _fill(Decoder(config, parallel, dtype, mtp=mtp), draw)


@functools.cache
def _draw(
    shape: tuple[int, ...], dtype: np.dtype, init: str, sharding: NamedSharding
) -> Callable[[np.ndarray], jax.Array]:
    """One compiled draw for all parameters alike."""
    scale = {"fan_in": shape[-1] ** -0.5, "norm": 0.1, "bias": 0.1, "router_bias": 0.05, "embedding": 1.0}[init]

    def draw(key: jax.Array) -> jax.Array:
        values = normal(key, shape) * jnp.float32(scale)
        return (values + 1.0 if init == "norm" else values).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)


def save_checkpoint(model: Decoder, directory: str | Path, *, max_file_bytes: int = 4 << 30) -> None:
    """Write a hub directory that `load_checkpoint` and other engines read; more than one file if it is large.

    The model is brought to the host one file at a time.
    """
    directory, config = Path(directory), model.config
    directory.mkdir(parents=True, exist_ok=True)
    hub = write_hub_config(config, str(jnp.dtype(model.embed_tokens.dtype)))
    (directory / "config.json").write_text(json.dumps(hub, indent=2))
    parameters = list(_parameters(model))
    names = {name: parameter for parameter in parameters for name, _ in tensors_of(parameter, config)}
    total = sum(parameter.size * parameter.dtype.itemsize for parameter in parameters)
    writer = _Writer(directory, many=total > max_file_bytes, limit=max_file_bytes)
    halves: dict[str, np.ndarray] = {}
    for parameter in parameters:
        for name, tensor in write_tensors(parameter, np.asarray(parameter[...]), config, halves):
            writer.add(name, tensor)
    writer.finish()
    assert len(writer.weight_map) == len(names)


class _Writer:
    """Collects tensors into files of a bounded size, and the index that says which holds what."""

    def __init__(self, directory: Path, many: bool, limit: int):
        self.directory, self.many, self.limit = directory, many, limit
        self.pending: dict[str, np.ndarray] = {}
        self.weight_map: dict[str, str] = {}
        self.files = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        size = sum(waiting.nbytes for waiting in self.pending.values())
        if self.many and self.pending and size + tensor.nbytes > self.limit:
            self._flush()
        self.pending[name] = tensor

    def _flush(self) -> None:
        self.files += 1
        name = f"model-{self.files:05d}.safetensors" if self.many else "model.safetensors"
        save_file(self.pending, self.directory / name, metadata={"format": "pt"})
        self.weight_map |= dict.fromkeys(self.pending, name)
        self.pending = {}

    def finish(self) -> None:
        self._flush()
        if self.many:
            index = self.directory / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": self.weight_map}, indent=2))


def _parameters(model: Decoder) -> list[nnx.Param]:
    return [parameter for _, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param))]


def _fill(model: Decoder, value: Callable[[nnx.Param], Any]) -> Decoder:
    """The model with the value of each parameter computed from the parameter."""
    graphdef, state = nnx.split(model)
    filled = jax.tree.map(
        lambda parameter: parameter.replace(value(parameter)),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
    return nnx.merge(graphdef, filled)


def _sharding(parameter: nnx.Param, mesh: Mesh) -> NamedSharding:
    spec: PartitionSpec = parameter.get_metadata()["out_sharding"]
    return NamedSharding(mesh, spec)
