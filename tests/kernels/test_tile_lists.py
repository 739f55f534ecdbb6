"""Tile lists of the kernels: exactly the tiles with a visible pair."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.plain_kernels import visited
from transformer_jax.attention.block_plan import BlockPlan
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.attention.masks import (
    Causal,
    Segments,
    Window,
)
from transformer_jax.kernels.contract import Blocks

pytestmark = pytest.mark.usefixtures("quick_compilation")


def twelve_documents(length: int) -> np.ndarray:
    rng = np.random.default_rng(12)
    cuts = np.sort(rng.choice(np.arange(1, length), 11, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)


PATTERNS = {
    "causal": (Causal(), lambda q, k: k <= q),
    "window": (Causal() & Window(300), lambda q, k: (k <= q) & (q - k < 300)),
    "documents": (
        Causal() & Segments(twelve_documents(4096)[None]),
        lambda q, k: (k <= q) & (twelve_documents(4096)[q] == twelve_documents(4096)[k]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sides", [(128, 128), (64, 256)], ids=str)
def test_tile_lists_contain_exactly_the_visible_tiles(name, sides):
    """The number of tiles of packed documents, a window and a triangle matches counted pairs."""
    mask, sees = PATTERNS[name]
    at, blocks = jnp.arange(4096)[None], Blocks(*sides)
    grid = 4096 // sides[0], 4096 // sides[1]
    plan = MaskVectors.of(mask, at, at, True).block_plan(blocks.q, blocks.k)
    lists = plan.key_tiles()
    index = np.arange(4096)
    exact = sees(index[:, None], index[None, :]).reshape(grid[0], sides[0], grid[1], sides[1])
    some, every = exact.any(axis=(1, 3)), exact.all(axis=(1, 3))
    seen, full = (np.asarray(x)[0, 0] for x in visited(lists, (1, 1), True))
    assert (seen >= some).all() and (full <= every).all(), "a pair is lost"
    assert (seen == some).all(), "a tile is visited that sees nothing"
    assert (full == every).all(), "a tile is masked that needs no mask"
    assert int(lists.seen.sum()) == some.sum() and 0 < some.sum() < grid[0] * grid[1]


def test_tile_list_is_padded_with_last_tile():
    classes = jnp.array([[[[2, 0, 1, 2], [0, 0, 0, 0], [1, 0, 0, 0]]]], jnp.int8)
    lists = BlockPlan(classes, 1, 1).key_tiles()
    assert lists.order[0, 0].tolist() == [[0, 3, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert lists.full[0, 0].tolist() == [2, 0, 0] and lists.seen[0, 0].tolist() == [3, 0, 1]
