"""Attention maps, neighbours of words, candidates of masks and n-best lists."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import transformer_jax as tj
from tests.text.models import CONFIG, LETTERS, masked, model_of, pairs, plain, prefix
from transformer_jax.config import ConfigError, RecurrentConfig, TrainConfig
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.text.inspect import AttentionMaps
from transformer_jax.text.tables import Table
from transformer_jax.tokenizers.special import encode_text, special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import BPETokenizer, WordTokenizer
from transformer_jax.training.tasks.answers import PrefixStep

pytestmark = pytest.mark.usefixtures("quick_compilation")


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def captured(model, ids, *names, **options) -> list[np.ndarray]:
    apply = jax.jit(lambda params, ids: build(model.config).apply(
        {"params": params}, ids, capture=names, **options
    )[-1])  # fmt: skip
    found = apply(model.params, np.array([ids]))
    return [np.asarray(found[name], np.float64)[0] for name in names]


def softmax_of_scores(model, ids, part: str, causal: bool, **options) -> np.ndarray:  # [L, N, T, S]
    blocks = [f"block_{i}/{part}" for i in range(model.config.num_layers)]
    found = captured(model, ids, *(f"{b}/{x}" for x in ("query", "key") for b in blocks), **options)
    q, k = np.array(found[: len(blocks)]), np.array(found[len(blocks) :])
    scores = np.einsum("ltnh,lsnh->lnts", q, k) / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(*scores.shape[2:]) > 0, scores, -np.inf) if causal else scores)


def test_attention_weights_are_softmax_of_scores():
    ids, seen = LETTERS.encode("badcab"), plain().inspect.attention("badcab")
    wanted = softmax_of_scores(plain(), ids, "attention", causal=True)
    np.testing.assert_allclose(seen.weights, wanted, atol=1e-6)


@pytest.mark.slow
def test_cross_attention_is_captured_for_generated_target():
    target = pairs().generate("bad")
    seen, source = pairs().inspect.attention("bad"), LETTERS.encode("bad")[None]
    whole = pairs().inspect.attention(("bad", target))
    assert seen.tokens == whole.tokens == ["<bos>", *target]
    assert seen.written == [*target, "<eos>"] and seen.source_tokens == list("bad")
    ids = [special_ids(pairs().tokenizer)["bos"], *encode_text(pairs().tokenizer, target)]
    wanted = softmax_of_scores(pairs(), ids, "cross_attention", causal=False, source=source)
    np.testing.assert_allclose(seen.cross, wanted, atol=1e-6)


def recurrent(**fields):
    tokenizer = with_special_tokens(LETTERS, ["bos", "eos"])
    config = RecurrentConfig(
        vocab_size=13, source_vocab_size=13, d_embed=5, d_hidden=7, cell="gru", init_std=0.7,
        **fields,
    )  # fmt: skip
    run = TrainConfig(model=config, task=Seq2SeqTask(beams=1), context=17, batch_size=2)
    return model_of(config, tokenizer, run=run)


@pytest.mark.slow
def test_recurrent_attention_is_softmax_of_dot_products():
    """The scores of attention="dot" are h . m, for the state h after the cell."""
    model = recurrent(attention="dot")
    seen, source = model.inspect.attention(("bad", "feed")), LETTERS.encode("bad")[None]
    ids = [special_ids(model.tokenizer)["bos"], *LETTERS.encode("feed")]
    names = "layer_0/hidden", "encoder/layer_0/output"
    h, m = captured(model, ids, *names, source=source)
    assert seen.cross.shape == (1, 1, 5, 3) and seen.weights.shape[0] == 0
    np.testing.assert_allclose(seen.cross[0, 0], softmax(h @ m.T), atol=1e-6)
    assert seen.written == [*"feed", "<eos>"] and seen.encoder is None
    (image, _) = seen.plot().axes[0].images
    np.testing.assert_array_equal(image.get_array(), seen.cross[0, 0])
    with pytest.raises(ConfigError, match="part is 'self': must be 'cross' for this model"):
        seen.plot(part="self")
    with pytest.raises(ConfigError, match=r"'here' \(RecurrentConfig\) has no attention"):
        recurrent().inspect.attention(("bad", "feed"))


ODD = [
    " ", "\n", "\\xe4\\xbd", "\u4e2d\u6587", "\u0ca4", "мир", "שלום", "$x^2$", "_a_", "\ud800",
    "\u0301", "", "a" * 40, "🙂", "\xa0", "%", "<unk>", "{}", "\\frac",
]  # fmt: skip


def made(L, N, tokens) -> AttentionMaps:
    rng = np.random.default_rng(L)
    weights = softmax(3 * rng.standard_normal((L, N, len(tokens), len(tokens))))
    return AttentionMaps(tokens, weights.astype(np.float32))


@pytest.mark.slow_except("2-3-tokens2")
@pytest.mark.parametrize(
    ("L", "N", "tokens"),
    [
        (1, 1, ["a"]), (3, 2, [" to", " be"]), (2, 3, ODD),
        (12, 12, [f" word{i}" for i in range(11)]),
    ],
)  # fmt: skip
def test_picture_labels_stay_within_bounds_without_overlap(L, N, tokens):
    """For any characters in the tokens; a warning about a glyph would fail the test."""
    seen = made(L, N, tokens)
    figure = seen.plot()
    figure.canvas.draw()
    axes, box = figure.axes[0], figure.bbox
    assert len(axes.images) == L * N + 1  # plus the colour bar
    for number, image in enumerate(axes.images[:-1]):
        layer, head = number % L, number // L
        np.testing.assert_array_equal(image.get_array(), seen.weights[layer, head])
        heading = next(text for text in axes.texts if text.get_text() == f"head {head}")
        assert heading.get_position()[0] == pytest.approx(np.mean(image.get_extent()[:2]))
    assert {text.get_rotation() for text in axes.texts} <= {0.0, 90.0}
    places = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    for text, place in places:
        assert box.x0 <= place.x0 and place.x1 <= box.x1, text
        assert box.y0 <= place.y0 and place.y1 <= box.y1, text
    # Boxes have empty margins, so small overlaps are allowed.
    for n, (text, one) in enumerate(places):
        for other_text, other in places[n + 1 :]:
            height = 0.35 * min(one.height, other.height, one.width, other.width)
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(across, down) <= height, (text, other_text)


def test_attention_plot_shows_selected_component_layer_and_head(tmp_path):
    rng = np.random.default_rng(3)
    sizes = dict(weights=(2, 2, 5, 5), cross=(2, 2, 5, 3), encoder=(3, 2, 3, 3))
    drawn = {name: softmax(rng.standard_normal(size)) for name, size in sizes.items()}
    written = [*"feed", "<eos>"]
    seen = AttentionMaps(["<bos>", *"feed"], source_tokens=[*"bad"], written=written, **drawn)
    (image, _) = seen.plot(part="cross", layer=1, head=0).axes[0].images
    np.testing.assert_array_equal(image.get_array(), seen.cross[1, 0])
    texts = [text.get_text() for text in seen.plot(part="cross", layer=1, head=0).axes[0].texts]
    assert {"layer 1", "head 0", *"bad", *"feed", "<eos>"} <= {*texts}
    assert f"{seen.cross[1, 0, 2, 1]:.2f}" in texts
    assert len(seen.plot().axes[0].images) == 4 + 4 + 6 + 1
    assert len(seen.plot(head=1).axes[0].images) == 2 + 2 + 3 + 1
    for suffix in ("png", "svg"):
        seen.plot(part="self").savefig(tmp_path / f"map.{suffix}")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "map.svg").read_text()
    for options, rule in (
        (dict(layer=2), "layer is 2: must be from 0 to 1 for cross-attention"),
        (dict(head=-1), "head is -1: must be from 0 to 1 for cross-attention"),
        (dict(part="both"), "part is 'both': must be 'cross' or 'self' or 'encoder'"),
    ):
        with pytest.raises(ConfigError, match=rule):
            seen.plot(**options)


def cosines(table: np.ndarray, wanted: np.ndarray) -> list[float]:
    return [float(row @ wanted / np.sqrt((row @ row) * (wanted @ wanted))) for row in table]


@pytest.mark.slow
def test_nearest_words_have_largest_embedding_cosines():
    table = np.asarray(plain().params["embed"]["tokens"], np.float64)
    of_c = cosines(table, table[2])
    found = plain().inspect.nearest("c", count=20)
    assert [text for text, _ in found] == [
        LETTERS.decode([i]) for i in np.argsort(of_c)[::-1] if i != 2
    ]
    assert [one for _, one in found] == pytest.approx(sorted(of_c, reverse=True)[1:], rel=1e-9)
    unit = [row / np.sqrt(row @ row) for row in table]
    wanted = cosines(table, unit[2] - unit[0] + unit[4] + unit[5])
    others = [i for i in np.argsort(wanted)[::-1] if i not in (0, 2, 4, 5)]
    found = plain().inspect.nearest("c", minus="a", plus=["e", "f"], count=3)
    assert found == [(LETTERS.decode([i]), pytest.approx(wanted[i])) for i in others[:3]]
    quantized = replace(plain().model, params=tj.quantize(plain().params, "int8", embeddings=True))
    assert (
        type(plain())(quantized, "here").inspect.nearest("c", count=1)[0][0]
        == plain().inspect.nearest("c")[0][0]
    )


def test_adding_and_subtracting_word_cancels_exactly():
    """A rounding error would otherwise decide the direction."""
    assert plain().inspect.nearest("c", minus=["a", "e"], plus=["e", "a", "f"]) == [
        (text, pytest.approx(cosine, rel=1e-9))
        for text, cosine in plain().inspect.nearest("c", plus="f", count=11) if text not in "ae"
    ]  # fmt: skip
    for minus, plus in ((["a", "c"], "a"), (["f", "b", "c"], ["b", "f"])):
        with pytest.raises(ValueError, match="the sum of the vectors is 0, which has no direction"):
            plain().inspect.nearest("c", minus=minus, plus=plus)


@pytest.mark.slow
def test_nearest_words_use_source_embedding_without_special_tokens():
    model = recurrent(attention="dot")
    table = np.asarray(model.params["encoder"]["tokens"], np.float64)
    found = model.inspect.nearest("c", count=20)
    assert len(found) == 10 and found[0][1] == pytest.approx(
        sorted(cosines(table[:11], table[2]))[-2]
    )
    words = model_of(replace(CONFIG, vocab_size=6), WordTokenizer(("to", "be", "or", "not")))
    assert {text for text, _ in words.inspect.nearest("to")} == {"be", "or", "not"}
    with pytest.raises(
        ValueError, match="word is 'To', which is not among the words of the tokenizer"
    ):
        words.inspect.nearest("To")
    pieces = BPETokenizer.train("king man king man " * 9, 270)
    subwords = model_of(replace(CONFIG, vocab_size=pieces.vocab_size), pieces)
    assert len(pieces.encode(" king")) == 1
    assert subwords.inspect.nearest("king", count=1)[0][0] != " king"
    ngrams = tj.NgramConfig(vocab_size=11)
    with pytest.raises(ConfigError, match=r"model 'here' \(NgramConfig\) has no word embeddings"):
        replace(plain(), model=replace(plain().model, config=ngrams)).inspect.nearest("c")


@pytest.mark.slow
def test_mask_candidates_are_ranked_by_softmax_of_logits():
    ids = [1, special_ids(masked().tokenizer)["mask"], 3, special_ids(masked().tokenizer)["mask"]]
    p = softmax(captured(masked(), ids, "logits")[0])
    found = masked().candidates("b[MASK]d[MASK]", count=3)
    for at, likely in zip((1, 3), found, strict=True):
        order = np.argsort(-p[at, :11])[:3]
        assert [text for text, _ in likely] == [LETTERS.decode([i]) for i in order]
        assert [q for _, q in likely] == pytest.approx(p[at, order], rel=1e-5)
    assert masked().generate("b_d_") == f"b{found[0][0][0]}d{found[1][0][0]}"
    assert len(masked().candidates("b_", count=99)[0]) == 11  # without <mask>


@pytest.mark.slow
def test_words_filled_into_masks_start_without_space():
    words = with_special_tokens(WordTokenizer(("to", "be", "or", "not")), ["mask"])
    config = masked().config
    run = replace(masked().model.run, model=replace(config, vocab_size=7))
    model = model_of(run.model, words, run=run)
    filled = model.generate("to _ or")
    assert filled == f"to {model.candidates('to _ or')[0][0][0]} or".replace(" \n ", "\n ")


@pytest.mark.slow
@pytest.mark.parametrize("made", [pairs, prefix], ids=["seq2seq", "prefix"])
def test_text_search_matches_token_beam_search(made):
    model = made()
    ids, text = special_ids(model.tokenizer), LETTERS.encode("bad")
    if made is pairs:
        prompt, rest = [[ids["bos"]]], dict(source=text[None])
    else:
        prompt, rest = [[*text, ids["sep"]]], {}
    state = init_decode_state(model.config, model.params, 1, 17, **rest)
    step = make_step(build(model.config))
    if made is prefix:
        step = PrefixStep(step.model)
    found = beam_search(
        step, model.params, np.array(prompt, np.int32), state, num_tokens=4, num_beams=5,
        num_results=3, stop=(ids["eos"],), length_penalty=LengthPenalty(0.5),
    )  # fmt: skip
    best = model.search("bad", 4, beams=5, results=3, length_penalty=0.5)
    assert [score for score, _ in best] == pytest.approx(np.asarray(found.scores)[0], rel=1e-5)
    rows = np.asarray(found.tokens)[0], np.asarray(found.lengths)[0]
    for (_, target), row, n in zip(best, *rows, strict=True):
        assert target == model.tokenizer.decode(row[:n])
        if row[n - 1] == ids["eos"]:  # a complete target, whose -log p `score` returns
            (score,) = [s for s, t in best if t == target]
            assert score == pytest.approx(-model.score(("bad", target)).nats / n**0.5, rel=1e-4)
    assert model.search("bad", 4, beams=5)[0][1] == model.generate("bad", 4, beams=5)


def test_text_search_with_one_beam_is_greedy():
    want = pairs().generate("badcab", 9)
    ((_, found),) = pairs().search("badcab", 9, beams=1)
    assert found == want
    assert len(set(want)) > 1


def test_largest_table_value_has_darkest_color():
    table = Table("t", ["a"], ["x", "y", "z"], np.array([[2.0, -4.0, 0.0]]))
    assert table.shades().tolist() == [[0.5, -1.0, 0.0]]
    assert replace(table, most=1.0).shades().tolist() == [[1.0, -1.0, 0.0]]
    assert not replace(table, values=np.zeros((1, 3))).shades().any()
