"""Batches that tasks create from files, generated pairs, and rejected data."""

import datetime
import json
from dataclasses import replace
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ConfigError, ModelConfig, RecurrentConfig, TrainConfig
from transformer_jax.config.presets import fine_tuning, task_recipe
from transformer_jax.config.tasks import (
    TASKS,
    AdditionTask,
    ChatTask,
    ClassifyTask,
    CopyTask,
    DatesTask,
    LanguageTask,
    MaskedTask,
    ModularTask,
    PreferenceTask,
    PrefixTask,
    RecallTask,
    ReverseTask,
    Seq2SeqTask,
)
from transformer_jax.lectures.tasks import generate_pairs
from transformer_jax.models.factory import merged
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import (
    SpecialTokens,
    special_ids,
    tokenizer_from_json,
    with_special_tokens,
)
from transformer_jax.tokenizers.trained import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
)
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.data import IGNORE
from transformer_jax.training.tasks import Tokenizers, load_task
from transformer_jax.training.tasks.metrics import (
    compare_texts,
    confusion_matrix,
    edit_distance,
    macro_f1,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(d_model=8, num_heads=2, num_layers=1, max_len=24)


def run(task, file=None, **changes):
    """Return a small run of a task on a file."""
    shape = task.shapes[0]
    model = changes.pop("model", ModelConfig(kind=shape, **SMALL))
    data = {} if file is None else {"data": str(file)}
    return TrainConfig(task=task, model=model, batch_size=2, **data, **changes)


def write(tmp_path, content, name="data.txt"):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


PAIRS = "".join(f"{a}{b}\t{b}{a}{a}\n" for a in "abcde" for b in "vwxyz")


def test_decoder_pair_is_single_row_with_labels_on_target(tmp_path):
    task = load_task(run(PrefixTask(packed=False), write(tmp_path, PAIRS)))
    ids = special_ids(task.tokenizers.tokenizer)
    assert list(ids) == ["sep", "eos"] and task.config.model.vocab_size == 12
    a, v = task.tokenizers.tokenizer.encode("av")
    (bucket,) = task.train.buckets
    assert bucket.tokens[0].tolist() == [a, v, ids["sep"], v, a, a, 0, 0]
    assert bucket.labels[0].tolist() == [*[IGNORE] * 2, v, a, a, ids["eos"], *[IGNORE] * 2]
    assert bucket.prefix[0].tolist() == [True] * 3 + [False] * 5
    causal = load_task(run(PrefixTask(bidirectional=False), write(tmp_path, PAIRS)))
    assert causal.train.buckets[0].prefix is None
    assert causal.train.buckets[0].segments is not None  # three pairs fit in 24 tokens


def test_encoder_decoder_pair_is_source_and_framed_target(tmp_path):
    task = load_task(run(Seq2SeqTask(), write(tmp_path, PAIRS)))
    ids = special_ids(task.tokenizers.tokenizer)
    a, v = task.tokenizers.tokenizer.encode("av")
    (bucket,) = task.train.buckets
    assert bucket.source[0].tolist() == [a, v, *[0] * 6]
    assert bucket.source_valid[0].tolist() == [True] * 2 + [False] * 6
    assert bucket.tokens[0].tolist() == [ids["bos"], v, a, a, *[0] * 4]
    assert bucket.labels[0].tolist() == [v, a, a, ids["eos"], *[IGNORE] * 4]


def test_parallel_files_are_paired_by_line(tmp_path):
    sources = "".join(line.split("\t")[0] + "\n" for line in PAIRS.splitlines())
    targets = "".join(line.split("\t")[1] + "\n" for line in PAIRS.splitlines())
    one, two = write(tmp_path, sources, "a"), write(tmp_path, targets, "b")
    apart = load_task(run(Seq2SeqTask(targets=str(two)), one))
    joined = load_task(run(Seq2SeqTask(), write(tmp_path, PAIRS)))
    assert [p[:2] for p in apart.pairs] == [p[:2] for p in joined.pairs]
    assert np.array_equal(apart.train.buckets[0].labels, joined.train.buckets[0].labels)


def test_separate_vocabularies_cover_only_their_own_language(tmp_path):
    file = write(tmp_path, "ab\txyz\n" * 20)
    task = load_task(run(Seq2SeqTask(vocabulary="separate"), file))
    assert task.tokenizers.source == CharTokenizer("ab")
    assert task.config.model.source_vocab_size == 2
    assert task.config.model.vocab_size == 3 + 2
    recurrent = RecurrentConfig(source_vocab_size=1, d_embed=3, d_hidden=3)
    task = load_task(run(Seq2SeqTask(), file, model=recurrent))
    assert task.tokenizers.source is None
    assert task.config.model.source_vocab_size == task.config.model.vocab_size == 5 + 2


def test_masked_tokens_are_replaced_in_configured_proportions(tmp_path):
    text = "".join(np.random.default_rng(3).choice(list("abcdefghij"), 20011))
    config = run(MaskedTask(rate=0.2, replaced=0.6, random=0.3), write(tmp_path, text))
    task = load_task(config)
    mask = special_ids(task.tokenizers.tokenizer)["mask"]
    batches = [task.inputs(step) for step in range(400)]
    tokens, labels = (np.stack([getattr(b, n) for b in batches]) for n in ("tokens", "labels"))
    hidden = labels != IGNORE
    assert abs(hidden.mean() - 0.2) < 0.01
    assert abs((tokens[hidden] == mask).mean() - 0.6) < 0.03
    other = (tokens[hidden] != mask) & (tokens[hidden] != labels[hidden])
    assert abs(other.mean() - 0.3 * 0.9) < 0.03  # one random letter in ten is correct by chance
    assert not (tokens[~hidden] == mask).any()
    assert not np.array_equal(batches[0].labels, batches[1].labels)
    again = load_task(config)
    assert np.array_equal(again.inputs(7).tokens, batches[7].tokens)
    first, second = ([b.labels.tolist() for b in t.evaluation()] for t in (task, task))
    assert first == second and len(first) > 10


def test_masked_tokens_do_not_depend_on_batch_composition(tmp_path):
    """Nor on the split of a step, so the held-out loss does not depend on the batch size."""
    text = "".join(np.random.default_rng(3).choice(list("abcdefghij"), 2003))
    config = replace(run(MaskedTask(), write(tmp_path, text)), eval_batches=None)
    one, two, five = (load_task(replace(config, batch_size=size)) for size in (1, 2, 5))
    split = load_task(replace(config, batch_size=1, accumulation=2))
    for name in ("tokens", "labels"):
        rows = lambda batches, name=name: np.concatenate([getattr(b, name) for b in batches])  # noqa: E731
        whole = rows(one.evaluation())
        assert len(whole) == len(one.data.val) // one.length > 5 and len(np.unique(whole)) > 5
        for task in (two, five):
            found = rows(task.evaluation())
            assert np.array_equal(found[: len(whole)], whole)
        a, b = (getattr(task.inputs(7), name) for task in (two, split))
        assert a.shape == (1, 2, 24) and np.array_equal(a.ravel(), b.ravel())
        assert np.array_equal(getattr(five.inputs(7), name)[0, :2], a[0])


@pytest.mark.parametrize("count", [72, 71, 73])
def test_masked_evaluation_covers_every_full_window(tmp_path, count):
    """Includes the last one if the held-out part is a multiple of the window's 24 tokens."""
    letters = np.random.default_rng(5).choice(list("abcdefghij"), 800 + count)
    text = "".join(letters)
    held_out = write(tmp_path, text[800:], "held_out.txt")
    config = run(MaskedTask(), write(tmp_path, text[:800]), val_data=str(held_out))
    task = load_task(config)
    assert len(task.data.val) == count
    found = []
    for batch in task.evaluation():
        assert batch.tokens.shape == (2, 24)
        original = np.where(batch.labels != IGNORE, batch.labels, batch.tokens)
        found += [
            row for row, labels in zip(original, batch.labels, strict=True) if labels.max() >= 0
        ]
    assert np.array_equal(found, np.asarray(task.data.val)[: count // 24 * 24].reshape(-1, 24))


def test_whole_words_are_masked_together(tmp_path):
    words = np.random.default_rng(3).choice(["one", "seven", "eleven"], 2003)
    task = load_task(run(MaskedTask(rate=0.3, whole_words=True), write(tmp_path, " ".join(words))))
    hidden = 0
    for step in range(50):
        batch = task.inputs(step)
        whole = np.where(batch.labels != IGNORE, batch.labels, batch.tokens).reshape(-1, 24)
        for row, labels in zip(whole, batch.labels.reshape(-1, 24), strict=True):
            text = task.tokenizers.tokenizer.to_bytes(row).decode()
            for (one, left), (two, right) in pairwise(zip(text, labels != IGNORE, strict=True)):
                if one.isalpha() and two.isalpha():
                    assert left == right
                hidden += left
    assert hidden > 500


def test_encoder_predicts_class_by_head_and_decoder_by_token(tmp_path):
    file = write(tmp_path, "up\tabc\ndown\tcba\n" * 10)
    task = load_task(run(ClassifyTask(), file))
    assert task.config.task.labels == ("down", "up") and task.config.model.num_classes == 2
    (bucket,) = task.train.buckets
    ids = special_ids(task.tokenizers.tokenizer)
    assert bucket.labels[:2].tolist() == [1, 0]
    assert bucket.tokens[1].tolist() == [ids["cls"], 2, 1, 0, *[0] * 4]
    assert bucket.valid[1].tolist() == [True] * 4 + [False] * 4
    decoder = load_task(run(ClassifyTask(), file, model=ModelConfig(**SMALL)))
    ids = special_ids(decoder.tokenizers.tokenizer)
    (bucket,) = decoder.train.buckets
    assert bucket.tokens[1].tolist() == [2, 1, 0, ids["cls"], *[0] * 4]
    assert bucket.labels[1].tolist() == [*[IGNORE] * 3, ids["label:down"], *[IGNORE] * 4]


def test_only_assistant_tokens_are_used_as_labels(tmp_path):
    talk = [("user", "ab"), ("assistant", "cd"), ("user", "a"), ("assistant", "d")]
    line = json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n"
    task = load_task(run(ChatTask(packed=False), write(tmp_path, line * 10)))
    ids = special_ids(task.tokenizers.tokenizer)
    (bucket,) = task.train.buckets
    user, assistant, eos = (ids[name] for name in ("user", "assistant", "eos"))
    whole = [user, 0, 1, assistant, 2, 3, eos, user, 0, assistant, 3, eos]
    learned = [False] * 4 + [True] * 3 + [False] * 3 + [True] * 2
    assert bucket.tokens[0, :11].tolist() == whole[:-1]
    wanted = [i if yes else IGNORE for i, yes in zip(whole, learned, strict=True)][1:]
    assert bucket.labels[0, :11].tolist() == wanted
    (rows,) = load_task(run(ChatTask(), write(tmp_path, line * 10))).train.buckets
    assert rows.segments[0, [0, 10, 11]].tolist() == [1, 1, 2]  # by default, rows are packed


def test_short_documents_are_framed_and_packed(tmp_path):
    file = write(tmp_path, "ab\ncab\n\nb\n" * 9)
    task = load_task(run(LanguageTask(documents="lines"), file))
    (rows,) = task.train.buckets
    eos = special_ids(task.tokenizers.tokenizer)["eos"]
    assert rows.tokens[0, :8].tolist() == [eos, 0, 1, eos, 2, 0, 1, eos]
    assert rows.labels[0, :8].tolist() == [0, 1, eos, 2, 0, 1, eos, 1]
    assert rows.segments[0, :8].tolist() == [1, 1, 1, 2, 2, 2, 2, 3]
    apart = load_task(run(LanguageTask(documents="lines", packed=False), file))
    assert apart.train.buckets[0].segments is None
    paragraphs = load_task(run(LanguageTask(documents="paragraphs"), file))
    eos = special_ids(paragraphs.tokenizers.tokenizer)["eos"]
    tokens = paragraphs.train.buckets[0].tokens[0]
    assert tokens[:7].tolist() == [eos, 1, 2, 0, 3, 1, 2] and tokens[7] == eos


@pytest.mark.slow_except("addition", "addition reversed", "recall", "reverse")
@pytest.mark.parametrize(
    ("task", "target"),
    [
        (ReverseTask(examples=500), lambda source: "".join(reversed(list(source)))),
        (AdditionTask(examples=500), lambda source: str(eval(source))),
        (AdditionTask(examples=500, reversed=True), lambda s: str(eval(s))[::-1]),
        (ModularTask(operation="*"), lambda source: str(eval(source) % 23)),
        (
            RecallTask(examples=500, queries=3),
            lambda s: "".join(letter + s[s.index(letter) + 1] for letter in s.split()[1]),
        ),
    ],
    ids=["reverse", "addition", "addition reversed", "modular", "recall"],
)
def test_generated_targets_match_task_definition(task, target):
    pairs = generate_pairs(task, 7)
    assert len({source for source, _ in pairs}) == len(pairs) >= 400
    assert all(target(source) == written for source, written in pairs)
    assert generate_pairs(task, 7) == pairs != generate_pairs(task, 8)


@pytest.mark.parametrize("task", [ReverseTask, CopyTask])
def test_generated_strings_cover_every_length(task):
    pairs = generate_pairs(task(min_length=2, max_length=5, letters=7, examples=300), 3)
    assert {len(source) for source, _ in pairs} == {2, 3, 4, 5}


def test_generated_source_and_target_dates_match():
    forms = "%d %B %Y", "%B %d, %Y", "%d. %b %Y", "%b %d %Y"
    for source, target in generate_pairs(DatesTask(examples=300), 7):
        days = set()
        for form in forms:
            try:
                days.add(datetime.datetime.strptime(source, form).date().isoformat())
            except ValueError:
                continue
        assert days == {target}


def recursive_distance(one, two):
    """Return the edit distance from its definition."""
    if not one or not two:
        return len(one) + len(two)
    return min(
        recursive_distance(one[1:], two) + 1,
        recursive_distance(one, two[1:]) + 1,
        recursive_distance(one[1:], two[1:]) + (one[0] != two[0]),
    )


def test_edit_distance_matches_definition():
    random = np.random.default_rng(11)
    for _ in range(60):
        one, two = ("".join(random.choice(list("abc"), random.integers(0, 6))) for _ in "12")
        assert edit_distance(one, two) == recursive_distance(one, two)


def test_accuracy_is_computed_by_text_and_by_word():
    found = compare_texts(["a b c", "x ", "p q"], ["a b d", "x", "q"])
    assert found["exact_match"] == pytest.approx(1 / 3)
    assert found["word_error_rate"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("texts", [["a", "b"], []])
def test_each_text_needs_one_reference(texts):
    """sacrebleu would drop the surplus texts without an error."""
    message = rf"written contains {len(texts)} texts: must have 1, as many as wanted"
    with pytest.raises(ValueError, match=message):
        compare_texts(texts, ["a"])


def test_bleu_and_chrf_match_sacrebleu():
    pytest.importorskip("sacrebleu")
    same = compare_texts(["the cat sat on the mat"], ["the cat sat on the mat"])
    other = compare_texts(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert same["bleu"] == pytest.approx(100) and same["chrf"] == pytest.approx(100)
    assert 0 < other["bleu"] < 100


def test_bleu_is_omitted_if_no_reference_has_four_words():
    pytest.importorskip("sacrebleu")
    short = compare_texts(["the cat", "a dog"], ["the cat", "a dog"])
    assert "bleu" not in short and short["chrf"] == pytest.approx(100)
    assert compare_texts(["the cat", "a"], ["the cat", "a dog sat here"])["bleu"] == 0


def test_f1_is_averaged_over_occurring_classes():
    predicted, wanted = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 1, 0])
    confusion = confusion_matrix(predicted, wanted, 4)
    assert confusion.tolist() == [[1, 0, 1, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    # class 0: precision 1/2, recall 1/2; class 1: precision 1, recall 2/3; class 2: never right
    assert macro_f1(confusion) == pytest.approx((0.5 + 0.8 + 0.0) / 3)


REFUSED = {
    "no tab": (Seq2SeqTask(), "a b\n", "line 1: 'a b': must be a source, one tab and a target"),
    "two tabs": (PrefixTask(), "a\tb\nc\td\te\n", "line 2: 'c\\td\\te': must be a source, one tab"),
    "empty line": (Seq2SeqTask(), "a\tb\n\nc\td\n", "line 2: it is empty"),
    "no target": (Seq2SeqTask(), "a\tb\nc\t\n", "line 2: 'c\\t': must be a source, one tab"),
    "empty file": (ClassifyTask(), "", "it is empty"),
    "one pair": (
        Seq2SeqTask(),
        "a\tb\n",
        "the number of pairs is 1: must be at least one for",
    ),
    "long": (
        Seq2SeqTask(),
        "a\tb\n" + "a" * 30 + "\tb\n",
        "line 2: source: it has 30 tokens, but a sequence",
    ),
    "long row": (
        PrefixTask(),
        "a\tb\na\t" + "b" * 23 + "\n",
        "line 2: source and target: it has 25 tok",
    ),
    "encoding": (Seq2SeqTask(), b"a\tb\n\xff\tb\n", "byte 4 is 0xff: must be UTF-8"),
    "one label": (
        ClassifyTask(),
        "x\tab\nx\tcd\n",
        "its only label is 'x': must have at least two labels",
    ),
    "label": (
        ClassifyTask(),
        "x\ta\ny\tb\n" * 2 + "z\tb\n",
        "line 5: label is 'z': must be one of",
    ),
    "not JSON": (ChatTask(), "{]\n", "line 1 is not JSON"),
    "a key twice": (ChatTask(), '{"messages": 1, "messages": 2}\n', "'messages' appears twice"),
    "no messages": (ChatTask(), '{"text": "a"}\n', "line 1: must be {"),
    "role": (ChatTask(), '{"messages": [{"role": "cat", "content": "a"}]}\n', "must have a role"),
    "no answer": (ChatTask(), '{"messages": [{"role": "user", "content": "a"}]}\n', "nothing to"),
    "one document": (
        LanguageTask(documents="lines"),
        "abc\n",
        "the number of lines is 1: must be at least one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_data_raises_one_line_error(tmp_path, name):
    task, content, message = REFUSED[name]
    file = write(tmp_path, content)
    with pytest.raises(DataError) as caught:
        load_task(run(task, file, val_fraction=0.3))
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parallel_files_of_different_length_are_rejected(tmp_path):
    one, two = write(tmp_path, "a\nb\nc\n", "a"), write(tmp_path, "x\ny\n", "b")
    with pytest.raises(DataError, match=r"a has 3 lines and .*b has 2: parallel files must have"):
        load_task(run(Seq2SeqTask(targets=str(two)), one))
    with pytest.raises(DataError, match="targets is '/nowhere': must be a file"):
        load_task(run(Seq2SeqTask(targets="/nowhere"), one))


def test_recipe_rejects_models_that_cannot_learn_task():
    for name, architecture in (("masked", "ngram"), ("seq2seq", "window"), ("classify", "ngram")):
        rule = f"model is '{architecture}': task '{name}' needs another"
        with pytest.raises(ConfigError, match=rule):
            task_recipe(TASKS[name](), architecture)


def test_recurrent_classifier_recipe_uses_bidirectional_model():
    for cell in ("lstm", "gru", "rnn"):
        model = task_recipe(ClassifyTask(), cell).model
        assert isinstance(model, RecurrentConfig) and model.cell == cell and model.bidirectional
        again = fine_tuning(replace(model, num_classes=3), "runs/classes", MaskedTask())
        assert again.model == model


def test_word_tokenizer_normalizes_spaces():
    tokenizer = WordTokenizer.train("b a  b\nc a b", 2)
    assert tokenizer.words == ("b", "a")
    ids = tokenizer.encode("a  b c\nb")
    assert ids.tolist() == [3, 2, 0, 1, 2]
    assert tokenizer.to_bytes(ids).decode() == " a b <unk>\n b"
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer


def test_special_tokens_follow_text_tokens_and_decode_to_nothing():
    base = CharTokenizer("abc")
    tokenizer = with_special_tokens(with_special_tokens(base, ["sep"]), ["sep", "eos"])
    assert tokenizer == SpecialTokens(base, ("sep", "eos")) and tokenizer.vocab_size == 5
    assert special_ids(tokenizer) == {"sep": 3, "eos": 4}
    assert tokenizer.to_bytes([0, 3, 1, 4]) == b"ab"
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    with pytest.raises(DataError, match="names of special tokens"):
        SpecialTokens(base, ("a", "a"))


def test_unencodable_text_error_names_line(tmp_path):
    """Evaluates a run with a trained tokenizer on another file."""
    tokenizers = load_task(run(Seq2SeqTask(), write(tmp_path, PAIRS))).tokenizers
    other = write(tmp_path, "av\tva\nax\txQ\n", "other.tsv")
    with pytest.raises(
        DataError, match=r"other.tsv, line 2: character 1 is U\+0051 'Q', which is not among"
    ):
        load_task(run(Seq2SeqTask(), other, val_data=str(other)), tokenizers)


def test_separate_held_out_file_leaves_training_file_unsplit(tmp_path):
    one, two = write(tmp_path, PAIRS), write(tmp_path, "ax\txa\n", "val")
    task = load_task(run(Seq2SeqTask(), one, val_data=str(two)))
    assert sum(task.train.counts) == 25 and [p.source for p in task.pairs] == ["ax"]
    text = write(tmp_path, "abc" * 30, "text")
    other = write(tmp_path, "cba" * 10, "held out")
    found = load_task(replace(run(LanguageTask(), text, val_data=str(other))))
    assert (len(found.data.train), len(found.data.val), found.data.val_characters) == (90, 30, 30)


def test_masked_model_initialized_from_classifier_drops_its_head():
    """Its config has no classes, and parameters of a head are rejected."""
    model = ModelConfig(kind="encoder", num_classes=3, **SMALL)
    assert fine_tuning(model, "runs/classes", MaskedTask()).model == replace(
        model, num_classes=None
    )
    params = {"encoder": {"w": jnp.ones(2)}, "classifier": {"kernel": jnp.ones((2, 3))}}
    found, lines = merged({"encoder": {"w": jnp.zeros(2)}}, params)
    assert found["encoder"]["w"].tolist() == [1, 1]
    assert lines == ["parameters that the new model lacks: classifier/kernel"]


def test_enlarged_table_keeps_rows_and_other_shapes_are_rejected():
    fresh = {"table": jnp.zeros((5, 2)), "head": jnp.zeros(3)}
    found, lines = merged(fresh, {"table": jnp.arange(6.0).reshape(3, 2)})
    assert found["table"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]
    assert lines == ["new parameters: table[3:], head"]
    rule = r"table has shape \[5, 2\], but the model to start from has shape \[5, 3\]"
    with pytest.raises(ConfigError, match=rule):
        merged(fresh, {"table": jnp.zeros((5, 3))})


@pytest.mark.parametrize("task", [ChatTask(), PreferenceTask()], ids=["chat", "preference"])
@pytest.mark.parametrize("wrong", ["template", "surrogate"])
def test_unencodable_conversation_error_names_file_and_line(tmp_path, task, wrong):
    if wrong == "template":
        template = (
            "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad') }}"
            "{% endif %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        )
        base = BPETokenizer.train("user assistant good bad yes no\n" * 9, 269)
        tokenizer = PretrainedTokenizer(base.definition, (), (0,), (("default", template),))
        bad, rule = "bad", "chat template: no bad"
    else:
        tokenizer, bad, rule = ByteTokenizer(), "\ud800", "a lone surrogate"

    def talk(question):
        user, one, two = (
            [{"role": role, "content": text}]
            for role, text in (("user", question), ("assistant", "yes"), ("assistant", "no"))
        )
        if isinstance(task, ChatTask):
            return json.dumps({"messages": user + one})
        return json.dumps({"prompt": user, "chosen": one, "rejected": two})

    file = write(tmp_path, "".join(f"{talk(t)}\n\n" for t in ("good", "good", bad, "good")))
    config = run(
        task, file, val_fraction=0.3, init_from="base", tokenizer="pretrained",
        model=ModelConfig(**SMALL | dict(max_len=97), vocab_size=300),
    )  # fmt: skip
    with pytest.raises(DataError, match=rf"^{file}, line 5: .*{rule}"):
        load_task(config, Tokenizers(tokenizer))
