#!/usr/bin/env bash
# A full decoding cache of flax overwrites its newest key without an error.
#
# flax 0.12.8, jax 0.10.2, Python 3.11.7, CPU; seen on 2026-11-30.
# Expected: the step after the last slot raises an error, or drops the oldest key, as a ring buffer does.
# Seen: linen.MultiHeadDotProductAttention(decode=True) and nnx.MultiHeadAttention(decode=True) write the fourth
# token to the third of three slots, so the third token is lost. The index continues to increase, and the output is
# finite, but it differs from the output of a layer with a cache of four slots.
#
# Output seen (linen):
#   slot 0 unchanged: True, slot 1 unchanged: True, slot 2 unchanged: False, index 4
#   outputs finite: True, equal to those of a larger cache: False
# Output seen (nnx): the same lines.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
cd "$work"
cat > cache.py <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

tokens = jax.random.normal(jax.random.key(1), (4, 1, 1, 8))


def by_linen(slots):
    layer = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, decode=True)
    variables = layer.init(jax.random.key(0), jnp.ones((1, slots, 8)))
    params, cache = variables["params"], jax.tree.map(jnp.zeros_like, variables["cache"])
    keys = []
    for token in tokens:
        out, new = layer.apply({"params": params, "cache": cache}, token, mutable=["cache"])
        cache = new["cache"]
        keys.append(np.asarray(cache["cached_key"][0]))
    return out, keys, int(cache["cache_index"])


def by_nnx(slots):
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, slots, 8))
    keys = []
    for token in tokens:
        out = layer(token)
        keys.append(np.asarray(layer.cached_key[0]))
    return out, keys, int(layer.cache_index[...])


for run in (by_linen, by_nnx):
    out, keys, index = run(3)
    same = [bool((keys[2][slot] == keys[3][slot]).all()) for slot in range(3)]
    print(", ".join(f"slot {slot} unchanged: {one}" for slot, one in enumerate(same)) + f", index {index}")
    larger, _, _ = run(4)
    finite, equal = bool(jnp.isfinite(out).all()), bool(jnp.allclose(out, larger, atol=1e-5))
    print(f"outputs finite: {finite}, equal to those of a larger cache: {equal}")
PY
export JAX_PLATFORMS=cpu
found=$(env/bin/python cache.py)
echo "$found"
lines="slot 0 unchanged: True, slot 1 unchanged: True, slot 2 unchanged: False, index 4
outputs finite: True, equal to those of a larger cache: False"
[ "$found" = "$lines
$lines" ]
