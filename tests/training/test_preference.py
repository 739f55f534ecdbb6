"""Preferences between answers: the loss against NumPy, the data, and training runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.cli.report import summary
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.config.tasks import ChatTask, LanguageTask, PreferenceTask
from transformer_jax.loading import load_run
from transformer_jax.models.factory import build, init_params
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE
from transformer_jax.training.loop import fit
from transformer_jax.training.losses import label_scores
from transformer_jax.training.preference import preference_loss, preference_scores
from transformer_jax.training.tasks import load_task

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = ModelConfig(
    vocab_size=11, d_model=12, num_layers=1, num_heads=2, max_len=9, init_std=0.4, dropout=0.1
)
BETA = 0.3


def a_batch(rng, rows=3, length=7):
    tokens = rng.integers(0, 11, (rows, 2, length + 1))
    labels = tokens[..., 1:].copy()
    labels[..., :2] = IGNORE  # the prompt
    labels[0, 1, 5:] = IGNORE  # a shorter answer
    flat = rows, 2 * length
    return Batch(
        jnp.array(tokens[..., :-1].reshape(flat), jnp.int32),
        jnp.array(labels.reshape(flat), jnp.int32),
    )


def log_probs(params, batch):
    """Return the log-probability of each answer [B, 2], in float64, one row at a time."""
    rows = []
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        for half in range(2):
            one, target = tokens.reshape(2, -1)[half], np.asarray(labels).reshape(2, -1)[half]
            logits, _ = build(MODEL).apply({"params": params}, one[None])
            logits = np.asarray(logits[0], np.float64)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            rows.append(sum(logs[t, i] for t, i in enumerate(target) if i != IGNORE))
    return np.array(rows).reshape(-1, 2)


@pytest.mark.slow
@pytest.mark.long_except("3")
@pytest.mark.parametrize("chunk", [None, 3])
def test_preference_loss_matches_paper(rng, chunk):
    config = TrainConfig(model=MODEL, task=PreferenceTask(beta=BETA), loss_chunk=chunk)
    params, reference = (init_params(MODEL, jax.random.key(seed)) for seed in (0, 1))
    batch = a_batch(rng)
    rewards = BETA * (log_probs(params, batch) - log_probs(reference, batch))
    margins = rewards[:, 0] - rewards[:, 1]
    losses = np.log1p(np.exp(-margins))
    mean, pairs = preference_loss(config, BETA)(params, batch, None, reference)
    assert_near(mean, losses.mean(), 1e-5)
    assert float(pairs) == 3
    scores = preference_scores(config, BETA)(params, batch, reference)
    assert_near(scores, [losses.sum(), 3, (margins > 0).sum()], 1e-5)
    assert 0 < (margins > 0).sum() < 3


@pytest.mark.slow
def test_preference_loss_starts_at_log_2_and_separates_answers(rng):
    config = TrainConfig(model=MODEL, task=PreferenceTask(beta=BETA))
    params, batch = init_params(MODEL, jax.random.key(0)), a_batch(rng)
    loss = preference_loss(config, BETA)
    (mean, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, None, params)
    assert_near(mean, np.log(2), 1e-6)

    def margin(params):
        x, table, bias = build(MODEL).apply(
            {"params": params}, batch.tokens.reshape(6, -1), method="output_layer"
        )
        found, _ = label_scores(
            x, table, batch.labels.reshape(6, -1), chunk_size=7, logit_bias=bias,
            ignore_label=IGNORE,
        )  # fmt: skip
        found = found.sum(axis=1).reshape(3, 2)
        return (found[:, 0] - found[:, 1]).mean()

    wanted = jax.tree.map(lambda g: -BETA / 2 * g, jax.grad(margin)(params))
    found, wanted = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (grads, wanted)
    )
    assert_near(found, wanted, 1e-5)
    moved = jax.grad(lambda r: loss(params, batch, None, r)[0])(params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(moved))


@pytest.mark.slow
def test_chunked_log_probabilities_match_full_computation(rng):
    hidden = jnp.array(rng.normal(size=(2, 10, 4)), jnp.float32)
    table = jnp.array(rng.normal(size=(7, 4)), jnp.float32)
    labels = jnp.array(rng.integers(0, 7, (2, 10)), jnp.int32).at[0, 3:6].set(IGNORE)
    options = dict(softcap=2.0, logit_bias=jnp.arange(7.0), ignore_label=IGNORE)

    def total(hidden, size):
        return label_scores(hidden, table, labels, chunk_size=size, **options)[0].sum()

    (one, d_one), (two, d_two) = (jax.value_and_grad(total)(hidden, size) for size in (10, 3))
    assert_near(one, two, 1e-6)
    assert_near(d_one, d_two, 1e-6)
    logits = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T + np.arange(7)
    logits = 2 * np.tanh(logits / 2)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    flat = np.asarray(labels)
    picked = np.take_along_axis(logs, np.maximum(flat, 0)[..., None], -1)[..., 0]
    assert_near(one, picked[flat != IGNORE].sum(), 1e-5)
    each, _ = label_scores(hidden, table, labels, chunk_size=3, **options)
    assert_near(each, np.where(flat == IGNORE, 0, picked), 1e-5)


WORDS = ["to be", "or not", "that is", "the question", "a sea", "of troubles"]


def pairs_file(path, messages=False, count=60):
    """The preferred answer repeats the first letter of the prompt, the other one its last."""
    lines = []
    for i in range(count):
        prompt = WORDS[i % 6] + " " + WORDS[(i // 6) % 6]
        answers = prompt[0] * 3, prompt[-1] * 3
        if answers[0] == answers[1]:
            continue
        if messages:
            output = [[{"role": "assistant", "content": a}] for a in answers]
            values = [{"role": "user", "content": prompt}], *output
        else:
            values = prompt + ":", *answers
        lines.append(json.dumps(dict(zip(("prompt", "chosen", "rejected"), values, strict=True))))
    path.write_text("\n".join(lines) + "\n")


def a_base(tmp_path, task, num_layers=2):
    model = ModelConfig(
        d_model=32, num_layers=num_layers, num_heads=4, max_len=48, positions="rope"
    )
    config = TrainConfig(
        model=model, task=task, data=str(tmp_path / "base.txt"), out=str(tmp_path / "base"),
        steps=20, batch_size=4, eval_every=20, sample_tokens=0, warmup_steps=2,
    )  # fmt: skip
    text = "".join(f"{a} {b}: {a[0] * 3}\n" for a in WORDS for b in WORDS)
    if isinstance(task, ChatTask):
        text = "".join(
            json.dumps({"messages": [
                {"role": "user", "content": f"{a} {b}"}, {"role": "assistant", "content": a[0]}
            ]}) + "\n" for a in WORDS for b in WORDS
        )  # fmt: skip
    (tmp_path / "base.txt").write_text(text)
    fit(config)
    return config


def a_run(tmp_path, base, **changes):
    model = load_run(base.out).config
    start = fine_tuning(model, base.out, PreferenceTask(beta=0.5))
    return dataclasses.replace(start, **dict(
        data=str(tmp_path / "pairs.jsonl"), out=str(tmp_path / "run"), context=48, steps=60,
        batch_size=8, eval_every=60, learning_rate=2e-3, min_learning_rate=1e-4, warmup_steps=5,
        sample_tokens=4,
    ) | changes)  # fmt: skip


ADAPTERS = LoraConfig(rank=4, targets="all-linear")


@pytest.mark.long
@pytest.mark.parametrize(
    ("messages", "lora"),
    [
        (False, None),
        (True, ADAPTERS),
        (True, None),
        (False, ADAPTERS),
    ],
)
def test_preference_run_learns_preferred_answers(tmp_path, messages, lora):
    base = a_base(tmp_path, ChatTask() if messages else LanguageTask(documents="lines"))
    pairs_file(tmp_path / "pairs.jsonl", messages)
    rate = 2e-3 if lora is None else 1e-2
    result = fit(a_run(tmp_path, base, lora=lora, learning_rate=rate))
    assert result.accuracy == 1.0
    assert result.val_loss < 0.3  # starts at log 2 = 0.69
    assert result.perplexity is None  # the loss is per pair, not per token
    output = summary(result)
    assert (
        "nats per pair" in output and "100.0% of the pairs" in output and "perplexity" not in output
    )
    lines = (tmp_path / "run/sample.txt").read_text().splitlines()
    assert lines[0].startswith("user: " if messages else "prompt: ")
    assert lines[1].startswith("answer: ")
    assert load_run(tmp_path / "run").step == 60


@pytest.mark.slow
@pytest.mark.long_except("None")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.1)])
def test_resumed_preference_run_is_bit_identical(tmp_path, lora):
    base = a_base(tmp_path, LanguageTask(documents="lines"))
    pairs_file(tmp_path / "pairs.jsonl")
    config = a_run(tmp_path, base, steps=9, eval_every=9, sample_tokens=0, lora=lora,
                   checkpoint_every=4)  # fmt: skip
    whole = fit(dataclasses.replace(config, out=str(tmp_path / "whole")))
    calls = iter(range(100))
    assert fit(config, stop=lambda: next(calls) == 4).step == 5
    again = fit(config, resume=True)
    for one, two in zip(*(jax.tree.leaves(r.state.params) for r in (again, whole)), strict=True):
        assert_same_bits(one, two)
    assert again.val_loss == whole.val_loss != pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "chosen": "b"}', "line 2 lacks rejected: must be {"),
        ("[1]", "line 2 lacks prompt, chosen, rejected: must be {"),
        ("{", "line 2 is not JSON"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "b"}',
            "line 2: chosen and rejected are eq",
        ),
        (
            '{"prompt": "a", "chosen": "b", "rejected": 3}',
            "line 2: prompt is 'a': all three must be strings",
        ),
        ('{"prompt": "", "chosen": "b", "rejected": "t"}', "line 2: prompt has no tokens"),
        (
            json.dumps({"prompt": "a", "chosen": "b", "rejected": "t" * 90}),
            "line 2, rejected: it has 91 tokens, but a sequence has at most 48",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "cat", '
            '"content": "b"}], "rejected": [{"role": "assistant", "content": "t"}]}',
            "line 2, chosen: message 1 is",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "user", '
            '"content": "b"}], "rejected": [{"role": "assistant", "content": "t"}]}',
            "line 2: chosen: must be one message from the assistant",
        ),
    ],
)
def test_invalid_preference_pairs_raise_error(tmp_path, line, message):
    file = with_a_bad_pair(tmp_path, line)
    model = ModelConfig(d_model=32, num_layers=1, num_heads=4, max_len=48)
    with pytest.raises(DataError) as caught:
        load_task(TrainConfig(model=model, task=PreferenceTask(beta=0.5), data=str(file)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def with_a_bad_pair(folder, line):
    file = folder / "pairs.jsonl"
    pairs_file(file)
    lines = file.read_text().splitlines()
    lines[1] = line
    file.write_text("\n".join(lines))
    return file


@pytest.mark.slow
def test_invalid_preference_pairs_prevent_run_from_starting(tmp_path, base_of_lines):
    with_a_bad_pair(tmp_path, "[1]")
    with pytest.raises(DataError, match="line 2 lacks prompt, chosen, rejected"):
        fit(a_run(tmp_path, base_of_lines))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def base_of_lines(tmp_path_factory):
    return a_base(tmp_path_factory.mktemp("base"), LanguageTask(documents="lines"), 1)


@pytest.mark.slow
def test_incompatible_preference_settings_raise_error(tmp_path, base_of_lines):
    pairs_file(tmp_path / "pairs.jsonl")
    config = a_run(tmp_path, base_of_lines)
    with pytest.raises(ConfigError, match="init_from is None: must name the model that task 'pref"):
        fit(dataclasses.replace(config, init_from=None, tokenizer="char"))
