"""Config of a mixture of experts, which replaces the feed-forward of every block."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Factor, NonNegative, Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class


@config_class
class Experts:
    """Many feed-forwards; a router chooses a few for each token (Shazeer et al. 2017).

    y = sum_e w_e f_e(x) over the `top_k` experts e with the largest logits x W_r of a token x.
    Experts have no capacity limit, so no token is dropped.
    """

    count: Size = 8
    """Number of experts in a block (E)."""
    top_k: Size = 2
    """Number of experts per token (k)."""
    d_ff: Size | None = None
    """Hidden width of each expert. None uses the model's d_ff."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into weights: a softmax over all experts, or a
    sigmoid of each logit (DeepSeek-AI 2024)."""
    normalize: bool = True
    """Divide the k weights by their sum. With softmax, this equals the softmax of the k logits
    (Mixtral). With top_k 1, the weight would always be 1 and the router would get no gradient from
    the task's loss; pass False (Fedus et al. 2021)."""
    scale: Factor = 1.0
    """Multiplier of the weights after normalization."""
    selection_bias: bool = False
    """Choose experts by score + b, where b is a number per expert that does not affect the weights
    (Wang et al. 2024). For loaded models: b has no gradient, so training leaves it unchanged."""
    router_bias: bool = False
    """Add a learned bias for each expert to the router's logits (gpt-oss)."""
    shared_d_ff: Size | None = None
    """Hidden width of a shared feed-forward that processes every token. None omits it."""
    shared_gate: bool = False
    """Multiply the output of the shared feed-forward by sigmoid(x w) (Qwen 1.5)."""
    balance_loss: NonNegative = 0.01
    """Coefficient c of the load-balancing loss c E sum_e f_e P_e, averaged over blocks, where f_e
    is the fraction of tokens that choose expert e and P_e its mean softmax probability (Fedus et
    al. 2021, 2.2). Uniform use gives c k, the minimum if f is proportional to P."""
    z_loss: NonNegative = 0.0
    """Coefficient c of the router's z-loss c mean(logsumexp(logits)^2), averaged over blocks (Zoph
    et al. 2022, 3.2)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.top_k > self.count:
            fail("top_k", self.top_k, f"must be at most count, {self.count}")
        if self.shared_d_ff is None:
            unread(self, "needs shared_d_ff", "shared_gate")
