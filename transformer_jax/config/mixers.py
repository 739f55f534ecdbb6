"""Config of the mixers that replace attention in some layers of a decoder."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Positive, Size, check_types, fail
from transformer_jax.config.keywords import config_class

Mixer = Literal["attention", "gated_delta", "short_conv", "latent_attention"]
STATEFUL: frozenset[Mixer] = frozenset({"gated_delta", "short_conv"})
"""Mixers with a state of fixed size instead of keys and values."""


@config_class
class GatedDelta:
    """Sizes of Gated DeltaNet (Yang et al. 2024), which has a state instead of keys and values.

    Each value head has a state [key_dim, value_dim] and reads the key head n // (num_value_heads /
    num_key_heads). The projections have no biases.
    """

    num_key_heads: Size = 4
    """Number of query heads and of key heads."""
    num_value_heads: Size = 8
    """Number of value heads, which is the number of states."""
    key_dim: Size = 32
    """Width of each query and key head."""
    value_dim: Size = 32
    """Width of each value head."""
    conv_width: Size = 4
    """Number of tokens in the window of the short convolution (W)."""
    decay_rank: Size | None = None
    """Inner width of two projections that return one decay per channel of each key, as in Kimi
    Delta Attention (Kimi Team 2025). None projects to one decay per head."""
    gate_rank: Size | None = None
    """Inner width of two projections to the gate of the heads. None uses one projection."""
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    """Function that is applied to the gate of the heads."""
    negative_eigenvalues: bool = False
    """Let beta range from 0 to 2 instead of 1, so that a write can reverse the sign of the value
    that the state has for a key (OLMo Hybrid)."""
    norm_eps: Positive | None = None
    """Epsilon of the norm of the heads. None uses the model's norm_eps."""
    norm_order: Literal["pre", "sandwich", "output"] | None = None
    """Placement of the norms in these layers. None uses the model's norm_order."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_value_heads % self.num_key_heads:
            rule = f"must divide num_value_heads {self.num_value_heads}"
            fail("num_key_heads", self.num_key_heads, rule)

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution, which are all queries, keys, values."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return 2 * keys + values


@config_class
class ShortConv:
    """Sizes of a gated short convolution (LFM2, Liquid AI 2025), whose state is its last inputs.

    The convolution and its gates have d_model channels.
    """

    conv_width: Size = 3
    """Number of tokens in the window of the convolution (W)."""
    conv_bias: bool = False
    """Use bias vectors in the convolution and in the projections around it."""

    def __post_init__(self) -> None:
        check_types(self)


@config_class
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024), which caches one vector per token.

    The keys and values of all heads are linear functions of a latent vector. In addition, all heads
    share one rotated key. The projections have no biases.
    """

    query_rank: Size | None = None
    """Width of the latent vector of the queries. None projects the queries directly."""
    kv_rank: Size = 64
    """Width of the latent vector of keys and values (C)."""
    nope_dim: Size = 32
    """Width of the part of each query and key without rotation (H)."""
    rope_dim: Size = 16
    """Width of the rotated part of each query, and of the rotated key that all heads share (R)."""
    value_dim: Size = 32
    """Width of each value head (Hv)."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def key_dim(self) -> int:
        """Return the width of each query and key head, H + R."""
        return self.nope_dim + self.rope_dim
