"""Every command refuses a flag's value that is none of its choices in one line."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from transformer_jax.__main__ import main
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
