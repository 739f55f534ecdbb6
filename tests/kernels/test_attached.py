"""The kernels on the attached accelerator, skipped without one.

Run this file with `JAX_PLATFORMS=cuda pytest -m ""` or `JAX_PLATFORMS=tpu`. The same suite also
runs in interpreters. With `-p benchmarks.first_light.attached`, each test is reported as it ends.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import contenders, specs
from tests.support.attention_suite import HOPPER_ROUNDS, Bfloat16Suite, draw, reference
from tests.support.pages import in_pages
from tests.support.tolerances import FORWARD_BF16, GRADIENT_BF16, assert_near, assert_same_bits
from transformer_jax.attention.api import dot_product_attention, explain_attention
from transformer_jax.attention.masks import Causal, Mask, Segments, Window
from transformer_jax.cache import dequantize, quantize
from transformer_jax.kernels import Target, target, using

WHERE = target()
pytestmark = pytest.mark.skipif(isinstance(WHERE, str), reason=f"the kernels: {WHERE}")
INTERPRETED = isinstance(WHERE, Target) and WHERE.interpret
REPEATS = 2 if INTERPRETED else 250


class TestAttached(Bfloat16Suite):
    implementation = "pallas"
    known = HOPPER_ROUNDS if isinstance(WHERE, Target) and WHERE.name == "hopper" else {}


class TestAttachedAmpere(TestAttached):
    """The kernels for other NVIDIA GPUs, which also run on Hopper."""

    known: ClassVar[dict[str, str]] = {}

    @pytest.fixture(autouse=True)
    def kernels(self):
        if not isinstance(WHERE, Target) or WHERE.name == "tpu":
            pytest.skip("needs an NVIDIA GPU")
        with using(replace(WHERE, name="ampere")):
            yield


class TestAttachedSinglePass(TestAttached):
    """With two tiles of keys, because a sum of two terms is bit-identical in either order."""

    implementation = "pallas_unordered"


def program(
    arrays: dict[str, jax.Array],
    mask: Mask | None,
    implementation: str = "pallas",
    **settings: Any,
) -> Callable[[], tuple]:
    """Return a compiled function that returns (out, lse, dq, dk, dv)."""
    inputs = [arrays[name] for name in ("query", "key", "value")]
    if implementation == "pallas_unordered":  # only for narrow heads on Hopper
        reason = explain_attention(*inputs, mask=mask, return_lse=True, **settings)[implementation]
        if reason is not None:
            pytest.skip(reason)

    @jax.jit
    def run(query, key, value):
        def attend(*inputs):
            return dot_product_attention(
                *inputs, mask=mask, implementation=implementation, return_lse=True, **settings
            )

        results, pull = jax.vjp(attend, query, key, value)
        return *results, *pull((arrays["out_cotangent"], arrays["lse_cotangent"]))

    return functools.partial(run, *inputs)


SHAPES = {
    "many rows": dict(batch=60, queries=130, keys=130, heads=4, kv_heads=4, dim=64, value_dim=64),
    "groups": dict(batch=2, queries=1023, keys=1023, heads=8, kv_heads=2, dim=128, value_dim=128),
    "wide": dict(batch=1, queries=515, keys=1025, heads=2, kv_heads=2, dim=256, value_dim=256),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "window in documents"])
@pytest.mark.parametrize("name", SHAPES)
def test_250_runs_are_bit_identical(name, masked):
    arrays = draw(1, dtype="bfloat16", **SHAPES[name])
    S = SHAPES[name]["keys"]
    mask = Causal() & Window(100) & Segments(jnp.arange(S)[None] // 300) if masked else Causal()
    run = program(arrays, mask, softcap=30.0 if masked else None)
    first = run()
    for _ in range(REPEATS - 1):
        again = run()
        assert all(bool((x == y).all()) for x, y in zip(again, first, strict=True))
    for x in first:
        assert_same_bits(x, x)  # fails if any is NaN


def test_repeated_single_pass_runs_differ_only_in_last_dq_bits():
    arrays = draw(1, dtype="bfloat16", **SHAPES["groups"])
    single_pass = program(arrays, Causal(), "pallas_unordered")
    first = single_pass()
    for _ in range(REPEATS // 5):
        out, lse, dq, dk, dv = single_pass()
        for x, y in zip((out, lse, dk, dv), (*first[:2], *first[3:]), strict=True):
            assert_same_bits(x, y)
        assert_near(dq, np.asarray(first[2].astype(jnp.float32)), GRADIENT_BF16)


@pytest.mark.parametrize("implementation", ["pallas", "pallas_unordered"])
@pytest.mark.parametrize("H", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(704, 704), (832, 1025), (2047, 2049)], ids=str)
def test_long_odd_lengths_match_reference_at_every_width(H, lengths, implementation):
    T, S = lengths
    arrays = draw(
        H + T, batch=1, queries=T, keys=S, heads=2, kv_heads=1, dim=H, value_dim=H, dtype="bfloat16"
    )
    seen = np.tri(T, S, dtype=bool)[None, None]
    names = ("out", "lse", "dquery", "dkey", "dvalue")
    expected = reference(arrays, seen)
    for name, x in zip(names, program(arrays, Causal(), implementation)(), strict=True):
        limit = FORWARD_BF16 if name in ("out", "lse") else GRADIENT_BF16
        assert_near(x, expected[name], limit, name)


@pytest.mark.parametrize("H", [64, 128, 256])
def test_mixed_warp_rescaling_matches_reference(H):
    """In alternate groups of 16 rows, the maximum rises by more than the slack with each tile."""
    assert isinstance(WHERE, Target)
    if WHERE.name != "hopper":
        pytest.skip("on Hopper alone")
    tiles = replace(WHERE.backend.blocks("forward", H, H), slack=8.0)
    S = 5 * tiles.k + 7
    arrays = draw(
        H, batch=1, queries=S, keys=S, heads=2, kv_heads=1, dim=H, value_dim=H, dtype="bfloat16"
    )
    rows = jnp.arange(S)[:, None]
    steps = (rows // tiles.k * 0.125 * H**0.5).astype(jnp.bfloat16)
    arrays["query"] = arrays["query"].at[..., 0].set(jnp.where(rows // 16 % 2, 0, 64))
    arrays["key"] = arrays["key"].at[..., 0].set(steps)
    expected = reference(arrays, np.tri(S, dtype=bool)[None, None])
    with using(replace(WHERE, blocks=(("forward", tiles),))):
        out, lse, *_ = program(arrays, Causal())()
    assert_near(out, expected["out"], FORWARD_BF16)
    assert_near(lse, expected["lse"], FORWARD_BF16)


@pytest.mark.parametrize("case", specs.attention_cases("edge"), ids=lambda case: case.name)
def test_benchmark_edge_cases_match_reference(case):
    narrow = [x.astype(jnp.bfloat16) for x in case.inputs()]

    def run(implementation, query, key, value, *more):
        settings = contenders.settings(case) | case.learned(*more)
        return dot_product_attention(
            query, key, value, implementation=implementation, return_lse=True, **settings
        )

    out, lse = run("pallas", *narrow)
    expected, expected_lse = run("xla", *(x.astype(jnp.float32) for x in narrow))
    live = ~np.isneginf(np.asarray(expected_lse))
    assert (np.isneginf(np.asarray(lse)) == ~live).all()
    assert_near(np.asarray(out)[live], np.asarray(expected)[live], FORWARD_BF16)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "pages"])
def test_decoding_over_a_cache_matches_reference(kind):
    """The rows of the cache have different lengths. Unused pages contain NaN."""
    S, page = (384, 128) if INTERPRETED else (8192, 128)
    arrays = draw(
        11, batch=4, queries=1, keys=S, heads=8, kv_heads=2, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    last = np.array([0, S // 3, S - 2, S - 1])
    held = np.arange(S)[None] <= last[:, None]
    settings = dict(
        q_positions=jnp.asarray(last[:, None], jnp.int32),
        k_positions=jnp.asarray(np.where(held, np.arange(S)[None], -1), jnp.int32),
    )
    expected, names = arrays, ("key", "value")
    if kind == "int8":
        pairs = {name: quantize(arrays[name]) for name in names}
        arrays = arrays | {name: x for name, (x, _) in pairs.items()}
        settings |= {f"{name}_scale": scale for name, (_, scale) in pairs.items()}
        wide = {name: dequantize(x, scale, "bfloat16") for name, (x, scale) in pairs.items()}
        expected = expected | wide
    if kind == "pages":
        keys = (arrays[name] for name in names)
        *pools, table = in_pages(np.random.default_rng(12), page, held, *keys, unseen=77)
        arrays = arrays | dict(zip(names, pools, strict=True))
        settings |= {"block_table": table}
    out, lse = jax.jit(
        lambda *inputs: dot_product_attention(
            *inputs, mask=Causal(), implementation="pallas", return_lse=True, **settings
        )
    )(*(arrays[name] for name in ("query", *names)))
    found = reference(expected, held[:, None, None])
    assert_near(out, found["out"], FORWARD_BF16)
    assert_near(lse, found["lse"], FORWARD_BF16)


def test_few_queries_of_grouped_heads_match_reference():
    """Queries of the heads of a group are rows of one tile."""
    T, S = 13, 704
    arrays = draw(
        13, batch=2, queries=T, keys=S, heads=16, kv_heads=2, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    at = np.arange(S - T, S)
    found = program(arrays, Causal(), q_positions=jnp.asarray(at, jnp.int32))()
    expected = reference(arrays, (at[:, None] >= np.arange(S))[None, None])
    for name, x in zip(("out", "lse", "dquery", "dkey", "dvalue"), found, strict=True):
        assert_near(x, expected[name], GRADIENT_BF16 if name[0] == "d" else FORWARD_BF16, name)


def test_some_of_65_536_queries_match_plain_attention():
    """The cotangents of other queries are zero, so the gradients of keys are sums over these."""
    S = 640 if INTERPRETED else 65536
    arrays = draw(
        7, batch=1, queries=S, keys=S, heads=2, kv_heads=1, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    rows = np.unique([*np.linspace(0, S - 1, 193).astype(int), *range(S - 64, S)])
    chosen = np.isin(np.arange(S), rows)
    for name in ("out_cotangent", "lse_cotangent"):
        x = arrays[name]
        seen = chosen.reshape(1, S, *[1] * (x.ndim - 2))
        arrays[name] = jnp.where(seen, x, jnp.zeros((), x.dtype))
    out, lse, dq, dk, dv = program(arrays, Causal())()
    assert not np.asarray(dq, np.float32)[:, ~chosen].any()
    few = {n: x if n in ("key", "value") else x[:, rows] for n, x in arrays.items()}
    few = {n: x.astype(jnp.float32) for n, x in few.items()}  # products of the highest precision
    expected = program(few, Causal(), "xla", q_positions=jnp.asarray(rows, jnp.int32))()
    found = out[:, rows], lse[:, rows], dq[:, rows], dk, dv
    for x, y, limit in zip(found, expected, [FORWARD_BF16] * 2 + [GRADIENT_BF16] * 3, strict=True):
        assert_near(x, np.asarray(y), limit)


@pytest.mark.parametrize(("H", "implementation"), [(256, "pallas"), (128, "pallas_unordered")])
def test_automatic_barriers_change_no_bit(H, implementation, monkeypatch):
    """The interpreter cannot detect a race between the warps of a warpgroup, but this test can."""
    if not isinstance(WHERE, Target) or WHERE.name != "hopper":
        pytest.skip("on Hopper alone")
    arrays = draw(
        H, batch=1, queries=704, keys=704, heads=4, kv_heads=2, dim=H, value_dim=H,
        dtype="bfloat16",
    )  # fmt: skip
    programs = importlib.import_module("transformer_jax.kernels.hopper.programs")
    usual = programs.compiler_params
    with monkeypatch.context() as patch:
        patch.setattr(programs, "compiler_params", lambda auto_barriers: usual(auto_barriers=True))
        ordered = program(arrays, Causal(), implementation)()
    jax.clear_caches()  # otherwise, the program with automatic barriers is reused
    run = program(arrays, Causal(), implementation)
    for _ in range(REPEATS // 5):
        for index, (x, y) in enumerate(zip(run(), ordered, strict=True)):
            if index != 2 or implementation == "pallas":  # dq is a sum in any order
                assert_same_bits(x, y)
