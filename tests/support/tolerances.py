"""Allowed errors, named once, each relative to the largest value of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

FORWARD_F32 = 1e-6
"""Outputs, weights and log-sum-exps in float32 against float64."""

GRADIENT_F32 = 5e-6
"""Gradients in float32 against float64."""

FORWARD_BF16 = 2**-7
"""Outputs in bfloat16 against float64: two roundings of 2^-8, of the weights and of the result."""

GRADIENT_BF16 = 2**-6
"""Gradients in bfloat16: roundings of the output, of the differences and of the result."""

LOW_PRECISION_FORWARD = 2.0
"""In bfloat16 and float16: error over the error of a plain implementation in the same dtype."""

LOW_PRECISION_FORWARD_FLOOR = 1e-5
"""Added to that: a plain implementation can be right by chance."""

LOW_PRECISION_GRADIENT = 3.0


def largest_error(actual: Any, expected: Any) -> float:
    """The largest absolute difference; both must be finite, of one shape and not empty."""
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
    """Equal bit for bit, except that NaN never passes and -0.0 is 0.0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    assert actual.size > 0, f"{what}: nothing to compare"
    assert not np.isnan(actual.astype(np.float64)).any(), f"{what}: NaN"
    wrong = int((actual != expected).sum())
    assert wrong == 0, f"{what}: {wrong} of {actual.size} differ"
