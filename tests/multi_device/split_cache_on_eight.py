"""Script of test_context.py with eight devices: generation from a cache whose slots are split.

Prints JSON. For each case, whether the tokens are those of one device, the largest difference of
the log-probabilities, and the largest relative error of the cache. For "traffic", the arrays that
the compiled program of a prompt and its answer sends.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multi_device.meshes_on_four import largest_error
from transformer_jax import (
    ModelConfig,
    Sample,
    build,
    generate,
    init_cache,
    init_params,
    make_step,
    stream,
)
from transformer_jax.decoding import generation
from transformer_jax.decoding.arguments import check_arguments

SMALL = ModelConfig(
    vocab_size=29, max_len=96, num_layers=2, num_heads=4, d_model=16, positions="rope",
    num_kv_heads=2, glu=True, norm="rmsnorm", attention_sinks=True,
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": dict(positions="learned"),
    "alibi": dict(positions="alibi", implementation="native"),
    "t5": dict(positions="t5", implementation="xla"),
    "scanned": dict(scan_layers=True, implementation="blockwise"),
    "window": dict(window=11),
    "ring": dict(window=11, capacity=32),
    "pattern": dict(window=(11, None), sink_tokens=2),
    "int8": dict(cache_dtype=jnp.int8),
    "rows": dict(mesh=(("data", "context"), (2, 4)), spec=P("data", "context")),
    "heads": dict(mesh=(("context", "model"), (4, 2)), spec=P(None, "context", "model")),
    "two axes": dict(mesh=(("outer", "inner"), (2, 4)), spec=P(None, ("outer", "inner"))),
    "lengths": dict(lengths=[5, 37]),
    "stop": dict(stop=(3, 7), sampler=Sample(), key=jax.random.key(2)),
    "chunk": dict(chunk=16),
    "capture": dict(capture=("block_1/attention/output",)),
    "stream": dict(stream=True),
    "continued": dict(continued=True),
}
OWN = "mesh", "spec", "capacity", "cache_dtype", "stream", "continued"
ARGUMENTS = "lengths", "stop", "sampler", "key", "chunk", "capture"
PROMPT = np.random.default_rng(0).integers(0, 29, (2, 37), np.int32)


def run(case: str) -> dict[str, Any]:
    options = CASES[case]
    config = replace(SMALL, **{n: x for n, x in options.items() if n not in {*OWN, *ARGUMENTS}})
    model, params = build(config), init_params(config, jax.random.key(0))
    step, named = make_step(model), {n: options[n] for n in ARGUMENTS if n in options}
    names, shape = options.get("mesh", (("context",), (8,)))
    mesh = jax.make_mesh(shape, names)
    spec = options.get("spec", P(None, "context"))

    def results(sharding: NamedSharding | None) -> Any:
        capacity, dtype = options.get("capacity", 64), options.get("cache_dtype")
        cache = init_cache(config, 2, capacity, dtype, sharding=sharding)
        placed = params
        if sharding is not None:
            placed = jax.device_put(params, NamedSharding(mesh, P()))
        if options.get("stream"):
            tokens = list(stream(step, placed, PROMPT, cache, num_tokens=20))
            return np.stack(tokens, 1), np.zeros(1), None, ()
        found = generate(step, placed, PROMPT, cache, num_tokens=20, **named)
        if options.get("continued"):
            last = found.tokens[:, -1:]
            found = generate(step, placed, last, found.state, num_tokens=5)
        # a ring and a full cache have different slots
        layers = () if isinstance(config.window, tuple) else found.state.layers
        return np.asarray(found.tokens), np.asarray(found.log_probs), found, layers

    one, split = results(None), results(NamedSharding(mesh, spec))
    captured = [] if one[2] is None else [one[2].captured, split[2].captured]
    specs = {str(x.sharding.spec[:3]) for x in jax.tree.leaves(split[3]) if x.ndim == 4}
    return dict(
        tokens=bool((one[0] == split[0]).all()),
        log_probs=float(np.abs(one[1] - split[1]).max()),
        cache=largest_error(jax.device_get(split[3]), jax.device_get(one[3])) if one[3] else 0.0,
        captured=largest_error(*captured[::-1]) if "capture" in options else 0.0,
        specs=sorted(specs),
    )


def traffic(length: int) -> Any:
    """Return the number of arrays that are sent, keyed by kind and shape."""
    model, params = build(SMALL), init_params(SMALL, jax.random.key(0))
    mesh = jax.make_mesh((8,), ("context",))
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    cache = init_cache(SMALL, 2, 1024, sharding=NamedSharding(mesh, P(None, "context")))
    prompt = np.zeros((2, length), np.int32)
    step, options, prompts, state = check_arguments(
        make_step(model), placed, prompt, cache, num_tokens=20, lengths=None, sampler=None,
        key=None, processors=(), stop=(), limits=None, chunk=None,
    )  # fmt: skip

    def program(params: Any, prompts: Any, state: Any) -> Any:
        return generation._generate_tokens(options, step, params, prompts, state, 20, False)

    text = jax.jit(program).lower(placed, prompts, state).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return Counter(
        f"{kind} {shape}"
        for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
        for shape in re.findall(r"\w+\[[\d,]*\]", types)
    )


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    names = sys.argv[1:] or list(CASES)
    print(
        json.dumps({n: traffic(int(n[8:])) if n.startswith("traffic") else run(n) for n in names})
    )
