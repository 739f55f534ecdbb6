#!/usr/bin/env bash
# llguidance ignores schema keys that are not part of JSON Schema, but rejects some that are.
#
# llguidance 1.9.1, Python 3.11.7; seen on 2026-11-29.
# Expected: a misspelled keyword ("maxlength", "aditionalProperties") or an OpenAPI keyword ("nullable") is
# rejected or causes a warning, because the resulting grammar is weaker than the schema.
# Seen: validate_grammar returns no message, and text that the intended schema forbids is accepted.
# "contentEncoding" is also ignored. "dependentRequired", which is a keyword, is rejected by name.
#
# Output seen:
#   maxlength: no message, a longer string is accepted
#   aditionalProperties: no message, another property is accepted
#   nullable: no message, null is refused
#   contentEncoding: no message, a string that is not base64 is accepted
#   dependentRequired: Unimplemented keys: ["dependentRequired"]
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


def message(schema):
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.validate_tokens(list(text.encode())) == len(text)


def seen(name, schema, text, said, accepted):
    assert message(schema) == "", message(schema)
    assert accepts(schema, text) is accepted, (schema, text)
    print(f"{name}: no message, {said}")


seen("maxlength", {"type": "string", "maxlength": 2}, '"abcdef"', "a longer string is accepted", True)
closed = {"type": "object", "properties": {}, "aditionalProperties": False}
seen("aditionalProperties", closed, '{"a": 1}', "another property is accepted", True)
seen("nullable", {"type": "string", "nullable": True}, "null", "null is refused", False)
encoded = {"type": "string", "contentEncoding": "base64"}
seen("contentEncoding", encoded, '"!"', "a string that is not base64 is accepted", True)
refused = message({"type": "object", "dependentRequired": {"a": ["b"]}})
print(f"dependentRequired: {refused}")
assert refused == 'Unimplemented keys: ["dependentRequired"]'
PY
