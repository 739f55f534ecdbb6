#!/usr/bin/env bash
# jax.lax.top_k ranks a NaN by its sign bit, and the result of inf - inf is a NaN with the sign bit set.
#
# jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, Python 3.11.7, x86-64 Linux; seen on 2026-11-29.
# Expected: top_k agrees with jax.numpy.sort and argmax, which rank every NaN above all numbers.
# Seen: a NaN from jnp.nan ranks first. A NaN that results from arithmetic at run time (inf - inf) ranks below
# -inf, so top_k(x, 2) returns two ordinary numbers and hides the NaN.
#
# Output seen:
#   jnp.nan: top_k [nan, 1.0], last of sort nan, argmax 2
#   inf - inf: top_k [1.0, 0.0], last of sort nan, argmax 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu env/bin/python - <<'PY'
import jax
import jax.numpy as jnp

constant = jnp.array([0.0, 1.0, jnp.nan, -jnp.inf])
infinite = jnp.array([0.0, 1.0, jnp.inf, -jnp.inf])
computed = jax.jit(lambda x: x.at[2].set(x[2] - x[2]))(infinite)
seen = []
for name, x in ("jnp.nan", constant), ("inf - inf", computed):
    top, order, best = jax.lax.top_k(x, 2)[0].tolist(), float(jnp.sort(x)[-1]), int(jnp.argmax(x))
    print(f"{name}: top_k {top}, last of sort {order}, argmax {best}")
    seen.append(str((top, order, best)))
assert seen == ["([nan, 1.0], nan, 2)", "([1.0, 0.0], nan, 2)"], seen
PY
