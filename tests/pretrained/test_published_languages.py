"""Languages of mBART, mBART-50, and NLLB compared with `transformers`: rows, texts, command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.published import randomised, torch, transformers
from tests.support.published_text import SIZES, saved, sentence_pieces
from transformer_jax import load
from transformer_jax.cli.generate import main as generate
from transformer_jax.tokenizers.special import source_frame, target_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]

PIECES = sentence_pieces("<s>", "<pad>", "</s>", "<unk>")
NEW = 9


def mbart(name: str, folder: Path, **ids: Any) -> Path:
    tokenizer = getattr(transformers, name)(vocab=PIECES, src_lang="en_XX", tgt_lang="de_DE")
    sizes = dict(vocab_size=len(tokenizer), **SIZES, **ids)
    kind = transformers.MBartForConditionalGeneration
    return saved(folder, randomised(kind(transformers.MBartConfig(**sizes)), 3), tokenizer)


def nllb(folder: Path) -> Path:
    names = {token: i for i, (token, _) in enumerate(PIECES)}
    tokenizer = transformers.NllbTokenizer(
        vocab=names, merges=[], src_lang="eng_Latn", tgt_lang="deu_Latn"
    )
    sizes = dict(vocab_size=len(tokenizer), **SIZES)
    kind = transformers.M2M100ForConditionalGeneration
    model = randomised(kind(transformers.M2M100Config(**sizes)), 4)
    with torch.no_grad():  # so that letters dominate
        model.model.shared.weight[:4] *= 0.3
        model.model.shared.weight[len(PIECES) :] *= 0.3
    return saved(folder, model, tokenizer)


FAMILIES: dict[str, tuple[Any, tuple[str, str]]] = {
    "mbart": (lambda folder: mbart("MBartTokenizer", folder, decoder_start_token_id=101),
        ("fr_XX", "ro_RO")),
    "mbart-50": (lambda folder: mbart("MBart50Tokenizer", folder, decoder_start_token_id=2),
        ("fr_XX", "ro_RO")),
    "nllb": (nllb, ("fra_Latn", "ron_Latn")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_translation_uses_the_requested_language(name, tmp_path, capsys):
    make, pair = FAMILIES[name]
    folder = make(tmp_path / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.src_lang, tokenizer.tgt_lang) != pair
    tokenizer.src_lang, tokenizer.tgt_lang = pair
    first = load(folder)
    model = first.with_languages(*pair)
    assert model.params is first.params
    ids, target = tokenizer.convert_tokens_to_ids(pair[1]), target_of(model.tokenizer)
    source = model.tokenizer.encode("hello", special_tokens=True)
    assert tokenizer("hello").input_ids == source.tolist()
    text = model.tokenizer.encode("ab", special_tokens=False)
    assert tokenizer(text_target="ab").input_ids == target.labels.around(text).tolist()
    assert source_frame(model.tokenizer) != source_frame(first.tokenizer)
    assert target.stop == (2,)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    begins = {"decoder_start_token_id": ids} if name == "mbart" else {"forced_bos_token_id": ids}
    texts = []
    for source in ("hello", "a bed", "quick"):
        with torch.no_grad():
            (row,) = theirs.generate(
                **tokenizer(source, return_tensors="pt"), max_new_tokens=NEW, num_beams=1,
                do_sample=False, **begins,
            )  # fmt: skip
        texts.append(tokenizer.decode(row, skip_special_tokens=True))
        assert model.generate(source, NEW) == texts[-1]
    assert len(set(texts)) > 1
    if name != "nllb":  # its small model repeats a single letter
        assert first.generate("hello", NEW) != texts[0]
    flags = ["--model", str(folder), "--languages", ",".join(pair), "--temperature", "0"]
    assert generate([*flags, "--prompt", "hello", "--num-tokens", str(NEW)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == texts[0].rstrip("\n")
    assert generate([*flags[:3], pair[0], "--prompt", "hello"]) == 2
    assert f"languages is '{pair[0]}': must be two" in capsys.readouterr().err
