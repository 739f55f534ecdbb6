"""Pytest plugin that replaces other libraries' attention with `dot_product_attention`.

`benchmarks.conformance.peer_suites` loads it in a subprocess. PEER_ADAPTER names the adapter that
replaces the library's attention function, and PEER_IMPLEMENTATION the implementation it calls. The
plugin appends one line of JSON per test to the file PEER_REPORT.

An adapter raises `NotImplementedError` for a feature that this library has no argument for. It
ignores `precision`, which changes nothing on a CPU.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import transformer_jax
from transformer_jax import Causal, Dense, Mask, Padding, Window

calls = 0  # of this library's function, in the current test


def attend(*arrays: jax.Array, **options: Any) -> Any:
    """Call the implementation under test, and count the call."""
    global calls
    calls += 1
    name = os.environ.get("PEER_IMPLEMENTATION") or None
    return transformer_jax.dot_product_attention(*arrays, implementation=name, **options)


def rows(array: jax.Array) -> jax.Array:
    """Return an array [..., T, N, H] with one batch axis, [B, T, N, H]."""
    return array.reshape(-1, *array.shape[-3:])


def pairs(array: jax.Array, lead: Sequence[int]) -> jax.Array:
    """Return a bias or a mask with one batch axis.

    Args:
        array: an array that broadcasts to [*lead, N, T, S].
        lead: batch axes of the query.
    """
    array = array.reshape((1,) * (len(lead) + 3 - array.ndim) + array.shape)
    if any(length != 1 for length in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*lead, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])


def both(masks: Sequence[Mask]) -> Mask | None:
    return functools.reduce(lambda a, b: a & b, masks) if masks else None


def jax_nn() -> None:
    """Replace `jax.nn.dot_product_attention`, except where a test asks for `implementation=None`.

    The tests of jax use `implementation=None` as the reference.
    """
    theirs = jax.nn.dot_product_attention

    def dot_product_attention(
        query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
        query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
        implementation="xla", return_residual=False,
    ):  # fmt: skip
        if implementation is None:
            return theirs(
                query, key, value, bias, mask, scale=scale, is_causal=is_causal,
                query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
                local_window_size=local_window_size, return_residual=return_residual,
            )  # fmt: skip
        shape = query.shape
        query, key, value = rows(query), rows(key), rows(value)
        T, S = query.shape[1], key.shape[1]
        masks: list[Mask] = [Causal()] if is_causal else []
        if local_window_size is not None:
            masks.append(Window(*(side + 1 for side in local_window_size)))
        if key_value_seq_lengths is not None:
            masks.append(Padding(jnp.arange(S)[None] < key_value_seq_lengths[:, None]))
        if query_seq_lengths is not None:
            inside = jnp.arange(T)[None] < query_seq_lengths[:, None]
            masks.append(Dense(inside[:, None, :, None]))
        if mask is not None:
            masks.append(Dense(pairs(mask, shape[:-3])))
        options = dict(mask=both(masks), bias=bias, scale=scale, return_lse=return_residual)
        found = attend(query, key, value, **options)
        if not return_residual:
            return found.reshape(shape)
        # jax.nn returns the logsumexp in the dtype of the key and without a gradient.
        lse = jax.lax.stop_gradient(found[1]).astype(key.dtype)
        return found[0].reshape(shape), lse.reshape(shape[:-1])

    jax.nn.dot_product_attention = dot_product_attention


def flax_attention(
    query, key, value, bias=None, mask=None, broadcast_dropout=True, dropout_rng=None,
    dropout_rate=0.0, deterministic=False, dtype=None, precision=None, module=None,
    force_fp32_for_softmax=False, einsum_dot_general=None, qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None, promote_dtype=None, is_causal=False,
):  # fmt: skip
    """Call this library with the arguments of flax, which flax.linen reads from the signature."""
    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        raise NotImplementedError("there is no argument for another einsum")
    dtype = dtype or jnp.result_type(query, key, value)
    lead = query.shape[:-3]
    query, key, value = (rows(array.astype(dtype)) for array in (query, key, value))
    masks: list[Mask] = [Causal()] if is_causal else []
    if mask is not None:
        masks.append(Dense(pairs(mask.astype(bool), lead)))
    options = dict(mask=both(masks), bias=None if bias is None else pairs(bias, lead))
    if module is not None:
        from flax import nnx

        weights = transformer_jax.dot_product_attention_weights(query, key, **options)
        collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
        module.sow(collection, "attention_weights", weights.reshape(*lead, *weights.shape[1:]))
    if dropout_rate and not deterministic:
        options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_rng)
        options |= dict(broadcast_dropout=broadcast_dropout)
    found = attend(query, key, value, **options)
    return found.reshape(*lead, *found.shape[1:])


def replace_default(function: Callable[..., Any], old: Any) -> None:
    """Replace the default `old` of an argument with `flax_attention`."""
    function = inspect.unwrap(function)
    swapped = tuple(flax_attention if one is old else one for one in function.__defaults__ or ())
    named = {k: flax_attention for k, v in (function.__kwdefaults__ or {}).items() if v is old}
    if swapped == (function.__defaults__ or ()) and not named:
        raise LookupError(f"{function.__qualname__}: no default is {old.__qualname__}")
    function.__defaults__ = swapped
    function.__kwdefaults__ = (function.__kwdefaults__ or {}) | named


def flax_linen() -> None:
    """Replace the function and the default of its layers."""
    from flax import linen

    theirs = linen.dot_product_attention
    for layer in (linen.MultiHeadDotProductAttention, linen.MultiHeadAttention):
        replace_default(layer.__init__, theirs)
    linen.dot_product_attention = linen.attention.dot_product_attention = flax_attention


def flax_nnx() -> None:
    """Replace the function and the default of its layer; flax.linen stays, as the reference."""
    from flax import nnx

    replace_default(nnx.MultiHeadAttention.__init__, nnx.dot_product_attention)
    nnx.dot_product_attention = flax_attention


def tokamax(
    q, k, v, *, precision=None, logits_dtype=None, logits_scale=None, bias=None,
    logits_soft_cap=None, mask=None, is_causal=False, dropout_mask=None, dropout_rate=0.0,
    q_indices=None, k_indices=None, normalize_output=True, return_residuals=False,
):  # fmt: skip
    """Call this library with the arguments of tokamax."""
    from tokamax._src.ops.attention import base

    if dropout_mask is not None:
        raise NotImplementedError("there is no argument for a mask of the dropout")
    if logits_dtype is not None:
        raise NotImplementedError("there is no argument for the dtype of the scores")
    if not normalize_output and not return_residuals:
        raise NotImplementedError("there is no output without normalization")
    if bias is not None and logits_soft_cap is not None:
        raise NotImplementedError("softcap is applied before the bias")
    options: dict[str, Any] = dict(scale=logits_scale, softcap=logits_soft_cap)
    q = q if isinstance(q, jax.Array) else dequantized(q)
    k, options["key_scale"] = quantized(k)
    v, options["value_scale"] = quantized(v)
    lead = q.shape[:-3]
    if mask is None and is_causal:
        options["mask"] = Causal()
        for name, indices in (("q_positions", q_indices), ("k_positions", k_indices)):
            if indices is not None:
                options[name] = indices[0]
    elif mask is not None or is_causal:
        mask = mask if isinstance(mask, base.Mask) else base.Mask(mask)
        mask = mask & base.CAUSAL_MASK if is_causal else mask
        queries = q.shape[-3] if q_indices is None else q_indices
        keys = k.shape[-3] if k_indices is None else k_indices
        options["mask"] = Dense(pairs(mask.as_array(queries, keys), lead))
    if bias is not None:
        options["bias"] = pairs(bias, lead)
    found, lse = attend(rows(q), rows(k), rows(v), return_lse=True, **options)
    found = found.reshape(*lead, *found.shape[1:])
    if not return_residuals:
        return found
    # The output is normalized, so the denominator is 1 if lse takes the place of the maximum.
    lse = lse.swapaxes(1, 2)
    lse = lse.reshape(*lead, *lse.shape[1:])
    return found, (lse, jnp.ones_like(lse))


def dequantized(array: Any) -> jax.Array:
    import qwix

    return qwix.dequantize(array)


def quantized(array: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the numbers of a possibly quantized array and their scales, [B, S, K]."""
    if isinstance(array, jax.Array):
        return array, None
    if array.scale.shape != (*array.qvalue.shape[:-1], 1) or array.qvalue.dtype != jnp.int8:
        raise NotImplementedError("scales of parts of a head are not supported")
    return array.qvalue, array.scale[..., 0]


ADAPTERS: dict[str, Callable[[], None]] = {
    "jax_nn": jax_nn, "flax_linen": flax_linen, "flax_nnx": flax_nnx, "none": lambda: None,
}  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    del config
    ADAPTERS[os.environ["PEER_ADAPTER"]]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    del item
    global calls
    calls = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    error = crash.message if crash else str(report.longrepr) if report.longrepr else ""
    line = dict(test=report.nodeid, outcome=report.outcome, error=error, calls=calls)
    with open(os.environ["PEER_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")
