"""How much do checkpoints and monitoring slow down a training run?

    python -m benchmarks.saving_and_watching --out benchmarks/results/saving_and_watching.json

Three variants of the same run alternate: without either, with a checkpoint every N steps, and with
monitoring (TensorBoard files, --dump-batch, and a line of measurements every ten steps). Each
variant is divided into stretches of N steps, of which the first is excluded because it includes
compilation. A stall is the time that the loop waits for a save. The CPU time of the writing thread
affects only the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import environment, headline, limits, prepare, table, write
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ModelConfig, TrainConfig, preset
from transformer_jax.models.factory import num_params
from transformer_jax.training.loop import fit

QUESTION = "training: what checkpoints and watching cost the steps"
NEVER = 10**6


@dataclass(frozen=True)
class Case:
    """Run, and the number of steps between its checkpoints."""

    name: str
    model: ModelConfig
    interval: int
    batch_size: int
    stretches: int = 2


CASES = (
    Case("shakespeare-cpu", preset("shakespeare-cpu"), 250, 32),
    Case("10M", ModelConfig(d_model=384, num_heads=6, num_layers=6, max_len=256), 30, 4),
    Case("GPT-2 124M", replace(preset("gpt2"), max_len=256), 20, 2, stretches=1),
)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser("saving_and_watching", description=QUESTION)
    parser.add_argument("--quick", action="store_true", help="the smallest case, short")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    prepare()
    before = environment()
    print(headline(before))
    before["limits"] = limits("float32")
    cases = [case for case in CASES if options.only is None or options.only in case.name]
    if options.quick:
        cases = [replace(CASES[0], interval=20)]
    found = []
    for case in cases:
        found.append(measured(case, 1 if options.quick else options.rounds))
        print(found[-1], flush=True)
    heads = ["run", "parameters", "steps between", "s between", "stall", "saved / bare",
             "watched / bare"]  # fmt: skip
    rows = [
        [
            f["case"], f"{f['parameters']:,}", str(f["interval"]), f"{f['seconds']['bare']:.3f}",
            f"{f['stall']:.2%}", f"{f['ratio']['saved']:.3f}", f"{f['ratio']['watched']:.3f}",
        ]
        for f in found
    ]  # fmt: skip
    print(table(heads, rows))
    if options.out is not None:
        write(options.out, QUESTION, before, {"cases": found})


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Return the seconds per stretch for each variant, ratios to the bare run, and the stall."""
    seconds: dict[str, list[float]] = {"bare": [], "saved": [], "watched": []}
    stalls = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        rng = np.random.default_rng(0)
        text.write_text("".join(rng.choice(list("abcdefgh ,.\n"), 200_000)))
        runs = _runs(case, text)
        for number in range(rounds):
            for name in list(seconds)[:: 1 if number % 2 == 0 else -1]:
                out = Path(folder) / f"{name}-{number}"
                with contextlib.redirect_stdout(None):
                    fit(replace(runs[name], out=str(out)), vocab_size=case.model.vocab_size)
                lines = _stretches(RunFolder(out).read_metrics(), case.interval)
                seconds[name].append(statistics.median(line["seconds"] for line in lines))
                if name == "saved":
                    stalls += [line["seconds_checkpoint"] / line["seconds"] for line in lines]
    return {
        "case": case.name,
        "parameters": num_params(case.model),
        "interval": case.interval,
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(taken, seconds["bare"], strict=True))
            for name, taken in seconds.items()
        },
        "stall": statistics.median(stalls),
        "longest_stall": max(stalls),
    }


def _runs(case: Case, text: Path) -> dict[str, TrainConfig]:
    """Return the config of one run per variant."""
    bare = TrainConfig(
        model=case.model, data=str(text), batch_size=case.batch_size, warmup_steps=0,
        steps=(case.stretches + 1) * case.interval, log_every=case.interval, eval_every=NEVER,
        eval_batches=1, checkpoint_every=NEVER, sample_tokens=0, keep=1,
    )  # fmt: skip
    there = importlib.util.find_spec("tensorboardX") is not None
    log = ("tensorboard",) if there else None
    return {
        "bare": bare,
        "saved": replace(bare, checkpoint_every=case.interval),
        "watched": replace(bare, log_every=10, log=log, dump_batch=50.0),
    }


def _stretches(lines: list[dict[str, Any]], interval: int) -> list[dict[str, float]]:
    """Return the seconds for each stretch of `interval` steps, except the first one.

    The first line after step n includes the checkpoint of that step.
    """
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        stretch = found.setdefault((line["step"] - 1) // interval, {})
        for name in ("seconds", "seconds_checkpoint"):
            stretch[name] = stretch.get(name, 0.0) + line[name]
    return [found[number] for number in sorted(found) if number > 0]


if __name__ == "__main__":
    main()
