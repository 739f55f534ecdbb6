"""TransformerLens hooks: the values of their places match the definitions of the hooks."""

import jax
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, draw, model_of
from transformer_jax.interpret.hooks import COMPUTED, IN_BLOCK, place_of_hook
from transformer_jax.models.places import places

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow_except("gpt2")
@pytest.mark.parametrize("shape", ["gpt2", "llama", "neox"])
def test_captured_places_match_hook_values(shape):
    config = SHAPES[shape]
    turned = "" if shape == "gpt2" else "rot_"
    names = [n for n in IN_BLOCK if "rot_" not in n and n[-2:] not in ("_q", "_k")]
    if shape == "neox":
        names.remove("hook_resid_mid")
    names += [f"attn.hook_{turned}q", f"attn.hook_{turned}k"]
    hooks = [f"blocks.{i}.{name}" for i in range(2) for name in names]
    wanted = {hook: place_of_hook(config, hook) for hook in hooks}
    model, params = model_of(shape)
    apply = jax.jit(lambda params, x: model.apply(
        {"params": params}, x, capture=tuple(dict.fromkeys(wanted.values()))
    )[2])  # fmt: skip
    found = {name: np.asarray(x, np.float64) for name, x in apply(params, draw()).items()}
    for i in range(2):
        x = {name: found[wanted[f"blocks.{i}.{name}"]] for name in names}
        pre, post = (x[f"hook_resid_{name}"] for name in ("pre", "post"))
        mid = x.get("hook_resid_mid", pre + x["hook_attn_out"])
        own = jax.tree.map(lambda w: np.asarray(w, np.float64), params["decoder"][f"block_{i}"])
        np.testing.assert_allclose(mid, pre + x["hook_attn_out"], atol=1e-5)
        np.testing.assert_allclose(post, mid + x["hook_mlp_out"], atol=1e-5)
        q, k, v = (x[f"attn.hook_{name}"] for name in (f"{turned}q", f"{turned}k", "v"))
        groups = q.shape[2] // k.shape[2]
        k, v = (np.repeat(y, groups, axis=2) for y in (k, v))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(scores.shape[-1]) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(x["attn.hook_pattern"], weights, atol=1e-5)
        z = np.einsum("bnts,bsnh->btnh", weights, v)
        np.testing.assert_allclose(x["attn.hook_z"], z, atol=1e-5)
        out = own["attention"]["out"]
        gives = np.einsum("btnh,nhd->btd", z, out["kernel"]) + out.get("bias", 0)
        np.testing.assert_allclose(x["hook_attn_out"], gives, atol=1e-4)
        down = own["feed_forward"]["down"]
        gives = x["mlp.hook_post"] @ down["kernel"] + down.get("bias", 0)
        np.testing.assert_allclose(x["hook_mlp_out"], gives, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "hook", "rule"),
    [
        ("llama", "blocks.1.attn.hook_q", "the value after rotation and norm is `attention/query`"),
        ("gpt2", "blocks.2.hook_resid_pre", "the block number must be from 0 to 1"),
        ("gpt2", "blocks.0.attn.hook_qq", r"is unknown; see place_of_hook; did you mean"),
        ("gpt2", "hook_resid_pre", "is unknown"),
        ("encoder", "blocks.0.hook_resid_pre", "kind is 'encoder' and norm_order 'pre': must be"),
        ("neox", "blocks.0.hook_resid_mid", "with norm_order 'parallel' no branch reads it"),
        *(
            ("attention alone", f"blocks.0.{name}", "has no place: d_ff is 0, so there is no feed")
            for name in ("hook_resid_mid", "hook_mlp_out", "mlp.hook_post", "ln2.hook_scale")
        ),
        ("post", "blocks.0.hook_resid_pre", "kind is 'decoder' and norm_order 'post': must"),
        *(("gpt2", f"blocks.0.{name}", "has no place: ") for name in COMPUTED if "." in name),
        ("gpt2", "hook_embed", "has no place: "),
    ],
)  # fmt: skip
def test_hooks_without_place_explain_how_to_compute_value(shape, hook, rule):
    with pytest.raises(ValueError, match=rule):
        place_of_hook(SHAPES[shape], hook)


def test_places_mapped_from_hooks_exist():
    for name in IN_BLOCK:
        assert place_of_hook(SHAPES["gpt2"], f"blocks.1.{name}") in places(SHAPES["gpt2"])
    assert place_of_hook(SHAPES["gpt2"], "blocks.0.hook_resid_pre") == "embedding"
