"""Log-probabilities of continuations, given their contexts.

Requests are sorted by length and scored in batches of equal length. If several continuations have
the same context, the model reads the context once and caches it. Each continuation starts from that
cache.
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
from transformer_jax.decoding.completion import max_text_tokens, shortened
from transformer_jax.decoding.step import make_step
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.programs import program
from transformer_jax.pytree import Params
from transformer_jax.text.reading import Reader
from transformer_jax.tokenizers.special import encode_text, frame, special_ids
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import ON_ACCELERATORS, chosen_chunk
from transformer_jax.training.losses import label_scores, token_losses


class Continuation(NamedTuple):
    """Probability of a continuation of n tokens, given its context.

    Attributes:
        log_prob: total log p of the n tokens, in nats.
        is_likeliest: whether every token is the likeliest one after the preceding tokens.
        num_tokens: n, the number of tokens.
    """

    log_prob: float
    is_likeliest: bool
    num_tokens: int


@dataclass(frozen=True)
class ScoringRequest:
    """Token IDs of a nonempty context and of the continuation to score."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of tokens that the model reads, which are all except the last one."""
        return len(self.context) + len(self.continuation) - 1


def split_pair(
    encode: Callable[[str], Sequence[int] | np.ndarray], context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the IDs of a context, and the IDs that its continuation adds.

    As in lm-eval, the context and the continuation are encoded as one string. The IDs are split at
    the number of IDs that the context has by itself. Trailing blanks of the context are moved to
    the continuation first, because most tokenizers attach a space to the following word.
    """
    whole, before = encode(context + continuation), encode(context.rstrip())
    return [*map(int, before)], [*map(int, whole[len(before) :])]


def read_pair(model: Reader, context: str, continuation: str) -> ScoringRequest:
    """Return the scoring request for a context and its continuation.

    The context starts with the tokens that the model puts before every text. If there are no such
    tokens, an empty context is replaced by the tokenizer's begin token.
    """
    tokenizer, begin = model.tokenizer, model.model.begin_id
    first = frame(tokenizer).first if begin is None else (begin,)
    before, after = split_pair(lambda text: encode_text(tokenizer, text), context, continuation)
    if not first and not before:
        if "bos" not in special_ids(tokenizer):
            rule = "must have a token, because this model puts no token before a text"
            raise DataError(f"context is {context!r:.60}: {rule}")
        first = (special_ids(tokenizer)["bos"],)
    if not after:
        rule = "must add at least one token to the context"
        raise DataError(f"continuation is {continuation!r:.60}: {rule}")
    model.known(np.array([*before, *after], np.int32), "the text")
    return ScoringRequest((*first, *before), tuple(after))


def check_continues(model: Reader, name: str) -> None:
    """Raise ConfigError unless the model continues text."""
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
    """Score continuations, truncating contexts that are too long at the beginning.

    Args:
        model: a model that continues text.
        requests: contexts and continuations, each with at least one token ID.
        batch_size: number of rows per batch, at least 1.
        longest: maximum number of tokens to read per request; None means max_len.
        report: function that is called after each batch with the number of requests in it.

    Raises:
        DataError: if a continuation is longer than the model can read.
    """
    limit = max_text_tokens(model.config)
    cut = [_cut(request, limit if longest is None else longest) for request in requests]
    by_context: dict[tuple[int, ...], list[int]] = {}
    for n, request in enumerate(cut):
        by_context.setdefault(request.context, []).append(n)
    built, together = model.module, list[list[int]]()
    if built.edits:  # an edit may expect a single row that starts at the first token
        batch_size = 1
    else:
        for ns in by_context.values() if model.config.supports("cache") else ():
            # Sharing a context is worthwhile if it is longer than its continuations and if all
            # logits of a batch of continuations fit in memory.
            width = max(len(cut[n].continuation) for n in ns)
            logits = batch_size * bucket(width) * model.config.vocab_size
            if len(ns) > 1 and len(cut[ns[0]].context) >= width and logits <= ON_ACCELERATORS:
                together.append(ns)
    shared = {n for ns in together for n in ns}
    # Start with the longest, so that a batch that does not fit in memory fails immediately.
    single = sorted({*range(len(cut))} - shared, key=lambda n: -len(cut[n]))
    found: dict[int, Continuation] = {}
    for start in range(0, len(single), batch_size):
        part = single[start : start + batch_size]
        # Round up to a power of two to limit the number of compiled programs.
        rows = min(batch_size, _power(len(single)))
        # Edits count tokens from the original beginning, which may have been truncated.
        first = len(requests[part[0]]) - len(cut[part[0]])
        module = built.with_facts(part=True, first=first) if first else built
        batch = [cut[n] for n in part]
        size = max(map(len, batch))
        length = size if built.edits else min(limit, bucket(size))  # edits must not see padding
        width = min(length, bucket(max(len(request.continuation) for request in batch)))
        tokens = np.zeros((rows, length), np.int32)
        at, labels = np.zeros((2, rows, width), np.int32)
        for row, request in enumerate(batch):
            size, count = len(request), len(request.continuation)
            tokens[row, :size] = (*request.context, *request.continuation[:-1])
            at[row, :count] = np.arange(size - count, size)
            labels[row, :count] = request.continuation
        arrays = map(jnp.asarray, (tokens, at, labels))
        scores = _summed(batch, *_rows_program(module, model.params, *arrays))
        found |= dict(zip(part, scores, strict=True))
        report(len(part))
    # Group rows with the same context into parts of at most `batch_size` rows.
    parts: list[list[int]] = []
    pieces = [ns[i : i + batch_size] for ns in together for i in range(0, len(ns), batch_size)]
    for ns in sorted(pieces, key=lambda ns: -len(cut[ns[0]].context)):
        if not parts or len(parts[-1]) + len(ns) > batch_size:
            parts.append([])
        parts[-1] += ns
    rows = _power(max(map(len, parts), default=1))
    contexts = _power(max((len({cut[n].context for n in part}) for part in parts), default=1))
    for part in parts:
        scores = _score_shared(model, [cut[n] for n in part], contexts, rows)
        found |= dict(zip(part, scores, strict=True))
        report(len(part))
    return [found[n] for n in range(len(cut))]


def _cut(request: ScoringRequest, longest: int) -> ScoringRequest:
    """Remove the first tokens of a context that is too long."""
    if len(request.continuation) > longest:
        size = len(request.continuation)
        raise DataError(f"the continuation has {size} tokens: must be at most max_len, {longest}")
    excess = len(request) - longest
    return ScoringRequest(request.context[excess:], request.continuation) if excess > 0 else request


def _score_shared(
    model: Reader, part: Sequence[ScoringRequest], count: int, rows: int
) -> list[Continuation]:
    """Score requests with at most `count` distinct contexts, reading each context once."""
    contexts = [*dict.fromkeys(request.context for request in part)]
    longest = max_text_tokens(model.config)
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
    # A cache of length max_len for each context would be mostly empty.
    config = shortened(model.config, length + width)
    arrays = map(jnp.asarray, (prompts, lengths, of, labels, counts))
    log_probs, likeliest = _shared_program(config, model.params, *arrays)
    return _summed(part, log_probs, likeliest)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _summed(
    part: Sequence[ScoringRequest], log_probs: jax.Array, likeliest: jax.Array
) -> list[Continuation]:
    """Sum the log-probabilities f32[R, C] of each row over the tokens of its request."""
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
    """Return log p of each label after token `at`, and whether the label is the likeliest token."""
    config = model.config
    # An edit may change the logits. Without edits, they are computed in chunks.
    if model.edits or not config.supports("output_layer"):
        logits = model.apply({"params": params}, tokens)[0]
        logits = jnp.take_along_axis(logits, at[..., None], axis=1)
        return _log_probs(logits, labels, getattr(config, "invariant", False))
    x, table, bias = model.apply({"params": params}, tokens, method="output_layer")
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
    """Return log p of each label in row r after prompt `of[r]`, and whether it is the likeliest."""
    step: Any = make_step(build(config))
    size, length = prompts.shape
    state = init_decode_state(config, None, size, as_transformer(config).max_len)
    valid = jnp.arange(length)[None] < lengths[:, None]
    first, state = step.read(params, prompts, state, (lengths - 1)[:, None], valid=valid)
    state, first = gather_rows(state, of), first[of]
    valid = jnp.arange(1, labels.shape[1])[None] < counts[:, None]
    # The model does not read the last label, because no token follows it.
    rest, _ = step(params, labels[:, :-1], state, valid=valid)
    logits = jnp.concatenate([first, rest], axis=1)
    return _log_probs(logits, labels, getattr(config, "invariant", False))


def _log_probs(
    logits: jax.Array,  # [B, C, V]
    labels: jax.Array,  # i32[B, C]
    invariant: bool,
) -> tuple[jax.Array, jax.Array]:  # f32[B, C], bool[B, C]
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    best = jnp.argmax(logits, axis=-1) == labels
    if invariant:
        return -token_losses(logits, labels, invariant=True), best
    return picked - jax.nn.logsumexp(logits, axis=-1), best
