"""Sliding-window perplexity, continuations and multiple choice against plain NumPy."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace

import numpy as np
import pytest

import transformer_jax as tj
from tests.server.models import tiny
from tests.text.models import (
    CONFIG,
    LETTERS,
    chat,
    classes,
    logits_after,
    logits_of,
    masked,
    model_of,
    nats,
    pairs,
    plain,
    vectors,
)
from transformer_jax.decoding.samplers import Sample, Temperature, TopK, TopP
from transformer_jax.text import continuations, lm_eval
from transformer_jax.text.choices import Choices, Question, read_questions
from transformer_jax.text.continuations import ScoringRequest, score_requests, split_pair
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.tokenizers.utf8 import DataError

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT = "badcabfeedacefadedfaceheadbeadjackbike"


def sliding(model: LanguageModel, text: str, max_length: int, stride: int) -> list[float]:
    """-log p of each token, by the loop in Hugging Face's guide to fixed-length models.

    `max_length` there includes the token that is only predicted; our `window` counts the tokens
    that are read.
    """
    ids, found, before = LETTERS.encode(text), [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        row = ids[begin:end]
        losses = nats(logits_after(model, row)[:-1], row[1:])
        found += [*losses[-(end - before) :]]
        before = end
        if end == len(ids):
            return found
    raise AssertionError("no window reaches the end")


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("window", "stride"), [(7, 3), (7, 7), (16, 1), (5, 4)])
def test_sliding_window_perplexity_matches_hugging_face(window, stride, batch_size):
    expected = sliding(plain(), TEXT, window + 1, stride)
    found = plain().score(TEXT, window=window, stride=stride, batch_size=batch_size)
    assert found.num_tokens == len(TEXT) - 1 == len(expected)
    np.testing.assert_allclose(found.token_nats, expected, rtol=1e-5)
    # the mean over tokens, not the mean of the windows' means
    assert found.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(
        sum(expected) / math.log(2) / (len(TEXT) - 1), rel=1e-5
    )
    short = plain().score("bad", window=9, stride=9).nats  # shorter than a window
    assert short == pytest.approx(plain().score("bad").nats, rel=1e-5)


CONFIGS = {
    "plain": CONFIG,
    "windowed": replace(CONFIG, window=3, positions=tj.Rope(), max_len=48),
    "rope": replace(CONFIG, positions=tj.Rope(), logit_softcap=3.0, logit_bias=True),
    "recurrent": tj.RecurrentConfig(vocab_size=11, d_embed=5, d_hidden=7),
}
LONG, OTHER = "badcabfeed", "feedface"
"""Contexts that are shared by their continuations, which are shorter."""
PAIRS_OF_TEXTS = [
    (LONG, "cab"), (LONG, "c"), (LONG, "feed"), (LONG, "b"), (OTHER, "a"), ("c", "abba"),
    (OTHER, "beef"), ("cab", "bage"), (LONG, "cab"), ("cab", "feedfeed"),
]  # fmt: skip


def by_definition(model: LanguageModel, before, after) -> tuple[float, bool]:
    """log p of `after` options `before`, and whether each id is the likeliest, for one row."""
    ids = [*before, *after]
    logits = logits_after(model, ids[:-1])[len(before) - 1 :]
    return -nats(logits, after).sum(), bool((logits.argmax(-1) == after).all())


@pytest.mark.slow_except("plain-8")
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_continuation_scores_match_single_row_logits(name, batch_size):
    model = model_of(CONFIGS[name])
    likeliest = LETTERS.decode([int(logits_after(model, LETTERS.encode(OTHER))[-1].argmax())])
    pairs = [*PAIRS_OF_TEXTS, (OTHER, likeliest)]
    found = model.continuations(pairs, batch_size=batch_size)
    assert [one.num_tokens for one in found] == [len(text) for _, text in pairs]
    expected = [by_definition(model, *map(LETTERS.encode, pair)) for pair in pairs]
    np.testing.assert_allclose([one.log_prob for one in found], [p for p, _ in expected], rtol=1e-5)
    assert [one.is_likeliest for one in found] == [best for _, best in expected]
    assert found[-1].is_likeliest and not all(one.is_likeliest for one in found)


def test_shared_context_is_processed_once(monkeypatch):
    read = []

    def counted(config, params, prompts, lengths, *rest):
        read.append(np.asarray(lengths).tolist())
        return run(config, params, prompts, lengths, *rest)

    run = continuations._shared_program
    monkeypatch.setattr(continuations, "_shared_program", counted)
    monkeypatch.setattr(continuations, "_rows_program", None)
    plain().continuations([(LONG, "c"), (LONG, "ab"), (OTHER, "a"), (LONG, "b"), (OTHER, "feed")])
    assert read == [[10, 8]]
    monkeypatch.undo()
    monkeypatch.setattr(continuations, "_shared_program", None)
    # not shared: continuations longer than the context, and a context with a single continuation
    plain().continuations([("cab", "feedfeed"), ("cab", "b"), ("c", "abba")])


@pytest.mark.slow
def test_text_exceeding_max_length_is_truncated_at_start():
    ids = tuple(map(int, LETTERS.encode(TEXT)))
    requests = [
        ScoringRequest(ids, ids[:5]), ScoringRequest(ids, ids[:2]), ScoringRequest(ids, ids[:17]),
    ]  # fmt: skip
    for found, request in zip(score_requests(plain(), requests, 4), requests, strict=True):
        after = [*request.continuation]
        kept = ids[-(CONFIG.max_len + 1 - len(after)) :]
        assert found.log_prob == pytest.approx(by_definition(plain(), kept, after)[0], rel=1e-5)
    with pytest.raises(
        DataError, match=r"continuation has 18 tokens: must be at most max_len, 17$"
    ):
        score_requests(plain(), [ScoringRequest(ids, ids[:18])], 4)


def test_edit_that_requires_all_tokens_is_rejected_for_truncated_text():
    ids = tuple(map(int, LETTERS.encode(TEXT)))
    edit = {"embedding": lambda x: x - x.mean(axis=1, keepdims=True)}
    with pytest.raises(ValueError, match="needs all tokens of a sequence, but this call reads"):
        score_requests(plain().edited(edit), [ScoringRequest(ids, ids[:5])], 4)


def test_continuations_are_scored_with_the_edited_logits():
    def move(logits):  # of one letter
        return logits.at[..., 3].add(2.0)

    ids = tuple(map(int, LETTERS.encode("cab")))
    (found,) = score_requests(plain().edited({"logits": move}), [ScoringRequest(ids, (3, 1))], 4)
    wanted = 0.0
    for n, label in enumerate((3, 1)):
        logits = logits_of(plain(), [*ids, 3][: len(ids) + n])[-1].astype(np.float64)
        logits[3] += 2.0
        wanted += logits[label] - np.log(np.exp(logits).sum())
    assert found.log_prob == pytest.approx(wanted, rel=1e-5)


def test_trailing_context_spaces_belong_to_continuation():
    words = {"a": [1], "a b": [1, 2], "ab": [3], "": [], "a b c": [1, 2, 4]}
    assert split_pair(words.__getitem__, "a ", "b") == ([1], [2])
    assert split_pair(words.__getitem__, "a", " b") == ([1], [2])
    assert split_pair(words.__getitem__, "a b ", "c") == ([1, 2], [4])
    assert split_pair(words.__getitem__, "", "a b") == ([], [1, 2])
    assert split_pair(words.__getitem__, "a", "b") == ([3 - 2], [])  # one token spans both


BLANKS = CharTokenizer(" abcdefghij")
QUESTIONS = [
    {"context": "bad", "choices": ["c", "feedfeed", "b"], "answer": 1},
    {"context": "feed", "choices": ["ab", "beefbeef"], "answer": 0},
    {"context": "cab", "choices": ["bage", "a", "jk"], "answer": 2},
]


def shares(questions, model) -> list[float]:
    """Accuracies by log p, log p per character and log p per byte, as lm-eval defines them."""
    rights = []
    for question in questions:
        context, choices = model.tokenizer.encode(question["context"]), question["choices"]
        p = [by_definition(model, context, model.tokenizer.encode(one))[0] for one in choices]
        sizes = [1] * len(p), [len(one) for one in choices], [len(one.encode()) for one in choices]
        best = [int(np.argmax(np.array(p) / np.array(size, float))) for size in sizes]
        rights.append([one == question["answer"] for one in best])
    return np.mean(rights, axis=0).tolist()


@pytest.mark.slow
def test_choice_accuracies_match_lm_eval_definitions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n\n".join(map(json.dumps, QUESTIONS)) + "\n")
    expected = shares(QUESTIONS, plain())
    for questions in (QUESTIONS, str(file), file, read_questions(file)):
        found = plain().multiple_choice(questions, batch_size=3)
        each = found.accuracy, found.accuracy_per_character, found.accuracy_per_byte
        assert list(each) == expected
        assert repr(found).startswith("Choices(3 questions, accuracy=0.")
    for row, question in zip(found.log_probs, QUESTIONS, strict=True):
        pairs = [(question["context"], choice) for choice in question["choices"]]
        np.testing.assert_allclose(
            row, [one.log_prob for one in plain().continuations(pairs)], rtol=1e-5
        )


def test_accuracy_per_byte_counts_utf8_bytes():
    questions = (Question("a", ("bb", "éé"), 1), Question("a", ("bb", "c"), 0))
    found = Choices(questions, ((-3.0, -4.0), (-3.0, -2.0)))
    assert (found.accuracy, found.accuracy_per_character) == (0.0, 0.5)
    assert found.accuracy_per_byte == 1.0  # éé has -4/4, above -3/2


def test_nan_log_prob_makes_accuracy_nan():
    found = Choices((Question("a", ("b", "c"), 0),) * 2, ((-3.0, -4.0), (math.nan, math.nan)))
    assert math.isnan(found.accuracy) and math.isnan(found.accuracy_per_byte)


def test_unencodable_question_error_names_line(tmp_path):
    file = tmp_path / "q.jsonl"
    line = json.dumps(dict(context="a", choices=["b", "z"], answer=0))
    file.write_text(f"\n\n{line}\n")
    for questions in (file, read_questions(file)):
        with pytest.raises(DataError) as refused:
            plain().multiple_choice(questions)
        assert str(refused.value).startswith(f"{file}, line 3: character 1 is U+007A 'z'")


@pytest.mark.slow
def test_empty_context_is_replaced_by_begin_token():
    begun = model_of(replace(CONFIG, vocab_size=12), begin_id=11)
    after = LETTERS.encode("bad")
    for context, ids in (("", [11]), ("cab", [11, *LETTERS.encode("cab")])):
        (found,) = begun.continuations([(context, "bad")])
        assert found.log_prob == pytest.approx(by_definition(begun, ids, after)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plain().score("ab", window=0), "window is 0: must be an integer of at least 1"),
        (lambda: plain().score("ab", window=18), "window is 18: must be at most max_len, 17"),
        (lambda: plain().score("ab", window=5, stride=6), "stride is 6: must be at most window, 5"),
        (lambda: plain().score("ab", batch_size=0), "batch_size is 0: must be an integer of at l"),
        (lambda: pairs().score(("a", "b"), window=3), "window is 3: the target of a pair is sc"),
        (lambda: plain().continuations([("", "a")]), "context is '': must have a token, because"),
        (lambda: model_of(CONFIG, BLANKS).continuations([(" ", "a")]), "context is ' ': must have"),
        (lambda: plain().continuations([("a", "")]), "continuation is '': must add at least one"),
        (lambda: plain().continuations([("a", 3)]), r"pairs is \[\('a', 3\)\]: must be a list of"),
        (lambda: plain().continuations("ab"), "pairs is 'ab': must be a list of"),
        (lambda: plain().continuations([("z", "a")]), "character 0 is U.007A 'z', which is not"),
        (lambda: plain().continuations([("a", "b")], batch_size=0), "batch_size is 0: must be"),
        (lambda: masked().continuations([("a", "b")]), "continuations: .*'masked' fills masks:"),
        (lambda: pairs().multiple_choice(QUESTIONS), "multiple_choice: .*writes the target"),
        (lambda: classes().multiple_choice(QUESTIONS), "multiple_choice: .*predicts the class"),
        (lambda: chat().multiple_choice(QUESTIONS), "multiple_choice: .*answers messages"),
        (lambda: vectors().multiple_choice(QUESTIONS), "multiple_choice: .*writes no text"),
        (lambda: plain().multiple_choice([]), r"questions is \[\]: must be a file or a none"),
        (lambda: plain().multiple_choice([3]), r"questions\[0\]: the question is 3: must be"),
        (lambda: plain().multiple_choice([QUESTIONS[0] | {"context": "z"}]), r"questions\[0\]: ch"),
        (lambda: plain().multiple_choice("/no"), "choices is '/no': cannot be read .No such file"),
    ],
)  # fmt: skip
def test_invalid_scoring_arguments_raise_one_line_error(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("line", "message"), [
    ("[", "is not JSON"),
    ('{"context": "a", "answer": 0, "answer": 1, "choices": []}', "'answer' appears twice"),
    ("3", 'the question is 3: must be {"context": ...'),
    ('{"context": "a"}', "choices is missing: a question must have context, choices, answer"),
    ({"context": 3}, "context is 3: must be a string"),
    ({"choices": "ab"}, "choices is 'ab': must be two or more strings"),
    ({"choices": []}, "choices is (): must be two or more strings"),
    ({"choices": ["a"]}, "choices is ('a',): must be two or more strings"),
    ({"choices": ["a", ""]}, "choices[1] is '': must be a nonempty string"),
    ({"choices": ["a", 3]}, "choices[1] is 3: must be a nonempty string"),
    ({"choices": ["a", "b", "a"]}, "choices[2] is 'a': must differ from choices[0]"),
    ({"answer": 2}, "answer is 2: must be an index from 0 to 1"),
    ({"answer": -1}, "answer is -1: must be an index from 0 to 1"),
    ({"answer": True}, "answer is True: must be an index from 0 to 1"),
    ({"answer": "0"}, "answer is '0': must be an index from 0 to 1"),
    ({"label": 0}, "unknown field 'label': a question must have context, choices, answer"),
], ids=str)  # fmt: skip
def test_malformed_line_error_names_file_line_field_and_rule(tmp_path, line, message):
    good = {"context": "a", "choices": ["a", "b"], "answer": 0}
    text = line if isinstance(line, str) else json.dumps(good | line)
    file = tmp_path / "q.jsonl"
    file.write_text(f"{json.dumps(good)}\n\n{text}\n")
    with pytest.raises(DataError) as refused:
        read_questions(file)
    assert str(refused.value).startswith(
        (f"{file}, line 3: {message}", f"{file}, line 3 {message}")
    )
    assert "\n" not in str(refused.value)


def test_file_without_questions_is_rejected(tmp_path):
    (tmp_path / "q").write_text("\n \n")
    with pytest.raises(DataError, match=r"/q': the file contains no questions$"):
        read_questions(tmp_path / "q")


def test_rolling_windows_match_lm_eval_documentation():
    found = lm_eval.rolling_windows([*range(10)], 77, 4)
    assert [(one.context, one.continuation) for one in found] == [
        ((77,), (0, 1, 2, 3)), ((3,), (4, 5, 6, 7)), ((5, 6, 7), (8, 9)),
    ]  # fmt: skip
    assert lm_eval.rolling_windows([], 77, 4) == []
    assert lm_eval.rolling_windows([1], 77, 4) == [ScoringRequest((77,), (1,))]


def test_task_generation_kwargs_are_parsed():
    greedy = Sample(Temperature(0.0))
    assert lm_eval.read_generation({}, 256) == lm_eval.Generation((), 256, greedy)
    assert lm_eval.read_generation({"until": "a", "temperature": 0.0, "do_sample": False}, 7) == (
        lm_eval.Generation(("a",), 7, greedy)
    )
    options = {
        "until": ["a", "b", ""],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
    }
    drawn = Sample(Temperature(0.5), TopK(3), TopP(0.9))
    assert lm_eval.read_generation(options, 7) == lm_eval.Generation(("a", "b"), 5, drawn)
    assert lm_eval.read_generation(options | {"do_sample": False}, 7).sampler == greedy
    for wrong, message in (
        ({"do_sample": True}, "temperature is 0.0: must be above 0 if do_sample"),
        ({"num_beams": 3}, "generation_kwargs contain num_beams=3: must be until"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0: must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            lm_eval.read_generation(wrong, 7)


def test_text_is_truncated_at_earliest_stop_string():
    assert lm_eval.cut_at("the cat. sat", [". ", "c"]) == "the "
    assert lm_eval.cut_at("the cat. sat", ["t.", "cat"]) == "the ca"  # as lm-eval cuts it
    assert lm_eval.cut_at("the cat", []) == "the cat"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="it is installed")
def test_missing_lm_eval_error_explains_installation():
    with pytest.raises(
        ModuleNotFoundError, match=r"not installed: run pip install 'transf.*lm-eval"
    ):
        lm_eval.TransformerJaxLM(plain())


def test_chat_task_evaluates_published_model_answers(tmp_path):
    """The loss covers each answer and its end token; a file of messages needs task="chat"."""
    model, file = tiny(), tmp_path / "talks.jsonl"
    losses, lines = [], []
    for question, answer in (("bed", "feed"), ("cad", "ed"), ("a fee", "deaf")):
        talk = {"user": question, "assistant": answer}
        messages = [{"role": role, "content": text} for role, text in talk.items()]
        lines.append(json.dumps({"messages": messages}) + "\n")
        encode = model.tokenizer.encode
        ids = [*encode(f"u{question}"), 257, *encode(f"a{answer}"), 257]
        losses += [*nats(logits_after(model, ids[:-1]), ids[1:])[-len(answer) - 1 :]]
    file.write_text("".join(lines))
    found = model.evaluate(file, task="chat")
    assert found["nats_per_token"] == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(ValueError, match="line is a conversation: a decoder needs task chat"):
        model.evaluate(file)
    with pytest.raises(ValueError, match="task is 'pairs': must be chat"):
        model.evaluate(file, task="pairs")
    with pytest.raises(
        ValueError, match="task is 'chat': must be None for a run, which has its own"
    ):
        chat().evaluate(file, task="chat")
