"""Models of the golden checkpoints, run as a whole or by a layer; tests of a session share the results."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from models import load_checkpoint
from models.layers import rope_angles
from tests.models.naive_history import NaiveHistory
from ula_jax.parallel import DP, Parallel, make_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "oracle"
FAMILIES = ("glm_moe_dsa", "glm_moe_dsa_share", "deepseek_v32", "deepseek_v3", "deepseek_v2")
SPARSE = FAMILIES[:3]
TOLERANCE = 2e-5


@functools.cache
def oracle(family):
    with np.load(GOLDEN / family / "oracle.npz") as stored:
        return {name: stored[name] for name in stored.files}


def load(family, mode="tp", size=1, **changes):
    """(model, mesh) of a golden checkpoint, with its MTP layer where it has one."""
    return _load(family, mode, size, **changes)


@functools.cache
def _load(family, mode, size, **changes):
    parallel, mtp = Parallel.of(mode, size), family != "deepseek_v2"
    mesh = make_mesh(parallel)
    return load_checkpoint(GOLDEN / family, mesh, parallel, mtp=mtp, **changes), mesh


def compiled(model, mesh, body, optimize=False):
    """`body(model, *arrays)` inside shard_map; arrays and results are divided by requests under DP.

    Compiling takes nearly all of the time of these tests, and LLVM's optimisations half of that.
    """
    graphdef, state = nnx.split(model)
    batch = P(DP) if mesh.shape[DP] > 1 else P()

    def local(state, arrays):
        return body(nnx.merge(graphdef, state), *arrays)

    specs = (nnx.get_partition_spec(state), batch)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=batch, check_vma=False)
    function = jax.jit(mapped, compiler_options={} if optimize else {"xla_backend_optimization_level": 0})
    return lambda *arrays: jax.tree.map(np.asarray, function(state, arrays))


@functools.cache
def _forward(model, mesh):
    def body(model, tokens, positions, valid):
        history = NaiveHistory(model.config, positions, valid=valid)
        hidden = model(tokens, positions, history)
        found = dict(hidden=hidden, logits=model.logits(hidden), rows=history.rows, keys=history.keys)
        found |= dict(selected=history.selected, scores=history.scores)
        if model.mtp is not None:
            drafting = NaiveHistory(model.config, positions[:, 1:], valid=valid[:, 1:])
            drafted = model.draft(tokens[:, 1:], hidden[:, :-1], positions[:, 1:], drafting)
            found |= dict(mtp_hidden=drafted, mtp_logits=model.logits(drafted), mtp_rows=drafting.rows)
        return found

    return compiled(model, mesh, body, optimize=model.parallel.size == 1)


def forward(model, mesh, tokens, positions=None, valid=None):
    """Everything that one full forward computes, and the MTP layer's draft of the same tokens."""
    tokens = np.asarray(tokens, np.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    if valid is None:
        valid = np.ones(tokens.shape, bool)
    return SimpleNamespace(**_forward(model, mesh)(tokens, positions, valid))


def golden_forward(family, mode="tp", size=1):
    """The full forward of a golden prompt. Under DP the two requests are repeated until every device has one."""
    return _golden_forward(family, mode, size)


@functools.cache
def _golden_forward(family, mode, size):
    repeats = max(size // 2, 1) if mode == "dp" else 1
    return forward(*load(family, mode, size), np.tile(oracle(family)["input_ids"], (repeats, 1)))


def run_layer(family, layer, *, tokens=48, changes=None, fresh=False, **options):
    """One layer on the golden hidden state that enters it: (hidden, history), on one device.

    `changes` to the config and `options` of the history break something on purpose; `fresh` sees patched code.
    """
    if not (changes or options or fresh):
        return _right_layer(family, layer, tokens)
    return _run_layer(family, layer, tokens, changes or {}, options)


@functools.cache
def _right_layer(family, layer, tokens):
    return _run_layer(family, layer, tokens, {}, {})


def _run_layer(family, layer, tokens, changes, options):
    model, mesh = load(family, **changes)
    expected = oracle(family)
    ids = expected["input_ids"][:, :tokens]

    def body(decoder_layer, hidden):
        config = decoder_layer.config
        positions = jnp.broadcast_to(jnp.arange(hidden.shape[1], dtype=jnp.int32), hidden.shape[:2])
        history = NaiveHistory(config, positions, **options)
        if not config.has_indexer:
            history.select_all(0)  # as layer 0 would have
        angles = rope_angles(config.rope, config.qk_rope_head_dim, positions)
        hidden = decoder_layer(hidden, angles, history)
        return hidden, {name: getattr(history, name) for name in ("rows", "keys", "scores", "selected")}

    entering = expected[f"hidden_{layer}"] if layer else embeddings(family)[ids]
    entering = entering[:, :tokens].astype(model.embed_tokens.dtype)
    hidden, kept = compiled(model.layers[layer], mesh, body)(entering)
    return hidden, SimpleNamespace(**kept)


def embeddings(family):
    return np.asarray(load(family)[0].embed_tokens[...])


def picked(mask):
    """Masks [B, S, T] as lists of sets."""
    return [[set(np.flatnonzero(row)) for row in request] for request in mask]


def oracle_picks(family, layer):
    """The oracle's selections of a layer, without the future positions that fill short rows."""
    indices = oracle(family)[f"topk/model.layers.{layer}.self_attn.indexer"]
    return [[{i for i in row if i <= t} for t, row in enumerate(request)] for request in indices.tolist()]


def worst(found, expected):
    """Largest absolute difference."""
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max())
