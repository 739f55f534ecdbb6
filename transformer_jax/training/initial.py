"""Start a run from another model: a run's, whose parts that fit are taken over, or a published one.

A vocabulary may have grown by special tokens at its end, and a head may be new: what is there is
copied, row by row, and what is not is drawn afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.models.factory import init_params, merged
from transformer_jax.training.batch import Params
from transformer_jax.training.tasks.task import Tokenizers
from transformer_jax.values import value_class

if TYPE_CHECKING:
    from transformer_jax.config import ModelConfig
    from transformer_jax.pretrained.safetensors_folder import WeightFolder

TASK_FIELDS = frozenset(
    """
    vocab_size source_vocab_size max_len num_classes classes_of pooler pooler_reads
    masked_token_head logit_bias
    """.split()
)
"""Fields of a model that another task may change."""


@value_class
class StartModel:
    """Hold what a run starts from."""

    config: AnyModelConfig
    tokenizers: Tokenizers
    params: Callable[[bool], Params]
    """Loads the parameters, f32, of a looped stack or a scanned one."""
    labels: tuple[str, ...] | None = None
    """The classes of its head in order, where it is a classifier's and has names for them."""


def start_model(init_from: str) -> StartModel:
    """Find the model to start from; ConfigError or CheckpointError where it cannot be used."""
    # the tables of the published families are no part of a run that starts from nothing
    from transformer_jax.loading import base_params, is_run, published_tokenizer, with_targets
    from transformer_jax.pretrained.load import pretrained_config
    from transformer_jax.pretrained.weights import open_weights

    if not is_run(init_from):
        opened, config = open_weights(init_from), pretrained_config(init_from)
        tokenizer = with_targets(published_tokenizer(opened), opened, config)
        params = partial(base_params, init_from)
        return StartModel(config, Tokenizers(tokenizer), params, _published_labels(config, opened))
    folder = RunFolder(Path(init_from))
    run = folder.read_config()
    tokenizers = Tokenizers(folder.read_tokenizer(), folder.read_source_tokenizer())
    labels = run.task.labels if isinstance(run.task, ClassifyTask) else None
    return StartModel(run.model, tokenizers, partial(base_params, init_from), labels)


def _published_labels(config: ModelConfig, folder: WeightFolder) -> tuple[str, ...] | None:
    """Return the names of a published classifier's classes; None where it has none of its own."""
    names = folder.config.get("id2label")
    # BERT's head of two sentences says whether one follows the other: those are no classes
    if config.num_classes is None or config.masked_token_head or not isinstance(names, dict):
        return None
    found = [names.get(str(i)) for i in range(config.num_classes)]
    named = [name for name in found if isinstance(name, str)]
    # transformers writes LABEL_0, LABEL_1, ... where classes were given no names
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(found))
    return None if unnamed or len(named) < len(found) else tuple(named)


def check_model(model: AnyModelConfig, start: StartModel, init_from: str) -> None:
    """Raise ConfigError where a run's model is not the one that it starts from."""
    from transformer_jax.pretrained.config_json import OVERRIDABLE_FIELDS

    if type(model) is not type(start.config):
        raise ConfigError(f"model: {init_from} has another kind of model")
    for field in fields(start.config):
        one, two = getattr(model, field.name), getattr(start.config, field.name)
        if field.name not in OVERRIDABLE_FIELDS | TASK_FIELDS and one != two:
            raise ConfigError(f"{field.name} is {one!r}: {init_from} has {two!r}")


def start_params(
    config: TrainConfig, start: StartModel, given: Params, key: jax.Array
) -> tuple[Params, list[str]]:
    """Return the parameters that a run starts with, and a line about each part that changed.

    They are `given`, those of the model to start from, where these fit. Of a table that has grown,
    the rows that were there are kept. A head of the same classes is taken over, in the run's order
    of them; one of other classes is drawn afresh. ConfigError for a parameter of another shape.
    """
    model, params, task = config.model, given, config.task
    if isinstance(task, ClassifyTask) and "classifier" in params:
        params = _with_head_of(task.labels or (), start, params)
    # drawing parameters takes long: only what is missing needs them
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    if jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes):
        return params, []
    return merged(init_params(model, key), params)


def _with_head_of(labels: tuple[str, ...], start: StartModel, params: Params) -> Params:
    """Return parameters whose head is of these classes; without one where it is of others.

    BERT's head of two sentences says whether one follows the other, and is no classifier of texts.
    Classes without names have labels that are their numbers, or else the run's in their order.
    """
    head, names = params["classifier"], start.labels
    of_sentences = start.config.masked_token_head
    kernel = head["kernel"]
    assert not isinstance(kernel, Mapping)
    count = kernel.shape[-1]
    if of_sentences or count != len(labels) or (names is not None and {*names} != {*labels}):
        return {name: part for name, part in params.items() if name != "classifier"}
    # transformers calls classes LABEL_0, LABEL_1, ...; a file of labels may have bare numbers
    for form in ("LABEL_{}", "{}") if names is None else ():
        numbered = tuple(form.format(i) for i in range(count))
        names = numbered if {*numbered} == {*labels} else names
    if names is None or names == labels:
        return params
    order = np.array([names.index(label) for label in labels])
    return {**params, "classifier": jax.tree.map(lambda leaf: leaf[..., order], head)}
