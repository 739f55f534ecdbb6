"""The command that continues a text with a trained run.

python -m transformer_jax.generate --run FOLDER --prompt TEXT

An import of `transformer_jax.generate`, in whichever way, gives the function (of decode.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from transformer_jax.config import ConfigError
from transformer_jax.flags import spelled


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 (the run cannot be read) or 2 (usage)."""
    parser = _parser()
    flags = [option for action in parser._actions for option in action.option_strings]
    try:
        arguments = parser.parse_args(spelled(sys.argv[1:] if argv is None else argv, flags))
    except ConfigError as error:
        parser.error(str(error))
    try:
        _write(arguments)
        return 0
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError) as error:
        if arguments.debug:
            raise
        from transformer_jax.checkpoint import CheckpointError

        print(f"generate: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError | OSError) else 2


def _write(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"seed is {arguments.seed}: must be at least 0 and below 2**32")
    if arguments.tokens < 1:
        raise ConfigError(f"tokens is {arguments.tokens}: must be positive")
    from pathlib import Path

    import jax

    from transformer_jax import checkpoint
    from transformer_jax.completion import complete
    from transformer_jax.models import init_params
    from transformer_jax.run_folder import RunFolder

    sampler = _sampler(arguments)
    folder = RunFolder(Path(arguments.run))
    config = folder.read_config()
    steps = checkpoint.saved_steps(folder.checkpoints)
    if not steps:
        raise ConfigError(f"run is {arguments.run!r}: it has no checkpoint yet")
    step = steps[-1]
    if arguments.checkpoint == "best":
        best = checkpoint.best_step(folder.checkpoints)
        if best is None:
            raise ConfigError("checkpoint is 'best': none was evaluated yet; 'last' is there")
        step = best
    path = checkpoint.step_path(folder.checkpoints, step)
    metadata = checkpoint.read_manifest(path).metadata
    tokenizer = folder.read_tokenizer(metadata["tokenizer_sha256"])
    template = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    params = checkpoint.restore(path, {"params": template})["params"]
    pieces = complete(
        config.model,
        params,
        tokenizer,
        arguments.prompt,
        arguments.tokens,
        sampler=sampler,
        key=jax.random.key(arguments.seed),
    )
    with contextlib.suppress(AttributeError):  # a replaced stdout may have no such method
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(arguments.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _sampler(arguments: argparse.Namespace):
    from transformer_jax.sampling import Sample, Temperature, TopK, TopP

    processors = []
    for name, kind in (("temperature", Temperature), ("top_k", TopK), ("top_p", TopP)):
        value = getattr(arguments, name)
        if value is not None:
            try:
                processors.append(kind(value))
            except ValueError as error:
                rule = str(error).partition(": ")[2]
                raise ConfigError(f"{name} is {value!r}: {rule}") from None
    return Sample(*processors)


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            self.exit(2, f"generate: {message}\n")

    parser = Parser(
        prog="python -m transformer_jax.generate",
        description="Continue a text with a model that train.py trained.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", required=True, metavar="FOLDER", help="the run folder that train.py wrote")
    add("--prompt", default="", metavar="TEXT", help="the text to continue; default: a new line")
    add("--tokens", type=int, default=400, metavar="N", help="how many tokens; default: 400")
    add(
        "--temperature", type=float, default=0.8, metavar="T",
        help="below 1 sharpens the distribution, 0 takes the likeliest token; default: 0.8",
    )  # fmt: skip
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest that hold mass P")
    add("--seed", type=int, default=0, metavar="N", help="all randomness follows from it")
    add(
        "--checkpoint", choices=("best", "last"), default="best",
        help="the lowest held-out loss (default), or the last step",
    )  # fmt: skip
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())

if __name__ == "transformer_jax.generate":  # imported, which binds the name to what stands here
    from transformer_jax.decode import generate

    sys.modules[__name__] = generate  # type: ignore[assignment]
