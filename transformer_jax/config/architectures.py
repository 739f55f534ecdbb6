"""Name the kinds of model that `train.py --model` builds, and their usual sizes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from transformer_jax.config.fields import FieldValue, kind_name
from transformer_jax.config.model import ModelConfig
from transformer_jax.lectures.convolution_config import ConvolutionConfig
from transformer_jax.lectures.ngram_config import NgramConfig
from transformer_jax.lectures.recurrent_config import RecurrentConfig
from transformer_jax.lectures.window_config import WindowConfig

AnyModelConfig: TypeAlias = (
    ModelConfig | RecurrentConfig | ConvolutionConfig | WindowConfig | NgramConfig
)
"""The config of any model that can be trained."""

Shape = Literal["decoder", "encoder", "encoder-decoder"]

ARCHITECTURES = "transformer", "lstm", "gru", "rnn", "convolution", "window", "ngram"
"""Names that `--model` takes."""


def architecture_names(config: FieldValue) -> str:
    """Return what a config is called where a user names its kind: transformer, or lstm.

    Of a class of recurrent models, all that it may be; of no model, its own kind.
    """
    kind = config if isinstance(config, type) else type(config)
    if kind is ModelConfig:
        return "transformer"
    if kind is not RecurrentConfig:
        return "None" if kind is type(None) else kind_name(kind)
    return "lstm or gru or rnn" if config is kind else config.cell


def model_shape(model: AnyModelConfig) -> Shape:
    """Return what a model reads and writes, whatever it is built of.

    A decoder writes the next token of what it reads; an encoder reads a text from both ends; an
    encoder-decoder reads one text and writes another.
    """
    if isinstance(model, ModelConfig):
        return model.kind
    if isinstance(model, RecurrentConfig) and model.source_vocab_size is not None:
        return "encoder-decoder"
    if isinstance(model, RecurrentConfig) and model.bidirectional:
        return "encoder"
    return "decoder"


def default_model(architecture: str, shape: Shape) -> AnyModelConfig | None:
    """Return a small model of an architecture and a shape; None where there is no such model."""
    if architecture == "transformer":
        layers = 2 if shape == "encoder-decoder" else 4
        return ModelConfig(
            kind=shape, vocab_size=65, d_model=128, num_layers=layers, num_heads=4, max_len=64,
            use_bias=False,
        )  # fmt: skip
    cell: Literal["lstm", "gru", "rnn"]
    for cell in ("lstm", "gru", "rnn"):
        if architecture != cell:
            continue
        if shape == "encoder-decoder":
            return RecurrentConfig(
                cell=cell, source_vocab_size=256, bidirectional=True, attention="additive",
                d_embed=128, d_hidden=128,
            )  # fmt: skip
        both = shape == "encoder"
        return RecurrentConfig(cell=cell, bidirectional=both, d_hidden=256, num_layers=2)
    if shape != "decoder":
        return None
    others = {"convolution": ConvolutionConfig, "window": WindowConfig, "ngram": NgramConfig}
    return others[architecture]()
