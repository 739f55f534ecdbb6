"""Run a command of this package: parse its flags, end with a status, print an error as one line."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from transformer_jax.cli.flags import spelled
from transformer_jax.cli.process import one_line, print_anything
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import nearest

if TYPE_CHECKING:
    from transformer_jax.text.text_model import TextModel
    from transformer_jax.tokenizers.trained import Tokenizer
    from transformer_jax.use.language_model import LanguageModel


PICTURES = ".png", ".svg", ".pdf"
"""How the file of a picture may end."""


class Parser(argparse.ArgumentParser):
    """Parse the flags of `python -m transformer_jax NAME`; an error is one line, `NAME: why`."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            prog=f"python -m transformer_jax {name}",
            usage=f"python -m transformer_jax {name} [--FLAG VALUE ...]",
            description=description,
            allow_abbrev=False,
        )
        self.name = name
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_loaded(self) -> None:
        """Add the flags of `load_named`: a model, its checkpoint, and how many tokens it reads."""
        self.add_argument(
            "--model", metavar="FOLDER_OR_ID",
            help="the folder of a run or of a published model, or its id on the Hugging Face hub",
        )  # fmt: skip
        self.add_argument(
            "--checkpoint", choices=("best", "last"),
            help="of a run; default: best, if there is one",
        )  # fmt: skip
        self.add_argument(
            "--context", type=int, metavar="N",
            help="most tokens of a prompt and its answer but the last, which is never read; "
            "default: the model's, at most 2048",
        )  # fmt: skip
        self.add_dtypes()

    def add_cache_dtype(self) -> None:
        """Add the flag that says in what a cache is held."""
        self.add_argument(
            "--cache-dtype", choices=("float32", "bfloat16", "int8"),
            help="of keys and values; default: the model's; int8 takes a quarter of float32",
        )  # fmt: skip

    def add_dtypes(self) -> None:
        """Add the flags that say in what a model is held."""
        self.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"),
            help="of a published --model: what its parameters become; default: what they are",
        )  # fmt: skip
        self.add_argument(
            "--weights", choices=("bf16", "int8", "int4"),
            help="hold the weights in this type; int8 takes a quarter of float32's memory",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        if wrong := re.fullmatch(r".*invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += nearest(wrong[1], re.findall(r"[^', ]+", wrong[2]))
        self.exit(2, f"{self.name}: {message}\n")


def load_named(arguments: argparse.Namespace) -> LanguageModel:
    """Load the model that the flags of `Parser.add_loaded` name."""
    if arguments.model is None:
        raise ConfigError("model is None: the folder of a model or a run is needed")
    from transformer_jax.use.language_model import load

    return load(
        arguments.model, checkpoint=arguments.checkpoint, dtype=arguments.dtype,
        weights=arguments.weights,
    )  # fmt: skip


def load_run(name: str, arguments: argparse.Namespace) -> TextModel:
    """Load a run's model for the command `name`; say so where it is the last for want of a best."""
    from transformer_jax.text import text_model

    which = arguments.checkpoint
    model = text_model.load_run(arguments.run, which, init_from=arguments.init_from)
    if which is None and model.which == "last":
        why = f"no step was evaluated yet: this is the last one saved, step {model.step}"
        print(f"{name}: {why}", file=sys.stderr)
    return model


def add_run(parser: Parser) -> None:
    """Add the flags that name a run, a checkpoint of it, and the model that it began from."""
    parser.add_argument("--run", metavar="FOLDER", help="the run folder that train.py wrote")
    parser.add_argument(
        "--checkpoint", choices=("best", "last"),
        help="of --run: the lowest held-out loss, or the last step; default: best, if there is one",
    )  # fmt: skip
    parser.add_argument(
        "--init-from", metavar="FOLDER_OR_ID",
        help="of --run with lora: where the model is now that it began from, if that has moved",
    )  # fmt: skip


def add_model(parser: Parser) -> None:
    """Add the flags that name a run, and the one that names a published model instead."""
    add_run(parser)
    parser.add_argument("--model", metavar="FOLDER_OR_ID", help="a published model instead")


def load_either(name: str, arguments: argparse.Namespace) -> LanguageModel:
    """Load the run or the published model that the flags of `add_model` name.

    ConfigError unless they name one of them, and for a flag that the other alone reads.
    """
    check_either(arguments)
    from transformer_jax.text.text_model import is_run
    from transformer_jax.use.language_model import LanguageModel, load

    if arguments.run is not None:
        return LanguageModel(load_run(name, arguments), arguments.run)
    return load(arguments.model, dtype=None if is_run(arguments.model) else "float32")


def check_either(arguments: argparse.Namespace) -> None:
    """Raise ConfigError unless the flags name a run or a model, and for a run's flags with it."""
    if (arguments.run is None) == (arguments.model is None):
        raise ConfigError("run and model: give one of them")
    for name in ("checkpoint", "init_from"):
        if arguments.model is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"{name} is {getattr(arguments, name)!r}: needs run")


def check_picture(out: Path, endings: Sequence[str] = PICTURES) -> None:
    """Raise ConfigError unless the file's ending is a picture's and its folder exists."""
    if out.suffix.lower() not in endings:
        raise ConfigError(f"out is {str(out)!r}: must end in {' or '.join(endings)}")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"out is {str(out)!r}: must be a file in a folder that exists")


def say_unknown(
    name: str, tokenizer: Tokenizer, texts: Sequence[str], masks: Sequence[str] = ()
) -> None:
    """Say in a line which words of the texts, but for masks, have no token of their own.

    What a model would warn of is said by then.
    """
    from transformer_jax.tokenizers.special import unknown_words

    if line := unknown_words(tokenizer, texts, masks):
        print(f"{name}: {line}", file=sys.stderr)


def run(
    parser: Parser, argv: Sequence[str] | None, work: Callable[[argparse.Namespace], None]
) -> int:
    """Parse and work, and return the exit status.

    0; 1: something cannot be read; 2: usage; 130: interrupted.
    """
    print_anything()
    names = {name: name for action in parser._actions for name in action.option_strings}
    try:
        arguments = parser.parse_args(spelled(sys.argv[1:] if argv is None else argv, names))
    except ConfigError as error:
        parser.error(str(error))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unknown words: ", UserWarning)  # `say_unknown` does
            work(arguments)
        return 0
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        from transformer_jax.checkpoints.checkpoint import CheckpointError

        print(f"{parser.name}: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError | OSError) else 2
