"""The decoder of docs/one_file.py, compared with the library."""

import ast
import dataclasses
import functools
import importlib.util
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.docs.test_docs import defined
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.models.positions import apply_rope

pytestmark = pytest.mark.usefixtures("quick_compilation")

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "one_file.py"
PAGE = DOCS / "one_file.md"

spec = importlib.util.spec_from_file_location("one_file", FILE)
assert spec is not None and spec.loader is not None
one_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one_file)

GPT2 = one_file.Config(
    vocab_size=41, d_model=15, num_layers=2, num_heads=3, num_kv_heads=3, d_ff=23, max_len=19
)
LLAMA = one_file.Config(
    vocab_size=43, d_model=24, num_layers=2, num_heads=6, num_kv_heads=2, d_ff=29, max_len=19,
    rope_base=509.0, norm="rmsnorm", norm_eps=1e-6, swiglu=True, use_bias=False,
    tie_embeddings=False,
)  # fmt: skip
NO_BIAS = dataclasses.replace(GPT2, d_model=12, rope_base=509.0, use_bias=False)
"""LayerNorm and rotary positions without biases, like the library's small character models."""
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "no_bias": NO_BIAS}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

LOGITS_F32 = 1e-5
"""Logits in float32 of two implementations, relative to the largest logit."""


def library_config(config, **changes) -> tj.ModelConfig:
    """Return the library config of the same model."""
    fields = dataclasses.asdict(config)
    base, glu = fields.pop("rope_base"), fields.pop("swiglu")
    return tj.ModelConfig(
        **fields,
        positions="learned" if base is None else tj.Rope(base=base),
        glu=glu,
        activation="silu" if glu else "gelu_tanh",
        **changes,
    )


forward = jax.jit(one_file.forward, static_argnames="config")


@functools.cache
def from_library(config, **changes):
    """Return random parameters (also biases and scales), tokens [2, 13], and library logits."""
    theirs = library_config(config, **changes)
    leaves, tree = jax.tree.flatten(
        jax.eval_shape(lambda: tj.init_params(theirs, jax.random.key(7)))
    )
    random = np.random.default_rng(11)
    drawn = [random.normal(0, 0.3, x.shape).astype(np.float32) for x in leaves]
    params = jax.tree.map(jnp.asarray, jax.tree.unflatten(tree, drawn))
    tokens = jnp.asarray(random.integers(0, config.vocab_size, (2, 13)), jnp.int32)
    return params, tokens, jax.jit(tj.build(theirs).apply)({"params": params}, tokens)[0]


@pytest.mark.slow_except("gpt2")
@each_config
def test_one_file_parameters_match_library_names_and_shapes(config, key):
    ours = jax.eval_shape(lambda: one_file.init_params(config, key))
    theirs = jax.eval_shape(lambda: tj.init_params(library_config(config), key))
    shapes, expected = (
        {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in jax.tree.leaves_with_path(p)}
        for p in (ours, theirs)
    )
    assert len(shapes) > 17
    assert shapes == expected


@pytest.mark.slow
@each_config
def test_logits_match_library(config):
    params, tokens, expected = from_library(config)
    assert_near(forward(params, config, tokens)[0], expected, LOGITS_F32)


@pytest.mark.slow
def test_logits_with_only_qkv_biases_match_library():
    params, tokens, expected = from_library(LLAMA, qkv_bias=True)
    attention = params["decoder"]["block_1"]["attention"]
    assert "bias" in attention["key"] and "bias" not in attention["out"]
    assert_near(forward(params, LLAMA, tokens)[0], expected, LOGITS_F32)


@pytest.mark.slow
@each_config
def test_logits_with_cache_match_library(config):
    params, tokens, expected = from_library(config)
    cache, parts = one_file.init_cache(config, batch=2, capacity=17), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 13)):
        logits, cache = forward(params, config, tokens[:, start:end], cache)
        parts.append(logits)
    assert cache.length == 13
    assert_near(jnp.concatenate(parts, axis=1), expected, LOGITS_F32)


@pytest.mark.slow
@pytest.mark.long_except("gpt2")
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_greedy_tokens_match_library(config, key):
    params, tokens, _ = from_library(config)
    prompt, theirs = tokens[:, :5], library_config(config)
    new = one_file.generate(params, config, prompt, key, num_tokens=11, temperature=0.0)
    cache = tj.init_cache(theirs, batch=2, capacity=17)
    expected = tj.generate(tj.make_step(tj.build(theirs)), params, prompt, cache, num_tokens=11)
    assert len(set(new.ravel().tolist())) > 3
    assert (new == expected.tokens).all()


@pytest.mark.slow
def test_gradients_match_library():
    """Gradients flow through the cache that `forward` creates."""
    params, tokens, _ = from_library(LLAMA)
    model = tj.build(library_config(LLAMA))

    def loss(logits):
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()

    ours = jax.jit(jax.grad(lambda p: loss(one_file.forward(p, LLAMA, tokens)[0])))(params)
    theirs = jax.jit(jax.grad(lambda p: loss(model.apply({"params": p}, tokens)[0])))(params)
    expected = dict(jax.tree.leaves_with_path(theirs))
    for path, gradient in jax.tree.leaves_with_path(ours):
        assert_near(gradient, expected[path], LOGITS_F32, jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, None), (1.3, 3)])
def test_sampled_token_frequencies_match_library_distribution(temperature, top_k, key):
    logits = jnp.array([0.3, 1.1, -0.7, 0.9, 2.0, -1.3, 0.5])
    processors = [tj.Temperature(temperature), *([] if top_k is None else [tj.TopK(top_k)])]
    p = np.asarray(jax.nn.softmax(tj.Sample(*processors).distribution(logits)), np.float64)
    n = 10_007
    drawn = one_file.sample(key, jnp.broadcast_to(logits, (n, 7)), temperature, top_k)
    counts = np.bincount(np.asarray(drawn), minlength=7)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.slow
def test_sampled_tokens_are_independent_across_rows_and_steps(key):
    params, tokens, _ = from_library(GPT2)
    same = jnp.broadcast_to(tokens[:1, :5], (2, 5))
    texts = one_file.generate(params, GPT2, same, key, num_tokens=13, temperature=1e6)
    assert min(len(set(row)) for row in texts.tolist()) > 7
    assert (texts[0] != texts[1]).any()


@pytest.mark.slow
def test_text_longer_than_max_len_is_rejected(key):
    params, tokens, _ = from_library(GPT2)
    with pytest.raises(ValueError, match="20 tokens are more than max_len 19"):
        one_file.generate(params, GPT2, tokens, key, num_tokens=7)


@pytest.mark.slow
def test_token_without_embedding_or_slot_produces_nan_logits():
    """An unknown token makes its whole row NaN, because masked values are multiplied by 0."""
    params, tokens, _ = from_library(LLAMA)
    logits, _ = forward(params, LLAMA, tokens.at[0, 7].set(LLAMA.vocab_size))
    assert np.isnan(np.asarray(logits)).any(axis=-1).all(axis=-1).tolist() == [True, False]
    logits, _ = forward(params, LLAMA, tokens, one_file.init_cache(LLAMA, 2, capacity=11))
    assert np.isnan(np.asarray(logits)).any(axis=(0, 2)).tolist() == [False] * 11 + [True] * 2


@pytest.mark.slow
def test_rotation_accuracy_matches_page():
    """Compare vectors of length sqrt(2) at position 8191, base of Llama 3, with float64."""
    i, positions = np.arange(64), jnp.array([8191])
    a = 8191 * 500_000.0 ** (-i / 64)
    expected = np.concatenate([np.cos(a) - np.sin(a), np.cos(a) + np.sin(a)])
    x = jnp.ones((1, 1, 1, 128))
    ours = one_file.rope(x, positions, 500_000.0)[0, 0, 0]
    theirs = apply_rope(x, positions, tj.Rope(base=500_000.0))[0, 0, 0]
    assert 1e-5 < np.abs(ours - expected).max() < 2e-4
    assert_near(theirs, expected, FORWARD_F32)


def test_file_is_short_with_few_imports():
    text = FILE.read_text()
    lines = text.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 100
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"dataclasses", "typing", "einops", "jax", "jax.numpy"}


@pytest.mark.slow
def test_single_file_model_runs_as_program(capsys):
    runpy.run_path(str(FILE), run_name="__main__")
    written, read = re.findall(r"\[([\d ]+)\]", capsys.readouterr().out)
    assert len(set(written.split())) > 3
    assert written == read


def test_default_config_equals_gpt2_preset():
    """The file has no dropout, and default sizes of the preset are explicit."""
    plain = dict(num_kv_heads=12, d_ff=3072, dropout=0.0, attention_dropout=0.0)
    assert library_config(one_file.Config()) == tj.preset("gpt2", **plain)


@pytest.mark.slow
def test_code_quoted_on_page_exists_in_file():
    quoted = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(quoted) > 2
    assert [text for text in quoted if text not in FILE.read_text()] == []


@pytest.mark.slow
def test_names_in_page_table_exist_in_file_and_library():
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*\.py[^|]*) \|", PAGE.read_text(), re.M)
    assert len(rows) > 11
    ours, theirs = " ".join(row[0] for row in rows), " ".join(row[1] for row in rows)
    missing = {f"{name} in one_file.py" for name in re.findall(r"`(\w+)`", ours)} - {
        f"{name} in one_file.py" for name in defined(ast.parse(FILE.read_text()))
    }
    named = re.findall(r"((?:`\w+`(?:, )?)+) \(`([\w/]+\.py)`\)", theirs)
    assert len(named) > 15
    for names, path in named:
        there = defined(ast.parse((DOCS.parent / "transformer_jax" / path).read_text()))
        missing |= {f"{name} in {path}" for name in re.findall(r"\w+", names) if name not in there}
    assert missing == set()
