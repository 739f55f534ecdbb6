"""Sentence encoders, which map text to vectors (Reimers & Gurevych 2019).

A sentence-transformers folder contains:

    modules.json                the modules: Transformer, Pooling, and optionally Normalize
    config.json, model*         the encoder, or a decoder as in Qwen3-Embedding
    sentence_*_config.json      the maximum length, and whether to lowercase the text
    1_Pooling/config.json       how to pool the token vectors
    config_sentence_transformers.json    prompts to prepend to the text

Other sentence-transformers modules are rejected with an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checks import largest
from transformer_jax.config import ConfigError, DType, ModelConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.models.arguments import check_tokens
from transformer_jax.models.factory import build
from transformer_jax.models.places import places
from transformer_jax.pretrained.families import ConfigKeys
from transformer_jax.pretrained.load import load_hidden
from transformer_jax.pretrained.safetensors_folder import CheckpointError, WeightFolder, open_folder
from transformer_jax.programs import program
from transformer_jax.pytree import Params, PyTree
from transformer_jax.values import value_class

Pooling = Literal["mean", "cls", "max", "last"]
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
"""Pooling methods, keyed by their names in sentence-transformers."""
_CONFIG_NAMES = (
    "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet",
)  # fmt: skip
"""Values of NAME in sentence_NAME_config.json, in the search order of sentence-transformers."""


class TextTokenizer(Protocol):
    """Tokenizer that converts a string to IDs."""

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:  # i32[n]
        """Return the IDs, with or without the special tokens with which the model was trained."""


def pool_sentences(
    hidden: jax.Array,  # [B, T, D]
    valid: jax.Array,  # bool[B, T]
    pooling: Pooling = "mean",
    normalize: bool = False,
) -> jax.Array:  # f32[B, D]
    """Pool the n valid tokens h_t of each row into one vector s.

        mean: s = sum_t h_t / n,   cls: s = h of the first,   max: s_d = max_t h_td,
        last: s = h of the last

    Args:
        hidden: h, the hidden states of the tokens.
        valid: a mask of the valid tokens. Other tokens have no effect, even if their hidden states
            are NaN.
        pooling: "mean", "cls", "max" or "last".
        normalize: whether to divide s by max(|s|, 1e-12).

    Returns:
        The vectors, which are 0 for rows without valid tokens.

    Raises:
        ConfigError: if `pooling` is unknown.
        ValueError: if the shapes do not match.
    """
    if pooling not in get_args(Pooling):
        known = ", ".join(map(repr, get_args(Pooling)))
        raise ConfigError(f"pooling is {pooling!r}: must be one of {known}")
    if hidden.ndim != 3 or valid.shape != hidden.shape[:2]:
        raise ValueError(
            f"hidden has shape {hidden.shape}, valid {valid.shape}: must be [B, T, D] and [B, T]"
        )
    some = valid.any(axis=1)[:, None]
    kept = jnp.where(valid[:, :, None], hidden.astype(jnp.float32), 0.0)
    match pooling:
        case "mean":
            pooled = kept.sum(axis=1) / jnp.maximum(valid.sum(axis=1), 1)[:, None]
        case "cls":
            first = jnp.argmax(valid, axis=1)[:, None, None]
            pooled = jnp.take_along_axis(kept, first, axis=1)[:, 0]
        case "last":
            last = valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)[:, None, None]
            pooled = jnp.take_along_axis(kept, last, axis=1)[:, 0]
        case "max":
            # Padding was set to 0, which could be the largest value.
            seen = jnp.where(valid[:, :, None], kept, -jnp.inf)
            pooled = jnp.where(jnp.isnan(kept).any(axis=1), jnp.nan, largest(seen, axis=1))
            pooled = jnp.where(some, pooled, 0.0)
    if normalize:  # the square root has no finite gradient at 0
        square = (pooled * pooled).sum(axis=1, keepdims=True)
        length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        pooled = pooled / jnp.maximum(length, 1e-12)
    return pooled


@value_class(eq=False)
class SentenceEncoder:
    """Encoder or decoder with its parameters, and the method of pooling its tokens into one vector.

    Attributes:
        config: the model config.
        params: the model parameters.
        pooling: "mean", "cls", "max", or "last".
        normalize: whether vectors are scaled to length 1.
        max_len: maximum length of the text in tokens, including special tokens.
        lower_case: whether to lowercase the text.
        prompts: prompts to prepend to the text, keyed by purpose, such as "query" or "document".
        prompt: the default prompt.
        truncate_left: whether to truncate text that is too long at its beginning instead of its
            end.
    """

    config: ModelConfig
    params: Params
    pooling: Pooling
    normalize: bool
    max_len: int
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str = ""
    truncate_left: bool = False

    def encode(
        self,
        tokens: jax.Array | np.ndarray,  # i32[B, T]
        positions: jax.Array | np.ndarray | None = None,  # i32[B, T]
    ) -> jax.Array:  # f32[B, D]
        """Return a vector for each row. A program is compiled for each new shape.

        Args:
            tokens: token IDs, including special tokens.
            positions: the positions of the tokens, negative for padding. None uses arange(T).
        """
        check_tokens(tokens, self.config.vocab_size)
        return _encode(self.config, self.params, tokens, positions, self.pooling, self.normalize)

    def encode_texts(
        self,
        texts: Sequence[str],
        tokenizer: TextTokenizer,
        *,
        batch_size: int = 32,
        prompt: str | None = None,
    ) -> np.ndarray:  # f32[n, D]
        """Return a vector for each string, which is truncated to `max_len` tokens.

        Strings of similar length share a batch. Batch sizes are powers of two, to limit
        compilation.

        Args:
            texts: a list of n strings.
            tokenizer: a tokenizer with `encode(text, special_tokens=...)`, for example from
                `load_tokenizer_folder`.
            batch_size: the maximum number of strings per batch, at least 1.
            prompt: the prefix for each string, such as `prompts["query"]`. None uses `self.prompt`.

        Raises:
            ValueError: if `texts` is a single string, or if the tokenizer's special tokens do not
                surround the text.
        """
        if isinstance(texts, str):
            raise ValueError("texts is a string: must be a list of strings")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: must be at least 1")
        before = self.prompt if prompt is None else prompt
        return self.encode_ids(
            [self._ids(before + text, tokenizer) for text in texts], batch_size=batch_size
        )

    def encode_ids(
        self, ids: Sequence[np.ndarray], *, batch_size: int = 32
    ) -> np.ndarray:  # f32[n, D]
        """Return a vector for each list of IDs, as `encode_texts` does for strings.

        Args:
            ids: integer arrays of 1 to `max_len` IDs each, including special tokens.
            batch_size: the maximum number of rows per batch, at least 1.
        """
        # Sorting by length keeps the padding of each batch small.
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        out = np.zeros((len(ids), self.config.d_model), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            # Powers of two limit the number of shapes, and a program is compiled for each shape.
            length = min(_power(max(len(ids[i]) for i in rows), 16), self.max_len)
            shape = min(_power(len(rows)), batch_size), length
            tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
            for row, i in enumerate(rows):
                tokens[row, : len(ids[i])] = ids[i]
                positions[row, : len(ids[i])] = np.arange(len(ids[i]))
            out[rows] = np.asarray(self.encode(tokens, positions))[: len(rows)]
        return out

    def _ids(self, text: str, tokenizer: TextTokenizer) -> np.ndarray:  # i32[n]
        """Return the IDs for a string. If the string is truncated, its special tokens are kept."""
        text = text.lower() if self.lower_case else text
        whole = np.asarray(tokenizer.encode(text, special_tokens=True), np.int32)
        if len(whole) <= self.max_len:
            return whole
        # The text is encoded as a whole before it is cut, because a cut string could have other
        # tokens.
        plain = np.asarray(tokenizer.encode(text, special_tokens=False), np.int32)
        room = self.max_len - (len(whole) - len(plain))
        # Find the text's own IDs within all IDs, and keep the special tokens around them.
        for front in range(len(whole) - len(plain) + 1):
            after = front + len(plain)
            if room >= 0 and np.array_equal(whole[front:after], plain):
                kept = plain[len(plain) - room :] if self.truncate_left else plain[:room]
                return np.concatenate([whole[:front], kept, whole[after:]])
        rule = "its special tokens must surround the text and leave room for it"
        raise ValueError(f"the tokenizer cannot truncate text to max_len {self.max_len}: {rule}")


@program(static=("config", "pooling", "normalize"))
def _encode(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray | None,
    pooling: Pooling,
    normalize: bool,
) -> jax.Array:
    apply = partial(build(config).apply, {"params": params}, tokens, positions=positions)
    hidden: PyTree
    if config.kind == "encoder":
        hidden = apply(method="encode")
    else:  # use the input of the output matrix; XLA removes the unused logits
        place = "final_norm"
        if place not in places(config):
            place = f"block_{config.num_layers - 1}/residual"
        hidden = apply(capture=(place,))[-1][place]
    valid = jnp.ones(tokens.shape, bool) if positions is None else jnp.asarray(positions) >= 0
    return pool_sentences(hidden, valid, pooling, normalize)


def _power(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@known_keywords
def load_sentence_encoder(
    path_or_id: str | Path, *, dtype: DType | None = None, revision: str | None = None
) -> SentenceEncoder:
    """Load a sentence encoder from a sentence-transformers folder or repository.

    Args:
        path_or_id: a folder, or the repository ID "ORG/NAME" of a model on the Hugging Face Hub.
        dtype: "float32", "bfloat16" or "float16". None uses the dtype of the checkpoint.
        revision: the branch, tag or commit of the repository. None uses the default branch.

    Raises:
        ConfigError: if the folder requires an unsupported feature, such as weighted pooling or a
            final module other than Normalize.
        CheckpointError: if a file cannot be read.
    """
    folder = open_folder(path_or_id, revision=revision)
    pooling_path, normalize = _parts(folder)
    keys = _object(folder, f"{pooling_path}/config.json")
    if keys is None:
        raise CheckpointError(f"{folder.path / pooling_path / 'config.json'} is missing")
    keys.ignore("word_embedding_dimension", "embedding_dimension")
    keys.require("include_prompt", True)
    modes: dict[str, Pooling] = {
        "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "last",
    }  # fmt: skip
    for other in ("mean_sqrt_len_tokens", "weightedmean_tokens"):
        keys.require(f"pooling_mode_{other}", False)
    on = [modes[mode] for mode in modes if keys.flag(mode, False)]
    if keys.take("pooling_mode", None) is not None:  # newer folders have a single key
        on = [keys.choice("pooling_mode", _POOLINGS)]
    if len(on) != 1:
        known = ", ".join(map(repr, get_args(Pooling)))
        raise ConfigError(f"{keys.where}: pooling is {on}: must be exactly one of {known}")
    keys.check_all_read()
    prompts, prompt = _prompts(folder)
    config, params = load_hidden(folder.path, dtype=dtype)
    if config.kind == "encoder-decoder":
        rule = "is an encoder-decoder: must be an encoder or a decoder"
        raise ConfigError(f"{folder.path / 'config.json'}: {rule}")
    max_len, lower_case = _limits(folder, config)
    settings = _object(folder, "tokenizer_config.json")
    sides = {"right": False, "left": True}
    truncate_left = settings is not None and settings.choice("truncation_side", sides, "right")
    return SentenceEncoder(
        config, params, on[0], normalize, max_len, lower_case, prompts, prompt, truncate_left
    )


def _object(folder: WeightFolder, name: str) -> ConfigKeys | None:
    """Read a JSON file in the folder; return None if it does not exist."""
    content = folder.read_json(name)
    if content is None:
        return None
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder.path / name}: must be an object")
    return ConfigKeys(content, str(folder.path / name))


def _parts(folder: WeightFolder) -> tuple[str, bool]:
    """Return the folder that contains the pooling config, and whether vectors are normalized."""
    where, parts = folder.path / "modules.json", folder.read_json("modules.json")
    if parts is None:
        raise CheckpointError(
            f"{folder.path}: modules.json is missing, so this is not a sentence encoder"
        )
    objects = [x for x in parts if isinstance(x, dict)] if isinstance(parts, list) else []
    if not isinstance(parts, list) or len(objects) < len(parts):
        raise CheckpointError(f"{where}: must be a list of objects")
    found = [ConfigKeys(part, f"{where}: part {i}") for i, part in enumerate(objects)]
    known = ("Transformer", "Pooling", "Normalize")
    for keys, name in zip(found, known, strict=False):
        kind = keys.take("type")
        library = isinstance(kind, str) and kind.startswith("sentence_transformers.")
        if not library or kind.rpartition(".")[2] != name:
            keys.fail("type", kind, f"must be {name} of sentence_transformers")
    if not 2 <= len(found) <= 3:
        kinds = [keys.take("type") for keys in found]
        raise ConfigError(f"{where}: parts are {kinds}: must be {', '.join(known)}")
    # The transformer's files are in the root folder, where `load_hidden` reads them.
    found[0].require("path", "")
    normalize = len(found) == 3
    if normalize:
        path = _path(found[2])
        settings = _object(folder, f"{path}/config.json")
        if settings is not None:
            settings.require("module_input_name", "sentence_embedding")
            settings.require("module_output_name", "sentence_embedding")
            settings.check_all_read()
    return _path(found[1]), normalize


def _path(keys: ConfigKeys) -> str:
    path = keys.take("path")
    return (
        path if isinstance(path, str) else keys.fail("path", path, "must be the name of a folder")
    )


def _prompts(folder: WeightFolder) -> tuple[dict[str, str], str]:
    """Return the prompts, keyed by name, and the default prompt."""
    keys = _object(folder, "config_sentence_transformers.json")
    if keys is None:
        return {}, ""
    keys.require("model_type", "SentenceTransformer")
    if (width := keys.take("truncate_dim", None)) is not None:
        keys.fail("truncate_dim", width, "must be null: truncate the vectors yourself")
    value = keys.take("prompts", None)
    prompts = value if isinstance(value, dict) else {}
    if value not in (None, prompts) or not all(type(text) is str for text in prompts.values()):
        keys.fail("prompts", value, "must be an object whose values are strings")
    if keys.take("default_prompt_name", None) is None:
        return prompts, ""
    return prompts, keys.choice("default_prompt_name", prompts)


def _limits(folder: WeightFolder, config: ModelConfig) -> tuple[int, bool]:
    """Return the maximum length in tokens, and whether to lowercase the text."""
    longest, lower = None, False
    for name in _CONFIG_NAMES:
        keys = _object(folder, f"sentence_{name}_config.json")
        if keys is None:
            continue
        longest, lower = keys.integer("max_seq_length", None), keys.flag("do_lower_case", False)
        if longest is not None and longest > config.max_len:
            keys.fail(
                "max_seq_length",
                longest,
                f"must be at most the encoder's maximum length, {config.max_len}",
            )
        keys.require("transformer_task", "feature-extraction")
        keys.require("module_output_name", "token_embeddings")
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        modality = keys.take("modality_config", {"text": text})  # other modalities are irrelevant
        if not isinstance(modality, dict) or modality.get("text") != text:
            keys.fail("modality_config", modality, f"text must be {text}")
        for empty in ("model_args", "tokenizer_args", "config_args"):
            keys.require(empty, {})
        keys.check_all_read()
        break
    if longest is None:  # newer folders store it in tokenizer_config.json
        settings = _object(folder, "tokenizer_config.json")
        longest = config.max_len
        if settings is not None:
            limit = settings.take("model_max_length", longest)  # 10^30 means no limit
            # A limit of another type is passed on, so that `integer` raises its usual error.
            if type(limit) not in (int, float) or limit < longest:
                longest = settings.integer("model_max_length", longest)
    if longest < 1:
        raise ConfigError(f"{folder.path}: model_max_length is {longest}: must be positive")
    return longest, lower
