"""Script of test_meshes.py: fine-tuning with adapters and by preferences on four devices."""

import dataclasses
import json
import tempfile
from pathlib import Path

from transformer_jax.config import LoraConfig, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.config.tasks import LanguageTask, PreferenceTask
from transformer_jax.loading import load_run
from transformer_jax.training.loop import fit

LINES = ["to be", "or not", "that is", "the question"]
MESHES = {
    "one": None,
    "data": MeshConfig(data=4),
    "fsdp": MeshConfig(data=2, fsdp=2),
    "tensor": MeshConfig(fsdp=2, tensor=2),
}
WAYS = {
    "adapters": (
        LanguageTask(documents="lines"), LoraConfig(rank=3, dropout=0.2, targets="all-linear")
    ),
    "adapters, preferences": (PreferenceTask(), LoraConfig(rank=3)),
    "preferences": (PreferenceTask(), None),
}  # fmt: skip


def main() -> None:
    """Train with every method on every mesh from one base, and print the losses."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("".join(f"{a} {b}\n" for a in LINES for b in LINES) * 4)
    pairs = [
        json.dumps({"prompt": f"{a} {b}", "chosen": b[0] * 3, "rejected": a[-1] * 2})
        for a in LINES for b in LINES
    ]  # fmt: skip
    (folder / "pairs.jsonl").write_text("\n".join(pairs * 2))
    model = ModelConfig(d_model=32, num_layers=2, num_heads=4, max_len=32)
    base = TrainConfig(
        model=model, task=LanguageTask(documents="lines"), data=str(folder / "text.txt"),
        out=str(folder / "base"), steps=6, batch_size=8, eval_every=6, sample_tokens=0,
        warmup_steps=1, mesh=MeshConfig(data=4),
    )  # fmt: skip
    fit(base)
    found = {}
    for name, mesh in MESHES.items():
        for way, (task, lora) in WAYS.items():
            out = folder / f"{name} {way}"
            data = "pairs.jsonl" if isinstance(task, PreferenceTask) else "text.txt"
            start = fine_tuning(load_run(base.out).config, base.out, task)
            config = dataclasses.replace(
                start, lora=lora, mesh=mesh, out=str(out), data=str(folder / data), steps=5,
                batch_size=8, eval_every=5, log_every=1, sample_tokens=0, warmup_steps=1,
                learning_rate=5e-3, context=32,
            )  # fmt: skip
            result = fit(config)
            lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            found[f"{name}; {way}"] = [*(line["loss"] for line in lines), result.val_loss]
    print(json.dumps(found))


main()
