"""Run a demonstration of the lectures with your own numbers: a table, and a picture.

    python -m transformer_jax demo
    python -m transformer_jax demo streaming_windows --window 7 --out runs/demos

Without a name all demonstrations are listed. Each takes the options that it has a use for:
`python -m transformer_jax demo NAME --help` lists them with their defaults.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.cli.command import Parser, run
from transformer_jax.cli.process import print_anything
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import nearest
from transformer_jax.lectures.demos import demonstrations


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration that the first argument names and return the exit status."""
    print_anything()
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    known = demonstrations()
    if name in ("-h", "--help"):
        longest = max(map(len, known))
        print("usage: python -m transformer_jax demo NAME [--FLAG VALUE ...]\n")
        print("\n".join(f"  {one:{longest}}  {line}" for one, line in known.items()))
        print("\nThe flags of each: python -m transformer_jax demo NAME --help")
        return 0
    if name not in known:
        rule = f"must be {' or '.join(known)}{nearest(name, known)}"
        print(f"demo: demonstration is {name!r}: {rule}", file=sys.stderr)
        return 2
    demonstration = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
    return run(_parser(name, demonstration), rest, lambda given: _demonstrate(demonstration, given))


def _parser(name: str, demonstration: Any) -> Parser:
    """Return a parser of every option; one that the demonstration has no use for is not in help."""
    from transformer_jax.lectures.demos.shared import MEANINGS

    parser = Parser(f"demo {name}", demonstration.__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demos"), help="the folder of the picture")
    add("--format", choices=("png", "svg"), default="png", help="of the picture")
    add("--dark", action="store_true", help="an svg for dark pages too")
    add("--quick", action="store_true", help="small sizes, for a test")
    for option, meaning in MEANINGS.items():
        default = demonstration.OPTIONS.get(option, (None, None))[0]
        shown = meaning if default is None else f"{meaning} (default {default})"
        text = shown if option in demonstration.OPTIONS else argparse.SUPPRESS
        kind = str if option in ("data", "preset", "sentence") else int
        add(f"--{option}", type=kind, help=text)
    return parser


def _demonstrate(demonstration: Any, arguments: argparse.Namespace) -> None:
    from transformer_jax.lectures.demos.shared import MEANINGS, settings

    given = {name: getattr(arguments, name) for name in MEANINGS}
    given = {name: value for name, value in given.items() if value is not None}
    found = settings(demonstration.OPTIONS, arguments.out, arguments.quick, **given)
    found.format, found.dark = arguments.format, arguments.dark
    if found.dark and found.format != "svg":
        raise ConfigError("dark needs --format svg")
    arguments.out.mkdir(parents=True, exist_ok=True)  # before the work, which may take minutes
    demonstration.demonstrate(found)
