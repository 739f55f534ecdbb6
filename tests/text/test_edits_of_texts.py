"""Edits of a loaded model's texts: a silenced head is one whose rows of the output matrix are 0."""

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
from transformer_jax.decoding.completion import TextGenerator
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.inside import add, mean, resample, steering_vector, zero
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.text.translation import search_translations, translate
from transformer_jax.training import batch

pytestmark = pytest.mark.usefixtures("quick_compilation")
SILENT = zero("block_*/attention/heads", heads=1)


def silenced(params, *sides):
    """Return parameters in which head 1 of every block of these sides gives nothing."""

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
def test_every_way_to_write_a_text_is_edited():
    other, drawn = without_head(plain(), "decoder"), dict(sampler=tj.Sample(), key=KEY)
    calls = {
        "one": lambda m, **e: m.generate("bad", 7, **e),
        "outgrown": lambda m, **e: m.generate("badcab" * 2, 9, **e),
        "stream": lambda m, **e: "".join(m.generate("bad", 7, stream=True, **e)),
        "list": lambda m, **e: m.generate(["bad", "a", "badcab" * 2], 9, **drawn, **e),
        "samples": lambda m, **e: m.generate("bad", 5, samples=3, **drawn, **e),
        "beams": lambda m, **e: m.generate("bad", 5, beams=3, **e),
        "search": lambda m, **e: [text for _, text in m.search("bad", 5, beams=3, results=2, **e)],
        "score": lambda m, **e: np.round(m.score("badcabfeed", **e).nats, 3),
    }
    whole = {name: call(plain()) for name, call in calls.items()}
    for name, call in calls.items():
        assert call(plain(), edit=SILENT) == call(other), name
    assert {name: call(plain()) for name, call in calls.items()} == whole, "nothing stays edited"
    assert sum(whole[name] != call(other) for name, call in calls.items()) > 5


@pytest.mark.slow
def test_answers_targets_and_masks_are_edited():
    other = without_head(chat(), "decoder")
    assert chat().chat("bad", 6, edit=SILENT) == other.chat("bad", 6) != chat().chat("bad", 6)
    assert chat().score(TURNS, edit=SILENT).nats == pytest.approx(other.score(TURNS).nats, rel=1e-5)
    prefixes = run_of(PrefixTask(), names=["sep", "eos"])
    other = without_head(prefixes, "decoder")
    assert prefixes.generate("bad", 6, edit=SILENT) == other.generate("bad", 6)
    assert prefixes.generate("bad", 6) != other.generate("bad", 6)
    other = without_head(masked(), "encoder")
    assert masked().generate("b_d_", edit=SILENT) == other.generate("b_d_")
    found, wanted, whole = (
        [p for _, p in m.candidates("b_d", count=3, **e)[0]]
        for m, e in ((masked(), dict(edit=SILENT)), (other, {}), (masked(), {}))
    )
    assert found == pytest.approx(wanted, rel=1e-5) and found != pytest.approx(whole, rel=1e-3)


def by_score(model: LanguageModel, context: str, text: str, **edited) -> float:
    """log p of a text after a context, by the scores of both."""
    after = model.score(context + text, **edited).token_nats[-len(text) :]
    return -sum(after)


@pytest.mark.slow
def test_choices_and_continuations_without_a_head_are_those_of_the_scores():
    """Also where a context is shared, which is then read anew for each."""
    other, context = without_head(plain(), "decoder"), "badcabfeed"
    texts = ["cab", "c", "jade"]
    question = {"context": context, "choices": texts, "answer": 2}
    found = plain().multiple_choice([question], edit=SILENT).log_probs[0]
    assert found == pytest.approx(other.multiple_choice([question]).log_probs[0], rel=1e-5)
    assert found == pytest.approx([by_score(plain(), context, x, edit=SILENT) for x in texts])
    assert found != pytest.approx(plain().multiple_choice([question]).log_probs[0], rel=1e-3)
    both = [(context, text) for text in texts]
    assert [one.log_prob for one in plain().continuations(both, edit=SILENT)] == list(found)
    of_logits = {"logits": lambda x: 0 * x}  # every token is as likely as another
    even = plain().continuations(both, edit=of_logits)
    assert [one.log_prob for one in even] == pytest.approx(
        [-len(text) * np.log(11) for text in texts]
    )


def written(folder, lines) -> str:
    (folder / "data").write_text("\n".join(lines))
    return str(folder / "data")


def evaluated(folder, model: LanguageModel, **options) -> tuple[dict, dict, dict]:
    """Return the measures of a model with an edit, of edited parameters, and of the model alone."""
    kind = model.config.kind
    other = without_head(model, "encoder" if kind == "encoder" else "decoder")
    edited = model.evaluate(*folder, edit=SILENT, **options)
    return edited, other.evaluate(*folder, **options), model.evaluate(*folder, **options)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("logits_at_once", [1, 2**26])
def test_held_out_loss_without_a_head_is_that_of_zeros_in_its_rows(
    tmp_path, monkeypatch, logits_at_once
):
    """Also where logits are computed in chunks, and are twice as large by an edit of their own."""
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
    edited = plain().evaluate(file, context=7, edit=edit)["nats_per_token"]
    assert edited == pytest.approx(wanted, rel=1e-5) and edited != pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs", "prefix", "masks", "classes"])
def test_every_task_is_judged_with_an_edit(tmp_path, name):
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
def test_attention_is_that_of_the_edited_values():
    other, whole = without_head(plain(), "decoder").attend("badcab"), plain().attend("badcab")
    found = plain().attend("badcab", edit=SILENT)
    np.testing.assert_allclose(found.weights, other.weights, atol=1e-6)
    np.testing.assert_array_equal(found.weights[0], whole.weights[0])
    assert np.abs(found.weights[1] - whole.weights[1]).max() > 1e-3
    uniform = {"block_1/attention/weights": lambda w: w * 0 + 0.25}
    assert (plain().attend("badcab", edit=uniform).weights[1] == 0.25).all()


@pytest.mark.slow
def test_classes_are_those_of_the_edited_values():
    other, whole = without_head(classes(), "encoder").classify("bad"), classes().classify("bad")
    found = classes().classify(["bad", "cab"], edit=SILENT)[0]
    assert found == (other[0], pytest.approx(other[1], rel=1e-5))
    assert found != (whole[0], pytest.approx(whole[1], rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_sources_are_read_and_targets_written_with_edits(side):
    place = "block_*/attention/heads" if side == "decoder" else "encoder/block_*/attention/heads"
    edit, other = zero(place, heads=1), without_head(pairs(), side)
    pair = "bad", "feed"
    assert pairs().generate("badcab", 6, edit=edit) == other.generate("badcab", 6)
    assert pairs().search("bad", 4, beams=2, edit=edit)[0][0] == pytest.approx(
        other.search("bad", 4, beams=2)[0][0], rel=1e-5
    )
    written, other_written = pairs().attend("bad", edit=edit), other.attend("bad")
    assert written.tokens == other_written.tokens
    np.testing.assert_allclose(written.cross, other_written.cross, atol=1e-6)
    nats = pairs().score(pair, edit=edit).nats
    assert nats == pytest.approx(other.score(pair).nats, rel=1e-5)
    assert nats != pytest.approx(pairs().score(pair).nats, rel=1e-3)
    source = np.array([1, 0, 3], np.int32)

    def written(params, **e):
        drawn = dict(sampler=Sample(Temperature(0.0)), key=KEY)
        generator = TextGenerator(pairs().config, params, pairs().tokenizer, **drawn, **e)
        once = translate(generator, source, 4, start=0)
        best = search_translations(generator, source, 4, start=0, beams=2)
        return once, [text for _, text in best], np.round(best[0][0], 4)

    assert written(pairs().params, edit=edit) == written(other.params) != written(pairs().params)


@pytest.mark.slow
def test_a_steering_vector_is_the_difference_of_means_and_moves_texts():
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
    moved = plain().generate("bad", 6, edit=add(place, 30 * vector))
    step = tj.make_step(model, edit=add(place, 30 * vector))
    cache = tj.init_cache(plain().config, 1, 17)
    ids = tj.generate(step, plain().params, np.array([LETTERS.encode("bad")]), cache, num_tokens=6)
    assert moved == LETTERS.decode(ids.tokens[0]) != plain().generate("bad", 6)


@pytest.mark.parametrize(
    "ask",
    [
        lambda edit: plain().generate("bad", 2, edit=edit),
        lambda edit: plain().generate("bad", 2, beams=2, edit=edit),
        lambda edit: plain().score("bad", edit=edit),
        lambda edit: plain().attend("bad", edit=edit),
        lambda edit: pairs().generate("bad", 2, edit=edit),
        lambda edit: pairs().score(("bad", "cab"), edit=edit),
        lambda edit: masked().candidates("b_d", edit=edit),
        lambda edit: classes().classify("bad", edit=edit),
        lambda edit: chat().chat("bad", 2, edit=edit),
    ],
)
def test_an_edit_that_is_no_dict_is_named(ask):
    with pytest.raises(ValueError, match="edit is a list: must be a dict of place to function"):
        ask([SILENT])


def log_p(model, ids, **given) -> np.ndarray:
    logits = logits_of(model, ids[:-1], **given)
    return np.array([-nats(row[None], ids[n + 1 : n + 2])[0] for n, row in enumerate(logits)])


@pytest.mark.slow
def test_scores_are_those_of_edits_that_see_the_tokens_alone():
    """No padding: in a mean, at the last token, in values of as many tokens, in `at`."""
    ids, place = LETTERS.encode("badcabd"), "block_0/attention/heads"
    values = tj.build(plain().config).apply(
        {"params": plain().params}, ids[None, ::-1][:, :-1], capture=(place,)
    )
    edits = {
        "mean": mean(place, "tokens"),
        "last": {"block_0/residual": lambda x: x.at[:, -1].set(0.3)},
        "resample": resample(values[2]),
        "at": add("embedding", np.arange(8.0), at=5),
    }
    for name, edit in edits.items():
        wanted = log_p(plain(), ids, edit=edit)
        assert -plain().score("badcabd", edit=edit).nats == pytest.approx(wanted.sum(), rel=1e-5)
        (found,) = plain().continuations([("badca", "bd")], edit=edit)
        assert found.log_prob == pytest.approx(wanted[4:].sum(), rel=1e-5), name
        assert wanted.sum() != pytest.approx(log_p(plain(), ids).sum(), rel=1e-3), name
    for call in (plain().score, lambda x, **e: plain().generate(x, 2, **e)):
        with pytest.raises(ValueError, match=r"at is 12: must be in 0\.\."):
            call("badcabd", edit=zero("embedding", at=12))


@pytest.mark.slow
def test_a_text_in_windows_counts_from_its_first_token():
    """A window that begins at token 8 has token 12 as its fourth."""
    text, vector = "badcabfeedfacebadcabfeed", np.arange(8.0)
    ids = LETTERS.encode(text)
    edit = add("embedding", vector, at=12)
    found = plain().score(text, window=16, stride=8, edit=edit).token_nats
    first = log_p(plain(), ids[:17], edit=edit)
    second = log_p(plain(), ids[8:], edit=add("embedding", vector, at=4))
    np.testing.assert_allclose(-np.array(found), [*first, *second[8:]], rtol=1e-4)
    with pytest.raises(ValueError, match="edit of embedding needs all tokens of a sequence"):
        plain().score(text, window=16, edit=mean("embedding", "tokens"))


@pytest.mark.slow_except("generate")
@pytest.mark.parametrize("name", ["generate", "samples", "evaluate"])
def test_rows_that_are_other_texts_are_not_averaged(tmp_path, name):
    edit = mean("block_0/residual", "rows")
    file = written(tmp_path, ["badcabfeedface" * 3])
    calls = {
        "generate": lambda: plain().generate(["bad", "cab"], 2, edit=edit),
        "samples": lambda: plain().generate("bad", 2, samples=3, sampler=tj.Sample(), key=KEY,
                                            edit=edit),
        "evaluate": lambda: plain().evaluate(file, context=7, edit=edit),
    }  # fmt: skip
    with pytest.raises(ValueError, match="edit of block_0/residual takes rows together"):
        calls[name]()


@pytest.mark.slow
def test_a_class_is_of_the_text_alone():
    """Texts of a list are filled up to the longest, and with rows of none: a mean sees neither."""
    edit = {"block_0/residual": lambda x: x - x.mean(axis=1, keepdims=True)}
    together = classes().classify(["bad", "cabbage"], edit=edit)
    alone = [classes().classify(text, edit=edit) for text in ("bad", "cabbage")]
    for (label, p), (wanted, q) in zip(together, alone, strict=True):
        assert label == wanted and p == pytest.approx(q, rel=1e-5)
