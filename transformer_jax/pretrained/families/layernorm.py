"""Map decoders with LayerNorm, whose norms have biases though their matrices may have none.

They are StarCoder 2 (Lozhkov et al. 2024), StableLM (Bellagente et al. 2024), OPT (Zhang et al.
2022), BLOOM (Workshop et al. 2022) and Falcon (Almazrouei et al. 2023).
"""

from __future__ import annotations

from transformer_jax.config import Alibi, Learned, ModelConfig
from transformer_jax.pretrained.families.decoder_keys import (
    biases,
    read_rope,
    write_rope,
    write_sizes,
)
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    activation_key,
    attention_linears,
    blocks,
    fused,
    gated_linears,
    linear,
    norm,
    output_matrix,
)
from transformer_jax.untrusted_files import JsonObject

NO_BIAS: Fields = dict(qkv_bias=False, out_bias=False, ff_bias=False)
"""Fields of a model whose norms alone have biases."""


def _llama_names(config: ModelConfig, feed_forward: list[TensorMapping]) -> list[TensorMapping]:
    """Return a table with the names of Llama for all but the feed-forward."""
    (qkv, out, _), block = biases(config), "model.layers.{i}"
    attention, norms = f"{block}.self_attn", norm("norm", f"{block}.input_layernorm")
    if config.norm_order != "parallel_shared":
        norms = norm("norm_attention", f"{block}.input_layernorm")
        norms += norm("norm_feed_forward", f"{block}.post_attention_layernorm")
    return [
        TensorMapping("embed/tokens", "model.embed_tokens.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norms,
                *attention_linears(attention, "o_proj", qkv, out),
                *feed_forward,
            ],
        ),
        *norm("decoder/norm", "model.norm"),
        *output_matrix(config, "lm_head"),
    ]


def _read_sizes(keys: ConfigKeys, kv_heads: int) -> Fields:
    return dict(
        vocab_size=keys.integer("vocab_size"),
        d_model=keys.integer("hidden_size"),
        d_ff=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads", kv_heads),
        head_dim=None,
        max_len=keys.integer("max_position_embeddings"),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


# StarCoder 2


def _starcoder_table(config: ModelConfig) -> list[TensorMapping]:
    mlp, bias = "model.layers.{i}.mlp", biases(config)[2]
    up = linear("feed_forward/up", f"{mlp}.c_fc", bias=bias)
    return _llama_names(config, up + linear("feed_forward/down", f"{mlp}.c_proj", bias=bias))


def _read_starcoder(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    keys.rate("embedding_dropout", 0.0)  # read as residual_dropout, as of GPT-2
    fields = _read_sizes(keys, 2) | dict(
        norm_eps=keys.positive("norm_epsilon", 1e-5),
        activation=keys.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        dropout=keys.rate("residual_dropout", 0.0),
        window=keys.optional_integer("sliding_window", None),
    )
    if not keys.flag("use_bias", True):
        fields |= NO_BIAS
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_starcoder(config: ModelConfig) -> JsonObject:
    keys = write_sizes(config) | write_rope(config)
    if config.activation == "gelu_tanh":  # the name that the published ones have
        keys["hidden_act"] = "gelu_pytorch_tanh"
    return dict(
        architectures=["Starcoder2ForCausalLM"],
        **keys,
        norm_epsilon=config.norm_eps,
        residual_dropout=config.dropout,
        embedding_dropout=config.dropout,
        sliding_window=config.windows[0],
        use_bias=biases(config)[0],
    )


# StableLM


def _stablelm_table(config: ModelConfig) -> list[TensorMapping]:
    block = "model.layers.{i}"
    own = gated_linears(f"{block}.mlp", bias=False)
    if config.qk_norm:
        for param, tensor, heads in ("query", "q", config.num_heads), ("key", "k", config.kv_heads):
            norms = f"{block}.self_attn.{tensor}_layernorm.norms"
            own += [
                TensorMapping(f"attention/{param}_scale/{n}", f"{norms}.{n}.weight")
                for n in range(heads)
            ]
    return _llama_names(config, own)


def _read_stablelm(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    parallel = keys.flag("use_parallel_residual", False)
    fields = _read_sizes(keys, 32) | dict(
        norm_order="parallel_shared" if parallel else "pre",
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        activation=keys.choice("hidden_act", ACTIVATIONS, "silu"),
        glu=True,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        dropout=keys.rate("hidden_dropout", 0.0),
        **NO_BIAS | dict(qkv_bias=keys.flag("use_qkv_bias", False)),
    )
    if keys.flag("qk_layernorm", False):
        fields |= dict(qk_norm=True, qk_norm_kind="layernorm", qk_norm_over="own_head")
    rope = read_rope(keys, fields, part=0.25)
    return ModelConfig(**fields, positions=rope)


def _write_stablelm(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["StableLmForCausalLM"],
        **dict(partial_rotary_factor=1.0) | write_sizes(config) | write_rope(config),
        layer_norm_eps=config.norm_eps,
        hidden_dropout=config.dropout,
        use_qkv_bias=biases(config)[0],
        use_parallel_residual=config.norm_order == "parallel_shared",
        qk_layernorm=config.qk_norm,
    )


# OPT


def _opt_table(config: ModelConfig) -> list[TensorMapping]:
    (qkv, out, ff), stack = biases(config), "model.decoder"
    block = f"{stack}.layers.{{i}}"
    attention = f"{block}.self_attn"
    return [
        TensorMapping("embed/tokens", f"{stack}.embed_tokens.weight"),
        TensorMapping("embed/positions", f"{stack}.embed_positions.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm_attention", f"{attention}_layer_norm"),
                *norm("norm_feed_forward", f"{block}.final_layer_norm"),
                *attention_linears(attention, "out_proj", qkv, out),
                *linear("feed_forward/up", f"{block}.fc1", bias=ff),
                *linear("feed_forward/down", f"{block}.fc2", bias=ff),
            ],
        ),
        *(norm("decoder/norm", f"{stack}.final_layer_norm") if config.norm_order == "pre" else []),
        *output_matrix(config, "lm_head"),
    ]


def _read_opt(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    width = keys.integer("hidden_size", 768)
    if (inner := keys.optional_integer("word_embed_proj_dim", None)) not in (None, width):
        keys.fail("word_embed_proj_dim", inner, f"must be hidden_size, {width}")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size", 50272),
        max_len=keys.integer("max_position_embeddings", 2048),
        d_model=width,
        d_ff=keys.integer("ffn_dim", 3072),
        num_layers=keys.integer("num_hidden_layers", 12),
        num_heads=keys.integer("num_attention_heads", 12),
        positions=Learned(offset=2),
        norm_order="pre" if keys.flag("do_layer_norm_before", True) else "post",
        activation=keys.choice("activation_function", ACTIVATIONS, "relu"),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        dropout=keys.rate("dropout", 0.1),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        **({} if keys.flag("enable_bias", True) else NO_BIAS),
    )


def _write_opt(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["OPTForCausalLM"],
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_len,
        hidden_size=config.d_model,
        word_embed_proj_dim=config.d_model,
        ffn_dim=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        do_layer_norm_before=config.norm_order == "pre",
        activation_function=activation_key(config.activation),
        tie_word_embeddings=config.tie_embeddings,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        enable_bias=biases(config)[0],
    )


# BLOOM


def _bloom_table(config: ModelConfig) -> list[TensorMapping]:
    block = "transformer.h.{i}"
    attention, mlp = f"{block}.self_attention", f"{block}.mlp"
    heads = dict.fromkeys(("attention/query", "attention/key", "attention/value"), config.key_dim)
    return [
        TensorMapping("embed/tokens", "transformer.word_embeddings.weight"),
        *norm("embed/norm", "transformer.word_embeddings_layernorm"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norm("norm_attention", f"{block}.input_layernorm"),
                *norm("norm_feed_forward", f"{block}.post_attention_layernorm"),
                *fused(f"{attention}.query_key_value", config.num_heads, heads),
                *linear("attention/out", f"{attention}.dense", LINEAR_OUT),
                *linear("feed_forward/up", f"{mlp}.dense_h_to_4h"),
                *linear("feed_forward/down", f"{mlp}.dense_4h_to_h"),
            ],
        ),
        *norm("decoder/norm", "transformer.ln_f"),
        *output_matrix(config, "lm_head"),
    ]


def _read_bloom(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    width = keys.integer("n_embed", None) or keys.integer("hidden_size", 64)
    keys.ignore("hidden_size")  # n_embed comes first
    return ModelConfig(
        vocab_size=keys.integer("vocab_size", 250880),
        max_len=keys.integer("seq_length", 2048),
        d_model=width,
        num_layers=keys.integer("n_layer", 2),
        num_heads=keys.integer("n_head", 8),
        positions=Alibi(),
        embedding_norm=True,
        norm_eps=keys.positive("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        dropout=keys.rate("hidden_dropout", 0.0),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def _write_bloom(config: ModelConfig) -> JsonObject:
    return dict(
        architectures=["BloomForCausalLM"],
        vocab_size=config.vocab_size,
        seq_length=config.max_len,
        hidden_size=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        layer_norm_epsilon=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )


# Falcon


def _falcon_table(config: ModelConfig) -> list[TensorMapping]:
    block, (qkv, out, ff) = "transformer.h.{i}", biases(config)
    attention, mlp, width = f"{block}.self_attention", f"{block}.mlp", config.key_dim
    queries = config.num_heads // config.kv_heads * width  # of a group, before its key and value
    heads = {"attention/query": queries, "attention/key": width, "attention/value": width}
    match config.norm_order:
        case "parallel":
            norms = norm("norm_attention", f"{block}.ln_attn")
            norms += norm("norm_feed_forward", f"{block}.ln_mlp")
        case "parallel_shared":
            norms = norm("norm", f"{block}.input_layernorm")
        case _:
            norms = norm("norm_attention", f"{block}.input_layernorm")
            norms += norm("norm_feed_forward", f"{block}.post_attention_layernorm")
    return [
        TensorMapping("embed/tokens", "transformer.word_embeddings.weight"),
        *blocks(
            "decoder",
            config.num_layers,
            [
                *norms,
                *fused(f"{attention}.query_key_value", config.kv_heads, heads, qkv),
                *linear("attention/out", f"{attention}.dense", LINEAR_OUT, out),
                *linear("feed_forward/up", f"{mlp}.dense_h_to_4h", bias=ff),
                *linear("feed_forward/down", f"{mlp}.dense_4h_to_h", bias=ff),
            ],
        ),
        *norm("decoder/norm", "transformer.ln_f"),
        *output_matrix(config, "lm_head"),
    ]


def _read_falcon(keys: ConfigKeys, names: frozenset[str]) -> ModelConfig:
    keys.ignore("hidden_size")  # n_embed comes first
    heads = keys.integer("num_attention_heads", 71)
    grouped, one = keys.flag("new_decoder_architecture", False), keys.flag("multi_query", True)
    parallel = keys.flag("parallel_attn", True)
    kv_heads = keys.optional_integer("num_kv_heads", None) or heads
    number = keys.optional_integer("num_ln_in_parallel_attn", None) or (2 if grouped else 1)
    if grouped and not parallel:
        keys.fail("parallel_attn", parallel, "new_decoder_architecture needs true")
    if number > 2 or (number == 2 and not grouped):
        rule = "must be 1, or 2 with new_decoder_architecture"
        keys.fail("num_ln_in_parallel_attn", number, rule)
    if not grouped:
        kv_heads = 1 if one else heads
    fields: Fields = dict(
        vocab_size=keys.integer("vocab_size", 65024),
        d_model=keys.integer("n_embed", None) or keys.integer("hidden_size", 4544),
        d_ff=keys.optional_integer("ffn_hidden_size", None),
        num_layers=keys.integer("num_hidden_layers", 32),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=None,
        max_len=keys.integer("max_position_embeddings", 2048),
        norm_order={(True, 2): "parallel", (True, 1): "parallel_shared"}.get(
            (parallel, number), "pre"
        ),
        norm_eps=keys.positive("layer_norm_epsilon", 1e-5),
        activation=keys.choice("activation", ACTIVATIONS, "gelu"),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        dropout=keys.rate("hidden_dropout", 0.0),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )
    if not keys.flag("bias", False):
        fields |= NO_BIAS
    rope = read_rope(keys, fields)
    return ModelConfig(**fields, positions=rope)


def _write_falcon(config: ModelConfig) -> JsonObject:
    grouped = config.norm_order == "parallel" or config.kv_heads not in (1, config.num_heads)
    return dict(
        dict(max_position_embeddings=config.max_len) | write_rope(config),
        architectures=["FalconForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        ffn_hidden_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_kv_heads=config.kv_heads,
        new_decoder_architecture=grouped,
        num_ln_in_parallel_attn=2 if config.norm_order == "parallel" else 1,
        multi_query=config.kv_heads == 1,
        parallel_attn=config.is_parallel,
        layer_norm_epsilon=config.norm_eps,
        activation=activation_key(config.activation),
        tie_word_embeddings=config.tie_embeddings,
        hidden_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        bias=biases(config)[0],
        alibi=False,
    )


STARCODER2 = Family(
    "starcoder2",
    _read_starcoder,
    _write_starcoder,
    _starcoder_table,
    prefix="model.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)
STABLELM = Family(
    "stablelm",
    _read_stablelm,
    _write_stablelm,
    _stablelm_table,
    rotates_parts=True,
    prefix="model.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "model.embed_tokens.weight"},
)
OPT = Family(
    "opt",
    _read_opt,
    _write_opt,
    _opt_table,
    prefix="model.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)
BLOOM = Family(
    "bloom",
    _read_bloom,
    _write_bloom,
    _bloom_table,
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    tied_copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
FALCON = Family(
    "falcon",
    _read_falcon,
    _write_falcon,
    _falcon_table,
    prefix="transformer.",
    head_tensors=("lm_head.*",),
    ignored_tensors=("transformer.h.*.self_attention.rotary_emb.inv_freq",),
    tied_copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
