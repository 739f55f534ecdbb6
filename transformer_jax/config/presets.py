"""Name the published and recommended configs."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from transformer_jax.config.fields import ConfigError
from transformer_jax.config.model import ModelConfig
from transformer_jax.config.positions import Rope, Sinusoidal
from transformer_jax.config.train import TrainConfig

_GPT2 = ModelConfig(vocab_size=50257, d_model=768, num_layers=12, num_heads=12, max_len=1024)
_GPT2 = dataclasses.replace(_GPT2, dropout=0.1, attention_dropout=0.1)
_BERT = ModelConfig(
    kind="encoder", vocab_size=30522, d_model=768, num_layers=12, num_heads=12, max_len=512,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", logit_bias=True,
    type_vocab_size=2, masked_token_head=True, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_SHAKESPEARE = ModelConfig(
    vocab_size=65, d_model=128, num_layers=4, num_heads=4, max_len=64, use_bias=False
)

_MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(d_model=64, num_layers=2, num_heads=4, max_len=64),
    "shakespeare-cpu": _SHAKESPEARE,
    "shakespeare-gpu": dataclasses.replace(
        _SHAKESPEARE, d_model=384, num_layers=6, num_heads=6, max_len=256,
        dropout=0.2, attention_dropout=0.2,
    ),
    "transformer-base": ModelConfig(
        kind="encoder-decoder", vocab_size=37000, d_model=512, num_layers=6, num_heads=8,
        d_ff=2048, max_len=512, positions=Sinusoidal(), norm_order="post", activation="relu",
        scale_embeddings=True, dropout=0.1,
    ),
    "bert-base": _BERT,
    "bert-large": dataclasses.replace(_BERT, d_model=1024, num_layers=24, num_heads=16),
    "gpt2": _GPT2,
    "gpt2-medium": dataclasses.replace(_GPT2, d_model=1024, num_layers=24, num_heads=16),
    "gpt2-large": dataclasses.replace(_GPT2, d_model=1280, num_layers=36, num_heads=20),
    "gpt2-xl": dataclasses.replace(_GPT2, d_model=1600, num_layers=48, num_heads=25),
    "llama3-8b": ModelConfig(
        vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, d_ff=14336,
        max_len=8192, positions=Rope(base=500_000.0), norm="rmsnorm",
        activation="silu", glu=True, use_bias=False, tie_embeddings=False, dtype="bfloat16",
    ),
}  # fmt: skip

# nanoGPT trains its small character model at 1e-3; at 3e-3 it is better by 0.1 nats.
_TRAINING: dict[str, dict[str, Any]] = {
    "default": dict(learning_rate=3e-3),
    "tiny": dict(steps=200, eval_every=100, checkpoint_every=100, warmup_steps=20),
    "shakespeare-cpu": dict(data="shakespeare", learning_rate=3e-3),
    "shakespeare-gpu": dict(data="shakespeare", steps=5000, batch_size=64),
}

PRESETS: tuple[str, ...] = tuple(_MODELS)


def _lookup(name: str) -> ModelConfig:
    _known("preset", name, list(_MODELS))
    return _MODELS[name]


def _known(kind: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{kind} is {name!r}: must be one of {', '.join(names)}{hint}")


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    for name in changes:
        _known("field", name, [f.name for f in dataclasses.fields(config)])
    return dataclasses.replace(config, **changes)


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return the published or recommended config of that name, with `changes` to its fields.

    Sizes: Vaswani et al. 2017 (base), Devlin et al. 2019 (BERT), Radford et al. 2019 (GPT-2),
    Dubey et al. 2024 (Llama 3), nanoGPT's character recipes (shakespeare-*).
    """
    return _changed(_lookup(name), changes)


def train_preset(name: str | None = None, **changes: Any) -> TrainConfig:
    """Return the training recipe of a preset; None is the default run on Python's documentation."""
    recipe: dict[str, Any] = _TRAINING.get("default" if name is None else name, {})
    model = _SHAKESPEARE if name is None else _lookup(name)
    return _changed(TrainConfig(model=model, **recipe), changes)


def fine_tuning(model: ModelConfig, init_from: str) -> TrainConfig:
    """Return the recipe that goes on with the published `model` of `init_from`."""
    return TrainConfig(
        model=model, init_from=init_from, tokenizer="pretrained", context=min(model.max_len, 512),
        batch_size=8, steps=500, learning_rate=5e-5, min_learning_rate=5e-6, warmup_steps=50,
    )  # fmt: skip
