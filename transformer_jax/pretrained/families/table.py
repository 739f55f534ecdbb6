"""Definition of a family of published checkpoints as a list of keys and a table of tensors.

Each `TensorMapping` in a table specifies the tensor that stores a parameter, and its layout. The
list and the table define both reading and writing, so a family is pure data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.pretrained.families.keys import (
    GROUPS,
    ConfigKeys,
    Entry,
    Fields,
    effective,
)
from transformer_jax.untrusted_files import JsonObject
from transformer_jax.values import value_class

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that belong to one of several parameters stored in the tensor.

    The tensor consists of `groups` runs of `total` rows. In each run, the parameter has `count`
    rows, beginning with row `start`. GPT-NeoX has one run per head, which contains its query, key
    and value. Phi-3 has a single run.
    """

    groups: int
    start: int
    count: int
    total: int


@dataclass(frozen=True)
class Layout:
    """Conversion of one parameter between its shape in this library and in a file.

    | kind      | shape in the file                                                     |
    |-----------|-----------------------------------------------------------------------|
    | same      | the parameter's                                                       |
    | flat      | [size]: all axes in one (biases of heads)                             |
    | row       | [1, size]                                                             |
    | heads     | [1, 1, size, 1]                                                       |
    | linear    | [outputs, inputs], each side flattened, as torch.nn.Linear stores it  |
    | conv      | [inputs, outputs], each side flattened, as GPT-2's Conv1D stores it   |
    | depthwise | [channels, 1, width], as a depthwise torch.nn.Conv1d stores it        |

    The first `inputs` axes of a matrix are its inputs, and the other axes are its outputs. If
    `parts` is greater than 1, the last axis of the tensor in the file contains that many
    parameters. They are concatenated, or have alternating columns if `interleaved` is set. `part`
    is the index of this parameter, counted from 0. If `rows` is set, the first axis of a linear,
    flat or depthwise tensor contains several parameters.
    """

    kind: Literal["same", "flat", "row", "heads", "linear", "conv", "depthwise"] = "same"
    inputs: int = 1
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    rows: Rows | None = None

    def file_shape(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor in the file for a parameter with this shape."""
        rows, columns = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
        match self.kind:
            case "same":
                found = shape
            case "flat":
                found = (math.prod(shape),)
            case "row":
                found = (1, math.prod(shape))
            case "heads":
                found = (1, 1, math.prod(shape), 1)
            case "linear":
                found = (columns, rows)
            case "conv":
                found = (rows, columns)
            case "depthwise":
                found = (columns, 1, rows)
        if self.rows is not None:
            found = (self.rows.groups * self.rows.total, *found[1:])
        return (*found[:-1], found[-1] * self.parts) if self.parts > 1 else found

    def read(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the parameter with this shape that a tensor in a file contains, as a view."""
        if self.interleaved:
            tensor = tensor[..., self.part :: self.parts]
        elif self.parts > 1:
            width = tensor.shape[-1] // self.parts
            tensor = tensor[..., self.part * width : (self.part + 1) * width]
        if (rows := self.rows) is not None:
            runs = tensor.reshape(rows.groups, rows.total, *tensor.shape[1:])
            tensor = runs[:, rows.start : rows.start + rows.count]
            tensor = tensor.reshape(-1, *tensor.shape[2:])
        return (tensor.T if self.kind in ("linear", "depthwise") else tensor).reshape(shape)

    def write(self, parameter: np.ndarray) -> np.ndarray:
        """Return the tensor in the file for a parameter, or the part of a shared tensor."""
        shape = parameter.shape
        if self.kind == "linear":
            rows = math.prod(shape[: self.inputs])
            return np.ascontiguousarray(parameter.reshape(rows, -1).T)
        if self.kind == "flat":
            return parameter.reshape(-1)
        if self.kind == "depthwise":
            return np.ascontiguousarray(parameter.T[:, None])
        whole = self.file_shape(shape)  # () for a scalar, which has no last axis
        return parameter.reshape(*whole[:-1], whole[-1] // self.parts) if whole else parameter


def joined(layouts: Sequence[Layout], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Join parameters that share a tensor, given the results of `write` for their layouts."""
    if len(pieces) == 1:
        return pieces[0]
    if layouts[0].interleaved:
        return np.stack(pieces, axis=-1).reshape(*pieces[0].shape[:-1], -1)
    if layouts[0].rows is None:
        return np.concatenate(pieces, axis=-1)
    # Each run contains the rows of all parameters.
    rest = pieces[0].shape[1:]
    runs = [piece.reshape(layouts[0].rows.groups, -1, *rest) for piece in pieces]
    return np.concatenate(runs, axis=1).reshape(-1, *rest)


SAME = Layout()
FLAT = Layout("flat")
ROW = Layout("row")
LINEAR = Layout("linear")
"""[D, N, H] or [D, F] stored as [N H, D] or [F, D]."""
LINEAR_OUT = Layout("linear", inputs=2)
"""[N, H, D] stored as [D, N H]."""


@dataclass(frozen=True)
class TensorMapping:
    """Mapping between a parameter and a tensor in a file.

    Attributes:
        param: the path of the parameter, such as "decoder/block_0/attention/query/kernel".
        tensor: the name in the file, such as "model.layers.0.self_attn.q_proj.weight".
        layout: the conversion between the axes of the tensor and of the parameter.
    """

    param: str
    tensor: str
    layout: Layout = SAME


Mappings = Iterable[TensorMapping] | Callable[[int], Iterable[TensorMapping]]
"""Mappings of every block, or a function that returns those of the block with a number."""


def blocks(stack: str, depth: int, mappings: Mappings) -> list[TensorMapping]:
    """Repeat the mappings of a block for `depth` blocks of a stack such as "decoder".

    `{i}` in the name of a tensor is replaced by the number of the block.
    """
    return [
        TensorMapping(f"{stack}/block_{i}/{m.param}", m.tensor.format(i=i), m.layout)
        for i in range(depth)
        for m in (mappings(i) if callable(mappings) else mappings)
    ]


def norm(param: str, tensor: str, bias: bool = True) -> list[TensorMapping]:
    """Map the scale of a norm, and its bias if it has one."""
    scale = TensorMapping(f"{param}/scale", f"{tensor}.weight")
    return [scale, TensorMapping(f"{param}/bias", f"{tensor}.bias")] if bias else [scale]


def linear(
    param: str, tensor: str, layout: Layout = LINEAR, bias: bool = True
) -> list[TensorMapping]:
    """Map the matrix of a linear layer, and its bias if it has one."""
    kernel = TensorMapping(f"{param}/kernel", f"{tensor}.weight", layout)
    return [kernel, TensorMapping(f"{param}/bias", f"{tensor}.bias", FLAT)] if bias else [kernel]


def fused(
    tensor: str, groups: int, counts: Mapping[str, int], bias: bool = True
) -> list[TensorMapping]:
    """Map linear layers whose matrices share one tensor, in `groups` runs of rows.

    `counts` contains the number of rows of each layer in a run, in order. Biases have the same
    layout.
    """
    found, start = list[TensorMapping](), 0
    for param, count in counts.items():
        rows, start = Rows(groups, start, count, sum(counts.values())), start + count
        for mapping in linear(param, tensor, bias=bias):
            found.append(replace(mapping, layout=replace(mapping.layout, rows=rows)))
    return found


def attention_names(module: str, out: str, names: str = "q_proj k_proj v_proj") -> dict[str, str]:
    """Return the names of the four matrices in an attention layer, for `named`."""
    query, key, value = (f"{module}.{name}" for name in names.split())
    return {
        "attention/query": query, "attention/key": key, "attention/value": value,
        "attention/out": f"{module}.{out}",
    }  # fmt: skip


def gated_names(module: str) -> dict[str, str]:
    """Return Llama's names for a gated feed-forward network, for `named`."""
    return {f"feed_forward/{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def joint_gate_names(module: str) -> dict[str, str]:
    """Return the names of a gated feed-forward network with one tensor for gate and up."""
    return {
        "feed_forward/gate_up": f"{module}.gate_up_proj",
        "feed_forward/down": f"{module}.down_proj",
    }


def named(config: ModelConfig, module: str, names: Mapping[str, str]) -> list[TensorMapping]:
    """Map the layers of a block by their names in the module, with the biases in the config.

    The config also determines whether the branches share one norm or have one norm each.
    "attention/qkv" is a joint matrix of query, key and value, with a run of rows per key head, and
    "feed_forward/gate_up" is a joint matrix of gate and up, in this order.
    """
    # A bias field may be None, which means the value of `use_bias`.
    qkv_bias, out_bias, ff_bias = (
        effective(config, f"{part}_bias") for part in ("qkv", "out", "ff")
    )
    # BLOOM and GPT-NeoX have the same runs as Falcon, with one query head per key head.
    width, group = config.key_dim, config.num_heads // config.kv_heads
    runs = {"attention/query": group * width, "attention/key": width, "attention/value": width}
    shared = config.norm_order == "parallel_shared"
    found = list[TensorMapping]()
    for param, name in names.items():
        tensor, (_, _, kind) = f"{module}.{name}", param.rpartition("/")
        if param in ("norm", "norm_attention", "norm_feed_forward") and shared != (param == "norm"):
            continue
        # An RMSNorm never has a bias, and a LayerNorm has one if the config has biases.
        if "norm" in param:
            found += norm(param, tensor, config.norm == "layernorm" and config.use_bias)
        elif kind.endswith("_scale"):
            found += [TensorMapping(param, f"{tensor}.weight")] if config.qk_norm else []
            if config.qk_norm_bias:
                found.append(TensorMapping(param.replace("scale", "norm_bias"), f"{tensor}.bias"))
        elif kind.startswith("alpha_"):
            found += [TensorMapping(param, tensor)] if config.activation == "xielu" else []
        elif kind == "qkv":
            found += fused(tensor, config.kv_heads, runs, qkv_bias)
        elif kind == "gate_up":
            hidden = dict.fromkeys(("feed_forward/gate", "feed_forward/up"), config.ff_dim)
            found += fused(tensor, 1, hidden, ff_bias)
        elif kind == "out":
            found += linear(param, tensor, LINEAR_OUT, out_bias)
        else:
            bias = ff_bias if param.startswith("feed_forward") else qkv_bias
            found += linear(param, tensor, bias=bias)
    return found


def decoder(
    config: ModelConfig,
    tokens: str,
    block: Mappings,
    last_norm: str | None,
    output: str = "lm_head",
    more: Sequence[TensorMapping] = (),
) -> list[TensorMapping]:
    """Map a decoder: embeddings, `more` mappings, blocks, the last norm and the output matrix."""
    bias = config.norm == "layernorm" and config.use_bias
    return [
        TensorMapping("embed/tokens", f"{tokens}.weight"),
        *more,
        *blocks("decoder", config.num_layers, block),
        *(norm("decoder/norm", last_norm, bias) if last_norm is not None else []),
        *output_matrix(config, output),
    ]


def named_decoder(
    tokens: str,
    block: str,
    names: Mapping[str, str],
    last_norm: str | None,
    output: str = "lm_head",
    more: Sequence[TensorMapping] = (),
) -> Callable[[ModelConfig], list[TensorMapping]]:
    """Return the table of a decoder that maps its blocks with `named`."""
    return lambda config: decoder(
        config, tokens, named(config, block, names), last_norm, output, more
    )


def output_matrix(config: ModelConfig, name: str) -> list[TensorMapping]:
    """Map the output matrix, unless it is tied to the embeddings, and the bias of the logits."""
    found = [] if config.tie_embeddings else [TensorMapping("embed/output", f"{name}.weight")]
    return [*found, *([TensorMapping("embed/bias", f"{name}.bias")] if config.logit_bias else [])]


def expert_linear(param: str, tensor: str, count: int) -> list[TensorMapping]:
    """Map the matrices of all experts, [count, inputs, outputs], if each has its own tensor.

    `{e}` in the name of a tensor is replaced by the number of the expert, which is also the last
    part of the path of its matrix.
    """
    return [
        TensorMapping(f"{param}/kernel/{e}", tensor.replace("{e}", f"{e}") + ".weight", LINEAR)
        for e in range(count)
    ]


Computed: TypeAlias = Mapping[str, Callable[[ModelConfig, Shape], np.ndarray | None]]


@value_class
class Family:
    """Definition of a `model_type` of config.json. `FAMILIES` lists all families."""

    name: str
    """Name of the family, which is the `model_type` in config.json."""
    keys: Sequence[Entry]
    """Keys of config.json, in the order of reading and writing."""
    table: Callable[[ModelConfig], list[TensorMapping]]
    """Function that lists each parameter of a config exactly once."""
    architecture: str | Callable[[ModelConfig], str] = ""
    """Name of the class in transformers, or a function that returns it for a config."""
    prefix: str = ""
    """Prefix of all tensor names except those of the head. Old files and models that were saved
    without their head omit the prefix."""
    head_tensors: tuple[str, ...] = ()
    """Patterns of tensor names that never have the prefix."""
    ignored_tensors: tuple[str, ...] | Callable[[JsonObject], tuple[str, ...]] = ()
    """Patterns of tensor names that are not parameters, such as buffers and unused layers, or a
    function that returns them for a config.json."""
    tied_copies: Mapping[str, str] | Callable[[ModelConfig], Mapping[str, str]] = field(
        default_factory=dict
    )
    """Mapping from the copies of tied tensors that a file may contain to the originals, or a
    function that returns this mapping for a config."""
    computed_tensors: Computed = field(default_factory=dict)
    """Functions that compute tensors that the config determines, keyed by tensor name. A function
    receives the shape in the file, and returns None if that shape is impossible."""
    scalars: Callable[[ModelConfig], Mapping[str, float]] = lambda config: {}
    """Function that returns the constants that a file contains for a config, keyed by tensor name.
    They are always saved, because transformers leaves them undefined if they are missing."""
    rotates_parts: bool = False
    """Whether the class in transformers supports partial rotation. Other classes ignore that key,
    or fail if RoPE is scaled."""
    divides_width: bool = False
    """Whether transformers requires that d_model is divisible by num_heads for any head_dim."""
    shares_if_tied: bool = False
    """Whether the encoder and the decoder share a table in transformers only if the output is
    tied."""
    needed_ids: tuple[str, ...] = ()
    """Keys of token IDs that transformers rejects if they are null, but not if they are missing."""
    renames_modules: bool = False
    """Whether the modules in transformers have different names from the tensors in the files."""
    joined_experts: bool = False
    """Whether one tensor contains the matrices of all experts in a block."""
    old_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Current suffixes of tensor names, keyed by the suffixes in old files."""
    old_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor names, keyed by the prefixes in files of larger models."""

    def read(self, keys: ConfigKeys) -> ModelConfig:
        """Return the config that the keys describe."""
        fields: Fields = {}
        for entry in self.keys:  # the order matters: windows need the number of layers
            fields |= entry.read(keys, fields)
        # Fields of Experts have a dot, so that one list of keys covers both configs.
        for group, config in GROUPS.items():
            inner = {name: fields.pop(name) for name in [*fields] if name.startswith(f"{group}.")}
            if inner:
                fields[group] = config(**{n.removeprefix(f"{group}."): v for n, v in inner.items()})
        return ModelConfig(**fields)

    def write(self, config: ModelConfig) -> JsonObject:
        """Return the keys for a config. `write_config` verifies them with `read`."""
        named = self.architecture
        content: JsonObject = {}
        if named:
            content["architectures"] = [named(config) if callable(named) else named]
        for entry in self.keys:
            content |= entry.write(config)
        return content

    def computed(self, config: ModelConfig) -> Computed:
        """Return the functions that compute the tensors that a config determines."""

        def compute(_: ModelConfig, shape: Shape, value: float) -> np.ndarray | None:
            return np.full(shape, value) if math.prod(shape) == 1 else None

        scalars = self.scalars(config).items()
        return {**self.computed_tensors, **{n: partial(compute, value=v) for n, v in scalars}}

    def ignored(self, content: JsonObject) -> tuple[str, ...]:
        """Return the patterns of tensor names that are not parameters, given the config.json."""
        patterns = self.ignored_tensors
        return patterns(content) if callable(patterns) else patterns

    def copies(self, config: ModelConfig) -> Mapping[str, str]:
        """Return the copies of tied tensors that a file may contain, mapped to the originals."""
        return self.tied_copies(config) if callable(self.tied_copies) else self.tied_copies
