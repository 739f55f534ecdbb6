"""Latent attention against expanded keys and values in NumPy float64."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tests.support import oracle
from tests.support.tolerances import (
    FORWARD_BF16,
    FORWARD_F32,
    GRADIENT_BF16,
    GRADIENT_F32,
    assert_near,
)
from transformer_jax import ALiBi, Causal, Padding, Segments, Window
from transformer_jax.attention import alibi_slopes, latent_attention
from transformer_jax.kernels import cpu

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMS = "expanded", "absorbed"
NAMES = "query", "latent", "rotated_key", "key_kernel", "value_kernel"
IMPLEMENTATIONS = ["xla", "blockwise"] + ["native"] * (not isinstance(cpu.library(), str))


def draw(B=2, T=6, S=9, N=3, H=5, R=4, C=7, Hv=6, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H + R), (B, S, C), (B, S, R), (C, N, H), (C, N, Hv)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def expand(arrays):
    """Return query, key and value of each head in float64."""
    query, latent, rotated, key_kernel, value_kernel = map(oracle.double, arrays)
    heads = np.broadcast_to(
        rotated[:, :, None], (*rotated.shape[:2], query.shape[2], rotated.shape[2])
    )
    key = np.einsum("bsc,cnh->bsnh", latent, key_kernel)
    value = np.einsum("bsc,cnv->bsnv", latent, value_kernel)
    return query, np.concatenate([key, heads], axis=-1), value


OPTIONS = {
    "none": {},
    "causal window": {"mask": Causal() & Window(3)},
    "documents": {
        "mask": Causal()
        & Segments(
            np.int32([[0, 0, 1, 1, 1, 1], [0] * 6]),
            np.int32([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0] * 9]),
        ),
    },
    "a row without keys": {"mask": Padding(np.arange(9) < np.array([[7], [0]]))},
    "scale, softcap, bias, sinks": {
        "scale": 0.3, "softcap": 2.0, "sinks": np.float32([-1, 0.5, 2]),
        "bias": np.random.default_rng(1).standard_normal((2, 3, 6, 9)).astype(np.float32),
    },
    "positions": {
        "mask": Causal(), "q_positions": np.int32([3, 4, 5, 6, 7, 8]),
        "k_positions": np.int32([0, 1, 2, 3, 4, 5, 6, 7, -1]),
    },
}  # fmt: skip


def expected_of(arrays, options, out_cotangent, lse_cotangent):
    """Return out, lse and the gradients with respect to the five arrays, in float64."""
    query, key, value = expand(arrays)
    known = {
        name: x for name, x in options.items() if name in ("scale", "softcap", "sinks", "bias")
    }
    if "mask" in options:
        at = (
            options.get(f"{side}_positions", np.arange(x.shape[1], dtype=np.int32))
            for side, x in (("q", query), ("k", key))
        )
        known["mask"] = np.asarray(options["mask"].materialize(*at))
    result = oracle.attention(query, key, value, **known)
    back = oracle.attention_gradients(query, key, value, out_cotangent, lse_cotangent, **known)
    _, latent, _, key_kernel, value_kernel = map(oracle.double, arrays)
    dkey, dvalue, H = back.key, back.value, key_kernel.shape[2]
    gradients = [
        back.query,
        np.einsum("bsnh,cnh->bsc", dkey[..., :H], key_kernel)
        + np.einsum("bsnv,cnv->bsc", dvalue, value_kernel),
        dkey[..., H:].sum(axis=2),
        np.einsum("bsc,bsnh->cnh", latent, dkey[..., :H]),
        np.einsum("bsc,bsnv->cnv", latent, dvalue),
    ]
    return result.out, result.lse, gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradients_match_expanded_heads(name, form, implementation):
    arrays, options = draw(), OPTIONS[name]

    def attend(*arrays):
        return latent_attention(
            *arrays, form=form, implementation=implementation, return_lse=True, **options
        )

    (out, lse), pull = jax.vjp(attend, *arrays)
    rng = np.random.default_rng(2)
    dout, dlse = (rng.standard_normal(x.shape).astype(np.float32) for x in (out, lse))
    dlse = np.where(np.isfinite(lse), dlse, 0)
    expected_out, expected_lse, expected = expected_of(arrays, options, dout, dlse)
    assert_near(out, expected_out, 2 * FORWARD_F32)
    seen = np.isfinite(expected_lse)
    assert_near(np.where(seen, lse, 0), np.where(seen, expected_lse, 0), 2 * FORWARD_F32)
    assert (np.isneginf(lse) == ~seen).all() and (np.asarray(out)[~seen] == 0).all()
    for what, x, y in zip(NAMES, pull((dout, dlse)), expected, strict=True):
        assert_near(x, y, 2 * GRADIENT_F32, what)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_has_the_error_of_its_roundings(form):
    arrays = draw(dtype=jnp.bfloat16, T=9)
    out, pull = jax.vjp(lambda *x: latent_attention(*x, form=form, mask=Causal()), *arrays)
    assert out.dtype == jnp.bfloat16
    dout = jnp.ones_like(out)
    expected, _, gradients = expected_of(arrays, {"mask": Causal()}, oracle.double(dout), None)
    assert_near(out, expected, 2 * FORWARD_BF16)
    for what, x, y in zip(NAMES, pull(dout), gradients, strict=True):
        assert x.dtype == jnp.bfloat16
        assert_near(x, y, 2 * GRADIENT_BF16, what)


def test_published_widths_run_in_every_implementation():
    """Keys of DeepSeek-V2 have a width of 192, values of 128, and the latents of 512."""
    arrays = draw(B=1, T=3, S=40, N=2, H=128, R=64, C=512, Hv=128)
    arrays[3:] = [x / 20 for x in arrays[3:]]
    expected = oracle.attention(*expand(arrays)).out
    for implementation in IMPLEMENTATIONS:
        for form in FORMS:
            out = latent_attention(*arrays, form=form, implementation=implementation)
            assert_near(out, expected, 2 * FORWARD_F32, f"{implementation}, {form}")


def test_dropout_drops_the_same_weights_in_both_forms():
    arrays = draw()
    options = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
    one, other = (latent_attention(*arrays, form=form, **options) for form in FORMS)
    assert_near(one, other, 2 * FORWARD_F32)
    assert np.abs(one - latent_attention(*arrays)).max() > 0.1


def test_bias_of_positions_and_width_without_rotation():
    arrays = draw(R=0)
    slopes = alibi_slopes(3)
    for form in FORMS:
        out = latent_attention(*arrays, bias=ALiBi(slopes), form=form)
        distance = np.abs(np.arange(6)[:, None] - np.arange(9))
        bias = -np.asarray(slopes, np.float64)[:, None, None] * distance
        assert_near(out, oracle.attention(*expand(arrays), bias=bias).out, 2 * FORWARD_F32)


def multiplications(form, *arrays):
    """Return the number of multiplications in the matrix products of a traced call."""
    jaxpr = jax.make_jaxpr(lambda *x: latent_attention(*x, form=form, implementation="xla"))(
        *arrays
    )

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                total += equation.outvars[0].aval.size * int(
                    np.prod([equation.invars[0].aval.shape[i] for i in contracted])
                )
            total += sum(count(sub) for sub in jaxprs_in_params(equation.params))
        return total

    return count(jaxpr.jaxpr)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 200), (8, 200), (20, 200), (200, 200), (3, 3)])
def test_default_form_needs_fewer_multiplications(T, S):
    arrays = draw(T=T, S=S, H=8, R=4, C=24, Hv=8)
    default, *both = (multiplications(form, *arrays) for form in (None, *FORMS))
    assert default == min(both)


def test_hidden_nan_in_a_latent_does_not_reach_other_queries():
    arrays = draw(T=9)
    arrays[1] = arrays[1].at[:, 5].set(jnp.nan)
    for form in FORMS:
        out = latent_attention(*arrays, mask=Causal(), form=form)
        assert np.isfinite(out[:, :5]).all() and np.isnan(out[:, 5:]).all()


WRONG_SHAPES = [
    ("query", (2, 6, 9), "must be [B, T, N, H + R]"),
    ("latent", (3, 9, 7), "must be (2, 9, 7)"),
    ("latent", (2, 7), "must be [B, S, C]"),
    ("rotated_key", (2, 9, 3), "must be (2, 9, 4)"),
    ("rotated_key", (2, 8, 4), "must be (2, 9, 4)"),
    ("key_kernel", (7, 3, 10), "the last axis must be from 1 to 9, the width of the query"),
    ("key_kernel", (7, 3, 0), "the last axis must be from 1 to 9, the width of the query"),
    ("key_kernel", (6, 3, 5), "must be (7, 3, 5)"),
    ("value_kernel", (7, 2, 6), "must be (7, 3, 6)"),
    ("value_kernel", (7, 3), "must be [C, N, Hv]"),
]


@pytest.mark.parametrize(("name", "shape", "rule"), WRONG_SHAPES)
def test_wrong_shape_is_named(name, shape, rule):
    arguments = dict(zip(NAMES, draw(), strict=True)) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {shape}: {rule}")):
        latent_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "naive"}, "form is 'naive': must be one of 'expanded', 'absorbed', or None"),
        ({"query": np.zeros((2, 6, 3, 9), np.int32)}, "query is int32: must be one of bfloat16"),
        ({"latent": np.zeros((2, 9, 7), np.float16)}, "latent is float16: must be float32, like"),
        ({"softcap": -1.0}, "softcap is -1.0: "),
    ],
)
def test_wrong_value_is_named(change, message):
    arguments = dict(zip(NAMES, draw(), strict=True)) | change
    with pytest.raises(ValueError, match=re.escape(message)):
        latent_attention(**arguments)


@pytest.mark.parametrize("name", ["key_scale", "block_table", "windows"])
def test_option_that_is_not_supported_is_named(name):
    with pytest.raises(TypeError, match=rf"latent_attention\(\) has no argument '{name}'"):
        latent_attention(*draw(), **{name: None})
