"""Programs that need several devices, in a process of their own: a CPU cut into so many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.compilation import quick_environment

ROOT = Path(__file__).parents[2]


def on_devices(count: int, *command: str, optimise: bool = True) -> Any:
    """The JSON that Python prints, given a script or `-c` and a program."""
    devices = f"--xla_force_host_platform_device_count={count}"
    environment = os.environ | {"XLA_FLAGS": devices} if optimise else quick_environment(devices)
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
