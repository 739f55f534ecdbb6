"""Keep compiled programs between the commands of a user, in the user's cache folder.

The folder is `$XDG_CACHE_HOME/transformer_jax`, else `~/.cache/transformer_jax`, and in it one for
each version of jaxlib and each kind of processor: a program for a CPU may have instructions that
another does not know, and a home folder may be seen from many.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import jaxlib

SWITCH = "TRANSFORMER_JAX_CACHE"
"""The environment variable that, set to 0, leaves nothing there."""
MOST_BYTES = 2**30
"""Bytes that a folder may hold when a command starts; the programs unused for longest go."""


def keep_programs(environment: Mapping[str, str] = os.environ) -> None:
    """Let JAX look for compiled programs in the user's cache folder, and leave new ones there.

    A folder that the user has given JAX stays the one, with all that the user has said of it.
    Where the folder cannot be used, a line on stderr says so, and programs are compiled as ever.
    """
    config: Any = jax.config  # whose settings have no annotations
    # The user's own settings of JAX come before ours.
    if environment.get(SWITCH) == "0" or not config.jax_enable_compilation_cache:
        return
    if config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_folder(environment)
        _prepared(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # JAX keeps only what takes a second by default; a command has many smaller programs.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environment:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _say_errors_once(folder)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where programs for this processor and this jaxlib are kept."""
    base = environment.get("XDG_CACHE_HOME")
    parent = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    # A program for a CPU may have instructions that another CPU does not know.
    wanted = "vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features"
    try:
        text = Path("/proc/cpuinfo").read_text()
        first = text.strip().split("\n\n")[0]
        fields = [line.split(":", 1) for line in first.splitlines() if ":" in line]
        said = sorted(f"{name.strip()}:{value}" for name, value in fields if name.strip() in wanted)
    except OSError:
        said = [platform.processor(), platform.node()]
    processor = f"{platform.machine()}-{hashlib.sha256(repr(said).encode()).hexdigest()[:12]}"
    return parent / "transformer_jax" / f"jaxlib-{jaxlib.__version__}-{processor}"


def _prepared(folder: Path) -> None:
    """Make the folder, with room in it; OSError where it cannot be written or is another user's."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")  # whose programs would run as ours
    # The only sure test of a folder that can be written is to write.
    with tempfile.TemporaryFile(dir=folder):
        pass
    entries = [(entry, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    size = sum(found.st_size for _, found in entries)
    # Times of access are not kept on all file systems.
    for entry, found in sorted(entries, key=lambda each: max(each[1].st_atime, each[1].st_mtime)):
        if size <= MOST_BYTES:
            return
        Path(entry.path).unlink(missing_ok=True)
        size -= found.st_size


def _say_errors_once(folder: Path) -> None:
    """Let JAX's warnings about programs that cannot be read or written be one line in all."""
    show, said = warnings.showwarning, list[str]()

    def show_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "persistent compilation cache" not in str(message):
            show(message, category, filename, lineno, file, line)
        elif not said:
            said.append(str(message))
            print(f"{folder}: {' '.join(str(message).split())[:200]}", file=sys.stderr)

    replaced: Any = show_once
    warnings.showwarning = replaced
