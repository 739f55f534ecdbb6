"""Document boundaries in packed rows, given by `segments` and `valid`.

A packed row contains several documents. `segments` assigns an ID to each token, and each run of
equal IDs is a document. A token that is not `valid` is padding, and never starts a document.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.kv_cache import next_positions
from transformer_jax.pytree import Array
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import concrete_value


def check_valid(
    name: str,
    tokens: Array,  # i32[B, T]
    valid: Array | None,  # bool[B, T]
) -> jax.Array:  # bool[B, T]
    """Check the shape and dtype of `valid` and return it as an array; None means all True."""
    if valid is None:
        return jnp.ones(tokens.shape, bool)
    valid = jnp.asarray(valid)
    if valid.dtype != bool or valid.shape != tokens.shape:
        rule = f"must be bool{list(tokens.shape)}, the shape of {name}"
        raise ValueError(f"valid is {valid.dtype}{list(valid.shape)}: {rule}")
    return valid


def check_segments(tokens: jax.Array, segments: jax.Array | None, state: object) -> None:
    """Raise ValueError unless segments are integers shaped like tokens and there is no state."""
    if segments is None:
        return
    if state is not None:
        raise ValueError("segments with a state are not supported: use one row per document")
    dtype = getattr(segments, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or segments.shape != tokens.shape:
        value = type(segments).__name__ if dtype is None else f"{dtype}{list(segments.shape)}"
        rule = f"must be integers {list(tokens.shape)}, the shape of tokens"
        raise ValueError(f"segments are {value}: {rule}")


def documents_of(segments: jax.Array) -> jax.Array:  # i32[B, T]
    """Return IDs that are equal if and only if two tokens belong to the same document.

    Raise ValueError if a known ID reappears after a different ID. Traced IDs are renumbered by run.
    """
    known = concrete_value(segments)
    if known is None:
        return number_documents(segments)
    for row, ids in enumerate(known):
        # column 0 always starts a document, because its ID differs from the prepended ID
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        first = np.unique(ids[starts], return_index=True)[1]
        repeated = np.delete(starts, first)
        if repeated.size:
            at = repeated.min()
            rule = "a document is one run of equal IDs, so use a different ID for each"
            raise ValueError(f"segments contain {ids[at]} again at [{row}, {at}]: {rule}")
    return segments


def number_documents(segments: jax.Array) -> jax.Array:  # i32[B, T] -> i32[B, T]
    """Return the index of the run of equal IDs that contains each token, from 0 in each row."""
    segments = jnp.asarray(segments)

    def number(segments: jax.Array) -> jax.Array:
        changes = segments[:, 1:] != segments[:, :-1]
        return jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))

    return by_compiler(number, [segments], split(segments))


def last_document(
    documents: jax.Array,  # i32[B, T], from `number_documents`
    valid: jax.Array,  # bool[B, T]
) -> jax.Array:  # i32[B, T]
    """Return the document of the last valid token up to each token, or -1 if there is none."""
    return jax.lax.cummax(jnp.where(valid, documents, -1), axis=1)


def first_tokens(
    documents: jax.Array,  # i32[B, T], from `number_documents`
    valid: jax.Array,  # bool[B, T]
) -> jax.Array:  # bool[B, T]
    """Return a mask of the first valid token of each document."""
    previous = last_document(documents, valid)[:, :-1]
    return valid & (documents != jnp.pad(previous, ((0, 0), (1, 0)), constant_values=-1))


def sequence_positions(
    tokens: Array,  # i32[B, T]
    length: jax.Array | None = None,  # i32[B], number of earlier tokens; None means 0
    valid: Array | None = None,  # bool[B, T]
    segments: jax.Array | None = None,  # i32[B, T]
) -> jax.Array:  # i32[T] or [B, T]
    """Return the positions of tokens in their sequences, with -1 for padding.

    If `length`, `valid` and `segments` are all None, return arange(T).
    """
    if length is None and valid is None and segments is None:
        return jnp.arange(tokens.shape[1])
    known = check_valid("tokens", tokens, valid)
    length = jnp.zeros(tokens.shape[0], jnp.int32) if length is None else length
    positions = next_positions(length, known)
    if segments is None:
        return positions
    starts = first_tokens(number_documents(segments), known)
    first = jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)
    return jnp.where(known, positions - first, -1)
