"""Tables of tokens, layers and heads, as a matplotlib figure or an HTML page with hover details.

The page is a single HTML file without scripts. Its content security policy forbids loading any
resources. Strings are escaped, and invisible characters are spelled out, as in the figures. The
colors adapt to the reader's light or dark mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax.text.attention_picture import FAINT, INK, shortened, spelled
from transformer_jax.values import value_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST = 26.0
"""Maximum width of a row of cells, in inches. Cells of wider tables shrink and omit some labels."""


@value_class
class Table:
    """Table of numbers with labels, cell texts and tooltips.

    A page shows a table with a single unnamed row as running text.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray  # f32[R, C]
    most: float | None = None
    """Absolute value of the darkest shade. None means the largest absolute value in the table."""
    cells: Sequence[Sequence[str]] | None = None
    """Strings that the cells show instead of the numbers."""
    hints: Sequence[Sequence[str]] | None = None
    """Strings that the page shows on hover, after the row, column and value of a cell."""

    def shades(self) -> np.ndarray:  # f64[R, C]
        """Return the shade of each value, from -1 to 1, where 0 is white."""
        values = np.asarray(self.values, np.float64)
        most = np.abs(values).max(initial=0.0) if self.most is None else self.most
        return np.clip(values / most, -1, 1) if most > 0 else np.zeros(values.shape)


class TableResult:
    """Base class for results that are drawn as tables."""

    def tables(self) -> list[Table]:
        """Return the tables to draw, from top to bottom."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return a few lines of text for a command to print."""
        raise NotImplementedError

    def plot(self) -> Figure:
        """Draw the tables as a figure, which `plot().savefig("picture.png")` writes to a file."""
        return draw_tables(self.tables())

    def html(self) -> str:
        """Return the tables as a single HTML page that shows details on hover."""
        return page(type(self).__name__, self.summary(), self.tables())


def draw_tables(tables: Sequence[Table]) -> Figure:
    """Draw tables from top to bottom, with red for positive and blue for negative values."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    inner = [text for table in tables for row in table.cells or () for text in row]
    sides = [text for table in tables for text in (*table.rows, *table.columns)]
    # `spelled` chooses the fonts for all texts at once.
    short = {text: shortened(text) for text in (*inner, *sides)}
    short |= {table.title: table.title for table in tables}
    labels, families = spelled(list(short.values()))
    label = dict(zip(short, labels, strict=True))
    figure = Figure(figsize=(1, 1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    styles: dict[str, Any] = dict(fontfamily=families, parse_math=False)

    def width(texts: Sequence[str], size: float) -> float:  # width of the longest text, in inches
        drawn = [figure.text(0, 0, text, fontsize=size, **styles) for text in {*texts}]
        longest = max((text.get_window_extent().width for text in drawn), default=0.0)
        for text in drawn:
            text.remove()
        return float(longest) / figure.dpi

    # One Axes object covers the figure. Coordinates are in inches from the top left corner.
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.autoscale(False)
    margin, y, wide = 0.2, 0.1, 0.0
    for table in tables:
        rows, columns = [[label[text] for text in side] for side in (table.rows, table.columns)]
        cells = None if table.cells is None else [[label[x] for x in row] for row in table.cells]
        texts = [] if cells is None else [text for row in cells for text in row]
        full = max(0.42, width(texts, 8) + 0.1)
        pitch, tall = min(full, WIDEST / len(columns)), 0.26
        upright = width(columns, 8) > pitch - 0.06
        step = max(1, int(np.ceil(0.13 / pitch)))  # label every nth column if there is no room
        title = label[table.title]
        axes.text(margin, y + 0.15, title, fontsize=10, va="center", color=INK, **styles)
        left, top = margin + width(rows, 8) + 0.1, y + 0.36
        right, bottom = left + len(columns) * pitch, top + len(rows) * tall
        shades = table.shades()
        axes.imshow(
            shades, cmap="RdBu_r", vmin=-1.3, vmax=1.3, interpolation="nearest", aspect="auto",
            extent=(left, right, bottom, top),
        )  # fmt: skip
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, ec=FAINT, lw=0.6)
        axes.add_patch(frame)
        small: dict[str, Any] = dict(fontsize=8, va="center", **styles)
        # The numbers would overlap in narrower cells.
        for (r, c), value in np.ndenumerate(table.values) if pitch > 0.9 * full else ():
            at = left + (c + 0.5) * pitch, top + (r + 0.5) * tall
            shown = number(value) if cells is None else cells[r][c]
            ink = "white" if abs(shades[r, c]) > 0.7 else INK
            axes.text(*at, shown, ha="center", color=ink, **small)
        for r, text in enumerate(rows):
            axes.text(left - 0.06, top + (r + 0.5) * tall, text, ha="right", color=INK, **small)
        small |= dict(va="top", ha="center", rotation=90 if upright else 0, color=INK)
        for c in range(0, len(columns), step):
            axes.text(left + (c + 0.5) * pitch, bottom + 0.06, columns[c], **small)
        wide = max(wide, right + margin, width([title], 10) + 2 * margin)
        y = bottom + 0.06 + (width(columns, 8) if upright else 0.15) + 0.2
    axes.set(xlim=(0, wide), ylim=(y, 0))
    figure.set_size_inches(wide, y)
    return figure


def number(value: float) -> str:
    """Format the value of a cell with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:z.{digits}f}"


STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #222222; --faint: #c8c8c8;
  --above: #ef9a78; --below: #86b9e0; --bar: #f2f2f2; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e6e6e6; --faint: #4a4d52;
  --above: #a8482a; --below: #2b6a9e; --bar: #25282d; } }
body { margin: 0; padding: 1rem 1.2rem 8.5rem; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .5rem; }
.summary { white-space: pre-wrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th { font-weight: 400; padding: .1rem .5rem; text-align: right; white-space: nowrap; }
thead th { text-align: center; }
td, .text b { unicode-bidi: isolate; border: 1px solid var(--faint); text-align: center;
  background: color-mix(in srgb, var(--side, var(--above)) calc(var(--shade) * 100%),
    var(--ground)); }
td { padding: .1rem .4rem; white-space: nowrap; }
.text { line-height: 2; } .text b { font-weight: 400; padding: .1rem .25rem; border-radius: 3px; }
.below { --side: var(--below); }
td:hover, .text b:hover { outline: 2px solid var(--ink); }
i { display: none; position: fixed; left: 0; right: 0; bottom: 0; padding: .6rem 1.2rem;
  font-style: normal; text-align: left; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--bar); border-top: 1px solid var(--faint); }
td:hover i, .text b:hover i { display: block; }
"""


def page(title: str, summary: str, tables: Sequence[Table]) -> str:
    """Return tables as an HTML page that shows the details of the hovered cell at the bottom."""
    # Text from a model is untrusted. If some of it gets past `escape`, the policy keeps it from
    # running.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    parts = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
        f"<h1>{escape(title)}</h1>", f'<p class="summary">{escape(summary)}</p>',
    ]  # fmt: skip
    for table in tables:
        shades = table.shades()
        parts.append(f"<h2>{escape(table.title)}</h2>")
        # Show a table with a single unnamed row as running text.
        is_text = len(table.rows) == 1 and not table.rows[0]
        tag = "b" if is_text else "td"
        lines = []
        for r, row in enumerate(table.rows):
            line = []
            for c, column in enumerate(table.columns):
                value, shade = float(table.values[r, c]), float(shades[r, c])
                shown = column if is_text else number(value)
                if table.cells is not None:
                    shown = table.cells[r][c]
                hint = " · ".join(filter(None, (row, column))) + f": {value:.4g}"
                if table.hints is not None:
                    hint += f"\n{table.hints[r][c]}"
                side = ' class="below"' if shade < 0 else ""
                line.append(
                    f'<{tag}{side} style="--shade:{abs(shade):.3f}">{escape(shown)}'
                    f"<i>{escape(hint)}</i></{tag}>"
                )
            lines.append(line)
        if is_text:
            parts.append(f'<p class="text">{" ".join(lines[0])}</p>')
            continue
        head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
        parts.append(f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>')
        for row, line in zip(table.rows, lines, strict=True):
            parts.append(f"<tr><th>{escape(row)}</th>{''.join(line)}</tr>")
        parts.append("</tbody></table></div>")
    return "\n".join([*parts, "</body>", "</html>", ""])
