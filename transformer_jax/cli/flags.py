"""Read flags into dataclasses: the fields of a run's config, and the options of every command.

A field is a flag named by its path: `--model.d-model 64`, `--model.positions.base 5e5`. An end of
the path that no other field's path has is enough: `--d-model`, `--positions.base`. A field that
contains one of several configs takes the name of its kind, and the fields of that kind follow, as
flags or in the same word: `--positions rope --positions.base 5e5`, `--positions rope,base=5e5`,
`--mesh data=2,fsdp=4`. An end that the fields of an optional config share with another field is
that field's: `--dropout` is the model's, not that of `--lora`.
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

from transformer_jax.config import ConfigError, OwnBlock
from transformer_jax.config.architectures import architecture_names
from transformer_jax.config.fields import FieldValue, Hint, nearest
from transformer_jax.config.keywords import field_docs, nearest_flag
from transformer_jax.config.kinds import field_hints, kind_name

Path: TypeAlias = tuple[str, ...]
"""The names of the fields that lead from a config to a field within it."""

Text: TypeAlias = str | list[str]
"""What follows a flag: a word, or several if its field takes `WORDS`."""

Config = TypeVar("Config")

WORDS = {"words": True}
"""Metadata of a tuple whose items are words, `--stop A B` or `--stop A --stop B`: an item may
contain a comma, at which other tuples are split."""

POSITIONAL = {"positional": True, **WORDS}
"""Metadata of a tuple whose items stand without a flag."""


class Parser(argparse.ArgumentParser):
    """Parser of a command; every error is a ConfigError."""

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
    names: Mapping[str, str],  # every spelling of a flag, dashes included: the flag it means
) -> list[str]:
    """Return `argv` with every flag under its own name, whichever way it was spelled.

    An `_` in a flag is read as `-`. A word with a space before any `=` is a value, however it
    starts. Raises ConfigError for an unknown flag, with the nearest known one.
    """
    words = []
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name:
            # Fields have underscores in Python, and flags have dashes in a shell.
            known = name.replace("_", "-")
            if known not in names:
                meant = {flag for flag in names.values() if flag.endswith(f".{known[2:]}")}
                if len(meant) > 1:
                    raise ConfigError(f"{name}: must be {' or '.join(sorted(meant))}")
                raise ConfigError(f"{name}: no such flag{nearest_flag(known, names)}")
            word = names[known] + word[len(name) :]
        words.append(word)
    return words


@dataclass(frozen=True)
class Field:
    """Field of a config that a flag sets."""

    path: Path
    owner: type
    """The config class it belongs to; several kinds of a union may share a path."""
    hint: Hint
    default: FieldValue
    metadata: Mapping[str, Any]

    def help(self, defaults: object, named: bool, kinds: str) -> str:
        """Return a line: the string below the field, and its default in brackets.

        The kind that it belongs to comes first if it is `named`; `kinds` are the fields of the
        configs that it may contain.
        """
        shown = self.default
        with contextlib.suppress(AttributeError):
            holder = value_at(defaults, self.path[:-1])
            if type(holder) is self.owner:
                shown = getattr(holder, self.path[-1])
        shown = _kind_name(type(shown)) if is_dataclass(shown) else shown
        words: list[str | None] = [f"{_kind_name(self.owner)}:"] if named else []
        words += [self.metadata.get("help") or field_docs(self.owner).get(self.path[-1]), kinds]
        if known := self.metadata.get("known"):
            words += [", ".join(known() if callable(known) else known)]
        if isinstance(shown, tuple) and self.metadata.get("words"):
            shown = " ".join(map(str, shown)) or None
        typed = shown is not None or NoneType in _options(self.hint)
        words += [f"[{shown}]"] if shown is not MISSING and typed else []
        return " ".join(filter(None, words))


class ConfigFlags:
    """Flags of a dataclass and of every dataclass within it."""

    def __init__(
        self, config: type, without: Collection[Path] = (), *, whole: str = "run", none: bool = True
    ) -> None:
        """Collect the fields; those `without` a flag are set by the command itself.

        `whole` is the title of the dataclass's own fields. `none`: the word None is that value;
        False for the options of a command, where leaving the flag out is None and a text may be
        "none".
        """
        self.config, self._whole, self._without, self._none = config, whole, without, none
        self.collect()

    def collect(self) -> None:
        """Collect the fields again, with those of kinds that have registered since."""
        self.fields: dict[Path, list[Field]] = {}
        for field in _walk(self.config, (), self._none):
            if field.path not in self._without:
                self.fields.setdefault(field.path, []).append(field)
        # A path into an optional config, as lora.dropout, gives way to one that is not.
        optional = {
            path for path, alike in self.fields.items()
            if len(_kinds(alike[0].hint)) == 1
        }  # fmt: skip
        own = {p for p in self.fields if not any(p[:i] in optional for i in range(1, len(p)))}
        every = Counter(path[start:] for path in self.fields for start in range(len(path)))
        first = Counter(path[start:] for path in own for start in range(len(path)))
        self.names: dict[str, str] = {
            flag_of(path[start:]): flag_of(path)
            for path in self.fields
            for start in range(1, len(path))
            if (first if path in own else every)[path[start:]] == 1
        }
        """Every spelling of a flag, and the flag it means."""
        self.names |= {flag_of(path): flag_of(path) for path in self.fields}

    def groups(self) -> dict[str, Path]:
        """Return the configs that have flags, by their names in the help."""
        within = sorted(dict.fromkeys(path[:-1] for path in self.fields), key=len)
        return {".".join(path) or self._whole: path for path in within}

    def add_to(
        self, parser: argparse.ArgumentParser, defaults: object, shown: Collection[str] | None
    ) -> None:
        """Add a flag for every field, in a group for each config.

        The help has the groups `shown`, None all of them, with `defaults`; the flag of a config
        whose group is not shown names its fields. Texts of other groups are not made: to read them
        from the source takes a third of a second.
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
            group = parser.add_argument_group(name, about)
            for path, alike in inside.items():
                options: dict[str, Any] = {"dest": ".".join(path)}
                if name in shown:
                    kinds = ""
                    if ".".join(path) not in shown:  # then its fields have no lines of their own
                        names = {
                            _kind_name(kind): [one.name for one in fields(kind)]
                            for kind in _kinds(alike[0].hint)
                        }
                        listed = [
                            f"{kind} ({', '.join(one)})" for kind, one in names.items() if one
                        ]
                        kinds = f"Fields: {', '.join(listed)}." if listed else ""
                    lines = (field.help(defaults, len(owners) > 1, kinds) for field in alike)
                    text = " ".join(lines).replace("%", "%%")
                spellings = dict.fromkeys(_spell(field.hint) for field in alike)
                if bool in _options(alike[0].hint):
                    options |= {"nargs": "?", "const": "True"}
                if alike[0].metadata.get("words"):
                    options |= {"nargs": "+", "action": "extend"}
                    spellings = {_spell(get_args(alike[0].hint)[0]): None}
                if alike[0].metadata.get("positional"):
                    group.add_argument(options.pop("dest"), help=text, **options)
                    continue
                metavar = "|".join(spellings)
                group.add_argument(flag_of(path), metavar=metavar, help=text, **options)

    def given(self, arguments: argparse.Namespace) -> dict[Path, Text]:
        """Return the text of every flag that was given."""
        found = vars(arguments)
        return {path: found[".".join(path)] for path in self.fields if ".".join(path) in found}

    def options(self, arguments: argparse.Namespace) -> Any:
        """Return the dataclass, whose fields are plain values, with what was given.

        ConfigError for a wrong text, and for a field without a default that was not given.
        """
        given = self.given(arguments)
        for path, (field,) in self.fields.items():
            if field.default is MISSING and path not in given:
                raise ConfigError(f"{flag_of(path)} {_spell(field.hint)} is needed")
        return self.config(**{
            path[0]: _read(path[0], self.fields[path][0].hint, text) for path, text in given.items()
        })  # fmt: skip

    def read(self, given: Mapping[Path, Text], base: FieldValue) -> dict[Path, FieldValue]:
        """Return what the flags change in `base`: values by path, a class for a kind of config.

        ConfigError names the field, its text and what it may be.
        """
        changes: dict[Path, FieldValue] = {}
        given = self._spread(given)
        # `--positions.base` may come before `--positions rope`.
        for path in sorted(given, key=len):  # a kind is known before its fields are read
            holder = _at(base, changes, path[:-1])
            own = [field for field in self.fields[path] if field.owner is type(holder)]
            if not own:
                kinds = " or ".join(architecture_names(field.owner) for field in self.fields[path])
                rule = f"needs {flag_of(path[:-1])} {kinds}, it is {architecture_names(holder)}"
                raise ConfigError(f"{'.'.join(path)} is {given[path]!r}: {rule}")
            changes[path] = _read(".".join(path), own[0].hint, given[path])
        return changes

    def _spread(self, given: Mapping[Path, Text]) -> dict[Path, Text]:
        """Return the flags with `--positions rope,base=5e5` as a kind and its fields.

        Fields without a kind are those of the only kind, or of the kind that is there.
        """
        found = dict(given)
        for path, text in given.items():
            name, hint = ".".join(path), self.fields[path][0].hint
            kinds = _kinds(hint)
            if not kinds or isinstance(text, list):
                continue
            chosen, comma, items = text.partition(",")
            if "=" in chosen:
                chosen, comma, items = "", ",", text
            if len(kinds) == 1:
                known, only = [field.name for field in fields(kinds[0])], _kind_name(kinds[0])
                if comma and not chosen:
                    chosen = only
                names = "none", only
                if not chosen or not any(one.startswith(chosen.lower()) for one in names):
                    rule = f"must be KEY=VALUE,... of {', '.join(known)}, or None"
                    raise ConfigError(f"{name} is {text!r}: {rule}")
            if not comma:
                continue
            known = [end[-1] for end in self.fields if end[:-1] == path]
            del found[path]
            if chosen:
                kind = _read(name, hint, chosen)
                known = [field.name for field in fields(kind)] if kind is not None else []
                found[path] = chosen
            for key, value in _items(name, items):
                field = key.replace("-", "_")
                if field not in known:
                    rule = f"must be one of {', '.join(known)}{nearest(field, known)}"
                    raise ConfigError(f"{name} has {key!r}: {rule}")
                if (*path, field) in given:
                    raise ConfigError(f"{name}.{field} is given twice")
                found[*path, field] = value
        return found


def _items(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of `key=value,key=value`; a comma within a value needs no key after it."""
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
        raise ConfigError(f"{name} is {text!r}: {twice[0]} is there twice")
    yield from ((key, value) for key, value in found)


def changed(config: Config, changes: Mapping[Path, FieldValue], path: Path = ()) -> Config:
    """Return `config`, which stands at `path`, with the changes to it; validated as one.

    A class among the changes is a kind of config: its defaults, unless it is there already.
    """
    own: dict[str, FieldValue] = {}
    for field in fields(config):  # type: ignore[arg-type]
        here = (*path, field.name)
        if any(change[: len(here)] == here for change in changes):
            value = _chosen(getattr(config, field.name), changes, here)
            own[field.name] = changed(value, changes, here) if is_dataclass(value) else value
    try:
        return replace(config, **own)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(".".join((*path, str(error)))) from None


def value_at(config: object, path: Path) -> object:
    """Return the value of a field within a config."""
    return _at(config, {}, path)


def _at(base: FieldValue, changes: Mapping[Path, FieldValue], path: Path) -> FieldValue:
    """Return the value at a path once the kinds among the changes are chosen."""
    value = base
    for end, name in enumerate(path, start=1):
        value = _chosen(getattr(value, name), changes, path[:end])
    return value


def _chosen(value: FieldValue, changes: Mapping[Path, FieldValue], path: Path) -> FieldValue:
    """Return the change at a path, else `value`; of a chosen kind, a config of that kind."""
    change = changes.get(path, value)
    if not isinstance(change, type):
        return change
    # A kind that is there already keeps its fields: `--positions rope` on a rope changes nothing.
    return value if type(value) is change else change()


def _walk(config: type, path: Path, none: bool) -> Iterator[Field]:
    """Yield every field of a config class and of the configs within it."""
    hints = field_hints(config)
    for field in fields(config):
        hint, here = hints[field.name], (*path, field.name)
        if is_dataclass(hint):
            yield from _walk(hint, here, none)  # type: ignore[arg-type]
            continue
        options = _options(hint)
        if OwnBlock in options:  # which only Python can make
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
    """Return the whole name of a field's flag."""
    return "--" + ".".join(path).replace("_", "-")


def _kinds(hint: Hint) -> list[type]:
    """Return the config classes of a union."""
    return [kind for kind in _options(hint) if isinstance(kind, type) and is_dataclass(kind)]


def _kind_name(kind: type) -> str:
    return "None" if kind is NoneType else kind_name(kind)


def _read(name: str, hint: Hint, text: Text) -> FieldValue:
    """Return a flag's text as the type of its field; ConfigError says what was expected.

    A beginning of a kind's name is enough if no other kind begins with it.
    """
    if isinstance(text, list):
        return tuple(_read(name, get_args(hint)[0], word) for word in text)
    options = _options(hint)
    # A beginning is enough only for kinds: values of a Literal are checked exactly.
    begun = [kind for kind in _kinds(hint) if text and _kind_name(kind).startswith(text.lower())]
    for option in options:
        if option is NoneType:
            if text.lower() == "none":
                return None
        elif is_dataclass(option):
            if text.lower() == _kind_name(option) or begun == [option]:  # type: ignore[arg-type]
                return option
        elif option is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif get_origin(option) is Literal:
            if text in get_args(option):
                return text
        elif get_origin(option) is tuple:
            # A text without a comma is a tuple's only item if no other option can be meant.
            named = [one for one in options if get_origin(one) is Literal]
            others = [one for one in options if one not in (NoneType, option)]
            alone = others == named and not any(text in get_args(one) for one in named)
            if "," in text or (text and alone):
                return tuple(_read(name, get_args(option)[0], item) for item in text.split(","))
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    choices = _spell(hint).split("|")
    raise ConfigError(f"{name} is {text!r}: must be {_spell(hint)}{nearest(text, choices)}")


def _options(hint: Hint) -> tuple[Hint, ...]:
    """Return the types of a union, None first; of anything else, itself."""
    options = (hint,) if get_origin(hint) in (None, Literal, tuple) else get_args(hint)
    return tuple(sorted(options, key=lambda option: option is not NoneType))


def _spell(hint: Hint) -> str:
    """Return the values that a flag of this type takes, for a person to read."""
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
