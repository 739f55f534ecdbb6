"""The definition of a family of published checkpoints: a list of keys and a table of tensors.

Each `TensorMapping` of a table says which tensor of a file holds a parameter, and in what layout.
Reading and writing both follow from the list and the table, so that a family is data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from transformer_jax.config import Experts, ModelConfig
from transformer_jax.pretrained.families.keys import ConfigKeys, Entry, Fields, meant
from transformer_jax.untrusted_files import JsonObject
from transformer_jax.values import value_class

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Say which rows of a file's tensor are of one parameter, where several share it.

    The rows are `groups` runs of `total`; of each run, those from `start` on are the parameter's,
    `count` of them. GPT-NeoX has a run of each head, with its query, key and value; Phi-3 has one.
    """

    groups: int
    start: int
    count: int
    total: int


@dataclass(frozen=True)
class Layout:
    """Convert one parameter between our shape and a file's.

    | kind   | shape in the file                                                     |
    |--------|-----------------------------------------------------------------------|
    | same   | the parameter's                                                       |
    | flat   | [size]: all axes in one (biases of heads)                             |
    | row    | [1, size]                                                             |
    | linear | [outputs, inputs], each side flattened, as torch.nn.Linear stores it  |
    | conv   | [inputs, outputs], each side flattened, as GPT-2's Conv1D stores it   |

    The first `inputs` axes of a matrix are its inputs, the others its outputs. If `parts` is above
    1, the last axis of the file's tensor holds that many parameters side by side, or `in_turn`
    column by column, and this one is number `part`, counted from 0. With `rows` the first axis of a
    linear or flat tensor holds several parameters.
    """

    kind: Literal["same", "flat", "row", "linear", "conv"] = "same"
    inputs: int = 1
    part: int = 0
    parts: int = 1
    in_turn: bool = False
    rows: Rows | None = None

    def file_shape(self, shape: Shape) -> Shape:
        """Return the shape of the whole tensor in the file for a parameter of this shape."""
        rows, columns = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
        match self.kind:
            case "same":
                found = shape
            case "flat":
                found = (math.prod(shape),)
            case "row":
                found = (1, math.prod(shape))
            case "linear":
                found = (columns, rows)
            case "conv":
                found = (rows, columns)
        if self.rows is not None:
            found = (self.rows.groups * self.rows.total, *found[1:])
        return (*found[:-1], found[-1] * self.parts) if self.parts > 1 else found

    def read(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the parameter of this shape that a file's tensor holds, as a view of it."""
        if self.in_turn:
            tensor = tensor[..., self.part :: self.parts]
        elif self.parts > 1:
            width = tensor.shape[-1] // self.parts
            tensor = tensor[..., self.part * width : (self.part + 1) * width]
        if (rows := self.rows) is not None:
            runs = tensor.reshape(rows.groups, rows.total, *tensor.shape[1:])
            tensor = runs[:, rows.start : rows.start + rows.count]
            tensor = tensor.reshape(-1, *tensor.shape[2:])
        return (tensor.T if self.kind == "linear" else tensor).reshape(shape)

    def write(self, parameter: np.ndarray) -> np.ndarray:
        """Return the file's tensor for a parameter; of several parts, this part alone."""
        shape = parameter.shape
        if self.kind == "linear":
            rows = math.prod(shape[: self.inputs])
            return np.ascontiguousarray(parameter.reshape(rows, -1).T)
        if self.kind == "flat":
            return parameter.reshape(-1)
        whole = self.file_shape(shape)  # of a scalar () has no last axis
        return parameter.reshape(*whole[:-1], whole[-1] // self.parts) if whole else parameter


def joined(layouts: Sequence[Layout], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the file's tensor that these parameters share, of what their layouts `write`."""
    if len(pieces) == 1:
        return pieces[0]
    if layouts[0].in_turn:
        return np.stack(pieces, axis=-1).reshape(*pieces[0].shape[:-1], -1)
    if layouts[0].rows is None:
        return np.concatenate(pieces, axis=-1)
    # Of each run the rows of all the parameters, and then those of the next run.
    rest = pieces[0].shape[1:]
    runs = [piece.reshape(layouts[0].rows.groups, -1, *rest) for piece in pieces]
    return np.concatenate(runs, axis=1).reshape(-1, *rest)


SAME = Layout()
FLAT = Layout("flat")
ROW = Layout("row")
LINEAR = Layout("linear")
"""[D, N, H] or [D, F] as [N H, D] or [F, D]."""
LINEAR_OUT = Layout("linear", inputs=2)
"""[N, H, D] as [D, N H]."""


@dataclass(frozen=True)
class TensorMapping:
    """Say which tensor of a file holds a parameter.

    Attributes:
        param: path below `params`, "decoder/block_0/attention/query/kernel".
        tensor: name in the file, "model.layers.0.self_attn.q_proj.weight".
        layout: how the tensor's axes become the parameter's.
    """

    param: str
    tensor: str
    layout: Layout = SAME


def blocks(stack: str, depth: int, mappings: Iterable[TensorMapping]) -> list[TensorMapping]:
    """Repeat the mappings of one block for each of `depth` blocks of a stack, such as "decoder".

    `{i}` in the name of a tensor becomes the number of the block.
    """
    return [
        TensorMapping(f"{stack}/block_{i}/{m.param}", m.tensor.format(i=i), m.layout)
        for i in range(depth)
        for m in mappings
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
    """Map linear layers whose matrices share one tensor, in `groups` runs of their rows.

    `counts` has the rows of each layer in a run, in their order; a bias has the same form.
    """
    found, start = list[TensorMapping](), 0
    for param, count in counts.items():
        rows, start = Rows(groups, start, count, sum(counts.values())), start + count
        for mapping in linear(param, tensor, bias=bias):
            found.append(replace(mapping, layout=replace(mapping.layout, rows=rows)))
    return found


def attention_names(module: str, out: str, names: str = "q_proj k_proj v_proj") -> dict[str, str]:
    """Return the names of an attention's four matrices, for `named`."""
    query, key, value = (f"{module}.{name}" for name in names.split())
    return {
        "attention/query": query, "attention/key": key, "attention/value": value,
        "attention/out": f"{module}.{out}",
    }  # fmt: skip


def gated_names(module: str) -> dict[str, str]:
    """Return the names of a feed-forward with a gate as Llama has them, for `named`."""
    return {f"feed_forward/{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def named(config: ModelConfig, module: str, names: Mapping[str, str]) -> list[TensorMapping]:
    """Map the layers of a block, each by its name in the module, with the biases of the config.

    Which norms there are follows from the config too: one that the branches share, or one of each.
    "attention/qkv" is a matrix of query, key and value with a run of rows for each head of keys.
    """
    qkv_bias, out_bias, ff_bias = (meant(config, f"{part}_bias") for part in ("qkv", "out", "ff"))
    # BLOOM's and GPT-NeoX's runs are Falcon's with one query to a key.
    width, group = config.key_dim, config.num_heads // config.kv_heads
    runs = {"attention/query": group * width, "attention/key": width, "attention/value": width}
    shared = config.norm_order == "parallel_shared"
    found = list[TensorMapping]()
    for param, name in names.items():
        tensor, (_, _, kind) = f"{module}.{name}", param.rpartition("/")
        if param in ("norm", "norm_attention", "norm_feed_forward") and shared != (param == "norm"):
            continue
        if "norm" in param:
            found += norm(param, tensor, config.norm == "layernorm" and config.use_bias)
        elif kind.endswith("_scale"):
            found += [TensorMapping(param, f"{tensor}.weight")] if config.qk_norm else []
        elif kind == "qkv":
            found += fused(tensor, config.kv_heads, runs, qkv_bias)
        elif kind == "out":
            found += linear(param, tensor, LINEAR_OUT, out_bias)
        else:
            bias = ff_bias if param.startswith("feed_forward") else qkv_bias
            found += linear(param, tensor, bias=bias)
    return found


def decoder(
    config: ModelConfig,
    tokens: str,
    block: list[TensorMapping],
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
    """Return the table of decoders all of whose blocks are as `named` has them."""
    return lambda config: decoder(
        config, tokens, named(config, block, names), last_norm, output, more
    )


def output_matrix(config: ModelConfig, name: str) -> list[TensorMapping]:
    """Map the output matrix where it is not the embeddings', and the bias of the logits."""
    found = [] if config.tie_embeddings else [TensorMapping("embed/output", f"{name}.weight")]
    return [*found, *([TensorMapping("embed/bias", f"{name}.bias")] if config.logit_bias else [])]


def expert_linear(param: str, tensor: str, count: int) -> list[TensorMapping]:
    """Map the matrices of all experts, [count, inputs, outputs], each of which is a tensor.

    `{e}` in the name of the tensor becomes the number of the expert, with which the path of its
    part of the parameter ends.
    """
    return [
        TensorMapping(f"{param}/kernel/{e}", tensor.replace("{e}", f"{e}") + ".weight", LINEAR)
        for e in range(count)
    ]


@value_class
class Family:
    """Describe one `model_type` of config.json; `FAMILIES` lists all of them."""

    name: str
    """The `model_type`."""
    keys: Sequence[Entry]
    """The keys of config.json, in the order in which they are read and written."""
    table: Callable[[ModelConfig], list[TensorMapping]]
    """Lists every parameter of a config once."""
    architecture: str | Callable[[ModelConfig], str] = ""
    """The class of transformers, or a function that names that of a config."""
    prefix: str = ""
    """Start of the names of all tensors but the head's; a model saved without its head, or an old
    file, leaves it out."""
    head_tensors: tuple[str, ...] = ()
    """Patterns of the names that never have the prefix."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of names that hold no parameter: buffers, and layers that the model does not use."""
    tied_copies: Mapping[str, str] | Callable[[ModelConfig], Mapping[str, str]] = field(
        default_factory=dict
    )
    """Name of a second copy of a tied tensor, which a file may hold, to the name of the first; or
    a function that makes this mapping for a config."""
    computed_tensors: Mapping[str, Callable[[ModelConfig, Shape], np.ndarray | None]] = field(
        default_factory=dict
    )
    """Name of a tensor that follows from the config, to the function that computes it for the shape
    in the file; the function gives None if the tensor cannot have that shape."""
    rotates_parts: bool = False
    """Whether transformers rotates a part of each head; its other classes ignore that key, or fail
    where the rotation is stretched."""
    divides_width: bool = False
    """Whether transformers needs d_model to be divisible by num_heads, whatever head_dim is."""
    shares_if_tied: bool = False
    """Whether encoder and decoder share a table in transformers only if the output does, too."""
    needed_ids: tuple[str, ...] = ()
    """Keys of token ids that transformers refuses if they are null, and not if they are absent."""
    renames_modules: bool = False
    """Whether the modules of transformers are named differently from the tensors of the files."""
    joined_experts: bool = False
    """Whether a tensor holds a matrix of all experts of a block, and not of one."""
    old_suffixes: Mapping[str, str] = field(default_factory=dict)
    """How names of tensors end in old files, and how the same names end today."""

    def read(self, keys: ConfigKeys) -> ModelConfig:
        """Return the config that the keys mean."""
        fields: Fields = {}
        for entry in self.keys:  # in their order: windows need the number of layers
            fields |= entry.read(keys, fields)
        # Fields of the inner config have a dot, so that one list of keys serves both.
        own = {name: fields.pop(name) for name in [*fields] if name.startswith("experts.")}
        if own:
            fields["experts"] = Experts(**{n.removeprefix("experts."): v for n, v in own.items()})
        return ModelConfig(**fields)

    def write(self, config: ModelConfig) -> JsonObject:
        """Return the keys of a config; `write_config` checks that `read` gives it back."""
        named = self.architecture
        content: JsonObject = {}
        if named:
            content["architectures"] = [named(config) if callable(named) else named]
        for entry in self.keys:
            content |= entry.write(config)
        return content

    def copies(self, config: ModelConfig) -> Mapping[str, str]:
        """Return the name of every second copy that a file of this config may hold."""
        return self.tied_copies(config) if callable(self.tied_copies) else self.tied_copies
