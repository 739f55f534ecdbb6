"""Tuned lens: logits computed from every stream through a trained translator for each stream.

The logit lens treats each stream as if it were the last stream. It is biased if the basis changes
from layer to layer. A translator maps a stream to an estimate of the last stream.

Source: Belrose et al. 2023 (arXiv:2303.08112), "Eliciting latent predictions from transformers with
the tuned lens".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.interpret.lens import read_out, streams_of
from transformer_jax.interpret.models import Transformer, check_model, refuse_edits
from transformer_jax.models.arguments import check_tokens
from transformer_jax.pytree import Params, PyTree
from transformer_jax.sharding import by_compiler
from transformer_jax.values import short_repr


@short_repr
class Translators(NamedTuple):
    """Affine maps x + x A + b for all streams except the last, starting with the embedding."""

    kernel: jax.Array
    """f32[L, D, D]."""
    bias: jax.Array
    """f32[L, D]."""

    @classmethod
    def identity(cls, model: Transformer) -> Translators:
        """Return identity maps, which make the tuned lens equal the logit lens."""
        L, D = model.config.decoder_layers, model.config.d_model
        return cls(jnp.zeros((L, D, D)), jnp.zeros((L, D)))

    def __call__(self, streams: jax.Array) -> jax.Array:  # [B, L, T, D] -> [B, L, T, D]
        """Translate each stream with its own map."""
        x = streams.astype(jnp.float32)
        moved = jnp.einsum("BLTD,LDE->BLTE", x, self.kernel) + self.bias[None, :, None]
        return (x + moved).astype(streams.dtype)


def tuned_lens(
    model: Transformer,
    params: Params,
    translators: Translators,
    tokens: jax.Array,  # i32[B, T]
    **arguments: Any,
) -> jax.Array:  # f32[B, L + 1, T, V]
    """Return the logits computed from every stream after its translator.

    logits_l = n(x_l + x_l A_l + b_l) E^T + c (Belrose et al. 2023). The last entry is the model's
    own logits.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose decoder is used.
        params: the parameters of the model, with a looped or a scanned stack.
        translators: trained translators, such as those that `fit_tuned_lens` returns.
        tokens: i32[B, T].
        **arguments: other arguments of `model.apply`, such as `positions` or `source`.

    Returns:
        The logits, f32[B, L + 1, T, V], starting with those of the embedding.

    Raises:
        ValueError: if the model has no logits, if the translators have a different size, or if
            the model edits `final_norm` or `logits`.
    """
    check_model("tuned_lens", model, arguments, "capture")
    refuse_edits("tuned_lens", model, "final_norm", "logits")
    _check(model, translators)
    streams = streams_of(model, params, arguments, tokens)
    translated = translators(streams[:, :-1])
    return read_out(model, params, jnp.concatenate([translated, streams[:, -1:]], axis=1))


def lens_divergence(
    model: Transformer,
    params: Params,
    translators: Translators,
    tokens: jax.Array,  # i32[B, T]
    **arguments: Any,
) -> jax.Array:  # f32[L]
    """Return the KL divergence between the model and the lens of each stream, averaged over tokens.

    KL(p || q_l) = sum_v p_v (ln p_v - ln q_lv), in nats, where p is the distribution that the model
    predicts and q_l is the distribution from the lens of stream l.

    Args:
        model: a model that `tuned_lens` supports.
        params: the parameters of the model.
        translators: trained translators, or `Translators.identity(model)` for the logit lens.
        tokens: i32[B, T].
        **arguments: other keyword arguments of `model.apply`.

    Returns:
        The divergences, f32[L], starting with that of the embedding.

    Raises:
        ValueError: under the same conditions as `tuned_lens`.
    """
    check_model("lens_divergence", model, arguments, "capture")
    refuse_edits("lens_divergence", model, "final_norm", "logits")
    _check(model, translators)
    streams = streams_of(model, params, arguments, tokens)
    log_p = jax.nn.log_softmax(read_out(model, params, streams[:, -1:]))

    @jax.checkpoint  # process one stream at a time, because logits [B, T, V] are large
    def divergence(layer: tuple[jax.Array, Translators]) -> jax.Array:
        stream, translator = layer
        translated = jax.tree.map(lambda leaf: leaf[None], translator)(stream[:, None])
        log_q = jax.nn.log_softmax(read_out(model, params, translated))
        return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()

    return jax.lax.map(divergence, (streams[:, :-1].swapaxes(0, 1), translators))


def fit_tuned_lens(
    model: Transformer,
    params: Params,
    tokens: jax.Array,  # i32[n, T]
    *,
    key: jax.Array,
    steps: int = 250,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    start: Translators | None = None,
) -> tuple[Translators, jax.Array]:  # (trained, f32[steps, L])
    """Train translators so that the lens of each stream agrees with the model.

    Adam minimizes sum_l KL(p || q_l) with a learning rate that decays linearly to 0. The model is
    frozen (Belrose et al. 2023, section 3). One compiled program runs all steps.

    Args:
        model: a decoder, or an encoder with logits.
        params: the parameters of the model, with a looped or a scanned stack.
        tokens: i32[n, T], the rows of tokens to train on.
        key: a single random key, used to draw the rows of each step.
        steps: the number of Adam steps.
        batch_size: the number of rows per step.
        learning_rate: the learning rate at the first step.
        start: the initial translators; if None, training starts from the logit lens.

    Returns:
        The translators, and the `lens_divergence` on the rows of each step before its update.

    Raises:
        ValueError: if the model has no logits or reads a source, or if a number is not positive.
    """
    import optax  # imported here because the import is slow

    check_model("fit_tuned_lens", model, {})
    if model.config.kind == "encoder-decoder":
        raise ValueError(
            "fit_tuned_lens does not support an encoder-decoder: each row would need a source"
        )
    for name, number in dict(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate
    ).items():
        if number <= 0:
            raise ValueError(f"{name} is {number}: must be positive")
    check_tokens(tokens, model.config.vocab_size)
    start = Translators.identity(model) if start is None else start
    _check(model, start)
    optimizer = optax.adam(optax.linear_schedule(learning_rate, 0.0, steps))

    def fit(
        params: Params, tokens: jax.Array, start: Translators, key: jax.Array
    ) -> tuple[Translators, jax.Array]:
        def loss(translators: Translators, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            divergences = lens_divergence(model, params, translators, rows)
            return divergences.sum(), divergences

        def step(carry: PyTree, key: jax.Array) -> tuple[PyTree, jax.Array]:
            translators, state = carry
            rows = tokens[jax.random.randint(key, (batch_size,), 0, len(tokens))]
            grad, divergences = jax.grad(loss, has_aux=True)(translators, rows)
            update, state = optimizer.update(grad, state)
            return (optax.apply_updates(translators, update), state), divergences

        carry = start, optimizer.init(start)
        (translators, _), divergences = jax.lax.scan(step, carry, jax.random.split(key, steps))
        return translators, divergences

    arrays = params, jnp.asarray(tokens), start, key
    return jax.jit(lambda *arrays: by_compiler(fit, arrays, PartitionSpec()))(*arrays)


def _check(model: Transformer, translators: Translators) -> None:
    L, D = model.config.decoder_layers, model.config.d_model
    shape = list(translators.kernel.shape)
    if shape != [L, D, D]:
        raise ValueError(f"translators have kernels of shape {shape}: must be {[L, D, D]}")
