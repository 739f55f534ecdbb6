"""Check types with mypy, of `kernels/` as `transformer_jax.kernels`: python .ci/check_types.py

mypy looks for the modules of a package in its folder alone: a copy is checked, with all in it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

with tempfile.TemporaryDirectory() as folder:
    for name in ("transformer_jax", "train.py", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, Path(folder, name)
        )
    shutil.copytree(ROOT / "kernels", Path(folder, "transformer_jax", "kernels"))
    cache = ROOT / ".mypy_cache"
    sys.exit(subprocess.call([sys.executable, "-m", "mypy", "--cache-dir", cache], cwd=folder))
