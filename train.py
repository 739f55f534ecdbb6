"""Train a language model on a text.

    python train.py                                  Python's own documentation, about two minutes
    python train.py --data book.txt --out runs/book
    python train.py --preset shakespeare-cpu --out runs/shakespeare
    python train.py --init-from gpt2-folder --data book.txt --out runs/tuned
    python train.py --out runs/book --resume         goes on where it stopped

The run folder then holds the config, the tokenizer, the checkpoints, the curves and a sample. To
write with the model: python -m transformer_jax.generate --run runs/book --prompt "Once".
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports too, without a traceback

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from transformer_jax.config import (
    PRESETS,
    ConfigError,
    ModelConfig,
    RopeConfig,
    TrainConfig,
    fine_tuning,
    train_preset,
)
from transformer_jax.flags import spelled

LEVELS: dict[tuple[str, ...], type] = {
    (): TrainConfig,
    ("model",): ModelConfig,
    ("model", "rope"): RopeConfig,
}
"""Every config and where it sits in TrainConfig; each field of each is a flag of its own name."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 (the run failed) or 2 (usage, config, data)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    keep_freed_memory()
    try:
        given = _parse(argv)
        return _train(given)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            raise
        print(f"train.py: {_one_line(error)}", file=sys.stderr)
        return _status(error)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: a step's buffers come back without a page fault each.

    XLA allocates a step's temporaries anew every time, on a thread of its own; glibc maps large
    ones and unmaps them again, which takes a quarter of a small step on a CPU. Elsewhere than on
    Linux with glibc this does nothing, and it changes no number.
    """
    with contextlib.suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        glibc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def _status(error: Exception) -> int:
    """2 for what the user can set right, 1 for what went wrong on the way."""
    if isinstance(error, ConfigError):
        return 2
    from transformer_jax.data import DataError

    return 2 if isinstance(error, DataError) else 1


def _train(given: argparse.Namespace) -> int:
    config, vocab_size = _config(given)
    from transformer_jax.progress import progress_for_output, show
    from transformer_jax.training import fit

    with contextlib.suppress(AttributeError):  # a replaced stdout may have no such method
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    progress = progress_for_output()
    with _signals() as received:
        result = fit(
            config,
            resume=given.resume,
            vocab_size=vocab_size,
            progress=progress,
            stop=lambda: bool(received),
        )
    out = config.out
    resume = f"python train.py --out {_quoted(out)} --resume"
    if result.interrupted:
        show(f"stopped at step {result.step}; to go on:\n  {resume}")
        return 128 + received[0]
    start = _start(result)
    prompt = f' --prompt "{start}"' if start else ""
    show(_report(result))
    show("Write with the model, or train on:")
    show(f"  python -m transformer_jax.generate --run {_quoted(out)}{prompt}")
    show(f"  {resume} --steps {2 * config.steps}")
    return 0


def _report(result: Any) -> str:
    nats = result.val_loss_per_character
    lines = []
    if result.sample:
        lines += ["", result.sample.strip("\n"), ""]
    if nats is None:
        lines.append("held-out loss: not finite")
    else:
        bits = nats / 0.6931471805599453
        lines.append(f"held-out loss: {nats:.4f} nats per character = {bits:.4f} bits")
    if result.rejected:
        lines.append(f"{result.rejected} steps were skipped: their loss was not finite")
    lines.append(f"in {result.config.out}: loss.png, metrics.jsonl, sample.txt, checkpoints")
    return "\n".join(lines)


def _config(given: argparse.Namespace) -> tuple[TrainConfig, int | None]:
    """The config of these flags, and the vocabulary size where it is not the tokenizer's own."""
    changes = {path: getattr(given, ".".join(path)) for path in _FIELDS if _has(given, path)}
    if given.resume:
        if given.preset is not None:
            raise ConfigError("preset and resume: a run goes on with its own config")
        from transformer_jax.run_folder import RunFolder

        out = changes.get(("out",), TrainConfig.out)
        base = RunFolder(Path(out)).read_config()
        changes[("out",)] = out
        changes.setdefault(("model", "vocab_size"), base.model.vocab_size)
    elif (begun := changes.get(("init_from",))) is not None:
        if given.preset is not None:
            raise ConfigError("preset and init_from: the model is that of init_from")
        base = _fine_tuned(begun, changes)
    else:
        base = train_preset(given.preset)
    config = _changed(base, changes, ())
    return config, changes.get(("model", "vocab_size"))


def _fine_tuned(init_from: str, changes: dict[tuple[str, ...], Any]) -> TrainConfig:
    """What goes on with a published model, of which flags change only how it is run."""
    from transformer_jax.pretrained import FREE, pretrained_config

    model = pretrained_config(init_from)
    for path, value in changes.items():
        if path[:1] == ("model",) and path[-1] not in FREE:
            own: Any = model
            for name in path[1:]:
                own = getattr(own, name)
            if value != own:
                raise ConfigError(f"{path[-1]} is {value!r}: {init_from} has {own!r}")
    if model.dtype == "float16":  # whose gradients vanish where nothing scales the loss
        model = dataclasses.replace(model, dtype="float32")
    return fine_tuning(model, init_from)


def _has(given: argparse.Namespace, path: tuple[str, ...]) -> bool:
    return hasattr(given, ".".join(path))


def _changed(config: Any, changes: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """`config`, at `path`, with the changes at and below it, all validated together."""
    own = {}
    for field in dataclasses.fields(config):
        here = (*path, field.name)
        if here in LEVELS:
            own[field.name] = _changed(getattr(config, field.name), changes, here)
        elif here in changes:
            own[field.name] = changes[here]
    return dataclasses.replace(config, **own)


_FIELDS: dict[tuple[str, ...], Any] = {
    (*path, field.name): get_type_hints(cls)[field.name]
    for path, cls in LEVELS.items()
    for field in dataclasses.fields(cls)
    if (*path, field.name) not in LEVELS
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parse(argv: list[str]) -> argparse.Namespace:
    """The flags that were given, and only those."""
    parser = _parser(train_preset(_preset(argv)))
    flags = [option for action in parser._actions for option in action.option_strings]
    given = parser.parse_args(spelled(argv, flags))
    for path, hint in _FIELDS.items():
        if _has(given, path):
            setattr(given, ".".join(path), _read(path[-1], hint, getattr(given, ".".join(path))))
    return given


def _preset(argv: list[str]) -> str | None:
    """The preset whose values the help shows as defaults."""
    for flag, following in itertools.zip_longest(argv, argv[1:]):
        name, given, value = flag.partition("=")
        if name == "--preset":
            return value if given else following
    return None


def _parser(defaults: TrainConfig) -> _Parser:
    parser = _Parser(
        prog="train.py",
        usage="python train.py [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add(
        "--preset", default=None, metavar="NAME",
        help=f"model and recipe to start from: {', '.join(PRESETS)}",
    )  # fmt: skip
    add("--resume", action="store_true", default=False, help="go on with the run in --out")
    add("--debug", action="store_true", default=False, help="show the traceback of an error")
    for path, cls in LEVELS.items():
        group = parser.add_argument_group(" ".join(path) or "run", inspect.getdoc(cls))
        values: Any = defaults
        for name in path:
            values = getattr(values, name)
        docs = _field_docs(cls)
        for field in dataclasses.fields(cls):
            if (*path, field.name) in LEVELS:
                continue
            hint = _FIELDS[*path, field.name]
            text = f"{docs.get(field.name, '')} [{getattr(values, field.name)}]"
            group.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=".".join((*path, field.name)),
                metavar=_spell(hint),
                help=text.strip().replace("%", "%%"),
            )
    return parser


def _read(name: str, hint: Any, text: str) -> Any:
    """A flag's text as the type of its field; ConfigError says what was expected."""
    for option in _options(hint):
        if option is type(None):
            if text.lower() == "none":
                return None
        elif option is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif get_origin(option) is Literal:
            if text in get_args(option):
                return text
        elif get_origin(option) is tuple:
            if "," in text:
                return tuple(_read(name, get_args(option)[0], item) for item in text.split(","))
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    raise ConfigError(f"{name} is {text!r}: must be {_spell(hint)}")


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, None first; of anything else, itself."""
    options = (hint,) if get_origin(hint) in (None, Literal, tuple) else get_args(hint)
    return tuple(sorted(options, key=lambda option: option is not type(None)))


def _spell(hint: Any) -> str:
    if len(_options(hint)) > 1:
        return "|".join(_spell(option) for option in _options(hint))
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "ITEM,ITEM,..."
    spelled = {bool: "True|False", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    return spelled.get(hint, "None")


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; the second one ends the process at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        os.write(2, b"\nstopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(result: Any) -> str:
    """A few words of the sample, or one, as a prompt to try; "" where its tokenizer has none."""
    from transformer_jax.run_folder import RunFolder

    tokenizer = RunFolder(Path(result.config.out)).read_tokenizer()
    words = [word for word in result.sample.split() if word.isascii() and word.isalpha()]
    for start in (" ".join(words[:3]), *words[:1], "The"):
        with contextlib.suppress(ValueError):
            if len(tokenizer.encode(start)):
                return start
    return ""


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
