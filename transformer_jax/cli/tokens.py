"""Show how text is tokenized, with the pieces, the IDs and, for BPE, the merges.

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
    """Command-line options."""

    model: str | None = None
    """Folder of a run or of a published model, or the model's ID on the Hugging Face Hub."""
    data: str | None = None
    """A text file on which a tokenizer is trained, instead of --model."""
    tokenizer: Literal["char", "byte", "word", "bpe"] | None = None
    """With --data: kind of tokenizer; default: char."""
    bpe_vocab_size: int | None = None
    """With --tokenizer bpe: vocabulary size, including the 256 bytes; default: as in train.py."""
    prompt: str
    """The text to tokenize."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Tokens, argv, tokens)


def tokens(options: Tokens) -> None:
    """Print the pieces of the text and their merges."""
    text = options.prompt
    if not text:
        raise ConfigError(f"prompt is {text!r}: must not be empty")
    from transformer_jax.tokenizers.pieces import marked, merge_steps, pieces, token_texts
    from transformer_jax.tokenizers.special import plain
    from transformer_jax.tokenizers.trained import WordTokenizer

    if (options.model is None) == (options.data is None):
        raise ConfigError("pass exactly one of model and data")
    kind, size = options.tokenizer, options.bpe_vocab_size
    if options.data is not None:
        from transformer_jax.config import TrainConfig
        from transformer_jax.training.data import read, train_tokenizer

        kind = kind or "char"
        if size is not None and kind != "bpe":
            raise ConfigError(f"bpe_vocab_size is {size}: needs tokenizer bpe, not {kind}")
        whole = "".join(source.text() for source in read(options.data))
        sizes: dict[str, Any] = {} if size is None else {"bpe_vocab_size": size}
        tokenizer = train_tokenizer(TrainConfig(tokenizer=kind, **sizes), whole, whole)
    else:
        for name, value in {"tokenizer": kind, "bpe_vocab_size": size}.items():
            if value is not None:
                raise ConfigError(f"{name} is {value!r}: needs data")
        from transformer_jax.checkpoints.run_folder import RunFolder

        assert options.model is not None
        # A run of a translation model has a separate tokenizer for sources.
        source = RunFolder(Path(options.model)).read_source_tokenizer()
        tokenizer = source or read_tokenizer(options.model)
    found = pieces(tokenizer, text)
    print(f"{plain(tokenizer)!r}: {len(found)} tokens in the text")
    # Unknown words share token 0, so their spelling comes from the text.
    words = iter(text.split()) if isinstance(plain(tokenizer), WordTokenizer) else None
    width = len(str(max((i for i, _ in found), default=0)))
    for i, piece in found:
        line = f"{i:{width}}  {marked(piece)}"
        if words is not None and i != 1:  # token 1 is the end of a line
            word = next(words)
            line += f"  {marked(word)}: not among the words of the training text" * (i == 0)
        print(line)
    steps = [ids for ids in merge_steps(tokenizer, text) if len(ids) > 1]
    # A repeated word is merged the same way each time, so print it once.
    for n, merged in enumerate({tuple(ids[-1]): ids for ids in steps}.values()):
        print("\nmerges:" if not n else "")
        for ids in merged:
            print("  " + " ".join(map(marked, token_texts(tokenizer, ids))))
