"""Small GGUF files like those that llama.cpp's converter writes from a folder.

Tensor names come from the package gguf. The changes to the tensors follow the converter's
description: rows of query and key are interleaved for ggml's rotation, 1 is added to Gemma's norm
scales, GPT-2's matrices are transposed, the experts of a layer are stacked, and convolutions have
two axes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

gguf = pytest.importorskip("gguf")

Keys = dict[str, Any]

NORMS = {"gemma", "gemma2", "gemma3", "qwen3next"}
ROTATED = {"llama"}
ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "lfm2": "lfm2",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "qwen3_next": "qwen3next",
}  # fmt: skip
"""Map each `model_type` to the name of its architecture in llama.cpp."""

SIZES = {
    "vocab_size": ("vocab_size",),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.key_length": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Map keys of a GGUF file to the keys of config.json that they come from."""


def metadata_of(config: Mapping[str, Any]) -> Keys:
    """Return the keys of an architecture without its prefix."""
    found: Keys = {}
    for name, origins in SIZES.items():
        for origin in origins:
            if config.get(origin) is not None:
                found[name] = config[origin]
    if config["model_type"] == "qwen3_next":
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        types = config["layer_types"]
        rotated = round(config["head_dim"] * config["partial_rotary_factor"])
        found |= {
            "ssm.inner_size": values, "attention.value_length": config["head_dim"],
            "full_attention_interval": types.index("full_attention") + 1,
            "rope.dimension_count": rotated,
        }  # fmt: skip
    if config["model_type"].startswith("deepseek"):
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1, "attention.key_length": rank + rope,
            "attention.value_length": rank, "attention.kv_lora_rank": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
            "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rope,
            "expert_count": config["n_routed_experts"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }  # fmt: skip
        if config["q_lora_rank"] is not None:
            found["attention.q_lora_rank"] = config["q_lora_rank"]
        if config["norm_topk_prob"]:
            found["expert_weights_norm"] = True
        if config["model_type"] == "deepseek_v3":
            found["expert_gating_func"] = 2
    if config["model_type"] == "lfm2":
        heads = found["attention.head_count_kv"]
        found["attention.head_count_kv"] = [
            0 if kind == "conv" else heads for kind in config["layer_types"]
        ]
    return found


def converted(folder: Path) -> tuple[str, Keys, dict[str, np.ndarray]]:
    """Return the architecture, its keys and the tensors of the GGUF file of a folder."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    enumerated = gguf.MODEL_ARCH_NAMES.items()
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in enumerated if name == architecture), 99
    )
    heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if architecture in NORMS and name.endswith("norm.weight") and ".linear_attn" not in name:
            tensor = tensor + 1
        if name.endswith("A_log"):
            tensor = -np.exp(tensor)
        name = name.replace("dt_bias", "dt_proj.bias")
        if name.endswith("conv1d.weight"):
            tensor = tensor[:, 0]
        if name.endswith("in_proj_qkvz.weight"):
            runs = tensor.reshape(config["linear_num_key_heads"], -1, tensor.shape[1])
            width = config["linear_key_head_dim"]
            value = (runs.shape[1] - 2 * width) // 2
            ends = [width, 2 * width, 2 * width + value]
            *qkv, z = (x.reshape(-1, x.shape[2]) for x in np.split(runs, ends, axis=1))
            layer = f"blk.{name.split('.')[2]}"
            tensors |= {f"{layer}.attn_qkv.weight": np.concatenate(qkv),
                        f"{layer}.attn_gate.weight": np.ascontiguousarray(z)}  # fmt: skip
            continue
        if kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
            tensor = tensor.T
        if architecture in ROTATED and re.search(r"[qk]_proj\.(weight|bias)$", name):
            count = heads["k_proj" in name]
            halves = tensor.reshape(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if kind == "gpt_oss" and (".experts." in name or name.endswith("sinks")):
            tensors |= _of_gpt_oss(names, name, tensor)
            continue
        if name.endswith("kv_b_proj.weight"):
            nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
            parts = tensor.reshape(heads[0], nope + value, -1)
            k, v = parts[:, :nope].swapaxes(1, 2), parts[:, nope:]
            for part, x in (("k", k), ("v", v)):
                to = _renamed(names, name.replace("kv_b", f"{part}_b"))
                tensors[to] = np.ascontiguousarray(x)
            continue
        name = name.replace("correction_bias", "correction.bias")
        if name.endswith("conv.conv.weight"):
            tensor = tensor[:, 0]
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.reshape(-1)
        if found := re.search(r"\.experts\.(\d+)\.", name):
            whole = name.replace(found[0], ".experts.").replace(".w", ".w")
            experts.setdefault(whole, {})[int(found[1])] = tensor
            continue
        tensors[_renamed(names, name)] = np.ascontiguousarray(tensor)
    for name, parts in experts.items():
        tensors[_renamed(names, name)] = np.stack([parts[e] for e in range(len(parts))])
    return architecture, metadata_of(config), tensors


def _of_gpt_oss(names: Any, name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Split the interleaved columns of gate and up, and put outputs first."""
    stem, end = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    if end == "weight" and tensor.ndim == 3:
        tensor = tensor.swapaxes(1, 2)
        gate, up = tensor[:, ::2], tensor[:, 1::2]
    elif tensor.ndim == 2:
        gate, up = tensor[:, ::2], tensor[:, 1::2]
    parts = {stem: tensor}
    if "gate_up" in stem:
        parts = {stem.replace("gate_up", "gate"): gate, stem.replace("gate_up", "up"): up}
    return {_renamed(names, f"{n}.{end}"): np.ascontiguousarray(x) for n, x in parts.items()}


def _renamed(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def write_file(
    path: Path,
    architecture: str,
    keys: Keys,
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Callable[[str], str | None] = lambda name: None,
    tokenizer: Keys | None = None,
    more: Keys | None = None,
) -> Path:
    """Write a file; `kinds` maps a tensor name to its quantised type, or None to keep it."""
    writer = gguf.GGUFWriter(path, architecture)
    prefixed = {f"{architecture}.{name}": value for name, value in keys.items()}
    for name, value in {**prefixed, **(tokenizer or {}), **(more or {})}.items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, tensor in tensors.items():
        kind = kinds(name)
        if kind is None:
            writer.add_tensor(name, tensor)
            continue
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(tensor, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(path: Path, folder: Path, **options: Any) -> Path:
    """Write the file of a folder; the option `keys` adds or replaces architecture keys."""
    architecture, keys, tensors = converted(folder)
    keys |= options.pop("keys", {})
    tensors |= options.pop("tensors", {})
    return write_file(path, architecture, keys, tensors, **options)


def llama_cpp(path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function for greedy completion in llama.cpp with log-probabilities of each token.

    It computes in F32 in one thread, because several threads would wait for each other while other
    tests run.
    """
    peer = pytest.importorskip("xllamacpp")
    settings = peer.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 256, 1
    settings.cache_type_k = settings.cache_type_v = peer.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = peer.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = peer.Server(settings)

    def complete(ids: list[int], tokens: int, logprobs: int) -> list[dict[str, Any]]:
        request = {"prompt": ids, "max_tokens": tokens, "temperature": 0.0, "logprobs": logprobs}
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        found = answer["choices"][0]["logprobs"]
        return [] if found is None else found["content"]

    return complete


def byte_level_keys(tokenizer: Any, pre: str, **roles: str) -> Keys:
    """Return the GGUF keys of a byte-level BPE tokenizer of `tokenizers`, with token roles."""
    content = json.loads(tokenizer.to_str())
    added = {token["content"]: token for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"] | {t: token["id"] for t, token in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [(3 if added[t]["special"] else 4) if t in added else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        **{f"tokenizer.ggml.{role}_token_id": vocabulary[t] for role, t in roles.items()},
    }
