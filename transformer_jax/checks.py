"""Checks of single arguments: int32 integers, counts, finite numbers and random keys."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_jax.tracing import concrete_value, eagerly, traced

Integers = TypeVar("Integers", bound=jax.Array | np.ndarray | jax.ShapeDtypeStruct)
INT32 = np.iinfo(np.int32)


def check_positions(shape: tuple[int, ...], positions: jax.Array) -> jax.Array:  # i32[B, T]
    """Return positions as int32; raise ValueError unless they are integers with the given shape."""
    check_array("positions", positions, "[B, T]")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions are {positions.dtype}: must be integers")
    if positions.shape != shape:
        raise ValueError(f"positions {positions.shape} and tokens {shape} differ in shape")
    return as_int32("positions", positions)


@overload
def as_int32(name: str, values: None) -> None: ...
@overload
def as_int32(name: str, values: Integers) -> Integers: ...
def as_int32(name: str, values: Any) -> Any:
    """Convert integers to int32; return arrays of any other dtype unchanged.

    NumPy arrays stay NumPy arrays.

    Raises ValueError if a known value does not fit int32. A traced value is clipped to the range of
    int32.
    """
    if values is None:
        return None
    if not hasattr(values, "dtype"):
        values = np.asarray(values)
    if values.dtype == np.int32 or not jnp.issubdtype(values.dtype, jnp.integer):
        return values
    if isinstance(values, jax.ShapeDtypeStruct):
        return values.update(dtype=jnp.int32)
    check_int32(name, values)
    if not isinstance(values, jax.Array):
        return values.astype(np.int32)
    info = jnp.iinfo(values.dtype)
    with eagerly(values):
        values = jnp.clip(values, max(int(info.min), INT32.min), min(int(info.max), INT32.max))
        return values.astype(jnp.int32)


def check_int32(name: str, values: jax.Array | np.ndarray) -> None:
    """Raise ValueError if a known integer does not fit int32."""
    # every int8 or uint16 fits
    if np.can_cast(values.dtype, np.int32):
        return
    known = concrete_value(values)
    if known is None:
        return
    beyond = known[(known < INT32.min) | (known > INT32.max)]
    if beyond.size:
        raise ValueError(f"{name} contains {beyond[0]}: must be from {INT32.min} to {INT32.max}")


def check_key(name: str, key: object) -> None:
    """Raise ValueError unless this is a single random key.

    A key may be typed or in JAX's older raw format.
    """
    rule = "must be a single key, such as jax.random.key(0)"
    if not isinstance(key, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        shown = repr(key) if isinstance(key, Real | str | None) else f"of type {type(key).__name__}"
        raise ValueError(f"{name} is {shown}: {rule}")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not (len(key.shape) == 0 if typed else key.dtype == jnp.uint32 and len(key.shape) == 1):
        raise ValueError(f"{name} is {key.dtype}{tuple(key.shape)}: {rule}")


def check_count(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer from `least` to `most`, or a symbolic size.

    For a number of tokens, pass `most=INT32.max`, the largest possible position.
    """
    # the value is known only when the exported program is called
    if export.is_symbolic_dim(value):
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        shown = repr(value)
        if isinstance(value, jax.Array | np.ndarray) and value.ndim:
            shown = f"{value.dtype}{list(value.shape)}"
        raise ValueError(f"{name} is {shown}: must be an integer of at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} is {value}: must be at most {most}")


def at_most(size: int, most: int) -> bool:
    """Whether `size` is at most `most`; for a symbolic size, whether this is always true."""
    try:
        return size <= most
    except jax.errors.InconclusiveDimensionOperation:
        return False


def as_number(name: str, value: float | jax.Array) -> float:
    """Return `value` as a float; raise ValueError if it is traced or not a number."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        shown = f"of type {type(value).__name__}" if hasattr(value, "dtype") else repr(value)
        raise ValueError(f"{name} is {shown}: must be a concrete number") from None


def check_array(name: str, value: object, shape: str) -> None:
    """Raise ValueError unless `value` is an array."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ValueError(f"{name} is of type {type(value).__name__}: must be an array {shape}")


def check_finite(name: str, value: float) -> None:
    """Raise ValueError unless `value` is from -1e30 to 1e30, so that its products fit float32."""
    if not isinstance(value, Real) or not -1e30 <= value <= 1e30:
        raise ValueError(f"{name} is {value!r}: must be finite, from -1e30 to 1e30")


def check_factor(name: str, value: float) -> None:
    """Raise ValueError unless `value` is from 1e-30 to 1e30.

    Products and quotients with such a value fit float32.
    """
    if not isinstance(value, Real) or not 1e-30 <= value <= 1e30:
        raise ValueError(f"{name} is {value!r}: must be finite and above 0, from 1e-30 to 1e30")


def check_not_consumed(state: object, name: str = "state") -> None:
    """Raise ValueError if an earlier call has consumed (donated) the memory of `state`."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not traced(leaf) and leaf.is_deleted():
            rule = f"fork({name}, 1) keeps a copy"
            raise ValueError(f"{name} was consumed by an earlier call: {rule}")


def largest(x: jax.Array, axis: int = -1, *, keepdims: bool = False) -> jax.Array:
    """Return the maximum along an axis; inf if any element is NaN, and -inf if the axis is empty.

    Use this function to detect NaN. On a CPU, XLA's maximum loses a NaN in rows of 1,000 elements.
    `lax.top_k` ranks a NaN last if its sign bit is set, and arithmetic can set the sign bit.
    """
    # every backend returns inf as the maximum, but backends differ in how they treat NaN
    without_nan = jnp.where(jnp.isnan(x), jnp.inf, x)
    return jnp.max(without_nan, axis=axis, keepdims=keepdims, initial=-jnp.inf)


def has_finite_maximum(x: jax.Array) -> jax.Array:  # [..., V] -> bool[...]
    """Whether the maximum of each row is finite. It is not if any element is NaN."""
    return jnp.isfinite(largest(x))
