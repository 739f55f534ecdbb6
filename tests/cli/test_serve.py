"""The command `serve`: what it refuses before it listens. Its page runs it: docs/serve.md."""

import pytest

from transformer_jax.cli.serve import main


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "--model TEXT is needed"),
        (["--model", "x", "--port", "65536"], "port is 65536: must be from 0 to 65535"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(argv, why, capsys):
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("serve: ") and why in line
