"""Options of tokenizer classes change the library's JSON as in transformers."""

from __future__ import annotations

import pytest

from transformer_jax.tokenizers.classes import apply_options, class_name

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
META = {
    "type": "Metaspace", "replacement": "x", "prepend_scheme": "first", "add_prefix_space": True,
}  # fmt: skip
BERT = {"type": "BertNormalizer", "lowercase": False, "strip_accents": None, "clean_text": True,
        "handle_chinese_chars": False}  # fmt: skip
OTHER, STRIP = {"type": "NFC"}, {"type": "Strip", "strip_left": True}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def names(*kinds):
    return [{"type": kind} for kind in kinds]


QUOTES = [{"type": "Replace", "n": n} for n in range(2)]
ALBERT = dict(keep_accents=False, do_lower_case=True)
BEFORE_ALBERT = sequence(
    "normalizers", *QUOTES, *names("NFKD", "Lowercase", "StripAccents", "Other")
)


@pytest.mark.parametrize(
    ("place", "part", "options", "expected"),
    [
        ("pre_tokenizer", LEVEL, dict(add_prefix_space=True), LEVEL | {"add_prefix_space": True}),
        ("pre_tokenizer", LEVEL, dict(), LEVEL),
        ("pre_tokenizer", sequence("pretokenizers", OTHER, LEVEL), dict(add_prefix_space=True),
         sequence("pretokenizers", OTHER, LEVEL | {"add_prefix_space": True})),
        ("pre_tokenizer", META, dict(add_prefix_space=True),
         {"type": "Metaspace", "replacement": "x", "prepend_scheme": "always"}),
        ("decoder", META, dict(add_prefix_space=False),
         {"type": "Metaspace", "replacement": "x", "prepend_scheme": "never"}),
        ("decoder", META, dict(do_lower_case=True), META),
        ("normalizer", sequence("normalizers", {"type": "Prepend"}, OTHER),
         dict(add_prefix_space=False), sequence("normalizers", OTHER)),
        ("normalizer", sequence("normalizers", {"type": "Prepend"}, OTHER),
         dict(add_prefix_space=True), sequence("normalizers", {"type": "Prepend"}, OTHER)),
        ("normalizer", {"type": "Prepend"}, dict(add_prefix_space=False), None),
        ("decoder", sequence("decoders", OTHER, {"type": "Strip", "content": " "}),
         dict(add_prefix_space=False), sequence("decoders", OTHER)),
        ("normalizer", sequence("normalizers", STRIP), dict(add_prefix_space=False),
         sequence("normalizers", STRIP)),
        ("normalizer", BERT,
         dict(tokenize_chinese_chars=True, strip_accents=False, do_lower_case=True),
         BERT | dict(lowercase=True, strip_accents=False, handle_chinese_chars=True)),
        ("normalizer", BERT, dict(do_lower_case=True), BERT),
        ("normalizer", BEFORE_ALBERT, ALBERT,
         sequence("normalizers", *QUOTES, *names("NFKD", "StripAccents", "Lowercase", "Other"))),
        ("normalizer", BEFORE_ALBERT, ALBERT | dict(keep_accents=True),
         sequence("normalizers", *QUOTES, *names("Lowercase", "Other"))),
        ("normalizer", BEFORE_ALBERT, ALBERT | dict(do_lower_case=False),
         sequence("normalizers", *QUOTES, *names("NFKD", "StripAccents", "Other"))),
        ("normalizer", sequence("normalizers", QUOTES[0], OTHER, QUOTES[1]), ALBERT,
         sequence("normalizers", QUOTES[0], *names("NFKD", "StripAccents", "Lowercase"), OTHER,
                 QUOTES[1])),
        ("normalizer", BEFORE_ALBERT, dict(do_lower_case=True), BEFORE_ALBERT),
        ("normalizer", None, ALBERT, None),
    ],
)  # fmt: skip
def test_tokenizer_class_options_change_only_related_components(place, part, options, expected):
    definition = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "model": {"a": 1}}
    found = apply_options(definition | {place: part}, options)
    assert found == definition | {place: expected}


def test_folder_sets_tokenizer_class_unless_model_type_overrides_it():
    fast = {"tokenizer_class": "GPT2TokenizerFast"}
    assert class_name(fast, {}) == ("GPT2", "tokenizer_class is 'GPT2TokenizerFast'")
    assert class_name({}, {"tokenizer_class": "T5Tokenizer"})[0] == "T5"
    assert class_name(fast, {"tokenizer_class": "T5Tokenizer"})[0] == "GPT2"
    name, source = class_name(fast, {"model_type": "qwen2"})
    assert name != "GPT2" and source == "model_type is 'qwen2'"
    assert class_name({}, {}) == ("", "") == class_name({"tokenizer_class": 3}, {"model_type": []})
    assert class_name({}, {"model_type": "gpt2"})[1] == "model_type is 'gpt2'"
