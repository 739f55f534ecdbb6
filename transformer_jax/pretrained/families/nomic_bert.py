"""Map nomic-bert (Nussbaum et al. 2024): a BERT with a rotation, gates and no biases in its blocks.

Its files have two styles of config.json: that of transformers, and that of the code the model came
with, whose names are GPT-2's (`n_embd`). Tensors have the same names in both.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families.bert import (
    masked_head,
    pooling_layers,
    post_norm_encoder,
)
from transformer_jax.pretrained.families.classes import Names, classes_of, labels, write_head
from transformer_jax.pretrained.families.decoder_keys import read_rope, rope_of, write_rope
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    LINEAR_OUT,
    ConfigKeys,
    Family,
    Fields,
    TensorMapping,
    activation_key,
    blocks,
    fused,
    linear,
    norm,
)
from transformer_jax.untrusted_files import JsonObject

OLD = dict(
    hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head",
    intermediate_size="n_inner", max_position_embeddings="n_positions",
    layer_norm_eps="layer_norm_epsilon", hidden_dropout_prob="resid_pdrop",
    attention_probs_dropout_prob="attn_pdrop",
)  # fmt: skip
"""Names of transformers to those of the older style."""
BASE = 1000.0
POOLER = "nomic_bert.pooler.dense"


def _table(config: ModelConfig) -> list[TensorMapping]:
    model, predictions = "nomic_bert", "cls.predictions.transform"
    block = f"{model}.encoder.layers.{{i}}"
    width = config.num_heads * config.key_dim
    return [
        TensorMapping("embed/tokens", f"{model}.embeddings.word_embeddings.weight"),
        TensorMapping("embed/types", f"{model}.embeddings.token_type_embeddings.weight"),
        *norm("embed/norm", f"{model}.emb_ln"),
        *blocks(
            "encoder",
            config.num_layers,
            [
                *fused(
                    f"{block}.attn.Wqkv",
                    1,
                    {f"attention/{name}": width for name in ("query", "key", "value")},
                    bias=False,
                ),
                *linear("attention/out", f"{block}.attn.out_proj", LINEAR_OUT, bias=False),
                *norm("norm_attention", f"{block}.norm1"),
                *linear("feed_forward/up", f"{block}.mlp.fc11", bias=False),
                *linear("feed_forward/gate", f"{block}.mlp.fc12", bias=False),
                *linear("feed_forward/down", f"{block}.mlp.fc2", bias=False),
                *norm("norm_feed_forward", f"{block}.norm2"),
            ],
        ),
        *masked_head(
            config, f"{predictions}.dense", f"{predictions}.layer_norm", "cls.predictions.bias"
        ),
        *pooling_layers(config, POOLER, "classifier"),
    ]


def _check_old(keys: ConfigKeys) -> None:
    """Refuse what the older style says of a model of another kind; skip what changes nothing."""
    # the code that auto_map names is not run: transformers has its own under this model_type
    keys.ignore("auto_map", "dense_seq_output", "embd_pdrop", "fused_bias_fc")
    keys.ignore("fused_dropout_add_ln", "max_trained_positions", "pad_vocab_size_multiple")
    keys.ignore("parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn")
    keys.ignore("summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    keys.ignore("summary_type", "summary_use_proj", "use_xentropy")
    keys.require("activation_function", "swiglu")
    for name in ("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "prenorm"):
        keys.require(name, False)
    for name in ("qkv_proj_bias", "rotary_emb_interleaved", "use_rms_norm"):
        keys.require(name, False)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("scale_attn_weights", True)
    keys.require("rotary_emb_fraction", 1.0, 1)
    keys.require("rotary_emb_scale_base", None)
    keys.require("rotary_scaling_factor", None)


def _read(keys: ConfigKeys, names: Names) -> ModelConfig:
    _check_old(keys)
    keys.ignore("classifier_dropout")

    def said(name: str) -> str:
        old, new = keys.take(OLD[name], None), keys.take(name, None)
        return OLD[name] if new is None and old is not None else name

    masked, pooler = "cls.predictions.transform.dense.weight" in names, f"{POOLER}.weight"
    of = None if masked else classes_of(keys, "classifier.weight", pooler, names)
    if of == "span":
        rule = "transformers has no such head of a nomic_bert"
        keys.fail("architectures", keys.take("architectures", None), rule)
    fields: Fields = dict(
        vocab_size=keys.integer("vocab_size", 30528),
        d_model=keys.integer(said("hidden_size"), 768),
        num_layers=keys.integer(said("num_hidden_layers"), 12),
        num_heads=keys.integer(said("num_attention_heads"), 12),
        head_dim=keys.optional_integer("head_dim", None),
        d_ff=keys.integer(said("intermediate_size"), 3072),
        max_len=keys.integer(said("max_position_embeddings"), 2048),
        activation=keys.choice("hidden_act", ACTIVATIONS, "silu"),
        type_vocab_size=keys.integer("type_vocab_size", 2),
        norm_eps=keys.positive(said("layer_norm_eps"), 1e-12),
        dropout=keys.rate(said("hidden_dropout_prob"), 0.0),
        attention_dropout=keys.rate(said("attention_probs_dropout_prob"), 0.0),
    )
    base = float(keys.positive("rotary_emb_base", BASE, above=1))
    rope = read_rope(keys, fields, default=base)
    if rope.dims is not None:
        said_rope = keys.take("rope_parameters", None)
        keys.fail("rope_parameters", said_rope, "all dimensions of a head must rotate")
    return post_norm_encoder(
        keys,
        masked=masked,
        pooler="tanh" if pooler in names else None,
        num_classes=None if of is None else labels(keys),
        classes_of=of or "text",
        glu=True,
        qkv_bias=False,
        out_bias=False,
        ff_bias=False,
        positions=rope,
        **fields,
    )


def _write(config: ModelConfig) -> JsonObject:
    rope = write_rope(config)
    parameters = dict(rope_type="default", rope_theta=rope_of(config).base)
    content: JsonObject = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.key_dim,
        intermediate_size=config.ff_dim,
        hidden_act=activation_key(config.activation),
        max_position_embeddings=config.max_len,
        type_vocab_size=config.type_vocab_size,
        layer_norm_eps=config.norm_eps,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        rope_parameters=parameters | rope.pop("rope_scaling", {}),
        tie_word_embeddings=True,
    )
    if config.num_classes is not None:
        return content | write_head(config, "NomicBert")
    kind = "NomicBertForMaskedLM" if config.masked_token_head else "NomicBertModel"
    return dict(architectures=[kind], **content)


NOMIC_BERT = Family(
    "nomic_bert",
    _read,
    _write,
    _table,
    prefix="nomic_bert.",
    tied_copies={
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_tensors=("cls.*", "classifier.*", "qa_outputs.*"),
)
