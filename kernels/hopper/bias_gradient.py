"""Kernel for the gradient of a bias, which is ds summed over the axes where the bias has size 1.

An item is one tile of the gradient. It is summed, in registers, over the visited tiles of all batch
rows and heads that share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.contract import (
    Blocks,
    Index,
    Operands,
    Problem,
    Residuals,
    TileLists,
)
from transformer_jax.kernels.hopper.producer import wait_from
from transformer_jax.kernels.hopper.products import opaque, product
from transformer_jax.kernels.hopper.programs import Carry, each_item, launch, specialize
from transformer_jax.kernels.nvidia.bias import digits, sum_shape, visited
from transformer_jax.kernels.nvidia.memory import (
    ROW,
    ROWS,
    WGMMA,
    Ref,
    across,
    at,
    f32,
    filled,
    load,
    slot_of,
    tile_slots,
)
from transformer_jax.kernels.nvidia.scores import TilePosition, TileVectors, base_of, probabilities
from transformer_jax.kernels.sharding import result


def backward_bias(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> jax.Array:
    """Return ds in float32, summed over the axes along which the bias has size 1."""
    H, Hv = operands.query.shape[-1], operands.value.shape[-1]
    assert operands.bias is not None
    dtype, shape = operands.query.dtype, operands.bias.shape
    consumers, stages = blocks.q // ROWS, blocks.stages
    vectors = TileVectors(problem, operands, ROW)
    visits = visited(lists)
    _, _, T_out, S_out = sums = sum_shape(operands, blocks)
    outer = (*shape[:2], T_out // blocks.q, S_out // blocks.k)
    total = launch(
        problem,
        functools.partial(_backward_bias, problem, blocks, outer),
        consumers,
        math.prod(outer),
        out_type=result(sums, f32, operands.query),
        scratch_types=dict(
            q_tile=tile_slots(stages * consumers, ROWS, H, dtype),
            do_tile=tile_slots(stages * consumers, ROWS, Hv, dtype),
            k_tile=tile_slots(stages, blocks.k, H, dtype),
            v_tile=tile_slots(stages, blocks.k, Hv, dtype),
            out_tile=tile_slots(consumers, ROWS, blocks.k, f32),
            filled_slot=plgpu.Barrier(
                num_arrivals=2 + 2 * consumers + len(vectors.copied), num_barriers=stages
            ),
            empty_slot=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            **vectors.slots(stages, blocks.k),
        ),
    )(visits, operands, saved.do, base_of(saved), saved.D)
    # if the bias has size 1 along an axis, the kernel has summed all tiles into one
    lacking = tuple(axis for axis in (2, 3) if shape[axis] == 1)
    return total.sum(axis=lacking, keepdims=True)


class _Memory(NamedTuple):
    """Shared memory of the kernel, in which one slot contains all inputs of a tile."""

    q_tile: Ref  # [stages * consumers, ROWS, H]
    do_tile: Ref  # [stages * consumers, ROWS, Hv]
    k_tile: Ref  # [stages, blocks.k, H]
    v_tile: Ref  # [stages, blocks.k, Hv]
    out_tile: Ref  # f32[consumers, ROWS, blocks.k]
    filled_slot: Ref
    empty_slot: Ref
    columns: Ref = None


def _backward_bias(
    problem: Problem, blocks: Blocks, outer: tuple[int, ...], visits: Ref,
    operands: Operands, do: Ref, base: Ref, D: Ref, out: Ref, **memory: Ref,
) -> None:  # fmt: skip
    """Run one warpgroup of a program, applying the mask to all tiles to keep the kernel short."""
    program = _Program(
        problem, blocks, outer, visits, operands, do, base, D, out,
        TileVectors(problem, operands, ROW), _Memory(**memory),
    )  # fmt: skip

    def produce() -> None:
        def copy_item(item: jax.Array, step: jax.Array) -> jax.Array:
            return program.each_term(item, program.copy, step)

        each_item(math.prod(outer), copy_item, jnp.int32(0))

    def consume(w: jax.Array) -> None:
        each_item(math.prod(outer), functools.partial(program.sum_item, w), jnp.int32(0))

    specialize(blocks.q // ROWS, produce, consume)


@dataclass(frozen=True, eq=False)  # fields are tracers, which are not hashable
class _Program:
    """Copies of the producer and sums of the consumers."""

    problem: Problem
    blocks: Blocks
    outer: tuple[int, ...]  # number of items along B, N, T and S
    visits: Ref
    operands: Operands
    do: Ref
    base: Ref
    D: Ref
    out: Ref
    vectors: TileVectors
    memory: _Memory

    def each_term(self, item: jax.Array, body: Callable[..., Carry], carry: Carry) -> Carry:
        """Run `carry = body(b, n, row, column, carry)` for the visited tiles of an item."""
        (B, T, N, _), S = self.operands.query.shape, self.operands.key.shape[1]
        sizes = (B, N, T // self.blocks.q, S // self.blocks.k)
        inner = tuple(size // o for size, o in zip(sizes, self.outer, strict=True))

        def visit(index: jax.Array, carry: Carry) -> Carry:
            parts = zip(digits(item, self.outer), digits(index, inner), strict=True)
            # one of the two indices is 0 on every axis
            tile = tuple(o + i for o, i in parts)
            return lax.cond(
                at(self.visits, *tile)[...] > 0, lambda c: body(*tile, c), lambda c: c, carry
            )

        return lax.fori_loop(0, math.prod(inner), visit, carry)

    def copy(self, b: Index, n: Index, row: Index, column: Index, step: jax.Array) -> jax.Array:
        """Copy all inputs of a tile into the next slot."""
        memory, blocks, operands = self.memory, self.blocks, self.operands
        consumers, G = blocks.q // ROWS, operands.query.shape[2] // operands.key.shape[2]
        slot = slot_of(step, blocks.stages)
        wait_from(blocks.stages, step, memory.empty_slot.at[slot])
        full = memory.filled_slot.at[slot]
        keys = b, pl.ds(column * blocks.k, blocks.k), n // G
        of_keys: list[tuple[Ref, Ref]]
        of_keys = [(operands.key, memory.k_tile), (operands.value, memory.v_tile)]
        for source, tile in of_keys:
            plgpu.copy_gmem_to_smem(source.at[keys], tile.at[slot], full)
        self.vectors.copy(memory.columns, slot, full, b, keys[1].start)
        of_queries: list[tuple[Ref, Ref]]
        of_queries = [(operands.query, memory.q_tile), (self.do, memory.do_tile)]
        for w in range(consumers):
            queries = b, pl.ds(row * blocks.q + w * ROWS, ROWS), n
            place = slot * consumers + w
            for source, tile in of_queries:
                plgpu.copy_gmem_to_smem(source.at[queries], tile.at[place], full)
        return step + 1

    def sum_item(self, w: jax.Array, item: jax.Array, step: jax.Array) -> jax.Array:
        """Sum the terms of an item, and copy the sum to device memory."""
        blocks, out_tile = self.blocks, self.memory.out_tile
        add = functools.partial(self.add, w)
        total, step = self.each_term(item, add, (filled((ROWS, blocks.k), 0), step))
        b, n, row, column = digits(item, self.outer)
        out_tile[w] = total
        plgpu.commit_smem()
        rows = pl.ds(row * blocks.q + w * ROWS, ROWS)
        target = self.out.at[b, n, rows, pl.ds(column * blocks.k, blocks.k)]
        plgpu.copy_smem_to_gmem(out_tile.at[w], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return step

    def add(
        self,
        w: jax.Array,
        b: Index,
        n: Index,
        row: Index,
        column: Index,
        carry: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        memory, blocks = self.memory, self.blocks
        total, step = carry
        slot = slot_of(step, blocks.stages)
        place = slot * (blocks.q // ROWS) + w
        q0 = row * blocks.q + w * ROWS
        k0 = column * blocks.k
        columns = self.vectors.of_columns(memory.columns, slot, b, k0, blocks.k)
        position = TilePosition(b, n, q0, k0, self.vectors.of_rows(b, q0), columns)
        rows, layout = (b, n, pl.ds(q0, ROWS)), WGMMA.reduce(1)
        base, D = load(self.base.at[rows], layout), load(self.D.at[rows], layout)
        plgpu.barrier_wait(memory.filled_slot.at[slot])
        q, k = memory.q_tile.at[opaque(place)], memory.k_tile.at[opaque(slot)]
        raw = product(q, k.transpose((1, 0)))
        _, differentiate = probabilities(
            self.problem, self.operands, raw, across(base, raw), position, ROW, True
        )
        do, v = memory.do_tile.at[opaque(place)], memory.v_tile.at[opaque(slot)]
        dp = product(do, v.transpose((1, 0)))
        self.vectors.release(memory.empty_slot.at[slot], True)
        return total + differentiate(dp, across(D, dp))[0], step + 1
