"""Where the kernels run, with which tiles, and what they refuse by name."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tests.support.attention_suite import draw
from tests.support.plain_kernels import Plain
from transformer_jax.attention.api import dot_product_attention, explain_attention
from transformer_jax.attention.biases import ALiBi, RelativeBias
from transformer_jax.attention.masks import (
    Dense,
    Predicate,
)
from transformer_jax.kernels import Target, target, using
from transformer_jax.kernels.chips import blocks
from transformer_jax.kernels.contract import Blocks


def test_without_an_accelerator_the_kernels_say_what_they_need():
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    assert explain_attention(*inputs)["pallas"] == str(target())
    with pytest.raises(NotImplementedError, match="pallas: needs a TPU or an NVIDIA Hopper GPU"):
        dot_product_attention(*inputs, implementation="pallas")


def test_a_target_holds_inside_its_context_only():
    with using(Target("tpu", True)):
        assert target() == Target("tpu", True)
    assert isinstance(target(), str)


PARITY = jnp.arange(17) % 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(mask=Predicate(lambda q, k: PARITY[k] <= q)), "reads other arrays"),
        (dict(scale=jnp.float32(0.5)), "scale that is an array"),
        (
            dict(bias=RelativeBias(jnp.ones((8, 4)), max_distance=16, bidirectional=True)),
            "Relative",
        ),
    ],
    ids=["predicate", "scale", "bias"],
)
def test_what_no_kernel_takes_is_refused_by_name(options, reason):
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    with using(Plain()):
        assert reason in str(explain_attention(*inputs, **options)["pallas"])
        with pytest.raises(NotImplementedError, match=reason):
            dot_product_attention(*inputs, implementation="pallas", **options)
        assert explain_attention(*inputs, bias=ALiBi(jnp.ones(4)))["pallas"] is None


def test_short_sequences_take_shorter_tiles_and_keep_the_rest():
    tiles = Blocks(512, 1024, 3, slack=8.0)
    where = Target("tpu", blocks=(("forward", tiles),))
    assert blocks(where, "forward", 64, 64, 2, 2000, 2000) == tiles
    assert blocks(where, "forward", 64, 64, 2, 200, 1000) == replace(tiles, q=256)


def test_lists_that_do_not_fit_are_refused_beforehand():
    shape = jax.ShapeDtypeStruct((1, 2**18, 1, 64), jnp.float32)
    with using(Target("tpu")):
        assert "lists of 1 x 512 x 512 tiles" in str(
            explain_attention(shape, shape, shape)["pallas"]
        )
        half = jax.ShapeDtypeStruct((1, 2**17, 1, 64), jnp.float32)
        assert explain_attention(half, half, half)["pallas"] is None
        heads = jax.ShapeDtypeStruct((1, 2**15, 64, 64), jnp.float32)
        mask = Dense(jax.ShapeDtypeStruct((1, 64, 2**15, 2**15), jnp.bool_))
        reason = explain_attention(heads, heads, heads, mask=mask)["pallas"]
        assert "lists of 64 x 64 x 64 tiles" in str(reason)


def test_a_target_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="backend is 'gpu': must be 'tpu', 'hopper' or 'cpu'"):
        _ = Target("gpu").module
