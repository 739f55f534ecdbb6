"""Configure a mixture of experts in the place of the feed-forward of every block."""

from __future__ import annotations

from typing import Literal

from transformer_jax.config.fields import Factor, NonNegative, Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class


@config_class
class Experts:
    """Give each token a few of many feed-forwards, which a router chooses (Shazeer et al. 2017).

    y = sum_e w_e f_e(x) over the `top_k` experts e of the token x with the largest logits x W_r. No
    expert has a capacity, so that no token is left out.
    """

    count: Size = 8
    """Experts of a block (E)."""
    top_k: Size = 2
    """Experts that a token is given to (k)."""
    d_ff: Size | None = None
    """Hidden width of an expert; None is the model's d_ff."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The router's logits become weights by a softmax over all experts, or by a sigmoid of each
    (DeepSeek-AI 2024)."""
    normalize: bool = True
    """Divide the k weights by their sum. With softmax this is the softmax of the k logits
    (Mixtral). With top_k 1 the weight is always 1, and the router has no gradient of the task's
    loss: False trains it (Fedus et al. 2021)."""
    scale: Factor = 1.0
    """Multiply the weights by it, after they are normalised."""
    selection_bias: bool = False
    """Choose experts by score + b, with a number b of each expert that weighs nothing (Wang et al.
    2024). It has no gradient, so training leaves it as it is: it is for weights that are loaded."""
    router_bias: bool = False
    """Add a learned number of each expert to the router's logits (gpt-oss)."""
    shared_d_ff: Size | None = None
    """Hidden width of one more feed-forward, which every token is given to; None has none."""
    shared_gate: bool = False
    """Multiply what the shared feed-forward gives by sigmoid(x w) (Qwen 1.5)."""
    balance_loss: NonNegative = 0.01
    """Add to the loss of training c E sum_e f_e P_e, averaged over the blocks: f_e is how many of a
    token's k choices are e on average, P_e the mean of its softmax (Fedus et al. 2021, 2.2). Even
    use gives c k, the least where both follow each other."""
    z_loss: NonNegative = 0.0
    """Add to the loss of training c mean(logsumexp(logits)^2), averaged over the blocks (Zoph et
    al. 2022, 3.2)."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.top_k > self.count:
            fail("top_k", self.top_k, f"must be at most count, {self.count}")
        if self.shared_d_ff is None:
            unread(self, "needs shared_d_ff", "shared_gate")
