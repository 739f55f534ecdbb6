"""Results of `inspect` against full forward passes, and their pages and figures."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from matplotlib.colors import to_rgb

import transformer_jax as tj
from tests.text.models import (
    CONFIG,
    LETTERS,
    chat,
    classes,
    logits_of,
    masked,
    model_of,
    pairs,
    plain,
    prefix,
)
from transformer_jax.config import ConfigError
from transformer_jax.interpret import HeadScores
from transformer_jax.models.factory import build
from transformer_jax.text.inspect import Attribution, Heads, Lens, Patching
from transformer_jax.text.tables import Table, draw_tables
from transformer_jax.tokenizers.special import special_ids

pytestmark = pytest.mark.usefixtures("quick_compilation")

BAD, CAB = LETTERS.encode("bad"), LETTERS.encode("cab")
B, D = LETTERS.encode("bd")


def changed(model, change):
    """The model with parameters that `change` modified in a copy."""
    params = jax.tree.map(np.array, model.params)
    change(params)
    return replace(model, model=replace(model.model, params=params))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "masked"])
def test_last_logit_lens_layer_matches_model_probabilities(name):
    model, text = {"plain": (plain(), "bad"), "masked": (masked(), "b_d")}[name]
    mask = special_ids(masked().tokenizer).get("mask")
    logits = logits_of(model, BAD if name == "plain" else [1, mask, 3])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    seen = model.inspect.lens(text, count=3)
    order = np.argsort(-p, axis=-1)[:, :3]
    np.testing.assert_allclose(seen.probabilities[-1], np.take_along_axis(p, order, -1), atol=1e-5)
    known = [*LETTERS.decode(range(11)), "<mask>"]
    assert seen.top[-1] == [[known[i] for i in row] for row in order]
    assert seen.probabilities.shape == (3, 3, 3) and len(seen.top) == 3
    assert seen.tokens == list("bad") or name == "masked"
    start = "after the last token: " if name == "plain" else "token 1, a mask: "
    best = seen.top[-1][-1 if name == "plain" else 1][0]
    assert seen.summary().startswith(f"{start}{best!r}") and "\n" not in seen.summary()


@pytest.mark.slow
def test_patching_with_nearly_equal_answers_warns():
    """Uses the pair of answers whose z differs least between the prompts."""
    clean, corrupted = (logits_of(plain(), ids)[-1] for ids in (BAD, CAB))
    change = (clean - corrupted)[:, None] - (clean - corrupted)[None]
    change = np.abs(change) + np.where(np.eye(len(change)), np.inf, 0)
    one, two = np.unravel_index(np.argmin(change), change.shape)
    assert change.min() < 0.1
    with pytest.warns(
        UserWarning, match="between the prompts, less than 0..*: shares of it mean little"
    ):
        plain().inspect.patch(
            "bad", "cab", answer=LETTERS.decode([one]), other_answer=LETTERS.decode([two])
        )


@pytest.mark.slow
def test_patching_matches_edits_with_captured_values():
    seen = plain().inspect.patch("bad", "cab", answer="d", other_answer="b")
    z = lambda logits: logits[-1, D] - logits[-1, B]  # noqa: E731
    clean, corrupted = z(logits_of(plain(), BAD)), z(logits_of(plain(), CAB))
    assert (seen.clean, seen.corrupted) == pytest.approx((clean, corrupted), abs=1e-5)
    place = "block_0/attention/heads"
    model, params = build(plain().config), {"params": plain().params}
    values = model.apply(params, BAD[None], capture=(place, "block_1/residual"))[2]
    put = {place: lambda heads: heads.at[:, :, 1].set(values[place][:, :, 1])}
    wanted = (z(logits_of(plain(), CAB, edit=put)) - corrupted) / (clean - corrupted)
    assert seen.by_head["attention/heads"][0, 1] == pytest.approx(wanted, abs=1e-4)
    kept = values["block_1/residual"]
    put = {"block_1/residual": lambda x: x.at[:, 2].set(kept[:, 2])}
    wanted = (z(logits_of(plain(), CAB, edit=put)) - corrupted) / (clean - corrupted)
    assert wanted == pytest.approx(1, abs=1e-4)  # only the last token's stream is read
    np.testing.assert_allclose(seen.by_token["residual"][1], [0, 0, 1], atol=1e-4)
    assert list(seen.by_token) == ["residual", "attention/output", "feed_forward/output"]
    assert all(x.shape == (2, 3) for x in seen.by_token.values())
    likely = plain().inspect.patch("bad", "cab")
    answers = [LETTERS.decode([logits_of(plain(), ids)[-1].argmax()]) for ids in (BAD, CAB)]
    assert [likely.answer, likely.other_answer] == answers


@pytest.mark.slow
def test_patched_target_keeps_original_source():
    seen = pairs().inspect.patch(("bad", "fe"), ("bad", "ab"))
    assert seen.by_head["cross_attention/heads"].shape == (2, 2)
    assert seen.tokens == ["<bos>", "f", "e"] and seen.other_tokens == ["<bos>", "a", "b"]
    np.testing.assert_allclose(seen.by_token["residual"][1], [0, 0, 1], atol=1e-4)
    with pytest.raises(
        ValueError, match=r"other is \('cad', 'ab'\): must have the same source as the"
    ):
        pairs().inspect.patch(("bad", "fe"), ("cad", "ab"))


@pytest.mark.slow
def test_head_ablation_matches_zeroed_output_matrix():
    seen = plain().inspect.heads("bad", answer="d", other_answer="b")
    z = lambda model: float(logits_of(model, BAD)[-1] @ (np.eye(11)[D] - np.eye(11)[B]))  # noqa: E731

    def silence(params):
        params["decoder"]["block_1"]["attention"]["out"]["kernel"][0] = 0

    assert seen.value == pytest.approx(z(plain()), abs=1e-5)
    wanted = z(changed(plain(), silence)) - z(plain())
    assert abs(wanted) > 0.1 and seen.without[1, 0] == pytest.approx(wanted, abs=1e-5)
    weights = plain().inspect.attention("bad").weights.astype(np.float64)  # [L, N, T, T]
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(seen.entropy, entropy, atol=1e-5)
    assert seen.scores.induction.shape == (2, 2) and seen.cross_without is None


@pytest.mark.slow
def test_cross_attention_head_ablation_matches_zeroed_output_matrix():
    seen = pairs().inspect.heads(("bad", "fe"), answer="d")
    ids = [special_ids(pairs().tokenizer)["bos"], *LETTERS.encode("fe")]
    z = lambda model: logits_of(model, ids, source=BAD[None])[-1, D]  # noqa: E731

    def silence(params):
        params["decoder"]["block_0"]["cross_attention"]["out"]["kernel"][1] = 0

    wanted = z(changed(pairs(), silence)) - z(pairs())
    assert abs(wanted) > 0.01 and seen.cross_without[0, 1] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "pairs", "prefix", "masked", "chat"])
def test_token_and_component_contributions_sum_to_answer(name):
    model, text = {
        "plain": (plain(), "badcab"), "pairs": (pairs(), ("bad", "fe")),
        "prefix": (prefix(), ("bad", "")), "masked": (masked(), "b_dcab"), "chat": (chat(), "bad"),
    }[name]  # fmt: skip
    options = dict(baseline="k") if name == "plain" else {}
    seen = model.inspect.attribution(text, answer="d", other_answer="b", **options)
    assert np.abs(seen.shares).max() > 0.05
    assert seen.shares.sum() == pytest.approx(seen.value - seen.baseline_value, abs=2e-3)
    parts = [seen.heads, seen.feed_forward, seen.embedding, seen.bias, seen.cross_heads]
    total = sum(np.sum(part) for part in parts if part is not None)
    assert total == pytest.approx(seen.value, abs=1e-4)
    assert (seen.cross_heads is not None) == (name == "pairs") and seen.reason is None
    if name == "masked":  # the answer is at the mask, and the mask is the baseline
        ids = [1, special_ids(masked().tokenizer)["mask"], *LETTERS.encode("dcab")]
        logits = logits_of(model, ids)[1]
        assert seen.value == pytest.approx(logits[D] - logits[B], abs=1e-5)
        assert seen.baseline == "<mask>" and seen.shares[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_attribution_for_non_additive_logits_includes_only_tokens():
    post = model_of(replace(CONFIG, norm_order="post"))
    seen = post.inspect.attribution("bad", baseline="k")
    assert seen.heads is None and seen.reason.startswith("norm_order is 'post'")
    assert seen.shares.sum() == pytest.approx(seen.value - seen.baseline_value, abs=2e-3)
    assert len(seen.tables()) == 1 and "no parts: norm_order is 'post'" in seen.summary()


@pytest.mark.slow
def test_attribution_without_feed_forward_omits_it():
    model = model_of(replace(CONFIG, d_ff=0))
    seen = model.inspect.attribution("bad", baseline="k", answer="d", other_answer="b")
    assert seen.feed_forward is None and "feed-forward" not in seen.tables()[1].columns
    total = seen.heads.sum() + seen.embedding + seen.bias
    assert total == pytest.approx(seen.value, abs=1e-4) and np.abs(seen.heads).max() > 0.01
    assert list(model.inspect.patch("bad", "cab").by_token) == ["residual", "attention/output"]


def ngrams():
    return replace(plain(), model=replace(plain().model, config=tj.NgramConfig(vocab_size=11)))


@pytest.mark.parametrize(
    ("ask", "rule"),
    [
        (lambda: classes().inspect.lens("bad"),
         "lens: a run for task 'classify' predicts the class of a text"),
        (lambda: ngrams().inspect.heads("bad"),
         r"heads: model 'here' \(NgramConfig\) has no blocks and heads"),
        (lambda: pairs().inspect.lens("bad"), r"text is 'bad': must be \(source, target\)"),
        (lambda: plain().inspect.lens("bad", count=0),
         "count is 0: must be an integer of at least 1"),
        (lambda: plain().inspect.lens("a" * 18),
         "the text has 18 tokens: must be at most max_len, 17"),
        (lambda: plain().inspect.patch("bad", "ba"),
         "other has 2 tokens: must be as many as in the text, 3"),
        (lambda: plain().inspect.patch("a", "b", answer="c", other_answer="c"),
         "the answer to both prompts is 'c': pass an answer and"),
        (lambda: plain().inspect.heads("bad", answer="ab"),
         r"answer is 'ab': must be one token, not 2"),
        (lambda: plain().inspect.heads("bad", answer=""),
         "answer is '': must be a string of one token"),
        (lambda: plain().inspect.heads("a", answer="a", other_answer="a"),
         "other_answer are 'a': must"),
        (lambda: plain().inspect.attribution("bad", answer="a"),
         "baseline is None: must be a string of one token; the tokenizer has no mask"),
        (lambda: masked().inspect.heads("bad"), "text has no mask: must contain"),
        (lambda: masked().inspect.patch("b_d", "_bd"),
         "other has its mask at token 0: must be at 1, as in text"),
    ],
)  # fmt: skip
def test_invalid_inspection_arguments_are_rejected(ask, rule):
    with pytest.raises((ConfigError, ValueError), match=rule):
        ask()


ODD = [
    "<script>alert(1)</script>", '"', "'", "&amp;", "\n", " a", "</td>", "\u202e", "\ud800",
    "$x^2$", "שלום", "中文", "", "a" * 40, "🙂",
]  # fmt: skip
RNG = np.random.default_rng(3)
TABLE = RNG.standard_normal((2, len(ODD)))
SEEN = [
    Lens(ODD, [[[x, "b"] for x in ODD]] * 3, RNG.random((3, len(ODD), 2))),
    Patching(ODD, ODD[::-1], *ODD[:2], 1.0, 0.0, {"residual": TABLE}, {"heads": TABLE[:, :3]}),
    Heads(ODD, ODD[0], None, 1.0, TABLE[:, :3], TABLE[:, :3] ** 2, HeadScores(*[TABLE[:, :3]] * 3)),
    Attribution(ODD, *ODD[:2], 1.0, "\n", 0.0, TABLE[0], TABLE[:, :3], TABLE[:, 3], 0.1, 0.2),
]


class Reader(HTMLParser):
    """Parser that collects tags, attributes, cell texts and hover hints."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.cells, self.hints, self.open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)
        if tag in ("td", "b"):
            self.cells.append("")
        if tag == "i":
            self.hints.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "b"):
            self.cells[-1] += data
        if self.open and self.open[-1] == "i":
            self.hints[-1] += data


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: type(seen).__name__)
def test_html_page_escapes_tokens_and_loads_no_resources(seen):
    page = seen.html()
    page.encode("utf-8")
    read = Reader(page)
    assert not read.open and set(read.tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "thead",
        "tbody", "tr", "th", "td", "b", "i",
    }  # fmt: skip
    assert {name for name, _ in read.attributes} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "style",
    }  # fmt: skip
    assert "default-src 'none'" in dict(read.attributes)["content"] or "url(" not in page
    assert "url(" not in page and "@import" not in page and "http:" not in page
    assert len(read.cells) == len(read.hints) == sum(t.values.size for t in seen.tables())
    assert "prefers-color-scheme: dark" in page
    texts = "".join((*read.cells, *read.hints))
    if not isinstance(seen, Heads):  # without columns of tokens
        assert "<script>alert(1)</script>" in texts and "\\n" in texts and "\\ud800" in texts
    if isinstance(seen, Lens):
        assert read.cells[:3] == ["<script>alert(1)</script>", '"', "'"]
        assert read.hints[1].splitlines()[0] == f'embedding · ": {seen.probabilities[0, 1, 0]:.4g}'
        assert f"'b' {seen.probabilities[0, 1, 1]:.3f}" in read.hints[1]
    if isinstance(seen, Attribution):
        assert read.cells[: len(ODD)][-1] == "🙂" and read.cells[12] == "''"
        assert re.search(rf"🙂: {TABLE[0, -1]:.4g}$", read.hints[len(ODD) - 1])


@pytest.mark.slow_except("Lens")
@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: type(seen).__name__)
def test_picture_shows_every_number_and_fits_labels(seen):
    """For any characters in the tokens; a warning about a glyph would fail the test."""
    figure = seen.plot()
    figure.canvas.draw()
    axes, box = figure.axes[0], figure.bbox
    tables = seen.tables()
    assert len(axes.images) == len(tables)
    for image, table in zip(axes.images, tables, strict=True):
        most = np.abs(table.values).max() if table.most is None else table.most
        np.testing.assert_allclose(image.get_array(), np.clip(table.values / most, -1, 1))
    texts = [text.get_text() for text in axes.texts]
    wanted = [table.title for table in tables]
    assert [text for text in wanted if text.isascii() and text not in texts] == []
    if isinstance(seen, Heads):
        assert f"{TABLE[0, 0]:.2f}" in texts and texts.count("head 2") == len(tables)
    for text in axes.texts:
        place = text.get_window_extent()
        assert box.x0 <= place.x0 and place.x1 <= box.x1, text.get_text()
        assert box.y0 <= place.y0 and place.y1 <= box.y1, text.get_text()


def test_numbers_of_table_stay_in_their_cells_and_are_legible():
    """Contrast is the ratio of WCAG 2.1; labels are drawn as they are, without mathematics."""
    values = np.array([[2.0, -1.9, 0.1], [-0.4, 0.5, 0.0]])
    figure = draw_tables([Table(r"$\table$", [r"$\one$", "_"], [*"abc"], values)])
    (axes,) = figure.axes
    (image,) = axes.images
    left, right, bottom, top = image.get_extent()
    assert {r"$\table$", r"$\one$", *"abc"} <= {text.get_text() for text in axes.texts}

    def brightness(color) -> float:
        rgb = np.array(to_rgb(color))
        linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for (r, c), value in np.ndenumerate(values):
        (text,) = [text for text in axes.texts if text.get_text() == f"{value:.2f}"]
        x, y = text.get_position()
        assert int((x - left) / (right - left) * 3) == c
        assert int((y - top) / (bottom - top) * 2) == r
        pair = brightness(text.get_color()), brightness(image.to_rgba(values / 2)[r, c, :3])
        assert (max(pair) + 0.05) / (min(pair) + 0.05) > 4.5, value


def test_patching_columns_show_both_tokens_if_they_differ():
    shares = {"residual": np.zeros((2, 2), np.float32)}
    found = Patching(
        tokens=["a", "b"], other_tokens=["a", "c"], answer="x", other_answer="y", clean=1.0,
        corrupted=0.0, by_token=shares, by_head={},
    )  # fmt: skip
    assert found.tables()[0].columns == ["a", "b / c"]
