"""The paged cache against a dictionary from positions to keys per row, and in models."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from transformer_jax import Causal, dot_product_attention, explain_attention, preset
from transformer_jax.cache import kv_cache as kv
from transformer_jax.cache import paged_cache as paged
from transformer_jax.cache.model_cache import ModelCache, check_cache, rewind_cache, share_cache
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.batch_rows import fork, gather_rows, select_rows
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.kernels import Target, using
from transformer_jax.models.factory import build, init_cache, init_paged_cache, init_params
from transformer_jax.models.streaming import StreamingEncoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
ROWS, CAPACITY, SIZE = 3, 28, 4

NONE = np.zeros(0, np.int32)
CACHED = 1e-5  # relative to the largest logit: the same f32 sums in another order

jit_update = jax.jit(paged.update)
jit_share = jax.jit(paged.share)
jit_gather = jax.jit(paged.gather_pages)
jit_rewind = jax.jit(paged.rewind)
jit_count_needed = jax.jit(paged.count_needed)
count_free = jax.jit(lambda cache: cache.free_pages)


def init(num_pages=23, rows=ROWS, **more):
    sizes = rows, CAPACITY, HEADS, KEY_DIM, VALUE_DIM
    return paged.init(*sizes, num_pages=num_pages, page_size=SIZE, **more)


@functools.cache
def empty():
    """Return an empty cache of nine pages, with which most tests start.

    A row of maximum length uses seven of them, which leaves two for the others.
    """
    return init(num_pages=9)


def fill(k, v, *lengths):
    """Return a cache with rows of these lengths."""
    cache = empty()
    for start in range(0, max(lengths), 6):
        part = slice(start, start + 6)
        counts = np.clip(np.array(lengths) - start, 0, 6)
        cache = jit_update(cache, k[:, part], v[:, part], after([start] * ROWS, counts))
    return cache


def tokens(rng, count, rows=ROWS):
    k = rng.standard_normal((rows, count, HEADS, KEY_DIM)).astype(np.float32)
    v = rng.standard_normal((rows, count, HEADS, VALUE_DIM)).astype(np.float32)
    return k, v


def after(lengths, counts, width=6):
    """Return positions that continue each row by `counts` tokens, then padding."""
    at = np.arange(width)[None]
    return np.where(at < np.array(counts)[:, None], np.array(lengths)[:, None] + at, -1)


def write(oracle, k, v, positions):
    for b, row in enumerate(oracle):
        row.update({p: (k[b, t], v[b, t]) for t, p in enumerate(positions[b].tolist()) if p >= 0})


def check(cache, oracle):
    """Check that each row has exactly the dictionary's keys, in the slots of their positions."""
    assert cache.length.tolist() == [max(row, default=-1) + 1 for row in oracle]
    seen = jax.device_get(jit_gather(cache))
    assert seen.k.shape == (len(oracle), CAPACITY, HEADS, KEY_DIM)
    for b, row in enumerate(oracle):
        expected = np.full(CAPACITY, -1)
        expected[list(row)] = list(row)
        np.testing.assert_array_equal(seen.positions[b], expected)
        for p, (key, value) in row.items():
            np.testing.assert_array_equal(seen.k[b, p], key)
            np.testing.assert_array_equal(seen.v[b, p], value)
    return sum(map(len, oracle))


def pages_of(cache):
    return [{p for p in row if p >= 0} for row in cache.block_table.tolist()]


@pytest.mark.slow
def test_new_paged_cache_is_empty_with_free_pages():
    cache = init(num_pages=11)
    assert check(cache, [{}] * ROWS) == 0
    assert (cache.capacity, cache.page_size, cache.num_pages) == (CAPACITY, SIZE, 11)
    assert cache.free_pages == 11 and not cache.exhausted.any()


def test_random_paged_cache_operations_match_dictionary_model(rng):
    cache, oracle, compared, forked = empty(), [{} for _ in range(ROWS)], 0, 0
    for turn in range(45):
        lengths = [max(row, default=-1) + 1 for row in oracle]
        if turn % 3 == 2:  # continue each row from a random row, at a random length
            rows = rng.integers(0, ROWS, ROWS)
            cut = np.array([rng.integers(0, lengths[row] + 1) for row in rows])
            cache = jit_share(cache, rows, cut)
            oracle = [
                {p: kept for p, kept in oracle[row].items() if p < n}
                for row, n in zip(rows, cut, strict=True)
            ]
            forked += len(set(rows.tolist())) < ROWS
        else:
            counts = np.minimum(rng.integers(0, 7, ROWS), 3 * SIZE - np.array(lengths))
            k, v = tokens(rng, 6)
            positions = after(lengths, counts)
            cache = jit_update(cache, k, v, positions)
            write(oracle, k, v, positions)
        compared += check(cache, oracle)
        named = set().union(*pages_of(cache))
        assert int(count_free(cache)) == 9 - len(named)
        blocks = [-(-len(row) // SIZE) for row in oracle]
        assert [len(pages) for pages in pages_of(cache)] == blocks
    assert compared > 300 and forked > 5 and not any(cache.exhausted.tolist())


@pytest.mark.slow
def test_cache_without_rows_accepts_empty_updates(rng):
    shared = paged.share(paged.update(init(), *tokens(rng, 1), after([0] * 3, [1] * 3, 1)), NONE)
    for cache in (init(rows=0), shared):
        new = paged.update(cache, *tokens(rng, 1, rows=0), np.zeros((0, 1), np.int32))
        assert new.length.shape == (0,) and new.free_pages == 23


def test_shared_page_is_copied_on_first_write(rng):
    cache, (k, v) = init(rows=1, num_pages=7), tokens(rng, 6, rows=1)
    cache = jit_update(cache, k, v, after([0], [6]))  # one and a half pages
    both = paged.share(cache, jnp.array([0, 0]))
    assert pages_of(both) == [{0, 1}, {0, 1}] and both.free_pages == 5
    k2, v2 = tokens(rng, 1, rows=2)
    new = jit_update(both, k2, v2, after([6, 6], [0, 1], 1))
    assert new.block_table[1, 0] == 0 and new.free_pages == 4, "the full page is still shared"
    oracle = [{p: (k[0, p], v[0, p]) for p in range(6)} for _ in range(2)]
    check(both, oracle)
    oracle[1][6] = k2[1, 0], v2[1, 0]
    check(new, oracle)


@pytest.mark.slow
def test_row_may_share_prefix_of_another_row(rng):
    cache, (k, v) = init(rows=2), tokens(rng, 11, rows=2)
    cache = jit_update(cache, k, v, after([0, 0], [11, 3], 11))
    cache = paged.share(cache, jnp.array([0, 0]), jnp.array([11, 5]))
    k2, v2 = tokens(rng, 2, rows=2)
    cache = jit_update(cache, k2, v2, after([11, 5], [0, 2], 2))
    whole = {p: (k[0, p], v[0, p]) for p in range(11)}
    prefix = {p: whole[p] for p in range(5)} | {5: (k2[1, 0], v2[1, 0]), 6: (k2[1, 1], v2[1, 1])}
    check(cache, [whole, prefix])


@pytest.mark.slow
def test_rewound_tokens_stay_discarded_across_position_gap(rng):
    cache, (k, v) = init(rows=1), tokens(rng, 7, rows=1)
    cache = paged.rewind(jit_update(cache, k, v, after([0], [7], 7)), jnp.array([5]))
    cache = jit_update(cache, k[:, :1], v[:, :1], np.array([[9]]))
    check(cache, [{p: (k[0, p], v[0, p]) for p in range(5)} | {9: (k[0, 0], v[0, 0])}])


def test_rewound_tokens_stay_discarded_despite_longer_row(rng):
    k, v = tokens(rng, 12)
    cache = jit_rewind(fill(k, v, 7, 7, 0), np.array([7, 5, 0]))
    cache = jit_update(cache, k[:, :6], v[:, :6], after([0, 7, 0], [0, 1, 0]))
    oracle = [{p: (k[b, p], v[b, p]) for p in range(n)} for b, n in enumerate((7, 5, 0))]
    oracle[1][7] = k[1, 0], v[1, 0]
    check(cache, oracle)


def test_row_writes_to_unshared_pages_in_place(rng):
    k, v = tokens(rng, 6)
    before = fill(k, v, 5, 2, 0)
    cache = jit_update(before, k, v, after([5, 2, 0], [2, 2, 0]))
    np.testing.assert_array_equal(cache.block_table, before.block_table)
    assert int(jit_count_needed(before, np.array([7, 4, 0]))) == 0
    assert int(jit_count_needed(before, np.array([9, 5, 0]))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_reallocated_page_exposes_no_data_from_previous_row(rng, value):
    cache = init(rows=2, num_pages=2)
    old = np.full((2, 8, HEADS, KEY_DIM), value), np.full((2, 8, HEADS, VALUE_DIM), value)
    cache = jit_update(cache, *old, after([0, 0], [8, 0], 8))
    cache = paged.rewind(cache, jnp.array([0, 0]))
    k, v = tokens(rng, 1, rows=2)
    cache = jit_update(cache, k, v, np.array([[-1], [3]]))
    check(cache, [{}, {3: (k[1, 0], v[1, 0])}])


@pytest.mark.slow
def test_int8_pages_match_contiguous_cache(rng):
    cache = init(dtype=jnp.int8)
    whole = kv.init(ROWS, CAPACITY, HEADS, KEY_DIM, VALUE_DIM, jnp.int8)
    lengths = np.zeros(ROWS, int)
    for counts in ([6, 1, 0], [5, 6, 3], [1, 1, 1]):
        k, v = tokens(rng, 6)
        positions = after(lengths, counts)
        cache = paged.update(cache, k, v, positions)
        seen = paged.gather_pages(cache)
        whole = kv.update(whole, k, v, positions)
        lengths = lengths + counts
        forked = paged.gather_pages(paged.share(cache, jnp.array([2, 0, 1])))
        there = np.asarray(whole.positions) >= 0
        assert there.sum() == lengths.sum()
        for name in ("k", "v", "k_scale", "v_scale"):
            contiguous, mine, other = (np.asarray(getattr(x, name)) for x in (whole, seen, forked))
            np.testing.assert_array_equal(mine[there], contiguous[there])
            np.testing.assert_array_equal(other[[1, 2, 0]][there], contiguous[there])


# Exhausted pools


def test_concrete_row_without_free_page_is_rejected(rng):
    k, v = tokens(rng, 6)
    cache = paged.update(init(num_pages=4), k, v, after([0, 0, 0], [6, 4, 0]))
    message = "row 1 has no page for position 9: 1 of 4 pages of 4 tokens were free"
    with pytest.raises(ValueError, match=message):
        paged.update(cache, k, v, after([6, 4, 0], [0, 6, 0]))
    with pytest.raises(ValueError, match="position 28 of row 0 is beyond the capacity 28"):
        paged.update(cache, k, v, after([28, 0, 0], [1, 0, 0]))


@pytest.mark.slow
def test_traced_row_without_free_page_is_unchanged_until_rewound(rng):
    cache, oracle, (k, v) = init(num_pages=4), [{}, {}, {}], tokens(rng, 6)
    positions = after([0, 0, 0], [6, 4, 0])
    cache = jit_update(cache, k, v, positions)
    write(oracle, k, v, positions)
    positions = after([6, 4, 0], [2, 6, 0])  # one page is free; the second row needs two
    cache = jit_update(cache, k, v, positions)
    write(oracle[:1], k, v, positions)
    check(cache, oracle)
    assert cache.exhausted.tolist() == [False, True, False] and cache.free_pages == 1
    cache = jit_update(cache, k, v, after([8, 4, 0], [0, 1, 0]))
    check(cache, oracle)
    assert cache.exhausted.tolist() == [False, True, False]
    assert paged.share(cache, jnp.array([1, 0, 2])).exhausted.tolist() == [True, False, False]
    assert paged.rewind(cache, cache.length).exhausted.tolist() == [False, True, False]
    assert not paged.rewind(cache, jnp.array([8, 0, 0])).exhausted.any()
    cache = paged.rewind(cache, jnp.array([0, 3, 0]))
    positions = after([0, 3, 0], [0, 6, 0])
    cache = jit_update(cache, k, v, positions)
    oracle[0] = {}
    write(oracle, k, v, positions)
    check(cache, oracle)
    assert not cache.exhausted.any()


@pytest.mark.slow
def test_traced_position_past_capacity_marks_row_as_exhausted(rng):
    k, v = tokens(rng, 1)
    cache = jit_update(init(), k, v, np.array([[0], [CAPACITY], [-1]]))
    assert cache.exhausted.tolist() == [False, True, False]
    check(cache, [{0: (k[0, 0], v[0, 0])}, {}, {}])


def test_page_count_needed_matches_allocation_with_shared_rows(rng):
    """None is refused if that many pages are free, even if the shared part ends with a page."""
    k, v = tokens(rng, 30)
    for held, new in itertools.product((3, 4, 5, 7, 8), (1, 4, 5)):
        end = held + new
        # each row writes past the shared part; it copies the last shared page unless it is full
        needed = 2 * (-(-end // SIZE) - held // SIZE)
        other = (9 - -(-held // SIZE) - needed) * SIZE  # a third row leaves exactly `needed` pages
        lengths = np.array([held, held, other])
        cache = jit_share(fill(k, v, held, 0, other), np.array([0, 0, 2]), lengths)
        assert int(count_free(cache)) == needed, (held, new)
        assert int(jit_count_needed(cache, np.array([end, end, other]))) == needed, (held, new)
        more = after([held, held, other], [new, new, 0])
        cache = jit_update(cache, k[:, :6], v[:, :6], more)
        assert cache.length.tolist() == [end, end, other] and not any(cache.exhausted.tolist())
        assert int(count_free(cache)) == (held % SIZE > 0), "what was shared is free"


def test_page_count_needed_is_correct_without_free_pages(rng):
    cache = fill(*tokens(rng, 30), SIZE, SIZE, CAPACITY)
    assert int(count_free(cache)) == 0
    for more, needed in (([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([5, 4, 0], 3)):
        assert int(jit_count_needed(cache, np.array([4, 4, CAPACITY]) + more)) == needed


def test_exhausted_row_continues_after_rewind_to_zero(rng):
    k, v = tokens(rng, 30)
    cache = fill(k, v, 8, 0, CAPACITY)  # no free page
    cache = jit_update(cache, k[:, :6], v[:, :6], after([8, 0, CAPACITY], [0, 4, 0]))
    assert cache.exhausted.tolist() == [False, True, False]
    assert cache.length.tolist() == [8, 0, CAPACITY]
    cache = jit_rewind(cache, np.array([0, 0, 5]))
    cache = jit_update(cache, k[:, :6], v[:, :6], after([0, 0, 5], [0, 4, 0]))
    assert not any(cache.exhausted.tolist())
    check(cache, [{p: (k[b, p], v[b, p]) for p in range(n)} for b, n in enumerate((0, 4, 5))])


def test_invalid_arguments_are_rejected(rng):
    for change, message in (
        (dict(num_pages=0), "num_pages is 0"),
        (dict(page_size=0), "page_size is 0"),
        (dict(page_size=5), "capacity is 28: must be a multiple of page_size, 5"),
        (dict(dtype="int32"), "dtype is 'int32'"),
    ):
        arguments = dict(num_pages=9, page_size=4) | change
        with pytest.raises(ValueError, match=message):
            paged.init(ROWS, CAPACITY, HEADS, KEY_DIM, VALUE_DIM, **arguments)
    k, v = tokens(rng, 2)
    with pytest.raises(ValueError, match="v has shape"):
        paged.update(empty(), k, v[..., 1:], after([0] * 3, [2] * 3, 2))
    wrong = jax.device_put(np.array([0, 3]))
    with pytest.raises(ValueError, match=r"rows are \[0, 3\]: must be from 0 to 2"):
        paged.share(empty(), wrong)
    for rows in (np.zeros(2), np.zeros((2, 1), int)):
        with pytest.raises(ValueError, match=r"rows are .*: must be integers \[R\]"):
            paged.share(empty(), rows)
    with pytest.raises(ValueError, match=r"length is int32\[2\]: must be integers \[3\]"):
        jax.eval_shape(paged.rewind, empty(), wrong)


# Attention and models


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_paged_attention_matches_float64(rng, implementation):
    cache, (k, v), lengths = init(rows=2), tokens(rng, 13, rows=2), [13, 6]
    for start in (0, 5, 10):
        positions = after([start] * 2, np.clip(np.array(lengths) - start, 0, 5), 5)[:, : 13 - start]
        part = slice(start, start + 5)
        cache = paged.update(cache, k[:, part], v[:, part], positions)
    seen = paged.gather_pages(cache)
    query = rng.standard_normal((2, 1, 4, KEY_DIM)).astype(np.float32)
    out = dot_product_attention(
        query, *kv.read(seen), mask=Causal(), q_positions=jnp.array(lengths)[:, None] - 1,
        k_positions=seen.positions, implementation=implementation,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        wide = [x[b, :n].astype(np.float64).repeat(2, axis=1) for x in (k, v)]
        s = np.einsum("nh,snh->ns", query[b, 0].astype(np.float64), wide[0]) / np.sqrt(KEY_DIM)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        assert_near(out[b, 0], np.einsum("ns,snh->nh", p, wide[1]), 1e-6)


SMALL = ModelConfig(
    vocab_size=31, d_model=26, num_layers=2, num_heads=2, head_dim=6, num_kv_heads=1, d_ff=19,
    max_len=37, tie_embeddings=False, positions="rope",
)  # fmt: skip


@functools.cache
def model_of(**changes):
    config = dataclasses.replace(SMALL, **changes)
    model, params = build(config), init_params(config, jax.random.key(0))
    return config, model, {"params": params}, jax.jit(model.apply)


def read(apply, variables, cache, tokens, part=7):
    found = []
    for start in range(0, tokens.shape[1], part):
        logits, cache = apply(variables, tokens[:, start : start + part], cache=cache)
        found.append(logits)
    return jnp.concatenate(found, axis=1), cache


@pytest.mark.slow
@pytest.mark.long_except("")
@pytest.mark.parametrize(
    "changes",
    [{}, dict(window=(None, 5), sink_tokens=2), dict(window=5), dict(positions="alibi")],
    ids=["", "pattern and sinks", "window", "alibi"],
)
def test_paged_decode_matches_full_forward(rng, changes):
    config, _, variables, apply = model_of(**changes)
    text = jnp.asarray(rng.integers(0, 31, (2, 33)))
    full, _ = apply(variables, text)
    cache = init_paged_cache(config, 2, 36, num_pages=20, page_size=4)
    logits, cache = read(apply, variables, cache, text)
    assert_near(logits, full, CACHED)
    back = rewind_cache(cache, jnp.array([22, 22]))
    again, _ = read(apply, variables, back, text[:, 22:])
    assert_near(again, full[:, 22:], CACHED)


@pytest.mark.slow
def test_decoding_continues_from_shared_prefix(rng):
    config, _, variables, apply = model_of()
    prefix = jnp.asarray(rng.integers(0, 31, (1, 10)))
    more = jnp.asarray(rng.integers(0, 31, (3, 9)))
    cache = init_paged_cache(config, 1, 20, num_pages=12, page_size=4)
    _, cache = apply(variables, prefix, cache=cache)
    cache = share_cache(cache, jnp.zeros(3, jnp.int32))
    logits, cache = read(apply, variables, cache, more, 4)
    full, _ = apply(variables, jnp.concatenate([prefix.repeat(3, axis=0), more], axis=1))
    assert_near(logits, full[:, 10:], CACHED)
    assert cache.layers[0].free_pages == 12 - 2 - 3 * 3  # without sharing, rows use 15


@pytest.mark.slow
def test_only_rows_without_free_pages_have_nan_logits(rng):
    config, _, variables, apply = model_of()
    text = jnp.asarray(rng.integers(0, 31, (2, 9)))
    positions = jnp.where(jnp.array([[True], [False]]), jnp.arange(9)[None], -1)
    cache = init_paged_cache(config, 2, 20, num_pages=4, page_size=4)
    _, cache = apply(variables, text, positions=positions, cache=cache)
    assert not cache.exhausted.any()
    logits, cache = apply(variables, text[:, :5], cache=cache)
    full, _ = apply(variables, jnp.concatenate([text, text[:, :5]], axis=1))
    assert cache.exhausted.tolist() == [False, True]
    assert np.isnan(logits[1]).all()
    assert_near(logits[0], full[0, 9:], CACHED)


@pytest.mark.long
def test_paged_generation_matches_contiguous_cache(rng):
    config, model, variables, _ = model_of()
    step, params = make_step(model), variables["params"]
    prompt = jnp.asarray(rng.integers(0, 31, (2, 7)))
    lengths = jnp.array([7, 4])
    pages = init_paged_cache(config, 2, 24, num_pages=10, page_size=4)
    found = generate(step, params, prompt, pages, num_tokens=11, lengths=lengths)
    plain = generate(
        step, params, prompt, init_cache(config, 2, 24), num_tokens=11, lengths=lengths
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    few = init_paged_cache(config, 2, 24, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match="rows need 9 more pages, but only 8 of 8 are free"):
        generate(step, params, prompt, few, num_tokens=11, lengths=lengths)


WIDE = dict(d_model=32, num_heads=4, head_dim=16, num_kv_heads=2, max_len=1100)


@pytest.mark.slow
@pytest.mark.long_except("int8")
@pytest.mark.parametrize("dtype", [None, jnp.int8], ids=["", "int8"])
def test_decode_kernel_reads_model_pages_in_place(rng, dtype):
    """Two tokens of two rows that share a prefix, in the TPU interpreter."""
    config, _, variables, apply = model_of(**WIDE, num_layers=1)
    model = build(dataclasses.replace(config, implementation="pallas"))
    prefix = jnp.asarray(rng.integers(0, 31, (1, 150)))
    more = jnp.asarray(rng.integers(0, 31, (2, 2)))
    pages = init_paged_cache(config, 1, 384, dtype=dtype, num_pages=7, page_size=128)
    _, pages = apply(variables, prefix, cache=pages)
    pages = share_cache(pages, jnp.zeros(2, jnp.int32))
    with using(Target("tpu", interpret=True)):
        text = str(jax.make_jaxpr(model.apply)(variables, more, cache=pages))
        logits, written = jax.jit(model.apply)(variables, more, cache=pages)
    rows = init_cache(config, 2, 384, dtype)
    _, rows = apply(variables, prefix.repeat(2, axis=0), cache=rows)
    expected, _ = apply(variables, more, cache=rows)
    assert "attention_decode" in text and "[2,384,2,16]" not in text
    assert np.abs(expected).max() > 0.1 and np.abs(logits[0] - logits[1]).max() > 1e-3
    assert_near(logits, expected, CACHED)
    assert written.layers[0].free_pages == 7 - 3  # one is shared


@pytest.mark.slow
def test_default_pages_are_read_in_place_on_hopper_and_tpu():
    config = preset("tiny", positions="rope")
    pages = init_paged_cache(config, 1, 256, num_pages=2).layers[0]
    query = jax.ShapeDtypeStruct((1, 1, config.num_heads, 64), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((*pages.k.shape[:3], 64), jnp.bfloat16)
    for backend in ("hopper", "tpu"):
        with using(Target(backend)):
            found = explain_attention(query, pool, pool, block_table=pages.block_table)
        assert "pallas" in found.reads_pages, backend


@pytest.mark.slow
def test_pages_with_other_dtype_are_gathered_without_casting_pool(rng):
    config, _, variables, _ = model_of(**WIDE, num_layers=1)
    model = build(dataclasses.replace(config, implementation="pallas"))
    pages = init_paged_cache(config, 2, 384, dtype="bfloat16", num_pages=7, page_size=128)
    token = jnp.asarray(rng.integers(0, 31, (2, 1)))
    with using(Target("tpu", interpret=True)):
        text = str(jax.make_jaxpr(model.apply)(variables, token, cache=pages))
    assert "bf16[7,128,2,16]" in text and "f32[7,128,2,16]" not in text
    assert "f32[2,384,2,16]" in text


@pytest.mark.long
def test_paged_generation_with_decode_kernel_matches_contiguous_cache(rng):
    with using(Target("tpu", interpret=True)):
        config, model, variables, _ = model_of(**WIDE, implementation="pallas", window=(None, 90))
    step, params = make_step(model), variables["params"]
    prompt, lengths = jnp.asarray(rng.integers(0, 31, (2, 131))), jnp.array([131, 64])
    with using(Target("tpu", interpret=True)):
        found = [
            generate(step, params, prompt, cache, num_tokens=7, lengths=lengths)
            for cache in (
                init_paged_cache(config, 2, 256, num_pages=4, page_size=128),
                init_cache(config, 2, 256),
            )
        ]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)


@pytest.mark.long
def test_paged_weights_are_indexed_by_position(rng):
    config, model, variables, apply = model_of()
    step, text = make_step(model), jnp.asarray(rng.integers(0, 31, (2, 6)))
    pages = init_paged_cache(config, 2, 12, num_pages=6, page_size=4)
    found = []
    for cache in (pages, init_cache(config, 2, 12)):
        _, cache = apply(variables, text[:, :5], cache=cache)
        captured = "block_0/attention/key_positions", "block_1/attention/weights"
        found.append(step.look(variables["params"], text[:, 5:], cache, captured)[2])
    np.testing.assert_array_equal(found[0][captured[0]], found[1][captured[0]])
    assert_near(found[0][captured[1]], found[1][captured[1]], CACHED)


@pytest.mark.long
def test_forked_prefix_can_be_reused_by_many_calls():
    config, model, variables, apply = model_of()
    text = jax.random.randint(jax.random.key(1), (2, 7), 0, config.vocab_size)
    step, cache = make_step(model), init_paged_cache(config, 1, 24, num_pages=12, page_size=4)
    _, cache = apply(variables, text[:1, :6], cache=cache)
    found = [
        generate(
            step,
            variables["params"],
            text[:, 6:7],
            fork(share_cache(cache, jnp.array([0, 0])), 1),
            num_tokens=4,
        ).tokens
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*found)
    assert cache.length.tolist() == [6]  # it was not consumed


@pytest.mark.slow
def test_explicit_mesh_axes_are_rejected(rng):
    k, v = tokens(rng, 1)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        with pytest.raises(ValueError, match="supports no mesh with explicit axes"):
            paged.update(jax.device_put(init(), placed), k, v, np.zeros((ROWS, 1), np.int32))


@pytest.mark.slow
def test_row_reordering_functions_reject_paged_caches():
    config, *_ = model_of()
    cache = init_paged_cache(config, 2, 12, num_pages=2, page_size=4)  # as many pages as rows
    for move in (
        lambda: fork(cache, 2),
        lambda: gather_rows(cache, jnp.array([1, 0])),
        lambda: select_rows(jnp.array([True, False]), cache, cache),
    ):
        with pytest.raises(ValueError, match=r"does not support a PagedCache.*share_cache"):
            move()
    mixed = ModelCache((cache.layers[0], init_cache(config, 2, 12).layers[1]))
    with pytest.raises(
        ValueError, match=r"cache.layers\[1\] is of type KVCache, but other layers are not"
    ):
        check_cache(config, mixed, jnp.zeros((2, 1), jnp.int32), False)
    with pytest.raises(ValueError, match="StreamingEncoder does not support a PagedCache"):
        frames = jnp.zeros((2, 1, 3))
        windowed = dataclasses.replace(config, window=5)
        StreamingEncoder(windowed, 3).init(jax.random.key(0), frames, cache=cache)
    with pytest.raises(ValueError, match="no pages that rows can share"):
        share_cache(init_cache(config, 2, 12), jnp.array([0, 0]))
    with pytest.raises(ValueError, match="scan_layers is True"):
        init_paged_cache(dataclasses.replace(config, scan_layers=True), 2, 12, num_pages=2)
