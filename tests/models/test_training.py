"""Training's history against a naive one, the losses against numpy, and who learns from which."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import ModelConfig, init_model
from models.training import Attention, TrainingHistory, balanced, kl_divergence, losses, top_k_mask
from tests.models.naive_history import NaiveHistory
from tests.models.running import GOLDEN, compiled, worst
from ula_jax.parallel import Parallel, make_mesh

LENGTH, TOPK, SCALE = 32, 6, 0.2
CONFIG = dataclasses.replace(ModelConfig.from_hub(GOLDEN / "glm_moe_dsa"), index_topk=TOPK)
SMALL = dict(
    model_type="glm_moe_dsa", vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, intermediate_size=16, moe_intermediate_size=8,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=2.5, first_k_dense_replace=1, rms_norm_eps=1e-5, rope_theta=1e4, index_topk=TOPK,
    index_head_dim=8, index_n_heads=2, indexer_types=["full", "shared"], num_nextn_predict_layers=1,
)  # fmt: skip
WHOLE = Attention(segments=1, imitate_every=4)
PARTS = Attention(segments=2, chunk=4, imitate_every=4)


@functools.cache
def drawn():
    """(query, weights, key) of an indexer, then (query, row) of two layers."""
    rng = np.random.default_rng(0)
    latent, heads, dim = CONFIG.row_dim, CONFIG.index_num_heads, CONFIG.index_head_dim
    shapes = [(2, LENGTH, heads, dim), (2, LENGTH, heads), (2, LENGTH, dim)]
    shapes += [(2, LENGTH, 3, latent), (2, LENGTH, latent)] * 2
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def run(make, sparse):
    """One layer: (mixed, gradients of a weighted sum of it, the history's selections or None)."""

    def mix(*arrays):
        history = make()
        history.select(0, *arrays[:3])
        if not sparse and isinstance(history, NaiveHistory):
            history.select_all(0)
        return history.attend(0, arrays[3], arrays[4], SCALE), history.selected.get(0)

    def whole(*arrays):
        mixed, pull, selected = jax.vjp(mix, *arrays, has_aux=True)
        return mixed, pull(jnp.cos(jnp.arange(mixed.size, dtype=jnp.float32)).reshape(mixed.shape)), selected

    return jax.tree.map(np.asarray, jax.jit(whole)(*drawn()[:5]))


def naive():
    return NaiveHistory(CONFIG, jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_history_with_gradients_computes_what_a_naive_one_does(sparse):
    expected, pulled, selected = run(naive, sparse)
    for attention in (WHOLE, PARTS):
        attention = dataclasses.replace(attention, sparse=sparse)
        mixed, gradients, chosen = run(lambda attention=attention: TrainingHistory(CONFIG, attention), sparse)
        assert worst(mixed, expected) < 1e-5
        for gradient, other in zip(gradients[3:], pulled[3:], strict=True):
            assert worst(gradient, other) < 1e-5
        assert not any(gradient.any() for gradient in gradients[:3])
        if sparse:
            np.testing.assert_array_equal(chosen, selected)
            assert chosen.sum(-1).max() == TOPK


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_indexers_learn_the_attention_of_all_heads_and_layers_of_their_group(sparse):
    arrays, phase = drawn(), 2

    def loss(attention, *arrays):
        history = TrainingHistory(CONFIG, dataclasses.replace(attention, sparse=sparse, imitate=True), phase)
        history.select(0, *arrays[:3])
        for layer in range(2):
            history.attend(layer, arrays[3 + 2 * layer], arrays[4 + 2 * layer], SCALE)
        return history.indexer_losses()[0]

    reference = naive()
    reference.select(0, *map(jnp.asarray, arrays[:3]))
    mask = np.asarray(reference.selected[0] if sparse else reference.causal)
    scores = np.asarray(reference.scores[0])
    target = np.zeros(mask.shape)
    for query, row in (arrays[3:5], arrays[5:7]):
        products = np.einsum("bshr,btr->bsht", query, row) * SCALE
        target += softmax(np.where(mask[:, :, None], products, -np.inf)).sum(2)
    target /= target.sum(-1, keepdims=True)
    terms = [
        target[request, t, u] * math.log(target[request, t, u] / q)
        for request in range(2)
        for t in range(phase, LENGTH, 4)
        for u, q in enumerate(softmax(np.where(mask, scores, -np.inf)[request, t]))
        if mask[request, t, u]
    ]
    expected = sum(terms) / (2 * LENGTH / 4)
    for attention in (WHOLE, PARTS):
        value, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, attention), tuple(range(7))))(*arrays)
        assert float(value) == pytest.approx(expected, rel=1e-5)
        assert all(np.any(gradient) for gradient in gradients[:3])
        assert not any(np.any(gradient) for gradient in gradients[3:])


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("k", [1, 5, 16, 40, 41])
def test_top_k_mask_is_that_of_lax_top_k(k):
    rng = np.random.default_rng(k)
    scores = rng.standard_normal((24, 40)).astype(np.float32)
    scores[:8] = rng.integers(-2, 3, (8, 40))  # many ties
    scores[8:16][rng.random((8, 40)) < 0.7] = -np.inf  # fewer than k are visible
    scores[16] = -np.inf
    scores[17] = 1e30 * scores[17]
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, np.asarray(jax.lax.top_k(scores, min(k, 40))[1]), True, -1)
    found = np.asarray(jax.jit(top_k_mask, static_argnums=1)(scores, k))
    np.testing.assert_array_equal(found, expected & (scores > -np.inf))


def test_zeros_of_both_signs_tie():
    scores = jnp.array([[-0.0, 0.0, -1.0, 0.0, -0.0]])
    np.testing.assert_array_equal(top_k_mask(scores, 2), [[True, True, False, False, False]])


def test_kl_divergence():
    rng = np.random.default_rng(0)
    target, scores = rng.random((3, 7)).astype(np.float32), rng.standard_normal((3, 7)).astype(np.float32)
    mask = np.tri(3, 7, 2, dtype=bool)
    target[2, 0] = 0  # nothing to imitate there
    expected = 0.0
    for t in range(3):
        p, q = target[t, mask[t]] / target[t, mask[t]].sum(), softmax(scores[t, mask[t]])
        expected += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a) / 3
    own = softmax(scores)
    target, scores, mask, own = map(jnp.asarray, (target, scores, mask, own))
    assert float(kl_divergence(target, scores, mask)) == pytest.approx(expected, rel=1e-5)
    assert float(kl_divergence(own, scores, jnp.ones_like(mask))) == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def learning():
    """Losses of one batch, the gradients of the language model's and of the indexers', and a naive forward's loss."""
    config, mesh = ModelConfig.from_hub(SMALL), make_mesh()
    model = init_model(config, mesh, Parallel(), seed=0, mtp=True)
    attention = dataclasses.replace(WHOLE, sparse=True, imitate=True)
    tokens = np.random.default_rng(0).integers(0, 32, (2, LENGTH + 2)).astype(np.int32)

    def body(model, tokens):
        graphdef, state = nnx.split(model)

        def both(state):
            found = losses(nnx.merge(graphdef, state), tokens, attention, phase=1)
            return (found.language + found.draft, found.indexers.sum()), found

        (language, _), pull, found = jax.vjp(both, state, has_aux=True)
        (of_language,), (of_indexers,) = pull((jnp.ones_like(language), 0.0)), pull((0.0, jnp.ones_like(language)))
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
        logits = model.logits(model(tokens[:, :-2], positions, NaiveHistory(config, positions)))
        named = [
            {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(gradient)}
            for gradient in (of_language, of_indexers)
        ]
        return found, *named, logits

    return config, tokens, *compiled(model, mesh, body)(tokens)


def test_losses_of_a_whole_model(learning):
    config, tokens, found, _, _, logits = learning
    probabilities = np.take_along_axis(softmax(logits.astype(np.float64)), tokens[:, 1:-1, None], -1)
    assert float(found.language) == pytest.approx(-np.log(probabilities).mean(), rel=1e-5)
    assert found.indexers.shape == (len(config.layer_groups) + 1,)
    assert np.all(found.indexers > 0)
    assert 0 <= found.accepted <= 1
    assert sorted(found.loads) == [1, 2]  # layer 1 and the MTP layer have experts
    for load in found.loads.values():
        assert load.sum() == pytest.approx(config.num_experts_per_token)


def test_indexers_and_the_rest_learn_from_their_own_losses_alone(learning):
    _, _, _, of_language, of_indexers, _ = learning
    indexers = {name for name in of_language if "/indexer/" in name}
    assert {name.split("/indexer/")[0] for name in indexers} == {"layers/0/self_attn", "mtp/block/self_attn"}
    for name in of_language:
        assert np.any(of_indexers[name]) == (name in indexers), name
        # A router's bias chooses experts and weighs nothing: `balanced` moves it.
        assert np.any(of_language[name]) == (name not in indexers and not name.endswith("router/bias")), name


def test_balance_moves_towards_idle_experts():
    load = jnp.array([0.9, 0.1, 0.5, 0.5])
    np.testing.assert_allclose(balanced(jnp.zeros(4), load, 0.01), [-0.01, 0.01, 0, 0], atol=1e-8)


def test_sizes_that_do_not_divide():
    query, weights, key, *layer = (jnp.asarray(array[:, :30]) for array in drawn()[:5])

    def attend(**changes):
        history = TrainingHistory(CONFIG, Attention(**changes))
        history.select(0, query, weights, key)
        history.attend(0, layer[0], layer[1], SCALE)

    with pytest.raises(ValueError, match="imitate_every: expected a divisor of the 30 queries, found 4; change one"):
        attend(imitate=True, imitate_every=4)
    with pytest.raises(ValueError, match="chunk: expected a divisor of a segment's 15 queries, found 4; use a power"):
        attend(segments=2, chunk=4)
