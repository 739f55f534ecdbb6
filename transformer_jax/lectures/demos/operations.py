"""Count the multiplications in attention, recurrent, convolutional, and feed-forward layers.

    python -m transformer_jax demo operations

The complexities are from table 1 of Vaswani et al. 2017, for n tokens, width d, and a convolution
over k tokens:

    self-attention    O(n^2 d)      here 2 n^2 d: scores and the weighted sum of values
    recurrent         O(n d^2)      2 n d^2: W x and U h
    convolution       O(k n d^2)    k n d^2
    feed-forward      O(n d^2)      8 n d^2: to 4 d and back

The four projections of attention require another 4 n d^2 multiplications. The counts are computed
from the traced programs. Each count is the number of products in the matrix multiplications and
convolutions, times the number of loop iterations. The demonstration also measures the time and the
temporary memory of a call to attention for each n, with materialized scores ("xla") and in tiles
("blockwise").
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from transformer_jax import dot_product_attention
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    halved,
    label,
    new_figure,
    print_table,
    programs_within,
    save_picture,
)

OPTIONS: Options = {"tokens": (4096, 32), "width": (64, 8)}

KERNEL = 3
NAMES = ("self-attention", "recurrent", f"convolution of {KERNEL}", "feed-forward", "projections")


def products(program: Jaxpr) -> int:
    """Count the products in a program's matrix multiplications, once per loop iteration."""
    total = 0
    for equation in program.eqns:
        inner = sum(map(products, programs_within(equation)))
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            variables: list[Any] = [*equation.invars[:2], equation.outvars[0]]
            left, right, result = (variable.aval.shape for variable in variables)
            out = math.prod(result)
            if equation.primitive.name == "dot_general":
                contracted = equation.params["dimension_numbers"][0][0]
                total += out * math.prod(left[axis] for axis in contracted)
            else:  # a kernel [k, inputs, outputs]
                total += out * math.prod(right[:-1])
    return total


def layers(n: int, d: int) -> list[tuple[Callable[..., Any], Any]]:
    """Return pairs of a layer, as a function of x, and its input x [1, n, d]."""
    x = jnp.zeros((1, n, d))

    def of_module(module: nn.Module) -> Callable[..., Any]:
        params = jax.eval_shape(module.init, jax.random.key(0), x)
        # zeros, because the counts do not depend on the values
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
        return lambda x: module.apply(params, x)

    def attention(x: jax.Array) -> jax.Array:
        scores = jnp.einsum("BTD,BSD->BTS", x, x) / math.sqrt(d)
        return jnp.einsum("BTS,BSD->BTD", jax.nn.softmax(scores), x)

    w = jnp.zeros((d, d))
    modules = [
        nn.RNN(nn.SimpleCell(d)),
        nn.Conv(d, (KERNEL,), padding="CAUSAL"),
        nn.Sequential([nn.Dense(4 * d), nn.relu, nn.Dense(d)]),
    ]
    functions = [attention, *map(of_module, modules), lambda x: x @ w @ w @ w @ w]
    return [(function, x) for function in functions]


def count(n: int, d: int) -> list[int]:
    """Count the multiplications in the traced program of each layer."""
    return [products(jax.make_jaxpr(function)(x).jaxpr) for function, x in layers(n, d)]


def formulas(n: int, d: int) -> list[int]:
    """Return the number of multiplications in each layer according to the table."""
    return [2 * n * n * d, 2 * n * d * d, KERNEL * n * d * d, 8 * n * d * d, 4 * n * d * d]


def measure(n: int, d: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Return the median time in seconds and temporary bytes per call, keyed by implementation."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, n, 1, d))
    found = {}
    for name in ("xla", "blockwise"):
        call = jax.jit(lambda q, k, v, way=name: dot_product_attention(q, k, v, implementation=way))
        compiled = call.lower(q, k, v).compile()
        jax.block_until_ready(compiled(q, k, v))
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready(compiled(q, k, v))
            seconds.append(time.perf_counter() - start)
        memory: Any = compiled.memory_analysis()
        found[name] = statistics.median(seconds), int(memory.temp_size_in_bytes)
    return found


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the width, and the counts and measurements keyed by length."""
    width, rounds = arguments.width, 2 if arguments.quick else 9
    lengths = (4, 16, 64) if arguments.quick else (16, 64, 256, 1024)
    timed = halved(arguments.tokens, 2 if arguments.quick else 5)
    counts = {n: count(n, width) for n in lengths}
    print(f"millions of multiplications of one layer, width {width}")
    print_table(["layer", *(f"n = {n}" for n in lengths)], [
        [name, *(f"{counts[n][i] / 1e6:.3g}" for n in lengths)] for i, name in enumerate(NAMES)
    ])  # fmt: skip
    measured = {n: measure(n, width, rounds) for n in timed}
    print("one call of attention, one head")
    print_table(["n", "xla ms", "xla KiB", "blockwise ms", "blockwise KiB"], [
        [n, *(text for way in ("xla", "blockwise")
              for text in (f"{1e3 * found[way][0]:.2f}", f"{found[way][1] / 1024:.0f}"))]
        for n, found in measured.items()
    ])  # fmt: skip
    figure, plots = new_figure(2)
    for i, (name, colour) in enumerate(zip(NAMES[:4], COLOURS, strict=False)):
        plots[0].plot(lengths, [counts[n][i] for n in lengths], "o-", color=colour, label=name)
    plots[0].axvline(4 * width, color="#bbbbbb", linestyle="--", label="n = 4 d")
    for way, colour in zip(("xla", "blockwise"), COLOURS, strict=False):
        curve = [measured[n][way][1] / 1024 for n in timed]
        plots[1].plot(timed, curve, "o-", color=colour, label=f"{way}: KiB")
    curve = [1e3 * measured[n]["xla"][0] for n in timed]
    plots[1].plot(timed, curve, "o--", color=COLOURS[0], label="xla: ms")
    for axes, ticks in zip(plots, (lengths, timed), strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ticks, list(map(str, ticks)))
    label(plots[0], f"Multiplications of one layer, d = {width}", "tokens n", "multiplications")
    label(plots[1], "One call of attention", "tokens n", "ms, and KiB of intermediate results")
    save_picture(figure, arguments, "operations")
    return {"counts": counts, "measured": measured, "width": width}
