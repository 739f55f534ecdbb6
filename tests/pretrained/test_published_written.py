"""Folders written by this library, read by `transformers` and `peft` without options."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.drawn import drawn
from tests.support.published import LOGITS, apply, torch, transformers
from transformer_jax.cli.convert import TASK_TYPES
from transformer_jax.config import (
    ConfigError,
    Experts,
    GatedDelta,
    Learned,
    LoraConfig,
    ModelConfig,
    Rope,
    ShortConv,
)
from transformer_jax.models.lora import apply_lora, init_lora
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.peft import save_lora
from transformer_jax.pretrained.save import check_tokenizer, save_pretrained
from transformer_jax.pretrained.tensors import tensor_names
from transformer_jax.text.save import tokenizer_files
from transformer_jax.tokenizers.trained import BPETokenizer, ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 61
"""A vocabulary size below most default ids of transformers' classes."""
LLAMA = dict(
    hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=48,
)  # fmt: skip
EXPERTS = LLAMA | dict(num_experts=3, num_local_experts=3, num_experts_per_tok=2)
DEEPSEEK = LLAMA | dict(
    num_key_value_heads=4, q_lora_rank=11, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=2,
    topk_group=2, moe_intermediate_size=20, first_k_dense_replace=0,
)  # fmt: skip
BERT = {name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"}
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_inner=44, n_positions=48)
BART = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=44, decoder_ffn_dim=44, max_position_embeddings=48,
)  # fmt: skip
T5 = dict(d_model=32, d_kv=8, d_ff=44, num_layers=1, num_heads=4)
STATES = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=6, linear_key_head_dim=5, linear_value_head_dim=7,
)  # fmt: skip
GLM_LIKE = "glm", "glm4", "ernie4_5", "seed_oss", "helium", "hunyuan_v1_dense"
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gptj": GPT2 | dict(rotary_dim=4),
    "gemma2": LLAMA | dict(sliding_window=7, head_dim=8, query_pre_attn_scalar=8),
    "gemma3_text": LLAMA | dict(sliding_window=7, head_dim=8, query_pre_attn_scalar=8),
    "gemma": LLAMA | dict(head_dim=8),
    "qwen3": LLAMA | dict(head_dim=8),
    "olmo3": LLAMA | dict(sliding_window=7, rope_theta=500_000.0),
    **dict.fromkeys(GLM_LIKE, LLAMA | dict(head_dim=8)),
    "exaone4": LLAMA | dict(sliding_window=7, sliding_window_pattern=2),
    "cohere": LLAMA | dict(rope_theta=1e4, logit_scale=1.0),
    "cohere2": LLAMA | dict(rope_theta=1e4, logit_scale=1.0, sliding_window=7),
    "gpt_neox": BERT | dict(rotary_pct=0.5),
    "phi": LLAMA,
    "stablelm": LLAMA,
    "persimmon": BERT,
    "opt": dict(
        hidden_size=32, ffn_dim=44, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=48,
    ),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4, seq_length=48),
    "falcon": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=48
    ),
    "mixtral": {n: v for n, v in EXPERTS.items() if n != "num_experts"},
    "olmoe": {n: v for n, v in EXPERTS.items() if n != "num_local_experts"},
    "qwen2_moe": {n: v for n, v in EXPERTS.items() if n != "num_local_experts"}
    | dict(moe_intermediate_size=20, shared_expert_intermediate_size=28),
    "qwen3_moe": {n: v for n, v in EXPERTS.items() if n != "num_local_experts"}
    | dict(moe_intermediate_size=20, head_dim=8),
    "gpt_oss": {n: v for n, v in EXPERTS.items() if n != "num_experts"}
    | dict(head_dim=8, sliding_window=7, rope_scaling=dict(rope_type="default")),
    "qwen3_next": {n: v for n, v in EXPERTS.items() if n != "num_local_experts"} | STATES
    | dict(moe_intermediate_size=20, shared_expert_intermediate_size=28),
    "qwen3_5_text": LLAMA | STATES,
    "olmo_hybrid": LLAMA | STATES | dict(rope_theta=None),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "kimi_linear": {n: v for n, v in DEEPSEEK.items() if n != "n_routed_experts"} | dict(
        layer_types=["linear_attention", "full_attention"], num_local_experts=4, linear_num_heads=3,
        linear_head_dim=8,
    ),
    "lfm2": LLAMA | dict(layer_types=["conv", "full_attention"], block_multiple_of=7),
    "distilbert": dict(dim=32, n_layers=2, n_heads=4, hidden_dim=44, max_position_embeddings=48),
    "albert": BERT | dict(embedding_size=12),
    "electra": BERT | dict(embedding_size=12),
    "modernbert": BERT | dict(local_attention=8),
    "t5": T5,
    "mt5": T5,
} | dict.fromkeys(("bart", "mbart", "pegasus", "m2m_100", "marian"), BART)  # fmt: skip
ENCODERS = (
    "bert roberta xlm-roberta camembert mpnet distilbert electra albert modernbert nomic_bert"
).split()


def config_of(family: str) -> ModelConfig:
    """Return a small config of a family, with random sizes unlike published ones."""
    content = dict(SIZES.get(family, BERT if family in ENCODERS else LLAMA), vocab_size=VOCAB)
    names = [f"decoder.{i}" for i in range(9)] if family in ("t5", "mt5") else ()
    config = read_config(dict(content, model_type=family), names, "config.json")
    config = dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
    if family in ENCODERS:
        config = dataclasses.replace(config, masked_token_head=True, logit_bias=True)
    return config


def small(params: Any) -> Any:
    """Scale parameters down, so that logits are small enough to compare."""
    return jax.tree.map(lambda x: x * np.float32(0.25), params)


HEADS = {
    "encoder": transformers.AutoModelForMaskedLM,
    "decoder": transformers.AutoModelForCausalLM,
    "encoder-decoder": transformers.AutoModelForSeq2SeqLM,
}


def differs(
    config: ModelConfig,
    folder: Path,
    rng: np.random.Generator,
    *,
    adapter: Path | None = None,
    params: Any = None,
) -> float:
    """Return the largest difference of logits from transformers, which only gets the folders."""
    ids = rng.integers(3, VOCAB - 10, (2, 19), dtype=np.int32)
    inputs = {"input_ids": torch.tensor(ids).long()}
    params = small(drawn(config)) if params is None else params
    model = HEADS[config.kind].from_pretrained(folder).eval()
    if adapter is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapter).eval()
    if config.kind == "encoder-decoder":
        got = apply(config, params)(ids, source=ids)[0]
        inputs["decoder_input_ids"] = inputs["input_ids"]
    else:
        got = apply(config, params)(ids)[0]
    with torch.no_grad():
        want = model(**inputs).logits.numpy()
    assert want.std() > 0.03
    return float(np.abs(np.asarray(got) - want).max() / max(1.0, np.abs(want).max() / 10))


OFTEN = {"llama", "phi3", "smollm3"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in OFTEN else pytest.mark.slow) for f in FAMILIES],
)
def test_transformers_loads_saved_folder(family, rng, tmp_path, caplog):
    """The vocabulary excludes the default ids of transformers' classes."""
    config = config_of(family)
    save_pretrained(tmp_path / "m", config, small(drawn(config)), family=family)
    assert differs(config, tmp_path / "m", rng) <= LOGITS
    read = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    ids = {name: value for name, value in vars(read).items() if name.endswith("_token_id")}
    if family == "marian":  # its class requires a number here, and its generate then fails
        assert ids.pop("decoder_start_token_id") == 58100
    if family in ("glm", "glm4"):  # their classes replace null, by tokens that are never generated
        assert ids.pop("eos_token_id") == [151329, 151336, 151338]
    assert all(value is None or value < VOCAB for value in ids.values()), ids


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses an old name of transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_all_linear_adapters_or_saving_fails(family, rng, tmp_path):
    """Adapters of experts and of a nomic_bert can only be merged."""
    config = config_of(family)
    params, lora = small(drawn(config)), LoraConfig(rank=2, alpha=3.0, targets="all-linear")
    adapters = jax.tree.map(
        lambda x: 0.2 * rng.standard_normal(x.shape, np.float32),
        init_lora(params, lora, jax.random.key(0)),
    )
    save_pretrained(tmp_path / "m", config, params, family=family)
    save = partial(
        save_lora, tmp_path / "adapter", params, adapters, lora, tensor_names(config, family),
        task_type=TASK_TYPES.get(config.kind), fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    if config.experts is not None or family == "nomic_bert":
        with pytest.raises(ValueError, match="merge"):
            save()
        return
    save()
    both = apply_lora(params, adapters, lora)
    assert differs(config, tmp_path / "m", rng, params=both) > 100 * LOGITS
    assert differs(config, tmp_path / "m", rng, params=both, adapter=tmp_path / "adapter") <= LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_names_match_golden_file(family):
    from tests.golden.write_names import FILE, saved

    assert saved(family)["tensors"] == json.loads(FILE.read_text())["families"][family]["tensors"]


TEXTS = "don't  two\n\n", " a\tb\n", "12345 it's HÉLLO", "", "<s> x </s>", "e\u0301"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tokenizer_produces_same_ids_in_transformers(family, tmp_path):
    """Characters, bytes, and a small BPE round-trip; a qwen2 is rejected."""
    content = write_config(FAMILIES[family], config_of(family))
    letters = "".join(sorted({*"".join(TEXTS)}))
    trained = BPETokenizer.train("don't do it twice; it's HÉLLO 12345\n" * 3, 280)
    for kind in (CharTokenizer(letters), ByteTokenizer(), trained):
        for name, data in tokenizer_files(kind, kind.vocab_size)[0].items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "config.json").write_text(json.dumps(content))
        definition = (tmp_path / "tokenizer.json").read_bytes()
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        got = [theirs(text).input_ids for text in TEXTS]
        want = [kind.encode(text).tolist() for text in TEXTS]
        if family == "qwen2":
            assert got != want
            with pytest.raises(ConfigError, match="save in the family llama"):
                check_tokenizer(family, definition)
            continue
        check_tokenizer(family, definition)
        assert got == want, type(kind)
        assert [theirs.decode(ids) for ids in got] == [*TEXTS]


KIMI_DELTA = GatedDelta(
    num_key_heads=2, num_value_heads=2, key_dim=6, value_dim=6, decay_rank=6, gate_rank=6,
    gate_activation="sigmoid",
)  # fmt: skip
EXPERTS_OF_V2 = Experts(
    count=6, top_k=2, d_ff=20, shared_d_ff=40, dense_layers=1, groups=3, top_groups=2,
    normalize=False, balance_loss=0.001,
)  # fmt: skip
STRETCHED = dict(scaling="yarn", factor=4.0, original_len=12)
CHANGES: dict[str, list[dict[str, Any]]] = {
    # Config fields that transformers reads from a separate key, or not at all
    "llama": [dict(positions=Rope(dims=4)), dict(positions=Rope(dims=4, **STRETCHED)),
        dict(positions=Rope(base=100.0, **STRETCHED)), dict(head_dim=12),
        dict(num_heads=3, num_kv_heads=1, head_dim=8), dict(tie_embeddings=True),
        dict(qkv_bias=True), dict(use_bias=True), dict(use_bias=True, ff_bias=False),
        dict(norm_eps=0.1), dict(window=5), dict(window=(5, None)), dict(qk_norm=True),
        dict(positions=Rope(scaling="linear", factor=2.0)), dict(positions=Rope(scaling="llama3",
        factor=4.0, original_len=16, low_freq_factor=1.0, high_freq_factor=4.0)),
        dict(positions=Rope(scaling="linear", factor=2.0, dims=4)),
        dict(qkv_bias=True, window=(None, 5)), dict(activation="relu"), dict(num_kv_heads=4),
        dict(attention_scale=0.5), dict(embedding_scale=3.0), dict(logit_scale=0.5),
        dict(qk_norm=True, head_dim=12), dict(norm_unit_offset=True, scale_embeddings=True),
        dict(norm_order="output", qk_norm=True, qk_norm_over="heads", norm_eps=1e-5)],
    "phi": [dict(positions=Rope(dims=4, **STRETCHED)), dict(num_kv_heads=4), dict(head_dim=12)],
    "stablelm": [dict(positions=Rope(dims=4, scaling="linear", factor=2.0)), dict(qkv_bias=True)],
    "gpt_neox": [dict(positions=Rope(dims=4, **STRETCHED)), dict(norm_order="pre"),
        dict(norm_eps=0.1)],
    "falcon": [dict(positions=Rope(dims=4)), dict(positions=Rope(**STRETCHED)),
        dict(use_bias=True)],
    "starcoder2": [dict(window=5), dict(positions=Rope(dims=4)), dict(tie_embeddings=False)],
    "gemma2": [dict(num_heads=3, num_kv_heads=1), dict(positions=Rope(dims=4)), dict(window=None),
        dict(attention_softcap=None), dict(logit_softcap=3.0), dict(attention_scale=None)],
    "gemma3_text": [dict(num_heads=3, num_kv_heads=1), dict(tie_embeddings=False),
        dict(positions=Rope(base=1e6, window_base=50.0)),
        dict(positions=Rope(base=1e6, window_base=50.0, scaling="linear", factor=2.0))],
    "cohere2": [dict(head_dim=12), dict(qkv_bias=True, out_bias=True), dict(window=None)],
    "granite": [dict(residual_scale=0.3), dict(positions=Rope(dims=4)), dict(head_dim=12)],
    "gpt2": [dict(activation="relu"), dict(tie_embeddings=False), dict(norm_eps=0.1)],
    "opt": [dict(norm_order="post"), dict(tie_embeddings=False), dict(activation="gelu")],
    "bert": [dict(type_vocab_size=5), dict(activation="relu"), dict(norm_eps=0.1)],
    "modernbert": [dict(window=None, positions=Rope(base=99.0)), dict(use_bias=True),
        dict(window=3)],
    "nomic_bert": [dict(positions=Rope(base=99.0)), dict(activation="gelu"), dict(head_dim=12)],
    "t5": [dict(tie_embeddings=False), dict(logit_scale=None), dict(num_decoder_layers=2)],
    "bart": [dict(logit_bias=True), dict(scale_embeddings=True)],
    "mbart": [dict(tie_embeddings=False, source_vocab_size=VOCAB)],
    "pegasus": [dict(tie_embeddings=False, source_vocab_size=VOCAB)],
    "m2m_100": [dict(tie_embeddings=False, source_vocab_size=VOCAB)],
    "marian": [ dict(tie_embeddings=False, source_vocab_size=VOCAB), dict(source_vocab_size=53),
        dict(source_vocab_size=VOCAB)],
    "mt5": [dict(tie_embeddings=False)],
    "qwen2": [dict(window=5), dict(window=(None, 5)), dict(positions=Rope(dims=4))],
    "smollm3": [dict(window=5), dict(positions=Rope(pattern=(True, False))),
        dict(window=(None, 5))],
    "olmoe": [dict(head_dim=12), dict(num_kv_heads=1)],
    "mistral": [dict(window=None), dict(window=(None, 5), head_dim=12)],
    "mixtral": [dict(window=5), dict(head_dim=12)],
    "gpt_oss": [dict(glu_limit=0.5)],
    "glm": [dict(positions=Rope()), dict(positions=Rope(dims=6, pairing="interleaved")),
        dict(positions=Rope(dims=4, pairing="interleaved", **STRETCHED)), dict(out_bias=True),
        dict(qkv_bias=None), dict(head_dim=12), dict(norm_eps=0.1)],
    "glm4": [dict(norm_order="output"), dict(positions=Rope(pairing="interleaved"))],
    "ernie4_5": [dict(use_bias=True), dict(qkv_bias=True), dict(head_dim=12),
        dict(positions=Rope(dims=4, pairing="interleaved")), dict(tie_embeddings=False),
        dict(positions=Rope(base=100.0, pairing="interleaved", **STRETCHED))],
    "seed_oss": [dict(qkv_bias=None), dict(out_bias=True), dict(ff_bias=True, head_dim=12),
        dict(positions=Rope(dims=4)), dict(use_bias=True)],
    "arcee": [dict(use_bias=True), dict(ff_bias=True), dict(glu=True), dict(head_dim=12),
        dict(num_heads=3, num_kv_heads=1, head_dim=8), dict(activation="gelu"),
        dict(positions=Rope(dims=4)), dict(positions=Rope(**STRETCHED)), dict(qkv_bias=True)],
    "nemotron": [dict(positions=Rope()), dict(positions=Rope(dims=6)), dict(qkv_bias=True),
        dict(qkv_bias=None, out_bias=None), dict(ff_bias=True), dict(norm_unit_offset=False),
        dict(use_bias=False), dict(positions=Rope(dims=4, **STRETCHED)), dict(head_dim=12)],
    "persimmon": [dict(qk_norm=False, qk_norm_kind="rmsnorm", qk_norm_bias=False),
        dict(qk_norm_bias=False), dict(positions=Rope()), dict(positions=Rope(dims=6)),
        dict(num_kv_heads=2), dict(head_dim=12), dict(use_bias=False), dict(norm_eps=0.1),
        dict(positions=Rope(dims=4, **STRETCHED)), dict(qk_norm_after_rope=True)],
    "hunyuan_v1_dense": [dict(use_bias=True, ff_bias=False), dict(qk_norm_after_rope=False),
        dict(positions=Rope(dims=4)), dict(positions=Rope(base=100.0, **STRETCHED)),
        dict(head_dim=None), dict(head_dim=12), dict(tie_embeddings=True),
        dict(qk_norm_over="own_head"), dict(qk_norm_kind="layernorm")],
    "qwen3_next": [dict(attention_gate=False), dict(norm_unit_offset=False), dict(qkv_bias=True),
        dict(use_bias=True, ff_bias=False), dict(positions=Rope()), dict(positions=Rope(dims=4)),
        dict(positions=Rope(dims=4, **STRETCHED)), dict(mixers=("attention", "gated_delta")),
        dict(mixers=None, gated_delta=None),
        dict(activation="relu"), dict(gated_delta=GatedDelta(num_key_heads=3, num_value_heads=3)),
        dict(gated_delta=GatedDelta(conv_width=2)), dict(norm_order="output"),
        dict(gated_delta=GatedDelta(negative_eigenvalues=True))],
    "qwen3_5_text": [dict(tie_embeddings=True), dict(qk_norm=False), dict(num_layers=3),
        dict(value_head_dim=4), dict(gated_delta=GatedDelta(norm_eps=0.1)), dict(norm_eps=0.1)],
    "olmo_hybrid": [dict(positions=Rope()), dict(positions=Rope(**STRETCHED)),
        dict(positions=Rope(dims=4)), dict(use_bias=True, ff_bias=False), dict(norm_order="pre"),
        dict(head_dim=12), dict(gated_delta=GatedDelta(norm_order="pre", norm_eps=1e-5)),
        dict(gated_delta=GatedDelta(norm_order="pre"))],
    "apertus": [dict(activation="relu_squared"), dict(positions=Rope()), dict(head_dim=12),
        dict(positions=Rope(base=100.0, **STRETCHED)), dict(positions=Rope(dims=4)),
        dict(use_bias=True, ff_bias=False), dict(qk_norm=False), dict(tie_embeddings=True)],
    "helium": [dict(qkv_bias=True), dict(out_bias=True), dict(ff_bias=True), dict(head_dim=12),
        dict(positions=Rope(dims=4, pairing="interleaved")), dict(tie_embeddings=True)],
    "exaone4": [dict(window=None), dict(window=7), dict(positions=None, window=None),
        dict(positions=Rope()), dict(positions=None), dict(head_dim=12), dict(window=(None, 7)),
        dict(window=None, positions=Rope(**STRETCHED)), dict(qk_norm=False), dict(qkv_bias=True)],
    "olmo3": [dict(window=None), dict(positions=Rope(base=500_000.0, **STRETCHED))],
    "roberta": [dict(positions=Learned(offset=5))],
    "mpnet": [dict(norm_eps=0.1)],
    "gptj": [dict(positions=Rope(pairing="interleaved")), dict(tie_embeddings=True)],
    "bloom": [dict(tie_embeddings=False)],
    "electra": [dict(embedding_dim=None)],
    "qwen3_moe": [dict(use_bias=True, ff_bias=False), dict(window=5), dict(qk_norm=False)],
    "deepseek_v2": [dict(attention_scale=0.5), dict(positions=Rope(pairing="half")),
        dict(positions=Rope(pairing="interleaved", **STRETCHED)), dict(positions=None),
        dict(positions=Rope(pairing="interleaved", attention_factor=1.1, **STRETCHED),
        attention_scale=0.5), dict(window=5), dict(tie_embeddings=True), dict(experts=None),
        dict(experts=EXPERTS_OF_V2),
        dict(experts=dataclasses.replace(EXPERTS_OF_V2, normalize=True)),
        dict(experts=dataclasses.replace(EXPERTS_OF_V2, shared_d_ff=30)),
        dict(experts=dataclasses.replace(EXPERTS_OF_V2, shared_d_ff=None)),
        dict(experts=dataclasses.replace(EXPERTS_OF_V2, group_best=2))],
    "deepseek_v3": [dict(positions=Rope(pairing="half")), dict(attention_sinks=True),
        dict(positions=Rope(pairing="interleaved", **STRETCHED), attention_scale=0.5),
        dict(experts=EXPERTS_OF_V2), dict(norm_eps=0.1), dict(mixers=None, latent_attention=None)],
    "kimi_linear": [dict(positions=Rope()), dict(mixers=("latent_attention", "gated_delta")),
        dict(gated_delta=GatedDelta()), dict(gated_delta=KIMI_DELTA),
        dict(gated_delta=dataclasses.replace(KIMI_DELTA, gate_activation="silu")),
        dict(gated_delta=dataclasses.replace(KIMI_DELTA, gate_rank=None)),
        dict(gated_delta=dataclasses.replace(KIMI_DELTA, decay_rank=5)),
        dict(gated_delta=dataclasses.replace(KIMI_DELTA, value_dim=7)),
        dict(experts=EXPERTS_OF_V2), dict(norm_eps=0.1), dict(tie_embeddings=True)],
    "lfm2": [dict(short_conv=ShortConv(conv_width=2, conv_bias=True)), dict(tie_embeddings=False),
        dict(mixers=("attention", "short_conv")), dict(mixers=None, short_conv=None),
        dict(mixers=("short_conv",), num_kv_heads=None, qk_norm=False), dict(qk_norm=False),
        dict(head_dim=12), dict(positions=Rope(dims=4)), dict(positions=Rope(**STRETCHED)),
        dict(norm_eps=0.1), dict(d_ff=50), dict(use_bias=True), dict(activation="relu")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "number"), [(f, i) for f, found in CHANGES.items() for i in range(len(found))]
)
def test_config_change_is_respected_by_transformers_or_rejected(family, number, rng, tmp_path):
    """Checks the named family and the first that can express the config."""
    config = dataclasses.replace(config_of(family), **CHANGES[family][number])
    written = []
    for name in (family, None):
        try:
            save_pretrained(tmp_path / f"{name}", config, small(drawn(config)), family=name)
        except ConfigError as error:
            assert len(str(error)) > 20
            continue
        written.append(json.loads((tmp_path / f"{name}/config.json").read_text())["model_type"])
        if written != [family, family]:
            assert differs(config, tmp_path / f"{name}", rng) <= LOGITS, written
