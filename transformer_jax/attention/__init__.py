"""Attention: one function, its implementations, masks and biases.

Masks (`masks`) and biases (`biases`) are functions of positions. `api` contains the public
functions and chooses the implementation. `latent` contains multi-head latent attention, whose heads
share one small vector per key, and `linear` contains linear attention, whose state has a fixed
size. Layers with projections are in `models`. The fused kernels for CPUs, GPUs and TPUs are in
`kernels`.
"""

from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.api import (
    Explanation,
    dot_product_attention,
    dot_product_attention_weights,
    explain_attention,
)
from transformer_jax.attention.biases import (
    ALiBi,
    Bias,
    RelativeBias,
    alibi_slopes,
    relative_bucket,
)
from transformer_jax.attention.block_plan import BlockPlan
from transformer_jax.attention.latent import latent_attention
from transformer_jax.attention.linear import (
    causal_conv,
    delta_rule,
    elu_plus_one,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
)
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Everything,
    Mask,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.attention.ring import zigzag_positions

__all__ = [
    "ALiBi",
    "Bias",
    "BlockPlan",
    "Causal",
    "Dense",
    "Everything",
    "Explanation",
    "Mask",
    "Padding",
    "Predicate",
    "Prefix",
    "RelativeBias",
    "Segments",
    "Window",
    "additive_attention",
    "alibi_slopes",
    "causal_conv",
    "delta_rule",
    "dot_product_attention",
    "dot_product_attention_weights",
    "elu_plus_one",
    "explain_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "latent_attention",
    "linear_attention",
    "relative_bucket",
    "state_attention",
    "zigzag_positions",
]
