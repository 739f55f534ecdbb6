"""Attention for recurrent decoders: the additive, general and dot forms.

Sources: Bahdanau et al. 2015 (additive), Luong et al. 2015 (general, dot).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.attention.arguments import AttentionCall, check_states
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.reference import Xla, clean, einsum, reference_weights, softmax


def additive_attention(
    query: jax.Array,  # [B, T, Dq]
    keys: jax.Array,  # [B, S, Dk]
    values: jax.Array,  # [B, S, Dv]
    *,
    w_query: jax.Array,  # [Dq, A]
    w_key: jax.Array | None,  # [Dk, A]
    v: jax.Array,  # [A]
    mask: Mask | None = None,
) -> tuple[jax.Array, jax.Array]:  # context [B, T, Dv], weights f32[B, T, S]
    """Return softmax_s(v . tanh(query w_query + keys w_key)) values, and the softmax weights.

    Bahdanau et al. 2015, A.1.2. The hidden layer [B, T, S, A] is materialized. In the paper's
    recurrent decoders, T is 1.

    Args:
        query: [B, T, Dq].
        keys: [B, S, Dk], or [B, S, A] if already multiplied by `w_key`.
        values: [B, S, Dv].
        w_query: [Dq, A].
        w_key: [Dk, A]; None if the keys are already [B, S, A].
        v: [A].
        mask: the keys that each query sees; None means all.

    Returns:
        The context [B, T, Dv] in the query's dtype, and the weights f32[B, T, S].

    Raises:
        ValueError: If the shapes do not match.
    """
    check_states("keys", query, keys, values, mask)
    hidden, key_shape = v.shape[-1:], keys.shape[2:] if w_key is None else w_key.shape
    wanted = hidden if w_key is None else (keys.shape[2], *hidden)
    if (w_query.shape, key_shape, v.shape) != ((query.shape[2], *hidden), wanted, hidden):
        shown = f"keys {keys.shape}" if w_key is None else f"w_key {w_key.shape}"
        key_rule = "[B, S, A]" if w_key is None else f"[{keys.shape[2]}, A]"
        raise ValueError(
            f"shapes are w_query {w_query.shape}, {shown}, v {v.shape}: must be "
            f"[{query.shape[2]}, A], {key_rule}, [A]"
        )
    # add an axis for a single head, to reuse the softmax and the NaN handling of the reference
    heads = [x[:, :, None] for x in (query, keys, values)]
    call = AttentionCall(query=heads[0], key=heads[1], value=heads[2], mask=mask)
    visible = None if mask is None else mask.allows(*call.positions())
    q, k, heads_values, nonfinite = clean(visible, *heads)
    q = einsum("BTND,DA->BTNA", q, w_query)
    k = k if w_key is None else einsum("BSND,DA->BSNA", k, w_key)
    hidden_layer = jnp.tanh(q[:, :, None] + k[:, None])[:, :, :, 0]
    scores = einsum("BTSA,A->BTS", hidden_layer, v.astype(hidden_layer.dtype))
    result = softmax(scores[:, None], visible, nonfinite)
    context = result.average(heads_values)[:, :, 0].astype(query.dtype)
    return context, result.weights[:, 0]


def state_attention(
    query: jax.Array,  # [B, T, Dq]
    states: jax.Array,  # [B, S, Dk]
    *,
    w: jax.Array | None = None,  # [Dq, Dk]
    scale: float = 1.0,
    mask: Mask | None = None,
) -> tuple[jax.Array, jax.Array]:  # context [B, T, Dk], weights f32[B, T, S]
    """Return softmax_s(scale query w states) states, and the softmax weights.

    Luong et al. 2015, section 3.1.

    Args:
        query: [B, T, Dq].
        states: [B, S, Dk].
        w: [Dq, Dk] for "general" attention; None for "dot", which requires Dq = Dk.
        scale: factor for the scores.
        mask: the states that each query sees; None means all.

    Returns:
        The context [B, T, Dk], and the weights f32[B, T, S].

    Raises:
        ValueError: If the shapes do not match.
    """
    check_states("states", query, states, states, mask)
    width = query.shape[2] if w is None else w.shape
    wanted = states.shape[2] if w is None else (query.shape[2], states.shape[2])
    if width != wanted:
        raise ValueError(f"{'query' if w is None else 'w'} has width {width}: must be {wanted}")
    if w is not None:
        query = einsum("BTD,DE->BTE", query, w).astype(query.dtype)
    heads = states[:, :, None]
    call = AttentionCall(query=query[:, :, None], key=heads, value=heads, mask=mask, scale=scale)
    return Xla().attend(call)[0][:, :, 0], reference_weights(call)[:, 0]
