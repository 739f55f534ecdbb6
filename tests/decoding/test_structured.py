"""Structured output: allowed tokens against brute force, generated texts, and refused grammars."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from decimal import Decimal

import jax
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.config import ConfigError
from transformer_jax.decoding import structured
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.decoding.structured import Grammar
from transformer_jax.loading import TextModel
from transformer_jax.models.factory import build
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import BPETokenizer, ByteTokenizer, CharTokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("quick_compilation")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ana", "zoé", "日本"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    """Whether a text is JSON that satisfies SCHEMA."""
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and found["name"] in ("ana", "zoé", "日本")
        and type(found["age"]) is int
        and 0 <= found["age"] <= 99
        and 1 <= len(found["tags"]) <= 3
        and all(type(tag) is bool for tag in found["tags"])
    )


def sentence_pieces() -> PretrainedTokenizer:
    """A SentencePiece-style tokenizer with byte fallback and special tokens."""
    letters = [*'abcdefghijklmnopqrstuvwxyz0123456789{}[]":, .', "true", "false", '{"', '":']
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *letters]
    pieces += [f"▁{letter}" for letter in letters if letter != " "]
    definition = {
        "model": {
            "type": "Unigram", "unk_id": 0, "byte_fallback": True,
            "vocab": [[piece, -float(n % 7)] for n, piece in enumerate(pieces)],
        },
        "added_tokens": [
            {"id": n, "content": pieces[n], "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
            for n in range(3)
        ],
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
            ],
        },
    }  # fmt: skip
    roles = ("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>")
    return PretrainedTokenizer(json.dumps(definition), roles=roles, stop_ids=(2,))


def byte_pairs():
    text = '{"name": "zoé", "age": 9, "tags": [true, false]} 日本' * 9
    return with_special_tokens(BPETokenizer.train(text, 290), ["eos"])


TOKENIZERS = {"bytes": ByteTokenizer, "byte pairs": byte_pairs, "pieces": sentence_pieces}


def model_of(tokenizer, padding: int = 3, **fields) -> LanguageModel:
    config = tj.ModelConfig(
        vocab_size=tokenizer.vocab_size + padding, d_model=8, num_layers=1, num_heads=2,
        max_len=256, positions="rope", init_std=0.7,
    )  # fmt: skip
    params = tj.init_params(config, jax.random.key(3))
    return LanguageModel(TextModel(config, params, tokenizer, **fields), "here")


def stop_of(tokenizer) -> tuple[int, ...]:
    special = getattr(tokenizer, "special_ids", {})
    return (special["eos"],) if "eos" in special else ()


@functools.cache
def model(name: str) -> LanguageModel:
    tokenizer = TOKENIZERS[name]()
    return model_of(tokenizer, stop_ids=stop_of(tokenizer))


DRAWN = dict(sampler=Sample(Temperature(1.0)), key=jax.random.key(2))


@pytest.mark.slow_except("pieces")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_sampled_texts_satisfy_the_schema(name):
    texts = model(name).generate("a", 200, schema=SCHEMA, samples=4, **DRAWN)
    assert all(map(fits, texts)) and len(set(texts)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_greedy_text_satisfies_the_schema_only_if_requested(name):
    assert fits(model(name).generate("a", 200, schema=SCHEMA))
    with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid"):
        json.loads(model(name).generate("a", 200))


# A small vocabulary in which some tokens are parts of a character, and one ends texts


class Parts:
    """A tokenizer with the tokens in `parts`; the last one ends texts."""

    parts = (b"a", b"b", b"ab", b"ba", b"bb", b"c", b"\xc3", b"\xa9", b"a\xc3", b"", b"<e>")
    vocab_size = len(parts)

    def to_bytes(self, ids) -> bytes:
        return b"".join(self.parts[i] for i in ids)


REGEXES = "(ab|ba)*c", "a?b{2,3}", "[abé]{3}", "é|aé|b", "(a|ab)(c|bé)?", "^a+?(b|é)$"


def texts_of(regex: str, longest: int) -> list[bytes]:
    """Return all matching texts up to a length."""
    return [
        "".join(letters).encode()
        for size in range(longest + 1)
        for letters in itertools.product("abcé", repeat=size)
        if re.fullmatch(regex, "".join(letters))
    ]


def allowed_by_hand(texts: list[bytes], start: bytes) -> np.ndarray:
    rests = [text[len(start) :] for text in texts if text.startswith(start)]
    found = [any(part and rest.startswith(part) for rest in rests) for part in Parts.parts]
    found[10] = b"" in rests
    return np.array([*found, False])  # the model has one token more than the tokenizer


@pytest.mark.parametrize("regex", REGEXES)
def test_allowed_tokens_match_brute_force(regex):
    """Compare with all matching texts of up to seven letters."""
    texts, grammar = texts_of(regex, 7), Grammar("regex", regex, Parts(), 12, (10,))
    todo, seen = [()], set()
    while todo:
        ids = todo.pop()
        start = Parts().to_bytes(ids)
        if len(start.decode("utf-8", "replace")) > 4:
            continue
        matcher = grammar.start()
        for token in ids:
            matcher.read(token)
        want = allowed_by_hand(texts, start)
        np.testing.assert_array_equal(matcher.allowed, want, err_msg=f"{regex} after {start!r}")
        assert matcher.ended == (want.nonzero()[0].tolist() == [10])
        seen.add(start)
        todo += [(*ids, token) for token in want[:10].nonzero()[0].tolist()]
    assert len(seen) >= 4


@pytest.mark.parametrize("regex", ["[abé]{3}", "(ab|ba){0,3}c"])
def test_greedy_structured_text_selects_largest_allowed_logit(regex):
    """The oracle reads the whole text before each token, and lists the allowed tokens."""
    model = model_of(Parts(), padding=1, stop_ids=(10,))
    apply = jax.jit(lambda ids: build(model.config).apply({"params": model.params}, ids)[0])
    for prompt in ([0, 3], [5, 5, 1], [7, 2, 6, 0]):
        new: list[int] = []
        texts = texts_of(regex, 7)
        while len(new) < 9:
            allowed = allowed_by_hand(texts, Parts().to_bytes(new))
            if allowed.nonzero()[0].tolist() in ([10], []):
                break
            ids = np.array([[*prompt, *new] + [0] * (32 - len(prompt) - len(new))])
            logits = np.asarray(apply(ids)[0, len(prompt) + len(new) - 1])
            new.append(int(np.where(allowed, logits, -np.inf).argmax()))
            if new[-1] == 10:
                new.pop()
                break
        want = Parts().to_bytes(new).decode("utf-8", "replace")
        grammar = Grammar("regex", regex, Parts(), 12, (10,))
        got = "".join(structured_text(model, np.array(prompt, np.int32), 9, grammar))
        assert got == want and len(got) > 2


def structured_text(model, prompt, count, grammar):
    from transformer_jax.decoding.completion import TextGenerator

    return TextGenerator(
        model.config, model.params, model.tokenizer,
        sampler=Sample(Temperature(0.0)), key=jax.random.key(0),
        stop_ids=model.model.stop_ids, grammar=grammar,
    ).complete(prompt, count)  # fmt: skip


@pytest.mark.slow
def test_batch_and_stream_produce_same_structured_text():
    form, words = dict(regex="[a-z ]{12}é"), model("byte pairs")
    alone = [words.generate(prompt, 60, **form) for prompt in ("a", "cab", "")]
    assert len(set(alone)) > 1 and all(re.fullmatch(form["regex"], text) for text in alone)
    assert words.generate(["a", "cab", ""], 60, slots=2, **form) == alone
    assert "".join(words.generate("cab", 60, stream=True, **form)) == alone[1]
    many = words.generate(["a"] * 5, 60, **form, **DRAWN)
    assert len(set(many)) > 2 and all(re.fullmatch(form["regex"], text) for text in many)


@pytest.mark.slow
def test_text_longer_than_max_len_still_follows_grammar():
    tokenizer = CharTokenizer("abcd")
    config = tj.ModelConfig(
        vocab_size=4, d_model=8, num_layers=1, num_heads=2, max_len=16, init_std=0.7
    )
    params = tj.init_params(config, jax.random.key(3))
    model = LanguageModel(TextModel(config, params, tokenizer), "here")
    text = model.generate("abcd", 90, regex="([ab]{3}cd[ab])*d{40}")
    assert re.fullmatch("([ab]{3}cd[ab])*d{40}|([ab]{3}cd[ab])*.{0,5}d{0,39}", text)
    assert model.generate("abcd", 90, regex="([ab]c){20}d{20}").endswith("cdddddddddddddddddddd")


@pytest.mark.slow
def test_limit_and_stop_string_truncate_structured_text():
    bytewise, words = model("bytes"), model("byte pairs")
    whole = bytewise.generate("a", 200, schema=SCHEMA)
    cut = bytewise.generate("a", 20, schema=SCHEMA)
    assert whole.encode().startswith(cut.encode()) and len(cut) == 20
    assert bytewise.generate("a", 200, schema=SCHEMA, stop='"age') == whole[: whole.index('"age')]
    assert bytewise.generate("a", 200, regex="") == "" and words.generate("a", 9, regex="") == ""


def test_generated_text_follows_lark_grammar():
    grammar = 'start: "(" start ")" | DIGIT\nDIGIT: /[0-9]{2}/'
    for text in model("pieces").generate("a", 200, grammar=grammar, samples=4, **DRAWN):
        depth = text.index(next(filter(str.isdigit, text)))
        assert re.fullmatch(rf"\({{{depth}}}[0-9]{{2}}\){{{depth}}}", text)


def takes(form, content, text: str) -> bool:
    """Whether a whole text matches the grammar, for a model of bytes."""
    matcher = Grammar(form, content, ByteTokenizer(), 257, (256,)).start()
    for byte in text.encode():
        if not matcher.allowed[byte]:
            return False
        matcher.read(byte)
    return bool(matcher.allowed[256])


def test_schema_property_names_have_one_canonical_encoding():
    """JSON readers decode "\\u0061" to "a", so it must not name one of the other properties."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}}}
    for name in r"\u0061", r"\u000a", r"\u000A", r"\\\u0061", r"b\u0061", r"\ud800", r"\u001F":
        assert not takes("schema", schema, f'{{"{name}":"s"}}'), name
    for name in r"\\u0061", r"b\n", r"\u001f", r"\\", r"\"", "b":
        assert takes("schema", schema, f'{{"{name}":"s"}}'), name

    class Escapes(Parts):
        parts = b'{"', b"\\u0", b"\\u00", b"\\u006", b"\\", b"0", b"61", b"1f", b'":"s"}', b"", b""

    matcher = Grammar("schema", schema, Escapes(), 12, (10,)).start()
    in_name = [0, 1, 2, 4, 5, 6, 7, 8]
    for token, allowed in (0, in_name), (1, [5]), (5, [5, 7]), (7, in_name):
        matcher.read(token)
        assert matcher.allowed.nonzero()[0].tolist() == allowed


def test_unique_items_are_supported_only_if_false():
    numbers = {"type": "array", "items": {"type": "integer"}}
    assert takes("schema", numbers | {"uniqueItems": False}, "[1,1]")
    with pytest.raises(ValueError, match="uniqueItems"):
        takes("schema", numbers | {"uniqueItems": True}, "[1]")


def test_regex_posix_classes_match_unicode():
    for name, inside, outside in (
        ("alpha", "éЖ日", "1_"), ("lower", "éж", "ÉЖ1"), ("upper", "ÉЖ", "éж1"),
        ("alnum", "é1", "_"),
        ("punct", "!«+", "a1"), ("space", "\u2003\n", "a"), ("digit", "7", "٣a"),
        ("graph", "é!", " \x01\u0378"), ("print", "é \u2003", "\t\u2028"), ("cntrl", "\n\x85", "a"),
        ("xdigit", "F", "gé"), ("ascii", "a\n", "é"),
    ):  # fmt: skip
        for letter in inside + outside:
            assert takes("regex", f"[[:{name}:]]", letter) == (letter in inside), (name, letter)
            assert takes("regex", f"[]_[:^{name}:]]", letter) == (letter in outside + "_")
    assert takes("regex", r"\[[:alpha]+", "[:alp"), "not a POSIX class"
    assert takes("regex", "a\\\n", "a\n")  # an escaped line break
    assert takes("regex", "[:alpha:][:upper:]", "lr") and not takes("regex", "[:a:][:upper:]", "aA")
    for form, name in (lambda x: ("regex", x), "regex"), (
        lambda x: ("schema", {"patternProperties": {x: {}}}), r"schema\.patternProperties"
    ), (lambda x: ("schema", {"pattern": x}), r"schema\.pattern"):  # fmt: skip
        for wrong, message in (
            ("[[:upr:]]", r"\[:upr:\] is not a POSIX class; did you mean upper"),
            ("a\\", "the last backslash escapes nothing"),
        ):
            with pytest.raises(ValueError, match=f"{name}: {message}"):
                takes(*form(wrong), "")


def test_union_is_distinguished_by_required_constant_behind_references():
    """Pydantic's schema of a union with a discriminator, here of a recursive type."""
    kind = {"const": "sum", "title": "Kind", "type": "string"}
    either = {
        "discriminator": {"propertyName": "kind", "mapping": {"sum": "#/$defs/Sum"}},
        "oneOf": [{"$ref": "#/$defs/Sum"}, {"$ref": "#/$defs/a~1b"}],
    }  # fmt: skip
    parts = {"kind": kind, "parts": {"type": "array", "items": either}}
    number = {"kind": kind | {"const": "number"}, "value": {"type": "integer"}}
    schema = either | {
        "$defs": {
            "Sum": {"type": "object", "properties": parts, "required": ["kind", "parts"]},
            "a/b": {"type": "object", "properties": number, "required": ["kind", "value"]},
        }
    }
    one, two = '{"kind":"number","value":1}', '{"kind":"sum","parts":[]}'
    for text in one, two, two.replace("[]", f"[{one},{two}]"):
        assert takes("schema", schema, text)
    for text in '{"kind":"number","parts":[]}', two.replace("[]", "[1]"), "1":
        assert not takes("schema", schema, text)
    for change in (
        lambda s: s["$defs"]["a/b"]["required"].remove("kind"),
        lambda s: s["$defs"]["a/b"].pop("type"),
        lambda s: s["$defs"]["a/b"]["properties"].update(kind={"enum": ["number", "sum"]}),
        lambda s: s["$defs"].update({"a/b": {"$ref": "#/$defs/a~1b"}}),
    ):
        wrong = json.loads(json.dumps(schema))
        change(wrong)
        with pytest.raises(ValueError, match="oneOf"):
            takes("schema", wrong, "")
    number["next"] = {"$ref": "#/oneOf/0"}
    texts = {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}
    into = {"oneOf": [schema["$defs"]["a/b"], texts]}  # a pointer into oneOf keeps it as it is
    assert takes("schema", into, one.replace("1", f'1,"next":{one}'))


def test_property_names_and_values_are_not_treated_as_keywords():
    """Names of properties, constants, and annotations may look like keywords."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "a", "title": "b",
        "default": {"maxlength": float("nan")}, "examples": [1e308], "x-own": 2**70,
        "deprecated": True,
        "type": "object", "additionalProperties": False, "required": ["nullable", "const", "list"],
        "properties": {
            "nullable": {"$ref": "#/definitions/maxlength"},
            "const": {"const": {"maxlength": None}},
            "list": {"prefixItems": [{"enum": [{"nullable": 5}]}], "items": False, "minItems": 1.0},
        },
        "definitions": {"maxlength": {"type": "string", "maxLength": 1, "description": ""}},
    }  # fmt: skip
    whole = '{"nullable":"a","const":{"maxlength":null},"list":[{"nullable":5}]}'
    assert takes("schema", schema, whole) and not takes("schema", schema, whole.replace("5", "6"))
    assert not takes("schema", schema, whole.replace('"a"', '"aa"')), "the draft does not matter"


EXACT = 2**53 - 1, -(2**53) + 1, 0, -0.0, 1.0, 0.1, 1e15, 1e-7, 123456789.123456, 1.5e-10, 1e-22
EXACT_WRITTEN = "0.1000", "1E+3", "-12e-1", "9007199254740991.0"
ROUNDED = (
    2**53, 10**30, -(2**63), 2**64 - 1, 0.1 + 0.2, 1e16, 1e308, 5e-324, 1e-23, 123456789.12345679,
)  # fmt: skip
ROUNDED_WRITTEN = "0.1000000000000000055", "1.00000000000000000001", "1e-400", "9007199254740992.0"


def test_schema_numbers_are_exact_or_rejected():
    def written(schema) -> Decimal:
        matcher, text = Grammar("schema", schema, ByteTokenizer(), 257, (256,)).start(), bytearray()
        while not matcher.ended and not matcher.allowed[256]:
            text.append(int(matcher.allowed[:256].argmax()))
            matcher.read(text[-1])
        return Decimal(text.decode())

    for number in (*EXACT, *map(Decimal, EXACT_WRITTEN)):
        want = Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
        assert written({"const": number}) == written({"enum": [number]}) == want
    for number in (*ROUNDED, *map(Decimal, ROUNDED_WRITTEN)):
        for schema in ({"const": number}, {"enum": [number]}, {"minimum": number}):
            with pytest.raises(ValueError, match="or the parser would round it"):
                Grammar("schema", schema, ByteTokenizer(), 257, (256,))


def test_limits_on_different_values_are_not_combined():
    accepts = {
        '{"a":1.25,"b":300}': {
            "properties": {
                "a": {"type": "number", "multipleOf": 0.01, "minimum": 0},
                "b": {"type": "integer", "multipleOf": 100, "description": None},
            }
        },
        '{"a":1.25,"b":1.5,"c":3000,"d":1}': {
            "$defs": {"one": {"type": "integer"}},
            "properties": {
                "a": {"multipleOf": 0.01}, "b": {"multipleOf": 0.01}, "c": {"multipleOf": 1000},
                "d": {"$ref": "#/$defs/one"},
            },
        },
        '"\N{LATIN SMALL LETTER E WITH ACUTE}"': {"type": "string", "pattern": "^[[:alpha:]]$"},
    }  # fmt: skip
    for text, schema in accepts.items():
        matcher = Grammar("schema", schema, ByteTokenizer(), 257, (256,)).start()
        for byte in text.encode():
            assert matcher.allowed[byte], (text, byte)
            matcher.read(byte)
        assert matcher.ended
    for schema in (
        {"multipleOf": 5000, "minimum": 3000},
        {"multipleOf": 5000, "anyOf": [{"minimum": 3000}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 5000}}, "minimum": 3000},
    ):
        with pytest.raises(
            ValueError, match="multipleOf is 5000: must be at most 4096 with a bound of 4"
        ):
            Grammar("schema", schema, ByteTokenizer(), 257, (256,))
    combined = {"multipleOf": 4093, "allOf": [{"multipleOf": 2, "minimum": 3000}]}
    with pytest.raises(ValueError, match=r"multipleOf is 2 and 4093: the least .* at most 4096"):
        Grammar("schema", combined, ByteTokenizer(), 257, (256,))
    half, twentieth = {"multipleOf": 0.5}, {"multipleOf": 0.05}
    for unwritable in ({"maximum": 1.56, **half}, {"maximum": 1.56, "allOf": [half, twentieth]}):
        with pytest.raises(
            ValueError, match=r"a bound is 1.56: must have at most 1 decimal place with"
        ):
            Grammar("schema", {"type": "number", **unwritable}, ByteTokenizer(), 257, (256,))
    for message, schema in (
        (
            "is 2.4e-09: must have at most 8 decimal places",
            {"type": "number", "multipleOf": 24e-10},
        ),
        ("is 65536: must be at most 65535", {"multipleOf": 65536}),
        ("is 0: must be above 0", {"type": "number", "multipleOf": 0}),
        ("is 6.5536: must be at most 6.5535", {"multipleOf": Decimal("6.5536")}),
        (
            "is 0.00001234 and 1: the least common multiple must be at most 0.00065535",
            {"type": "integer", "multipleOf": 1234e-8},
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"multipleOf {message}")):
            Grammar("schema", schema, ByteTokenizer(), 257, (256,))


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"minimum": -0.0, "maximum": 0}, "0", True),
        ({"maximum": 10.55}, "10.50", True),
        ({"maximum": 10.55}, "10.5", False),  # documented in docs/text.md
        ({"maximum": 10.55}, "10.4", True),
    ],
)
def test_number_at_bound_is_allowed_in_documented_format(schema, text, allowed):
    schema = {"type": "number", **schema}
    matcher = Grammar("schema", schema, ByteTokenizer(), 257, (256,)).start()
    for byte in text.encode():
        assert matcher.allowed[byte]
        matcher.read(byte)
    assert matcher.allowed[256] == allowed


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"exclusiveMinimum": 3, "maximum": 3.5}, True),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, True),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, True),
        ({"exclusiveMaximum": -3.0, "minimum": -3.5}, True),
        ({"minimum": 3, "exclusiveMinimum": True, "maximum": 3.5}, True),
        ({"exclusiveMinimum": 3, "allOf": [{"maximum": 3.5}]}, True),
        ({"exclusiveMinimum": 0, "maximum": 1}, False),
        ({"exclusiveMinimum": -3, "maximum": -2.5}, False),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, False),
    ],
)
def test_excluded_number_that_parser_would_allow_is_rejected(schema, refused):
    def grammar():
        return Grammar("schema", {"type": "number"} | schema, ByteTokenizer(), 257, (256,))

    if refused:
        with pytest.raises(ValueError, match=r"exclusive\w+ is -?[\d.]+: must differ from"):
            grammar()
    else:
        grammar()


def test_special_tokens_do_not_count_as_grammar_text():
    pieces = model("pieces")
    for form in (r"</s>|<s>.*|<unk>", r"[</s>unk]+"):
        allowed = Grammar("regex", form, pieces.tokenizer, pieces.config.vocab_size, (2,)).start()
        assert not allowed.allowed[:3].any() and allowed.allowed[3 + ord("<")]


def test_logit_processors_combine_with_grammar():
    generate, banned = model("bytes").generate, (tj.Ban(ord("7")),)
    assert generate("x", 9, regex="[78]{5}", processors=banned) == "88888"
    with pytest.raises(ValueError, match="no token can follow"):
        generate("x", 9, regex="7", processors=banned)
    # The byte tokenizer has no stop token, so the text continues up to the limit.
    assert re.fullmatch("[ab]{9}", generate("x", 9, regex="[ab]+", processors=banned))
    assert re.fullmatch("[ab]{3}", generate("x", 9, regex="[ab]{3}", processors=banned))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(regex="("), "regex: unclosed group"),
        (dict(regex="(?=a)b"), "regex: look-around"),
        (dict(regex=r"a\bb"), r"regex: .*lookarounds not supported"),
        (dict(regex="a^b"), r"regex: .*lookarounds not supported"),
        (dict(regex=r"(a)\1"), r"regex: backreferences are not supported"),
        (dict(regex=3), "regex is 3: must be a string"),
        (dict(schema={"type": "objec"}), "schema: Invalid type: objec"),
        (dict(schema={"type": "object", "not": {}}), r'schema: Unimplemented keys: \["not"\]'),
        (dict(schema='{"type": "object"}'), "schema is .*: must be an object"),
        (dict(schema={"const": {1}}), "schema is not JSON"),
        (dict(schema={"const": 123456789.12345679}),
         r"schema.const is 123456789.1.*at most 15 dig"),
        (dict(schema={"const": [{"a": 2**53}]}),
         r"schema.const\[0\].a is 9007199254740992: must be"),
        (dict(schema={"enum": [1, -(2**63)]}),
         r"schema.enum\[1\] is -9223372036854775808: must be"),
        (dict(schema={"type": "integer", "minimum": -1e400}),
         "schema.minimum is -inf: must be a fi"),
        (dict(schema={"multipleOf": 1e-320}), "schema.multipleOf is 1E-320: must have at most 15"),
        (dict(schema={"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}),
         "schema: multipleOf is 65537 and 65539: the least common multiple must"),
        (dict(schema={"maxlength": 3}),
         "schema.maxlength is not a JSON Schema keyword.*did you mean maxLength"),
        (dict(schema={"anyOf": [{"items": {"aditionalProperties": False}}]}),
         r"schema.anyOf\[0\].items.aditionalProperties is not a.*did you mean"),
        (dict(schema={"$defs": {"title": {"nullable": True}}}),
         r"schema.\$defs.title.nullable is not JSON Schema but OpenAPI.*\[\"string\", \"null\"\]"),
        (dict(schema={"type": "integer", "format": "int32"}),
         "schema.format is 'int32', which is not a known format: must be one of date-time"),
        (dict(schema={"type": "string", "format": "datetime"}), "did you mean date-time"),
        (dict(schema={"contentEncoding": "base64"}), "schema.contentEncoding is not supported"),
        (dict(schema={"items": {"x-guidance": {}}}), "items.x-guidance is allowed only at"),
        (dict(schema={"x-guidance": []}), r"schema.x-guidance is \[\]: must be an object"),
        (dict(schema={"properties": ["a"]}), r"schema.properties is \['a'\]: must be an object of"),
        (dict(schema={"properties": {"a": []}}), r"schema.properties.a is \[\]: must be an object"),
        (dict(schema={"anyOf": {}}), "schema.anyOf is {}: must be a list of schemas"),
        (dict(schema={"minimum": True}), "schema.minimum is True: must be a number"),
        (dict(schema={"maxItems": 1.5}),
         "schema.maxItems is 1.5: must be an integer of at least 0"),
        (dict(schema={"minContains": -1}), "schema.minContains is -1: must be an integer"),
        (dict(schema={"maxLength": 2**32}), "schema.maxLength is 4294967296: must be at most"),
        (dict(schema={"prefixItems": [{}], "additionalItems": False}), "use only one of them"),
        (dict(schema={"enum": []}), "schema: Unsatisfiable"),
        (dict(grammar="start: x"), 'grammar: at 1.8.: unknown name: "x"'),
        (dict(grammar='start: %json {"const": 0.10000000000000000001}'),
         "grammar: %json.const is 0.10000000000000000001: must have at most 15 digits"),
        (dict(grammar='start: %json {"const": -9223372036854775808}'),
         "grammar: %json.const is -9223372036854775808: must be from"),
        (dict(grammar='start: a\na: %json {"items": {"nullable": true}}'),
         "json.items.nullable is"),
        (dict(schema={"if": {"maxlength": 3}}),
         "schema.if.maxlength is not a JSON Schema keyword"),
        (dict(schema={"dependentSchemas": {"a": {"minlength": 3}}}),
         "Schemas.a.minlength is not a JSON"),
        (dict(schema={"title": {"type": "string"}}), "schema.title is {.*}: must be a string"),
        (dict(grammar="x: /a/"), "grammar: no start rule"),
        (dict(regex="[a&&b]"), "regex: no text matches it"),
        (dict(regex="a(b&&c)[a&&b]"), "regex: no text matches it"),
        (dict(regex="a", schema={}), "pass only one of schema and regex"),
        (dict(regex="a", beams=2), "regex is 'a': must not be set for a beam search"),
    ],
)  # fmt: skip
def test_invalid_grammars_raise_one_line_error(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model("bytes").generate("a", 5, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_missing_token_for_required_letter_is_reported():
    model = model_of(CharTokenizer("ab{"), padding=0)
    for form in (dict(schema={"type": "object"}), dict(regex="abc")):
        with pytest.raises(ValueError, match="the tokenizer has no token for what must come next"):
            model.generate("a", 5, **form)


@pytest.mark.slow
def test_missing_llguidance_error_names_package_extra(monkeypatch):
    monkeypatch.setattr(structured, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"schema needs llguidance.*transformer_jax\[structured"):
        model("bytes").generate("a", 5, schema={})
    assert len(model("bytes").generate("a", 5)) > 0
