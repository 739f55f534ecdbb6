"""The command `pairs`: data, output and pictures of translators trained on a few pairs."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from reproduce import pairs
from transformer_jax.config import RecurrentConfig, TrainConfig
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.loading import TextModel, load_run
from transformer_jax.models.factory import init_params
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import WordTokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = {"ein": "a", "Hund": "dog", "Mann": "man", "läuft": "runs", "sieht": "sees"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with both data sets: 40 training, 6 held-out and 5 test pairs."""
    random, path = np.random.default_rng(3), tmp_path_factory.mktemp("sets")
    for part, count in (("train", 40), ("val", 6), ("test", 5)):
        rows = [random.choice(list(WORDS), random.integers(2, 6)) for _ in range(count)]
        stem = "test_2016_flickr" if part == "test" else part
        (path / f"{stem}.de").write_text("".join(f"{' '.join(row)}.\n" for row in rows))
        english = [" ".join(WORDS[word] for word in row) for row in rows]
        (path / f"{stem}.en").write_text("".join(f"{line.title()}.\n" for line in english))
        stem = "dev" if part == "val" else part
        spoken = ["".join(random.choice(list("áb"), random.integers(2, 6))) for _ in range(count)]
        lines = [f"{word}\t{' '.join(word.replace('á', 'aː'))}\n" for word in spoken]
        (path / f"xyz_{stem}.tsv").write_text("".join(lines))
    return path


@pytest.fixture
def small(monkeypatch):
    """Reduce the sizes of the command's models."""
    sizes = dict(d_model=8, num_heads=2, num_layers=2, d_ff=8, max_len=20)
    models = {key: dataclasses.replace(model, **sizes) for key, model in pairs.MODELS.items()}
    monkeypatch.setattr(pairs, "MODELS", models)


def run(folder, out, name, task, capsys):
    language = ["--language", "xyz"]
    record = pairs.main(
        ["--set", name, "--data", str(folder), "--task", task, "--steps", "3", "--out", str(out)]
        + (language if name == "g2p" else [])
    )
    return record["figures"], capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("task", ["seq2seq", "prefix"])
@pytest.mark.parametrize("name", ["multi30k", "g2p"])
def test_run_is_evaluated_on_test_split_and_drawn(folder, small, tmp_path, capsys, name, task):
    figures, printed = run(folder, tmp_path, name, task, capsys)
    stem = name if name == "multi30k" else "g2p_xyz"
    out = tmp_path / f"{stem}_{task}"
    assert figures["step"] == 3 and 0 <= figures["exact_match"] <= 1
    assert figures["perplexity"] == pytest.approx(np.exp(figures["nats_per_token"]))
    assert json.loads((out / "test.json").read_text())["figures"] == figures
    assert all((out / f"{picture}.png").stat().st_size > 5000 for picture in ("curve", "alignment"))
    assert re.search(r"^perplexity +\d", printed, re.MULTILINE) and printed.count("\n  > ") == 5
    model = load_run(out)
    source = "ein hund läuft ." if name == "multi30k" else "á b"
    rows, weights = pairs.alignment(model, source, "a dog" if name == "multi30k" else "aː")
    assert rows[-1] == "<eos>" and weights.shape == (len(rows), len(source.split()))
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-5) and (weights > 0).all()


@pytest.mark.long
def test_finished_run_is_reevaluated_with_training_vocabulary(folder, small, tmp_path, capsys):
    first, _ = run(folder, tmp_path, "multi30k", "seq2seq", capsys)
    again, printed = run(folder, tmp_path, "multi30k", "seq2seq", capsys)
    assert "is complete: judged again" in printed and "seconds" not in again
    timed = {"seconds", "CPU seconds", "test seconds"}
    assert {k: v for k, v in first.items() if k not in timed} == {
        k: v for k, v in again.items() if k not in timed
    }
    texts = (tmp_path / "multi30k" / "train.source").read_text().splitlines()
    assert set(" ".join(texts).split()) == {*(word.lower() for word in WORDS), "."}
    assert first["source vocabulary"] == len(WORDS) + 1 + 2


@pytest.mark.slow
def test_recurrent_alignment_uses_its_single_attention_layer():
    tokenizer = with_special_tokens(WordTokenizer(("ein", "hund", "a", "dog")), ["bos", "eos"])
    config = RecurrentConfig(
        vocab_size=8, source_vocab_size=8, d_embed=3, d_hidden=5, attention="additive"
    )
    task = Seq2SeqTask(beams=1)
    run = TrainConfig(model=config, task=task, tokenizer="word", context=11, batch_size=2)
    params = init_params(config, jax.random.key(3))
    model = TextModel(config, params, tokenizer, run=run)
    words, weights = pairs.alignment(model, "ein hund", "a dog")
    assert words == ["a", "dog", "<eos>"] and weights.shape == (3, 2)
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-5) and (weights > 0).all()


def test_missing_data_set_raises_one_line_error(tmp_path):
    with pytest.raises(SystemExit, match=r"^pairs: .*xyz_train\.tsv: no such file; --data is"):
        pairs.main(
            ["--set", "g2p", "--data", str(tmp_path), "--language", "xyz", "--out", str(tmp_path)]
        )
