"""Tests of the three models: float64 oracle and invariances.

Padding, other rows, other documents, future tokens, rematerialisation and scanning must not change
the logits or gradients of valid tokens.
"""

import dataclasses
import math
from functools import cache, partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near, assert_same_bits, largest_error
from transformer_jax.attention.masks import Causal, Prefix
from transformer_jax.config import Learned, ModelConfig, Rope, Shaw, Sinusoidal, T5Buckets
from transformer_jax.config import positions as position_kinds
from transformer_jax.interpret import logit_lens
from transformer_jax.models.arguments import check_cache_room, positions_and_masks
from transformer_jax.models.factory import (
    build,
    cache_bytes,
    init_cache,
    init_params,
    num_params,
)
from transformer_jax.models.stack import stack_layers, unstack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL_F32 = 5e-6
"""Tolerance of f32 logits against float64, relative to the largest: about 40 roundings of 6e-8 in
sequence. Measured: 2e-7 to 5e-7, and 9e-7 with softcaps, which flatten the largest logits."""

INVARIANCE = 1e-5
"""Tolerance between two f32 computations with another order of summation."""

VOCAB, TOKENS, SOURCE = 31, 11, 7

SMALL = ModelConfig(
    vocab_size=VOCAB, d_model=26, num_layers=2, num_heads=2, head_dim=6, d_ff=37, max_len=41,
    init_std=0.3,
)  # fmt: skip
ONE_LAYER = dataclasses.replace(SMALL, num_layers=1)
T5 = dict(positions=T5Buckets(buckets=8, max_distance=17))

PADDED = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1], [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6]])
PACKED = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3], [5, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0]])

# Every config option at least once, and together with the options it interacts with.
CASES: dict[str, dict] = {
    "gpt2": dict(),
    "padded-learned": dict(positions_=PADDED),
    "packed-learned": dict(segments=PACKED, positions=Learned(offset=3), num_layers=1),
    "llama": dict(
        positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False,
        num_heads=4, num_kv_heads=2, tie_embeddings=False, positions_=PADDED,
    ),
    "rope-pairs-part-packed": dict(
        positions=Rope(pairing="interleaved", dims=4, base=97.0),
        num_heads=3, num_kv_heads=1, segments=PACKED,
    ),
    "rope-half-part-qk-norm": dict(
        positions=Rope(dims=2, base=31.0), qk_norm=True, qkv_bias=True,
        use_bias=False, ff_bias=True, value_head_dim=5,
    ),
    "gemma": dict(
        positions="rope", norm="rmsnorm", norm_order="sandwich", activation="gelu_tanh", glu=True,
        use_bias=False, attention_softcap=1.3, logit_softcap=2.3, scale_embeddings=True,
        window=3, num_kv_heads=1, attention_scale=0.7,
    ),
    "gemma3": dict(
        positions=Rope(base=1009.0, dims=4, scaling="linear", factor=4.0, window_base=13.0),
        norm="rmsnorm", norm_order="sandwich", norm_unit_offset=True, qk_norm=True, glu=True,
        use_bias=False, ff_bias=True, scale_embeddings=True, window=(3, 3, None), num_layers=3,
        num_kv_heads=1, positions_=PADDED,
    ),
    "smollm3": dict(
        positions=Rope(pattern=(False, True)), num_layers=3, window=(None, None, 3), glu=True,
        use_bias=False, num_kv_heads=1, positions_=PADDED,
    ),
    "cohere": dict(
        norm_order="parallel_shared", positions=Rope(pairing="interleaved"), glu=True,
        use_bias=False, qk_norm=True, qk_norm_kind="layernorm", qk_norm_over="own_head",
        num_heads=4, num_kv_heads=2, norm_unit_offset=True, positions_=PADDED,
    ),
    "clamped-gate": dict(
        positions="rope", activation="quick_gelu", glu=True, glu_limit=0.2, glu_unit_offset=True,
        attention_sinks=True, norm="rmsnorm", window=(3, None), positions_=PADDED,
    ),
    "modernbert": dict(
        kind="encoder", positions=Rope(base=1009.0, window_base=13.0), window=(None, 3, 3),
        num_layers=3, glu=True, activation="gelu", use_bias=False, embedding_norm=True,
        first_norm=False, masked_token_head=True, logit_bias=True, positions_=PADDED,
    ),
    "qwen3-next": dict(
        positions=Rope(dims=2), norm="rmsnorm", norm_unit_offset=True, activation="silu", glu=True,
        use_bias=False, qkv_bias=True, num_heads=4, num_kv_heads=2, value_head_dim=5, qk_norm=True,
        attention_gate=True, tie_embeddings=False, positions_=PADDED,
    ),
    "granite": dict(
        positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False,
        num_heads=4, num_kv_heads=2, embedding_scale=1.7, residual_scale=0.6, logit_scale=0.8,
        attention_scale=0.4, positions_=PADDED,
    ),
    "olmo2": dict(
        positions="rope", norm="rmsnorm", norm_order="output", activation="silu", glu=True,
        use_bias=False, qk_norm=True, qk_norm_over="heads", num_heads=4, num_kv_heads=2,
        positions_=PADDED, norm_unit_offset=True,
    ),
    "gpt-neox": dict(
        norm_order="parallel", positions=Rope(dims=2), activation="gelu", tie_embeddings=False,
        use_bias=False, out_bias=True, positions_=PADDED,
    ),
    "gpt-j": dict(
        norm_order="parallel_shared", positions=Rope(dims=4, pairing="interleaved"),
        qkv_bias=False, out_bias=False, tie_embeddings=False, logit_bias=True, segments=PACKED,
    ),
    "encoder-decoder-parallel": dict(
        kind="encoder-decoder", norm_order="parallel_shared", positions="rope", num_layers=1,
        source_positions=True,
    ),
    "sinks-window-softcap": dict(
        positions="rope", attention_sinks=True, window=5, attention_softcap=0.9, num_heads=4,
        num_kv_heads=2, positions_=PADDED, qkv_bias=False, ff_bias=False,
    ),
    "sinusoidal-post-relu": dict(
        positions="sinusoidal", norm_order="post", activation="relu", scale_embeddings=True,
        logit_bias=True, positions_=PADDED,
    ),
    "none-sandwich-layernorm": dict(
        positions="none", norm_order="sandwich", value_head_dim=3, norm_unit_offset=True,
    ),
    "attention-alone": dict(
        d_ff=0, positions="rope", num_heads=4, num_kv_heads=2, positions_=PADDED, norm="rmsnorm",
        num_layers=1,
    ),
    "encoder-decoder-attention-alone": dict(
        kind="encoder-decoder", d_ff=0, norm_order="parallel", num_layers=1, source_positions=True,
    ),
    "shaw": dict(positions=Shaw(max_distance=3), value_head_dim=5),
    "shaw-all": dict(
        positions=Shaw(max_distance=2), window=4, attention_sinks=True, num_heads=4,
        num_kv_heads=2, attention_softcap=1.1, attention_scale=0.6, qk_norm=True,
        positions_=PADDED,
    ),
    "t5": dict(**T5, norm="rmsnorm", use_bias=False, activation="relu"),
    "t5-gqa-sinks-softcap-packed": dict(
        positions=T5Buckets(buckets=6, max_distance=7), num_heads=4, num_kv_heads=2,
        attention_sinks=True, attention_softcap=1.7, segments=PACKED,
    ),
    "alibi": dict(positions="alibi", embedding_norm=True, num_heads=4, num_kv_heads=1),
    "alibi-odd-heads-window": dict(
        positions="alibi", num_heads=3, window=7, embedding_norm=True, positions_=PADDED,
        logit_bias=True, tie_embeddings=False, activation="gelu",
    ),
    "rmsnorm-with-biases": dict(norm="rmsnorm", embedding_norm=True, logit_bias=True),
    "apertus": dict(
        positions="rope", norm="rmsnorm", activation="xielu", use_bias=False, qk_norm=True,
        num_kv_heads=1, positions_=PADDED,
    ),
    "persimmon": dict(
        positions=Rope(dims=4), activation="relu_squared", qk_norm=True, qk_norm_kind="layernorm",
        qk_norm_bias=True, positions_=PADDED,
    ),
    "hunyuan": dict(
        positions=Rope(base=97.0), norm="rmsnorm", use_bias=False, glu=True, qk_norm=True,
        qk_norm_after_rope=True, num_kv_heads=1, positions_=PADDED,
    ),
    "biases-of-own-heads-after-rotation": dict(
        positions=Rope(dims=4, pattern=(True, False)), qk_norm=True, qk_norm_kind="layernorm",
        qk_norm_over="own_head", qk_norm_bias=True, qk_norm_after_rope=True, num_kv_heads=1,
        norm_unit_offset=True,
    ),
    "biases-of-all-heads-together": dict(
        positions=Rope(dims=4), qk_norm=True, qk_norm_kind="layernorm", qk_norm_over="heads",
        qk_norm_bias=True, qk_norm_after_rope=True, num_heads=4, num_kv_heads=2, num_layers=1,
    ),
    "nemotron": dict(
        positions=Rope(dims=4), norm_unit_offset=True, activation="relu_squared", qkv_bias=False,
        out_bias=False, ff_bias=False, num_kv_heads=1, positions_=PADDED,
    ),
    "bert": dict(
        kind="encoder", norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu",
        logit_bias=True, type_vocab_size=3, masked_token_head=True, types=True, positions_=PADDED,
    ),
    "mpnet-learned": dict(
        kind="encoder", norm_order="post", embedding_norm=True, masked_token_head=True,
        positions=Learned(offset=2, buckets=6, max_distance=5), positions_=PADDED, num_layers=1,
    ),
    "albert": dict(
        kind="encoder", norm_order="post", share_layers=True, num_layers=3, positions_=PADDED,
    ),
    "electra": dict(
        kind="encoder", norm_order="post", embedding_norm=True, masked_token_head=True,
        embedding_dim=7, type_vocab_size=3, types=True, logit_bias=True, positions_=PADDED,
    ),
    "encoder-types-by-default": dict(
        kind="encoder", type_vocab_size=3, positions="sinusoidal", norm="rmsnorm", glu=True,
        activation="relu", use_bias=False, masked_token_head=True,
    ),
    "encoder-rope-window-packed": dict(
        kind="encoder", positions=Rope(pairing="interleaved", window_base=7.0), window=3,
        segments=PACKED, qk_norm=True, masked_token_head=True, norm_order="sandwich",
        norm_unit_offset=True,
    ),
    "encoder-t5": dict(kind="encoder", **T5, positions_=PADDED, tie_embeddings=False),
    "window-pattern-sink-tokens": dict(
        positions="rope", window=(3, None, 2), sink_tokens=2, num_layers=4,
        positions_=PADDED,
    ),
    "sink-tokens-packed": dict(
        positions=Shaw(max_distance=17), window=2, sink_tokens=3, segments=PACKED,
    ),
    "encoder-window-pattern-sink-tokens-packed": dict(
        kind="encoder", positions="alibi", window=(4, 2), sink_tokens=1, segments=PACKED,
    ),
    "encoder-alibi-sinks-window": dict(
        kind="encoder", positions="alibi", attention_sinks=True, window=5, norm_order="post"
    ),
    "encoder-shaw": dict(kind="encoder", positions=Shaw(max_distance=3), num_kv_heads=1),
    "vaswani": dict(
        kind="encoder-decoder", positions="sinusoidal", norm_order="post", activation="relu",
        scale_embeddings=True, num_decoder_layers=1,
    ),
    "bart": dict(
        kind="encoder-decoder", norm_order="post", positions=Learned(offset=2), embedding_norm=True,
        activation="gelu", num_layers=1, positions_=PADDED, source_positions=True,
    ),
    "marian": dict(
        kind="encoder-decoder", positions=Sinusoidal(layout="halves"), norm_order="post",
        activation="silu", scale_embeddings=True, logit_bias=True, num_layers=1,
        positions_=PADDED,
    ),
    "m2m100": dict(
        kind="encoder-decoder", activation="relu", scale_embeddings=True, num_layers=1,
        positions=Sinusoidal(layout="halves", base=37.0, offset=2), source_positions=True,
    ),
    "t5-encoder-decoder": dict(
        kind="encoder-decoder", **T5, norm="rmsnorm", use_bias=False, glu=True,
        activation="gelu_tanh", tie_embeddings=False, attention_scale=1.0, positions_=PADDED,
        source_positions=True,
    ),
    "encoder-decoder-all": dict(
        kind="encoder-decoder", positions="rope", num_heads=4, num_kv_heads=2, qk_norm=True,
        attention_sinks=True, attention_softcap=1.9, window=4, value_head_dim=5,
        norm_order="sandwich", source_positions=True, logit_bias=True, logit_softcap=3.1,
        logit_scale=0.6, norm_unit_offset=True, attention_gate=True,
    ),
    "encoder-decoder-shaw": dict(
        kind="encoder-decoder", positions=Shaw(max_distance=3), num_layers=1,
        source_positions=True, embedding_norm=True,
    ),
    "two-vocabularies": dict(
        kind="encoder-decoder", source_vocab_size=43, positions="rope", num_layers=1,
        source_positions=True, logit_bias=True,
    ),
}  # fmt: skip


INPUTS = ("positions_", "segments", "types", "source_positions")


def small(**change) -> ModelConfig:
    return dataclasses.replace(SMALL, **change)


def random_tokens(rng, *shape: int) -> np.ndarray:
    return rng.integers(0, VOCAB, shape, dtype=np.int32)


def random_model(rng, columns: int = TOKENS, rows: int = 2, **change):
    """Return a config, random parameters and random tokens [rows, columns]."""
    config = small(**change)
    return config, oracle.randomised(shapes(config), rng), random_tokens(rng, rows, columns)


def random_case(case: str, rng):
    """Return the case's config, tokens, arguments and random parameters."""
    options = dict(CASES[case])
    inputs = {name: options.pop(name, None) for name in INPUTS}
    config = small(**options)
    tokens = random_tokens(rng, 2, TOKENS)
    arguments: dict[str, np.ndarray] = {}
    if inputs["positions_"] is not None:
        arguments["positions"] = inputs["positions_"].astype(np.int32)
    if inputs["segments"] is not None:
        arguments["segments"] = inputs["segments"].astype(np.int32)
    if inputs["types"]:
        arguments["types"] = rng.integers(0, 3, tokens.shape, dtype=np.int32)
    if config.kind == "encoder-decoder":
        kinds = config.encoder_vocab_size
        arguments["source"] = rng.integers(0, kinds, (2, SOURCE), dtype=np.int32)
        if inputs["source_positions"]:
            places = np.tile(np.arange(SOURCE, dtype=np.int32), (2, 1))
            places[0, 5:] = -1
            places[1] = np.where(np.arange(SOURCE) < 3, -1, np.arange(SOURCE) - 3)
            arguments["source_positions"] = places
    params = oracle.randomised(shapes(config), rng)
    return config, tokens, arguments, params


def shapes(config: ModelConfig):
    """Return the shapes of the parameters, without compiling."""
    return shapes_under(config, jax.config.read("jax_enable_x64"))


@cache
def shapes_under(config: ModelConfig, x64: bool):
    return jax.eval_shape(partial(init_params, config), jax.random.key(0))


@pytest.mark.long_except(
    "gpt2", "padded-learned", "packed-learned", "mpnet-learned", "attention-alone", "llama",
    "smollm3", "cohere", "rope-*", "gemma", "gemma3", "sinusoidal-post-relu", "shaw-all",
    "none-sandwich-layernorm", "t5-gqa-sinks-softcap-packed", "alibi-odd-heads-window",
    "rmsnorm-with-biases", "bert", "encoder-rope-window-packed", "window-pattern-sink-tokens",
    "sink-tokens-packed", "bart", "marian", "t5-encoder-decoder", "electra", "albert",
    "encoder-decoder-all", "two-vocabularies",
)  # fmt: skip
@pytest.mark.slow_except("packed-learned", "mpnet-learned", "llama", "attention-alone")
@pytest.mark.parametrize("case", CASES)
def test_logits_match_reference(case, rng):
    config, tokens, arguments, params = random_case(case, rng)
    want = oracle.forward(config, params, tokens, **arguments)
    got, cache = jax.jit(build(config).apply)({"params": params}, tokens, **arguments)
    assert cache is None and got.shape == (2, TOKENS, VOCAB) and got.dtype == jnp.float32
    real = arguments.get("positions", np.zeros_like(tokens)) >= 0
    assert real.sum() >= TOKENS
    assert np.isfinite(np.asarray(got)).all()
    assert want[real].std() > 0.3, "logits too flat to tell anything"
    assert_near(np.asarray(got)[real], want[real], MODEL_F32)


@pytest.mark.slow
@pytest.mark.long_except("bart", "two-vocabularies", "attention-alone")
@pytest.mark.parametrize("case", ["gemma3", "bart", "two-vocabularies", "attention-alone"])
def test_cached_logits_in_two_chunks_match_reference(case, rng):
    """Layers differ in rotation (gemma3), and the target has its own position table (bart)."""
    config, tokens, arguments, params = random_case(case, rng)
    want = oracle.forward(config, params, tokens, **arguments)
    model = build(config)
    places = arguments.get("positions", np.tile(np.arange(TOKENS, dtype=np.int32), (2, 1)))
    if config.kind == "decoder":
        cache = init_cache(config, 2, TOKENS)
    else:
        read = jax.jit(partial(model.apply, method="init_cache", capacity=TOKENS))
        more = dict(positions=arguments["source_positions"])
        cache = read({"params": params}, arguments["source"], **more)
    apply, parts = jax.jit(model.apply), []
    for at in (slice(0, 8), slice(8, TOKENS)):
        logits, cache = apply(
            {"params": params}, tokens[:, at], positions=places[:, at], cache=cache
        )
        parts.append(np.asarray(logits))
    assert_near(np.concatenate(parts, axis=1)[places >= 0], want[places >= 0], MODEL_F32)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3", "bart"])
def test_logits_at_selected_tokens_match_reference(case, rng):
    """Indices differ between rows and may repeat; an index out of range gives NaN."""
    config, tokens, arguments, params = random_case(case, rng)
    want = oracle.forward(config, params, tokens, **arguments)
    at = np.array([[TOKENS - 1, 5, 5], [0, TOKENS - 2, 7]], np.int32)
    apply = jax.jit(build(config).apply)
    got, _ = apply({"params": params}, tokens, at=at, **arguments)
    assert got.shape == (2, 3, VOCAB) and got.dtype == jnp.float32
    real = np.take_along_axis(arguments["positions"], at, axis=1) >= 0
    assert real.sum() >= 4
    picked = np.take_along_axis(want, at[:, :, None], axis=1)
    assert_near(np.asarray(got)[real], picked[real], MODEL_F32)
    nowhere = np.array([[TOKENS, 5, -1], [0, -TOKENS, 2**31 - 1]], np.int32)
    got, _ = apply({"params": params}, tokens, at=nowhere, **arguments)
    there = np.array([[False, True, False], [True, False, False]])
    assert np.isnan(np.asarray(got)[~there]).all() and np.isfinite(np.asarray(got)[there]).all()


ELSEWHERE = {
    "vocab_size", "d_model", "head_dim", "d_ff", "max_len", "init_std", "dropout", "remat",
    "attention_dropout", "dtype", "scan_layers", "implementation", "invariant", "num_classes",
    "pooler", "inputs", "experts", "classes_of", "pooler_reads", "block", "mixers", "gated_delta",
    "latent_attention", "short_conv",
}  # fmt: skip
"""Fields that other tests vary, or that only set sizes."""

STRETCHES = {
    "original_len", "length", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "truncate", "short_factors", "long_factors",
}  # fmt: skip
"""Fields of Rope that `test_positions` varies."""


def test_config_cases_cover_all_options():
    seen = [small(**{k: v for k, v in c.items() if k not in INPUTS})
            for c in CASES.values()]  # fmt: skip
    assert {type(c.positions) for c in seen} == {type(None), *position_kinds.KINDS.values()}
    for name in ("kind", "norm", "norm_order", "activation"):
        options = ModelConfig.__dataclass_fields__[name].type
        from transformer_jax.config import model as module

        literal = getattr(module, options.removesuffix(" | None"))
        assert {getattr(c, name) for c in seen} == set(literal.__args__)
    for name in ("use_bias", "qk_norm", "attention_sinks", "attention_gate", "scale_embeddings",
                 "tie_embeddings", "logit_bias", "embedding_norm", "glu", "masked_token_head",
                 "norm_unit_offset"):  # fmt: skip
        assert {getattr(c, name) for c in seen} == {True, False}, name
    for name in ("qkv_bias", "out_bias", "ff_bias"):
        assert {(c.use_bias, getattr(c, name)) for c in seen} >= {(True, False), (False, True)}
    for field in dataclasses.fields(ModelConfig):
        varied = len({getattr(c, field.name) for c in seen}) > 1
        assert varied or field.name in ELSEWHERE, field.name
    heads = {(c.num_heads > c.kv_heads > 1, c.kv_heads == 1) for c in seen}
    assert heads >= {(False, False), (True, False), (False, True)}
    assert {c.positions.pairing for c in seen if isinstance(c.positions, Rope)} == {
        "half", "interleaved"
    }  # fmt: skip
    for kind in position_kinds.KINDS.values():
        own = [c.positions for c in seen if type(c.positions) is kind]
        for field in dataclasses.fields(kind):
            varied = len({getattr(p, field.name) for p in own}) > 1
            assert varied or field.name in STRETCHES, (kind, field.name)
    for name in ("window", "attention_softcap", "logit_softcap", "attention_scale", "head_dim",
                 "value_head_dim", "type_vocab_size", "num_decoder_layers"):  # fmt: skip
        assert any(getattr(c, name) is not None for c in seen), name


@pytest.mark.slow
@pytest.mark.long_except("t5")
@pytest.mark.parametrize("kind", ["learned", "t5"])
def test_parameters_may_be_numpy_arrays(kind, rng):
    """NumPy parameters, as read from a file, work without jit and in a closure under jit."""
    config, params, tokens = random_model(rng, num_layers=1, **KINDS[kind])
    apply = partial(build(config).apply, {"params": params})
    want = oracle.forward(config, params, tokens)
    assert_near(jax.jit(apply)(tokens)[0], want, MODEL_F32)
    assert_near(apply(tokens)[0], want, MODEL_F32)


def by_method(method: str, rng, **change):
    """Return the result of a method after comparing it with the oracle, on padded rows."""
    config, params, tokens = random_model(
        rng, kind="encoder", type_vocab_size=2, num_layers=1, **change
    )
    more = dict(positions=PADDED.astype(np.int32), types=tokens % 2)
    got = jax.jit(partial(build(config).apply, method=method))({"params": params}, tokens, **more)
    assert got.dtype == jnp.float32
    want = getattr(oracle, method)(config, params, tokens, **more)
    real = PADDED >= 0 if got.ndim == 3 else slice(None)
    assert_near(np.asarray(got)[real], want[real], MODEL_F32)
    return np.asarray(got), params


@pytest.mark.slow_except("3-relu")
@pytest.mark.parametrize(("classes", "pooler"), [(1, None), (3, "relu"), (2, "gelu")])
def test_class_logits_match_reference(rng, classes, pooler):
    got, _ = by_method("classify", rng, num_classes=classes, pooler=pooler)
    assert got.shape == (2, classes)


@pytest.mark.slow_except("full")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_shared_block_matches_layers_with_equal_parameters(rng, remat):
    """Captures and edits distinguish the passes through the shared block."""
    config = dataclasses.replace(
        SMALL, kind="encoder", share_layers=True, num_layers=2, remat=remat, attention_dropout=0.2
    )
    params = oracle.randomised(shapes(config), rng)
    assert [name for name in params["encoder"] if "block" in name] == ["block_0"]
    several = {f"block_{i}": params["encoder"]["block_0"] for i in range(2)}
    apart = params | {"encoder": params["encoder"] | several}
    tokens = random_tokens(rng, 1, TOKENS)
    edit = {"block_1/feed_forward/output": lambda y: 2 * y}
    found = []
    for share, given in ((True, params), (False, apart)):
        model = build(dataclasses.replace(config, share_layers=share)).edited(edit)
        apply = partial(model.apply, capture=("block_*/residual",))
        found.append(jax.jit(apply)({"params": given}, tokens, key=jax.random.key(3)))
    assert found[0][2].keys() == {f"block_{i}/residual" for i in range(2)}
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow_except("mean")
@pytest.mark.parametrize("reads", ["first", "mean", "each"])
def test_class_logits_with_head_transform_match_reference(rng, reads):
    """Only the classifier has a bias, as in ModernBERT."""
    of = "token" if reads == "each" else "text"
    _, params = by_method(
        "classify", rng, num_classes=3, pooler="transform", pooler_reads=reads, classes_of=of,
        use_bias=False,
    )  # fmt: skip
    assert "bias" in params["classifier"] and "bias" not in params["head_dense"]


@pytest.mark.slow
def test_pooled_vector_matches_reference(rng):
    """The encoder has no classes; relu makes some elements 0."""
    pooled, _ = by_method("pool", rng, pooler="relu")
    assert pooled.shape == (2, 26)
    assert (pooled == 0).any() and pooled.max() > 0.5


@pytest.mark.parametrize("head", [True, False])
def test_last_logit_lens_of_encoder_matches_its_logits(rng, head):
    """The lens must apply a masked-token head, as in BERT."""
    config, params, tokens = random_model(
        rng, 5, kind="encoder", num_layers=1, norm_order="post", masked_token_head=head
    )
    lens = jax.jit(partial(logit_lens, build(config)))(params, tokens)
    assert lens.shape == (2, 2, 5, VOCAB)
    assert_near(lens[:, -1], oracle.forward(config, params, tokens), MODEL_F32)


def test_missing_output_head_raises_error(rng):
    config = small(kind="encoder")
    for method, name in (("classify", "num_classes"), ("pool", "pooler")):
        with pytest.raises(ValueError, match=f"{name} is None"):
            build(config).apply({"params": {}}, random_tokens(rng, 1, 3), method=method)


# Dependencies between tokens


def reach(visible: np.ndarray, layers: int) -> np.ndarray:
    """Return bool[T, S], which tokens are reachable through `layers` residual blocks."""
    step = visible | np.eye(len(visible), dtype=bool)
    return np.linalg.matrix_power(step.astype(int), layers) > 0


def grid(count: int = TOKENS):
    return np.meshgrid(np.arange(count), np.arange(count), indexing="ij")


Q, K = grid()
REACHES: dict[str, tuple[dict, dict, np.ndarray]] = {
    "causal-learned": ({}, {}, K <= Q),
    "window-rope": (dict(positions="rope", window=3), {}, (K <= Q) & (Q - K < 3)),
    "window-and-sink-tokens": (
        dict(positions="rope", window=2, sink_tokens=3), {}, (K <= Q) & ((Q - K < 2) | (K < 3)),
    ),
    "window-and-prefix": (
        dict(window=3), dict(mask=Causal() | Prefix(np.array([6]))),
        ((K <= Q) | (K < 6)) & (Q - K < 3),
    ),
    "window-of-one": (dict(positions="alibi", window=1), {}, K == Q),
    "window-shaw-sinks": (
        dict(positions=Shaw(max_distance=17), window=4, attention_sinks=True), {},
        (K <= Q) & (Q - K < 4),
    ),
    "segments-t5": (T5, dict(segments=PACKED[:1]), (K <= Q) & (PACKED[0][Q] == PACKED[0][K])),
    "segments-window-sinusoidal": (
        dict(positions="sinusoidal", window=2), dict(segments=PACKED[1:]),
        (K <= Q) & (Q - K < 2) & (PACKED[1][Q] == PACKED[1][K]),
    ),
    "prefix": ({}, dict(mask=Causal() | Prefix(np.array([5]))), (K <= Q) | (K < 5)),
    "left-padding": (
        dict(positions="rope"), dict(positions=PADDED[1:]),
        (K <= Q) & (PADDED[1][K] >= 0) & (PADDED[1][Q] >= 0),
    ),
    "encoder": (dict(kind="encoder"), {}, K == K),
    "encoder-window-segments": (
        dict(kind="encoder", positions="rope", window=3), dict(segments=PACKED[:1]),
        (abs(Q - K) < 3) & (PACKED[0][Q] == PACKED[0][K]),
    ),
}  # fmt: skip


def dependence(config, params, tokens, inputs, **arguments) -> np.ndarray:
    """Return bool[T, S], whether the gradient of output t with respect to input s is nonzero.

    Tokens are distinct and embeddings are untied, so the gradient of the row embed.tokens[token s]
    is that of input s. The cotangents of the outputs are random.
    """
    params, T = jax.tree.map(jnp.asarray, params), tokens.shape[1]
    cotangents = np.zeros((T, 1, T, VOCAB), np.float32)
    drawn = np.random.default_rng(5).standard_normal((T, VOCAB))
    cotangents[np.arange(T), 0, np.arange(T)] = drawn

    @jax.jit
    def gradients(table, cotangents):
        def logits(table):
            own = {**params, "embed": {**params["embed"], "tokens": table}}
            return build(config).apply({"params": own}, tokens, **arguments)[0]

        _, pull = jax.vjp(logits, table)
        return jax.vmap(lambda c: pull(c)[0])(cotangents)

    slopes = np.asarray(gradients(params["embed"]["tokens"], cotangents))[:, inputs]
    assert np.isfinite(slopes).all()
    return (slopes != 0).any(-1)


@pytest.mark.slow
@pytest.mark.long_except(
    "causal-learned", "window-and-prefix", "encoder", "encoder-window-segments", "left-padding",
    "prefix", "window-and-sink-tokens", "window-shaw-sinks",
)  # fmt: skip
@pytest.mark.parametrize("case", REACHES)
def test_gradients_are_zero_outside_receptive_field(case, rng):
    """Gradients are also nonzero for every input inside the receptive field."""
    change, arguments, visible = REACHES[case]
    config, params, _ = random_model(rng, tie_embeddings=False, **change)
    tokens = rng.permutation(VOCAB)[None, :TOKENS].astype(np.int32)
    arguments = {
        k: v.astype(np.int32) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    got = dependence(config, params, tokens, tokens[0], **arguments)
    want = reach(visible, config.num_layers)
    if "positions" in arguments:  # padding has no gradient
        want[arguments["positions"][0] < 0] = False
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_window_is_two_sided_in_encoder_and_causal_in_decoder(kind, rng):
    config, params, _ = random_model(rng, num_layers=1, kind=kind, window=3)
    params = jax.tree.map(jnp.asarray, params)
    tokens = np.tile(rng.integers(1, VOCAB, TOKENS, dtype=np.int32), (TOKENS + 1, 1))
    np.fill_diagonal(tokens[1:], 0)  # row j has a different token j
    out = np.asarray(jax.jit(build(config).apply)({"params": params}, tokens)[0])
    near = (abs(Q - K) < 3) & ((K <= Q) | (kind == "encoder"))
    np.testing.assert_array_equal((out[1:] != out[:1]).any(-1).T, near)


@pytest.mark.slow
def test_target_attends_to_full_source_and_previous_target_tokens(rng):
    """Source and target share an embedding, so they use different tokens."""
    config, params, _ = random_model(
        rng, kind="encoder-decoder", tie_embeddings=False, num_layers=1
    )
    order = rng.permutation(VOCAB).astype(np.int32)[:12]
    places = np.array([[0, 1, 2, 3, 4, -1, -1]], np.int32)
    more = dict(source=order[None, 5:], source_positions=places)
    depends = dependence(config, params, order[None, :5], order, **more)
    np.testing.assert_array_equal(depends[:, :5], np.tril(np.ones((5, 5), bool)))
    np.testing.assert_array_equal(depends[:, 5:], np.tile(places >= 0, (5, 1)))


# Padding, packing and other rows

KINDS: dict[str, dict] = {
    "learned": dict(embedding_norm=True),
    "sinusoidal": dict(positions="sinusoidal", norm_order="post", qk_norm=True),
    "rope": dict(positions="rope", num_heads=4, num_kv_heads=2),
    "shaw": dict(positions=Shaw(max_distance=3)),
    "t5": dict(**T5, norm="rmsnorm", attention_sinks=True),
    "alibi": dict(positions="alibi", num_kv_heads=1),
}


def loss_and_gradients(config, params, tokens, weights, arguments):
    """Return the logits and the gradients of sum(weights * logits)."""

    def loss(params):
        logits, _ = build(config).apply({"params": params}, tokens, **arguments)
        return (weights * logits).sum(), logits

    (_, logits), slopes = jax.value_and_grad(loss, has_aux=True)(params)
    return logits, slopes


measure = jax.jit(loss_and_gradients, static_argnums=0)


def assert_gradients_near(got, want, tolerance: float) -> None:
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    assert len(got) == len(want) > 10
    top = max(np.abs(np.asarray(leaf)).max() for _, leaf in want)
    for (path, a), (_, b) in zip(got, want, strict=True):
        error = largest_error(a, b)
        assert error <= tolerance * top, f"{jax.tree_util.keystr(path)}: {error} of {top}"


@pytest.mark.slow
@pytest.mark.long_except("t5")
@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rope", "t5", "alibi"])
def test_packed_documents_match_separate_rows(kind, rng):
    """Compare three documents packed in one row, in two orders, with one row per document."""
    documents, each = 3, 5
    config, params, tokens = random_model(rng, each, documents, num_layers=1, **KINDS[kind])
    weights = rng.standard_normal((documents, each, VOCAB)).astype(np.float32)
    ids = np.repeat(np.array([4, 2, 9], np.int32), each)[None]
    apart, slopes_apart = measure(config, params, tokens, weights, {})
    tokens, weights = tokens.reshape(1, -1), weights.reshape(1, -1, VOCAB)
    order = rng.permutation(documents * each).astype(np.int32)
    for at, more in ((slice(None), {}), (order, dict(positions=order[None]))):
        inputs = dict(segments=ids) | more
        packed, slopes = measure(config, params, tokens[:, at], weights[:, at], inputs)
        found = np.empty_like(packed)
        found[:, at] = packed
        assert_near(found.reshape(apart.shape), apart, INVARIANCE)
        assert_gradients_near(slopes, slopes_apart, INVARIANCE)


PADS = [(0, 32), (1, 31), (5, 27), (27, 5), (31, 1), (32, 0)]  # left and right of 5 valid tokens


def padded_rows(real: np.ndarray, fill: int):
    """Return rows with the same 5 tokens between different paddings, and their positions."""
    rows, places = [], []
    for left, right in PADS:
        rows.append(np.concatenate([np.full(left, fill), real, np.full(right, fill)]))
        places.append(np.concatenate([np.full(left, -1), np.arange(5), np.full(right, -1)]))
    return np.array(rows, np.int32), np.array(places, np.int32)


@pytest.mark.slow
@pytest.mark.long_except("rope")
@pytest.mark.parametrize("kind", ["learned", "rope", "shaw", "encoder-t5-window"])
def test_padding_does_not_change_logits_or_gradients(kind, rng):
    """Compare rows with 0 to 32 padding tokens on either side with a row without padding.

    An embedding of NaN for the padding token must not change any bit.
    """
    change = KINDS.get(kind) or dict(kind="encoder", **T5, window=3, masked_token_head=True)
    config, params, _ = random_model(rng, tie_embeddings=False, **change)
    fill = VOCAB - 1
    real = rng.integers(0, fill, 5, dtype=np.int32)
    tokens, places = padded_rows(real, fill)
    share = rng.uniform(0.5, 1.5, len(PADS)).astype(np.float32)
    cotangent = rng.standard_normal((5, VOCAB)).astype(np.float32)
    weights = np.zeros((*tokens.shape, VOCAB), np.float32)
    for row, (left, _) in enumerate(PADS):
        weights[row, left : left + 5] = share[row] * cotangent

    alone, slopes_alone = measure(config, params, real[None], share.sum() * cotangent[None], {})
    logits, slopes = measure(config, params, tokens, weights, dict(positions=places))
    assert np.isfinite(np.asarray(logits)).all(), "logits of padding are finite, too"
    for row, (left, _) in enumerate(PADS):
        assert_near(logits[row, left : left + 5], alone[0], INVARIANCE, f"row {row}")
    assert_gradients_near(slopes, slopes_alone, INVARIANCE)

    params["embed"]["tokens"] = params["embed"]["tokens"].copy()
    params["embed"]["tokens"][fill] = np.nan
    nonfinite, slopes_nonfinite = measure(config, params, tokens, weights, dict(positions=places))
    at = places >= 0
    assert_same_bits(np.asarray(nonfinite)[at], np.asarray(logits)[at])
    chex.assert_trees_all_equal(slopes_nonfinite, slopes, strict=True)


@pytest.mark.slow
@pytest.mark.long_except("rope-3")
@pytest.mark.parametrize(("kind", "window"), [("learned", None), ("rope", 3), ("shaw", 3)])
def test_padding_is_not_cached(kind, window, rng):
    """After a padded prefill, the next tokens continue each row as if it had no padding."""
    config, params, real = random_model(rng, 7, 1, window=window, **KINDS[kind])
    real = real[0]
    tokens, places = padded_rows(real[:5], 3)
    apply = jax.jit(build(config).apply)
    whole, _ = apply({"params": params}, real[None])
    cache = init_cache(config, len(PADS), window or 7)
    logits, cache = apply({"params": params}, tokens, positions=places, cache=cache)
    for row, (left, _) in enumerate(PADS):
        assert_near(logits[row, left : left + 5], whole[0, :5], INVARIANCE, f"row {row}")
    assert cache.length.tolist() == [5] * len(PADS)
    rest = np.tile(real[5:], (len(PADS), 1))
    logits, cache = apply({"params": params}, rest, cache=cache)
    assert_near(logits, np.broadcast_to(whole[:, 5:], logits.shape), INVARIANCE)
    assert cache.length.tolist() == [7] * len(PADS)


@pytest.mark.slow
def test_fully_padded_row_is_finite_and_does_not_affect_others(rng):
    _, params, tokens = random_model(rng, 5)
    weights = rng.standard_normal((2, 5, VOCAB)).astype(np.float32)
    places = np.stack([np.arange(5), np.full(5, -1)]).astype(np.int32)
    logits, slopes = measure(SMALL, params, tokens, weights, dict(positions=places))
    assert all(np.isfinite(np.asarray(x)).all() for x in (logits, *jax.tree.leaves(slopes)))
    other = tokens.copy()
    other[1] = (other[1] + 7) % VOCAB
    again, _ = measure(SMALL, params, other, weights, dict(positions=places))
    assert_same_bits(again[0], logits[0])


@pytest.mark.slow
@pytest.mark.long_except("rope")
@pytest.mark.parametrize("kind", ["rope", "shaw"])
def test_rows_are_independent(kind, rng):
    """A row matches itself in a batch, bitwise for different other rows, even if these are NaN."""
    config, params, _ = random_model(rng, tie_embeddings=False, **KINDS[kind])
    tokens = rng.integers(0, VOCAB - 1, (3, 5), dtype=np.int32)
    weights = np.zeros((3, 5, VOCAB), np.float32)
    weights[1] = rng.standard_normal((5, VOCAB))
    logits, slopes = measure(config, params, tokens, weights, {})
    alone, slopes_alone = measure(config, params, tokens[1:2], weights[1:2], {})
    assert_near(logits[1:2], alone, INVARIANCE)
    assert_gradients_near(slopes, slopes_alone, INVARIANCE)

    other = random_tokens(rng, 3, 5)
    other[1] = tokens[1]
    changed, _ = measure(config, params, other, weights, {})
    assert_same_bits(changed[1], logits[1])
    params["embed"]["tokens"][VOCAB - 1] = np.nan
    other[0], other[2] = VOCAB - 1, VOCAB - 1
    nonfinite, _ = measure(config, params, other, weights, {})
    assert np.isnan(np.asarray(nonfinite)[0]).all()
    assert_same_bits(nonfinite[1], logits[1])


# Loop, scan and remat

FORMS = {
    "loop": dict(),
    "loop-remat": dict(remat="full"),
    "loop-remat-attention": dict(remat="attention"),
    "scan": dict(scan_layers=True),
    "scan-remat": dict(scan_layers=True, remat="full"),
    "scan-remat-dots": dict(scan_layers=True, remat="dots"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "forms"),
    [
        (dict(positions="rope", dropout=0.2, attention_dropout=0.3), tuple(FORMS)),
        (dict(kind="encoder-decoder", **T5, num_layers=1, num_decoder_layers=2, dropout=0.2),
         ("loop", "scan-remat")),
    ],
    ids=["decoder", "encoder-decoder"],
)  # fmt: skip
def test_loop_scan_and_remat_match_with_dropout(change, forms, rng):
    """Logits and gradients for one key agree between all forms of the stack."""
    base, params, tokens = random_model(rng, 7, **change)
    weights = rng.standard_normal((2, 7, VOCAB)).astype(np.float32)
    more = {} if base.kind == "decoder" else dict(source=random_tokens(rng, 2, 5))
    results = {}
    for name in forms:
        config = dataclasses.replace(base, **FORMS[name])
        own = stack_layers(params) if config.scan_layers else params
        logits, slopes = measure(config, own, tokens, weights, dict(more, key=jax.random.key(7)))
        slopes = unstack_layers(slopes) if config.scan_layers else slopes
        results[name] = (logits, slopes)
    want, slopes_want = results.pop("loop")
    still = oracle.forward(base, params, tokens, **more)
    assert largest_error(want, still) > 0.1, "dropout is off"
    for name, (logits, slopes) in results.items():
        assert_near(logits, want, 1e-6, name)
        assert_gradients_near(slopes, slopes_want, INVARIANCE)


@pytest.mark.slow
@pytest.mark.long_except("rope-{'attention_dropout': 0.5}", "rope-{'dropout': 0.5}")
@pytest.mark.parametrize(
    ("kind", "change"),
    [("rope", dict(attention_dropout=0.5)), ("shaw", dict(attention_dropout=0.5)),
     ("rope", dict(dropout=0.5))],
    ids=str,
)  # fmt: skip
def test_each_dropout_rate_acts_independently_and_requires_key(kind, change, rng):
    config, params, tokens = random_model(rng, 5, num_layers=1, **KINDS[kind], **change)
    apply = jax.jit(build(config).apply)
    still = oracle.forward(config, params, tokens)
    assert_near(apply({"params": params}, tokens)[0], still, MODEL_F32)
    drawn = [apply({"params": params}, tokens, key=jax.random.key(n))[0] for n in (1, 1, 2)]
    assert_same_bits(drawn[0], drawn[1])
    assert largest_error(drawn[0], still) > 0.1 and largest_error(drawn[2], drawn[0]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_each_remat_mode_saves_fewer_residuals(scan, rng):
    """Count the residuals of `jax.vjp`, without compiling."""
    tokens = random_tokens(rng, 2, 41)
    base = small(num_layers=3, scan_layers=scan, implementation="xla")

    def kept(remat: str) -> int:
        config = dataclasses.replace(base, remat=remat)

        def backward(params):
            return jax.vjp(lambda p: build(config).apply({"params": p}, tokens)[0], params)[1]

        tree = shapes(config)
        saved = jax.eval_shape(backward, tree)
        return sum(leaf.size for leaf in jax.tree.leaves(saved)) - num_params(config)

    found = {remat: kept(remat) for remat in ("full", "dots", "attention", "none")}
    rows, scores = 3 * 2 * 41, 3 * 2 * 41 * 41 * base.num_heads
    width = base.num_heads * base.key_dim + base.kv_heads * (base.key_dim + base.value_dim)
    products = rows * (width + base.ff_dim)  # at least those that the backward pass reads
    assert rows * base.d_model <= found["full"] < 0.4 * found["none"]
    assert found["full"] + products <= found["dots"] < found["none"]
    assert found["attention"] <= found["none"] - scores  # the attention weights, at least once


@pytest.mark.slow
def test_stacking_layers_round_trips_bitwise(rng):
    both = dict(kind="encoder-decoder", num_decoder_layers=3)
    for change in (dict(num_layers=11), dict(both, source_vocab_size=43), both):
        config = small(**change)
        params = oracle.randomised(shapes(config), rng)
        stacked = stack_layers(params)
        expected = shapes(dataclasses.replace(config, scan_layers=True))
        chex.assert_trees_all_equal_shapes(stacked, expected)
        back = unstack_layers(jax.tree.map(np.asarray, stacked))
        chex.assert_trees_all_equal(back, params, strict=True)
    stack = stack_layers(params)["decoder"]["blocks"]["feed_forward"]["up"]["kernel"]
    assert_same_bits(stack[2], params["decoder"]["block_2"]["feed_forward"]["up"]["kernel"])


@pytest.mark.long
def test_scanned_decode_with_reordered_cache_rows_matches_full_forward(rng):
    config, params, tokens = random_model(rng, 7, positions="rope", window=3)
    twin = dataclasses.replace(config, scan_layers=True)
    want, _ = jax.jit(build(config).apply)({"params": params}, tokens)
    apply = jax.jit(build(twin).apply)
    stacked, cache, parts = stack_layers(params), init_cache(twin, 2, 3), []
    assert cache.capacity == 3
    for span in (slice(0, 3), slice(3, 6), slice(6, 7)):
        logits, cache = apply({"params": stacked}, tokens[:, span], cache=cache)
        parts.append(logits)
        if span.stop == 3:  # reorder rows as beam search does; every leaf leads with the batch
            tokens, cache = tokens[::-1], jax.tree.map(lambda leaf: leaf[::-1], cache)
            want, parts = want[::-1], [logits[::-1]]
    assert cache.length.tolist() == [7, 7]
    assert_near(np.concatenate(parts, axis=1), want, INVARIANCE)


# Encoder-decoder


@pytest.mark.slow
@pytest.mark.long_except("loop")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_cached_source_matches_recomputed_source(rng, scan):
    """Cached cross-attention matches recomputation, and source padding has no effect."""
    base, params, tokens = random_model(
        rng, 6, kind="encoder-decoder", **T5, num_layers=1, num_decoder_layers=2
    )
    config = dataclasses.replace(base, scan_layers=scan)
    model, source = build(config), random_tokens(rng, 2, SOURCE)
    params = stack_layers(params) if scan else params
    apply = jax.jit(model.apply)
    want, none = apply({"params": params}, tokens, source=source)
    assert none is None

    padded = np.concatenate([random_tokens(rng, 2, 3), source, random_tokens(rng, 2, 2)], axis=1)
    places = np.tile(np.arange(-3, SOURCE + 2, dtype=np.int32), (2, 1))
    places = np.where((places >= 0) & (places < SOURCE), places, -1)
    cache = jax.jit(partial(model.apply, method="init_cache", capacity=6))(
        {"params": params}, padded, positions=places
    )
    first, cache = apply({"params": params}, tokens[:, :3], cache=cache)
    kept = cache.cross
    rest, cache = apply({"params": params}, tokens[:, 3:], cache=cache)
    assert_near(np.concatenate([first, rest], axis=1), want, INVARIANCE)
    assert cache.length.tolist() == [6, 6]
    chex.assert_tree_all_finite(kept)
    chex.assert_trees_all_equal(cache.cross, kept, strict=True)


@pytest.mark.slow
def test_encoder_decoder_requires_exactly_one_of_source_and_cache(rng, key):
    config, params, tokens = random_model(rng, 3, kind="encoder-decoder")
    model = build(config)
    read = partial(model.apply, method="init_cache", capacity=5)
    cache = jax.eval_shape(read, {"params": params}, tokens)
    for more, message in (
        ({}, "either source or cache"),
        (dict(source=tokens, cache=cache), "either source or cache"),
        (dict(source_positions=tokens, cache=cache), "source_positions needs a source"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply({"params": params}, tokens, **more)


# Arguments


@pytest.mark.parametrize(
    ("kind", "batch", "message"),
    [("encoder", 2, "an encoder has no cache"), ("encoder-decoder", 2, "init_cache"),
     ("decoder", -1, "batch is -1")],
)  # fmt: skip
def test_invalid_cache_arguments_raise_error(kind, batch, message):
    with pytest.raises(ValueError, match=message):
        init_cache(small(kind=kind), batch, 5)


@pytest.mark.slow
def test_contradictory_model_arguments_raise_error(rng):
    _, params, tokens = random_model(rng, 3)
    ids = np.zeros((2, 3), np.int32)
    for more, message in (
        (dict(positions=ids[:, :2]), r"positions \(2, 2\) and tokens \(2, 3\)"),
        (dict(segments=ids[:1]), r"segments \(1, 3\) and tokens \(2, 3\)"),
        (dict(segments=ids, positions=ids), "positions are .*: with segments, each row must"
         " contain 0 to 2, in any order"),
        (dict(segments=ids, cache=init_cache(SMALL, 2, 5)), "segments with a cache"),
        (dict(at=np.zeros((2, 1))), r"at is \w+\[.*\]: must be integers \[2, Q\]"),
        (dict(at=ids[:1]), r"at is \w+\[.*\]: must be integers \[2, Q\]"),
        (dict(at=ids[0]), r"at is \w+\[.*\]: must be integers \[2, Q\]"),
        (dict(at=[[1], [1]]), r"at is of type list: must be an array \[B, Q\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build(SMALL).apply({"params": params}, tokens, **more)
    with pytest.raises(ValueError, match="types were passed, but type_vocab_size is None"):
        build(small(kind="encoder")).apply({"params": {}}, tokens, types=ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_dropout_key_in_rngs_raises_error(kind, rng, key):
    """No module reads `rngs`, so dropout would silently be off."""
    config = small(kind=kind, num_layers=1, dropout=0.5)
    model, tokens = build(config), random_tokens(rng, 2, 3)
    params = init_params(config, key)
    more = {"source": tokens} if kind == "encoder-decoder" else {}
    message = (
        r"rngs contains 'dropout': pass the dropout key as an argument: model.apply\(.*, key=key\)"
    )
    with pytest.raises(ValueError, match=message):
        model.apply({"params": params}, tokens, **more, rngs={"dropout": key})
    assert model.apply({"params": params}, tokens, **more, rngs={"params": key})[0].shape
    if kind != "decoder":
        with pytest.raises(ValueError, match=message):
            model.apply({"params": params}, tokens, rngs={"dropout": key}, method="encode")
    plain, _ = model.apply({"params": params}, tokens, **more)
    dropped, _ = model.apply({"params": params}, tokens, **more, key=key, rngs={"dropout": key})
    assert np.isfinite(dropped).all() and np.abs(plain - dropped).max() > 1e-3
    assert set(model.init({"params": key, "dropout": key}, tokens, **more)) == {"params"}


@pytest.mark.slow
def test_nested_model_allows_rngs_of_parent(rng, key):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x, _ = build(SMALL)(tokens)
            return nn.Dropout(0.5, deterministic=False)(x)

    tokens = random_tokens(rng, 1, 3)
    outer = Outer()
    variables = outer.init({"params": key, "dropout": key}, tokens)
    out = outer.apply(variables, tokens, rngs={"dropout": key})
    assert (np.asarray(out) == 0).any() and np.isfinite(out).all()


def test_positions_of_any_integer_dtype_become_int32():
    tokens, positions = np.zeros((1, 3), np.int32), np.array([[0, 1, 250]])
    state = init_cache(SMALL, 1, 255)
    for dtype in (np.uint8, np.int64):
        given = jnp.asarray(positions, dtype) if dtype == np.uint8 else positions.astype(dtype)
        stored = (
            positions_and_masks(SMALL, tokens.shape, given, None, None)[0],
            check_cache_room(SMALL, state, tokens, given)[0],
        )
        for x in stored:
            assert x.dtype == np.int32 and (np.asarray(x) == positions).all()
    with pytest.raises(ValueError, match="positions contains 4294967296"):
        positions_and_masks(SMALL, tokens.shape, positions + 2**32, None, None)


def test_position_past_learned_table_raises_error(rng):
    _, params, tokens = random_model(rng, ONE_LAYER.max_len + 1, 1, num_layers=1)
    with pytest.raises(ValueError, match="41"):
        build(ONE_LAYER).apply({"params": params}, tokens)
    with pytest.raises(ValueError, match="41"):
        jax.eval_shape(lambda p: build(ONE_LAYER).apply({"params": p}, tokens), params)


@pytest.mark.slow
def test_position_past_full_cache_raises_error_or_returns_nan(rng):
    """Known positions raise ValueError; traced ones make the row NaN and overwrite no slot."""
    config, params, tokens = random_model(rng, 3, positions="rope")
    model = build(config)
    cache = init_cache(config, 2, 5)
    places = np.array([[0, 1, 2], [0, -1, -1]], np.int32)
    apply = jax.jit(model.apply)
    logits, cache = apply({"params": params}, tokens, positions=places, cache=cache)
    assert np.isfinite(np.asarray(logits)).all()
    with pytest.raises(ValueError, match="position 5 is beyond the capacity of the cache, 5"):
        model.apply({"params": params}, tokens, cache=cache)
    before = jax.tree.map(np.array, cache)
    for _ in range(2):
        logits, cache = apply({"params": params}, tokens, cache=cache)
        assert np.isnan(np.asarray(logits)[0]).all()
    assert cache.length.tolist() == [5, 5]
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert layer.positions[0].tolist() == [0, 1, 2, 3, 4]
        assert_same_bits(layer.k[0, :3], old.k[0, :3])
        assert_same_bits(layer.v[0, :3], old.v[0, :3])
    logits, _ = apply({"params": params}, tokens, cache=before)
    assert np.isnan(np.asarray(logits)[0]).all() and np.isfinite(np.asarray(logits)[1]).all()


# Parameters


def names(tree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, value in tree.items():
        assert type(name) is str
        path = f"{prefix}{name}"
        if type(value) is dict:
            found |= names(value, f"{path}/")
        else:
            found[path] = value.shape
    return found


FULL = dataclasses.replace(
    SMALL, num_layers=1, qk_norm=True, attention_sinks=True, attention_gate=True, value_head_dim=5,
    num_heads=4, num_kv_heads=2, glu=True, embedding_norm=True, tie_embeddings=False,
    logit_bias=True, norm_order="sandwich",
)  # fmt: skip

EMBED = {
    "embed/tokens": (31, 26), "embed/positions": (41, 26), "embed/norm/scale": (26,),
    "embed/norm/bias": (26,), "embed/output": (31, 26), "embed/bias": (31,),
}  # fmt: skip
ATTENTION = {
    "query/kernel": (26, 4, 6), "query/bias": (4, 6), "key/kernel": (26, 2, 6), "key/bias": (2, 6),
    "gate/kernel": (26, 4, 5), "gate/bias": (4, 5),
    "value/kernel": (26, 2, 5), "value/bias": (2, 5), "out/kernel": (4, 5, 26), "out/bias": (26,),
    "query_scale": (6,), "key_scale": (6,), "sinks": (4,),
}  # fmt: skip
FEED_FORWARD = {
    "up/kernel": (26, 37), "up/bias": (37,), "gate/kernel": (26, 37), "gate/bias": (37,),
    "down/kernel": (37, 26), "down/bias": (26,),
}  # fmt: skip
NORM = {"scale": (26,), "bias": (26,)}


def within(prefix: str, tree: dict) -> dict:
    return {f"{prefix}/{name}": shape for name, shape in tree.items()}


def block(prefix: str, *, cross: bool = False) -> dict:
    branches = ["attention", *(["cross_attention"] if cross else []), "feed_forward"]
    found = within(f"{prefix}/feed_forward", FEED_FORWARD)
    for name in branches:
        found |= within(f"{prefix}/norm_{name}", NORM) | within(f"{prefix}/out_norm_{name}", NORM)
        if name != "feed_forward":
            found |= within(f"{prefix}/{name}", ATTENTION)
    return found


def test_parameters_are_plain_dicts_with_stable_names():
    """Checkpoints and importers rely on these names."""
    assert names(shapes(FULL)) == {
        **EMBED,
        **block("decoder/block_0"),
        **within("decoder/norm", NORM),
    }
    encoder = dataclasses.replace(
        FULL, kind="encoder", type_vocab_size=3, num_classes=3, masked_token_head=True
    )
    assert names(shapes(encoder)) == {
        **EMBED,
        "embed/types": (3, 26),
        **block("encoder/block_0"),
        **within("encoder/norm", NORM),
        **within("head_norm", NORM),
        "head_dense/kernel": (26, 26),
        "head_dense/bias": (26,),
        "pooler/kernel": (26, 26),
        "pooler/bias": (26,),
        "classifier/kernel": (26, 3),
        "classifier/bias": (3,),
    }
    both = dataclasses.replace(FULL, kind="encoder-decoder", num_decoder_layers=2)
    assert names(shapes(both)) == {
        **EMBED,
        "embed/target_positions": (41, 26),
        **within("embed/target_norm", NORM),
        **block("encoder/block_0"),
        **within("encoder/norm", NORM),
        **block("decoder/block_0", cross=True),
        **block("decoder/block_1", cross=True),
        **within("decoder/norm", NORM),
    }


@pytest.mark.slow
def test_source_vocabulary_adds_one_embedding_table_and_is_validated(rng):
    shared = small(kind="encoder-decoder")
    config = dataclasses.replace(shared, source_vocab_size=43)
    plain, own = names(shapes(shared)), names(shapes(config))
    assert own == {**plain, "embed/source_tokens": (43, 26)}
    assert num_params(config) == num_params(shared) + 43 * 26
    assert cache_bytes(config, 2, 7, source_length=5) == cache_bytes(shared, 2, 7, source_length=5)
    source, target = np.full((1, 3), 42, np.int32), np.full((1, 3), VOCAB, np.int32)
    model, params = build(config), oracle.randomised(shapes(config), rng)
    encode = jax.jit(lambda params: model.apply({"params": params}, source, method="encode"))
    assert np.isfinite(encode(params)).all()
    with pytest.raises(ValueError, match=r"token 43 at \[0, 0\]: must be from 0 to 42"):
        model.apply({"params": params}, source + 1, method="encode")
    with pytest.raises(ValueError, match=r"token 31 at \[0, 0\]: must be from 0 to 30"):
        model.apply({"params": params}, target, source=source)


@pytest.mark.slow
def test_each_kind_of_positions_has_expected_parameters():
    plain = names(shapes(small(positions="none")))

    def own(**change) -> dict:
        config = small(**change)
        return {k: v for k, v in names(shapes(config)).items() if k not in plain}

    assert own(positions="learned") == {"embed/positions": (41, 26)}
    assert own(positions=Learned(offset=2)) == {"embed/positions": (43, 26)}
    assert own(positions=Rope(window_base=7.0), window=(3, None)) == {}
    assert own(positions="sinusoidal") == own(positions="rope") == own(positions="alibi") == {}
    assert own(**T5) == {"decoder/relative_bias": (8, 2)}
    assert own(positions=Shaw(max_distance=3), value_head_dim=6) == {
        f"decoder/block_{i}/attention/shaw_{part}": (7, 6)
        for i in (0, 1)
        for part in ("key", "value")
    }
    assert own(positions="none", norm_order="post") == {}
    assert "decoder/norm/scale" not in names(shapes(small(norm_order="post")))


def test_use_bias_false_removes_all_biases():
    bare = names(shapes(dataclasses.replace(ONE_LAYER, use_bias=False)))
    assert not [name for name in bare if "bias" in name]
    some = names(shapes(dataclasses.replace(ONE_LAYER, use_bias=False, qkv_bias=True)))
    extra = {name.split("/", 2)[2] for name in set(some) - set(bare)}
    assert extra == {"attention/query/bias", "attention/key/bias", "attention/value/bias"}
    half = names(shapes(dataclasses.replace(ONE_LAYER, use_bias=False, ff_bias=True, glu=True)))
    extra = {name.split("/", 2)[2] for name in half if "bias" in name}
    assert extra == {f"feed_forward/{part}/bias" for part in ("up", "gate", "down")}
    rest = names(shapes(dataclasses.replace(ONE_LAYER, ff_bias=False)))
    assert [name for name in rest if "attention/out/bias" in name]
    assert not [name for name in rest if "/feed_forward/" in name and "bias" in name]


@pytest.mark.slow
def test_pooler_exists_only_if_config_needs_it():
    def own(**change) -> dict:
        plain, more = (names(shapes(small(kind="encoder", **c))) for c in ({}, change))
        return {name: more[name] for name in more.keys() - plain}

    pooler = {"pooler/kernel": (26, 26), "pooler/bias": (26,)}
    assert own(pooler="tanh") == own(pooler="relu") == pooler
    assert own(num_classes=3).items() > pooler.items()
    assert own(num_classes=3) == own(num_classes=3, pooler="relu")


def test_scanned_parameters_have_leading_layer_axis():
    scanned = names(shapes(dataclasses.replace(FULL, scan_layers=True, num_layers=3)))
    inner = {k: v for k, v in scanned.items() if k.startswith("decoder/blocks/")}
    assert inner == {k: (3, *v) for k, v in block("decoder/blocks").items()}
    assert not [k for k in scanned if "block_" in k]


SCALED = dataclasses.replace(
    ONE_LAYER, vocab_size=499, scale_embeddings=True, norm_unit_offset=True, qk_norm=True,
    norm_order="sandwich",
)  # fmt: skip


@cache
def drawn(seed: int):
    return init_params(SCALED, jax.random.key(seed))


def test_unit_offset_norm_scales_start_at_zero():
    scales = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(drawn(3))
        if "scale" in jax.tree_util.keystr(path[-1:])
    }
    assert len(scales) == 2 * 2 + 2 + 1
    for name, leaf in scales.items():
        assert (leaf == 0).all(), name


@pytest.mark.slow
@pytest.mark.long_except("loop")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_initial_parameters_have_configured_std(key, scan):
    config = ModelConfig(
        vocab_size=499, d_model=128, num_layers=3, num_heads=4, max_len=101, scan_layers=scan,
        init_std=0.02, qk_norm=True, attention_sinks=True, logit_bias=True, tie_embeddings=False,
    )  # fmt: skip
    params = init_params(config, key)
    assert type(params) is dict
    loop = unstack_layers(params) if scan else params
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(loop)
    }
    assert len(leaves) > 40
    for name, leaf in leaves.items():
        assert leaf.dtype == np.float32, name
        last = name.split("/")[-1]
        if last.endswith("bias") or last == "sinks":
            assert (leaf == 0).all(), name
        elif last.endswith("scale"):
            assert (leaf == 1).all(), name
        else:
            branch = "/out/" in name or "/down/" in name
            std = 0.02 / math.sqrt(2 * 3) if branch else 0.02
            error = 4 / math.sqrt(leaf.size)
            assert abs(leaf.std() / std - 1) < error, name
            assert abs(leaf.mean()) < error * std, name
    kernels = [leaf for name, leaf in leaves.items() if name.endswith("query/kernel")]
    assert len(kernels) == 3 and not np.allclose(kernels[0], kernels[1])


@pytest.mark.slow
@pytest.mark.long_except("scan")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_branch_initialization_std_depends_on_stack_depth(scan):
    """The std is 0.02 / sqrt(2 L) with L = 1 in the encoder and L = 4 in the decoder."""
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=31, d_model=64, num_layers=1, num_decoder_layers=4,
        num_heads=4, init_std=0.02, scan_layers=scan,
    )  # fmt: skip
    params = init_params(config, jax.random.key(5))
    params = unstack_layers(params) if scan else params
    for stack, depth, branches in (("encoder", 1, 2), ("decoder", 4, 3)):
        kernels = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params[stack])
            if jax.tree_util.keystr(path[-2:]) in ("['out']['kernel']", "['down']['kernel']")
        }
        assert len(kernels) == depth * branches
        for name, kernel in kernels.items():
            std = 0.02 / math.sqrt(2 * depth)
            assert abs(kernel.std() / std - 1) < 5 / math.sqrt(kernel.size), f"{stack}/{name}"


@pytest.mark.long_except("loop-*", "scan-encoder-decoder-all")
@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma", "shaw-all", "t5", "bert", "sinusoidal-post-relu",
                                  "alibi-odd-heads-window", "encoder-decoder-all"])  # fmt: skip
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_model_is_float32_under_x64(case, scan, rng):
    config, tokens, arguments, _ = random_case(case, rng)
    config = dataclasses.replace(config, scan_layers=scan)
    with jax.enable_x64(True):
        wide = shapes(config)
        assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
        logits = jax.eval_shape(build(config).apply, {"params": wide}, tokens, **arguments)[0]
        assert logits.dtype == jnp.float32
        if config.kind == "decoder" and "segments" not in arguments:
            cache = init_cache(config, 2, TOKENS)
            logits, after = jax.eval_shape(
                lambda params, cache: build(config).apply(
                    {"params": params}, tokens, cache=cache, **arguments
                ),
                wide,
                cache,
            )
            assert logits.dtype == jnp.float32
            chex.assert_trees_all_equal_dtypes(after, cache)


def test_scaled_embeddings_have_unit_variance_and_depend_on_key():
    one, two, other = drawn(3), drawn.__wrapped__(3), drawn(4)
    assert abs(np.asarray(one["embed"]["tokens"]).std() * math.sqrt(26) - 1) < 0.03
    chex.assert_tree_all_finite(one)
    chex.assert_trees_all_equal(one, two, strict=True)
    assert (np.asarray(one["embed"]["tokens"]) != np.asarray(other["embed"]["tokens"])).any()
    assert sum(leaf.size for leaf in jax.tree.leaves(one)) == num_params(SCALED)


@pytest.mark.slow
@pytest.mark.long_except("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_model_returns_float32_logits(rng, dtype):
    config, params, tokens = random_model(rng, positions="rope", dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(config))} == {jnp.dtype("float32")}
    apply = jax.jit(build(config).apply)
    got, _ = apply({"params": params}, tokens)
    assert got.dtype == jnp.float32
    want = oracle.forward(config, params, tokens)
    top = np.abs(want).max()
    error = largest_error(got, want)
    assert 1e-4 * top < error < 0.03 * top, "wrong precision or wrong result"
    cache = init_cache(config, 2, TOKENS)
    assert {cache.layers[0].k.dtype, cache.layers[0].v.dtype} == {jnp.dtype(dtype)}
    cached, cache = apply({"params": params}, tokens, cache=cache)
    assert cache.layers[0].k.dtype == jnp.dtype(dtype)
    assert largest_error(cached, want) < 0.03 * top


def test_equal_configs_build_equal_hashable_models():
    for kind in ("decoder", "encoder", "encoder-decoder"):
        config = small(kind=kind)
        same = small(kind=kind)
        assert build(config) == build(same) and hash(build(config)) == hash(build(same))
        assert isinstance(build(config), nn.Module)
    assert build(SMALL) != build(small(d_ff=41))


# Compilation and strict JAX settings


def test_repeated_calls_compile_once(rng):
    config, params, _ = random_model(rng, num_layers=1, d_ff=0)
    traces = []

    @jax.jit
    def step(params, tokens, cache, key):
        traces.append(1)
        logits, cache = build(config).apply({"params": params}, tokens, cache=cache, key=key)
        return logits, cache

    cache = init_cache(config, 2, 41)
    for n in range(7):
        logits, cache = step(params, random_tokens(rng, 2, 5), cache, jax.random.key(n))
    assert np.isfinite(np.asarray(logits)).all()
    assert len(traces) == 1
    assert cache.length.tolist() == [35, 35]


SETTINGS = {
    "leaks": jax.checking_leaks,
    "nans": partial(jax.debug_nans, True),
    "promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "transfers": partial(jax.transfer_guard, "disallow"),
}


@pytest.mark.slow
@pytest.mark.long_except("promotion")
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_and_decoding_work_with_strict_jax_settings(setting, rng, key):
    """No leaked tracers, no NaN even in a row that sees nothing, no implicit casts or transfers."""
    config, params, tokens = random_model(
        rng, 5, positions="rope", dropout=0.1, attention_dropout=0.1, remat="full", window=3,
        num_layers=1,
    )  # fmt: skip
    places = np.array([[-1, 0, 1, 2, 3], [-1] * 5], np.int32)
    inputs = jax.device_put((tokens, places))
    params = jax.device_put(params)
    cache = init_cache(config, 2, 3)

    def train(params, tokens, places, key):
        def loss(params):
            return (
                build(config).apply({"params": params}, tokens, positions=places, key=key)[0].sum()
            )

        return jax.value_and_grad(loss)(params)

    def decode(params, tokens, places, cache):
        return build(config).apply({"params": params}, tokens, positions=places, cache=cache)

    with SETTINGS[setting]():
        if setting in ("leaks", "promotion"):
            jax.eval_shape(train, params, *inputs, key)
            jax.eval_shape(decode, params, *inputs, cache)
            return
        outputs = jax.jit(train)(params, *inputs, key), jax.jit(decode)(params, *inputs, cache)
    for leaf in jax.tree.leaves(outputs):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
