"""Find where packed documents begin, and check what says so: `segments` and `valid`.

Several documents stand side by side in one row; `segments` gives each token an id, and a run of
equal ids is a document. A token that is not `valid` is padding and begins nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.cache.kv_cache import next_positions
from transformer_jax.pytree import Array
from transformer_jax.tracing import known_value


def check_valid(
    name: str,
    tokens: Array,  # i32[B, T]
    valid: Array | None,  # bool[B, T]
) -> jax.Array:  # bool[B, T]
    """Return which tokens are no padding; ValueError unless it is bool of the tokens' shape."""
    if valid is None:
        return jnp.ones(tokens.shape, bool)
    given = jnp.asarray(valid)
    if given.dtype != bool or given.shape != tokens.shape:
        rule = f"must be bool{list(tokens.shape)}, as {name} are"
        raise ValueError(f"valid is {given.dtype}{list(given.shape)}: {rule}")
    return given


def check_segments(tokens: jax.Array, segments: jax.Array | None, state: object) -> None:
    """Raise ValueError unless segments are integers of the tokens' shape, without a state."""
    if segments is None:
        return
    if state is not None:
        raise ValueError("segments with a state: give each document a row of its own")
    dtype = getattr(segments, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or segments.shape != tokens.shape:
        given = type(segments).__name__ if dtype is None else f"{dtype}{list(segments.shape)}"
        rule = f"must be integers {list(tokens.shape)}, as tokens are"
        raise ValueError(f"segments are {given}: {rule}")


def documents_of(segments: jax.Array) -> jax.Array:  # i32[B, T]
    """Return ids by which two tokens are of one document exactly where their ids are equal.

    ValueError where an id is known to come again after another one; traced runs are numbered.
    """
    known = known_value(segments)
    if known is None:
        return number_documents(segments)
    for row, ids in enumerate(known):
        # the id prepended differs from the first one, so that column 0 begins a document
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        first = np.unique(ids[starts], return_index=True)[1]
        again = np.delete(starts, first)
        if again.size:
            at = again.min()
            rule = "a document is one run of equal ids, so give each its own"
            raise ValueError(f"segments have {ids[at]} again at [{row}, {at}]: {rule}")
    return segments


def number_documents(segments: jax.Array) -> jax.Array:  # i32[B, T] -> i32[B, T]
    """Return 0, 1, 2, ... for the first, second, third run of equal ids of each row."""
    segments = jnp.asarray(segments)
    changes = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def last_document(
    documents: jax.Array,  # i32[B, T], of `number_documents`
    valid: jax.Array,  # bool[B, T]
) -> jax.Array:  # i32[B, T]
    """Return the document of the last valid token so far; -1 before any."""
    return jax.lax.cummax(jnp.where(valid, documents, -1), axis=1)


def first_tokens(
    documents: jax.Array,  # i32[B, T], of `number_documents`
    valid: jax.Array,  # bool[B, T]
) -> jax.Array:  # bool[B, T]
    """Return which tokens are the first valid one of their document."""
    before = last_document(documents, valid)[:, :-1]
    return valid & (documents != jnp.pad(before, ((0, 0), (1, 0)), constant_values=-1))


def sequence_positions(
    tokens: Array,  # i32[B, T]
    length: jax.Array | None = None,  # i32[B], tokens that were read before; None is none
    valid: Array | None = None,  # bool[B, T]
    segments: jax.Array | None = None,  # i32[B, T]
) -> jax.Array:  # i32[T] or [B, T]
    """Return where tokens stand in their sequences, -1 of padding; arange(T) if all do alike."""
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
