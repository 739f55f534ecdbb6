"""What a reader found about each mutant that the tests let pass.

Each key is that of `python -m tests.mutants --list`. "equivalent": no caller can tell the
difference. "speed": only time or memory changes. "hole": a test was missing; the reason names it.
"""

from __future__ import annotations

JUDGED: dict[str, tuple[str, str]] = {}
