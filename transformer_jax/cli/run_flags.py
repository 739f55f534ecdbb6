"""Read the flags of train.py: every field of TrainConfig, and where the run starts."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as Folder

from transformer_jax.cli.flags import ConfigFlags, Parser, Path, Text, changed, spelled, value_at
from transformer_jax.config import (
    PRESETS,
    ConfigError,
    TrainConfig,
    fine_tuning,
    preset,
    train_preset,
)
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.config.kinds import kinds_of, names_of
from transformer_jax.config.presets import learns, task_recipe
from transformer_jax.config.tasks import LanguageTask, Task


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts, and with whom; no field of a config."""

    preset: str | None = field(default=None, metadata={"known": PRESETS})
    """Model and recipe to start from:"""
    model: str | None = field(default=None, metadata={"known": partial(names_of, AnyModelConfig)})
    """Kind of model; default: the first of"""
    resume: bool = False
    """Continue the run in --out."""
    distributed: bool = False
    """Train with the other processes of this job: of Slurm, of GKE, of a TPU slice."""
    coordinator: str | None = None
    """HOST:PORT: without such a job, where the first process listens."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """Which of them this is, from 0 on."""

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        if all(value is None for value in own.values()):
            return
        if self.distributed:
            raise ConfigError("distributed and coordinator: give one of them")
        for name, value in own.items():
            if value is None:
                raise ConfigError(f"{name} is None: coordinator, processes and process go together")
        for name in ("processes", "process"):
            if own[name] < 0:
                raise ConfigError(f"{name} is {own[name]}: must not be negative")
        if not own["process"] < own["processes"]:
            rule = f"must be below processes {self.processes}"
            raise ConfigError(f"process is {self.process}: {rule}")

    def join(self) -> bool:
        """Wait for the other processes, if there are any; before JAX is used for anything else."""
        if not self.distributed and self.coordinator is None:
            return False
        import jax

        # With --distributed the cluster says it: Slurm, GKE or a TPU's.
        jax.distributed.initialize(self.coordinator, self.processes, self.process)
        return True


FLAGS = ConfigFlags(TrainConfig, without=(("model",),))
START = ConfigFlags(Start, whole="start", none=False)


@dataclass(frozen=True)
class _Bare:
    """A task without a model that would have to fit it."""

    task: Task


@dataclass(frozen=True)
class RunFlags:
    """The flags that were typed: where the run starts, and the text of every field."""

    start: Start
    fields: Mapping[Path, Text]

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
        """Raise ConfigError for more than one start, or a folder where a kind is named."""
        for name in ("preset", "model"):
            if getattr(self.start, name) is None:
                continue
            if self.start.resume:
                raise ConfigError(f"{name} and resume: a run goes on with its own config")
            if self.init_from is not None:
                raise ConfigError(f"{name} and init_from: the model is that of init_from")
        kind = self.start.model
        if kind is not None and kind not in names_of(AnyModelConfig) and Folder(kind).is_dir():
            rule = f"must be a kind of model; `init_from={kind}` starts from a run or a model"
            raise ConfigError(f"model is {kind!r}: {rule}")

    def base(self) -> TrainConfig:
        """Return the run that the flags begin with: of a preset, or of a kind of model."""
        name, task = self.start.preset, self.task
        if name is None:
            return task_recipe(task, self.start.model or "transformer")
        if self.start.model is not None:
            raise ConfigError("preset and model: give one of them")
        kind = preset(name).kind
        if kind not in task.shapes:
            fitting = (
                own for own, other in kinds_of(Task).items() if learns(other(), preset(name))
            )
            rule = f"learns --task {' or '.join(fitting)}, not {task.kind}"
            article = "a" if kind == "decoder" else "an"
            raise ConfigError(f"preset is {name!r}: {article} {kind} {rule}")
        return train_preset(name, task=task)


def parse(
    argv: Sequence[str], description: str | None = None, command: str = "python train.py"
) -> RunFlags:
    """Return the flags that were typed; with --help, print what there is and exit.

    Raises ConfigError for a flag, or a group of the help, that there is not.
    """
    FLAGS.collect()  # also the kinds that the caller has registered
    names = FLAGS.names | START.names | {"--help": "--help", "--debug": "--debug"}
    arguments = _parser(command, None).parse_args(spelled(argv, names))
    flags = RunFlags(START.options(arguments), FLAGS.given(arguments))
    if (wanted := getattr(arguments, "help", None)) is not None:
        flags.check_start()
        base, groups = flags.base(), list(FLAGS.groups())
        if wanted not in ("all", *groups):
            rule = f"must be all or one of {', '.join(groups)}{nearest(wanted, groups)}"
            raise ConfigError(f"help is {wanted!r}: {rule}")
        # The flags of `run` and `model` name the fields of every other group.
        shown = ("run", "model") if wanted == "all" else (wanted,)
        _parser(command, description, base, shown).print_help()
        raise SystemExit(0)
    return flags


def _parser(
    command: str,
    description: str | None,
    defaults: TrainConfig | None = None,
    shown: Collection[str] = (),
) -> Parser:
    """Return a parser whose help has these groups of flags, with the defaults of a run."""
    others = textwrap.fill(", ".join(name for name in FLAGS.groups() if name not in shown), 79)
    whole = "run" in shown
    parser = Parser(
        command,
        description if whole else None,
        "An end of a flag that no other flag has is enough: --d-model, --positions.base.\n"
        "The fields of a group stand in one word too: --positions rope,base=5e5.\n\n"
        "--help GROUP prints the flags of a group, --help all those of run and model:\n"
        f"{others}",
    )
    about = {
        "help": "the flags of a group, of run if none is given, or all",
        "debug": "show the traceback of an error",
    }
    about = {name: text if whole else argparse.SUPPRESS for name, text in about.items()}
    parser.add_argument("-h", "--help", nargs="?", const="run", metavar="GROUP", help=about["help"])
    parser.add_argument("--debug", action="store_true", help=about["debug"])
    START.add_to(parser, None, ("start",) if whole else ())
    FLAGS.add_to(parser, defaults, shown)
    return parser


def configure(flags: RunFlags) -> tuple[TrainConfig, int | None]:
    """Return the config that the flags ask for, and the vocabulary size where that is given.

    A run starts from its own config, from a published model or from a preset.
    """
    flags.check_start()
    if flags.start.resume:
        from transformer_jax.checkpoints.run_folder import RunFolder

        out = flags.fields.get(("out",), TrainConfig.out)
        base = RunFolder(Folder(str(out))).read_config()
        base = dataclasses.replace(base, out=str(out))  # the folder may have moved
        given = FLAGS.read(flags.fields, base)
        return changed(base, given), given.get(("model", "vocab_size"), base.model.vocab_size)
    if flags.init_from is None:
        base = flags.base()
    else:
        from transformer_jax.pretrained.config_json import OVERRIDABLE_FIELDS
        from transformer_jax.training.initial import start_model

        model = start_model(flags.init_from).config
        base = fine_tuning(model, flags.init_from, flags.task)
        for path, value in FLAGS.read(flags.fields, base).items():
            if path[0] != "model" or path[1] in OVERRIDABLE_FIELDS:
                continue
            own = value_at(model, path[1:])
            if isinstance(value, type):  # a kind of config
                value, own = value.__name__.lower(), type(own).__name__.lower()
            if value != own:
                rule = f"{flags.init_from} has {own!r}"
                raise ConfigError(f"{'.'.join(path)} is {value!r}: {rule}")
        if getattr(model, "dtype", None) == "float16":
            # whose gradients vanish where nothing scales the loss
            base = dataclasses.replace(base, model=dataclasses.replace(model, dtype="float32"))
    given = FLAGS.read(flags.fields, base)
    # --dropout 0 means none at all: a preset's dropout of attention is a field of its own.
    if given.get(("model", "dropout")) == 0 and hasattr(base.model, "attention_dropout"):
        given.setdefault(("model", "attention_dropout"), 0.0)
    return changed(base, given), given.get(("model", "vocab_size"))
