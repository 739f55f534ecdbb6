"""A model that reads and writes text, with all it needs: of a training run, or a published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import checkpoint
from transformer_jax.config import ConfigError, DType, ModelConfig
from transformer_jax.data import Tokenizer
from transformer_jax.models import init_params
from transformer_jax.pretrained import load_pretrained
from transformer_jax.pretrained_text import PretrainedTokenizer
from transformer_jax.processors import Ban, BanSequences, HistoryProcessor
from transformer_jax.run_folder import RunFolder
from transformer_jax.text import DataError
from transformer_jax.tokenizer_files import load_tokenizer_folder
from transformer_jax.weights import CONFIG, CheckpointError, WeightFolder, open_folder

Which = Literal["best", "last"]


@dataclass(frozen=True)
class TextModel:
    """What the commands write with."""

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    start_id: int | None = None
    """An encoder-decoder's first token of every target."""
    forced_bos_id: int | None = None
    """And its second."""
    forced_eos_id: int | None = None
    """What a target ends with that would not end."""
    processors: tuple[HistoryProcessor, ...] = ()
    """What the model was published with: tokens it never writes."""

    def chat(self, message: str) -> np.ndarray:  # i32[P]
        """A user's message as the model was trained to read it."""
        if not isinstance(self.tokenizer, PretrainedTokenizer):
            raise DataError("chat: the tokenizer of this run has no chat template")
        return self.tokenizer.chat_ids([{"role": "user", "content": message}])


def load_run(path: str | Path, which: Which = "best") -> TextModel:
    """A run's model after the step of the lowest held-out loss, or after the last one saved."""
    folder = RunFolder(Path(path))
    config = folder.read_config()
    steps = checkpoint.saved_steps(folder.checkpoints)
    if not steps:
        raise ConfigError(f"run is {str(path)!r}: it has no checkpoint yet")
    step = steps[-1]
    if which == "best":
        best = checkpoint.best_step(folder.checkpoints)
        if best is None:
            raise ConfigError("checkpoint is 'best': none was evaluated yet; 'last' is there")
        step = best
    saved = checkpoint.step_path(folder.checkpoints, step)
    metadata = checkpoint.read_manifest(saved).metadata
    tokenizer = folder.read_tokenizer(metadata["tokenizer_sha256"])
    template = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    params = checkpoint.restore(saved, {"params": template})["params"]
    stop = tokenizer.stop_ids if isinstance(tokenizer, PretrainedTokenizer) else ()
    return TextModel(config.model, params, tokenizer, _within(stop, config.model))


def load_text_model(
    path_or_id: str | Path,
    *,
    dtype: DType | None = None,
    max_len: int | None = None,
) -> TextModel:
    """A published decoder or encoder-decoder and its tokenizer.

    Stop tokens and the like are those of generation_config.json, and of config.json where it names
    none. Arguments are those of `load_pretrained`.
    """
    folder = open_folder(path_or_id)
    tokenizer = published_tokenizer(folder)
    config, params = load_pretrained(folder.path, dtype=dtype, max_len=max_len)
    if config.kind == "encoder":
        raise ConfigError(f"{folder.path / CONFIG}: is an encoder's, which writes no text")
    generation = _generation(folder)
    stop = _ids(folder, generation, "eos_token_id", config) or tokenizer.stop_ids
    banned = _banned(folder, generation, config, stop)
    found = TextModel(config, params, tokenizer, _within(stop, config), processors=banned)
    if config.kind == "decoder":
        return found
    start = _id(folder, generation, "decoder_start_token_id", config)
    start = _id(folder, generation, "bos_token_id", config) if start is None else start
    if start is None:
        raise ConfigError(f"{folder.path / CONFIG}: decoder_start_token_id is missing")
    return replace(
        found,
        start_id=start,
        forced_bos_id=_id(folder, generation, "forced_bos_token_id", config),
        forced_eos_id=_id(folder, generation, "forced_eos_token_id", config),
    )


def published_tokenizer(folder: WeightFolder) -> PretrainedTokenizer:
    """Of a model's folder; CheckpointError where there is none that can be used."""
    try:
        return load_tokenizer_folder(folder.path)
    except DataError as error:
        raise CheckpointError(f"no usable tokenizer: {error}") from None


def with_parameters_in(model: TextModel, dtype: DType) -> TextModel:
    """The model with its parameters in another dtype, in which it then computes."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), model.params)
    return replace(model, params=params, config=replace(model.config, dtype=dtype))


def _within(ids: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Those that the model can write at all."""
    return tuple(sorted({i for i in ids if i < config.vocab_size}))


def _generation(folder: WeightFolder) -> dict[str, Any]:
    """generation_config.json over config.json."""
    beside = folder.read_json("generation_config.json")
    if beside is None:
        return folder.config
    if not isinstance(beside, dict):
        raise CheckpointError(f"{folder.path / 'generation_config.json'}: must be an object")
    return folder.config | {name: value for name, value in beside.items() if value is not None}


def _ids(
    folder: WeightFolder, content: Mapping[str, Any], name: str, config: ModelConfig
) -> tuple[int, ...]:
    """One id or a list of them; none where the key is absent or null."""
    value = content.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if type(i) is not int or not 0 <= i < config.vocab_size:
            rule = f"must be ids below vocab_size {config.vocab_size}"
            raise ConfigError(f"{folder.path}: {name} is {value!r:.80}: {rule}")
    return tuple(ids)


def _id(
    folder: WeightFolder, content: Mapping[str, Any], name: str, config: ModelConfig
) -> int | None:
    ids = _ids(folder, content, name, config)
    return ids[0] if ids else None


def _banned(
    folder: WeightFolder, content: Mapping[str, Any], config: ModelConfig, stop: Sequence[int]
) -> tuple[HistoryProcessor, ...]:
    """`bad_words_ids`: lists of ids, none of which is written whole; the end remains allowed."""
    name = "bad_words_ids"
    words = content.get(name) or []
    if not isinstance(words, list) or not all(isinstance(w, list) and w for w in words):
        raise ConfigError(f"{folder.path}: {name} is {words!r:.80}: must be lists of ids")
    words = [_ids(folder, {name: word}, name, config) for word in words]
    words = [word for word in words if word not in {(end,) for end in stop}]
    single, longer = [w[0] for w in words if len(w) == 1], [w for w in words if len(w) > 1]
    found: list[HistoryProcessor] = [Ban(*single)] if single else []
    return (*found, BanSequences(*longer)) if longer else tuple(found)
