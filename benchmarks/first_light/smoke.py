"""Do the kernels run, and are they correct? This step runs its checks from small to large."""

from __future__ import annotations

import re
import shutil
import sys

from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.checks import Check, Ended, Step, Verdict

NAMES = (
    "one tile, forward",
    *(f"causal 704, {what}, H {H}" for what in ("forward", "gradients") for H in (64, 128, 256)),
    "one tile, single-pass",
    "single-pass, 50 runs",
    "own barriers, 50 runs",
    "slack 8",
    "decode, a cache",
    "decode, a cache of int8",
    "decode, a paged cache",
    "few queries of groups, gradients",
    "ALiBi, gradients",
    "two-sided window, gradients",
    "softcap and documents, gradients",
    "65,536 tokens, gradients",
)
"""Checks in the order in which they run, implemented in `smoke_calls`."""
SANITIZED = "one tile, forward", "one tile, single-pass"
ATTACHED = tuple(
    f"tests/kernels/test_attached.py::{name}"
    for name in (
        "test_250_runs_are_bit_identical[groups-]",
        "test_250_runs_are_bit_identical[wide-window in documents]",
        "test_repeated_single_pass_runs_differ_only_in_last_dq_bits",
        "test_long_odd_lengths_match_reference_at_every_width[(2047, 2049)-64-pallas]",
        "test_long_odd_lengths_match_reference_at_every_width[(2047, 2049)-128-pallas]",
        "test_long_odd_lengths_match_reference_at_every_width[(2047, 2049)-256-pallas]",
        "test_long_odd_lengths_match_reference_at_every_width[(832, 1025)-128-pallas_unordered]",
        "test_mixed_warp_rescaling_matches_reference[128]",
        "test_benchmark_edge_cases_match_reference[edge-full]",
        "test_benchmark_edge_cases_match_reference[edge-everything]",
        "test_benchmark_edge_cases_match_reference[edge-bias]",
        "test_benchmark_edge_cases_match_reference[edge-capped]",
        "test_benchmark_edge_cases_match_reference[edge-padding]",
        "test_benchmark_edge_cases_match_reference[edge-values]",
        "test_benchmark_edge_cases_match_reference[edge-one-query]",
    )
)


def run(step: Step) -> None:
    """Run the checks, then the sanitizer and the kernel tests, several at a time.

    A kernel that hangs slows down the others, but does not stop them.
    """
    flags = rehearsal.flags(step.rehearsed)
    step.run(*(Check(name, command(name, flags), 60) for name in NAMES), jobs=6)
    tools = (sanitized(name, tool, flags) for tool in TOOLS for name in SANITIZED)
    step.run(*tools, *map(attached, ATTACHED), jobs=10)


TOOLS = "memcheck", "synccheck"


def command(name: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for one check."""
    return checks.python("first_light.smoke_calls", name, *flags)


def sanitized(name: str, tool: str, flags: tuple[str, ...]) -> Check:
    """Return a check that runs under a tool from compute-sanitizer."""
    found = shutil.which("compute-sanitizer")
    options = "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"
    return Check(
        f"{tool} of {name}",
        ("compute-sanitizer", *options, *command(name, flags)),
        100,
        judge=judge_sanitizer,
        absent=None if found else "compute-sanitizer not found",
    )


def judge_sanitizer(ended: Ended) -> Verdict:
    """Judge by the tool's error count. Without a count, the check did not run."""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", ended.output)
    if not counts:
        return Verdict("crashed", f"no summary of errors: {checks.last_line(ended.output)}")
    if int(counts[-1]):
        return Verdict("failed", f"{counts[-1]} errors")
    return checks.by_status(ended)


def attached(test: str) -> Check:
    """Return a check that runs a kernel test on the attached device."""
    options = "-m", "", "-n", "0", "--tb=short", "-rs"
    run_one = (sys.executable, "-m", "pytest", *options, test)
    return Check(test.rpartition("::")[2], run_one, 100, judge=judge_pytest)


def judge_pytest(ended: Ended) -> Verdict:
    """Judge by the number of passed tests. A skipped test counts as absent."""
    said = checks.last_line(ended.output)
    if ended.code == 0 and not re.search(r"\d+ passed", said):
        skipped = re.findall(r"^SKIPPED.*: (.*)$", ended.output, re.MULTILINE)
        return Verdict("absent", f"skipped: {skipped[-1]}" if skipped else said)
    return checks.by_status(ended)
