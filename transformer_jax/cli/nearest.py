"""List the words whose input embeddings have the largest cosine similarity to that of a word.

python -m transformer_jax nearest --model RUN --word king
python -m transformer_jax nearest --model FOLDER_OR_ID --word king --minus man --plus woman
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformer_jax.cli.command import ModelOptions, run
from transformer_jax.cli.flags import WORDS


@dataclass(frozen=True, kw_only=True)
class Nearest(ModelOptions):
    """Command-line options."""

    word: str
    """A word that is a single token."""
    minus: tuple[str, ...] = field(default=(), metadata=WORDS)
    """Words whose vectors are subtracted."""
    plus: tuple[str, ...] = field(default=(), metadata=WORDS)
    """Words whose vectors are added."""
    count: int = 10
    """Number of words to list."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Nearest, argv, nearest)


def nearest(options: Nearest) -> None:
    """Print the words, each after its cosine."""
    from transformer_jax.tokenizers.pieces import marked

    model = options.load_float32()
    found = model.inspect.nearest(
        options.word, minus=options.minus, plus=options.plus, count=options.count
    )
    for text, cosine in found:
        print(f"{cosine:7.4f}  {marked(text)}")
