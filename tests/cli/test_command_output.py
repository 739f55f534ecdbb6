"""Complete output of plans, comparisons, reports and servers for fixed numbers."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

import transformer_jax as tj
from tests.cli.test_train import run_command
from transformer_jax import config as configs
from transformer_jax import loading
from transformer_jax.cli import command, plan, report, serve, train
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    DigitsTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
    Task,
)
from transformer_jax.lectures import compare
from transformer_jax.training.planning import plan as planning
from transformer_jax.training.planning.hardware import Hardware
from transformer_jax.training.planning.memory import StepMemory
from transformer_jax.training.planning.peaks import Chip
from transformer_jax.training.planning.plan import Plan

GIB = 2**30
CHIP = Chip("a chip", flops=1e12, memory=4 * GIB, bandwidth=8 * GIB, network=1e9)


def planned(hardware, total=3.0, **changes) -> Plan:
    """Return a plan of `total` GiB: parameters 1, optimizer 0.5, inputs 0.25, work the rest."""
    memory = StepMemory(*(round(x * GIB) for x in (1, 0.5, 0.25, total - 1.75)))
    given = dict(mesh=configs.MeshConfig(fsdp=2), cache=0, tokens=500, flops=3e12, compiled=True)
    return Plan(hardware=hardware, memory=memory, **given | changes)


@pytest.fixture
def planner(monkeypatch, capsys):
    """Run the command on given hardware with prepared plans."""
    small = "--model transformer --d-model 8 --num-heads 1 --num-layers 1 --max-len 6 --d-ff 8"
    default = f"{small} --batch-size 4 --accumulation 3 --vocab-size 11"

    def run(hardware, *argv, plans=None, status=0, **changes):
        found = lambda *given, **named: (plans or planned)(hardware, **changes)  # noqa: E731
        for name in ("plan_training", "plan_decoding"):
            monkeypatch.setattr(planning, name, found)
        monkeypatch.setattr("transformer_jax.training.planning.hardware.find_hardware",
                            lambda name: hardware)  # fmt: skip
        assert plan.main(["--target", hardware.name, *default.split(), *argv]) == status
        return capsys.readouterr().out.splitlines()

    return run


def test_plan_command_prints_memory_and_minimum_time(planner):
    chips = Hardware("tpu-x", CHIP, 2)
    title, batch, *lines = planner(chips, "--quick")
    # tokens, four matrices of attention, two of the feed-forward network, and three norms
    count = 11 * 8 + 4 * 8**2 + 2 * 8 * 8 + 3 * 8
    assert title.startswith(f"decoder of {count} parameters, vocabulary of 11, computing in ")
    assert (
        title.endswith(", for tpu-x") and batch == "training on 12 x 6 tokens per step, over fsdp=2"
    )
    # 2 (1 + 0.5) GiB of state, read and written, and twice 1.25 of work, at 8 GiB/s
    assert lines == [
        "memory of a chip (a chip), GiB",
        "  parameters                     1.000", "  optimizer                      0.500",
        "  inputs                         0.250", "  gradients and activations      1.250",
        "  total                          3.000 of 4.000: fits",
        "operations per token            6.000 GFLOP",
        "minimum time of a step      compute 1.5 s, memory 688 ms, network unknown "
        "(this jaxlib cannot read the program)",
        "maximum throughput          333 tokens/s on 2 chips",
    ]  # fmt: skip
    lines = planner(chips, "--quick", total=5.0, status=1)
    assert "  total                          5.000 of 4.000: does not fit" in lines
    lines = planner(replace(chips, count=1), "--quick", compiled=False, status=1)
    assert lines[-3:] == [
        "  gradients                      1.250",
        "  total                          3.000 or more (not compiled) of 4.000: does not fit",
        "operations per token            6.000 GFLOP",
    ]
    _, batch, *lines = planner(chips, "--decode", cache=GIB // 2, total=2.0)
    assert batch == "decoding one token for 4 rows of 6 positions, over fsdp=2"
    assert lines[3:6] == [
        "  cache                          0.500", "  inputs                         0.250",
        "  activations                    0.250",
    ]  # fmt: skip
    machine = Hardware("cpu", None, 1)
    *_, last = planner(machine, "--quick", total=1.75)
    assert (
        last == "minimum time of a step      unknown: the peak rates of this machine are not known"
    )


def test_plan_command_suggests_largest_batch_and_simplest_remedy(planner, monkeypatch):
    chips = Hardware("tpu-x", CHIP, 2)
    sizes_tried = []

    def largest(config, hardware, found):
        sizes_tried.append((config.batch_size, hardware, found.total))
        return 24, planned(hardware, 3.5)

    monkeypatch.setattr(planning, "largest_batch", largest)
    monkeypatch.setattr(planning, "remedies", lambda *given: [("--a", 1), ("--a --b", 2)])
    monkeypatch.setattr(planning, "least_chips", lambda *given: 8)
    assert planner(chips)[-1] == "largest --batch-size        24 (3.500 GiB)"
    assert sizes_tried == [(4, chips, 3 * GIB)]
    sizes = iter([5.0, 4.5, 3.25])
    plans = lambda hardware: planned(hardware, next(sizes))  # noqa: E731
    *_, one, two = planner(chips, plans=plans, status=1)
    assert one == "largest --batch-size        24 (3.500 GiB)"
    assert two == "fits with                   --a --b (3.250 GiB)"
    monkeypatch.setattr(planning, "largest_batch", lambda *given: None)
    *_, one, two = planner(chips, total=5.0, compiled=False, status=1)
    assert one == "no remat, batch size or optimizer makes it fit on this target"
    assert two == "state and gradients only    fit if sharded with --mesh fsdp=8"


def test_largest_batch_is_found_within_one_sixteenth(monkeypatch):
    """Memory grows linearly with the rows, or quadratically, which needs a search."""
    config = configs.TrainConfig(batch_size=4)
    chip = Hardware("x", CHIP, 1)
    for bend, most in ((0.0, 60), (0.002, 28)):
        sizes_tried = []
        total = lambda size, bend=bend: 1.75 + 0.0375 * size + bend * size**2  # noqa: E731

        def at(config, hardware, *, sizes_tried=sizes_tried, total=total, **named):
            sizes_tried.append(config.batch_size)
            return planned(hardware, total(config.batch_size), mesh=configs.MeshConfig(fsdp=4))

        monkeypatch.setattr(planning, "plan_training", at)
        first = at(config, chip)
        size, found = planning.largest_batch(config, chip, first)
        assert size % 4 == 0 and found.total == round(total(size) * GIB) // 1
        assert total(size) <= 4 and most * 15 / 16 - 4 <= size <= most and len({*sizes_tried}) <= 8
    assert planning.largest_batch(config, chip, replace(first, compiled=False)) is None
    monkeypatch.setattr(planning, "plan_training", lambda c, h, **n: planned(h, 9 + c.batch_size))
    assert planning.largest_batch(config, chip, planned(chip, 13)) is None  # not even the smallest


def test_remedies_accumulate_and_minimum_chip_count_is_power_of_two(monkeypatch):
    chip, seen = Hardware("x", CHIP, 2), []

    def at(config, hardware, compiled):
        assert compiled is False
        seen.append((config, hardware.count))
        return planned(hardware, 3.0 if config.param_dtype == "bfloat16" else 5.0)

    monkeypatch.setattr(planning, "plan_training", at)
    model = tj.ModelConfig(d_model=8, num_heads=1, num_layers=1)
    config = configs.TrainConfig(model=model, batch_size=8)
    (flags, _), (more, changed) = planning.remedies(config, chip)
    first = "--remat full --scan-layers True --batch-size 2 --param-dtype bfloat16"
    assert (flags, more) == (first, first + " --optimizer adafactor")
    assert changed == replace(
        config, model=replace(model, remat="full", scan_layers=True), batch_size=2,
        param_dtype="bfloat16", optimizer=configs.Adafactor(),
    )  # fmt: skip
    assert [c.model.remat for c, _ in seen] == ["full"] * 5
    windows = replace(model, remat="full", window=(3,))
    given = replace(config, model=windows, batch_size=2, optimizer=configs.Lion())
    ((flags, changed),) = planning.remedies(given, chip)
    assert (flags, changed) == ("--param-dtype bfloat16", replace(given, param_dtype="bfloat16"))
    seen.clear()
    monkeypatch.setattr(
        planning, "plan_training", lambda c, h, compiled: seen.append((c, h.count))
        or planned(h, 2 + 10 / h.count),
    )  # fmt: skip
    assert planning.least_chips(config, chip) == 8
    assert [(c.mesh.fsdp, c.batch_size, count) for c, count in seen] == [
        (n,) * 3 for n in (1, 2, 4, 8)
    ]
    monkeypatch.setattr(planning, "plan_training", lambda c, h, compiled: planned(h, 9))
    assert planning.least_chips(config, chip) is None


def test_compare_command_writes_table_record_and_chart(monkeypatch, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abcdefghij" * 40)
    model = configs.RecurrentConfig(vocab_size=10, d_embed=3, d_hidden=5, cell="gru")
    models = {"ngram": configs.NgramConfig(vocab_size=10), "gru": model}
    trained, drawn = [], []

    def train(config, received, *, resume=False, vocab_size=None):
        trained.append((config, resume, vocab_size))
        counted = isinstance(config.model, configs.NgramConfig)
        own = (
            replace(config.model, nodes=(2, 3, 4, 5, 6)[: config.model.order]) if counted else None
        )
        loss = abs(config.model.order - 3) + 1 if counted else 0.5 + config.learning_rate
        return SimpleNamespace(
            val_loss=loss, val_loss_per_character=loss,
            config=replace(config, model=own) if counted else config,
        )  # fmt: skip

    monkeypatch.setattr(compare, "equal_models", lambda *given: drawn.append(given) or models)
    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare, "RATES", (0.004, 0.008, 0.016))
    monkeypatch.setattr(compare, "ORDERS", (2, 3, 4, 5))
    clock = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(compare.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(compare.plot, "read_runs", lambda paths: [path.name for path in paths])
    monkeypatch.setattr(compare.plot, "draw", lambda *given: drawn.append(given))
    argv = "--steps 30 --batch-size 5 --context 7 --d-model 8 --seed 3 --models ngram gru ngram"
    argv = ["compare", "--data", str(text), "--out", str(out), *argv.split()]
    assert run_command(argv) == 0
    printed = capsys.readouterr().out.splitlines()
    count = tj.num_params(model)
    assert printed == [
        "ngram, order 4: 2.000 nats in the search", "ngram, order 5: 3.000 nats in the search",
        "ngram, order 3: 1.000 nats in the search", "ngram, order 2: 2.000 nats in the search",
        "ngram: 1.000 nats per character, held out",
        "gru, learning rate 0.004: 0.504 nats in the search",
        "gru, learning rate 0.008: 0.508 nats in the search",
        "gru, learning rate 0.016: 0.516 nats in the search",
        "gru: 0.504 nats per character, held out",
        "| model          | parameters | learning rate | characters read |  nats |  bits | "
        "perplexity |",
        "| ---            |        --: |           --: |             --: |   --: |   --: | "
        "       --: |",
        f"| gru            | {count:>10,} |         0.004 |           1,050 | 0.504 | 0.727 | "
        "      1.66 |",
        "| ngram, order 3 |  9 n-grams |             - |             360 | 1.000 | 1.443 | "
        "      2.72 |",
        f"drawn: {out / 'compared.png'}",
    ]  # fmt: skip
    record = json.loads((out / "compared.json").read_text())
    gru, ngram = record.pop("models")
    assert record == {"data": str(text), "context": 7, "steps": 30, "seed": 3}
    assert gru == pytest.approx(dict(
        model="gru", parameters=count, learning_rate=0.004, order=None, tokens=1050, nats=0.504,
        bits=0.504 / math.log(2), perplexity=math.exp(0.504), seconds=1.0,
    ))  # fmt: skip
    assert ngram == pytest.approx(dict(
        model="ngram", parameters=9, learning_rate=None, order=3, tokens=360, nats=1.0,
        bits=1 / math.log(2), perplexity=math.e, seconds=2.5,
    ))  # fmt: skip
    assert drawn == [
        (10, 8, 7, ("ngram", "gru", "ngram")),
        (["gru", "ngram"], "tokens", out / "compared.png"),
    ]
    last, resumed, vocab_size = trained[-1]
    assert last.sample_tokens == 0 and last.model == model
    assert (last.steps, last.batch_size, last.sequence_len, last.seed, last.eval_every) == (
        30, 5, 7, 3, 3,
    )  # fmt: skip
    assert (last.warmup_steps, last.learning_rate, last.min_learning_rate) == (3, 0.004, 0.0004)
    assert (last.out, last.data, resumed, vocab_size) == (str(out / "gru"), str(text), False, None)
    searched = trained[-2][0]
    assert (searched.steps, searched.eval_every, trained[-2][2]) == (6, 6, 10)
    again = [*argv, "--resume"]
    (out / "ngram").mkdir()
    from transformer_jax.checkpoints.run_folder import RunFolder

    RunFolder(out / "ngram").write_config(trained[4][0])
    trained.clear()
    clock = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(compare.time, "perf_counter", lambda: next(clock))
    assert run_command(argv) == 2 and "already exists and is not empty" in capsys.readouterr().err
    assert run_command(again) == 0
    assert [resume for _, resume, _ in trained] == [True, *[False] * 4]
    assert trained[0][0].model.order == 3


def result(task, **changes):
    given = dict(
        sample="one\ntwo", val_loss=1.5, val_loss_per_character=None, perplexity=math.exp(1.5),
        accuracy=0.256, scores={}, rejected=0, unit="token",
        config=SimpleNamespace(task=task, out="runs/x", sample_tokens=9),
    )  # fmt: skip
    return SimpleNamespace(**given | changes)


def test_training_report_summarizes_run():
    files = "in runs/x: loss.png, metrics.jsonl, sample.txt, scores.json, checkpoints"
    bits = 1.5 / math.log(2)
    expected = [
        "", "one\ntwo", "", f"held-out loss: 1.5000 nats per token = {bits:.4f} bits",
        "perplexity 4.48 per token, accuracy 25.6%",
    ]  # fmt: skip
    assert report.summary(result(LanguageTask())).split("\n") == "\n".join(
        [*expected, files]
    ).split("\n")
    given = result(
        PreferenceTask(), perplexity=None, sample="", rejected=2, scores={"a": 0.12345, "b": 2.0},
        config=SimpleNamespace(task=PreferenceTask(), out="runs/x", sample_tokens=0),
    )  # fmt: skip
    assert report.summary(given).split("\n") == [
        "held-out loss: 1.5000 nats per pair (0.6931: no preference)",
        "the chosen answer is preferred in 25.6% of the pairs", "a 0.1235, b 2",
        "2 steps were skipped because their loss was not finite", files.replace("sample.txt, ", ""),
    ]  # fmt: skip
    lost = result(Seq2SeqTask(), val_loss=None, scores={"exact_match": 0.5}, sample="")
    assert report.summary(lost).split("\n") == [
        "held-out loss: not finite", "exact_match 0.5",
        "BLEU and chrF need sacrebleu: run pip install sacrebleu", files,
    ]  # fmt: skip
    assert report.missing_metrics({"exact_match": 1, "chrf": 2}) is None
    assert report.missing_metrics({}) is None
    config = configs.TrainConfig(data="-", out="-x y")
    wanted = "train --out './-x y' --resume --steps 4 < TEXT"
    assert report.how_to_resume(config, "train", " --steps 4") == wanted
    for task, sample, prompt in (
        (MaskedTask(), "hidden:\na_c\nfilled:", "a_c"), (MaskedTask(), "hidden:", ""),
        (ClassifyTask(), "x 0.50: the text\ny", "the text"),
        (ChatTask(), "user: hi: you\nb", "hi: you"),
        (PreferenceTask(), "prompt: a\nb", "a"), (PrefixTask(), "a b -> c\nd", "a b"),
        (DigitsTask(), "x -> y", "x"),
    ):  # fmt: skip
        found = result(task, sample=sample)
        assert report.suggested_prompt(found) == prompt
    assert (
        report.how_to_write(found) == "python -m transformer_jax generate --model runs/x --prompt x"
    )


@dataclass(frozen=True, kw_only=True)
class EchoConfig(configs.AnyModelConfig):
    """A custom kind of model."""

    vocab_size: int = 7


@dataclass(frozen=True, kw_only=True)
class CountTask(Task):
    """A custom kind of task."""


@pytest.mark.usefixtures("registering")
@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("--model echo", f"EchoConfig (module {__name__})"),
        ("--task count", f"CountTask (module {__name__})"),
        ("--model echo --task count",
         f"EchoConfig (module {__name__}) and CountTask (module {__name__})"),
    ],
)  # fmt: skip
def test_training_report_names_module_defining_custom_kind(monkeypatch, capsys, argv, names):
    configs.register(configs.AnyModelConfig, echo=EchoConfig)
    configs.register(Task, count=CountTask)
    fake_training(monkeypatch)
    assert train.main([*argv.split(), "--out", "o", "--steps", "2"], "python train.py") == 0
    *_, command, note = capsys.readouterr().out.splitlines()
    assert command == "  python train.py --out o --resume --steps 4"
    assert note == f"These commands work only in a script that registers {names}."


def fake_training(monkeypatch):
    """Replace `fit` by a recorder; with seed 3 the run is interrupted. Return its calls."""
    calls = []

    def fit(config, **named):
        calls.append((config, named))
        stopped = config.seed == 3
        return SimpleNamespace(
            **vars(result(config.task, config=config, sample=""))
            | {"interrupted": stopped, "step": 7}
        )

    monkeypatch.setattr("transformer_jax.training.loop.fit", fit)
    monkeypatch.setattr(train, "keep_programs", lambda: None)
    monkeypatch.setattr(train, "how_to_write", lambda result: "WRITE")
    return calls


def test_training_output_ends_with_suggested_commands(monkeypatch, capsys):
    calls = fake_training(monkeypatch)
    for argv, status, expected in (
        ("--data f --steps 2 --out o", 0, [
            "To generate text, or to continue training:", "  WRITE",
            "  python train.py --out o --resume --steps 4"]),
        ("--task digits --out o --steps 1", 0, ["To continue training:"]),
        ("--data - --out o --seed 3", 143, [
            "stopped at step 7; to continue (TEXT: a file with the data from standard input):",
            "  python train.py --out o --resume < TEXT"]),
    ):  # fmt: skip
        assert train.main(argv.split(), "python train.py") == status
        printed = capsys.readouterr().out.splitlines()
        assert printed[-len(expected) :] == expected and (
            status or printed[-len(expected) - 1].startswith("in o")
        )
        _, named = calls.pop()
        assert (named["resume"], named["vocab_size"], named["stop"]()) == (False, None, False)
    monkeypatch.setattr("transformer_jax.training.processes.is_first", lambda: False)
    for seed, status in (("3", 143), ("4", 0)):
        assert train.main(["--data", "f", "--seed", seed], "python train.py") == status
        assert capsys.readouterr().out == ""


def test_serve_command_passes_flags_to_server(monkeypatch, capsys, tmp_path):
    import uvicorn

    from transformer_jax.server import app, engine

    monkeypatch.setattr(loading, "is_run", lambda model: True)
    monkeypatch.setattr(
        command.ModelOptions, "load", lambda options, **_: f"loaded {options.model}"
    )
    made, served = [], []

    def make(model, **named):
        made.append((model, named))
        return SimpleNamespace(slots=3, context=17, start=lambda: served.append("start"))

    monkeypatch.setattr(engine, "Engine", make)
    monkeypatch.setattr(app, "make_app", lambda engine, name, timeout: ("app", name, timeout))
    monkeypatch.setattr(uvicorn, "Config", lambda *given, **named: (given, named))
    run = lambda sockets: served.append([s.getsockname()[1] for s in sockets])  # noqa: E731
    monkeypatch.setattr(
        uvicorn, "Server", lambda config: served.append(config) or SimpleNamespace(run=run)
    )
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    folder = tmp_path / "a model"
    folder.mkdir()
    flags = "--slots 3 --context 17 --queue 5 --steps 6 --cache-dtype int8 --timeout 9".split()
    assert serve.main(["--model", str(folder), "--port", str(port), *flags]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "serve: compiling for 3 slots of 17 tokens",
        f"serve: a model at http://127.0.0.1:{port}/v1 (press Ctrl-C to stop)",
    ]
    given = dict(slots=3, context=17, queue=5, steps=6, cache_dtype="int8")
    assert made == [(f"loaded {folder}", given)]
    settings = dict(log_level="warning", timeout_graceful_shutdown=5)
    assert served == ["start", ((("app", "a model", 9.0),), settings), [port]]
    assert serve.main(["--model", "an/id", "--port", "0"]) == 0
    assert made[1][1] == dict(slots=8, context=None, queue=64, steps=4, cache_dtype=None)
    assert served[4][0] == (("app", "an/id", 600.0),)
    assert serve.main(["--model", "an/id", "--port", "0", "--name", "n"]) == 0
    assert served[7][0] == (("app", "n", 600.0),)
