"""C++ kernels for CPUs: attention, and norms and matrix products for few rows.

The kernels are called through XLA's FFI. If a compiler is available, `pip install` compiles the
library next to this module. The library contains kernels for several instruction sets, and uses the
widest set that the processor supports. The files in `source/` are:

    vectors     the vector type, exp, tanh, the hash of dropout
    matmul      the micro-kernel, and the layout of its operands
    mask        interpreter of the mask's program, which `kernels/program.py` writes
    attention, backward    the kernels
    decode      the forward pass of few queries over many keys
    products    few rows times weights
    bytes       few rows times int8 weights, in integers
    nibbles     few rows times 4-bit weights
    norms       LayerNorm and RMSNorm of few rows
    handlers    the entry points that XLA calls
    threads     the distribution of items over threads
    memory      buffers that are reused by later calls
    older       compatibility with older versions of libstdc++ and glibc

`kernels/portable.py` contains the same kernels in plain JAX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from transformer_jax.kernels import Target, portable
from transformer_jax.kernels.contract import (
    Backend,
    Blocks,
    Operands,
    Problem,
    Residuals,
    Shaped,
    TileLists,
    learns_slopes,
    out_dtype,
)
from transformer_jax.kernels.dropout import threshold
from transformer_jax.kernels.sharding import vary

HANDLERS = (
    "attention_forward", "attention_backward", "attention_backward_bias", "attention_few_queries",
    "weight_product", "row_norm",
)  # fmt: skip
FEW_ROWS = 16
"""Maximum number of queries per key head, T N / K, for which keys and values are not repacked."""
_EMPTY: list[Any] = [np.zeros((0,) * ndim, np.int32) for ndim in (4, 3, 3)]  # on no device
NO_LISTS = TileLists(*_EMPTY)
INSTRUCTIONS = "avx512", "avx2", "neon", "plain"
"""Values of TRANSFORMER_JAX_NATIVE other than 0 (no kernels) and 1 (the widest instruction set)."""
DTYPES = "float32", "bfloat16", "float16"


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the compiled library with registered handlers, or the reason why it is missing."""
    wanted = os.environ.get("TRANSFORMER_JAX_NATIVE", "1")
    if wanted == "0":
        return "TRANSFORMER_JAX_NATIVE is 0"
    if wanted not in ("1", *INSTRUCTIONS):
        return (
            f"TRANSFORMER_JAX_NATIVE is {wanted!r}: must be 0, 1 or one of "
            f"{', '.join(INSTRUCTIONS)}"
        )
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return (
            "was not compiled when the package was installed: there was no C++ compiler (g++), "
            "or TRANSFORMER_JAX_NATIVE was 0"
        )
    try:
        loaded = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"cannot be loaded: {error}"
    # a library that is older than an edited source would silently return different results
    if not _is_of_these_sources(loaded):
        reason = "was compiled from different sources: install the package again"
        warnings.warn(f"kernels/cpu/{found[0].name} {reason}", stacklevel=2)
        return reason
    loaded.attention_instructions.restype = ctypes.c_char_p
    loaded.attention_use.restype = ctypes.c_bool
    if wanted != "1" and not loaded.attention_use(wanted.encode()):
        return f"TRANSFORMER_JAX_NATIVE is {wanted}: this processor does not support it"
    for name in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(f"transformer_jax_{name}", capsule, platform="cpu")
    return loaded


def _is_of_these_sources(loaded: ctypes.CDLL) -> bool:
    """Whether the library was compiled from the sources next to it, by comparing hashes."""
    folder = Path(__file__).parent / "source"
    sources = sorted(path for kind in ("cpp", "h", "map") for path in folder.glob(f"[!.]*.{kind}"))
    if not sources:
        # an installed package contains only the library
        return True
    if not hasattr(loaded, "attention_sources"):
        return False
    loaded.attention_sources.restype = ctypes.c_char_p
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    same: bool = loaded.attention_sources().decode() == found.hexdigest()[:16]
    return same


def instructions() -> str:
    """Return the instruction set that the kernels use on this processor."""
    loaded = library()
    assert not isinstance(loaded, str)
    found: bytes = loaded.attention_instructions()
    return found.decode()


def refuse(
    target: Target, nondeterministic: bool, query: Shaped, key: Shaped, value: Shaped
) -> str | None:
    """Return the reason why these arrays are not supported, or None."""
    dtypes = [jnp.dtype(x.dtype).name for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        return f"dtypes are {', '.join(dtypes)}: must be equal, and one of {', '.join(DTYPES)}"
    return None


def blocks(kind: str, H: int, Hv: int, itemsize: int, K: int = 1) -> Blocks:
    """Return the tile sizes of a kernel."""
    del H, Hv, itemsize, K
    return Blocks(q=96, k=256) if kind == "forward" else Blocks(q=96, k=128)


def forward(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks
) -> tuple[jax.Array, ...]:
    """Return the output [B, T, N, Hv], and m and log l as f32[B, N, T]."""
    B, T, N, _ = operands.query.shape
    out = (B, T, N, operands.value.shape[3]), out_dtype(problem, operands)
    rows = (B, N, T), jnp.float32
    name = "attention_forward"
    # for few queries, keys are read in place up to the filled length, which is cheaper than lists
    if T * N // operands.key.shape[2] <= FEW_ROWS:
        name, lists = "attention_few_queries", NO_LISTS
    return _call(name, problem, operands, lists, blocks, (), (out, rows, rows))


def backward_single_pass(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> tuple[jax.Array, ...]:
    """Return dq, dk, dv and, with learned slopes, the sums of -ds |q - k|, f32[B, N, S]."""
    shapes = [(x.shape, x.dtype) for x in operands[:3]]
    if learns_slopes(problem, operands):
        B, _, N, _ = operands.query.shape
        shapes.append(((B, N, operands.key.shape[1]), jnp.dtype(jnp.float32)))
    return _call("attention_backward", problem, operands, lists, blocks, saved, shapes)


def backward_bias(
    problem: Problem, operands: Operands, lists: TileLists, blocks: Blocks, saved: Residuals
) -> jax.Array:
    """Return the gradient of an array bias in float32, with the shape of the bias."""
    assert operands.bias is not None
    shapes = [(operands.bias.shape, jnp.float32)]
    name = "attention_backward_bias"
    return _call(name, problem, operands, lists, blocks, saved, shapes)[0]


BACKEND = Backend(  # no decode kernel: `forward` handles few queries and packs heads
    kernels={"forward": forward, "single_pass": backward_single_pass, "bias": backward_bias},
    refuse=refuse,
    blocks=blocks,
    portable=portable.KERNELS,
    wide=True,
)


def _call(
    name: str,
    problem: Problem,
    operands: Operands,
    lists: TileLists,
    blocks: Blocks,
    saved: Residuals | tuple[()],
    shapes: Sequence[tuple[tuple[int, ...], DTypeLike]],
) -> tuple[jax.Array, ...]:
    counts, pairs = (len(operands.q_vectors), len(operands.k_vectors)), operands.pairs is not None
    operations: tuple[list[int], list[int]] = ([], [])
    if problem.visible is not None:
        operations = problem.visible.numbered(*counts, pairs=pairs)
    stacked = []
    for vectors in (operands.q_vectors, operands.k_vectors):  # i32[n, B or 1, T or S]
        rows = max(x.shape[0] for x in vectors)
        stacked.append(jnp.stack([jnp.broadcast_to(x, (rows, x.shape[1])) for x in vectors]))
    rate = problem.dropout_rate
    # XLA's FFI has no optional arguments, so an empty array means None
    optional = (
        (operands.pairs, 4, jnp.int8), (operands.bias, 4, jnp.float32),
        (operands.slopes, 2, jnp.float32), (operands.sinks, 2, jnp.float32),
        (operands.dropout, 3, jnp.uint32),
    )  # fmt: skip
    call = jax.ffi.ffi_call(
        f"transformer_jax_{name}",
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        vmap_method="sequential",
    )
    found = call(
        *operands[:3],
        *stacked,
        *(jnp.zeros((0,) * ndim, dtype) if x is None else x for x, ndim, dtype in optional),
        *lists[:3],
        *saved[:4],
        scale=np.float32(problem.scale),
        softcap=np.float32(problem.softcap or 0),
        threshold=np.int64(threshold(rate)),
        kept=np.float32(0 if rate == 1 else 1 / (1 - rate)),
        fixed=problem.invariant,
        block_q=np.int64(blocks.q),
        block_k=np.int64(blocks.k),
        program=np.array(operations[0], np.int32),
        constants=np.array(operations[1], np.int32),
    )
    return vary(tuple(found), operands.query)
