"""The decode kernels for NVIDIA GPUs in the interpreter, against NumPy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    assert_near,
    causal,
    draw_few,
    lists_of,
    needs_interpreter,
    oracle,
    run_decode,
    window_in_document,
    within_length,
)
from transformer_jax.cache import dequantize, quantize
from transformer_jax.kernels import ampere, chips, hopper
from transformer_jax.kernels.hopper import programs
from transformer_jax.kernels.nvidia import schedule

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, for infinities
]

S = 331


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """Run so few programs that each of them has several items and reuses every slot."""
    monkeypatch.setattr(programs, "PROGRAMS", 2)
    monkeypatch.setattr(chips, "AMPERE_PROCESSORS", 1)


each_backend = pytest.mark.parametrize("module", [hopper, ampere], ids=["hopper", "ampere"])

CASES = {
    "causal, one query, no groups": (Case(T=1, S=S, N=2, K=2), None),
    "causal, four queries, groups of four": (Case(T=4, S=S, N=8, K=2), None),
    "window in documents, groups of eight": (
        Case(B=2, T=4, S=S, N=8, K=1, H=32, Hv=96, visible=window_in_document), None
    ),
    "lengths of rows": (Case(B=3, T=1, S=S, N=4, K=1, visible=within_length), [S, 0, 130]),
    "several tiles a part": (Case(B=2, T=2, S=S, N=4, K=4), None),
    "no mask, float16, negative scale": (
        Case(T=3, S=256, visible=None, scale=-0.1, dtype="float16"), None
    ),
    "sixty-four rows": (Case(T=8, S=S, N=8, K=1), None),
    "cap, sinks and a bias of each head and query": (
        Case(T=4, S=S, N=4, K=2, softcap=2.5, sinks=True, bias=(1, 4, 4, S), bias_dtype="bfloat16"),
        None,
    ),
    "bias of each key": (Case(B=2, T=2, S=S, bias=(2, 1, 1, S), sinks=True), None),
    "bias of each query": (Case(T=3, S=S, N=4, K=2, bias=(1, 1, 3, S)), None),
    "bias of each head": (Case(T=2, S=S, N=4, K=2, bias=(1, 4, 1, 1)), None),
    "slopes and lengths": (
        Case(B=2, T=2, S=S, N=4, K=2, slopes=True, visible=within_length), [7, 300]
    ),
    "wide heads": (Case(T=1, S=S, N=4, K=1, H=256, Hv=256, scale=0.06), None),
    "widths of 80 and 112": (Case(T=1, S=S, N=4, K=1, H=80, Hv=112), None),
    "widths of 160 and 144": (Case(T=2, S=S, N=4, K=2, H=160, Hv=144, scale=0.08), None),
}  # fmt: skip


def skip_widths_of_hopper(module, case):
    if not {case.H, case.Hv} <= set(module.HEAD_DIMS):
        pytest.skip(f"{case.H} and {case.Hv} are widths of Hopper")


@pytest.mark.slow
@pytest.mark.long_except(
    "*-cap, sinks and a bias of each head and query",
    "*-lengths of rows",
    "*-slopes and lengths",
    "*-widths of 80 and 112",
    "*-window in documents, groups of eight",
    "ampere-widths of 160 and 144",
    "hopper-bias of each key",
    "hopper-causal, four queries, groups of four",
    "hopper-causal, one query, no groups",
    "hopper-several tiles a part",
)
@needs_interpreter
@pytest.mark.parametrize(("case", "lengths"), CASES.values(), ids=CASES)
@each_backend
def test_decode_matches_dense_reference(module, case, lengths):
    skip_widths_of_hopper(module, case)
    operands = draw_few(case, lengths=lengths)
    expected, _ = oracle(case, operands, jnp.zeros((case.B, case.T, case.N, case.Hv)))
    got = run_decode(case, operands, module=module)
    assert np.abs(expected["out"]).max() > 0.05
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], NEAR if name == "out" else EXACT, name)
    assert got["out"].dtype == operands.query.dtype


@pytest.mark.slow
@pytest.mark.long_except("ampere-13", "ampere-331")
@needs_interpreter
@pytest.mark.parametrize("S", [S, 328, 13])
@each_backend
def test_last_key_tile_may_be_partial(module, S):
    case = Case(B=2, T=2, S=S, N=4, K=2, sinks=True, bias=(1, 4, 2, S), visible=within_length)
    operands = draw_few(case, lengths=[S, 7])
    expected, _ = oracle(case, operands, jnp.zeros((case.B, case.T, case.N, case.Hv)))
    trimmed = operands._replace(key=operands.key[:, :S], value=operands.value[:, :S])
    got = run_decode(case, trimmed, module=module)
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], NEAR if name == "out" else EXACT, name)


@pytest.mark.slow
@pytest.mark.long_except("hopper")
@needs_interpreter
@each_backend
def test_fully_masked_rows_are_zero(module):
    case = Case(B=2, T=2, S=S, N=4, K=2, visible=within_length, sinks=True)
    got = run_decode(case, draw_few(case, lengths=[0, 5]), module=module)
    assert not np.asarray(got["out"], np.float32)[0].any()
    assert np.isneginf(got["row_max"])[0].all() and not np.asarray(got["log_sum"])[0].any()
    assert np.isfinite(got["row_max"])[1].all()


@pytest.mark.slow
@pytest.mark.long_except("hopper")
@needs_interpreter
@each_backend
def test_softcap_matches_reference_when_products_overflow(module):
    case = Case(T=1, S=200, N=2, K=1, softcap=3.0, visible=causal)
    operands = draw_few(case)
    query = operands.query.at[..., 0].set(3e38)
    key = operands.key.at[:, :100, :, 0].set(3e38).at[:, 100:, :, 0].set(-3e38)
    got = run_decode(case, operands._replace(query=query, key=key), module=module)
    weight = np.exp(np.where(np.arange(200) < 100, 3.0, -3.0))
    value = np.asarray(operands.value, np.float32)[0, :200, 0]
    assert_near(got["out"][0, 0], (weight / weight.sum() @ value)[None].repeat(2, 0), NEAR, "out")


@pytest.mark.slow
@pytest.mark.long_except("ampere-part of one", "hopper-*")
@needs_interpreter
@pytest.mark.parametrize("S", [384, 424, 427], ids=["whole tiles", "part of one", "padded"])
@each_backend
def test_tiles_missing_from_list_are_not_read(module, S):
    """No mask hides the NaN in all other keys and values."""
    case = Case(B=2, T=1, S=384, N=4, K=2, visible=None)
    operands = draw_few(case)
    long = [jnp.zeros((2, S, *x.shape[2:]), x.dtype) for x in (operands.key, operands.value)]
    tiles = np.array([[1, 0, 1], [0, 1, 0]], bool).repeat(128, axis=1)
    plan = module.blocks("decode", 64, 64)
    lists = lists_of(tiles[:, None, None], 1, plan.k)
    assert (lists.full == lists.seen).all()
    tiles = jnp.asarray(np.pad(tiles, ((0, 0), (0, S - 384))))[:, :, None, None]
    key, value = (
        jnp.where(tiles, padded.at[:, :384].set(x), jnp.nan)
        for padded, x in zip(long, (operands.key, operands.value), strict=True)
    )
    decode = jax.jit(functools.partial(module.decode, case.problem, blocks=plan))
    out, *_ = decode(operands._replace(key=key, value=value), lists)
    q, k, v = (np.asarray(x, np.float64) for x in (operands.query.reshape(2, 2, 2, -1), key, value))
    seen = np.asarray(tiles)[:, :, 0, 0][:, None, None]
    weight = np.where(seen, np.exp(np.einsum("bkgh,bskh->bkgs", q, k) * case.scale), 0)
    weight = weight / weight.sum(axis=-1, keepdims=True)
    expected = np.einsum("bkgs,bskh->bkgh", weight, np.nan_to_num(v))
    assert_near(out, expected.reshape(out.shape), NEAR, "out")


# int8


INT8 = {
    "lengths": (Case(B=3, T=1, S=S, N=4, K=1, visible=within_length), [S, 0, 130]),
    "groups, widths of 32 and 96": (Case(B=2, T=4, S=S, N=8, K=2, H=32, Hv=96, softcap=2.5), None),
    "no mask, float16": (Case(T=3, S=256, N=4, K=2, visible=None, dtype="float16"), None),
    "wide heads": (Case(T=1, S=S, N=4, K=1, H=256, Hv=128, scale=0.06), None),
    "widths of 80 and 112": (Case(T=1, S=S, N=4, K=1, H=80, Hv=112), None),
}


@pytest.mark.slow
@pytest.mark.long_except("hopper-groups, widths of 32 and 96", "hopper-lengths")
@needs_interpreter
@pytest.mark.parametrize(("case", "lengths"), INT8.values(), ids=INT8)
@each_backend
def test_int8_cache_matches_dequantized_cache_bitwise(module, case, lengths):
    skip_widths_of_hopper(module, case)
    operands = draw_few(case, lengths=lengths)
    (key, k_scale), (value, v_scale) = quantize(operands.key), quantize(operands.value)
    quantized = operands._replace(key=key, value=value, k_scale=k_scale, v_scale=v_scale)
    dtype = operands.query.dtype
    wide = [dequantize(x, scale, dtype) for x, scale in ((key, k_scale), (value, v_scale))]
    got = run_decode(case, quantized, module=module)
    wide = operands._replace(key=wide[0], value=wide[1])
    expected = run_decode(case, wide, module=module)
    assert np.abs(np.asarray(got["out"], np.float32)).max() > 0.05
    for name, x in got.items():
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (x, expected[name])))


# Division of the work


@pytest.mark.parametrize("heads", [1, 2, 8, 31, 64, 100, 300, 528, 1000])
def test_decode_splits_fill_programs_and_contain_at_least_one_tile(heads):
    parts = schedule.key_parts(heads, 4096, 132)
    turns = -(-heads * parts // 132)
    assert heads * parts >= 0.9 * turns * 132
    assert schedule.key_parts(heads, 3, 132) == min(parts, 3)


@pytest.mark.parametrize("H", hopper.HEAD_DIMS)
@pytest.mark.parametrize("Hv", hopper.HEAD_DIMS)
def test_every_head_dim_uses_at_least_two_stages(H, Hv):
    plan = hopper.blocks("decode", H, Hv)
    assert plan.stages >= 2 and 128 % plan.k == 0


@pytest.mark.slow
@needs_interpreter
def test_int8_cache_requires_two_stages():
    case = INT8["no mask, float16"][0]
    operands = draw_few(case)
    (key, k_scale), (value, v_scale) = quantize(operands.key), quantize(operands.value)
    quantized = operands._replace(key=key, value=value, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(ValueError, match="stages=1 must be at least 2 for int8"):
        run_decode(case, quantized, stages=1)
