"""Tests that every implementation of attention must pass.

A test module subclasses `AttentionSuite` and names the implementation. The built-in implementations
may not skip any test. A kernel that rejects an option gives the reason in `explain_attention`; with
`may_refuse = True`, the test is skipped with this reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.tolerances import (
    FORWARD_BF16,
    FORWARD_F32,
    GRADIENT_BF16,
    GRADIENT_F32,
    LOW_PRECISION_FORWARD,
    LOW_PRECISION_FORWARD_FLOOR,
    LOW_PRECISION_GRADIENT,
    assert_near,
    assert_same_bits,
    largest_error,
)
from transformer_jax.attention.api import dot_product_attention, explain_attention
from transformer_jax.attention.biases import ALiBi, RelativeBias, alibi_slopes
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.kernels import Target, target, using

LENGTHS = [
    (1, 257), (2, 129), (3, 127), (7, 65), (17, 64), (63, 63), (64, 17), (65, 7), (127, 3),
    (129, 2), (257, 1),
]  # fmt: skip
STATIC = ("implementation", "target", "scale", "softcap", "dropout_rate", "broadcast_dropout")


def draw(
    seed: int,
    *,
    batch: int = 2,
    queries: int = 13,
    keys: int = 17,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    dtype: str = "float32",
) -> dict[str, jax.Array]:
    """Draw standard normal inputs and cotangents of the results in `dtype`."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (batch, queries, heads, dim),
        "key": (batch, keys, kv_heads, dim),
        "value": (batch, keys, kv_heads, value_dim),
        "out_cotangent": (batch, queries, heads, value_dim),
        "lse_cotangent": (batch, queries, heads),
    }
    dtypes = dict.fromkeys(shapes, jnp.dtype(dtype)) | {"lse_cotangent": jnp.dtype("float32")}
    # Cast on the host: on a device, each shape would need its own program.
    return {k: jax.device_put(rng.normal(size=s).astype(dtypes[k])) for k, s in shapes.items()}


def key_of(seed: int) -> jax.Array:
    """Return `jax.random.key(seed)` without compiling a program."""
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32))


@functools.partial(jax.jit, static_argnames=STATIC)
def _evaluate(arrays, mask, q_positions, k_positions, dropout_key, target, **static):
    inputs = {k: v for k, v in arrays.items() if not k.endswith("_cotangent")}

    def attend(inputs):
        return dot_product_attention(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            mask=mask,
            bias=inputs.get("bias"),
            sinks=inputs.get("sinks"),
            q_positions=q_positions,
            k_positions=k_positions,
            dropout_key=dropout_key,
            return_lse=True,
            **static,
        )

    (out, lse), pull = jax.vjp(attend, inputs)
    (gradients,) = pull((arrays["out_cotangent"], arrays["lse_cotangent"]))
    return {"out": out, "lse": lse, **{f"d{name}": g for name, g in gradients.items()}}


def reference(
    arrays: dict[str, Any], mask: np.ndarray | None = None, **settings: Any
) -> dict[str, np.ndarray]:
    """Return the results of the oracle; `arrays` may contain `bias` and `sinks`."""
    host = {name: oracle.double(x) for name, x in arrays.items()}
    bias, sinks = host.get("bias"), host.get("sinks")
    inputs = host["query"], host["key"], host["value"]
    settings = {"mask": mask, "bias": bias, "sinks": sinks, **settings}
    forward = oracle.attention(*inputs, **settings)
    back = oracle.attention_gradients(
        *inputs, host["out_cotangent"], host["lse_cotangent"], **settings
    )
    results = {"out": forward.out, "lse": forward.lse}
    results |= {"dquery": back.query, "dkey": back.key, "dvalue": back.value}
    if bias is not None:
        results["dbias"] = oracle.sum_to(back.scores, bias.shape)
    if sinks is not None:
        results["dsinks"] = back.sinks
    return results


def every_mask(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int):
    """Yield a name, a mask, its predicate and the number of heads with different masks."""
    lengths = rng.integers(0, keys, batch)
    valid = np.arange(keys)[None, :] < lengths[:, None]
    valid[0, :3] = False
    q_ids, k_ids = rng.integers(0, 4, (batch, queries)), rng.integers(1, 4, (batch, keys))
    q_ids, k_ids, lengths = (x.astype(np.int32) for x in (q_ids, k_ids, lengths))
    table = rng.random((batch, heads, queries, keys)) < 0.4
    table[:, 0, 1] = False
    plane = rng.random((queries, keys)) < 0.4
    ids, tail = Segments(q_ids, k_ids), Padding(valid)
    band = oracle.both(oracle.causal(), oracle.window(keys // 5))
    yield "causal", Causal() & tail, oracle.both(oracle.causal(), oracle.padding(valid)), 1
    yield "window", Causal() & Window(keys // 5), band, 1
    yield (
        "segments",
        Window(keys // 3, keys // 4) & ids,
        oracle.both(oracle.window(keys // 3, keys // 4), oracle.segments(q_ids, k_ids)),
        1,
    )
    yield (
        "prefix",
        Causal() | Prefix(lengths),
        oracle.either(oracle.causal(), oracle.prefix(lengths)),
        1,
    )
    yield "dense", Dense(table), oracle.dense(table), heads
    yield (
        "composition",
        ~(Causal() & Window(keys // 5)) & Predicate(_sparse) | tail & Dense(plane),
        oracle.either(
            oracle.both(oracle.negation(band), lambda b, n, q, k: (q * 3 + k) % 5 == 0),
            oracle.both(oracle.padding(valid), oracle.dense(plane)),
        ),
        1,
    )


def _sparse(q_positions, k_positions):
    return (q_positions * 3 + k_positions) % 5 == 0


# Numbers of rows and heads that powers of two do not divide into groups.
CROWDS = {
    "rows together, masks of rows": dict(batch=6, heads=18, kv_heads=9, queries=71, keys=139),
    "rows together, masks of heads": dict(batch=6, heads=18, kv_heads=9, queries=71, keys=139),
    "rows apart": dict(batch=3, heads=18, kv_heads=9, queries=71, keys=263),
    "groups of heads": dict(batch=2, heads=66, kv_heads=33, queries=71, keys=139),
}


def crowd_mask(name: str, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Return the mask of a crowd, and the same mask as an array.

    A tile that is skipped for one of the rows or heads that may share it is full for another one
    and partial for a third one.
    """
    sizes = CROWDS[name]
    rows, heads, queries, keys = (sizes[x] for x in ("batch", "heads", "queries", "keys"))
    if name == "rows apart":
        ids = np.sort(rng.integers(0, 3, (rows, keys)), axis=1)
        valid = np.arange(keys)[None, :] < np.array([keys, keys - 1, 100])[:, None]
        mask = Segments(ids.astype(np.int32)) & Padding(valid)
        return mask, (ids[:, :queries, None] == ids[:, None, :])[:, None] & valid[:, None, None]
    if name == "rows together, masks of rows":
        valid = np.arange(keys)[None, :] < np.array([keys, 128, 100, 0, 131, 7])[:, None]
        return Padding(valid), valid[:, None, None]
    seen = rng.random((1 if name == "groups of heads" else rows, heads, queries, keys)) < 0.5
    seen[:, 0::3, :64], seen[:, 1::3, :64] = True, False
    seen[:, 2::5, 64:], seen[:, 0, 9] = False, False
    return Dense(seen), seen


MASKS = [name for name, *_ in every_mask(np.random.default_rng(0), 1, 1, 5, 5)]


def plain_attention(query, key, value, mask, bias, sinks, scale, softcap):
    """Compute attention in the usual way, with every step in the dtype of the inputs."""
    dtype, group = query.dtype, query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) * jnp.asarray(scale, dtype)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.astype(dtype)
    scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(dtype)[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=3)
    weights = jax.nn.softmax(scores, axis=3)[..., : key.shape[1]]
    return jnp.einsum("BNTS,BSNH->BTNH", weights, value)


def _scattered(q, k):
    """Show five of eight pairs; with few keys, some rows see none."""
    return ((q * 5 + k * 3) & 7) < 5


HIDDEN = "padding", "empty slots", "segments", "expired", "future"


@pytest.mark.slow_except(
    "test_every_mask_matches_reference[composition]",
    "test_all_options_combined_match_reference",
    "test_empty_axes_produce_empty_or_zero_results",
    "test_masked_keys_and_values_have_no_influence[future-3.3e+38]",
)
class AttentionSuite:
    """Tests of one implementation.

    Tests share shapes and settings if possible, because each compilation takes seconds.
    """

    implementation: str
    target: Target | None = None
    """The target of the kernels, if it is not the device of this process."""
    may_refuse = False
    """Whether a test is skipped, not failed, if `explain_attention` gives a reason."""
    forward_tolerance = FORWARD_F32
    gradient_tolerance = GRADIENT_F32
    dim = 8
    """Head dimension, if it does not matter to a test."""
    dtype = "float32"
    """Dtype of the inputs, if it does not matter to a test."""
    queries = 29
    span = 37
    """Numbers of queries and keys, if they do not matter to a test: more than one tile."""

    @pytest.fixture(autouse=True)
    def on_target(self):
        with contextlib.nullcontext() if self.target is None else using(self.target):
            yield

    def assert_unchanged(self, found: Any, clean: Any, name: str) -> None:
        """Check that values that no query sees do not change the results."""
        assert_same_bits(found, clean, name)

    def draw(self, seed: int, **sizes: Any) -> dict[str, jax.Array]:
        usual = dict(queries=self.queries, keys=self.span, dim=self.dim, dtype=self.dtype)
        return draw(seed, **{"value_dim": self.dim} | usual | sizes)

    def evaluate(
        self,
        arrays: dict[str, jax.Array],
        mask: Any = None,
        *,
        q_positions: Any = None,
        k_positions: Any = None,
        dropout_key: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> dict[str, jax.Array]:
        """Return output, log-sum-exp and the gradient of every input from one compiled call."""
        if self.may_refuse:
            reasons = explain_attention(
                arrays["query"], arrays["key"], arrays["value"], mask=mask,
                bias=arrays.get("bias"), sinks=arrays.get("sinks"), softcap=softcap,
                q_positions=q_positions, k_positions=k_positions, return_lse=True,
                dropout_rate=dropout_rate,
                dropout_key=key_of(0) if dropout_rate else None,
            )  # fmt: skip
            if reasons[self.implementation] is not None:
                pytest.skip(str(reasons[self.implementation]))
        return _evaluate(
            arrays, mask, q_positions, k_positions, dropout_key, scale=scale, softcap=softcap,
            dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout,
            implementation=self.implementation, target=self.target,
        )  # fmt: skip

    def attend(self, query, key, value, **settings):
        try:
            return dot_product_attention(
                query, key, value, implementation=self.implementation, **settings
            )
        except NotImplementedError as error:
            if self.may_refuse and str(error).startswith(f"{self.implementation}: "):
                pytest.skip(str(error))
            raise

    def check(self, actual: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
        """Check results within tolerance; rows that see nothing must be exactly zero and -inf."""
        assert actual.keys() == expected.keys()
        lse = np.asarray(actual["lse"])
        assert lse.dtype == np.float32
        fully_masked = np.isneginf(expected["lse"])
        assert (np.isneginf(lse) == fully_masked).all(), "lse is -inf in the wrong rows"
        for name in ("out", "dquery"):
            rows = np.asarray(actual[name])[fully_masked]
            assert not rows.any(), f"{name} of a fully masked row is not zero"
        actual = actual | {"lse": np.where(fully_masked, 0.0, lse)}
        expected = expected | {"lse": np.where(fully_masked, 0.0, expected["lse"])}
        for name, value in expected.items():
            if np.any(value):
                forward = name in ("out", "lse")
                limit = self.forward_tolerance if forward else self.gradient_tolerance
                assert_near(actual[name], value, limit, name)
            else:
                assert not np.asarray(actual[name]).any(), f"{name} should be exactly zero"

    def causal_tail(self) -> tuple[Any, np.ndarray]:
        """Return a causal mask for two rows, one of them padded, and the same mask as an array."""
        valid = np.arange(self.span)[None, :] < np.array([[self.span], [11]])
        seen = np.tri(self.queries, self.span, dtype=bool)[None, None] & valid[:, None, None, :]
        return Causal() & Padding(valid), seen

    # Against the oracle in float32.

    @pytest.mark.parametrize("lengths", LENGTHS, ids=lambda pair: "x".join(map(str, pair)))
    def test_any_sequence_length_matches_reference(self, lengths):
        queries, keys = lengths
        arrays = self.draw(
            queries * 1000 + keys, queries=queries, keys=keys, heads=2, kv_heads=1, dim=self.dim
        )
        seen = _scattered(np.arange(queries)[:, None], np.arange(keys)[None, :])
        self.check(
            self.evaluate(arrays, Predicate(_scattered)), reference(arrays, seen[None, None])
        )

    @pytest.mark.parametrize(
        "heads", [(4, 4, 8, 8), (10, 5, 4, 3), (8, 2, 8, 16), (8, 1, 16, 5), (3, 1, 1, 1)], ids=str
    )
    def test_any_head_count_and_width_match_reference(self, heads):
        """Each head has its own mask, bias and sink."""
        n, k, dim, value_dim = heads
        rng = np.random.default_rng(n)
        sizes = dict(batch=3, queries=13, keys=17)
        arrays = self.draw(3, heads=n, kv_heads=k, dim=dim, value_dim=value_dim, **sizes)
        arrays["bias"] = rng.normal(size=(3, n, 1, 17)).astype(np.float32)
        arrays["sinks"] = rng.normal(size=n).astype(np.float32)
        mask = rng.random((3, n, 13, 17)) < 0.5
        result = self.evaluate(arrays, Dense(mask))
        assert result["dkey"].shape == (3, 17, k, dim)
        self.check(result, reference(arrays, mask))

    def assert_crowded(self, name: str, arrays: dict[str, jax.Array], mask: Any) -> None:
        """Check that rows and heads share tiles as `name` states, if the implementation can."""

    @pytest.mark.parametrize("name", CROWDS)
    def test_each_row_and_head_uses_its_own_options(self, name):
        """Mask, bias, sink and dropout are independent of how rows and heads share tiles."""
        sizes, rng = CROWDS[name], np.random.default_rng(44)
        arrays = self.draw(45, dim=self.dim, **sizes)
        n, keys = sizes["heads"], sizes["keys"]
        rows = sizes["batch"] if name == "rows apart" else 1
        arrays["bias"] = rng.normal(size=(rows, n, 1, keys)).astype(np.float32)
        arrays["sinks"] = rng.normal(size=n).astype(np.float32)
        mask, seen = crowd_mask(name, rng)
        self.assert_crowded(name, arrays, mask)
        key = jax.random.fold_in(key_of(46), 47)
        shape = sizes["batch"], n, sizes["queries"], keys
        words = np.asarray(jax.random.key_data(key))
        assert words.all(), "a word of the key is 0 and need not be read"
        keep = oracle.dropout_keep(words, self.rate, shape)
        assert abs((keep > 0).mean() - (1 - self.rate)) < 0.01
        result = self.evaluate(arrays, mask, dropout_key=key, dropout_rate=self.rate)
        self.check(result, reference(arrays, seen, keep=keep))

    def test_each_of_many_heads_uses_its_own_slope(self):
        name, slopes = "groups of heads", alibi_slopes(66)
        arrays = self.draw(48, dim=self.dim, **CROWDS[name] | dict(queries=11, keys=13))
        self.assert_crowded(name, arrays, None)
        array = oracle.alibi(np.asarray(slopes), np.arange(11), np.arange(13))
        result = self.evaluate(arrays | {"bias": ALiBi(slopes)})
        (gradient,) = jax.tree.leaves(result.pop("dbias"))
        expected = reference(arrays | {"bias": array})
        distance = oracle.alibi(np.ones(1), np.arange(11), np.arange(13))
        by_head = (expected.pop("dbias") * distance).sum(axis=(0, 2, 3))
        self.check(result, expected)
        assert_near(gradient, by_head, self.gradient_tolerance, "slopes")

    def test_query_heads_use_key_head_of_their_group(self):
        query, key = jnp.zeros((2, 13, 6, self.dim)), jnp.zeros((2, 17, 3, self.dim))
        named = jnp.broadcast_to(jnp.arange(3.0)[None, None, :, None], key.shape)
        out = self.attend(query, key, named)
        expected = np.repeat(np.arange(3.0), 2)[None, None, :, None]
        assert_near(out, np.broadcast_to(expected, out.shape), self.forward_tolerance)

    @pytest.mark.parametrize("name", MASKS)
    def test_every_mask_matches_reference(self, name):
        arrays, rng = self.draw(5), np.random.default_rng(6)
        cases = {k: rest for k, *rest in every_mask(rng, 2, 4, self.queries, self.span)}
        mask, predicate, heads = cases[name]
        positions = np.arange(self.queries), np.arange(self.span)
        seen = oracle.allowed(predicate, *positions, batch=2, heads=heads)
        assert 0.05 < seen.mean() < 0.95
        if name in ("causal", "segments", "dense"):
            assert not seen.any(axis=3).all(), "no row is fully masked"
        self.check(self.evaluate(arrays, mask), reference(arrays, seen))

    def test_masks_use_positions_in_ring_caches_and_ragged_rows(self):
        span = self.span
        arrays = self.draw(7, batch=3, queries=5)
        ring = (np.arange(span) + 11) % span + 40
        ragged = np.where(np.arange(span) < 9, np.arange(span), -1)
        shuffled = np.random.default_rng(8).permutation(span)
        k_positions = np.stack([ring, ragged, shuffled]).astype(np.int32)
        q_positions = np.stack([span + 38 + np.arange(5), np.arange(5) + 6, 3 * np.arange(5) - 3])
        q_positions = q_positions.astype(np.int32)
        predicate = oracle.both(oracle.causal(), oracle.window(4))
        seen = oracle.allowed(predicate, q_positions, k_positions, batch=3)
        assert 0 < seen.mean() < 1
        result = self.evaluate(
            arrays, Causal() & Window(4), q_positions=q_positions, k_positions=k_positions
        )
        self.check(result, reference(arrays, seen))

    @pytest.mark.parametrize("axes", ["B__S", "_NT_"])
    def test_dense_mask_broadcasts_axes_of_length_one(self, axes):
        """Also in a composition, at other positions than 0, 1, 2, ..., and with empty slots."""
        arrays, rng = self.draw(49), np.random.default_rng(50)
        sizes = {"B": 2, "N": 4, "T": self.queries, "S": self.span, "_": 1}
        array = rng.random(tuple(sizes[axis] for axis in axes)) < 0.6
        row = rng.random((1, self.span)) < 0.9
        q_positions = np.arange(self.queries, dtype=np.int32) + 5
        k_positions = rng.permutation(self.span).astype(np.int32) - 2
        predicate = oracle.either(
            oracle.both(oracle.causal(), oracle.dense(array)), oracle.negation(oracle.dense(row))
        )
        heads = 4 if "N" in axes else 1
        seen = oracle.allowed(predicate, q_positions, k_positions, batch=2, heads=heads)
        assert 0.1 < seen.mean() < 0.9
        mask = Causal() & Dense(array) | ~Dense(row)
        result = self.evaluate(arrays, mask, q_positions=q_positions, k_positions=k_positions)
        self.check(result, reference(arrays, seen))

    @pytest.mark.parametrize("softcap", [None, 2.0])
    def test_scale_softcap_and_sinks_match_reference(self, softcap):
        arrays = self.draw(9)
        arrays["sinks"] = np.float32([-3.0, 0.5, 2.0, 7.0])
        if softcap:
            bias = np.random.default_rng(9).normal(size=(1, 4, self.queries, 1))
            arrays["bias"] = bias.astype(np.float32)
        mask, seen = self.causal_tail()
        result = self.evaluate(arrays, mask, scale=0.7, softcap=softcap)
        self.check(result, reference(arrays, seen, scale=0.7, softcap=softcap))

    def test_all_options_combined_match_reference(self):
        """Use scale, softcap, bias, dropout, and sinks near the scores and far from them.

        The first queries of one row see nothing.
        """
        arrays, rng, key = self.draw(55), np.random.default_rng(55), key_of(56)
        arrays["bias"] = rng.normal(size=(self.queries, self.span)).astype(np.float32)
        valid = np.arange(self.span)[None] < [[self.span], [17]]
        valid[1, :5] = False
        seen = np.tri(self.queries, self.span, dtype=bool)[None, None] & valid[:, None, None]
        keep = oracle.dropout_keep(
            np.asarray(jax.random.key_data(key)), self.rate, (2, 4, self.queries, self.span)
        )
        for sinks in ([-3.0, 0.5, 2.0, 7.0], [-200.0, 0.0, 88.0, 200.0]):
            arrays["sinks"] = np.float32(sinks)
            result = self.evaluate(
                arrays, Causal() & Padding(valid), scale=0.7, softcap=3.0,
                dropout_rate=self.rate, dropout_key=key,
            )  # fmt: skip
            self.check(result, reference(arrays, seen, scale=0.7, softcap=3.0, keep=keep))

    def test_sinks_far_above_and_below_scores_match_reference(self):
        """exp(200) overflows, and so does dividing by exp(-200)."""
        arrays = self.draw(9)
        arrays["sinks"] = np.float32([-200.0, 0.0, 88.0, 200.0])
        mask, seen = self.causal_tail()
        self.check(self.evaluate(arrays, mask, scale=0.7), reference(arrays, seen, scale=0.7))

    def test_traced_scale_is_applied_once_and_has_gradient(self):
        arrays = self.draw(49, queries=13, keys=17)
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])

        @jax.jit
        def loss(scale):
            out = self.attend(arrays["query"], arrays["key"], arrays["value"], scale=scale)
            return (out * arrays["out_cotangent"]).sum(), out

        (_, out), slope = jax.value_and_grad(loss, has_aux=True)(jnp.float32(0.7))
        expected = reference(arrays, scale=0.7)
        assert_near(out, expected["out"], 2 * self.forward_tolerance)
        # s = scale q.k, so that sum(ds q.k) = sum(dq q) / scale
        by_hand = (expected["dquery"] * oracle.double(arrays["query"])).sum() / 0.7
        assert abs(slope - by_hand) < 1e-5 * np.abs(expected["dquery"]).sum()

    def test_per_head_scale_multiplies_queries_and_has_gradient(self):
        arrays = self.draw(61)
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])
        by_head = np.float32([0.2, 1.3, -0.4, 0.7])
        mask, seen = self.causal_tail()

        @jax.jit
        def loss(scale, query):
            out = self.attend(query, arrays["key"], arrays["value"], mask=mask, scale=scale)
            return (out.astype(np.float32) * arrays["out_cotangent"]).sum(), out

        (_, out), (slope, dquery) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            jnp.asarray(by_head), arrays["query"]
        )
        # equivalent to queries that are multiplied beforehand
        host = {name: oracle.double(x) for name, x in arrays.items()}
        host["query"] = host["query"] * by_head[:, None]
        expected = reference(host, seen, scale=1.0)
        assert_near(out, expected["out"], 2 * self.forward_tolerance)
        assert_near(dquery, expected["dquery"] * by_head[:, None], 2 * self.gradient_tolerance)
        by_hand = (expected["dquery"] * oracle.double(arrays["query"])).sum(axis=(0, 1, 3))
        most = np.abs(expected["dquery"]).sum() * (1 + self.gradient_tolerance / GRADIENT_F32)
        assert np.abs(slope - by_hand).max() < 1e-5 * most

    # Bias.

    @pytest.mark.parametrize("axes", ["BNTS", "_N_S", "B_T_", "__TS", "TS", ""])
    def test_array_bias_of_any_broadcast_shape_matches_reference(self, axes, dtype="float32"):
        sizes = {"B": 2, "N": 4, "T": self.queries, "S": self.span, "_": 1}
        shape = tuple(sizes[axis] for axis in axes)
        arrays = self.draw(10)
        arrays["bias"] = jnp.asarray(np.random.default_rng(11).normal(size=shape), dtype)
        mask, seen = self.causal_tail()
        result = self.evaluate(arrays, mask)
        assert (result["dbias"].shape, result["dbias"].dtype) == (shape, dtype)
        self.check(result, reference(arrays, seen))

    def test_array_bias_in_input_dtype_matches_reference(self):
        self.test_array_bias_of_any_broadcast_shape_matches_reference("_NTS", self.dtype)

    def test_alibi_bias_matches_equivalent_array_bias(self):
        slopes, arrays = alibi_slopes(4), self.draw(12)
        q_positions, k_positions = np.arange(self.queries) + 8, np.arange(self.span)
        array = oracle.alibi(np.asarray(slopes), q_positions, k_positions)
        result = self.evaluate(
            arrays | {"bias": ALiBi(slopes)}, Causal(), q_positions=jnp.asarray(q_positions)
        )
        (slopes_gradient,) = jax.tree.leaves(result.pop("dbias"))
        seen = oracle.allowed(oracle.causal(), q_positions, k_positions)
        expected = reference(arrays | {"bias": array}, seen)
        dscores = expected.pop("dbias")
        self.check(result, expected)
        distance = oracle.alibi(np.ones(1), q_positions, k_positions)
        by_head = (dscores * distance).sum(axis=(0, 2, 3))
        assert_near(slopes_gradient, by_head, self.gradient_tolerance, "slopes")

    def test_constant_slopes_do_not_change_other_gradients(self):
        slopes, arrays = alibi_slopes(4), self.draw(13)
        seen = oracle.allowed(oracle.causal(), np.arange(self.queries), np.arange(self.span))
        array = oracle.alibi(np.asarray(slopes), np.arange(self.queries), np.arange(self.span))
        inputs = arrays["query"], arrays["key"], arrays["value"]

        def attend(*inputs):
            return self.attend(*inputs, mask=Causal(), bias=ALiBi(slopes))

        found = jax.vjp(attend, *inputs)[1](arrays["out_cotangent"])
        silent = jnp.zeros_like(arrays["lse_cotangent"])
        expected = reference(arrays | {"bias": array, "lse_cotangent": silent}, seen)
        for name, x in zip(("dquery", "dkey", "dvalue"), found, strict=True):
            assert_near(x, expected[name], self.gradient_tolerance, name)

    def test_relative_bias_table_gradient_sums_over_buckets(self):
        arrays = self.draw(13)
        table = np.random.default_rng(14).normal(size=(8, 4)).astype(np.float32)
        bias = RelativeBias(jnp.asarray(table), True, 19)
        bucket = functools.partial(oracle.t5_bucket, bidirectional=True, buckets=8, longest=19)
        buckets = np.array([[bucket(k - q) for k in range(self.span)] for q in range(self.queries)])
        array = np.moveaxis(table[buckets], 2, 0)[None]
        result = self.evaluate(arrays | {"bias": bias}, Window(25, 25))
        (gradient,) = jax.tree.leaves(result.pop("dbias"))
        positions = np.arange(self.queries), np.arange(self.span)
        expected = reference(
            arrays | {"bias": array}, oracle.allowed(oracle.window(25, 25), *positions)
        )
        (dscores,) = expected.pop("dbias")
        self.check(result, expected)
        sums = np.stack([dscores[:, buckets == i].sum(axis=1) for i in range(8)])
        used = (sums != 0).all(axis=1)
        # no key after the query has distance 0
        assert used.tolist() == [True] * 4 + [False] + [True] * 3
        assert_near(gradient, sums, self.gradient_tolerance, "table")

    # Dropout.

    rate = 0.4

    def recovered_keep(self, seed: int) -> np.ndarray:
        """Return the multipliers that dropout applied, [B, N, T, S].

        All weights are equal, and the value of each key is one-hot.
        """
        span = self.span
        arrays = self.draw(15, value_dim=span)
        arrays["query"] = np.zeros_like(arrays["query"])
        named = np.eye(span, dtype=arrays["value"].dtype)[None, :, None, :]
        arrays["value"] = np.broadcast_to(named, arrays["value"].shape)
        out = self.evaluate(arrays, dropout_key=key_of(seed), dropout_rate=self.rate)["out"]
        return np.asarray(out).transpose(0, 2, 1, 3) * span

    def test_dropout_matches_rate_and_preserves_mean(self):
        rate, keep = self.rate, self.recovered_keep(1)
        kept = keep > 0
        deviation = math.sqrt(rate * (1 - rate))
        assert abs(kept.mean() - (1 - rate)) < 4 * deviation / math.sqrt(keep.size)
        assert np.abs(keep[kept] - 1 / (1 - rate)).max() < 1e-5, "the expectation is biased"
        for axes in itertools.combinations(range(4), 3):
            marginal = kept.mean(axis=axes)
            limit = 5 * deviation / math.sqrt(keep.size / marginal.size)
            assert np.abs(marginal - (1 - rate)).max() < limit, "dropout has a pattern"
        for axis in range(4):  # neighbours are independent
            flat = np.moveaxis(kept, axis, 0)
            same = (flat[1:] == flat[:-1]).mean()
            assert abs(same - rate**2 - (1 - rate) ** 2) < 5 * 0.5 / math.sqrt(keep.size / 2)

    def test_dropout_depends_only_on_key(self):
        first, again, other = (self.recovered_keep(seed) > 0 for seed in (1, 1, 2))
        assert (first == again).all()
        assert 0.47 < (first == other).mean() < 0.57  # 0.52 by chance

    def test_backward_pass_reuses_forward_dropout_mask(self):
        arrays, keep = self.draw(16), self.recovered_keep(3)
        mask, seen = self.causal_tail()
        result = self.evaluate(arrays, mask, dropout_key=key_of(3), dropout_rate=self.rate)
        exact = np.where(keep > 0, 1 / (1 - self.rate), 0.0)
        self.check(result, reference(arrays, seen, keep=exact))

    def test_broadcast_dropout_drops_same_pairs_in_all_rows_and_heads(self):
        arrays, key = self.draw(51), key_of(52)
        mask, seen = self.causal_tail()
        words, shape = np.asarray(jax.random.key_data(key)), (1, 1, self.queries, self.span)
        keep = np.broadcast_to(oracle.dropout_keep(words, self.rate, shape), (2, 4, *shape[2:]))
        result = self.evaluate(
            arrays, mask, dropout_key=key, dropout_rate=self.rate, broadcast_dropout=True
        )
        self.check(result, reference(arrays, seen, keep=keep))

    # Rows that see nothing, and lengths of zero.

    def test_fully_masked_rows_are_zero_and_do_not_affect_others(self):
        fully_masked = [0, 4, self.queries - 1]
        arrays = self.draw(17)
        mask = np.random.default_rng(17).random((2, 4, self.queries, self.span)) < 0.5
        mask[..., 0] = True
        without = mask.copy()
        without[1, :, fully_masked] = False
        rows = np.ones((2, self.queries), bool)
        rows[1, fully_masked] = False
        silenced = arrays | {
            name: arrays[name] * rows.reshape(2, -1, *(1,) * (arrays[name].ndim - 2))
            for name in ("out_cotangent", "lse_cotangent")
        }
        whole = self.evaluate(silenced, Dense(mask))
        result = self.evaluate(arrays, Dense(without))
        self.check(result, reference(arrays, without))
        for name in ("out", "lse", "dquery"):
            assert_same_bits(np.asarray(result[name])[rows], np.asarray(whole[name])[rows], name)
        for name in ("dkey", "dvalue"):
            assert_same_bits(result[name], whole[name], name)

    def test_fully_masked_rows_are_zero_with_all_options(self):
        arrays = self.draw(18)
        arrays["sinks"] = np.float32([0.5, -1.0, 2.0, 30.0])
        arrays["bias"] = jnp.full((1, 4, 1, self.span), 5.0)
        nothing = Padding(jnp.zeros((2, self.span), bool))
        result = self.evaluate(
            arrays, nothing, softcap=2.0, dropout_rate=self.rate, dropout_key=key_of(5)
        )
        assert np.isneginf(np.asarray(result.pop("lse"))).all()
        for name, value in result.items():
            assert not np.asarray(value).any(), f"{name} is not exactly zero"

    @pytest.mark.parametrize("shape", [(2, 3, 0), (2, 0, 5), (0, 3, 5)], ids=str)
    def test_empty_axes_produce_empty_or_zero_results(self, shape):
        batch, queries, keys = shape
        arrays = self.draw(19, batch=batch, queries=queries, keys=keys)
        for mask in (None, Causal()):
            result = self.evaluate(arrays, mask)
            assert result["out"].shape == (batch, queries, 4, 8)
            assert np.isneginf(np.asarray(result["lse"])).all()
            for name, value in result.items():
                assert name == "lse" or not np.asarray(value).any()

    def test_vmap_over_empty_axis_returns_empty_result(self):
        arrays = self.draw(19, queries=5)
        inputs = [jnp.zeros((0, *arrays[name].shape)) for name in ("query", "key", "value")]
        attend = jax.vmap(lambda *x: self.attend(*x, mask=Causal()))
        gradients = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))(*inputs)
        for x, y in zip((attend(*inputs), *gradients), (inputs[0], *inputs), strict=True):
            assert x.shape == y.shape

    # Masked inputs have no influence.

    @pytest.mark.parametrize("bad", [3.3e38], ids=str)  # finite in bfloat16 too
    @pytest.mark.parametrize("scenario", HIDDEN)
    def test_masked_keys_and_values_have_no_influence(self, scenario, bad):
        """Replace masked keys and values, and compare the clean results with the oracle.

        All scenarios share one program.
        """
        span, slots = self.span, np.arange(self.span)
        arrays = self.draw(20)
        arrays["sinks"] = np.float32([0.5, -1.0, 2.0, 3.0])
        ids, valid = np.ones((2, 4 * span), np.int32), np.ones((2, 4 * span), bool)
        q_positions = np.stack([span + 7 * np.arange(self.queries) // self.queries] * 2)
        k_positions = np.stack([slots, (slots + 11) % span])
        if scenario == "padding":
            valid[0, span // 2 : span], valid[1, 3:span] = False, False
        elif scenario == "empty slots":
            k_positions[0, ::3], k_positions[1, 2:] = -1, -1
        elif scenario == "segments":
            ids[0, 5:9], ids[1, : span // 2] = 2, 2
        elif scenario == "expired":
            q_positions, k_positions = q_positions + span, k_positions + span // 2
        else:
            q_positions = np.stack([np.arange(self.queries), np.arange(self.queries) + 2])
            ids[0, 3], valid[0, 3] = 2, False  # this query sees nothing
        far = q_positions[:, :, None] - k_positions[:, None]
        seen = (k_positions >= 0)[:, None] & (far >= 0) & (far < span + 3)
        of_keys = np.take_along_axis(ids, np.maximum(k_positions, 0), 1)[:, None]
        seen &= np.take_along_axis(ids, q_positions, 1)[:, :, None] == of_keys
        seen &= np.take_along_axis(valid, np.maximum(k_positions, 0), 1)[:, None]
        hidden = ~seen.any(axis=1)
        assert hidden.any(axis=1).all() and seen.any(axis=(1, 2)).all()
        mask = Causal() & Window(span + 3) & Padding(valid) & Segments(ids)
        positions = dict(
            q_positions=q_positions.astype(np.int32), k_positions=k_positions.astype(np.int32)
        )
        clean = self.evaluate(arrays, mask, softcap=20.0, **positions)
        self.check(clean, reference(arrays, seen[:, None], softcap=20.0))
        nonfinite = {name: np.array(arrays[name]) for name in ("key", "value")}
        for x in nonfinite.values():
            x[hidden] = bad
        result = self.evaluate(arrays | nonfinite, mask, softcap=20.0, **positions)
        for name, value in clean.items():
            self.assert_unchanged(result[name], value, name)
        for name in ("dkey", "dvalue"):
            assert not np.asarray(result[name])[hidden].any(), f"{name} of a masked key is not 0"

    def test_future_keys_have_exactly_zero_gradient(self):
        arrays = self.draw(22, queries=self.span)
        at = self.span // 2
        for name in ("out_cotangent", "lse_cotangent"):
            arrays[name] = arrays[name].at[:, at:].set(0.0)
        result = self.evaluate(arrays, Causal())
        for name in ("dkey", "dvalue"):
            gradient = np.asarray(result[name])
            assert np.abs(gradient[:, :at]).max(axis=(2, 3)).min() > 0
            assert not gradient[:, at:].any()

    # Extreme scores: the products of the inputs are exact, so that float64 is a valid reference.

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_scores_of_100_000_produce_correct_finite_results(self, dtype):
        span = self.span
        arrays = self.draw(25, batch=1, queries=6, keys=span, heads=2, kv_heads=1, dim=self.dim)
        big, small = (200.0, 300.0) if dtype == "float16" else (100.0, 1000.0)
        signs = -np.ones((6, span))
        signs[0] = 1
        signs[2, 5] = 1
        signs[3, [2, span - 1]] = 1
        signs[4, ::2] = 0
        signs[5, :9] = 1
        query, key = np.zeros((1, 6, 2, self.dim)), np.zeros((1, span, 1, self.dim))
        query[0, :, :, :6] = big * np.eye(6)[:, None, :]
        key[0, :, 0, :6] = small * signs.T
        arrays |= {"query": jnp.asarray(query), "key": jnp.asarray(key)}
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
        arrays["lse_cotangent"] = arrays["lse_cotangent"].astype(jnp.float32)
        expected = reference(arrays, scale=1.0)
        assert np.abs(expected["lse"]).max() > 5e4
        result = self.evaluate(arrays, scale=1.0)
        if dtype == "float32":
            self.check(result, expected)
        else:
            assert_near(result["lse"], expected["lse"], FORWARD_F32)
            silent = arrays | {"lse_cotangent": jnp.zeros_like(arrays["lse_cotangent"])}
            self.check_low_precision(silent, None, None, scale=1.0)

    @pytest.mark.parametrize("level", [-500.0, -90.0, 500.0])
    def test_equal_extreme_scores_have_equal_weights(self, level):
        """Includes an lse below -88.7, for which exp(-lse) overflows, in a half-empty tile."""
        arrays = self.draw(26, queries=5, keys=192, heads=2, kv_heads=1, dim=self.dim)
        arrays["query"] = jnp.zeros_like(arrays["query"]).at[..., 0].set(level / 4)
        arrays["key"] = arrays["key"].at[..., 0].set(4.0)
        valid = np.arange(192)[None, :] < np.array([[192], [61]])
        result = self.evaluate(arrays, Padding(valid), scale=1.0)
        self.check(result, reference(arrays, valid[:, None, None, :], scale=1.0))

    def test_score_below_any_mask_constant_still_contributes(self):
        query, key, value = (self.draw(27)[name] for name in ("query", "key", "value"))

        def two_rows(q, k):
            return ((q == 0) & (k == 3)) | ((q == 1) & (k >= 4) & (k < 6))

        mask = two_rows(np.arange(self.queries)[:, None], np.arange(self.span)[None, :])
        bias = np.full((1, 1, 1, self.span), -(2.0**120))
        out = self.attend(
            jnp.zeros_like(query), key, value,
            mask=Predicate(two_rows), bias=bias.astype(np.float32),
        )  # fmt: skip
        inputs = 0 * oracle.double(query), oracle.double(key), oracle.double(value)
        expected = oracle.attention(*inputs, mask=mask[None, None], bias=bias).out
        assert expected[:, :2].all() and not expected[:, 2:].any()
        assert_near(out, expected, self.forward_tolerance)

    # Low precision: relative to the error of plain attention, as in FlashAttention's tests.

    @pytest.mark.parametrize(
        ("dtype", "options"), [("bfloat16", False), ("bfloat16", True), ("float16", True)]
    )
    def test_low_precision_is_as_accurate_as_plain_attention(self, dtype, options):
        arrays = self.draw(28, dim=16, value_dim=16, dtype=dtype)
        scale, softcap = 0.25, 4.0 if options else None
        if options:
            bias = np.random.default_rng(29).normal(size=(1, 4, 1, self.span))
            arrays["bias"] = bias.astype(np.float32)
            arrays["sinks"] = np.float32([-1.0, 0.5, 1.0, 2.0])
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])
        self.check_low_precision(arrays, *self.causal_tail(), scale=scale, softcap=softcap)

    def check_low_precision(self, arrays, mask, seen, *, scale, softcap=None) -> None:
        expected = reference(arrays, seen, scale=scale, softcap=softcap)
        result = self.evaluate(arrays, mask, scale=scale, softcap=softcap)
        for name in ("query", "key", "value"):
            assert result[f"d{name}"].dtype == result["out"].dtype == arrays[name].dtype
        inputs = [arrays.get(name) for name in ("query", "key", "value", "bias", "sinks")]

        @jax.jit
        def plain(inputs, cotangent):
            def attend(query, key, value, bias, sinks):
                visible = jnp.asarray(True if seen is None else seen)
                return plain_attention(query, key, value, visible, bias, sinks, scale, softcap)

            out, pull = jax.vjp(attend, *inputs)
            return out, *pull(cotangent)

        results = plain(inputs, arrays["out_cotangent"])
        names = ("out", "dquery", "dkey", "dvalue", "dbias", "dsinks")
        for name, usual in zip(names, results, strict=True):
            if usual is None:
                continue
            error, usual_error = (largest_error(x, expected[name]) for x in (result[name], usual))
            assert usual_error > 0
            limit = LOW_PRECISION_GRADIENT * usual_error
            if name == "out":
                limit = LOW_PRECISION_FORWARD * usual_error + LOW_PRECISION_FORWARD_FLOOR
            assert error <= limit, f"{name}: error {error:.3g}, plain {usual_error:.3g}"

    @pytest.mark.parametrize("sharper", [1.0, 16.0])
    def test_gradients_for_peaked_softmax_are_as_accurate_as_jax_nn(self, sharper):
        """In rows with few large weights dp - D cancels, so D needs the unrounded output."""
        arrays = self.draw(62, queries=64, keys=64, dim=64, value_dim=64, dtype="bfloat16")
        arrays["query"] = arrays["query"] * jnp.bfloat16(sharper)
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])
        expected = reference(arrays, np.tri(64, dtype=bool)[None, None])
        result = self.evaluate(arrays, Causal())

        @jax.jit
        def usual(query, key, value, cotangent):
            attend = functools.partial(
                jax.nn.dot_product_attention, is_causal=True, implementation="xla"
            )
            return jax.vjp(attend, query, key, value)[1](cotangent)

        names = "query", "key", "value"
        found = usual(*(arrays[name] for name in names), arrays["out_cotangent"])
        for name, theirs in zip(names, found, strict=True):
            wanted = expected[f"d{name}"]
            ours, theirs = (
                np.linalg.norm(oracle.double(x) - wanted) / np.linalg.norm(wanted)
                for x in (result[f"d{name}"], theirs)
            )
            assert ours <= 1.05 * theirs, f"d{name}: error {ours:.2g}, jax.nn {theirs:.2g}"

    # Runs and transformations.

    @pytest.mark.usefixtures("usual_compilation")
    @pytest.mark.parametrize("options", [False, True], ids=["plain", "every option"])
    def test_repeated_runs_are_bit_identical(self, options):
        """Run each of 8 configurations five times: two masks, with and without grouped heads."""
        settings: dict[str, Any] = {}
        if options:
            settings = dict(softcap=2.0, dropout_rate=self.rate, dropout_key=key_of(31))
        padded, _ = self.causal_tail()
        for mask, kv_heads in itertools.product((padded, Window(40, 9)), (1, 4)):
            arrays = self.draw(30, kv_heads=kv_heads)
            if options:
                arrays["sinks"] = jnp.arange(4.0)
            first, *others = (self.evaluate(arrays, mask, **settings) for _ in range(5))
            for other, name in itertools.product(others, first):
                assert_same_bits(other[name], first[name], name)

    @pytest.mark.parametrize("stacked", [("query",), ("key", "value"), ("valid", "bias")], ids=str)
    def test_vmap_over_any_argument_matches_loop(self, stacked):
        """The gradient of an unmapped argument is the sum over the calls."""
        rng = np.random.default_rng(33)
        arrays = self.draw(33, queries=13, keys=17)
        inputs = {name: arrays[name] for name in ("query", "key", "value")}
        inputs["bias"] = rng.normal(size=(1, 4, 1, 17)).astype(np.float32)
        inputs["valid"] = jnp.asarray(rng.random((2, 17)) < 0.8)
        axes: dict[str, int | None] = dict.fromkeys(inputs)
        for axis, name in enumerate(stacked):
            shape, axes[name] = inputs[name].shape, 2 * axis
            if name == "valid":
                inputs[name] = jnp.asarray(rng.random((3, *shape)) < 0.6)
                continue
            copies = jnp.asarray(rng.normal(size=(3, *shape)), inputs[name].dtype)
            inputs[name] = jnp.moveaxis(copies, 0, 2 * axis)

        def attend(inputs):
            return self.attend(
                inputs["query"], inputs["key"], inputs["value"], bias=inputs["bias"],
                mask=Causal() & Padding(inputs["valid"]),
            )  # fmt: skip

        cotangents = rng.normal(size=(3, *arrays["out_cotangent"].shape)).astype(np.float32)

        @jax.jit
        def mapped(inputs):
            def total(real):
                out = jax.vmap(attend, (axes,))(real | {"valid": inputs["valid"]})
                return (out * cotangents).sum(), out

            real = {name: x for name, x in inputs.items() if name != "valid"}
            return jax.grad(total, has_aux=True)(real)

        gradients, out = mapped(inputs)
        assert out.shape == (3, 2, 13, 4, 8)
        sums = {name: np.zeros(g.shape) for name, g in gradients.items()}
        for i in range(3):
            one = {
                name: np.asarray(x if axes[name] is None else jnp.take(x, i, axis=axes[name]))
                for name, x in inputs.items()
            }
            seen = np.tri(13, 17, dtype=bool)[None, None] & one.pop("valid")[:, None, None, :]
            silent = {"lse_cotangent": np.zeros((2, 13, 4)), "out_cotangent": cotangents[i]}
            expected = reference(one | silent, seen)
            assert_near(out[i], expected["out"], self.forward_tolerance)
            for name, total in sums.items():
                part = total if axes[name] is None else np.moveaxis(total, axes[name], 0)[i]
                part += expected[f"d{name}"]
        for name, total in sums.items():
            assert_near(gradients[name], total, self.gradient_tolerance, name)

    def test_dense_mask_tiles_may_differ_between_heads(self):
        """Each head of each row has its own skipped, partial and full tiles."""
        rng = np.random.default_rng(39)
        arrays = self.draw(39, queries=257, keys=271)
        tiles = rng.random((2, 4, 3, 3)) < 0.5
        tiles[0, 2, 1] = False
        seen = np.kron(tiles, np.ones((1, 1, 128, 128), bool))[:, :, :257, :271]
        seen[..., 0] ^= rng.random(seen.shape[:3]) < 0.5
        result = self.evaluate(arrays, Dense(seen))
        self.check(result, reference(arrays, seen))

    def test_vmap_over_dense_mask_matches_loop(self):
        rng = np.random.default_rng(37)
        arrays = self.draw(37, queries=13, keys=17)
        matrices = rng.random((3, 2, 1, 13, 17)) < 0.6
        cotangents = rng.normal(size=(3, *arrays["out_cotangent"].shape))

        def attend(matrix, *inputs):
            mask = ~Dense(matrix) & Causal() | Dense(matrix[:, :, ::-1])
            return self.attend(*inputs, mask=mask)

        @jax.jit
        def mapped(matrices, inputs):
            def total(inputs):
                out = jax.vmap(attend, (0, None, None, None))(matrices, *inputs)
                return (out * cotangents.astype(out.dtype)).sum(), out

            return jax.grad(total, has_aux=True)(inputs)

        inputs = arrays["query"], arrays["key"], arrays["value"]
        gradients, out = mapped(jnp.asarray(matrices), inputs)
        sums = [np.zeros(x.shape) for x in inputs]
        silent = {"lse_cotangent": np.zeros((2, 13, 4))}
        for i, matrix in enumerate(matrices):
            seen = (~matrix & np.tri(13, 17, dtype=bool)) | matrix[:, :, ::-1]
            expected = reference(arrays | silent | {"out_cotangent": cotangents[i]}, seen)
            assert_near(out[i], expected["out"], self.forward_tolerance)
            for total, name in zip(sums, ("query", "key", "value"), strict=True):
                total += expected[f"d{name}"]
        for found, total in zip(gradients, sums, strict=True):
            assert_near(found, total, self.gradient_tolerance)

    def test_softcap_far_above_scores_has_no_effect(self):
        arrays = self.draw(41, queries=13, keys=17)
        inputs = arrays["query"], arrays["key"], arrays["value"]
        out = self.attend(*inputs, softcap=1e7)
        assert_near(out, reference(arrays)["out"], self.forward_tolerance)

    def test_scan_over_calls_matches_loop(self):
        arrays = self.draw(35, queries=13, keys=17)
        queries = jnp.stack([arrays["query"] * s for s in (1.0, 0.5, 2.0)])

        def step(total, query):
            out = self.attend(query, arrays["key"], arrays["value"], mask=Window(5, 3))
            return total + out.sum(), out

        _, outs = jax.jit(lambda queries: jax.lax.scan(step, 0.0, queries))(queries)
        seen = oracle.allowed(oracle.window(5, 3), np.arange(13), np.arange(17))
        for query, out in zip(queries, outs, strict=True):
            expected = reference(arrays | {"query": query}, seen)["out"]
            assert_near(out, expected, self.forward_tolerance)

    def test_rematerialization_does_not_change_gradients_with_dropout(self):
        arrays = self.draw(36)
        mask, _ = self.causal_tail()
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])
        inputs = arrays["query"], arrays["key"], arrays["value"]

        @jax.checkpoint
        def loss(query, key, value, dropout_key):
            out = self.attend(
                query, key, value, mask=mask, dropout_rate=self.rate, dropout_key=dropout_key
            )
            return (out * arrays["out_cotangent"]).sum()

        kept = self.evaluate(arrays, mask, dropout_rate=self.rate, dropout_key=key_of(37))
        redone = jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs, key_of(37))
        for name, gradient in zip(("dquery", "dkey", "dvalue"), redone, strict=True):
            assert_near(gradient, kept[name], self.forward_tolerance, name)

    def test_jacobian_rows_match_gradients(self):
        arrays = self.draw(38, batch=1, queries=2, keys=5, heads=2, kv_heads=1, dim=3, value_dim=2)
        arrays["lse_cotangent"] = jnp.zeros_like(arrays["lse_cotangent"])

        def attend(query):
            return self.attend(query, arrays["key"], arrays["value"], mask=Window(2, 4))

        jacobian = jax.jit(jax.jacrev(attend))(arrays["query"])
        seen = oracle.allowed(oracle.window(2, 4), np.arange(2), np.arange(5))
        expected = np.zeros(jacobian.shape)
        for at in np.ndindex(arrays["out_cotangent"].shape):
            cotangent = np.zeros(arrays["out_cotangent"].shape)
            cotangent[at] = 1.0
            expected[at] = reference(arrays | {"out_cotangent": cotangent}, seen)["dquery"]
        assert_near(jacobian, expected, self.gradient_tolerance)

    @pytest.mark.parametrize("options", ["mask", "all"])
    def test_forward_reverse_and_second_derivatives_match_reference(self, options):
        """Compare with central differences of the oracle's gradient in a random direction."""
        arrays, along = self.draw(39), self.draw(40)
        names = ["query", "key", "value"]
        mask, seen = self.causal_tail()
        settings: dict[str, Any] = {}
        if options == "all":
            shape = (1, arrays["query"].shape[2], self.queries, self.span)
            for seed, x in ((41, arrays), (42, along)):
                rng = np.random.default_rng(seed)
                x["bias"] = jnp.asarray(rng.normal(size=shape).astype(np.float32))
                x["sinks"] = jnp.asarray(rng.normal(size=shape[1]).astype(np.float32))
            names, settings = [*names, "bias", "sinks"], dict(softcap=3.0)
        inputs, direction = ([x[name] for name in names] for x in (arrays, along))

        def loss(*inputs):
            arguments = dict(zip(names, inputs, strict=True))
            qkv = [arguments.pop(name) for name in names[:3]]
            out, lse = self.attend(*qkv, mask=mask, return_lse=True, **settings, **arguments)
            lse = jnp.where(jnp.isfinite(lse), lse, 0)  # -inf in rows that see nothing
            wide = out.astype(jnp.float32) * arrays["out_cotangent"].astype(jnp.float32)
            return wide.sum() + (lse * arrays["lse_cotangent"]).sum()

        every = tuple(range(len(names)))
        gradient = jax.grad(loss, every)

        def dot(xs, ys):
            pairs = zip(xs, ys, strict=True)
            return sum((x.astype(jnp.float32) * y.astype(jnp.float32)).sum() for x, y in pairs)

        @jax.jit
        def derivatives(x, v):
            _, pull = jax.vjp(lambda *x: jax.jvp(loss, x, v)[1], *x)
            return {
                "jvp": jax.jvp(loss, x, v)[1],
                "forward over reverse": jax.jvp(gradient, x, v)[1],
                "reverse over reverse": jax.grad(lambda *x: dot(gradient(*x), v), every)(*x),
                "reverse over forward": pull(jnp.float32(1)),
            }

        found = derivatives(tuple(inputs), tuple(direction))
        host = {name: oracle.double(x) for name, x in arrays.items()}
        unseen = ~seen.any(axis=-1)  # rows without gradient of the lse
        host["lse_cotangent"] = np.where(unseen.swapaxes(1, 2), 0, host["lse_cotangent"])

        def gradients(step):
            moved = {name: host[name] + step * oracle.double(along[name]) for name in names}
            return reference(host | moved, seen, **settings)

        slopes, after, before = (gradients(step) for step in (0, 1e-5, -1e-5))
        parts = [slopes[f"d{name}"] * oracle.double(along[name]) for name in names]
        wanted = sum(x.sum() for x in parts)
        apart = abs(float(found.pop("jvp")) - wanted)
        assert apart <= self.gradient_tolerance * sum(np.abs(x).sum() for x in parts), apart
        for way, result in found.items():
            for name, x in zip(names, result, strict=True):
                expected = (after[f"d{name}"] - before[f"d{name}"]) / 2e-5
                assert_near(x, expected, 2 * self.gradient_tolerance, f"{way}, {name}")

    def test_debug_checks_find_no_nan_or_infinity(self):
        arrays = self.draw(41)
        mask = Causal() & Padding(jnp.arange(self.span)[None, :] < jnp.array([[self.span], [0]]))

        def loss(query, key, value):
            return (self.attend(query, key, value, mask=mask) * arrays["out_cotangent"]).sum()

        inputs = arrays["query"], arrays["key"], arrays["value"]
        with jax.debug_nans(True), jax.debug_infs(True):
            gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)
        assert all(np.isfinite(np.asarray(g)).all() for g in gradients)

    def test_array_scale_is_not_rounded_to_input_dtype(self):
        """A float32 scale of bfloat16 inputs keeps its bits, even if a hidden score overflows."""
        arrays = self.draw(46, dtype="bfloat16")
        mask, seen = self.causal_tail()
        host = {name: oracle.double(x) for name, x in arrays.items()}
        host["out_cotangent"] *= 0
        expected = reference(host, seen, scale=float(np.float32(0.3)))
        hidden = arrays["key"].at[1, 11:].set(3.3e38)

        def attend(scale):
            inputs = arrays["query"], hidden, arrays["value"]
            return self.attend(*inputs, mask=mask, scale=scale, return_lse=True)

        where = self.target or target()
        # kernels that multiply 16-bit numbers split the scaled query into two parts of 8 bits each
        # and round the gradient of the scores
        narrow = not isinstance(where, str) and where.backend.narrow
        (out, lse), pull = jax.vjp(attend, jnp.float32(0.3))
        assert out.dtype == jnp.bfloat16
        assert_near(lse, expected["lse"], 2**-16 if narrow else FORWARD_F32)
        (slope,) = pull((jnp.zeros_like(out), arrays["lse_cotangent"]))
        # scale and query enter only as a product: scale dscale = sum(query dquery)
        wanted = (expected["dquery"] * host["query"]).sum() / np.float32(0.3)
        assert_near(slope, wanted, GRADIENT_BF16 if narrow else GRADIENT_F32)

    def test_results_stay_float32_under_x64(self):
        arrays = self.draw(42)
        arrays["sinks"] = np.float32([-1.0, 0.5, 1.0, 2.0])
        mask, seen = self.causal_tail()
        with jax.enable_x64(True):
            key = key_of(43)
            result = self.evaluate(
                arrays, mask, softcap=5.0, dropout_rate=self.rate, dropout_key=key
            )
        allowed = {jnp.dtype(self.dtype), jnp.dtype("float32")}  # lse and sinks are float32
        assert {x.dtype for x in result.values()} <= allowed
        shape = 2, 4, self.queries, self.span
        keep = oracle.dropout_keep(np.asarray(jax.random.key_data(key)), self.rate, shape)
        self.check(result, reference(arrays, seen, softcap=5.0, keep=keep))


class NonfiniteSuite(AttentionSuite):
    """Tests of implementations in which NaN and inf affect only the queries that see them."""

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.3e38], ids=str)
    @pytest.mark.parametrize("scenario", HIDDEN)
    def test_masked_keys_and_values_have_no_influence(self, scenario, bad):
        super().test_masked_keys_and_values_have_no_influence(scenario, bad)

    def test_nonfinite_future_values_do_not_affect_earlier_rows(self):
        arrays = self.draw(21, queries=self.span)
        clean = self.evaluate(arrays, Causal())
        for at in (1, self.span // 2, self.span - 1):
            nonfinite = {name: arrays[name].at[:, at:].set(math.nan) for name in ("key", "value")}
            result = self.evaluate(arrays | nonfinite, Causal())
            for name in ("out", "lse", "dquery"):
                self.assert_unchanged(result[name][:, :at], clean[name][:, :at], name)
            assert np.isnan(np.asarray(result["out"][:, at:])).all(), "NaN did not reach later rows"

    @pytest.mark.parametrize("case", ["key", "query", "score"])
    def test_visible_infinity_makes_affected_rows_nan(self, case):
        """Even if a softcap or an exponential would make it finite, and all tiles are full."""
        arrays = self.draw(50, batch=1, queries=128, keys=128, heads=2, kv_heads=1)
        query, key = arrays["query"], arrays["key"]
        if case == "key":
            key = key.at[0, 3, 0, 0].set(jnp.inf)
        elif case == "query":
            query = query.at[0, 3, :, 0].set(jnp.inf)
        else:
            query, key = -jnp.abs(query), key.at[0, 3].set(jnp.inf)
        out = self.attend(
            query, key, arrays["value"], mask=Causal(), q_positions=jnp.arange(128) + 200,
            softcap=None if case == "score" else 5.0,
        )  # fmt: skip
        nonfinite = np.isnan(np.asarray(out)).all(axis=(2, 3))
        assert (nonfinite == (np.arange(128) == 3 if case == "query" else True)).all()

    @pytest.mark.usefixtures("usual_compilation")
    @pytest.mark.parametrize(("queries", "keys"), [(32, 64), (32, 128), (64, 128), (5, 128)])
    def test_nonfinite_key_visible_to_all_propagates_no_gradient(self, queries, keys):
        """XLA's maximum on a CPU loses a NaN at these lengths."""
        arrays = self.draw(51, batch=1, queries=queries, keys=keys)
        arrays["key"] = arrays["key"].at[0, 3, 1].set(math.nan)
        positions = jnp.arange(queries, dtype=jnp.int32) + 200
        result = self.evaluate(arrays, Causal(), q_positions=positions)
        out, lse = np.asarray(result["out"]), np.asarray(result["lse"])
        assert np.isnan(out[:, :, 2:]).all() and np.isnan(lse[:, :, 2:]).all()
        assert np.isfinite(out[:, :, :2]).all() and np.isfinite(lse[:, :, :2]).all()
        assert not np.asarray(result["dquery"])[:, :, 2:].any()
        assert np.isfinite(np.asarray(result["dquery"])).all()
        others = np.arange(keys) != 3
        for name in ("dkey", "dvalue"):
            gradient = np.asarray(result[name])[:, others]
            assert np.isfinite(gradient).all() and not gradient[:, :, 1].any()
            assert np.abs(gradient[:, :, 0]).min(axis=-1).all()

    def test_nonfinite_fully_masked_query_has_no_influence(self):
        arrays = self.draw(23)
        mask = np.random.default_rng(23).random((2, 4, self.queries, self.span)) < 0.5
        mask[:, :, [3, 28]] = False
        clean = self.evaluate(arrays, Dense(mask))
        nonfinite = arrays | {"query": arrays["query"].at[:, np.array([3, 28])].set(math.nan)}
        result = self.evaluate(nonfinite, Dense(mask))
        for name, value in clean.items():
            finite = ~np.isneginf(np.asarray(value))
            assert_same_bits(np.asarray(result[name])[finite], np.asarray(value)[finite], name)

    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
    def test_nonfinite_padding_does_not_affect_real_tokens(self, bad):
        """Padded queries see real keys, so their NaN must not pass through a cotangent of 0."""
        arrays = self.draw(24, queries=self.span)
        real = np.arange(self.span)[None, :] < np.array([[self.span - 2], [11]])
        for name in ("out_cotangent", "lse_cotangent"):
            rows = jnp.asarray(real).reshape(real.shape + (1,) * (arrays[name].ndim - 2))
            arrays[name] = jnp.where(rows, arrays[name], 0)
        mask = Causal() & Padding(real)
        clean = self.evaluate(arrays, mask)
        where = jnp.asarray(real)[:, :, None, None]
        inputs = {name: jnp.where(where, arrays[name], bad) for name in ("query", "key", "value")}
        result = self.evaluate(arrays | inputs, mask)
        for name, value in clean.items():
            self.assert_unchanged(np.asarray(result[name])[real], np.asarray(value)[real], name)

    @pytest.mark.parametrize("nonfinite", ["key", "value"])
    def test_nonfinite_key_head_affects_exactly_its_group(self, nonfinite):
        arrays = self.draw(32, queries=5, keys=7, heads=6, kv_heads=2, dim=self.dim)
        arrays[nonfinite] = arrays[nonfinite].at[:, 2, 1].set(jnp.nan)
        out = np.asarray(self.evaluate(arrays, Causal())["out"])
        assert np.isfinite(out[:, :, :3]).all() and np.isfinite(out[:, :2]).all()
        assert np.isnan(out[:, 2:, 3:]).all()

    def test_nan_in_bias_makes_affected_rows_nan(self):
        arrays = self.draw(40, queries=13, keys=13)
        bias = np.zeros((1, 1, 13, 13), np.float32)
        bias[..., 7, 2] = bias[..., 3, 9] = np.nan  # a causal mask hides the second
        inputs = arrays["query"], arrays["key"], arrays["value"]
        out = self.attend(*inputs, mask=Causal(), bias=jnp.asarray(bias))
        rows = np.isnan(np.asarray(out, np.float32)).all((0, 2, 3))
        assert np.flatnonzero(rows).tolist() == [7]

    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
    @pytest.mark.parametrize("kind", ["array", "slopes"])
    def test_infinite_bias_does_not_hide_nonfinite_scores(self, kind, bad):
        """A bias of -inf is not a mask: a nonfinite score makes its row NaN."""
        arrays = self.draw(42, queries=13, keys=13)
        key, hides = np.array(arrays["key"]), np.zeros((1, 4, 13, 13), np.float32)
        key[:, 5], hides[..., 5] = bad, -math.inf
        bias = hides if kind == "array" else ALiBi(np.full(4, 1e4, np.float32))
        out = self.attend(arrays["query"], key, arrays["value"], mask=Causal(), bias=bias)
        rows = np.isnan(np.asarray(out, np.float32))
        assert rows[:, 5:].all() and not rows[:, :5].any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
    def test_row_with_nonfinite_bias_propagates_no_gradient(self, bad):
        arrays = self.draw(41, queries=13, keys=13)
        inputs = arrays["query"], arrays["key"], arrays["value"]
        bias = np.random.default_rng(41).normal(size=(1, 4, 13, 13)).astype(np.float32)
        broken = bias.copy()
        broken[..., 7, 2] = broken[..., 3, 9] = bad

        def gradients(bias, cotangent):
            def attend(query, key, value, bias):
                return self.attend(query, key, value, bias=bias, mask=Causal())

            return jax.vjp(attend, *inputs, bias)[1](cotangent)

        cotangent = arrays["out_cotangent"]
        found = gradients(jnp.asarray(broken), cotangent)
        expected = gradients(jnp.asarray(bias), cotangent.at[:, 7].set(0))
        for x, y in zip(found, expected, strict=True):
            assert_near(x, np.asarray(y, np.float64), self.gradient_tolerance)


HOPPER_ROUNDS = {
    "test_scores_of_100_000_produce_correct_finite_results[float16]": "the product of a score "
    "with log2(e) is rounded before the maximum is subtracted: 0.4 % of a weight at 6e4",
    "test_array_bias_of_any_broadcast_shape_matches_reference[]": "the sum of all differences, "
    "nearly 0, is the rounding of 280,000 numbers in bfloat16",
}
"""Tests that the Hopper kernels are known to fail, with reasons."""


class Bfloat16Suite(AttentionSuite):
    """Tests of a kernel that multiplies bfloat16, over several tiles."""

    may_refuse = True
    queries, span = 139, 251
    dim = 64
    dtype = "bfloat16"
    forward_tolerance = FORWARD_BF16
    gradient_tolerance = GRADIENT_BF16
