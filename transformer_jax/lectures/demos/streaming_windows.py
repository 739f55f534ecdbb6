"""Compare a streaming causal window with overlapping windows that are recomputed.

    python -m transformer_jax demo streaming_windows

Frames arrive in chunks of C frames. L causal layers with a window of W see R = L (W - 1) + 1
frames.

    overlapping   run the stack on the last h frames and the new chunk, keep the chunk's outputs:
                  (h + C) / C frames per new frame; correct only if h >= R - 1
    streaming     keep the last W keys and values of each layer: 1 frame per new frame, always
                  correct

The number of query-key products per head is computed from the masks of the layers.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import Causal, ModelConfig, StreamingEncoder, Window, init_cache
from transformer_jax.config import Rope
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_multiple,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.models.streaming import receptive_field

OPTIONS: Options = {
    "tokens": (96, 24),
    "window": (9, 5),
    "layers": (3, 2),
    "width": (16, 16),
    "seed": (0, 0),
}

CHUNK, FRAME = 8, 5


def only_window(config: ModelConfig) -> int:
    """Return the window size that all layers share."""
    (window,) = config.windows
    assert window is not None
    return window


def products(window: int, queries: np.ndarray, keys: np.ndarray) -> int:
    """Count the query-key pairs that a causal window allows."""
    mask = Causal() & Window(window)
    return int(jax.jit(lambda q, k: mask.materialize(q, k).sum())(queries, keys))


def run_overlapping(
    apply: Any, frames: jax.Array, history: int, config: ModelConfig
) -> tuple[jax.Array, int, int]:
    """Return outputs [B, T, D] and the number of frames and products for overlapping windows."""
    outputs, run, pairs, window = [], 0, 0, only_window(config)
    for start in range(0, frames.shape[1], CHUNK):
        first = max(0, start - history)
        features, _ = apply(frames[:, first : start + CHUNK], None)
        outputs.append(features[:, start - first :])
        positions = np.arange(first, start + CHUNK)
        run += len(positions)
        pairs += config.num_layers * products(window, positions, positions)
    return jnp.concatenate(outputs, axis=1), run, pairs


def run_streaming(apply: Any, frames: jax.Array, config: ModelConfig) -> tuple[jax.Array, int, int]:
    """Return outputs [B, T, D] and the number of frames and products for a stream."""
    outputs, run, pairs, window = [], 0, 0, only_window(config)
    state = init_cache(config, batch=len(frames), capacity=window)
    for start in range(0, frames.shape[1], CHUNK):
        features, state = apply(frames[:, start : start + CHUNK], state)
        outputs.append(features)
        positions = np.arange(start, start + CHUNK)
        keys = np.arange(max(0, start - window), start + CHUNK)
        run += len(positions)
        pairs += config.num_layers * products(window, positions, keys)
    return jnp.concatenate(outputs, axis=1), run, pairs


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration, and return (largest error, frames, products) for each method."""
    check_multiple("width", arguments.width, 4, "for 2 heads of even width")
    layers, window, length = arguments.layers, arguments.window, arguments.tokens
    check_multiple("tokens", length, CHUNK, "the number of frames per chunk")
    config = ModelConfig(
        d_model=arguments.width,
        num_layers=layers,
        num_heads=2,
        positions=Rope(),
        window=window,
        init_std=0.3,
    )
    model = StreamingEncoder(config, frame_dim=FRAME)
    frames = jax.random.normal(
        jax.random.key(arguments.seed), (1, length, FRAME)
    )  # [B, T, frame_dim]
    # the shapes of the parameters do not depend on the number of frames
    params = model.init(jax.random.key(1), frames[:, :1])
    whole, _ = model.apply(params, frames)
    apply = jax.jit(lambda frames, state: model.apply(params, frames, cache=state))
    reach = receptive_field(config) - 1
    shares = () if arguments.quick else (reach // 4, reach // 2)
    # `reach` is the smallest exact overlap, and `reach - 1` is one frame too few
    histories = sorted({0, *shares, max(0, reach - 1), reach})
    results = {f"overlap {h}": run_overlapping(apply, frames, h, config) for h in histories}
    results["streaming"] = run_streaming(apply, frames, config)
    found = {
        name: (float(jnp.abs(outputs - whole).max()), run, pairs)
        for name, (outputs, run, pairs) in results.items()
    }
    rows = [
        [name, f"{error:.0e}", f"{run / length:.2f}", f"{pairs / length:.1f}"]
        for name, (error, run, pairs) in found.items()
    ]
    print(f"{layers} layers of window {window}: R = {reach + 1} frames; chunks of {CHUNK}")
    print_table(["method", "largest error", "frames per frame", "products per frame"], rows)
    figure, (left, right) = new_figure(2)
    # a logarithmic axis cannot show 0
    errors = [max(found[f"overlap {h}"][0], 1e-8) for h in histories]
    left.plot(histories, errors, "o-", color=COLOURS[1], label="overlapping")
    left.axhline(found["streaming"][0], color=COLOURS[0], label="streaming")
    left.axvline(reach, color="#bbbbbb", linestyle="--", label="R - 1")
    left.set_yscale("log")
    costs = [found[f"overlap {h}"][1] / length for h in histories]
    right.plot(histories, costs, "o-", color=COLOURS[1], label="overlapping")
    right.axhline(1.0, color=COLOURS[0], label="streaming")
    right.set_ylim(0, None)
    label(left, "Error against the whole sequence", "overlap h (frames)", "largest error")
    label(right, "Frames computed a new frame", "overlap h (frames)", "frames")
    save_picture(figure, arguments, "streaming_windows")
    return {"reach": reach, "length": length, **found}
