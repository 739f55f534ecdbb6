"""List the words whose vectors are nearest to that of a word, or to a sum of such vectors.

python -m transformer_jax nearest --run RUN --word king
python -m transformer_jax nearest --model FOLDER_OR_ID --word king --minus man --plus woman
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformer_jax.cli.command import Parser, add_model, load_either, run
from transformer_jax.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _list)


def _list(arguments: argparse.Namespace) -> None:
    if arguments.word is None:
        raise ConfigError("word is None: the word to begin with is needed")
    if arguments.count < 1:
        raise ConfigError(f"count is {arguments.count}: must be at least 1")
    model = load_either("nearest", arguments)
    found = model.nearest(
        arguments.word, minus=arguments.minus or (), plus=arguments.plus or (),
        count=arguments.count,
    )  # fmt: skip
    from transformer_jax.tokenizers.pieces import marked

    for text, cosine in found:
        print(f"{cosine:7.4f}  {marked(text)}")


def _parser() -> Parser:
    about = "List the words whose vectors (input embedding) have the largest cosine with a word's."
    parser = Parser("nearest", about)
    add = parser.add_argument
    add_model(parser)
    add("--word", metavar="WORD", help="a word that is one token of the model's tokenizer")
    add("--minus", action="append", metavar="WORD", help="take its vector away; may be repeated")
    add("--plus", action="append", metavar="WORD", help="add its vector; may be repeated")
    add("--count", type=int, default=10, metavar="N", help="how many words; default: 10")
    return parser
