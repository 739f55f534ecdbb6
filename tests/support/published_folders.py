"""Tokenizer folders of every family as on the hub, with and without class-specific files.

`folder_of` writes the files of a `Layout`; `differences` compares our reading with `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.published_text import (
    ANGLES,
    byte_letters,
    sentence_pieces,
    transformers,
    word_pieces,
)
from transformer_jax import load_tokenizer_folder
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.tokenizers.pretrained import ROLES

END = "<|endoftext|>"
COHERE = "<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "a"), ("\u0120", "the"), ("1", "2")]
LANGUAGES = {
    "MBart": ("en_XX", "ro_RO", "de_DE"),
    "MBart50": ("en_XX", "ro_RO", "xh_ZA"),
    "Nllb": ("eng_Latn", "fra_Latn", "ron_Latn"),
}
TEXTS = (
    "", "the a", " the  a", "R\u00e9sum\u00e9 THE 12 a.", "a\nthe\u4e2dA \u00e9", "''a'' ``b``",
)  # fmt: skip


def joined_bytes(*before: str) -> dict[str, Any]:
    vocabulary = byte_letters(*before)
    for one, two in MERGES:
        vocabulary.setdefault(one + two, len(vocabulary))
    return dict(vocab=vocabulary, merges=MERGES)


def joined_pieces(*before: str) -> dict[str, Any]:
    """Return a BPE vocabulary of SentencePiece: bytes, letters, the space mark, a few merges."""
    letters = [*"abcdefghijklmnopqrstuvwxyzABCRT0123456789.", "\u2581", "\u00e9"]
    tokens = [*before, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "a"), ("\u2581", "the")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for one, two in merges:
        vocabulary.setdefault(one + two, len(vocabulary))
    return dict(vocab=vocabulary, merges=merges)


def words(*before: str) -> dict[str, Any]:
    kept = [token for token in word_pieces() if not token.startswith("[") or token == "[UNK]"]
    cased = ["A", "R", "T", "THE", "the", "##e", "R\u00e9sum\u00e9", "r\u00e9sum\u00e9", "resume"]
    tokens = dict.fromkeys([*before, *kept, *cased, "\u4e2d", "##\u4e2d"])
    return dict(vocab={token: i for i, token in enumerate(tokens)})


def pieces(*before: str, languages: str = "") -> dict[str, Any]:
    found = [*sentence_pieces(*before), ("R", -3.0), ("A", -3.0), ("\u00e9", -3.0)]
    return dict(vocab=[*found, *((name, 0.0) for name in LANGUAGES.get(languages, ()))])


VOCABULARIES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "Bert": lambda: words("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "MPNet": lambda: words(*ANGLES),
    "GPT2": lambda: joined_bytes(END),
    "Roberta": lambda: joined_bytes(*ANGLES),
    "Qwen2": lambda: joined_bytes(END, "<|im_end|>"),
    "GPTNeoX": lambda: joined_bytes(END, "<|padding|>"),
    "Cohere": lambda: joined_bytes(*COHERE),
    "XLMRoberta": lambda: pieces(*ANGLES),
    "Camembert": lambda: pieces("<s>NOTUSED", *ANGLES),
    "Albert": lambda: pieces("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
    "T5": lambda: pieces("<pad>", "</s>", "<unk>", "<extra_id_0>"),
    "Pegasus": lambda: pieces("<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk>"),
    "MBart": lambda: pieces(*ANGLES, languages="MBart"),
    "MBart50": lambda: pieces(*ANGLES, languages="MBart50"),
    "Nllb": lambda: joined_pieces(*ANGLES, *LANGUAGES["Nllb"]),
    "Llama": lambda: joined_pieces("<unk>", "<s>", "</s>"),
    "Gemma": lambda: joined_pieces("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
}
"""The vocabulary of each class; the class itself writes its tokenizer.json."""

SPACE: Mapping[str, tuple[Any, ...]] = dict(add_prefix_space=(True, False))
CASE: Mapping[str, tuple[Any, ...]] = dict(
    do_lower_case=(True, False), strip_accents=(None, True, False),
    tokenize_chinese_chars=(True, False),
)  # fmt: skip
OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    **{kind: CASE for kind in ("Bert", "MPNet")},
    **{kind: SPACE for kind in ("GPT2", "Roberta", "Qwen2", "GPTNeoX", "Cohere")},
    **{kind: SPACE for kind in ("XLMRoberta", "Camembert")},
    "Llama": dict(add_prefix_space=(None, True, False)),
    "Albert": dict(
        add_prefix_space=(True, False), do_lower_case=(True, False), keep_accents=(True, False)
    ),
    "MBart": dict(src_lang=LANGUAGES["MBart"], tgt_lang=LANGUAGES["MBart"]),
    "MBart50": dict(src_lang=LANGUAGES["MBart50"]),
    "Nllb": dict(src_lang=LANGUAGES["Nllb"], legacy_behaviour=(True, False)),
}  # fmt: skip
"""Keys of tokenizer_config.json that affect each class, and the values to try."""

USUAL = {
    "gpt2": "GPT2", "gptj": "GPT2", "phi": "GPT2", "starcoder2": "GPT2", "opt": "GPT2",
    **dict.fromkeys("qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text".split(), "Qwen2"),
    "gpt_neox": "GPTNeoX", "olmoe": "GPTNeoX", "cohere": "Cohere", "cohere2": "Cohere",
    "gemma": "Gemma", "gemma2": "Gemma", "gemma3_text": "Gemma", "bert": "Bert",
    "distilbert": "Bert", "electra": "Bert", "nomic_bert": "Bert", "roberta": "Roberta",
    "bart": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "mpnet": "MPNet",
    "albert": "Albert", "t5": "T5", "mt5": "T5", "mbart": "MBart", "pegasus": "Pegasus",
    "m2m_100": "Nllb", "modernbert": "Bert", "marian": "T5",
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), "Llama"),
    **dict.fromkeys(("granite", "smollm3", "bloom", "falcon", "gpt_oss", "stablelm"), "GPT2"),
    **dict.fromkeys("olmo2 olmo3 glm glm4 seed_oss exaone4 arcee".split(), "GPT2"),
    **dict.fromkeys(("hunyuan_v1_dense", "apertus"), "GPT2"),
    **dict.fromkeys(("olmo_hybrid", "kimi_linear", "lfm2"), "GPT2"),
    **dict.fromkeys(("ernie4_5", "helium", "nemotron", "persimmon"), "Llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "Llama"),
}  # fmt: skip
"""Map each family to a class whose files its folders may contain."""
assert USUAL.keys() == FAMILIES.keys()


class NotReadByTransformers(Exception):
    """Error for a folder that `transformers` cannot read, or only with another package."""


@dataclass(frozen=True)
class Layout:
    """Complete content of a tokenizer folder."""

    model_type: str
    kind: str
    """The class that writes the files."""
    named: str | None = None
    """`tokenizer_class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of tokenizer_config.json."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """Options of the class when it wrote tokenizer.json."""
    roles: Mapping[str, str | None] = field(default_factory=dict)
    """Roles that tokenizer_config.json names."""
    mapped: Mapping[str, str] = field(default_factory=dict)
    """Roles that special_tokens_map.json names."""
    decoder: bool = False
    """Whether tokenizer_config.json has `added_tokens_decoder`."""
    whole: bool = True
    """Whether the vocabulary is in tokenizer.json, not in separate files."""
    framed: bool = True
    """Whether tokenizer.json adds tokens around a text."""
    listed: bool = True
    """Whether tokenizer.json lists its special tokens outside the vocabulary, too."""
    model_names_it: bool = False
    """Whether `tokenizer_class` is in config.json instead of tokenizer_config.json."""


def folder_of(layout: Layout, folder: Path) -> Path:
    vocabulary = VOCABULARIES[layout.kind]()
    folder.mkdir(parents=True)
    tokenizer = getattr(transformers, f"{layout.kind}Tokenizer")(**vocabulary, **layout.built)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if not layout.framed:
        content["post_processor"] = None
    config = {f"{role}_token": token for role, token in layout.roles.items()}
    config |= dict(layout.options)
    model = {"model_type": layout.model_type}
    if layout.named:
        (model if layout.model_names_it else config)["tokenizer_class"] = layout.named
    (folder / "config.json").write_text(json.dumps(model))
    if layout.decoder:
        tokens = [dict(token) for token in content["added_tokens"]]
        config["added_tokens_decoder"] = {str(token.pop("id")): token for token in tokens}
    if not layout.listed:
        content["added_tokens"] = []
    if layout.whole:
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif "merges" in vocabulary:
        (folder / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
        lines = [" ".join(pair) for pair in vocabulary["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    else:
        (folder / "vocab.txt").write_text("\n".join(vocabulary["vocab"]) + "\n")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if layout.mapped:
        mapped: dict[str, Any] = {f"{role}_token": t for role, t in layout.mapped.items()}
        if "mask" in layout.mapped:  # as transformers 4 saves it
            flags = dict(lstrip=True, rstrip=False, normalized=False, single_word=False)
            mapped["mask_token"] = flags | dict(content=layout.mapped["mask"])
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    return folder


def differences(folder: Path, texts: tuple[str, ...] = TEXTS) -> list[str]:
    """Return the differences of ids and roles from those of `transformers`.

    A mask role that comes only from an added token [MASK] or <mask> is not a difference.
    """
    ours = load_tokenizer_folder(folder)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    except (ValueError, ImportError) as error:
        raise NotReadByTransformers(str(error).split("\n")[0][:80]) from None
    found = []
    for role in ROLES:
        token = getattr(theirs, f"{role}_token")
        want = None if token is None else theirs.convert_tokens_to_ids(token)
        got = ours.special_ids.get(role)
        added = role == "mask" and dict(ours.roles).get("mask") in ("[MASK]", "<mask>")
        if got != want and not (added and want is None):
            found.append(f"{role} is {got}, in transformers {want} ({token})")
    # A class may add tokens after the vocabulary, which are not tokens of the model.
    special = [i for i in theirs.all_special_ids if i < ours.vocab_size]
    special = theirs.convert_ids_to_tokens(sorted(special))
    for text in (*texts, *(f"the {token} a" for token in special[:9])):
        got, want = ours.encode(text, special_tokens=True).tolist(), theirs(text).input_ids
        if got != want:
            found.append(f"{text!r} is {got}, in transformers {want}")
    return found
