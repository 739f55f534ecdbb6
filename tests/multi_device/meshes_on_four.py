"""Script of test_meshes.py with four devices: results and shardings on a mesh of 2 x 2.

Prints JSON: for each case the largest error against one device, relative to each array's largest
value, and further facts of the case.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.attention_suite import draw
from tests.support.plain_kernels import Plain
from transformer_jax import (
    ModelConfig,
    Patches,
    PresencePenalty,
    PromptLookup,
    Request,
    beam_search,
    build,
    chunked_cross_entropy,
    cross_entropy,
    dot_product_attention,
    dot_product_attention_weights,
    generate,
    init_cache,
    init_params,
    make_step,
    serve_requests,
    speculate,
    stream,
)
from transformer_jax.attention.masks import Causal, Segments
from transformer_jax.cache import quantize
from transformer_jax.config import Experts, GatedDelta, LatentAttention, MeshConfig, ShortConv
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.kernels import using
from transformer_jax.training.batch import Batch, batch_loss
from transformer_jax.training.data import IGNORE
from transformer_jax.training.placement import make_placement

SMALL = ModelConfig(vocab_size=24, max_len=32, num_layers=2, num_heads=4, d_model=16)
MODELS = {
    "learned": replace(SMALL, tie_embeddings=False),
    "rope": replace(
        SMALL, positions="rope", num_kv_heads=2, glu=True, norm="rmsnorm", tie_embeddings=False,
        qk_norm=True, attention_sinks=True, attention_gate=True, logit_bias=True, scan_layers=True,
    ),
    "shaw": replace(SMALL, positions="shaw", implementation="xla"),
    "t5": replace(SMALL, num_layers=1, positions="t5", remat="full", implementation="blockwise"),
    "dropout": replace(SMALL, positions="alibi", dropout=0.1, attention_dropout=0.1),
    "experts": replace(
        SMALL, glu=True, experts=Experts(count=4, top_k=2, d_ff=8, shared_d_ff=8, shared_gate=True)
    ),
    "states": replace(
        SMALL, positions="rope", mixers=("gated_delta", "attention"),
        gated_delta=GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=4),
    ),
    "latents": replace(
        SMALL, positions="rope", init_std=0.3, mixers=("latent_attention",),
        latent_attention=LatentAttention(
            query_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4
        ),
    ),
    "kimi": replace(
        SMALL, positions=None, init_std=0.3, mixers=("gated_delta", "latent_attention"),
        gated_delta=GatedDelta(
            num_key_heads=4, num_value_heads=4, key_dim=8, value_dim=4, decay_rank=6, gate_rank=4
        ),
        latent_attention=LatentAttention(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4),
    ),
    "convolutions": replace(
        SMALL, positions="rope", init_std=0.3, mixers=("short_conv", "attention"),
        short_conv=ShortConv(conv_bias=True),
    ),
    "encoder": replace(SMALL, kind="encoder"),
    "encoder-decoder": replace(SMALL, kind="encoder-decoder", num_layers=1),
    "patches": replace(
        SMALL, kind="encoder-decoder", num_layers=1,
        inputs=Patches(size=2, height=8, width=2, channels=24),
    ),
}  # fmt: skip
LAYOUTS = "whole", "split like the batch", "split by heads and widths"


def explicit() -> Any:
    """Return a mesh with explicit axes, the default of jax."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    return mesh


def largest_error(actual: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return max(float(abs(x - y).max() / max(abs(y).max(), 1e-3)) for x, y in pairs)


def attention(implementation: str) -> dict[str, Any]:
    """Output, lse and gradients with heads and rows split, and arrays (not vectors) that move."""
    arrays = draw(3, batch=4, queries=150, keys=150, heads=4, kv_heads=2)
    arrays["bias"] = jnp.linspace(-1, 1, 4 * 150).reshape(1, 4, 1, 150)
    arrays["sinks"] = jnp.linspace(-1, 1, 4)
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (4, 150)), 1), jnp.int32)
    named = "query", "key", "value", "bias", "sinks"

    def gradients(arrays, ids):
        def loss(inputs):
            with using(Plain()):
                out, lse = dot_product_attention(
                    inputs["query"], inputs["key"], inputs["value"], bias=inputs["bias"],
                    sinks=inputs["sinks"], mask=Causal() & Segments(ids), return_lse=True,
                    dropout_rate=0.2, dropout_key=jax.random.key(1), implementation=implementation,
                )  # fmt: skip
            loss = (out * arrays["out_cotangent"]).sum() + (lse * arrays["lse_cotangent"]).sum()
            return loss, (out, lse)

        return jax.grad(loss, has_aux=True)({name: arrays[name] for name in named})

    mesh, heads = explicit(), P("data", None, "model")
    specs = dict.fromkeys(arrays, heads) | dict(bias=P(None, "model"), sinks=P())
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = {name: place(x, specs[name]) for name, x in arrays.items()}, place(ids, P("data"))
    compiled = jax.jit(gradients).lower(*placed).compile()
    moved = re.findall(
        r" = \(?(f32\[\d+,[\d,]+\])\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    actual, expected = compiled(*placed), jax.jit(gradients)(arrays, ids)
    specs_found = [list(x.sharding.spec) for x in (*actual[1], actual[0]["query"])]
    return dict(error=largest_error(actual, expected), moved=moved, specs=specs_found)


def weights() -> dict[str, Any]:
    arrays = draw(3, batch=4, queries=9, keys=9, heads=4, kv_heads=4)
    mesh = explicit()
    whole = arrays["query"], arrays["key"]
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in whole]
    found = dot_product_attention_weights(*placed, mask=Causal())
    expected = dot_product_attention_weights(*whole, mask=Causal())
    return dict(error=largest_error(found, expected), specs=[list(found.sharding.spec)])


def int8(implementation: str) -> dict[str, Any]:
    """Keys and values in int8 with their scales, rows and heads split."""
    arrays = draw(3, batch=4, queries=9, keys=9, heads=4, kv_heads=2)
    (key, k_scale), (value, v_scale) = (quantize(arrays[name]) for name in ("key", "value"))
    mesh, inputs = explicit(), (arrays["query"], key, value, k_scale, v_scale)

    def attend(query, key, value, k_scale, v_scale):
        return dot_product_attention(
            query, key, value, key_scale=k_scale, value_scale=v_scale, mask=Causal(),
            implementation=implementation,
        )  # fmt: skip

    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in inputs]
    found, expected = jax.jit(attend)(*placed), jax.jit(attend)(*inputs)
    return dict(error=largest_error(found, expected), specs=[list(found.sharding.spec)])


def ordered() -> dict[str, Any]:
    """Heads over two automatic axes, the second one first: nothing moves."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    query = draw(3, batch=1, queries=7, keys=7, heads=4, kv_heads=4)["query"]
    placed = jax.device_put(query, NamedSharding(mesh, P(None, None, ("model", "data"))))
    attend = jax.jit(partial(dot_product_attention, mask=Causal(), implementation="blockwise"))
    compiled = attend.lower(placed, placed, placed).compile()
    collectives = r"all-gather|all-to-all|collective-permute|all-reduce"
    found = compiled(placed, placed, placed)
    moved = re.findall(collectives, compiled.as_text())
    return dict(error=largest_error(found, attend(query, query, query)), moved=moved)


def place_params(params: Any, layout: str, mesh: Any) -> Any:
    """Shard parameters as a user may do; axes that do not divide stay whole."""

    def place(path, x):
        names, axes = [part.key for part in path], [None] * x.ndim
        axis_of = dict(query=-2, key=-2, value=-2, up=-1, gate=-1, out=-3, down=-2, router=-1)
        if layout == LAYOUTS[1]:
            axis = max((i for i, n in enumerate(x.shape) if n % 2 == 0), default=None)
            if axis is not None:
                axes[axis] = "data"
        elif layout == LAYOUTS[2] and names[-1] == "kernel" and names[-2] in axis_of:
            axes[axis_of[names[-2]]] = "model"
        elif layout == LAYOUTS[2] and names[-1] in ("tokens", "output"):
            axes[0] = "model"
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    return jax.tree_util.tree_map_with_path(place, params)


def training(name: str, layout: str, context: bool) -> dict[str, Any]:
    """The loss and its gradients, which have the sharding of the parameters."""
    config = MODELS[name]
    model, params = build(config), init_params(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (4, 9)))
    key = jax.random.key(1) if name == "dropout" else None

    def loss(params, tokens):
        source = {}
        if config.inputs is not None:
            column = jax.nn.one_hot(tokens[:, 1:], 24)[:, :, None]
            source = dict(source=jnp.concatenate([column, -column], axis=2))
        elif config.kind == "encoder-decoder":
            source = dict(source=tokens[:, 1:])
        logits, _ = model.apply({"params": params}, tokens[:, :-1], key=key, **source)
        return cross_entropy(logits, tokens[:, 1:])[0]

    expected = jax.jit(jax.value_and_grad(loss))(params, tokens)
    mesh = explicit()
    with jax.set_mesh(mesh) if context else nullcontext():
        placed = place_params(params, layout, mesh)
        rows = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        actual = jax.jit(jax.value_and_grad(loss))(placed, rows)
    pairs = zip(jax.tree.leaves(actual[1]), jax.tree.leaves(placed), strict=True)
    alike = all(x.sharding.spec == y.sharding.spec for x, y in pairs)
    return dict(error=largest_error(actual, expected), alike=alike)


def experts_of_devices(scan: bool, length: int, **sizes: int) -> dict[str, Any]:
    """Losses and gradients of padded rows, and hidden layers, with experts on other devices."""
    config = replace(
        MODELS["experts"], scan_layers=scan, max_len=length, implementation="xla",
        experts=Experts(count=4, top_k=2, d_ff=8, balance_loss=0.1),
    )  # fmt: skip
    model, params = build(config), init_params(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 24, (4, length + 1)).astype(np.int32)
    real = np.arange(length) < np.array([[1], [2], [length], [length // 2 + 1]])
    packed = dict(segments=real.astype(np.int32)) if scan else dict(valid=real)
    labels = np.where(real, tokens[:, 1:], IGNORE)
    batch = Batch(tokens[:, :-1], labels, **packed)

    def results(params, batch, whole):
        loss = lambda params: batch_loss(config)(params, batch, None)[0]  # noqa: E731
        hidden = "block_1/feed_forward/hidden"
        seen = model.apply({"params": params}, batch.tokens, capture=(hidden,))[2]
        logits, _ = model.apply({"params": params}, whole)
        return jax.value_and_grad(loss)(params), seen[hidden], logits

    some = batch.tokens if scan else batch.tokens[:3]
    expected = jax.jit(results)(params, batch, some)
    placement = make_placement(MeshConfig(**sizes))
    shapes = jax.eval_shape(lambda: params)
    placed = jax.tree.map(jax.device_put, params, placement.shardings(shapes))
    rows = placement.rows(batch, 0)
    # no axis splits the rows, but the carry of a scan is split like parameters
    whole = rows.tokens if scan else placement.whole(some)
    actual = jax.jit(results)(placed, rows, whole)
    pairs = zip(jax.tree.leaves(actual[0][1]), jax.tree.leaves(placed), strict=True)
    alike = all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)
    return dict(error=largest_error(actual, expected), alike=alike)


def decoding(name: str, layout: str, context: bool) -> dict[str, Any]:
    """Tokens of every decoding method, with the rows of the state split."""
    config = MODELS[name]
    params = init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda x: 3 * x, params)  # otherwise all tokens are the same
    prompt = np.random.default_rng(0).integers(0, 24, (4, 5))
    step = make_step(build(config))
    again = (PresencePenalty(0.5),)

    def tokens(params, place):
        state = lambda n=4: place(init_cache(config, n, 32))  # noqa: E731
        yield generate(step, params, prompt, state(), num_tokens=6, chunk=3).tokens
        yield np.stack(
            list(stream(step, params, prompt, state(), num_tokens=6, processors=again)), 1
        )
        yield generate(step, params, prompt, init_cache(config, 4, 32), num_tokens=6).tokens
        one = fork(place(init_cache(config, 2, 32)), 2)
        yield generate(step, params, prompt, one, num_tokens=6, lengths=[5, 3, 1, 2]).tokens
        yield beam_search(step, params, prompt, state(), num_tokens=4, num_beams=2).tokens
        slack = 2 if config.has_state else 0
        room = place(init_cache(config, 4, 32, slack=slack))
        yield speculate(
            step, params, prompt, room, proposer=PromptLookup(), num_tokens=6, num_draft=2
        ).tokens
        requests = [Request(row, 3) for row in prompt]
        slots = serve_requests(
            step, params, requests, init_cache(config, 1, 32), slots=2, capacity=32
        )
        yield np.stack([answer.tokens for answer in sorted(slots, key=lambda x: x.id)])

    expected = [np.asarray(x) for x in tokens(params, lambda state: state)]
    mesh = explicit()
    with jax.set_mesh(mesh) if context else nullcontext():
        rows = NamedSharding(mesh, P("data"))
        placed = place_params(params, layout, mesh)
        actual = [np.asarray(x) for x in tokens(placed, lambda state: jax.device_put(state, rows))]
    different = max(len(set(row)) for row in expected[0].tolist())
    return dict(error=largest_error(actual, expected), different=different)


def inside(part: str) -> dict[str, Any]:
    """In a custom `shard_map` that checks varying axes: gradients are summed over devices."""
    config = MODELS["t5"] if part == "model" else SMALL
    model, params = build(config), init_params(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (4, 9)))

    def loss(params, tokens):
        if part == "model":
            logits = model.apply({"params": params}, tokens[:, :-1])[0]
            return cross_entropy(logits, tokens[:, 1:])[0]
        table = params["embed"]["tokens"]
        hidden = table[tokens[:, :-1]]
        return chunked_cross_entropy(hidden, table, tokens[:, 1:], chunk_size=3)[0]

    def tokens_of(params, tokens):
        state = init_cache(config, len(tokens), 16)
        return generate(make_step(model), params, tokens, state, num_tokens=4, chunk=4).tokens

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")))
    if part == "tokens":
        mapped, function = split(tokens_of, out_specs=P("data")), tokens_of
    else:
        mean = split(lambda *x: jax.lax.pmean(loss(*x), "data"), out_specs=P())
        mapped, function = (jax.value_and_grad(f) for f in (mean, loss))
    actual, expected = (jax.jit(f)(params, tokens) for f in (mapped, function))
    return dict(error=largest_error(actual, expected))


CASES: dict[str, Any] = {
    **{f"attention, {name}": partial(attention, name) for name in ("xla", "blockwise", "pallas")},
    "attention weights": weights,
    "ordered": ordered,
    **{f"int8, {name}": partial(int8, name) for name in ("xla", "blockwise")},
    **{
        f"training, {name}, {layout}{', set' if context else ''}": partial(
            training, name, layout, context
        )
        for name in MODELS
        for layout in LAYOUTS
        for context in (False, True)
    },
    **{
        f"decoding, {name}, {layout}{', set' if context else ''}": partial(
            decoding, name, layout, context
        )
        for name in ("learned", "rope", "states", "latents", "kimi", "convolutions")
        for layout in (LAYOUTS[0], LAYOUTS[2])
        for context in (False, True)
    },
    **{f"inside, {part}": partial(inside, part) for part in ("model", "loss", "tokens")},
    "experts of devices, few rows": partial(experts_of_devices, False, 2, expert=4),
    "experts of devices": partial(experts_of_devices, True, 64, expert=2, data=2),
    "experts of devices, fsdp": partial(experts_of_devices, False, 64, expert=2, fsdp=2),
    "experts of devices, heads": partial(experts_of_devices, True, 64, expert=2, tensor=2),
}

if __name__ == "__main__":
    assert len(jax.devices()) == 4
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:] or CASES}))
