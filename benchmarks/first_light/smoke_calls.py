"""Run one check of `smoke` in this process.

    python -m benchmarks.first_light.smoke_calls "slack 8"

Results are compared with NumPy in float64, using the tolerances of the kernel tests. For 65,536
tokens, some queries are compared with "xla" in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.ablations import automatic_barriers
from tests.support import oracle
from tests.support.attention_suite import draw, reference
from tests.support.pages import in_pages
from tests.support.tolerances import (
    FORWARD_BF16,
    GRADIENT_BF16,
    assert_same_bits,
    largest_error,
)
from transformer_jax import ALiBi, dot_product_attention, explain_attention
from transformer_jax.attention.biases import alibi_slopes
from transformer_jax.attention.masks import Causal, Mask, Segments, Window
from transformer_jax.cache import dequantize, quantize
from transformer_jax.kernels import Name, Target, target, using

Arrays = dict[str, jax.Array]
Shares = dict[str, float]
"""Errors relative to the tolerances of the tests. Errors above 1 are too large."""
INPUTS = "query", "key", "value"
NAMES = "out", "lse", "dquery", "dkey", "dvalue"


@dataclass(frozen=True)
class Where:
    """Sizes of a check on the device or in a rehearsal."""

    rehearsed: bool = False

    def implementation(self, name: str) -> str:
        return rehearsal.implementation(name, self.rehearsed)

    def length(self, n: int) -> int:
        """Return a sequence length, which is shorter in a rehearsal."""
        return min(n, 100) if self.rehearsed else n

    def arrays(self, length: int, H: int, *, heads: int = 2, kv_heads: int = 1) -> Arrays:
        """Draw inputs and cotangents in bfloat16."""
        n = self.length(length)
        return draw(
            H + length, batch=1, queries=n, keys=n, heads=heads, kv_heads=kv_heads, dim=H,
            value_dim=H, dtype="bfloat16",
        )  # fmt: skip


def program(
    arrays: Arrays, mask: Mask | None, implementation: str, gradients: bool = True, **settings: Any
) -> Callable[[], dict[str, jax.Array]]:
    """Return a compiled function that returns (out, lse) and the gradients of the inputs."""
    inputs = [arrays[name] for name in INPUTS]
    reason = explain_attention(*inputs, mask=mask, return_lse=True, **settings)[implementation]
    assert reason is None, f"{implementation!r} refuses: {reason}"

    def attend(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return dot_product_attention(
            *inputs, mask=mask, implementation=implementation, return_lse=True, **settings
        )

    @jax.jit
    def run(arrays: Arrays) -> dict[str, jax.Array]:
        inputs = [arrays[name] for name in INPUTS]
        if not gradients:
            return dict(zip(NAMES[:2], attend(*inputs), strict=True))
        results, pull = jax.vjp(attend, *inputs)
        back = pull((arrays["out_cotangent"], arrays["lse_cotangent"]))
        return dict(zip(NAMES, (*results, *back), strict=True))

    return lambda: jax.block_until_ready(run(arrays))


def shares(results: Mapping[str, Any], expected: Mapping[str, Any]) -> Shares:
    """Return each error relative to its limit. Raise AssertionError if any of them is above 1."""
    found = {}
    for name, x in results.items():
        limit = FORWARD_BF16 if name in NAMES[:2] else GRADIENT_BF16
        top = float(np.abs(np.asarray(expected[name], np.float64)).max())
        found[name] = largest_error(x, expected[name]) / (limit * top)
    wrong = {name: f"{x:.3g}" for name, x in found.items() if not x <= 1}
    assert not wrong, f"error as a part of what is allowed: {wrong}"
    return found


def causal(where: Where, length: int, H: int, implementation: str, gradients: bool) -> Shares:
    """Compare a causal call with the result in float64."""
    arrays = where.arrays(length, H)
    run = program(arrays, Causal(), where.implementation(implementation), gradients)
    return shares(run(), reference(arrays, _causal(arrays)))


def _causal(arrays: Arrays) -> np.ndarray:  # bool[1, 1, T, S]
    return np.tri(arrays["query"].shape[1], arrays["key"].shape[1], dtype=bool)[None, None]


def single_pass_repeats(where: Where) -> Shares:
    """Repeat the single-pass backward pass. All results except dq must be bit-identical."""
    arrays = where.arrays(704, 128, heads=4, kv_heads=2)
    run = program(arrays, Causal(), where.implementation("pallas_unordered"))
    first = run()
    found = shares(first, reference(arrays, _causal(arrays)))
    dq = {"dquery": np.asarray(first["dquery"].astype(jnp.float32))}
    moved = 0.0
    for _ in range(2 if where.rehearsed else 50):
        again = run()
        for name in ("out", "lse", "dkey", "dvalue"):
            assert_same_bits(again[name], first[name], name)
        moved = max(moved, shares({"dquery": again["dquery"]}, dq)["dquery"])
    return found | {"dquery of another run": moved}


def own_barriers(where: Where) -> Shares:
    """Run repeatedly without automatic barriers. The results must equal those with barriers.

    Results must be equal bit for bit, except for an unordered dq. The interpreter cannot detect a
    race between the warps of one warpgroup, but this check can.
    """
    found = {}
    for H, name in ((256, "pallas"), (128, "pallas_unordered")):
        arrays = where.arrays(704, H, heads=4, kv_heads=2)
        given = arrays, Causal(), where.implementation(name)
        with automatic_barriers():
            ordered = program(*given)()
        jax.clear_caches()  # otherwise, the program with automatic barriers is reused
        run = program(*given)
        kept = [n for n in NAMES if name == "pallas" or n != "dquery"]
        for _ in range(2 if where.rehearsed else 50):
            again = run()
            for result in kept:
                assert_same_bits(again[result], ordered[result], f"{result}, H {H}")
        errors = shares(again, reference(arrays, _causal(arrays)))
        found |= {f"{result}, H {H}": error for result, error in errors.items()}
    return found


def slack(where: Where) -> Shares:
    """Use row maxima that increase by more than the slack in half of the warps."""
    chosen, H = target(), 128
    assert isinstance(chosen, Target), chosen
    tiles = replace(chosen.backend.blocks("forward", H, H, 2), slack=8.0)
    arrays = where.arrays(5 * tiles.k + 7, H)
    rows = jnp.arange(arrays["query"].shape[1])
    span = 32 if where.rehearsed else tiles.k
    steps = (rows // span * 0.125 * H**0.5).astype(jnp.bfloat16)
    lead = jnp.where(rows // 16 % 2 > 0, 0, 64)
    arrays["query"] = arrays["query"].at[..., 0].set(lead.astype(jnp.bfloat16)[None, :, None])
    arrays["key"] = arrays["key"].at[..., 0].set(steps[None, :, None])
    with using(replace(chosen, blocks=(("forward", tiles),))):
        found = program(arrays, Causal(), where.implementation("pallas"), gradients=False)()
    return shares(found, reference(arrays, _causal(arrays)))


def alibi(where: Where) -> Shares:
    """Add an ALiBi bias with the published slopes."""
    arrays = where.arrays(704, 128)
    slopes = np.asarray(alibi_slopes(2), np.float64)
    at = np.arange(arrays["query"].shape[1])
    bias = ALiBi(jnp.asarray(slopes, jnp.float32))
    run = program(arrays, Causal(), where.implementation("pallas"), bias=bias)
    biased = {**arrays, "bias": oracle.alibi(slopes, at, at)}
    return shares(run(), reference(biased, _causal(arrays)))


def window(where: Where) -> Shares:
    """Use a two-sided window."""
    arrays = where.arrays(704, 128)
    at = np.arange(arrays["query"].shape[1])
    left, right = 131, 67
    distance = at[:, None] - at[None]
    seen = (distance < left) & (distance > -right)
    run = program(arrays, Window(left, right), where.implementation("pallas"))
    return shares(run(), reference(arrays, seen[None, None]))


def documents(where: Where) -> Shares:
    """Use capped scores within packed documents."""
    arrays = where.arrays(704, 128)
    length = arrays["query"].shape[1]
    ids = np.searchsorted([37, 211, 500], np.arange(length), side="right")
    seen = _causal(arrays) & (ids[:, None] == ids[None])
    mask = Causal() & Segments(jnp.asarray(ids, jnp.int32)[None])
    run = program(arrays, mask, where.implementation("pallas"), softcap=30.0)
    return shares(run(), reference(arrays, seen, softcap=30.0))


def long(where: Where) -> Shares:
    """Attend over 65,536 tokens and compare some queries and their gradients with "xla".

    The cotangent is zero for the other queries, so the gradients of keys and values are sums over
    the compared queries.
    """
    length = 640 if where.rehearsed else 65536
    arrays = draw(
        7, batch=1, queries=length, keys=length, heads=2, kv_heads=1, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    rows = np.unique([*np.linspace(0, length - 1, 193).astype(int), *range(length - 64, length)])
    looked_at = jnp.zeros((length,), bool).at[rows].set(True)[None, :, None]
    for name in ("out_cotangent", "lse_cotangent"):
        x = arrays[name]
        arrays[name] = jnp.where(looked_at[..., None] if x.ndim == 4 else looked_at, x, 0)
    found = program(arrays, Causal(), where.implementation("pallas"))()
    others = jnp.where(looked_at[..., None], 0, found["dquery"])
    assert not bool(others.any()), "queries without a cotangent have a gradient"
    few = {name: x if name in ("key", "value") else x[:, rows] for name, x in arrays.items()}
    wide = {name: x.astype(jnp.float32) for name, x in few.items()}
    expected = program(
        wide, Causal(), "xla", q_positions=jnp.asarray(rows, jnp.int32)
    )()  # in f32, the products have the highest precision
    at_rows = {n: x if n in ("dkey", "dvalue") else x[:, rows] for n, x in found.items()}
    return shares(at_rows, {name: np.asarray(x) for name, x in expected.items()})


PAGE = 128


def decode(where: Where, int8: bool = False, paged: bool = False) -> Shares:
    """Decode one query per row over the filled part of a cache whose rows have different lengths.

    Pages are in random order in the pool, and unused pages contain NaN.
    """
    S = where.length(8200)
    S = -(-S // PAGE) * PAGE if paged else S
    arrays = draw(
        11, batch=4, queries=1, keys=S, heads=8, kv_heads=2, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    last = np.array([0, S // 3, S - 2, S - 1])
    held = np.arange(S)[None] <= last[:, None]
    places = dict(
        q_positions=jnp.asarray(last[:, None], jnp.int32),
        k_positions=jnp.asarray(np.where(held, np.arange(S)[None], -1), jnp.int32),
    )
    expected = arrays
    if int8:
        (key, k_scale), (value, v_scale) = (quantize(arrays[name]) for name in INPUTS[1:])
        arrays = arrays | {"key": key, "value": value}
        places |= {"key_scale": k_scale, "value_scale": v_scale}
        wide = [dequantize(x, scale, "bfloat16") for x, scale in ((key, k_scale), (value, v_scale))]
        expected = expected | dict(zip(INPUTS[1:], wide, strict=True))
    if paged:
        keys = (arrays[name] for name in INPUTS[1:])
        *pools, table = in_pages(np.random.default_rng(12), PAGE, held, *keys, unseen=77)
        arrays = arrays | dict(zip(INPUTS[1:], pools, strict=True))
        places |= {"block_table": table}
    run = program(arrays, Causal(), where.implementation("pallas"), gradients=False, **places)
    return shares(run(), reference(expected, held[:, None, None]))


def few_queries(where: Where) -> Shares:
    """Differentiate a few queries of grouped heads, which are packed as rows of one tile."""
    length = where.length(704)
    arrays = draw(
        13, batch=2, queries=13, keys=length, heads=16, kv_heads=2, dim=128, value_dim=128,
        dtype="bfloat16",
    )  # fmt: skip
    at = np.arange(length - 13, length)
    places = dict(q_positions=jnp.asarray(at, jnp.int32))
    run = program(arrays, Causal(), where.implementation("pallas"), **places)
    return shares(run(), reference(arrays, (at[:, None] >= np.arange(length))[None, None]))


def one_tile(where: Where, implementation: str, gradients: bool) -> Shares:
    """Compute 128 queries of one head over 128 keys."""
    arrays = where.arrays(128, 64, heads=1)
    run = program(arrays, Causal(), where.implementation(implementation), gradients)
    return shares(run(), reference(arrays, _causal(arrays)))


CHECKS: dict[str, Callable[[Where], Shares]] = {
    "one tile, forward": lambda where: one_tile(where, "pallas", False),
    **{
        f"causal 704, forward, H {H}": lambda where, H=H: causal(where, 704, H, "pallas", False)
        for H in (64, 128, 256)
    },
    **{
        f"causal 704, gradients, H {H}": lambda where, H=H: causal(where, 704, H, "pallas", True)
        for H in (64, 128, 256)
    },
    "one tile, single-pass": lambda where: one_tile(where, "pallas_unordered", True),
    "single-pass, 50 runs": single_pass_repeats,
    "own barriers, 50 runs": own_barriers,
    "slack 8": slack,
    "decode, a cache": decode,
    "decode, a cache of int8": lambda where: decode(where, int8=True),
    "decode, a paged cache": lambda where: decode(where, paged=True),
    "few queries of groups, gradients": few_queries,
    "ALiBi, gradients": alibi,
    "two-sided window, gradients": window,
    "softcap and documents, gradients": documents,
    "65,536 tokens, gradients": long,
}


def main() -> None:
    """Run one check in this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument(rehearsal.FLAG, action="store_true", help=rehearsal.SAID)
    parser.add_argument("--kernels", choices=get_args(Name), help="instead of the device's own")
    options = parser.parse_args()
    where = Where(options.rehearse)

    def one() -> None:
        with rehearsal.kernels(where.rehearsed, options.kernels):
            checks.report({"shares": CHECKS[options.check](where)})

    checks.main_of(one)


if __name__ == "__main__":
    main()
