"""Compare the perplexity of language models on the same text under equal conditions.

    python -m transformer_jax compare --data book.txt
    python -m transformer_jax compare --data book.txt --models ngram lstm transformer --steps 2000

Every trained model has the same number of parameters, within 3 %, as a decoder with 4 layers and
width `--d-model`, and it reads the same number of tokens in the same windows. A search selects the
learning rate of each model. It trains for a fifth of the steps with a rate of 0.008, and then
increases or decreases the rate by factors of 2. The n-gram model counts the whole training part,
and the same search selects its order. All models are evaluated in windows of `--context` characters
on the last tenth of the text, which is not used in the search.

Each model is a separate run in the folder `--out`. The commands `generate`, `evaluate`, and `plot`
accept these runs.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from transformer_jax.cli import plot
from transformer_jax.cli.command import run
from transformer_jax.cli.flags import WORDS
from transformer_jax.cli.process import interrupts, keep_freed_memory
from transformer_jax.config import (
    ConfigError,
    ConvolutionConfig,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    Rope,
    TrainConfig,
    WindowConfig,
)
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.models import num_params
from transformer_jax.training.loop import Result, fit
from transformer_jax.training.progress import Silent

Name = Literal["ngram", "window", "convolution", "rnn", "lstm", "gru", "transformer"]
MODELS: tuple[Name, ...] = get_args(Name)
ORDERS = (2, 3, 4, 5, 6, 7, 8)
RATES = tuple(0.008 * 2.0**power for power in range(-5, 4))


@dataclass(frozen=True)
class ModelScore:
    """Result of a model."""

    model: str
    parameters: int
    """Number of trained parameters or distinct n-grams."""
    learning_rate: float | None
    order: int | None
    tokens: int
    """Number of characters read, including repetitions."""
    nats: float
    """Held-out loss in nats per character."""
    bits: float
    perplexity: float
    seconds: float
    """Wall-clock time of training, compilation, and evaluation, without the search."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Command-line options."""

    data: str
    """Text file to train on."""
    out: Path = Path("runs/compared")
    """The folder for the runs and the plot."""
    models: tuple[Name, ...] = field(default=MODELS, metadata=WORDS)
    """The models to compare."""
    steps: int = 500
    """Number of training steps for each model."""
    batch_size: int = 32
    """Number of windows per step."""
    context: int = 64
    """Number of characters per window."""
    d_model: int = 64
    """Width of the decoder, which determines the number of parameters of all models."""
    seed: int = 0
    """Seed for all random numbers."""
    resume: bool = False
    """Continue the comparison in the --out folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Compare, argv, compare)


def compare(options: Compare) -> None:
    """Search, train, and evaluate every model, then print the table and draw the plot."""
    from transformer_jax.checkpoints.run_folder import RunFolder, json_text
    from transformer_jax.training.tasks import load_task

    # training allocates and frees large arrays in every step, which would cause page faults
    keep_freed_memory()
    out = options.out
    if not options.resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        rule = "continue its comparison with --resume, or start another with --out FOLDER"
        raise ConfigError(f"out is {str(out)!r}: already exists and is not empty ({rule})")
    if options.data == "-" or Path(options.data).is_fifo():
        rule = "must be a regular file, because every model reads it again"
        raise ConfigError(f"data is {options.data!r}: {rule}")
    base = TrainConfig(
        data=options.data,
        steps=options.steps,
        batch_size=options.batch_size,
        context=options.context,
        model=ModelConfig(max_len=options.context),
        eval_every=max(options.steps // 10, 1),
        sample_tokens=0,
        seed=options.seed,
    )
    data = load_task(base)
    (text,) = data.documents()
    sizes = data.config.model.vocab_size, options.d_model, options.context
    models = equal_models(*sizes, options.models)
    out.mkdir(parents=True, exist_ok=True)  # before the search, which takes minutes

    scores = []
    with tempfile.TemporaryDirectory() as scratch, interrupts() as received:
        training_part = Path(scratch, "training.txt")
        # a search splits this file again, so that no choice depends on the last tenth of the text
        training_part.write_text(data.tokenizers.tokenizer.decode(text), "utf-8", newline="")
        for name in dict.fromkeys(options.models):
            folder = RunFolder(out / name)
            resume = folder.config_file.exists()
            if resume:
                value = setting_of(folder.read_config())
            else:
                value = search(name, base, models[name], training_part, scratch, received)
            start = time.perf_counter()
            config = replace(settings(base, models[name], value), out=str(folder.path))
            result = train(config, received, resume=resume)
            scores.append(score(name, result, len(text), time.perf_counter() - start))
            print(f"{name}: {scores[-1].nats:.3f} nats per character, held out", flush=True)

    scores.sort(key=lambda one: one.perplexity)
    print(table(scores))
    record = {name: getattr(options, name) for name in ("data", "context", "steps", "seed")}
    record["models"] = [asdict(one) for one in scores]
    (out / "compared.json").write_text(json_text(record, indent=1) + "\n", "utf-8")
    plot.draw(plot.read_runs([out / one.model for one in scores]), "tokens", out / "compared.png")
    print(f"drawn: {out / 'compared.png'}")


def equal_models(
    vocab_size: int, d_model: int, context: int, names: Sequence[str] = MODELS
) -> dict[str, AnyModelConfig]:
    """Return models of equal size, keyed by name: a decoder, the other models, and an n-gram model.

    Raises:
        ConfigError: If a model in `names` cannot match the size of the decoder within 3 %.
    """
    if d_model < 8 or d_model % 8:
        raise ConfigError(
            f"d_model is {d_model}: must be a multiple of 8, for 4 heads of even width"
        )
    decoder = ModelConfig(
        vocab_size=vocab_size, d_model=d_model, num_layers=4, num_heads=4, max_len=context,
        use_bias=False, positions=Rope(), init_std=0.1,
    )  # fmt: skip
    wanted = num_params(decoder)

    def nearest(make: Callable[[int], AnyModelConfig]) -> AnyModelConfig:
        """Return the model whose number of parameters is closest to the decoder's."""
        one, two, three = (num_params(make(width)) for width in (1, 2, 3))
        square = (three - 2 * two + one) / 2  # the number of parameters is quadratic in the width
        line = two - one - 3 * square
        left = one - square - line - wanted
        width = 1.0 if left >= 0 else 2 * -left / (line + (line**2 - 4 * square * left) ** 0.5)
        return make(max(1, round(width)))

    window = WindowConfig(vocab_size=vocab_size, context=min(16, context), d_embed=d_model // 2)
    convolution = ConvolutionConfig(vocab_size=vocab_size)
    recurrent = RecurrentConfig(vocab_size=vocab_size, d_embed=d_model)
    models: dict[str, AnyModelConfig] = {
        "window": nearest(lambda width: replace(window, d_hidden=width)),
        "convolution": nearest(lambda width: replace(convolution, d_hidden=width)),
        "rnn": nearest(lambda width: replace(recurrent, cell="rnn", d_hidden=width)),
        "lstm": nearest(lambda width: replace(recurrent, cell="lstm", d_hidden=width)),
        "gru": nearest(lambda width: replace(recurrent, cell="gru", d_hidden=width)),
        "transformer": decoder,
    }
    for name, model in models.items():
        if name in names and abs(num_params(model) / wanted - 1) > 0.03:
            rule = f"no {name} has within 3 % of its {wanted:,} parameters; use a larger d_model"
            raise ConfigError(f"d_model is {d_model}: {rule}")
    return {"ngram": NgramConfig(vocab_size=vocab_size), **models}


def search(
    name: str,
    base: TrainConfig,
    model: AnyModelConfig,
    training_part: Path,
    scratch: str,
    received: list[int],
) -> float:
    """Return the best learning rate or n-gram order, and print each loss.

    Hill climbing moves to the better neighbor until no neighbor is better.
    """
    steps = max(base.steps // 5, 1)
    base = replace(base, data=str(training_part), steps=steps, eval_every=steps)
    counted = isinstance(model, NgramConfig)
    values: Sequence[float] = ORDERS if counted else RATES
    losses: dict[int, float] = {}
    # start near the middle of the range, from which the best value is at most a few moves away
    at, before = values.index(5 if counted else 0.008), -1
    while at != before:
        before = at
        for near in range(max(at - 1, 0), min(at + 2, len(values))):
            if near in losses:
                continue
            config = replace(settings(base, model, values[near]), out=f"{scratch}/{name}-{near}")
            result = train(config, received, vocab_size=model.vocab_size)
            losses[near] = math.inf if result.val_loss is None else result.val_loss
            what = f"order {values[near]}" if counted else f"learning rate {values[near]:g}"
            print(f"{name}, {what}: {losses[near]:.3f} nats in the search", flush=True)
        at = min(losses, key=lambda i: (losses[i], i))  # the lower rate if both diverge
    return values[at]


def settings(base: TrainConfig, model: AnyModelConfig, value: float) -> TrainConfig:
    """Return the config of a run with this learning rate or n-gram order."""
    if isinstance(model, NgramConfig):
        # an n-gram model counts the whole training part in one step
        return replace(base, model=replace(model, order=int(value)), steps=1, warmup_steps=0)
    # a tenth of the steps in both the search and the run, so that rates are comparable
    warmup = base.steps // 10
    return replace(
        base, model=model, learning_rate=value, min_learning_rate=value / 10, warmup_steps=warmup
    )


def setting_of(config: TrainConfig) -> float:
    """Return the learning rate or order of a run. This function is the inverse of `settings`."""
    model = config.model
    return model.order if isinstance(model, NgramConfig) else config.learning_rate


def train(
    config: TrainConfig, received: list[int], *, resume: bool = False, vocab_size: int | None = None
) -> Result:
    """Train silently. Raise KeyboardInterrupt after the step during which a signal arrives.

    The exception also ends a search, which has no best value if it is interrupted.
    """
    stop = lambda: bool(received)  # noqa: E731
    result = fit(config, resume=resume, vocab_size=vocab_size, progress=Silent(), stop=stop)
    if received:
        print("stopped; add --resume to continue")
        raise KeyboardInterrupt
    return result


def score(name: str, result: Result, characters: int, seconds: float) -> ModelScore:
    """Return the score of a finished run. Raise ConfigError if the held-out loss is not finite."""
    config, nats = result.config, result.val_loss_per_character
    if nats is None:
        raise ConfigError(f"{name}: the held-out loss is NaN or inf")
    ngram = config.model if isinstance(config.model, NgramConfig) else None
    read = config.steps * config.batch_size * config.sequence_len
    return ModelScore(
        model=name,
        parameters=sum(ngram.nodes or ()) if ngram else num_params(config.model),
        learning_rate=None if ngram else config.learning_rate,
        order=ngram.order if ngram else None,
        tokens=characters if ngram else read,
        nats=nats,
        bits=nats / math.log(2),
        perplexity=math.exp(nats),
        seconds=seconds,
    )


def table(scores: Sequence[ModelScore]) -> str:
    """Return a Markdown table with one row per score."""
    head = ["model", "parameters", "learning rate", "characters read", "nats", "bits", "perplexity"]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for one in scores:
        counted = one.learning_rate is None
        rows.append(
            [
                f"{one.model}, order {one.order}" if counted else one.model,
                f"{one.parameters:,}{' n-grams' if counted else ''}",
                "-" if counted else f"{one.learning_rate:g}",
                f"{one.tokens:,}",
                f"{one.nats:.3f}",
                f"{one.bits:.3f}",
                f"{one.perplexity:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        cells[0] = f"{row[0]:{widths[0]}}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
