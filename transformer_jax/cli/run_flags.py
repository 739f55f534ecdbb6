"""Flags of train.py, which set the fields of TrainConfig and the start of the run."""

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
    """Settings for the start and the processes of a run, which are not config fields."""

    preset: str | None = field(default=None, metadata={"known": PRESETS})
    """Model and recipe to start from:"""
    model: str | None = field(default=None, metadata={"known": partial(names_of, AnyModelConfig)})
    """Kind of model; default: the first of"""
    resume: bool = False
    """Resume the run in --out."""
    distributed: bool = False
    """Train together with the other processes of this Slurm job, GKE job or TPU slice."""
    coordinator: str | None = None
    """HOST:PORT of the first process, for processes outside a Slurm job, GKE job or TPU slice."""
    processes: int | None = None
    """Total number of processes."""
    process: int | None = None
    """Zero-based index of this process."""

    def __post_init__(self) -> None:
        group = {name: getattr(self, name) for name in ("coordinator", "processes", "process")}
        if all(value is None for value in group.values()):
            return
        if self.distributed:
            raise ConfigError("pass only one of distributed and coordinator")
        for name, value in group.items():
            if value is None:
                rule = "pass all of coordinator, processes and process, or none"
                raise ConfigError(f"{name} is None: {rule}")
        for name in ("processes", "process"):
            if group[name] < 0:
                raise ConfigError(f"{name} is {group[name]}: must not be negative")
        if not group["process"] < group["processes"]:
            rule = f"must be below processes, {self.processes}"
            raise ConfigError(f"process is {self.process}: {rule}")

    def join(self) -> bool:
        """Connect to the other processes, if there are any, before any other use of JAX."""
        if not self.distributed and self.coordinator is None:
            return False
        import jax

        # With --distributed, JAX gets the addresses from the cluster (Slurm, GKE or TPU).
        jax.distributed.initialize(self.coordinator, self.processes, self.process)
        return True


FLAGS = ConfigFlags(TrainConfig, without=(("model",),))
START = ConfigFlags(Start, whole="start", none=False)


@dataclass(frozen=True)
class _TaskOnly:
    """Config that contains only a task, so that no model has to match the task."""

    task: Task


@dataclass(frozen=True)
class RunFlags:
    """Parsed flags, with the start of the run and the text of each config field."""

    start: Start
    fields: Mapping[Path, Text]

    @property
    def init_from(self) -> str | None:
        name: Path = ("init_from",)
        texts = {name: self.fields[name]} if name in self.fields else {}
        return FLAGS.read(texts, TrainConfig()).get(name)

    @property
    def task(self) -> Task:
        """Return the task that the flags describe."""
        texts = {path: text for path, text in self.fields.items() if path[0] == "task"}
        return changed(_TaskOnly(LanguageTask()), FLAGS.read(texts, TrainConfig())).task

    def check_start(self) -> None:
        """Raise ConfigError for several starting points, or if the kind of model is a folder."""
        for name in ("preset", "model"):
            if getattr(self.start, name) is None:
                continue
            if self.start.resume:
                raise ConfigError(
                    f"{name} cannot be used with resume: a resumed run keeps its own config"
                )
            if self.init_from is not None:
                raise ConfigError(
                    f"{name} cannot be used with init_from: the model comes from init_from"
                )
        kind = self.start.model
        if kind is not None and kind not in names_of(AnyModelConfig) and Folder(kind).is_dir():
            rule = f"must be a kind of model; `init_from={kind}` starts from a run or a model"
            raise ConfigError(f"model is {kind!r}: {rule}")

    def base(self) -> TrainConfig:
        """Return the config that the flags change, which comes from a preset or a kind of model."""
        name, task = self.start.preset, self.task
        if name is None:
            return task_recipe(task, self.start.model or "transformer")
        if self.start.model is not None:
            raise ConfigError("pass only one of preset and model")
        kind = preset(name).kind
        if kind not in task.shapes:
            fitting = (n for n, other in kinds_of(Task).items() if learns(other(), preset(name)))
            rule = f"supports --task {' or '.join(fitting)}, not {task.kind}"
            article = "a" if kind == "decoder" else "an"
            raise ConfigError(f"preset is {name!r}: {article} {kind} {rule}")
        return train_preset(name, task=task)


def parse(
    argv: Sequence[str], description: str | None = None, command: str = "python train.py"
) -> RunFlags:
    """Parse the flags or, for --help, print the help and exit.

    Raises ConfigError for an unknown flag or help group.
    """
    FLAGS.collect()  # include kinds that the caller has registered
    names = FLAGS.names | START.names | {"--help": "--help", "--debug": "--debug"}
    arguments = _parser(command, None).parse_args(spelled(argv, names))
    flags = RunFlags(START.options(arguments), FLAGS.texts(arguments))
    if (group := getattr(arguments, "help", None)) is not None:
        flags.check_start()
        base, groups = flags.base(), list(FLAGS.groups())
        if group not in ("all", *groups):
            rule = f"must be all or one of {', '.join(groups)}{nearest(group, groups)}"
            raise ConfigError(f"help is {group!r}: {rule}")
        # The flags in the groups `run` and `model` list the fields of all other groups.
        shown = ("run", "model") if group == "all" else (group,)
        _parser(command, description, base, shown).print_help()
        raise SystemExit(0)
    return flags


def _parser(
    command: str,
    description: str | None,
    defaults: TrainConfig | None = None,
    shown: Collection[str] = (),
) -> Parser:
    """Return a parser whose help contains the groups in `shown` and the defaults of a run."""
    others = textwrap.fill(", ".join(name for name in FLAGS.groups() if name not in shown), 79)
    whole = "run" in shown
    parser = Parser(
        command,
        description if whole else None,
        "A unique suffix of a flag is enough: --d-model, --positions.base.\n"
        "The fields of a group may also be passed as one word: --positions rope,base=5e5.\n\n"
        "--help all prints the flags of run and model, --help GROUP those of a group:\n"
        f"{others}",
    )
    about = {
        "help": "print the flags of a group (default: run), or of run and model (all)",
        "debug": "show the traceback of an error",
    }
    about = {name: text if whole else argparse.SUPPRESS for name, text in about.items()}
    parser.add_argument("-h", "--help", nargs="?", const="run", metavar="GROUP", help=about["help"])
    parser.add_argument("--debug", action="store_true", help=about["debug"])
    START.add_to(parser, None, ("start",) if whole else ())
    FLAGS.add_to(parser, defaults, shown)
    return parser


def configure(flags: RunFlags) -> tuple[TrainConfig, int | None]:
    """Return the config that the flags describe, and the vocabulary size if it was passed.

    A run starts from its own config, from a published model or from a preset.
    """
    flags.check_start()
    if flags.start.resume:
        from transformer_jax.checkpoints.run_folder import RunFolder

        out = flags.fields.get(("out",), TrainConfig.out)
        base = RunFolder(Folder(str(out))).read_config()
        base = dataclasses.replace(base, out=str(out))  # the folder may have moved
        changes = FLAGS.read(flags.fields, base)
        return changed(base, changes), changes.get(("model", "vocab_size"), base.model.vocab_size)
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
            original = value_at(model, path[1:])
            if isinstance(value, type):  # a kind of config
                value, original = value.__name__.lower(), type(original).__name__.lower()
            if value != original:
                rule = f"must be {original!r}, as in {flags.init_from}"
                raise ConfigError(f"{'.'.join(path)} is {value!r}: {rule}")
        if getattr(model, "dtype", None) == "float16":
            # float16 gradients vanish without loss scaling
            base = dataclasses.replace(base, model=dataclasses.replace(model, dtype="float32"))
    changes = FLAGS.read(flags.fields, base)
    # --dropout 0 turns off all dropout, including the attention dropout of a preset.
    if changes.get(("model", "dropout")) == 0 and hasattr(base.model, "attention_dropout"):
        changes.setdefault(("model", "attention_dropout"), 0.0)
    return changed(base, changes), changes.get(("model", "vocab_size"))
