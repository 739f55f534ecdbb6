"""Chart in the README, which shows measured speed relative to peers from committed results.

    python -m benchmarks.speed_chart            # write docs/pictures/speed.svg and speed_dark.svg
    python -m benchmarks.speed_chart --table    # print the same figures

A bar is the ratio of a peer's time to ours. Above 1.0, this library is faster. Nothing is measured
here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"

ZEN5, ZEN4, ZEN3 = "2 Zen 5 cores", "2 Zen 4 cores", "2 Zen 3 cores"
H100 = "NVIDIA H100"


@dataclass(frozen=True)
class Bar:
    """Ratio with its task, the peer and its version, the device, and the source of the figure."""

    task: str
    peer: str
    device: str
    file: str
    ratio: Callable[[Any], float]
    """Function that reads the ratio from the content of `file`."""

    def value(self) -> float:
        return self.ratio(json.loads((RESULTS / self.file).read_text()))


@dataclass(frozen=True)
class GoalBar(Bar):
    """Ratio in a file of JSON lines, with one line per check."""

    case: str
    direction: str

    def value(self) -> float:
        lines = map(json.loads, (RESULTS / self.file).read_text().splitlines())
        found = [x for line in lines for x in line.get("found", ()) if isinstance(x, dict)]
        (case,) = (
            case
            for result in found
            for case in result["cases"]
            if (case["case"], case["direction"]) == (self.case, self.direction)
        )
        return self.ratio(case["speedup_of_ours"])


def attention(direction: str) -> Callable[[Any], float]:
    return lambda d: d["results"]["geometric_means"][direction]["torch"]["mean"]


def train_step(case: str) -> Callable[[Any], float]:
    return lambda d: next(
        c["speedup_of_ours"]["torch"] for c in d["results"]["cases"] if c["case"] == case
    )


def decoding(weights: str, peer: str) -> Callable[[Any], float]:
    return lambda d: next(
        c["token_speedup_of_ours"][peer]["median"]
        for c in d["results"]["cases"]
        if c["weights"] == weights
    )


def loading(data: Any) -> float:
    return next(
        c["ours_is_faster"] for c in data["results"]["contenders"] if c["name"] == "transformers"
    )


def goal(task: str, peer: str, case: str, direction: str, key: str) -> GoalBar:
    return GoalBar(task, peer, H100, "h100/goals.jsonl", lambda d: d[key], case, direction)


TORCH, LLAMA_CPP = "PyTorch 2.13", "llama.cpp (Python binding 0.3.36)"
SQUARE, PACKED = "causal-16k-h128-s8192", "documents12-h128-s8192"
CPU = [
    Bar("Causal attention, forward", TORCH, ZEN5, "attention_native_zen5.json",
        attention("forward")),
    Bar("Causal attention, forward + backward", TORCH, ZEN5, "attention_native_zen5.json",
        attention("forward+backward")),
    Bar("Training step, 6 layers, width 384", TORCH, ZEN5, "train_step_zen5.json",
        train_step("medium")),
    Bar("Training step, 6 layers, width 384", TORCH, ZEN3, "train_step_avx2.json",
        train_step("medium")),
    Bar("GPT-2 decoding, float32", "Transformers 5.24", ZEN4, "decode_native_b1.json",
        decoding("f32", "Hugging Face")),
    Bar("GPT-2 decoding, float32", "CTranslate2 4.8.5", ZEN4, "decode_native_b1.json",
        decoding("f32", "CTranslate2")),
    Bar("GPT-2 decoding, float32", LLAMA_CPP, ZEN4, "decode_native_b1.json",
        decoding("f32", "llama.cpp")),
    Bar("GPT-2 decoding, bfloat16", LLAMA_CPP, ZEN4, "decode_native_b1.json",
        decoding("bf16", "llama.cpp")),
    Bar("GPT-2 decoding, int8", LLAMA_CPP, ZEN4, "decode_native_b1.json",
        decoding("int8", "llama.cpp")),
    Bar("Loading a 1 GB Llama", "Transformers 5.23", "2 EPYC cores", "load_cpu.json", loading),
]  # fmt: skip
GPU = [
    goal("Causal attention, forward", "cuDNN in PyTorch 2.11", SQUARE, "forward", "torch cudnn"),
    goal("Causal attention, forward", "jax-linear-attention 0.1.0", SQUARE, "forward",
         "jax-linear-attention"),
    goal("Causal attention, backward", "cuDNN in JAX 0.11.2", SQUARE, "backward", "jax.nn cudnn"),
    goal("Packed documents, forward + backward", "FlexAttention, PyTorch 2.11", PACKED,
         "forward+backward", "torch flex"),
]  # fmt: skip
BARS = [*CPU, *GPU]


def draw(dark: bool = False) -> Figure:
    """Draw one horizontal bar per ratio and a line at 1.0."""
    ink, quiet, bar, slower = (
        ("#e6edf3", "#9da7b3", "#4f9cf0", "#d29a5b") if dark else
        ("#1f2328", "#59636e", "#2f6fbb", "#b9793a")
    )  # fmt: skip
    figure = Figure(figsize=(8.4, 5.6), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    # One empty row separates the CPUs from the GPU.
    rows = [*range(len(CPU)), *(len(CPU) + 1 + i for i in range(len(GPU)))]
    for row, one in zip(rows, BARS, strict=True):
        value = one.value()
        axes.barh(row, value, height=0.66, color=bar if value >= 1 else slower)
        label = max(value, 1) if value > 0.8 else value  # does not touch the line at 1.0
        axes.text(label + 0.03, row, f"{value:.2f}×", va="center", color=ink, fontsize=10)
        axes.text(-0.04, row - 0.17, one.task, ha="right", va="center", color=ink, fontsize=9.5)
        under = f"{one.peer} · {one.device}"
        axes.text(-0.04, row + 0.22, under, ha="right", va="center", color=quiet, fontsize=8)
    axes.axvline(1, color=ink, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1.03, -0.95, "1.0: as fast as the peer", color=quiet, fontsize=8.5, va="center")
    for row, title in ((-0.95, "CPU, float32 unless stated"), (len(CPU), "GPU, bfloat16")):
        style = {"ha": "right", "va": "center", "fontsize": 9.5, "fontweight": "bold"}
        axes.text(-0.04, row, title, color=ink, **style)
    axes.set_xlim(0, 3.2)
    axes.set_ylim(rows[-1] + 0.6, -1.3)
    axes.set_xlabel("times as fast as the peer", color=quiet)
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=quiet, length=0)
    axes.spines[:].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the figures instead")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the pictures")
    options = parser.parse_args()
    if options.table:
        for one in BARS:
            print(f"{one.value():.2f}  {one.task} | {one.peer} | {one.device} | {one.file}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, dark in (("speed", False), ("speed_dark", True)):
        # A fixed salt and no date ensure that equal figures result in equal files.
        with matplotlib.rc_context({"svg.hashsalt": "speed", "svg.fonttype": "none"}):
            path = options.out / f"{name}.svg"
            draw(dark).savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
