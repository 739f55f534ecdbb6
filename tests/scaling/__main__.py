"""Fill the table on eight devices of a CPU: `python -m tests.scaling [--write PAGE]`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = " ".join(flags)

from tests.scaling.table import main  # JAX reads the flags when it is imported

main()
