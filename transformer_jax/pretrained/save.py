"""Saving of parameters as a folder that Hugging Face's libraries can read."""

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
"""Keys of token IDs whose defaults in transformers' classes are wrong for other vocabularies."""

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "source.spm", "target.spm",
    "encoder.json", "vocab.bpe", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Files copied from the folder `like`."""

HEAD_KEYS = (
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
    "sbert_ce_default_activation_function", "sentence_transformers", "_num_labels",
)  # fmt: skip
"""Keys that describe the original head, which are dropped if the head changes."""

Fetch = Callable[[tuple[int, ...]], np.ndarray]
"""Function that copies a parameter, or the part at an index of it, to the host."""


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
    """Write a folder for `transformers` and `load_pretrained`, either completely or not at all.

    An existing folder is replaced only if all of its files are written again.

    Args:
        path: the folder.
        config: the model config.
        params: the parameters of a looped or scanned stack. They keep their dtype.
        family: a `model_type`, such as "llama". None selects the first family that can express the
            config.
        like: the folder from which the model was loaded. Its family, tensor names, tokenizer and
            all unrelated keys in config.json are kept. None keeps nothing.
        files: the contents of extra files, keyed by file name.
        keys: extra keys for config.json that do not affect the model's outputs, such as
            "eos_token_id".
        shard_bytes: the maximum size of a weight file in bytes, at least 1.

    Raises:
        CheckpointError: if the folder contains any other file, or if `files` has an invalid name.
        ConfigError: if the family cannot express the config, or if `keys` would change its meaning.
        ValueError: if a parameter does not match the config, or if an argument is invalid.
    """
    if not isinstance(params, Mapping):
        kind = repr(params) if isinstance(params, str) else f"of type {type(params).__name__}"
        rule = "must be a tree of parameters: save_pretrained(path, config, params)"
        raise ValueError(f"params is {kind}: {rule}")
    check_path("path", path)
    check_count("shard_bytes", shard_bytes, 1)
    for name, mapping in dict(files=files, keys=keys).items():
        if not isinstance(mapping, Mapping | None):
            raise ValueError(
                f"{name} is of type {type(mapping).__name__}: must be a dict keyed by name"
            )
    for name, data in (files or {}).items():
        if not isinstance(data, bytes):
            raise ValueError(f"files[{name!r}] is of type {type(data).__name__}: must be bytes")
    if not isinstance(config, ModelConfig):
        rule = "must be the ModelConfig of a transformer"
        raise ConfigError(f"config is of type {type(config).__name__}: {rule}")
    if config.block is not None:
        rule = "no published family supports custom blocks"
        raise ConfigError(f"block is {config.block!r}: {rule}; save a run folder instead")
    shapes = parameter_shapes(config)
    flat = flatten_dict(params, sep="/")
    fetched = _looped(flat, shapes)
    extra, original = dict(files or {}), None
    if like is not None:
        original = _Original(like, family)
        family = original.family.name
        # The caller's files replace the original folder's files.
        extra = original.text_files() | extra
    chosen = FAMILIES[written_family(config, family)]
    written = write_config(chosen, config)
    more = {n: value for n, value in (keys or {}).items() if written.get(n) is None}
    if original is None:  # null overrides the default IDs in transformers
        named = (*TOKEN_IDS, *(TARGET_TOKEN_IDS if config.kind == "encoder-decoder" else ()))
        written = dict.fromkeys(named) | written
        check_tokenizer(chosen.name, extra.get("tokenizer.json"))
        check_tables(chosen.name, config)
    names = table_names(chosen, config)
    # Parse before merging `like` and `keys`, which must not change the model's outputs.
    meant = read_config(written, names, CONFIG)
    tensors = _tensors(chosen, config, fetched, original is not None and original.bare)
    kept: JsonObject = {}
    if original is not None:
        kept, written = original.merged(written)
    for name in other_keys(chosen.name).keys() & kept.keys() & written.keys():
        written.pop(name)  # not part of the config
    name, other = ("torch_dtype", "dtype") if "dtype" not in kept else ("dtype", "torch_dtype")
    written[name] = np.dtype(flat["embed/tokens"].dtype).name
    kept.pop(other, None)  # newer files use dtype, older ones torch_dtype
    content = {
        key: value
        for key, value in (kept | written | more).items()
        if value is not None or key not in chosen.needed_ids
    }
    if more and read_config(content, names, CONFIG) != meant:
        raise ConfigError(
            f"keys {', '.join(sorted(more))}: must not change the meaning of the config"
        )
    write_folder(Path(path), content, tensors, shard_bytes=shard_bytes, files=extra)


BPE_OPTIONS = (
    "byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix", "ignore_merges"
)  # fmt: skip
"""BPE options of the `tokenizers` library that Qwen 2 does not have."""


def check_tokenizer(family: str, definition: bytes | None) -> None:
    """Raise ConfigError if transformers would produce different IDs than this tokenizer.json.

    AutoTokenizer uses the file unchanged, except for `qwen2`, where it reads only the vocabulary.
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
        rule = "transformers always splits text like Qwen 2 for qwen2, so the IDs would differ"
        remedy = (
            "save in the family llama, with zeros for missing biases, or use Qwen 2's pre-tokenizer"
        )
        raise ConfigError(f"tokenizer.json: {rule}: {remedy}")


class _Original:
    """Checkpoint from which a model was loaded, with everything to keep in a saved folder."""

    def __init__(self, path: str | Path, family: str | None) -> None:
        self._folder: WeightFolder = open_weights(path)
        where = self._folder.where
        self.family = family_of(self._folder.config, where)
        if family not in (None, self.family.name):
            raise ConfigError(
                f"family is {family!r}: the checkpoint {path} has family {self.family.name!r}"
            )
        tensors = CheckpointTensors(self._folder, self.family)
        self.bare = tensors.bare
        self._config, self._keys = read_keys(self._folder.config, tensors.names, where)

    def text_files(self) -> dict[str, bytes]:
        """Read the tokenizer files and the chat templates."""
        names = (*TEXT_FILES, *more_templates(self._folder.path))
        paths = {name: self._folder.file(name) for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path is not None}

    def merged(self, written: JsonObject) -> tuple[JsonObject, JsonObject]:
        """Return the keys to keep from the original, and the keys of the new config.

        If the config has not changed, its keys are spelled as in the original.
        """
        kept = self._keys.kept()
        before = {"model_type": self.family.name, **self.family.write(self._config)}
        # Many spellings express the same config; keep the original one.
        if before == written:
            content = self._folder.config
            return kept, {name: value for name, value in content.items() if name not in kept}
        # Drop the class names of a head that the model no longer has.
        if before.get("architectures") != written.get("architectures"):
            kept.pop("architectures", None)
        if any(before.get(key) != written.get(key) for key in ("architectures", "num_labels")):
            for name in HEAD_KEYS:
                kept.pop(name, None)
        return kept, written


def _looped(flat: Mapping[str, Array], shapes: Shapes) -> dict[str, Fetch]:
    """Return a function for each parameter of the looped model that fetches it from `flat`.

    The stack in `flat` can be scanned. Raises ValueError with the name of the parameter if one is
    missing, unknown, or has the wrong shape or dtype.
    """
    found: dict[str, Fetch] = {}
    used = set()
    for path, want in shapes.items():
        name, layer, shape = path, None, want.shape
        scanned = scanned_path(path)
        if path not in flat and scanned is not None and scanned[0] in flat:
            name, layer = scanned
            shape = (flat[name].shape[0], *want.shape)
        if name not in flat:
            raise ValueError(f"params must contain {path}, which is missing")
        if tuple(flat[name].shape) != tuple(shape):
            rule = f"the config requires {list(shape)}"
            raise ValueError(f"params {name} has shape {list(flat[name].shape)}: {rule}")
        if np.dtype(flat[name].dtype).name not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise ValueError(f"params {name} is {flat[name].dtype}: {rule}")
        used.add(name)
        index = () if layer is None else (layer,)

        def fetch(
            part: tuple[int, ...], leaf: Array = flat[name], layer: tuple[int, ...] = index
        ) -> np.ndarray:
            whole = (*layer, *part)
            return np.asarray(leaf[whole] if whole else leaf)

        found[path] = fetch
    if unknown := sorted(set(flat) - used):
        raise ValueError(f"params {unknown[0]}: the config has no such parameter")
    return found


def _tensors(
    family: Family, config: ModelConfig, params: Mapping[str, Fetch], bare: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the file's tensors with their names, one at a time."""
    by_tensor: dict[str, list[TensorMapping]] = {}
    for mapping in family.table(config):
        by_tensor.setdefault(mapping.tensor, []).append(mapping)
    for name, mappings in by_tensor.items():
        pieces = []
        for mapping in mappings:
            path, part = whole_path(mapping.param, scanned=False)
            # The mappings of a tensor are listed in the order of its rows, as `joined` expects.
            pieces.append(mapping.layout.write(params[path](part)))
        whole = joined([mapping.layout for mapping in mappings], pieces)
        # In a checkpoint without a head, names have no prefix, so write them without the prefix.
        yield name.removeprefix(family.prefix) if bare else name, whole
    for name, value in family.scalars(config).items():
        yield name.removeprefix(family.prefix) if bare else name, np.asarray(value, whole.dtype)
