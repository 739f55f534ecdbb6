"""Flags derived from dataclasses: the config of a run and the options of every command.

The flag for a field is its path, such as `--model.d-model 64` or `--model.positions.base 5e5`. A
unique suffix of the path is sufficient, such as `--d-model` or `--positions.base`. If a field can
contain several kinds of config, the value of its flag is the name of a kind. The fields of that
kind are passed as separate flags or in the same word, as in `--positions rope --positions.base
5e5`, `--positions rope,base=5e5` or `--mesh data=2,fsdp=4`. If a field of an optional config shares
a suffix with another field, the suffix refers to the other field. For example, `--dropout` sets the
dropout of the model, and not that of `--lora`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args, get_origin

from transformer_jax.config import ConfigError, CustomBlock
from transformer_jax.config.architectures import architecture_names
from transformer_jax.config.fields import FieldValue, Hint, nearest
from transformer_jax.config.keywords import field_docs, nearest_flag
from transformer_jax.config.kinds import field_hints, kind_name

Path: TypeAlias = tuple[str, ...]
"""Field names that lead from a config to a nested field."""

Text: TypeAlias = str | list[str]
"""Value of a flag, which is one word, or several words if the field has the metadata `WORDS`."""

Config = TypeVar("Config")

WORDS = {"words": True}
"""Metadata for a tuple that is passed as separate words, as in `--stop A B` or `--stop A --stop B`.
The items may contain commas. Other tuples are split at commas."""

POSITIONAL = {"positional": True, **WORDS}
"""Metadata for a tuple of positional arguments."""


class Parser(argparse.ArgumentParser):
    """Argument parser for a command that reports every error as a ConfigError."""

    def __init__(self, command: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=command, usage=f"{command} [--FLAG VALUE ...]", description=description,
            epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
            add_help=False, argument_default=argparse.SUPPRESS,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def spelled(
    argv: Sequence[str],
    names: Mapping[str, str],  # full name of each flag, keyed by spelling, with dashes
) -> list[str]:
    """Return `argv` with every flag spelled out in full.

    An underscore in a flag is read as a dash. A word with a space before any `=` is a value, even
    if it starts with dashes. Raises ConfigError for an unknown flag, and suggests the nearest known
    flag.
    """
    words = []
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name:
            spelling = name.replace("_", "-")
            if spelling not in names:
                matches = {flag for flag in names.values() if flag.endswith(f".{spelling[2:]}")}
                if len(matches) > 1:
                    raise ConfigError(
                        f"{name} is ambiguous: must be {' or '.join(sorted(matches))}"
                    )
                raise ConfigError(f"{name}: no such flag{nearest_flag(spelling, names)}")
            word = names[spelling] + word[len(name) :]
        words.append(word)
    return words


@dataclass(frozen=True)
class Field:
    """Config field that a flag sets."""

    path: Path
    owner: type
    """Config class that defines the field. Several kinds in a union may share a path."""
    hint: Hint
    default: FieldValue
    metadata: Mapping[str, Any]

    def help(self, defaults: object, named: bool, kinds: str) -> str:
        """Return a help line with the docstring of the field, and with its default in brackets.

        If `named` is true, the line starts with the kind of config that has the field. `kinds`
        lists the fields of the configs that the field may contain.
        """
        shown = self.default
        with contextlib.suppress(AttributeError):
            holder = value_at(defaults, self.path[:-1])
            if type(holder) is self.owner:
                shown = getattr(holder, self.path[-1])
        shown = _kind_name(type(shown)) if is_dataclass(shown) else shown
        words: list[str | None] = [f"{_kind_name(self.owner)}:"] if named else []
        words += [self.metadata.get("help") or field_docs(self.owner).get(self.path[-1]), kinds]
        if choices := self.metadata.get("known"):
            words += [", ".join(choices() if callable(choices) else choices)]
        if isinstance(shown, tuple) and self.metadata.get("words"):
            shown = " ".join(map(str, shown)) or None
        typed = shown is not None or NoneType in _options(self.hint)
        words += [f"[{shown}]"] if shown is not MISSING and typed else []
        return " ".join(filter(None, words))


class ConfigFlags:
    """Flags of a dataclass and its nested dataclasses."""

    def __init__(
        self, config: type, without: Collection[Path] = (), *, whole: str = "run", none: bool = True
    ) -> None:
        """Collect all fields except the ones in `without`, which the command sets itself.

        `whole` is the help title for the fields of `config` itself. If `none` is true, the word
        None sets a field to None. Pass False for the options of a command, where None means that
        the flag was not passed, and where a string may be "none".
        """
        self.config, self._whole, self._without, self._none = config, whole, without, none
        self.collect()

    def collect(self) -> None:
        """Collect the fields again, including the fields of newly registered kinds."""
        self.fields: dict[Path, list[Field]] = {}
        for field in _walk(self.config, (), self._none):
            if field.path not in self._without:
                self.fields.setdefault(field.path, []).append(field)
        # A path into an optional config, such as lora.dropout, loses the suffixes that other paths
        # share.
        optional = {
            path for path, same_path in self.fields.items()
            if len(_kinds(same_path[0].hint)) == 1
        }  # fmt: skip
        first = {p for p in self.fields if not any(p[:i] in optional for i in range(1, len(p)))}
        counts = Counter(path[start:] for path in self.fields for start in range(len(path)))
        counts_first = Counter(path[start:] for path in first for start in range(len(path)))
        self.names: dict[str, str] = {
            flag_of(path[start:]): flag_of(path)
            for path in self.fields
            for start in range(1, len(path))
            if (counts_first if path in first else counts)[path[start:]] == 1
        }
        """Full name of each flag, keyed by spelling."""
        self.names |= {flag_of(path): flag_of(path) for path in self.fields}

    def groups(self) -> dict[str, Path]:
        """Return the paths of the configs that have flags, keyed by help title."""
        within = sorted(dict.fromkeys(path[:-1] for path in self.fields), key=len)
        return {".".join(path) or self._whole: path for path in within}

    def add_to(
        self, parser: argparse.ArgumentParser, defaults: object, shown: Collection[str] | None
    ) -> None:
        """Add a flag for every field, in one argument group for each config.

        The help contains the groups in `shown`, or all groups if it is None, with values from
        `defaults`. If the group of a config is not shown, the help for the flag of the config lists
        its fields. Help texts of other groups are not generated, because reading them from the
        source takes a third of a second.
        """
        groups = self.groups()
        shown = groups if shown is None else shown
        for name, within in groups.items():
            inside = {path: fs for path, fs in self.fields.items() if path[:-1] == within}
            owners = dict.fromkeys(field.owner for fs in inside.values() for field in fs)
            about, text = None, argparse.SUPPRESS
            if name in shown:
                first = ((inspect.getdoc(owner) or "").partition("\n")[0] for owner in owners)
                about = "\n".join(filter(None, first))
            if name == self._whole and not self._none:  # the options of a command
                group = parser.add_argument_group(f"{name} options")
            else:
                group = parser.add_argument_group(name, about)
            for path, same_path in inside.items():
                hint, metadata = same_path[0].hint, same_path[0].metadata
                options: dict[str, Any] = {"dest": ".".join(path)}
                if name in shown:
                    kinds = ""
                    if ".".join(path) not in shown:  # its fields are not listed separately
                        names = {
                            _kind_name(kind): [one.name for one in fields(kind)]
                            for kind in _kinds(hint)
                        }
                        listed = [
                            f"{kind} ({', '.join(one)})" for kind, one in names.items() if one
                        ]
                        kinds = f"Fields: {', '.join(listed)}." if listed else ""
                    lines = (field.help(defaults, len(owners) > 1, kinds) for field in same_path)
                    text = " ".join(lines).replace("%", "%%")
                spellings = dict.fromkeys(_spell(field.hint) for field in same_path)
                if bool in _options(hint):
                    options |= {"nargs": "?", "const": "True"}
                if metadata.get("words"):
                    options |= {"nargs": "+", "action": "extend"}
                    spellings = {_spell(get_args(hint)[0]): None}
                if metadata.get("positional"):
                    group.add_argument(options.pop("dest"), help=text, **options)
                    continue
                metavar = "|".join(spellings)
                group.add_argument(flag_of(path), metavar=metavar, help=text, **options)

    def texts(self, arguments: argparse.Namespace) -> dict[Path, Text]:
        """Return the text of every flag that was passed, keyed by path."""
        found = vars(arguments)
        return {path: found[".".join(path)] for path in self.fields if ".".join(path) in found}

    def options(self, arguments: argparse.Namespace) -> Any:
        """Return an instance of the options; raise ConfigError for an invalid or missing flag."""
        texts = self.texts(arguments)
        for path, (field,) in self.fields.items():
            if field.default is MISSING and path not in texts:
                raise ConfigError(f"{flag_of(path)} {_spell(field.hint)} is required")
        return self.config(**{
            path[0]: _read(path[0], self.fields[path][0].hint, text) for path, text in texts.items()
        })  # fmt: skip

    def read(self, texts: Mapping[Path, Text], base: FieldValue) -> dict[Path, FieldValue]:
        """Return the changes that the flags make to `base`, keyed by path.

        A kind of config is represented by its class. A ConfigError states the field, its text and
        the rule.
        """
        changes: dict[Path, FieldValue] = {}
        # Split a word such as `rope,base=5e5` into a kind and its fields. Fields without a kind
        # belong to the only possible kind, or to the kind in the base config.
        given, texts = texts, dict(texts)
        for path, text in given.items():
            name, hint = ".".join(path), self.fields[path][0].hint
            kinds = _kinds(hint)
            if not kinds or isinstance(text, list):
                continue
            kind_text, comma, items = text.partition(",")
            if "=" in kind_text:
                kind_text, comma, items = "", ",", text
            if len(kinds) == 1:
                keys, only = [field.name for field in fields(kinds[0])], _kind_name(kinds[0])
                if comma and not kind_text:
                    kind_text = only
                names = "none", only
                if not kind_text or not any(one.startswith(kind_text.lower()) for one in names):
                    rule = f"must be KEY=VALUE,... with keys {', '.join(keys)}, or None"
                    raise ConfigError(f"{name} is {text!r}: {rule}")
            if not comma:
                continue
            keys = [end[-1] for end in self.fields if end[:-1] == path]
            del texts[path]
            if kind_text:
                kind = _read(name, hint, kind_text)
                keys = [field.name for field in fields(kind)] if kind is not None else []
                texts[path] = kind_text
            for key, value in _items(name, items):
                field_name = key.replace("-", "_")
                if field_name not in keys:
                    rule = f"must be one of {', '.join(keys)}{nearest(field_name, keys)}"
                    raise ConfigError(f"{name} has {key!r}: {rule}")
                if (*path, field_name) in given:
                    raise ConfigError(f"{name}.{field_name} is passed twice")
                texts[*path, field_name] = value
        # Read the kinds first, because `--positions.base` may precede `--positions rope`.
        for path in sorted(texts, key=len):
            owner = _at(base, changes, path[:-1])
            matches = [field for field in self.fields[path] if field.owner is type(owner)]
            if not matches:
                owners = " or ".join(architecture_names(field.owner) for field in self.fields[path])
                rule = f"needs {flag_of(path[:-1])} {owners}, not {architecture_names(owner)}"
                raise ConfigError(f"{'.'.join(path)} is {texts[path]!r}: {rule}")
            changes[path] = _read(".".join(path), matches[0].hint, texts[path])
        return changes


def _items(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs in `key=value,key=value`, where a value may contain commas."""
    found: list[list[str]] = []
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if equals:
            found.append([key.strip(), value])
        elif found:
            found[-1][1] += f",{item}"
        else:
            raise ConfigError(f"{name} is {text!r}: must be KEY=VALUE,...")
    if twice := [key for key, count in Counter(key for key, _ in found).items() if count > 1]:
        raise ConfigError(f"{name} is {text!r}: {twice[0]} occurs twice")
    yield from ((key, value) for key, value in found)


def changed(config: Config, changes: Mapping[Path, FieldValue], path: Path = ()) -> Config:
    """Apply changes to the config at `path`, and validate the result once.

    If a change is a class, it selects that kind of config. The fields of the new config have their
    defaults, unless `config` already is of that kind.
    """
    updates: dict[str, FieldValue] = {}
    for field in fields(config):  # type: ignore[arg-type]
        here = (*path, field.name)
        if any(change[: len(here)] == here for change in changes):
            value = _changed_value(getattr(config, field.name), changes, here)
            updates[field.name] = changed(value, changes, here) if is_dataclass(value) else value
    try:
        return replace(config, **updates)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(".".join((*path, str(error)))) from None


def value_at(config: object, path: Path) -> object:
    """Return the value of a nested field."""
    return _at(config, {}, path)


def _at(base: FieldValue, changes: Mapping[Path, FieldValue], path: Path) -> FieldValue:
    """Return the value at a path after changes of kinds."""
    value = base
    for end, name in enumerate(path, start=1):
        value = _changed_value(getattr(value, name), changes, path[:end])
    return value


def _changed_value(value: FieldValue, changes: Mapping[Path, FieldValue], path: Path) -> FieldValue:
    """Return the change at a path, or else `value`. A class becomes a default config."""
    change = changes.get(path, value)
    if not isinstance(change, type):
        return change
    # A config of the same kind keeps its fields, so `--positions rope` does not change a rope.
    return value if type(value) is change else change()


def _walk(config: type, path: Path, none: bool) -> Iterator[Field]:
    """Yield every field of a config class and its nested configs."""
    hints = field_hints(config)
    for field in fields(config):
        hint, here = hints[field.name], (*path, field.name)
        if is_dataclass(hint):
            yield from _walk(hint, here, none)  # type: ignore[arg-type]
            continue
        options = _options(hint)
        if CustomBlock in options:  # a block can be set only in Python
            continue
        if not none and options[0] is NoneType:
            hint = options[1]
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield Field(here, config, hint, default, field.metadata)
        for kind in _kinds(hint):
            yield from _walk(kind, here, none)


def flag_of(path: Path) -> str:
    """Return the full name of the flag for a field."""
    return "--" + ".".join(path).replace("_", "-")


def _kinds(hint: Hint) -> list[type]:
    """Return the config classes of a union."""
    return [kind for kind in _options(hint) if isinstance(kind, type) and is_dataclass(kind)]


def _kind_name(kind: type) -> str:
    return "None" if kind is NoneType else kind_name(kind)


def _read(name: str, hint: Hint, text: Text) -> FieldValue:
    """Convert the text of a flag to the type of its field; a ConfigError states the valid values.

    A unique prefix of the name of a kind is sufficient. Values of a Literal must match exactly.
    """
    if isinstance(text, list):
        return tuple(_read(name, get_args(hint)[0], word) for word in text)
    options = _options(hint)
    matches = [kind for kind in _kinds(hint) if text and _kind_name(kind).startswith(text.lower())]
    for option in options:
        if option is NoneType:
            if text.lower() == "none":
                return None
        elif is_dataclass(option):
            if text.lower() == _kind_name(option) or matches == [option]:  # type: ignore[arg-type]
                return option
        elif option is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif get_origin(option) is Literal:
            if text in get_args(option):
                return text
        elif get_origin(option) is tuple:
            # Text without a comma is a tuple with one item, unless it could match another option.
            literals = [one for one in options if get_origin(one) is Literal]
            others = [one for one in options if one not in (NoneType, option)]
            single = others == literals and not any(text in get_args(one) for one in literals)
            if "," in text or (text and single):
                return tuple(_read(name, get_args(option)[0], item) for item in text.split(","))
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    choices = _spell(hint).split("|")
    raise ConfigError(f"{name} is {text!r}: must be {_spell(hint)}{nearest(text, choices)}")


def _options(hint: Hint) -> tuple[Hint, ...]:
    """Return the types in a union, with None first, or a one-item tuple for any other type."""
    options = (hint,) if get_origin(hint) in (None, Literal, tuple) else get_args(hint)
    return tuple(sorted(options, key=lambda option: option is not NoneType))


def _spell(hint: Hint) -> str:
    """Return a description of the values that a flag of this type accepts."""
    if len(_options(hint)) > 1:
        return "|".join(_spell(option) for option in _options(hint))
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "ITEM,ITEM,..."
    if is_dataclass(hint):
        return _kind_name(hint)  # type: ignore[arg-type]
    names = {bool: "True|False", int: "INTEGER", float: "NUMBER", str: "TEXT", NoneType: "None"}
    return names.get(hint, "FILE")
