"""LayerNorm and RMSNorm of few rows on a CPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.kernels import cpu
from transformer_jax.models.ops import layer_norm, project, rms_norm

pytestmark = [
    pytest.mark.skipif(isinstance(cpu.library(), str), reason=str(cpu.library())),
    pytest.mark.usefixtures("quick_compilation"),
]


def exact(x, scale, bias, centred):
    """Compute a norm in float64."""
    x = np.asarray(x, np.float64)
    y = x - x.mean(-1, keepdims=True) if centred else x
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    y = y if scale is None else y * np.asarray(scale, np.float64)
    return y if bias is None else y + np.asarray(bias, np.float64)


def draw(rng, *shape):
    return jax.device_put((2 + rng.normal(size=shape)).astype(np.float32))


@pytest.mark.slow_except("neon-*")
@pytest.mark.parametrize("shape", [(1, 1, 128), (2, 3, 131), (16, 777), (1, 129)])
def test_norms_match_float64(rng, shape, instructions):
    x, scale, bias = draw(rng, *shape), draw(rng, shape[-1]), draw(rng, shape[-1])
    for one, other in ((scale, bias), (scale, None), (None, bias), (None, None)):
        assert_near(layer_norm(x, one, other), exact(x, one, other, True), 4 * FORWARD_F32)
    for one in (scale, None):
        assert_near(rms_norm(x, one), exact(x, one, None, False), 4 * FORWARD_F32)
    half = rms_norm(x.astype(jnp.bfloat16), scale)
    assert half.dtype == jnp.bfloat16
    assert_near(half, exact(x.astype(jnp.bfloat16), scale, None, False), 2**-8)


@pytest.mark.slow
def test_norm_kernel_runs_few_long_rows_and_xla_computes_gradient(rng):
    def program(function, *shape):
        return jax.jit(function).lower(jnp.ones(shape), jnp.ones(shape[-1])).as_text()

    assert "row_norm" in program(rms_norm, 1, 16, 128)
    assert "row_norm" not in program(rms_norm, 17, 128)
    assert "row_norm" not in program(rms_norm, 16, 127)
    assert "row_norm" not in program(jax.grad(lambda x, scale: rms_norm(x, scale).sum()), 2, 128)
    x, scale = draw(rng, 3, 200), draw(rng, 200)
    again = export.deserialize(export.export(jax.jit(rms_norm))(x, scale).serialize())
    assert_near(again.call(x, scale), exact(x, scale, None, False), 4 * FORWARD_F32)
    mapped = jax.vmap(rms_norm, (0, None))(x, scale)
    assert_near(mapped, exact(x, scale, None, False), 4 * FORWARD_F32)


@pytest.mark.slow
def test_norm_gradient_for_few_rows_matches_float64(rng):
    """For normalised y and h = g scale, dx = (h - mean h - y mean(h y)) / sqrt(var + eps)."""
    x, scale, bias, g = draw(rng, 3, 150), draw(rng, 150), draw(rng, 150), draw(rng, 3, 150)
    dx, dscale, dbias = jax.vjp(lambda *args: layer_norm(*args), x, scale, bias)[1](g)
    wide_x, wide_g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    y, h = exact(x, None, None, True), wide_g * np.asarray(scale, np.float64)
    size = np.sqrt(wide_x.var(-1, keepdims=True) + 1e-5)
    wanted = (h - h.mean(-1, keepdims=True) - y * (h * y).mean(-1, keepdims=True)) / size
    assert_near(dx, wanted, GRADIENT_F32)
    assert_near(dscale, (wide_g * y).sum(0), GRADIENT_F32)
    assert_near(dbias, wide_g.sum(0), GRADIENT_F32)


@pytest.mark.slow_except("avx512-inf", "neon-*", "plain-inf")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_affect_only_their_row(rng, bad, instructions):
    x = draw(rng, 3, 150).at[1, 7].set(bad)
    found = layer_norm(x, None, None)
    assert jnp.isnan(found[1]).all()
    assert_near(found[::2], exact(x[::2], None, None, True), 4 * FORWARD_F32)


@pytest.mark.slow
def test_unsupported_parameter_shapes_and_traced_eps_use_xla(rng):
    x, scale = draw(rng, 2, 256), draw(rng, 128)
    with pytest.raises(ValueError, match=r"scale has shape \(128,\): must be \(256,\)"):
        layer_norm(x, scale, None)
    one = jnp.array([2.0], jnp.float32)
    assert_near(layer_norm(x, one, None), 2 * exact(x, None, None, True), 4 * FORWARD_F32)
    found = jax.jit(layer_norm)(x, None, None, 1e-5)
    assert_near(found, exact(x, None, None, True), 4 * FORWARD_F32)


@pytest.mark.slow
def test_results_have_same_varying_axes_as_inputs_under_shard_map(rng):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("data"), jax.P()
    x, scale, kernel = draw(rng, 2, 256), draw(rng, 256), draw(rng, 256, 128)
    for function, more in ((rms_norm, scale), (project, kernel)):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
        assert_near(mapped(x, more), np.asarray(function(x, more), np.float64), FORWARD_F32)
        with pytest.raises(ValueError, match="out_specs"):
            jax.shard_map(function, mesh=mesh, in_specs=(rows, whole), out_specs=whole)(x, more)
