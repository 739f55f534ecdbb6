"""Programs that need several devices, in a process of their own: a CPU cut into so many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.compilation import OLDER_LOOPS, has_older_loops

ROOT = Path(__file__).parents[2]


def on_devices(count: int, *command: str, optimise: bool = True) -> Any:
    """The JSON that Python prints, given a script or `-c` and a program.

    Without `optimise` XLA still passes over the whole program, and gathers and moves the same
    arrays: what it leaves out is how each device's loops are written.
    """
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
    }
    if not optimise:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
        if has_older_loops():
            older = (f"--{name}={str(value).lower()}" for name, value in OLDER_LOOPS.items())
            environment["XLA_FLAGS"] = " ".join([environment["XLA_FLAGS"], *older])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
