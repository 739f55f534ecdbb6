"""Write captured values as sums of few directions: sparse autoencoders and transcoders.

With values x and targets y that are centred and divided by their size,

    f = act(x W_e + b_e)      y' = f W_d + b_d      F features, more than D

an autoencoder rebuilds what it reads, a transcoder the value of another place, such as the output
of the branch whose input it reads. `act` keeps the K largest of each token, all that are equal to
the last of them too, and puts 0 for the others (TopK); or it is a ReLU, and the loss has an L1 term
that keeps f sparse.

Sources: Bricken et al. 2023, "Towards monosemanticity"; Gao et al. 2024 (arXiv:2406.04093),
"Scaling and evaluating sparse autoencoders"; Dunefsky et al. 2024 (arXiv:2406.11944), "Transcoders
find interpretable LLM feature circuits".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.inside.models import Transformer, check_model, known_places, run
from transformer_jax.models.ops import lookup
from transformer_jax.models.places import Edit
from transformer_jax.models.transformer import Decoder
from transformer_jax.pytree import Array, Params
from transformer_jax.values import short_repr, value_class

ARRAYS = (
    "encoder", "encoder_bias", "decoder", "bias", "centre", "size", "target_centre", "target_size"
)  # fmt: skip
"""The arrays of a dictionary; the last four are of the values, and no step changes them."""


@value_class(kw_only=True, arrays=ARRAYS, static=("place", "target", "active"))
class Dictionary:
    """Hold a sparse autoencoder, or a transcoder, of the value of a place.

    A value with heads is read as one vector of all of them.

    Attributes:
        encoder: W_e, f32[D, F].
        encoder_bias: b_e, f32[F].
        decoder: W_d, f32[F, D']: the direction of each feature.
        bias: b_d, f32[D'].
        centre: f32[D], what is taken from a value before it is read.
        size: f32[], what it is then divided by.
        target_centre: f32[D'], the same of what is rebuilt.
        target_size: f32[].
        place: whose value is read.
        target: whose value is rebuilt; `place` of an autoencoder.
        active: features of a token that are kept, K; None is a ReLU.
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
        """Return the features of values, at least 0 and most of them 0."""
        x = (values.astype(jnp.float32) - _for(self.centre, values)) / self.size
        f = jax.nn.relu(x @ self.encoder + _for(self.encoder_bias, values))
        if self.active is None:
            return f
        # a threshold, and no scatter of indices: features that equal the last one stay too
        least = jax.lax.top_k(f, self.active)[0][..., -1:]
        return jnp.where(f < least, 0, f)  # NaN stays NaN

    def decode(self, features: jax.Array) -> jax.Array:  # [..., F] -> f32[..., D']
        """Return the values that features stand for."""
        y = features @ self.decoder + _for(self.bias, features)
        return y * self.target_size + _for(self.target_centre, features)

    def edit(self) -> dict[str, Edit]:
        """Return an edit that puts what is rebuilt in the place of the target.

        Raises:
            ValueError: if it is a transcoder between two blocks, which an edit of one value at a
                time cannot join.
        """
        if self.place == self.target:

            def rebuild(value: jax.Array) -> jax.Array:
                return _like(self.decode(self.encode(_flat(value))), value)

            return {self.place: rebuild}
        if self.place.rpartition("/")[0] != self.target.rpartition("/")[0]:
            rule = "must be of one branch, whose values are at hand together"
            raise ValueError(f"edit of {self.place} and {self.target}: {rule}")
        read: list[jax.Array] = []  # by the edit of the place, which comes first

        def keep(value: jax.Array) -> jax.Array:
            read.append(value)
            return value

        def put(value: jax.Array) -> jax.Array:
            return _like(self.decode(self.encode(_flat(read.pop()))), value)

        return {self.place: keep, self.target: put}


def _for(vector: jax.Array, values: jax.Array) -> jax.Array:
    return vector.reshape((1,) * (values.ndim - 1) + vector.shape)


def _flat(value: jax.Array) -> jax.Array:  # [B, T, ...] -> [B, T, D]
    return value.reshape(*value.shape[:2], -1)


def _like(flat: jax.Array, value: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, ...]
    return flat.reshape(value.shape).astype(value.dtype)


@short_repr
class FeatureExamples(NamedTuple):
    """Hold where features are largest, the largest first."""

    values: jax.Array
    """f32[n, count]: the features there."""
    rows: jax.Array
    """i32[n, count]: of the tokens."""
    positions: jax.Array
    """i32[n, count]: of the token in its row."""


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
    """Return the tokens at which some features are largest.

    `tokens[row, : position + 1]` is then the context, up to the token itself.

    Args:
        model: the one that the dictionary is of.
        params: its parameters.
        dictionary: of `load_dictionary`.
        tokens: i32[B, T], in which is looked.
        features: i32[n], which.
        count: how many tokens of each, at most B T.
        batch_size: rows that run together.
        **arguments: others of `model.apply` that have no axis of rows.

    Returns:
        Values, rows and positions, [n, count] each; a value of 0 says that there are no more.

    Raises:
        ValueError: if there is no such feature, or `count` is out of its range. Of a traced feature
            that is none the values are NaN.
    """
    check_model("feature_examples", model, arguments, "capture")
    B, T = tokens.shape
    features, F = jnp.asarray(features), dictionary.encoder.shape[1]
    known = features.ndim == 1 and not isinstance(features, jax.core.Tracer)
    if features.ndim != 1 or (known and bool(((features < 0) | (features >= F)).any())):
        raise ValueError(f"features is {features!r:.60}: must be some of 0..{F - 1}")
    if not 1 <= count <= B * T:
        raise ValueError(f"count is {count}: must be in 1..{B * T}")
    name = dictionary.place

    def looked(
        params: Params, dictionary: Dictionary, tokens: jax.Array, features: jax.Array
    ) -> FeatureExamples:
        def of_row(row: jax.Array) -> jax.Array:  # [T] -> f32[T, n]
            value = run(model, params, arguments, row[None], capture=(name,))[1][name]
            return lookup(dictionary.encode(_flat(value))[0].T, features).T

        found = jax.lax.map(of_row, tokens, batch_size=min(batch_size, B))
        values, at = jax.lax.top_k(found.reshape(B * T, -1).T, count)
        return FeatureExamples(values, at // T, at % T)

    return jax.jit(looked)(params, dictionary, jnp.asarray(tokens), features)


@short_repr
class DictionaryScores(NamedTuple):
    """Hold how well a dictionary stands for a value, over some tokens."""

    variance_explained: jax.Array
    """f32[]: 1 - sum |y - y'|^2 / sum |y - mean(y)|^2."""
    l0: jax.Array
    """f32[]: features of a token that are not 0, on average."""
    dead: jax.Array
    """f32[]: share of the features that are 0 at every token."""
    loss: jax.Array
    """f32[]: of the model as it is, nats a token."""
    loss_rebuilt: jax.Array
    """f32[]: with what is rebuilt in the place of the value."""
    loss_without: jax.Array
    """f32[]: with 0 in its place."""

    @property
    def loss_recovered(self) -> jax.Array:
        """Return (without - rebuilt) / (without - loss): 1 where nothing is lost."""
        return (self.loss_without - self.loss_rebuilt) / (self.loss_without - self.loss)


def dictionary_scores(
    model: Decoder,
    params: Params,
    dictionary: Dictionary,
    tokens: Array,  # i32[B, T]
    *,
    batch_size: int = 8,
) -> DictionaryScores:
    """Return what a dictionary explains, how sparse it is, and what the model loses with it.

    The loss is the mean cross-entropy of the tokens from the second on (Bricken et al. 2023).

    Args:
        model: the decoder that the dictionary is of.
        params: its parameters.
        dictionary: of `load_dictionary`.
        tokens: i32[B, T], held-out rows.
        batch_size: rows that run together.

    Raises:
        ValueError: if the model is no decoder, or rows have less than two tokens.
    """
    if not isinstance(model, Decoder) or tokens.shape[1] < 2:
        what = f"a {type(model).__name__} on rows of {tokens.shape[1]}"
        raise ValueError(f"dictionary_scores of {what}: must be a decoder on two tokens or more")
    names = known_places(model, (dictionary.place, dictionary.target))

    def scored(params: Params, dictionary: Dictionary, tokens: jax.Array) -> DictionaryScores:
        def loss(
            row: jax.Array, edit: Mapping[str, Edit], capture: tuple[str, ...] = ()
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            logits, captured = run(model, params, {"edit": edit}, row[None], capture=capture)
            log_p = jax.nn.log_softmax(logits[0, :-1])
            return -jnp.take_along_axis(log_p, row[1:, None], axis=1).mean(), captured

        def of_row(row: jax.Array) -> tuple[jax.Array, ...]:
            own, captured = loss(row, {}, names)
            x, y = (_flat(captured[n]) for n in (dictionary.place, dictionary.target))
            f, y = dictionary.encode(x), y.astype(jnp.float32)
            missed = ((y - dictionary.decode(f)) ** 2).sum()
            rebuilt = loss(row, dictionary.edit())[0]
            losses = own, rebuilt, loss(row, {dictionary.target: jnp.zeros_like})[0]
            sums = missed, y[0].sum(axis=0), (y**2).sum()
            return *sums, (f > 0).sum(), (f[0] > 0).any(axis=0), *losses

        found = jax.lax.map(of_row, tokens, batch_size=min(batch_size, len(tokens)))
        missed, summed, squares, active, used, *losses = found
        n = tokens.size
        # sum |y - mean|^2 in one pass over the rows, which are not kept
        spread = squares.sum() - (summed.sum(axis=0) ** 2).sum() / n
        return DictionaryScores(
            1 - missed.sum() / spread, active.sum() / n, 1 - used.any(axis=0).mean(),
            *(part.mean() for part in losses),
        )  # fmt: skip

    return jax.jit(scored)(params, dictionary, jnp.asarray(tokens))
