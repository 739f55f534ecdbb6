"""POSIX character classes in regular expressions, extended to Unicode."""

from __future__ import annotations

import re

from transformer_jax.config.fields import nearest

_CLASSES = {
    "alpha": r"\p{Alphabetic}", "lower": r"\p{Lowercase}", "upper": r"\p{Uppercase}",
    "alnum": r"\p{Alphabetic}\p{Nd}", "space": r"\s", "blank": r"\p{Zs}\t", "word": r"\w",
    "punct": r"\p{P}\p{S}", "cntrl": r"\p{Cc}", "graph": r"[^\s\p{Cc}\p{Cn}]",
    "print": r"[^\p{Cc}\p{Cn}\p{Zl}\p{Zp}]",
    # ASCII only
    "digit": "0-9", "xdigit": "0-9A-Fa-f", "ascii": r"\x00-\x7F",
}  # fmt: skip
"""Unicode definitions of POSIX classes (UTS #18, annex C). `digit` and `xdigit` remain ASCII."""


def with_unicode_classes(regex: str, name: str) -> str:
    r"""Rewrite the POSIX classes of a regex so that `[[:alpha:]]` matches every Unicode letter.

    Raise ValueError if the regex contains an unknown class, which the parser would interpret as a
    set of letters, or if it ends with a backslash, which the parser would ignore. `name` identifies
    the regex in error messages.
    """
    # A POSIX class needs an outer pair of brackets. Without it, [:alpha:] is a set of letters.
    depth = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal depth
        kind = match["kind"]
        if match[0] == "\\":
            raise ValueError(f"{name}: the last backslash escapes nothing; remove or double it")
        if kind is not None and depth:
            if kind not in _CLASSES:
                raise ValueError(
                    f"{name}: [:{kind}:] is not a POSIX class{nearest(kind, _CLASSES)}"
                )
            return f"[{match['not']}{_CLASSES[kind]}]"
        if match[0].startswith("[") and kind is None:
            depth += 1
        elif match[0] == "]":
            depth = max(0, depth - 1)
        return match[0]

    return re.sub(
        r"\\.?|\[:(?P<not>\^?)(?P<kind>[a-z]+):\]|\[\^?\]?|\]", replace, regex, flags=re.DOTALL
    )
