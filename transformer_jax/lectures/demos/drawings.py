"""Draw a model from its config, self-attention with its shapes, a cache, and a stream.

    python -m transformer_jax demo drawings --preset transformer-base

The boxes of a model are named after its parameters. The library computes the numbers in the other
drawings.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

from transformer_jax import (
    Causal,
    ModelConfig,
    cache,
    dot_product_attention,
    dot_product_attention_weights,
    preset,
)
from transformer_jax.config import Frames, Learned, Patches, Shaw, T5Buckets, Vectors
from transformer_jax.lectures.demos.shared import COLOURS, INK, Options, save_picture
from transformer_jax.text.attention_picture import spelled

OPTIONS: Options = {
    "preset": ("transformer-base", "transformer-base"),
    "sentence": ("Apple Innovative Company", "Apple Innovative Company"),
    "tokens": (8, 8),
    "window": (4, 4),
    "width": (4, 4),
    "seed": (0, 0),
}

LINE, GAP, SIDE = 0.19, 0.24, 0.3  # inches: text line, gap between boxes, column margin
FILLS = {"embed": "#e3f1e6", "norm": "#f4f0d8", "attention": "#fbe5d6", "feed_forward": "#dbe7f6",
         "head": "#eedff0"}  # fmt: skip


class Box(NamedTuple):
    """Box with the name of a group of parameters and lines that describe them."""

    name: str
    lines: Sequence[str]
    fill: str


Item = Box | str
"""Element of a column, which is drawn from bottom to top. An element is a box or one of these
strings: "text ..." is a label. "plus" adds the stream of the last "split". "fork" is where parallel
branches leave the stream, and "beside" starts the next parallel branch. "start" is the start of the
blocks, and any other string is their end. "states" is the output of the stack."""


def attention_box(config: ModelConfig, stack: str, cross: bool = False) -> Box:
    """Return the attention box with its visible keys, heads, and widths."""
    name = "cross_attention" if cross else "attention"
    windows = ", ".join("all" if w is None else str(w) for w in config.windows)
    sees = "causal" if stack == "decoder" else "sees both ways"
    if cross:
        sees = "sees all states of the encoder"
    elif any(config.windows):
        sees += f", window{'s' if len(config.windows) > 1 else ''} {windows}"
    n, k, h, v = config.num_heads, config.kv_heads, config.key_dim, config.value_dim
    lines = [sees, f"query {n} × {h} · key {k} × {h}", f"value {k} × {v} · out {config.d_model}"]
    if config.qk_norm:
        scales = f"{h}", f"{h}"
        if config.qk_norm_over != "head":
            scales = f"{n} × {h}", f"{k} × {h}"
        if config.qk_norm_over == "heads":
            scales = f"{n * h}", f"{k * h}"
        lines.append(f"query_scale {scales[0]} · key_scale {scales[1]}")
        if config.qk_norm_bias:
            lines.append(f"query_norm_bias {scales[0]} · key_norm_bias {scales[1]}")
    if config.attention_sinks:
        lines.append(f"sinks {n}")
    if config.attention_gate:
        lines.append(f"gate {n} × {v}")
    if not cross and config.positions is not None:
        if isinstance(config.positions, Shaw):
            rows = 2 * config.positions.max_distance + 1
            lines.append(f"shaw_key {rows} × {h} · shaw_value {rows} × {v}")
        elif isinstance(config.positions, Learned | T5Buckets) and config.positions.buckets:
            lines.append(f"relative_bias {config.positions.buckets} × {n}, of all blocks")
        elif not _joins_embeddings(config):
            lines.append(f"positions: {type(config.positions).__name__}")
    others = [m for m in map(config.mixer, range(config.num_layers)) if m != "attention"]
    for mixer in dict.fromkeys(others):
        lines.append(f"{mixer} instead in {others.count(mixer)} of {config.num_layers} blocks")
    return Box(name, lines, "attention")


def _joins_embeddings(config: ModelConfig) -> bool:
    return config.positions is not None and bool(config.positions.absolute)


def block_items(config: ModelConfig, stack: str) -> list[Item]:
    """Return the branches of a block from bottom to top, with norms placed as in the config."""
    gate = [f"gate {config.expert_dim}"] if config.glu else []
    hidden = " · ".join([*gate, f"up {config.expert_dim}", activation_name(config)])
    experts = config.experts
    router = [] if experts is None else [f"router: {experts.top_k} of {experts.count} experts"]
    if experts is not None and experts.dense_layers:
        router.append(f"first {experts.dense_layers} blocks: up {config.ff_dim}, without experts")
    boxes = [attention_box(config, stack)]
    if stack == "decoder" and config.kind == "encoder-decoder":
        boxes.append(attention_box(config, stack, cross=True))
    if config.ff_dim:
        lines = [*router, hidden, f"down {config.d_model}"]
        boxes.append(Box("feed_forward", lines, "feed_forward"))
    if config.residual_scale is not None:
        line = f"times {config.residual_scale:g}"
        boxes = [Box(box.name, [*box.lines, line], box.fill) for box in boxes]
    items = list[Item]()
    if config.norm_order == "parallel_shared":
        items += ["split", *norm_boxes(config, "norm"), "fork"]
    elif config.norm_order == "parallel":
        items += ["split", "fork"]
    for box in boxes:
        if config.is_parallel:
            separate = config.norm_order == "parallel"
            norm = norm_boxes(config, f"norm_{box.name}") if separate else []
            items += [*(["beside"] if box is not boxes[0] else []), *norm, box, "plus"]
            continue
        norm = norm_boxes(config, f"norm_{box.name}")
        after = norm_boxes(config, f"out_norm_{box.name}")
        order: dict[str, list[Item]] = {
            "pre": [*norm, box, "plus"],
            "post": [box, "plus", *norm],
            "sandwich": [*norm, box, *after, "plus"],
            "output": [box, *after, "plus"],
        }
        items += ["split", *order[config.norm_order]]
    return items


def activation_name(config: ModelConfig) -> str:
    """Return the name of the activation, which may be a function."""
    activation = config.activation
    return (
        activation if isinstance(activation, str) else getattr(activation, "__name__", "activation")
    )


def norm_boxes(config: ModelConfig, name: str, width: int | None = None) -> list[Box]:
    """Return a list with the box for a norm, or an empty list if the config has no norm."""
    if config.norm is None:
        return []
    return [Box(name, [f"{config.norm} {config.d_model if width is None else width}"], "norm")]


def embedding_boxes(config: ModelConfig, target: bool) -> list[Box]:
    """Return the boxes below the first block, from bottom to top."""
    width, boxes = config.embedding_width, list[Box]()
    side = "target_" if target else ""
    if config.inputs is None or target or config.kind == "decoder":
        source = config.source_vocab_size is not None and not target
        source = source and config.kind == "encoder-decoder"
        size = config.encoder_vocab_size if source else config.vocab_size
        lines = [f"{size} × {width}"] + [f"times sqrt({width})"] * config.scale_embeddings
        if config.embedding_scale is not None:
            lines.append(f"times {config.embedding_scale:g}")
        pair = config.kind == "encoder-decoder" and config.inputs is None
        if pair and config.source_vocab_size is None:
            lines.append("one table of source and target")
        boxes.append(Box("embed/source_tokens" if source else "embed/tokens", lines, "embed"))
    elif isinstance(config.inputs, Patches):
        size, channels = config.inputs.size, config.inputs.channels
        line = f"patches {size} × {size} × {channels} to {width}"
        boxes.append(Box("inputs/projection", [line], "embed"))
        if config.inputs.class_token:
            boxes.append(Box("inputs/class_token", [f"comes first, {width}"], "embed"))
    elif isinstance(config.inputs, Frames):
        for i in range(config.inputs.layers):
            line = f"{config.inputs.kernel} × {width if i else config.inputs.width} to {width}"
            step = f"a step of {config.inputs.stride}, gelu"
            boxes.append(Box(f"inputs/conv_{i}", [line, step], "embed"))
    elif isinstance(config.inputs, Vectors):
        boxes.append(Box("inputs/projection", [f"{config.inputs.width} to {width}"], "embed"))
    if isinstance(config.positions, Learned):
        rows = config.max_len + config.positions.offset
        boxes.append(Box(f"embed/{side}positions", [f"added, {rows} × {width}"], "embed"))
    elif _joins_embeddings(config):
        name = type(config.positions).__name__
        boxes.append(Box(f"positions: {name}", [f"added, {width}; no parameters"], "embed"))
    if config.type_vocab_size is not None:
        boxes.append(Box("embed/types", [f"added, {config.type_vocab_size} × {width}"], "embed"))
    if config.embedding_norm:
        boxes += norm_boxes(config, f"embed/{side}norm", width)
    if config.embedding_dim is not None:
        boxes.append(Box("embed/projection", [f"{width} to {config.d_model}"], "embed"))
    return boxes


def output_boxes(config: ModelConfig) -> list[Box]:
    """Return the boxes between the last block and the logits, from bottom to top."""
    width = config.embedding_width
    boxes, lines = list[Box](), [f"{width} to {config.vocab_size}"]
    if config.masked_token_head:
        line = f"{config.d_model} to {width} · {activation_name(config)}"
        boxes += [Box("head_dense", [line], "head"), *norm_boxes(config, "head_norm", width)]
    if config.logit_bias:
        lines.append(f"embed/bias {config.vocab_size}")
    if config.logit_softcap is not None:
        lines.append(f"softcap {config.logit_softcap:g}")
    if config.tie_embeddings:
        lines.append("tied: the matrix of the embeddings")
    name = "embed/tokens" if config.tie_embeddings else "embed/output"
    return [*boxes, Box(name, lines, "head")]


def stack_items(config: ModelConfig, stack: str) -> list[Item]:
    """Return the column of a stack, "encoder" or "decoder", from input to output."""
    pair = config.kind == "encoder-decoder"
    depth = config.decoder_layers if stack == "decoder" else config.num_layers
    source = "source [B, S]" if pair and stack == "encoder" else "tokens [B, T]"
    if stack == "encoder" and config.inputs is not None:
        source = type(config.inputs).__name__.lower()
    items: list[Item] = [f"text {source}", *embedding_boxes(config, pair and stack == "decoder")]
    name = f"{stack}/blocks" if config.scan_layers else f"{stack}/block_0"
    several = f"to block_{depth - 1}, " if depth > 1 and not config.scan_layers else ""
    several = "the same, " if config.share_layers else several
    items += ["start", *block_items(config, stack), f"{name} | {several}{depth} ×"]
    if config.norm_order != "post":
        items += norm_boxes(config, f"{stack}/norm")
    if stack == "decoder" or (not pair and config.has_logits):
        end = output_boxes(config)
        return [*items, "states", *end, f"text logits [B, T, {config.vocab_size}]"]
    rows = "S" if pair else "T"
    return [*items, "states", f"text states [B, {rows}, {config.d_model}]"]


def class_boxes(config: ModelConfig) -> list[Item]:
    """Return the column of an encoder's pooler and classifier, which is empty without them."""
    each = config.classes_of != "text"
    items: list[Item] = ["states"]
    if config.pooling is not None and (not each or config.pooler_reads == "each"):
        read = {"first": "first token", "mean": "mean", "each": "each token"}[config.pooler_reads]
        line = f"{read} · {config.d_model}"
        if config.pooling == "transform":
            items += [Box("head_dense", [line, activation_name(config)], "head")]
            items += norm_boxes(config, "head_norm")
        else:
            items.append(Box("pooler", [f"{line} · {config.pooling}"], "head"))
    elif not each:
        return []
    result = config.d_model if config.num_classes is None else config.num_classes
    if config.num_classes is not None:
        items.append(Box("classifier", [f"{config.d_model} to {result}"], "head"))
    name = "pooled" if config.num_classes is None else "classes"
    return [*items, f"text {name} [B, {'T, ' if each else ''}{result}]"]


def new_page() -> tuple[Figure, Axes]:
    """Create a figure with axes that are scaled in inches."""
    figure = Figure(figsize=(1, 1), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.autoscale(False)
    return figure, axes


def finish(figure: Figure, axes: Axes, width: float, height: float) -> Figure:
    """Set the size of the figure in inches and return it."""
    axes.set(xlim=(0, width), ylim=(0, height))
    figure.set_size_inches(width, height)
    return figure


def write(axes: Axes, x: float, y: float, text: str, size: float = 9, **styles: Any) -> None:
    """Write a string, centered at a point by default."""
    defaults: dict[str, Any] = dict(ha="center", va="center", color=INK, fontsize=size)
    axes.text(x, y, text, parse_math=False, **(defaults | styles))


def arrow(axes: Axes, *points: tuple[float, float], colour: str = INK) -> None:
    """Draw a line through points, with an arrowhead at the last point."""
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1, solid_capstyle="butt")
    style: dict[str, Any] = dict(arrowstyle="-|>", color=colour, linewidth=1, shrinkA=0, shrinkB=0)
    axes.annotate("", points[-1], points[-2], arrowprops=style)


def text_width(figure: Figure, texts: Sequence[str], size: float, **styles: Any) -> float:
    """Return the width of the widest string in inches."""
    style: dict[str, Any] = dict(fontsize=size, fontweight="bold", parse_math=False, **styles)
    drawn = [figure.text(0, 0, text, **style) for text in texts]
    width = max(text.get_window_extent().width for text in drawn) / figure.dpi
    for text in drawn:
        text.remove()
    return float(width)


def draw_model(config: ModelConfig) -> Figure:
    """Draw the embeddings, blocks, and output of a model from bottom to top, with their widths.

    Boxes have the names of the modules in `init_params(config)`, relative to their block. The line
    around a branch is the residual stream, and a plus adds the output of the branch.
    """
    names = ["encoder", "decoder"] if config.kind == "encoder-decoder" else [config.kind]
    columns = [stack_items(config, name) for name in names]
    heads = class_boxes(config)
    figure, axes = new_page()
    boxes = [item for items in (*columns, heads) for item in items if isinstance(item, Box)]
    texts = [text for box in boxes for text in (box.name, *box.lines)]
    wide = 0.3 + text_width(figure, texts, 9)
    pitch, x, top, memory = wide + 4 * SIDE, wide / 2 + 2 * SIDE, 0.0, (0.0, 0.0)
    for i, items in enumerate(columns):
        at = x + i * pitch
        y, places = draw_items(axes, items, at, wide, -1 if len(columns) == 2 and i == 0 else 1)
        if "cross_attention" in places:
            left, bend, level = at - wide / 2, at - wide / 2 - 2 * SIDE, places["cross_attention"]
            path = [memory, (bend, memory[1]), (bend, level), (left, level)]
            arrow(axes, *path, colour=COLOURS[1])
        memory, top = (at, places.get("states", y)), max(top, y)
    if heads:
        at = x + len(columns) * pitch
        axes.plot([memory[0], at], [memory[1]] * 2, color=INK, linewidth=1)
        y, _ = draw_items(axes, heads, at, wide, 1, memory[1] - GAP / 2)
        top = max(top, y)
    right = x + (len(columns) + bool(heads) - 1) * pitch + wide / 2 + 2 * SIDE
    return finish(figure, axes, right, top + 0.1)


def draw_items(
    axes: Axes, items: Sequence[Item], x: float, wide: float, outer: int, y: float = 0.1
) -> tuple[float, dict[str, float]]:
    """Draw items from y upward, with arrows between them.

    The residual stream passes branches on the side `outer`. Return the top of the last item and the
    heights of the boxes and states.
    """
    places, past = dict[str, float](), x + outer * (wide / 2 + SIDE / 2)
    inner = x - outer * (wide / 2 + SIDE / 2)
    last, split, start, fork = None, y, y, y
    for item in items:
        if isinstance(item, Box) or item == "plus" or item.startswith("text "):
            if last is not None:
                arrow(axes, (x, last), (x, y + GAP))
                y += GAP
            height = 0.2 if item == "plus" else LINE
            if isinstance(item, Box):
                height = LINE * (len(item.lines) + 1) + 0.12
                draw_box(axes, item, (x - wide / 2, y), wide, height)
                places[item.name] = y + height / 2
            elif item == "plus":
                axes.plot([x, past, past], [split, split, y + 0.1], color=INK, linewidth=1)
                arrow(axes, (past, y + 0.1), (x + outer * 0.1, y + 0.1))
                axes.add_patch(Circle((x, y + 0.1), 0.1, fc="white", ec=INK, lw=1, zorder=3))
                write(axes, x, y + 0.1, "+", zorder=4)
            else:
                write(axes, x, y + LINE / 2, item.removeprefix("text "))
            last = y = y + height
            continue
        y += GAP / 2
        if item == "split":
            split = y
        elif item == "fork":
            fork = y
        elif item == "beside":
            axes.plot([x, x], [last or y, y], color=INK, linewidth=1)
            split, y = y, y + GAP / 2
            axes.plot([x, inner, inner, x], [fork, fork, y, y], color=INK, linewidth=1)
            last = y
        elif item == "start":
            start = y
        elif item == "states":
            places["states"] = y
            last = y if last is None else last
        else:  # the end of the blocks, which the item names
            y += LINE
            corner, size = (x - wide / 2 - SIDE, start), (wide + 2 * SIDE, y - start)
            dashes: Any = (0, (4, 3))
            axes.add_patch(Rectangle(corner, *size, fill=False, ec="#999999", ls=dashes, lw=0.9))
            for text, side, edge in zip(item.split(" | "), ("left", "right"), (-1, 1), strict=True):
                at = x + edge * (wide / 2 + SIDE - 0.08)
                write(axes, at, y - 0.13, text, 8.5, ha=side, fontstyle="italic")
    return y, places


def draw_box(axes: Axes, box: Box, corner: tuple[float, float], wide: float, height: float) -> None:
    """Draw a box with its name and its lines."""
    style = "round,pad=0,rounding_size=0.06"
    colours: dict[str, Any] = dict(fc=FILLS[box.fill], ec="#999999", lw=0.8, zorder=3)
    patch = FancyBboxPatch(corner, wide, height, boxstyle=style, gid=f"box {box.name}", **colours)
    axes.add_patch(patch)
    for i, text in enumerate([box.name, *box.lines]):
        at = corner[1] + height - 0.06 - (i + 0.5) * LINE
        weight = "normal" if i else "bold"
        write(axes, corner[0] + wide / 2, at, text, 8 if i else 9, fontweight=weight, zorder=4)


def draw_attention(
    tokens: Sequence[str], width: int = 4, head_dim: int = 2, causal: bool = False, seed: int = 0
) -> Figure:
    """Draw one head of self-attention with its shapes and with random numbers from a seed.

    S = Q K^T / sqrt(H),  A = softmax(S) over keys,  O = A V.
    """
    T, D, H = len(tokens), width, head_dim
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (T, D))
    matrices = [jax.random.normal(key, (D, H)) / D**0.5 for key in keys[1:]]
    q, k, v = (np.asarray(x @ matrix) for matrix in matrices)
    heads = [jnp.asarray(y)[None, :, None] for y in (q, k, v)]  # [T, H] to [B, T, N, H]
    mask = Causal() if causal else None
    weights = np.asarray(dot_product_attention_weights(*heads[:2], mask=mask)[0, 0])
    output = np.asarray(dot_product_attention(*heads, mask=mask)[0, :, 0])
    scores = np.where(weights > 0, q @ k.T / H**0.5, -np.inf) if causal else q @ k.T / H**0.5
    figure, axes = new_page()
    cell, room = 0.42, 0.75
    size, half = T * cell, T * cell / 2
    low, middle, high = (0.45 + i * (size + room) for i in range(3))
    tokens, fonts = spelled(tokens)
    # an SVG file uses the reader's fonts if the default font has all letters
    style: dict[str, Any] = {} if fonts == ["DejaVu Sans"] else {"fontfamily": fonts}
    left = text_width(figure, tokens, 9, **style) + 0.25
    projected, scored = left + D * cell + 1.0, left + (D + H) * cell + 2.0
    weighed = scored + max(size, 1.5) + 0.8
    summed, upper = weighed + max(size, 1.5) + 0.8, (middle + high) / 2
    out, heights = (upper + low) / 2, {"Q": high, "K": middle, "V": low}
    colours = dict(zip("QKV", COLOURS, strict=False))
    parts = [
        ("X", np.asarray(x), (left, middle), f"[T, D] = [{T}, {D}]", "#888888"),
        *(
            (f"{name} = X W_{name}", values, (projected, heights[name]), f"[T, H] = [{T}, {H}]",
             colours[name])
            for name, values in zip("QKV", (q, k, v), strict=True)
        ),
        (f"S = Q K^T / sqrt({H})", scores, (scored, upper), f"[T, S] = [{T}, {T}]", COLOURS[3]),
        ("A = softmax(S)", weights, (weighed, upper), "each row sums to 1", COLOURS[3]),
        ("O = A V", output, (summed, out), f"[T, H] = [{T}, {H}]", colours["V"]),
    ]  # fmt: skip
    for title, values, corner, shape, colour in parts:
        draw_numbers(axes, title, values, corner, shape, colour, cell)
    for i, token in enumerate(tokens):
        write(axes, left - 0.1, middle + (T - 0.5 - i) * cell, token, ha="right", **style)
    start, bend = left + D * cell + 0.12, projected - 0.5
    arrow(axes, (start, middle + half), (projected - 0.12, middle + half))
    for y in (high, low):
        arrow(axes, (bend, middle + half), (bend, y + half), (projected - 0.12, y + half))
    end, bend, level = projected + H * cell + 0.12, scored - 0.5, upper + half
    for y in (high, middle):
        axes.plot([end, bend, bend], [y + half, y + half, level], color=INK, linewidth=1)
    arrow(axes, (bend, level), (scored - 0.12, level))
    arrow(axes, (scored + size + 0.12, level), (weighed - 0.12, level))
    bend = summed - 0.5
    axes.plot(
        [weighed + size + 0.12, bend, bend], [level, level, out + half], color=INK, linewidth=1
    )
    axes.plot([end, bend, bend], [low + half, low + half, out + half], color=INK, linewidth=1)
    arrow(axes, (bend, out + half), (summed - 0.12, out + half))
    return finish(figure, axes, summed + H * cell + 0.2, high + size + 0.4)


def draw_numbers(
    axes: Axes,
    title: str,
    values: np.ndarray,  # f32[rows, columns]
    corner: tuple[float, float],
    shape: str,
    colour: str,
    cell: float,
) -> None:
    """Draw a matrix with values that are shaded by magnitude, below a title and above its shape."""
    rows, columns = values.shape
    largest = np.abs(values[np.isfinite(values)]).max()
    for (i, j), value in np.ndenumerate(values):
        share = 0.5 * abs(value) / largest if np.isfinite(value) else 0.0
        x, y = corner[0] + j * cell, corner[1] + (rows - 1 - i) * cell
        patch = Rectangle((x, y), cell, cell, fc=(*to_rgb(colour), share), ec="#bbbbbb", lw=0.6)
        patch.set_gid(f"cell {title} {i} {j}")
        axes.add_patch(patch)
        text = f"{value:.2f}" if np.isfinite(value) else "-inf"
        write(axes, x + cell / 2, y + cell / 2, text, 7.5)
    middle = corner[0] + columns * cell / 2
    write(axes, middle, corner[1] + rows * cell + 0.15, title, fontweight="bold")
    write(axes, middle, corner[1] - 0.15, shape, 8)


def cache_positions(tokens: int, capacity: int) -> np.ndarray:  # i32[T, capacity]
    """Return the position in each slot of a cache after each token, or -1 for an empty slot."""

    def step(state: cache.KVCache, t: jax.Array) -> tuple[cache.KVCache, jax.Array]:
        # only the positions are drawn, so the keys may be zeros
        new = jnp.zeros((1, 1, 1, 1))  # [B, T, K, H]
        state = cache.update(state, new, new, t[None, None])
        return state, state.positions[0]

    return np.asarray(jax.lax.scan(step, cache.init(1, capacity, 1, 1), jnp.arange(tokens))[1])


def draw_cache(tokens: int = 8, window: int = 4) -> Figure:
    """Draw the position in each slot after each token, for a full cache and a ring buffer.

    A ring has one slot per position in the window. Position t is in slot t mod W.
    """
    figure, axes = new_page()
    cell, x, top = 0.36, 1.0, 0.6 + tokens * 0.36
    for title, capacity in (
        (f"whole: {tokens} slots", tokens),
        (f"ring of a window of {window}", window),
    ):
        positions = cache_positions(tokens, capacity)
        write(axes, x, top + 0.52, title, fontweight="bold", ha="left")
        write(axes, x - 0.12, top + 0.18, "slot", 8, ha="right")
        for (t, slot), position in np.ndenumerate(positions):
            at = (x + slot * cell, top - (t + 1) * cell)
            fill = "white" if position < 0 else COLOURS[1] if position == t else "#c9dbf0"
            axes.add_patch(Rectangle(at, cell, cell, fc=fill, ec="#bbbbbb", lw=0.7, gid="slot"))
            if position >= 0:
                colour = "white" if position == t else INK
                write(axes, at[0] + cell / 2, at[1] + cell / 2, str(position), color=colour)
        for slot in range(capacity):
            write(axes, x + (slot + 0.5) * cell, top + 0.18, str(slot), 8)
        for t in range(tokens):
            write(axes, x - 0.12, top - (t + 0.5) * cell, f"token {t}", 8, ha="right")
        x += capacity * cell + 1.2
    legend = {"held": "#c9dbf0", "written now": COLOURS[1], "empty": "white"}
    end = write_legend(figure, axes, 1.0, legend)
    return finish(figure, axes, max(x - 0.9, end), top + 0.72)


def draw_stream(layers: int = 2, window: int = 3, chunk: int = 3, chunks: int = 4) -> Figure:
    """Draw the work for the last chunk in a causal stack, streaming and with overlapping windows.

    A stream stores the last W inputs of each layer. Overlapping windows recompute the R - 1 = L (W
    - 1) previous frames that the outputs depend on.
    """
    frames, overlap = chunk * chunks, layers * (window - 1)
    start = frames - chunk
    again = min(start, overlap)
    figure, axes = new_page()
    pitch, rise, left, high = 0.42, 0.55, 0.95, layers * 0.55 + 1.2
    panels = {
        f"overlapping windows: {again} frames computed again, with {chunk} new ones": start - again,
        f"stream: {min(window, start)} held of each layer, {chunk} new frames computed": start,
    }
    marks = {"past": "white", "held": "#f2c9a8", "again": COLOURS[1], "new": COLOURS[0]}
    for i, (title, first) in enumerate(panels.items()):
        y, first_kept = 0.9 + i * high, start - window if first == start else start
        write(axes, left, y + layers * rise + 0.48, title, fontweight="bold", ha="left")
        corner, size = (left + start * pitch, y - 0.27), (chunk * pitch, layers * rise + 0.54)
        axes.add_patch(Rectangle(corner, *size, fc="#f0f0f0", ec="none"))
        for level in range(layers + 1):
            name = f"layer {level}" if level else "frames"
            write(axes, left - 0.1, y + level * rise, name, 8.5, ha="right")
        kinds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in marks}
        for level, t in np.ndindex(layers + 1, frames):
            x, height = left + (t + 0.5) * pitch, y + level * rise
            kind = "new" if t >= start else "again" if t >= first else "past"
            if kind == "past" and level < layers and t >= first_kept:
                kind = "held"
            kinds[kind].append((x, height))
            if level and t >= first:
                for s in range(max(min(first, first_kept), t - window + 1, 0), t + 1):
                    ends = [left + (s + 0.5) * pitch, x], [height - rise, height]
                    axes.plot(*ends, color="#bbbbbb", linewidth=0.7, zorder=2)
        for kind, points in kinds.items():
            edge = "#cccccc" if kind == "past" else INK
            style: dict[str, Any] = dict(mfc=marks[kind], mec=edge, mew=0.9, ms=18, zorder=3)
            place = "stream" if i else "overlapping"
            if points:
                axes.plot(*zip(*points, strict=True), "o", gid=f"{kind} {place}", **style)
    legend = dict(zip(("neither", "held", "computed again", "new"), marks.values(), strict=True))
    width = max(left + frames * pitch, write_legend(figure, axes, left, legend))
    width = max(width, left + text_width(figure, list(panels), 9))
    return finish(figure, axes, width + 0.2, 0.55 + 2 * high)


def write_legend(figure: Figure, axes: Axes, x: float, legend: dict[str, str]) -> float:
    """Write the color legend on one line at the bottom, and return its right edge."""
    for text, fill in legend.items():
        axes.add_patch(Rectangle((x, 0.2), 0.18, 0.18, fc=fill, ec="#999999", lw=0.7))
        write(axes, x + 0.25, 0.29, text, 8, ha="left")
        x += 0.5 + text_width(figure, [text], 8)
    return x


def demonstrate(arguments: Namespace) -> dict[str, Figure]:
    """Draw all four subjects and return the figures, keyed by name."""
    window, seed = arguments.window, arguments.seed
    figures = {
        "drawings": draw_model(preset(arguments.preset)),
        "drawing_attention": draw_attention(arguments.sentence.split(), arguments.width, seed=seed),
        "drawing_cache": draw_cache(arguments.tokens, window),
        "drawing_stream": draw_stream(window=window),
    }
    for name, figure in figures.items():
        save_picture(figure, arguments, name, text=True)
    return figures
