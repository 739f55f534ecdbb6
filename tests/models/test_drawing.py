"""Tests of parameter initialisation by small programs: equal bits, less compilation."""

from functools import partial

import jax
import jax.monitoring
import numpy as np
import pytest

from tests.support import tolerances
from transformer_jax.config import (
    ConvolutionConfig,
    ModelConfig,
    RecurrentConfig,
    T5Buckets,
    WindowConfig,
)
from transformer_jax.models import drawing, factory
from transformer_jax.models.factory import init_params

pytestmark = pytest.mark.usefixtures("usual_compilation")  # tests compare bits

LAYERS = dict(vocab_size=131, d_model=24, num_heads=3, num_layers=2, d_ff=29, max_len=37)
SIZES = dict(vocab_size=13, d_embed=5, d_hidden=7)
ONE_LAYER = ModelConfig(**LAYERS | dict(num_layers=1))
CONFIGS = {
    "decoder": ModelConfig(**LAYERS, init_std=0.7, norm_unit_offset=True, norm="rmsnorm"),
    "scanned": ModelConfig(**LAYERS, scan_layers=True),
    "encoder-decoder": ModelConfig(
        **LAYERS, kind="encoder-decoder", source_vocab_size=17, positions=T5Buckets()
    ),
    "gru": RecurrentConfig(**SIZES, cell="gru", source_vocab_size=11, attention="additive"),
    "lstm": RecurrentConfig(**SIZES, cell="lstm", bidirectional=True),
    "convolution": ConvolutionConfig(vocab_size=13, d_hidden=7),
    "window": WindowConfig(**SIZES, context=3),
}


def assert_same_bits(actual, expected):
    """Compare trees leaf by leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(tolerances.assert_same_bits, actual, expected)


def one_program(config, key):
    """Initialise all parameters in one compiled program."""
    return jax.jit(factory._init, static_argnums=0)(config, key)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_initial_parameters_match_single_program_bitwise(name, key, monkeypatch):
    monkeypatch.setattr(drawing, "CHUNK", 1000)  # no size is a multiple of it
    drawing._normal_chunk.clear_cache()
    found = init_params(CONFIGS[name], key)
    drawing._normal_chunk.clear_cache()
    assert_same_bits(found, one_program(CONFIGS[name], key))


@pytest.mark.long_except("1.0", "0.02")
@pytest.mark.slow
@pytest.mark.parametrize("std", [0.02, 0.7, 1.0, 3e-5])
def test_normal_numbers_match_jax_bitwise(std, key):
    shape = 3, 41, 701

    def normal(key):
        return jax.nn.initializers.normal(std)(jax.random.fold_in(key, 2**31 + 5), shape)

    number, compiled = np.uint32(2**31 + 5), jax.jit(normal)
    assert np.prod(shape) > drawing.CHUNK
    found = drawing._normal_numbers(key, number, np.float32(std), shape)
    tolerances.assert_same_bits(found, compiled(key))
    assert_same_bits(drawing.draw(compiled.trace(key).jaxpr, key), [found])


@pytest.mark.slow
def test_initialization_programs_are_reused_across_depths_and_widths(key):
    """The model's other parameters are constants, which need no compilation."""
    compiled = []

    def count(event: str, seconds: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    init_params(ModelConfig(**LAYERS), key)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        wider = dict(LAYERS, num_layers=3, d_model=30, vocab_size=97, d_ff=41)
        params = init_params(ModelConfig(**wider), key)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(jax.tree.leaves(params)) == 3 * 16 + 4 and not compiled


@pytest.mark.slow
@pytest.mark.long_except("rbg")
@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_other_key_types_match_single_program(impl):
    """Use a key of another generator, and a committed key."""

    def two(key):
        parts = jax.random.fold_in(key, 3), jax.random.fold_in(key, 4)
        return [jax.nn.initializers.normal(0.3)(part, (7, 5)) for part in parts]

    key = jax.device_put(jax.random.key(5, impl=impl), jax.devices()[0])
    compiled = jax.jit(two)
    found = drawing.draw(compiled.trace(key).jaxpr, key)
    assert_same_bits(found, compiled(key))
    assert key.committed and all(x.committed for x in compiled(key))
    assert all(x.committed for x in found) and not np.array_equal(*found)


@pytest.mark.slow
def test_traced_key_produces_same_parameters(key):
    traced = jax.jit(partial(init_params, ONE_LAYER))(key)
    assert_same_bits(init_params(ONE_LAYER, key), traced)
    shapes = jax.eval_shape(lambda: init_params(ONE_LAYER, key))
    assert jax.tree.map(np.shape, traced) == jax.tree.map(lambda leaf: leaf.shape, shapes)
