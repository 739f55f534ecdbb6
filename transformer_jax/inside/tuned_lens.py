"""Read logits out of every stream through a translator of each, which is trained: the tuned lens.

The logit lens reads a stream as if it were the last one; where the basis changes from layer to
layer it is wrong on average. A translator maps a stream to what the last one would be:

    logits_l = n(x_l + x_l A_l + b_l) E^T + c

Source: Belrose et al. 2023 (arXiv:2303.08112), "Eliciting latent predictions from transformers with
the tuned lens".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.inside.lens import read_out, streams_of
from transformer_jax.inside.models import Transformer, check_model, refuse_edits
from transformer_jax.models.arguments import check_tokens
from transformer_jax.pytree import Params, PyTree
from transformer_jax.sharding import by_compiler
from transformer_jax.values import short_repr


@short_repr
class Translators(NamedTuple):
    """Hold an affine map of each stream but the last, the embedding's first: x + x A + b."""

    kernel: jax.Array
    """f32[L, D, D]."""
    bias: jax.Array
    """f32[L, D]."""

    @classmethod
    def identity(cls, model: Transformer) -> Translators:
        """Return maps that change nothing: with them the tuned lens is the logit lens."""
        L, D = model.config.decoder_layers, model.config.d_model
        return cls(jnp.zeros((L, D, D)), jnp.zeros((L, D)))

    def __call__(self, streams: jax.Array) -> jax.Array:  # [B, L, T, D] -> [B, L, T, D]
        """Return streams that are translated, each by its own map."""
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
    """Return the logits that are read out of every stream after its translator.

    logits_l = n(x_l + x_l A_l + b_l) E^T + c (Belrose et al. 2023). The last are the model's.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose decoder is read.
        params: its parameters, looped or scanned.
        translators: of `fit_tuned_lens`.
        tokens: i32[B, T].
        **arguments: others of `model.apply`, such as `positions`, `source` or `edit`.

    Returns:
        f32[B, L + 1, T, V], of the embedding first.

    Raises:
        ValueError: if the model has no logits, translators are of another size, or `edit` has
            `final_norm` or `logits`.
    """
    check_model("tuned_lens", model, arguments, "capture")
    refuse_edits("tuned_lens", model, arguments.get("edit", {}), "final_norm", "logits")
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
    """Return how far the lens of each stream is from the model, on average over the tokens.

    KL(p || q_l) = sum_v p_v (ln p_v - ln q_lv), in nats, p of the model's logits and q_l of those
    that are read out of stream l.

    Args:
        model: as of `tuned_lens`.
        params: its parameters.
        translators: `Translators.identity(model)` are those of the logit lens.
        tokens: i32[B, T].
        **arguments: others of `model.apply`.

    Returns:
        f32[L], of the embedding first.

    Raises:
        ValueError: as `tuned_lens` does.
    """
    check_model("lens_divergence", model, arguments, "capture")
    refuse_edits("lens_divergence", model, arguments.get("edit", {}), "final_norm", "logits")
    _check(model, translators)
    streams = streams_of(model, params, arguments, tokens)
    log_p = jax.nn.log_softmax(read_out(model, params, streams[:, -1:]))

    @jax.checkpoint  # of one stream at a time: logits of all are wide
    def of_layer(one: tuple[jax.Array, Translators]) -> jax.Array:
        stream, own = one
        translated = jax.tree.map(lambda leaf: leaf[None], own)(stream[:, None])
        log_q = jax.nn.log_softmax(read_out(model, params, translated))
        return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()

    return jax.lax.map(of_layer, (streams[:, :-1].swapaxes(0, 1), translators))


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
) -> tuple[Translators, jax.Array]:  # of the last step, f32[steps, L]
    """Train translators so that the lens of each stream says what the model does.

    sum_l KL(p || q_l) is made small by Adam, whose rate falls linearly to 0; the model stays as it
    is (Belrose et al. 2023, 3). All steps are one compiled program.

    Args:
        model: a decoder, or an encoder with logits.
        params: its parameters, looped or scanned.
        tokens: i32[n, T], rows of such texts as the lens is for, all of one length.
        key: a single key, which draws the rows of each step.
        steps: of Adam.
        batch_size: rows of a step.
        learning_rate: of the first step.
        start: where to begin; None is the logit lens.

    Returns:
        The translators, and before each step `lens_divergence` of its rows.

    Raises:
        ValueError: if the model has no logits or reads a source, or a number is not positive.
    """
    import optax  # not before it is asked for: it takes a while

    check_model("fit_tuned_lens", model, {})
    if model.config.kind == "encoder-decoder":
        raise ValueError("fit_tuned_lens of an encoder-decoder: it would need a source of each row")
    for name, number in dict(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate
    ).items():
        if number <= 0:
            raise ValueError(f"{name} is {number}: must be positive")
    check_tokens(tokens, model.config.vocab_size)
    start = Translators.identity(model) if start is None else start
    _check(model, start)
    optimizer = optax.adam(optax.linear_schedule(learning_rate, 0.0, steps))

    def fitted(
        params: Params, tokens: jax.Array, start: Translators, key: jax.Array
    ) -> tuple[Translators, jax.Array]:
        def loss(own: Translators, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            apart = lens_divergence(model, params, own, rows)
            return apart.sum(), apart

        def step(carry: PyTree, key: jax.Array) -> tuple[PyTree, jax.Array]:
            own, state = carry
            rows = tokens[jax.random.randint(key, (batch_size,), 0, len(tokens))]
            slope, apart = jax.grad(loss, has_aux=True)(own, rows)
            moved, state = optimizer.update(slope, state)
            return (optax.apply_updates(own, moved), state), apart

        begin = start, optimizer.init(start)
        (own, _), apart = jax.lax.scan(step, begin, jax.random.split(key, steps))
        return own, apart

    given = params, jnp.asarray(tokens), start, key
    return jax.jit(lambda *given: by_compiler(fitted, given, PartitionSpec()))(*given)


def _check(model: Transformer, translators: Translators) -> None:
    L, D = model.config.decoder_layers, model.config.d_model
    given = list(translators.kernel.shape)
    if given != [L, D, D]:
        raise ValueError(f"translators have kernels {given}: must be {[L, D, D]}")
