"""Masked language modeling (Devlin et al. 2019, section 3.1) with new masks in every step.

The model predicts a fraction `rate` of the tokens, which are called hidden. Of these, a fraction
`replaced` is replaced by the mask token and a fraction `random` by random tokens. The rest are not
changed, so that the model learns to attend to every token. Every evaluation hides the same tokens.
Published models read each window between their special tokens, which are never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import has_finite_maximum
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import MaskedTask
from transformer_jax.models.arguments import CheckedModule as AnyModel
from transformer_jax.models.factory import build
from transformer_jax.programs import program
from transformer_jax.pytree import Array
from transformer_jax.tokenizers.pieces import token_texts
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import frame, plain, special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch, Params, batch_logits, scored
from transformer_jax.training.data import IGNORE, load_dataset, random_starts
from transformer_jax.training.rows import Rows
from transformer_jax.training.tasks.task import (
    Report,
    Tokenizers,
    TrainingTask,
    check_has,
    check_token_ids,
    with_vocabulary,
)

_EVAL_STREAM = 2**61
"""Value of `step` that selects the tokens hidden in evaluations. No training step has this
number."""

PSEUDO_WINDOWS = 4
"""Number of held-out windows used for the pseudo-perplexity."""


class MaskedWindows(TrainingTask):
    """Task whose examples are windows of a text with hidden tokens."""

    def __init__(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> None:
        base = None if tokenizers is None else tokenizers.tokenizer
        self.data = load_dataset(config, None if base is None else plain(base))
        tokenizer = with_special_tokens(base or self.data.tokenizer, ["mask"])
        self.tokenizers, self.sha256 = Tokenizers(tokenizer), self.data.sha256
        self.config = with_vocabulary(config, self.tokenizers, vocab_size)
        self.masking = Masking(self.config, tokenizer)
        self.length = self.config.sequence_len - sum(map(len, self.masking.frame))
        self.tokens_per_step = config.accumulation * config.batch_size * config.sequence_len
        counts = np.bincount(self.data.train, minlength=tokenizer.vocab_size) + 1.0
        self.unigram = float(-np.log(counts / counts.sum())[self.data.val].mean())
        """Loss of a unigram guess in nats per token, with one added to each count."""

    def inputs(self, step: int) -> Batch:
        """Return the windows of a step with hidden tokens, as leaves [A, B, ...]."""
        config = self.config
        shape, count = (config.accumulation, config.batch_size), len(self.data.train)
        starts = random_starts(config.seed, step, shape, count - self.length + 1)
        return self.masking(_windows(self.data.train, starts, self.length), step)

    def evaluation(self) -> Iterator[Batch]:
        """Yield windows that cover the held-out part, or `eval_batches` batches of random windows.

        A remainder that is shorter than a window is omitted.
        """
        config = self.config
        length, size = self.length, config.batch_size
        starts = np.arange(0, len(self.data.val) - length + 1, length, dtype=np.int32)
        if config.eval_batches is not None:
            count = len(self.data.val) - length + 1
            shape = (config.eval_batches * size,)
            starts = random_starts(config.seed, _EVAL_STREAM, shape, count)
        for first in range(0, len(starts), size):
            here = starts[first : first + size]
            batch = self.masking(_windows(self.data.val, here, length), _EVAL_STREAM, first=first)
            # all batches have the same shape, so that they share a compiled program
            empty = size - len(here)
            tokens = np.pad(batch.tokens, ((0, empty), (0, 0)))
            yield Batch(tokens, np.pad(batch.labels, ((0, empty), (0, 0)), constant_values=IGNORE))

    def described(self) -> str:
        """Return a description of the length of the text and the loss of unigram predictions."""
        train, held_out = len(self.data.train), len(self.data.val)
        return (
            f"text: {train:,} tokens and {held_out:,} held out, {self.tokens_per_step:,} in a "
            f"step; a guess by frequency has {self.unigram:.4f} nats per token"
        )

    def sample(self, params: Params) -> str:
        """Return held-out text with masks (_), the model's completion, and the original text."""
        tokens = np.asarray(self.data.val[: self.length], np.int32)[None]
        # replace all hidden tokens by masks, because the sample must not show the model their text
        hidden = self.masking(tokens, _EVAL_STREAM, replaced=1.0)
        logits = np.asarray(_logits(self.model, params, hidden.tokens))
        guess = logits[..., : self.masking.kinds].argmax(axis=-1)
        within = slice(len(self.masking.frame.first), len(self.masking.frame.first) + self.length)
        labels, guess, read = (x[0, within] for x in (hidden.labels, guess, hidden.tokens))
        filled = np.where(labels != IGNORE, guess, tokens[0])
        show = self.tokenizers.tokenizer
        marks = ["_" if i == self.masking.mask else _text(show, [i]) for i in read]
        parts = [f"hidden:\n{''.join(marks)}", f"filled:\n{_text(show, filled)}"]
        return "\n".join([*parts, f"text:\n{_text(show, tokens[0])}"])

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return the pseudo-perplexity of the first held-out windows.

        The pseudo-perplexity is exp(-mean log p(token | others)), where one token is hidden at a
        time (Salazar et al. 2020).
        """
        length = self.length
        count = min(PSEUDO_WINDOWS, len(self.data.val) // length)
        losses = []
        for window in np.asarray(self.data.val[: count * length], np.int32).reshape(count, length):
            # row i hides only token i
            tokens = np.where(np.eye(length, dtype=bool), self.masking.mask, window[None])
            labels = np.where(np.eye(length, dtype=bool), window[None], IGNORE)
            rows = Rows((self.masking.framed(tokens, labels),))
            scores = [scored(self.model, params, batch) for batch in rows.batches(8)]
            losses.append(float(sum(np.asarray(score)[0] for score in scores)) / length)
        mean = min(float(np.mean(losses)), 700.0) if losses else 0.0  # keeps exp finite
        return {"pseudo_perplexity": math.exp(mean)} if losses else {}

    def documents(self) -> list[np.ndarray]:
        """Return the training part as one sequence."""
        return [self.data.train]


class Masking:
    """Masking of rows, which depends only on the seed, the step, and the row number."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        assert isinstance(config.task, MaskedTask)
        self.task, self.seed, self.mask = config.task, config.seed, special_ids(tokenizer)["mask"]
        base = plain(tokenizer)
        # random tokens are chosen from the text tokens in the model's vocabulary
        self.kinds = min(base.vocab_size, config.model.vocab_size)
        self.frame, self.special = frame(tokenizer), np.zeros(0, np.int32)
        added = np.array([self.mask, *self.frame.first, *self.frame.last])
        check_token_ids(config.model.vocab_size, tokenizer, "tokenizer", added)
        if isinstance(base, PretrainedTokenizer):
            roles = {i for role, i in base.special_ids.items() if role != "unk"}
            self.special = np.array(sorted(roles), np.int32)
        self.opens = self.closes = None
        if self.task.whole_words:
            pieces = [_text(tokenizer, [i]) for i in range(self.kinds)]
            # each token outside the text vocabulary counts as a word, described by the last item
            self.opens = np.array([not piece[:1].isalnum() for piece in pieces] + [True])
            self.closes = np.array([not piece[-1:].isalnum() for piece in pieces] + [True])

    def __call__(
        self, tokens: np.ndarray, step: int, replaced: float | None = None, first: int = 0
    ) -> Batch:
        """Return rows i32[..., T] with hidden tokens. The labels are the original tokens.

        `first` is the number of the first row.
        """
        task = self.task
        replaced = task.replaced if replaced is None else replaced
        *rows, count = tokens.shape
        # Three random numbers per token, which depend only on the seed, the step, and the number of
        # the row. Each row uses whole Philox blocks, so it gets the same numbers in every batch.
        blocks = -(-3 * count // 4)  # a block has four words
        # 1 << 63 separates this random stream from the one for window starts
        key = (self.seed << 64) + (1 << 63) + step
        philox = np.random.Philox(key=key, counter=1 + first * blocks)
        words = philox.random_raw(math.prod(rows) * 4 * blocks).reshape(-1, 4 * blocks)
        words = words[:, : 3 * count].reshape(*rows, 3, count)
        # the upper 53 bits of a word are a float64 in [0, 1)
        chosen, how, which = np.moveaxis((words >> np.uint64(11)) * 2.0**-53, -2, 0)
        if self.opens is not None and self.closes is not None:
            kinds = np.minimum(tokens, self.kinds)
            starts = self.opens[kinds]
            starts[..., 1:] |= self.closes[kinds][..., :-1]
            starts[..., 0] = True
            begins = np.where(starts, np.arange(tokens.shape[-1]), 0)
            begins = np.maximum.accumulate(begins, axis=-1)  # first token of each word
            # all tokens of a word share the random number of the first one, so they are hidden
            # together
            chosen = np.take_along_axis(chosen, begins, axis=-1)
        chosen = (chosen < task.rate) & ~np.isin(tokens, self.special)
        random = (which * self.kinds).astype(np.int32)
        hidden = np.where(how < replaced, self.mask, tokens)
        hidden = np.where((how >= replaced) & (how < replaced + task.random), random, hidden)
        return self.framed(np.where(chosen, hidden, tokens), np.where(chosen, tokens, IGNORE))

    def framed(
        self,
        tokens: np.ndarray,  # [..., T]
        labels: np.ndarray,  # [..., T]
    ) -> Batch:
        """Add the tokenizer's special tokens, without labels, to both ends of each window."""
        around = [*[(0, 0)] * (tokens.ndim - 1), tuple(map(len, self.frame))]
        whole = np.pad(tokens, around).astype(np.int32)
        whole[..., : around[-1][0]] = self.frame.first
        whole[..., whole.shape[-1] - around[-1][1] :] = self.frame.last
        labels = np.pad(labels, around, constant_values=IGNORE)
        return Batch(whole, labels.astype(np.int32))


def _windows(corpus: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:  # i32[..., T]
    return corpus[starts[..., None] + np.arange(length)].astype(np.int32)


@program(static=("model",))
def _logits(model: AnyModel, params: Params, tokens: Array) -> jax.Array:  # f32[B, T, V]
    batch = Batch(tokens, jnp.full(tokens.shape, IGNORE))
    return batch_logits(model)(params, batch, None)


def _text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    return tokenizer.to_bytes([int(i) for i in ids]).decode("utf-8", "replace")


def masked_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:  # i32[n]
    """Encode text that contains masks ("[MASK]" or "_"), and add the tokenizer's special tokens.

    Text for a published tokenizer can also contain its mask token.
    """
    base, mask = plain(tokenizer), special_ids(tokenizer).get("mask")
    spelled = dict(base.roles).get("mask") if isinstance(base, PretrainedTokenizer) else None
    # an underscore may be ordinary text, so it is a mask only if the text contains no other mask
    sign = next((s for s in (spelled, "[MASK]") if s and s in text), "_")
    if isinstance(base, PretrainedTokenizer) and spelled:
        return base.encode(text.replace(sign, spelled), special_tokens=True)
    parts: list[np.ndarray | list[int]] = [
        base.encode(part) if part else [] for part in text.split(sign)
    ]
    if mask is None:
        parts = [base.encode(text)]
    ids = [i for number, part in enumerate(parts) for i in [*[mask] * (number > 0), *part]]
    return frame(tokenizer).around(np.array(ids, np.int32))


def _read(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    text: str,
    model: AnyModel | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # i32[n], bool[n], f32[n, V]
    """Return the tokens of a text, whether each token is a mask, and the logits.

    Raises DataError if there is no mask.
    """
    tokenizer = tokenizers.tokenizer
    check_has(tokenizer, "mask")
    tokens = masked_ids(tokenizer, text)
    masks = tokens == special_ids(tokenizer)["mask"]
    if not masks.any():
        raise DataError(f"prompt is {text!r:.60}: must have a [MASK] (or _) to fill")
    if len(tokens) > config.sequence_len:
        rule = f"must be at most {config.sequence_len}"
        raise DataError(f"prompt has {len(tokens)} tokens: {rule}")
    check_token_ids(config.model.vocab_size, tokenizer, f"prompt is {text!r:.40}", tokens)
    model = build(config.model) if model is None else model
    logits = np.asarray(_logits(model, params, tokens[None]))[0]
    if not has_finite_maximum(jnp.asarray(logits[masks])).all():  # other logits may be -inf
        raise DataError(f"prompt is {text!r:.60}: the largest logit of a mask is not finite")
    return tokens, masks, logits


def fill_masks(
    config: TrainConfig, tokenizers: Tokenizers, params: Params, text: str,
    model: AnyModel | None = None,
) -> str:  # fmt: skip
    """Replace every mask in a text (see `masked_ids`) with the most likely token.

    `model` is the model of the config, which may have edits. A space before the first word is
    removed if the original text has none. Raises DataError if there is no mask.
    """
    tokenizer = tokenizers.tokenizer
    base = plain(tokenizer)
    tokens, masks, logits = _read(config, tokenizers, params, text, model)
    guess = logits[:, : min(base.vocab_size, config.model.vocab_size)].argmax(axis=-1)
    filled = np.where(masks, guess, tokens).tolist()
    if isinstance(base, PretrainedTokenizer):
        found = base.decode(filled, skip_special_tokens=True)
    else:
        found = tokenizer.decode(filled)
    return found if text[:1].isspace() else found.removeprefix(" ")


def mask_candidates(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    text: str,
    count: int,
    model: AnyModel | None = None,
) -> list[list[tuple[str, float]]]:
    """Return the most likely tokens for each mask, as text with a probability (see `fill_masks`).

    The probabilities are p = softmax(logits) over all tokens of the model. Only text tokens are
    returned.
    """
    tokenizer = tokenizers.tokenizer
    kinds = min(plain(tokenizer).vocab_size, config.model.vocab_size)
    _, masks, logits = _read(config, tokenizers, params, text, model)
    found = []
    for row in logits[masks].astype(np.float64):
        p = np.exp(row - row.max())
        p /= p.sum()
        best = np.argsort(-row[:kinds], kind="stable")[:count]
        found.append(list(zip(token_texts(tokenizer, best), p[best].tolist(), strict=True)))
    return found
