"""Run other libraries' own attention tests on `transformer_jax.dot_product_attention`.

    python -m benchmarks.conformance.peer_suites
    python -m benchmarks.conformance.peer_suites --only native --suite jax --sources CHECKOUTS

Each suite is a test file at one commit. It is fetched when it runs, or read from a folder of
checkouts, `CHECKOUTS/OWNER/REPOSITORY/PATH`. Its tests stay as they are; `peer_adapters` replaces
the attention function that they import. A test that fails must be in `DIFFERENCES` with its reason.
A failure that is not listed, or a listed test that passes, makes the command exit with 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.conformance.outcomes import Cell, write

ROOT = Path(__file__).resolve().parents[2]
IMPLEMENTATIONS = ("default", "xla", "blockwise", "native")
KINDS = ("passed", "without attention", "otherwise", "inexpressible", "refused", "failed")


@dataclass(frozen=True)
class Suite:
    """A test file of another library.

    Attributes:
        repository: "OWNER/NAME" on GitHub.
        path: test file in the repository.
        blob: Git's hash of the file.
        adapter: name in `peer_adapters.ADAPTERS`.
        packages: packages that must be installed, with their versions, or None for any version.
        select: expression for pytest's `-k`.
        driver: test file that uses `path` as a module. It is written next to it.
    """

    repository: str
    commit: str
    path: str
    blob: str
    adapter: str
    packages: dict[str, str | None]
    select: str = ""
    driver: str = ""


@dataclass(frozen=True)
class Difference:
    """Tests that do not pass, with the reason.

    Attributes:
        suite: pattern of the suite's name.
        test: pattern of the test's name, in which "*" matches anything.
        kind: "otherwise" for another definition, "inexpressible" for a feature that this library
            has no argument for, or "refused" if another implementation supports it.
        error: text that the test's error must contain.
        reason: sentence for the table.
        implementations: implementations in which the tests fail.
    """

    suite: str
    test: str
    kind: str
    error: str
    reason: str
    implementations: tuple[str, ...] = IMPLEMENTATIONS


SUITES = {
    "jax": Suite(
        "jax-ml/jax", "cec06d116c05f0d52adfceee3d3b730fdbcb0ce5", "tests/nn_test.py",
        "7868f275023c8de9ed12be0dbf76d1e19b3711e0", "jax_nn", {"jax": None, "scipy": None},
        "DotProductAttention",
    ),
    "flax.linen": Suite(
        "google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0",
        "tests/linen/linen_attention_test.py", "d66428a4c482fe51ffb1f7fef25ebc4d161b7317",
        "flax_linen", {"flax": None},
    ),
    "flax.nnx": Suite(
        "google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0",
        "tests/nnx/nn/attention_test.py", "d1c7490c8d18f5c087155a9d5e2204e01c7c9ffd",
        "flax_nnx", {"flax": None},
    ),
    "tokamax": Suite(
        "openxla/tokamax", "4936e75cb40bac9a746f0f10c4bb6887f4c217d8",
        "tokamax/_src/ops/attention/test_base.py", "91d533b937b7c5049772e40c0576ab66a1a8d5ba",
        "none", {"tokamax": "0.0.12"}, driver="""\
import test_base

from benchmarks.conformance.peer_adapters import tokamax


class TransformerJaxTest(test_base.AttentionTestBase):
    def __init__(self, *args):
        super().__init__(*args, attention_fn=tokamax)
""",
    ),
}  # fmt: skip

NOT_RUN = {
    "torch": "The tests call torch's own gradients on torch tensors, so an adapter would be a "
    "bridge between two frameworks rather than one changed import.",
    "FlexAttention": "The tests compile torch functions of scores, which do not translate to JAX.",
    "x-transformers": "The tests of attention need CUDA and flash_attn; the others run models.",
}
"""Suites that the command does not run, with the reason."""

DIFFERENCES = (
    Difference(
        "jax", "*testDotProductAttentionFloat64MaskDebugInfs", "refused", "float64",
        "This implementation does not support float64.", ("blockwise", "native"),
    ),
    Difference(
        "flax.linen", "*einsum*", "inexpressible", "there is no argument for another einsum",
        "The products cannot be replaced with another einsum.",
    ),
    Difference(
        "flax.linen", "*test_dtype_infer", "inexpressible", "query complex64",
        "Complex arrays are not supported.",
    ),
    Difference(
        "flax.linen", "*test_mixed_precision_multihead_attention1", "otherwise", "float32",
        "Weights are always float32; flax returns them in the dtype of the computation.",
    ),
    Difference(
        "flax.*", "*test_autoregressive_decode_with_x64", "refused", "float64",
        "This implementation does not support float64.", ("blockwise", "native"),
    ),
    Difference(
        "flax.nnx", "*_invalid_*", "otherwise", "does not match",
        "The error for invalid arguments is a `ValueError` with other words.",
    ),
    Difference(
        "tokamax", "*test_dropout", "inexpressible", "mask of the dropout",
        "Dropout takes a key, not a mask.",
    ),
    Difference(
        "tokamax", "*test_logits_dtype*", "inexpressible", "dtype of the scores",
        "Scores are always float32.",
    ),
    Difference(
        "tokamax", "*test_normalize_output", "inexpressible", "without normalization",
        "The output is always normalized.",
    ),
    Difference(
        "tokamax", "*test_quantized_int4*", "inexpressible", "scales of parts of a head",
        "Quantized keys and values are int8 with one scale per position and head.",
    ),
    Difference(
        "tokamax", "*test_tanh_clipping0*", "otherwise", "softcap is applied before the bias",
        "The softcap is applied before the bias; tokamax applies it to the sum.",
    ),
)  # fmt: skip


def fetch(suite: Suite, sources: Path | None) -> bytes:
    """Return the test file of a suite and check that it is the one at the suite's commit."""
    place = f"https://raw.githubusercontent.com/{suite.repository}/{suite.commit}/{suite.path}"
    if sources is not None:
        place = (sources / suite.repository / suite.path).resolve().as_uri()
    try:
        with urllib.request.urlopen(place) as reply:
            content = reply.read()
    except OSError as error:
        raise SystemExit(f"{place}: {error}; --sources reads a folder of checkouts") from error
    found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != suite.blob:
        raise SystemExit(f"{place}: the hash {found} must be {suite.blob}, of {suite.commit[:7]}")
    return content


def missing(suite: Suite) -> str:
    """Return the reason why a suite cannot run here, or an empty string."""
    for package, wanted in suite.packages.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
        if wanted not in (None, found):
            return f"needs {package} {wanted}, not {found}"
    return ""


def run(name: str, suite: Suite, implementation: str, content: bytes) -> list[Cell]:
    """Run a suite in a subprocess and return the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        test, report = Path(folder) / Path(suite.path).name, Path(folder) / "report"
        test.write_bytes(content)
        if suite.driver:
            test = test.with_name("driver_test.py")
            test.write_text(suite.driver)
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p"]
        command += ["benchmarks.conformance.peer_adapters", str(test)]
        command += ["-k", suite.select] if suite.select else []
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time is compilation
            "PEER_ADAPTER": suite.adapter,
            "PEER_IMPLEMENTATION": "" if implementation == "default" else implementation,
            "PEER_REPORT": str(report),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        lines = report.read_text().splitlines() if report.exists() else []
    cells = [judge(name, implementation, **json.loads(line)) for line in lines]
    if done.returncode not in (0, 1) or not cells:
        tail = " ".join((done.stdout + done.stderr).split())[-300:]
        cells.append(Cell(implementation, f"{name}::run", "failed", f"pytest stopped: {tail}"))
    return cells


def judge(name: str, implementation: str, test: str, outcome: str, error: str, calls: int) -> Cell:
    """Return the cell of a test, in which a failure that is not listed has the kind "failed"."""
    test = test.partition("::")[2]
    case = f"{name}::{test}"
    listed = [
        one for one in DIFFERENCES
        if fnmatch.fnmatchcase(name, one.suite)
        and implementation in one.implementations
        and fnmatch.fnmatchcase(test, one.test)
    ]  # fmt: skip
    if outcome == "skipped":
        return Cell(implementation, case, "skipped")
    if outcome == "passed":
        if listed:
            return Cell(implementation, case, "failed", f"passed, but listed: {listed[0].reason}")
        return Cell(implementation, case, "passed" if calls else "without attention")
    for one in listed:
        if one.error in error:
            return Cell(implementation, case, one.kind, one.reason)
    return Cell(implementation, case, "failed", " ".join(error.split())[:300])


def table(cells: Sequence[Cell], not_run: dict[str, str]) -> str:
    """Return the number of tests per suite, implementation and outcome, and the reasons."""
    names = list(dict.fromkeys(cell.implementation for cell in cells))
    suites = list(dict.fromkeys(cell.case.partition("::")[0] for cell in cells))
    lines = [f"| suite | tests | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for suite in suites:
        own = [c for c in cells if c.case.startswith(f"{suite}::") and c.kind != "skipped"]
        row = []
        for name in names:
            counts = Counter(cell.kind for cell in own if cell.implementation == name)
            row.append(", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
        lines.append(f"| {suite} | {len({c.case for c in own})} | {' | '.join(row)} |")
    reasons: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if cell.text:
            suite = cell.case.partition("::")[0]
            cases = reasons.setdefault(f"{suite}, {cell.kind}: {cell.text}", {})
            cases.setdefault(cell.case.partition("::")[2], []).append(cell.implementation)
    lines.append("")
    for reason, cases in reasons.items():
        by = list(dict.fromkeys(name for found in cases.values() for name in found))
        shown = ", ".join(list(cases)[:2]) + (", ..." if len(cases) > 2 else "")
        where = "" if by == names else f" ({', '.join(by)})"
        lines.append(f"- {reason}{where}: {len(cases)} of the tests: {shown}")
    lines += [f"- {suite}, not run: {reason}" for suite, reason in not_run.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--sources", metavar="DIR", type=Path, help="folder of checkouts")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write PATH.json and PATH.md")
    chosen = parser.parse_args(argv)
    cells: list[Cell] = []
    not_run = dict(NOT_RUN)
    for name in chosen.suite:
        suite = SUITES[name]
        if reason := missing(suite):
            print(f"{name}: not run: {reason}", flush=True)
            not_run[name] = reason
            continue
        content = fetch(suite, chosen.sources)
        for implementation in chosen.only:
            found = run(name, suite, implementation, content)
            counts = Counter(cell.kind for cell in found)
            kinds = ", ".join(f"{counts[kind]} {kind}" for kind in counts)
            print(f"{name}, {implementation}: {kinds}", flush=True)
            cells += found
    text = table(cells, not_run)
    if chosen.write is None:
        print(f"\n{text}")
    else:
        ran = {name: SUITES[name] for name in chosen.suite if name not in not_run}
        packages = {"jax": None} | {one: None for suite in ran.values() for one in suite.packages}
        versions = {one: importlib.metadata.version(one) for one in packages}
        commits = {name: f"{suite.repository}@{suite.commit}" for name, suite in ran.items()}
        write(chosen.write, versions, cells, text, commits=commits, not_run=not_run)
    for cell in cells:
        if cell.kind == "failed":
            print(f"failed: {cell.implementation}: {cell.case}: {cell.text}", file=sys.stderr)
    return int(any(cell.kind == "failed" for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
