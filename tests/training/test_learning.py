"""Every task is learnt by the models that fit it, to a stated mark, on examples never seen."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.test_training import assert_same_state
from transformer_jax.__main__ import main as run_command
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ModelConfig, RecurrentConfig, TrainConfig, WindowConfig
from transformer_jax.config.tasks import (
    ClassifyTask,
    CopyTask,
    MaskedTask,
    PrefixTask,
    ReverseTask,
    Seq2SeqTask,
)
from transformer_jax.training.loop import fit
from transformer_jax.training.progress import DecodingLine, Silent

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = dict(vocab_size=8, d_model=48, num_heads=4, num_layers=2, d_ff=96, max_len=24)


def recurrent(cell, **fields):
    return RecurrentConfig(cell=cell, **(dict(d_embed=24, d_hidden=48) | fields))


def translator(cell):
    return recurrent(cell, source_vocab_size=8, bidirectional=True, attention="additive")


MODELS = {
    "encoder-decoder": ModelConfig(kind="encoder-decoder", **{**SIZES, "num_layers": 1}),
    "decoder": ModelConfig(**SIZES),
    "encoder": ModelConfig(kind="encoder", positions="rope", **SIZES),
    "window": WindowConfig(context=12, d_embed=24, d_hidden=96),
    **{f"{cell} translator": translator(cell) for cell in ("rnn", "lstm", "gru")},
    **{cell: recurrent(cell, d_hidden=96) for cell in ("rnn", "lstm", "gru")},
    **{f"{cell} tagger": recurrent(cell, bidirectional=True) for cell in ("rnn", "lstm", "gru")},
}


def run(out, task, model, steps, **changes) -> TrainConfig:
    recipe = dict(
        batch_size=64, learning_rate=4e-3, warmup_steps=20, weight_decay=0.01, log_every=1000,
        eval_every=steps, checkpoint_every=steps, sample_tokens=0, seed=11,
    )  # fmt: skip
    fields = recipe | {"steps": steps} | changes
    return TrainConfig(task=task, model=MODELS[model], out=str(out / "run"), **fields)


STRINGS = dict(letters=5, min_length=1, max_length=4)
LEARNT = {
    "reverse encoder-decoder": (ReverseTask(**STRINGS), 100, {}),
    "reverse decoder": (ReverseTask(**STRINGS), 150, {}),
    "reverse gru translator": (ReverseTask(**STRINGS), 120, {}),
    "copy lstm translator": (CopyTask(**STRINGS), 150, {}),
    "copy rnn translator": (CopyTask(**STRINGS), 150, {}),
    "copy window": (CopyTask(**STRINGS), 100, {}),
}


@pytest.mark.slow_cases("copy rnn", "copy lstm", "reverse decoder")
@pytest.mark.parametrize("name", LEARNT)
def test_a_generated_task_is_learnt_to_99_of_100(tmp_path, name):
    """Write all of the 78 held-out strings right: one mistake is already more than 1 of 100."""
    task, steps, changes = LEARNT[name]
    result = fit(run(tmp_path, task, name.split(" ", 1)[1], steps, **changes))
    assert result.scores["exact_match"] >= 0.99
    assert result.scores["word_error_rate"] <= 0.01


@pytest.mark.slow_cases("rnn tagger", "gru tagger")
@pytest.mark.parametrize("model", ["encoder", "rnn tagger", "lstm tagger", "gru tagger"])
def test_hidden_letters_are_guessed_far_better_than_by_frequency(tmp_path, model):
    """The text repeats five words in random order: most hidden letters follow from the others."""
    words = np.random.default_rng(3).choice(["alpha", "bravo", "cargo", "delta", "eagle"], 3001)
    (tmp_path / "text.txt").write_text(" ".join(words))
    config = run(tmp_path, MaskedTask(), model, 120, data=str(tmp_path / "text.txt"))
    result = fit(replace(config, batch_size=32))
    from transformer_jax.training.tasks import load_task

    frequency = load_task(config).unigram
    assert frequency > 2.3
    assert result.val_loss < 0.5 * frequency
    assert result.accuracy > 0.7
    assert result.scores["pseudo_perplexity"] < np.exp(0.5 * frequency)


def labelled(tmp_path) -> str:
    """Write words of which one, somewhere, decides the label."""
    random = np.random.default_rng(5)
    lines = []
    for _ in range(1200):
        label = str(random.choice(["cat", "dog", "owl"]))
        words = [*random.choice(list("abdefg"), random.integers(2, 7)), label[0].upper()]
        lines.append(f"{label}\t{' '.join(random.permutation(words))}\n")
    (tmp_path / "labels.tsv").write_text("".join(lines))
    return str(tmp_path / "labels.tsv")


@pytest.mark.slow_cases("lstm", "rnn", "decoder")
@pytest.mark.parametrize("model", ["encoder", "decoder", "rnn", "lstm", "gru"])
def test_a_class_is_learnt_to_95_of_100(tmp_path, model):
    result = fit(run(tmp_path, ClassifyTask(), model, 150, data=labelled(tmp_path)))
    assert result.config.task.labels == ("cat", "dog", "owl")
    assert result.scores["accuracy"] >= 0.95
    assert result.scores["macro_f1"] >= 0.95


RESUMED = {
    "seq2seq": (Seq2SeqTask(judged=0), "gru translator"),
    "prefix": (PrefixTask(judged=0), "decoder"),
    "masked": (MaskedTask(), "encoder"),
    "classify": (ClassifyTask(), "encoder"),
    "reverse": (ReverseTask(judged=0, **STRINGS), "encoder-decoder"),
}


@pytest.mark.slow_cases("classify", "reverse", "seq2seq")
@pytest.mark.parametrize("name", RESUMED)
def test_every_task_goes_on_bit_for_bit(tmp_path, name):
    task, model = RESUMED[name]
    data = {} if name == "reverse" else {"data": labelled(tmp_path)}
    config = run(tmp_path, task, model, 6, batch_size=8, **data)
    config = replace(config, eval_every=3, checkpoint_every=3, warmup_steps=2)
    whole = fit(replace(config, out=str(tmp_path / "whole")))
    left = iter([False, False, False, True])
    assert fit(config, stop=lambda: next(left)).interrupted
    again = fit(config, resume=True)
    assert_same_state(again.state, whole.state)
    assert (again.val_loss, again.accuracy) == (whole.val_loss, whole.accuracy)


def test_a_model_of_pairs_translates_lines_and_is_judged_on_a_file(tmp_path, capsys, monkeypatch):
    """Use the run's folder alone, by the commands that a user types."""
    told: list[tuple[int, int]] = []

    class Told(Silent):
        def decoded(self, done, total):
            told.append((done, total))

    monkeypatch.setattr(DecodingLine, "__call__", lambda self, *counts: told.append(counts))
    model = MODELS["gru translator"]
    config = run(tmp_path, ReverseTask(**STRINGS), "gru translator", 120)
    assert model is config.model
    fit(config, progress=Told())
    total = told[0][1]
    assert total > 32 and told == [(n, total) for n in [*range(0, total, 32), total]]
    told.clear()
    (tmp_path / "lines.txt").write_text("abcd\nedc\na\n")
    folder = ["--run", config.out]
    assert run_command(["generate", *folder, "--prompts", str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out == "dcba\ncde\na\n"
    assert run_command(["generate", *folder, "--prompt", "bad", "--beams", "3"]) == 0
    assert capsys.readouterr().out == "dab\n"
    (tmp_path / "pairs.tsv").write_text("abcd\tdcba\nedc\tcde\nab\tab\nb\tb\n")
    judged = ["evaluate", *folder, "--data", str(tmp_path / "pairs.tsv"), "--json"]
    assert run_command(judged) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact_match"] == 0.75
    assert told == [(0, 4), (4, 4)]
    assert found["perplexity"] == pytest.approx(np.exp(found["nats_per_token"]))
    for argv, message in (
        (["--prompt", "xyz"], "character 0 is U+0078 'x': not among the 5 characters"),
        (["--prompt", "ab", "--top-k", "3"], "top_k is 3: a run of task 'reverse' reads prompt,"),
        ([], "prompt is '': a run of task 'reverse' needs one, or prompts"),
    ):
        assert run_command(["generate", *folder, *argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("generate: ") and message in err and err.count("\n") == 1


def test_a_masked_model_becomes_a_classifier_with_a_new_head(tmp_path, capsys):
    data = labelled(tmp_path)
    text, lines = tmp_path / "text.txt", Path(data).read_text().splitlines()
    text.write_text("".join(line.split("\t")[1] + "\n" for line in lines))
    masked = run(tmp_path, MaskedTask(), "encoder", 2, data=str(text))
    before = fit(replace(masked, batch_size=8))
    said = []

    class Said:
        start = step = stop = staticmethod(lambda *given: None)
        say = staticmethod(said.append)

    config = replace(
        masked, task=ClassifyTask(), model=before.config.model, data=data, init_from=masked.out,
        tokenizer="pretrained", out=str(tmp_path / "classes"), frozen=("encoder", "embed/tokens"),
        batch_size=8,
    )  # fmt: skip
    after = fit(config, progress=Said())
    (new,) = [line for line in said if line.startswith("new parameters: ")]
    assert "classifier/kernel" in new and "pooler/bias" in new and "embed/tokens[12:]" in new
    old, now = before.state.params, after.state.params
    assert_same_state(now["encoder"], old["encoder"])
    assert np.array_equal(now["embed"]["tokens"][:12], old["embed"]["tokens"])
    assert RunFolder(Path(config.out)).read_config() == after.config
    assert run_command(["generate", "--run", config.out, "--prompt", "a b"]) == 0
    label, probability = capsys.readouterr().out.split()
    assert label in ("cat", "dog", "owl") and 1 / 3 <= float(probability) <= 1
    assert run_command(["generate", "--run", masked.out, "--prompt", "a _ b"]) == 0
    filled = capsys.readouterr().out.rstrip("\n")
    assert len(filled) == 5 and filled.startswith("a ") and filled.endswith(" b")
