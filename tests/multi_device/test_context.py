"""Attention and models with lengths that are split over a mesh (context parallelism)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tests.support.attention_suite import draw, reference
from tests.support.devices import on_devices
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax import (
    Causal,
    Window,
    dot_product_attention,
    explain_attention,
    init_cache,
)
from transformer_jax.attention import zigzag_positions
from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.attention.arguments import Rows, check_call
from transformer_jax.attention.biases import ALiBi
from transformer_jax.attention.ring import (
    SplitLengths,
    _merge,
    _merged,
    _Ring,
    _with_sinks,
    split_lengths,
)
from transformer_jax.cache.split_slots import join_split, write_split
from transformer_jax.config import GatedDelta, LoraConfig, MeshConfig, ModelConfig, TrainConfig
from transformer_jax.config.tasks import MaskedTask
from transformer_jax.training.batch import Batch, along_context, identity
from transformer_jax.training.compiled import needs_balance

LAYOUTS = "plain", "packed", "prefix", "both"
SPLIT_CACHE = "-m", "tests.multi_device.split_cache_on_eight"
SCRIPT = "-m", "tests.multi_device.context_on_eight"


@pytest.mark.parametrize("P", [1, 2, 5])
def test_each_device_receives_exactly_the_blocks_it_needs(P):
    """Blocks travel one after the other, and gradients return to the device that has the keys."""
    rng = np.random.default_rng(P)
    for share in (0.0, 0.2, 0.6, 1.0):
        needed = rng.random((P, P)) < share
        table = tuple(map(tuple, needed.tolist()))
        here = list(range(P))  # the block that each device has, or None
        computed, home, sent = np.zeros((P, P), int), {}, 0
        for step in SplitLengths(("context",), P, True, True, table).steps:
            for device, block in enumerate(here):
                if step.needed[device]:
                    computed[device, block] += 1
            home |= {device: here[one] for one, device in step.home}
            here = [
                next((here[one] for one, to in step.onward if to == device), None)
                for device in range(P)
            ]
            sent += len(step.onward)
        assert (computed == needed).all()
        assert all(device == block for device, block in home.items())
        away = {j for j in range(P) for i in range(P) if needed[i, j] and i != j}
        assert set(home) == away
        assert sent <= P * (P - 1) and (sent > 0) == bool(away)


def test_window_sends_each_block_to_one_neighbor():
    P = 7
    table = tuple(tuple(i - 1 <= j <= i for j in range(P)) for i in range(P))
    first, second = SplitLengths(("context",), P, True, True, table).steps
    assert first.onward == tuple((i, i + 1) for i in range(P - 1))
    assert second.needed == (False, *(True,) * (P - 1)) and second.onward == ()
    assert second.home == tuple((i + 1, i) for i in range(P - 1))


@pytest.mark.parametrize("P", [1, 3, 8])
def test_zigzag_gives_each_device_the_same_number_of_causal_pairs(P):
    T = 2 * P * 5
    at = zigzag_positions(T, P)
    assert sorted(at) == list(range(T))
    pairs = (at + 1).reshape(P, -1).sum(axis=1)
    assert len({*pairs.tolist()}) == 1
    with pytest.raises(ValueError, match=f"length is {T + 1}: must be a multiple of {2 * P}"):
        zigzag_positions(T + 1, P)


def test_prepared_rows_are_in_zigzag_order_along_context():
    """Segments belong to positions, so they stay in the order of the row."""
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Explicit,))
    rows = np.arange(5 * 12, dtype=np.int32).reshape(5, 12)
    at, place = zigzag_positions(12, 3), NamedSharding(mesh, PartitionSpec(None, "context"))
    given = Batch(rows, rows + 1, segments=rows // 7, valid=rows % 3 > 0)
    found = along_context(identity, 3, jax.device_put(given, place))
    wanted = dict(
        tokens=rows[:, at], labels=rows[:, at] + 1, segments=rows // 7, valid=rows[:, at] % 3 > 0,
        positions=np.broadcast_to(at, rows.shape),
    )  # fmt: skip
    for name, value in wanted.items():
        np.testing.assert_array_equal(getattr(found, name), value, name)


MESH = AbstractMesh((4,), ("context",), axis_types=(AxisType.Explicit,))


def traced(*shape: int, split: bool, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the type of an array whose second axis is split over `MESH`, or of one on no axis."""
    spec = PartitionSpec(None, "context") if split else PartitionSpec()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


@pytest.mark.parametrize(
    ("queries", "keys", "lengths"),
    [
        (True, True, "ring over 'context' (4 devices): sends 6 of 12 blocks of keys, 12672 "),
        (True, False, "T is split over 'context' (4 devices): nothing is sent"),
        (False, True, "S is split over 'context' (4 devices): each device attends to its own"),
    ],
)
def test_split_lengths_are_planned_and_traced_without_devices(queries, keys, lengths):
    T, S = 64 if queries else 3, 64 if keys else 5  # whole lengths may be any
    query = traced(1, T, 2, 8, split=queries)
    key = value = traced(1, S, 2, 8, split=keys)
    bias = traced(1, 2, T, S, split=False)
    call = check_call(query, key, value, bias=bias, mask=Causal())
    way = split_lengths(call)[0]
    part = way.local(call)
    sizes = [(1, 16 if queries else T), (1, 16 if keys else S)]
    assert [part.query.shape[:2], part.key.shape[:2]] == sizes
    assert part.bias.shape == (1, 2, sizes[0][1], sizes[1][1])
    for other in None, ALiBi(np.ones(2, np.float32)):
        assert way.local(replace(call, bias=other)).bias is other
    plan = explain_attention(query, key, value, bias=bias, mask=Causal())
    assert plan.lengths.startswith(lengths)
    if queries and keys:
        rule = "there are 2 query heads: must be a multiple of 4"
        assert f"; no all-to-all, because {rule}" in plan.lengths

    def attend(query, key, value, bias):
        return dot_product_attention(query, key, value, bias=bias, mask=Causal())

    out = jax.eval_shape(attend, query, key, value, bias)
    assert out.sharding.spec[1] == ("context" if queries else None)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_parts_match_softmax_over_all_keys(with_sinks, rng):
    """One row sees no key, and one sees only the keys of the last device."""
    P, B, T, N, S, H = 3, 2, 5, 2, 7, 4
    scores, values = 2 * rng.normal(size=(P, B, T, N, S)), rng.normal(size=(P, B, S, N, H))
    scores[:, 1, 3], scores[:-1, 0, 2] = -np.inf, -np.inf
    sinks = np.array([0.7, -1.3]) if with_sinks else None
    weights = np.exp(scores)
    total = weights.sum(-1)
    out = np.einsum("pbtns,pbsnh->pbtnh", weights / np.maximum(total, 1e-300)[..., None], values)
    top, log_sum = scores.max(-1), np.log(np.where(total > 0, total, 1))
    lse = np.where(total > 0, log_sum, -np.inf)
    log_sum = log_sum - np.where(total > 0, top, 0)
    one: Any = SimpleNamespace(attend=lambda call: (call.out, call.lse))

    @partial(jax.vmap, axis_name="context")
    def device(out, lse):
        call = SimpleNamespace(query=out, out=out, lse=lse)
        added = None if sinks is None else jnp.float32(sinks)[None]
        return _merged(one, SplitLengths(("context",), P, False, True), call, added)

    found, found_lse = jax.device_get(jax.jit(device)(jnp.float32(out), jnp.float32(lse)))
    whole = total.sum(0)
    seen = whole > 0
    whole = np.where(seen, whole + (0 if sinks is None else np.exp(sinks)), 1)
    wanted = np.einsum("pbtns,pbsnh->btnh", weights, values) / whole[..., None]

    @jax.jit
    def ring(rows):
        parts = (Rows(*(x[i] for x in rows)) for i in range(P))
        added = None if sinks is None else jnp.float32(sinks)[None]
        return _with_sinks(reduce(_merge, parts), added)

    last = jax.device_get(ring([jnp.float32(x) for x in (out, top, log_sum)]))
    pairs = [*zip(found, found_lse, strict=True), (last.out, last.row_max + last.log_sum)]
    for each, each_lse in pairs:  # of the devices, and of a ring
        assert_near(each, wanted, FORWARD_F32)
        assert_near(each_lse[seen], np.log(whole)[seen], FORWARD_F32)
        assert np.isneginf(each_lse[~seen]).all()


@pytest.mark.usefixtures("quick_compilation")
def test_ring_matches_float64_in_one_process(monkeypatch):
    """The devices are the rows of a `vmap` whose axis has a name."""
    P, T, window = 3, 15, 6

    def send(x, axis_name, perm):  # the original does not support pairs of some devices in `vmap`
        source = dict.fromkeys(range(P), -1) | {to: one for one, to in perm}
        source = jnp.array(list(source.values()))[jax.lax.axis_index(axis_name)]
        return jnp.where(source < 0, 0, jax.lax.all_gather(x, axis_name)[source])

    monkeypatch.setattr(jax.lax, "ppermute", send)
    arrays = draw(5, batch=2, queries=T, keys=T, heads=4, kv_heads=2)
    arrays["sinks"] = jnp.array([-1.0, 0.3, 0.8, 1.7])
    arrays["bias"] = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, T, T)), jnp.float32)
    needed = tuple(tuple(i - 1 <= j <= i for j in range(P)) for i in range(P))
    one, lengths = IMPLEMENTATIONS["xla"], SplitLengths(("context",), P, True, True, needed)

    @jax.jit
    @partial(jax.vmap, in_axes=(1, 1, 1, 2, None, 0, 1, 1), out_axes=1, axis_name="context")
    def device(query, key, value, bias, sinks, at, *cotangents):
        def attend(query, key, value, bias, sinks):
            mask = Causal() & Window(window)
            call = check_call(query, key, value, mask=mask, q_positions=at, k_positions=at)
            call = replace(call, bias=bias, plan=one.plan(call))  # of all keys
            return _Ring(one, lengths).attend(call, sinks[None])

        results, pull = jax.vjp(attend, query, key, value, bias, sinks)
        return *results, *pull(cotangents)

    def in_parts(name):
        x = arrays[name]
        return x.reshape(2, P, T // P, *x.shape[2:])

    inputs = map(in_parts, ("query", "key", "value"))
    cotangents = map(in_parts, ("out_cotangent", "lse_cotangent"))
    bias = arrays["bias"].reshape(1, 4, P, -1, T)
    at = jnp.arange(T).reshape(P, 1, -1)
    found = device(*inputs, bias, arrays["sinks"], at, *cotangents)
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    wanted = reference(arrays, ((distance >= 0) & (distance < window))[None, None])
    for name, x in zip(("out", "lse", "dquery", "dkey", "dvalue"), found[:5], strict=True):
        limit = GRADIENT_F32 if name.startswith("d") else FORWARD_F32
        assert_near(x.reshape(2, T, *x.shape[3:]), wanted[name], limit, name)
    dbias = jnp.moveaxis(found[5], 1, 2).reshape(1, 4, T, T)
    assert_near(dbias, wanted["dbias"], GRADIENT_F32)
    assert_near(found[6].sum(axis=1), wanted["dsinks"], GRADIENT_F32)


def ways(N: int, K: int, **options) -> list[str]:
    """Return how a call with split T and S is computed, starting with the choice."""
    shape = lambda heads, dim: traced(3, 20, heads, dim, split=True)  # noqa: E731
    plan = explain_attention(shape(N, 7), shape(K, 7), shape(K, 5), **options)
    return re.findall(r"(?<!no )(?:ring|all-to-all)|gathered", plan.lengths)


def test_all_to_all_is_chosen_if_it_sends_fewer_bytes_than_the_ring():
    ring_first, heads_first = ["ring", "all-to-all"], ["all-to-all", "ring"]
    assert ways(8, 8) == ways(8, 8, mask=Causal()) == heads_first
    assert ways(8, 8, mask=Causal() & Window(5)) == ring_first
    # keys of one head: a ring sends (P - 1) / P of 2 heads, the all-to-all of 2 N + 2 P / P
    assert ways(8, 1) == ring_first
    # the copies of three key heads for four devices are 12 heads
    assert ways(12, 3) == ring_first and ways(24, 12) == heads_first
    split_bias = traced(1, 8, 20, 20, split=False)
    assert ways(8, 8, bias=split_bias) == heads_first
    spec = PartitionSpec(None, None, "context")
    split_bias = jax.ShapeDtypeStruct(
        split_bias.shape, split_bias.dtype, sharding=NamedSharding(MESH, spec)
    )
    assert ways(8, 8, bias=split_bias) == ["ring"]
    score = lambda s, row, head, q, k: s  # noqa: E731
    assert ways(8, 8, score_mod=score) == ["all-to-all"]
    plan = explain_attention(*[traced(3, 20, 8, 7, split=True)] * 3, score_mod=score)
    assert plan.lengths.endswith("; no ring, because it supports no score_mod")
    assert ways(6, 6, score_mod=score)[0] == "gathered"


def test_bytes_of_ring_count_the_keys_of_each_part_of_the_query_heads():
    """Four parts of the query heads read one key head, or two of two key heads each."""
    names = "data", "context", "tensor"
    mesh = AbstractMesh((3, 2, 4), names, axis_types=(AxisType.Explicit,) * 3)
    B, S, N, H, Hv = 3, 20, 8, 7, 5

    def array(heads, dim, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct((B, S, heads, dim), jnp.float32, sharding=sharding)

    for K, copies in ((1, 4), (2, 2), (8, 1)):
        spec = names if K == 8 else names[:2]
        plan = explain_attention(
            array(N, H, *names), array(K, H, *spec), array(K, Hv, *spec), mask=Causal() & Window(3)
        )
        # one of the two devices of each ring sends its block: half of the keys
        block = B * S // 2 * K * (H + Hv) * copies + 4 * 3 * S // 2
        assert f"sends 1 of 2 blocks of keys, {4 * block} bytes" in plan.lengths


def test_bytes_of_all_to_all_count_every_array_that_moves():
    def sent(**options) -> int:
        B, T, S, N, H, Hv = 3, 20, 28, 8, 7, 5
        query, key, value = (
            traced(B, n, N, dim, split=True, dtype=options.get("dtype", jnp.float32))
            for n, dim in ((T, H), (S, H), (S, Hv))
        )
        options.pop("dtype", None)
        if options.pop("split_positions", False):
            spec = PartitionSpec(None, "context")
            at = lambda n: jax.ShapeDtypeStruct(  # noqa: E731
                (B, n), jnp.int32, sharding=NamedSharding(MESH, spec)
            )
            options |= dict(q_positions=at(T), k_positions=at(S))
        plan = explain_attention(query, key, value, **options)
        return int(re.search(r"all-to-all .*? sends (\d+) bytes", plan.lengths)[1])

    heads = 3 * 8 * (20 * 7 + 28 * 7 + 28 * 5 + 20 * 5)
    assert sent() == 3 / 4 * 4 * heads
    assert sent(dtype=jnp.bfloat16) == 3 / 4 * 2 * heads
    assert sent(return_lse=True) == 3 / 4 * 4 * (heads + 3 * 8 * 20)
    assert sent(split_positions=True) == 3 / 4 * 4 * heads + 3 * 4 * 3 * (20 + 28)


@pytest.mark.parametrize("split", [True, False])
def test_split_slots_are_joined_and_written_without_gathering(split):
    """The types of the results are traced. Their values are compared on eight devices."""
    old, new = (
        {
            "k": traced(2, size, 2, 4, split=part),
            "positions": traced(2, size, split=part, dtype=jnp.int32),
        }
        for size, part in ((16, True), (8, split))
    )
    axes = ("context",)
    joined = jax.eval_shape(lambda old, new: join_split(old, new, axes), old, new)
    write = lambda old, new: write_split(old, new, new["positions"], axes)  # noqa: E731
    written = jax.eval_shape(write, old, new)
    # without a ring, each device has all new tokens
    for found, size in ((joined, 24 if split else 48), (written, 16)):
        assert found["k"].shape == (2, size, 2, 4)
        assert {x.sharding.spec[1] for x in found.values()} == {"context"}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                "all at once; blockwise; ring",
                "window; native; ring",
                "int8; xla; ring",
                "sinks; blockwise; keys",
                "heads; native; queries",
                "dropout; native; heads",
                "heads; xla; heads",
                "int8; blockwise; heads",
            ],
            marks=pytest.mark.slow,
            id="some",
        ),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(10_800)], id="all"),
    ],
)
def test_attention_with_split_lengths_matches_one_device(cases):
    """Output, lse, gradients, forward mode and products with the Hessian, against float64."""
    results = on_devices(8, *SCRIPT, *cases, optimise=False)
    assert len(results) == len(cases) or len(results) > 250
    for case, errors in results.items():
        assert {"outputs", "gradients"} <= errors.keys()
        for name, error in errors.items():
            limit = FORWARD_F32 if name in ("outputs", "forward mode") else GRADIENT_F32
            assert error <= limit, (case, name, error)


PAIRS = dict(everything=56, causal=28, window=7, packed=7, zigzag=56)
"""Transfers of a block, in a forward pass over eight devices."""


def test_long_rows_are_cut_into_chunks_of_at_least_512_tokens():
    for tokens, per_device in ((1000, 2), (2048, 4), (2054, 2), (2560, 4), (3072, 6), (4096, 8)):
        at = zigzag_positions(3 * tokens, 3).reshape(3, -1)
        ends = np.flatnonzero(np.diff(at, append=at[:, -1:] + 2) != 1)
        assert tokens // np.gcd.reduce(ends + 1) == per_device, tokens
        assert len({*(at + 1).sum(axis=1).tolist()}) == 1, "causal pairs of the devices"


def test_chunks_spread_documents_over_the_devices():
    """The largest share of a device, averaged over 64 rows of documents, is 1.25 times the mean."""
    T, P, rng = 32768, 8, np.random.default_rng(0)
    shares = []
    for _ in range(64):
        starts = np.cumsum(rng.lognormal(8, 1, size=400).astype(int))
        at = np.arange(T)
        pairs = at - np.append(0, starts)[np.searchsorted(starts, at, "right")] + 1
        both = [pairs[x].reshape(P, -1).sum(1) for x in (zigzag_positions(T, P), at)]
        shares.append([x.max() / x.mean() for x in both])
    ours, usual = np.mean(shares, axis=0)
    assert ours < 1.3 < 2 < usual


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["window", "causal"], id="some"),
        pytest.param(list(PAIRS), marks=[pytest.mark.long, pytest.mark.timeout(1200)], id="all"),
    ],
)
def test_compiled_program_sends_only_blocks_that_a_mask_needs(cases):
    """The bytes are those of the formula in docs/long_sequences.md, and nothing is gathered."""
    results = on_devices(8, *SCRIPT, *(f"traffic; {case}" for case in cases), optimise=False)
    block, positions = 2 * 1024 * 2 * 16 * 4, 1024 * 4  # keys and values f32[1, 1024, 2, 16]
    for case in cases:
        forward, gradient, said = results[f"traffic; {case}"]
        pairs = PAIRS[case]
        assert forward["bytes"] == pairs * (block + positions), case
        # the backward pass sends keys and values again, and their gradients
        assert gradient["bytes"] == pairs * (3 * block + 2 * positions), case
        for program in (forward, gradient):
            assert program["gathered"] == program["exchanged"] == 0, case
        assert f"sends {pairs} of 56 blocks of keys, {forward['bytes']} bytes" in said
        shifts = 1 if case in ("window", "packed") else 7
        assert forward["arrays"] == 3 * shifts, case


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("causal", 8, 8), ("everything", 8, 2)], id="some"),
        pytest.param(
            [("zigzag", 16, 8), ("everything", 24, 24), ("causal", 24, 12)],
            marks=[pytest.mark.long, pytest.mark.timeout(1200)], id="all",
        ),
    ],
)  # fmt: skip
def test_all_to_all_sends_query_keys_values_and_output_once(cases):
    """The gradient sends as many bytes again, and nothing is gathered."""
    names = {case: f"traffic; {'; '.join(map(str, case))}" for case in cases}
    results = on_devices(8, *SCRIPT, *names.values(), optimise=False)
    for (layout, N, K), name in names.items():
        forward, gradient, said = results[name]
        copied = np.lcm(K, 8)
        whole = 8192 * 16 * 4 * (2 * N + 2 * copied)  # f32[8192, heads, 16]
        assert forward["bytes"] == 7 / 8 * whole, name
        assert gradient["bytes"] == 2 * forward["bytes"], name
        for program, count in ((forward, 4), (gradient, 8)):
            found = tuple(program[field] for field in ("arrays", "exchanged", "gathered"))
            assert found == (count, count, 0), name
        sent = f"all-to-all over 'context' (8 devices): sends {forward['bytes']} bytes"
        assert said.startswith(sent), said
        assert f"alternative: ring over 'context' (8 devices): sends {PAIRS[layout]} of" in said
        assert (f", with {copied // K} copies of each key head" in said) == (copied > K)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_per_token_falls_with_the_number_of_devices():
    """Temporary arrays of a gradient, from 8k to 64k tokens. The tiles take the same for both."""
    cases = [(length, devices) for length in (8192, 65536) for devices in (4, 8)]
    names = [f"memory; {length}; {devices}" for length, devices in cases]
    found = on_devices(8, *SCRIPT, *names)
    sizes = {case: found[name] for case, name in zip(cases, names, strict=True)}
    four, eight = (sizes[65536, devices] - sizes[8192, devices] for devices in (4, 8))
    assert 0.4 * four < eight < 0.6 * four, sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["rope", "window, packed"], id="some"),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="all"),
    ],
)
def test_models_with_split_tokens_match_one_device(cases):
    """Logits, losses and gradients. No activations are gathered, except by experts."""
    results = on_devices(8, "-m", "tests.multi_device.long_rows_on_eight", *cases, optimise=False)
    assert len(results) == len(cases) or len(results) == 14
    for case, found in results.items():
        assert found["error"] <= GRADIENT_F32, (case, found)
        assert found["gathered"] == [] or "experts" in case, (case, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["rope, plain", "learned, both"], id="some"),
        pytest.param(
            [
                *(f"{model}, {layout}" for model in ("rope", "experts") for layout in LAYOUTS),
                "learned, plain", "scanned, plain", "scanned, prefix", "t5, packed",
            ],
            marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="all",
        ),
    ],
)  # fmt: skip
def test_training_in_zigzag_order_matches_one_device(cases):
    """Losses and gradients, with documents, prefixes and split parameters.

    A device has both ends of a row.
    """
    names = [f"balanced, {case}" for case in cases]
    results = on_devices(8, "-m", "tests.multi_device.long_rows_on_eight", *names, optimise=False)
    for case, found in results.items():
        assert found["first"] == found["wanted"], case
        assert found["kernels"] == "P('tensor', ('fsdp', 'context'))", case
        assert found["error"] <= GRADIENT_F32, (case, found)
        assert found["gathered"] == [] or "experts" in case, (case, found)


def test_only_causal_rows_without_dropout_are_put_in_zigzag_order():
    config = TrainConfig(model=ModelConfig(), mesh=MeshConfig(context=2), context=8)
    assert needs_balance(config)
    for change in (
        dict(window=5), dict(window=(5, None)), dict(dropout=0.1), dict(attention_dropout=0.1),
    ):  # fmt: skip
        assert not needs_balance(replace(config, model=replace(config.model, **change))), change
    encoder = ModelConfig(kind="encoder", masked_token_head=True)
    assert not needs_balance(replace(config, model=encoder, task=MaskedTask()))
    lora = dict(init_from="runs/book", tokenizer="pretrained")
    assert needs_balance(replace(config, lora=LoraConfig(), **lora))
    assert not needs_balance(replace(config, lora=LoraConfig(dropout=0.1), **lora))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["rope", "window"], id="some"),
        pytest.param([], marks=[pytest.mark.long, pytest.mark.timeout(3600)], id="all"),
    ],
)
def test_generation_from_split_slots_matches_one_device(cases):
    """Tokens, log-probabilities, captured values and the slots, which stay split."""
    results = on_devices(8, *SPLIT_CACHE, *cases, optimise=False)
    assert len(results) == len(cases) or len(results) == 18
    for case, found in results.items():
        assert found["tokens"], case
        for name in ("log_probs", "cache", "captured"):
            assert found[name] <= FORWARD_F32, (case, found)
        for spec in found["specs"]:
            assert "context" in spec or "outer" in spec, case


@pytest.mark.slow
def test_generation_from_split_slots_gathers_nothing():
    """A prompt of 500 tokens fills a bucket of 512, and 1024 slots are split over 8 devices."""
    (found,) = on_devices(8, *SPLIT_CACHE, "traffic 500", optimise=False).values()
    layers, shifts, loop = 2, 7, 1
    wanted = {
        # the ring of attention sends slots: positions, and keys and values
        "collective-permute s32[2,128]": layers * shifts,
        "collective-permute f32[2,128,2,4]": 2 * layers * shifts,
        # in a loop, new keys and values travel to their slots
        "collective-permute s32[2,64]": 2 * layers * loop,
        "collective-permute f32[2,64,2,4]": 2 * layers * loop,
    }
    sent = {name: n for name, n in found.items() if not name.startswith("all-reduce")}
    assert sent == wanted
    # a step sums results of queries, and the hidden state of the last token of the prompt
    sizes = {name: np.prod(eval(name[name.index("[") :])) for name in found if name not in sent}
    assert sizes and max(sizes.values()) <= 2 * 16, sizes


def test_invalid_sharding_of_slots_raises_error():
    mesh = jax.sharding.AbstractMesh((4,), ("context",))
    slots = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    config = ModelConfig(num_heads=2, d_model=16)
    with pytest.raises(ValueError, match=r"capacity is 30: must be a multiple of 4, the devices"):
        init_cache(config, 2, 30, sharding=slots)
    config = replace(config, mixers=("gated_delta", "attention"), gated_delta=GatedDelta())
    with pytest.raises(ValueError, match=r"sharding is .*: layers with a state have no slots"):
        init_cache(config, 2, 32, sharding=slots)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_with_split_tokens_has_the_losses_of_one_device():
    """24 steps with dropout and chunks, and a run that is interrupted and resumed."""
    found = on_devices(8, "-m", "tests.multi_device.long_rows_on_eight", "training")["training"]
    assert len(found["one"]) == 25 and found["one"][23] < found["one"][0]
    assert_near(found["context"], found["one"], 1e-5)
    assert found["resumed"] == found["context"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_run_of_200_steps_matches_one_device_and_survives_a_kill(tmp_path):
    """A run that is killed after step 107 and resumed has the same bits."""
    script = "-m", "tests.multi_device.long_rows_on_eight", "long run"

    def run(mesh: str, folder: str, ending: str = ""):
        (tmp_path / folder).mkdir(exist_ok=True)
        devices = 1 if mesh == "one" else 4
        return on_devices(devices, *script, mesh, str(tmp_path / folder), ending)

    one, ring = run("one", "one"), run("ring", "ring")
    assert len(one[0]) == 200 and one[0][-1] < 0.4 * one[0][0]
    assert_near(ring[0], one[0], 1e-5)
    assert_near(ring[1], one[1], 1e-5)
    with pytest.raises(AssertionError):
        run("ring", "killed", "kill")
    lines = (tmp_path / "killed" / "run" / "metrics.jsonl").read_text().splitlines()
    assert 100 <= len(lines) < 110
    assert run("ring", "killed", "resume") == ring


SHORT_ROWS = """
import json
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from transformer_jax import ModelConfig, Shaw, build, init_params, quantize
mesh = jax.make_mesh((2,), ("context",))
split = NamedSharding(mesh, P(None, "context"))
tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 31)
found = {}
def compare(name, config, change=lambda params: params, **options):
    model, params = build(config), change(init_params(config, jax.random.key(0)))
    if config.kind == "encoder":
        options["method"] = model.pool
    results = []
    for place in (split, None):
        put = lambda x, where: x if place is None else jax.device_put(x, where)
        placed = put(params, NamedSharding(mesh, P())), put(tokens, split)
        result = model.apply({"params": placed[0]}, placed[1], **options)
        results.append(np.asarray(jax.tree.leaves(result)[0]))
    found[name] = float(np.abs(results[0] - results[1]).max() / np.abs(results[1]).max())
config = ModelConfig(vocab_size=31, max_len=48, num_layers=1, num_heads=4, d_model=128)
compare("learned", config)
compare("shaw", replace(config, positions=Shaw(max_distance=4)))
compare("chosen tokens", config, at=jnp.array([[7], [3]]))
compare("first token", replace(config, kind="encoder", pooler="tanh"))
for kind in ("int8", "int4"):
    compare(kind, config, lambda params: quantize(params, kind, embeddings=True))
try:
    compare("invariant", replace(config, invariant=True))
except ValueError as error:
    found["invariant"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_calls_outside_jit_accept_split_rows():
    """One device has a kernel for products of so few rows with quantized weights."""
    found = on_devices(2, "-c", SHORT_ROWS)
    message = found.pop("invariant")
    assert message.endswith("a mesh may split only the rows of an invariant model")
    assert len(found) == 6
    for name, error in found.items():
        assert error < FORWARD_F32, name
