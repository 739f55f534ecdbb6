"""Script of test_meshes.py with eight devices: blockwise attention on a mesh.

Prints JSON: for each case the largest error against "xla" on one device, relative to each array's
largest value, and the arrays of more than one axis that the optimised program gathers.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multi_device.meshes_on_four import largest_error
from tests.support.attention_suite import draw
from transformer_jax import ALiBi, dot_product_attention
from transformer_jax.attention.biases import RelativeBias, alibi_slopes
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)

AXES = "explicit", "automatic"
WHOLE = P("data", None, "model")
CASES: dict[str, dict[str, Any]] = {
    "all at once": dict(
        kv_heads=2, mask="packed", bias=(1, 8, 1, 150), softcap=2.0, dropout_rate=0.3,
    ),
    "packed": dict(mask="packed"),
    "padded": dict(mask="padded", kv_heads=4),
    "two parts of a key head": dict(kv_heads=2, mask="packed"),
    "a bias of all heads": dict(bias=(4, 1, 150, 150)),
    "sums of bfloat16": dict(bias=(1, 1, 150, 150), kv_heads=2, dtype="bfloat16"),
    "slopes": dict(bias="slopes", mask="prefix"),
    "buckets": dict(bias="buckets", kv_heads=2),
    "positions": dict(mask="causal", positions=True, dropout_rate=0.3),
    "a mask of heads": dict(mask="dense", scale=True),
    "a mask that reads": dict(mask="reads", bias="of a user"),
    "a function of the score": dict(mask="packed", bias="of the score", kv_heads=4),
    "nonfinite": dict(mask="packed", nonfinite=True, kv_heads=2),
    "three rows": dict(batch=3, mask="padded"),
    "six heads": dict(heads=6, kv_heads=6, mask="packed"),
    "three key heads": dict(heads=12, kv_heads=3),
    "key heads on one of two axes": dict(both=True, kv_heads=4, mask="packed", dropout_rate=0.3),
    "mapped": dict(mask="packed", mapped=3, bias=(1, 8, 1, 150)),
}  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steep:
    """A custom bias that the library knows nothing about: each row and head has its own slope."""

    slopes: jax.Array  # [B, N]

    def materialize(self, q_positions, k_positions):
        distance = jnp.abs(k_positions[:, None] - q_positions[:, :, None])
        return self.slopes[:, :, None, None] * distance[:, None].astype(jnp.float32)


def made(case: str) -> tuple[dict[str, jax.Array], dict[str, P], Any]:
    """Return arrays, their sharding, and the function that returns their gradients."""
    options = dict(batch=4, heads=8, kv_heads=8, dtype="float32") | CASES[case]
    B, N = options["batch"], options["heads"]
    sizes = {name: options[name] for name in ("batch", "heads", "kv_heads", "dtype")}
    arrays = draw(3, queries=150, keys=150, **sizes)
    rng = np.random.default_rng(0)
    rows = P("data") if B % 2 == 0 and not options.get("both") else P()
    parts = ("data", "model") if options.get("both") else "model"
    heads = P(*rows, *[None] * (2 - len(rows)), parts) if N % 4 == 0 else rows
    specs = dict.fromkeys(arrays, heads)
    if options.get("both"):
        specs |= dict.fromkeys(("key", "value"), P(None, None, "data"))
    elif options["kv_heads"] % 4:
        specs |= dict(key=rows, value=rows)
    ids = np.sort(rng.integers(0, 3, (B, 150)), 1)
    arrays |= dict(
        ids=jnp.asarray(ids, jnp.int32),
        lengths=jnp.arange(B, dtype=jnp.int32) * 40 + 20,
        start=jnp.arange(B, dtype=jnp.int32) * 7,
        sinks=jnp.linspace(-1, 1, N),
        scale=jnp.float32(0.4),
        reach=jnp.int32(31),
        allowed=jnp.asarray(rng.random((B, N, 150, 150)) < 0.5),
    )
    specs |= dict(ids=rows, lengths=rows, start=rows, scale=P(), reach=P())
    specs["sinks"] = P(parts) if N % 4 == 0 else P()
    specs["allowed"] = P(*rows, *[None] * (1 - len(rows)), parts) if N % 4 == 0 else rows
    if options.get("nonfinite"):
        arrays["key"] = arrays["key"].at[1, 3, 2].set(jnp.nan)
    bias = options.get("bias")
    if isinstance(bias, tuple):
        arrays["bias"] = jnp.asarray(rng.normal(size=bias), options["dtype"])
        specs["bias"] = P(rows[0] if bias[0] > 1 else None, "model" if bias[1] > 1 else None)
    elif bias is not None:
        table = jnp.asarray(rng.normal(size=(8, N)), jnp.float32)
        slopes = jnp.linspace(-0.1, 0.1, B * N).reshape(B, N)
        arrays["bias"] = dict(slopes=alibi_slopes(N), buckets=table).get(bias, slopes)
        specs["bias"] = P()

    def gradients(arrays, implementation="blockwise"):
        ids, valid = arrays["ids"], jnp.arange(150)[None] < arrays["lengths"][:, None]
        mask = dict(
            packed=Causal() & Window(60) & Segments(ids),
            padded=Padding(valid),
            prefix=Causal() | Prefix(arrays["lengths"]),
            causal=Causal(),
            dense=Dense(arrays["allowed"]),
            reads=Predicate(lambda q, k: q - k < arrays["reach"]),
        ).get(options.get("mask", ""))
        at = jnp.arange(150, dtype=jnp.int32)[None] + arrays["start"][:, None]
        places = dict(q_positions=at, k_positions=jnp.where(valid, at, -1))

        def loss(inputs):
            values = inputs.get("bias")
            if bias == "slopes":
                values = ALiBi(values)
            elif bias == "buckets":
                values = RelativeBias(values, bidirectional=True, max_distance=50)
            elif bias == "of a user":
                values = Steep(values)
            score_mod = None
            if bias == "of the score":
                slopes, values = values, None
                score_mod = lambda s, b, h, q, k: s * (1 + slopes[b, h] * (q - k))  # noqa: E731
            out, lse = dot_product_attention(
                inputs["query"], inputs["key"], inputs["value"], mask=mask, bias=values,
                score_mod=score_mod,
                sinks=inputs["sinks"], scale=inputs["scale"] if options.get("scale") else None,
                softcap=options.get("softcap"), return_lse=True, implementation=implementation,
                dropout_rate=options.get("dropout_rate", 0.0), dropout_key=jax.random.key(1),
                **places if options.get("positions") else {},
            )  # fmt: skip
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            out = jnp.nan_to_num(out, nan=7.0) if options.get("nonfinite") else out
            value = (out * arrays["out_cotangent"]).sum(dtype=jnp.float32)
            return value + (seen * arrays["lse_cotangent"]).sum(), (out, lse)

        named = "query", "key", "value", "bias", "sinks", "scale"
        differentiated = {n: arrays[n] for n in named if n in arrays}
        if not options.get("mapped"):
            return jax.grad(loss, has_aux=True)(differentiated)
        shared = dict.fromkeys(differentiated, None) | dict(query=0)
        several = differentiated | dict(
            query=arrays["query"] * jnp.arange(1.0, 1.0 + options["mapped"]).reshape(-1, *[1] * 4)
        )
        return jax.vmap(jax.grad(loss, has_aux=True), (shared,))(several)

    return arrays, specs, gradients


def run(case: str, kind: str) -> dict[str, Any]:
    arrays, specs, gradients = made(case)
    axis = AxisType.Auto if kind == "automatic" else AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis,) * 2)
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
    with jax.set_mesh(mesh) if kind == "set" else contextlib.nullcontext():
        traced = jax.jit(gradients).trace(placed)
        compiled = traced.lower().compile()
    rounded = re.findall(r"f16\[[\d,]*\]\S* = psum", str(traced.jaxpr))
    found = re.findall(r"\[([\d,]+)\]\S* all-gather(?:-start)?\(", compiled.as_text())
    shapes = [[int(n) for n in shape.split(",") if n != "1"] for shape in found]
    gathered = [shape for shape in shapes if len(shape) > 1]  # not vectors
    actual, expected = compiled(placed), jax.jit(partial(gradients, implementation="xla"))(arrays)
    finite = lambda x: jnp.where(jnp.isfinite(x), x, -99.0)  # noqa: E731
    actual, expected = jax.tree.map(finite, (jax.device_get(actual), expected))
    return dict(error=largest_error(actual, expected), gathered=gathered, rounded=rounded)


def projected() -> dict[str, Any]:
    """Project to heads, with the columns of the product split over eight devices.

    The compiler splits four heads over a part of the mesh axis, and two key heads over a smaller
    part.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 150, 32)), jnp.float32)
    weights = [jnp.asarray(rng.normal(size=(32, n * 8)) / 6, jnp.float32) for n in (4, 2, 2)]

    def loss(weights, implementation):
        heads = [(x @ w).reshape(2, 150, -1, 8) for w in weights]
        out = dot_product_attention(*heads, mask=Causal(), implementation=implementation)
        return (out**2).sum()

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(weights, NamedSharding(mesh, P(None, "model")))
    error = largest_error(gradients(placed, "blockwise"), gradients(weights, "xla"))
    return dict(error=error, gathered=[])


CUT = {
    "length": ((4, 150, 8), P("data", "model")),
    "heads": ((4, 150, 6), WHOLE),
    "rows": ((3, 150, 8), WHOLE),
}


def cut(which: str) -> dict[str, Any]:
    """Lengths, heads and rows that are cut at the end, so that the compiler's split is uneven."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = draw(3, batch=4, queries=152, keys=152, heads=8, kv_heads=8)["query"]

    def loss(x, end, implementation):
        rows, length, heads = end
        x = jnp.sin(x[:rows, :length, :heads])
        return (dot_product_attention(x, x, x, implementation=implementation) ** 2).sum()

    gradients = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    end, spec = CUT[which]
    placed = jax.device_put(whole, NamedSharding(mesh, spec))
    error = largest_error(gradients(placed, end, "blockwise"), gradients(whole, end, "xla"))
    return dict(error=error, gathered=[])


def ordered() -> dict[str, Any]:
    """Heads over two axes, the second one first: nothing moves."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    query = draw(3, batch=4, queries=37, keys=37, heads=8, kv_heads=8)["query"]
    placed = jax.device_put(query, NamedSharding(mesh, P(None, None, ("model", "data"))))

    def attend(x, implementation):
        return dot_product_attention(x, x, x, mask=Causal(), implementation=implementation)

    compiled = jax.jit(attend, static_argnums=1).lower(placed, "blockwise").compile()
    moved = re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
    return dict(error=largest_error(compiled(placed), attend(query, "xla")), gathered=moved)


def older_partitioner() -> dict[str, Any]:
    """With the older partitioner of jax, which ignores the rule, the compiler splits the tiles."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        return run("packed", "automatic") | dict(gathered=[])
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def precise() -> dict[str, Any]:
    """Precision of products under `jax.default_matmul_precision`, which is thread-local."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    query = draw(3, batch=4, queries=37, keys=37, heads=8, kv_heads=8, dtype="bfloat16")["query"]
    placed = jax.device_put(query, NamedSharding(mesh, WHOLE))

    def attend(x):
        return dot_product_attention(x, x, x, implementation="blockwise")

    with jax.default_matmul_precision("highest"):
        text = jax.jit(attend).lower(placed).compile().as_text()
    products = re.findall(r" dot\(.*", text)
    assert products
    return dict(error=sum("={highest,highest}" not in x for x in products), gathered=[])


def exported() -> dict[str, Any]:
    """An exported program, on explicit axes that are also the axes of the context."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    query = draw(3, batch=4, queries=37, keys=37, heads=8, kv_heads=8)["query"]
    placed = jax.device_put(query, NamedSharding(mesh, WHOLE))

    @jax.jit
    def attend(x):
        return dot_product_attention(x, x, x, mask=Causal(), implementation="blockwise")

    with jax.set_mesh(mesh):
        actual = jax.export.export(attend)(placed).call(placed)
    return dict(error=largest_error(actual, attend(query)), gathered=[])


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    functions = exported, projected, ordered, precise, older_partitioner
    others = {function.__name__: function for function in functions}
    others |= {f"cut, {which}": partial(cut, which) for which in CUT}
    names = [f"{case}, {kind}" for case in CASES for kind in AXES]
    names = sys.argv[1:] or [*names, "a mask that reads, set", *others]
    found = {n: others[n]() if n in others else run(*n.split(", ")) for n in names}
    print(json.dumps(found))
