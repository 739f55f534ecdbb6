"""Which tile sizes are fastest on the attached chip? Prints rows for `kernels/chips.py`.

    python -m benchmarks.tune_attention
    python -m benchmarks.tune_attention --heads 16:4 --dims 128:128 --lengths 8192 --dtype bfloat16
    python -m benchmarks.tune_attention --candidates 128:128:2 128:128:2:8  # tiles, stages, slack

The kernels are tuned one after another, while the others have their current sizes: "forward", then
"dq" and "dkdv" in the backward pass, then "single_pass", which replaces both. Every candidate is
compiled, compared with the current sizes, and timed alternately with the other candidates. A
candidate that does not compile is reported with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from transformer_jax import dot_product_attention, explain_attention
from transformer_jax.attention.masks import Causal
from transformer_jax.kernels import Target, target, using
from transformer_jax.kernels.chips import blocks
from transformer_jax.kernels.contract import Blocks, Kind

SEARCHED: tuple[Kind, ...] = ("forward", "dq", "dkdv", "single_pass", "single_pass_rows")
_TPU = [Blocks(q, k) for q in (256, 512, 1024) for k in (256, 512, 1024, 2048)]


def _hopper(queries: tuple[int, ...], keys: tuple[int, ...], slack: float = 0.0) -> list[Blocks]:
    return [Blocks(*sizes, slack) for sizes in itertools.product(queries, keys, (2, 3))]


CANDIDATES: dict[str, dict[Kind, list[Blocks]]] = {
    "tpu": dict.fromkeys(SEARCHED, _TPU),
    "hopper": {  # multiples of 64, because other numbers of keys do not compile or skip keys
        "forward": _hopper((128,), (64, 128), 8.0) + _hopper((64, 128, 192), (64, 128, 192)),
        "dq": _hopper((64, 128, 192), (64, 128)),
        "dkdv": _hopper((64, 128), (64, 128)),
        "single_pass": _hopper((64, 128), (128,)),
    },
    "ampere": {  # 64 rows per program
        "forward": [Blocks(64, k, stages) for k in (16, 32, 64, 128) for stages in (1, 2)],
        "dq": [Blocks(64, k, 1) for k in (16, 32, 64)],
        "dkdv": [Blocks(q, 64, 1) for q in (16, 32, 64)],
    },
}
TOLERANCE = 0.05  # relative to the largest value; allows for other orders of summation


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    end = time.perf_counter() + 60 * options.minutes
    where = target()
    if isinstance(where, str):
        raise SystemExit(f"nothing to tune: {where}")
    before = timing.environment()
    print(timing.headline(before))
    failed = []
    for length, (H, Hv) in itertools.product(options.lengths, options.dims):
        best = where
        for kind in options.kernels:
            print(f"# {kind}, causal S {length}, heads {options.heads}, {options.dtype}")
            if reason := refused(best, kind, length, H, Hv, options):
                print(f"#   {reason}")
                continue
            try:
                for line, found in search(best, kind, length, H, Hv, options, end):
                    print(line, flush=True)
                    best = found or best
            except Exception as error:  # the other searches must continue
                print(f"#   {timing.brief(error)}", flush=True)
                failed.append(f"{kind} {H} {length}")
    if failed:
        raise SystemExit(f"not searched: {', '.join(failed)}")


def refused(
    where: Target, kind: Kind, length: int, H: int, Hv: int, options: argparse.Namespace
) -> str | None:
    fits = where.backend.sums_fit(length, H, Hv)
    if kind in ("dq", "dkdv", "single_pass_rows") and fits != (kind == "single_pass_rows"):
        return (
            f"{kind} is not taken: dk and dv of all keys {'' if fits else 'do not '}fit fast memory"
        )
    N, K = options.heads
    inputs = [
        jax.ShapeDtypeStruct((options.batch, length, heads, width), options.dtype)
        for heads, width in ((N, H), (K, H), (K, Hv))
    ]
    with using(where):
        return explain_attention(*inputs, mask=Causal())[_implementation(kind)]


def _implementation(kind: Kind) -> str:
    return "pallas_unordered" if kind == "single_pass" else "pallas"


def search(
    where: Target, kind: Kind, length: int, H: int, Hv: int, options: argparse.Namespace, end: float
) -> Iterator[tuple[str, Target | None]]:
    """Yield lines to print, the last one with the target that has the fastest tiles.

    No candidate starts after `end`.
    """
    N, K = options.heads
    inputs = _inputs(options.batch, length, N, K, H, Hv, options.dtype)
    width = jnp.dtype(options.dtype).itemsize
    present = blocks(where, kind, H, Hv, width, length, length)
    others = [b for b in options.candidates or CANDIDATES[where.name][kind] if b != present]
    targets = {b: _with(where, kind, b) for b in (present, *others)}
    contenders, expected = [], None
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        made = {b: pool.submit(_compiled, t, kind, inputs, end) for b, t in targets.items()}
    for tiles, compiled in made.items():
        try:
            run = compiled.result()
            result = jax.block_until_ready(run(*inputs))
        except Exception as error:  # compilers raise errors of any type if sizes do not fit
            if tiles == present:
                raise
            yield f"#   {tiles}: {timing.brief(error)}", None
            continue
        expected = result if expected is None else expected
        wrong = _difference(result, expected)
        if not wrong <= TOLERANCE:
            yield f"#   {tiles}: differs by {wrong:.3g}: left out", None
            continue
        contenders.append(timing.of_jax(str(tiles), functools.partial(run, *inputs)))
    taken = timing.interleave(contenders, rounds=options.repeats, seconds=options.seconds)
    names = {str(b): b for b in targets}
    fastest = min(taken, key=lambda name: taken[name].median)
    for name, t in sorted(taken.items(), key=lambda item: item[1].median):
        ratio = timing.speedup(t, taken[str(present)])
        yield f"#   {name}: {t.median * 1e3:.3f} ms, {ratio:.2f}x the present", None
    row = (where.name, where.chip, kind, H, Hv, width)
    note = f"causal S {length}: {taken[fastest].median * 1e3:.3f} ms"
    yield f"    {row!r}: {_written(names[fastest])},  # {note}", targets[names[fastest]]


def _with(where: Target, kind: Kind, tiles: Blocks) -> Target:
    return dataclasses.replace(where, blocks=tuple((dict(where.blocks) | {kind: tiles}).items()))


def _written(tiles: Blocks) -> str:
    slack = f", slack={tiles.slack}" if tiles.slack else ""
    return f"Blocks({tiles.q}, {tiles.k}, {tiles.stages}{slack})"


def _inputs(B: int, S: int, N: int, K: int, H: int, Hv: int, dtype: str) -> tuple[jax.Array, ...]:
    """Return a standard normal query, key, value, and cotangent."""
    shapes = (B, S, N, H), (B, S, K, H), (B, S, K, Hv), (B, S, N, Hv)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def _compiled(
    where: Target, kind: Kind, inputs: tuple[jax.Array, ...], end: float
) -> Callable[..., Any]:
    """Compile the forward pass, or both passes, for a target. Raise TimeoutError after `end`."""
    if time.perf_counter() > end:
        raise TimeoutError("left out, the minutes are over")

    def attend(query, key, value):
        with using(where):
            return dot_product_attention(
                query, key, value, mask=Causal(), implementation=_implementation(kind)
            )

    def both(query, key, value, cotangent):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(cotangent)

    run = jax.jit(both if kind != "forward" else lambda *x: (attend(*x[:3]),))
    return run.lower(*inputs).compile()


def _difference(result: Any, expected: Any) -> float:
    pairs = zip(result, expected, strict=True)
    ratios = [
        float(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max() / jnp.abs(y).max())
        for x, y in pairs
    ]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def _options(argv: list[str] | None) -> argparse.Namespace:
    def pair(text: str) -> tuple[int, int]:
        first, _, second = text.partition(":")
        return int(first), int(second or first)

    def tiles(text: str) -> Blocks:
        numbers = text.split(":")
        return Blocks(*map(int, numbers[:3]), *map(float, numbers[3:]))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=pair, default=(16, 16), metavar="N:K")
    parser.add_argument("--dims", type=pair, nargs="+", default=[(64, 64), (128, 128)], metavar="H")
    parser.add_argument("--kernels", nargs="+", choices=SEARCHED, default=SEARCHED)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--candidates", type=tiles, nargs="+", metavar="Q:K:STAGES[:SLACK]")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all searches, about")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="for one search, about")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
