"""Training of the tiny model: it learns, a stopped run continues bit for bit, and its corpus keeps modules aside."""

import dataclasses
import json
import sys
import time

import jax
import numpy as np
import pytest

from experiments import train_tiny
from experiments.python_corpus import HELD_OUT, draw_windows, held_out_windows, python_corpus
from models import ModelConfig
from ula_jax.report import UserError

HUB = train_tiny.SMOKE_HUB | dict(num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=0)


@pytest.fixture(scope="module")
def corpus():
    return python_corpus(200_000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """(config, what runs share, result) of a whole run of two stages; others use its compiled steps."""
    folder = tmp_path_factory.mktemp("train")
    config = train_tiny.Config(
        out=folder / "out", state=folder / "state", results=folder, dense_steps=20, long_steps=0, warm_steps=0,
        sparse_steps=3, context=32, dense_context=32, batch_tokens=128, sparse_batch_tokens=128, learning_rate=1e-2,
        held_out=4, log_every=1e9,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["somewhere/train_tiny.py", "--seed", "0"])
        patch.setattr(train_tiny, "HUB", HUB)
        trainer = train_tiny.make_trainer(config)
        patch.setattr(train_tiny, "make_trainer", lambda config: trainer)
        patch.setattr(train_tiny, "python_corpus", lambda limit: corpus)
        yield config, trainer, train_tiny.run(config)


def test_it_learns(trained):
    _, trainer, result = trained
    assert result["finished"]
    assert result["steps"] == result["total_steps"] == 23
    assert result["parameters"] == trainer.size
    ends = [(row["stage"], row["step"]) for row in result["log"] if row["stage_end"]]
    assert ends == [("dense", 20), ("sparse", 23)]
    assert max(result["bits_per_byte_dense"], result["bits_per_byte_sparse"]) < 6.5  # of 8 before the first step
    assert 0 <= result["accepted_drafts_sparse"] <= 1
    json.dumps(result)


def test_a_finished_run_leaves_a_model_and_its_card(trained):
    config, _, result = trained
    assert ModelConfig.from_hub(config.out).index_topk == 8
    card = (config.out / "README.md").read_text()
    assert card.startswith("---\nlicense: psf-2.0\n")
    assert f"| {result['bits_per_byte_sparse']:.3f} |" in card
    assert "\n    python -m experiments.train_tiny --seed 0\n" in card
    assert "| sparse | 3 | 32 | 128 | top-k | model and indexers |" in card
    assert max(map(len, card.splitlines())) <= 120
    judged = train_tiny.run(dataclasses.replace(config, evaluate=True))
    for name in ("bits_per_byte_dense", "bits_per_byte_sparse"):
        assert judged[name] == pytest.approx(result[name], abs=0.02)  # the model that is written is bf16


def test_a_stopped_run_continues_bit_for_bit(trained, tmp_path, corpus):
    config, trainer, whole = trained
    parts = dataclasses.replace(config, state=tmp_path / "state", out=tmp_path / "out")
    # The first call ends after one step, the second as the first stage does.
    first = train_tiny.run(dataclasses.replace(parts, stop_after=1e-9))
    assert (first["steps"], first["finished"]) == (1, False)
    plan = train_tiny.stages(parts)
    with train_tiny.Files(parts) as files:
        ending = time.monotonic() + train_tiny.COMPILE_SECONDS / 2
        assert int(train_tiny.train(parts, trainer, plan, corpus, files, ending)["step"]) == 20
    assert not parts.out.exists()
    last = train_tiny.run(parts)
    assert last["finished"]
    assert [row["step"] for row in last["log"]] == [1, 20, 23]
    assert last["log"][1:] == [row | {"tokens_per_s": other["tokens_per_s"]} for row, other in pairs(whole, last)]
    states = [saved(one, trainer) for one in (config, parts)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    tensors = [(one.out / "model.safetensors").read_bytes() for one in (config, parts)]
    assert tensors[0] == tensors[1]


def pairs(whole, last):
    return zip(whole["log"], last["log"][1:], strict=True)


def saved(config, trainer):
    with train_tiny.Files(config) as files:
        return files.restore(trainer.initial(config.seed + 1))


def test_another_recipe_is_refused(trained):
    config, _, _ = trained
    with pytest.raises(
        UserError, match=r"recipe\.json: expected the settings of this call, found others; continue with"
    ):
        train_tiny.run(dataclasses.replace(config, learning_rate=1e-3))
    with pytest.raises(UserError, match="batch: expected at least one sequence of 512 bytes a step, found 128 and 128"):
        train_tiny.run(dataclasses.replace(config, context=512))


def test_without_a_model_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match=r"model config: expected a file .*config\.json, found none; pass a hub"):
        train_tiny.run(train_tiny.Config(out=tmp_path, evaluate=True))


def test_a_smoke_run_keeps_its_hands_off_the_model_that_ships():
    config = train_tiny.smoke(train_tiny.Config(smoke=True))
    assert (config.out.name, config.state.name) == ("smoke_out", "smoke_state")
    assert train_tiny.smoke(dataclasses.replace(config, out=config.results)).out == config.results


def test_held_out_modules_are_not_trained_on():
    corpus = python_corpus(3_000_000)
    assert 2_000_000 < len(corpus.train) <= 3_000_000
    assert set(corpus.held_out) == set(HELD_OUT)
    train = corpus.train.tobytes()
    assert train.count(0) == corpus.documents + 1
    for text in corpus.held_out.values():
        middle = len(text) // 2
        assert len(text) > 30_000
        assert text.tobytes()[middle : middle + 300] not in train


def test_a_limit_leaves_whole_documents_out():
    small, large = python_corpus(100_000), python_corpus(200_000)
    assert small.documents < large.documents
    assert large.train.tobytes().startswith(small.train.tobytes())


def test_windows_depend_on_seed_and_step_alone(corpus):
    drawn = draw_windows(corpus, 3, 7, 4, 50)
    draw_windows(corpus, 3, 8, 4, 50)
    np.testing.assert_array_equal(drawn, draw_windows(corpus, 3, 7, 4, 50))
    assert drawn.dtype == np.int32
    assert all(window.astype(np.uint8).tobytes() in corpus.train.tobytes() for window in drawn)
    for other in (draw_windows(corpus, 3, 8, 4, 50), draw_windows(corpus, 4, 7, 4, 50)):
        assert not np.array_equal(drawn, other)
    with pytest.raises(UserError, match="corpus: expected 1000000 bytes or more, found"):
        draw_windows(corpus, 0, 0, 1, 1_000_000)


def test_held_out_windows_do_not_overlap_and_take_turns(corpus):
    windows = held_out_windows(corpus, 1000, 12)
    assert windows.shape == (12, 1002)
    texts = list(corpus.held_out.values())
    for turn, window in enumerate(windows):  # ten modules, then the first of them again, further on
        start = turn // len(texts) * 1000
        np.testing.assert_array_equal(window, texts[turn % len(texts)][start : start + 1002])
    with pytest.raises(UserError, match="held-out modules: expected one of 10000000 bytes, found none"):
        held_out_windows(corpus, 10_000_000, 1)
