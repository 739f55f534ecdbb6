"""Compare the results and the speed of two versions of the library.

    python benchmarks/versions.py export DIRECTORY         once with each version installed
    python benchmarks/versions.py compare OLD NEW          two such directories

The first command writes portable programs (`jax.export`): attention with each implementation,
forward and gradient; the gradients of a small and a medium language model; and one decoding step.
The second command loads one pair of programs at a time into one process and calls them alternately,
so that other load affects both equally. It prints the median of the old version in milliseconds and
new / old as the ratio of medians, the ratio of minima, and the median of pairs. It also prints the
largest difference between the results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

SHAPES = ((12, 256, 6, 64), (2, 512, 8, 64), (1, 64, 4, 32))  # [B, T, N, H]
MODELS = {
    "small": dict(num_layers=4, d_model=128, num_heads=4, max_len=64),
    "medium": dict(num_layers=2, d_model=384, num_heads=6, max_len=256),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("export", help="write the programs of the installed version")
    writing.add_argument("directory", type=Path)
    comparing = commands.add_parser("compare", help="call the programs of two versions in turns")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    for one in (writing, comparing):
        one.add_argument("--only", default="", help="programs whose name contains this")
    comparing.add_argument("--seconds", type=float, default=6.0, help="time for each pair")
    given = parser.parse_args(argv)
    if given.command == "export":
        given.directory.mkdir(parents=True, exist_ok=True)
        for name, (function, arguments) in programs().items():
            if given.only in name:
                data = export.export(jax.jit(function))(*arguments).serialize()
                (given.directory / f"{name}.bin").write_bytes(data)
        return 0
    pairs = [(path, given.new / path.name) for path in sorted(given.old.glob("*.bin"))]
    pairs = [(old, new) for old, new in pairs if given.only in old.stem and new.exists()]
    if not pairs:
        parser.error(f"{given.old} and {given.new} have no program in common")
    for old, new in pairs:
        print(f"{old.stem:28s} {compare(old, new, given.seconds)}", flush=True)
    return 0


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions of the installed version, keyed by name, with their argument shapes."""
    import transformer_jax as tj

    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for shape in SHAPES:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        reasons = tj.explain_attention(x, x, x)
        for implementation in [name for name, reason in reasons.items() if reason is None]:
            for kind, mask in (("none", None), ("causal", tj.Causal())):

                def attend(q: Any, k: Any, v: Any, name: str = implementation, mask: Any = mask):
                    return tj.dot_product_attention(q, k, v, mask=mask, implementation=name)

                def gradient(q: Any, k: Any, v: Any, attend: Callable[..., Any] = attend):
                    summed = lambda *qkv: attend(*qkv).sum()  # noqa: E731
                    return jax.grad(summed, argnums=(0, 1, 2))(q, k, v)

                name = f"{implementation}_{kind}_{shape[0]}x{shape[1]}"
                found[f"{name}_forward"] = attend, (x, x, x)
                found[f"{name}_gradient"] = gradient, (x, x, x)
    for size, fields in MODELS.items():
        config = tj.ModelConfig(vocab_size=65, **fields)
        model = tj.build(config)
        params = jax.eval_shape(lambda config=config: tj.init_params(config, jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((12, config.max_len + 1), jnp.int32)

        def loss(params: Any, tokens: Any, model: Any = model):
            logits, _ = model.apply({"params": params}, tokens[:, :-1])
            return tj.cross_entropy(logits, tokens[:, 1:])[0]

        found[f"train_{size}"] = jax.grad(loss), (params, tokens)
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: tj.init_cache(config, 1, 256)))

    def step(params: Any, token: Any, *leaves: Any):
        cache = jax.tree.unflatten(structure, leaves)
        logits, cache = model.apply({"params": params}, token, cache=cache)
        return logits, *jax.tree.leaves(cache)

    found["decode_step"] = step, (params, jax.ShapeDtypeStruct((1, 1), jnp.int32), *leaves)
    return found


def compare(old: Path, new: Path, seconds: float) -> str:
    """Call two exported programs alternately on the same random arrays, and return one line."""
    exported = [export.deserialize(path.read_bytes()) for path in (old, new)]
    rng = np.random.default_rng(0)

    def draw(aval: Any) -> jax.Array:
        floating = jnp.issubdtype(aval.dtype, jnp.floating)
        values = rng.normal(size=aval.shape) if floating else rng.integers(0, 2, aval.shape)
        return jnp.asarray(values, aval.dtype)

    arrays, named = jax.tree.unflatten(exported[0].in_tree, map(draw, exported[0].in_avals))
    calls = [jax.jit(one.call) for one in exported]
    results = [jax.tree.leaves(call(*arrays, **named)) for call in calls]
    difference = max(
        float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0.0))
        for x, y in zip(*results, strict=True)
    )
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while not taken[0] or (time.perf_counter() < end and len(taken[0]) < 2000):
        for which in (0, 1) if len(taken[0]) % 2 else (1, 0):
            begin = time.perf_counter()
            jax.block_until_ready(calls[which](*arrays, **named))
            taken[which].append(time.perf_counter() - begin)
    before, after = (statistics.median(times) for times in taken)
    paired = statistics.median(y / x for x, y in zip(*taken, strict=True))
    return (
        f"{len(taken[0]):5d} rounds  old {before * 1e3:9.3f} ms  new/old: "
        f"medians {after / before:.3f}, minima {min(taken[1]) / min(taken[0]):.3f}, "
        f"pairs {paired:.3f}  largest difference {difference:.1e}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
