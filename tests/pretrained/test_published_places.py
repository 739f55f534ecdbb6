"""Internal values of published models, compared with forward hooks in transformers."""

import jax
import numpy as np
import pytest

from tests.support.published import LOGITS, randomised, reopened, saved, tokens, torch, transformers
from transformer_jax.models.factory import build
from transformer_jax.models.places import places
from transformer_jax.pretrained.load import load_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, L, N, K, H = 2, 7, 2, 6, 3, 4
D = N * H


def gpt2():
    config = transformers.GPT2Config(vocab_size=41, n_positions=17, n_embd=D, n_layer=L, n_head=N)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=D, intermediate_size=23, num_hidden_layers=L,
        num_attention_heads=N, num_key_value_heads=K, max_position_embeddings=17,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Hooks:
    """Record of the inputs and outputs of modules in one pass, by module name."""

    def __init__(self, model, ids: np.ndarray) -> None:
        self.read, self.outputs = {}, {}
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *seen, name=name: self.record(name, *seen))
        with torch.no_grad():
            found = model(torch.from_numpy(ids.astype(np.int64)), output_attentions=True)
        self.logits, self.weights = found.logits, found.attentions

    def record(self, name, _, read, outputs) -> None:
        self.read[name] = read[0] if read else None
        several = isinstance(outputs, tuple) and not name.endswith("rotary_emb")  # (cos, sin)
        self.outputs[name] = outputs[0] if several else outputs


def split(x, heads: int):  # [B, T, heads * H] -> [B, T, heads, H]
    return x.reshape(B, T, heads, -1)


def rotated(x, cos, sin):  # [B, T, heads, H]; the halves of a head form the pairs
    one, two = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-two, one], dim=-1) * sin[:, :, None]


def values_of_gpt2(seen: Hooks):
    body = "transformer"
    found = {"embedding": seen.outputs[f"{body}.drop"], "final_norm": seen.outputs[f"{body}.ln_f"]}
    for i in range(L):
        block = f"{body}.h.{i}"
        q, k, v = seen.outputs[f"{block}.attn.c_attn"].chunk(3, dim=-1)
        found |= {
            f"block_{i}/attention/input": seen.outputs[f"{block}.ln_1"],
            f"block_{i}/attention/query": split(q, N),
            f"block_{i}/attention/key": split(k, N),
            f"block_{i}/attention/value": split(v, N),
            f"block_{i}/attention/heads": split(seen.read[f"{block}.attn.c_proj"], N),
            f"block_{i}/attention/output": seen.outputs[f"{block}.attn.c_proj"],
            f"block_{i}/residual_mid": seen.read[f"{block}.ln_2"],
            f"block_{i}/feed_forward/input": seen.outputs[f"{block}.ln_2"],
            f"block_{i}/feed_forward/hidden": seen.outputs[f"{block}.mlp.act"],
            f"block_{i}/feed_forward/output": seen.outputs[f"{block}.mlp"],
            f"block_{i}/residual": seen.outputs[block],
        }
    return found


def values_of_llama(seen: Hooks):
    found = {
        "embedding": seen.outputs["model.embed_tokens"],
        "final_norm": seen.outputs["model.norm"],
    }
    turn = seen.outputs["model.rotary_emb"]
    for i in range(L):
        block = f"model.layers.{i}"
        attn, mlp = f"{block}.self_attn", f"{block}.mlp"
        norm = f"{block}.post_attention_layernorm"
        found |= {
            f"block_{i}/attention/input": seen.outputs[f"{block}.input_layernorm"],
            f"block_{i}/attention/query": rotated(split(seen.outputs[f"{attn}.q_proj"], N), *turn),
            f"block_{i}/attention/key": rotated(split(seen.outputs[f"{attn}.k_proj"], K), *turn),
            f"block_{i}/attention/value": split(seen.outputs[f"{attn}.v_proj"], K),
            f"block_{i}/attention/heads": split(seen.read[f"{attn}.o_proj"], N),
            f"block_{i}/attention/output": seen.outputs[f"{attn}.o_proj"],
            f"block_{i}/residual_mid": seen.read[norm],
            f"block_{i}/feed_forward/input": seen.outputs[norm],
            f"block_{i}/feed_forward/hidden": seen.read[f"{mlp}.down_proj"],
            f"block_{i}/feed_forward/output": seen.outputs[mlp],
            f"block_{i}/residual": seen.outputs[block],
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama])
def test_captured_places_match_transformers_hooks(make, tmp_path):
    folder = saved(randomised(make(), 3), tmp_path)
    ids = tokens(np.random.default_rng(5), 41, B, T)
    seen = Hooks(reopened(folder, transformers.AutoModelForCausalLM), ids)
    wanted = (values_of_gpt2 if make is gpt2 else values_of_llama)(seen)
    wanted |= {f"block_{i}/attention/weights": seen.weights[i] for i in range(L)}
    wanted["logits"] = seen.logits
    config, params = load_pretrained(folder)[:2]
    model, names = build(config), tuple(wanted)
    found = jax.jit(lambda params: model.apply({"params": params}, ids, capture=names)[2])(params)
    assert len(found) == 27 and {*places(config)} - {*found} == {
        f"block_{i}/attention/key_positions" for i in range(L)
    }
    for name, value in found.items():
        want = wanted[name].numpy()
        assert want.std() > 0.03 and np.isfinite(want).all(), name
        np.testing.assert_allclose(value, want, atol=LOGITS, err_msg=name)
