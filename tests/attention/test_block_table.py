"""Attention to paged keys and values in every implementation, against NumPy in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.devices import on_devices
from tests.support.pages import in_pages
from tests.support.tolerances import assert_near
from transformer_jax import Causal, Window, cache, dot_product_attention, explain_attention
from transformer_jax.attention import fused
from transformer_jax.attention.api import IMPLEMENTATIONS, plan_mask
from transformer_jax.attention.arguments import check_call
from transformer_jax.kernels import Target, cpu, using
from transformer_jax.kernels.contract import Refused, tile_lists
from transformer_jax.kernels.tpu.grid import refuse_long

pytestmark = pytest.mark.usefixtures("quick_compilation")

F32 = 1e-5  # relative to the largest: the same sums in another order

NATIVE = pytest.mark.skipif(isinstance(cpu.library(), str), reason=f"no kernels: {cpu.library()}")
NAMES = ["xla", "blockwise", pytest.param("native", marks=NATIVE), "pallas", None]

B, T, S, N, K, H, HV = 3, 2, 384, 6, 2, 24, 32
LENGTHS = np.array([331, 0, 130])


class Call:
    """Two queries at the end of each row, over pages with `unseen` in all hidden slots."""

    def __init__(self, page, window=None, dtype=None, T=T, unseen=np.nan):
        rng = np.random.default_rng(page)
        shapes = (B, T, N, H), (B, S, K, H), (B, S, K, HV)
        drawn = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        for x in drawn[1:]:
            x[2, :128] = x[0, :128]
        self.query, self.key, self.value = jax.device_put(drawn)
        self.at = LENGTHS[:, None] - T + np.arange(T)  # negative for the row of length 0
        key_positions = np.where(np.arange(S) < LENGTHS[:, None], np.arange(S), -1)
        far = self.at[:, :, None] - key_positions[:, None]
        self.seen = (key_positions >= 0)[:, None] & (far >= 0) & (far < (window or S))
        self.mask = Causal() if window is None else Causal() & Window(window)
        self.positions = jax.device_put(dict(q_positions=self.at, k_positions=key_positions))
        some = self.seen.any(axis=1)
        arrays, names = (self.key, self.value), ("key", "value")
        if dtype == "int8":
            (key, key_scale), (value, value_scale) = map(cache.quantize, arrays)
            self.key, self.value = (
                cache.dequantize(key, key_scale),
                cache.dequantize(value, value_scale),
            )
            arrays = key, value, key_scale, value_scale
            names = *names, "key_scale", "value_scale"
        *pools, self.table = in_pages(rng, page, some, *arrays, unseen=unseen)
        self.pools = dict(zip(names, pools, strict=True))
        self.sinks = jax.device_put(rng.standard_normal(N).astype(np.float32))

    def attend(self, implementation, query=None, pools=None, table=None, **more):
        more = dict(mask=self.mask, sinks=self.sinks, softcap=3.0) | self.positions | more
        return dot_product_attention(
            self.query if query is None else query,
            **(self.pools if pools is None else pools),
            block_table=self.table if table is None else table,
            implementation=implementation,
            **more,
        )

    def expected(self):
        query, key, value, sinks = map(
            oracle.double, (self.query, self.key, self.value, self.sinks)
        )
        return oracle.attention(
            query, key, value, mask=self.seen[:, None], sinks=sinks, softcap=3.0
        )


@pytest.fixture(autouse=True)
def on_a_tpu():
    with using(Target("tpu", interpret=True)):
        yield


CALLS = {
    "pages of 128": dict(page=128),
    "pages of 16": dict(page=16),
    "int8": dict(page=128, dtype="int8"),
    "window": dict(page=128, window=100),
}


@pytest.mark.slow
@pytest.mark.long_except(
    "*-None",
    "int8-native",
    "int8-pallas",
    "pages of 128-blockwise",
    "pages of 128-native",
    "pages of 128-xla",
    "pages of 16-native",
    "pages of 16-xla",
    "window-pallas",
)
@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_paged_attention_matches_contiguous_cache(call, implementation):
    given = Call(**call, unseen=77 if implementation == "pallas" else np.nan)
    assert np.isnan(given.pools.get("key_scale", given.pools["key"])).any()
    out, lse = jax.jit(lambda: given.attend(implementation, return_lse=True))()
    expected = given.expected()
    assert np.abs(expected.out).max() > 0.2 and not np.asarray(out)[1].any()
    assert_near(out, expected.out, F32)
    hidden = np.isneginf(expected.lse)
    assert (np.isneginf(lse) == hidden).all() and hidden[1].all()
    assert_near(np.where(hidden, 0, lse), np.where(hidden, 0, expected.lse), F32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "in_place"),
    [
        (dict(page=128), True),
        (dict(page=384), True),
        (dict(page=128, dtype="int8"), True),
        (dict(page=192), False),
        (dict(page=16), False),
        (dict(page=128, T=23), False),
    ],
    ids=str,
)
def test_few_queries_read_tile_aligned_pages_in_place(call, in_place):
    given = Call(**call)
    text = str(jax.make_jaxpr(lambda: given.attend("pallas"))())
    assert (f"[{B},{S},{K},{H}]" not in text) == in_place
    assert ("attention_decode" in text) == (given.query.shape[1] == T)


@pytest.mark.slow
@pytest.mark.long_except("xla")
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_paged_gradients_match_gathered_keys(implementation):
    """The gradient of a page that two rows share is the sum of both."""
    given = Call(128)
    clean = {name: jnp.nan_to_num(x) for name, x in given.pools.items()}
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, HV)), jnp.float32)

    def loss(query, pools):
        return (given.attend(implementation, query, pools) * weight).sum()

    def loss_of_rows(query, pools):
        rows = {name: x[given.table].reshape(B, S, *x.shape[2:]) for name, x in pools.items()}
        more = dict(mask=given.mask, sinks=given.sinks, softcap=3.0) | given.positions
        return (dot_product_attention(query, **rows, implementation="xla", **more) * weight).sum()

    found, expected = (
        jax.jit(jax.grad(f, (0, 1)))(given.query, clean) for f in (loss, loss_of_rows)
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(y).max() > 0.1
        assert_near(x, y, 1e-4)


MAPPED = {
    "queries": (0, None, None),
    "tables": (None, None, 0),
    "pools": (0, dict(key=0, value=0), None),
    "one pool": (0, dict(key=None, value=0), 0),
    "int8, queries": (0, None, None),
    "int8, scales": (0, dict(key=None, value=None, key_scale=0, value_scale=0), 0),
    "int8, pools": (None, dict(key=0, value=0, key_scale=0, value_scale=0), None),
}


@pytest.mark.slow
@pytest.mark.long_except("one pool", "tables")
@pytest.mark.parametrize("name", MAPPED)
def test_vmapped_calls_read_their_own_pages(name):
    axes, rng = MAPPED[name], np.random.default_rng(2)
    given = Call(128, dtype="int8" if name.startswith("int8") else None, unseen=77)
    queries = given.query[None] + rng.standard_normal((3, 1, 1, 1, H)).astype(np.float32)
    orders = [[0, 2, 0], [2, 0, 2], [0, 0, 2]]  # orders of the rows that have pages
    tables = jnp.stack([given.table[jnp.array(order)] for order in orders])
    scales = jnp.asarray(rng.uniform(1, 2, 3), jnp.float32)

    def three(x):  # int8 has the same numbers
        return jnp.stack([x if x.dtype == jnp.int8 else x * scale for scale in scales])

    pools = {name: three(x) for name, x in given.pools.items()}
    of_pools = axes[1] or {}
    arguments = (
        queries if axes[0] == 0 else given.query,
        {n: pools[n] if of_pools.get(n) == 0 else x for n, x in given.pools.items()},
        tables if axes[2] == 0 else given.table,
    )
    positions = {name: x.at[:].set(x[:1]) for name, x in given.positions.items()}
    positions["k_positions"] = jnp.where(jnp.arange(S) < 130, jnp.arange(S), -1)

    def attend(query, pools, table):
        return given.attend("pallas", query, pools, table, **positions)

    def row(i):
        leaves = zip(arguments, axes, strict=True)
        return [
            {n: x[i] if axis[n] == 0 else x for n, x in given_.items()}
            if isinstance(axis, dict)
            else given_[i] if axis == 0 else given_
            for given_, axis in leaves
        ]  # fmt: skip

    mapped = jax.vmap(attend, axes)
    assert f"[{B},{S},{K},{H}]" not in str(jax.make_jaxpr(mapped)(*arguments))
    found = jax.jit(mapped)(*arguments)
    assert len({float(jnp.nansum(x)) for x in found}) == 3
    for i, x in enumerate(found):
        np.testing.assert_array_equal(x, attend(*row(i)))


@pytest.mark.long
def test_mesh_matches_one_device_and_gathers_only_sharded_pages():
    results = on_devices(4, "-m", "tests.multi_device.pages_on_four", optimise=False)
    assert len(results) == 12
    for case, result in results.items():
        assert result["error"] <= F32, (case, result)
        assert result["gathered"] == (2 if case.endswith("data") else 0), (case, result)


@pytest.mark.slow
def test_invalid_page_entry_is_clipped_to_existing_page():
    """Its keys come from some page, so they must have no influence if they are hidden."""
    given = Call(128, unseen=77)
    assert (given.table < 0).any()
    rng = np.random.default_rng(4)
    clean = {n: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for n, x in given.pools.items()}
    beyond, named = (
        jnp.where(given.table < 0, x, given.table) for x in (1000, len(clean["key"]) - 1)
    )
    positions = dict(k_positions=None, mask=None)
    for name in ("xla", "pallas"):
        np.testing.assert_array_equal(given.attend(name, table=beyond), given.attend(name))
        for table, page in (given.table, jnp.maximum(given.table, 0)), (beyond, named):
            out, expected = (given.attend(name, None, clean, x, **positions) for x in (table, page))
            np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
def test_block_table_passed_to_kernel_contains_only_existing_pages(monkeypatch):
    """The interpreter clamps indices, but a chip would read outside the pool."""
    given = Call(128)
    table = jnp.where(given.table < 0, -7, given.table).at[1, 0].set(2**31 - 1)
    arrays = dict(given.pools, **given.positions, mask=given.mask, block_table=table)
    call = check_call(given.query, **arrays)
    call = replace(call, plan=IMPLEMENTATIONS["pallas"].plan(call))
    passed = []

    def record(problem, where, operands, lists, known):
        passed.append(operands)
        return jnp.zeros(call.query.shape), jnp.zeros(call.query.swapaxes(1, 2).shape[:3])

    monkeypatch.setattr(fused, "fused_attention", record)
    IMPLEMENTATIONS["pallas"].attend(call)
    pages = passed[0].pages
    there = len(given.pools["key"])
    assert int(pages.min()) == 0 and int(pages[1, 0]) == there - 1 == int(pages.max())
    hidden = np.asarray((table < 0) | (table >= there))
    np.testing.assert_array_equal(pages[~hidden], table[~hidden])


@pytest.mark.slow
def test_pages_are_gathered_if_lists_and_table_exceed_scalar_memory():
    """Lists of 403,200 bytes and a table of 383,600 are 368 too many; three rows fewer fit."""

    def attend(rows):
        pool = jax.ShapeDtypeStruct((9, 128, 8, 128), jnp.bfloat16)
        query = jax.ShapeDtypeStruct((rows, 1, 8, 128), jnp.bfloat16)
        table = jax.ShapeDtypeStruct((rows, 137), jnp.int32)
        call = lambda q, k, v, t: dot_product_attention(  # noqa: E731
            q, k, v, mask=Causal(), block_table=t, implementation="pallas"
        )
        return str(jax.make_jaxpr(call)(query, pool, pool, table))

    assert f"bf16[700,{137 * 128},8,128]" in attend(700)
    assert f"bf16[697,{137 * 128},8,128]" not in attend(697)
    lists = tile_lists(np.ones((1, 1, 700, 144), np.int32))
    refuse_long(lists, table_bytes=0)
    with pytest.raises(Refused, match=r"\(1, 1, 700, 144\) and a block table take 786800 bytes"):
        refuse_long(lists, table_bytes=4 * 700 * 137)


@pytest.mark.slow
@pytest.mark.long_except("128")
@pytest.mark.parametrize("page", [128, 16])
def test_paged_calls_share_their_mask_plan(page, monkeypatch):
    given, made, make = Call(page, unseen=77), [], fused.mask_operands
    monkeypatch.setattr(fused, "mask_operands", lambda call: made.append(1) or make(call))
    arrays = dict(given.pools, block_table=given.table, sinks=given.sinks, softcap=3.0)
    mask = plan_mask(
        given.query, mask=given.mask, implementation="pallas", **arrays, **given.positions
    )
    assert len(made) == 1
    out = given.attend("pallas", mask=mask)
    assert len(made) == 1
    assert_near(out, given.expected().out, F32)


def test_explanations_for_paged_and_contiguous_caches_match():
    given = Call(128)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    arrays = jax.tree.map(struct, (given.query, given.pools, given.table))
    found = explain_attention(arrays[0], **arrays[1], block_table=arrays[2], mask=Causal())
    rows = (jax.ShapeDtypeStruct((B, S, K, width), jnp.float32) for width in (H, HV))
    assert dict(found) == dict(explain_attention(arrays[0], *rows, mask=Causal()))
    assert set(found) == set(IMPLEMENTATIONS) and found["pallas"] is None
    none = jax.ShapeDtypeStruct((B, 0), jnp.int32)
    found = explain_attention(arrays[0], **arrays[1], block_table=none)
    assert found["pallas"].startswith("an axis is empty") and found["xla"] is None


@pytest.mark.parametrize(("page", "in_place"), [(128, True), (64, False)])
def test_explanations_report_which_implementation_reads_pages_in_place(page, in_place):
    given = Call(page)
    found = explain_attention(given.query, **given.pools, block_table=given.table, mask=Causal())
    assert found["pallas"] is None
    assert found.reads_pages == ({"pallas"} if in_place else set())
    assert ("pallas: runs, reads pages in place" in str(found).splitlines()) == in_place
    rows = [jax.ShapeDtypeStruct((B, S, K, width), jnp.float32) for width in (H, HV)]
    assert not explain_attention(given.query, *rows).reads_pages
    many = np.zeros((B, 64, N, H), np.float32)  # too many queries for the kernel for few
    assert not explain_attention(many, **given.pools, block_table=given.table).reads_pages


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_rows_without_pages_attend_to_nothing(implementation):
    given = Call(128)
    none = np.asarray(given.table)[:, :0]
    out = given.attend(implementation, table=none, q_positions=None, k_positions=None)
    assert out.shape == (B, T, N, HV) and not np.asarray(out).any()


@pytest.mark.slow_except("dtype", "rows", "axes", "no pages")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(block_table=np.ones((2, 3), np.float32)),
            r"block_table is float32\(2, 3\): must be integers",
        ),
        (
            dict(block_table=np.ones((3, 2), np.int32)),
            r"\(3, 2\): must be integers \(2, M\), the pages of",
        ),
        (
            dict(block_table=np.ones(2, np.int32)),
            r"block_table is int32\(2,\): must be integers \(2",
        ),
        (
            dict(key=np.ones((0, 4, 2, 8), np.float32), value=np.ones((0, 4, 2, 8), np.float32)),
            r"key has shape \(0, 4, 2, 8\): with a block_table it must",
        ),
        (
            dict(value=np.ones((5, 3, 2, 8), np.float32)),
            "value must have the batch, length and heads of key",
        ),
        (
            dict(k_positions=np.arange(4, dtype=np.int32)),
            r"k_positions is .*: must be integers \(12,\) or \(2, ",
        ),
        (dict(block_table=None), "query has 2 batch rows, but key has 5"),
    ],
    ids=["dtype", "rows", "axes", "no pages", "value", "positions", "no table"],
)
def test_mismatched_block_table_is_rejected(changes, message):
    pool, query = np.ones((5, 4, 2, 8), np.float32), np.ones((2, 5, 4, 8), np.float32)
    arguments = dict(key=pool, value=pool, block_table=np.zeros((2, 3), np.int32)) | changes
    with pytest.raises(ValueError, match=message):
        dot_product_attention(query, **jax.device_put(arguments))
