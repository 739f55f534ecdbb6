#!/usr/bin/env bash
# llguidance combines multiples in 32 bits and does not detect an overflow.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: with two multipleOf constraints, a number is a multiple of both, or the schema is rejected.
# Seen: for allOf with multipleOf 65537 and 65539, whose least common multiple is 4295229443, the
# grammar accepts 262147, which is a multiple of neither. 4295229443 - 2**32 = 262147.
#
# Output seen:
#   multiples of 257 and 263: accepts 67591, refuses 514
#   multiples of 65537 and 65539: accepts 262147
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


def accepts(multiples, text):
    schema = {"type": "integer", "allOf": [{"multipleOf": n} for n in multiples]}
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.get_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


word = {True: "accepts", False: "refuses"}
small = [accepts((257, 263), text) for text in ("67591", "514")]
print(f"multiples of 257 and 263: {word[small[0]]} 67591, {word[small[1]]} 514")
large = accepts((65537, 65539), "262147")
print(f"multiples of 65537 and 65539: {word[large]} 262147")
assert (small, large) == ([True, False], True)
PY
