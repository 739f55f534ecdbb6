"""Persistent cache of compiled programs for the commands.

The cache folder is `$XDG_CACHE_HOME/transformer_jax` if the variable is set, and otherwise
`~/.cache/transformer_jax`. It has one subfolder for each version of jaxlib and each type of
processor. The type matters because a CPU program may use instructions that another CPU lacks, and
several machines may share a home folder.
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
"""Environment variable that turns the cache off if its value is 0."""
MOST_BYTES = 2**30
"""Maximum size of a cache folder in bytes. The least recently used programs are removed first."""


def keep_programs(environment: Mapping[str, str] = os.environ) -> None:
    """Configure JAX to keep compiled programs in the user's cache folder.

    A cache folder that the user has set for JAX takes precedence. If the cache folder cannot be
    used, a message is printed on stderr, and programs are compiled as usual.
    """
    config: Any = jax.config  # the settings have no annotations
    # The user's own JAX settings take precedence.
    if environment.get(SWITCH) == "0" or not config.jax_enable_compilation_cache:
        return
    if config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_folder(environment)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            # Programs in the folder run with the permissions of the user.
            raise PermissionError(f"{folder} belongs to another user")
        # Writing a file is the only reliable test of the permission.
        with tempfile.TemporaryFile(dir=folder):
            pass
        # Remove the programs that have not been used for the longest time. Some file systems do not
        # record access times.
        entries = [(entry, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
        size = sum(found.st_size for _, found in entries)
        entries.sort(key=lambda each: max(each[1].st_atime, each[1].st_mtime))
        while size > MOST_BYTES:
            entry, found = entries.pop(0)
            Path(entry.path).unlink(missing_ok=True)
            size -= found.st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        print(f"compiled programs are not cached: {error}", file=sys.stderr)
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # By default, JAX keeps only programs that take at least a second to compile, but commands have
    # many smaller programs.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environment:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    # Print only the first of JAX's warnings about unreadable or unwritable programs.
    show, printed = warnings.showwarning, list[str]()

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
        elif not printed:
            printed.append(str(message))
            print(f"{folder}: {' '.join(str(message).split())[:200]}", file=sys.stderr)

    replaced: Any = show_once
    warnings.showwarning = replaced


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for programs of this processor and this jaxlib."""
    base = environment.get("XDG_CACHE_HOME")
    parent = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    names = "vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features"
    try:
        text = Path("/proc/cpuinfo").read_text()
        first = text.strip().split("\n\n")[0]
        fields = [line.split(":", 1) for line in first.splitlines() if ":" in line]
        cpu = sorted(f"{name.strip()}:{value}" for name, value in fields if name.strip() in names)
    except OSError:
        cpu = [platform.processor(), platform.node()]
    processor = f"{platform.machine()}-{hashlib.sha256(repr(cpu).encode()).hexdigest()[:12]}"
    return parent / "transformer_jax" / f"jaxlib-{jaxlib.__version__}-{processor}"
