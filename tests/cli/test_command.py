"""Every command refuses a flag's value that is none of its choices in one line."""

import contextlib
import importlib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from transformer_jax.__main__ import COMMANDS, main
from transformer_jax.cli import command
from transformer_jax.cli.generate import _answer


@pytest.mark.slow_except("argv0-nearest: bfloat16", "argv1-nearest: last")
@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["generate", "--dtype", "bf16"], "nearest: bfloat16"),
        (["evaluate", "--checkpoint", "lats"], "nearest: last"),
        (["convert", "--dtype", "half"], "nearest: float16"),
        (["generate", "--checkpoint", "bset"], "nearest: best"),
    ],
)
def test_a_wrong_choice_names_the_one_it_resembles(argv, hint, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    said = capsys.readouterr().err
    assert said.endswith(f"{hint}\n") and said.count("\n") == 1


def test_answer_of_a_file_is_one_line_to_every_reader_of_lines(capsys):
    answers = ["a\nb\r\x0b\x85\u2028c", "é d"]
    model = SimpleNamespace(kind="masks", generate=lambda texts: answers)
    _answer(Namespace(prompts="file"), model, ["x", "y"])
    written = capsys.readouterr().out
    assert written.splitlines() == [r"a\nb\r\x0b\x85\u2028c", "é d"]


REQUIRED = {
    ("compare", "data"), ("convert", "to"), ("export", "to"), ("plan", "target"),
    ("plot", "runs"), ("prepare", "data"), ("prepare", "out"),
}  # fmt: skip
"""The flags without which a command has nothing to do."""


def test_help_says_what_every_flag_of_every_command_takes(monkeypatch):
    """A metavar is a word for the value; argparse would make one of the flag's name."""
    parsers = {}

    def keep(parser, argv):
        parsers[parser.name] = parser
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Parser, "parse_args", keep)
    monkeypatch.setattr(command.Parser, "parse_known_args", keep)
    names = {*COMMANDS} - {"train", "demo"}  # whose flags are fields, and a demonstration's own
    for name in names:
        with contextlib.suppress(KeyboardInterrupt):
            importlib.import_module(f"transformer_jax.cli.{name}").main(["x"])
    assert parsers.keys() == names
    for name, parser in parsers.items():
        assert parser.description and not parser.allow_abbrev
        for action in parser._actions:
            assert action.help, (name, action.dest)
            assert action.required == ((name, action.dest) in REQUIRED)
            if isinstance(action.default, int | float) and type(action.default) is not bool:
                assert f"default {action.default:g}" in action.help.replace(":", "")
            if action.nargs == 0 or action.choices is not None:
                continue
            assert action.type in (int, float, Path, None), (name, action.dest)
            bare = name in ("compare", "plan", "plot") and "_" not in action.dest
            assert action.metavar is not None or bare or name == "compare", (name, action.dest)
