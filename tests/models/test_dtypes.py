"""Tests of dtype conversions: a finite weight that overflows raises an error with its name."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.checkpoints.run_folder import RunFolder, json_text
from transformer_jax.cli import evaluate
from transformer_jax.cli.convert import main as convert
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig
from transformer_jax.loading import TextModel, with_param_dtype
from transformer_jax.models.factory import init_params
from transformer_jax.models.lora import init_lora, merge_lora, split_frozen
from transformer_jax.models.ops import logits
from transformer_jax.models.quantized import quantize
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pytree import cast_floats
from transformer_jax.text import evaluation
from transformer_jax.tokenizers.trained import ByteTokenizer
from transformer_jax.training.step import start_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=11, d_model=6, num_layers=1, num_heads=2, d_ff=7, max_len=13, activation="gelu_tanh"
)
PATH = ("decoder", "block_0", "feed_forward", "up", "kernel")
NAME = "/".join(PATH)
TENSOR = r"model.safetensors: transformer.h.0.mlp.c_fc.weight"
HALF, NEARLY = 1e5, 3.4e38
"""A weight above the float16 maximum; one above the bfloat16 but below the float32 maximum."""


def with_weight(value, config=CONFIG, dtype=jnp.float32):
    """Return random parameters, with `value` as one of the numbers."""
    params = cast_floats(init_params(config, jax.random.key(0)), dtype)
    at = params
    for name in PATH[:-1]:
        at = at[name]
    at["kernel"] = at["kernel"].at[2, 3].set(value)
    return params


@pytest.fixture
def folder(tmp_path):
    save_pretrained(tmp_path / "model", CONFIG, with_weight(-HALF))
    return tmp_path / "model"


@pytest.mark.slow
def test_float16_overflow_error_names_tensor(folder, tmp_path, capsys):
    message = f"{TENSOR} has a weight of size 1e\\+05: float16 represents at most 65504"
    for given in ("float16", jnp.float16):
        for scanned in (False, True):
            with pytest.raises(ValueError, match=message):
                load_pretrained(folder, dtype=given, scan_layers=scanned)
    to = str(tmp_path / "to")
    assert convert(["--model", str(folder), "--to", to, "--dtype", "float16"]) == 2
    assert TENSOR in capsys.readouterr().err and not (tmp_path / "to").exists()
    assert load_pretrained(folder, dtype="bfloat16")[0].dtype == "bfloat16"


@pytest.mark.slow
def test_overflow_in_compute_dtype_raises_error(tmp_path):
    """The embeddings determine the compute dtype; norms compute in float32 anyway."""
    params = cast_floats(with_weight(1.0), jnp.float16)
    wide = with_weight(HALF)
    params["decoder"]["block_0"]["feed_forward"]["up"] = wide["decoder"]["block_0"]["feed_forward"][
        "up"
    ]
    save_pretrained(tmp_path / "mixed", CONFIG, params)
    with pytest.raises(ValueError, match=f"{TENSOR} has a weight of size 1e\\+05: float16"):
        load_pretrained(tmp_path / "mixed")
    params = cast_floats(with_weight(1.0), jnp.float16)
    params["decoder"]["norm"]["scale"] = jnp.full(6, HALF, jnp.float32)
    save_pretrained(tmp_path / "norm", CONFIG, params)
    assert float(load_pretrained(tmp_path / "norm")[1]["decoder"]["norm"]["scale"].max()) == HALF


LORA = LoraConfig(rank=1, alpha=1.0, targets=("up",))


def merged_in_half(dtype):
    params = with_weight(6e4, dtype=jnp.float16)
    adapters = init_lora(params, LORA, jax.random.key(1))
    up = adapters["decoder"]["block_0"]["feed_forward"]["up"]
    up.update({"a": jnp.full((6, 1), 100, dtype), "b": jnp.full((1, 7), 100, dtype)})
    merge_lora(params, adapters, LORA)


CONVERSIONS = {
    "a run's parameters": (
        lambda: with_param_dtype(
            TextModel(CONFIG, with_weight(HALF), ByteTokenizer()), "float16"
        ), "float16",
    ),
    "cast_floats": (lambda: cast_floats(with_weight(-NEARLY), jnp.bfloat16), "bfloat16"),
    "numpy": (
        lambda: cast_floats(jax.tree.map(np.asarray, with_weight(HALF)), np.float16), "float16",
    ),
    "bfloat16 to float16": (
        lambda: cast_floats(with_weight(HALF, dtype=jnp.bfloat16), jnp.float16), "float16",
    ),
    "quantize": (lambda: quantize(with_weight(NEARLY), "bf16"), "bfloat16"),
    "a frozen base": (
        lambda: split_frozen(with_weight(NEARLY), replace(LORA, base="bfloat16")), "bfloat16",
    ),
    "merged adapters": (lambda: merged_in_half(jnp.float32), "float16"),
    "merged adapters of float16": (lambda: merged_in_half(jnp.float16), "float16"),
    "the state of a run": (
        lambda: start_state(
            with_weight(NEARLY), optax.sgd(0.1), jax.random.key(0), param_dtype=jnp.bfloat16
        ), "bfloat16",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CONVERSIONS)
def test_conversion_overflow_error_names_parameter(case):
    convert_it, dtype = CONVERSIONS[case]
    with pytest.raises(ValueError, match=f"^{NAME} has .*: .*{dtype}"):
        convert_it()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantization_overflow_raises_error(kind):
    largest = float(np.finfo(np.float32).max)
    for value in (largest, NEARLY, 1e30):
        try:
            weights = quantize(with_weight(value, replace(CONFIG, d_ff=8)), kind)
        except ConfigError as error:
            assert NAME in str(error) and value == largest
            continue
        back = weights["decoder"]["block_0"]["feed_forward"]["up"]["kernel"].astype(jnp.float32)
        assert np.isfinite(np.asarray(back)).all()


@pytest.mark.slow_except("bfloat16", "float16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_cast_keeps_nonfinite_values_and_rounds_others(dtype):
    rng = np.random.default_rng(3)
    largest = float(jnp.finfo(dtype).max)
    values = np.array([np.inf, -np.inf, np.nan, 0.0, largest, -largest, *rng.normal(size=5)])
    given = {"a": {"b": values.astype(np.float32)}, "count": np.arange(3)}
    found = cast_floats(given, dtype)
    want = given["a"]["b"].astype(dtype)
    assert found["a"]["b"].dtype == dtype and found["count"].dtype == given["count"].dtype
    assert found["a"]["b"].tobytes() == want.tobytes()
    traced = jax.jit(lambda tree: cast_floats(tree, dtype))(jax.tree.map(jnp.asarray, given))
    got = np.asarray(traced["a"]["b"], np.float32)
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.slow
def test_metrics_json_stores_nan_as_null(tmp_path, capsys, monkeypatch):
    nan = {"loss": math.nan, "parts": [math.inf, 1.5, (-math.inf,)], "step": 3, "name": "NaN"}
    assert json.loads(json_text(nan), parse_constant=pytest.fail) == {
        "loss": None, "parts": [None, 1.5, [None]], "step": 3, "name": "NaN",
    }  # fmt: skip
    run = RunFolder(tmp_path)
    run.append_metrics({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    with open(run.metrics_file, "a") as log:
        log.write('{"step": 2, "loss": NaN}\n')
    assert run.read_metrics() == [
        {"step": 1, "loss": None, "grad_norm": None}, {"step": 2, "loss": None},
    ]  # fmt: skip
    run.cut_metrics(2)
    assert "NaN" not in run.metrics_file.read_text()
    monkeypatch.setattr(evaluate, "_load", lambda *_: None)
    judged = {"perplexity": math.nan, "likely": 0.5}
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: judged)
    assert evaluate.main(["--model", "x", "--data", "y", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"perplexity": None, "likely": 0.5}


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_logits_of_bfloat16_are_sums_in_float32(rows):
    rng = np.random.default_rng(rows)
    x, table = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((rows, 1, 64), (9, 64)))
    found = logits(x, table, None)
    assert found.dtype == jnp.float32
    wide = np.asarray(x[:, 0], np.float64) @ np.asarray(table, np.float64).T
    np.testing.assert_allclose(found[:, 0], wide, rtol=0, atol=2e-6 * np.abs(wide).max())
