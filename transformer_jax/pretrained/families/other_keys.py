"""Keys of config.json that no family reads, their allowed values, and why they have no effect.

A key that a family does not read must have a value listed here, or is ignored for the reason given
here. Any other key raises an error that names it, unless it is null. A test compares the keys with
the configuration classes of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from transformer_jax.untrusted_files import JsonObject

ALL_FULL = ("full_attention",)
"""Any list of layers that all have this type."""

_DECODERS = (
    "gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 granite smollm3 olmo2 olmo3 "
    "gpt_neox gptj phi cohere cohere2 starcoder2 stablelm opt bloom falcon mixtral olmoe qwen2_moe "
    "qwen3_moe gpt_oss glm glm4 ernie4_5 seed_oss helium exaone4 "
    "arcee nemotron persimmon hunyuan_v1_dense apertus qwen3_next qwen3_5_text "
    "olmo_hybrid deepseek_v2 deepseek_v3 kimi_linear lfm2"
)
_BERTS = "bert roberta xlm-roberta camembert mpnet electra albert nomic_bert"
_SEQ2SEQ = "bart mbart pegasus m2m_100 marian"


@dataclass(frozen=True)
class OtherKeys:
    """Keys of one or more families that have no effect for the same reason."""

    why: str
    families: str = ""
    """Names of families, separated by spaces. An empty string means all families. Later entries
    override earlier ones."""
    ignored: str = ""
    """Keys for which any value is allowed, separated by spaces."""
    fixed: JsonObject = field(default_factory=dict)
    """Allowed values of keys. They match the computation of the family."""


OTHER_KEYS = (
    OtherKeys(
        "Names of the model, its files, and its authors, and runtime options.",
        ignored="""
        _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
        _flash_attn_2_enabled _model_name_or_path _name_or_path architectures attn_implementation
        custom_pipelines dtype experts_implementation gradient_checkpointing language model_type
        name name_or_path neftune_noise_alpha tokenizer_class torch_dtype torchscript
        transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16
        use_cache use_flash_attn
        """,
    ),
    OtherKeys(
        "Outputs of a call, and chunking of the computation.",
        ignored="""
        chunk_size_feed_forward output_attentions output_hidden_states output_past return_dict
        """,
    ),
    OtherKeys(
        "Names of classes, and the post-processing of logits in sentence-transformers.",
        ignored="""
        _num_labels finetuning_task id2label label2id matryoshka_dimensions num_labels problem_type
        sbert_ce_default_activation_function sentence_transformers task_specific_params
        """,
    ),
    OtherKeys(
        "Tokens and lengths, also stored in the tokenizer's files and generation_config.json.",
        ignored="""
        bos_token_id cls_token_id decoder_start_token_id eos_token_id eos_token_ids
        max_sequence_length model_max_length pad_token_id prefix sep_token_id unk_token_id
        """,
    ),
    OtherKeys(
        "Generation options, which transformers 5 reads only from generation_config.json.",
        ignored="""
        assistant_confidence_threshold assistant_early_exit assistant_lookbehind bad_words_ids
        begin_suppress_tokens cache_config cache_implementation compile_config constraints
        continuous_batching_config disable_compile diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty forced_bos_token_id forced_decoder_ids
        forced_eos_token_id force_words_ids generation_kwargs guidance_scale
        is_assistant length_penalty low_memory max_length max_matching_ngram_size max_new_tokens
        max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
        num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits
        output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
        remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
        return_legacy_cache sequence_bias stop_strings suppress_tokens target_lookbehind
        temperature token_healing top_h top_k top_p typical_p watermarking_config
        """,
    ),
    OtherKeys(
        "Initialisation, dropout in heads, and the name of a loss.",
        ignored="""
        classifier_dropout init_std initializer_factor initializer_range tf_legacy_loss
        """,
    ),
    OtherKeys(
        "Options of other kinds of models, which must be off.",
        ignored="cross_attention_hidden_size",
        fixed=dict(
            add_cross_attention=[False], is_decoder=[False], is_encoder_decoder=[False],
            pruned_heads=[{}], tie_encoder_decoder=[False],
        ),
    ),
    # Decoders
    OtherKeys(
        "The stack is always a decoder.", _DECODERS, fixed=dict(is_decoder=[False, True])
    ),
    OtherKeys(
        "Features of other models, which must be off.",
        "llama granite phi3 olmo2 mixtral olmoe starcoder2 stablelm phi gpt_neox falcon",
        "max_window_layers",
        dict(layer_types=[ALL_FULL], use_sliding_window=[False], use_mrope=[False]),
    ),
    OtherKeys(
        "Features of other models, which must be off.",
        "llama mistral granite phi3 mixtral smollm3 gemma gemma2 cohere2",
        fixed=dict(qk_layernorm=[False], use_qk_norm=[False]),
    ),
    OtherKeys(
        "Features of other models, which must be off.",
        "mistral mixtral phi3 gemma gemma2 gemma3_text",
        fixed=dict(attention_bias=[False], mlp_bias=[False], qkv_bias=[False]),
    ),
    OtherKeys(
        "Megatron's split of the matrices in pretraining, which only changes the summation order.",
        "llama mistral granite cohere cohere2 seed_oss hunyuan_v1_dense",
        fixed=dict(pretraining_tp=[1, None]),
    ),
    OtherKeys(
        "Transformers reads neither.", "smollm3", ignored="pretraining_tp max_window_layers"
    ),
    OtherKeys("Equal to Llama.", "llama", "is_llama_config", dict(rope_interleaved=[False])),
    OtherKeys(
        "RoPE of a vision model, and chunked attention beyond the trained length.",
        "qwen2", "dual_chunk_attention_config",
        dict(
            use_mrope=[False], attention_bias=[True], qkv_bias=[True], mlp_bias=[False],
            use_qk_norm=[False], qk_layernorm=[False],
        ),
    ),
    OtherKeys(
        "Queries and keys always have a norm.",
        "qwen3 qwen3_moe", fixed=dict(use_qk_norm=[True], qk_layernorm=[True]),
    ),
    OtherKeys(
        "Every block has experts, and no layer has a window.", "qwen2_moe qwen3_moe",
        "intermediate_size max_window_layers output_router_logits sliding_window",
        dict(
            decoder_sparse_step=[1], layer_types=[ALL_FULL], mlp_only_layers=[[], None],
            use_sliding_window=[False],
        ),
    ),
    OtherKeys(
        "Features of Qwen 2, which must be off.", "qwen3 qwen3_moe",
        fixed=dict(mlp_bias=[False], qkv_bias=[False]),
    ),
    OtherKeys(
        "Keys of DeepSeek's original code.",
        "deepseek_v2 deepseek_v3",
        "ep_size output_router_logits pretraining_tp seq_aux",
        dict(attention_bias=[False, None], mlp_bias=[False], moe_layer_freq=[1]),
    ),
    OtherKeys(
        "The router of DeepSeek-V2, which has no layers for further tokens.", "deepseek_v2",
        "num_nextn_predict_layers",
        dict(norm_topk_prob=[False, None], scoring_func=["softmax"]),
    ),
    OtherKeys(
        "The router of DeepSeek-V3.", "deepseek_v3",
        fixed=dict(scoring_func=["sigmoid"], topk_method=["noaux_tc"]),
    ),
    OtherKeys(
        "The router of Kimi Linear, and keys of its original code.", "kimi_linear",
        "head_dim output_router_logits pretraining_tp qk_head_dim rope_scaling rope_theta",
        dict(
            attention_bias=[False, None], mla_use_nope=[True], moe_layer_freq=[1],
            moe_router_activation_func=["sigmoid"], num_nextn_predict_layers=[0],
            tie_word_embeddings=[False], use_grouped_topk=[True],
        ),
    ),
    OtherKeys(
        "The initialisation of LFM2, keys of its original code that repeat sizes, and its constant "
        "features.",
        "lfm2",
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init
        conv_dim conv_dim_out conv_use_xavier_init num_heads
        """,
        dict(block_use_swiglu=[True], theta=[1_000_000.0, 1_000_000], use_pos_enc=[True]),
    ),
    OtherKeys(
        "Shared experts are not used.", "qwen3_moe",
        fixed=dict(shared_expert_intermediate_size=[0]),
    ),
    OtherKeys(
        "Every block has experts.", "qwen3_next", "intermediate_size output_router_logits",
        dict(decoder_sparse_step=[1], mlp_only_layers=[[], None]),
    ),
    OtherKeys("Qwen3-Next has no windows.", "qwen3_next", fixed=dict(use_sliding_window=[False])),
    OtherKeys(
        "Attention has a gate, states are float32, and the layers for further tokens are not "
        "loaded.",
        "qwen3_5_text", "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
        dict(
            attn_output_gate=[True], mamba_ssm_dtype=["float32"], output_gate_type=["swish"],
        ),
    ),
    OtherKeys(
        "The initialisation, and a pattern that transformers ignores.", "olmo_hybrid",
        """
        full_attention_interval linear_a_log_max linear_a_log_min linear_dt_init_floor
        linear_dt_max linear_dt_min
        """,
    ),
    OtherKeys(
        "Whether to return a loss, and noise in training.", "mixtral olmoe gpt_oss",
        "output_router_logits", dict(clip_qkv=[None], router_jitter_noise=[0.0, 0]),
    ),
    OtherKeys(
        "The gate is x sigmoid(1.702 x) for any hidden_act.", "gpt_oss",
        "experts_per_token initial_context_length",
        dict(hidden_act=["silu"], swiglu_alpha=[1.702]),
    ),
    OtherKeys(
        "Transformers reads hidden_activation; layer_types derive from the pattern.",
        "gemma2 gemma3_text", "hidden_act sliding_window_size",
    ),
    OtherKeys(
        "The models are causal.", "gemma gemma2 gemma3_text",
        fixed=dict(use_bidirectional_attention=[False]),
    ),
    OtherKeys("Transformers ignores it.", "gemma3_text", fixed=dict(attn_logit_softcapping=[None])),
    OtherKeys(
        "The code in auto_map is not run; transformers implements this model_type.",
        "phi phi3 falcon nomic_bert deepseek_v2 deepseek_v3 kimi_linear", "auto_map",
    ),
    OtherKeys(
        "The search for the longrope factors; logits have no bias in transformers.", "phi3",
        "full_attn_mod interpolate_factor", dict(lm_head_bias=[False]),
    ),
    OtherKeys("Norms of queries and keys must be off.", "phi", fixed=dict(qk_layernorm=[False])),
    OtherKeys(
        "Constant in published models; the ignored keys are for other libraries.",
        "cohere cohere2", "use_embedding_sharing use_parallel_embedding layer_switch",
        dict(
            position_embedding_type=["rope_gptj"], rotary_pct=[1.0, 1],
            use_gated_activation=[True], use_parallel_block=[True],
        ),
    ),
    OtherKeys(
        "The order of layers, also stated by layer_types.", "cohere2",
        fixed=dict(order_of_interleaved_layers=["local_attn_first"]),
    ),
    OtherKeys(
        "Transformers reads hidden_act and norm_epsilon, and uses a single precision.",
        "starcoder2",
        """
        activation_function attention_softmax_in_fp32 layer_norm_epsilon
        scale_attention_softmax_in_fp32
        """,
        dict(mlp_type=["default"], norm_type=["layer_norm"], scale_attn_weights=[True]),
    ),
    OtherKeys(
        "Older names of other keys, which must have their defaults.",
        "stablelm", fixed=dict(norm_eps=[1e-5], rope_pct=[0.25], rotary_scaling_factor=[1.0, 1]),
    ),
    OtherKeys(
        "LayerDrop and dropout within the feed-forward are not supported.", "opt",
        "layerdrop activation_dropout",
        dict(
            _remove_final_layer_norm=[False], layer_norm_elementwise_affine=[True],
            output_projection=[True],
        ),
    ),
    OtherKeys(
        "Runtime options of Megatron, and the summation order.", "bloom",
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi
        pretraining_tp skip_bias_add skip_bias_add_qkv slow_but_exact
        """,
        dict(apply_residual_connection_post_layernorm=[False], n_inner=[None]),
    ),
    OtherKeys(
        "Falcon's ALiBi is rounded to bfloat16 and scaled with the scores, not supported here; a "
        "feed-forward of another width uses ffn_hidden_size.",
        "falcon",
        fixed=dict(
            alibi=[False], apply_residual_connection_post_layernorm=[False], ff_factor=[4]
        ),
    ),
    OtherKeys(
        "Transformers reads attention_dropout and hidden_dropout.", "gpt_neox",
        "attention_probs_dropout_prob hidden_dropout_prob",
    ),
    OtherKeys(
        "The multiple-choice head, and the scaling of attention.", "gpt2 gptj",
        """
        n_ctx predict_special_tokens summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj
        """,
        dict(scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False]),
    ),
    OtherKeys(
        "It only changes the precision.", "gpt2", fixed=dict(reorder_and_upcast_attn=[False, True])
    ),
    OtherKeys("The model always uses RoPE.", "gptj", fixed=dict(rotary=[True])),
    OtherKeys(
        "Keys of the original Hunyuan code, which transformers does not read.", "hunyuan_v1_dense",
        """
        attention_head_dim cla_share_factor dense_list eod_token_id im_end_id im_newline_id
        im_start_id mask_init_id org_vocab_size pad_id pool_type text_end_id text_start_id
        """,
        dict(
            add_classification_head=[False], class_num=[0], mlp_bias=[False],
            norm_type=["hf_rms", "rms"], use_cla=[False], use_qk_norm=[True],
            use_rotary_pos_emb=[True],
        ),
    ),
    OtherKeys(
        "The norms and biases of Apertus are fixed.", "apertus",
        fixed=dict(mlp_bias=[False], post_norm=[False], qk_norm=[True]),
    ),
    # Encoders
    OtherKeys(
        "Keys of the original BERT code and of TinyBERT.", _BERTS,
        """
        cell directionality emb_size generator_size pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type pre_trained structure training
        """,
        dict(position_embedding_type=["absolute"]),
    ),
    OtherKeys(
        "The multiple-choice head.", "electra",
        "summary_activation summary_last_dropout summary_type summary_use_proj",
    ),
    OtherKeys(
        "All layers share one group of one block; the other keys are unused.", "albert",
        """
        classifier_dropout_prob down_scale_factor gap_size layers_to_keep net_structure_type
        num_memory_blocks
        """,
        dict(num_hidden_groups=[1], inner_group_num=[1]),
    ),
    OtherKeys(
        "Constants in transformers, which ignores these keys.", "mpnet",
        fixed=dict(pad_token_id=[1], relative_attention_num_buckets=[32]),
    ),
    OtherKeys(
        "Dropout in heads, and the initialisation of the position table.", "distilbert",
        "qa_dropout seq_classif_dropout sinusoidal_pos_embds", dict(tie_weights_=[True]),
    ),
    OtherKeys(
        "Runtime and training options; position_embedding_type is unused.",
        "modernbert",
        """
        deterministic_flash_attn initializer_cutoff_factor layer_norm_eps reference_compile
        repad_logits_with_grad sparse_pred_ignore_index sparse_prediction
        """,
        dict(position_embedding_type=["absolute"]),
    ),
    OtherKeys(
        "The style of config.json of the original nomic-bert code.", "nomic_bert",
        """
        dense_seq_output embd_pdrop fused_bias_fc fused_dropout_add_ln max_trained_positions
        pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj use_xentropy
        """,
        dict(
            activation_function=["swiglu"], causal=[False], mlp_fc1_bias=[False],
            mlp_fc2_bias=[False], parallel_block=[False], prenorm=[False], qkv_proj_bias=[False],
            rotary_emb_fraction=[1.0, 1], rotary_emb_interleaved=[False],
            rotary_emb_scale_base=[None], rotary_scaling_factor=[None], scale_attn_weights=[True],
            scale_attn_by_inverse_layer_idx=[False], use_rms_norm=[False],
        ),
    ),
    # Encoder-decoders
    OtherKeys(
        "LayerDrop and dropout within the feed-forward are not supported, tensors define the bias "
        "of the logits, and the other keys belong to fairseq and to training.", _SEQ2SEQ,
        """
        activation_dropout classif_dropout decoder_layerdrop encoder_layerdrop
        force_bos_token_to_be_generated replacing_rate save_step student_decoder_layers
        student_encoder_layers extra_pos_embeddings
        """,
        dict(add_bias_logits=[False, True], is_encoder_decoder=[True]),
    ),
    OtherKeys(
        "The position of the norms is fixed.", "bart marian",
        fixed=dict(normalize_before=[False], add_final_layer_norm=[False]),
    ),
    OtherKeys(
        "The position of the norms is fixed.", "mbart pegasus m2m_100",
        fixed=dict(normalize_before=[True], add_final_layer_norm=[True]),
    ),
    OtherKeys(
        "Positions are learned, and start at row 2 of their table.", "bart mbart",
        fixed=dict(
            normalize_embedding=[True], static_position_embeddings=[False],
            extra_pos_embeddings=[2],
        ),
    ),
    OtherKeys(
        "Positions are sinusoidal.", "pegasus m2m_100 marian",
        fixed=dict(normalize_embedding=[False], static_position_embeddings=[True]),
    ),
    OtherKeys(
        "False for a lone encoder.", "t5 mt5", fixed=dict(is_encoder_decoder=[True, False])
    ),
    # The object in rope_scaling or rope_parameters
    OtherKeys(
        "The parts that rotate with the place in an image, which is the position for text.",
        "rope", "mrope_interleaved mrope_section",
    ),
    OtherKeys(
        "Transformers reads attention_factor; the other keys are informational.", "rope",
        "attn_factor finetuned", dict(extrapolation_factor=[1.0, 1]),
    ),
)  # fmt: skip

ALIASES: dict[str, dict[str, str]] = {
    "gpt2 gptj": dict(
        hidden_size="n_embd", max_position_embeddings="n_positions",
        num_attention_heads="n_head", num_hidden_layers="n_layer",
    ),
    "bloom": dict(num_hidden_layers="n_layer", num_attention_heads="n_head"),
    "mixtral gpt_oss": dict(num_experts="num_local_experts"),
    "olmoe qwen3_moe": dict(num_local_experts="num_experts"),
    "deepseek_v2": dict(num_experts="n_routed_experts"),
    "deepseek_v3": dict(
        num_local_experts="n_routed_experts", num_mtp_layers="num_nextn_predict_layers"
    ),
    "kimi_linear": dict(
        max_position_embeddings="model_max_length", n_group="num_expert_group",
        n_shared_experts="num_shared_experts", norm_topk_prob="moe_renormalize",
        num_experts_per_tok="num_experts_per_token", num_local_experts="num_experts",
    ),
    "lfm2": dict(block_ff_dim="intermediate_size", tie_embedding="tie_word_embeddings"),
    "distilbert": dict(
        hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers"
    ),
    "t5 mt5": dict(
        hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers",
        head_dim="d_kv",
    ),
    _SEQ2SEQ: dict(
        num_attention_heads="encoder_attention_heads", hidden_size="d_model",
        num_hidden_layers="encoder_layers",
    ),
}  # fmt: skip
"""Names of keys that families read, keyed by alternative names in transformers."""


@cache
def other_keys(family: str) -> dict[str, list[object] | None]:
    """Return the allowed values of each key that a family does not read. None allows any value."""
    found: dict[str, list[object] | None] = {}
    for entry in OTHER_KEYS:
        if entry.families and family not in entry.families.split():
            continue
        if not entry.families and family == "rope":
            continue
        found |= dict.fromkeys(entry.ignored.split()) | entry.fixed
    return found


@cache
def aliases(family: str) -> dict[str, str]:
    """Return the alternative names of the keys of a family."""
    return next((names for families, names in ALIASES.items() if family in families.split()), {})
