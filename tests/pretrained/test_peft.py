"""Adapters in PEFT: same results, and files that both libraries can read.

Requires torch, transformers, and peft.
"""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,  # adapter files also have fast tests without torch
    pytest.mark.filterwarnings("ignore"),  # warnings of torch, transformers, and peft
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

from transformer_jax.config import LoraConfig, ModelConfig  # noqa: E402
from transformer_jax.models.factory import build, init_params  # noqa: E402
from transformer_jax.models.lora import apply_lora, init_lora, merge_lora  # noqa: E402
from transformer_jax.models.stack import stack_layers  # noqa: E402
from transformer_jax.pretrained.load import load_pretrained  # noqa: E402
from transformer_jax.pretrained.peft import load_lora, save_lora  # noqa: E402
from transformer_jax.pretrained.save import save_pretrained  # noqa: E402
from transformer_jax.pretrained.tensors import tensor_names  # noqa: E402

LOGITS = 1e-5
TOKENS = np.random.default_rng(5).integers(0, 31, (2, 13))

LLAMA = ModelConfig(
    vocab_size=31, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=37, max_len=41,
    positions="rope", norm="rmsnorm", norm_eps=1e-6, activation="silu", glu=True, use_bias=False,
    tie_embeddings=False, init_std=0.1,
)  # fmt: skip
GPT2 = ModelConfig(
    vocab_size=31, d_model=24, num_layers=2, num_heads=4, d_ff=37, max_len=41, init_std=0.1
)

FAMILIES = {
    "llama": (LLAMA, ("query", "out", "down")),
    "gpt2": (GPT2, ("query", "value", "out", "up", "down")),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path_factory):
    """A config, its parameters, the same model in transformers, names, and targets."""
    config, targets = FAMILIES[request.param]
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
        init_params(config, jax.random.key(3)),
    )
    folder = tmp_path_factory.mktemp("base") / "m"
    save_pretrained(folder, config, params, family=request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return config, params, model, tensor_names(config, request.param), targets


def logits(config, params):
    out = build(config).apply({"params": params}, jnp.array(TOKENS, jnp.int32))[0]
    return np.asarray(out)


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def equal(actual, expected):
    assert np.isfinite(expected).all() and expected.shape == (2, 13, 31)
    assert np.abs(actual - expected).max() <= LOGITS


@pytest.mark.parametrize("rslora", [False, True])
def test_saved_adapters_match_when_loaded_by_peft(family, tmp_path, rslora):
    config, params, model, names, targets = family
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets, rslora=rslora)
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
        init_lora(params, lora, jax.random.key(4)),
    )
    before = their_logits(model)
    equal(logits(config, params), before)
    save_lora(tmp_path, params, adapters, lora, names, fan_in_fan_out=config is GPT2)
    expected = their_logits(peft.PeftModel.from_pretrained(model, tmp_path))
    assert np.abs(expected - before).max() > 0.1
    equal(logits(config, apply_lora(params, adapters, lora)), expected)
    equal(logits(config, merge_lora(params, adapters, lora)), expected)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("layers", [None, [1]])
def test_adapters_saved_by_peft_match_when_loaded(family, tmp_path, scan, layers):
    config, params, model, names, _ = family
    fused = config is GPT2
    theirs = ["c_attn", "mlp.c_proj"] if fused else ["q_proj", "v_proj", "o_proj", "down_proj"]
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=theirs, lora_dropout=0.1, task_type="CAUSAL_LM",
            layers_to_transform=layers, fan_in_fan_out=fused, use_rslora=scan,
        ),
    ).eval()  # fmt: skip
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(tmp_path)
    params = stack_layers(params) if scan else params
    config = replace(config, scan_layers=scan)
    lora, adapters = load_lora(tmp_path, params, names)
    wanted = ("down", "key", "query", "value") if fused else ("down", "out", "query", "value")
    assert (lora.rank, lora.alpha, lora.rslora) == (4, 6.0, scan)
    assert lora.targets == wanted and lora.layers == (None if layers is None else (1,))
    expected = their_logits(adapted)
    assert np.abs(expected - logits(config, params)).max() > 0.1
    equal(logits(config, apply_lora(params, adapters, lora)), expected)


def test_adapters_for_bare_encoder_have_unprefixed_names(tmp_path):
    """A `BertModel` with PEFT adapters matches the encoder of this library."""
    theirs = transformers.BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=37, max_position_embeddings=41,
    )  # fmt: skip
    torch.manual_seed(9)
    model = transformers.BertModel(theirs).eval()
    model.save_pretrained(tmp_path / "base")
    config, params = load_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query", "dense"]))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "peft")
    names = tensor_names(config, "bert", bare=True)
    lora, adapters = load_lora(tmp_path / "peft", params, names)
    save_lora(tmp_path / "ours", params, adapters, lora, names, task_type=None)
    again = transformers.BertModel.from_pretrained(tmp_path / "base").eval()
    ours = encoded(config, params)
    plain = their_states(again)
    assert np.abs(ours - plain).max() <= LOGITS
    ours = encoded(config, apply_lora(params, adapters, lora))
    for peer in (adapted, peft.PeftModel.from_pretrained(again, tmp_path / "ours")):
        wanted = their_states(peer.eval())
        assert np.abs(wanted - plain).max() > 0.1
        assert np.abs(ours - wanted).max() <= LOGITS


def encoded(config, params):
    return np.asarray(build(config).apply({"params": params}, TOKENS, method="encode"))


def their_states(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).last_hidden_state.numpy()


def test_adapter_initialization_matches_peft(family):
    """Both draw A from U(-bound, bound) with the same bound."""
    _, params, model, _, _ = family
    if isinstance(model, transformers.GPT2LMHeadModel):
        return
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules=["q_proj"]))
    theirs = next(w for name, w in adapted.named_parameters() if "lora_A" in name).detach().numpy()
    lora = LoraConfig(rank=64, targets=("query",))
    ours = init_lora(params, lora, jax.random.key(1))["decoder"]["block_0"]["attention"]["query"]
    for a in (theirs, np.asarray(ours["a"])):
        assert a.size == 64 * 24
        assert 0.99 * 24**-0.5 < np.abs(a).max() <= 24**-0.5
        assert abs(a.std() * (3 * 24) ** 0.5 - 1) < 0.05
