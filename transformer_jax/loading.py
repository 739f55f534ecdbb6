"""Loading of text models and their tokenizers from training runs and published models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ConfigError, DType, ModelConfig, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.config.optimizers import ScheduleFree
from transformer_jax.config.tasks import CustomTask, LanguageTask
from transformer_jax.decoding.logit_processors import HistoryProcessor, never
from transformer_jax.models.factory import init_params, merged
from transformer_jax.models.lora import merge_parts, split_trained
from transformer_jax.models.quantized import Kind, quantize
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.pretrained.gguf import GgufModel
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError, WeightFolder
from transformer_jax.pretrained.weights import open_weights
from transformer_jax.pytree import Params, cast_floats, sha256_of
from transformer_jax.tokenizers.gguf_metadata import tokenizer_of_metadata
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.pretrained import TARGET_IDS, PretrainedTokenizer
from transformer_jax.tokenizers.special import end_ids, frame, special_ids
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.untrusted_files import JsonObject
from transformer_jax.values import value_class

Which = Literal["best", "last"]


@value_class
class TextModel:
    """Text model with its tokenizer and its start and end tokens."""

    config: AnyModelConfig
    params: Params
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    processors: tuple[HistoryProcessor, ...] = ()
    """Processors that ban tokens which the published model must not generate."""
    which: Which | None = None
    """Which checkpoint of the run was loaded; None for a published model."""
    step: int | None = None
    """Training step of the checkpoint."""
    begin_id: int | None = None
    """Token to add before each text if the model was trained on documents and its tokenizer adds no
    start token."""
    source_tokenizer: Tokenizer | None = None
    """Tokenizer of the source texts, if it is a different one."""
    run: TrainConfig | None = None
    """Config of the run; None for a published model."""


def load_run(
    path: str | Path, which: Which | None = None, *, init_from: str | Path | None = None
) -> TextModel:
    """Load the model and the tokenizer of a training run.

    `which` selects the checkpoint: "best" has the lowest held-out loss, "last" is the latest. None
    selects "best", or "last" if no checkpoint has been evaluated yet. The field `which` of the
    result contains the choice. If the base model of the run's adapters has moved, pass its new path
    as `init_from`.

    Raises ConfigError if the folder contains no run, and CheckpointError if the run is damaged or
    the base model is not the one that the run started from.
    """
    folder = RunFolder(Path(path))
    config = _with_base(folder.read_config(), init_from)
    if isinstance(config.task, CustomTask) and config.task.loaded_by is not None:
        rule = f"load it with {config.task.loaded_by}(RUN)"
        raise ConfigError(f"run is {str(path)!r}: it contains no text model; {rule}")
    which, step = _chosen_step(folder, which)
    saved = checkpoint.step_path(folder.checkpoints, step)
    metadata = checkpoint.read_manifest(saved).metadata
    tokenizer = folder.read_tokenizer(metadata["tokenizer_sha256"])
    with naming_run(path, config.init_from):
        params = _restore_trained(config, saved)
        if config.lora is not None:  # adapters are added to the base model before it is quantized
            params = merge_parts(_adapted_base(config, metadata), params, config.lora)
    source = metadata.get("source_tokenizer_sha256")
    stop, begin = end_ids(tokenizer), None
    if isinstance(config.task, LanguageTask) and config.task.documents is not None:
        end = special_ids(tokenizer)["eos"]
        stop, begin = (*stop, end), None if frame(tokenizer).first else end
    stop = _within(stop, config.model)
    return TextModel(
        config.model, params, tokenizer, stop, which=which, step=step, run=config, begin_id=begin,
        source_tokenizer=source and folder.read_source_tokenizer(source),
    )  # fmt: skip


def _with_base(config: TrainConfig, init_from: str | Path | None) -> TrainConfig:
    """Return a run's config with the current path of its base model."""
    if init_from is None:
        return config
    if config.lora is None:
        rule = "the run has no adapters, so it reads no other model"
        raise ConfigError(f"init_from is {str(init_from)!r}: {rule}")
    return replace(config, init_from=str(init_from))


@contextmanager
def naming_run(path: str | Path, init_from: str | None) -> Iterator[None]:
    """Add the name of the run, and how to pass the path, to an error about a missing base model."""
    try:
        yield
    except (ConfigError, CheckpointError, OSError) as error:
        if init_from is None or os.path.isdir(init_from):
            raise
        hint = "if it has moved, pass init_from=FOLDER"
        raise ConfigError(
            f"run {str(path)!r} started from {init_from!r}, which cannot be read ({error}); {hint}"
        ) from None


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run rather than of a published model."""
    return (Path(path) / "checkpoints").is_dir()


def base_params(init_from: str, scanned: bool) -> Params:
    """Load the float32 parameters of a run or a published model for a scanned or looped stack."""
    if is_run(init_from):
        return (stack_layers if scanned else unstack_layers)(load_run(init_from).params)
    return load_pretrained(init_from, dtype="float32", scan_layers=scanned)[1]


def _adapted_base(config: TrainConfig, metadata: JsonObject) -> Params:
    """Load the base parameters of a run's adapters; raise CheckpointError if they have changed."""
    assert config.init_from is not None
    base = base_params(config.init_from, config.model.scan_layers)
    check_base(config.init_from, base, metadata)
    # the checkpoint contains these parameters
    base = {name: part for name, part in base.items() if name not in config.trained_whole}
    shapes = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    return merged(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), base)[0]


def check_base(init_from: str, base: Params, metadata: JsonObject) -> None:
    """Raise CheckpointError unless `base` is the base model of a checkpoint's adapters."""
    found, wanted = sha256_of(base), metadata["base_sha256"]
    if found != wanted:
        rule = f"the run started from {wanted[:16]}, so this is a different model"
        raise CheckpointError(f"{init_from}: parameters have sha256 {found[:16]}, but {rule}")


def _restore_trained(config: TrainConfig, saved: Path) -> Params:
    """Return the trained float32 parameters of a checkpoint, averaged if the run averages them."""
    averages = config.ema_decay is not None or isinstance(config.optimizer, ScheduleFree)
    name = "average" if averages else "params"
    # averages are always stored in float32
    dtype = jnp.float32 if averages else config.param_dtype

    def fresh() -> Params:
        key, lora = jax.random.key(0), config.lora
        params: Params = init_params(config.model, key)
        if lora is not None:
            params = split_trained(params, lora, key, config.trained_whole)
        return cast_floats(params, dtype)

    found = checkpoint.restore(saved, {name: jax.eval_shape(fresh)})[name]
    return cast_floats(found, jnp.float32)


def load_adapters(
    path: str | Path, which: Which | None = None, *, init_from: str | Path | None = None
) -> tuple[TrainConfig, Params]:
    """Load the config and the float32 adapters of a LoRA run; see `load_run`.

    Raises ConfigError if the run trained no adapters, or also trained other parameters.
    """
    folder = RunFolder(Path(path))
    config = folder.read_config()
    if config.lora is None:
        raise ConfigError(f"run is {str(path)!r}: it has no adapters, because lora is None")
    saved = checkpoint.step_path(folder.checkpoints, _chosen_step(folder, which)[1])
    trained = _restore_trained(config, saved)
    if init_from is not None:
        config = _with_base(config, init_from)
        _adapted_base(config, checkpoint.read_manifest(saved).metadata)  # checks the base model
    if whole := trained["whole"]:
        names = ", ".join(whole)
        rule = f"it also trained {names}, which are not adapter weights"
        raise ConfigError(f"run is {str(path)!r}: {rule}")
    return config, trained["lora"]


def _chosen_step(folder: RunFolder, which: Which | None) -> tuple[Which, int]:
    """Return "best" or "last", and the step of that checkpoint."""
    if which not in (None, "best", "last"):
        raise ConfigError(f"checkpoint is {which!r}: must be 'best', 'last' or None")
    steps = checkpoint.saved_steps(folder.checkpoints)
    if not steps:
        raise ConfigError(f"run is {str(folder.path)!r}: it has no checkpoint yet")
    best = checkpoint.best_step(folder.checkpoints)
    if which == "last" or (which is None and best is None):
        return "last", steps[-1]
    if best is None:
        raise ConfigError("checkpoint is 'best': no checkpoint has been evaluated yet; use 'last'")
    return "best", best


def load_text_model(
    path_or_id: str | Path, *, dtype: DType | None = None, max_len: int | None = None
) -> TextModel:
    """Load a published model and its tokenizer.

    Stop tokens and banned tokens are read from generation_config.json, or from config.json if a key
    is missing there. The arguments are those of `load_pretrained`.
    """
    folder = open_weights(path_or_id)
    tokenizer = published_tokenizer(folder)
    config, params = load_pretrained(folder.path, dtype=dtype, max_len=max_len)
    tokenizer, generation = with_targets(tokenizer, folder, config), _generation(folder)
    stop = _ids(folder, generation, "eos_token_id", config) or tokenizer.stop_ids
    banned = _banned(folder, generation, config, stop)
    stop = _within(stop, config)
    return TextModel(config, params, tokenizer, stop, processors=never(banned))


def published_tokenizer(folder: WeightFolder) -> PretrainedTokenizer:
    """Load the tokenizer from the folder or file of a model.

    Raises CheckpointError if no usable tokenizer is found, and ConfigError if the source and the
    target use different tokenizers.
    """
    if folder.config.get("share_encoder_decoder_embeddings") is False:
        rule = "source and target have separate tokenizers; use load_pretrained with token IDs"
        where = f"{folder.where}: share_encoder_decoder_embeddings is False"
        raise ConfigError(f"{where}: {rule}")
    try:
        if isinstance(folder, GgufModel):
            return tokenizer_of_metadata(folder.gguf.metadata, folder.where)
        return load_tokenizer_folder(folder.path)
    except DataError as error:
        raise CheckpointError(f"no usable tokenizer: {error}") from None


def with_targets(
    tokenizer: PretrainedTokenizer, folder: WeightFolder, config: ModelConfig
) -> PretrainedTokenizer:
    """Set the token IDs for the targets of an encoder-decoder on its tokenizer.

    These are the IDs of the tokens that begin a target, end it, or never occur in it.

    Raises ConfigError if the folder specifies no start token.
    """
    # a decoder continues its prompt; only the target of an encoder-decoder has a start token
    if config.kind != "encoder-decoder":
        return tokenizer
    generation = _generation(folder)
    names = (*TARGET_IDS, "bos_token_id")
    ids = {n: next(iter(_ids(folder, generation, n, config)), None) for n in names}
    begins, start = ids.pop("bos_token_id"), TARGET_IDS[0]
    ids[start] = begins if ids[start] is None else ids[start]
    if ids[start] is None:
        raise ConfigError(f"{folder.where}: {start} is missing")
    stop = _ids(folder, generation, "eos_token_id", config) or tokenizer.stop_ids
    return replace(
        tokenizer,
        target_ids=tuple((n, i) for n, i in ids.items() if i is not None),
        banned=_banned(folder, generation, config, stop),
    )


def with_param_dtype(model: TextModel, dtype: DType) -> TextModel:
    """Return the model with another dtype for its parameters and computation.

    Raises ValueError with the name of the parameter if a weight is too large for the dtype.
    """
    if not model.config.supports("dtypes"):
        kind = type(model.config).__name__
        raise ConfigError(f"dtype is {dtype!r}: {kind} supports only float32")
    return replace(
        model,
        params=cast_floats(model.params, dtype),
        config=replace(as_transformer(model.config), dtype=dtype),
    )


def with_quantized_weights(model: TextModel, kind: Kind) -> TextModel:
    """Return the model with quantized weights and the same compute dtype.

    "int8" and "int4" are the kinds that `quantize` applies to the kernels. Both store embeddings
    and the output matrix in 8 bits, or "int4" in 4 bits if that keeps all numbers exactly. Raises
    ConfigError if the model is not a transformer.
    """
    if not model.config.supports("dtypes"):
        name = type(model.config).__name__
        raise ConfigError(f"weights is {kind!r}: {name} supports only float32")
    return replace(model, params=quantize(model.params, kind, embeddings=True))


def _within(ids: tuple[int, ...], config: AnyModelConfig) -> tuple[int, ...]:
    """Return the sorted IDs that are in the model's vocabulary."""
    return tuple(sorted({i for i in ids if i < config.vocab_size}))


def _generation(folder: WeightFolder) -> JsonObject:
    """Return the keys of config.json, overridden by those of generation_config.json."""
    overrides = folder.read_json("generation_config.json")
    if overrides is None:
        return folder.config
    if not isinstance(overrides, dict):
        raise CheckpointError(f"{folder.path / 'generation_config.json'}: must be an object")
    return folder.config | {name: value for name, value in overrides.items() if value is not None}


def _ids(
    folder: WeightFolder, content: JsonObject, name: str, config: ModelConfig
) -> tuple[int, ...]:
    """Return the IDs that a key contains, which is one ID or a list.

    The result is empty if the key is missing or null.
    """
    value = content.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        # Python's `bool` is an `int`, but true is not a token ID
        if type(i) is not int or not 0 <= i < config.vocab_size:
            rule = f"must be IDs below vocab_size {config.vocab_size}"
            raise ConfigError(f"{folder.path}: {name} is {value!r:.80}: {rule}")
    return tuple(ids)


def _banned(
    folder: WeightFolder, content: JsonObject, config: ModelConfig, stop: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the banned sequences, which are `bad_words_ids` and `suppress_tokens`.

    Stop tokens remain allowed even if `bad_words_ids` contains them. Raises ConfigError for
    `begin_suppress_tokens`, which transformers bans in the first step only.
    """
    if content.get(first := "begin_suppress_tokens"):
        rule = "bans for a single step are not supported"
        raise ConfigError(f"{folder.path}: {first} is {content[first]!r:.80}: {rule}")
    suppressed = _ids(folder, content, "suppress_tokens", config)
    name = "bad_words_ids"
    words = content.get(name) or []
    if not isinstance(words, list) or not all(isinstance(w, list) and w for w in words):
        raise ConfigError(f"{folder.path}: {name} is {words!r:.80}: must be a list of lists of IDs")
    words = [_ids(folder, {name: word}, name, config) for word in words]
    # as in transformers, because otherwise no text could end
    words = [word for word in words if word not in {(end,) for end in stop}]
    return tuple(dict.fromkeys([*words, *((i,) for i in suppressed)]))
