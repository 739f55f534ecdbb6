"""DeepSeek-V2 and V3 with random sizes and options, compared with `transformers`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file

from tests.support.published import LOGITS, randomised, reopened, saved, tokens, torch, transformers
from transformer_jax.models.factory import build, init_cache
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

VOCAB, ROWS, PROMPT, LENGTH = 71, 2, 19, 29


def draw(seed: int) -> Any:
    """Return a random model of DeepSeek-V2 (even seeds) or V3."""
    rng = np.random.default_rng(seed)
    one = lambda *options: options[rng.integers(len(options))]  # noqa: E731
    version, heads, size, groups = 2 + seed % 2, one(2, 3, 4), one(2, 3), one(1, 2, 4)
    top = int(rng.integers(1, groups + 1))
    layers = one(1, 2, 3)
    keys: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=12 * one(2, 3), intermediate_size=one(20, 36),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=one(None, 10, 16), kv_lora_rank=one(6, 12, 18), qk_nope_head_dim=one(4, 6, 10),
        qk_rope_head_dim=one(2, 4, 8), v_head_dim=one(3, 7, 8), n_routed_experts=groups * size,
        n_group=groups, topk_group=top, num_experts_per_tok=int(rng.integers(1, top * size + 1)),
        n_shared_experts=one(1, 2), moe_intermediate_size=one(8, 12),
        first_k_dense_replace=int(rng.integers(layers)), routed_scaling_factor=one(1.0, 1.6),
        rms_norm_eps=one(1e-6, 1e-2), tie_word_embeddings=one(True, False),
        max_position_embeddings=64, hidden_act=one("silu", "gelu"),
    )  # fmt: skip
    if version == 2:
        keys["topk_method"] = one("greedy", "group_limited_greedy")
    else:
        keys |= dict(norm_topk_prob=one(True, False), rope_interleave=one(True, False))
    rope: dict[str, Any] = dict(rope_type="default", rope_theta=one(1e4, 500.0))
    match one("default", "yarn", "yarn", "yarn", "linear"):
        case "yarn":
            rope |= dict(rope_type="yarn", factor=one(2.0, 40.0), beta_fast=one(32, 4), beta_slow=1)
            rope |= dict(original_max_position_embeddings=one(8, 16))
            rope |= one({}, dict(mscale=0.7, mscale_all_dim=0.7), dict(mscale_all_dim=1.0),
                        dict(mscale=1.0, mscale_all_dim=0.4), dict(attention_factor=0.8),
                        dict(mscale=0.3))  # fmt: skip
        case "linear":
            rope |= dict(rope_type="linear", factor=3.0)
    name = f"DeepseekV{version}"
    config = getattr(transformers, f"{name}Config")(**keys, rope_parameters=rope)
    torch.manual_seed(seed)
    return randomised(getattr(transformers, f"{name}ForCausalLM")(config), seed=seed)


def differences(seed: int, folder: Any) -> tuple[float, float]:
    """Return the largest differences of logits, of a whole text and of decoding with a cache."""
    model = reopened(saved(draw(seed), folder), transformers.AutoModelForCausalLM)
    config, params = load_pretrained(folder)
    assert config.latent_attention is not None
    ids = tokens(np.random.default_rng(seed), VOCAB, ROWS, LENGTH)
    with torch.no_grad():
        want = model(torch.tensor(ids).long()).logits.numpy()
        begin = model(torch.tensor(ids[:, :PROMPT]).long(), use_cache=True)
        theirs, state = [begin.logits.numpy()], begin.cache
        for t in range(PROMPT, LENGTH):
            more = model(torch.tensor(ids[:, t : t + 1]).long(), cache=state)
            theirs, state = [*theirs, more.logits.numpy()], more.cache
    step = jax.jit(lambda tokens, cache: build(config).apply(
        {"params": params}, tokens, cache=cache))  # fmt: skip
    whole = build(config).apply({"params": params}, ids)[0]
    part, cache = step(ids[:, :PROMPT], init_cache(config, ROWS, LENGTH))
    ours = [np.asarray(part)]
    for t in range(PROMPT, LENGTH):
        part, cache = step(ids[:, t : t + 1], cache)
        ours.append(np.asarray(part))
    scale = max(1.0, np.abs(want).max() / 10)
    decoded = np.abs(np.concatenate(ours, axis=1) - np.concatenate(theirs, axis=1))
    return float(np.abs(whole - want).max() / scale), float(decoded.max() / scale)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.long)
                                               for s in range(4, 24))])  # fmt: skip
def test_prompt_decoding_and_files_match_transformers(seed, tmp_path):
    whole, decoded = differences(seed, tmp_path / "m")
    assert whole <= LOGITS and decoded <= LOGITS, (whole, decoded)
    config, params = load_pretrained(tmp_path / "m")
    family = f"deepseek_v{2 + seed % 2}"
    save_pretrained(tmp_path / "again", config, params, family=family)
    assert load_pretrained(tmp_path / "again")[0] == config
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "again"))
    assert {name: (x.dtype, x.shape, x.tobytes()) for name, x in one.items()} == {
        name: (x.dtype, x.shape, x.tobytes()) for name, x in two.items()
    }
    first, second = (
        reopened(tmp_path / name, transformers.AutoModelForCausalLM) for name in ("m", "again")
    )
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.allclose(first(ids).logits, second(ids).logits, rtol=0, atol=1e-5)
