#!/usr/bin/env bash
# The longer of two added tokens is not found if it is normalized and the shorter one is not.
#
# tokenizers 0.23.3, Python 3.11.7; seen on 2026-11-29.
# Expected: if two added tokens begin at the same position, the longer one is found.
# Seen: added tokens are searched for in two passes. The first pass finds only tokens with normalized=False (the
# default for special tokens), and the second pass finds the others in the remaining text. Therefore, "<|tool"
# splits "<|tool_call|>", although the latter is also an added token.
#
# Output seen:
#   both normalized=True: ['<|tool_call|>']
#   the shorter one normalized=False: ['<|tool', '[UNK]']
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q tokenizers==0.23.3
cd "$work"
env/bin/python - <<'PY'
from tokenizers import AddedToken, Tokenizer, models

found = []
for shorter_is_normalized in True, False:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    longer = AddedToken("<|tool_call|>", normalized=True)
    tokenizer.add_tokens([longer, AddedToken("<|tool", normalized=shorter_is_normalized)])
    found.append(tokenizer.encode("<|tool_call|>").tokens)
print(f"both normalized=True: {found[0]}")
print(f"the shorter one normalized=False: {found[1]}")
assert found == [["<|tool_call|>"], ["<|tool", "[UNK]"]]
PY
