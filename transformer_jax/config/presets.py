"""Published and recommended configs, which are selected by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import ConfigError, FieldValue, nearest
from transformer_jax.config.kinds import kinds_of, names_of
from transformer_jax.config.model import ModelConfig
from transformer_jax.config.positions import Learned, Rope, Sinusoidal
from transformer_jax.config.tasks import (
    ClassifyTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    Task,
    usual_task,
)
from transformer_jax.config.train import TrainConfig

# arguments of `ModelConfig`, which is built when a preset is selected
_Arguments = dict[str, Any]
_GPT2: _Arguments = dict(
    vocab_size=50257, d_model=768, num_layers=12, num_heads=12, max_len=1024, dropout=0.1,
    attention_dropout=0.1,
)  # fmt: skip
_BERT: _Arguments = dict(
    kind="encoder", vocab_size=30522, d_model=768, num_layers=12, num_heads=12, max_len=512,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", logit_bias=True,
    type_vocab_size=2, masked_token_head=True, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_SMALL_DECODER: _Arguments = dict(
    vocab_size=65, d_model=128, num_layers=4, num_heads=4, max_len=64, use_bias=False,
    positions=Rope(), init_std=0.06,  # trains faster (benchmarks/NOTES.md)
)  # fmt: skip

_MODELS: dict[str, _Arguments] = {
    "tiny": dict(d_model=64, num_layers=2, num_heads=4, max_len=64),
    "shakespeare-cpu": _SMALL_DECODER,
    "shakespeare-gpu": _SMALL_DECODER | dict(
        d_model=384, num_layers=6, num_heads=6, max_len=256, positions=Learned(), init_std=0.02,
        dropout=0.2, attention_dropout=0.2,
    ),
    "transformer-base": dict(
        kind="encoder-decoder", vocab_size=37000, d_model=512, num_layers=6, num_heads=8,
        d_ff=2048, max_len=512, positions=Sinusoidal(), norm_order="post", activation="relu",
        scale_embeddings=True, dropout=0.1,
    ),
    "bert-base": _BERT,
    "bert-large": _BERT | dict(d_model=1024, num_layers=24, num_heads=16),
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2 | dict(d_model=1024, num_layers=24, num_heads=16),
    "gpt2-large": _GPT2 | dict(d_model=1280, num_layers=36, num_heads=20),
    "gpt2-xl": _GPT2 | dict(d_model=1600, num_layers=48, num_heads=25),
    "llama3-8b": dict(
        vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, d_ff=14336,
        max_len=8192, positions=Rope(base=500_000.0), norm="rmsnorm",
        activation="silu", glu=True, use_bias=False, tie_embeddings=False, dtype="bfloat16",
    ),
}  # fmt: skip

# nanoGPT trains its small character model with a learning rate of 1e-3; 3e-3 lowers the loss by 0.1
# nats
_TRAINING: dict[str, dict[str, FieldValue]] = {
    "default": dict(learning_rate=3e-3),
    "tiny": dict(steps=200, eval_every=100, checkpoint_every=100),
    "shakespeare-cpu": dict(data="shakespeare", learning_rate=3e-3),
    "shakespeare-gpu": dict(data="shakespeare", steps=5000, batch_size=64),
}

PRESETS: tuple[str, ...] = tuple(_MODELS)


def _lookup(name: str) -> ModelConfig:
    _check_name("preset", name, list(_MODELS))
    return ModelConfig(**_MODELS[name])


def _check_name(kind: str, name: str, names: list[str]) -> None:
    if name not in names:
        rule = f"must be one of {', '.join(names)}{nearest(name, names)}"
        raise ConfigError(f"{kind} is {name!r}: {rule}")


def preset(name: str, **changes: FieldValue) -> ModelConfig:
    """Return a published or recommended config by name.

    The sizes are from Vaswani et al. 2017 (transformer-base), Devlin et al. 2019 (BERT), Radford et
    al. 2019 (GPT-2), Dubey et al. 2024 (Llama 3) and nanoGPT's recipes for characters
    (shakespeare-*).

    Args:
        name: one of `PRESETS`.
        **changes: fields of `ModelConfig` to replace.

    Raises:
        ConfigError: if there is no such preset or field, or the fields contradict each other.
    """
    config = _lookup(name)
    for field in changes:
        _check_name("field", field, [f.name for f in dataclasses.fields(config)])
    return dataclasses.replace(config, **changes)


def train_preset(name: str | None = None, **changes: FieldValue) -> TrainConfig:
    """Return the training recipe of a preset.

    Args:
        name: one of `PRESETS`; None selects the default run, which trains on Python's
            documentation.
        **changes: fields of `TrainConfig` to replace. The default task is the usual task for the
            kind of model.

    Raises:
        ConfigError: if there is no such preset or field, or the fields contradict each other.
    """
    recipe: dict[str, FieldValue] = _TRAINING.get("default" if name is None else name, {})
    model = _lookup("shakespeare-cpu" if name is None else name)
    for field in changes:
        _check_name("field", field, [f.name for f in dataclasses.fields(TrainConfig)])
    task = changes.get("task", usual_task(model))
    return TrainConfig(**{"model": _fitted(model, task), "task": task, **recipe, **changes})


def _fitted(model: AnyModelConfig, task: Task | str | None) -> AnyModelConfig:
    """Return the model with only the heads and the dropout that are suitable for the task."""
    task = kinds_of(Task)[task]() if isinstance(task, str) and task in names_of(Task) else task
    # other tasks do not change the heads of a published model
    if isinstance(task, MaskedTask | ClassifyTask | PreferenceTask):
        return task.fit_model(model)
    return model


def task_recipe(task: Task, architecture: str = "transformer") -> TrainConfig:
    """Return the usual run of a task with a small model of a kind, which is named as in `--model`.

    Raises ConfigError if no model of that kind can be trained on the task.
    """
    _check_name("model", architecture, list(names_of(AnyModelConfig)))
    kind = kinds_of(AnyModelConfig)[architecture]
    assert issubclass(kind, AnyModelConfig)
    models = (kind.usual(architecture, shape) for shape in task.shapes)
    fitted = (task.fit_model(model) for model in models if model is not None)
    model = next((model for model in fitted if learns(task, model)), None)
    if model is None:
        shapes = " or ".join(task.shapes)
        needed = "a transformer" if task.reads_numbers else "another kind of model"
        rule = f"task {task.kind!r} needs {needed}, of shape {shapes}"
        raise ConfigError(f"model is {architecture!r}: {rule}")
    if isinstance(task, LanguageTask) and architecture == "transformer":
        return train_preset(None, task=task)
    recipe: dict[str, FieldValue] = dict(learning_rate=2e-3, batch_size=32, sample_tokens=200)
    recipe |= task.recipe if model.supports("gradients") else dict(steps=1)
    return TrainConfig(task=task, model=task.usual_model(model), **recipe)


def learns(task: Task, model: AnyModelConfig) -> bool:
    """Whether a model can be trained on a task."""
    try:
        task.check_model(model)
    except ConfigError:
        return False
    return True


def fine_tuning(model: AnyModelConfig, init_from: str, task: Task | None = None) -> TrainConfig:
    """Return a training recipe that fine-tunes a model.

    Args:
        model: the config of the model.
        init_from: the run folder of the model, or the folder or repository ID of a published model.
        task: the task to train for; None selects language modeling.
    """
    return TrainConfig(
        task=LanguageTask() if task is None else task,
        model=_fitted(model, task), init_from=init_from, tokenizer="pretrained",
        context=min(model.max_len or 64, 512), batch_size=8, steps=500, learning_rate=5e-5,
        min_learning_rate=5e-6,
    )  # fmt: skip
