"""Published checkpoints in and out: a folder of config.json and safetensors, as Hugging Face's.

A family (`families`) says what config.json means and where each parameter lies; here files become
parameters, one tensor at a time, and parameters files. Nothing of a checkpoint is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import ConfigError, DType, ModelConfig
from transformer_jax.families import FAMILIES, Family, Keys, Line
from transformer_jax.families.table import UNREAD
from transformer_jax.models import init_params
from transformer_jax.tokenizer_files import more_templates
from transformer_jax.weights import (
    CONFIG,
    SHARD_BYTES,
    CheckpointError,
    WeightFolder,
    open_folder,
    write_folder,
)

Params = dict[str, Any]

DTYPES: tuple[DType, ...] = get_args(DType)
"""What parameters may be."""

OURS = ("dtype", "remat", "scan_layers", "implementation", "init_std")
"""Fields of a config that no family knows: how a model is run, or was begun."""

FREE = frozenset({*OURS, "dropout", "attention_dropout"} - {"init_std"})
"""Fields that may change while the parameters stay."""

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "source.spm", "target.spm",
    "encoder.json", "vocab.bpe", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""What is copied from the folder that a saved one is to be like."""


def load_pretrained(
    path_or_id: str | Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Any = None,
    scan_layers: bool = False,
    max_len: int | None = None,
    revision: str | None = None,
) -> tuple[ModelConfig, Params]:
    """The config and the parameters of a published checkpoint: `build(config)` runs on them.

    `path_or_id` is a folder, or a repository of the Hugging Face hub (extra `hf`). Parameters keep
    the file's dtype and models compute in it, unless `dtype` names another. `sharding` is a
    `jax.sharding.Sharding` for all parameters, or a tree of them. `scan_layers` stacks the layers.
    `max_len` is another length than the config's: to it a rotation that depends on the length of
    the text (dynamic, longrope) is then stretched, once and for all.

    Tensors are read one at a time; a tensor that is missing, unknown or of another shape is a
    CheckpointError, and a key of config.json that would change the numbers a ConfigError.
    """
    as_dtype = None if dtype is None else _named(dtype)
    folder = open_folder(path_or_id, revision=revision)
    family = family_of(folder.config, str(folder.path / "config.json"))
    source = _Source(folder, family)
    config = read_config(folder.config, source.names, str(folder.path / "config.json"))
    config = _with_length(config, max_len)
    source.check_size(config)
    config = dataclasses.replace(
        config, scan_layers=scan_layers, dtype=as_dtype or source.dtype(config)
    )
    shapes = parameter_shapes(config)
    lines = source.lines(config, shapes)
    leaves, paths = source.leaves(lines, shapes, as_dtype), set(shapes)
    if scan_layers:
        leaves = _stacked(leaves, shapes)
        paths = {block[0] if (block := _block(path)) else path for path in shapes}
    shardings = _shardings(sharding, paths)
    placed: Params = {}
    for path, leaf in leaves:
        where = shardings if not isinstance(shardings, dict) else shardings[path]
        placed[path] = jax.device_put(leaf, where)
        del leaf  # or it would be in memory beside the next
    return config, unflatten_dict(placed, sep="/")


def _named(dtype: Any) -> DType:
    """A dtype by its name: "bfloat16", of that, of `jnp.bfloat16` or of an array's dtype."""
    with contextlib.suppress(TypeError):
        dtype = np.dtype(dtype).name
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: must be one of {', '.join(map(repr, DTYPES))}")
    return dtype


def pretrained_config(path_or_id: str | Path, *, revision: str | None = None) -> ModelConfig:
    """The config that `load_pretrained` gives; no tensor is read."""
    folder = open_folder(path_or_id, revision=revision)
    where = str(folder.path / "config.json")
    source = _Source(folder, family_of(folder.config, where))
    config = read_config(folder.config, source.names, where)
    source.check_size(config)
    return dataclasses.replace(config, dtype=source.dtype(config))


def save_pretrained(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    family: str | None = None,
    like: str | Path | None = None,
    files: Mapping[str, bytes] | None = None,
    keys: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A folder that Hugging Face's libraries and `load_pretrained` read, written whole or not at
    all.

    `family` is a `model_type`; None is the first that can say the config. With `like`, a folder
    that a model was loaded from, its family, its style of names, its other keys of config.json and
    its tokenizer are kept. `files` are more files by name, `keys` more of config.json that change
    no number: "eos_token_id". Parameters are written in the dtype they have, looped or scanned.
    """
    shapes = parameter_shapes(config)
    given = flatten_dict(params, sep="/")
    flat = _looped(given, shapes)
    kept: dict[str, Any] = {}
    extra = dict(files or {})
    bare, like_config = False, None
    if like is not None:
        model = open_folder(like)
        where = str(model.path / "config.json")
        found = family_of(model.config, where)
        if family not in (None, found.name):
            raise ConfigError(f"family is {family!r}: {like} is of {found.name!r}")
        source = _Source(model, found)
        family, bare = found.name, source.bare
        like_config, read = _read_keys(model.config, source.names, where)
        for name in (*TEXT_FILES, *more_templates(model.path)):
            if (file := model.file(name)) is not None:
                extra.setdefault(name, file.read_bytes())
    chosen = FAMILIES[written_family(config, family)]
    written = write_config(chosen, config)
    more = {name: value for name, value in (keys or {}).items() if name not in written}
    meant = read_config(written, (names := _names(chosen, config)), CONFIG)
    tensors = _tensors(chosen, config, flat, bare)
    if like_config is not None:
        kept = read.others()
        before = {"model_type": chosen.name, **chosen.write(like_config)}
        if before == written:  # it says this config already, in words of its own
            written = {name: said for name, said in model.config.items() if name not in kept}
        else:
            _forget_heads(kept, before, written)
    for name in UNREAD & kept.keys() & written.keys():  # these say nothing of the config
        written.pop(name)
    name, other = ("torch_dtype", "dtype") if "dtype" not in kept else ("dtype", "torch_dtype")
    written[name] = np.dtype(given["embed/tokens"].dtype).name
    kept.pop(other, None)  # one of them, as newer or older files call it
    content = kept | more | written
    if more and read_config(content, names, CONFIG) != meant:
        raise ConfigError(f"keys have {', '.join(sorted(more))}: the config would mean another one")
    write_folder(Path(path), content, tensors, shard_bytes=shard_bytes, files=extra)


# config.json


def family_of(content: Mapping[str, Any], where: str) -> Family:
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model_type is {kind!r:.80}: must be one of {known}")
    return FAMILIES[kind]


OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
"""Their tensors may be named as those of a head that is known."""


def read_config(content: Mapping[str, Any], names: Iterable[str], where: str) -> ModelConfig:
    """The config that a config.json means, in a folder with tensors of these names."""
    return _read_keys(content, names, where)[0]


def _read_keys(
    content: Mapping[str, Any], names: Iterable[str], where: str
) -> tuple[ModelConfig, Keys]:
    family, names = family_of(content, where), frozenset(names)
    keys = Keys(content, where, len(names) or None)
    said = keys.take("architectures", None)
    keys.unread("architectures")
    for name in said if isinstance(said, list) else ():
        if isinstance(name, str) and name.endswith(OTHER_HEADS):
            rule = "classes of single tokens, spans and choices are not known here"
            keys.fail("architectures", said, rule)
    try:
        config = family.read(keys, names)
    except ArithmeticError as error:
        raise ConfigError(f"{where}: its numbers do not go together ({error})") from None
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None
    keys.finish()
    return config, keys


def write_config(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json; ConfigError names the fields that the family cannot say."""
    if config.rope.length is not None:  # how a model is run, too
        rope = dataclasses.replace(config.rope, length=None)
        config = dataclasses.replace(config, rope=rope, max_len=rope.original_len or 1)
    content = {"model_type": family.name, **family.write(config)}
    try:
        back = read_config(content, _names(family, config), CONFIG)
    except ConfigError as error:
        raise ConfigError(f"a {family.name} cannot say this config: {error}") from None
    for field in dataclasses.fields(ModelConfig):
        one, two = _meaning(config, field.name), _meaning(back, field.name)
        if field.name not in OURS and one != two:
            rule = f"a {family.name} has {two!r}"
            raise ConfigError(f"{field.name} is {one!r}: {rule}")
    return content


def _names(family: Family, config: ModelConfig) -> frozenset[str]:
    return frozenset(line.theirs for line in family.table(config))


def _meaning(config: ModelConfig, name: str) -> Any:
    """A field's value, with what None stands for."""
    match name:
        case "num_kv_heads":
            return config.kv_heads
        case "head_dim":
            return config.key_dim
        case "value_head_dim":
            return config.value_dim
        case "d_ff":
            return config.ff_dim
        case "num_decoder_layers":
            return config.decoder_layers
        case "attention_scale":
            given = config.attention_scale
            return float(np.float32(config.key_dim**-0.5 if given is None else given))
        case "qkv_bias" | "ff_bias":
            value = getattr(config, name)
            return config.use_bias if value is None else value
        case "pooler":
            return config.pooling
        case "window":
            return [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
    return getattr(config, name)


def _forget_heads(
    kept: dict[str, Any], before: Mapping[str, Any], written: Mapping[str, Any]
) -> None:
    """Of the keys of another folder, those that name heads the model no longer has, go."""
    said_by = {"architectures": ["architectures"], "num_labels": ["id2label", "label2id"]}
    for said, names in said_by.items():
        if before.get(said) != written.get(said):
            for name in names:
                kept.pop(name, None)


def written_family(config: ModelConfig, name: str | None = None) -> str:
    """The `model_type` that a config is saved as; ConfigError says why it cannot be."""
    if name is None:
        return _first_family(config).name
    if name not in FAMILIES:
        raise ConfigError(f"family is {name!r}: must be one of {', '.join(FAMILIES)}")
    write_config(FAMILIES[name], config)
    return name


def _first_family(config: ModelConfig) -> Family:
    """The first family that says all of a config."""
    refused = []
    for family in FAMILIES.values():
        try:
            write_config(family, config)
            return family
        except ConfigError as error:
            refused.append(f"{family.name}: {error}")
    raise ConfigError("no family can say this config: " + "; ".join(refused))


def _with_length(config: ModelConfig, max_len: int | None) -> ModelConfig:
    if max_len is None:
        return config
    if type(max_len) is not int or max_len < 1:
        raise ConfigError(f"max_len is {max_len!r}: must be a positive integer")
    if config.positions == "learned" and max_len != config.max_len:
        rule = f"the table of positions has {config.max_len}"
        raise ConfigError(f"max_len is {max_len}: {rule}")
    rope = config.rope
    if rope.scaling in ("dynamic", "longrope"):
        rope = dataclasses.replace(rope, length=max_len)
    return dataclasses.replace(config, max_len=max_len, rope=rope)


# Tensors


class _Source:
    """The tensors of a folder, under the names of the family's table."""

    def __init__(self, folder: WeightFolder, family: Family) -> None:
        self._folder, self._family = folder, family
        self._actual: dict[str, str] = {}
        for name in folder.tensors:
            now = name
            for old, new in family.renamed.items():
                now = now.removesuffix(old) + new if now.endswith(old) else now
            if now in self._actual:
                raise CheckpointError(
                    f"{self._where(name)}: is there twice, as {name!r} and {now!r}"
                )
            self._actual[now] = name
        self.bare = bool(family.prefix) and not any(
            n.startswith(family.prefix) for n in self._actual
        )
        if self.bare:
            self._actual = {self._full(name): actual for name, actual in self._actual.items()}
        if not self._actual:
            raise CheckpointError(f"{folder.path}: its files hold no tensor")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._actual)

    def _full(self, name: str) -> str:
        return name if self._is_head(name) else self._family.prefix + name

    def _is_head(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._family.heads)

    def _where(self, name: str) -> str:
        return f"{self._folder.path / self._folder.tensors[name].file}: {name}"

    def dtype(self, config: ModelConfig) -> DType:
        """The dtype of the embeddings."""
        for line in self._table(config):
            if line.ours == "embed/tokens" and line.theirs in self._actual:
                return self._float(self._actual[line.theirs])
        raise CheckpointError(f"{self._folder.path}: there are no embeddings of tokens")

    def _float(self, name: str) -> DType:
        found = self._folder.tensors[name].dtype
        if found not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise CheckpointError(f"{self._where(name)} is {found}: {rule}")
        return found

    def check_size(self, config: ModelConfig) -> None:
        """Sizes of config.json that no file of these tensors has: before anything is traced."""
        depth = config.num_layers + (
            config.decoder_layers if config.kind == "encoder-decoder" else 0
        )
        tensors, where = len(self._folder.tensors), str(self._folder.path / "config.json")
        if depth > tensors:
            raise ConfigError(f"{where}: {depth} layers, and the files have {tensors} tensors")
        elements = sum(int(np.prod(t.shape, dtype=object)) for t in self._folder.tensors.values())
        for name, size in (
            ("vocab_size", config.vocab_size),
            ("d_model", config.d_model),
            ("d_ff", config.ff_dim),
            ("num_heads", config.num_heads),
            ("head_dim", config.key_dim),
            ("max_len", config.max_len if config.positions == "learned" else 0),
            ("num_heads * head_dim", config.num_heads * config.key_dim),
        ):
            if size > elements:
                said = [key for key, value in self._folder.config.items() if value == size]
                raise ConfigError(
                    f"{where}: {said[0] if said else name} is {size}, "
                    f"and the files have {elements} numbers"
                )
        self._check_names(self._table(config))

    def _check_names(self, lines: list[Line]) -> None:
        """Every tensor of the table is there, and no other."""
        for line in lines:
            if line.theirs not in self._actual:
                raise CheckpointError(f"{self._folder.path}: tensor {line.theirs} is missing")
        for name in sorted(self.names - {line.theirs for line in lines}):
            if name in self._family.implied or self._family.copies.get(name) in self._actual:
                continue
            if not any(fnmatch.fnmatchcase(name, p) for p in self._family.unused):
                rule = f"a {self._family.name} of this config.json has no such tensor"
                raise CheckpointError(f"{self._where(self._actual[name])}: {rule}")

    def _table(self, config: ModelConfig) -> list[Line]:
        """The family's table; where of a tied tensor only a copy is there, that is the tensor."""
        lines = self._family.table(config)
        wanted = {line.theirs for line in lines}
        for name, original in self._family.copies.items():
            if name in self._actual and name not in wanted and original not in self._actual:
                self._actual[original] = self._actual.pop(name)
        return lines

    def lines(self, config: ModelConfig, shapes: Mapping[str, Any]) -> list[Line]:
        """The family's table, held against the parameters and the files."""
        lines = self._table(config)
        ours = [line.ours for line in lines]
        if sorted(ours) != sorted(shapes):
            raise AssertionError(f"{self._family.name}: {set(ours) ^ set(shapes)} not in both")
        for line in lines:
            actual = self._actual[line.theirs]
            want = line.layout.file_shape(shapes[line.ours].shape)
            found = self._folder.tensors[actual].shape
            if tuple(found) != want:
                raise CheckpointError(
                    f"{self._where(actual)} has shape {list(found)}: "
                    f"config.json makes it {list(want)}"
                )
            self._float(actual)
        for name in sorted(self.names - {line.theirs for line in lines}):
            original = self._family.copies.get(name)
            if original in self._actual:
                self._check_copy(name, original)
            elif name in self._family.implied:
                self._check_implied(name, config)
        return lines

    def _check_copy(self, name: str, original: str) -> None:
        """A second copy of a tied tensor holds the same numbers."""
        one, two = (self._folder.read(self._actual[n]) for n in (name, original))
        if one.dtype != two.dtype or one.shape != two.shape or one.tobytes() != two.tobytes():
            rule = f"differs from {original}, to which config.json ties it"
            raise CheckpointError(f"{self._where(self._actual[name])} {rule}")

    def _check_implied(self, name: str, config: ModelConfig) -> None:
        """A tensor that follows from the config holds what does, rounded to its dtype."""
        actual = self._actual[name]
        near = 1e-5 if self._float(actual) == "float32" else 5e-3
        want = self._family.implied[name](config, tuple(self._folder.tensors[actual].shape))
        if want is not None:
            found = self._folder.read(actual).astype(np.float64)
        if want is None or not np.abs(found - want).max() <= near:
            raise CheckpointError(f"{self._where(actual)} is not what config.json makes it")

    def leaves(
        self, lines: list[Line], shapes: Mapping[str, Any], dtype: DType | None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter, in the order of the files."""
        wanted: dict[str, list[Line]] = {}
        for line in lines:
            wanted.setdefault(self._actual[line.theirs], []).append(line)
        for name, tensor in self._folder.read_all(n for n in self._folder.tensors if n in wanted):
            for line in wanted[name]:
                ours = line.layout.read(tensor, shapes[line.ours].shape)
                yield line.ours, np.ascontiguousarray(ours if dtype is None else ours.astype(dtype))
                del ours
            del tensor


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
    """The shape of every parameter of a looped model by its path; nothing is allocated.

    One block of each stack is traced: all are alike.
    """
    one = dataclasses.replace(
        config, num_layers=1, num_decoder_layers=None, scan_layers=False,
        window=None, window_rope_base=None, sink_tokens=0,
    )  # fmt: skip
    tree = jax.eval_shape(partial(init_params, one), jax.random.key(0))
    found: dict[str, Any] = {}
    for path, shape in flatten_dict(tree, sep="/").items():
        depth = 1
        if "/block_0/" in path:
            depth = config.decoder_layers if path.startswith("decoder/") else config.num_layers
        for i in range(depth):
            found[path.replace("/block_0/", f"/block_{i}/")] = shape
    return found


def tensor_names(
    config: ModelConfig, family: str | None = None, *, bare: bool = False
) -> dict[str, tuple[str, ...]]:
    """The paths of the parameters that each tensor of a published checkpoint holds, side by side.

    Of a `model_type`, or of the first that can say the config; as `save_lora` and `load_lora` read
    it. `bare` are the names of a model without its head, of a `BertModel` or `LlamaModel`:
    "encoder.layer.0..." and not "bert.encoder.layer.0...".
    """
    chosen = FAMILIES[written_family(config, family)]
    names: dict[str, tuple[str, ...]] = {}
    for line in chosen.table(config):
        name = line.theirs
        if bare and any(fnmatch.fnmatchcase(name, head) for head in chosen.heads):
            continue
        name = name.removeprefix(chosen.prefix) if bare else name
        names[name] = (*names.get(name, ()), line.ours)
    return names


# Looped and scanned stacks


def _block(path: str) -> tuple[str, int] | None:
    """Of a looped block's parameter, its path in a scanned stack and the block's number."""
    stack, _, rest = path.partition("/block_")
    number, _, rest = rest.partition("/")
    return (f"{stack}/blocks/{rest}", int(number)) if rest else None


def _stacked(
    leaves: Iterable[tuple[str, np.ndarray]], shapes: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of the scanned twin: each is handed on when its last layer is in."""
    depth: dict[str, int] = {}
    for path in shapes:
        if block := _block(path):
            depth[block[0]] = depth.get(block[0], 0) + 1
    buffers: dict[str, np.ndarray] = {}
    filled: dict[str, int] = {}
    for path, leaf in leaves:
        if (block := _block(path)) is None:
            yield path, leaf
            continue
        whole, i = block
        if whole not in buffers:
            buffers[whole], filled[whole] = np.empty((depth[whole], *leaf.shape), leaf.dtype), 0
        if leaf.dtype != buffers[whole].dtype:
            rule = f"layers before it are {buffers[whole].dtype}: give a dtype to stack them"
            raise CheckpointError(f"{path} is {leaf.dtype}, {rule}")
        buffers[whole][i] = leaf
        filled[whole] += 1
        if filled[whole] == depth[whole]:
            yield whole, buffers.pop(whole)


def _looped(flat: dict[str, Any], shapes: Mapping[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    """Every parameter of the looped model, to be fetched when it is written."""
    found: dict[str, Callable[[], np.ndarray]] = {}
    used = set()
    for path, want in shapes.items():
        block = _block(path)
        name, shape = path, want.shape
        if path not in flat and block is not None and block[0] in flat:
            name = block[0]
            shape = (flat[name].shape[0], *want.shape)
        if name not in flat:
            raise ValueError(f"params have no {path}")
        if tuple(flat[name].shape) != tuple(shape):
            rule = f"the config makes it {list(shape)}"
            raise ValueError(f"params {name} has shape {list(flat[name].shape)}: {rule}")
        if np.dtype(flat[name].dtype).name not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise ValueError(f"params {name} is {flat[name].dtype}: {rule}")
        used.add(name)
        found[path] = partial(
            _fetch, flat[name], None if name == path or block is None else block[1]
        )
    if unknown := sorted(set(flat) - used):
        raise ValueError(f"params {unknown[0]}: the config has no such parameter")
    return found


def _fetch(leaf: Any, layer: int | None) -> np.ndarray:
    return np.asarray(leaf if layer is None else leaf[layer])


def _tensors(
    family: Family, config: ModelConfig, flat: Mapping[str, Callable[[], np.ndarray]], bare: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file under their names, one at a time."""
    lines: dict[str, list[Line]] = {}
    for line in family.table(config):
        lines.setdefault(line.theirs, []).append(line)
    for name, parts in lines.items():
        pieces = [line.layout.write(flat[line.ours]()) for line in parts]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
        yield name.removeprefix(family.prefix) if bare else name, whole


def _shardings(sharding: Any, shapes: Iterable[str]) -> Any:
    """One sharding for all, or one for each path."""
    if not isinstance(sharding, Mapping):
        return sharding
    flat = flatten_dict(sharding, sep="/")
    if wrong := sorted(set(flat) ^ set(shapes)):
        raise ValueError(f"sharding and parameters differ at {wrong[0]}")
    return flat
