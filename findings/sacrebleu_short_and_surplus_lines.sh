#!/usr/bin/env bash
# sacrebleu gives a perfect translation of short lines a BLEU of 0 and ignores surplus hypotheses.
#
# sacrebleu 2.6.0, Python 3.11.7; seen on 2026-11-29.
# Expected: hypotheses that equal their references have a BLEU of 100, and more hypotheses than references raise an
# error.
# Seen: if no line has four words, the corpus has no 4-grams, and its score is 0.0 without a warning.
# The second hypothesis, which has no reference, is ignored.
#
# Output seen:
#   two lines of two words, equal to their references: 0.0
#   one line of four words, equal to its reference: 100.0
#   two hypotheses, one reference: 100.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q sacrebleu==2.6.0
cd "$work"
env/bin/python - <<'PY'
import sacrebleu

short = ["the cat", "a dog"]
long = ["the cat sat here"]
scores = [
    ("two lines of two words, equal to their references", sacrebleu.corpus_bleu(short, [short])),
    ("one line of four words, equal to its reference", sacrebleu.corpus_bleu(long, [long])),
    ("two hypotheses, one reference", sacrebleu.corpus_bleu([*long, "x y z w"], [long])),
]
for name, score in scores:
    print(f"{name}: {score.score:.1f}")
assert [round(score.score, 1) for _, score in scores] == [0.0, 100.0, 100.0]
PY
