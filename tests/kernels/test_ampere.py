"""The kernels for other NVIDIA GPUs than Hopper, in the interpreter, against NumPy in float64."""

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


ALONE = SimpleNamespace(  # without the loop that runs them again
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
def test_forward_and_gradients_match_the_dense_oracle(case):
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
def test_gradient_of_a_bias_has_its_shape_and_sums(shape):
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
def test_without_a_tile_in_flight_the_results_are_right_too():
    case = Case(T=64, S=128, N=1, H=32, Hv=32)
    operands, do = draw(case)
    expected, _ = oracle(case, operands, do)
    got = run_forward(case, operands, Blocks(64, 32, stages=1), ampere.forward)
    for name, value in got.items():
        assert_near(value, expected[name], NEAR if name == "out" else EXACT, name)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv"])
def test_tiles_of_other_rows_than_a_program_holds_are_refused(kind):
    shape = jax.ShapeDtypeStruct((1, 128, 1, 64), "bfloat16")
    attend = partial(dot_product_attention, implementation="pallas")
    with using(Target("ampere", blocks=((kind, Blocks(128, 128, 1)),))):
        with pytest.raises(ValueError, match="holds 64 rows a program: its tiles have 128"):
            jax.eval_shape(jax.grad(lambda *x: attend(*x).sum().astype("float32")), *[shape] * 3)


@pytest.mark.slow_except(
    "blocks1-None-stages is 1", "blocks2-96-page is 96: must be a multiple of 64 keys"
)
@pytest.mark.parametrize(
    ("blocks", "page", "message"),
    [
        (Blocks(1, 128), None, "tiles of 32 or 64 keys, not 128"),
        (Blocks(1, 32, stages=1), None, "stages is 1"),
        (Blocks(1, 64), 96, "page is 96: must be a multiple of 64 keys"),
    ],
)
def test_tiles_that_the_decode_kernel_lacks_are_refused(blocks, page, message):
    operands = draw_few(Case(T=1, S=128))
    if page is not None:
        pool = jnp.zeros((3, page, 1, 64), jnp.bfloat16)
        operands = operands._replace(key=pool, value=pool, pages=jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=message):
        ampere.decode(Problem(scale=1.0), operands, None, blocks)


@pytest.mark.slow
@pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
def test_the_decode_kernel_multiplies_by_mma_and_copies_by_cp_async():
    """Pallas lowers its own copies to TMA from capability 9 on, where they want a barrier."""
    query, key = (jax.ShapeDtypeStruct((1, t, n, 64), jnp.bfloat16) for t, n in ((1, 4), (300, 2)))
    attend = partial(dot_product_attention, implementation="pallas")
    with using(Target("ampere")):
        traced = str(jax.make_jaxpr(attend)(query, key, key))
    assert "attention_decode" in traced and "attention_forward" not in traced
    assert re.search(r"\bmma\b", traced) and "inline_mgpu" in traced
    assert not re.search(r"\b(wgmma\w*|copy_gmem_to_smem|barrier_\w+|commit_smem)\[", traced)


@pytest.mark.long
def test_a_step_of_decoding_copies_no_key_and_no_value():
    """It is compiled for 8.0 in a process of its own: Mosaic GPU keeps the first capability.

    As large as the cache are two writes, and over pages the loop that copies shared ones.
    """
    reason = "jax[cuda13] compiles for GPUs that are not attached"
    pytest.importorskip("jax_cuda13_plugin", reason=reason)
    command = [sys.executable, "-m", "benchmarks.compile_gpu", "8.0", "--step"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = said.splitlines()[1:]
    assert len(lines) == 5 and any("int8" in line for line in lines)
    for line in lines:
        temporaries, large = re.search(r"([\d.]+) MB   (\d+ fusion.*)$", line).groups()
        assert float(temporaries) < 8
        assert large == "2 fusion" + ", 1 while" * ("pages" in line)


@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv", "bias", "decode"])
def test_tiles_of_every_head_dim_divide_128_and_fit_the_least_shared_memory(kind):
    for H in ampere.HEAD_DIMS:
        for Hv in ampere.HEAD_DIMS:
            plan = ampere.blocks(kind, H, Hv)
            assert 128 % plan.q == 0 == 128 % plan.k and 64 in (plan.q, plan.k)
            queries = plan.q * (H if kind in ("forward", "decode") else H + Hv)
            tiles = plan.stages if kind == "decode" else 1  # others keep one in registers
            assert 2 * (queries + tiles * plan.k * (H + Hv)) + 1024 <= AMPERE_SHARED_MEMORY


def test_what_cannot_be_done_is_named(monkeypatch):
    def reason(dtype="bfloat16", H=64, nondeterministic=False):
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, H), dtype)] * 3
        return ampere.refuse(Target("ampere"), nondeterministic, *shapes)

    monkeypatch.setattr(ampere, "HAS_MMA", True)
    assert reason() is None and reason("float16", 192) is None
    assert "multiplies bfloat16 or float16, not float32" in reason("float32")
    assert "80" in reason(H=80)
    assert "needs a Hopper GPU" in reason(nondeterministic=True)
    monkeypatch.setattr(ampere, "HAS_MMA", False)
    assert "has no mma in Pallas" in reason()
    monkeypatch.setattr(nvidia, "cuda_version", lambda: 12080)
    assert "install CUDA 13" in reason()


@pytest.mark.slow
@pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
def test_kernels_are_those_of_ampere_and_are_asked_for_by_name():
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def loss(*inputs):
        out = dot_product_attention(*inputs, mask=Causal(), implementation="pallas")
        return out.astype(jnp.float32).sum()

    with using(Target("ampere")):
        traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
        said = explain_attention(x, x, x, mask=Causal())
    for name in ("forward", "backward_dq", "backward_dkdv"):
        assert f"kernel_name='attention_{name}'" in traced
    assert re.search(r"\bmma\b", traced)
    assert not re.search(r"\b(wgmma\w*|copy_gmem_to_smem|barrier_\w+|commit_smem)\[", traced)
    assert said["pallas"] is None and said.chosen != "pallas"
    assert "needs a Hopper GPU" in said["pallas_unordered"]


@pytest.mark.long
class TestAmpere(InInterpreter):
    implementation = "pallas"
    target = Target("ampere", plgpu.InterpretGPUParams() if INTERPRETS is None else False)
