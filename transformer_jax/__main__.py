"""Command-line entry point: `python -m transformer_jax COMMAND [--FLAG VALUE ...]`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from transformer_jax.cli.programs import keep_programs
from transformer_jax.config.fields import nearest

COMMANDS = {
    "train": "train a model for a task; in a checkout also `python train.py`",
    "generate": "continue, answer or translate text with a trained or published model",
    "serve": "serve a trained or published model over HTTP with OpenAI's API",
    "evaluate": "evaluate a trained or published model on a held-out file",
    "inspect": "draw the attention, logit lens, patching, heads or attribution of a model",
    "tokens": "show the tokens of a text and their IDs",
    "nearest": "list the words whose embeddings are nearest to that of a word",
    "prepare": "turn text files into a folder of tokens, for corpora larger than memory",
    "compare": "train language models on one text on equal terms, and compare their perplexities",
    "plot": "compare the losses of runs in a table and a picture",
    "demo": "check a claim from a lecture with your own numbers, in a table and a picture",
    "plan": "estimate the memory and time of a step on hardware that need not be attached",
    "convert": "convert a run or a published model to a published checkpoint",
    "export": "write a decoder as programs that run without this package",
}
"""Purpose of each command. A command is a module in `transformer_jax.cli` with a `main`
function."""

LECTURES = "compare", "demo"
"""Commands whose modules are in `transformer_jax.lectures`."""

MOVED = {"attention": "inspect --what attention", "inside": "inspect"}
"""Former command names and their replacements."""

RUN_PROGRAMS = "generate", "serve", "evaluate", "inspect"
"""Commands that cache compiled programs on disk. The `train` command decides this itself."""

USAGE = "\n".join(
    [
        "usage: python -m transformer_jax COMMAND [--FLAG VALUE ...]",
        "",
        *(f"  {name:10} {purpose}" for name, purpose in COMMANDS.items()),
        "",
        "To list the flags of a command: python -m transformer_jax COMMAND --help",
        "To print the versions: python -m transformer_jax --version",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names and return its exit status.

    The status is 2 if there is no such command.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in COMMANDS:
        if argv[0] in RUN_PROGRAMS:
            keep_programs()
        folder = "lectures" if argv[0] in LECTURES else "cli"
        return importlib.import_module(f"transformer_jax.{folder}.{argv[0]}").main(argv[1:])
    if argv and argv[0] == "--version":
        this_version = sys.modules["transformer_jax"].__version__
        print(f"transformer_jax {this_version}, jax {version('jax')}")
        return 0
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv:
        moved = MOVED.get(argv[0])
        hint = f"; use {moved}" if moved else nearest(argv[0], COMMANDS)
        rule = f"must be {' or '.join(COMMANDS)}{hint}"
        print(f"transformer_jax: command is {argv[0]!r}: {rule}", file=sys.stderr)
    else:
        print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
