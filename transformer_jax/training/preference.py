"""Direct preference optimization (DPO): training on pairs of a preferred and a rejected answer.

The reward for an answer y to a prompt x is r(y) = beta (log p(y | x) - log p0(y | x)), where p0 is
the initial model. The loss for a pair is -log sigmoid(r(chosen) - r(rejected)) (Rafailov et al.
2023).

The first half of a row contains the prompt and the chosen answer. The second half contains the
prompt and the rejected answer. The model processes the halves as two rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.models.factory import build
from transformer_jax.pytree import PyTree
from transformer_jax.sharding import by_compiler, split
from transformer_jax.training.adapting import FrozenBase
from transformer_jax.training.batch import Batch, Loss, Params, chosen_chunk
from transformer_jax.training.data import IGNORE
from transformer_jax.training.losses import label_scores


def answer_log_probs(
    config: ModelConfig, *, chunk: int | None = None, row_shards: int = 1
) -> Callable[..., jax.Array]:
    """Return `log_probs(params, batch, key) -> f32[B, 2]` for the two answers in each row.

    Each value is the sum over the answer's labels, in nats. Logits are computed for `chunk` tokens
    per row at a time. None means `chosen_chunk`.
    """
    model = build(config)

    def halves(x: jax.Array) -> jax.Array:  # [B, 2 T] -> [2 B, T]
        # A row contains the chosen answer and then the rejected one, so the halves of a pair stay
        # adjacent and are on the same device.
        return by_compiler(lambda x: x.reshape(2 * len(x), -1), [x], split(x, slice(1)))

    def log_probs(params: Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        tokens, labels = halves(batch.tokens), halves(batch.labels)
        read: PyTree = model.apply({"params": params}, tokens, method="output_layer", key=key)
        x, table, bias = read
        rows, length = labels.shape
        size = chosen_chunk(rows // row_shards, length, config.vocab_size)
        found, _ = label_scores(
            x, table, labels, chunk_size=chunk or size, softcap=config.logit_softcap,
            logit_bias=bias, ignore_label=IGNORE,
        )  # fmt: skip
        return found.sum(axis=1).reshape(-1, 2)

    return log_probs


def preference_loss(config: TrainConfig, beta: float, *, row_shards: int = 1) -> Loss:
    """Return `loss(params, batch, key, reference) -> (mean, pairs)`, in nats per pair.

    The reference model runs without dropout and has no gradient.
    """
    margins = _margins(config, beta, row_shards)

    def loss(
        params: Params, batch: Batch, key: jax.Array | None, reference: Params
    ) -> tuple[jax.Array, jax.Array]:  # f32[], f32[]
        found, counts = margins(params, batch, key, reference)

        def mean(found: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
            pairs = counts.sum()
            lost = jnp.where(counts > 0, -jax.nn.log_sigmoid(found), 0.0)
            return lost.sum() / jnp.maximum(pairs, 1.0), pairs

        return by_compiler(mean, [found, counts], PartitionSpec())

    return loss


def preference_scores(
    config: TrainConfig, beta: float, *, row_shards: int = 1
) -> Callable[..., jax.Array]:
    """Return `scores(params, batch, reference) -> f32[3]`.

    The scores are the summed loss, the number of pairs, and the number of correct pairs. A pair is
    correct if the chosen answer has the larger reward.
    """
    margins = _margins(config, beta, row_shards)

    def scores(params: Params, batch: Batch, reference: Params) -> jax.Array:
        found, counts = margins(params, batch, None, reference)

        def summed(found: jax.Array, counts: jax.Array) -> jax.Array:
            lost = jnp.where(counts > 0, -jax.nn.log_sigmoid(found), 0.0)
            right = jnp.where(counts > 0, found > 0, False)
            return jnp.stack([lost.sum(), counts.sum(), right.sum(dtype=jnp.float32)])

        return by_compiler(summed, [found, counts], PartitionSpec())

    return scores


def _margins(
    config: TrainConfig, beta: float, row_shards: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a function that computes the margin and the weight of each row, f32[B] each.

    The margin is r(chosen) - r(rejected). The weight is 1 if the row contains a pair, and 0
    otherwise.
    """
    model = as_transformer(config.model)
    log_probs = answer_log_probs(model, chunk=config.loss_chunk, row_shards=row_shards)

    def margins(
        params: Params, batch: Batch, key: jax.Array | None, reference: Params
    ) -> tuple[jax.Array, jax.Array]:
        policy = log_probs(params, batch, key)
        initial = jax.lax.stop_gradient(log_probs(reference, batch, None))

        def differences(
            policy: jax.Array, initial: jax.Array, labels: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            rewards = beta * (policy - initial)
            counts = (labels != IGNORE).any(axis=1).astype(jnp.float32)
            return rewards[:, 0] - rewards[:, 1], counts

        arrays = [policy, initial, batch.labels]
        return by_compiler(differences, arrays, (PartitionSpec(), PartitionSpec()))

    return margins


class Reference(FrozenBase):
    """Reference model for a run without adapters: a frozen copy of the initial parameters."""

    def part(self, params: Params) -> Params:
        """Return a copy of all parameters in `param_dtype`."""
        dtype = jnp.dtype(self.config.param_dtype)
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)

    def trained(self, loaded: Params, params: Params, key: jax.Array) -> Params:
        """Return all parameters, because this run trains the whole model."""
        return params

    def join_parts(self, trained: Params) -> Params:
        """Return the trained parameters, which are already the whole model."""
        return trained
