"""The command `serve`: errors before it listens. The examples of docs/serve.md test the rest."""

import pytest

from transformer_jax.cli.serve import main


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "--model TEXT is required"),
        (["--model", "x", "--port", "65536"], "port is 65536: must be from 0 to 65535"),
    ],
)
def test_invalid_serve_flag_prints_one_line_error(argv, why, capsys):
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("serve: ") and why in line
