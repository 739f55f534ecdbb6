"""Tokenizers of every family compared with `transformers`: folder files and classes."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from tests.support.published_folders import (
    OPTIONS,
    USUAL,
    Layout,
    NotReadByTransformers,
    differences,
    folder_of,
)
from tests.support.published_text import transformers
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.tokenizers.classes import CLASSES, OF_MODEL_TYPE
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import ROLES
from transformer_jax.tokenizers.special import target_of

pytestmark = pytest.mark.slow

SENTENCEPIECE = {"m2m_100": "M2M100", "marian": "Marian"}
"""Families whose class in transformers requires the package sentencepiece."""


@pytest.mark.parametrize("name", CLASSES)
def test_tokenizer_class_defaults_match_transformers(name):
    if name in SENTENCEPIECE.values():
        pytest.importorskip("sentencepiece")
    kind = getattr(transformers, f"{name}Tokenizer")
    arguments = dict(inspect.signature(kind.__init__).parameters)
    if "vocab" not in arguments:  # DistilBert's class passes them on
        arguments = dict(inspect.signature(kind.__mro__[1].__init__).parameters) | arguments
    defaults = {
        role: arguments[f"{role}_token"].default for role in ROLES if f"{role}_token" in arguments
    }
    named = {role: str(token) for role, token in defaults.items() if token is not None}
    assert CLASSES[name].roles == named
    usual = {"src_lang": {"MBart": "en_XX", "MBart50": "en_XX", "Nllb": "eng_Latn"}.get(name)}
    usual["add_prefix_space"] = {"Qwen2": False, "Qwen3_5": False, "Llama": True}.get(name)
    for option, value in CLASSES[name].options.items():
        default = arguments[option].default
        default = usual.get(option) if default is None else default
        if (name, option) != ("CodeLlama", "add_prefix_space"):  # its file specifies this
            assert value == default, option


def test_model_types_map_to_transformers_classes():
    from transformers.models.auto import tokenization_auto as auto

    unregistered = {kind for kind, name in OF_MODEL_TYPE.items() if not name}
    for kind in FAMILIES:
        name = auto.TOKENIZER_MAPPING_NAMES.get(kind)
        assert (kind in unregistered) == (name is None and kind not in SENTENCEPIECE), kind
        if name == "TokenizersBackend" or name is None:
            want = SENTENCEPIECE.get(kind, name or "")
        else:
            want = name.removesuffix("Tokenizer")
        assert OF_MODEL_TYPE[kind] == want, kind


def layouts(model_type: str, kind: str) -> dict[str, Layout]:
    """Return the layouts of folders on the hub."""
    roles = dict(CLASSES[kind].roles)
    needed = f"{kind}Tokenizer" if kind in ("MBart50", "Nllb") else None
    base = dict(model_type=model_type, kind=kind, named=needed)
    options = {name: values[-1] for name, values in OPTIONS.get(kind, {}).items()}
    found = {
        "tokenizer.json alone": Layout(**base),
        "with its class": Layout(**base | dict(named=f"{kind}TokenizerFast"), roles=roles),
        "with a class without roles": Layout(**base | dict(named="PreTrainedTokenizerFast")),
        "with special_tokens_map.json": Layout(**base, mapped=roles),
        "with added_tokens_decoder": Layout(**base, decoder=True),
        "with options": Layout(**base, options=options | dict(add_bos_token=True)),
        "with options of the other kind": Layout(**base, built=options, listed=False),
        "without tokens around a text": Layout(**base, framed=False),
    }
    if CLASSES[kind].built_from is not None and OF_MODEL_TYPE[model_type] in CLASSES:
        found["in files of the vocabulary"] = Layout(**base, whole=False)
        found["in files, with a map"] = Layout(**base, whole=False, mapped=roles, options=options)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_token_ids_and_roles_match_transformers(model_type, tmp_path):
    kinds = ["MBart", "MBart50"] if model_type == "mbart" else [USUAL[model_type]]
    compared = 0
    for kind in kinds:
        for name, layout in layouts(model_type, kind).items():
            folder = folder_of(layout, tmp_path / kind / name)
            try:
                assert not differences(folder), name
                compared += 1
            except NotReadByTransformers:
                assert model_type in SENTENCEPIECE, name
    assert compared > 1


@pytest.mark.parametrize("framed", [False, True])
def test_barthez_template_is_loaded_from_file(framed, tmp_path):
    layout = Layout("mbart", "XLMRoberta", "BarthezTokenizer", framed=framed)
    assert not differences(folder_of(layout, tmp_path / "barthez"))


@pytest.mark.parametrize("legacy", [None, False, True])
def test_nllb_language_token_position_depends_on_tokenizer_class(legacy, tmp_path):
    """The published tokenizer.json appends </s> and the language to a source."""
    options = {} if legacy is None else dict(legacy_behaviour=legacy)
    layout = Layout("m2m_100", "Nllb", "NllbTokenizer", options, built=dict(legacy_behaviour=True))
    folder = folder_of(layout, tmp_path / "nllb")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    pair = theirs.src_lang, theirs.tgt_lang = "ron_Latn", "fra_Latn"
    targets = dict(decoder_start_token_id=2)
    found = replace(load_tokenizer_folder(folder), target_ids=tuple(targets.items()))
    found = with_languages(found, *pair)
    for text in ("", "a the"):
        assert found.encode(text, special_tokens=True).tolist() == theirs(text).input_ids
        ids = found.encode(text, special_tokens=False)
        labels = target_of(found).labels.around(ids).tolist()
        assert labels == theirs(text_target=text).input_ids
