"""Read the flags of a command, and the fields of a config from flags; standard library only.

A field is a flag named by its path: `--model.d-model 64`, `--model.positions.base 5e5`. An end of
the path that no other field's path has is enough: `--d-model`, `--positions.base`. A field that
holds one of several configs is given by the name of its kind, and the fields of that kind follow:
`--model.positions rope --model.positions.base 5e5`. Where there is one kind, or None, its fields
may stand in one word: `--mesh data=2,fsdp=4`; an end that they share with another field is that
field's: `--dropout` is the model's, not that of `--lora`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Literal, TypeVar, get_args, get_origin

from transformer_jax.config import ConfigError, OwnBlock
from transformer_jax.config.architectures import architecture_names
from transformer_jax.config.fields import FieldValue, Hint, field_hints, kind_name, nearest
from transformer_jax.config.keywords import field_docs, nearest_flag

Path = tuple[str, ...]
"""The names of the fields that lead from a config to a field within it."""

Config = TypeVar("Config")


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
            known = name.replace("_", "-")
            if known not in names:
                raise ConfigError(f"{name}: {_why_unknown(known, names)}")
            word = names[known] + word[len(name) :]
        words.append(word)
    return words


def _why_unknown(name: str, names: Mapping[str, str]) -> str:
    meant = {flag for flag in names.values() if flag.endswith(f".{name[2:]}")}
    if len(meant) > 1:
        return f"must be {' or '.join(sorted(meant))}"
    return f"no such flag{nearest_flag(name, names)}"


@dataclass(frozen=True)
class Field:
    """Describe a field of a config that a flag sets."""

    path: Path
    owner: type
    """The config class it belongs to; several kinds of a union may share a path."""
    hint: Hint
    default: FieldValue

    @property
    def doc(self) -> str:
        """Return the string below it in its class."""
        return field_docs(self.owner).get(self.path[-1], "")


class ConfigFlags:
    """Hold the flags of a config class and of every config within it."""

    def __init__(self, config: type, without: Collection[Path] = ()) -> None:
        """Collect the fields; those `without` a flag are set by the command itself."""
        self.fields: dict[Path, list[Field]] = {}
        for field in _walk(config, ()):
            if field.path not in without:
                self.fields.setdefault(field.path, []).append(field)
        self.names = _spellings(self.fields)
        """Every spelling of a flag, and the flag it means."""

    def groups(self) -> dict[str, Path]:
        """Return the configs that have flags, by their names in the help; `run` is the whole."""
        within = sorted(dict.fromkeys(path[:-1] for path in self.fields), key=len)
        return {".".join(path) or "run": path for path in within}

    def add_to(
        self,
        parser: argparse.ArgumentParser,
        defaults: FieldValue,
        shown: Collection[str] | None = None,
    ) -> None:
        """Add a flag for every field, in a group for each config.

        The help has the groups `shown`, None all of them, with `defaults`. Texts of other groups
        are not made: to read them from the source takes a third of a second.
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
                if name in shown:
                    text = " ".join(_help(field, defaults, len(owners) > 1) for field in alike)
                group.add_argument(
                    _flag(path),
                    dest=".".join(path),
                    metavar="|".join(dict.fromkeys(_spell(field.hint) for field in alike)),
                    help=text.replace("%", "%%"),
                )

    def given(self, arguments: argparse.Namespace) -> dict[Path, str]:
        """Return the text of every flag that was given."""
        found = vars(arguments)
        return {path: found[".".join(path)] for path in self.fields if ".".join(path) in found}

    def _spread(self, given: Mapping[Path, str]) -> dict[Path, str]:
        """Return the flags with `--mesh data=2,fsdp=4` as a kind and its fields."""
        found = dict(given)
        for path, text in given.items():
            kinds = _kinds(self.fields[path][0].hint)
            if len(kinds) != 1:
                continue
            name = ".".join(path)
            known = [field.name for field in fields(kinds[0])]
            if "=" not in text:
                names = _kind_name(kinds[0]), "none"
                if not text or not any(one.startswith(text.lower()) for one in names):
                    rule = f"must be KEY=VALUE,... of {', '.join(known)}, or None"
                    raise ConfigError(f"{name} is {text!r}: {rule}")
                continue
            found[path] = _kind_name(kinds[0])
            for key, value in _items(name, text):
                field = key.replace("-", "_")
                if field not in known:
                    rule = f"must be one of {', '.join(known)}{nearest(field, known)}"
                    raise ConfigError(f"{name} has {key!r}: {rule}")
                if (*path, field) in given:
                    raise ConfigError(f"{name}.{field} is given twice")
                found[*path, field] = value
        return found

    def read(self, given: Mapping[Path, str], base: FieldValue) -> dict[Path, FieldValue]:
        """Return what the flags change in `base`: values by path, a class for a kind of config.

        ConfigError names the field, its text and what it may be.
        """
        changes: dict[Path, FieldValue] = {}
        given = self._spread(given)
        for path in sorted(given, key=len):  # a kind is known before its fields are read
            holder = _at(base, changes, path[:-1])
            own = [field for field in self.fields[path] if field.owner is type(holder)]
            if not own:
                kinds = " or ".join(architecture_names(field.owner) for field in self.fields[path])
                rule = f"needs {_flag(path[:-1])} {kinds}, it is {architecture_names(holder)}"
                raise ConfigError(f"{'.'.join(path)} is {given[path]!r}: {rule}")
            changes[path] = _read(".".join(path), own[0].hint, given[path])
        return changes


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
    """Return what stands at a path once the kinds among the changes are chosen."""
    value = base
    for end, name in enumerate(path, start=1):
        value = _chosen(getattr(value, name), changes, path[:end])
    return value


def _chosen(value: FieldValue, changes: Mapping[Path, FieldValue], path: Path) -> FieldValue:
    """Return the change at a path, else `value`; of a chosen kind, a config of that kind."""
    change = changes.get(path, value)
    if not isinstance(change, type):
        return change
    return value if type(value) is change else change()


def _walk(config: type, path: Path) -> Iterator[Field]:
    """Yield every field of a config class and of the configs within it."""
    hints = field_hints(config)
    for field in fields(config):
        hint, here = hints[field.name], (*path, field.name)
        if is_dataclass(hint):
            yield from _walk(hint, here)  # type: ignore[arg-type]
            continue
        if OwnBlock in _options(hint):  # which only Python can make
            continue
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield Field(here, config, hint, default)
        for kind in _kinds(hint):
            yield from _walk(kind, here)


def _spellings(fields: Mapping[Path, Sequence[Field]]) -> dict[str, str]:
    """Return every spelling of the flags: whole paths, and ends that only one path has.

    A path into what may stand in one word, as lora.dropout, gives way to one that does not.
    """
    words = {path for path, alike in fields.items() if len(_kinds(alike[0].hint)) == 1}
    others = [path for path in fields if not any(path[:i] in words for i in range(1, len(path)))]
    every, first = _ends(fields), _ends(others)
    names = {
        _flag(path[start:]): _flag(path)
        for path in fields
        for start in range(1, len(path))
        if (first if path in others else every)[path[start:]] == 1
    }
    return names | {_flag(path): _flag(path) for path in fields}


def _ends(paths: Collection[Path]) -> Counter[Path]:
    """Count how many paths end so."""
    return Counter(path[start:] for path in paths for start in range(len(path)))


def _flag(path: Path) -> str:
    return "--" + ".".join(path).replace("_", "-")


def _kinds(hint: Hint) -> list[type]:
    """Return the config classes of a union."""
    return [kind for kind in _options(hint) if isinstance(kind, type) and is_dataclass(kind)]


def _kind_name(kind: type) -> str:
    return "None" if kind is NoneType else kind_name(kind)


def _read(name: str, hint: Hint, text: str) -> FieldValue:
    """Return a flag's text as the type of its field; ConfigError says what was expected.

    Of the name of a kind, a beginning will do that no other kind has.
    """
    begun = [kind for kind in _kinds(hint) if text and _kind_name(kind).startswith(text.lower())]
    for option in _options(hint):
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
            if "," in text or (text and _is_one_item(text, _options(hint))):
                return tuple(_read(name, get_args(option)[0], item) for item in text.split(","))
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    choices = _spell(hint).split("|")
    raise ConfigError(f"{name} is {text!r}: must be {_spell(hint)}{nearest(text, choices)}")


def _is_one_item(text: str, options: tuple[Hint, ...]) -> bool:
    """Say whether a text without a comma is a tuple's only item: no other option can be meant."""
    named = [option for option in options if get_origin(option) is Literal]
    plain = [o for o in options if o is not NoneType and get_origin(o) is not tuple]
    return plain == named and not any(text in get_args(option) for option in named)


def _options(hint: Hint) -> tuple[Hint, ...]:
    """Return the types of a union, None first; of anything else, itself."""
    options = (hint,) if get_origin(hint) in (None, Literal, tuple) else get_args(hint)
    return tuple(sorted(options, key=lambda option: option is not NoneType))


def _spell(hint: Hint) -> str:
    """Return what a flag of this type may be, for a person to read."""
    if len(_options(hint)) > 1:
        return "|".join(_spell(option) for option in _options(hint))
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "ITEM,ITEM,..."
    if is_dataclass(hint):
        return _kind_name(hint)  # type: ignore[arg-type]
    names = {bool: "True|False", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    return names.get(hint, "None")


def _help(field: Field, defaults: FieldValue, named: bool) -> str:
    """Return a flag's line of help, with the kind it belongs to where there are several."""
    with contextlib.suppress(AttributeError):
        holder = value_at(defaults, field.path[:-1])
        if type(holder) is field.owner:
            field = replace(field, default=getattr(holder, field.path[-1]))
    shown = field.default
    shown = _kind_name(type(shown)) if is_dataclass(shown) else shown
    kind = f"{_kind_name(field.owner)}: " if named else ""
    return f"{kind}{field.doc} [{shown}]".strip()
