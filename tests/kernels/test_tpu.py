"""The TPU kernels against float64 formulas in Pallas interpreters, and compiled without a TPU."""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention_suite import AttentionSuite
from tests.support.hopper_kernels import formulas, lists_of, saved_of
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits
from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.masks import Causal, Dense, Segments, Window
from transformer_jax.kernels import Target, tpu, using
from transformer_jax.kernels.contract import (
    Blocks,
    Operands,
    Problem,
    Residuals,
    TileLists,
)
from transformer_jax.kernels.tpu.grid import GridStep

pytestmark = pytest.mark.usefixtures("quick_compilation")


def everything(q, k):
    return (k[0] >= 0) & (q[0] >= -1)


def causal(q, k):
    return (k[0] >= 0) & (k[0] <= q[0])


def window(q, k):
    return causal(q, k) & (q[0] - k[0] < 13)


def segments(q, k):
    return causal(q, k) & (q[1] == k[1])


def sparse(q, k):
    """Most queries see nothing, including whole tiles of queries."""
    return causal(q, k) & (q[0] % 3 > 0) & (q[0] > 41)


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; T and S are odd lengths, padded to tiles of `blocks`."""

    mask: Any = causal
    B: int = 2
    T: int = 43
    S: int = 67
    N: int = 4
    K: int = 2
    H: int = 8
    Hv: int = 8
    dtype: Any = jnp.float32
    blocks: Blocks = Blocks(16, 24)  # noqa: RUF009
    bias: tuple[bool, ...] | None = None  # which of its axes are larger than 1
    slopes: bool = False
    sinks: bool = False
    softcap: float | None = None
    rate: float = 0.0
    per_head: bool = False
    """Whether each batch row and head has its own lists and slopes."""

    def padded(self) -> tuple[int, int]:
        return (
            -(-self.T // self.blocks.q) * self.blocks.q,
            -(-self.S // self.blocks.k) * self.blocks.k,
        )

    def problem(self, interpret: Any = True) -> Problem:
        return Problem(self.H**-0.5, self.softcap, self.rate, self.mask, interpret=interpret)


def draw(case: Case) -> tuple[Operands, np.ndarray, np.ndarray, np.ndarray]:
    """Return operands, visible pairs bool[B, N, T, S], and cotangents of out and of lse."""
    rng = np.random.default_rng(7)
    (T, S), B, N = case.padded(), case.B, case.N
    positions = np.arange(T)[None] + case.S - case.T
    k_positions = np.where(np.arange(S) < case.S, np.arange(S), -1)[None]
    q_vectors, k_vectors = [positions], [k_positions]
    if case.mask is segments:
        q_vectors += [np.sort(rng.integers(0, 3, (B, T)), axis=1)]
        k_vectors += [np.sort(rng.integers(0, 3, (B, S)), axis=1)]
    q, k = ([x[:, None] for x in vectors] for vectors in (q_vectors, k_vectors))
    sees = case.mask([x[..., None] for x in q], [x[:, :, None] for x in k])
    sees = np.broadcast_to(sees, (B if case.per_head else len(sees), 1, T, S))
    if case.per_head:
        sees = np.broadcast_to(sees, (B, N, T, S))

    def normal(*shape, dtype=case.dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def rows(x, end):  # zeros past the end
        return x.at[:, end:].set(0)

    bias = None
    if case.bias is not None:
        axes = zip((B, N, T, S), case.bias, strict=True)
        bias = normal(*(size if has else 1 for size, has in axes))
    slopes = jnp.asarray(rng.random((B if case.per_head else 1, N)) / 9, jnp.float32)
    words = jnp.asarray(rng.integers(0, 2**32, (2, B, N), dtype=np.uint32))
    operands = Operands(
        rows(normal(B, T, N, case.H), case.T),
        rows(normal(B, S, case.K, case.H), case.S),
        rows(normal(B, S, case.K, case.Hv), case.S),
        tuple(jnp.asarray(x, jnp.int32) for x in q_vectors),
        tuple(jnp.asarray(x, jnp.int32) for x in k_vectors),
        bias=bias,
        slopes=slopes if case.slopes else None,
        sinks=normal(1, N, dtype=jnp.float32) if case.sinks else None,
        dropout=words if case.rate else None,
    )
    return operands, sees, normal(B, T, N, case.Hv), rng.normal(size=(B, N, T))


def run(
    case: Case, interpret: Any = True, *, bias_only: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the kernels' results, with exact residuals for the backward pass, and the expected."""
    operands, sees, do, dlse = draw(case)
    scores = dict(scale=case.H**-0.5, softcap=case.softcap, rate=case.rate)
    reference = formulas(operands, sees, do, dlse=dlse, **scores)
    problem, blocks, saved = case.problem(interpret), case.blocks, saved_of(reference, do)

    @jax.jit
    def kernels(operands, lists, turned, saved):
        if bias_only:
            return dict(dbias=tpu.backward_bias(problem, operands, lists, blocks, saved))
        out, row_max, log_sum = tpu.forward(problem, operands, lists, blocks)
        dq, slope_rows = tpu.backward_dq(problem, operands, lists, blocks, saved)
        dk, dv = tpu.backward_dkdv(problem, operands, turned, blocks, saved)
        results = dict(out=out, row_max=row_max, log_sum=log_sum, dq=dq, dk=dk, dv=dv)
        if slope_rows is not None:
            results["slope_rows"] = slope_rows
        eagerly = tpu.backward_single_pass_rows(problem, operands, lists, blocks, saved)
        names = ("dq", "dk", "dv", "slope_rows")[: len(eagerly)]
        results |= {f"{name}, single pass": x for name, x in zip(names, eagerly, strict=True)}
        if operands.bias is not None and operands.bias.shape[2] > 1:
            results["dbias"] = tpu.backward_bias(problem, operands, lists, blocks, saved)
        return results

    lists = (
        lists_of(sees, blocks.q, blocks.k),
        lists_of(sees.swapaxes(2, 3), blocks.k, blocks.q),
    )
    if case.bias is not None:
        axes = tuple(axis for axis, has in enumerate(case.bias) if not has)
        reference["dbias"] = reference["ds"].sum(axis=axes, keepdims=True)
    return kernels(operands, *lists, saved), reference


def check(case: Case, interpret: Any = True) -> None:
    results, reference = run(case, interpret)
    fully_masked = np.isneginf(reference["row_max"])
    assert len(results) >= 9 and (np.isneginf(results["row_max"]) == fully_masked).all()
    assert (np.asarray(results["log_sum"])[fully_masked] == 0).all()
    assert (np.asarray(results["out"]).swapaxes(1, 2)[fully_masked] == 0).all()
    for name, value in results.items():
        value, wanted = np.asarray(value), reference[name.removesuffix(", single pass")]
        if name == "row_max":
            value, wanted = value[~fully_masked], wanted[~fully_masked]
        tolerance = FORWARD_F32 if name in ("out", "row_max", "log_sum") else GRADIENT_F32
        if case.dtype == jnp.bfloat16 and name not in ("row_max", "log_sum"):
            tolerance = 2.0**-7
        assert_near(value, wanted, tolerance, name)


CASES = {
    "everything": Case(everything, K=4, B=1, N=4),
    "causal, one key head": Case(causal, K=1, Hv=24),
    "segments": Case(segments, per_head=True, slopes=True),
    "rows that see nothing": Case(sparse, sinks=True),
    "softcap and dropout": Case(softcap=1.5, rate=0.3),
    "window, slopes and sinks": Case(window, slopes=True, sinks=True),
    "every option, tiles in parts": Case(
        segments,
        B=1,
        N=2,
        K=1,
        T=21,
        S=391,
        blocks=Blocks(16, 256),
        bias=(False, True, True, True),
        slopes=True,
        sinks=True,
        softcap=2.0,
        rate=0.2,
    ),
    "bias of keys, tiles in parts": Case(
        B=1, T=21, S=391, blocks=Blocks(16, 256), bias=(False, True, False, True)
    ),
    "bfloat16": Case(dtype=jnp.bfloat16, H=16, bias=(False, True, True, True)),
}


@pytest.mark.slow
@pytest.mark.long_except("everything")
@pytest.mark.parametrize("name", CASES)
def test_tpu_kernels_match_formulas(name):
    check(CASES[name])


def test_scalar_is_read_per_head_or_per_row_and_head():
    step = GridStep(*[None] * len(GridStep._fields))._replace(b=1, n=2, heads=5)
    assert step.scalar(np.arange(5)) == 2 and step.scalar(np.arange(15)) == 7


SMALL = Case(everything, B=3, N=2, K=1, T=11, S=19)


@pytest.mark.slow
def test_softcap_scales_query_and_key_gradients_but_not_bias_gradient():
    """dq and dk have a factor 1 - tanh^2; a bias is added later and has none."""
    check(replace(SMALL, softcap=0.7, bias=(True, False, True, True)))


def test_per_row_key_bias_has_correct_gradient():
    case = replace(SMALL, bias=(True, False, False, True))
    results, reference = run(case, bias_only=True)
    assert results["dbias"].shape == reference["dbias"].shape == (3, 1, 1, 24)
    assert_near(results["dbias"], reference["dbias"], GRADIENT_F32)


@pytest.mark.slow
@pytest.mark.long_except("(1, 1, 1, 0)")
@pytest.mark.parametrize(
    "axes",
    [(0, 0, 1, 1), (1, 0, 1, 1), (0, 1, 0, 1), (1, 1, 1, 0)],
    ids=str,
)
def test_bias_gradient_is_summed_over_broadcast_axes(axes):
    case = Case(segments, per_head=axes == (0, 0, 1, 1), bias=tuple(map(bool, axes)))
    results, reference = run(case, bias_only=True)
    assert_near(results["dbias"], reference["dbias"], GRADIENT_F32)


@pytest.mark.slow
def test_bias_gradient_is_zero_in_unvisited_tiles():
    case = Case(window, bias=(False, True, True, True))
    results, _ = run(case, bias_only=True)
    dbias, unseen = np.asarray(results["dbias"]), ~draw(case)[1][0, 0]
    assert (dbias[:, :, unseen] == 0).all() and unseen.sum() > dbias[0, 0].size / 2


@pytest.mark.slow
@pytest.mark.long_except("segments")
@pytest.mark.parametrize("name", ["segments", "rows that see nothing"])
def test_kernels_have_no_races_or_out_of_bounds_reads(name):
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    small = dict(B=1, N=2, K=1, T=27, S=43, bias=(False, False, True, True))
    check(replace(CASES[name], **small), params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def forward_of(case):
    """Return operands, visible pairs bool[B, N, T, S], and the forward kernel as a function."""
    operands, sees, *_ = draw(case)
    lists = lists_of(sees, case.blocks.q, case.blocks.k)
    return operands, sees, lambda x: tpu.forward(case.problem(), x, lists, case.blocks)


@pytest.mark.slow
def test_repeated_runs_are_bit_identical():
    operands, _, forward = forward_of(Case(window, B=1, N=2))
    assert_same_bits(jax.jit(forward)(operands)[0], jax.jit(forward)(operands)[0])


@pytest.mark.slow
def test_single_pass_backward_is_selected_if_sums_fit():
    """16 MiB: dk and dv of 16,384 keys of width 128, or of fewer wider keys."""
    struct = lambda S: jax.ShapeDtypeStruct((1, S, 2, 128), jnp.bfloat16)  # noqa: E731

    def attend(q, k, v):
        with using(Target("tpu")):
            return dot_product_attention(q, k, v, implementation="pallas").sum()

    for S, single_pass in ((2**14, True), (2**14 + 1024, False)):
        text = str(jax.make_jaxpr(jax.grad(attend))(*[struct(S)] * 3))
        assert ("attention_single_pass" in text, "attention_dq" in text) == (
            single_pass,
            not single_pass,
        )
    assert tpu.sums_fit(2**14, 8, 128) and not tpu.sums_fit(2**14, 136, 128)


@pytest.mark.slow
def test_very_negative_scores_contribute_to_output():
    operands, _, forward = forward_of(Case(window, bias=(False, False, True, True)))
    low, zero = (
        jax.jit(forward)(operands._replace(bias=jnp.full_like(operands.bias, level)))[0]
        for level in (-1e5, 0)
    )
    assert np.abs(np.asarray(zero)).max() > 0.1
    assert np.abs(np.asarray(low - zero)).max() < 0.05


@pytest.mark.slow
def test_lowest_finite_bias_is_not_treated_as_mask():
    """Scores are in base 2 only without a bias: times log2(e), such a bias would be -inf."""
    operands, sees, forward = forward_of(Case(window, B=1, N=2, bias=(False, False, True, True)))
    lowest = jnp.full_like(operands.bias, np.finfo(np.float32).min)
    out, row_max, *_ = jax.jit(forward)(operands._replace(bias=lowest))
    assert np.isfinite(np.asarray(row_max)).all()
    weights = sees[0, 0] / sees[0, 0].sum(axis=1, keepdims=True)
    assert_near(out[0, :, 0], weights @ np.asarray(operands.value)[0, :, 0], FORWARD_F32)
    powers = [str(jax.make_jaxpr(forward)(operands._replace(bias=x))) for x in (lowest, None)]
    assert ["exp2" in text for text in powers] == [False, True]


@pytest.mark.slow
def test_unsupported_calls_are_rejected_with_reason():
    struct = lambda size, dtype: jax.ShapeDtypeStruct((1, 8, 2, size), dtype)  # noqa: E731
    where = Target("tpu")
    half, odd = struct(64, jnp.float16), struct(20, jnp.float32)
    assert "float16" in tpu.refuse(where, False, half, half, half)
    assert "H is 20" in tpu.refuse(where, False, odd, odd, struct(64, jnp.float32))
    fine = struct(96, jnp.bfloat16)
    assert "float32" in tpu.refuse(where, False, fine, fine, struct(96, jnp.float32))
    assert tpu.refuse(where, False, fine, fine, struct(128, jnp.bfloat16)) is None
    case = Case(B=1, N=1, K=1)
    order = jnp.zeros((1, 1, 3, 2**18), jnp.int32)
    lists = TileLists(order, order[..., 0], order[..., 0])
    with pytest.raises(NotImplementedError, match="262144"):
        tpu.forward(case.problem(), draw(case)[0], lists, case.blocks)


# Compiled ahead of time


@functools.cache
def chips(topology: str) -> list[Any]:
    from jax.experimental import topologies

    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise it locks a file
    return topologies.get_topology_desc(topology, platform="tpu").devices


def chip(topology: str) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(chips(topology)[0])


def compiled(case: Case, kernel: str, topology: str) -> Any:
    """Compile a kernel with its default tile sizes; T and S are lengths of whole tiles."""
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=chip(topology))  # noqa: E731
    kind = kernel.removeprefix("backward_")
    blocks = tpu.blocks(kind, case.H, case.Hv, jnp.dtype(case.dtype).itemsize)
    B, T, S, N = case.B, case.T, case.S, case.N
    vectors = lambda size: [struct((1, size), jnp.int32), struct((B, size), jnp.int32)]  # noqa: E731
    operands = Operands(
        struct((B, T, N, case.H), case.dtype),
        struct((B, S, case.K, case.H), case.dtype),
        struct((B, S, case.K, case.Hv), case.dtype),
        tuple(vectors(T)),
        tuple(vectors(S)),
        bias=None if case.bias is None else struct((1, N, T, S), case.dtype),
        slopes=struct((1, N), jnp.float32) if case.slopes else None,
        sinks=struct((1, N), jnp.float32) if case.sinks else None,
        dropout=struct((2, B, N), jnp.uint32) if case.rate else None,
    )
    rows, columns = T // blocks.q, S // blocks.k
    rows, columns = (columns, rows) if kind == "dkdv" else (rows, columns)
    count = struct((B, 1, rows), jnp.int32)
    args = [operands, TileLists(struct((B, 1, rows, columns), jnp.int32), count, count)]
    if kernel != "forward":
        row = struct((B, N, T), jnp.float32)
        args += [Residuals(struct((B, T, N, case.Hv), case.dtype), row, row, row)]
    problem = case.problem(interpret=False)
    function = functools.partial(getattr(tpu, kernel), problem)
    call = jax.jit(lambda operands, lists, *saved: function(operands, lists, blocks, *saved))
    lowered = call.lower(*args)
    assert f"attention_{kind.removesuffix('_rows')}" in lowered.as_text()
    return lowered.compile()


@pytest.mark.slow
@pytest.mark.long_except(
    "backward_bias-v6e:2x2-bfloat16",
    "backward_single_pass_rows-v5e:2x2-bfloat16",
    "forward-tpu7x:2x2x1-bfloat16",
)
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(
    "kernel, topology, dtype",
    [
        ("forward", "v5e:2x2", jnp.float32),
        ("backward_dq", "v6e:2x2", jnp.bfloat16),
        ("backward_dkdv", "v5p:2x2x1", jnp.float32),
        ("backward_single_pass_rows", "v5e:2x2", jnp.bfloat16),
        ("backward_single_pass_rows", "v5p:2x2x1", jnp.float32),
        ("backward_single_pass_rows", "v6e:2x2", jnp.bfloat16),
        ("backward_single_pass_rows", "tpu7x:2x2x1", jnp.bfloat16),
        ("backward_bias", "v6e:2x2", jnp.bfloat16),
        ("forward", "tpu7x:2x2x1", jnp.bfloat16),
        ("backward_dq", "tpu7x:2x2x1", jnp.bfloat16),
        ("backward_dkdv", "tpu7x:2x2x1", jnp.bfloat16),
        ("backward_bias", "tpu7x:2x2x1", jnp.bfloat16),
    ],
)
def test_every_option_compiles_for_tpu(kernel, topology, dtype):
    case = CASES["every option, tiles in parts"]
    case = replace(case, T=2048, S=4096, H=192, Hv=128, dtype=dtype)
    assert compiled(case, kernel, topology).memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.slow
@pytest.mark.long_except("backward_dkdv")
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("kernel", ["forward", "backward_dkdv"])
def test_attention_memory_is_linear_in_sequence_length(kernel):
    case = Case(segments, B=1, N=8, K=8, H=128, Hv=128, dtype=jnp.bfloat16)
    small, large = (
        compiled(replace(case, T=S, S=S), kernel, "v5e:2x2").memory_analysis().temp_size_in_bytes
        for S in (2**16, 2**17)
    )
    assert large <= 2.05 * small


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("S", [2**15, 2**16])
def test_arrays_in_kernel_layout_need_no_copies(S):
    """Output and gradients with grouped heads: memory of 1.02 of inputs and results, and no loop.

    XLA makes arrays for the kernels in the order [B, N, T, H].
    """
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    order = Format(Layout((0, 2, 1, 3)), chip("v5e:2x2"))

    def attend(query, key, value):
        with using(Target("tpu")):
            return dot_product_attention(query, key, value, mask=Causal(), implementation="pallas")

    def with_gradients(query, key, value, do):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(do)

    struct = lambda n: jax.ShapeDtypeStruct((1, S, n, 128), jnp.bfloat16, sharding=order)  # noqa: E731
    program = jax.jit(with_gradients, out_shardings=order)
    compiled = program.lower(struct(64), struct(8), struct(8), struct(64)).compile()
    memory = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert arrays >= 4 * (64 + 8) * S * 128 * 2
    assert 0 < memory.temp_size_in_bytes < 0.02 * arrays
    assert " while(" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.usefixtures("usual_compilation")
def test_surrounding_program_does_not_copy_kernel_inputs():
    """Projections of inputs and output, and all gradients: no copy or transpose of q, k, v, o or
    their gradients, and no array of size S x S."""
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    S, D, N, K, H = 2048, 384, 6, 3, 128

    def loss(weights, x, ids):
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", x, w) for w in weights[:3])
        mask = Causal() & Window(700) & Segments(ids)
        with using(Target("tpu")):
            out = dot_product_attention(q, k, v, mask=mask, softcap=30.0, implementation="pallas")
        return (jnp.einsum("BTNH,NHD->BTD", out, weights[3]).astype(jnp.float32) ** 2).sum()

    place = chip("v5e:2x2")
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)  # noqa: E731
    weights = [struct(D, N, H), struct(D, K, H), struct(D, K, H), struct(N, H, D)]
    ids = jax.ShapeDtypeStruct((1, S), jnp.int32, sharding=place)
    program = jax.jit(jax.grad(loss, (0, 1))).lower(weights, struct(1, S, D), ids).compile()
    text = program.as_text()
    for kernel in ("forward", "single_pass"):
        assert f"attention_{kernel}" in text
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    assert [shape for shape in moved if math.prod(map(int, shape.split(","))) >= S * K * H] == []
    assert not re.search(rf"\[(\d+,)*{S},{S}\]", text)


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5e:2x2", "v5p:2x2x1"])
def test_dense_mask_call_compiles_for_tpu(topology):
    """It is read as bytes: there are a few copies, but no wider array of size S x S."""
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    S, place = 2048, chip(topology)

    def loss(inputs, matrix, bias):
        with using(Target("tpu")):
            mask = Causal() & ~Dense(matrix) | Dense(matrix[:, :, ::-1])
            settings = dict(mask=mask, bias=bias, implementation="pallas")
            out = dot_product_attention(*inputs, **settings)
        return (out.astype(jnp.float32) ** 2).sum()

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    inputs = [struct((1, S, n, 128), jnp.bfloat16) for n in (4, 2, 2)]
    others = struct((1, 4, S, S), bool), struct((1, 1, 1, S), jnp.float32)
    lowered = jax.jit(jax.grad(loss, (0, 2))).lower(inputs, *others)
    text = lowered.as_text()
    for kernel in ("forward", "single_pass", "bias"):
        assert f"attention_{kernel}" in text
    assert {*re.findall(rf"x{S}x{S}x(\w+)>", text)} == {"i1", "i8"}
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 8 * 4 * S * S


@pytest.mark.long
@pytest.mark.usefixtures("usual_compilation")
def test_sharded_attention_compiles_for_four_chips():
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs that are not attached")
    mesh = jax.sharding.Mesh(np.array(chips("v5e:2x2")).reshape(2, 2), ("data", "model"))
    split, rows = (jax.sharding.PartitionSpec(*s) for s in (("data", None, "model"), ("data",)))

    def loss(query, key, value, ids):
        def attend(query, key, value, ids):
            with using(Target("tpu")):
                mask = Causal() & Segments(ids)
                return dot_product_attention(query, key, value, mask=mask, implementation="pallas")

        specs = dict(in_specs=(split, split, split, rows), out_specs=split)
        return (jax.shard_map(attend, mesh=mesh, **specs)(query, key, value, ids) ** 2).sum()

    def struct(shape, dtype, spec):
        place = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    arrays = [struct((2, 1024, n, 128), jnp.float32, split) for n in (4, 2, 2)]
    ids = struct((2, 1024), jnp.int32, rows)
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, ids).compile().as_text()
    assert all(f"attention_{kernel}" in text for kernel in ("forward", "single_pass"))
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", text)


@pytest.mark.slow_except("test_every_mask_matches_reference[composition]")
@pytest.mark.long_except(
    "test_every_mask_matches_reference[composition]",
    "test_masked_keys_and_values_have_no_influence[future-3.3e+38]",
)
class TestTpu(AttentionSuite):
    """The kernels called by `dot_product_attention`, in the plain interpreter."""

    implementation = "pallas"
    target = Target("tpu", True)
    may_refuse = True
    queries, span = 139, 251
