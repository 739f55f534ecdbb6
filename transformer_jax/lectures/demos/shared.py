"""Options, tables, pictures, and training code shared by the demonstrations."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Jaxpr, JaxprEqn
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from transformer_jax.config import ConfigError
from transformer_jax.config.fields import fail
from transformer_jax.pytree import PyTree
from transformer_jax.text.attention_picture import spelled

COLOURS = ("#3b6fb6", "#e07b39", "#4c9a5b", "#a04a8f", "#8a6d3b", "#777777")
INK = "#444444"


Options = Mapping[str, tuple[Any, Any]]
"""Default values of a demonstration's options, keyed by name. Each pair contains the usual value
and the value with --quick."""

MEANINGS = {
    "data": "Text file in UTF-8",
    "layers": "Number of layers",
    "preset": "Preset of the model to draw",
    "seed": "Seed for all random numbers",
    "steps": "Number of training steps",
    "sentence": "Words separated by spaces",
    "tokens": "Number of tokens or frames",
    "width": "Width of the vectors",
    "window": "Number of keys that a query sees, including its own",
}
"""Help text for each option."""


def settings(options: Options, out: Path, quick: bool = False, **values: Any) -> Namespace:
    """Return the arguments of a demonstration, with defaults for values that are not passed.

    Raises:
        ConfigError: If an option is unknown, a number is not positive, or a seed is too large for
            `jax.random.key`.
    """
    unknown = [name for name in values if name not in options]
    if unknown:
        rule = f"the options of this demonstration are {', '.join(options) or 'none'}"
        raise ConfigError(f"{unknown[0]} is not supported: {rule}")
    values = {name: default[quick] for name, default in options.items()} | values
    for name, value in values.items():
        if isinstance(value, int) and value < (name != "seed"):
            fail(name, value, "must not be negative" if name == "seed" else "must be positive")
        if name == "seed" and value >= 2**32:
            fail(name, value, "must be below 2**32")
        if name == "sentence" and value is not None and not value.split():
            fail(name, value, "must contain a word")
    return Namespace(out=out, quick=quick, **{"format": "png", "dark": False}, **values)


def check_multiple(name: str, value: int, of: int, reason: str) -> None:
    """Raise ConfigError with the reason unless the value of an option is a multiple of `of`."""
    if value % of:
        fail(name, value, f"must be a multiple of {of}, {reason}")


def check_least(name: str, value: int, least: int, reason: str) -> None:
    """Raise ConfigError with the reason if the value of an option is less than `least`."""
    if value < least:
        fail(name, value, f"must be at least {least}: {reason}")


def halved(largest: int, count: int) -> list[int]:
    """Return up to `count` increasing lengths that end with `largest`. Each is half of the next."""
    # a set, because halving a small length results in 1 several times
    return sorted({max(1, largest >> i) for i in range(count)})


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. The first column is left-aligned, and the others are right-aligned."""
    texts = [[str(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for first, *others in texts:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def new_figure(columns: int = 1, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """Create a figure that contains a row of empty plots in the style of `plot_losses`."""
    # do not use pyplot, which keeps every figure in memory and may need a display
    figure = Figure(figsize=(7.0 if columns == 1 else 4.7 * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    plots = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axes in plots:
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#bbbbbb")
        axes.tick_params(colors=INK)
    return figure, plots


def label(axes: Axes, title: str, x: str, y: str, legend: bool = True) -> None:
    """Set the title, the axis labels, and the legend of a plot."""
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.minorticks_off()
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if legend:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_matrix(
    axes: Axes,
    values: np.ndarray,  # [rows, columns], from 0 to 1
    rows: Sequence[str],
    columns: Sequence[str],
    numbers: bool = True,
) -> None:
    """Draw weights as a heat map from white (0) to blue (1), with values and axis labels."""
    axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.grid(False)
    for side, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        labels, fonts = spelled(names)
        style: Any = dict(parse_math=False, fontfamily=fonts)
        side(range(len(names)), labels, **style)
    axes.tick_params(length=0)
    for (i, j), value in np.ndenumerate(values) if numbers else ():
        shade = "white" if value > 0.6 else INK
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=9)


def save_picture(figure: Figure, arguments: Namespace, name: str, text: bool = False) -> Path:
    """Save a figure reproducibly in the folder and the format that the arguments specify.

    If `text` is true, an SVG file stores its labels as text instead of outlines.
    """
    import matplotlib

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{name}.{arguments.format}"
    # by default, Matplotlib's names of clips and markers contain a random salt
    style: Any = {"svg.hashsalt": name, "svg.fonttype": "none" if text else "path"}
    # an SVG file would otherwise contain the current date
    metadata = {"Date": None} if arguments.format == "svg" else {}
    with matplotlib.rc_context(style):
        figure.savefig(path, dpi=110, metadata=metadata)
    print(f"picture: {path}")
    if arguments.dark and arguments.format == "svg":
        path.with_name(f"{name}_dark.svg").write_text(darkened(path.read_text()))
    return path


def darkened(svg: str) -> str:
    """Invert the lightness of a picture without changing its hues: x -> 1 - 0.88 H x.

    H rotates the hues by 180 degrees (`hue-rotate` in the W3C's Filter Effects), which reverses
    their inversion. White becomes dark gray, not black.
    """
    rows = "0.505 -1.258 -0.127 0 1 -0.375 -0.378 -0.127 0 1 -0.375 -1.258 0.753 0 1 0 0 0 1 0"
    matrix = f'<feColorMatrix values="{rows}"/>'
    colours = f'<filter id="dark" color-interpolation-filters="sRGB">{matrix}</filter>'
    start = svg.index(">", svg.index("<svg")) + 1
    head, body = svg[:start], svg[start:].replace("</svg>", "</g></svg>")
    return f'{head}{colours}<g filter="url(#dark)">{body}'


def train(
    loss: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    batches: PyTree,  # arrays [steps, ...]
    learning_rate: float,
) -> tuple[PyTree, jax.Array]:  # params, f32[steps]
    """Minimize loss(params, batch) with Adam, one step per batch. Return params and losses.

    The learning rate decays to zero along half a period of a cosine.
    """
    steps = len(jax.tree.leaves(batches)[0])
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), value

    run = jax.jit(lambda params, batches: jax.lax.scan(step, params, batches))
    (params, _), losses = run((params, optimizer.init(params)), batches)
    return params, losses


def programs_within(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the programs inside an equation, such as a loop body or a called function."""
    for value in jax.tree.leaves(list(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if isinstance(inner, Jaxpr):
            yield inner
