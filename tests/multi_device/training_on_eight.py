"""Script of test_meshes.py with eight devices: training on every layout, and on one device.

Prints JSON: for each case the losses of the steps, the held-out loss, a sample, and the sharding of
parameters; for the case "random", the random numbers of each layout.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from transformer_jax.config import Adafactor, MeshConfig, ModelConfig, Muon, Rope, TrainConfig
from transformer_jax.config.tasks import ClassifyTask, MaskedTask, ReverseTask
from transformer_jax.models.factory import init_params
from transformer_jax.models.functional import dropout
from transformer_jax.training.batch import Batch, batch_loss
from transformer_jax.training.loop import Result, fit
from transformer_jax.training.placement import make_placement
from transformer_jax.training.step import init_state, make_train_step

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
MODEL = ModelConfig(
    d_model=32, num_heads=4, num_kv_heads=2, num_layers=2, d_ff=48, max_len=12, positions=Rope(),
    glu=True, dropout=0.2, attention_dropout=0.1,
)  # fmt: skip
LAYOUTS: dict[str, MeshConfig | None] = {
    "one": None,
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(fsdp=8),
    "fsdp, tensor": MeshConfig(fsdp=2, tensor=4),
    "all": MeshConfig(data=2, fsdp=2, tensor=2),
}


def run(
    folder: Path,
    mesh: MeshConfig | None,
    stop_after: int | None = None,
    file: str = "text.txt",
    **changes: Any,
) -> tuple[TrainConfig, Result]:
    (folder / "text.txt").write_text(TEXT)
    words = TEXT.split()[:8]
    lines = [f"{'short' if len(a) < 4 else 'long'}\t{a} {b}\n" for a in words for b in words]
    (folder / "labels.tsv").write_text("".join(lines))
    config = TrainConfig(
        data=str(folder / file), model=MODEL, out=str(folder / "run"), steps=6, batch_size=8,
        accumulation=2, eval_every=3, checkpoint_every=3, log_every=1, warmup_steps=2,
        sample_tokens=5, ema_decay=0.9, mesh=mesh,
    )  # fmt: skip
    config = replace(config, **changes)
    steps = itertools.count(1)
    return config, fit(config, stop=lambda: next(steps) == stop_after)


def told(config: TrainConfig, result: Result) -> dict[str, Any]:
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    split = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            "whole" if leaf.sharding.is_fully_replicated else str(leaf.sharding.spec)
        )
        for path, leaf in jax.tree_util.tree_flatten_with_path(result.state)[0]
    }
    return {
        "losses": [json.loads(line)["loss"] for line in lines],
        "held out": result.val_loss,
        "sample": result.sample,
        "split": split,
    }


CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "scanned, rematerialised, chunks": dict(
        model=replace(MODEL, scan_layers=True, remat="full"), loss_chunk=5, z_loss=1e-3
    ),
    "muon, bfloat16 parameters": dict(optimizer=Muon(), param_dtype="bfloat16"),
    "adafactor": dict(optimizer=Adafactor(smallest_factored=8)),
    "reverse": dict(
        task=ReverseTask(),
        model=replace(MODEL, kind="encoder-decoder", max_len=24),
        data="python-docs",
    ),
    "masked tokens": dict(task=MaskedTask(), model=replace(MODEL, kind="encoder", max_len=16)),
    "classes of a decoder": dict(
        task=ClassifyTask(), model=replace(MODEL, max_len=16), file="labels.tsv"
    ),
}


def main(names: list[str]) -> None:
    results = {}
    for change, changes in CHANGES.items():
        for layout, mesh in LAYOUTS.items():
            name = f"{layout}; {change}" if change else layout
            if not names or name in names:
                with tempfile.TemporaryDirectory() as folder:
                    results[name] = told(*run(Path(folder), mesh, **changes))
    if not names or "moved" in names:
        with tempfile.TemporaryDirectory() as folder:
            config, _ = run(Path(folder), LAYOUTS["all"], stop_after=3)
            moved = replace(config, mesh=LAYOUTS["fsdp, tensor"])
            results["moved"] = told(moved, fit(moved, resume=True))
    if not names or "work" in names:
        results["work"] = {layout: work(mesh) for layout, mesh in LAYOUTS.items()}
    if not names or "random" in names:
        results["random"] = random_numbers()
    print(json.dumps(results))


def work(mesh: MeshConfig | None) -> tuple[float, float]:
    """Return a step's operations on all devices, and the share of parameters one device gathers."""
    model = replace(
        MODEL, num_kv_heads=4, d_model=128, d_ff=512, dropout=0.0, attention_dropout=0.0
    )
    placement, optimizer = make_placement(mesh), optax.sgd(0.1)
    state = jax.eval_shape(partial(init_state, model, optimizer), np.uint32(0))
    tokens = np.zeros((1, 16, 12), np.int32)
    batch = placement.rows(Batch(tokens, tokens), axis=1)
    step = make_train_step(batch_loss(model), optimizer)
    program = step.lower(placement.state(state), batch).compile()
    operations = float(program.cost_analysis()["flops"]) * (1 if mesh is None else mesh.devices)
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program.as_text())
    gathered = sum(math.prod(map(int, shape.split(","))) for shape in shapes)
    return operations, gathered / sum(leaf.size for leaf in jax.tree.leaves(state.params))


def drawn(mesh: MeshConfig | None) -> tuple[Any, str]:
    """Return the initial parameters of a run, and a digest of the weights that dropout keeps."""
    placement = make_placement(mesh)
    fresh = partial(init_params, MODEL)
    shardings = placement.shardings(jax.eval_shape(fresh, jax.random.key(3)))
    params = jax.jit(fresh, out_shardings=shardings)(placement.whole(jax.random.key(3)))
    ones = placement.rows(np.ones((16, 5, 3), np.float32), axis=0)
    left = jax.jit(dropout, static_argnums=1)(ones, 0.4, placement.whole(jax.random.key(5)))
    digest = hashlib.sha256(np.asarray(left).tobytes()).hexdigest()
    return jax.tree.map(np.asarray, params), digest


def random_numbers() -> dict[str, Any]:
    """Return the distance of initial parameters from those of one device, and dropout digests."""
    found = {layout: drawn(mesh) for layout, mesh in LAYOUTS.items()}
    first = found["one"][0]
    apart = [
        float(np.abs(one - two).max() / np.abs(two).max())
        for params, _ in found.values()
        for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(first), strict=True)
        if two.any()
    ]
    return {"apart": max(apart), "dropout": [digest for _, digest in found.values()]}


main(sys.argv[1:])
