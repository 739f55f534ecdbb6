"""The command `serve`: errors before it listens. The examples of docs/serve.md test the rest."""

import pytest

from transformer_jax.cli.serve import Serve, main
from transformer_jax.config import ConfigError


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


def test_served_model_is_loaded_with_the_flags_for_its_numbers(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()  # a run
    calls = []

    def load(options, **arguments):
        calls.append((options.model, arguments))
        raise ConfigError("loaded")

    monkeypatch.setattr(Serve, "load", load)
    flags = "--dtype", "bfloat16", "--weights", "int4", "--invariant"
    assert main(["--model", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == "serve: loaded\n"
    assert calls == [(str(tmp_path), dict(dtype="bfloat16", weights="int4", invariant=True))]
