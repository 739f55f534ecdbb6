"""Read what the library wrote before positions became one value of a config.

`golden/old_runs` was written by commit 0ac0239 (`golden/write_old_runs.py`, which says with what):
run folders of the command `train.py`, parameters, adapters and configs, and what they came to.
Nothing here writes into it: what a test continues is a copy.

Logits agree to 1e-6 of the largest. Losses of a resumed run agree to a relative 1e-5: the numbers
were written with one version of JAX on one processor, and the sums of another compiler are in
another order, whose last bits the optimizer carries on (3e-7 between JAX 0.10.2 and 0.12). Where
both are the same,

    OLD_RUNS_EXACT=1 python -m pytest tests/checkpoints/test_old_runs.py

compares the losses bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

# What the library is asked with, all of it: to be adapted where a name moves.
import train
from transformer_jax import (
    ConfigError,
    Learned,
    LoraConfig,
    RecurrentConfig,
    apply_lora,
    build,
    init_params,
    load_lora,
    num_params,
    tensor_names,
    train_preset,
)
from transformer_jax.checkpoints.checkpoint import restore, saved_steps, verify
from transformer_jax.checkpoints.run_folder import RunFolder, config_from_json, config_to_json
from transformer_jax.config.tasks import usual_task
from transformer_jax.text.text_model import load_run

GENERATE = ("transformer_jax", "generate")
"""Name what `python -m` takes: the module of the command that writes, and its first arguments."""

REGROUPED = {
    "positions", "position_offset", "sinusoid", "rope", "window_rope_base", "relative_buckets",
    "relative_max_distance",
}  # fmt: skip
"""Fields of the old `ModelConfig` that may be called otherwise now; all others are as they were."""

MOVED = {
    "remat": lambda config: {"none": False, "full": True}[config.remat],
    "beta1": lambda config: config.optimizer.beta1,
    "beta2": lambda config: config.optimizer.beta2,
    "weight_decay": lambda config: config.optimizer.weight_decay,
}
"""Old fields that are written otherwise now, and what they were."""

# Up to here.

OLD = Path(__file__).parents[1] / "golden" / "old_runs"
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
CONFIGS = json.loads((OLD / "old_configs.json").read_text(encoding="utf-8"))
RUNS, DEFAULTS = EXPECTED["runs"], CONFIGS["defaults"]

EXACT = os.environ.get("OLD_RUNS_EXACT") == "1"
LOGITS = 1e-6
"""Tolerance, relative to the largest logit."""

CLASSES = 5e-6
"""Tolerance relative to the largest number, since terms of a sum may cancel."""

LOSSES = 0.0 if EXACT else 1e-5
"""Relative."""

WRITTEN = [(name, which) for name in RUNS for which in ("best", "last") if which in RUNS[name]]

SELDOM = ("char_learned", "pretrained_llama3")
"""Runs that go on in the slow tests alone: each compiles for seconds, as the others do."""


@pytest.fixture(scope="module", autouse=True)
def compilation(request: pytest.FixtureRequest) -> None:
    """Compile as when the files were written if bits are compared, else quickly."""
    if not EXACT:
        request.getfixturevalue("quick_compilation")


def assert_near(actual: Any, expected: Any, tolerance: float = LOGITS) -> None:
    """Compare logits, whose shapes are the same."""
    actual, expected = np.asarray(actual), np.asarray(expected, np.float32)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert np.isfinite(actual).all()
    error, top = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= tolerance * top, f"error {error:.3g} of {top:.3g} is above {tolerance}"


def assert_logits(logits: jax.Array, expected: dict[str, Any]) -> None:
    """Compare logits [1, T, V] with the columns that were written down, and with all columns."""
    columns = len(expected["first"][0])
    assert_near(logits[0, :, :columns], expected["first"])
    assert_near(jax.nn.logsumexp(logits[0], axis=-1), expected["logsumexp"])


def ids(tokens: list[list[int]]) -> jax.Array:  # i32[1, T]
    return jnp.array(tokens, jnp.int32)


def over(defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config as it was written: the defaults and what differs, in nested configs too."""
    nested = {n: over(defaults[n], v) for n, v in changes.items() if isinstance(v, dict)}
    return defaults | changes | nested


def same_fields(config: Any, stored: dict[str, Any]) -> list[str]:
    """Compare each field of a config that is not regrouped; their names."""
    names = sorted(set(stored) - REGROUPED - {"model"})
    for name in names:
        value = MOVED[name](config) if name in MOVED else getattr(config, name)
        value = list(value) if isinstance(value, tuple) else value
        assert (value, type(value)) == (stored[name], type(stored[name])), name
    return names


def model_of(stored: dict[str, Any]) -> Any:
    """The `ModelConfig` of a run folder's config.json in which it stands so."""
    return config_from_json(json.dumps({"model": stored})).model


def tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in stored.items()}


# Run folders


@pytest.mark.parametrize("name", RUNS)
def test_a_config_of_a_run_folder_means_what_it_did(name):
    stored = json.loads((OLD / name / "config.json").read_text(encoding="utf-8"))
    config = config_from_json(json.dumps(stored))
    moved = {name: getattr(config, name) for name in ("data", "val_data", "init_from")}
    assert dataclasses.replace(RunFolder(OLD / name).read_config(), **moved) == config
    assert len(same_fields(config, stored)) == len(DEFAULTS["train"]) - 1
    assert len(same_fields(config.model, stored["model"])) == len(stored["model"]) - len(REGROUPED)
    assert config_from_json(config_to_json(config)) == config
    assert num_params(config.model) == RUNS[name]["num_params"]


@pytest.mark.parametrize(("name", "which"), WRITTEN)
def test_a_run_has_its_logits(name, which):
    expected = RUNS[name]
    model = load_run(OLD / name, which)
    assert saved_steps(OLD / name / "checkpoints") == expected["steps"]
    apply = jax.jit(build(model.config).apply)
    logits, _ = apply({"params": model.params}, ids(expected["tokens"]))
    assert_logits(logits, expected[which]["logits"])
    prompt = model.tokenizer.encode(expected["prompt"])
    assert prompt.tolist() == expected["tokens"][0][: len(prompt)]


def writing(name: str, which: str) -> list[str]:
    argv = ["--run", str(OLD / name), "--checkpoint", which, "--prompt", RUNS[name]["prompt"]]
    return [*GENERATE[1:], *argv, "--temperature", "0", "--tokens", "16"]


@pytest.mark.parametrize(("name", "which"), WRITTEN)
def test_a_run_writes_its_text(name, which, capsys, monkeypatch):
    """Run what `python -m` runs, in this process, which has JAX already."""
    monkeypatch.setattr(sys, "argv", [GENERATE[0], *writing(name, which)])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("ignore", RuntimeWarning)  # another test may have imported it
        runpy.run_module(GENERATE[0], run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert out == RUNS[name][which]["text"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in RUNS]
)
def test_a_run_goes_on_as_it_did(name, tmp_path):
    out = Path(shutil.copytree(OLD / name, tmp_path / name))
    data = str(shutil.copy(OLD / "text.txt", tmp_path))
    before = RunFolder(out).read_metrics()
    expected = RUNS[name]["resume"]
    argv = ["--resume", "--out", str(out), "--data", data, "--sample-tokens", "0"]
    assert train.main([*argv, *expected["flags"]]) == 0
    lines = RunFolder(out).read_metrics()
    assert lines[: len(before)] == before
    lines = lines[len(before) :]
    assert [line["step"] for line in lines] == [line["step"] for line in expected["measured"]]
    for line, wanted in zip(lines, expected["measured"], strict=True):
        assert ("val_loss" in line) == ("val_loss" in wanted)
        for key in wanted.keys() - {"step"}:
            assert line[key] == pytest.approx(wanted[key], rel=LOSSES, abs=0), (line["step"], key)
    last = saved_steps(out / "checkpoints")[-1]
    assert last == lines[-1]["step"]
    verify(out / "checkpoints" / f"step-{last:08d}")


# Adapters, and parameters alone


def test_adapters_have_their_logits():
    expected = EXPECTED["lora"]
    model = load_run(OLD / expected["run"], "last")
    config, adapters = load_lora(OLD / "lora", model.params, tensor_names(model.config))
    assert config == LoraConfig(**tuples(expected["config"]))
    params = apply_lora(model.params, adapters, config)
    logits, _ = jax.jit(build(model.config).apply)({"params": params}, ids(expected["tokens"]))
    assert_logits(logits, expected["logits"])


@pytest.mark.parametrize("folder", EXPECTED["params"])
def test_parameters_of_a_checkpoint_are_the_same_bits(folder):
    config, entry = config_named(EXPECTED["params"][folder])
    shapes = shapes_of(config, entry)
    like = {"params": shapes, "key": jax.eval_shape(lambda: jax.random.key(0)), "note": 0.0}
    verify(OLD / "params" / folder / "step-00000003")
    tree = restore(OLD / "params" / folder / "step-00000003", like)
    assert (tree["note"], tree["key"]) == (0.5, jax.random.key(6))
    chex.assert_trees_all_equal(tree["params"], filled(shapes))


# Configs


def config_named(name: str) -> tuple[Any, dict[str, Any]]:
    """A config of old_configs.json, and its entry."""
    if name in CONFIGS["models"]:
        entry = CONFIGS["models"][name]
        return model_of(over(DEFAULTS["train"]["model"], entry["config"])), entry
    entry = CONFIGS["recurrent"][name]
    return RecurrentConfig(**tuples(over(DEFAULTS["recurrent"], entry["config"]))), entry


def logits_of(config: Any, params: Any) -> jax.Array:  # f32[1, T, V]
    more = {"source": ids(CONFIGS["source"])} if config.kind == "encoder-decoder" else {}
    return build(config).apply({"params": params}, ids(CONFIGS["tokens"]), **more)[0]


def layout(params: Any) -> list[str]:
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    ]


def filled(shapes: Any) -> Any:
    """The parameters of `golden/write_old_runs.py`: of any layout, and nothing is compiled."""
    random = np.random.RandomState(7)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(-0.8, 0.8, x.shape), x.dtype), shapes)


def shapes_of(config: Any, entry: dict[str, Any]) -> Any:
    """The parameters' shapes, once they and their names are those of the entry."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert layout(shapes) == CONFIGS["layouts"][entry["layout"]]
    assert num_params(config) == entry["num_params"]
    return shapes


@pytest.mark.parametrize("name", CONFIGS["models"])
def test_an_old_model_config_means_what_it_did(name):
    """Its fields, the names and shapes of its parameters, and its logits; absent keys are the
    defaults, and the new library writes and reads it again."""
    config, entry = config_named(name)
    stored = over(DEFAULTS["train"]["model"], entry["config"])
    assert len(same_fields(config, stored)) == len(stored) - len(REGROUPED)
    assert model_of(entry["config"]) == config
    task = usual_task(config)
    whole = dataclasses.replace(train_preset(), task=task, model=config, context=None)
    assert config_from_json(config_to_json(whole)) == whole
    params = filled(shapes_of(config, entry))
    assert_near(logits_of(config, params)[0, -1], entry["logits"])
    if "classes" in entry:
        tokens = ids(CONFIGS["tokens"])
        classes = build(config).apply({"params": params}, tokens, method="classify")
        assert_near(classes[0], entry["classes"], CLASSES)


@pytest.mark.parametrize("name", [n for n, x in CONFIGS["models"].items() if "fresh" in x])
def test_fresh_parameters_have_their_logits(name):
    config, entry = config_named(name)
    logits = logits_of(config, init_params(config, jax.random.key(0)))
    assert_near(logits[0, -1], entry["fresh"])


def test_old_configs_mean_different_models():
    """Else a field that is lost would not be seen."""
    logits = [entry["logits"] for entry in CONFIGS["models"].values()]
    for i, one in enumerate(logits):
        assert all(np.abs(np.subtract(one, two)).max() > 1e-3 for two in logits[:i])


@pytest.mark.parametrize("name", CONFIGS["recurrent"])
def test_an_old_recurrent_config_means_what_it_did(name):
    config, entry = config_named(name)
    stored = over(DEFAULTS["recurrent"], entry["config"])
    assert len(same_fields(config, stored)) == len(stored)
    shapes_of(config, entry)


@pytest.mark.parametrize("entry", CONFIGS["lora"])
def test_an_old_lora_config_means_what_it_did(entry):
    stored = over(DEFAULTS["lora"], entry["config"])
    config = LoraConfig(**tuples(stored))
    assert len(same_fields(config, stored)) == len(stored)
    assert config.scale == entry["scale"]


@pytest.mark.parametrize("name", CONFIGS["presets"])
def test_an_old_config_of_a_preset_is_the_preset(name):
    entry = CONFIGS["presets"][name]
    stored = over(DEFAULTS["train"], entry["config"])
    config = config_from_json(json.dumps(stored))
    assert len(same_fields(config, stored)) == len(stored) - 1
    assert len(same_fields(config.model, stored["model"])) == len(stored["model"]) - len(REGROUPED)
    preset = train_preset(name or None)
    if name in ("", "shakespeare-cpu"):  # which learn sooner since
        model = dataclasses.replace(preset.model, positions=Learned(), init_std=0.02)
        preset = dataclasses.replace(preset, model=model)
    assert config == dataclasses.replace(preset, warmup_steps=stored["warmup_steps"])
    unsaid = config_from_json(json.dumps(entry["config"]))
    assert unsaid.warmup == config.warmup  # None has since been the default
    assert dataclasses.replace(unsaid, warmup_steps=config.warmup_steps) == config
    scanned = dataclasses.replace(config.model, scan_layers=True)  # as many, and sooner counted
    assert num_params(scanned) == entry["num_params"]


@pytest.mark.parametrize("name", CONFIGS["refused"])
def test_an_old_config_that_contradicts_itself_is_still_refused(name):
    with pytest.raises(ConfigError):
        model_of(CONFIGS["refused"][name])
