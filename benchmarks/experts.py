"""Costs of a mixture of experts in matrix products, a decoding step, and training.

    python -m benchmarks.experts --data tiny_shakespeare.txt
    python -m benchmarks.experts --part products

- products: rows are sorted by expert and multiplied by the matrix of their expert, in blocks as in
the model and with `jax.lax.ragged_dot`. This is compared with the product of all rows and one
matrix. The results are medians of alternating calls. - decode: the time per token for increasing
numbers of experts, of which 2 are chosen, is compared with a dense model with the same number of
active parameters. The bytes that XLA counts are also printed, except those that the compiled
kernels of a dense model read. - train: a model with experts is trained for the same number of steps
as two dense models, one with the same number of active parameters and one with the same total
number. How evenly experts are used on held-out text is also measured, with and without balance
loss.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from transformer_jax.config import Experts, ModelConfig, TrainConfig
from transformer_jax.models.experts import by_expert, route
from transformer_jax.training import fit

MODEL = ModelConfig(
    d_model=128, num_layers=4, num_heads=4, max_len=128, norm="rmsnorm", activation="silu",
    glu=True, use_bias=False, positions="rope", d_ff=344,
)  # fmt: skip
EXPERTS = Experts(count=8, top_k=2, d_ff=172)


def medians(calls: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Return the median time in seconds of each call. The calls alternate."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        jax.block_until_ready(calls[name]())
    for _ in range(times):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            spent[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in spent.items()}


def products(times: int) -> None:
    rows, width, hidden, count = 8192, 256, 512, 8
    x, w = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(rows, width), (count, width, hidden)])
    )
    chosen = jnp.sort(jax.random.randint(jax.random.key(2), (rows,), 0, count))
    owned = jnp.bincount(chosen, length=count)
    ways: dict[str, Callable[..., jax.Array]] = {
        "one matrix for all rows": lambda x, w, *_: x @ w[0],
        "blocks": lambda x, w, chosen, _: by_expert(
            lambda x, own, _: x @ own[0][0], x, chosen, ((w, None),)
        ),
        "jax.lax.ragged_dot": lambda x, w, _, owned: jax.lax.ragged_dot(x, w, owned),
    }
    print(f"{rows} rows of {width}, {count} experts of {hidden}, f32")
    for what in ("forward", "gradient"):
        calls = {}
        for name, way in ways.items():
            one = jax.jit(way)
            if what == "gradient":
                one = jax.jit(jax.grad(lambda *a, way=way: (way(*a) ** 2).sum(), (0, 1)))
            calls[name] = partial(one, x, w, chosen, owned)
        for name, seconds in medians(calls, times).items():
            print(f"  {what:8}  {name:24} {1e3 * seconds:7.1f} ms")


def decode(times: int) -> None:
    wide = replace(MODEL, d_model=512, num_heads=8, d_ff=2048)
    models = {"dense": wide}
    for count in (4, 8, 32):
        models[f"2 of {count}"] = replace(
            wide, d_ff=None, experts=Experts(count=count, top_k=2, d_ff=1024)
        )
    token = np.zeros((1, 1), np.int32)
    calls, said = {}, {}
    for name, config in models.items():
        params, cache = tj.init_params(config, jax.random.key(0)), tj.init_cache(config, 1, 128)
        model = tj.build(config)
        step = jax.jit(lambda p, c, t, model=model: model.apply({"params": p}, t, cache=c))
        compiled = step.lower(params, cache, token).compile()
        count = sum(x.size for x in jax.tree.leaves(params))
        moved = compiled.cost_analysis()["bytes accessed"]
        said[name] = f"{count / 1e6:7.1f} M parameters, {moved / 2**20:7.1f} MiB read and written"
        calls[name] = partial(compiled, params, cache, token)
    print("one token of one row, after none")
    for name, seconds in medians(calls, 10 * times).items():
        print(f"  {name:10} {said[name]}, {1e3 * seconds:6.2f} ms")


def used(config: ModelConfig, params: Any, text: np.ndarray) -> list[float]:
    """Return, for each block, the largest fraction of the choices that one expert receives."""
    model: Any = tj.build(config)
    asked = "block_*/feed_forward/router"
    found = jax.jit(partial(model.apply, capture=(asked,)))({"params": params}, text)[2]
    shares = []
    for logits in found.values():
        assert config.experts is not None
        chosen = np.asarray(route(config.experts, logits)[0]).ravel()
        shares.append(
            float(np.bincount(chosen, minlength=config.experts.count).max() / len(chosen))
        )
    return shares


def train(data: str, steps: int, seeds: int) -> None:
    sparse = replace(MODEL, d_ff=None)
    models = {
        "dense, as many active": MODEL,
        "dense, as many in all": replace(MODEL, d_ff=344 * 4),
        "2 of 8, balance 0.01": replace(sparse, experts=EXPERTS),
        "2 of 8, balance 0": replace(sparse, experts=replace(EXPERTS, balance_loss=0.0)),
    }
    print(f"{steps} steps of 16 x 128 characters; held-out nats per character, {seeds} seeds")
    for name, config in models.items():
        losses, seconds, shares = [], [], list[float]()
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                run = TrainConfig(
                    data=data, out=str(Path(folder) / "run"), model=config, steps=steps, seed=seed,
                    batch_size=16, learning_rate=2e-3, tokenizer="char", eval_every=steps,
                    log_every=steps, checkpoint_every=steps, sample_tokens=0,
                )  # fmt: skip
                start = time.perf_counter()
                result = fit(run)
                seconds.append(time.perf_counter() - start)
            losses.append(result.val_loss or float("nan"))
            if config.experts is not None:
                text = Path(data).read_text(encoding="utf-8")[-16 * 128 :]
                known = {c: i for i, c in enumerate(sorted(set(Path(data).read_text("utf-8"))))}
                ids = np.array([known[c] for c in text], np.int32).reshape(16, 128)
                shares += used(result.config.model, result.state.params, ids)
        count = tj.num_params(result.config.model)
        largest = f", largest share of an expert {max(shares):.2f} (even: 0.12)" if shares else ""
        print(
            f"  {name:22} {count / 1e6:5.2f} M: {np.mean(losses):.3f} "
            f"({min(losses):.3f}-{max(losses):.3f}), {np.median(seconds):5.0f} s{largest}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("products", "decode", "train"))
    parser.add_argument("--data", help="a text file, for the part train")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if options.part in (None, "products"):
        products(options.times)
    if options.part in (None, "decode"):
        decode(options.times)
    if options.part == "train" and options.data is None:
        parser.error("--part train needs --data")
    if options.part in (None, "train") and options.data is not None:
        train(options.data, options.steps, options.seeds)


if __name__ == "__main__":
    main()
