"""Input layers that let an encoder read vectors, images and audio frames.

    Vectors  h_t = W x_t + b
    Patches  h_p = W patch_p + b, patches in row-major order after a learned class token
    Frames   h = c_L(... c_1(x)), c_i(x)_t = gelu(sum_k W_ik x_(s t + k - P) + b_i), P = (K - 1) / 2

Sources: Dosovitskiy et al. 2021 (patches), Synnaeve et al. 2020 and Radford et al. 2023 (frames).
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from transformer_jax.checks import check_positions
from transformer_jax.config import Frames, Inputs, ModelConfig, Patches
from transformer_jax.models.functional import activate
from transformer_jax.models.layers import Linear, parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.sharding import by_compiler, split


def check_inputs(inputs: Inputs, x: jax.Array) -> None:
    """Raise ValueError unless `x` is a floating-point array of the shape that `inputs` requires."""
    letters = "B, H, W, C" if isinstance(inputs, Patches) else "B, T, D"
    length = x.shape[1] if getattr(x, "ndim", 0) > 1 else 1
    row = inputs.row_shape(length)
    rule = f"must be floats [{letters}] of rows {list(row)}"
    if not hasattr(x, "ndim"):
        raise ValueError(f"inputs are of type {type(x).__name__}: {rule}")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[1:] != row or not length:
        raise ValueError(f"inputs are {x.dtype}{list(x.shape)}: {rule}")


def frame_positions(
    inputs: Frames,
    positions: jax.Array,  # i32[B, T]
) -> jax.Array:  # i32[B, T']
    """Return the positions of the tokens that the convolutions compute from padded frames.

    A row with n valid frames yields ceil(n / stride^layers) tokens at positions 0, 1, ...,
    regardless of where the frames are in the row.

    Args:
        inputs: config of the convolutions.
        positions: i32[B, T], the positions of the frames; negative means padding.

    Returns:
        i32[B, T'], with -1 for padding.
    """
    step = inputs.stride**inputs.layers
    counts = -(-(positions >= 0).sum(axis=1) // step)
    index = jnp.arange(inputs.num_tokens(positions.shape[1]), dtype=jnp.int32)[None]
    return jnp.where(index < counts[:, None], index, -1)


def input_positions(
    inputs: Inputs | None, positions: jax.Array | None
) -> jax.Array | None:  # i32[B, T] -> i32[B, T']
    """Convert the positions of an encoder's input to the positions of its tokens."""
    if isinstance(inputs, Frames) and positions is not None:
        return frame_positions(inputs, positions)
    return positions


def example_inputs(inputs: Inputs, batch: int, length: int) -> jax.Array:
    """Return an array of zeros with the shape of a batch of inputs."""
    return jnp.zeros((batch, *inputs.row_shape(length)), jnp.float32)


class InputLayer(Module):
    """Projection of the config's `inputs` to vectors, to which positions are added later."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D_in] or [B, H, W, C]
        positions: jax.Array | None = None,  # i32[B, T]; with patches, including the class token
    ) -> jax.Array:  # [B, T', D]
        """Return one vector per token. Values in padding do not affect other tokens."""
        inputs, cfg = self.config.inputs, self.config
        assert inputs is not None
        if positions is not None:
            length = inputs.num_tokens() if isinstance(inputs, Patches) else x.shape[1]
            positions = check_positions((x.shape[0], length), positions)
        if isinstance(inputs, Patches):
            # split images into square patches of size P, in row-major order: [B, Y X, P, P, C]
            pattern, P = "B (Y P) (X Q) C -> B (Y X) P Q C", inputs.size
            x = by_compiler(lambda x: rearrange(x, pattern, P=P, Q=P), [x], split(x, slice(1)))
            if positions is not None:
                x = _without_padding(x, positions[:, int(inputs.class_token) :])
            x = self._linear(x, "projection", contract=3)
            if inputs.class_token:
                normal = nn.initializers.normal(cfg.init_std)
                first = parameter(self, "class_token", normal, (cfg.d_model,)).astype(x.dtype)

                def put_first(first: jax.Array, x: jax.Array) -> jax.Array:  # [B, 1 + T, D]
                    rows = jnp.broadcast_to(first, (x.shape[0], 1, len(first)))
                    return jnp.concatenate([rows, x], axis=1)

                x = by_compiler(put_first, [first, x], split(x))
        elif isinstance(inputs, Frames):
            counts = None
            if positions is not None:
                x, counts = frames_to_front(x, positions), (positions >= 0).sum(axis=1)
            for i in range(inputs.layers):
                if counts is not None:
                    # a convolution with a bias maps zero padding to nonzero values, which must not
                    # reach the next convolution
                    index = jnp.arange(x.shape[1])[None]
                    x = _without_padding(x, jnp.where(index < counts[:, None], index, -1))
                    counts = -(-counts // inputs.stride)
                windows = strided_windows(x, inputs.kernel, inputs.stride)
                x = activate(self._linear(windows, f"conv_{i}", contract=2), "gelu")
        else:
            x = self._linear(_without_padding(x, positions), "projection")
        refuse_surplus(self)
        return x

    def _linear(self, x: jax.Array, name: str, contract: int = 1) -> jax.Array:
        """Project the last `contract` axes to the width of the model."""
        cfg = self.config
        std = math.prod(x.shape[x.ndim - contract :]) ** -0.5
        return Linear(cfg, (cfg.d_model,), contract=contract, std=std, name=name)(x)


def _without_padding(x: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Set padding to 0, so that NaN in the padding does not affect the gradient of a matrix."""
    if positions is None:
        return x
    padding = (positions < 0).reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.where(padding, jnp.zeros_like(x), x)


def frames_to_front(
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # i32[B, T]; negative means padding
) -> jax.Array:  # [B, T, D]
    """Move the valid frames of each row to the front, in their original order.

    As a result, strided convolutions process them as if there were no padding on either side.
    """

    def move(x: jax.Array, positions: jax.Array) -> jax.Array:
        # stable sorting keeps the order of the frames
        order = jnp.argsort(positions < 0, axis=1, stable=True)
        return jnp.take_along_axis(x, order[:, :, None], axis=1)

    return by_compiler(move, [x, positions], split(x))


def strided_windows(x: jax.Array, kernel: int, stride: int) -> jax.Array:
    """Return windows of `kernel` frames, centered on every `stride`-th frame.

    The shape changes from [B, T, D] to [B, ceil(T / stride), kernel, D]. Rows are padded with zeros
    at both ends.
    """
    reach, last = kernel // 2, stride * (-(-x.shape[1] // stride) - 1)
    x = jnp.pad(x, ((0, 0), (reach, reach), (0, 0)))
    return jnp.stack([x[:, k : k + last + 1 : stride] for k in range(kernel)], axis=2)
