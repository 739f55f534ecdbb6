"""GGUF files of gpt-oss and LFM2, and their numbers in llama.cpp."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.pretrained.test_gguf import (
    CASES,
    OSS,
    drawn,
    folder_of,
    one_line,
    same,
    small_tokenizer,
)
from tests.support.gguf_files import byte_level_keys, converted, gguf_of, llama_cpp, write_file
from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.models.factory import build
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.weights import open_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_gpt_oss_mxfp4_experts_round_trip(tmp_path):
    """The drawn numbers are exact in the type of the file."""
    config, keys = dataclasses.replace(OSS, num_layers=1, window=(23,)), CASES["gpt-oss"][2]
    params, rng = drawn(config), np.random.default_rng(3)
    experts = params["decoder"]["block_0"]["feed_forward"]
    for name in ("gate", "up", "down"):
        shape = experts[name]["kernel"].shape
        values = rng.choice([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], shape)
        values *= rng.choice([-0.125, 0.125], shape)
        experts[name]["kernel"] = values.astype(np.float32)
    save_pretrained(tmp_path / "m", config, params, family="gpt_oss")
    mxfp4 = {"kinds": lambda name: "MXFP4" if name.endswith("_exps.weight") else None}
    path = gguf_of(tmp_path / "m.gguf", tmp_path / "m", keys=keys, **mxfp4)
    kinds = {name: tensor.kind for name, tensor in open_gguf(path).tensors.items()}
    assert list(kinds.values()).count("MXFP4") == 3
    found, loaded = load_pretrained(path)
    assert found == load_pretrained(tmp_path / "m")[0]
    same(loaded, params)
    half = load_pretrained(path, dtype="bfloat16")[1]["decoder"]["block_0"]["feed_forward"]
    kernel = np.asarray(half["up"]["kernel"])
    np.testing.assert_array_equal(kernel, experts["up"]["kernel"].astype(kernel.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("rope", [Rope(base=150_000.0), OSS.positions], ids=["plain", "yarn"])
def test_log_probabilities_match_llama_cpp(rope, tmp_path):
    """Compare in F32. llama.cpp rounds the bounds of YaRN; the model is published without rounding
    and is read that way, so `truncate` is set only for the comparison."""
    config = dataclasses.replace(OSS, d_model=64, head_dim=32, tie_embeddings=False, positions=rope)
    keys = {"attention.value_length": 32, "expert_feed_forward_length": 64}
    keys = (CASES["gpt-oss"][2] if rope is OSS.positions else {}) | keys
    path = random_file(tmp_path, "gpt_oss", config, keys)
    found, loaded = load_pretrained(path)
    assert found.positions == rope
    rounded = dataclasses.replace(found, positions=dataclasses.replace(rope, truncate=True))
    assert_matches_llama_cpp(path, rounded, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lfm2", "deepseek2", "deepseek3", "deepseek3 yarn", "qwen3 next"])
def test_log_probabilities_of_other_layers_match_llama_cpp(case, tmp_path):
    family, config, keys = CASES[case]
    config = dataclasses.replace(config, d_model=64)
    if config.latent_attention is not None:  # llama.cpp requires this latent for 2 layers
        sizes = dataclasses.replace(config.latent_attention, query_rank=11)
        config = dataclasses.replace(config, latent_attention=sizes)
    path = random_file(tmp_path, family, config, keys)
    assert_matches_llama_cpp(path, *load_pretrained(path))


def random_file(folder: Path, family: str, config: ModelConfig, keys: dict[str, Any]) -> Path:
    """Write a GGUF file with random weights and a small tokenizer."""
    pytest.importorskip("xllamacpp")
    library, rng = small_tokenizer(), np.random.default_rng(0)
    config = dataclasses.replace(config, vocab_size=library.get_vocab_size())

    def random(x):  # norm scales near 1
        mean, spread = (1.0, 0.3) if x.ndim == 1 else (0.0, x.shape[-1] ** -0.5)
        return (mean + spread * rng.standard_normal(x.shape)).astype(np.float32)

    params = jax.tree.map(random, drawn(config))
    save_pretrained(folder / "m", config, params, family=family)
    tokenizer = byte_level_keys(library, "smollm", eos="<|im_end|>")
    return gguf_of(folder / "m.gguf", folder / "m", keys=keys, tokenizer=tokenizer)


def assert_matches_llama_cpp(path: Path, config: ModelConfig, params: Any) -> None:
    """Compare the log-probabilities of the likeliest tokens after twelve prompts."""
    complete, rng = llama_cpp(path), np.random.default_rng(1)
    model = jax.jit(lambda ids: build(config).apply({"params": params}, ids))
    compared = 0
    for length in 6 * (7, 100):
        ids = rng.integers(5, 250, (1, length), dtype=np.int32)
        if not (theirs := complete(ids[0].tolist(), 1, 8)):  # an incomplete UTF-8 character
            continue
        likely = {one["id"]: one["logprob"] for one in theirs[0]["top_logprobs"]}
        ours = np.asarray(jax.nn.log_softmax(model(ids)[0][0, -1]))
        assert int(ours.argmax()) == theirs[0]["id"] and ours.std() > 0.3
        np.testing.assert_allclose(ours[list(likely)], list(likely.values()), atol=1e-4)
        compared += len(likely)
    assert compared >= 24


def test_gpt_oss_gate_and_up_must_have_same_shape(tmp_path):
    config, keys = dataclasses.replace(OSS, num_layers=1, window=(23,)), CASES["gpt-oss"][2]
    folder, _ = folder_of(tmp_path / "m", "gpt_oss", config)
    architecture, metadata, tensors = converted(folder)
    up = "blk.0.ffn_up_exps.weight"
    for other, rule in (
        (
            {up: tensors[up][:, 1:]},
            r"is \[3, 63, 32\]: must be \[3, 64, 32\], like blk.0.ffn_gate_e",
        ),
        ({}, r"is missing: must be \[3, 64, 32\]"),
    ):
        kept = {name: tensor for name, tensor in tensors.items() if name != up} | other
        path = write_file(tmp_path / "m.gguf", architecture, metadata | keys, kept)
        with pytest.raises(CheckpointError, match=rf"{up} {rule}") as error:
            open_weights(path)
        one_line(error)
    wrong = metadata | keys | {"expert_feed_forward_length": 63}
    path = write_file(tmp_path / "m.gguf", architecture, wrong, tensors)
    with pytest.raises(
        ConfigError, match="expert_feed_forward_length is 63: must equal feed_forward_length, 64"
    ):
        open_weights(path)
