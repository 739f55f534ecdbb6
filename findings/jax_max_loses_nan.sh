#!/usr/bin/env bash
# On a CPU, the maximum and the minimum of a long array ignore a NaN.
#
# jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, Python 3.11.7, x86-64 Linux; seen on 2026-11-29.
# Expected: like numpy.max, jax.numpy.max returns NaN if any element is NaN.
# Seen: with 1,000 elements, the maximum is NaN. With 4,096 zeros and one NaN, it is 0.0, regardless of the sign
# and the position of the NaN. If the NaN is the last element, the maximum is -inf, and the minimum is inf. The sum
# and argmax detect the NaN. For the rows of a matrix, fewer elements are sufficient (64 rows of 100).
#
# Output seen:
#   1000 elements, NaN at 3: max nan, min nan, sum nan
#   4096 elements, NaN at 3: max 0.0, min 0.0, sum nan
#   4096 elements, NaN at 4095: max -inf, min inf, sum nan
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu env/bin/python - <<'PY'
import jax.numpy as jnp
import numpy as np

seen = []
for size, place in (1000, 3), (4096, 3), (4096, 4095):
    x = np.zeros(size, np.float32)
    x[place] = np.nan
    assert np.isnan(np.max(x))
    found = [float(f(jnp.asarray(x))) for f in (jnp.max, jnp.min, jnp.sum)]
    print(f"{size} elements, NaN at {place}: max {found[0]}, min {found[1]}, sum {found[2]}")
    seen.append(str(found))
assert seen == ["[nan, nan, nan]", "[0.0, 0.0, nan]", "[-inf, inf, nan]"], seen
PY
