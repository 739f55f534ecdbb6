"""Loss, recall, speed and cache of a hybrid, a transformer and a linear model of equal size.

    python -m benchmarks.hybrids --data shakespeare.txt --out benchmarks/results/hybrids.json

The hybrid has three layers of Gated DeltaNet and one of attention; the others have only one kind.
All see the same tokens in the same order. The learning rate of each model and task is the best of
`RATES` on validation data; the results are measured on other data.

- text: loss on the last tenth of a text, in bytes.
- recall: multi-query associative recall (Arora et al. 2023). A problem contains N pairs of a random
  key and a random value, and then all keys in another order; the label of each is its value.
- decoding: time per token and bytes of the cache after 1,024 to 32,768 tokens, of one row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure

from benchmarks import timing
from transformer_jax import (
    GatedDelta,
    ModelConfig,
    build,
    cache_bytes,
    fork,
    generate,
    init_cache,
    init_params,
    make_step,
    num_params,
)
from transformer_jax.config import TrainConfig
from transformer_jax.decoding.generation import prefill
from transformer_jax.training import (
    Batch,
    batch_loss,
    evaluate,
    init_state,
    learning_rate_schedule,
    make_eval_step,
    make_optimizer,
    make_train_step,
)
from transformer_jax.training.batch import batch_scores
from transformer_jax.training.data import IGNORE, read

PATTERNS = {
    "transformer": ("attention",),
    "hybrid": ("gated_delta", "gated_delta", "gated_delta", "attention"),
    "linear": ("gated_delta",),
}
D_FF = {"transformer": 172, "hybrid": 168, "linear": 167}  # equal parameters, to 0.2 %
MOST = 32  # pairs in a row, which is one problem of 32 pairs, or eight of 4
ROWS, LENGTH = 16, 3 * MOST
PAIRS = (4, 8, 16, 32)
KEYS = 64  # the next 64 tokens are the values
LENGTHS = (1024, 8192, 32768)
NEW = 33  # tokens of a timed call
RATES = (1e-3, 3e-3, 1e-2)
TEXT_STEPS, RECALL_STEPS = 300, 500
COPY = ", copy of the cache"
STYLES = {
    "transformer": {"label": "transformer", "color": "#b9793a", "marker": "o"},
    "hybrid": {"label": "hybrid", "color": "#2e7a38", "marker": "s"},
    "linear": {"label": "linear", "color": "#2f6fbb", "marker": "^"},
}


def models() -> dict[str, ModelConfig]:
    """Return the models. Keys and values of Gated DeltaNet have widths that balance its gate."""
    sizes = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)
    return {
        name: ModelConfig(
            vocab_size=256, d_model=64, num_layers=4, num_heads=4, d_ff=D_FF[name], glu=True,
            activation="silu", norm="rmsnorm", use_bias=False, positions="rope",
            max_len=max(LENGTHS) + NEW, mixers=mixers,
            gated_delta=sizes if "gated_delta" in mixers else None,
        )
        for name, mixers in PATTERNS.items()
    }  # fmt: skip


def problems(rng: np.random.Generator, pairs: int, rows: int = ROWS) -> Batch:
    """Return rows with MOST / `pairs` problems each, which are documents of the row."""
    count = rows * MOST // pairs
    keys = np.argsort(rng.random((count, KEYS)))[:, :pairs]
    values = rng.integers(KEYS, 2 * KEYS, (count, pairs))
    order = np.argsort(rng.random((count, pairs)))
    queries, answers = (np.take_along_axis(x, order, axis=1) for x in (keys, values))
    facts = np.stack([keys, values], axis=2).reshape(count, 2 * pairs)
    tokens = np.concatenate([facts, queries], axis=1)
    labels = np.concatenate([np.full_like(facts, IGNORE), answers], axis=1)
    segments = np.arange(count)[:, None] % (MOST // pairs) + 1 + np.zeros_like(tokens)
    return Batch(*(jnp.asarray(x.reshape(rows, -1), jnp.int32) for x in (tokens, labels, segments)))


def windows(text: np.ndarray, starts: np.ndarray) -> Batch:
    """Return the windows of a text that start at `starts`."""
    index = starts[:, None] + np.arange(LENGTH)
    tokens, labels = (jnp.asarray(text[x], jnp.int32) for x in (index, index + 1))
    return Batch(tokens, labels, jnp.ones_like(tokens))  # segments, so that both tasks share a step


class Trainee:
    """Model and its compiled training and evaluation steps, which all runs share."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        # A rate of 1 is multiplied by an array, so that the steps of all rates are one program.
        unit = TrainConfig(model=config, schedule="constant", learning_rate=1.0, warmup_steps=0)
        self.optimizer = optax.inject_hyperparams(
            lambda rate: optax.chain(make_optimizer(unit), optax.scale(rate))
        )(rate=0.0)
        self.step = make_train_step(batch_loss(config), self.optimizer)
        self.scores = make_eval_step(batch_scores(config))

    def train(self, batches: Iterator[Batch], steps: int, rate: float) -> tuple[Any, list[float]]:
        """Return the parameters after these steps, and the loss of every step."""
        run = TrainConfig(
            model=self.config, steps=steps, learning_rate=rate, min_learning_rate=rate / 10
        )
        rates = np.asarray(jax.vmap(learning_rate_schedule(run))(jnp.arange(steps)))
        state, losses = init_state(self.config, self.optimizer, 0), []
        for rate_now in rates:
            state.opt_state.hyperparams["rate"] = jnp.asarray(rate_now)
            state, metrics = self.step(state, jax.tree.map(lambda x: x[None], next(batches)))
            losses.append(metrics.loss)
        return state.params, [float(x) for x in losses]


def best(
    trainee: Trainee,
    batches: Callable[[], Iterator[Batch]],
    steps: int,
    validate: Callable[[Any], float],
) -> tuple[Any, dict[str, Any]]:
    """Train once with each rate, and return the parameters with the lowest validation figure."""
    runs = {}
    for rate in RATES:
        params, losses = trainee.train(batches(), steps, rate)
        runs[rate] = validate(params), params, losses
        print(f"{steps} steps, learning rate {rate:g}: {runs[rate][0]:.3f}", flush=True)
    rate = min(runs, key=lambda rate: runs[rate][0])
    _, params, losses = runs[rate]
    parts = np.array_split(losses, min(steps, 20))
    return params, {
        "rate": rate,
        "validation": {str(rate): run[0] for rate, run in runs.items()},
        "training_loss": [float(part.mean()) for part in parts],
    }


def recall(trainee: Trainee, steps: int) -> dict[str, Any]:
    """Return the accuracy for each number of pairs, at the best rate on validation problems."""

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        while True:
            yield from (problems(rng, pairs) for pairs in PAIRS)

    def validate(params: Any) -> float:
        return -evaluate(trainee.scores, params, (), islice(batches(1), 2 * len(PAIRS))).accuracy

    params, found = best(trainee, partial(batches, 0), steps, validate)
    rng, accuracy = np.random.default_rng(2), {}
    for pairs in PAIRS:
        test = (problems(rng, pairs) for _ in range(4))
        accuracy[str(pairs)] = evaluate(trainee.scores, params, (), test).accuracy
    return found | {"accuracy": accuracy}


def language(trainee: Trainee, data: str, steps: int) -> dict[str, Any]:
    """Return the loss in nats per byte of a text, at the best rate on validation text."""
    text = np.frombuffer(b"".join(source.content for source in read(data)), np.uint8)
    training, validation, test = np.split(text, [len(text) * 9 // 10, len(text) * 19 // 20])

    def batches() -> Iterator[Batch]:
        rng = np.random.default_rng(0)
        while True:
            yield windows(training, rng.integers(0, len(training) - LENGTH, ROWS))

    def loss(held_out: np.ndarray, params: Any) -> float:
        starts = np.arange(0, len(held_out) - LENGTH, LENGTH)
        rows = (starts[i : i + ROWS] for i in range(0, len(starts) - ROWS + 1, ROWS))
        return evaluate(trainee.scores, params, (), (windows(held_out, x) for x in rows)).loss

    params, found = best(trainee, batches, steps, partial(loss, validation))
    return found | {"test_loss": loss(test, params)}


def decoding(length: int, rounds: int, seconds: float, clock: Callable[[], float]) -> Any:
    """Return the times of a prompt and of a new token after it, and the bytes of the cache."""
    prompt = jax.random.randint(jax.random.key(1), (1, length), 0, 256)
    found: dict[str, Any] = {}
    contenders = []
    for name, config in models().items():
        params, step = init_params(config, jax.random.key(0)), make_step(build(config))
        empty = init_cache(config, 1, length + NEW)

        def fill(params: Any, cache: Any, step: Any = step) -> Any:
            # with the logits, because the compiler would omit a last layer that fills only a cache
            return prefill(step, params, prompt, cache, np.array([length]), chunk=1024)

        read_prompt = jax.jit(fill).lower(params, empty).compile()
        start = clock()
        _, cache = jax.block_until_ready(read_prompt(params, empty))
        found[name] = {
            "prompt_s": clock() - start,
            "cache_bytes": cache_bytes(config, 1, length + NEW),
        }

        def tokens(params: Any = params, step: Any = step, cache: Any = cache) -> Any:
            return generate(step, params, [[0]], fork(cache, 1), num_tokens=NEW).tokens

        contenders.append(timing.of_jax(name, tokens))
        contenders.append(timing.of_jax(name + COPY, partial(fork, cache, 1)))
    times = timing.interleave(contenders, rounds=rounds, seconds=seconds, clock=clock)
    for name in found:
        pairs = zip(times[name].samples, times[name + COPY].samples, strict=True)
        own = timing.Timing(tuple((whole - copy) / NEW for whole, copy in pairs), 0.0)
        low, high = own.quartiles
        found[name] |= {"token_s": own.median, "quartiles_s": [low, high], "samples_s": own.samples}
    first = found["transformer"]["samples_s"]
    for one in found.values():
        samples = one.pop("samples_s")
        one["speedup"] = float(np.median([x / y for x, y in zip(first, samples, strict=True)]))
    return found


def report(results: dict[str, Any]) -> str:
    """Return the table of all results."""
    rows = [("parameters", *(f"{results['parameters'][name]:,}" for name in PATTERNS))]

    def add(title: str, part: dict[str, Any], show: Callable[[Any], str]) -> None:
        rows.append((title, *(show(part[name]) if name in part else "" for name in PATTERNS)))

    text, recalled = results["text"], results["recall"]
    add("text: learning rate", text, lambda x: f"{x['rate']:g}")
    add("text: nats per byte", text, lambda x: f"{x['test_loss']:.3f}")
    add("recall: learning rate", recalled, lambda x: f"{x['rate']:g}")
    for pairs in map(str, PAIRS):
        add(f"recall: {pairs} pairs", recalled, lambda x, n=pairs: f"{x['accuracy'][n]:.3f}")
    for length, found in results["decoding"].items():
        add(f"{length} tokens: KiB", found, lambda x: f"{x['cache_bytes'] / 1024:,.0f}")
        add(f"{length} tokens: prompt, s", found, lambda x: f"{x['prompt_s']:.2f}")
        add(f"{length} tokens: ms per token", found, lambda x: f"{x['token_s'] * 1e3:.2f}")
        add(f"{length} tokens: {timing.FASTER}", found, lambda x: f"{x['speedup']:.2f}")
    return timing.table(("", *PATTERNS), rows)


def draw(results: dict[str, Any]) -> Figure:
    """Draw the losses, the recall, the time per token and the bytes of the cache."""
    ink, quiet = "#1f2933", "#56616e"
    figure = Figure(figsize=(7.6, 6.0), layout="constrained", facecolor="#fbfaf7")
    axes = figure.subplots(2, 2).ravel()
    titles = (
        ("Training loss, nats per byte of text", "step"),
        ("Recall, fraction of correct values", "pairs in a problem"),
        ("Time per token, ms", "tokens in the cache"),
        ("Cache, MiB", "tokens in the cache"),
    )
    for one, (title, label) in zip(axes, titles, strict=True):
        one.set_title(title, loc="left", fontsize=11, color=ink, fontweight="bold")
        one.set_xlabel(label, color=quiet)
        one.set_facecolor("none")
        one.tick_params(colors=quiet, length=3)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#c9c3b8")
    lengths = [int(length) for length in results["decoding"]]
    for name, style in STYLES.items():
        found = [results["decoding"][str(length)][name] for length in lengths]
        if name in results["text"]:
            losses = results["text"][name]["training_loss"]
            steps = (np.arange(len(losses)) + 0.5) * results["steps"]["text"] / len(losses)
            axes[0].plot(steps, losses, **style)
        if name in results["recall"]:
            accuracy = results["recall"][name]["accuracy"]
            axes[1].plot(list(map(int, accuracy)), list(accuracy.values()), **style)
        axes[2].plot(lengths, [1e3 * x["token_s"] for x in found], **style)
        axes[3].plot(lengths, [x["cache_bytes"] / 2**20 for x in found], **style)
    for one, ticks in ((axes[1], PAIRS), (axes[2], lengths), (axes[3], lengths)):
        one.set_xscale("log", base=2)
        one.set_xticks(ticks, [f"{x:,}" for x in ticks])
        one.minorticks_off()
    axes[1].set_ylim(0, 1.04)
    axes[2].set_ylim(0)
    axes[3].set_yscale("log")
    axes[3].legend(frameon=False, labelcolor=ink)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", default="shakespeare", help="text file, or shakespeare, which is downloaded once")
    add("--quick", action="store_true", help="four training steps and at most 256 tokens")
    add("--steps", type=int, help=f"training steps of each run on text ({TEXT_STEPS})")
    add("--recall-steps", type=int, help=f"training steps of each run on recall ({RECALL_STEPS})")
    add("--seconds", type=float, default=40.0, help="about the longest of a decoding case")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, help="write the figures to this JSON file")
    add("--picture", type=Path, help="write the picture to this SVG file")
    options = parser.parse_args(argv)
    clock, before = timing.prepare(one_core=options.one_core), timing.environment()
    print(timing.headline(before), flush=True)
    before["limits"] = timing.limits("float32", clock)
    usual = (4, 4) if options.quick else (TEXT_STEPS, RECALL_STEPS)
    steps = dict(text=options.steps or usual[0], recall=options.recall_steps or usual[1])
    results: dict[str, Any] = {
        "steps": steps, "tokens_per_step": ROWS * LENGTH,
        "parameters": {name: num_params(config) for name, config in models().items()},
        "text": {}, "recall": {}, "decoding": {},
    }  # fmt: skip

    def write() -> None:  # after each part, because a run takes minutes
        if options.out is not None:
            timing.write(options.out, (__doc__ or "").splitlines()[0], before, results)

    for length in (64, 256) if options.quick else LENGTHS:
        rounds = 3 if options.quick else 10
        results["decoding"][str(length)] = decoding(length, rounds, options.seconds, clock)
        write()
    trainees = {name: Trainee(config) for name, config in models().items()}
    for name, trainee in trainees.items():
        results["text"][name] = language(trainee, options.data, steps["text"])
        write()
    for name, trainee in trainees.items():
        results["recall"][name] = recall(trainee, steps["recall"])
        write()
    print(report(results))
    if options.picture is not None:
        # a fixed salt and no date, so that equal figures result in equal files
        with matplotlib.rc_context({"svg.hashsalt": "hybrids", "svg.fonttype": "none"}):
            draw(results).savefig(options.picture, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
