#!/usr/bin/env bash
# AutoTokenizer reads other IDs for the same tokenizer files if config.json names the model type "qwen2".
#
# transformers 5.24.0, tokenizers 0.23.3, Python 3.11.7; seen on 2026-11-30.
# Expected: a folder with tokenizer_class "PreTrainedTokenizerFast" is read as its tokenizer.json states, for any
# model_type.
# Seen: for model_type "qwen2", AutoTokenizer creates Qwen2Tokenizer, which takes only the vocabulary and the merges
# from tokenizer.json and splits text by its own rules. The tokenizer below has one token per character.
# Qwen2Tokenizer drops the space without a warning.
#
# Output seen:
#   llama: TokenizersBackend [0, 2, 1]
#   qwen2: Qwen2Tokenizer [0, 1]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
cd "$work"
env/bin/python - 2>/dev/null <<'PY'
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, " ": 2, "<unk>": 3}, merges=[], unk_token="<unk>"))
letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
found = {}
for kind in "llama", "qwen2":
    folder = Path(kind)
    folder.mkdir()
    letters.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[kind] = type(tokenizer).__name__, tokenizer("a b")["input_ids"]
    print(f"{kind}: {found[kind][0]} {found[kind][1]}")
assert found["llama"] == ("TokenizersBackend", [0, 2, 1])
assert found["qwen2"] == ("Qwen2Tokenizer", [0, 1])
PY
