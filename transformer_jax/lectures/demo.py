"""Run a demonstration from the lectures with your own numbers, print a table, and save a picture.

    python -m transformer_jax demo
    python -m transformer_jax demo streaming_windows --window 7 --out runs/demos

Without a name, the command lists all demonstrations. Each demonstration accepts only the options
that it uses. `python -m transformer_jax demo NAME --help` lists the options with their defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformer_jax.cli.command import run
from transformer_jax.cli.process import escape_unprintable
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import nearest
from transformer_jax.lectures.demos import demonstrations


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration that the first argument names, and return the exit status."""
    escape_unprintable()
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    summaries = demonstrations()
    if name in ("-h", "--help"):
        longest = max(map(len, summaries))
        print("usage: python -m transformer_jax demo NAME [--FLAG VALUE ...]\n")
        print("\n".join(f"  {one:{longest}}  {line}" for one, line in summaries.items()))
        print("\nTo list the flags of one: python -m transformer_jax demo NAME --help")
        return 0
    if name not in summaries:
        rule = f"must be {' or '.join(summaries)}{nearest(name, summaries)}"
        print(f"demo: demonstration is {name!r}: {rule}", file=sys.stderr)
        return 2
    demonstration = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
    from transformer_jax.lectures.demos.shared import MEANINGS, settings  # imports Matplotlib

    fields = []
    for option, (default, _) in demonstration.OPTIONS.items():
        kind: Any = str if option in ("data", "preset", "sentence") else int
        text = f"{MEANINGS[option]}; default: {default}."
        # None, because --quick changes the defaults
        fields.append((option, kind, dataclasses.field(default=None, metadata={"help": text})))
    bases = (DemoOptions,)
    options = dataclasses.make_dataclass("Demo", fields, bases=bases, frozen=True, kw_only=True)

    def demonstrate(options: Any) -> None:
        values = {name: getattr(options, name) for name in demonstration.OPTIONS}
        values = {name: value for name, value in values.items() if value is not None}
        arguments = settings(demonstration.OPTIONS, options.out, options.quick, **values)
        arguments.format, arguments.dark = options.format, options.dark
        if arguments.dark and arguments.format != "svg":
            raise ConfigError("dark needs --format svg")
        options.out.mkdir(parents=True, exist_ok=True)  # before a long computation
        demonstration.demonstrate(arguments)

    return run(options, rest, demonstrate, name=f"demo {name}", about=demonstration.__doc__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options for every demonstration."""

    out: Path = Path("runs/demos")
    """The folder for the picture."""
    format: Literal["png", "svg"] = "png"
    """Format of the picture."""
    dark: bool = False
    """Also save an svg for dark pages."""
    quick: bool = False
    """Use small sizes, for tests."""
