"""Keys of published config.json files that no family reads: accepted or rejected values."""

import json

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.pretrained.config_json import read_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.families.other_keys import OTHER_KEYS, aliases, other_keys

LLAMA = dict(
    vocab_size=29, hidden_size=64, intermediate_size=20, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
MIXED = dict(layer_types=["linear_attention", "full_attention"])
SIZES = {
    "gpt_oss": LLAMA | dict(rope_scaling=dict(rope_type="default")),
    "cohere": LLAMA | dict(rope_theta=1e4), "cohere2": LLAMA | dict(rope_theta=1e4),
    "helium": LLAMA | dict(head_dim=16),
    "olmo_hybrid": LLAMA | MIXED | dict(rope_theta=None),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), LLAMA | MIXED),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        LLAMA | dict(num_key_value_heads=4, first_k_dense_replace=1, num_experts_per_tok=2),
    ),
    "kimi_linear": LLAMA | MIXED | dict(num_key_value_heads=4),
    "lfm2": LLAMA | dict(full_attn_idxs=[1]),
    "persimmon": {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
}  # fmt: skip
"""Required keys per family; other families have defaults, or need only those of Llama."""
DEFAULTED = (
    "gpt2 gptj bloom opt falcon gpt_neox bert roberta xlm-roberta camembert mpnet distilbert "
    "electra albert modernbert nomic_bert t5 mt5 bart mbart pegasus m2m_100 marian"
).split()


KDA = dict(kda_layers=[1], full_attn_layers=[2], num_heads=3, head_dim=6, short_conv_kernel_size=2)


def plain(family):
    return {"model_type": family, **({} if family in DEFAULTED else SIZES.get(family, LLAMA))}


def read(family, **keys):
    names = [f"decoder.{i}" for i in range(9)] if family in ("t5", "mt5") else ()
    content = json.loads(json.dumps({**plain(family), **keys}))
    return read_config(content, names, "config.json")


# Each entry has the unread keys of a published config.json
PUBLISHED = {
    "Qwen3-Coder-30B-A3B": ("qwen3_moe", dict(qkv_bias=False, shared_expert_intermediate_size=0,
        use_qk_norm=True, mlp_only_layers=[], max_window_layers=28, sliding_window=None,
        use_sliding_window=False, output_router_logits=False)),
    "Qwen3 with the keys of Qwen3-Coder": ("qwen3", dict(qkv_bias=False, mlp_bias=False)),
    "Qwen2 with the keys of Qwen3": ("qwen2", dict(use_qk_norm=False, mlp_bias=False)),
    "DeepSeek-R1-Distill-Qwen": ("qwen2", dict(use_mrope=False, sliding_window=4096)),
    "Qwen2.5-1M": ("qwen2", dict(dual_chunk_attention_config={"chunk_size": 262144})),
    "DeepSeek-V2-Lite": ("deepseek_v2", dict(aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1,
        n_group=1, norm_topk_prob=False, pretraining_tp=1, scoring_func="softmax", seq_aux=True,
        topk_group=1, topk_method="greedy", attention_bias=False,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"})),
    "DeepSeek-V3": ("deepseek_v3", dict(ep_size=1, moe_layer_freq=1, num_nextn_predict_layers=1,
        scoring_func="sigmoid", topk_method="noaux_tc", attention_bias=False,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})),
    "Kimi-Linear-48B-A3B": ("kimi_linear", dict(head_dim=72, mla_use_nope=True, moe_layer_freq=1,
        moe_router_activation_func="sigmoid", num_nextn_predict_layers=0, rope_scaling=None,
        rope_theta=10000.0, use_grouped_topk=True,
        auto_map={"AutoConfig": "configuration_kimi.KimiLinearConfig"})),
    "LFM2-1.2B": ("lfm2", dict(block_auto_adjust_ff_dim=True, block_dim=64, block_ff_dim=20,
        block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256,
        block_norm_eps=1e-5, block_out_init_scale=1.0, block_use_swiglu=True,
        block_use_xavier_init=True, conv_L_cache=3, conv_bias=False, conv_dim=64, conv_dim_out=64,
        conv_use_xavier_init=True, eos_token_id=7, num_heads=4, rope_theta=1e6, theta=1e6,
        tie_embedding=True, use_pos_enc=True)),
    "Qwen3-Next": ("qwen3_next", dict(decoder_sparse_step=1, mlp_only_layers=[],
        output_router_logits=False, use_sliding_window=False)),
    "Qwen3.5": ("qwen3_5_text", dict(attn_output_gate=True, mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, output_gate_type="swish")),
    "Apertus": ("apertus", dict(mlp_bias=False, post_norm=False, qk_norm=True)),
    "Hunyuan": ("hunyuan_v1_dense", dict(norm_type="rms", use_qk_norm=True, class_num=0,
        add_classification_head=False, dense_list=[4096, 0], im_start_id=4, mask_init_id=12)),
    "unsloth": ("llama", dict(unsloth_version="2025.9.1", unsloth_fixed=True)),
    "SmolLM2": ("llama", {"transformers.js_config": {"dtype": {}}, "is_llama_config": True,
        "rope_interleaved": False, "pretraining_tp": 1}),
    "OPT 1.3B": ("opt", dict(output_projection=True, _remove_final_layer_norm=False, prefix="</s>",
        layerdrop=0.0)),
    "Falcon 11B": ("falcon", dict(ff_factor=4, new_decoder_architecture=True,
        num_attention_heads=32, num_kv_heads=8, hidden_size=4096)),
    "ms-marco-MiniLM": ("bert",
        dict(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
        sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})),
    "ms-marco-TinyBERT": ("bert", dict(cell={}, emb_size=312, pre_trained="", structure=[],
        training="")),
    "deepset/roberta-base-squad2": ("roberta", dict(language="english", name="Roberta")),
    "snowflake-arctic-embed": ("bert", dict(matryoshka_dimensions=[256])),
    "gpt-neox-20b": ("gpt_neox", dict(attention_probs_dropout_prob=0, hidden_dropout_prob=0)),
    "dolly-v2": ("gpt_neox", dict(custom_pipelines={"text-generation": {"impl": "a.B",
        "pt": "C"}})),
    "distilbart": ("bart", dict(eos_token_ids=[2], replacing_rate=0, student_decoder_layers=None,
        student_encoder_layers=None, extra_pos_embeddings=2, save_step=58,
        static_position_embeddings=False, num_hidden_layers=12)),
    "starcoder2-15b": ("starcoder2", dict(attention_softmax_in_fp32=True,
        scale_attention_softmax_in_fp32=True, scale_attn_weights=True, mlp_type="default",
        norm_type="layer_norm")),
    "stablelm-3b": ("stablelm", dict(norm_eps=1e-5, rope_pct=0.25, rotary_scaling_factor=1.0)),
    "phi-2": ("phi", dict(auto_map={"AutoConfig": "x"}, qk_layernorm=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_ignored_published_keys_have_no_effect(name):
    family, keys = PUBLISHED[name]
    core = {name: keys[name] for name in keys if name not in other_keys(family)}
    core = {name: value for name, value in core.items() if name not in aliases(family)}
    assert len(core) < len(keys)
    assert read(family, **keys) == read(family, **core)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_common_to_all_models_have_no_effect(family):
    keys = {
        "quantization_config": None, "model_max_length": 512, "transformers.js_config": {},
        "unsloth_version": "2026.1", "_commit_hash": "abc", "num_beams": 4, "do_sample": True,
        "use_cache": False, "task_specific_params": {}, "head_room": None, "auto_map": None,
        "tie_encoder_decoder": False, "add_cross_attention": None, "pruned_heads": {},
    }  # fmt: skip
    if "model_max_length" in aliases(family).values():
        del keys["model_max_length"]
    assert read(family, **keys) == read(family)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", dict(qkv_bias=True), "qkv_bias is True: must be False"),
        ("qwen3_moe", dict(shared_expert_intermediate_size=64), "is 64: must be 0"),
        ("qwen3_moe", dict(use_qk_norm=False), "use_qk_norm is False: must be True"),
        ("qwen3", dict(qkv_bias=True), "qkv_bias is True: must be False"),
        ("qwen2", dict(use_qk_norm=True), "use_qk_norm is True: must be False"),
        ("qwen2", dict(attention_bias=False), "attention_bias is False: must be True"),
        ("hunyuan_v1_dense", dict(use_qk_norm=False), "use_qk_norm is False: must be True"),
        ("hunyuan_v1_dense", dict(rope_scaling=dict(type="linear", factor=1.0, alpha=9.0)),
         "alpha needs rope_type 'dynamic'"),
        ("hunyuan_v1_dense", dict(rope_scaling=dict(type="dynamic", factor=1.0, alpha=-9.0)),
         "alpha is -9.0: must be positive"),
        ("qwen3_next", dict(decoder_sparse_step=2), "decoder_sparse_step is 2: must be 1"),
        ("qwen3_next", dict(mlp_only_layers=[0]), r"mlp_only_layers is \[0\]: must be \[\] or"),
        ("qwen3_next", dict(hidden_act="gelu"), "hidden_act is 'gelu': must be 'silu', because"),
        ("qwen3_next", dict(layer_types=["full_attention"] * 2), "must contain linear_attention"),
        ("qwen3_5_text", dict(layer_types=["linear_attention"]), "must be a list of 2 "),
        ("qwen3_next", dict(use_sliding_window=True), "use_sliding_window is True: must be False"),
        ("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate is False: must be True"),
        ("qwen3_5_text", dict(mamba_ssm_dtype="bfloat16"), "is 'bfloat16': must be 'float32'"),
        ("qwen3_5_text", dict(output_gate_type="sigmoid"), "is 'sigmoid': must be 'swish'"),
        ("apertus", dict(qk_norm=False), "qk_norm is False: must be True"),
        ("apertus", dict(post_norm=True), "post_norm is True: must be False"),
        ("apertus", dict(mlp_bias=True), "mlp_bias is True: must be False"),
        ("hunyuan_v1_dense", dict(norm_type="layer"), "norm_type is 'layer': must be 'hf_rms' or"),
        ("hunyuan_v1_dense", dict(head_dim=2, rope_scaling=dict(type="dynamic", factor=1.0,
         alpha=9.0)), "head_dim is 2: must exceed 2, because rope_scaling has alpha"),
        ("deepseek_v3", dict(num_nextn_predict_layers=-1), "is -1: must be an integer from 0"),
        ("deepseek_v3", dict(num_mtp_layers=1, num_nextn_predict_layers=2),
         "num_mtp_layers is 1: must equal num_nextn_predict_layers, 2"),
        ("deepseek_v2", dict(partial_rotary_factor=0.5),
         "partial_rotary_factor is 0.5: must be 1, because qk_rope_head_dim"),
        ("deepseek_v3", dict(rope_parameters=dict(partial_rotary_factor=0.5)),
         "partial_rotary_factor is 0.5: must be 1, because qk_rope_head_dim"),
        ("deepseek_v3", dict(n_group=7), "n_group is 7: must divide the number of experts, 256, i"),
        ("deepseek_v3", dict(n_group=256), "n_group is 256: must divide .* groups of at least 2"),
        ("deepseek_v3", dict(topk_group=9), "topk_group is 9: must be at most n_group, 8"),
        ("deepseek_v3", dict(topk_group=1, num_experts_per_tok=33),
         "num_experts_per_tok is 33: must be at most 32, the number of experts in topk_group"),
        ("olmo_hybrid", dict(layer_types=["linear_attention"] * 2),
         "must contain linear_attention and full_attention"),
        ("olmo_hybrid", dict(rope_theta=None, rope_scaling=dict(type="linear", factor=2.0),
         rope_parameters=dict(rope_theta=1e4)), "rope_scaling is .*: must be absent"),
        ("apertus", dict(rope_theta=1e4), "rope_theta is 10000.0: needs rope_parameters or"),
        ("kimi_linear", dict(tie_word_embeddings=True), "tie_word_embeddings is True: must be Fal"),
        ("kimi_linear", dict(mla_use_nope=False), "mla_use_nope is False: must be True"),
        ("kimi_linear", dict(hidden_act="gelu"), "hidden_act is 'gelu': must be 'silu', because"),
        ("kimi_linear", dict(layer_types=["full_attention"] * 2), "must contain linear_attention"),
        ("kimi_linear", dict(mlp_layer_types=["sparse", "dense"]), "first 'dense', then 'sparse'"),
        ("kimi_linear", dict(mlp_layer_types=["dense"] * 2, first_k_dense_replace=1),
         "first_k_dense_replace is 1: must agree with mlp_layer_types"),
        ("kimi_linear", dict(num_expert_group=7), "num_expert_group is 7: must divide the number"),
        ("kimi_linear", dict(linear_attn_config=KDA | dict(kda_layers=[2], full_attn_layers=[1])),
         "layer_types is .*: must agree with the lists in linear_attn_config"),
        ("kimi_linear", dict(linear_attn_config=KDA, linear_num_heads=4),
         "linear_num_heads is 4: must equal linear_attn_config.num_heads, 3"),
        ("kimi_linear", dict(linear_head_dim=0), "linear_head_dim is 0: must be an integer from 1"),
        ("kimi_linear", dict(linear_attn_config=[1]), "linear_attn_config is .*: must be an obj"),
        ("kimi_linear", dict(num_expert_group=128, topk_group=1, num_experts_per_token=3),
         "num_experts_per_token is 3: must be at most 2, the number of experts in"),
        ("kimi_linear", dict(layer_types=None, linear_attn_config=KDA | dict(kda_layers=[1, 2])),
         r"linear_attn_config: full_attn_layers is \[2\]: must be a list of numbers from 1"),
        ("kimi_linear", dict(layer_types=None, linear_attn_config=KDA | dict(kda_layers=[])),
         r"full_attn_layers is \[2\]: must contain 1, which is not in kda_layers either"),
        ("kimi_linear", dict(layer_types=None, linear_attn_config=KDA | dict(scale=2)),
         "linear_attn_config: scale is 2: this key is not"),
        ("lfm2", dict(block_ff_dim=44), "block_ff_dim is 44: must equal intermediate_size, 20"),
        ("lfm2", dict(tie_embedding=True, tie_word_embeddings=False), "must equal tie_word_emb"),
        ("lfm2", dict(full_attn_idxs=[2]), "must be a list of different numbers from 0 to 1"),
        ("lfm2", dict(full_attn_idxs=[0, 1]), "must contain conv and full_attention"),
        ("lfm2", dict(layer_types=["full_attention", "conv"]), "must agree with full_attn_idxs"),
        ("lfm2", dict(full_attn_idxs=None), "layer_types is None: must be a list of 2"),
        ("lfm2", dict(intermediate_size=1), "is 1: block_auto_adjust_ff_dim computes 0: must be"),
        ("lfm2", dict(use_pos_enc=False), "use_pos_enc is False: must be True"),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob is True: must be False"),
        ("exaone4", dict(sliding_window=None, layer_types=["sliding_attention", "full_attention"]),
         "sliding_window is None: must be a number, because layer_types has windows"),
        ("exaone4", dict(sliding_window_pattern="LG"), "sliding_window_pattern is 'LG': must be"),
        ("helium", dict(head_dim=12), "head_dim is 12: must be hidden_size / num_attention_heads"),
        ("llama", dict(hidden_act="xielu"), "hidden_act is 'xielu': must be one of"),
        ("opt", dict(output_projection=False), "output_projection is False: must be True"),
        ("falcon", dict(ff_factor=3), "ff_factor is 3: must be 4"),
        ("falcon", dict(alibi=True), "alibi is True: must be False"),
        ("llama", dict(layer_types=["full_attention", "sliding_attention"]),
         "layer_types is .*: must be a list of 'full_attention'"),
        ("llama", dict(quantization_config={"bits": 4}), "quantization_config is .*: this key"),
        ("llama", dict(pretraining_tp=2), "pretraining_tp is 2: must be 1 or None"),
        ("gpt2", dict(hidden_size=64, n_embd=48), "hidden_size is 64: must equal n_embd, 48"),
        ("gpt2", dict(scale_attn_weights=None), "scale_attn_weights is None: must be True"),
        ("bart", dict(num_hidden_layers=6), "num_hidden_layers is 6: must equal encoder_layers"),
        ("bart", dict(is_encoder_decoder=False), "is_encoder_decoder is False: must be True"),
        ("bert", dict(is_decoder=True), "is_decoder is True: must be False"),
        ("stablelm", dict(rope_pct=0.5), "rope_pct is 0.5: must be 0.25"),
        ("nomic_bert", dict(mlp_fc1_bias=True), "mlp_fc1_bias is True: must be False"),
        ("llama", dict(rope_condense_ratio=8), "rope_condense_ratio is 8: this key is not"),
    ],
)  # fmt: skip
def test_keys_with_effect_are_rejected_by_name(family, keys, message):
    with pytest.raises(ConfigError, match=message):
        read(family, **({"encoder_layers": 12} if family == "bart" else {}), **keys)


def test_alternative_key_names_are_accepted():
    assert read("gpt2", hidden_size=48, num_attention_heads=4) == read("gpt2", n_embd=48, n_head=4)
    assert read("t5", head_dim=32, d_kv=32) == read("t5", d_kv=32)


def test_layers_of_kimi_linear_are_read_from_lists_or_types():
    flat = dict(linear_num_heads=3, linear_head_dim=6, linear_conv_kernel_dim=2)
    found = read("kimi_linear", layer_types=None, linear_attn_config=KDA)
    assert found == read("kimi_linear", **flat)
    assert found == read("kimi_linear", linear_attn_config=KDA, **flat)  # as transformers saves it
    assert found.gated_delta.num_key_heads == 3 and found.gated_delta.conv_width == 2
    assert found.mixers == ("gated_delta", "latent_attention")


def test_olmo_hybrid_ignores_the_interval_of_full_attention():
    """Unlike in Qwen3-Next, every fourth layer has full attention, or the last of fewer layers."""
    state, full = "gated_delta", "attention"
    keys = dict(layer_types=None, num_hidden_layers=8)
    assert read("qwen3_next", full_attention_interval=2, **keys).mixers == (state, full)
    for extra in {}, dict(full_attention_interval=2):
        assert read("olmo_hybrid", **keys, **extra).mixers == (state, state, state, full)
    short = read("olmo_hybrid", layer_types=None, num_hidden_layers=3)
    assert short.mixers == (state, state, full)


def test_attn_factor_is_ignored_like_in_transformers():
    """DeepSeek-R1-0528-Qwen3-8B has it in addition to YaRN's attention_factor."""
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
    one = read("qwen3", rope_scaling=scaling | dict(attn_factor=0.8782, finetuned=True))
    assert one == read("qwen3", rope_scaling=scaling)
    with pytest.raises(ConfigError, match=r"extrapolation_factor is 2.0: must be 1.0 or 1"):
        read("qwen3", rope_scaling=scaling | dict(extrapolation_factor=2.0))


def test_null_dropout_means_zero():
    assert read("llama", attention_dropout=None).attention_dropout == 0


def test_key_table_refers_only_to_existing_families():
    named = {name for entry in OTHER_KEYS for name in entry.families.split()}
    assert named <= {*FAMILIES, "rope"}
    assert all(entry.why and (entry.ignored or entry.fixed) for entry in OTHER_KEYS)


@pytest.mark.slow
def test_every_transformers_config_key_is_handled():
    """Compares with the config classes of the installed version."""
    transformers = pytest.importorskip("transformers")
    import dataclasses

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from transformer_jax.pretrained.config_json import read_keys

    generation = transformers.GenerationConfig._get_default_generation_params()
    unknown, gone = {}, {}
    for family in FAMILIES:
        kind = CONFIG_MAPPING[family]
        fields = {field.name for field in dataclasses.fields(kind)}
        theirs = {*fields, *kind.attribute_map, *generation}
        names = [f"decoder.{i}" for i in range(9)] if family in ("t5", "mt5") else ()
        _, keys = read_keys(plain(family), names, "config.json")
        ours = keys.taken | keys._ignored | set(other_keys(family)) | set(aliases(family))
        unknown[family] = sorted(theirs - ours)
        pairs = {frozenset(pair) for pair in kind.attribute_map.items()}
        if family == "lfm2":  # its class reads these names in __post_init__
            pairs |= {*map(frozenset, aliases(family).items())}
        gone[family] = [pair for pair in aliases(family).items() if frozenset(pair) not in pairs]
    assert {f: names for f, names in unknown.items() if names} == {}
    assert {f: names for f, names in gone.items() if names} == {}
