"""Linear attention: functions with a state of fixed size instead of a cache of keys and values.

Each row and head has a state S, a matrix [H, Hv] that maps keys to values. Each token decays the
state, writes to it and reads it:

    linear_attention          S = S + k v^T
    gated_linear_attention    S = exp(decay) S + k v^T
    delta_rule                S = S + beta k (v - S^T k)^T
    gated_delta_rule          S = exp(decay) S, and then as in delta_rule
    output                    scale S^T q

`causal_conv` is the short convolution that such layers apply to their inputs.

A chunk of C tokens is computed with matrix products. Let G_i be the sum of the decays of the chunk
up to and including token i, S its initial state, and n_j the value that token j writes:

    n_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j<i} exp(G_i - G_j) (k_i . k_j) n_j)
    out_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) n_j
    next S = exp(G_C) S + sum_j exp(G_C - G_j) k_j n_j^T

The first line is a triangular system, whose inverse does not depend on S. Without the delta rule,
n is v. Yang et al. 2024 (Parallelizing linear transformers with the delta rule over sequence
length) and Yang et al. 2023 (Gated linear attention transformers with hardware-efficient training)
derive these forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.attention.arguments import DTYPES
from transformer_jax.attention.reference import einsum
from transformer_jax.checks import as_int32, as_number, check_count, check_finite
from transformer_jax.config.keywords import known_keywords
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import are_concrete, concrete_value

Result = jax.Array | tuple[jax.Array, jax.Array]
RESTART = -1e30
"""Decay of a document's first token. Its exponential is 0, and sums of it are finite in float32."""


def elu_plus_one(x: jax.Array) -> jax.Array:
    """Return elu(x) + 1, the feature map of Katharopoulos et al. 2020, which is above 0."""
    # `jax.nn.elu(x) + 1` would be 0 below about -17
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@known_keywords
def linear_attention(
    query: jax.Array,  # [B, T, Nq, H]
    key: jax.Array,  # [B, T, Nk, H]
    value: jax.Array,  # [B, T, Nv, Hv]
    *,
    feature_map: Callable[[jax.Array], jax.Array] | None = elu_plus_one,
    normalize: bool = True,
    scale: float | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    valid: jax.Array | None = None,  # bool[B, T]
    initial_state: jax.Array | None = None,  # [B, N, H, Hv + 1], or [B, N, H, Hv]
    chunk_size: int = 64,
    return_state: bool = False,
) -> Result:  # [B, T, max(Nq, N), Hv]; with `return_state` also [B, N, H, Hv]
    """Return linear attention, the causal average of the values with the weights f(q_i) . f(k_j).

        out_i = sum_{j<=i} (f(q_i) . f(k_j)) v_j / sum_{j<=i} f(q_i) . f(k_j)

    With `normalize=False`, the sum is multiplied by `scale` instead of being divided. See
    Katharopoulos et al. 2020 (Transformers are RNNs), section 3.2. Heads, documents, padding and
    dtypes are those of `gated_delta_rule`.

    Args:
        query: [B, T, Nq, H], in bfloat16, float16, float32 or float64.
        key: [B, T, Nk, H], in the query's dtype.
        value: [B, T, Nv, Hv], in the query's dtype.
        feature_map: f, a function of an array [B, T, N, H] in at least float32, which may change
            the width H. With `normalize`, f(q) . f(k) must be above 0. None means f(x) = x.
        normalize: whether to divide by the sum of the weights. The state then has one more column,
            the sum of f(k).
        scale: factor for the output without `normalize`; None means 1 / sqrt(H).
        segments: i32[B, T], the document of each token; None means one document per row.
        valid: bool[B, T], with False for padding; None means that all tokens are valid.
        initial_state: the state from an earlier call; None means zeros.
        chunk_size: number of tokens per chunk, rounded up to a power of 2; 1 processes one token at
            a time.
        return_state: whether to also return the state after the last token.

    Returns:
        The output [B, T, max(Nq, N), Hv] in the value's dtype. With `return_state`, the function
        also returns the state [B, N, H, Hv + 1], or [B, N, H, Hv] without
        `normalize`, in float32, or in float64 if the value is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    if normalize and scale is not None:
        raise ValueError(f"scale is {scale}: must be None with normalize=True, which cancels it")
    return _attend(
        query, key, value, None, None,
        scale=scale, segments=segments, valid=valid, initial_state=initial_state,
        chunk_size=chunk_size, return_state=return_state,
        feature_map=feature_map, normalize=normalize,
    )  # fmt: skip


@known_keywords
def gated_linear_attention(
    query: jax.Array,  # [B, T, Nq, H]
    key: jax.Array,  # [B, T, Nk, H]
    value: jax.Array,  # [B, T, Nv, Hv]
    decay: jax.Array,  # [B, T, N] or [B, T, N, H]
    *,
    scale: float | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    valid: jax.Array | None = None,  # bool[B, T]
    initial_state: jax.Array | None = None,  # [B, N, H, Hv]
    chunk_size: int = 64,
    return_state: bool = False,
) -> Result:  # [B, T, max(Nq, N), Hv]; with `return_state` also [B, N, H, Hv]
    """Return linear attention whose state decays, S = exp(decay) S + k v^T.

    See Yang et al. 2023 (Gated linear attention transformers with hardware-efficient training),
    section 4. Heads, documents, padding and dtypes are those of `gated_delta_rule`.

    Mamba-2's SSD is the same function (Dao and Gu 2024, Transformers are SSMs). For its inputs x
    [B, T, N, P], b and c [B, T, groups, H], dt [B, T, N] and A [N]:

        gated_linear_attention(c, b, dt[..., None] * x, dt * A, scale=1.0)

    Args:
        query: [B, T, Nq, H], in bfloat16, float16, float32 or float64.
        key: [B, T, Nk, H], in the query's dtype.
        value: [B, T, Nv, Hv], in the query's dtype.
        decay: [B, T, N] or [B, T, N, H], the logarithm of the factor for the state or for each of
            its rows; at most 0.
        scale: factor for the output; None means 1 / sqrt(H).
        segments: i32[B, T], the document of each token; None means one document per row.
        valid: bool[B, T], with False for padding; None means that all tokens are valid.
        initial_state: the state from an earlier call; None means zeros.
        chunk_size: number of tokens per chunk, rounded up to a power of 2; 1 processes one token at
            a time.
        return_state: whether to also return the state after the last token.

    Returns:
        The output [B, T, max(Nq, N), Hv] in the value's dtype. With `return_state`, the function
        also returns the state [B, N, H, Hv] in float32, or in float64 if the value is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    decay = _floating("decay", decay)
    return _attend(
        query, key, value, decay, None,
        scale=scale, segments=segments, valid=valid, initial_state=initial_state,
        chunk_size=chunk_size, return_state=return_state,
    )  # fmt: skip


@known_keywords
def delta_rule(
    query: jax.Array,  # [B, T, Nq, H]
    key: jax.Array,  # [B, T, Nk, H]
    value: jax.Array,  # [B, T, Nv, Hv]
    beta: jax.Array,  # [B, T, N]
    *,
    scale: float | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    valid: jax.Array | None = None,  # bool[B, T]
    initial_state: jax.Array | None = None,  # [B, N, H, Hv]
    chunk_size: int = 64,
    return_state: bool = False,
) -> Result:  # [B, T, max(Nq, N), Hv]; with `return_state` also [B, N, H, Hv]
    """Return the output of the delta rule, S = S + beta k (v - S^T k)^T.

    A write replaces the value that the state returns for the key. If k has norm 1 and beta is 1,
    the state then returns exactly v. See Schlag et al. 2021 (Linear transformers are secretly fast
    weight programmers) and Yang et al. 2024 (Parallelizing linear transformers with the delta rule
    over sequence length). Heads, documents, padding and dtypes are those of `gated_delta_rule`.

    Args:
        query: [B, T, Nq, H], in bfloat16, float16, float32 or float64.
        key: [B, T, Nk, H], in the query's dtype.
        value: [B, T, Nv, Hv], in the query's dtype.
        beta: [B, T, N], the strength of each write, usually from 0 to 1 or 2.
        scale: factor for the output; None means 1 / sqrt(H).
        segments: i32[B, T], the document of each token; None means one document per row.
        valid: bool[B, T], with False for padding; None means that all tokens are valid.
        initial_state: the state from an earlier call; None means zeros.
        chunk_size: number of tokens per chunk, rounded up to a power of 2; 1 processes one token at
            a time.
        return_state: whether to also return the state after the last token.

    Returns:
        The output [B, T, max(Nq, N), Hv] in the value's dtype. With `return_state`, the function
        also returns the state [B, N, H, Hv] in float32, or in float64 if the value is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    beta = _floating("beta", beta)
    return _attend(
        query, key, value, None, beta,
        scale=scale, segments=segments, valid=valid, initial_state=initial_state,
        chunk_size=chunk_size, return_state=return_state,
    )  # fmt: skip


@known_keywords
def gated_delta_rule(
    query: jax.Array,  # [B, T, Nq, H]
    key: jax.Array,  # [B, T, Nk, H]
    value: jax.Array,  # [B, T, Nv, Hv]
    decay: jax.Array,  # [B, T, N] or [B, T, N, H]
    beta: jax.Array,  # [B, T, N]
    *,
    scale: float | None = None,
    segments: jax.Array | None = None,  # i32[B, T]
    valid: jax.Array | None = None,  # bool[B, T]
    initial_state: jax.Array | None = None,  # [B, N, H, Hv]
    chunk_size: int = 64,
    return_state: bool = False,
) -> Result:  # [B, T, max(Nq, N), Hv]; with `return_state` also [B, N, H, Hv]
    """Return the output of the delta rule with a state that decays.

        S = exp(decay) S
        S = S + beta k (v - S^T k)^T
        out = scale S^T q

    See Yang et al. 2024 (Gated delta networks: improving Mamba2 with the delta rule). With a decay
    [B, T, N, H], it is Kimi delta attention (Kimi Linear, 2025). Normalize the keys before the
    call: if beta |k|^2 is above 2, the state can grow without bound.

    Heads: there are N = max(Nk, Nv) states, and Nk and Nv divide N. State n reads key head
    n // (N / Nk) and value head n // (N / Nv). If Nq is above N, query head n reads state
    n // (Nq / N); otherwise, state n is read by query head n // (N / Nq), and there are N outputs.

    Documents: the state starts again from zeros at each valid token whose segment differs from that
    of the previous valid token. `initial_state` belongs to the first document of the row.

    Padding: a token that is not valid leaves the state unchanged, and its output is 0. Its inputs
    may be NaN. In contrast, NaN in a valid token may affect its whole chunk and all later tokens.

    States and sums are float32, or float64 if the value is float64.

    Args:
        query: [B, T, Nq, H], in bfloat16, float16, float32 or float64.
        key: [B, T, Nk, H], in the query's dtype.
        value: [B, T, Nv, Hv], in the query's dtype.
        decay: [B, T, N] or [B, T, N, H], the logarithm of the factor for the state or for each of
            its rows; at most 0.
        beta: [B, T, N], the strength of each write, usually from 0 to 1 or 2.
        scale: factor for the output; None means 1 / sqrt(H).
        segments: i32[B, T], the document of each token; None means one document per row.
        valid: bool[B, T], with False for padding; None means that all tokens are valid.
        initial_state: the state from an earlier call; None means zeros.
        chunk_size: number of tokens per chunk, rounded up to a power of 2; 1 processes one token at
            a time.
        return_state: whether to also return the state after the last token.

    Returns:
        The output [B, T, max(Nq, N), Hv] in the value's dtype. With `return_state`, the function
        also returns the state [B, N, H, Hv] in float32, or in float64 if the value is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    decay, beta = _floating("decay", decay), _floating("beta", beta)
    return _attend(
        query, key, value, decay, beta,
        scale=scale, segments=segments, valid=valid, initial_state=initial_state,
        chunk_size=chunk_size, return_state=return_state,
    )  # fmt: skip


@known_keywords
def causal_conv(
    x: jax.Array,  # [B, T, D]
    weight: jax.Array,  # [W, D]
    bias: jax.Array | None = None,  # [D]
    *,
    segments: jax.Array | None = None,  # i32[B, T]
    valid: jax.Array | None = None,  # bool[B, T]
    initial_state: jax.Array | None = None,  # [B, W - 1, D]
    return_state: bool = False,
) -> Result:  # [B, T, D]; with `return_state` also [B, W - 1, D]
    """Return a causal convolution of each channel over the last W tokens.

        out_t = bias + sum_w weight[w] x_{t - (W - 1) + w}

    The last row of `weight` multiplies the current token. A token that is not valid is skipped: it
    is in no window, and its output is 0. The tokens before the first token of a document are zeros.

    Args:
        x: [B, T, D], in bfloat16, float16, float32 or float64.
        weight: [W, D], floating-point.
        bias: [D], floating-point; None means 0.
        segments: i32[B, T], the document of each token; None means one document per row.
        valid: bool[B, T], with False for padding; None means that all tokens are valid.
        initial_state: [B, W - 1, D] in the dtype of x, the tokens before the first one, from an
            earlier call; None means zeros.
        return_state: whether to also return the last W - 1 valid tokens of the last document.

    Returns:
        The output [B, T, D] in the dtype of x, with sums in at least float32. With `return_state`,
        the function also returns the state [B, W - 1, D] in the dtype of x.

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    x, weight = _floating("x", x), jnp.asarray(weight)
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}: must be [batch, length, channels]")
    B, T, D = x.shape
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != D:
        raise ValueError(f"weight has shape {weight.shape}: must be [W, {D}] with W >= 1")
    W = weight.shape[0]
    weight = _shaped("weight", weight, (W, D))
    bias = None if bias is None else _shaped("bias", bias, (D,))
    segments, valid = _check_tokens(segments, valid, (B, T))
    if initial_state is not None:
        initial_state = _shaped("initial_state", initial_state, (B, W - 1, D))
        if initial_state.dtype != x.dtype:
            raise ValueError(f"initial_state is {initial_state.dtype}: must be {x.dtype}, like x")
    rows, tokens, channels = split(x)
    specs = PartitionSpec(rows, tokens, channels), PartitionSpec(rows, None, channels)
    out, state = by_compiler(_convolve, [x, weight, bias, segments, valid, initial_state], specs)
    return (out, state) if return_state else out


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array | None,
    beta: jax.Array | None,
    *,
    scale: float | None,
    segments: jax.Array | None,
    valid: jax.Array | None,
    initial_state: jax.Array | None,
    chunk_size: int,
    return_state: bool,
    feature_map: Callable[[jax.Array], jax.Array] | None = None,
    normalize: bool = False,
) -> Result:
    """Check the arguments, and compute the output and the state."""
    if not (feature_map is None or callable(feature_map)):
        raise ValueError(f"feature_map is {feature_map!r}: must be a function, or None")
    query, key, value = (
        _floating(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"shapes are query {query.shape}, key {key.shape}, value {value.shape}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{shapes}: {name} must be [batch, length, heads, width]")
        if x.shape[:2] != query.shape[:2]:
            raise ValueError(f"{shapes}: {name} must have the batch and length of query")
    if not query.dtype == key.dtype == value.dtype:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        raise ValueError(f"{dtypes}: must be one dtype of {', '.join(DTYPES.values())}")
    (B, T, Nq, H), Nk, Nv = query.shape, key.shape[2], value.shape[2]
    if H != key.shape[3] or H == 0:
        raise ValueError(f"{shapes}: query and key must have equal widths above 0")
    N = max(Nk, Nv)
    if 0 in (Nq, Nk, Nv) or N % Nk or N % Nv or max(N, Nq) % min(N, Nq):
        rule = "of the heads of key and value, the smaller number must divide the larger, N, and"
        raise ValueError(f"{shapes}: {rule} the heads of query must divide N or be a multiple of N")
    segments, valid = _check_tokens(segments, valid, (B, T))
    if decay is not None:
        per_key = np.ndim(decay) == 4
        decay = _shaped("decay", decay, (B, T, N, H) if per_key else (B, T, N))
        known = concrete_value(decay)
        if known is not None and valid is not None:  # the decay of padding is not read
            seen = concrete_value(valid)
            known = None if seen is None else known[seen]
        if known is not None and (known > 0).any():
            rule = "must be at most 0, because it is the logarithm of a factor of at most 1"
            raise ValueError(f"decay contains {known[known > 0][0]}: {rule}")
        decay = decay if per_key else decay[..., None]
    beta = None if beta is None else _shaped("beta", beta, (B, T, N))
    check_count("chunk_size", chunk_size, 1)
    if scale is None:
        scale = 1.0 if normalize else H**-0.5
    scale = as_number("scale", scale)
    check_finite("scale", scale)
    dtype, wide = value.dtype, np.promote_types(value.dtype, np.float32)
    if feature_map is not None:
        query, key = (_features(feature_map, x.astype(wide), valid) for x in (query, key))
    if normalize:
        value = value.astype(wide)
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    size = B, N, key.shape[3], value.shape[3]
    if initial_state is not None:
        initial_state = _shaped("initial_state", initial_state, size).astype(wide)
    # the arrays with the most heads determine how the results are split over a mesh
    rows, tokens, heads, _ = split(value if Nv == N else key)
    specs = (
        PartitionSpec(rows, tokens, split(query)[2] if Nq > N else heads),
        PartitionSpec(rows, heads),
    )
    run = partial(_run, scale=scale, chunk_size=int(chunk_size))
    arrays = [query, key, value, decay, beta, segments, valid, initial_state]
    out, state = by_compiler(run, arrays, specs)
    if normalize:
        total = out[..., -1:]
        # the weights of a token that is not valid sum to 0
        out = out[..., :-1] / jnp.where(total == 0, jnp.ones_like(total), total)
    out = out.astype(dtype)
    return (out, state) if return_state else out


def _floating(name: str, x: jax.Array) -> jax.Array:
    """Return an array of one of the supported dtypes."""
    if x is None:
        raise ValueError(f"{name} is None: must be an array")
    # JAX would round it to float32
    if getattr(x, "dtype", None) == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(f"{name} is float64: needs jax_enable_x64")
    x = jnp.asarray(x)
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}: must be one of {', '.join(DTYPES.values())}")
    return x


def _shaped(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a floating-point array of the given shape."""
    x = _floating(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: must be {shape}")
    return x


def _check_tokens(
    segments: jax.Array | None, valid: jax.Array | None, shape: tuple[int, int]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the documents as int32 and the mask of valid tokens."""
    if segments is not None:
        segments = jnp.asarray(as_int32("segments", segments))
        if segments.shape != shape or not jnp.issubdtype(segments.dtype, jnp.integer):
            rule = f"must be integers {shape}, the document of each token"
            raise ValueError(f"segments is {segments.dtype}{segments.shape}: {rule}")
    if valid is not None:
        valid = jnp.asarray(valid)
        if valid.shape != shape or valid.dtype != jnp.bool_:
            rule = f"must be bool{shape}, with False for padding"
            raise ValueError(f"valid is {valid.dtype}{valid.shape}: {rule}")
    return segments, valid


def _features(
    feature_map: Callable[[jax.Array], jax.Array], x: jax.Array, valid: jax.Array | None
) -> jax.Array:
    # NaN in padding would become NaN in the gradient of the map
    features = feature_map(x if valid is None else _zero_padding(x, valid))
    shape = getattr(features, "shape", ())
    if len(shape) != 4 or shape[:3] != x.shape[:3] or features.dtype != x.dtype:
        shown = f"{features.dtype}{shape}" if shape else type(features).__name__
        rule = f"must be {x.dtype}[{', '.join(map(str, x.shape[:3]))}, width]"
        raise ValueError(f"feature_map returned {shown}: {rule}")
    return features


def _zero_padding(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Set the tokens that are not valid to 0."""
    return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x))


def _restarts(segments: jax.Array, valid: jax.Array | None) -> jax.Array:  # bool[B, T]
    """Return the valid tokens whose document differs from that of the previous valid token."""
    at = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    last = at if valid is None else jax.lax.cummax(jnp.where(valid, at, jnp.int32(-1)), axis=1)
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1)
    restarts = (before >= 0) & (segments != previous)
    return restarts if valid is None else restarts & valid


@partial(jax.jit, static_argnames=("scale", "chunk_size"))
def _run(
    query: jax.Array,  # [B, T, Nq, H]
    key: jax.Array,  # [B, T, Nk, H]
    value: jax.Array,  # [B, T, Nv, Hv]
    decay: jax.Array | None,  # [B, T, N, 1 or H]
    beta: jax.Array | None,  # [B, T, N]
    segments: jax.Array | None,
    valid: jax.Array | None,
    state: jax.Array | None,  # [B, N, H, Hv]
    *,
    scale: float,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:  # [B, T, max(Nq, N), Hv] and [B, N, H, Hv], in at least float32
    (B, T, Nq, H), Nk, (Nv, Hv) = query.shape, key.shape[2], value.shape[2:]
    N, wide = max(Nk, Nv), np.promote_types(value.dtype, np.float32)
    G = max(Nq // N, 1)  # queries that read one state
    query, key, value = (x.astype(wide) for x in (query, key, value))
    if state is None:
        state = jnp.zeros((B, N, H, Hv), wide)
    if T == 0:
        return jnp.zeros((B, 0, G * N, Hv), wide), state
    if beta is not None:
        beta = beta.astype(wide)[..., None]
    if decay is not None:
        decay = decay.astype(wide)
    if valid is not None:  # a token with these zeros leaves the state unchanged
        query, key, value = (_zero_padding(x, valid) for x in (query, key, value))
        beta, decay = (x if x is None else _zero_padding(x, valid) for x in (beta, decay))
    if segments is not None:
        if decay is None:
            decay = jnp.zeros((B, T, 1, 1), wide)
        restarts = _restarts(segments, valid)[..., None, None]
        decay = jnp.where(restarts, jnp.asarray(RESTART, wide), decay)
    query = jnp.repeat(query, max(N // Nq, 1), axis=2).reshape(B, T, N, G, H) * scale
    key, value = jnp.repeat(key, N // Nk, axis=2), jnp.repeat(value, N // Nv, axis=2)
    arrays = [query, key, value, decay, beta]
    if chunk_size == 1 or (are_concrete(T) and T == 1):
        out, state = _recurrent(arrays, state)
    else:
        most = min(chunk_size, T) if are_concrete(T) else chunk_size
        C = 2 ** (most - 1).bit_length()
        padding = (T + C - 1) // C * C - T  # a form that `jax.export` supports for an open T
        # zeros leave the state unchanged
        pad = lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
        out, state = _in_chunks([x if x is None else pad(x) for x in arrays], state, C)
        out = out[:, :T]
    return out.reshape(B, T, N * G, Hv), state


def _recurrent(
    arrays: Sequence[jax.Array | None], state: jax.Array
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, G, Hv] and the state
    """Process one token at a time, which is the definition."""

    def step(S: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, beta = token  # [B, N, G, H], [B, N, H], [B, N, Hv], [B, N, 1]
        if decay is not None:
            S = jnp.exp(decay)[..., None] * S
        if beta is not None:
            value = beta * (value - einsum("BNH,BNHV->BNV", key, S))
        S = S + key[..., None] * value[..., None, :]
        return S, einsum("BNGH,BNHV->BNGV", query, S)

    tokens = [x if x is None else jnp.moveaxis(x, 1, 0) for x in arrays]
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


def _in_chunks(
    arrays: Sequence[jax.Array | None], state: jax.Array, C: int
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, G, Hv] and the state
    """Process chunks of C tokens with the equations above.

    Only the products with the state are inside the loop. All other products are computed for all
    chunks at once.
    """

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, N, ..] to [T / C, B, N, C, ..]
        B, T, *rest = x.shape
        return jnp.moveaxis(x.reshape(B, T // C, C, *rest), (1, 3), (0, 2))

    query, key, value, decay, beta = (x if x is None else chunks(x) for x in arrays)
    assert query is not None and key is not None and value is not None
    lead, G = query.shape[:3], query.shape[4]
    per_key, sums = False, None
    decays = jnp.tri(C, dtype=key.dtype)[None, None, None]
    if decay is not None:
        per_key, sums = decay.shape[-1] > 1, _sums(decay)
        if not per_key:
            ones = jnp.ones_like(decay)
            decays = _decayed_products(ones, ones, sums)

    def products(rows: jax.Array) -> jax.Array:  # [.., C, R, H] to [.., C, R, C]
        if per_key:
            assert sums is not None
            # a product of all rows at once has a gradient that crashes XLA on CPUs (jax 0.10.2)
            each = [_decayed_products(rows[..., r, :], key, sums) for r in range(rows.shape[-2])]
            return jnp.stack(each, axis=-2)
        return einsum("...IRH,...JH->...IRJ", rows, key) * decays[..., None, :]

    weights, reads = products(query).reshape(*lead, C * G, C), [query]
    writes, inverse, last = key, None, None
    if beta is not None:
        reads.append((beta * key)[..., None, :])
        value, inverse = beta * value, _inverse(products(reads[1])[..., 0, :])
    if sums is not None:
        since_start, until_end = (jnp.exp(x) for x in sums[-1])
        reads = [x * since_start[..., None, :] for x in reads]
        writes, last = key * until_end, since_start[..., -1, :, None]
    reads = [x.reshape(*lead, C * x.shape[-2], x.shape[-1]) for x in reads]
    rows = jnp.concatenate(reads, axis=-2)

    def step(S: jax.Array, chunk: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rows, writes, value, inverse, last = chunk
        out = einsum("BNIH,BNHV->BNIV", rows, S)
        if inverse is not None:
            value = einsum("BNIJ,BNJV->BNIV", inverse, value - out[:, :, C * G :])
        S = S if last is None else last * S
        return S + einsum("BNJH,BNJV->BNHV", writes, value), (out[:, :, : C * G], value)

    state, (out, value) = jax.lax.scan(step, state, (rows, writes, value, inverse, last))
    out = out + einsum("...IJ,...JV->...IV", weights, value)
    out = out.reshape(*lead, C, G, out.shape[-1])
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [B, T / C, C, N, G, Hv]
    return out.reshape(out.shape[0], out.shape[1] * C, *out.shape[3:]), state


def _halves(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Split [.., C, ..], whose first three axes are batched, in blocks of 2 n, and each in two."""
    x = x.reshape(*x.shape[:3], x.shape[3] // (2 * n), 2, n, *x.shape[4:])
    return x[:, :, :, :, 0], x[:, :, :, :, 1]


def _sums(decay: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return sums of decays [c, B, N, C, D] in blocks of 1, 2, 4, .., C tokens.

    For each size, the first array is the sum from the start of the block up to and including each
    token, and the second is the sum after each token up to the end of the block. A difference of
    cumulative sums would lose digits where the decay is strong.
    """
    start, end, n = decay, jnp.zeros_like(decay), 1
    levels = [(start, end)]
    while n < decay.shape[3]:
        (start_0, start_1), (end_0, end_1) = _halves(start, n), _halves(end, n)
        start = jnp.concatenate([start_0, start_1 + start_0[..., -1:, :]], axis=-2)
        end = jnp.concatenate([end_0 + start_1[..., -1:, :], end_1], axis=-2)
        start, end = start.reshape(decay.shape), end.reshape(decay.shape)
        levels.append((start, end))
        n *= 2
    return levels


def _decayed_products(
    rows: jax.Array,  # [c, B, N, C, H]
    key: jax.Array,  # [c, B, N, C, H]
    sums: list[tuple[jax.Array, jax.Array]],
) -> jax.Array:  # [c, B, N, C, C]
    """Return sum_h rows[i, h] key[j, h] exp(G_i - G_j)[h] for j <= i, and 0 for j > i.

    exp(-G_j) may overflow. Therefore, two adjacent blocks are joined at a time: the exponent
    G_i - G_j is the sum from the start of the right block to i, plus the sum after j up to the end
    of the left block. Neither is above 0, and each belongs to one factor of a matrix product.
    """
    joined = jnp.sum(rows * key, axis=-1)[..., None, None]
    for i, (start, end) in enumerate(sums[:-1]):
        n = 2**i
        right = _halves(rows, n)[1] * jnp.exp(_halves(start, n)[1])
        left = _halves(key, n)[0] * jnp.exp(_halves(end, n)[0])
        joined = _join(joined, einsum("...IH,...JH->...IJ", right, left))
    return joined[:, :, :, 0]


@jax.custom_jvp
def _inverse(lower: jax.Array) -> jax.Array:  # [.., C, C]
    """Return the inverse of I + L, where L is the part of `lower` below the diagonal.

    The inverse of [[a, 0], [l, b]] is [[a^-1, 0], [-b^-1 l a^-1, b^-1]].
    """
    *lead, C, _ = lower.shape
    blocks, corners = lower[:, :, :, None], []  # [.., m, n, n], the m blocks on the diagonal
    while (n := blocks.shape[-1] // 2) > 0:
        corners.append(blocks[..., n:, :n])
        halves = jnp.stack([blocks[..., :n, :n], blocks[..., n:, n:]], axis=-3)
        blocks = halves.reshape(*lead, C // n, n, n)
    inverse = jnp.ones_like(blocks)
    for corner in reversed(corners):
        a, b = inverse[:, :, :, 0::2], inverse[:, :, :, 1::2]
        product = einsum("...IJ,...JK->...IK", b, corner)
        inverse = _join(inverse, -einsum("...IJ,...JK->...IK", product, a))
    return inverse[:, :, :, 0]


@_inverse.defjvp
def _inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # the derivative of each step above would take many times as long to compile
    inverse = _inverse(*primals)
    product = einsum("...IJ,...JK->...IK", inverse, jnp.tril(tangents[0], -1))
    return inverse, -einsum("...IJ,...JK->...IK", product, inverse)


def _join(blocks: jax.Array, corner: jax.Array) -> jax.Array:
    """Join pairs a, b of the blocks [.., m, n, n] to [[a, 0], [corner, b]]."""
    a, b = blocks[:, :, :, 0::2], blocks[:, :, :, 1::2]
    top = jnp.concatenate([a, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, b], axis=-1)], axis=-2)


@jax.jit
def _convolve(
    x: jax.Array,  # [B, T, D]
    weight: jax.Array,  # [W, D]
    bias: jax.Array | None,  # [D]
    segments: jax.Array | None,  # i32[B, T]
    valid: jax.Array | None,  # bool[B, T]
    state: jax.Array | None,  # [B, W - 1, D]
) -> tuple[jax.Array, jax.Array]:  # [B, T, D] and [B, W - 1, D]
    (B, T, D), W = x.shape, weight.shape[0]
    wide = np.promote_types(x.dtype, np.float32)
    if state is None:
        state = jnp.zeros((B, W - 1, D), x.dtype)
    if T == 0:
        return x, state
    document = None
    if segments is not None:
        document = jnp.cumsum(_restarts(segments, valid), axis=1, dtype=jnp.int32)[..., None]
    count = jnp.full((B, 1, 1), T, jnp.int32)
    if valid is not None:  # move the valid tokens to the front, in order
        order = jnp.argsort(~valid, axis=1, stable=True)[..., None]
        x = jnp.take_along_axis(_zero_padding(x, valid), order, axis=1)
        document = document if document is None else jnp.take_along_axis(document, order, axis=1)
        count = jnp.sum(valid, axis=1, dtype=jnp.int32)[:, None, None]
    history = jnp.concatenate([state, x], axis=1)
    at_end = count + jnp.arange(W - 1, dtype=jnp.int32)[None, :, None]
    state = jnp.take_along_axis(history, at_end, axis=1)
    if document is not None:  # the initial state belongs to the first document
        document = jnp.pad(document, ((0, 0), (W - 1, 0), (0, 0)))
        last = jnp.take_along_axis(document, count + W - 2, axis=1) if W > 1 else document[:, :0]
        same = jnp.take_along_axis(document, at_end, axis=1) == last
        state = jnp.where(same, state, jnp.zeros_like(state))
    out = jnp.zeros((B, T, D), wide)
    for w in range(W):
        window = history[:, w : w + T].astype(wide) * weight[None, None, w].astype(wide)
        if document is not None:
            same = document[:, w : w + T] == document[:, W - 1 :]
            window = jnp.where(same, window, jnp.zeros_like(window))
        out = out + window
    if bias is not None:
        out = out + bias[None, None].astype(wide)
    if valid is not None:
        at = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)[..., None]
        out = _zero_padding(jnp.take_along_axis(out, at, axis=1), valid)
    return out.astype(x.dtype), state
