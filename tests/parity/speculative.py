"""Comparison of speculative with plain decoding, for every position kind and model kind.

    python -m tests.parity

Each case uses ragged prompts and three proposers: a draft with other parameters, the model as its
own draft, and prompt lookup. A windowed cache is a ring of window + num_draft slots, which wraps
several times. All greedy tokens must equal those of `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity import matrix
from tests.parity.matrix import LENGTHS, NEW, PROMPT, VOCAB, Case
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.proposers import Draft, PromptLookup
from transformer_jax.decoding.speculative import speculate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

DRAFTED = 4


def speculative_cases() -> Iterator[Case]:
    """Yield every position kind with both model kinds, alternating head layouts and windows."""
    for k, kind in enumerate(matrix.KINDS):
        for i, positions in enumerate(matrix.POSITIONS):
            window = matrix.WINDOWS[(i + i // 2 + k) % 2]
            yield Case(positions, list(matrix.HEADS)[(i + k) % 3], window, kind)


@dataclass(frozen=True)
class SpeculationResult:
    case: Case
    proposer: str
    equal: int
    tokens: int
    accepted: int
    proposed: int
    calls: int

    @property
    def holds(self) -> bool:
        return self.equal == self.tokens

    def __str__(self) -> str:
        return (
            f"{self.case} {self.proposer:7} {self.equal}/{self.tokens} equal, "
            f"{self.accepted}/{self.proposed} accepted, {self.calls} calls for {NEW - 1} tokens"
            f"{'' if self.holds else '   FAILS'}"
        )


def measure_speculative(case: Case) -> list[SpeculationResult]:
    """Compare greedy tokens with those of `generate`, for each proposer."""
    config = case.config
    model = build(config)
    params, other = (init_params(config, jax.random.key(seed)) for seed in (1, 2))
    rng = np.random.default_rng(5)
    lengths = np.array(LENGTHS["ragged"], np.int32)
    prompt = rng.integers(0, VOCAB, (len(lengths), PROMPT), dtype=np.int32)
    size = len(lengths), matrix.SOURCE
    source = jnp.asarray(rng.integers(0, VOCAB, size, dtype=np.int32))
    places = np.tile(np.arange(matrix.SOURCE, dtype=np.int32), (len(lengths), 1))
    places[1, 8:] = -1  # a padded source
    capacity = PROMPT + NEW if case.window is None else case.window + DRAFTED

    @jax.jit
    def empty(params):
        if case.kind == "decoder":
            return init_cache(config, len(lengths), capacity)
        return model.apply(
            {"params": params}, source, capacity=capacity, positions=places, method="init_cache"
        )

    step = make_step(model)
    arguments = dict(num_tokens=NEW, lengths=lengths)
    state = empty(params)
    want = np.asarray(generate(step, params, prompt, fork(state, 1), **arguments).tokens)
    results = []
    for name, proposer in (
        ("other", Draft(step, other, empty(other))),
        ("itself", Draft(step, params, empty(params))),
        ("lookup", PromptLookup(2)),
    ):
        got = speculate(
            step, params, prompt, fork(state, 1), proposer=proposer, num_draft=DRAFTED, **arguments
        )
        same = int((np.asarray(got.tokens) == want).sum())
        counts = (int(x.sum()) for x in (got.accepted, got.proposed, got.calls))
        results.append(SpeculationResult(case, name, same, want.size, *counts))
    return results
