"""Use the installed package: modules, a training step, a kernel, its commands, a notebook.

    cd SOMEWHERE_ELSE && python -I CHECKOUT/.ci/installed.py CHECKOUT

Run with the interpreter of an environment that has the wheel and nothing of the checkout.
"""

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from transformer_jax.config import TrainConfig
from transformer_jax.kernels import Target, cpu, using
from transformer_jax.training import (
    batch_loss,
    init_state,
    make_optimizer,
    make_train_step,
)
from transformer_jax.training.step import windows

EXTRA = ("grain", "huggingface_hub", "jinja2")
"""Packages of the extras `data` and `hf`: modules that need one are imported when they are used."""


def main(checkout: Path) -> None:
    """Raise where something is missing from the wheel or does not run."""
    package = Path(tj.__file__).parent
    assert package.is_relative_to(sys.prefix) and not package.is_relative_to(checkout), package
    check_modules(package, checkout)
    take_a_step()
    run_a_kernel()
    train_and_write()
    run_a_notebook(checkout)


def check_modules(package: Path, checkout: Path) -> None:
    """Import every Python module; the wheel has all that the checkout has."""
    kernels = {Path("kernels") / path.relative_to(checkout / "kernels")
               for path in (checkout / "kernels").rglob("*.py")}  # fmt: skip
    root = checkout / "transformer_jax"
    wanted = {path.relative_to(root) for path in root.rglob("*.py")} | kernels
    there = {path.relative_to(package) for path in package.rglob("*.py")}
    assert len(there) > 80 and there == wanted, sorted(map(str, there ^ wanted))
    assert (package / "py.typed").exists()
    for module in pkgutil.walk_packages([str(package)], "transformer_jax."):
        # a program, and a library that XLA calls: neither is a module to import
        if not module.name.endswith(("__main__", "_native")):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in EXTRA:
                    raise
    print(f"{len(there)} modules of {package}")


def take_a_step() -> None:
    """Train a tiny model for two steps on one batch, whose loss falls."""
    config = TrainConfig(
        model=tj.preset("tiny", vocab_size=61), learning_rate=1e-2, warmup_steps=0, steps=10
    )
    optimizer = make_optimizer(config)
    state = init_state(config.model, optimizer, 0)
    step = make_train_step(batch_loss(config.model), optimizer)
    corpus = jnp.arange(400) % 61
    batch = windows(corpus, jnp.array([[0, 100, 200]]), 16)  # [1, B, T]: one micro-batch
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0], losses
    print("losses of three training steps:", losses)


def run_a_kernel() -> None:
    """Hold a TPU's kernel, in its interpreter, and a CPU's against the materialised scores."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 200, 2, 32))
    mask = tj.Causal() & tj.Window(50)
    with using(Target("tpu", interpret=True)):
        fused = tj.dot_product_attention(q, k, v, mask=mask, implementation="pallas")
    plain = tj.dot_product_attention(q, k, v, mask=mask, implementation="xla")
    error = float(jnp.abs(fused - plain).max())
    assert error < 1e-5, error
    print("largest error of the TPU kernel in its interpreter:", error)
    if shutil.which("c++") is None:
        print("no C++ compiler: the kernels of a CPU are not in the wheel")
        return
    native = tj.dot_product_attention(q, k, v, mask=mask, implementation="native")
    error = float(jnp.abs(native - plain).max())
    assert error < 1e-5, error
    print("largest error of the kernel of a CPU:", error, "by", cpu.instructions())


def train_and_write() -> None:
    """Train a run by the installed command, and write with it, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text("one potato, two potato, three potato, four.\n" * 40)
        train = "train --data text.txt --out run --preset tiny --steps 3 --batch-size 2"
        for command in (train, "generate --model run --prompt one --num-tokens 5"):
            call = [sys.executable, "-I", "-m", "transformer_jax", *command.split()]
            done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (command, done.stderr[-2000:])
    print("trained a run by its command, which wrote:", repr(done.stdout.strip()))


def run_a_notebook(checkout: Path) -> None:
    """Run the cells of a notebook one after the other; the first one installs the package."""
    path = checkout / "docs/notebooks/attention_in_ten_minutes.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells[1:]:
        exec("".join(cell["source"]), names)
    print(f"{path.name}: {len(cells) - 1} cells ran")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
