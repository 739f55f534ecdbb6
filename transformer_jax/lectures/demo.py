"""Run a demonstration of the lectures with your own numbers: a table, and a picture.

    python -m transformer_jax demo
    python -m transformer_jax demo streaming_windows --window 7 --out runs/demos

Without a name all demonstrations are listed. Each takes the options that it has a use for:
`python -m transformer_jax demo NAME --help` lists them with their defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformer_jax.cli.command import run
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
    from transformer_jax.lectures.demos.shared import MEANINGS, settings  # with Matplotlib

    own = []
    for option, (default, _) in demonstration.OPTIONS.items():
        kind: Any = str if option in ("data", "preset", "sentence") else int
        text = f"{MEANINGS[option]}; default: {default}."
        # None, since the default with --quick is another.
        own.append((option, kind, dataclasses.field(default=None, metadata={"help": text})))
    options = dataclasses.make_dataclass("Demo", own, bases=(Drawn,), frozen=True, kw_only=True)

    def demonstrate(options: Any) -> None:
        given = {name: getattr(options, name) for name in demonstration.OPTIONS}
        given = {name: value for name, value in given.items() if value is not None}
        found = settings(demonstration.OPTIONS, options.out, options.quick, **given)
        found.format, found.dark = options.format, options.dark
        if found.dark and found.format != "svg":
            raise ConfigError("dark needs --format svg")
        options.out.mkdir(parents=True, exist_ok=True)  # before the work, which may take minutes
        demonstration.demonstrate(found)

    return run(options, rest, demonstrate, name=f"demo {name}", about=demonstration.__doc__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Options of every demonstration."""

    out: Path = Path("runs/demos")
    """The folder of the picture."""
    format: Literal["png", "svg"] = "png"
    """Of the picture."""
    dark: bool = False
    """An svg for dark pages too."""
    quick: bool = False
    """Small sizes, for a test."""
