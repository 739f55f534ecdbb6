"""Parameter initialization with a few small programs that compile quickly.

A single program for all parameters takes seconds to compile, although the blocks have equal shapes.
Therefore, the initialization is only traced. The part of the trace that creates each parameter is
extracted, and equal parts share a compiled program. On a CPU, even these programs take longer to
compile than to run, so one program draws normal numbers for all shapes:

    x_i = std sqrt(2) erfinv(u_i),   u_i from the bits of Threefry-2x32(key, i)

Threefry is from Salmon et al. 2011. The numbers are bit-for-bit equal to those of
`jax.random.normal`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from transformer_jax.pytree import Array

CHUNK = 2**16
"""Number of random numbers per call of the CPU program, chosen to fit in the cache of one core."""
IN_FLIGHT = 16
"""Maximum number of calls whose results have not yet been copied."""


@dataclass(frozen=True)
class _Part:
    """Part of a trace that computes some of its results."""

    text: str
    """Printed jaxpr. Parts with equal text share a program."""
    traced: ClosedJaxpr = field(compare=False)


def draw(traced: ClosedJaxpr, key: jax.Array) -> list[jax.Array]:
    """Return the exact results of a traced function for a key, computed by small programs.

    The results of one loop, such as those of a scanned stack, share one program.
    """
    found: dict[int, jax.Array] = {}
    # the shared CPU program supports only the default: uncommitted Threefry keys, with bits
    # computed by index
    platforms = {device.platform for device in key.devices()}
    shared = not key.committed and platforms == {"cpu"} and _bits_by_index()
    shared = shared and str(jax.random.key_impl(key)) == "threefry2x32"
    for part, arguments, indices in _parts(traced, key):
        results = _without_compiling(part, arguments) if shared else None
        if results is None:
            placed = [x if isinstance(x, jax.Array) else jax.device_put(x) for x in arguments]
            results = _program(part)(*placed)
        found |= zip(indices, results, strict=True)
    return [found[index] for index in range(len(found))]


def _parts(traced: ClosedJaxpr, key: jax.Array) -> Iterator[tuple[_Part, list[Array], list[int]]]:
    """Yield each part with its arguments and the indices of its results.

    The number folded into a key becomes an argument, because only this number differs between
    layers.
    """
    jaxpr, _ = dce_jaxpr(traced.jaxpr, True, instantiate=True)
    values: dict[Var, Array] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    values |= zip(jaxpr.invars, (key,), strict=True)
    equations = list(jaxpr.eqns)
    for i, equation in enumerate(equations):
        if equation.primitive.name == "random_fold_in":
            folded, number = equation.invars
            if isinstance(number, Literal):
                argument = Var(number.aval)
                values[argument] = np.asarray(number.val, np.uint32)
                equations[i] = equation.replace(invars=[folded, argument])
    makers = {var: i for i, equation in enumerate(equations) for var in equation.outvars}
    loops: dict[Hashable, list[int]] = {}
    for index, out in enumerate(jaxpr.outvars):
        needed = _needed([out], equations, makers)
        loop = [i for i in needed if equations[i].primitive.name in ("scan", "while")]
        loops.setdefault(loop[0] if loop else ("no loop", index), []).append(index)
    for indices in loops.values():
        outs = [jaxpr.outvars[index] for index in indices]
        needed = _needed(outs, equations, makers)
        kept = [equations[i] for i in needed]
        inputs = [x for equation in kept for x in equation.invars] + outs
        read = list(dict.fromkeys(x for x in inputs if isinstance(x, Var) and x not in makers))
        info = jaxpr.debug_info._replace(
            arg_names=("argument",) * len(read), result_paths=("result",) * len(outs)
        )
        part = Jaxpr([], read, outs, kept, debug_info=info)
        text = f"{_bits_by_index()} {part}"
        yield _Part(text, ClosedJaxpr(part, [])), [values[x] for x in read], indices


def _needed(
    outs: Sequence[Var | Literal], equations: list[JaxprEqn], makers: dict[Var, int]
) -> list[int]:
    """Return the indices of the equations that `outs` depend on, in order."""
    needed, pending = set[int](), list(outs)
    while pending:
        var = pending.pop()
        maker = None if isinstance(var, Literal) else makers.get(var)
        if maker is not None and maker not in needed:
            needed.add(maker)
            pending += equations[maker].invars
    return sorted(needed)


@lru_cache(maxsize=1024)
def _program(part: _Part) -> Callable[..., list[jax.Array]]:
    return jax.jit(jaxpr_as_fun(part.traced))


def _bits_by_index() -> bool:
    """Whether JAX computes random bits from the index of each number, not from pairs of indices."""
    config: Any = jax.config  # the settings of JAX have no type annotations
    return bool(config.jax_threefry_partitionable)


def _without_compiling(part: _Part, arguments: Sequence[Array]) -> list[jax.Array] | None:
    """Return constant or normal values without compiling for this shape, or None if impossible."""
    jaxpr = part.traced.jaxpr
    shape = jaxpr.outvars[0].aval.shape
    numbers = [x.val for each in jaxpr.eqns for x in each.invars if isinstance(x, Literal)]
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "broadcast_in_dim" and numbers:
        return [jax.device_put(np.full(shape, numbers[0], jaxpr.outvars[0].aval.dtype))]
    if not 0 < len(numbers) < 8 or np.prod(shape) >= 2**32:
        return None
    for std in dict.fromkeys(map(float, numbers)):  # jax 0.12 also has other literals
        if part.text == _normal_text(std, shape):
            key, folded = jnp.asarray(arguments[0]), np.asarray(arguments[1])
            return [jax.device_put(_normal_numbers(key, folded, np.float32(std), shape))]
    return None


@lru_cache(maxsize=1024)
def _normal_text(std: float, shape: tuple[int, ...]) -> str:
    """Return the printed jaxpr of a part that draws normal numbers."""

    def normal(key: jax.Array) -> jax.Array:
        init = nn.initializers.normal(std)
        return init(jax.random.fold_in(key, 0), shape, jnp.float32)

    key = jax.random.key(0, impl="threefry2x32")
    ((part, _, _),) = _parts(jax.jit(normal).trace(key).jaxpr, key)
    return part.text


def _normal_numbers(
    key: jax.Array, number: np.ndarray, std: np.float32, shape: tuple[int, ...]
) -> np.ndarray:  # f32[shape]
    """Draw normal numbers from `fold_in(key, number)` in chunks and multiply them by std."""
    found = np.empty(int(np.prod(shape)), np.float32)
    scale = std * np.float32(np.sqrt(2))  # XLA folds the constants in this order
    words, scale = jax.device_put((_words(key, jax.device_put(number)), scale))
    waiting: list[tuple[int, jax.Array]] = []

    def copy() -> None:
        start, chunk = waiting.pop(0)
        found[start : start + CHUNK] = np.asarray(chunk)[: len(found) - start]

    for start in range(0, len(found), CHUNK):
        first = jax.device_put(np.uint32(start))
        waiting.append((start, _normal_chunk(words, first, scale)))
        if len(waiting) > IN_FLIGHT:
            copy()
    while waiting:
        copy()
    return found.reshape(shape)


@jax.jit
def _words(key: jax.Array, number: jax.Array) -> jax.Array:  # u32[2]
    return jax.random.key_data(jax.random.fold_in(key, number))


@jax.jit
def _normal_chunk(key: jax.Array, start: jax.Array, scale: jax.Array) -> jax.Array:  # f32[CHUNK]
    """Return CHUNK numbers from index `start` on, with the arithmetic of `jax.random.normal`."""
    index = start + jax.lax.iota(jnp.uint32, CHUNK)
    # Encrypt the indices with the Threefry-2x32 cipher. The rounds are unrolled, so XLA fuses them
    # into one loop over the words. JAX's own version for CPUs loops over the rounds, each of which
    # reads and writes all words.
    high, low = jnp.zeros_like(index), index
    words = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    high, low = high + words[0], low + words[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            high = high + low
            low = high ^ ((low << np.uint32(turn)) | (low >> np.uint32(32 - turn)))
        high = high + words[(group + 1) % 3]
        low = low + words[(group + 2) % 3] + np.uint32(group + 1)
    in_1_to_2 = ((high ^ low) >> np.uint32(9)) | np.uint32(0x3F800000)
    u = jax.lax.bitcast_convert_type(in_1_to_2, jnp.float32) - np.float32(1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    u = jnp.maximum(least, u * (np.float32(1) - least) + least)
    return jax.lax.erf_inv(u) * scale
