"""The cache against a dictionary from positions to keys."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.cache import kv_cache as kv
from transformer_jax.text.options import GenerateOptions

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5

jit_update = jax.jit(kv.update)
jit_extend = jax.jit(kv.extend, static_argnames="window")


class DictCache:
    """For each row a dictionary from positions to (key, value), with the newest S of a ring.

    The first `sinks` positions are never dropped.
    """

    def __init__(self, rows: int, capacity: int, sinks: int = 0):
        self.rows: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(rows)]
        self.capacity, self.sinks = capacity, sinks
        self.length = [0] * rows

    def update(self, k, v, positions):
        for b, row in enumerate(self.rows):
            for t, position in enumerate(positions[b].tolist()):
                if position >= 0:
                    row[position] = (k[b, t], v[b, t])
                    self.length[b] = max(self.length[b], position + 1)
            newest = self.length[b] - 1
            forgotten = newest - (self.capacity - self.sinks)
            for position in [p for p in row if self.sinks <= p <= forgotten]:
                del row[position]

    def check(self, cache: kv.KVCache) -> int:
        """Check that exactly these positions are in their slots, and return the number of slots."""
        seen = 0
        np.testing.assert_array_equal(cache.length, self.length)
        positions, k, v = (np.asarray(x) for x in (cache.positions, cache.k, cache.v))
        for b, row in enumerate(self.rows):
            assert sorted(row) == sorted(p for p in positions[b].tolist() if p >= 0)
            assert (positions[b] >= -1).all()
            for position, (key, value) in row.items():
                turns = max(0, position - self.sinks) // (self.capacity - self.sinks)
                slot = position - turns * (self.capacity - self.sinks)
                assert positions[b, slot] == position
                np.testing.assert_array_equal(k[b, slot], key)
                np.testing.assert_array_equal(v[b, slot], value)
                seen += 1
        return seen


@functools.cache
def init(rows: int, capacity: int, **more) -> kv.KVCache:
    return jax.jit(lambda: kv.init(rows, capacity, HEADS, KEY_DIM, VALUE_DIM, **more))()


def tokens(rng, rows: int, count: int):
    k = rng.standard_normal((rows, count, HEADS, KEY_DIM)).astype(np.float32)
    v = rng.standard_normal((rows, count, HEADS, VALUE_DIM)).astype(np.float32)
    return k, v


def draw_positions(rng, lengths, count: int, *, padding: float) -> np.ndarray:
    """Continue each row at its own length, with padding anywhere in the chunk."""
    valid = rng.random((len(lengths), count)) >= padding
    return np.where(valid, np.array(lengths)[:, None] + np.cumsum(valid, axis=1) - 1, -1)


def test_new_cache_is_empty():
    cache = init(3, 7)
    assert cache.k.shape == (3, 7, HEADS, KEY_DIM) and cache.v.shape == (3, 7, HEADS, VALUE_DIM)
    assert (np.asarray(cache.positions) == -1).all() and cache.positions.shape == (3, 7)
    assert (np.asarray(cache.length) == 0).all() and cache.length.shape == (3,)
    assert cache.capacity == 7
    assert cache.positions.dtype == cache.length.dtype == jnp.int32
    assert kv.init(3, 7, HEADS, KEY_DIM).v.shape == (3, 7, HEADS, KEY_DIM)


@pytest.mark.slow_except("7-2-0.4")
@pytest.mark.parametrize("padding", [0.0, 0.4])
@pytest.mark.parametrize(("capacity", "sinks"), [(5, 0), (11, 0), (7, 2), (5, 4)])
def test_ring_cache_keeps_newest_positions(rng, capacity, sinks, padding):
    """Chunks of 1, 3 and 17 tokens, some longer than the ring; padding makes rows ragged."""
    rows = 3
    cache, oracle = init(rows, capacity, sinks=sinks), DictCache(rows, capacity, sinks)
    turns, compared = 0, 0
    for count in [1, 3, 3, 1, 17, 3, 17, 1, 1, 1, 3, 17, 1, 17, 3, 17]:
        k, v = tokens(rng, rows, count)
        positions = draw_positions(rng, oracle.length, count, padding=padding)
        cache = jit_update(cache, k, v, positions)
        oracle.update(k, v, positions)
        compared += oracle.check(cache)
        turns = min(oracle.length) // capacity
    assert turns >= 4 and compared > 100
    assert (len(set(oracle.length)) == 1) == (padding == 0.0)


def test_padding_tokens_are_not_written_to_cache(rng):
    """Not even to the last slot, which index -1 would select, or to slot 0."""
    cache = jax.tree.map(lambda x: jax.device_put(np.full_like(x, 3)), init(3, 5))
    new = jit_update(cache, *tokens(rng, 3, 17), np.full((3, 17), -1, np.int32))
    chex.assert_trees_all_equal(new, cache, strict=True)


def test_token_order_within_chunk_does_not_affect_cache(rng):
    """No two tokens of a chunk are written to one slot, because either could win."""
    k, v = tokens(rng, 3, 17)
    positions = np.tile(np.arange(17, dtype=np.int32), (3, 1))
    want = jit_update(init(3, 5), k, v, positions)
    got = jit_update(init(3, 5), k[:, ::-1], v[:, ::-1], positions[:, ::-1])
    chex.assert_trees_all_equal(got, want, strict=True)


@pytest.mark.slow_except("5-3-2")
@pytest.mark.parametrize(
    ("capacity", "window", "sinks"),
    [(11, None, 0), (7, 3, 0), (7, 7, 0), (19, 7, 0), (5, 3, 2), (13, 5, 4)],
)
def test_extend_returns_every_key_visible_to_queries(rng, capacity, window, sinks):
    """For a query at p: the sinks and the last `window` positions up to p, each exactly once."""
    rows = 3
    cache = init(rows, capacity, sinks=sinks)
    memory: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in range(rows)]
    lengths, compared = [0] * rows, 0
    room = capacity if window is None else 61
    for count in [3, 1, 1, 3, 13, 1, 1, 3, 13, 1]:
        positions = draw_positions(rng, lengths, count, padding=0.3)
        positions[positions >= room] = -1  # a full cache is never written past its end
        k, v = tokens(rng, rows, count)
        cache, keys, values, at = jit_extend(cache, k, v, positions, window)
        at, keys, values = (np.asarray(x) for x in (at, keys, values))
        assert at.shape == keys.shape[:2] == values.shape[:2]
        for b in range(rows):
            for t, p in enumerate(positions[b].tolist()):
                if p >= 0:
                    memory[b][p] = (k[b, t], v[b, t])
                    lengths[b] = p + 1
            for p in positions[b].tolist():
                first = 0 if window is None else max(0, p - window + 1)
                for needed in {*range(first, p + 1), *range(min(sinks, p + 1))}:
                    (slot,) = np.flatnonzero(at[b] == needed)
                    np.testing.assert_array_equal(keys[b, slot], memory[b][needed][0])
                    np.testing.assert_array_equal(values[b, slot], memory[b][needed][1])
                    compared += 1
    assert compared > 50


@pytest.mark.slow_except("5-0")
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("slots", [4, 5, 6, 7])
def test_first_query_in_chunk_attends_to_its_full_window(rng, slots, sinks):
    """For 4 new tokens and a window of 3, a ring of 6 slots has it, but a shorter one does not."""
    at = np.where(np.arange(17) < 13, np.arange(17), -1)
    cache = init(3, slots + sinks, sinks=sinks)
    cache = jit_update(cache, *tokens(rng, 3, 17), np.tile(at, (3, 1)))
    new = np.tile(13 + np.arange(4), (3, 1))
    seen = np.asarray(jit_extend(cache, *tokens(rng, 3, 4), new, 3)[3])
    assert {*range(11, 17), *range(sinks)} <= {*seen[0].tolist()}
    assert seen.shape == (3, slots + sinks + (4 if slots < 6 else 0))


def test_single_token_step_reads_at_most_ring_capacity():
    """Decoding one token at a time reads the ring itself, S keys rather than S + 1."""

    def read(count: int, window: int | None):
        cache = init(3, 7)  # outside the trace, because `init` keeps its results

        def extend(k, v, at):
            return kv.extend(cache, k, v, at, window)[1:]

        k, v, at = (
            jax.ShapeDtypeStruct((3, count, *rest), kind)
            for rest, kind in (
                ((HEADS, KEY_DIM), jnp.float32),
                ((HEADS, VALUE_DIM), jnp.float32),
                ((), jnp.int32),
            )
        )
        shapes = [x.shape[1] for x in jax.eval_shape(extend, k, v, at)]
        assert len(set(shapes)) == 1
        return shapes[0]

    assert [read(1, 7), read(5, 3), read(7, None), read(2, 7), read(5, 4)] == [7, 7, 7, 9, 12]


def test_next_positions_count_only_valid_tokens():
    valid = np.array([[True, False, True, True], [False, False, True, False]])
    lengths = np.array([5, 0], np.int32)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            got = jax.jit(kv.next_positions)(lengths, valid)
        np.testing.assert_array_equal(got, [[5, -1, 6, 7], [-1, -1, 0, -1]])
        assert got.dtype == jnp.int32
    assert jax.eval_shape(kv.next_positions, lengths, valid[:, :0]).shape == (2, 0)


def test_cache_rows_can_be_gathered(rng):
    """Every leaf leads with the batch, so beams can reorder rows."""
    k, v = tokens(rng, 3, 3)
    at = np.array([[0, 1, 2], [0, 1, -1], [0, -1, -1]], np.int32)
    cache = jit_update(init(3, 5), k, v, at)
    order = np.array([2, 0, 0, 1])
    picked = jax.tree.map(lambda leaf: np.asarray(leaf)[order], cache)
    np.testing.assert_array_equal(picked.length, [1, 3, 3, 2])
    oracle = DictCache(4, 5)
    oracle.update(k[order], v[order], at[order])
    assert oracle.check(picked) == 9


@pytest.mark.parametrize(("rows", "count"), [(0, 6), (1, 0), (0, 0)])
def test_cache_accepts_empty_batches_and_chunks(rng, rows, count):
    cache = init(rows, 5)
    k, v = tokens(rng, rows, count)
    positions = np.tile(np.arange(count, dtype=np.int32), (rows, 1))
    new, keys, values, at = jit_extend(cache, k, v, positions, 3)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, cache)
    assert keys.shape[:2] == values.shape[:2] == at.shape
    assert new.length.tolist() == [count] * rows


def test_cache_is_frozen_and_update_leaves_argument_unchanged(rng):
    cache = init(3, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.length = jnp.ones(3, jnp.int32)
    before = jax.tree.map(np.array, cache)
    new = jit_update(cache, *tokens(rng, 3, 3), np.array([[0, 1, 2]] * 3, np.int32))
    assert new is not cache and new.length.tolist() == [3, 3, 3]
    chex.assert_trees_all_equal(cache, before)


@pytest.mark.slow_except("float16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_update_preserves_cache_dtypes(rng, dtype):
    """Even for f32 keys and 64-bit positions; otherwise a scan over the cache does not compile."""
    cache = init(2, 5, dtype=dtype)
    k, v = tokens(rng, 2, 6)
    at = np.tile(np.arange(6), (2, 1))
    new, keys, values, positions = jit_extend(cache, k, v, at, 5)
    expected = jax.tree.map(lambda leaf: leaf.dtype, cache)
    assert jax.tree.map(lambda leaf: leaf.dtype, new) == expected
    assert keys.dtype == values.dtype == jnp.dtype(dtype) and positions.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(keys)[:, 5:], k.astype(keys.dtype))


def test_python_list_of_keys_is_rejected():
    shapes = dict(k=(2, 3, HEADS, KEY_DIM), v=(2, 3, HEADS, VALUE_DIM), positions=(2, 3))
    arrays = {n: np.zeros(s, int if n == "positions" else None) for n, s in shapes.items()}
    for name, rule in (("k", "K, H"), ("v", "K, Hv"), ("positions", "B, T")):
        arguments = arrays | {name: arrays[name].tolist()}
        with pytest.raises(
            ValueError, match=rf"{name} is of type list: must be an array .*{rule}\]"
        ):
            kv.update(init(2, 5), **arguments)


@pytest.mark.slow_except(
    "k-{'k': (2, 3, 3)}",
    "k-{'k': (2, 3, 3, 3)}",
    "positions-{'positions': (1, 3)}",
    "positions-{'positions': (3,)}",
)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", dict(k=(2, 3, HEADS, KEY_DIM + 1))),
        ("k", dict(k=(2, 3, HEADS + 1, KEY_DIM))),
        ("k", dict(k=(1, 3, HEADS, KEY_DIM))),
        ("k", dict(k=(2, 3, KEY_DIM))),
        ("v", dict(v=(2, 3, HEADS, VALUE_DIM + 1))),
        ("v", dict(v=(2, 4, HEADS, VALUE_DIM))),
        ("positions", dict(positions=(3,))),
        ("positions", dict(positions=(1, 3))),
        ("positions", dict(positions=(2, 4))),
    ],
    ids=lambda x: str(x),
)
def test_wrong_shape_error_shows_both_shapes(name, change):
    shapes = dict(k=(2, 3, HEADS, KEY_DIM), v=(2, 3, HEADS, VALUE_DIM), positions=(2, 3))
    shapes.update(change)
    arguments = {
        n: np.zeros(s, np.int32 if n == "positions" else np.float32) for n, s in shapes.items()
    }
    with pytest.raises(ValueError) as caught:
        kv.update(init(2, 5), **arguments)
    assert str(caught.value).startswith(f"{name} has shape {shapes[name]}"), caught.value
    assert "must be (2, " in str(caught.value)


@pytest.mark.slow
def test_invalid_cache_sizes_and_lengths_are_rejected():
    with pytest.raises(ValueError, match="capacity is 0"):
        init(2, 0)
    with pytest.raises(ValueError, match="sinks is 5: must be below capacity, 5"):
        init(2, 5, sinks=5)
    with pytest.raises(ValueError, match="sinks is -1"):
        init(2, 5, sinks=-1)
    for batch, capacity in ((-1, 5), (2, 2.5)):
        with pytest.raises(ValueError, match=r"is (-1|2\.5): must be an integer of at least"):
            init(batch, capacity)


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        *((name, f"'{name}'") for name in ("int32", "bool", "float8_e4m3fn")),
        ("foo", "'foo'"),
        (3, "3"),
        (None, "None"),
        (["int8"], r"\['int8'\]"),
        (np.zeros(3, np.float32), r"float32\[3\]"),
    ],
)
def test_invalid_dtype_is_rejected_by_argument_name(dtype, shown):
    rule = f"is {shown}: must be int8 or a floating-point dtype of at least 16 bits$"
    with pytest.raises(ValueError, match=f"^dtype {rule}"):
        kv.init(2, 5, HEADS, KEY_DIM, dtype=dtype)
    if dtype is not None:  # None is the compute dtype
        with pytest.raises(ValueError, match=f"^cache_dtype {rule}"):
            GenerateOptions(cache_dtype=dtype)
        recurrent = tj.RecurrentConfig(vocab_size=11, d_embed=3, d_hidden=3)
        with pytest.raises(ValueError, match=r"^dtype is "):
            tj.init_decode_state(recurrent, None, 2, 5, dtype=dtype)


def test_repeated_position_replaces_its_old_key():
    """Scoring the last tokens again does not count them twice, even in a ring below the chunk."""
    k, v = tokens(np.random.default_rng(3), 3, 17)
    at = np.where(np.arange(17) < 7, np.arange(17), -1)
    cache = jit_update(init(3, 5), k, v, np.tile(at, (3, 1)))
    positions = np.tile([5, 6, 7, -1], (3, 1))
    _, keys, _, seen = jit_extend(cache, k[:, 5:9] + 1, v[:, 5:9], positions, 3)
    keys, visible = np.asarray(keys), np.asarray(seen)[0]
    assert sorted(p for p in visible if p >= 0) == [2, 3, 4, 5, 6, 7]
    for position in (5, 6):
        (slot,) = np.flatnonzero(visible == position)
        np.testing.assert_array_equal(keys[0, slot], k[0, position] + 1)
