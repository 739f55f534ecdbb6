"""TPU kernels lower for a TPU without having one, with every supported JAX; other tile sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from transformer_jax import Causal, dot_product_attention
from transformer_jax.attention.score_mod import traced_score_mod
from transformer_jax.kernels import Target, using
from transformer_jax.kernels.contract import Blocks
from transformer_jax.kernels.score_function import ELEMENTWISE


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("S", [1024, 32768], ids=["one backward kernel", "two"])
def test_output_and_gradients_lower_for_tpu(S, x64):
    def loss(*inputs):
        settings = dict(mask=Causal(), implementation="pallas")
        return dot_product_attention(*inputs, **settings).astype(jnp.float32).sum()

    with jax.enable_x64(x64), using(Target("tpu", chip="TPU v5e")):
        arrays = [jax.ShapeDtypeStruct((1, S, 2, 128), jnp.float32)] * 3
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    backward = ["attention_single_pass"] if S == 1024 else ["attention_dq", "attention_dkdv"]
    assert all(name in text for name in ("attention_forward", *backward))


@pytest.mark.slow
@pytest.mark.long_except("single_pass_rows")
@pytest.mark.parametrize("kind", ["single_pass_rows", "dq"])
def test_backward_tile_handles_hidden_keys_absent_from_forward_tiles(kind, monkeypatch):
    if kind == "dq":
        monkeypatch.setattr("transformer_jax.kernels.tpu.sums_fit", lambda *sizes: False)
    wide = ((kind, Blocks(128, 256)), ("dkdv", Blocks(128, 128)))
    where = Target("tpu", True, blocks=(("forward", Blocks(128, 128)), *wide))
    key = jax.random.key(0)
    q, k, v = (jax.random.normal(x, (1, 256, 1, 8)) for x in jax.random.split(key, 3))
    positions = jnp.where(jnp.arange(256) < 128, jnp.arange(256), -1)

    def gradients(k, v):
        def loss(q, k, v):
            settings = dict(k_positions=positions, mask=Causal(), implementation="pallas")
            return (dot_product_attention(q, k, v, **settings) ** 2).sum()

        with using(where):
            return jax.grad(loss, (0, 1, 2))(q, k, v)

    found = gradients(k.at[:, 130].set(1e30), v.at[:, 200].set(1e30))
    for got, expected in zip(found, gradients(k, v), strict=True):
        assert np.isfinite(got).all() and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def each_operation(numbers, s, b, h, q, k):
    n, y = q - k, numbers[h]
    results = [
        jnp.abs(s), jnp.ceil(s), jnp.cos(s), lax.erf(s), jnp.exp(s), jnp.exp2(s), jnp.floor(s),
        s**3, jnp.log(s), jnp.log1p(s), lax.logistic(s), jnp.maximum(s, y), jnp.minimum(s, y),
        s**y, lax.rem(s, 2.0), jnp.round(s), lax.rsqrt(s), jnp.sqrt(s), jnp.sign(s), jnp.sin(s),
        jnp.square(s), lax.stop_gradient(s), jnp.tan(s), jnp.tanh(s), -s, s / y, s * y,
        jnp.array(s), lax.clamp(-1.0, s, 1.0), jax.nn.relu(s), n & 3, n | 3, n ^ 3, ~n, n << 2,
        n >> 2, n % 3, n // 3, jnp.abs(n), jnp.sign(n),
    ]  # fmt: skip
    conditions = [n == 1, n != 1, n < 1, n <= 1, n > 1, n >= 1, jnp.isfinite(s), ~(n > 2)]
    return sum(results) + sum(jnp.where(x, s, y) for x in conditions)


@pytest.mark.slow
@pytest.mark.parametrize("S", [1024, 32768], ids=["one backward kernel", "two"])
def test_every_operation_on_scores_lowers_for_tpu(S):
    program = traced_score_mod(partial(each_operation, jnp.ones(2)), 1, 2, jnp.float32).program
    assert {x.primitive.name for x in program.jaxpr.eqns} >= ELEMENTWISE

    def loss(query, key, value, numbers):
        out = dot_product_attention(
            query, key, value, mask=Causal(), implementation="pallas",
            score_mod=partial(each_operation, numbers),
        )  # fmt: skip
        return out.sum()

    with using(Target("tpu", chip="TPU v5e")):
        arrays = [jax.ShapeDtypeStruct((1, S, 2, 128), jnp.float32)] * 3
        arrays += [jax.ShapeDtypeStruct((2,), jnp.float32)]
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(*arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    backward = ["attention_single_pass"] if S == 1024 else ["attention_dq", "attention_dkdv"]
    assert all(name in text for name in ("attention_forward", "attention_score", *backward))
