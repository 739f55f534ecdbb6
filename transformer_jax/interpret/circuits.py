"""Singular value decomposition of the QK and OV circuits of attention heads.

A head reads the stream x through two low-rank matrices. Its scores are a bilinear form of two
tokens, and its output is linear in the tokens that it attends to:

    QK   W_Q W_K^T   scores(t, s) = x_t W_Q W_K^T x_s^T
    OV   W_V W_O     out(t) = sum_s A(t, s) x_s W_V W_O

Sources: Elhage et al. 2021, "A mathematical framework for transformer circuits"; Millidge & Black
2022, "The singular value decompositions of transformer weight matrices are highly interpretable".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.interpret.models import Transformer, check_model
from transformer_jax.models.adapters import AdaptedKernel, product
from transformer_jax.models.quantized import QuantizedKernel
from transformer_jax.models.stack import unstack_layers
from transformer_jax.pytree import Params
from transformer_jax.values import short_repr

Branch = Literal["attention", "cross_attention", "encoder/attention"]


@short_repr
class Circuits(NamedTuple):
    """Singular value decomposition of one circuit of every head: M = U diag(s) V^T."""

    left: jax.Array
    """f32[L, N, D, R]: U, the directions of the query token (QK) or of the input (OV)."""
    values: jax.Array
    """f32[L, N, R]: s, in descending order."""
    right: jax.Array
    """f32[L, N, D, R]: V, the directions of the key token (QK) or of the output (OV)."""


def circuits(
    model: Transformer,
    params: Params,
    circuit: Literal["qk", "ov"],
    *,
    count: int | None = None,
    fold_norm: bool = False,
    branch: Branch = "attention",
) -> Circuits:
    """Return the singular values and directions of one circuit of every head.

    M_qk = W_Q W_K^T and M_ov = W_V W_O, both [D, D], for query head n and key/value head n // G.
    Positions, biases and the score scale are not included. With rotary positions, M_qk applies to
    two tokens at the same position.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose decoder is used.
        params: the parameters of the model, with a looped or a scanned stack.
        circuit: "qk" or "ov".
        count: R, the number of singular values to return, largest first; None returns all min(D, H)
            of them.
        fold_norm: whether to multiply the input kernels by the scale of the preceding norm,
            diag(scale) W, and also center them if it is a LayerNorm. M then applies to the
            normalized stream.
        branch: "attention", or for an encoder-decoder also "encoder/attention" or
            "cross_attention", whose keys and values come from the output of the encoder.

    Returns:
        U, s and V. The sign of each pair of directions is arbitrary.

    Raises:
        ValueError: if the model does not have the branch, if `count` is not in 1..min(D, H), if the
            queries are normalized (`qk_norm`), if heads are multiplied by a gate
            (`attention_gate`), or if there is no norm to fold in.
    """
    check_model("circuits", model, {})
    cfg = model.config
    if not cfg.is_uniform:
        raise ValueError(f"mixers is {cfg.mixers}: circuits need attention in every layer")
    if circuit not in ("qk", "ov"):
        raise ValueError(f"circuit is {circuit!r}: must be 'qk' or 'ov'")
    branches = ["attention"]
    if cfg.kind == "encoder-decoder":
        branches += ["cross_attention", "encoder/attention"]
    if branch not in branches:
        raise ValueError(f"branch is {branch!r}: must be {' or '.join(map(repr, branches))}")
    if circuit == "qk" and cfg.qk_norm:
        raise ValueError(
            "circuit is 'qk', which is not linear in the stream, because qk_norm is True"
        )
    if circuit == "ov" and cfg.attention_gate:
        raise ValueError(
            "circuit is 'ov', which is not linear in the stream, because attention_gate is True"
        )
    if fold_norm and (cfg.norm is None or cfg.norm_order in ("post", "output")):
        rule = f"norm is {cfg.norm!r}, norm_order is {cfg.norm_order!r}"
        raise ValueError(f"fold_norm is True, but attention has no norm before it ({rule})")
    if fold_norm and branch == "cross_attention":
        raise ValueError("fold_norm is not supported for cross_attention, which reads two streams")
    width = cfg.key_dim if circuit == "qk" else cfg.value_dim
    rank = min(cfg.d_model, width)
    if count is not None and not 1 <= count <= rank:
        raise ValueError(f"count is {count}: must be from 1 to {rank}")

    side = "encoder" if cfg.kind == "encoder" or branch == "encoder/attention" else "decoder"
    depth = cfg.decoder_layers if side == "decoder" else cfg.num_layers
    blocks = unstack_layers(params[side])
    name = branch.removeprefix("encoder/")
    left_name, right_name = ("query", "key") if circuit == "qk" else ("value", "out")
    first, second = [], []
    for i in range(depth):
        block = blocks["block_0" if cfg.share_layers else f"block_{i}"]
        a = _dense(block[name][left_name]["kernel"], 1)  # [D, N or K, H]
        b = _dense(block[name][right_name]["kernel"], 2 if circuit == "ov" else 1)
        b = b.transpose(2, 0, 1) if circuit == "ov" else b  # [D, N or K, H]
        if fold_norm:
            norm = block["norm" if cfg.norm_order == "parallel_shared" else f"norm_{name}"]
            a = _fold(cfg, norm, a)
            b = _fold(cfg, norm, b) if circuit == "qk" else b
        first.append(_expand_heads(a, cfg.num_heads))
        second.append(_expand_heads(b, cfg.num_heads))

    # M = A B^T = Q_a (R_a R_b^T) Q_b^T has rank at most H, so an SVD of [H, H] instead of [D, D]
    # suffices
    (qa, ra), (qb, rb) = (jnp.linalg.qr(jnp.stack(x)) for x in (first, second))
    # by default, accelerators multiply with reduced precision
    inner = jnp.einsum("LNRH,LNQH->LNRQ", ra, rb, precision="highest")
    u, s, vt = jnp.linalg.svd(inner)
    left = jnp.einsum("LNDR,LNRQ->LNDQ", qa, u, precision="highest")
    right = jnp.einsum("LNDR,LNQR->LNDQ", qb, vt, precision="highest")
    return Circuits(left[..., :count], s[..., :count], right[..., :count])


def _expand_heads(x: jax.Array, heads: int) -> jax.Array:  # [D, K, H] -> [N, D, H]
    return jnp.repeat(x, heads // x.shape[1], axis=1).swapaxes(0, 1)


def _fold(cfg: ModelConfig, norm: Mapping[str, jax.Array], kernel: jax.Array) -> jax.Array:
    """Return diag(scale) W, [D, N, H], which is centered if the norm subtracts the mean."""
    scale = norm["scale"].astype(jnp.float32) + (1.0 if cfg.norm_unit_offset else 0.0)
    kernel = kernel * scale[:, None, None]
    return kernel - kernel.mean(axis=0, keepdims=True) if cfg.norm == "layernorm" else kernel


def _dense(kernel: jax.Array | QuantizedKernel | AdaptedKernel, contract: int) -> jax.Array:
    """Convert a kernel to one dense array, f32[*inputs, *outputs], which includes its adapters."""
    if not isinstance(kernel, AdaptedKernel):
        return jnp.asarray(kernel.astype(jnp.float32))
    inputs = kernel.shape[:contract]
    # the layer maps the rows of the identity to the rows of the dense matrix
    identity = jnp.eye(prod(inputs), dtype=jnp.float32).reshape(-1, *inputs)
    return product(identity, kernel, None, contract, None, "").reshape(kernel.shape)
