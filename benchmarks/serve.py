"""How much faster is continuous batching than static batching?

    python -m benchmarks.serve --quick
    python -m benchmarks.serve --out benchmarks/results/serve_cpu.json

The same decoder answers requests with prompts of different lengths and geometrically distributed
answer lengths, with the same number of rows. Continuous batching uses `serve_requests`, which fills
free slots between its calls. With pauses, a call ends as soon as a slot is free. Static batching
uses `generate` for batches in order of arrival, and its loop ends when the last row of a batch
ends. All methods must return the same tokens. The lengths determine the number of steps for each
method, and thus the ideal speedup.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import specs, timing
from benchmarks.specs import ServeCase
from benchmarks.timing import Contender
from transformer_jax.decoding.continuous_batching import Request, serve_requests
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

QUESTION = "serving: seconds and latency of continuous and of static batching"
CONTINUOUS, PAUSING, STATIC = "continuous", "pausing", "static"
Clock = Callable[[], float]


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before))
    before["limits"] = timing.limits("float32", clock)
    found = []
    for case in specs.SERVE:
        if options.only in case.name and options.quick == ("quick" in case.tags):
            found.append(measure(case, options, clock))
            print(_report(found[-1]), flush=True)
    if options.out is not None:
        timing.write(options.out, QUESTION, before, found)


def pausing_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the number of steps if the next request always uses the first free slot.

    The prompt yields the first token of a request, and each step yields one more.
    """
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + int(length) - 1)
    return max(free)


def continuous_steps(lengths: Sequence[int], slots: int, call: int) -> int:
    """Return the number of steps if free slots are filled only between calls of `call` steps."""
    waiting, running, steps = [int(n) - 1 for n in lengths], [], 0
    while waiting or running:
        count = slots - len(running)
        running, waiting = running + waiting[:count], waiting[count:]
        taken = min(call, max(running))
        steps += taken
        running = [left - taken for left in running if left > taken]
    return steps


def static_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the number of steps if each batch, in order, runs as long as its longest row."""
    starts = range(0, len(lengths), slots)
    return sum(int(max(lengths[start : start + slots])) - 1 for start in starts)


@dataclass(frozen=True)
class Answers:
    """Answers of a contender, indexed by request number."""

    tokens: list[np.ndarray]
    latencies: np.ndarray  # f64[requests], seconds from arrival to the last token


def continuous(
    case: ServeCase, arrivals: np.ndarray, clock: Clock, steps: int, pause: bool = False
) -> Answers:
    """Run `serve_requests`, which receives each request at its arrival time."""
    step, params, prompts, lengths = _work(case)
    tokens: list[Any] = [None] * case.requests
    latencies, start = np.zeros(case.requests), clock()

    def queue() -> Iterator[Request | None]:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            while clock() - start < arrivals[number]:
                yield None
            yield Request(prompt, int(length))

    capacity = case.longest_prompt + case.most
    empty = init_cache(case.model, 1, capacity)
    answers = serve_requests(
        step,
        params,
        queue(),
        empty,
        slots=case.slots,
        capacity=capacity,
        steps_per_call=steps,
        pause=pause,
    )
    for answer in answers:
        tokens[answer.id] = answer.tokens
        latencies[answer.id] = clock() - start - arrivals[answer.id]
    return Answers(tokens, latencies)


def static(case: ServeCase, arrivals: np.ndarray, clock: Clock) -> Answers:
    """Run `generate` for batches of the requests that have arrived, in order of arrival."""
    step, params, prompts, lengths = _work(case)
    tokens: list[np.ndarray] = []
    latencies, start = np.zeros(case.requests), clock()
    while len(tokens) < case.requests:
        first = len(tokens)
        while clock() - start < arrivals[first]:
            pass
        come = np.searchsorted(arrivals, clock() - start, side="right")
        count = min(case.slots, int(come) - first)
        # Rows without a request end immediately, so that one program serves all batches.
        prompt = np.zeros((case.slots, case.longest_prompt), np.int32)
        sizes, limits = np.ones(case.slots, np.int32), np.zeros(case.slots, np.int32)
        for row, number in enumerate(range(first, first + count)):
            sizes[row], limits[row] = len(prompts[number]), lengths[number]
            prompt[row, : sizes[row]] = prompts[number]
        cache = init_cache(case.model, case.slots, case.longest_prompt + case.most)
        given = generate(
            step, params, prompt, cache, num_tokens=case.most, lengths=sizes, limits=limits
        )
        tokens += given.rows()[:count]
        batch = slice(first, first + count)
        latencies[batch] = clock() - start - arrivals[batch]
    return Answers(tokens, latencies)


_MADE: dict[ServeCase, Any] = {}


def _work(case: ServeCase) -> tuple[Any, Any, list[np.ndarray], np.ndarray]:
    """Return the model and the requests, created once."""
    if case not in _MADE:
        params = init_params(case.model, jax.random.key(0))
        _MADE[case] = make_step(build(case.model)), params, case.prompts(), case.lengths()
    return _MADE[case]


def measure(case: ServeCase, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Return timings, latencies, and ratios for one case."""
    lengths, eagerly = case.lengths(), np.zeros(case.requests)

    def ours(arrivals: np.ndarray, pause: bool = False) -> Answers:
        return continuous(case, arrivals, clock, options.steps, pause)

    first = ours(eagerly), static(case, eagerly, clock)
    for mine, its, length in zip(*(answers.tokens for answers in first), lengths, strict=True):
        if len(mine) != length or not np.array_equal(mine, its):
            raise AssertionError(f"the contenders differ: {mine} and {its}")
    start = clock()
    ours(eagerly)
    arrivals = case.arrivals(clock() - start)
    latencies: dict[str, list[float]] = {CONTINUOUS: [], PAUSING: [], STATIC: []}

    def contender(name: str, answer: Callable[[], Answers]) -> Contender:
        def call() -> None:
            latencies[name].append(float(answer().latencies.mean()))

        return Contender(name, call)

    contenders = [
        contender(CONTINUOUS, lambda: ours(arrivals)),
        contender(PAUSING, lambda: ours(arrivals, True)),
        contender(STATIC, lambda: static(case, arrivals, clock)),
    ]
    taken = timing.interleave(
        contenders, rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    steps = {
        CONTINUOUS: continuous_steps(lengths, case.slots, options.steps),
        PAUSING: pausing_steps(lengths, case.slots),
        STATIC: static_steps(lengths, case.slots),
    }

    def spread(name: str) -> list[float]:
        pairs = zip(taken[name].samples, taken[STATIC].samples, strict=True)
        low, high = timing.Timing(tuple(peer / mine for mine, peer in pairs), 0.0).quartiles
        return [low, timing.speedup(taken[name], taken[STATIC]), high]

    both = (CONTINUOUS, PAUSING)
    new = int(lengths.sum())
    return {
        "case": case.name,
        "slots": case.slots,
        "requests": case.requests,
        "tokens": new,
        "steps_per_call": options.steps,
        "all_at_once": case.busy is None,
        "timings": {name: t.summary() for name, t in taken.items()},
        "tokens_per_s": {name: new / t.median for name, t in taken.items()},
        "mean_latency_s": {name: statistics.median(x) for name, x in latencies.items()},
        "steps": steps,
        "slots_in_use": {
            name: (new - case.requests) / max(1, case.slots * n) for name, n in steps.items()
        },
        "expected_speedup": {name: steps[STATIC] / max(1, steps[name]) for name in both},
        "speedup": {name: spread(name) for name in both},
    }


def _report(found: dict[str, Any]) -> str:
    ratios, expected, eagerly = found["speedup"], found["expected_speedup"], found["all_at_once"]
    rows = []
    for name, taken in found["timings"].items():
        low, high = taken["quartiles_s"]
        rows.append(
            (
                name,
                f"{1e3 * taken['median_s']:.0f}",
                f"{1e3 * low:.0f}-{1e3 * high:.0f}",
                f"{found['tokens_per_s'][name]:,.0f}",
                f"{1e3 * found['mean_latency_s'][name]:.0f}",
                f"{found['steps'][name]}" if eagerly else "",
                f"{found['slots_in_use'][name]:.2f}" if eagerly else "",
                "{1:.2f} ({0:.2f}-{2:.2f})".format(*ratios[name]) if name in ratios else "",
                f"{expected[name]:.2f}" if name in ratios and eagerly else "",
            )
        )
    header = (
        "", "ms, median", "middle half", "tokens/s", "mean latency ms", "steps", "slots in use",
        f"{timing.FASTER} as static", "by steps",
    )  # fmt: skip
    return "\n".join(
        [
            f"\n{found['case']}: {found['requests']} requests, {found['tokens']} new tokens, "
            f"{found['slots']} slots",
            timing.table(header, rows),
        ]
    )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, a few rounds")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--steps", type=int, default=8, help="steps of a call, at most")
    add("--repeats", type=int, default=None, help="rounds (10, or 3 with --quick)")
    add("--seconds", type=float, default=60.0, help="about the longest one case may take")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, default=None, help="JSON to write")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 10
    return options


if __name__ == "__main__":
    main()
