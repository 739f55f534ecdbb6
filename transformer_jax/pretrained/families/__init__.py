"""Families of published checkpoints, which describe the contents of their files as data.

A `Family` consists of the keys of config.json and a table of tensor names, and is an entry of
`FAMILIES`. The modules `load` and `save` contain no code for particular families.
"""

from transformer_jax.pretrained.families import (
    albert,
    bart,
    bert,
    deepseek,
    dense,
    electra,
    experts,
    gpt2,
    hybrid,
    kimi,
    layernorm,
    lfm2,
    llama,
    modernbert,
    nomic_bert,
    parallel,
    t5,
)
from transformer_jax.pretrained.families.keys import Code, ConfigKeys, Fixed, FixedKeys, Flag, Key
from transformer_jax.pretrained.families.table import Family, Layout, TensorMapping

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.GPT2, llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.GEMMA, llama.GEMMA2,
        llama.GEMMA3, llama.PHI3, llama.GRANITE, llama.SMOLLM3, llama.OLMO2, llama.OLMO3,
        parallel.GPT_NEOX, parallel.GPTJ, parallel.PHI, parallel.COHERE, parallel.COHERE2,
        layernorm.STARCODER2, layernorm.STABLELM, layernorm.OPT, layernorm.BLOOM, layernorm.FALCON,
        dense.ERNIE, dense.GLM, dense.GLM4, dense.SEED_OSS, dense.HELIUM, dense.EXAONE4,
        dense.ARCEE, dense.NEMOTRON, dense.PERSIMMON, dense.HUNYUAN, dense.APERTUS,
        deepseek.DEEPSEEK_V2, deepseek.DEEPSEEK_V3,
        experts.MIXTRAL, experts.OLMOE, experts.QWEN2_MOE, experts.QWEN3_MOE, experts.GPT_OSS,
        hybrid.QWEN3_NEXT, hybrid.QWEN3_5, hybrid.OLMO_HYBRID, kimi.KIMI_LINEAR,
        lfm2.LFM2,
        bert.BERT, bert.ROBERTA, bert.XLM_ROBERTA, bert.CAMEMBERT, bert.MPNET, bert.DISTILBERT,
        electra.ELECTRA, albert.ALBERT, modernbert.MODERNBERT, nomic_bert.NOMIC_BERT, t5.T5, t5.MT5,
        bart.BART, bart.MBART, bart.PEGASUS, bart.M2M100, bart.MARIAN,
    )
}  # fmt: skip
"""All families, keyed by the `model_type` of their config.json. Saving tries them in this order."""

__all__ = [
    "FAMILIES",
    "Code",
    "ConfigKeys",
    "Family",
    "Fixed",
    "FixedKeys",
    "Flag",
    "Key",
    "Layout",
    "TensorMapping",
]  # fmt: skip
