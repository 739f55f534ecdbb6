#!/usr/bin/env bash
# Causal attention of torch on a CPU returns NaN if the scale is 0.
#
# torch 2.13.0, Python 3.11.7, CPU; seen on 2026-11-30.
# Expected: with scale=0.0 all scores are 0, so query t returns the mean of the values 0 to t.
# Seen: scaled_dot_product_attention(is_causal=True, scale=0.0) returns NaN for each query that has a later
# key. The same call with a bool mask, or with the backend SDPBackend.MATH, returns the means. Without a
# mask, the default backend returns them, too.
#
# Output seen:
#   default, is_causal:  NaN for queries [0, 1, 2, 3]
#   default, bool mask:  means
#   default, no mask:    means
#   math, is_causal:     means
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy
cd "$work"
cat > scale.py <<'PY'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
attend = torch.nn.functional.scaled_dot_product_attention
means = v.cumsum(2) / torch.arange(1, 6)[:, None]
whole = v.mean(2, keepdim=True).expand_as(v)


def show(name, out, expected):
    bad = torch.isnan(out).any(-1)[0, 0].nonzero()[:, 0].tolist()
    text = f"NaN for queries {bad}" if bad else "means" if torch.allclose(out, expected, atol=1e-6) else "other"
    print(f"{name:20s} {text}")


show("default, is_causal:", attend(q, k, v, is_causal=True, scale=0.0), means)
show("default, bool mask:", attend(q, k, v, attn_mask=torch.ones(5, 5, dtype=bool).tril(), scale=0.0), means)
show("default, no mask:", attend(q, k, v, scale=0.0), whole)
with sdpa_kernel(SDPBackend.MATH):
    show("math, is_causal:", attend(q, k, v, is_causal=True, scale=0.0), means)
PY
found=$(env/bin/python scale.py)
echo "$found"
[ "$found" = "default, is_causal:  NaN for queries [0, 1, 2, 3]
default, bool mask:  means
default, no mask:    means
math, is_causal:     means" ]
