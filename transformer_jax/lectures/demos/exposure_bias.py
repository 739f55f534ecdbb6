"""Compare a model's errors on true prefixes with its errors on its own output.

    python -m transformer_jax demo exposure_bias

In training, the model reads the true previous tokens (teacher forcing). In generation, it reads its
own output (free running), which contains errors that did not occur in training (Bengio et al. 2015;
Ranzato et al. 2016). Here, each prompt has exactly one correct continuation, so errors can be
counted:

    x_t = (x_{t-1} + x_{t-2}) mod 11

The model is a decoder with a window of two tokens. It is deliberately undertrained, so that it
continues some pairs incorrectly. If a teacher-forced token is wrong with probability e, and if
every token after an error is wrong, then free-running token t is wrong with probability 1 - (1 -
e)^t. At later positions, the measured error rates are lower because sequences repeat after 5 or 10
tokens: a sequence stays correct once the model has predicted all of its pairs.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from transformer_jax import (
    Decoder,
    ModelConfig,
    build,
    cross_entropy,
    generate,
    init_cache,
    init_params,
    make_step,
)
from transformer_jax.config import Rope
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_multiple,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)

OPTIONS: Options = {"tokens": (12, 6), "width": (32, 32), "seed": (0, 0)}

MODULUS, PROMPT = 11, 2


def continue_texts(first: np.ndarray, length: int) -> np.ndarray:  # i32[B, 2] -> i32[B, length]
    """Return the correct continuations, up to a total of `length` tokens."""
    tokens = [first[:, 0], first[:, 1]]
    while len(tokens) < length:
        tokens.append((tokens[-1] + tokens[-2]) % MODULUS)
    return np.stack(tokens, axis=1).astype(np.int32)


def train_model(config: ModelConfig, steps: int, length: int, seed: int) -> Any:
    """Return parameters trained with teacher forcing on random sequences."""
    draw, rows = np.random.default_rng(seed), 16
    texts = continue_texts(draw.integers(0, MODULUS, (steps * rows, 2)), length + 1)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits, _ = build(config).apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])[0]

    params = init_params(config, jax.random.key(seed))
    return train(loss, params, rearrange(texts, "(I B) T -> I B T", B=rows), learning_rate=0.02)[0]


def measure_errors(
    config: ModelConfig, params: Any, length: int
) -> tuple[np.ndarray, np.ndarray]:  # f64[T], f64[T]
    """Return the error rates at each position with teacher forcing and with free running."""
    # all 121 prompts are used, so the error rates are exact
    first = np.array(list(itertools.product(range(MODULUS), repeat=2)))
    texts = continue_texts(first, PROMPT + length)
    prompt, rest = texts[:, :PROMPT], texts[:, PROMPT:]
    model = Decoder(config)
    logits, _ = model.apply({"params": params}, jnp.asarray(texts[:, :-1]))
    # output t predicts token t + 1, so the outputs start at the last token of the prompt
    forced = np.asarray(logits.argmax(axis=-1))[:, PROMPT - 1 :]
    # the cache needs no room for keys outside the window
    state = init_cache(config, len(first), capacity=PROMPT)
    free = generate(make_step(model), params, prompt, state, num_tokens=length)
    return (forced != rest).mean(axis=0), (np.asarray(free.tokens) != rest).mean(axis=0)


def demonstrate(arguments: Namespace) -> dict[str, np.ndarray]:
    """Run the demonstration, and return the error rates of both modes at each position."""
    check_multiple("width", arguments.width, 4, "for 2 heads of even width")
    steps, length = 60, arguments.tokens
    # the window contains only the two tokens that determine the next one
    config = ModelConfig(
        vocab_size=MODULUS, d_model=arguments.width, num_layers=1, num_heads=2, positions=Rope(),
        window=PROMPT, init_std=0.2,
    )  # fmt: skip
    params = train_model(config, steps, PROMPT + length, arguments.seed)
    forced, free = (np.asarray(x, np.float64) for x in measure_errors(config, params, length))
    # a product instead of a power, because e can differ between positions
    expected = 1 - np.cumprod(1 - forced)
    positions = [t for t in (1, 2, 4, 6, 8, 10, 12) if t <= length]
    rows = [
        [name, *(f"{x[t - 1]:.0%}" for t in positions)]
        for name, x in (
            ("teacher-forced", forced),
            ("free-running", free),
            ("1 - (1 - e)^t", expected),
        )
    ]
    print_table(["wrong tokens, position t", *map(str, positions)], rows)
    figure, (axes,) = new_figure()
    at = np.arange(1, length + 1)
    axes.plot(at, 100 * forced, "o-", ms=4, color=COLOURS[0], label="teacher-forced")
    axes.plot(at, 100 * free, "o-", ms=4, color=COLOURS[1], label="free-running")
    axes.plot(at, 100 * expected, "--", color="#999999", label="1 - product of (1 - e)")
    axes.set_ylim(0, None)
    label(axes, "Errors over position", "tokens after the prompt", "wrong tokens (%)")
    save_picture(figure, arguments, "exposure_bias")
    return {"teacher-forced": forced, "free-running": free}
