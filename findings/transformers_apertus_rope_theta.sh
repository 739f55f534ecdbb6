#!/usr/bin/env bash
# An Apertus folder with rope_theta alone is computed with the base and the scaling of the class.
#
# transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-11-30.
# Expected: rope_theta in config.json, without rope_parameters or rope_scaling, is the base of the rotation, as in
# Llama, so another rope_theta changes the logits.
# Seen: ApertusConfig fills in rope_parameters before it reads rope_theta. The base is 12000000 and the scaling is
# llama3 for any rope_theta, without a warning. With rope_scaling={"rope_type": "default"}, rope_theta is used.
#
# Output seen:
#   llama: base 10000.0, default; the same logits as with 500.0: False
#   apertus: base 12000000.0, llama3; the same logits as with 500.0: True
#   apertus with rope_scaling: base 10000.0, default; the same logits as with 500.0: False
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

folder = Path("folder")
folder.mkdir()
sizes = dict(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)


def load(**keys):
    (folder / "config.json").write_text(json.dumps(sizes | keys))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    return config.rope_parameters["rope_theta"], config.rope_parameters["rope_type"], logits


found = {}
for name, keys in {
    "llama": dict(model_type="llama"),
    "apertus": dict(model_type="apertus"),
    "apertus with rope_scaling": dict(model_type="apertus", rope_scaling={"rope_type": "default"}),
}.items():
    base, kind, logits = load(**keys, rope_theta=10_000.0)
    same = torch.allclose(logits, load(**keys, rope_theta=500.0)[2], atol=1e-5)
    print(f"{name}: base {base}, {kind}; the same logits as with 500.0: {same}")
    found[name] = base, kind, same
assert found == {
    "llama": (10_000.0, "default", False),
    "apertus": (12_000_000.0, "llama3", True),
    "apertus with rope_scaling": (10_000.0, "default", False),
}
PY
