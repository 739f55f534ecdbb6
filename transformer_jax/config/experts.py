"""Config of a mixture of experts, which replaces the feed-forward network of every block."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import (
    Count,
    Factor,
    NonNegative,
    Size,
    check_types,
    fail,
    unread,
)
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
    dense_layers: Count = 0
    """Number of layers, starting from the first, that have a feed-forward network with hidden width
    d_ff of the model instead of experts (DeepSeek). Requires a looped stack."""
    groups: Size = 1
    """Number of groups of consecutive experts. A token only chooses experts in its best groups
    (DeepSeek-AI 2024)."""
    top_groups: Size = 1
    """Number of groups from which a token chooses experts."""
    group_best: Size = 1
    """Number of the largest scores in a group whose sum ranks the group: 1 in DeepSeek-V2, 2 in
    V3."""
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
        if self.groups == 1:
            unread(self, "needs groups", "top_groups", "group_best")
        if self.count % self.groups:
            fail("groups", self.groups, f"must divide count, {self.count}")
        size = self.count // self.groups
        if self.top_groups > self.groups:
            fail("top_groups", self.top_groups, f"must be at most groups, {self.groups}")
        if self.group_best > size:
            fail("group_best", self.group_best, f"must be at most {size}, the size of a group")
        if self.top_k > self.top_groups * size:
            rule = f"must be at most {self.top_groups * size}, the experts in top_groups groups"
            fail("top_k", self.top_k, rule)
        if self.shared_d_ff is None:
            unread(self, "needs shared_d_ff", "shared_gate")
