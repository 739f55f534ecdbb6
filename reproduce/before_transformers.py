"""Train the models before the transformer, and a transformer as large, on one text.

    python -m reproduce.before_transformers --data input.txt --json figures.json
    python -m reproduce.before_transformers --data input.txt --search

The last tenth of the text is held out. Every trained model has the number of parameters of the
decoder, within 3 %, and reads the same windows of characters; n-grams are counted over the whole
training part instead. The held-out text is read in rows of `context` characters, each as if it
stood alone: no model sees more than `context` characters, and the first of a row see fewer.

Prints a Markdown table: model, parameters, tokens read, held-out loss in nats and bits a character,
perplexity exp(nats), and the wall and CPU time of the run with its compilation and its evaluation.

LEARNING_RATES are the best of SEARCHED, for each model alone: `--search` trains each with every one
of them for a fifth of the steps, on the first nine tenths of the training part, and prints the loss
on the last tenth of it. The held-out text is not read for that.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.timing import environment
from transformer_jax import ModelConfig, num_params
from transformer_jax.cli.process import keep_freed_memory
from transformer_jax.config import NgramConfig, RecurrentConfig, Rope, TrainConfig, WindowConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import load_task

ORDERS = (5, 6)
"""Orders of the n-grams."""

SEARCHED = (2e-3, 4e-3, 8e-3, 1.6e-2)
"""Peaks of the learning rate that the search tries."""

LEARNING_RATES = {"window": 1.6e-2, "rnn": 8e-3, "lstm": 1.6e-2, "gru": 1.6e-2, "decoder": 1.6e-2}
"""The best of SEARCHED for each model, on tiny Shakespeare."""

HEADINGS = (
    "model", "parameters", "tokens read", "nats", "bits", "perplexity", "seconds", "CPU seconds",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the command, and return a record of each run."""
    arguments = read_arguments(argv)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.search:
            return search(arguments, Path(folder))
        records = []
        for name, config in training_runs(arguments, folder):
            print(f"{name} ...", file=sys.stderr, flush=True)
            records.append(run(name, config))
    print(markdown_table(HEADINGS, [table_row(record) for record in records]))
    if arguments.json:
        found = {"runs": records, "environment": environment()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return records


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--d-model", type=int, default=64, help="of the decoder, and so all sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", nargs="+", choices=list(LEARNING_RATES), default=list(LEARNING_RATES),
        help="to train, beside the n-grams; default: all",
    )  # fmt: skip
    parser.add_argument("--search", action="store_true", help="compare learning rates instead")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def training_runs(arguments: argparse.Namespace, folder: str) -> list[tuple[str, TrainConfig]]:
    """Return the runs by name, each with a folder of its own."""
    base = TrainConfig(
        data=arguments.data,
        batch_size=arguments.batch_size,
        context=arguments.context,
        model=ModelConfig(max_len=arguments.context),
        warmup_steps=arguments.steps // 10,
        eval_every=arguments.steps,
        checkpoint_every=arguments.steps,
        sample_tokens=0,
        seed=arguments.seed,
    )
    vocab_size = load_task(base).config.model.vocab_size
    runs = []
    for order in ORDERS:
        model = NgramConfig(vocab_size=vocab_size, order=order)
        counting = dataclasses.replace(base, model=model, steps=1)
        runs.append((f"n-gram, order {order}", counting))
    models = equal_models(vocab_size, arguments.d_model, arguments.context)
    for name in arguments.models:
        trained = with_rate(base, LEARNING_RATES[name])
        trained = dataclasses.replace(trained, model=models[name], steps=arguments.steps)
        runs.append((name, trained))
    return [
        (name, dataclasses.replace(config, out=f"{folder}/{number}"))
        for number, (name, config) in enumerate(runs)
    ]


def with_rate(config: TrainConfig, rate: float) -> TrainConfig:
    """Return the config with a peak of the learning rate, of which the end is a tenth."""
    return dataclasses.replace(config, learning_rate=rate, min_learning_rate=rate / 10)


def equal_models(vocab_size: int, d_model: int, context: int) -> dict[str, AnyModelConfig]:
    """Return a decoder, and models of its number of parameters within 3 %, by name."""
    decoder = ModelConfig(
        vocab_size=vocab_size, d_model=d_model, num_layers=4, num_heads=4, max_len=context,
        use_bias=False, positions=Rope(), init_std=0.1,
    )  # fmt: skip
    wanted = num_params(decoder)
    models: dict[str, AnyModelConfig] = {
        "window": nearest(wanted, lambda width: WindowConfig(
            vocab_size=vocab_size, context=16, d_embed=d_model // 2, d_hidden=width
        ))
    }  # fmt: skip
    cell: Literal["rnn", "lstm", "gru"]
    for cell in ("rnn", "lstm", "gru"):

        def recurrent(width: int, cell: Literal["rnn", "lstm", "gru"] = cell) -> RecurrentConfig:
            return RecurrentConfig(
                vocab_size=vocab_size, cell=cell, d_embed=d_model, d_hidden=width
            )

        models[cell] = nearest(wanted, recurrent)
    models["decoder"] = decoder
    for name, model in models.items():
        if abs(num_params(model) / wanted - 1) > 0.03:
            raise SystemExit(
                f"d-model is {d_model}: no {name} has within 3 % of {wanted:,} parameters"
            )
    return models


def nearest(wanted: int, make: Callable[[int], AnyModelConfig]) -> AnyModelConfig:
    """Return the model of a width whose number of parameters is nearest to the wanted one."""
    widths = range(1, 4096)
    wider = bisect.bisect_left(widths, wanted, key=lambda width: num_params(make(width)))
    near = (make(width) for width in widths[max(wider - 1, 0) : wider + 1])
    return min(near, key=lambda model: abs(num_params(model) - wanted))


def run(name: str, config: TrainConfig) -> dict[str, Any]:
    """Train a model and return its figures."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = fit(config)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    model, nats = result.config.model, result.val_loss_per_character
    if nats is None:
        raise SystemExit(f"{name}: the held-out loss is not finite")
    if isinstance(model, NgramConfig):
        (text,) = load_task(config).documents()
        parameters, tokens = sum(model.nodes or ()), len(text)
    else:
        parameters = num_params(model)
        tokens = config.steps * config.batch_size * config.sequence_len
    return {
        "model": name,
        "config": dataclasses.asdict(model),
        "learning_rate": None if isinstance(model, NgramConfig) else config.learning_rate,
        "steps": config.steps,
        "seed": config.seed,
        "parameters": parameters,
        "counted": isinstance(model, NgramConfig),
        "tokens": tokens,
        "nats": nats,
        "bits": nats / math.log(2),
        "perplexity": math.exp(nats),
        "wall_s": wall,
        "cpu_s": cpu,
    }


def table_row(record: dict[str, Any]) -> list[str]:
    """Return the cells of a run, in the order of HEADINGS."""
    kind = " n-grams" if record["counted"] else ""
    return [
        record["model"],
        f"{record['parameters']:,}{kind}",
        f"{record['tokens']:,}",
        f"{record['nats']:.3f}",
        f"{record['bits']:.3f}",
        f"{record['perplexity']:.2f}",
        f"{record['wall_s']:.0f}",
        f"{record['cpu_s']:.0f}",
    ]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, the first column to the left and the others to the right."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def search(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train every model with every learning rate for a fifth of the steps, and print the losses."""
    text = Path(arguments.data).read_text(encoding="utf-8")
    training = folder / "training.txt"
    training.write_text(text[: int(len(text) * 0.9)], encoding="utf-8")
    steps = max(arguments.steps // 5, 1)
    shorter = {**vars(arguments), "data": str(training), "steps": steps}
    records = []
    for name, config in training_runs(argparse.Namespace(**shorter), str(folder)):
        if isinstance(config.model, NgramConfig):
            continue
        for rate in SEARCHED:
            trained = dataclasses.replace(with_rate(config, rate), out=f"{config.out}-{rate}")
            records.append(run(name, trained))
            print(f"{name}, {rate:g}: {records[-1]['nats']:.3f} nats", flush=True)
    return records


if __name__ == "__main__":
    main()
