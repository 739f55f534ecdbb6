"""The Hopper kernels in the interpreter, which looks for races, against NumPy in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

pytest.register_assert_rewrite("attention_suite", "tolerances")

from attention_suite import Bfloat16Suite  # noqa: E402
from tolerances import largest_error  # noqa: E402

from transformer_jax import ALiBi, Causal, dot_product_attention  # noqa: E402
from transformer_jax.kernels import Target, hopper, using  # noqa: E402
from transformer_jax.kernels.contract import (  # noqa: E402
    Blocks,
    Lists,
    Operands,
    Problem,
    Saved,
    keep,
)

INTERPRETS = hopper.refuse(
    Problem(scale=1.0, interpret=True), *[jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)] * 3
)
needs_interpreter = pytest.mark.skipif(INTERPRETS is not None, reason=str(INTERPRETS))

NEAR = 6e-3  # of the largest value: products of bfloat16 weights, summed in float32
EXACT = 3e-6  # sums in float32


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """So few that each has several items, and reuses every slot."""
    monkeypatch.setattr(hopper, "PROGRAMS", 2)


# Masks, of vectors (position, document)


def causal(q, k):
    return (k[0] >= 0) & (q[0] >= k[0])


def window_in_document(q, k):
    return causal(q, k) & (q[0] - k[0] < 101) & (q[1] == k[1])


def without_a_key(q, k):
    return (k[0] >= 0) & (k[0] != 50) & (q[0] > -1000)


def prefix_or_causal(q, k):
    return (k[0] >= 0) & ((k[0] < 71) | ~(q[0] < k[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    B: int = 1
    T: int = 167
    S: int = 211
    N: int = 2
    K: int = 1
    H: int = 64
    Hv: int = 64
    dtype: str = "bfloat16"
    visible: object = causal
    scale: float = 0.125
    softcap: float | None = None
    dropout_rate: float = 0.0
    bias: tuple[int, ...] | None = None  # with T and S, or 1
    bias_dtype: str = "float32"
    slopes: bool = False
    sinks: bool = False

    @property
    def problem(self):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        softcap, rate = self.softcap, self.dropout_rate
        return Problem(self.scale, softcap, rate, self.visible, interpret=interpret)


def up(size, tile=128):
    return -(-size // tile) * tile


def draw(case, seed=0):
    """Padded operands and do; queries stand at the end of the keys."""
    c, rng = case, np.random.default_rng(seed)
    T, S = up(c.T), up(c.S)

    def padded(length, *shape, fill=0.0, dtype=c.dtype):
        array = rng.standard_normal((c.B, length, *shape))
        array = np.pad(array, ((0, 0), (0, up(length) - length), (0, 0), (0, 0)))
        return jnp.asarray(array, dtype)

    def vectors(length, end, first):
        position = np.arange(end) + first
        documents = np.arange(end) // 90 + np.arange(c.B)[:, None]
        position = np.where(np.arange(end) < length, position, -1)
        return jnp.asarray(position[None], jnp.int32), jnp.asarray(documents, jnp.int32)

    bias = None
    if c.bias:
        b, n, t, s = c.bias
        bias = np.zeros((b, n, up(t) if t > 1 else 1, up(s) if s > 1 else 1))
        bias[:, :, :t, :s] = rng.standard_normal(c.bias)
        bias = jnp.asarray(bias, c.bias_dtype)
    words = rng.integers(0, 2**32, (2, c.B, c.N), dtype=np.uint32)
    operands = Operands(
        query=padded(c.T, c.N, c.H),
        key=padded(c.S, c.K, c.H),
        value=padded(c.S, c.K, c.Hv),
        q_vectors=vectors(T, T, c.S - c.T),
        k_vectors=vectors(c.S, S, 0),
        bias=bias,
        slopes=jnp.asarray(0.03 * np.arange(1, c.N + 1)[None], jnp.float32) if c.slopes else None,
        sinks=jnp.asarray(np.linspace(-1, 2, c.N)[None], jnp.float32) if c.sinks else None,
        dropout=jnp.asarray(words) if c.dropout_rate else None,
    )
    return operands, padded(c.T, c.N, c.Hv)


def seen_by(case, operands):  # bool[B, 1, T, S]
    if case.visible is None:
        return np.ones((case.B, 1, operands.query.shape[1], operands.key.shape[1]), bool)
    q = tuple(np.asarray(v)[:, None, :, None] for v in operands.q_vectors)
    k = tuple(np.asarray(v)[:, None, None, :] for v in operands.k_vectors)
    mask = np.asarray(case.visible(q, k))
    return np.broadcast_to(mask, (case.B, *mask.shape[1:]))


def lists_of(mask, rows, columns):  # bool[B, N or 1, T, S] or its transpose
    B, N, T, S = mask.shape
    tiles = mask.reshape(B, N, T // rows, rows, S // columns, columns)
    full, some = tiles.all((3, 5)), tiles.any((3, 5))
    kind = np.where(full, 0, np.where(some, 1, 2))
    order = np.argsort(kind, axis=-1, kind="stable")
    seen = some.sum(-1)
    last = np.take_along_axis(order, np.maximum(seen - 1, 0)[..., None], -1)
    order = np.where(
        np.arange(order.shape[-1]) < seen[..., None], order, last * (seen > 0)[..., None]
    )
    return Lists(*(jnp.asarray(x, jnp.int32) for x in (order, full.sum(-1), seen)))


def oracle(case, operands, do):
    """The contract's formulas on dense float64 arrays [B, N, T, S]."""
    c, o = case, operands
    G = c.N // c.K

    def wide(x):
        return np.asarray(x.astype(jnp.float32), np.float64)

    q, do = wide(o.query), wide(do)
    k, v = (np.repeat(wide(x), G, axis=2) for x in (o.key, o.value))
    T, S = q.shape[1], k.shape[1]
    mask = seen_by(c, o)
    s = np.einsum("btnh,bsnh->bnts", q, k) * c.scale
    slope = np.ones_like(s)
    if c.softcap:
        tanh = np.tanh(s / c.softcap)
        s, slope = c.softcap * tanh, 1 - tanh**2
    if o.bias is not None:
        s = s + wide(o.bias)
    far = np.abs(np.asarray(o.q_vectors[0])[:, :, None] - np.asarray(o.k_vectors[0])[:, None])
    if c.slopes:
        s = s - wide(o.slopes)[:, :, None, None] * far[:, None]
    s = np.where(mask, s, -np.inf)
    live = mask.any(-1) & np.ones((1, c.N, 1), bool)
    m = np.where(live, s.max(-1), 0)
    total = np.exp(s - m[..., None]).sum(-1)
    if c.sinks:
        sink = wide(o.sinks)[:, :, None]
        grown = np.maximum(m, sink)
        total = np.where(live, total * np.exp(m - grown) + np.exp(sink - grown), total)
        m = np.where(live, grown, m)
    total = np.where(live, total, 1)
    p = np.exp(s - m[..., None]) / total[..., None]
    f = np.ones_like(p)
    if c.dropout_rate:
        rows, columns = (jnp.arange(n, dtype=jnp.uint32) for n in (T, S))
        a, b = (word[:, :, None, None] for word in o.dropout)
        f = keep(a, b, rows[None, None, :, None], columns[None, None, None, :], c.dropout_rate)
        f = np.asarray(f) / (1 - c.dropout_rate)
    out = np.einsum("bnts,bsnh->btnh", p * f, v)
    D = np.einsum("btnh,btnh->bnt", out, do)
    ds = p * (f * np.einsum("btnh,bsnh->bnts", do, v) - D[..., None])
    du = ds * slope
    by_group = lambda x: x.reshape(*x.shape[:2], c.K, G, -1).sum(3)  # noqa: E731
    results = {
        "out": out,
        "high": np.where(live, m, -np.inf),
        "log": np.log(total),
        "dq": np.einsum("bnts,bsnh->btnh", du, k) * c.scale,
        "slope_rows": -(ds * far[:, None]).sum(-1),
        "dk": by_group(np.einsum("bnts,btnh->bsnh", du, q)) * c.scale,
        "dv": by_group(np.einsum("bnts,btnh->bsnh", p * f, do)),
        "ds": ds,
    }
    high = np.where(live, m, np.inf)
    saved = Saved(*(jnp.asarray(x, jnp.float32) for x in (do, high, np.log(total), D)))
    return results, saved


def run_forward(case, operands, plan=None):
    plan = plan or hopper.blocks("forward", case.H, case.Hv)
    lists = lists_of(seen_by(case, operands), plan.q, plan.k)
    forward = jax.jit(functools.partial(hopper.forward, case.problem, blocks=plan))
    return dict(zip(("out", "high", "log"), forward(operands, lists), strict=True))


def run_gradients(case, operands, saved, kinds=("queries", "keys")):
    mask, results = seen_by(case, operands), {}
    for kind in kinds:
        plan = hopper.blocks(kind, case.H, case.Hv)
        turned = kind == "keys"
        lists = lists_of(mask.swapaxes(2, 3), plan.k, plan.q) if turned else (
            lists_of(mask, plan.q, plan.k)
        )  # fmt: skip
        function = getattr(hopper, f"gradient_{kind}")
        function = jax.jit(functools.partial(function, case.problem, blocks=plan))
        got = function(operands, lists, saved=saved)
        names = {"queries": ("dq", "slope_rows"), "keys": ("dk", "dv")}.get(kind, ("bias",))
        results |= zip(names, got if isinstance(got, tuple) else (got,), strict=True)
    return {name: value for name, value in results.items() if value is not None}


def assert_near(got, expected, tolerance, name):
    got = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64)
    dead = np.isneginf(expected)
    assert (np.isneginf(got) == dead).all(), name
    got, expected = np.where(dead, 0, got), np.where(dead, 0, expected)
    assert largest_error(got, expected) <= tolerance * np.abs(expected).max() + 1e-6, name


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
}


@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_gradients_match_the_dense_oracle(case):
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    saved = saved._replace(do=do)
    got = run_forward(case, operands) | run_gradients(case, operands, saved)
    assert {"out", "high", "log", "dq", "dk", "dv"} <= got.keys()
    assert ("slope_rows" in got) == case.slopes
    for name, value in got.items():
        tolerance = EXACT if name in ("high", "log", "slope_rows") else NEAR
        assert_near(value, expected[name], tolerance, name)
    assert got["out"].dtype == got["dk"].dtype == operands.query.dtype


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, on products that overflow
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_what_overflows_behind_a_mask_stays_there(rate):
    case = Case(T=128, S=128, N=1, visible=without_a_key, dropout_rate=rate)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    hidden = operands._replace(value=operands.value.at[:, 50].set(3e38))
    assert not jnp.isfinite((hidden.value[:, 50:51] * do).astype(jnp.float32).sum(-1)).all()
    got = run_gradients(case, hidden, saved._replace(do=do))
    for name in ("dq", "dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


@needs_interpreter
def test_vectors_that_are_not_copied_with_a_tile_are_read(monkeypatch):
    monkeypatch.setattr(hopper, "COPIED", 1)
    case = Case(visible=window_in_document, slopes=True)
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    got = run_forward(case, operands) | run_gradients(case, operands, saved._replace(do=do))
    for name in ("out", "dq", "dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


@needs_interpreter
@pytest.mark.parametrize("plan", [Blocks(64, 64, 2), Blocks(192, 64, 3)], ids=["one", "three"])
def test_one_or_three_warpgroups_multiply_without_turns(plan):
    case = Case(T=384, S=130, visible=window_in_document)
    operands, do = draw(case)
    expected = oracle(case, operands, do)[0]
    got = run_forward(case, operands, plan)
    for name in ("out", "high", "log"):
        assert_near(got[name], expected[name], NEAR if name == "out" else EXACT, name)


@needs_interpreter
def test_the_forward_kernel_needs_two_tiles_in_flight():
    case = Case(T=128, S=128)
    operands, _ = draw(case)
    with pytest.raises(ValueError, match="stages is 1: the forward kernel needs at least 2"):
        run_forward(case, operands, Blocks(128, 128, 1))


@needs_interpreter
@pytest.mark.parametrize("slack", [-1.0, 16.0, float("nan")])
def test_a_slack_that_would_overflow_is_refused(slack):
    case = Case(T=128, S=128)
    operands, _ = draw(case)
    with pytest.raises(ValueError, match=f"slack is {slack}: must be from 0 to 15"):
        run_forward(case, operands, Blocks(128, 128, slack=slack))


@needs_interpreter
@pytest.mark.parametrize("shape", [(2, 2, 167, 211), (1, 2, 1, 211), (1, 1, 167, 1), (2, 1, 1, 1)])
def test_gradient_of_a_bias_has_its_shape_and_sums(shape):
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


@needs_interpreter
def test_a_row_that_sees_nothing_is_zero_and_passes_nothing_on():
    case = Case(T=256, S=128, sinks=True)  # the first 128 queries stand before every key
    operands, do = draw(case)
    expected, saved = oracle(case, operands, do)
    dead = np.isneginf(expected["high"])
    assert dead[:, :, :128].all() and not dead[:, :, 128:].any()
    got = run_forward(case, operands) | run_gradients(case, operands, saved._replace(do=do))
    assert (np.isneginf(got["high"]) == dead).all()
    assert (np.asarray(got["log"])[dead] == 0).all()
    for name in ("out", "dq"):
        assert (np.asarray(got[name], np.float32)[:, :128] == 0).all(), name
    for name in ("dk", "dv"):
        assert_near(got[name], expected[name], NEAR, name)


LAZY = Blocks(128, 64, 2, slack=8.0)
RISING = {  # by how much, in base 2, from one tile of keys to the next
    "within the slack": (Case(S=331), [5, 5, 5, 5, 5]),
    "at once, float16, cap and sinks": (
        Case(S=331, N=4, K=2, dtype="float16", softcap=40.0, sinks=True), [0, 3, 30, -30, 2]
    ),
    "at once, window in documents": (
        Case(B=2, T=263, S=263, visible=window_in_document), [5, 40, 7, 7]
    ),
}  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize(("case", "steps"), RISING.values(), ids=RISING)
def test_a_maximum_that_is_kept_while_the_slack_lasts_changes_no_result(case, steps):
    operands, do = draw(case)
    levels = np.cumsum([0, *steps]).repeat(LAZY.k)[: case.S] * np.log(2) / case.scale / 32
    levels = jnp.asarray(np.pad(levels, (0, operands.key.shape[1] - case.S)), case.dtype)
    operands = operands._replace(
        query=operands.query.at[..., 0].set(32), key=operands.key.at[..., 0].set(levels[:, None])
    )
    expected, saved = oracle(case, operands, do)
    got = run_forward(case, operands, LAZY)
    live = np.isfinite(expected["high"])
    behind = (expected["high"][live] - np.asarray(got["high"], np.float64)[live]) / np.log(2)
    assert 1 < behind.max() < LAZY.slack + 0.01 and behind.min() > -0.01
    high = jnp.where(jnp.isneginf(got["high"]), jnp.inf, got["high"])
    saved = saved._replace(do=do, high=high, log=got["log"])
    got |= run_gradients(case, operands, saved) | {"lse": got["high"] + got["log"]}
    expected["lse"] = expected["high"] + expected["log"]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_near(got[name], expected[name], EXACT if name == "lse" else NEAR, name)


@needs_interpreter
def test_the_first_score_is_the_maximum_however_low_and_however_much_slack():
    case = Case(T=256, S=256, bias=(1, 1, 1, 256))
    operands, do = draw(case)
    low = operands.bias.at[..., :64].set(-1.8e38).at[..., 64:128].set(-np.inf)
    operands = operands._replace(bias=low)
    expected, _ = oracle(case, operands, do)
    got = run_forward(case, operands, LAZY)
    assert (np.asarray(got["high"])[:, :, :128] < -1.7e38).all()
    assert_near(got["out"], expected["out"], NEAR, "out")
    for rows in (np.s_[:, :, :128], np.s_[:, :, 128:]):
        lse = (np.asarray(x["high"] + x["log"])[rows] for x in (got, expected))
        assert_near(*lse, EXACT, "lse")


@needs_interpreter
def test_a_rounded_sum_of_maximum_and_slack_lets_no_weight_overflow_in_float16():
    case = Case(T=128, S=128, N=1, visible=None, scale=np.log(2), dtype="float16")
    operands, do = draw(case)
    query = jnp.zeros_like(operands.query).at[..., 0].set(2**13).at[..., 1].set(4)
    key = jnp.zeros_like(operands.key).at[..., 0].set(2**14).at[..., 1].set(4)
    operands = operands._replace(query=query, key=key.at[:, 64:, :, 1].set(8))
    assert np.float32(2**27 + 16) + np.float32(LAZY.slack) == 2**27 + 32, "the scores of both tiles"
    got = run_forward(case, operands, LAZY)
    assert_near(got["out"], oracle(case, operands, do)[0]["out"], NEAR, "out")


@needs_interpreter
def test_very_low_scores_that_are_visible_count():
    case = Case(S=167, bias=(1, 1, 167, 1))
    operands, do = draw(case)
    operands = operands._replace(bias=operands.bias - 1e5)
    got = run_forward(case, operands)
    plain = oracle(case, operands._replace(bias=jnp.zeros_like(operands.bias)), do)[0]
    assert (np.asarray(got["high"])[:, :, :167] < -9e4).all()
    assert_near(got["out"][:, :167], plain["out"][:, :167], 3e-2, "out")


@needs_interpreter
@pytest.mark.parametrize(
    ("array", "poison", "plan"),
    [("key", np.inf, None), ("value", np.nan, None), ("key", np.inf, LAZY)],
    ids=["key", "value", "slack"],
)
def test_what_is_not_finite_is_marked_where_a_partial_tile_holds_it_and_nowhere_else(
    array, poison, plan
):
    case = Case(T=256, S=256, N=1)
    operands, _ = draw(case)
    clean = run_forward(case, operands, plan)
    poisoned = getattr(operands, array).at[0, 200, 0, 5].set(poison)
    got = run_forward(case, operands._replace(**{array: poisoned}), plan)
    marked = np.isnan(np.asarray(got["log"]))[0, 0]
    assert marked[128:].all(), "the rows of the tile with key 200"
    assert not marked[:128].any(), "rows that skip it"
    for name in ("out", "high", "log"):
        axis = 1 if name == "out" else 2
        first = [np.take(np.asarray(x[name], np.float32), range(128), axis) for x in (clean, got)]
        np.testing.assert_array_equal(*first)


@needs_interpreter
def test_the_number_of_programs_changes_no_bit(monkeypatch):
    case = Case()
    operands, do = draw(case)
    saved = oracle(case, operands, do)[1]._replace(do=do)
    results = []
    for programs in (1, 3):
        monkeypatch.setattr(hopper, "PROGRAMS", programs)
        results.append(
            run_forward(case, operands) | run_gradients(case, operands, saved, ("keys",))
        )
    for name in results[0]:
        np.testing.assert_array_equal(*(np.asarray(x[name], np.float32) for x in results), name)


def test_heavy_items_come_first_and_those_of_one_level_in_order():
    tiles = jnp.arange(1, 17)  # causal, 16 tiles a head: two of each level
    order = hopper.schedule(jnp.stack([tiles, tiles])).tolist()
    assert order[:8] == [14, 15, 30, 31, 12, 13, 28, 29]
    assert sorted(order) == list(range(32))


def test_programs_share_causal_work_evenly(monkeypatch):
    monkeypatch.setattr(hopper, "PROGRAMS", 132)
    weight = np.tile(np.arange(1, 65), 16)  # 16 heads of 8192 queries
    shares = np.zeros(132)
    for place, item in enumerate(np.asarray(hopper.schedule(jnp.asarray(weight)))):
        turn, program = divmod(place, 132)
        shares[program if turn % 2 == 0 else 131 - program] += weight[item]
    assert shares.max() <= 1.05 * shares.mean()


def test_what_cannot_be_done_is_named():
    def reason(dtype="bfloat16", H=64, Hv=64):
        shapes = [jax.ShapeDtypeStruct((1, 128, 2, h), dtype) for h in (H, H, Hv)]
        return hopper.refuse(Problem(scale=1.0), *shapes)

    assert reason() is None and reason("float16", 192, 128) is None
    assert "float32" in reason("float32")
    assert "80" in reason(H=80)


@pytest.mark.parametrize("kind", ["forward", "queries", "keys", "bias"])
def test_every_head_dim_has_tiles_that_divide_128(kind):
    for H in hopper.HEAD_DIMS:
        for Hv in hopper.HEAD_DIMS:
            plan = hopper.blocks(kind, H, Hv)
            assert isinstance(plan, Blocks) and 128 % plan.q == 0 == 128 % plan.k


WITH_SLACK = Target("hopper", blocks=(("forward", LAZY),))


@pytest.mark.parametrize("where", [Target("hopper"), WITH_SLACK], ids=["", "slack"])
@pytest.mark.parametrize("options", [{}, {"bias": (1, 4, 256, 1)}], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ["pallas"] + ["pallas_unordered"] * hopper.HAS_JAX_11)
def test_inside_a_shard_map_what_comes_back_varies_as_the_inputs_do(name, options, where):
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


@pytest.mark.parametrize("where", [Target("hopper"), WITH_SLACK], ids=["", "slack"])
@pytest.mark.parametrize("name", ["pallas"] + ["pallas_unordered"] * hopper.HAS_JAX_11)
def test_the_kernels_trace_where_python_integers_have_64_bits(name, where):
    query, key = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2))

    def loss(query, key, value):
        settings = dict(mask=Causal(), bias=ALiBi(jnp.ones(4, jnp.float32)), implementation=name)
        return dot_product_attention(query, key, value, **settings).astype(jnp.float32).sum()

    with jax.enable_x64(True), using(where):
        shapes = jax.eval_shape(jax.grad(loss, (0, 1, 2)), query, key, key)
    assert {x.dtype for x in shapes} == {jnp.dtype("bfloat16")}


@pytest.mark.skipif(INTERPRETS is not None, reason=str(INTERPRETS))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, on products that overflow
class InInterpreter(Bfloat16Suite):
    """Kernels behind `dot_product_attention`, in the interpreter."""

    target = Target("hopper", plgpu.InterpretGPUParams() if INTERPRETS is None else False)
    known = {
        "test_scores_of_a_hundred_thousand_are_finite_and_right[float16]": "the product of a score "
        "with log2(e) is rounded before the maximum is subtracted: 0.4 % of a weight at 6e4",
        "test_array_bias_of_any_broadcast_shape_and_its_gradient[]": "the sum of all differences, "
        "nearly 0, is the rounding of 280,000 numbers in bfloat16",
        "test_rematerialised_gradients_are_the_same_with_dropout_on": "the interpreter's callbacks "
        "are effects, which jax.checkpoint does not take",
        "test_float32_stays_float32_when_x64_is_on": "the interpreter's threads are outside of the "
        "context that turns x64 on",
    } | {
        f"test_vmap_over_{what}_is_a_loop{case}": "the interpreter's callbacks are effects, which "
        "jax.vmap does not take"
        for what, case in (
            *(
                ("any_argument", f"[{x}]")
                for x in (("query",), ("key", "value"), ("valid", "bias"))
            ),
            ("a_matrix", ""),
        )
    }


class TestHopper(InInterpreter):
    implementation = "pallas"
    every_time = frozenset(
        {
            "test_an_infinity_that_is_seen_makes_its_rows_nan[key]",
            "test_every_mask_matches_the_oracle[window]",
            "test_every_mask_matches_the_oracle[composition]",
            "test_masked_keys_and_values_have_no_influence[padding-3.4e+38]",
        }
    )
