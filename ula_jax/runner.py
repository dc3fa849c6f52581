"""The compiled step: one jitted function over the mesh, its state donated."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ula_jax import memory
from ula_jax.history import Batch, History, KVState
from ula_jax.index_keys import Gather
from ula_jax.parallel import DEVICES, DP, TP
from ula_jax.placements.base import Placement, fitting
from ula_jax.sampling import Sampling, sample
from ula_jax.spec import Budget, KVSpec
from ula_jax.types import Array


@runtime_checkable
class Model(Protocol):
    """A decoder whose attention goes through History. Runs inside shard_map."""

    def __call__(self, tokens: Array, positions: Array, history: History) -> Array: ...

    def logits(self, hidden: Array) -> Array: ...


class StepOutput(NamedTuple):
    """Leading axis: ranks (counters: devices)."""

    tokens: Array
    """int32 [ranks, batch] sampled after the last real token of each row."""
    logits: Array
    """float32 [ranks, batch, vocab] of that token; [ranks, batch, steps, vocab] of all when tracing."""
    counters: Array
    """int32 [devices, groups, len(Counters)]."""
    selected: tuple[Array, ...]
    """When tracing: selected positions [ranks, batch, steps, topk] of each group, EMPTY padded."""
    ranked: tuple[tuple[Array, Array], ...]
    """When capturing: positions and index scores [ranks, batch, depth] of each group, by rank at each row's last
    token, EMPTY padded."""
    overruled: tuple[Array, ...] = ()
    """When selections are driven: int32 [ranks] of each group, a sum over the picks that they replaced."""


class Runner:
    """Owns the stored history and the functions that change it.

    Batches and addresses have a leading axis of ranks, the state one of devices.
    """

    def __init__(
        self,
        model: nnx.Module,
        placement: Placement,
        spec: KVSpec,
        budget: Budget,
        mesh: Mesh,
        trace: bool = False,
        capture: float = 0.0,
        gather: Gather = "scores",
    ):
        parallel = placement.parallel
        if getattr(model, "parallel", parallel) != parallel:
            raise ValueError(
                f"model: expected it loaded for {parallel}, found {getattr(model, 'parallel', None)}; "
                "load it with the placement's Parallel"
            )
        if dict(mesh.shape) != {DP: parallel.dp, TP: parallel.tp}:
            raise ValueError(
                f"mesh: expected {parallel} as the placement has, found axes {dict(mesh.shape)}; make both of one "
                "Parallel"
            )
        self.placement, self.spec, self.mesh, self.trace = placement, spec, mesh, trace
        self.capacity = fitting(placement, spec, budget)
        self.ranks = self.capacity.ranks
        graph, self.params = nnx.split(model)
        self._by_rank = by_rank = P(DP)
        self._over = over = partial(jax.shard_map, mesh=mesh, check_vma=False)

        def init() -> KVState:
            size = self.capacity.addresses // placement.striping.devices
            groups = placement.init(spec, budget)
            keys = [spec.index_key.init(size) for _ in groups if spec.index_dim]
            return _expand(KVState(groups, tuple(keys)))

        make = over(init, in_specs=(), out_specs=P(DEVICES))
        # The same in every result: what was left to XLA would be another argument, and compile the step once more.
        self._shardings = _shardings(jax.eval_shape(make), mesh)
        self.state: KVState = memory.build(make, self._shardings)

        def on_device(resident: bool, params: Any, state: KVState, batch: Batch, sampling: Sampling):
            decoder: Any = nnx.merge(graph, params)
            batch, sampling = _squeeze(batch), _squeeze(sampling)
            history = History(spec, placement, _squeeze(state), batch, capture, resident, gather)
            hidden = decoder(batch.tokens, batch.positions, history)
            last = jnp.maximum(batch.count - 1, 0)
            if trace:
                logits = every = decoder.logits(hidden)
                final = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
            else:
                hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
                final = every = decoder.logits(hidden)[:, 0]
            tokens = sample(final, sampling, jnp.asarray(batch.start + batch.count))
            state, counters = history.finish()
            selected = tuple(history.selected[g] for g in sorted(history.selected)) if trace else ()
            ranked = tuple(history.ranked[g] for g in sorted(history.ranked)) if capture else ()
            overruled = tuple(history.overruled[g] for g in sorted(history.overruled))
            return _expand((tokens, every, selected, ranked, overruled)), counters[None], _expand(state)

        specs = nnx.get_partition_spec(self.params)

        def step(params: Any, state: KVState, batch: Batch, sampling: Sampling, resident: bool = False):
            return over(
                partial(on_device, resident),
                in_specs=(specs, P(DEVICES), by_rank, by_rank),
                out_specs=(by_rank, P(DEVICES), P(DEVICES)),
            )(params, state, batch, sampling)

        # Each of several processes reads what the host needs of all devices; logits stay where they are.
        read = memory.sharding(mesh, P()) if mesh.is_multi_process else None
        out = (read, read if trace else None, read, read, read)
        self.step_function = jax.jit(
            step, donate_argnums=1, static_argnames="resident", out_shardings=(out, read, self._shardings)
        )

        def release(state: KVState, addresses: Array) -> KVState:
            groups = tuple(placement.release(group, addresses) for group in state.groups)
            return KVState(groups, state.index_keys)

        self.release_function = self.compile(release)

    def compile(self, change: Callable[..., KVState]) -> Callable[..., KVState]:
        """Jit a change of the state by arrays with a leading axis of ranks. The state is donated; `change` sees one
        device's part of everything."""

        def on_device(state: KVState, arrays: tuple[Array, ...]) -> KVState:
            return _expand(change(_squeeze(state), *_squeeze(arrays)))

        over = self._over(on_device, in_specs=(P(DEVICES), self._by_rank), out_specs=P(DEVICES))
        return jax.jit(
            lambda state, *arrays: over(state, arrays), donate_argnums=0, out_shardings=self._shardings
        )

    def step(self, batch: Batch, sampling: Sampling, resident: bool = False) -> StepOutput:
        """Run one step; the state moves on. `resident`: every row is on the device and stays there
        (`Selection.resident`)."""
        (tokens, logits, selected, ranked, overruled), counters, self.state = self.step_function(
            self.params, self.state, batch, sampling, resident=resident
        )
        return StepOutput(tokens, logits, counters, selected, ranked, overruled)

    def release(self, addresses: np.ndarray) -> None:
        """Forget addresses, int32 [ranks, table_width * page_size], EMPTY padded."""
        self.state = self.release_function(self.state, addresses)


def _squeeze(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), tree)


def _expand(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.expand_dims(leaf, (0,)), tree)


def _shardings(state: KVState, mesh: Mesh) -> KVState:
    """Every leaf sharded over the devices; the lanes of `Group.host` in pinned host memory."""

    def place(path, leaf):
        host = any(getattr(key, "name", None) == "host" for key in path) and leaf.size
        return memory.sharding(mesh, P(DEVICES), host=bool(host))

    return jax.tree_util.tree_map_with_path(place, state)
