"""Published tokenizers: small ones defined here, and GPT-2's own if its files are available.

TRANSFORMER_JAX_GPT2 names a folder with GPT-2's encoder.json and vocab.bpe.
"""

import itertools
import json
import os
import random
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from transformer_jax import load_tokenizer_folder
from transformer_jax.checkpoints.run_folder import RunFolder, tokenizer_sha256
from transformer_jax.decoding.completion import read_prompt
from transformer_jax.decoding.writer import pieces
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import check_unpadded, target_of, tokenizer_from_json
from transformer_jax.tokenizers.utf8 import byte_letters
from transformer_jax.training.data import DataError

NASTY = "a\0b\ufeffc\r\nd\té\u0301\u200f\u05d0\u202e\U0001f469\u200d\U0001f469\U0010ffff\n\n  x"
END = "<|endoftext|>"
LETTERS = {byte: letter for letter, byte in byte_letters().items()}
MERGES = [
    "h e", "l l", "he ll", "hell o", "Ġ w", "Ġ t", "Ġt h", "o r", "Ġw or", "l d", "Ã ©", "Ċ Ċ",
]  # fmt: skip


def gpt2_vocabulary() -> dict[str, int]:
    tokens = [LETTERS[byte] for byte in range(256)] + [m.replace(" ", "") for m in MERGES] + [END]
    return {token: i for i, token in enumerate(tokens)}


def write(folder: Path, **files) -> Path:
    """Write files to a folder; `tokenizer_json={...}` becomes the file tokenizer.json."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        stem, _, end = name.rpartition("_")
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / f"{stem}.{end}").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


@pytest.fixture
def gpt2(tmp_path) -> PretrainedTokenizer:
    files = dict(vocab_json=gpt2_vocabulary(), merges_txt="#version: 0.2\n" + "\n".join(MERGES))
    return load_tokenizer_folder(write(tmp_path / "gpt2", **files))


@pytest.fixture(scope="module")
def published() -> PretrainedTokenizer:
    folder = os.environ.get("TRANSFORMER_JAX_GPT2")
    if not folder:
        pytest.skip("TRANSFORMER_JAX_GPT2 names no folder with GPT-2's encoder.json and vocab.bpe")
    return load_tokenizer_folder(folder)


def strings(count: int, seed: int = 7) -> list[str]:
    """Draw strings of all scripts, control characters, emoji, unassigned points, surrogates."""
    rng = random.Random(seed)
    ranges = [
        (0, 128), (32, 127), (32, 127), (0x80, 0x250), (0x300, 0x370), (0x5D0, 0x700),
        (0x2000, 0x2070), (0x4E00, 0x4F00), (0x1F300, 0x1F700), (0, 0xD800), (0xD800, 0x110000),
    ]  # fmt: skip
    fixed = [NASTY, "\ufeff", "\0", "\r\n\r\n", "", " ", "   x", "\n" * 31, "\ud800", "don't I'll"]
    out = list(fixed)
    while len(out) < count:
        low, high = rng.choice(ranges)
        out.append(
            "".join(
                chr(rng.randrange(low, high)) if rng.random() < 0.8 else rng.choice(" \n\t'a1")
                for _ in range(rng.randrange(40))
            )
        )
    return out


def check_round_trip(tokenizer, texts):
    surrogates = 0
    for text in texts:
        try:
            expected = text.encode()
        except UnicodeEncodeError:
            surrogates += 1
            with pytest.raises(DataError, match="lone surrogate"):
                tokenizer.encode(text)
            continue
        ids = tokenizer.encode(text)
        assert tokenizer.to_bytes(ids) == expected
        assert b"".join(tokenizer.to_bytes([i]) for i in ids) == expected
        assert tokenizer.decode(ids) == text
    assert 0 < surrogates < len(texts) / 4


def reference_bpe(text: str) -> list[str]:
    """GPT-2's algorithm from its paper, for ASCII: split, then merge the pair of lowest rank."""
    out: list[str] = []
    ranks = {tuple(merge.split(" ")): n for n, merge in enumerate(MERGES)}
    cut = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    for word in re.findall(cut, text):
        parts = [LETTERS[byte] for byte in word.encode()]
        while pairs := [p for p in itertools.pairwise(parts) if p in ranks]:
            best, merged, n = min(pairs, key=ranks.__getitem__), [], 0
            while n < len(parts):
                both = tuple(parts[n : n + 2]) == best
                merged.append("".join(best) if both else parts[n])
                n += 1 + both
            parts = merged
        out += parts
    return out


class TestGPT2:
    def test_round_trip_preserves_every_byte(self, gpt2):
        check_round_trip(gpt2, strings(2000))

    def test_ids_match_reference_algorithm(self, gpt2):
        vocabulary, rng = gpt2_vocabulary(), random.Random(3)
        for _ in range(300):
            text = "".join(rng.choice("helo wrdt  \n's1!") for _ in range(rng.randrange(60)))
            assert gpt2.encode(text).tolist() == [vocabulary[t] for t in reference_bpe(text)]
        assert len(gpt2.encode("hello world, the hello")) == 8

    def test_end_of_text_token_serves_as_bos_eos_and_unk(self, gpt2):
        assert gpt2.vocab_size == 256 + len(MERGES) + 1
        assert gpt2.special_ids == {"bos": 268, "eos": 268, "unk": 268}
        assert gpt2.stop_ids == (268,)

    def test_special_token_in_text_is_parsed_or_rejected_as_configured(self, gpt2):
        text = f"a{END}b"
        assert gpt2.encode(text).tolist() == [97, 268, 98]
        verbatim = gpt2.encode(text, written="text")
        assert 268 not in verbatim
        assert gpt2.to_bytes(verbatim) == gpt2.to_bytes(gpt2.encode(text)) == text.encode()
        with pytest.raises(
            DataError, match=r"the text contains '<\|endoftext\|>', which is a reserved token"
        ):
            gpt2.encode(text, written="refuse")
        assert gpt2.encode("a<b", written="refuse").tolist() == [97, 60, 98]
        with pytest.raises(DataError, match="written is 'ignore'"):
            gpt2.encode(text, written="ignore")
        assert gpt2.decode([97, 268, 98], skip_special_tokens=True) == "ab"

    def test_streamed_pieces_contain_whole_characters(self, gpt2):
        text = "é\U0001f469 hello"
        assert "".join(pieces(gpt2, gpt2.encode(text).tolist())) == text
        assert "".join(pieces(gpt2, gpt2.encode(text).tolist(), "hel")) == "é\U0001f469 "
        assert gpt2.decode(gpt2.encode("\U0001f469")[:2]) == "\ufffd"

    def test_error_names_unknown_ids(self, gpt2):
        for i in (-1, gpt2.vocab_size, 10**9):
            for use in (gpt2.to_bytes, gpt2.decode):
                with pytest.raises(DataError, match=f"id is {i}: must be at least 0 and below 269"):
                    use([97, i])

    def test_tokenizer_round_trips_through_run_folder(self, gpt2, tmp_path):
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir()
        full = replace(gpt2, add_special_tokens=True, chat_templates=(("default", "{{ 1 }}"),))
        folder.write_tokenizer(full)
        again = folder.read_tokenizer(tokenizer_sha256(full))
        assert again == full
        assert again.encode(NASTY).tolist() == gpt2.encode(NASTY).tolist()

    @pytest.mark.slow_except("x")
    @pytest.mark.parametrize("piece", ["x", "hello ", " ", "é\u0301\0", "\n"])
    def test_encoding_takes_linear_time(self, gpt2, piece):
        def seconds(length):
            text = (piece * (length // len(piece) + 1))[:length]
            best = float("inf")
            for _ in range(3):
                start = time.process_time()
                gpt2.encode(text)
                best = min(best, time.process_time() - start)
            return best

        assert seconds(200_000) < 8 * seconds(50_000)  # 4 when linear, 16 when quadratic


class TestGPT2sOwn:
    def test_round_trip_preserves_every_byte(self, published):
        check_round_trip(published, strings(2000))

    def test_megabyte_without_spaces_round_trips(self, published):
        text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=10**6))
        assert published.to_bytes(published.encode(text)) == text.encode()

    def test_token_ids_match_known_examples(self, published):
        assert published.vocab_size == 50257
        assert published.encode("Hello world").tolist() == [15496, 995]
        assert published.encode(" Hello world").tolist() == [18435, 995]

    def test_ids_match_transformers(self, published):
        transformers = pytest.importorskip("transformers")
        folder = Path(os.environ["TRANSFORMER_JAX_GPT2"])
        rules = [tuple(m.split(" ")) for m in (folder / "vocab.bpe").read_text().split("\n")[1:-1]]
        other = transformers.GPT2Tokenizer(
            vocab=json.loads((folder / "encoder.json").read_text()), merges=rules
        )
        compared = 0
        for text in [f"x{END} y", *strings(600, seed=11)]:
            if not any(0xD800 <= ord(c) < 0xE000 for c in text):
                ids = published.encode(text).tolist()
                assert ids == other.encode(text), text
                assert published.decode(ids) == other.decode(
                    ids, clean_up_tokenization_spaces=False
                )
                compared += 1
        assert compared > 500


def llama(byte_fallback=True, **model) -> dict:
    """Llama 2's layout: a mark for each space, one added at the start, and byte fallback."""
    words = ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll", "▁hell", "▁hello", "w", "▁w", "é"]
    merges = ["▁ h", "▁h e", "l l", "▁he ll", "▁hell o", "▁ w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    library = Library(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    content = json.loads(library.to_str())
    content["model"] |= model
    return content


def t5() -> dict:
    """T5's layout: a Unigram model over marked words, and </s> at the end."""
    scores = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -2.0, "▁the": -3.0, "▁do": -3.1}
    scores |= {letter: -5.0 for letter in "abcdefghijklmnopqrstuvwxyz,.!"}
    library = Library(models.Unigram(list(scores.items()), unk_id=2, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return json.loads(library.to_str())


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "do", "n", "'", "t", ".",
        ",", "un", "##want", "##ed", "resume", "not", "s"]  # fmt: skip


class TestSentencePiece:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        config = dict(bos_token={"content": "<s>"}, eos_token="</s>", unk_token="<unk>")
        files = dict(tokenizer_json=llama(), tokenizer_config_json=config)
        return load_tokenizer_folder(write(tmp_path / "llama", **files))

    def test_text_round_trips(self, tokenizer):
        for text in strings(300):
            if not any(0xD800 <= ord(c) < 0xE000 or c == "▁" for c in text):
                ids = tokenizer.encode(text)
                assert tokenizer.decode(ids) == text
                if text:
                    assert tokenizer.to_bytes(ids) == b" " + text.encode()

    def test_byte_tokens_for_one_character_are_separate(self, tokenizer):
        ids = tokenizer.encode("hello\U0001f469")
        assert [tokenizer.to_bytes([i]) for i in ids] == [
            b" hello", b"\xf0", b"\x9f", b"\x91", b"\xa9",
        ]  # fmt: skip
        assert list(pieces(tokenizer, ids.tolist())) == [" hello", "\U0001f469"]

    def test_invalid_byte_does_not_replace_valid_characters_next_to_it(self, tokenizer):
        ids = {byte: 3 + byte for byte in b"\xffAB\xc3\xa9"}
        found = tokenizer.decode([ids[byte] for byte in b"A\xc3\xa9\xffB"])
        assert found == "A\u00e9\ufffdB"

    def test_special_tokens_are_added_on_request(self, tokenizer):
        assert tokenizer.special_ids == {"bos": 1, "eos": 2, "unk": 0}
        plain = tokenizer.encode("hello").tolist()
        assert tokenizer.encode("hello", special_tokens=True).tolist() == [1, *plain]
        adding = replace(tokenizer, add_special_tokens=True)
        assert read_prompt(adding, "hello").tolist() == [1, *plain]
        assert adding.encode("hello", special_tokens=False).tolist() == plain

    def test_tokenizer_json_overrides_configured_bos_and_eos(self, tmp_path):
        for bos, eos in ((True, True), (False, None), (None, True), (None, False)):
            config = dict(bos_token="<s>", eos_token="</s>", add_bos_token=bos, add_eos_token=eos)
            files = dict(tokenizer_json=llama(), tokenizer_config_json=config)
            tokenizer = load_tokenizer_folder(write(tmp_path / "ends", **files))
            ids = tokenizer.encode("hello", special_tokens=True).tolist()
            assert [i for i in ids if i < 3] == [1]

    def test_config_sets_bos_and_eos_without_tokenizer_json(self, tmp_path):
        for bos, eos, expected in ((True, True, "12"), (False, None, ""), (None, True, "2")):
            config = dict(bos_token=MERGES[0].replace(" ", ""), eos_token=END)
            config |= dict(add_bos_token=bos, add_eos_token=eos)
            files = gpt2_files("\n".join(MERGES)) | dict(tokenizer_config_json=config)
            tokenizer = load_tokenizer_folder(write(tmp_path / "ends", **files))
            plain = tokenizer.encode("x").tolist()
            ends = {"1": [tokenizer.special_ids["bos"]], "2": [tokenizer.special_ids["eos"]]}
            first, last = (ends[end] if end in expected else [] for end in "12")
            assert tokenizer.encode("x", special_tokens=True).tolist() == [*first, *plain, *last]

    def test_t5_tokenizer_appends_end_token(self, tmp_path):
        config = dict(eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
        files = dict(tokenizer_json=t5(), tokenizer_config_json=config)
        tokenizer = load_tokenizer_folder(write(tmp_path / "t5", **files))
        ids = tokenizer.encode("the do, abc", special_tokens=True).tolist()
        assert ids[-1] == 1 and tokenizer.stop_ids == (1,)
        assert tokenizer.decode(ids[:-1]) == "the do, abc"
        assert tokenizer.to_bytes(ids[:2]) == b" the do"
        unknown = tokenizer.encode("a\u4e00", written="refuse")  # <unk> is not a reserved token
        assert unknown[-1] == 2

    def test_first_token_is_reserved_in_vocabulary_without_unknown_token(self, tmp_path):
        definition = llama()
        definition["model"]["unk_token"] = None
        tokenizer = load_tokenizer_folder(write(tmp_path / "m", tokenizer_json=definition))
        assert "unk" not in tokenizer.special_ids
        with pytest.raises(DataError, match="the text contains '<unk>', which is a reserved token"):
            tokenizer.encode("a<unk>", written="refuse")

    def test_decode_matches_tokenizers_library(self, tmp_path):
        rng = random.Random(5)
        for n, content in enumerate((llama(), t5(), t5() | dict(decoder=None))):
            tokenizer = load_tokenizer_folder(write(tmp_path / str(n), tokenizer_json=content))
            library = Library.from_str(json.dumps(content))
            byte = {i for i in range(3, 259)} if n == 0 else set()
            for _ in range(200):
                ids = [i for i in rng.choices(range(tokenizer.vocab_size), k=9) if i not in byte]
                assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


class TestWordPiece:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        return load_tokenizer_folder(write(tmp_path / "bert", vocab_txt="\n".join(BERT) + "\n"))

    def test_words_are_lowercased_split_and_rejoined(self, tokenizer):
        ids = tokenizer.encode("The Cats, résumé unwanted. ☃", special_tokens=True)
        expected = ["[CLS]", "the", "cat", "##s", ",", "resume", "un", "##want", "##ed", ".",
                    "[UNK]", "[SEP]"]  # fmt: skip
        assert [BERT[i] for i in ids] == expected
        assert tokenizer.decode(ids[1:-2]) == "the cats, resume unwanted."
        assert tokenizer.to_bytes(ids[1:4]) == b" the cats"

    def test_tokenizer_config_can_preserve_case(self, tmp_path):
        config = dict(do_lower_case=False, tokenizer_class="BertTokenizer")
        files = dict(vocab_txt="\n".join([*BERT, "Cat"]), tokenizer_config_json=config)
        tokenizer = load_tokenizer_folder(write(tmp_path / "cased", **files))
        assert tokenizer.encode("Cat cat Dog").tolist() == [len(BERT), 6, 1]

    def test_decode_matches_tokenizers_library(self, tokenizer):
        library, rng = Library.from_str(tokenizer.definition), random.Random(2)
        for n in range(300):
            ids, skip = rng.choices(range(len(BERT)), k=7), dict(skip_special_tokens=n % 2 == 0)
            assert tokenizer.decode(ids, **skip) == library.decode(ids, **skip)

    def test_ids_match_transformers(self, tokenizer, tmp_path):
        transformers = pytest.importorskip("transformers")
        other = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(BERT)})
        for text in ("The Cats, résumé unwanted. ☃", "un[MASK]wanted", "don't. 中not"):
            assert tokenizer.encode(text, special_tokens=True).tolist() == other.encode(text)


class TestFolder:
    def test_token_roles_are_collected_from_every_file(self, tmp_path):
        content = llama()
        content["model"]["vocab"]["[P]"] = 272
        content["added_tokens"] += [
            {"id": 272, "content": "[P]"} | dict.fromkeys(
                ("single_word", "lstrip", "rstrip", "normalized", "special"), False
            )
        ]  # fmt: skip
        content |= dict(truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 0,
                                    "direction": "Right"})  # fmt: skip
        folder = write(
            tmp_path / "all",
            tokenizer_json=content,
            tokenizer_config_json=dict(eos_token="</s>", bos_token=None),
            special_tokens_map_json=dict(bos_token="<s>", eos_token="<unk>", pad_token="[P]"),
            generation_config_json=dict(eos_token_id=[2, 5]),
        )
        tokenizer = load_tokenizer_folder(folder)  # an older folder, in which the map has priority
        assert tokenizer.special_ids == {"bos": 1, "eos": 0, "pad": 272}
        newer = dict(eos_token="</s>", added_tokens_decoder={"1": dict(content="<s>")})
        tokenizer = load_tokenizer_folder(write(folder, tokenizer_config_json=newer))
        assert tokenizer.special_ids == {"bos": 1, "eos": 2, "pad": 272}
        assert tokenizer.stop_ids == (2, 5)
        assert tokenizer.decode([272, 1], skip_special_tokens=True) == ""
        assert (
            len(tokenizer.encode("hello hello hello")) > 1
        )  # the truncation of the file is ignored

    def test_class_options_in_config_override_tokenizer_json(self, tmp_path, gpt2):
        """BERT's normalizer and the space before byte-level text; other classes ignore them."""
        bert = load_tokenizer_folder(write(tmp_path / "b", vocab_txt="\n".join(BERT) + "\n"))
        for options, kind, ids in (
            (dict(do_lower_case=False), "BertTokenizer", [1]),
            (dict(strip_accents=False), "BertTokenizerFast", [1]),
            (dict(do_lower_case=True), "BertTokenizer", [17]),
            (dict(do_lower_case=False), "PreTrainedTokenizerFast", [17]),
        ):
            config = options | dict(tokenizer_class=kind)
            files = dict(tokenizer_json=bert.definition, tokenizer_config_json=config)
            found = load_tokenizer_folder(write(tmp_path / "bert", **files))
            assert found.encode("Résumé").tolist() == ids, (options, kind)
        for options, kind, spaced in (
            (dict(add_prefix_space=True), "GPT2TokenizerFast", True),
            (dict(add_prefix_space=False), "GPT2Tokenizer", False),
            (dict(add_prefix_space=True), "PreTrainedTokenizerFast", False),
        ):
            config = options | dict(tokenizer_class=kind)
            files = dict(tokenizer_json=gpt2.definition, tokenizer_config_json=config)
            found = load_tokenizer_folder(write(tmp_path / "gpt", **files))
            expected = gpt2.encode(" hello" if spaced else "hello").tolist()
            assert found.encode("hello").tolist() == expected, (options, kind)
        definition = json.loads(gpt2.definition)
        two = [dict(type="Digits", individual_digits=True), definition["pre_tokenizer"]]
        definition["pre_tokenizer"] = dict(type="Sequence", pretokenizers=two)
        options = dict(add_prefix_space=True, tokenizer_class="Qwen2Tokenizer")
        files = dict(tokenizer_json=definition, tokenizer_config_json=options)
        found = load_tokenizer_folder(write(tmp_path / "qwen", **files))
        assert found.encode("hello").tolist() == gpt2.encode(" hello").tolist()

    def test_split_special_tokens_option_is_rejected(self, tmp_path):
        files = gpt2_files() | dict(tokenizer_config_json=dict(split_special_tokens=True))
        with pytest.raises(DataError, match=r"split_special_tokens is true: must be false: encode"):
            load_tokenizer_folder(write(tmp_path / "x", **files))

    def test_templates_can_use_named_tokens(self, tmp_path):
        """Run folders keep the names, and the flags of the token do not change."""
        tool = dict(id=269, content="<tool>") | dict.fromkeys(
            ("single_word", "lstrip", "rstrip", "normalized", "special"), False
        )
        config = dict(
            added_tokens_decoder={"269": tool}, image_token="<tool>", eos_token=END,
            extra_special_tokens={"boi_token": "<tool>"},
            chat_template="{{ image_token }}|{{ boi_token }}|{{ eos_token }}|{{ other_token }}",
        )  # fmt: skip
        folder = write(tmp_path / "x", **gpt2_files(), tokenizer_config_json=config)
        tokenizer = load_tokenizer_folder(folder)
        assert repr(tokenizer).endswith(", chat template)")
        assert "template" not in repr(replace(tokenizer, chat_templates=()))
        expected = f"<tool>|<tool>|{END}|"
        assert tokenizer.chat([dict(role="user", content="a")]) == expected
        assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
        assert tokenizer.decode([97, 269, 98], skip_special_tokens=True) == "a<tool>b"
        with pytest.raises(
            DataError, match="continue_final_message is an argument of transformers"
        ):
            tokenizer.chat([dict(role="user", content="a")], continue_final_message=True)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools|length }}")
        more = load_tokenizer_folder(folder)
        assert more.chat([dict(role="user", content="a")], tools=[{}]) == "T1"
        assert more.chat([dict(role="user", content="a")]) == expected
        (folder / "chat_template.jinja").write_text("")
        assert load_tokenizer_folder(folder).chat([dict(role="user", content="a")]) == ""

    def test_added_tokens_json_is_loaded(self, tmp_path):
        folder = write(
            tmp_path / "added",
            vocab_json=gpt2_vocabulary(),
            merges_txt="\n".join(MERGES),
            added_tokens_json={"[PAD]": 269, "<tool>": 270},
            special_tokens_map_json=dict(pad_token="[PAD]"),
        )
        tokenizer = load_tokenizer_folder(folder)
        assert tokenizer.vocab_size == 271
        assert tokenizer.special_ids["pad"] == 269
        message = r"the prompt (begins|ends) with the padding token 269"
        for text in ("[PAD][PAD]a", "a[PAD]"):
            ids = tokenizer.encode(text)
            with pytest.raises(DataError, match=message):
                check_unpadded(tokenizer, ids, "the prompt")
            check_unpadded(replace(tokenizer, stop_ids=(269,)), ids, "the prompt")
            for around in ((269,), ()), ((), (269,)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setitem(vars(tokenizer), "frame", around)
                    check_unpadded(tokenizer, ids, "the prompt")
        check_unpadded(tokenizer, tokenizer.encode("a[PAD]a"), "the prompt")
        assert tokenizer.encode("a<tool>[PAD]").tolist() == [97, 270, 269]
        assert tokenizer.to_bytes([97, 270, 269]) == b"a<tool>[PAD]"
        assert tokenizer.encode("<tool>[PAD]", written="text")[0] == 270  # added, not special

    def test_added_token_decodes_to_original_text(self, tmp_path):
        """Byte-level files use U+00E9 for the byte 0xE9."""
        files = dict(vocab_json=gpt2_vocabulary(), merges_txt="\n".join(MERGES))
        folder = write(tmp_path / "e", **files, added_tokens_json={"<é ▁>": 269, "éé": 270})
        tokenizer = load_tokenizer_folder(folder)
        assert tokenizer.encode("<é ▁>éé").tolist() == [269, 270]
        assert tokenizer.to_bytes([269, 270]) == "<é ▁>éé".encode()

    def test_id_without_token_decodes_to_nothing(self, tmp_path):
        content = llama()
        content["model"]["vocab"]["zz"] = 300
        tokenizer = load_tokenizer_folder(write(tmp_path / "hole", tokenizer_json=content))
        assert tokenizer.vocab_size == 301
        assert tokenizer.to_bytes([280, 300, 299]) == b"zz"
        assert tokenizer.decode([280, 300]) == "zz"

    def test_error_names_byte_without_token(self, tmp_path):
        library = Library(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        folder = write(tmp_path / "few", tokenizer_json=library.to_str())
        tokenizer = load_tokenizer_folder(folder)
        assert tokenizer.encode("abba").tolist() == [0, 1, 1, 0]
        with pytest.raises(DataError, match="the byte 0x63, which has no token"):
            tokenizer.encode("abc")

    def test_roberta_tokenizer_adds_bos_and_eos(self, tmp_path):
        vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", "<unk>", *gpt2_vocabulary()])}
        config = dict(tokenizer_class="RobertaTokenizerFast")
        files = dict(vocab_json=vocabulary, merges_txt="\n".join(MERGES))
        tokenizer = load_tokenizer_folder(
            write(tmp_path / "r", **files, tokenizer_config_json=config)
        )
        assert tokenizer.encode("a", special_tokens=True).tolist() == [0, 100, 1]
        assert tokenizer.special_ids["cls"] == 0

    def test_symlink_within_hub_cache_is_followed(self, tmp_path):
        cache = tmp_path / "models--a--b"
        blobs, folder = cache / "blobs", cache / "snapshots" / "abc"
        folder.mkdir(parents=True)
        write(blobs, tokenizer_json=llama())
        (folder / "tokenizer.json").symlink_to("../../blobs/tokenizer.json")
        assert load_tokenizer_folder(folder).vocab_size == 272


def with_model(**changes) -> dict:
    content = llama()
    content["model"] |= changes
    return content


def with_vocabulary(**tokens) -> dict:
    content = llama()
    content["model"]["vocab"] |= tokens
    return content


def gpt2_files(merges="h e", **tokens) -> dict:
    return dict(vocab_json=gpt2_vocabulary() | tokens, merges_txt=merges)


def normalizing(*parts) -> dict:
    return llama() | dict(normalizer=dict(type="Sequence", normalizers=list(parts)))


BEYOND = dict(id=999, content="<x>", single_word=False, lstrip=False, rstrip=False,
              normalized=False, special=True)  # fmt: skip
DOUBLE = dict(type="Replace", pattern={"String": "a"}, content="aa")
HOSTILE = {
    "nothing": ({}, r"no tokenizer was found: .*or vocab.txt$"),
    "a SentencePiece model": (
        {"spiece_model": "\n\x0e"}, r"or vocab.txt; to convert spiece.model, use AutoTokenizer.*",
    ),
    "not JSON": (dict(tokenizer_json="{"), r"tokenizer.json is not JSON"),
    "not UTF-8": (dict(tokenizer_json=b"\xff{}"), r"tokenizer.json is not JSON \('utf-8' codec"),
    "nested": (dict(tokenizer_json='{"a":' + "[" * 100_000), "tokenizer.json is nested more"),
    "a list": (dict(tokenizer_json="[]"), r"tokenizer.json: must be an object"),
    "no model": (dict(tokenizer_json="{}"), r"tokenizer.json: "),
    "a key twice": (dict(tokenizer_json='{"a": 1, "a": 2}'), r"tokenizer.json: 'a' appears twice"),
    "NaN": (dict(tokenizer_json='{"a": NaN}'), "tokenizer.json: 'NaN' is not a finite number"),
    "an added id beyond": (dict(tokenizer_json=llama()
        | dict(added_tokens=[*llama()["added_tokens"], BEYOND])),
        r"tokenizer.json: added_tokens: '<x>' has ID 999: must be 272"),
    "a huge id": (dict(tokenizer_json=with_vocabulary(zz=2**31)), r"'zz' has ID 2147483648"),
    "a negative id": (dict(tokenizer_json=with_vocabulary(zz=-1)), r"tokenizer.json: "),
    "an id that is text": (dict(tokenizer_json=with_vocabulary(zz="1")), r"tokenizer.json: "),
    "an id twice": (dict(tokenizer_json=with_vocabulary(zz=5)), r"ID 5 is used by \['<0x02>'"),
    "unknown merges": (dict(tokenizer_json=with_model(merges=[["q", "x"]])), r"json: .*`q` out of"),
    "an unknown model": (dict(tokenizer_json=with_model(type="Pickle")), r"tokenizer.json: "),
    "dropout": (dict(tokenizer_json=with_model(dropout=0.1)), r"model.dropout is 0.1"),
    "no unknown": (dict(tokenizer_json=with_model(unk_token=None, byte_fallback=False)),
        r"model would drop unknown characters"),
    "an unknown unknown": (dict(tokenizer_json=with_model(unk_token="?")), r"unk_token is '\?'"),
    "an unknown decoder": (dict(tokenizer_json=llama()
        | dict(decoder=dict(type="CTC", pad_token="a", word_delimiter_token="b", cleanup=True))),
        r"decoder .*CTC"),
    "growing text": (dict(tokenizer_json=normalizing(*[DOUBLE] * 30)), r"normalizer lengthens"),
    "auto_map": (dict(tokenizer_json=llama(), tokenizer_config_json=dict(auto_map=["x.Y", None])),
        r"tokenizer_config.json: auto_map is \['x.Y', None\]: it names Python code"),
    "an unknown role": (dict(tokenizer_json=llama(), tokenizer_config_json=dict(pad_token="[PAD]")),
        r"tokenizer.json: pad_token is '\[PAD\]': must be in the vocabulary"),
    "a role that is a number": (dict(tokenizer_json=llama(),
        tokenizer_config_json=dict(pad_token=3)),
        r"tokenizer_config.json: pad_token is 3: must be a string"),
    "specials that are a number": (dict(tokenizer_json=llama(),
        tokenizer_config_json=dict(additional_special_tokens=3)),
        r"tokenizer_config.json: additional_special_tokens is 3: must be a list"),
    "a role that is no text": (dict(tokenizer_json=llama(),
        tokenizer_config_json=dict(pad_token="\ud800")),
        r"tokenizer.json: pad_token: .*surrogates not allowed"),
    "BERT: an unknown without text": (dict(vocab_txt="[UNK]", tokenizer_config_json=dict(
        unk_token=[1])), r"vocab.txt: must contain the unk_token \[1\]"),
    "a sequence of nothing": (dict(tokenizer_json=llama() | dict(decoder=dict(type="Sequence",
        decoders=[None]))), r"tokenizer.json: "),
    "added under two ids": (dict(tokenizer_json=llama(),
        tokenizer_config_json=dict(added_tokens_decoder={"7": {"content": "<s>"}})),
        r"'<s>' has ID 7: it already has ID 1"),
    "two under one id": (dict(tokenizer_json=llama(), added_tokens_json={"<x>": 1}),
        r"'<x>' has ID 1: '<s>' has this ID"),
    "an end beyond": (dict(tokenizer_json=llama(), generation_config_json=dict(eos_token_id=[2,
        272])), r"generation_config.json: eos_token_id is 272: must be an ID below 272"),
    "a template that is a number": (dict(tokenizer_json=llama(),
        tokenizer_config_json=dict(chat_template=3)),
        r"tokenizer_config.json: chat_template: must be a string"),
    "GPT-2: an id twice": (gpt2_files(zz=5), r"vocab.json: 'zz' and .* have ID 5"),
    "GPT-2: a hole": (gpt2_files(zz=300), r"vocab.json: no token has ID 269, but 'zz' has 300"),
    "GPT-2: an id that is text": (gpt2_files(zz="300"), r"vocab.json: 'zz' has ID '300'"),
    "GPT-2: a negative id": (gpt2_files(zz=-3), r"vocab.json: 'zz' has ID -3: must be at least 0"),
    "GPT-2: a merge of unknowns": (gpt2_files("h e\nhe zz"), r"merges.txt: line 2 names 'zz'"),
    "GPT-2: a merge to an unknown": (gpt2_files("h e\ne h"), r"line 2 names 'eh', which is"),
    "GPT-2: a merge of three": (gpt2_files("h e l"), r"merges.txt: line 1 is 'h e l': must be two"),
    "GPT-2: no byte": (dict(vocab_json={"a": 0}, merges_txt=""), r"vocab.json: byte 0x21 has no"),
    "GPT-2: another class": (gpt2_files() | dict(
        tokenizer_config_json=dict(tokenizer_class="CLIPTokenizer")),
        r"tokenizer_class is 'CLIPTokenizer': it does not define how to read vocab.json"),
    "BERT: a word twice": (dict(vocab_txt="[UNK]\na\nb\na"),
        r"vocab.txt: line 4 repeats line 2"),
    "BERT: no unknown": (dict(vocab_txt="a\nb"), r"vocab.txt: must contain the unk_token '\[UNK"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer_folder_is_rejected_with_reason(name, tmp_path):
    files, message = HOSTILE[name]
    folder = write(tmp_path / "hostile", **files)
    start = time.process_time()
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer_folder(folder)
    assert time.process_time() - start < 5
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


ODD = [None, 0, -1, 2**40, 1.5, True, "", "x", [], ["x"], [["a", "b"]], {}, {"a": 1}, [None]]


def places(content, path=()):
    """Yield each path into JSON, without the entries of long vocabularies."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*path, key)
        if isinstance(value, dict | list) and len(value) < 40:
            yield from places(value, (*path, key))


@pytest.mark.slow
def test_corrupted_tokenizer_folder_is_loaded_or_rejected(tmp_path, capfd):
    rng, outcomes = random.Random(23), {"read": 0, "refused": 0}
    config = dict(eos_token="</s>", add_bos_token=True, additional_special_tokens=["<unk>"],
                  chat_template=[{"name": "default", "template": "a"}])  # fmt: skip
    for _ in range(200):
        layout, first = rng.choice([(llama, "<s>"), (t5, "</s>")])
        config |= dict(bos_token={"content": first})
        config |= dict(added_tokens_decoder={"1": {"content": first, "special": True}})
        files = dict(tokenizer_json=layout(), tokenizer_config_json=config)
        files = json.loads(json.dumps(files | dict(generation_config_json={"eos_token_id": [1]})))
        *path, last = rng.choice([place for place in places(files) if len(place) > 1])
        part = files
        for key in path:
            part = part[key]
        part[last] = rng.choice(ODD)
        try:
            tokenizer = load_tokenizer_folder(write(tmp_path / "x", **files))
            tokenizer.to_bytes(tokenizer.encode("hello wörld", special_tokens=True))
            outcomes["read"] += 1
        except DataError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20
    capfd.readouterr()  # the library prints its panics


def test_files_outside_folder_are_not_opened(tmp_path):
    outside = write(tmp_path / "outside", tokenizer_json=llama())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    with pytest.raises(DataError, match="a link that leaves the folder"):
        load_tokenizer_folder(inside)
    (inside / "tokenizer.json").unlink()
    os.mkfifo(inside / "tokenizer.json")
    with pytest.raises(DataError, match="not a regular file"):
        load_tokenizer_folder(inside)
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer_folder(tmp_path / "none")


def test_oversized_file_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(DataError, match="has 2147483648 bytes: must have at most 67108864"):
        load_tokenizer_folder(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_catastrophic_regex_pattern_raises_error(tmp_path, capfd):
    splitting = dict(type="Split", pattern={"Regex": "(a+)+$"}, behavior="Isolated", invert=False)
    folder = write(tmp_path / "x", tokenizer_json=llama() | dict(pre_tokenizer=splitting))
    tokenizer = load_tokenizer_folder(folder)
    start = time.process_time()
    with pytest.raises(DataError, match=r"text: .*retry-limit"):
        tokenizer.encode("a" * 50 + "b")
    assert time.process_time() - start < 5
    assert "panicked" in capfd.readouterr().err  # printed by the library


@pytest.mark.parametrize(
    "changes",
    [
        dict(more=1), dict(roles={"bos": 3}), dict(roles={"king": "<s>"}), dict(definition={}),
        dict(stop_ids=[10**6]), dict(stop_ids=["1"]), dict(add_special_tokens=1),
    ],
    ids=str,
)  # fmt: skip
def test_modified_tokenizer_in_run_folder_is_rejected(gpt2, changes):
    with pytest.raises(DataError):
        tokenizer_from_json(json.dumps(json.loads(gpt2.to_json()) | changes))


def listed(*tokens: tuple[int, str]) -> list[dict]:
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return [dict(id=i, content=token, **flags) for i, token in tokens]


ANGLES = dict(bos="<s>", eos="</s>", unk="<unk>", sep="</s>", pad="<pad>", cls="<s>")


class TestClass:
    """Classes implied by `model_type`; expected ids and roles are from transformers 5."""

    def roberta(self, folder: Path, **files) -> PretrainedTokenizer:
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *(LETTERS[b] for b in range(256)), "<mask>"]
        files["vocab_json"] = {token: i for i, token in enumerate(tokens)}
        return load_tokenizer_folder(write(folder, merges_txt="#version: 0.2\n", **files))

    @pytest.mark.parametrize("model_type", ["roberta", "bart"])
    def test_roberta_and_bart_add_tokens_around_byte_level_text(self, model_type, tmp_path):
        found = self.roberta(tmp_path / "m", config_json=dict(model_type=model_type))
        assert found.encode("ab", special_tokens=True).tolist() == [0, 101, 102, 2]
        assert found.encode("<mask>").tolist() == [260]
        roles = {**ANGLES, "mask": "<mask>"}
        assert dict(found.roles) == roles
        spaced = self.roberta(
            tmp_path / "m", config_json=dict(model_type=model_type),
            tokenizer_config_json=dict(add_prefix_space=True),
        )  # fmt: skip
        assert spaced.encode("ab").tolist() == [36, 101, 102]
        gpt2 = self.roberta(
            tmp_path / "m", config_json=dict(model_type="gpt2"), tokenizer_config_json={}
        )
        assert gpt2.encode("ab", special_tokens=True).tolist() == [101, 102] and not gpt2.roles

    def test_mpnet_tokenizer_adds_its_special_tokens(self, tmp_path):
        words = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", "the", "cat"]
        files = dict(vocab_txt="\n".join(words) + "\n", config_json=dict(model_type="mpnet"))
        found = load_tokenizer_folder(write(tmp_path / "m", **files))
        assert found.encode("The <mask> ?", special_tokens=True).tolist() == [0, 5, 4, 3, 2]
        assert dict(found.roles) == {**ANGLES, "unk": "[UNK]", "mask": "<mask>"}

    @pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra", "nomic_bert"])
    def test_bert_tokenizer_json_uses_default_roles_and_case(self, model_type, tmp_path):
        bert = load_tokenizer_folder(write(tmp_path / "b", vocab_txt="\n".join(BERT) + "\n"))
        definition = json.loads(bert.definition)
        definition["normalizer"]["lowercase"] = False
        files = dict(tokenizer_json=definition, config_json=dict(model_type=model_type))
        for lower, ids in ((None, [17]), (True, [17]), (False, [1])):
            config = dict(model_max_length=512) | (
                {} if lower is None else {"do_lower_case": lower}
            )
            folder = write(tmp_path / "m", tokenizer_config_json=config, **files)
            found = load_tokenizer_folder(folder)
            assert found.encode("Résumé").tolist() == ids
            assert found.special_ids == bert.special_ids and found.special_ids["mask"] == 4
        config = dict(mask_token=None, pad_token="[UNK]")
        found = load_tokenizer_folder(write(tmp_path / "m", tokenizer_config_json=config, **files))
        assert found.special_ids == {"unk": 1, "sep": 3, "pad": 1, "cls": 2}

    @pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
    def test_added_mask_token_is_found_by_name_without_class(self, mask, tmp_path):
        definition = llama()
        definition["model"]["vocab"][mask] = 272
        definition["added_tokens"] += listed((272, mask))
        files = dict(tokenizer_json=definition, config_json=dict(model_type="modernbert"))
        assert load_tokenizer_folder(write(tmp_path / "m", **files)).special_ids == {"mask": 272}

    def test_tokenizer_class_applies_unless_model_type_overrides_it(self, tmp_path):
        cases = (
            ("llama", "LlamaTokenizerFast", {"bos": 1, "eos": 2, "unk": 0}),
            ("llama", None, {}),
            ("mistral", "LlamaTokenizer", {}),
            ("bert", "LlamaTokenizer", {"bos": 1, "eos": 2, "unk": 0}),
            ("qwen2", "LlamaTokenizer", {}),
        )
        for model_type, name, roles in cases:
            files = dict(tokenizer_json=llama(), config_json=dict(model_type=model_type))
            files["tokenizer_config_json"] = {} if name is None else dict(tokenizer_class=name)
            found = load_tokenizer_folder(write(tmp_path / "m", **files))
            assert found.special_ids == roles, (model_type, name)

    def test_vocabulary_file_unknown_to_model_type_is_rejected(self, tmp_path):
        for model_type in ("llama", "t5", "bert", "qwen2"):
            with pytest.raises(
                DataError, match=f"model_type is '{model_type}': it does not define"
            ):
                self.roberta(tmp_path / "m", config_json=dict(model_type=model_type))

    def test_mbart_targets_without_roles_end_with_target_language(self, tmp_path):
        definition = t5()
        size = len(definition["model"]["vocab"])
        definition["model"]["vocab"] += [
            ["en_XX", 0.0],
            ["ro_RO", 0.0],
        ]  # special tokens of the class
        files = dict(tokenizer_json=definition, config_json=dict(model_type="mbart"))
        found = load_tokenizer_folder(write(tmp_path / "m", **files))
        assert found.encode("", special_tokens=True).tolist() == [1, size]
        assert dict(found.languages) == {"en_XX": size, "ro_RO": size + 1}
        found = replace(found, target_ids=(("decoder_start_token_id", size + 1),))
        assert target_of(found).labels == ((), (1, size + 1))

    def test_pegasus_texts_end_with_the_end_token(self, tmp_path):
        definition = t5() | dict(post_processor=None)
        files = dict(tokenizer_json=definition, config_json=dict(model_type="pegasus"))
        found = load_tokenizer_folder(write(tmp_path / "m", **files))
        assert found.encode("the", special_tokens=True).tolist() == [*found.encode("the"), 1]

    def test_nllb_language_token_position_overrides_tokenizer_file(self, tmp_path):
        definition = t5()
        tokens = ["eng_Latn", "fra_Latn"]
        size = len(definition["model"]["vocab"])
        definition["model"]["vocab"] += [[token, 0.0] for token in tokens]
        definition["added_tokens"] += listed(*enumerate(tokens, size))
        plain = [i for i in load_tokenizer_folder(
            write(tmp_path / "t5", tokenizer_json=definition)
        ).encode("the do").tolist()]  # fmt: skip
        config = dict(tokenizer_class="NllbTokenizer", eos_token="</s>")
        cases = (
            ({}, [size, *plain, 1]),
            (dict(src_lang="fra_Latn"), [size + 1, *plain, 1]),
            (dict(legacy_behaviour=True), [*plain, 1, size]),
        )
        for options, ids in cases:
            files = dict(tokenizer_json=definition, config_json=dict(model_type="m2m_100"))
            folder = write(tmp_path / "m", tokenizer_config_json=config | options, **files)
            found = load_tokenizer_folder(folder)
            assert found.encode("the do", special_tokens=True).tolist() == ids, options
            found = replace(found, target_ids=(("decoder_start_token_id", 1),))
            other = with_languages(found, "fra_Latn", "eng_Latn")
            moved = [size + 1 if i == found.languages[options.get("src_lang", "eng_Latn")] else i
                     for i in ids]  # fmt: skip
            assert other.encode("the do", special_tokens=True).tolist() == moved
            labels = target_of(other).labels
            assert labels == (
                ((), (1, size)) if options.get("legacy_behaviour") else ((size,), (1,))
            )
        with pytest.raises(DataError, match="src_lang is 'xx': must be a language token"):
            wrong = dict(tokenizer_config_json=config | dict(src_lang="xx"))
            load_tokenizer_folder(write(tmp_path / "m", tokenizer_json=definition, **wrong))
