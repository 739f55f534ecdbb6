"""The runner of commands: help, errors, signals and exit statuses."""

import dataclasses
import importlib
import os
import signal
from types import SimpleNamespace

import pytest

from transformer_jax.__main__ import COMMANDS, LECTURES, main
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.cli import command, process
from transformer_jax.cli.flags import ConfigFlags
from transformer_jax.cli.run_flags import parse
from transformer_jax.config import ConfigError
from transformer_jax.lectures import demo


@pytest.mark.slow_except("argv0-did you mean bfloat16?", "argv1-did you mean last?")
@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["generate", "--model", "x", "--dtype", "bf16"], "did you mean bfloat16?"),
        (["evaluate", "--model", "x", "--checkpoint", "lats"], "did you mean last?"),
        (["convert", "--model", "x", "--to", "y", "--dtype", "half"], "did you mean float16?"),
        (["generate", "--model", "x", "--checkpoint", "bset"], "did you mean best?"),
    ],
)
def test_invalid_choice_suggests_nearest_match(argv, hint, capsys):
    assert main(argv) == 2
    error_line = capsys.readouterr().err
    assert error_line.endswith(f"{hint}\n") and error_line.count("\n") == 1


MODEL = {"generate", "serve", "evaluate", "inspect", "nearest", "convert", "export"}
REQUIRED = {
    ("compare", "data"), ("convert", "to"), ("export", "to"), ("inspect", "prompt"),
    ("nearest", "word"), ("plan", "target"), ("plot", "runs"), ("prepare", "data"),
    ("prepare", "out"), ("tokens", "prompt"), *((name, "model") for name in MODEL),
}  # fmt: skip
"""Required flags of the commands."""


def test_help_describes_every_flag_of_every_command(capsys):
    needed = set()
    for name in {*COMMANDS} - {"train", "demo"}:  # their flags come from configs and demos
        folder = "lectures" if name in LECTURES else "cli"
        module = importlib.import_module(f"transformer_jax.{folder}.{name}")
        with pytest.raises(SystemExit) as ended:
            module.main(["--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and (module.__doc__ or "").splitlines()[0] in text
        own = module.PlanOptions if name == "plan" else getattr(module, name.title())
        for path, (field,) in ConfigFlags(own, none=False).fields.items():
            line = field.help(None, False, "")
            assert len(line) > 5 and line[0] != "[", (name, path)
            # Lines are wrapped, even at the hyphen of a name.
            assert "".join(line.split()) in "".join(text.split()), (name, path)
            if field.default is dataclasses.MISSING:
                needed.add((name, path[0]))
            elif field.default not in (None, ()):
                assert line.endswith("]"), (name, path)
    assert needed == REQUIRED


@pytest.mark.parametrize(("name", "meant"), [("attention", "inspect --what attention"),
                                             ("inside", "inspect")])  # fmt: skip
def test_renamed_command_is_rejected_with_new_name(name, meant, capsys):
    assert main([name, "--model", "x"]) == 2
    assert capsys.readouterr().err.endswith(f"; use {meant}\n")


def test_error_is_one_line_and_names_settings_as_flags():
    for error, line in (
        (ValueError("a\n  b"), "a b"), (ValueError(""), "ValueError"),
        (KeyError("x"), "KeyError: 'x' (--debug shows the traceback)"),
        (ZeroDivisionError("y"), "ZeroDivisionError: y (--debug shows the traceback)"),
        (OSError(2, "No such file", "f"), "f: No such file"), (OSError(5, "broken"), "broken"),
        (OSError("plain"), "plain"),
        (ValueError("use `text_errors='replace'` or `resume=True`"),
         "use --text-errors replace or --resume"),
    ):  # fmt: skip
        assert process.one_line(error) == line


def test_first_signal_is_recorded_and_second_ends_process(monkeypatch, capfd):
    ended, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(process.os, "_exit", ended.append)
    with process.interrupts() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] and ended == []
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
    line = "\nstopping after this step; a second signal stops immediately\n"
    assert capfd.readouterr().err == line * 2  # twice, because `_exit` is replaced by a recorder


@dataclasses.dataclass(frozen=True)
class Name:
    """Options."""

    it: str = ""


def test_exit_status_reflects_error_type(capsys):
    def fail(error):
        def work(options):
            raise error

        return command.run(Name, ["--it", "x"], work)

    assert command.run(Name, ["--it", "x"], lambda options: None) == 0
    assert command.run(Name, [], lambda options: 1) == 1
    assert fail(KeyboardInterrupt()) == 130
    for error, status in (
        (CheckpointError("a"), 1), (OSError(2, "no", "f"), 1), (ConfigError("b"), 2),
        (KeyError(3), 2),
    ):  # fmt: skip
        capsys.readouterr()
        assert fail(error) == status
        assert capsys.readouterr().err == f"name: {process.one_line(error)}\n"
    with pytest.raises(KeyError):
        command.run(Name, ["--debug"], lambda options: {}["x"])


def test_process_flags_initialize_jax_distributed(monkeypatch):
    joined = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *args: joined.append(args))
    for argv, wanted in (
        ("--distributed", (None, None, None)),
        ("--coordinator h:1 --processes 3 --process 2", ("h:1", 3, 2)),
    ):
        assert parse(argv.split()).start.join()
        assert joined.pop() == wanted
    assert not parse([]).start.join() and not joined
    for argv, message in (
        ("--distributed --process 1", "pass only one of distributed and coordinator"),
        (
            "--process 1",
            "coordinator is None: pass all of coordinator, processes and process, or none",
        ),
        ("--coordinator h --processes x --process 1", "processes is 'x': must be INTEGER"),
        ("--coordinator h --processes 2 --process 2", "process is 2: must be below processes, 2"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            parse(argv.split())


def test_demo_flags_set_demo_options(monkeypatch, tmp_path, capsys):
    seen = []
    own = SimpleNamespace(
        __doc__="About it.", demonstrate=seen.append, OPTIONS={"tokens": (7, 3), "seed": (1, 1)}
    )
    found = importlib.import_module
    load = lambda name, *more: own if name.endswith("rotations") else found(name, *more)  # noqa: E731
    monkeypatch.setattr(demo.importlib, "import_module", load)
    out = tmp_path / "a" / "b"
    argv = ["rotations", "--out", str(out), "--tokens", "5"]
    assert demo.main([*argv, "--format", "svg", "--dark"]) == 0
    assert demo.main(["rotations", "--out", str(out), "--quick"]) == 0
    one, two = seen
    assert (one.tokens, one.seed, one.out, one.format, one.dark) == (5, 1, out, "svg", True)
    assert (two.tokens, two.quick, two.format, two.dark) == (3, True, "png", False)
    assert out.is_dir()
    assert demo.main([*argv, "--dark"]) == 2
    assert capsys.readouterr().err == "demo rotations: dark needs --format svg\n"
    with pytest.raises(SystemExit):
        demo.main(["rotations", "--help"])
    text = capsys.readouterr().out
    assert (
        "About it." in text and "default: 7." in text and "--width" not in text.split("options:")[1]
    )
    assert demo.main(["--help"]) == demo.main(["-h"]) == 0
