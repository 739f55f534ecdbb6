"""Flags of a command line, as a person types them; standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from transformer_jax.config import ConfigError


def spelled(
    argv: Sequence[str],
    flags: Collection[str],  # all a command has, with their dashes
) -> list[str]:
    """`argv` with `_` in the names of flags as `-`; ConfigError names the nearest of an unknown.

    What has a space before any `=` is a value, however it starts.
    """
    words = []
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in name:
            known = name.replace("_", "-")
            if known not in flags:
                near = difflib.get_close_matches(known, flags, n=1)
                hint = f", nearest: {near[0]}" if near else ""
                raise ConfigError(f"{name}: no such flag{hint}")
            word = known + word[len(name) :]
        words.append(word)
    return words
