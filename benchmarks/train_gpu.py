"""How fast does one GPU train GPT-2 124M and a Llama with 1.3 billion parameters in bfloat16?

    python -m benchmarks.train_gpu --out benchmarks/results/train_gpu.json
    JAX_PLATFORMS=cpu python -m benchmarks.train_gpu --quick

A step has 524,288 (GPT-2) or 131,072 (Llama) random tokens in accumulated micro-batches. Our
contender is `make_train_step` with each attention implementation that runs. The torch contender is
compiled, with fused attention and a fused optimizer under autocast. Utilization counts only
products, with causal pairs once, relative to the published peak of the chip. The goals on an H200
are 1.25 times the speed of torch, 620,000 tokens per second for GPT-2, and a utilization of 58 %
for the Llama.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.peers import Absent
from benchmarks.train_step import RECIPE, _torch_model
from transformer_jax.config import ModelConfig, Rope, preset
from transformer_jax.kernels import Target, target
from transformer_jax.kernels.chips import FASTEST
from transformer_jax.models.factory import num_params
from transformer_jax.models.flops import training_flops
from transformer_jax.training.planning.peaks import chip_of

QUESTION = "training on one GPU: tokens a second and utilisation"


@dataclass(frozen=True)
class Case:
    """Model with the rows and micro-batches of a step."""

    name: str
    model: ModelConfig
    rows: int
    micro_batches: int
    torch: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.micro_batches * self.model.max_len


GPT2 = preset(
    "gpt2", dropout=0.0, attention_dropout=0.0, use_bias=False, dtype="bfloat16", vocab_size=50304
)
LLAMA = ModelConfig(
    vocab_size=32000, d_model=2048, num_layers=24, num_heads=16, d_ff=5504, max_len=2048,
    positions=Rope(), norm="rmsnorm", activation="silu", glu=True, use_bias=False,
    tie_embeddings=False, dtype="bfloat16", scan_layers=True, remat="dots",
)  # fmt: skip
CASES = (
    Case("GPT-2 124M, 524,288 tokens", GPT2, 32, 16, True),
    Case("Llama 1.3B, 131,072 tokens", LLAMA, 8, 8, False),
)
SMALL = replace(GPT2, d_model=64, num_layers=2, num_heads=2, max_len=64, vocab_size=512)
QUICK = (Case("quick", SMALL, 4, 2, True),)


def tokens(case: Case) -> np.ndarray:  # i32[A, B, T + 1]
    shape = case.micro_batches, case.rows, case.model.max_len + 1
    return np.random.default_rng(0).integers(0, case.model.vocab_size, shape, dtype=np.int32)


def ours(case: Case, implementation: str | None) -> Callable[[], float]:
    """Return a training step of this library with a given attention implementation."""
    from transformer_jax import training

    model = replace(case.model, implementation=implementation)
    text = jnp.asarray(tokens(case))
    batch = training.Batch(text[..., :-1], text[..., 1:])
    optimizer = training.make_optimizer(RECIPE)
    state = training.init_state(model, optimizer, 0)
    step = training.make_train_step(training.batch_loss(model), optimizer)

    def call() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics.loss)

    return call


def torch_compiled(case: Case) -> Callable[[], float]:
    """Return a compiled training step of the same model in torch, with bfloat16 autocast."""
    model, device = _torch_model(case.model)
    import torch
    from torch.nn import functional as F

    torch._dynamo.reset()

    def loss_of(rows: Any) -> Any:
        logits = model(rows[:, :-1].contiguous())
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].reshape(-1))

    compiled = torch.compile(loss_of, dynamic=False)
    text = torch.from_numpy(tokens(case).astype(np.int64)).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    own = RECIPE.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": own.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=RECIPE.learning_rate,
        betas=(own.beta1, own.beta2),
        fused=True,
    )

    def call() -> float:
        total = torch.zeros((), device=device)
        for rows in text:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(rows)
            (loss / len(text)).backward()
            total += loss.detach() / len(text)
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return call


def contenders(case: Case) -> dict[str, Callable[[], Callable[[], float]]]:
    where = target()
    chosen = (
        isinstance(where, Target) and (where.name, where.chip) in FASTEST
    )  # None chooses "pallas"
    names = (None, "cudnn") if chosen else (None, "cudnn", "pallas")
    found: dict[str, Callable[[], Callable[[], float]]] = {
        f"ours, {name or 'as it chooses'}": lambda name=name: ours(case, name) for name in names
    }
    if case.torch:
        found["torch.compile"] = lambda: torch_compiled(case)
    return found


def measure(case: Case, seconds: float, results: dict[str, Any]) -> Iterator[None]:
    """Store the step time of each contender. Contenders run one after another to save memory."""
    per_row = training_flops(case.model, case.model.max_len)
    flops = case.tokens / case.model.max_len * per_row
    chip = chip_of(jax.devices()[0].device_kind)
    for name, build in contenders(case).items():
        try:
            step = build()
            first = step()
            expected = float(np.log(case.model.vocab_size))
            if not abs(first - expected) < 0.5:
                raise AssertionError(f"first loss {first:.3f}, expected about {expected:.3f}")
            step()
            samples, begun = [], time.perf_counter()
            while len(samples) < 3 or time.perf_counter() - begun < seconds:
                start = time.perf_counter()
                last = step()
                samples.append(time.perf_counter() - start)
            if not last < first:
                raise AssertionError(f"does not train: {first:.4f}, then {last:.4f}")
        except Exception as error:
            reason = str(error) if isinstance(error, Absent) else timing.brief(error)
            results[name] = {"absent": reason}
            yield
            continue
        median = statistics.median(samples)
        results[name] = {
            "median_s": median,
            "samples_s": samples,
            "tokens_per_s": case.tokens / median,
            "utilisation": None if chip is None else flops / median / chip.flops,
            "losses": [first, last],
        }
        del step
        yield


def report(case: Case, results: dict[str, Any]) -> str:
    peer = results.get("torch.compile", {}).get("median_s")
    rows = []
    for name, found in results.items():
        if "absent" in found:
            continue
        used = found["utilisation"]
        rows.append(
            (
                name,
                f"{1e3 * found['median_s']:.1f}",
                f"{found['tokens_per_s']:,.0f}",
                "not known" if used is None else f"{100 * used:.1f} %",
                "" if peer is None else f"{peer / found['median_s']:.2f}x",
            )
        )
    size = f"{num_params(case.model):,} parameters, {case.tokens:,} tokens a step"
    lines = [f"\n{case.name}: {size}"]
    lines.append(timing.table(("", "ms", "tokens/s", "of the peak", "against torch"), rows))
    lines += [f"{name}: {found['absent']}" for name, found in results.items() if "absent" in found]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all runs")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=30.0, help="about, for each contender")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(argv)
    before, results = timing.environment(), {}
    print(timing.headline(before))
    before["limits"] = timing.limits("float32")
    for case in QUICK if options.quick else CASES:
        if options.only in case.name:
            found = results[case.name] = {}
            for _ in measure(case, 0.0 if options.quick else options.seconds, found):
                if options.out is not None:  # after each contender, in case the run is interrupted
                    timing.write(options.out, QUESTION, before, results)
            print(report(case, found), flush=True)


if __name__ == "__main__":
    main()
