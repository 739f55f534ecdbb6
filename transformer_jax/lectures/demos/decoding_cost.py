"""Measure the cost of generating n tokens without a cache, with a cache, and with a window.

    python -m transformer_jax demo decoding_cost

The numbers of query-key products of one head in one layer are as follows, where step t has t
tokens:

    no cache    sum of t (t + 1) / 2 = n (n + 1) (n + 2) / 6    recomputes every query at every step
    cache       sum of t             = n (n + 1) / 2            one query per step
    window W    sum of min(t, W)     = n W - W (W - 1) / 2      one query per step, n >= W

The counts are sums over the masks of all steps. The times are medians of interleaved runs in which
a small decoder generates n tokens. Without a cache, every step reads n tokens because the program
has fixed shapes.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import (
    Causal,
    ModelConfig,
    Window,
    build,
    cache,
    generate,
    init_cache,
    init_params,
    make_step,
)
from transformer_jax.config import Rope
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_multiple,
    halved,
    label,
    new_figure,
    print_table,
    save_picture,
)

OPTIONS: Options = {"tokens": (512, 24), "window": (16, 16), "width": (32, 32)}


def formulas(n: int, window: int) -> list[int]:
    """Return the number of query-key products for each method and n tokens."""
    w = min(window, n)
    return [n * (n + 1) * (n + 2) // 6, n * (n + 1) // 2, n * w - w * (w - 1) // 2]


def count(n: int, window: int) -> list[int]:
    """Count the query-key pairs that the masks of all n steps allow."""

    def without(t: jax.Array) -> jax.Array:
        positions = jnp.where(jnp.arange(n) < t, jnp.arange(n), -1)
        return Causal().materialize(positions, positions).sum()

    def with_cache(mask: Any, capacity: int) -> jax.Array:
        def step(state: cache.KVCache, t: jax.Array) -> tuple[cache.KVCache, jax.Array]:
            # masks depend only on the positions, so the keys may be zeros
            new = jnp.zeros((1, 1, 1, 1))  # [B, T, K, H]
            state = cache.update(state, new, new, t[None, None])
            return state, mask.materialize(t[None, None], state.positions).sum()

        return jax.lax.scan(step, cache.init(1, capacity, 1, 1), jnp.arange(n))[1]

    counts = jax.jit(
        lambda: (
            jax.lax.map(without, jnp.arange(1, n + 1)),
            with_cache(Causal(), n),
            with_cache(Causal() & Window(window), min(window, n)),
        )
    )()
    # the sum may exceed the range of int32
    return [int(np.asarray(steps, np.int64).sum()) for steps in counts]


def generators(n: int, window: int, width: int) -> list[Callable[[], Any]]:
    """Return, for each method, a function that generates n tokens."""
    config = ModelConfig(
        vocab_size=61, d_model=width, num_layers=1, num_heads=2, positions=Rope(), max_len=n + 1
    )
    prompt, calls = jnp.zeros((1, 1), jnp.int32), []
    params = init_params(config, jax.random.key(0))

    @jax.jit
    def without(params: Any) -> jax.Array:
        def step(t: jax.Array, tokens: jax.Array) -> jax.Array:  # i32[1, n + 1]
            logits, _ = build(config).apply({"params": params}, tokens)
            return tokens.at[:, t + 1].set(logits[:, t].argmax(axis=-1))

        return jax.lax.fori_loop(0, n, step, jnp.zeros((1, n + 1), jnp.int32))

    calls.append(lambda: without(params))
    for size in (None, window):
        model = build(replace(config, window=size))
        capacity = n + 1 if size is None else size

        # default values are evaluated now, but variables of the loop would be read in the call
        def cached(model: Any = model, capacity: int = capacity) -> jax.Array:
            state = init_cache(model.config, batch=1, capacity=capacity)
            return generate(make_step(model), params, prompt, state, num_tokens=n).tokens

        calls.append(cached)
    return calls


def measure_times(n: int, window: int, width: int, runs: int) -> list[float]:
    """Return the median time in seconds that each method needs to generate n tokens."""
    calls = generators(n, window, width)
    # the first call includes the compilation, so it is not measured
    for call in calls:
        jax.block_until_ready(call())
    seconds: list[list[float]] = [[] for _ in calls]
    # the methods alternate, so that a slow period of the machine affects all of them
    for _ in range(runs):
        for taken, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            taken.append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration, and return lengths, counts, formula results, and times in seconds."""
    check_multiple("width", arguments.width, 4, "for 2 heads of even width")
    window, runs = arguments.window, 2 if arguments.quick else 5
    lengths = halved(arguments.tokens, 1 if arguments.quick else 4)
    names = "no cache", "cache", f"window {window}"
    counts = [count(n, window) for n in lengths]
    seconds = [measure_times(n, window, arguments.width, runs) for n in lengths]
    rows = [
        [n, *pairs, *(f"{1e3 * s:.1f} ms" for s in times)]
        for n, pairs, times in zip(lengths, counts, seconds, strict=True)
    ]
    print_table(["tokens n", *(f"{name}: products" for name in names), *names], rows)
    figure, (left, right) = new_figure(2)
    for i, name in enumerate(names):
        left.plot(lengths, [c[i] for c in counts], "o-", color=COLOURS[i], label=name)
        right.plot(lengths, [1e3 * s[i] for s in seconds], "o-", color=COLOURS[i], label=name)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
    label(left, "Query-key products", "tokens generated", "products of a head")
    label(right, "Time of one generation", "tokens generated", "milliseconds")
    save_picture(figure, arguments, "decoding_cost")
    expected = [formulas(n, window) for n in lengths]
    return {"lengths": lengths, "counts": counts, "formulas": expected, "seconds": seconds}
