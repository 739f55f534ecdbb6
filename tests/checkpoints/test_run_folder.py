"""The files of a run folder, read and written without training."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import (
    RunFolder,
    config_from_json,
    config_to_json,
    differences,
    json_text,
    tokenizer_sha256,
    with_absolute_paths,
)
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.optimizers import SGD, Lion
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer

PAIRS = TrainConfig(
    task=Seq2SeqTask(targets="t"), model=ModelConfig(kind="encoder-decoder"), data="d"
)


def test_metrics_are_valid_json_and_damaged_lines_are_counted(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == [] and folder.cut_metrics(3) == 0
    for step, loss in ((1, 0.5), (2, math.inf), (3, None), (4, 7)):
        folder.append_metrics({"step": step, "loss": loss, "more": [math.nan, {"a": (1, 2.5)}]})
    more = [None, {"a": [1, 2.5]}]
    expected = [
        {"step": n, "loss": x, "more": more} for n, x in ((1, 0.5), (2, None), (3, None), (4, 7))
    ]
    assert [json.loads(line) for line in folder.metrics_file.read_text().splitlines()] == expected
    damaged = ['{"step": 2', "[1]", '{"step": 1.0}', '{"step": true}', '{"loss": 1}',
               '{"step": 3, "loss": "x"}', '{"step": 3, "val_loss": [1]}', '{"step": 2, "x": NaN}',
               '{"step": 9}']  # fmt: skip
    with open(folder.metrics_file, "a") as stream:
        stream.write("\n".join(damaged) + "\n" + '{"step": 2, "unfin')
    good = [{"step": 2, "x": None}, {"step": 9}]
    assert folder.read_metrics() == expected + good
    assert folder.cut_metrics(3) == 7  # the unfinished line does not count
    assert folder.read_metrics() == [*expected[:3], good[0]]
    assert folder.cut_metrics(3) == 0
    assert json_text({"a": [1.5]}, indent=1) == '{\n "a": [\n  1.5\n ]\n}'


def test_config_paths_survive_change_of_directory_and_move(tmp_path, monkeypatch):
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    monkeypatch.chdir(first)
    for name in ("d", "t", "v", "runs"):
        (first / name).mkdir()
    task = replace(PAIRS.task, val_targets="no/such")
    config = replace(
        PAIRS, task=task, data="d,t", val_data="v", out="runs/x", init_from="hub/id",
        tokenizer="pretrained",
    )  # fmt: skip
    whole = with_absolute_paths(config)
    assert whole.data == f"{first}/d,{first}/t" and whole.val_data == f"{first}/v"
    assert (whole.out, whole.init_from) == (f"{first}/runs/x", "hub/id")
    assert (whole.task.targets, whole.task.val_targets) == (f"{first}/t", "no/such")
    folder = RunFolder(first / "runs/x")
    folder.path.mkdir()
    folder.write_config(config)
    monkeypatch.chdir("/")
    assert folder.read_config() == whole
    os.rename(first, second)  # the run is moved together with its files
    moved = RunFolder(second / "runs/x").read_config()
    assert moved.data == f"{second}/d,{second}/t" and moved.task.targets == f"{second}/t"
    assert moved.out == f"{first}/runs/x" and moved.task.val_targets == "no/such"
    (second / "v").rmdir()
    assert RunFolder(second / "runs/x").read_config().val_data == f"{first}/v"
    text = config_to_json(replace(config, data="python-docs"))
    (second / "python-docs").mkdir()
    monkeypatch.chdir(second)
    assert with_absolute_paths(config_from_json(text)).data == "python-docs"


def test_config_differences_list_only_immutable_fields():
    model = replace(PAIRS.model, d_model=192, dropout=0.5)
    new = replace(
        PAIRS, steps=7, batch_size=3, model=model, optimizer=Lion(), data="other",
        task=replace(PAIRS.task, beams=9, targets="u"), keep=1,
    )  # fmt: skip
    old = PAIRS.model
    assert differences(PAIRS, new) == [
        f"model.d_model: {old.d_model} -> 192", f"model.dropout: {old.dropout} -> 0.5",
        "batch_size: 12 -> 3", f"optimizer: {PAIRS.optimizer!r} -> {Lion()!r}",
    ]  # fmt: skip
    assert differences(PAIRS, PAIRS) == [] == differences(PAIRS, new, {"model", "batch_size",
        "optimizer", "steps", "data", "task", "keep"})  # fmt: skip
    one, two = replace(PAIRS, optimizer=SGD()), replace(PAIRS, optimizer=SGD(momentum=0.5))
    assert differences(one, two) == ["optimizer.momentum: 0.0 -> 0.5"]


def test_invalid_config_error_names_key(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path} is not a run: config.json is missing$"):
        folder.read_config()
    content = json.loads(config_to_json(PAIRS))
    for change, message in (
        ({"stepz": 3}, "stepz: unknown key; did you mean steps?"),
        ({"steps": 0}, "steps is 0: must"), ({"task": 3}, "task is 3: must be an object"),
        ({"task": {"kind": "no"}}, "task.kind is 'no'"),
        ({"model": content["model"] | {"d_modl": 1}}, "model.d_modl: unknown key; did you mean"),
        ({"optimizer": {"kind": "sgd", "momentum": 2.0}}, "optimizer.momentum is 2.0"),
        ({"task": {"kind": "x:Y"}}, "task.kind"),
    ):  # fmt: skip
        folder.config_file.write_text(json.dumps(content | change))
        with pytest.raises(ConfigError) as caught:
            folder.read_config()
        assert str(caught.value).startswith(f"{folder.config_file}: {message}")
    assert config_from_json(json.dumps(content)) == PAIRS


def test_tokenizer_files_are_verified_by_hash(tmp_path):
    folder = RunFolder(tmp_path)
    one, two = CharTokenizer("ab\ud800"), ByteTokenizer()
    folder.write_tokenizer(one)
    folder.write_source_tokenizer(None)
    assert folder.read_source_tokenizer() is None
    assert folder.read_tokenizer() == one
    digest = hashlib.sha256(folder.tokenizer_file.read_bytes()).hexdigest()
    assert tokenizer_sha256(one) == digest and folder.read_tokenizer(digest) == one
    with pytest.raises(CheckpointError, match=r"tokenizer.json has the wrong SHA-256 checksum$"):
        folder.read_tokenizer(tokenizer_sha256(two))
    with pytest.raises(CheckpointError, match=r"source_tokenizer.json: No such file"):
        folder.read_source_tokenizer(digest)
    folder.write_source_tokenizer(two)
    assert folder.read_source_tokenizer(tokenizer_sha256(two)) == two
    folder.tokenizer_file.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: "):
        folder.read_tokenizer()


def test_checkpoints_are_found_pruned_and_set_aside_by_step(tmp_path):
    assert (
        checkpoint.saved_steps(tmp_path / "none") == [] and checkpoint.best_step(tmp_path) is None
    )
    for step, loss in ((3, 0.5), (7, 0.25), (12, None), (10**8, 0.25)):
        checkpoint.save(tmp_path, step, {"x": np.arange(3)}, {"val_loss": loss, "n": step})
    for name in ("step-5", "step-00000009.tmp", "step-00000011.damaged", "other"):
        (tmp_path / name).mkdir()
    assert checkpoint.saved_steps(tmp_path) == [3, 7, 12, 10**8]
    assert checkpoint.step_path(tmp_path, 12).name == "step-00000012"
    assert checkpoint.best_step(tmp_path) == 7  # a tie goes to the first
    checkpoint.set_metadata(checkpoint.step_path(tmp_path, 3), val_loss=0.125, more="x")
    found = checkpoint.verify(checkpoint.step_path(tmp_path, 3))
    assert found.metadata == {"val_loss": 0.125, "n": 3, "more": "x"} and found.step == 3
    assert checkpoint.best_step(tmp_path) == 3
    restored = checkpoint.restore(found.path, {"x": np.zeros(3, int)})
    np.testing.assert_array_equal(restored["x"], np.arange(3))
    checkpoint.remove_partial(tmp_path)
    assert not (tmp_path / "step-00000009.tmp").exists()
    checkpoint.set_aside(tmp_path, 12)
    assert checkpoint.saved_steps(tmp_path) == [3, 7, 12]
    assert (tmp_path / "step-100000000.damaged").is_dir()
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.saved_steps(tmp_path) == [3, 12]
