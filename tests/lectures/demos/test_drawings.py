"""Tests of the drawings: names and sizes of parameters, definitions, and overlaps."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import Bbox

from transformer_jax import ModelConfig, init_params
from transformer_jax.config import Frames, Learned, Patches, Shaw, T5Buckets, Vectors
from transformer_jax.lectures.demos.drawings import (
    draw_attention,
    draw_cache,
    draw_model,
    draw_stream,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL: dict[str, Any] = dict(vocab_size=41, d_model=22, num_heads=2, num_layers=3, d_ff=29)
CONFIGS = {
    "decoder": {},
    "gated, grouped, rotary": dict(
        norm="rmsnorm", glu=True, num_heads=6, num_kv_heads=2, head_dim=14, value_head_dim=5,
        positions="rope", window=(13, None), tie_embeddings=False, qk_norm=True,
        attention_sinks=True, logit_bias=True, logit_softcap=17.0, d_model=23, attention_gate=True,
    ),
    "sandwich, scanned": dict(norm_order="sandwich", positions="alibi", scan_layers=True),
    "scales": dict(embedding_scale=12.5, residual_scale=0.25),
    "output": dict(
        norm_order="output", num_kv_heads=1, qk_norm=True, qk_norm_over="heads", norm="rmsnorm",
        qk_norm_kind="layernorm", qk_norm_bias=True,
    ),
    "attention alone": dict(d_ff=0),
    "parallel": dict(norm_order="parallel", positions="rope", head_dim=14),
    "parallel, shared": dict(
        kind="encoder-decoder", norm_order="parallel_shared", positions="alibi", out_bias=False
    ),
    "no norm": dict(norm=None, positions="none", num_layers=1, activation=jax.nn.softplus),
    "BERT": dict(
        kind="encoder", norm_order="post", embedding_norm=True, type_vocab_size=3, num_classes=11,
        masked_token_head=True,
    ),
    "pooler": dict(kind="encoder", pooler="relu", positions="sinusoidal"),
    "ELECTRA": dict(kind="encoder", embedding_dim=13, masked_token_head=True, embedding_norm=True),
    "ALBERT": dict(kind="encoder", share_layers=True),
    "MPNet": dict(kind="encoder", positions=Learned(offset=2, buckets=8)),
    "transform": dict(
        kind="encoder", pooler="transform", num_classes=11, classes_of="token", pooler_reads="each"
    ),
    "patches": dict(kind="encoder", inputs=Patches(size=2, height=6, width=4), num_classes=11),
    "frames": dict(kind="encoder-decoder", inputs=Frames(width=13, kernel=3), num_decoder_layers=5),
    "vectors": dict(kind="encoder", inputs=Vectors(width=13), positions=Shaw(max_distance=3)),
    "Vaswani": dict(
        kind="encoder-decoder", norm_order="post", scale_embeddings=True, positions="sinusoidal"
    ),
    "T5": dict(
        kind="encoder-decoder", norm="rmsnorm", positions=T5Buckets(buckets=8), use_bias=False
    ),
    "BART": dict(
        kind="encoder-decoder", norm_order="post", embedding_norm=True, source_vocab_size=37,
        norm_eps=1e-6, tie_embeddings=False,
    ),
}  # fmt: skip


@functools.cache
def drawn(name: str) -> tuple[ModelConfig, Figure, dict[str, list[tuple[Bbox, str]]]]:
    """Return a config, its drawing, and the position and text of each box by name."""
    config = ModelConfig(**{**SMALL, **CONFIGS[name]})
    figure = draw_model(config)
    texts = [(text.get_window_extent(), text.get_text()) for text in figure.axes[0].texts]
    boxes: dict[str, list[tuple[Bbox, str]]] = {}
    for patch in figure.findobj(FancyBboxPatch):
        if patch.get_gid():
            place = patch.get_window_extent()
            within = [text for at, text in texts if text and place.contains(*centre(at))]
            name = patch.get_gid().removeprefix("box ")
            boxes.setdefault(name, []).append((place, "\n".join(within)))
    return config, figure, boxes


def centre(place: Bbox) -> tuple[float, float]:
    return (place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2


@pytest.mark.slow_except("ELECTRA", "transform", "parallel, shared")
@pytest.mark.parametrize("name", CONFIGS)
def test_drawing_names_every_module_and_width(name):
    """Compare the texts of the boxes with names and shapes of the parameters."""
    config, figure, boxes = drawn(name)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    named = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        parts, shape = [entry.key for entry in path], leaf.shape
        if parts[1].startswith("block"):
            shape = shape[1:] if parts[1] == "blocks" else shape
            box, words = parts[2], parts[3:]
        elif "/".join(parts) in ("embed/bias", "encoder/relative_bias", "decoder/relative_bias"):
            box, words = "attention" if "relative_bias" in parts else "embed/tokens", parts[-1:]
            box = "embed/output" if words == ["bias"] and not config.tie_embeddings else box
        else:
            whole = "/".join(parts)
            box, words = (whole, []) if whole in boxes else (whole.rpartition("/")[0], [])
        named.add(box)
        text = " ".join(text for _, text in boxes[box])
        numbers = {int(number) for number in re.findall(r"\d+", text)} | {config.d_model}
        assert {word for word in words if word not in ("kernel", "bias", "scale")} <= set(
            re.findall(r"\w+", text)
        ), (parts, text)
        assert set(shape) <= numbers, (parts, shape, text)
    unnamed = set(boxes) - named - {"positions: Sinusoidal"}
    assert not unnamed, unnamed
    written = [text.get_text() for text in figure.axes[0].texts]
    depths = {"encoder": config.num_layers, "decoder": config.decoder_layers}
    for stack, depth in depths.items():
        if stack in shapes:
            name = f"{stack}/blocks" if config.scan_layers else f"{stack}/block_0"
            assert name in written
            assert any(
                re.fullmatch(rf"(to block_{depth - 1}, |the same, )?{depth} ×", t) for t in written
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_boxes_do_not_overlap_and_contain_their_labels(name):
    """Compare the bounding boxes of boxes, texts, lines and the page."""
    _, figure, boxes = drawn(name)
    places = [place for each in boxes.values() for place, _ in each]
    for a, b in itertools.combinations(places, 2):
        assert not a.overlaps(b)
    texts = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    for place in (*texts, *places):
        assert figure.bbox.x0 <= place.x0 and place.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= place.y0 and place.y1 <= figure.bbox.y1
    for text in texts:
        for box in places:
            within = box.x0 <= text.x0 and text.x1 <= box.x1 and box.y0 <= text.y0 <= box.y1
            assert within or not box.overlaps(text)
    for a, b in itertools.combinations(texts, 2):
        assert not a.overlaps(b)
    for line in figure.findobj(Line2D):
        if line.get_gid() is None and line.get_linestyle() == "-":
            points = line.get_transform().transform(line.get_xydata())
            for (x0, y0), (x1, y1) in itertools.pairwise(points):
                for box in places:
                    inner = box.expanded(0.98, 0.98)
                    assert max(x0, x1) < inner.x0 or inner.x1 < min(x0, x1) or (
                        max(y0, y1) < inner.y0 or inner.y1 < min(y0, y1)
                    )  # fmt: skip


@pytest.mark.parametrize("name", ["parallel", "parallel, shared"])
def test_parallel_branch_starts_below_first_branch(name):
    """A line leaves below attention, after a shared norm, and returns above attention's sum."""
    config, figure, boxes = drawn(name)
    attention = boxes["attention"][-1][0]
    forks = []
    for line in figure.findobj(Line2D):
        points = line.get_transform().transform(line.get_xydata())
        if len(points) == 4 and abs(points[0][0] - centre(attention)[0]) < 1:
            forks.append(points[:, 1])
    assert len(forks) == (1 if config.kind == "decoder" else 2)
    column = centre(attention)[0]
    pluses = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text() == "+"]
    pluses = sorted(at.y0 for at in pluses if abs(centre(at)[0] - column) < 1)
    for heights, plus in zip(forks, pluses, strict=False):
        assert heights[0] == heights[1] < attention.y0
        assert plus < heights[2] == heights[3]
        if name == "parallel, shared":
            assert boxes["norm"][-1][0].y1 < heights[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "sandwich, scanned", "output", "Vaswani"])
def test_norms_are_drawn_in_configured_order(name):
    """A norm is before a branch, after its sum, or on both sides of the branch."""
    config, figure, boxes = drawn(name)
    pluses = [text for text in figure.axes[0].texts if text.get_text() == "+"]
    heights = {key: places[-1][0].y0 for key, places in boxes.items()}
    column = centre(boxes["attention"][-1][0])[0]
    branch, norm = heights["attention"], heights.get("norm_attention", 0.0)
    sums = [text.get_window_extent() for text in pluses]
    plus = min(at.y0 for at in sums if abs(centre(at)[0] - column) < 1)
    if config.norm_order == "post":
        assert branch < plus < norm
    elif config.norm_order == "pre":
        assert norm < branch < plus < heights["norm_feed_forward"]
    elif config.norm_order == "output":
        assert branch < heights["out_norm_attention"] < plus < heights["feed_forward"]
    else:
        assert norm < branch < heights["out_norm_attention"] < plus


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_in_attention_drawing_are_consistent(causal):
    """Recompute scores, weights and output in float64 from the drawn q, k and v."""
    figure = draw_attention(["a", "bc", "def", "g", "h"], width=7, head_dim=3, causal=causal)
    shown: dict[str, dict[tuple[int, int], float]] = {}
    texts = [(text.get_window_extent(), text.get_text()) for text in figure.axes[0].texts]
    for patch in figure.axes[0].patches:
        if (patch.get_gid() or "").startswith("cell "):
            *title, i, j = patch.get_gid().split()[1:]
            place = patch.get_window_extent()
            [number] = [text for at, text in texts if place.contains(*centre(at))]
            shown.setdefault(title[0], {})[int(i), int(j)] = float(number)
    tables = {
        name: np.array([cells[key] for key in sorted(cells)]).reshape(5, -1)
        for name, cells in shown.items()
    }
    q, k, v = (tables[name] for name in "QKV")
    assert tables["X"].shape == (5, 7) and q.shape == k.shape == v.shape == (5, 3)
    scores = q @ k.T / 3**0.5
    scores = np.where(np.tri(5, dtype=bool) | (not causal), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(tables["S"], scores, atol=0.03)
    np.testing.assert_allclose(tables["A"], weights, atol=0.02)
    np.testing.assert_allclose(tables["O"], weights @ v, atol=0.05)
    written = {text for _, text in texts}
    assert {"[T, D] = [5, 7]", "[T, H] = [5, 3]", "[T, S] = [5, 5]"} <= written


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "window"), [(7, 3), (5, 5), (3, 7)])
def test_ring_slots_show_last_position_with_matching_remainder(tokens, window):
    """Each slot contains the last p <= t with p = slot (mod capacity)."""
    figure = draw_cache(tokens, window)
    texts = [(text.get_window_extent(), text.get_text()) for text in figure.axes[0].texts]
    shown = []
    for patch in figure.axes[0].patches:
        if patch.get_gid() == "slot":
            place = patch.get_window_extent()
            shown.append([text for at, text in texts if place.contains(*centre(at))])
    expected = []
    for capacity in (tokens, window):
        for t, slot in np.ndindex(tokens, capacity):
            positions = [p for p in range(t + 1) if p % capacity == slot]
            expected.append([str(positions[-1])] if positions else [])
    assert shown == expected


@pytest.mark.parametrize(("layers", "window", "chunk"), [(2, 3, 3), (3, 4, 5), (1, 2, 2)])
def test_stream_drawing_marks_frames_that_affect_outputs(layers, window, chunk):
    """Compare the marks with the frames that the outputs reach, layer by layer."""
    figure = draw_stream(layers, window, chunk, chunks=4)
    lines = [line for line in figure.axes[0].lines if line.get_gid()]
    counts = {line.get_gid(): len(line.get_xdata()) for line in lines}
    frames = set(range(3 * chunk, 4 * chunk))
    for _ in range(layers):
        frames = {s for t in frames for s in range(max(0, t - window + 1), t + 1)}
    again = len(frames) - chunk
    assert counts["again overlapping"] == again * (layers + 1)
    assert counts["held stream"] == layers * window
    new = chunk * (layers + 1)
    assert counts["new stream"] == counts["new overlapping"] == new
    assert sum(counts.values()) == 2 * (layers + 1) * 4 * chunk
