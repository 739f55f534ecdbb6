#!/usr/bin/env bash
# With left padding, the vector of a text depends on the other texts in its batch.
#
# sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-11-29.
# Expected: encode(["a cat sat", longer]) returns the same vector for "a cat sat" as encode(["a cat sat"]), up to
# rounding, even if the tokenizer of a BERT model has padding_side="left".
# Seen: a BERT model counts positions from the first column, including padding, so the same text has different
# positions in a longer batch. Pooling with the first token reads the padding itself.
#
# Output seen:
#   right, mean: the same True
#   right, cls: the same True
#   left, mean: the same False
#   left, cls: the same False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0
"$work/env/bin/pip" install -q transformers==5.24.0 sentence-transformers==6.2.0
cd "$work"
env/bin/python - 2>/dev/null <<'PY'
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, BertTokenizer

words = "[PAD] [UNK] [CLS] [SEP] [MASK] a cat sat on the mat and looked at dog".split()
Path("vocab.txt").write_text("\n".join(words) + "\n")
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=32, initializer_range=0.5,
)
BertModel(config).save_pretrained("folder")
found = {}
for side in "right", "left":
    BertTokenizer("vocab.txt", padding_side=side).save_pretrained("folder")
    for pooling in "mean", "cls":
        word = models.Transformer("folder")
        encoder = SentenceTransformer(
            modules=[word, models.Pooling(16, pooling_mode=pooling)], device="cpu"
        )
        alone = encoder.encode(["a cat sat"])[0]
        beside = encoder.encode(["a cat sat", "a cat sat on the mat and looked at a dog"])[0]
        found[side, pooling] = bool(np.allclose(alone, beside, atol=1e-4))
        print(f"{side}, {pooling}: the same {found[side, pooling]}")
assert found == {
    ("right", "mean"): True, ("right", "cls"): True, ("left", "mean"): False, ("left", "cls"): False
}
PY
