"""Say what a model does with a text, and read texts and messages as its tokens."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import jax
import numpy as np

from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
    Task,
)
from transformer_jax.decoding import completion
from transformer_jax.loading import TextModel
from transformer_jax.pytree import Params
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, plain, unknown_words
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.chat import check_messages
from transformer_jax.training.tasks.preferences import reads_messages
from transformer_jax.training.tasks.task import Tokenizers
from transformer_jax.training.tasks.turns import prompt_ids

Kind = Literal["text", "chat", "targets", "masks", "labels", "signals", "vectors"]
Conversation: TypeAlias = str | Sequence[Message]
MASKS = "[MASK]", "_"
"""How a prompt spells a token that a masked model fills."""


@dataclass(frozen=True, eq=False, repr=False)
class Reader:
    """Hold a model, its tokenizer and its task."""

    model: TextModel
    name: str
    """Where it was loaded from."""

    @property
    def config(self) -> AnyModelConfig:
        """The config of the model, for `build`."""
        return self.model.config

    @property
    def params(self) -> Params:
        """The parameters of the model."""
        return self.model.params

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text)` returns ids, `decode(ids)` a text."""
        return self.model.tokenizer

    @property
    def tokenizers(self) -> Tokenizers:
        """The tokenizer, and that of the sources where they have one of their own."""
        return Tokenizers(self.model.tokenizer, self.model.source_tokenizer)

    @property
    def task(self) -> Task | None:
        """The task of the run; None of a published model."""
        return None if self.model.run is None else self.model.run.task

    @cached_property
    def kind(self) -> Kind:
        """The name of what the model does with a text.

        text: go on with it; chat: answer it as a message; targets: write the target of a source;
        masks: fill its masks; labels: name its class. `signals` are no texts, and an encoder that
        has a head for none of these gives `vectors`.
        """
        if self.task is not None and self.task.reads_numbers:
            return "signals"
        match self.task:
            case MaskedTask():
                return "masks"
            case ClassifyTask():
                return "labels"
            case ChatTask():
                return "chat"
            case PreferenceTask() as task:
                return "chat" if reads_messages(task, self.tokenizer) else "text"
            case LanguageTask():
                return "text"
            case Task() as task if isinstance(
                task.on_a_file(self.config), Seq2SeqTask | PrefixTask
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
        own = f"{type(self.config).__name__} of {count:,} parameters"
        return f"{type(self).__name__}({self.name!r}: {task}, {own}, {self.tokenizer!r})"

    @property
    def masks(self) -> tuple[str, ...]:
        """How a prompt spells a token that is to be filled; nothing but of a masked model."""
        return MASKS if self.kind == "masks" else ()

    def read(self, prompt: str) -> np.ndarray:  # i32[P]
        """Return the tokens that a prompt is read as: after those that begin every text."""
        ids = np.zeros(0, np.int32)
        if isinstance(self.task, PreferenceTask):
            ids = prompt_ids(self.tokenizer, prompt)  # in which a special token is text
        if not prompt or not len(ids):
            ids = completion.read_prompt(self.tokenizer, prompt, self.model.begin_id)
        return self.known(ids, "the prompt")

    def read_messages(self, messages: Conversation) -> np.ndarray:  # i32[P]
        """Return the tokens that messages are read as, up to where the answer begins."""
        given = checked_messages(messages)
        if given[-1]["role"] == "assistant":
            raise DataError("messages end with the assistant's: must end with one to be answered")
        own = plain(self.tokenizer)
        if isinstance(own, PretrainedTokenizer) and own.chat_templates:
            return self.known(own.chat_ids(given), "messages")
        if self.kind != "chat":
            what = f"the model of {self.name!r} has no chat template"
            raise ConfigError(f"chat: {what}; it {self._says()}")
        return self.known(prompt_ids(self.tokenizer, check_messages("messages", given)), "messages")

    def warn_of_unknown(self, texts: Sequence[str], target: Sequence[str] = ()) -> None:
        """Warn of words that a tokenizer of words reads as <unk>, of texts and of targets."""
        found = (
            unknown_words(self.tokenizers.of_source, texts, self.masks),
            unknown_words(self.tokenizer, target),
        )
        for line in filter(None, found):
            frame, level = sys._getframe(), 1
            while frame.f_back and str(frame.f_globals.get("__name__")).startswith(
                "transformer_jax."
            ):
                frame, level = frame.f_back, level + 1  # to whoever called the model
            warnings.warn(line, stacklevel=level)

    def check_tokens(self, text: str) -> None:
        """Raise DataError for a text without a token, as "" is, and blanks to a `WordTokenizer`."""
        if not text or (text.isspace() and not len(encode_text(self.tokenizer, text))):
            raise DataError(f"text is {text!r:.60}: must have at least one token")

    def known(self, ids: np.ndarray, what: str) -> np.ndarray:  # i32[n]
        """Return ids; DataError for one that the model does not have."""
        size = self.config.vocab_size
        if len(ids) and ids.max() >= size:
            raise DataError(f"{what} has id {ids.max()}: the model has {size} tokens")
        return ids

    def room(self, ids: np.ndarray) -> int:
        """Return how many tokens fit after a prompt before any text is read anew."""
        return completion.room(self.config, self.tokenizer, ids)

    def instead(self) -> str:
        """Return what the model is and does with a text, and how that is called."""
        what = repr(self.name) if self.task is None else f"a run of task {self.task.kind!r}"
        return f"{what} {self._says()}"

    def _says(self) -> str:
        """Return what the model does with a text, and how that is called."""
        says = {
            "text": "goes on with a text, generate(TEXT)",
            "chat": "answers messages, chat(TEXT) or chat([{'role': 'user', 'content': TEXT}])",
            "targets": "writes the target of a source, generate(SOURCE)",
            "masks": "fills masks, generate('... [MASK] ...')",
            "labels": "names the class of a text, classify(TEXT)",
            "signals": "reads pictures or sounds: evaluate('FILE.npz') judges it",
            "vectors": "is an encoder's, which writes no text: load_sentence_encoder(FOLDER)",
        }
        return says[self.kind]


def published_run(
    model: ModelConfig, init_from: str, data: str | None = None, context: int | None = None
) -> TrainConfig:
    """Return the run that a published decoder or masked encoder would be judged in."""
    is_decoder = model.kind == "decoder"
    return TrainConfig(
        model=model if is_decoder else MaskedTask().fit_model(model),
        task=LanguageTask() if is_decoder else MaskedTask(),
        tokenizer="pretrained", init_from=init_from, data=data or "-", val_data=data,
        context=min(model.max_len, context or 512), batch_size=4,
    )  # fmt: skip


def checked_messages(messages: Conversation) -> list[Message]:
    """Return messages; a text is one of the user's. DataError for another form."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    rule = 'must be a text or [{"role": "user", "content": "..."}, ...]'
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"messages is {messages!r:.80}: {rule}")
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"messages[{n}] is {message!r:.80}: {rule}")
        said = message.get("content")
        if not isinstance(said, str | list) and not message.get("tool_calls"):
            raise DataError(f"messages[{n}] has content {said!r:.80}: must be a text")
        if message["role"] == "user" and not said:
            raise DataError(f"messages[{n}] has content {said!r}: must not be empty")
    return list(messages)
