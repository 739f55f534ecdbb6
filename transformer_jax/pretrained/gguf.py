"""GGUF files, which appear to the families as the folders from which they were converted.

The converter of llama.cpp renames the keys and tensors of a Hugging Face folder. It also makes the
following changes to tensors, which are undone when a tensor is read:

    Llama, Mistral, Mixtral    the rows of query and key are reordered for ggml's rotation
    Gemma 1 to 3               1 is added to norm weights
    GPT-2                      matrices are transposed
    experts                    all expert matrices of a layer are stored in one tensor
    gpt-oss                    gate and up are separate tensors, and expert matrices are transposed
    LFM2                       convolutions lose an axis, and each layer has a number of key heads
    DeepSeek-V2 and V3         the matrices of keys and values are separate, and that of keys is
                               transposed
    Qwen3-Next                 1 is added to norm weights except those of heads, A_log becomes
                               -exp(A_log), and two matrices contain the rows of in_proj_qkvz

Every metadata key of the architecture is either read or rejected with an error that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.pretrained.families import ConfigKeys
from transformer_jax.pretrained.families.decoder_keys import rotated_part
from transformer_jax.pretrained.gguf_file import GgufFile, GgufTensor, Value, open_gguf
from transformer_jax.pretrained.safetensors_folder import (
    CheckpointError,
    TensorInfo,
    WeightFolder,
)
from transformer_jax.untrusted_files import MISSING, Json, JsonObject, ObjectKeys, shown
from transformer_jax.values import value_class

Change = Callable[..., np.ndarray]
"""Function that undoes the converter's change to one or several tensors."""


@value_class
class GgufModel(WeightFolder):
    """Open GGUF file that behaves like a folder with config.json and tensors."""

    gguf: GgufFile = field(repr=False)
    """The GGUF file. Its metadata also defines the tokenizer."""
    sources: Mapping[str, _Source] = field(repr=False)
    """Source of each tensor, keyed by its name in the folder."""

    @property
    def where(self) -> str:
        """Return the file that error messages name instead of config.json."""
        return str(self.path)

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors one at a time, in the order of `names` and in the layout of the folder."""
        return map(self._read_one, dict.fromkeys(names))

    def file(self, name: str) -> Path | None:
        """Return None: a GGUF file has no companion files."""
        return None

    def read_json(self, name: str) -> Json:
        """Return None: a GGUF file has no companion files."""
        return None

    def _read_one(self, name: str) -> tuple[str, np.ndarray]:
        if name not in self.sources:
            raise CheckpointError(f"{self.path}: there is no tensor {shown(name)}")
        source = self.sources[name]
        tensors = [self.gguf.read(one, source.part) for one in (source.tensor, *source.others)]
        return name, tensors[0] if source.change is None else source.change(*tensors)


@dataclass(frozen=True)
class _Source:
    """Location of a folder's tensor in the file: tensors, or a slice of one tensor."""

    tensor: str
    part: int | None = None
    change: Change | None = None
    others: tuple[str, ...] = ()
    """Further tensors, which `change` combines with the first one."""


def open_gguf_model(path: str | Path) -> GgufModel:
    """Check a file and map its tensors to the names in the folder, without reading any tensor.

    Raises CheckpointError if the architecture does not have a tensor, and ConfigError if it does
    not have a key.
    """
    file = open_gguf(path)
    split = _Keys(file, "split.")
    if (parts := split.take("count", 1)) not in (0, 1):
        rule = "this file is one of several: merge them with llama-gguf-split --merge"
        split.fail("count", parts, rule)
    keys = _Keys(file, f"{file.architecture}.")
    config, names = _read_architecture(keys)
    keys.check_all_read()
    sources: dict[str, _Source] = {}
    infos: dict[str, TensorInfo] = {}
    for name, tensor in file.tensors.items():
        # RoPE scaling factors were read with the config and are not parameters.
        if name in keys.factors_read:
            continue
        for to, source, info in _placed(file, name, tensor, names, config):
            if to in sources:
                other = sources[to].tensor
                raise CheckpointError(f"{path}: {shown(name)} and {shown(other)} are both {to}")
            sources[to], infos[to] = source, info
    return GgufModel(
        Path(path), config, MappingProxyType(infos), {}, file, MappingProxyType(sources)
    )


def _placed(
    file: GgufFile, name: str, tensor: GgufTensor, names: _Names, config: JsonObject
) -> Iterator[tuple[str, _Source, TensorInfo]]:
    """Yield the folder's tensors for a tensor in the file, one or one per expert."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", name)
    layer, base, end = found.groups() if found else (None, "", "")
    to = (names.layer if layer else names.outer).get(base)
    if to is None or (end is None) != (base == "ssm_a"):
        rule = f"not a supported tensor of the architecture {file.architecture}"
        raise CheckpointError(f"{file.path}: {shown(name)}: {rule}")
    if layer:
        to = f"{names.block}.{int(layer)}.{to}"
    if base in names.plain:  # gpt-oss: expert matrices, their biases, and the sinks
        if "_up_" in name:  # read with the gate, because the folder has one tensor for both
            return
        shape, others = tensor.shape, tuple[str, ...]()
        if len(shape) == 3:
            shape = (shape[0], shape[2], shape[1])
        if "_gate_" in name:
            others = (_partner(file, name, name.replace("_gate_", "_up_"), tensor.shape),)
            shape = (*shape[:-1], 2 * shape[-1])

        def combined(*tensors: np.ndarray) -> np.ndarray:
            if tensors[0].ndim == 3:
                tensors = tuple(one.swapaxes(1, 2) for one in tensors)
            if len(tensors) == 1:
                return tensors[0]
            # in the tensor of the folder, the columns of gate and up are interleaved
            return np.stack(tensors, axis=-1).reshape(*tensors[0].shape[:-1], -1)

        source = _Source(name, None, combined, others)
        yield to + "_bias" * (end == "bias"), source, TensorInfo("", "float32", shape)
        return
    kind = tensor.kind
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    if "{e}" in to:
        # The folder has one tensor per expert, which is a slice of the file's tensor.
        for part in range(tensor.shape[0] if len(tensor.shape) == 3 else 0):
            expert = to.replace("{e}", str(part))
            source = _Source(name, part)
            yield f"{expert}.{end}", source, TensorInfo("", dtype, tensor.shape[1:])
        if len(tensor.shape) != 3:
            rule = "must have the axes experts, outputs, and inputs"
            raise CheckpointError(f"{file.path}: {shown(name)} is {list(tensor.shape)}: {rule}")
        return
    change: Change | None = None
    shape = tensor.shape
    if base == "attn_v_b" or (base == "attn_gate" and "ssm_a" in names.layer):
        return  # read with attn_k_b or attn_qkv
    if base == "ssm_a":
        rate = lambda a: np.log(-a.astype(np.float64)).astype(np.float32)  # noqa: E731
        yield to, _Source(name, None, rate), TensorInfo("", "float32", shape)
        return
    if base == "attn_qkv" and "ssm_a" in names.layer:
        heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        if len(shape) != 2 or shape[0] != 2 * heads * width + values or values % heads:
            rule = f"must have {2 * heads * width + values} rows, by the ssm keys"
            raise CheckpointError(f"{file.path}: {shown(name)} is {list(shape)}: {rule}")
        other = _partner(file, name, name.replace("_qkv", "_gate"), (values, shape[1]))

        def by_key_heads(qkv: np.ndarray, z: np.ndarray) -> np.ndarray:
            ends = [heads * width, 2 * heads * width]
            parts = [x.reshape(heads, -1, x.shape[1]) for x in (*np.split(qkv, ends), z)]
            return np.concatenate(parts, axis=1).reshape(-1, qkv.shape[1])

        info = TensorInfo("", dtype, (shape[0] + values, shape[1]))
        yield f"{to}.{end}", _Source(name, None, by_key_heads, (other,)), info
        return
    if base == "attn_k_b":  # DeepSeek: the folder has the rows of both for each head
        if len(shape) != 3:
            rule = "must have the axes heads, latent and width"
            raise CheckpointError(f"{file.path}: {shown(name)} is {list(shape)}: {rule}")
        heads, rank, width = shape
        other = _partner(file, name, name.replace("_k_b", "_v_b"), (heads, None, rank))
        rows = heads * (width + file.tensors[other].shape[1])

        def both(k: np.ndarray, v: np.ndarray) -> np.ndarray:
            joined = np.concatenate([k.swapaxes(1, 2), v], axis=1)
            return joined.reshape(-1, k.shape[1])

        yield (
            f"{to}.{end}",
            _Source(name, None, both, (other,)),
            TensorInfo("", dtype, (rows, rank)),
        )
        return
    if base in names.rotated:
        heads = config["num_key_value_heads" if base == "attn_k" else "num_attention_heads"]
        if shape[0] % (2 * heads):
            rule = f"the number of rows must be divisible by 2 * {heads} heads"
            raise CheckpointError(f"{file.path}: {shown(name)} is {list(shape)}: {rule}")

        def untwisted(rows: np.ndarray, heads: int = heads) -> np.ndarray:
            # ggml rotates the pairs (2i, 2i + 1), but the folder's model rotates (i, i + H/2), so
            # the converter interleaves the rows of a head's two halves. This undoes it.
            pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
            return pairs.swapaxes(1, 2).reshape(rows.shape)

        change = untwisted
    elif names.offset_norms and base.endswith("norm") and base != "ssm_norm":
        change = lambda scale: scale - scale.dtype.type(1)  # noqa: E731
    elif base in names.transposed and end == "weight":
        change, shape = np.transpose, shape[::-1]
    elif base in names.rows:
        change, shape = partial(np.expand_dims, axis=0), (1, *shape)
    elif base in names.depthwise and end == "weight":
        change, shape = partial(np.expand_dims, axis=1), (shape[0], 1, *shape[1:])
    yield f"{to}.{end}", _Source(name, None, change), TensorInfo("", dtype, shape)


def _partner(file: GgufFile, name: str, other: str, shape: tuple[int | None, ...]) -> str:
    """Return the name of a tensor that is read with another one, after checking its shape."""
    found = file.tensors.get(other)
    sizes = () if found is None else found.shape
    if len(sizes) != len(shape) or any(
        n not in (None, m) for n, m in zip(shape, sizes, strict=True)
    ):
        state = "is missing" if found is None else f"is {list(sizes)}"
        wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise CheckpointError(f"{file.path}: {other} {state}: must be {wanted}, like {name}")
    return other


class _Keys(ConfigKeys):
    """Metadata keys of an architecture, and tensors that belong to the config."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        super().__init__(file.metadata, str(file.path), "gguf", prefix=prefix)
        self.file, self.factors_read = file, set[str]()

    def take(self, name: str, default: Value | None = MISSING) -> Any:
        value = ObjectKeys.take(self, name, default)
        if isinstance(value, np.ndarray | list):
            self.fail(name, value, "must be a single value, not a list")
        return value

    def integer(self, name: str, default: int | None = MISSING, *, least: int = 1) -> int:
        value = ObjectKeys.take(self, name, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = int(value[0])  # one value per layer, all equal
        if type(value) is not int or not 0 < value < 2**31:
            self.fail(name, value, "must be a positive integer, the same for all layers")
        return value

    def number(self, name: str, default: float | None = MISSING) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(name, value, "must be a finite number")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        value = self.take(name, allowed[0])
        if value not in allowed:
            self.fail(name, value, "must be " + " or ".join(shown(one) for one in allowed))

    def factors(self, tensor: str) -> np.ndarray:
        """Return the RoPE scaling factors stored in a tensor."""
        if tensor not in self.file.tensors:
            raise CheckpointError(f"{self.where}: tensor {tensor} is missing")
        self.factors_read.add(tensor)
        return self.file.read(tensor).reshape(-1)

    def vocab_size(self) -> int:
        """Return the number of embedding rows, after checking that their width matches the key."""
        # The table defines the vocabulary size. Taking the key marks it as read.
        self.take("vocab_size", None)
        found = self.file.tensors.get("token_embd.weight")
        if found is None:
            raise CheckpointError(f"{self.where}: tensor token_embd.weight is missing")
        if len(found.shape) != 2:
            rule = f"token_embd.weight is {list(found.shape)}: must have 2 axes"
            raise CheckpointError(f"{self.where}: {rule}")
        rows, columns = found.shape
        if (width := self.integer("embedding_length")) != columns:
            self.fail(
                "embedding_length", width, f"must equal the columns of token_embd.weight, {columns}"
            )
        return rows

    def check_all_read(self) -> None:
        for name in self.unread():
            rule = f"not a supported key of the architecture {self.file.architecture}"
            raise ConfigError(f"{self.where}: {shown(self.prefix + name)}: {rule}")


@dataclass(frozen=True)
class _Names:
    """Tensor names in the folder for an architecture, and the changes to undo."""

    layer: Mapping[str, str]
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        }
    )  # fmt: skip
    block: str = "model.layers"
    rotated: tuple[str, ...] = ()
    """Tensors whose rows interleave the two halves of a head, because ggml rotates neighbors."""
    offset_norms: bool = False
    transposed: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """Vectors that the folder stores as matrices with one row."""
    depthwise: tuple[str, ...] = ()
    """Depthwise convolutions, which the folder stores as [channels, 1, width]."""
    plain: tuple[str, ...] = ()
    """Tensors whose folder names lack ".weight" and have "_bias" instead of ".bias"."""


_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_GATED = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _common(
    keys: _Keys, model_type: str, kv_heads: int | None = None, head_dim: int | None = None
) -> JsonObject:
    """Read the sizes and the rotary embedding, and return them as keys of config.json.

    `kv_heads` and `head_dim` replace attention.head_count_kv and attention.key_length.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if head_dim is None:
        name = "attention.value_length"
        head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
        if (found := keys.integer(name, head_dim)) != head_dim:
            keys.fail(name, found, f"must equal attention.key_length, {head_dim}")
    keys.require("attention.causal", True)
    config: JsonObject = dict(
        model_type=model_type,
        vocab_size=keys.vocab_size(),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_hidden_layers=keys.integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or keys.integer("attention.head_count_kv", heads),
        max_position_embeddings=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in keys.file.tensors,
        rope_theta=keys.number("rope.freq_base", 10_000.0),
    )
    # config.json omits a head width of hidden_size / num_attention_heads.
    if head_dim * heads != hidden:
        config["head_dim"] = head_dim
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated_part(rotated, head_dim)
    keys.take("rope.scaling.finetuned", None)
    kind = keys.take("rope.scaling.type", "none")
    if "rope_freqs.weight" in keys.file.tensors:
        if kind != "none":
            keys.fail(
                "rope.scaling.type",
                kind,
                "must be 'none', because rope_freqs.weight defines the scaling",
            )
        config["rope_scaling"] = _llama3_scaling(keys, config, head_dim)
    elif kind == "none":
        keys.take("rope.scaling.factor", None)
    elif kind not in ("linear", "yarn"):
        keys.fail("rope.scaling.type", kind, "must be 'none', 'linear', or 'yarn'")
    else:
        scaling: JsonObject = dict(rope_type=kind, factor=keys.number("rope.scaling.factor"))
        config["rope_scaling"] = scaling
        if kind == "yarn":
            trained = keys.integer("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = trained
            for name in ("beta_fast", "beta_slow"):
                if f"rope.scaling.yarn_{name}" in keys.content:
                    scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
            for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
                keys.require(f"rope.scaling.{name}", 1.0)
    return config


def _llama3_scaling(keys: _Keys, config: JsonObject, head_dim: int) -> JsonObject:
    """Recover the Llama 3.1 scaling from the tensor that contains the frequency divisors.

    The tensor must match low factor 1, high factor 4, and 8192 trained positions, for some factor
    f. Wavelengths up to 8192/4 are then unchanged, and wavelengths from 8192 are multiplied by f.
    """
    factors = keys.factors("rope_freqs.weight").astype(np.float64)
    low, high, trained = 1.0, 4.0, 8192
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * np.pi * float(config["rope_theta"]) ** exponents
    factor = float(factors.max()) if factors.size else math.nan
    share = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    # A factor that is NaN or below 1 produces NaN, which compares unequal to everything.
    want = 1 / ((1 - share) / factor + share) if factor >= 1 else factors * math.nan
    if want.shape != factors.shape or not np.allclose(want, factors, rtol=1e-4):
        rule = f"must match Llama 3.1 scaling with low {low}, high {high}, and {trained} positions"
        raise ConfigError(f"{keys.file.path}: rope_freqs.weight {rule}")
    return dict(
        rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
        original_max_position_embeddings=trained,
    )  # fmt: skip


_ARCHITECTURES = (
    "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "gpt2",
    "gpt-oss", "lfm2", "deepseek2", "qwen3next",
)  # fmt: skip
"""The supported values of `general.architecture`."""


def _read_architecture(keys: _Keys) -> tuple[JsonObject, _Names]:
    """Return the keys of config.json and the tensor names for a file's architecture."""

    def expert_names(module: str, gate: str, up: str, down: str) -> dict[str, str]:
        expert = f"{module}.experts.{{e}}"
        return {
            "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": f"{module}.gate",
            "ffn_gate_exps": f"{expert}.{gate}", "ffn_up_exps": f"{expert}.{up}",
            "ffn_down_exps": f"{expert}.{down}",
        }  # fmt: skip

    match architecture := keys.file.architecture:
        case "llama":  # llama.cpp also uses this name for Mistral and Mixtral (with experts)
            keys.require("rope.scaling.attn_factor", 1.0)
            keys.take("expert_used_count", None)  # 0 if there are no experts, like expert_count
            if keys.take("expert_count", 0) != 0:
                config = _common(keys, "mixtral")
                config["num_local_experts"] = keys.integer("expert_count")
                config["num_experts_per_tok"] = keys.integer("expert_used_count")
                feed_forward = expert_names("block_sparse_moe", "w1", "w3", "w2")
            else:
                config, feed_forward = _common(keys, "llama"), _GATED
                config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
                config["mlp_bias"] = "blk.0.ffn_gate.bias" in keys.file.tensors
            if "partial_rotary_factor" in config:
                dims = keys.take("rope.dimension_count")
                keys.fail("rope.dimension_count", dims, "must equal the width of a head")
            return config, _Names(_ATTENTION | feed_forward, rotated=("attn_q", "attn_k"))
        case "qwen2":
            return _common(keys, "qwen2"), _Names(_ATTENTION | _GATED)
        case "qwen3":
            config = _common(keys, "qwen3")
            width = config["hidden_size"] // config["num_attention_heads"]
            config["head_dim"] = keys.integer("attention.key_length", width)
            return config, _Names(_ATTENTION | _GATED | _QK_NORMS)
        case "qwen2moe" | "qwen3moe":
            config = _common(keys, architecture.replace("moe", "_moe")) | dict(
                num_experts=keys.integer("expert_count"),
                num_experts_per_tok=keys.integer("expert_used_count"),
                moe_intermediate_size=keys.integer("expert_feed_forward_length"),
            )
            # No key specifies whether the weights of a token's experts are normalized.
            config["norm_topk_prob"] = architecture == "qwen3moe"
            names = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
            if architecture == "qwen3moe":
                return config, _Names(_ATTENTION | names | _QK_NORMS)
            shared = keys.integer("expert_shared_feed_forward_length")
            config["shared_expert_intermediate_size"] = shared
            names["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
            for name in ("gate", "up", "down"):
                names[f"ffn_{name}_shexp"] = f"mlp.shared_expert.{name}_proj"
            return config, _Names(_ATTENTION | names, rows=("ffn_gate_inp_shexp",))
        case "gemma":
            config = _common(keys, "gemma")
            config["head_dim"] = keys.integer("attention.key_length")
            config["hidden_act"] = "gelu_pytorch_tanh"
            return config, _Names(_ATTENTION | _GATED, offset_norms=True)
        case "gemma2" | "gemma3":
            first = architecture == "gemma2"
            if not first:
                keys.number("rope.freq_base")  # required: unlike Gemma 2, it has no safe default
            config = _common(keys, "gemma2" if first else "gemma3_text")
            scalar = head_dim = keys.integer("attention.key_length")
            # No key stores the different scale of the 27B model, so detect it by depth, as
            # llama.cpp does.
            if config["num_hidden_layers"] == (46 if first else 62):
                scalar = config["hidden_size"] // config["num_attention_heads"]
            config |= dict(
                head_dim=head_dim,
                hidden_activation="gelu_pytorch_tanh",
                query_pre_attn_scalar=scalar,
                sliding_window=keys.integer("attention.sliding_window"),
            )
            names = _ATTENTION | _GATED | _SANDWICH
            if first:
                for name, usual in (
                    ("attn_logit_softcapping", 50.0),
                    ("final_logit_softcapping", 30.0),
                ):
                    config[name] = keys.number(name, usual)
                return config, _Names(names, offset_norms=True)
            config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
            config["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern", 6)
            if "final_logit_softcapping" in keys.content:
                config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
            return config, _Names(names | _QK_NORMS, offset_norms=True)
        case "phi3":
            stretch = None
            if "rope.scaling.attn_factor" in keys.content:
                stretch = keys.number("rope.scaling.attn_factor")
            config = _common(keys, "phi3")
            config["sliding_window"] = None
            if keys.take("attention.sliding_window", 0) != 0:
                config["sliding_window"] = keys.integer("attention.sliding_window")
            if "rope.scaling.original_context_length" in keys.content:
                trained = keys.integer("rope.scaling.original_context_length")
                config["original_max_position_embeddings"] = trained
            if "rope_factors_long.weight" in keys.file.tensors:
                scaling: JsonObject = dict(rope_type="longrope")
                for name in ("long", "short"):
                    factors = keys.factors(f"rope_factors_{name}.weight")
                    # The shortest decimal for the float32 is the value in config.json.
                    scaling[f"{name}_factor"] = [float(str(factor)) for factor in factors]
                if stretch is not None:
                    scaling["attention_factor"] = stretch
                config["rope_scaling"] = scaling
            elif stretch not in (None, 1.0):
                keys.fail("rope.scaling.attn_factor", stretch, "needs rope_factors_long.weight")
            names = {
                "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
                "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
            }  # fmt: skip
            return config, _Names(names)
        case "gpt-oss":
            config = _common(keys, "gpt_oss") | dict(
                head_dim=keys.integer("attention.key_length"),
                sliding_window=keys.integer("attention.sliding_window"),
                num_local_experts=keys.integer("expert_count"),
                num_experts_per_tok=keys.integer("expert_used_count"),
            )
            width = config["intermediate_size"]
            if (found := keys.integer("expert_feed_forward_length")) != width:
                keys.fail(
                    "expert_feed_forward_length", found, f"must equal feed_forward_length, {width}"
                )
            if config.setdefault("rope_scaling", dict(rope_type="default"))["rope_type"] == "yarn":
                config["rope_scaling"]["truncate"] = False  # not stored in any key
            experts = {f"ffn_{name}_exps": "mlp.experts.gate_up_proj" for name in ("gate", "up")}
            experts |= {"ffn_down_exps": "mlp.experts.down_proj", "attn_sinks": "self_attn.sinks"}
            names = _ATTENTION | experts | {
                "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
            }  # fmt: skip
            return config, _Names(names, plain=tuple(experts))
        case "lfm2":
            layers, name = keys.integer("block_count"), "attention.head_count_kv"
            counts = np.asarray(ObjectKeys.take(keys, name))  # one per layer, 0 for a convolution
            kinds = {*counts.tolist()} if counts.dtype.kind in "iu" and counts.ndim == 1 else {0}
            if len(counts.reshape(-1)) != layers or len(kinds - {0}) != 1 or min(kinds) < 0:
                rule = f"must be a list of {layers} (block_count) of 0 and one other number"
                keys.fail(name, counts.tolist(), rule)
            config = _common(keys, "lfm2", max(kinds))
            config["norm_eps"] = config.pop("rms_norm_eps")
            config["layer_types"] = ["full_attention" if count else "conv" for count in counts]
            config["conv_L_cache"] = keys.integer("shortconv.l_cache")
            config["block_auto_adjust_ff_dim"] = False
            modules = {
                "attn_norm": "operator_norm", "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm", "attn_output": "self_attn.out_proj",
                "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
            }  # fmt: skip
            modules |= {f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "out_proj")}
            modules["shortconv.conv"] = "conv.conv"
            outer = {"token_embd": "model.embed_tokens", "output": "lm_head"}
            outer["token_embd_norm"] = "model.embedding_norm"
            return config, _Names(_ATTENTION | modules, outer, depthwise=("shortconv.conv",))
        case "qwen3next":
            config = _common(keys, "qwen3_next")
            values, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
            if inner % values:
                keys.fail("ssm.inner_size", inner, f"must be a multiple of {values} heads")
            config |= dict(
                head_dim=keys.integer("attention.key_length"),
                linear_conv_kernel_dim=keys.integer("ssm.conv_kernel"),
                linear_key_head_dim=keys.integer("ssm.state_size"),
                linear_num_key_heads=keys.integer("ssm.group_count"),
                linear_num_value_heads=values,
                linear_value_head_dim=inner // values,
                full_attention_interval=keys.integer("full_attention_interval", 4),
                num_experts=keys.integer("expert_count"),
                num_experts_per_tok=keys.integer("expert_used_count"),
                moe_intermediate_size=keys.integer("expert_feed_forward_length"),
                shared_expert_intermediate_size=keys.integer("expert_shared_feed_forward_length"),
                norm_topk_prob=True,
            )
            config.setdefault("partial_rotary_factor", 1.0)  # the family's default is 0.25
            names = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
            names["post_attention_norm"] = names.pop("ffn_norm")
            names["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
            for name in ("gate", "up", "down"):
                names[f"ffn_{name}_shexp"] = f"mlp.shared_expert.{name}_proj"
            modules = {
                "ssm_in": "in_proj_qkvz", "attn_qkv": "in_proj_qkvz", "attn_gate": "in_proj_qkvz",
                "ssm_ba": "in_proj_ba", "ssm_a": "A_log", "ssm_dt": "dt", "ssm_norm": "norm",
                "ssm_conv1d": "conv1d", "ssm_out": "out_proj",
            }  # fmt: skip
            names |= {name: f"linear_attn.{module}" for name, module in modules.items()}
            return config, _Names(
                _ATTENTION | names | _QK_NORMS, offset_norms=True, plain=("ssm_dt",),
                rows=("ffn_gate_inp_shexp",), depthwise=("ssm_conv1d",),
            )  # fmt: skip
        case "deepseek2":
            has = keys.content.__contains__
            heads, rope = keys.integer("attention.head_count"), keys.integer("rope.dimension_count")
            # without the keys of MLA, an older file stores the widths of the expanded heads
            latent = has("attention.key_length_mla")
            width, value = (
                keys.integer(f"attention.{part}_length" + "_mla" * latent)
                for part in ("key", "value")
            )
            rank = keys.integer("attention.kv_lora_rank")
            wanted = {"head_count_kv": 1, "key_length": rank + rope, "value_length": rank}
            for name, size in wanted.items() if latent else [("head_count_kv", heads)]:
                keys.require(f"attention.{name}", size)
            if width <= rope:
                keys.fail("rope.dimension_count", rope, f"must be below the key width, {width}")
            gating = keys.take("expert_gating_func", 1)
            keys.require("expert_gating_func", 1, 2)
            names = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
            config = _common(keys, f"deepseek_v{1 + gating}", heads, rope) | dict(
                kv_lora_rank=rank,
                q_lora_rank=None,
                qk_nope_head_dim=width - rope,
                qk_rope_head_dim=rope,
                v_head_dim=value,
                n_routed_experts=keys.integer("expert_count"),
                num_experts_per_tok=keys.integer("expert_used_count"),
                n_shared_experts=keys.integer("expert_shared_count"),
                moe_intermediate_size=keys.integer("expert_feed_forward_length"),
                first_k_dense_replace=keys.take("leading_dense_block_count", 0),
                routed_scaling_factor=keys.number("expert_weights_scale", 1.0),
                norm_topk_prob=keys.take("expert_weights_norm", False),
                n_group=keys.integer("expert_group_count", 1),
                topk_group=keys.integer("expert_group_used_count", 1),
            )
            if has("attention.q_lora_rank"):
                config["q_lora_rank"] = keys.integer("attention.q_lora_rank")
            if gating == 1 and config["n_group"] > 1:
                config["topk_method"] = "group_limited_greedy"
            if config.get("rope_scaling", {}).get("rope_type") == "yarn":
                # the models have equal mscale and mscale_all_dim, of which the file stores a tenth
                scale = float(f"{10 * keys.number('rope.scaling.yarn_log_multiplier'):.6g}")
                config["rope_scaling"] |= dict(mscale=scale, mscale_all_dim=scale)
            keys.take("nextn_predict_layers", None)  # the converter drops these layers
            if gating == 2:
                config["num_nextn_predict_layers"] = 0
            for name in ("gate", "up", "down"):
                names[f"ffn_{name}_shexp"] = f"mlp.shared_experts.{name}_proj"
            names |= {
                "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
                "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
                "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
                "attn_output": "self_attn.o_proj", "exp_probs_b": "mlp.gate.e_score_correction",
            }  # fmt: skip
            return config, _Names(_GATED | names, plain=("exp_probs_b",))
        case "gpt2":
            heads = keys.integer("attention.head_count")
            if (found := keys.integer("attention.head_count_kv", heads)) != heads:
                keys.fail(
                    "attention.head_count_kv", found, f"must equal attention.head_count, {heads}"
                )
            config = dict(
                model_type="gpt2",
                vocab_size=keys.vocab_size(),
                n_positions=keys.integer("context_length"),
                n_embd=keys.integer("embedding_length"),
                n_layer=keys.integer("block_count"),
                n_head=heads,
                n_inner=keys.integer("feed_forward_length"),
                layer_norm_epsilon=keys.number("attention.layer_norm_epsilon"),
                tie_word_embeddings="output.weight" not in keys.file.tensors,
            )
            layer = {
                "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
                "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
            }  # fmt: skip
            outer = {
                "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f", "output": "lm_head",
            }  # fmt: skip
            matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
            return config, _Names(layer, outer, "transformer.h", transposed=matrices)
    known = ", ".join(_ARCHITECTURES)
    rule = f"general.architecture is {shown(architecture)}: must be one of {known}"
    raise ConfigError(f"{keys.file.path}: {rule}")
