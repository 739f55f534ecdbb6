"""Comparison of scanned and sharded training, on meshes of eight devices, with one device.

    python -m tests.scaling                                      # prints the table
    python -m tests.scaling --results cells.jsonl --only task    # one part at a time
    python -m tests.scaling --results cells.jsonl --write docs/reference/scaling_matrix.md

Cells that are already in the results file are not rerun. The page omits rows without any result,
and marks cells that were not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from tests.scaling.cases import CASES, Case, run, write_data
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.training.evaluation import evaluate_run
from transformer_jax.training.initial import start_model
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.progress import Silent
from transformer_jax.training.run import Run
from transformer_jax.training.step import TrainState, make_train_step, split_seed
from transformer_jax.training.tasks import load_task

NEAR = 1e-5
STEPS = 2
COLUMNS: dict[str, tuple[bool, dict[str, int] | None]] = {
    "scanned": (True, None),
    "data=2,fsdp=2,tensor=2": (False, dict(data=2, fsdp=2, tensor=2)),
    "scanned, data=2,tensor=2,expert=2": (True, dict(data=2, tensor=2, expert=2)),
}
"""Whether layers are scanned, and the mesh."""


@dataclass(frozen=True)
class RunNumbers:
    """Result of a run."""

    start: dict[str, np.ndarray]
    """Parameters of step 0, with the names of a looped stack."""
    numbers: dict[str, list[float]]
    params: dict[str, np.ndarray]
    """Parameters after the last compared step."""


def by_name(params: Any) -> dict[str, np.ndarray]:
    found = unstack_layers(jax.tree.map(np.asarray, params))
    return {"/".join(path): leaf for path, leaf in flatten_dict(found).items()}


def run_case(case: Case, config: TrainConfig, looped_params: Any = None) -> tuple[RunNumbers, Any]:
    """Run the steps from parameters of a looped stack, or from new ones."""
    start = None if config.init_from is None else start_model(config.init_from)
    data = load_task(config, None if start is None else start.tokenizers)
    job = Run(data, RunFolder(Path(config.out)))
    if looped_params is None or start is not None:
        state = job.first_state(start, Silent())
    else:
        params = stack_layers(looped_params) if config.model.scan_layers else looped_params
        shardings = job.placement.shardings(job.template)
        key = split_seed(np.uint32(config.seed))[1]
        if shardings is not None:
            params, key = jax.device_put((params, key), (shardings.params, shardings.key))
        state = jax.jit(job.programs.state_of, out_shardings=shardings)(params, key=key)
    tree = jax.tree.map(np.array, state.params)
    if case.updates:
        return with_random_gradients(job, state, tree), tree
    numbers: dict[str, list[float]] = {"losses": [], "gradient norms": []}
    for step in range(1 if case.rounded else STEPS):
        state, metrics = job.step(state, job.inputs(step))
        numbers["losses"].append(float(metrics.loss))
        numbers["gradient norms"].append(float(metrics.grad_norm))
        numbers.setdefault("labels", []).append(float(metrics.weight))
    used = by_name(state.eval_params)
    if case.evaluated:
        numbers["held-out loss"] = [evaluate_run(job, state).loss]
    return RunNumbers(by_name(tree), numbers, {} if case.rounded else used), tree


def with_random_gradients(job: Run, state: TrainState, tree: Any) -> RunNumbers:
    """Compare losses of real steps, and updates of steps with random gradients."""
    numbers: dict[str, list[float]] = {"losses": [], "gradient norms": []}
    fresh = jax.tree.map(jnp.copy, state)
    for step in range(STEPS):
        state, metrics = job.step(state, job.inputs(step))
        numbers["losses"].append(float(metrics.loss))
        numbers["gradient norms"].append(float(metrics.grad_norm))
    looped = by_name(tree)

    def random_gradients(step: int) -> dict[str, np.ndarray]:
        rng, size = np.random.default_rng(step), [0.1, 1.0, 5.0][step]
        found = {}
        for name, leaf in looped.items():  # one layer gets a far larger gradient in the last step
            outlier = 50 if step == 2 and "/block_0/" in name else 1
            found[name] = size * outlier * rng.standard_normal(leaf.shape).astype(np.float32)
        return found

    def like(gradients: dict[str, np.ndarray], path: tuple[str, ...], leaf: Any) -> np.ndarray:
        if "blocks" not in path:
            return gradients["/".join(path)]
        at = path.index("blocks")
        names = ["/".join((*path[:at], f"block_{i}", *path[at + 1 :])) for i in range(len(leaf))]
        return np.stack([gradients[name] for name in names])

    def linear(params: Any, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, batch)
        return sum(jax.tree.leaves(parts)), jnp.float32(1)

    config = job.config
    step = make_train_step(linear, make_optimizer(config), ema_decay=config.ema_decay)
    for n in range(3):
        gradients = random_gradients(n)
        batch = jax.tree_util.tree_map_with_path(
            lambda path, leaf, gradients=gradients: jax.device_put(
                like(gradients, tuple(part.key for part in path), leaf)
            ),
            fresh.params,
        )
        if job.placement.mesh is not None:
            batch = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), batch, fresh.params)
        batch = jax.tree.map(lambda leaf: leaf[None], batch)
        fresh, _ = step(fresh, batch)
    return RunNumbers(looped, numbers, by_name(fresh.eval_params))


def compare(found: RunNumbers, wanted: RunNumbers) -> None:
    """Assert that two runs agree to 1e-5; updates, relative to the largest of all."""
    for name, numbers in wanted.numbers.items():
        np.testing.assert_allclose(found.numbers[name], numbers, rtol=NEAR, err_msg=name)
        assert np.isfinite(numbers).all() and min(numbers) > 0, (name, numbers)
    updates = {name: leaf - wanted.start[name] for name, leaf in wanted.params.items()}
    largest = max((float(np.abs(x).max()) for x in updates.values()), default=0.0)
    for name, update in updates.items():
        error = np.abs(found.params[name] - found.start[name] - update).max()
        spacing = np.spacing(np.abs(wanted.params[name]).max())  # updates are differences
        assert error <= NEAR * largest + 2 * spacing, (
            f"update of {name}: {error:.3g} of {largest:.3g}"
        )


@cache
def looped(name: str, folder: Path) -> tuple[RunNumbers, Any]:
    """Return the result of a case on one device, with a looped stack."""
    case = CASES[name]
    return run_case(case, run(folder, case, scan=False))


def cell(name: str, column: str, folder: Path) -> str:
    """Return "yes", or "no: " and the message that rejects the run."""
    case, (scan, sizes) = CASES[name], COLUMNS[column]
    try:
        config = run(folder, case, scan)
        if sizes is not None:
            config = replace(config, mesh=MeshConfig(**sizes))
    except ConfigError as error:
        return f"no: {error}"
    wanted, params = looped(name, folder)
    compare(run_case(case, config, params)[0], wanted)
    return "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, help="JSON lines: cells of earlier runs, and these")
    parser.add_argument("--write", type=Path, help="write the page of the table to this file")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only rows whose name has one of these"
    )
    parser.add_argument("--case", help="only the row of this name")
    parser.add_argument("--column", default="", help="only columns whose name contains this")
    parser.add_argument("--traceback", action="store_true", help="print where a cell fails")
    parser.add_argument("--json", action="store_true", help="print the cells as JSON on the output")
    arguments = parser.parse_args()
    cells: dict[tuple[str, str], str] = {}
    if arguments.results and arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            *key, outcome = json.loads(line)
            cells[key[0], key[1]] = outcome
    failed, folder = 0, Path(tempfile.mkdtemp())
    write_data(folder)
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    for name in CASES:
        if name != (arguments.case or name) or not any(x in name for x in arguments.only):
            continue
        for column in COLUMNS:
            if arguments.column not in column or (name, column) in cells:
                continue
            try:
                outcome = cells[name, column] = cell(name, column, folder)
            except Exception as error:  # recorded in the cell, and the rest continues
                failed += 1
                tell(f"{name}, {column}: {type(error).__name__}: {str(error)[:600]}")
                if arguments.traceback:
                    traceback.print_exc()
                continue
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps([name, column, outcome]) + "\n")
        tell(f"{name}: {[cells.get((name, column), '?')[:3] for column in COLUMNS]}")
        jax.clear_caches()
        looped.cache_clear()
    if arguments.json:
        print(json.dumps([[*key, outcome] for key, outcome in cells.items()]))
    if arguments.write:
        arguments.write.write_text(page(cells))
    raise SystemExit(1 if failed else 0)


def page(cells: dict[tuple[str, str], str]) -> str:
    """Return the page of the table."""
    notes: dict[str, int] = {}

    def short(outcome: str) -> str:
        mark, _, reason = outcome.partition(": ")
        return f"{mark} [{notes.setdefault(reason, len(notes) + 1)}]" if reason else mark

    rows = [
        f"| {name} | "
        + " | ".join(short(cells.get((name, column), "not run")) for column in COLUMNS)
        + " |"
        for name in CASES
        if any(cells.get((name, column)) == "yes" for column in COLUMNS)
    ]
    head = "| | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (len(COLUMNS) + 1)
    intro = (Path(__file__).parent / "page.md").read_text()
    listed = "\n".join(f"{number}. `{reason}`" for reason, number in notes.items())
    setting = (
        "Printed by `python -m tests.scaling --write docs/reference/scaling_matrix.md`, "
        f"with jax {jax.__version__} on eight devices of a CPU."
    )
    return f"{intro.rstrip()}\n\n{head}\n" + "\n".join(rows) + f"\n\n{listed}\n\n{setting}\n"
