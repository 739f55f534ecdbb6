#!/usr/bin/env bash
# A property name can be written with an alternative spelling, to which its schema does not apply.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: with {"properties": {"a": {"type": "integer"}}}, no text is accepted that a JSON parser reads as an
# object in which "a" is a string.
# Seen: the name of an additional property can contain any letter as \uXXXX. {"\u0061": "s"} is accepted, and
# json.loads reads {"a": "s"}, which jsonschema rejects.
#
# Output seen:
#   {"a":"s"}: accepted False
#   {"\u0061":"s"}: accepted True, read as {'a': 's'}, valid False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q llguidance==1.9.1 jsonschema==4.26.0
cd "$work"
env/bin/python - <<'PY'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
tokenizer = LLTokenizer("byte")


def is_accepted(text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens)


plain, escaped = '{"a":"s"}', r'{"\u0061":"s"}'
value = json.loads(escaped)
is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
print(f"{plain}: accepted {is_accepted(plain)}")
print(f"{escaped}: accepted {is_accepted(escaped)}, read as {value}, valid {is_valid}")
assert not is_accepted(plain) and is_accepted(escaped) and value == {"a": "s"} and not is_valid
PY
