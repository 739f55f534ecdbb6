"""Requests with constraints, which share slots with unconstrained requests.

The oracle reads the whole text from the start before each token, and chooses with NumPy.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.decoding.constraints import allowed_tokens
from transformer_jax.decoding.continuous_batching import Request, serve_requests
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.decoding.slots import admit, advance_rows, advance_slots, init_slots

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, STOP = 11, 10
CONFIG = tj.ModelConfig(
    vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=2, max_len=31, positions="rope",
    init_std=0.7,
)  # fmt: skip
STEP = tj.make_step(tj.build(CONFIG))
PROMPTS = ((1, 2, 3), (5,), (4, 4, 0, 7, 2))
DRAWN = dict(sampler=Sample(Temperature(1.5)))


class OneOf:
    """A constraint that allows the texts of a list; each ends at its last token or with STOP."""

    def __init__(self, *texts: tuple[int, ...]) -> None:
        self.texts, self.start = texts, ()

    def _rests(self) -> list[tuple[int, ...]]:
        size = len(self.start)
        return [text[size:] for text in self.texts if text[:size] == self.start]

    @property
    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(VOCAB), [rest[0] if rest else STOP for rest in self._rests()])

    @property
    def ended(self) -> bool:
        return not any(self._rests())

    def read(self, token: int) -> None:
        assert self.allowed[token]
        self.start += (token,)


TEXTS = (
    ((8, 1, 8), (8, 2), (3, 3, 3, 3)),
    ((0, 0), (0, 0, 9, 1), (0, 0, 9, 2), (0, 6), (0,)),
    ((7,) * 9 + (6,), (7,) * 9 + (5,)),
)


@functools.cache
def params():
    return tj.init_params(CONFIG, jax.random.key(3))


@functools.cache
def whole_text():
    return jax.jit(lambda ids: tj.build(CONFIG).apply({"params": params()}, ids[None])[0][0])


def logits_of(ids) -> np.ndarray:
    """Return the logits after a text, independent of the padding after it."""
    padded = np.pad(np.array(ids, np.int32), (0, CONFIG.max_len - len(ids)))
    return np.asarray(whole_text()(padded))[len(ids) - 1]


def expected(prompt, texts, count, draw) -> tuple[list[int], list[float]]:
    """Generate by definition: `draw(n, logits)` among the tokens that continue one of the texts.

    If `texts` is None, any token may follow.
    """
    new: list[int] = []
    log_probs: list[float] = []
    while len(new) < count:
        kept, logits = range(VOCAB), logits_of([*prompt, *new])
        if texts is not None:
            rests = [text[len(new) :] for text in texts if list(text[: len(new)]) == new]
            if not any(rests):
                break
            kept = [rest[0] if rest else STOP for rest in rests]
        masked = np.where(np.isin(np.arange(VOCAB), kept), logits, -np.inf)
        new.append(int(draw(len(new), masked)))
        log_probs.append(logits[new[-1]] - np.log(np.exp(np.float64(logits)).sum()))
        if new[-1] == STOP:
            break
    return new, log_probs


def served(requests, **options) -> list:
    state = tj.init_cache(CONFIG, 1, CONFIG.max_len)
    arguments = dict(slots=2, capacity=CONFIG.max_len, stop=STOP) | options
    return sorted(
        serve_requests(STEP, params(), requests, state, **arguments), key=lambda done: done.id
    )


@pytest.mark.slow_except("greedy")
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_each_row_follows_its_own_constraint(drawn):
    """Three constraints and three free requests share two slots."""
    options = DRAWN if drawn else {}
    requests = []
    for n, prompt in enumerate(PROMPTS):
        key = jax.random.key(n)
        requests.append(Request(prompt, 13, key=key, constraint=OneOf(*TEXTS[n]), id=n))
        requests.append(Request(prompt, 9, key=jax.random.key(3 + n), id=3 + n))
    got = served(requests, **options)
    for n, one in enumerate(got):

        def draw(count, masked, seed=n):
            key = jax.random.fold_in(jax.random.key(seed), count)
            return DRAWN["sampler"](key, jnp.array([masked]))[0] if drawn else masked.argmax()

        constrained = n < 3
        texts, most = (TEXTS[n], 13) if constrained else (None, 9)
        want, log_probs = expected(PROMPTS[n % 3], texts, most, draw)
        assert one.tokens.tolist() == want and (one.end == "stop" or not constrained)
        np.testing.assert_allclose(one.log_probs, log_probs, atol=1e-5)
    assert len({tuple(one.tokens) for one in got}) == 6 and got[2].tokens[-1] in (5, 6)


def test_constrained_text_stops_at_limit_and_streams_by_token():
    texts = TEXTS[2]
    whole = expected(PROMPTS[0], texts, 10, lambda n, masked: masked.argmax())[0]
    got = served([Request(PROMPTS[0], 6, constraint=OneOf(*texts), id=0)])[0]
    assert got.tokens.tolist() == whole[:6] and got.end == "length"
    got = served([Request(PROMPTS[0], 10, constraint=OneOf(*texts), id=0)])[0]
    assert got.tokens.tolist() == whole and got.end == "stop", "the last token completes it"
    parts = served([Request(PROMPTS[0], 10, constraint=OneOf(*texts), id=0)], stream=True)
    assert [len(part.tokens) for part in parts] == [1] * 10
    assert [part.end for part in parts] == [None] * 9 + ["stop"]


def test_constraint_without_allowed_tokens_yields_none():
    got = served([Request(PROMPTS[0], 5, constraint=OneOf(()), id=0)])[0]
    assert got.tokens.tolist() == [] and got.end == "stop"
    never = OneOf((3,), (4, 4))
    never.texts = ((3, -5), (4, -5))  # after its first token no other one is allowed
    got = served([Request(PROMPTS[0], 5, constraint=never, id=0)])[0]
    assert len(got.tokens) == 1 and got.end == "nonfinite"


def test_allowed_token_mask_applies_to_one_step_with_fixed_shape():
    state = tj.init_cache(CONFIG, 1, CONFIG.max_len)
    slots = init_slots(STEP, params(), state, 2, CONFIG.max_len, stop=STOP)
    only = np.arange(VOCAB)[None] == 6
    for wrong in (only[0], only[:, :7], only.astype(np.int32)):
        with pytest.raises(ValueError, match=r"allowed is .*: must be bool\[1, 11\]"):
            admit(slots, params(), 0, [PROMPTS[0]], state, limits=5, allowed=wrong)
    slots, output = admit(slots, params(), 0, [PROMPTS[0]], state, limits=5, allowed=only)
    assert output.token.tolist() == [6]
    with pytest.raises(ValueError, match="steps is 2: must be 1"):
        advance_slots(slots, params(), 2, allowed=np.ones((2, VOCAB), bool))
    slots, output = advance_slots(slots, params(), 1, allowed=np.stack([~only[0], only[0]]))
    want = np.where(only[0], -np.inf, logits_of([*PROMPTS[0], 6])).argmax()
    assert output.token.tolist() == [[want, -1]]


def test_rows_without_a_constraint_allow_every_token():
    assert allowed_tokens([None, None]) is None
    got = allowed_tokens([None, OneOf((3,), (4, 1))])
    np.testing.assert_array_equal(got, [[True] * VOCAB, [n in (3, 4) for n in range(VOCAB)]])


def test_program_without_constraints_has_no_mask():
    """The program of unconstrained requests neither takes nor computes a mask."""
    state = tj.init_cache(CONFIG, 1, CONFIG.max_len)
    slots = init_slots(STEP, params(), state, 2, CONFIG.max_len, stop=STOP)
    free = advance_rows.by_value.lower(slots, params(), np.bool_(False), 8, 0, None).as_text()
    mask = np.ones((2, VOCAB), bool)
    masked = advance_rows.by_value.lower(slots, params(), np.bool_(False), 1, 0, mask).as_text()
    shape = f"tensor<2x{VOCAB}xi1>"
    assert shape in masked and shape not in free
