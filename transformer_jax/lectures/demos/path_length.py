"""Measure path lengths and sequential steps of recurrence, attention, and windowed attention.

    python -m transformer_jax demo path_length

The complexities are from table 1 of Vaswani et al. 2017, for n tokens and windows of W tokens:

    layer             sequential steps    longest path between two positions
    recurrent         O(n)                O(n)
    self-attention    O(1)                O(1)
    window            O(1)                O(n / W): ceil((n - 1) / (W - 1)) layers

The number of sequential steps is the number of loop iterations in the program of one layer. Paths
are measured with derivatives. All positions take a step at once, and the path length is the number
of steps until the last position depends on the first input.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from transformer_jax import (
    Causal,
    Mask,
    RecurrentConfig,
    Window,
    build,
    dot_product_attention,
    init_params,
)
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_least,
    halved,
    label,
    new_figure,
    print_table,
    programs_within,
    save_picture,
)

OPTIONS: Options = {"tokens": (64, 13), "window": (5, 5)}

WIDTH = 8


def loop_steps(program: Jaxpr) -> int:
    """Count the sequential steps in a program's loops. The result is at least 1."""

    def count(program: Jaxpr) -> int:
        total = 0
        for equation in program.eqns:
            inner = sum(map(count, programs_within(equation)))
            is_loop = equation.primitive.name == "scan"
            total += equation.params["length"] * max(inner, 1) if is_loop else inner
        return total

    return max(count(program), 1)


def attend(mask: Mask) -> Callable[[jax.Array], jax.Array]:
    """Return an attention layer as a function from [T, H] to [T, H]."""

    def layer(x: jax.Array) -> jax.Array:
        heads = x[None, :, None]  # [B, T, N, H]
        # scores are small, because a weight that is rounded to 0 would hide a path
        out = dot_product_attention(heads, heads, heads, mask=mask, scale=0.1, implementation="xla")
        return out[0, :, 0]

    return layer


def sequential_steps(n: int, window: int) -> list[int]:
    """Count the sequential steps in one layer of each kind for n tokens."""
    config = RecurrentConfig(vocab_size=7, d_embed=WIDTH, d_hidden=WIDTH)
    params = init_params(config, jax.random.key(0))
    tokens, x = jnp.zeros((1, n), jnp.int32), jnp.zeros((n, WIDTH))
    programs = [jax.make_jaxpr(lambda t: build(config).apply({"params": params}, t))(tokens)]
    programs += [jax.make_jaxpr(attend(mask))(x) for mask in (Causal(), Causal() & Window(window))]
    return [loop_steps(program.jaxpr) for program in programs]


def steps_until_dependent(step: Callable[[Any], Any], state: Any, tangent: Any) -> int:
    """Count the steps until the last position has a nonzero derivative.

    `state` and `tangent` are pytrees of arrays [T, ...]. Only the first array is checked.
    """
    push = jax.jit(lambda state, tangent: jax.jvp(step, (state,), (tangent,)))
    count = 0
    while not jnp.any(jax.tree.leaves(tangent)[0][-1] != 0):
        state, tangent = push(state, tangent)
        count += 1
    return count


def formulas(n: int, window: int) -> tuple[list[int], list[int]]:
    """Return the number of sequential steps and the longest path of each kind."""
    return [n, 1, 1], [n, 1, -(-(n - 1) // (window - 1))]


def path_lengths(n: int, window: int) -> list[int]:
    """Return the path length from the first input to the last output for each kind of layer."""
    x = jax.random.normal(jax.random.key(1), (n, WIDTH))
    first = jnp.zeros_like(x).at[0].set(1.0)
    cell = nn.SimpleCell(WIDTH)
    params = cell.init(jax.random.key(2), x[0], x[0])

    def all_cells(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Apply h_t = cell(h_{t-1}, x_t) at all positions simultaneously."""
        h, x = state
        before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
        after: Any = cell.apply(params, before, x)
        return after[0], x

    lengths = [steps_until_dependent(all_cells, (jnp.zeros_like(x), x), (jnp.zeros_like(x), first))]
    for mask in (Causal(), Causal() & Window(window)):
        lengths.append(steps_until_dependent(attend(mask), x, first))
    return lengths


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return lengths, and the sequential steps and paths of each kind."""
    check_least("tokens", arguments.tokens, 2, "a path connects two tokens")
    window = arguments.window
    check_least("window", window, 2, "a token that sees only itself has no path")
    names = "recurrent", "self-attention", f"window {window}"
    lengths = [n for n in halved(arguments.tokens, 2 if arguments.quick else 4) if n > 1]
    steps = [sequential_steps(n, window) for n in lengths]
    paths = [path_lengths(n, window) for n in lengths]
    rows = [[name, *(s[i] for s in steps), *(p[i] for p in paths)] for i, name in enumerate(names)]
    headings = [f"{quantity}, n = {n}" for quantity in ("steps", "path") for n in lengths]
    print_table(["layer", *headings], rows)
    figure, plots = new_figure(2)
    for i, name in enumerate(names):
        style: dict[str, Any] = dict(color=COLOURS[i], label=name, ls=("-", "-", "--")[i])
        plots[0].plot(lengths, [s[i] for s in steps], "o", **style)
        plots[1].plot(lengths, [p[i] for p in paths], "o", **style)
    for axes in plots:
        axes.set_xticks(lengths)
    label(plots[0], "Sequential steps of one layer", "tokens n", "steps")
    label(plots[1], "Longest path between two positions", "tokens n", "steps")
    save_picture(figure, arguments, "path_length")
    return {"lengths": lengths, "steps": steps, "paths": paths}
