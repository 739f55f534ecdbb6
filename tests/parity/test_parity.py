"""A sample of the parity matrix that covers every option; `python -m tests.parity` runs it all."""

import pytest

from tests.parity.matrix import (
    HEADS,
    KINDS,
    MEMORY,
    MIXERS,
    POSITIONS,
    WINDOWS,
    Case,
    cases,
    measure,
)
from tests.parity.search import measure_search, search_cases

pytestmark = pytest.mark.usefixtures("quick_compilation")

SAMPLE = [
    Case(positions, list(HEADS)[i % 3], WINDOWS[(i + i // 2) % 2], KINDS[(i // 2) % 2])
    for i, positions in enumerate(POSITIONS)
]
SAMPLE += [
    Case("rope-pairs", "GQA", kind="decoder", **MEMORY[0]),
    Case("t5", "GQA", kind="encoder-decoder", **MEMORY[1]),
    Case("shaw", "GQA", kind="decoder", **MEMORY[3]),
    *(Case(heads="GQA", kind="decoder", **MIXERS[i]) for i in (1, 3, 6, 7)),
]
SLOW = [
    Case("rope", "GQA", (5, None), "decoder", window_base=31.0),
    Case("learned", "MHA", None, "encoder-decoder"),
]
"""`test_models` checks these more cheaply, in two parts and against the formulas."""


def test_sampled_configs_cover_every_option():
    assert {c.heads for c in SAMPLE} == set(HEADS)
    assert {(c.window, c.kind) for c in SAMPLE} >= {(w, k) for w in WINDOWS for k in KINDS}
    assert {bool(c.sinks) for c in SAMPLE} == {True, False}
    assert {c.dtype for c in SAMPLE} == {None, "int8"} and set(SAMPLE + SLOW) <= set(cases())


@pytest.mark.slow
@pytest.mark.long_except("decoder-rope-pairs-GQA-full")
@pytest.mark.parametrize(
    "case",
    [*SAMPLE, *(pytest.param(case, marks=pytest.mark.long) for case in SLOW)],
    ids=lambda c: "-".join(str(c).split()),
)
def test_cached_decode_matches_full_forward(case):
    results = measure(case, prompts=("ragged",), chunks=(5,))
    assert len(results) == 1
    for result in results:
        assert result.scale > 0.5, "logits too small for the tolerance to mean anything"
        assert result.holds, result


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [c for i, c in enumerate(search_cases()) if i in (3, 13, 17)],
    ids=lambda c: "-".join(str(c).split()),
)
def test_beam_search_and_forked_decoding_match_full_forward(case):
    (result,) = measure_search(case)
    assert result.texts == 12 and result.tokens == 3 * 3 * 23
    assert result.holds, result
