"""Every implementation of attention against the float64 oracle, and the choice of one."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle

pytest.register_assert_rewrite("attention_suite", "tolerances")

from tests.support.attention_suite import NonfiniteSuite, draw, key_of, reference  # noqa: E402
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits  # noqa: E402
from transformer_jax import cache  # noqa: E402
from transformer_jax.attention import api  # noqa: E402
from transformer_jax.attention.additive import additive_attention, state_attention  # noqa: E402
from transformer_jax.attention.api import (  # noqa: E402
    dot_product_attention,
    dot_product_attention_weights,
    explain_attention,
)
from transformer_jax.attention.arguments import AttentionCall, check_call  # noqa: E402
from transformer_jax.attention.biases import ALiBi, alibi_slopes  # noqa: E402
from transformer_jax.attention.blockwise.tiles import Sizes, visited_tiles  # noqa: E402
from transformer_jax.attention.cudnn import Cudnn  # noqa: E402
from transformer_jax.attention.masks import (  # noqa: E402
    Causal,
    Dense,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.config import ModelConfig  # noqa: E402
from transformer_jax.kernels import cpu  # noqa: E402
from transformer_jax.models.factory import build, init_params  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAMES = ("xla", "blockwise", "pallas", "pallas_unordered", "cudnn", "native")
compiled = pytest.mark.skipif(isinstance(cpu.library(), str), reason=str(cpu.library()))
WHERE_COMPILED = pytest.param("native", marks=compiled)
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is an accelerator")


@pytest.mark.slow_except(
    "test_every_mask_matches_reference[composition]",
    "test_all_options_combined_match_reference",
    "test_dropout_matches_rate_and_preserves_mean",
    "test_empty_axes_produce_empty_or_zero_results",
    "test_masked_keys_and_values_have_no_influence",
)
class TestXla(NonfiniteSuite):
    implementation = "xla"


@pytest.mark.slow_except(
    "test_empty_axes_produce_empty_or_zero_results",
    "test_masked_keys_and_values_have_no_influence[future-3.3e+38]",
    "test_infinite_bias_does_not_hide_nonfinite_scores[array-nan]",
    "test_typical_sizes_span_several_tiles",
)
@pytest.mark.long_except(
    "test_any_sequence_length_matches_reference[17x64]",
    "test_any_head_count_and_width_match_reference[(10, 5, 4, 3)]",
    "test_each_of_many_heads_uses_its_own_slope",
    "test_query_heads_use_key_head_of_their_group",
    "test_every_mask_matches_reference[segments]",
    "test_masks_use_positions_in_ring_caches_and_ragged_rows",
    "test_all_options_combined_match_reference",
    "test_scale_softcap_and_sinks_match_reference[None]",
    "test_sinks_far_above_and_below_scores_match_reference",
    "test_traced_scale_is_applied_once_and_has_gradient",
    "test_array_bias_of_any_broadcast_shape_matches_reference[TS]",
    "test_dropout_matches_rate_and_preserves_mean",
    "test_dropout_depends_only_on_key",
    "test_backward_pass_reuses_forward_dropout_mask",
    "test_fully_masked_rows_are_zero_and_do_not_affect_others",
    "test_empty_axes_produce_empty_or_zero_results",
    "test_future_keys_have_exactly_zero_gradient",
    "test_scores_of_100_000_produce_correct_finite_results[float32]",
    "test_equal_extreme_scores_have_equal_weights",
    "test_score_below_any_mask_constant_still_contributes",
    "test_low_precision_is_as_accurate_as_plain_attention[bfloat16-False]",
    "test_vmap_over_any_argument_matches_loop[('key', 'value')]",
    "test_dense_mask_tiles_may_differ_between_heads",
    "test_vmap_over_dense_mask_matches_loop",
    "test_softcap_far_above_scores_has_no_effect",
    "test_scan_over_calls_matches_loop",
    "test_jacobian_rows_match_gradients",
    "test_forward_reverse_and_second_derivatives_match_reference[all]",
    "test_debug_checks_find_no_nan_or_infinity",
    "test_masked_keys_and_values_have_no_influence",
    "test_nonfinite_future_values_do_not_affect_earlier_rows",
    "test_visible_infinity_makes_affected_rows_nan[query]",
    "test_visible_infinity_makes_affected_rows_nan[score]",
    "test_nonfinite_padding_does_not_affect_real_tokens",
    "test_nonfinite_key_head_affects_exactly_its_group",
    "test_nan_in_bias_makes_affected_rows_nan",
    "test_infinite_bias_does_not_hide_nonfinite_scores",
    "test_row_with_nonfinite_bias_propagates_no_gradient",
    "test_typical_sizes_span_several_tiles",
)
class TestBlockwise(NonfiniteSuite):
    """Gradients compile slowly: by default some tests run only for `native`, here with `-m ""`."""

    implementation = "blockwise"
    queries, span = 139, 251

    def sizes(self, arrays, mask=None):
        inputs = {name: arrays[name] for name in ("query", "key", "value")}
        return Sizes.of(AttentionCall(mask=mask, **inputs))

    def test_typical_sizes_span_several_tiles(self):
        assert min(self.sizes(self.draw(0)).grid) > 1

    def assert_crowded(self, name, arrays, mask):
        sizes = self.sizes(arrays, mask)
        if "together" in name:
            assert (sizes.rows, sizes.heads, sizes.grid) == (3, 9, (2, 2))
            assert sizes.groups == (2, 1)
        elif name == "rows apart":
            assert (sizes.rows, sizes.groups[0]) == (1, 3)
        else:
            assert (sizes.rows, sizes.heads, sizes.groups) == (1, 11, (2, 3))


@compiled
class TestNative(NonfiniteSuite):
    implementation = "native"


class TestXlaAcrossTiles(TestBlockwise):
    """The reference at the sizes of the tiled implementations."""

    implementation = "xla"
    __test__ = False


# A nonfinite row breaks exactly the queries that see it, in full and in partial tiles.

NONFINITE = {
    "a key is NaN": ("key", (0, 120, 1, 3), math.nan),
    "a key is inf": ("key", (0, 120, 1, 3), math.inf),
    "a value is NaN": ("value", (0, 120, 1, 3), math.nan),
    "a value is -inf": ("value", (0, 120, 1, 3), -math.inf),
    "a query is NaN": ("query", (0, 70, 3, 5), math.nan),
    "a query is -inf": ("query", (0, 70, 3, 5), -math.inf),
    "a bias is NaN": ("bias", (0, 3, 70, 5), math.nan),
    "a bias is inf": ("bias", (0, 3, 70, 5), math.inf),
    "a hidden bias is NaN": ("bias", (0, 3, 0, 113), math.nan),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("which", NONFINITE)
def test_nonfinite_query_outputs_nan_without_gradient(which, implementation, options):
    suite = {"xla": TestXlaAcrossTiles, "blockwise": TestBlockwise}[implementation]()
    arrays = suite.draw(60)
    rng = np.random.default_rng(60)
    arrays["bias"] = jnp.asarray(rng.normal(size=(1, 4, 139, 251)), jnp.float32)
    settings = dict(q_positions=jnp.arange(139) + 112)  # query 8 and later ones see key 120
    if options:
        arrays["sinks"] = jnp.array([-1.0, 0.5, 1.0, 2.0])
        settings |= dict(softcap=5.0, dropout_rate=0.3, dropout_key=jax.random.key(61))
    name, at, bad = NONFINITE[which]
    broken = np.zeros((2, 139, 4), bool)
    if name in ("key", "value"):
        broken[0, 8:, 2:] = True
    elif name == "query":
        broken[0, 70, 3] = True
    elif "hidden" not in which:
        broken[:, 70, 3] = True
    silent = {
        "out_cotangent": jnp.where(broken[..., None], 0, arrays["out_cotangent"]),
        "lse_cotangent": jnp.where(broken, 0, arrays["lse_cotangent"]),
    }
    clean = suite.evaluate(arrays | silent, Causal(), **settings)
    nonfinite = arrays | {name: arrays[name].at[at].set(bad)}
    result = suite.evaluate(nonfinite, Causal(), **settings)
    for name, value in clean.items():
        value, got = np.asarray(value), np.asarray(result[name])
        assert np.isfinite(value).all() and value.any()
        if name in ("out", "lse"):
            assert np.isnan(got[broken]).all(), f"{name} of a broken query is not NaN"
            value, got = value[~broken], got[~broken]
        assert (got == value).all(), name


@pytest.mark.slow
def test_nonfinite_batch_element_does_not_affect_others_under_vmap():
    arrays = draw(62, batch=3)
    arrays = {name: x[:, None] for name, x in arrays.items()}

    @jax.jit
    @jax.vmap
    def attend(query, key, value, cotangent):
        def total(*inputs):
            out = dot_product_attention(*inputs, mask=Causal(), implementation="blockwise")
            return (out * cotangent).sum(), out

        return jax.grad(total, (0, 1, 2), has_aux=True)(query, key, value)

    def run(key):
        gradients, out = attend(arrays["query"], key, arrays["value"], arrays["out_cotangent"])
        return [np.asarray(x) for x in (out, *gradients)]

    results = zip(run(arrays["key"]), run(arrays["key"].at[1, 0, 6].set(math.nan)), strict=True)
    for clean, nonfinite in results:
        assert (nonfinite[[0, 2]] == clean[[0, 2]]).all()
        assert not np.array_equal(nonfinite[1], clean[1], equal_nan=True)
    out, query, *_ = run(arrays["key"].at[1, 0, 6].set(math.nan))
    assert np.isnan(out[1, 0, 6:]).all() and np.isfinite(out[1, 0, :6]).all()
    assert not query[1, 0, 6:].any()


def test_vmap_over_sharded_tiles_preserves_row_order(monkeypatch):
    """On several devices the operation has its own batching rule."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    attend = partial(dot_product_attention, mask=Causal(), implementation="blockwise")
    shapes = [jax.ShapeDtypeStruct((3, 1, 7, 2, 5), np.float32)] * 3
    assert jax.eval_shape(jax.vmap(attend), *shapes).shape == (3, 1, 7, 2, 5)


def test_reference_gradients_match_central_differences(rng):
    """Check the gradients of the oracle against its forward pass, so two errors cannot agree."""
    arrays = {
        name: oracle.double(x)
        for name, x in draw(1, batch=1, queries=3, keys=5, heads=2, kv_heads=1, dim=3).items()
    }
    mask = rng.random((1, 2, 3, 5)) < 0.7
    mask[..., 1, :] = False
    keep = (rng.random((1, 2, 3, 5)) < 0.6) / 0.6
    settings = dict(mask=mask, keep=keep, scale=0.4, softcap=1.5)
    arrays["bias"], arrays["sinks"] = rng.normal(size=(1, 2, 3, 5)), rng.normal(size=2)
    gradients = reference(arrays, **settings)

    def loss(arrays):
        inputs = (arrays[name] for name in ("query", "key", "value"))
        out, lse, _ = oracle.attention(
            *inputs, bias=arrays["bias"], sinks=arrays["sinks"], **settings
        )
        rows = np.isfinite(lse)
        return (out * arrays["out_cotangent"]).sum() + (lse * arrays["lse_cotangent"])[rows].sum()

    for name in ("query", "key", "value", "bias", "sinks"):
        numeric = np.zeros(arrays[name].shape)
        for at in np.ndindex(numeric.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = arrays[name].copy()
                moved[at] += step
                ends.append(loss(arrays | {name: moved}))
            numeric[at] = (ends[0] - ends[1]) / 2e-5
        assert_near(gradients[f"d{name}"], numeric, 1e-8, name)


# Dropout is the same in every implementation.


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_extreme_scales_and_softcaps_are_correct_or_rejected(implementation, rng):
    """Rounding a score of 1e10 has an error of up to 512, and exp of this error would overflow."""
    drawn = [rng.normal(size=(1, 5, 1, 3)).astype(np.float32) for _ in range(3)]
    doubles = [x.astype(np.float64) for x in drawn]
    call = partial(dot_product_attention, *drawn, implementation=implementation)
    for options in ({"scale": 1e10}, {"scale": 1e30}, {"softcap": 1e-30}, {"softcap": 1e30}):
        assert_near(call(**options), oracle.attention(*doubles, **options).out, 1e-5, str(options))
    for name, value in (("scale", 1e39), ("softcap", 1e39), ("softcap", 1e-45)):
        with pytest.raises(
            ValueError, match=rf"{name} is {re.escape(str(value))}: must be finite.*, from"
        ):
            call(**{name: value})


def test_dropout_rate_near_one_preserves_mean():
    """The hash keeps an integer out of 2^32: one at a rate of 1 - 1e-10, although 0.43 is exact."""
    ones = np.ones((1, 1, 1, 1), np.float32)
    for rate in (1 - 1e-8, 1 - 1e-10):
        kept = max(1, round((1 - rate) * 2**32)) / 2**32
        call = check_call(ones, ones, ones, dropout_rate=rate, dropout_key=key_of(0))
        assert 1 / (1 - call.dropout_rate) == pytest.approx(1 / kept)


def test_dropout_rate_may_be_any_float_scalar():
    """Inside a trace, comparing an array is traced; and half precision cannot represent 2^32."""
    ones, key = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32), key_of(0)
    for rate in (np.float16(0.25), jnp.bfloat16(0.25), jnp.float32(0.25), np.array(0.25)):
        found: list[float] = []

        def call(x, rate=rate, found=found):
            found.append(check_call(x, x, x, dropout_rate=rate, dropout_key=key).dropout_rate)

        jax.eval_shape(call, ones)
        assert found == [0.25]


@pytest.mark.slow
def test_dropout_does_not_depend_on_implementation():
    keep = [suite().recovered_keep(4) > 0 for suite in (TestXlaAcrossTiles, TestBlockwise)]
    assert keep[0].shape == (2, 4, 139, 251)
    assert (keep[0] == keep[1]).all()


@pytest.mark.slow_except("xla")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_only_positive_dropout_rates_require_key(implementation):
    arrays = draw(3)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    plain = dot_product_attention(*inputs, implementation=implementation)
    zero = dot_product_attention(*inputs, dropout_key=key_of(1), implementation=implementation)
    assert_same_bits(plain, zero)
    with pytest.raises(ValueError, match="dropout_key"):
        dot_product_attention(*inputs, dropout_rate=0.1, implementation=implementation)
    for rate in (-0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"dropout_rate.*" + re.escape(str(rate))):
            dot_product_attention(
                *inputs, dropout_rate=rate, dropout_key=key_of(2), implementation=implementation
            )


# Few queries over a cache.


def ragged_cache(slots: int) -> np.ndarray:  # i32[4, slots]
    """Positions of rows: empty, short, almost full, and a ring that was written twice over."""
    slot = np.arange(slots)
    filled = [np.where(slot < n, slot, -1) for n in (0, 5, slots - 3)]
    return np.stack([*filled, (slot - 17) % slots + slots]).astype(np.int32)


@pytest.mark.slow
@pytest.mark.long_except("1-192")
@pytest.mark.parametrize(("queries", "slots"), [(1, 192), (3, 131)])
def test_few_queries_over_ragged_cache_match_reference(rng, queries, slots):
    arrays = draw(11, batch=4, queries=queries, keys=slots)
    arrays["sinks"] = jnp.array([-1.0, 0.5, 1.0, 2.0])
    arrays["bias"] = jnp.asarray(rng.normal(size=(1, 4, queries, slots)), jnp.float32)
    cached = ragged_cache(slots)
    ends = cached.max(axis=1, keepdims=True)
    q_positions = np.maximum(ends, 0) + 1 - np.arange(queries)[None, ::-1]
    seen = oracle.allowed(
        oracle.both(oracle.causal(), oracle.window(slots // 2)), q_positions, cached, batch=4
    )
    assert seen[1:].any() and not seen[0].any()
    want = reference(arrays, seen, softcap=2.0)
    for name in ("key", "value"):
        arrays[name] = jnp.where(jnp.asarray(cached < 0)[..., None, None], jnp.nan, arrays[name])
    got = TestBlockwise().evaluate(
        arrays, Causal() & Window(slots // 2), q_positions=jnp.asarray(q_positions, jnp.int32),
        k_positions=jnp.asarray(cached), softcap=2.0,
    )  # fmt: skip
    assert set(got) == set(want)
    assert np.isneginf(got["lse"][0]).all() and np.isneginf(want["lse"][0]).all()
    got["lse"], want["lse"] = got["lse"][1:], want["lse"][1:]
    for name in want:
        tolerance = GRADIENT_F32 if name.startswith("d") else FORWARD_F32
        assert_near(got[name], want[name], tolerance, name)


def test_few_queries_read_only_filled_cache_slots():
    query, key = np.zeros((2, 1, 4, 8), np.float32), np.zeros((2, 512, 2, 8), np.float32)
    lengths = np.array([[16], [70]], np.int32)
    slots = np.where(np.arange(512) < lengths, np.arange(512), -1).astype(np.int32)
    call = AttentionCall(
        query=query, key=key, value=key, mask=Causal(), q_positions=lengths, k_positions=slots
    )
    sizes = Sizes.of(call)
    assert (sizes.block_k, sizes.grid) == (64, (1, 8))
    assert int(visited_tiles(sizes, call).seen.max()) == 2


def decoding_program(implementation: str | None) -> str:
    """The compiled program of a loop that writes a key and attends to the cache."""

    def step(carry, _):
        x, kv = carry
        position = kv.length[:, None]
        kv = cache.update(kv, x, x, position)
        x = dot_product_attention(
            x, kv.k, kv.v, mask=Causal(), q_positions=position, k_positions=kv.positions,
            implementation=implementation,
        )  # fmt: skip
        return (x, kv), None

    def run(x, kv):
        return jax.lax.scan(step, (x, kv), None, length=5)[0]

    carry = jnp.zeros((1, 1, 3, 8)), cache.init(1, 192, 3, 8)
    return jax.jit(run, donate_argnums=1).lower(*carry).compile().as_text()


@pytest.mark.slow
def test_decode_step_does_not_copy_cache():
    if jax.default_backend() != "cpu":
        pytest.skip("reads the program of XLA's CPU backend")
    copied = re.compile(r"f32\[1,192,3,8\]\S* copy\(")
    assert copied.search(decoding_program("xla")), "the test no longer finds copies"
    assert not copied.search(decoding_program(None))


# Choosing an implementation.


@pytest.mark.parametrize(
    ("queries", "keys", "best", "without"),
    [
        (1, 31, "xla", "xla"), (1, 32, "native", "xla"), (2, 63, "native", "xla"),
        (5, 128, "native", "blockwise"), (17, 31, "xla", "xla"), (33, 64, "xla", "xla"),
        (63, 64, "xla", "xla"), (64, 64, "native", "xla"), (17, 300, "native", "xla"),
        (128, 128, "native", "blockwise"),
    ],
)  # fmt: skip
@on_a_cpu
def test_cpu_implementation_is_chosen_by_size(queries, keys, best, without):
    explained = explain(draw(4, queries=queries, keys=keys))
    assert explained.chosen == (best if explained["native"] is None else without)


@on_a_cpu
def test_unsupported_native_call_falls_back_to_other_implementation():
    with jax.enable_x64(True):
        arrays = {name: oracle.double(x) for name, x in draw(4, queries=99, keys=99).items()}
        assert explain(arrays).chosen == "xla" and call(arrays).dtype == jnp.float64
    mask = Predicate(lambda q, k: jnp.sin(q) < k)
    assert explain(draw(4, queries=130, keys=130), mask=mask).chosen == "blockwise"


def test_many_short_heads_use_native_kernels_on_cpu():
    """Check the choice at 32 tokens: starting threads makes the gradient of few heads slower."""
    if jax.default_backend() != "cpu" or isinstance(cpu.library(), str):
        pytest.skip("the kernels were not compiled, or this machine has an accelerator")
    few, many = (draw(4, batch=n, queries=32, keys=32, heads=12, dim=64, value_dim=64)
                 for n in (2, 4))  # fmt: skip
    assert (explain(few).chosen, explain(many).chosen) == ("xla", "native")


def call(arrays, **settings):
    return dot_product_attention(arrays["query"], arrays["key"], arrays["value"], **settings)


def explain(arrays, **settings):
    return explain_attention(arrays["query"], arrays["key"], arrays["value"], **settings)


SETTINGS = {
    "plain": lambda: {},
    "causal": lambda: {"mask": Causal()},
    "window": lambda: {"mask": Causal() & Window(5)},
    "dense": lambda: {"mask": Dense(jnp.ones((13, 17), bool))},
    "padding": lambda: {"mask": Padding(jnp.ones((2, 17), bool))},
    "bias": lambda: {"bias": jnp.zeros((1, 4, 13, 17))},
    "alibi": lambda: {"bias": ALiBi(alibi_slopes(4))},
    "softcap": lambda: {"softcap": 3.0},
    "sinks": lambda: {"sinks": jnp.zeros(4)},
    "dropout": lambda: {"dropout_rate": 0.1, "dropout_key": jax.random.key(1)},
    "lse": lambda: {"return_lse": True},
    "positions": lambda: {"mask": Causal(), "q_positions": jnp.arange(13) + 4},
    "predicate": lambda: {"mask": Predicate(lambda q, k: (q - k) % 2 == 0)},
    "scale by head": lambda: {"scale": np.ones(4, np.float32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_explanation_matches_behavior_of_named_implementation(settings):
    arrays, settings = draw(4), SETTINGS[settings]
    reasons = explain(arrays, **settings())
    assert set(NAMES) <= set(reasons) and all(name in str(reasons) for name in NAMES)
    assert reasons["xla"] is None and reasons["blockwise"] is None
    for name in NAMES:

        def run(arrays, name=name):
            return call(arrays, implementation=name, **settings())

        if reasons[name] is None:
            result = jax.tree.leaves(jax.eval_shape(run, arrays))[0]
            assert result.shape == (2, 13, 4, 8) and result.dtype == jnp.float32
        else:
            with pytest.raises(NotImplementedError, match=re.escape(str(reasons[name]))):
                run(arrays)


@pytest.mark.parametrize("name", ["pallas", "pallas_unordered", "cudnn"])
@on_a_cpu
def test_implementation_that_cannot_run_on_cpu_reports_why(name):
    with pytest.raises(NotImplementedError, match=name) as error:
        call(draw(5), implementation=name)
    assert len(str(error.value)) > len(name) + 10, "the message names no condition"


@pytest.mark.slow_except("2147483648-None")
@pytest.mark.parametrize(("left", "expected"), [(16, (15, 0)), (17, None), (2**31, None)])
def test_window_as_long_as_keys_is_not_passed_to_cudnn(monkeypatch, left, expected):
    windows = []

    def attend(query, key, value, *, local_window_size, **settings):
        windows.append(local_window_size)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    arrays = draw(5, queries=17, keys=17)
    inputs = dict.fromkeys(("query", "key", "value"), arrays["query"])
    call = AttentionCall(mask=Causal() & Window(left), **inputs)
    out, _ = jax.jit(lambda: Cudnn().attend(call))()
    assert windows == [expected] and not np.isnan(np.asarray(out)).any()


@pytest.mark.slow_except("plain", "window")
@pytest.mark.parametrize("settings", ["plain", "window", "alibi"])
def test_default_runs_implementation_named_in_explanation(settings):
    arrays, settings = draw(6), SETTINGS[settings]
    chosen = explain(arrays, **settings()).chosen
    assert_same_bits(call(arrays, **settings()), call(arrays, implementation=chosen, **settings()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "counts"), [("blockwise", {0}), ("native", range(1, 20))]
)
def test_static_tile_lists_compile_few_programs(implementation, counts):
    """Otherwise each step of a plan compiles a program, two seconds of the first call."""
    arrays = draw(64, batch=1, queries=301, keys=301)
    if explain(arrays)[implementation] is not None:
        pytest.skip("the kernels were not compiled, or this machine has an accelerator")
    compiled = []

    def count(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        jax.jit(partial(call, mask=Causal() & Window(70), implementation=implementation)).lower(
            arrays
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) in counts


@pytest.mark.slow_except("xla")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_attention_compiles_once_for_equal_arguments(implementation):
    """Masks and biases that differ only in their arrays share a program."""
    arrays, programs = draw(63, batch=1, queries=11, keys=23), []
    for n in range(3):
        out = dot_product_attention(
            n * np.asarray(arrays["query"]), arrays["key"], arrays["value"], softcap=3.0,
            mask=Causal() & Window(7) | Prefix(np.int32([n])), bias=ALiBi(n * np.ones(4, "f4")),
            return_lse=n == 1, implementation=implementation,
        )  # fmt: skip
        programs.append(api._run.num_programs())
    assert np.isfinite(out).all() and np.asarray(out).any()
    assert programs[0] == programs[2] > 0


@pytest.mark.slow
@on_a_cpu
def test_unsupported_implementations_in_sequence_are_skipped():
    arrays = draw(7)
    expected = call(arrays, implementation="blockwise")
    assert_same_bits(call(arrays, implementation=("pallas", "cudnn", "blockwise")), expected)
    assert_same_bits(call(arrays, implementation=["blockwise", "pallas"]), expected)
    with pytest.raises(NotImplementedError) as error:
        call(arrays, implementation=("pallas", "cudnn"))
    assert "pallas" in str(error.value) and "cudnn" in str(error.value)


def test_positions_of_any_integer_dtype_are_equivalent():
    arrays, at = draw(17, queries=5, keys=7), (np.arange(5), np.arange(7))
    window = dict(mask=Window(5, 3), bias=ALiBi(alibi_slopes(4)), implementation="xla")
    out = []
    for dtype in ("int32", "uint8", "uint32"):
        q, k = (x.astype(dtype) for x in at)
        out.append(call(arrays, q_positions=jax.device_put(q), k_positions=k, **window))
    assert_same_bits(out[1], out[0])
    assert_same_bits(out[2], out[0])
    with pytest.raises(ValueError, match="k_positions contains 4294967296"):
        call(arrays, k_positions=at[1] + 2**32)


@pytest.mark.slow
def test_predicate_may_read_traced_values_in_gradient():
    """A threshold and a table, together with arrays that lead with batch rows."""
    arrays = draw(18, queries=5, keys=7)

    def loss(query, width, table, implementation):
        near = Predicate(lambda q, k: (q - k < 2 * width) & table[k % 2])
        mask = near | Prefix(jnp.array([2, 1]))
        out = call(arrays | {"query": query}, mask=mask, implementation=implementation)
        return (out**2).sum()

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)
    arguments = arrays["query"], 1.5, jnp.array([True, False])
    expected, actual = slopes(*arguments, "xla"), slopes(*arguments, "blockwise")
    assert np.abs(np.asarray(expected[0])).max() > 0.01
    assert_near(actual[0], expected[0], GRADIENT_F32)
    assert actual[1] == expected[1] == 0


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, FloatingPointError])
def test_implementation_sequence_propagates_other_errors(kind):
    calls = []

    def fails_once(q_positions, k_positions):
        calls.append(1)
        if len(calls) == 1:
            raise kind("this must come through")
        return q_positions >= k_positions

    with pytest.raises(kind, match="this must come through"):
        call(draw(8), mask=Predicate(fails_once), implementation=("blockwise", "xla"))


def test_unknown_implementation_error_lists_known_names():
    arrays = draw(9)
    for wrong in ("flash", "XLA", "", ("xla", "flash"), ()):
        with pytest.raises(ValueError, match="blockwise"):
            call(arrays, implementation=wrong)


# Refusals.


def zeros(*shape, dtype="float32"):
    return jax.device_put(np.zeros(shape, jnp.dtype(dtype)))


Q, K = (2, 13, 4, 8), (2, 17, 2, 8)
BAD = {
    "rank": (((13, 4, 8), K, K), {}, r"\(13, 4, 8\)"),
    "batch": ((Q, (3, 17, 2, 8), (3, 17, 2, 8)), {}, r"\(2, 13, 4, 8\).*\(3, 17, 2, 8\)"),
    "key length": ((Q, K, (2, 16, 2, 8)), {}, r"\(2, 17, 2, 8\).*\(2, 16, 2, 8\)"),
    "head width": ((Q, (2, 17, 2, 7), (2, 17, 2, 7)), {}, r"8.*7"),
    "value heads": ((Q, K, (2, 17, 4, 8)), {}, r"\(2, 17, 2, 8\).*\(2, 17, 4, 8\)"),
    "group": ((Q, (2, 17, 3, 8), (2, 17, 3, 8)), {}, r"3.*4|4.*3"),
    "bias": ((Q, K, K), {"bias": zeros(1, 4, 13, 16)}, r"\(1, 4, 13, 16\).*\(2, 4, 13, 17\)"),
    "bias rank": ((Q, K, K), {"bias": zeros(1, 1, 1, 1, 1)}, r"\(1, 1, 1, 1, 1\)"),
    "sinks": ((Q, K, K), {"sinks": zeros(2)}, r"sinks.*\(2,\)"),
    "q_positions": ((Q, K, K), {"q_positions": zeros(12, dtype="int32")}, r"q_positions.*\(12,\)"),
    "k_positions": (
        (Q, K, K), {"k_positions": zeros(3, 17, dtype="int32")}, r"k_positions.*\(3, 17\)",
    ),
    "float positions": ((Q, K, K), {"q_positions": zeros(13)}, r"q_positions.*float32"),
    "mask rows": ((Q, K, K), {"mask": Padding(zeros(3, 17, dtype="bool"))}, r"3"),
    "mask heads": ((Q, K, K), {"mask": Dense(zeros(1, 3, 13, 17, dtype="bool"))}, r"3"),
    "mask array": ((Q, K, K), {"mask": zeros(13, 17, dtype="bool")}, r"Dense"),
    "mask of floats": (
        (Q, K, K), {"mask": zeros(13, 17)},
        r"mask is float32\[13, 17\]: .*use bias=array; .*use Dense\(array > 0\)$",
    ),
    "softcap": ((Q, K, K), {"softcap": -1.0}, r"softcap.*-1"),
    "no softcap": ((Q, K, K), {"softcap": 0.0}, r"softcap.*0"),
    "infinite softcap": ((Q, K, K), {"softcap": math.inf}, r"softcap is inf: .*finite"),
    "scale of NaN": ((Q, K, K), {"scale": math.nan}, r"scale is nan: must be finite"),
    "scale below float32": ((Q, K, K), {"scale": 1e-38}, r"scale is 1e-38: must be finite"),
    "complex scale": ((Q, K, K), {"scale": zeros(dtype="complex64")}, "scale is complex64"),
    "complex scales": ((Q, K, K), {"scale": zeros(4, dtype="complex64")}, "scale is complex64"),
    "broadcast dropout": (
        (Q, K, K), {"broadcast_dropout": 2}, "broadcast_dropout is 2: must be True or False",
    ),
    "number as a key": ((Q, K, K), {"dropout_rate": 0.5, "dropout_key": 0}, r"dropout_key is 0"),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["xla", "blockwise", None, ("blockwise", "xla")])
@pytest.mark.parametrize("case", BAD)
def test_invalid_array_error_shows_shapes_and_rule(case, implementation):
    shapes, settings, names = BAD[case]
    with pytest.raises(ValueError, match=re.compile(names, re.DOTALL)):
        dot_product_attention(
            *(zeros(*s) for s in shapes), implementation=implementation, **settings
        )
    with pytest.raises(ValueError, match=re.compile(names, re.DOTALL)):
        explain_attention(*(zeros(*s) for s in shapes), **settings)


def ids(length):
    return zeros(2, length, dtype="int32")


SHORT = {  # for 13 queries and 17 keys
    "valid": (Padding(zeros(2, 16, dtype="bool")), "Padding: valid has length 16 for 17 keys"),
    "q_ids": (Segments(ids(12), ids(17)), "Segments: q_ids has length 12 for 13 queries"),
    "k_ids": (Segments(ids(13), ids(16)), "Segments: k_ids has length 16 for 17 keys"),
    "both": (Segments(ids(13)), "q_ids, used for the keys too, has length 13 for 17 keys"),
    "queries": (Dense(zeros(12, 17, dtype="bool")), "array has length 12 for 13 queries"),
    "keys": (Dense(zeros(1, 1, 1, 16, dtype="bool")), "array has length 16 for 17 keys"),
    "inside": (Causal() | ~(Window(3) & Padding(zeros(2, 2, dtype="bool"))), "valid has length 2"),
}


@pytest.mark.parametrize("implementation", [*NAMES, None])
@pytest.mark.parametrize("case", SHORT)
def test_mask_shorter_than_queries_or_keys_is_rejected(case, implementation):
    """Otherwise the output of the silently hidden rows is zero."""
    mask, names = SHORT[case]
    arrays = [zeros(*s) for s in (Q, K, K)]
    with pytest.raises(ValueError, match=names):
        dot_product_attention(*arrays, mask=mask, implementation=implementation)
    if implementation is None:
        with pytest.raises(ValueError, match=names):
            explain_attention(*arrays, mask=mask)
        with pytest.raises(ValueError, match=names):
            dot_product_attention_weights(*arrays[:2], mask=mask)
        with pytest.raises(ValueError, match=names):
            jax.jit(partial(state_attention, mask=mask))(zeros(2, 13, 8), zeros(2, 17, 8))
        at = dict(q_positions=np.arange(13, dtype=np.int32) % 2, k_positions=np.arange(17) % 2)
        dot_product_attention(*arrays, mask=mask, **at)  # with positions, a mask may be shorter


def test_mask_shorter_than_tokens_is_rejected_by_model():
    config = ModelConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2, max_len=16)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 13), np.int32)
    for part in Padding(zeros(2, 12, dtype="bool")), Segments(ids(12)):
        mask = Causal() & part
        with pytest.raises(ValueError, match=r"has length 12 for 13 (keys|queries)"):
            jax.eval_shape(
                lambda params, tokens, mask=mask: build(config).apply(
                    {"params": params}, tokens, mask=mask
                ),
                params,
                tokens,
            )


@pytest.mark.parametrize("implementation", ["xla", "blockwise", WHERE_COMPILED])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_query_with_one_visible_key_has_zero_gradient(implementation, dtype):
    """By definition, because its weight is 1 for any score."""
    H, tiny = (32, 0.0) if implementation == "xla" else (2, 0.0)
    rng = np.random.default_rng(3)
    query, key, value, cotangent = (
        jnp.asarray(rng.normal(size=(1, 1, 1, H)), dtype) for _ in range(4)
    )

    @jax.jit
    def gradients(query, key, bias, value):
        def attend(query, key, bias):
            return dot_product_attention(
                query, key, value, bias=bias, implementation=implementation
            )

        return jax.vjp(attend, query, key, bias)[1](cotangent)

    for found in gradients(query, key, jnp.zeros((1, 1, 1, 1), dtype), value):
        assert np.abs(np.asarray(found, np.float64)).max() <= tiny


@pytest.mark.parametrize("scale", [True, np.nan, -np.inf, 1e-38], ids=str)
def test_invalid_static_scale_is_rejected(scale):
    for value in (scale, [1, 1, 1, scale], np.array([0, -1, 1, scale])):
        if scale is not True or value is True:  # in a list, True is the number 1
            with pytest.raises(ValueError, match=f"^scale is {scale}: must be "):
                dot_product_attention(*(zeros(*s) for s in (Q, K, K)), scale=value)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (4, 1, 1)], ids=str)
def test_scale_with_wrong_shape_is_rejected(shape):
    rule = (
        r"scale is float32\(.*\): must be one number, or floating-point \(4,\), one for each head"
    )
    for scale in (zeros(*shape), np.zeros(shape, np.float32), np.zeros(shape).tolist()):
        with pytest.raises(ValueError, match=rule):
            dot_product_attention(*(zeros(*s) for s in (Q, K, K)), scale=scale)


def test_list_of_scales_may_contain_traced_values():
    arrays = [zeros(*s) for s in (Q, K, K)]
    found = jax.eval_shape(lambda s: dot_product_attention(*arrays, scale=[s, 1, s, 2]), 1.0)
    assert found.shape == Q


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_only_floating_inputs_are_accepted(dtype):
    with pytest.raises(ValueError, match=dtype):
        dot_product_attention(
            zeros(*Q, dtype=dtype), zeros(*K, dtype=dtype), zeros(*K, dtype=dtype)
        )


# Weights, and the two older attentions.


def test_attention_weights_match_reference(rng):
    arrays = draw(10)
    sinks = np.float32([-1.0, 0.5, 1.0, 2.0])
    bias = rng.normal(size=(1, 4, 1, 17)).astype(np.float32)
    k_positions = np.where(np.arange(17) == 3, -1, np.arange(17)).astype(np.int32)
    q_positions = np.arange(13, dtype=np.int32) - 1
    options = dict(scale=0.4, softcap=2.0)
    weights = dot_product_attention_weights(
        arrays["query"], arrays["key"], mask=Causal(), bias=bias, sinks=sinks,
        q_positions=q_positions, k_positions=k_positions, **options,
    )  # fmt: skip
    seen = oracle.allowed(oracle.causal(), q_positions, k_positions)
    inputs = [oracle.double(arrays[name]) for name in ("query", "key", "value")]
    expected = oracle.attention(*inputs, mask=seen, bias=bias, sinks=sinks, **options).weights
    assert weights.dtype == jnp.float32 and weights.shape == (2, 4, 13, 17)
    assert_near(weights, expected, FORWARD_F32)
    assert not np.asarray(weights)[:, :, 0].any(), "a row that sees nothing is not zero"
    assert not np.asarray(weights)[..., 3].any(), "an empty slot has weight"
    low = [np.asarray(arrays[name]).astype(jnp.bfloat16) for name in ("query", "key")]
    weights = dot_product_attention_weights(*low, scale=jax.device_put(np.float32(0.3)))
    doubles = [oracle.double(x) for x in (*low, low[1])]
    assert_near(weights, oracle.attention(*doubles, scale=0.3).weights, FORWARD_F32)


def softmax_rows(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    weights = np.zeros_like(scores)
    for at in np.ndindex(scores.shape[:-1]):
        seen = scores[at][mask[at]]
        if seen.size:
            weights[(*at, mask[at])] = np.exp(seen - seen.max()) / np.exp(seen - seen.max()).sum()
    return weights


@pytest.mark.slow
def test_additive_attention_matches_bahdanau_formula(rng):
    shapes = [(2, 3, 5), (2, 7, 4), (2, 7, 6), (5, 11), (4, 11), (11,)]
    query, keys, values, w_query, w_key, v = (rng.normal(size=s) for s in shapes)
    valid = np.arange(7)[None, :] < np.array([[7], [0]])
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, keys, values, w_query, w_key, v)]
    context, weights = jax.jit(additive_attention)(
        *arrays[:3], w_query=arrays[3], w_key=arrays[4], v=arrays[5],
        mask=Padding(jnp.asarray(valid)),
    )  # fmt: skip
    hidden = (query @ w_query)[:, :, None, :] + (keys @ w_key)[:, None, :, :]
    seen = np.broadcast_to(valid[:, None, :], (2, 3, 7))
    expected = softmax_rows(np.tanh(hidden) @ v, seen)
    assert_near(weights, expected, 2 * FORWARD_F32)
    assert_near(context, expected @ values, 2 * FORWARD_F32)
    assert not np.asarray(context)[1].any()
    again, _ = jax.jit(partial(additive_attention, w_key=None))(
        arrays[0], jnp.asarray(keys @ w_key, jnp.float32), arrays[2], w_query=arrays[3],
        v=arrays[5], mask=Padding(jnp.asarray(valid)),
    )  # fmt: skip
    assert_near(again, expected @ values, 2 * FORWARD_F32)
    with pytest.raises(
        ValueError, match=r"keys \(2, 7, 4\), v \(11,\): must be \[5, A\], \[B, S, A\]"
    ):
        additive_attention(*arrays[:3], w_query=arrays[3], w_key=None, v=arrays[5])


@pytest.mark.slow
@pytest.mark.parametrize("general", [False, True])
def test_state_attention_matches_luong_formula(rng, general):
    query, states = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 7, 4 if general else 5))
    w = rng.normal(size=(5, 4)) if general else None
    valid = np.arange(7)[None, :] < np.array([[7], [3]])
    context, weights = state_attention(
        jnp.asarray(query, jnp.float32), jnp.asarray(states, jnp.float32),
        w=None if w is None else jnp.asarray(w, jnp.float32), scale=0.7,
        mask=Padding(jnp.asarray(valid)),
    )  # fmt: skip
    projected = query if w is None else query @ w
    scores = 0.7 * np.einsum("BTD,BSD->BTS", projected, states)
    expected = softmax_rows(scores, np.broadcast_to(valid[:, None, :], (2, 3, 7)))
    assert_near(weights, expected, 2 * FORWARD_F32)
    assert_near(context, expected @ states, 2 * FORWARD_F32)


# Memory of the blockwise implementation, as reported by the compiler.


def attention_program(length: int, setting: str, *, backward: bool):
    array = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    settings = {
        "none": lambda: {},
        "causal": lambda: {"mask": Causal()},
        "window": lambda: {
            "mask": Causal() & Window(100) & Padding(jnp.ones((1, length), bool)),
            "softcap": 5.0,
            "sinks": jnp.zeros(1),
        },
        "dropout": lambda: {
            "mask": Causal(),
            "dropout_rate": 0.1,
            "dropout_key": jax.random.key(1),
        },
        "alibi": lambda: {"mask": Causal(), "bias": ALiBi(alibi_slopes(1))},
    }[setting]()

    def attend(query, key, value):
        out = dot_product_attention(query, key, value, implementation="blockwise", **settings)
        return (out * out).sum() if backward else out

    program = jax.grad(attend, (0, 1, 2)) if backward else attend
    return jax.jit(program).lower(array, array, array).compile()


@pytest.mark.slow
@pytest.mark.long_except("window-True")
@pytest.mark.parametrize(
    ("setting", "backward"),
    [
        ("none", True),
        ("causal", False),
        ("causal", True),
        ("window", True),
        ("dropout", True),
        ("alibi", False),
        ("alibi", True),
    ],
)
def test_blockwise_memory_is_linear_in_length(setting, backward):
    short, long = (attention_program(n, setting, backward=backward) for n in (1024, 4096))
    small, large = (p.memory_analysis().temp_size_in_bytes for p in (short, long))
    assert small > 0 and large <= 5.0 * small
    assert large < 4096 * 4096, "room for a square of bytes"
    shapes = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", long.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert 4096 * 16 <= largest < 4096 * 4096


def test_reference_memory_is_quadratic_in_length():
    """Show that the measurement above can fail."""
    array = jax.ShapeDtypeStruct((1, 1024, 1, 16), jnp.float32)
    program = jax.jit(lambda *x: dot_product_attention(*x, implementation="xla"))
    compiled = program.lower(array, array, array).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 1024 * 1024 * 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blockwise_float32_products_use_highest_precision(dtype):
    """As in "xla"; by default an accelerator may compute them in fewer bits."""
    arrays = draw(1, queries=150, keys=150, dtype=dtype)
    inputs = [arrays[name] for name in ("query", "key", "value")]

    def loss(*inputs):
        return dot_product_attention(*inputs, implementation="blockwise").sum(dtype=jnp.float32)

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs).as_text()
    products = [
        line for line in text.splitlines() if "dot_general" in line and "x1xf32>" not in line
    ]
    assert len(products) == 14  # with and without a mask
    assert all(("HIGHEST" in line) == (dtype == "float32") for line in products)


def test_blockwise_rejects_per_row_bias_with_per_row_positions():
    """A tile would have some rows of one of them, and all rows of the other."""
    arrays = draw(1, batch=4, queries=130, keys=130)
    inputs = [arrays[name] for name in ("query", "key", "value")]
    places = np.tile(np.arange(130, dtype=np.int32), (4, 1))
    rows = RowSlopes(np.linspace(0, 1, 4, dtype=np.float32))
    assert explain_attention(*inputs, bias=rows)["blockwise"] is None
    explained = explain_attention(*inputs, bias=rows, k_positions=places)
    assert explained["blockwise"] == "only one of bias and positions may differ between batch rows"
    alibi = ALiBi(alibi_slopes(inputs[0].shape[2]))
    assert explain_attention(*inputs, bias=alibi, k_positions=places)["blockwise"] is None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSlopes:
    slopes: jax.Array  # [B]

    def materialize(self, q_positions, k_positions):
        q, k = (jnp.atleast_2d(x) for x in (q_positions, k_positions))
        distance = jnp.abs(k[:, None] - q[:, :, None]).astype(jnp.float32)
        return (self.slopes[:, None, None] * distance)[:, None]


@pytest.mark.slow
def test_zero_width_values_give_empty_output():
    x = jnp.ones((1, 3, 2, 4))
    for implementation in ("xla", "blockwise"):
        out, lse = dot_product_attention(
            x, x, x[..., :0], return_lse=True, implementation=implementation
        )
        assert out.shape == (1, 3, 2, 0) and jnp.allclose(lse, 2 + math.log(3))


@compiled
def test_native_kernels_materialize_position_bias_as_array():
    rng = np.random.default_rng(5)
    inputs = jnp.asarray(rng.standard_normal((3, 2, 7, 2, 4)), "float32")
    bias, at = RowSlopes(jnp.array([0.3, -0.2])), jnp.arange(7)
    found = dot_product_attention(*inputs, bias=bias, implementation="native")
    expected = dot_product_attention(*inputs, bias=bias.materialize(at, at), implementation="xla")
    assert_near(found, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise", WHERE_COMPILED, None])
def test_int8_inputs_with_scales_match_dequantized_arrays(implementation):
    rng = np.random.default_rng(3)
    query = jnp.asarray(rng.standard_normal((2, 5, 4, 8)), "float32")
    key, value = jnp.asarray(rng.standard_normal((2, 2, 5, 2, 8)), "float32")
    (k, k_scale), (v, v_scale) = cache.quantize(key), cache.quantize(value)
    wide = cache.dequantize(k, k_scale), cache.dequantize(v, v_scale)
    settings = dict(mask=Causal(), implementation=implementation)
    out = dot_product_attention(query, k, v, key_scale=k_scale, value_scale=v_scale, **settings)
    expected = dot_product_attention(query, *wide, **settings)
    assert jnp.abs(expected).max() > 0.1 and jnp.abs(expected - query).max() > 0.1
    np.testing.assert_allclose(out, expected, atol=1e-6)
    scales = dict(key_scale=k_scale, value_scale=v_scale)
    explained = explain_attention(query, k, v, mask=Causal(), **scales)
    assert explained["xla"] is None and explained["blockwise"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(key_scale=None), "key is int8 and key_scale is None"),
        (
            dict(value_scale=np.ones((2, 5, 1), np.float32)),
            r"value_scale is float32\(2, 5, 1\): must be",
        ),
        (
            dict(key=np.ones((2, 5, 2, 8), np.float32)),
            "key is float32 and key_scale is float32: int8 key and value need",
        ),
        (dict(key_scale=None, value_scale=None), "must be one dtype.*; int8 needs key_scale"),
    ],
)
def test_quantization_scales_require_int8_inputs(changes, message):
    int8, scale = np.ones((2, 5, 2, 8), np.int8), np.ones((2, 5, 2), np.float32)
    arguments = dict(key=int8, value=int8, key_scale=scale, value_scale=scale) | changes
    query, arguments = jax.device_put((np.ones((2, 5, 4, 8), np.float32), arguments))
    with pytest.raises(ValueError, match=message):
        dot_product_attention(query, **arguments)


@pytest.mark.slow_except("blockwise-both")
@pytest.mark.parametrize("options", ["", "softcap", "bias", "both"])
@pytest.mark.parametrize("implementation", ["xla", "blockwise", WHERE_COMPILED])
def test_overflow_in_masked_keys_does_not_affect_gradients(implementation, options):
    """The product of every query with a finite hidden key is inf - inf."""
    arrays = draw(64, batch=1, queries=5, keys=7, dim=16)
    arrays = {name: np.array(x) for name, x in arrays.items()}
    arrays["query"][:, 3] = 1e30
    arrays["key"][:, 5] = np.where(np.arange(16) % 2, -1e30, 1e30)
    valid = np.arange(7)[None] != 5
    settings = dict(softcap=3.0) if options in ("softcap", "both") else dict(scale=1e-30)
    given = dict(bias=np.random.default_rng(64).normal(size=(1, 4, 5, 7)).astype(np.float32))
    if options not in ("bias", "both"):
        given = {}
    inputs = {n: arrays[n] for n in ("query", "key", "value")} | given

    @jax.jit
    def slopes(inputs):
        def total(inputs):
            out = dot_product_attention(
                **inputs, mask=Padding(valid), implementation=implementation, **settings
            )
            return (out * arrays["out_cotangent"]).sum(), out

        return jax.grad(total, has_aux=True)(inputs)

    found, out = slopes(inputs)
    silent = {"lse_cotangent": np.zeros((1, 5, 4))}
    expected = reference(arrays | given | silent, valid[:, None, None], **settings)
    assert_near(out, expected["out"], FORWARD_F32)
    for name, slope in found.items():
        assert_near(slope, expected[f"d{name}"], 3 * GRADIENT_F32, name)


@pytest.mark.slow_except("native", "xla")
@pytest.mark.parametrize("implementation", ["xla", "blockwise", WHERE_COMPILED])
def test_query_that_attends_only_to_itself_returns_its_value(implementation):
    arrays = draw(65, queries=17, kv_heads=4)
    inputs = (arrays[name] for name in ("query", "key", "value"))
    out = dot_product_attention(*inputs, mask=Window(1, 1), implementation=implementation)
    assert_near(out, np.asarray(arrays["value"], np.float64), FORWARD_F32)


@pytest.mark.slow_except("xla")
@pytest.mark.parametrize("implementation", ["xla", "blockwise", WHERE_COMPILED])
def test_nonfinite_unmasked_key_affects_query_heads_in_its_group(implementation):
    arrays = draw(66, queries=5, keys=7, heads=6, kv_heads=3)
    inputs = {name: np.array(arrays[name]) for name in ("query", "key", "value")}
    attend = partial(dot_product_attention, implementation=implementation)
    clean = np.array(attend(**inputs))
    inputs["key"][1, 4, 1, 2] = math.nan
    bad = np.asarray(attend(**inputs))
    clean[1, :, 2:4] = math.nan
    np.testing.assert_allclose(bad, clean, rtol=FORWARD_F32)


@pytest.mark.slow
def test_cached_eager_call_makes_few_function_calls(rng):
    """Every eager call pays for its checks in Python, 27 function calls within attention."""
    query = rng.normal(size=(1, 17, 2, 8)).astype(np.float32)
    entered, before = [], sys.getprofile()

    def record(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("transformer_jax.attention."):
            entered.append(frame.f_code.co_name)

    for _ in range(2):
        sys.setprofile(record)
        try:
            dot_product_attention(query, query, query, mask=Causal(), implementation="xla")
        finally:
            sys.setprofile(before)
        first, entered = entered, []
    assert 0 < len(first) < 32, first
