"""A caller's program has nothing around the kernels that waits, sorts or copies."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.masks import Causal, Segments, Window
from transformer_jax.kernels import Target, using

SHAPE = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
KERNEL = "mpmd_map"  # how Mosaic GPU's kernels are called in a jaxpr; what is in them is theirs


def steps_of(function, *arguments):
    """Count the primitives of a program, without those inside kernels."""
    found = Counter()

    def read(jaxpr):
        for step in jaxpr.eqns:
            found[step.primitive.name] += 1
            if step.primitive.name != KERNEL:
                for x in jax.tree.leaves(step.params):
                    inner = getattr(x, "jaxpr", x)
                    if hasattr(inner, "eqns"):
                        read(inner)

    with using(Target("hopper", chip="NVIDIA H200")):
        fresh = lambda *x: function(*x)  # noqa: E731 - a trace of another target would be found
        read(jax.make_jaxpr(fresh)(*arguments).jaxpr)
    return found


def attend(query, key, value, ids=None, name="pallas"):
    mask = Causal() & Window(200)
    mask = mask if ids is None else mask & Segments(ids)
    return dot_product_attention(query, key, value, mask=mask, implementation=name)


def gradients(*arguments):
    out, pull = jax.vjp(attend, *arguments)
    return pull(out)


@pytest.mark.slow
def test_a_call_is_one_kernel():
    assert steps_of(attend, *[SHAPE] * 3)[KERNEL] == 1
    assert steps_of(gradients, *[SHAPE] * 3)[KERNEL] == 3


@pytest.mark.slow_except("attend-known", "gradients-known")
@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("function", [attend, gradients])
def test_nothing_waits_and_nothing_is_sorted_around_the_kernels(function, known):
    """A loop that asks an array whether to go on makes the host wait; a sort is a dozen kernels."""
    ids = [] if known else [jax.ShapeDtypeStruct((2, 512), jnp.int32)]
    found = steps_of(function, *[SHAPE] * 3, *ids)
    assert found[KERNEL] == (1 if function is attend else 3)
    assert not {"while", "cond", "sort"} & found.keys(), found
