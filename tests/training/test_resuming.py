"""A stopped and resumed run of any task is bit-identical to an uninterrupted one."""

import dataclasses
import json

import jax
import pytest

from tests.training.test_training import assert_same_state
from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import TrainConfig
from transformer_jax.config.presets import task_recipe
from transformer_jax.config.tasks import TASKS, ContinuousTask, GeneratedTask, PreferenceTask
from transformer_jax.loading import load_run
from transformer_jax.training.loop import fit
from transformer_jax.training.progress import Silent

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]


class Recorder(Silent):
    """Records the lines of a run."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


LINES = [f"{a} {b}" for a in ("to be", "or not", "that is") for b in ("a sea", "of troubles")]


def written(folder, name: str) -> str:
    """A data file with more examples than a step reads, and fewer than a whole run reads."""
    match name:
        case "seq2seq" | "prefix":
            rows = [f"{line}\t{line[::-1]}" for line in LINES * 3]
        case "classify":
            rows = [f"{line[0]}\t{line}" for line in LINES * 4]
        case "chat":
            rows = [
                json.dumps({"messages": [
                    {"role": "user", "content": line}, {"role": "assistant", "content": line[:2]}
                ]}) for line in LINES * 3
            ]  # fmt: skip
        case _:
            rows = LINES * 20
    (folder / "data.txt").write_text("\n".join(rows) + "\n")
    return str(folder / "data.txt")


@pytest.mark.long_except("chat", "classify", "copy", "masked", "prefix", "seq2seq")
@pytest.mark.parametrize("name", [n for n in TASKS if TASKS[n] is not PreferenceTask])
def test_resumed_run_is_bit_identical_for_every_task(tmp_path, name):
    recipe = task_recipe(TASKS[name]())
    task = recipe.task
    changes = {"judged": 0, "examples": 60} if hasattr(task, "examples") else {}
    if hasattr(task, "beams"):
        changes["beams"] = None if type(task).__dataclass_fields__["beams"].default is None else 1
    task = dataclasses.replace(task, **changes)
    reads = not isinstance(task, GeneratedTask | ContinuousTask)
    small = dict(d_model=16, num_layers=1, num_heads=2, dropout=0.1)
    config: TrainConfig = dataclasses.replace(
        recipe, task=task, model=dataclasses.replace(recipe.model, **small), steps=8,
        batch_size=4, eval_every=8, checkpoint_every=3, warmup_steps=2, sample_tokens=0,
        out=str(tmp_path / "parts"), **({"data": written(tmp_path, name)} if reads else {}),
    )  # fmt: skip
    whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    calls = iter(range(100))
    half = fit(config, stop=lambda: next(calls) == 3)
    assert half.interrupted and half.step == 4
    again = fit(config, resume=True)
    assert_same_state(again.state, whole.state)
    assert (again.val_loss, again.accuracy) == (whole.val_loss, whole.accuracy)
    begun, done = (jax.tree.leaves(result.state.params) for result in (half, whole))
    assert any(bool((a != b).any()) for a, b in zip(begun, done, strict=True))


@pytest.mark.parametrize(("before", "after"), [(1, None), (None, 1)])
def test_best_checkpoint_is_chosen_among_comparable_losses(tmp_path, before, after):
    """The oracle is an uninterrupted run, whose parameters are bit-identical."""
    recipe = task_recipe(TASKS["language"]())
    config = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, d_model=16, num_layers=1, num_heads=2),
        steps=8, batch_size=2, eval_every=2, checkpoint_every=2, warmup_steps=0, keep=9,
        learning_rate=0.3, sample_tokens=0, data=written(tmp_path, "language"),
        eval_batches=after, out=str(tmp_path / "whole"),
    )  # fmt: skip
    whole = fit(config)
    wanted = {m["step"]: m["val_loss"] for m in RunFolder(tmp_path / "whole").read_metrics()
              if "val_loss" in m}  # fmt: skip
    out = tmp_path / "parts"
    parts = dataclasses.replace(config, eval_batches=before, out=str(out))
    calls = iter(range(100))
    assert fit(parts, stop=lambda: next(calls) == 4).step == 5
    folder, recorder = RunFolder(out), Recorder()
    first = {m["step"]: m["val_loss"] for m in folder.read_metrics() if "val_loss" in m}
    assert [*first] == [2, 4] and all(first[step] != wanted[step] for step in first)
    again = fit(dataclasses.replace(parts, eval_batches=after), resume=True, progress=recorder)
    line = f"eval_batches changed from {before} to {after}: held-out loss"
    assert [f"step {step}: {line} {wanted[step]:.4f}, was {first[step]:.4f}" for step in first] == [
        text for text in recorder.lines if "eval_batches changed" in text
    ]
    kept = checkpoint.saved_steps(folder.checkpoints)
    found = {step: checkpoint.read_manifest(checkpoint.step_path(folder.checkpoints, step)).metadata
             for step in kept}  # fmt: skip
    assert {step: m["val_loss"] for step, m in found.items() if step != 5} == wanted
    assert again.best_step == whole.best_step == load_run(out).step == min(wanted, key=wanted.get)
    same = Recorder()  # comparable evaluations are not repeated
    fit(dataclasses.replace(parts, eval_batches=after, steps=9), resume=True, progress=same)
    assert not any("eval_batches changed" in text for text in same.lines)
