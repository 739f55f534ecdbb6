"""Families of published checkpoints: what their files hold, as data."""

from transformer_jax.families import bart, bert, gpt2, llama, t5
from transformer_jax.families.table import Family, Keys, Layout, Line

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpt2.GPT2,
        llama.LLAMA,
        llama.MISTRAL,
        llama.QWEN2,
        llama.QWEN3,
        llama.GEMMA,
        llama.GEMMA2,
        llama.GEMMA3,
        bert.BERT,
        bert.ROBERTA,
        bert.DISTILBERT,
        t5.T5,
        bart.BART,
        bart.MARIAN,
    )
}
"""By the `model_type` of config.json."""

__all__ = ["FAMILIES", "Family", "Keys", "Layout", "Line"]
