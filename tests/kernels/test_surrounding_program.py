"""Programs around the kernels: no host waits, sorts or copies."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.masks import Causal, Segments, Window
from transformer_jax.kernels import Target, using

SHAPE = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
KERNEL = "mpmd_map"  # the primitive of Mosaic GPU kernels, whose contents are ignored


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
        fresh = lambda *x: function(*x)  # noqa: E731 - avoids cached traces of another target
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
def test_attention_call_launches_single_kernel():
    assert steps_of(attend, *[SHAPE] * 3)[KERNEL] == 1
    assert steps_of(gradients, *[SHAPE] * 3)[KERNEL] == 3


@pytest.mark.slow_except("attend-known", "gradients-known")
@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("function", [attend, gradients])
def test_kernels_need_no_host_synchronization_or_sorting(function, known):
    """A loop with a condition on an array makes the host wait; a sort takes a dozen kernels."""
    ids = [] if known else [jax.ShapeDtypeStruct((2, 512), jnp.int32)]
    found = steps_of(function, *[SHAPE] * 3, *ids)
    assert found[KERNEL] == (1 if function is attend else 3)
    assert not {"while", "cond", "sort"} & found.keys(), found
