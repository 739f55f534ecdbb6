"""Steering vectors: the difference between the mean values of two kinds of texts.

    vector = steering_vector(model, params, kind, unkind, "block_5/residual")
    edit = add("block_5/residual", 2 * vector)
    m.edited(edit).generate("Once upon")

Sources: Turner et al. 2023 (arXiv:2308.10248), "Activation addition"; Panickssery et al. 2023
(arXiv:2312.06681), "Steering Llama 2 via contrastive activation addition".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import as_int32
from transformer_jax.interpret.models import Transformer, check_model, resolve_places, run
from transformer_jax.models.arguments import check_tokens
from transformer_jax.pytree import Params

Rows: TypeAlias = jax.Array | np.ndarray | Sequence[Sequence[int] | np.ndarray]
"""Rows of token IDs: an array i32[n, T], or n lists of different lengths."""


def steering_vector(
    model: Transformer,
    params: Params,
    positive: Rows,
    negative: Rows,
    place: str,
    *,
    over: Literal["last", "all"] = "last",
    **arguments: Any,
) -> jax.Array:  # f32[D], or the last axes of the value
    """Return the mean of a value over positive texts minus its mean over negative texts.

    vector = mean_i x_i(positive) - mean_i x_i(negative), where x_i is the value at the last token
    of text i, or its mean over the tokens of the text (contrastive activation addition, Panickssery
    et al. 2023). To steer the model, use `add` with a multiple of the vector.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: the parameters of the model, with a looped or a scanned stack.
        positive: texts to steer toward, as i32[n, T] or as n lists of token IDs of different
            lengths.
        negative: texts to steer away from. Their number may differ.
        place: a single place whose value has an entry for each token, such as a residual, heads or
            an output.
        over: "last" uses the value at the last token of each text; "all" uses the mean over its
            tokens.
        **arguments: other arguments of `model.apply` without a row axis.

    Returns:
        The vector: f32[D] for a stream, or f32[N, H] for heads.

    Raises:
        ValueError: if the place does not exist, if its value does not have an entry for each token,
            if a text is empty, or if a token is not in the vocabulary.
    """
    check_model("steering_vector", model, arguments, "capture positions")
    names = resolve_places(model, place)
    if len(names) != 1 or names[0].endswith(("/weights", "/key_positions")):
        rule = "must be one place with a value for each token, such as 'block_1/residual'"
        raise ValueError(f"place is {place!r}: {rule}")
    if over not in ("last", "all"):
        raise ValueError(f"over is {over!r}: must be 'last' or 'all'")

    def mean_of(name: str, rows: Rows) -> jax.Array:
        tokens, counts = _pad(name, rows)
        check_tokens(tokens, model.config.vocab_size)

        def average(params: Params, tokens: jax.Array, counts: jax.Array) -> jax.Array:
            index = jnp.arange(tokens.shape[1])[None]
            valid = index < counts[:, None]
            # a negative position marks padding, which no token sees
            positions = {"positions": jnp.where(valid, index, -1)}
            value = run(model, params, arguments | positions, tokens, capture=names)[1][names[0]]
            used = index == counts[:, None] - 1 if over == "last" else valid
            # all texts have the same weight, regardless of their lengths
            share = used / used.sum(axis=1, keepdims=True) / len(tokens)
            return jnp.einsum("BT,BT...->...", share, value.astype(jnp.float32))

        return jax.jit(average)(params, tokens, counts)

    return mean_of("positive", positive) - mean_of("negative", negative)


def _pad(name: str, rows: Rows) -> tuple[jax.Array, jax.Array]:  # i32[n, T], i32[n]
    """Pad rows with zeros at the end, and return them with their lengths."""
    if isinstance(rows, jax.Array | np.ndarray) and rows.ndim == 2 and rows.size:
        return jnp.asarray(rows), jnp.full(len(rows), rows.shape[1])
    found = [np.asarray(row) for row in rows]
    if not found or not all(x.ndim == 1 and x.size and x.dtype.kind in "iu" for x in found):
        rule = "must be rows of token IDs, each with at least one token"
        raise ValueError(f"{name} is {rows!r:.60}: {rule}")
    lengths = [len(row) for row in found]
    padded = np.zeros((len(found), max(lengths)), np.int64)
    for row, ids in zip(padded, found, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(as_int32(name, padded)), jnp.asarray(lengths)
