"""Features that use token roles, on folders that define none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.drawn import drawn
from transformer_jax import ConfigError, ModelConfig, load, save_pretrained
from transformer_jax.config import fine_tuning
from transformer_jax.config.tasks import MaskedTask
from transformer_jax.text.save import tokenizer_files
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.tasks.masked import MaskedWindows
from transformer_jax.training.tasks.task import Tokenizers

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "."]
TEXT = "the cat sat. " * 60


def bert(folder: Path, words: list[str]) -> Path:
    """A masked encoder in the format of bert-base-uncased, with a vocab.txt."""
    config = ModelConfig(
        kind="encoder", vocab_size=len(words), d_model=6, num_layers=1, num_heads=2, d_ff=5,
        max_len=13, norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu",
        type_vocab_size=2, masked_token_head=True, logit_bias=True,
    )  # fmt: skip
    save_pretrained(folder, config, drawn(config), family="bert")
    settings = {"do_lower_case": True, "model_max_length": 13}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


@pytest.mark.slow
def test_default_mask_token_of_tokenizer_class_is_used_everywhere(tmp_path):
    model = load(bert(tmp_path / "bert", WORDS))
    (found,) = model.candidates("the [MASK] sat")
    assert len(found) > 1 and model.generate("the [MASK] sat").startswith("the ")
    data = tmp_path / "t.txt"
    data.write_text(TEXT)
    assert model.evaluate(data)["pseudo_perplexity"] > 1
    config = fine_tuning(model.config, str(tmp_path / "bert"), MaskedTask())
    config = replace(config, data=str(data), batch_size=1)
    task = MaskedWindows(config, Tokenizers(model.tokenizer), model.config.vocab_size)
    assert (task.masking.mask, task.config.model.vocab_size) == (4, len(WORDS))
    assert task.tokenizers.tokenizer is model.tokenizer
    files, _ = tokenizer_files(model.tokenizer, len(WORDS))
    written = json.loads(files["tokenizer_config.json"])
    assert (written["mask_token"], written["pad_token"]) == ("[MASK]", "[PAD]")


@pytest.mark.parametrize("use", ["candidates", "generate", "evaluate"])
def test_missing_mask_token_raises_one_line_error(use, tmp_path):
    words = [word for word in WORDS if word != "[MASK]"]
    model = load(bert(tmp_path / "bert", words))
    source = "the [MASK] sat"
    if use == "evaluate":
        (source := tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises((DataError, ConfigError), match="has no mask token: set mask_token"):
        getattr(model, use)(source)
