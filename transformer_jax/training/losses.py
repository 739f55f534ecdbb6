"""Token cross-entropy in float32 with masking, weights, label smoothing, and chunking.

Ignored tokens contribute neither to the loss nor to the gradient, even if their logits are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.checks import as_number, check_array, check_count, check_factor
from transformer_jax.config.keywords import known_keywords
from transformer_jax.kernels.cpu.products import fixed_sum
from transformer_jax.kernels.derivatives import Passes, differentiable
from transformer_jax.pytree import PyTree
from transformer_jax.sharding import axis_names, by_compiler, split, vary
from transformer_jax.tracing import are_concrete


@known_keywords
def cross_entropy(
    logits: jax.Array,  # [..., V]
    labels: jax.Array,  # i32[...]
    *,
    weights: jax.Array | None = None,  # [...]
    ignore_label: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
    """Return the weighted mean loss per token, in nats, and the sum of the token weights.

        loss = lse(x) - (1 - e) x[label] - e mean(x) + z lse(x)^2

    Args:
        logits: x, which is converted to float32.
        labels: from 0 to V - 1, or `ignore_label`.
        weights: weight of each token; None means 1. A weight of 0 ignores the token.
        ignore_label: label of ignored tokens, whose logits may be NaN.
        label_smoothing: e, at least 0 and below 1 (Szegedy et al. 2016, section 7).
        z_loss: z, at least 0 (Chowdhery et al. 2022, section 5).
        invariant: whether a token's loss and gradient have the same bits for any other tokens (see
            `ModelConfig.invariant`).

    Returns:
        The weighted mean and the sum of the weights. Both are 0 if all tokens are ignored.

    Raises:
        ValueError: If shapes do not match, or if a label with nonzero weight is outside 0 to V - 1.
            If labels are traced, an invalid label makes the loss and the gradient of its logits NaN
            instead.
    """
    terms = _Terms(label_smoothing, z_loss, invariant)
    check_array("logits", logits, "[..., V]")
    check_array("labels", labels, "[...]")
    if logits.ndim == 0 or logits.shape[-1] == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits have shape {logits.shape} and labels {labels.shape}: must be [..., V] and "
            "[...]"
        )
    labels, weights = _mask_ignored(labels, weights, ignore_label, logits.shape[-1])

    # the compiler would gather two split axes to join them
    joins = not any(split(logits)[1:-1])

    def mean(
        logits: jax.Array, labels: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        loss = weights * _token_loss(terms, logits, labels, weights != 0)
        return _mean(terms.sum(loss.ravel()) if joins else jnp.sum(loss), weights)

    return by_compiler(mean, [logits, labels, weights], PartitionSpec())


@known_keywords
def chunked_cross_entropy(
    hidden: jax.Array,  # [B, T, D]
    output_weights: jax.Array,  # [V, D]
    labels: jax.Array,  # i32[B, T]
    *,
    chunk_size: int,
    softcap: float | None = None,
    logit_bias: jax.Array | None = None,  # [V]
    weights: jax.Array | None = None,  # [B, T]
    ignore_label: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
    """Return `cross_entropy` without storing all logits at once.

        logits = softcap tanh((hidden output_weights^T + logit_bias) / softcap)

    At most B * chunk_size rows of logits exist at a time, in both the forward and the backward
    pass. The loss and the gradients of a chunk are computed together, so nothing is computed twice.
    Products use the dtype of `hidden`, and sums use float32.

    Args:
        hidden: hidden states, which are multiplied by the output matrix.
        output_weights: the output matrix.
        labels: from 0 to V - 1, or `ignore_label`.
        chunk_size: the number of positions per row for which logits exist at a time, at least 1.
        softcap: a positive cap on the logits. None means no cap.
        logit_bias: a bias to add to the logits. None means no bias.
        weights: the weight of each token. None means 1 for every token.
        ignore_label: the label of ignored tokens.
        label_smoothing: e in `cross_entropy`, at least 0 and less than 1.
        z_loss: z in `cross_entropy`, at least 0.

    Returns:
        The weighted mean loss in nats and the sum of the weights.

    Raises:
        ValueError: If shapes do not match, if an option is out of range, or if a label with nonzero
            weight is outside 0 to V - 1. Traced labels are not checked.
    """
    terms = _Terms(label_smoothing, z_loss)
    check_array("hidden", hidden, "[B, T, D]")
    check_array("output_weights", output_weights, "[V, D]")
    check_array("labels", labels, "[B, T]")
    if hidden.ndim != 3 or output_weights.ndim != 2 or labels.shape != hidden.shape[:2]:
        raise ValueError(
            f"hidden has shape {hidden.shape}, output_weights {output_weights.shape} and labels "
            f"{labels.shape}: must be [B, T, D], [V, D] and [B, T]"
        )
    if hidden.shape[2] != output_weights.shape[1]:
        raise ValueError(
            f"D is {hidden.shape[2]} in hidden but {output_weights.shape[1]} in output_weights"
        )
    check_count("chunk_size", chunk_size, 1)
    if softcap is not None:
        check_factor("softcap", as_number("softcap", softcap))
    if logit_bias is not None:
        check_array("logit_bias", logit_bias, "[V]")
    if logit_bias is not None and logit_bias.shape != output_weights.shape[:1]:
        rule = f"must be {output_weights.shape[:1]}, [V]"
        raise ValueError(f"logit_bias has shape {logit_bias.shape}: {rule}")
    labels, weights = _mask_ignored(labels, weights, ignore_label, output_weights.shape[0])
    hidden, labels, weights = lengths_as_rows(hidden, hidden, labels, weights)
    chunk_size = _rows(chunk_size, hidden.shape[1])
    head = _Head(terms, chunk_size, softcap)
    plain = partial(_chunked_sum, head)
    passes = Passes(partial(_sum_and_gradients, head), _scaled_gradients, plain)
    arrays = vary((hidden, output_weights, logit_bias, labels, weights))
    total = by_compiler(
        lambda *arrays: differentiable(plain, passes, arrays)[0], arrays, PartitionSpec()
    )
    return _mean(total, weights)


def label_scores(
    hidden: jax.Array,  # [B, T, D]
    output_weights: jax.Array,  # [V, D]
    labels: jax.Array,  # i32[B, T]
    *,
    chunk_size: int,
    softcap: float | None = None,
    logit_bias: jax.Array | None = None,  # [V]
    ignore_label: int = -100,
) -> tuple[jax.Array, jax.Array]:  # f32[B, T], bool[B, T]
    """Return each label's log-probability, in nats, and whether the label is the most likely token.

    Logits are computed as in `chunked_cross_entropy` and recomputed in the backward pass. The
    result is NaN for a label outside 0 to V - 1, and 0 for `ignore_label`.
    """
    size = _rows(chunk_size, hidden.shape[1])

    @jax.checkpoint
    def of_chunk(
        hidden: jax.Array, table: jax.Array, bias: jax.Array | None, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:  # f32[B, size], bool[B, size]
        logits = _products(hidden, table)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)[None, None]
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        counts = labels != ignore_label
        picked = jnp.where(counts, labels, 0)[..., None]
        found = jnp.take_along_axis(logits, picked, axis=-1, mode="fill")[..., 0]
        found = found - jax.nn.logsumexp(logits, axis=-1)
        return jnp.where(counts, found, 0.0), jnp.argmax(logits, axis=-1) == labels

    def in_chunks(
        hidden: jax.Array, table: jax.Array, bias: jax.Array | None, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        parts = _split(size, hidden, labels)
        found = jax.lax.map(lambda part: of_chunk(part[0], table, bias, part[1]), parts)
        return _join(found[0], labels.shape[1]), _join(found[1], labels.shape[1])

    arrays = [hidden, output_weights, logit_bias, labels]
    return by_compiler(in_chunks, arrays, PartitionSpec())


@dataclass(frozen=True)
class _Terms:
    """Options for label smoothing and the z-loss, which are static under `jit`."""

    smoothing: float
    z: float
    invariant: bool = False

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum over the last axis, in a fixed order if `invariant` is true."""
        return fixed_sum(x) if self.invariant else jnp.sum(x, axis=-1)

    def __post_init__(self) -> None:
        if not 0.0 <= as_number("label_smoothing", self.smoothing) < 1.0:
            raise ValueError(f"label_smoothing is {self.smoothing}: must be at least 0 and below 1")
        if not 0.0 <= as_number("z_loss", self.z) < float("inf"):
            raise ValueError(f"z_loss is {self.z}: must be finite and not negative")


@dataclass(frozen=True)
class _Head:
    """Options for the logits and the chunked loss, which are static under `jit`."""

    terms: _Terms
    chunk_size: int
    softcap: float | None


def _mask_ignored(
    labels: jax.Array, weights: jax.Array | None, ignore_label: int, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """Return labels i32[...] and weights f32[...]; both are 0 for ignored tokens."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are {labels.dtype}: must be integers")
    if weights is not None:
        check_array("weights", weights, "of the labels' shape")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights have shape {weights.shape} and labels {labels.shape}: must be the same"
        )
    values = labels, weights
    if not any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True)
        for x in values
    ):
        # checked before the conversion to int32, which would wrap 2**32 + 1 to a valid label
        concrete = np.asarray(labels)
        wrong = (concrete != ignore_label) & ((concrete < 0) | (concrete >= vocab))
        if weights is not None:
            wrong &= np.asarray(weights) != 0
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"label {concrete[index]} at {index} is outside the vocabulary of {vocab} "
                f"and is not ignore_label {ignore_label}"
            )
    labels = jnp.asarray(labels, jnp.int32)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else jnp.asarray(weights)
    weights = jnp.where(labels == ignore_label, 0.0, weights.astype(jnp.float32))
    # A token that does not count may have any label, so give it one that is a valid index.
    return jnp.where(weights == 0, 0, labels), weights


def token_losses(
    logits: jax.Array,  # f32[..., V]
    labels: jax.Array,  # i32[...]
    *,
    invariant: bool = False,
) -> jax.Array:  # f32[...]
    """Return -log p of each label, which is NaN for a label outside 0 to V - 1."""
    terms = _Terms(0.0, 0.0, invariant)
    return _token_loss(terms, logits, labels, jnp.ones(labels.shape, bool))


def _mean(total: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight = jnp.sum(weights)
    return total / jnp.where(weight == 0, 1.0, weight), weight


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _token_loss(
    terms: _Terms,
    logits: jax.Array,  # [..., V]
    labels: jax.Array,  # i32[...]
    counts: jax.Array,  # bool[...]
) -> jax.Array:  # f32[...]; 0 for ignored tokens
    return _loss_and_slope(terms, logits, labels, counts)[0]


@_token_loss.defjvp
def _token_loss_jvp(
    terms: _Terms, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    # One pass over the logits computes loss and slope. Autodiff needs several and computes 0 * NaN.
    loss, slope = _loss_and_slope(terms, *primals)
    return loss, jnp.sum(slope * tangents[0].astype(jnp.float32), axis=-1)


def _loss_and_slope(
    terms: _Terms, logits: jax.Array, labels: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the losses [...] and their derivatives with respect to the logits [..., V].

    Both are 0 for ignored tokens. The largest logit is subtracted first, because adjacent float32
    values near 1e4 differ by 1e-3.
    """
    vocab = logits.shape[-1]
    x = logits.astype(jnp.float32)
    # The results do not depend on `top`, so a second derivative must not follow it.
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1))
    # If exp is fused with a reduction, XLA's CPU backend computes it by another library for some
    # shapes (findings/xla_cpu_exp_by_shape.sh). A sum of one number is a call, so it is not fused.
    top = terms.sum(top[..., None]) if terms.invariant else top
    shifted = x - top[..., None]
    exp = jnp.exp(shifted)
    denominator = terms.sum(exp)
    in_range = (labels >= 0) & (labels < vocab)
    # a label outside the vocabulary cannot raise an error here, so it makes the loss NaN
    denominator = jnp.where(in_range, denominator, jnp.nan)
    labels = jnp.where(in_range, labels, 0)[..., None]
    picked = jnp.take_along_axis(x, labels, axis=-1, mode="promise_in_bounds")[..., 0] - top
    log = jnp.log(denominator)
    loss = log - picked
    scale = 1 / denominator
    if terms.smoothing:
        # log - (1 - e) picked - e mean; if the mean is infinite, the loss is infinite too, but not
        # NaN
        mean = terms.sum(shifted) / vocab
        loss = log - (1 - terms.smoothing) * picked - terms.smoothing * mean
    if terms.z:
        lse = top + log
        loss = loss + terms.z * lse**2
        scale = scale * (1 + 2 * terms.z * lse)
    rest = terms.smoothing / vocab
    # Unlike a scatter at the labels, a comparison fuses with the other operations on the logits.
    hot = jax.lax.broadcasted_iota(labels.dtype, x.shape, x.ndim - 1) == labels
    slope = exp * scale[..., None] - jnp.where(hot, 1 - terms.smoothing + rest, rest)
    return jnp.where(counts, loss, 0.0), jnp.where(counts[..., None], slope, 0.0)


Arrays = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]
"""Hidden states [B, T, D], table [V, D], bias [V], labels i32[B, T], weights f32[B, T]."""


def _chunked_sum(head: _Head, arrays: Arrays) -> tuple[jax.Array]:
    """Return the sum of weights * losses. Differentiating it with JAX recomputes the logits."""
    hidden, table, bias, labels, weights = arrays

    @jax.checkpoint
    def of_chunk(
        hidden: jax.Array,
        table: jax.Array,
        bias: jax.Array | None,
        labels: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:  # f32[]
        hidden = jnp.where((weights != 0)[..., None], hidden, 0)
        return _loss_of_products(head, _products(hidden, table), bias, labels, weights)

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        hidden, labels, weights = chunk
        return total + of_chunk(hidden, table, bias, labels, weights), None

    chunks = _split(head.chunk_size, hidden, labels, weights)
    return (jax.lax.scan(add, vary(jnp.float32(0), hidden), chunks)[0],)


def _sum_and_gradients(head: _Head, arrays: Arrays) -> tuple[tuple[jax.Array], Arrays]:
    """Return the sum and its gradients without recomputing any logits."""
    hidden, table, bias, labels, weights = arrays

    def add(sums: PyTree, chunk: tuple[jax.Array, ...]) -> tuple[PyTree, tuple[jax.Array, ...]]:
        hidden, labels, weights = chunk
        counts = weights != 0
        hidden = jnp.where(counts[..., None], hidden, 0)  # avoids 0 * NaN in the table's gradient
        total, pull = jax.vjp(
            lambda products, bias, weights: _loss_of_products(
                head, products, bias, labels, weights
            ),
            _products(hidden, table), bias, weights,
        )  # fmt: skip
        slope, d_bias, d_weights = pull(vary(jnp.float32(1), total))
        slope = slope.astype(hidden.dtype)  # float32 products would be slow on a GPU
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        d_hidden = product("BTV,VD->BTD", slope, table.astype(hidden.dtype))
        d_hidden = jnp.where(counts[..., None], d_hidden, 0).astype(hidden.dtype)
        d_table = product("BTV,BTD->VD", slope, hidden)
        sums = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), sums, (total, d_table, d_bias)
        )
        return sums, (d_hidden, d_weights)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), table, bias))
    (total, d_table, d_bias), (d_hidden, d_weights) = jax.lax.scan(
        add, vary(zeros, hidden), _split(head.chunk_size, hidden, labels, weights)
    )
    length = hidden.shape[1]
    return (total,), (_join(d_hidden, length), d_table, d_bias, labels, _join(d_weights, length))


def _scaled_gradients(
    arrays: Arrays, gradients: Arrays, cotangents: tuple[jax.Array, ...], wanted: PyTree
) -> Arrays:
    """Return the gradients multiplied by the cotangent of the sum, in the dtypes of the arrays."""
    (cotangent,) = cotangents
    return jax.tree.map(
        lambda x, to: (cotangent * x.astype(jnp.float32)).astype(to.dtype), gradients, arrays
    )


def _products(hidden: jax.Array, table: jax.Array) -> jax.Array:  # f32[B, T, V]
    table = table.astype(hidden.dtype)
    return jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)


def _loss_of_products(
    head: _Head,
    logits: jax.Array,  # f32[B, T, V], without the bias
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:  # f32[]
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None, None]
    if head.softcap is not None:
        logits = head.softcap * jnp.tanh(logits / head.softcap)
    return jnp.sum(weights * _token_loss(head.terms, logits, labels, weights != 0))


def _rows(chunk_size: int, length: int) -> int:
    """Return the number of positions per chunk, which is the whole length if that is symbolic."""
    # converted to a Python int because -size would wrap around for NumPy's uint8
    return int(min(chunk_size, max(length, 1))) if are_concrete(length) else length


def lengths_as_rows(like: jax.Array, *arrays: jax.Array | None) -> tuple[Any, ...]:
    """Return arrays [B, T, ...] as [B P, T / P, ...] if a mesh splits the length of `like` by P.

    Nothing moves: the tokens of each device become rows of their own, which can be cut into chunks
    without gathering. If the length is whole, the arrays are returned unchanged.
    """
    rows, length = split(like, slice(2))
    mesh = jax.typeof(like).sharding.mesh
    if length is None or len(mesh.explicit_axes) < len(mesh.axis_names):
        return arrays

    def one(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        last = split(x, slice(2, None))
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(rows, length, *last)))
        joined = PartitionSpec((*axis_names(rows), *axis_names(length)), None, *last)
        return jax.shard_map(
            lambda x: x, mesh=mesh, in_specs=PartitionSpec(rows, length, *last), out_specs=joined
        )(x)

    return tuple(map(one, arrays))


def _split(size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Split [B, T, ...] into [chunks, B, size, ...] and pad with zeros."""
    if not are_concrete(size):
        return tuple(x[None] for x in arrays)

    # padding has weight 0, or `_join` removes it
    def split(x: jax.Array) -> jax.Array:
        chunks = max(-(-x.shape[1] // size), 1)
        padding = [(0, 0), (0, chunks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        return rearrange(jnp.pad(x, padding), "B (n T) ... -> n B T ...", n=chunks)

    return tuple(split(x) for x in arrays)


def _join(x: jax.Array, length: int) -> jax.Array:  # [chunks, B, size, ...] -> [B, T, ...]
    if not are_concrete(length):
        return x[0]
    return rearrange(x, "n B T ... -> B (n T) ...")[:, :length]
