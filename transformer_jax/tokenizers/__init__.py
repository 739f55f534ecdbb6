"""Tokenizers, which convert text to token IDs and back.

`trained` contains the tokenizers that `train.py` creates, `special` adds IDs without text,
`pretrained` and `hf_files` load published tokenizers, and `chat_template` renders conversations.
"""

from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import SpecialTokens, tokenizer_from_json
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from transformer_jax.tokenizers.utf8 import DataError

__all__ = [
    "BPETokenizer", "ByteTokenizer", "CharTokenizer", "DataError", "PretrainedTokenizer",
    "SpecialTokens", "Tokenizer", "WordTokenizer", "load_tokenizer_folder", "tokenizer_from_json",
]  # fmt: skip
