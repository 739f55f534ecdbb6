"""Config of a mixture of experts, which replaces the feed-forward network of every block."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Factor, NonNegative, Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class


@config_class
class Experts:
    """Mixture of feed-forward networks with a router (Shazeer et al. 2017).

    The router chooses a few experts for each token. For a token x, y = sum_e w_e f_e(x) over the
    `top_k` experts e with the largest logits x W_r. Experts have no capacity limit, so no token is
    dropped.
    """

    count: Size = 8
    """Number of experts in a block (E)."""
    top_k: Size = 2
    """Number of experts per token (k)."""
    d_ff: Size | None = None
    """Hidden width of each expert. None uses the model's d_ff."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that converts the router's logits to weights: a softmax over all experts, or a
    sigmoid of each logit (DeepSeek-AI 2024)."""
    normalize: bool = True
    """Divide the k weights by their sum. With softmax, this equals the softmax of the k logits
    (Mixtral). If top_k is 1, use False; otherwise the weight is always 1 and the router gets no
    gradient from the task's loss (Fedus et al. 2021)."""
    scale: Factor = 1.0
    """Scale of the weights after normalization."""
    selection_bias: bool = False
    """Choose experts by score + b, where b is a number per expert that does not affect the weights
    (Wang et al. 2024). This field is intended for loaded models, because b has no gradient and
    training does not change it."""
    router_bias: bool = False
    """Add a learned bias for each expert to the router's logits (gpt-oss)."""
    shared_d_ff: Size | None = None
    """Hidden width of a shared feed-forward network that processes every token. None omits it."""
    shared_gate: bool = False
    """Multiply the output of the shared feed-forward network by sigmoid(x w) (Qwen 1.5)."""
    balance_loss: NonNegative = 0.01
    """Coefficient c of the load-balancing loss c E sum_e f_e P_e, averaged over blocks, where f_e
    is the fraction of tokens that choose expert e and P_e is its mean softmax probability (Fedus et
    al. 2021, section 2.2). If all experts are used equally, the loss is c k, which is the minimum
    if f is proportional to P."""
    z_loss: NonNegative = 0.0
    """Coefficient c of the router's z-loss, c mean(logsumexp(logits)^2), averaged over blocks (Zoph
    et al. 2022, section 3.2)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.top_k > self.count:
            fail("top_k", self.top_k, f"must be at most count, {self.count}")
        if self.shared_d_ff is None:
            unread(self, "needs shared_d_ff", "shared_gate")
