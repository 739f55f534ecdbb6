"""Configure what an encoder reads in the place of tokens: one value, with the fields of its kind.

A value is checked by itself when it is made, and against its model by `check_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer_jax.config.fields import Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class
from transformer_jax.config.positions import Learned

if TYPE_CHECKING:
    from transformer_jax.config.model import ModelConfig


class _Inputs:
    """Say what every kind of inputs has in common."""

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError where these inputs and the fields of `model` contradict."""
        if model.kind == "decoder":
            fail("inputs", self, "needs kind 'encoder' or 'encoder-decoder'")
        unread(model, "a source of tokens: needs inputs None", "source_vocab_size")
        if model.kind == "encoder":
            fields = (
                "type_vocab_size", "masked_token_head", "tie_embeddings", "logit_scale",
                "embedding_scale", "logit_bias", "logit_softcap", "embedding_dim",
            )  # fmt: skip
            unread(model, "an encoder of inputs has no tokens: needs inputs None", *fields)


@config_class
class Vectors(_Inputs):
    """Read one vector for each token, as features of another model: x W + b."""

    width: Size = 80
    """Numbers in a vector."""

    def __post_init__(self) -> None:
        check_types(self)

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of one row of so many vectors."""
        return length, self.width

    def num_tokens(self, length: int) -> int:
        """Return how many tokens the encoder makes of so many vectors: as many."""
        return length


@config_class
class Patches(_Inputs):
    """Read an image as a row of square patches (Dosovitskiy et al. 2021, 3.1)."""

    size: Size = 16
    """Height and width of a patch, in pixels."""
    height: Size = 224
    """Height of an image, in pixels."""
    width: Size = 224
    """Width of an image, in pixels."""
    channels: Size = 3
    """Numbers in a pixel."""
    class_token: bool = True
    """A learned token comes first, whose state the classification head reads."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("height", "width"):
            if getattr(self, name) % self.size:
                fail(name, getattr(self, name), f"must be a multiple of size {self.size}")

    def row_shape(self, length: int | None = None) -> tuple[int, ...]:
        """Return the shape of one image, whatever the length."""
        return self.height, self.width, self.channels

    def num_tokens(self, length: int | None = None) -> int:
        """Return how many tokens the encoder makes of an image: its patches, and the class's."""
        return (self.height // self.size) * (self.width // self.size) + self.class_token

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        count = self.num_tokens()
        if isinstance(model.positions, Learned) and model.max_len < count:
            fail("max_len", model.max_len, f"must be at least the {count} tokens of an image")


@config_class
class Frames(_Inputs):
    """Read frames of sound through strided convolutions (Synnaeve et al. 2020).

    Each layer is gelu(conv(x)) with (kernel - 1) / 2 zeros on either side; of T frames it makes
    ceil(T / stride).
    """

    width: Size = 80
    """Numbers in a frame, as channels of a mel spectrogram."""
    kernel: Size = 5
    """Frames that a convolution sees, its own in the middle."""
    stride: Size = 2
    """Frames from one output of a convolution to the next."""
    layers: Size = 2
    """Convolutions one after the other."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.kernel % 2 == 0:
            fail("kernel", self.kernel, "must be odd, with its own frame in the middle")
        if self.stride > self.kernel:
            fail("stride", self.stride, f"must not exceed kernel {self.kernel}, or frames are lost")

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of one row of so many frames."""
        return length, self.width

    def num_tokens(self, length: int) -> int:
        """Return how many tokens the encoder makes of so many frames: ceil(T / stride^layers)."""
        return -(-length // self.stride**self.layers)


Inputs = Vectors | Patches | Frames
"""Kinds of input that an encoder reads in the place of tokens."""
