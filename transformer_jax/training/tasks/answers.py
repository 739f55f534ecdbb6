"""Decoding of targets from sources with a published model or a model trained on pairs."""

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
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.completion import WithoutHistory, known_ids, scored_texts
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import Force, ForceLast, HistoryProcessor, never
from transformer_jax.decoding.samplers import Sample
from transformer_jax.decoding.step import ModelStep, make_step
from transformer_jax.decoding.writer import NO_TOKEN
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
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Params
from transformer_jax.training.rows import stack_rows
from transformer_jax.training.tasks.task import Report, Tokenizers, check_token_ids, known_sources
from transformer_jax.training.tasks.turns import source_ids
from transformer_jax.values import value_class

BATCH = 32
"""Number of sources that are decoded together."""


@dataclass(frozen=True)
class PrefixStep(ModelStep):
    """Step of a decoder trained with prefixes, in which prompt tokens attend in both directions.

    A call with more than one token per row must contain the complete prompt.
    """

    def arguments(
        self,
        tokens: jax.Array,  # i32[B, T]
        state: ModelCache,
        valid: jax.Array | None,  # bool[B, T]
    ) -> dict[str, object]:
        """Return the model's arguments, which include a prefix mask for a prompt."""
        arguments = super().arguments(tokens, state, valid)
        if tokens.shape[1] > 1:
            positions = arguments["positions"]
            assert isinstance(positions, jax.Array)
            arguments["mask"] = Causal() | Prefix(positions.max(axis=1) + 1)
        return arguments


@value_class(eq=False)
class Targets:
    """Decoder that generates targets from sources.

    Attributes:
        config: config of the run. For a published model, the config of a run that would fine-tune
            it.
        tokenizers: tokenizers for targets and sources.
        params: parameters of the model.
        model: model of the config, which may have edits; None builds it from the config.
        published: whether to encode sources as for a published model. Sources can then contain
            special tokens, and each source is encoded separately, without padding.
        stop: tokens that end a target; None uses the tokenizer's.
        processors: functions that change the logits before a token is chosen.
        cache_dtype: the dtype of cached keys and values. None means the compute dtype.
    """

    config: TrainConfig
    tokenizers: Tokenizers
    params: Params
    model: AnyModel | None = None
    published: bool = False
    stop: tuple[int, ...] | None = None
    processors: tuple[HistoryProcessor, ...] = ()
    cache_dtype: jax.typing.DTypeLike | None = None

    def encode(self, text: str) -> np.ndarray:  # i32[S]
        """Encode a source as in training. For a decoder, append the separator."""
        config, tokenizer = self.config, self.tokenizers.of_source
        if self.published and isinstance(base := plain(tokenizer), PretrainedTokenizer):
            ids = base.encode(text, special_tokens=True) if text else np.zeros(0, np.int32)
        elif len(ids := encode_text(tokenizer, text)):
            if config.model.kind == "encoder-decoder":
                ids = source_frame(tokenizer).around(ids)
            else:
                ids = source_ids(self.tokenizers.tokenizer, text)
        if not len(ids):
            rule = "a source must have at least one token"
            raise DataError(f"prompt is {text!r}: {rule}")
        check_token_ids(known_sources(config), tokenizer, f"prompt is {text!r:.40}", ids)
        if len(ids) > config.sequence_len and config.model.max_len is not None:
            raise DataError(
                f"prompt is {text!r:.40}: it has {len(ids)} tokens, but the model was trained on "
                f"at most {config.sequence_len}"
            )
        return ids.astype(np.int32)

    def text(self, ids: np.ndarray) -> str:
        """Return the text of a target, without end tokens and special tokens.

        Raises ValueError if a published model produced no valid token. A diverged run is still
        scored.
        """
        if self.published and (ids < 0).any():
            raise ValueError(NO_TOKEN)
        ids = ids[~np.isin(ids, self._ends()) & (ids >= 0)]
        base = plain(self.tokenizers.tokenizer)
        if isinstance(base, PretrainedTokenizer):
            begins = self.config.model.kind == "encoder-decoder"
            # the special tokens of a run follow the vocabulary and have no text
            text_ids = [int(i) for i in ids if i < base.vocab_size]
            return base.decode(text_ids, skip_special_tokens=True, begins=begins)
        text = self.tokenizers.tokenizer.to_bytes(int(i) for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if isinstance(base, WordTokenizer) else text

    def answer(
        self,
        sources: Sequence[str] | Sequence[np.ndarray],  # or f32[S, D_in], f32[H, W, C] of signals
        num_tokens: int | None = None,
        *,
        beams: int = 1,
        length_penalty: float = 1.0,
        report: Report | None = None,
    ) -> list[str]:
        """Return the most likely target of each source, found by greedy decoding or beam search.

        Sources of similar length are decoded together, but their answers are independent. The score
        of a beam of n tokens is log p / n^length_penalty.

        Raises:
            DataError: If the model cannot read a source.
        """
        rows = [self.encode(one) if isinstance(one, str) else one for one in sources]
        found = [""] * len(rows)
        batch = 1 if self.published else BATCH
        # rows of similar length need less padding
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        report_progress = report or (lambda done, total: None)
        report_progress(0, len(rows))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            part = [rows[i] for i in chosen]
            # copies fill the last batch, so that one program serves all batches
            part += [part[-1]] * (batch - len(part) if len(rows) > batch else 0)
            args, kwargs = self._decoding_arguments(part, num_tokens)
            if beams == 1:
                written = generate(*args, **kwargs).rows()
            else:
                penalty = LengthPenalty(length_penalty)
                best = beam_search(*args, num_beams=beams, length_penalty=penalty, **kwargs)
                sizes = np.asarray(best.lengths)[:, 0]
                if self.published and not sizes.all():
                    raise ValueError(NO_TOKEN)
                written = [
                    row[:n] for row, n in zip(np.asarray(best.tokens)[:, 0], sizes, strict=True)
                ]
            # not strict, because the copies have no entry in `chosen`
            for i, ids in zip(chosen, written, strict=False):
                found[i] = self.text(ids)
            report_progress(start + len(chosen), len(rows))
        return found

    def draw(
        self, source: str, num_tokens: int | None, count: int, sampler: Sample, key: jax.Array
    ) -> list[str]:
        """Sample `count` targets for one source, which the encoder reads once."""
        args, kwargs = self._decoding_arguments([self.encode(source)], num_tokens)
        step, params, prompt, state = args
        for name in kwargs.keys() & {"lengths", "limits"}:
            kwargs[name] = np.repeat(kwargs[name], count)
        out = generate(
            step, params, np.repeat(prompt, count, axis=0), fork(state, count), sampler=sampler,
            key=key, **kwargs,
        )  # fmt: skip
        return [self.text(row) for row in out.rows()]

    def search(
        self,
        source: str,
        num_tokens: int | None = None,
        *,
        beams: int,
        results: int = 1,
        length_penalty: float = 1.0,
    ) -> list[tuple[float, str]]:
        """Return the best targets found by beam search and their scores."""
        args, kwargs = self._decoding_arguments([self.encode(source)], num_tokens)
        found = beam_search(
            *args, num_beams=beams, num_results=results,
            length_penalty=LengthPenalty(length_penalty), **kwargs,
        )  # fmt: skip
        return scored_texts(found, lambda ids: self.text(np.array(ids, np.int32)))

    def _ends(self) -> tuple[int, ...]:
        tokenizer = self.tokenizers.tokenizer
        if self.stop is not None:
            return self.stop
        writes = self.config.model.kind == "encoder-decoder"
        return target_of(tokenizer).stop if writes else end_ids(tokenizer)

    def _decoding_arguments(
        self, rows: Sequence[np.ndarray], num_tokens: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for `generate` and `beam_search`."""
        config, tokenizer = self.config, self.tokenizers.tokenizer
        module = build(config.model) if self.model is None else self.model
        model = module.config
        tokens, valid = (rows[0][None], None) if self.published else stack_rows(rows)
        lengths = np.array([len(row) for row in rows], np.int32)
        count = config.sequence_len if num_tokens is None else num_tokens
        kwargs: dict[str, Any] = {}
        if any(name.startswith("encoder/") for name, _ in module.edits):
            # edits of the encoder must not see padding that all rows share
            tokens = tokens[:, : lengths.max()]
            valid = None if valid is None else valid[:, : lengths.max()]
        step: Any = make_step(module).with_facts(apart=True)  # some rows may be padding
        processors: list[HistoryProcessor] = []
        if self.published:  # a published vocabulary may be padded
            processors += map(WithoutHistory, known_ids(model, tokenizer))
        if model.kind == "encoder-decoder":
            target = target_of(tokenizer)
            processors += [*never(target.banned), *self.processors]
            if target.forced_bos is not None:
                processors.append(Force(target.forced_bos))  # even if the token is banned
            if target.forced_eos is not None:
                processors.append(ForceLast(count, target.forced_eos))
            prompt = np.full((len(rows), 1), target.start, np.int32)
            padded = len(set(lengths.tolist())) > 1
            reader = module.with_facts(apart=len(rows) > 1, padded=padded)
            state = _read_sources(
                reader, self.params, len(rows), count, tokens, valid, self.cache_dtype
            )
        else:
            capacity = config.sequence_len
            if model.supports("cache"):
                # The model does not read the last token that it generates, so one more token fits.
                kwargs["limits"] = np.minimum(config.sequence_len + 1 - lengths, count)
                # this depends only on the bucket, so one program serves all its sources
                count = min(count, config.sequence_len)
                capacity = min(capacity, bucket(tokens.shape[1]) + count)
            if isinstance(config.task, PrefixTask) and config.task.bidirectional:
                step = PrefixStep(step.model) if isinstance(step, ModelStep) else step
            processors += self.processors
            prompt, kwargs["lengths"] = tokens, lengths
            state = init_decode_state(
                model, self.params, len(rows), capacity, dtype=self.cache_dtype
            )
        kwargs |= dict(num_tokens=count, stop=self._ends(), processors=tuple(processors))
        return (step, self.params, prompt, state), kwargs


def answer_sources(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    sources: Sequence[str] | Sequence[np.ndarray],
    *,
    beams: int | None = None,
    num_tokens: int | None = None,
    model: AnyModel | None = None,
    report: Report | None = None,
) -> list[str]:
    """Return the target that a run decodes for each source. See `Targets.answer`.

    `beams` defaults to the task's value. `model` is the model of the config, which may have edits.
    """
    task = config.task
    if beams is None:
        beams = task.beams if isinstance(task, Seq2SeqTask | PrefixTask) else 1
    return Targets(config, tokenizers, params, model).answer(
        sources, num_tokens, beams=beams, report=report
    )


@program(static=("model", "batch", "capacity", "dtype"))
def _read_sources(
    model: AnyModel,
    params: Params,
    batch: int,
    capacity: int,
    source: Array,
    valid: Array | None,
    dtype: jax.typing.DTypeLike | None,
) -> PyTree:
    """Encode the sources and return the initial state of the decoder."""
    return init_decode_state(
        model, params, batch, capacity, source=source, source_valid=valid, dtype=dtype
    )
