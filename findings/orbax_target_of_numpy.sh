#!/usr/bin/env bash
# Orbax ignores a target's shape if the checkpoint contains a NumPy array, and casts floats to integers.
#
# orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6, Python 3.11.7; seen on 2026-11-29.
# Expected: restoring a float32 array of shape [3] into a target with shape [5] or dtype int32 raises an error,
# regardless of the type of array that was saved.
# Seen: for a saved jax.Array, a different shape is rejected. A saved numpy.ndarray is restored with its stored
# shape, without a message, even if the target is a jax.ShapeDtypeStruct. Both are cast to the dtype of the target:
# 1.7 becomes 1.
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
