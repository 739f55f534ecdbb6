"""Script of test_meshes.py with four devices: probes, lenses and dictionaries trained on meshes.

Prints JSON: for each probe and lens the largest difference from one device, relative to its largest
value; for each dictionary, on one device and on a mesh, losses, norms and scores.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_jax as tj
from transformer_jax import interpret
from transformer_jax.config import MeshConfig
from transformer_jax.config.optimizers import AdamW
from transformer_jax.training import fit

CONFIG = tj.ModelConfig(
    vocab_size=24, d_model=16, num_layers=2, num_heads=4, max_len=13, init_std=0.3,
    positions="rope",
)  # fmt: skip
STREAMS = "block_0/residual", "block_1/residual"


def learnt(config: tj.ModelConfig, params: Any, tokens: jax.Array) -> dict[str, Any]:
    """Capture streams and fit probes and lenses, for classes and for numbers."""
    model, key = tj.build(config), jax.random.key(1)
    apply = jax.jit(lambda p, t: model.apply({"params": p}, t, capture=STREAMS)[2])
    captured = apply(params, tokens)
    assert captured[STREAMS[0]].sharding.is_fully_replicated == tokens.sharding.is_fully_replicated
    streams = jnp.stack([captured[name] for name in STREAMS])
    classes, numbers = tokens % 3, tokens.astype(jnp.float32)
    probe = partial(interpret.probe, num_classes=3, steps=40, key=key)
    return {
        "captured": streams,
        "probes of classes": jax.vmap(lambda x: probe(x, classes)[:3])(streams),
        "probe of numbers": interpret.probe(streams[1], numbers)[:3],
        "lens": interpret.fit_tuned_lens(
            model, params, tokens, key=key, steps=5, batch_size=8, learning_rate=0.1
        ),
    }


def apart(found: Any, expected: Any) -> float:
    def of(x: jax.Array, y: jax.Array) -> float:
        wanted = np.asarray(y, np.float64)
        assert np.abs(wanted).max() > 0
        return float(np.abs(np.asarray(x, np.float64) - wanted).max() / np.abs(wanted).max())

    return max(jax.tree.leaves(jax.tree.map(of, found, expected)))


def fitted() -> dict[str, float]:
    differences = {}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 7)), jnp.int32)
    for axes, scan in ((AxisType.Explicit, False), (AxisType.Auto, True)):
        config = replace(CONFIG, scan_layers=scan)
        params = tj.init_params(config, jax.random.key(3))
        one = learnt(config, params, tokens)
        mesh = jax.make_mesh((4,), ("data",), axis_types=(axes,))
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        split = learnt(config, whole, jax.device_put(tokens, NamedSharding(mesh, P("data"))))
        for name in one:
            differences[f"{name}, {axes.name}"] = apart(split[name], one[name])
    return differences


WAYS: dict[str, tuple[MeshConfig, dict[str, Any]]] = {
    "autoencoder": (MeshConfig(data=4), dict(place="block_0/residual", active=4)),
    "transcoder": (
        MeshConfig(data=2, fsdp=2),
        dict(place="block_1/feed_forward/input", target="block_1/feed_forward/output", l1=0.1),
    ),
}
"""Mesh and config fields of each task."""


def dictionaries(folder: Path) -> dict[str, dict[str, Any]]:
    """Train each dictionary on one device and on a mesh, for the same model."""
    (folder / "text.txt").write_text("the cat sat on the mat. the dog sat on the log. " * 30)
    settings: dict[str, Any] = dict(
        data=str(folder / "text.txt"), batch_size=4, context=8, sample_tokens=0, log_every=1,
    )  # fmt: skip
    base = str(folder / "model")
    fit(tj.TrainConfig(model=CONFIG, out=base, steps=2, mesh=MeshConfig(data=4), **settings))
    found: dict[str, dict[str, Any]] = {}
    for way, (split, fields) in WAYS.items():
        task = interpret.DictionaryTask(of=base, features=37, **fields)
        for name, mesh in (("one", None), ("mesh", split)):
            out = folder / f"{way} {name}"
            config = tj.TrainConfig(
                model=tj.load(base).config, out=str(out), steps=4, accumulation=2, mesh=mesh,
                optimizer=AdamW(weight_decay=0.0), learning_rate=1e-2, eval_every=4, **settings,
            )  # fmt: skip
            result = fit(config, task=task)
            lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            own = interpret.load_dictionary(out)
            norms = [float(jnp.linalg.norm(x)) for x in (own.encoder, own.decoder, own.centre)]
            found[f"{way}; {name}"] = dict(
                losses=[*(line["loss"] for line in lines), result.val_loss],
                norms=norms,
                scores=[result.scores[key] for key in ("variance_explained", "l0")],
            )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(dict(fitted=fitted(), dictionaries=dictionaries(Path(folder)))))


if __name__ == "__main__":
    main()
