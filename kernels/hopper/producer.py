"""Producer for every kernel except the bias kernel, which copies tiles into shared memory.

A kernel iterates over queries or over keys. The rows of an item (a tile of queries, or of keys and
values) stay in shared memory. The tiles of the other side, which are in the item's list, stream
through a ring of slots. A slot is filled after its consumers have freed it (barrier `..._empty`),
and it is read after its copies have arrived (barrier `..._full`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import Blocks, Index, Operands, TileLists
from transformer_jax.kernels.hopper.programs import each_item
from transformer_jax.kernels.nvidia.memory import Ref, at, slot_of
from transformer_jax.kernels.nvidia.schedule import key_items, query_items
from transformer_jax.kernels.nvidia.scores import TileVectors

AfterTile = Callable[[Index, Index, Index], None]
"""Function of the batch row, query head and first query of a tile."""
Unfinished = tuple[jax.Array, tuple[tuple[Index, Index], ...]]
"""The next step, and the tiles (head, place in its list) that still need a call to `AfterTile`."""


class QueryWalk(NamedTuple):
    """Shared memory for a kernel whose items are tiles of queries."""

    q_tile: Ref  # [consumers, rows, H]
    k_tile: Ref  # [stages, blocks.k, H]
    v_tile: Ref  # [slots, blocks.k, Hv]
    q_full: Ref
    q_empty: Ref
    k_full: Ref
    k_empty: Ref
    v_full: Ref
    v_empty: Ref
    do_tile: Ref = None  # [consumers, rows, Hv], for the backward pass
    columns: Ref = None  # i32[stages * copied vectors, blocks.k]

    def produce(
        self, blocks: Blocks, lists: TileLists, operands: Operands,
        vectors: TileVectors, do: Ref = None,
    ) -> None:  # fmt: skip
        """Copy the queries (and do) of every item, and the keys and values in its list.

        Deadlocks cannot occur, because freeing a slot never waits for a later copy. Keys j + 1 use
        the slot of keys j - 1 or older, which are freed after keys j - 1 and values j - 2 arrive.
        """
        N, K, items = operands.query.shape[2], operands.key.shape[2], query_items(operands, blocks)
        staying: list[tuple[Ref, Ref]] = [(operands.query, self.q_tile)]
        staying += [] if do is None else [(do, self.do_tile)]
        stages, value_slots = self.k_tile.shape[0], self.v_tile.shape[0]
        # the forward kernel frees the keys of a tile before the values of the previous tile, so the
        # keys are copied one tile ahead. The kernel has at least two stages
        keys_lead = do is None

        def copy_item(
            item: Index, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            b, n, row = items.at(lists, item)
            done, step = carry
            seen = at(lists.seen, b, n, row)[...]

            def copy_keys(tile: Index, step: Index) -> None:
                # written as a product, so that the compiler knows that the tile size divides it
                start = tile * blocks.k
                slot = slot_of(step, stages)
                wait_from(stages, step, self.k_empty.at[slot])
                k: Ref = operands.key.at[b, pl.ds(start, blocks.k), n // (N // K)]
                plgpu.copy_gmem_to_smem(k, self.k_tile.at[slot], self.k_full.at[slot])
                vectors.copy(self.columns, slot, self.k_full.at[slot], b, start)

            def copy_tile(
                j: Index, carry: tuple[jax.Array, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                step, this = carry
                following = at(lists.order, b, n, row, jnp.minimum(j + 1, seen - 1))[...]
                next_keys = functools.partial(copy_keys, following, step + 1)
                if keys_lead:
                    pl.when(j + 1 < seen)(next_keys)
                keys, slot = pl.ds(this * blocks.k, blocks.k), slot_of(step, value_slots)
                wait_from(value_slots, step, self.v_empty.at[slot])
                v: Ref = operands.value.at[b, keys, n // (N // K)]
                plgpu.copy_gmem_to_smem(v, self.v_tile.at[slot], self.v_full.at[slot])
                if not keys_lead:
                    pl.when(j + 1 < seen)(next_keys)
                return step + 1, following

            # start copying the first keys before waiting for the slot of the queries, which the
            # previous item occupies until its last product with keys
            this = at(lists.order, b, n, row, jnp.int32(0))[...]
            pl.when(seen > 0)(functools.partial(copy_keys, this, step))
            consumers, rows, _ = self.q_tile.shape
            for w in range(consumers):
                pl.when(done > 0)(functools.partial(plgpu.barrier_wait, self.q_empty.at[w]))
                queries = b, pl.ds(row * blocks.q + w * rows, rows), n
                for source, tile in staying:
                    plgpu.copy_gmem_to_smem(source.at[queries], tile.at[w], self.q_full.at[w])
            step, _ = lax.fori_loop(0, seen, copy_tile, (step, this))
            return done + 1, step

        each_item(items.number, copy_item, (jnp.int32(0), jnp.int32(0)))


class KeyWalk(NamedTuple):
    """Shared memory for a kernel whose items are tiles of keys."""

    k_tile: Ref  # [parts, rows, H]
    v_tile: Ref  # [parts, rows, Hv]
    q_tile: Ref  # [stages, blocks.q, H]
    do_tile: Ref  # [stages, blocks.q, Hv]
    base_columns: Ref  # f32[stages, blocks.q]
    D_columns: Ref  # f32[stages, blocks.q]
    k_full: Ref  # one barrier for each part of the keys, or one for all parts
    k_empty: Ref
    q_full: Ref
    q_empty: Ref
    both: Ref  # barrier for the consumers, and for a producer with `after`
    columns: Ref = None  # i32[stages * copied vectors, blocks.q]

    def produce(
        self, blocks: Blocks, lists: TileLists, operands: Operands,
        vectors: TileVectors, do: Ref, base: Ref, D: Ref, *,
        together: bool = False, after: AfterTile | None = None,
    ) -> None:  # fmt: skip
        """Copy the keys and values of every item, and the query side of all tiles in its lists.

        Each query head that reads the key head has a list. If `together` is true, the parts of the
        keys share their barriers. `after` is called for every tile when the copy that reuses the
        tile's slot has started, or when the copy of the item's last tile has started. Therefore, it
        runs before the producer waits for the slot of the keys, which the consumers free after all
        tiles. `after` arrives at `both`, where the consumers meet at every tile and at the end of
        an item. This method arrives for the first meeting of an item.
        """
        N, K, items = operands.query.shape[2], operands.key.shape[2], key_items(operands, blocks)
        G, stages = N // K, self.q_tile.shape[0]
        streams: list[tuple[Ref, Ref]] = [(operands.query, self.q_tile), (do, self.do_tile)]
        of_keys: list[tuple[Ref, Ref]]
        of_keys = [(operands.key, self.k_tile), (operands.value, self.v_tile)]
        row_streams = [(base, self.base_columns), (D, self.D_columns)]

        def copy_item(
            item: Index, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            b, head, row = items.at(lists, item, G)
            done, first = carry
            parts, rows, _ = self.k_tile.shape
            for w in range(parts):
                empty, full = (x if together else x.at[w] for x in (self.k_empty, self.k_full))
                if w == 0 or not together:
                    pl.when(done > 0)(functools.partial(plgpu.barrier_wait, empty))
                keys = b, pl.ds(row * blocks.k + w * rows, rows), head
                for source, tile in of_keys:
                    plgpu.copy_gmem_to_smem(source.at[keys], tile.at[w], full)

            if after is not None:
                plgpu.barrier_arrive(self.both)

            def finish(n: Index, j: Index, step: Index) -> None:
                """Call `after` for the tile of a step (tile j in a list), if it exists."""

                @pl.when(step >= first)
                def _() -> None:
                    assert after is not None
                    after(b, n, at(lists.order, b, n, row, j)[...] * blocks.q)

            def copy_head(g: Index, carry: Unfinished) -> Unfinished:
                n = head * G + g

                def copy_queries(j: Index, carry: Unfinished) -> Unfinished:
                    step, unfinished = carry
                    queries = pl.ds(at(lists.order, b, n, row, j)[...] * blocks.q, blocks.q)
                    slot = slot_of(step, stages)
                    wait_from(stages, step, self.q_empty.at[slot])
                    full = self.q_full.at[slot]
                    for source, tile in streams:
                        plgpu.copy_gmem_to_smem(source.at[b, queries, n], tile.at[slot], full)
                    for source, tile in row_streams:
                        plgpu.copy_gmem_to_smem(source.at[b, n, queries], tile.at[slot], full)
                    vectors.copy(self.columns, slot, full, b, queries.start)
                    if after is not None:
                        (oldest_n, oldest), *later = unfinished
                        finish(oldest_n, oldest, step - stages)
                        unfinished = (
                            *later,
                            (n, j),
                        )  # not the tile, whose type would vary: see `each_tile`
                    return step + 1, unfinished

                return lax.fori_loop(0, at(lists.seen, b, n, row)[...], copy_queries, carry)

            none = () if after is None else ((jnp.int32(0), jnp.int32(0)),) * stages
            step, unfinished = lax.fori_loop(0, G, copy_head, (first, none))
            for i, (n, j) in enumerate(unfinished):
                finish(n, j, step - stages + i)
            return done + 1, step

        each_item(items.number, copy_item, (jnp.int32(0), jnp.int32(0)))


def wait_from(slots: int, step: Index, barrier: Ref) -> None:
    """Wait until the slot of a step is free, unless the slot has not been used yet."""
    pl.when(step >= slots)(lambda: plgpu.barrier_wait(barrier))
