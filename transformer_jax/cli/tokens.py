"""Show the pieces of a text that a model reads, with their ids; of a BPE, how they were merged.

python -m transformer_jax tokens --model RUN --prompt TEXT
python -m transformer_jax tokens --model FOLDER_OR_ID --prompt TEXT
python -m transformer_jax tokens --data FILE --tokenizer bpe --bpe-vocab-size 300 --prompt TEXT

Spaces are shown as ␣.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_jax.cli.command import read_tokenizer, run
from transformer_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Options of the command."""

    model: str | None = None
    """The folder of a run or of a published model, or its id on the Hugging Face hub."""
    data: str | None = None
    """A text instead, from which a tokenizer is made."""
    tokenizer: Literal["char", "byte", "word", "bpe"] | None = None
    """Of --data: its kind; default: char."""
    bpe_vocab_size: int | None = None
    """Of --tokenizer bpe: the 256 bytes and N - 256 merges; default: that of train.py."""
    prompt: str
    """The text to cut."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (no tokenizer can be read) or 2 (usage)."""
    return run(Tokens, argv, tokens)


def tokens(options: Tokens) -> None:
    """Print the pieces of the text, and how they were merged."""
    text = options.prompt
    if not text:
        raise ConfigError(f"prompt is {text!r}: the text to cut is needed")
    from transformer_jax.tokenizers.pieces import marked, merge_steps, pieces, token_texts
    from transformer_jax.tokenizers.special import plain
    from transformer_jax.tokenizers.trained import WordTokenizer

    if (options.model is None) == (options.data is None):
        raise ConfigError("model and data: give one of them")
    kind, size = options.tokenizer, options.bpe_vocab_size
    if options.data is not None:
        from transformer_jax.config import TrainConfig
        from transformer_jax.training.data import read, train_tokenizer

        kind = kind or "char"
        if size is not None and kind != "bpe":
            raise ConfigError(f"bpe_vocab_size is {size}: needs tokenizer bpe, it is {kind}")
        whole = "".join(source.text() for source in read(options.data))
        sizes: dict[str, Any] = {} if size is None else {"bpe_vocab_size": size}
        tokenizer = train_tokenizer(TrainConfig(tokenizer=kind, **sizes), whole, whole)
    else:
        for name, value in {"tokenizer": kind, "bpe_vocab_size": size}.items():
            if value is not None:
                raise ConfigError(f"{name} is {value!r}: needs data")
        from transformer_jax.checkpoints.run_folder import RunFolder

        assert options.model is not None
        own = RunFolder(Path(options.model)).read_source_tokenizer()  # of a translator's run
        tokenizer = own or read_tokenizer(options.model)
    found = pieces(tokenizer, text)
    print(f"{plain(tokenizer)!r}: the text is {len(found)}")
    # Unknown words share token 0: what they were is known only from the text.
    words = iter(text.split()) if isinstance(plain(tokenizer), WordTokenizer) else None
    width = len(str(max((i for i, _ in found), default=0)))
    for i, piece in found:
        line = f"{i:{width}}  {marked(piece)}"
        if words is not None and i != 1:  # 1 is the end of a line
            word = next(words)
            line += f"  {marked(word)}: not among the words of the training text" * (i == 0)
        print(line)
    steps = [ids for ids in merge_steps(tokenizer, text) if len(ids) > 1]
    # A word that occurs often is merged in the same way each time.
    for n, merged in enumerate({tuple(ids[-1]): ids for ids in steps}.values()):
        print("\nmerges:" if not n else "")
        for ids in merged:
            print("  " + " ".join(map(marked, token_texts(tokenizer, ids))))
