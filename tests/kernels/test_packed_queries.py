"""Few queries of several heads, packed as rows of one tile.

The whole suite runs with kernels in dense arrays; Hopper's and Ampere's kernels get a few calls in
their interpreter. The oracle is NumPy in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import AttentionSuite, draw, reference
from tests.support.hopper_kernels import INTERPRETS, needs_interpreter
from tests.support.plain_kernels import LARGE, Packing, visited
from tests.support.tolerances import (
    FORWARD_BF16,
    FORWARD_F32,
    GRADIENT_BF16,
    GRADIENT_F32,
    assert_near,
)
from transformer_jax import ALiBi, Causal, Dense, Segments, Window, dot_product_attention
from transformer_jax.attention import fused
from transformer_jax.attention.api import plan_mask
from transformer_jax.kernels import Target, ampere, hopper, using
from transformer_jax.kernels.hopper import programs
from transformer_jax.kernels.packed_queries import PackedQueries

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_mma = pytest.mark.skipif(not ampere.HAS_MMA, reason="jax 0.10 has no mma in Pallas")
GPU = plgpu.InterpretGPUParams() if INTERPRETS is None else False
BACKENDS = [
    pytest.param(Packing(), id="plain"),
    pytest.param(Target("hopper", GPU), id="hopper", marks=needs_interpreter),
    pytest.param(Target("ampere", GPU), id="ampere", marks=needs_interpreter),
]


@pytest.mark.slow_except("test_every_mask_matches_reference[prefix]")
@pytest.mark.long_except(
    "test_any_sequence_length_matches_reference[7x65]",
    "test_any_head_count_and_width_match_reference[(4, 4, 8, 8)]",
    "test_any_head_count_and_width_match_reference[(8, 1, 16, 5)]",
    "test_every_mask_matches_reference[dense]",
    "test_every_mask_matches_reference[prefix]",
    "test_masks_use_positions_in_ring_caches_and_ragged_rows",
    "test_scale_softcap_and_sinks_match_reference[2.0]",
    "test_sinks_far_above_and_below_scores_match_reference",
    "test_array_bias_of_any_broadcast_shape_matches_reference[TS]",
    "test_fully_masked_rows_are_zero_and_do_not_affect_others",
    "test_masked_keys_and_values_have_no_influence[future-3.3e+38]",
    "test_vmap_over_any_argument_matches_loop[('valid', 'bias')]",
    "test_vmap_over_dense_mask_matches_loop",
)
class TestPacking(AttentionSuite):
    implementation = "pallas"
    target = Packing()
    may_refuse = True
    queries, span = 29, 71


def attend_and_pull(arrays, **settings):
    """Return the results of a call and the gradients of all its arrays, like `reference`."""
    inputs = {name: x for name, x in arrays.items() if not name.endswith("_cotangent")}
    settings = dict(implementation="pallas", return_lse=True) | settings

    def attend(inputs):
        optional = {name: inputs.get(name) for name in ("bias", "sinks")}
        return dot_product_attention(
            inputs["query"], inputs["key"], inputs["value"], **optional, **settings
        )

    (out, lse), pull = jax.vjp(attend, inputs)
    [gradients] = pull((arrays["out_cotangent"], arrays["lse_cotangent"]))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}


# Number of tiles


def tiles_of(monkeypatch, target, module, arrays, **settings):
    """Trace a call and its gradient; return the number of query tiles of each kernel."""
    jax.clear_caches()  # a cached program is not traced again
    found = {}
    kernels = {}
    for name, kernel in module.BACKEND.kernels.items():

        def record(problem, operands, lists, blocks, *saved, name=name, kernel=kernel):
            B, T, N, _ = operands.query.shape
            if name != "decode":
                found[name] = B * N * T // blocks.q
            return kernel(problem, operands, lists, blocks, *saved)

        kernels[name] = record
    monkeypatch.setattr(module, "BACKEND", replace(module.BACKEND, kernels=kernels))
    with using(target):
        jax.eval_shape(lambda x: attend_and_pull(x, **settings), arrays)
    return found


def drawn(T, group, K=2, keys=200, **sizes):
    sizes = dict(batch=3, dim=64, value_dim=64, dtype="bfloat16") | sizes
    return draw(7, queries=T, keys=keys, heads=group * K, kv_heads=K, **sizes)


@pytest.mark.slow
@pytest.mark.long_except("1-2-1", "64-8-4")
@pytest.mark.parametrize(
    ("T", "group", "rows"), [(1, 2, 1), (5, 8, 1), (16, 8, 1), (31, 4, 1), (64, 2, 1), (64, 8, 4)]
)
def test_grouped_queries_are_packed_on_hopper(T, group, rows, monkeypatch):
    """The forward and dq kernels have `rows` tiles of 128 queries for each key head.

    The dk/dv kernel has tiles of 64. Without packing, each query head has its own tiles.
    """
    arrays = drawn(T, group)
    call = monkeypatch, Target("hopper"), hopper, arrays
    of_64 = -(-T * group // 64)
    assert tiles_of(*call, mask=Causal()) == {
        "forward": 3 * 2 * rows, "dq": 3 * 2 * rows, "dkdv": 3 * 2 * of_64
    }  # fmt: skip
    monkeypatch.setattr(hopper, "BACKEND", replace(hopper.BACKEND, packs=False))
    assert tiles_of(*call, mask=Causal()) == {
        "forward": 3 * 2 * group, "dq": 3 * 2 * group, "dkdv": 3 * 2 * group * 2
    }  # fmt: skip


@pytest.mark.slow
@needs_mma
def test_grouped_queries_are_packed_on_ampere(monkeypatch):
    arrays = drawn(16, 8) | {"bias": jnp.zeros((1, 16, 16, 200), jnp.bfloat16)}
    call = monkeypatch, Target("ampere"), ampere, arrays
    assert tiles_of(*call) == {k: 3 * 2 * 2 for k in ("forward", "dq", "dkdv", "bias")}
    monkeypatch.setattr(ampere, "BACKEND", replace(ampere.BACKEND, packs=False))
    assert tiles_of(*call) == {k: 3 * 2 * 8 for k in ("forward", "dq", "dkdv", "bias")}


@pytest.mark.slow
@pytest.mark.skipif(not hopper.HAS_JAX_11, reason="the single-pass backward needs jax 0.11")
def test_single_pass_backward_receives_packed_queries(monkeypatch):
    call = monkeypatch, Target("hopper"), hopper, drawn(16, 8)
    tiles = tiles_of(*call, implementation="pallas_unordered")
    assert tiles == {"forward": 3 * 2, "single_pass": 3 * 2 * 2}


APART = {
    "as many heads": (dict(T=16, group=1), {}),
    "no fewer tiles": (dict(T=128, group=8), {}),
    "more than half as many": (dict(T=65, group=8), {}),
    "dropout": (dict(T=16, group=8), dict(dropout_rate=0.1, dropout_key=jax.random.key(0))),
    "slopes": (dict(T=16, group=8), dict(bias=ALiBi(jnp.ones(16)))),
    "a bias of heads alone": (dict(T=16, group=8), dict(bias=jnp.zeros((1, 16, 1, 200)))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "settings"), APART.values(), ids=APART)
def test_queries_are_packed_only_if_beneficial_and_inputs_allow(sizes, settings, monkeypatch):
    arrays = drawn(**sizes) | {name: x for name, x in settings.items() if name == "bias"}
    settings = {name: x for name, x in settings.items() if name != "bias"}
    found = tiles_of(monkeypatch, Target("hopper"), hopper, arrays, **settings)
    heads = 2 * sizes["group"]
    assert found["forward"] == 3 * heads * -(-sizes["T"] // 128)


@pytest.fixture
def packs(monkeypatch):
    """Record for each plan whether queries are packed."""
    found, make = [], fused.mask_operands
    record = lambda call: found.append(call.plan.packs) or make(call)  # noqa: E731
    monkeypatch.setattr(fused, "mask_operands", record)
    return found


@pytest.mark.slow
def test_planned_mask_is_reused_for_packed_calls(packs):
    """Otherwise each layer would make its own tile lists."""
    arrays = drawn(29, 2, dtype="float32")
    inputs = [arrays[name] for name in ("query", "key", "value")]
    mask = Causal() & Segments(jnp.arange(200)[None] // 90)
    with using(Packing()):
        planned = plan_mask(*inputs, mask=mask, implementation="pallas")
        found = attend_and_pull(arrays, mask=planned)
    assert packs == [True]
    seen = np.tri(29, 200, dtype=bool)[None, None]
    for name, expected in reference(arrays, seen).items():
        assert_near(found[name], expected, GRADIENT_F32, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv"])
def test_packed_rows_visit_only_tiles_visible_to_any_query(kind):
    """Each head has its own mask: a tile counts if any head of the group sees it."""
    rng = np.random.default_rng(3)
    few = rng.random((3, 4, 1, 200)) < 0.03
    seen = np.broadcast_to(few, (3, 4, 24, 200)) & (rng.random((3, 4, 24, 200)) < 0.5)
    inputs = [drawn(24, 2)[name] for name in ("query", "key", "value")]
    with using(Packing()):
        planned = plan_mask(*inputs, mask=Dense(jnp.asarray(seen)), implementation="pallas")
    blocks, by_key = LARGE[kind], kind == "dkdv"
    lists = PackedQueries(24, 2, blocks.q).lists(planned.shared.lists[kind], by_key)
    visits = np.asarray(visited(lists, (1, 1), not by_key)[0])
    by_head = np.pad(seen.any(axis=2), ((0, 0), (0, 0), (0, 224 - 200)))
    tiles = by_head.reshape(3, 2, 2, 224 // blocks.k, blocks.k).any(axis=(2, 4))
    assert visits.shape == (3, 2, -(-48 // blocks.q), 224 // blocks.k)
    assert 0.1 < tiles.mean() < 0.9 and (visits == tiles[:, :, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize("level", [-20.3, -1000.3, 1000.3])
def test_log_sum_exp_is_exact_for_extreme_sinks(level):
    """The lse of a sink far above the scores is the sink, and must not be a difference."""
    arrays = draw(5, queries=5, keys=31, heads=6, kv_heads=2)
    arrays["query"] = jnp.zeros_like(arrays["query"]).at[..., 0].set(1)
    arrays["key"] = arrays["key"].at[..., 0].set(level)
    arrays["sinks"] = jnp.linspace(-0.3, 0.2, 6)
    expected = reference(arrays, scale=1.0)
    with using(Packing()):
        found = attend_and_pull(arrays, scale=1.0)
    for name, value in expected.items():
        assert_near(found[name], value, FORWARD_F32 if name == "lse" else GRADIENT_F32, name)


# In the interpreter


@dataclass(frozen=True, kw_only=True)
class Call:
    T: int
    group: int
    K: int = 1
    S: int = 150
    mask: str = "causal"
    bias: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None

    def arrays(self, width: int) -> dict[str, Any]:
        sizes = dict(batch=2, keys=self.S, dim=width, value_dim=width)
        arrays = drawn(self.T, self.group, self.K, **sizes)
        rng, heads = np.random.default_rng(8), self.group * self.K
        if self.bias:
            arrays["bias"] = jnp.asarray(rng.normal(size=self.bias), jnp.bfloat16)
        if self.sinks:
            arrays["sinks"] = jnp.asarray(np.linspace(-2, 3, heads), jnp.float32)
        return arrays

    def masked(self) -> tuple[Any, np.ndarray, dict[str, Any]]:
        """Return the mask, the same mask as an array, and positions."""
        q = np.arange(self.S - self.T, self.S)[None, :, None]
        k = np.arange(self.S)[None, None]
        positions = dict(q_positions=jnp.asarray(q[0, :, 0], jnp.int32))
        match self.mask:
            case "causal":
                return Causal(), (k <= q)[:, None], positions
            case "window in documents":
                ids = np.arange(self.S)[None] // np.array([[70], [23]])
                mask = Causal() & Window(31) & Segments(jnp.asarray(ids, jnp.int32))
                of_q = ids[:, self.S - self.T :]
                seen = (k <= q) & (q - k < 31) & (of_q[:, :, None] == ids[:, None])
                return mask, seen[:, None], positions
            case "empty slots":
                at = np.where(np.arange(self.S) < np.array([[self.S], [40]]), k[0], -1)
                at[0, ::3] = -1
                positions["k_positions"] = jnp.asarray(at, jnp.int32)
                return Causal(), ((at >= 0)[:, None] & (k <= q))[:, None], positions
            case "matrix of heads":
                rng = np.random.default_rng(9)
                seen = rng.random((2, self.group * self.K, self.T, self.S)) < 0.4
                seen[0, 0, 0], seen[:, 1, :, :130], seen[:, 2:, :, :130] = False, True, False
                return Dense(jnp.asarray(seen)), seen, {}
        raise ValueError(self.mask)


CALLS = {
    "one query, two heads": Call(T=1, group=2, K=2, mask="empty slots"),
    "three heads, sinks": Call(T=5, group=3, sinks=True, mask="window in documents"),
    "eight heads, bias of each": Call(T=16, group=8, bias=(1, 8, 16, 150), softcap=2.5),
    "matrix of heads, bias of queries": Call(
        T=29, group=4, mask="matrix of heads", bias=(2, 1, 29, 150), sinks=True
    ),
    "tiles of several heads": Call(T=31, group=8, K=2, mask="window in documents"),
    "bias of keys": Call(T=5, group=8, bias=(1, 1, 1, 150), mask="empty slots", sinks=True),
}


@pytest.fixture
def two_programs(monkeypatch):
    """Run so few programs that each of them has several items and reuses every slot."""
    monkeypatch.setattr(programs, "PROGRAMS", 2)


@pytest.mark.slow
@pytest.mark.long_except(
    "*-one query, two heads", "*-three heads, sinks", "ampere-bias of keys", "hopper-bias of keys"
)
@pytest.mark.usefixtures("two_programs")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("target", BACKENDS)
def test_packed_queries_and_gradients_match_reference(target, call, packs):
    arrays, (mask, seen, positions) = call.arrays(32), call.masked()
    with using(target):
        found = jax.jit(lambda x: attend_and_pull(x, mask=mask, softcap=call.softcap, **positions))(
            arrays
        )
    assert packs == [True]
    expected = reference(arrays, seen, softcap=call.softcap)
    assert found.keys() == expected.keys() and expected["dkey"].any()
    nothing = np.isneginf(expected["lse"])
    assert (np.isneginf(np.asarray(found["lse"])) == nothing).all()
    for name in ("out", "dquery"):
        assert not np.asarray(found[name], np.float32)[nothing].any(), name
    for one in (found, expected):
        one["lse"] = np.where(nothing, 0, one["lse"])
    for name, value in expected.items():
        limit = FORWARD_BF16 if name in ("out", "lse") else GRADIENT_BF16
        assert_near(np.asarray(jnp.asarray(found[name]), np.float32), value, limit, name)


@pytest.mark.slow
@pytest.mark.long_except("value")
@pytest.mark.usefixtures("two_programs")
@needs_interpreter
@pytest.mark.parametrize("name", ["value", "key"])
def test_nan_affects_only_packed_queries_that_attend_to_it(name):
    """Both heads of the second key head are NaN from query 3 on, despite their sinks."""
    arrays = Call(T=5, group=2, K=2, sinks=True).arrays(32)
    mask, seen, positions = Call(T=5, group=2).masked()
    bad = arrays | {name: arrays[name].at[1, 150 - 2, 1, 3].set(jnp.nan)}
    lost = np.zeros((2, 5, 4), bool)
    lost[1, 3:, 2:] = True
    silent = {
        x: jnp.where(lost.reshape(lost.shape + (1,) * (arrays[x].ndim - 3)), 0, arrays[x])
        for x in ("out_cotangent", "lse_cotangent")
    }
    with using(Target("hopper", GPU)):
        found = jax.jit(lambda x: attend_and_pull(x, mask=mask, **positions))(bad)
    expected = reference(arrays | silent, seen)
    for x in ("out", "lse"):
        result = np.asarray(found[x], np.float32)
        assert np.isnan(result[lost]).all(), x
        assert_near(result[~lost], expected[x][~lost], FORWARD_BF16, x)
    for x in ("dquery", "dkey", "dvalue", "dsinks"):
        result = np.asarray(found[x], np.float32)
        assert x != "dquery" or not result[lost].any()
        assert_near(result, expected[x], GRADIENT_BF16, x)


@pytest.mark.long
@needs_interpreter
def test_packed_queries_with_single_pass_backward_match_reference(packs):
    call = Call(T=16, group=8, mask="window in documents", bias=(2, 8, 16, 150), sinks=True)
    arrays, (mask, seen, positions) = call.arrays(32), call.masked()
    settings = dict(mask=mask, implementation="pallas_unordered", **positions)
    with using(Target("hopper", GPU)):
        found = jax.jit(lambda x: attend_and_pull(x, **settings))(arrays)
    assert packs == [True]
    for name, value in reference(arrays, seen).items():
        limit = FORWARD_BF16 if name in ("out", "lse") else GRADIENT_BF16
        assert_near(np.asarray(jnp.asarray(found[name]), np.float32), value, limit, name)
