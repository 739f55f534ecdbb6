"""Contents of a row for each family of published models, written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from transformer_jax.config import ConfigError, Learned, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.config.presets import train_preset
from transformer_jax.config.tasks import ClassifyTask, MaskedTask, Seq2SeqTask
from transformer_jax.loading import TextModel, with_targets
from transformer_jax.models.factory import init_params
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.text.save import token_ids, tokenizer_files
from transformer_jax.tokenizers.languages import with_languages
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer, canonical
from transformer_jax.tokenizers.special import (
    SpecialTokens,
    frame,
    target_of,
    tokenizer_from_json,
)
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.initial import StartModel, start_params
from transformer_jax.training.tasks.classify import class_example
from transformer_jax.training.tasks.masked import fill_masks
from transformer_jax.training.tasks.pairs import Pair, pair_example
from transformer_jax.training.tasks.task import Tokenizers

pytestmark = pytest.mark.usefixtures("quick_compilation")

LANGUAGES = "en_XX", "ro_RO", "de_DE"
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "\u2581"]
PAD, BOS, EOS, UNK, MASK, SPACE = range(6)
A, B, C = 6, 7, 8
SIZES = dict(vocab_size=9, d_model=8, num_heads=1, num_layers=1, max_len=11)
CASES = {  # tokens around a text; config ids; source, inputs and labels of "ab" -> "ca"
    "t5": (
        "$A </s>", dict(decoder_start_token_id=PAD),
        [SPACE, A, B, EOS], [PAD, SPACE, C, A], [SPACE, C, A, EOS],
    ),
    "bart": (
        "<s> $A </s>", dict(decoder_start_token_id=EOS, forced_bos_token_id=BOS),
        [BOS, SPACE, A, B, EOS], [EOS, BOS, SPACE, C, A], [BOS, SPACE, C, A, EOS],
    ),
    "marian": (
        "$A </s>", dict(decoder_start_token_id=PAD, forced_eos_token_id=EOS),
        [SPACE, A, B, EOS], [PAD, SPACE, C, A], [SPACE, C, A, EOS],
    ),
    "a tokenizer that adds nothing": (
        None, dict(decoder_start_token_id=PAD),
        [SPACE, A, B], [PAD, SPACE, C, A], [SPACE, C, A, EOS],
    ),
    "a config without a start, whose texts begin with <s>": (
        "<s> $A </s>", dict(bos_token_id=BOS),
        [BOS, SPACE, A, B, EOS], [BOS, BOS, SPACE, C, A], [BOS, SPACE, C, A, EOS],
    ),
}  # fmt: skip


def tokenizer_of(
    around: str | None,
    letters: str | None = None,
    languages: tuple[str, ...] = (),
    **roles: str,
) -> PretrainedTokenizer:
    """Create a SentencePiece-like tokenizer or, with `letters`, a byte BPE of only these."""
    pieces = [(token, 0.0) for token in TOKENS] + [(letter, -1.0) for letter in "abc"]
    library = Tokenizer(models.Unigram(pieces, unk_id=UNK))
    if letters is not None:
        names = [*TOKENS, *letters]
        library = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Metaspace()
    library.add_special_tokens([*TOKENS[:5], *languages])
    ids = [(token, library.token_to_id(token)) for token in (*TOKENS[:5], *languages)]
    if around is not None:
        library.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    roles = roles or dict(bos="<s>", eos="</s>", pad="<pad>")
    return PretrainedTokenizer(canonical(json.loads(library.to_str())), tuple(roles.items()))


class Folder:
    """A published folder; only its config is read."""

    path = Path("model")
    where = "model/config.json"

    def __init__(self, config):
        self.config = config

    def read_json(self, name):
        return None


@pytest.mark.parametrize("case", CASES)
def test_text_pair_is_formatted_for_model_family(case):
    around, ids, source, reads, labels = CASES[case]
    model = ModelConfig(kind="encoder-decoder", **SIZES)
    tokenizer = with_targets(tokenizer_of(around), Folder(ids), model)
    config = TrainConfig(model=model, task=Seq2SeqTask())
    back = tokenizer_from_json(tokenizer.to_json())
    assert back == tokenizer
    example = pair_example(config, Tokenizers(back), Pair("ab", "ca", "line 1"))
    assert example.source.tolist() == source
    assert (example.tokens.tolist(), example.labels.tolist()) == (reads, labels)
    keys = token_ids(back, model.kind, model.vocab_size)
    fields = {"forced_bos_token_id": None, "forced_eos_token_id": None} | ids
    start = fields.pop("bos_token_id", None)
    assert (
        keys
        == dict(bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=start)
        | fields
    )
    with pytest.raises(ConfigError, match="decoder_start_token_id is missing"):
        with_targets(tokenizer_of(around), Folder({}), model)


TRANSLATORS = {  # around a text; the start; and for "ab" -> "ca": source, inputs, labels, stop
    "mbart": ("$A </s> en_XX", 10, ([SPACE, A, B, EOS, 11], [9, SPACE, C, A, EOS],
                                    [SPACE, C, A, EOS, 9])),
    "mbart-50, nllb": ("en_XX $A </s>", EOS, ([11, SPACE, A, B, EOS], [EOS, 9, SPACE, C, A],
                                              [9, SPACE, C, A, EOS])),
    "nllb as it first was": ("$A </s> en_XX", EOS, ([SPACE, A, B, EOS, 11], [EOS, SPACE, C, A, EOS],
                                                    [SPACE, C, A, EOS, 9])),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSLATORS)
def test_translation_rows_use_source_and_target_language_tokens(name):
    """Languages are ids 9 to 11; translates from de_DE (11) into en_XX (9)."""
    around, start, rows = TRANSLATORS[name]
    model = ModelConfig(kind="encoder-decoder", **SIZES | dict(vocab_size=12))
    ids = dict(decoder_start_token_id=start)
    before = with_targets(tokenizer_of(around, languages=LANGUAGES), Folder(ids), model)
    assert before.languages == {"<unk>": UNK, "<mask>": MASK, "en_XX": 9, "ro_RO": 10, "de_DE": 11}
    tokenizer = with_languages(before, "de_DE", "en_XX")
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    example = pair_example(
        TrainConfig(model=model, task=Seq2SeqTask()), Tokenizers(tokenizer), Pair("ab", "ca", "1")
    )
    found = example.source.tolist(), example.tokens.tolist(), example.labels.tolist()
    assert found == rows
    target = target_of(tokenizer)
    starts = start != EOS
    assert (target.start, target.forced_bos) == ((9, None) if starts else (EOS, 9))
    assert target.stop == (EOS,)
    for wrong in (("de", "en_XX"), ("de_DE", "</s>")):
        with pytest.raises(DataError, match=r"(source is 'de'|target is '</s>'): must be one of"):
            with_languages(before, *wrong)


def test_tokenizer_without_language_tokens_is_rejected():
    model = ModelConfig(kind="encoder-decoder", **SIZES | dict(vocab_size=12))
    folder = Folder(dict(decoder_start_token_id=EOS))
    for around in ("<s> $A </s>", "en_XX $A ro_RO", None):
        tokenizer = with_targets(tokenizer_of(around, languages=LANGUAGES), folder, model)
        with pytest.raises(DataError, match="does not add a language token"):
            with_languages(tokenizer, "en_XX", "ro_RO")


def test_decoder_only_model_has_no_language_tokens():
    text = TextModel(ModelConfig(**SIZES), {}, tokenizer_of("en_XX $A", languages=LANGUAGES))
    with pytest.raises(ConfigError, match="languages: plain is not a published encoder-decoder"):
        LanguageModel(text, "plain").with_languages("en_XX", "ro_RO")


def test_tokens_without_roles_are_not_treated_as_languages():
    """Otherwise, the end of a text could be taken for a language."""
    bare = replace(tokenizer_of("$A </s>"), roles=(), target_ids=(("decoder_start_token_id", PAD),))
    assert bare.languages == {} and target_of(bare).labels == ((), (EOS,))


def test_banned_tokens_are_saved_with_tokenizer():
    model = ModelConfig(kind="encoder-decoder", **SIZES)
    never = dict(bad_words_ids=[[PAD], [EOS], [A, B]], suppress_tokens=[C], eos_token_id=EOS)
    ids = dict(decoder_start_token_id=PAD) | never
    tokenizer = with_targets(tokenizer_of("$A </s>"), Folder(ids), model)
    assert tokenizer.banned == ((PAD,), (A, B), (C,))
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    for wrong, rule in (
        ([[]], "banned contains"),
        ([["a"]], "banned contains"),
        ([A], "fields are missing, unknown or"),
    ):
        content = json.loads(tokenizer.to_json()) | {"banned": wrong}
        with pytest.raises(ValueError, match=rule):
            tokenizer_from_json(json.dumps(content))


def test_converted_run_preserves_added_tokens():
    model = ModelConfig(kind="encoder-decoder", **SIZES)
    tokenizer = SpecialTokens(CharTokenizer("abc"), ("bos", "eos"))
    config = TrainConfig(model=model, task=Seq2SeqTask())
    example = pair_example(config, Tokenizers(tokenizer), Pair("ab", "ca", "line 1"))
    assert example.source.tolist() == [0, 1]
    assert example.tokens.tolist() == [3, 2, 0] and example.labels.tolist() == [2, 0, 4]
    assert token_ids(tokenizer, model.kind, model.vocab_size) == dict(
        bos_token_id=3, pad_token_id=None, eos_token_id=4, decoder_start_token_id=3,
        forced_bos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    files, _ = tokenizer_files(tokenizer, 5)
    library = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert library.encode("cab").ids == [2, 0, 1]
    assert [library.token_to_id(f"<{name}>") for name in ("bos", "eos", "unk")] == [3, 4, 5]
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<bos>", "<eos>")


@pytest.mark.parametrize(
    ("around", "roles", "row"),
    [
        ("<s> $A </s>", dict(cls="<s>", sep="</s>"), [BOS, SPACE, A, B, EOS]),
        ("<s> $A", dict(cls="<s>"), [BOS, SPACE, A, B]),
        ("<s> $A </s>", dict(unk="<unk>"), [BOS, SPACE, A, B, EOS]),
        (None, dict(cls="<mask>", sep="</s>"), [MASK, SPACE, A, B]),
    ],
)
def test_encoder_input_is_framed_by_special_tokens(around, roles, row):
    model = ModelConfig(kind="encoder", num_classes=2, **SIZES)
    config = TrainConfig(model=model, task=ClassifyTask(labels=("x", "y")))
    pair = Pair("y", "ab", "line 1")
    example = class_example(config, Tokenizers(tokenizer_of(around, **roles)), pair)
    assert example.tokens.tolist() == row and example.labels == 1
    short = replace(config, context=len(row) - 1)
    with pytest.raises(
        ValueError, match=f"line 1: it has {len(row)} tokens, but a sequence has at most"
    ):
        class_example(short, Tokenizers(tokenizer_of(around, **roles)), pair)


def test_unknown_token_error_names_line():
    model = ModelConfig(kind="encoder", num_classes=2, **SIZES | {"vocab_size": B})
    config = TrainConfig(model=model, task=ClassifyTask(labels=("x", "y")))
    tokenizers = Tokenizers(tokenizer_of("<s> $A </s>", cls="<s>", sep="</s>", mask="<mask>"))
    assert len(class_example(config, tokenizers, Pair("y", "aa", "line 1")).tokens) == 5
    with pytest.raises(
        ValueError, match=rf"line 1: it has token {B}, 'b', but the model has only {B} tokens"
    ):
        class_example(config, tokenizers, Pair("y", "ab", "line 1"))
    with pytest.raises(
        ValueError, match=rf"prompt is 'b<mask>': it has token {B}, 'b', but the model"
    ):
        fill_masks(config, tokenizers, {}, "b<mask>")


@pytest.mark.parametrize(
    ("around", "row"),
    [(None, [MASK, SPACE, A]), ("$A </s>", [MASK, SPACE, A, EOS]), ("<s> $A", [BOS, SPACE, A])],
)
def test_converted_classifier_accepts_training_rows(around, row):
    model = ModelConfig(kind="encoder", num_classes=2, **SIZES)
    config = TrainConfig(model=model, task=ClassifyTask(labels=("x", "y")))
    tokenizer = tokenizer_of(around, cls="<mask>", sep="</s>")
    assert class_example(config, Tokenizers(tokenizer), Pair("y", "a", "1")).tokens.tolist() == row
    files, _ = tokenizer_files(tokenizer, 9, classifies=True)
    library = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert library.encode("a").ids == row


@pytest.mark.slow
@pytest.mark.parametrize("form", ["LABEL_{}", "{}"])
def test_head_without_class_names_numbers_classes_in_order(form):
    labels = tuple(sorted(form.format(i) for i in range(11)))  # 10 before 2
    model = ModelConfig(kind="encoder", num_classes=11, **SIZES)
    config = TrainConfig(model=model, task=ClassifyTask(labels=labels))
    loaded = init_params(model, jax.random.key(0))
    loaded["classifier"]["bias"] = np.arange(11.0)
    start = StartModel(model, Tokenizers(tokenizer_of(None)), lambda scanned: loaded)
    params, changes = start_params(config, start, loaded, jax.random.key(1))
    assert changes == []
    assert params["classifier"]["bias"].tolist() == [int(label.split("_")[-1]) for label in labels]


def test_special_tokens_frame_any_text():
    assert frame(tokenizer_of("<s> <s> $A <mask> </s>")) == ((BOS, BOS), (MASK, EOS))
    assert frame(tokenizer_of(None)) == ((), ()) == frame(CharTokenizer("ab"))
    for letters in ("abc", "CGT"):  # including texts without "a"
        tokenizer = tokenizer_of("<s> $A <mask> </s>", letters)
        assert frame(tokenizer) == ((BOS,), (MASK, EOS)), letters
    target = target_of(replace(tokenizer_of(None), target_ids=(("decoder_start_token_id", 0),)))
    assert target.stop == (EOS,) and target.labels == ((), (EOS,))


def test_heads_unused_by_task_are_dropped():
    classes = train_preset("bert-base", task=ClassifyTask()).model
    assert not classes.masked_token_head and not classes.logit_bias
    bert = replace(classes, num_classes=2, masked_token_head=True, logit_bias=True)
    assert fine_tuning(bert, "x", ClassifyTask()).model == replace(classes, num_classes=2)
    hidden = fine_tuning(replace(classes, pooler="tanh"), "x", MaskedTask()).model
    assert hidden.masked_token_head and hidden.logit_bias and hidden.num_classes is None
    distil = replace(classes, type_vocab_size=None)
    assert fine_tuning(distil, "x", ClassifyTask()).model.pooling == "relu"
    mpnet = replace(distil, positions=Learned(offset=2, buckets=32))
    assert fine_tuning(mpnet, "x", ClassifyTask()).model.pooling is None  # tanh, with classes
    found = fine_tuning(replace(classes, embedding_dim=16), "x", ClassifyTask()).model
    assert found.pooler == "gelu"
    replaced = replace(found, num_classes=1, classes_of="token", pooler_reads="each")
    assert fine_tuning(replaced, "x", ClassifyTask()).model == found
    hidden = fine_tuning(replaced, "x", MaskedTask()).model
    assert hidden.pooler is None and hidden.masked_token_head and hidden.num_classes is None
    modern = ModelConfig(kind="encoder", first_norm=False, masked_token_head=True, **SIZES)
    found = fine_tuning(modern, "x", ClassifyTask()).model
    assert found.pooler == "transform" and not found.masked_token_head
    back = fine_tuning(replace(found, num_classes=2), "x", MaskedTask()).model
    assert back == replace(modern, logit_bias=True)
    plain = ModelConfig(kind="encoder", **SIZES)
    assert fine_tuning(plain, "x", ClassifyTask()).model == plain
