"""The experiment on pruned heads: masks, scores and word links against plain loops."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import partial

import jax
import numpy as np
import pytest

import transformer_jax as tj
from reproduce.interpret import pruning
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.loading import TextModel
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.metrics import compare_texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = {"ein": "a", "hund": "dog", "mann": "man", "läuft": "runs", "sieht": "sees", "rot": "red"}
CONFIG = dataclasses.replace(
    pruning.CONFIG, d_model=14, num_layers=2, num_heads=2, head_dim=6, d_ff=11, init_std=0.5,
    dropout=0.0, max_len=20,
)  # fmt: skip


def sentences(count: int, seed: int = 3) -> list[tuple[str, str]]:
    """Return pairs of two to five words; the target has the translations in reverse order."""
    random = np.random.default_rng(seed)
    drawn = [random.choice(list(WORDS), random.integers(2, 6), replace=False) for _ in range(count)]
    return [(" ".join(row), " ".join(WORDS[word] for word in row[::-1])) for row in drawn]


@pytest.fixture(scope="module")
def model() -> TextModel:
    sides = [with_special_tokens(WordTokenizer(tuple(words)), ["bos", "eos"])
             for words in (WORDS, WORDS.values())]  # fmt: skip
    config = dataclasses.replace(CONFIG, vocab_size=10, source_vocab_size=10)
    run = TrainConfig(model=config, task=Seq2SeqTask(beams=1), tokenizer="word", context=11)
    params = tj.init_params(config, jax.random.key(5))
    return TextModel(config, params, sides[1], run=run, source_tokenizer=sides[0])


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory) -> pruning.Rows:
    return read(model, sentences(7), tmp_path_factory.mktemp("pairs"))


def read(model, sentence_pairs, folder, count=1000) -> pruning.Rows:
    files = str(folder / "source"), str(folder / "target")
    for file, column in zip(files, zip(*sentence_pairs, strict=True), strict=True):
        with open(file, "w") as out:
            out.write("".join(f"{line}\n" for line in column))
    return pruning.read_rows(model, files, count)


def scaled(params, kind: str, layer: int, head: int, by: float):
    """Return parameters with the output-matrix rows of a head multiplied by `by`."""
    side = "encoder" if kind == "encoder" else "decoder"
    branch = "cross_attention" if kind == "source" else "attention"
    place = f"['{side}']['block_{layer}']['{branch}']['out']['kernel']"

    def scale(path, leaf):
        if jax.tree_util.keystr(path) != place:
            return leaf
        leaf = np.array(leaf)
        leaf[head] *= by
        return leaf

    changed = jax.tree_util.tree_map_with_path(scale, params)
    assert any(x is not y for x, y in zip(*map(jax.tree.leaves, (changed, params)), strict=True))
    return changed


def test_pruning_rows_contain_sentence_pairs_and_padding(model, rows):
    one, two = (dict(zip(words, range(2, 8), strict=True)) for words in (WORDS, WORDS.values()))
    for n, (source, target) in enumerate(sentences(7)):
        read, wanted = [one[word] for word in source.split()], [two[w] for w in target.split()]
        assert rows.source[n][rows.positions[n] >= 0].tolist() == read
        assert rows.positions[n].max() == len(read) - 1
        end = len(wanted)
        assert rows.labels[n, : end + 1].tolist() == [*wanted, 9]
        assert (rows.labels[n, end + 1 :] == pruning.IGNORE).all()
        assert rows.tokens[n, : end + 1].tolist() == [8, *wanted] and rows.texts[n] == target


def test_head_mask_equals_zeroed_output_rows(model, rows):
    apply = jax.jit(
        lambda params, masks: tj.build(model.config).edited(pruning.edits(masks)).apply(
            {"params": params}, rows.tokens, source=rows.source, source_positions=rows.positions,
        )[0]
    )  # fmt: skip
    ones = np.ones((3, 2, 1, 2), np.float32)
    whole = apply(model.params, ones)
    for k, kind in enumerate(pruning.KINDS):
        masks = ones.copy()
        masks[k, 1, :, 0] = 0
        found = np.asarray(apply(model.params, masks))
        np.testing.assert_allclose(
            found, apply(scaled(model.params, kind, 1, 0, 0.0), ones), atol=1e-5
        )
        assert np.abs(found - whole).max() > 1e-3, kind


@pytest.mark.slow
def test_head_importance_matches_mean_absolute_central_differences(model, rows, monkeypatch):
    monkeypatch.setattr(pruning, "ROWS", 5)  # in two parts
    found, slopes, own = pruning.importance(model, rows), np.zeros((3, 2, 2)), rows.labels >= 0
    source = dict(source=rows.source, source_positions=rows.positions)
    apply = jax.jit(partial(tj.build(model.config).apply, **source))

    def log_p(kind: str, layer: int, head: int, by: float) -> np.ndarray:  # [B]
        params = scaled(model.params, kind, layer, head, by)
        logits = np.asarray(apply({"params": params}, rows.tokens)[0], np.float64)
        p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        labels = np.where(own, rows.labels, 0)[..., None]
        return np.where(own, np.take_along_axis(p, labels, axis=-1)[..., 0], 0).sum(axis=1)

    for (k, *at), _ in np.ndenumerate(slopes):
        up, down = (log_p([*pruning.KINDS][k], *at, 1 + e) for e in (0.01, -0.01))
        slopes[k, *at] = np.abs(up - down).mean() / 0.02
    wanted = slopes / np.linalg.norm(slopes, axis=-1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-2)


def test_word_probabilities_match_ibm_model_1_reference(model, rows):
    """Run expectation-maximisation of IBM model 1 for five iterations."""
    found = pruning.fit_words(rows.source, rows.positions, rows.labels)
    pairs = [
        (source[positions >= 0].tolist(), labels[labels != pruning.IGNORE].tolist())
        for source, positions, _, labels in zip(*rows[:4], strict=True)
    ]
    p: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(5):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        for source, target in pairs:
            for t in target:
                total = sum(p[s, t] for s in source)
                for s in source:
                    counts[s, t] += p[s, t] / total
        sums: dict[int, float] = defaultdict(float)
        for (s, _), count in counts.items():
            sums[s] += count
        p = defaultdict(float, {(s, t): n / sums[s] for (s, t), n in counts.items()})
    assert len(found.codes) == len(p)
    for code, value in zip(found.codes, found.p, strict=True):
        assert value == pytest.approx(p[divmod(int(code), found.size)])


def test_alignment_links_connect_words_with_translations(model, tmp_path):
    rows = read(model, sentences(101), tmp_path)
    words = pruning.fit_words(rows.source, rows.positions, rows.labels)
    found = pruning.links(words, rows, (9,))
    wanted = {
        (n, s, len(source.split()) - 1 - s)
        for n, (source, _) in enumerate(sentences(101))
        for s in range(len(source.split()))
    }
    assert {tuple(row) for row in found.tolist()} == wanted
    unknown = rows._replace(source=np.where(rows.source == 3, 0, rows.source))
    left = pruning.links(words, unknown, (9,))
    assert {tuple(x) for x in left.tolist()} == {x for x in wanted if unknown.source[x[:2]] > 0}


@pytest.mark.slow
def test_head_counts_as_aligned_if_largest_weight_hits_linked_word(model, rows):
    linked = np.array([(n, s, t) for n in range(2) for s in (0, 1) for t in (0, 1, 2)])
    found = pruning.aligned(model, rows, linked)
    weights = [LanguageModel(model, "run").inspect.attention(pair).cross for pair in sentences(2)]
    most = np.array([np.argmax(weights[n][..., t, :], axis=-1) == s for n, s, t in linked])
    np.testing.assert_allclose(found, most.mean(axis=0))
    assert 0 < found.mean() < 1


@pytest.mark.slow
def test_bleu_is_computed_for_text_generated_with_head_masked(model, rows):
    wanted = [target for _, target in sentences(7)]
    texts = []
    for masked in (False, True):
        masks = np.ones((3, 2, 2))
        masks[2, 0, 1] = 1 - masked
        params = scaled(model.params, "source", 0, 1, 0.0) if masked else model.params
        texts.append(
            answer_sources(
                model.run, pruning.pairs.tokenizers(model), params, [s for s, _ in sentences(7)],
                num_tokens=pruning.LONGEST,
            )
        )  # fmt: skip
        assert pruning.bleu(model, rows, masks) == compare_texts(texts[-1], wanted)["bleu"]
    assert texts[0] != texts[1]


def test_removable_head_fraction_ends_at_first_bleu_drop():
    assert pruning.share_that_goes(np.array([30.0, 29.5, 29.2, 25, 29.9])) == 0.5
    assert pruning.share_that_goes(np.array([30.0, 28, 31, 31, 31])) == 0
    assert pruning.share_that_goes(np.array([30.0, 31, 31, 31, 29.5])) == 1


@pytest.mark.long
def test_pruning_command_trains_prunes_and_draws_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pruning, "CONFIG", CONFIG)
    monkeypatch.setitem(pruning.RECIPE, "word_count", 1)
    for part, count in (("train", 40), ("val", 6), ("test_2016_flickr", 5)):
        for name, column in zip(("de", "en"), zip(*sentences(count), strict=True), strict=True):
            (tmp_path / f"{part}.{name}").write_text("".join(f"{line}\n" for line in column))
    flags = f"--seeds 1 --steps 3 --width 14 --sentences 5 --data {tmp_path} --format svg"
    (found,) = pruning.main([*flags.split(), "--runs", str(tmp_path), "--out", str(tmp_path)])
    assert found.single.shape == found.importance.shape == (3, 2, 2)
    assert sorted(found.order) == list(range(12)) and found.pruned.shape == (2, 13)
    assert (found.pruned[:, 0] == found.bleu).all() and found.pruned[0, -1] == found.pruned[1, -1]
    assert f"{found.minutes:.3g}" in capsys.readouterr().out
    assert (tmp_path / "pruning.svg").exists()


def test_pruning_command_requires_data_folder(capsys):
    with pytest.raises(SystemExit):
        pruning.main(["--runs", "runs"])
    assert "required: --data" in capsys.readouterr().err
