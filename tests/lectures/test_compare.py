"""Tests of the compare command: equal conditions and a search without the held-out part."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.cli.test_train import run_command
from transformer_jax import num_params
from transformer_jax.config import ConfigError, NgramConfig, RecurrentConfig, TrainConfig
from transformer_jax.lectures import compare
from transformer_jax.lectures.compare import RATES, equal_models, search, setting_of, settings

SMALL = "--steps 3 --batch-size 5 --context 7 --d-model 8".split()
BASE = TrainConfig(steps=50, warmup_steps=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a file of 397 characters, drawn uniformly from 11 letters."""
    rng = np.random.default_rng(20_261_123)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(rng.choice(list("abcdefghijk"), 397)))
    return path


@pytest.mark.slow_except("11")
@pytest.mark.parametrize("vocab_size", [11, 65, 211])
def test_model_parameter_counts_agree_within_three_percent(vocab_size):
    models = equal_models(vocab_size, 64, 61)
    assert tuple(models) == compare.MODELS
    counts = {name: num_params(model) for name, model in models.items() if name != "ngram"}
    for count in counts.values():
        assert abs(count / counts["transformer"] - 1) <= 0.03, counts


@pytest.mark.slow
def test_unsuitable_model_width_is_rejected(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abc" * 150)
    command = ["compare", "--data", str(text), "--out", str(tmp_path / "out"), *SMALL[:-1]]
    command[1:1] = "--models", "ngram", "lstm"
    for width, rule in ("2", "must be a multiple of 8"), ("8", "no lstm has within 3 %"):
        assert run_command([*command, width]) == 2
        assert capsys.readouterr().err.startswith(f"compare: d_model is {width}: {rule}")
    assert not (tmp_path / "out").exists()


def test_data_that_can_be_read_only_once_is_rejected(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for data in ("-", str(pipe)):
        assert run_command(["compare", "--data", data, "--out", str(tmp_path / "out")]) == 2
        rule = "must be a regular file, because every model reads it again"
        assert capsys.readouterr() == ("", f"compare: data is {data!r}: {rule}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_width_is_validated_only_for_requested_models():
    with pytest.raises(ConfigError, match="d_model is 8: no convolution has within 3 %"):
        equal_models(28, 8, 8, ("ngram", "convolution"))
    found = equal_models(28, 8, 8, ("ngram", "transformer"))
    assert num_params(found["transformer"]) < 4000 and "ngram" in found


@pytest.mark.slow
def test_unusable_output_folder_is_rejected_before_search(text, capsys):
    out = text / "out"  # in a file
    argv = "--data", str(text), "--models", "ngram", "--out", str(out), *SMALL
    assert run_command(["compare", *argv]) == 1
    assert capsys.readouterr() == ("", f"compare: {out}: Not a directory\n")


@pytest.mark.parametrize("best", [0, 3, 5, len(RATES) - 1])
def test_search_finds_best_learning_rate(best, monkeypatch, tmp_path):
    """The losses fall towards the best rate; a rate far above it gives NaN."""
    tried = []

    def fit(config, *, resume, vocab_size, progress, stop):
        assert not resume  # each run starts anew
        tried.append(config)
        distance = RATES.index(config.learning_rate) - best
        return SimpleNamespace(val_loss=None if distance > 3 else 2.0 + abs(distance))

    monkeypatch.setattr(compare, "fit", fit)
    model = RecurrentConfig(vocab_size=11)
    found = search("rnn", BASE, model, tmp_path / "part.txt", str(tmp_path), [])
    assert found == RATES[best]
    assert len({config.learning_rate for config in tried}) == len(tried)
    assert {config.steps for config in tried} == {10}
    assert {config.data for config in tried} == {str(tmp_path / "part.txt")}
    assert len({config.out for config in tried}) == len(tried)


def test_setting_of_inverts_settings():
    for model, value in (NgramConfig(vocab_size=11), 7), (RecurrentConfig(cell="lstm"), 0.004):
        config = settings(BASE, model, value)
        assert setting_of(config) == value
        assert config.steps == (1 if isinstance(model, NgramConfig) else 50)
    assert config.min_learning_rate == pytest.approx(0.0004)


@pytest.mark.slow
def test_search_never_uses_held_out_data(text, tmp_path, monkeypatch):
    """Record every text that is read instead of training."""
    read = []

    def train(config, received, *, resume=False, vocab_size=None):
        read.append((vocab_size, Path(config.data).read_text()))
        return SimpleNamespace(
            val_loss=2.0, val_loss_per_character=2.0, config=replace(config, model=nodes(config))
        )

    def nodes(config):
        counted = isinstance(config.model, NgramConfig)
        return replace(config.model, nodes=(1,) * config.model.order) if counted else config.model

    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare.plot, "read_runs", lambda paths: [])
    monkeypatch.setattr(compare.plot, "draw", lambda *arguments: None)
    out = tmp_path / "out"
    out.mkdir()
    command = ["compare", "--data", str(text), "--out", str(out), "--models", "ngram", "rnn"]
    assert run_command([*command, *SMALL]) == 0
    whole = text.read_text()
    assert {part for size, part in read if size is not None} == {whole[:357]}
    assert [part for size, part in read if size is None] == [whole, whole]


def test_interrupted_search_does_not_start_training(text, tmp_path, monkeypatch, capsys):
    """Otherwise --resume would continue with a rate that is not the best."""
    runs = []

    def fit(config, *, stop, **options):
        runs.append(config.out)
        if len(runs) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop()
        return SimpleNamespace(val_loss=None if stop() else 2.0)

    monkeypatch.setattr(compare, "fit", fit)
    monkeypatch.setattr(compare, "equal_models", lambda *_: {"rnn": RecurrentConfig(vocab_size=11)})
    out = tmp_path / "out"
    command = ["compare", "--data", str(text), "--out", str(out), "--models", "rnn", *SMALL]
    assert run_command(command) == 130
    assert len(runs) == 2 and str(out / "rnn") not in runs and "inf" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    """Run the command once; return its folder, the command line, and its record."""
    out = tmp_path_factory.mktemp("compared") / "out"
    command = ["compare", "--data", str(text), "--out", str(out), "--models", "rnn", "ngram"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "RATES", (0.004, 0.008))
        patch.setattr(compare, "ORDERS", (4, 5))
        assert run_command([*command, *SMALL]) == 0
    return out, command, json.loads((out / "compared.json").read_text())["models"]


@pytest.mark.slow
def test_compared_models_train_on_equal_tokens_with_same_metrics(compared, text):
    """The text is random, so no model can predict it; sets give the number of n-grams."""
    out, _, models = compared
    by_name = {one["model"]: one for one in models}
    assert by_name["rnn"]["tokens"] == 3 * 5 * 7 and by_name["ngram"]["tokens"] == 357
    for one in models:
        assert one["bits"] * math.log(2) == pytest.approx(one["nats"])
        assert math.log(one["perplexity"]) == pytest.approx(one["nats"])
        assert math.log(11) - 0.2 < one["nats"] < math.log(11) + 1.0
    assert [one["nats"] for one in models] == sorted(one["nats"] for one in models)
    order = by_name["ngram"]["order"]
    training = ["<s>"] * (order - 1) + list(text.read_text()[:357])
    grams = {
        tuple(training[i : i + n])
        for n in range(1, order + 1)
        for i in range(len(training) - n + 1)
    }
    assert by_name["ngram"]["parameters"] == len(grams)
    assert (out / "compared.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_comparison_resumes_without_overwriting_results(compared, capsys):
    out, command, models = compared
    assert run_command([*command, *SMALL]) == 2
    assert "continue its comparison with --resume" in capsys.readouterr().err
    assert run_command([*command, *SMALL, "--resume"]) == 0
    assert "in the search" not in capsys.readouterr().out
    again = json.loads((out / "compared.json").read_text())["models"]
    assert [one["nats"] for one in again] == [one["nats"] for one in models]
