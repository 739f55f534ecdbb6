"""Tokenization of texts, pairs and messages for a loaded model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.checks import INT32
from transformer_jax.config import ConfigError, TrainConfig, tasks
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.decoding import completion
from transformer_jax.decoding.logit_processors import HistoryProcessor
from transformer_jax.loading import TextModel
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.factory import build
from transformer_jax.pytree import Array, Params
from transformer_jax.tokenizers.pieces import token_texts
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import (
    encode_text,
    encoder_frame,
    plain,
    special_ids,
    unknown_words,
)
from transformer_jax.tokenizers.trained import BPETokenizer, Tokenizer, WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.answers import Targets
from transformer_jax.training.tasks.chat import check_messages
from transformer_jax.training.tasks.masked import masked_ids
from transformer_jax.training.tasks.pairs import Pair, pair_example
from transformer_jax.training.tasks.preferences import reads_messages
from transformer_jax.training.tasks.task import Tokenizers
from transformer_jax.training.tasks.turns import prompt_ids
from transformer_jax.values import value_class

Kind = Literal["text", "chat", "targets", "masks", "labels", "signals", "vectors"]
Conversation: TypeAlias = str | Sequence[Message]
NUM_TOKENS = 400
"""Maximum number of new tokens if `num_tokens` is None."""

MASKS = "[MASK]", "_"
"""Strings that stand for a mask in a prompt for a masked model."""


@dataclass(frozen=True, eq=False, repr=False)
class Reader:
    """Trained or published model with methods that read text."""

    model: TextModel
    name: str
    """Folder or ID from which the model was loaded."""
    edited_module: CheckedModule | None = None
    """Module of an edited model. None builds the module from the config."""

    @property
    def config(self) -> AnyModelConfig:
        """Config of the model, as an argument for `build`."""
        return self.model.config

    @property
    def module(self) -> CheckedModule:
        """Module with its edits, for calls `module.apply({"params": params}, tokens)`."""
        return build(self.config) if self.edited_module is None else self.edited_module

    @property
    def params(self) -> Params:
        """Parameters of the model."""
        return self.model.params

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, which converts text to IDs (`encode`) and IDs to text (`decode`)."""
        return self.model.tokenizer

    @property
    def tokenizers(self) -> Tokenizers:
        """Tokenizer, and the tokenizer for sources if it is a different one."""
        return Tokenizers(self.model.tokenizer, self.model.source_tokenizer)

    @property
    def task(self) -> tasks.Task | None:
        """Task of the run, or None for a published model."""
        return None if self.model.run is None else self.model.run.task

    @cached_property
    def run(self) -> TrainConfig:
        """Config of the run that trained the model or would fine-tune a published model."""
        return self.model.run or published_run(self.config, self.name)

    @cached_property
    def kind(self) -> Kind:
        """Kind of the model, which determines what the model does with its input.

        A "text" model continues text, and a "chat" model answers messages. A "targets" model
        generates the target of a source. A "masks" model fills masks, and a "labels" model predicts
        the class of a text. A "signals" model reads pictures or sounds. A "vectors" model is an
        encoder without a head, which embeds text.
        """
        # The task determines the kind of a run, and the config determines the kind of a published
        # model.
        if self.task is not None and self.task.reads_numbers:
            return "signals"
        match self.task:
            case tasks.MaskedTask():
                return "masks"
            case tasks.ClassifyTask():
                return "labels"
            case tasks.ChatTask():
                return "chat"
            case tasks.PreferenceTask() as task:
                return "chat" if reads_messages(task, self.tokenizer) else "text"
            case tasks.LanguageTask():
                return "text"
            case tasks.Task() as task if isinstance(
                task.on_a_file(self.config), tasks.Seq2SeqTask | tasks.PrefixTask
            ):
                return "targets"
        shape = self.config.kind
        if shape == "encoder":
            masks = self.config.masked_token_head
            return "masks" if masks else "vectors"
        return "targets" if shape == "encoder-decoder" else "text"

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        task = "published" if self.task is None else f"task {self.task.kind!r}"
        size = f"{type(self.config).__name__} of {count:,} parameters"
        return f"{type(self).__name__}({self.name!r}: {task}, {size}, {self.tokenizer!r})"

    @property
    def masks(self) -> tuple[str, ...]:
        """Strings that stand for a mask in a prompt, if the model fills masks."""
        return MASKS if self.kind == "masks" else ()

    def read(self, prompt: str) -> np.ndarray:  # i32[P]
        """Return the tokens of a prompt, including the tokens that begin every text."""
        ids = np.zeros(0, np.int32)
        if isinstance(self.task, tasks.PreferenceTask):
            # As in training, the name of a special token in a prompt is read as ordinary text.
            ids = prompt_ids(self.tokenizer, prompt)
        if not prompt or not len(ids):
            ids = completion.read_prompt(self.tokenizer, prompt, self.model.begin_id)
        return self.known(ids, "the prompt")

    def read_messages(self, messages: Conversation) -> np.ndarray:  # i32[P]
        """Return the tokens of messages up to the beginning of the answer."""
        checked = checked_messages(messages)
        if checked[-1]["role"] == "assistant":
            rule = "must end with a message that the model can answer"
            raise DataError(f"messages end with a message from the assistant: {rule}")
        base = plain(self.tokenizer)
        if isinstance(base, PretrainedTokenizer) and base.chat_templates:
            return self.known(base.chat_ids(checked), "messages")
        if self.kind != "chat":
            reason = f"the model of {self.name!r} has no chat template"
            raise ConfigError(f"chat: {reason}; it {self._usage()}")
        ids = prompt_ids(self.tokenizer, check_messages("messages", checked))
        return self.known(ids, "messages")

    def warn_of_unknown(self, texts: Sequence[str], target: Sequence[str] = ()) -> None:
        """Warn about words in texts and targets that a word tokenizer encodes as <unk>."""
        found = (
            unknown_words(self.tokenizers.of_source, texts, self.masks),
            unknown_words(self.tokenizer, target),
        )
        for line in filter(None, found):
            # Attribute the warning to the first caller outside this package.
            frame, level = sys._getframe(), 1
            while frame.f_back and str(frame.f_globals.get("__name__")).startswith(
                "transformer_jax."
            ):
                frame, level = frame.f_back, level + 1
            warnings.warn(line, stacklevel=level)

    def check_tokens(self, text: str) -> None:
        """Raise DataError if the text has no tokens, such as only blanks for a `WordTokenizer`."""
        if not text or (text.isspace() and not len(encode_text(self.tokenizer, text))):
            raise DataError(f"text is {text!r:.60}: must have at least one token")

    def known(self, ids: np.ndarray, what: str) -> np.ndarray:  # i32[n]
        """Return the IDs; raise DataError if one is not in the model's vocabulary."""
        size = self.config.vocab_size
        # An ID outside the embedding table would make all later logits NaN.
        if len(ids) and ids.max() >= size:
            raise DataError(f"{what} contains ID {ids.max()}, but the model has only {size} tokens")
        return ids

    def room(self, ids: np.ndarray) -> int:
        """Return the number of new tokens that fit after a prompt before text must be re-read."""
        return completion.room(self.config, self.tokenizer, ids)

    def targets(
        self,
        processors: Sequence[HistoryProcessor] = (),
        cache_dtype: jax.typing.DTypeLike | None = None,
    ) -> Targets:
        """Return a `Targets` object, which reads sources and generates their targets."""
        published = self.task is None
        return Targets(
            self.run, self.tokenizers, self.params, self.module, published=published,
            stop=self.model.stop_ids if published else None, processors=tuple(processors),
            cache_dtype=cache_dtype,
        )  # fmt: skip

    def target_count(self, num_tokens: int | None) -> int:
        """Return the maximum number of tokens in a target; a run has a trained default."""
        if self.task is not None:
            return self.run.sequence_len if num_tokens is None else num_tokens
        config = as_transformer(self.config)
        count = min(NUM_TOKENS, config.max_len) if num_tokens is None else num_tokens
        if config.positions is not None and config.positions.absolute and count > config.max_len:
            raise ConfigError(f"num_tokens is {count}: must be at most max_len, {config.max_len}")
        return count

    def instead(self) -> str:
        """Return a description of the model, with the method to call instead."""
        model = repr(self.name) if self.task is None else f"a run for task {self.task.kind!r}"
        return f"{model} {self._usage()}"

    def _usage(self) -> str:
        """Return a description of what the model does, with the method to call."""
        usages = {
            "text": "continues text: generate(TEXT)",
            "chat": "answers messages: chat(TEXT) or chat([{'role': 'user', 'content': TEXT}])",
            "targets": "writes the target of a source: generate(SOURCE)",
            "masks": "fills masks: generate('... [MASK] ...')",
            "labels": "predicts the class of a text: classify(TEXT)",
            "signals": "reads pictures or sounds: evaluate('FILE.npz')",
            "vectors": "is an encoder that writes no text: load_sentence_encoder(FOLDER)",
        }
        return usages[self.kind]


def published_run(
    config: AnyModelConfig, init_from: str, data: str | None = None, context: int | None = None
) -> TrainConfig:
    """Return the config of a run that would evaluate or fine-tune a published model."""
    model = as_transformer(config)
    task: tasks.Task = tasks.LanguageTask()
    longest = min(model.max_len, 512)
    if model.kind == "encoder":
        task = tasks.MaskedTask()
    elif model.kind == "encoder-decoder":
        task = tasks.Seq2SeqTask(beams=1)
        if model.positions is None or not model.positions.absolute:  # no length limit
            model = replace(model, max_len=INT32.max // 2)
        longest = model.max_len
    return TrainConfig(
        model=task.fit_model(model) if model.kind == "encoder" else model, task=task,
        tokenizer="pretrained", init_from=init_from, data=data or "-", val_data=data,
        context=longest if context is None else min(model.max_len, context), batch_size=4,
    )  # fmt: skip


def checked_messages(messages: Conversation) -> list[Message]:
    """Return messages as a list; a string becomes a user message. Raise DataError if invalid."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    rule = 'must be a string or [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"messages is {messages!r:.80}: {rule}")
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"messages[{n}] is {message!r:.80}: {rule}")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise DataError(f"messages[{n}] has content {content!r:.80}: must be a string")
        if message["role"] == "user" and not content:
            raise DataError(f"messages[{n}] has content {content!r}: must not be empty")
    return list(messages)


@value_class
class WholeText:
    """All tokens of a text, as a model reads them."""

    ids: np.ndarray  # i32[T]
    source: np.ndarray | None = None  # i32[S], for an encoder-decoder
    prefix: np.ndarray | None = None  # bool[T], tokens visible to all others, for a prefix run
    labels: np.ndarray | None = None  # i32[T], next tokens of the target, for pairs

    def inputs(self) -> dict[str, Array]:
        """Return the inputs other than the tokens as a batch of one row."""
        named = {"source": self.source, "prefix": self.prefix}
        return {name: row[None] for name, row in named.items() if row is not None}


def call_arguments(inputs: dict[str, Array]) -> dict[str, Any]:
    """Convert `WholeText.inputs` to arguments of `model.apply`."""
    arguments: dict[str, Any] = {}
    if "source" in inputs:
        arguments["source"] = inputs["source"]
    if "prefix" in inputs:
        arguments["mask"] = Causal() | Padding(jnp.asarray(inputs["prefix"]))
    return arguments


def read_whole(model: Reader, text: Any) -> WholeText:
    """Tokenize text or (source, target); raise DataError if its type or length is invalid."""
    config = model.config
    pairs = model.kind == "targets"
    if pairs != (isinstance(text, tuple) and len(text) == 2) or not all(
        isinstance(one, str) for one in (text if pairs else (text,))
    ):
        rule = "(source, target)" if pairs else "a string"
        raise DataError(f"text is {text!r:.80}: must be {rule}")
    source = prefix = labels = None
    tokenizer = model.tokenizer
    if not pairs:
        model.check_tokens(text)
    model.warn_of_unknown([text[0] if pairs else text], [text[1]] if pairs else [])
    if pairs:
        example = pair_example(model.run, model.tokenizers, Pair(text[0], text[1], "text"))
        ids, source, prefix, labels = (
            None if row is None else np.asarray(row)
            for row in (example.tokens, example.source, example.prefix, example.labels)
        )
    elif config.kind == "encoder":
        if model.kind == "labels":
            ids = encoder_frame(tokenizer).around(encode_text(tokenizer, text))
        else:
            ids = masked_ids(tokenizer, text)
    elif model.kind == "chat":
        ids = model.read_messages(text)
    elif model.kind == "labels":
        ids = np.append(encode_text(tokenizer, text), special_ids(tokenizer)["cls"])
    else:
        ids = model.read(text)
    assert ids is not None
    ids = model.known(ids.astype(np.int32), "the text")
    if (most := config.longest_row) is not None and len(ids) > most:
        raise DataError(f"the text has {len(ids)} tokens: must be at most max_len, {most}")
    return WholeText(ids, source, prefix, labels)


def token_id(tokenizer: Tokenizer, name: str, word: str, vocab_size: int) -> int:
    """Return the ID of a word; raise DataError if the word is unknown or has several tokens.

    If the word with a leading space, as it appears inside a text, is a single token, return the ID
    of that token.
    """
    if not isinstance(word, str) or not word:
        raise DataError(f"{name} is {word!r:.60}: must be a string of one token")
    base = plain(tokenizer)
    within_text = isinstance(base, BPETokenizer | PretrainedTokenizer) and not word[0].isspace()
    for text in (f" {word}", word) if within_text else (word,):
        try:
            ids = encode_text(tokenizer, text)
        except DataError as error:
            raise DataError(f"{name} is {word!r:.60}: {error}") from None
        if len(ids) == 1:
            break
    unknown = 0 if isinstance(base, WordTokenizer) else None
    if isinstance(base, PretrainedTokenizer):
        unknown = base.special_ids.get("unk")
    if unknown in ids:
        raise DataError(f"{name} is {word!r:.60}, which is not among the words of the tokenizer")
    if len(ids) != 1:
        parts = ", ".join(map(repr, token_texts(tokenizer, ids[:8]))) + ", ..." * (len(ids) > 8)
        raise DataError(f"{name} is {word!r:.60}: must be one token, not {len(ids)} ({parts})")
    if ids[0] >= vocab_size:
        rule = f"has ID {ids[0]}, but the model has only {vocab_size} tokens"
        raise DataError(f"{name} is {word!r:.60}: {rule}")
    return int(ids[0])
