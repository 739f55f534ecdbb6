"""Time and memory of the loss and its gradients with all logits at once and with chunks.

    python -m benchmarks.chunked_loss --out benchmarks/results/chunked_loss.json

The inputs are hidden states [B, T, D] and an output matrix [V, D] with the sizes of GPT-2 124M. The
plain loss computes all logits at once. The other losses compute the logits of a limited number of
tokens per row at a time. The memory is the temporary memory that the compiler allocates.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import (
    FASTER,
    ONE_CORE,
    Contender,
    environment,
    headline,
    interleave,
    limits,
    prepare,
    speedup,
    table,
    write,
)
from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

V, D = 50_257, 768
SHAPES = ((8, 256), (1, 1024))


def losses(B: int, T: int) -> dict[str, Any]:
    """Return the compiled gradients for each way to compute the loss, keyed by name."""

    def plain(x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)
        return cross_entropy(logits, labels)[0]

    def chunked(size: int) -> Any:
        return lambda x, table, labels: chunked_cross_entropy(x, table, labels, chunk_size=size)[0]

    ways = {"all at once": plain}
    ways |= {f"{B} x {n} = {B * n} tokens": chunked(n) for n in (T // 2, T // 4, T // 8, T // 16)}
    shapes = (
        jax.ShapeDtypeStruct((B, T, D), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )
    return {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        for name, loss in ways.items()
    }


def call(program: Any, *arguments: jax.Array) -> None:
    jax.block_until_ready(program(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small shape, three rounds")
    parser.add_argument("--seconds", type=float, default=120.0, help="about the longest of a shape")
    parser.add_argument("--one-core", action="store_true", help=ONE_CORE)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    clock, before, results = prepare(one_core=arguments.one_core), environment(), {}
    print(headline(before))
    before["limits"] = limits("float32", clock)
    for B, T in ((1, 64),) if arguments.quick else SHAPES:
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)
        weights = jnp.asarray(0.02 * rng.standard_normal((V, D)), jnp.float32)
        labels = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
        programs = losses(B, T)
        contenders = [
            Contender(name, partial(call, run, x, weights, labels))
            for name, run in programs.items()
        ]
        times = interleave(contenders, rounds=10, seconds=arguments.seconds, clock=clock)
        rows, first = [], times["all at once"]
        for name, timing in times.items():
            memory = programs[name].memory_analysis().temp_size_in_bytes
            ratio = speedup(timing, first)
            results[f"{B} x {T}: {name}"] = timing.summary() | {
                "bytes": memory, "speedup": ratio,
            }  # fmt: skip
            rows.append(
                (name, f"{timing.median * 1e3:.0f} ms", f"{ratio:.2f}", f"{memory / 2**20:.0f} MB")
            )
        print(f"\nB {B}, T {T}, V {V:,}, D {D}")
        print(
            table(("logits", "loss and gradients", f"{FASTER} as all at once", "memory"), rows),
            flush=True,
        )
    if arguments.out:
        write(arguments.out, (__doc__ or "").splitlines()[0], before, results)


if __name__ == "__main__":
    main()
