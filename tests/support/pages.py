"""Page pools with keys and values in random order, and NaN in all other places."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

FREE = 5  # pages that no row uses


def in_pages(rng, page, seen, *arrays, unseen=np.nan):
    """Return pools [P, page, ..] of arrays [B, S, ..], and a block table i32[B, M].

    `seen` is bool[B, S]. Other keys have the value `unseen` (77 in int8), and a block without a
    seen key has no page. Unused pages are NaN. Blocks that equal those of the first row share its
    pages.
    """
    B, S = seen.shape
    M = S // page
    assert S == M * page
    copies = [np.asarray(x).copy() for x in arrays]
    for x in copies:
        x[~seen] = 77 if x.dtype == np.int8 else unseen
    blocks = [x.reshape(B, M, page, *x.shape[2:]) for x in copies]
    shuffled = rng.permutation(B * M + FREE).astype(np.int32)
    table = shuffled[: B * M].reshape(B, M)
    for b in range(1, B):
        for j in range(M):
            if all(np.array_equal(x[b, j], x[0, j], equal_nan=True) for x in map(_wide, blocks)):
                table[b, j] = table[0, j]
    named = seen.reshape(B, M, page).any(axis=2)
    pools = []
    for x, own_blocks in zip(arrays, blocks, strict=True):
        pool = np.full((B * M + FREE, *own_blocks.shape[2:]), 77, np.float32)
        pool = (pool if x.dtype == jnp.int8 else pool * np.nan).astype(own_blocks.dtype)
        pool[table[named]] = own_blocks[named]
        pools.append(pool)
    return jax.device_put((*pools, np.where(named, table, -1)))


def _wide(x):
    return x.astype(np.float32)
