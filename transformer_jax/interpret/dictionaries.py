"""Sparse autoencoders and transcoders, which represent captured values as sums of a few directions.

The values x and the targets y are centered and scaled to unit variance:

    f = act(x W_e + b_e)      y' = f W_d + b_d      F features, more than D

An autoencoder reconstructs its input. A transcoder reconstructs the value at another place, such as
the output of the branch whose input it reads. `act` is either TopK or a ReLU with an L1 term in the
loss. TopK keeps the K largest features of each token, including ties for the last place.

Sources: Bricken et al. 2023, "Towards monosemanticity"; Gao et al. 2024 (arXiv:2406.04093),
"Scaling and evaluating sparse autoencoders"; Dunefsky et al. 2024 (arXiv:2406.11944), "Transcoders
find interpretable LLM feature circuits".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.interpret.models import Transformer, check_model, resolve_places, run
from transformer_jax.models.ops import lookup
from transformer_jax.models.places import Edit
from transformer_jax.models.transformer import Decoder
from transformer_jax.pytree import Array, Params
from transformer_jax.values import short_repr, value_class

ARRAYS = (
    "encoder", "encoder_bias", "decoder", "bias", "centre", "size", "target_centre", "target_size"
)  # fmt: skip
"""Names of the arrays of a dictionary. The last four describe the values and are not trained."""


@value_class(kw_only=True, arrays=ARRAYS, static=("place", "target", "active"))
class Dictionary:
    """Sparse autoencoder or transcoder for the values at a place.

    If the value has several heads, they are concatenated into one vector.

    Attributes:
        encoder: W_e, f32[D, F].
        encoder_bias: b_e, f32[F].
        decoder: W_d, f32[F, D'], the direction of each feature.
        bias: b_d, f32[D'].
        centre: f32[D], the vector subtracted from an input value.
        size: f32[], the divisor of the centered input value.
        target_centre: f32[D'], the vector subtracted from a target value.
        target_size: f32[], the divisor of the centered target value.
        place: the place of the input value.
        target: the place of the reconstructed value; equal to `place` for an autoencoder.
        active: K, the number of features to keep for each token; None uses a ReLU instead of TopK.
    """

    encoder: jax.Array
    encoder_bias: jax.Array
    decoder: jax.Array
    bias: jax.Array
    centre: jax.Array
    size: jax.Array
    target_centre: jax.Array
    target_size: jax.Array
    place: str
    target: str
    active: int | None

    def encode(self, values: jax.Array) -> jax.Array:  # [..., D] -> f32[..., F]
        """Return the features of values, which are nonnegative and mostly 0."""
        x = (values.astype(jnp.float32) - _expand(self.centre, values)) / self.size
        f = jax.nn.relu(x @ self.encoder + _expand(self.encoder_bias, values))
        if self.active is None:
            return f
        # use a threshold instead of a scatter, so that ties with the K-th feature are kept
        least = jax.lax.top_k(f, self.active)[0][..., -1:]
        return jnp.where(f < least, 0, f)  # NaN stays NaN

    def decode(self, features: jax.Array) -> jax.Array:  # [..., F] -> f32[..., D']
        """Return the values that the features represent."""
        y = features @ self.decoder + _expand(self.bias, features)
        return y * self.target_size + _expand(self.target_centre, features)

    def edit(self) -> dict[str, Edit]:
        """Return an edit that replaces the target with its reconstruction.

        Raises:
            ValueError: if this is a transcoder between two branches or blocks.
        """
        if self.place == self.target:

            def rebuild(value: jax.Array) -> jax.Array:
                return _like(self.decode(self.encode(_flat(value))), value)

            return {self.place: rebuild}
        if self.place.rpartition("/")[0] != self.target.rpartition("/")[0]:
            rule = "both must be in the same branch, so that both values are available together"
            raise ValueError(f"edit of {self.place} and {self.target}: {rule}")
        inputs: list[jax.Array] = []  # the edit at `place` runs before the edit at `target`

        def keep(value: jax.Array) -> jax.Array:
            inputs.append(value)
            return value

        def put(value: jax.Array) -> jax.Array:
            return _like(self.decode(self.encode(_flat(inputs.pop()))), value)

        return {self.place: keep, self.target: put}


def _expand(vector: jax.Array, values: jax.Array) -> jax.Array:
    return vector.reshape((1,) * (values.ndim - 1) + vector.shape)


def _flat(value: jax.Array) -> jax.Array:  # [B, T, ...] -> [B, T, D]
    return value.reshape(*value.shape[:2], -1)


def _like(flat: jax.Array, value: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, ...]
    return flat.reshape(value.shape).astype(value.dtype)


@short_repr
class FeatureExamples(NamedTuple):
    """Tokens with the largest values of each feature, in descending order."""

    values: jax.Array
    """f32[n, count]: value of the feature at each token."""
    rows: jax.Array
    """i32[n, count]: row of each token."""
    positions: jax.Array
    """i32[n, count]: position of each token in its row."""


def feature_examples(
    model: Transformer,
    params: Params,
    dictionary: Dictionary,
    tokens: jax.Array,  # i32[B, T]
    features: jax.Array,  # i32[n]
    *,
    count: int = 10,
    batch_size: int = 8,
    **arguments: Any,
) -> FeatureExamples:
    """Return the tokens with the largest values of each feature.

    For each token, `tokens[row, : position + 1]` is the context up to and including it.

    Args:
        model: the model that the dictionary was trained on.
        params: the parameters of the model.
        dictionary: a trained dictionary, such as `load_dictionary` returns.
        tokens: i32[B, T], the rows of tokens to search.
        features: i32[n], the indices of the features.
        count: the number of tokens to return for each feature, at most B T.
        batch_size: the number of rows to process at a time.
        **arguments: other arguments of `model.apply` without a row axis.

    Returns:
        The values, rows and positions of the tokens, each of shape [n, count]. If a feature is
        active at fewer than `count` tokens, its remaining values are 0.

    Raises:
        ValueError: if a feature or `count` is out of range. If such a feature is traced, its values
            are NaN instead.
    """
    check_model("feature_examples", model, arguments, "capture")
    B, T = tokens.shape
    features, F = jnp.asarray(features), dictionary.encoder.shape[1]
    concrete = features.ndim == 1 and not isinstance(features, jax.core.Tracer)
    if features.ndim != 1 or (concrete and bool(((features < 0) | (features >= F)).any())):
        raise ValueError(
            f"features is {features!r:.60}: must be a list of indices from 0 to {F - 1}"
        )
    if not 1 <= count <= B * T:
        raise ValueError(f"count is {count}: must be from 1 to {B * T}")
    name = dictionary.place

    def search(
        params: Params, dictionary: Dictionary, tokens: jax.Array, features: jax.Array
    ) -> FeatureExamples:
        def of_row(row: jax.Array) -> jax.Array:  # [T] -> f32[T, n]
            value = run(model, params, arguments, row[None], capture=(name,))[1][name]
            return lookup(dictionary.encode(_flat(value))[0].T, features).T

        # the features of all tokens may not fit in memory, so keep only the requested ones of each
        # row
        found = jax.lax.map(of_row, tokens, batch_size=min(batch_size, B))
        values, at = jax.lax.top_k(found.reshape(B * T, -1).T, count)
        return FeatureExamples(values, at // T, at % T)

    return jax.jit(search)(params, dictionary, jnp.asarray(tokens), features)


@short_repr
class DictionaryScores(NamedTuple):
    """Quality of the reconstruction by a dictionary on a set of tokens."""

    variance_explained: jax.Array
    """f32[]: 1 - sum |y - y'|^2 / sum |y - mean(y)|^2."""
    l0: jax.Array
    """f32[]: average number of nonzero features for each token."""
    dead: jax.Array
    """f32[]: fraction of the features that are 0 at every token."""
    loss: jax.Array
    """f32[]: loss of the unedited model, in nats per token."""
    loss_rebuilt: jax.Array
    """f32[]: loss if the value is replaced by its reconstruction."""
    loss_without: jax.Array
    """f32[]: loss if the value is replaced by 0."""

    @property
    def loss_recovered(self) -> jax.Array:
        """Return (without - rebuilt) / (without - loss).

        The result is 1 for a perfect reconstruction.
        """
        return (self.loss_without - self.loss_rebuilt) / (self.loss_without - self.loss)


def dictionary_scores(
    model: Decoder,
    params: Params,
    dictionary: Dictionary,
    tokens: Array,  # i32[B, T]
    *,
    batch_size: int = 8,
) -> DictionaryScores:
    """Return the reconstruction quality of a dictionary and the losses of the model with it.

    The loss is the mean cross-entropy of all tokens except the first of each row (Bricken et al.
    2023).

    Args:
        model: the decoder that the dictionary was trained on.
        params: the parameters of the model.
        dictionary: a trained dictionary, such as `load_dictionary` returns.
        tokens: i32[B, T], held-out rows of tokens.
        batch_size: the number of rows to process at a time.

    Raises:
        ValueError: if the model is not a decoder, or if the rows have fewer than two tokens.
    """
    if not isinstance(model, Decoder) or tokens.shape[1] < 2:
        got = f"{type(model).__name__} and rows of length {tokens.shape[1]}"
        rule = "must be a Decoder and rows of at least 2 tokens"
        raise ValueError(f"dictionary_scores received {got}: {rule}")
    names = resolve_places(model, (dictionary.place, dictionary.target))

    def scored(params: Params, dictionary: Dictionary, tokens: jax.Array) -> DictionaryScores:
        def loss(
            row: jax.Array, edit: Mapping[str, Edit], capture: tuple[str, ...] = ()
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            logits, captured = run(model.edited(edit), params, {}, row[None], capture=capture)
            log_p = jax.nn.log_softmax(logits[0, :-1])
            return -jnp.take_along_axis(log_p, row[1:, None], axis=1).mean(), captured

        def of_row(row: jax.Array) -> tuple[jax.Array, ...]:
            unedited, captured = loss(row, {}, names)
            x, y = (_flat(captured[n]) for n in (dictionary.place, dictionary.target))
            f, y = dictionary.encode(x), y.astype(jnp.float32)
            error = ((y - dictionary.decode(f)) ** 2).sum()
            rebuilt = loss(row, dictionary.edit())[0]
            losses = unedited, rebuilt, loss(row, {dictionary.target: jnp.zeros_like})[0]
            sums = error, y[0].sum(axis=0), (y**2).sum()
            return *sums, (f > 0).sum(), (f[0] > 0).any(axis=0), *losses

        found = jax.lax.map(of_row, tokens, batch_size=min(batch_size, len(tokens)))
        errors, summed, squares, active, used, *losses = found
        n = tokens.size
        # compute sum |y - mean|^2 in one pass, without storing the rows
        spread = squares.sum() - (summed.sum(axis=0) ** 2).sum() / n
        return DictionaryScores(
            1 - errors.sum() / spread, active.sum() / n, 1 - used.any(axis=0).mean(),
            *(part.mean() for part in losses),
        )  # fmt: skip

    return jax.jit(scored)(params, dictionary, jnp.asarray(tokens))
