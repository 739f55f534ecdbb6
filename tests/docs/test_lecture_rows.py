"""The table of the lectures' contents: complete rows and existing commands."""

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "lectures"
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", (PAGES / "rows.md").read_text(), re.M)


def test_lecture_rows_are_numbered_consecutively():
    assert [int(number) for number, _ in ROWS] == list(range(1, 173))


def test_every_lecture_row_has_link_command_or_reason():
    """Check the last cell; only row 172 has neither a link nor code."""
    bare = [n for n, row in ROWS if not re.search(r"\]\(|`", row.split("|")[-1]) and n != "172"]
    assert bare == []


def test_every_erratum_is_referenced_by_a_lecture_row():
    slips = re.findall(r"^\| (\d+) \|", (PAGES / "errata.md").read_text(), re.M)
    named = re.findall(r"\[errata ([\d, ]+)\]", "".join(row for _, row in ROWS))
    assert len(slips) == 19
    assert set(", ".join(named).split(", ")) == set(slips)


def test_commands_in_lecture_rows_exist():
    words = re.findall(r"`(\w+) --", "".join(row for _, row in ROWS))
    package = Path(__file__).parents[2] / "transformer_jax"
    assert {"train", "inspect", "evaluate"} < set(words)
    commands = {path.stem for part in ("cli", "lectures") for path in (package / part).iterdir()}
    missing = set(words) - commands
    assert missing <= {"drawings"}  # a demonstration
