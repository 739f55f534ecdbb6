"""JAX transformations of the public functions, and checks of known values inside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.tolerances import FORWARD_F32, assert_near
from tests.transformations.cases import all_cases
from tests.transformations.table import COLUMNS, cell

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(vocab_size=11, d_model=6, num_layers=1, num_heads=3, d_ff=5, max_len=13)
TOKENS = np.array([[3, 5, 7, 2, 1, 10]], np.int32)
SAMPLE = {
    "jvp": ('preset("tiny"), T = 64', "chunked_cross_entropy"),
    "known arrays": ("Decoder, learned", "learned", "Decoder with a cache"),
    "strict promotion": (
        "dot_product_attention, default, T = 5, masked",
        "Decoder, t5",
        "rms_norm",
    ),
    "export, length": ("Decoder, learned", "dot_product_attention, default, T = 67, masked"),
    "x64": ("Decoder with a cache of int8", "apply_rope"),
}


@pytest.mark.slow
@pytest.mark.long_except("export, length", "strict promotion")
@pytest.mark.parametrize("column", SAMPLE)
def test_sampled_transformation_combinations_are_correct(column):
    cases = all_cases()
    for name in SAMPLE[column]:
        assert cell(cases[name], column) == "yes"


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_all_transformation_combinations_are_correct(column):
    results = [cell(case, column) for case in all_cases().values()]
    assert "yes" in results


@pytest.mark.slow
@pytest.mark.long_except("rope")
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_padding_mask_with_static_positions_may_be_closed_over(positions, key):
    config = tj.ModelConfig(**SMALL, positions=positions)
    model, params = tj.build(config), tj.init_params(config, key)
    at = jnp.array([[-1, -1, 0, 1, 2, 3]])
    run = lambda params, at: model.apply({"params": params}, TOKENS, positions=at)[0]  # noqa: E731
    assert_near(jax.jit(lambda p: run(p, at))(params), run(params, at), FORWARD_F32)
    if positions == "learned":
        far = jnp.array([[-1, -1, 0, 1, 2, 14]])
        with pytest.raises(ValueError, match="position 14 is outside the table of 13 rows"):
            jax.jit(lambda p: run(p, far))(params)


@pytest.mark.slow
def test_concrete_full_cache_is_rejected_inside_jit(key):
    config = tj.ModelConfig(**SMALL, positions="rope")
    model, params = tj.build(config), tj.init_params(config, key)
    cache, at = tj.init_cache(config, 1, 4), jnp.arange(6)[None]
    run = lambda p: model.apply({"params": p}, TOKENS, positions=at, cache=cache)[0]  # noqa: E731
    with pytest.raises(ValueError, match="position 5 is beyond the capacity of the cache, 4"):
        jax.jit(run)(params)


@pytest.mark.slow
def test_repeated_segment_ids_are_rejected_or_kept_distinct_when_traced(key):
    config = tj.ModelConfig(**SMALL, positions="rope")
    model, params = tj.build(config), tj.init_params(config, key)
    again, apart = (np.array([ids], np.int32) for ids in ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]))
    run = lambda segments: model.apply({"params": params}, TOKENS, segments=segments)[0]  # noqa: E731
    for call in (run, lambda segments: jax.jit(lambda: run(segments))()):
        with pytest.raises(ValueError, match=r"segments contain 1 again at \[0, 4\]"):
            call(again)
    assert_near(jax.jit(run)(again), run(apart), FORWARD_F32)
    alone = [model.apply({"params": params}, TOKENS[:, i : i + 2])[0] for i in (0, 2, 4)]
    assert_near(run(apart), np.concatenate(alone, axis=1), FORWARD_F32)


@pytest.mark.slow
@pytest.mark.long_except("decoder", "encoder", "recurrent")
@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder", "recurrent", "window"])
def test_model_works_through_nnx_bridge(kind):
    from flax import nnx

    config = {
        "recurrent": lambda: tj.RecurrentConfig(vocab_size=11, d_embed=3, d_hidden=5),
        "window": lambda: tj.WindowConfig(vocab_size=11, context=2, d_embed=3, d_hidden=5),
    }.get(kind, lambda: tj.ModelConfig(**SMALL, kind=kind))()
    more = {"source": TOKENS} if kind == "encoder-decoder" else {}
    model = nnx.bridge.ToNNX(tj.build(config), rngs=nnx.Rngs(0)).lazy_init(TOKENS, **more)
    logits, _ = model(TOKENS, **more)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wanted, _ = tj.build(config).apply({"params": params}, TOKENS, **more)
    assert_near(logits, wanted, FORWARD_F32)


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.dtype("bfloat16"), jnp.zeros(1, "bfloat16").dtype]
)
def test_config_dtype_may_be_dtype_class(dtype):
    config = tj.ModelConfig(**SMALL, dtype=dtype)
    assert config == tj.ModelConfig(**SMALL, dtype="bfloat16") and config.dtype == "bfloat16"
    assert tj.TrainConfig(param_dtype=dtype).param_dtype == "bfloat16"
    for wrong in (np.int32, 7, jnp.float8_e5m2):
        with pytest.raises(tj.ConfigError, match=r"dtype is .*must be one of"):
            tj.ModelConfig(**SMALL, dtype=wrong)
