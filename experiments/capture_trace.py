"""Capture a selection trace: decode documents with the shipped model and record what every step selects, and scores.

The trace does not depend on the placement or its budget (no placement may change what is selected), so everything stays
on the devices here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.documents import read_documents
from experiments.python_corpus import held_out_files
from models import TINY, load_checkpoint
from ula_jax.engine import Engine, EngineConfig
from ula_jax.parallel import Mode, Parallel, force_cpu_devices, make_mesh
from ula_jax.placements import make_placement
from ula_jax.report import UserError, environment, or_exit, progress_bar, report
from ula_jax.scheduler import SamplingParams
from ula_jax.spec import Budget, KVSpec
from ula_jax.traces import Recorder, save
from ula_jax.traces.statistics import summary


@dataclass(frozen=True)
class Config:
    """Every document is one request; all are decoded at once."""

    model: Path = TINY
    """Hub directory of a byte-level model."""
    documents: tuple[Path, ...] = ()
    """Files to continue; empty: the modules of Python's library that the shipped model was not trained on."""
    requests: int = 4
    prompt: int = 4096
    """Bytes of each prompt."""
    new_tokens: int = 513
    """Tokens to decode; the first comes with the prompt, every other is a round of the trace."""
    depth: float = 4.0
    """Ranks to keep, in units of the model's topk."""
    mode: Mode = "tp"
    devices: int = 1
    temperature: float = 0.8
    """Greedy decoding of a small model ends in a loop; a trace of a loop shows nothing."""
    seed: int = 0
    trace: Path = Path("results/trace.parquet")
    out: Path = Path("results")
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A short run: two documents of 512 bytes, 16 rounds."""


def run(config: Config) -> dict[str, Any]:
    """Decode, write the trace, and return its statistics."""
    if config.smoke:
        config = Config(**{**vars(config), "requests": 2, "prompt": 512, "new_tokens": 17, "smoke": False})
    if config.new_tokens < 3:
        raise UserError(f"new_tokens: expected at least 3 (two rounds), found {config.new_tokens}; decode more")
    parallel = Parallel.of(config.mode, config.devices)
    mesh = make_mesh(parallel)
    model = load_checkpoint(config.model, mesh, parallel)
    documents = config.documents or held_out_files()
    prompts = read_documents(documents, config.prompt, config.requests)
    spec = KVSpec.of(model.config, max_context=config.prompt + config.new_tokens)
    seats = -(-config.requests // parallel.dp)
    bytes_needed = seats * spec.table_width * spec.page_size * (spec.row_bytes + spec.index_bytes)
    engine = Engine(
        model,
        make_placement("gpu_only", parallel),
        spec,
        Budget(bytes_needed),
        mesh,
        EngineConfig(max_requests=seats, prefill_rows=seats, prefill_chunk=64, capture=config.depth),
        vocab_size=model.config.vocab_size,
    )
    recorder = Recorder(engine)
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(config.new_tokens, config.temperature, seed=config.seed + number))
    with progress_bar("tokens") as progress:
        task = progress.add_task("capture", total=config.requests * (config.prompt + config.new_tokens - 1))
        while engine.busy:
            engine.step()
            progress.update(task, completed=sum(total.tokens for total in engine.totals.values()))
    about = environment()
    settings = {key: str(value) for key, value in vars(config).items()}
    trace = recorder.trace(source=f"selections of {config.model.name}", settings=settings, **about)
    save(trace, config.trace)
    return {**summary(trace), "trace": str(config.trace), "bytes": config.trace.stat().st_size, **about}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    force_cpu_devices(config.devices)
    result = or_exit(run, config)
    report(result, config.out, "capture_trace")


if __name__ == "__main__":
    main()
