"""Lens and attribution of published models against the hidden states of transformers."""

import jax
import numpy as np
import pytest

from tests.support.published import LOGITS, randomised, reopened, saved, torch, transformers
from transformer_jax.interpret import logit_attribution, logit_lens, zero
from transformer_jax.models.factory import build
from transformer_jax.pretrained.load import load_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKENS = np.random.default_rng(5).integers(3, 40, (2, 7), dtype=np.int32)


def gpt2():
    config = transformers.GPT2Config(vocab_size=41, n_positions=17, n_embd=16, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=23, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=17,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama])
def test_published_model_streams_match_transformers(make, tmp_path):
    folder = saved(randomised(make(), 3), tmp_path)
    theirs = reopened(folder, transformers.AutoModelForCausalLM)
    config, params = load_pretrained(folder)[:2]
    model = build(config)
    ids = torch.from_numpy(TOKENS.astype(np.int64))
    body, heads = theirs.base_model, config.num_heads
    norm = body.ln_f if make is gpt2 else body.norm
    with torch.no_grad():
        found = theirs(ids, output_hidden_states=True)
        wanted = [theirs.lm_head(norm(x)) for x in found.hidden_states[:-1]] + [found.logits]
    lens = jax.jit(lambda own, x: logit_lens(model, own, x))(params, TOKENS)
    for i, want in enumerate(wanted):
        np.testing.assert_allclose(lens[:, i], want, atol=LOGITS)
    parts = jax.jit(lambda own, x: logit_attribution(model, own, x, 3, 19))(params, TOKENS)
    difference = (found.logits[..., 3] - found.logits[..., 19]).numpy()
    np.testing.assert_allclose(parts.total(), difference, atol=LOGITS)
    assert parts.heads.shape == (2, 2, heads, 7)
    with torch.no_grad():  # remove head 2 of the second block
        width = 16 // heads
        cut = slice(2 * width, 3 * width)
        if make is gpt2:
            body.h[1].attn.c_proj.weight[cut] = 0
        else:
            body.layers[1].self_attn.o_proj.weight[:, cut] = 0
        without = theirs(ids).logits
    edit = zero("block_1/attention/heads", heads=2)
    ours = jax.jit(lambda own, x: model.edited(edit).apply({"params": own}, x)[0])(params, TOKENS)
    np.testing.assert_allclose(ours, without, atol=LOGITS)
    assert float((without - found.logits).abs().max()) > 100 * LOGITS
