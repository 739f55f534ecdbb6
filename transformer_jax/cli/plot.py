"""Compare runs in a table of results and a picture of the learning curves.

    python -m transformer_jax plot runs/*
    python -m transformer_jax plot runs/small runs/large --x tokens --out compared.png

The table lists the config fields that differ between the runs. The value of `--x` is step, tokens
or hours. Hours exclude evaluations and checkpoints. All data come from config.json and
metrics.jsonl, so the runs may still be in progress.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformer_jax.cli.command import check_picture, run
from transformer_jax.cli.flags import POSITIONAL
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.architectures import architecture_names
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import PreferenceTask
from transformer_jax.text.attention_picture import spelled
from transformer_jax.untrusted_files import JsonObject
from transformer_jax.values import value_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Axis = Literal["step", "tokens", "hours"]

COLOURS = "#3b6fb6", "#e07b39", "#4a9d6f", "#b0519a", "#8a6d3b", "#c23b3b", "#5b5fc7", "#2f8f9d"
INK, FAINT = "#444444", "#bbbbbb"

UNNAMED = {
    "out", "seed", "log_every", "eval_every", "checkpoint_every", "keep", "sample_tokens", "log",
    "profile", "dump_batch",
}  # fmt: skip
"""Fields that are not listed as differences between runs. The seed is listed only if all other
fields are equal."""


@value_class
class Curves:
    """Metrics of a run."""

    name: str
    label: str
    lines: tuple[JsonObject, ...]
    tokens_per_step: int
    damaged: int
    """Number of lines in metrics.jsonl that could not be read."""
    counted: bool = False
    """Whether the model is an n-gram model, which counts all training data in one step."""
    of_pairs: bool = False
    """Whether the loss is for pairs of answers, which have no perplexity."""

    def perplexity(self, loss: float) -> str:
        """Format the perplexity exp(loss) for the table."""
        return "-" if self.of_pairs or not loss < 700 else f"{math.exp(loss):.4g}"

    def points(self, field: str, axis: Axis) -> list[tuple[float, float]]:
        """Return the points (axis, field) from the lines that contain the field."""
        found = []
        seconds, last = 0.0, 0
        for line in self.lines:
            # Count only training steps, and exclude evaluations and pauses before a resume.
            rate = line.get("tokens_per_second")
            if rate:
                seconds += (line["step"] - last) * self.tokens_per_step / rate
            last = line["step"]
            value = line.get(field)
            if isinstance(value, int | float) and math.isfinite(value):
                at = {"step": line["step"], "tokens": line["step"] * self.tokens_per_step}
                found.append((float(at.get(axis, seconds / 3600)), float(value)))
        return found


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Command-line options."""

    runs: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Folders of runs."""
    x: Axis = "step"
    """The horizontal axis."""
    out: Path = Path("runs.png")
    """Output file, a .png, .svg or .pdf picture."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Plot, argv, plot)


def plot(options: Plot) -> None:
    """Print the table and draw the picture."""
    check_picture(options.out)
    curves = read_runs(options.runs)
    print(table(curves))
    for one in curves:
        if one.damaged:
            print(f"{one.name}: skipped {one.damaged} damaged lines of metrics.jsonl")
    draw(curves, options.x, options.out)
    print(f"drawn: {options.out}")


def read_runs(paths: Sequence[Path]) -> list[Curves]:
    """Read runs; raise ConfigError if a folder contains no run or no metrics."""
    from transformer_jax.checkpoints.run_folder import RunFolder

    configs = {path: RunFolder(path).read_config() for path in paths}
    labels = labels_of(list(configs.values()))
    found = []
    for (path, config), label in zip(configs.items(), labels, strict=True):
        folder = RunFolder(path)
        lines = folder.read_metrics()
        if not lines:
            raise ConfigError(f"{path} has no metrics yet (metrics.jsonl has no valid line)")
        # A run that was killed may leave an incomplete line.
        written = folder.metrics_file.read_text(errors="replace").count("\n")
        tokens = config.accumulation * config.batch_size * config.sequence_len
        lines.sort(key=lambda line: line["step"])
        kinds = not config.model.supports("gradients"), isinstance(config.task, PreferenceTask)
        found.append(Curves(path.name, label, tuple(lines), tokens, written - len(lines), *kinds))
    return found


def labels_of(configs: Sequence[TrainConfig]) -> list[str]:
    """Return the differences between configs, such as `d_model 64, learning_rate 0.001`."""
    flat = [dict(_flat(config, "")) for config in configs]
    paths = list(dict.fromkeys(path for one in flat for path in one))
    differing = [path for path in paths if len({one.get(path) for one in flat}) > 1]
    # If the kind of a config differs, list only the kind, because all fields differ as well.
    whole = {path for path in differing if path.rpartition(".")[0] not in differing}
    listed = [path for path in differing if path.split(".")[0] not in UNNAMED and path in whole]
    listed = listed or [path for path in differing if path == "seed"]
    texts = [{p: f"{x:g}" if type(x) is float else str(x) for p, x in one.items()} for one in flat]
    labels = [
        ", ".join(f"{path.split('.')[-1]} {one[path]}" for path in listed if path in one)
        for one in texts
    ]
    for label in {*labels} if len({*labels}) > 1 else ():  # compare runs that have the same label
        same = [i for i, other in enumerate(labels) if other == label]
        for i, more in zip(same, labels_of([configs[i] for i in same]), strict=True):
            labels[i] = ", ".join(filter(None, (label, more)))
    return labels


def _flat(config: FieldValue, path: str) -> Iterator[tuple[str, FieldValue]]:
    """Yield the paths and values of all nested fields. The value of a config is its kind."""
    for one in dataclasses.fields(config):
        value, here = getattr(config, one.name), path + one.name
        if dataclasses.is_dataclass(value):
            yield here, architecture_names(value)
            yield from _flat(value, f"{here}.")
        else:
            yield here, value


def table(curves: Sequence[Curves]) -> str:
    """Return a table with the progress, losses, speed and label of each run."""
    header = ["run", "step", "tokens", "training", "held out", "best, at step", "perplexity"]
    header += ["tokens/s", "what"]
    rows = []
    for one in curves:
        training = [value for _, value in one.points("loss", "step")]
        held_out = one.points("val_loss", "step")
        rates = [value for _, value in one.points("tokens_per_second", "step")]
        step = one.lines[-1]["step"]
        best = min(held_out, key=lambda point: point[1], default=None)
        rows.append(
            [
                one.name, f"{step:,}", "-" if one.counted else f"{step * one.tokens_per_step:,}",
                f"{statistics.fmean(training[-20:]):.4f}" if training else "-",
                f"{held_out[-1][1]:.4f}" if held_out else "-",
                f"{best[1]:.4f}, {best[0]:,.0f}" if best else "-",
                one.perplexity(best[1]) if best else "-",
                f"{statistics.median(rates):,.0f}" if rates else "-", one.label,
            ]
        )  # fmt: skip
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(header) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    )


def draw(curves: Sequence[Curves], axis: Axis, out: Path) -> None:
    """Draw the losses and, below them, the learning rate and the speed, in one color per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from transformer_jax.checkpoints.run_folder import smooth

    figure = Figure(figsize=(9, 6.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels: dict[str, Axes] = figure.subplot_mosaic(
        [["loss", "loss"], ["rate", "speed"]], height_ratios=[3, 1], gridspec_kw={"hspace": 0.08}
    )
    ends = []
    for number, one in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        training, held_out = one.points("loss", axis), one.points("val_loss", axis)
        if one.counted and held_out:  # an n-gram model has a line instead of a curve
            panels["loss"].axhline(held_out[-1][1], color=colour, linewidth=1.8, linestyle="--")
        elif training:
            x, y = zip(*training, strict=True)
            panels["loss"].plot(x, y, color=colour, alpha=0.15, linewidth=0.7)
            panels["loss"].plot(x, smooth(y), color=colour, alpha=0.6, linewidth=1.2)
        if held_out and not one.counted:
            x, y = zip(*held_out, strict=True)
            panels["loss"].plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=3.5)
        last = (held_out or training or [(0.0, math.nan)])[-1]
        ends.append((last[0], last[1], one.name, one.perplexity(last[1]), colour))
        for panel, name in (("rate", "learning_rate"), ("speed", "tokens_per_second")):
            points = [] if one.counted else one.points(name, axis)
            if points:
                panels[panel].plot(*zip(*points, strict=True), color=colour, linewidth=1.2)
    # The loss axis ignores the first tenth of the longest run, because the initial decrease from
    # ln V would leave no room for the differences between runs.
    every = [one.points(name, axis) for one in curves for name in ("loss", "val_loss")]
    longest = max((points[-1][0] for points in every if points), default=0.0)
    later = [value for points in every for x, value in points if x >= longest / 10]
    later += [value for one in curves if one.counted for _, value in one.points("val_loss", axis)]
    if later:
        low, high = min(later), max(later)
        room = 0.08 * max(high - low, 1e-3)
        panels["loss"].set_ylim(low - room, high + 3 * room)
    # Write the name, loss and perplexity of each run at the end of its curve. If curves end close
    # to each other, move the labels up until they do not overlap.
    finite = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    low, high = panels["loss"].get_ylim()
    place = -math.inf
    cut = [name if len(name) <= 24 else f"{name[:23]}…" for _, _, name, *_ in finite]
    names, fonts = spelled(cut)
    for (at, loss, _, perplexity, colour), name in zip(finite, names, strict=True):
        place = max(loss, place + (high - low) / 22)
        panels["loss"].annotate(
            f" {name}  {loss:.3f} ({perplexity})", (at, loss),
            xytext=(panels["loss"].get_xlim()[1], place), textcoords="data",
            color=colour, fontsize=8.5, va="center", annotation_clip=False, parse_math=False,
            fontfamily=fonts,
        )  # fmt: skip
    unit = {"step": "step", "tokens": "tokens", "hours": "hours of training steps"}[axis]
    panels["loss"].set_ylabel("loss (nats per label)", color=INK)
    panels["loss"].set_title(
        "held out (dots; n-grams dashed), training (faint); perplexity exp(loss) in parentheses",
        loc="left", color=INK, fontsize=10,
    )  # fmt: skip
    panels["rate"].set_title("learning rate", loc="left", color=INK, fontsize=9)
    panels["speed"].set_title("tokens per second", loc="left", color=INK, fontsize=9)
    panels["speed"].set_ylim(bottom=0)
    for name, axes in panels.items():
        axes.set_xlabel(unit if name == "loss" else "", color=INK)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=8 if name != "loss" else 9)
    figure.savefig(out)
