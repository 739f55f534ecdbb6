"""Comparison of continuous batching with the full forward pass.

    python -m tests.parity

For every decoder of the matrix, 23 requests with ragged prompts and lengths arrive at random and
share three slots, greedily and sampled. The full pass reads the prompt and tokens of one request
alone, without a cache. The logits before each token must choose it, greedily or with the request's
key folded with the token's number. A windowed case decodes from a ring of the window's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.matrix import PROMPT, VOCAB, Case
from transformer_jax.decoding.continuous_batching import Request, serve_requests
from transformer_jax.decoding.samplers import Greedy, Sample, Sampler, Temperature
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

COUNT, SLOTS, NEW = 23, 3, 29
SAMPLERS: dict[str, Sampler] = {"greedy": Greedy(), "sampled": Sample(Temperature(1.3))}


@dataclass(frozen=True)
class Result:
    case: Case
    sampler: str
    tokens_equal: int
    tokens: int
    distinct: int
    """Number of different tokens: a model that repeats one token would prove nothing."""

    @property
    def holds(self) -> bool:
        return 0 < self.tokens == self.tokens_equal and self.distinct > 5

    def __str__(self) -> str:
        line = f"{self.case} {self.sampler:7}  {self.tokens_equal}/{self.tokens}"
        return line if self.holds else f"{line}   FAILS"


def schedule(seed: int = 5) -> list[Request]:
    """Return requests, each with its own key and with its index as id."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, VOCAB, rng.integers(1, PROMPT + 1), dtype=np.int32),
            int(rng.integers(1, NEW + 1)),
            key=jax.random.key(1000 + number),
            id=number,
        )
        for number in range(COUNT)
    ]


def arriving(requests: Sequence[Request], seed: int = 3) -> Iterator[Request | None]:
    """Yield the requests with random pauses (None) between them."""
    rng = np.random.default_rng(seed)
    for request in requests:
        yield from [None] * int(rng.integers(0, 3))
        yield request


def measure(case: Case, samplers: Sequence[str] = tuple(SAMPLERS)) -> list[Result]:
    """Compare served and uncached tokens of one decoder."""
    config = replace(case.config, tie_embeddings=False)  # a tied model repeats its input
    model = build(config)
    params = init_params(config, jax.random.key(sum(map(ord, str(case)))))
    requests, total = schedule(), PROMPT + NEW
    empty = init_cache(config, 1, case.window or total)

    @partial(jax.jit, static_argnames="sampler")
    def chosen(text, starts, keys, sampler):
        """Return the tokens [requests, NEW] that the full pass chooses in each text."""
        logits, _ = model.apply({"params": params}, text)
        n = jnp.arange(NEW)
        before = jnp.clip(starts[:, None] - 1 + n[None], 0, total - 1)
        logits = jnp.take_along_axis(logits, before[:, :, None], axis=1)
        fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
        return jax.vmap(jax.vmap(sampler))(fold(keys, n), logits)

    results = []
    for name in samplers:
        sampler = SAMPLERS[name]
        answers = serve_requests(
            make_step(model), params, arriving(requests), empty, slots=SLOTS, capacity=total,
            sampler=sampler,
        )  # fmt: skip
        got = {answer.id: answer.tokens for answer in answers}
        assert sorted(got) == list(range(COUNT))
        assert all(len(got[r.id]) == r.num_tokens for r in requests)
        text = np.zeros((COUNT, total), np.int32)
        for r in requests:
            both = np.concatenate([r.prompt, got[r.id]])
            text[r.id, : len(both)] = both
        starts = np.array([len(r.prompt) for r in requests], np.int32)
        keys = jnp.stack([r.key for r in requests])
        want = np.asarray(chosen(text, starts, keys, sampler))
        equal = sum(int((want[i, : len(t)] == t).sum()) for i, t in got.items())
        tokens = np.concatenate(list(got.values()))
        results.append(Result(case, name, equal, len(tokens), len(set(tokens.tolist()))))
    return results
