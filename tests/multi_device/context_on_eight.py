"""Script of test_context.py with eight devices: attention with lengths that are split.

Prints JSON. For each case of attention, the largest error of the output, lse, gradients and
products of the Hessian with a vector against "xla" on one device in float64, relative to each
array's largest value. For "traffic", the arrays that the compiled program sends. For "memory", the
bytes of its temporary arrays.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multi_device.meshes_on_four import largest_error
from tests.support.attention_suite import draw
from transformer_jax import ALiBi, dot_product_attention, explain_attention
from transformer_jax.attention import api, ring, zigzag_positions
from transformer_jax.attention.biases import RelativeBias, alibi_slopes
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Mask,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.cache import quantize

T, S = 44, 52
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": dict(mask="causal"),
    "window": dict(mask="window"),
    "two-sided window": dict(mask="two-sided"),
    "packed": dict(mask="packed"),
    "prefix": dict(mask="prefix"),
    "padded": dict(mask="padded"),
    "dense": dict(mask="dense"),
    "not": dict(mask="not", positions="empty"),
    "predicate": dict(mask="predicate"),
    "custom mask": dict(mask="custom"),
    "predicate that reads": dict(mask="reads"),
    "permuted": dict(mask="packed", positions="permuted"),
    "empty slots": dict(mask="causal", positions="empty"),
    "softcap": dict(softcap=2.0, mask="causal"),
    "scale": dict(scale=0.3, mask="causal"),
    "scale of heads": dict(mask="causal", scale="heads"),
    "sinks": dict(sinks=True, mask="window"),
    "bias": dict(bias=(1, 4, 1, S), mask="causal"),
    "bias of rows": dict(bias=(4, 1, T, S), mask="causal"),
    "bias of queries": dict(bias=(1, 1, T, 1)),
    "alibi": dict(bias="alibi", mask="causal"),
    "t5": dict(bias="t5", mask="causal"),
    "custom bias": dict(bias="custom"),
    "dropout": dict(dropout_rate=0.3, mask="causal"),
    "broadcast dropout": dict(dropout_rate=0.3, broadcast_dropout=True),
    "int8": dict(int8=True, mask="causal", sinks=True),
    "heads": dict(mask="packed", mesh="heads", heads=8, kv_heads=4, bias=(1, 8, 1, S), sinks=True),
    "one key head": dict(
        mask="packed", mesh="heads", heads=8, kv_heads=1, sinks=True, bias="alibi"
    ),
    "all at once": dict(
        mask="packed", positions="permuted", softcap=3.0, sinks=True, dropout_rate=0.2,
        bias=(4, 4, T, S), scale="heads",
    ),
    "nonfinite": dict(mask="causal", nonfinite=True),
    "two axes": dict(mask="causal", mesh="two axes", batch=3),
}  # fmt: skip
MESHES = {
    "rows": (("data", "context"), (2, 4), P("data", "context")),
    "heads": (("context", "model"), (4, 2), P(None, "context", "model")),
    "two axes": (("outer", "inner"), (2, 2), P(None, ("outer", "inner"))),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Near(Mask):
    """Mask of a user: each row has its own reach."""

    reach: jax.Array  # i32[B]

    def sees(self, q, k):
        return abs(q - k) < self.reach[:, None, None, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steep:
    """Bias of a user: each row and head has its own slope."""

    slopes: jax.Array  # [B, N]

    def materialize(self, q_positions, k_positions):
        distance = jnp.abs(k_positions[:, None] - q_positions[:, :, None])
        return self.slopes[:, :, None, None] * distance[:, None].astype(self.slopes.dtype)


def made(case: str, layout: str) -> tuple[dict[str, jax.Array], dict[str, P], Any]:
    """Return arrays, their sharding, and the function whose results are compared."""
    options = dict(batch=4, heads=4, kv_heads=2, mesh="rows") | CASES[case]
    B, N = options["batch"], options["heads"]
    rng = np.random.default_rng(0)
    arrays = draw(3, batch=B, queries=T, keys=S, heads=N, kv_heads=options["kv_heads"])
    spec = MESHES[options["mesh"]][2]
    whole = P(spec[0], None, *spec[2:])
    specs = dict.fromkeys(arrays, spec)
    if options["kv_heads"] == 1:
        specs |= dict(key=P(*spec[:2]), value=P(*spec[:2]))
    if layout == "queries":
        specs |= dict(key=P(*whole[:1]), value=P(*whole[:1]))
    elif layout == "keys":
        specs |= dict.fromkeys(("query", "out_cotangent", "lse_cotangent"), whole)
    arrays |= dict(
        ids=jnp.asarray(np.sort(rng.integers(0, 3, (B, S)), 1), jnp.int32),
        lengths=jnp.arange(B, dtype=jnp.int32) * 9 + 5,
        allowed=jnp.asarray(rng.random((B, N, T, S)) < 0.5),
        reach=jnp.int32(7),
    )
    if options.get("sinks"):
        arrays["sinks"] = jnp.linspace(-1, 1, N)
    if options.get("scale") == "heads":
        arrays["scale"] = jnp.linspace(0.2, 0.5, N)
    bias = options.get("bias")
    if isinstance(bias, tuple):
        arrays["bias"] = jnp.asarray(rng.normal(size=bias), jnp.float32)
    elif bias is not None:
        slopes = jnp.linspace(-0.1, 0.1, B * N).reshape(B, N)
        table = jnp.asarray(rng.normal(size=(8, N)), jnp.float32)
        arrays["bias"] = dict(alibi=alibi_slopes(N), t5=table, custom=slopes)[bias]
    if options.get("nonfinite"):
        arrays["key"] = arrays["key"].at[1, 30, 1, 2].set(jnp.nan)
    if options.get("int8"):
        for name in ("key", "value"):
            arrays[name], arrays[f"{name}_scale"] = quantize(arrays[name])
            specs[f"{name}_scale"] = P(*specs[name][:3])
    order = rng.permutation(S)
    arrays["k_at"] = jnp.asarray(order, jnp.int32)
    arrays["q_at"] = jnp.asarray(rng.permutation(S)[:T], jnp.int32)
    starts = jnp.arange(B, dtype=jnp.int32)[:, None] * 3
    slots = jnp.arange(S, dtype=jnp.int32)[None]
    arrays["k_filled"] = jnp.where(slots < 30 + starts, slots, -1)
    arrays["q_filled"] = jnp.arange(T, dtype=jnp.int32)[None] + starts

    def results(arrays, implementation):
        ids, lengths = arrays["ids"], arrays["lengths"]
        valid = jnp.arange(S)[None] < lengths[:, None]
        reach = arrays["reach"]
        mask = dict(
            causal=Causal(),
            window=Causal() & Window(9),
            packed=Causal() & Window(17) & Segments(ids),
            prefix=Causal() | Prefix(lengths),
            padded=Padding(valid),
            dense=Dense(arrays["allowed"]),
            predicate=Predicate(lambda q, k: (k <= q) & (q - k < 13)),
            custom=Near(lengths),
            reads=Predicate(lambda q, k: q - k < reach),
        )
        mask |= {"two-sided": Window(6, 9), "not": ~(Causal() & Window(20))}
        places = dict(
            permuted=dict(q_positions=arrays["q_at"], k_positions=arrays["k_at"]),
            empty=dict(q_positions=arrays["q_filled"], k_positions=arrays["k_filled"]),
        ).get(options.get("positions", ""), {})

        def loss(inputs):
            values = inputs.get("bias")
            kinds = dict(alibi=ALiBi, custom=Steep)
            if bias == "t5":
                values = RelativeBias(values, bidirectional=True, max_distance=50)
            elif bias in kinds:
                values = kinds[bias](values)
            out, lse = dot_product_attention(
                inputs["query"], inputs.get("key", arrays["key"]),
                inputs.get("value", arrays["value"]), bias=values,
                mask=mask.get(options.get("mask", "")), sinks=inputs.get("sinks"),
                scale=inputs.get("scale", options.get("scale")), softcap=options.get("softcap"),
                key_scale=inputs.get("key_scale"), value_scale=inputs.get("value_scale"),
                dropout_rate=options.get("dropout_rate", 0.0), dropout_key=jax.random.key(1),
                broadcast_dropout=options.get("broadcast_dropout", False),
                return_lse=True, implementation=implementation, **places,
            )  # fmt: skip
            seen = jnp.where(jnp.isfinite(lse), lse, 0)
            finite = jnp.where(jnp.isfinite(out), out, 0)
            value = (finite**2 * arrays["out_cotangent"]).sum()
            return value + (jnp.sin(seen) * arrays["lse_cotangent"]).sum(), (out, lse)

        named = "query", "key", "value", "bias", "sinks", "scale", "key_scale", "value_scale"
        inputs = {n: arrays[n] for n in named if n in arrays and arrays[n].dtype != jnp.int8}
        gradient = jax.grad(loss, has_aux=True)
        gradients, outputs = gradient(inputs)
        found = dict(outputs=outputs, gradients=gradients)
        if not options.get("nonfinite"):
            dots = {n: jnp.cos(x) for n, x in inputs.items()}
            found["second"] = jax.grad(
                lambda x: sum((g * dots[n]).sum() for n, g in gradient(x)[0].items())
            )(inputs)
            found["forward mode"] = jax.jvp(lambda x: loss(x)[1], (inputs,), (dots,))[1]
        return found

    return arrays, specs, results


def only(layout: str) -> AbstractContextManager[Any]:
    """Compute calls with split T and S in a ring, or with split heads, whichever sends less."""

    def ways(call: Any) -> Any:
        found = ring.split_lengths(call)
        if not isinstance(found, list) or layout not in ("ring", "heads"):
            return found
        return [way for way in found if bool(way.repeats) == (layout == "heads")]

    return mock.patch.object(api, "split_lengths", ways)


def run(case: str, implementation: str, layout: str = "ring") -> dict[str, Any]:
    arrays, specs, results = made(case, layout)
    axes, shape, _ = MESHES[CASES[case].get("mesh", "rows")]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, axes, devices=devices)
    placed = {
        n: jax.device_put(np.asarray(x), NamedSharding(mesh, specs.get(n, P())))
        for n, x in arrays.items()
    }
    program = jax.jit(results, static_argnums=1)
    with only(layout):
        actual = program(placed, implementation)
    several = jax.process_count() > 1
    actual = process_allgather(actual, tiled=True) if several else jax.device_get(actual)
    wide = lambda x: x.astype(np.float64) if x.dtype == np.float32 else x  # noqa: E731
    with jax.enable_x64(True):
        host = jax.tree.map(lambda x: jnp.asarray(wide(np.asarray(x))), arrays)
        for name in ("key_scale", "value_scale"):
            if name in host:
                host[name] = host[name].astype(jnp.float32)
        expected = jax.device_get(jax.jit(results, static_argnums=1)(host, "xla"))
    finite = lambda x: np.where(np.isfinite(x), x, -9.0)  # noqa: E731
    errors = {
        name: largest_error(jax.tree.map(finite, actual[name]), jax.tree.map(finite, x))
        for name, x in expected.items()
    }
    if CASES[case].get("nonfinite"):
        assert not np.isfinite(actual["outputs"][0]).all()
    return errors


def traffic(layout: str, heads: str = "4", kv_heads: str = "2") -> Any:
    """Return the `transfers` of a call and of its gradient."""
    mask, positions = dict(
        everything=(None, None),
        causal=(Causal(), None),
        window=(Causal() & Window(1024), None),
        packed=(Causal() & Window(1024), "ids"),
        zigzag=(Causal(), zigzag_positions(LENGTH, 8)),
    )[layout]
    arrays = draw(0, batch=1, queries=LENGTH, keys=LENGTH, heads=int(heads),
                  kv_heads=int(kv_heads), dim=16, value_dim=16)  # fmt: skip
    mesh = jax.make_mesh((8,), ("context",))
    inputs = [
        jax.device_put(arrays[n], NamedSharding(mesh, P(None, "context")))
        for n in ("query", "key", "value")
    ]
    ids = jax.device_put(jnp.zeros((1, LENGTH), jnp.int32), NamedSharding(mesh, P()))

    def attend(inputs, ids):
        places = {} if positions is None or layout == "packed" else positions
        places = dict(q_positions=places, k_positions=places) if len(places) else {}
        seen = mask & Segments(ids) if layout == "packed" else mask
        return dot_product_attention(*inputs, mask=seen, implementation="blockwise", **places)

    programs = attend, jax.grad(lambda x, ids: (attend(x, ids) ** 2).sum())
    found = [transfers(jax.jit(f).lower(inputs, ids).compile().as_text()) for f in programs]
    places = {} if layout != "zigzag" else dict(q_positions=positions, k_positions=positions)
    seen = mask & Segments(ids) if layout == "packed" else mask
    return [*found, explain_attention(*inputs, mask=seen, **places).lengths]


LENGTH = 8192


def transfers(text: str) -> Any:
    """Return the number of arrays that are sent, their bytes, and what is gathered."""
    size = lambda shape: 4 * int(np.prod([int(n) for n in shape.split(",")]))  # noqa: E731
    pattern = r"[fs]32\[([\d,]*)\]\S* collective-permute(?:-start)?\(.*pairs={([\d,{}]*)}"
    count, total, farthest = 0, 0, 0
    for shape, pairs in re.findall(pattern, text):
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"{(\d+),(\d+)}", "{" + pairs + "}")]
        count, total = count + 1, total + size(shape) * len(pairs)
        farthest = max(farthest, *((to - one) % 8 for one, to in pairs))
    # each of eight devices has eight parts and keeps one
    exchanged = re.findall(r"\((f32\[.*)\) all-to-all\(", text)
    parts = [shape for one in exchanged for shape in re.findall(r"f32\[([\d,]*)\]", one)]
    return dict(
        arrays=count + len(exchanged), bytes=total + 7 * sum(map(size, parts)), farthest=farthest,
        exchanged=len(exchanged), gathered=text.count("all-gather("),
    )  # fmt: skip


def memory(length: str, devices: str) -> int:
    """Return the bytes of temporary arrays on one device, in the gradient of a causal call."""
    mesh = jax.make_mesh((int(devices),), ("context",), devices=jax.devices()[: int(devices)])
    spec = NamedSharding(mesh, P(None, "context"))
    x = jax.ShapeDtypeStruct((1, int(length), 2, 16), jnp.float32, sharding=spec)

    def loss(*inputs):
        out = dot_product_attention(*inputs, mask=Causal(), implementation="blockwise")
        return (out**2).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    return int(program.memory_analysis().temp_size_in_bytes)


OTHERS = dict(traffic=traffic, memory=memory)

if __name__ == "__main__":
    names = sys.argv[1:]
    if names[:1] == ["--process"]:
        _, address, count, index, *names = names
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, int(count), int(index))
    assert len(jax.devices()) == 8
    names = names or [
        f"{case}; {how}; {layout}"
        for case in CASES
        for how in ("xla", "blockwise", "native")
        for layout in ("ring", "heads", "keys", "queries")
    ]
    results = {}
    for name in names:
        first, *rest = name.split("; ")
        results[name] = OTHERS[first](*rest) if first in OTHERS else run(first, *rest)
    print(json.dumps(results))
