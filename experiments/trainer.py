"""Steps of training: parameters and optimiser state by name, and the compiled programs that advance them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import Decoder, ModelConfig, abstract_model, init_model, load_checkpoint
from models.training import Attention, Losses, balanced, losses
from ula_jax.parallel import Parallel, make_mesh


@dataclass(frozen=True)
class Stage:
    """Some steps of one kind. Rates are multiples of the peak learning rate, from start to end along a cosine."""

    name: str
    steps: int
    context: int
    batch: int
    attention: Attention
    model_rate: tuple[float, float] | None
    """Of everything but the indexers; None: frozen."""
    indexer_rate: tuple[float, float] | None
    warmup: int

    @property
    def trained(self) -> tuple[str, ...]:
        rates = {"model": self.model_rate, "indexers": self.indexer_rate}
        return tuple(half for half, rate in rates.items() if rate)

    def control(self, done: int) -> dict[str, Any]:
        """What a step after `done` others of the stage needs to know. As data: a schedule compiles nothing anew."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * done / self.steps)
        ramp = min(1.0, (done + 1) / max(self.warmup, 1))
        rates = {"model": self.model_rate or (0.0, 0.0), "indexers": self.indexer_rate or (0.0, 0.0)}
        found = {half: np.float32(ramp * (end + (start - end) * cosine)) for half, (start, end) in rates.items()}
        return {**found, "phase": np.int32(done % self.attention.imitate_every)}


@dataclass(frozen=True)
class Rates:
    """What stays the same through all stages."""

    learning_rate: float
    """Peak; the stages' schedules are multiples of it."""
    weight_decay: float
    draft_weight: float
    """Of the MTP layer's loss."""
    balance_rate: float
    """Step of the routers' bias at the peak learning rate; falls with it."""


class Trainer:
    """Parameters by name in float32, the model that they make in bf16 (or float32 on a CPU), and compiled steps."""

    def __init__(self, model_config: ModelConfig, rates: Rates):
        self.model_config, self.rates = model_config, rates
        self.mesh, self.parallel = make_mesh(), Parallel()
        # XLA:CPU computes bf16 products in float32 anyway, only slower.
        self.dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        # The second moment stays float32: its small steps are lost in bf16.
        self.adam = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.95, mu_dtype=jnp.bfloat16),
            optax.add_decayed_weights(rates.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        )

    @property
    def size(self) -> int:
        shapes = abstract_model(self.model_config, self.mesh, self.parallel, mtp=True)
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))

    def initial(self, seed: int) -> dict[str, Any]:
        """The state before the first step."""
        drawn = init_model(self.model_config, self.mesh, self.parallel, seed, mtp=True)
        halves = _halves({name: self._start(name, parameter) for name, parameter in _parameters(drawn).items()})
        state = {
            "parameters": halves,
            "adam": {half: self.adam.init(tree) for half, tree in halves.items()},
            "step": jnp.int32(0),
        }
        return jax.device_put(state, NamedSharding(self.mesh, P()))

    def load(self, directory: Path) -> dict[str, dict[str, Any]]:
        """The parameters of a hub directory."""
        loaded = load_checkpoint(directory, self.mesh, self.parallel, mtp=True)
        return _halves({name: parameter[...] for name, parameter in _parameters(loaded).items()})

    def _start(self, name: str, parameter: nnx.Param) -> jax.Array:
        value, init = parameter[...].astype(jnp.float32), parameter.get_metadata()["init"]
        if init in ("norm", "bias", "router_bias"):  # drawn at random for tests; neutral here
            return jnp.full_like(value, float(init == "norm"))
        if name.endswith(("o_proj", "down_proj")):  # each layer adds two of them to the stream
            return value * (2 * self.model_config.num_layers) ** -0.5
        return value

    def model(self, halves: dict[str, dict[str, Any]], dtype: Any = None) -> Decoder:
        """The decoder of these parameters, cast to `dtype` (None: that of training) but for the routers' float32."""
        parameters = halves["model"] | halves["indexers"]
        shapes = abstract_model(self.model_config, self.mesh, self.parallel, dtype=dtype or self.dtype, mtp=True)
        graphdef, state = nnx.split(shapes)
        filled = [
            (path, leaf.replace(parameters["/".join(map(str, path))].astype(leaf.dtype)))
            for path, leaf in nnx.to_flat_state(state)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(filled))

    @functools.cache  # noqa: B019 - one trainer a run
    def step(self, attention: Attention, trained: tuple[str, ...]) -> Callable[..., tuple[Any, Any]]:
        """Compiled (state, windows, control) -> (state, metrics); control is what `Stage.control` says."""

        def advance(state, windows, control):
            def objective(free):
                found = losses(self.model(state["parameters"] | free), windows, attention, control["phase"])
                # The two losses meet no common parameter: detached inputs keep them apart.
                total = found.language + self.rates.draft_weight * found.draft if "model" in trained else 0.0
                return total + found.indexers.sum(), found

            free = {half: state["parameters"][half] for half in trained}
            gradients, found = jax.grad(objective, has_aux=True)(free)
            parameters, adam = dict(state["parameters"]), dict(state["adam"])
            for half in trained:
                rate = self.rates.learning_rate * control[half]
                update, adam[half] = self.adam.update(gradients[half], adam[half], parameters[half])
                parameters[half] = jax.tree.map(lambda p, u, rate=rate: p - rate * u, parameters[half], update)
            if "model" in trained:
                rate = self.rates.balance_rate * control["model"]
                parameters["model"] = self._balance(parameters["model"], found, rate)
            state = {"parameters": parameters, "adam": adam, "step": state["step"] + 1}
            return state, _metrics(found)

        return self._compiled(advance, 3)

    @functools.cache  # noqa: B019
    def evaluator(self, attention: Attention) -> Callable[..., dict[str, Any]]:
        """Compiled (parameters, windows) -> metrics."""
        return self._compiled(lambda halves, windows: _metrics(losses(self.model(halves), windows, attention)), 2)

    def _compiled(self, body: Callable[..., Any], arguments: int) -> Callable[..., Any]:
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=(P(),) * arguments, out_specs=P(), check_vma=False)
        return jax.jit(mapped)

    def _balance(self, parameters: dict[str, Any], found: Losses, rate: jax.Array) -> dict[str, Any]:
        moved = {}
        for layer, load in found.loads.items():
            block = "mtp/block" if layer == self.model_config.num_layers else f"layers/{layer}"
            name = f"{block}/mlp/router/bias"
            moved[name] = balanced(parameters[name], load, rate)
        return parameters | moved


def _parameters(model: Decoder) -> dict[str, nnx.Param]:
    """By name, such as layers/0/self_attn/o_proj."""
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _halves(parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the language model's loss trains, and the indexers."""
    halves: dict[str, dict[str, Any]] = {"model": {}, "indexers": {}}
    for name, value in parameters.items():
        halves["indexers" if "/indexer/" in name else "model"][name] = value
    return halves


def _metrics(found: Losses) -> dict[str, jax.Array]:
    """bits/byte, shares and nats of KL by name."""
    bit = math.log(2)
    loads = jnp.stack([jnp.max(load) / jnp.mean(load) for load in found.loads.values()])
    return {
        "language": found.language / bit, "draft": found.draft / bit, "accepted": found.accepted,
        "kl": found.indexers, "load": loads.max(),
    }  # fmt: skip


def mean(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Every metric's mean over batches, on the host."""
    return {key: np.mean([np.asarray(one[key]) for one in metrics], 0).tolist() for key in metrics[0]}
