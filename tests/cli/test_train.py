"""Training and generating from the command line: messages, exit statuses, signals and kills."""

import dataclasses
import inspect
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
import transformer_jax
import transformer_jax as tj
from tests.support.compilation import quick_environment
from tests.support.drawn import drawn
from tests.support.saved import arrays_of, largest_file
from tests.training.test_training import assert_same_state
from transformer_jax.__main__ import COMMANDS
from transformer_jax.__main__ import main as run_command
from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import saved_steps
from transformer_jax.checkpoints.run_folder import (
    RunFolder,
    config_from_json,
    config_to_json,
    locked,
    tokenizer_sha256,
)
from transformer_jax.cli import command, evaluate, generate, plan
from transformer_jax.cli.flags import spelled
from transformer_jax.cli.report import suggested_prompt, summary
from transformer_jax.cli.run_flags import FLAGS, configure, parse
from transformer_jax.config import MeshConfig, ModelConfig, Optimizer
from transformer_jax.config.positions import KINDS
from transformer_jax.config.tasks import TASKS, LanguageTask
from transformer_jax.decoding.completion import ExcludePadding, TextGenerator
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.models.factory import build, init_params
from transformer_jax.text.language_model import load
from transformer_jax.text.reading import MASKS
from transformer_jax.tokenizers.special import SpecialTokens
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer, WordTokenizer
from transformer_jax.training import loop as training
from transformer_jax.training import progress
from transformer_jax.training.data import DataError
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks.language import LanguageWindows

ROOT = Path(train.__file__).parent
SMALL = (
    "--positions learned --d-model 14 --num-heads 2 --num-layers 1 --max-len 11 --use-bias False "
    "--batch-size 2 --warmup-steps 2"
)
TEXT = "to be or not to be that is the question\n" * 23


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def flags(tmp_path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT)
    files = f"--data {tmp_path / 'text.txt'} --out {tmp_path / 'run'}"
    return f"{SMALL} {files} --steps 8 --eval-every 4 --sample-tokens 9".split()


def configured(argv: list[str]) -> tuple[tj.TrainConfig, int | None]:
    """Return the config of these flags, and their vocabulary size."""
    return configure(parse(argv, None))


def refused(capsys, argv: list[str]) -> tuple[int, str]:
    """Return the exit status and the only line on stderr of a command that does not start."""
    status = train.main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return status, err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--learnig_rate 1", "--learnig_rate: no such flag; did you mean --learning-rate?"),
        ("--rope 3", "--rope: no such flag"),
        ("--steps -1", "steps is -1: must be positive"),
        ("--steps abc", "steps is 'abc': must be INTEGER"),
        ("--steps 1e3", "steps is '1e3': must be INTEGER"),
        ("--steps", "--steps: expected one argument"),
        ("--steps " + "9" * 5000, "must be INTEGER"),
        ("--learning-rate nan", "learning_rate is nan: must be a finite number"),
        ("--learning-rate=inf", "learning_rate is inf: must be a finite number"),
        ("--min-learning-rate 1", "min_learning_rate is 1.0: must not exceed learning_rate"),
        ("--dropout=False", "dropout is 'False': must be NUMBER"),
        ("--glu maybe", "glu is 'maybe': must be True|False"),
        (f"--seed {2**70}", "seed is 1180591620717411303424: must be at least 0"),
        ("--d-model 30 --num-heads 4", "num_heads is 4: must divide d_model 30"),
        ("--tokenizer letter", "tokenizer is 'letter': must be char|byte|bpe|word"),
        ("--positions learned --scaling linear",
         "scaling is 'linear': needs --model.positions rope, not learned"),
        ("--positions rope --scaling linaer",
         "scaling is 'linaer': must be None|linear|ntk|dynamic|llama3|yarn|lo"),
        ("--preset gtp2", "preset is 'gtp2': must be one of tiny, "),
        ("--preset gtp2", "; did you mean gpt2?"),
        ("--preset bert-base",
         "preset is 'bert-base': an encoder supports --task masked or classify, not language"),
        ("--preset=transformer-base --steps 3", "an encoder-decoder supports --task seq2seq or "),
        ("--help modle", "help is 'modle': must be all or one of run, "),
        ("--preset bert-large --help", "preset is 'bert-large': an encoder supports --task masked"),
        ("--positions rope --short-factors 1,x", "short_factors is 'x': must be NUMBER"),
        ("--positions rope --short-factors 1,2",
         "short_factors is (1.0, 2.0): needs scaling 'longrope'"),
        ("--context 9999", "context is 9999: must be at most the model's max_len"),
        ("stray", "unrecognized arguments: stray"),
        ("--kind encoder", "task is 'language': needs a decoder, but the model is of"),
        ("--data /nonexistent", "data is '/nonexistent': no such file or folder"),
        ("--vocab-size 3", "vocab_size is 3: must be at least"),
        ("--resume --out /nonexistent", "/nonexistent is not a run"),
        ("--resume --preset tiny", "preset cannot be used with resume"),
        ("--resume --model gru", "model cannot be used with resume"),
        ("--preset tiny --model gru", "pass only one of preset and model"),
        ("--model .",
         "model is '.': must be a kind of model; --init-from . starts from a run or a"),
        (
            "--model lstn",
            "model is 'lstn': must be one of transformer, lstm, gru, rnn, convolution, window, "
            "ngram",
        ),
        ("--model lstm --num-heads 3", "num_heads is '3': needs --model transformer, not lstm"),
        ("--model window --task masked", "model is 'window': task 'masked' needs another"),
        ("--task maskd", "task is 'maskd': must be language|masked|seq2seq|"),
        ("--task masked --documents lines", "documents is 'lines': needs --task language, not"),
        ("--task seq2seq",
         "data is 'python-docs': must be a file, which task 'seq2seq' reads line"),
        ("--task reverse --data x", "data is 'x': is not used: task 'reverse' makes its own"),
        ("--model ngram --steps 5",
         "steps is 5: must be 1, because an n-gram model is counted in one step"),
        ("--frozen embd", "frozen contains 'embd': no parameter name begins with it"),
    ],
)  # fmt: skip
def test_invalid_usage_prints_one_line_and_exits_with_2(
    capsys, tmp_path, monkeypatch, argv, message
):
    monkeypatch.chdir(tmp_path)
    status, line = refused(capsys, argv.split())
    assert message in line
    assert status == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"short", "a window of context 11 needs 12"),
        (b"\xef\xbb\xbf" + TEXT.encode() + b"\x80", "byte 923 is 0x80: must be UTF-8"),
    ],
)
def test_invalid_data_prints_one_line_and_exits_with_2(capsys, flags, tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    status, line = refused(capsys, flags)
    assert (status, message in line) == (2, True), line
    assert not (tmp_path / "run").exists()


def test_debug_flag_shows_traceback(flags):
    with pytest.raises(tj.ConfigError, match="steps is -1"):
        train.main([*flags, "--steps", "-1", "--debug"])


@pytest.mark.slow
def test_invalid_flag_prints_no_traceback():
    out = subprocess.run(
        [sys.executable, "train.py", "--learnig-rate", "1"], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "train.py: --learnig-rate: no such flag; did you mean --learning-rate?\n"


def test_every_config_field_has_flag():
    def flat(cls, *skipped):
        return {f.name for f in dataclasses.fields(cls)} - {*skipped}

    models = (
        tj.ModelConfig,
        tj.RecurrentConfig,
        tj.ConvolutionConfig,
        tj.WindowConfig,
        tj.NgramConfig,
    )
    expected = flat(tj.TrainConfig, "model").union(*map(flat, models)) - {"block"}  # only in Python
    inputs = tj.Patches, tj.Frames, tj.Vectors
    expected = expected.union(*map(flat, (*KINDS.values(), *TASKS.values(), *inputs)))
    optional = (
        MeshConfig,
        tj.LoraConfig,
        tj.Experts,
        tj.GatedDelta,
        tj.ShortConv,
        tj.LatentAttention,
    )
    expected = expected.union(*map(flat, (*get_args(Optimizer), *optional)))
    assert {path[-1] for path in FLAGS.fields} == expected
    argv = (
        "--positions rope --base 500 --scaling yarn --original-len 64 --factor 2 --glu True "
        "--use-bias=False --num_kv_heads 1 --window None --d-ff 99 --context 32 --data - "
        "--dtype bfloat16 --eval-batches 3 --min-learning-rate 1e-5"
    )
    config, vocab_size = configured(argv.split())
    rope = tj.Rope(base=500.0, scaling="yarn", original_len=64, factor=2.0)
    model = tj.ModelConfig(
        positions=rope, glu=True, use_bias=False, num_kv_heads=1, d_ff=99,
        dtype="bfloat16",
    )  # fmt: skip
    default = tj.train_preset(None)
    model = dataclasses.replace(
        model, **{n: getattr(default.model, n) for n in ("d_model", "num_layers", "max_len")}
    )
    model = dataclasses.replace(model, num_heads=default.model.num_heads)
    for name in ("positions", "glu", "use_bias", "num_kv_heads", "window", "d_ff", "dtype"):
        assert getattr(config.model, name) == getattr(model, name), name
    assert (config.context, config.data, config.eval_batches) == (32, "-", 3)
    assert config.min_learning_rate == 1e-5
    assert vocab_size is None


def test_pattern_of_mixers_is_read_from_flags_and_from_a_file():
    argv = "--data - --mixers gated_delta,attention --gated-delta gateddelta --num-key-heads 2"
    config, _ = configured(argv.split())
    assert config.model.mixers == ("gated_delta", "attention")
    assert config.model.gated_delta == tj.GatedDelta(num_key_heads=2)
    assert config_from_json(config_to_json(config)) == config
    with pytest.raises(tj.ConfigError, match=r"mixers is 'mamba': must be attention\|gated_delta"):
        configured("--data - --mixers attention,mamba".split())


def test_lora_subcommand_leaves_short_flags_for_model():
    first = configured(["--dropout", "0.25", "--positions", "rope", "--base", "500"])[0].model
    assert (first.dropout, first.positions.base) == (0.25, 500.0)
    given = {("lora",): "rank=4,targets=query,value,dropout=0.5,base=int8"}
    changes = FLAGS.read(given, tj.TrainConfig())
    assert {path[-1]: value for path, value in changes.items()} == {
        "lora": tj.LoraConfig, "rank": 4, "targets": ("query", "value"), "dropout": 0.5,
        "base": "int8",
    }  # fmt: skip
    with pytest.raises(
        tj.ConfigError, match=r"lora has 'rnak': must be one of rank, .*; did you mean rank\?"
    ):
        FLAGS.read({("lora",): "rnak=4"}, tj.TrainConfig())


def test_rope_factors_round_trip_through_run_folder(tmp_path):
    argv = (
        "--positions rope --head-dim 4 --scaling longrope --original-len 16 --length 32 "
        "--short-factors 1,1.25 --long_factors=2.5,3e0 --window 3,none --window-base 31 "
        "--pattern true,false"
    )
    config, _ = configured(argv.split())
    rope = config.model.positions
    assert (rope.short_factors, rope.long_factors) == ((1.0, 1.25), (2.5, 3.0))
    assert {type(factor) for factor in rope.short_factors + rope.long_factors} == {float}
    assert (config.model.window, rope.window_base) == ((3, None), 31.0)
    assert rope.pattern == (True, False)
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    config = dataclasses.replace(config, out=os.path.abspath(config.out))  # as in the file
    assert folder.read_config() == config and hash(folder.read_config()) == hash(config)


def test_table_and_norm_fields_have_flags():
    argv = "--positions learned --offset 2 --norm-unit-offset True --ff-bias False"
    model = configured([*argv.split(), "--logit-scale", "0.5"])[0].model
    assert (model.positions.offset, model.norm_unit_offset) == (2, True)
    assert (model.ff_bias, model.logit_scale) == (False, 0.5)
    argv = "--positions sinusoidal --layout halves"
    assert configured(argv.split())[0].model.positions.layout == "halves"
    argv = "--positions rope --scaling yarn --original-len 64 --truncate False"
    assert configured(argv.split())[0].model.positions.truncate is False


def test_flags_override_preset_fields():
    assert configured([]) == (tj.train_preset(None), None)
    config, vocab_size = configured("--data x.txt --preset=shakespeare-cpu --vocab-size 99".split())
    assert (config.model.d_model, config.model.max_len, config.data) == (128, 64, "x.txt")
    assert vocab_size == 99


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--preset", "shakespeare-gpu", "--help", "all"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert len(re.findall("^  --", out, re.MULTILINE)) <= 150
    for path in FLAGS.fields:
        own = path[:2] if path[0] == "model" else path[:1]
        flag = f"--{'.'.join(own).replace('_', '-')}"
        text = re.search(rf"^  {flag} (.*?)(?=^  --|\Z|\n\n)", out, re.MULTILINE | re.DOTALL)
        assert text, flag
        assert "[" in text[1], f"{flag} shows no default"
        if own != path:  # a field of a config in one word
            assert re.search(rf"\b{path[-1]}\b", text[1]), path
    assert "Number of optimizer steps. [5000]" in " ".join(out.split())
    assert "--preset" in out and "--resume" in out and "--debug" in out
    assert "gpt2-xl" in out and "bert-base" in out and "--model TEXT" in out


@pytest.mark.parametrize(("group", "others"), [(None, "model"), ("model", "run")])
def test_help_prints_one_group_and_lists_others(capsys, group, others):
    with pytest.raises(SystemExit):
        train.main(["--help", *filter(None, [group])])
    out = capsys.readouterr().out
    printed = re.findall(r"^  --([\w.-]+) ", out, re.MULTILINE)
    wanted = [path for path in FLAGS.fields if path[:-1] == (() if group is None else (group,))]
    flags = [".".join(path).replace("_", "-") for path in wanted]
    assert [name for name in printed if name in flags] == flags
    assert len(printed) - len(flags) == (8 if group is None else 0)  # --preset and others
    assert ("Tasks: language" in out) == (group is None)
    assert (inspect.getdoc(ModelConfig).partition("\n")[0] in " ".join(out.split())) == bool(group)
    named = (
        out.partition("--help GROUP those of a group:\n")[2].replace("\n", " ").strip().split(", ")
    )
    assert others in named and "optimizer" in named and (group or "run") not in named


@pytest.mark.slow
def test_printed_commands_run_successfully(capsys, flags, tmp_path):
    assert train.main(flags) == 0
    out = capsys.readouterr().out
    assert re.search(r"held-out loss: \d\.\d+ nats per character = \d\.\d+ bits", out)
    nats, bits = map(float, re.search(r"loss: (\S+) nats per character = (\S+)", out).groups())
    assert bits == pytest.approx(nats / np.log(2), abs=1e-3)
    assert (tmp_path / "run" / "sample.txt").read_text().strip("\n") in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  python")]
    assert len(commands) == 2
    assert commands[0].startswith("python -m transformer_jax generate --model ")
    assert commands[1].startswith("python train.py --out ")
    assert run_command([*shlex.split(commands[0])[3:], "--num-tokens", "5"]) == 0
    prompt = shlex.split(commands[0])[-1]
    written = capsys.readouterr().out
    assert written.startswith(prompt)
    assert len(written) == len(prompt) + 5 + 1
    assert train.main([*shlex.split(commands[1])[2:-1], "9"]) == 0
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == 9
    capsys.readouterr()
    status, line = refused(capsys, flags)
    assert status == 2
    assert "--resume continues it, --out FOLDER starts another" in line
    status, line = refused(
        capsys, ["--resume", "--out", flags[flags.index("--out") + 1], "--d-model", "16"]
    )
    assert status == 2
    assert "model.d_model: 14 -> 16" in line


def piped(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.slow
def test_resuming_run_requires_standard_input_again(capsys, flags, tmp_path, monkeypatch):
    """The printed command resumes if TEXT is the same text."""
    flags[flags.index("--data") + 1] = "-"
    flags += ["--sample-tokens", "0", "--steps", "50", "--eval-every", "50"]
    monkeypatch.setattr(progress, "progress_for_output", lambda: Signals(2, signal.SIGINT))
    piped(monkeypatch, TEXT)
    assert train.main(flags) == 130
    out = capsys.readouterr().out
    assert "to continue (TEXT: a file with the data from standard input):" in out
    *command, sign, name = shlex.split(out.splitlines()[-1])
    assert (command[:2], sign, name) == (["python", "train.py"], "<", "TEXT")
    piped(monkeypatch, "")
    assert refused(capsys, command[2:]) == (
        2, "train.py: data is '-': it is empty; pipe a text into the command\n",
    )  # fmt: skip
    piped(monkeypatch, TEXT)
    monkeypatch.setattr(progress, "progress_for_output", progress.Silent)
    assert train.main([*command[2:], "--steps", "5"]) == 0
    assert (
        "continue training (TEXT: a file with the data from standard input):"
        in capsys.readouterr().out
    )


def test_suggested_prompt_can_be_tokenized(tmp_path):
    def start(characters: str, sample: str) -> str:
        RunFolder(tmp_path).write_tokenizer(CharTokenizer.train(characters))
        config = SimpleNamespace(out=tmp_path, task=LanguageTask())
        return suggested_prompt(SimpleNamespace(sample=sample, config=config))

    assert start("to be or", "to be or to") == "to be or"
    assert start("emma\nava", "emma\nava\n") == "emma"
    assert start("Them", "") == "The"
    assert start("0123456789\n", "12\n3") == ""
    assert start("日本語です。", "日本語") == ""


def test_closed_stdout_does_not_stop_run(flags, tmp_path, monkeypatch):
    def fit(config, progress, **kwargs):
        for line in "one", "two":
            progress.say(line)
        return SimpleNamespace(
            config=config, sample="to be", val_loss_per_character=1.0, rejected=0,
            interrupted=False, unit="character", perplexity=2.0, accuracy=None, scores={},
        )  # fmt: skip

    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_tokenizer(ByteTokenizer())
    monkeypatch.setattr(training, "fit", fit)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert train.main(flags) == 0


@pytest.mark.parametrize(
    ("inherited", "status", "printed"),
    [("default_int_handler", -signal.SIGINT, ""), ("SIG_IGN", 0, "on\n")],
)
def test_interrupt_during_imports_prints_no_traceback(inherited, status, printed, tmp_path):
    """An ignored SIGINT, as in a shell's background job, stays ignored."""
    (tmp_path / "transformer_jax.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nprint('on')\nsys.exit()\n"
    )
    run = (
        f"import runpy, signal\nsignal.signal(signal.SIGINT, signal.{inherited})\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    )
    out = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True)
    assert (out.returncode, out.stdout, out.stderr) == (status, printed, "")


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        ("--help", 0, "generate ", ""),
        ("", 2, "", "usage: python -m transformer_jax COMMAND"),
        (
            "trian",
            2,
            "",
            f"transformer_jax: command is 'trian': must be {' or '.join(COMMANDS)}; "
            "did you mean train?\n",
        ),
        ("--version", 0, f"transformer_jax {transformer_jax.__version__}, jax {jax.__version__}",
         ""),
        ("train --help", 0, "usage: python -m transformer_jax train [--FLAG VALUE ...]", ""),
        ("train --steps -1", 2, "", "train: steps is -1: must be positive\n"),
        (
            "train --positions rotary",
            2,
            "",
            "train: model.positions is 'rotary': must be "
            "None|learned|sinusoidal|rope|shaw|t5buckets|alibi; did you mean rope?\n",
        ),
        ("convert --to x", 2, "", "convert: --model TEXT is required\n"),
        ("generate --modle x", 2, "", "generate: --modle: no such flag; did you mean --model?\n"),
        ("generate --help", 0, "usage: python -m transformer_jax generate [--FLAG VALUE ...]", ""),
        ("plan --target cpu --model x --preset gpt2", 2, "",
         "plan: pass only one of model and preset\n"),
        ("plan --target cpu --model x --out y", 2, "", "plan: pass only one of model and out"),
    ],
)  # fmt: skip
def test_first_argument_selects_command(capsys, argv, status, out, err):
    try:
        found = run_command(argv.split())
    except SystemExit as ended:
        found = ended.code
    printed = capsys.readouterr()
    assert found == status
    assert (out in printed.out, bool(printed.out)) == (True, bool(out))
    assert printed.err.startswith(err) and bool(printed.err) == bool(err)
    assert status == 0 or "usage" in err or printed.err.count("\n") == 1


def test_unknown_words_are_reported(capsys):
    words = SpecialTokens(WordTokenizer.train("a dog saw a cat"), ("mask",))
    command.report_unknown("generate", words, ["a cow saw", "a [MASK] cow or _"], MASKS)
    rule = "they are not among the words of the training text and are read as <unk>"
    assert capsys.readouterr() == ("", f"generate: unknown words: 2 ('cow', 'or'): {rule}\n")
    command.report_unknown("generate", words, ["a dog"])
    command.report_unknown("generate", ByteTokenizer(), ["a cow"])
    assert capsys.readouterr() == ("", "")


def test_not_implemented_error_prints_one_line(capsys):
    Write = dataclasses.make_dataclass("Write", ())

    def work(options):
        raise NotImplementedError("pallas: needs a GPU\nor a TPU")

    assert command.run(Write, [], work) == 2
    assert capsys.readouterr().err == "write: pallas: needs a GPU or a TPU\n"


class Signals(progress.Silent):
    """Progress that sends signals to this process at a step."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.at, self.numbers = step, numbers

    def step(self, step, loss, tokens_per_second):
        if step == self.at:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_checkpoint_and_stops_run(
    capsys, flags, tmp_path, monkeypatch, number, status
):
    flags += ["--steps", "50", "--eval-every", "50"]
    before = signal.getsignal(number)
    monkeypatch.setattr(progress, "progress_for_output", lambda: Signals(3, number))
    assert train.main(flags) == status
    assert signal.getsignal(number) is before
    (step,) = saved_steps(tmp_path / "run" / "checkpoints")
    assert step in (4, 5)  # the metrics of a step are shown while the next one runs
    checkpoint.verify(checkpoint.step_path(tmp_path / "run" / "checkpoints", step))
    out = capsys.readouterr().out
    assert f"stopped at step {step}; to continue:" in out
    assert "--resume" in out
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.slow
def test_run_without_evaluation_uses_last_checkpoint(capsys, flags, tmp_path, monkeypatch):
    """Without a best checkpoint, the last one is used, with a note."""
    monkeypatch.setattr(progress, "progress_for_output", lambda: Signals(1, signal.SIGTERM))
    assert train.main([*flags, "--eval-every", "8"]) == 143
    run, out = str(tmp_path / "run"), str(tmp_path / "made")
    (step,) = saved_steps(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    note = f"no checkpoint has been evaluated yet; using the last one, step {step}\n"
    arguments = ["--model", run, "--prompt", "to", "--num-tokens", "3"]
    assert generate.main(arguments) == 0
    printed = capsys.readouterr()
    assert (len(printed.out), printed.err) == (len("to") + 3 + 1, f"generate: {note}")
    assert generate.main([*arguments, "--checkpoint", "last"]) == 0
    assert capsys.readouterr() == (printed.out, "")
    assert generate.main([*arguments, "--checkpoint", "best"]) == 2
    assert "no checkpoint has been evaluated yet; use 'last'" in capsys.readouterr().err
    assert run_command(["convert", "--model", run, "--to", out]) == 0
    assert capsys.readouterr().err == f"convert: {note}"


@pytest.mark.slow
def test_training_output_begins_with_model_and_data_summary(capsys, flags, tmp_path):
    """Two lines before the first step; a resumed run adds its step."""
    assert train.main([*flags, "--sample-tokens", "0"]) == 0
    model, text, *_ = capsys.readouterr().out.splitlines()
    tokens = int(len(TEXT) * 0.9)
    letters = len(set(TEXT))
    params = fit_parameters(tmp_path / "run")
    assert model == f"model: {params:,} parameters, vocabulary of {letters}, on cpu"
    assert text == f"text: {tokens} tokens and {len(TEXT) - tokens} held out, 22 in a step"
    assert train.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [model, f"{text}, from step 8 on"]


def fit_parameters(run: Path) -> int:
    """Return the number of parameters that a run saved."""
    arrays = arrays_of(run / "checkpoints" / "step-00000008")
    return sum(array.size for name, array in arrays.items() if name.startswith("params:"))


def test_training_report_states_loss_unit():
    def report_lines(tokenizer: str) -> str:
        config = dataclasses.replace(tj.train_preset(None), tokenizer=tokenizer)
        task = SimpleNamespace(config=config, data=SimpleNamespace(val=range(8), val_characters=6))
        loss, unit = LanguageWindows.per_character(task, 1.5)
        result = SimpleNamespace(
            config=config, sample="", rejected=0, val_loss=1.5, val_loss_per_character=loss,
            unit=unit, perplexity=np.exp(1.5), accuracy=0.25, scores={"exact_match": 0.5},
        )  # fmt: skip
        return summary(result).splitlines()[:3]

    assert report_lines("byte")[0] == "held-out loss: 1.5000 nats per byte = 2.1640 bits"
    assert report_lines("char")[0] == "held-out loss: 2.0000 nats per character = 2.8854 bits"
    wanted = "perplexity 4.48 per token, accuracy 25.0%", "exact_match 0.5"
    assert tuple(report_lines("char")[1:]) == wanted


@pytest.mark.slow
def test_second_signal_stops_run_immediately(flags, tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    flags += ["--checkpoint-every", "2", "--steps", "50", "--eval-every", "50"]
    monkeypatch.setattr(os, "_exit", end)
    both = Signals(3, signal.SIGTERM, signal.SIGINT)
    monkeypatch.setattr(progress, "progress_for_output", lambda: both)
    with pytest.raises(Ended) as caught:
        train.main(flags)
    assert caught.value.args[0] in (130, 143)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]
    checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-00000002")


@pytest.mark.slow
def test_runtime_error_prints_one_line_and_exits_with_1(capsys, flags, tmp_path):
    blocked = list(flags)
    blocked[blocked.index("--out") + 1] = str(tmp_path / "text.txt" / "run")
    status, line = refused(capsys, blocked)
    assert status == 1
    assert "Not a directory" in line
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"):
        status, line = refused(capsys, flags)
    assert status == 1
    assert f"process {os.getpid()} is training here" in line


@pytest.mark.slow
@pytest.mark.long_except("2")
@pytest.mark.parametrize("kills", [2, 5])
def test_killed_training_loses_at_most_one_save_interval(flags, tmp_path, rng, kills):
    """A run that is killed several times equals an uninterrupted run."""
    kill_and_finish(flags, tmp_path, rng, kills)


def kill_and_finish(flags, tmp_path, rng, kills) -> int:
    """Kill a run `kills` times, finish and check it; return the number of kills during a save."""
    last = 110 + 20 * kills
    flags = [*flags, "--steps", f"{last}", "--eval-every", f"{last}", "--checkpoint-every", "1"]
    flags += ["--keep", "3", "--sample-tokens", "0", "--dropout", "0.1"]
    folder = tmp_path / "run" / "checkpoints"
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    reached = within_save = 0
    for _ in range(kills):
        resume = ["--resume"] if reached or (tmp_path / "run").exists() else []
        process = subprocess.Popen(
            [*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
            env=quick_environment(),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 240
            while process.poll() is None and (saved_steps(folder) or [0])[-1] <= reached:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 0.2)))
        finally:
            process.kill()
            _, err = process.communicate()
        within_save += any(folder.glob("*.tmp"))
        steps = saved_steps(folder)
        assert steps and steps[-1] > reached, err.decode()
        for step in steps:
            checkpoint.verify(checkpoint.step_path(folder, step))
        reached = steps[-1]
    assert reached < last
    config, _ = configured([*flags, "--resume"])
    rest = dataclasses.replace(config, checkpoint_every=100)
    finished = fit(rest, resume=True, vocab_size=config.model.vocab_size)
    whole = fit(dataclasses.replace(rest, out=str(tmp_path / "whole")))
    assert_same_state(finished.state, whole.state)
    assert finished.val_loss == whole.val_loss
    assert not list(folder.glob("*.tmp"))
    return within_save


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """A run with two evaluations; the first is the better one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    config, _ = configured(SMALL.split())
    out = str(folder / "run")
    config = dataclasses.replace(
        config, data=str(folder / "text.txt"), out=out, steps=4, eval_every=2, sample_tokens=0
    )
    fit(config)
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> str:
    """A run with untrained parameters, for options that are rejected."""
    config, tokenizer = configured(SMALL.split())[0], CharTokenizer.train(TEXT)
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    folder = RunFolder(tmp_path_factory.mktemp("begun") / "run")
    folder.path.mkdir()
    folder.write_config(dataclasses.replace(config, model=model))
    folder.write_tokenizer(tokenizer)
    known = {"tokenizer_sha256": tokenizer_sha256(tokenizer), "val_loss": 2.5}
    checkpoint.save(folder.checkpoints, 4, {"params": drawn(model)}, known)
    return str(folder.path)


def written(capsys, *argv: str) -> str:
    assert generate.main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_same_seed_generates_same_text(capsys, trained):
    arguments = ["--model", trained, "--prompt", "to be", "--num-tokens", "6"]
    first = written(capsys, *arguments)
    assert first.startswith("to be") and len(first) == 12
    assert written(capsys, *arguments) == first
    assert written(capsys, *arguments, "--seed", "1") != first
    greedy = written(capsys, *arguments, "--temperature", "0")
    assert greedy == written(capsys, *arguments, "--top-k", "1", "--seed", "5")
    assert greedy == f"to be{load(trained).generate('to be', 6)}\n"


@pytest.mark.parametrize("main", [train.main, plan.main, generate.main, evaluate.main])
def test_unencodable_characters_are_escaped(monkeypatch, main):
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors="strict")
        monkeypatch.setattr(sys, name, stream)
    flags = {plan.main: "--target", generate.main: "--prompt"}
    assert main([flags.get(main, "--data"), "n\u00e9\u05d0"]) == 2
    print("n\u00e9\u05d0", end="")  # as a command prints its input
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == rb"n\xe9\u05d0"


def test_prompts_are_split_only_at_line_ends(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes("\ufeffa\u2028b\x0bc\r\n\n\x85d\re\n".encode())
    assert generate._prompts(str(file)) == ["a\u2028b\x0bc", "\x85d", "e"]
    file.write_bytes(b"good\ncaf\xe9\n")
    with pytest.raises(DataError, match=f"^{file}: byte 8 is 0xe9: must be UTF-8"):
        generate._prompts(str(file))


@pytest.mark.slow
def test_every_decoding_method_generates_text(capsys, trained, tmp_path):
    base = ["--model", trained, "--num-tokens", "9", "--prompt", "to"]
    greedy = written(capsys, *base, "--temperature", "0")
    assert written(capsys, *base, "--temperature", "0", "--lookup", "3") == greedy
    assert written(capsys, *base, "--temperature", "0", "--cache-dtype", "int8") == greedy
    for kind in ("bf16", "int8", "int4"):  # rounded weights may give other letters
        generated = written(capsys, *base, "--temperature", "0", "--weights", kind)
        assert len(generated) == len(greedy)
    two = written(capsys, *base, "--temperature", "0", "--samples", "2")
    assert two == f"--- 1\n{greedy}--- 2\n{greedy}"
    (tmp_path / "prompts").write_text("to\n\nor\nto\n")
    texts = written(capsys, *base[:4], "--prompts", str(tmp_path / "prompts"),
                    "--temperature", "0", "--slots", "2")  # fmt: skip
    parts = sorted(texts.split("--- ")[1:])
    assert [part[:2] for part in parts] == ["1\n", "2\n", "3\n"]
    assert parts[0][2:] == parts[2][2:] == greedy and parts[1][2:].startswith("or")
    last = greedy.rstrip("\n")[-2:]
    cut = written(capsys, *base, "--temperature", "0", "--stop", last, "--stop", "zzz")
    assert cut == greedy[: greedy.index(last, 2)] + "\n"
    scores = [
        float(line.split()[2])
        for line in written(capsys, *base, "--beams", "4", "--samples", "3").splitlines()
        if line.startswith("--- score")
    ]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    forced = written(capsys, *base, "--force", "be t", "--ban", "n", "--no-repeat-ngram", "2")
    assert forced.startswith("tobe t") and "n" not in forced


@pytest.mark.slow
def test_prompt_may_resemble_flag_and_flags_may_contain_underscores(capsys, trained):
    names = {name: name for name in ("--prompt", "--top-k")}
    dashes = spelled(["--prompt", "-- to be", "--top_k=3", "-x"], names)
    assert dashes == ["--prompt", "-- to be", "--top-k=3", "-x"]
    assert written(capsys, "--model", trained, "--num-tokens", "3", "--top_k", "1")


@pytest.mark.slow
def test_best_and_last_checkpoint_are_distinguished(capsys, trained, tmp_path, monkeypatch):
    restored = []
    real = checkpoint.restore
    monkeypatch.setattr(
        checkpoint, "restore", lambda p, like: restored.append(p.name) or real(p, like)
    )
    folder = Path(trained) / "checkpoints"
    monkeypatch.setattr(checkpoint, "best_step", lambda folder: 2)
    for which in ("best", "last"):
        written(capsys, "--model", trained, "--num-tokens", "1", "--checkpoint", which)
    assert saved_steps(folder) == [2, 4]
    assert restored == ["step-00000002", "step-00000004"]


@pytest.mark.slow_except(
    "--min-p 2-min_p is 2.0: must be from 0 to 1-2", "--seed -1-seed is -1: must be at least 0-2",
    "--temprature 1---temprature*", "--top_kk=3---top_kk: no such flag; did you mean --top-k?-2",
)  # fmt: skip
@pytest.mark.parametrize(
    ("argv", "message", "status"),
    [
        ("--temperature -1", "temperature is -1.0: must be", 2),
        ("--temperature nan", "temperature is nan: must be", 2),
        ("--top-k 0", "top_k is 0: must be", 2),
        ("--top-p 2", "top_p is 2.0: must be", 2),
        ("--seed -1", "seed is -1: must be at least 0", 2),
        ("--prompt é", "character 0 is U+00E9 'é', which is not among the", 2),
        ("--model /nonexistent", "'/nonexistent': must be an existing folder", 1),
        ("--num-tokens many", "num_tokens is 'many': must be INTEGER", 2),
        ("--checkpoint first", "checkpoint is 'first': must be best|last", 2),
        ("--temprature 1", "--temprature: no such flag; did you mean --temperature?", 2),
        ("--top_kk=3", "--top_kk: no such flag; did you mean --top-k?", 2),
        ("--zzzzzz", "--zzzzzz: no such flag\n", 2),
        ("--min-p 2", "min_p is 2.0: must be from 0 to 1", 2),
        ("--typical-p nan", "typical_p is nan: must be", 2),
        ("--repetition-penalty 0", "repetition_penalty is 0.0: must be finite and above 0", 2),
        ("--no-repeat-ngram 0", "no_repeat_ngram is 0: must be an integer", 2),
        ("--ban é", "character 0 is U+00E9", 2),
        ("--stop=", "stop contains '': each must be a string", 2),
        ("--samples 2 --num-tokens 400", "num_tokens is 400: ", 2),
        ("--prompts /nonexistent", "/nonexistent", 1),
        ("--cache-dtype int4",
         "cache_dtype is 'int4': must be float32|bfloat16|int8; did you mean int8?", 2),
        ("--weights int3", "weights is 'int3': must be bf16|int8|int4", 2),
    ],
)  # fmt: skip
def test_invalid_option_raises_one_line_error(capsys, begun, argv, message, status):
    found = generate.main(["--model", begun, *argv.split()])
    out, err = capsys.readouterr()
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert message in err


def test_damaged_checkpoint_is_rejected(capsys, begun, tmp_path):
    shutil.copytree(begun, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("checkpoints/step-*"):
        file = largest_file(path, "params")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert generate.main(["--model", str(tmp_path / "copy")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "/params/" in err and " has the wrong SHA-256 checksum" in err


@pytest.mark.slow
def test_text_may_exceed_max_len(key):
    """Each token is the argmax of a full pass over the tokens that the model still sees."""
    config = tj.ModelConfig(vocab_size=29, d_model=14, num_heads=2, num_layers=1, max_len=11)
    params = jax.tree.map(lambda leaf: 7 * leaf, init_params(config, key))
    tokenizer = CharTokenizer("".join(chr(ord("A") + i) for i in range(29)))
    generator = TextGenerator(
        config, params, tokenizer, sampler=Sample(Temperature(0.0)), key=jax.random.key(0)
    )
    found = tokenizer.encode("".join(generator.complete("ABRA", 31))).tolist()
    seen, expected = tokenizer.encode("ABRA").tolist(), []
    model = build(config)
    logits = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])
    for _ in range(31):
        if len(seen) == 12:
            seen = seen[-5:]
        padded = np.zeros((1, 11), np.int32)
        padded[0, : len(seen)] = seen
        best = int(np.argmax(np.asarray(logits(jnp.asarray(padded)))[0, len(seen) - 1]))
        seen.append(best)
        expected.append(best)
    assert len(set(expected)) > 3
    assert found == expected


@pytest.mark.slow
def test_token_ids_outside_tokenizer_are_never_sampled(key):
    logits = jax.random.normal(key, (3, 17)).at[:, 11:].add(50.0)
    kept = ExcludePadding(11)(logits)
    assert np.isneginf(np.asarray(kept)[:, 11:]).all()
    np.testing.assert_array_equal(kept[:, :11], logits[:, :11])


def test_progress_without_terminal_prints_plain_lines(capsys):
    assert isinstance(progress.progress_for_output(), progress.Lines)
    lines = progress.Lines()
    lines.start(0, 40)
    for step in range(1, 41):
        lines.step(step, 3.25, None if step == 1 else 1234.5)
    lines.stop()
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 20
    assert "step 40/40  loss 3.2500  1,234 tokens/s  0:00 left" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_progress_on_terminal_is_shown_as_bar(monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    bar = progress.progress_for_output()
    assert isinstance(bar, progress.Bar)
    out = io.StringIO()
    bar._bar.live.console = Console(file=out, force_terminal=True, width=100)
    bar.start(0, 7)
    for step in range(1, 8):
        bar.step(step, 3.25, 1234.5)
    bar.say("held-out loss 2.5 [not markup]")
    bar.stop()
    for part in ("7/7", "loss 3.2500", "1,234 tokens/s", "left", "[not markup]"):
        assert part in out.getvalue()
