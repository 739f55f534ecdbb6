"""What a family of published checkpoints is: how its config.json reads, and a table of names.

A line of a table says where one parameter of ours lies in their files, and how: a family is data.
Both directions, reading and writing, follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from transformer_jax.config import Activation, ConfigError, ModelConfig
from transformer_jax.untrusted import shown

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a parameter lies in a file.

    - same: as ours;
    - flat: all axes as one (biases of heads);
    - row: the same with an axis of length 1 before it;
    - linear: [outputs, inputs], each flattened, as torch.nn.Linear keeps it;
    - conv: [inputs, outputs], as GPT-2 keeps it.

    Of a matrix, `inputs` leading axes of ours are inputs. With `parts`, the file's last axis holds
    so many parameters side by side, and this is number `part`.
    """

    kind: Literal["same", "flat", "row", "linear", "conv"] = "same"
    inputs: int = 1
    part: int = 0
    parts: int = 1

    def file_shape(self, shape: Shape) -> Shape:
        """Of the whole tensor in the file, for a parameter of this shape."""
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
        return (*found[:-1], found[-1] * self.parts) if self.parts > 1 else found

    def read(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """Ours, of what the file holds; a view."""
        if self.parts > 1:
            width = tensor.shape[-1] // self.parts
            tensor = tensor[..., self.part * width : (self.part + 1) * width]
        return (tensor.T if self.kind == "linear" else tensor).reshape(shape)

    def write(self, parameter: np.ndarray) -> np.ndarray:
        """What the file holds, of ours: of several parts, this one."""
        shape = parameter.shape
        if self.kind == "linear":
            rows = math.prod(shape[: self.inputs])
            return np.ascontiguousarray(parameter.reshape(rows, -1).T)
        whole = self.file_shape(shape)
        return parameter.reshape(*whole[:-1], whole[-1] // self.parts) if whole else parameter


SAME = Layout()
FLAT = Layout("flat")
ROW = Layout("row")
LINEAR = Layout("linear")
"""[D, N, H] or [D, F] as [N H, D] or [F, D]."""
LINEAR_OUT = Layout("linear", inputs=2)
"""[N, H, D] as [D, N H]."""


@dataclass(frozen=True)
class Line:
    """One parameter: its path below `params`, the tensor's name, and how it lies there."""

    ours: str
    theirs: str
    layout: Layout = SAME


def blocks(stack: str, depth: int, lines: Iterable[Line]) -> list[Line]:
    """The lines of every block of a stack; `{i}` in their names is the block's number."""
    return [
        Line(f"{stack}/block_{i}/{line.ours}", line.theirs.format(i=i), line.layout)
        for i in range(depth)
        for line in lines
    ]


def norm(ours: str, theirs: str) -> list[Line]:
    """Scale and bias of a LayerNorm."""
    return [Line(f"{ours}/scale", f"{theirs}.weight"), Line(f"{ours}/bias", f"{theirs}.bias")]


def linear(ours: str, theirs: str, layout: Layout = LINEAR, bias: bool = True) -> list[Line]:
    """A matrix, and its bias."""
    lines = [Line(f"{ours}/kernel", f"{theirs}.weight", layout)]
    return [*lines, Line(f"{ours}/bias", f"{theirs}.bias", FLAT)] if bias else lines


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    name: str
    read: Callable[[Keys, frozenset[str]], ModelConfig]
    """The config, of config.json and of the names of the tensors that are there."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The keys of config.json that `read` reads; that they say the whole config is checked."""
    table: Callable[[ModelConfig], list[Line]]
    prefix: str = ""
    """Before the names of the model proper; a file without its head leaves it out."""
    unused: tuple[str, ...] = ()
    """Patterns of names that hold no parameter: buffers that follow from the config."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of second copies that a file may hold of tied tensors, and the tensors' own."""
    heads: tuple[str, ...] = ()
    """Patterns of names without the prefix where others have it."""
    implied: Mapping[str, Callable[[ModelConfig, Shape], np.ndarray | None]] = field(
        default_factory=dict
    )
    """Names of tensors that follow from the config, and what one must hold where it is there; None
    where it must have another shape."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Endings of names in old files, and what they are now."""


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Published names of activations; where two name one function, ours is written as the last of
`WRITTEN`."""
WRITTEN = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}

# Of no consequence for what the model computes from given tokens.
UNREAD = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path _num_labels architectures
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range label2id length_penalty max_length
    max_sequence_length min_length model_type name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_past output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unsloth_fixed use_bfloat16 use_cache
    """.split()
)

EMPTY: dict[str, Any] = dict(
    add_cross_attention=False, is_decoder=False, is_encoder_decoder=False, pruned_heads={},
    tie_encoder_decoder=False,
)  # fmt: skip
"""Of no consequence while they say no, where a family does not read them itself."""

DEPTHS = frozenset(
    """
    decoder_layers encoder_layers n_layer n_layers num_decoder_layers num_hidden_layers num_layers
    """.split()
)
"""Keys of how many layers there are, each of which has a tensor at least."""

_ABSENT: Any = object()


class Keys:
    """config.json, read key by key with strict types; what nobody reads is refused."""

    def __init__(self, content: Mapping[str, Any], where: str, tensors: int | None = None) -> None:
        self.where, self._tensors = where, tensors  # how many there are: no more layers than those
        self._content, self._read, self._idle = content, set[str](), set[str]()

    def fail(self, name: str, value: Any, rule: str) -> Any:
        raise ConfigError(f"{self.where}: {name} is {shown(value)}: {rule}")

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        """The value of a key as it stands there."""
        self._read.add(name)
        if name in self._content:
            return self._content[name]
        if default is _ABSENT:
            raise ConfigError(f"{self.where}: {name} is missing")
        return default

    def integer(self, name: str, default: Any = _ABSENT, least: int = 1) -> Any:
        value = self.take(name, default)
        if value is default and not isinstance(default, int):
            return value
        if type(value) is not int or not least <= value < 2**31:
            self.fail(name, value, f"must be an integer from {least} to 2^31 - 1")
        if name in DEPTHS and self._tensors is not None and value > self._tensors:
            self.fail(name, value, f"the files have {self._tensors} tensors")
        return value

    def optional(self, name: str, default: Any) -> Any:
        """An integer, or null."""
        return None if self.take(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = _ABSENT) -> Any:
        value = self.take(name, default)
        if value is default and default is None:
            return value
        if type(value) not in (int, float) or not abs(value) < 2**63:
            self.fail(name, value, "must be a number between -2^63 and 2^63")
        return value

    def positive(self, name: str, default: Any = _ABSENT, above: float = 0) -> Any:
        """A number above 0, or above another limit."""
        value = self.number(name, default)
        if value is not None and not value > above:
            self.fail(name, value, f"must be above {above}" if above else "must be positive")
        return value

    def rate(self, name: str, default: Any = _ABSENT) -> float:
        """Of dropout."""
        value = self.number(name, default)
        if not 0 <= value < 1:
            self.fail(name, value, "must be at least 0 and below 1")
        return value

    def flag(self, name: str, default: Any = _ABSENT) -> bool:
        value = self.take(name, default)
        if type(value) is not bool:
            self.fail(name, value, "must be true or false")
        return value

    def text(self, name: str, options: Mapping[str, Any], default: Any = _ABSENT) -> Any:
        """What `options` has for a text."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in options:
            self.fail(name, value, "must be one of " + ", ".join(map(repr, options)))
        return options[value]

    def only(self, name: str, *allowed: Any) -> None:
        """A key that may be absent, and otherwise must have one of these values."""
        value = self.take(name, allowed[0])
        if not any(type(value) is type(known) and value == known for known in allowed):
            self.fail(name, value, "must be " + " or ".join(map(shown, allowed)))
        self._idle.add(name)

    def unread(self, *names: str) -> None:
        """Keys of no consequence here."""
        self._idle |= set(names)

    def others(self) -> dict[str, Any]:
        """What no field of a config follows from."""
        said = self._read - self._idle
        return {name: value for name, value in self._content.items() if name not in said}

    def finish(self) -> None:
        """Every key has been read, or is of no consequence."""
        for name, value in self._content.items():
            if name == "auto_map":
                self.fail(name, value, "code of a checkpoint is never run")
            if name not in self._read and name in EMPTY:
                self.only(name, EMPTY[name])
            if name not in self._read | self._idle | UNREAD:
                self.fail(name, value, "no such key is known for this model_type")
