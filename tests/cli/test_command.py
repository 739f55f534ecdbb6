"""Every command refuses a flag's value that is none of its choices in one line."""

import pytest

from transformer_jax.__main__ import main


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
