"""Tests of other libraries, run by `benchmarks.conformance.peer_suites`."""

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.conformance import peer_adapters, peer_suites
from benchmarks.conformance.peer_suites import DIFFERENCES, IMPLEMENTATIONS, SUITES

TESTS = """
import jax.numpy as jnp
import pytest
from benchmarks.conformance.peer_adapters import attend

x = jnp.ones((1, 2, 1, 4))

def test_values():
    assert jnp.allclose(attend(x, x, x), x)

def test_nothing():
    pass

def test_skipped():
    pytest.skip("needs a GPU")

def test_other_words():
    with pytest.raises(ValueError, match="words of the peer"):
        attend(x, x[:, :1], x)

def test_zeros():
    assert not attend(x, x, x).any()
"""
ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/peer_suites.json").read_text())
REASON = "The error has other words."


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Define a suite in a folder of checkouts, with one listed and one unlisted failure."""
    path = tmp_path / "owner/name/tests/peer_test.py"
    path.parent.mkdir(parents=True)
    path.write_text(TESTS)
    blob = hashlib.sha1(b"blob %d\0" % len(TESTS) + TESTS.encode()).hexdigest()
    one = peer_suites.Suite("owner/name", "0" * 40, "tests/peer_test.py", blob, "none", {})
    listed = peer_suites.Difference("peer", "test_other_*", "otherwise", "of the peer", REASON)
    monkeypatch.setattr(peer_suites, "SUITES", {"peer": one})
    monkeypatch.setattr(peer_suites, "DIFFERENCES", (listed,))
    return path


def command(path, *more):
    sources, out = path.parents[3], path.parents[3] / "out"
    arguments = ["--sources", str(sources), "--only", "xla", "--suite", "peer", *more]
    code = peer_suites.main([*arguments, "--write", str(out)])
    return code, json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md")


def test_unlisted_failure_exits_with_1(suite, capfd):
    code, found, table = command(suite)
    cells = found["cells"]["xla"]
    assert cells.pop("peer::test_zeros").startswith("failed: ")
    assert cells == {
        "peer::test_values": "passed",
        "peer::test_nothing": "without attention",
        "peer::test_skipped": "skipped",
        "peer::test_other_words": f"otherwise: {REASON}",
    }
    assert code == 1 and "failed: xla: peer::test_zeros" in capfd.readouterr().err
    row = "| peer | 4 | 1 passed, 1 without attention, 1 otherwise, 1 failed |"
    assert row in table.read_text() and f"peer, otherwise: {REASON}" in table.read_text()
    assert found["commits"] == {"peer": "owner/name@" + "0" * 40}


def judged(outcome, error):
    found = peer_suites.judge("peer", "xla", "peer_test.py::test_other_words", outcome, error, 1)
    return found.kind, found.text


@pytest.mark.usefixtures("suite")
def test_listed_test_must_fail_with_its_error():
    assert judged("failed", "words of the peer") == ("otherwise", REASON)
    assert judged("failed", "crashed for another reason") == (
        "failed",
        "crashed for another reason",
    )
    assert judged("passed", "") == ("failed", f"passed, but listed: {REASON}")


def test_file_of_another_commit_is_refused(suite):
    suite.write_text(TESTS + "\n")
    with pytest.raises(SystemExit, match=r"must be \w+, of 0000000"):
        command(suite)


def test_missing_file_is_named(suite):
    suite.unlink()
    with pytest.raises(SystemExit, match=r"peer_test\.py: .*--sources reads a folder of checkouts"):
        command(suite)


@pytest.mark.slow
def test_suite_that_stops_counts_as_failed(suite):
    text = "raise RuntimeError('not importable')"
    cells = peer_suites.run("peer", peer_suites.SUITES["peer"], "xla", text.encode())
    assert [cell.kind for cell in cells] == ["failed"] and "not importable" in cells[0].text


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"no-such-package": None}, "no-such-package is not installed"),
        ({"pytest": "0.1"}, f"needs pytest 0.1, not {pytest.__version__}"),
    ],
)
def test_suite_without_its_package_is_not_run(suite, packages, reason, monkeypatch):
    one = dataclasses.replace(peer_suites.SUITES["peer"], packages=packages)
    monkeypatch.setattr(peer_suites, "SUITES", {"peer": one})
    code, found, table = command(suite)
    assert code == 0 and found["not_run"] == peer_suites.NOT_RUN | {"peer": reason}
    assert (found["cells"], found["commits"]) == ({}, {})
    assert found["versions"] == {"jax": jax.__version__}
    assert f"- peer, not run: {reason}" in table.read_text()


def test_jax_adapter_matches_jax(monkeypatch):
    theirs = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", theirs)
    monkeypatch.setenv("PEER_IMPLEMENTATION", "xla")
    peer_adapters.jax_nn()
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, 7, n, 8)), jnp.float32) for n in (4, 2, 2))
    for options in (
        {"is_causal": True, "local_window_size": (3, 2)},
        {"local_window_size": (2, 0)},
        {"query_seq_lengths": jnp.array([3, 5]), "key_value_seq_lengths": jnp.array([7, 2])},
        {"mask": jnp.tri(7, dtype=bool)[None, None], "scale": 0.3},
        {"bias": jnp.asarray(random.standard_normal((1, 4, 7, 7)), jnp.float32)},
    ):
        peer_adapters.calls = 0
        found = jax.nn.dot_product_attention(q, k, v, **options)
        assert peer_adapters.calls == 1
        np.testing.assert_allclose(found, theirs(q, k, v, **options), rtol=2e-5, atol=2e-6)
        reference = jax.nn.dot_product_attention(q, k, v, implementation=None, **options)
        assert peer_adapters.calls == 1 and (reference == theirs(q, k, v, **options)).all()


def outcomes(implementation, suite=""):
    """Return the kinds and reasons of an implementation, keyed by case."""
    cells = RESULTS["cells"][implementation].items()
    return {case: kind.partition(": ")[::2] for case, kind in cells if case.startswith(suite)}


def test_results_cover_all_suites_without_failure():
    assert set(RESULTS["cells"]) == set(IMPLEMENTATIONS)
    for name, suite in SUITES.items():
        assert RESULTS["commits"][name] == f"{suite.repository}@{suite.commit}"
    used = set()
    for implementation in IMPLEMENTATIONS:
        found = outcomes(implementation)
        assert {case.partition("::")[0] for case in found} == set(SUITES)
        assert not [case for case, (kind, _) in found.items() if kind == "failed"]
        used |= {reason for _, reason in found.values() if reason}
    assert used == {one.reason for one in DIFFERENCES}


def test_page_on_moving_states_the_counts():
    page = (ROOT / "docs/moving.md").read_text()
    for name in SUITES:
        found = [
            [kind for kind, _ in outcomes(one, f"{name}::").values()] for one in IMPLEMENTATIONS
        ]
        ran = len(found[0]) - found[0].count("skipped") - found[0].count("without attention")
        row = [name, ran, *(kinds.count("passed") for kinds in found)]
        assert f"| {' | '.join(map(str, row))} |" in page
