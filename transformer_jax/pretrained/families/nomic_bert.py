"""Map nomic-bert (Nussbaum et al. 2024): a BERT with a rotation, gates and no biases in its blocks.

Its files have two styles of config.json: that of transformers, and that of the code the model came
with, whose names are GPT-2's (`n_embd`). Tensors have the same names in both.
"""

from __future__ import annotations

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families.bert import (
    bert_sizes,
    masked_head,
    pooling_layers,
    post_norm_encoder,
    write_bert_sizes,
)
from transformer_jax.pretrained.families.classes import Names, classes_of, labels, write_head
from transformer_jax.pretrained.families.decoder_keys import read_rope, rope_of, write_rope
from transformer_jax.pretrained.families.table import (
    LINEAR_OUT,
    ConfigKeys,
    Family,
    TensorMapping,
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
"""Keys of transformers, each with that of the older style."""
BASE = 1000.0
POOLER = "nomic_bert.pooler.dense"


def _table(config: ModelConfig) -> list[TensorMapping]:
    model, predictions = "nomic_bert", "cls.predictions.transform"
    block = f"{model}.encoder.layers.{{i}}"
    width = config.num_heads * config.key_dim
    heads = {f"attention/{name}": width for name in ("query", "key", "value")}
    return [
        TensorMapping("embed/tokens", f"{model}.embeddings.word_embeddings.weight"),
        TensorMapping("embed/types", f"{model}.embeddings.token_type_embeddings.weight"),
        *norm("embed/norm", f"{model}.emb_ln"),
        *blocks(
            "encoder",
            config.num_layers,
            [
                *fused(f"{block}.attn.Wqkv", 1, heads, bias=False),
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


def _read(keys: ConfigKeys, names: Names) -> ModelConfig:
    def said(name: str) -> str:
        old, new = keys.take(OLD[name], None), keys.take(name, None)
        return OLD[name] if new is None and old is not None else name

    masked, pooler = "cls.predictions.transform.dense.weight" in names, f"{POOLER}.weight"
    of = None if masked else classes_of(keys, "classifier.weight", pooler, names)
    if of == "span":
        rule = "transformers has no such head of a nomic_bert"
        keys.fail("architectures", keys.take("architectures", None), rule)
    fields = bert_sizes(keys, said=said, activation="silu", rate=0.0) | dict(
        head_dim=keys.optional_integer("head_dim", None),
        vocab_size=keys.integer("vocab_size", 30528),
        max_len=keys.integer(said("max_position_embeddings"), 2048),
    )
    base = float(keys.positive("rotary_emb_base", BASE, above=1))
    rope = read_rope(keys, fields, default=base)
    if rope.dims is not None:
        rule = "all dimensions of a head must rotate"
        keys.fail("rope_parameters", keys.take("rope_parameters", None), rule)
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
    scaling = write_rope(config).get("rope_scaling", {})
    content = write_bert_sizes(config) | dict(
        head_dim=config.key_dim,
        rope_parameters=dict(rope_type="default", rope_theta=rope_of(config).base) | scaling,
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
    needed_ids=("pad_token_id",),
    renames_modules=True,  # Wqkv is q_proj, k_proj and v_proj
    tied_copies={
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_tensors=("cls.*", "classifier.*", "qa_outputs.*"),
)
