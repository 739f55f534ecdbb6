"""generate, evaluate, plan, export and convert on a run that is trained once."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.__main__ import main as run_command
from transformer_jax.loading import load_run
from transformer_jax.pretrained.load import load_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = tj.ModelConfig(d_model=24, num_heads=2, num_layers=1, d_ff=29, max_len=13, positions="rope")


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_compilation) -> str:
    folder = tmp_path_factory.mktemp("run")
    words = np.random.default_rng(5).choice(["the", "cat", "sat", "on", "a", "mat", "\n"], 301)
    (folder / "text.txt").write_text(" ".join(words))
    config = tj.TrainConfig(
        model=MODEL, data=str(folder / "text.txt"), out=str(folder / "run"), val_fraction=0.2,
        steps=4, batch_size=3, warmup_steps=1, eval_every=2, checkpoint_every=2, sample_tokens=0,
    )  # fmt: skip
    assert tj.fit(config).step == 4
    return config.out


def test_generate_command_prints_text_from_loaded_model(run, capsys):
    argv = ["--model", run, "--prompt", "the cat", "--num-tokens", "9", "--temperature", "0"]
    assert run_command(["generate", *argv]) == 0
    wanted = tj.load(run).generate("the cat", 9)
    assert capsys.readouterr().out.rstrip("\n") == ("the cat" + wanted).rstrip("\n")
    assert load_run(run, "last").step == 4


def test_evaluate_command_sums_log_probabilities(run, capsys):
    assert run_command(["evaluate", "--model", run, "--prompt", "a cat sat", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = tj.load(run)
    ids = np.asarray(model.tokenizer.encode("a cat sat"))
    logits = np.asarray(tj.build(model.config).apply({"params": model.params}, ids[None])[0][0])
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    wanted = -log_p[np.arange(len(ids) - 1), ids[1:]].sum()
    assert found["nats"] == pytest.approx(wanted, rel=1e-5)


def test_plan_for_run_counts_its_parameters(run, capsys):
    assert run_command(["plan", "--model", run, "--target", "cpu", "--quick"]) == 0
    assert f"{tj.num_params(tj.load(run).config):,}" in capsys.readouterr().out


def test_export_and_convert_preserve_run_parameters(run, tmp_path):
    model = tj.load(run)
    exported, written = tmp_path / "e", tmp_path / "w"
    argv = ["--model", run, "--to", str(exported), "--context", "13", "--platforms", "cpu"]
    assert run_command(["export", *argv]) == 0
    ids = model.tokenizer.encode("the cat").tolist()
    decode = runpy.run_path(str(exported / "decode.py"))["decode"]
    (found,) = decode(exported, [ids], 5)
    wanted = model.generate("the cat", 5)
    assert model.tokenizer.to_bytes(found).decode() == wanted
    assert (
        run_command(["convert", "--model", run, "--to", str(written), "--dtype", "bfloat16"]) == 0
    )
    config, params = load_pretrained(written)
    assert config.dtype == "bfloat16"
    table = np.asarray(model.params["embed"]["tokens"]).astype(params["embed"]["tokens"].dtype)
    np.testing.assert_array_equal(params["embed"]["tokens"], table)
