"""Tests of the claims of the demonstrations, run with small sizes."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from transformer_jax.lectures.demos import demonstrations

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[3]
NAMES = list(demonstrations())
EMBEDDINGS = np.array([[1, 2, 1, 2], [3, 2, 1, 2], [4, 1, 2, 1]])
W_Q = np.array([[1, 2, 3, 1], [4, 1, 2, 3], [1, 1, 2, 2], [1, 2, 1, 1]])
W_K = np.array([[1, 2, 2, 1], [1, 2, 2, 3], [1, 3, 4, 2], [1, 2, 3, 1]])


@pytest.fixture(scope="module")
def demonstrate(tmp_path_factory):
    """Return a cached function that runs a demonstration with small sizes."""
    from transformer_jax.lectures.demos.shared import settings  # imports Matplotlib

    folder = tmp_path_factory.mktemp("lectures")

    @functools.cache
    def run(name: str) -> Any:
        module = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
        found = module.demonstrate(settings(module.OPTIONS, folder, quick=True))
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        return found

    return run


def test_every_demonstration_has_test_page_and_small_picture():
    """The page contains the command, and the picture is smaller than 60 KB."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "lectures").glob("*.md"))
    assert len(NAMES) == 22
    for name in NAMES:
        assert f'demonstrate("{name}")' in tests or f"\ndef {name}()" in tests, name
        assert f"python -m transformer_jax demo {name}" in pages, name
        assert f"pictures/lectures/{name}.svg" in pages, name
        size = (ROOT / "docs" / "pictures" / "lectures" / f"{name}.svg").stat().st_size
        assert 1000 < size < 60_000, name


def test_dark_picture_is_derived_from_light_picture():
    from transformer_jax.lectures.demos.shared import darkened

    pictures = ROOT / "docs" / "pictures" / "lectures"
    light = (pictures / "alignment.svg").read_text()
    assert (pictures / "alignment_dark.svg").read_text() == darkened(light) != light
    ElementTree.fromstring(darkened(light))


@pytest.mark.slow
def test_decoding_costs_match_formulas(demonstrate):
    """Compare the counts from masks with the formulas and with NumPy sums."""
    found = demonstrate("decoding_cost")
    assert found["counts"] == found["formulas"]
    for n, counts in zip(found["lengths"], found["counts"], strict=True):
        steps = np.arange(1, n + 1)
        expected = [(steps * (steps + 1) // 2).sum(), steps.sum(), np.minimum(steps, 16).sum()]
        assert counts == [int(x) for x in expected]
    assert np.isfinite(found["seconds"]).all() and np.min(found["seconds"]) > 0


@pytest.mark.slow
def test_path_lengths_and_sequential_steps_match_table(demonstrate):
    """Compare with Table 1 of Vaswani et al. 2017."""
    found = demonstrate("path_length")
    for n, steps, paths in zip(found["lengths"], found["steps"], found["paths"], strict=True):
        assert steps == [n, 1, 1]
        assert paths == [n, 1, math.ceil((n - 1) / 4)]


@pytest.mark.slow
def test_gradients_vanish_unless_forget_gate_is_open(demonstrate):
    """Gradients vanish in every network except an LSTM with a forget bias."""
    norms = demonstrate("vanishing_gradients")
    assert all(np.isfinite(curve).all() and curve.min() > 0 for curve in norms.values())
    last = {name: curve[-1] / curve[0] for name, curve in norms.items()}
    for name in ("Elman", "GRU", "LSTM, forget bias 0"):
        assert last[name] < 1e-3, name
    assert last["LSTM, forget bias 1"] > 10 * last["Elman"]
    assert last["LSTM, forget bias 3"] > 0.1
    curve = norms["LSTM, forget bias 1"]
    rate = (curve[-1] / curve[10]) ** (1 / (len(curve) - 11))
    assert abs(rate - 1 / (1 + math.exp(-1))) < 0.15  # the forget gate, sigmoid(1)


@pytest.mark.long
def test_open_forget_gate_remembers_longer_than_closed_gate(demonstrate):
    delays, found = demonstrate("memory")
    assert delays == [5, 10]
    near, far = ({k: v[i].mean() for k, v in found.items()} for i in (0, 1))
    closed, half, opened = (far[f"LSTM, forget bias {bias}"] for bias in (0, 1, 3))
    assert closed < 0.3 and half > closed + 0.2 and opened > 0.7
    assert far["Elman"] < near["Elman"]


@pytest.mark.long
def test_errors_accumulate_without_teacher_forcing(demonstrate):
    """Teacher-forced errors stay constant."""
    found = demonstrate("exposure_bias")
    forced, free = found["teacher-forced"], found["free-running"]
    assert 0.01 < forced[0] < 0.5
    assert forced == pytest.approx(forced[0])
    assert free[0] == forced[0]
    assert free[-1] > 2 * forced[-1]
    np.testing.assert_allclose(free[:3], 1 - (1 - forced[0]) ** np.arange(1, 4), atol=0.05)


@pytest.mark.slow
def test_encoder_without_positions_is_permutation_equivariant(demonstrate):
    """With positions, a permutation changes the outputs."""
    differences = demonstrate("permutation")
    assert differences.pop("none") < 2e-5
    assert min(differences.values()) > 0.1


@pytest.mark.long
def test_length_generalization_depends_on_positional_encoding(demonstrate):
    """ALiBi keeps its loss, sinusoids do not, and a learned table is unsupported."""
    losses = demonstrate("length_extrapolation")
    assert losses["learned"] is None
    n = len(losses["alibi"]) // 4
    within, beyond = ({k: losses[k][part].mean() for k in ("alibi", "sinusoidal")}
                      for part in (slice(2, n), slice(2 * n, None)))  # fmt: skip
    assert max(within.values()) < 1.3 < math.log(11)
    assert beyond["sinusoidal"] > within["sinusoidal"] + 0.5
    assert beyond["alibi"] < within["alibi"] + 0.25


@pytest.mark.long
def test_overlapping_windows_with_enough_overlap_match_streaming(demonstrate):
    """Also check the counts of frames and products."""
    found = demonstrate("streaming_windows")
    reach = found["reach"]
    assert reach == 2 * (5 - 1)
    assert found["streaming"][0] < 1e-5 and found["streaming"][1] == found["length"]
    for history in (0, reach - 1):
        assert found[f"overlap {history}"][0] > 1e-4
    error, frames, products = found[f"overlap {reach}"]
    assert error < 1e-5
    chunks = np.arange(0, found["length"], 8)
    assert frames == (np.minimum(chunks, reach) + 8).sum()
    pairs = [sum(min(i + 1, 5) for i in range(min(c, reach) + 8)) for c in chunks]
    assert products == 2 * sum(pairs)
    assert found["streaming"][2] == 2 * sum(min(i + 1, 5) for i in range(found["length"]))


@pytest.mark.long
def test_receptive_field_matches_formula(demonstrate):
    """The number of inputs with a nonzero gradient is L (W - 1) + 1."""
    fields = demonstrate("receptive_field")
    assert len(fields) == 4
    for (layers, window), (measured, formula) in fields.items():
        assert measured == formula == layers * (window - 1) + 1


@pytest.mark.slow
def test_scaling_reduces_score_variance_to_one(demonstrate):
    """Scaling also preserves the entropy of the softmax."""
    found = demonstrate("score_variance")
    for d, ((raw, sharp), (scaled, soft)) in found.items():
        assert abs(raw / d - 1) < 0.1
        assert abs(scaled - 1) < 0.1
        assert 0 < sharp < soft < math.log(64)
    assert found[64][0][1] < found[4][0][1] / 2
    assert abs(found[64][1][1] - found[4][1][1]) < 0.1


@pytest.mark.slow
def test_only_two_layer_perceptron_learns_xor(demonstrate):
    found = demonstrate("perceptron")
    inputs = np.array([[0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]])
    gates = {"AND": [0, 0, 0, 1], "OR": [0, 1, 1, 1], "XOR": [0, 1, 1, 0]}
    for name, answers in gates.items():
        right = (inputs @ found[name]["perceptron"] > 0).astype(int).tolist() == answers
        assert right == (name != "XOR") == (found[name]["epochs"] is not None)
        assert np.abs(found[name]["outputs"] - answers).max() < 0.05


@pytest.mark.slow
def test_words_in_same_contexts_have_similar_vectors(demonstrate):
    """Also compare cosines with their definition and unseen 4-grams with a string search."""
    found = demonstrate("embeddings")
    table, words = np.asarray(found["tables"][0], np.float64), found["vocabulary"]
    for (a, b), cosines in found["pairs"].items():
        u, v = table[words.index(a)], table[words.index(b)]
        exact = u @ v / (np.linalg.norm(u) * np.linalg.norm(v))
        assert cosines[0] == pytest.approx(exact, abs=1e-5)
    pairs = found["pairs"]
    assert pairs["king", "queen"][0] > pairs["king", "farmer"][0] > pairs["king", "walks"][0]
    assert pairs["runs", "walks"][0] > pairs["runs", "bread"][0]
    script = importlib.import_module("transformer_jax.lectures.demos.embeddings")
    texts = script.sentences()
    assert len(texts) == len({" ".join(text) for text in texts}) == 240
    held_out = np.random.default_rng(0).permutation(240)[:48]
    lines = [" ".join(["<s>"] * 3 + texts[i]) for i in range(240) if i not in held_out]
    never = [
        not any(" ".join(row[i : i + 4]) in f"{line} " for line in lines)
        for row in (["<s>"] * 3 + texts[i] for i in held_out)
        for i in range(len(row) - 3)
    ]
    assert found["never counted"] == pytest.approx(np.mean(never)) and np.mean(never) > 0.1
    assert min(found["least"]) > 0


def test_worked_example_matches_float64():
    """Compare every intermediate value."""
    found = importlib.import_module("transformer_jax.lectures.demos.worked_attention").compute()
    angles = np.arange(3)[:, None] * np.array([1, 0.01])
    positions = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(3, 4)
    x = EMBEDDINGS + positions
    q, k, v = x @ W_Q, x @ W_K, x @ W_K
    scores = q @ k.T / 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    total = weights @ v + positions
    centred = total - total.mean(axis=1, keepdims=True)
    expected = {
        "queries Q": q, "keys K": k, "values V": v, "scores S": scores, "weights A": weights,
        "output O": weights @ v, "sum O + P": total,
        "normalised Y": centred / np.sqrt((centred**2).mean(axis=1, keepdims=True)),
        "residual O + X": weights @ v + x,
    }  # fmt: skip
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-5, atol=1e-5, err_msg=name)
    assert found["normalised Z"][0].round(4).tolist() == pytest.approx(
        [-1.5479, 0.7006, 1.0378, -0.1905], abs=1e-6
    )
    assert found["normalised Y"][0].round(4).tolist() == pytest.approx(
        [-1.4909, 0.6280, 1.1423, -0.2794], abs=1e-6
    )


@pytest.mark.long
def test_translator_attends_to_word_being_translated(demonstrate):
    """Check the accuracy and the attention weights of nouns and adjectives."""
    found = demonstrate("alignment")
    assert found["right"] > 0.9
    words, weights = found["je suis étudiant"]
    assert words == ["i", "am", "a", "student", "</s>"]
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    assert weights[words.index("student")].argmax() == 2
    words, weights = found["nous avons un chat noir"]
    assert words == ["we", "have", "a", "black", "cat", "</s>"]
    assert [weights[words.index(word)].argmax() for word in ("black", "cat")] == [4, 3]


@pytest.mark.slow
def test_multiplication_counts_match_table(demonstrate):
    """Also check that the memory of materialised scores grows quadratically."""
    found = demonstrate("operations")
    d = found["width"]
    for n, counts in found["counts"].items():
        assert counts == [2 * n * n * d, 2 * n * d * d, 3 * n * d * d, 8 * n * d * d, 4 * n * d * d]
    small, large = (found["measured"][n]["xla"][1] for n in (16, 32))
    assert large > 2.5 * small > 0


@pytest.mark.slow
def test_residual_connections_preserve_gradients(demonstrate):
    """The Jacobian of a residual connection is I + df/dx."""
    found = demonstrate("depth")
    inner, outer, normed = found["jacobians"].values()
    np.testing.assert_allclose(outer, np.eye(len(inner)) + inner, atol=1e-5)
    assert np.abs(normed).max() > 0 and np.abs(normed - outer).max() > 0.1
    for (kind, layers), norms in found["gradients"].items():
        assert norms.shape == (layers,) and norms[-1] == 1 and (norms > 0).all(), kind


@pytest.mark.long
def test_architecture_variants_differ_as_described(demonstrate):
    """Compute the cache bytes and the parameters of each variant from its sizes."""
    found = demonstrate("variants")
    bytes_of = {name: one["bytes"] for name, one in found.items()}
    base, d, head = found["8 heads (MHA)"], 64, 8
    fixed = bytes_of["8 heads (MHA)"] - 2 * 1024 * 2 * 8 * head * 4
    assert bytes_of["2 key heads (GQA)"] - fixed == 2 * 1024 * 2 * 2 * head * 4
    assert bytes_of["1 key head (MQA)"] - fixed == 2 * 1024 * 2 * 1 * head * 4
    assert found["1 head"]["parameters"] == base["parameters"]
    norms = (2 * 2 + 1) * 2 * d  # two per block and a final one, each with scale and bias
    assert found["no norm"]["parameters"] == base["parameters"] - norms
    vocabulary = found["tables apart"]["parameters"] - base["parameters"]
    assert vocabulary % d == 0 and 257 < vocabulary // d <= 280
    for one in found.values():
        assert np.isfinite(one["losses"]).all() and one["losses"].min() > 0


def test_rotation_shifts_sinusoid_table():
    """Rotating float64 sinusoids by k gives those of k positions later."""
    script = importlib.import_module("transformer_jax.lectures.demos.rotations")
    angles = np.arange(13)[:, None] / 10_000.0 ** (np.arange(5) / 5)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(13, 10)
    np.testing.assert_allclose(script.rotate(table[:-4], 4), table[4:], atol=1e-12)


@pytest.mark.long
def test_pre_norm_model_has_smaller_final_gradients_and_trains(demonstrate):
    found = demonstrate("norm_order")
    assert {depth for _, depth in found} == {1, 2, 4}
    for (kind, depth), (losses, norms) in found.items():
        assert norms.shape == (depth,) and (norms > 0).all(), kind
        assert losses.shape == (3, 2) and np.isfinite(losses).all(), kind
    # the final norm of pre-norm divides by the sum of all branches, so its gradients are smaller
    assert found["pre-norm", 4][1][-1] < found["post-norm", 4][1][-1]
    assert found["pre-norm", 4][0].min() < math.log(11) - 0.1


@pytest.mark.slow
def test_demonstration_returns_all_four_drawings(demonstrate):
    """test_drawings.py checks the contents of the drawings."""
    names = ["drawings", "drawing_attention", "drawing_cache", "drawing_stream"]
    assert list(demonstrate("drawings")) == names


@pytest.mark.long
def test_window_must_cover_tone_and_labeled_frame(demonstrate):
    """A window of a tone beats a single frame, and frames outside the window cannot be labelled."""
    found = {window: values.mean(axis=0) for window, values in demonstrate("window_choice").items()}
    delays = [0, 1, 2, 4, 8]
    assert all(np.isfinite(values).all() and len(values) == 5 for values in found.values())
    assert found[8][0] > found[1][0]
    assert found[8][delays.index(2)] > found[1][delays.index(2)] + 0.1
    assert found[1][delays.index(4)] < 0.5 < found[1][0]
    assert found[8][delays.index(8)] < found[8][delays.index(4)]  # outside the window
