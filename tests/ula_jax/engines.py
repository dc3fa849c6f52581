"""Engines over small models, shared by the engine, parity and bit-identity tests."""

from functools import cache
from pathlib import Path

import numpy as np

from models import ModelConfig, init_model, load_checkpoint
from ula_jax.engine import Engine, EngineConfig
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import make_placement
from ula_jax.scheduler import SamplingParams
from ula_jax.spec import Budget, KVSpec

ORACLE = Path(__file__).parents[1] / "golden" / "oracle"

SMALL = dict(
    model_type="glm_moe_dsa", vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, intermediate_size=48,
    moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
    norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1, rms_norm_eps=1e-5, rope_theta=1e4,
    index_topk=16, index_head_dim=16, index_n_heads=8, index_topk_freq=4, index_skip_topk_offset=2,
)  # fmt: skip
"""Three layers in two groups: {0}, {1, 2}; the last two with experts."""


@cache
def small_model(mode: str, devices: int):
    parallel = Parallel.of(mode, devices)
    return init_model(ModelConfig.from_hub(SMALL), make_mesh(parallel), parallel, seed=3)


@cache
def oracle_model(family: str, mode: str, devices: int):
    parallel = Parallel.of(mode, devices)
    return load_checkpoint(ORACLE / family, make_mesh(parallel), parallel)


def make_engine(
    model, placement, device_rows: int, host_rows: int, *, rows="fp32", page_size=8, max_context=64,
    max_requests=2, prefill_rows=1, prefill_chunk=8, trace=False, verify=True, capture=0.0, fast_path=False,
    gather="scores", **parameters,
) -> Engine:  # fmt: skip
    """An engine whose budget is worth so many rows with their index keys on, and rows beside, each device.

    `placement` is a registered name, made with `parameters`, or a placement.
    """
    parallel = model.parallel
    spec = KVSpec.of(model.config, rows=rows, page_size=page_size, max_context=max_context)
    budget = Budget(device_rows * (spec.row_bytes + spec.index_bytes), host_rows * spec.row_bytes)
    if isinstance(placement, str):
        placement = make_placement(placement, parallel, **parameters)
    return Engine(
        model, placement, spec, budget, make_mesh(parallel),
        EngineConfig(max_requests, prefill_rows, prefill_chunk, trace, verify, capture, fast_path, gather),
        model.config.vocab_size,
    )  # fmt: skip


class Recorder:
    """Keeps every computed position's logits and selections of a tracing engine, by request."""

    def __init__(self, engine: Engine):
        self.logits: dict[int, dict[int, np.ndarray]] = {}
        self.selected: dict[int, dict[int, list[set[int]]]] = {}
        engine.on_step = self

    def __call__(self, rows, batch, output):
        logits, selected = np.asarray(output.logits), [np.asarray(s) for s in output.selected]
        for rank, row in enumerate(rows):
            for request, count in row:
                place = int(np.flatnonzero(batch.requests[rank] == request.number)[0])
                for step in range(count):
                    position = request.computed + step
                    self.logits.setdefault(request.id, {})[position] = logits[rank, place, step]
                    self.selected.setdefault(request.id, {})[position] = [
                        set(s[rank, place, step].tolist()) - {-1} for s in selected
                    ]

    def stacked(self, request: int) -> np.ndarray:
        """[positions, vocab]; every position exactly once."""
        found = self.logits[request]
        assert sorted(found) == list(range(len(found)))
        return np.stack([found[position] for position in range(len(found))])


def documents(count: int, length: int, vocab: int = 64, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)
