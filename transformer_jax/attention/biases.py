"""Attention biases that are functions of positions: ALiBi and T5's relative bias."""

from __future__ import annotations

from dataclasses import field
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import as_int32, check_count
from transformer_jax.values import value_class


def key_distances(
    q_positions: jax.Array,  # i32[T] or [B, T]
    k_positions: jax.Array,  # i32[S] or [B, S]
) -> jax.Array:  # i32[B or 1, T, S]
    """Return the position of each key minus the position of each query."""
    q = jnp.asarray(as_int32("q_positions", q_positions))
    k = jnp.asarray(as_int32("k_positions", k_positions))
    q, k = (x if x.ndim == 2 else x[None] for x in (q, k))
    return k[:, None, :] - q[:, :, None]


def alibi_slopes(num_heads: int) -> jax.Array:  # f32[N]
    """Return 2^(-8n/N) for n = 1..N if N is a power of two (Press et al. 2022).

    Otherwise, return the slopes for the next lower power of two P, followed by every other slope
    for 2P.

    Args:
        num_heads: N, at least 1.
    """
    check_count("num_heads", num_heads, 1)
    num_heads = int(num_heads)  # NumPy integers have no `bit_length`
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * n / power for n in range(1, power + 1)]
    exponents += [8 * n / (2 * power) for n in range(1, 2 * (num_heads - power), 2)]
    return jnp.asarray(2.0 ** -np.array(exponents), jnp.float32)


@value_class(pytree=True, eq=False)
class ALiBi:
    """Bias -slopes[n] |q - k|, a penalty that is linear in the distance (Press et al. 2022).

    The penalty is the same in both directions. The paper covers only causal attention.

    Attributes:
        slopes: [N], the slope of each head, for example `alibi_slopes(N)`.
    """

    slopes: jax.Array  # [N]

    def materialize(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
    ) -> jax.Array:  # f32[B or 1, N, T, S]
        """Return the bias for each query-key pair, f32[B or 1, N, T, S].

        Args:
            q_positions: i32[T] or [B, T].
            k_positions: i32[S] or [B, S].
        """
        distances = jnp.abs(key_distances(q_positions, k_positions)).astype(jnp.float32)
        return -self.slopes.astype(jnp.float32)[None, :, None, None] * distances[:, None]


def relative_bucket(
    distance: jax.Array,  # i32[...]
    *,
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
) -> jax.Array:  # i32[...], from 0 to num_buckets - 1
    """Return T5's bucket for each distance (Raffel et al. 2020).

    Each direction has b buckets. Each of the first e = b // 2 buckets contains one distance. Bucket
    e + i starts at e (max_distance / e)^(i / (b - e)), and the last bucket is unbounded.

    Args:
        distance: i32[...], the position of the key minus that of the query.
        bidirectional: whether keys after the query (distance > 0) use the upper half of the
            buckets; otherwise, they all share bucket 0.
        num_buckets: total number of buckets for both directions. It must be even, and at least 4 if
            bidirectional or 2 otherwise.
        max_distance: number above e that determines the width of the logarithmic buckets.

    Returns:
        i32[...], from 0 to num_buckets - 1.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count("num_buckets", num_buckets, 1)
    check_count("max_distance", max_distance, 1)
    b = num_buckets // 2 if bidirectional else num_buckets
    exact = b // 2
    if num_buckets % 2 or exact < 1 or max_distance <= exact:
        raise ValueError(
            f"num_buckets is {num_buckets}, max_distance is {max_distance}: num_buckets must be "
            "even "
            f"and at least {4 if bidirectional else 2}, and max_distance above {exact}"
        )
    distance = jnp.asarray(as_int32("distance", distance))
    n = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = jnp.minimum(n, exact)
    # compare with the start of each bucket: a floating-point logarithm would place a distance equal
    # to a start in the bucket below
    logarithmic = b - exact
    for i in range(1, logarithmic):
        # the ceiling of exact (max_distance / exact)^(i / logarithmic): start below the
        # floating-point power and count up in exact integers
        start = int(exact * (max_distance / exact) ** (i / logarithmic)) - 1
        while start**logarithmic * exact**i < max_distance**i * exact**logarithmic:
            start += 1
        bucket = bucket + (n >= start).astype(jnp.int32)
    return bucket + jnp.where(distance > 0, b, 0) if bidirectional else bucket


@value_class(pytree=True, eq=False)
class RelativeBias:
    """T5's learned bias (Raffel et al. 2020): table[relative_bucket(k - q), n].

    Attributes:
        table: [buckets, N], the bias of each bucket and head; the number of buckets must be even.
        bidirectional: whether keys after the query have their own buckets.
        max_distance: as in `relative_bucket`.
    """

    table: jax.Array  # [buckets, N]
    bidirectional: bool = field(metadata=dict(static=True))
    max_distance: int = field(metadata=dict(static=True))

    def materialize(
        self,
        q_positions: jax.Array,  # i32[T] or [B, T]
        k_positions: jax.Array,  # i32[S] or [B, S]
    ) -> jax.Array:  # f32[B or 1, N, T, S]
        """Return the bias for each query-key pair, f32[B or 1, N, T, S].

        Args:
            q_positions: i32[T] or [B, T].
            k_positions: i32[S] or [B, S].
        """
        bucket = relative_bucket(
            key_distances(q_positions, k_positions),
            bidirectional=self.bidirectional,
            num_buckets=self.table.shape[0],
            max_distance=self.max_distance,
        )
        return jnp.moveaxis(jnp.asarray(self.table, jnp.float32)[bucket], -1, 1)


@runtime_checkable
class Bias(Protocol):
    """Function of positions that is added to the scores: ALiBi, T5's relative bias, or your own.

    Define your own bias as a frozen dataclass that is registered as a pytree. Its floating-point
    arrays have gradients. "blockwise" does not support a bias if both its arrays and the positions
    differ between batch rows.
    """

    def materialize(
        self,
        q_positions: jax.Array,  # i32[B or 1, T]
        k_positions: jax.Array,  # i32[B or 1, S]
    ) -> jax.Array:  # f32[B or 1, N or 1, T, S]
        """Return the bias for each query-key pair, f32[B or 1, N or 1, T, S].

        Args:
            q_positions: i32[B or 1, T].
            k_positions: i32[B or 1, S].
        """
        ...
