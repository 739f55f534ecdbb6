"""Initial parameters for a run that starts from another run or from a published model.

The vocabulary can have new special tokens at its end, and the head can be new. Existing rows are
copied, and new rows are initialized randomly.
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
"""Model fields that can differ from those of the initial model, because they depend on the task."""


@value_class
class StartModel:
    """Initial model of a run."""

    config: AnyModelConfig
    tokenizers: Tokenizers
    params: Callable[[bool], Params]
    """Function that takes the run's `scan_layers` and loads the f32 parameters."""
    labels: tuple[str, ...] | None = None
    """Class names in the order of the head's outputs, or None if there are no named classes."""


def start_model(init_from: str) -> StartModel:
    """Open the initial model of a run.

    Raises ConfigError or CheckpointError if the model cannot be used.
    """
    # imported here because a run from scratch does not need the tables of published model families
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
    """Return the class names of a published classifier, or None if its classes are unnamed."""
    names = folder.config.get("id2label")
    # the two outputs of BERT's next-sentence head are not text classes
    if config.num_classes is None or config.masked_token_head or not isinstance(names, dict):
        return None
    found = [names.get(str(i)) for i in range(config.num_classes)]
    named = [name for name in found if isinstance(name, str)]
    # the transformers library calls unnamed classes LABEL_0, LABEL_1, ...
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(found))
    return None if unnamed or len(named) < len(found) else tuple(named)


def check_model(model: AnyModelConfig, start: StartModel, init_from: str) -> None:
    """Raise ConfigError if the run's model is incompatible with its initial model."""
    from transformer_jax.pretrained.config_json import OVERRIDABLE_FIELDS

    if type(model) is not type(start.config):
        kinds = type(model).__name__, type(start.config).__name__
        raise ConfigError(
            f"model is of type {kinds[0]}, but that of {init_from} is of type {kinds[1]}"
        )
    for field in fields(start.config):
        one, two = getattr(model, field.name), getattr(start.config, field.name)
        if field.name not in OVERRIDABLE_FIELDS | TASK_FIELDS and one != two:
            raise ConfigError(f"{field.name} is {one!r}, but {init_from} has {two!r}")


def start_params(
    config: TrainConfig, start: StartModel, loaded: Params, key: jax.Array
) -> tuple[Params, list[str]]:
    """Return the initial parameters of a run and a message for each part that has changed.

    Parameters in `loaded` are used if their shapes match. A table that has grown keeps its existing
    rows. A head with the same classes is kept and reordered. Any other head is initialized
    randomly. Raises ConfigError if any other shape differs.
    """
    model, params, task = config.model, loaded, config.task
    if isinstance(task, ClassifyTask) and "classifier" in params:
        labels, names, head = task.labels or (), start.labels, params["classifier"]
        kernel = head["kernel"]
        assert not isinstance(kernel, Mapping)
        count = kernel.shape[-1]
        differs = count != len(labels) or (names is not None and {*names} != {*labels})
        # the two outputs of BERT's next-sentence head are not text classes
        if differs or start.config.masked_token_head:
            params = {name: part for name, part in params.items() if name != "classifier"}
        else:
            # If the head's classes are unnamed, numeric labels select classes by number (class 0 is
            # LABEL_0, as in transformers, or 0), and other labels are assigned in order.
            for form in ("LABEL_{}", "{}") if names is None else ():
                numbered = tuple(form.format(i) for i in range(count))
                names = numbered if {*numbered} == {*labels} else names
            if names is not None and names != labels:
                order = np.array([names.index(label) for label in labels])
                head = jax.tree.map(lambda leaf: leaf[..., order], head)
                params = {**params, "classifier": head}
    # random initialization is slow, so it runs only if parameters are missing
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    if jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes):
        return params, []
    return merged(init_params(model, key), params)
