"""Inputs and options that every library receives, and the results according to each definition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.conformance.definition import DEFINITION, Definition

Arrays = dict[str, np.ndarray]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs and options of one call, which every adapter translates to its library.

    Attributes:
        window: number of visible keys to the left and to the right of the query, in addition to its
            own position; None means no limit on that side.
        segments: document IDs of the queries [B, T] and of the keys [B, S].
        lengths: number of valid keys in each row, [B]; the rest is padding on the right.
        mask: bool mask that broadcasts to [B, N, T, S]; True makes a key visible to a query.
        bias: bias that broadcasts to [B, N, T, S].
        sinks: one logit per query head, [N].
        size: factor by which the queries are multiplied.
        shift: number that is added to the values.
        poison: an array, a value, and the indices of the keys whose entries have this value.
        exact: whether queries and keys are small integers times a power of two. Their products are
            then exact in every dtype, and large scores have no rounding error.
        grads: whether to compare the gradients of query, key and value for a fixed cotangent.
    """

    name: str
    group: str
    shape: tuple[int, int, int, int, int, int] = (2, 5, 5, 2, 2, 4)  # B, T, S, N, K, H
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    segments: tuple[np.ndarray, np.ndarray] | None = None
    lengths: np.ndarray | None = None
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    size: float = 1.0
    shift: float = 0.0
    poison: tuple[str, float, Sequence[int]] | None = None
    exact: bool = False
    grads: bool = True

    @functools.cached_property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return query, key, value, and the cotangent of the output, in the dtype of the case."""
        B, T, S, N, K, H = self.shape
        random = np.random.default_rng(sum(map(ord, self.name)))
        shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
        q, k, v, dout = (random.standard_normal(shape) for shape in shapes)
        if self.exact:
            q, k = (np.clip(np.rint(2 * x), -3, 3) for x in (q, k))
        q, v = q * self.size, v + self.shift
        if self.poison is not None:
            array, value, at = self.poison
            {"key": k, "value": v}[array][:, list(at)] = value
        return tuple(x.astype(DTYPES[self.dtype]) for x in (q, k, v, dout))  # type: ignore[return-value]

    def changed(self, **fields: Any) -> Case:
        """Return the case with different options."""
        return replace(self, **fields)

    def visible(self, definition: Definition = DEFINITION) -> np.ndarray:
        """Return the visible pairs according to the mask, bool [B, N, T, S]."""
        B, T, S, N, _, _ = self.shape
        q = np.arange(T)[:, None] + (S - T if definition.align == "last" else 0)
        k = np.arange(S)[None, :]
        seen = np.ones((B, N, T, S), bool)
        if self.causal:
            seen &= k <= q
        if self.window is not None:
            more = {"next to the query": 0, "with the query": -1, "one more": 1}[definition.window]
            left, right = self.window
            if left is not None:
                seen &= q - k <= left + more
            if right is not None:
                seen &= k - q <= right + more
        if self.segments is not None:
            seen &= (self.segments[0][:, :, None] == self.segments[1][:, None, :])[:, None]
        if self.lengths is not None:
            seen &= (k < self.lengths[:, None, None])[:, None]
        if self.mask is not None:
            seen &= self.mask
        return seen

    def result(self, definition: Definition = DEFINITION) -> tuple[Arrays, Arrays]:
        """Return `out`, the gradients `query`, `key`, and `value` in float64, and their bounds.

        The bounds depend on the dtype, the lengths, and the sizes of the terms. They are twice the
        first-order error. A sum of n products in float32 has a relative error of n u / (1 - n u)
        (Higham 2002, section 3.1), and an error e in a score changes its weight by the factor 1 +
        e. For 16-bit inputs, weights, their gradients, and results may be rounded to 16 bits.
        """
        _, T, S, N, K, H = self.shape
        q, k, v, dout = (x.astype(np.float64) for x in self.inputs)
        group = np.arange(N) % K if definition.heads == "n % K" else np.arange(N) // (N // K)
        seen = self.visible(definition)
        scale = 1 / np.sqrt(H) if self.scale is None else self.scale
        if definition.hidden == "excluded":  # a key that no query sees has no effect
            used = (seen.any((1, 2)) | (definition.empty == "mean"))[:, :, None, None]
            k, v = (np.where(used, x, 0.0) for x in (k, v))
        keys, values = k[:, :, group], v[:, :, group]
        with np.errstate(all="ignore"):
            x = scale * np.einsum("btnh,bsnh->bnts", q, keys)
            if definition.scores == "of the inputs":
                x = x.astype(DTYPES[self.dtype]).astype(np.float64)
            bias = np.zeros(1) if self.bias is None else self.bias.astype(np.float64)
            cap, after = self.softcap, definition.softcap == "after the bias"
            capped = np.tanh((x + bias if after else x) / cap) if cap else np.zeros(1)
            z = x + bias if cap is None else cap * capped + (0 if after else bias)
            sink = (
                -np.inf
                if self.sinks is None
                else self.sinks.astype(np.float64)[None, :, None, None]
            )
            if definition.hidden == "added to -inf":
                z = z + np.where(seen, 0.0, -np.inf)
            else:
                z = np.where(seen, z, -np.inf)
            top = np.max(z, -1, keepdims=True, initial=-np.inf)
            top = np.where(np.isinf(top), 0.0, top)
            e = np.where(seen | np.isnan(z), np.exp(z - top), 0.0)
            total = e.sum(-1, keepdims=True) + np.exp(sink - top)
            nothing = total == 0
            p = e / np.where(nothing, 1.0, total)
            if definition.empty != "zeros" and S:
                p = np.where(nothing, 1 / S if definition.empty == "mean" else np.nan, p)
            if definition.weights == "of the inputs":
                p = p.astype(DTYPES[self.dtype]).astype(np.float64)
            out = _weighted("bnts,bsnh->btnh", p, values, definition)
            dp = _weighted("btnh,bsnh->bnts", dout, values, definition)
            delta = _times(p, dp, definition).sum(-1, keepdims=True)
            dx = _times(p * (1 - capped**2), dp - delta, definition)
            if definition.empty == "mean":  # the scores were replaced, so they have no gradient
                dx = np.where(nothing, 0.0, dx)
            arrays = {
                "out": out,
                "query": scale * _weighted("bnts,bsnh->btnh", dx, keys, definition),
                "key": _by_key(scale * np.einsum("bnts,btnh->bsnh", dx, q), group, K),
                "value": _by_key(np.einsum("bnts,btnh->bsnh", p, dout), group, K),
            }

        fine = float(np.finfo(np.float32).eps) / 2
        u = float(ml_dtypes.finfo(DTYPES[self.dtype]).eps) / 2
        least = float(ml_dtypes.finfo(DTYPES[self.dtype]).smallest_subnormal)

        def gamma(n: int) -> float:
            return n * fine / (1 - n * fine)

        def size(array: np.ndarray) -> np.ndarray:
            return np.nan_to_num(np.abs(array), nan=0.0, posinf=0.0)

        aq, ak, av, ad, ap, adx = (size(array) for array in (q, keys, values, dout, p, dx))
        score = (0 if self.exact else gamma(H + 4) + 4 * fine) * (
            abs(scale) * np.einsum("btnh,bsnh->bnts", aq, ak)
            + np.where(size(bias) < 1e4, size(bias), 0)
        )
        weight = score + (ap * score).sum(-1, keepdims=True) + gamma(S + 4) + u
        weight = np.expm1(np.minimum(weight, 1.0))
        sums = np.einsum("btnh,bsnh->bnts", ad, av)
        error = (weight + gamma(H + 4) + u) * sums + (score * 2 / cap if cap else 0) * sums
        rounded = u * np.einsum("btnh,btnh->bnt", ad, size(out))[..., None]
        error = ap * (error + (ap * error).sum(-1, keepdims=True) + rounded) + u * adx
        flushed = float(np.finfo(np.float32).tiny)  # smaller weights become 0
        error += flushed * (sums + (ap * sums).sum(-1, keepdims=True))
        terms = gamma(max(S, T) * (N // K) + 4) + u
        key = np.einsum("bnts,btnh->bsnh", error + terms * adx, aq)
        value = np.einsum("bnts,btnh->bsnh", ap * (weight + terms) + flushed, ad)
        bounds = {
            "out": np.einsum("bnts,bsnh->btnh", ap * (weight + gamma(S + 4)) + flushed, av),
            "query": abs(scale) * np.einsum("bnts,bsnh->btnh", error + terms * adx, ak),
            "key": _by_key(abs(scale) * key, group, K),
            "value": _by_key(value, group, K),
        }
        bounds = {n: 2 * (bounds[n] + u * size(arrays[n]) + (S + T) * least) for n in bounds}
        compared = list(arrays) if self.grads else ["out"]
        return {n: arrays[n] for n in compared}, {n: bounds[n] for n in compared}


def _times(weights: np.ndarray, terms: np.ndarray, definition: Definition) -> np.ndarray:
    """Return the product. A weight of 0 excludes its term, unless the definition differs."""
    return (
        np.where(weights == 0, 0.0, weights * terms)
        if definition.hidden == "excluded"
        else weights * terms
    )


def _weighted(
    form: str, weights: np.ndarray, rows: np.ndarray, definition: Definition
) -> np.ndarray:
    """Return the weighted sum. A weight of 0 excludes its row, unless the definition differs."""
    if definition.hidden == "excluded" and not np.isfinite(rows).all():
        clean = np.einsum(form, weights, np.where(np.isfinite(rows), rows, 0.0))
        bad = np.einsum(form, (weights != 0).astype(float), (~np.isfinite(rows)).astype(float))
        return np.where(bad > 0, np.nan, clean)
    return np.einsum(form, weights, rows)


def _by_key(rows: np.ndarray, group: np.ndarray, K: int) -> np.ndarray:
    """Sum over the query heads of each key/value head."""
    total = np.zeros((*rows.shape[:2], K, rows.shape[3]))
    for n, key in enumerate(group):
        total[:, :, key] += rows[:, :, n]
    return total


def cases() -> list[Case]:
    """Return all cases, which have unique names."""
    random = np.random.default_rng(0)

    def bias(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    def only(*visible: bool) -> np.ndarray:
        return np.array(visible)

    def blind(T: int, S: int, *rows: int) -> np.ndarray:
        """Return a mask [1, 1, T, S] that hides all keys from the queries `rows`."""
        mask = np.ones((1, 1, T, S), bool)
        mask[..., list(rows), :] = False
        return mask

    found: list[Case] = []

    def add(group: str, name: str, **options: Any) -> None:
        found.append(Case(name=name, group=group, **options))

    # Plain
    add("plain", "no options")
    add("plain", "one query, one key", shape=(1, 1, 1, 1, 1, 3))
    add("plain", "T = 7, S = 3", shape=(1, 7, 3, 2, 2, 4))
    add("plain", "causal", causal=True)
    for length in (127, 129, 257):
        add("plain", f"causal, length {length}", causal=True, shape=(1, length, length, 2, 2, 8))
    add("plain", "scale 0.5", scale=0.5)
    add("plain", "scale 0", scale=0.0)
    add("plain", "negative scale", scale=-0.7)
    add("plain", "head dim 1", shape=(2, 5, 5, 2, 2, 1))
    add("plain", "head dim 80", shape=(1, 5, 5, 2, 2, 80))

    # A query that sees no key
    for name, mask in {
        "a query that sees no key": blind(5, 5, 2),
        "all queries blind": blind(5, 5, 0, 1, 2, 3, 4),
    }.items():
        add("fully masked rows", name, mask=mask)
        add("fully masked rows", f"{name}, bfloat16", mask=mask, dtype="bfloat16")
    add("fully masked rows", "a query that sees no key, causal", mask=blind(5, 5, 0), causal=True)
    add("fully masked rows", "a row of length 0", lengths=np.array([5, 0]))
    add("fully masked rows", "a row of length 0, causal", lengths=np.array([3, 0]), causal=True)
    add(
        "fully masked rows",
        "bias of -inf for a query",
        bias=np.where(blind(5, 5, 1), 0, -np.inf).astype(np.float32),
    )
    add(
        "fully masked rows",
        "left padding, causal",
        causal=True,
        mask=(np.arange(5) >= np.array([[0], [2]]))[:, None, None],
    )
    add(
        "fully masked rows",
        "a query that sees no key, sinks",
        mask=blind(5, 5, 2),
        sinks=np.array([0.3, -1.2], np.float32),
    )

    # T != S
    for T, S in ((3, 7), (7, 3), (1, 6)):
        add("T and S differ", f"causal, T = {T}, S = {S}", causal=True, shape=(1, T, S, 2, 2, 4))
    add(
        "T and S differ",
        "window of 2 keys before, T = 3, S = 7",
        window=(2, 0),
        causal=True,
        shape=(1, 3, 7, 2, 2, 4),
    )
    add(
        "T and S differ",
        "window of 2 keys on both sides, T = 3, S = 7",
        window=(2, 2),
        shape=(1, 3, 7, 2, 2, 4),
    )
    add(
        "T and S differ",
        "causal, lengths, T = 3, S = 7",
        causal=True,
        lengths=np.array([6]),
        shape=(1, 3, 7, 2, 2, 4),
    )

    # Windows
    for left in (0, 1, 3, 20):
        add(
            "windows",
            f"causal, window of {left} keys before",
            causal=True,
            window=(left, 0),
            shape=(1, 9, 9, 2, 2, 4),
        )
    for left, right in ((2, 2), (0, 0), (1, 3), (20, 20)):
        add(
            "windows",
            f"window of {left} before, {right} after",
            window=(left, right),
            shape=(1, 9, 9, 2, 2, 4),
        )
    add("windows", "window of 2 before, no limit after", window=(2, None), shape=(1, 9, 9, 2, 2, 4))
    add(
        "windows",
        "causal, window, length 130",
        causal=True,
        window=(33, 0),
        shape=(1, 130, 130, 2, 2, 8),
    )

    # Documents in one row
    ids = np.array([[1, 1, 2, 2, 2, 3], [1, 2, 2, 3, 3, 3]])
    row = (2, 6, 6, 2, 2, 4)
    add("packed documents", "documents", segments=(ids, ids), shape=row)
    add("packed documents", "documents, causal", segments=(ids, ids), causal=True, shape=row)
    padded = np.where(ids == 3, 0, ids)
    add(
        "packed documents",
        "documents, padding with id 0",
        segments=(padded, padded),
        causal=True,
        shape=row,
    )
    add(
        "packed documents",
        "documents that return",
        segments=(ids[:, [0, 2, 1, 3, 5, 4]],) * 2,
        shape=row,
    )
    add(
        "packed documents",
        "documents, window",
        segments=(ids, ids),
        causal=True,
        window=(1, 0),
        shape=row,
    )
    add("packed documents", "keys of other documents", segments=(ids, ids[:, ::-1]), shape=row)

    # Padding and masks
    add("padding", "padding on the right", lengths=np.array([5, 3]))
    add("padding", "padding on the right, causal", lengths=np.array([4, 3]), causal=True)
    add(
        "padding", "padding on the left", mask=(np.arange(5) >= np.array([[0], [2]]))[:, None, None]
    )
    add("padding", "mask [1, 1, 1, S]", mask=only(True, False, True, True, False)[None, None, None])
    add("padding", "mask [B, 1, T, S]", mask=random.random((2, 1, 5, 5)) < 0.7)
    add("padding", "mask [B, N, T, S]", mask=random.random((2, 2, 5, 5)) < 0.7)
    add("padding", "mask [1, N, T, S], causal", mask=random.random((1, 2, 5, 5)) < 0.8, causal=True)

    # Groups of heads
    for K in (1, 2, 3):
        add("grouped heads", f"6 heads, {K} key/value heads", shape=(2, 5, 5, 6, K, 4))
    add(
        "grouped heads", "6 heads, 2 key/value heads, causal", shape=(2, 5, 5, 6, 2, 4), causal=True
    )

    # Sinks, softcap, bias
    add("sinks", "sinks", sinks=np.array([0.3, -1.2], np.float32))
    add(
        "sinks",
        "sinks, causal, window",
        sinks=np.array([0.3, 2.0], np.float32),
        causal=True,
        window=(1, 0),
    )
    add("sinks", "a large sink", sinks=np.array([80.0, 0.0], np.float32))
    add("softcap", "softcap 2", softcap=2.0, size=3.0)
    add("softcap", "softcap 2, causal", softcap=2.0, size=3.0, causal=True)
    add("softcap", "softcap 2, bias", softcap=2.0, size=3.0, bias=bias(1, 2, 5, 5))
    add("softcap", "softcap 2, mask", softcap=2.0, size=3.0, mask=random.random((2, 1, 5, 5)) < 0.7)
    for shape in ((1, 1, 5, 5), (1, 2, 5, 5), (2, 1, 1, 5), (2, 2, 5, 5)):
        add("biases", f"bias {list(shape)}", bias=bias(*shape))
    add("biases", "bias, causal", bias=bias(1, 2, 5, 5), causal=True)
    add("biases", "bias, mask", bias=bias(1, 2, 5, 5), mask=random.random((2, 1, 5, 5)) < 0.7)
    add(
        "biases",
        "bias of -inf hides a key",
        bias=np.where(only(True, False, True, True, True), 0, -np.inf).astype(np.float32)[
            None, None, None
        ],
    )
    add(
        "biases",
        "bias of -1e9 hides a key",
        bias=np.where(only(True, False, True, True, True), 0, -1e9).astype(np.float32)[
            None, None, None
        ],
    )
    add(
        "biases",
        "bias of -3.4e38 for all keys of a query",
        bias=np.where(blind(5, 5, 1), 0, -3.4e38).astype(np.float32),
    )

    # Large scores and values that are not finite
    large = dict(exact=True, scale=0.5)
    add("large scores", "scores near 1e4", size=2.0**12, **large)
    add("large scores", "scores near 1e30", size=2.0**98, **large)
    add("large scores", "scores near 1e3, float16", size=2.0**9, dtype="float16", **large)
    add("large scores", "scores above 65,504, float16", size=2.0**14, dtype="float16", **large)
    add("large scores", "scores near 1e4, bfloat16", size=2.0**12, dtype="bfloat16", **large)
    add("large scores", "equal scores", scale=0.0, shift=3.0, causal=True)
    hide = only(True, True, True, True, False)[None, None, None]
    for array in ("key", "value"):
        for value in (np.nan, np.inf):
            text = f"{value} in a hidden {array}"
            add("NaN and inf", text, mask=hide, poison=(array, value, (4,)), grads=False)
            add(
                "NaN and inf",
                f"{text}, padding by length",
                lengths=np.array([4, 4]),
                poison=(array, value, (4,)),
                grads=False,
            )
    add(
        "NaN and inf",
        "NaN in a later value, causal",
        causal=True,
        poison=("value", np.nan, (4,)),
        grads=False,
    )
    add("NaN and inf", "NaN in a visible value", poison=("value", np.nan, (4,)), grads=False)

    # 16 bits
    for dtype in ("bfloat16", "float16"):
        add("16 bits", f"{dtype}", dtype=dtype)
        add("16 bits", f"{dtype}, causal", dtype=dtype, causal=True)
        add(
            "16 bits",
            f"{dtype}, 2,048 equal values",
            dtype=dtype,
            scale=0.0,
            shift=300.0,
            shape=(1, 2, 2048, 1, 1, 4),
            grads=False,
        )
        add(
            "16 bits",
            f"{dtype}, grouped heads, window",
            dtype=dtype,
            causal=True,
            window=(2, 0),
            shape=(2, 5, 5, 4, 2, 8),
        )

    # Empty inputs
    add("empty", "no keys", shape=(2, 5, 0, 2, 2, 4))
    add("empty", "no queries", shape=(2, 0, 5, 2, 2, 4))
    add("empty", "no rows", shape=(0, 5, 5, 2, 2, 4))
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "names of cases are not unique"
    return found
