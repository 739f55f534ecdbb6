"""The command plot: table, picture and damaged folders."""

import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.cli.test_train import run_command
from transformer_jax.checkpoints.run_folder import RunFolder, smooth
from transformer_jax.cli import plot
from transformer_jax.cli.plot import COLOURS, draw, labels_of, read_runs, table
from transformer_jax.config import (
    AdamW,
    Lion,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    TrainConfig,
)

BASE = TrainConfig(model=ModelConfig(d_model=32, num_heads=4, max_len=16), batch_size=4)


def write_run(path, config, steps, floor, rate=1000.0):
    """Write a run with a loss that decays to `floor`, evaluated every fifth step."""
    path.mkdir()
    folder = RunFolder(path)
    folder.write_config(replace(config, out=str(path)))
    noise = np.random.default_rng(1).standard_normal(steps + 1)
    for step in range(1, steps + 1):
        loss = floor + 3 / step
        line = {"step": step, "loss": loss + 0.02 * noise[step], "learning_rate": 1e-3 / step}
        line["tokens_per_second"] = rate
        if step % 5 == 0:
            line["val_loss"] = loss + (0.3 if step > 20 else 0.0)
        folder.append_metrics(line)
    return path


@pytest.fixture
def runs(tmp_path):
    wide = replace(BASE, model=replace(BASE.model, d_model=64), accumulation=2)
    return [
        write_run(tmp_path / "small", BASE, 30, 1.5),
        write_run(tmp_path / "wide", wide, 25, 1.25, rate=500.0),
    ]


def test_plot_labels_list_config_differences():
    others = [BASE, replace(BASE, optimizer=Lion(), seed=3), replace(BASE, learning_rate=1e-4)]
    assert labels_of(others) == [
        "learning_rate 0.001, optimizer adamw",
        "learning_rate 0.001, optimizer lion",
        "learning_rate 0.0001, optimizer adamw",
    ]
    cells = [RecurrentConfig(cell=cell) for cell in ("rnn", "lstm", "gru")]
    wide = RecurrentConfig(cell="gru", d_hidden=97)
    of_each = [BASE, *(replace(BASE, model=model) for model in (*cells, wide))]
    assert labels_of(of_each) == [
        "model transformer", "model rnn", "model lstm", "model gru, d_hidden 128",
        "model gru, d_hidden 97",
    ]  # fmt: skip
    assert labels_of([BASE, replace(BASE, seed=3)]) == ["seed 0", "seed 3"]
    assert labels_of([replace(BASE, optimizer=AdamW(beta1=0.5))]) == [""]


def test_results_table_lists_every_run(runs):
    first, small, wide = table(read_runs(runs)).splitlines()
    assert first.split()[:4] == ["run", "step", "tokens", "training"]
    # 4 rows of 16 tokens; the wide run has two micro-batches
    assert small.split()[:3] == ["small", "30", "1,920"] and wide.split()[2] == "3,200"
    held_out = [1.5 + 3 / step + (0.3 if step > 20 else 0) for step in range(5, 31, 5)]
    assert f"{held_out[-1]:.4f}" in small and f"{min(held_out):.4f}, 20" in small
    assert f" {np.exp(min(held_out)):.4g} " in small
    assert small.endswith("1,000  d_model 32, accumulation 1")
    assert wide.endswith("500  d_model 64, accumulation 2")


def test_ngram_baseline_is_plotted_as_horizontal_line(runs, tmp_path, monkeypatch):
    """An n-gram trains in one step, so its loss is a line, which may lie below all curves."""
    counted = replace(BASE, model=NgramConfig(order=3), steps=1, warmup_steps=0)
    path = write_run(tmp_path / "counted", counted, 0, 0.0)
    RunFolder(path).append_metrics({"step": 1, "loss": 0.5, "val_loss": 0.625})
    curves = read_runs([*runs, path])
    row = table(curves).splitlines()[-1]
    assert row.split()[:3] == ["counted", "1", "-"] and f" {np.exp(0.625):.4g} " in row

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: drawn.append(figure))
    draw(curves, "tokens", tmp_path / "runs.png")
    (panel, *_) = drawn[0].axes
    (line,) = [line for line in panel.lines if line.get_linestyle() == "--"]
    assert set(line.get_ydata()) == {0.625}
    assert panel.get_ylim()[0] < 0.625 < panel.get_ylim()[1]
    assert any("counted" in text.get_text() and "1.868" in text.get_text() for text in panel.texts)


@pytest.mark.parametrize(
    ("axis", "last"), [("step", 30), ("tokens", 1920), ("hours", 1920 / 3.6e6)]
)
def test_horizontal_axis_shows_steps_tokens_or_hours(runs, axis, last):
    small = read_runs(runs)[0]
    points = small.points("loss", axis)
    assert len(points) == 30 and points[-1][0] == pytest.approx(last)
    assert len(small.points("val_loss", axis)) == 6


def test_results_table_columns_are_aligned(runs, tmp_path, capsys, monkeypatch):
    """Two short runs; the second has only a step."""
    one, two = (tmp_path / name for name in ("first", "b"))
    for path, seed in ((one, 0), (two, 3)):
        path.mkdir()
        RunFolder(path).write_config(replace(BASE, seed=seed, out=str(path)))
    for step, loss, held_out, rate in (
        (4, 3.0, None, 10.0),
        (2, 2.0, 1.25, None),
        (8, 1.0, 1.5, 30),
    ):
        line = {"step": step, "loss": loss, "val_loss": held_out, "tokens_per_second": rate}
        RunFolder(one).append_metrics(line)
    with RunFolder(one).metrics_file.open("a") as file:
        file.write("x\n")
    RunFolder(two).append_metrics({"step": 1200, "loss": None})
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda *given: drawn.append(given))
    out = tmp_path / "a.svg"
    assert run_command(["plot", str(one), str(two), "--x", "hours", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run     step  tokens  training  held out  best, at step  perplexity  tokens/s  what",
        "first      8     512    2.0000    1.5000      1.2500, 2        3.49        20  seed 0",
        "b      1,200  76,800         -         -              -           -         -  seed 3",
        "first: skipped 1 damaged lines of metrics.jsonl", f"drawn: {out}",
    ]  # fmt: skip
    ((curves, axis, file),) = drawn
    assert (axis, file) == ("hours", out)
    hours = 2 * 64 / 10 / 3600  # from step 2 to step 4 at ten tokens a second
    assert curves[0].points("loss", "hours") == [
        (0.0, 2.0), (pytest.approx(hours), 3.0), (pytest.approx(hours + 4 * 64 / 30 / 3600), 1.0)
    ]  # fmt: skip
    assert curves[0].points("loss", "tokens") == [(128.0, 2.0), (256.0, 3.0), (512.0, 1.0)]
    pairs = replace(curves[0], of_pairs=True)
    assert pairs.perplexity(0.5) == "-" == curves[0].perplexity(700.0)
    assert curves[0].perplexity(0.5) == "1.649"


def test_each_curve_has_distinct_color_and_label(runs, tmp_path, monkeypatch):
    curves = read_runs(runs)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: drawn.append((figure, out)))
    draw(curves, "step", tmp_path / "runs.png")
    ((figure, out),) = drawn
    loss, rate, speed = figure.axes
    assert out == tmp_path / "runs.png"
    faint, smoothed, held_out, *others = loss.lines
    assert len(others) == 3 and loss.get_xlabel() == "step" and rate.get_xlabel() == ""
    points = curves[0].points("loss", "step")
    assert [*zip(faint.get_xdata(), faint.get_ydata(), strict=True)] == points
    assert [*smoothed.get_ydata()] == list(smooth([y for _, y in points]))
    assert [*held_out.get_xdata()] == [5, 10, 15, 20, 25, 30] and held_out.get_marker() == "o"
    assert held_out.get_color() == faint.get_color() != others[0].get_color()
    rates = [line.get_ydata()[-1] for line in rate.lines]
    assert rates == [pytest.approx(1e-3 / 30), pytest.approx(1e-3 / 25)]
    assert [line.get_ydata()[0] for line in speed.lines] == [1000, 500]
    assert speed.get_ylim()[0] == 0
    later = [y for one in curves for name in ("loss", "val_loss")
             for x, y in one.points(name, "step") if x >= 3]  # fmt: skip
    room = 0.08 * (max(later) - min(later))
    assert loss.get_ylim() == pytest.approx((min(later) - room, max(later) + 3 * room))
    ends = [(one.points("val_loss", "step")[-1][1], one.name) for one in curves]
    wanted = [f" {name}  {y:.3f} ({np.exp(y):.4g})" for y, name in sorted(ends)]
    assert [text.get_text() for text in loss.texts] == wanted
    places = [text.xyann[1] for text in loss.texts]
    least = np.subtract(*loss.get_ylim()[::-1]) / 22
    assert places[0] == min(ends)[0] and places[1] == max(max(ends)[0], places[0] + least)
    assert [text.get_color() for text in loss.texts] == [COLOURS[1], COLOURS[0]]
    assert [axes.get_title(loc="left") for axes in (rate, speed)] == [
        "learning rate", "tokens per second",
    ]  # fmt: skip


def test_labels_are_stacked_by_final_loss_whatever_the_length_of_the_runs(
    runs, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out: drawn.append(figure))
    long, short = read_runs(runs)
    lines = [line | {"val_loss": 3.0} for line in short.lines if "val_loss" in line]
    draw([replace(short, lines=tuple(lines)), long], "step", tmp_path / "runs.png")
    texts = drawn[0].axes[0].texts
    assert [text.get_text().split()[0] for text in texts] == ["small", "wide"]
    assert texts[1].xyann[1] == 3.0


@pytest.mark.slow
def test_plot_counts_damaged_metric_lines(runs, tmp_path, capsys):
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": "x"}\nnot json\n' + json.dumps({"step": 31, "loss": None}) + "\n")
    out = tmp_path / "compared.png"
    assert run_command(["plot", *map(str, runs), "--x", "tokens", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "small: skipped 2 damaged lines of metrics.jsonl" in printed
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_run_names_in_any_script_are_drawn(runs, tmp_path):
    named = [replace(curves, name="学习 \U00012000") for curves in read_runs(runs)]
    draw(named, "step", tmp_path / "a.png")  # a missing glyph is a warning, which fails the test
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_folder_without_run_raises_one_line_error(tmp_path, capsys):
    assert run_command(["plot", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"plot: {tmp_path} is not a run: config.json is missing\n"
    empty = tmp_path / "empty"
    empty.mkdir()
    RunFolder(empty).write_config(BASE)
    assert run_command(["plot", str(empty)]) == 2
    assert "no metrics yet" in capsys.readouterr().err
