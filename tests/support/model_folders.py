"""Model folders: comparison with a config and parameters, and changed copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from transformer_jax.pretrained.load import load_pretrained


def changed(folder: Path, target: Path, change: Callable[[Any], Any] = dict, **keys: Any) -> Path:
    """Copy a folder, apply `change` to its tensors, and replace keys of config.json.

    The value `...` removes a key.
    """
    target.mkdir(exist_ok=True)
    content = json.loads((folder / "config.json").read_text()) | keys
    content = {key: value for key, value in content.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, target / "model.safetensors")
    return target


def assert_same_bits(got: Any, want: Any) -> None:
    got, want = (jax.tree_util.tree_leaves_with_path(x) for x in (got, want))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, one), (_, two) in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), path
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), path


def assert_loads(folder: Path, config: Any, params: Any) -> None:
    """Check that a folder loads as this config and, bit for bit, these parameters."""
    found, loaded = load_pretrained(folder)
    assert found == config
    assert_same_bits(loaded, params)
