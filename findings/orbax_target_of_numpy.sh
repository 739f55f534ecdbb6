#!/usr/bin/env bash
# Orbax ignores a target's shape if the checkpoint holds a NumPy array, and casts floats to integers.
#
# orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6, Python 3.11.7; seen on 2026-11-29.
# Expected: restoring [3] float32 into a target of shape [5] or of dtype int32 is an error, whatever kind of
# array was saved.
# Seen: a saved jax.Array refuses another shape. A saved numpy.ndarray comes back in its stored shape,
# without a message, also for a jax.ShapeDtypeStruct. Either is cast to the target's dtype: 1.7 becomes 1.
#
# Output seen:
#   saved numpy, target int32[5]: int32[3] [1, 2, 3]
#   saved jax, target int32[3]: int32[3] [1, 2, 3]
#   saved jax, target float32[5]: ValueError
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu env/bin/python - <<'PY'
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

values = np.array([1.7, 2.2, 3.9], np.float32)
here = pathlib.Path.cwd()
seen = []
with ocp.StandardCheckpointer() as checkpointer:
    for name, saved in ("numpy", values), ("jax", jnp.asarray(values)):
        checkpointer.save(here / name, {"a": saved})
        checkpointer.wait_until_finished()
    for name, size, dtype in ("numpy", 5, "int32"), ("jax", 3, "int32"), ("jax", 5, "float32"):
        target = {"a": jax.ShapeDtypeStruct((size,), dtype)}
        try:
            array = checkpointer.restore(here / name, target)["a"]
            result = f"{array.dtype}[{array.size}] {array.tolist()}"
        except ValueError:
            result = "ValueError"
        print(f"saved {name}, target {dtype}[{size}]: {result}")
        seen.append(result)
assert seen == ["int32[3] [1, 2, 3]", "int32[3] [1, 2, 3]", "ValueError"], seen
PY
