"""Lists of visits for a TPU's grid: each listed tile once, in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.mask_vectors import MaskVectors
from transformer_jax.attention.masks import Causal, Mask, Segments, Window
from transformer_jax.kernels import Target, tpu, using
from transformer_jax.kernels.contract import FULL, PARTIAL, Blocks, tile_lists
from transformer_jax.kernels.tpu import visits

pytestmark = pytest.mark.usefixtures("quick_compilation")


def expected(classes: np.ndarray, group: int) -> list[list[tuple[int, int, int, int]]]:
    """Return (row, head, column, class) of every visit of every list, computed by loops."""
    B, N, rows, _ = classes.shape
    heads = group if N > 1 else 1
    found = []
    for b, first in np.ndindex(B, N // heads):
        visited = []
        for row, head in np.ndindex(rows, heads):
            line = classes[b, first * heads + head, row]
            tiles = [*np.flatnonzero(line == FULL), *np.flatnonzero(line == PARTIAL)]
            visited += [(row, head, column, line[column]) for column in tiles]
            if not tiles and head == 0:
                visited.append((row, 0, 0, 0))
        found.append(visited)
    return found


@pytest.mark.long_except("1-1-3-*", "1-4-2-known", "2-6-3-*")
@pytest.mark.slow_except("1-1-3-compare", "1-4-2-known")
@pytest.mark.parametrize("search", ["compare", "halve", "known"])
@pytest.mark.parametrize("B, N, group", [(1, 1, 3), (2, 1, 1), (1, 3, 1), (1, 4, 2), (2, 6, 3)])
def test_every_listed_tile_is_visited_once_in_order(B, N, group, search, monkeypatch):
    monkeypatch.setattr(visits, "COMPARISONS", 0 if search == "halve" else 2**20)
    classes = np.random.default_rng(5).integers(0, 3, (B, N, 5, 7)).astype(np.int8)
    classes[:, :, 1] = 0  # a row that sees nothing
    classes[-1, -1, 3:] = 0  # a list that ends earlier than the others
    wanted = expected(classes, group)
    lists = jax.jit(tile_lists)(classes)
    if search == "known":
        lists = visits.prepare(lists)
    flat = []  # the packing is not an array

    @jax.jit
    def numbers_of(lists):
        flat.append(visits.flatten(lists, group))
        return flat[0].numbers, flat[0].longest

    numbers, longest = jax.device_get(numbers_of(lists))
    assert (lists.visits is None) == (search != "known")
    assert longest == max(map(len, wanted))
    for line, tiles in zip(numbers.reshape(len(wanted), -1), wanted, strict=True):
        listed = [tuple(map(int, flat[0].packing.unpack(number))) for number in line]
        assert listed[: len(tiles)] == tiles
        assert {*listed[len(tiles) :]} <= {(*tiles[-1][:3], 0)}


@pytest.mark.slow
def test_causal_mask_uses_one_step_per_tile():
    at = jnp.arange(8192)[None]
    blocks = tpu.blocks("forward", 128, 128, 2)
    assert blocks == Blocks(512, 1024)
    plan = MaskVectors.of(Causal(), at, at, True).block_plan(blocks.q, blocks.k)
    for lists in (plan.key_tiles(), plan.query_tiles()):
        assert lists.order.size == 128
        assert int(visits.flatten(lists).longest) == 72


@pytest.mark.slow
def test_plan_for_mask_without_arrays_is_constant():
    """Otherwise the compiler computes them, for up to half a minute: by query and by key."""
    shape = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.float32)

    def classes_and_searches(mask: Mask) -> tuple[int, int]:
        def loss(*inputs):
            return dot_product_attention(*inputs, mask=mask, implementation="pallas").sum()

        with using(Target("tpu")):
            program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(shape, shape, shape))
        assert "pallas_call[" in program
        return program.count("i8["), program.count("searchsorted")

    assert classes_and_searches(Causal() & Window(100)) == (0, 0)
    assert min(classes_and_searches(Segments(jnp.arange(512)[None] // 100))) > 0
