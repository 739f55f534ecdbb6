"""Train sequence-to-sequence models on real pairs, and evaluate them on the test part.

    python -m reproduce.pairs --set multi30k --data multi30k --task seq2seq
    python -m reproduce.pairs --set g2p --data g2p --language hun --task prefix

The set multi30k contains 29,000 German sentences with English translations (Elliott et al. 2016).
Its folder contains train, val, and test_2016_flickr, each as .de and .en. Text is lowercased, and
words, numbers, and punctuation marks are separated by spaces. The set g2p contains words and their
pronunciations (SIGMORPHON 2021, task 1). Its folder contains LANGUAGE_train.tsv, LANGUAGE_dev.tsv,
and LANGUAGE_test.tsv with lines "word TAB sounds". Letters are separated by spaces, as are sounds,
so that a token is a letter or a sound.

The task seq2seq trains an encoder-decoder. The task prefix trains a decoder that reads source and
target in one row. The run is the same as a run of `train.py` with the settings in RECIPES, and it
has the same kind of run folder. The command prints the metrics on the test part, decoded with 4
beams, and some of the generated targets. It plots the held-out loss during training (curve.png) and
the attention of the generated tokens (alignment.png). A run that is already complete is only
evaluated again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import environment
from transformer_jax import ModelConfig, num_params
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.cli.process import keep_freed_memory
from transformer_jax.config import Rope, TrainConfig
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    draw_matrix,
    label,
    new_figure,
    print_table,
    save_picture,
)
from transformer_jax.loading import TextModel, load_run
from transformer_jax.text.evaluation import judge_file
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import Tokenizers
from transformer_jax.training.tasks.answers import answer_sources

SHOWN = 6
"""Number of test pairs to print. The alignments of the first two are also plotted."""

LONGEST = 24
"""Maximum number of generated tokens in a plot."""

ALL = 2**31 - 1

MODELS = {
    ("multi30k", "seq2seq"): ModelConfig(
        kind="encoder-decoder", d_model=256, num_layers=3, num_heads=8, d_ff=512, max_len=64,
        positions=Rope(), dropout=0.2,
    ),
    ("multi30k", "prefix"): ModelConfig(
        d_model=128, num_layers=4, num_heads=4, d_ff=512, max_len=128, positions=Rope(),
        dropout=0.1, init_std=0.1,
    ),
    ("g2p", "seq2seq"): ModelConfig(
        kind="encoder-decoder", d_model=128, num_layers=2, num_heads=4, d_ff=256, max_len=64,
        positions=Rope(), dropout=0.2, use_bias=False, init_std=0.1,
    ),
    ("g2p", "prefix"): ModelConfig(
        d_model=128, num_layers=4, num_heads=4, d_ff=256, max_len=64, positions=Rope(),
        dropout=0.2, use_bias=False, init_std=0.1,
    ),
}  # fmt: skip

RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    ("multi30k", "seq2seq"): dict(steps=2500, batch_size=128, learning_rate=1e-3),
    ("multi30k", "prefix"): dict(steps=1500, batch_size=32, learning_rate=2e-3),
    ("g2p", "seq2seq"): dict(steps=2500, batch_size=64, learning_rate=2e-3),
    ("g2p", "prefix"): dict(steps=2500, batch_size=16, learning_rate=2e-3),
}
"""Training settings. A step of `prefix` reads packed rows, which contain about 4 pairs each."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command and return the metrics and sizes of the run."""
    arguments = read_arguments(argv)
    keep_freed_memory()
    files = write_files(arguments)
    config = training_config(arguments, files)
    seconds = train(config)
    model = load_run(config.out)
    found = judge(model, files["test"]) | sizes(model) | seconds
    print_table(["measure", "value"], [[name, f"{value:.6g}"] for name, value in found.items()])
    pairs = list(zip(*(lines(file) for file in files["test"]), strict=True))[:SHOWN]
    written = answer_sources(model.run, tokenizers(model), model.params, [s for s, _ in pairs])
    for (source, target), text in zip(pairs, written, strict=True):
        print(f"\n  {source}\n  = {target}\n  > {text}")
    draw_curve(arguments, config)
    drawn = [(source, text) for (source, _), text in zip(pairs, written, strict=True)]
    draw_alignment(arguments, model, drawn[:2])
    record = {"figures": found, "environment": environment()}
    (Path(config.out) / "test.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("multi30k", "g2p"), required=True)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the set")
    parser.add_argument("--language", default="hun", help="of g2p")
    parser.add_argument("--task", choices=("seq2seq", "prefix"), default="seq2seq")
    parser.add_argument("--steps", type=int, help="default: those of RECIPES")
    parser.add_argument("--d-model", type=int, help="default: that of RECIPES")
    parser.add_argument("--out", type=Path, default=Path("runs/pairs"), help="folder of the runs")
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="of the pictures")
    parser.add_argument("--dark", action="store_true", help="an svg for dark pages too")
    arguments = parser.parse_args(argv)
    name = arguments.set if arguments.set == "multi30k" else f"g2p_{arguments.language}"
    arguments.texts = arguments.out / name
    arguments.out = arguments.out / f"{name}_{arguments.task}"
    return arguments


def write_files(arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Write the parts of the set with spaces between tokens, and return both files of each part."""
    arguments.texts.mkdir(parents=True, exist_ok=True)
    files = {}
    for part in ("train", "val", "test"):
        texts = (translations if arguments.set == "multi30k" else sounds)(arguments, part)
        stem = arguments.texts / part
        files[part] = f"{stem}.source", f"{stem}.target"
        for file, column in zip(files[part], texts, strict=True):
            Path(file).write_text("".join(line + "\n" for line in column), encoding="utf-8")
    return files


def lines(file: str | Path) -> list[str]:
    """Return the lines of a file, or exit with a message if it does not exist."""
    if not Path(file).is_file():
        raise SystemExit(f"pairs: {file}: no such file; --data is the folder of the set")
    return Path(file).read_text(encoding="utf-8").removesuffix("\n").split("\n")


def translations(arguments: argparse.Namespace, part: str) -> list[list[str]]:
    """Return the German and English sentences in a part of multi30k."""
    stem = "test_2016_flickr" if part == "test" else part
    columns = [lines(arguments.data / f"{stem}.{language}") for language in ("de", "en")]
    return [[" ".join(re.findall(r"\w+|[^\w\s]", line.lower())) for line in c] for c in columns]


def sounds(arguments: argparse.Namespace, part: str) -> list[list[str]]:
    """Return the words, with spaces between letters, and the sounds in a part of g2p."""
    stem = "dev" if part == "val" else part
    pairs = [
        line.split("\t") for line in lines(arguments.data / f"{arguments.language}_{stem}.tsv")
    ]
    return [[" ".join(word) for word, _ in pairs], [spoken for _, spoken in pairs]]


def training_config(
    arguments: argparse.Namespace, files: dict[str, tuple[str, str]]
) -> TrainConfig:
    """Return the config of the run for a set and a task."""
    given = dict(targets=files["train"][1], val_targets=files["val"][1], judged=0)
    task = Seq2SeqTask(vocabulary="separate", **given)
    one_row = arguments.task == "prefix"
    key = arguments.set, arguments.task
    recipe = dict(RECIPES[key])
    recipe["steps"] = arguments.steps or recipe["steps"]
    model = MODELS[key]
    if arguments.d_model is not None:
        model = dataclasses.replace(model, d_model=arguments.d_model)
    return TrainConfig(
        task=PrefixTask(**given) if one_row else task,
        model=model,
        data=files["train"][0],
        val_data=files["val"][0],
        tokenizer="word",
        word_count=2 if arguments.set == "multi30k" else 1,
        label_smoothing=0.1,
        warmup_steps=min(300, recipe["steps"] // 8),
        eval_every=max(1, recipe["steps"] // 10),
        checkpoint_every=recipe["steps"],
        sample_tokens=0,
        out=str(arguments.out),
        **recipe,
    )


def train(config: TrainConfig) -> dict[str, float]:
    """Train the run unless it is complete, and return the training time in seconds."""
    folder = RunFolder(Path(config.out))
    done = folder.read_metrics() if folder.metrics_file.exists() else []
    if done and done[-1]["step"] >= config.steps:
        print(f"{config.out} is complete: judged again")
        return {}
    wall, cpu = time.perf_counter(), time.process_time()
    fit(config, resume=bool(done))
    return {"seconds": time.perf_counter() - wall, "CPU seconds": time.process_time() - cpu}


def tokenizers(model: TextModel) -> Tokenizers:
    """Return the tokenizers for the targets and sources of a run."""
    return Tokenizers(model.tokenizer, model.source_tokenizer)


def judge(model: TextModel, files: tuple[str, str]) -> dict[str, float]:
    """Return the metrics of a run on the whole test part."""
    assert model.run is not None and isinstance(model.run.task, Seq2SeqTask | PrefixTask)
    task = dataclasses.replace(
        model.run.task, targets=files[1], val_targets=files[1], judged=ALL, beams=4
    )
    config = dataclasses.replace(model.run, task=task, data=files[0], val_data=files[0])
    started = time.perf_counter()
    found = judge_file(config, tokenizers(model), model.params)
    return found | {"test seconds": time.perf_counter() - started}


def sizes(model: TextModel) -> dict[str, float]:
    """Return the sizes of a model and its vocabularies, and the step of its checkpoint."""
    given = {"parameters": num_params(model.config), "vocabulary": model.config.vocab_size}
    if model.source_tokenizer is not None:
        given["source vocabulary"] = model.source_tokenizer.vocab_size
    return given | {"step": model.step or 0}


def draw_curve(arguments: argparse.Namespace, config: TrainConfig) -> None:
    """Plot the held-out loss and accuracy of a run over the steps."""
    metrics = RunFolder(Path(config.out)).read_metrics()
    figure, plots = new_figure(2)
    for axes, name, unit in zip(
        plots, ("val_loss", "val_accuracy"), ("nats a token", "share of tokens"), strict=True
    ):
        points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
        axes.plot(*zip(*points, strict=True), color=COLOURS[0], marker="o", ms=4)
        what = "held-out loss" if name == "val_loss" else "likeliest token is the label"
        label(axes, what, "step", unit, legend=False)
    save_picture(figure, arguments, "curve")


def draw_alignment(
    arguments: argparse.Namespace, model: TextModel, pairs: Sequence[tuple[str, str]]
) -> None:
    """Plot the attention of each generated token to the source."""
    figure, plots = new_figure(2, height=5.0)
    for axes, (source, target) in zip(plots, pairs, strict=True):
        written, weights = alignment(model, source, target)
        draw_matrix(axes, weights, written, source.split(), numbers=False)
        axes.tick_params(axis="x", rotation=60)
        label(axes, "", "source", "written", legend=False)
    save_picture(figure, arguments, "alignment")


def alignment(model: TextModel, source: str, target: str) -> tuple[list[str], np.ndarray]:
    """Return the generated words and their attention weights f32[T, S] over the source words.

    Row i contains the weights at the position that generates word i. Weights are averaged over the
    heads of the next-to-last layer, if there are several layers, because this layer aligns words
    best (Garg et al. 2019). For a decoder, the weights are divided by their sum over the source.
    """
    target = " ".join(target.split()[:LONGEST])
    seen = LanguageModel(model, "the run").inspect.attention((source, target))
    words = [*target.split(), "<eos>"]
    if seen.cross is not None:
        return words, seen.cross[-2:][0].mean(axis=0)
    own = seen.weights[-2:][0].mean(axis=0)
    found = own[-len(words) :, : len(source.split())]
    return words, found / found.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    main()
