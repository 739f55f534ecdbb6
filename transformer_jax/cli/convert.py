"""Write a folder of config.json, safetensors and a tokenizer as Hugging Face's libraries read it.

python -m transformer_jax convert --model RUN --to FOLDER            what train.py trained
python -m transformer_jax convert --model RUN --to FOLDER --adapter  its adapters alone, as PEFT's
python -m transformer_jax convert --model FOLDER_OR_ID --to FOLDER   a published model, saved anew
python -m transformer_jax convert --model FILE.gguf --to FOLDER      llama.cpp's file, as a folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.cli.command import ModelOptions, run
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.fields import check_new_folder
from transformer_jax.config.model import as_transformer
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.untrusted_files import JsonObject

if TYPE_CHECKING:
    import jax

    from transformer_jax.pytree import Params
    from transformer_jax.tokenizers.special import SpecialTokens
    from transformer_jax.tokenizers.trained import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Convert(ModelOptions):
    """Options of the command."""

    to: str
    """Where to write; new, or empty."""
    family: str | None = None
    """Of a run: its model_type; default: the first that fits."""
    adapter: bool = False
    """Of a run with lora: the adapters alone, as a folder of PEFT."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type that parameters get; default: their own."""
    shard_gb: float | None = None
    """Largest file, in 10^9 bytes; default: 5."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (a model cannot be read) or 2 (usage)."""
    return run(Convert, argv, lambda options: print(*convert(options), sep="\n"))


def convert(options: Convert) -> list[str]:
    """Convert, and return the lines that say what was written."""
    from transformer_jax.loading import is_run
    from transformer_jax.pretrained.safetensors_folder import SHARD_BYTES

    of_run = is_run(options.model)
    for name in ("family", "checkpoint", "init_from", "adapter"):
        if not of_run and (value := getattr(options, name)) not in (None, False):
            raise ConfigError(
                f"{name} is {value!r}: {options.model!r} is no run, which alone has one"
            )
    for name in ("dtype", "shard_gb"):
        if options.adapter and getattr(options, name) is not None:
            raise ConfigError(f"{name} with adapter: an adapter is one file, in float32")
    shard_bytes = SHARD_BYTES
    if (gigabytes := options.shard_gb) is not None:
        if not 0 < gigabytes < 10**6:
            raise ConfigError(f"shard_gb is {gigabytes}: must be above 0 and below 10**6")
        shard_bytes = max(int(gigabytes * 10**9), 1)
    check_new_folder("to", options.to)
    target = Path(options.to)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"to is {str(target)!r}: exists already: must be new or empty")
    if not of_run:
        return _save_anew(options.model, target, options.dtype, shard_bytes)
    if options.adapter:
        return _adapter(options, target)
    return _export(options, target, shard_bytes)


def _save_anew(
    model: str, target: Path, dtype: jax.typing.DTypeLike | None, shard_bytes: int
) -> list[str]:
    from transformer_jax.loading import published_tokenizer
    from transformer_jax.pretrained.gguf import GgufModel
    from transformer_jax.pretrained.load import load_pretrained
    from transformer_jax.pretrained.save import save_pretrained
    from transformer_jax.pretrained.weights import open_weights

    folder = open_weights(model)
    config, params = load_pretrained(folder.path, dtype=dtype)
    files, keys = dict[str, bytes](), JsonObject()
    if isinstance(folder, GgufModel):  # in which no file of a tokenizer can be copied
        tokenizer = published_tokenizer(folder)
        files, _ = tokenizer_files(tokenizer, config.vocab_size)
        keys = token_ids(tokenizer, config.kind, config.vocab_size)
    save_pretrained(
        target, config, params, like=folder.path, files=files, keys=keys, shard_bytes=shard_bytes
    )
    return [_written(target, params)]


TASK_TYPES = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
"""What PEFT calls the tasks of kinds of models; it has no name for an encoder's hidden tokens."""


def _adapter(options: Convert, target: Path) -> list[str]:
    """Write the adapters of a run as a folder of PEFT."""
    import jax

    from transformer_jax.loading import load_adapters
    from transformer_jax.models.factory import init_params
    from transformer_jax.pretrained.peft import save_lora
    from transformer_jax.pretrained.tensors import tensor_names

    config, adapters = load_adapters(options.model, options.checkpoint, init_from=options.init_from)
    model = as_transformer(config.model)
    assert config.lora is not None
    family, model = _written_as(model, options.family)
    names = tensor_names(model, family)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    written = save_lora(
        target, shapes, adapters, config.lora, names, base_model=config.init_from or "",
        task_type=TASK_TYPES.get(model.kind), fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    count = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    return [
        f"{target}: adapters of {count:,} parameters, rank {written.rank}, of a {family}; "
        f"base model: {config.init_from}"
    ]


def _export(options: Convert, target: Path, shard_bytes: int) -> list[str]:
    from transformer_jax.loading import with_parameters_in
    from transformer_jax.pretrained.save import save_pretrained
    from transformer_jax.tokenizers.special import target_of

    model = options.load().model
    if options.dtype is not None:
        model = with_parameters_in(model, options.dtype)
    config, params, lines = model.config, model.params, list[str]()
    if not isinstance(config, ModelConfig):
        rule = "other libraries have no such model: must be a transformer"
        raise ConfigError(f"model of the run is a {type(config).__name__}: {rule}")
    classifies = config.kind == "encoder" and config.num_classes is not None
    files, note = tokenizer_files(model.tokenizer, config.vocab_size, classifies=classifies)
    family, written = _written_as(config, options.family, files["tokenizer.json"])
    if written != config:
        config, params = written, with_zero_biases(written, params)
        lines = [f"a {family} has biases: they are written as zeros"]
    keys = token_ids(model.tokenizer, config.kind, config.vocab_size)
    given = {name: i for name, i in keys.items() if i is not None}
    if config.kind == "encoder-decoder" and (banned := target_of(model.tokenizer).banned):
        given["bad_words_ids"] = [list(ids) for ids in banned]
    if given:
        files["generation_config.json"] = f"{json.dumps(given)}\n".encode()
    if config.num_classes is not None and model.run is not None:
        assert isinstance(model.run.task, ClassifyTask)
        names = list(model.run.task.labels or ())
        keys["id2label"] = {str(i): name for i, name in enumerate(names)}
        keys["label2id"] = {name: i for i, name in enumerate(names)}
    save_pretrained(
        target, config, params, family=family, files=files, keys=keys, shard_bytes=shard_bytes
    )
    return [_written(target, params, family), *lines, note]


def _written_as(
    config: ModelConfig, family: str | None, definition: bytes | None = None
) -> tuple[str, ModelConfig]:
    """Return the family that a model is written as, and its config there, perhaps with biases.

    `definition` is the tokenizer.json beside it.
    """
    from transformer_jax.pretrained.config_json import check_tables, written_family
    from transformer_jax.pretrained.save import check_tokenizer

    attention = replace(config, use_bias=True, qkv_bias=None, ff_bias=bool(config.ff_bias))
    all_layers = replace(config, use_bias=True)
    reason: ConfigError | None = None
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
    import jax
    import numpy as np
    from flax.traverse_util import flatten_dict, unflatten_dict

    from transformer_jax.models.factory import init_params

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
    from transformer_jax.tokenizers.pretrained import TARGET_IDS, PretrainedTokenizer
    from transformer_jax.tokenizers.special import SpecialTokens, plain, target_of

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
    from tokenizers import Tokenizer as Library

    from transformer_jax.tokenizers.hf_files import around
    from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
    from transformer_jax.tokenizers.special import SpecialTokens, encoder_frame, frame, plain
    from transformer_jax.tokenizers.trained import BPETokenizer, ByteTokenizer, CharTokenizer

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
            definition = _char_definition(own.characters, vocab_size)
            note = (
                f"tokenizer.json: the run's {own.vocab_size} characters, as a BPE without "
                f"merges; another one gets the id {vocab_size}, which the model does not have"
            )
        case _:
            raise ConfigError(f"a {type(plain(tokenizer)).__name__} cannot be written")
    if isinstance(tokenizer, SpecialTokens):
        beside |= _with_added(definition, tokenizer)
    if classifies and (wanted := encoder_frame(tokenizer)) != frame(tokenizer):
        library: Any = Library.from_str(json.dumps(definition))
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
    from transformer_jax.tokenizers.pretrained import ROLES

    vocabulary = definition["model"].get("vocab")
    added = definition.setdefault("added_tokens", [])
    taken = {token["content"] for token in added}
    taken |= {*vocabulary} if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    roles = {}
    for name, i in tokenizer.special_ids.items():
        text = f"<{name}>"
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

    from transformer_jax.tokenizers.utf8 import byte_letters

    library = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return json.loads(library.to_str())


def _char_definition(characters: str, unknown: int) -> JsonObject:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(characters)} | {"<unk>": unknown}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{1,64}"), "isolated")
    library.decoder = decoders.Fuse()
    return json.loads(library.to_str())


def _written(target: Path, params: Params, family: str | None = None) -> str:
    import jax

    leaves = jax.tree.leaves(params)
    count, kinds = sum(leaf.size for leaf in leaves), sorted({str(leaf.dtype) for leaf in leaves})
    kind = f" as a {family}" if family else ""
    return f"{target}: {count:,} parameters in {' and '.join(kinds)}{kind}"
