"""Comparison of the memory that a plan predicts with training steps on this CPU.

    python -m benchmarks.plan_audit --out benchmarks/results/plan_audit.json

There are six runs with different shapes, each in a separate process. The prediction is the total of
`plan_training` for this machine. The measurement starts after everything has been compiled. It is
the peak memory of the process while it creates the state and runs three steps, minus its memory
before (VmHWM, which is reset; Linux only).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import environment
from transformer_jax.config import Adafactor, AdamW, Lion, ModelConfig, Rope, TrainConfig, preset
from transformer_jax.config.tasks import MaskedTask, Seq2SeqTask

LLAMA = ModelConfig(
    vocab_size=32000, d_model=768, num_layers=8, num_heads=12, num_kv_heads=4, d_ff=2048,
    max_len=512, positions=Rope(), norm="rmsnorm", activation="silu", glu=True, use_bias=False,
    tie_embeddings=False,
)  # fmt: skip
RUNS = {
    "gpt2 124M, 2 x 256": TrainConfig(model=preset("gpt2", dropout=0.0), batch_size=2, context=256),
    "gpt2 124M scanned, remat, 4 x 512": TrainConfig(
        model=preset("gpt2", scan_layers=True, remat="full"), batch_size=4, context=512
    ),
    "llama 86M, 4 x 512": TrainConfig(model=LLAMA, batch_size=4),
    "llama 86M scanned, bfloat16, lion, 4 x 512": TrainConfig(
        model=replace(LLAMA, scan_layers=True, dtype="bfloat16"), batch_size=4, optimizer=Lion()
    ),
    "translator 93M, adafactor, 8 x 128": TrainConfig(
        model=preset("transformer-base", dropout=0.0), batch_size=8, context=128,
        optimizer=Adafactor(), accumulation=2, task=Seq2SeqTask(),
    ),
    "bert 110M, average, 4 x 256": TrainConfig(
        model=preset("bert-base", dropout=0.0, attention_dropout=0.0), batch_size=4, context=256,
        optimizer=AdamW(), ema_decay=0.99, task=MaskedTask(),
    ),
}  # fmt: skip


def status(name: str) -> int:
    """Return the value of a line in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def measure(name: str) -> dict[str, float]:
    """Return the predicted and the measured memory of a run in bytes."""
    from functools import partial

    import jax
    import numpy as np

    from transformer_jax.training.batch import Batch, batch_loss
    from transformer_jax.training.optimizers import make_optimizer
    from transformer_jax.training.planning.hardware import find_hardware
    from transformer_jax.training.planning.plan import plan_training
    from transformer_jax.training.step import init_state, make_train_step

    config = RUNS[name]
    plan = plan_training(config, find_hardware("cpu"))
    optimizer = make_optimizer(config)
    fresh = jax.jit(
        partial(init_state, config.model, optimizer, average=config.ema_decay is not None)
    )
    shape = config.accumulation, config.batch_size, config.sequence_len
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    source = tokens if config.model.kind == "encoder-decoder" else None
    batch = Batch(tokens, tokens, source=source)
    step = make_train_step(
        batch_loss(config.model, config.label_smoothing), optimizer, ema_decay=config.ema_decay
    )
    state = jax.eval_shape(fresh, np.uint32(0))
    make, take = fresh.lower(np.uint32(0)).compile(), step.lower(state, batch).compile()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    now = make(np.uint32(0))
    for _ in range(3):
        now, metrics = take(now, batch)
    loss = float(jax.block_until_ready(metrics.loss))
    assert np.isfinite(loss)
    return {"predicted": plan.total, "measured": status("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rows = {}
    print(f"{'run':44} {'predicted':>10} {'measured':>10}  predicted / measured")
    for name in RUNS:
        if arguments.only not in name:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan_audit", "--one", name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        rows[name] = found = json.loads(done.stdout.splitlines()[-1])
        ratio = found["predicted"] / found["measured"]
        sizes = f"{found['predicted'] / 2**20:8.0f} M {found['measured'] / 2**20:8.0f} M"
        print(f"{name:44} {sizes}  {ratio:.3f}", flush=True)
    if arguments.out:
        Path(arguments.out).write_text(
            json.dumps({"environment": environment(), "runs": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
