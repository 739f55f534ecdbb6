"""Prepared folders, which contain the tokens of text files of any size.

`documents` divides files into chunks and reads their documents. `prepare` writes a folder with
several processes, and `folder` reads it. Text that fits in memory does not need a prepared folder.
"""

from transformer_jax.corpus.folder import Corpus, Part, is_prepared, open_corpus
from transformer_jax.corpus.prepare import prepare

__all__ = ["Corpus", "Part", "is_prepared", "open_corpus", "prepare"]
