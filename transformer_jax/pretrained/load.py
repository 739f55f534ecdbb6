"""Load published checkpoints: a folder of config.json and safetensors, as Hugging Face's, or GGUF.

A family (`families`) says what config.json means and where each parameter lies. Here the tensors of
the files become parameters, one at a time. Nothing of a checkpoint is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import ConfigError, DType, Learned, ModelConfig, Rope
from transformer_jax.config.keywords import known_keywords
from transformer_jax.pretrained.config_json import family_of, read_config
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.tensors import (
    DTYPES,
    CheckpointTensors,
    Shapes,
    in_files,
    parameter_shapes,
    whole_path,
)
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.pytree import Params, PyTree

Shardings = jax.sharding.Sharding | Mapping[str, PyTree] | None
"""One sharding for all parameters, a nested mapping with one for each, or JAX's default."""


@known_keywords
def load_pretrained(
    path_or_id: str | Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Shardings = None,
    scan_layers: bool = False,
    max_len: int | None = None,
    revision: str | None = None,
) -> tuple[ModelConfig, Params]:
    """Load the config and the parameters of a published checkpoint; `build(config)` runs them.

    Tensors are read one at a time.

    Args:
        path_or_id: a folder, a GGUF file (needs the package `gguf`), or a repository of the Hugging
            Face hub, "ORG/NAME" (needs the package `huggingface_hub`).
        dtype: float32, bfloat16 or float16, in which parameters are held and the model computes;
            None is the file's, and float32 for quantised tensors of a GGUF file.
        sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them like the
            parameters; None is JAX's default.
        scan_layers: stack the layers, for a model under `lax.scan`.
        max_len: the longest sequence, in tokens; None is the file's. A rotation that depends on the
            length of the text (dynamic, longrope) is then fixed for that length.
        revision: of the repository, a branch, tag or commit; None is its default.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of another shape, or a file cannot be
            read.
        ConfigError: if a key of config.json would change the numbers and is not supported, or
            `dtype` or `max_len` cannot be.
        ValueError: if `dtype` has no room for a weight of a tensor, or `sharding` differs from the
            parameters.
    """
    as_dtype = None if dtype is None else _dtype_name(dtype)
    config, tensors = _opened(path_or_id, revision)
    if max_len is not None:
        if type(max_len) is not int or max_len < 1:
            raise ConfigError(f"max_len is {max_len!r}: must be a positive integer")
        if isinstance(config.positions, Learned) and max_len != config.max_len:
            rule = f"the table of positions has {config.max_len}"
            raise ConfigError(f"max_len is {max_len}: {rule}")
        # These two stretch by the length of the text; with a fixed length the angles never change,
        # so that keys in a cache stay as they are.
        positions = config.positions
        if isinstance(positions, Rope) and positions.scaling in ("dynamic", "longrope"):
            positions = dataclasses.replace(positions, length=max_len)
        config = dataclasses.replace(config, max_len=max_len, positions=positions)
    return _loaded(config, tensors, as_dtype, sharding, scan_layers)


def load_hidden(
    path_or_id: str | Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    revision: str | None = None,
) -> tuple[ModelConfig, Params]:
    """Load a checkpoint as `load_pretrained` does, for its hidden states and not for logits.

    An output matrix that the files leave out is not asked for; the config then ties it to the
    embeddings.
    """
    as_dtype = None if dtype is None else _dtype_name(dtype)
    config, tensors = _opened(path_or_id, revision)
    if not config.tie_embeddings and tensors.without_output(config):
        config = dataclasses.replace(config, tie_embeddings=True)
    return _loaded(config, tensors, as_dtype)


def _loaded(
    config: ModelConfig,
    tensors: CheckpointTensors,
    as_dtype: DType | None,
    sharding: Shardings = None,
    scan_layers: bool = False,
) -> tuple[ModelConfig, Params]:
    tensors.check_size(config)
    config = dataclasses.replace(
        config, scan_layers=scan_layers, dtype=as_dtype or tensors.dtype(config)
    )
    shapes = parameter_shapes(config)
    mappings = tensors.mappings(config, shapes)
    listed = in_files(shapes, {mapping.param for mapping in mappings})
    leaves = tensors.parameters(mappings, listed, as_dtype, config.dtype)
    leaves = _stacked(leaves, listed, scan_layers)
    shardings = flatten_dict(sharding, sep="/") if isinstance(sharding, Mapping) else sharding
    if isinstance(shardings, dict):
        paths = {whole_path(path, scanned=scan_layers)[0] for path in shapes}
        if wrong := sorted(shardings.keys() ^ paths):
            raise ValueError(f"sharding and parameters differ at {wrong[0]}")
    placed: dict[str, jax.Array] = {}
    for path, leaf in leaves:
        where = shardings[path] if isinstance(shardings, dict) else shardings
        placed[path] = jax.device_put(leaf, where)
        del leaf  # or it would be in memory beside the next
    return config, unflatten_dict(placed, sep="/")


def pretrained_config(path_or_id: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Return the config that `load_pretrained` gives; no tensor is read.

    Args:
        path_or_id: a folder, a GGUF file, or a repository of the Hugging Face hub.
        revision: of the repository, a branch, tag or commit; None is its default.
    """
    config, tensors = _opened(path_or_id, revision)
    tensors.check_size(config)
    return dataclasses.replace(config, dtype=tensors.dtype(config))


def _opened(path_or_id: str | Path, revision: str | None) -> tuple[ModelConfig, CheckpointTensors]:
    folder = open_weights(path_or_id, revision=revision)
    tensors = CheckpointTensors(folder, family_of(folder.config, folder.where))
    return read_config(folder.config, tensors.names, folder.where), tensors


def _dtype_name(dtype: jax.typing.DTypeLike) -> DType:
    """Return the name of a dtype: "bfloat16" for that text, `jnp.bfloat16` or an array's dtype."""
    name: Any = dtype
    # NumPy raises for what is no dtype; the error below names the choices.
    with contextlib.suppress(TypeError):
        name = np.dtype(dtype).name
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}: must be one of {', '.join(map(repr, DTYPES))}")
    return name


def _stacked(
    leaves: Iterable[tuple[str, np.ndarray]], shapes: Shapes, scanned: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield parameters, each as soon as the last of its layers and experts was read."""
    # A stack is allocated before its last layer is read: the paths say how large it is.
    sizes: dict[str, tuple[int, ...]] = {}
    for path in shapes:
        whole, index = whole_path(path, scanned=scanned)
        last = zip(sizes.get(whole, index), index, strict=True)
        sizes[whole] = tuple(max(i, j) for i, j in last)
    buffers: dict[str, np.ndarray] = {}
    left: dict[str, int] = {}
    for path, leaf in leaves:
        whole, index = whole_path(path, scanned=scanned)
        if not index:
            yield path, leaf
            continue
        if whole not in buffers:
            lead = tuple(last + 1 for last in sizes[whole])
            buffers[whole], left[whole] = np.empty((*lead, *leaf.shape), leaf.dtype), prod(lead)
        # NumPy would cast on assignment, silently.
        if leaf.dtype != buffers[whole].dtype:
            rule = f"those before it are {buffers[whole].dtype}: give a dtype to stack them"
            raise CheckpointError(f"{path} is {leaf.dtype}, {rule}")
        buffers[whole][index] = leaf
        left[whole] -= 1
        if not left[whole]:
            yield whole, buffers.pop(whole)
