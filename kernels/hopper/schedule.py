"""Share the work out: items to programs, tiles to steps, roles to warpgroups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from transformer_jax.kernels.chips import HOPPER_PROCESSORS
from transformer_jax.kernels.contract import Operands, Problem, TileLists, vary
from transformer_jax.kernels.hopper.memory import Ref, i32

PROGRAMS = HOPPER_PROCESSORS  # as many stay resident
LEVELS = 8  # of how heavy an item is; few keep heads together, many share the work out evenly

Carry = TypeVar("Carry")


def heaviest_first(weight: jax.Array) -> jax.Array:  # i32[...] -> i32[items]
    """Return flat indices of items, roughly the heaviest first.

    Items of one level stay in their order, so that programs which run together read few heads,
    which the cache holds.
    """
    weight = weight.reshape(-1)
    level = -(-weight * LEVELS // jnp.maximum(weight.max(), 1))
    return jnp.argsort(-level, stable=True).astype(i32)


def query_items(operands: Operands, lists: TileLists) -> jax.Array:
    """Return the order of items, as flat indices of [B, N, query tiles]."""
    B, _, N, _ = operands.query.shape
    return heaviest_first(jnp.broadcast_to(lists.seen, (B, N, lists.seen.shape[-1])))


def key_items(operands: Operands, lists: TileLists) -> jax.Array:
    """Return the order of items, as flat indices of [B, K, key tiles]."""
    (B, _, N, _), (_, _, K, _) = operands.query.shape, operands.key.shape
    weight = jnp.broadcast_to(lists.seen, (B, N, lists.seen.shape[-1]))
    return heaviest_first(weight.reshape(B, K, N // K, -1).sum(axis=2))


def item_index(item: jax.Array, heads: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the batch row, head and row of tiles of an item."""
    return item // (heads * rows), item // rows % heads, item % rows


def each_item(
    items: Ref, body: Callable[[Any, Carry], Carry], carry: Carry, programs: int | None = None
) -> Carry:
    """Run `carry = body(item, carry)` for the items of this program.

    They are every `PROGRAMS`th of the list, back and forth, so that the heavy ones are shared out
    evenly.
    """
    total = items.shape[0]
    programs = min(total, programs or PROGRAMS)
    program = lax.axis_index("program")

    def position(turn: jax.Array) -> jax.Array:
        return turn * programs + jnp.where(turn % 2 == 0, program, programs - 1 - program)

    full = total // programs
    mine = full + (position(jnp.int32(full)) < total).astype(i32)
    return lax.fori_loop(0, mine, lambda turn, carry: body(items[position(turn)], carry), carry)


def each_tile(full: Any, seen: Any, body: Callable[..., Carry], carry: Carry) -> Carry:
    """Run `carry = body(j, carry, partial)` for the tiles of a list: full ones, then partial ones.

    Both loops count from 0: what is read of memory varies over a mesh, what is computed of it does
    not, and a loop's counter must stay of one type.
    """
    carry = lax.fori_loop(0, full, functools.partial(body, partial=False), carry)
    partial = functools.partial(body, partial=True)
    return lax.fori_loop(0, seen - full, lambda j, carry: partial(full + j, carry), carry)


def registers(consumers: int) -> tuple[int, int] | None:
    """Return how many registers a thread of a consumer and of the producer may hold, or None."""
    return {1: None, 2: (240, 24), 3: (160, 32)}[consumers]


def launch(
    problem: Problem, body: Callable[..., None], consumers: int, items: int, **options: Any
) -> Callable[..., Any]:
    """Return the kernel of a body, of one producer and some consumers, as a function of arrays."""
    interpret = {"interpret": problem.interpret} if problem.interpret else {}
    kernel = plgpu.kernel(
        body,
        grid=(min(items, PROGRAMS),),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **interpret,
        **options,
    )

    def call(*arguments: Any) -> Any:
        # Mosaic GPU forgets that results vary over a mesh as arguments do
        return vary(kernel(*arguments), like=arguments)

    return call


def specialise(
    consumers: int, produce: Callable[[], None], consume: Callable[[jax.Array], None]
) -> None:
    """Let one warpgroup produce and the others consume."""
    warpgroup = lax.axis_index("warpgroup")
    limits = registers(consumers)

    @pl.when(warpgroup < consumers)
    def _() -> None:
        if limits:
            plgpu.set_max_registers(limits[0], action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == consumers)
    def _() -> None:
        if limits:
            plgpu.set_max_registers(limits[1], action="decrease")
        produce()
