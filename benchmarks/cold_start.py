"""How long does a new process take to produce its first result?

    python -m benchmarks.cold_start --quick
    python -m benchmarks.cold_start --out benchmarks/results/cold_start.json

Each sample is a separate process whose files are in the page cache. Compiled programs are kept only
for a "second start". The process itself measures the seconds for `import`, `init_params`, and the
first token, either from its first line or around one call. The first step of train.py is timed from
the start of the command to the line in metrics.jsonl. The peers do the same in eager torch and
transformers, which compile nothing, and the contenders alternate. For the first step, the peers use
a model of the same size as train.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import timing

QUESTION = "cold start: seconds to a first result in a fresh process"
OURS, TORCH = "transformer_jax", "torch"
TRAIN_PY = Path(__file__).parents[1] / "train.py"
STEP = "train.py"
"""Contender that is not Python code but the command `train.py` up to its first step."""

SMALL = "vocab_size=50257, max_len=1024, d_model=64, num_heads=4, num_layers=2, d_ff=256"
TORCH_SMALL = "vocab_size=50257, n_positions=1024, n_embd=64, n_head=4, n_layer=2"
INIT = """
import jax, transformer_jax as tj
config, key = {config}, jax.block_until_ready(jax.random.key(0))
start = now()
jax.block_until_ready(tj.init_params(config, key))
"""
TORCH_INIT = """
from transformers import GPT2Config, GPT2LMHeadModel
start = now()
GPT2LMHeadModel(GPT2Config({config}))
"""
TOKEN = """
import jax, numpy as np, transformer_jax as tj
{cache}
config = tj.preset("gpt2")
params = tj.init_params(config, jax.random.key(0))
state = tj.init_cache(config, 1, 128)
prompt = np.arange(16, dtype=np.int32)[None]
np.asarray(tj.generate(tj.make_step(tj.build(config)), params, prompt, state, num_tokens=1).tokens)
"""
TORCH_TOKEN = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model, prompt = GPT2LMHeadModel(GPT2Config()).eval(), torch.arange(16)[None]
with torch.inference_mode():
    model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
"""
TORCH_STEP = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=103, n_positions=64, n_embd=128, n_head=4, n_layer=4))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(103, (12, 64))
model(tokens, labels=tokens).loss.backward()
optimizer.step()
"""
KEEP = "from transformer_jax.cli.programs import keep_programs; keep_programs()"


@dataclass(frozen=True)
class Case:
    """Task that is timed for this library and, if there is one, for an equivalent in torch."""

    name: str
    ours: str
    """Python code, or STEP. The code can set `start`, the beginning of the measured time."""
    torch: str | None
    goal: float | None
    """Expected time in seconds on two otherwise idle cores."""
    keeps: bool = False
    """Whether each sample uses the programs that an earlier sample compiled."""


IMPORT, TORCH_IMPORT = "import transformer_jax", "from transformers import GPT2LMHeadModel"
SMALL_INIT = INIT.format(config=f"tj.ModelConfig({SMALL})")
LARGE_INIT = INIT.format(config='tj.preset("gpt2")')
UNTIL_STEP, UNTIL_TOKEN = "train.py until its first step", "GPT-2 until its first token"
CASES = (
    Case("import", IMPORT, TORCH_IMPORT, 1),
    Case("init of 2 layers", SMALL_INIT, TORCH_INIT.format(config=TORCH_SMALL), 1),
    Case("init of GPT-2 124M", LARGE_INIT, TORCH_INIT.format(config=""), 3),
    Case(f"{UNTIL_STEP}, first start", STEP, TORCH_STEP, 8),
    Case(f"{UNTIL_STEP}, second start", STEP, TORCH_STEP, None, keeps=True),
    Case(f"{UNTIL_TOKEN}, first start", TOKEN.format(cache=""), TORCH_TOKEN, 6),
    Case(f"{UNTIL_TOKEN}, second start", TOKEN.format(cache=KEEP), TORCH_TOKEN, None, keeps=True),
)


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    before = timing.environment()
    print(timing.headline(before), flush=True)
    peer = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if not peer:
        print("torch: not measured, torch or transformers is not installed")
    found: list[dict[str, Any]] = []
    for case in CASES:
        if options.only in case.name:
            row = _measured(case, peer, 1 if options.quick else options.repeats, options)
            found.append(row | {name: before[name] for name in ("time", "commit")})
            print(_report(found[-1]), flush=True)
            if options.out is not None:  # after each case, because a run may be interrupted
                timing.write(options.out, QUESTION, before, _joined(options, found))


def _joined(options: argparse.Namespace, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results, including those of other cases in the file if `--add` is set."""
    if not (options.add and options.out.exists()):
        return found
    names = {row["name"] for row in found}
    old = json.loads(options.out.read_text())["results"]
    rows = {row["name"]: row for row in [*old, *found] if row["name"] not in names or row in found}
    return [rows[case.name] for case in CASES if case.name in rows]


def _measured(case: Case, peer: bool, repeats: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds for each contender, after one sample that fills the page cache."""
    contenders = {OURS: case.ours}
    if peer and case.torch is not None:
        contenders[TORCH] = case.torch
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as kept:
        if not options.quick:
            for code in contenders.values():
                _sample(code, Path(kept))
        elif case.keeps:
            _sample(case.ours, Path(kept))
        begin = time.monotonic()
        for index in range(repeats):
            if index >= 3 and time.monotonic() - begin > options.seconds:
                break
            for name in contenders if index % 2 == 0 else reversed(contenders):
                with tempfile.TemporaryDirectory() as fresh:
                    cache = Path(kept if case.keeps else fresh)
                    samples[name].append(_sample(contenders[name], cache))
    ours = samples[OURS]
    row: dict[str, Any] = {"name": case.name, "goal_s": case.goal, "contenders": []}
    for name, taken in samples.items():
        ratios = [peers / own for own, peers in zip(ours, taken, strict=True)]
        summary = timing.Timing(tuple(taken), taken[0]).summary()
        del summary["first_call_s"]
        row["contenders"].append(
            {"name": name, **summary, "ours_is_faster": statistics.median(ratios)}
        )
    return row


def _sample(code: str, cache: Path) -> float:
    """Return the seconds for one new process, whose compiled programs are stored in a folder."""
    unset = {"JAX_COMPILATION_CACHE_DIR", "TRANSFORMER_JAX_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    if code == STEP:
        return _first_step(environment)
    timed = f"from time import perf_counter as now\nstart = now()\n{code}\nprint(now() - start)"
    out = subprocess.run(
        [sys.executable, "-c", timed], capture_output=True, text=True, env=environment, check=False
    )
    if out.returncode:
        raise RuntimeError(out.stderr.strip().splitlines()[-1])
    return float(out.stdout.splitlines()[-1])


def _first_step(environment: dict[str, str]) -> float:
    """Return the seconds from the start of `python train.py` to the line for its first step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, str(TRAIN_PY), "--out", str(out)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        ) as process:  # fmt: skip
            metrics = out / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    assert process.stderr is not None
                    raise RuntimeError(process.stderr.read().decode())
                time.sleep(0.005)
            seconds = time.perf_counter() - start
            process.kill()
    return seconds


def _report(row: dict[str, Any]) -> str:
    ours = row["contenders"][0]["median_s"]
    goal = row["goal_s"]
    text = f"{row['name']:44} {ours:6.2f} s"
    if goal is not None:
        text += f" ({'within' if ours <= goal else 'above'} {goal:g})"
    for peer in row["contenders"][1:]:
        ratio = peer["ours_is_faster"]
        text += f"   {peer['name']} {peer['median_s']:6.2f} s, ours is {ratio:.2f} {timing.FASTER}"
    return text


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--repeats", type=int, default=7, help="processes of each contender")
    parser.add_argument("--seconds", type=float, default=300, help="about the longest of one case")
    parser.add_argument("--quick", action="store_true", help="one process of each")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--add", action="store_true", help="keep the other cases of that file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
