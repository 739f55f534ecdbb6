"""Folders of MXFP4 weights (the format of gpt-oss), which appear as folders of bfloat16 weights.

A matrix NAME is stored as two uint8 tensors, NAME_blocks [..., rows, G, 16] and NAME_scales [...,
rows, G]. Each byte of a block contains two 4-bit numbers, the lower half first. Each scale byte
applies to 32 numbers, as the factor 2^(byte - 127) (Open Compute Project, OCP Microscaling Formats,
1.0). Each product is exact in bfloat16. A row contains the weights of one output, so the result is
transposed: [..., 32 G, rows].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from transformer_jax.pretrained.safetensors_folder import (
    CheckpointError,
    TensorInfo,
    WeightFolder,
)
from transformer_jax.untrusted_files import shown
from transformer_jax.values import value_class

BLOCKS, SCALES = "_blocks", "_scales"
LARGEST = 252
"""Byte that encodes the largest scale whose product with 6 is finite in bfloat16."""
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_HALF, -_HALF])
_PAIRS = np.stack([_NUMBERS[np.arange(256) % 16], _NUMBERS[np.arange(256) // 16]], axis=-1)
"""The two numbers encoded by each byte."""


@value_class
class Mxfp4Folder(WeightFolder):
    """View of a folder whose MXFP4 matrices appear as bfloat16 tensors."""

    stored: WeightFolder = field(repr=False)
    """The underlying folder."""

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors one at a time, in the order of `names`."""
        return map(self._read_one, dict.fromkeys(names))

    def _read_one(self, name: str) -> tuple[str, np.ndarray]:
        if name in self.stored.tensors or name not in self.tensors:
            return name, self.stored.read(name)
        blocks, scales = self.stored.read(name + BLOCKS), self.stored.read(name + SCALES)
        if (largest := scales.max(initial=0)) > LARGEST:
            rule = f"must be at most {LARGEST}, or a product overflows bfloat16"
            raise CheckpointError(f"{self.path}: {shown(name + SCALES)} has {largest}: {rule}")
        return name, dequantize(blocks, scales)


def open_mxfp4(folder: WeightFolder) -> WeightFolder:
    """Wrap a folder in `Mxfp4Folder` if its config.json specifies mxfp4."""
    quantization = folder.config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
        return folder
    config = {name: value for name, value in folder.config.items() if name != "quantization_config"}
    tensors = dict[str, TensorInfo]()
    for name, info in folder.tensors.items():
        if not name.endswith((BLOCKS, SCALES)):
            tensors[name] = info
        elif name.endswith(BLOCKS):
            tensors[name.removesuffix(BLOCKS)] = _matrix(folder, name)
        elif name.removesuffix(SCALES) + BLOCKS not in folder.tensors:
            raise CheckpointError(f"{folder.path}: {shown(name)} has no matching {BLOCKS} tensor")
    return Mxfp4Folder(folder.path, config, MappingProxyType(tensors), folder.stamps, folder)


def dequantize(
    blocks: np.ndarray,  # u8[..., rows, G, 16]
    scales: np.ndarray,  # u8[..., rows, G]
) -> np.ndarray:  # bf16[..., 32 G, rows]
    """Return the values of a matrix or of a stack that has one matrix per expert."""
    if blocks.ndim > 3:  # one expert at a time, because float32 values are twice as large
        return np.stack([dequantize(*one) for one in zip(blocks, scales, strict=True)])
    scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    numbers = (_PAIRS[blocks] * scale[..., None, None]).astype(jnp.bfloat16)
    return np.ascontiguousarray(numbers.reshape(len(blocks), -1).T)


def _matrix(folder: WeightFolder, blocks: str) -> TensorInfo:
    """Describe the matrix that two tensors store; raise CheckpointError if they do not match."""
    name = blocks.removesuffix(BLOCKS)
    if name in folder.tensors:
        raise CheckpointError(f"{folder.path}: {shown(name)} appears twice, once as {BLOCKS}")
    for part in (blocks, name + SCALES):
        if part not in folder.tensors:
            raise CheckpointError(f"{folder.path}: tensor {part} is missing")
        if (dtype := folder.tensors[part].dtype) != "uint8":
            raise CheckpointError(f"{folder.path}: {shown(part)} is {dtype}: must be uint8")
    shape, scales = (folder.tensors[part].shape for part in (blocks, name + SCALES))
    if len(shape) < 3 or shape[-1] != 16 or shape[:-1] != scales:
        rule = "must be [..., rows, G, 16] and [..., rows, G]"
        found = f"has {BLOCKS} {list(shape)} and {SCALES} {list(scales)}"
        raise CheckpointError(f"{folder.path}: {shown(name)} {found}: {rule}")
    *lead, rows, groups, _ = shape
    return TensorInfo(folder.tensors[blocks].file, "bfloat16", (*lead, 32 * groups, rows))
