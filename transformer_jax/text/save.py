"""Saving of a model and its tokenizer as a folder for Hugging Face's libraries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.loading import TextModel, published_tokenizer
from transformer_jax.models.factory import init_params
from transformer_jax.pretrained.config_json import check_tables, written_family
from transformer_jax.pretrained.gguf import GgufModel
from transformer_jax.pretrained.safetensors_folder import SHARD_BYTES, WeightFolder
from transformer_jax.pretrained.save import check_tokenizer, save_pretrained
from transformer_jax.pytree import Params
from transformer_jax.tokenizers.hf_files import around
from transformer_jax.tokenizers.pretrained import ROLES, TARGET_IDS, PretrainedTokenizer
from transformer_jax.tokenizers.special import SpecialTokens, encoder_frame, frame, plain, target_of
from transformer_jax.tokenizers.trained import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from transformer_jax.tokenizers.utf8 import byte_letters
from transformer_jax.untrusted_files import JsonObject


def save_published(
    target: Path, folder: WeightFolder, config: ModelConfig, params: Params, shard_bytes: int
) -> list[str]:
    """Save a published model with the tokenizer from its original folder."""
    files, keys = dict[str, bytes](), JsonObject()
    # GGUF stores the tokenizer as metadata, so there is no tokenizer file to copy.
    if isinstance(folder, GgufModel):
        tokenizer = published_tokenizer(folder)
        files, _ = tokenizer_files(tokenizer, config.vocab_size)
        keys = token_ids(tokenizer, config.kind, config.vocab_size)
    save_pretrained(
        target, config, params, like=folder.path, files=files, keys=keys, shard_bytes=shard_bytes
    )
    return [_written(target, params)]


def save_run(
    target: Path, model: TextModel, family: str | None = None, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Save a run's model, and return lines that describe the folder.

    `family` is a model_type; None means the first family that can express the config.
    """
    config, params, lines = model.config, model.params, list[str]()
    if not isinstance(config, ModelConfig):
        rule = "must be a transformer, because other libraries have no such model"
        raise ConfigError(f"model of the run is of type {type(config).__name__}: {rule}")
    classifies = config.kind == "encoder" and config.num_classes is not None
    files, note = tokenizer_files(model.tokenizer, config.vocab_size, classifies=classifies)
    family, written = written_as(config, family, files["tokenizer.json"])
    if written != config:
        config, params = written, with_zero_biases(written, params)
        lines = [f"the family {family} has biases, which are written as zeros"]
    keys = token_ids(model.tokenizer, config.kind, config.vocab_size)
    generation = {name: i for name, i in keys.items() if i is not None}
    if config.kind == "encoder-decoder" and (banned := target_of(model.tokenizer).banned):
        generation["bad_words_ids"] = [list(ids) for ids in banned]
    if generation:
        files["generation_config.json"] = f"{json.dumps(generation)}\n".encode()
    assert model.run is not None
    if isinstance(model.run.task, ClassifyTask):
        names = list(model.run.task.labels or ())
        keys["id2label"] = {str(i): name for i, name in enumerate(names)}
        keys["label2id"] = {name: i for i, name in enumerate(names)}
    save_pretrained(
        target, config, params, family=family, files=files, keys=keys, shard_bytes=shard_bytes
    )
    return [_written(target, params, family), *lines, note]


def written_as(
    config: ModelConfig, family: str | None, definition: bytes | None = None
) -> tuple[str, ModelConfig]:
    """Return the family to save a model as, and its config, possibly with added biases.

    `definition` is the content of tokenizer.json.
    """
    attention = replace(config, use_bias=True, qkv_bias=None, ff_bias=bool(config.ff_bias))
    all_layers = replace(config, use_bias=True)
    reason: ConfigError | None = None
    # Some families always have biases, either everywhere or everywhere except in feed-forwards.
    # Zero biases do not change the results.
    for tried in (config,) if config.use_bias else (config, attention, all_layers):
        try:
            name = written_family(tried, family)
            check_tokenizer(name, definition)
            check_tables(name, tried)
            return name, tried
        except ConfigError as error:
            reason = reason or error
    assert reason is not None
    raise reason


def with_zero_biases(config: ModelConfig, params: Params) -> Params:
    """Add zeros for the biases that `config` requires and that the parameters lack."""
    shapes = flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    leaves = flatten_dict(params)
    dtype = jax.tree.leaves(params)[0].dtype
    biases = {
        path: np.zeros(shape.shape, dtype)
        for path, shape in shapes.items()
        if path[-1] == "bias" and path not in leaves
    }
    return unflatten_dict(leaves | biases)


def token_ids(tokenizer: Tokenizer, kind: str, vocab_size: int) -> JsonObject:
    """Return the token IDs for config.json, with None for a token that does not exist.

    None is written as null, because a family may have a default for a missing key.
    """
    base = plain(tokenizer)
    added = tokenizer.special_ids if isinstance(tokenizer, SpecialTokens) else {}
    stop: tuple[int, ...] = (added["eos"],) if "eos" in added else ()
    roles = dict(added)
    if isinstance(base, PretrainedTokenizer):
        roles, stop = {**base.special_ids, **added}, tuple(sorted({*base.stop_ids, *stop}))
    found: JsonObject = {f"{role}_token_id": roles.get(role) for role in ("bos", "pad")}
    if kind == "encoder-decoder":
        target = target_of(tokenizer)
        stop = target.stop
        begins = target.start, target.forced_bos, target.forced_eos
        found |= dict(zip(TARGET_IDS, begins, strict=True))
    found = {n: None if i is None or i >= vocab_size else i for n, i in found.items()}
    # A tokenizer may have more IDs than the model has embedding rows.
    stop = tuple(i for i in stop if i < vocab_size)
    found["eos_token_id"] = None if not stop else stop[0] if len(stop) == 1 else list(stop)
    return found


_SURROGATE = "the run's characters include a lone surrogate, which UTF-8 cannot encode"


def tokenizer_files(
    tokenizer: Tokenizer, vocab_size: int, *, classifies: bool = False
) -> tuple[dict[str, bytes], str]:
    """Return the files that define a tokenizer for other libraries, and a line about them.

    If `classifies` is true, the files add the special tokens that the model expects around each
    text.
    """
    settings: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    match plain(tokenizer):
        case PretrainedTokenizer() as base:
            definition = json.loads(base.definition)
            settings |= {f"{role}_token": token for role, token in base.roles}
            if base.named_tokens:
                settings["extra_special_tokens"] = dict(base.named_tokens)
            if templates := dict(base.chat_templates):
                named = [{"name": n, "template": t} for n, t in templates.items()]
                settings["chat_template"] = (
                    templates["default"] if list(templates) == ["default"] else named
                )
            note = "tokenizer.json: copied from the model that the run started from"
        case BPETokenizer() as base:
            definition, note = json.loads(base.definition), "tokenizer.json: the run's BPE"
            definition["decoder"] = _byte_definition()["decoder"]
        case ByteTokenizer():
            definition = _byte_definition()
            note = "tokenizer.json: one token per byte, as a BPE without merges"
        case CharTokenizer() as base:
            if any("\ud800" <= character <= "\udfff" for character in base.characters):
                raise ConfigError(_SURROGATE)
            from tokenizers import Regex, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Library

            # Unknown characters share an ID beyond the vocabulary.
            ids = {character: i for i, character in enumerate(base.characters)}
            ids |= {"<unk>": vocab_size}
            library: Any = Library(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
            library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,64}"), "isolated")
            library.decoder = decoders.Fuse()
            definition = json.loads(library.to_str())
            note = (
                f"tokenizer.json: the run's {base.vocab_size} characters, as a BPE without "
                f"merges; any other character gets ID {vocab_size}, which the model does not have"
            )
        case _:
            raise ConfigError(
                f"a tokenizer of type {type(plain(tokenizer)).__name__} cannot be written"
            )
    if isinstance(tokenizer, SpecialTokens):
        vocabulary = definition["model"].get("vocab")
        added = definition.setdefault("added_tokens", [])
        taken = {token["content"] for token in added}
        taken |= {*vocabulary} if isinstance(vocabulary, dict) else {text for text, _ in vocabulary}
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for name, i in tokenizer.special_ids.items():
            text = f"<{name}>"
            # An ordinary piece of the vocabulary must not become a special token.
            while text in taken:
                text = f"<{text}>"
            if isinstance(vocabulary, dict):  # a dict fixes the ID
                vocabulary[text] = i
            added.append(dict(id=i, content=text, **flags))
            if name in ROLES:
                settings[f"{name}_token"] = text
    if classifies and (framing := encoder_frame(tokenizer)) != frame(tokenizer):
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(definition))
        tokens = [tuple(map(library.id_to_token, part)) for part in framing]
        ids = dict(zip(sum(tokens, ()), sum(framing, ()), strict=True))
        definition["post_processor"] = around(ids, *tokens)
    files = {"tokenizer.json": definition, "tokenizer_config.json": settings}
    written = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    try:
        return {name: f"{text}\n".encode() for name, text in written.items()}, note
    except UnicodeEncodeError:
        raise ConfigError(_SURROGATE) from None


def _byte_definition() -> JsonObject:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return json.loads(library.to_str())


def _written(target: Path, params: Params, family: str | None = None) -> str:
    leaves = jax.tree.leaves(params)
    count, kinds = sum(leaf.size for leaf in leaves), sorted({str(leaf.dtype) for leaf in leaves})
    kind = f" as a {family}" if family else ""
    return f"{target}: {count:,} parameters in {' and '.join(kinds)}{kind}"
