"""Time of an activation patching sweep over layers and positions, compared with Python loops.

    python -m benchmarks.patch_sweep
    python -m benchmarks.patch_sweep --layers 2 --width 64 --positions 8      # a small sweep

The model is GPT-2 124M with random weights and two random prompts. At each layer and position, the
residual stream of the corrupted pass is replaced by that of the clean pass. `patch` runs one
compiled program, which reports its progress. The alternatives are one jitted pass that is called in
a Python loop, and passes that are compiled one by one. Only a few of the latter are timed, and the
total is extrapolated.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from transformer_jax.interpret import patch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--compiled", type=int, default=3, help="passes that are compiled alone")
    options = parser.parse_args()
    L, T = options.layers, options.positions
    heads = max(options.width // 64, 1)
    config = dataclasses.replace(
        tj.preset("gpt2"), num_layers=L, d_model=options.width, num_heads=heads
    )
    model: Any = tj.build(config)
    params = jax.jit(tj.init_params, static_argnums=0)(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    clean, corrupted = (rng.integers(0, config.vocab_size, (1, T), np.int32) for _ in range(2))
    print(
        f"{L} layers x {T} positions, {sum(x.size for x in jax.tree.leaves(params)):,} parameters"
    )

    done = 0

    def said(logit: np.ndarray) -> None:  # called for each entry
        nonlocal done
        done += 1
        print(f"\r{done} of {L * T}", end="", flush=True)

    def metric(logits: jax.Array) -> jax.Array:
        return logits[0, -1, 3] - logits[0, -1, 19]

    def told(logits: jax.Array) -> jax.Array:
        jax.debug.callback(said, logits[0, -1, 0])
        return metric(logits)

    @jax.jit
    def sweep(params: Any, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        places, size = "block_*/residual", options.batch_size
        return patch(model, params, clean, corrupted, places, told, batch_size=size)

    def timed(work: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        found = jax.block_until_ready(work())
        return time.perf_counter() - start, found

    compiling, program = timed(lambda: sweep.lower(params, clean, corrupted).compile())
    seconds, table = timed(lambda: program(params, clean, corrupted))
    jax.effects_barrier()
    print(f"\npatch, one program: compiled in {compiling:.1f} s, run in {seconds:.1f} s")

    names = [f"block_{i}/residual" for i in range(L)]
    values = model.apply({"params": params}, clean, capture=names)[2]

    @jax.jit
    def one(params: Any, values: Any, layer: jax.Array, at: jax.Array) -> jax.Array:
        def put(number: int, name: str) -> Any:
            here = jnp.arange(T)[None, :, None] == at
            return lambda value: jnp.where((layer == number) & here, values[name], value)

        edit = {name: put(i, name) for i, name in enumerate(names)}
        return metric(model.edited(edit).apply({"params": params}, corrupted)[0])

    compiling, _ = timed(lambda: one(params, values, 0, 0))
    seconds, found = timed(
        lambda: np.array([[one(params, values, i, t) for t in range(T)] for i in range(L)])
    )
    print(
        f"one jitted pass, called {L * T} times: compiled in {compiling:.1f} s, in {seconds:.1f} s"
    )
    print(f"tables differ by {np.abs(found - table).max():.1e} at most, of {np.ptp(table):.2f}")

    spent = []
    for n in range(options.compiled):
        name, at = names[n * L // options.compiled], n * T // options.compiled

        def alone(params: Any, value: jax.Array, name: str = name, at: int = at) -> jax.Array:
            edit = {name: lambda x: x.at[:, at].set(value[:, at])}
            return metric(model.edited(edit).apply({"params": params}, corrupted)[0])

        spent.append(timed(lambda alone=alone, name=name: jax.jit(alone)(params, values[name]))[0])
    each = float(np.median(spent))
    print(
        f"a compilation each: {each:.1f} s, median of {len(spent)}: {each * L * T:,.0f} s for all"
    )


if __name__ == "__main__":
    main()
