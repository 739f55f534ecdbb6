"""Places that correspond to TransformerLens hook names.

The values are equal to those of `TransformerBridge` without compatibility mode in TransformerLens
4, or of `HookedTransformer.from_pretrained_no_processing` in versions up to 3. Compatibility mode
folds the norms and centers the weights, which changes most values.
"""

from __future__ import annotations

import re

from transformer_jax.config import ModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.config.positions import CustomPositions, Rope
from transformer_jax.models.places import IN_BLOCK

COMPUTED = {
    "hook_embed": 'params["embed"]["tokens"][tokens]; `embedding` is this plus the positions',
    "hook_pos_embed": 'params["embed"]["positions"][positions]',
    "ln1.hook_normalized": "`attention/input` is this times the norm's scale, plus its bias",
    "ln2.hook_normalized": "`feed_forward/input` is this times the norm's scale, plus its bias",
    "ln_final.hook_normalized": "`final_norm` is this times the norm's scale, plus its bias",
    "ln1.hook_scale": "sqrt(var(x) + eps), x the stream that block i reads",
    "ln2.hook_scale": "sqrt(var(x) + eps), x `residual_mid` or, if parallel, the input of block i",
    "ln_final.hook_scale": "sqrt(var(x) + eps), x the last block's `residual`",
    "attn.hook_attn_scores": "`query` of head n times `key` of head n // G, times the scale",
    "attn.hook_result": "`heads` of each head times its rows of the output matrix",
    "mlp.hook_pre": "`feed_forward/input` times the kernel of `up`, or `gate`, plus its bias",
    "mlp.hook_pre_linear": "`feed_forward/input` times the kernel of `up`",
}
"""Formulas for the values of hooks that have no place."""


def place_of_hook(config: ModelConfig, hook: str) -> str:
    """Return the place that has the same value as a TransformerLens hook.

    If queries are rotated or normalized, `attn.hook_q` is the value before these operations.
    `attn.hook_rot_q` is the value after them, which is the place `query`. The same applies to keys.

    Args:
        config: the config of a decoder that is pre-norm or has parallel branches.
        hook: a name such as "blocks.0.attn.hook_z".

    Returns:
        The name of a place in `transformer_jax.places`.

    Raises:
        ValueError: if the hook has no place, if the hook or its block does not exist, or if the
            model is not supported. If the hook has no place, the message contains a formula for its
            value.
    """
    if config.kind != "decoder" or (config.norm_order != "pre" and not config.is_parallel):
        got = f"kind is {config.kind!r} and norm_order {config.norm_order!r}"
        raise ValueError(f"{got}: must be 'decoder' and 'pre' or a parallel order")
    found = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", hook)
    block, name = (None, hook) if found is None else found.groups()
    number = 0 if block is None else int(block)
    if not config.ff_dim and name.startswith(("hook_resid_mid", "hook_mlp_out", "ln2.", "mlp.")):
        raise ValueError(f"hook {hook!r} has no place: d_ff is 0, so there is no feed-forward")
    if name in COMPUTED:
        raise ValueError(f"hook {hook!r} has no place: it is {COMPUTED[name]}")
    if block is None or name not in IN_BLOCK:
        hooks = [f"blocks.{number}.{one}" for one in IN_BLOCK]
        raise ValueError(f"hook {hook!r} is unknown; see place_of_hook{nearest(hook, hooks)}")
    if number >= config.num_layers:
        raise ValueError(
            f"hook {hook!r}: the block number must be from 0 to {config.num_layers - 1}"
        )
    if name == "hook_resid_pre":
        return "embedding" if number == 0 else f"block_{number - 1}/residual"
    if name == "hook_resid_mid" and config.is_parallel:
        rule = f"with norm_order {config.norm_order!r} no branch reads it"
        raise ValueError(f"hook {hook!r} has no place: {rule}")
    transformed = config.qk_norm or isinstance(config.positions, Rope | CustomPositions)
    if name in ("attn.hook_q", "attn.hook_k") and transformed:
        after = f"`{IN_BLOCK[name]}`, which is attn.hook_rot_{name[-1]}"
        rule = f"the value after rotation and norm is {after}"
        raise ValueError(f"hook {hook!r} has no place: {rule}")
    return f"block_{number}/{IN_BLOCK[name]}"
