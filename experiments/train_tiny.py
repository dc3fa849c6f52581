"""Train the tiny byte-level GLM that ships in models/tiny, on Python's own library, by DeepSeek's DSA recipe.

Dense first (a shorter context, then a long one), then the indexers alone imitate the frozen dense attention, then
everything adapts to attention over the indexers' top-k. The same command continues a run that was stopped.
"""

import collections
import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro

from experiments.model_card import write_card
from experiments.python_corpus import Corpus, draw_windows, held_out_windows, python_corpus
from experiments.trainer import Rates, Stage, Trainer, mean
from models import TINY, ModelConfig, save_checkpoint
from models.training import Attention, Kernel
from ula_jax.report import UserError, environment, or_exit, progress_bar, report, stderr

HUB = dict(
    model_type="glm_moe_dsa", vocab_size=256, hidden_size=192, num_hidden_layers=8, num_attention_heads=8,
    q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, intermediate_size=384,
    moe_intermediate_size=96, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
    norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=3, rms_norm_eps=1e-5, rope_theta=1e5,
    index_topk=128, index_head_dim=32, index_n_heads=8, index_topk_freq=4, index_skip_topk_offset=3,
    indexer_rope_interleave=True, num_nextn_predict_layers=1, max_position_embeddings=16384,
)  # fmt: skip
"""GLM-5.3's shape made small. The latent norms' eps is the default of this project and of transformers, 1e-6."""

SMOKE_HUB = HUB | dict(
    hidden_size=32, num_hidden_layers=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, intermediate_size=32, moe_intermediate_size=16, first_k_dense_replace=1, index_topk=8,
    index_head_dim=8, indexer_types=["full", "shared"],
)  # fmt: skip


COMPILE_SECONDS = 75.0
"""A stage is not begun with less time left: its program could not be compiled and used."""


@dataclass(frozen=True)
class Config:
    """Contexts, batches and steps; by default those of the model that ships, about 17 minutes of one H200."""

    out: Path = TINY
    """Hub directory to write when training is complete."""
    state: Path = Path("results/train_tiny")
    """Where training state and log survive between calls."""
    results: Path = Path("results")
    note: str = ""
    """What else the model card should say of this run."""
    stop_after: float | None = None
    """Seconds after which to save and leave; None: run to the end."""
    evaluate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only evaluate the model in --out, whoever wrote it."""
    probe: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only time a few steps of every stage with every attention kernel."""
    dense_steps: int = 1100
    dense_context: int = 2048
    long_steps: int = 110
    """Dense at the full context."""
    warm_steps: int = 160
    """Indexers alone."""
    sparse_steps: int = 200
    context: int = 8192
    batch_tokens: int = 65536
    """Bytes of a step of the dense stages."""
    sparse_batch_tokens: int = 65536
    """Bytes of a step once indexers take part."""
    dense_kernel: Kernel | None = None
    """None: cudnn on a GPU."""
    sparse_kernel: Kernel | None = None
    learning_rate: float = 2e-3
    """Peak; the stages' schedules are multiples of it."""
    weight_decay: float = 0.1
    draft_weight: float = 0.3
    """Of the MTP layer's loss."""
    balance_rate: float = 2e-3
    """Step of the routers' bias at the peak learning rate; falls with it."""
    held_out: int = 32
    """Windows that are evaluated at most."""
    log_every: float = 20.0
    """Seconds between lines of the log."""
    save_every: float = 150.0
    seed: int = 0
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A much smaller model for a few steps; writes nothing to models/tiny."""


def make_trainer(config: Config) -> Trainer:
    hub = config.out if config.evaluate else SMOKE_HUB if config.smoke else HUB
    rates = Rates(config.learning_rate, config.weight_decay, config.draft_weight, config.balance_rate)
    return Trainer(ModelConfig.from_hub(hub), rates)


def stages(config: Config) -> tuple[Stage, ...]:
    gpu = jax.default_backend() == "gpu"
    kernel = config.dense_kernel or ("cudnn" if gpu else "chunked")
    sparse = config.sparse_kernel or kernel
    short, long = config.dense_context, config.context
    dense = Attention(dense_kernel=kernel, sparse_kernel=sparse, segments=4 if short >= 1024 else 1)
    imitating = dataclasses.replace(dense, imitate=True)
    if min(config.batch_tokens, config.sparse_batch_tokens) < long:
        raise UserError(
            f"batch: expected at least one sequence of {long} bytes a step, found {config.batch_tokens} and "
            f"{config.sparse_batch_tokens} bytes; raise --batch-tokens and --sparse-batch-tokens"
        )
    batch, late = config.batch_tokens, config.sparse_batch_tokens
    return (
        Stage("dense", config.dense_steps, short, batch // short, dense, (1.0, 0.25), None, config.dense_steps // 30),
        Stage("long", config.long_steps, long, batch // long, dense, (0.25, 0.05), None, 0),
        Stage("warm", config.warm_steps, long, late // long, imitating, None, (1.0, 0.5), config.warm_steps // 10),
        Stage(
            "sparse", config.sparse_steps, long, late // long, dataclasses.replace(imitating, sparse=True),
            (0.15, 0.01), (0.5, 0.05), config.sparse_steps // 30,
        ),
    )  # fmt: skip


def run(config: Config) -> dict[str, Any]:
    """Train until done or out of time; the result says which, and how good the model is."""
    started = time.monotonic()
    deadline = started + config.stop_after if config.stop_after else math.inf
    if config.smoke:
        config = smoke(config)
    corpus = python_corpus(400_000 if config.smoke else None)
    trainer, plan = make_trainer(config), stages(config)
    stderr.print(f"{len(corpus.train):,} bytes in {corpus.documents} documents; {trainer.size:,} parameters")
    if config.probe:
        return {"probe": probe(config, trainer, plan, corpus, deadline), **environment()}
    if config.evaluate:
        judged = evaluate(config, trainer, plan, corpus, trainer.load(config.out))
        return {"model": str(config.out), **judged, **environment(), "seconds": time.monotonic() - started}
    with Files(config) as files:
        state = train(config, trainer, plan, corpus, files, deadline)
        done, total = int(state["step"]), sum(stage.steps for stage in plan)
        result: dict[str, Any] = {"steps": done, "total_steps": total, "finished": done == total, **environment()}
        if done == total:
            result |= evaluate(config, trainer, plan, corpus, state["parameters"])
            result |= {"parameters": trainer.size, "train_bytes": len(corpus.train), "documents": corpus.documents}
            result |= {"log": files.log}
            save_checkpoint(trainer.model(state["parameters"], jnp.bfloat16), config.out)
            write_card(config.out, trainer.model_config, result, plan, config.note)
        return {**result, "seconds": time.monotonic() - started}


def smoke(config: Config) -> Config:
    changes: dict[str, Any] = dict(
        dense_steps=30, long_steps=4, warm_steps=4, sparse_steps=4, dense_context=64, context=64, batch_tokens=256,
        sparse_batch_tokens=128, held_out=4,
    )  # fmt: skip
    for name in ("out", "state"):  # the shipped model and a real run stay as they are
        if getattr(config, name) == getattr(Config(), name):
            changes[name] = config.results / f"smoke_{name}"
    return dataclasses.replace(config, **changes)


def train(
    config: Config, trainer: Trainer, plan: tuple[Stage, ...], corpus: Corpus, files: "Files", deadline: float
) -> dict[str, Any]:
    """Every step that is left, or until the deadline; the state that it returns is saved."""
    state = files.restore(trainer.initial(config.seed))
    began = done = int(state["step"])
    first = 0
    with progress_bar("steps") as progress:
        for stage in plan:
            last = first + stage.steps
            if done < last:
                if done > began and time.monotonic() > deadline - COMPILE_SECONDS:
                    return state
                bar = progress.add_task(stage.name, total=stage.steps, completed=done - first)
                step = trainer.step(stage.attention, stage.trained)
                held = held_out_windows(corpus, stage.context, config.held_out)
                held = held[: max(1, len(held) // stage.batch) * stage.batch]
                groups = [held[i : i + stage.batch] for i in range(0, len(held), stage.batch)]
                waiting: collections.deque[Any] = collections.deque()
                mark, mark_step, saved = time.monotonic(), done, time.monotonic()
                while done < last:
                    windows = draw_windows(corpus, config.seed, done, stage.batch, stage.context + 2)
                    state, metrics = step(state, windows, stage.control(done - first))
                    done += 1
                    waiting.append(metrics)
                    if len(waiting) > 2:  # stay two steps ahead of the device and no more, or the clock means nothing
                        jax.block_until_ready(waiting.popleft())
                    now = time.monotonic()
                    if done == last or now - mark > config.log_every or now > deadline:
                        # A step whose new state is dropped is an evaluation that needs no program of its own.
                        chosen = groups if done == last else groups[:1]
                        held_metrics = mean([step(state, group, stage.control(0))[1] for group in chosen])
                        rate = (done - mark_step) * stage.batch * stage.context / (time.monotonic() - mark)
                        files.note(stage, done, last, mean([metrics]), held_metrics, rate)
                        progress.update(bar, completed=done - first)
                        mark, mark_step = time.monotonic(), done
                    if now > deadline:
                        files.save(state, done)
                        return state
                    if now - saved > config.save_every:
                        files.save(state, done)
                        saved = now
                files.save(state, done)
            first = last
    return state


def evaluate(
    config: Config, trainer: Trainer, plan: tuple[Stage, ...], corpus: Corpus, parameters: dict[str, Any]
) -> dict[str, Any]:
    """bits/byte and accepted drafts on the held-out modules at the full context, dense and sparse."""
    windows = held_out_windows(corpus, config.context, config.held_out)
    found: dict[str, Any] = {"held_out_windows": len(windows), "context": config.context}
    for name, sparse in (("dense", False), ("sparse", True)):
        attention = dataclasses.replace(plan[-1].attention, sparse=sparse, imitate=False)
        evaluator = trainer.evaluator(attention)
        # One window a call: all calls then have one shape, whatever the number of windows.
        metrics = mean([evaluator(parameters, window[None]) for window in windows])
        found |= {f"bits_per_byte_{name}": metrics["language"], f"accepted_drafts_{name}": metrics["accepted"]}
        stderr.print(f"{name}: {metrics['language']:.4f} bits/byte, drafts {metrics['accepted']:.1%}")
    return found


def probe(
    config: Config, trainer: Trainer, plan: tuple[Stage, ...], corpus: Corpus, deadline: float
) -> list[dict[str, Any]]:
    """Seconds to compile and milliseconds a step by stage and kernel; a kernel that fails says why.

    A stage whose cuDNN form works is not timed with the other, but for the sparse one, where either may be faster.
    """
    rows: list[dict[str, Any]] = []
    kernels: tuple[Kernel, ...] = ("cudnn", "chunked") if jax.default_backend() == "gpu" else ("chunked",)
    state = trainer.initial(config.seed)
    # The sparse stage is the least certain and comes first.
    for stage in sorted(plan, key=lambda stage: not stage.attention.sparse):
        for kernel in kernels:
            if time.monotonic() > deadline:
                return rows
            attention = dataclasses.replace(stage.attention, dense_kernel=kernel, sparse_kernel=kernel)
            windows = draw_windows(corpus, 0, 0, stage.batch, stage.context + 2)
            row: dict[str, Any] = {"stage": stage.name, "kernel": kernel, "shape": [stage.batch, stage.context]}
            rows.append(row)
            try:
                clock = time.monotonic()
                step = trainer.step(attention, stage.trained)
                jax.block_until_ready(step(state, windows, stage.control(0)))
                row["compile_s"] = round(time.monotonic() - clock, 1)
                clock = time.monotonic()
                jax.block_until_ready([step(state, windows, stage.control(0))[1] for _ in range(4)])
                seconds = (time.monotonic() - clock) / 4
                row |= {"ms_per_step": round(seconds * 1e3, 1), "bytes_per_s": round(windows.size / seconds)}
                row["peak_gb"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
            except Exception as wrong:
                row["failed"] = str(wrong)[:400]
            stderr.print(json.dumps(row), soft_wrap=True, highlight=False)
            if "failed" not in row and not stage.attention.sparse:
                break
    return rows


class Files:
    """What survives between calls: the newest state, the log, and the recipe that they belong to."""

    def __init__(self, config: Config):
        self.folder = config.state.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        recipe = json.loads(json.dumps(_recipe(config)))
        file = self.folder / "recipe.json"
        if file.is_file() and json.loads(file.read_text()) != recipe:
            raise UserError(
                f"{file}: expected the settings of this call, found others; continue with those that began the run, "
                "or give another --state"
            )
        file.write_text(json.dumps(recipe))
        self.log: list[dict[str, Any]] = []
        self.manager = ocp.CheckpointManager(self.folder / "steps", options=ocp.CheckpointManagerOptions(max_to_keep=1))

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def restore(self, state: dict[str, Any]) -> dict[str, Any]:
        """The newest saved state, or the one given."""
        newest = self.manager.latest_step()
        if newest is None:
            return state
        file = self.folder / "log.json"
        self.log = [row for row in json.loads(file.read_text()) if row["step"] <= newest] if file.is_file() else []
        stderr.print(f"continuing after step {newest}")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return dict(self.manager.restore(newest, args=ocp.args.StandardRestore(shapes)))

    def save(self, state: dict[str, Any], step: int) -> None:
        if self.manager.latest_step() != step:
            self.manager.save(step, args=ocp.args.StandardSave(state))
            self.manager.wait_until_finished()

    def note(self, stage: Stage, step: int, last: int, metrics: Any, held: Any, tokens_per_s: float) -> None:
        """One line of the log, on stderr too: a captured pipe shows no progress bar."""
        row = {"stage": stage.name, "step": step, "stage_end": step == last, "tokens_per_s": round(tokens_per_s)}
        self.log.append(row | {"train": metrics, "held_out": held})
        (self.folder / "log.json").write_text(json.dumps(self.log))
        stderr.print(
            f"{stage.name} {step}/{last}: train {metrics['language']:.3f} held-out {held['language']:.3f} bits/byte, "
            f"MTP {held['draft']:.3f}, drafts {held['accepted']:.1%}, KL {np.round(held['kl'], 3).tolist()}, "
            f"load {metrics['load']:.2f}, {tokens_per_s:,.0f} bytes/s",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def _recipe(config: Config) -> dict[str, Any]:
    """The settings that decide the result."""
    free = {"out", "state", "results", "stop_after", "note", "evaluate", "probe", "held_out", "log_every", "save_every"}
    return {key: value for key, value in vars(config).items() if key not in free}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    # Four programs take minutes to compile; a call that continues finds them.
    jax.config.update("jax_compilation_cache_dir", str(config.results.absolute() / "xla_cache"))
    result = or_exit(run, config)
    kind = "_evaluation" if config.evaluate else "_probe" if config.probe else ""
    report(result, config.results, f"train_tiny{kind}")


if __name__ == "__main__":
    main()
