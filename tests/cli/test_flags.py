"""Flags of configs: full paths, unique suffixes and words with fields."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
from typing import Literal

import pytest

from transformer_jax.cli.flags import POSITIONAL, WORDS, ConfigFlags, Parser, changed, spelled
from transformer_jax.cli.run_flags import FLAGS, START
from transformer_jax.config import PRESETS, ConfigError, preset, train_preset
from transformer_jax.config.kinds import kind_name
from transformer_jax.config.presets import task_recipe
from transformer_jax.config.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Table:
    """Add a vector of each position."""

    offset: int = 0
    """Rows before the first."""


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Add a vector of each distance."""

    reach: int = 128
    """Largest distance."""


@dataclasses.dataclass(frozen=True)
class Turned:
    """Rotate queries and keys."""

    base: float = 1e4
    """Wavelength base."""
    stretch: float | None = None
    """Factor."""
    reach: float = 0.5
    """Share that rotates."""

    def __post_init__(self) -> None:
        if self.base <= 1:
            raise ConfigError(f"base is {self.base}: must be above 1")
        if self.stretch is not None and self.base < 100:
            raise ConfigError(f"stretch is {self.stretch}: needs base 100")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapt."""

    rank: int = 8
    """Columns."""
    base: float = 2.0
    """Another base."""
    targets: tuple[str, ...] | Literal["all"] = "all"
    """Adapted kernels."""


@dataclasses.dataclass(frozen=True)
class Near:
    """Look nearby."""

    distance: int = 3
    """Steps."""


@dataclasses.dataclass(frozen=True)
class Far:
    """Look far."""


@dataclasses.dataclass(frozen=True)
class Inner:
    """A model."""

    width: int = 8
    """Width."""
    seed: int = 1
    """Seed of the model."""
    order: Table | Clipped | Turned | None = Table()
    """How order enters."""
    mode: Literal["fast", "exact"] = "fast"
    """Way."""
    adapter: Adapter | None = None
    """None: no adapter."""
    before: Near | Far = Near()
    """How far it looks back."""
    after: Near | Far = Near()
    """How far it looks ahead."""

    def __post_init__(self) -> None:
        if isinstance(self.order, Turned) and self.width % 2:
            raise ConfigError(f"width is {self.width}: must be even to turn")


@dataclasses.dataclass(frozen=True)
class Outer:
    """A run."""

    inner: Inner = Inner()
    seed: int = 0
    """A seed."""


UNION = ConfigFlags(Outer)
OPTIONAL = {
    ("lora",), ("mesh",), ("model", "experts"), ("model", "gated_delta"),
    ("model", "short_conv"), ("model", "latent_attention"),
}  # fmt: skip
WORD = ("inner", "adapter")
"""Path of an optional config of one kind, which may be a single word."""


def parsed(argv: str, base: Outer | None = None) -> Outer:
    base = base or Outer()
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    UNION.add_to(parser, base, None)
    given = UNION.texts(parser.parse_args(spelled(argv.split(), UNION.names)))
    return changed(base, UNION.read(given, base))


@pytest.mark.parametrize(
    ("argv", "inner"),
    [
        ("", Inner()),
        ("--inner.order turned", Inner(order=Turned())),
        ("--order none", Inner(order=None)),
        ("--order Clipped --order.reach 3", Inner(order=Clipped(3))),
        ("--inner.order.base 5e5 --inner.order turned", Inner(order=Turned(5e5))),
        ("--order tu --order.base=150 --stretch 2", Inner(order=Turned(150.0, 2.0))),
        ("--order turned --order.reach .25", Inner(order=Turned(reach=0.25))),
        ("--offset 2", Inner(order=Table(2))),
        ("--adapter adapter --adapter.base 3 --rank 4", Inner(adapter=Adapter(4, 3.0))),
        ("--adapter rank=4,base=3", Inner(adapter=Adapter(4, 3.0))),
        ("--adapter targets=q,v,rank=3", Inner(adapter=Adapter(3, targets=("q", "v")))),
        ("--adapter rank=4 --adapter.base 3", Inner(adapter=Adapter(4, 3.0))),
        ("--adapter rank=4 --targets all", Inner(adapter=Adapter(4, targets="all"))),
        ("--adapter rank=4 --targets q", Inner(adapter=Adapter(4, targets=("q",)))),
        ("--inner.seed 5 --width 6 --mode exact", Inner(width=6, seed=5, mode="exact")),
        ("--order turned,base=150,stretch=2", Inner(order=Turned(150.0, 2.0))),
        ("--order tu,reach=.25 --order.base 500", Inner(order=Turned(500.0, reach=0.25))),
        ("--order offset=2", Inner(order=Table(2))),
        ("--adapter adapter,rank=4", Inner(adapter=Adapter(4))),
    ],
)
def test_config_kind_and_its_fields_have_flags(argv, inner):
    assert parsed(argv) == Outer(inner=inner)


def test_field_flags_modify_existing_kind_without_resetting_it():
    base = Outer(inner=Inner(order=Turned(base=500.0, stretch=3.0)))
    assert parsed("--order turned", base) == base
    assert parsed("--order.base 700", base).inner.order == Turned(700.0, 3.0)
    assert parsed("--order table", base).inner.order == Table()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--adapter rnak=4",
         "inner.adapter has 'rnak': must be one of rank, base, targets; did you mean"),
        ("--adapter 4,rank=4", "inner.adapter is '4,rank=4': must be KEY=VALUE,..."),
        ("--order turned,offset=4",
         "inner.order has 'offset': must be one of base, stretch, reach"),
        ("--order clipped,reach=1 --reach 2", "inner.order.reach is passed twice"),
        ("--order none,reach=1", "inner.order has 'reach': must be one of "),
        ("--order truned,base=2", "inner.order is 'truned': must be None|table|clipped|turned;"),
        ("--adapter rank=4,rank=5", "inner.adapter is 'rank=4,rank=5': rank occurs twice"),
        ("--adapter rank=4 --rank 5", "inner.adapter.rank is passed twice"),
        ("--adapter rank=x", "inner.adapter.rank is 'x': must be INTEGER"),
        ("--order base=5", "inner.order.base is '5': needs --inner.order turned, not table"),
        ("--order truned", "inner.order is 'truned': must be None|table|clipped|turned; did you"),
        ("--order t", "inner.order is 't': must be None|table|clipped|turned"),
        ("--order.base 5", "inner.order.base is '5': needs --inner.order turned, not table"),
        ("--reach 5", "inner.order.reach is '5': needs --inner.order clipped or turned, not table"),
        ("--order none --offset 5", "order.offset is '5': needs --inner.order table, not None"),
        ("--order clipped --reach .5", "inner.order.reach is '.5': must be INTEGER"),
        ("--order turned --order.base 1", "inner.order.base is 1.0: must be above 1"),
        ("--order turned --order.base 9 --stretch 2", "inner.order.stretch is 2.0: needs base 100"),
        ("--order turned --width 3", "inner.width is 3: must be even to turn"),
        ("--base 5", "inner.order.base is '5': needs --inner.order turned, not table"),
        ("--distance 5", "--distance is ambiguous: must be --inner.after.distance or"),
        ("--mode exakt", "inner.mode is 'exakt': must be fast|exact; did you mean exact?"),
        ("--inner.order.bsae 5", "--inner.order.bsae: no such flag; did you mean"),
    ],
)  # fmt: skip
def test_invalid_value_error_names_field_value_and_rule(argv, message):
    with pytest.raises(ConfigError) as caught:
        parsed(argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_full_flag_path_takes_precedence_over_suffix():
    assert parsed("--seed 3") == Outer(seed=3)
    assert UNION.names["--seed"] == "--seed" and UNION.names["--inner.seed"] == "--inner.seed"


def test_help_lists_kinds_and_preset_defaults():
    parser = argparse.ArgumentParser()
    UNION.add_to(parser, Outer(inner=Inner(order=Turned(base=77.0))), None)
    text = " ".join(parser.format_help().split())
    assert "--inner.order None|table|clipped|turned How order enters. [turned]" in text
    assert "turned: Wavelength base. [77.0]" in text and "table: Rows before the first. [0]" in text
    assert "clipped: Largest distance. [128] turned: Share that rotates. [0.5]" in text


@pytest.mark.parametrize("flags", [FLAGS, UNION], ids=["train", "unions"])
def test_flag_spellings_are_unique(flags):
    """A spelling is a full path or a unique suffix, and every field has its full path.

    A shared suffix belongs to the only path outside of optional configs, if there is one.
    """
    paths = {f"--{'.'.join(path)}".replace("_", "-"): path for path in flags.fields}
    assert len(paths) == len(flags.fields) > 5
    assert paths.keys() <= flags.names.keys()
    for spelling, flag in flags.names.items():
        end = spelling.removeprefix("--").replace("-", "_").split(".")
        having = [path for path in flags.fields if list(path[-len(end) :]) == end]
        assert paths[flag] in having
        words = {*OPTIONAL, WORD}
        first = [path for path in having if path[:-1] not in words]
        assert (first or having) == [paths[flag]] or tuple(end) == paths[flag], spelling
    assert not START.names.keys() & flags.names.keys()


def test_d_ff_zero_removes_feed_forward():
    base = train_preset(None)
    given = {path: "0" for path in FLAGS.fields if path[-1] == "d_ff" and len(path) == 2}
    config = changed(base, FLAGS.read(given, base))
    assert config.model.d_ff == 0 and FLAGS.names["--d-ff"] == "--model.d-ff"
    with pytest.raises(ConfigError, match="glu is True: needs a feed-forward, but d_ff is 0"):
        changed(base, FLAGS.read(given | {("model", "glu"): "True"}, base))


def _fitting(name):
    """Return a task that the model of a preset can learn."""
    kind = "decoder" if name is None else preset(name).kind
    return next(task() for task in TASKS.values() if kind in task().shapes)


def test_every_displayed_run_field_parses_to_original_value():
    """Passing the displayed default of a flag changes no field of any preset."""
    recipes = [train_preset(name, task=_fitting(name)) for name in (None, *PRESETS)]
    for base in (*recipes, *(task_recipe(task()) for task in TASKS.values())):
        given = {}
        for path in FLAGS.fields:
            value = base
            for part in path:
                value = getattr(value, part, dataclasses.MISSING)
            if dataclasses.is_dataclass(value):
                value = kind_name(type(value))
            if value is not dataclasses.MISSING:  # otherwise a field of another kind
                given[path] = ",".join(map(str, value)) if type(value) is tuple else str(value)
        assert len(given) > 60
        assert changed(base, FLAGS.read(given, base)) == base


def test_unique_suffix_is_accepted_as_flag():
    """Fields of adapters and of a mesh yield their suffixes to other fields."""
    names, paths = FLAGS.names, [*FLAGS.fields]
    for short, long in (
        ("d-model", "model.d-model"), ("dropout", "model.dropout"), ("lora.rank", "lora.rank"),
        ("rank", "lora.rank"), ("tensor", "mesh.tensor"), ("clip-norm", "clip-norm"),
        ("positions.base", "model.positions.base"), ("targets", "task.targets"),
    ):  # fmt: skip
        assert names[f"--{short}"] == f"--{long}"
    for path in paths:
        whole = "--" + ".".join(path).replace("_", "-")
        assert names[whole] == whole
        for start in range(1, len(path)):
            end = path[start:]
            alike = [other for other in paths if other[-len(end) :] == end]
            first = [other for other in alike if other[:-1] not in OPTIONAL] or alike
            if first == [path]:
                assert names["--" + ".".join(end).replace("_", "-")] == whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Options of a command."""

    runs: tuple[pathlib.Path, ...] = dataclasses.field(metadata=POSITIONAL)
    """Folders."""
    word: str
    """A word."""
    count: int = 3
    """How many."""
    chat: bool = False
    """Whether it answers."""
    kind: Literal["one", "two"] | None = None
    """Which."""
    stop: tuple[str, ...] = dataclasses.field(default=(), metadata=WORDS)
    """Texts."""
    heads: tuple[int, ...] | None = dataclasses.field(default=None, metadata=WORDS)
    """Numbers."""


COMMAND = ConfigFlags(Command, whole="command", none=False)


def options(argv: str) -> Command:
    parser = Parser("command", None)
    COMMAND.add_to(parser, None, None)
    return COMMAND.options(parser.parse_args(spelled(argv.split(" "), COMMAND.names)))


def test_command_options_are_parsed():
    a, b = pathlib.Path("a"), pathlib.Path("b")
    assert options("a b --word none") == Command(runs=(a, b), word="none")
    assert options("a --word x --chat --kind two") == Command(
        runs=(a,), word="x", chat=True, kind="two"
    )
    given = options("a --chat False --word=x --stop a,b c --stop d --heads 0 2 --count 5")
    assert given == Command(
        runs=(a,), word="x", chat=False, stop=("a,b", "c", "d"), heads=(0, 2), count=5
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("a", "--word TEXT is required"),
        ("--word x", "the following arguments are required: runs"),
        ("a --word x --kind tow", "kind is 'tow': must be one|two; did you mean two?"),
        ("a --word x --heads 1 b", "heads is 'b': must be INTEGER"),
        ("a --word x --count", "argument --count: expected one argument"),
        ("a --word x --count None", "count is 'None': must be INTEGER"),
        ("a --word x --chat maybe", "chat is 'maybe': must be True|False"),
        ("a --wrod x", "--wrod: no such flag; did you mean --word?"),
    ],
)
def test_invalid_command_options_are_rejected(argv, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        options(argv)


def test_command_help_shows_choices_and_defaults():
    parser = Parser("command", None)
    COMMAND.add_to(parser, None, None)
    text = " ".join(parser.format_help().split())
    for line in (
        "--count INTEGER How many. [3]", "--kind one|two Which. --stop",
        "--chat [True|False] Whether it answers. [False]", "--heads INTEGER [INTEGER ...] Numbers.",
        "--word TEXT A word. --count", "--stop TEXT [TEXT ...] Texts. --heads", "runs Folders.",
    ):  # fmt: skip
        assert line in text, line
