"""Cost of the parts of a call, found by disabling each part, with synchronized and chained calls.

    python -m benchmarks.first_light.ablations causal-16k-h128-s2048

Chained calls are many calls in one program, each of which uses numbers from the previous call. As
in a training step, the host does not wait between calls. To disable a part, a function of the
library is replaced in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import contenders, specs, timing
from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.checks import Unavailable
from benchmarks.specs import AttentionCase, Direction
from benchmarks.timing import Contender
from transformer_jax.kernels import Target, target, using

AS_IT_IS = "as it is"
CHAINED = ", chained"
TOLERANCE = 0.05  # relative to the largest value; allows for other orders of summation in bfloat16
Patch = contextlib.AbstractContextManager[Any]


def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a context that replaces a function of the library by `make(function)`."""
    found = importlib.import_module(f"transformer_jax.{module}")
    if not hasattr(found, name):
        raise Unavailable(f"transformer_jax.{module} has no {name}")
    return mock.patch.object(found, name, make(getattr(found, name)))


def rows_as_they_are() -> Patch:
    """Process the rows of tiles in their original order, not the heaviest first."""

    def without(_: Any) -> Callable[..., Any]:
        def prepare(lists: Any) -> Any:
            order = np.arange(lists.seen.shape[-1], dtype=np.int32)
            return lists._replace(rows=jnp.broadcast_to(order, lists.seen.shape))

        return prepare

    backend = lambda usual: dataclasses.replace(usual, prepare=without(usual))  # noqa: E731
    return replaced("kernels.hopper", "BACKEND", backend)


def automatic_barriers() -> Patch:
    """Synchronize the warps of a warpgroup before and after every store and copy."""

    def with_all(usual: Any) -> Callable[..., Any]:
        return lambda auto_barriers: usual(auto_barriers=True)

    return replaced("kernels.hopper.programs", "compiler_params", with_all)


def slack_of_8() -> Patch:
    """Rescale sums only if the maximum of a row increases by more than 8."""
    chosen = target()
    if not isinstance(chosen, Target):
        raise Unavailable(chosen)
    tiles = dataclasses.replace(chosen.backend.blocks("forward", 128, 128, 2), slack=8.0)
    return using(dataclasses.replace(chosen, blocks=(("forward", tiles),)))


VARIANTS: dict[str, Callable[[], Patch]] = {
    AS_IT_IS: contextlib.nullcontext,
    "rows as they are": rows_as_they_are,
    "automatic barriers": automatic_barriers,
    "slack 8": slack_of_8,
}
FORWARD_ALONE = ("slack 8",)


def call_of(case: AttentionCase, direction: Direction) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of (query, key, value, cotangent)."""
    attend = contenders.ours(case, "pallas")

    def forward(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return (attend(*inputs[:3]),)

    def both(query, key, value, cotangent):
        out, dq, dk, dv = contenders.with_gradients(attend, cotangent, query, key, value)
        return dq, dk, dv, out

    return forward if direction == "forward" else both


def chained(call: Callable[..., tuple[jax.Array, ...]], times: int) -> Callable[..., Any]:
    """Return a chain of calls, in which each input includes a number from each previous result."""

    def step(inputs: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        results = call(*inputs)
        corner = (0, 0, 0, 0)
        changed = [x.at[corner].set(y[corner]) for x, y in zip(inputs, results, strict=False)]
        return (*changed, *inputs[len(changed) :]), None

    return lambda *inputs: jax.lax.scan(step, inputs, length=times)[0]


def lowered(
    case: AttentionCase,
    direction: Direction,
    times: int,
    inputs: tuple[jax.Array, ...],
    names: Sequence[str] = tuple(VARIANTS),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the programs of all variants, and the reasons why other variants have no program."""
    programs, absent = {}, {}
    for name in names:
        if direction != "forward" and name in FORWARD_ALONE:
            continue
        jax.clear_caches()  # do not reuse the trace of the last variant
        try:
            with VARIANTS[name]():
                call = call_of(case, direction)
                once = jax.jit(call).lower(*inputs)
                many = jax.jit(chained(call, times)).lower(*inputs)
        except Unavailable as reason:
            absent[name] = str(reason)
        else:
            programs[name], programs[name + CHAINED] = once, many
    return programs, absent


def measure(
    case: AttentionCase,
    direction: Direction,
    seconds: float,
    times: int,
    names: Sequence[str] = tuple(VARIANTS),
) -> dict[str, Any]:
    """Return the milliseconds per call for each variant, measured alternately."""
    inputs = (*case.inputs()[:3], contenders.cotangent_of(case))
    programs, absent = lowered(case, direction, times, inputs, names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = dict(zip(programs, pool.map(lambda p: p.compile(), programs.values()), strict=True))
    expected = made[AS_IT_IS](*inputs)
    differs = {
        name: _difference(program(*inputs), expected)
        for name, program in made.items()
        if not name.endswith(CHAINED)
    }
    taken = timing.interleave(
        [
            Contender(name, lambda program=program: jax.block_until_ready(program(*inputs)))
            for name, program in made.items()
        ],
        rounds=15,
        seconds=seconds,
    )
    per_call = {n: t.median / (times if n.endswith(CHAINED) else 1) for n, t in taken.items()}
    return {
        "case": case.name,
        "direction": direction,
        "flops": case.flops(direction),
        "ms": {name: 1e3 * x for name, x in per_call.items()},
        "gain": {  # from disabling a part, per round
            name: timing.speedup(t, taken[AS_IT_IS + (CHAINED if name.endswith(CHAINED) else "")])
            for name, t in taken.items()
        },
        "differs": {name: x for name, x in differs.items() if not x <= TOLERANCE},
        "absent": absent,
    }


def _difference(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    pairs = [
        (np.asarray(x, np.float32), np.asarray(y, np.float32))
        for x, y in zip(found, expected, strict=True)
    ]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def main() -> None:
    """Measure one case, first the forward pass and then with gradients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", help="a name in specs.py")
    parser.add_argument("--seconds", type=float, default=5.0, help="for a direction, about")
    parser.add_argument("--times", type=int, default=32, help="calls in a chain")
    parser.add_argument(rehearsal.FLAG, action="store_true", help=rehearsal.SAID)
    options = parser.parse_args()
    [case] = [case for case in specs.ATTENTION if case.name == options.case]

    def both() -> None:
        if options.rehearse:
            with rehearsal.kernels(True):
                few = tuple(VARIANTS)[:2]
                checks.report(measure(rehearsal.shrunk(case), "forward", 0.0, 2, few))
            return
        directions: tuple[Direction, ...] = ("forward", "forward+backward")
        for direction in directions:
            checks.report(measure(case, direction, options.seconds, options.times))

    checks.main_of(both)


if __name__ == "__main__":
    main()
