"""The form of a mask for kernels: integers per query, integers per key, and a comparison."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_same_bits
from transformer_jax.attention.mask import refuse_mask
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Everything,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def masks_of_vectors(rng: np.random.Generator) -> dict:
    valid, lengths = jax.device_put((rng.random((2, 19)) < 0.7, np.array([0, 6])))
    q_ids, k_ids = (jax.device_put(rng.integers(0, 3, (2, n))) for n in (13, 19))
    short = jax.device_put(rng.integers(0, 2, (2, 5)))
    matrix, other = (Dense(jax.device_put(rng.random(n) < 0.6)) for n in ((13, 19), (2, 1, 29, 31)))
    return {
        "everything": Everything(),
        "causal": Causal(),
        "past": Window(4),
        "future": Window(None, 3),
        "both sides": Window(3, 2),
        "nothing": Window(0, 0),
        "padding": Padding(valid),
        "prefix": Prefix(lengths),
        "segments": Segments(q_ids, k_ids),
        "segments of a short table": Segments(short),
        "predicate": Predicate(lambda q, k: (q ^ k) & 3 == 1),
        "not everything": ~Everything(),
        "matrix": matrix,
        "row": Dense(valid[:, None, None]),
        "column": ~Dense(short[:, None, :, None] == 1),
        "matrices": Causal() & ~matrix | Padding(valid) & other,
        "eight matrices": functools.reduce(operator.or_, [*[matrix & other] * 3, matrix, ~other]),
        "prefix language model": Causal() | Prefix(lengths),
        "all at once": (~Causal() & Window(None, 7)) | (Padding(valid) & ~Segments(q_ids, k_ids)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", masks_of_vectors(np.random.default_rng(0)))
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_mask_vectors_reproduce_mask(name, ragged, rng):
    mask = masks_of_vectors(rng)[name]
    q, k = jnp.arange(13)[None], jnp.arange(19)[None]
    if ragged:
        q, k = q + jnp.array([[2], [9]]), jnp.where(jnp.arange(19) % 5 == 4, -1, k + 3)
    vectors = MaskVectors.of(mask, q, k, not ragged)
    bits = [np.asarray(matrix, np.int32) << bit for bit, matrix in enumerate(vectors.matrices)]
    pairs = [jnp.asarray(sum(bits))] if bits else []
    sees = vectors.visible(
        tuple(x[:, None, :, None] for x in vectors.q),
        (*(x[:, None, None, :] for x in vectors.k), *pairs),
    )
    expected = mask.materialize(q, k)
    full = (2, 1, 13, 19)
    assert_same_bits(
        np.broadcast_to(sees, full).astype(int), np.broadcast_to(expected, full).astype(int)
    )


def test_equal_masks_have_equal_mask_vectors():
    """Masks of equal structure share a compiled program for all values."""

    def visible(n, ids):
        mask = Causal() & Window(n) & Segments(jnp.asarray(ids)[None])
        return MaskVectors.of(mask, jnp.arange(3)[None], jnp.arange(3)[None], True).visible

    first, again, other = visible(4, [0, 1, 1]), visible(4, [2, 2, 2]), visible(5, [0, 1, 1])
    assert first == again and hash(first) == hash(again)
    assert first != other


@pytest.mark.slow
def test_unsupported_masks_report_reason():
    table = jnp.ones((4, 4), bool)
    eight = functools.reduce(operator.or_, [~Dense(table)] * 8)
    assert refuse_mask(Causal() & eight) is None
    assert refuse_mask(~eight & Dense(table)) == "supports at most 8 Dense masks, not 9"
    assert refuse_mask(~eight & Dense(table[:1]) & Dense(table[:, :1])) is None
    assert refuse_mask(Predicate(lambda q, k: table[0, q] & table[k, 1])) is None
    assert "from a query and a key" in str(refuse_mask(Predicate(lambda q, k: table[q, k])))
    assert "must be bool" in str(refuse_mask(Predicate(lambda q, k: q - k)))
    assert "32-bit integers" in str(refuse_mask(Predicate(lambda q, k: jnp.sin(q - k) < 0)))
    assert refuse_mask(Causal() | ~Window(3) | Segments(np.zeros((1, 4), np.int32))) is None


@pytest.mark.slow
def test_64_bit_segment_ids_are_compared_in_full():
    with jax.enable_x64():
        ids = jnp.asarray(np.array([[1, 1, 1 + 2**32, 1 + 2**32, -(2**40)]]))
        at = jnp.arange(5, dtype=jnp.int32)

        @jax.jit  # traced values are not known to exceed 32 bits
        def seen(ids):
            vectors = MaskVectors.of(Segments(ids), at[None], at[None], True)
            return vectors.visible([x[:, :, None] for x in vectors.q],
                                   [x[:, None] for x in vectors.k])  # fmt: skip

        assert ids.dtype == jnp.int64
        assert (np.asarray(seen(ids))[0] == (np.asarray(ids).T == np.asarray(ids))).all()
