"""Folders of gpt-oss with experts in MXFP4."""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.pretrained.test_family_folders import GPT_OSS
from tests.support.drawn import drawn
from tests.support.model_folders import assert_loads
from transformer_jax.config import ConfigError
from transformer_jax.pretrained.config_json import read_config
from transformer_jax.pretrained.load import load_pretrained, pretrained_config
from transformer_jax.pretrained.mxfp4 import dequantize
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained

MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
PREFIX = "model.layers.0.mlp.experts."
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def number(bits, scale):
    """Return the value of 4 bits and a scale byte, from the definition of the format."""
    return (-1) ** (bits >> 3) * NUMBERS[bits & 7] * 2.0 ** (scale - 127)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in MXFP4, with the dequantised matrices of each expert."""
    path = tmp_path_factory.mktemp("gpt_oss")
    config = read_config(GPT_OSS, (), "config.json")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), drawn(config))
    save_pretrained(path / "whole", config, params)
    tensors = load_file(path / "whole" / "model.safetensors")
    wanted = {}
    for name, rows, groups in (("gate_up_proj", 64, 2), ("down_proj", 64, 1)):
        blocks = rng.integers(0, 256, (30, rows, groups, 16), dtype=np.uint8)
        scales = rng.integers(118, 131, (30, rows, groups), dtype=np.uint8)
        del tensors[PREFIX + name]
        tensors |= {PREFIX + name + "_blocks": blocks, PREFIX + name + "_scales": scales}
        wanted[name] = np.zeros((30, 32 * groups, rows))
        for e, row, group, at in np.ndindex(blocks.shape):
            byte, scale = int(blocks[e, row, group, at]), int(scales[e, row, group])
            wanted[name][e, 32 * group + 2 * at, row] = number(byte & 15, scale)
            wanted[name][e, 32 * group + 2 * at + 1, row] = number(byte >> 4, scale)
    (path / "mxfp4").mkdir()
    save_file(tensors, path / "mxfp4" / "model.safetensors")
    content = json.dumps(GPT_OSS | dict(quantization_config=MXFP4))
    (path / "mxfp4" / "config.json").write_text(content)
    return path, config, wanted


def test_mxfp4_experts_match_raw_bytes(folders):
    path, config, wanted = folders
    loaded, params = load_pretrained(path / "mxfp4")
    assert loaded == replace(config, dtype="bfloat16") == pretrained_config(path / "mxfp4")
    experts = params["decoder"]["block_0"]["feed_forward"]
    assert {experts[name]["kernel"].dtype for name in ("gate", "up", "down")} == {
        jnp.dtype("bfloat16")
    }
    np.testing.assert_array_equal(experts["gate"]["kernel"], wanted["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(experts["up"]["kernel"], wanted["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(experts["down"]["kernel"], wanted["down_proj"])
    _, whole = load_pretrained(path / "whole")
    chex.assert_trees_all_equal(params["embed"], whole["embed"])


def test_mxfp4_is_saved_as_bfloat16(folders, tmp_path):
    path, _, wanted = folders
    config, params = load_pretrained(path / "mxfp4")
    save_pretrained(tmp_path / "again", config, params, like=path / "mxfp4")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    np.testing.assert_array_equal(tensors[PREFIX + "gate_up_proj"], wanted["gate_up_proj"])
    assert_loads(tmp_path / "again", config, params)


@pytest.mark.parametrize("scale", [0, 1, 127, 252])
def test_mxfp4_values_are_decoded_exactly(scale):
    blocks = np.arange(256, dtype=np.uint8).reshape(4, 4, 16)
    found = dequantize(blocks, np.full((4, 4), scale, np.uint8))
    wanted = [[number(int(b) >> shift & 15, scale) for shift in (0, 4)] for b in blocks.ravel()]
    np.testing.assert_array_equal(found.T.ravel().astype(np.float64), np.ravel(wanted))


def changed(folder, to, **tensors):
    """Copy a folder with changed tensors of the down projection; None omits a tensor."""
    weights = load_file(folder / "mxfp4" / "model.safetensors")
    for name, change in tensors.items():
        tensor = weights.pop(PREFIX + "down_proj" + name)
        if change is not None:
            weights |= change(tensor)
    to.mkdir()
    save_file(weights, to / "model.safetensors")
    content = GPT_OSS | dict(quantization_config=MXFP4)
    (to / "config.json").write_text(json.dumps(content))


def renamed(end, change):
    return lambda tensor: {PREFIX + "down_proj" + end: np.ascontiguousarray(change(tensor))}


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        (dict(_scales=None), "tensor model.layers.0.mlp.experts.down_proj_scales is missing"),
        (dict(_blocks=None), "down_proj_scales' has no matching _blocks"),
        (dict(_blocks=renamed("_blocks", lambda x: x.astype(np.int8))), "is int8: must be uint8"),
        (dict(_blocks=renamed("_blocks", lambda x: x[..., :8])),
         r"_blocks \[30, 64, 1, 8\] and _scales \[30, 64, 1\]: must be \[..., rows, G, 16\]"),
        (dict(_scales=renamed("_scales", lambda x: x[:, :1])),
         r"_blocks \[30, 64, 1, 16\] and _scales \[30, 1, 1\]: must be"),
        ({part: renamed(part, lambda x: x[:, :32]) for part in ("_blocks", "_scales")},
         r"has shape \[30, 32, 32\]: config.json requires \[30, 32, 64\]"),
        (dict(_scales=renamed("_scales", lambda x: np.full_like(x, 255))),
         "down_proj_scales' has 255: must be at most 252"),
    ],
)  # fmt: skip
def test_error_names_invalid_mxfp4_tensor(folders, tmp_path, tensors, rule):
    changed(folders[0], tmp_path / "m", **tensors)
    with pytest.raises(CheckpointError, match=rule):
        load_pretrained(tmp_path / "m")


def test_error_names_duplicate_matrix(folders, tmp_path):
    changed(folders[0], tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file) | {PREFIX + "down_proj": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match="down_proj' appears twice"):
        load_pretrained(tmp_path / "m")


def test_impossible_expert_count_is_rejected(folders, tmp_path):
    changed(folders[0], tmp_path / "m")
    content = GPT_OSS | dict(num_local_experts=10**9, quantization_config=MXFP4)
    (tmp_path / "m" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="num_local_experts is 1000000000, but the files have"):
        load_pretrained(tmp_path / "m")
