"""Positional encodings: sinusoids, learned tables, rotations and Shaw's relative vectors.

All of them are functions of integer positions, which may start anywhere and may differ between
rows, so cached decoding and a full forward pass agree. Angles are float32. They are float64 for
float64 vectors, and for sinusoids under jax_enable_x64. Whole turns are removed before rounding, so
angles are as exact at position 2^31 - 1 as at position 1. A negative position marks padding, and no
query attends to it.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.attention.biases import key_distances
from transformer_jax.checks import as_int32, as_number, check_array, check_count
from transformer_jax.config import Rope, Sinusoidal
from transformer_jax.models.ops import lookup
from transformer_jax.sharding import by_compiler, split, vary
from transformer_jax.tracing import concrete_value


def in_rows(positions: jax.Array) -> jax.Array:  # i32[T] or i32[B, T] -> i32[B, T]
    """Add a row axis to positions, of size 1 if all rows have the same positions."""
    return positions if positions.ndim == 2 else positions[None]


def sinusoidal(
    positions: jax.Array,  # i32[...]
    dim: int,
    base: float = 10_000.0,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> jax.Array:  # f32[..., dim], f64 under jax_enable_x64
    """Return sin(p base^(-2i/dim)) at index 2i, and its cosine at 2i + 1.

    Vaswani et al. 2017, section 3.5.

    Args:
        positions: the integer positions p, of any shape.
        dim: width of the result, which must be even and at least 2.
        base: base of the wavelengths, above 0.
        layout: "interleaved", or "halves" for the sine at index i and the cosine at dim/2 + i
            (Marian).

    Returns:
        f32[..., dim], or f64 under jax_enable_x64.

    Raises:
        ValueError: If an argument is out of range.
    """
    check_count("dim", dim, 2)
    if dim % 2:
        raise ValueError(f"dim is {dim}: must be even")
    base = as_number("base", base)
    if not base > 0:
        raise ValueError(f"base is {base}: must be above 0")
    if layout not in ("interleaved", "halves"):
        raise ValueError(f"layout is {layout!r}: must be 'interleaved' or 'halves'")
    angles = _angles(positions, _inverse_frequencies(base, dim), jnp.result_type(float))
    if layout == "halves":
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*angles.shape[:-1], dim)


def sinusoidal_of(
    config: Sinusoidal,
    positions: jax.Array,  # i32[...]
    dim: int,
) -> jax.Array:  # f32[..., dim], f64 under jax_enable_x64
    """Apply `sinusoidal` with the offset, base and layout of a config."""
    return sinusoidal(positions + config.offset, dim, config.base, config.layout)


def learned(
    table: jax.Array,  # [offset + L, D]
    positions: jax.Array,  # i32[...]
    offset: int = 0,
) -> jax.Array:  # [..., D]
    """Look up table[offset + p], or return zeros if p < 0.

    Args:
        table: [offset + L, D], the vectors.
        positions: i32[...], the integer positions p. A traced position of L or greater results in
            NaN.
        offset: number of rows in the table before position 0.

    Returns:
        [..., D].

    Raises:
        ValueError: If a known position is L or greater.
    """
    positions = jnp.asarray(as_int32("positions", positions))
    known = concrete_value(positions)
    if known is not None and known.size:
        largest = known.max()
        if largest >= table.shape[0] - offset:
            size = f"{table.shape[0]} rows" + (f", {offset} of them before 0" if offset else "")
            raise ValueError(f"position {largest} is outside the table of {size}")
    row = jnp.maximum(positions, 0) + offset
    rows = lookup(jnp.asarray(table), row)
    return jnp.where((positions < 0)[..., None], jnp.zeros_like(rows), rows)


# Rotary positions (Su et al. 2021)


def rope_frequencies(config: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the radians per position of each pair, f32[dims/2], and the factor for the vectors.

    With d rotated dimensions, factor s, w_k = base^(-2k/d), and r_k = original_len w_k / 2 pi turns
    within the trained length:

        linear   w / s (Chen et al. 2023)
        ntk      base' = base s^(d/(d-2)): keeps the fastest pair and divides the slowest by s
        dynamic  ntk with s' = s n / original_len - (s - 1) at length n, or w itself up to
                 original_len (bloc97 and emozilla 2023)
        llama3   (1 - m) w / s + m w, m = clip((r - low) / (high - low), 0, 1) (Dubey et al. 2024)
        yarn     the same blend, with m falling from 1 to 0 linearly in k between the pairs that
                 make beta_fast and beta_slow turns. The pairs are rounded outward as in the
                 authors' code and released checkpoints (in the paper's text, m is linear in r).
                 The factor is 0.1 ln(s) + 1 by default (Peng et al. 2023, 3.2 to 3.4).
        longrope w_k / f_k, with the short factors f up to original_len and the long ones beyond.
                 The factor is sqrt(1 + ln(s) / ln(original_len)) by default (Ding et al. 2024).

    The result is computed in float64 and rounded once.

    Args:
        config: config with the base, the scaling and the parameters of the scaling.
        head_dim: H, at least the number of rotated dimensions.

    Raises:
        ValueError: If the number of rotated dimensions is odd or more than H, or if longrope does
            not have one factor for each pair.
    """
    frequencies, factor = _rope_frequencies(config, head_dim)
    return frequencies.astype(np.float32), factor


def _rope_frequencies(config: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Compute `rope_frequencies` in float64."""
    dims = head_dim if config.dims is None else config.dims
    if dims > head_dim or dims % 2:
        raise ValueError(f"dims is {dims}: must be even and at most head_dim {head_dim}")
    base, factor, original = config.base, config.factor, config.original_len
    if config.scaling in ("ntk", "dynamic") and dims > 2:  # a single pair always has frequency 1
        stretch = factor
        if config.scaling == "dynamic":
            assert original is not None
            stretch = factor * max(config.length or 0, original) / original - (factor - 1)
        base = base * stretch ** (dims / (dims - 2))
    w = _inverse_frequencies(base, dims)
    attention_factor = 1.0
    if config.scaling == "linear":
        w = w / factor
    elif config.scaling == "llama3":
        assert original is not None
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = np.clip((original * w / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
        w = (1 - kept) * w / factor + kept * w
    elif config.scaling == "yarn":
        assert original is not None

        def pair(turns: float) -> float:
            """Return the fractional index k of the pair that makes this number of turns."""
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        fast, slow = pair(config.beta_fast), pair(config.beta_slow)
        if config.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, dims - 1)
        # The authors' code also widens an empty ramp by 0.001, to avoid a division by zero.
        ramp = (np.arange(dims // 2) - first) / (last - first if last != first else 0.001)
        kept = 1 - np.clip(ramp, 0.0, 1.0)
        w = (1 - kept) * w / factor + kept * w
        attention_factor = 0.1 * math.log(factor) + 1.0
    elif config.scaling == "longrope":
        assert original is not None and config.short_factors and config.long_factors
        beyond = config.length is not None and config.length > original
        factors = config.long_factors if beyond else config.short_factors
        if len(factors) != len(w):
            rule = f"must be one for each of the {len(w)} rotated pairs"
            raise ValueError(f"longrope has {len(factors)} factors: {rule}")
        w = w / np.array(factors)
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    if config.attention_factor is not None:
        attention_factor = config.attention_factor
    return w, attention_factor


def apply_rope(
    x: jax.Array,  # [B, T, N, H]
    positions: jax.Array,  # i32[B, T] or [T]
    config: Rope,
) -> jax.Array:  # [B, T, N, H], in the dtype of x
    """Rotate pair k of each head by a = p w_k: (u, v) -> (u cos a - v sin a, v cos a + u sin a).

    Scores of rotated queries and keys depend only on the difference of their positions. The
    remaining dimensions do not change.

    Args:
        x: queries or keys.
        positions: the positions p.
        config: config that determines w (see `rope_frequencies`) and the dimensions of each pair.

    Returns:
        [B, T, N, H], in the dtype of x.

    Raises:
        ValueError: If the shapes do not match, or if `config` does not match H.
    """
    check_array("x", x, "[B, T, N, H]")
    positions = jnp.asarray(as_int32("positions", positions))
    rows, tokens = x.shape[:2]
    row, token = (1, 1, *positions.shape)[-2:]
    if positions.ndim not in (1, 2) or row not in (1, rows) or token not in (1, tokens):
        rule = f"must be ({tokens},) or ({rows}, {tokens})"
        raise ValueError(f"positions have shape {positions.shape}: {rule}")
    frequencies, factor = _rope_frequencies(config, x.shape[-1])
    dims = 2 * len(frequencies)
    # rotate bfloat16 vectors in float32, and round once, at the end
    wide = np.promote_types(x.dtype, np.float32)
    angles = _angles(positions, frequencies, wide)
    angles = angles[..., None, :] if angles.ndim == 3 else angles[None, :, None]
    # YaRN and LongRoPE multiply both queries and keys, so scores grow by the square of the factor
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)  # [B or 1, T, 1, dims/2]
    rotated = x[..., :dims].astype(wide)
    if config.pairing == "half":
        u, v = rotated[..., : dims // 2], rotated[..., dims // 2 :]
        rotated = jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
    else:
        u, v = rotated[..., 0::2], rotated[..., 1::2]
        rotated = jnp.stack([u * cos - v * sin, v * cos + u * sin], axis=-1)
        rotated = rotated.reshape(*x.shape[:-1], dims)
    rotated = rotated.astype(x.dtype)
    return rotated if dims == x.shape[-1] else jnp.concatenate([rotated, x[..., dims:]], axis=-1)


def _inverse_frequencies(base: float, dims: int) -> np.ndarray:
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def _angles(
    positions: jax.Array,
    frequencies: np.ndarray,
    dtype: np.dtype,  # float32 or float64
) -> jax.Array:  # [..., dims/2]
    """Return p w modulo whole turns, in [-pi, pi].

    Frequencies are 64-bit fractions of a turn. Their product with p wraps around in uint32 (or in
    uint64 for float64 angles) exactly as turns do, so the phase is exact to 2^-30 turns at every
    int32 position. Floating-point positions are not reduced, so the error of p w in f32 is p w
    2^-24.
    """
    positions = jnp.asarray(as_int32("positions", positions))
    if positions.dtype in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"positions are {positions.dtype}, which is too imprecise for positions; use int32"
        )
    lead = (1,) * positions.ndim
    if jnp.issubdtype(positions.dtype, jnp.floating):
        w = jnp.asarray(frequencies, dtype).reshape(*lead, -1)
        return positions.astype(dtype)[..., None] * w
    turns = np.array([int(w / (2 * math.pi) % 1.0 * 2.0**64) for w in frequencies], np.uint64)
    # The absolute value of -2^31 overflows to itself, and the cast turns it into 2^31.
    p = jnp.abs(positions).astype(jnp.uint32)[..., None]
    if dtype == np.float64:
        phase = p.astype(jnp.uint64) * jnp.asarray(turns).reshape(*lead, -1)  # in 2^-64 turns
        signed = jax.lax.bitcast_convert_type(phase, jnp.int64)
        angles = signed.astype(dtype) * (2 * math.pi / 2.0**64)
        return jnp.where((positions < 0)[..., None], -angles, angles)
    high, low = (jnp.asarray(x.astype(np.uint32)).reshape(*lead, -1) for x in divmod(turns, 2**32))
    # multiply 16-bit halves, because JAX has no 64-bit integers without x64
    (p1, p0), (low1, low0) = ((x >> 16, x & 0xFFFF) for x in (p, low))
    # The remaining product, p0 * low0, is smaller than one unit and is left out.
    phase = p * high + p1 * low1 + (p1 * low0 >> 16) + (p0 * low1 >> 16)  # in 2^-32 turns
    signed = phase.astype(jnp.int32)  # keeps the same bits; ONNX has no bitcast before opset 26
    angles = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)
    return jnp.where((positions < 0)[..., None], -angles, angles)


# Learned vectors for clipped distances (Shaw et al. 2018)


def shaw_scores(
    query: jax.Array,  # [B, T, N, H]
    key_table: jax.Array,  # [2 clip + 1, H]
    q_positions: jax.Array,  # i32[T] or [B, T]
    k_positions: jax.Array,  # i32[S] or [B, S]
) -> jax.Array:  # f32[B, N, T, S]
    """Return the unscaled query . key_table[clip(k - q)], the second term of Shaw's equation 4.

    To avoid an array [T, S, H], all 2 clip + 1 products of each query are computed and then
    gathered.

    Args:
        query: [B, T, N, H].
        key_table: [2 clip + 1, H]. Row clip + d is the vector for a key that is d positions after
            the query.
        q_positions: i32[T] or [B, T].
        k_positions: i32[S] or [B, S].

    Returns:
        f32[B, N, T, S].
    """

    def scores(
        query: jax.Array, key_table: jax.Array, q_positions: jax.Array, k_positions: jax.Array
    ) -> jax.Array:
        products = jnp.einsum("BTNH,RH->BNTR", query, key_table, preferred_element_type=jnp.float32)
        return _pick(products, _shaw_rows(key_table, q_positions, k_positions))

    rows, tokens, heads, _ = split(query)
    arrays = [query, key_table, q_positions, k_positions]
    return by_compiler(scores, arrays, PartitionSpec(rows, heads, tokens))


def shaw_values(
    weights: jax.Array,  # [B, N, T, S]
    value_table: jax.Array,  # [2 clip + 1, Hv]
    q_positions: jax.Array,  # i32[T] or [B, T]
    k_positions: jax.Array,  # i32[S] or [B, S]
) -> jax.Array:  # [B, T, N, Hv], in the dtype of weights
    """Sum weights[s] value_table[clip(k - q)] over s, the second term of Shaw's equation 3.

    Weights with equal clipped distances are summed first, which is the transpose of `_pick`.

    Args:
        weights: [B, N, T, S], the attention weights.
        value_table: [2 clip + 1, Hv].
        q_positions: i32[T] or [B, T].
        k_positions: i32[S] or [B, S].

    Returns:
        [B, T, N, Hv], in the dtype of weights.
    """

    def values(
        weights: jax.Array, value_table: jax.Array, q_positions: jax.Array, k_positions: jax.Array
    ) -> jax.Array:
        rows = _shaw_rows(value_table, q_positions, k_positions)
        zeros = jnp.zeros((*weights.shape[:3], value_table.shape[0]), jnp.float32)
        _, add_up = jax.vjp(lambda x: _pick(x, rows), vary(zeros, weights))
        (sums,) = add_up(weights.astype(jnp.float32))
        return jnp.einsum("BNTR,RH->BTNH", sums, value_table).astype(weights.dtype)

    rows, heads, tokens, _ = split(weights)
    arrays = [weights, value_table, q_positions, k_positions]
    return by_compiler(values, arrays, PartitionSpec(rows, tokens, heads))


def _shaw_rows(
    table: jax.Array, q_positions: jax.Array, k_positions: jax.Array
) -> jax.Array:  # i32[B or 1, 1, T, S]
    rows = table.shape[0]
    if rows % 2 == 0:
        raise ValueError(f"table has {rows} rows: the number must be odd (2 clip + 1)")
    clip = rows // 2
    return jnp.clip(key_distances(q_positions, k_positions), -clip, clip)[:, None] + clip


def _pick(x: jax.Array, rows: jax.Array) -> jax.Array:  # [B, N, T, R] -> [B, N, T, S]
    return jnp.take_along_axis(x, rows, axis=-1, mode="promise_in_bounds")
