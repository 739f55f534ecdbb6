"""Train small decoders that differ in heads, key heads, norm, or tied tables on the same text.

    python -m transformer_jax demo variants --data input.txt --steps 300

The decoders and the byte-pair tokenizer are trained on the first nine tenths of the data. Each
decoder is trained with the same number of steps, seeds, and rows. For each of the following
variants, the table shows the loss on the last tenth, the number of parameters, and the size in
bytes of a cache for 1024 tokens:

    8 key heads (MHA), 2 (GQA, Ainslie et al. 2023), 1 (MQA, Shazeer 2019); 1 head of the same width
    no norm; separate or shared embedding and output matrices (Press & Wolf 2017)

Without --data, the text comes from the small grammar in `embeddings`, which is useful only for
tests.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import ModelConfig, build, cross_entropy, init_params, num_params
from transformer_jax.config import Rope
from transformer_jax.config.fields import fail
from transformer_jax.lectures.demos.embeddings import sentences
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
from transformer_jax.models.factory import cache_bytes
from transformer_jax.tokenizers import BPETokenizer

OPTIONS: Options = {
    "data": (None, None),
    "tokens": (64, 16),
    "width": (64, 64),
    "steps": (20, 4),
    "seed": (0, 0),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "8 heads (MHA)": {},
    "2 key heads (GQA)": {"num_kv_heads": 2},
    "1 key head (MQA)": {"num_kv_heads": 1},
    "1 head": {"num_heads": 1},
    "no norm": {"norm": None},
    "tables apart": {"tie_embeddings": False},
}


def rows_of(ids: np.ndarray, length: int) -> np.ndarray:  # i32[M, length + 1]
    """Cut text into consecutive rows. The last token of each row is the first token of the next."""
    count = (len(ids) - 1) // length
    return np.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])


def held_out_losses(
    config: ModelConfig, texts: np.ndarray, held_out: np.ndarray, steps: int, seeds: Sequence[int]
) -> np.ndarray:  # f64[seeds], in nats per token
    """Train on random rows with each seed, and return the losses on the held-out rows."""
    model = build(config)

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, rows[:, :-1])
        return cross_entropy(logits, rows[:, 1:])[0]

    learn = jax.jit(lambda params, batches: train(loss, params, batches, learning_rate=4e-3)[0])
    measure, found = jax.jit(loss), []
    for seed in seeds:
        # all variants are trained on the same rows
        batches = texts[np.random.default_rng(seed).integers(0, len(texts), (steps, 12))]
        params = learn(init_params(config, jax.random.key(seed)), batches)
        # drop the remainder, because equal parts share a program, but keep the only part
        parts = np.split(held_out, range(32, len(held_out), 32))
        losses = [float(measure(params, rows)) for rows in parts if len(rows) == 32] or [
            float(measure(params, held_out))
        ]
        found.append(np.mean(losses))
    return np.array(found)


def demonstrate(arguments: Namespace) -> dict[str, dict[str, Any]]:
    """Run the demonstration, and return the losses, parameters, and bytes of each variant."""
    check_multiple("width", arguments.width, 16, "for 8 heads of even width")
    steps, count, size = arguments.steps, *((2, 280) if arguments.quick else (3, 1024))
    length, seeds = arguments.tokens, range(arguments.seed, arguments.seed + count)
    if arguments.data is None:
        text = "\n".join(" ".join(words) for words in sentences())
    else:
        text = Path(arguments.data).read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    # held-out text must not affect the vocabulary
    tokenizer = BPETokenizer.train(text[:cut], size)
    parts = [np.asarray(tokenizer.encode(part), np.int32) for part in (text[:cut], text[cut:])]
    if length >= (least := min(map(len, parts))):
        fail(
            "tokens",
            length,
            f"must be below {least}, the number of tokens in the shorter part of the text",
        )
    texts, held_out = (rows_of(part, length) for part in parts)
    found: dict[str, dict[str, Any]] = {}
    for name, changes in VARIANTS.items():
        base = dict(
            vocab_size=tokenizer.vocab_size, d_model=arguments.width, num_layers=2, num_heads=8,
            max_len=1024, positions=Rope(), init_std=0.06,
        )  # fmt: skip
        config = ModelConfig(**base | changes)
        found[name] = {
            "losses": held_out_losses(config, texts, held_out[:256], steps, seeds),
            "parameters": num_params(config),
            "bytes": cache_bytes(config, 1, 1024),
        }
        one = found[name]
        print(name, one["losses"].round(3), flush=True)
    print(f"{tokenizer.vocab_size} tokens, {steps} steps of 12 rows of {length}, {count} seeds")
    print_table(["variant", "parameters", "cache KiB", "nats", "min", "max", "perplexity"], [
        [name, f"{one['parameters']:,}", one["bytes"] // 1024,
         *(f"{x:.3f}" for x in (one["losses"].mean(), one["losses"].min(), one["losses"].max())),
         f"{math.exp(one['losses'].mean()):.1f}"]
        for name, one in found.items()
    ])  # fmt: skip
    figure, (axes,) = new_figure(height=3.2)
    for i, (one, colour) in enumerate(zip(found.values(), COLOURS, strict=True)):
        axes.plot(np.exp(one["losses"]), [i] * count, "o", color=colour)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    label(axes, "One part changed; a point is a seed", "held-out perplexity per token", "", False)
    save_picture(figure, arguments, "variants")
    return found
