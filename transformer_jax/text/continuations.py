"""Say how likely a model finds continuations of contexts, of many at once.

Requests are read in order of their length, in batches of rows of one length. Continuations of one
context share it: it is read once, into a cache, and each of them goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.batch_rows import gather_rows
from transformer_jax.decoding.completion import longest_text, shortened
from transformer_jax.decoding.step import make_step
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.text.reading import Reader
from transformer_jax.tokenizers.special import encode_text, frame, special_ids
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import ON_ACCELERATORS, chosen_chunk
from transformer_jax.training.losses import label_scores


class Continuation(NamedTuple):
    """Hold how likely a continuation of n tokens is after its context.

    Attributes:
        log_prob: log p of the n tokens together, in nats, at most 0.
        is_likeliest: whether each of them is the likeliest after all before it.
        num_tokens: n.
    """

    log_prob: float
    is_likeliest: bool
    num_tokens: int


@dataclass(frozen=True)
class ScoringRequest:
    """Hold the ids that are read, at least one, and those that are scored after them."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __len__(self) -> int:
        """Return how many tokens the model reads: all but the last one."""
        return len(self.context) + len(self.continuation) - 1


def split_pair(
    encode: Callable[[str], Sequence[int] | np.ndarray], context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the ids of a context and those that its continuation adds to them.

    Both are encoded as one text, of which the first ids, as many as the context has alone, are the
    context's. Blanks at the end of the context go to the continuation first, since most tokenizers
    put a space into the token of the word after it. So does lm-eval.
    """
    kept = context.rstrip()
    whole, before = encode(context + continuation), encode(kept)
    return [*map(int, before)], [*map(int, whole[len(before) :])]


def read_pair(model: Reader, context: str, continuation: str) -> ScoringRequest:
    """Return a context and its continuation as the model reads them.

    Before the context stands what the model reads before every text; before an empty one, where
    that is nothing, the token that begins a text of its tokenizer.
    """
    own, begin = model.tokenizer, model.model.begin_id
    first = frame(own).first if begin is None else (begin,)
    before, after = split_pair(lambda text: encode_text(own, text), context, continuation)
    if not first and not before:
        if "bos" not in special_ids(own):
            rule = "must have a token, since nothing stands before a text of this model"
            raise DataError(f"context is {context!r:.60}: {rule}")
        first = (special_ids(own)["bos"],)
    if not after:
        rule = "must have a token of its own after the context"
        raise DataError(f"continuation is {continuation!r:.60}: {rule}")
    model.known(np.array([*before, *after], np.int32), "the text")
    return ScoringRequest((*first, *before), tuple(after))


def check_continues(model: Reader, name: str) -> None:
    """Raise ConfigError unless the model goes on with a text."""
    if model.kind != "text":
        raise ConfigError(f"{name}: {model.instead()}")


def score_requests(
    model: Reader,
    requests: Sequence[ScoringRequest],
    batch_size: int,
    *,
    longest: int | None = None,
    report: Callable[[int], object] = lambda count: None,
) -> list[Continuation]:
    """Return how likely each continuation is; of a text that is too long, the last tokens are read.

    Args:
        model: one that goes on with a text.
        requests: of which each has at least one id of a context and one of a continuation.
        batch_size: rows that are read side by side, at least 1.
        longest: the most tokens that are read; None is max_len.
        report: is called after each batch with the number of its requests.

    Raises:
        DataError: if a continuation alone is longer than the model reads.
    """
    most = longest_text(model.config) if longest is None else longest
    given = [_cut(request, most) for request in requests]
    by_context: dict[tuple[int, ...], list[int]] = {}
    for n, request in enumerate(given):
        by_context.setdefault(request.context, []).append(n)
    built, together = model.module, list[list[int]]()
    if built.edits:  # it may be of one row, and of tokens that are counted from the beginning
        batch_size = 1
    else:
        for ns in by_context.values() if model.config.supports("cache") else ():
            # A context is read once if it is longer than what follows it, and if all logits of the
            # continuations of a batch, which exist at once then, are not too many.
            width = max(len(given[n].continuation) for n in ns)
            logits = batch_size * bucket(width) * model.config.vocab_size
            if len(ns) > 1 and len(given[ns[0]].context) >= width and logits <= ON_ACCELERATORS:
                together.append(ns)
    shared = {n for ns in together for n in ns}
    # The longest first: if a batch does not fit into memory, it is the first one.
    alone = sorted({*range(len(given))} - shared, key=lambda n: -len(given[n]))
    found: dict[int, Continuation] = {}
    for start in range(0, len(alone), batch_size):
        part = alone[start : start + batch_size]
        # Powers of two, so that a few programs serve all numbers of requests.
        rows = min(batch_size, _power(len(alone)))
        # An edit that names a token counts from the beginning, which may have been cut off.
        first = len(requests[part[0]]) - len(given[part[0]])
        told = built.told(part=True, first=first) if first else built
        scores = _score_rows(model, [given[n] for n in part], rows, told)
        found |= dict(zip(part, scores, strict=True))
        report(len(part))
    # Rows of one context are next to each other, at most `batch_size` in a part.
    parts: list[list[int]] = []
    pieces = [ns[i : i + batch_size] for ns in together for i in range(0, len(ns), batch_size)]
    for ns in sorted(pieces, key=lambda ns: -len(given[ns[0]].context)):
        if not parts or len(parts[-1]) + len(ns) > batch_size:
            parts.append([])
        parts[-1] += ns
    rows = _power(max(map(len, parts), default=1))
    contexts = _power(max((len({given[n].context for n in part}) for part in parts), default=1))
    for part in parts:
        scores = _score_shared(model, [given[n] for n in part], contexts, rows)
        found |= dict(zip(part, scores, strict=True))
        report(len(part))
    return [found[n] for n in range(len(given))]


def _cut(request: ScoringRequest, longest: int) -> ScoringRequest:
    """Return a request whose context has lost its first tokens, so that the model can read it."""
    if len(request.continuation) > longest:
        have = f"the continuation has {len(request.continuation)} tokens"
        raise DataError(f"{have}: must be at most max_len {longest}")
    excess = len(request) - longest
    return ScoringRequest(request.context[excess:], request.continuation) if excess > 0 else request


def _score_rows(
    model: Reader, part: Sequence[ScoringRequest], rows: int, built: CheckedModule
) -> list[Continuation]:
    """Score requests, each of which is a row of its own."""
    longest, size = longest_text(model.config), max(map(len, part))
    length = size if built.edits else min(longest, bucket(size))  # an edit sees no padding
    width = min(length, bucket(max(len(request.continuation) for request in part)))
    tokens = np.zeros((rows, length), np.int32)
    at, labels = np.zeros((2, rows, width), np.int32)
    for n, (request, size) in enumerate(zip(part, map(len, part), strict=True)):
        count = len(request.continuation)
        tokens[n, :size] = (*request.context, *request.continuation[:-1])
        at[n, :count] = np.arange(size - count, size)
        labels[n, :count] = request.continuation
    log_probs, likeliest = _rows_program(
        built, model.params, jnp.asarray(tokens), jnp.asarray(at), jnp.asarray(labels)
    )
    return _summed(part, log_probs, likeliest)


def _score_shared(
    model: Reader, part: Sequence[ScoringRequest], count: int, rows: int
) -> list[Continuation]:
    """Score requests of at most `count` contexts, each of which is read once."""
    contexts = [*dict.fromkeys(request.context for request in part)]
    longest = longest_text(model.config)
    width = bucket(max(len(request.continuation) for request in part))
    length = min(longest, bucket(max(map(len, contexts))))
    prompts, lengths = np.zeros((count, length), np.int32), np.ones(count, np.int32)
    for n, context in enumerate(contexts):
        prompts[n, : len(context)], lengths[n] = context, len(context)
    numbers = {context: n for n, context in enumerate(contexts)}
    of = np.zeros(rows, np.int32)
    labels, counts = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for n, request in enumerate(part):
        of[n], counts[n] = numbers[request.context], len(request.continuation)
        labels[n, : counts[n]] = request.continuation
    # A cache of max_len for each context would be mostly empty.
    config = shortened(model.config, length + width)
    given = map(jnp.asarray, (prompts, lengths, of, labels, counts))
    log_probs, likeliest = _shared_program(config, model.params, *given)
    return _summed(part, log_probs, likeliest)


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _summed(
    part: Sequence[ScoringRequest], log_probs: jax.Array, likeliest: jax.Array
) -> list[Continuation]:
    """Return the sum of each row's log-probabilities f32[R, C], as far as its request goes."""
    values, best = np.asarray(log_probs, np.float64), np.asarray(likeliest)
    sizes = [len(request.continuation) for request in part]
    return [
        Continuation(float(values[n, :size].sum()), bool(best[n, :size].all()), size)
        for n, size in enumerate(sizes)
    ]


@program(static=("model",))
def _rows_program(
    model: CheckedModule,
    params: Params,
    tokens: jax.Array,  # i32[B, T]
    at: jax.Array,  # i32[B, C]
    labels: jax.Array,  # i32[B, C]
) -> tuple[jax.Array, jax.Array]:  # f32[B, C], bool[B, C]
    """Return log p of each label after token `at`, and whether it is the likeliest one."""
    config = model.config
    given = {"params": params}
    # An edit may be of the logits; otherwise they are made in chunks, and never all at once.
    if model.edits or not config.supports("output_layer"):
        logits = model.apply(given, tokens)[0]
        return _judged(jnp.take_along_axis(logits, at[..., None], axis=1), labels)
    x, table, bias = model.apply(given, tokens, method="output_layer")
    size = chosen_chunk(len(labels), labels.shape[1], config.vocab_size)
    return label_scores(
        jnp.take_along_axis(x, at[..., None], axis=1), table, labels, chunk_size=size,
        softcap=config.logit_softcap, logit_bias=bias,
    )  # fmt: skip


@program(static=("config",))
def _shared_program(
    config: AnyModelConfig,
    params: Params,
    prompts: jax.Array,  # i32[B, P]
    lengths: jax.Array,  # i32[B]
    of: jax.Array,  # i32[R]
    labels: jax.Array,  # i32[R, C]
    counts: jax.Array,  # i32[R]
) -> tuple[jax.Array, jax.Array]:  # f32[R, C], bool[R, C]
    """Return log p of the labels of row r after prompt `of[r]`, and whether each is likeliest."""
    step: Any = make_step(build(config))
    size, length = prompts.shape
    state = init_decode_state(config, None, size, as_transformer(config).max_len)
    valid = jnp.arange(length)[None] < lengths[:, None]
    first, state = step.read(params, prompts, state, (lengths - 1)[:, None], valid=valid)
    state, first = gather_rows(state, of), first[of]
    valid = jnp.arange(1, labels.shape[1])[None] < counts[:, None]
    # The last label is not read: nothing is asked of the model after it.
    rest, _ = step(params, labels[:, :-1], state, valid=valid)
    return _judged(jnp.concatenate([first, rest], axis=1), labels)


def _judged(
    logits: jax.Array,  # [B, C, V]
    labels: jax.Array,  # i32[B, C]
) -> tuple[jax.Array, jax.Array]:  # f32[B, C], bool[B, C]
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    best = jnp.argmax(logits, axis=-1) == labels
    return picked - jax.nn.logsumexp(logits, axis=-1), best
