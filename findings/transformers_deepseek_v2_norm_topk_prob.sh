#!/usr/bin/env bash
# norm_topk_prob changes nothing in DeepSeek-V2.
#
# transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-11-30.
# Expected: with norm_topk_prob=True, which DeepseekV2Config documents as "Whether to normalize the weights of the
# routed experts", the weights of the selected experts sum to 1 for each token, as in DeepSeek-V3.
# Seen: DeepseekV2Config stores the value, but no layer reads it. The weights sum to less than 1, and the logits are
# the same as with False, without a warning.
#
# Output seen:
#   deepseek_v3: weights sum to 1: True; the same logits as with False: False
#   deepseek_v2: weights sum to 1: False; the same logits as with False: True
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
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16,
    first_k_dense_replace=0, n_group=1, topk_group=1, routed_scaling_factor=1.0, initializer_range=0.5,
)


def run(kind, normalize):
    keys = dict(model_type=kind, norm_topk_prob=normalize)
    (folder / "config.json").write_text(json.dumps(sizes | keys))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    sums = []
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, inputs, output: sums.append(output[1].sum(-1)))
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    return logits, torch.allclose(sums[0], torch.ones(16), atol=1e-5)


found = {}
for kind in "deepseek_v3", "deepseek_v2":
    logits, to_one = run(kind, True)
    same = torch.allclose(logits, run(kind, False)[0], atol=1e-5)
    found[kind] = to_one, same
    print(f"{kind}: weights sum to 1: {to_one}; the same logits as with False: {same}")
assert found == {"deepseek_v3": (True, False), "deepseek_v2": (False, True)}
PY
