"""What tests/ula_jax/test_processes.py runs in one process and in several: few steps of small engines."""

import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from models import ModelConfig, init_model
from tests.ula_jax.engines import SMALL, Recorder, documents, make_engine
from ula_jax.parallel import Parallel, make_mesh
from ula_jax.placements import Ula
from ula_jax.policies import make_policy
from ula_jax.processes import Launch, agree, together
from ula_jax.scheduler import SamplingParams

DEVICES = 4
CASES = {
    "tp gpu_only": (260, 0),
    "tp hisparse": (260, 260),
    "tp ula": (8, 24),
    "dp hisparse": (50, 50),
    "dp ula": (20, 40),
}
"""Rows of each device and its host. Those of `ula` and of `hisparse` hold more history than fits their devices."""


@dataclass(frozen=True)
class Config:
    out: Path = Path()
    do: Literal["decode", "forever", "fail", "differ"] = "decode"
    cases: tuple[str, ...] = tuple(CASES)
    launch: Annotated[Launch, tyro.conf.OmitArgPrefixes] = Launch()


@cache
def model_of(mode):
    """Small selections, so that few rows are more than a device need hold; experts of every device in most sums."""
    changes = {"num_hidden_layers": 2, "index_topk": 4, "n_routed_experts": 8, "num_experts_per_tok": 6}
    config = ModelConfig.from_hub({**SMALL, **changes})
    parallel = Parallel.of(mode, DEVICES)
    return init_model(config, make_mesh(parallel), parallel, seed=3)


def engine_of(case):
    """Prompt and output are one compiled step."""
    mode, placement = case.split()
    model = model_of(mode)
    if placement == "ula":
        placement = Ula(model.parallel, make_policy("pb_lru"))
    requests = 2 if mode == "tp" else 1
    return make_engine(
        model, placement, *CASES[case], max_requests=requests, prefill_rows=requests, prefill_chunk=1,
        trace=True, max_context=48,
    )  # fmt: skip


def decode(case) -> dict:
    """Everything that the host learns of a case; the engine checks every step."""
    engine = engine_of(case)
    recorder = Recorder(engine)
    prompts = [document[: 22 + 3 * i] for i, document in enumerate(documents(2, 40))]
    ids = [engine.submit(p, SamplingParams(6 + i, temperature=float(i % 2), seed=i)) for i, p in enumerate(prompts)]
    fullest = engine.residency()
    while engine.busy:
        engine.step()
        fullest = max(fullest, engine.residency(), key=lambda found: found.stored)
    return {
        "tokens": [engine.requests[i].output for i in ids],
        "logits": [recorder.stacked(i).tobytes().hex() for i in ids],
        "rows": {phase: totals.rows.tolist() for phase, totals in engine.totals.items()},
        "evictions": engine.totals["decode"].count("evictions") + engine.totals["prefill"].count("evictions"),
        "residency": [fullest.distinct, fullest.stored],
        "compiled": engine.runner.step_function._cache_size(),
    }


def forever() -> None:
    engine = engine_of("tp gpu_only")
    started = time.monotonic()
    while time.monotonic() - started < 300:
        list(engine.stream(documents(1, 8)[0], SamplingParams(8)))
        print("ready", flush=True)


def main() -> None:
    config = tyro.cli(Config)
    with together(config.launch):
        process = config.launch.process
        if config.do == "decode":
            result = {case: decode(case) for case in config.cases}
            (config.out / f"{process}.json").write_text(json.dumps(result))
        elif config.do == "differ":
            agree("prompts", jax.process_index())
        elif config.do == "fail" and process == 1:
            raise ValueError("no reason")
        else:
            forever()


if __name__ == "__main__":
    main()
