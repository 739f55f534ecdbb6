"""Runner for commands, which reads options, prints one-line errors and returns an exit status."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformer_jax.cli.flags import ConfigFlags, Parser, spelled
from transformer_jax.cli.process import escape_unprintable, one_line
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.language_model import LanguageModel
    from transformer_jax.tokenizers.trained import Tokenizer

Options = TypeVar("Options")

PICTURES = ".png", ".svg", ".pdf"
"""File name extensions for pictures."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for a command that loads a model."""

    model: str
    """Folder of a run or of a published model, or the model's ID on the Hugging Face Hub."""
    checkpoint: Literal["best", "last"] | None = None
    """For a run: the checkpoint with the lowest held-out loss, or the last one; default: best if it
    exists."""
    init_from: str | None = None
    """For a LoRA run: the new location of the base model, if it has moved."""

    def load(self, **more: Any) -> LanguageModel:
        """Load the model; print a note if it is the last checkpoint because none was evaluated."""
        from transformer_jax.text import language_model

        model = language_model.load(
            self.model, checkpoint=self.checkpoint, init_from=self.init_from, **more
        )
        if self.checkpoint is None and model.model.which == "last":
            note = (
                f"no checkpoint has been evaluated yet; using the last one, step {model.model.step}"
            )
            print(f"{type(self).__name__.lower()}: {note}", file=sys.stderr)
        return model

    def load_float32(self) -> LanguageModel:
        """Load the model, with float32 parameters if it is a published model."""
        from transformer_jax.loading import is_run

        return self.load(dtype=None if is_run(self.model) else "float32")


@dataclass(frozen=True, kw_only=True)
class TypedModelOptions(ModelOptions):
    """Options for a command that loads a model and can convert its weights."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """For a published model: dtype of the parameters; default: as stored."""
    weights: Literal["bf16", "int8", "int4"] | None = None
    """Type in which the weights are stored; int8 needs a quarter of the memory of float32."""


def check_picture(out: Path, endings: Sequence[str] = PICTURES) -> None:
    """Raise ConfigError unless the file name has a picture's extension and the folder exists."""
    if out.suffix.lower() not in endings:
        raise ConfigError(f"out is {str(out)!r}: must end in {' or '.join(endings)}")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"out is {str(out)!r}: must be a file in an existing folder")


def refuse_unread(
    options: object, reads: Mapping[str, Collection[str]], chosen: str, needs: str = "needs"
) -> None:
    """Raise ConfigError if an option was passed that applies only to another choice.

    `reads` maps each choice to the options that apply to it.
    """
    for name in dict.fromkeys(name for names in reads.values() for name in names):
        value = getattr(options, name)
        if value is not None and name not in reads[chosen]:
            choices = " or ".join(one for one, names in reads.items() if name in names)
            raise ConfigError(f"{name} is {value!r}: {needs} {choices}")


def report_unknown(
    name: str, tokenizer: Tokenizer, texts: Sequence[str], masks: Sequence[str] = ()
) -> None:
    """Print one line that lists the words without a token, excluding masks.

    The line replaces the warning of the model, which `run` suppresses.
    """
    from transformer_jax.tokenizers.special import unknown_words

    if line := unknown_words(tokenizer, texts, masks):
        print(f"{name}: {line}", file=sys.stderr)


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a run, a prepared folder or a published model."""
    from transformer_jax.loading import published_tokenizer
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.tokenizers.special import tokenizer_from_json

    file = Path(path, "tokenizer.json")
    if file.is_file():
        text = file.read_text("utf-8", "surrogatepass")
        # `to_json` writes this key first; a published tokenizer.json does not start with it.
        if text.startswith('{\n "kind"'):
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
    """Parse the options of a command, call `work` and return the exit status.

    The default of `name` is the name of the options class. The first part of the help is `about`,
    which defaults to the docstring of the options' module. `work` receives the options and, for
    each item of `more`, the texts of its fields. It returns the exit status, or None for 0. Status
    1 means that something cannot be read, status 2 means a usage error, and status 130 means an
    interrupt.
    """
    # A model may generate characters that the terminal cannot display.
    escape_unprintable()
    name = name or options.__name__.lower()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        flags_of_options = ConfigFlags(options, whole=name, none=False)
        about = about or sys.modules[options.__module__].__doc__
        parser = Parser(f"python -m transformer_jax {name}", about)
        parser.add_argument("-h", "--help", action="help", help="print this help and exit")
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        flags_of_options.add_to(parser, None, (name,) if {"-h", "--help"} & {*argv} else ())
        names = flags_of_options.names | {"--help": "--help", "--debug": "--debug"}
        for flags in more:
            flags.add_to(parser, None, ())
            names = flags.names | names
        arguments = parser.parse_args(spelled(argv, names))
        with warnings.catch_warnings():
            # `report_unknown` prints these warnings without the source line that Python adds.
            warnings.filterwarnings("ignore", "unknown words: ", UserWarning)
            texts = (flags.texts(arguments) for flags in more)
            return work(flags_of_options.options(arguments), *texts) or 0
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
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
