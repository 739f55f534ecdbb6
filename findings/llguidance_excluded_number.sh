#!/usr/bin/env bash
# llguidance accepts a number that exclusiveMinimum or exclusiveMaximum excludes.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: a number above 3 and at most 3.5 is never 3.
# Seen: if the excluded bound is an integer and the other bound is less than 1 away, the grammar accepts the
# excluded number. If the bounds are 1 or more apart, it does not.
#
# Output seen:
#   above 3, at most 3.5: accepts 3
#   above 0, at most 0.5: accepts 0
#   below 0, at least -0.5: accepts -0
#   above 3, at most 4: refuses 3
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
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


seen = []
for name, schema, text in (
    ("above 3, at most 3.5", {"exclusiveMinimum": 3, "maximum": 3.5}, "3"),
    ("above 0, at most 0.5", {"exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ("below 0, at least -0.5", {"exclusiveMaximum": 0, "minimum": -0.5}, "-0"),
    ("above 3, at most 4", {"exclusiveMinimum": 3, "maximum": 4}, "3"),
):
    seen.append(accepts(schema, text))
    print(f"{name}: {'accepts' if seen[-1] else 'refuses'} {text}")
assert seen == [True, True, True, False], seen
PY
