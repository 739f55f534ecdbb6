"""Untrained text models for tests, each built on first use."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np

import transformer_jax as tj
from transformer_jax.config import tasks
from transformer_jax.loading import TextModel
from transformer_jax.models.factory import build
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.special import end_ids, with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer

LETTERS = CharTokenizer("abcdefghijk")
CONFIG = tj.ModelConfig(
    vocab_size=11, d_model=8, num_layers=2, num_heads=2, max_len=17, init_std=0.7
)
KEY = jax.random.key(5)
TURNS = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "feed"}]


@functools.cache
def params_of(config):
    return tj.init_params(config, jax.random.key(3))


def model_of(config, tokenizer=LETTERS, **fields) -> LanguageModel:
    return LanguageModel(TextModel(config, params_of(config), tokenizer, **fields), "here")


def run_of(task, kind="decoder", names=(), base=LETTERS, **fields) -> LanguageModel:
    """An untrained model, configured as a run of the task would configure it."""
    tokenizer = with_special_tokens(base, names) if names else base
    config = task.fit_model(replace(CONFIG, kind=kind, vocab_size=tokenizer.vocab_size))
    if isinstance(task, tasks.ClassifyTask):
        config = replace(config, num_classes=len(task.labels))
    run = tj.TrainConfig(model=config, task=task, context=config.max_len, batch_size=2)
    return model_of(config, tokenizer, run=run, stop_ids=end_ids(tokenizer), **fields)


def logits_of(model: LanguageModel, ids, edit=None) -> np.ndarray:
    module = build(model.config)
    jitted = jax.jit((module if edit is None else module.edited(edit)).apply)
    return np.asarray(jitted({"params": model.params}, np.array([ids]))[0], np.float64)[0]


@functools.cache
def _whole_row(config):
    return jax.jit(lambda params, row: build(config).apply({"params": params}, row)[0])


def logits_after(model: LanguageModel, ids) -> np.ndarray:
    """Logits after each id of one row. Padding comes last, where no id attends to it."""
    row = np.zeros((1, CONFIG.max_len), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(_whole_row(model.config)(model.params, row), np.float64)[0, : len(ids)]


def nats(logits: np.ndarray, labels) -> np.ndarray:
    """-log softmax(logits) of the labels, in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_p[np.arange(len(labels)), labels]


@functools.cache
def plain() -> LanguageModel:
    return model_of(CONFIG)


@functools.cache
def pairs() -> LanguageModel:
    return run_of(tasks.Seq2SeqTask(beams=1), "encoder-decoder", ("bos", "eos"))


@functools.cache
def prefix() -> LanguageModel:
    return run_of(tasks.PrefixTask(beams=1), names=("sep", "eos"))


@functools.cache
def masked() -> LanguageModel:
    return run_of(tasks.MaskedTask(), "encoder", ("mask",))


@functools.cache
def classes() -> LanguageModel:
    return run_of(tasks.ClassifyTask(labels=("x", "y")), "encoder", ("cls",))


@functools.cache
def chat() -> LanguageModel:
    return run_of(tasks.ChatTask(), names=("system", "user", "assistant", "eos"))


@functools.cache
def preferred() -> LanguageModel:
    return run_of(tasks.PreferenceTask(messages=False), names=("eos",))


def vectors() -> LanguageModel:
    """A published encoder without parameters; tests only check that it refuses to write text."""
    return LanguageModel(TextModel(replace(CONFIG, kind="encoder"), {}, LETTERS), "here")
