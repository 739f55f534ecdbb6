"""Shapes for benchmarks and kernel tests. Add new shapes here.

The following tags select cases: `cpu`, `gpu`, `tpu`, `quick` (a smoke test), `memory` (compiled but
not run), and `edge` (correctness for sizes that are not divisible by any block size).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.biases import alibi_slopes
from transformer_jax.attention.masks import Causal, Mask, Padding, Segments, Window
from transformer_jax.config import ModelConfig, preset

Direction = Literal["forward", "backward", "forward+backward"]


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Shapes and mask of one attention call."""

    name: str
    batch: int  # B
    queries: int  # T
    keys: int  # S
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    value_dim: int  # Hv
    causal: bool = False
    window: int | None = None
    """Number of keys that a query sees, including its own position. The window is two-sided if
    `causal` is false."""
    documents: int | None = None
    """Number of packed documents per row, which have different lengths and do not attend to each
    other."""
    padded: bool = False
    """Whether rows have between S/2 and S valid keys."""
    bias: Literal["alibi", "dense"] | None = None
    """Type of bias: ALiBi with the published slopes, or a learned array [1, N, T, S]."""
    softcap: float | None = None
    sinks: bool = False
    """Whether each head has a learned sink logit."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    cached: bool = False
    """Whether the queries are at the last positions and positions are passed as arrays, as in
    decoding."""
    tags: frozenset[str] = frozenset()

    def inputs(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return all differentiable inputs: query, key, value, and the arrays from `learned`.

        The values are standard normal, because products with zeros are faster.
        """
        shapes = [
            (self.batch, self.queries, self.heads, self.head_dim),
            (self.batch, self.keys, self.kv_heads, self.head_dim),
            (self.batch, self.keys, self.kv_heads, self.value_dim),
        ]
        if self.bias == "dense":
            shapes.append((1, self.heads, self.queries, self.keys))
        if self.sinks:
            shapes.append((self.heads,))
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return tuple(
            jax.random.normal(key, shape, self.dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )

    def learned(self, *more: Any) -> dict[str, Any]:
        """Return the arrays that `inputs` returns after query, key, and value, keyed by name."""
        names = ["bias"] * (self.bias == "dense") + ["sinks"] * self.sinks
        return dict(zip(names, more, strict=True))

    def positions(self) -> dict[str, jax.Array]:
        """Return positions, i32[B, T] and [B, S], if the queries are `cached`."""
        if not self.cached:
            return {}
        k = jnp.broadcast_to(jnp.arange(self.keys, dtype=jnp.int32), (self.batch, self.keys))
        return dict(q_positions=k[:, self.keys - self.queries :], k_positions=k)

    def slopes(self) -> jax.Array:  # f32[N]
        """Return the ALiBi slopes, which are known during tracing."""
        with jax.ensure_compile_time_eval():
            return alibi_slopes(self.heads)

    def mask(self) -> Mask | None:
        """Return the mask of the case, or None if all pairs are visible."""
        parts: list[Mask] = []
        if self.causal:
            parts.append(Causal())
        if self.window is not None:
            parts.append(Window(self.window, None if self.causal else self.window))
        if self.documents is not None:
            parts.append(Segments(jnp.asarray(self.document_ids())))
        if self.padded:
            parts.append(Padding(jnp.asarray(self.valid())))
        return functools.reduce(lambda a, b: a & b, parts) if parts else None

    @property
    def is_dense(self) -> bool:
        """Whether peers that support only a causal mask need this mask as an array."""
        return self.window is not None or self.documents is not None or self.padded

    def dense_mask(self) -> np.ndarray | None:  # bool[B or 1, T, S]
        """Return the mask as an array for such peers, or None if `causal` describes it."""
        return self.seen() if self.is_dense else None

    def seen(self) -> np.ndarray:  # bool[B or 1, T, S]
        """Return the visibility of every pair, for peers that include the mask in a bias."""
        first, end = (x[..., None].astype(np.int32) for x in self.ranges())
        place = np.arange(self.keys, dtype=np.int32)
        return (first <= place) & (place < end)

    def ranges(self) -> tuple[np.ndarray, np.ndarray]:  # int[B or 1, T]
        """Return the start and the end of the visible keys of each query. Every mask is a range."""
        place = np.arange(self.queries) + (self.keys - self.queries if self.cached else 0)
        first, end = np.zeros((1, self.queries), int), np.full((1, self.queries), self.keys)
        if self.causal:
            end = np.minimum(end, place + 1)
        if self.window is not None:
            first = np.maximum(first, place - self.window + 1)
            end = np.minimum(end, place + self.window)
        if self.documents is not None:
            ids = self.document_ids()
            first = np.maximum(first, [np.searchsorted(row, row, "left") for row in ids])
            end = np.minimum(end, [np.searchsorted(row, row, "right") for row in ids])
        if self.padded:
            end = np.minimum(end, self.valid().sum(axis=1)[:, None])
        return first, end

    def document_ids(self) -> np.ndarray:  # i32[B, S]
        assert self.documents is not None and self.queries == self.keys
        rng = np.random.default_rng(self.documents)
        cuts = [
            rng.choice(np.arange(1, self.keys), self.documents - 1, replace=False)
            for _ in range(self.batch)
        ]
        starts = np.zeros((self.batch, self.keys), np.int32)
        for row, cut in zip(starts, cuts, strict=True):
            row[cut] = 1
        return starts.cumsum(axis=1, dtype=np.int32)

    def valid(self) -> np.ndarray:  # bool[B, S]
        lengths = np.random.default_rng(1).integers(self.keys // 2, self.keys + 1, self.batch)
        return np.arange(self.keys)[None] < lengths[:, None]

    def pairs(self) -> int:
        """Return the number of visible query-key pairs over all rows of the batch."""
        first, end = self.ranges()
        seen = np.maximum(end - first, 0)
        return int(seen.sum()) * (self.batch // len(seen))

    def flops(self, direction: Direction) -> int:
        """Return the FLOPs of visible pairs: 2 products forward, 5 backward (FlashAttention)."""
        product = self.heads * self.pairs() * (self.head_dim + self.value_dim)
        return product * {"forward": 2, "backward": 5, "forward+backward": 7}[direction]

    def score_bytes(self) -> int:
        """Return the number of bytes of one materialized f32[B, N, T, S]."""
        return 4 * self.batch * self.heads * self.queries * self.keys


def _case(name, batch, length, heads, head_dim, *tags, kv_heads=None, **rest) -> AttentionCase:
    """Return a case of self-attention with equal numbers of queries and keys."""
    return AttentionCase(
        name=name, batch=batch, queries=length, keys=length, heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads, head_dim=head_dim, value_dim=head_dim,
        tags=frozenset(tags), **rest,
    )  # fmt: skip


def _cpu() -> list[AttentionCase]:
    cases = []
    for (batch, heads), head_dim, length in itertools.product(
        ((1, 4), (1, 12), (4, 12)), (64, 128), (512, 1024, 2048, 4096, 8192)
    ):
        name = f"causal-b{batch}n{heads}-h{head_dim}-s{length}"
        tags = ["cpu", "causal"]
        if (heads, head_dim) == (4, 64):
            tags.append("memory")
            if length == 512:
                tags.append("quick")
        cases.append(_case(name, batch, length, heads, head_dim, *tags, causal=True))
    for length in (128, 256):
        name = f"causal-b12n6-h64-s{length}"
        cases.append(_case(name, 12, length, 6, 64, "cpu", "causal", causal=True))
    masked: dict[str, dict] = {
        "window256": dict(causal=True, window=256),
        "documents": dict(causal=True, documents=8),
        "padding": dict(padded=True),
        "gqa": dict(causal=True, kv_heads=2),
        "gqa-window256-documents": dict(causal=True, window=256, documents=8, kv_heads=2),
        "alibi": dict(causal=True, bias="alibi"),
        "bias": dict(causal=True, bias="dense"),
        "everything": dict(
            causal=True, window=256, documents=8, kv_heads=2, softcap=30.0, sinks=True
        ),
    }
    for label, rest in masked.items():
        for length in (512, 2048, 4096, 8192):
            if (label, length) == ("bias", 8192):
                continue  # 2 GiB, and the same for the gradient
            quick = length == 512 and label in ("everything", "padding")
            tags = ["cpu", "masked", *(["quick"] if quick else [])]
            cases.append(_case(f"{label}-b2n8-h64-s{length}", 2, length, 8, 64, *tags, **rest))
    cases.append(
        _case("window256-b1n4-h64-s8192", 1, 8192, 4, 64, "cpu", "masked", causal=True, window=256)
    )
    return cases


def _gpu() -> list[AttentionCase]:
    """Return the cases in the goals on Hopper (16k tokens, and NVIDIA's B=1 with 64/8 heads)."""
    tags = ("gpu", "tpu")
    cases = []
    for head_dim, length in itertools.product((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)):
        name = f"causal-16k-h{head_dim}-s{length}"
        batch, heads = 16384 // length, 2048 // head_dim
        cases.append(_case(name, batch, length, heads, head_dim, *tags, causal=True))
    for length in (2048, 8192, 32768):
        name = f"causal-gqa-h128-s{length}"
        cases.append(_case(name, 1, length, 64, 128, *tags, kv_heads=8, causal=True))
    for head_dim, length in itertools.product((64, 128), (8192, 32768, 65536)):
        name = f"window1024-gqa-h{head_dim}-s{length}"
        rest = dict(causal=True, window=1024, kv_heads=8)
        cases.append(_case(name, 1, length, 64, head_dim, *tags, **rest))
    for length in (8192, 32768):
        name = f"documents12-h128-s{length}"
        cases.append(_case(name, 1, length, 16, 128, *tags, causal=True, documents=12))
    for length in (4096, 16384):
        name = f"alibi-16k-h128-s{length}"
        cases.append(
            _case(name, 16384 // length, length, 16, 128, *tags, causal=True, bias="alibi")
        )
    for length in (2048, 4096):
        name = f"bias-16k-h128-s{length}"
        cases.append(
            _case(name, 16384 // length, length, 16, 128, *tags, causal=True, bias="dense")
        )
    for length in (8192, 32768):
        name = f"everything-gqa-h128-s{length}"
        rest = dict(causal=True, window=1024, documents=12, kv_heads=8, softcap=30.0, sinks=True)
        cases.append(_case(name, 1, length, 64, 128, *tags, **rest))
    return [replace(case, dtype="bfloat16") for case in cases]


def _edge() -> list[AttentionCase]:
    """Return cases with all masks and options and with sizes not divisible by any block size."""
    prime = dict(batch=2, queries=67, keys=131, heads=6, kv_heads=3, head_dim=64, value_dim=64)
    square = dict(prime, queries=131)
    edge = frozenset({"edge"})
    return [
        AttentionCase(name="edge-full", tags=edge, **prime),
        AttentionCase(name="edge-causal", tags=edge, causal=True, **prime),
        AttentionCase(name="edge-window", tags=edge, causal=True, window=29, **square),
        AttentionCase(name="edge-band", tags=edge, window=17, **square),
        AttentionCase(name="edge-documents", tags=edge, causal=True, documents=5, **square),
        AttentionCase(name="edge-padding", tags=edge, padded=True, **prime),
        AttentionCase(
            name="edge-everything", tags=edge, causal=True, window=29, documents=5, padded=True,
            **square,
        ),
        AttentionCase(name="edge-alibi", tags=edge, causal=True, bias="alibi", **prime),
        AttentionCase(name="edge-bias", tags=edge, causal=True, bias="dense", **prime),
        AttentionCase(name="edge-capped", tags=edge, padded=True, softcap=3.0, sinks=True, **prime),
        AttentionCase(name="edge-values", tags=edge, causal=True, **dict(prime, value_dim=128)),
        AttentionCase(name="edge-one-query", tags=edge, **dict(prime, queries=1)),
    ]  # fmt: skip


def _choosing() -> list[AttentionCase]:
    """Return cases to fit `implementation=None`, at lengths where the best choice changes."""
    cases = []
    for (batch, heads, head_dim), length in itertools.product(
        ((1, 4, 64), (12, 4, 32), (4, 12, 64)), (8, 16, 32, 64, 96, 128, 256, 512)
    ):
        name = f"short-b{batch}n{heads}-h{head_dim}-s{length}"
        cases.append(_case(name, batch, length, heads, head_dim, "short", causal=True))
    for batch, heads, length in ((12, 6, 128), (12, 6, 256), (1, 12, 512), (1, 12, 1024),
                                 (4, 12, 1024), (1, 8, 2048), (1, 4, 8192)):  # fmt: skip
        name = f"long-b{batch}n{heads}-h64-s{length}"
        cases.append(_case(name, batch, length, heads, 64, "long", causal=True))
    for dtype in ("bfloat16", "float16"):
        for length in (32, 512):
            name = f"half-{dtype}-b4n12-h64-s{length}"
            cases.append(_case(name, 4, length, 12, 64, "half", causal=True, dtype=dtype))
    masked: dict[str, dict] = {
        "full": dict(), "padding": dict(padded=True), "gqa": dict(causal=True, kv_heads=2),
        "documents": dict(causal=True, documents=4), "alibi": dict(causal=True, bias="alibi"),
        "bias": dict(causal=True, bias="dense"), "capped": dict(causal=True, softcap=30.0),
    }  # fmt: skip
    for label, rest in masked.items():
        for length in (32, 512):
            cases.append(
                _case(f"mask-{label}-b2n8-h64-s{length}", 2, length, 8, 64, "mask", **rest)
            )
    for length in (512, 4096):
        name = f"mask-window-b1n4-h64-s{length}"
        cases.append(_case(name, 1, length, 4, 64, "mask", causal=True, window=128))
    for queries, (batch, heads, kv_heads, head_dim), length in itertools.product(
        (1, 4, 16, 32), ((1, 12, 12, 64), (8, 12, 12, 64), (1, 32, 8, 128)), (32, 128, 512, 2048)
    ):
        cases.append(AttentionCase(
            name=f"decode-t{queries}-b{batch}n{heads}k{kv_heads}-h{head_dim}-s{length}",
            batch=batch, queries=queries, keys=length, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, value_dim=head_dim, causal=True, cached=True,
            tags=frozenset({"decode"}),
        ))  # fmt: skip
    return [replace(case, tags=case.tags | {"choosing"}) for case in cases]


ATTENTION: tuple[AttentionCase, ...] = (*_cpu(), *_gpu(), *_edge(), *_choosing())


def attention_cases(*tags: str) -> list[AttentionCase]:
    """Return the cases that have all `tags`."""
    return [case for case in ATTENTION if case.tags >= set(tags)]


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """Optimizer step of a decoder on random tokens."""

    name: str
    model: ModelConfig
    batch: int
    tags: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        """Return the number of tokens per step."""
        return self.batch * self.model.max_len

    def matmul_flops(self) -> int:
        """Return the FLOPs of a step: 6 per weight and token, and 7 products of visible pairs."""
        cfg = self.model
        per_layer = 4 * cfg.d_model**2 + 2 * cfg.d_model * cfg.ff_dim
        weights = cfg.num_layers * per_layer + cfg.vocab_size * cfg.d_model
        pairs = self.batch * cfg.max_len * (cfg.max_len + 1) // 2
        return 6 * weights * self.tokens + 14 * cfg.num_layers * cfg.d_model * pairs


_SMALL = preset(
    "shakespeare-cpu", positions="learned", init_std=0.02, dropout=0.0, attention_dropout=0.0
)  # unchanged, for comparison with older measurements
_MEDIUM = preset("shakespeare-gpu", dropout=0.0, attention_dropout=0.0)

TRAIN: tuple[TrainCase, ...] = (
    TrainCase(name="small", model=_SMALL, batch=12, tags=frozenset({"quick"})),
    TrainCase(name="medium", model=_MEDIUM, batch=16),
    TrainCase(name="small-b64", model=_SMALL, batch=64, tags=frozenset({"full"})),
    TrainCase(name="medium-b64", model=_MEDIUM, batch=64, tags=frozenset({"full"})),
)


@dataclass(frozen=True, kw_only=True)
class ServeCase:
    """Requests with different prompt and answer lengths for a decoder with `slots` rows."""

    name: str
    model: ModelConfig
    slots: int
    requests: int
    mean: int
    """Mean number of new tokens per request, which is geometrically distributed."""
    most: int
    """Maximum number of new tokens per request."""
    longest_prompt: int
    busy: float | None = None
    """Fraction of the slots' time that arriving requests need. If it is None, all requests arrive
    at the start."""
    tags: frozenset[str] = frozenset()

    def prompts(self, seed: int = 0) -> list[np.ndarray]:
        """Return random prompts of 1 to `longest_prompt` tokens."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, self.longest_prompt + 1, self.requests)
        return [rng.integers(0, self.model.vocab_size, n, dtype=np.int32) for n in lengths]

    def lengths(self, seed: int = 1) -> np.ndarray:  # i64[requests]
        """Return the number of new tokens for each request."""
        drawn = np.random.default_rng(seed).geometric(1 / self.mean, self.requests)
        return np.minimum(drawn, self.most)

    def arrivals(self, seconds: float, seed: int = 2) -> np.ndarray:  # f64[requests]
        """Return Poisson arrival times for slots that need `seconds` to answer all requests."""
        if self.busy is None:
            return np.zeros(self.requests)
        gap = seconds / self.busy / self.requests
        return np.random.default_rng(seed).exponential(gap, self.requests).cumsum()


_SERVED = replace(_SMALL, max_len=128)

SERVE: tuple[ServeCase, ...] = (
    ServeCase(
        name="quick", model=preset("tiny"), slots=3, requests=11, mean=7, most=23,
        longest_prompt=11, tags=frozenset({"quick"}),
    ),
    ServeCase(
        name="small-8-slots", model=_SERVED, slots=8, requests=64, mean=24, most=100,
        longest_prompt=16,
    ),
    ServeCase(
        name="small-8-slots-arriving", model=_SERVED, slots=8, requests=64, mean=24, most=100,
        longest_prompt=16, busy=0.7,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """Greedy generation of `new` tokens after a random prompt."""

    name: str
    model: ModelConfig
    batch: int
    prompt: int
    new: int = 64
    capacity: int
    """Number of slots in our cache and in the static cache of a peer."""
    ragged: bool = False
    """Whether prompts have between prompt/2 and prompt tokens."""
    tags: frozenset[str] = frozenset()

    def tokens(self) -> np.ndarray:  # i32[B, P]
        shape = self.batch, self.prompt
        return np.random.default_rng(0).integers(0, self.model.vocab_size, shape, dtype=np.int32)

    def lengths(self) -> np.ndarray:  # i32[B]
        """Return the number of valid tokens in each row. The first row is full."""
        if not self.ragged:
            return np.full(self.batch, self.prompt, np.int32)
        drawn = np.random.default_rng(1).integers(self.prompt // 2, self.prompt + 1, self.batch)
        return np.where(np.arange(self.batch) == 0, self.prompt, drawn).astype(np.int32)


def _decode() -> list[DecodeCase]:
    small, tiny = preset("gpt2"), preset("tiny", max_len=128)
    large = preset("gpt2-xl", max_len=2048, dtype="bfloat16")
    gpu: dict = dict(model=large, prompt=1792, new=256, capacity=2048, ragged=True)
    gpu["tags"] = frozenset({"gpu"})
    cpu: dict = dict(model=small, prompt=16, capacity=128, tags=frozenset({"cpu"}))
    quick: dict = dict(model=tiny, prompt=16, new=8, capacity=32, tags=frozenset({"quick"}))
    return [
        DecodeCase(name="tiny-b2", batch=2, ragged=True, **quick),
        DecodeCase(name="gpt2-b1", batch=1, **cpu),
        DecodeCase(name="gpt2-b8", batch=8, **cpu),
        DecodeCase(name="gpt2-xl-b1", batch=1, **gpu),
        DecodeCase(name="gpt2-xl-b64", batch=64, **gpu),
    ]


DECODE: tuple[DecodeCase, ...] = tuple(_decode())
