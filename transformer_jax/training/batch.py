"""Batches of examples, and functions that compute a model's logits, loss, and scores on them.

All tasks except `preference` use the cross-entropy of the labels as their loss. Labels are next
tokens, masked tokens, target tokens, or classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.attention.ring import zigzag_chunks
from transformer_jax.config import AnyModelConfig, ConfigError
from transformer_jax.kernels import platform
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.experts import ROUTED, router_loss
from transformer_jax.models.factory import build
from transformer_jax.programs import program
from transformer_jax.pytree import Array, Leaf, Params, PyTree
from transformer_jax.sharding import by_compiler, split
from transformer_jax.training.data import IGNORE
from transformer_jax.training.losses import (
    chunked_cross_entropy,
    cross_entropy,
    label_scores,
    lengths_as_rows,
    token_losses,
)
from transformer_jax.values import value_class

Loss = Callable[..., tuple[jax.Array, jax.Array]]
"""`loss(params, batch, dropout_key, *frozen) -> (mean, weight)`. A key of None disables dropout."""


@value_class(pytree=True)
class Batch:
    """Model inputs and their labels. The leading axes of each leaf are [..., B].

    Unused fields are None. T is the row length, and S is the source length. A single example has no
    leading axes, so its tokens and labels have the shape [T].

    Attributes:
        tokens: i32[..., B, T]; for an image encoder, images f32[..., B, H, W, C].
        labels: i32[..., B, T]; for classes, i32[..., B]. IGNORE marks positions without a label.
        segments: i32[..., B, T], the document number of each token in a packed row; 0 marks
            padding.
        valid: bool[..., B, T], False for padding.
        prefix: bool[..., B, T], True for tokens that every token of the document can attend to.
        source: tokens i32[..., B, S], frames f32[..., B, S, D_in], or images f32[..., B, H, W, C].
        source_valid: bool[..., B, S], False for padding.
        positions: i32[..., B, T], the index of each token in its row, if the tokens, labels and
            `valid` are in another order than the row. Segments and prefixes belong to positions, so
            they are always in the order of the row.
    """

    tokens: Leaf  # i32[..., B, T], or f32[..., B, H, W, C]
    labels: Leaf  # i32[..., B, T] or [..., B]
    segments: Array | None = None  # i32[..., B, T]
    valid: Leaf = None  # bool[..., B, T]
    prefix: Leaf = None  # bool[..., B, T]
    source: Leaf = None  # i32[..., B, S], f32[..., B, S, D_in] or f32[..., B, H, W, C]
    source_valid: Leaf = None  # bool[..., B, S]
    positions: Leaf = None  # i32[..., B, T]

    def first(self) -> Batch:
        """Return the first micro-batch."""
        found: Batch = jax.tree.map(lambda leaf: leaf[0], self)
        return found


def along_context(prepare: Callable[..., Batch], balanced: int | None, *inputs: PyTree) -> Batch:
    """Prepare a batch, and split the tokens of its rows over the mesh axis "context".

    If the length of the rows is a multiple of twice the number of devices `balanced`, the tokens
    are put in zigzag order, so that each device has the same share of a causal mask.
    """
    batch = prepare(*inputs)
    rank, length = batch.tokens.ndim, batch.tokens.shape[-1]
    if balanced is not None and batch.labels.ndim == rank and length % (2 * balanced) == 0:
        chunks = zigzag_chunks(length, balanced)

        def in_order(x: jax.Array) -> jax.Array:
            # whole chunks are moved, because a gather of single tokens is slow
            parts = x.reshape(*x.shape[:-1], len(chunks), -1)
            return parts[..., chunks, :].reshape(x.shape)

        def moved(batch: Batch) -> Batch:
            index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), batch.tokens.shape)
            fields = dict(tokens=batch.tokens, labels=batch.labels, valid=batch.valid)
            return replace(batch, **jax.tree.map(in_order, fields | dict(positions=index)))

        specs = jax.tree.map(split, replace(batch, positions=batch.tokens))
        batch = by_compiler(moved, [batch], specs)

    def place(x: jax.Array) -> jax.Array:
        if x.ndim < rank:  # one label for each row
            return x
        spec = split(x, slice(rank - 1), ["context"])
        mesh = jax.typeof(x).sharding.mesh
        if x.shape[-1] % mesh.shape["context"]:
            rule = f"context must divide the length of the rows, {x.shape[-1]}"
            raise ConfigError(f"mesh has context={mesh.shape['context']}: {rule}")
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    found: Batch = jax.tree.map(place, batch)
    return found


def identity(batch: Batch) -> Batch:
    """Return the batch unchanged, for tasks whose inputs are already batches."""
    return batch


def batch_logits(config: AnyModelConfig | AnyModel) -> Callable[..., Any]:
    """Return `logits(params, batch, key) -> f32[B, T, V]`, or [B, C] for a classifier.

    Attention in decoders is causal within a document, except for a bidirectional prefix. Attention
    in encoders is bidirectional. Encoder-decoders also read the source. Instead of a config, you
    can pass a model, which may have edits. With `method="output_layer"`, the function returns the
    inputs of the output layer.
    """
    model = build(config)
    config = model.config

    def read(
        params: Params,
        batch: Batch,
        key: jax.Array | None,
        routed: list[jax.Array] | None = None,
        method: str | None = None,
    ) -> Any:
        """Call the model. If it has experts, append their router loss to `routed`."""
        kwargs: dict[str, Any] = {"key": key} if config.supports("dropout") else {}
        if batch.segments is not None:
            kwargs["segments"] = batch.segments
        if batch.prefix is not None:
            # All tokens see the whole prefix. In packed rows, the segments hide the prefixes of
            # other documents.
            kwargs["mask"] = Causal() | Padding(batch.prefix)
        if batch.positions is not None:
            kwargs["positions"] = batch.positions
        sides = {"": batch.valid}
        if config.kind == "encoder-decoder":
            kwargs["source"] = batch.source
            sides["source_"] = batch.source_valid
        for side, valid in sides.items():
            if valid is not None and config.supports("positions"):
                # every positional encoding treats position -1 as padding
                index = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
                if batch.positions is not None and not side:
                    index = jnp.asarray(batch.positions)
                kwargs[side + "positions"] = jnp.where(valid, index, -1)
            elif valid is not None:
                kwargs[side + "valid"] = valid
        several = len(batch.tokens) > 1  # some rows may be empty
        module = model.with_facts(apart=several, padded=several and batch.valid is not None)
        name = method or ("classify" if batch.labels.ndim == 1 else "__call__")
        experts = None if routed is None else config.experts
        if experts is not None:
            kwargs["mutable"] = [ROUTED]
        found = module.apply({"params": params}, batch.tokens, method=name, **kwargs)
        if routed is not None and experts is not None:
            found, state = found
            logits = jax.tree_util.tree_leaves_with_path(state[ROUTED])
            valid = [
                _router_mask(batch, path[0].key == "encoder", config.kind, x) for path, x in logits
            ]
            routed.append(router_loss(experts, [x for _, x in logits], valid))
        return found[0] if name == "__call__" else found

    return read


def _router_mask(batch: Batch, source: bool, kind: str, logits: jax.Array) -> jax.Array | None:
    """Return a mask for a router's logits, bool[B, T], that is True for real tokens.

    Returns None if all tokens count, for example because an encoder changes the number of tokens.
    """
    valid = batch.source_valid if source and kind == "encoder-decoder" else batch.valid
    if valid is None and batch.segments is not None:
        valid = batch.segments > 0
        if batch.positions is not None:
            take = partial(jnp.take_along_axis, axis=1)
            valid = by_compiler(take, [valid, batch.positions], split(valid))
    fits = valid is not None and valid.shape == logits.shape[-3:-1]
    return jnp.asarray(valid) if fits else None


LOGITS_AT_ONCE = 2**26
"""Number of logits above which a loss computes them in chunks (256 MiB in float32)."""

TOKENS_OF_CHUNK = 1024
"""Default number of tokens per chunk, summed over rows. On a CPU, chunks of 512 and 1024 tokens are
as fast as no chunking, and chunks of 128 take 10 to 25 % longer (benchmarks/chunked_loss.py)."""

ON_ACCELERATORS = 2**28
"""Minimum number of logits per chunk on an accelerator (1 GiB in float32). Each chunk reads the
output matrix twice and updates its gradient, so larger chunks move less data."""


def chosen_chunk(rows: int, length: int, vocab_size: int) -> int:
    """Return the number of tokens per row for which logits are computed at a time.

    `rows` is the number of rows per device. A row is split as evenly as possible.
    """
    if rows * length * vocab_size <= LOGITS_AT_ONCE:
        return length
    tokens = TOKENS_OF_CHUNK
    if platform() != "cpu":
        tokens = max(tokens, ON_ACCELERATORS // vocab_size)
    most = max(1, tokens // rows)
    # The inner division gives the number of chunks, and the outer one the smallest size for this
    # number.
    return -(-length // -(-length // most))


def batch_loss(
    config: AnyModelConfig,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
    row_shards: int = 1,
    length_shards: int = 1,
) -> Loss:
    """Return a function that computes the mean cross-entropy of a batch's labels, in nats.

    For a mixture of experts, the function adds the router losses to the mean.

    Args:
        config: model config.
        label_smoothing: see `cross_entropy`; at least 0 and less than 1.
        z_loss: see `cross_entropy`; at least 0.
        chunk: number of tokens per row for which a transformer computes logits at a time, in both
            the forward and the backward pass. None means `chosen_chunk`.
        row_shards: number of devices across which the rows of a batch are split.
        length_shards: number of devices across which the tokens of a row are split.

    Returns:
        A function `loss(params, batch, key) -> (mean, weight)`. Passing a key enables dropout.
    """
    read = batch_logits(config)
    whole = partial(
        cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss, ignore_label=IGNORE,
        invariant=getattr(config, "invariant", False),
    )  # fmt: skip
    in_chunks = partial(
        chunked_cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss, ignore_label=IGNORE
    )

    def loss(
        params: Params, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
        labels, routed = batch.labels, list[jax.Array]()
        if config.supports("output_layer") and labels.ndim == 2:
            rows, length = labels.shape
            length //= length_shards
            # The limits count the logits on one device.
            size = chosen_chunk(rows // row_shards, length, config.vocab_size)
            # an explicit chunk is always used
            size = size if chunk is None else chunk
            if size < length:
                x, table, bias = read(params, batch, key, routed, method="output_layer")
                cap = config.logit_softcap
                mean, weight = in_chunks(
                    x, table, labels, chunk_size=size, softcap=cap, logit_bias=bias
                )
                return sum(routed, mean), weight
        mean, weight = whole(read(params, batch, key, routed), labels)
        return sum(routed, mean), weight

    return loss


def batch_scores(
    config: AnyModelConfig | AnyModel, *, row_shards: int = 1, length_shards: int = 1
) -> Callable[..., jax.Array]:
    """Return `scores(params, batch) -> f32[3]`.

    The scores are the summed loss, the number of labels, and the number of correct predictions.
    Instead of a config, you can pass a model, which may have edits. Large arrays of logits are
    computed in chunks, as in `batch_loss`, unless an edit changes the logits.
    """
    model = build(config)
    read, config = batch_logits(model), model.config
    # an edit to the logits needs the logits of whole rows
    whole = "logits" in dict(model.edits)

    def judged(found: jax.Array, labels: jax.Array) -> jax.Array:  # [..., V], i32[...] -> f32[3]
        mean, weight = cross_entropy(found, labels, ignore_label=IGNORE)
        right = (jnp.argmax(found, axis=-1) == labels).sum(dtype=jnp.float32)
        return jnp.stack([mean * weight, weight, right])

    def scores(params: Params, batch: Batch) -> jax.Array:  # f32[3]
        labels = batch.labels
        if config.supports("output_layer") and labels.ndim == 2 and not whole:
            length = labels.shape[1] // length_shards
            size = chosen_chunk(len(labels) // row_shards, length, config.vocab_size)
            if size < length:
                x, table, bias = read(params, batch, None, method="output_layer")
                cap = config.logit_softcap
                x, labels = lengths_as_rows(x, x, labels)

                def in_chunks(
                    x: jax.Array, table: jax.Array, bias: jax.Array | None, labels: jax.Array
                ) -> jax.Array:
                    padding = (0, -labels.shape[1] % size)
                    x = jnp.pad(x, ((0, 0), padding, (0, 0)))
                    labels = jnp.pad(labels, ((0, 0), padding), constant_values=IGNORE)
                    parts = (
                        rearrange(x, "B (n T) D -> n B T D", T=size),
                        rearrange(labels, "B (n T) -> n B T", T=size),
                    )

                    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
                        found = jnp.einsum(
                            "BTD,VD->BTV", part[0], table, preferred_element_type=jnp.float32
                        )
                        found = found if bias is None else found + bias[None, None]
                        found = found if cap is None else cap * jnp.tanh(found / cap)
                        return judged(found, part[1])

                    return jax.lax.map(one, parts).sum(axis=0)

                found: jax.Array = by_compiler(in_chunks, [x, table, bias, labels], PartitionSpec())
                return found
        return judged(read(params, batch, None), labels)

    return scores


@program(static=("config",))
def token_nats(
    config: AnyModelConfig | AnyModel, params: Params, batch: Batch
) -> jax.Array:  # f32[B, T]
    """Return -log p of each label in nats, or 0 if the label is ignored."""
    labels, model = batch.labels, build(config)
    config = model.config
    if config.supports("output_layer") and not model.edits:
        x, table, bias = batch_logits(model)(params, batch, None, method="output_layer")
        rows, length = labels.shape
        size = chosen_chunk(rows, length, config.vocab_size)
        log_probs, _ = label_scores(
            x, table, labels, chunk_size=size, softcap=config.logit_softcap, logit_bias=bias,
            ignore_label=IGNORE,
        )  # fmt: skip
        return -log_probs
    logits = batch_logits(model)(params, batch, None).astype(jnp.float32)
    if getattr(config, "invariant", False):
        nats = token_losses(logits, jnp.where(labels == IGNORE, 0, labels), invariant=True)
        return jnp.where(labels == IGNORE, 0.0, nats)
    found = jax.nn.log_softmax(logits)
    picked = jnp.where(labels == IGNORE, 0, labels)[..., None]
    nats = -jnp.take_along_axis(found, picked, axis=-1)[..., 0]
    return jnp.where(labels == IGNORE, 0.0, nats)


@program(static=("model",))
def scored(model: AnyModel, params: Params, batch: Batch) -> jax.Array:  # f32[3]
    """Return the `batch_scores` of one batch, computed by a compiled function."""
    return batch_scores(model)(params, batch)
