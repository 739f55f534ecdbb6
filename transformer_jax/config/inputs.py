"""Encoder inputs other than tokens: vectors, image patches and frames of sound.

A value is validated when it is created. `check_model` validates it for its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_jax.config.fields import Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class
from transformer_jax.config.positions import Learned

if TYPE_CHECKING:
    from transformer_jax.config.model import ModelConfig


class _Inputs:
    """Base class of all input configs."""

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError if these inputs conflict with the fields of `model`."""
        if model.kind == "decoder":
            fail("inputs", self, "needs kind 'encoder' or 'encoder-decoder'")
        unread(
            model, "needs inputs None, because only tokens have a vocabulary", "source_vocab_size"
        )
        if model.kind == "encoder":
            fields = (
                "type_vocab_size", "masked_token_head", "tie_embeddings", "logit_scale",
                "embedding_scale", "logit_bias", "logit_softcap", "embedding_dim",
            )  # fmt: skip
            unread(
                model, "needs inputs None, because an encoder with inputs has no tokens", *fields
            )


@config_class
class Vectors(_Inputs):
    """Input of a vector x per token, such as features of another model, embedded as x W + b."""

    width: Size = 80
    """Number of features in each vector."""

    def __post_init__(self) -> None:
        check_types(self)

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row that has `length` vectors."""
        return length, self.width

    def num_tokens(self, length: int) -> int:
        """Return the number of tokens for `length` vectors, which is also `length`."""
        return length


@config_class
class Patches(_Inputs):
    """Input of an image as a row of square patches (Dosovitskiy et al. 2021, section 3.1)."""

    size: Size = 16
    """Height and width of a patch in pixels."""
    height: Size = 224
    """Height of an image in pixels."""
    width: Size = 224
    """Width of an image in pixels."""
    channels: Size = 3
    """Number of channels per pixel."""
    class_token: bool = True
    """Prepend a learned class token, whose state the classification head reads."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("height", "width"):
            if getattr(self, name) % self.size:
                fail(name, getattr(self, name), f"must be a multiple of size, {self.size}")

    def row_shape(self, length: int | None = None) -> tuple[int, ...]:
        """Return the shape of one image. The argument `length` is ignored."""
        return self.height, self.width, self.channels

    def num_tokens(self, length: int | None = None) -> int:
        """Return the number of tokens per image, which are its patches and the class token."""
        return (self.height // self.size) * (self.width // self.size) + self.class_token

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        count = self.num_tokens()
        if isinstance(model.positions, Learned) and model.max_len < count:
            fail("max_len", model.max_len, f"must be at least the {count} tokens of an image")


@config_class
class Frames(_Inputs):
    """Input of frames of sound, read through strided convolutions (Synnaeve et al. 2020).

    Each layer computes gelu(conv(x)) with (kernel - 1) / 2 zeros on each side, and maps T frames to
    ceil(T / stride) frames.
    """

    width: Size = 80
    """Number of features in each frame, such as the channels of a mel spectrogram."""
    kernel: Size = 5
    """Number of frames that a convolution reads, centered on the current frame."""
    stride: Size = 2
    """Number of frames between two outputs of a convolution."""
    layers: Size = 2
    """Number of convolutions in sequence."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.kernel % 2 == 0:
            fail("kernel", self.kernel, "must be odd, to be centered on a frame")
        if self.stride > self.kernel:
            rule = f"must not exceed kernel, {self.kernel}, or frames would be skipped"
            fail("stride", self.stride, rule)

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row that has `length` frames."""
        return length, self.width

    def num_tokens(self, length: int) -> int:
        """Return the number of tokens for `length` frames: ceil(T / stride^layers)."""
        return -(-length // self.stride**self.layers)


Inputs = Vectors | Patches | Frames
"""Kinds of encoder input other than tokens."""
