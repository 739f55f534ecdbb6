"""Read the fields of configs that were written before some of them were one value.

`remat` was true or false, and the settings of AdamW, the only optimizer, were fields of the run.

`positions` was a name, and the settings of every kind were fields of the model beside it: `rope`,
`window_rope_base`, `position_offset`, `sinusoid`, `relative_buckets` and `relative_max_distance`,
at their defaults where the name was another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformer_jax.config.fields import ConfigError, fail
from transformer_jax.config.positions import SHORTHANDS, Positions, Rope

OLD_FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
    "window_rope_base": {"rope": ("window_base", None)},
    "position_offset": {"learned": ("offset", 0)},
    "sinusoid": {"sinusoidal": ("layout", "interleaved")},
    "relative_buckets": {"t5": ("buckets", 32)},
    "relative_max_distance": {"t5": ("max_distance", 128), "shaw": ("max_distance", 128)},
}
"""For each old field, the kinds that read it: its name there, and its default."""


def current_model_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with positions as one object `{"kind": ..., ...}`.

    Fields that are written so already come back as they are. ConfigError names an old field that
    the old `positions` did not read, and that is not at its default.
    """
    out = dict(content)
    if isinstance(out.get("remat"), bool):
        out["remat"] = "full" if out["remat"] else "none"
    name = out.get("positions", "learned")
    old = {key: out.pop(key) for key in ("rope", *OLD_FIELDS) if key in out}
    if not isinstance(name, str) or name not in SHORTHANDS:
        if old:
            fail(next(iter(old)), next(iter(old.values())), "is a field of positions now")
        return out  # as it is written now, or nothing that was ever allowed
    settings: dict[str, Any] = _old_rope(old.pop("rope", {}), name)
    for key, value in old.items():
        reader = OLD_FIELDS[key]
        if name in reader:
            settings[reader[name][0]] = value
        elif value != next(iter(reader.values()))[1]:
            fail(key, value, f"needs positions {' or '.join(map(repr, reader))}")
    kind: type[Positions] | None = SHORTHANDS[name]
    out["positions"] = None if kind is None else {"kind": kind().kind, **settings}
    return out


def current_train_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run with its optimizer as one object `{"kind": ..., ...}`."""
    out = dict(content)
    old = {key: out.pop(key) for key in ("beta1", "beta2", "weight_decay") if key in out}
    if old and "optimizer" in out:
        fail(next(iter(old)), next(iter(old.values())), "is a field of optimizer now")
    if old:
        out["optimizer"] = {"kind": "adamw", **old}
    return out


def _old_rope(rope: Any, name: str) -> dict[str, Any]:
    """Return the old object of rotary settings, or none of them where they were not read."""
    if not isinstance(rope, dict):
        fail("rope", rope, "must be an object")
    defaults = {field.name: field.default for field in fields(Rope)}
    for key, value in rope.items():
        if key not in defaults:
            raise ConfigError(f"rope.{key}: unknown key")
        if name != "rope" and value != defaults[key]:
            fail(f"rope.{key}", value, "needs positions 'rope'")
    return dict(rope) if name == "rope" else {}
