"""Make a vector that steers: the mean difference of a value between two kinds of texts.

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
from transformer_jax.inside.models import Transformer, check_model, known_places, run
from transformer_jax.models.arguments import check_tokens
from transformer_jax.pytree import Params

Rows: TypeAlias = jax.Array | np.ndarray | Sequence[Sequence[int] | np.ndarray]
"""Rows of ids: i32[n, T], or n of unlike length."""


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
    """Return the mean of a value over some texts less its mean over others.

    vector = mean_i x_i(positive) - mean_i x_i(negative), x_i the value at the last token of text i,
    or its mean over the tokens of the text: contrastive activation addition (Panickssery et al.
    2023). `add` puts a multiple of it into the model.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: its parameters, looped or scanned.
        positive: i32[n, T], or a list of n rows of ids of unlike length, of texts to steer to.
        negative: as many rows or not, of texts to steer away from.
        place: one name of `transformer_jax.places`, of a value of each token: a residual, heads, an
            output.
        over: "last" reads the value at the last token of each text, "all" the mean over its tokens.
        **arguments: others of `model.apply` for both that have no axis of rows, such as `edit`.

    Returns:
        f32[D] of a stream, f32[N, H] of heads.

    Raises:
        ValueError: if there is no such place, or it is of no single token, a text has no token, or
            one is outside the vocabulary.
    """
    check_model("steering_vector", model, arguments, "capture positions")
    names = known_places(model, place)
    if len(names) != 1 or names[0].endswith(("/weights", "/key_positions")):
        rule = "must be the name of one value of each token, such as 'block_1/residual'"
        raise ValueError(f"place is {place!r}: {rule}")
    if over not in ("last", "all"):
        raise ValueError(f"over is {over!r}: must be 'last' or 'all'")

    def mean_of(name: str, rows: Rows) -> jax.Array:
        tokens, counts = _padded(name, rows)
        check_tokens(tokens, model.config.vocab_size)

        def average(params: Params, tokens: jax.Array, counts: jax.Array) -> jax.Array:
            index = jnp.arange(tokens.shape[1])[None]
            known = index < counts[:, None]
            given = {**arguments, "positions": jnp.where(known, index, -1)}
            value = run(model, params, given, tokens, capture=names)[1][names[0]]
            used = index == counts[:, None] - 1 if over == "last" else known
            # each text has the same share, however long it is
            share = used / used.sum(axis=1, keepdims=True) / len(tokens)
            return jnp.einsum("BT,BT...->...", share, value.astype(jnp.float32))

        return jax.jit(average)(params, tokens, counts)

    return mean_of("positive", positive) - mean_of("negative", negative)


def _padded(name: str, rows: Rows) -> tuple[jax.Array, jax.Array]:  # i32[n, T], i32[n]
    """Return rows with zeros after the shorter ones, and how long they are."""
    if isinstance(rows, jax.Array | np.ndarray) and rows.ndim == 2 and rows.size:
        return jnp.asarray(rows), jnp.full(len(rows), rows.shape[1])
    found = [np.asarray(row) for row in rows]
    if not found or not all(x.ndim == 1 and x.size and x.dtype.kind in "iu" for x in found):
        rule = "must be rows of ids, each of at least one token"
        raise ValueError(f"{name} is {rows!r:.60}: {rule}")
    lengths = [len(row) for row in found]
    padded = np.zeros((len(found), max(lengths)), np.int64)
    for row, ids in zip(padded, found, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(as_int32(name, padded)), jnp.asarray(lengths)
