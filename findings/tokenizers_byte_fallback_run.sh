#!/usr/bin/env bash
# After one invalid byte, the ByteFallback decoder of tokenizers also replaces the letters before it.
#
# tokenizers 0.23.3, Python 3.11.7; seen on 2026-11-29.
# Expected: "a", "b", and an invalid byte decode to "ab" and one replacement character, as in bytes.decode with
# errors="replace".
# Seen: the decoder replaces every byte token in a run of byte tokens if the run as a whole is not valid UTF-8.
# During streaming, text that was already displayed changes to replacement characters.
#
# Output seen:
#   <0x61> <0x62>: 'ab'
#   <0x61> <0x62> <0xFF>: three replacement characters
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q tokenizers==0.23.3
cd "$work"
env/bin/python - <<'PY'
from tokenizers import decoders

valid = decoders.ByteFallback().decode(["<0x61>", "<0x62>"])
broken = decoders.ByteFallback().decode(["<0x61>", "<0x62>", "<0xFF>"])
print(f"<0x61> <0x62>: {valid!r}")
assert valid == "ab"
assert broken == 3 * "\N{REPLACEMENT CHARACTER}", broken
assert b"ab\xff".decode(errors="replace") == "ab\N{REPLACEMENT CHARACTER}"
print("<0x61> <0x62> <0xFF>: three replacement characters")
PY
