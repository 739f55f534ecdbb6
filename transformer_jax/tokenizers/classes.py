"""Tokenizer classes of published models, with defaults that model folders do not contain.

A class assigns roles to tokens, applies some keys from tokenizer_config.json, and adds tokens
around the text. The classes are those in transformers 5, without the suffixes "Tokenizer" and
"Fast".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from transformer_jax.untrusted_files import Json, JsonObject, shown

Frame: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Roles of the tokens before and after the text; "lang" is the language set by `src_lang`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """Defaults that a tokenizer class adds to the files in a folder."""

    roles: Mapping[str, str] = field(default_factory=dict)
    """Default token for each role. The folder can specify a different token."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """Keys in tokenizer_config.json that override tokenizer.json, with their default values. If
    `add_prefix_space` is None, tokenizer.json is not changed."""
    frame: Frame | None = None
    """Tokens that the class adds around the text. If None, they are determined by the file or by
    `add_bos_token` and `add_eos_token`."""
    special: str | None = None
    """Pattern for additional special tokens in the vocabulary."""
    mask_strips: bool = False
    """Whether a mask token strips the space before it if no file lists the token."""
    built_from: Literal["bytes", "words"] | None = None
    """Files of the tokenizer: vocab.json and merges.txt ("bytes"), or vocab.txt
    ("words")."""


_BERT = dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_ANGLES = dict(bos="<s>", eos="</s>", unk="<unk>", sep="</s>", pad="<pad>", cls="<s>")
_MASKED = _ANGLES | dict(mask="<mask>")
_END_OF_TEXT = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
_CASE: dict[str, Json] = dict(do_lower_case=True, strip_accents=None, tokenize_chinese_chars=True)
_NO_SPACE: dict[str, Json] = dict(add_prefix_space=False)
_SPACE: dict[str, Json] = dict(add_prefix_space=True)

_WORDS = TokenizerClass(roles=_BERT, options=_CASE, frame=(("cls",), ("sep",)), built_from="words")
_BYTES = TokenizerClass(roles=_END_OF_TEXT, options=_NO_SPACE, built_from="bytes")
_WRAPPED = replace(_BYTES, roles=_MASKED, frame=(("cls",), ("sep",)))
_PIECES = TokenizerClass(roles=_MASKED, options=_SPACE, frame=(("bos",), ("eos",)))
_LANGUAGES = r"[a-z]{2}_[A-Z]{2}"
_LLAMA = TokenizerClass(
    roles=dict(bos="<s>", eos="</s>", unk="<unk>"), options=dict(add_prefix_space=True)
)

FILE = TokenizerClass()
"""Tokenizer class without defaults, such as PreTrainedTokenizerFast or TokenizersBackend."""

CLASSES: Mapping[str, TokenizerClass] = {
    **dict.fromkeys(("Bert", "DistilBert", "Electra"), _WORDS),
    "MPNet": replace(_WORDS, roles=_MASKED | dict(unk="[UNK]"), mask_strips=True),
    **dict.fromkeys(("GPT2", "CodeGen"), _BYTES),
    **dict.fromkeys(("Roberta", "Bart", "Longformer", "LED"), _WRAPPED),
    **dict.fromkeys(
        ("Qwen2", "Qwen3_5"),
        TokenizerClass(
            roles=dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>"), options=_NO_SPACE
        ),
    ),
    "GPTNeoX": TokenizerClass(roles=_END_OF_TEXT | dict(pad="<|padding|>"), options=_NO_SPACE),
    "Cohere": TokenizerClass(
        roles=dict(
            bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", unk="<UNK>", sep="<SEP>", pad="<PAD>",
            cls="<CLS>", mask="<MASK_TOKEN>",
        ),
        options=_NO_SPACE,
    ),
    "XLMRoberta": _PIECES,
    "Barthez": replace(_PIECES, frame=None, mask_strips=True),
    "Camembert": replace(_PIECES, special=r"(<s>|</s>|<unk>)NOTUSED", mask_strips=True),
    "Albert": TokenizerClass(
        roles=dict(
            bos="[CLS]", eos="[SEP]", unk="<unk>", sep="[SEP]", pad="<pad>", cls="[CLS]",
            mask="[MASK]",
        ),
        options=_SPACE | dict(do_lower_case=True, keep_accents=False), frame=(("cls",), ("sep",)),
    ),
    "T5": TokenizerClass(
        roles=dict(eos="</s>", unk="<unk>", pad="<pad>"), frame=((), ("eos",)),
        special=r"<extra_id_\d+>",
    ),
    "Pegasus": TokenizerClass(
        roles=dict(eos="</s>", unk="<unk>", pad="<pad>", mask="<mask_2>"), frame=((), ("eos",)),
        special=r"<mask_1>|<unk_\d+>",
    ),
    "Marian": TokenizerClass(roles=dict(eos="</s>", unk="<unk>", pad="<pad>")),
    "MBart": TokenizerClass(
        roles=_MASKED, options=dict(src_lang="en_XX"), frame=((), ("eos", "lang")),
        special=_LANGUAGES, mask_strips=True,
    ),
    "MBart50": TokenizerClass(
        roles={role: token for role, token in _MASKED.items() if role != "bos"},
        options=dict(src_lang="en_XX"), frame=(("lang",), ("eos",)), special=_LANGUAGES,
        mask_strips=True,
    ),
    "Nllb": TokenizerClass(
        roles=_MASKED, options=dict(src_lang="eng_Latn", legacy_behaviour=False),
        frame=(("lang",), ("eos",)), special=r"[a-z]{3}_[A-Z][a-z]{3}", mask_strips=True,
    ),
    "M2M100": TokenizerClass(
        roles={role: token for role, token in _ANGLES.items() if role != "cls"},
        options=dict(src_lang="en"), frame=(("lang",), ("eos",)), special=r"__[a-z]{2,3}__",
    ),
    "Llama": _LLAMA,
    "CodeLlama": _LLAMA,
    "Gemma": TokenizerClass(
        roles=dict(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>")
    ),
}  # fmt: skip
"""Tokenizer classes that add defaults to their files."""

OF_MODEL_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "gptj", "phi", "starcoder2", "opt"), "GPT2"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next"), "Qwen2"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "Qwen3_5"),
    **dict.fromkeys(("gpt_neox", "olmoe"), "GPTNeoX"),
    **dict.fromkeys(("cohere", "cohere2"), "Cohere"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3"), "Gemma"),
    **dict.fromkeys(("bert", "distilbert", "electra", "nomic_bert"), "Bert"),
    **dict.fromkeys(("roberta", "bart"), "Roberta"),
    **dict.fromkeys(("t5", "mt5"), "T5"),
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "mpnet": "MPNet",
    "albert": "Albert",
    "mbart": "MBart",
    "pegasus": "Pegasus",
    "m2m_100": "M2M100",
    "marian": "Marian",
    **dict.fromkeys(
        "mistral mixtral phi3 granite stablelm olmo2 olmo3 modernbert glm glm4 ernie4_5 "
        "nemotron persimmon olmo_hybrid kimi_linear".split(),
        "TokenizersBackend",
    ),
    **dict.fromkeys(
        "llama smollm3 bloom falcon gpt_oss seed_oss helium exaone4 arcee hunyuan_v1_dense "
        "apertus deepseek_v2 deepseek_v3 lfm2".split(),
        "",
    ),
}
"""Tokenizer class for each `model_type`. An empty string means `FILE`, unless the folder names
another class."""

_IGNORE_NAMED = frozenset({"qwen2", "qwen3_5"})
"""Models for which the tokenizer class that the folder names is ignored."""


def class_name(config: JsonObject, model: JsonObject) -> tuple[str, str]:
    """Return the name of a folder's tokenizer class, and the key and value that specify it.

    The key and value are empty strings if nothing specifies the class.

    `config` is the content of tokenizer_config.json, and `model` is the content of config.json.
    """
    kind = model.get("model_type")
    default = OF_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if isinstance(named, str) and kind not in _IGNORE_NAMED and default != "TokenizersBackend":
        name = named.removesuffix("Fast").removesuffix("Tokenizer")
        return name, f"tokenizer_class is {shown(named)}"
    return ("", "") if default is None else (default, f"model_type is {shown(kind)}")


def apply_options(definition: JsonObject, options: Mapping[str, Json]) -> JsonObject:
    """Return the library's JSON with the options of a class applied."""
    space = options.get("add_prefix_space")
    lower, cased = options.get("do_lower_case"), ("NFKD", "StripAccents", "Lowercase")

    def kind(part: Json) -> Json:
        return part.get("type") if isinstance(part, dict) else None

    def steps(part: Json) -> Json:
        if not isinstance(part, dict):
            return part
        for below in ("pretokenizers", "decoders", "normalizers"):
            if isinstance(inner := part.get(below), list):
                pairs = [(step, steps(step)) for step in inner]
                part = part | {below: [new for old, new in pairs if new is not None or old is None]}
        parts = part.get("normalizers")
        match kind(part):
            case "BertNormalizer" if "tokenize_chinese_chars" in options:
                return part | dict(
                    lowercase=lower, strip_accents=options["strip_accents"],
                    handle_chinese_chars=options["tokenize_chinese_chars"],
                )  # fmt: skip
            case "Sequence" if "keep_accents" in options and isinstance(parts, list):
                rest = [step for step in parts if kind(step) not in cased]
                names = [] if options["keep_accents"] else ["NFKD", "StripAccents"]
                names += ["Lowercase"] if lower else []
                added: list[Json] = [{"type": name} for name in names]
                # As in the converter of transformers, quotation marks are replaced before accents
                # are removed.
                quotes = sum(kind(step) == "Replace" for step in rest[:2])
                return part | {"normalizers": rest[:quotes] + added + rest[quotes:]}
            case "ByteLevel" if space is not None:
                return part | {"add_prefix_space": space}
            case "Metaspace" if space is not None:
                scheme = "always" if space else "never"
                other = {name: value for name, value in part.items() if name != "add_prefix_space"}
                return other | {"prepend_scheme": scheme}
            case "Prepend" if space is False:
                return None
            case "Strip" if space is False and "content" in part:  # this decoder belongs to Prepend
                return None
        return part

    places = "normalizer", "pre_tokenizer", "decoder"
    return definition | {place: steps(definition.get(place)) for place in places}
