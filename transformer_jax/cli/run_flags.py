"""Read the flags of train.py: every field of TrainConfig, and where the run starts."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import NoReturn

from transformer_jax.cli.flags import ConfigFlags, Path, changed, spelled, value_at
from transformer_jax.config import (
    PRESETS,
    ConfigError,
    ModelConfig,
    TrainConfig,
    fine_tuning,
    preset,
    train_preset,
)
from transformer_jax.config.architectures import ARCHITECTURES, AnyModelConfig
from transformer_jax.config.fields import FieldValue, nearest
from transformer_jax.config.presets import learns, task_recipe
from transformer_jax.config.tasks import TASKS, LanguageTask, Task

FLAGS = ConfigFlags(TrainConfig, without=(("model",),))

OWN = (
    "preset", "model", "resume", "debug", "help", "distributed", "coordinator", "processes",
    "process",
)  # fmt: skip
"""Flags that are no fields of a config."""


@dataclass(frozen=True)
class _Bare:
    """Hold a task without a model that would have to fit it."""

    task: Task


@dataclass(frozen=True)
class Processes:
    """Say how the processes of a run find each other."""

    coordinator: str | None = None
    """HOST:PORT of the first process; None leaves it to the cluster, Slurm, GKE or a TPU's."""
    count: int | None = None
    index: int | None = None

    def join(self) -> None:
        """Wait for the other processes; before JAX is used for anything else."""
        import jax

        jax.distributed.initialize(self.coordinator, self.count, self.index)


def _processes(arguments: argparse.Namespace) -> Processes | None:
    """Return how processes find each other; ConfigError where only some of it is said."""
    own = {name: getattr(arguments, name) for name in ("coordinator", "processes", "process")}
    if all(value is None for value in own.values()):
        return Processes() if arguments.distributed else None
    if arguments.distributed:
        raise ConfigError("distributed and coordinator: give one of them")
    for name, value in own.items():
        if value is None:
            raise ConfigError(f"{name} is None: coordinator, processes and process go together")
    numbers = []
    for name in ("processes", "process"):
        if not own[name].isdigit():
            raise ConfigError(f"{name} is {own[name]!r}: must be INTEGER")
        numbers.append(int(own[name]))
    if not numbers[1] < numbers[0]:
        raise ConfigError(f"process is {numbers[1]}: must be below processes {numbers[0]}")
    return Processes(own["coordinator"], *numbers)


@dataclass(frozen=True)
class RunFlags:
    """Hold what was typed: where the run starts, and the text of every field that was given."""

    preset: str | None
    model: str | None
    resume: bool
    fields: Mapping[Path, str]
    processes: Processes | None = None

    @property
    def out(self) -> str:
        return self.fields.get(("out",), TrainConfig.out)

    @property
    def init_from(self) -> str | None:
        name: Path = ("init_from",)
        given = {name: self.fields[name]} if name in self.fields else {}
        return FLAGS.read(given, TrainConfig()).get(name)

    @property
    def task(self) -> Task:
        """Return the task that was asked for, with the fields that were given."""
        given = {path: text for path, text in self.fields.items() if path[0] == "task"}
        return changed(_Bare(LanguageTask()), FLAGS.read(given, TrainConfig())).task

    def check_start(self) -> None:
        """Raise ConfigError for more than one start, or a preset that does not fit the task."""
        for name in ("preset", "model"):
            if getattr(self, name) is None:
                continue
            if self.resume:
                raise ConfigError(f"{name} and resume: a run goes on with its own config")
            if self.init_from is not None:
                raise ConfigError(f"{name} and init_from: the model is that of init_from")
        if self.preset is not None and self.model is not None:
            raise ConfigError("preset and model: give one of them")
        if self.model is not None and self.model not in ARCHITECTURES:
            rule = f"must be one of {', '.join(ARCHITECTURES)}{nearest(self.model, ARCHITECTURES)}"
            raise ConfigError(f"model is {self.model!r}: {rule}")
        if self.preset is not None:
            check_preset(self.preset, self.task)

    def start(self) -> TrainConfig:
        """Return the run that the flags begin with: of a preset, or of a kind of model."""
        if self.preset is not None:
            return train_preset(self.preset, task=self.task)
        return task_recipe(self.task, self.model or "transformer")

    def changes(self, base: TrainConfig) -> dict[Path, FieldValue]:
        """Return the fields that were given, read as `base` has them."""
        return FLAGS.read(self.fields, base)


def parse(
    argv: Sequence[str], description: str | None, command: str = "python train.py"
) -> RunFlags:
    """Return the flags that were typed; with --help, print what there is and exit.

    Raises ConfigError for a flag, or a group of the help, that there is not.
    """
    own = {f"--{name}": f"--{name}" for name in OWN}
    arguments = _parser(None, command).parse_args(spelled(argv, FLAGS.names | own))
    if arguments.help is not None:
        flags = RunFlags(arguments.preset, arguments.model, False, FLAGS.given(arguments))
        flags.check_start()
        shown = shown_groups(arguments.help)
        _parser(description, command, flags.start(), shown).print_help()
        raise SystemExit(0)
    given, processes = FLAGS.given(arguments), _processes(arguments)
    return RunFlags(arguments.preset, arguments.model, arguments.resume, given, processes)


def shown_groups(wanted: str) -> list[str]:
    """Return the groups of flags that `--help WANTED` prints; ConfigError where there is none."""
    groups = list(FLAGS.groups())
    if wanted not in ("all", *groups):
        rule = f"must be all or one of {', '.join(groups)}{nearest(wanted, groups)}"
        raise ConfigError(f"help is {wanted!r}: {rule}")
    return groups if wanted == "all" else [wanted]


def check_preset(name: str, task: Task) -> None:
    """Raise ConfigError where no preset has that name, or its model cannot learn the task."""
    if name not in PRESETS:
        rule = f"must be one of {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        raise ConfigError(f"preset is {name!r}: {rule}")
    kind = preset(name).kind
    if kind not in task.shapes:
        fitting = (own for own, other in TASKS.items() if learns(other(), preset(name)))
        rule = f"learns --task {' or '.join(fitting)}, not {task.kind}"
        article = "a" if kind == "decoder" else "an"
        raise ConfigError(f"preset is {name!r}: {article} {kind} {rule}")


def check_published(
    changes: Mapping[Path, FieldValue],
    model: AnyModelConfig,
    init_from: str,
    may_change: Collection[str],
) -> None:
    """Raise ConfigError for a change to the published model, but for how it is run."""
    for path, value in changes.items():
        if path[0] != "model" or path[1] in may_change:
            continue
        own = value_at(model, path[1:])
        if isinstance(value, type):  # a kind of config
            value, own = value.__name__.lower(), type(own).__name__.lower()
        if value != own:
            raise ConfigError(f"{'.'.join(path)} is {value!r}: {init_from} has {own!r}")


def configure(flags: RunFlags) -> tuple[TrainConfig, int | None]:
    """Return the config that the flags ask for, and the vocabulary size where that is given.

    A run starts from its own config, from a published model or from a preset.
    """
    flags.check_start()
    if flags.resume:
        from transformer_jax.checkpoints.run_folder import RunFolder

        base = RunFolder(Folder(flags.out)).read_config()
        base = dataclasses.replace(base, out=flags.out)  # the folder may have moved
        given = flags.changes(base)
        return changed(base, given), given.get(("model", "vocab_size"), base.model.vocab_size)
    if flags.init_from is not None:
        from transformer_jax.pretrained.config_json import OVERRIDABLE_FIELDS
        from transformer_jax.training.initial import start_model

        model = start_model(flags.init_from).config
        base = fine_tuning(model, flags.init_from, flags.task)
        check_published(flags.changes(base), model, flags.init_from, OVERRIDABLE_FIELDS)
        if isinstance(model, ModelConfig) and model.dtype == "float16":
            # whose gradients vanish where nothing scales the loss
            base = dataclasses.replace(base, model=dataclasses.replace(model, dtype="float32"))
    else:
        base = flags.start()
    given = flags.changes(base)
    if given.get(("model", "dropout")) == 0 and isinstance(base.model, ModelConfig):
        given.setdefault(("model", "attention_dropout"), 0.0)
    return changed(base, given), given.get(("model", "vocab_size"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(
    description: str | None,
    command: str,
    defaults: TrainConfig | None = None,
    shown: Collection[str] = (),
) -> _Parser:
    """Return a parser whose help has these groups of flags; with that of a run, all of its own."""
    others = textwrap.fill(", ".join(name for name in FLAGS.groups() if name not in shown), 79)
    more = f"\n\n--help GROUP prints those of a group, --help all those of all:\n{others}"
    parser = _Parser(
        prog=command,
        usage=f"{command} [--FLAG VALUE ...]",
        description=description if "run" in shown else None,
        epilog="An end of a flag that no other flag has is enough: --d-model, --positions.base."
        + (more if others else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add(
        "-h", "--help", nargs="?", const="run", default=None, metavar="GROUP",
        help="print the flags of a group, of run where none is given, or of all; and exit",
    )  # fmt: skip
    add(
        "--preset", default=None, metavar="NAME",
        help=f"model and recipe to start from: {', '.join(PRESETS)}",
    )  # fmt: skip
    add(
        "--model", default=None, metavar="NAME",
        help=f"kind of model: {', '.join(ARCHITECTURES)} [transformer]",
    )  # fmt: skip
    add("--resume", action="store_true", default=False, help="go on with the run in --out")
    add("--debug", action="store_true", default=False, help="show the traceback of an error")
    text = "train with the other processes of this job: of Slurm, of GKE, of a TPU slice"
    add("--distributed", action="store_true", default=False, help=text)
    text = "without such a job: where the first process listens"
    add("--coordinator", default=None, metavar="HOST:PORT", help=text)
    add("--processes", default=None, metavar="INTEGER", help="how many processes there are")
    add("--process", default=None, metavar="INTEGER", help="which of them this is, from 0 on")
    if "run" not in shown:
        for action in parser._actions:
            action.help = argparse.SUPPRESS
    FLAGS.add_to(parser, defaults, shown)
    return parser
