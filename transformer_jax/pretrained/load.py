"""Loading of published checkpoints from Hugging Face folders and GGUF files.

A family (in `families`) defines the meaning of config.json and the location of each parameter. This
module converts tensors to parameters, one at a time. Code in a checkpoint is never executed.
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
    parameter_shapes,
    table_shapes,
    whole_path,
)
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.pytree import Params, PyTree

Shardings = jax.sharding.Sharding | Mapping[str, PyTree] | None
"""One sharding for all parameters, a nested mapping with a sharding for each, or None for JAX's
default."""


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
    """Load the config and the parameters of a published checkpoint, one tensor at a time.

    `build(config)` returns the model that uses these parameters.

    Args:
        path_or_id: a folder, a GGUF file (requires the package `gguf`), or the repository ID
            "ORG/NAME" of a model on the Hugging Face Hub (requires the package `huggingface_hub`).
        dtype: the dtype of the parameters and the computation: float32, bfloat16 or float16. None
            uses the dtype of the checkpoint, or float32 for quantized tensors in a GGUF file.
        sharding: a `jax.sharding.Sharding` for all parameters, or a tree of shardings that matches
            the parameters. None uses JAX's default.
        scan_layers: whether to stack the layers, for a model that uses `lax.scan`.
        max_len: the maximum sequence length in tokens. A RoPE scaling that depends on the sequence
            length (dynamic, longrope) is fixed for this length. None uses the maximum length of the
            checkpoint.
        revision: branch, tag, or commit of the repository; None uses the default branch.

    Raises:
        CheckpointError: if a tensor is missing, is unknown or has the wrong shape, or if a file
            cannot be read.
        ConfigError: if a key in config.json would change the model's outputs in an unsupported way,
            or if `dtype` or `max_len` is invalid.
        ValueError: if a weight overflows `dtype`, or if the structures of `sharding` and of the
            parameters differ.
    """
    as_dtype = None if dtype is None else _dtype_name(dtype)
    config, tensors = _opened(path_or_id, revision)
    if max_len is not None:
        if type(max_len) is not int or max_len < 1:
            raise ConfigError(f"max_len is {max_len!r}: must be a positive integer")
        if isinstance(config.positions, Learned) and max_len != config.max_len:
            rule = f"the table of learned positions has {config.max_len} rows"
            raise ConfigError(f"max_len is {max_len}: {rule}")
        # With a fixed length, the angles never change, so cached keys remain valid.
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
    """Load a checkpoint like `load_pretrained`, but to compute hidden states instead of logits.

    The output matrix may be missing from the files. In this case, the config ties it to the
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
    listed = table_shapes(shapes, {mapping.param for mapping in mappings})
    leaves = tensors.parameters(mappings, listed, as_dtype, config.dtype)
    leaves = _stacked(leaves, listed, scan_layers)
    shardings = flatten_dict(sharding, sep="/") if isinstance(sharding, Mapping) else sharding
    if isinstance(shardings, dict):
        paths = {whole_path(path, scanned=scan_layers)[0] for path in shapes}
        if wrong := sorted(shardings.keys() ^ paths):
            raise ValueError(f"sharding must match the parameters: they differ at {wrong[0]}")
    placed: dict[str, jax.Array] = {}
    for path, leaf in leaves:
        where = shardings[path] if isinstance(shardings, dict) else shardings
        placed[path] = jax.device_put(leaf, where)
        del leaf  # frees its memory before the next leaf is read
    return config, unflatten_dict(placed, sep="/")


def pretrained_config(path_or_id: str | Path, *, revision: str | None = None) -> ModelConfig:
    """Return the config that `load_pretrained` returns, without reading any tensor.

    Args:
        path_or_id: a folder, a GGUF file, or a Hugging Face Hub repository ID.
        revision: branch, tag, or commit of the repository; None uses the default branch.
    """
    config, tensors = _opened(path_or_id, revision)
    tensors.check_size(config)
    return dataclasses.replace(config, dtype=tensors.dtype(config))


def _opened(path_or_id: str | Path, revision: str | None) -> tuple[ModelConfig, CheckpointTensors]:
    folder = open_weights(path_or_id, revision=revision)
    tensors = CheckpointTensors(folder, family_of(folder.config, folder.where))
    return read_config(folder.config, tensors.names, folder.where), tensors


def _dtype_name(dtype: jax.typing.DTypeLike) -> DType:
    """Return the name of a dtype, for example "bfloat16" for `jnp.bfloat16`."""
    name: Any = dtype
    # Suppress NumPy's error for an invalid dtype; the error below lists the choices.
    with contextlib.suppress(TypeError):
        name = np.dtype(dtype).name
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}: must be one of {', '.join(map(repr, DTYPES))}")
    return name


def _stacked(
    leaves: Iterable[tuple[str, np.ndarray]], shapes: Shapes, scanned: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each parameter as soon as the last of its layers and experts has been read."""
    # A stack is allocated when its first layer is read; its size is determined from the paths.
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
        # NumPy would cast silently on assignment.
        if leaf.dtype != buffers[whole].dtype:
            rule = f"but earlier layers are {buffers[whole].dtype}: pass a dtype to stack them"
            raise CheckpointError(f"{path} is {leaf.dtype}, {rule}")
        buffers[whole][index] = leaf
        left[whole] -= 1
        if not left[whole]:
            yield whole, buffers.pop(whole)
