"""Infrastructure of a run without a model: processes, devices, progress, trackers."""

from __future__ import annotations

import io
import itertools
import sys
import types
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import RunError
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig, NgramConfig, TrainConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.config.optimizers import AdamW, ScheduleFree
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.models.lora import init_lora
from transformer_jax.pytree import sha256_of
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import adapting, initial, placement, processes, progress
from transformer_jax.training.batch import Batch
from transformer_jax.training.compiled import programs_of
from transformer_jax.training.initial import StartModel, start_params
from transformer_jax.training.placement import Placement, make_placement, parameter_spec
from transformer_jax.training.profiling import Profile
from transformer_jax.training.progress import Bar, Lines, Silent
from transformer_jax.training.run import Run
from transformer_jax.training.spikes import MOST, Spikes
from transformer_jax.training.tasks.task import Tokenizers, TrainingTask
from transformer_jax.training.trackers import Trackers, check_trackers

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def world(monkeypatch):
    """Three simulated processes, one after the other; the others get the broadcast of the first."""
    found = SimpleNamespace(index=0, sent=None, met=[])

    def broadcast(value):
        found.sent = value if found.index == 0 else found.sent
        return found.sent

    def gathered(value, tiled=False):
        return np.concatenate([value] * 3) if tiled else np.stack([value, value, False])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: found.index)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", found.met.append)
    return found


def test_error_in_first_process_is_raised_in_all(world):
    done = []
    for world.index in range(3):
        found = processes.by_first(lambda: done.append(world.index) or "made")
        assert found == (None if world.index else "made")
    assert done == [0]
    errors = (
        ConfigError("a: b"),
        RunError("é" * 3000),
        CheckpointError("c"),
        OSError("d"),
        KeyError(7),
    )
    known_errors = ConfigError, RunError, CheckpointError, OSError
    for error in errors:

        def fails(error=error):
            raise error

        kind = RuntimeError if isinstance(error, KeyError) else type(error)
        for world.index in (0, 2):
            with pytest.raises((*known_errors, RuntimeError, KeyError)) as caught:
                processes.by_first(fails)
            assert type(caught.value) is (kind if world.index else type(error))
            sent = str(error).encode()[: 4096 - len(type(error).__name__) - 1]
            assert world.index == 0 or str(caught.value).encode()[:4000] == sent[:4000]
            assert world.sent.dtype == np.uint8 and world.sent.shape == (4096,)
    world.index = 0
    first = processes.time_of_first()
    world.index = 1
    assert processes.time_of_first() == first and len(first) == len("2026-01-01T00:00:00")
    assert processes.any_process(True) is True and processes.any_process(False) is False
    np.testing.assert_array_equal(processes.gathered_here(np.arange(2)), [0, 1] * 3)
    processes.wait_for_all("finished")
    assert world.met == ["finished"] and not processes.is_first()
    with pytest.raises(ConfigError, match=r"mesh is None: 3 processes with \d+ devices"):
        make_placement(None)


def test_single_process_does_not_communicate():
    assert processes.is_first() and processes.by_first(lambda: 5) == 5
    assert processes.any_process(True) is True and processes.any_process(False) is False
    assert processes.gathered_here(tree := [1]) is tree and processes.wait_for_all("x") is None


MATRICES = {
    "query": ("fsdp", "tensor", None), "key": ("fsdp", "tensor", None),
    "value": ("fsdp", "tensor", None), "out": ("tensor", None, "fsdp"),
    "up": ("fsdp", "tensor"), "gate": ("fsdp", "tensor"), "down": ("tensor", "fsdp"),
}  # fmt: skip
"""From docs/meshes.md: the mesh axes that split each module's matrix."""
TABLES = {
    "tokens": ("tensor", "fsdp"), "source_tokens": ("tensor", "fsdp"),
    "output": ("tensor", "fsdp"), "positions": (None, "fsdp"), "target_positions": (None, "fsdp"),
}  # fmt: skip


def test_parameters_are_sharded_as_documented():
    sizes = {"data": 2, "fsdp": 4, "tensor": 2, "expert": 3}
    for module, axes in MATRICES.items():
        path, shape = ("decoder", "block_0", "attention", module), (24, 8, 16)[: len(axes)]
        assert parameter_spec((*path, "kernel"), shape, sizes) == P(*axes)
        stacked = ("decoder", "blocks", "attention", module, "kernel")
        assert parameter_spec(stacked, (5, *shape), sizes) == P(None, *axes)
        odd = parameter_spec((*path, "kernel"), (24, 7, 16)[: len(axes)], sizes)
        assert odd == P(*(None if i == 1 else axis for i, axis in enumerate(axes)))
        if module in ("query", "key", "value"):
            assert parameter_spec((*path, "bias"), (8, 16), sizes) == P("tensor", None)
        elif module in ("up", "gate"):
            assert parameter_spec((*path, "bias"), (8,), sizes) == P("tensor")
        else:
            assert parameter_spec((*path, "bias"), (8,), sizes) == P()
    for table, axes in TABLES.items():
        assert parameter_spec(("embed", table), (24, 8), sizes) == P(*axes)
    assert parameter_spec(("embed", "bias"), (24,), sizes) == P()
    for name in ("v_row", "v_col"):
        assert parameter_spec((name, "embed", "tokens"), (24, 8), sizes) == P()
    # devices that split the tokens of a row also split the parameters, if the sizes fit
    sizes |= dict(context=2)
    query = "decoder", "block_0", "attention", "query", "kernel"
    assert parameter_spec(query, (24, 8, 16), sizes) == P(("fsdp", "context"), "tensor", None)
    assert parameter_spec(query, (12, 8, 16), sizes) == P("fsdp", "tensor", None)
    assert parameter_spec(("embed", "tokens"), (24, 8), sizes) == P("tensor", ("fsdp", "context"))


def test_single_device_mesh_places_rows_and_parameters():
    placement = make_placement(MeshConfig())
    names = "data", "fsdp", "tensor", "expert", "context"
    assert dict(placement.mesh.shape) == dict.fromkeys(names, 1)
    assert placement.described() == "1 x cpu"
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    rows = ("expert", "data", "fsdp")
    for found in (placement.rows({"x": x}, 1)["x"], placement.rows_of_process({"x": x}, 1)["x"]):
        np.testing.assert_array_equal(found, x)
        assert found.sharding.spec == P(None, rows)
    assert placement.rows(x, 0).sharding.spec == P(rows)
    assert placement.whole(x).sharding.spec == P() == placement.whole(jnp.array(x)).sharding.spec
    shapes = {"embed": {"tokens": jax.ShapeDtypeStruct((6, 4), jnp.float32)}}
    spec = placement.shardings(shapes)["embed"]["tokens"].spec
    assert spec == P("tensor", "fsdp") == placement.state(shapes)["embed"]["tokens"].sharding.spec
    alone = make_placement(None)
    assert alone.shardings(shapes) is None and alone.state(shapes) is shapes
    assert alone.described() == "cpu"
    np.testing.assert_array_equal(alone.rows_of_process(x, 1), x)
    mesh = SimpleNamespace(shape={"data": 2, "fsdp": 1, "tensor": 4}, size=8)
    assert Placement(mesh).described() == "8 x cpu: data=2, tensor=4"
    with pytest.raises(ConfigError, match="mesh is 'data=2': needs 2 devices, but there is one"):
        make_placement(MeshConfig(data=2))


def test_progress_prints_twenty_lines_with_time_left(monkeypatch, capsys):
    clock = itertools.count(100, 3)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Lines()
    lines.start(0, 45)
    for step in range(1, 46):
        lines.step(step, 1 / step, None if step < 3 else 12345.6)
    lines.say("done")
    lines.stop()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "step  2/45  loss 0.5000  2:09 left", "step  4/45  loss 0.2500  12,346 tokens/s  2:03 left"
    ]  # fmt: skip
    assert lines[-2:] == ["step 45/45  loss 0.0222  12,346 tokens/s  0:00 left", "done"]
    assert len(lines) == 22 + 1 + 1
    assert progress._clock(3723.4) == "1:02:03" and progress._clock(59.6) == "1:00"


def test_bar_shows_last_step_and_ten_updates_per_second(monkeypatch):
    now = iter([1.0, 1.05, 1.2, 1.21, 1.25])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    bar = Bar()
    bar._bar.console.file = io.StringIO()
    bar.start(3, 9)
    seen = []
    for step in (4, 5, 6, 7, 9):
        bar.step(step, step / 10, None if step == 4 else 1000.0 * step)
        (task,) = bar._bar.tasks
        seen.append((task.completed, task.total, task.fields["loss"], task.fields["rate"]))
    assert seen == [
        (4, 9, "loss 0.4000", ""), (4, 9, "loss 0.4000", ""),
        (6, 9, "loss 0.6000", "6,000 tokens/s"), (6, 9, "loss 0.6000", "6,000 tokens/s"),
        (9, 9, "loss 0.9000", "9,000 tokens/s"),
    ]  # fmt: skip
    bar.say("a [bold]line[/bold]")
    bar.stop()
    assert "a [bold]line[/bold]\n" in bar._bar.console.file.getvalue()


def test_progress_is_bar_on_terminal_and_lines_in_notebook(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True, write=lambda text: None, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert type(progress.progress_for_output()) is Bar
    shell = SimpleNamespace(kernel=1)
    for notebook, kind in ((shell, Lines), (SimpleNamespace(), Silent)):
        module = SimpleNamespace(get_ipython=lambda notebook=notebook: notebook)
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert type(progress.progress_for_notebook()) is kind
    monkeypatch.setattr(sys, "stdout", None)
    assert type(progress.progress_for_output()) is Lines


def test_trackers_receive_metrics_and_failing_tracker_is_removed(monkeypatch, tmp_path):
    calls = []

    def recorder(name, fails=None):
        def called(method):
            def call(*args, **kwargs):
                calls.append((name, method, args, kwargs))
                if method == fails:
                    raise RuntimeError(f"no\n {name}")
                return SimpleNamespace(
                    **{m: called(m) for m in ("add_scalar", "close", "log", "finish")}
                )

            return call

        kind = "SummaryWriter" if name == "tensorboardX" else "init"
        return types.SimpleNamespace(**{kind: called(kind)})

    for name, fails in (("tensorboardX", None), ("wandb", "log"), ("trackio", None)):
        monkeypatch.setitem(sys.modules, name, recorder(name, fails))
    config, lines, folder = TrainConfig(), [], tmp_path / "a run"
    trackers = Trackers(("tensorboard", "wandb", "trackio"), folder, config, lines.append)
    line = {"step": 3, "loss": 0.5, "grad_norm": None, "seconds": 2}
    trackers.write(3, line)
    trackers.write(4, {"step": 4, "loss": 0.25})
    trackers.close()
    trackers.close()
    assert lines == ["log: wandb failed and is disabled (RuntimeError: no wandb)"]
    opened = dict(project="transformer_jax", name="a run", resume="allow", config=asdict(config))
    identity = calls[1][3].pop("id")
    assert len(identity) == 16 and int(identity, 16) >= 0
    assert calls == [
        ("tensorboardX", "SummaryWriter", (str(folder / "tensorboard"),), {}),
        ("wandb", "init", (), opened | {"dir": str(folder)}),
        ("trackio", "init", (), opened),
        ("tensorboardX", "add_scalar", ("loss", 0.5, 3), {}),
        ("tensorboardX", "add_scalar", ("seconds", 2.0, 3), {}),
        ("wandb", "log", ({"loss": 0.5, "seconds": 2.0},), {"step": 3}),
        ("trackio", "log", ({"loss": 0.5, "seconds": 2.0},), {"step": 3}),
        ("tensorboardX", "add_scalar", ("loss", 0.25, 4), {}),
        ("trackio", "log", ({"loss": 0.25},), {"step": 4}),
        ("tensorboardX", "close", (), {}), ("trackio", "finish", (), {}),
    ]  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else 1)
    check_trackers(("tensorboard", "trackio"))
    with pytest.raises(
        ConfigError, match="log contains 'wandb', which needs wandb: run pip install wandb"
    ):
        check_trackers(("trackio", "wandb"))


def test_profile_covers_all_requested_steps(monkeypatch, tmp_path):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: events.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    state = jnp.zeros(())
    for steps, wanted in ((range(1, 9), 5), (range(1, 5), None), (range(5, 9), None)):
        events.clear()
        profile = Profile(TrainConfig(steps=9, profile="3-5"), tmp_path)
        for step in steps:
            profile.before(step, state)
            if step == 3:
                assert events == [tmp_path / "profile"]
            profile.after(step, state)
            if step == wanted:
                assert events == [tmp_path / "profile", "stop"]
        profile.close()
        assert events == ([] if 3 not in steps else [tmp_path / "profile", "stop"])


def test_spike_batch_of_tokens_is_also_saved_as_text(tmp_path):
    spikes = Spikes(2.0, tmp_path)
    tokens = np.array([[[0, 1, 2]], [[2, 2, 0]]], np.int32)
    labels = tokens[..., ::-1]
    file = spikes.save(7, Batch(tokens, labels), 1.5, 0.25, CharTokenizer("abé"))
    assert file == tmp_path / "spikes" / "step-00000007.npz"
    with np.load(file) as found:
        assert {*found.files} == {"tokens", "labels", "step", "loss", "grad_norm"}
        assert (found["step"], found["loss"], found["grad_norm"]) == (7, 1.5, 0.25)
    assert file.with_suffix(".txt").read_text("utf-8") == (
        "step 7, loss 1.5, gradient norm 0.25\nrow 0: 'abé'\nrow 1: 'ééa'\n"
    )
    for step in range(MOST - 1):
        assert not spikes.is_full()
        spikes.save(100 + step, Batch(tokens, labels), 1.5, 0.25, None)
    assert spikes.is_full() and len([*spikes.folder.glob("*.txt")]) == 1


MODEL = ModelConfig(kind="encoder", vocab_size=7, d_model=4, num_heads=1, num_layers=1, max_len=5)


def head(count: int, labels: tuple[str, ...] | None, **changes) -> StartModel:
    model = replace(MODEL, num_classes=count, **changes)
    return StartModel(model, Tokenizers(CharTokenizer("ab")), lambda scan: {}, labels)


def test_reused_head_follows_run_class_order(monkeypatch):
    kernel, bias = np.arange(12.0).reshape(4, 3), np.array([5.0, 6.0, 7.0])
    params = {"embed": {"tokens": np.ones((7, 4))}, "classifier": {"kernel": kernel, "bias": bias}}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    monkeypatch.setattr(initial, "init_params", lambda model, key: jax.tree.map(
        lambda x: jnp.full(x.shape, -1.0), shapes))  # fmt: skip

    def taken(labels, start):
        config = SimpleNamespace(model=start.config, task=ClassifyTask(labels=labels))
        found, changes = start_params(config, start, params, jax.random.key(0))
        return np.asarray(found["classifier"]["bias"]).tolist(), changes

    same = [5.0, 6.0, 7.0]
    assert taken(("x", "y", "z"), head(3, ("x", "y", "z"))) == (same, [])
    assert taken(("z", "x", "y"), head(3, ("x", "y", "z"))) == ([7.0, 5.0, 6.0], [])
    assert taken(("z", "x", "y"), head(3, None)) == (same, [])  # unnamed classes keep their order
    for form in ("LABEL_{}", "{}"):
        mixed = tuple(form.format(i) for i in (2, 0, 1))
        assert taken(mixed, head(3, None)) == ([7.0, 5.0, 6.0], [])
    for start in (head(3, ("x", "y", "w")), head(3, ("x", "y", "z"), masked_token_head=True)):
        found, changes = taken(("x", "y", "z"), start)
        assert found == [-1.0] * 3
        assert changes == ["new parameters: classifier/bias, classifier/kernel"]
    config = SimpleNamespace(model=MODEL, task=ClassifyTask(labels=("x", "y", "z")))
    ordered, _ = start_params(config, head(3, ("y", "z", "x")), params, jax.random.key(0))
    np.testing.assert_array_equal(ordered["classifier"]["kernel"], kernel[:, [2, 0, 1]])
    np.testing.assert_array_equal(ordered["embed"]["tokens"], params["embed"]["tokens"])


def test_published_classes_have_names_from_config():
    model = head(2, None).config
    for names, wanted in (
        ({"0": "no", "1": "yes"}, ("no", "yes")), ({"0": "LABEL_0", "1": "LABEL_1"}, None),
        ({"0": "LABEL_0", "1": "yes"}, ("LABEL_0", "yes")), ({"0": "no"}, None), (None, None),
        ({"1": "yes", "0": 7}, None),
    ):  # fmt: skip
        folder = SimpleNamespace(config={"id2label": names})
        assert initial._published_labels(model, folder) == wanted
    folder = SimpleNamespace(config={"id2label": {"0": "no", "1": "yes"}})
    assert initial._published_labels(MODEL, folder) is None


def test_adapters_are_initialized_with_frozen_base(monkeypatch):
    rng = np.random.default_rng(3)
    kernel = lambda *shape: {"kernel": rng.standard_normal(shape).astype(np.float32)}  # noqa: E731
    block = {"query": kernel(6, 2, 3), "out": kernel(2, 3, 6)}
    params = {"decoder": {"block_0": {"attention": block}}, "classifier": kernel(6, 2)}
    monkeypatch.setattr(adapting, "init_params", lambda model, key: jax.tree.map(jnp.array, params))
    monkeypatch.setattr(initial, "init_params", adapting.init_params)
    lora = LoraConfig(rank=2, targets=("query",))
    config = SimpleNamespace(
        model=MODEL, lora=lora, init_from="base", task=None, trained_whole=("classifier",)
    )
    base = adapting.FrozenBase(config, Placement())
    start = StartModel(MODEL, Tokenizers(CharTokenizer("ab")), lambda scan: params)
    key = jax.random.key(5)
    trained, changes = base.load(start, key)
    assert changes == [] and base.sha256 == sha256_of(params)
    adapters = init_lora(params, lora, jax.random.fold_in(key, 1))
    jax.tree.map(np.testing.assert_array_equal, trained["lora"], adapters)
    (whole,) = trained["whole"].values()
    np.testing.assert_array_equal(whole, params["classifier"]["kernel"])
    kept = base.params["decoder"]["block_0"]["attention"]
    np.testing.assert_array_equal(kept["query"]["kernel"], block["query"]["kernel"])
    assert "classifier" not in base.params
    both = base.join_parts(trained)
    np.testing.assert_array_equal(both["classifier"]["kernel"], params["classifier"]["kernel"])
    adapted = both["decoder"]["block_0"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(adapted.base, block["query"]["kernel"])
    again = adapting.FrozenBase(config, Placement())
    again.load(start, key, {"base_sha256": base.sha256})
    assert again.sha256 == base.sha256
    with pytest.raises(CheckpointError, match="base"):
        again.load(start, key, {"base_sha256": "0" * 64})
    lacking = StartModel(MODEL, start.tokenizers, lambda scan: {"classifier": params["classifier"]})
    with pytest.raises(
        ConfigError, match=r"lora\.trained lacks 'decoder/block_0/attention/out/kern"
    ):
        base.load(lacking, key)


def test_ngram_training_step_counts_tokens():
    """For order 1: (c - d) / N + d K / (N V), with K of V tokens seen and d = n1 / (n1 + 2 n2)."""
    text = np.array([0, 1, 1, 2, 3, 3, 3, 0, 4], np.int32)
    task = TrainingTask()
    task.config = TrainConfig(model=NgramConfig(vocab_size=6, order=1), steps=1)
    task.documents = lambda: [text[:4], text[4:]]
    config, programs = programs_of(task)
    assert config == replace(task.config, model=NgramConfig(vocab_size=6, order=1, nodes=(5,)))
    counts = np.bincount(text, minlength=6)
    discount = 2 / (2 + 2 * 2)  # 2 and 4 occur once, 0 and 1 twice
    p = np.maximum(counts - discount, 0) / 9 + discount * 5 / 9 / 6
    assert p.sum() == pytest.approx(1)
    tokens = np.array([[[1, 5, 3, 2]], [[0, 0, 0, 0]]], np.int32)
    labels = np.array([[[5, 3, 2, -100]], [[0, 0, 0, 0]]], np.int32)
    state = programs.fresh_state(np.uint32(3))
    found, metrics = programs.train_step(state, Batch(tokens, labels), frozen=())
    nats = -np.log(p[[5, 3, 2]])
    assert (int(found.step), float(metrics.weight)) == (1, 3)
    assert float(metrics.loss) == pytest.approx(nats.mean(), rel=1e-5)
    zeros = metrics.grad_norm, metrics.rejected, metrics.rejected_in_a_row, programs.rate(0)
    assert [float(number) for number in zeros] == [0.0] * 4
    batch = Batch(tokens[0], labels[0])
    scores = programs.eval_step(found.params, batch)
    np.testing.assert_allclose(scores, [nats.sum(), 3, 1], rtol=1e-5)  # 3 is the most likely


@dataclass
class State:
    """Fields of a training state that a checkpoint of a run depends on."""

    step: int = 7
    average: str | None = None
    eval_params: str = "the mean of the steps"


@pytest.mark.parametrize(
    ("optimizer", "average"), [(ScheduleFree(), "the mean of the steps"), (AdamW(), None)]
)
def test_checkpoint_of_schedule_free_run_contains_evaluated_parameters(optimizer, average):
    saved = []
    run: Any = SimpleNamespace(
        config=TrainConfig(optimizer=optimizer, schedule="constant"), base=None,
        task=SimpleNamespace(sha256="data", tokenizers=Tokenizers(CharTokenizer("ab"))),
        saver=SimpleNamespace(save=lambda *arguments: saved.append(arguments)),
    )  # fmt: skip
    Run.save(run, cast(Any, State()), 1.5)
    ((step, state, metadata),) = saved
    assert (step, state.average) == (7, average)
    assert metadata["val_loss"] == 1.5 and metadata["data_sha256"] == "data"


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        ([0, 0, 1, 1], [(0, 2), (1, 2)]),
        ([1, 1, 0, 0], [(1, 2), (0, 2)]),
        ([0, 1, 0, 1], [(0, 1), (0, 1)]),  # their rows are no stretches of the batch
        ([0, 0, 0, 1], [(0, 1), (0, 1)]),
    ],
)
def test_processes_read_equal_stretches_of_rows_or_all(monkeypatch, processes, parts):
    devices = [
        (SimpleNamespace(process_index=p), (slice(i, None),)) for i, p in enumerate(processes)
    ]
    by_device = SimpleNamespace(items=lambda: devices)
    split = SimpleNamespace(devices_indices_map=lambda shape: by_device)
    monkeypatch.setattr(placement, "NamedSharding", lambda *_: split)
    place = placement.Placement(SimpleNamespace(shape=dict.fromkeys(placement.ROWS, 2)))
    for process, part in enumerate(parts):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert place.reader() == part
