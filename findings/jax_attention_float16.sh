#!/usr/bin/env bash
# On a CPU, jax.nn.dot_product_attention does not support float16.
#
# jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, Python 3.11.7, x86-64 Linux; seen on 2026-11-29.
# Expected: it supports float16 as it supports bfloat16 and float32; an einsum of float16 arrays runs.
# Seen: it raises an error during compilation, both forward and backward.
#
# Output seen:
#   float16 einsum: runs
#   float16 forward: The precision 'F16_F16_F32' is not supported by dot_general on CPU
#   float16 gradient: The precision 'F16_F16_F32' is not supported by dot_general on CPU
#   bfloat16 gradient: runs
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu env/bin/python - <<'PY'
import jax
import jax.numpy as jnp


def attend(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def outcome(function, dtype):
    try:
        jax.block_until_ready(jax.jit(function)(jnp.ones((1, 16, 2, 8), dtype)))
    except Exception as error:
        return str(error).splitlines()[0]
    return "runs"


gradient = jax.grad(lambda x: attend(x).sum())
seen = [
    ("float16 einsum", outcome(lambda x: jnp.einsum("BTNH,BSNH->BNTS", x, x), jnp.float16)),
    ("float16 forward", outcome(attend, jnp.float16)),
    ("float16 gradient", outcome(gradient, jnp.float16)),
    ("bfloat16 gradient", outcome(gradient, jnp.bfloat16)),
]
for name, result in seen:
    print(f"{name}: {result}")
einsum, forward, backward, other = (result for _, result in seen)
assert (einsum, other) == ("runs", "runs"), seen
assert "F16_F16_F32" in forward and "F16_F16_F32" in backward, seen
PY
