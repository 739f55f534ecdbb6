"""Show the pieces of a text that a model reads, with their ids; of a BPE, how they were merged.

python -m transformer_jax tokens --run RUN --prompt TEXT
python -m transformer_jax tokens --model FOLDER_OR_ID --prompt TEXT
python -m transformer_jax tokens --data FILE --tokenizer bpe --bpe-vocab-size 300 --prompt TEXT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax.cli.command import Parser, run
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.tokenizers.trained import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (no tokenizer can be read) or 2 (usage)."""
    return run(_parser(), argv, _show)


def _show(arguments: argparse.Namespace) -> None:
    if not arguments.prompt:
        raise ConfigError(f"prompt is {arguments.prompt!r}: the text to cut is needed")
    from transformer_jax.tokenizers.pieces import marked, merge_steps, pieces, token_texts
    from transformer_jax.tokenizers.special import plain
    from transformer_jax.tokenizers.trained import WordTokenizer

    tokenizer, text = _tokenizer(arguments), arguments.prompt
    found = pieces(tokenizer, text)
    print(f"{plain(tokenizer)!r}: the text is {len(found)}")
    words = iter(text.split()) if isinstance(plain(tokenizer), WordTokenizer) else None
    width = len(str(max((i for i, _ in found), default=0)))
    for i, piece in found:
        line = f"{i:{width}}  {marked(piece)}"
        if words is not None and i != 1:  # 1 is the end of a line
            word = next(words)
            line += f"  {marked(word)}: not among the words of the training text" * (i == 0)
        print(line)
    steps = [word for word in merge_steps(tokenizer, text) if len(word) > 1]
    for n, word in enumerate({tuple(word[-1]): word for word in steps}.values()):
        print("\nmerges:" if not n else "")
        for ids in word:
            print("  " + " ".join(map(marked, token_texts(tokenizer, ids))))


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """Load the tokenizer of a run or of a published model, or make one of a text."""
    named = [name for name in ("run", "model", "data") if getattr(arguments, name) is not None]
    if len(named) != 1:
        raise ConfigError("run, model and data: give one of them")
    for name in ("tokenizer", "bpe_vocab_size"):
        if arguments.data is None and getattr(arguments, name) is not None:
            raise ConfigError(f"{name} is {getattr(arguments, name)!r}: needs data")
    if arguments.data is not None:
        from transformer_jax.config import TrainConfig
        from transformer_jax.training.data import read, train_tokenizer

        text = "".join(source.text() for source in read(arguments.data))
        kind, size = arguments.tokenizer or "char", arguments.bpe_vocab_size
        if size is not None and kind != "bpe":
            raise ConfigError(f"bpe_vocab_size is {size}: needs tokenizer bpe, it is {kind}")
        given: dict[str, Any] = {"tokenizer": kind}
        if size is not None:
            given["bpe_vocab_size"] = size
        return train_tokenizer(TrainConfig(**given), text, text)
    if arguments.run is not None:
        from transformer_jax.checkpoints.run_folder import RunFolder

        folder = RunFolder(Path(arguments.run))
        folder.read_config()  # which says so where there is no run
        return folder.read_source_tokenizer() or folder.read_tokenizer()
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.text.text_model import published_tokenizer

    return published_tokenizer(open_weights(arguments.model))


def _parser() -> Parser:
    about = "Show the pieces of a text that a model reads, with their ids; spaces are shown as ␣."
    parser = Parser("tokens", about)
    add = parser.add_argument
    add("--run", metavar="FOLDER", help="the run folder that train.py wrote")
    add("--model", metavar="FOLDER_OR_ID", help="a published model instead")
    add("--data", metavar="FILE", help="a text instead, of which a tokenizer is made")
    add(
        "--tokenizer", choices=("char", "byte", "word", "bpe"),
        help="of --data: its kind; default: char",
    )  # fmt: skip
    add(
        "--bpe-vocab-size", type=int, metavar="N",
        help="of --tokenizer bpe: the 256 bytes and N - 256 merges; default: that of train.py",
    )  # fmt: skip
    add("--prompt", metavar="TEXT", help="the text to cut")
    return parser
