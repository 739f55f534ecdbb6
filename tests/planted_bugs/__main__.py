"""Plant each slip of `slips.py` in a copy of the project, and report which test catches it.

`python -m tests.planted_bugs` runs the tests of each slip with the slip in place; one of them must
fail. Afterward it runs all failed tests without slips; there they must pass. Results are stored
under a hash of the slip, its file and its tests, so that a second run does only the rest.
`--write FILE` writes the table.

Each run is a fork of this process, which has already imported JAX and Flax: these imports take
longer than most of the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.planted_bugs.slips import SLIPS, Slip

ROOT = Path(__file__).parents[2]
PARTS = (
    "transformer_jax", "kernels", "tests", "benchmarks", "reproduce", "docs", "train.py",
    "pyproject.toml", "README.md", "CONTRIBUTING.md",
)  # fmt: skip
LIMIT = 300
"""Seconds for the tests of one slip; if they take longer, the slip counts as not caught."""

FAILED = r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$"
"""Pattern of pytest's line about a failed test and the reason."""

IMPORTED = "jax", "jax.experimental.pallas.tpu", "flax.linen", "optax"
"""Modules imported before the forks; none of them starts a JAX backend."""


def why_not(slip: Slip) -> str | None:
    """Return why a slip does not apply, or None if it does."""
    found = (ROOT / slip.file).read_text().count(slip.old)
    return None if found == 1 else f"{slip.name}: {slip.file} has the old text {found} times"


def key_of(slip: Slip) -> str:
    """Return a hash of a slip, its file and its tests, but not of the rest of the package."""
    files = sorted({slip.file, *(test.partition("::")[0] for test in slip.tests)})
    texts = [(ROOT / file).read_text() for file in files]
    return hashlib.sha256(json.dumps([slip, texts]).encode()).hexdigest()


def copy_project(target: Path) -> None:
    """Copy the project, including the package's link to `kernels`."""
    for part in PARTS:
        source, ignored = ROOT / part, shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, target / part)


class Run:
    """Test run in a copy of the project, in a fork of this process."""

    def __init__(
        self, folder: Path, tests: Sequence[str], log: Path, failures: str = "--maxfail=1"
    ) -> None:
        self.start, self.log = time.monotonic(), log
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                status = self._test(folder, [failures, *tests])
            finally:
                os._exit(status)

    def _test(self, folder: Path, arguments: Sequence[str]) -> int:
        """Return pytest's status, and redirect its output to the file."""
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)  # for processes that tests start
        sys.dont_write_bytecode = True
        sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        options = ["-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += ["-o", f"addopts=-q --strict-markers -m 'not long' --timeout={LIMIT}"]
        status = int(pytest.main([*options, *arguments]))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return status

    def status(self, limit: float | None) -> int | None:
        """Return pytest's status, -1 after a timeout, or None while it is running."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if limit is not None and self.seconds > limit:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return -1
        return None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start


def result_of(slip: Slip, status: int, log: str, seconds: float) -> dict[str, Any]:
    """Return the result of a slip: the failed test and the reason, or why no test failed."""
    failed = re.search(FAILED, log, re.MULTILINE)
    found = {"name": slip.name, "key": key_of(slip), "seconds": round(seconds, 1)}
    if status == 1 and failed is not None and "Timeout" not in (why := failed[2] or ""):
        return found | {"seen": failed[1], "why": why[:200]}
    why = {-1: "took too long", 0: "no test failed"}.get(status, f"pytest ended with {status}")
    return found | {"seen": None, "why": why if status in (-1, 0) else f"{why}: {log[-600:]}"}


def planted(slips: Sequence[Slip], folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the result of each slip, planted by itself in one of the copies."""
    free, running = list(folders), list[tuple[Slip, Path, str, Run]]()
    waiting = list(slips)
    while waiting or running:
        while waiting and free:
            slip, folder = waiting.pop(0), free.pop()
            text = (folder / slip.file).read_text()
            (folder / slip.file).write_text(text.replace(slip.old, slip.new))
            running.append((slip, folder, text, Run(folder, slip.tests, folder / "log")))
        time.sleep(0.1)
        for item in list(running):
            slip, folder, text, run = item
            status = run.status(LIMIT)
            if status is not None:
                running.remove(item)
                (folder / slip.file).write_text(text)
                free.append(folder)
                yield result_of(slip, status, run.log.read_text(), run.seconds)


def without_slips(folder: Path, lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run the failed tests without slips; a slip is not caught if its test still fails."""
    run = Run(folder, sorted({line["seen"] for line in lines}), folder / "log", "--maxfail=1000")
    while (status := run.status(None)) is None:
        time.sleep(0.1)
    log = run.log.read_text()
    print(f"without a slip: {(log.strip().splitlines() or [''])[-1]}", flush=True)
    failed = {match[1] for match in re.finditer(FAILED, log, re.MULTILINE)}
    if status not in (0, 1) or (status == 1 and not failed):
        raise SystemExit(log[-4000:])
    for line in lines:
        if line["seen"] in failed:
            yield line | {"seen": None, "why": f"{line['seen']} fails without it too"}
        else:
            yield line | {"green": True}


def table(results: dict[str, dict[str, Any]], earlier: str) -> str:
    """Return the results as a page; slips without a result keep the row of the earlier page."""
    known = [(slip, results[slip.name]) for slip in SLIPS if slip.name in results]
    seen = sum(result["seen"] is not None for _, result in known)
    earlier_rows = dict(re.findall(r"^\| `.+?` \| (.+?) \| (.+?) \|", earlier, re.MULTILINE))
    lines = [
        "# Planted bugs",
        "",
        "`python -m tests.planted_bugs --write tests/planted_bugs.md` plants one bug at a time in",
        "a copy of the project and runs the tests of its folder, without the long ones.",
        f"The tests caught {seen} of {len(known)} bugs.",
    ]
    if len(known) < len(SLIPS):
        lines += [
            f"The other {len(SLIPS) - len(known)} have not run since their code or tests changed;",
            "their rows show the earlier result.",
        ]
    lines += ["", "| file | bug | caught by | seconds |", "|---|---|---|---|"]
    for slip in sorted(SLIPS, key=lambda slip: slip.file):
        result = results.get(slip.name)
        if result is None:
            test, seconds = earlier_rows.get(slip.name, ""), "not rerun"
        else:
            found = result["seen"]
            test = "no test" if found is None else f"`{found.removeprefix('tests/')}`"
            seconds = f"{result['seconds']:.0f}"
        lines.append(f"| `{slip.file}` | {slip.name} | {test} | {seconds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Plant the selected slips; return 1 if one does not apply or is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_bugs")
    parser.add_argument("--only", action="append", metavar="WORDS", help="slips with these words")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only print the slips")
    parser.add_argument("--results", type=Path, default=ROOT / "build/planted_bugs.jsonl")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of all results")
    args = parser.parse_args()
    chosen = [s for s in SLIPS if not args.only or any(w in s.name + s.file for w in args.only)]
    if args.list:
        print("\n".join(f"{slip.file}: {slip.name}" for slip in chosen))
        return 0
    if wrong := [why for slip in chosen if (why := why_not(slip)) is not None]:
        print("does not apply:", *wrong, sep="\n  ")
        return 1
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    old: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, args.results.read_text().splitlines()):
        old[line["key"]] = old.get(line["key"], {}) | line

    def record(line: dict[str, Any]) -> None:
        old[line["key"]] = old.get(line["key"], {}) | line
        with args.results.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    left = [slip for slip in chosen if old.get(key_of(slip), {}).get("seen") is None]
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as temporary:
        folders = [Path(temporary) / str(n) for n in range(args.workers if left else 0)]
        for folder in folders:
            copy_project(folder)
        for result in planted(left, folders):
            record(result)
            outcome = result["seen"] or f"NOT SEEN ({result['why']})"
            print(f"{result['name']}: {outcome}, {result['seconds']} s", flush=True)
        lines = [old[key] for slip in chosen if (key := key_of(slip)) in old]
        unproven = [line for line in lines if line["seen"] and not line.get("green")]
        if unproven:
            if not folders:
                folders = [Path(temporary)]
                copy_project(folders[0])
            for line in without_slips(folders[0], unproven):
                record(line)
    found = {slip.name: old.get(key_of(slip), {}) for slip in SLIPS}
    results = {name: line for name, line in found.items() if "seen" in line}
    if args.write:
        earlier = args.write.read_text() if args.write.exists() else ""
        args.write.write_text(table(results, earlier))
    missed = [slip.name for slip in chosen if results[slip.name]["seen"] is None]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} slips were seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
