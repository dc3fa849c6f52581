"""Steps of a small IndexShare model over eight devices, compiled for H200s."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import ModelConfig, abstract_model
from tests.aot.h200 import compile_step
from tests.aot.hlo import Program, Shape
from ula_jax import links
from ula_jax.history import Batch
from ula_jax.index_keys import Gather
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import make_placement
from ula_jax.rows import FormatName
from ula_jax.runner import Runner
from ula_jax.sampling import Sampling
from ula_jax.spec import Budget, KVSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "oracle" / "glm_moe_dsa_share"
DEVICES = 8
DEVICE_SLOTS, HOST_SLOTS = 8_000, 16_000
"""About what the budget buys: one layer of a pool is then larger than all else that a step holds."""
PHASES = {"decode": (4, 1), "prefill": (1, 16)}
"""Requests of a rank, and tokens of each."""


@dataclass(frozen=True)
class Step:
    """A compiled step and what it ought to look like."""

    runner: Runner
    spec: KVSpec
    config: ModelConfig
    phase: str
    program: Program
    temporary: int
    """Bytes on the device or the host that are neither argument nor result, and may hold copies unseen in the HLO."""
    gather: Gather = "scores"

    @property
    def pools(self) -> list[Shape]:
        """All stored rows and index keys of one device."""
        state = self.runner.state
        stored = [lane for keys in state.index_keys for lane in keys]
        for group in state.groups:
            stored += [*group.device, *group.host]
            stored += group.buffer.device if group.buffer else ()
        return [_local(pool) for pool in stored if pool.size]

    @property
    def sizes(self) -> set[tuple[str, int]]:
        """(dtype, elements) of each pool, of one layer of it, and of the maps."""
        keys = {(s.dtype, s.size) for s in self.pools}
        mapping = self.runner.state.groups[0].mapping
        keys |= {("s32", table[0].size) for table in (mapping.location, mapping.device_address) if table[0].size}
        return keys | {(s.dtype, s.size // _layers(s)) for s in self.pools if len(s.dims) == 4}

    @property
    def limit(self) -> int:
        """Bytes of the smallest pool layer that holds latents, or of the smallest index keys."""
        words = self.spec.row.lanes[0]
        layers = [s.nbytes // _layers(s) for s in self.pools if len(s.dims) == 4 and s.dims[-1] == words]
        return min(layers + [s.nbytes for s in self.pools if len(s.dims) == 3])

    @property
    def expected_collectives(self) -> Counter[tuple[str, int]]:
        """(kind, bytes of the result): what the parallel model and the placement have to say to each other."""
        placement, config, spec = self.runner.placement, self.config, self.spec
        batch, steps = PHASES[self.phase]
        tokens = batch * steps
        hidden, layers = 4 * config.hidden_size, config.num_layers
        found: Counter[tuple[str, int]] = Counter()
        parallel = placement.parallel
        if parallel.tp > 1:
            found["all-reduce", tokens * hidden] += 2 * layers  # attention output; MLP or experts
            found["all-gather", batch * 4 * config.vocab_size] += 1  # logits
        if parallel.dp > 1:
            experts = sum(config.sparse_layers)
            found["all-gather", parallel.dp * tokens * hidden] += experts  # tokens of all devices, to their experts
            found["all-gather", parallel.dp * tokens * 4 * config.num_experts] += experts  # and their gates
            found["reduce-scatter", tokens * hidden] += experts
        for one in links.collectives(placement, spec, tokens, config.num_heads, self.gather):
            found[one.kind, one.nbytes] += one.count
        return found


@cache
def compiled(name: str, mode: str, phase: str, rows: FormatName = "fp32", gather: Gather = "scores") -> Step:
    """The step of a placement on eight H200s."""
    runner, spec, config = _runner(name, mode, rows, gather)
    executable = compile_step(runner.step_function, runner.params, runner.state, *_batch(runner, spec, phase),
                              devices=DEVICES)  # fmt: skip
    return Step(runner, spec, config, phase, *read(executable), gather)


@cache
def compiled_release(name: str, mode: str) -> Step:
    """Likewise the function that forgets a request."""
    runner, spec, config = _runner(name, mode, "fp32", "scores")
    addresses = np.zeros((runner.ranks, spec.table_width * spec.page_size), np.int32)
    executable = compile_step(runner.release_function, runner.state, addresses, devices=DEVICES)
    return Step(runner, spec, config, "release", *read(executable))


def _runner(name: str, mode: str, rows: FormatName, gather: Gather) -> tuple[Runner, KVSpec, ModelConfig]:
    # Cut to one layer with a dense MLP, and two with experts that share a selection.
    config = ModelConfig.from_hub(
        GOLDEN, num_layers=3, sparse_layers=(False, True, True), full_layers=(True, True, False)
    )
    parallel = Parallel.of(mode, DEVICES)
    mesh = make_mesh(parallel)
    spec = KVSpec.of(config, rows=rows, max_context=512)
    keys = (DEVICE_SLOTS + HOST_SLOTS) * spec.index_bytes
    budget = Budget(DEVICE_SLOTS * spec.row_bytes + keys, HOST_SLOTS * spec.row_bytes)
    model = abstract_model(config, mesh, parallel)
    return Runner(model, make_placement(name, parallel), spec, budget, mesh, gather=gather), spec, config


def _batch(runner: Runner, spec: KVSpec, phase: str) -> tuple[Batch, Sampling]:
    batch, steps = PHASES[phase]

    def numbers(*shape: int) -> np.ndarray:
        return np.zeros((runner.ranks, batch, *shape), np.int32)

    step = Batch(numbers(steps), numbers(), numbers(), numbers(spec.table_width), numbers())
    return step, Sampling(np.zeros((runner.ranks, batch), np.float32), numbers())


def read(executable: Any) -> tuple[Program, int]:
    """Its program, and the bytes of temporary memory (of the device or the host, whichever are more)."""
    memory = executable.get_compiled_memory_stats()
    program = Program(executable.hlo_modules()[0].to_string())
    return program, max(memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)


def _layers(pool: Shape) -> int:
    return pool.dims[2] if pool.host else pool.dims[1]


def _local(pool: jax.Array) -> Shape:
    """One device's part, as HLO names it."""
    dtype = {"uint32": "u32", "float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn"}[str(pool.dtype)]
    return Shape(dtype, (1, *pool.shape[1:]), pool.sharding.memory_kind == "pinned_host")
