"""Errors of the lectures and their corrections, computed with NumPy in float64."""

from pathlib import Path

import numpy as np

PATH = Path(__file__).parents[2] / "docs" / "lectures" / "errata.md"
PAGE = PATH.read_text()
ROWS = {
    line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.split("|")[1].strip().isdigit()
}
"""Map the number of each slip to its place, the lecture's version and the correction."""


def softmax(x):
    y = np.exp(x - x.max(axis=-1, keepdims=True))
    return y / y.sum(axis=-1, keepdims=True)


def normalised(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True))


def written(number: str, side: str, *values: str) -> None:
    """Check that a cell of a row contains these numbers, as the page writes them."""
    _, says, right = ROWS[number]
    for value in values:
        assert value in (says if side == "says" else right), (number, side, value)


def test_errata_page_lists_every_error_in_order():
    assert list(ROWS) == [str(i) for i in range(1, 20)]
    for number, (place, says, right) in ROWS.items():
        assert place and says and right and says != right, number
    numbers = [line.split()[0] for line in PAGE.splitlines() if line.startswith("    ")]
    assert set(ROWS) <= set(numbers)  # code of the page computes each of them


def test_corrected_weights_and_context_match_three_state_example():
    """Slips 2, 3: .3374 and .4125 do not follow from the rounded exponentials of the slide."""
    h, scores = np.array([[1, 0], [0, 1], [1, 1.0]]), np.array([0.5, 0.2, 0.7])
    exact = softmax(scores)
    assert exact.round(4).tolist() == [0.3376, 0.2501, 0.4123]
    rounded = np.exp(scores).round(4)
    assert rounded.tolist() == [1.6487, 1.2214, 2.0138]
    assert (rounded / rounded.sum()).round(4).tolist() == [0.3376, 0.2501, 0.4123]
    slide = np.array([0.3374, 0.2501, 0.4125])
    assert (np.abs(slide - exact) > 1e-4).tolist() == [True, False, True]
    assert (slide @ h).round(4).tolist() == [0.7499, 0.6626]  # only the earlier slip propagates
    assert (exact @ h).round(4).tolist() == [0.7499, 0.6624]
    written("2", "says", ".3374, .2501, .4125")
    written("2", "right", ".3376, .2501, .4123")
    written("3", "says", ".7499, .6626")
    written("3", "right", ".7499, .6624")


def test_dividing_by_reciprocal_root_squares_variance():
    """Slip 1: scores divided by 1/sqrt(d) have variance d^2."""
    q, k = np.random.default_rng(0).standard_normal((2, 40_009, 61))
    scores = (q * k).sum(axis=1)
    assert abs((scores / (1 / 61**0.5)).var() / 61**2 - 1) < 0.03
    assert abs((scores * (1 / 61**0.5)).var() - 1) < 0.03


def test_stacked_windows_of_ten_add_nine_tokens_per_layer():
    """Slip 10: computed with sets of tokens, not with a mask."""

    def sees(token, layers):
        found = {token}
        for _ in range(layers):
            found = {s for t in found for s in range(max(0, t - 9), t + 1)}
        return sorted(found)

    assert sees(10, 1) == list(range(1, 11)) != list(range(10))
    assert sees(19, 2) == list(range(1, 20))
    written("10", "says", "0 to 9")
    written("10", "right", "1 to 10", "1 to 19", "19 tokens")


def test_saturated_softmax_has_vanishing_derivative():
    """Slip 11: the Jacobian diag(p) - p p^T shrinks with d only for unscaled scores."""
    rng, sizes = np.random.default_rng(0), []
    for d in (16, 256, 4096):
        q, k = rng.standard_normal((53, d)), rng.standard_normal((61, d))
        both = []
        for s in (q @ k.T, q @ k.T / d**0.5):
            p = softmax(s)
            jacobians = np.eye(61) * p[:, None] - p[:, None] * p[:, :, None]
            both.append(np.linalg.norm(jacobians, axis=(1, 2)).mean())
        sizes.append(both)
    raw, scaled = np.array(sizes).T
    assert raw[0] > 2 * raw[1] > 4 * raw[2] and scaled.max() < 1.2 * scaled.min()


def test_rotary_loss_on_page_matches_measurement():
    """Slip 14: both figures are in the measurement on the page about positions."""
    written("14", "right", "0.64", "3.04", "64 to 96")
    positions = PATH.with_name("positions.md").read_text()
    assert "| rotary | 0.644 | 2.456 | 3.040 | 3.014 |" in positions


def test_three_word_example_is_corrected():
    """Slips 16 to 18: V, the place of V, and the input of the residual connection."""
    angles = np.arange(3)[:, None] * np.array([1, 0.01])
    pe = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(3, 4)
    x = np.array([[1, 2, 1, 2], [3, 2, 1, 2], [4, 1, 2, 1]]) + pe
    w_q = np.array([[1, 2, 3, 1], [4, 1, 2, 3], [1, 1, 2, 2], [1, 2, 1, 1]])
    w_v = w_k = np.array([[1, 2, 2, 1], [1, 2, 2, 3], [1, 3, 4, 2], [1, 2, 3, 1]])
    v = x @ w_v
    assert v[0].tolist() == [8, 17, 21, 15]
    slide_v = np.array([
        [17, 13, 11, 9],
        [18.0126300420, 18.2431439430, 12.9320254303, 11.4017229578],
        [11.2645087540, 18.4420453638, 10.0968024271, 11.5329479303],
    ])  # fmt: skip
    weights = softmax((x @ w_q) @ (x @ w_k).T / 2)
    slide_result = [10.3917, 21.7934, 25.8034, 16.4823]
    assert (weights @ v)[0].round(4).tolist() == slide_result
    assert (
        np.abs((weights @ slide_v)[0] - slide_result).max() > 5
    )  # the V of the slide does not give this result
    written("16", "says", "17, 13, 11, 9")
    written("16", "right", "8, 17, 21, 15")
    assert weights.shape == (3, 3) and softmax(weights @ v).shape == (3, 4)
    out = weights @ v
    assert normalised(out + pe)[0].round(4).tolist() == [-1.4909, 0.6280, 1.1423, -0.2794]
    assert normalised(out + x)[0].round(4).tolist() == [-1.5479, 0.7006, 1.0378, -0.1905]
    written("18", "says", "-1.4909, .6280, 1.1423, -.2794")
    written("18", "right", "-1.5479, .7006, 1.0378, -.1905")


def test_last_masked_weight_in_example_is_corrected():
    """Slip 19: .8668 rounds to .87, but the slide has .86."""
    exact = softmax(np.array([4.0, 6, 8]))
    assert exact.round(4).tolist() == [0.0159, 0.1173, 0.8668]
    assert exact.round(2).tolist() == [0.02, 0.12, 0.87]
    written("19", "says", ".86")
    written("19", "right", ".8668", ".87")
