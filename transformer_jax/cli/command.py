"""Run a command of this package: read its options, end with a status, print an error in a line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformer_jax.cli.flags import ConfigFlags, Parser, spelled
from transformer_jax.cli.process import one_line, print_anything
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.language_model import LanguageModel
    from transformer_jax.tokenizers.trained import Tokenizer

Options = TypeVar("Options")

PICTURES = ".png", ".svg", ".pdf"
"""How the file of a picture may end."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command that loads a model."""

    model: str
    """The folder of a run or of a published model, or its id on the Hugging Face hub."""
    checkpoint: Literal["best", "last"] | None = None
    """Of a run: that of the lowest held-out loss, or the last; default: best, if there is one."""
    init_from: str | None = None
    """Of a run with lora: where the model is now that it began from, if that has moved."""

    def load(self, **more: Any) -> LanguageModel:
        """Load the model; say so if it is a run's last one because none was evaluated."""
        from transformer_jax.text import language_model

        model = language_model.load(
            self.model, checkpoint=self.checkpoint, init_from=self.init_from, **more
        )
        if self.checkpoint is None and model.model.which == "last":
            why = f"no step was evaluated yet: this is the last one saved, step {model.model.step}"
            print(f"{type(self).__name__.lower()}: {why}", file=sys.stderr)
        return model

    def load_float32(self) -> LanguageModel:
        """Load the model, a published one in float32, so that its numbers are exact."""
        from transformer_jax.loading import is_run

        return self.load(dtype=None if is_run(self.model) else "float32")


@dataclass(frozen=True, kw_only=True)
class TypedModelOptions(ModelOptions):
    """Options of a command that loads a model in other types than its own."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of a published model: the type that its parameters get; default: their own."""
    weights: Literal["bf16", "int8", "int4"] | None = None
    """Store the weights in this type; int8 takes a quarter of float32's memory."""


def check_picture(out: Path, endings: Sequence[str] = PICTURES) -> None:
    """Raise ConfigError unless the file's ending is a picture's and its folder exists."""
    if out.suffix.lower() not in endings:
        raise ConfigError(f"out is {str(out)!r}: must end in {' or '.join(endings)}")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"out is {str(out)!r}: must be a file in a folder that exists")


def refuse_unread(
    options: object, reads: Mapping[str, Collection[str]], chosen: str, needs: str = "needs"
) -> None:
    """Raise ConfigError for an option that was given and is read only with another choice.

    `reads` are the choices, each with the options that it reads.
    """
    for name in dict.fromkeys(name for names in reads.values() for name in names):
        value = getattr(options, name)
        if value is not None and name not in reads[chosen]:
            those = " or ".join(one for one, names in reads.items() if name in names)
            raise ConfigError(f"{name} is {value!r}: {needs} {those}")


def say_unknown(
    name: str, tokenizer: Tokenizer, texts: Sequence[str], masks: Sequence[str] = ()
) -> None:
    """Say in a line which words of the texts, but for masks, have no token of their own.

    What a model would warn of is said by then.
    """
    from transformer_jax.tokenizers.special import unknown_words

    if line := unknown_words(tokenizer, texts, masks):
        print(f"{name}: {line}", file=sys.stderr)


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a run, of a prepared folder, or of a published model."""
    from transformer_jax.loading import published_tokenizer
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.tokenizers.special import tokenizer_from_json

    file = Path(path, "tokenizer.json")
    if file.is_file():
        text = file.read_text("utf-8", "surrogatepass")
        # A published tokenizer.json has no such key in front.
        if text.startswith('{\n "kind"'):  # as `to_json` writes it
            return tokenizer_from_json(text)
    return published_tokenizer(open_weights(path))


def run(
    options: type[Options],
    argv: Sequence[str] | None,
    work: Callable[..., int | None],
    *more: ConfigFlags,
    name: str | None = None,
    about: str | None = None,
) -> int:
    """Read the options of a command, let it work, and return the exit status.

    The command is called as the class of its options, or `name`; its help begins with `about`, or
    with the docstring of the options' module. `work` gets the options, and the texts of the fields
    of `more` flags. The status is what it returns, or 0; 1: something cannot be
    read; 2: usage; 130: interrupted.
    """
    # A terminal may have no character for what a model writes.
    print_anything()
    name = name or options.__name__.lower()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        own = ConfigFlags(options, whole=name, none=False)
        about = about or sys.modules[options.__module__].__doc__
        parser = Parser(f"python -m transformer_jax {name}", about)
        parser.add_argument("-h", "--help", action="help", help="print this and exit")
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        own.add_to(parser, None, (name,) if {"-h", "--help"} & {*argv} else ())
        names = own.names | {"--help": "--help", "--debug": "--debug"}
        for flags in more:
            flags.add_to(parser, None, ())
            names = flags.names | names
        arguments = parser.parse_args(spelled(argv, names))
        with warnings.catch_warnings():
            # Python would print the line of this package's code with each warning.
            warnings.filterwarnings("ignore", "unknown words: ", UserWarning)  # `say_unknown` does
            return work(own.options(arguments), *(flags.given(arguments) for flags in more)) or 0
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except Exception as error:
        if "--debug" in argv:
            raise
        from transformer_jax.checkpoints.checkpoint import CheckpointError

        print(f"{name}: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError | OSError) else 2
