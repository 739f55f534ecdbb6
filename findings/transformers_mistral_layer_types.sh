#!/usr/bin/env bash
# A Mistral folder with layer_types loads as two different models, or fails, depending on the class that loads it.
#
# transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-11-29.
# Expected: AutoModelForCausalLM and MistralForCausalLM load the same model from a folder with model_type
# "mistral", and head_dim can be omitted, as in MistralConfig, which uses hidden_size / num_attention_heads.
# Seen: with layer_types in config.json, AutoConfig creates a "ministral" config. This model follows layer_types,
# whereas MistralForCausalLM prints a warning and uses the sliding window in all layers, so the same files result
# in different logits. Without head_dim, the value in the "ministral" config is None, and the model cannot be
# built.
#
# Output seen:
#   AutoModelForCausalLM: MinistralForCausalLM, MistralForCausalLM: MistralForCausalLM
#   token 3 the same: True; token 15 the same: False
#   without head_dim: MistralConfig has 8, AutoConfig has None: TypeError
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0
"$work/env/bin/pip" install -q transformers==5.24.0
cd "$work"
env/bin/python - 2>/dev/null <<'PY'
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM

sizes = dict(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
)
torch.manual_seed(0)
MistralForCausalLM(MistralConfig(**sizes, initializer_range=0.5)).save_pretrained("folder")
file = Path("folder/config.json")
published = json.loads(file.read_text()) | {"layer_types": ["full_attention", "sliding_attention"]}
file.write_text(json.dumps(published))

auto = AutoModelForCausalLM.from_pretrained("folder").eval()
named = MistralForCausalLM.from_pretrained("folder").eval()
classes = type(auto).__name__, type(named).__name__
print(f"AutoModelForCausalLM: {classes[0]}, MistralForCausalLM: {classes[1]}")
ids = torch.arange(16)[None]
with torch.no_grad():
    one, two = auto(ids).logits[0], named(ids).logits[0]
same = [torch.allclose(one[i], two[i], atol=1e-5) for i in (3, 15)]  # 3 is within the window of 4
print(f"token 3 the same: {same[0]}; token 15 the same: {same[1]}")
assert classes == ("MinistralForCausalLM", "MistralForCausalLM") and same == [True, False]

del published["head_dim"]
file.write_text(json.dumps(published))
widths = MistralConfig.from_pretrained("folder").head_dim, AutoConfig.from_pretrained("folder").head_dim
try:
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("folder"))
    error = "none"
except TypeError as wrong:
    error = type(wrong).__name__
print(f"without head_dim: MistralConfig has {widths[0]}, AutoConfig has {widths[1]}: {error}")
assert widths == (8, None) and error == "TypeError"
PY
