"""Peers for a machine without a network, in a folder for `PYTHONPATH`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PEERS = "tokamax==0.0.17", "jax-linear-attention==0.1.0", "dew-flash-attn-cu13==0.3.6"
NEEDED = (
    "annotated-types==0.8.0", "einshape==1.0", "immutabledict==4.3.1", "pydantic==2.14.4",
    "pydantic-core==2.50.5", "qwix==0.1.8", "typing-inspection==0.4.5",
)  # fmt: skip
PLATFORMS = "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014"
LIMIT_MIB = 60
DROPPED = ("dew_flash_attn/libdew_flash_attn.so", "**/*_test.py", "**/__pycache__/*")
CHANGED = {
    "dew_flash_attn/__init__.py": (  # FlashAttention-2, 337 MB, does not run on Hopper
        ('_library, _two = _load("libdew_flash_attn.so", "dew_flash_architectures")\n', ""),
        ("ARCHITECTURES = _two + _three", "ARCHITECTURES = _three"),
        ('((_library, "dew_flash_mha"), (_library3, ', "((_library3, "),
        ('"dew_flash3_mha"))', '"dew_flash3_mha"),)'),
    ),
    "tokamax/_src/benchmarking.py": (  # only to time kernels; needs 100 MB
        ("from xprof.cli.tools import get_kernel_stats_tool\n", "get_kernel_stats_tool = None\n"),
    ),
}
"""Files in which text is replaced, because a library that they load is left out."""


def carry(folder: Path) -> None:
    """Unpack the peers into `folder` for x86-64, CUDA 13 and Python 3.12, and leave out the rest.

    Raise `SystemExit` if the folder is larger than 60 MiB.
    """
    pip = (
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", "3.12",
        *(f"--platform={name}_x86_64" for name in PLATFORMS),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run((*pip, "--dest", wheels, *PEERS, *NEEDED), check=True)
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
    trim(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    if size > LIMIT_MIB:
        raise SystemExit(f"{folder} has {size:.1f} MiB; it must have at most {LIMIT_MIB}")
    print(f"{folder}: {size:.1f} MiB; there: PYTHONPATH={folder.name}")


def trim(folder: Path) -> None:
    """Remove the files that are not needed, and the lines that load them."""
    for pattern in DROPPED:
        for path in folder.glob(pattern):
            path.unlink()
    for name, changes in CHANGED.items():
        path = folder / name
        text = path.read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise SystemExit(f"{path} must contain {old.strip()!r} once")
            text = text.replace(old, new)
        path.write_text(text)
