"""The tokens of a text for display: ids, strings, labels, and the merges of a BPE."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from transformer_jax.tokenizers import trained
from transformer_jax.tokenizers.pieces import marked, merge_steps, pieces
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import with_special_tokens

TEXT = "unhappy happiness, unhappiness happy\n" * 5 + "happily un un"
BPE = trained.BPETokenizer.train(TEXT, 283)


def sentence_piece() -> PretrainedTokenizer:
    """Return a BPE like Llama's: spaces are letters, and unknown letters become bytes."""
    from tokenizers import Tokenizer, models, normalizers

    letters = [*"\u2581unhapyes", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("\u2581", "h"), ("p", "p"), ("a", "pp"), ("\u2581h", "app"), ("u", "n"), ("s", "s")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True, fuse_unk=True
    )
    library = Tokenizer(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return PretrainedTokenizer(library.to_str())


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (BPE, "unhappiness, happily\nun  happy \u4e2d"),
        (with_special_tokens(BPE, ["eos"]), "happy"),
        (PretrainedTokenizer(BPE.definition), "unhappiness is un"),
        (sentence_piece(), "unhappy \u4e2d happyness"),
    ],
    ids=["trained", "special", "published", "sentence piece"],
)
def test_each_merge_step_applies_earliest_learned_merge(tokenizer, text):
    base = getattr(tokenizer, "base", tokenizer)
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in json.loads(base.definition)["model"]["merges"]
    ]
    spell = base._library.id_to_token
    words = merge_steps(tokenizer, text)
    assert [i for word in words for i in word[-1]] == tokenizer.encode(text).tolist()
    assert max(map(len, words)) > 3
    for word in words:
        for before, after in itertools.pairwise(word):
            row = [spell(i) for i in before]
            ranks = [
                merges.index(pair) if pair in merges else len(merges)
                for pair in itertools.pairwise(row)
            ]
            at = int(np.argmin(ranks))  # argmin returns the first minimum
            assert ranks[at] < len(merges)
            joined = [*row[:at], row[at] + row[at + 1], *row[at + 2 :]]
            assert [spell(i) for i in after] == joined
        last = [spell(i) for i in word[-1]]
        assert not any(pair in merges for pair in itertools.pairwise(last))
        if base is BPE:
            assert all(len(base.to_bytes([i])) == 1 for i in word[0])


def test_word_in_vocabulary_may_require_no_merges():
    content = json.loads(BPE.definition)
    content["model"]["ignore_merges"] = True
    (word,) = merge_steps(PretrainedTokenizer(json.dumps(content)), " happy")
    assert len(word) == 1 and len(word[0]) == 1


@pytest.mark.parametrize(
    "tokenizer",
    [trained.CharTokenizer.train(TEXT), trained.ByteTokenizer(), trained.WordTokenizer.train(TEXT)],
    ids=lambda one: repr(one)[:4],
)
def test_tokenizers_without_merges_have_no_merge_steps(tokenizer):
    assert merge_steps(tokenizer, "happy") == []
    found = pieces(tokenizer, "happy un")
    assert [i for i, _ in found] == tokenizer.encode("happy un").tolist()
    whole = " ".join if isinstance(tokenizer, trained.WordTokenizer) else "".join
    assert whole([text for _, text in found]) == "happy un"


def test_token_pieces_include_added_tokens_and_partial_characters():
    assert pieces(trained.ByteTokenizer(), "é") == [(0xC3, "\\xc3"), (0xA9, "\\xa9")]
    assert pieces(trained.WordTokenizer(("to",)), "to zz\nto") == [
        (2, "to"), (0, "<unk>"), (1, "\n"), (2, "to"),
    ]  # fmt: skip
    content = json.loads(BPE.definition)
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    content["added_tokens"] = [dict(id=BPE.vocab_size, content="<s>", **flags)]
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BPE.vocab_size], "tokens": ["<s>"]}},
    }  # fmt: skip
    found = pieces(PretrainedTokenizer(json.dumps(content), (("bos", "<s>"),)), "un<s>")
    assert found[0] == (BPE.vocab_size, "<s>")
    assert "".join(text for _, text in found[1:]) == "un<s>"
    assert BPE.vocab_size not in [i for i, _ in found[1:]]  # the spelled-out <s> is ordinary text


@pytest.mark.parametrize(
    ("text", "label"),
    [(" am", "␣am"), ("\n", "\\n"), ("", "''"), ("\xa0", "\\xa0"), ("\u0301", "\\u0301"),
     ("e\u0301", "e\u0301"), ("\ud800", "\\ud800"), ("\u200b", "\\u200b"), ("мир", "мир")],
)  # fmt: skip
def test_token_labels_show_whitespace_visibly(text, label):
    assert marked(text) == label
