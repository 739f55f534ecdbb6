"""Functions of a score, which attention applies before the softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.kernels.score_function import ScoreProgram, inlined
from transformer_jax.sharding import no_mesh
from transformer_jax.values import value_class

ScoreFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Function (score, row, head, query position, key position) -> score of scalars."""


@value_class(arrays=("captured", "rows", "heads"), static=("program",), eq=False)
class ScoreMod:
    """Traced function of a score, with the arrays that it reads as leaves."""

    captured: tuple[jax.Array, ...]
    rows: jax.Array  # i32[B], the index of each batch row
    heads: jax.Array  # i32[N], the index of each head
    program: ScoreProgram

    def __call__(
        self,
        scores: jax.Array,  # [B, N, T, S]
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # [B, N, T, S]
        """Return the new scores."""

        def one(*numbers: jax.Array) -> jax.Array:
            (found,) = jax.core.eval_jaxpr(self.program.jaxpr, self.captured, *numbers)
            return jnp.asarray(found, scores.dtype)

        several: Any = jax.vmap(one, (0, None, None, None, 0))  # keys
        several = jax.vmap(several, (0, None, None, 0, None))  # queries
        several = jax.vmap(several, (0, None, 0, None, None))  # heads
        places = [
            jnp.broadcast_to(x, (scores.shape[0], x.shape[1])) for x in (q_positions, k_positions)
        ]
        return jax.vmap(several, (0, 0, None, 0, 0))(scores, self.rows, self.heads, *places)

    def values(self, q_positions: jax.Array, k_positions: jax.Array) -> tuple[jax.Array, ...]:
        """Return the values that a kernel reads, [B or 1, N or 1, T or 1, S or 1] each."""
        places = self.rows, self.heads, q_positions, k_positions
        return self.program.values(self.captured, *places)


def traced_score_mod(function: ScoreFunction, B: int, N: int, dtype: Any) -> ScoreMod:
    """Trace a function of scalars, so that the arrays that it captures become leaves.

    Raise ValueError unless it takes five scalars and returns a floating-point scalar.
    """
    if not callable(function):
        raise ValueError(f"score_mod is {function!r}: must be a function")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # a function in C may have no known signature
        signature = None
    if signature is not None:
        try:
            signature.bind(*[None] * 5)
        except TypeError:
            raise ValueError(
                f"score_mod {name}{signature}: must take five arguments, a score, its row, its "
                "head, and the positions of the query and the key"
            ) from None
    wide = jax.ShapeDtypeStruct((), np.promote_types(dtype, np.float32))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    with no_mesh():
        traced = inlined(jax.make_jaxpr(function)(wide, *[number] * 4))
    shapes = [(x.shape, jnp.issubdtype(x.dtype, jnp.floating)) for x in traced.out_avals]
    if shapes != [((), True)]:
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in traced.out_avals)
        raise ValueError(f"score_mod {name} returned {found}: must be one floating-point number")
    rows, heads = (jnp.arange(n, dtype=jnp.int32) for n in (B, N))
    captured = tuple(map(jnp.asarray, traced.consts))
    return ScoreMod(captured, rows, heads, ScoreProgram(traced.jaxpr))
