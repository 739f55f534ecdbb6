"""Script of tests/kernels/test_gradient.py: fused attention on a mesh of 2 x 4 devices.

Prints JSON: for each case the largest relative error against one device, and the collectives.
"""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.attention_suite import draw
from tests.support.plain_kernels import Packing, Plain
from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.masks import Causal, Dense, Segments
from transformer_jax.kernels import using

MOVES = ("all-gather", "all-to-all", "collective-permute")
CASES = {
    "a bias of all rows": dict(heads=8, kv_heads=8, bias=(1, 8, 1, 37)),
    "two parts of a key head": dict(heads=8, kv_heads=2),
    "three key heads for four devices": dict(heads=12, kv_heads=3),
    "a matrix of rows and heads": dict(heads=8, kv_heads=8, matrix=(4, 8, 33, 37)),
    "a matrix of all": dict(heads=8, kv_heads=2, matrix=(33, 37)),
    "single pass": dict(heads=8, kv_heads=2, implementation="pallas_unordered"),
    "packed queries": dict(heads=16, kv_heads=2, queries=7, bias=(1, 16, 7, 37), packs=True),
}


def run(case: str, manual: bool = False) -> dict:
    heads, kv_heads = CASES[case]["heads"], CASES[case]["kv_heads"]
    queries, packs = CASES[case].get("queries", 33), CASES[case].get("packs", False)
    rng = np.random.default_rng(0)
    arrays = draw(3, batch=4, queries=queries, keys=37, heads=heads, kv_heads=kv_heads)
    if "bias" in CASES[case]:
        arrays["bias"] = jnp.asarray(rng.normal(size=CASES[case]["bias"]), jnp.float32)
    if "matrix" in CASES[case]:
        diagonal = np.eye(33, 37, dtype=bool)  # otherwise the lse of a row would be -inf
        arrays["matrix"] = jnp.asarray((rng.random(CASES[case]["matrix"]) < 0.7) | diagonal)
    arrays["sinks"] = jnp.linspace(-1, 1, heads)
    arrays["ids"] = jnp.asarray(np.sort(rng.integers(0, 3, (4, 37)), 1), jnp.int32)
    fixed = "ids", "matrix", "out_cotangent", "lse_cotangent"
    floating = [name for name in arrays if name not in fixed]

    def gradients(arrays):
        def loss(inputs):
            mask = Causal() & Segments(arrays["ids"])
            mask = mask & Dense(arrays["matrix"]) if "matrix" in arrays else mask
            with using(Packing() if packs else Plain()):
                out, lse = dot_product_attention(
                    inputs["query"], inputs["key"], inputs["value"],
                    mask=mask, bias=inputs.get("bias"),
                    sinks=inputs["sinks"], return_lse=True,
                    implementation=CASES[case].get("implementation", "pallas"),
                    dropout_rate=0 if packs else 0.2, dropout_key=jax.random.key(1),
                )  # fmt: skip
            return (out * arrays["out_cotangent"]).sum() + (lse * arrays["lse_cotangent"]).sum()

        return jax.value_and_grad(loss)({name: arrays[name] for name in floating})

    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axes)
    whole = P("data", None, "model")
    keys = whole if kv_heads % 4 == 0 else P("data")
    specs = dict(query=whole, key=keys, value=keys, sinks=P("model"), bias=P(), ids=P("data"))
    matrix = P("data", "model") if len(CASES[case].get("matrix", ())) == 4 else P()
    specs |= dict(out_cotangent=whole, lse_cotangent=whole, matrix=matrix)
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    compiled = jax.jit(gradients).lower(placed).compile()
    text = compiled.as_text()
    expected, actual = jax.jit(gradients)(arrays), compiled(placed)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return {
        "error": max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs),
        "moves": [name for name in MOVES if re.search(rf" {name}(-start)?\(", text)],
        "query": list(actual[1]["query"].sharding.spec)[:3],
    }


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps({case: run(case) for case in sys.argv[1:] or CASES}))
