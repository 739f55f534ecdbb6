"""Progress of long decoding, on standard error."""

import io
import sys

import pytest

from transformer_jax.training import progress
from transformer_jax.training.progress import DecodingLine, Lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def decode(monkeypatch):
    """Report `batch` more examples every `seconds`; return the output to stderr."""

    def run(total, batch, seconds, stream, report):
        clock = iter(range(0, 10**6, seconds))
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(sys, "stderr", stream)
        for done in [*range(0, total, batch), total]:
            report(done, total)
        return stream.getvalue()

    return run


def test_terminal_shows_one_decoding_progress_line_and_erases_it(decode):
    """Shown after ten seconds, hence after the second batch of 7 s."""
    report = DecodingLine()
    for _ in range(2):  # can be restarted
        text = decode(1100, 300, 7, Terminal(), report)
        assert text == (
            "\rdecoded  600/1100  0:12 left"
            "\rdecoded  900/1100  0:05 left"
            "\r" + " " * 28 + "\r"
        )  # fmt: skip


def test_decoding_progress_without_terminal_prints_about_twenty_lines(decode):
    text = decode(3201, 32, 2, io.StringIO(), Lines().decoded)
    lines = text.splitlines()
    assert 15 < len(lines) <= 20 and text.endswith("\n")
    assert lines[0] == "decoded  192/3201  3:08 left" and lines[-1].startswith("decoded 3")
    every = decode(320, 32, 60, io.StringIO(), DecodingLine())
    assert len(every.splitlines()) == 9


@pytest.mark.parametrize(("total", "batch", "seconds"), [(5, 32, 99), (256, 32, 1), (64, 32, 4)])
def test_short_decoding_shows_no_progress(decode, total, batch, seconds):
    for stream in (Terminal(), io.StringIO()):
        assert decode(total, batch, seconds, stream, DecodingLine()) == ""
