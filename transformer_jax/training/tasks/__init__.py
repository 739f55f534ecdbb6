"""Training tasks, which convert files to batches and evaluate models.

`load_task` reads the data that a config specifies. `training.loop` trains every task in the same
way, through the interface `task.TrainingTask`.
"""

from __future__ import annotations

import importlib.util

from transformer_jax.config import TrainConfig
from transformer_jax.config.fields import fail
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
)
from transformer_jax.corpus.folder import prepared_folders
from transformer_jax.training.tasks.chat import Conversations
from transformer_jax.training.tasks.classify import Classes
from transformer_jax.training.tasks.language import LanguageDocuments, LanguageWindows
from transformer_jax.training.tasks.masked import MaskedWindows
from transformer_jax.training.tasks.metrics import compare_texts, edit_distance
from transformer_jax.training.tasks.pairs import Pairs
from transformer_jax.training.tasks.preferences import Preferences
from transformer_jax.training.tasks.task import LoadsExamples, Tokenizers, TrainingTask

__all__ = ["Tokenizers", "TrainingTask", "compare_texts", "edit_distance", "load_task"]


def load_task(
    config: TrainConfig, tokenizers: Tokenizers | None = None, vocab_size: int | None = None
) -> TrainingTask:
    """Read the data of a config's task, and create its tokenizers unless they are passed.

    Args:
        config: config of the run.
        tokenizers: tokenizers of the run. None means that they are created from the data.
        vocab_size: a vocabulary size larger than the tokenizer's. None means the tokenizer's.

    Raises:
        ConfigError: If the config does not match the data.
        DataError: If the data cannot be used.
    """
    if isinstance(config.task, LoadsExamples):
        task = config.task.load(config, tokenizers, vocab_size)
        if not isinstance(task, TrainingTask):
            rule = "must be a TrainingTask"
            fail(
                "task", config.task, f"load returns an object of type {type(task).__name__}: {rule}"
            )
        loaded_by = getattr(config.task, "loaded_by", None)
        if (task.learner is None) != (loaded_by is None):
            rule = "must be set for a task with a learner, and only then"
            fail("task", config.task, f"loaded_by is {loaded_by!r}: {rule}")
        return task
    folders, weights = prepared_folders(config.data), config.data_weights
    if weights is not None and len(weights) != len(folders):
        rule = f"must be one weight for each of the {len(folders)} prepared folders in data"
        fail("data_weights", weights, rule)
    if not folders and getattr(config.task, "documents", None) == "prepared":
        fail("documents", "prepared", f"data is {config.data!r}, which is not a prepared folder")
    if folders:
        if importlib.util.find_spec("grain") is None:
            fail("data", config.data, "reading prepared folders needs grain: run pip install grain")
        from transformer_jax.training.tasks.prepared import PreparedText  # imports grain

        return PreparedText(config, folders, tokenizers, vocab_size)
    match config.task:
        case LanguageTask(documents=None):
            return LanguageWindows(config, tokenizers, vocab_size)
        case LanguageTask():
            return LanguageDocuments(config, tokenizers, vocab_size)
        case MaskedTask():
            return MaskedWindows(config, tokenizers, vocab_size)
        case ClassifyTask():
            return Classes(config, tokenizers, vocab_size)
        case ChatTask():
            return Conversations(config, tokenizers, vocab_size)
        case PreferenceTask():
            return Preferences(config, tokenizers, vocab_size)
        case Seq2SeqTask() | PrefixTask():
            return Pairs(config, tokenizers, vocab_size)
    fail("task", config.task, "must have a method `load` that returns its examples")
