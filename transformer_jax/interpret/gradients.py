"""Integrated gradients: attribution of an output to the input tokens.

Source: Sundararajan et al. 2017 (arXiv:1703.01365).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.interpret.models import Transformer, check_model, refuse_edits, run
from transformer_jax.interpret.patching import Metric
from transformer_jax.models.arguments import check_tokens
from transformer_jax.pytree import Params


def integrated_gradients(
    model: Transformer,
    params: Params,
    tokens: jax.Array,  # i32[B, T]
    baseline: jax.Array | int,  # i32[], or broadcast to [B, T]
    metric: Metric,
    *,
    steps: int = 64,
    **arguments: Any,
) -> jax.Array:  # f32[B, T]
    """Return the contribution of each token to an output, compared to a baseline token.

    a_t = <x_t - x'_t, integral from 0 to 1 of d metric / d x_t at x' + s (x - x') ds>, where x and
    x' are the embeddings of the tokens and of the baseline. The integral is computed by
    Gauss-Legendre quadrature with `steps` points. The contributions sum to metric(tokens) -
    metric(baseline).

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose source is fixed.
        params: the parameters of the model, with a looped or a scanned stack.
        tokens: i32[B, T].
        baseline: i32[], i32[T] or i32[B, T], uninformative tokens such as padding or the mask
            token. A baseline embedding of zeros is not supported, because norms have no usable
            gradient at 0.
        metric: a differentiable function of logits f32[B, T, V] to f32[].
        steps: the number of quadrature points. Each needs one forward and one backward pass.
        **arguments: other arguments of `model.apply`, such as `positions` or `source`.

    Returns:
        f32[B, T].

    Raises:
        ValueError: if the model has no logits, if `steps` is not positive, if a token is not in the
            vocabulary, or if the model edits `embedding`.
    """
    check_model("integrated_gradients", model, arguments, "capture")
    if steps < 1:
        raise ValueError(f"steps is {steps}: must be positive")
    refuse_edits("integrated_gradients", model, "embedding")
    start = jnp.asarray(baseline)
    start = jnp.broadcast_to(start.reshape((1,) * (2 - start.ndim) + start.shape), np.shape(tokens))
    check_tokens(start, model.config.vocab_size)
    nodes, weights = np.polynomial.legendre.leggauss(steps)  # on -1..1, so the weights sum to 2

    def attribute(params: Params, tokens: jax.Array, start: jax.Array) -> jax.Array:
        apply = partial(run, model, params, arguments)
        x0, x1 = (apply(x, capture=("embedding",))[1]["embedding"] for x in (start, tokens))

        def output(x: jax.Array) -> jax.Array:
            started = model.edited({"embedding": lambda _: x})
            return metric(run(started, params, arguments, tokens)[0])

        def point(summed: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            s, weight = at
            gradient = jax.grad(output)((x0 + s * (x1 - x0)).astype(x1.dtype))
            return summed + weight * gradient.astype(jnp.float32), None

        points = jnp.asarray((nodes + 1) / 2, x1.dtype), jnp.asarray(weights / 2, jnp.float32)
        # a scan instead of a batch, so that only one backward pass is in memory at a time
        gradients = jax.lax.scan(point, jnp.zeros(x1.shape, jnp.float32), points)[0]
        return ((x1 - x0).astype(jnp.float32) * gradients).sum(axis=-1)

    return jax.jit(attribute)(params, tokens, start)
