"""Random attention calls: the fused kernels in their interpreters against float64.

    python -m tests.kernels.fuzz_fused tpu --calls 150 --seed 0
    python -m tests.kernels.fuzz_fused hopper --calls 150 --seed 0

`fuzz_native` draws the calls and measures the errors. Tiles are small, so that a call has several.
The interpreter of Mosaic GPU (jax 0.12 or later) detects races and stops at the first one.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("PJRT_NPROC", "8")  # an XLA thread for each warpgroup

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
    """Return the kernels of Hopper, in an interpreter that detects races."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    where = Target("hopper", plgpu.InterpretGPUParams(detect_races=True))
    return Kernels("pallas", where, widths=(32, 64, 96), dtypes=("bfloat16", "float16"), **TAKEN)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", choices=["tpu", "hopper"])
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    start = time.perf_counter()
    kernels = TPU if arguments.kernels == "tpu" else hopper()
    options, worst, failed = fuzz(arguments.calls, arguments.seed, of_a_program=2, kernels=kernels)
    refused = sum(n for name, n in options.items() if name.startswith("refused"))
    print(
        f"{arguments.calls - refused} calls of seed {arguments.seed} by {arguments.kernels}, "
        f"jax {jax.__version__}, in {time.perf_counter() - start:.0f} s: {len(failed)} wrong, "
        f"largest error {worst:.2f} of the allowed; {refused} refused"
    )
    print("calls with each option:", ", ".join(f"{k} {v}" for k, v in sorted(options.items())))
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
