"""The Hopper kernels in the interpreter, which detects races, against NumPy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.hopper_kernels import (
    EXACT,
    NEAR,
    Case,
    InInterpreter,
    assert_near,
    draw,
    needs_interpreter,
    oracle,
    prefix_or_causal,
    run_forward,
    run_gradients,
    window_in_document,
    without_a_key,
)
from tests.support.tolerances import largest_error
from transformer_jax import ALiBi, Causal, dot_product_attention, explain_attention
from transformer_jax.kernels import Target, ampere, hopper, nvidia, using
from transformer_jax.kernels.contract import Blocks, Problem, Residuals, TileLists
from transformer_jax.kernels.hopper import programs
from transformer_jax.kernels.nvidia import schedule, scores

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """Run so few programs that each of them has several items and reuses every slot."""
    monkeypatch.setattr(programs, "PROGRAMS", 2)


CASES = {
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
    "wide heads share 64 keys": Case(H=192, Hv=192, T=128, S=131, scale=0.07),
    "widths of 80 and 112": Case(H=80, Hv=112, T=128, S=131, N=1, scale=0.11),
    "widths of 112 and 80, grouped": Case(H=112, Hv=80, softcap=2.5, scale=0.1, sinks=True),
    "widths of 160": Case(H=160, Hv=160, T=128, S=131, scale=0.08),
}


@pytest.mark.slow
@pytest.mark.long_except(
    "slopes, dropout and key bias", "widths of 80 and 112", "window in documents, sinks"
)
@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_gradients_match_dense_reference(case):
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    saved = saved._replace(do=do)
    got = run_forward(case, operands) | run_gradients(case, operands, saved)
    assert {"out", "row_max", "log_sum", "dq", "dk", "dv"} <= got.keys()
    assert ("slope_rows" in got) == case.slopes
    for name, value in got.items():
        tolerance = EXACT if name in ("row_max", "log_sum", "slope_rows") else NEAR
        assert_near(value, expected[name], tolerance, name)
    assert got["out"].dtype == got["dk"].dtype == operands.query.dtype


@pytest.mark.slow
@pytest.mark.long_except("plain")
@needs_interpreter
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.5, "dropout_rate": 0.3}], ids=["plain", "softcap and dropout"]
)
def test_wide_heads_share_attention_weights_between_warpgroups(options):
    case = Case(H=256, Hv=32, T=128, S=128, scale=0.07, **options)
    assert hopper.blocks("dkdv", case.H, case.Hv).k == 64
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_gradients(case, operands, saved._replace(do=do), ("dkdv",))
    for name in ("dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


@pytest.mark.slow_except("256")
@pytest.mark.parametrize("H", [128, 256])
def test_attention_weights_are_computed_once_per_tile(H):
    """Traced, not run: one place for full tiles and one for partial tiles."""
    case = Case(T=128, S=128, H=H, Hv=H)
    operands, do = draw(case)
    vector = jnp.zeros((1, 2, 128), jnp.float32)
    plan, count = hopper.blocks("dkdv", H, H), jnp.ones((1, 1, 1), jnp.int32)
    lists = TileLists(jnp.zeros((1, 1, 1, 2), jnp.int32), count, count, rows=count)
    problem = Problem(scale=0.1, visible=case.visible)
    kernel = functools.partial(hopper.backward_dkdv, problem, blocks=plan)
    traced = jax.make_jaxpr(lambda o, t, s: kernel(o, t, saved=s))(
        operands, lists, Residuals(do, vector, vector, vector)
    )
    assert str(traced).count(" exp2 ") == 2


@pytest.mark.slow
@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, for products that overflow
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_overflow_in_masked_pairs_has_no_effect(rate):
    case = Case(T=128, S=128, N=1, visible=without_a_key, dropout_rate=rate)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    hidden = operands._replace(value=operands.value.at[:, 50].set(3e38))
    assert not jnp.isfinite((hidden.value[:, 50:51] * do).astype(jnp.float32).sum(-1)).all()
    got = run_gradients(case, hidden, saved._replace(do=do))
    for name in ("dq", "dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


@pytest.mark.slow
@needs_interpreter
def test_hardware_tanh_error_is_below_bfloat16_rounding(monkeypatch):
    """With the maximum error of the instruction, its sign chosen by the bits of the argument.

    Compares root mean squares, because the largest single error depends on the last bits of the
    processor's sums.
    """

    def coarse(x):
        up = lax.bitcast_convert_type(x, jnp.int32) % 2 == 0
        return jnp.tanh(x) * jnp.where(up, 1 + 2**-11, 1 - 2**-11)

    case = Case(T=128, S=256, softcap=30.0)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    errors = []
    for tanh in (jnp.tanh, coarse):
        monkeypatch.setattr(scores, "_hardware_tanh", tanh)
        got = run_forward(case, operands)
        read = saved._replace(do=do, row_max=got["row_max"], log_sum=got["log_sum"])
        got |= run_gradients(case, operands, read)
        apart = {n: np.asarray(got[n], np.float64) - expected[n] for n in ("out", "dq", "dk", "dv")}
        errors.append({name: np.sqrt((x**2).mean()) for name, x in apart.items()})
    for name, exact in errors[0].items():
        assert exact < errors[1][name] <= 1.25 * exact, name


@pytest.mark.slow_except("bfloat16-20.0-True", "bfloat16-64.0-True", "float16-20.0-False")
@pytest.mark.parametrize(
    ("dtype", "softcap", "hardware"),
    [("bfloat16", 20.0, True), ("bfloat16", 64.0, True), ("bfloat16", 65.0, False),
     ("float16", 20.0, False)],
)  # fmt: skip
def test_hardware_tanh_is_used_only_if_input_error_is_larger(dtype, softcap, hardware, monkeypatch):
    monkeypatch.setattr(scores, "_hardware_tanh", lambda x: jnp.full_like(x, 2))
    raw = np.linspace(-1000, 1000, 701, dtype=np.float32)
    tanh = jax.jit(lambda x: scores._softcap_tanh(0.125, softcap, x, jnp.dtype(dtype)))(raw)
    expected = 2 if hardware else np.tanh(np.asarray(raw, np.float64) * 0.125 / softcap)
    np.testing.assert_allclose(tanh, np.broadcast_to(expected, raw.shape), atol=5e-7)


@pytest.mark.long
@needs_interpreter
def test_uncopied_vectors_are_read_from_global_memory(monkeypatch):
    monkeypatch.setattr(scores, "COPIED", 1)
    case = Case(visible=window_in_document, slopes=True)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_forward(case, operands) | run_gradients(case, operands, saved._replace(do=do))
    for name in ("out", "dq", "dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


@pytest.mark.slow
@pytest.mark.long_except("1-64", "3-128")
@needs_interpreter
@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize("consumers", [1, 3])
def test_one_and_three_warpgroups_match_reference(consumers, k):
    plan = Blocks(64 * consumers, k, 3)
    case = Case(T=384, S=401, visible=window_in_document)
    operands, do = draw(case)
    expected = oracle(case, operands, do)[0]
    assert expected["out"].any(axis=(2, 3)).all()
    got = run_forward(case, operands, plan)
    for name in ("out", "row_max", "log_sum"):
        assert_near(got[name], expected[name], NEAR if name == "out" else EXACT, name)


@pytest.mark.slow
@needs_interpreter
def test_single_stage_and_excessive_rescaling_slack_are_rejected():
    case = Case(T=128, S=128)
    operands, _ = draw(case)
    with pytest.raises(ValueError, match="stages=1 must be at least 2 in the forward kernel"):
        run_forward(case, operands, Blocks(128, 128, 1))
    for slack in (-1.0, 16.0, float("nan")):
        with pytest.raises(ValueError, match=f"slack={slack} must be from 0 to 15"):
            run_forward(case, operands, Blocks(128, 128, slack=slack))


@pytest.mark.slow
@pytest.mark.long_except("shape0")
@needs_interpreter
@pytest.mark.parametrize("shape", [(2, 2, 167, 211), (1, 2, 1, 211), (1, 1, 167, 1), (2, 1, 1, 1)])
def test_bias_gradient_has_shape_of_bias_and_matches_oracle(shape):
    case = Case(B=2, bias=shape, softcap=3.0, sinks=True)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_gradients(case, operands, saved._replace(do=do), ("bias",))["bias"]
    lacking = tuple(axis for axis in range(4) if shape[axis] == 1)
    assert got.shape == operands.bias.shape and got.dtype == jnp.float32
    wanted, terms = (
        x.sum(lacking, keepdims=True) for x in (expected["ds"], np.abs(expected["ds"]))
    )
    assert largest_error(got, wanted) <= EXACT * terms.max()  # the terms cancel


@pytest.mark.slow
@needs_interpreter
def test_fully_masked_row_has_zero_output_and_gradient():
    case = Case(T=256, S=128, sinks=True)  # the first 128 queries precede every key
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    fully_masked = np.isneginf(expected["row_max"])
    assert fully_masked[:, :, :128].all() and not fully_masked[:, :, 128:].any()
    got = run_forward(case, operands) | run_gradients(case, operands, saved._replace(do=do))
    assert (np.isneginf(got["row_max"]) == fully_masked).all()
    assert (np.asarray(got["log_sum"])[fully_masked] == 0).all()
    for name in ("out", "dq"):
        assert (np.asarray(got[name], np.float32)[:, :128] == 0).all(), name
    for name in ("dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


LAZY = Blocks(128, 64, 2, slack=8.0)
RISING = {  # increase, in base 2, from one tile of keys to the next
    "within the slack": (Case(S=331), [5, 5, 5, 5, 5]),
    "at once, float16, cap and sinks": (
        Case(S=331, N=4, K=2, dtype="float16", softcap=40.0, sinks=True), [0, 3, 30, -30, 2]
    ),
    "at once, window in documents": (
        Case(B=2, T=263, S=263, visible=window_in_document), [5, 40, 7, 7]
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("within the slack")
@needs_interpreter
@pytest.mark.parametrize(("case", "steps"), RISING.values(), ids=RISING)
def test_rescaling_slack_does_not_change_results(case, steps):
    operands, do = draw(case)
    levels = np.cumsum([0, *steps]).repeat(LAZY.k)[: case.S] * np.log(2) / case.scale / 32
    levels = jnp.asarray(np.pad(levels, (0, operands.key.shape[1] - case.S)), case.dtype)
    operands = operands._replace(
        query=operands.query.at[..., 0].set(32), key=operands.key.at[..., 0].set(levels[:, None])
    )
    expected, saved = oracle(case, operands, do)
    got = run_forward(case, operands, LAZY)
    live = np.isfinite(expected["row_max"])
    lag = (expected["row_max"][live] - np.asarray(got["row_max"], np.float64)[live]) / np.log(2)
    assert 1 < lag.max() < LAZY.slack + 0.01 and lag.min() > -0.01
    row_max = jnp.where(jnp.isneginf(got["row_max"]), jnp.inf, got["row_max"])
    saved = saved._replace(do=do, row_max=row_max, log_sum=got["log_sum"])
    got |= run_gradients(case, operands, saved) | {"lse": got["row_max"] + got["log_sum"]}
    expected["lse"] = expected["row_max"] + expected["log_sum"]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_near(got[name], expected[name], EXACT if name == "lse" else NEAR, name)


@pytest.mark.slow
@needs_interpreter
def test_first_score_becomes_maximum_for_any_slack():
    case = Case(T=256, S=256, bias=(1, 1, 1, 256))
    operands, do = draw(case)
    low = operands.bias.at[..., :64].set(-1.8e38).at[..., 64:128].set(-np.inf)
    operands = operands._replace(bias=low)
    expected, _ = oracle(case, operands, do)
    got = run_forward(case, operands, LAZY)
    assert (np.asarray(got["row_max"])[:, :, :128] < -1.7e38).all()
    assert_near(got["out"], expected["out"], NEAR, "out")
    for rows in (np.s_[:, :, :128], np.s_[:, :, 128:]):
        lse = (np.asarray(x["row_max"] + x["log_sum"])[rows] for x in (got, expected))
        assert_near(*lse, EXACT, "lse")


@pytest.mark.long
@needs_interpreter
def test_rounded_slack_does_not_overflow_float16_weights():
    case = Case(T=128, S=128, N=1, visible=None, scale=np.log(2), dtype="float16")
    operands, do = draw(case)
    query = jnp.zeros_like(operands.query).at[..., 0].set(2**13).at[..., 1].set(4)
    key = jnp.zeros_like(operands.key).at[..., 0].set(2**14).at[..., 1].set(4)
    operands = operands._replace(query=query, key=key.at[:, 64:, :, 1].set(8))
    assert np.float32(2**27 + 16) + np.float32(LAZY.slack) == 2**27 + 32, "the scores of both tiles"
    got = run_forward(case, operands, LAZY)
    assert_near(got["out"], oracle(case, operands, do)[0]["out"], NEAR, "out")


@pytest.mark.slow
@needs_interpreter
def test_very_low_unmasked_scores_contribute_to_output():
    case = Case(S=167, bias=(1, 1, 167, 1))
    operands, do = draw(case)
    operands = operands._replace(bias=operands.bias - 1e5)
    got = run_forward(case, operands)
    plain = oracle(case, operands._replace(bias=jnp.zeros_like(operands.bias)), do)[0]
    assert (np.asarray(got["row_max"])[:, :, :167] < -9e4).all()
    assert_near(got["out"][:, :167], plain["out"][:, :167], 3e-2, "out")


@pytest.mark.slow
@needs_interpreter
def test_results_do_not_depend_on_program_count(monkeypatch):
    case = Case()
    operands, do = draw(case)
    saved = oracle(case, operands, do)[1]._replace(do=do)
    results = []
    for number in (1, 3):
        monkeypatch.setattr(programs, "PROGRAMS", number)
        results.append(
            run_forward(case, operands) | run_gradients(case, operands, saved, ("dkdv",))
        )
    for name in results[0]:
        np.testing.assert_array_equal(*(np.asarray(x[name], np.float32) for x in results), name)


def causal_lists(rows):
    seen = np.arange(1, rows + 1, dtype=np.int32)[None, None]
    return TileLists(np.zeros((1, 1, rows, rows), np.int32), seen - 1, seen)


def in_order(items, lists, group=1):
    """Return all items as flat indices of [batch, heads, rows], in order."""
    prepared = jax.jit(lambda: schedule.prepare(lists).rows), jax.jit(jax.vmap(items.turn))
    rows, (b, head, turn) = jax.device_get((prepared[0](), prepared[1](np.arange(items.number))))
    found = rows[b % rows.shape[0], head * group % rows.shape[1], turn]
    return np.ravel_multi_index((b, head, found), items)


def test_work_items_are_sorted_by_level_then_head():
    order = in_order(schedule.Items(1, 2, 16), causal_lists(16)).tolist()  # two rows per level
    assert order[:8] == [15, 14, 31, 30, 13, 12, 29, 28]
    assert sorted(order) == list(range(32))


@pytest.mark.slow_except("8")
@pytest.mark.parametrize("rows", [1, 7, 8, 19])
def test_every_work_item_occurs_once_in_list_order(rows):
    rng = np.random.default_rng(rows)
    seen = rng.integers(0, 9, (3, 4, rows)).astype(np.int32)
    lists = TileLists(np.zeros((3, 4, rows, 9), np.int32), seen, seen)
    order = in_order(schedule.Items(3, 2, rows), lists, group=2)
    assert sorted(order) == list(range(3 * 2 * rows))
    for owner in range(6):
        b, head = divmod(owner, 2)
        own = [item % rows for item in order if item // rows == owner]
        assert (np.diff(seen[b, 2 * head][own]) <= 0).all()


@pytest.mark.slow_except("132")
@pytest.mark.parametrize("items", [7, 132, 3 * 132 + 5])
def test_work_items_are_each_assigned_once_in_alternating_order(items):
    number = min(items, 132)
    one = np.eye(items, dtype=np.int32)

    def runs(_):
        return programs.each_item(items, lambda i, found: found + jnp.asarray(one)[i], one[0] * 0)

    found = np.asarray(jax.jit(jax.vmap(runs, axis_name="program"))(np.arange(number)))
    turns, places = np.divmod(np.arange(items), number)
    wanted = np.zeros_like(found)
    wanted[np.where(turns % 2 == 0, places, number - 1 - places), np.arange(items)] = 1
    assert (found == wanted).all()


def test_causal_work_is_balanced_across_programs(monkeypatch):
    monkeypatch.setattr(programs, "PROGRAMS", 132)
    weight = np.tile(np.arange(1, 65), 16)  # 16 heads of 8192 queries
    shares = np.zeros(132)
    for place, item in enumerate(in_order(schedule.Items(1, 16, 64), causal_lists(64))):
        turn, program = divmod(place, 132)
        shares[program if turn % 2 == 0 else 131 - program] += weight[item]
    assert shares.max() <= 1.05 * shares.mean()


def test_unsupported_calls_report_reason():
    def reason(dtype="bfloat16", H=64, Hv=64):
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, h), dtype) for h in (H, H, Hv)]
        return hopper.refuse(Target("hopper"), False, *shapes)

    assert reason() is None and reason("float16", 192, 128) is None
    assert "float32" in reason("float32")
    assert reason(H=72) == (
        "head dims are 72 (query, key) and 64 (value): must be multiples of 16 from 32 to 256"
    )
    assert "64 (query, key) and 272" in reason(Hv=272) and "16 (query" in reason(H=16)
    assert reason(H=256, Hv=208) == "H + Hv is 256 + 208: must be at most 448 if H and Hv differ"


def test_hopper_head_dims_must_be_multiples_of_16():
    for H in range(32, 257, 16):
        widths = H, H, 448 - max(H, 192)
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, h), "bfloat16") for h in widths]
        with using(Target("hopper")):
            assert explain_attention(*shapes)["pallas"] is None, H


@pytest.mark.parametrize(
    ("version", "broken"),
    [(12070, False), (12080, True), (12090, True), (13000, False), (13050, False), (None, False)],
)
def test_cuda_version_that_breaks_causal_kernels_is_rejected(version, broken, monkeypatch):
    monkeypatch.setattr(nvidia, "cuda_version", lambda: version)
    shapes = [jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16")] * 3
    reason = hopper.refuse(Target("hopper"), False, *shapes)
    if broken:
        assert f"version {version} may be affected" in reason and "install CUDA 13" in reason
    else:
        assert reason is None
    interpreted = hopper.refuse(Target("hopper", True), False, *shapes)
    assert "CUDA" not in str(interpreted)


@pytest.mark.slow_except("dkdv", "dq", "forward")
@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv", "bias"])
def test_tiles_divide_128_for_every_head_dim(kind):
    for H in hopper.HEAD_DIMS:
        for Hv in hopper.HEAD_DIMS:
            plan = hopper.blocks(kind, H, Hv)
            assert isinstance(plan, Blocks) and 128 % plan.q == 0 == 128 % plan.k


WITH_SLACK = Target("hopper", blocks=(("forward", LAZY),))
NO_MMA = pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
each_nvidia = pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param("pallas", Target("hopper"), id="hopper"),
        pytest.param("pallas", WITH_SLACK, id="slack"),
        *[
            pytest.param("pallas_unordered", Target("hopper"), id="unordered"),
            pytest.param("pallas_unordered", WITH_SLACK, id="unordered, slack"),
        ]
        * hopper.HAS_JAX_11,
        pytest.param("pallas", Target("ampere"), id="ampere", marks=NO_MMA),
    ],
)


@pytest.mark.slow_except("ampere-*", "hopper-plain")
@pytest.mark.parametrize("options", [{}, {"bias": (1, 4, 256, 1)}], ids=["plain", "bias"])
@each_nvidia
def test_gradients_have_same_varying_axes_as_inputs_in_shard_map(name, options, where):
    """Traced, not run: `shard_map` compares types."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    query, key = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))

    def gradients(*inputs):
        bias = jnp.zeros(options["bias"]) if options else None

        def loss(query, key, value):
            settings = dict(mask=Causal(), bias=bias, implementation=name)
            return dot_product_attention(query, key, value, **settings).astype(jnp.float32).sum()

        found = jax.grad(loss, (0, 1, 2))(*inputs)
        assert all(jax.typeof(x).manual_axis_type.varying == {"data"} for x in found)
        return found

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with using(where):
        shapes = jax.eval_shape(mapped, query, key, key)
    assert [x.shape for x in shapes] == [query.shape, key.shape, key.shape]


@pytest.mark.slow
@each_nvidia
def test_kernels_can_be_traced_with_x64_enabled(name, where):
    query, key = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))

    def loss(query, key, value):
        settings = dict(mask=Causal(), bias=ALiBi(jnp.ones(4, jnp.float32)), implementation=name)
        return dot_product_attention(query, key, value, **settings).astype(jnp.float32).sum()

    with jax.enable_x64(True), using(where):
        shapes = jax.eval_shape(jax.grad(loss, (0, 1, 2)), query, key, key)
    assert {x.dtype for x in shapes} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
@pytest.mark.long_except("test_every_mask_matches_reference[composition]")
class TestHopper(InInterpreter):
    implementation = "pallas"
