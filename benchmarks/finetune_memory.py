"""Memory of fine-tuning, either of all parameters or of adapters on a frozen base.

python -m benchmarks.finetune_memory                              GPT-2 124M on this machine's CPU
python -m benchmarks.finetune_memory --target h200 --model llama3-8b     compiled, not run

Each row of the table is a training step that is compiled for the target, with the same batch size
and length, and with scanned and recomputed layers (--remat full). Nothing is run. `python -m
benchmarks.plan_audit` compares these figures with actual runs.
"""

from __future__ import annotations

import argparse
import dataclasses

from transformer_jax.config import LoraConfig, TrainConfig, preset
from transformer_jax.training.planning.hardware import find_hardware
from transformer_jax.training.planning.plan import Plan, plan_training

WAYS: dict[str, LoraConfig | None] = {
    "all parameters": None,
    "adapters, float32 base": LoraConfig(rank=16, targets="all-linear"),
    "adapters, bfloat16 base": LoraConfig(rank=16, targets="all-linear", base="bfloat16"),
    "adapters, int8 base": LoraConfig(rank=16, targets="all-linear", base="int8"),
    "adapters, int4 base": LoraConfig(rank=16, targets="all-linear", base="int4"),
}


def planned(name: str, target: str, batch_size: int, context: int, way: str) -> Plan:
    """Compile the training step for one way to fine-tune the model of a preset."""
    model = dataclasses.replace(
        preset(name), scan_layers=True, remat="full", dtype="bfloat16", dropout=0.0
    )
    config = TrainConfig(model=model, batch_size=batch_size, context=context, lora=WAYS[way])
    return plan_training(config, find_hardware(target))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    chosen = parser.parse_args()
    print(f"{chosen.model} on {chosen.target}, {chosen.batch_size} x {chosen.context} tokens, GiB")
    print("| trained | parameters | optimizer | gradients, activations | all | fits |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        plan = planned(chosen.model, chosen.target, chosen.batch_size, chosen.context, way)
        memory = plan.memory
        parts = [memory.parameters, memory.optimizer, memory.working, memory.total]
        sizes = " | ".join(f"{size / 2**30:.2f}" for size in parts)
        fits = "yes" if memory.total <= plan.hardware.memory else "no"
        compiled = "" if plan.compiled else " (not compiled: without activations)"
        print(f"| {way} | {sizes} | {fits}{compiled} |", flush=True)


if __name__ == "__main__":
    main()
