"""How fast are decoding and training? This step runs only on request."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_light import checks
from benchmarks.first_light.checks import Check, Ended, Step, Verdict


def run(step: Step) -> None:
    """Decode with batch sizes 1 and 64, then train. Each can take half of the remaining time."""
    with tempfile.TemporaryDirectory() as folder:
        for name, module, arguments in _questions(step.rehearsed):
            path = Path(folder) / f"{len(step.records)}.json"
            seconds = step.left() / (2 if module == "decode" else 1)
            step.run(_check(name, module, (*arguments, "--out", str(path)), path, seconds))


def _questions(rehearsed: bool) -> list[tuple[str, str, Sequence[str]]]:
    if rehearsed:
        quick = ("--quick", "--skip-capacity", "--repeats", "1", "--seconds", "0")
        return [("decoding", "decode", quick), ("training", "train_gpu", ("--quick",))]
    decode = ("--skip-capacity", "--seconds", "45", "--only")
    return [
        ("decoding, batch 1", "decode", (*decode, "gpt2-xl-b1")),
        ("decoding, batch 64", "decode", (*decode, "gpt2-xl-b64")),
        ("training", "train_gpu", ("--seconds", "20")),
    ]


def _check(name: str, module: str, arguments: Sequence[str], path: Path, seconds: float) -> Check:
    def found() -> list[Any]:
        return [json.loads(path.read_text())["results"]] if path.exists() else []

    def judge(ended: Ended) -> Verdict:
        verdict = checks.by_status(ended)
        if verdict.outcome == "passed" and not found():
            return Verdict("failed", "nothing was written")
        return verdict

    return Check(
        name,
        checks.python(module, *arguments),
        seconds,
        judge=judge,
        collect=lambda ended: found(),
    )
