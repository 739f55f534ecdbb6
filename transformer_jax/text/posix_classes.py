"""Classes of POSIX in regular expressions, as Unicode has them."""

from __future__ import annotations

import re

_CLASSES = {
    "alpha": r"\p{Alphabetic}", "lower": r"\p{Lowercase}", "upper": r"\p{Uppercase}",
    "alnum": r"\p{Alphabetic}\p{Nd}", "space": r"\s", "blank": r"\p{Zs}\t", "word": r"\w",
    "punct": r"\p{P}\p{S}",
}  # fmt: skip
"""Classes of POSIX as Unicode has them (UTS #18, annex C). `digit` and `xdigit` stay ASCII's."""


def with_unicode_classes(regex: str) -> str:
    r"""Return an expression whose `[[:alpha:]]` is of all letters, as `\w` and `\p{L}` are."""
    depth = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal depth
        if match["name"] is not None and depth:
            return f"[{match['not']}{_CLASSES[match['name']]}]"
        if match[0].startswith("["):
            depth += 1
        elif match[0] == "]":
            depth = max(0, depth - 1)
        return match[0]

    names = "|".join(_CLASSES)
    return re.sub(
        rf"\\.|\[:(?P<not>\^?)(?P<name>{names}):\]|\[\^?\]?|\]", replaced, regex, flags=re.DOTALL
    )
