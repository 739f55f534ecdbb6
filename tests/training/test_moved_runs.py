"""Runs whose folder, data and base have moved, read and resumed from any directory."""

import dataclasses
import shutil
from pathlib import Path

import chex
import pytest

from transformer_jax.__main__ import main
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.config.tasks import LanguageTask
from transformer_jax.loading import load_adapters, load_run
from transformer_jax.training.loop import fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT = "to be or not to be that is the question\n" * 11


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with two bases, a run with adapters and one without, all created in it."""
    folder = tmp_path_factory.mktemp("made")
    model = ModelConfig(d_model=8, num_layers=1, num_heads=2, max_len=16)
    usual = dict(batch_size=2, steps=2, eval_every=2, sample_tokens=0, warmup_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        (folder / "work" / "bases").mkdir(parents=True)
        patch.chdir(folder / "work")
        Path("text.txt").write_text(TEXT)
        for seed, name in enumerate(("base", "other")):
            fit(TrainConfig(model=model, data="text.txt", out=f"bases/{name}", seed=seed, **usual))
        start = fine_tuning(load_run("bases/base").config, "bases/base", LanguageTask())
        start = dataclasses.replace(start, data="text.txt", context=12, **usual)
        fit(dataclasses.replace(start, out="whole"))
        fit(dataclasses.replace(start, out="tuned", lora=LoraConfig(rank=2)))
    return folder


@pytest.fixture
def moved(original, tmp_path, monkeypatch):
    """A copy of that folder elsewhere, with the process in a third folder and the original gone."""
    shutil.copytree(original / "work", tmp_path / "moved")
    (original / "work").rename(original / "away")
    (tmp_path / "third").mkdir()
    monkeypatch.chdir(tmp_path / "third")
    yield tmp_path / "moved"
    (original / "away").rename(original / "work")


@pytest.mark.slow
def test_run_can_be_loaded_from_any_working_directory(original, tmp_path, monkeypatch):
    monkeypatch.chdir(original / "work")
    params = load_run("tuned").params
    monkeypatch.chdir(tmp_path)
    chex.assert_trees_all_equal(load_run(original / "work" / "tuned").params, params)
    run = load_run(original / "work" / "tuned").run
    assert run.init_from == str(original / "work" / "bases" / "base")
    assert run.data == str(original / "work" / "text.txt")


@pytest.mark.slow
def test_run_moved_with_base_and_data_loads_and_resumes(moved):
    assert load_run(moved / "tuned").run.init_from == str(moved / "bases" / "base")
    config = dataclasses.replace(load_run(moved / "tuned").run, out=str(moved / "tuned"), steps=3)
    assert config.data == str(moved / "text.txt")
    assert fit(config, resume=True).step == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tuned", "whole"])
def test_moved_base_model_may_be_renamed_and_is_verified(moved, name, capsys):
    (moved / "bases").rename(moved / "elsewhere")
    base, tuned = str(moved / "elsewhere" / "base"), moved / name
    run = ["--model", str(tuned)]
    commands = {
        "generate": [*run, "--prompt", "to", "--num-tokens", "2"],
        "evaluate": [*run, "--data", str(moved / "text.txt")],
        "convert": [*run, "--to", str(moved / "converted")],
    }
    if name == "whole":  # needs no base, and a flag without effect is rejected
        load_run(tuned)
        with pytest.raises(
            ConfigError, match=r"init_from is .*the run has no adapters, so it reads no other model"
        ):
            load_run(tuned, init_from=base)
        for command, flags in commands.items():
            assert main([command, *flags, "--init-from", base]) == 2
            assert "the run has no adapters" in capsys.readouterr().err
        return
    message = rf"^run '.*{name}' started from '.*base', .*if it has moved, pass init_from=FOLDER$"
    with pytest.raises(ConfigError, match=message):
        load_run(tuned)
    other = str(moved / "elsewhere" / "other")
    for read in (load_run, load_adapters):
        read(tuned, init_from=base)
        with pytest.raises(CheckpointError, match="other: parameters have sha256"):
            read(tuned, init_from=other)
    for command, flags in commands.items():
        assert main([command, *flags]) == 2
        assert f"run '{tuned}' started from" in capsys.readouterr().err
        assert main([command, *flags, "--init-from", other]) == 1
        assert main([command, *flags, "--init-from", base]) == 0
        assert main([command, "--model", base, *flags[2:], "--init-from", base]) == 2
    config = dataclasses.replace(load_run(tuned, init_from=base).run, out=str(tuned), steps=3)
    with pytest.raises(CheckpointError, match="other: parameters have sha256"):
        fit(dataclasses.replace(config, init_from=other), resume=True)
    assert fit(config, resume=True).step == 3
    load_run(tuned)  # its config names the base at its new location
