"""Tests of mask plans of fused kernels: one plan per model, shared by all layers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_transformer import MODEL_F32, shapes
from tests.support import model_oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.attention import fused
from transformer_jax.attention.api import dot_product_attention, plan_mask
from transformer_jax.attention.masks import Causal, Segments
from transformer_jax.config import ModelConfig
from transformer_jax.kernels import Target, cpu, using
from transformer_jax.kernels.contract import Blocks
from transformer_jax.models.factory import build
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENS = 71  # more than a decode kernel supports
IDS = np.stack([np.arange(TOKENS) // 19, np.arange(TOKENS) // 7]).astype(np.int32)
SMALL = ModelConfig(
    vocab_size=31, d_model=24, num_heads=3, num_layers=3, head_dim=8, max_len=TOKENS,
    positions="rope", implementation="pallas",
)  # fmt: skip
KINDS = ("forward", "single_pass_rows", "bias")
TPU = Target("tpu", True, blocks=tuple((kind, Blocks(16, 24)) for kind in KINDS))
STACKS = {
    "loop": dict(), "window pattern": dict(window=(5, None, 11)), "loop, remat": dict(remat="full"),
    "scan": dict(scan_layers=True), "scan, remat": dict(scan_layers=True, remat="full"),
    "scan, remat of attention": dict(scan_layers=True, remat="attention"),
}  # fmt: skip


def drawn(config, rng):
    tokens = rng.integers(0, config.vocab_size, (2, TOKENS), dtype=np.int32)
    looped = dataclasses.replace(config, scan_layers=False, implementation=None)
    return tokens, model_oracle.randomised(shapes(looped), rng)


def stacked(config, params):
    return stack_layers(params) if config.scan_layers else params


@pytest.mark.slow
@pytest.mark.long_except("scan", "scan, remat", "scan, remat of attention")
@pytest.mark.parametrize("stack", STACKS)
def test_packed_documents_match_reference_with_shared_plan(stack, rng, monkeypatch):
    config = dataclasses.replace(SMALL, **STACKS[stack])
    tokens, params = drawn(config, rng)
    made = []
    make = fused.mask_operands
    monkeypatch.setattr(fused, "mask_operands", lambda call: made.append(1) or make(call))
    apply = jax.jit(
        lambda params, ids: build(config).apply({"params": params}, tokens, segments=ids)
    )
    with using(TPU):
        got, _ = apply(stacked(config, params), IDS)
    assert len(made) == len(config.windows)
    want = model_oracle.forward(config, params, tokens, segments=IDS)
    assert_near(got, want, MODEL_F32)


@pytest.mark.slow
@pytest.mark.long_except("scan")
@pytest.mark.parametrize("stack", ["window pattern", "loop, remat", "scan, remat", "scan"])
def test_gradients_with_shared_plans_match_plain_attention(stack, rng):
    config = dataclasses.replace(SMALL, **STACKS[stack])
    tokens, params = drawn(config, rng)
    weights = rng.standard_normal((2, TOKENS, config.vocab_size)).astype(np.float32)

    def loss(name, params, ids):
        model = build(dataclasses.replace(config, implementation=name))
        logits = model.apply({"params": params}, tokens, segments=ids)[0]
        return (logits * weights).sum()

    with using(TPU):
        found = jax.jit(jax.grad(partial(loss, "pallas")))(stacked(config, params), IDS)
    plain = jax.jit(jax.grad(partial(loss, "xla")))(stacked(config, params), IDS)
    for got, want in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
        assert_near(got, want, 4 * GRADIENT_F32)  # both sides have errors, through three layers


@pytest.mark.slow
def test_plan_is_recomputed_for_other_tiles_or_length(rng):
    """A call only uses a plan that fits."""
    q, k, v = (rng.standard_normal((2, TOKENS, 1, 8)).astype(np.float32) for _ in range(3))
    mask = Causal() & Segments(IDS)
    other = Target("tpu", True, blocks=tuple((kind, Blocks(32, 16)) for kind in KINDS))
    with using(other):
        tiles = plan_mask(q, k, v, mask=mask, implementation="pallas")
    with using(TPU):
        short = plan_mask(q[:, :30], k[:, :30], v[:, :30], mask=mask, implementation="pallas")
        right = plan_mask(q, k, v, mask=mask, implementation="pallas")
        plans = [x.shared.lists["forward"].order.shape for x in (tiles, short, right)]
        assert len({*plans}) == 3
        found = [
            dot_product_attention(q, k, v, mask=x, implementation="pallas")
            for x in (tiles, short, right)
        ]
    at = np.arange(TOKENS)
    sees = (at <= at[:, None]) & (IDS[:, None] == IDS[:, :, None])
    scores = np.einsum("BTNH,BSNH->BTS", *(x.astype(np.float64) for x in (q, k))) / 8**0.5
    scores = np.where(sees, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("BTS,BSNH->BTNH", p / p.sum(-1, keepdims=True), v.astype(np.float64))
    for out in found:
        assert_near(out, want, 2 * FORWARD_F32)


@pytest.mark.slow
def test_plan_without_positions_is_not_reused_with_positions(rng):
    q, k, v = (rng.standard_normal((2, TOKENS, 1, 8)).astype(np.float32) for _ in range(3))
    mask, later = Causal() & Segments(IDS), np.arange(TOKENS, dtype=np.int32)[::-1].copy()
    attend = partial(dot_product_attention, q, k, v, q_positions=later, k_positions=later)
    with using(TPU):
        planned = plan_mask(q, k, v, mask=mask, implementation="pallas")
        found = attend(mask=planned, implementation="pallas")
    plain = attend(mask=mask, implementation="xla")
    assert_near(found, plain, 2 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("rows, length", [(0, 8), (2, 0)])
def test_empty_batch_has_no_plan(rows, length, rng):
    reason = cpu.library()
    if isinstance(reason, str):
        pytest.skip(reason)
    config = dataclasses.replace(SMALL, implementation="native")
    _, params = drawn(config, rng)
    nothing = np.zeros((rows, length), np.int32)
    logits, _ = build(config).apply({"params": params}, nothing, segments=nothing)
    assert logits.shape == (rows, length, config.vocab_size)


CHIPS = {
    "tpu": Target("tpu", chip="TPU v5e"),
    "hopper": Target("hopper", chip="NVIDIA H200"),
}
OF_EACH_CALL = {
    *("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "slice", "copy", "pad"),
    *("ne", "eq", "or"),  # fully masked rows
}
"""Integer and boolean operations of a call that are not part of planning."""


def integer_steps(jaxpr, times=1):
    """Count the operations with integer or boolean results outside of kernels."""
    found = Counter()
    for step in jaxpr.eqns:
        name = step.primitive.name
        if name in ("mpmd_map", "pallas_call"):
            continue
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(step.params)]
        inner = [x for x in inner if hasattr(x, "eqns")]
        for x in inner:
            found += integer_steps(x, times * (step.params["length"] if name == "scan" else 1))
        made = [x.aval for x in step.outvars]
        if not inner and all(
            x.ndim and jnp.issubdtype(x.dtype, jnp.integer) | (x.dtype == bool) for x in made
        ):
            found[name] += times
    return found


@pytest.mark.slow
@pytest.mark.long_except("loop, remat-tpu", "scan, remat of attention-hopper")
@pytest.mark.parametrize("chip", ["tpu", "hopper"])
@pytest.mark.parametrize("stack", STACKS)
def test_mask_planning_cost_does_not_grow_with_layers(stack, chip):
    """Count operations of forward and backward pass before XLA's optimisations."""
    sizes = dict(
        d_model=128, num_heads=2, head_dim=64, max_len=256, dtype="bfloat16", positions=None
    )
    config = dataclasses.replace(SMALL, **sizes, **STACKS[stack])

    def steps(layers):
        deep = dataclasses.replace(config, num_layers=layers)

        def loss(params, tokens, ids):
            return build(deep).apply({"params": params}, tokens, segments=ids)[0].sum()

        params = shapes(dataclasses.replace(deep, implementation=None))
        tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
        with using(CHIPS[chip]):
            program = jax.make_jaxpr(jax.value_and_grad(loss))(params, tokens, tokens)
        assert any(name in str(program) for name in ("mpmd_map", "pallas_call"))
        return integer_steps(program.jaxpr)

    few, more = (steps(len(config.windows) * n) for n in (1, 2))
    assert few["iota"] + few["reduce_min"] > 10
    assert set(more - few) <= OF_EACH_CALL
