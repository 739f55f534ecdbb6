"""Let a trained model answer: write the target of a source, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transformer_jax.attention.masks import Causal, Prefix
from transformer_jax.cache.model_cache import ModelCache
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import Force, ForceLast, HistoryProcessor, never
from transformer_jax.decoding.step import ModelStep, make_step
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.programs import program
from transformer_jax.pytree import Array, PyTree
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import (
    encode_text,
    end_ids,
    plain,
    source_frame,
    target_of,
)
from transformer_jax.tokenizers.trained import Tokenizer, WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Params
from transformer_jax.training.rows import stack_rows
from transformer_jax.training.tasks.task import Report, Tokenizers, check_known, known_sources
from transformer_jax.training.tasks.turns import source_ids

BATCH = 32
"""Sources that are read at a time."""


@dataclass(frozen=True)
class PrefixStep(ModelStep):
    """Run a decoder whose prompts were learnt as prefixes: their tokens see each other.

    Every call with more than one token a row is a prompt, read whole.
    """

    def arguments(
        self,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        valid: jax.Array | None,  # bool[B, T]
    ) -> dict[str, object]:
        """Return what the model is called with: of a prompt, with the mask of a prefix."""
        given = super().arguments(tokens, state, valid)
        if tokens.shape[1] > 1:
            positions = given["positions"]
            assert isinstance(positions, jax.Array)
            given["mask"] = Causal() | Prefix(positions.max(axis=1) + 1)
        return given


def answer_sources(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    sources: Sequence[str],
    *,
    beams: int | None = None,
    num_tokens: int | None = None,
    model: AnyModel | None = None,
    report: Report | None = None,
) -> list[str]:
    """Write the target of each source: with `beams`, those of the task where it is None.

    One beam takes the likeliest token at each step. Scores of beams are mean log-probabilities of
    their tokens. The `model` is that of the config, which may be edited. `report` is told after
    every batch. DataError for a source that does not fit the model.
    """
    task = config.task
    if beams is None:
        beams = task.beams if isinstance(task, Seq2SeqTask | PrefixTask) else 1
    encoded = [_encoded(config, tokenizers, text) for text in sources]
    return write_targets(
        config, tokenizers, params, encoded, beams=beams, num_tokens=num_tokens, model=model,
        report=report,
    )  # fmt: skip


def write_targets(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    sources: Sequence[np.ndarray],  # i32[S], f32[S, D_in] or f32[H, W, C] each
    *,
    beams: int = 1,
    num_tokens: int | None = None,
    model: AnyModel | None = None,
    report: Report | None = None,
) -> list[str]:
    """Write the target of each source that is given as the model reads it, as `answer_sources`.

    Sources of about one length are read together; an answer depends on no other source.
    """
    found = [""] * len(sources)
    begins = config.model.kind == "encoder-decoder"
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    model = build(config.model) if model is None else model
    tell = report or (lambda done, total: None)
    tell(0, len(sources))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        rows = [sources[i] for i in chosen]
        rows += [rows[-1]] * (BATCH - len(rows) if len(sources) > BATCH else 0)  # one program
        written = _write(config, tokenizers, params, rows, beams, num_tokens, model)
        for i, ids in zip(chosen, written, strict=False):
            found[i] = _text(tokenizers.tokenizer, ids, begins)
        tell(start + len(chosen), len(sources))
    return found


def _encoded(config: TrainConfig, tokenizers: Tokenizers, text: str) -> np.ndarray:  # i32[S]
    """Return the ids of a source as it was learnt; of a decoder, with the separator after them."""
    ids = encode_text(tokenizers.of_source, text)
    if not len(ids):
        raise DataError(f"prompt is {text!r}: a source must have at least one token")
    if config.model.kind == "encoder-decoder":
        ids = source_frame(tokenizers.of_source).around(ids)
    else:
        ids = source_ids(tokenizers.tokenizer, text)
    check_known(known_sources(config), tokenizers.of_source, f"prompt is {text!r:.40}", ids)
    if len(ids) > config.sequence_len and config.model.max_len is not None:
        raise DataError(
            f"prompt is {text!r:.40}: {len(ids)} tokens, the model was trained on at most "
            f"{config.sequence_len}"
        )
    return ids.astype(np.int32)


def _start(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    rows: Sequence[np.ndarray],
    num_tokens: int | None,
    built: AnyModel,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `generate` and `beam_search` go on from: arguments in order, and by name."""
    model, tokenizer = config.model, tokenizers.tokenizer
    tokens, valid = stack_rows(rows)
    lengths = np.array([len(row) for row in rows], np.int32)
    count = config.sequence_len if num_tokens is None else num_tokens
    prompts: dict[str, Any] = {}
    processors: tuple[HistoryProcessor, ...] = ()
    stop: tuple[int, ...] = ()
    if any(name.startswith("encoder/") for name, _ in built.edits):
        # they see no padding that all rows have, and no other sources
        tokens = tokens[:, : lengths.max()]
        valid = None if valid is None else valid[:, : lengths.max()]
    step: Any = make_step(built).told(apart=True)  # rows are filled
    if model.kind == "encoder-decoder":
        target = target_of(tokenizer)
        stop, processors = target.stop, never(target.banned)
        prompt = np.full((len(rows), 1), target.start, np.int32)
        if target.forced_bos is not None:
            processors = (*processors, Force(target.forced_bos))
        if target.forced_eos is not None:
            processors = (*processors, ForceLast(count, target.forced_eos))
        padded = len(set(lengths.tolist())) > 1
        told = built.told(apart=len(rows) > 1, padded=padded)
        state = _init(told, params, len(rows), count, tokens, valid)
    else:
        stop, capacity = end_ids(tokenizer), config.sequence_len
        if model.supports("cache"):
            prompts["limits"] = np.minimum(config.sequence_len + 1 - lengths, count)
            # sizes that follow from the bucket alone: one program for all sources in it
            count = min(count, config.sequence_len)
            capacity = min(capacity, bucket(tokens.shape[1]) + count)
        if isinstance(config.task, PrefixTask) and config.task.bidirectional:
            step = PrefixStep(step.model) if isinstance(step, ModelStep) else step
        prompt, prompts["lengths"] = tokens, lengths
        state = init_decode_state(model, params, len(rows), capacity)
    named = dict(num_tokens=count, stop=stop, processors=processors, **prompts)
    return (step, params, prompt, state), named


def _write(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    rows: Sequence[np.ndarray],
    beams: int,
    num_tokens: int | None,
    built: AnyModel,
) -> list[np.ndarray]:
    """Return the ids that are written after each row, up to their end."""
    start, named = _start(config, tokenizers, params, rows, num_tokens, built)
    if beams == 1:
        written = generate(*start, **named).rows()
    else:
        best = beam_search(*start, num_beams=beams, length_penalty=LengthPenalty(1.0), **named)
        sizes = np.asarray(best.lengths)[:, 0]
        written = [row[:n] for row, n in zip(np.asarray(best.tokens)[:, 0], sizes, strict=True)]
    return [_without_ends(row, named["stop"]) for row in written]


def _without_ends(row: np.ndarray, stop: Sequence[int]) -> np.ndarray:
    return row[~np.isin(row, stop) & (row >= 0)]


def search_targets(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    source: str,
    *,
    beams: int,
    results: int = 1,
    num_tokens: int | None = None,
    length_penalty: float = 1.0,
    model: AnyModel | None = None,
) -> list[tuple[float, str]]:
    """Return the best targets of a source that a beam search finds, and their scores.

    A score is log p / n^length_penalty, of the n tokens of a target with its end.
    """
    row = _encoded(config, tokenizers, source)
    model = build(config.model) if model is None else model
    start, named = _start(config, tokenizers, params, [row], num_tokens, model)
    found = beam_search(
        *start, num_beams=beams, num_results=results,
        length_penalty=LengthPenalty(length_penalty), **named,
    )  # fmt: skip
    rows = zip(
        *(np.asarray(x)[0] for x in (found.scores, found.tokens, found.lengths)), strict=True
    )
    begins = config.model.kind == "encoder-decoder"
    return [
        (float(score), _text(tokenizers.tokenizer, _without_ends(ids[:n], named["stop"]), begins))
        for score, ids, n in rows
        if n
    ]


@program(static=("model", "batch", "capacity"))
def _init(
    model: AnyModel,
    params: Params,
    batch: int,
    capacity: int,
    source: Array,
    valid: Array | None,
) -> PyTree:
    """Return the state of a decoder whose encoder has read the sources."""
    return init_decode_state(model, params, batch, capacity, source=source, source_valid=valid)


def _text(tokenizer: Tokenizer, ids: np.ndarray, begins: bool) -> str:
    """Return the text of ids; if it `begins`, without the space that its first word may bring."""
    own = plain(tokenizer)
    if isinstance(own, PretrainedTokenizer):
        text_ids = [int(i) for i in ids if i < own.vocab_size]
        return own.decode(text_ids, skip_special_tokens=True, begins=begins)
    text = tokenizer.to_bytes(int(i) for i in ids).decode("utf-8", "replace")
    return text.removeprefix(" ") if isinstance(own, WordTokenizer) else text
