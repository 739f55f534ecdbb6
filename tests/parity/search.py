"""Comparison of beams and forks with the full forward pass, for every position and model kind.

`python -m tests.parity` prints the results after the matrix. The texts of a beam search are read
again without a cache, and their log-probabilities must equal those of the search. A prompt is read
once and forked into samples; each token must be the draw from the logits of the full pass with the
row's key. A windowed cache is a ring of the window's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity import matrix
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate, prefill
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

BEAMS, SAMPLES, NEW = 4, 3, 23
TOLERANCE = 1e-5
"""Maximum error of a log-probability per token."""
SAMPLER = Sample(Temperature(1.3))


def search_cases() -> Iterator[matrix.Case]:
    """Yield every position kind with both model kinds, and patterns of layers with a state."""
    for k, kind in enumerate(matrix.KINDS):
        for i, positions in enumerate(matrix.POSITIONS):
            case = matrix.Case(
                positions,
                list(matrix.HEADS)[(i + k) % 3],
                matrix.WINDOWS[(i + i // 2 + k) % 2],
                kind,
            )
            yield replace(case, **matrix.MEMORY[0]) if i % 4 == 1 else case
    for mixed in matrix.MIXERS:
        if "dtype" not in mixed:
            yield matrix.Case(heads="GQA", kind="decoder", **mixed)


@dataclass(frozen=True)
class SearchResult:
    case: matrix.Case
    texts: int
    error: float
    """Largest error of the log-probability of a text, per token."""
    equal: int
    tokens: int

    @property
    def holds(self) -> bool:
        return self.error <= TOLERANCE and 0 < self.equal == self.tokens

    def __str__(self) -> str:
        return (
            f"{self.case} {self.texts} beams {self.error:.2e} a token, forks "
            f"{self.equal}/{self.tokens} equal{'' if self.holds else '   FAILS'}"
        )


def measure_search(case: matrix.Case) -> list[SearchResult]:
    """Compare beams and forks of one model with its full pass."""
    config = case.config
    model = build(config)
    params = init_params(config, jax.random.key(sum(map(ord, str(case)))))
    rng = np.random.default_rng(7)
    lengths = np.array(matrix.LENGTHS["ragged"], np.int32)
    rows = len(lengths)
    prompt = rng.integers(0, matrix.VOCAB, (rows, matrix.PROMPT), dtype=np.int32)
    source = rng.integers(0, matrix.VOCAB, (rows, matrix.SOURCE), dtype=np.int32)
    places = np.tile(np.arange(matrix.SOURCE, dtype=np.int32), (rows, 1))
    places[1, 8:] = -1  # a padded source
    crossed = case.kind == "encoder-decoder"

    @jax.jit
    def empty():
        if not crossed:
            return init_cache(config, rows, case.capacity)
        return model.apply(
            {"params": params}, source, capacity=case.capacity, positions=places,
            method="init_cache",
        )  # fmt: skip

    @partial(jax.jit, static_argnames="copies")
    def logits_of(new, copies):
        """Return f32[B copies, NEW, V], the full-pass logits that choose each new token."""
        each = partial(np.repeat, repeats=copies, axis=0)
        read, n = each(lengths), jnp.arange(matrix.PROMPT + NEW)
        joined = jnp.concatenate([each(prompt), new], axis=1)
        at = jnp.where(n[None] < read[:, None], n[None], n[None] - read[:, None] + matrix.PROMPT)
        text = jnp.take_along_axis(joined, jnp.clip(at, 0, matrix.PROMPT + NEW - 1), axis=1)
        positions = jnp.where(n[None] < (read + NEW)[:, None], n[None], -1).astype(jnp.int32)
        more = dict(source=each(source), source_positions=each(places)) if crossed else {}
        logits, _ = model.apply({"params": params}, text, positions=positions, **more)
        before = read[:, None] - 1 + jnp.arange(NEW)[None]
        return jnp.take_along_axis(logits, before[:, :, None], axis=1)

    step = make_step(model)
    found = beam_search(
        step, params, prompt, empty(), lengths=lengths, num_tokens=NEW, num_beams=BEAMS,
        num_results=BEAMS, stop=(3, 5), length_penalty=LengthPenalty(0.7),
    )  # fmt: skip
    tokens = np.asarray(found.tokens).reshape(rows * BEAMS, NEW)
    log_probs = jax.nn.log_softmax(logits_of(np.maximum(tokens, 0), copies=BEAMS), axis=-1)
    each = np.take_along_axis(np.asarray(log_probs), np.maximum(tokens, 0)[..., None], axis=2)[
        ..., 0
    ]
    want = np.where(tokens >= 0, each, 0).sum(axis=1)
    count = np.asarray(found.lengths).reshape(-1)
    assert (count > 0).all() and np.isfinite(want).all()
    error = np.abs(np.asarray(found.log_probs).reshape(-1) - want) / count

    _, prefix = jax.jit(partial(prefill, step))(params, prompt, empty(), lengths - 1)
    last = np.repeat(prompt[np.arange(rows), lengths - 1], SAMPLES)[:, None]
    keys = jax.random.split(jax.random.key(11), rows * SAMPLES)
    samples = generate(
        step, params, last, fork(prefix, SAMPLES), num_tokens=NEW, sampler=SAMPLER, key=keys
    ).tokens
    logits = logits_of(samples, copies=SAMPLES)
    folded = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    drawn = jax.vmap(jax.vmap(SAMPLER))(folded(keys, jnp.arange(NEW)), logits)
    equal = int((np.asarray(drawn) == np.asarray(samples)).sum())
    return [SearchResult(case, rows * BEAMS, float(error.max()), equal, samples.size)]
