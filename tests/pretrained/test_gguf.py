"""GGUF files: keys, conversion of tensors, and rejected files."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from tests.support.gguf_files import byte_level_keys, converted, gguf, gguf_of, write_file
from tests.support.tolerances import assert_same_bits
from transformer_jax.config import (
    ConfigError,
    Experts,
    GatedDelta,
    LatentAttention,
    ModelConfig,
    Rope,
    ShortConv,
)
from transformer_jax.models.factory import init_params
from transformer_jax.models.quantized import QuantizedTable, quantize
from transformer_jax.pretrained import gguf_file
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.load import load_pretrained, pretrained_config
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.weights import open_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

LLAMA = ModelConfig(
    vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=64, max_len=131,
    positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False,
)  # fmt: skip
STRETCHED = Rope(
    base=500_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_len=8192,
)  # fmt: skip
LONG = Rope(
    scaling="longrope", factor=4.0, original_len=32, attention_factor=1.25,
    short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(3.0, 4.0, 5.0, 6.0),
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, head_dim=16, tie_embeddings=True, activation="gelu_tanh", scale_embeddings=True,
    norm_unit_offset=True,
)  # fmt: skip
CAPPED = dataclasses.replace(
    GEMMA, norm_order="sandwich", attention_scale=16**-0.5, window=(23, None),
    attention_softcap=50.0, logit_softcap=30.0,
)  # fmt: skip
OSS = dataclasses.replace(
    LLAMA, head_dim=16, window=(23, None), activation="quick_gelu", glu_limit=7.0,
    glu_unit_offset=True, use_bias=True, attention_sinks=True,
    experts=Experts(count=3, top_k=2, router_bias=True, balance_loss=0.001),
    positions=Rope(base=150_000.0, scaling="yarn", factor=32.0, original_len=64, truncate=False),
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    LLAMA, num_kv_heads=None, positions=Rope(pairing="interleaved"), mixers=("latent_attention",),
    latent_attention=LatentAttention(kv_rank=14, nope_dim=6, rope_dim=8, value_dim=5),
)  # fmt: skip
CASES: dict[str, tuple[str, ModelConfig, dict[str, object]]] = {
    "llama": ("llama", LLAMA, {}),
    "llama of biases": ("llama", dataclasses.replace(LLAMA, use_bias=True), {}),
    "llama tied": ("llama", dataclasses.replace(LLAMA, tie_embeddings=True, head_dim=10), {}),
    "llama linear": ("llama", dataclasses.replace(LLAMA,
        positions=Rope(scaling="linear", factor=2.0)), {"rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0}),
    "mixtral": ("mixtral", dataclasses.replace(LLAMA, experts=Experts(count=3, top_k=2,
        balance_loss=0.001)), {}),
    "qwen2": ("qwen2", dataclasses.replace(LLAMA, qkv_bias=True), {}),
    "qwen3": ("qwen3", dataclasses.replace(LLAMA, qk_norm=True, head_dim=10), {}),
    "qwen2 of experts": ("qwen2_moe", dataclasses.replace(LLAMA, qkv_bias=True, d_ff=None,
        experts=Experts(count=3, top_k=2, d_ff=16, normalize=False, shared_d_ff=24,
        shared_gate=True, balance_loss=0.001)), {}),
    "qwen3 of experts": ("qwen3_moe", dataclasses.replace(LLAMA, qk_norm=True, d_ff=None,
        experts=Experts(count=3, top_k=2, d_ff=16, balance_loss=0.001)), {}),
    "gemma": ("gemma", GEMMA, {}),
    "gemma2": ("gemma2", CAPPED, {}),
    "gemma3": ("gemma3_text", dataclasses.replace(CAPPED, attention_softcap=None,
        logit_softcap=None, qk_norm=True, num_layers=7, window=(23,) * 5 + (None,),
        positions=Rope(base=1e6, window_base=10_000.0)), {"rope.freq_base": 1e6}),
    "phi3": ("phi3", dataclasses.replace(LLAMA, num_kv_heads=4, positions=LONG, max_len=32),
        {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}),
    "phi3 in part": ("phi3", dataclasses.replace(LLAMA, positions=Rope(dims=6)),
        {"rope.dimension_count": 6}),
    "gpt-oss": ("gpt_oss", OSS, {"expert_feed_forward_length": 64, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}),
    "deepseek2": ("deepseek_v2", dataclasses.replace(DEEPSEEK, experts=Experts(count=6, top_k=2,
        d_ff=16, shared_d_ff=32, normalize=False, scale=1.5, balance_loss=0.001,
        dense_layers=1)), {}),
    "deepseek2 of groups": ("deepseek_v2", dataclasses.replace(DEEPSEEK, d_ff=None,
        experts=Experts(count=6, top_k=2, d_ff=16, shared_d_ff=16, normalize=False, groups=3,
        top_groups=2, balance_loss=0.001)), {}),
    "deepseek3": ("deepseek_v3", dataclasses.replace(DEEPSEEK,
        latent_attention=dataclasses.replace(DEEPSEEK.latent_attention, query_rank=11),
        experts=Experts(count=6, top_k=2, d_ff=16, shared_d_ff=16, score="sigmoid", groups=2,
        top_groups=1, group_best=2, selection_bias=True, scale=2.5, balance_loss=0.001,
        dense_layers=1)), {}),
    "deepseek3 yarn": ("deepseek_v3", dataclasses.replace(DEEPSEEK, d_ff=None, tie_embeddings=True,
        experts=Experts(count=3, top_k=2, d_ff=16, shared_d_ff=16, score="sigmoid",
        selection_bias=True, normalize=False, balance_loss=0.001),
        attention_scale=14**-0.5 * (1 + 0.1 * 0.707 * math.log(4)) ** 2, positions=Rope(
        pairing="interleaved", scaling="yarn", factor=4.0, original_len=32, attention_factor=1.0)),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.0707}),
    "qwen3 next": ("qwen3_next", dataclasses.replace(LLAMA, num_layers=4, d_ff=None, head_dim=16,
        norm_unit_offset=True, qk_norm=True, attention_gate=True, positions=Rope(dims=4),
        experts=Experts(count=3, top_k=2, d_ff=16, shared_d_ff=24, shared_gate=True,
        balance_loss=0.001), mixers=("gated_delta", "attention"), gated_delta=GatedDelta(
        num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=16)), {}),
    "lfm2": ("lfm2", dataclasses.replace(LLAMA, num_layers=3, qk_norm=True, tie_embeddings=True,
        mixers=("short_conv", "attention", "short_conv"), short_conv=ShortConv(conv_width=5),
        positions=Rope(base=1e6)), {}),
    "gpt2": ("gpt2", ModelConfig(vocab_size=61, d_model=32, num_layers=2, num_heads=4, d_ff=64,
        max_len=131, tie_embeddings=True, activation="gelu_tanh", dropout=0.1,
        attention_dropout=0.1), {}),
}  # fmt: skip


def drawn(config: ModelConfig, seed: int = 0):
    """Draw parameters in multiples of 2^-10, so that adding and subtracting 1 is exact."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (rng.integers(-999, 999, leaf.shape) / 1024).astype(np.float32), shapes
    )


def folder_of(path: Path, family: str, config: ModelConfig):
    params = drawn(config)
    save_pretrained(path, config, params, family=family)
    return path, params


def same(got, want) -> None:
    got, want = flatten_dict(got, sep="/"), flatten_dict(want, sep="/")
    assert got.keys() == want.keys() and got
    for path, leaf in want.items():
        # a GGUF file stores the exponential of this parameter, whose relative error is 2^-23
        error = 2**-22 if path.endswith("decay_rate") else 0
        np.testing.assert_allclose(got[path], np.asarray(leaf), 0, error, err_msg=path)


# Contents of a file


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gguf_file_loads_same_model_as_source_folder(case, tmp_path):
    family, config, keys = CASES[case]
    folder, params = folder_of(tmp_path / "m", family, config)
    extra = {}
    if config.positions is LONG:
        extra = {
            f"rope_factors_{name}.weight": np.array(factors, np.float32)
            for name, factors in (("long", LONG.long_factors), ("short", LONG.short_factors))
        }
    path = gguf_of(tmp_path / "m.gguf", folder, keys=keys, tensors=extra)
    found, loaded = load_pretrained(path)
    assert found == pretrained_config(path)
    assert found == load_pretrained(folder)[0]
    same(loaded, params)


@pytest.mark.slow
def test_llama3_rope_scaling_is_recovered_from_divisors(tmp_path):
    config = dataclasses.replace(LLAMA, positions=STRETCHED, d_model=128, num_heads=2)
    folder, _ = folder_of(tmp_path / "m", "llama", config)
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(0, 64, 2) / 64)
    factors = []
    for length in wavelengths:  # Llama 3.1's rule, transcribed from the converter
        if length < 8192 / 4.0:
            factors.append(1.0)
        elif length > 8192 / 1.0:
            factors.append(8.0)
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert 1.0 in factors and 8.0 in factors and len(set(factors)) > 2
    numbers = np.array(factors, np.float32)
    path = gguf_of(tmp_path / "m.gguf", folder, tensors={"rope_freqs.weight": numbers})
    assert pretrained_config(path) == pretrained_config(folder)
    numbers[7] *= 1.01
    path = gguf_of(tmp_path / "n.gguf", folder, tensors={"rope_freqs.weight": numbers})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight must match Llama 3\.1 scaling"):
        load_pretrained(path)


@pytest.mark.parametrize("layers, scalar", [(46, 32 / 4), (2, 16)])
def test_gemma2_attention_scale_is_inferred_from_depth(layers, scalar, tmp_path):
    folder, _ = folder_of(tmp_path / "m", "gemma2", CAPPED)
    path = gguf_of(tmp_path / "m.gguf", folder, keys={"block_count": layers})
    assert open_weights(path).config["query_pre_attn_scalar"] == scalar


# Types of tensors


def q8_0(raw: np.ndarray) -> np.ndarray:
    """d q, for a half d and 32 signed bytes q."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


def q4_0(raw: np.ndarray) -> np.ndarray:
    """d (q - 8), for a half d and 16 bytes: first the low halves, then the high ones."""
    blocks = raw.reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
    return scale * (np.concatenate([low, high], axis=1).astype(np.float32) - 8)


def q4_1(raw: np.ndarray) -> np.ndarray:
    """d q + m, for halves d and m."""
    blocks = raw.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
    return scale * np.concatenate([low, high], axis=1).astype(np.float32) + least


def q6_k(raw: np.ndarray) -> np.ndarray:
    """d s (q - 32), for 256 numbers: four low bits, two high bits, 16 scales s, a half d."""
    found = []
    for block in raw.reshape(-1, 210):
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
        numbers = np.zeros(256, np.int32)
        for half in range(2):
            for n in range(32):
                ql, qh = low[64 * half :], int(high[32 * half + n])
                at = 128 * half + n
                numbers[at] = (ql[n] & 15) | (qh & 3) << 4
                numbers[at + 32] = (ql[n + 32] & 15) | (qh >> 2 & 3) << 4
                numbers[at + 64] = (ql[n] >> 4) | (qh >> 4 & 3) << 4
                numbers[at + 96] = (ql[n + 32] >> 4) | (qh >> 6 & 3) << 4
        scale = np.float32(block[208:].copy().view(np.float16)[0])
        found.append(scale * np.repeat(scales, 16).astype(np.float32) * (numbers - 32))
    return np.stack(found)


def q4_k(raw: np.ndarray) -> np.ndarray:
    """d s q - e m, for 256 numbers: halves d and e, eight 6-bit scales s and m, four bits each."""
    found = []
    for block in raw.reshape(-1, 144):
        d, e = block[:4].copy().view(np.float16).astype(np.float32)
        packed, bits = block[4:16].astype(np.int32), block[16:]
        parts = []
        for n in range(8):
            if n < 4:
                s, m = packed[n] & 63, packed[n + 4] & 63
            else:
                s = (packed[n + 4] & 15) | (packed[n - 4] >> 6) << 4
                m = (packed[n + 4] >> 4) | (packed[n] >> 6) << 4
            chunk = bits[32 * (n // 2) :][:32]
            q = (chunk & 15 if n % 2 == 0 else chunk >> 4).astype(np.float32)
            parts.append(d * np.float32(s) * q - e * np.float32(m))
        found.append(np.concatenate(parts))
    return np.stack(found)


def mxfp4(raw: np.ndarray) -> np.ndarray:
    """2^(e - 127) q, for a byte e and 16 bytes of q: first the low halves, then the high ones."""
    blocks = raw.reshape(-1, 17)
    low, high = blocks[:, 1:] & 15, blocks[:, 1:] >> 4
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = np.array([*half, *(-x for x in half)])[np.concatenate([low, high], axis=1)]
    return 2.0 ** (blocks[:, :1].astype(np.float64) - 127) * numbers


def nvfp4(raw: np.ndarray) -> np.ndarray:
    """s q, for four scales s in E4M3 and 32 bytes of q in E2M1, of which each scale has eight."""
    blocks = raw.reshape(-1, 36)
    scales = blocks[:, :4].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    packed = blocks[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2)
    size = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)[codes & 7]
    return scales[:, :, None] * np.where(codes > 7, -size, size)


def tq2_0(raw: np.ndarray) -> np.ndarray:
    """d (q - 1), for 64 bytes with four q of two bits each, and a half d."""
    blocks = raw.reshape(-1, 66)
    scale = blocks[:, 64:].copy().view(np.float16).astype(np.float32)
    i = np.arange(256)
    q = blocks[:, i // 128 * 32 + i % 32] >> (i // 32 % 4 * 2).astype(np.uint8) & 3
    return scale * (q.astype(np.float32) - 1)


def tq1_0(raw: np.ndarray) -> np.ndarray:
    """d (q - 1), for base-3 digits q: five in each of 32 + 16 bytes and four in each of 4 bytes.

    A byte is the fraction of 256 whose base-3 digits after the point are the q.
    """
    blocks = raw.reshape(-1, 54)
    scale = blocks[:, 52:].copy().view(np.float16).astype(np.float32)
    numbers = []
    for first, size, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        rest = blocks[:, first : first + size].astype(np.int64)
        for _ in range(digits):
            numbers.append(rest * 3 // 256 - 1)
            rest = rest * 3 % 256
    return scale * np.concatenate(numbers, axis=1).astype(np.float32)


FORMULAS = {"MXFP4": mxfp4, "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k, "Q6_K": q6_k}
FORMULAS |= {"NVFP4": nvfp4, "TQ1_0": tq1_0, "TQ2_0": tq2_0}
HALVES = {"MXFP4": [], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}
HALVES |= {"NVFP4": [], "TQ1_0": [52], "TQ2_0": [64]}
"""Offsets of the float16 values of a block, which could be NaN with random bytes."""


def random_blocks(kind: str, rows: int, width: int) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (rows * width // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(size=(len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(110, 145, len(raw))
    if kind == "NVFP4":
        raw[:, :4] = rng.integers(0, 127, (len(raw), 4))  # 127 is NaN
    return raw.reshape(rows, width // block * size)


@pytest.mark.parametrize("kind", FORMULAS)
def test_gguf_dequantization_matches_formula(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "CHUNK", 2 * 512)  # so that rows are read in several chunks
    raw = random_blocks(kind, 7, 512)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("before", np.zeros(3, np.float32))
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    stacked = np.stack([raw, raw[1:].copy()[[0, *range(6)]], raw[::-1]])
    writer.add_tensor("experts", stacked, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "m.gguf")
    want = FORMULAS[kind](raw).reshape(7, 512)
    assert np.isfinite(want).all() and len(np.unique(want)) > (20 if kind[0] == "T" else 99)
    np.testing.assert_allclose(file.read("w"), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(file.read("experts", 2), file.read("w")[::-1])
    np.testing.assert_array_equal(file.read("experts")[0], file.read("w"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_is_kept_unless_dtype_is_passed(kind, tmp_path):
    folder, params = folder_of(tmp_path / "m", "llama", LLAMA)
    kinds = {"kinds": lambda name: None if "norm" in name else kind}
    path = gguf_of(tmp_path / "m.gguf", folder, **kinds)
    name = {"F16": "float16", "BF16": "bfloat16"}[kind]
    config, loaded = load_pretrained(path)
    assert config.dtype == name
    kernel = loaded["decoder"]["block_0"]["attention"]["query"]["kernel"]
    assert kernel.dtype == name
    want = params["decoder"]["block_0"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), want.astype(kernel.dtype))
    config, loaded = load_pretrained(path, dtype="float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {"float32"}


def test_quantized_gguf_model_matches_dequantized_model(tmp_path):
    folder, params = folder_of(tmp_path / "m", "llama", LLAMA)
    path = gguf_of(
        tmp_path / "m.gguf", folder, kinds=lambda name: None if "norm" in name else "Q8_0"
    )
    config, loaded = load_pretrained(path, scan_layers=True)
    assert config.dtype == "float32"
    got = np.asarray(loaded["decoder"]["blocks"]["attention"]["key"]["kernel"][1])
    want = params["decoder"]["block_1"]["attention"]["key"]["kernel"]  # [D, K, H], blocks along D
    largest = np.abs(want).max(axis=0, keepdims=True)
    assert 0 < np.abs(got - want).max() <= (largest / 127).max()
    half = load_pretrained(path, dtype="bfloat16")[1]["embed"]["tokens"]
    whole = np.asarray(loaded["embed"]["tokens"])
    np.testing.assert_array_equal(np.asarray(half), whole.astype(half.dtype))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_int4_keeps_the_numbers_of_q4_0_tensors(name, tmp_path):
    folder, _ = folder_of(tmp_path / "m", CASES[name][0], CASES[name][1])
    path = gguf_of(
        tmp_path / "m.gguf", folder, kinds=lambda name: None if "norm" in name or
        name.endswith("bias") else "Q4_0"
    )  # fmt: skip
    _, loaded = load_pretrained(path)
    stored = quantize(loaded, "int4", embeddings=True)
    flat = flatten_dict(stored, sep="/")
    tables = [x for x in flat.values() if isinstance(x, QuantizedTable)]
    assert tables and all(table.bits == 4 for table in tables)
    for path, leaf in flatten_dict(loaded, sep="/").items():
        assert_same_bits(flat[path].astype(np.float32), leaf)


def test_int4_rounds_q8_0_embeddings_to_8_bits(tmp_path):
    folder, _ = folder_of(tmp_path / "m", "llama", LLAMA)
    path = gguf_of(
        tmp_path / "m.gguf", folder, kinds=lambda name: "Q8_0" if "token" in name else None
    )
    _, loaded = load_pretrained(path)
    table = quantize(loaded, "int4", embeddings=True)["embed"]["tokens"]
    assert isinstance(table, QuantizedTable) and table.bits == 8


# Rejected files


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    where = tmp_path_factory.mktemp("gguf")
    folder, _ = folder_of(where / "m", "llama", dataclasses.replace(LLAMA, num_layers=1))
    return gguf_of(where / "m.gguf", folder), folder


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 500
    return text


def test_truncated_gguf_file_is_rejected_at_any_length(small, tmp_path):
    whole = small[0].read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 60), *range(60, len(whole) - 1, 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: ") as error:
            load_pretrained(path)
        one_line(error)
    path.write_bytes(whole)
    load_pretrained(path)


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("seed", range(4))
def test_mutated_gguf_header_is_parsed_or_rejected(seed, small, tmp_path):
    whole, rng = bytearray(small[0].read_bytes()), np.random.default_rng(seed)
    path, refused = tmp_path / "m.gguf", 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(2500)] = rng.integers(256)
        path.write_bytes(content)
        try:
            open_weights(path)
        except (CheckpointError, ConfigError) as error:
            assert "\n" not in str(error) and str(path) in str(error)
            refused += 1
    assert refused > 50


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


HOSTILE = {
    "no GGUF file": (b"GGML" + bytes(60), "not a GGUF file"),
    "empty": (b"", "4 bytes, but only 0 remain"),
    "version 1": (header(version=1), "version is 1: must be 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of a big-endian machine"),
    "tensors": (header(tensors=2**40), f"number of tensors is {2**40}: must be at most"),
    "keys": (header(keys=2**62), f"number of keys is {2**62}: must be at most"),
    "long name": (header(keys=1) + struct.pack("<Q", 2**63), "a key has .* bytes"),
    "long text": (header(keys=1) + key("a", 8, struct.pack("<Q", 2**60)), "bytes"),
    "long list": (header(keys=1) + key("a", 9, struct.pack("<IQ", 5, 2**61)),
        f"has {2**61} items"),
    "long list of texts": (header(keys=1) + key("a", 9, struct.pack("<IQ", 8, 2**50)),
        f"has {2**50} items"),
    "list of lists": (header(keys=1) + key("a", 9, struct.pack("<IQ", 9, 1)), "list of type 9"),
    "unknown value": (header(keys=1) + key("a", 13, bytes(8)), "a value of type 13"),
    "key twice": (header(keys=2) + 2 * key("a", 7, b"\1"), "'a' appears twice"),
    "no UTF-8": (header(keys=1) + struct.pack("<Q", 1) + b"\xff", "byte 0 is not UTF-8"),
    "no architecture": (header(), "general.architecture is None"),
    "axes": (header(tensors=1) + text("w") + struct.pack("<I", 5), "has 5 axes"),
    "unknown type": (header(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 4, 99, 0),
        "unknown type 99"),
    "integers": (header(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 4, 26, 0) + bytes(99),
        "type I32, which is not"),
    "huge tensor": (header(tensors=1) + text("w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
        "is it truncated"),
    "part of a block": (header(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 33, 8,
        0) + bytes(99), "divisible by 32"),
    "offset": (header(tensors=1) + text("w") + struct.pack("<IQIQ", 1, 4, 0, 3) + bytes(99),
        "begins at offset 3"),
    "alignment": (header(keys=1) + key("general.alignment", 4, struct.pack("<I", 33)),
        "power of two"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_gguf_file_raises_one_line_error(case, tmp_path):
    content, rule = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=rule) as error:
        open_weights(path)
    assert str(path) in one_line(error)


def test_unknown_gguf_keys_and_tensors_are_rejected(small, tmp_path):
    architecture, keys, tensors = converted(small[1])
    path = tmp_path / "m.gguf"

    def refused(rule: str, tensors=tensors, more=None, **changes) -> None:
        write_file(path, changes.pop("to", architecture), keys | changes, tensors, more=more)
        with pytest.raises((CheckpointError, ConfigError), match=rule) as error:
            load_pretrained(path)
        one_line(error)

    refused("general.architecture is 'mamba': must be one of llama, qwen2", to="mamba")
    refused("'llama.new_key': not a supported key of the architecture llama", new_key=1)
    refused("llama.rope.scaling.type is 'ntk': must be", **{"rope.scaling.type": "ntk"})
    refused("llama.attention.causal is False: must be True", **{"attention.causal": False})
    refused("llama.block_count is 'two': must be a positive integer", block_count="two")
    refused("llama.expert_count is 'two': must be a positive integer", expert_count="two")
    refused("llama.expert_used_count is missing: must be a pos", expert_count=2)
    refused(
        "embedding_length is 31: must equal the columns of token_embd.weight, 32",
        embedding_length=31,
    )
    refused(
        "rope.dimension_count is 4: must equal the width of a head", **{"rope.dimension_count": 4}
    )
    refused("split.count is 3: this file is one of several", more={"split.count": 3})
    rule = "must be a single value, not a list"
    refused(rf"split.count is array\(\[1, 2\].*: {rule}", more={"split.count": [1, 2]})
    refused(rf"llama.expert_count is array\(\[2, 2\].*: {rule}", expert_count=[2, 2])
    refused(f"rope.scaling.type is .*: {rule}", **{"rope.scaling.type": [1, 2]})
    ones = np.ones(4, np.float32)
    refused(
        "rope_factors_long.weight': not a supported", tensors | {"rope_factors_long.weight": ones}
    )
    odd = tensors | {"blk.0.attn_rot.weight": np.zeros(3, np.float32)}
    refused("'blk.0.attn_rot.weight': not a supported tensor", odd)
    deep = tensors | {"blk.1.attn_norm.weight": np.zeros(32, np.float32)}
    refused("model.layers.1.input_layernorm.weight: llama with this", deep)
    less = {name: tensor for name, tensor in tensors.items() if "ffn_up" not in name}
    refused("tensor model.layers.0.mlp.up_proj.weight is missing", less)
    wide = tensors | {"blk.0.ffn_up.weight": np.zeros((64, 31), np.float32)}
    refused(r"up_proj.weight has shape \[64, 31\]", wide)
    refused("token_embd.weight is missing", {"output_norm.weight": np.zeros(3, np.float32)})


@pytest.mark.parametrize("counts", [2, [2, 2, 2, 0], [0, 2, 4], [0, 0, 0], [0, -2, 0], ["0"] * 3])
def test_lfm2_needs_a_number_of_key_heads_for_each_layer(counts, tmp_path):
    folder, _ = folder_of(tmp_path / "m", *CASES["lfm2"][:2])
    path = gguf_of(tmp_path / "m.gguf", folder, keys={"attention.head_count_kv": counts})
    rule = r"must be a list of 3 \(block_count\) of 0 and one other number"
    with pytest.raises(ConfigError, match=f"lfm2.attention.head_count_kv is .*: {rule}") as error:
        load_pretrained(path)
    one_line(error)


def test_older_deepseek_file_stores_keys_and_values_together(tmp_path):
    folder, params = folder_of(tmp_path / "m", *CASES["deepseek2"][:2])
    architecture, keys, tensors = converted(folder)
    widths = {f"attention.{part}_length": keys.pop(f"attention.{part}_length_mla")
              for part in ("key", "value")}  # fmt: skip
    keys |= widths | {"attention.head_count_kv": 4}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("kv_b_proj.weight"):
            layer = f"blk.{name.split('.')[2]}"
            del tensors[f"{layer}.attn_k_b.weight"], tensors[f"{layer}.attn_v_b.weight"]
            tensors[f"{layer}.attn_kv_b.weight"] = tensor
    path = write_file(tmp_path / "m.gguf", architecture, keys, tensors)
    found, loaded = load_pretrained(path)
    assert found == load_pretrained(folder)[0]
    same(loaded, params)


def test_deepseek_keys_and_tensors_must_match(tmp_path):
    architecture, keys, tensors = converted(folder_of(tmp_path / "m", *CASES["deepseek3"][:2])[0])
    k, v = "blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"
    less = {name: tensor for name, tensor in tensors.items() if name != v}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32}  # fmt: skip
    for rule, changes, stored in (
        ("key_length is 7: must be 22", {"attention.key_length": 7}, tensors),
        ("expert_gating_func is 3: must be 1 or 2", {"expert_gating_func": 3}, tensors),
        ("rope.dimension_count is 14: must be below the key width, 14",
         {"rope.dimension_count": 14, "attention.key_length": 28}, tensors),
        ("yarn_log_multiplier is missing", yarn, tensors),
        (rf"{v} is missing: must be \[4, any, 14\], like {k}", {}, less),
        (rf"{v} is \[3, 5, 14\]: must be \[4, any", {}, less | {v: tensors[v][:3]}),
        (rf"'{k}' is \[4, 14\]: must have the axes", {}, tensors | {k: tensors[k][:, :, 0]}),
    ):  # fmt: skip
        path = write_file(tmp_path / "m.gguf", architecture, keys | changes, stored)
        with pytest.raises((CheckpointError, ConfigError), match=rule) as error:
            load_pretrained(path)
        one_line(error)


def test_qwen3_next_keys_and_tensors_must_match(tmp_path):
    architecture, keys, tensors = converted(folder_of(tmp_path / "m", *CASES["qwen3 next"][:2])[0])
    qkv, gate, rate = (f"blk.0.{name}" for name in ("attn_qkv.weight", "attn_gate.weight", "ssm_a"))
    less = {name: tensor for name, tensor in tensors.items() if name != gate}
    for rule, changes, stored in (
        ("ssm.inner_size is 97: must be a multiple of 6", {"ssm.inner_size": 97}, tensors),
        (rf"'{qkv}' is \[160, 32\]: must have 192 rows", {"ssm.state_size": 24}, tensors),
        (rf"{gate} is missing: must be \[96, 32\], like {qkv}", {}, less),
        (f"'{rate}.weight': not a supp", {}, tensors | {f"{rate}.weight": tensors[rate]}),
        ("'blk.0.attn_norm': not a supp", {}, tensors | {"blk.0.attn_norm": tensors[rate]}),
    ):
        path = write_file(tmp_path / "m.gguf", architecture, keys | changes, stored)
        with pytest.raises((CheckpointError, ConfigError), match=rule) as error:
            load_pretrained(path)
        one_line(error)


def test_phi3_rope_factors_are_loaded_from_two_tensors(tmp_path):
    family, config, keys = CASES["phi3 in part"]
    folder, _ = folder_of(tmp_path / "m", family, dataclasses.replace(config, num_layers=1))
    for name, rule in (
        ("long", "tensor rope_factors_short.weight is missing"),
        ("short", "'rope_factors_short.weight': not a supported tensor"),
    ):
        factors = {f"rope_factors_{name}.weight": np.ones(3, np.float32)}
        path = gguf_of(tmp_path / "m.gguf", folder, keys=keys, tensors=factors)
        with pytest.raises(CheckpointError, match=rule) as error:
            open_weights(path)
        one_line(error)


def test_file_modified_after_opening_is_rejected(small, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small[0].read_bytes())
    folder = open_weights(path)
    path.write_bytes(small[0].read_bytes()[::-1])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        folder.read("model.norm.weight")


def test_error_explains_path_without_gguf_file(small, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read \(No such file"):
        load_pretrained(str(tmp_path / "none.gguf"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model-Q8_0.gguf").write_bytes(small[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"no config\.json, but 'model-Q8_0\.gguf'"):
        load_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match="revision='main' requires a repository ID"):
        load_pretrained(small[0], revision="main")
    (tmp_path / "book.txt").write_text("a book")
    with pytest.raises(CheckpointError, match="is neither a folder nor a GGUF file"):
        load_pretrained(tmp_path / "book.txt")
    blob = tmp_path / "sha256-0"  # the name in a cache
    blob.symlink_to(small[0])
    assert pretrained_config(blob).d_model == 32
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match="requires the package gguf: run pip install gguf"):
        load_pretrained(small[0])


# A file is accepted in place of a folder


def small_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(["the cat sat on the mat, and the rat sat on the cat"] * 9, trainer)
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    return library


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A file with a tokenizer and a chat template, and the tokenizer of `tokenizers`."""
    where, library = tmp_path_factory.mktemp("talking"), small_tokenizer()
    config = dataclasses.replace(LLAMA, vocab_size=library.get_vocab_size(), num_layers=1)
    folder, _ = folder_of(where / "m", "llama", config)
    keys = byte_level_keys(library, "smollm", bos="<|im_start|>", eos="<|im_end|>")
    keys |= {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.add_bos_token": False}
    return gguf_of(where / "m.gguf", folder, tokenizer=keys), library


def test_gguf_file_and_converted_folder_produce_same_chat(talking, tmp_path, capsys):
    from transformer_jax import load
    from transformer_jax.cli.convert import main

    path, library = talking
    assert main(["--model", str(path), "--to", str(tmp_path / "out")]) == 0
    assert "parameters in float32" in capsys.readouterr().out
    ours, theirs = load(path), load(tmp_path / "out")
    assert ours.config == theirs.config
    same(ours.params, theirs.params)
    messages = [{"role": "user", "content": "the cat sat, 123"}]
    spelled = "<|im_start|>user\nthe cat sat, 123<|im_end|>\n<|im_start|>assistant\n"
    want = library.encode(spelled, add_special_tokens=False).ids
    assert ours.tokenizer.chat_ids(messages).tolist() == want
    assert theirs.tokenizer.chat_ids(messages).tolist() == want
    assert ours.model.stop_ids == theirs.model.stop_ids == (1,)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (0, 1)


def test_tokens_command_accepts_gguf_file(talking, capsys):
    from transformer_jax.cli.tokens import main as tokens

    path, library = talking
    assert tokens(["--model", str(path), "--prompt", "the cat sat"]) == 0
    printed = capsys.readouterr().out
    assert all(str(i) in printed for i in library.encode("the cat sat").ids)


@pytest.mark.slow
def test_generate_command_accepts_gguf_file(talking, capsys):
    from transformer_jax.cli.generate import main as generate

    chat = ["--chat", "--prompt", "the cat", "--num-tokens", "3", "--temperature", "0"]
    outputs = []
    for more in (chat, chat[1:]):
        assert generate(["--model", str(talking[0]), *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[1].startswith("the cat") and outputs[0] != outputs[1]
