"""Time of the gated delta rule in chunks and with a scan over tokens, forward and with gradients.

    python -m benchmarks.linear_attention --out benchmarks/results/linear_attention.json

The heads are those of Qwen3-Next, 16 for keys and 32 for values, all of width 128. The gradients
use an eighth of them, because the gradient of the scan stores several copies of the state of every
token. Longer sequences than 4,096 tokens run only in chunks, to show that the time is linear.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import (
    FASTER,
    ONE_CORE,
    Contender,
    environment,
    headline,
    interleave,
    limits,
    of_jax,
    prepare,
    speedup,
    table,
    write,
)
from transformer_jax.attention import gated_delta_rule

KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
SIZES = (1, 32, 64)
LENGTHS = (1024, 4096, 16384)
LONGEST_SCAN = 4096
DIRECTIONS = "forward", "forward and backward"


def inputs(T: int, key_heads: int, value_heads: int, per_key: bool) -> list[jax.Array]:
    """Return the arguments of `gated_delta_rule`, with keys of norm 1."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, T, key_heads, WIDTH))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((1, T, value_heads, WIDTH))
    channels = (WIDTH,) if per_key else ()
    decay = -rng.uniform(0, 1, (1, T, value_heads, *channels))
    beta = rng.uniform(0, 1, (1, T, value_heads))
    return [jnp.asarray(x, jnp.float32) for x in (query, key, value, decay, beta)]


def program(chunk_size: int, direction: str) -> Callable[..., Any]:
    call = partial(gated_delta_rule, chunk_size=chunk_size)
    if direction == "forward":
        return jax.jit(call)
    return jax.jit(jax.grad(lambda *x: (call(*x) ** 2).sum(), argnums=range(5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="128 tokens only, three rounds")
    parser.add_argument("--seconds", type=float, default=20.0, help="about the longest of a case")
    parser.add_argument("--one-core", action="store_true", help=ONE_CORE)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    clock, before, results = prepare(one_core=options.one_core), environment(), {}
    print(headline(before))
    before["limits"] = limits("float32", clock)
    for direction in DIRECTIONS:
        heads = KEY_HEADS, VALUE_HEADS
        if direction != "forward":
            heads = KEY_HEADS // 8, VALUE_HEADS // 8
        for decay in ("per head", "per key channel"):
            rows = []
            for T in (128,) if options.quick else LENGTHS:
                arrays = inputs(T, *heads, decay == "per key channel")
                sizes = SIZES if T <= LONGEST_SCAN else (64,)
                programs = {size: program(size, direction) for size in sizes}
                contenders: list[Contender] = [
                    of_jax(str(size), partial(one, *arrays)) for size, one in programs.items()
                ]
                rounds = 3 if options.quick else 10
                times = interleave(
                    contenders, rounds=rounds, seconds=options.seconds, clock=clock
                )  # fmt: skip
                for size in sizes:
                    timing = times[str(size)]
                    ratio = speedup(timing, times["1"]) if "1" in times else None
                    name = f"{direction}, decay {decay}, T {T}, chunks of {size}"
                    results[name] = timing.summary() | {"speedup": ratio}
                    shown = "" if ratio is None else f"{ratio:.2f}"
                    rows.append((f"{T}, {size}", f"{timing.median * 1e3:.1f} ms", shown))
            print(f"\n{direction}, {heads[0]} and {heads[1]} heads of {WIDTH}, decay {decay}")
            header = ("T, chunk size", "time", f"{FASTER} as the scan")
            print(table(header, rows), flush=True)
            if options.out:  # after each table, because the scan takes minutes
                write(options.out, (__doc__ or "").splitlines()[0], before, results)


if __name__ == "__main__":
    main()
