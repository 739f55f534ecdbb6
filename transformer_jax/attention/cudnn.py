"""Attention with cuDNN, called through `jax.nn`, for arguments that it handles correctly."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.attention.arguments import AttentionCall, Implementation
from transformer_jax.attention.masks import Mask, causal_window
from transformer_jax.attention.reference import finite_rows


class Cudnn(Implementation):
    """cuDNN implementation that rejects arguments that cuDNN would ignore or handle incorrectly."""

    def refuse(self, call: AttentionCall) -> str | None:
        """Return the reason why cuDNN does not support a call, or None."""
        query, value, mask = call.query, call.value, call.mask
        B, T, _, S = call.sizes
        H, Hv = query.shape[3], value.shape[3]
        if jax.default_backend() not in ("gpu", "cuda"):
            return f"needs an NVIDIA GPU; the backend is {jax.default_backend()}"
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if capability is None or float(capability) < 8.0:
            return f"needs compute capability 8.0, but the device has {capability}"
        if str(query.dtype) not in ("bfloat16", "float16"):
            return f"needs bfloat16 or float16, but the inputs are {query.dtype}"
        widest = 256 if float(capability) >= 9.0 else 128
        if H != Hv or H % 8 or H > widest:
            rule = f"keys and values of one width, a multiple of 8 up to {widest}"
            return f"needs {rule}, not {H} and {Hv}"
        if 0 in (B, T, S):
            return f"an axis is empty (B is {B}, T is {T}, S is {S})"
        for name in ("bias", "sinks", "q_positions", "k_positions", "dropout_key"):
            if getattr(call, name) is not None:
                return f"does not support {name}"
        if call.scale_array is not None:
            return "does not support an array as scale, only a number"
        if call.softcap is not None:
            return "does not support softcap"
        if call.return_lse:
            return "returns lse in the inputs' dtype and without a gradient"
        if mask is not None and _causal_window(mask) is None:
            return f"supports only Causal() and Causal() & Window(left), but the mask is {mask!r}"
        if mask is not None and T != S:
            return f"needs T equal to S with a mask, but T is {T} and S is {S}"
        return None

    def attend(self, call: AttentionCall) -> tuple[jax.Array, None]:  # [B, T, N, H]
        """Return cuDNN's output, set to NaN for queries that see a row with NaN or inf."""
        query, key, value, causal = call.query, call.key, call.value, call.mask is not None
        (left,) = (None,) if call.mask is None else _causal_window(call.mask) or (None,)
        # drop a window that is as long as the keys: it hides no key and may not fit in int32
        left = None if left is None or left >= key.shape[1] else left
        good_query = finite_rows(query)
        good_key = finite_rows(key) & finite_rows(value)  # [B, S, K]
        query = jnp.where(good_query[..., None], query, 0)
        key, value = (jnp.where(good_key[..., None], x, 0) for x in (key, value))
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=call.scale,
            is_causal=causal,
            # `Window(left)` counts the query itself, but jax.nn does not
            local_window_size=None if left is None else (left - 1, 0),
            implementation="cudnn",
        )
        if causal:
            bad = jnp.cumsum(~good_key, axis=1)  # the number of bad keys up to each position
            if left is not None:
                bad = bad - jnp.pad(bad, ((0, 0), (left, 0), (0, 0)))[:, : bad.shape[1]]
        else:
            bad = (~good_key).any(axis=1, keepdims=True)
        bad = jnp.repeat(bad > 0, query.shape[2] // key.shape[2], axis=2) | ~good_query
        return jnp.where(bad[..., None], jnp.nan, out), None


def _causal_window(mask: Mask) -> tuple[int | None] | None:
    """Return (left,) for Causal() & Window(left), (None,) for Causal(), else None."""
    causal, left = causal_window(mask) or (False, None)
    return (left,) if causal else None
