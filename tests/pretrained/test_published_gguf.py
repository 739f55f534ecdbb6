"""GGUF files compared with `transformers`, which has its own reader."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("gguf")
from tests.pretrained.test_gguf import CASES, folder_of
from tests.support.gguf_files import gguf_of
from tests.support.published import apply, assert_same_logits, tokens, torch, transformers
from transformer_jax.pretrained.load import load_pretrained

COMPARED = (
    "llama", "qwen2", "qwen3", "qwen3 of experts", "gemma2", "gemma3", "phi3 in part", "gpt2",
)  # fmt: skip


@pytest.mark.slow_except("llama")
@pytest.mark.parametrize("case", COMPARED)
def test_logits_match_transformers(case, tmp_path):
    """transformers gets the folder's config, because its GGUF reader omits some keys."""
    family, config, keys = CASES[case]
    config = dataclasses.replace(config, dropout=0.0, attention_dropout=0.0)
    folder, _ = folder_of(tmp_path / "m", family, config)
    path = gguf_of(tmp_path / "m.gguf", folder, keys=keys)
    content = transformers.AutoConfig.from_pretrained(folder, pad_token_id=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, config=content,
        dtype=torch.float32, attn_implementation="eager",
    ).eval()  # fmt: skip
    found, params = load_pretrained(path)
    ids = tokens(np.random.default_rng(0), config.vocab_size, 2, 41)
    with torch.no_grad():
        want = theirs(torch.tensor(ids, dtype=torch.long)).logits
    assert_same_logits(apply(found, params)(ids)[0], want)
