"""Save a model of texts as a folder that Hugging Face's libraries read, with its tokenizer."""

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
    """Save a published model anew, with the tokenizer of its folder; see `save_run`."""
    files, keys = dict[str, bytes](), JsonObject()
    # GGUF stores a tokenizer as metadata of the one file: it is written anew.
    if isinstance(folder, GgufModel):  # in which no file of a tokenizer can be copied
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
    """Save the model of a run, and return lines that describe the folder.

    `family` is a model_type; None is the first that can express the config.
    """
    config, params, lines = model.config, model.params, list[str]()
    if not isinstance(config, ModelConfig):
        rule = "other libraries have no such model: must be a transformer"
        raise ConfigError(f"model of the run is a {type(config).__name__}: {rule}")
    classifies = config.kind == "encoder" and config.num_classes is not None
    files, note = tokenizer_files(model.tokenizer, config.vocab_size, classifies=classifies)
    family, written = written_as(config, family, files["tokenizer.json"])
    if written != config:
        config, params = written, with_zero_biases(written, params)
        lines = [f"a {family} has biases: they are written as zeros"]
    keys = token_ids(model.tokenizer, config.kind, config.vocab_size)
    given = {name: i for name, i in keys.items() if i is not None}
    if config.kind == "encoder-decoder" and (banned := target_of(model.tokenizer).banned):
        given["bad_words_ids"] = [list(ids) for ids in banned]
    if given:
        files["generation_config.json"] = f"{json.dumps(given)}\n".encode()
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
    """Return the family that a model is written as, and its config there, perhaps with biases.

    `definition` is the tokenizer.json beside it.
    """
    attention = replace(config, use_bias=True, qkv_bias=None, ff_bias=bool(config.ff_bias))
    all_layers = replace(config, use_bias=True)
    reason: ConfigError | None = None
    # Some families always have biases, some everywhere but in the feed-forward network: zeros
    # change no number.
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
    """Return parameters without biases as those of the same model with biases, which are zeros."""
    shapes = flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    given = flatten_dict(params)
    dtype = jax.tree.leaves(params)[0].dtype
    biases = {
        path: np.zeros(shape.shape, dtype)
        for path, shape in shapes.items()
        if path[-1] == "bias" and path not in given
    }
    return unflatten_dict(given | biases)


def token_ids(tokenizer: Tokenizer, kind: str, vocab_size: int) -> JsonObject:
    """Return the keys of config.json that name tokens; None for one that there is not.

    So is one that the tokenizer has and the model has not. None is written as null: a family may
    have a default for a missing key.
    """
    own = plain(tokenizer)
    added = tokenizer.special_ids if isinstance(tokenizer, SpecialTokens) else {}
    stop: tuple[int, ...] = (added["eos"],) if "eos" in added else ()
    roles = dict(added)
    if isinstance(own, PretrainedTokenizer):
        roles, stop = {**own.special_ids, **added}, tuple(sorted({*own.stop_ids, *stop}))
    found: JsonObject = {f"{role}_token_id": roles.get(role) for role in ("bos", "pad")}
    if kind == "encoder-decoder":
        target = target_of(tokenizer)
        stop = target.stop
        begins = target.start, target.forced_bos, target.forced_eos
        found |= dict(zip(TARGET_IDS, begins, strict=True))
    found = {n: None if i is None or i >= vocab_size else i for n, i in found.items()}
    # A tokenizer may have more ids than the model has rows.
    stop = tuple(i for i in stop if i < vocab_size)
    found["eos_token_id"] = None if not stop else stop[0] if len(stop) == 1 else list(stop)
    return found


_SURROGATE = "the run's characters hold a lone surrogate, which has no UTF-8"


def tokenizer_files(
    tokenizer: Tokenizer, vocab_size: int, *, classifies: bool = False
) -> tuple[dict[str, bytes], str]:
    """Return the files that describe a tokenizer to other libraries, and a line about them.

    If it `classifies`, they put around a text what an encoder reads that says its class.
    """
    beside: JsonObject = {"tokenizer_class": "PreTrainedTokenizerFast"}
    match plain(tokenizer):
        case PretrainedTokenizer() as own:
            definition = json.loads(own.definition)
            beside |= {f"{role}_token": token for role, token in own.roles}
            if own.named_tokens:
                beside["extra_special_tokens"] = dict(own.named_tokens)
            if templates := dict(own.chat_templates):
                named = [{"name": n, "template": t} for n, t in templates.items()]
                beside["chat_template"] = (
                    templates["default"] if list(templates) == ["default"] else named
                )
            note = "tokenizer.json: that of the model the run began with"
        case BPETokenizer() as own:
            definition, note = json.loads(own.definition), "tokenizer.json: the run's BPE"
            definition["decoder"] = _byte_definition()["decoder"]
        case ByteTokenizer():
            definition = _byte_definition()
            note = "tokenizer.json: one token a byte, as a BPE without merges"
        case CharTokenizer() as own:
            if any("\ud800" <= character <= "\udfff" for character in own.characters):
                raise ConfigError(_SURROGATE)
            from tokenizers import Regex, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Library

            # Characters that were never met share an id past the vocabulary.
            known = {character: i for i, character in enumerate(own.characters)}
            known |= {"<unk>": vocab_size}
            library: Any = Library(models.BPE(vocab=known, merges=[], unk_token="<unk>"))
            library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,64}"), "isolated")
            library.decoder = decoders.Fuse()
            definition = json.loads(library.to_str())
            note = (
                f"tokenizer.json: the run's {own.vocab_size} characters, as a BPE without "
                f"merges; another one gets the id {vocab_size}, which the model does not have"
            )
        case _:
            raise ConfigError(f"a {type(plain(tokenizer)).__name__} cannot be written")
    if isinstance(tokenizer, SpecialTokens):
        beside |= _with_added(definition, tokenizer)
    if classifies and (wanted := encoder_frame(tokenizer)) != frame(tokenizer):
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(definition))
        tokens = [tuple(map(library.id_to_token, part)) for part in wanted]
        ids = dict(zip(sum(tokens, ()), sum(wanted, ()), strict=True))
        definition["post_processor"] = around(ids, *tokens)
    files = {"tokenizer.json": definition, "tokenizer_config.json": beside}
    written = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    try:
        return {name: f"{text}\n".encode() for name, text in written.items()}, note
    except UnicodeEncodeError:
        raise ConfigError(_SURROGATE) from None


def _with_added(definition: JsonObject, tokenizer: SpecialTokens) -> dict[str, str]:
    """Add special tokens to the library's JSON, and return those that have a role."""
    vocabulary = definition["model"].get("vocab")
    added = definition.setdefault("added_tokens", [])
    taken = {token["content"] for token in added}
    taken |= {*vocabulary} if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    roles = {}
    for name, i in tokenizer.special_ids.items():
        text = f"<{name}>"
        # A text of the vocabulary must not become a special token.
        while text in taken:
            text = f"<{text}>"
        if isinstance(vocabulary, dict):  # where the library keeps an id as it is
            vocabulary[text] = i
        added.append(dict(id=i, content=text, **flags))
        if name in ROLES:
            roles[f"{name}_token"] = text
    return roles


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
