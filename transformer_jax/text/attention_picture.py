"""Pictures of attention weights, with one map for each layer and head, labeled with the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from transformer_jax.tokenizers.pieces import marked
from transformer_jax.values import short_repr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#444444", "#bbbbbb"
LONGEST_LABEL = 16
WIDEST = 30.0
"""Maximum width of a row of maps, in inches. Maps with more tokens shrink and omit some labels."""


@short_repr
class Maps(NamedTuple):
    """Attention weights of one kind, with labels for the rows and columns."""

    title: str
    weights: np.ndarray  # f32[L, N, T, S]
    rows: Sequence[str]
    columns: Sequence[str]
    layers: Sequence[int]
    heads: Sequence[int]


def draw_maps(parts: Sequence[Maps]) -> Figure:
    """Draw the maps of each part in a grid with a row for each layer and a column for each head.

    Shades range from white (0) to dark blue (1). A single map also shows the numbers if they fit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    tokens = [text for part in parts for text in (*part.rows, *part.columns)]
    labels, families = spelled([shortened(marked(text)) for text in tokens])
    # The size is set at the end, because measuring the labels requires a figure.
    figure = Figure(figsize=(1, 1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    styles: dict[str, Any] = dict(color=INK, fontfamily=families, parse_math=False)

    def width(texts: Sequence[str], size: float) -> float:  # width of the longest text, in inches
        drawn = [figure.text(0, 0, text, fontsize=size, **styles) for text in set(texts)]
        longest = max(text.get_window_extent().width for text in drawn)
        for text in drawn:
            text.remove()
        return float(longest) / figure.dpi

    # One Axes object covers the figure. Coordinates are in inches from the top left corner.
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.autoscale(False)
    shades: dict[str, Any] = dict(
        cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest", aspect="auto"
    )
    gap, margin, y, wide, bar = 0.16, 0.2, 0.0, 0.0, None
    names = iter(labels)
    for title, weights, *sides, layers, heads in parts:
        rows, columns = [[next(names) for _ in side] for side in sides]
        T, S = len(rows), len(columns)
        is_single = len(layers) == len(heads) == 1
        # pitch is the size of a token in a map, in inches; size is the font size of its label, in
        # points.
        if is_single:
            pitch = min(0.5, max(6.0 / max(T, S), 0.16))
        else:
            pitch = min(0.4, max(min(2.6, max(14.0 / len(heads), 1.1)) / max(T, S), 0.09))
        pitch = min(pitch, WIDEST / (len(heads) * max(T, S)))
        size = min(10.0, 58 * pitch)
        upright = width(columns, size) > 0.9 * pitch
        left, top = margin + 0.3 + width(rows, size) + 0.1, y + 0.65
        axes.text(margin, y + 0.25, title, fontsize=11, va="center", **styles)
        wide = max(wide, width([title], 11) + 2 * margin)
        step = math.ceil(4 / size)  # label every nth token if there is no room for all labels
        small: dict[str, Any] = dict(fontsize=max(size, 4.0), **styles)
        for j, head in enumerate(heads):
            x = left + j * (S * pitch + gap)
            heading: dict[str, Any] = dict(fontsize=8, ha="center", color=INK)
            axes.text(x + S * pitch / 2, top - 0.07, f"head {head}", va="bottom", **heading)
            for i, layer in enumerate(layers):
                y = top + i * (T * pitch + gap)
                right, bottom = x + S * pitch, y + T * pitch
                axes.imshow(weights[i, j], extent=(x, right, bottom, y), **shades)
                frame = Rectangle((x, y), S * pitch, T * pitch, fill=False, ec=FAINT, lw=0.6)
                axes.add_patch(frame)
                middle = (y + bottom) / 2
                if j == 0:
                    turned: dict[str, Any] = dict(rotation=90, va="center", **heading)
                    axes.text(margin + 0.1, middle, f"layer {layer}", **turned)
                    for t in range(0, T, step):
                        at = y + (t + 0.5) * pitch
                        axes.text(x - 0.06, at, rows[t], ha="right", va="center", **small)
                with_numbers = is_single and pitch >= 0.33
                for (t, s), weight in np.ndenumerate(weights[i, j]) if with_numbers else ():
                    axes.text(
                        x + (s + 0.5) * pitch, y + (t + 0.5) * pitch, f"{weight:.2f}",
                        fontsize=min(9.0, 20 * pitch), ha="center", va="center",
                        color="white" if weight > 0.6 else INK,
                    )  # fmt: skip
            for s in range(0, S, step):
                at = x + (s + 0.5) * pitch
                turn: dict[str, Any] = dict(rotation=90 if upright else 0, ha="center", va="top")
                axes.text(at, bottom + 0.06, columns[s], **turn, **small)
        if bar is None:
            bar = right + 0.2
            tall = min(2.0, bottom - top)
            axes.imshow(
                np.linspace(1, 0, 256)[:, None], extent=(bar, bar + 0.12, top + tall, top), **shades
            )
            axes.add_patch(Rectangle((bar, top), 0.12, tall, fill=False, ec=FAINT, lw=0.6))
            for share in (0, 0.5, 1):
                at = top + (1 - share) * tall
                axes.text(bar + 0.2, at, f"{share}", fontsize=8, va="center", color=INK)
        wide = max(wide, right + margin, bar + 0.55)
        y = bottom + 0.06 + (width(columns, size) if upright else size / 72) + 0.25
    axes.set(xlim=(0, wide), ylim=(y, 0))
    figure.set_size_inches(wide, y)
    return figure


def shortened(label: str) -> str:
    """Truncate a label to `LONGEST_LABEL` characters."""
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def spelled(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    r"""Return drawable labels and the names of the fonts that cover their characters.

    Characters that are missing from all installed fonts are escaped, as in \u4e2d. Newlines are
    kept.
    """
    from matplotlib import font_manager

    missing = {letter for label in labels for letter in label if letter != "\n"}
    usual = dict(style="normal", weight=400, stretch="normal")
    fonts = {
        font.name: font.fname
        for font in sorted(font_manager.fontManager.ttflist, key=lambda font: font.name)
        if all(getattr(font, name) == value for name, value in usual.items())
        and not font.name.startswith("Last Resort")  # its glyphs are boxes
    }
    families = list[str]()
    # DejaVu Sans comes with matplotlib, so most labels look the same everywhere.
    for name in sorted(fonts, key=lambda name: name != "DejaVu Sans"):
        try:
            font = font_manager.get_font(fonts[name])
        except (OSError, RuntimeError):  # a bitmap font, or an uninstalled one
            continue
        if found := {letter for letter in missing if font.get_char_index(ord(letter))}:
            families.append(name)
            missing -= found
        if not missing:
            break
    codes = {letter: letter.encode("unicode_escape").decode() for letter in missing}
    texts = ["".join(codes.get(c, c) for c in label) for label in labels]
    return texts, families or ["DejaVu Sans"]
