"""Tests of the printed tables and the pictures of the demonstrations, with fake measurements.

Measuring and training take seconds, so each case replaces them by a function that returns made-up
numbers; `test_demos.py` tests the real ones. The words, colours and lines of each picture must
match the picture in the docs.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from transformer_jax.lectures.demos.shared import settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

PICTURES = Path(__file__).parents[3] / "docs" / "pictures" / "lectures"
ENTROPY = -(0.9 + 0.1 / 11) * math.log(0.9 + 0.1 / 11) - (1 / 11) * math.log(0.1 / 11)
"""Entropy of a token that is uniform over eleven with probability 1/10 and otherwise certain."""


Style = tuple[str, float, bool] | None
Marker = tuple[str, str, float] | None


def drawn_on_the_page(name: str) -> list[tuple[list[str], list[tuple[Style, Marker]]]]:
    """Return the words and the styles of the curves of each plot in a picture of the docs.

    A line has a colour, a width and a flag for dashes; a marker has two colours and a radius.
    """
    picture, plots = (PICTURES / f"{name}.svg").read_text(), []
    radius = dict(re.findall(r'id="(m\w+)" d="M 0 (\S+)', picture))
    for group in re.split(r'\n  <g id="axes_\d+">', picture)[1:]:
        texts = re.findall(r'\n {3,4}<g id="text_\d+">\n *<!-- (.*?) -->', group, re.S)
        curves = []
        for curve in re.findall(r'\n   <g id="line2d_\d+">(.*?)\n   </g>', group, re.S):
            line: Style = None
            marker: Marker = None
            for text in re.findall(r'style="(.*?)"', curve):
                style = dict(part.split(": ") for part in text.split("; "))
                if style.get("fill") == "none":
                    width = float(style.get("stroke-width", 1))
                    line = style["stroke"], width, "stroke-dasharray" in style
                elif "fill" in style:
                    [shape] = set(re.findall(r'"#(m\w+)"', curve))
                    marker = style["fill"], style.get("stroke", "#000000"), float(radius[shape])
            curves.append((line, marker))
        plots.append((words_of(texts), curves))
    return plots


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not numbers, sorted."""
    return sorted(text for text in texts if text and not re.fullmatch(r"[\d.]+", text))


def drawn(figure: Figure) -> list[tuple[list[str], list[tuple[Style, Marker]]]]:
    """Return the words and the styles of the curves of each plot in a figure."""
    plots = []
    for axes in figure.axes:
        legend = axes.get_legend()
        texts = [axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()]
        texts += [text.get_text() for text in (legend.get_texts() if legend else axes.texts)]
        curves = []
        for curve in axes.lines:
            line: Style = to_hex(curve.get_color()), curve.get_linewidth(), curve.is_dashed()
            fill, edge = map(to_hex, (curve.get_markerfacecolor(), curve.get_markeredgecolor()))
            marker: Marker = fill, edge, curve.get_markersize() / 2
            is_line, has_marker = curve.get_linestyle() != "None", curve.get_marker() != "None"
            curves.append((line if is_line else None, marker if has_marker else None))
        plots.append((words_of(texts), curves))
    return plots


def activations() -> Any:
    """GELU z P(z) has slope P(z) + z p(z), with P and p of the normal distribution."""
    z = np.linspace(-4, 4, 161)
    sigmoid, density = 1 / (1 + np.exp(-z)), np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in z])
    values = [sigmoid, np.tanh(z), np.maximum(z, 0), z * below]
    slopes = [sigmoid * (1 - sigmoid), 1 - np.tanh(z) ** 2, z > 0, below + z * density]
    slopes[2] = np.where(np.abs(z) < 1e-9, 0, slopes[2])
    printed = """slope at -4 -2 0 2 4
        sigmoid 0.018 0.105 0.250 0.105 0.018
        tanh 0.001 0.071 1.000 0.071 0.001
        ReLU 0.000 0.000 0.000 1.000 1.000
        GELU -0.001 -0.085 0.500 1.085 1.001"""
    return {}, printed, [[(z, y) for y in part] for part in (values, slopes)], []


def rotations() -> Any:
    position, pair = np.arange(64)[:, None], np.arange(32)
    angles = position / 10_000 ** (pair / 32)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(64, 64)

    def rotate(positions, k):
        assert k == 5 and positions.shape == (59, 64)
        return table[5:] + 0.25

    printed = "P(t + 5) and rotated P(t): largest difference 3e-01\nposition x y length"
    for p in range(6):
        printed += f"\n{p} {math.cos(p):.4f} {math.sin(p):.4f} 1.0000"
    circle = np.linspace(0, 2 * math.pi, 121)
    lines = [[], [(np.cos(circle), np.sin(circle))]]
    return {"rotate": rotate}, printed, lines, [table]


def worked_attention() -> Any:
    module = importlib.import_module("transformer_jax.lectures.demos.worked_attention")
    scores = np.array([[0, 20, 50], [30, 0, 10], [0, 5, 100]])
    weights = np.array([[0.25, 0.75, 0], [1, 0, 0], [0.125, 0.5, 0.375]])
    found = {
        "embeddings E": np.asarray(module.EMBEDDINGS),
        "scores S": scores,
        "weights A": weights,
    }
    printed = """embeddings E
        Apple 1.0000 2.0000 1.0000 2.0000
        Innovative 3.0000 2.0000 1.0000 2.0000
        Company 4.0000 1.0000 2.0000 1.0000
        scores S
        Apple 0.0000 20.0000 50.0000
        Innovative 30.0000 0.0000 10.0000
        Company 0.0000 5.0000 100.0000
        weights A
        Apple 0.2500 0.7500 0.0000
        Innovative 1.0000 0.0000 0.0000
        Company 0.1250 0.5000 0.3750
        the scores of each row differ so much that all weight is on Innovative"""
    soft = np.exp(scores / 50)
    images = [weights, soft / soft.sum(axis=1, keepdims=True)]
    return {"compute": lambda embeddings: found}, printed, [[], []], images


def alignment() -> Any:
    module = importlib.import_module("transformer_jax.lectures.demos.alignment")
    pairs = module.sentence_pairs()
    assert len(pairs) == 6 * 5 + 6 * 3 * 3
    examples = {
        "je suis étudiant": "i am a student",
        "nous avons un chat noir": "we have a black cat",
    }
    assert examples.items() <= dict(pairs).items()
    words = sorted({"<s>", "</s>"} | {word for _, en in pairs for word in en.split()})

    def train(loss, params, batches, learning_rate):
        assert len(batches) == 300 and learning_rate == 0.02
        return params, np.array([2, 0.5])

    def translate(config, params, source, start, end, num_tokens):
        assert (words[start], words[end], config.d_hidden) == ("<s>", "</s>", 24)
        assert source.shape == (84 + 2, 5) and (source[84] >= 0).sum() == 3
        assert num_tokens == 1 + max(len(en.split()) for _, en in pairs)
        texts = [f"{en} </s>".split() for _, en in [*pairs, *examples.items()]]
        texts[0] = texts[1] = ["</s>"]
        rows = [np.array([words.index(word) for word in text]) for text in texts]
        return rows, np.arange(86 * 6 * 5).reshape(86, 6, 5) / 10

    tables, images = [], []
    for row, (french, english) in enumerate(examples.items(), 84):
        matrix = np.arange(row * 30, row * 30 + 30).reshape(6, 5) / 10
        words_of = [*english.split(), "</s>"]
        images.append(matrix[: len(words_of), : len(french.split())])
        tables.append(f"{english} {french}")
        for word, values in zip(words_of, images[-1], strict=True):
            tables.append(" ".join([word, *(f"{value:.2f}" for value in values)]))
    summary = "84 sentences; loss 0.5000 nats per word; 98% translated correctly"
    printed = "\n".join([summary, *tables])
    stand_ins = {"train": train, "translate": translate, "init_params": lambda *args: args}
    return stand_ins, printed, [[], []], images


def decoding_cost() -> Any:
    lengths = [64, 128, 256, 512]
    printed = (
        "tokens n no cache: products cache: products window 16: products no cache cache window 16"
    )
    for n in lengths:
        printed += f"\n{n} {100 * n} {10 * n} {n + 16} {n}.0 ms 32.0 ms 5.0 ms"
    stand_ins = {
        "count": lambda n, window: [100 * n, 10 * n, n + window],
        "measure_times": lambda n, window, width, runs: [n / 1e3, width / 1e3, runs / 1e3],
    }
    counts = [[scale * n for n in lengths] for scale in (100, 10)] + [[n + 16 for n in lengths]]
    times = [lengths, [32] * 4, [5] * 4]
    return stand_ins, printed, [[(lengths, y) for y in part] for part in (counts, times)], []


def depth() -> Any:
    kinds = ["no residual", "no norm", "post-norm", "pre-norm"]

    def gradients(kind, layers, texts, seed, seeds):
        assert texts.shape == (8, 17) and seed == 1
        return (kinds.index(kind) + 1) * layers / seeds + 100 * np.arange(layers)

    parts = {kind: np.full((32, 32), x) for kind, x in zip(kinds, (-0.25, 2, 0), strict=False)}
    printed = """gradient before the first block relative to the last
        kind 2 blocks 12 blocks 48 blocks
        no residual 0.5 3 12
        no norm 1 6 24
        post-norm 1.5 9 36
        pre-norm 2 12 48"""
    curves = [(np.arange(1, 49), 12 * (i + 1) + 100 * np.arange(48)) for i in range(4)]
    images = [np.full((32, 32), x) for x in (0.25, 1)]
    return {"gradients": gradients, "jacobians": lambda: parts}, printed, [[], [], curves], images


def embeddings() -> Any:
    module = importlib.import_module("transformer_jax.lectures.demos.embeddings")
    texts = module.sentences()
    words = sorted({"<s>"} | {word for text in texts for word in text})
    held_out = np.random.default_rng(0).permutation(240)[:48]
    lines = [" ".join(["<s>"] * 3 + texts[i]) + " " for i in range(240) if i not in held_out]
    fours = [" ".join(row[i : i + 4]) + " " for row in (["<s>"] * 3 + texts[j] for j in held_out)
             for i in range(len(row) - 3)]  # fmt: skip
    never = np.mean([not any(four in line for line in lines) for four in fours])

    def learn(training, held_out, words, steps, seed, width):
        assert (words, steps, width) == (30, 1500, 16)
        assert len(held_out) == len(fours) and training.shape[1] == 4
        return table(seed), 1 + seed / 10, 0.1 + seed / 100

    def table(seed):
        return np.random.default_rng(seed).standard_normal((30, 16))

    def cosine(seed, a, b):
        u, v = (table(seed)[words.index(word)] for word in (a, b))
        return u @ v / math.sqrt(u @ u * (v @ v))

    shown = ["240 sentences, 48 held out; 30 words; seeds 5", "cosine mean min max"]
    for a, b in (("king", "queen"), ("king", "farmer"), ("king", "cat"), ("king", "walks"),
                 ("runs", "walks"), ("runs", "bread")):  # fmt: skip
        x = [cosine(seed, a, b) for seed in range(5)]
        shown.append(f"{a}, {b} {sum(x) / 5:.2f} {min(x):.2f} {max(x):.2f}")
    for word in ("king", "runs", "bread"):
        others = sorted(set(words) - {word}, key=lambda other: -cosine(0, word, other))
        shown.append(f"nearest to {word}: {', '.join(others[:3])}")
    shown.append(f"held-out words with probability 0 by 4-gram counts: {never:.1%}")
    shown.append("lowest probability of a held-out word by the network: 0.1000; "
                 "loss 1.200 nats per word (1.000 to 1.400)")  # fmt: skip
    names = [word for group in module.WORDS.values() for word in group]
    centred = table(0)[[words.index(word) for word in names]]
    centred -= centred.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    plane = centred @ vectors[:, [-1, -2]]  # each column with either sign
    ends = np.cumsum([len(group) for group in module.WORDS.values()])[:-1]
    points = [part.T for part in np.split(plane, ends)]
    some = ["king", "queen", "farmer", "cat", "walks", "runs"]
    square = np.array([[min(max(cosine(0, a, b), 0), 1) for b in some] for a in some])
    return {"learn": learn}, "\n".join(shown), [points, []], [square]


def exposure_bias() -> Any:
    def measure_errors(config, params, length):
        assert params == (config, 60, 2 + 12, 0) and length == 12
        assert (config.d_model, config.window, config.vocab_size) == (32, 2, 11)
        return np.full(12, 0.1), np.arange(1, 13) / 20

    printed = """wrong tokens, position t 1 2 4 6 8 10 12
        teacher-forced 10% 10% 10% 10% 10% 10% 10%
        free-running 5% 10% 20% 30% 40% 50% 60%
        1 - (1 - e)^t 10% 19% 34% 47% 57% 65% 72%"""
    t = np.arange(1, 13)
    curves = [(t, np.full(12, 10)), (t, 5 * t), (t, 100 - 100 * 0.9**t)]
    return (
        {"train_model": lambda *args: args, "measure_errors": measure_errors},
        printed,
        [curves],
        [],
    )


def length_extrapolation() -> Any:
    kinds = ["none", "learned", "sinusoidal", "rope", "t5", "alibi", "shaw"]
    calls = []

    def losses_by_position(config, texts, longer, seed):
        assert (texts.shape, longer.shape, seed) == ((600, 16, 33), (128, 129), 0)
        sizes = config.d_model, config.num_heads, config.num_layers, config.max_len
        assert sizes == (32, 4, 2, 32)
        calls.append(config.positions)
        i = len(calls) - 1
        return None if kinds[i] == "learned" else np.repeat([1, 2, 3, 4], 32) + i / 10

    printed = "positions 0-32 32-64 64-96 96-128"
    curves: list[Any] = []
    for i, kind in enumerate(kinds):
        values = [f"{quarter}.{i}00" for quarter in (1, 2, 3, 4)]
        printed += f"\n{kind} " + " ".join(["refused"] * 4 if i == 1 else values)
        if i != 1:
            curves.append((np.arange(4, 128, 8), np.repeat([1, 2, 3, 4], 4) + i / 10))
    curves += [([32, 32], [0, 1]), ([0, 1], [ENTROPY] * 2)]
    return {"losses_by_position": losses_by_position}, printed, [curves], []


def memory() -> Any:
    names = ["Elman", "GRU", "LSTM, forget bias 0", "LSTM, forget bias 1", "LSTM, forget bias 3"]
    cells = [("rnn", 0), ("gru", 0), ("lstm", 0), ("lstm", 1), ("lstm", 3)]
    delays = np.array([2, 5, 10, 20])

    def accuracies(config, lengths, steps, keys):
        assert (lengths, steps, len(keys), config.d_hidden) == ([2, 5, 10, 20], 200, 3, 24)
        i = cells.index((config.cell, config.forget_bias))
        return delays[:, None] / 100 + i / 10 + np.array([-0.01, 0.01, 0])

    printed = "accuracy after 200 steps, 3 seeds: mean (min to max)"
    printed += "\nnetwork 2 later 5 later 10 later 20 later"
    for i, name in enumerate(names):
        values = [k / 100 + i / 10 for k in delays]
        shown = [f"{x:.2f} ({x - 0.01:.2f} to {x + 0.01:.2f})" for x in values]
        printed += "\n" + " ".join([name, *shown])
    curves = [(delays, delays / 100 + i / 10) for i in range(5)] + [([0, 1], [1 / 8] * 2)]
    return {"accuracies": accuracies}, printed, [curves], []


def norm_order() -> Any:
    def train_all(kind, layers, steps, seed):
        assert (steps, seed) == (40, 1)
        losses = np.array([[1, 2], [3, 4], [5, 6]]) + layers / 100
        return losses + 10 * (kind == "pre-norm"), np.arange(1, layers + 1) / 1000

    shown = [f"loss after 40 steps, constant rate / with warmup; lowest possible {ENTROPY:.2f}, "
             "guessing 2.40", "kind, blocks rate 0.001 rate 0.003 rate 0.01"]  # fmt: skip
    below, left, right = [], [], []
    for base, kind in ((0, "post-norm"), (10, "pre-norm")):
        for layers, middle in ((2, 2), (12, 7), (48, 25)):
            x = [f"{base + i}.{layers:02}" for i in range(1, 7)]
            shown.append(f"{kind}, {layers} {x[0]} / {x[1]} {x[2]} / {x[3]} {x[4]} / {x[5]}")
            below.append(f"{kind}, {layers} 0.001 {middle / 1000:.3f} {layers / 1000:.3f}")
            left.append((np.linspace(0, 1, layers), np.arange(1, layers + 1) / 1000))
        rates = 0.001, 0.003, 0.01
        right += [(rates, base + np.array([i, i + 2, i + 4]) + 0.48) for i in (1, 2)]
    shown += ["gradient of W_2 at the first step", "kind, blocks first block middle last", *below]
    curves = [left, [*right, ([0, 1], [ENTROPY] * 2)]]
    return {"train_all": train_all}, "\n".join(shown), curves, []


def operations() -> Any:
    lengths, timed = np.array([16, 64, 256, 1024]), np.array([256, 512, 1024, 2048, 4096])
    printed = """millions of multiplications of one layer, width 64
        layer n = 16 n = 64 n = 256 n = 1024
        self-attention 0.016 0.064 0.256 1.02
        recurrent 0.032 0.128 0.512 2.05
        convolution of 3 0.048 0.192 0.768 3.07
        feed-forward 0.064 0.256 1.02 4.1
        projections 0.08 0.32 1.28 5.12
        one call of attention, one head
        n xla ms xla KiB blockwise ms blockwise KiB"""
    for n in timed:
        printed += f"\n{n} {n}.00 {2 * n} {n / 2:.2f} 64"
    stand_ins = {
        "count": lambda n, d: [1000 * (i + 1) * n * d // 64 for i in range(5)],
        "measure": lambda n, d, rounds: {
            "xla": (n / 1e3 * rounds / 9, 2048 * n), "blockwise": (n / 2e3, 1024 * d)
        },
    }  # fmt: skip
    left = [(lengths, 1000 * (i + 1) * lengths) for i in range(4)] + [([256, 256], [0, 1])]
    return stand_ins, printed, [left, [(timed, 2 * timed), (timed, [64] * 5), (timed, timed)]], []


def path_length() -> Any:
    n = np.array([8, 16, 32, 64])
    stand_ins = {
        "sequential_steps": lambda n, window: [n, 1, window],
        "path_lengths": lambda n, window: [n + window, 3, n // 4],
    }
    headings = [f"{quantity}, n = {count}" for quantity in ("steps", "path") for count in n]
    printed = f"""layer {" ".join(headings)}
        recurrent 8 16 32 64 13 21 37 69
        self-attention 1 1 1 1 3 3 3 3
        window 5 5 5 5 5 2 4 8 16"""
    steps, paths = [n, [1] * 4, [5] * 4], [n + 5, [3] * 4, n // 4]
    return stand_ins, printed, [[(n, y) for y in part] for part in (steps, paths)], []


def perceptron() -> Any:
    """The perceptron converges to 2 x1 + x2 > 2 for AND and x1 + x2 > 0 for OR."""

    def learn_two_layers(answers, steps, width, seed):
        assert (steps, width, seed) == (300, 4, 1)
        w = np.array([[2.0, 0, 1, 0], [1, 1, 0, 0]])
        return {
            "w": w,
            "b": np.array([0, 1.0, 0, 0]),
            "v": np.array([1, -1.0, 2, 0]),
            "c": -0.5,
        }, 0.1

    def output(x1, x2):
        z = np.tanh(2 * x1 + x2) - np.tanh(x2 + 1) + 2 * np.tanh(x1) - 0.5
        return 1 / (1 + np.exp(-z))

    inputs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    outputs = " ".join(f"{output(*x):.3f}" for x in inputs)
    heads = " ".join(f"2 layers ({a}, {b})" for a, b in inputs)
    printed = f"gate perceptron {heads}"
    for gate, epochs in (("AND", "5 epochs"), ("OR", "3 epochs"), ("XOR", "never")):
        printed += f"\n{gate} {epochs} {outputs}"
    points = [([a], [b]) for a, b in inputs]
    side = np.linspace(-0.4, 1.4, 55)
    shades = output(side[None, :], side[:, None])
    lines = [[*points, ((0, 2), -2.0)], [*points, ((0, 0), -1.0)], points]
    return {"learn_two_layers": learn_two_layers}, printed, lines, [shades] * 3


def permutation() -> Any:
    kinds = ["none", "learned", "sinusoidal", "rope", "shaw", "t5", "alibi"]

    def largest_difference(kind, length, width, seed):
        assert (length, width, seed) == (13, 32, 0)
        return 10.0 ** (kinds.index(kind) - 6)

    printed = "positions largest |f(P x) - P f(x)| equivariant"
    for i, kind in enumerate(kinds):
        printed += f"\n{kind} 1.0e{i - 6:+03} {'yes' if i < 2 else 'no'}"
    return {"largest_difference": largest_difference}, printed, [[]], []


def receptive_field() -> Any:
    def gradient_norms(config, length, seed):
        assert (length, seed, config.d_model) == (23, 0, 16)
        field = config.num_layers * (config.window - 1) + 1
        return np.where(np.arange(23) < field, 1 / (1 + np.arange(23)), 0)

    printed = """layers L window W measured L (W - 1) + 1
        1 3 3 3\n2 3 5 5\n3 3 7 7\n4 3 9 9\n1 6 6 6\n2 6 11 11\n3 6 16 16\n4 6 21 21"""
    curves: list[Any] = []
    for field in (6, 11, 16, 21):
        curves += [(np.arange(field), 1 / (1 + np.arange(field))), ([field - 0.5] * 2, [0, 1])]
    return {"gradient_norms": gradient_norms}, printed, [curves], []


def score_variance() -> Any:
    def measure(d, keys, scale):
        return (1.5, d / 1000) if scale is None else (d * scale, keys / 100)

    d = np.array([4, 16, 64, 256, 1024])
    printed = "d var q.k var q.k/sqrt(d) entropy entropy, scaled"
    for n in d:
        printed += f"\n{n} {n}.00 1.500 0.640 {n / 1000:.3f}"
    printed += "\nentropy of uniform weights over 64 keys: ln 64 = 4.159 nats"
    plots = [
        [(d, d), (d, [1.5] * 5)],
        [(d, [0.64] * 5), (d, d / 1000), ([0, 1], [math.log(64)] * 2)],
    ]
    return {"measure": measure}, printed, plots, []


def streaming_windows() -> Any:
    class Zeros:
        def __init__(self, config, frame_dim):
            assert (config.num_layers, config.window, config.d_model, frame_dim) == (3, 9, 16, 5)

        def init(self, key, frames):
            return {}

        def apply(self, params, frames, cache=None):
            return np.zeros((1, frames.shape[1], 16)), cache

    def run_overlapping(apply, frames, history, config):
        return np.full((1, 96, 16), -1 / (1 + history)), 96 + history, 960 * history

    printed = """3 layers of window 9: R = 25 frames; chunks of 8
        method largest error frames per frame products per frame
        overlap 0 1e+00 1.00 0.0
        overlap 6 1e-01 1.06 60.0
        overlap 12 8e-02 1.12 120.0
        overlap 23 4e-02 1.24 230.0
        overlap 24 4e-02 1.25 240.0
        streaming 1e-06 1.00 2.0"""
    stand_ins = {
        "StreamingEncoder": Zeros, "run_overlapping": run_overlapping,
        "run_streaming": lambda apply, frames, config: (np.full((1, 96, 16), 1e-6), 96, 192),
    }  # fmt: skip
    h = np.array([0, 6, 12, 23, 24])
    left = [(h, 1 / (1 + h)), ([0, 1], [1e-6] * 2), ([24, 24], [0, 1])]
    return stand_ins, printed, [left, [(h, 1 + h / 96), ([0, 1], [1, 1])]], []


def vanishing_gradients() -> Any:
    names = ["Elman", "GRU", "LSTM, forget bias 0", "LSTM, forget bias 1", "LSTM, forget bias 3"]

    def measure(length, width, seed, seeds):
        assert (length, width, seed, seeds) == (101, 32, 0, 8)
        return {name: (i + 1) * 10.0 ** -np.arange(101) for i, name in enumerate(names)}

    distances = 0, 1, 5, 10, 20, 50, 100
    printed = "distance T - t " + " ".join(map(str, distances))
    for i, name in enumerate(names):
        printed += f"\n{name} " + " ".join(f"{i + 1}.0e{-d:+03}" for d in distances)
    curves = [(np.arange(101), (i + 1) * 10.0 ** -np.arange(101)) for i in range(5)]
    return {"measure": measure}, printed, [curves], []


def variants() -> Any:
    """The tokenizer is replaced by 31 letters; the bytes follow from the sizes of the model."""
    names = ["8 heads (MHA)", "2 key heads (GQA)", "1 key head (MQA)", "1 head", "no norm"]
    texts = importlib.import_module("transformer_jax.lectures.demos.embeddings").sentences()
    length, configs = len("\n".join(map(" ".join, texts))), list[Any]()

    class Letters:
        vocab_size = 31

        @classmethod
        def train(cls, text, size):
            assert (size, len(text)) == (1024, 9 * length // 10)
            return cls()

        def encode(self, text):
            return [ord(letter) % 31 for letter in text]

    def losses(i):
        return 1.1 + i / 10 + np.array([0, -0.05, 0.05])

    def held_out_losses(config, rows, held_out, steps, seeds):
        assert (steps, [*seeds], rows.shape[1], held_out.shape[1]) == (20, [0, 1, 2], 65, 65)
        counts = len(rows), len(held_out)
        assert counts == ((9 * length // 10 - 1) // 64, (length - 9 * length // 10 - 1) // 64)
        configs.append(config)
        return losses(len(configs) - 1)

    lines, table = [], ["variant parameters cache KiB nats min max perplexity"]
    for i, name in enumerate([*names, "tables apart"]):
        keys = {1: 2 * 8, 2: 8}.get(i, 64)  # width of the keys of a token
        kib = 2 * (1024 * (2 * keys + 1) * 4 + 4) // 1024  # keys, values, positions and length
        lines.append(f"{name} {losses(i)}")
        figures = f"{1.1 + i / 10:.3f} {1.05 + i / 10:.3f} {1.15 + i / 10:.3f}"
        perplexity = f"{math.exp(1.1 + i / 10):.1f}"
        table.append(f"{name} {123_001 + i:,} {kib} {figures} {perplexity}")
    lines.append("31 tokens, 20 steps of 12 rows of 64, 3 seeds")
    points = [(np.exp(losses(i)), [i] * 3) for i in range(6)]
    stand_ins = {
        "BPETokenizer": Letters, "held_out_losses": held_out_losses,
        "num_params": lambda config: 123_000 + configs.index(config) + 1,
    }  # fmt: skip
    return stand_ins, "\n".join(lines + table), [points], []


def window_choice() -> Any:
    windows, late = np.array([1, 2, 4, 8, 16]), np.array([0, 1, 2, 4, 8])
    means = windows[:, None] / 100 + late / 10  # [windows, delays]

    def accuracies(windows, steps, seeds):
        assert (windows, steps, seeds) == ([1, 2, 4, 8, 16], 300, 3)
        return means[:, None] + np.array([0, -0.02, 0.02])[:, None]

    heads = " ".join(f"{d} late ({16 * d} ms)" for d in late)
    printed = f"window W {heads} bytes kept"
    for window, row in zip(windows, means, strict=True):
        kept = window * (2 * 32 + 1) * 4 + 4  # keys, values, positions and length
        printed += f"\n{window} " + " ".join(f"{100 * x:.1f} %" for x in row) + f" {kept}"
    printed += "\nmeans over 3 seeds, which differ by at most 4.0 %"
    left = [(windows, 100 * column) for column in means.T]
    return {"accuracies": accuracies}, printed, [left, [(16 * late, 100 * r) for r in means]], []


CASES = [
    activations, alignment, decoding_cost, depth, embeddings, exposure_bias, length_extrapolation,
    memory, norm_order, operations, path_length, perceptron, permutation, receptive_field,
    rotations, score_variance, streaming_windows, vanishing_gradients, variants, window_choice,
    worked_attention,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_demonstration_prints_and_draws_results(case, monkeypatch, capsys, tmp_path):
    name, (stand_ins, printed, lines, images) = case.__name__, case()
    module = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(
        module, "save_picture", lambda figure, _, name: figures.update({name: figure})
    )
    for function, stand_in in stand_ins.items():
        monkeypatch.setattr(module, function, stand_in)
    module.demonstrate(settings(module.OPTIONS, tmp_path))
    words = [line.split() for line in printed.splitlines()]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == words
    assert drawn(figures[name]) == drawn_on_the_page(name)
    for axes, expected in zip(figures[name].axes, lines, strict=True):
        for line, (x, y) in zip(axes.lines, expected, strict=True):
            if hasattr(line, "get_slope"):
                assert (line.get_xy1(), line.get_slope()) == (x, y)
            else:
                scale = (
                    np.sign(np.sum(line.get_ydata() * np.array(y))) if name == "embeddings" else 1
                )
                np.testing.assert_allclose(
                    np.abs(line.get_xdata()), np.abs(x), rtol=1e-5, atol=1e-6
                )
                np.testing.assert_allclose(scale * line.get_ydata(), y, rtol=1e-5, atol=1e-6)
    shown = [np.asarray(image.get_array()) for axes in figures[name].axes for image in axes.images]
    for image, matrix in zip(shown, images, strict=True):
        np.testing.assert_allclose(image, matrix, rtol=1e-5, atol=1e-6)


def test_drawings_match_pictures_in_docs(monkeypatch, tmp_path):
    """Numbers in the svg files may differ by 0.02 points."""
    module = importlib.import_module("transformer_jax.lectures.demos.drawings")

    def weights(q, k, mask):
        assert mask is None
        scores = np.exp(q[0, :, 0] @ k[0, :, 0].T / math.sqrt(q.shape[-1]))
        return (scores / scores.sum(axis=-1, keepdims=True))[None, None]

    def attend(q, k, v, mask):
        return (weights(q, k, mask)[0, 0] @ v[0, :, 0])[None, :, None]

    def cache_positions(tokens, capacity):
        t, slot = np.ogrid[:tokens, :capacity]
        return np.where(slot <= t, t - (t - slot) % capacity, -1)

    monkeypatch.setattr(module, "dot_product_attention_weights", weights)
    monkeypatch.setattr(module, "dot_product_attention", attend)
    monkeypatch.setattr(module, "cache_positions", cache_positions)
    arguments = settings(module.OPTIONS, tmp_path)
    arguments.format = "svg"
    module.demonstrate(arguments)
    names = ["drawing_attention", "drawing_cache", "drawing_stream", "drawings"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == names
    number = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
    for name in names:
        texts = [folder.joinpath(f"{name}.svg").read_text() for folder in (tmp_path, PICTURES)]
        # skip Matplotlib's version before the figure and the hashes that name clips
        texts = [re.sub(r"\bp[0-9a-f]{10}\b", "", text[text.index("<g id") :]) for text in texts]
        made, kept = (number.sub("x", text) for text in texts)
        assert made == kept, name
        values = ([float(found) for found in number.findall(text)] for text in texts)
        np.testing.assert_allclose(*values, atol=0.02, err_msg=name)
