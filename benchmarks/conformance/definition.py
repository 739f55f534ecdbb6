"""The definition that every library is compared with, and the other definitions in use.

    x = scale q k^T        c = softcap tanh(x / softcap)        z = c + bias, only at visible pairs
    p = exp(z) / (sum exp(z) + exp(sink))        out = p v

Positions start at 0 for queries and for keys. A window of `(left, right)` shows that many keys on
each side of the query, in addition to the key at the query's own position. Query head n reads
key/value head n // (N / K). A query that sees no key returns zeros and has no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Words:
    """One choice for each question on which libraries differ."""

    align: Literal["first", "last"] = "first"
    empty: Literal["zeros", "mean", "nan"] = "zeros"
    window: Literal["next to the query", "with the query", "one more"] = "next to the query"
    softcap: Literal["before the bias", "after the bias"] = "before the bias"
    heads: Literal["n // G", "n % K"] = "n // G"
    hidden: Literal["excluded", "multiplied by 0"] = "excluded"
    sums: Literal["float32", "of the inputs"] = "float32"


DEFINITION = Words()
MEANING = {
    ("align", "last"): "the last query is aligned with the last key",
    ("empty", "mean"): "a query that sees no key returns the mean of all values",
    ("empty", "nan"): "a query that sees no key returns NaN",
    (
        "window",
        "with the query",
    ): "the window counts the query's own position: one key fewer on each side",
    ("window", "one more"): "the window shows one key more on each side",
    ("softcap", "after the bias"): "the softcap is applied to the sum of score and bias",
    ("heads", "n % K"): "query head n reads key/value head n % K",
    (
        "hidden",
        "multiplied by 0",
    ): "NaN or inf in a hidden key or value reaches the output (0 x NaN)",
    ("sums", "of the inputs"): "weights and sums are rounded to the inputs' dtype",
}
"""What each other choice means, for the text under the table."""


def alternatives() -> Iterator[Words]:
    """Yield the other definitions: those with one other choice first, then those with two."""
    for count in (1, 2):
        for chosen in itertools.combinations(MEANING, count):
            if len({field for field, _ in chosen}) == count:
                yield replace(DEFINITION, **dict(chosen))
