"""Definition with which every library is compared, and alternative definitions in use.

    x = scale q k^T        c = softcap tanh(x / softcap)        z = c + bias, only at visible pairs
    p = exp(z) / (sum exp(z) + exp(sink))        out = p v

Positions start at 0 for both queries and keys. With a window of `(left, right)`, a query sees that
many keys on each side, in addition to the key at its own position. Query head n uses key/value head
n // (N / K). The output for a query that sees no key is zero and has no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Choice for each question on which libraries differ."""

    align: Literal["first", "last"] = "first"
    empty: Literal["zeros", "mean", "nan"] = "zeros"
    window: Literal["next to the query", "with the query", "one more"] = "next to the query"
    softcap: Literal["before the bias", "after the bias"] = "before the bias"
    heads: Literal["n // G", "n % K"] = "n // G"
    hidden: Literal["excluded", "multiplied by 0", "added to -inf"] = "excluded"
    scores: Literal["float32", "of the inputs"] = "float32"
    weights: Literal["float32", "of the inputs"] = "float32"


DEFINITION = Definition()
MEANING = {
    ("align", "last"): "the last query is aligned with the last key",
    ("empty", "mean"): "a query that sees no key returns the mean of all values",
    ("empty", "nan"): "a query that sees no key returns NaN",
    ("window", "with the query"): "the window counts the query: one key fewer on each side",
    ("window", "one more"): "the window shows one key more on each side",
    ("softcap", "after the bias"): "the softcap is applied to the sum of score and bias",
    ("heads", "n % K"): "query head n reads key/value head n % K",
    ("hidden", "multiplied by 0"): "NaN and inf in a hidden value reach the output (0 x NaN)",
    ("hidden", "added to -inf"): "NaN and inf in a hidden key or value reach the output",
    ("scores", "of the inputs"): "scores are rounded to the dtype of the inputs",
    ("weights", "of the inputs"): "weights are rounded to the dtype of the inputs",
}
"""Meaning of every alternative choice, for the notes under the table."""


def alternatives() -> Iterator[Definition]:
    """Yield the alternative definitions, first those with one different choice, then with two."""
    for count in (1, 2):
        for chosen in itertools.combinations(MEANING, count):
            if len({field for field, _ in chosen}) == count:
                yield replace(DEFINITION, **dict(chosen))
