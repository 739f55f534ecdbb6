"""Do the kernels for other NVIDIA GPUs also run on this GPU, and how fast are they?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.first_light import checks, rehearsal, smoke, speed
from benchmarks.first_light.checks import Check, Step

KERNELS = "--kernels", "ampere"
HOPPER_ALONE = "single-pass", "own barriers", "slack"
NAMES = tuple(name for name in smoke.NAMES if not any(word in name for word in HOPPER_ALONE))
CASES = "causal-16k-h128-s2048", "causal-16k-h64-s2048"


def run(step: Step) -> None:
    """Run the checks that these kernels support, then compare two cases with "xla" and cuDNN."""
    flags = (*KERNELS, *rehearsal.flags(step.rehearsed))
    found = (Check(name, smoke.command(name, flags), 60) for name in NAMES)
    step.run(*found, jobs=8)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES[:1] if step.rehearsed else CASES:
            path = Path(folder) / f"{case}.json"
            given = "--only", case, "--ours", "pallas", "--seconds", "5", "--out", str(path)
            others = "--without", "flax", "jax.nn", "tokamax", "jax-linear-attention", "torch flex"
            command = checks.python("first_light.goals_with_rows", *flags, "--", *given, *others)
            step.run(speed.cell(f"speed: {case}", command, path, 90))
