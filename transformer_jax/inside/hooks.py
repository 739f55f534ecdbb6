"""Find the place that has the value of a hook of TransformerLens.

The values are those of its `TransformerBridge` without compatibility mode (TransformerLens 4; until
version 3, of `HookedTransformer.from_pretrained_no_processing`): compatibility mode folds the norms
and centres the weights, which changes most values.
"""

from __future__ import annotations

import re

from transformer_jax.config import ModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.config.positions import OwnPositions, Rope
from transformer_jax.models.places import IN_BLOCK

COMPUTED = {
    "hook_embed": 'params["embed"]["tokens"][tokens]; `embedding` is it plus the positions',
    "hook_pos_embed": 'params["embed"]["positions"][positions]',
    "ln1.hook_normalized": "`attention/input` is it times the norm's scale, plus its bias",
    "ln2.hook_normalized": "`feed_forward/input` is it times the norm's scale, plus its bias",
    "ln_final.hook_normalized": "`final_norm` is it times the norm's scale, plus its bias",
    "ln1.hook_scale": "sqrt(var(x) + eps) of the stream that block i reads",
    "ln2.hook_scale": "sqrt(var(x) + eps) of `residual_mid`; parallel, of what block i reads",
    "ln_final.hook_scale": "sqrt(var(x) + eps) of the last block's `residual`",
    "attn.hook_attn_scores": "`query` of head n times `key` of head n // G, times the scale",
    "attn.hook_result": "`heads` of each head times its rows of the output matrix",
    "mlp.hook_pre": "`feed_forward/input` times the kernel of `up`, or `gate`, plus its bias",
    "mlp.hook_pre_linear": "`feed_forward/input` times the kernel of `up`",
}
"""How the value of a hook that has no place is computed from what has one."""


def place_of_hook(config: ModelConfig, hook: str) -> str:
    """Return the place with the value of a hook of TransformerLens.

    Where queries are rotated or normalised, `attn.hook_q` is before that and `attn.hook_rot_q`
    after it: our `query` is the latter, and so with keys.

    Args:
        config: of a decoder, pre-norm or with parallel branches.
        hook: a name such as "blocks.0.attn.hook_z".

    Returns:
        A name of `transformer_jax.places`.

    Raises:
        ValueError: if the hook has no place, which says how its value is computed; if it is
            unknown, or of a block that is not there; or if the model is another.
    """
    if config.kind != "decoder" or (config.norm_order != "pre" and not config.is_parallel):
        given = f"kind is {config.kind!r} and norm_order {config.norm_order!r}"
        raise ValueError(f"{given}: must be 'decoder' and 'pre' or a parallel one")
    found = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", hook)
    block, name = (None, hook) if found is None else found.groups()
    number = 0 if block is None else int(block)
    if not config.ff_dim and name.startswith(("hook_resid_mid", "hook_mlp_out", "ln2.", "mlp.")):
        raise ValueError(f"hook {hook!r} has no place: d_ff is 0, so there is no feed-forward")
    if name in COMPUTED:
        raise ValueError(f"hook {hook!r} has no place: {COMPUTED[name]}")
    if block is None or name not in IN_BLOCK:
        known = [f"blocks.{number}.{one}" for one in IN_BLOCK]
        raise ValueError(f"hook {hook!r} is unknown{nearest(hook, known)}: see place_of_hook")
    if number >= config.num_layers:
        raise ValueError(f"hook {hook!r}: must be of a block in 0..{config.num_layers - 1}")
    if name == "hook_resid_pre":
        return "embedding" if number == 0 else f"block_{number - 1}/residual"
    if name == "hook_resid_mid" and config.is_parallel:
        rule = f"norm_order is {config.norm_order!r}, so no branch reads it"
        raise ValueError(f"hook {hook!r} has no place: {rule}")
    turned = config.qk_norm or isinstance(config.positions, Rope | OwnPositions)
    if name in ("attn.hook_q", "attn.hook_k") and turned:
        rule = f"{IN_BLOCK[name]} is it after rotation and norm, attn.hook_rot_{name[-1]}"
        raise ValueError(f"hook {hook!r} has no place: {rule}")
    return f"block_{number}/{IN_BLOCK[name]}"
