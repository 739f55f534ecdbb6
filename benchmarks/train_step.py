"""How fast is a training step compared with its peers?

    python -m benchmarks.train_step --quick
    python -m benchmarks.train_step --out benchmarks/results/train_step_cpu.json

Each contender runs AdamW steps of the same GPT model (pre-norm, tied embeddings, no biases, no
dropout, gradient clipping) on the same random tokens. The contenders are this library as in
train.py; flax modules with optax; and plain torch, both eager and compiled, with fused attention
and a fused optimizer. The first losses must agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import specs, timing
from benchmarks.peers import Absent, torch_and_device
from benchmarks.specs import TrainCase
from benchmarks.timing import Contender
from transformer_jax.config import ModelConfig, TrainConfig

OURS = "ours"
QUESTION = "training: seconds per optimizer step of ours and its peers"
RECIPE = TrainConfig(warmup_steps=0, learning_rate=3e-4)
"""Learning rate, betas, weight decay, and gradient clipping of every contender."""


Step = Callable[[], float]
"""Function that takes one optimizer step and returns the loss before it."""


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before))
    before["limits"] = timing.limits("float32", clock)
    limit = before["limits"]["matmul_flops_per_s"]
    print(f"one float32 matmul: {limit / 1e9:.0f} GFLOP/s")
    found = []
    for case in specs.TRAIN:
        if _selected(case, options):
            found.append(measure(case, options, clock))
            print(_report(found[-1], limit), flush=True)
            if options.out is not None:  # after each case, because a run may be interrupted
                results = {"matmul_flops_per_s": limit, "cases": found}
                timing.write(options.out, QUESTION, before, results)


def measure(
    case: TrainCase, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return timings, tokens per second, and ratios for one case."""
    builders: dict[str, Callable[[TrainCase], Step]] = {
        OURS: ours,
        "flax": flax_modules,
        "torch": torch_eager,
        "torch.compile": torch_compiled,
    }
    contenders, losses, absent = [], {}, {}
    for name, build in builders.items():
        try:
            step = build(case)
            values = [step() for _ in range(3)]
            expected = np.log(case.model.vocab_size)
            if not abs(values[0] - expected) < 0.1 or not values[-1] < values[0]:
                raise AssertionError(f"does not train: losses {values} from {expected:.2f}")
            losses[name] = values
            contenders.append(Contender(name, step))
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = timing.brief(error)
    taken = timing.interleave(
        contenders, rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    return {
        "case": case.name,
        "tokens": case.tokens,
        "matmul_flops": case.matmul_flops(),
        "timings": {name: t.summary() for name, t in taken.items()},
        "tokens_per_s": {name: case.tokens / t.median for name, t in taken.items()},
        "speedup_of_ours": {
            name: timing.speedup(taken[OURS], t) for name, t in taken.items() if name != OURS
        },
        "losses": losses,
        "absent": absent,
    }


def tokens(case: TrainCase) -> np.ndarray:  # i32[B, T + 1]
    """Return random tokens, equal for all contenders, so that none gains from repetition."""
    shape = (case.batch, case.model.max_len + 1)
    return np.random.default_rng(0).integers(0, case.model.vocab_size, shape, dtype=np.int32)


def ours(case: TrainCase) -> Step:
    """Return this library's step, as train.py runs it."""
    from transformer_jax import training

    text = jnp.asarray(tokens(case))
    batch = training.Batch(text[None, :, :-1], text[None, :, 1:])
    optimizer = training.make_optimizer(RECIPE)
    state = training.init_state(case.model, optimizer, 0)
    step = training.make_train_step(training.batch_loss(case.model), optimizer)

    def call() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics.loss)

    return call


def flax_modules(case: TrainCase) -> Step:
    """Return a step of the same model, built from flax.linen modules as in their documentation."""
    import flax.linen as nn

    cfg = case.model
    normal = nn.initializers.normal(cfg.init_std)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            norm = partial(nn.LayerNorm, epsilon=cfg.norm_eps, use_bias=False)
            dense = partial(nn.Dense, use_bias=False, kernel_init=normal)
            attention = nn.MultiHeadDotProductAttention(
                cfg.num_heads, use_bias=False, deterministic=True, kernel_init=normal
            )
            x = x + attention(norm()(x), mask=mask)
            hidden = nn.gelu(dense(cfg.ff_dim)(norm()(x)))
            return x + dense(cfg.d_model)(hidden)

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, text: jax.Array) -> jax.Array:
            embed = nn.Embed(cfg.vocab_size, cfg.d_model, embedding_init=normal)
            places = nn.Embed(cfg.max_len, cfg.d_model, embedding_init=normal)
            x = embed(text) + places(jnp.arange(cfg.max_len))[None]
            mask = nn.make_causal_mask(text)
            for _ in range(cfg.num_layers):
                x = Block()(x, mask)
            x = nn.LayerNorm(epsilon=cfg.norm_eps, use_bias=False)(x)
            return embed.attend(x)

    model = GPT()
    text = jnp.asarray(tokens(case))
    params = jax.jit(model.init)(jax.random.key(0), text[:, :-1])
    _check_size(cfg, sum(leaf.size for leaf in jax.tree.leaves(params)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(RECIPE.clip_norm),
        optax.adamw(
            RECIPE.learning_rate,
            b1=RECIPE.optimizer.beta1,
            b2=RECIPE.optimizer.beta2,
            weight_decay=RECIPE.optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )

    def loss(params: Any, text: jax.Array) -> jax.Array:
        logits = model.apply(params, text[:, :-1])
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return entropy.mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, text: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, text)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = optimizer.init(params)

    def call() -> float:
        nonlocal params, opt_state
        params, opt_state, value = step(params, opt_state, text)
        return float(value)

    return call


def torch_eager(case: TrainCase) -> Step:
    """Return a step with plain modules, fused attention, and the fused optimizer."""
    model, device = _torch_model(case.model)
    return _torch_step(case, model, model, device)


def torch_compiled(case: TrainCase) -> Step:
    """Return the same step with torch.compile, which needs a C++ compiler."""
    model, device = _torch_model(case.model)
    import torch

    torch._dynamo.reset()  # otherwise, the second size would be compiled for all sizes
    step = _torch_step(case, model, torch.compile(model, dynamic=False), device)

    def call() -> float:
        try:
            return step()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise Absent(" ".join(str(error).split())[:200]) from error

    return call


def _torch_model(cfg: ModelConfig) -> tuple[Any, str]:
    torch, device = torch_and_device()
    from torch import nn
    from torch.nn import functional as F

    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in XLA
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = cfg.d_model
            self.norm_1 = nn.LayerNorm(width, eps=cfg.norm_eps, bias=False)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.norm_2 = nn.LayerNorm(width, eps=cfg.norm_eps, bias=False)
            self.up = nn.Linear(width, cfg.ff_dim, bias=False)
            self.down = nn.Linear(cfg.ff_dim, width, bias=False)

        def forward(self, x: Any) -> Any:
            rows, length, width = x.shape
            q, k, v = (
                part.view(rows, length, cfg.num_heads, -1).transpose(1, 2)
                for part in self.qkv(self.norm_1(x)).split(width, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
            return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
            self.places = nn.Embedding(cfg.max_len, cfg.d_model)
            self.blocks = nn.ModuleList([Block() for _ in range(cfg.num_layers)])
            self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps, bias=False)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, 0.0, cfg.init_std)

        def forward(self, text: Any) -> Any:
            x = self.embed(text) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return F.linear(self.norm(x), self.embed.weight)

    model = GPT().to(device)
    _check_size(cfg, sum(parameter.numel() for parameter in model.parameters()))
    return model, device


def _torch_step(case: TrainCase, model: Any, forward: Callable[..., Any], device: str) -> Step:
    import torch
    from torch.nn import functional as F

    text = torch.from_numpy(tokens(case).astype(np.int64)).to(device)
    inputs, labels = text[:, :-1].contiguous(), text[:, 1:].reshape(-1)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": RECIPE.optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=RECIPE.learning_rate,
        betas=(RECIPE.optimizer.beta1, RECIPE.optimizer.beta2),
        fused=True,
    )

    def call() -> float:
        logits = forward(inputs)
        loss = F.cross_entropy(logits.reshape(-1, case.model.vocab_size), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return call


def _check_size(cfg: ModelConfig, found: int) -> None:
    """Raise an error if the model of a peer has a different number of parameters."""
    from transformer_jax.models.factory import num_params

    if found != num_params(cfg):
        raise AssertionError(f"the peer has {found} parameters, ours {num_params(cfg)}")


def _report(found: dict[str, Any], limit: float) -> str:
    timings, ratios = found["timings"], found["speedup_of_ours"]
    share = found["matmul_flops"] / limit / timings[OURS]["median_s"]
    rows = []
    for name, taken in timings.items():
        low, high = taken["quartiles_s"]
        rows.append(
            (
                name,
                f"{1e3 * taken['median_s']:.1f}",
                f"{1e3 * low:.1f}-{1e3 * high:.1f}",
                f"{found['tokens_per_s'][name]:,.0f}",
                f"{ratios[name]:.2f}" if name in ratios else "",
                f"{found['losses'][name][0]:.3f}",
            )
        )
    header = ("", "ms, median", "middle half", "tokens/s", f"ours is {timing.FASTER}", "first loss")
    lines = [
        f"\n{found['case']}: {found['tokens']} tokens a step, "
        f"{share:.2f} of the time of its products at the matmul's rate",
        timing.table(header, rows),
        *(f"{name}: {reason}" for name, reason in found["absent"].items()),
    ]
    return "\n".join(lines)


def _selected(case: TrainCase, options: argparse.Namespace) -> bool:
    if options.only not in case.name:
        return False
    if options.quick:
        return "quick" in case.tags
    return options.full or "full" not in case.tags


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the small model, a few rounds")
    add("--full", action="store_true", help="batch 64 too")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--repeats", type=int, default=None, help="rounds (20, or 3 with --quick)")
    add("--seconds", type=float, default=120.0, help="about the longest one case may take")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, default=None, help="JSON to write")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 20
    return options


if __name__ == "__main__":
    main()
