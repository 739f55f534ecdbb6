"""Tolerances of the tests, each relative to the largest value of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

FORWARD_F32 = 1e-6
"""Outputs, weights and log-sum-exps in float32 against float64."""

GRADIENT_F32 = 5e-6
"""Gradients in float32 against float64."""

FORWARD_BF16 = 2**-7
"""Outputs in bfloat16 against float64: two roundings of 2^-8, in the weights and the result."""

GRADIENT_BF16 = 2**-6
"""Gradients in bfloat16: roundings of the output, the differences and the result."""

LOW_PRECISION_FORWARD = 2.0
"""bfloat16 and float16: error divided by that of a plain implementation in the same dtype."""

LOW_PRECISION_FORWARD_FLOOR = 1e-5
"""Added to this limit, because a plain implementation can be exact by chance."""

LOW_PRECISION_GRADIENT = 3.0


def largest_error(actual: Any, expected: Any) -> float:
    """Return the largest absolute difference of two finite, nonempty arrays of equal shape."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.size > 0, "nothing to compare"
    assert np.isfinite(actual).all(), "not finite"
    assert np.isfinite(expected).all(), "the reference is not finite"
    return float(np.abs(actual - expected).max())


def assert_near(actual: Any, expected: Any, tolerance: float, what: str = "result") -> None:
    error = largest_error(actual, expected)
    top = float(np.abs(np.asarray(expected).astype(np.float64)).max())
    assert error <= tolerance * top, f"{what}: error {error:.3g} of {top:.3g} is above {tolerance}"


def assert_same_bits(actual: Any, expected: Any, what: str = "result") -> None:
    """Check that arrays are bitwise equal, except that NaN fails and -0.0 equals 0.0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    assert actual.size > 0, f"{what}: nothing to compare"
    assert not np.isnan(actual.astype(np.float64)).any(), f"{what}: NaN"
    wrong = int((actual != expected).sum())
    assert wrong == 0, f"{what}: {wrong} of {actual.size} differ"
