"""nomic-bert (Nussbaum et al. 2024), a BERT model with RoPE, gates and no biases in its blocks.

There are two styles of config.json: that of transformers, and that of the original code, which uses
GPT-2's names (`n_embd`). The tensor names are the same in both styles.
"""

from __future__ import annotations

from functools import partial

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families import bert as b
from transformer_jax.pretrained.families import classes as c
from transformer_jax.pretrained.families import keys as k
from transformer_jax.pretrained.families import table as t
from transformer_jax.pretrained.families.decoder_keys import read_rope, rope_of, write_rope
from transformer_jax.untrusted_files import JsonObject

OLD = dict(
    hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head",
    intermediate_size="n_inner", layer_norm_eps="layer_norm_epsilon",
    hidden_dropout_prob="resid_pdrop", attention_probs_dropout_prob="attn_pdrop",
)  # fmt: skip
"""Keys of the original code, keyed by the keys of transformers."""
BASE = 1000.0
POOLER = "nomic_bert.pooler.dense"


def _table(config: ModelConfig) -> list[t.TensorMapping]:
    model, predictions = "nomic_bert", "cls.predictions.transform"
    block = f"{model}.encoder.layers.{{i}}"
    width = config.num_heads * config.key_dim
    heads = {f"attention/{name}": width for name in ("query", "key", "value")}
    names = {
        "attention/out": "attn.out_proj", "norm_attention": "norm1", "feed_forward/up": "mlp.fc11",
        "feed_forward/gate": "mlp.fc12", "feed_forward/down": "mlp.fc2",
        "norm_feed_forward": "norm2",
    }  # fmt: skip
    return [
        t.TensorMapping("embed/tokens", f"{model}.embeddings.word_embeddings.weight"),
        t.TensorMapping("embed/types", f"{model}.embeddings.token_type_embeddings.weight"),
        *t.norm("embed/norm", f"{model}.emb_ln"),
        *t.blocks(
            "encoder",
            config.num_layers,
            [
                *t.fused(f"{block}.attn.Wqkv", 1, heads, bias=False),
                *t.named(config, block, names),
            ],
        ),
        *b.masked_head(
            config, f"{predictions}.dense", f"{predictions}.layer_norm", "cls.predictions.bias"
        ),
        *b.pooling_layers(config, POOLER, "classifier"),
    ]


def _read_heads(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    masked = "cls.predictions.transform.dense.weight" in keys.names
    pooler = f"{POOLER}.weight"
    of = None if masked else c.classes_of(keys, "classifier.weight", pooler)
    if of == "span":
        rule = "nomic_bert in transformers has no head for spans"
        keys.fail("architectures", keys.take("architectures", None), rule)
    return c.head_fields(
        keys,
        masked=masked,
        pooler="tanh" if pooler in keys.names else None,
        classes_of=of,
    )


def _read_rope(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
    base = float(keys.positive("rotary_emb_base", BASE, above=1))
    rope = read_rope(keys, fields, default=base)
    if rope.dims is not None:
        rule = "all dimensions of each head must rotate"
        keys.fail("rope_parameters", keys.take("rope_parameters", None), rule)
    return dict(positions=rope, max_len=fields["max_len"])


def _write_rope(config: ModelConfig) -> JsonObject:
    scaling = write_rope(config).get("rope_scaling", {})
    rope = dict(rope_type="default", rope_theta=rope_of(config).base) | scaling
    return dict(head_dim=config.key_dim, rope_parameters=rope)


NOMIC_BERT = t.Family(
    "nomic_bert",
    [
        *b.POST_NORM,
        k.Key("vocab_size", "vocab_size", k.integer, 30528),
        k.Key("max_position_embeddings", "max_len", k.integer, 2048, older="n_positions"),
        *b.bert_sizes(activation="silu", rate=0.0, older=OLD),
        b.TYPES,
        k.Key("head_dim", "head_dim", k.optional_integer, None),
        k.Fixed(glu=True, qkv_bias=False, out_bias=False, ff_bias=False),
        k.Code(_read_heads, c.write_labels),
        k.Code(_read_rope, _write_rope),
    ],
    _table,
    partial(c.encoder_class, name="NomicBert"),
    prefix="nomic_bert.",
    needed_ids=("pad_token_id",),
    renames_modules=True,  # Wqkv is q_proj, k_proj, and v_proj
    tied_copies={
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_tensors=("cls.*", "classifier.*", "qa_outputs.*"),
)
