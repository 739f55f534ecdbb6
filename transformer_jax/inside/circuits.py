"""Take the two circuits of each head apart by their singular values.

A head does two things with the stream x, each by one matrix of low rank: its scores are a bilinear
form of two tokens, and what it writes is linear in the token that it attends to.

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
from transformer_jax.inside.models import Transformer, check_model
from transformer_jax.models.adapters import AdaptedKernel, product
from transformer_jax.models.quantized import QuantizedKernel
from transformer_jax.models.stack import unstack_layers
from transformer_jax.pytree import Params
from transformer_jax.values import short_repr

Branch = Literal["attention", "cross_attention", "encoder/attention"]


@short_repr
class Circuits(NamedTuple):
    """Hold the singular value decomposition of a circuit of every head: M = U diag(s) V^T."""

    left: jax.Array
    """f32[L, N, D, R]: U, directions that the query's token has (QK), or that are read (OV)."""
    values: jax.Array
    """f32[L, N, R]: s, the largest first."""
    right: jax.Array
    """f32[L, N, D, R]: V, directions that the key's token has (QK), or that are written (OV)."""


def circuits(
    model: Transformer,
    params: Params,
    circuit: Literal["qk", "ov"],
    *,
    count: int | None = None,
    fold_norm: bool = False,
    branch: Branch = "attention",
) -> Circuits:
    """Return the singular values and directions of the circuit of every head.

    M_qk = W_Q W_K^T and M_ov = W_V W_O, [D, D], of query head n, with key and value head n // G.
    They are without positions, biases and the scale of scores; rotated scores have M_qk between
    tokens at one place. M has rank H: its decomposition is that of two QR factors, of size H.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose decoder is read.
        params: its parameters, looped or scanned.
        circuit: "qk" or "ov".
        count: the largest R are returned; None is all that can differ from 0, min(D, H).
        fold_norm: multiply what reads the stream by the weights of the norm before it: diag(scale)
            W, centred where it is a LayerNorm, so that M is of the stream divided by its size.
        branch: "attention", or of an encoder-decoder "cross_attention", whose keys and values are
            of an encoder's output, or "encoder/attention".

    Returns:
        U, s and V. The sign of a pair of directions says nothing.

    Raises:
        ValueError: if the model has no such branch, `count` is not in 1..min(D, H), queries are
            normalised (`qk_norm`), or there is no norm to fold in.
    """
    check_model("circuits", model, {})
    cfg = model.config
    if circuit not in ("qk", "ov"):
        raise ValueError(f"circuit is {circuit!r}: must be 'qk' or 'ov'")
    known = ["attention"]
    if cfg.kind == "encoder-decoder":
        known += ["cross_attention", "encoder/attention"]
    if branch not in known:
        raise ValueError(f"branch is {branch!r}: must be {' or '.join(map(repr, known))}")
    if circuit == "qk" and cfg.qk_norm:
        raise ValueError("circuit is 'qk': qk_norm divides queries and keys by their own sizes")
    if fold_norm and (cfg.norm is None or cfg.norm_order in ("post", "output")):
        rule = f"norm is {cfg.norm!r}, norm_order {cfg.norm_order!r}"
        raise ValueError(f"fold_norm: attention reads the stream without a norm ({rule})")
    if fold_norm and branch == "cross_attention":
        raise ValueError("fold_norm of cross_attention: it reads two streams")
    width = cfg.key_dim if circuit == "qk" else cfg.value_dim
    rank = min(cfg.d_model, width)
    if count is not None and not 1 <= count <= rank:
        raise ValueError(f"count is {count}: must be in 1..{rank}")

    side = "encoder" if cfg.kind == "encoder" or branch == "encoder/attention" else "decoder"
    depth = cfg.decoder_layers if side == "decoder" else cfg.num_layers
    blocks = unstack_layers(params[side])
    name = branch.removeprefix("encoder/")
    reads, writes = ("query", "key") if circuit == "qk" else ("value", "out")
    first, second = [], []
    for i in range(depth):
        block = blocks["block_0" if cfg.share_layers else f"block_{i}"]
        a = _dense(block[name][reads]["kernel"], 1)  # [D, N or K, H]
        b = _dense(block[name][writes]["kernel"], 2 if writes == "out" else 1)
        b = b.transpose(2, 0, 1) if writes == "out" else b  # [D, N or K, H]
        if fold_norm:
            norm = block["norm" if cfg.norm_order == "parallel_shared" else f"norm_{name}"]
            a = _folded(cfg, norm, a)
            b = _folded(cfg, norm, b) if circuit == "qk" else b
        first.append(_of_each_head(a, cfg.num_heads))
        second.append(_of_each_head(b, cfg.num_heads))

    # M = A B^T = Q_a (R_a R_b^T) Q_b^T
    (qa, ra), (qb, rb) = (jnp.linalg.qr(jnp.stack(x)) for x in (first, second))
    inner = jnp.einsum("LNRH,LNQH->LNRQ", ra, rb, precision="highest")
    u, s, vt = jnp.linalg.svd(inner)
    left = jnp.einsum("LNDR,LNRQ->LNDQ", qa, u, precision="highest")
    right = jnp.einsum("LNDR,LNQR->LNDQ", qb, vt, precision="highest")
    return Circuits(left[..., :count], s[..., :count], right[..., :count])


def _of_each_head(x: jax.Array, heads: int) -> jax.Array:  # [D, K, H] -> [N, D, H]
    return jnp.repeat(x, heads // x.shape[1], axis=1).swapaxes(0, 1)


def _folded(cfg: ModelConfig, norm: Mapping[str, jax.Array], kernel: jax.Array) -> jax.Array:
    """Return diag(scale) W, centred where the norm takes the mean away: [D, N, H]."""
    scale = norm["scale"].astype(jnp.float32) + (1.0 if cfg.norm_unit_offset else 0.0)
    kernel = kernel * scale[:, None, None]
    return kernel - kernel.mean(axis=0, keepdims=True) if cfg.norm == "layernorm" else kernel


def _dense(kernel: jax.Array | QuantizedKernel | AdaptedKernel, contract: int) -> jax.Array:
    """Return a kernel as one array, f32[*inputs, *outputs], with its adapters added."""
    if not isinstance(kernel, AdaptedKernel):
        return jnp.asarray(kernel.astype(jnp.float32))
    inputs = kernel.shape[:contract]
    each = jnp.eye(prod(inputs), dtype=jnp.float32).reshape(-1, *inputs)
    return product(each, kernel, None, contract, None, "").reshape(kernel.shape)
