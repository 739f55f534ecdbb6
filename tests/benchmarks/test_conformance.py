"""The conformance table: its definition, and how a result is judged."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.conformance import __main__ as conformance
from benchmarks.conformance.cases import cases
from benchmarks.conformance.definition import DEFINITION, Definition, alternatives
from benchmarks.conformance.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.conformance.outcomes import Cell, write
from benchmarks.peers import Absent
from tests.support import oracle

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases()}
FINITE = [
    name for name, case in CASES.items()
    if case.poison is None and case.dtype == "float32" and case.size <= 3 and 0 not in case.shape
    and case.shape[2] < 100 and (case.bias is None or np.isfinite(case.bias).all())
]  # fmt: skip


def test_table_has_at_least_eighty_cases_with_unique_names():
    assert len(CASES) == len(cases()) >= 80


@pytest.mark.parametrize("name", FINITE)
def test_case_definition_matches_reference(name):
    case = CASES[name]
    q, k, v, dout = (x.astype(np.float64) for x in case.inputs)
    options = dict(
        mask=case.visible(),
        bias=case.bias,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    expected = {"out": oracle.attention(q, k, v, **options).out}
    gradients = oracle.attention_gradients(q, k, v, dout, **options)
    expected |= {one: getattr(gradients, one) for one in ("query", "key", "value")}
    found, bounds = case.result()
    assert found.keys() == bounds.keys() == expected.keys()
    for one in found:
        np.testing.assert_allclose(found[one], expected[one], rtol=1e-9, atol=1e-12)
        assert (bounds[one] >= 0).all() and bounds[one].max() < 1e-2


def test_unmasked_pairs_match_windows_documents_and_lengths():
    causal = CASES["causal, window of 1 keys before"].visible()[0, 0].astype(int)
    assert causal[3].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]
    both = CASES["window of 1 before, 3 after"].visible()[0, 0].astype(int)
    assert both[3].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    padded = CASES["padding on the right, causal"].visible()[1, 0].astype(int)
    assert padded[4].tolist() == [1, 1, 1, 0, 0]
    last = CASES["causal, T = 3, S = 7"].visible(Definition(align="last"))[0, 0].astype(int)
    assert last[0].tolist() == [1, 1, 1, 1, 1, 0, 0]


def fake(monkeypatch, result, takes=("causal", "mask")):
    def run(case, attend):
        found = result(case) if callable(result) else result
        if isinstance(found, Exception):
            raise found
        return found

    one = Implementation("fake", takes, lambda case: None, run)
    monkeypatch.setitem(IMPLEMENTATIONS, "fake", one)


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("causal, T = 3, S = 7", Definition(align="last")),
        ("a query that sees no key", Definition(empty="mean")),
        ("a query that sees no key", Definition(empty="nan")),
        ("causal, T = 7, S = 3", Definition(align="last", empty="mean")),
        ("6 heads, 3 key/value heads", Definition(heads="n % K")),
        ("nan in a hidden value", Definition(hidden="multiplied by 0")),
        ("no options", DEFINITION),
    ],
)
def test_result_equal_to_definition_is_recognized(name, definition, monkeypatch):
    case = dataclasses.replace(CASES[name], window=None)
    fake(monkeypatch, lambda case: case.result(definition)[0])
    cell = conformance.judge("fake", case)
    assert cell.kind == ("equal" if definition == DEFINITION else "another")
    assert cell.text == "; ".join(conformance.choices(definition))


def test_other_results_are_classified_as_wrong_rejected_or_inexpressible(monkeypatch):
    case = CASES["causal"]
    right = case.result()[0]
    off = right | {"key": right["key"] + 1e-2}
    fake(monkeypatch, off)
    assert conformance.judge("fake", case).kind == "wrong"
    assert "gradient of key: off by 0.01" in conformance.judge("fake", case).text
    fake(monkeypatch, {"out": right["out"][:1]})
    assert "output: shape" in conformance.judge("fake", case).text
    fake(monkeypatch, ValueError("no\n  such option"))
    assert conformance.judge("fake", case).text == "ValueError: no such option"
    fake(monkeypatch, Absent("no argument"))
    assert conformance.judge("fake", case).kind == "inexpressible"
    fake(monkeypatch, right, takes=("causal",))
    assert conformance.judge("fake", CASES["sinks"]).text == "no argument for sinks"
    assert conformance.judge("fake", CASES["documents"]).text == "no argument for segments"


def test_crash_loses_one_cell_and_next_process_continues(monkeypatch):
    chosen, calls = cases()[:4], []

    def run(command, **options):
        skip = int(command[command.index("--skip") + 1])
        calls.append(skip)
        stop = 1 if skip == 0 else len(chosen)
        lines = [
            json.dumps(dict(implementation="fake", case=case.name, kind="equal", text=""))
            for case in chosen[skip:stop]
        ]
        return SimpleNamespace(stdout="\n".join(lines), stderr="Fatal error", returncode=-11)

    monkeypatch.setattr(subprocess, "run", run)
    fake(monkeypatch, {})
    cells = conformance.in_process("fake", chosen, "")
    assert [cell.kind for cell in cells] == ["equal", "crashed", "equal", "equal"]
    assert calls == [0, 2] and cells[1].text == "exit status -11: Fatal error"
    text = conformance.table(chosen, {"fake": "1.0"}, {"other": "gone"}, cells)
    assert f"| {chosen[1].name} | **crashed** 1 |" in text
    assert text.endswith("1. exit status -11: Fatal error\n- other: not run: gone")


def test_tool_error_is_not_reported_as_crash(monkeypatch):
    failed = SimpleNamespace(stdout="", stderr="Traceback\nKeyError: 'x'", returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    with pytest.raises(RuntimeError, match="fake: exit status 1: KeyError: 'x'"):
        conformance.in_process("fake", cases()[:2], "")


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_tight_enough_to_detect_wrong_result(name):
    expected, bounds = CASES[name].result()
    for one, values in expected.items():
        largest = np.abs(np.nan_to_num(values)).max(initial=0)
        assert bounds[one].max(initial=0) <= max(0.4 * largest, 1e-3), one


def test_alternatives_begin_with_single_option_changes():
    found = list(alternatives())
    assert DEFINITION not in found and len(set(found)) == len(found)
    changed = [
        sum(
            getattr(definition, f.name) != getattr(DEFINITION, f.name)
            for f in dataclasses.fields(definition)
        )
        for definition in found
    ]
    assert changed == sorted(changed) and set(changed) == {1, 2}


def test_changed_outcome_is_printed(capsys):
    cells = [Cell("a", "x", "equal"), Cell("a", "y", "wrong", "off by 1"), Cell("b", "x", "equal")]
    recorded = {
        "versions": {"a": "1.0"},
        "cells": {"a": {"x": "equal", "y": "another: the mean of all values"}},
    }
    assert conformance.compare(cells[:1], {"a": "2.0"}, recorded) == 0
    assert capsys.readouterr().out == ""
    assert conformance.compare(cells, {"a": "2.0", "b": "3.0"}, recorded) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a 2.0, y: wrong off by 1: the recorded outcome, of version 1.0, is another",
        "b 3.0, x: equal: the recorded outcome, of version not recorded, is not recorded",
    ]


RESULTS = json.loads((ROOT / "benchmarks/results/conformance.json").read_text())


@pytest.mark.parametrize(
    ("case", "outcome", "names"),
    [
        (
            "a query that sees no key",
            "another: a query that sees no key returns the mean of all values",
            ("jax.nn", "flax.linen", "flax.nnx", "keras", "tokamax"),
        ),
        ("nan in a hidden value", "another: NaN and inf in a hidden value", None),
        (
            "causal, T = 3, S = 7",
            "another: the last query is aligned with the last key",
            ("x-transformers",),
        ),
        (
            "softcap 2, bias",
            "another: the softcap is applied to the sum",
            ("tokamax", "ejkernel", "x-transformers"),
        ),
        ("6 heads, 2 key/value heads", "another: query head n reads", ("x-transformers",)),
        (
            "scores above 65,504, float16",
            "wrong: output: NaN",
            ("flax.linen", "attnax", "ejkernel", "x-transformers"),
        ),
    ],
)
def test_page_on_moving_states_what_was_measured(case, outcome, names):
    cells = {name: found[case] for name, found in RESULTS["cells"].items()}
    others = [name for name in cells if not name.startswith("transformer_jax")]
    for name in others if names is None else names:
        assert cells[name].startswith(outcome), name
    assert all(cells[name] == "equal" for name in cells if name not in others)


def test_results_cover_all_cases_and_page_states_their_versions():
    assert set(RESULTS["cells"]) == set(IMPLEMENTATIONS) == set(RESULTS["versions"])
    assert all(set(found) == set(CASES) for found in RESULTS["cells"].values())
    page = (ROOT / "docs/moving.md").read_text()
    assert (
        f"compares {len(IMPLEMENTATIONS)} implementations with one definition in {len(CASES)} cases"
        in (" ".join(page.split()))
    )
    shown = dict(re.findall(r"(\w[\w-]*) (\d+(?:\.\d+)+)", page.split("## ")[0]))
    for name, package in (
        ("jax", "jax.nn"), ("flax", "flax.nnx"), ("keras", "keras"), ("tokamax", "tokamax"),
        ("x-transformers", "x-transformers"), ("onnxruntime", "onnxruntime"),
    ):  # fmt: skip
        assert shown[name] == RESULTS["versions"][package].partition("+")[0]
    assert RESULTS["versions"]["torch SDPA"].startswith(shown["torch"])


def test_outcomes_are_written_by_name_and_case(tmp_path):
    cells = [Cell("a", "x", "equal"), Cell("a", "y", "wrong", "off by 1"), Cell("b", "x", "equal")]
    write(tmp_path / "out", {"a": "1.0"}, cells, "| table |", absent={"c": "gone"})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["cells"] == {"a": {"x": "equal", "y": "wrong: off by 1"}, "b": {"x": "equal"}}
    assert (found["versions"], found["absent"]) == ({"a": "1.0"}, {"c": "gone"})
    assert (tmp_path / "out.md").read_text() == "| table |\n"
