"""The single-pass backward kernel of Hopper in the interpreter, against NumPy in float64.

The interpreter replaces the instruction that adds to device memory by a read, a sum and a write, in
a single program. tests/kernels/test_attached.py runs the instruction itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import draw as draw_arrays
from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    InInterpreter,
    assert_near,
    causal,
    draw,
    lists_of,
    needs_interpreter,
    oracle,
    prefix_or_causal,
    program,
    seen_by,
    window_in_document,
)
from tests.support.plain_kernels import Plain
from tests.support.tolerances import GRADIENT_F32
from transformer_jax.attention import api as attention
from transformer_jax.attention.api import dot_product_attention, explain_attention
from transformer_jax.attention.biases import ALiBi
from transformer_jax.kernels import Target, hopper, using
from transformer_jax.kernels.contract import Blocks
from transformer_jax.kernels.hopper.backward_single_pass import dq_shares, dq_slot, swizzle

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_jax_11 = pytest.mark.skipif(not hopper.HAS_JAX_11, reason="jax 0.11")


def run(case, blocks=None):
    """Return (results, expected results): dq, dk, dv, and the slopes' gradient by key."""
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    blocks = blocks or hopper.blocks("single_pass", case.H, case.Hv)
    lists = lists_of(seen_by(case, operands).swapaxes(2, 3), blocks.k, blocks.q)
    kernel = jax.jit(functools.partial(hopper.backward_single_pass, case.problem, blocks=blocks))
    dq, dk, dv, *slopes = kernel(operands, lists, saved=saved._replace(do=do))
    results = dict(dq=dq, dk=dk, dv=dv) | dict(zip(["slopes"], slopes, strict=False))
    positions = np.asarray(operands.q_vectors[0]), np.asarray(operands.k_vectors[0])
    far = np.abs(positions[0][:, None, :, None] - positions[1][:, None, None])
    return results, expected | {"slopes": -(expected["ds"] * far).sum(axis=2)}


@program
def first_hundred(q, k):
    return (k[0] >= 0) & (k[0] < 100) & (q[0] > -1000)


CASES = {
    "causal, grouped": Case(N=4, K=2),
    "a tile of keys that no query sees, grouped": Case(
        T=67, N=4, K=2, H=32, Hv=48, visible=first_hundred
    ),
    "window in documents, three columns of tiles": Case(
        B=2, T=263, H=96, Hv=32, visible=window_in_document, sinks=True
    ),
    "no mask, float16, narrow": Case(
        T=128, S=256, H=32, Hv=32, visible=None, scale=-0.1, dtype="float16"
    ),
    "prefix, cap and dense bias": Case(
        H=128, Hv=128, visible=prefix_or_causal, softcap=2.5, scale=0.09,
        bias=(1, 2, 167, 211), bias_dtype="bfloat16",
    ),
    "slopes, dropout and key bias": Case(
        N=4, K=2, slopes=True, dropout_rate=0.3, bias=(1, 1, 1, 211), sinks=True
    ),
    "widths of 80 and 112": Case(H=80, Hv=112, T=128, S=131, N=1, scale=0.11),
    "widths of 112 and 80": Case(H=112, Hv=80, softcap=2.5, scale=0.1),
    "slopes after a cap, wide keys": Case(H=192, slopes=True, softcap=2.5, scale=0.07),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except(
    "a tile of keys that no query sees, grouped",
    "no mask, float16, narrow",
    "slopes, dropout and key bias",
)
@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_match_dense_reference(case):
    results, expected = run(case)
    assert ("slopes" in results) == case.slopes and {"dq", "dk", "dv"} <= results.keys()
    for name, value in results.items():
        assert_near(value, expected[name], EXACT if name == "slopes" else NEAR, name)
    assert {results[name].dtype for name in ("dq", "dk", "dv")} == {jnp.dtype(case.dtype)}


@pytest.mark.long
@needs_interpreter
@pytest.mark.parametrize("blocks", [Blocks(128, 128, 2), Blocks(64, 128, 3)], ids=str)
def test_other_tile_sizes_match_reference(blocks):
    results, expected = run(Case(visible=causal), blocks)
    for name, value in results.items():
        assert_near(value, expected[name], NEAR, name)


@pytest.mark.slow
@needs_jax_11
@pytest.mark.parametrize("q", [64, 128])
@pytest.mark.parametrize("H", hopper.HEAD_DIMS)
def test_two_warpgroups_cover_dq_tile_exactly_once(H, q):
    blocks, times = Blocks(q, 128), np.zeros((q, H), int)
    side = swizzle(blocks, H) // 2
    for share in dq_shares(blocks, H):
        assert share.column % side == 0 == share.columns % side and share.columns > 0
        tile = dq_slot(share, H).transforms[0].tiling[1]  # dq consists of such tiles
        assert share.column % tile == share.columns % tile == H % tile == 0 and tile >= 8
        columns = slice(share.column, share.column + share.columns)
        times[share.row : share.row + share.rows, columns] += 1
    assert (times == 1).all()


# Selection and rejection


def structs(H=64, Hv=64, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct((1, 128, 2, h), dtype) for h in (H, H, Hv)]


@pytest.mark.slow
@needs_jax_11
def test_excessive_head_dims_are_rejected_with_reason():
    with using(Target("hopper")):
        assert explain_attention(*structs(128, 128))["pallas_unordered"] is None
        reasons = explain_attention(*structs(192, 128))
        assert reasons["pallas"] is None
        assert reasons["pallas_unordered"] == (
            "hopper: H + Hv is 192 + 128: must be at most 256 in the single-pass backward"
        )
        inputs = [jnp.zeros(x.shape, x.dtype) for x in structs(192, 128)]
        with pytest.raises(NotImplementedError, match=r"pallas_unordered: hopper: .* 192 \+ 128"):
            dot_product_attention(*inputs, implementation="pallas_unordered")


def test_jax_without_tma_reduction_is_rejected_with_reason(monkeypatch):
    monkeypatch.setattr(hopper, "HAS_JAX_11", False)
    with using(Target("hopper")):
        reasons = explain_attention(*structs())
    assert "needs jax 0.11" in str(reasons["pallas_unordered"]) and reasons["pallas"] is None


def test_tpu_rejects_unordered_reduction_with_reason():
    with using(Target("tpu")):
        reasons = explain_attention(*structs())
    assert reasons["pallas"] is None
    assert "tpu: 'pallas_unordered' needs a Hopper GPU" in str(reasons["pallas_unordered"])


@pytest.mark.slow
def test_default_selects_pallas_only_where_measured_faster(monkeypatch):
    inputs = structs()
    queries = inputs[0].shape[1]
    for backend, fewest, taken in (
        ("hopper", queries, True),
        ("hopper", queries + 1, False),  # few queries were not measured
        ("ampere", queries, False),  # the same chip with other kernels
    ):
        monkeypatch.setattr(attention, "FASTEST", {(backend, "a chip"): fewest})
        with using(Target("hopper", chip="a chip")):
            assert (explain_attention(*inputs).chosen == "pallas") == taken


# Around the kernel


@pytest.mark.slow
@pytest.mark.long_except("vmap")
@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
def test_dense_backend_gradients_match_pallas(mapped):
    """Includes slopes, whose rows are by key, not by query."""
    arrays = draw_arrays(3)
    inputs = arrays["query"], arrays["key"], arrays["value"], jnp.linspace(0.1, 0.5, 4)

    def gradients(name):
        def loss(query, key, value, slopes):
            bias = dict(bias=ALiBi(slopes), sinks=jnp.ones(4))
            out, lse = dot_product_attention(
                query, key, value, **bias, return_lse=True, implementation=name
            )
            return (out * arrays["out_cotangent"]).sum() + (lse * arrays["lse_cotangent"]).sum()

        slope = jax.grad(loss, (0, 1, 2, 3))
        if not mapped:
            return jax.jit(slope)(*inputs)
        queries = jnp.stack([inputs[0], -inputs[0]])
        return jax.jit(jax.vmap(slope, (0, None, None, None)))(queries, *inputs[1:])

    with using(Plain()):
        got, expected = gradients("pallas_unordered"), gradients("pallas")
    for name, x, y in zip(("query", "key", "value", "slopes"), got, expected, strict=True):
        assert float(jnp.abs(y).max()) > 0, name
        assert_near(x, np.asarray(y), GRADIENT_F32, name)


@pytest.mark.long
class TestSinglePass(InInterpreter):
    implementation = "pallas_unordered"
