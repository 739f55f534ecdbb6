"""Run a command of the library: `python -m transformer_jax COMMAND [--FLAG VALUE ...]`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from transformer_jax.cli.programs import keep_programs
from transformer_jax.config.fields import nearest

COMMANDS = {
    "train": "train a model for a task; in a checkout also `python train.py`",
    "generate": "write, answer or translate with a trained or published model",
    "serve": "answer clients of OpenAI's API over HTTP with a trained or published model",
    "evaluate": "judge a trained or published model on a file that it has not seen",
    "inspect": "look inside a model: attention, lens, patching, heads, attribution, as a picture",
    "tokens": "show the pieces of a text that a model reads, with their ids",
    "nearest": "list the words whose vectors are nearest to that of a word",
    "prepare": "turn files of text into a folder of tokens, for corpora larger than memory",
    "compare": "train language models on one text on equal terms: perplexities and a picture",
    "plot": "compare runs: their losses, a table and a picture",
    "demo": "show what a lecture claims, with your own numbers: a table and a picture",
    "plan": "say what a step takes on hardware that need not be attached",
    "convert": "write a run or a published model as a published checkpoint",
    "export": "write a decoder as programs that run where this package is not installed",
}
"""Each command and its purpose; each is a module of `transformer_jax.cli` with a `main`."""

LECTURES = "compare", "demo"
"""The commands whose modules are in `transformer_jax.lectures`."""

MOVED = {"attention": "inspect --what attention", "inside": "inspect"}
"""Names that commands had, and what to type instead."""

RUN_PROGRAMS = "generate", "serve", "evaluate", "inspect"
"""The commands that run a model, whose programs are kept for the next time; train says itself."""

USAGE = "\n".join(
    [
        "usage: python -m transformer_jax COMMAND [--FLAG VALUE ...]",
        "",
        *(f"  {name:10} {does}" for name, does in COMMANDS.items()),
        "",
        "The flags of each: python -m transformer_jax COMMAND --help; --version says which this is",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names and return its exit status.

    Without a command, or with an unknown one, the status is 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        if argv[0] in RUN_PROGRAMS:
            keep_programs()
        folder = "lectures" if argv[0] in LECTURES else "cli"
        return importlib.import_module(f"transformer_jax.{folder}.{argv[0]}").main(argv[1:])
    if argv and argv[0] == "--version":
        own = sys.modules["transformer_jax"].__version__
        print(f"transformer_jax {own}, jax {version('jax')}")
        return 0
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv:
        meant = MOVED.get(argv[0])
        near = f", meant: {meant}" if meant else nearest(argv[0], COMMANDS)
        rule = f"must be {' or '.join(COMMANDS)}{near}"
        print(f"transformer_jax: command is {argv[0]!r}: {rule}", file=sys.stderr)
    else:
        print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
