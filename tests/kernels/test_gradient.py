"""What is around the kernels: masks as vectors, lists of tiles, padding, gradients, `vmap`, meshes.

The whole suite of attention runs here on a backend in dense arrays, so that what fails here is not
a kernel's fault; the kernels themselves are in test_kernels_tpu.py and test_kernels_hopper.py.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.register_assert_rewrite("attention_suite", "tolerances")

import plain_kernels  # noqa: E402
from attention_suite import AttentionSuite, draw  # noqa: E402
from devices import on_devices  # noqa: E402
from plain_kernels import Plain, visited  # noqa: E402
from tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits  # noqa: E402

from transformer_jax.attention import dot_product_attention, explain_attention  # noqa: E402
from transformer_jax.kernels import Target, target, using  # noqa: E402
from transformer_jax.kernels.blocks import blocks  # noqa: E402
from transformer_jax.kernels.contract import Blocks  # noqa: E402
from transformer_jax.mask_vectors import MaskVectors, not_vectors  # noqa: E402
from transformer_jax.masks import (  # noqa: E402
    Causal,
    Dense,
    Everything,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.pallas import _lists, _tiles  # noqa: E402
from transformer_jax.positions import ALiBi, RelativeBias  # noqa: E402


class TestPlain(AttentionSuite):
    implementation = "pallas"
    target = Plain()
    may_refuse = True
    queries, span = 39, 71
    every_time = frozenset(
        {
            "test_any_length_matches_the_oracle[1x257]",
            "test_masks_go_by_position_in_rings_and_ragged_rows",
            "test_blind_rows_are_zero_and_touch_no_other_row",
            "test_empty_axes_give_empty_or_zero_results",
            "test_masked_keys_and_values_have_no_influence[padding-nan]",
            "test_masked_keys_and_values_have_no_influence[future-3.4e+38]",
            "test_an_infinity_that_is_seen_makes_its_rows_nan",
            "test_a_row_broken_by_its_bias_passes_no_gradient_on",
            "test_poisoned_query_that_sees_nothing_has_no_influence",
            "test_a_poisoned_key_head_breaks_the_query_heads_of_its_group",
            "test_vmap_over_any_argument_is_a_loop",
            "test_vmap_over_a_matrix_is_a_loop",
            "test_every_mask_matches_the_oracle[dense]",
            "test_every_mask_matches_the_oracle[composition]",
            "test_scan_over_calls_is_a_loop",
            "test_rematerialised_gradients_are_the_same_with_dropout_on",
        }
    )


# Masks as vectors


def masks_of_vectors(rng: np.random.Generator) -> dict:
    valid, lengths = jnp.asarray(rng.random((2, 19)) < 0.7), jnp.array([0, 6])
    q_ids, k_ids = (jnp.asarray(rng.integers(0, 3, (2, n))) for n in (13, 19))
    short = jnp.asarray(rng.integers(0, 2, (2, 5)))
    matrix, other = (Dense(jnp.asarray(rng.random(n) < 0.6)) for n in ((13, 19), (2, 1, 29, 31)))
    return {
        "everything": Everything(),
        "causal": Causal(),
        "past": Window(4),
        "future": Window(None, 3),
        "both sides": Window(3, 2),
        "nothing": Window(0, 0),
        "padding": Padding(valid),
        "prefix": Prefix(lengths),
        "segments": Segments(q_ids, k_ids),
        "segments of a short table": Segments(short),
        "predicate": Predicate(lambda q, k: (q ^ k) & 3 == 1),
        "not everything": ~Everything(),
        "matrix": matrix,
        "matrices": Causal() & ~matrix | Padding(valid) & other,
        "eight matrices": functools.reduce(operator.or_, [*[matrix & other] * 3, matrix, ~other]),
        "prefix language model": Causal() | Prefix(lengths),
        "all at once": (~Causal() & Window(None, 7)) | (Padding(valid) & ~Segments(q_ids, k_ids)),
    }


@pytest.mark.parametrize("name", masks_of_vectors(np.random.default_rng(0)))
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_vectors_say_what_the_mask_says(name, ragged, rng):
    mask = masks_of_vectors(rng)[name]
    q, k = jnp.arange(13)[None], jnp.arange(19)[None]
    if ragged:
        q, k = q + jnp.array([[2], [9]]), jnp.where(jnp.arange(19) % 5 == 4, -1, k + 3)
    vectors = MaskVectors.of(mask, q, k, not ragged)
    pairs = () if vectors.pairs() is None else (vectors.pairs().astype(jnp.int32),)
    sees = vectors.visible(
        tuple(x[:, None, :, None] for x in vectors.q),
        (*(x[:, None, None, :] for x in vectors.k), *pairs),
    )
    expected = mask.materialize(q, k)
    full = (2, 1, 13, 19)
    assert_same_bits(
        np.broadcast_to(sees, full).astype(int), np.broadcast_to(expected, full).astype(int)
    )


def test_equal_masks_compare_equal_as_vectors():
    """What a compilation is kept for: structure, not values."""

    def visible(n, ids):
        mask = Causal() & Window(n) & Segments(jnp.asarray(ids)[None])
        return MaskVectors.of(mask, jnp.arange(3)[None], jnp.arange(3)[None], True).visible

    first, again, other = visible(4, [0, 1, 1]), visible(4, [2, 2, 2]), visible(5, [0, 1, 1])
    assert first == again and hash(first) == hash(again)
    assert first != other


def test_what_no_kernel_evaluates_is_said():
    table = jnp.ones((4, 4), bool)
    eight = functools.reduce(operator.or_, [~Dense(table)] * 8)
    assert not_vectors(Causal() & eight) is None
    assert not_vectors(~eight & Dense(table)) == "takes at most 8 Dense masks, not 9"
    assert "other arrays" in str(not_vectors(Predicate(lambda q, k: table[q, k])))
    assert "returns bool" in str(not_vectors(Predicate(lambda q, k: q - k)))
    assert "32 bits" in str(not_vectors(Causal() & Segments(np.zeros((1, 4), np.int64))))
    assert not_vectors(Causal() | ~Window(3) | Segments(np.zeros((1, 4), np.int32))) is None


# Lists of tiles


def twelve_documents(length: int) -> np.ndarray:
    rng = np.random.default_rng(12)
    cuts = np.sort(rng.choice(np.arange(1, length), 11, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)


PATTERNS = {
    "causal": (Causal(), lambda q, k: k <= q),
    "window": (Causal() & Window(300), lambda q, k: (k <= q) & (q - k < 300)),
    "documents": (
        Causal() & Segments(twelve_documents(4096)[None]),
        lambda q, k: (k <= q) & (twelve_documents(4096)[q] == twelve_documents(4096)[k]),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sides", [(128, 128), (64, 256)], ids=str)
def test_lists_name_every_tile_that_sees_something_and_no_other(name, sides):
    """Of twelve packed documents, a window and a triangle: exactly the tiles of an exact count."""
    mask, sees = PATTERNS[name]
    at, blocks = jnp.arange(4096)[None], Blocks(*sides)
    grid = 4096 // sides[0], 4096 // sides[1]
    lists = _lists(_tiles(mask, at, at, blocks, grid))
    index = np.arange(4096)
    exact = sees(index[:, None], index[None, :]).reshape(grid[0], sides[0], grid[1], sides[1])
    some, every = exact.any(axis=(1, 3)), exact.all(axis=(1, 3))
    seen, full = (np.asarray(x)[0, 0] for x in visited(lists, (1, 1), True))
    assert (seen >= some).all() and (full <= every).all(), "a pair is lost"
    assert (seen == some).all(), "a tile is visited that sees nothing"
    assert (full == every).all(), "a tile is masked that needs no mask"
    assert int(lists.seen.sum()) == some.sum() and 0 < some.sum() < grid[0] * grid[1]


def test_behind_the_last_tile_a_list_repeats_it():
    classes = jnp.array([[[[2, 0, 1, 2], [0, 0, 0, 0], [1, 0, 0, 0]]]], jnp.int8)
    lists = _lists(classes)
    assert lists.order[0, 0].tolist() == [[0, 3, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert lists.full[0, 0].tolist() == [2, 0, 0] and lists.seen[0, 0].tolist() == [3, 0, 1]


def test_short_sequences_take_shorter_tiles_and_keep_the_rest():
    tiles = Blocks(512, 1024, 3, slack=8.0)
    where = Target("tpu", blocks=(("forward", tiles),))
    assert blocks(where, "forward", 64, 64, 2, 2000, 2000) == tiles
    assert blocks(where, "forward", 64, 64, 2, 200, 1000) == replace(tiles, q=256)


# Choosing and refusing


def test_without_an_accelerator_the_kernels_say_what_they_need():
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    assert explain_attention(*inputs)["pallas"] == str(target())
    with pytest.raises(NotImplementedError, match="pallas: needs a TPU or an NVIDIA Hopper GPU"):
        dot_product_attention(*inputs, implementation="pallas")


def test_a_target_holds_inside_its_context_only():
    with using(Target("tpu", True)):
        assert target() == Target("tpu", True)
    assert isinstance(target(), str)


PARITY = jnp.arange(17) % 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(mask=Predicate(lambda q, k: PARITY[k] <= q)), "reads other arrays"),
        (dict(scale=jnp.float32(0.5)), "scale that is an array"),
        (
            dict(bias=RelativeBias(jnp.ones((8, 4)), max_distance=16, bidirectional=True)),
            "Relative",
        ),
    ],
    ids=["predicate", "scale", "bias"],
)
def test_what_no_kernel_takes_is_refused_by_name(options, reason):
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    with using(Plain()):
        assert reason in str(explain_attention(*inputs, **options)["pallas"])
        with pytest.raises(NotImplementedError, match=reason):
            dot_product_attention(*inputs, implementation="pallas", **options)
        assert explain_attention(*inputs, bias=ALiBi(jnp.ones(4)))["pallas"] is None


# vmap


@pytest.mark.parametrize(("batch", "rows"), [(2, 1), (2, 2), (1, 1)])
def test_a_bias_that_is_not_mapped_has_a_gradient_for_each_mapped_call(batch, rows):
    """Where the bias is one for all batch rows, and where each has its own."""
    arrays = draw(2, batch=batch)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(rows, 4, 1, 17)), jnp.float32)
    queries = jnp.stack([arrays["query"], 2 * arrays["query"], -arrays["query"]])

    def slope(query, bias):
        def loss(bias):
            inputs = query, arrays["key"], arrays["value"]
            out = dot_product_attention(*inputs, bias=bias, implementation="pallas")
            return (out * arrays["out_cotangent"]).sum()

        return jax.grad(loss)(bias)

    with using(Plain()):
        mapped = jax.vmap(slope, (0, None))(queries, bias)
        expected = jnp.stack([slope(query, bias) for query in queries])
    assert mapped.shape == (3, *bias.shape)
    assert_near(mapped, expected, GRADIENT_F32)


def test_calls_of_one_row_share_a_matrix_that_is_not_mapped():
    arrays, matrix = draw(4, batch=1), jnp.asarray(np.random.default_rng(4).random((13, 17)) < 0.6)
    queries = jnp.stack([arrays["query"] * s for s in (1.0, 0.5, 2.0, -1.0, 3.0)])

    def attend(query):
        inputs = query, arrays["key"], arrays["value"]
        mask = Dense(matrix) | Causal()
        return dot_product_attention(*inputs, mask=mask, implementation="pallas")

    with using(Plain()):
        text = str(jax.make_jaxpr(jax.vmap(attend))(queries))
        found, expected = jax.vmap(attend)(queries), [attend(query) for query in queries]
    assert "i8[1,1,32,32]" in text and "i8[5" not in text
    assert_near(found, np.stack(expected), FORWARD_F32)


# A device mesh


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["two parts of a key head"], id="one case"),
        pytest.param([], marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_mesh_computes_the_same_and_gathers_nothing(cases):
    results = on_devices(8, "tests/kernels_on_eight.py", *cases, optimise=False)
    assert len(results) >= (len(cases) or 3)
    for case, result in results.items():
        assert result["error"] < 2 * GRADIENT_F32, (case, result)
        if case.startswith("three"):  # the only split that has to move something
            continue
        assert result["moves"] == [], (case, result)
        assert result["query"] == ["data", None, "model"], (case, result)


@pytest.mark.parametrize(
    ("where", "checked"), [(Plain(), True), (Target("tpu", True), False)], ids=["plain", "tpu"]
)
def test_a_device_of_a_users_own_shard_map_runs_its_part(where, checked):
    """Also gradients of what is the same on all devices, which are summed over them. The
    interpreter of Pallas does not tell what varies over a mesh."""
    arrays = draw(1, batch=2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def attend(query, key, value, sinks):
        with using(where):
            settings = dict(mask=Causal(), sinks=sinks, implementation="pallas")
            return dot_product_attention(query, key, value, **settings)

    inputs = arrays["query"], arrays["key"], arrays["value"], jnp.linspace(-1, 1, 4)
    in_specs = (spec,) * 3 + (jax.sharding.PartitionSpec(),)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=checked)

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3)))(*inputs)

    for x, y in zip(gradients(mapped), gradients(attend), strict=True):
        assert_near(x, y, GRADIENT_F32)


def test_lists_that_do_not_fit_are_refused_beforehand():
    shape = jax.ShapeDtypeStruct((1, 2**18, 1, 64), jnp.float32)
    with using(Target("tpu")):
        assert "lists of 1 x 512 x 512 tiles" in str(
            explain_attention(shape, shape, shape)["pallas"]
        )
        half = jax.ShapeDtypeStruct((1, 2**17, 1, 64), jnp.float32)
        assert explain_attention(half, half, half)["pallas"] is None
        heads = jax.ShapeDtypeStruct((1, 2**15, 64, 64), jnp.float32)
        mask = Dense(jax.ShapeDtypeStruct((1, 64, 2**15, 2**15), jnp.bool_))
        reason = explain_attention(heads, heads, heads, mask=mask)["pallas"]
        assert "lists of 64 x 64 x 64 tiles" in str(reason)


def test_a_target_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="backend is 'gpu': must be 'tpu' or 'hopper'"):
        _ = Target("gpu").module


def test_slopes_have_a_gradient_only_where_somebody_asks(monkeypatch):
    """In a kernel it costs a sum over every tile."""
    arrays, asked = draw(0, queries=16, keys=16), []

    def spied(problem, *rest, original=plain_kernels.gradient_queries):
        asked.append(not problem.fixed_slopes)
        return original(problem, *rest)

    monkeypatch.setattr(plain_kernels, "gradient_queries", spied)

    def loss(query, slopes):
        with using(Plain()):
            out = dot_product_attention(
                query, arrays["key"], arrays["value"], bias=ALiBi(slopes), implementation="pallas"
            )
        return out.sum()

    def scanned(query, slopes):
        def step(query, _):
            return query * loss(query, slopes), None

        return jax.lax.scan(step, query, length=2)[0].sum()

    query, slopes = arrays["query"], jnp.ones(4)
    wrappers = (loss, jax.jit(loss), jax.checkpoint(loss), scanned)
    for wrapped in wrappers:
        jax.eval_shape(jax.grad(wrapped), query, slopes)
    assert set(asked) == {False} and len(asked) >= len(wrappers)
    asked.clear()
    for wrapped in wrappers:
        jax.eval_shape(jax.grad(wrapped, (0, 1)), query, slopes)
    assert set(asked) == {True} and len(asked) >= len(wrappers)


@pytest.mark.parametrize("backend", ["hopper", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_of_a_bias_nothing_is_made_but_its_gradient(backend, dtype):
    """In the caller's program: no copy in the same dtype, no other values for rows that broke.

    Hopper turns it for the kernel that walks over queries; what starts at zero is added to."""
    T = 1024
    queries = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 2, T, T), dtype)

    def gradients(query, bias, cotangent):
        def attend(query, bias):
            return dot_product_attention(
                query, query, query, mask=Causal(), bias=bias, implementation="pallas"
            )

        return jax.vjp(attend, query, bias)[1](cotangent)

    found = set()

    def read(jaxpr):
        for step in jaxpr.eqns:
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(step.params)]
            inner = [x for x in inner if hasattr(x, "eqns")]
            for x in inner:
                read(x)
            for v in step.outvars:
                if not inner and getattr(v.aval, "size", 0) == 2 * T * T:
                    found.add((step.primitive.name, str(v.aval.dtype)))

    with using(Target(backend)):
        read(jax.make_jaxpr(gradients)(queries, bias, queries).jaxpr)
    rounded = {("convert_element_type", dtype)} - {("convert_element_type", "float32")}
    if dtype == "float16":  # of neither the inputs nor the scores: no kernel reads it
        rounded, dtype = rounded | {("convert_element_type", "float32")}, "float32"
    there = {
        "hopper": {("transpose", dtype), ("reduce_sum", "float32")},  # over no axis
        "tpu": {("broadcast_in_dim", "float32")},
    }
    assert found == there[backend] | rounded


def test_tiles_of_a_mask_without_arrays_are_sorted_before_the_program():
    """Or the compiler does, for up to half a minute: lists by query and by key."""
    shape = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.float32)
    ids = jnp.arange(512, dtype=jnp.int32)[None] // 100

    def sorts(mask):
        def loss(*inputs):
            return dot_product_attention(*inputs, mask=mask, implementation="pallas").sum()

        with using(Target("tpu")):
            program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(shape, shape, shape))
        assert "pallas_call[" in program
        return program.count(" sort[")

    assert sorts(Causal() & Window(100)) == 0 < sorts(Segments(ids))
