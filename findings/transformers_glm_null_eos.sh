#!/usr/bin/env bash
# "eos_token_id": null of a GLM folder becomes three end tokens in its config, but not in generate.
#
# transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-11-30.
# Expected: null in config.json means that the model has no end token, as in Llama, whose default is 2. A model from
# from_pretrained and a model from from_config generate max_new_tokens tokens.
# Seen: GlmConfig and Glm4Config replace null by [151329, 151336, 151338]. Without generation_config.json,
# from_pretrained also reads config.json as a generation config, where null stays null. So the loaded model has a
# config with three end tokens and does not stop at them, whereas a model from from_config stops.
#
# Output seen (the only token that the models may generate is 151329):
#   llama: config None; new tokens: 4 (from_pretrained), 4 (from_config)
#   glm: config [151329, 151336, 151338]; new tokens: 4 (from_pretrained), 1 (from_config)
#   glm4: config [151329, 151336, 151338]; new tokens: 4 (from_pretrained), 1 (from_config)
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
from transformers import AutoConfig, AutoModelForCausalLM

sizes = dict(
    vocab_size=151552, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8,
)
others = [i for i in range(sizes["vocab_size"]) if i != 151329]


def count(model):
    """Return the number of new tokens. Each is 151329, because all other tokens are suppressed."""
    ids = model.generate(torch.arange(3)[None], max_new_tokens=4, do_sample=False, suppress_tokens=others)
    assert set(ids[0, 3:].tolist()) == {151329}
    return ids.shape[1] - 3


found = {}
for kind in "llama", "glm", "glm4":
    folder = Path(kind)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    published = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(published))

    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    found[kind] = loaded.config.eos_token_id, count(loaded), count(built)
    ends, one, two = found[kind]
    print(f"{kind}: config {ends}; new tokens: {one} (from_pretrained), {two} (from_config)")
ends = [151329, 151336, 151338]
assert found == {"llama": (None, 4, 4), "glm": (ends, 4, 1), "glm4": (ends, 4, 1)}
PY
