#!/usr/bin/env bash
# XLA's CPU backend gives exp(x - max(x)) other last bits if other rows are in the array.
#
# jax 0.10.2, Python 3.11.7, Linux x86-64 with AVX2, CPU; seen on 2026-11-30.
# Expected: each row of exp(x - max(x)) is computed alone, so the same row has the same bits in any batch.
# Seen: for f32[8, 18, 64] the compiled program contains one fusion of the kind __ynn_fusion (the YNNPACK library); for
# the first row of it, f32[1, 18, 64], exp is a loop that XLA generates. The two compute exp with different
# roundings, so a part of the numbers of the same row differs in the last bit. exp(x) alone, without the maximum,
# is equal. jax.nn.softmax and log_softmax contain the same operations.
#
# Output seen:
#   exp(x): 0 of 1152 numbers differ
#   exp(x - max(x)): 26 of 1152 numbers differ
#   YNNPACK in the program of 8 rows: True, of 1 row: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
cd "$work"
cat > rows.py <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

x = (3 * np.random.default_rng(0).normal(size=(8, 18, 64))).astype(np.float32)
alone = jax.jit(jnp.exp)
shifted = jax.jit(lambda x: jnp.exp(x - x.max(-1, keepdims=True)))
counts = {}
for name, f in {"exp(x)": alone, "exp(x - max(x))": shifted}.items():
    together, single = np.asarray(f(x))[0], np.asarray(f(x[:1]))[0]
    counts[name] = int((together != single).sum())
    np.testing.assert_allclose(together, single, rtol=1e-6)
    print(f"{name}: {counts[name]} of {single.size} numbers differ")
uses = ["ynn_fusion" in shifted.lower(each).compile().as_text() for each in (x, x[:1])]
print(f"YNNPACK in the program of 8 rows: {uses[0]}, of 1 row: {uses[1]}")
assert counts["exp(x)"] == 0 and counts["exp(x - max(x))"] > 0 and uses == [True, False]
PY
JAX_PLATFORMS=cpu "$work/env/bin/python" rows.py
