"""Script of tests/attention/test_score_mod.py: a function of a score in the TPU kernels on a mesh.

Prints JSON: the largest relative error of gradients against one device, and the collectives.
"""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.attention_suite import draw
from transformer_jax.attention.api import dot_product_attention
from transformer_jax.attention.masks import Causal
from transformer_jax.kernels import Target, using
from transformer_jax.kernels.contract import Blocks

KINDS = "forward", "single_pass_rows", "bias", "score"
TPU = Target("tpu", True, blocks=tuple((kind, Blocks(16, 24)) for kind in KINDS))


def main() -> None:
    arrays = draw(3, batch=2, queries=13, keys=29, heads=4, kv_heads=2)
    arrays = {name: arrays[name] for name in ("query", "key", "value")}
    arrays["table"] = jnp.sin(jnp.arange(2 * 4 * 3.0)).reshape(2, 4, 3)

    def gradients(arrays):
        def loss(inputs):
            def score_mod(score, row, head, q, k):
                at = inputs["table"][row, head]
                return score * at[0] + at[1] * jnp.sin(q - k) + at[k % 3]

            with using(TPU):
                out = dot_product_attention(
                    inputs["query"], inputs["key"], inputs["value"], mask=Causal(),
                    score_mod=score_mod, implementation="pallas",
                )  # fmt: skip
            return (out**2).sum()

        return jax.grad(loss)(arrays)

    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
    whole = P("data", None, "model")
    specs = dict(query=whole, key=whole, value=whole, table=P("data", "model"))
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    compiled = jax.jit(gradients).lower(placed).compile()
    expected, actual = jax.jit(gradients)(arrays), compiled(placed)
    text = compiled.as_text()
    print(json.dumps({
        "errors": {n: float(jnp.abs(actual[n] - x).max() / jnp.abs(x).max())
                   for n, x in expected.items()},
        "moves": [name for name in ("all-gather", "all-to-all", "collective-permute")
                  if re.search(rf" {name}(-start)?\(", text)],
        "query": list(actual["query"].sharding.spec)[:3],
    }))  # fmt: skip


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    main()
