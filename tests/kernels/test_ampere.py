"""The kernels for NVIDIA GPUs other than Hopper, in the interpreter, against NumPy in float64."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

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
    draw_few,
    needs_interpreter,
    oracle,
    prefix_or_causal,
    program,
    run_forward,
    run_gradients,
    window_in_document,
)
from tests.support.tolerances import largest_error
from transformer_jax import Causal, dot_product_attention
from transformer_jax.attention.api import explain_attention
from transformer_jax.kernels import Target, ampere, nvidia, using
from transformer_jax.kernels.chips import AMPERE_SHARED_MEMORY
from transformer_jax.kernels.contract import Blocks, Problem

pytestmark = pytest.mark.usefixtures("quick_compilation")


@program
def causal_without_a_key(q, k):
    return (k[0] >= 0) & (k[0] != 7) & (q[0] >= k[0])


ALONE = SimpleNamespace(  # without the loop that repeats them
    blocks=ampere.blocks,
    backward_dq=ampere.backward_dq,
    backward_dkdv=ampere.backward_dkdv,
    backward_bias=ampere.backward_bias,
)
CASES = {
    "causal, one head": Case(T=70, S=100, N=1),
    "causal, grouped": Case(N=4, K=2),
    "window in documents, sinks": Case(
        B=2, T=263, H=32, Hv=96, visible=window_in_document, sinks=True
    ),
    "no mask, float16, negative scale": Case(
        T=128, S=256, visible=None, scale=-0.1, dtype="float16"
    ),
    "prefix, cap and dense bias": Case(
        visible=prefix_or_causal, softcap=2.5, bias=(1, 2, 167, 211), bias_dtype="bfloat16"
    ),
    "slopes, dropout and key bias": Case(
        slopes=True, dropout_rate=0.3, bias=(1, 1, 1, 211), sinks=True
    ),
    "dk and dv of wide heads apart": Case(H=192, Hv=192, T=128, S=131, scale=0.07),
    "the widest": Case(H=256, Hv=256, T=64, S=70, scale=0.06),
}


@pytest.mark.slow
@pytest.mark.long_except("causal, one head")
@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_gradients_match_dense_reference(case):
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    plan = ampere.blocks("forward", case.H, case.Hv)
    got = run_forward(case, operands, plan, ampere.forward)
    got |= run_gradients(case, operands, saved._replace(do=do), module=ALONE)
    assert {"out", "row_max", "log_sum", "dq", "dk", "dv"} <= got.keys()
    assert ("slope_rows" in got) == case.slopes
    for name, value in got.items():
        of_rows = name in ("row_max", "log_sum") and case.softcap is None
        assert_near(value, expected[name], EXACT if of_rows else NEAR, name)


@pytest.mark.slow
@pytest.mark.long_except("(1, 1, 90, 1)")
@needs_interpreter
@pytest.mark.parametrize("shape", [(1, 1, 90, 1), (1, 2, 90, 131), (1, 1, 1, 131)], ids=str)
def test_bias_gradient_has_shape_of_bias_and_matches_oracle(shape):
    case = Case(T=90, S=131, bias=shape)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_gradients(case, operands, saved._replace(do=do), ("bias",), ALONE)["bias"]
    lacking = tuple(axis for axis in range(4) if shape[axis] == 1)
    assert got.shape == operands.bias.shape and got.dtype == jnp.float32
    wanted, terms = (
        x.sum(lacking, keepdims=True) for x in (expected["ds"], np.abs(expected["ds"]))
    )
    assert largest_error(got, wanted) <= EXACT * terms.max()  # the terms cancel


@pytest.mark.slow
@needs_interpreter
def test_single_stage_pipeline_matches_reference():
    case = Case(T=64, S=128, N=1, H=32, Hv=32)
    operands, do = draw(case)
    expected, _ = oracle(case, operands, do)
    got = run_forward(case, operands, Blocks(64, 32, stages=1), ampere.forward)
    for name, value in got.items():
        assert_near(value, expected[name], NEAR if name == "out" else EXACT, name)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv"])
def test_query_tiles_without_64_rows_are_rejected(kind):
    shape = jax.ShapeDtypeStruct((1, 128, 1, 64), "bfloat16")
    attend = partial(dot_product_attention, implementation="pallas")
    with using(Target("ampere", blocks=((kind, Blocks(128, 128, 1)),))):
        with pytest.raises(ValueError, match="must have 64 rows, not 128"):
            jax.eval_shape(jax.grad(lambda *x: attend(*x).sum().astype("float32")), *[shape] * 3)


@pytest.mark.slow_except(
    "blocks1-None-stages=1 must be at least 2", "blocks2-96-page=96 must be a multiple of 64 keys"
)
@pytest.mark.parametrize(
    ("blocks", "page", "message"),
    [
        (Blocks(1, 128), None, "k=128 must be 32 or 64"),
        (Blocks(1, 32, stages=1), None, "stages=1 must be at least 2"),
        (Blocks(1, 64), 96, "page=96 must be a multiple of 64 keys"),
    ],
)
def test_unsupported_decode_tiles_are_rejected(blocks, page, message):
    operands = draw_few(Case(T=1, S=128))
    if page is not None:
        pool = jnp.zeros((3, page, 1, 64), jnp.bfloat16)
        operands = operands._replace(key=pool, value=pool, pages=jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=message):
        ampere.decode(Problem(scale=1.0), operands, None, blocks)


@pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
def test_decode_kernel_uses_mma_and_cp_async():
    """From capability 9 on, Pallas lowers its own copies to TMA, which needs a barrier."""
    query, key = (jax.ShapeDtypeStruct((1, t, n, 64), jnp.bfloat16) for t, n in ((1, 4), (300, 2)))
    attend = partial(dot_product_attention, implementation="pallas")
    with using(Target("ampere")):
        traced = str(jax.make_jaxpr(attend)(query, key, key))
    assert "attention_decode" in traced and "attention_forward" not in traced
    assert re.search(r"\bmma\b", traced) and "inline_mgpu" in traced
    assert not re.search(r"\b(wgmma\w*|copy_gmem_to_smem|barrier_\w+|commit_smem)\[", traced)


@pytest.mark.long
def test_decode_step_does_not_copy_cache():
    """Only two writes, and a loop that copies shared pages, have the size of the cache.

    Compiled for 8.0 in a separate process, because Mosaic GPU keeps the first capability.
    """
    reason = "jax[cuda13] compiles for GPUs that are not attached"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    command = [sys.executable, "-m", "benchmarks.compile_gpu", "8.0", "--step"]
    reasons = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = reasons.splitlines()[1:]
    assert len(lines) == 5 and any("int8" in line for line in lines)
    for line in lines:
        temporaries, large = re.search(r"([\d.]+) MB   (\d+ fusion.*)$", line).groups()
        assert float(temporaries) < 8
        assert large == "2 fusion" + ", 1 while" * ("pages" in line)


@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv", "bias", "decode"])
def test_tiles_divide_128_and_fit_smallest_shared_memory(kind):
    for H in ampere.HEAD_DIMS:
        for Hv in ampere.HEAD_DIMS:
            plan = ampere.blocks(kind, H, Hv)
            assert 128 % plan.q == 0 == 128 % plan.k and 64 in (plan.q, plan.k)
            queries = plan.q * (H if kind in ("forward", "decode") else H + Hv)
            tiles = (
                plan.stages if kind == "decode" else 1
            )  # the other kernels keep a tile in registers
            assert 2 * (queries + tiles * plan.k * (H + Hv)) + 1024 <= AMPERE_SHARED_MEMORY


def test_unsupported_calls_report_reason(monkeypatch):
    def reason(dtype="bfloat16", H=64, nondeterministic=False):
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, H), dtype)] * 3
        return ampere.refuse(Target("ampere"), nondeterministic, *shapes)

    monkeypatch.setattr(ampere, "HAS_MMA", True)
    assert reason() is None and reason("float16", 192) is None
    assert "supports only bfloat16 and float16, not float32" in reason("float32")
    assert "80" in reason(H=80)
    assert "needs a Hopper GPU" in reason(nondeterministic=True)
    monkeypatch.setattr(ampere, "HAS_MMA", False)
    assert "Pallas has no mma in jax" in reason()
    monkeypatch.setattr(nvidia, "cuda_version", lambda: 12080)
    assert "install CUDA 13" in reason()


@pytest.mark.slow
@pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
def test_ampere_kernels_run_only_if_pallas_is_requested():
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def loss(*inputs):
        out = dot_product_attention(*inputs, mask=Causal(), implementation="pallas")
        return out.astype(jnp.float32).sum()

    with using(Target("ampere")):
        traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
        reasons = explain_attention(x, x, x, mask=Causal())
    for name in ("forward", "backward_dq", "backward_dkdv"):
        assert f"kernel_name='attention_{name}'" in traced
    assert re.search(r"\bmma\b", traced)
    assert not re.search(r"\b(wgmma\w*|copy_gmem_to_smem|barrier_\w+|commit_smem)\[", traced)
    assert reasons["pallas"] is None and reasons.chosen != "pallas"
    assert "needs a Hopper GPU" in reasons["pallas_unordered"]


@pytest.mark.long
class TestAmpere(InInterpreter):
    implementation = "pallas"
    target = Target("ampere", plgpu.InterpretGPUParams() if INTERPRETS is None else False)
