"""Define what a family of published checkpoints is: a reading of config.json and a table of names.

Each `TensorMapping` of a table says which tensor of a file holds a parameter, and in what layout.
Reading and writing both follow from the table, so that a family is data and one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, overload

import numpy as np

from transformer_jax.config import Activation, ConfigError, ModelConfig
from transformer_jax.config.fields import fail
from transformer_jax.config.model import AnyActivation
from transformer_jax.pretrained.families.other_keys import aliases, other_keys
from transformer_jax.shown import short_repr
from transformer_jax.untrusted_files import JsonObject, shown

Shape = tuple[int, ...]
Fields: TypeAlias = dict[str, Any]
"""Fields of a ModelConfig by name: the config checks their values."""
JsonValue: TypeAlias = Any
"""A number, text, list or object of a JSON file; readers check which."""
Value = TypeVar("Value")


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
        whole = self.file_shape(shape)
        return parameter.reshape(*whole[:-1], whole[-1] // self.parts) if whole else parameter


def joined(layouts: Sequence[Layout], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the file's tensor that these parameters share, of what their layouts `write`."""
    if len(pieces) == 1:
        return pieces[0]
    if layouts[0].in_turn:
        return np.stack(pieces, axis=-1).reshape(*pieces[0].shape[:-1], -1)
    if layouts[0].rows is None:
        return np.concatenate(pieces, axis=-1)
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
    """Repeat the mappings of one block for each block of a stack.

    Args:
        stack: where the blocks are below `params`, such as "decoder".
        depth: how many blocks there are.
        mappings: of one block; `{i}` in the name of a tensor becomes the number of the block.
    """
    return [
        TensorMapping(f"{stack}/block_{i}/{m.param}", m.tensor.format(i=i), m.layout)
        for i in range(depth)
        for m in mappings
    ]


def norm(param: str, tensor: str) -> list[TensorMapping]:
    """Map the scale and the bias of a LayerNorm."""
    return [
        TensorMapping(f"{param}/scale", f"{tensor}.weight"),
        TensorMapping(f"{param}/bias", f"{tensor}.bias"),
    ]


def linear(
    param: str, tensor: str, layout: Layout = LINEAR, bias: bool = True
) -> list[TensorMapping]:
    """Map the matrix of a linear layer, and its bias if it has one."""
    kernel = TensorMapping(f"{param}/kernel", f"{tensor}.weight", layout)
    return [kernel, TensorMapping(f"{param}/bias", f"{tensor}.bias", FLAT)] if bias else [kernel]


def fused(
    tensor: str, groups: int, counts: Mapping[str, int], bias: bool = True
) -> list[TensorMapping]:
    """Map linear layers whose matrices share one tensor, in runs of their rows.

    Args:
        tensor: its name without ".weight".
        groups: how many runs it has.
        counts: path of each layer to its rows in a run, in their order.
        bias: whether there is a vector of the same form.
    """
    found, start = list[TensorMapping](), 0
    for param, count in counts.items():
        rows, start = Rows(groups, start, count, sum(counts.values())), start + count
        for mapping in linear(param, tensor, bias=bias):
            found.append(replace(mapping, layout=replace(mapping.layout, rows=rows)))
    return found


def attention_linears(module: str, out: str, bias: bool, out_bias: bool) -> list[TensorMapping]:
    """Map an attention whose query, key and value are q_proj, k_proj and v_proj of a module."""
    return [
        *linear("attention/query", f"{module}.q_proj", bias=bias),
        *linear("attention/key", f"{module}.k_proj", bias=bias),
        *linear("attention/value", f"{module}.v_proj", bias=bias),
        *linear("attention/out", f"{module}.{out}", LINEAR_OUT, out_bias),
    ]


def gated_linears(module: str, bias: bool) -> list[TensorMapping]:
    """Map a feed-forward whose matrices are gate_proj, up_proj and down_proj of a module."""
    return [
        mapping
        for name in ("gate", "up", "down")
        for mapping in linear(f"feed_forward/{name}", f"{module}.{name}_proj", bias=bias)
    ]


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


@short_repr
@dataclass(frozen=True)
class Family:
    """Describe one `model_type` of config.json; `FAMILIES` lists all of them."""

    name: str
    """The `model_type`."""
    read: Callable[[ConfigKeys, frozenset[str]], ModelConfig]
    """Makes the config from config.json and the names of the tensors that the files have."""
    write: Callable[[ModelConfig], JsonObject]
    """Makes the keys of config.json; `write_config` checks that `read` gives the config back."""
    table: Callable[[ModelConfig], list[TensorMapping]]
    """Lists every parameter of a config once."""
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

    def copies(self, config: ModelConfig) -> Mapping[str, str]:
        """Return the name of every second copy that a file of this config may hold."""
        return self.tied_copies(config) if callable(self.tied_copies) else self.tied_copies


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Published names of activations; several names may mean one function."""
ACTIVATION_KEYS: dict[Activation, str] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
"""The name that is written for each activation."""


def activation_key(activation: AnyActivation) -> str:
    """Return the name that is written for an activation; ConfigError for a function."""
    if not isinstance(activation, str):
        fail("activation", activation, "no published family has a function of your own")
    return ACTIVATION_KEYS[activation]


DEPTH_KEYS = frozenset(
    """
    decoder_layers encoder_layers n_layer n_layers num_decoder_layers num_experts
    num_hidden_layers num_layers num_local_experts
    """.split()
)
"""Keys that count layers or experts, each of which has at least one tensor."""
EXPERT_KEYS = frozenset({"num_experts", "num_local_experts"})
"""Keys that count experts."""

_REQUIRED: JsonValue = object()  # the default of a key that must be there


class ConfigKeys:
    """Read a JSON object key by key with strict types, and refuse every other key.

    `other_keys` lists the keys of a family that are not read. A ConfigError names the file, the
    key, its value and the rule.
    """

    def __init__(
        self,
        content: JsonObject,
        where: str,
        tensors: int | None = None,
        counting: frozenset[str] = DEPTH_KEYS,
        family: str = "",
    ) -> None:
        """Take the object, the file's name, how many tensors there are, and what has one each."""
        self.where, self._tensors, self._counting = where, tensors, counting
        self._content, self._read, self._ignored = dict(content), set[str](), set[str]()
        for second, name in aliases(family).items():
            if second in content:
                value = self._content.pop(second)
                if self._content.setdefault(name, value) != value:
                    self.fail(second, value, f"must be {name}, {shown(content[name])}")
        self._others = other_keys(family)
        for name, allowed in self._others.items():
            if allowed is not None and name in self._content:
                self._check(name, self._content[name], allowed)

    def fail(self, name: str, value: object, rule: str) -> NoReturn:
        """Raise the error of a key."""
        raise ConfigError(f"{self.where}: {name} is {shown(value)}: {rule}")

    def take(self, name: str, default: JsonValue = _REQUIRED) -> JsonValue:
        """Return the value of a key as it stands in the file."""
        self._read.add(name)
        if name in self._content:
            return self._content[name]
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default

    @overload
    def integer(self, name: str, default: int = ..., *, least: int = 1) -> int: ...
    @overload
    def integer(self, name: str, default: None, *, least: int = 1) -> int | None: ...
    def integer(self, name: str, default: JsonValue = _REQUIRED, *, least: int = 1) -> int | None:
        """Return an integer from `least` to 2^31 - 1, or the default if there is no such key."""
        value = self.take(name, default)
        if value is default and not isinstance(default, int):
            return value
        if type(value) is not int or not least <= value < 2**31:
            self.fail(name, value, f"must be an integer from {least} to 2^31 - 1")
        if name in self._counting and self._tensors is not None and value > self._tensors:
            self.fail(name, value, f"the files have {self._tensors} tensors")
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """Return an integer, or None if the key is null."""
        return None if self.take(name, default) is None else self.integer(name, default)

    @overload
    def number(self, name: str, default: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None) -> float | None: ...
    def number(self, name: str, default: JsonValue = _REQUIRED) -> float | None:
        """Return a number between -2^63 and 2^63, or the default if there is no such key."""
        value = self.take(name, default)
        if value is default and default is None:
            return value
        if type(value) not in (int, float) or not abs(value) < 2**63:
            self.fail(name, value, "must be a number between -2^63 and 2^63")
        return value

    @overload
    def positive(self, name: str, default: float = ..., *, above: float = 0) -> float: ...
    @overload
    def positive(self, name: str, default: None, *, above: float = 0) -> float | None: ...
    def positive(
        self, name: str, default: JsonValue = _REQUIRED, *, above: float = 0
    ) -> float | None:
        """Return a number above 0, or above another limit."""
        value = self.number(name, default)
        if value is not None and not value > above:
            self.fail(name, value, f"must be above {above}" if above else "must be positive")
        return value

    def rate(self, name: str, default: float) -> float:
        """Return a rate of dropout, at least 0 and below 1; null is 0."""
        if self.take(name, default) is None:
            return 0.0
        value = self.number(name, default)
        if not 0 <= value < 1:
            self.fail(name, value, "must be at least 0 and below 1")
        return value

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """Return true or false."""
        value = self.take(name, default)
        if type(value) is not bool:
            self.fail(name, value, "must be true or false")
        return value

    def choice(self, name: str, options: Mapping[str, Value], default: str = _REQUIRED) -> Value:
        """Return what `options` has for the text in a key."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in options:
            self.fail(name, value, "must be one of " + ", ".join(map(repr, options)))
        return options[value]

    def require(self, name: str, *allowed: object) -> None:
        """Check that a key, if it is there, has one of these values."""
        self._check(name, self.take(name, allowed[0]), allowed)
        self._ignored.add(name)

    def _check(self, name: str, value: JsonValue, allowed: Sequence[object]) -> None:
        def same(known: object) -> bool:
            if isinstance(known, tuple):  # a list of nothing else
                return isinstance(value, list) and all(part in known for part in value)
            return type(value) is type(known) and value == known

        off = value is None and not any(allowed)  # null is as good as false or nothing
        if not off and not any(map(same, allowed)):
            rules = (f"a list of {x[0]!r}" if isinstance(x, tuple) else shown(x) for x in allowed)
            self.fail(name, value, f"must be {' or '.join(rules)}")

    def ignore(self, *names: str) -> None:
        """Accept keys that change nothing here."""
        self._ignored |= set(names)

    def kept(self) -> JsonObject:
        """Return the keys that say nothing about the config, such as token ids and names."""
        said = self._read - self._ignored
        return {name: value for name, value in self._content.items() if name not in said}

    def check_all_read(self) -> None:
        """Refuse a key that was neither read nor is known to change nothing; null says nothing."""
        for name, value in self._content.items():
            if value is None or name in self._read | self._ignored | self._others.keys():
                continue
            if name == "auto_map":
                self.fail(name, value, "code of a checkpoint is never run")
            self.fail(name, value, "no such key is known for this model_type")
