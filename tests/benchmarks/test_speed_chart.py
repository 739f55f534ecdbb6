"""The chart of the README: equal to the committed results."""

import json
import re
from math import prod
from pathlib import Path

import pytest

from benchmarks import speed_chart

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def attention_ratio(direction: str) -> float:
    """Return the geometric mean over the cells, instead of the mean stored in the file."""
    cells = [c for c in result("attention_native_zen5")["cases"] if c["direction"] == direction]
    assert len(cells) == 10
    return prod(c["speedup_of_ours"]["torch"] for c in cells) ** (1 / len(cells))


def training_ratio(name: str) -> float:
    small, medium = result(name)["cases"]
    assert (small["case"], medium["case"]) == ("small", "medium")
    return medium["speedup_of_ours"]["torch"]


def token_ratio(row: int, peer: str) -> float:
    case = result("decode_native_b1")["cases"][row]
    assert case["weights"] == ("f32", "bf16", "int8")[row]
    return case["token_speedup_of_ours"][peer]["median"]


def h100_ratio(case: str, direction: str, peer: str) -> float:
    """Return a ratio from the file of JSON lines by text search."""
    text = (RESULTS / "h100" / "goals.jsonl").read_text()
    start = text.index(f'"case": "{case}", "direction": "{direction}", "ours": "pallas"')
    ratios = json.loads(re.search(r'"speedup_of_ours": (\{.*?\})', text[start:])[1])
    return ratios[peer]


def loading_ratio() -> float:
    ours, theirs, _ = result("load_cpu")["contenders"]
    assert (ours["name"], theirs["name"]) == ("transformer_jax", "transformers")
    return theirs["ours_is_faster"]


def committed_figures() -> list[float]:
    square, packed = "causal-16k-h128-s8192", "documents12-h128-s8192"
    return [
        attention_ratio("forward"),
        attention_ratio("forward+backward"),
        training_ratio("train_step_zen5"),
        training_ratio("train_step_avx2"),
        token_ratio(0, "Hugging Face"),
        token_ratio(0, "CTranslate2"),
        token_ratio(0, "llama.cpp"),
        token_ratio(1, "llama.cpp"),
        token_ratio(2, "llama.cpp"),
        loading_ratio(),
        h100_ratio(square, "forward", "torch cudnn"),
        h100_ratio(square, "forward", "jax-linear-attention"),
        h100_ratio(square, "backward", "jax.nn cudnn"),
        h100_ratio(packed, "forward+backward", "torch flex"),
    ]


def test_each_chart_bar_matches_committed_measurement():
    (axes,) = speed_chart.draw().axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx(committed_figures(), rel=1e-9)


@pytest.mark.parametrize("name", ["speed", "speed_dark"])
def test_committed_charts_show_committed_measurements(name):
    text = (speed_chart.PICTURES / f"{name}.svg").read_text()
    shown = re.findall(r">(\d\.\d\d)×<", text)
    assert shown == [f"{value:.2f}" for value in committed_figures()]


def test_chart_versions_and_devices_match_results():
    """A label's version is in the result's environment; a Zen generation is an AMD CPU family."""
    families = {speed_chart.ZEN5: ("26",), speed_chart.ZEN4: ("25", "17")}
    families[speed_chart.ZEN3] = ("25", "1")
    names = {"PyTorch": "torch", "Transformers": "transformers", "CTranslate2": "ctranslate2"}
    for bar in speed_chart.CPU:
        environment = json.loads((RESULTS / bar.file).read_text())["environment"]
        name = next((names[key] for key in names if bar.peer.startswith(key)), "llama-cpp-python")
        version = re.search(r"\d[\d.]*\d", bar.peer)[0]
        assert environment["packages"][name].startswith(version), bar
        if bar.device in families:
            found = environment["processor"]
            family = families[bar.device]
            assert (found["family"], found["model"])[: len(family)] == family, bar
    machine = json.loads((RESULTS / "h100" / "goals.jsonl").read_text().splitlines()[0])["machine"]
    assert "H100" in machine["device"]
    for bar in speed_chart.GPU:
        version = re.search(r"\d[\d.]*\d", bar.peer.replace("cuDNN in ", ""))[0]
        packages = [machine["packages"][key] for key in ("torch", "jax", "jax-linear-attention")]
        assert any(package.startswith(version) for package in packages), bar
