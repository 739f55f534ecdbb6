"""Parts of kernels that are plain functions of arrays, against definitions in NumPy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from tests.support.hopper_kernels import Case, causal, draw
from transformer_jax.kernels import hopper, packed_queries, sharding
from transformer_jax.kernels.contract import Blocks, Operands, Problem, Residuals, TileLists
from transformer_jax.kernels.dropout import keep
from transformer_jax.kernels.nvidia import bias, decode_rows, scores
from transformer_jax.kernels.nvidia.memory import HAS_JAX_11
from transformer_jax.kernels.nvidia.scores import COLUMN, ROW, TilePosition
from transformer_jax.kernels.packed_queries import PackedQueries, with_sinks
from transformer_jax.kernels.sharding import HEADS, KEYS, POOLS, QUERIES, ROWS, TILES, Parts

pytestmark = pytest.mark.usefixtures("quick_compilation")

PLAIN = SimpleNamespace(**vars(np) | {"bfloat16": jnp.bfloat16})
"""NumPy versions of the `jax.numpy` functions used below, so that nothing is compiled."""


@pytest.fixture
def in_numpy(monkeypatch):
    for module in (decode_rows, packed_queries, scores):
        monkeypatch.setattr(module, "jnp", PLAIN)


# Distribution over devices

MESH = AbstractMesh((2, 2, 3), ("x", "y", "z"))


@pytest.mark.parametrize(("spec", "full", "axes"), [
    (("x", None, "y", None), dict(b=4, n=8, k=4), dict(b="x", n="y", k="y")),
    (("x", None, ("y", "z"), None), dict(b=4, n=12, k=2), dict(b="x", n="yz", k="y")),
    (("x", None, ("y", "x"), None), dict(b=4, n=8, k=4), dict(b="x", n="", k="")),
    (("z", None, "y", None), dict(b=4, n=8, k=4), dict(b="", n="y", k="y")),
    ((None, None, "y", None), dict(b=4, n=6, k=3), dict(b="", n="", k="")),
    ((None, None, ["x", "y"], None), dict(b=1, n=4, k=1), dict(b="", n="xy", k="")),
    ((None, None, ("x", "y"), None), dict(b=1, n=8, k=6), dict(b="", n="", k="")),
])  # fmt: skip
def test_shards_follow_query_sharding_if_sizes_divide_evenly(spec, full, axes):
    parts = Parts.of(MESH, [spec, ("y", None, "x", None)], [QUERIES, KEYS], full)
    assert {name: "".join(own) for name, own in parts.axes.items()} == axes
    b, n, k = (tuple(axes[name]) for name in "bnk")
    B, N, K = full["b"], full["n"], full["k"]
    assert parts.spec((B, 5, N, 7), QUERIES) == PartitionSpec(b or None, None, n or None, None)
    assert parts.spec((1, 5, K, 7), KEYS) == PartitionSpec(
        b or None if B == 1 else None, None, k or None, None
    )
    assert parts.summed((B, 5, N, 7), QUERIES) == ()
    assert parts.summed((B, 5, K, 7), KEYS) == n[len(k) :]
    assert parts.summed((3, 2), (None, None)) == b + n
    if B > 1 and N > 1:
        assert parts.summed((1, 1, 5, 7), TILES) == b + n
        assert parts.summed((1, N, 5, 7), TILES) == b and parts.summed((B, 1), HEADS) == n


def test_query_head_sharding_propagates_to_divisible_key_heads():
    def rule(mesh: Any, n: int, k: int) -> Any:
        full = dict(b=4, n=n, k=k)
        shapes = [(4, 5, n, 7), (4, 6, k, 7), (1, n), (9, 8, k, 7)]
        names = [QUERIES, KEYS, HEADS, POOLS]
        return sharding._rule(mesh, shapes, names, [(4, n, 5)], [ROWS], full)

    small = AbstractMesh((2,), ("x",))
    wholes = "b x0 {n} x1, b x2 k x3, x4 {n}, x5 x6 k x7 -> b {n} x8"
    assert rule(small, 8, 4) == (wholes.format(n="(k g)"), dict(g=2))
    assert rule(small, 4, 4) == (wholes.format(n="k"), {})
    assert rule(MESH, 8, 4) == (wholes.format(n="n"), {})


def test_device_reads_one_key_head_and_zeroes_other_gradients(monkeypatch):
    parts = Parts.of(MESH, [(None, None, ("y", "z"), None)], [QUERIES], dict(b=1, n=12, k=2))
    monkeypatch.setattr(sharding.lax, "axis_index", lambda axes: {("z",): 1, ("y", "z"): 4}[axes])
    assert parts.first() == (0, 4 * 2)
    few = Parts.of(MESH, [(None, None, ("x", "y"), None)], [QUERIES], dict(b=1, n=8, k=1))
    monkeypatch.setattr(sharding.lax, "axis_index", lambda axes: {("x", "y"): 3}[axes])
    assert few._beyond_keys() == ("x", "y") and few.first() == (0, 3 * 2)
    halves = Parts.of(MESH, [(None, None, ("z",), None)], [QUERIES], dict(b=1, n=6, k=1))
    monkeypatch.setattr(sharding.lax, "axis_index", lambda axes: 2)
    x = np.arange(10.0).reshape(1, 5, 1, 2)
    [read, same] = halves.read([x, x], [KEYS, QUERIES])
    assert (np.asarray(read) == x).all() and same is x
    thirds = Parts.of(MESH, [(None, None, ("z", "y"), None)], [QUERIES], dict(b=1, n=12, k=2))
    two = np.arange(20.0).reshape(1, 5, 2, 2)
    for index, head in ((2, 0), (4, 1)):  # three of the six devices read each key head
        monkeypatch.setattr(sharding.lax, "axis_index", lambda axes, index=index: index)
        [read] = thirds.read([two], [KEYS])
        assert (np.asarray(read) == two[:, :, head : head + 1]).all()
    put = np.asarray(sharding._embed(jnp.asarray(x), 1, 3, 2))
    assert (put[:, :, 1:2] == x).all() and put.shape == (1, 5, 3, 2) and put[:, :, ::2].sum() == 0
    empty, mapped = sharding.empty_batch(
        lambda a, b: (a.sum(axis=0), b),
        (np.zeros((0, 3, 2), np.float32), np.zeros(5, np.float32)),
        (True, False),
    )
    assert [x.shape for x in empty] == [(0, 2), (0, 5)] and mapped == (True, True)


def test_results_that_devices_share_are_summed(monkeypatch):
    """Two devices split four rows, and three split six heads; the sums of heads lack the rows."""
    partitions = []

    class Recorded:
        def __init__(self, function):
            self.function = function

        def def_partition(self, partition, **_):
            partitions.append(partition)

        def __call__(self, *arrays):
            return self.function(*arrays)

    def function(first, x):
        return x + 10.0 * first[0] + first[1], x.sum(axis=(0, 1, 3))[None]

    monkeypatch.setattr(sharding, "custom_partitioning", Recorded)
    monkeypatch.setattr(sharding, "_spec", lambda mesh, spec, ndim: spec)
    x = np.arange(4 * 5 * 6 * 2, dtype=np.float32).reshape(4, 5, 6, 2)
    full = dict(b=4, n=6, k=6)
    whole = sharding.partitioned(function, [jnp.asarray(x)], [QUERIES], [QUERIES, HEADS], full)
    mesh = AbstractMesh((2, 3), ("x", "y"))
    spec = SimpleNamespace(shape=x.shape, ndim=4, sharding=(("x",), (), ("y",), ()))
    _, lower, specs, _ = partitions[0](mesh, (spec,), None)
    assert [one.spec for one in specs] == [
        PartitionSpec("x", None, "y", None),
        PartitionSpec(None, "y"),
    ]
    parts = x.reshape(2, 2, 5, 3, 2, 2).transpose(0, 3, 1, 2, 4, 5)  # [x, y, B, T, N, H]
    found, sums = jax.vmap(jax.vmap(lower, axis_name="y"), axis_name="x")(parts)
    first = 20.0 * np.arange(2).reshape(2, 1, 1, 1, 1, 1) + 2.0 * np.arange(3).reshape(
        3, 1, 1, 1, 1
    )
    np.testing.assert_array_equal(found, parts + first)
    np.testing.assert_array_equal(sums.reshape(2, 6), np.repeat(whole[1], 2, axis=0))


# Inputs and results of decode kernels


def test_merged_decode_splits_match_softmax(in_numpy):
    """Two of three parts saw keys; one row saw none; a sink is added to each row that saw a key."""
    rng = np.random.default_rng(0)
    B, T, N, K, parts, Hv, rows = 2, 3, 4, 2, 3, 5, 64
    row_max = rng.integers(-3, 4, (B, K, parts, rows)).astype(np.float32)
    total = rng.uniform(1, 2, (B, K, parts, rows)).astype(np.float32)
    row_max[:, :, 2], total[:, :, 2] = -1e30, 0
    total[1, 0, :, 0] = 0
    acc = rng.standard_normal((B, K, parts, rows, Hv)).astype(np.float32) * (total > 0)[..., None]
    q = np.zeros((B, T, N, 4), np.float32)
    operands = Operands(q, np.zeros((B, 9, K, 4)), np.zeros((B, 9, K, Hv)))
    for sinks in (None, rng.standard_normal((1, N)).astype(np.float32)):
        out, m, log_sum = decode_rows.merged(operands._replace(sinks=sinks), acc, row_max, total)
        for b, t, n in np.ndindex(B, T, N):
            k, row = divmod(n, N // K)
            row = row * T + t
            scale = 2.0 ** row_max[b, k, :, row].astype(np.float64)
            l, o = (scale * total[b, k, :, row]).sum(), scale @ acc[b, k, :, row]  # noqa: E741
            if not total[b, k, :, row].any():
                assert (np.asarray(out)[b, t, n] == 0).all() and np.asarray(m)[b, n, t] == -np.inf
                continue
            l += 0 if sinks is None else math.exp(sinks[0, n])  # noqa: E741
            np.testing.assert_allclose(np.asarray(out)[b, t, n], o / l, rtol=2e-5, atol=1e-6)
            top = max(row_max[b, k, :, row]) * math.log(2)
            top = top if sinks is None else max(top, sinks[0, n])
            np.testing.assert_allclose(np.asarray(m)[b, n, t], top, rtol=1e-5, atol=1e-6)
            found = np.asarray(log_sum)[b, n, t] + np.asarray(m)[b, n, t]
            np.testing.assert_allclose(found, math.log(l), rtol=1e-5, atol=1e-6)


def test_keys_are_padded_for_copying_and_located_in_pages(in_numpy):
    k, scale = np.ones((2, 67, 1, 4), np.int8), np.ones((2, 67, 1), np.float32)
    operands = Operands(np.zeros((2, 1, 2, 4)), k, k, k_scale=scale, v_scale=scale)
    found = decode_rows.for_copies(operands, 128)
    assert found.key.shape == found.value.shape == (2, 72, 1, 4)
    assert found.k_scale.shape == found.v_scale.shape == (2, 128, 1)
    assert float(found.v_scale.sum()) == 2 * 67 and int(found.key.sum()) == 2 * 67 * 4
    assert decode_rows.for_copies(operands).k_scale.shape == (2, 72, 1)
    short = operands._replace(key=k[:, :3], value=k[:, :3], k_scale=None, v_scale=None)
    assert decode_rows.for_copies(short).key.shape[1] == 64
    assert decode_rows.for_copies(short).k_scale is None
    paged = operands._replace(pages=np.zeros((2, 3), np.int32))
    assert decode_rows.for_copies(paged) is paged
    order = np.arange(24).reshape(1, 4, 3, 2)
    lists = TileLists(order, order[..., 0], order[..., 1])
    grouped = Operands(np.zeros((1, 1, 4, 2)), np.zeros((1, 9, 2, 2)), np.zeros((1, 9, 2, 2)))
    found = decode_rows.lists_of_key_heads(grouped, lists)
    assert (found.order == order[:, ::2]).all() and (found.seen == order[:, ::2, :, 1]).all()
    one = TileLists(*(x[:, :1] for x in lists[:3]))
    assert decode_rows.lists_of_key_heads(grouped, one) is one
    cut = [decode_rows.part_of(7, part, 3) for part in range(3)]
    assert cut == [(0, 2), (2, 4), (4, 7)]
    assert [decode_rows.columns_at_once(n) for n in (128, 96, 80)] == [64, 32, 16]
    assert decode_rows.swizzle(k.reshape(2, 67, 1, 4).repeat(8, 3)) == 32
    assert decode_rows.swizzle(np.zeros((1, 1, 1, 128), np.float32)) is None
    row, slots = decode_rows.place_of(operands, 1, 64)
    assert (row, slots.start, slots.size) == (1, 64, 64)


def test_summed_bias_gradient_has_bias_shape():
    lists = TileLists(
        np.array([[[[1, 0, 0], [2, 1, 2]]]]), np.array([[[0, 1]]]), np.array([[[1, 2]]])
    )
    assert bias.visited(lists).tolist() == [[[[0, 1, 0], [0, 1, 1]]]]
    operands = Operands(np.zeros((2, 64, 3, 4)), np.zeros((2, 96, 3, 4)), np.zeros((2, 96, 3, 4)))
    for shape, expected in (
        ((2, 3, 64, 96), (2, 3, 64, 96)), ((1, 3, 64, 1), (1, 3, 64, 16)),
        ((2, 1, 1, 96), (2, 1, 32, 96)), ((2, 1, 1, 1), (2, 1, 64, 16)),
    ):  # fmt: skip
        with_bias = operands._replace(bias=np.zeros(shape))
        assert bias.sum_shape(with_bias, Blocks(32, 16)) == expected
    index = np.arange(24).reshape(2, 3, 4)
    for at in np.ndindex(2, 3, 4):
        assert tuple(bias.digits(index[at], (2, 3, 4))) == at


def test_packed_queries_sharing_key_head_form_one_tile(in_numpy):
    rng, T, N, K = np.random.default_rng(0), 3, 4, 2
    rows = PackedQueries(T, N // K, 8)
    for shape in ((2, 4, 3, 5), (1, 4, 1, 5), (2, 1, 3, 5), (1, 1, 3, 1), (1, 1, 1, 5)):
        x = rng.standard_normal(shape).astype(np.float32)
        packed = np.asarray(rows.pairs(x))
        b, n, _, s = shape
        if n == 1 == shape[2]:
            assert packed.shape == shape
        else:
            assert packed.shape == (b, 1 if n == 1 else K, 8, s) and (packed[:, :, 6:] == 0).all()
            whole = np.broadcast_to(x, (b, N, T, s))
            for head, t in np.ndindex(N if n > 1 else 2, T):
                k, own = divmod(head, 2)
                assert (packed[:, k, own * T + t] == whole[:, head, t]).all()
        if shape[2] == T or n == 1 == shape[2]:
            back = np.asarray(rows.unpacked(packed, TILES, shape))
            is_shared = n == 1 and shape[2] > 1  # the two heads of a group are summed
            np.testing.assert_allclose(back, x * (2 if is_shared else 1), rtol=1e-6)
    q = rng.standard_normal((2, T, N, 5)).astype(np.float32)
    assert (np.asarray(rows.unpacked(rows.queries(q), QUERIES)) == q).all()
    row = rng.standard_normal((2, N, T)).astype(np.float32)
    assert (np.asarray(rows.unpacked(rows.heads(row, 7.0), ROWS)) == row).all()
    assert (np.asarray(rows.heads(row, 7.0))[:, :, 6:] == 7).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, for a row that sees no key
def test_sink_is_added_only_to_rows_with_unmasked_keys(in_numpy):
    rng = np.random.default_rng(0)
    m, log_sum = rng.standard_normal((2, 2, 4, 3)).astype(np.float32)
    out = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    m[0, 1, 2] = -np.inf
    log_sum[0, 1, 2] = out[0, 2, 1] = 0
    sinks = rng.standard_normal((1, 4)).astype(np.float32)
    found, top, total = map(np.asarray, with_sinks(sinks, out, m, log_sum))
    weight, added = np.exp(np.float64(m) + log_sum), np.exp(np.float64(sinks))[..., None]
    live = np.isfinite(m)
    share = np.where(live, weight / (weight + added), 1).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(found, out * share, rtol=1e-5)
    np.testing.assert_allclose(top, np.where(live, np.maximum(m, sinks[..., None]), -np.inf))
    np.testing.assert_allclose(
        (top + total)[live], np.log(weight + added)[live], rtol=1e-5, atol=1e-6
    )
    assert top[0, 1, 2] == -np.inf and total[0, 1, 2] == 0


# The scores of a tile


class Ref:
    """An array instead of GPU memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        if index is ...:
            return self.array
        own = (slice(i.start, i.start + i.size) if hasattr(i, "size") else i for i in index)
        return Ref(self.array[tuple(own)])


@pytest.fixture
def on_arrays(monkeypatch, in_numpy):
    """Replace registers by NumPy arrays."""

    def load_along(ref, shape, axis):
        array = ref.array if isinstance(ref, Ref) else ref
        return np.broadcast_to(array[:, None] if axis == ROW else array[None], shape)

    def iota(dtype, shape, dimension, layout):
        assert layout == scores.WGMMA.reduce(1 if shape == (5,) else 0)
        return np.arange(shape[0], dtype=dtype)

    def broadcast_in_dim(x, shape, axes):
        return np.broadcast_to(x[:, None] if axes == [ROW] else x[None], shape)

    plain_lax = SimpleNamespace(broadcast_in_dim=broadcast_in_dim, rsqrt=lambda x: 1 / np.sqrt(x))
    monkeypatch.setattr(scores, "lax", plain_lax)
    monkeypatch.setattr(
        scores, "across", lambda rows, like: np.broadcast_to(rows[:, None], like.shape)
    )
    monkeypatch.setattr(scores, "load", lambda ref, layout: ref.array)
    monkeypatch.setattr(scores, "load_along", load_along)
    monkeypatch.setattr(scores.plgpu, "broadcasted_iota", iota)
    monkeypatch.setattr(scores, "filled", lambda shape, value: np.full(shape, value, np.float32))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": dict(softcap=1.5),
    "softcap of bfloat16": dict(softcap=1.5, dtype="bfloat16"),
    "large softcap": dict(softcap=300.0),
    "bias": dict(bias=(2, 3, 9, 11)),
    "bias of rows": dict(bias=(1, 3, 9, 1)),
    "bias of columns": dict(bias=(2, 1, 1, 11)),
    "bias of heads": dict(bias=(2, 3, 1, 1), scale=-0.3),
    "slopes": dict(slopes=True),
    "mask, dropout and softcap": dict(visible=causal, rate=0.4, softcap=1.5),
}


@pytest.mark.slow_except("*-0", "*s-1", "bias-1")
@pytest.mark.parametrize("q_axis", [ROW, COLUMN])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tile_weights_with_slopes_match_float64(options, q_axis, on_arrays):
    """A tile of 5 rows and 7 columns: from query 2 and key 3 on, head 1, batch row 1."""
    rng, b, n, q0, k0 = np.random.default_rng(0), 1, 1, 2, 3
    rows, columns = 5, 7
    T, S = (rows, columns) if q_axis == ROW else (columns, rows)
    of: dict[str, Any] = (
        dict(scale=0.25, softcap=None, rate=0.0, visible=None, dtype="float32") | options
    )
    problem = Problem(of["scale"], of["softcap"], of["rate"], of["visible"])
    query = np.zeros((2, 9, 3, 4), jnp.dtype(of["dtype"]))
    q_at, k_at = np.arange(20, 29)[q0 : q0 + T], np.arange(17, 31)[k0 : k0 + S]
    shape = of.get("bias")
    array = None if shape is None else rng.standard_normal(shape).astype(np.float32)
    operands = Operands(query, query, query)
    if array is not None:
        if shape[2] > 1 and shape[3] > 1:
            array = array.copy()
            array[1, 1, q0, k0 + 1] = -np.inf
        own = array if q_axis == ROW else array.swapaxes(2, 3)
        operands = operands._replace(
            bias=Ref(
                np.pad(
                    own, [(0, 0), (0, 0), (0, 9 * (own.shape[2] > 1)), (0, 9 * (own.shape[3] > 1))]
                )
            )
        )
    if of.get("slopes"):
        operands = operands._replace(slopes=Ref(rng.uniform(0.1, 1, (2, 3)).astype(np.float32)))
    words = rng.integers(0, 2**32, (2, 2, 3), dtype=np.uint32)
    if of["rate"]:
        operands = operands._replace(dropout=words)
    rows_of_process, own_columns = (q_at, k_at) if q_axis == ROW else (k_at, q_at)
    where = TilePosition(b, n, q0, k0, (rows_of_process,), (Ref(own_columns),))

    raw = rng.standard_normal((rows, columns)).astype(np.float32) * 3
    base = rng.standard_normal((rows, columns)).astype(np.float32)
    dp, D = rng.standard_normal((2, rows, columns)).astype(np.float32)
    dropped, differentiate = scores.probabilities(problem, operands, raw, base, where, q_axis, True)
    ds, du = differentiate(dp, D)

    turned = (lambda x: x) if q_axis == ROW else np.transpose  # to [T, S] and back
    s = np.float64(turned(raw)) * of["scale"]
    slope = np.ones_like(s)
    if of["softcap"]:
        tanh = np.tanh(s / of["softcap"])
        s, slope = of["softcap"] * tanh, 1 - tanh**2
    if array is not None:
        s = s + np.broadcast_to(array[b if shape[0] > 1 else 0, n if shape[1] > 1 else 0],
                                (shape[2] if shape[2] > 1 else 9, shape[3] if shape[3] > 1 else 11)
                                )[q0 : q0 + T, k0 : k0 + S]  # fmt: skip
    if of.get("slopes"):
        s = s - operands.slopes.array[b, n] * np.abs(q_at[:, None] - k_at)
    p = np.exp(s - turned(base) * math.log(2))
    kept = np.ones((T, S))
    if of["visible"]:
        p = np.where(q_at[:, None] >= k_at, p, 0)
        at = [
            jnp.arange(start, start + size, dtype=jnp.uint32) for start, size in ((q0, T), (k0, S))
        ]
        kept = keep(
            *(jnp.uint32(word) for word in words[:, b, n]), at[0][:, None], at[1][None], 0.4
        )
        kept = np.asarray(kept) / 0.6
    expected = p * (turned(dp) * kept - turned(D))
    close = dict(rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(turned(np.asarray(dropped)), p * kept, **close)
    np.testing.assert_allclose(turned(np.asarray(ds)), expected, **close)
    np.testing.assert_allclose(turned(np.asarray(du)), expected * slope, **close)


@pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy, for a row that sees no key
def test_final_sums_are_normalized_with_sink(on_arrays):
    rng = np.random.default_rng(0)
    acc, m = rng.standard_normal((5, 7)).astype(np.float32), np.arange(5, dtype=np.float32) - 2
    total = np.array([1, 0, 2, 3, 4], np.float32)
    operands = Operands(np.zeros((1, 1, 1, 1), np.float32), None, None)
    sinks = rng.standard_normal((1, 3)).astype(np.float32)
    for call in (operands, operands._replace(sinks=Ref(sinks))):
        out, row_max, left, live = scores.divided(
            Problem(1.0, dropout_rate=0.25), call, 0, 2, acc, m, total
        )
        added = 0 if call.sinks is None else np.exp(np.float64(sinks[0, 2]))
        whole = total * 2.0**m + added
        np.testing.assert_allclose(
            np.asarray(left)[total > 0] * 2.0 ** np.asarray(row_max)[total > 0],
            whole[total > 0],
            rtol=1e-5,
        )
        assert np.asarray(live).tolist() == [True, False, True, True, True]
        expected = np.where(total > 0, 2.0**m / whole, 0)[:, None] * acc / 0.75
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)


# Kernels that are traced, not run


@pytest.mark.parametrize(
    "options", [dict(softcap=3.0, sinks=True), dict(slopes=True, dropout_rate=0.3, H=128)], ids=str
)
def test_hopper_gradients_have_input_shapes(options):
    """They also have names for profilers, and no more programs than tiles."""
    case = Case(T=167, S=211, bias=(1, 2, 167, 211), **options)
    operands, do = draw(case)
    vector, count = jnp.zeros((1, 2, 256), jnp.float32), jnp.ones((1, 1, 4), jnp.int32)
    problem = Problem(0.1, case.softcap, case.dropout_rate, case.visible)
    lists = TileLists(jnp.zeros((1, 1, 4, 4), jnp.int32), count, count, rows=count)

    def shapes(kernel: Any, kind: str) -> Any:
        plan = hopper.blocks(kind, case.H, case.Hv)
        call = lambda o, t, s: kernel(problem, o, t, saved=s, blocks=plan)  # noqa: E731
        traced = jax.make_jaxpr(call)(operands, lists, Residuals(do, vector, vector, vector))
        text = str(traced)
        assert f"kernel_name='attention_backward_{kind}'" in text
        if kind == "bias":
            assert f"grid=({2 * 256 // plan.q * 256 // plan.k},)" in text
        return [(x.shape, x.dtype) for x in traced.out_avals]

    assert shapes(hopper.backward_bias, "bias") == [((1, 2, 256, 256), jnp.float32)]
    if HAS_JAX_11:  # its vmap supports references
        expected = [(x.shape, jnp.bfloat16) for x in operands[:3]]
        assert shapes(hopper.backward_single_pass, "single_pass")[:3] == expected
