"""Scanned stacks and meshes of eight devices train like one device."""

import pytest

from tests.scaling.cases import CASES
from tests.support.devices import on_devices
from transformer_jax.config.tasks import TASKS

MESH = "scanned, data=2,tensor=2,expert=2"


def test_scaling_table_includes_every_task_and_optimizer():
    tasks = {case.changes["task"].kind for case in CASES.values() if "task" in case.changes}
    assert tasks == set(TASKS)
    optimizers = {type(case.changes.get("optimizer")).__name__ for case in CASES.values()}
    assert optimizers >= {"AdamW", "SGD", "Adafactor", "Lion", "Muon", "ScheduleFree"}


@pytest.mark.slow
@pytest.mark.long_except("task seq2seq")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_sharded_run_matches_one_device_or_is_rejected(name):
    column = ["--column", MESH] if name == "task seq2seq" else []
    command = ["-m", "tests.scaling", "--json", "--case", name, *column]
    cells = on_devices(8, *command, optimise=False)
    assert len(cells) == (1 if column else 3)
    for _, column, outcome in cells:
        refused = outcome.startswith("no: ") and (
            "expert" in column or "needs a looped stack" in outcome
        )
        assert outcome == "yes" or refused, (column, outcome)
