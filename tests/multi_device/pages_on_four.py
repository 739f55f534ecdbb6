"""Script of test_block_table.py with four devices: attention to pages on a mesh.

Prints JSON: for each case the largest error against "xla" on one device, and the number of arrays
that the optimised program gathers.
"""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_jax import Causal, dot_product_attention
from transformer_jax.kernels import Target, using

LENGTHS = np.array([381, 101, 201, 6])
N, K, H, PAGES, PAGE = 4, 2, 32, 4, 128  # as many pages as rows


def attend(implementation, query, key, value, table, at):
    settings = dict(mask=Causal(), q_positions=at, implementation=implementation)
    return dot_product_attention(query, key, value, block_table=table, **settings)


def main():
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 1, N, H)), jnp.float32)
    key, value = jnp.asarray(rng.standard_normal((2, PAGES, PAGE, K, H)), jnp.float32)
    table = jnp.asarray(rng.integers(0, PAGES, (4, 3)), jnp.int32)
    arrays = query, key, value, table, jnp.asarray(LENGTHS[:, None] - 1)
    expected, results = attend("xla", *arrays), {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        for pages in (None, "data"):
            pool, rows = P(pages, None, "model"), P("data")
            specs = P("data", None, "model"), pool, pool, rows, rows
            for name in ("xla", "blockwise", "pallas"):
                with jax.set_mesh(mesh), using(Target("tpu", interpret=True)):
                    placed = [
                        jax.device_put(x, NamedSharding(mesh, spec))
                        for x, spec in zip(arrays, specs, strict=True)
                    ]
                    call = jax.jit(lambda *x, name=name: attend(name, *x))
                    out = np.asarray(call(*placed))
                    text = call.lower(*placed).compile().as_text()
                results[f"{name}, {kind.name}, pages split over {pages}"] = dict(
                    error=float(np.abs(out - expected).max() / np.abs(expected).max()),
                    gathered=len(re.findall(r" all-gather\(", text)),
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
