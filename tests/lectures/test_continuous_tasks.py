"""Tests of tasks on images and sound: generation, layout, training and files."""

import importlib.util
import io
import json
import re
import zipfile
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from tests.training.test_training import assert_same_state
from transformer_jax.__main__ import main as run_command
from transformer_jax.config import ConfigError, Frames, ModelConfig, Patches, TrainConfig
from transformer_jax.config.presets import task_recipe
from transformer_jax.config.tasks import ClassifyTask, DigitsTask, Seq2SeqTask, TonesTask
from transformer_jax.lectures.signals import (
    DIGITS,
    GLYPHS,
    log_energies,
    make_signals,
    read_signals,
)
from transformer_jax.models.factory import init_params
from transformer_jax.tokenizers.special import special_ids
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import batch_scores
from transformer_jax.training.data import IGNORE
from transformer_jax.training.loop import fit
from transformer_jax.training.rows import stack_rows
from transformer_jax.training.tasks import load_task
from transformer_jax.training.tasks.answers import answer_sources

pytestmark = pytest.mark.usefixtures("quick_compilation")

PICTURES = Patches(size=4, height=8, width=8, channels=1)
SOUND = Frames(width=16)


def small(task, kind="encoder-decoder", width=12, layers=1, **changes):
    """Return a run of a task with a small transformer."""
    inputs = PICTURES if isinstance(task, DigitsTask) else SOUND
    model = ModelConfig(
        kind=kind, inputs=inputs, d_model=width, num_heads=2, num_layers=layers, max_len=23,
        use_bias=False, init_std=0.1,
    )  # fmt: skip
    return TrainConfig(task=task, model=model, **{"batch_size": 3, "sample_tokens": 0} | changes)


@pytest.mark.parametrize("task", [DigitsTask(examples=31), TonesTask(examples=31)])
def test_signals_are_determined_by_seed(task):
    one, again, other = (make_signals(task, seed) for seed in (5, 5, 6))
    assert len(one) == 31 and len({signal.target for signal in one}) > 5
    assert all(signal.values.dtype == np.float32 for signal in one)
    for signal, same in zip(one, again, strict=True):
        assert signal.target == same.target and np.array_equal(signal.values, same.values)
    assert any(a.target != b.target for a, b in zip(one, other, strict=True))


def test_noiseless_glyph_is_shifted_and_scaled_bitmap():
    places = set()
    for signal in make_signals(DigitsTask(examples=97, noise=0.0), 3):
        picture = signal.values[:, :, 0].astype(np.float64)
        bitmap = np.array([list(row) for row in GLYPHS[DIGITS.index(signal.target)].split()]) == "1"
        rows, columns = np.nonzero(picture)
        bitmap_rows, bitmap_columns = np.nonzero(bitmap)
        assert 0.5 <= picture.max() < 1.0
        assert set(picture[rows, columns]) == {picture.max()}
        moved = rows - bitmap_rows, columns - bitmap_columns
        assert all((shift == shift[0]).all() for shift in moved)
        places.add((moved[0][0], moved[1][0]))
    assert places == {(y, x) for y in range(2) for x in range(4)}


def test_band_energies_match_discrete_fourier_transform(rng):
    sound = rng.standard_normal(128 + 2 * 64 + 13)
    found = log_energies(sound)
    assert found.shape == (3, 16) and found.dtype == np.float32
    n = np.arange(128)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * n / 127)
    for t in range(3):
        part = sound[64 * t : 64 * t + 128] * hann
        power = [abs((part * np.exp(-2j * np.pi * k * n / 128)).sum()) ** 2 for k in range(1, 65)]
        wanted = np.log(1e-3 + np.array(power).reshape(16, 4).mean(axis=1) / 128)
        assert_near(found[t], wanted, 1e-6)


def test_tone_energy_peaks_in_its_frequency_band():
    task = TonesTask(examples=61, letters=12, min_length=1, max_length=1, noise=0.01)
    heard = set()
    for signal in make_signals(task, 3):
        letter = ord(signal.target) - 97
        nearest = round((200 + 150 * letter) / (4000 / 128))
        assert np.exp(signal.values).sum(axis=0).argmax() == (nearest - 1) // 4
        heard.add(letter)
    assert len(heard) == 12


def test_stack_rows_pads_frames_but_not_images(rng):
    frames = [rng.standard_normal((length, 5)).astype(np.float32) for length in (3, 11, 7)]
    stacked, valid = stack_rows(frames)
    assert stacked.shape == (3, 16, 5) and stacked.dtype == np.float32
    assert valid.sum(axis=1).tolist() == [3, 11, 7]
    for row, sound, mask in zip(stacked, frames, valid, strict=True):
        assert np.array_equal(row[mask], sound) and mask[: len(sound)].all()
        assert not row[~mask].any()
    pictures = [rng.standard_normal((7, 5, 3)).astype(np.float32) for _ in range(2)]
    stacked, valid = stack_rows(pictures)
    assert valid is None and np.array_equal(stacked, np.stack(pictures))
    ids, valid = stack_rows([np.arange(1, 4), np.arange(1, 3)])
    assert ids.dtype == np.int32 and ids.tolist() == [[1, 2, 3, *[0] * 5], [1, 2, *[0] * 6]]


def test_digits_task_creates_sources_or_classifier_inputs():
    task = load_task(small(DigitsTask(examples=40)))
    signals = make_signals(DigitsTask(examples=40), 0)
    ids = special_ids(task.tokenizers.tokenizer)
    (bucket,) = task.train.buckets
    assert bucket.source.shape == (36, 8, 8, 1) and bucket.source_valid is None
    order = np.argsort([len(signal.target) for signal in signals[:36]], kind="stable")
    for row, i in enumerate(order):
        assert np.array_equal(bucket.source[row], signals[i].values)
        target = task.tokenizers.tokenizer.encode(signals[i].target).tolist()
        assert bucket.tokens[row, : len(target) + 1].tolist() == [ids["bos"], *target]
        assert bucket.labels[row, : len(target) + 1].tolist() == [*target, ids["eos"]]
        assert (bucket.labels[row, len(target) + 1 :] == IGNORE).all()
    task = load_task(small(DigitsTask(examples=40), "encoder"))
    (bucket,) = task.train.buckets
    assert task.config.model.num_classes == 10 and bucket.source is None
    assert np.array_equal(bucket.tokens, np.stack([signal.values for signal in signals[:36]]))
    assert [DIGITS[i] for i in bucket.labels] == [signal.target for signal in signals[:36]]


@pytest.mark.slow
def test_sound_padding_does_not_change_loss_or_answer(key):
    task = load_task(small(TonesTask(examples=20, max_length=2)))
    config = task.config
    params = init_params(config.model, key)
    scores = jax.jit(batch_scores(config.model))
    (bucket,) = task.val.buckets
    assert not bucket.source_valid.all()
    (batch,) = task.val.batches(5)
    together = np.asarray(scores(params, batch), np.float64)
    alone = np.zeros(3)
    for row, valid in enumerate(bucket.source_valid):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], bucket)
        one = replace(one, source=one.source[:, valid], source_valid=None)
        alone += np.asarray(scores(params, one), np.float64)
    assert together[1] == alone[1] == bucket.labels[bucket.labels != IGNORE].size
    assert_near(together[0] / together[1], alone[0] / alone[1], 1e-5)
    sources = [signal.values for signal in task.signals]
    write = partial(answer_sources, config, task.tokenizers, params, num_tokens=3)
    assert write(sources) == [write([source])[0] for source in sources]


@pytest.mark.slow
@pytest.mark.long_except("encoder")
@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_stopped_run_resumes_bit_identically(tmp_path, kind):
    config = small(
        DigitsTask(examples=40, judged=3), kind, steps=6, eval_every=6, checkpoint_every=6,
        warmup_steps=2,
    )  # fmt: skip
    whole = fit(replace(config, out=str(tmp_path / "whole")))
    steps = iter(range(6))
    parts = replace(config, out=str(tmp_path / "parts"))
    assert fit(parts, stop=lambda: next(steps) == 2).step == 3
    again = fit(parts, resume=True)
    assert again.step == 6 and again.scores == whole.scores
    assert_same_state(again.state, whole.state)


@pytest.mark.long
def test_encoder_classifies_digits_with_95_percent_accuracy(tmp_path):
    config = small(
        DigitsTask(examples=1500), "encoder", 48, 2, steps=120, batch_size=48,
        learning_rate=4e-3, warmup_steps=20, eval_every=120, checkpoint_every=120,
        out=str(tmp_path / "run"), sample_tokens=1,
    )  # fmt: skip
    result = fit(config)
    assert result.scores["accuracy"] >= 0.95 and result.scores["macro_f1"] >= 0.9
    assert result.sample.count("picture of a") == 5


@pytest.mark.long
@pytest.mark.parametrize(
    "task", [DigitsTask(examples=2000), TonesTask(examples=2000, letters=5, max_length=3)]
)
def test_encoder_decoder_transcribes_signals_with_90_percent_accuracy(tmp_path, task):
    config = small(
        task, width=32, steps=170, batch_size=64, learning_rate=5e-3, warmup_steps=20,
        eval_every=170, checkpoint_every=170, out=str(tmp_path / "run"), sample_tokens=1,
    )  # fmt: skip
    result = fit(config)
    assert result.scores["exact_match"] >= 0.9 and result.scores["letter_error_rate"] <= 0.1
    assert result.sample.count(" -> ") == 5


def run_of(task, kind, inputs=None):
    return lambda: TrainConfig(task=task, model=ModelConfig(kind=kind, inputs=inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: TrainConfig(task=TonesTask()), "task is 'tones': needs an encoder-decoder"),
        (run_of(DigitsTask(), "encoder"), "task is 'digits': needs model.inputs patches"),
        (run_of(TonesTask(), "encoder-decoder", PICTURES),
         "task is 'tones': needs model.inputs frames"),
        (run_of(TonesTask(), "encoder-decoder", Frames()),
         r"task is 'tones': has inputs of shape \(1, 16\), but model.inputs reads \(1, 80\)"),
        (run_of(DigitsTask(), "encoder", replace(PICTURES, class_token=False)),
         "class_token is False: must be True, because the encoder classifies this token"),
        (run_of(Seq2SeqTask(), "encoder-decoder", Frames()),
         "task is 'seq2seq': reads tokens, but model.inputs is 'frames'"),
        (run_of(ClassifyTask(), "encoder", PICTURES),
         "task is 'classify': reads tokens, but model.inputs is 'patches'"),
        (lambda: task_recipe(DigitsTask(), "gru"),
         "task 'digits' needs a transformer, of shape"),
        (lambda: small(DigitsTask(), data="x"), "data is 'x': is not used: task 'digits'"),
        (lambda: DigitsTask(source="scikit-learn", noise=0.2), "noise is 0.2: needs source 'glyph"),
        (lambda: DigitsTask(noise=-0.1), "noise is -0.1: must not be negative"),
        (lambda: TonesTask(letters=13), "letters is 13: must be at most 12"),
        (lambda: TonesTask(min_length=6), "min_length is 6: must not exceed max_length, 5"),
    ],
)  # fmt: skip
def test_config_that_contradicts_task_is_rejected(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        change()
    assert "\n" not in str(caught.value)


def test_scikit_learn_digits_match_and_require_package(monkeypatch):
    task = DigitsTask(source="scikit-learn", examples=53)
    if importlib.util.find_spec("sklearn") is not None:
        from sklearn.datasets import load_digits

        signals, theirs = make_signals(task, 3), load_digits()
        assert len(signals) == 53
        for signal in signals:
            same = (theirs.images == 16 * signal.values[:, :, 0]).all(axis=(1, 2))
            assert DIGITS[int(theirs.target[same.argmax()])] == signal.target and same.any()
            assert signal.values.shape == (8, 8, 1) and signal.values.max() <= 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="source is 'scikit-learn': it is not installed"):
        make_signals(task, 3)


def test_sound_longer_than_position_table_is_rejected():
    config = small(TonesTask(examples=40))
    with pytest.raises(
        DataError, match=r"source: it has \d+ tokens, but a sequence has at most 7 \("
    ):
        load_task(replace(config, model=replace(config.model, max_len=7)))


@pytest.mark.long
def test_image_run_rejects_text_input(tmp_path, capsys):
    out = tmp_path / "run"
    fit(small(DigitsTask(examples=20, judged=2), steps=1, warmup_steps=0, out=str(out)))
    scores = json.loads((out / "scores.json").read_text())
    assert set(scores) == {"exact_match", "letter_error_rate"}
    for message, command, options in (
        (
            "prompt is 'a': a run for task 'digits' supports only prompts, checkpoint",
            "generate",
            "--prompt a",
        ),
        ("a.txt must be a .npz file of arrays", "evaluate", "--data a.txt"),
    ):
        assert run_command([command, "--model", str(out), *options.split()]) == 2
        line = capsys.readouterr().err.strip()
        assert message in line and "\n" not in line


def written_file(path, task, change=None):
    """Write a .npz file of nine signals, optionally with a change to its arrays."""
    signals = make_signals(replace(task, examples=9), 77)
    inputs, valid = stack_rows([signal.values for signal in signals])
    arrays = dict(inputs=inputs, targets=np.array([signal.target for signal in signals]))
    if valid is not None:
        arrays["lengths"] = valid.sum(axis=1)
    if change is not None:
        change(arrays)
    np.savez(path, **arrays)
    return signals


@pytest.mark.parametrize("task", [DigitsTask(), TonesTask()], ids=["digits", "tones"])
def test_signal_file_round_trips(tmp_path, task):
    file = tmp_path / "seen.npz"
    signals = written_file(file, task)
    found = read_signals(task, str(file))
    for one, two in zip(found, signals, strict=True):
        assert one.target == two.target and np.array_equal(one.values, two.values)
    blind = read_signals(task, str(file), targets=False)
    assert [signal.target for signal in blind] == [""] * 9
    if isinstance(task, DigitsTask):
        written_file(file, task, lambda arrays: arrays.update(inputs=arrays["inputs"][..., 0]))
        assert np.array_equal(read_signals(task, str(file))[3].values, signals[3].values)


def put(name, index, value):
    return lambda arrays: arrays[name].__setitem__(index, value)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        (DigitsTask(), lambda a: a.pop("inputs"), r"has no array named inputs, only \['targets'\]"),
        (DigitsTask(), lambda a: a.pop("targets"), r"has no array named targets, only"),
        (DigitsTask(), lambda a: a.update(inputs=a["inputs"][:, 1:]),
         r"inputs is float32\[9, 7, 8, 1\]: must be numbers \[N, 8, 8, 1\]"),
        (DigitsTask(), lambda a: a.update(inputs=a["inputs"].astype("U9")),
         r"inputs is <U9\[9, 8, 8, 1\]: must be numbers"),
        (DigitsTask(), lambda a: a.update(lengths=np.ones(9, int)), "lengths must be absent"),
        (DigitsTask(), put("inputs", (4, 0, 0, 0), np.nan),
         r"inputs\[4\] contains a number that is not finite"),
        (DigitsTask(), lambda a: a.update(targets=np.array(["ten"] * 9)),
         r"targets\[0\] is 'ten': must be one of zero, one,"),
        (DigitsTask(), lambda a: a.update(targets=np.arange(9)),
         r"targets is int64\[9\]: must be strings \[9\]"),
        (TonesTask(), lambda a: a.update(inputs=a["inputs"][:, :, :15]),
         r"15\]: must be numbers \[N, T, 16\]"),
        (TonesTask(), put("lengths", 2, 0), r"lengths\[2\] is 0: must be from 1 to the"),
        (TonesTask(), put("lengths", 2, 999), r"lengths\[2\] is 999: must be from 1 to the"),
        (DigitsTask(), lambda a: a.update(inputs=np.full((9, 8, 8), 1e300)),
         r"inputs\[0\] contains a number that is not finite"),
        (TonesTask(), lambda a: a.update(lengths=np.ones(8, int)), r"must be integers \[9\]"),
        (TonesTask(letters=3), lambda a: a.update(targets=np.array(["abd"] * 9)),
         r"targets\[0\] is 'abd': must be letters from a to c"),
    ],
)  # fmt: skip
def test_invalid_signal_file_error_names_file_and_array(tmp_path, task, change, message):
    file = tmp_path / "seen.npz"
    written_file(file, task, change)
    with pytest.raises(DataError, match=rf"^{re.escape(str(file))}.* {message}") as caught:
        read_signals(task, str(file))
    assert "\n" not in str(caught.value)


def test_signal_file_without_arrays_is_rejected(tmp_path):
    for i, content in enumerate((b"", b"text", b"PK\x03\x04 cut off")):
        (tmp_path / f"{i}.npz").write_bytes(content)
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", inputs=np.array([{}]))
    for name in ("0.npz", "1.npz", "2.npz", "one.npy", "objects.npz"):
        with pytest.raises(DataError, match=r"must be a \.npz file of arrays"):
            read_signals(DigitsTask(), str(tmp_path / name))


@pytest.mark.slow_except("array", "bytes", "header", "size")
@pytest.mark.parametrize("damage", ["array", "header", "bytes", "size", "deflated"])
def test_damaged_signal_array_is_rejected(tmp_path, damage):
    """Includes a header that requests too much memory and one that is not an array's."""
    whole = io.BytesIO()
    np.save(whole, np.zeros((3, 8, 8, 1), np.float32))
    content = whole.getvalue()
    content = {
        "array": content[:-9],
        "header": content.replace(b"{'descr'", b"{{descr'"),
        "bytes": b"pictures",
        "size": content.replace(b"(3, 8, 8, 1), }", b"(99999999999,)}"),
        "deflated": content,
    }[damage]
    how = zipfile.ZIP_DEFLATED if damage == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "a.npz", "w", how) as file:
        file.writestr("inputs.npy", content)
        file.writestr("targets.npy", content)
    if damage == "deflated":
        raw = bytearray((tmp_path / "a.npz").read_bytes())
        raw[45:49] = b"\xff\xff\xff\xff"
        (tmp_path / "a.npz").write_bytes(raw)
    with pytest.raises(DataError, match=r"a.npz must be a .npz file of arrays") as caught:
        read_signals(DigitsTask(), str(tmp_path / "a.npz"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.long_except("digits-encoder-decoder")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("digits", "encoder-decoder"), ("digits", "encoder"), ("tones", "encoder-decoder")],
)
def test_commands_evaluate_and_answer_signal_file(tmp_path, name, kind, capsys):
    """A file with the held-out examples of the run gives the scores of the run."""
    task = DigitsTask(examples=60) if name == "digits" else TonesTask(examples=60)
    config = small(task, kind, steps=8, eval_every=8, checkpoint_every=8, warmup_steps=2)
    config = replace(config, learning_rate=5e-3, out=str(tmp_path / "run"))
    result = fit(config)
    held_out = make_signals(task, config.seed)[54:]
    inputs, valid = stack_rows([signal.values for signal in held_out])
    lengths = {} if valid is None else {"lengths": valid.sum(axis=1)}
    targets = np.array([signal.target for signal in held_out])
    file = str(tmp_path / "seen.npz")
    np.savez(file, inputs=inputs, targets=targets, **lengths)

    def command(name, *arguments):
        return run_command([name, "--model", config.out, *arguments])

    assert command("evaluate", "--data", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nats_per_token"] == pytest.approx(result.val_loss, abs=1e-5)
    assert {key: found[key] for key in result.scores} == pytest.approx(result.scores)
    assert command("generate", "--prompts", file) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert len(lines) == 6
    scored = "accuracy" if kind == "encoder" else "exact_match"
    right = np.mean([one == two for one, two in zip(lines, targets, strict=True)])
    assert right == pytest.approx(found[scored])
    for argv, message in (
        (["generate", "--prompt", "x"], f"a run for task '{name}' "),
        (["generate"], "prompts is None: a run for task"),
        (["evaluate", "--data", str(tmp_path)], "must be a .npz file"),
        (["evaluate", "--data", file, "--beams", "2"], "beams is 2: a run for"),
    ):
        assert command(*argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
