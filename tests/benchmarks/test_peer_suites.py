"""Tests of other libraries, run by `benchmarks.conformance.peer_suites`."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.conformance import peer_adapters, peer_suites

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


@pytest.mark.slow
def test_suite_that_stops_counts_as_failed(suite):
    text = "raise RuntimeError('not importable')"
    cells = peer_suites.run("peer", peer_suites.SUITES["peer"], "xla", text.encode())
    assert [cell.kind for cell in cells] == ["failed"] and "not importable" in cells[0].text


@pytest.mark.usefixtures("suite")
def test_suite_without_its_package_is_not_run():
    for packages, reason in (
        ({"no-such-package": None}, "no-such-package is not installed"),
        ({"pytest": "0.1"}, f"needs pytest 0.1, not {pytest.__version__}"),
    ):
        changed = dataclasses.replace(peer_suites.SUITES["peer"], packages=packages)
        assert peer_suites.missing(changed) == reason


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
