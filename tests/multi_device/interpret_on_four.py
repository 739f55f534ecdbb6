"""Script of test_meshes.py with four devices: the tools of `interpret` on a mesh and on one device.

Prints JSON: the largest difference of each tool, relative to its largest value.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_jax as tj
from transformer_jax import interpret

CONFIG = tj.ModelConfig(
    vocab_size=24, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, max_len=13, init_std=0.3,
    positions="rope",
)  # fmt: skip
HEADS, STREAMS = "block_*/attention/heads", "block_*/residual"


def metric(logits: jax.Array) -> jax.Array:
    return (logits[:, -1, 3] - logits[:, -1, 19]).sum()


def tool(name: str, model: Any, params: Any, clean: Any, corrupted: Any) -> Any:
    prompts, own = (model, params, clean, corrupted), interpret.Translators.identity(model)
    query = "block_1/attention/query"
    found = {
        "logit_lens": lambda: interpret.logit_lens(model, params, clean),
        "lens_divergence": lambda: interpret.lens_divergence(model, params, own, clean),
        "logit_attribution": lambda: interpret.logit_attribution(model, params, clean, 3, 19).heads,
        "patch": lambda: interpret.patch(*prompts, STREAMS, metric),
        "patch by head": lambda: interpret.patch(*prompts, HEADS, metric, each=("head",)),
        "path_patching": lambda: interpret.path_patching(*prompts, HEADS, query, metric),
        "attribution_patching": lambda: interpret.attribution_patching(*prompts, HEADS, metric),
        "integrated_gradients": lambda: interpret.integrated_gradients(
            model, params, clean, 0, metric, steps=3
        ),
        "circuits": lambda: interpret.circuits(model, params, "ov").values,
        "steering_vector": lambda: interpret.steering_vector(*prompts, "block_0/residual"),
    }
    return found[name]()


TOOLS = (
    "logit_lens", "lens_divergence", "logit_attribution", "patch", "patch by head", "path_patching",
    "attribution_patching", "integrated_gradients", "circuits", "steering_vector",
)  # fmt: skip


def main() -> None:
    rng, found = np.random.default_rng(3), {}
    clean, corrupted = (rng.integers(0, 24, (4, 7), dtype=np.int32) for _ in range(2))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    split = dict(query=-2, key=-2, value=-2, up=-1, out=-3, down=-2)

    def place(path: Any, x: jax.Array) -> jax.Array:
        names, axes = [part.key for part in path], [None] * x.ndim
        if names[-1] == "kernel":
            axes[split[names[-2]]] = "model"
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    scanned = "scanned" in sys.argv
    config = replace(CONFIG, scan_layers=scanned)
    model, params = tj.build(config), tj.init_params(config, jax.random.key(3))
    placed = jax.tree_util.tree_map_with_path(place, params)
    rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (clean, corrupted)]
    for name in TOOLS:
        run = partial(tool, name, model)
        one = np.asarray(jax.jit(run)(params, clean, corrupted), np.float64)
        over = np.asarray(jax.jit(run)(placed, *rows), np.float64)
        assert np.abs(one).max() > 0 and np.isfinite(over).all(), name
        found[name] = float(np.abs(one - over).max() / np.abs(one).max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
