"""The forward kernel for datacentre Blackwell, in the interpreter, against NumPy in float64."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.hopper_kernels import (
    EXACT,
    INTERPRETS,
    NEAR,
    Case,
    InInterpreter,
    assert_near,
    draw,
    lists_of,
    needs_interpreter,
    oracle,
    prefix_or_causal,
    run_forward,
    seen_by,
    window_in_document,
)
from transformer_jax import Causal, dot_product_attention
from transformer_jax.attention.api import explain_attention
from transformer_jax.kernels import Target, ampere, blackwell, using
from transformer_jax.kernels.blackwell.backward import CONSUMERS
from transformer_jax.kernels.blackwell.backward import REGISTERS as BACKWARD_REGISTERS
from transformer_jax.kernels.blackwell.forward import REGISTERS as FORWARD_REGISTERS
from transformer_jax.kernels.blackwell.tiles import OTHERS
from transformer_jax.kernels.chips import BLACKWELL_SHARED_MEMORY, TENSOR_MEMORY_COLUMNS
from transformer_jax.kernels.contract import Blocks, Problem

pytestmark = pytest.mark.usefixtures("quick_compilation")
needs_tensor_memory = pytest.mark.skipif(
    not (blackwell.HAS_TENSOR_MEMORY and ampere.HAS_MMA), reason="jax 0.10 has no mma in Pallas"
)


def by_one_program(problem, operands, lists, blocks):
    """Run all items one after the other, so that each finds what the last one left."""
    problem = dataclasses.replace(problem, processors=1)
    return blackwell.marking_forward(problem, operands, lists, blocks)


def causal_but_for_some(q, k):
    """Queries 256 to 511 see nothing: for a program that is two tiles of queries without a key."""
    return (k[0] >= 0) & (q[0] >= k[0]) & ~((q[0] >= 256) & (q[0] < 512))


def nothing(q, k):
    return (k[0] >= 0) & (q[0] < -1000)


CASES = {
    "no query sees a key": Case(T=256, S=256, N=1, H=32, Hv=32, visible=nothing),
    "causal, grouped": Case(N=2, K=1),
    "queries without a key between others": Case(
        T=700, S=700, N=1, H=32, Hv=32, visible=causal_but_for_some, sinks=True
    ),
    "window in documents, sinks": Case(
        B=2, T=423, S=500, H=32, Hv=96, visible=window_in_document, sinks=True
    ),
    "no mask, float16, negative scale": Case(
        T=256, S=512, visible=None, scale=-0.1, dtype="float16"
    ),
    "prefix, cap and dense bias": Case(
        visible=prefix_or_causal, softcap=2.5, bias=(1, 2, 167, 211), bias_dtype="bfloat16"
    ),
    "slopes, dropout and key bias": Case(
        slopes=True, dropout_rate=0.3, bias=(1, 1, 1, 211), sinks=True
    ),
    "the widest of two consumers": Case(N=4, K=2, H=128, Hv=128, T=256, S=300, scale=0.09),
    "wide heads, one consumer": Case(H=192, Hv=256, T=128, S=131, scale=0.07),
}


@pytest.mark.slow_cases("no mask", "window", "the widest", "wide heads", "prefix")
@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_row_sums_match_the_dense_oracle(case):
    operands, do = draw(case)
    expected, _ = oracle(case, operands, do)
    plan = dataclasses.replace(blackwell.blocks("forward", case.H, case.Hv), slack=0.0)
    for name, value in run_forward(case, operands, plan, by_one_program).items():
        of_rows = name != "out" and case.softcap is None
        assert_near(value, expected[name], EXACT if of_rows else NEAR, name)


@needs_interpreter
def test_a_maximum_that_rises_rescales_what_was_summed():
    """Scores rise from tile to tile, by less than the slack and by more."""
    case = Case(T=256, S=512, N=1, H=32, Hv=32, visible=None, scale=1.0)
    operands, do = draw(case)
    rise = jnp.asarray([0.0, 20.0, 45.0, 48.0]).repeat(128)[None, :, None, None]
    key = operands.key.at[..., :1].set(rise.astype(operands.key.dtype))
    operands = operands._replace(key=key, query=operands.query.at[..., 0].set(1))
    expected, _ = oracle(case, operands, do)
    for slack in (0.0, 8.0):
        got = run_forward(case, operands, Blocks(256, 128, 2, slack), by_one_program)
        assert_near(got["out"], expected["out"], NEAR, "out")
        lse, wanted = (x["row_max"] + x["log_sum"] for x in (got, expected))
        assert_near(lse, wanted, EXACT, "lse")
        exact = np.abs(got["row_max"] - expected["row_max"]).max() < 1e-4
        assert exact == (slack == 0)


@pytest.mark.parametrize("stages", [0, 1])
def test_fewer_than_two_stages_are_refused(stages):
    case = Case(T=256, S=256)
    operands, _ = draw(case)
    lists = lists_of(seen_by(case, operands), 256, 128)
    with pytest.raises(ValueError, match=f"stages is {stages}: the forward kernel needs at least"):
        blackwell.marking_forward(Problem(1.0), operands, lists, Blocks(256, 128, stages))


@pytest.mark.parametrize("rows", [64, 384])
def test_tiles_of_other_rows_than_consumers_hold_are_refused(rows):
    case = Case(T=384, S=256)
    operands, _ = draw(case)
    lists = lists_of(seen_by(case, operands), rows, 128)
    with pytest.raises(ValueError, match=f"q is {rows}: .* must be 128 or 256"):
        blackwell.marking_forward(Problem(1.0), operands, lists, Blocks(rows, 128))


def test_tiles_of_every_head_dim_fit_tensor_memory_and_shared_memory():
    for H in blackwell.HEAD_DIMS:
        for Hv in blackwell.HEAD_DIMS:
            plan = blackwell.blocks("forward", H, Hv)
            assert plan.q // 128 * (plan.k + Hv) <= TENSOR_MEMORY_COLUMNS
            numbers = plan.q * H + plan.stages * plan.k * (H + Hv)
            assert 2 * numbers + 1024 <= BLACKWELL_SHARED_MEMORY


@pytest.mark.parametrize(
    ("consumers", "registers"),
    [*FORWARD_REGISTERS.items(), (CONSUMERS, BACKWARD_REGISTERS)],
    ids=["forward, one", "forward, two", "backward"],
)
def test_warpgroups_hold_no_more_registers_than_a_program_is_launched_with(consumers, registers):
    """A warp that asks for more waits for ever (PTX ISA, setmaxnreg)."""
    warpgroups, (most, least) = consumers + OTHERS, registers
    launched = min(255, 65536 // (128 * warpgroups)) // 8 * 8  # of a thread
    assert least <= min(launched, most)
    assert consumers * most + OTHERS * least <= warpgroups * launched


def test_what_cannot_be_done_is_named(monkeypatch):
    def reason(dtype="bfloat16", H=64, **fields):
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, H), dtype)] * 3
        return blackwell.refuse(Problem(scale=1.0, **fields), *shapes)

    monkeypatch.setattr(blackwell, "HAS_TENSOR_MEMORY", True)
    monkeypatch.setattr(ampere, "HAS_MMA", True)
    assert reason() is None and reason("float16", 192) is None
    assert "the Blackwell kernel multiplies bfloat16 or float16, not float32" in reason("float32")
    assert "80" in reason(H=80)
    assert "needs a Hopper GPU" in reason(nondeterministic=True)
    monkeypatch.setattr(blackwell, "HAS_TENSOR_MEMORY", False)
    assert "lacks mma or tcgen05" in reason()


@needs_tensor_memory
def test_products_are_of_the_fifth_generation_and_are_asked_for_by_name():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    attend = partial(dot_product_attention, mask=Causal(), implementation="pallas")
    with using(Target("blackwell")):
        traced = str(jax.make_jaxpr(attend)(x, x, x))
        said = explain_attention(x, x, x, mask=Causal())
    assert "kernel_name='attention_forward'" in traced and "tcgen05_mma" in traced
    assert said["pallas"] is None and said.chosen != "pallas"


@needs_interpreter
@pytest.mark.parametrize("seen", [False, True], ids=["hidden", "seen"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(seen):
    case = Case(T=256, S=256, N=1, H=32, Hv=32, softcap=20.0)
    operands, do = draw(case)
    expected, _ = oracle(case, operands, do)
    plan = blackwell.blocks("forward", 32, 32)
    lost = np.arange(case.T) >= 200
    bad = operands._replace(
        key=operands.key.at[:, 200, :, 0].set(jnp.inf) if seen else operands.key,
        value=operands.value if seen else operands.value.at[:, 200].set(jnp.nan),
    )
    forward = jax.jit(partial(blackwell.forward, case.problem, blocks=plan))
    out, _, log_sum, marks = forward(bad, lists_of(seen_by(case, bad), plan.q, plan.k))
    assert bool(marks.all())  # of the head, for the backward kernels
    found, wanted = (np.asarray(x, np.float64)[0, :, 0] for x in (out, expected["out"]))
    assert (np.isnan(found) == lost[:, None]).all()
    assert (np.isnan(np.asarray(log_sum))[0, 0] == lost).all()
    assert_near(found[~lost], wanted[~lost], NEAR, "out")


class TestBlackwell(InInterpreter):
    """Slow: the loop that keeps the rule for NaN makes three kernels of each."""

    implementation = "pallas"
    target = Target("blackwell", plgpu.InterpretGPUParams() if INTERPRETS is None else False)
    every_time = frozenset()
