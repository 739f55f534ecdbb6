"""Bits of a row in different calls, and what `ModelConfig(invariant=True)` costs.

    python -m benchmarks.same_bits --out benchmarks/results/same_bits.json

The first table counts the logits that differ from those of one whole batch, by default and with
`invariant=True`. The second one compares the time of decoding steps of a GPT-2 with 124 million
random parameters, and of a training step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import specs, timing, train_step
from benchmarks.timing import of_jax
from transformer_jax import build, init_cache, init_params, preset
from transformer_jax.config import ModelConfig

QUESTION = "Does a row have the same bits in every call, and what does this cost?"
Forward = Callable[..., Any]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="only the first table")
    options = parser.parse_args(argv)
    timing.prepare()
    before = timing.environment()
    print(timing.headline(before))
    results: dict[str, Any] = {"differing": differing()}
    print("\n| read as | numbers | differ by default | differ, invariant |\n|---|---|---|---|")
    for name, row in results["differing"].items():
        print(f"| {name} | {row['numbers']} | {row['default']} | {row['invariant']} |")
    if not options.quick:
        results["cost"] = cost()
        print("\n| program | default, ms | invariant / default |\n|---|---|---|")
        for name, row in results["cost"].items():
            print(f"| {name} | {1e3 * row['default_s']:.2f} | {row['ratio']:.2f} |")
    if options.out is not None:
        before["limits"] = timing.limits("float32")
        timing.write(options.out, QUESTION, before, results)


def readings(
    model: Any, apply: Forward, tokens: np.ndarray
) -> Iterator[tuple[str, jax.Array, np.ndarray]]:
    """Give the logits of the same tokens i32[R, T], read in different ways, and the expected ones.

    R must be at least 18 and T at least 17.
    """
    wanted, (count, length) = np.asarray(apply(tokens)[0]), tokens.shape
    for rows in (1, 17):
        yield f"the first {rows} rows", apply(tokens[:rows])[0], wanted[:rows]
        yield f"the last {rows} rows", apply(tokens[-rows:])[0], wanted[-rows:]
    for some in (1, 16):
        yield f"{some} tokens", apply(tokens[:, :some])[0], wanted[:, :some]
        yield f"{some} tokens of a row", apply(tokens[:1, :some])[0], wanted[:1, :some]
    padding = np.zeros((count, 7), np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    positions = np.concatenate([padding - 1, positions], 1)
    left = apply(np.concatenate([padding, tokens], 1), positions=positions)[0]
    yield "padding on the left", left[:, 7:], wanted
    right = apply(np.concatenate([tokens, padding], 1))[0]
    yield "padding on the right", right[:, :length], wanted
    sizes = {"chunks": [7, 7, length - 14], "prefill and steps": [16, *[1] * (length - 16)]}
    for name, chunks in sizes.items():
        for rows, capacity in ((1, length), (18, 2 * length)):
            cache, found, at = init_cache(model.config, rows, capacity), [], 0
            for size in chunks:
                logits, cache = apply(tokens[:rows, at : at + size], cache=cache)
                found, at = [*found, logits], at + size
            yield f"{name}, {rows} rows", jnp.concatenate(found, 1), wanted[:rows]


def differing() -> dict[str, dict[str, int]]:
    """Count the logits that differ in each reading."""
    found: dict[str, dict[str, int]] = {}
    tokens = np.random.default_rng(0).integers(0, 256, (33, 40)).astype(np.int32)
    for invariant in (False, True):
        config = preset("tiny", vocab_size=256, d_model=96, num_heads=4, invariant=invariant)
        model, params = build(config), init_params(config, jax.random.key(0))
        apply = jax.jit(
            lambda *x, model=model, params=params, **more: model.apply(
                {"params": params}, *x, **more
            )
        )
        for name, logits, wanted in readings(model, apply, tokens):
            row = found.setdefault(name, {"numbers": wanted.size})
            row["invariant" if invariant else "default"] = int((np.asarray(logits) != wanted).sum())
    return found


def cost() -> dict[str, dict[str, float]]:
    """Return the median time of each program by default, and the ratio with `invariant=True`."""
    found = {}
    config = preset("gpt2", max_len=256)
    params = init_params(config, jax.random.key(0))
    for rows in (1, 8, 64):
        contenders = [decoding(replace(config, invariant=x), params, rows) for x in (False, True)]
        found[f"decoding step, batch {rows}, 128 cached tokens"] = compared(contenders)
    case = specs.TRAIN[0]
    steps = []
    for invariant in (False, True):
        step = train_step.ours(replace(case, model=replace(case.model, invariant=invariant)))
        steps.append(timing.Contender(f"{invariant}", step))
    found[f"training step, {case.name}"] = compared(steps)
    return found


def decoding(config: ModelConfig, params: Any, rows: int) -> timing.Contender:
    """Return one decoding step after 128 tokens."""
    model = build(config)
    read = jax.jit(
        lambda params, tokens, cache: model.apply({"params": params}, tokens, cache=cache)
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, 129)).astype(np.int32)
    _, cache = read(params, tokens[:, :128], init_cache(config, rows, 256))
    last = jnp.asarray(tokens[:, 128:])
    return of_jax(f"{config.invariant}", lambda: read(params, last, cache)[0])


def compared(contenders: list[timing.Contender]) -> dict[str, float]:
    """Return the median time of the first contender, and that of the second relative to it."""
    taken = timing.interleave(contenders, rounds=15, seconds=90)
    first, second = (taken[c.name] for c in contenders)
    return {"default_s": first.median, "ratio": timing.speedup(first, second)}


if __name__ == "__main__":
    main()
