"""Arguments checked once, with errors that say what was given: those of a call of attention, and
keys and numbers anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.integers import as_int32
from transformer_jax.masks import Mask
from transformer_jax.reference import Bias

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Options:
    """What is known when tracing; hashable."""

    scale: float | None
    softcap: float | None
    dropout_rate: float


@dataclass(frozen=True)
class Call:
    arrays: dict[str, Any]  # by the names of the arguments; scale only where it is an array
    options: Options
    return_lse: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:  # B, T, N, S
        (B, T, N, _), S = self.arrays["query"].shape, self.arrays["key"].shape[1]
        return B, T, N, S


def check(
    query, key, value, mask, bias, scale, softcap, sinks, q_positions, k_positions,
    dropout_rate, dropout_key, return_lse,
) -> Call:  # fmt: skip
    q_positions = as_int32("q_positions", q_positions)
    k_positions = as_int32("k_positions", k_positions)
    query, key, value, sinks, q_positions, k_positions = map(
        _array, (query, key, value, sinks, q_positions, k_positions)
    )
    _check_inputs(query, key, value)
    (B, T, N, _), S = query.shape, key.shape[1]
    check_mask(mask, B, N)
    bias = _check_bias(bias, (B, N, T, S), q_positions, k_positions)
    if sinks is not None and (sinks.shape != (N,) or not _floating(sinks)):
        raise ValueError(f"sinks is {sinks.dtype}{sinks.shape}: must be floating ({N},), by head")
    for name, positions, length in (
        ("q_positions", q_positions, T),
        ("k_positions", k_positions, S),
    ):
        if positions is None:
            continue
        fits = positions.shape in ((length,), (1, length), (B, length))
        if not fits or not jnp.issubdtype(positions.dtype, jnp.integer):
            given = f"{positions.dtype}{positions.shape}"
            raise ValueError(f"{name} is {given}: must be integers ({length},) or ({B}, {length})")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: must be above 0, or None")
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate is {dropout_rate}: must be in [0, 1)")
    if dropout_rate > 0 and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate} without a dropout_key")
    if dropout_key is not None:
        check_key("dropout_key", dropout_key)
    if isinstance(scale, jax.Array):
        if scale.ndim:
            raise ValueError(f"scale has shape {scale.shape}: must be one number")
    options = Options(
        None if scale is None or isinstance(scale, jax.Array) else float(scale),
        None if softcap is None else float(softcap),
        float(dropout_rate),
    )
    arrays = dict(
        query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks,
        q_positions=q_positions, k_positions=k_positions,
        dropout_key=dropout_key if dropout_rate > 0 else None,
    )  # fmt: skip
    if isinstance(scale, jax.Array):
        arrays["scale"] = scale
    return Call(arrays, options, return_lse)


def _check_inputs(query, key, value) -> None:
    given = {"query": query, "key": key, "value": value}
    shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
    for name, x in given.items():
        if x.ndim != 4:
            raise ValueError(f"{shapes}: {name} must be [batch, length, heads, width]")
    dtypes = {name: str(x.dtype) for name, x in given.items()}
    if len(set(dtypes.values())) > 1 or dtypes["query"] not in DTYPES:
        named = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{named}: must be one dtype of {', '.join(DTYPES)}")
    (B, _, N, H), (keys_B, _, K, keys_H) = query.shape, key.shape
    if B != keys_B:
        raise ValueError(f"{shapes}: query has {B} batch rows, key {keys_B}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"{shapes}: value must have the batch, length and heads of key")
    if H != keys_H or H == 0:
        raise ValueError(f"{shapes}: query is {H} wide, key {keys_H}: must be equal and not 0")
    if K == 0 or N == 0 or N % K:
        raise ValueError(
            f"{shapes}: query has {N} heads, key {K}: key heads must divide query heads"
        )


def check_mask(mask: Any, B: int, N: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Mask):
        kind = type(mask).__name__
        raise ValueError(f"mask is a {kind}: must be a Mask; Dense(array) makes one of an array")
    rows, heads = mask.lead
    if rows not in (1, B) or heads not in (1, N):
        raise ValueError(f"{mask!r} has {rows} batch rows and {heads} heads, query {B} and {N}")


def _check_bias(bias: Any, full: tuple[int, ...], q_positions, k_positions) -> Any:
    """The bias; an array with all its four axes."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        positions = [
            jax.ShapeDtypeStruct((1, n), jnp.int32) if p is None else p
            for p, n in ((q_positions, full[2]), (k_positions, full[3]))
        ]
        result = bias_shape(bias, *positions)
    else:
        bias = result = _array(bias)
    pairs = zip(result.shape[::-1], full[::-1], strict=False)
    if len(result.shape) > 4 or any(given not in (1, size) for given, size in pairs):
        raise ValueError(f"bias {tuple(result.shape)} does not broadcast to {full}, [B, N, T, S]")
    if not _floating(result):
        raise ValueError(f"bias is {result.dtype}: must be floating; what may attend is a mask")
    if result is not bias:
        return bias
    if isinstance(bias, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1,) * (4 - bias.ndim) + bias.shape, bias.dtype)
    return bias.reshape((1,) * (4 - bias.ndim) + bias.shape)


def bias_shape(bias: Bias, q_positions: Any, k_positions: Any) -> jax.ShapeDtypeStruct:
    """Of what it materializes, on whatever devices its arrays are."""
    bare = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # noqa: E731
    given = jax.tree.map(bare, (bias, q_positions, k_positions))
    return jax.eval_shape(lambda bias, q, k: bias.materialize(q, k), *given)


def check_key(name: str, key: Any) -> None:
    """A single PRNG key: typed, or raw words as older JAX has them."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", ())
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (len(shape) == 0 if typed else dtype == jnp.uint32 and len(shape) == 1):
        given = repr(key) if dtype is None else f"{dtype}{tuple(shape)}"
        raise ValueError(f"{name} is {given}: must be a single key, as jax.random.key(0) is")


def check_states(name: str, query, keys, values, mask) -> None:
    if query.ndim != 3 or keys.ndim != 3 or values.ndim != 3:
        shapes = f"query {query.shape}, {name} {keys.shape}, values {values.shape}"
        raise ValueError(f"{shapes}: must be [B, T, D], [B, S, D], [B, S, D]")
    if query.shape[0] != keys.shape[0] or keys.shape[:2] != values.shape[:2]:
        shapes = f"query {query.shape}, {name} {keys.shape}, values {values.shape}"
        raise ValueError(f"{shapes}: batch rows or lengths differ")
    check_mask(mask, query.shape[0], 1)


def traced(*arrays: Any) -> bool:
    """Whether the values of one of these are not known yet."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_count(name: str, value: Any, least: int) -> None:
    """An integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}: must be an integer of at least {least}")


def check_finite(name: str, value: Any) -> None:
    """A finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: must be finite")


def _array(x: Any) -> Any:
    return x if x is None or isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
