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


def tile_inputs(operands: Operands, saved: Residuals | None) -> tuple[TileInputs, TileInputs]:
    """Return the arrays in the layout that kernels use, and the kind of each array."""
    bias, kind = operands.bias, None
    if bias is not None:
        T, S = bias.shape[2:]
        kind = {(0, 0): "one", (0, 1): "key row", (1, 0): "query row", (1, 1): "pairs"}[
            T > 1, S > 1
        ]
        # per-query values are a row along the lanes, even if they are a column of the array
        bias = bias.swapaxes(2, 3) if kind == "query row" else bias
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
    )
    kinds = TileInputs(
        "query", "key", "key", "query row", "key row", "transposed pairs", kind,
        "scalars", "scalars", "scalars", "query", "query row", "query row", "query row",
    )  # fmt: skip
    for_each = zip(kinds, arrays, strict=True)
    return arrays, TileInputs(*(jax.tree.map(lambda _, kind=kind: kind, x) for kind, x in for_each))
