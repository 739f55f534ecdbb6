"""Samples and metrics of a task on held-out examples, with predefined answers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lectures.test_continuous_tasks import small
from transformer_jax.attention.masks import Causal, Prefix
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    DigitsTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
    TonesTask,
)
from transformer_jax.decoding.beams import LengthPenalty
from transformer_jax.lectures import continuous
from transformer_jax.lectures.signals import DIGITS
from transformer_jax.models.factory import build
from transformer_jax.tokenizers.special import special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE
from transformer_jax.training.rows import Rows
from transformer_jax.training.tasks import (
    answers,
    chat,
    classify,
    load_task,
    masked,
    pairs,
    preferences,
)
from transformer_jax.training.tasks.task import RowsTask, Tokenizers

PARAMS = {"of": "a model that is never run"}
SIZES = dict(d_model=4, num_heads=1, num_layers=1)
WRITER = ModelConfig(kind="encoder-decoder", max_len=40, **SIZES)
READER = ModelConfig(kind="encoder", max_len=40, **SIZES)


@pytest.fixture
def of(tmp_path):
    """Load a task with a separate held-out file."""

    def load(task, model, train="", held_out="", **changes):
        files = {"data": train, "val_data": held_out}
        args = {name: str(tmp_path / name) for name, text in files.items() if text}
        for name in args:
            (tmp_path / name).write_text(files[name])
        return load_task(TrainConfig(task=task, model=model, **args, **changes))

    return load


def test_pair_sample_shows_references_and_is_scored_by_first(of, monkeypatch):
    task = of(Seq2SeqTask(judged=3), WRITER, "a\tx y\nb\tz\n", "a\tx y\nb\tz\na b\ty z\nb a\tz x\n")
    written, calls = {"a": "x y", "b": "y", "a b": "y z", "b a": "z"}, []

    def answer(config, tokenizers, params, sources, **args):
        assert (config, tokenizers, params) == (task.config, task.tokenizers, PARAMS)
        calls.append((sources, args))
        return [written[source] for source in sources]

    monkeypatch.setattr(pairs, "answer_sources", answer)
    assert task.sample(PARAMS) == (
        "a -> x y\nb -> y   (wanted: z)\na b -> y z\nb a -> z   (wanted: z x)"
    )
    report, edited = print, task.edited({"embedding": abs})
    found = edited.judge(PARAMS, report)
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["word_error_rate"] == pytest.approx(1 / 5)
    assert calls == [
        (["a", "b", "a b", "b a"], {}),
        (["a", "b", "a b"], {"report": report, "model": edited.model}),
    ]
    assert edited.model.edits and not task.model.edits


TALKS = [
    [("user", "hi"), ("assistant", "ho")],
    [("system", "be"), ("user", "yo"), ("assistant", "he"), ("user", "bo"), ("assistant", "no")],
]


def test_chat_and_preference_samples_show_first_answers(of, monkeypatch):
    calls = []

    def answer(config, tokenizers, params, messages, number, num_tokens, what=None):
        calls.append((messages, number, num_tokens, what))
        return f"answer {number}"

    monkeypatch.setattr(chat, "answer_messages", answer)
    monkeypatch.setattr(preferences, "answer_messages", answer)
    output = [[dict(role=role, content=text) for role, text in talk] for talk in TALKS]
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in output)
    model = ModelConfig(max_len=60, **SIZES)
    task = of(ChatTask(), model, lines, lines, sample_tokens=17)
    assert task.sample(PARAMS) == (
        "user: hi\nassistant: answer 0\nsystem: be\nuser: yo\nassistant: answer 1"
    )
    assert calls == [(output[0][:1], 0, 17, None), (output[1][:2], 1, 17, None)]
    calls.clear()
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "b", "chosen": "c", "rejected": "a"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    task = of(PreferenceTask(), model, lines, lines, sample_tokens=5)
    assert task.sample(PARAMS) == "prompt: a\nanswer: answer 0\nprompt: b\nanswer: answer 1"
    assert calls == [(name, n, 5, preferences.PROMPT_HAS) for n, name in enumerate("ab")]


def test_predicted_class_is_argmax_of_logits(of, monkeypatch):
    held_out = "x\tab\ny\tb\nz\tba\nx\tbb\nx\ta\n"
    train = "x\tab\ny\tb\nz\tba\n"
    logits = np.log(np.array([
        [7, 2, 1], [6, 3, 1], [1, 1, 8], [5, 3, 2], [1, 8, 1], [0.1, 0.1, 9.8]
    ]) / 10)  # fmt: skip
    seen = []
    for model in (READER, ModelConfig(max_len=40, **SIZES)):
        task = of(ClassifyTask(), model, train, held_out, batch_size=2)
        rows = iter(logits[:5])
        seen.clear()

        def args(model, params, batch, columns, rows=rows):
            seen.append((batch, columns, model))
            return np.stack([next(rows, np.zeros(3)) for _ in range(2)] + [np.zeros(3)])

        monkeypatch.setattr(classify, "_class_logits", args)
        assert task.judge(PARAMS) == {
            "accuracy": 3 / 5, "macro_f1": pytest.approx((2 / 3 + 0 + 1) / 3),
            "confusion x as y": 1.0, "confusion y as x": 1.0,
        }  # fmt: skip
        assert [batch.tokens.shape[0] for batch, *_ in seen] == [3, 3, 3]
        ids = special_ids(task.tokenizers.tokenizer)
        batch, columns, built = seen[2]  # a text, a filler row, and the longest text
        assert built == build(task.config.model)
        if model is READER:
            assert columns is None and batch.labels.tolist() == [0, IGNORE, IGNORE]
            length = 2 if ids.get("sep") is None else 3
            assert batch.valid.sum(1)[0] == length and batch.valid[1].sum() > length - 1
        else:
            assert columns.tolist() == [ids[f"label:{name}"] for name in "xyz"]
            assert (batch.labels != IGNORE).sum(1).tolist() == [1, 0, 0]
            assert batch.tokens[0, 1] == ids["cls"] and batch.labels[0, 1] == columns[0]
        rows = iter(logits)
        monkeypatch.setattr(classify, "_class_logits", lambda *g, rows=rows: np.stack([next(rows)]))
        edited = task.edited({"embedding": abs})
        assert edited.judge(PARAMS)["accuracy"] == 3 / 5  # one text at a time
        args = task.config, task.tokenizers, PARAMS, ["ab"]
        sample = classify.label_texts(*args, edited.model)
        assert sample == [("z", pytest.approx(0.98))]


def test_classification_sample_shows_texts_with_classes(of, monkeypatch):
    task = of(ClassifyTask(), READER, "x\tab\ny\tb\n", "x\tab\ny\tb\n")
    output = lambda *args: [("x", 0.756), ("x", 0.5)]  # noqa: E731
    monkeypatch.setattr(classify, "label_texts", output)
    assert task.sample(PARAMS) == "x 0.76: ab\nx 0.50 (wanted: y): b"


def test_signal_tasks_are_scored_by_letters_and_classes(monkeypatch):
    config = small(TonesTask(examples=9, judged=3), val_fraction=0.5)
    task, calls, report = load_task(config), [], print
    edited = task.edited({"embedding": abs})
    wanted = [signal.target for signal in task.signals]
    longest = max(map(len, wanted))

    def write(config, tokenizers, params, sources, **args):
        calls.append(args)
        assert all(a is b.values for a, b in zip(sources, task.signals, strict=False))
        return [wanted[0] + "a", *wanted[1 : len(sources)]]

    monkeypatch.setattr(continuous, "answer_sources", write)
    found = edited.judge(PARAMS, report)
    letters = sum(map(len, wanted[:3]))
    assert found == {"exact_match": 2 / 3, "letter_error_rate": pytest.approx(1 / letters)}
    expected = dict(num_tokens=max(map(len, wanted[:3])) + 1, report=report, model=edited.model)
    assert calls == [expected]
    sample = [f"tones of {name} -> {name}" for name in wanted[:5]]
    sample[0] += f"a   (wanted: {wanted[0]})"
    assert task.sample(PARAMS) == "\n".join(sample)
    assert calls[1] == dict(num_tokens=longest + 1, report=None, model=task.model)

    task = load_task(small(DigitsTask(examples=9, judged=4), "encoder", val_fraction=0.5))
    right = [DIGITS.index(signal.target) for signal in task.signals]
    monkeypatch.setattr(continuous, "CLASSIFY_ROWS", 3)
    rows, sizes = iter([(right[0] + 1) % 10, *right[1:]] * 2), []

    def classes(model, params, pictures):
        sizes.append(len(pictures))
        return np.array([next(rows) for _ in pictures])

    monkeypatch.setattr(continuous, "_classes", classes)
    output = task.sample(PARAMS).splitlines()
    name = DIGITS[right[0]]
    article = "an" if name == "eight" else "a"
    assert output[0] == (
        f"picture of {article} {name} -> {DIGITS[(right[0] + 1) % 10]}   (wanted: {name})"
    )
    assert output[1].endswith(f"{DIGITS[right[1]]} -> {DIGITS[right[1]]}") and len(output) == 5
    assert sizes == [3, 2] and task.judge(PARAMS)["accuracy"] == 3 / 4


def test_masked_tokens_are_scored_one_at_a_time(of, monkeypatch):
    text = "abcdefgh" * 40
    task = of(MaskedTask(rate=0.4), READER, text, context=13, val_fraction=0.3)
    mask, length = task.masking.mask, task.length
    rows = []

    def score(model, params, batch):
        rows.extend(zip(batch.tokens, batch.labels, strict=True))
        counts = (batch.labels != IGNORE).sum()
        return np.array([counts * 0.5, counts, 0])

    monkeypatch.setattr(masked, "scored", score)
    assert task.judge(PARAMS) == {"pseudo_perplexity": pytest.approx(math.exp(0.5))}
    expected = [row for row in rows if (row[1] != IGNORE).any()]
    windows = min(masked.PSEUDO_WINDOWS, len(task.data.val) // length)
    assert len(expected) == windows * length
    for number, (tokens, labels) in enumerate(expected):
        (at,) = np.flatnonzero(labels != IGNORE)
        first = len(task.masking.frame.first)
        assert tokens[at] == mask and at == number % length + first
        window = task.data.val[number // length * length :][:length]
        whole = np.where(labels != IGNORE, labels, tokens)[first : first + length]
        np.testing.assert_array_equal(whole, window)
    guess = lambda model, params, tokens: np.eye(30)[np.zeros_like(tokens)]  # noqa: E731
    monkeypatch.setattr(masked, "_logits", guess)
    _, hidden, _, filled, _, sample = task.sample(PARAMS).split("\n")
    assert sample == task.tokenizers.tokenizer.decode(task.data.val[:length])
    assert "_" in hidden and len(hidden) == len(filled) == len(sample) == length
    for one, two, three in zip(hidden, filled, sample, strict=True):
        assert (one, two) == (("_", "a") if one == "_" else (three, three))


def test_counting_model_is_trained_on_document_rows():
    class TwoRows(RowsTask):
        pass

    tokens = np.array([[1, 2, 3, 0], [4, 0, 0, 0]])
    labels = np.array([[2, 3, 9, IGNORE], [8, IGNORE, IGNORE, IGNORE]])
    plain = Batch(tokens, labels)
    packed = Batch(
        np.array([[1, 2, 3, 4], [5, 0, 0, 0]]),
        np.array([[2, 7, 4, 8], [6, IGNORE, IGNORE, IGNORE]]),
        segments=np.array([[1, 1, 2, 2], [1, 0, 0, 0]]),
    )  # fmt: skip
    config = TrainConfig(batch_size=3, accumulation=2)
    task = TwoRows(config, None, "", Rows((plain, packed)), Rows((plain,)))
    found = [row.tolist() for row in task.documents()]
    assert found == [[1, 2, 3, 9], [4, 8], [1, 2, 7], [3, 4, 8], [5, 6]]
    assert task.tokens_per_step == 24
    assert task.described() == (
        f"rows: 2 of 4 tokens, 2 of 4 tokens; 2 held out; {Rows((plain, packed)).labels:,} labels"
    )


@pytest.fixture
def decoder(monkeypatch):
    """Replace the decoders with recorders that return the ids of `written`."""
    found = SimpleNamespace(calls=[], written=[[1, 2, 9], [3, -1, -1]])

    def keep(name, result):
        def call(*args, **kwargs):
            found.calls.append((name, args, kwargs))
            return result() if callable(result) else result

        monkeypatch.setattr(answers, name, call)

    keep("init_decode_state", "state")
    keep("_read_sources", "source state")
    step = SimpleNamespace(with_facts=lambda **kwargs: ("step", kwargs))
    keep("make_step", step)
    keep("generate", lambda: SimpleNamespace(rows=lambda: [np.array(x) for x in found.written]))
    best = lambda: SimpleNamespace(  # noqa: E731
        tokens=np.array([[[1, 2, 9], [2, 2, 9], [1, 1, 1]], [[3, 9, 0], [3, 3, 3], [0, 0, 0]]]),
        lengths=np.array([[3, 2, 0], [1, 3, 0]]), scores=np.array([[-0.5, -1.0, -9.0]] * 2),
    )  # fmt: skip
    keep("beam_search", best)
    return found


LETTERS = with_special_tokens(CharTokenizer("abcd"), ["sep", "eos"])


def test_decoder_generates_targets_after_sources(decoder):
    model = ModelConfig(vocab_size=6, max_len=20, **SIZES)
    config = TrainConfig(task=PrefixTask(bidirectional=False, beams=1), model=model, context=11)
    args = config, Tokenizers(LETTERS), PARAMS
    assert answers.answer_sources(*args, ["ab", "abcd"]) == ["bc", "d"]
    (_, state, _), (name, (step, params, prompt, memory), kwargs) = (
        next(call for call in decoder.calls if call[0] == one)
        for one in ("init_decode_state", "generate")
    )
    assert state == (model, PARAMS, 2, 11)
    assert (name, step, params, memory) == (
        "generate",
        ("step", {"apart": True}),
        PARAMS,
        "state",
    )
    assert prompt.tolist() == [[0, 1, 4, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert kwargs.pop("lengths").tolist() == [3, 5] and kwargs.pop("limits").tolist() == [9, 7]
    assert kwargs == dict(num_tokens=11, stop=(5,), processors=())
    decoder.calls.clear()
    decoder.written = [[1, 5, 5], [5, -1, -1]]
    assert answers.answer_sources(*args, ["ab", "abcd"], num_tokens=4) == ["b", ""]
    kwargs = decoder.calls[-1][2]
    assert kwargs["num_tokens"] == 4 and kwargs["limits"].tolist() == [4, 4]
    written = answers.answer_sources(*args, ["ab", "abcd"], beams=3)
    assert written == ["bc", "d"]
    kwargs = decoder.calls[-1][2]
    assert (kwargs["num_beams"], kwargs["length_penalty"]) == (3, LengthPenalty(1.0))
    scored = answers.Targets(*args).search("ab", beams=4, results=3, length_penalty=0.5)
    assert scored == [(-0.5, "bc"), (-1.0, "cc")]  # the last has no token
    kwargs = decoder.calls[-1][2]
    expected = kwargs["num_beams"], kwargs["num_results"], kwargs["length_penalty"]
    assert expected == (4, 3, LengthPenalty(0.5)) and kwargs["num_tokens"] == 11
    with pytest.raises(DataError, match="prompt is 'aaaaaaaaaaa': it has 12 tokens, but the"):
        answers.answer_sources(*args, ["a" * 11])
    assert answers.answer_sources(*args, ["a" * 10]) == ["b"]
    with pytest.raises(DataError, match="prompt is '': a source must have at least one token"):
        answers.answer_sources(*args, [""])


def test_encoder_decoder_generation_starts_as_in_training(decoder):
    letters = with_special_tokens(CharTokenizer("abcd"), ["bos", "eos"])
    model = ModelConfig(kind="encoder-decoder", vocab_size=6, max_len=20, **SIZES)
    config = TrainConfig(task=Seq2SeqTask(beams=2), model=model, context=7)
    assert answers.answer_sources(config, Tokenizers(letters), PARAMS, ["ab", "c"]) == ["d", "bc"]
    _, (built, params, rows, count, tokens, valid, dtype), _ = decoder.calls[-2]
    assert (built, params, rows, count, dtype) == (build(model), PARAMS, 2, 7, None)
    assert tokens[:, :3].tolist() == [[2, 0, 0], [0, 1, 0]]  # the shortest source comes first
    assert valid.sum(1).tolist() == [1, 2]
    name, (_, _, prompt, state), kwargs = decoder.calls[-1]
    assert (name, prompt.tolist(), state) == ("beam_search", [[4], [4]], "source state")
    assert (kwargs["num_beams"], kwargs["num_tokens"], kwargs["stop"]) == (2, 7, (5,))
    assert "lengths" not in kwargs and "limits" not in kwargs


def test_generation_sources_are_batched_by_length(monkeypatch):
    model = ModelConfig(vocab_size=6, max_len=99, **SIZES)
    config = TrainConfig(task=PrefixTask(), model=model)
    read, expected, edited = [], [], build(model).edited({"embedding": abs})

    def write(step, params, prompt, state, *, lengths, num_tokens, num_beams, **kwargs):
        read.append(lengths.tolist())
        assert (step, params, num_tokens, num_beams) == (edited_step, PARAMS, 8, 3)
        written = SimpleNamespace(scores=None, lengths=np.ones((len(lengths), 1), int))
        written.tokens = (lengths % 4)[:, None, None]
        return written

    edited_step = answers.PrefixStep(answers.make_step(edited).with_facts(apart=True).model)
    monkeypatch.setattr(answers, "beam_search", write)
    monkeypatch.setattr(answers, "BATCH", 4)
    sizes = [5, 1, 9, 3, 7, 2]
    args = config, Tokenizers(LETTERS), PARAMS, [np.zeros(n, np.int32) for n in sizes]
    more = dict(beams=3, num_tokens=8, model=edited)
    report = lambda *count: expected.append(count)  # noqa: E731
    assert answers.answer_sources(*args, report=report, **more) == ["abcd"[n % 4] for n in sizes]
    assert read == [[1, 2, 3, 5], [7, 9, 9, 9]] and expected == [(0, 6), (4, 6), (6, 6)]
    read.clear()
    answers.answer_sources(*args[:3], args[3][:3], **more)
    assert read == [[1, 5, 9]]  # a single batch is not padded


def test_prefix_prompt_is_processed_bidirectionally(monkeypatch):
    positions = np.array([[0, 1, 2, -1], [0, 1, 2, 3]])
    usual = lambda self, tokens, state, valid: {"positions": jnp.array(positions), "a": 1}  # noqa: E731
    monkeypatch.setattr(answers.ModelStep, "arguments", usual)
    step = answers.PrefixStep.__new__(answers.PrefixStep)
    args = step.arguments(np.zeros((2, 4)), None, None)
    mask, wanted = args["mask"], Causal() | Prefix(jnp.array([3, 4]))
    assert type(mask) is type(wanted) and args["a"] == 1
    one, two = jax.tree.leaves(mask), jax.tree.leaves(wanted)
    assert [np.asarray(x).tolist() for x in one] == [np.asarray(x).tolist() for x in two] != []
    assert "mask" not in step.arguments(np.zeros((2, 1)), None, None)
