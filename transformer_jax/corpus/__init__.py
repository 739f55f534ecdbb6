"""Turn files of any size into folders of tokens, and read those.

`documents` cuts files into chunks and reads their documents, `prepare` writes a folder in several
processes, `folder` says what it holds and reads it. Batches are made of it in `training`; text that
fits into memory needs none of this.
"""

from transformer_jax.corpus.folder import Corpus, Part, is_prepared, open_corpus
from transformer_jax.corpus.prepare import prepare

__all__ = ["Corpus", "Part", "is_prepared", "open_corpus", "prepare"]
