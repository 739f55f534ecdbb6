"""Measure the effect of residual connections and norms on gradients at different depths.

    python -m transformer_jax demo depth

A block consists of attention and a feed-forward network, which are both implemented here. A part f
of a block can be connected in four ways:

    f(x)             no residual connection
    x + f(x)         no norm
    norm(x + f(x))   post-norm (Vaswani et al. 2017)
    x + f(norm(x))   pre-norm, with a final norm after the last block (Xiong et al. 2020)

The picture is for untrained models. It shows the Jacobian d(x + f)/dx = I + df/dx of a feed-forward
part, and the norm of the loss gradient before each of 48 blocks, relative to the last block.
"""

from __future__ import annotations

import math
from argparse import Namespace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import cross_entropy
from transformer_jax.lectures.demos.length_extrapolation import VOCAB, make_texts
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    draw_matrix,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.models.functional import activate
from transformer_jax.models.ops import layer_norm
from transformer_jax.models.positions import sinusoidal

OPTIONS: Options = {"layers": (48, 5), "seed": (1, 1)}

WIDTH, HEADS = 32, 4
KINDS = ("no residual", "no norm", "post-norm", "pre-norm")


def init_block(key: jax.Array) -> dict[str, jax.Array]:
    """Initialize the matrices of a block randomly, with variance 1 / inputs."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    shapes["down"] = (4 * WIDTH, WIDTH)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
    """Compute causal attention, including its projections."""
    q, k, v = (y.reshape(*x.shape[:2], HEADS, -1) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v).reshape(x.shape) @ p["out"]


def feed_forward(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
    """Return W_2 relu(W_1 x)."""
    return activate(x @ p["up"], "relu") @ p["down"]


def part(kind: str, f: Any, x: jax.Array) -> jax.Array:
    """Apply f with a connection of type `kind`."""
    match kind:
        case "no residual":
            return f(x)
        case "no norm":
            return x + f(x)
        case "post-norm":
            return layer_norm(x + f(x))
        case _:
            return x + f(layer_norm(x))


def run(
    kind: str,
    params: Any,
    tokens: jax.Array,  # i32[B, T]
    nudges: jax.Array,  # f32[L, B, T, D], added before each block to compute its gradient
) -> jax.Array:  # f32[B, T, V]
    """Return the logits of a stack of blocks."""
    x = params["tokens"][tokens] + sinusoidal(jnp.arange(tokens.shape[1]), WIDTH)[None]

    def block(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        p, nudge = layer
        x = part(kind, partial(attention, p), x + nudge)
        return part(kind, partial(feed_forward, p), x), None

    x, _ = jax.lax.scan(block, x, (params["blocks"], nudges))
    x = layer_norm(x) if kind == "pre-norm" else x
    return x @ params["read"]


def init(layers: int, key: jax.Array) -> Any:
    """Initialize the parameters of a stack randomly."""
    tokens, blocks, read = jax.random.split(key, 3)
    return {
        "tokens": jax.random.normal(tokens, (VOCAB, WIDTH)),
        "blocks": jax.vmap(init_block)(jax.random.split(blocks, layers)),
        "read": jax.random.normal(read, (WIDTH, VOCAB)) / math.sqrt(WIDTH),
    }


def loss_of(kind: str, params: Any, texts: jax.Array, nudges: jax.Array) -> jax.Array:
    """Return the loss in nats per token."""
    return cross_entropy(run(kind, params, texts[:, :-1], nudges), texts[:, 1:])[0]


def gradients(
    kind: str, layers: int, texts: np.ndarray, seed: int, seeds: int
) -> np.ndarray:  # f64[L]
    """Return the geometric mean of the relative gradient norm before each block."""
    nudges = jnp.zeros((layers, *texts[:, 1:].shape, WIDTH))
    slope = jax.jit(lambda key: jax.grad(loss_of, 3)(kind, init(layers, key), texts, nudges))
    keys = jax.random.split(jax.random.key(seed), seeds)
    found = np.stack([np.asarray(slope(key), np.float64) for key in keys])
    norms = np.sqrt((found**2).sum(axis=(2, 3, 4)))  # [seeds, L]
    # without residual connections, gradients underflow to 0, whose logarithm is not finite
    return np.exp(np.log(norms / norms[:, -1:] + 1e-300).mean(axis=0))


def jacobians() -> dict[str, np.ndarray]:  # f64[D, D] of each
    """Return df/dx, d(x + f)/dx, and d norm(x + f)/dx for one feed-forward part."""
    p, x = init_block(jax.random.key(3)), jax.random.normal(jax.random.key(4), (WIDTH,))
    f = partial(feed_forward, jax.tree.map(lambda w: 0.5 * w, p))
    kinds = ("no residual", "no norm", "post-norm")
    return {kind: np.asarray(jax.jacobian(lambda x, k=kind: part(k, f, x))(x)) for kind in kinds}


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the Jacobians, and the gradients keyed by kind and depth."""
    seed, seeds = arguments.seed, 2 if arguments.quick else 4
    depths = sorted({min(2, arguments.layers), max(2, arguments.layers // 4), arguments.layers})
    depths = [depth for depth in depths if depth <= arguments.layers]
    texts = make_texts(8, 17, seed=1)
    found: dict[str, Any] = {"jacobians": jacobians(), "gradients": {}}
    for kind, layers in product(KINDS, depths):
        found["gradients"][kind, layers] = gradients(kind, layers, texts, seed, seeds)
    print("gradient before the first block relative to the last")
    print_table(["kind", *(f"{n} blocks" for n in depths)], [
        [kind, *(f"{found['gradients'][kind, n][0]:.2g}" for n in depths)] for kind in KINDS
    ])  # fmt: skip
    figure, plots = new_figure(3, height=3.6)
    names = [""] * WIDTH
    for axes, kind, title in zip(
        plots, ("no residual", "no norm"), ("df/dx", "d(x + f)/dx = I + df/dx"), strict=False
    ):
        draw_matrix(axes, np.clip(np.abs(found["jacobians"][kind]), 0, 1), names, names, False)
        axes.set(xticks=[], yticks=[])
        label(axes, title, "input", "output", legend=False)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        plots[2].plot(
            range(1, depths[-1] + 1), found["gradients"][kind, depths[-1]], color=colour, label=kind
        )
    plots[2].set_yscale("log")
    label(plots[2], "Gradient before each block", "block", "relative to the last")
    save_picture(figure, arguments, "depth")
    return found
