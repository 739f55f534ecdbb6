"""Edits of loaded models: removing a head equals zeroing its rows of the output matrix."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import transformer_jax as tj
from tests.text.models import (
    KEY,
    LETTERS,
    TURNS,
    chat,
    classes,
    logits_after,
    logits_of,
    masked,
    nats,
    pairs,
    plain,
    run_of,
)
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask
from transformer_jax.interpret import add, mean, resample, steering_vector, zero
from transformer_jax.text import scores
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.training import batch
from transformer_jax.training.batch import IGNORE

pytestmark = pytest.mark.usefixtures("quick_compilation")
SILENT = zero("block_*/attention/heads", heads=1)


def silenced(params, *sides):
    """Zero the output matrix of head 1 in every block of these sides."""

    def cut(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if names[0] in sides and names[-3:] == ["attention", "out", "kernel"]:
            return leaf.at[1].set(0)
        return leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def without_head(model: LanguageModel, *sides: str) -> LanguageModel:
    changed = replace(model.model, params=silenced(model.params, *sides))
    return LanguageModel(changed, model.name)


@pytest.mark.slow
def test_edit_applies_to_every_generation_method():
    other, drawn = without_head(plain(), "decoder"), dict(sampler=tj.Sample(), key=KEY)
    calls = {
        "one": lambda m: m.generate("bad", 7),
        "outgrown": lambda m: m.generate("badcab" * 2, 9),
        "stream": lambda m: "".join(m.generate("bad", 7, stream=True)),
        "list": lambda m: m.generate(["bad", "a", "badcab" * 2], 9, **drawn),
        "samples": lambda m: m.generate("bad", 5, samples=3, **drawn),
        "beams": lambda m: m.generate("bad", 5, beams=3),
        "search": lambda m: [text for _, text in m.search("bad", 5, beams=3, results=2)],
        "look_up": lambda m: m.look_up("badcab", 5, **drawn)[0],
        "score": lambda m: np.round(m.score("badcabfeed").nats, 3),
    }
    whole = {name: call(plain()) for name, call in calls.items()}
    for name, call in calls.items():
        assert call(plain().edited(SILENT)) == call(other), name
    assert {name: call(plain()) for name, call in calls.items()} == whole, (
        "the original model is unchanged"
    )
    assert sum(whole[name] != call(other) for name, call in calls.items()) > 5


@pytest.mark.slow
def test_edit_applies_to_answers_targets_and_filled_masks():
    other = without_head(chat(), "decoder")
    assert chat().edited(SILENT).chat("bad", 6) == other.chat("bad", 6) != chat().chat("bad", 6)
    assert chat().edited(SILENT).score(TURNS).nats == pytest.approx(
        other.score(TURNS).nats, rel=1e-5
    )
    prefixes = run_of(PrefixTask(), names=["sep", "eos"])
    other = without_head(prefixes, "decoder")
    assert prefixes.edited(SILENT).generate("bad", 6) == other.generate("bad", 6)
    assert prefixes.generate("bad", 6) != other.generate("bad", 6)
    other = without_head(masked(), "encoder")
    assert masked().edited(SILENT).generate("b_d_") == other.generate("b_d_")
    found, wanted, whole = (
        [p for _, p in m.candidates("b_d", count=3)[0]]
        for m in (masked().edited(SILENT), other, masked())
    )
    assert found == pytest.approx(wanted, rel=1e-5) and found != pytest.approx(whole, rel=1e-3)


def by_score(model: LanguageModel, context: str, text: str) -> float:
    """log p of a text after a context, from the score of both together."""
    after = model.score(context + text).token_nats[-len(text) :]
    return -sum(after)


@pytest.mark.slow
def test_edited_choice_and_continuation_scores_match():
    """Including a shared context, which an edited model reads separately for each choice."""
    other, context = without_head(plain(), "decoder"), "badcabfeed"
    texts = ["cab", "c", "jade"]
    question = {"context": context, "choices": texts, "answer": 2}
    found = plain().edited(SILENT).multiple_choice([question]).log_probs[0]
    assert found == pytest.approx(other.multiple_choice([question]).log_probs[0], rel=1e-5)
    assert found == pytest.approx([by_score(plain().edited(SILENT), context, x) for x in texts])
    assert found != pytest.approx(plain().multiple_choice([question]).log_probs[0], rel=1e-3)
    both = [(context, text) for text in texts]
    assert [one.log_prob for one in plain().edited(SILENT).continuations(both)] == list(found)
    uniform = plain().edited({"logits": lambda x: 0 * x}).continuations(both)
    assert [one.log_prob for one in uniform] == pytest.approx(
        [-len(text) * np.log(11) for text in texts]
    )


def written(folder, lines) -> str:
    (folder / "data").write_text("\n".join(lines))
    return str(folder / "data")


def evaluated(folder, model: LanguageModel, **options) -> tuple[dict, dict, dict]:
    """Return the measures of the edited model, of edited parameters, and without an edit."""
    kind = model.config.kind
    other = without_head(model, "encoder" if kind == "encoder" else "decoder")
    edited = model.edited(SILENT).evaluate(*folder, **options)
    return edited, other.evaluate(*folder, **options), model.evaluate(*folder, **options)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("logits_at_once", [1, 2**26])
def test_edited_held_out_loss_matches_zeroed_parameters(tmp_path, monkeypatch, logits_at_once):
    """Including logits that are computed in chunks, with a second edit that doubles them."""
    monkeypatch.setattr(batch, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(batch, "TOKENS_OF_CHUNK", 6)
    text = "badcabfeedface" * 3
    file, ids = written(tmp_path, [text]), LETTERS.encode(text)

    def of_windows(model):
        rows = [ids[start : start + 8] for start in range(0, len(ids) - 1, 7)]
        each = [nats(2 * logits_after(model, row[:-1]), row[1:]) for row in rows]
        return np.concatenate(each).mean()

    wanted, whole = of_windows(without_head(plain(), "decoder")), of_windows(plain())
    edit = {**SILENT, "logits": lambda x: 2 * x}
    edited = plain().edited(edit).evaluate(file, context=7)["nats_per_token"]
    assert edited == pytest.approx(wanted, rel=1e-5) and edited != pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs", "prefix", "masks", "classes"])
def test_edit_applies_to_evaluation_on_every_task(tmp_path, name):
    both = [("bad", "cab"), ("feed", "beef"), ("ace", "face"), ("dig", "kid")]
    if name in ("pairs", "prefix"):
        task, special = (Seq2SeqTask(beams=1), "bos eos") if name == "pairs" else (
            PrefixTask(beams=1), "sep eos"
        )  # fmt: skip
        kind = "encoder-decoder" if name == "pairs" else "decoder"
        model, lines = run_of(task, kind, names=special.split()), ["\t".join(p) for p in both]
    elif name == "masks":
        model, lines = masked(), ["badcabfeedface" * 9]
    else:
        labels = classes().model.run.task.labels
        model, lines = classes(), [f"{labels[n % 2]}\t{text}" for n, (text, _) in enumerate(both)]
    edited, wanted, whole = evaluated([written(tmp_path, lines)], model)
    assert edited == pytest.approx(wanted, rel=1e-5)
    assert edited["nats_per_token"] != pytest.approx(whole["nats_per_token"], rel=1e-3)
    measures = {"pairs": "word_error_rate", "prefix": "word_error_rate",
                "masks": "pseudo_perplexity", "classes": "accuracy"}  # fmt: skip
    assert measures[name] in edited


@pytest.mark.slow
def test_edit_applies_to_attention_weights():
    other, whole = (
        without_head(plain(), "decoder").inspect.attention("badcab"),
        plain().inspect.attention("badcab"),
    )
    found = plain().edited(SILENT).inspect.attention("badcab")
    np.testing.assert_allclose(found.weights, other.weights, atol=1e-6)
    np.testing.assert_array_equal(found.weights[0], whole.weights[0])
    assert np.abs(found.weights[1] - whole.weights[1]).max() > 1e-3
    uniform = {"block_1/attention/weights": lambda w: w * 0 + 0.25}
    assert (plain().edited(uniform).inspect.attention("badcab").weights[1] == 0.25).all()


@pytest.mark.slow
def test_edit_applies_to_classification():
    other, whole = without_head(classes(), "encoder").classify("bad"), classes().classify("bad")
    found = classes().edited(SILENT).classify(["bad", "cab"])[0]
    assert found == (other[0], pytest.approx(other[1], rel=1e-5))
    assert found != (whole[0], pytest.approx(whole[1], rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_edit_applies_to_sources_and_targets(side):
    place = "block_*/attention/heads" if side == "decoder" else "encoder/block_*/attention/heads"
    edit, other = zero(place, heads=1), without_head(pairs(), side)
    pair = "bad", "feed"
    assert pairs().edited(edit).generate("badcab", 6) == other.generate("badcab", 6)
    assert pairs().edited(edit).search("bad", 4, beams=2)[0][0] == pytest.approx(
        other.search("bad", 4, beams=2)[0][0], rel=1e-5
    )
    written, other_written = (
        pairs().edited(edit).inspect.attention("bad"),
        other.inspect.attention("bad"),
    )
    assert written.tokens == other_written.tokens
    np.testing.assert_allclose(written.cross, other_written.cross, atol=1e-6)
    nats = pairs().edited(edit).score(pair).nats
    assert nats == pytest.approx(other.score(pair).nats, rel=1e-5)
    assert nats != pytest.approx(pairs().score(pair).nats, rel=1e-3)
    drawn = dict(sampler=tj.Sample(), key=KEY, samples=3)
    texts = [m.generate("bad", 6, **drawn) for m in (pairs().edited(edit), other, pairs())]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_steering_vector_is_difference_of_means_and_changes_text():
    place, model = "block_0/residual", tj.build(plain().config)
    texts = ["bad", "cab", "feed"], ["dig", "kid"]
    rows = [[LETTERS.encode(text) for text in part] for part in texts]

    def streams(row):
        found = model.apply({"params": plain().params}, np.array([row]), capture=(place,))
        return np.asarray(found[2][place], np.float64)[0]

    for over, read in {"last": lambda x: x[-1], "all": lambda x: x.mean(0)}.items():
        vector = steering_vector(model, plain().params, *rows, place, over=over)
        means = [np.mean([read(streams(row)) for row in part], axis=0) for part in rows]
        np.testing.assert_allclose(vector, means[0] - means[1], atol=1e-5)
    moved = plain().edited(add(place, 30 * vector)).generate("bad", 6)
    step = tj.make_step(model.edited(add(place, 30 * vector)))
    cache = tj.init_cache(plain().config, 1, 17)
    ids = tj.generate(step, plain().params, np.array([LETTERS.encode("bad")]), cache, num_tokens=6)
    assert moved == LETTERS.decode(ids.tokens[0]) != plain().generate("bad", 6)


@pytest.mark.parametrize(
    "call",
    [
        lambda edit: plain().edited(edit).generate("bad", 2),
        lambda edit: plain().edited(edit).generate("bad", 2, beams=2),
        lambda edit: plain().edited(edit).score("bad"),
        lambda edit: plain().edited(edit).inspect.attention("bad"),
        lambda edit: pairs().edited(edit).generate("bad", 2),
        lambda edit: pairs().edited(edit).score(("bad", "cab")),
        lambda edit: masked().edited(edit).candidates("b_d"),
        lambda edit: classes().edited(edit).classify("bad"),
        lambda edit: chat().edited(edit).chat("bad", 2),
    ],
)
def test_edit_that_is_not_dict_is_rejected(call):
    with pytest.raises(
        ValueError, match="edit is of type list: must be a dict that maps places to functions"
    ):
        call([SILENT])


def log_p(model, ids, **options) -> np.ndarray:
    logits = logits_of(model, ids[:-1], **options)
    return np.array([-nats(row[None], ids[n + 1 : n + 2])[0] for n, row in enumerate(logits)])


@pytest.mark.slow
def test_edits_receive_tokens_without_padding():
    """For a mean, the last token, values of the same number of tokens, and `at`."""
    ids, place = LETTERS.encode("badcabd"), "block_0/attention/heads"
    values = tj.build(plain().config).apply(
        {"params": plain().params}, ids[None, ::-1][:, :-1], capture=(place,)
    )
    edits = {
        "mean": mean(place, "tokens"), "last": {"block_0/residual": lambda x: x.at[:, -1].set(0.3)},
        "resample": resample(values[2]), "at": add("embedding", np.arange(8.0), at=5),
    }  # fmt: skip
    for name, edit in edits.items():
        wanted = log_p(plain(), ids, edit=edit)
        assert -plain().edited(edit).score("badcabd").nats == pytest.approx(wanted.sum(), rel=1e-5)
        (found,) = plain().edited(edit).continuations([("badca", "bd")])
        assert found.log_prob == pytest.approx(wanted[4:].sum(), rel=1e-5), name
        assert wanted.sum() != pytest.approx(log_p(plain(), ids).sum(), rel=1e-3), name
    outside = plain().edited(zero("embedding", at=12))
    for call in (outside.score, lambda x: outside.generate(x, 2)):
        with pytest.raises(ValueError, match=r"at is 12: must be from 0 to "):
            call("badcabd")


def test_edits_receive_the_index_of_the_first_token_of_each_window(monkeypatch):
    firsts = []

    def nats_of(model, row, module):
        firsts.append(dict(module.edits)["embedding"].first)
        return [0.0] * int((row.labels != IGNORE).sum())

    monkeypatch.setattr(scores, "_nats", nats_of)
    edited = plain().edited(add("embedding", np.arange(8.0), at=12))
    found = edited.score("badcabfeedfacebadcabfeed", window=11, stride=5)
    assert len(found.token_nats) == 23 and sorted(firsts) == [0, 5, 10, 15]


@pytest.mark.slow
def test_edit_indices_in_windows_are_relative_to_text_start():
    """In a window that begins at token 8, token 12 has index 4."""
    text, vector = "badcabfeedfacebadcabfeed", np.arange(8.0)
    ids = LETTERS.encode(text)
    edit = add("embedding", vector, at=12)
    found = plain().edited(edit).score(text, window=16, stride=8).token_nats
    first = log_p(plain(), ids[:17], edit=edit)
    second = log_p(plain(), ids[8:], edit=add("embedding", vector, at=4))
    np.testing.assert_allclose(-np.array(found), [*first, *second[8:]], rtol=1e-4)
    with pytest.raises(ValueError, match="edit of embedding needs all tokens of a sequence"):
        plain().edited(mean("embedding", "tokens")).score(text, window=16)


@pytest.mark.slow_except("generate")
@pytest.mark.parametrize("name", ["generate", "samples", "evaluate"])
def test_edit_across_different_texts_is_rejected(tmp_path, name):
    edit = mean("block_0/residual", "rows")
    file = written(tmp_path, ["badcabfeedface" * 3])
    calls = {
        "generate": lambda: plain().edited(edit).generate(["bad", "cab"], 2),
        "samples": lambda: plain().edited(edit).generate(
            "bad", 2, samples=3, sampler=tj.Sample(), key=KEY
        ),
        "evaluate": lambda: plain().edited(edit).evaluate(file, context=7),
    }  # fmt: skip
    with pytest.raises(ValueError, match="edit of block_0/residual combines rows"):
        calls[name]()


@pytest.mark.slow
def test_edited_classification_does_not_depend_on_other_texts():
    """A mean over tokens sees neither the padding of a list nor empty rows."""
    edit = {"block_0/residual": lambda x: x - x.mean(axis=1, keepdims=True)}
    together = classes().edited(edit).classify(["bad", "cabbage"])
    single = [classes().edited(edit).classify(text) for text in ("bad", "cabbage")]
    for (label, p), (wanted, q) in zip(together, single, strict=True):
        assert label == wanted and p == pytest.approx(q, rel=1e-5)
