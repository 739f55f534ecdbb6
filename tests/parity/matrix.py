"""Comparison of cached decoding with the full forward pass, for all combinations of options.

    python -m tests.parity                      # prints the matrix and its largest error
    python -m tests.parity --write docs/reference/parity_matrix.md

A case combines position kind, head layout, full attention or a window, and decoder or
encoder-decoder. Further cases, all with GQA, combine position kind and model kind with smaller
caches: a window with sink tokens, a window per layer, int8. Two cases have a window per layer with
its own RoPE base, and some have layers with a state or with latent attention. Each case is measured
with equal and ragged prompts, read whole and in chunks. The cache of a windowed case is a ring of
exactly the window's length (plus sinks), which wraps several times.

Greedy tokens come from `generate`. The full pass reads prompt and tokens at once, without a cache;
each of the 64 tokens must be its likeliest, and the cached logits of every position must equal its
logits. With int8, the tolerance is relative to the largest logit, and a token counts as equal if
the likeliest token of the full pass is ahead by at most twice the tolerance.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import (
    GatedDelta,
    LatentAttention,
    ModelConfig,
    Positions,
    Rope,
    Shaw,
    ShortConv,
    T5Buckets,
)
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

POSITIONS = ("none", "learned", "sinusoidal", "rope", "rope-pairs", "shaw", "t5", "alibi")
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
WINDOWS = (None, 11)
MEMORY: tuple[dict, ...] = (
    dict(window=7, sinks=4), dict(window=(5, None)), dict(window=None, dtype="int8"),
    dict(window=(7, 3), sinks=2, dtype="int8"),
)  # fmt: skip
MIXERS: tuple[dict, ...] = (
    dict(positions="none", window=None, mixers="SA"),
    dict(positions="rope", window=11, mixers="SA"),
    dict(positions="learned", window=None, mixers="AS", dtype="int8"),
    dict(positions="alibi", window=(5, None), mixers="SAA"),
    dict(positions="none", window=None, mixers="S"),
    dict(positions="rope", window=None, mixers="L"),
    dict(positions="rope", window=11, sinks=2, mixers="L"),
    dict(positions="alibi", window=(5, None), mixers="LA"),
    dict(positions="learned", window=None, mixers="SL"),
    dict(positions="rope", window=None, mixers="L", dtype="int8"),
    dict(positions="rope", window=None, mixers="CA"),
)  # fmt: skip
"""Patterns of layers with a state (S), a short convolution (C), attention (A) and latent attention
(L)."""
KINDS = ("decoder", "encoder-decoder")
LENGTHS = {"equal": (19, 19, 19), "ragged": (19, 7, 12)}
CHUNKS = (None, 5)
PROMPT, NEW, VOCAB, SOURCE = 19, 64, 31, 13
TOLERANCE = 1e-5
INT8_TOLERANCE = 0.02
"""Relative to the largest logit; the error of a key or value is at most 1/254 of its row's maximum.
"""


@dataclass(frozen=True)
class Case:
    positions: str
    heads: str
    window: int | tuple[int | None, ...] | None
    kind: str
    sinks: int = 0
    dtype: str | None = None
    window_base: float | None = None
    mixers: str = ""

    def __str__(self) -> str:
        extent = "full" if self.window is None else f"window {self.window}"
        extent += f"+{self.sinks}" if self.sinks else ""
        extent += f" {self.dtype}" if self.dtype else ""
        extent += f" base {self.window_base:g}" if self.window_base else ""
        extent += f" {self.mixers}" if self.mixers else ""
        return f"{self.kind:15} {self.positions:10} {self.heads} {extent:20}"

    @property
    def capacity(self) -> int:
        """For a single window, a ring of exactly its length; otherwise room for all tokens."""
        return self.window + self.sinks if isinstance(self.window, int) else PROMPT + NEW

    @property
    def config(self) -> ModelConfig:
        configured: dict[str, Positions] = {
            "rope": Rope(window_base=self.window_base),
            "rope-pairs": Rope(pairing="interleaved", dims=4),
            "t5": T5Buckets(buckets=8, max_distance=16),
            "shaw": Shaw(max_distance=16),
        }
        more: dict[str, Any] = {}
        if self.mixers:  # a small epsilon would multiply the rounding errors of small outputs
            names = dict(S="gated_delta", C="short_conv", A="attention", L="latent_attention")
            more = dict(mixers=tuple(names[mixer] for mixer in self.mixers), norm_eps=0.01)
            if "S" in self.mixers:
                more["gated_delta"] = GatedDelta(
                    num_key_heads=2,
                    num_value_heads=6,
                    key_dim=5,
                    value_dim=7,
                    conv_width=3,
                    decay_rank=4 if "L" in self.mixers else None,  # as in Kimi Linear
                )
            if "C" in self.mixers:
                more["short_conv"] = ShortConv(conv_width=4)
            if "L" in self.mixers:
                more["latent_attention"] = LatentAttention(
                    query_rank=11, kv_rank=13, nope_dim=5, rope_dim=6, value_dim=7
                )
        return ModelConfig(
            kind=self.kind,  # type: ignore[arg-type]
            vocab_size=VOCAB,
            d_model=24,
            num_layers=max(2, len(self.mixers)),
            num_heads=4,
            num_kv_heads=None if self.mixers in ("L", "SL") else HEADS[self.heads],
            d_ff=37,
            max_len=PROMPT + NEW,
            positions=configured.get(self.positions, self.positions),  # type: ignore[arg-type]
            window=self.window,
            sink_tokens=self.sinks,
            init_std=0.25,
            **more,
        )


def cases() -> Iterator[Case]:
    for kind, positions, heads, window in itertools.product(KINDS, POSITIONS, HEADS, WINDOWS):
        yield Case(positions, heads, window, kind)
    for kind, positions, more in itertools.product(KINDS, POSITIONS, MEMORY):
        yield Case(positions, "GQA", kind=kind, **more)
    for kind in KINDS:
        yield Case("rope", "GQA", (5, None), kind, window_base=31.0)
    for mixed in MIXERS:
        yield Case(heads="GQA", kind="decoder", **mixed)


@dataclass(frozen=True)
class Result:
    case: Case
    prompt: str
    chunk: int | None
    error: float
    scale: float
    tokens_equal: int
    tokens: int

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance and self.tokens_equal == self.tokens

    def __str__(self) -> str:
        chunk = "whole" if self.chunk is None else str(self.chunk)
        return (
            f"{self.case} {self.prompt:7} {chunk:5}   {self.error:.2e} of {self.scale:4.1f}  "
            f"{self.tokens_equal}/{self.tokens}{'' if self.holds else '   FAILS'}"
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.case.dtype is None else INT8_TOLERANCE * self.scale


def measure(case: Case, prompts: tuple[str, ...] = tuple(LENGTHS), chunks=CHUNKS) -> list[Result]:
    """Compare cached and uncached decoding of one model."""
    config = case.config
    model = build(config)
    key = jax.random.key(sum(map(ord, str(case))))
    params = init_params(config, key)
    rng = np.random.default_rng(5)
    rows = len(LENGTHS["equal"])
    prompt = rng.integers(0, VOCAB, (rows, PROMPT), dtype=np.int32)
    source = jnp.asarray(rng.integers(0, VOCAB, (rows, SOURCE), dtype=np.int32))
    places = np.tile(np.arange(SOURCE, dtype=np.int32), (rows, 1))
    places[1, 8:] = -1  # a padded source
    memory: dict[str, Any] = dict(capacity=case.capacity, dtype=case.dtype)

    @jax.jit
    def empty():
        if case.kind == "decoder":
            return init_cache(config, rows, **memory)
        return model.apply(
            {"params": params}, source, positions=places, method="init_cache", **memory
        )

    @jax.jit
    def full(tokens, positions):
        more = {} if case.kind == "decoder" else {"source": source, "source_positions": places}
        return model.apply({"params": params}, tokens, positions=positions, **more)[0]

    @jax.jit
    def read(tokens, positions, state):
        return model.apply({"params": params}, tokens, positions=positions, cache=state)

    def cached(tokens, positions, chunk):
        """Return the logits of all tokens, reading the prompt in chunks and the rest one by one."""
        logits, state = [], empty()
        starts = [*range(0, PROMPT, chunk), *range(PROMPT, PROMPT + NEW)]
        for start, end in zip(starts, [*starts[1:], PROMPT + NEW], strict=True):
            short = chunk - (end - start) if start < PROMPT else 0  # the last chunk, padded
            part = np.pad(tokens[:, start:end], ((0, 0), (0, short)))
            at = np.pad(positions[:, start:end], ((0, 0), (0, short)), constant_values=-1)
            out, state = read(part, at, state)
            logits.append(np.asarray(out)[:, : end - start])
        return np.concatenate(logits, axis=1)

    results = []
    for name, chunk in itertools.product(prompts, chunks):
        lengths = np.array(LENGTHS[name], np.int32)
        tokens = np.asarray(
            generate(
                make_step(model),
                params,
                jnp.asarray(prompt),
                empty(),
                num_tokens=NEW,
                lengths=jnp.asarray(lengths),
                chunk=chunk,
            ).tokens
        )
        # The columns of the prompt, padded on the right, followed by the new tokens.
        columns = np.arange(PROMPT)[None]
        at = np.where(columns < lengths[:, None], columns, -1)
        positions = np.concatenate([at, lengths[:, None] + np.arange(NEW)[None]], axis=1)
        positions = positions.astype(np.int32)
        both = np.concatenate([prompt, tokens], axis=1)
        want = np.asarray(full(both, positions))
        got = cached(both, positions, chunk or PROMPT)
        real = positions >= 0
        assert np.isfinite(want[real]).all() and np.isfinite(got[real]).all()
        # The logits that choose token n are those of the token before it in its row.
        before = np.concatenate(
            [lengths[:, None] - 1, PROMPT + np.tile(np.arange(NEW - 1), (rows, 1))], 1
        )
        scale = float(np.abs(want[real]).max())
        choosing = np.take_along_axis(want, before[:, :, None], axis=1)
        if case.dtype is None:
            equal = choosing.argmax(-1) == tokens
        else:
            taken = np.take_along_axis(choosing, tokens[:, :, None], axis=2)[:, :, 0]
            equal = choosing.max(-1) - taken <= 2 * INT8_TOLERANCE * scale
        error = float(np.abs(got - want)[real].max())
        results.append(Result(case, name, chunk, error, scale, int(equal.sum()), tokens.size))
    return results


def sections(only: str) -> Iterator[tuple[str, Callable[[Any], list[Any]], list[Any]]]:
    """Yield title, function and cases of each part; the results have `holds` and `__str__`."""
    from tests.parity import search as parity_search
    from tests.parity import slots as parity_slots
    from tests.parity import speculative as parity_speculative

    def chosen(all_cases: Iterator[Case]) -> list[Case]:
        return [case for case in all_cases if only in str(case)]

    header = f"{'model':15} {'positions':10} head {'extent':20}"
    yield f"{header} prompts chunk   largest error   equal", measure, chosen(cases())
    yield "beams and forks", parity_search.measure_search, chosen(parity_search.search_cases())
    measure_speculative = parity_speculative.measure_speculative
    speculated = chosen(parity_speculative.speculative_cases())
    yield "speculative decoding: equal to plain greedy decoding", measure_speculative, speculated
    served = [c for c in cases() if c.kind == "decoder" and c.dtype is None and not c.sinks]
    served = [c for c in served if not isinstance(c.window, tuple)]
    yield "continuous batching: tokens of 23 requests", parity_slots.measure, chosen(iter(served))


def in_parallel(
    function: Callable[[Any], list[Any]], inputs: list[Any], jobs: int
) -> Iterator[list[Any]]:
    """Yield the results of the function for each case, in order."""
    run = functools.partial(_run_case, function)
    if jobs == 1:
        yield from map(run, inputs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, inputs)


def _run_case(function: Callable[[Any], list[Any]], case: Any) -> list[Any]:
    """Run a case, then drop its programs: those of all cases exceed the maps of a process."""
    try:
        return function(case)
    finally:
        jax.clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="also write the matrix to this file")
    parser.add_argument("--only", default="", help="run only cases whose line contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each uses about one core")
    arguments = parser.parse_args()
    text, failed = "", 0
    setting = (
        f"f32, {jax.default_backend()}, jax {jax.__version__}, Python {platform.python_version()}."
    )
    for title, function, inputs in sections(arguments.only):
        print(title)
        lines, results = [title], []
        for measured in in_parallel(function, inputs, arguments.jobs):
            for result in measured:
                print(result, flush=True)
                lines.append(str(result))
                results.append(result)
        holds = sum(result.holds for result in results)
        failed += len(results) - holds
        summary = f"{len(results)} combinations, {holds} hold; {_figures(results)}{setting}"
        print(summary)
        text += summary + "\n\n```\n" + "\n".join(lines) + "\n```\n\n"
    if arguments.write:
        command = "python -m tests.parity --write docs/reference/parity_matrix.md"
        intro = f"# Cached decoding equals the full pass\n\nPrinted by `{command}`.\n\n"
        arguments.write.write_text(intro + text.rstrip() + "\n")
    raise SystemExit(1 if failed else 0)


def _figures(results: list[Any]) -> str:
    plain = [r for r in results if isinstance(r, Result) and r.case.dtype is None]
    if not plain:
        return ""
    worst = max(plain, key=lambda r: r.error)
    low = [r.error / r.scale for r in results if r.case.dtype is not None]
    int8 = f", int8 {max(low):.1e} of the largest logit (at most {INT8_TOLERANCE})" if low else ""
    return (
        f"largest error {worst.error:.2e} ({' '.join(str(worst.case).split())}), "
        f"tolerance {TOLERANCE:.0e}{int8}; {NEW} greedy tokens a row; "
    )
