"""Custom masks and biases: one method each, correct in every implementation or refused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import _evaluate, draw, reference
from tests.support.plain_kernels import Plain
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits
from transformer_jax import (
    ALiBi,
    Bias,
    Causal,
    ConfigError,
    Dense,
    Mask,
    Predicate,
    Prefix,
    Segments,
    Window,
    build,
    init_params,
    preset,
)
from transformer_jax.attention import api
from transformer_jax.attention.api import (
    IMPLEMENTATIONS,
    dot_product_attention,
    explain_attention,
)
from transformer_jax.attention.arguments import AttentionCall, Implementation, check_call
from transformer_jax.attention.blockwise import tiles
from transformer_jax.attention.blockwise.core import _of_leaves
from transformer_jax.attention.blockwise.tiles import Sizes, visited_tiles
from transformer_jax.attention.fused import mask_operands
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.kernels import Target, using
from transformer_jax.kernels.program import Program

pytestmark = pytest.mark.usefixtures("unoptimised_compilation")

T, S = 139, 271
HEADS = dict(batch=3, heads=8, kv_heads=4)
"""Sizes at which rows do not share tiles of "blockwise", and only groups of heads do."""
EVERYWHERE = "xla", "blockwise", "pallas"


def zeros(*shape):
    return jax.device_put(np.zeros(shape, np.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Strided(Mask):
    """A mask that reads only positions."""

    def sees(self, q, k):
        return (q >= k) & ((q - k) % 3 != 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reach(Mask):
    """A mask with a reach for each row and head, with axes that `leaf_axes` does not name."""

    reach: jax.Array  # i32[N, B]: the batch is not the first axis

    def sees(self, q, k):
        return jnp.abs(q - k) <= self.reach.T[:, :, None, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table(Mask):
    """A mask with an array of length B that is not indexed by batch rows."""

    near: jax.Array  # i32[B]

    def sees(self, q, k):
        return self.near[q % self.near.shape[0]] >= jnp.abs(q - k)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Until(Mask):
    """A mask that overrides `comparison`."""

    ends: jax.Array  # i32[B]

    def sees(self, q, k):
        return k < self.ends[:, None, None, None]

    def comparison(self, vectors: MaskVectors) -> Program:
        return vectors.key_holds(vectors.k_positions < self.ends[:, None])


REACH = np.random.default_rng(3).integers(0, 200, (8, 3)).astype(np.int32)
NEAR, ENDS = np.array([3, 90, 17], np.int32), np.array([0, 128, 200], np.int32)
at_q, at_k = np.arange(T)[:, None], np.arange(S)[None]
OWN: dict[str, tuple[Any, np.ndarray]] = {
    "positions": (Strided(), ((at_q >= at_k) & ((at_q - at_k) % 3 != 1))[None, None]),
    "rows and heads": (
        Reach(jax.device_put(REACH)),
        np.abs(at_q - at_k) <= REACH.T[:, :, None, None],
    ),
    "a table": (Table(jax.device_put(NEAR)), (np.abs(at_q - at_k) <= NEAR[at_q % 3])[None, None]),
    "vectors": (Until(jax.device_put(ENDS)), np.broadcast_to(
        at_k < ENDS[:, None, None, None], (3, 1, T, S))),
}  # fmt: skip
OWN["composed"] = (
    Causal() & ~OWN["rows and heads"][0] | Prefix(jax.device_put(ENDS)) & Strided(),
    (at_q >= at_k) & ~OWN["rows and heads"][1] | OWN["vectors"][1] & OWN["positions"][1],
)


def evaluate(arrays, mask, implementation, **settings):
    settings = dict(
        q_positions=None, k_positions=None, dropout_key=None, dropout_rate=0.0, scale=None,
        softcap=None,
    ) | settings  # fmt: skip
    target = Plain() if implementation == "pallas" else None
    if target is None:
        return _evaluate(arrays, mask, target=target, implementation=implementation, **settings)
    with using(target):
        return _evaluate(arrays, mask, target=target, implementation=implementation, **settings)


def check(got, want):
    got = dict(got)
    masked = np.isneginf(want["lse"])
    assert (np.isneginf(np.asarray(got["lse"])) == masked).all()
    got["lse"] = np.where(masked, 0, got["lse"])
    for name, value in (want | {"lse": np.where(masked, 0, want["lse"])}).items():
        tolerance = GRADIENT_F32 if name.startswith("d") else FORWARD_F32
        assert_near(got[name], value, tolerance, name)


@pytest.mark.slow_except("composed-pallas", "rows and heads-pallas")
@pytest.mark.long_except("*-xla", "a table-pallas", "composed-pallas", "rows and heads-pallas")
@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("name", OWN)
def test_custom_mask_is_supported_or_rejected_by_every_implementation(name, implementation):
    mask, seen = OWN[name]
    assert 0.02 < seen.mean() < 0.98
    arrays = draw(1, queries=T, keys=S, **HEADS)
    inputs = [arrays[x] for x in ("query", "key", "value")]
    with using(Plain()):
        reason = explain_attention(*inputs, mask=mask)[implementation]
    if reason is None:
        check(evaluate(arrays, mask, implementation), reference(arrays, seen))
        return
    assert implementation == "pallas" and name in ("rows and heads", "composed")
    assert "the same for every head" in reason
    with using(Plain()), pytest.raises(NotImplementedError, match=re.escape(reason)):
        dot_product_attention(*inputs, mask=mask, implementation="pallas")


def test_custom_mask_has_separate_tiles_per_row_and_head():
    inputs = draw(1, queries=T, keys=S, **HEADS)
    call = AttentionCall(query=inputs["query"], key=inputs["key"], value=inputs["value"])
    assert Sizes.of(call).groups == (3, 1 if tiles._SMALL_PRODUCTS_THREADED else 2)


LIMITS = {
    "rows": np.array([30, 64]).reshape(2, 1, 1, 1),
    "heads": np.array([5, 20, 40, 130]).reshape(1, 4, 1, 1),
    "both": np.array([[9, 70, 130, 65], [64, 2, 128, 0]]).reshape(2, 4, 1, 1),
}
"""The number of visible keys, of S = 131, by batch row and head."""


@pytest.mark.long_except("both")
@pytest.mark.slow
@pytest.mark.parametrize("differs", LIMITS)
def test_predicate_may_read_traced_per_row_and_per_head_array(differs):
    inputs = jax.random.normal(jax.random.key(3), (3, 2, 131, 4, 8))
    at = np.arange(131)
    seen = (at < LIMITS[differs]) & (at <= at[:, None])

    def loss(inputs, limits):
        mask = Causal() & Predicate(lambda q, k: k < limits)
        return (dot_product_attention(*inputs, mask=mask, implementation="blockwise") ** 2).sum()

    def wanted(inputs):
        mask = Dense(np.broadcast_to(seen, (2, 4, 131, 131)))
        return (dot_product_attention(*inputs, mask=mask, implementation="xla") ** 2).sum()

    value, gradient = jax.jit(jax.value_and_grad(wanted))(inputs)
    limits = jnp.asarray(LIMITS[differs], jnp.int32)
    for each in (jax.jit(jax.value_and_grad(loss)), jax.value_and_grad(jax.jit(loss))):
        found, slope = each(inputs, limits)
        assert_near(found, value, 1e-5)
        assert_near(slope, gradient, GRADIENT_F32)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_predicate_may_return_single_boolean_for_all_pairs(implementation):
    inputs = np.random.default_rng(3).standard_normal((3, 1, 5, 1, 2)).astype(np.float32)
    found = dot_product_attention(
        *inputs, mask=Predicate(lambda q, k: True), implementation=implementation
    )
    assert_near(found, dot_product_attention(*inputs, implementation="xla"), FORWARD_F32)


@pytest.mark.slow
def test_custom_mask_supports_per_row_positions():
    mask, _ = OWN["rows and heads"]
    arrays = draw(2, queries=T, keys=S, **HEADS)
    starts = np.array([[0], [40], [7]], np.int32)
    q, k = np.arange(T, dtype=np.int32)[None] + starts, np.arange(S, dtype=np.int32)[None] + starts
    seen = np.abs(q[:, None, :, None] - k[:, None, None, :]) <= REACH.T[:, :, None, None]
    got = evaluate(arrays, mask, "blockwise", q_positions=q, k_positions=k)
    check(got, reference(arrays, seen))


@pytest.mark.slow
def test_slicing_custom_mask_slices_its_materialized_array():
    mask, seen = OWN["rows and heads"]
    part = mask.part((jnp.int32(1), 2), (3, 8), (1, 2))
    places = np.arange(T), np.arange(S)
    assert part.lead == (1, 2)
    found = part.materialize(*places)
    assert found.shape == (1, 2, T, S) and (np.asarray(found) == seen[1:2, 2:4]).all()
    again = part.part((0, jnp.int32(1)), (1, 2), (1, 1)).materialize(*places)
    assert again.shape == (1, 1, T, S) and (np.asarray(again) == seen[1:2, 3:4]).all()
    starts = np.array([[5], [60]])
    rows = mask.part((jnp.int32(1), 0), (3, 8), (2, 8)).materialize(at_q.T + starts, np.arange(S))
    wanted = np.abs(at_q + starts[:, None, :, None] - at_k) <= REACH.T[1:, :, None, None]
    assert rows.shape == (2, 8, T, S) and (np.asarray(rows) == wanted).all()
    table, _ = OWN["a table"]
    assert table.part((1, 2), (3, 8), (1, 2)) is table


def test_device_sees_its_rows_and_heads_of_the_mask():
    arrays = draw(2, batch=3, queries=5, keys=7, heads=4, kv_heads=4)
    dense = np.random.default_rng(1).random((3, 4, 5, 7)) < 0.5
    call = check_call(arrays["query"], arrays["key"], arrays["value"], mask=Dense(dense))
    seen: list[np.ndarray] = []

    def attend(call):
        seen.append(np.asarray(call.mask.materialize(np.arange(5), np.arange(7))))
        return ()

    run = _of_leaves(attend, call)
    rows, heads = slice(1, 3), slice(2, 3)
    part = {name: getattr(call, name)[rows, :, heads] for name in ("query", "key", "value")}
    run((0, 0), *jax.tree.leaves(call))
    run((1, 2), *jax.tree.leaves(replace(call, **part)))
    assert (seen[0] == dense).all() and (seen[1] == dense[rows, heads]).all()


@pytest.mark.slow
def test_custom_mask_memory_is_linear_in_length():
    def temporaries(length):
        array = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        attend = lambda q: dot_product_attention(q, q, q, mask=Strided()).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(attend)).lower(array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = map(temporaries, (1024, 4096))
    assert short > 0 and long <= 5 * short and long < 4096 * 4096


def test_invalid_custom_mask_error_states_rule():
    x = zeros(2, 5, 2, 4)

    class Loose(Mask):
        def sees(self, q, k):
            return q >= k

    @dataclass(frozen=True)
    class Unregistered(Mask):
        def sees(self, q, k):
            return q >= k

    @jax.tree_util.register_dataclass
    @dataclass
    class Mutable(Mask):
        def sees(self, q, k):
            return q >= k

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class WithoutSees(Mask):
        pass

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Numbers(Mask):
        def sees(self, q, k):
            return q - k

    write = r"write @jax.tree_util.register_dataclass and @dataclass\(frozen=True\) above class"
    for mask, message in (
        (Loose(), f"Loose is not a frozen dataclass: {write} Loose"),
        (Causal() & Unregistered(), f"Unregistered is not registered as a pytree: {write}"),
        (~Mutable(), f"Mutable is not frozen: {write} Mutable"),
        (Numbers(), r"Numbers.sees returned int32\[1, 1, 1, 1\]: must be bool\[B, N, T, S\]"),
        (lambda q, k: q >= k, r"mask is a function: must be a Mask; .* Predicate\(fn\)"),
        (
            jax.device_put(np.ones((3, 3), bool)),
            r"mask is an array: must be a Mask; .*Dense\(array\) for .*, Padding\(array\) for",
        ),
    ):
        for call in (dot_product_attention, explain_attention):
            with pytest.raises(ValueError, match=message):
                call(x, x, x, mask=mask)
    with pytest.raises(
        TypeError, match=r"WithoutSees is a Mask without a method sees\(self, q, k\)"
    ):
        dot_product_attention(x, x, x, mask=WithoutSees())


# Tiles that a custom mask excludes

LEVELS = np.sort(np.random.default_rng(4).integers(0, 9, (3, S)), axis=1).astype(np.int32)
WIDTHS = np.array([3, 40, 90, 1, 7, 200, 13, 31], np.int32)
FAR = np.array([2**31 - 5, 2**31 - 1, 5], np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arithmetic(Mask):
    """A mask by a function of the query, the key and an array."""

    array: jax.Array
    function: Any = field(metadata=dict(static=True))

    def sees(self, q, k):
        return self.function(jnp, self.array, q, k)


def chunks(lib, array, q, k):
    return q // 37 == k // 37


def chunks_so_far(lib, array, q, k):
    return (k // 32 <= q // 32) & (lib.abs(q - k) < 64)


def window_and_first_keys(lib, array, q, k):
    return (k <= q) & ((q - k < 23) | (k < 4))


def no_lower_level(lib, array, q, k):  # array: i32[B, S]
    row = np.arange(3)[:, None, None, None]
    return array[row, q % S] == array[row, k % S]


def width_of_row(lib, array, q, k):  # array: i32[8]
    return lib.abs(q - k) < array[:3, None, None, None]


def width_of_head(lib, array, q, k):
    return lib.square(q - k) <= array[None, :, None, None] ** 2


def dilated(lib, array, q, k):
    return ((q - k) % 4 == 0) & (q - k < 50) & ((q - k) // 5 >= 0)


def by_parity(lib, array, q, k):
    return lib.where(q % 2 == 0, k - q > 60, k * 2 < q - 20)


def by_bits(lib, array, q, k):
    return ((q ^ k) >> 5 == 0) | ((q & k) << 2 > 800)


def signs(lib, array, q, k):
    return lib.sign(q - k - 30) * lib.clip(k - 20, -3, 3) > 1


def far_positions(lib, array, q, k):
    """Compare positions that wrap around in 32 bits."""
    return q - k + array[0] < array[2]


EXACT = {
    chunks: WIDTHS,
    chunks_so_far: WIDTHS,
    window_and_first_keys: WIDTHS,
    no_lower_level: LEVELS,
    width_of_row: WIDTHS,
    width_of_head: WIDTHS,
}
SOUND = EXACT | dict.fromkeys((dilated, by_parity, by_bits, signs), WIDTHS) | {far_positions: FAR}
SKIPPED, PARTIAL, FULL = 0, 1, 2


def classes_of(mask, q, k, blocks):
    """Return the classes of a plan, and those of the materialised mask."""
    block_q, block_k = blocks
    found = np.asarray(mask.block_plan(q, k, block_q=block_q, block_k=block_k).classes)
    sees = np.asarray(mask.materialize(q, k))
    lead = np.broadcast_shapes(found.shape[:2], sees.shape[:2])
    sees = np.broadcast_to(sees, lead + sees.shape[2:])
    rows, columns = found.shape[2:]
    exact = np.zeros((*lead, rows, columns), np.int8)
    for i, j in np.ndindex(rows, columns):
        tile = sees[:, :, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        whole = (j + 1) * block_k <= len(k)
        every = tile.all(axis=(2, 3)) & whole
        exact[:, :, i, j] = np.where(tile.any(axis=(2, 3)), np.where(every, FULL, PARTIAL), SKIPPED)
    return np.broadcast_to(found, exact.shape), exact


@pytest.mark.slow
@pytest.mark.parametrize("function", SOUND, ids=lambda f: f.__name__)
def test_tiles_excluded_by_custom_mask_are_skipped(function):
    """Never one with a visible pair; exactly these if the bounds of each operation are exact."""
    mask = Arithmetic(jnp.asarray(SOUND[function]), function)
    q, k = np.arange(T, dtype=np.int32), np.arange(S, dtype=np.int32)
    sees = np.asarray(mask.materialize(q, k))
    want = function(np, SOUND[function], *(x[None, None] for x in np.ix_(q, k)))
    assert (np.broadcast_to(want, sees.shape) == sees).all() and 0.01 < sees.mean() < 0.99
    found, exact = classes_of(mask, q, k, (8, 15))
    assert ((found == exact) | (found == PARTIAL)).all()
    if function in EXACT:
        assert ((found == SKIPPED) == (exact == SKIPPED)).all()
    rng = np.random.default_rng(5)  # other positions, and a composition
    others = Causal(), Window(31, 9), Segments(jnp.asarray(LEVELS)), Prefix(jnp.array([0, 70, 300]))
    for _ in range(2):
        one, two = (others[i] for i in rng.permutation(len(others))[:2])
        composed = [mask & one | two, ~(mask | one) & two, ~mask & one][rng.integers(3)]
        places = [np.sort(rng.choice(400, n)).astype(np.int32) - 3 for n in (29, 43)]
        found, exact = classes_of(composed, *places, (4, 7))
        exact = np.where(found[..., -1:] == PARTIAL, np.maximum(exact, found), exact)
        assert ((found == exact) | (found == PARTIAL)).all(), composed


def far_of_row(_, numbers, q, k):  # a squeeze, then a look-up along an axis of rows
    limit = jnp.where(jnp.array([[True, False], [True, True]]), numbers[0, :2][:, None], 1).max(1)
    return q - k <= limit[:, None, None, None]


def turned(_, numbers, q, k):
    wide = jnp.broadcast_to(numbers[:, :2].reshape(2, 1), (2, 2)).sum(1)
    return jnp.abs(q - k) <= wide[:, None, None, None]


def of_head(_, numbers, q, k):
    return jnp.abs(q - k) <= jnp.broadcast_to(numbers[:, :2].reshape(1, -1, 1, 1), (2, 2, 1, 1))


def rows_become_heads(_, numbers, q, k):
    sees = q - k <= numbers[0, :2][:, None, None, None]
    return jnp.reshape(sees, (1, 2, *sees.shape[2:]))


def of_row_and_head(_, numbers, q, k):
    strict = jnp.array([True, False])[:, None, None, None]
    return jnp.abs(q - k) <= jnp.where(strict, 4, numbers[0, :2][None, :, None, None])


def one_of_a_table(_, numbers, q, k):
    return (numbers[0, 1] > 7) & (k <= q)


def squeezed(_, numbers, q, k):
    return q - k <= jnp.squeeze(numbers[:, :1])


def keys_of_random(_, numbers, q, k):
    def draw(x):
        return jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), x))

    return jax.vmap(draw)(k.reshape(-1)).reshape(k.shape) & (k <= q)


def no_power(_, numbers, q, k):
    return ((q - k) ** 0 == 1) & (q - k < numbers[0, 0])


def of_three(_, numbers, q, k):
    return jax.lax.select_n(jnp.clip(q - k, 0, 2), q + k > 3, q - k < 9, q > k + 3)


SHAPED = [
    far_of_row, turned, of_head, rows_become_heads, of_row_and_head, one_of_a_table, squeezed,
    keys_of_random, no_power, of_three,
]  # fmt: skip


@pytest.mark.long_except(
    "far_of_row", "turned", "rows_become_heads", "of_row_and_head", "squeezed", "keys_of_random"
)
@pytest.mark.slow
@pytest.mark.parametrize("function", SHAPED, ids=lambda f: f.__name__)
def test_custom_mask_may_reshape_arrays_internally(function):
    """Rows and heads keep their meaning in tiles and kernels, or a kernel refuses the mask."""
    numbers = jnp.array([[3, 41, 5]])
    mask = Arithmetic(numbers, function)
    q, k = np.arange(61, dtype=np.int32), np.arange(67, dtype=np.int32)
    found, exact = classes_of(mask, q, k, (8, 8))
    traced = jax.jit(lambda mask: mask.block_plan(q, k, block_q=8, block_k=8).classes)(mask)
    for classes in (found, np.broadcast_to(traced, exact.shape)):
        assert ((classes == exact) | (classes == PARTIAL)).all()
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(x, (2, 61, 2, 5)) for x in keys)
    want = dot_product_attention(query, key, value, mask=mask, implementation="xla")
    for name in ("blockwise", "native"):
        if explain_attention(query, key, value, mask=mask)[name] is None:
            same = dot_product_attention(query, key, value, mask=mask, implementation=name)
            assert_near(same, want, FORWARD_F32)
        else:
            assert name == "native"


@pytest.mark.slow
def test_every_implementation_skips_tiles_of_custom_mask():
    x = zeros(3, 4096, 2, 64).astype(jnp.bfloat16)
    near = Predicate(lambda q, k: jnp.abs(q - k) < 50)
    for mask in (Arithmetic(jnp.asarray(WIDTHS), width_of_row), near):
        call = AttentionCall(query=x, key=x, value=x, mask=mask)
        with using(Target("hopper")):
            call = replace(call, plan=IMPLEMENTATIONS["pallas"].plan(call))
        for lists in (visited_tiles(Sizes.of(call), call), *mask_operands(call).lists.values()):
            assert lists.seen.sum() < 0.4 * lists.order.size


# Custom biases


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decay:
    """A bias of -rate times the square root of the distance, with a rate for each head."""

    rates: jax.Array  # [N]

    def materialize(self, q_positions, k_positions):
        q, k = jnp.atleast_2d(q_positions), jnp.atleast_2d(k_positions)
        far = jnp.sqrt(jnp.abs(q[:, :, None] - k[:, None, :]).astype(jnp.float32))
        return -self.rates[None, :, None, None] * far[:, None]


@pytest.mark.slow
@pytest.mark.long_except("xla")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_custom_bias_is_applied_and_differentiable(implementation):
    rates = np.array([0.1, 0.3, 0.5, 0.9], np.float32)
    arrays = draw(4, queries=T, keys=S)
    assert isinstance(Decay(rates), Bias)
    far = np.sqrt(np.abs(at_q - at_k))
    array = -rates[None, :, None, None] * far
    seen = (at_q >= at_k)[None, None]
    got = evaluate(arrays | {"bias": Decay(jnp.asarray(rates))}, Causal(), implementation)
    want = reference(arrays | {"bias": array}, seen)
    by_head = -(want.pop("dbias") * far).sum(axis=(0, 2, 3))
    assert_near(got.pop("dbias").rates, by_head, GRADIENT_F32, "rates")
    check(got, want)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ramp:
    """A bias with fields that arrays also have; only `materialize` makes it a bias."""

    rate: jax.Array  # []
    shape: tuple[int, ...] = field(default=(), metadata={"static": True})
    dtype: str = field(default="float64", metadata={"static": True})

    def materialize(self, q_positions, k_positions):
        q, k = jnp.atleast_2d(q_positions), jnp.atleast_2d(k_positions)
        return self.rate * (k[:, None, None, :] - q[:, None, :, None]).astype(jnp.float32)


@pytest.mark.slow
def test_custom_bias_field_names_may_match_array_attributes():
    draws = np.random.default_rng(0).normal(size=(3, 1, 7, 2, 5)).astype(np.float32)
    q, k, v = draws
    bias, at = Ramp(jnp.float32(0.3)), np.arange(7)
    reasons = explain_attention(q, k, v, bias=bias)
    scores = np.einsum("BTNH,BSNH->BNTS", *draws[:2].astype(np.float64)) / 5**0.5
    weights = np.exp(scores + 0.3 * (at - at[:, None]))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("BNTS,BSNH->BTNH", weights, draws[2].astype(np.float64))
    for name in ("xla", "blockwise", "native"):
        if reasons[name] is None:
            got = dot_product_attention(q, k, v, bias=bias, implementation=name)
            assert_near(got, want, FORWARD_F32, name)
    with using(Plain()):
        reason = explain_attention(q, k, v, bias=bias)["pallas"]
    assert reason == "supports only an array or ALiBi as a bias, not Ramp"


def test_invalid_custom_bias_error_states_rule():
    x = zeros(2, 5, 2, 4)

    @dataclass(frozen=True)
    class Unregistered:
        def materialize(self, q_positions, k_positions):
            return jnp.zeros((1, 1, 5, 5))

    for bias, message in (
        (ALiBi, "bias is the class ALiBi: must be an instance of it"),
        (lambda q, k: q - k, "bias is a function: must be an array or a value with the method mat"),
        (
            Unregistered(),
            "bias is an instance of Unregistered, which is not registered as a pytree: write",
        ),
    ):
        for call in (dot_product_attention, explain_attention):
            with pytest.raises(ValueError, match=message):
                call(x, x, x, bias=bias)
    with using(Plain()):
        reason = explain_attention(x, x, x, bias=Decay(np.ones(2, np.float32)))["pallas"]
    assert reason == "supports only an array or ALiBi as a bias, not Decay"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Anticausal(Causal):
    """A mask of the pairs that Causal hides; with Causal's tiles these would be skipped."""

    def sees(self, q, k):
        return k >= q


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoComparison(Mask):
    """A mask with a `comparison` that returns an array instead of a Program."""

    def sees(self, q, k):
        return k <= q

    def comparison(self, vectors):
        return vectors.k_positions >= 0


@pytest.mark.parametrize("wrap", [lambda mask: mask, lambda mask: ~mask & Window(3)])
def test_custom_mask_with_inherited_tile_method_is_rejected(wrap):
    x = zeros(1, 5, 2, 4)
    with pytest.raises(
        ValueError, match=r"Anticausal overrides Causal\.sees .*derive it from Mask"
    ):
        dot_product_attention(x, x, x, mask=wrap(Anticausal()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Numbered(Mask):
    """A mask with a number that is a leaf."""

    size: int

    def sees(self, q, k):
        return q // self.size == k // self.size


@pytest.mark.slow
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_custom_mask_may_have_python_number_as_leaf(implementation):
    arrays = draw(9, queries=13, keys=17)
    seen = (np.arange(13)[:, None] // 3 == np.arange(17) // 3)[None, None]
    check(evaluate(arrays, Numbered(3), implementation), reference(arrays, seen))


def test_comparison_with_wrong_return_type_is_rejected():
    x = zeros(1, 5, 2, 32)
    with (
        using(Target("tpu", interpret=True)),
        pytest.raises(
            NotImplementedError,
            match=r"comparison returned an object of type .*: must be a Program",
        ),
    ):
        dot_product_attention(x, x, x, mask=NoComparison(), implementation="pallas")


# Refusals


@dataclass(frozen=True)
class Broken(Implementation):
    """An implementation that fails inside `attend`."""

    message: str

    def refuse(self, call):
        return None

    def attend(self, call):
        raise NotImplementedError(self.message)


def test_error_inside_implementation_propagates(monkeypatch):
    x = zeros(1, 5, 2, 4)
    monkeypatch.setitem(IMPLEMENTATIONS, "cudnn", Broken("this must come through"))
    with pytest.raises(NotImplementedError, match=r"^this must come through"):
        dot_product_attention(x, x, x, implementation=("cudnn", "xla"))


@dataclass(frozen=True)
class Constant(Implementation):
    """An implementation that returns a constant."""

    value: float

    def refuse(self, call):
        return None

    def attend(self, call):
        B, T, N, _ = call.sizes
        out = jnp.full((B, T, N, call.value.shape[3]), self.value, call.value.dtype)
        return out, jnp.zeros((B, T, N))


def test_replacement_implementation_is_used(monkeypatch):
    x = zeros(1, 5, 2, 4)
    for value in (3.0, 7.0):  # same name, shapes and class, so only the value differs
        monkeypatch.setitem(IMPLEMENTATIONS, "constant", Constant(value))
        out = dot_product_attention(x, x, x, implementation="constant")
        np.testing.assert_array_equal(out, np.full(x.shape, value))


@pytest.mark.slow
def test_config_accepts_name_of_custom_implementation(monkeypatch):
    config = preset("tiny", implementation="constant", num_layers=1)
    with pytest.raises(ConfigError, match=r"implementation is 'constant': must be one of 'xla'"):
        build(config)
    monkeypatch.setitem(IMPLEMENTATIONS, "constant", Constant(0.0))
    params, tokens = init_params(config, jax.random.key(0)), jnp.arange(6)[None]
    found = build(config).apply({"params": params}, tokens)[0]
    exact = build(replace(config, implementation="xla")).apply({"params": params}, tokens)[0]
    assert jnp.isfinite(found).all() and jnp.abs(found - exact).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_calls_with_equal_structure_share_compiled_program(implementation):
    """Programs depend on masks, numbers and shapes, not on arrays.

    A custom mask is traced again each time, because the values that it reads may have changed.
    """
    traces, programs = [], []

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Counted(Mask):
        ends: jax.Array

        def sees(self, q, k):
            traces.append(q.shape)
            return k < self.ends[:, None, None, None]

        lead = property(lambda self: self.ends.shape * 2)

    x = jnp.ones((1, 5, 2, 4))
    for i in range(3):
        before = len(traces)
        dot_product_attention(
            x * i, x, x, mask=Counted(jnp.array([i])), scale=0.5, softcap=2.0,
            return_lse=i == 1, implementation=implementation,
        )  # fmt: skip
        assert len(traces) > before
        programs.append(api._run.num_programs())
    assert programs[0] == programs[2] > 0


# NaN and inf without a mask


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_unmasked_nonfinite_keys_affect_only_queries_that_attend_to_them(
    name, bad, implementation, softcap
):
    """A key or value breaks its heads of its row, a query only itself."""
    arrays = draw(5, queries=13, keys=17)
    broken = np.zeros((2, 13, 4), bool)
    if name == "query":
        broken[1, 3, 2] = True
        changed = arrays[name].at[1, 3, 2, 1].set(bad)
    else:
        broken[1, :, 2:] = True
        changed = arrays[name].at[1, 3, 1, 1].set(bad)
    silent = {
        "out_cotangent": jnp.where(broken[..., None], 0, arrays["out_cotangent"]),
        "lse_cotangent": jnp.where(broken, 0, arrays["lse_cotangent"]),
    }
    clean = evaluate(arrays | silent, None, implementation, softcap=softcap)
    result = evaluate(arrays | {name: changed}, None, implementation, softcap=softcap)
    for what, value in clean.items():
        value, got = np.asarray(value), np.asarray(result[what])
        assert np.isfinite(value).all() and value.any()
        if what in ("out", "lse"):
            assert np.isnan(got[broken]).all(), f"{what} of a broken query is not NaN"
            value, got = value[~broken], got[~broken]
        assert_same_bits(got, value, what)


# Tests for planted bugs that had passed


@pytest.mark.slow
@pytest.mark.long_except("pallas", "xla")
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_prefix_may_end_at_tile_boundary(implementation):
    """If the length equals the position of a tile's last key, this key is hidden."""
    arrays = draw(6, batch=3, queries=T, keys=S)
    lengths = np.array(
        [127, 127, 159], np.int32
    )  # otherwise a tile of three rows is partial anyway
    seen = np.broadcast_to(at_k < lengths[:, None, None, None], (3, 1, T, S))
    mask = Prefix(jnp.asarray(lengths))
    check(evaluate(arrays, mask, implementation), reference(arrays, seen))


@pytest.mark.slow
@pytest.mark.long_except("(100, 271)-blockwise", "(139, 120)-pallas", "*-xla")
@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("shapes", [(100, S), (T, 120), (100, None)], ids=str)
def test_tokens_beyond_segment_ids_are_masked(shapes, implementation):
    arrays = draw(7, queries=T, keys=S)
    q_ids = np.ones((2, shapes[0]), np.int32)
    k_ids = None if shapes[1] is None else np.ones((2, shapes[1]), np.int32)
    mask = Segments(jnp.asarray(q_ids), None if k_ids is None else jnp.asarray(k_ids))
    last = shapes[0] if shapes[1] is None else shapes[1]
    seen = np.broadcast_to((at_q < shapes[0]) & (at_k < last), (2, 1, T, S))
    at = dict(
        q_positions=jnp.arange(T), k_positions=jnp.arange(S)
    )  # without positions it is refused
    check(evaluate(arrays, mask, implementation, **at), reference(arrays, seen))


@pytest.mark.slow
@pytest.mark.long_except("Plain(name='plain', interpret*")
@pytest.mark.parametrize("where", [None, Plain(), Target("tpu", interpret=True)], ids=str)
def test_two_row_bias_with_softcap_and_sinks_matches_reference(where):
    """With few keys in the TPU's kernels, and in tiles that two rows do not share."""
    queries, keys = (300, 300) if where is None else (16, 24)
    arrays = draw(8, queries=queries, keys=keys, heads=2, kv_heads=1)
    rng = np.random.default_rng(9)
    arrays["bias"] = jnp.asarray(rng.normal(size=(2, 1, queries, keys)), jnp.float32)
    arrays["sinks"] = jnp.array([-1.0, 2.0])
    ids = np.sort(rng.integers(0, 2, (2, keys)), axis=1)
    seen = (ids[:, :queries, None] == ids[:, None, :])[:, None]
    implementation = "blockwise" if where is None else "pallas"
    with using(where or Plain()):
        result = _evaluate(
            arrays, Segments(jnp.asarray(ids, jnp.int32)), None, None, None, where, scale=0.7,
            softcap=1.5, dropout_rate=0.0, implementation=implementation,
        )  # fmt: skip
    check(result, reference(arrays, seen, scale=0.7, softcap=1.5))
