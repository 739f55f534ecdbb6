"""Script of test_context.py with eight devices: models and training with tokens that are split.

Prints JSON. For each model, the largest error of the logits, losses and gradients against one
device, relative to each array's largest value, and the arrays of activations that are gathered. For
"training", the losses of each run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multi_device.meshes_on_four import largest_error
from transformer_jax import (
    ModelConfig,
    build,
    chunked_cross_entropy,
    cross_entropy,
    init_params,
)
from transformer_jax.attention import ring
from transformer_jax.config import Experts, MeshConfig, Rope, TrainConfig
from transformer_jax.training.batch import Batch, along_context, batch_loss, identity
from transformer_jax.training.compiled import needs_balance
from transformer_jax.training.data import IGNORE
from transformer_jax.training.loop import fit
from transformer_jax.training.placement import make_placement

SMALL = ModelConfig(
    vocab_size=29, max_len=48, num_layers=2, num_heads=4, d_model=16, positions="rope",
    num_kv_heads=2, glu=True, norm="rmsnorm", tie_embeddings=False, qk_norm=True,
    attention_sinks=True,
)  # fmt: skip
MODELS = {
    "rope": SMALL,
    "learned": ModelConfig(vocab_size=29, max_len=48, num_layers=2, num_heads=4, d_model=16),
    "window": replace(SMALL, window=7, scan_layers=True, implementation="blockwise"),
    "dropout": replace(
        SMALL, positions="alibi", remat="full", dropout=0.1, attention_dropout=0.1
    ),
    "t5": replace(SMALL, positions="t5", implementation="xla"),
    "experts": replace(SMALL, experts=Experts(count=4, top_k=2, d_ff=8)),
    "encoder": replace(SMALL, kind="encoder"),
}  # fmt: skip


def compared(name: str, packed: bool) -> dict[str, Any]:
    config = MODELS[name]
    model, params = build(config), init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens, labels = (jnp.asarray(rng.integers(0, 29, (4, 40)), jnp.int32) for _ in range(2))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (4, 40)), 1), jnp.int32)

    def loss(params, tokens, labels, segments):
        kwargs: dict[str, Any] = dict(segments=segments) if packed else {}
        kwargs["key"] = jax.random.key(3)
        logits = model.apply({"params": params}, tokens, **kwargs)[0]
        x, table, bias = model.apply({"params": params}, tokens, method="output_layer", **kwargs)
        chunks = chunked_cross_entropy(x, table, labels, chunk_size=7, logit_bias=bias)[0]
        return cross_entropy(logits, labels)[0] + chunks, (logits, chunks)

    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = function(params, tokens, labels, segments)
    mesh = jax.make_mesh((2, 4), ("data", "context"))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    split_up = (put(x, P("data", "context")) for x in (tokens, labels, segments))
    compiled = function.lower(*(inputs := (put(params, P()), *split_up))).compile()
    actual = compiled(*inputs)
    moved = re.findall(r"(f32\[\d+,\d+,[\d,]+\])\S* all-gather(?:-start)?\(", compiled.as_text())
    return dict(error=largest_error(actual, expected), gathered=moved)


BALANCED = {
    "rope": SMALL,
    "learned": MODELS["learned"],
    "scanned": replace(SMALL, scan_layers=True, remat="full", implementation="blockwise"),
    "t5": MODELS["t5"],
    "experts": MODELS["experts"],
}


def balanced(name: str, layout: str) -> dict[str, Any]:
    """Compare the loss and gradients of the trainer's order of tokens with one device."""
    config = BALANCED[name]
    ring.CHUNK = 1 if layout == "packed" else 512  # ten chunks for each device, or two
    rng = np.random.default_rng(1)
    tokens, labels = rng.integers(0, 29, (2, 4, 40), np.int32)
    labels[:, 5:9] = IGNORE
    # the first document is padding
    segments = np.sort(rng.integers(0, 4, (4, 40), np.int32), axis=1)
    prefix = np.arange(40) < rng.integers(2, 20, (4, 1))
    fields = dict(
        plain={}, packed=dict(segments=segments), prefix=dict(prefix=prefix),
        both=dict(segments=segments, prefix=prefix & (segments > 0)),
    )[layout]  # fmt: skip
    batch, params = Batch(tokens, labels, **fields), init_params(config, jax.random.key(0))
    options: dict[str, Any] = dict(label_smoothing=0.1, chunk=7)
    one = jax.jit(jax.value_and_grad(batch_loss(config, **options), has_aux=True))
    expected = one(params, batch, None)
    mesh = MeshConfig(data=2, context=4)
    place, train = make_placement(mesh), TrainConfig(model=config, mesh=mesh, batch_size=4)
    prepare = partial(along_context, identity, 4 if needs_balance(train) else None)
    loss = batch_loss(config, **options, row_shards=2, length_shards=4)
    both = jax.jit(jax.value_and_grad(lambda p, b: loss(p, prepare(b), None), has_aux=True))
    parameters = jax.device_put(params, place.shardings(jax.eval_shape(lambda: params)))
    inputs = parameters, place.rows(batch, axis=0)
    compiled = both.lower(*inputs).compile()
    actual = compiled(*inputs)
    found = jax.jit(prepare)(inputs[1]).tokens
    moved = re.findall(r"f32\[(\d+,\d+,[\d,]+)\]\S* all-gather(?:-start)?\(", compiled.as_text())
    # parts of kernels are gathered before each use, as with "fsdp"
    kernels = {",".join(map(str, x.shape[-3:])) for x in jax.tree.leaves(params)}
    return dict(
        error=largest_error(actual, expected), gathered=[x for x in moved if x not in kernels],
        kernels=str(parameters["embed"]["tokens"].sharding.spec),
        first=np.asarray(found.addressable_shards[0].data)[0].tolist(),
        wanted=tokens[0][ring.zigzag_positions(40, 4)[:10]].tolist(),
    )  # fmt: skip


TEXT = "the quick brown fox jumps over the lazy dog. " * 60
MESHES = dict(one=None, context=MeshConfig(data=2, context=4), ring=MeshConfig(context=4))


def losses(mesh: str, stop_after: int | None = None) -> list[float]:
    """Return the losses of 24 steps, of a run that may be interrupted and resumed."""
    model = ModelConfig(
        d_model=32, num_heads=4, num_kv_heads=2, num_layers=2, d_ff=48, max_len=16,
        positions=Rope(), glu=True, dropout=0.2, attention_dropout=0.1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        config = TrainConfig(
            data=str(folder / "text.txt"), model=model, out=str(folder / "run"), steps=24,
            batch_size=8, accumulation=2, eval_every=12, checkpoint_every=12, log_every=1,
            warmup_steps=2, sample_tokens=5, mesh=MESHES[mesh], loss_chunk=3,
        )  # fmt: skip
        steps = itertools.count(1)
        result = fit(config, stop=lambda: next(steps) == stop_after)
        if stop_after is not None:
            result = fit(config, resume=True)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [*(json.loads(line)["loss"] for line in lines), result.val_loss]


def long_run(name: str, folder: str, ending: str) -> list[Any]:
    """Train for 200 steps on one device or with context=4; "kill" ends the process at step 107."""
    model = ModelConfig(
        d_model=32, num_heads=4, num_kv_heads=2, num_layers=2, d_ff=48, max_len=32,
        positions=Rope(), glu=True, norm="rmsnorm",
    )  # fmt: skip
    text = Path(folder) / "text.txt"
    text.write_text(TEXT)
    config = TrainConfig(
        data=str(text), model=model, out=str(Path(folder) / "run"), steps=200, batch_size=4,
        eval_every=100, checkpoint_every=50, log_every=1, sample_tokens=0, mesh=MESHES[name],
    )  # fmt: skip
    steps = itertools.count(1)

    def stop() -> bool:
        if ending == "kill" and next(steps) == 107:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    result = fit(config, resume=ending == "resume", stop=stop)
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    state = replace(result.state, key=jax.random.key_data(result.state.key))
    arrays = map(np.asarray, jax.tree.leaves(state))
    hashed = [hashlib.sha256(x.tobytes()).hexdigest() for x in arrays]
    return [[json.loads(line)["loss"] for line in lines], result.val_loss, hashed]


if __name__ == "__main__":
    if sys.argv[1:2] == ["long run"]:
        print(json.dumps(long_run(*sys.argv[2:])))
        sys.exit()
    assert len(jax.devices()) == 8
    names = sys.argv[1:] or [*MODELS, *(f"{name}, packed" for name in MODELS)]
    results: dict[str, Any] = {}
    for name in names:
        model, _, rest = name.partition(", ")
        if model == "balanced":
            results[name] = balanced(*rest.split(", "))
        elif name == "training":
            results[name] = dict(
                one=losses("one"), context=losses("context"), resumed=losses("context", 12)
            )
        else:
            results[name] = compared(model, bool(rest))
    print(json.dumps(results))
