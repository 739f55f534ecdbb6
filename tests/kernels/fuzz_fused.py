"""Draw calls of attention, and hold the fused kernels in their interpreters against float64.

    python -m tests.kernels.fuzz_fused tpu --calls 150 --seed 0
    python -m tests.kernels.fuzz_fused hopper --calls 150 --seed 0

The calls are drawn, and errors measured, as `fuzz_native` does. Tiles are small, so that a call
has several. The interpreter of Mosaic GPU, from jax 0.12 on, looks for races and stops at one.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("PJRT_NPROC", "8")  # a thread of XLA's for each group of warps

import jax

from tests.kernels.fuzz_native import Kernels, fuzz
from transformer_jax.kernels import Target
from transformer_jax.kernels.contract import Blocks

TILES = {
    "forward": Blocks(16, 24),
    "dq": Blocks(16, 24),
    "dkdv": Blocks(16, 24),
    "bias": Blocks(16, 24),
    "single_pass_rows": Blocks(16, 24),
}
TAKEN = dict(scales=(None, None, 0.3), biases=("none", "none", "array", "alibi", "alibi learned"))
TPU = Kernels(
    "pallas",
    Target("tpu", True, blocks=tuple(TILES.items())),
    widths=(8, 16, 24, 40, 64),
    dtypes=("float32", "float32", "bfloat16"),
    **TAKEN,
)


def hopper():
    """Return the kernels of Hopper, in an interpreter that looks for races."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    where = Target("hopper", plgpu.InterpretGPUParams(detect_races=True))
    return Kernels("pallas", where, widths=(32, 64, 96), dtypes=("bfloat16", "float16"), **TAKEN)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", choices=["tpu", "hopper"])
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    start = time.perf_counter()
    kernels = TPU if given.kernels == "tpu" else hopper()
    options, worst, failed = fuzz(given.calls, given.seed, of_a_program=2, kernels=kernels)
    refused = sum(n for name, n in options.items() if name.startswith("refused"))
    print(
        f"{given.calls - refused} calls of seed {given.seed} by {given.kernels}, "
        f"jax {jax.__version__}, in {time.perf_counter() - start:.0f} s: {len(failed)} wrong, "
        f"largest error {worst:.2f} of the allowed; {refused} refused"
    )
    print("calls with each option:", ", ".join(f"{k} {v}" for k, v in sorted(options.items())))
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
