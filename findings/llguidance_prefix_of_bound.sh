#!/usr/bin/env bash
# llguidance rejects a number whose digits are a prefix of a decimal bound.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: 10.5 is at most 10.55, so the grammar for {"maximum": 10.55} accepts it.
# Seen: 10.5 is rejected and 10.50 is accepted. The same happens to -10.5 with a minimum of -10.55. With multipleOf
# 0.5, a number has at most one decimal place, and neither is accepted, so the number cannot be written.
#
# Output seen:
#   at most 10.55: refuses 10.5
#   at most 10.55: accepts 10.50
#   at most 10.55: accepts 10.4
#   at least -10.55: refuses -10.5
#   at most 10.55, multiples of 0.5: refuses 10.5
#   at most 10.55, multiples of 0.5: refuses 10.50
#   at most 10.55, multiples of 0.5: accepts 9.5
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


def accepts(schema, text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "number"} | schema))
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


most, multiples = {"maximum": 10.55}, {"maximum": 10.55, "multipleOf": 0.5}
seen = []
for name, schema, text in (
    ("at most 10.55", most, "10.5"),
    ("at most 10.55", most, "10.50"),
    ("at most 10.55", most, "10.4"),
    ("at least -10.55", {"minimum": -10.55}, "-10.5"),
    ("at most 10.55, multiples of 0.5", multiples, "10.5"),
    ("at most 10.55, multiples of 0.5", multiples, "10.50"),
    ("at most 10.55, multiples of 0.5", multiples, "9.5"),
):
    seen.append(accepts(schema, text))
    print(f"{name}: {'accepts' if seen[-1] else 'refuses'} {text}")
assert seen == [False, True, True, False, False, False, True], seen
PY
