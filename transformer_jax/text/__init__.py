"""Turn text into text with a trained model: complete, answer, translate.

`text_model` loads a run folder or a published model with its tokenizer; `completion` and
`translation` decode with it. The commands that print are in `cli`.
"""

from transformer_jax.text.completion import complete
from transformer_jax.text.text_model import load_run, load_text_model

__all__ = ["complete", "load_run", "load_text_model"]
