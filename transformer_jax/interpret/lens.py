"""Logit lens and direct logit attribution.

In a pre-norm model, the last stream x is the sum of the outputs of the model's parts. A logit is
linear in x if the divisor of the final norm is treated as a constant:

    x = embedding + sum_l (sum_n heads_ln W_ln + b_l) + sum_l feed_forward_l
    logit_v = <n(x), E_v> + c_v

Sources: nostalgebraist 2020, "interpreting GPT: the logit lens"; Elhage et al. 2021, "A
mathematical framework for transformer circuits"; Wang et al. 2023 (arXiv:2211.00593), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.interpret.models import Transformer, check_model, refuse_edits, run
from transformer_jax.models import ops
from transformer_jax.models.adapters import product
from transformer_jax.models.arguments import check_tokens
from transformer_jax.models.quantized import QuantizedTable
from transformer_jax.models.transformer import Encoder
from transformer_jax.pytree import Params
from transformer_jax.values import short_repr


def logit_lens(
    model: Transformer,
    params: Params,
    tokens: jax.Array,  # i32[B, T]
    **arguments: Any,
) -> jax.Array:  # f32[B, L + 1, T, V]
    """Return the logits that the model would compute if it ended after each block.

    logits_l = n(x_l) E^T + c, where n is the final norm, x_0 is the embedding and x_l is the output
    of block l - 1 (nostalgebraist 2020). A post-norm model has no final norm, because its streams
    are already normalized. The last entry contains the model's own logits.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder, whose decoder is used.
        params: the parameters of the model, with a looped or a scanned stack.
        tokens: i32[B, T].
        **arguments: other arguments of `model.apply`, such as `positions` or `source`.

    Returns:
        The logits, f32[B, L + 1, T, V], starting with those of the embedding.

    Raises:
        ValueError: if the model has no logits, or if it edits `final_norm` or `logits`.
    """
    check_model("logit_lens", model, arguments, "capture")
    refuse_edits("logit_lens", model, "final_norm", "logits")
    return read_out(model, params, streams_of(model, params, arguments, tokens))


def streams_of(
    model: Transformer,
    params: Params,
    arguments: Mapping[str, Any],
    tokens: jax.Array,  # i32[B, T]
) -> jax.Array:  # [B, L + 1, T, D]
    """Return the embedding and the output of each block."""
    names = ("embedding", *(f"block_{i}/residual" for i in range(model.config.decoder_layers)))
    captured = run(model, params, arguments, tokens, capture=names)[1]
    return jnp.stack([captured[name] for name in names], axis=1)


def read_out(
    model: Transformer,
    params: Params,
    streams: jax.Array,  # [B, L, T, D]
) -> jax.Array:  # f32[B, L, T, V]
    """Apply the model's final norm and output layer to each stream."""

    def output(model: Transformer, x: jax.Array) -> jax.Array:  # [B, n, D] -> f32[B, n, V]
        stack = model.encoder if isinstance(model, Encoder) else model.decoder
        x = x if model.config.norm_order == "post" else stack.norm(x)
        if isinstance(model, Encoder) and model.config.masked_token_head:
            x = model.head_transform(x)
        return model.embed.logits(x)

    B, L, T, D = streams.shape
    # the norm and the output layer process each vector separately, so T may include the layers
    logits = model.apply({"params": params}, streams.reshape(B, L * T, D), method=output)
    assert isinstance(logits, jax.Array)
    return logits.reshape(B, L, T, -1)


@short_repr
class LogitAttribution(NamedTuple):
    """Contributions of the parts of a model to a logit or to the difference between two logits."""

    embedding: jax.Array
    """f32[B, T]: contribution of the input of the first block."""
    heads: jax.Array
    """f32[B, L, N, T]: contribution of each self-attention head, without the bias of the output
    matrix."""
    feed_forward: jax.Array | None
    """f32[B, L, T]: contribution of each feed-forward branch, including its last bias. None if
    there are no feed-forward branches."""
    bias: jax.Array
    """f32[B, T]: contribution of the biases of the attention output matrices, the final norm and
    the logits."""
    cross_heads: jax.Array | None = None
    """f32[B, L, N, T]: contribution of each cross-attention head of an encoder-decoder."""

    def total(self) -> jax.Array:  # f32[B, T]
        """Return the sum of all contributions, which is the logit or the difference of logits."""
        heads = self.heads.sum((1, 2))
        heads = heads if self.feed_forward is None else heads + self.feed_forward.sum(1)
        heads = heads if self.cross_heads is None else heads + self.cross_heads.sum((1, 2))
        return self.embedding + heads + self.bias


def why_not_additive(config: ModelConfig) -> str | None:
    """Return the reason why a logit is not the sum of contributions of parts, or None if it is."""
    if config.norm_order != "pre" and not config.is_parallel:
        rule = "only in pre-norm and parallel models is the last stream a sum of its parts"
        return f"norm_order is {config.norm_order!r}: {rule}"
    if config.logit_softcap is not None:
        rule = "a capped logit is not a sum; uncap it with replace(config, logit_softcap=None)"
        return f"logit_softcap is {config.logit_softcap}: {rule}"
    if config.residual_scale is not None:
        rule = "must be None, because it multiplies the output of each part"
        return f"residual_scale is {config.residual_scale}: {rule}"
    if config.masked_token_head:
        rule = "must be False, because the head applies an activation to the last stream"
        return f"masked_token_head is True: {rule}"
    if not config.is_uniform:
        return f"mixers is {config.mixers}: every layer must have attention"
    return None


def logit_attribution(
    model: Transformer,
    params: Params,
    tokens: jax.Array,  # i32[B, T]
    target: jax.Array | int,  # i32[], or broadcast to [B, T]
    other: jax.Array | int | None = None,  # i32[], or broadcast to [B, T]
    **arguments: Any,
) -> LogitAttribution:
    """Return the contribution of each part of the model to the logit of a token.

    This is direct logit attribution (Elhage et al. 2021; Wang et al. 2023, section 3.1). A part c
    of the last stream x contributes <(c - mean(c)) / sqrt(var(x) + eps) * scale, E_target -
    E_other>, multiplied by `logit_scale`. With an RMSNorm, it contributes <c / sqrt(mean(x^2) +
    eps) * scale, E_target - E_other>.

    Args:
        model: a pre-norm or parallel model whose logits are linear in the output of the final norm.
        params: the parameters of the model, with a looped or a scanned stack.
        tokens: i32[B, T].
        target: i32[], i32[T] or i32[B, T], the token whose logit is decomposed at each position.
        other: the token whose logit is subtracted, in the same shapes; None subtracts nothing.
        **arguments: other arguments of `model.apply`, such as `positions` or `source`.

    Returns:
        The contributions, which sum to the logit.

    Raises:
        ValueError: if the model is neither pre-norm nor parallel, if it has a `logit_softcap`, a
            `residual_scale`, a `masked_token_head` or a layer without attention, or if a token is
            not in the vocabulary.
    """
    check_model("logit_attribution", model, arguments, "capture")
    cfg = model.config
    if (why := why_not_additive(cfg)) is not None:
        raise ValueError(f"logit_attribution: {why}")
    depth, side = cfg.decoder_layers, "encoder" if cfg.kind == "encoder" else "decoder"
    refuse_edits(
        "logit_attribution", model, "final_norm", "logits",
        *(f"block_{i}/{name}" for i in range(depth) for name in ("residual", "residual_mid")),
        *(f"block_{i}/{b}/output" for i in range(depth) for b in ("attention", "cross_attention")),
    )  # fmt: skip

    branches = ["attention", *(["cross_attention"] if cfg.kind == "encoder-decoder" else [])]
    names = (
        "embedding", f"block_{depth - 1}/residual", *(f"block_*/{b}/heads" for b in branches),
        *(["block_*/feed_forward/output"] if cfg.ff_dim else []),
    )  # fmt: skip
    captured = run(model, params, arguments, tokens, capture=names)[1]
    found = {name: value.astype(jnp.float32) for name, value in captured.items()}

    embed, norm = params["embed"], params[side].get("norm", {})
    table = embed["tokens"] if cfg.tie_embeddings else embed["output"]
    ids = [jnp.asarray(x) for x in (target, other) if x is not None]
    ids = [jnp.broadcast_to(x.reshape((1,) * (2 - x.ndim) + x.shape), tokens.shape) for x in ids]
    for one in ids:
        check_tokens(one, cfg.vocab_size)

    def difference(rows: Any) -> jax.Array:
        """Return the row of the target, minus the row of the other token if there is one."""
        row = rows.look_up if isinstance(rows, QuantizedTable) else lambda i: ops.lookup(rows, i)
        first, *rest = (row(one).astype(jnp.float32) for one in ids)
        return first - rest[0] if rest else first

    d = difference(table) * (1.0 if cfg.logit_scale is None else cfg.logit_scale)  # [B, T, D]
    bias = jnp.zeros(tokens.shape, jnp.float32)
    if cfg.logit_bias:
        bias = bias + difference(embed["bias"][:, None])[..., 0]
    if "bias" in norm:
        bias = bias + d @ norm["bias"].astype(jnp.float32)
    if cfg.norm is not None:
        # the norm is x -> (x - mean) / divisor * scale; its transpose maps d to a stream direction
        x = found[f"block_{depth - 1}/residual"]
        scale = norm["scale"].astype(jnp.float32) + (1.0 if cfg.norm_unit_offset else 0.0)
        d = d * scale[None, None]
        if cfg.norm == "layernorm":
            x, d = (y - y.mean(axis=-1, keepdims=True) for y in (x, d))
        # treat the divisor as a constant; otherwise a logit would not be linear in the parts
        d = d * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + cfg.norm_eps)

    def along(part: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T]
        return (part * d).sum(axis=-1)

    attributed: dict[str, list[jax.Array]] = {branch: [] for branch in branches}
    for i in range(depth):
        for branch in branches:
            if cfg.scan_layers:
                stacked = params[side]["blocks"][branch]["out"]
                out = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            else:
                out = params[side]["block_0" if cfg.share_layers else f"block_{i}"][branch]["out"]
            heads = found[f"block_{i}/{branch}/heads"]  # [B, T, N, Hv]
            matrix = lambda h, out=out: product(h, out["kernel"], None, 2, None, "out")  # noqa: E731
            # <h W, d> = <h, d W^T>, so one product serves all heads; the transpose also works for
            # adapters
            back = jax.vjp(matrix, heads)[1](d)[0]
            attributed[branch].append((heads * back).sum(axis=-1).swapaxes(1, 2))
            if "bias" in out:
                bias = bias + d @ out["bias"].astype(jnp.float32)
    by_branch = {branch: jnp.stack(parts, axis=1) for branch, parts in attributed.items()}
    forward = None
    if cfg.ff_dim:
        outputs = [along(found[f"block_{i}/feed_forward/output"]) for i in range(depth)]
        forward = jnp.stack(outputs, axis=1)
    return LogitAttribution(
        along(found["embedding"]), by_branch["attention"], forward, bias,
        by_branch.get("cross_attention"),
    )  # fmt: skip
