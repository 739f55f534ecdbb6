"""Tokenizers built from the metadata of a GGUF file: ids and invalid metadata."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC

from tests.support.gguf_files import byte_level_keys
from transformer_jax.tokenizers.gguf_metadata import tokenizer_of_metadata
from transformer_jax.tokenizers.utf8 import DataError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Patterns from the tokenizer.json of Llama 3, Qwen 2, Phi 4 mini and Mistral NeMo."""
CORPUS = [
    "The cat's on the mat; it'll sit there 2024 times, WON'T it?\n\nYes: they've said so.",
    "Ünïcödé na\u00efve caf\u00e9 数学 и русский текст 1234567 \t tabs   and spaces\r\n",
    "def main(args):\n    return args[0] + 12 // 3  # code/paths",
] * 9


def published(pre: str) -> Tokenizer:
    """Train a tokenizer with the pipeline of the model of this name."""
    whole = pre in ("llama-bpe", "lfm2", "tekken")
    library = Tokenizer(models.BPE(ignore_merges=whole))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    patterns = {
        "llama-bpe": LLAMA3,
        "lfm2": LLAMA3,
        "qwen2": QWEN2,
        "gpt-4o": GPT4O,
        "tekken": TEKKEN,
    }
    if pre == "gpt-2":
        library.pre_tokenizer = plain
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        library.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    else:
        split = pre_tokenizers.Split(Regex(patterns[pre]), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    if pre == "qwen2":
        library.normalizer = NFC()
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(CORPUS, trainer)
    content = json.loads(library.to_str())  # add a word that no merges produce
    content["model"]["vocab"]["zqzq"] = len(content["model"]["vocab"])
    library = Tokenizer.from_str(json.dumps(content))
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    return library


def byte_level(pre: str) -> tuple[Tokenizer, dict[str, object]]:
    library = published(pre)
    metadata = byte_level_keys(library, pre, bos="<|endoftext|>", eos="<|im_end|>")
    kinds = "tokenizer.ggml.token_type"
    return library, metadata | {
        kinds: np.array(metadata[kinds], np.int32)
    }  # as the reader returns it


def random_texts(seed: int, count: int) -> list[str]:
    """Draw texts of words, digits, spaces, punctuation, many scripts and special tokens."""
    rng = np.random.default_rng(seed)
    parts = [
        *" \n\t\r'.,;/([{#-", "  ", "   \n", "'s", "'LL", "'t", "cat", "The", "WON", "mat", "é",
        "e\u0301", "数", "я", "ǅ", "٣", "½", "🙂", "\u200d", "<|im_end|>", "<tool>", "ab", "AbC",
        *"0123456789", "zqzq",
    ]  # fmt: skip
    return ["".join(rng.choice(parts, rng.integers(1, 30))) for _ in range(count)]


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "lfm2", "qwen2", "gpt-4o", "tekken"]
)
def test_gguf_token_ids_match_published_tokenizer(pre):
    library, metadata = byte_level(pre)
    tokenizer = tokenizer_of_metadata(metadata, "m.gguf")
    texts = [*CORPUS[:3], *random_texts(0, 150)]
    for text in texts:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == expected, text
        assert tokenizer.decode(expected) == library.decode(expected, skip_special_tokens=False), (
            text
        )
    first = [0] if pre in ("llama-bpe", "lfm2", "tekken") else []
    assert tokenizer.encode("cat", special_tokens=True).tolist()[: len(first)] == first
    assert len(tokenizer.encode("cat", special_tokens=True)) == len(tokenizer.encode("cat")) + len(
        first
    )


def pieces() -> dict[str, object]:
    """Metadata of a SentencePiece model: control tokens, bytes, letters, words of random scores."""
    rng = np.random.default_rng(3)
    letters = [*"abcdet", "▁"]
    words = {"".join(rng.choice(letters, n)) for n in rng.integers(2, 6, 200)} | {"the", "▁the"}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(letters)
    tokens += sorted(words)
    kinds += [1] * len(words)
    scores = np.zeros(len(tokens), np.float32)
    scores[259:] = -rng.permutation(len(tokens) - 259).astype(np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, "<turn>", "aa bb"],
        "tokenizer.ggml.token_type": np.array([*kinds, 3, 4], np.int32),
        "tokenizer.ggml.scores": np.append(scores, [0, 0]).astype(np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: merge the neighbors with the best joint token; ties go to the first."""
    parts = list(text)
    while True:
        best = None
        for n in range(len(parts) - 1):
            score = scores.get(parts[n] + parts[n + 1])
            if score is not None and (best is None or score > best[0]):
                best = score, n
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def by_hand(text: str, metadata: dict[str, object], prefix: bool) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    normal = {
        token: float(metadata["tokenizer.ggml.scores"][i])
        for token, i in ids.items()
        if metadata["tokenizer.ggml.token_type"][i] == 1
    }
    found: list[int] = []
    for part in re.split("(<turn>|aa bb|<s>|</s>|<unk>)", text):
        if part in ("<turn>", "aa bb", "<s>", "</s>", "<unk>"):
            found.append(ids[part])
        elif part:
            spelled = ("▁" if prefix else "") + part.replace(" ", "▁")
            for piece in merged(spelled, normal):
                whole = [ids[piece]] if piece in ids else None
                found += whole or [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


@pytest.mark.parametrize("name", ["phi3", "Phi 3 Mini 4k Instruct", "Phi 3.5 Mini", None])
def test_phi3_special_tokens_strip_space_for_any_model_name(name):
    """In Phi-3's tokenizer.json, special tokens except <unk>, <s>, <|endoftext|> have `rstrip`."""
    metadata = pieces() | {"general.architecture": "phi3"}
    metadata |= {} if name is None else {"general.name": name}
    tokenizer = tokenizer_of_metadata(metadata, "m.gguf")
    turn, space = tokenizer.encode("<turn>")[0], tokenizer.encode(" ")
    assert tokenizer.encode("<turn> \n<turn>").tolist() == [turn, turn]
    assert tokenizer.encode("<s> <turn>").tolist() == [1, *space, turn]
    other = tokenizer_of_metadata(metadata | {"general.architecture": "llama"}, "m.gguf")
    assert other.encode("<turn> <turn>").tolist() == [turn, *space, turn]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_token_pieces_are_merged_by_score(prefix):
    metadata = pieces() | {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = tokenizer_of_metadata(metadata, "m.gguf")
    rng = np.random.default_rng(0)
    parts = [*"aabbcdet ", "the", " the", "ab", "é", "🙂", "<turn>", "aa bb", "\n"]
    for _ in range(300):
        text = "".join(rng.choice(parts, rng.integers(1, 25)))
        ids = tokenizer.encode(text).tolist()
        assert ids == by_hand(text, metadata, prefix), text
        if "<turn>" not in text and "aa bb" not in text:
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a", special_tokens=True).tolist()[0] == 1  # add_bos defaults to true
    assert tokenizer.stop_ids == (2,)


def test_roles_templates_and_stop_ids_are_read_from_keys():
    _, metadata = byte_level("smollm")
    metadata |= {
        "tokenizer.chat_template": "usual", "tokenizer.chat_template.tool_use": "for tools",
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.fim_pre_token_id": 7,
    }  # fmt: skip
    tokenizer = tokenizer_of_metadata(metadata, "m.gguf")
    assert tokenizer.special_ids == {"bos": 0, "eos": 1, "pad": 0}
    assert dict(tokenizer.chat_templates) == {"default": "usual", "tool_use": "for tools"}
    assert tokenizer.frame == ((0,), (1,))
    assert tokenizer.stop_ids == (0, 1)  # both are end tokens by name
    with_eot = tokenizer_of_metadata(metadata | {"tokenizer.ggml.eot_token_id": 260}, "m.gguf")
    assert with_eot.stop_ids == (0, 1, 260)


def test_unused_tokens_have_no_text():
    _, metadata = byte_level("smollm")
    count = len(metadata["tokenizer.ggml.tokens"])
    padded = metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "[PAD]", "[PAD]"],
        "tokenizer.ggml.token_type": np.append(metadata["tokenizer.ggml.token_type"], [5, 5]),
    }
    tokenizer = tokenizer_of_metadata(padded, "m.gguf")
    assert tokenizer.vocab_size == count
    assert count not in tokenizer.encode("[PAD]").tolist()


def test_tokens_are_normal_if_their_types_are_missing():
    _, metadata = byte_level("smollm")
    typed = metadata | {
        "tokenizer.ggml.token_type": np.ones(len(metadata["tokenizer.ggml.tokens"]), np.int32)
    }
    untyped = {name: x for name, x in metadata.items() if name != "tokenizer.ggml.token_type"}
    found, wanted = (tokenizer_of_metadata(x, "m.gguf") for x in (untyped, typed))
    assert found == wanted


WRONG = {
    "model": ("bert", "tokenizer.ggml.model is 'bert': must be 'gpt2' or 'llama'"),
    "pre": ("qwen9", "tokenizer.ggml.pre is 'qwen9': must be one of gpt-2"),
    "tokens": (None, "tokenizer.ggml.tokens is missing: must be a list of strings"),
    "token_type": (np.ones(3, np.int32), r"token_type of 3: must be a list of \d+ numbers"),
    "merges": (["a b", "zz qq"], "entry 1, 'zz qq', must be two known tokens"),
    "bos_token_id": (9999, r"bos_token_id is 9999: must be an ID of the \d+ tokens"),
    "add_bos_token": (2, "add_bos_token is 2: must be true or false"),
    "add_space_prefix": (True, "add_space_prefix is True: must be false for 'gpt2'"),
    "normalizer": ("x", "'tokenizer.ggml.normalizer': unknown key"),
}


LISTS = {
    "model": ([1, 2], "model of 2: must be a string"),
    "pre": (["qwen2"], "tokenizer.ggml.pre of 1: must be one of gpt-2"),
    "add_bos_token": (np.array([True, False]), "add_bos_token of 2: must be true or false"),
    "eos_token_id": (np.array([1, 2]), r"eos_token_id of 2: must be an ID of the \d+ tokens"),
}


@pytest.mark.parametrize(("name", "wrong"), [*WRONG.items(), *LISTS.items()])
def test_error_names_invalid_key(name, wrong):
    _, metadata = byte_level("smollm")
    value, rule = wrong
    metadata[f"tokenizer.ggml.{name}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(DataError, match=rule) as error:
        tokenizer_of_metadata(metadata, "m.gguf")
    assert str(error.value).startswith("m.gguf: ") and "\n" not in str(error.value)


def test_invalid_gguf_tokenizer_metadata_is_rejected():
    _, metadata = byte_level("smollm")
    metadata["tokenizer.ggml.tokens"][9] = metadata["tokenizer.ggml.tokens"][8]
    with pytest.raises(DataError, match="has IDs 8 and 9"):
        tokenizer_of_metadata(metadata, "m.gguf")
    metadata = pieces()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(DataError, match="scores is missing: must be a list"):
        tokenizer_of_metadata(metadata, "m.gguf")
    metadata = pieces() | {"tokenizer.chat_template": 3}
    with pytest.raises(DataError, match=r"chat_template' is 3: must be a string"):
        tokenizer_of_metadata(metadata, "m.gguf")
