"""Shared code of the experiments: flags, a table of results and claims, and a text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import environment
from transformer_jax.lectures.demos.shared import print_table
from transformer_jax.training.data import read

VOCAB = 64
"""Number of letter IDs."""

Row = tuple[str, str, Sequence[float]]
"""Row of the table: a quantity, the paper's claim about it, and the result for each seed."""


def read_arguments(
    text: str | None,
    argv: Sequence[str] | None,
    folders: Mapping[str, str] = MappingProxyType({}),
    **sizes: int,
) -> argparse.Namespace:
    """Parse --seeds, --out, and a flag for each size and each folder.

    Sizes have default values. Folders are required and have a help text. `seeds` becomes a range,
    and `started` is the time at which the flags were parsed.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"seeds": 3} | sizes
    for name, default in sizes.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"default: {default}")
    for name, what in folders.items():
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FOLDER", help=what)
    parser.add_argument("--out", type=Path, help="folder of the picture; without it none is drawn")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the picture")
    arguments = parser.parse_args(argv)
    for name in sizes:
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}: must be positive")
    arguments.dark, arguments.started = False, time.perf_counter()
    arguments.seeds = range(arguments.seeds)
    return arguments


def print_figures(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Print rows with the result for each seed and the spread (largest minus smallest)."""
    table = [
        [name, claim, *(f"{x:.3g}" for x in found), f"{np.ptp(np.asarray(found)):.2g}"]
        for name, claim, found in rows
    ]
    seeds = [f"seed {seed}" for seed in arguments.seeds]
    print_table(["figure", "the paper says", *seeds, "spread"], table)
    where = environment()
    versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "flax", "optax"))
    seconds = time.perf_counter() - arguments.started
    print(
        f"\n{versions}, {where['device']} with {where['cores']} cores, {where['time'][:10]}", end=""
    )
    print(f", {seconds:.0f} s, load {where['load']:.1f}")


def text_ids() -> jax.Array:  # i32[n]
    """Return the documentation of Python as IDs of its most common letters.

    All other letters share one ID.
    """
    text = read("python-docs")[0].text()
    letters = sorted(set(text), key=lambda c: (-text.count(c), c))[: VOCAB - 1]
    known = {letter: i for i, letter in enumerate(letters)}
    return jnp.asarray([known.get(c, VOCAB - 1) for c in text], jnp.int32)
