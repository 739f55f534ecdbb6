"""A command of this package: its parser, how it ends, and what it says when it fails."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from transformer_jax.config import ConfigError
from transformer_jax.flags import spelled


class Parser(argparse.ArgumentParser):
    """Of `python -m transformer_jax.NAME`; an error is one line, `NAME: what is wrong`."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            prog=f"python -m transformer_jax.{name}", description=description, allow_abbrev=False
        )
        self.name = name
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.name}: {message}\n")


def run(
    parser: Parser, argv: Sequence[str] | None, work: Callable[[argparse.Namespace], None]
) -> int:
    """The exit status: 0, 1 (something cannot be read), 2 (usage) or 130 (interrupted)."""
    flags = [option for action in parser._actions for option in action.option_strings]
    try:
        arguments = parser.parse_args(spelled(sys.argv[1:] if argv is None else argv, flags))
    except ConfigError as error:
        parser.error(str(error))
    try:
        work(arguments)
        return 0
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError, NotImplementedError) as error:
        if arguments.debug:
            raise
        from transformer_jax.checkpoint import CheckpointError

        print(f"{parser.name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError | OSError) else 2
