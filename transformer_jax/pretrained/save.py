"""Save parameters as a folder of config.json and safetensors that Hugging Face's libraries read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict

from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.pretrained.config_json import (
    check_tables,
    family_of,
    read_config,
    read_keys,
    table_names,
    write_config,
    written_family,
)
from transformer_jax.pretrained.families import FAMILIES, Family, TensorMapping
from transformer_jax.pretrained.families.other_keys import other_keys
from transformer_jax.pretrained.families.table import joined
from transformer_jax.pretrained.safetensors_folder import (
    CONFIG,
    SHARD_BYTES,
    WeightFolder,
    write_folder,
)
from transformer_jax.pretrained.tensors import (
    DTYPES,
    CheckpointTensors,
    Shapes,
    parameter_shapes,
    scanned_path,
    whole_path,
)
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.pytree import Array, Params
from transformer_jax.tokenizers.gguf_metadata import QWEN2_SPLIT
from transformer_jax.tokenizers.hf_files import more_templates
from transformer_jax.untrusted_files import JsonObject, check_path

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TARGET_TOKEN_IDS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Keys that classes of transformers have defaults for, which a model of other tokens has not."""

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "source.spm", "target.spm",
    "encoder.json", "vocab.bpe", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Files that are copied from the folder that `like` names."""

HEAD_KEYS = (
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
    "sbert_ce_default_activation_function", "sentence_transformers", "_num_labels",
)  # fmt: skip
"""Keys that describe the head of a model, and not another head of it."""

Fetch = Callable[[tuple[int, ...]], np.ndarray]
"""Brings one parameter to the host when it is written, or the part of it with this index."""


@known_keywords
def save_pretrained(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    files: Mapping[str, bytes] | None = None,
    keys: JsonObject | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` and `load_pretrained` read, whole or not at all.

    A folder that holds nothing but what is written anew is replaced.

    Args:
        path: the folder.
        config: of the model.
        params: of a looped or a scanned stack; written in the dtype they have.
        family: a `model_type`, such as "llama"; None is the first that can express the config.
        like: the folder that the model was loaded from, whose family, style of names, other keys of
            config.json and tokenizer are kept; None keeps nothing.
        files: more files, content by name.
        keys: more keys of config.json that change no number, such as "eos_token_id".
        shard_bytes: files of weights over so many bytes are split; at least 1.

    Raises:
        CheckpointError: if the folder holds any other file, or `files` has a name that cannot be.
        ConfigError: if the family cannot express a field of the config, or `keys` would change its
            meaning.
        ValueError: if a parameter does not fit the config, or an argument is not what it must be.
    """
    if not isinstance(params, Mapping):
        given = repr(params) if isinstance(params, str) else f"a {type(params).__name__}"
        rule = "must be parameters: save_pretrained(path, config, params)"
        raise ValueError(f"params is {given}: {rule}")
    check_path("path", path)
    check_count("shard_bytes", shard_bytes, 1)
    for name, mapping in dict(files=files, keys=keys).items():
        if not isinstance(mapping, Mapping | None):
            raise ValueError(f"{name} is a {type(mapping).__name__}: must be a dict by name")
    for name, data in (files or {}).items():
        if not isinstance(data, bytes):
            raise ValueError(f"files[{name!r}] is a {type(data).__name__}: must be bytes")
    if not isinstance(config, ModelConfig):
        rule = "must be a ModelConfig, of a transformer"
        raise ConfigError(f"config is a {type(config).__name__}: {rule}")
    if config.block is not None:
        rule = "no published family has a block of your own"
        raise ConfigError(f"block is {config.block!r}: {rule}; a run folder keeps it")
    shapes = parameter_shapes(config)
    given = flatten_dict(params, sep="/")
    fetched = _looped(given, shapes)
    extra, original = dict(files or {}), None
    if like is not None:
        original = _Original(like, family)
        family = original.family.name
        # The caller's files replace those of the folder.
        extra = original.text_files() | extra
    chosen = FAMILIES[written_family(config, family)]
    written = write_config(chosen, config)
    more = {n: value for n, value in (keys or {}).items() if written.get(n) is None}
    if original is None:  # null, or a class would take the ids of the model it is named for
        named = (*TOKEN_IDS, *(TARGET_TOKEN_IDS if config.kind == "encoder-decoder" else ()))
        written = dict.fromkeys(named) | written
        check_tokenizer(chosen.name, extra.get("tokenizer.json"))
        check_tables(chosen.name, config)
    names = table_names(chosen, config)
    # Read before `like` and `keys` are merged: those may change no number.
    meant = read_config(written, names, CONFIG)
    tensors = _tensors(chosen, config, fetched, original is not None and original.bare)
    kept: JsonObject = {}
    if original is not None:
        kept, written = original.merged(written)
    for name in other_keys(chosen.name).keys() & kept.keys() & written.keys():
        written.pop(name)  # which says nothing of the config
    name, other = ("torch_dtype", "dtype") if "dtype" not in kept else ("dtype", "torch_dtype")
    written[name] = np.dtype(given["embed/tokens"].dtype).name
    kept.pop(other, None)  # one of them, as newer or older files call it
    content = {
        key: value
        for key, value in (kept | written | more).items()
        if value is not None or key not in chosen.needed_ids
    }
    if more and read_config(content, names, CONFIG) != meant:
        raise ConfigError(f"keys have {', '.join(sorted(more))}: the config would mean another one")
    write_folder(Path(path), content, tensors, shard_bytes=shard_bytes, files=extra)


BPE_OPTIONS = (
    "byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix", "ignore_merges"
)  # fmt: skip
"""Options of the library's BPE that Qwen 2 has not."""


def check_tokenizer(family: str, definition: bytes | None) -> None:
    """Raise ConfigError if transformers reads other ids than this tokenizer.json says.

    AutoTokenizer takes the file as it is, but for a `qwen2`: there it takes the vocabulary alone.
    """
    if family != "qwen2" or definition is None:
        return
    content = json.loads(definition)
    model, steps = content["model"], (content.get("pre_tokenizer") or {}).get("pretokenizers", [])
    split = dict(type="Split", pattern={"Regex": QWEN2_SPLIT}, behavior="Isolated", invert=False)
    same = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in BPE_OPTIONS)
        and (content.get("normalizer") or {}).get("type") == "NFC"
        and len(steps) == 2
        and steps[0] == split
        and (steps[1]["type"], steps[1].get("use_regex")) == ("ByteLevel", False)
        and not steps[1].get("add_prefix_space")
    )
    if not same:
        rule = "transformers reads a qwen2 with Qwen 2's way to split texts, and so other ids"
        remedy = "write it as a llama, with zeros for biases that it lacks, or take Qwen 2's way"
        raise ConfigError(f"tokenizer.json: {rule}: {remedy}")


class _Original:
    """Hold what a saved folder keeps of the one that its model was loaded from."""

    def __init__(self, path: str | Path, family: str | None) -> None:
        self._folder: WeightFolder = open_weights(path)
        where = self._folder.where
        self.family = family_of(self._folder.config, where)
        if family not in (None, self.family.name):
            raise ConfigError(f"family is {family!r}: {path} is of {self.family.name!r}")
        tensors = CheckpointTensors(self._folder, self.family)
        self.bare = tensors.bare
        self._config, self._keys = read_keys(self._folder.config, tensors.names, where)

    def text_files(self) -> dict[str, bytes]:
        """Read the tokenizer's files and the chat templates."""
        names = (*TEXT_FILES, *more_templates(self._folder.path))
        paths = {name: self._folder.file(name) for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path is not None}

    def merged(self, written: JsonObject) -> tuple[JsonObject, JsonObject]:
        """Return the keys that are kept, and those of the new config.

        A config that did not change keeps the words of the original, of several that mean it.
        """
        kept = self._keys.kept()
        before = {"model_type": self.family.name, **self.family.write(self._config)}
        # Of several spellings that mean one config, the folder keeps its own.
        if before == written:
            content = self._folder.config
            return kept, {name: value for name, value in content.items() if name not in kept}
        # names of a head that the model no longer has do not stay
        if before.get("architectures") != written.get("architectures"):
            kept.pop("architectures", None)
        if any(before.get(key) != written.get(key) for key in ("architectures", "num_labels")):
            for name in HEAD_KEYS:
                kept.pop(name, None)
        return kept, written


def _looped(given: Mapping[str, Array], shapes: Shapes) -> dict[str, Fetch]:
    """Return a way to fetch every parameter of the looped model from a looped or scanned one.

    ValueError names a parameter that is missing, unknown, or of another shape or dtype.
    """
    found: dict[str, Fetch] = {}
    used = set()
    for path, want in shapes.items():
        name, layer, shape = path, None, want.shape
        scanned = scanned_path(path)
        if path not in given and scanned is not None and scanned[0] in given:
            name, layer = scanned
            shape = (given[name].shape[0], *want.shape)
        if name not in given:
            raise ValueError(f"params have no {path}")
        if tuple(given[name].shape) != tuple(shape):
            rule = f"the config makes it {list(shape)}"
            raise ValueError(f"params {name} has shape {list(given[name].shape)}: {rule}")
        if np.dtype(given[name].dtype).name not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise ValueError(f"params {name} is {given[name].dtype}: {rule}")
        used.add(name)
        index = () if layer is None else (layer,)

        def fetch(
            part: tuple[int, ...], leaf: Array = given[name], layer: tuple[int, ...] = index
        ) -> np.ndarray:
            whole = (*layer, *part)
            return np.asarray(leaf[whole] if whole else leaf)

        found[path] = fetch
    if unknown := sorted(set(given) - used):
        raise ValueError(f"params {unknown[0]}: the config has no such parameter")
    return found


def _tensors(
    family: Family, config: ModelConfig, params: Mapping[str, Fetch], bare: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the file under their names, one at a time."""
    held: dict[str, list[TensorMapping]] = {}
    for mapping in family.table(config):
        held.setdefault(mapping.tensor, []).append(mapping)
    for name, mappings in held.items():
        pieces = []
        for mapping in mappings:
            path, part = whole_path(mapping.param, scanned=False)
            pieces.append(mapping.layout.write(params[path](part)))
        whole = joined([mapping.layout for mapping in mappings], pieces)
        # A file of a model without its head has names without the prefix, and stays so.
        yield name.removeprefix(family.prefix) if bare else name, whole
