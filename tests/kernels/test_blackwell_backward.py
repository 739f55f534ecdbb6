"""The backward kernels of datacentre Blackwell, in the interpreter, against NumPy in float64."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle as float64
from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    assert_near,
    draw,
    lists_of,
    needs_interpreter,
    oracle,
    prefix_or_causal,
    run_gradients,
    window_in_document,
)
from transformer_jax import Causal, Dense, dot_product_attention
from transformer_jax.kernels import Target, blackwell, using
from transformer_jax.kernels.blackwell import backward
from transformer_jax.kernels.chips import HOPPER_SHARED_MEMORY
from transformer_jax.kernels.contract import Blocks, Operands, Problem, Saved
from transformer_jax.kernels.hopper.forward import has_room
from transformer_jax.kernels.hopper.scores import COPIED

pytestmark = pytest.mark.usefixtures("quick_compilation")

TENSOR_MEMORY = 512  # columns of 4 bytes
SCRATCH = 3 * 1024  # bytes of shared memory for barriers, and for sums over columns
ALONE = SimpleNamespace(  # without the loop that runs them again
    blocks=blackwell.blocks,
    backward_dq=backward.backward_dq,
    backward_dkdv=backward.backward_dkdv,
)
traces = pytest.mark.skipif(
    blackwell.refuse(Problem(1.0), *[jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)] * 3)
    is not None,
    reason="jax 0.10 lacks what the kernels need of Pallas",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTwo(Case):
    """Describe a case on two multiprocessors: a program takes several items, one after another."""

    @property
    def problem(self):
        return dataclasses.replace(super().problem, processors=2)


def corner(q, k):  # keys stand at 0, queries 80 later
    return (k[0] >= 0) & (k[0] < 100) & (q[0] >= 80 + 150)


CASES = {
    "causal, grouped": OnTwo(N=4, K=2, H=32, Hv=32),
    "slopes, dropout and key bias": OnTwo(
        slopes=True, dropout_rate=0.3, bias=(1, 1, 1, 211), sinks=True
    ),
    "window in documents": OnTwo(B=2, T=263, H=32, Hv=96, visible=window_in_document, sinks=True),
    "no mask, float16, negative scale": OnTwo(
        T=128, S=256, N=1, visible=None, scale=-0.1, dtype="float16"
    ),
    "prefix, cap and dense bias": OnTwo(
        visible=prefix_or_causal, softcap=2.5, bias=(1, 2, 167, 211), bias_dtype="bfloat16"
    ),
    "slopes, cap and query bias": OnTwo(
        slopes=True, softcap=2.5, bias=(1, 1, 167, 1), H=96, Hv=64, N=1
    ),
    "all of tensor memory": OnTwo(T=307, S=389, N=1, H=128, Hv=128, scale=0.09),
    "tiles of 64": OnTwo(T=307, S=389, N=1, H=192, Hv=192, scale=0.07),
    "one tile of values": OnTwo(T=131, S=193, N=1, H=256, Hv=256, scale=0.06, slopes=True),
}


@pytest.mark.slow_cases("window", "no mask", "prefix", "slopes, cap", "all of", "tiles", "one tile")
@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_match_the_dense_oracle(case):
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_gradients(case, operands, saved._replace(do=do), module=ALONE)
    assert got.keys() == {"dq", "dk", "dv"} | ({"slope_rows"} if case.slopes else set())
    for name, value in got.items():
        assert np.abs(expected[name]).max() > 0.1, name
        exact = name == "slope_rows" and case.softcap is None  # sums of what is not rounded
        assert_near(value, expected[name], EXACT if exact else NEAR, name)


@needs_interpreter
def test_without_a_tile_a_gradient_is_zero_after_one_that_is_not():
    """Tensor memory then holds the sum of the item before."""
    case = OnTwo(T=263, S=343, N=2, K=2, H=32, Hv=32, visible=corner)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_gradients(case, operands, saved._replace(do=do), module=ALONE)
    for name, value in got.items():
        assert_near(value, expected[name], NEAR, name)
    for name, first, last in (("dq", 0, 128), ("dk", 128, 384), ("dv", 128, 384)):
        assert not np.asarray(got[name][:, first:last].astype(jnp.float32)).any(), name
        assert np.asarray(got[name].astype(jnp.float32)).any(), name


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("same_for_heads", [True, False])
def test_gradients_under_an_array_of_pairs_match_the_dense_oracle(same_for_heads):
    (B, T, S, N, K, H), rng = (1, 131, 157, 4, 2, 32), np.random.default_rng(7)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    query, key, value, do = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    pairs = rng.random((B, 1 if same_for_heads else N, T, S)) < 0.4

    def loss(*inputs):
        out = dot_product_attention(
            *inputs, mask=Dense(jnp.asarray(pairs)), implementation="pallas"
        )
        return (out * do).astype(jnp.float32).sum()

    interpret = OnTwo().problem.interpret
    with using(Target("blackwell", interpret, processors=2)):
        got = jax.grad(loss, (0, 1, 2))(query, key, value)
    wide = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key, value, do))
    expected = float64.attention_gradients(*wide, mask=pairs)
    for name, found, wanted in zip(("dq", "dk", "dv"), got, expected, strict=False):
        assert_near(found, wanted, NEAR, name)


@pytest.mark.parametrize("kind", ["dq", "dkdv"])
@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (Blocks(64, 64, 2), "holds 128 rows, and tiles of 64 or 128 columns, not 64 and 64"),
        (Blocks(256, 256, 2), "holds 128 rows, and tiles of 64 or 128 columns, not 256 and 256"),
        (Blocks(128, 128, 1), "stages is 1: the .* kernel needs at least 2"),
    ],
    ids=["too few rows", "too many", "one stage"],
)
def test_tiles_that_the_kernels_cannot_hold_are_refused(kind, blocks, said):
    x = jax.ShapeDtypeStruct((1, 256, 1, 64), "bfloat16")
    with pytest.raises(ValueError, match=said):
        getattr(ALONE, f"backward_{kind}")(Problem(1.0), Operands(x, x, x), None, blocks, None)


def test_tiles_of_every_head_dim_fit_tensor_memory_and_shared_memory():
    """A row of dslopes counts, and as many vectors of a mask as are copied beside a tile."""
    own, room = 0, HOPPER_SHARED_MEMORY - SCRATCH
    for H, Hv in itertools.product(blackwell.HEAD_DIMS, repeat=2):
        plan = blackwell.blocks("dq", H, Hv)
        slots, vectors = (plan.stages, COPIED) if has_room(H, Hv) else (1, 0)
        assert plan.k + plan.k + plan.k // 2 + H <= TENSOR_MEMORY
        tiles = 2 * (plan.q * (H + Hv) + plan.k * (plan.stages * H + slots * Hv))
        assert tiles + 4 * plan.stages * vectors * plan.k <= room, (H, Hv)
        if H + Hv > backward.WIDEST:
            continue
        own, plan = own + 1, blackwell.blocks("dkdv", H, Hv)
        assert plan.q + plan.q + H + Hv <= TENSOR_MEMORY
        tiles = 2 * (plan.k + plan.stages * plan.q) * (H + Hv)
        assert tiles + 4 * plan.stages * (COPIED + 2) * plan.q <= room, (H, Hv)
    assert own == 33  # of 36


def loss_of(**settings):
    def loss(query, key, value):
        out = dot_product_attention(query, key, value, implementation="pallas", **settings)
        return out.astype(jnp.float32).sum()

    return loss


@traces
@pytest.mark.parametrize("H", [64, 192, 256])
@pytest.mark.parametrize("kind", ["dq", "dkdv"])
def test_products_go_through_tensor_memory_but_for_dk_and_dv_of_the_widest_heads(kind, H):
    operands, do = draw(Case(T=128, S=128, N=1, H=H, Hv=H))
    rows = jnp.zeros((1, 1, 128))
    plan, ones = blackwell.blocks(kind, H, H), np.ones((1, 1, 128, 128), bool)
    lists = lists_of(ones, *((plan.k, plan.q) if kind == "dkdv" else (plan.q, plan.k)))
    kernel = partial(getattr(ALONE, f"backward_{kind}"), Problem(scale=0.1), blocks=plan)
    traced = jax.make_jaxpr(kernel)(operands, lists, saved=Saved(do, rows, rows, rows))
    by_tensor_memory = (kind, H) != ("dkdv", 256)
    assert bool(re.search(r"\btcgen05_mma\[", str(traced))) == by_tensor_memory
    assert bool(re.search(r"= mma\b", str(traced))) != by_tensor_memory


@traces
def test_the_kernels_trace_where_python_integers_have_64_bits():
    query, key = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))
    with jax.enable_x64(True), using(Target("blackwell")):
        shapes = jax.eval_shape(jax.grad(loss_of(mask=Causal()), (0, 1, 2)), query, key, key)
    assert {x.dtype for x in shapes} == {jnp.dtype("bfloat16")}
