"""Flash attention for NVIDIA Hopper GPUs, in Pallas for Mosaic GPU.

Every kernel is persistent and warp-specialized. One warpgroup, the producer, copies tiles into
slots of shared memory (with TMA and barriers). The other `Blocks.q / 64` or `Blocks.k / 64`
warpgroups are consumers. Each consumer computes products (wgmma) for 64 rows of the scores. In the
forward pass, consumers take turns in the use of the tensor cores, so that the softmax of one
overlaps with the products of the others (FlashAttention-3, Shah et al. 2024, section 3.1). If
`Blocks.slack` is positive, a warp rescales its sums only if a maximum has increased by more than
the slack (FlashAttention-4, Zadouri et al. 2026). Scores are in base 2. The backward pass has a dq
kernel and a dk/dv kernel, so that no sum depends on the order in which programs finish.
`backward_single_pass` computes all three gradients without that guarantee.

    programs   assignment of items to programs and roles to warpgroups   products   wgmma
    producer   copies of tiles
    forward, decode, backward, backward_single_pass, bias_gradient    the kernels
"""

from __future__ import annotations

import jax

from transformer_jax.kernels import Target, nvidia
from transformer_jax.kernels.chips import HOPPER_HEAD_DIMS as HEAD_DIMS
from transformer_jax.kernels.chips import HOPPER_UNLIKE_HEAD_DIMS as UNLIKE_HEAD_DIMS
from transformer_jax.kernels.chips import hopper_blocks as blocks
from transformer_jax.kernels.contract import Backend, Shaped
from transformer_jax.kernels.hopper.backward import backward_dkdv, backward_dq
from transformer_jax.kernels.hopper.backward_single_pass import backward_single_pass
from transformer_jax.kernels.hopper.bias_gradient import backward_bias
from transformer_jax.kernels.hopper.decode import decode
from transformer_jax.kernels.hopper.forward import forward
from transformer_jax.kernels.nvidia.memory import HAS_INTERPRETER, HAS_JAX_11, ROWS
from transformer_jax.kernels.nvidia.schedule import prepare


def refuse(
    target: Target, nondeterministic: bool, query: Shaped, key: Shaped, value: Shaped
) -> str | None:
    """Return the reason why these arrays, or their structs, are not supported, or None."""
    H, Hv = query.shape[-1], value.shape[-1]
    if reason := nvidia.refuse(target, "Hopper", query, key, value):
        return reason
    if H not in HEAD_DIMS or Hv not in HEAD_DIMS:
        return (
            f"head dims are {H} (query, key) and {Hv} (value): must be multiples of 16 "
            f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        )
    if H != Hv and H + Hv > UNLIKE_HEAD_DIMS:
        return f"H + Hv is {H} + {Hv}: must be at most {UNLIKE_HEAD_DIMS} if H and Hv differ"
    if nondeterministic and H + Hv > 256:
        return f"hopper: H + Hv is {H} + {Hv}: must be at most 256 in the single-pass backward"
    if nondeterministic and not HAS_JAX_11:
        return (
            "hopper: the single-pass backward needs jax 0.11 or later, but this is "
            f"{jax.__version__}"
        )
    if target.interpret and not HAS_INTERPRETER:
        return f"the Mosaic GPU interpreter needs jax 0.12, but this is {jax.__version__}"
    return None


BACKEND = Backend(
    kernels={
        "forward": forward,
        "decode": decode,
        "dq": backward_dq,
        "dkdv": backward_dkdv,
        "bias": backward_bias,
        "single_pass": backward_single_pass,
    },
    refuse=refuse,
    blocks=blocks,
    prepare=prepare,
    decode_rows=ROWS,
    int8=True,
    page=ROWS,  # pages contain whole copies
    narrow=True,
    packs=True,
)
