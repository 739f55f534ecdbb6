"""Tests of the demo command: its list, custom options, and errors."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from transformer_jax import __main__
from transformer_jax.config import ConfigError
from transformer_jax.lectures import demo
from transformer_jax.lectures.demos import demonstrations

pytestmark = pytest.mark.usefixtures("quick_compilation")


def settings(*options, **values):
    from transformer_jax.lectures.demos import shared  # imports Matplotlib

    return shared.settings(*options, **values)


def test_help_lists_all_demonstrations(capsys):
    assert __main__.main(["demo"]) == 0
    printed = capsys.readouterr().out
    for name, line in demonstrations().items():
        assert line.endswith(".") and f"  {name} " in printed and line in printed


def test_unknown_demonstration_suggests_nearest_name(capsys):
    assert demo.main(["rotation"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: demonstration is 'rotation': must be activations or ")
    assert error.endswith("did you mean rotations?\n")


@pytest.mark.parametrize("name", demonstrations())
def test_unsupported_demonstration_option_is_rejected(name, tmp_path):
    options = importlib.import_module(f"transformer_jax.lectures.demos.{name}").OPTIONS
    every = set(importlib.import_module("transformer_jax.lectures.demos.shared").MEANINGS)
    assert set(options) <= every
    for other in every - set(options):
        with pytest.raises(ConfigError, match=f"^{other} is not supported: the options of this"):
            settings(options, tmp_path, **{other: "7"})


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("rotations --window 7", "--window: no such flag; did you mean --width?"),
        ("rotations --tokens 0", "tokens is 0: must be positive"),
        ("rotations --tokens 1", "tokens is 1: must be at least 2: one position is rotated to "
         "another"),
        ("rotations --width 7", "width is 7: must be a multiple of 2, for pairs of sine and "
         "cosine"),
        ("receptive_field --width 6", "width is 6: must be a multiple of 4, for 2 heads of even "
         "width"),
        ("streaming_windows --width 2", "width is 2: must be a multiple of 4, for 2 heads of even "
         "width"),
        ("exposure_bias --width 6", "width is 6: must be a multiple of 4, for 2 heads of even "
         "width"),
        ("decoding_cost --width 6", "width is 6: must be a multiple of 4, for 2 heads of even "
         "width"),
        ("length_extrapolation --width 12", "width is 12: must be a multiple of 8, for 4 heads of "
         "even width"),
        ("variants --width 24", "width is 24: must be a multiple of 16, for 8 heads of even width"),
        ("permutation --tokens 1", "tokens is 1: must be at least 2: one token has no other order"),
        ("path_length --tokens 1", "tokens is 1: must be at least 2: a path connects two tokens"),
        ("length_extrapolation --tokens 2", "tokens is 2: must be at least 3: a token is a "
         "function of the two before it"),
        ("embeddings --width 1", "width is 1: must be at least 2: the vectors are drawn in a "
         "plane"),
        ("perceptron --seed 4294967296", "seed is 4294967296: must be below 2**32"),
        ("permutation --seed -1", "seed is -1: must not be negative"),
        ("permutation --width 4 --quick", "width is 4: must be a multiple of 8, for 4 heads of "
         "even width"),
        ("path_length --window 1", "window is 1: must be at least 2: a token that sees only "
         "itself has no path"),
        ("streaming_windows --tokens 12", "tokens is 12: must be a multiple of 8, the number of "
         "frames per chunk"),
        ("worked_attention --sentence=", "sentence is '': must contain a word"),
        ("streaming_windows --windw 7", "--windw: no such flag; did you mean --window?"),
        ("rotations --dark", "dark needs --format svg"),
    ],
)  # fmt: skip
def test_error_line_states_name_value_and_rule(argv, error, tmp_path, capsys):
    try:
        status = demo.main([*argv.split(), "--out", str(tmp_path)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert capsys.readouterr().err == f"demo {argv.split()[0]}: {error}\n"
    assert not list(tmp_path.iterdir())


def test_unusable_output_folder_is_rejected_before_computation(tmp_path, capsys):
    out = tmp_path / "a"
    out.touch()
    assert demo.main(["rotations", "--out", str(out)]) == 1
    assert capsys.readouterr() == ("", f"demo rotations: {out}: File exists\n")


def test_unknown_word_is_rejected_before_training(tmp_path, capsys):
    argv = ["alignment", "--sentence", "je suis roi", "--out", str(tmp_path)]
    assert demo.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo alignment: sentence is 'je suis roi': 'roi' is not one of a, ")


def test_text_shorter_than_row_is_rejected_before_training(tmp_path):
    module = importlib.import_module("transformer_jax.lectures.demos.variants")
    rule = "tokens is 3000: must be below [4-6].., the number of tokens in the shorter part of the"
    with pytest.raises(ConfigError, match=rule):
        module.demonstrate(settings(module.OPTIONS, tmp_path, quick=True, tokens=3000))


@pytest.mark.slow
def test_permutation_demonstration_works_with_two_tokens(tmp_path):
    module = importlib.import_module("transformer_jax.lectures.demos.permutation")
    found = module.demonstrate(settings(module.OPTIONS, tmp_path, quick=True, tokens=2))
    assert found["none"] < 1e-4 < found["rope"]


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_words_in_any_script_are_drawn_verbatim(tmp_path, capsys):
    r"""Includes text that looks like math, an invalid \\frac, and letters that few fonts have."""
    argv = "--sentence", "$x$ $\\frac$ 日本 \U00012000", "--format", "svg", "--out", str(tmp_path)
    assert demo.main(["worked_attention", *argv]) == 0
    assert demo.main(["drawings", *argv, "--preset", "tiny"]) == 0
    drawn = (tmp_path / "drawing_attention.svg").read_text("utf-8")
    assert "$\\frac$" in drawn and ("\\u65e5\\u672c" in drawn or "日本" in drawn)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_demonstration_uses_custom_options(tmp_path, capsys):
    """Check the printed rows and columns and the requested picture."""
    argv = ["worked_attention", "--sentence", "the cat sat on it", "--seed", "3"]
    assert demo.main([*argv, "--format", "svg", "--dark", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    scores = printed.partition("scores S\n")[2].splitlines()[:5]
    assert [line.split()[0] for line in scores] == ["the", "cat", "sat", "on", "it"]
    assert all(len(line.split()) == 6 for line in scores)
    names = ["worked_attention.svg", "worked_attention_dark.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    module = importlib.import_module("transformer_jax.lectures.demos.rotations")
    found = module.demonstrate(settings(module.OPTIONS, tmp_path, tokens=17, width=6))
    assert found["table"].shape == (17, 6) and np.isfinite(found["error"])


@pytest.mark.slow
@pytest.mark.parametrize("name", demonstrations())
def test_every_option_of_every_demonstration_works(name, tmp_path):
    """Run each demonstration with small non-default values; `demos/` tests the claims."""
    values = {"tokens": 8, "window": 4, "layers": 3, "width": 16, "seed": 5, "steps": 3,
              "preset": "tiny", "sentence": "je suis content"}  # fmt: skip
    module = importlib.import_module(f"transformer_jax.lectures.demos.{name}")
    values = {option: values[option] for option in module.OPTIONS if option in values}
    module.demonstrate(settings(module.OPTIONS, tmp_path, quick=True, **values))
    assert (tmp_path / f"{name}.png").exists()
