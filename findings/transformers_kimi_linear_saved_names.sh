#!/usr/bin/env bash
# Kimi Linear's layers without experts get other tensor names when a folder is loaded and saved again.
#
# transformers 5.24.0, torch 2.13.0, Python 3.11.7; seen on 2026-12-01.
# Expected: from_pretrained followed by save_pretrained writes the tensor names of the original folder, as for the other
# families whose names are converted. In Kimi Linear's files, layers without experts have the prefix "mlp", and layers
# with experts have "block_sparse_moe".
# Seen: transformers renames "block_sparse_moe" to "mlp" when it loads, and every "mlp" to "block_sparse_moe" when it
# saves, so a layer without experts is saved as block_sparse_moe.gate_proj, without a warning. transformers itself
# loads both names.
#
# Output seen:
#   original: mlp.down_proj.weight mlp.gate_proj.weight mlp.up_proj.weight
#   saved:    block_sparse_moe.down_proj.weight block_sparse_moe.gate_proj.weight block_sparse_moe.up_proj.weight
#   the same logits from both folders: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0
"$work/env/bin/pip" install -q transformers==5.24.0
cd "$work"
env/bin/python - 2>/dev/null <<'PY'
import re

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, KimiLinearConfig

config = KimiLinearConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, num_local_experts=4, num_experts_per_tok=2, linear_num_heads=2, linear_head_dim=8,
    layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained("original")
tensors = load_file("original/model.safetensors")
dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
tensors = {dense.sub(r"mlp.\1_proj", name): x for name, x in tensors.items()}
save_file(tensors, "original/model.safetensors", {"format": "pt"})

model = AutoModelForCausalLM.from_pretrained("original").eval()
model.save_pretrained("saved")
first = "model.layers.0."
names = {
    folder: sorted(
        name.removeprefix(first)
        for name in load_file(f"{folder}/model.safetensors")
        if name.startswith(first) and "_proj" in name and "self_attn" not in name
    )
    for folder in ("original", "saved")
}
for folder, found in names.items():
    print(f"{folder + ':':10}", *found)
again = AutoModelForCausalLM.from_pretrained("saved").eval()
ids = torch.arange(16)[None]
with torch.no_grad():
    same = torch.equal(model(ids).logits, again(ids).logits)
print("the same logits from both folders:", same)
assert all(name.startswith("mlp.") for name in names["original"]) and len(names["original"]) == 3
assert all(name.startswith("block_sparse_moe.") for name in names["saved"]) and same
PY
