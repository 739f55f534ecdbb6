"""Turn text into token ids and back.

`trained` holds the tokenizers that `train.py` makes, `special` ids that stand for no text,
`pretrained` and `hf_files` those of published
models, `chat_template` renders conversations. Batches of tokens are made in `training.data`.
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
