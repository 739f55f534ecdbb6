"""How fast is attention of one query over a long cache compared with torch and memory bandwidth?

    python -m benchmarks.attention_decode --out benchmarks/results/attention_native_decode.json

A call is a chain of layers. Each output is the next query, and each layer has its own cache, so
that caches are read from memory as in a model. Our function reads caches [B, S, K, H] with
positions, which are completely or half full. The function scaled_dot_product_attention of torch
receives the filled part of caches [B, K, S, H], its fastest layout, without a mask. The limit is
the time to read a large array, measured alternately with the contenders.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.peers import Absent, torch_and_device
from benchmarks.timing import Contender
from transformer_jax import Causal, dot_product_attention

QUESTION = "attention of one query over a cache: seconds per layer"
OURS = ("native", "blockwise", "xla")
HEADS = ((1, 12, 12, 64), (8, 12, 12, 64), (1, 32, 8, 128), (8, 32, 8, 128))  # B, N, K, H
LENGTHS = (128, 512, 2048, 8192, 32768)
LAYER_BYTES = 2**28  # for all layers together, unless one layer needs more
MOST_BYTES = 2**31


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--queries", type=int, default=1, help="T")
    add("--repeats", type=int, default=10, help="rounds")
    add("--seconds", type=float, default=5.0, help="about the longest one case may take")
    add("--without", nargs="+", default=[], choices=(*OURS, "torch"), metavar="NAME")
    add("--out", type=Path, default=None, help="JSON to write; cases in it stay")
    options = parser.parse_args(argv)
    clock = timing.prepare()
    before = timing.environment() | {"limits": timing.limits(options.dtype, clock)}
    print(timing.headline(before))
    found: list[dict[str, Any]] = []
    for (B, N, K, H), S, filled in itertools.product(HEADS, LENGTHS, (1.0, 0.5)):
        name = f"b{B}n{N}k{K}-h{H}-s{S}-{'whole' if filled == 1 else 'half'}"
        size = 2 * B * S * K * H * jnp.dtype(options.dtype).itemsize
        if options.only not in name or size > MOST_BYTES:
            continue
        found.append({"case": name} | measure(B, N, K, H, S, filled, options, clock))
        print(_line(found[-1]), flush=True)
        if options.out is not None:
            results = {"dtype": options.dtype, "queries": options.queries, "cases": found}
            timing.write(options.out, QUESTION, before, results)


def measure(
    B: int, N: int, K: int, H: int, S: int, filled: float, options: argparse.Namespace, clock: Any
) -> dict[str, Any]:
    """Return the seconds per layer, the ratios to "native", and the fractions of the read rate."""
    T = options.queries
    width = jnp.dtype(options.dtype).itemsize
    size = 2 * B * S * K * H * width
    layers = max(1, min(12, LAYER_BYTES // size))
    length = int(S * filled)
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    query = jax.random.normal(keys[-1], (B, T, N, H), options.dtype)
    caches = [
        tuple(jax.random.normal(keys[2 * i + j], (B, S, K, H), options.dtype) for j in (0, 1))
        for i in range(layers)
    ]
    q_positions = jnp.broadcast_to(jnp.arange(length - T, length), (B, T))
    k_positions = jnp.where(jnp.arange(S) < length, jnp.arange(S), -1)
    k_positions = jnp.broadcast_to(k_positions, (B, S))

    def attend(name: str, query: Any, caches: Any, q_positions: Any, k_positions: Any) -> Any:
        for key, value in caches:
            query = dot_product_attention(
                query, key, value, mask=Causal(), q_positions=q_positions,
                k_positions=k_positions, implementation=name,
            )  # fmt: skip
        return query

    calls: dict[str, Callable[[], Any]] = {}
    for name in OURS:
        if name not in options.without:
            jitted = jax.jit(attend, static_argnums=0)
            arguments = name, query, caches, q_positions, k_positions
            calls[name] = partial(lambda f, *x: jax.block_until_ready(f(*x)), jitted, *arguments)
    if "torch" not in options.without:
        calls["torch"] = _torch(query, caches, length, causal=T > 1)
    outputs = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    large = jax.random.normal(keys[0], (2**26,))
    read = jax.jit(lambda x: x.reshape(2, 64, -1).sum(axis=-1))
    calls["read"] = lambda: jax.block_until_ready(read(large))
    contenders = [Contender(name, call) for name, call in calls.items()]
    taken = timing.interleave(
        contenders, rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    rate = large.nbytes / min(taken.pop("read").samples)
    layer = {name: t.median / layers for name, t in taken.items()}
    first = outputs["native"]
    return {
        "layers": layers,
        "bytes": size * filled,
        "seconds": layer,
        "speedup_of_native": {
            name: timing.speedup(taken["native"], t)
            for name, t in taken.items()
            if name != "native"
        },
        "read_bytes_per_s": rate,
        "share_of_reading": {name: size * filled / t / rate for name, t in layer.items()},
        "difference": {
            name: float(np.abs(x - first).max() / np.abs(first).max())
            for name, x in outputs.items()
        },
    }


def _torch(query: jax.Array, caches: Any, length: int, *, causal: bool) -> Callable[[], Any]:
    try:
        torch, _ = torch_and_device()
    except Absent as reason:
        raise SystemExit(str(reason)) from None
    dtype = getattr(torch, query.dtype.name)

    def tensor(x: jax.Array) -> Any:
        return torch.from_numpy(np.array(x, np.float32)).to(dtype).transpose(1, 2).contiguous()

    given = tensor(query)
    kept = [tuple(tensor(x)[:, :, :length] for x in pair) for pair in caches]
    grouped = query.shape[2] != caches[0][0].shape[2]
    T = query.shape[1]
    mask = torch.arange(length) <= torch.arange(length - T, length)[:, None] if causal else None

    def call() -> Any:
        x = given
        with torch.no_grad():
            for key, value in kept:
                x = torch.nn.functional.scaled_dot_product_attention(
                    x, key, value, attn_mask=mask, enable_gqa=grouped
                )
        return x.transpose(1, 2).float()

    return call


def _line(found: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {1e6 * t:.0f} us" for name, t in found["seconds"].items())
    ratios = ", ".join(f"{name} {r:.2f}" for name, r in found["speedup_of_native"].items())
    share = found["share_of_reading"]["native"]
    return f"{found['case']}: {times}; native against {ratios}; {share:.2f} of reading"


if __name__ == "__main__":
    main()
