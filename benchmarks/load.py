"""How long does loading a checkpoint take, and what is its peak memory?

    python -m benchmarks.load --quick
    python -m benchmarks.load --out benchmarks/results/load_cpu.json

The checkpoint is a Llama model with random weights in f32 (1 GB), which
`transformer_jax.save_pretrained` writes once to a temporary folder. A new process loads it each
time with `load_pretrained`, with `transformers` (which reads through `safetensors.torch`), or with
only `safetensors.torch.load_file`, which maps the file and must touch every page here. The file is
always in the page cache. The time in seconds is that of loading, without imports. The memory is the
peak resident size of the process (VmHWM) minus the size before loading, relative to the size of the
file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import timing

QUESTION = "loading a checkpoint: seconds and peak memory"
OURS, TRANSFORMERS, RAW = "transformer_jax", "transformers", "safetensors.torch"
LIMIT = 1.1
"""Size in memory relative to the size of the file."""


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    if options.load is not None:
        print(json.dumps(_load(options.load, Path(options.folder))))
        return
    before = timing.environment()
    print(timing.headline(before))
    before["limits"] = timing.limits("float32")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        _write(model, 0.02 if options.quick else options.gigabytes)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        names = [name for name in (OURS, TRANSFORMERS, RAW) if _there(name)]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for index in range(2 if options.quick else options.rounds):
            for name in names if index % 2 == 0 else reversed(names):
                _touch(model)
                samples[name].append(_in_a_process(name, model))
    found = [_summary(name, taken, samples[OURS], size) for name, taken in samples.items()]
    for row in found:
        print(_report(row))
    if options.out is not None:
        timing.write(options.out, QUESTION, before, {"file_bytes": size, "contenders": found})


def _there(name: str) -> bool:
    """Whether a contender can be imported. The extra `parity` includes torch and transformers."""
    needs = {OURS: (), TRANSFORMERS: ("torch", "transformers"), RAW: ("torch",)}[name]
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{name}: not measured, {missing[0]} is not installed")
    return not missing


def _write(folder: Path, gigabytes: float) -> None:
    """Write a Llama model with approximately this size in gigabytes."""
    import numpy as np
    from flax.traverse_util import unflatten_dict

    from transformer_jax.config import ModelConfig
    from transformer_jax.pretrained.save import save_pretrained
    from transformer_jax.pretrained.tensors import parameter_shapes

    width = 64 * max(1, round(1024 / 64 * min(1.0, math.sqrt(gigabytes))))
    config = ModelConfig(
        vocab_size=32000, d_model=width, num_heads=width // 64, num_kv_heads=max(1, width // 128),
        num_layers=1, d_ff=64 * round(width * 8 / 3 / 64), max_len=2048, positions="rope",
        norm="rmsnorm", norm_eps=1e-6, activation="silu", glu=True, use_bias=False,
        tie_embeddings=False,
    )  # fmt: skip
    shapes = parameter_shapes(config)
    outside = 4 * sum(math.prod(s.shape) for p, s in shapes.items() if "block_" not in p)
    block = 4 * sum(math.prod(s.shape) for p, s in shapes.items() if "block_" in p)
    layers = max(1, round((gigabytes * 1e9 - outside) / block))
    config = dataclasses.replace(config, num_layers=layers)
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(config)
    drawn = {path: rng.standard_normal(leaf.shape, np.float32) for path, leaf in shapes.items()}
    params = unflatten_dict(drawn, sep="/")
    save_pretrained(folder, config, params, family="llama")


def _touch(folder: Path) -> None:
    """Read the files into the page cache."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as stream:
            while stream.read(1 << 24):
                pass


def _in_a_process(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.load", "--load", name, "--folder", str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if out.returncode:
        raise RuntimeError(f"{name}: {out.stderr.strip().splitlines()[-1]}")
    return json.loads(out.stdout.splitlines()[-1])


def _load(name: str, folder: Path) -> dict[str, float]:
    """Load once in this process. Return the time in seconds and the peak memory in bytes."""
    call = {OURS: _ours, TRANSFORMERS: _transformers, RAW: _raw}[name](folder)
    _forget_peak()
    resident, start = _memory("VmRSS"), time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    assert kept is not None
    return {"seconds": seconds, "peak_bytes": _memory("VmHWM") - resident}


def _ours(folder: Path) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from transformer_jax.pretrained.load import load_pretrained

    jnp.zeros(3).block_until_ready()
    return lambda: jax.block_until_ready(load_pretrained(folder))


def _transformers(folder: Path) -> Callable[[], Any]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def load() -> Any:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():  # otherwise, mapped files would cost nothing until they are used
            return model, [float(p.view(-1)[::1024].sum()) for p in model.parameters()]

    return load


def _raw(folder: Path) -> Callable[[], Any]:
    from safetensors.torch import load_file

    def load() -> Any:
        tensors = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        return tensors, [float(t.view(-1)[::1024].sum()) for f in tensors for t in f.values()]

    return load


def _forget_peak() -> None:
    """Reset the kernel's record of the peak resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def _summary(
    name: str, taken: list[dict[str, float]], ours: list[dict[str, float]], size: int
) -> dict[str, Any]:
    ratios = [t["seconds"] / o["seconds"] for t, o in zip(taken, ours, strict=True)]
    return {
        "name": name,
        "median_s": statistics.median(t["seconds"] for t in taken),
        "peak_of_file": statistics.median(t["peak_bytes"] for t in taken) / size,
        "ours_is_faster": statistics.median(ratios),
        "rounds": len(taken),
    }


def _report(row: dict[str, Any]) -> str:
    name, seconds, peak = row["name"], row["median_s"], row["peak_of_file"]
    text = f"{name:18} {seconds:7.3f} s   {peak:5.2f} x the file in memory"
    if name == OURS:
        return f"{text} ({'within' if peak <= LIMIT else 'above'} {LIMIT})"
    return f"{text}   ours is {row['ours_is_faster']:.2f} {timing.FASTER}"


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5, help="loads by each contender")
    parser.add_argument("--quick", action="store_true", help="20 MB, twice")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--load", choices=(OURS, TRANSFORMERS, RAW), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
