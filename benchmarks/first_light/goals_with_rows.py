"""Run `benchmarks.attention` with tile sizes that were found earlier, or with other kernels.

    python -m benchmarks.first_light.goals_with_rows --rows ROWS.json -- --goals --only bias

Arguments after `--` are passed to `benchmarks.attention`. Without them, only limits are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from benchmarks import attention, specs, timing
from benchmarks.first_light import checks, rehearsal
from transformer_jax.kernels import Name, chips
from transformer_jax.kernels.contract import Blocks

Row = tuple[str, str, str, int, int, int, int, int, int, float]
"""(backend, chip, kernel, H, Hv, bytes per number, queries, keys, stages, slack)"""
SMALL = ["--ours", "pallas", "--repeats", "1", "--seconds", "0"]


def add_rows(rows: Sequence[Row]) -> None:
    """Register measured tile sizes in this process."""
    for name, chip, kind, H, Hv, width, *tiles in rows:
        chips.MEASURED[name, chip, kind, H, Hv, width] = Blocks(*tiles)  # type: ignore[index]


def kept(path: Path, measure: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a version of `timing.limits` that only the first of several processes measures."""

    def limits(*arguments: Any) -> dict[str, Any]:
        if not path.exists():
            path.write_text(json.dumps(measure(*arguments)))
        return json.loads(path.read_text())

    return limits


def small_limits(dtype: str, clock: Any) -> dict[str, Any]:
    """Return the limits for a small product, for a rehearsal."""
    rate = timing.matmul_rate("float32", 256, 1, clock)
    others = dict.fromkeys(("read_bytes_per_s", "copy_bytes_per_s"), 1.0)
    return {"dtype": dtype, "matmul_flops_per_s": rate} | others


def measure(
    arguments: list[str],
    limits: Path | None = None,
    rehearsed: bool = False,
    kernels: Name | None = None,
) -> None:
    """Run `benchmarks.attention` in this process."""
    only_limits = not arguments
    with contextlib.ExitStack() as stack:
        replace = lambda *given: stack.enter_context(mock.patch.object(*given))  # noqa: E731
        stack.enter_context(rehearsal.kernels(rehearsed, kernels))
        if rehearsed:
            cases = [rehearsal.shrunk(case) for case in specs.attention_cases("gpu")]
            replace(specs, "attention_cases", lambda *tags: cases)
            replace(timing, "limits", small_limits)
            arguments = [*arguments, *SMALL, "--without", "torch", "onnxruntime"]
        if limits is not None:
            replace(timing, "limits", kept(limits, timing.limits))
        if only_limits:  # for later processes
            timing.limits("float32" if rehearsed else "bfloat16", time.perf_counter)
        else:
            attention.main(["--skip-memory", *arguments])


def main() -> None:
    """Register the rows and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, help="JSON of rows of tile sizes")
    parser.add_argument("--limits", type=Path, help="JSON of limits: read, or written if not there")
    parser.add_argument("--kernels", choices=get_args(Name), help="instead of the device's own")
    parser.add_argument(rehearsal.FLAG, action="store_true", help=rehearsal.SAID)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.rows is not None:
        add_rows(json.loads(options.rows.read_text()))
    arguments = [x for x in options.rest if x != "--"]
    given = options.limits, options.rehearse, options.kernels
    checks.main_of(lambda: measure(arguments, *given))


if __name__ == "__main__":
    main()
