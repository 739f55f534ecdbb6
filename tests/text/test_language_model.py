"""LanguageModel: generation, scores and errors for each kind of model."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

import transformer_jax as tj
from tests.text.models import (
    CONFIG,
    KEY,
    LETTERS,
    TURNS,
    chat,
    classes,
    logits_after,
    logits_of,
    masked,
    model_of,
    nats,
    pairs,
    plain,
    preferred,
    prefix,
    run_of,
    vectors,
)
from transformer_jax.config import tasks
from transformer_jax.decoding.logit_processors import Force
from transformer_jax.text.scores import windows
from transformer_jax.tokenizers.special import special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
)
from transformer_jax.tokenizers.utf8 import DataError

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLANKS = WordTokenizer(("to", "be"))
"""A word tokenizer, which has no token for spaces."""


@pytest.mark.slow
def test_generate_selects_most_likely_tokens_until_stop_string():
    ids = list(LETTERS.encode("bad"))
    for _ in range(7):
        ids.append(int(logits_of(plain(), ids)[-1].argmax()))
    expected = LETTERS.decode(ids[3:])
    assert plain().generate("bad", 7) == expected == plain().generate("bad", 7, sampler=tj.Greedy())
    assert "".join(plain().generate("bad", 7, stream=True)) == expected
    end = expected[3:5]
    assert plain().generate("bad", 7, stop=end) == expected[: expected.index(end)]
    assert plain().generate("bad", 7, stop=None) == expected


@pytest.mark.slow
def test_list_of_prompts_matches_single_prompts():
    """Greedy and drawn, including a text that outgrows the model."""
    texts = ["bad", "a", "badcab" * 2]
    assert plain().generate(texts, 9) == [plain().generate(text, 9) for text in texts]
    drawn = [
        plain().generate(text, 9, sampler=tj.Sample(), key=jax.random.fold_in(KEY, n))
        for n, text in enumerate(texts)
    ]
    assert plain().generate(texts, 9, sampler=tj.Sample(), key=KEY, slots=2) == drawn


@pytest.mark.slow
def test_model_without_max_len_generates_list_of_texts():
    """The history of processors is sized for the texts, not for an unlimited model."""
    model = model_of(tj.RecurrentConfig(vocab_size=11, d_embed=5, d_hidden=7))
    options, texts = dict(processors=[tj.RepetitionPenalty(1.7)]), ["bad", "cabbage"]
    found = model.generate(texts, 9, **options)
    assert found == [model.generate(text, 9, **options) for text in texts]
    assert found != model.generate(texts, 9)


@pytest.mark.slow
def test_stream_yields_whole_characters_and_no_part_of_stop_string():
    model = model_of(replace(CONFIG, vocab_size=256), ByteTokenizer())
    forced = dict(processors=[Force(*"a€bcd".encode())], stream=True)
    assert list(model.generate("x", 7, **forced)) == ["a", "€", "b", "c", "d"]
    assert list(model.generate("x", 7, **forced, stop="cd")) == ["a", "€", "b"]
    assert list(model.generate("x", 7, **forced, stop="cx")) == ["a", "€", "b", "cd"]


def test_text_score_is_sum_of_log_probabilities():
    text = "badcabfeed"
    ids = LETTERS.encode(text)
    each = nats(logits_after(plain(), ids[:-1]), ids[1:])
    found = plain().score(text)
    assert "".join(found.tokens) == text[1:]
    assert found.token_nats == pytest.approx(each, rel=1e-5)
    assert (found.num_tokens, found.num_bytes) == (9, 9)  # the first has no context
    assert found.nats == pytest.approx(each.sum(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(each.mean()), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(each.sum() / math.log(2) / 9, rel=1e-5)
    assert [one.nats for one in plain().score([text, "ab"])] == [
        found.nats, plain().score("ab").nats
    ], "a list returns the same scores"  # fmt: skip


@pytest.mark.slow
def test_first_token_is_scored_after_begin_token():
    text = "badcabfeed"
    ids = LETTERS.encode(text)
    begun = model_of(replace(CONFIG, vocab_size=12), begin_id=11)
    each = nats(logits_of(begun, [11, *ids[:-1]]), ids)
    assert begun.score(text).nats == pytest.approx(each.sum(), rel=1e-5)
    assert begun.score(text).num_tokens == begun.score(text).num_bytes == 10


@pytest.mark.slow
def test_num_bytes_counts_only_scored_text():
    words = model_of(replace(CONFIG, vocab_size=4), WordTokenizer(("to", "be")))
    blanks = "  to be", "\u3000to be", " \nto be", "\t é be"
    assert words.score("to be").num_bytes == len(" be")
    warnings.filterwarnings("ignore", "unknown words")
    for text in ("zzz be", "é be", "to be", "\nto be", " z be", *blanks):
        first = text.removesuffix("be").rstrip(" ")
        first = text[: text.index("\n") + 1] if "\n" in text else first
        assert words.score(text).num_bytes == len(text.encode()) - len(first.encode())
    pair = run_of(tasks.PreferenceTask(), names=("eos",)).score(("", "feed"))
    assert (pair.num_tokens, pair.num_bytes) == (4, 3)  # "eed" and its end


def test_warning_about_unknown_words_names_the_line_of_the_caller():
    words = model_of(replace(CONFIG, vocab_size=4), WordTokenizer(("to", "be")))
    with pytest.warns(UserWarning, match=r"^unknown words: 1 \('cow'\)") as found:
        words.score("to cow")
    assert found[0].filename == __file__


@pytest.mark.slow
def test_unknown_words_in_prompt_trigger_warning():
    words = model_of(replace(CONFIG, vocab_size=4), WordTokenizer(("to", "be")))
    rule = r"unknown words: 2 \('a', 'cow'\): they are not among the words of the training text"
    calls = [
        lambda: words.generate("to a cow", 1), lambda: words.generate(["to", "a cow"], 1),
        lambda: words.generate("to a cow", 1, beams=2), lambda: words.search("to a cow", 1),
        lambda: words.score("to a cow"), lambda: words.score(["to be", "to a cow"]),
        lambda: words.inspect.attention("to a cow"),
        lambda: run_of(
            tasks.ClassifyTask(labels=("x", "y")), "encoder", ("cls",), base=words.tokenizer
        ).classify("to a cow"),
        lambda: run_of(tasks.MaskedTask(), "encoder", ("mask",), base=words.tokenizer).candidates(
            "to [MASK] a cow"
        ),
    ]  # fmt: skip
    for call in calls:
        with pytest.warns(UserWarning, match=f"^{rule} and are read as <unk>$") as found:
            call()
        assert {one.filename for one in found} == {__file__}
    with pytest.warns(UserWarning, match=f"^{rule} and are read as <unk>$"):
        exec("words.score('to a cow')", {"words": words})  # a caller without a module
    assert len(words.generate("to be", 1)) and words.score("to be").nats > 0  # no warning


@pytest.mark.slow
def test_beam_search_uses_four_beams_by_default():
    options = dict(results=4)
    assert plain().search("bad", 4, **options) == plain().search("bad", 4, beams=4, **options)
    with pytest.raises(ValueError, match="results"):
        plain().search("bad", 4, results=5)


@pytest.mark.slow
def test_prompt_with_max_length_is_processed_completely():
    prompt = "badcabfeedcabbage"
    assert len(prompt) == CONFIG.max_len
    expected = LETTERS.decode([int(logits_of(plain(), LETTERS.encode(prompt))[-1].argmax())])
    assert plain().generate(prompt, 1) == expected == plain().generate([prompt], 1)[0]


@pytest.mark.slow
def test_text_without_tokens_can_be_prompt_but_not_inspected():
    """Blanks have no tokens in a word tokenizer."""
    words = model_of(replace(CONFIG, vocab_size=4), BLANKS)
    assert words.read(" ").tolist() == words.read("").tolist() == words.read("\n").tolist() == [1]
    preferred = run_of(tasks.PreferenceTask(), names=("eos",), base=BLANKS)
    assert preferred.read(" ").tolist() == [1]
    classes = run_of(tasks.ClassifyTask(labels=("x", "y")), "encoder", ("cls",), base=BLANKS)
    for call in (words.inspect.attention, classes.inspect.attention, classes.classify):
        with pytest.raises(DataError, match="text is ' ': must have at least one token"):
            call(" ")


@pytest.mark.slow
def test_whitespace_text_with_tokens_is_classified():
    words = model_of(replace(CONFIG, vocab_size=4), BLANKS)
    assert words.generate(" \t", 4) == words.generate("\n", 4)
    base = CharTokenizer(" ab")
    classes = run_of(tasks.ClassifyTask(labels=("x", "y")), "encoder", ("cls",), base=base)
    assert classes.classify("  ")[0] in ("x", "y")
    assert classes.inspect.attention("  ").tokens == ["<cls>", " ", " "]


@pytest.mark.parametrize(("count", "first", "longest", "stride"), [
    (5, 1, 7, 3), (8, 1, 7, 3), (23, 1, 7, 3), (23, 3, 7, 7), (23, 1, 7, 1), (12, 9, 7, 2),
])  # fmt: skip
def test_evaluation_windows_score_each_label_once_with_enough_context(
    count, first, longest, stride
):
    ids = np.arange(100, 100 + count)
    found = {}
    for batch in windows(ids, first, longest, stride):
        (tokens,), (labels,) = batch.tokens, batch.labels
        for at in np.flatnonzero(labels >= 0):
            assert labels[at] not in found and (np.diff(tokens[: at + 1]) == 1).all()
            assert tokens[at] == labels[at] - 1
            found[int(labels[at])] = at + 1  # size of its context
    assert sorted(found) == list(range(100 + first, 100 + count))
    for label, before in found.items():
        everything = label - 100
        assert before == everything or longest - stride < before <= longest


@pytest.mark.slow
def test_long_text_is_scored_in_windows():
    text = "badcabfeed" * 3
    ids = LETTERS.encode(text)
    expected, done = [], 0
    for start in range(0, len(ids) - 1, 5):
        row = ids[start : start + 17 + 1]
        expected += [*nats(logits_of(plain(), row[:-1]), row[1:])[max(0, done - start) :]]
        done = start + len(row) - 1
        if done == len(ids) - 1:
            break
    found = plain().score(text, stride=5)
    assert found.token_nats == pytest.approx(expected, rel=1e-5)
    assert found.nats == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["badcafe", "ab"])
def test_text_shorter_than_window_is_evaluated_completely(tmp_path, text):
    model = run_of(tasks.LanguageTask())
    (tmp_path / "short.txt").write_text(text)
    score = model.score(text)  # all tokens except the first
    nats = model.evaluate(tmp_path / "short.txt")["nats_per_token"]
    assert nats == pytest.approx(score.nats / score.num_tokens, rel=1e-5)
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(
        DataError, match=r"short.txt': the number of tokens is 1, but must be at least 2$"
    ):
        model.evaluate(tmp_path / "short.txt")


@pytest.mark.slow
def test_attention_weights_are_labeled_with_tokens():
    found = plain().inspect.attention("badcab")
    assert found.tokens == list("badcab") and found.weights.shape == (2, 2, 6, 6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
    assert not np.triu(found.weights, 1).any()
    # The first token only attends to itself.
    assert (found.weights[:, :, 0, 0] == 1).all() and len(repr(found)) < 200


@pytest.mark.slow
def test_pairs_are_generated_scored_and_inspected():
    assert isinstance(pairs().generate("bad", 5), str)
    assert pairs().generate(["bad", "feed"], 5) == [pairs().generate(t, 5) for t in ("bad", "feed")]
    ids = special_ids(pairs().tokenizer)
    target = LETTERS.encode("feed")
    logits = logits_of(pairs(), [ids["bos"], *target], source=LETTERS.encode("bad")[None])
    found, each = pairs().score(("bad", "feed")), nats(logits, [*target, ids["eos"]])
    assert found.nats == pytest.approx(each.sum(), rel=1e-5)
    assert found.token_nats == pytest.approx(each, rel=1e-5)
    assert found.tokens == (*"feed", "<eos>")
    assert (found.num_tokens, found.num_bytes) == (5, 4)
    seen = pairs().inspect.attention(("bad", "feed"))
    assert seen.tokens == ["<bos>", *"feed"] and seen.source_tokens == list("bad")
    assert seen.weights.shape == (2, 2, 5, 5) and seen.cross.shape == (2, 2, 5, 3)
    np.testing.assert_allclose(seen.encoder.sum(-1), 1, rtol=1e-5)
    assert (seen.encoder > 0).all()


@pytest.mark.slow
def test_prefix_tokens_attend_to_entire_prefix():
    seen = prefix().inspect.attention(("bad", "feed"))
    assert seen.tokens == [*"bad", "<sep>", *"feed"]
    assert (seen.weights[:, :, :4, :4] > 0).all() and not seen.weights[:, :, :4, 4:].any()
    assert isinstance(prefix().generate("bad", 5), str)
    assert prefix().score(("bad", "feed")).num_tokens == 5


@pytest.mark.slow
def test_masked_tokens_are_filled_and_texts_classified():
    filled = masked().generate("b_d")
    assert (len(filled), filled[0], filled[2]) == (3, "b", "d")
    assert masked().generate(["b[MASK]d", "f_"])[0] == filled
    assert masked().inspect.attention("b_d").tokens == ["b", "<mask>", "d"]
    label, probability = classes().classify("bad")
    assert label in "xy" and 0.5 <= probability <= 1
    assert classes().classify(["bad", "a"])[0] == (label, pytest.approx(probability, rel=1e-5))
    assert classes().inspect.attention("bad").tokens == ["<cls>", *"bad"]


@pytest.mark.slow
def test_nan_logits_are_rejected():
    def broken(model):
        params = jax.tree.map(lambda x: x * np.nan, model.params)
        return replace(model, model=replace(model.model, params=params))

    for call in (broken(masked()).generate, broken(masked()).candidates):
        with pytest.raises(
            DataError, match=r"prompt is 'b_d': the largest logit of a mask is not finite"
        ):
            call("b_d")
    with pytest.raises(DataError, match="the logits of text 1 are not finite"):
        broken(classes()).classify("bad")


@pytest.mark.slow
def test_token_with_negative_infinity_logit_never_fills_mask():
    first, second = (text for text, _ in masked().candidates("b_d", count=2)[0])
    (at,) = LETTERS.encode(first)
    edit = {"logits": lambda x: x.at[..., at].set(-np.inf)}
    assert masked().edited(edit).generate("b_d") == f"b{second}d"
    assert first not in dict(masked().edited(edit).candidates("b_d")[0])


@pytest.mark.slow
def test_messages_are_answered_and_scored():
    ids, text = special_ids(chat().tokenizer), LETTERS.encode("bad")
    prompt = [ids["user"], *text, ids["assistant"]]
    first = int(logits_of(chat(), prompt)[-1].argmax())
    assert chat().chat("bad", 1) == chat().tokenizer.decode([first])
    assert chat().chat(TURNS[:1], 6) == chat().chat("bad", 6)
    assert "".join(chat().chat("bad", 6, stream=True)) == chat().chat("bad", 6)
    both = [TURNS[:1], [*TURNS, *TURNS[:1]]]
    assert chat().chat(both, 2) == [chat().chat(talk, 2) for talk in both]
    answer = [*LETTERS.encode("feed"), ids["eos"]]
    logits = logits_of(chat(), [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    found = chat().score(TURNS)
    assert found.nats == pytest.approx(nats(logits, answer).sum(), rel=1e-5)
    assert (found.num_tokens, found.num_bytes) == (5, 4)


@pytest.mark.slow
def test_preference_tuned_run_continues_text():
    assert isinstance(preferred().generate("bad", 3), str)
    assert preferred().score(("bad", "feed")).num_tokens == 5


def bad_message(*messages):
    return lambda: chat().chat(list(messages))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plain().generate("bad", 0), "num_tokens is 0: must be an integer of at least 1"),
        (lambda: plain().generate("bad", True), "num_tokens is True: must be"),
        (lambda: plain().generate("z"), "character 0 is U.007A 'z', which is not among"),
        (lambda: plain().generate("a", stop=""), "stop contains '': each must be a string of at"),
        (lambda: plain().generate("a", stop=[3]), "stop contains 3: each must be a string"),
        (lambda: plain().generate(5), "prompt is 5: must be a string or a list of strings"),
        (lambda: plain().generate([]), "prompt is an empty list"),
        (lambda: plain().generate(["a"], stream=True), "stream needs one prompt, not a list of 1"),
        (lambda: plain().generate("a", sampler=tj.Sample()), "key is None: .* draws random numb"),
        (lambda: plain().generate("a", key=KEY), "key is set, but sampler is None: needs"),
        (lambda: plain().generate("a", sampler=tj.Sample(), key=0), "key is 0: must be a single k"),
        (lambda: plain().generate("a", beams=2, stop="."),
         r"stop is .*: must not be set for a beam search, because it does not draw, stream or"),
        (lambda: plain().generate("a", sampler=0.7), r"sampler is 0.7: must be Greedy\(\) or"),
        (lambda: plain().generate("a", temperature=1), "use sampler=Sample"),
        (lambda: plain().generate("a", max_new_tokens=3), "use num_tokens"),
        (lambda: plain().edited({"block_9/residual": abs}).generate("a"),
         "no place is named 'block"),
        (lambda: plain().edited(abs).generate("a"),
         "edit is of type builtin_function_or_method: must be"),
        (lambda: plain().chat("bad"), r"chat: .*no chat template; .*generate\(TEXT\)$"),
        (lambda: plain().classify("bad"), r"classify: 'here' continues text: gener"),
        (lambda: plain().score(""), "text is '': must have at least two tokens"),
        (lambda: plain().score("a"), "text is 'a': must have at least two tokens"),
        (lambda: plain().score(("a", "b")), r"text is \('a', 'b'\): must be a string"),
        (lambda: plain().score("ab", stride=0), "stride is 0: must be an integer of at least 1"),
        (lambda: plain().score("ab", stride=18), "stride is 18: must be at most max_len, 17"),
        (lambda: plain().inspect.attention(""), "text is '': must have at least one token"),
        (lambda: plain().inspect.attention(("a", "b")), r"text is \('a', 'b'\): must be a str"),
        (lambda: plain().inspect.attention("a" * 18),
         "the text has 18 tokens: must be at most max_len, 17"),
        (lambda: plain().tokenizer.decode([11]), "ID 11 has no token: must be at least"),
        (lambda: pairs().generate(""), "prompt is '': a source must have at least one token"),
        (lambda: pairs().score("bad"), r"text is 'bad': must be \(source, target\)"),
        (lambda: pairs().inspect.attention(5), r"text is 5: must be \(source, target\)"),
        (lambda: pairs().chat("bad"), r"chat: .*writes the target of a source: generate\(SOURCE\)"),
        (lambda: pairs().generate("a", edit={}), r"no argument 'edit'; use .*model.edited\("),
        (lambda: plain().score("a", edit={}), r"no argument 'edit'; use .*model.edited\("),
        (lambda: plain().edited({"logits": abs}).save("x"), "save: the model is edited, and no"),
        (lambda: plain().save("x", family="llama"), "family is 'llama': 'here' is not a run;"),
        (lambda: masked().generate("bad"), r"prompt is 'bad': must have a \[MASK\]"),
        (lambda: masked().generate("b_", 3), "num_tokens is 3: .*each mask is filled"),
        (lambda: masked().score("bad"), "does not define the probability of a text; evaluate.FILE"),
        (lambda: classes().generate("bad"), r"generate: .*'classify' .*classify\(TEXT\)"),
        (lambda: classes().score("bad"), r"score: .*'classify' .*classify\(TEXT\)"),
        (lambda: classes().classify(""), "text is '': must have at least one token"),
        (lambda: chat().generate("bad"), r"generate: .*task 'chat' answers messages: chat\(TEXT\)"),
        (lambda: chat().score("bad"), "must be messages that end with one from the assistant"),
        (lambda: chat().score(TURNS[:1]), "the last message has role 'user': must be"),
        (lambda: chat().chat(TURNS), "messages end with a message from the assistant: must"),
        (lambda: chat().chat([]), r"messages is \[\]: must be a string or \[{"),
        (lambda: chat().chat({"role": "user"}), "messages is {'role': 'user'}: must be"),
        (lambda: chat().chat(""), r"messages\[0\] has content '': must not be empty"),
        (bad_message(5), r"messages\[0\] is 5: must be a string or"),
        (bad_message("a", {"role": "user"}), r"messages\[0\] is 'a': must be a string or"),
        (lambda: chat().chat("a", stream=True, samples=2), "pass only one of stream and samples"),
        (lambda: chat().chat(["a"], stream=True), "stream needs one prompt, not a list of 1"),
        (lambda: plain().generate("a", 3, samples=2), "samples is 2: needs a sampler that draws"),
        (lambda: chat().chat("a", 3, samples=2), "samples is 2: needs a sampler that draws"),
        (lambda: chat().chat("a", samples=1.5), "samples is 1.5: must be an integer of at least 1"),
        (lambda: chat().score([TURNS[0] | {"role": "pope"}, TURNS[1]]), "must have a role"),
        (lambda: chat().score([TURNS[0], TURNS[1] | {"content": ["a"]}]), "must be a string"),
        (lambda: chat().search("a", beams=2), r"search: .*task 'chat' answers messages: chat"),
        (lambda: masked().search("a", beams=2), r"search: .*task 'masked' fills masks"),
        (lambda: plain().candidates("b_"), r"candidates: 'here' continues text: generate"),
        (lambda: masked().candidates("bad"), r"prompt is 'bad': must have a \[MASK\]"),
        (lambda: masked().candidates("b_", count=0), "count is 0: must be an integer of at least"),
        (lambda: plain().inspect.nearest("bad"),
         r"word is 'bad': must be one token, not 3"),
        (lambda: plain().inspect.nearest("a b"), "word is 'a b': must be one word"),
        (lambda: plain().inspect.nearest("a", plus="z"), "character 0 is U.007A 'z', which is"),
        (lambda: plain().inspect.nearest("a", minus="a"),
         "word is 'a': the sum of the vectors is 0"),
        (lambda: pairs().score(("a", "b"), stride=3), "stride is 3: the target of a pair is"),
        (lambda: plain().search("a", 0, beams=2), "num_tokens is 0: must be an integer of at leas"),
        (lambda: plain().search(["a"], beams=2), r"prompt is \['a'\]: must be a string, or an"),
        (lambda: plain().search("a", 3, beams=2, processors=5), "processors is 5: must be a tuple"),
        (lambda: plain().generate("a" * 30, beams=2), "prompt has 30 tokens: no new token fits"),
        (lambda: plain().generate("a", stop=5), "stop is 5: must be "),
        (lambda: plain().generate("a", stop=b"ab"), "stop is b'ab': must be "),
        (lambda: plain().score([]), "text is an empty list: must contain at least"),
        (lambda: plain().evaluate(None), "data is None: must be a file"),
        (lambda: masked().generate("b_", key=KEY), "key is .*each mask is filled"),
        (lambda: tj.load("x" * 5000), "path_or_id is 'xxx.*: File name too long"),
        (bad_message({"role": "user"}), r"messages\[0\] has content None: must be a string"),
        (bad_message({"role": "pope", "content": "a"}), "message 1 is .*must have a role"),
        (lambda: chat().chat("a" * 17), "messages have 19 tokens: no new token fits"),
        (lambda: vectors().generate("bad"), r"writes no text: load_sentence_encoder\(FOLDER\)"),
        (lambda: vectors().score("bad"), r"writes no text: load_sentence_encoder\(FOLDER\)"),
        (lambda: tj.load("/nonexistent"), "'/nonexistent': must be an existing folder"),
        (lambda: tj.load("/nonexistent", checkpoint="best"), "checkpoint is 'best': .*not a run"),
        (lambda: tj.load(3), "path_or_id is of type int: must be a folder or"),
        (lambda: tj.load("a", device="cpu"), "load.. has no argument 'device'"),
        (lambda: plain().search("a", beams=None), "beams is None: must be an integer of at least"),
        (lambda: plain().generate(["a"], slots=None), "slots is None: must be an integer of at"),
        (lambda: plain().search("a", results=None), "results is None: must be an integer of at"),
        (lambda: plain().generate("a", stream="no"), "stream is 'no': must be True or False"),
        (lambda: plain().search("a", length_penalty=np.nan), "length_penalty is nan: must be fin"),
        (lambda: plain().look_up(["a"], 3), r"prompt is \['a'\]: must be a string, or an"),
        (lambda: plain().continuations([]), r"pairs is \[\]: must be a list of \(context, contin"),
        (lambda: plain().evaluate("f", edit={}), r"no argument 'edit'; use .*model.edited\("),
        (lambda: plain().inspect.lens("a", edit={}), r"no argument 'edit'; use .*model.edited"),
        (lambda: plain().inspect.attribution("a", baseline="ab"), "baseline is 'ab': must be one"),
        (lambda: plain().candidates(3), "text is 3: must be a string"),
        (lambda: plain().score("ab", batch_size=None), "batch_size is None: must be an integer of"),
        (lambda: plain().save(3), "path is .*int: must be the path of a folder"),
        (lambda: plain().save("x", shard_bytes=0), "shard_bytes is 0: must be an integer of at le"),
        (lambda: plain().save("x", shard_bytes="1GB"), "shard_bytes is '1GB': must be an integer"),
        (lambda: plain().save("x", family=3), "family is 3: must be a model_type, such as 'llama'"),
        (lambda: plain().save("x", dtype="float64"), "dtype is 'float64': must be one of float32"),
        (lambda: plain().save("x", dtype=[1]), r"dtype is \[1\]: must be one of float32, "),
        (lambda: plain().inspect.nearest("a", count="3"), "count is '3': must be an integer of at"),
        (lambda: plain().inspect.nearest("a", count=2.5), "count is 2.5: must be an integer of at"),
        (lambda: plain().inspect.nearest(3), "word is 3: must be one word"),
        (lambda: plain().inspect.nearest("a", minus=3), "minus is 3: must be a word or a list of"),
        (lambda: plain().inspect.nearest("a", plus=None), "plus is None: must be a word or a list"),
        (lambda: plain().inspect.nearest("a", plus=[3]), "plus is 3: must be one word"),
        (lambda: plain().inspect.nearest("z"), r"word is 'z': character 0 is U\+007A 'z', which"),
        (lambda: plain().search(3), "prompt is 3: must be a string, or an array of its IDs"),
        (lambda: plain().search(np.array([[1]])), r"prompt is int64\[1, 1\]: must be integers \[P"),
        (lambda: plain().search(np.array([1.5])), r"prompt is float64\[1\]: must be integers \[P"),
        (lambda: plain().search(np.zeros(0, int)), r"prompt is int64\[0\]: must be integers \[P\]"),
        (lambda: plain().search(np.array([3, 11])), "prompt contains ID 11: must be from 0 to 10"),
        (lambda: plain().search(np.array([-1])), "prompt contains ID -1: must be from 0 to 10"),
        (lambda: plain().look_up(np.array([11]), 3), "prompt contains ID 11: must be from 0 to 10"),
        (lambda: pairs().search(np.array([1])), "must be a string that contains the source"),
        (lambda: plain().search("a", "x"), "num_tokens is 'x': must be an integer of at least 1"),
        (lambda: plain().search("a", beams="2"), "beams is '2': must be an integer of at least 1"),
        (lambda: plain().search("a", temperature=1), "no argument 'temperature'"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_one_line_error(call, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("attend", "attention$"), ("lens", "lens$"), ("nearest", "nearest$"), ("serve", "$")],
)
def test_moved_attribute_error_names_its_replacement(name, rule):
    with pytest.raises(AttributeError, match=f"a LanguageModel has no attribute '{name}'.*{rule}"):
        getattr(plain(), name)


@pytest.mark.parametrize("tokenizer", [
    LETTERS, ByteTokenizer(), WordTokenizer(("to", "be")), BPETokenizer.train("to be to be", 260),
    with_special_tokens(LETTERS, ["eos"]),
], ids=lambda one: type(one).__name__)  # fmt: skip
def test_decode_inverts_encode(tokenizer):
    text = "to be" if "to" in str(getattr(tokenizer, "words", "to")) else "bad"
    text = "bad" if "Char" in repr(tokenizer) or "Special" in repr(tokenizer) else text
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    for wrong in (tokenizer.vocab_size, -1):
        with pytest.raises(ValueError, match=f"ID {wrong} has no token"):
            tokenizer.decode([wrong])
    for ids in ([[1]], 3, None):
        with pytest.raises(ValueError, match="must be a sequence of integers"):
            tokenizer.decode(ids)
    for wrong in (None, 5, b"a"):
        with pytest.raises(ValueError, match=f"text is {wrong!r}: must be a str"):
            tokenizer.encode(wrong)


def test_model_repr_is_one_line():
    assert repr(plain()) == (
        "LanguageModel('here': published, ModelConfig of 1,984 parameters, "
        "CharTokenizer(11 tokens))"
    )
    assert "task 'chat'" in repr(chat()) and "\n" not in repr(chat())
