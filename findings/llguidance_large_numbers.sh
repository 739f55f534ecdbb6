#!/usr/bin/env bash
# llguidance rounds the numbers in a JSON Schema to float64 and writes them with fewer digits.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: a constant in a schema matches exactly as it is written, including a 64-bit ID.
# Seen: {"const": 9007199254740993} accepts only 9007199254740992, and so does an integer whose minimum and maximum
# are 9007199254740993. {"const": 123456789.12345679}, which float64 preserves in a round trip, accepts only
# 123456789.1234568. {"enum": [18446744073709551615]} accepts neither the number nor its neighbor.
#
# Output seen:
#   {"const": 9007199254740993}: accepts ['9007199254740992']
#   {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993}: accepts ['9007199254740992']
#   {"const": 123456789.12345679}: accepts ['123456789.1234568']
#   {"enum": [18446744073709551615]}: accepts []
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q llguidance==1.9.1
cd "$work"
env/bin/python - <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
large = 9007199254740993
CASES = (
    ({"const": large}, (large, large - 1), [str(large - 1)]),
    ({"type": "integer", "minimum": large, "maximum": large}, (large, large - 1), [str(large - 1)]),
    ({"const": 123456789.12345679}, (123456789.12345679, 123456789.1234568), ["123456789.1234568"]),
    ({"enum": [2**64 - 1]}, (2**64 - 1, 2**64), []),
)
for schema, numbers, right in CASES:
    found = []
    for text in map(repr, numbers):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        assert not matcher.get_error(), matcher.get_error()
        if matcher.validate_tokens(list(text.encode())) == len(text):
            found.append(text)
    print(f"{json.dumps(schema)}: accepts {found}")
    assert found == right, found
PY
