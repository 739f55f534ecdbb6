"""Loading and saving of published checkpoints, in which every bit is preserved.

A family (in `families`) maps tensor names and the keys of `config.json`. `load` applies the
mapping, `safetensors_folder` reads the files, and `peft` reads and writes adapters. Tokenizers are
in `transformer_jax.tokenizers`.
"""

from transformer_jax.config.kinds import later
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.peft import load_lora, save_lora
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.sentences import (
    SentenceEncoder,
    load_sentence_encoder,
    pool_sentences,
)
from transformer_jax.pretrained.tensors import tensor_names

__getattr__, __dir__ = later(__name__, {"read_g2p": "transformer_jax.lectures.g2p"})

__all__ = [
    "SentenceEncoder", "load_lora", "load_pretrained", "load_sentence_encoder", "pool_sentences",
    "read_g2p", "save_lora", "save_pretrained", "tensor_names",
]  # fmt: skip
