"""Programs for several devices, run in a separate process with virtual CPU devices."""

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
    """Run Python with a script, or with `-c` and a program, and return the JSON that it prints."""
    devices = f"--xla_force_host_platform_device_count={count}"
    environment = os.environ | {"XLA_FLAGS": devices} if optimise else quick_environment(devices)
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
