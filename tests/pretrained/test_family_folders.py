"""Folders of each family: round trips, tensor layout, and rejected configs."""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import drawn
from tests.support.model_folders import assert_loads
from transformer_jax.config import ConfigError, Experts, Learned, LoraConfig, Rope
from transformer_jax.interpret import logit_lens
from transformer_jax.models.factory import build
from transformer_jax.models.flops import forward_flops
from transformer_jax.models.lora import init_lora
from transformer_jax.models.places import places
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.families.table import Layout, Rows, joined
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.peft import save_lora
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.tensors import tensor_names

pytestmark = pytest.mark.usefixtures("quick_compilation")

FULL, LOCAL = "full_attention", "sliding_attention"
ENCODER = dict(
    vocab_size=29, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3,
)  # fmt: skip
SMALL = ENCODER | dict(num_hidden_layers=4, num_key_value_heads=1, max_position_embeddings=64)
WIDE = SMALL | dict(hidden_size=24, intermediate_size=11)
SMOL = SMALL | dict(model_type="smollm3")
COHERE = SMALL | dict(model_type="cohere", rope_theta=1e4, use_qk_norm=True)
COHERE2 = SMALL | dict(model_type="cohere2", rope_theta=1e4, sliding_window=5)
PHI3, OLMO2, GRANITE = (WIDE | dict(model_type=name) for name in ("phi3", "olmo2", "granite"))
OLMO3 = WIDE | dict(model_type="olmo3", sliding_window=5)
STABLE_NORMS = SMALL | dict(model_type="stablelm", qk_layernorm=True, partial_rotary_factor=0.5)
STABLE, CODER = (WIDE | dict(model_type=name) for name in ("stablelm", "starcoder2"))
NEOX, PHI = (
    {name: value for name, value in WIDE.items() if name != "num_key_value_heads"}
    | dict(model_type=kind, num_hidden_layers=2, max_position_embeddings=17)
    for kind in ("gpt_neox", "phi")
)
GPTJ = dict(model_type="gptj", vocab_size=29, n_embd=24, n_layer=2, n_head=3, rotary_dim=4)
OPT = dict(model_type="opt", vocab_size=29, hidden_size=24, ffn_dim=11, num_attention_heads=3)
BLOOM = dict(model_type="bloom", vocab_size=29, hidden_size=24, n_layer=2, n_head=3)
FALCON = dict(
    model_type="falcon", vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6,
)  # fmt: skip
EXPERTS = ENCODER | dict(num_key_value_heads=1, max_position_embeddings=17)
MIXTRAL = EXPERTS | dict(model_type="mixtral", num_local_experts=3)
QWEN2 = EXPERTS | dict(
    model_type="qwen2_moe", num_experts=4, moe_intermediate_size=6, num_experts_per_tok=3,
    shared_expert_intermediate_size=8,
)  # fmt: skip
QWEN = EXPERTS | dict(
    model_type="qwen3_moe", num_experts=4, moe_intermediate_size=6, num_experts_per_tok=3,
    head_dim=4,
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=29, hidden_size=64, intermediate_size=32, head_dim=4,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_local_experts=30,
    num_experts_per_tok=2, max_position_embeddings=64, rope_theta=150000,
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
    beta_fast=32.0, beta_slow=1.0, truncate=False),
)  # fmt: skip
"""A config with more experts than tensors, since one tensor contains all experts."""
APERTUS = WIDE | dict(model_type="apertus", num_hidden_layers=1)
DEEPSEEK = ENCODER | dict(
    model_type="deepseek_v3", num_key_value_heads=3, max_position_embeddings=17, q_lora_rank=None,
    kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    moe_intermediate_size=6,
)  # fmt: skip
BERT, ROBERTA = (ENCODER | dict(model_type=n, pad_token_id=1) for n in ("bert", "roberta"))
DISTIL = dict(model_type="distilbert", vocab_size=29, dim=12, n_heads=3, n_layers=1, hidden_dim=10)
MPNET = ENCODER | dict(
    model_type="mpnet", max_position_embeddings=34, layer_norm_eps=1e-5,
    relative_attention_num_buckets=32, pad_token_id=1, hidden_act="gelu",
)  # fmt: skip
ELECTRA = ENCODER | dict(
    model_type="electra", embedding_size=5, max_position_embeddings=32, hidden_act="gelu",
    summary_type="first", summary_use_proj=True, type_vocab_size=2,
)  # fmt: skip
ALBERT = ENCODER | dict(
    model_type="albert", embedding_size=5, num_hidden_layers=7, max_position_embeddings=32,
    type_vocab_size=2, num_hidden_groups=1, inner_group_num=1, hidden_dropout_prob=0, gap_size=0,
    layers_to_keep=[], attention_probs_dropout_prob=0, classifier_dropout_prob=0.1,
    down_scale_factor=1, net_structure_type=0, num_memory_blocks=0,
)  # fmt: skip
MODERN_SIZES = ENCODER | dict(
    model_type="modernbert", num_hidden_layers=4, max_position_embeddings=64, local_attention=10
)
OLD_MODERN = MODERN_SIZES | dict(
    global_attn_every_n_layers=2, global_rope_theta=1000.0, local_rope_theta=50.0,
    position_embedding_type="absolute", layer_norm_eps=1e-5,
)  # fmt: skip
"""A config.json in the style of transformers 4."""
MODERN = MODERN_SIZES | dict(
    layer_types=[FULL, LOCAL, FULL, LOCAL], rope_parameters={FULL: dict(rope_type="default",
    rope_theta=1000.0), LOCAL: dict(rope_type="default", rope_theta=50.0)},
)  # fmt: skip
OLD_NOMIC = dict(
    model_type="nomic_bert", activation_function="swiglu", architectures=["NomicBertModel"],
    auto_map={"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"}, attn_pdrop=0.0, causal=False,
    dense_seq_output=True, embd_pdrop=0.0, fused_bias_fc=True, fused_dropout_add_ln=True,
    layer_norm_epsilon=1e-12, max_trained_positions=2048, mlp_fc1_bias=False, mlp_fc2_bias=False,
    n_embd=12, n_head=3, n_inner=10, n_layer=2, n_positions=64, pad_vocab_size_multiple=64,
    parallel_block=False, parallel_block_tied_norm=False, prenorm=False, qkv_proj_bias=False,
    reorder_and_upcast_attn=False, resid_pdrop=0.0, rotary_emb_base=1000, rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
    scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, type_vocab_size=2,
    use_flash_attn=True, use_rms_norm=False, use_xentropy=True, vocab_size=29,
)  # fmt: skip
"""The config.json for the original code of the model."""
NOMIC = ENCODER | dict(
    model_type="nomic_bert", max_position_embeddings=64, head_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1000.0),
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8)


def default(base):
    return dict(rope_type="default", rope_theta=base)


def read(content, *heads):
    """Read a config.json in a folder with enough tensors, including those that identify heads."""
    masked = ("head.dense.weight",) if content["model_type"] == "modernbert" else ()
    return read_config(content, (*heads, *masked, *map(str, range(40))), "config.json")


def saved(folder, config, family=None):
    """Save random parameters, check the round trip, and return them with the file's tensors."""
    params = drawn(config)
    save_pretrained(folder, config, params, family=family)
    assert_loads(folder, config, params)
    return params, load_file(folder / "model.safetensors")


def keys_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.slow_except("falcon", "mpnet*", "electra*", "albert", "modernbert", "nomic*")
@pytest.mark.parametrize(
    ("content", "heads", "tensor", "param"),
    [
        pytest.param(content, heads, tensor, param, id=name)
        for name, content, heads, tensor, param in (
            ("smollm3", SMOL, (), "model.layers.3.self_attn.k_proj.weight",
             "decoder/block_3/attention/key/kernel"),
            ("cohere", COHERE, (), "model.layers.3.self_attn.q_norm.weight",
             "decoder/block_3/attention/query_scale"),
            ("cohere2", COHERE2, (), "model.layers.2.input_layernorm.weight",
             "decoder/block_2/norm/scale"),
            ("falcon", FALCON, (), "transformer.h.1.mlp.dense_4h_to_h.weight",
             "decoder/block_1/feed_forward/down/kernel"),
            ("stablelm", STABLE_NORMS, (), "model.layers.1.self_attn.q_layernorm.norms.2.weight",
             "decoder/block_1/attention/query_scale/2"),
            ("mpnet", MPNET, ("mpnet.pooler.dense.weight",),
             "mpnet.encoder.relative_attention_bias.weight", "encoder/relative_bias"),
            ("mpnet, output", MPNET, ("mpnet.pooler.dense.weight",),
             "mpnet.encoder.layer.1.attention.attn.o.weight",
             "encoder/block_1/attention/out/kernel"),
            ("electra", ELECTRA, ("discriminator_predictions.dense.weight",),
             "electra.embeddings_project.weight", "embed/projection/kernel"),
            ("electra, head", ELECTRA, ("discriminator_predictions.dense.weight",),
             "discriminator_predictions.dense.weight", "pooler/kernel"),
            ("albert", ALBERT, ("albert.pooler.weight",),
             "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.value.weight",
             "encoder/block_0/attention/value/kernel"),
            ("modernbert", MODERN, (), "head.dense.weight", "head_dense/kernel"),
            ("nomic", NOMIC, (), "nomic_bert.encoder.layers.1.mlp.fc11.weight",
             "encoder/block_1/feed_forward/up/kernel"),
            ("nomic, gate", NOMIC, (), "nomic_bert.encoder.layers.1.mlp.fc12.weight",
             "encoder/block_1/feed_forward/gate/kernel"),
        )
    ],
)  # fmt: skip
def test_saved_folder_round_trips_bitwise(content, heads, tensor, param, tmp_path):
    """Also checks that the parameter is in that tensor, a matrix [outputs, inputs]."""
    leaf, tensors = saved(tmp_path / "one", read(content, *heads), content["model_type"])
    for name in param.split("/"):
        leaf = leaf[int(name)] if name.isdigit() else leaf[name]
    if param.endswith("kernel"):
        outputs = len(tensors[tensor])
        leaf = np.asarray(leaf).reshape(-1, outputs).T
    np.testing.assert_array_equal(tensors[tensor], leaf)


REFUSED = [
    (COHERE | dict(rotary_pct=0.5), "rotary_pct is 0.5: must be 1.0"),
    (SMALL | dict(model_type="cohere"), "rope_theta is missing"),
    (COHERE2 | dict(use_qk_norm=True), "use_qk_norm is True: must be False"),
    (COHERE2 | dict(sliding_window=None), "sliding_window is None: must be an integer"),
    (COHERE2 | dict(order_of_interleaved_layers="x"), "order_of_interleaved_layers is 'x'"),
    (FALCON | dict(alibi=True), "alibi is True: must be False"),
    (FALCON | dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn is 2: must be 1, or"),
    (FALCON | dict(new_decoder_architecture=True, parallel_attn=False),
     "parallel_attn is False: must be true with new_decoder_architecture"),
    (SMOL | dict(no_rope_layers=[1]), r"no_rope_layers is \[1\]: must be a list of 4"),
    (SMOL | dict(no_rope_layers=[2, 1, 1, 1]), "no_rope_layers is .*: must be a list of 4"),
    (SMOL | dict(layer_types=[LOCAL] * 4),
     "layer_types is .*: requires use_sliding_window and sliding_window"),
    (NEOX | dict(rotary_pct=1.5), "rotary_pct is 1.5: must be at most 1"),
    (NEOX | dict(rotary_pct=0.4), "positions.dims is 3|dims is 3"),
    (NEOX | dict(num_key_value_heads=1), "num_key_value_heads is 1: this key is not"),
    (NEOX | dict(rope_scaling=dict(type="spiral")), "type is 'spiral'"),
    (GPTJ | dict(rotary_dim=None), "rotary_dim is None: must be an integer"),
    (GPTJ | dict(rotary_dim=10), "rotary_dim is 10: must be even and at most 8"),
    (GPTJ | dict(rotary=False), "rotary is False: must be True"),
    (CODER | dict(norm_type="rms_norm"), "norm_type is 'rms_norm': must be 'layer_norm'"),
    (CODER | dict(mlp_type="gated"), "mlp_type is 'gated': must be 'default'"),
    (OPT | dict(word_embed_proj_dim=7), "word_embed_proj_dim is 7: must equal hidden_size, 24"),
    (OPT | dict(_remove_final_layer_norm=True), "_remove_final_layer_norm is True: must be"),
    (OPT | dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine is False"),
    (BLOOM | dict(apply_residual_connection_post_layernorm=True), "post_layernorm is True"),
    (BLOOM | dict(n_inner=7), "n_inner is 7: must be"),
    (PHI | dict(qk_layernorm=True), "qk_layernorm is True: must be False"),
    (PHI | dict(embd_pdrop=1.0), "embd_pdrop is 1.0: must be at least 0 and below 1"),
    (OLMO3 | dict(rope_theta=1e4), "rope_theta is 10000.0: must be 500000.0, or rope_param"),
    (OLMO3 | dict(rope_parameters={FULL: default(5e5), LOCAL: YARN}),
     "rope_parameters is 'yarn': layers with a window must have no"),
    (OLMO3 | dict(layer_types=[FULL]), "layer_types is .*: must be a list of 4"),
    (OLMO2 | dict(clip_qkv=3.0), "clip_qkv is 3.0: this key is not"),
    (OLMO2 | dict(auto_map={"AutoConfig": "a.B"}), "auto_map is .*code in a checkpoint"),
    (GRANITE | dict(residual_multiplier=0), "residual_multiplier is 0: must be positive"),
    (GRANITE | dict(logits_scaling="6"), "logits_scaling is '6': must be a number"),
    (PHI3 | dict(rope_scaling=YARN), "rope_scaling is 'yarn': must be longrope or absent"),
    (PHI3 | dict(attention_bias=True), "attention_bias is True: must be False"),
    (PHI3 | dict(lm_head_bias=True), "lm_head_bias is True: must be False"),
    (MIXTRAL | dict(router_jitter_noise=0.1), "router_jitter_noise is 0.1: must be 0.0"),
    (MIXTRAL | dict(num_experts_per_tok=4), "top_k is 4: must be at most count, 3"),
    (MIXTRAL | dict(num_local_experts=0), "num_local_experts is 0: must be an integer from 1"),
    (QWEN | dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv is 8.0: must be None"),
    (QWEN | dict(mlp_only_layers=[1]), r"mlp_only_layers is \[1\]: must be \[\] or None"),
    (QWEN | dict(decoder_sparse_step=2), "decoder_sparse_step is 2: must be 1"),
    (QWEN | dict(use_sliding_window=True), "use_sliding_window is True: must be False"),
    (QWEN | dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes': must be true or false"),
    (QWEN | dict(router_aux_loss_coef=-1), "balance_loss is -1: must not be negative"),
    (GPT_OSS | dict(swiglu_alpha=1.5), "swiglu_alpha is 1.5: must be 1.702"),
    (GPT_OSS | dict(swiglu_limit=0), "swiglu_limit is 0: must be positive"),
    (GPT_OSS | dict(swiglu_limit=None), "swiglu_limit is None: must be a number"),
    (GPT_OSS | dict(hidden_act="relu"), "hidden_act is 'relu': must be 'silu'"),
    (GPT_OSS | dict(rope_scaling=None), "rope_parameters is None: must be an object"),
    (GPT_OSS | dict(layer_types=["full"]), "layer_types is .* must be a list of 1"),
    (GPT_OSS | dict(quantization_config=dict(bits=4)), "quantization_config is .*this key is not"),
    (BERT | dict(position_embedding_type="relative_key"), "is 'relative_key': must"),
    (BERT | dict(is_decoder=True), "is_decoder is True: must be False"),
    (BERT | dict(add_cross_attention=True), "add_cross_attention is True"),
    (BERT | dict(pruned_heads={"0": [1]}), "pruned_heads is {'0': .1.}"),
    (BERT | dict(hidden_act="tanh"), "hidden_act is 'tanh': must be one of"),
    (BERT | dict(position_biased_input=True), "position_biased_input is True: this key is not"),
    (ROBERTA | dict(pad_token_id=None), "pad_token_id is None: must be an integer"),
    (ROBERTA | dict(pad_token_id=511), "max_position_embeddings is 512: must exceed"),
    (DISTIL | dict(tie_weights_=False), "tie_weights_ is False: must be True"),
    (ALBERT | dict(num_hidden_groups=2), "num_hidden_groups is 2: must be 1"),
    (ALBERT | dict(inner_group_num=2), "inner_group_num is 2: must be 1"),
    (ELECTRA | dict(embedding_size=0), "embedding_size is 0: must be an integer from 1"),
    (ELECTRA | dict(position_embedding_type="relative_key"), "is 'relative_key': must be"),
    (MPNET | dict(relative_attention_num_buckets=16), "num_buckets is 16: must be 32"),
    (MPNET | dict(pad_token_id=0), "pad_token_id is 0: must be 1"),
    (MPNET | dict(embedding_size=5), "embedding_size is 5: this key is not"),
    (MODERN | dict(classifier_bias=True), "classifier_bias is True: must equal norm_bias, False"),
    (MODERN | dict(classifier_activation="silu"),
     "classifier_activation is 'silu': must match hidden_act"),
    (MODERN | dict(position_embedding_type="relative"), "position_embedding_type is 'relative'"),
    (MODERN | dict(layer_types=[FULL]), "layer_types is .*: must be a list of 4"),
    (MODERN | dict(local_attention=0), "local_attention is 0: must be an integer from 1"),
    (MODERN | dict(rope_parameters={FULL: dict(rope_type="linear", factor=2.0)}),
     "rope_parameters is .*: layers may differ only in rope_theta"),
    (MODERN | dict(num_key_value_heads=1), "num_key_value_heads is 1: this key is not"),
    (OLD_NOMIC | dict(activation_function="gelu"),
     "activation_function is 'gelu': must be 'swiglu'"),
    (OLD_NOMIC | dict(prenorm=True), "prenorm is True: must be False"),
    (OLD_NOMIC | dict(qkv_proj_bias=True), "qkv_proj_bias is True: must be False"),
    (OLD_NOMIC | dict(rotary_emb_fraction=0.5), "rotary_emb_fraction is 0.5: must be 1.0 or 1"),
    (OLD_NOMIC | dict(rotary_scaling_factor=2.0), "rotary_scaling_factor is 2.0: must be None"),
    (OLD_NOMIC | dict(num_experts=8), "num_experts is 8: this key is not"),
    (NOMIC | dict(tie_word_embeddings="no"), "tie_word_embeddings is 'no': must be true or"),
    (NOMIC | dict(partial_rotary_factor=0.5), "rope_parameters is .*: all dimensions of each"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "rule"), REFUSED, ids=[f"{c['model_type']}: {rule}" for c, rule in REFUSED]
)
def test_unsupported_keys_that_affect_results_are_rejected(content, rule):
    with pytest.raises(ConfigError, match=rule):
        read(content)


MASKED = ("cls.predictions.transform.dense.weight",)
TEXT = "classifier.weight", "bert.pooler.dense.weight"


@pytest.mark.parametrize(
    ("content", "heads", "rule"),
    [
        (BERT | dict(tie_word_embeddings=False), MASKED, "tie_word_embeddings is False"),
        (BERT | dict(id2label=3), TEXT, "id2label is 3: must be an object"),
        (BERT | dict(id2label={"0": "a", "1": "b"}, num_labels=7), TEXT,
         "num_labels is 7: must equal"),
        (ROBERTA | dict(hidden_act="relu"), ("lm_head.dense.weight",),
         "hidden_act is 'relu': must be 'gelu'"),
        (ELECTRA | dict(hidden_act="relu"), ("generator_predictions.dense.weight",),
         "hidden_act is 'relu': must be 'gelu' with the head of"),
        (MODERN, ("classifier.weight",), r"architectures is None: must name a class \.\.\.ForSeq"),
        (MODERN | dict(
            architectures=["ModernBertForTokenClassification"], classifier_pooling="max"
        ), ("classifier.weight",), "classifier_pooling is 'max': must be one of"),
        (NOMIC, ("qa_outputs.weight",), "architectures is None: nomic_bert in transf"),
    ],
)  # fmt: skip
def test_keys_that_contradict_model_head_are_rejected(content, heads, rule):
    with pytest.raises(ConfigError, match=rule):
        read(content, *heads)


@pytest.mark.parametrize(
    ("content", "changes", "rule"),
    [
        (SMOL, dict(qk_norm=True), "qk_norm is True: must be False in the family smollm3"),
        (COHERE, dict(qk_norm_kind="rmsnorm"), "qk_norm_kind is 'rmsnorm': must be 'layernorm'"),
        (COHERE2, dict(window=5), r"window is \[5, 5, 5, 5\]|pattern is"),
        (STABLE_NORMS, dict(qk_norm_over="head"), "qk_norm_over is 'head': must be 'own_head' in"),
        (STABLE, dict(norm_order="parallel"), "norm_order is 'parallel': must be 'pre' in the"),
        (NEOX, dict(norm_order="parallel_shared"), "norm_order is 'parallel_shared'"),
        (NEOX, dict(out_bias=False), "out_bias is False: must be True in the family gpt_neox"),
        (GPTJ, dict(qkv_bias=True), "qkv_bias is True: must be False in the family gptj"),
        (CODER, dict(ff_bias=False), "ff_bias is False: must be True in the family starcoder2"),
        (OPT, dict(norm_order="parallel"), "norm_order is 'parallel': must be 'post' in the"),
        (BLOOM, dict(d_ff=7), "d_ff is 7: must be 96 in the family bloom"),
        (PHI, dict(norm_order="parallel"), "norm_order is 'parallel': must be 'parallel_shared'"),
        (OLMO2, dict(qk_norm_over="head"), "qk_norm_over is 'head': must be 'heads' in the"),
        (OLMO2, dict(norm_order="pre"), "norm_order is 'pre': must be 'output' in the family"),
        (PHI3, dict(window=(3, None)), r"window is \[3, None, 3, None\]: must be \[3, 3, 3, 3\]"),
        (MODERN, dict(first_norm=True), "first_norm is "),
        (MODERN, dict(glu=False), "glu is "),
        (MODERN, dict(out_bias=True), "out_bias is "),
        (ROBERTA, dict(positions=Learned(offset=0)), "the family roberta cannot express this"),
        (BERT, dict(positions=Learned(offset=2), max_len=7), "max_len is 7: must be 9 in the"),
        (DISTIL, dict(norm_eps=1e-5), "norm_eps is 1e-05: must be 1e-12 in the family distilbert"),
        (DISTIL, dict(type_vocab_size=2), "type_vocab_size is 2: must be None in the family"),
        (DISTIL, dict(pooler="tanh"), "pooler is 'tanh': must be None in the family distilbert"),
        (BERT, dict(num_classes=3, masked_token_head=True, logit_bias=True),
         "num_classes is 3: must be 2 in the family bert"),
        (BERT, dict(norm_order="pre"), "norm_order is 'pre': must be 'post' in the family bert"),
        (MPNET, dict(positions=Learned(offset=2)), r"positions\.buckets is "),
        (MPNET, dict(positions=Learned(offset=2, buckets=16)), r"positions\.buckets is "),
        (MIXTRAL, dict(experts=None), "experts is None"),
        (GPT_OSS, dict(activation="silu"), "activation is "),
        (GPT_OSS, dict(glu_unit_offset=False), "glu_unit_offset is "),
        (GPT_OSS, dict(attention_sinks=False), "attention_sinks is "),
        (GPT_OSS, dict(ff_bias=False), "ff_bias is "),
        (GPT_OSS, dict(glu_limit=None), "swiglu_limit is "),
        *((content, dict(experts=replace(read(content).experts, **changes)),
            f"experts.{next(iter(changes))} is") for content,
            changes in ((MIXTRAL, dict(score="sigmoid")), (MIXTRAL, dict(normalize=False)),
            (MIXTRAL, dict(shared_d_ff=3)), (QWEN, dict(scale=2.0)), (QWEN, dict(z_loss=0.1)),
            (QWEN, dict(selection_bias=True)), (QWEN2, dict(shared_gate=False)))),
    ],
)  # fmt: skip
def test_config_fields_unsupported_by_family_are_rejected(content, changes, rule):
    config = replace(read(content), **changes)
    with pytest.raises(ConfigError, match=rule):
        write_config(FAMILIES[content["model_type"]], config)


@pytest.mark.parametrize(
    ("content", "family", "rule"),
    [
        (
            SMOL,
            "llama",
            r"positions.pattern is \(True, True, True, False\): must be \(True, True, True,",
        ),
        (MIXTRAL, "mistral", "experts is Experts"),
    ],
)
def test_config_unsupported_by_other_family_is_rejected(content, family, rule):
    with pytest.raises(ConfigError, match=rule):
        write_config(FAMILIES[family], read(content))


# Tensors that contain several parameters


def test_interleaved_qkv_rows_are_split_and_joined_correctly():
    """Split 3 runs of 2 + 1 + 4 rows with 5 inputs, and biases with the same rows."""
    whole = np.arange(3 * 7 * 5).reshape(21, 5)
    runs = whole.reshape(3, 7, 5)
    layouts, pieces = [], []
    for start, count in ((0, 2), (2, 1), (3, 4)):
        layout = Layout("linear", rows=Rows(3, start, count, 7))
        param = layout.read(whole, (5, 3, count))
        np.testing.assert_array_equal(param, runs[:, start : start + count].transpose(2, 0, 1))
        assert layout.file_shape((5, 3, count)) == (21, 5)
        layouts.append(layout)
        pieces.append(layout.write(param))
    np.testing.assert_array_equal(joined(layouts, pieces), whole)
    flat = [Layout("flat", rows=layout.rows) for layout in layouts]
    biases = [layout.read(whole[:, 0], (3, layout.rows.count)) for layout in flat]
    assert flat[0].file_shape((3, 2)) == (21,)
    back = joined(flat, [x.write(bias) for x, bias in zip(flat, biases, strict=True)])
    np.testing.assert_array_equal(back, whole[:, 0])


@pytest.mark.slow
def test_falcon_fused_groups_contain_queries_key_and_value(tmp_path):
    """The rows of the tensor are [K, N / K + 2, H]."""
    config = read(FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True))
    params, tensors = saved(tmp_path / "one", config, "falcon")
    rows = tensors["transformer.h.1.self_attention.query_key_value.weight"].reshape(2, 5, 4, 24)
    leaf = params["decoder"]["block_1"]["attention"]
    for group in range(2):
        queries = np.moveaxis(leaf["query"]["kernel"][:, 3 * group : 3 * group + 3], 0, -1)
        np.testing.assert_array_equal(rows[group, :3], queries)
        np.testing.assert_array_equal(rows[group, 3], leaf["key"]["kernel"][:, group].T)
        np.testing.assert_array_equal(rows[group, 4], leaf["value"]["kernel"][:, group].T)


@pytest.mark.parametrize(
    ("content", "tensor"),
    [
        (MODERN, "model.layers.1.attn.Wqkv.weight"),
        (NOMIC, "nomic_bert.encoder.layers.1.attn.Wqkv.weight"),
    ],
)
def test_value_projection_is_last_third_of_fused_tensor(content, tensor, tmp_path):
    params, tensors = saved(tmp_path / "m", read(content))
    value = np.asarray(params["encoder"]["block_1"]["attention"]["value"]["kernel"])
    np.testing.assert_array_equal(tensors[tensor][24:], value.reshape(12, 12).T)  # rows of [3 D, D]


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True])
def test_tied_pythia_loads_with_and_without_output_matrix(bare, tmp_path):
    config = read(NEOX | dict(tie_word_embeddings=True))
    params, tensors = saved(tmp_path / "one", config, "gpt_neox")
    if bare:
        named = {name.removeprefix("gpt_neox."): tensor for name, tensor in tensors.items()}
        save_file(named, tmp_path / "one" / "model.safetensors")
    assert_loads(tmp_path / "one", config, params)


# Decoders: keys that require logic


@pytest.mark.parametrize(
    ("keys", "heads", "order"),
    [
        ({}, 1, "parallel_shared"),
        (dict(multi_query=False, parallel_attn=False), 6, "pre"),
        (dict(multi_query=False, num_kv_heads=2), 6, "parallel_shared"),
        (dict(new_decoder_architecture=True, num_kv_heads=3), 3, "parallel"),
        (dict(new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1), 3,
         "parallel_shared"),
    ],
)  # fmt: skip
def test_both_falcon_architectures_round_trip(keys, heads, order):
    config = read(FALCON | keys)
    assert (config.kv_heads, config.norm_order) == (heads, order)
    assert read(write_config(FAMILIES["falcon"], config)) == config


@pytest.mark.parametrize(
    ("keys", "pattern", "window"),
    [
        ({}, (True, True, True, False), None),
        (dict(no_rope_layer_interval=2), (True, False), None),
        (dict(no_rope_layers=[1, 1, 1, 1, 0]), None, None),
        (dict(no_rope_layers=[0, 1, 0, 1], use_sliding_window=True, sliding_window=5),
         (False, True), (5, None)),
        (dict(sliding_window=5), (True, True, True, False), None),
    ],
)  # fmt: skip
def test_smollm3_rope_pattern_and_windows_are_loaded(keys, pattern, window):
    config = read(SMOL | keys)
    assert config.positions == Rope(base=2e6, pattern=pattern) and config.window == window
    assert read(write_config(FAMILIES["smollm3"], config)) == config


def test_smollm3_without_rope_has_no_positions():
    config = read(SMOL | dict(no_rope_layers=[0] * 4))
    assert config.positions is None and read(SMOL | dict(no_rope_layer_interval=1)) == config
    written = write_config(FAMILIES["smollm3"], config)
    assert written["no_rope_layers"] == [0] * 4
    assert read(written) == config


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope(base=5e5)),
        (dict(rope_theta=500_000), Rope(base=5e5)),
        (dict(rope_scaling=YARN), Rope(base=5e5, window_base=5e5, scaling="yarn", factor=8.0,
         original_len=8)),
        (dict(rope_parameters={FULL: default(1e4), LOCAL: default(1e4)}), Rope(base=1e4)),
        (dict(rope_parameters={FULL: default(1e4), LOCAL: default(1e3)}),
         Rope(base=1e4, window_base=1e3)),
        (dict(rope_parameters={FULL: YARN | dict(rope_theta=1e4), LOCAL: default(1e4)}),
         Rope(base=1e4, window_base=1e4, scaling="yarn", factor=8.0, original_len=8)),
    ],
)  # fmt: skip
def test_both_olmo3_rope_settings_round_trip(keys, rope):
    config = read(OLMO3 | keys)
    assert config.positions == rope and config.windows == (5, 5, 5, None)
    assert read(write_config(FAMILIES["olmo3"], config)) == config


# Experts, each with its own tensors


@pytest.mark.slow_except("mixtral")
@pytest.mark.parametrize("content", [MIXTRAL, QWEN2], ids=lambda c: c["model_type"])
def test_separately_stored_experts_round_trip(content, tmp_path):
    config = read(content)
    params, one = saved(tmp_path / "looped", config, content["model_type"])
    scanned = replace(config, scan_layers=True)
    save_pretrained(tmp_path / "scanned", scanned, stack_layers(params))
    two = load_file(tmp_path / "scanned" / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    if content is QWEN2:
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
    up = params["decoder"]["block_1"]["feed_forward"]["up"]["kernel"]
    np.testing.assert_array_equal(one[name], np.asarray(up[2]).T)
    back, loaded = load_pretrained(tmp_path / "looped", scan_layers=True)
    assert back == scanned
    chex.assert_trees_all_equal(unstack_layers(loaded), params, strict=True)


@pytest.mark.parametrize("content", [MIXTRAL, GPT_OSS], ids=lambda c: c["model_type"])
def test_saving_expert_adapters_for_peft_is_rejected(content, tmp_path):
    config = read(content)
    params, lora = drawn(config), LoraConfig(rank=2, targets=("query", "up"))
    adapters = jax.tree.map(np.ones_like, init_lora(params, lora, jax.random.key(0)))
    names = tensor_names(config, content["model_type"])
    with pytest.raises(
        ValueError, match="block_0/feed_forward/up is a kernel of experts, whose adapters"
    ):
        save_lora(tmp_path / "a", params, adapters, lora, names)


def test_excessive_expert_count_is_rejected_before_listing_tensors(tmp_path):
    config = read(MIXTRAL)
    save_pretrained(tmp_path / "m", config, drawn(config))
    file = tmp_path / "m" / "config.json"
    for count, rule in (
        (10**9, "num_local_experts is 1000000000: must be at most"),
        (30, "30 exp"),
    ):
        file.write_text(json.dumps(MIXTRAL | dict(num_local_experts=count)))
        with pytest.raises(ConfigError, match=rule):
            load_pretrained(tmp_path / "m")


def test_error_names_missing_expert_or_mixed_dtypes(tmp_path):
    config = read(MIXTRAL)
    save_pretrained(tmp_path / "m", config, drawn(config))
    file = tmp_path / "m" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    save_file(tensors | {name: tensors[name].astype(np.float16)}, file)
    with pytest.raises(
        CheckpointError, match="kernel/1 is float16, but earlier layers are float32"
    ):
        load_pretrained(tmp_path / "m")
    config, _ = load_pretrained(tmp_path / "m", dtype="float32")
    assert config.experts == Experts(count=3, top_k=2, balance_loss=0.001)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load_pretrained(tmp_path / "m")


# Encoders


def test_mpnet_has_learned_positions_and_distance_biases():
    config = read(MPNET, "mpnet.pooler.dense.weight")
    assert config.positions == Learned(offset=2, buckets=32) and config.max_len == 32
    assert config.type_vocab_size is None and config.pooler == "tanh"
    assert drawn(config)["encoder"]["relative_bias"].shape == (32, 3)


def test_electra_discriminator_has_one_class_per_token(tmp_path):
    config = read(ELECTRA, "discriminator_predictions.dense.weight")
    assert (config.num_classes, config.classes_of, config.embedding_dim) == (1, "token", 5)
    params, _ = saved(tmp_path / "m", config)
    assert params["embed"]["tokens"].shape == (29, 5)
    content = keys_of(tmp_path / "m")
    assert content["architectures"] == ["ElectraForPreTraining"] and "num_labels" not in content


def test_full_width_embeddings_have_no_projection(tmp_path):
    config = read(ELECTRA | dict(embedding_size=12), "classifier.out_proj.weight")
    assert config.embedding_dim is None and config.pooler == "gelu"
    params, tensors = saved(tmp_path / "m", config)
    assert "projection" not in params["embed"]
    assert "electra.embeddings_project.weight" not in tensors


def test_narrow_embeddings_without_head_have_no_logits(rng):
    config = read(ELECTRA)
    tokens, params = rng.integers(0, 29, (1, 3)), drawn(config)
    assert "logits" not in places(config)
    with pytest.raises(ValueError, match="embedding_dim is 5: such a model has no token logits"):
        build(config).apply({"params": params}, tokens)
    with pytest.raises(ValueError, match="logit_lens: embedding_dim is 5: such an encoder has no"):
        logit_lens(build(config), params, tokens)


def test_albert_layers_share_one_block(tmp_path):
    config = read(ALBERT, "albert.pooler.weight")
    assert config.share_layers and config.num_layers == 7 and config.activation == "gelu_tanh"
    params, tensors = saved(tmp_path / "m", config)
    assert [*params["encoder"]] == ["block_0"]
    assert sum(name.endswith("ffn.weight") for name in tensors) == 1
    content = keys_of(tmp_path / "m")
    assert content["num_hidden_groups"] == content["inner_group_num"] == 1
    products = forward_flops(config, 5) - 7 * forward_flops(replace(config, num_layers=1), 5)
    rest = 2 * 5 * 12 * 5 + 2 * 12 * 12  # the embedding projection for 5 tokens, and the pooler
    assert products == -6 * rest
    with pytest.raises(ConfigError, match="share_layers is True: needs a looped stack"):
        load_pretrained(tmp_path / "m", scan_layers=True)


def test_both_modernbert_config_styles_are_equivalent_and_saved():
    config = read(OLD_MODERN)
    assert read(MODERN) == config
    assert (config.window, config.positions.base, config.positions.window_base) == (
        (None, 6), 1000.0, 50.0,
    )  # fmt: skip
    written = write_config(FAMILIES["modernbert"], config)
    for content in (OLD_MODERN, MODERN):
        expected_keys = {name: content[name] for name in content if name in written}
        assert {name: written[name] for name in expected_keys} == expected_keys
    assert {"layer_types", "rope_parameters", "global_rope_theta"} <= written.keys()


def test_first_modernbert_block_has_no_attention_norm(tmp_path):
    params, tensors = saved(tmp_path / "m", read(MODERN))
    assert "norm_attention" not in params["encoder"]["block_0"]
    assert "model.layers.0.attn_norm.weight" not in tensors
    assert "model.layers.1.attn_norm.weight" in tensors
    assert keys_of(tmp_path / "m")["model_type"] == "modernbert"


@pytest.mark.parametrize(
    ("end", "pooling", "of", "reads"),
    [
        ("SequenceClassification", "cls", "text", "first"),
        ("SequenceClassification", "mean", "text", "mean"),
        ("TokenClassification", "mean", "token", "each"),
        ("QuestionAnswering", "cls", "span", "each"),
    ],
)
def test_model_folder_determines_whether_texts_or_tokens_are_classified(
    end, pooling, of, reads, tmp_path
):
    expected_keys = dict(
        architectures=[f"ModernBertFor{end}"], classifier_pooling=pooling, num_labels=2
    )
    config = read(MODERN | expected_keys, "classifier.weight")
    assert (config.classes_of, config.pooler_reads, config.pooler) == (of, reads, "transform")
    assert config.num_classes == 2 and not config.masked_token_head
    params, stored = saved(tmp_path / "m", config)
    content = keys_of(tmp_path / "m")
    assert content["architectures"] == expected_keys["architectures"]
    assert of != "text" or content["classifier_pooling"] == pooling
    kernel = np.asarray(params["classifier"]["kernel"])
    np.testing.assert_array_equal(stored["classifier.weight"], kernel.T)
    assert "classifier.bias" in stored and "head.dense.weight" in stored


def test_both_nomic_bert_config_styles_are_equivalent():
    config = read(OLD_NOMIC)
    assert config == read(NOMIC | dict(head_dim=None))
    assert (config.d_model, config.d_ff, config.num_layers, config.max_len) == (12, 10, 2, 64)
    assert config.positions == Rope(base=1000.0) and config.glu and config.activation == "silu"
    assert read(OLD_NOMIC | dict(rotary_emb_base=70)).positions.base == 70.0
    both = read(
        OLD_NOMIC | dict(n_layer=5, num_hidden_layers=2)
    )  # transformers reads the newer name
    assert both == config


def test_saving_in_older_style_preserves_its_keys(tmp_path):
    config = read(OLD_NOMIC)
    params = drawn(config)
    save_pretrained(tmp_path / "new", config, params)
    content = keys_of(tmp_path / "new")
    assert content["rope_parameters"] == NOMIC["rope_parameters"] and "n_embd" not in content
    (tmp_path / "new" / "config.json").write_text(json.dumps(OLD_NOMIC))
    found, loaded = load_pretrained(tmp_path / "new")
    assert found == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    save_pretrained(tmp_path / "like", found, loaded, like=tmp_path / "new")
    again = keys_of(tmp_path / "like")
    assert {name: again[name] for name in OLD_NOMIC} == OLD_NOMIC and "hidden_size" not in again
    files = (tmp_path / name / "model.safetensors" for name in ("new", "like"))
    one, two = (file.read_bytes() for file in files)
    assert one == two


def test_constants_of_apertus_are_saved_and_checked(tmp_path):
    config = read(APERTUS)
    save_pretrained(tmp_path / "m", config, drawn(config))
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    beta, eps = (tensors[f"model.layers.0.mlp.act_fn.{name}"] for name in ("beta", "eps"))
    assert (beta.shape, beta.dtype, float(beta), float(eps)) == (
        (),
        np.float32,
        0.5,
        np.float32(-1e-6),
    )
    without = {name: x for name, x in tensors.items() if not name.endswith(("beta", "eps"))}
    assert len(without) == len(tensors) - 2
    save_file(without, file)
    chex.assert_trees_all_equal(load_pretrained(tmp_path / "m")[1], drawn(config))
    for wrong, rule in (
        (np.array(0.7, np.float32), r"is 0\.7: must be 0\.5 in apertus"),
        (np.full(2, 0.5, np.float32), r"differs from the values that config\.json"),
    ):
        save_file(tensors | {"model.layers.0.mlp.act_fn.beta": wrong}, file)
        with pytest.raises(CheckpointError, match=f"beta {rule}"):
            load_pretrained(tmp_path / "m")


@pytest.mark.parametrize(("keys", "extra"), [
    ({}, 1), (dict(num_nextn_predict_layers=None), 0), (dict(num_nextn_predict_layers=0), 0),
    (dict(num_nextn_predict_layers=2), 2), (dict(num_mtp_layers=2), 2),
])  # fmt: skip
def test_layers_of_deepseek_for_further_tokens_are_ignored(keys, extra, tmp_path):
    config = read(DEEPSEEK)
    params = drawn(config)
    save_pretrained(tmp_path / "m", config, params)
    file, path = (tmp_path / "m" / name for name in ("model.safetensors", "config.json"))
    content = {name: x for name, x in keys_of(tmp_path / "m").items() if "num_nextn" not in name}
    path.write_text(json.dumps(content | keys))
    norm, tensors = np.ones(12, np.float32), load_file(file)
    name = "model.layers.{}.enorm.weight"
    more = {name.format(config.num_layers + i): norm for i in range(extra)}
    save_file(tensors | more, file)
    found, loaded = load_pretrained(tmp_path / "m")
    assert found == config
    chex.assert_trees_all_equal(loaded, params)
    unknown = name.format(config.num_layers + extra)
    save_file(tensors | more | {unknown: norm}, file)
    with pytest.raises(CheckpointError, match=f"{unknown}: deepseek_v3 with this config.json has"):
        load_pretrained(tmp_path / "m")
