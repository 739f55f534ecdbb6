"""Multi-head latent attention, whose heads share one small vector per key.

DeepSeek-AI 2024 (DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language
model), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Unpack, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.arguments import DTYPES, Options
from transformer_jax.attention.reference import einsum
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import are_concrete

Form = Literal["expanded", "absorbed"]

OPTIONS = frozenset(Options.__annotations__) - {"key_scale", "value_scale", "block_table"}
"""Options of `dot_product_attention` that latent attention supports."""


def latent_attention(
    query: jax.Array,  # [B, T, N, H + R]
    latent: jax.Array,  # [B, S, C]
    rotated_key: jax.Array,  # [B, S, R]
    key_kernel: jax.Array,  # [C, N, H]
    value_kernel: jax.Array,  # [C, N, Hv]
    *,
    form: Form | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], or with lse [B, T, N]
    """Return attention over keys and values that are linear functions of a latent vector.

    With c_j the latent of key j, and r_j its rotated key, which all heads share, head n attends to

        k_j = [key_kernel[:, n]^T c_j, r_j]        v_j = value_kernel[:, n]^T c_j

    The first H entries of a query are not rotated. The last R entries are rotated by the position
    of the query before the call, and `rotated_key` by the position of the key.

    A cache stores only C + R numbers per key. The expanded form computes all keys and values. The
    absorbed form multiplies each query by `key_kernel`, attends to the latents themselves with a
    single key head of width C + R and values of width C, and multiplies the result by
    `value_kernel`. Both compute the same function.

    Args:
        query: [B, T, N, H + R], in bfloat16, float16, float32 or float64.
        latent: [B, S, C], the normalized latent vectors, in the query's dtype.
        rotated_key: [B, S, R], in the query's dtype; R may be 0.
        key_kernel: [C, N, H], in the query's dtype.
        value_kernel: [C, N, Hv], in the query's dtype.
        form: "expanded" or "absorbed". None chooses the form with fewer multiplications, which is
            "absorbed" for few queries.
        return_lse: as in `dot_product_attention`.
        implementation: as in `dot_product_attention`.
        **options: mask, bias, scale and the other options of `dot_product_attention`, except those
            for int8 and pages. The default scale is 1 / sqrt(H + R) in both forms.

    Returns:
        The output [B, T, N, Hv] in the query's dtype. With `return_lse`, the function also returns
        lse [B, T, N] in float32, or in float64 if the query is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
        NotImplementedError: If none of the named implementations supports the arguments.
    """
    if unknown := {name: x for name, x in options.items() if name not in OPTIONS}:
        refuse_keywords(latent_attention, unknown, OPTIONS)
    query, latent, rotated_key, key_kernel, value_kernel = map(
        jnp.asarray, (query, latent, rotated_key, key_kernel, value_kernel)
    )
    _check(query, latent, rotated_key, key_kernel, value_kernel, form)
    (_, T, _, width), (_, S, C), H = query.shape, latent.shape, key_kernel.shape[2]
    R, Hv = width - H, value_kernel.shape[2]
    rest: Any = dict(options, return_lse=return_lse, implementation=implementation)
    if options.get("scale") is None:  # the default depends on the width of the keys
        rest["scale"] = 1 / math.sqrt(width)
    if form is None and not are_concrete(T, S):
        form = "absorbed"  # an export for any length
    elif form is None:
        kernels = C * (H + Hv)
        expanded = S * kernels + T * S * (width + Hv)
        absorbed = T * kernels + T * S * (2 * C + R)
        form = "expanded" if expanded <= absorbed else "absorbed"
    if form == "expanded":
        lead = partial(split, latent, slice(2))
        key, value = (
            _product("BSC,CNH->BSNH", latent, kernel, lead(split(kernel, slice(1, None))))
            for kernel in (key_kernel, value_kernel)
        )

        def with_rotated(key: jax.Array, rotated: jax.Array) -> jax.Array:
            shared = jnp.broadcast_to(rotated[:, :, None], (*key.shape[:3], R))
            return jnp.concatenate([key, shared], axis=-1)

        key = by_compiler(with_rotated, [key, rotated_key], split(key))
        return dot_product_attention(query, key, value, **rest)
    absorbed_query = _product("BTNH,CNH->BTNC", query[..., :H], key_kernel, split(query))
    found = dot_product_attention(
        jnp.concatenate([absorbed_query, query[..., H:]], axis=-1),
        jnp.concatenate([latent, rotated_key], axis=-1)[:, :, None],
        latent[:, :, None],
        **rest,
    )
    average, *lse = found if return_lse else (found,)
    out = _product("BTNC,CNV->BTNV", average, value_kernel, split(query))
    return (out, lse[0]) if return_lse else out


def _product(spec: str, x: jax.Array, kernel: jax.Array, result: PartitionSpec) -> jax.Array:
    """Return an einsum in the dtype of x, which explicit mesh axes split as `result`."""
    multiply = lambda x, kernel: einsum(spec, x, kernel).astype(x.dtype)  # noqa: E731
    return by_compiler(multiply, [x, kernel], result)


def _check(
    query: jax.Array,
    latent: jax.Array,
    rotated_key: jax.Array,
    key_kernel: jax.Array,
    value_kernel: jax.Array,
    form: Form | None,
) -> None:
    """Raise ValueError unless the arrays match."""
    if form not in (None, *get_args(Form)):
        names = ", ".join(map(repr, get_args(Form)))
        raise ValueError(f"form is {form!r}: must be one of {names}, or None")
    for name, x, axes in (
        ("query", query, "[B, T, N, H + R]"), ("latent", latent, "[B, S, C]"),
        ("key_kernel", key_kernel, "[C, N, H]"), ("value_kernel", value_kernel, "[C, N, Hv]"),
    ):  # fmt: skip
        if x.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {x.shape}: must be {axes}")
    B, _, N, width = query.shape
    S, C, H = *latent.shape[1:], key_kernel.shape[2]
    if not 0 < H <= width:
        rule = f"the last axis must be from 1 to {width}, the width of the query"
        raise ValueError(f"key_kernel has shape {key_kernel.shape}: {rule}")
    wanted = (
        ("latent", latent, (B, S, C)),
        ("rotated_key", rotated_key, (B, S, width - H)),
        ("key_kernel", key_kernel, (C, N, H)),
        ("value_kernel", value_kernel, (C, N, *value_kernel.shape[2:])),
    )
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}: must be one of {', '.join(DTYPES.values())}")
    for name, x, shape in wanted:
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: must be {shape}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} is {x.dtype}: must be {query.dtype}, like query")
