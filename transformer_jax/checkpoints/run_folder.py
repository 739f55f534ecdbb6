"""Folder of a training run, which contains the files needed to continue, use, and inspect the run.

config.json     the resolved TrainConfig
tokenizer.json  and source_tokenizer.json if sources use a different tokenizer
metrics.jsonl   one JSON object per line
loss.png        training and held-out loss
checkpoints/    step-N folders, see checkpoint.py
sample.txt      sample output of the trained model
scores.json     final scores on held-out examples
lock            ID of the process that is writing; removed when the process ends
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast, get_args

from transformer_jax import durable_files
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.custom import find_by_name, name_of
from transformer_jax.config.fields import Dataclass, FieldValue, Hint, is_function
from transformer_jax.config.kinds import field_hints, kind_name, names_in_files
from transformer_jax.durable_files import naming, write_file
from transformer_jax.tokenizers.special import tokenizer_from_json
from transformer_jax.tokenizers.trained import Tokenizer
from transformer_jax.untrusted_files import Json, JsonObject, Untrusted

C = TypeVar("C", bound=Dataclass)

CONFIG_LIMIT = 2**23
"""Maximum size of config.json, in bytes."""

SOURCES = "-", "python-docs", "shakespeare"
"""Values of `data` that are not files."""

MAY_CHANGE = frozenset(
    {
        "data", "val_data", "out", "steps", "mesh", "task.judged", "task.beams", "task.targets",
        "task.val_targets", "model.nodes", "eval_every", "eval_batches",
        "checkpoint_every", "keep", "log_every", "sample_tokens", "log", "profile",
        "dump_batch",
    }
)  # fmt: skip
"""Fields that a resumed run can change. `data` can move, but must have the same hash, and
`model.nodes` follows from it."""


class RunError(RuntimeError):
    """Error for a run whose folder is in use, or whose losses or parameters are not finite."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths and files in a run's folder.

    Attributes:
        path: the folder of the run.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    def read_config(self) -> TrainConfig:
        """Read the run's config. Raises ConfigError if a key is invalid."""
        if not self.config_file.is_file():
            raise ConfigError(f"{self.path} is not a run: config.json is missing")
        if self.config_file.stat().st_size > CONFIG_LIMIT:
            raise ConfigError(f"{self.config_file} is longer than {CONFIG_LIMIT} bytes")
        try:
            config = config_from_json(self.config_file.read_bytes())
        except ConfigError as error:
            raise ConfigError(f"{self.config_file}: {error}") from None

        def locate(name: str) -> str:
            if os.path.exists(name) or os.path.isabs(name) != os.path.isabs(config.out):
                return name
            # a file that was moved together with the run keeps its relative path
            moved = os.path.abspath(self.path / os.path.relpath(name, config.out))
            return moved if os.path.exists(moved) else name

        return _map_paths(config, locate)

    @property
    def source_tokenizer_file(self) -> Path:
        return self.path / "source_tokenizer.json"

    def read_tokenizer(self, sha256: str | None = None) -> Tokenizer:
        """Read the run's tokenizer. Unless `sha256` is None, check the hash of the file."""
        return _read_tokenizer(self.tokenizer_file, sha256)

    def read_source_tokenizer(self, sha256: str | None = None) -> Tokenizer | None:
        """Read the tokenizer for sources, or return None if sources use the run's tokenizer."""
        file = self.source_tokenizer_file
        return _read_tokenizer(file, sha256) if file.exists() or sha256 is not None else None

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        write_file(self.tokenizer_file, tokenizer.to_json())

    def write_source_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Write the tokenizer for sources, unless it is None."""
        if tokenizer is not None:
            write_file(self.source_tokenizer_file, tokenizer.to_json())

    def write_config(self, config: TrainConfig) -> None:
        write_file(self.config_file, config_to_json(with_absolute_paths(config)))

    def read_metrics(self) -> list[JsonObject]:
        """Read the lines of metrics.jsonl, except damaged ones and an unfinished last line."""
        return [line for line in self._metrics() if line is not None]

    def cut_metrics(self, step: int) -> int:
        """Remove damaged lines and the lines after `step`, and return the number of damaged lines.

        A run that was killed after its last checkpoint leaves such lines.
        """
        lines = self._metrics()
        kept = [line for line in lines if line is not None and line["step"] <= step]
        # replaced atomically: a crash leaves either the old or the new lines
        write_file(self.metrics_file, "".join(json_text(line) + "\n" for line in kept))
        return lines.count(None)

    def append_metrics(self, line: JsonObject) -> None:
        with naming(self.metrics_file), open(self.metrics_file, "a") as log:
            log.write(json_text(line) + "\n")

    def _metrics(self) -> list[JsonObject | None]:
        """Read the complete lines of metrics.jsonl. A damaged line becomes None."""
        if not self.metrics_file.is_file():
            return []
        found: list[JsonObject | None] = []
        # text after the last newline is an unfinished line
        for text in self.metrics_file.read_text(errors="replace").split("\n")[:-1]:
            try:
                line = json.loads(text, parse_constant=lambda _: None)  # NaN is not valid JSON
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and type(line.get("step")) is int:
                losses = line.get("loss"), line.get("val_loss")
                valid = all(type(loss) in (int, float, type(None)) for loss in losses)
                found.append(line if valid else None)
            else:
                found.append(None)
        return found


def _read_tokenizer(file: Path, sha256: str | None) -> Tokenizer:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{file} has the wrong SHA-256 checksum")
    try:
        return tokenizer_from_json(content.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def json_text(content: JsonObject, indent: int | None = None) -> str:
    """Return measurements as JSON, with null for NaN and infinities."""

    def plain(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), indent=indent, allow_nan=False)


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return a config with absolute paths, which do not depend on the working directory.

    Other names, such as repositories or built-in texts, are not changed.
    """

    def absolute(name: str) -> str:
        return os.path.abspath(name) if os.path.exists(name) else name

    return replace(_map_paths(config, absolute), out=os.path.abspath(config.out))


def _map_paths(config: TrainConfig, function: Callable[[str], str]) -> TrainConfig:
    """Apply a function to each path in a config."""

    def map_fields(config: C, *names: str) -> C:
        changes: dict[str, str] = {}
        for name in names:
            value = getattr(config, name, None)
            if value and value not in SOURCES:
                whole = changes[name] = function(value)
                # commas separate prepared folders, but can also be part of a file name
                if "," in value and not os.path.exists(whole):
                    changes[name] = ",".join(map(function, value.split(",")))
        return replace(config, **changes)

    task = map_fields(config.task, "targets", "val_targets")
    return map_fields(replace(config, task=task), "data", "val_data", "init_from")


def config_to_json(config: TrainConfig) -> str:
    """Return the content of config.json for a config."""
    return json.dumps(_to_json(config), indent=1) + "\n"


def _to_json(config: FieldValue) -> JsonObject:
    """Return a config as JSON. A field that allows several config classes also stores a `kind`."""
    cls: type = type(config)
    hints, content = field_hints(cls), {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            custom = hasattr(value, "custom_kind_of")
            name = name_of(field.name, type(value)) if custom else kind_name(type(value))
            kind = {"kind": name} if get_args(hints[field.name]) else {}
            value = kind | _to_json(value)
        elif is_function(value):
            value = name_of(field.name, value)
        content[field.name] = value
    return content


def config_from_json(text: str | bytes) -> TrainConfig:
    """Parse the output of `config_to_json`. Keys can be missing, but unknown keys are not allowed.

    Files from other versions are not converted. Raises ConfigError if a key is invalid.
    """

    def constant(name: str) -> None:
        raise ConfigError(f"{name} is not a number")

    content = Untrusted(ConfigError).parse(text, "the config", parse_constant=constant)
    return _build(TrainConfig, content, "")


def _build(cls: type[C], content: Json, path: str) -> C:
    if not isinstance(content, dict):
        raise ConfigError(f"{path.rstrip('.') or 'the config'} is {content!r}: must be an object")
    hints = field_hints(cls)
    arguments = {}
    for key, value in content.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            rule = "configs of other versions cannot be read"
            raise ConfigError(f"{path}{key}: unknown key{hint} ({rule})")
        field = tuple(value) if isinstance(value, list) else value
        arguments[key] = _build_field(hints[key], field, f"{path}{key}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from None


def _build_field(hint: Hint, value: FieldValue, path: str) -> FieldValue:
    """Return a field's value: the JSON value, or the config that it describes."""
    if dataclasses.is_dataclass(hint):
        return _build(cast(type, hint), value, f"{path}.")
    options = [cls for cls in get_args(hint) if isinstance(cls, type)]
    kinds: dict[str, FieldValue] = {  # config classes, keyed by `kind` in the file
        name: cls
        for cls in options
        if dataclasses.is_dataclass(cls)
        for name in names_in_files(cls)
    }
    custom = any(hasattr(cls, "custom_kind_of") for cls in options)
    # `positions` may be a string, which is its short form
    if not (kinds or custom) or value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {value!r}: must be an object")
    content = dict(value)
    with_kind = [cls for cls in kinds.values() if "kind" in cls.__dataclass_fields__]
    kind = content.pop("kind", with_kind[0].kind if with_kind else None)
    if isinstance(kind, str) and ":" in kind:  # "module:class", a custom class
        cls = find_by_name(f"{path}.kind", kind)
        base = getattr(cls, "custom_kind_of", None)
        fits = base and any(issubclass(option, base) for option in options)
        if not (fits and isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ConfigError(f"{path}.kind is {kind!r}: must be a custom class for {path}")
        return _build(cast(type, cls), content, f"{path}.")
    if not isinstance(kind, str) or kind not in kinds:
        rule = f"must be one of {', '.join(kinds)}"
        if path in ("model", "task"):  # kinds are registered per process
            rule += "; register a custom kind before you read its run"
        raise ConfigError(f"{path}.kind is {kind!r}: {rule}")
    # A config with a field named `kind` stores its kind in the same key.
    if kinds[kind] in with_kind:
        content["kind"] = kind
    return _build(kinds[kind], content, f"{path}.")


def differences(
    old: TrainConfig, new: TrainConfig, may_change: Collection[str] = MAY_CHANGE
) -> list[str]:
    """Return "key: old -> new" for each changed field that must stay the same in a resumed run."""
    found = _differences(with_absolute_paths(old), with_absolute_paths(new), "")
    return [line for key, line in found if not {key, key.partition(".")[0]} & set(may_change)]


def _differences(old: FieldValue, new: FieldValue, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each field that differs, with "key: old -> new"."""
    for field in dataclasses.fields(old):
        key, one, two = path + field.name, getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(one) and type(one) is type(two):
            yield from _differences(one, two, f"{key}.")
        elif one != two:
            yield key, f"{key}: {one!r} -> {two!r}"


def locked(path: Path) -> AbstractContextManager[None]:
    """Lock `path/lock`. Raises RunError if another process has locked it."""
    return durable_files.locked(
        path, lambda owner: RunError(f"{path}: process {owner} is training here")
    )


def check_unused(path: Path) -> None:
    """Raise ConfigError if the folder of a new run already contains files."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out is {str(path)!r}: must be a folder")
    if (path / "lock").exists():
        with locked(path):  # raises RunError for a live run; removes a stale lock
            pass
    if path.is_dir() and any(path.iterdir()):
        state = "contains a run" if (path / "config.json").exists() else "is not empty"
        rule = "`resume=True` continues it, `out=FOLDER` starts another"
        raise ConfigError(f"out is {str(path)!r}: the folder {state} ({rule})")


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Return the hash of the file that `write_tokenizer` writes."""
    return hashlib.sha256(tokenizer.to_json().encode("utf-8", "surrogatepass")).hexdigest()


def plot_losses(folder: RunFolder) -> None:
    """Plot the training loss, its moving average, and the held-out loss as loss.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = folder.read_metrics()
    train = [(m["step"], m["loss"]) for m in lines if m.get("loss") is not None]
    evaluated = [m for m in lines if m.get("val_loss") is not None]
    held_out = [(m["step"], m["val_loss"]) for m in evaluated]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    blue, orange, ink = "#3b6fb6", "#e07b39", "#444444"
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=blue, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(losses), color=blue, linewidth=1.8, label="training")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        axes.plot(steps, losses, color=orange, linewidth=1.8, marker="o", ms=4, label="held out")
        # losses are comparable only if they were computed on the same number of batches
        batches = evaluated[-1].get("eval_batches")
        comparable = [m for m in evaluated if m.get("eval_batches") == batches]
        best, step = min((m["val_loss"], m["step"]) for m in comparable)
        axes.annotate(
            f"{best:.3f}", (step, best), xytext=(0, 8), textcoords="offset points",
            ha="center", color=orange, fontweight="bold",
        )  # fmt: skip
    axes.set_xlabel("step", color=ink)
    axes.set_ylabel("loss (nats per token)", color=ink)
    title = " ".join(folder.path.name.encode("utf-8", "backslashreplace").decode().split())
    axes.set_title(title, loc="left", color=ink, parse_math=False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=ink)
    if train or held_out:
        axes.legend(frameon=False, labelcolor=ink)
    file = folder.path / "loss.png"
    with warnings.catch_warnings(), naming(file), open(file, "wb") as stream:
        warnings.filterwarnings("ignore", "Glyph .* missing")  # for a folder name in another script
        figure.savefig(stream, format="png")


def smooth(values: tuple[float, ...]) -> list[float]:
    """Return the moving average over a centered window that covers 1/25 of the curve.

    The window is narrower at the ends.
    """
    # With running sums, each average takes one subtraction, regardless of the width of the window.
    sums = [0.0, *itertools.accumulate(values)]
    last, widest = len(values) - 1, len(values) // 50
    radii = [min(i, last - i, widest) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(radii)]
