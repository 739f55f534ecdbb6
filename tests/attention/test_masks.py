"""Masks against Python predicates: every small geometry, random compositions, tile plans."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Everything,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
    causal_window,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SKIPPED, PARTIAL, FULL = 0, 1, 2
B, N, T, S = 7, 2, 5, 11


def seen(mask, q_positions, k_positions) -> np.ndarray:
    result = mask.materialize(*jax.device_put((q_positions, k_positions)))
    assert result.dtype == bool and result.ndim == 4
    return np.asarray(result)


def check(mask, predicate, q_positions, k_positions, *, batch: int = 1, heads: int = 1) -> None:
    expected = oracle.allowed(predicate, q_positions, k_positions, batch=batch, heads=heads)
    actual = seen(mask, q_positions, k_positions)
    assert all(size in (1, full) for size, full in zip(actual.shape, expected.shape, strict=True))
    assert actual.shape[2:] == expected.shape[2:]
    wrong = np.argwhere(np.broadcast_to(actual, expected.shape) != expected)
    assert wrong.size == 0, f"{mask}: {len(wrong)} wrong, first at {wrong[0]}"


def sliding():
    """The twenty masks of a decoder: no window or up to nine keys, causal or not."""
    for width in range(10):
        yield Window(width), oracle.window(width)
        yield Causal() & Window(width), oracle.both(oracle.causal(), oracle.window(width))


def two_sided():
    yield Causal(), oracle.causal()
    for right in range(10):
        yield Window(None, right), oracle.window(None, right)
        yield Window(3, right), oracle.window(3, right)


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
def test_positions_of_any_integer_dtype_are_equivalent(dtype):
    """Near the ends of the dtype, where differences could wrap around."""
    last = min(int(np.iinfo(dtype).max), 1000)
    q_positions, k_positions = np.arange(last - T + 1, last + 1), np.arange(S)
    k_positions[3:] += last - S + 1
    at = q_positions.astype(dtype), k_positions.astype(dtype)
    for mask in (Window(3, 2), Window(last - 2), Window(last + 73)):
        assert (seen(mask, *at) == seen(mask, q_positions, k_positions)).all(), mask
    traced = jax.jit(Window(3, 2).materialize)(*at)
    assert (np.asarray(traced) == seen(Window(3, 2), *at)).all()


@pytest.mark.slow_except("1099511627776", "2147483648")
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**40])
def test_window_may_be_wider_than_int32(far):
    """At most, q - k is 2^31 - 1."""
    ends = np.array([0, 2**31 - 1], np.int32)
    past = np.array([[True, True], [far > 2**31 - 1, True]])
    for mask, expected in ((Window(far), past), (Window(None, far), past.T)):
        assert (seen(mask, ends, ends)[0, 0] == expected).all(), mask
        assert set(check_sound(mask, ends, ends, 1, 1)) <= {SKIPPED, FULL}
        vectors = MaskVectors.of(mask, ends[None], ends[None], False)
        at = [x[:, :, None] for x in vectors.q], [x[:, None, :] for x in vectors.k]
        assert (np.asarray(vectors.visible(*at))[0] == expected).all(), mask


def test_large_unsigned_segment_ids_remain_distinct_in_plans():
    """Traced ids may be beyond int32."""
    ids = np.array([[1, 1, 2**31 + 1, 2**31 + 1, 2**32 - 1]], np.uint32)

    @jax.jit
    def classes(ids):
        return Segments(ids).block_plan(jnp.arange(5), jnp.arange(5), block_q=2, block_k=2).classes

    plan = [[FULL, SKIPPED, SKIPPED], [SKIPPED, FULL, SKIPPED], [SKIPPED, SKIPPED, PARTIAL]]
    assert np.asarray(classes(ids))[0, 0].tolist() == plan
    visible = jax.jit(lambda ids: Segments(ids).materialize(jnp.arange(5), jnp.arange(5)))(ids)
    assert (np.asarray(visible)[0, 0] == (ids.T == ids)).all()


@pytest.mark.long
def test_all_windows_match_reference_for_lengths_up_to_nine():
    count = 0
    for mask, predicate in sliding():
        table = oracle.allowed(predicate, np.arange(9), np.arange(9))
        for queries, keys in itertools.product(range(1, 10), repeat=2):
            actual = seen(mask, np.arange(queries), np.arange(keys))
            assert actual.shape == (1, 1, queries, keys)
            assert (actual == table[..., :queries, :keys]).all(), f"{mask} {queries} {keys}"
            count += 1
    assert count == 1620


@pytest.mark.slow_except("1000003", "2")
@pytest.mark.parametrize("offset", [-3, 2, 1_000_003])
def test_masks_depend_on_positions_rather_than_indices(offset):
    q_positions, k_positions = offset + np.arange(T), np.arange(S) + max(offset - 2, 0)
    for mask, predicate in itertools.chain(sliding(), two_sided()):
        check(mask, predicate, q_positions, k_positions)


def test_window_size_includes_query_itself():
    at = np.arange(11), np.arange(13)
    sees = seen(Causal() & Window(3), *at)[0, 0]
    assert sees.sum(axis=1).tolist() == [1, 2] + 9 * [3]
    assert sees.diagonal().all()
    both_sides = seen(Window(3, 2), *at)[0, 0]
    assert both_sides[5].nonzero()[0].tolist() == [3, 4, 5, 6]
    for left, right in (0, 0), (1, 0), (1, 1), (0, 2), (2, 1):
        far = at[0][:, None] - at[1]
        wanted = (far < left) & (-far < right)
        np.testing.assert_array_equal(seen(Window(left, right), *at)[0, 0], wanted)
    assert not seen(Causal() & Window(0), *at).any()


def test_window_over_ring_buffer_keeps_newest_keys():
    newest = np.array([*range(11, 17), *range(6, 11)])  # a ring of 11 slots after 17 tokens
    sees = seen(Causal() & Window(3), np.arange(8, 8 + T), newest)
    assert newest[sees[0, 0, 4]].tolist() == [11, 12, 10]


def test_empty_slot_stays_masked_under_negation():
    k_positions = np.array([3, -1, 0, -7, 1, 2, -1, *range(4, 8)])
    nothing = Padding(np.zeros((1, 9), bool))
    for mask in (Causal(), ~Causal(), ~nothing, ~(~nothing & ~Causal()), ~Window(1, 1)):
        sees = seen(mask, np.arange(T), k_positions)
        assert not sees[..., k_positions < 0].any()
    assert seen(~nothing, np.arange(T), k_positions)[..., k_positions >= 0].all()


@pytest.mark.slow
def test_out_of_range_mask_lookups_are_false():
    far = np.array([-1, 0, 4, 5, 900])
    check(Padding(jnp.ones((1, 5), bool)), lambda b, n, q, k: k < 5, far, far)
    ids = jnp.zeros((1, 5), jnp.int32)
    inside = oracle.both(lambda b, n, q, k: 0 <= q < 5, lambda b, n, q, k: k < 5)
    check(Segments(ids), inside, far, far)
    check(Dense(jnp.ones((5, 5), bool)), inside, far, far)


@pytest.mark.slow
def test_padding_prefix_and_segment_masks_match_hand_computed_values():
    valid = jnp.array([[True, True, False], [True, False, False]])
    sees = seen(Padding(valid), np.arange(2), np.arange(3))
    assert np.broadcast_to(sees, (2, 1, 2, 3))[:, 0, 1].tolist() == valid.tolist()
    sees = seen(Causal() | Prefix(jnp.array([2, 0])), np.arange(3), np.arange(3))[:, 0]
    assert sees[0].tolist() == [[True, True, False], [True, True, False], [True, True, True]]
    assert sees[1].tolist() == np.tri(3, dtype=bool).tolist()
    packed = jnp.array([[1, 1, 2]])
    sees = seen(Segments(packed), np.arange(3), np.arange(3))[0, 0]
    assert sees.tolist() == [[True, True, False], [True, True, False], [False, False, True]]


# Random compositions: each leaf with its predicate, in trees of up to four operators.


def near_diagonal(q_positions, k_positions):
    return (q_positions + k_positions) % 3 != 1


def random_leaf(rng: np.random.Generator):
    kind = rng.integers(9)
    sizes = rng.integers(0, 6, 2).tolist()
    if kind == 0:
        return Causal(), oracle.causal()
    if kind == 1:
        return Window(sizes[0]), oracle.window(sizes[0])
    if kind == 2:
        return Window(*sizes), oracle.window(*sizes)
    if kind == 3:
        return Window(None, sizes[0]), oracle.window(None, sizes[0])
    if kind == 4:
        valid = rng.random((B, S)) < 0.6
        return Padding(jnp.asarray(valid)), oracle.padding(valid)
    if kind == 5:
        q_ids, k_ids = rng.integers(0, 3, (B, T)), rng.integers(0, 3, (B, S))
        mask = Segments(jnp.asarray(q_ids, jnp.int32), jnp.asarray(k_ids, jnp.int32))
        return mask, oracle.segments(q_ids, k_ids)
    if kind == 6:
        lengths = rng.integers(0, S + 1, B)
        return Prefix(jnp.asarray(lengths, jnp.int32)), oracle.prefix(lengths)
    if kind == 7:
        full = [(T, S), (1, 1, T, S), (B, 1, T, S), (1, N, T, S), (B, N, T, S)][rng.integers(5)]
        shared = rng.random(2) < 0.3  # one row or column for all queries or keys
        shape = (*full[:-2], *np.where(shared, 1, full[-2:]).tolist())
        array = rng.random(shape) < 0.5
        return Dense(jnp.asarray(array)), oracle.dense(array)
    return Predicate(near_diagonal), lambda b, n, q, k: (q + k) % 3 != 1


def random_mask(rng: np.random.Generator, operators: int):
    mask, predicate = random_leaf(rng)
    for _ in range(operators):
        other, other_predicate = random_leaf(rng)
        choice = rng.integers(4)
        if choice == 0:
            mask, predicate = mask & other, oracle.both(predicate, other_predicate)
        elif choice == 1:
            mask, predicate = other | mask, oracle.either(other_predicate, predicate)
        elif choice == 2:
            mask, predicate = (
                ~(mask & other),
                oracle.negation(oracle.both(predicate, other_predicate)),
            )
        else:
            mask, predicate = (
                other & ~mask,
                oracle.both(other_predicate, oracle.negation(predicate)),
            )
    return mask, predicate


def random_positions(rng: np.random.Generator, length: int, *, keys: bool) -> np.ndarray:
    """Contiguous, offset, shuffled per row, or random with empty slots and outliers."""
    kind = rng.integers(4)
    if kind == 0:
        positions = np.arange(length)
    elif kind == 1:
        positions = rng.integers(0, 4) + np.arange(length)
    elif kind == 2:
        positions = np.stack([rng.permutation(length) for _ in range(B)])
    else:
        positions = rng.integers(-2, length + 3, (B, length))
    if keys and rng.random() < 0.3:
        positions = np.where(rng.random(positions.shape) < 0.3, -1, positions)
    return positions.astype(np.int32)


@pytest.mark.long
def test_random_mask_compositions_match_predicates():
    rng = np.random.default_rng(11)
    some, density = 0, 0.0
    for case in range(250):
        mask, predicate = random_mask(rng, operators=case % 5)
        q_positions = random_positions(rng, T, keys=False)
        k_positions = random_positions(rng, S, keys=True)
        check(mask, predicate, q_positions, k_positions, batch=B, heads=N)
        fraction = seen(mask, q_positions, k_positions).mean()
        some, density = some + (0 < fraction < 1), density + fraction / 250
    assert some > 150 and 0.2 < density < 0.8, "the masks drawn say too little"


@pytest.mark.slow
def test_traced_and_static_masks_materialize_equally():
    rng = np.random.default_rng(12)
    materialize = jax.jit(lambda mask, q, k: mask.materialize(q, k))
    for _ in range(7):
        mask, _ = random_mask(rng, operators=3)
        q_positions = random_positions(rng, T, keys=False)
        k_positions = random_positions(rng, S, keys=True)
        traced = np.asarray(materialize(mask, q_positions, k_positions))
        assert (traced == seen(mask, q_positions, k_positions)).all()


# Tile plans.


def tiles(mask, q_positions, k_positions, block_q: int, block_k: int):
    """Each planned class with its boolean tile; keys beyond the end are empty slots."""
    at = jax.device_put((q_positions, k_positions))
    plan = mask.block_plan(*at, block_q=block_q, block_k=block_k)
    classes = np.asarray(plan.classes)
    assert classes.dtype == np.int8 and np.isin(classes, (SKIPPED, PARTIAL, FULL)).all()
    sees = seen(mask, q_positions, k_positions)
    rows, columns = -(-sees.shape[2] // block_q), -(-sees.shape[3] // block_k)
    assert classes.shape[2:] == (rows, columns)
    lead = np.broadcast_shapes(classes.shape[:2], sees.shape[:2])
    classes = np.broadcast_to(classes, (*lead, rows, columns))
    sees = np.broadcast_to(sees, lead + sees.shape[2:])
    sees = np.pad(sees, [(0, 0)] * 3 + [(0, columns * block_k - sees.shape[3])])
    for b, n, i, j in np.ndindex(classes.shape):
        queries = slice(i * block_q, (i + 1) * block_q)  # queries beyond the end are ignored
        yield int(classes[b, n, i, j]), sees[b, n, queries, j * block_k : (j + 1) * block_k]


def check_sound(mask, q_positions, k_positions, block_q: int, block_k: int) -> list[int]:
    found = []
    for kind, tile in tiles(mask, q_positions, k_positions, block_q, block_k):
        assert kind != SKIPPED or not tile.any(), f"{mask}: skips what may be attended"
        assert kind != FULL or tile.all(), f"{mask}: calls full what is not"
        found.append(kind)
    assert found
    return found


@pytest.mark.long
@pytest.mark.parametrize("cases", [40, pytest.param(150, marks=pytest.mark.long)])
def test_skipped_tiles_are_fully_masked_and_full_tiles_unmasked(cases):
    rng = np.random.default_rng(13)
    found: list[int] = []
    for case in range(cases):
        mask, _ = random_mask(rng, operators=case % 5)
        q_positions = random_positions(rng, T, keys=False)
        k_positions = random_positions(rng, S, keys=True)
        block_q, block_k = [(2, 3), (8, 8)][case % 2]
        found += check_sound(mask, q_positions, k_positions, block_q, block_k)
    counts = np.bincount(found, minlength=3)
    assert (counts > 100).all(), f"a class is hardly tested: {counts}"


@pytest.mark.slow
def test_traced_plans_equal_static_plans():
    rng = np.random.default_rng(14)

    @jax.jit
    def classes(mask, q_positions, k_positions):
        return mask.block_plan(q_positions, k_positions, block_q=2, block_k=3).classes

    for _ in range(7):
        mask, _ = random_mask(rng, operators=2)
        q_positions = random_positions(rng, T, keys=False)
        k_positions = random_positions(rng, S, keys=True)
        plan = mask.block_plan(
            jnp.asarray(q_positions), jnp.asarray(k_positions), block_q=2, block_k=3
        )
        traced = np.asarray(classes(mask, q_positions, k_positions))
        assert (traced == np.asarray(plan.classes)).all()


@pytest.mark.slow
def test_tile_lists_contain_exactly_the_unskipped_tiles():
    """Lists of key tiles and of query tiles have full tiles first, each part ascending."""
    rng = np.random.default_rng(16)
    array = rng.random((B, N, 2 * T, S)) < 0.1
    plan = Dense(jnp.asarray(array)).block_plan(
        jnp.arange(2 * T), jnp.arange(S), block_q=2, block_k=4
    )
    classes = np.asarray(plan.classes)
    assert classes.shape == (B, N, 5, 3) and 0.2 < (classes == SKIPPED).mean() < 0.8
    for lists, grid in (
        (plan.key_tiles(), classes),
        (plan.query_tiles(), classes.swapaxes(2, 3)),
    ):
        order, full, seen = map(np.asarray, lists[:3])
        assert order.shape == grid.shape and full.shape == seen.shape == grid.shape[:3]
        for at in np.ndindex(seen.shape):
            kinds = (np.flatnonzero(grid[at] == kind).tolist() for kind in (FULL, PARTIAL))
            visited = [*next(kinds), *next(kinds)]
            assert full[at] == (grid[at] == FULL).sum() and seen[at] == len(visited)
            assert order[at][: seen[at]].tolist() == visited
            assert set(order[at][seen[at] :].tolist()) <= {visited[-1] if visited else 0}


def exact_cases():
    valid = np.arange(37)[None, :] < np.array([[37], [20], [9], [0]])
    holes = np.random.default_rng(15).random((3, 37)) < 0.7
    yield "causal", Causal()
    for width in (0, 1, 2, 5, 8, 13, 40):
        yield f"window {width}", Window(width)
        yield f"two-sided window {width}", Window(width, width)
        yield f"right window {width}", Window(None, width)
    yield "padding", Padding(jnp.asarray(valid))
    yield "padding with holes", Padding(jnp.asarray(holes))
    yield "prefix", Prefix(jnp.array([0, 1, 8, 20, 37, 90], jnp.int32))


def check_exact(name, mask, *sizes):
    for kind, tile in tiles(mask, *map(np.arange, sizes[:2]), *sizes[2:]):
        need = FULL if tile.all() else PARTIAL if tile.any() else SKIPPED
        assert kind == need, f"{name}: a tile is {kind} and should be {need}"


@pytest.mark.long
@pytest.mark.parametrize("blocks", [(8, 8), (16, 5)])
def test_simple_masks_mark_tiles_partial_only_if_mixed(blocks):
    for name, mask in exact_cases():
        check_exact(name, mask, 29, 37, *blocks)


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("left", [None, 0, 1, 2, 3])
def test_narrow_windows_have_exact_tiles(left):
    for right in (0, 1, 2, 3) if left is None else (None, 0, 1, 2, 3):
        check_exact((left, right), Window(left, right), 11, 13, 5, 3)


def test_union_tile_is_full_if_either_mask_tile_is_full():
    mask = Causal() | Prefix(np.array([6], np.int32))
    kinds = [kind for kind, _ in tiles(mask, np.arange(11), np.arange(13), 5, 3)]
    after = [SKIPPED] * 3, [PARTIAL, PARTIAL, SKIPPED], [FULL, PARTIAL, SKIPPED]
    assert kinds == [kind for row in after for kind in [FULL, FULL, *row]]


def test_prefix_mask_tiles_are_exact_at_every_length():
    """Including a length equal to the first or last key of a tile, which is then not full."""
    lengths = np.arange(-1, 15, dtype=np.int32)
    at = jax.device_put((np.arange(7), np.arange(13)))
    plan = Prefix(lengths).block_plan(*at, block_q=7, block_k=5)
    keys = np.pad(np.arange(13), (0, 2), constant_values=99)  # padding keys are empty slots
    sees = (keys < lengths[:, None]).reshape(len(lengths), 3, 5)
    need = np.where(sees.all(axis=2), FULL, np.where(sees.any(axis=2), PARTIAL, SKIPPED))
    assert plan.classes[:, 0, 0].tolist() == need.tolist()


@pytest.mark.slow_except("(11, 5)")
@pytest.mark.parametrize("rows", [(3, 13), (11, 5), (3, 7)], ids=str)
def test_segment_ids_may_be_shorter_than_queries_or_keys(rows):
    """Positions without an id see nothing: in the array, in a plan and as vectors."""
    queries, keys = 11, 13
    q_ids, k_ids = (np.ones((1, size), np.int32) for size in rows)
    sees = np.outer(np.arange(queries) < rows[0], np.arange(keys) < rows[1])
    mask, at = Segments(q_ids, k_ids), (np.arange(queries), np.arange(keys))

    def as_vectors(known):
        vectors = MaskVectors.of(mask, at[0][None], at[1][None], known)
        pairs = [x[:, :, None] for x in vectors.q], [x[:, None, :] for x in vectors.k]
        return jnp.broadcast_to(vectors.visible(*pairs), (1, queries, keys))[0]

    @jax.jit
    def found():
        return mask.materialize(*at)[0, 0], as_vectors(True), as_vectors(False)

    assert [x.tolist() for x in jax.device_get(found())] == [sees.tolist()] * 3
    assert set(check_sound(mask, *at, 3, 3)) == {SKIPPED, PARTIAL, FULL}


def test_all_tiles_of_mask_without_program_are_partial():
    mask, at = Predicate(lambda q, k: jnp.sqrt(1.0 * (q + k)) < 3), np.arange(6)
    classes = mask.block_plan(at, at, block_q=2, block_k=2).classes
    np.testing.assert_array_equal(classes, np.ones((1, 1, 3, 3)))


@pytest.mark.slow
def test_tile_with_only_empty_slots_and_future_keys_is_skipped():
    places = np.array([0, 1, 2, 3, 20, -1, 22, 23])
    kinds = [kind for kind, _ in tiles(Causal(), np.arange(8), places, 8, 4)]
    assert kinds == [PARTIAL, SKIPPED]


@pytest.mark.slow
def test_sliding_window_plan_skips_tiles_on_both_sides_of_band():
    kinds = [k for k, _ in tiles(Causal() & Window(64), np.arange(512), np.arange(512), 32, 32)]
    grid = np.array(kinds).reshape(16, 16)
    rows, columns = np.indices(grid.shape)
    assert (grid[columns > rows] == SKIPPED).all()
    assert (grid[columns < rows - 2] == SKIPPED).all()
    assert (grid[columns == rows - 1] == FULL).all()
    assert (grid[(columns == rows) | (columns == rows - 2)] == PARTIAL).all()


def test_long_sequence_plan_uses_linear_memory():
    length = 1 << 20
    mask = Causal() & Window(4096) & Padding(jax.ShapeDtypeStruct((1, length), bool))
    positions = jax.ShapeDtypeStruct((length,), jnp.int32)

    def plan(mask, q_positions, k_positions):
        return mask.block_plan(q_positions, k_positions, block_q=1024, block_k=1024).classes

    traced = jax.make_jaxpr(plan)(mask, positions, positions)
    sizes = [
        v.aval.size for equation in traced.jaxpr.eqns for v in equation.outvars
    ]  # one level deep: calls return the results inside them
    assert sizes and max(sizes) <= 4 * length


# Values.


def test_static_masks_are_frozen_hashable_values():
    mask = Causal() & ~Window(3, 2) | Window(None, 4)
    same = Causal() & ~Window(3, 2) | Window(None, 4)
    assert mask == same and hash(mask) == hash(same) and {mask: 1}[same] == 1
    assert mask != (Causal() & ~Window(3, 1) | Window(None, 4))
    assert Causal() & Window(3) != Causal() | Window(3)
    assert jax.tree.leaves(mask) == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        Window(3).left = 5


def test_mask_arrays_are_pytree_leaves_and_numbers_are_static():
    valid, ids = np.ones((B, S), bool), np.zeros((B, T), np.int32)
    mask = Causal() & Padding(jax.device_put(valid)) | Segments(ids, np.zeros((B, S), np.int32))
    assert len(jax.tree.leaves(mask)) == 3
    rebuilt = jax.tree.map(lambda x: x, mask)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(mask)
    assert jax.tree.structure(Window(3)) != jax.tree.structure(Window(4))


def test_mask_passed_to_jit_does_not_cause_recompilation():
    traces = []

    @jax.jit
    def materialize(mask):
        traces.append(1)
        return mask.materialize(jnp.arange(T), jnp.arange(S))

    for _ in range(3):
        materialize(Causal() & Padding(np.ones((B, S), bool)))
    assert len(traces) == 1


BAD = [
    (lambda: Window(-1), "-1"),
    (lambda: Window(True), "left is True: must be an integer of at least 0"),
    (lambda: Window(jnp.float32(3)), r"left is Array\(3., .*: must be an integer of at least 0"),
    (lambda: Window(None, np.array([3])), r"right is array\(\[3\]\): must be an integer"),
    (lambda: jax.jit(Window)(3), r"left is traced, but must be static, .*; Predicate\(lambda"),
    (lambda: jax.jit(lambda w: Window(None, w))(3), "right is traced"),
    (lambda: Window(2, -3), "-3"),
    (lambda: Window(2.5), "2.5"),
    (lambda: Window(None, None), "None"),
    (lambda: Padding(np.ones(7, bool)), r"\(7,\)"),
    (lambda: Padding(np.ones((3, 7), np.int32)), "int32"),
    (lambda: Segments(np.zeros(7, np.int32)), r"\(7,\)"),
    (lambda: Segments(np.zeros((3, 7), np.float32)), "float32"),
    (lambda: Segments(np.zeros((3, 7), np.int32), np.zeros((2, 7), np.int32)), r"3.*2|2.*3"),
    (lambda: Prefix(np.zeros((3, 7), np.int32)), r"\(3, 7\)"),
    (lambda: Prefix(np.zeros(3, np.float32)), "float32"),
    (lambda: Prefix(np.array([4, 2**32])), "Prefix: lengths contains 4294967296"),
    (lambda: Segments(np.array([[1, 2**32 + 1]])), "Segments: q_ids contains 4294967297"),
    (lambda: Segments(jnp.array([[2**31]], jnp.uint32)), "Segments: q_ids contains 2147483648"),
    (lambda: Causal().materialize([0, 2**32], np.arange(7)), "q_positions contains 4294967296"),
    (
        lambda: Causal().materialize([0], jnp.array([2**31], jnp.uint32)),
        "k_positions contains 21474",
    ),
    (lambda: Dense(np.ones((3, 5, 7), bool)), r"\(3, 5, 7\)"),
    (lambda: Dense(np.ones((5, 7), np.float32)), "float32"),
    (lambda: Predicate("k <= q"), "k <= q"),
    (
        lambda: Predicate(lambda b, h, q, k: k <= q),
        "must take two arguments, the positions of queries and keys; for rows or heads, let",
    ),
    (lambda: Causal().materialize(np.arange(5, dtype="f4"), np.arange(7)), "float32"),
    (lambda: Causal().materialize(np.zeros((1, 1, 5), np.int32), np.arange(7)), r"\(1, 1, 5\)"),
    (
        lambda: Padding(np.ones((3, 7), bool)).materialize(
            np.arange(5), np.zeros((2, 7), np.int32)
        ),
        r"3.*2|2.*3",
    ),
    (lambda: Causal().block_plan(np.arange(5), np.arange(7), block_q=0, block_k=4), "0"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_invalid_argument_error_shows_value(case):
    build, names = BAD[case]
    with pytest.raises(ValueError, match=names):
        build()


def test_masks_combine_only_with_masks():
    for combine in (lambda: Causal() & True, lambda: jnp.ones((5, 7), bool) | Causal()):
        with pytest.raises(TypeError):
            combine()


def test_traced_window_error_suggests_predicate():
    @jax.jit
    def seen(left):
        mask = Causal() & Predicate(lambda q, k: q - k < left)
        return mask.materialize(np.arange(5), np.arange(7))

    want = (Causal() & Window(3)).materialize(np.arange(5), np.arange(7))
    np.testing.assert_array_equal(seen(3), want)


def test_function_with_bound_arguments_is_a_valid_predicate():
    def near(q, k, left):
        return q - k < left

    @functools.wraps(near)
    def seen(q, k):
        return near(q, k, 3)

    found = Predicate(seen).materialize(np.arange(5), np.arange(7))
    np.testing.assert_array_equal(found, Window(3, None).materialize(np.arange(5), np.arange(7)))


@pytest.mark.parametrize("shape", [(1, 7), (5, 1), (1, 1), (2, 1, 1, 7), (1, 3, 5, 1)], ids=str)
def test_dense_mask_broadcasts_axes_of_length_one(shape, rng):
    """As in jax.nn, for every position; a negative position is not a query."""
    array = rng.random(shape) < 0.5
    array.flat[0] = True
    full, mask = np.broadcast_to(array, (2, 3, 5, 7)), Dense(array)
    at = np.arange(5, dtype=np.int32), np.arange(7, dtype=np.int32)
    found = np.broadcast_to(mask.materialize(*at), (2, 3, 5, 7))
    np.testing.assert_array_equal(found, full)
    check_sound(mask, *at, 2, 3)
    far = np.broadcast_to(mask.materialize(np.array([-1]), at[1]), (*found.shape[:2], 1, 7))
    assert not far.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [Padding(np.ones((1, 3), bool)), Causal() & Window(3), ~Causal()], ids=repr
)
def test_mask_in_boolean_context_raises_error(mask):
    """`and`, `or` and `not` would silently drop one side, so the message names the operators."""
    told = r"is neither true nor false: combine masks with &, \| and ~.* with `mask is None`"
    for ask in (bool, lambda mask: mask and Window(2), lambda mask: Window(2) or mask):
        with pytest.raises(TypeError, match=told):
            ask(mask)
    with pytest.raises(TypeError, match=re.escape(repr(mask))):
        operator.not_(mask)


def test_causal_window_is_recognized_in_mask_compositions():
    assert causal_window(Causal()) == (True, None)
    assert causal_window(Everything()) == (False, None)
    assert causal_window(Causal() & Window(5)) == causal_window(Window(5) & Causal()) == (True, 5)
    assert causal_window(Window(5) & Window(3)) == (False, 3)
    assert causal_window(Causal() | Window(5)) is causal_window(Window(5, 1)) is None
