"""Progress display of a run, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Receiver of progress reports from `fit`."""

    def start(self, step: int, steps: int) -> None:
        """Start the display when `step` of `steps` steps are already done."""

    def step(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Show the loss of a finished step."""

    def decoded(self, done: int, total: int) -> None:
        """Show how many held-out examples have been decoded. The first call has `done=0`."""

    def say(self, line: str) -> None:
        """Show a line."""

    def stop(self) -> None:
        """Stop the display. It is safe to call this method twice."""


class Silent:
    """Receiver of progress that displays nothing."""

    def start(self, step: int, steps: int) -> None: ...

    def step(self, step: int, loss: float, tokens_per_second: float | None) -> None: ...

    def decoded(self, done: int, total: int) -> None: ...

    def say(self, line: str) -> None: ...

    def stop(self) -> None: ...


class DecodingLine:
    """Display of the number of decoded examples on standard error, after ten seconds.

    On a terminal, the count is a single line, which is erased at the end. In any other output, at
    most about twenty lines are printed.
    """

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` examples are decoded. `done=0` starts the timer."""
        now = time.monotonic()
        if done == 0:
            self._begun, self._last = now, (0, now)
            self._first: tuple[int, float] | None = None
            self._drawn = 0
            return
        self._first = self._first or (done, now)  # excludes compilation time
        if done == total:
            self._write("\r" + " " * self._drawn + "\r" if self._drawn else "")
        if done == total or now - self._begun < 10:
            return
        line = f"decoded {done:{len(str(total))}}/{total}"
        if done > self._first[0]:
            seconds = (now - self._first[1]) / (done - self._first[0])
            line += f"  {_clock(seconds * (total - done))} left"
        if sys.stderr is not None and sys.stderr.isatty():
            self._write(f"\r{line:{self._drawn}}")
            self._drawn = len(line)
        elif now - self._last[1] >= 10 and done - self._last[0] >= total / 20:
            self._write(line + "\n")
            self._last = done, now

    def _write(self, text: str) -> None:
        if sys.stderr is not None and text:
            with contextlib.suppress(BrokenPipeError):
                sys.stderr.write(text)
                sys.stderr.flush()


class Lines:
    """Progress display that prints about twenty lines per run."""

    def __init__(self) -> None:
        self.decoded = DecodingLine()

    def start(self, step: int, steps: int) -> None:
        self._steps, self._every = steps, max(1, steps // 20)
        self._first: tuple[int, float] | None = None

    def step(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        now = time.monotonic()
        self._first = self._first or (step, now)  # excludes compilation time
        if step % self._every and step != self._steps:
            return
        seconds = (now - self._first[1]) / max(step - self._first[0], 1)
        rate = "" if tokens_per_second is None else f"  {tokens_per_second:,.0f} tokens/s"
        left = _clock(seconds * (self._steps - step))
        width = len(str(self._steps))
        self.say(f"step {step:{width}}/{self._steps}  loss {loss:.4f}{rate}  {left} left")

    def say(self, line: str) -> None:
        show(line)

    def stop(self) -> None: ...


class Bar:
    """Progress bar with loss, tokens per second, and time left, or `Lines` in a notebook."""

    def __new__(cls) -> Any:
        """Create a bar or, in a notebook, `Lines`."""
        return super().__new__(cls) if isinstance(progress_for_notebook(), Silent) else Lines()

    def __init__(self) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[loss]}"),
            progress.TextColumn("[dim]{task.fields[rate]}"),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("[dim]left"),
            expand=True,
        )
        self._decoding = DecodingLine()

    def start(self, step: int, steps: int) -> None:
        self._task = self._bar.add_task("", total=steps, completed=step, loss="", rate="")
        self._steps, self._shown = steps, 0.0
        self._bar.start()

    def step(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        now = time.monotonic()
        # a step can take less time than drawing the bar
        if now - self._shown < 0.1 and step != self._steps:
            return
        self._shown = now
        rate = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, loss=f"loss {loss:.4f}", rate=rate)

    def decoded(self, done: int, total: int) -> None:
        self._bar.stop()  # frees the terminal
        self._decoding(done, total)

    def say(self, line: str) -> None:
        # a generated sample may contain brackets that rich would interpret as markup
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


def progress_for_output() -> Progress:
    """Return a `Bar` if standard output is a terminal, otherwise `Lines`."""
    return Bar() if sys.stdout is not None and sys.stdout.isatty() else Lines()


def progress_for_notebook() -> Progress:
    """Return `Lines` in a notebook, otherwise `Silent`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Lines() if hasattr(shell, "kernel") else Silent()


def show(line: str) -> None:
    """Print a line unless the reader has closed the pipe (as in `| head`)."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # otherwise, Python would flush standard output at exit and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
