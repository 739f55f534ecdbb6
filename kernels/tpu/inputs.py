"""Layout and kinds of the input arrays for kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from transformer_jax.kernels.contract import Operands, Residuals

Field = Any
"""Array, its kind, or its tile in a kernel, or a tuple of these, or None."""


class TileInputs(NamedTuple):
    """Inputs of a kernel, [B, N, T, H] and [B, N, 1, T], as arrays, kinds or tiles."""

    query: Field
    key: Field
    value: Field
    q_vectors: Field
    k_vectors: Field
    pairs: Field  # [B, N, S, T]
    bias: Field
    slopes: Field
    sinks: Field
    dropout: Field
    do: Field
    row_max: Field
    log_sum: Field
    D: Field
    k_scale: Field = None  # [B, K, S], for the decode kernel if keys and values are int8
    v_scale: Field = None
    score_values: Field = None  # a tuple if there is a function of a score


def tile_inputs(operands: Operands, saved: Residuals | None) -> tuple[TileInputs, TileInputs]:
    """Return the arrays in the layout that kernels use, and the kind of each array."""

    def kind_of(x: jax.Array) -> str:  # [.., T or 1, S or 1]
        kinds = {(0, 0): "one", (0, 1): "key row", (1, 0): "query row", (1, 1): "pairs"}
        return kinds[x.shape[2] > 1, x.shape[3] > 1]

    # per-query values are a row along the lanes, even if they are a column of the array
    def laid_out(x: jax.Array) -> jax.Array:
        return x.swapaxes(2, 3) if kind_of(x) == "query row" else x

    like_bias = operands.bias, operands.score_values
    bias, score_values = jax.tree.map(laid_out, like_bias)
    bias_kind, value_kinds = jax.tree.map(kind_of, like_bias)
    words = operands.dropout
    arrays = TileInputs(
        query=operands.query.swapaxes(1, 2),
        key=operands.key.swapaxes(1, 2),
        value=operands.value.swapaxes(1, 2),
        q_vectors=tuple(x[:, None, None] for x in operands.q_vectors),
        k_vectors=tuple(x[:, None, None] for x in operands.k_vectors),
        pairs=None if operands.pairs is None else operands.pairs.swapaxes(2, 3),
        bias=bias,
        slopes=None if operands.slopes is None else operands.slopes.reshape(-1),
        sinks=None if operands.sinks is None else operands.sinks.reshape(-1),
        dropout=None if words is None else (words[0].reshape(-1), words[1].reshape(-1)),
        do=None if saved is None else saved.do.swapaxes(1, 2),
        row_max=None if saved is None else saved.row_max[:, :, None],
        log_sum=None if saved is None else saved.log_sum[:, :, None],
        D=None if saved is None else saved.D[:, :, None],
        score_values=score_values,
    )
    kinds = TileInputs(
        "query", "key", "key", "query row", "key row", "transposed pairs", bias_kind,
        "scalars", "scalars", "scalars", "query", "query row", "query row", "query row",
    )  # fmt: skip
    for_each = zip(kinds, arrays, strict=True)
    kinds = TileInputs(*(jax.tree.map(lambda _, kind=kind: kind, x) for kind, x in for_each))
    return arrays, kinds._replace(score_values=value_kinds)
