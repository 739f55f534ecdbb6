"""Generation: ends of rows, log-probabilities, reuse of states, donation, argument checks."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.decoding.test_decode import (
    LENGTHS,
    NEW,
    PROMPT,
    ROPE,
    SAMPLER,
    VOCAB,
    CountingStep,
    make,
    parameters,
    prompts,
)
from tests.support import model_oracle as oracle
from tests.support.tolerances import assert_near
from transformer_jax.cache.model_cache import rewind_cache
from transformer_jax.decoding import batch_rows
from transformer_jax.decoding import generation as decode
from transformer_jax.decoding.arguments import check_prompt
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate, prefill, stream
from transformer_jax.decoding.proposers import PromptLookup
from transformer_jax.decoding.samplers import Greedy, Sample
from transformer_jax.decoding.speculative import speculate
from transformer_jax.decoding.step import ModelStep
from transformer_jax.models.factory import build, init_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")

RING = dataclasses.replace(ROPE, window=5)
STOP = (13, 16)


@pytest.fixture(scope="module")
def rope():
    return make(ROPE)


@pytest.fixture(scope="module")
def free(rope) -> decode.Generation:
    """A generation without stop tokens or limits."""
    return run(rope)


def run(model, **arguments) -> decode.Generation:
    step, params, empty = model
    defaults = dict(num_tokens=NEW, lengths=LENGTHS, sampler=SAMPLER, key=jax.random.key(3))
    return generate(step, params, prompts(), empty(), **(defaults | arguments))


def cut(row: list[int], limit: int, stop=STOP) -> list[int]:
    """Cut a row after its first stop token, and at its limit."""
    row = row[:limit]
    ends = [i for i, token in enumerate(row) if token in stop]
    return row[: ends[0] + 1] if ends else row


LIMITS = np.array([NEW, 4, 0], np.int32)


@pytest.mark.slow
@pytest.mark.long_except("both-scan", "limits-while")
@pytest.mark.parametrize("early", [False, True], ids=["scan", "while"])
@pytest.mark.parametrize("ends", ["stop", "limits", "both"])
def test_row_ends_after_stop_token_or_at_limit(rope, free, ends, early):
    whole = np.asarray(free.tokens).tolist()
    stop = () if ends == "limits" else STOP
    limits = np.full(3, NEW, np.int32) if ends == "stop" else LIMITS
    want = [cut(row, limit, stop) for row, limit in zip(whole, limits, strict=True)]
    assert ends == "limits" or any(row and row[-1] in STOP and len(row) < NEW for row in want)
    limits = None if ends == "stop" else limits
    got = run(rope, stop=stop, limits=limits, early_exit=early)
    assert [row.tolist() for row in got.rows()] == want
    assert got.lengths.tolist() == [len(row) for row in want]
    for row, tokens in enumerate(want):
        assert (np.asarray(got.tokens[row, len(tokens) :]) == -1).all()
        np.testing.assert_array_equal(got.log_probs[row, len(tokens) :], 0.0)
        np.testing.assert_allclose(  # not exact, because XLA fuses the two programs differently
            got.log_probs[row, : len(tokens)], free.log_probs[row, : len(tokens)], rtol=1e-6
        )


@pytest.mark.slow
def test_early_exit_runs_no_extra_step(rope):
    """A callback counts the steps."""
    step, params, empty = rope
    calls = []

    def counted(params, tokens, state, *, valid=None):
        jax.debug.callback(lambda: calls.append(1))
        return step(params, tokens, state, valid=valid)

    limits = np.array([3, 5, 2], np.int32)
    for early, steps in ((True, 5), (False, NEW)):
        calls.clear()
        out = generate(counted, params, prompts(), empty(), num_tokens=NEW, limits=limits,
                       early_exit=early)  # fmt: skip
        jax.block_until_ready(out.tokens)
        jax.effects_barrier()
        assert len(calls) == steps, early  # one for the prompt, and one per token but the last


@pytest.mark.slow
def test_log_probs_ignore_sampler_and_processors(rope, free):
    """They come from the raw logits, before processors and sampler."""
    _, params, _ = rope
    both = np.concatenate([prompts()[:1], np.asarray(free.tokens)[:1]], axis=1)
    logits = oracle.forward(ROPE, params, both)[0, PROMPT - 1 : -1]
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = log_probs[np.arange(NEW), np.asarray(free.tokens)[0]]
    assert want.std() > 0.1
    assert_near(free.log_probs[0], want, 1e-4)
    forced = run(rope, processors=(tj.Force(7),))
    both[0, PROMPT] = 7
    assert forced.tokens[:, 0].tolist() == [7, 7, 7]
    assert_near(forced.log_probs[0, 0], log_probs[0, 7], 1e-4)


@pytest.mark.slow
def test_state_includes_all_but_last_token_in_each_row(rope, free):
    """Continuing from the state with that token gives the same text as a longer generation."""
    step, params, _ = rope
    greedy = run(rope, sampler=None)
    for limits, parts in ((None, 5), (np.array([5, 2, 3], np.int32), None)):
        first = run(rope, sampler=None, num_tokens=5, limits=limits)
        counts = first.lengths
        assert first.state.length.tolist() == (LENGTHS + np.asarray(counts) - 1).tolist()
        last = jnp.take_along_axis(first.tokens, counts[:, None] - 1, axis=1)
        assert parts is None or parts == int(counts[0])
        rest = generate(step, params, last, first.state, num_tokens=NEW - 5)
        for row, count in enumerate(np.asarray(counts)):
            np.testing.assert_array_equal(
                rest.tokens[row], greedy.tokens[row, count : count + NEW - 5]
            )


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["one key", "one key per row"])
def test_sampled_row_depends_only_on_its_own_key(rope, free, keys):
    step, params, empty = rope
    key = jax.random.fold_in(jax.random.key(3), 1)
    alone = generate(
        step, params, prompts()[1:2], empty(1), num_tokens=NEW, lengths=LENGTHS[1:2],
        sampler=SAMPLER, key=key[None],
    )  # fmt: skip
    np.testing.assert_array_equal(alone.tokens[0], free.tokens[1])
    if keys == "one key per row":
        both = run(rope, key=jnp.stack([jax.random.key(8), key, jax.random.key(9)]))
        np.testing.assert_array_equal(both.tokens[1], free.tokens[1])
        assert (np.asarray(both.tokens[0]) != np.asarray(free.tokens[0])).any()


@pytest.mark.slow
@pytest.mark.long_except("generate")
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_processors_apply_during_generation(rope, call):
    step, params, empty = rope
    allowed = [2, 3, 5, 7, 11, 13, 17]

    def only_primes(history, logits):
        ids = jnp.asarray(allowed)
        return jnp.full_like(logits, -jnp.inf).at[:, ids].set(logits[:, ids])

    processors = (tj.Force(11, 2), only_primes, tj.Ban(3), tj.MinLength(9, 5), tj.NoRepeatNGram(3))
    if call == "generate":
        rows = [r.tolist() for r in run(rope, processors=processors, stop=5, sampler=None).rows()]
    else:
        columns = list(
            stream(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS,
                   processors=processors, stop=[5])
        )  # fmt: skip
        rows = [[int(t) for t in row if t >= 0] for row in np.stack(columns, axis=1)]
    for row, prompt, length in zip(rows, prompts(), LENGTHS, strict=True):
        assert row[:2] == [11, 2] and set(row) <= set(allowed) - {3}
        assert len(row) == NEW or (row[-1] == 5 and len(row) > 9)
        assert 5 not in row[:9]
        text = prompt[:length].tolist() + row
        grams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
        new_grams = grams[length:]  # those that end at the second new token or later
        assert len(set(new_grams)) == len(new_grams)
    free = np.asarray(run(rope, sampler=None).tokens)
    assert any(row != free[i, : len(row)].tolist() for i, row in enumerate(rows))


@pytest.mark.slow
def test_processors_receive_float32_logits():
    """Tokens 0 to 2 are equally likely; in bfloat16, a logit of 8 would absorb the penalty."""

    def step(params, tokens, state, *, valid=None):
        logits = jnp.array([8, 8, 8, 1, 1], state.dtype)
        return jnp.broadcast_to(logits, (*tokens.shape, 5)), state

    def state():
        return jnp.zeros((1,), jnp.bfloat16)

    options: dict = dict(num_tokens=3, processors=(tj.PresencePenalty(0.01, prompt=True),))
    prompt = [[0, 3]]
    assert generate(step, {}, prompt, state(), **options).tokens.tolist() == [[1, 2, 0]]
    out = speculate(step, {}, prompt, state(), **options, num_draft=1, proposer=PromptLookup(1))
    assert out.tokens.tolist() == [[1, 2, 0]]


@pytest.mark.slow
def test_stream_ends_rows_like_generate(rope):
    step, params, empty = rope
    want = run(rope, stop=STOP, limits=[9, 4, 6])
    columns = list(
        stream(step, params, prompts(), empty(), num_tokens=NEW, lengths=LENGTHS, sampler=SAMPLER,
               key=jax.random.key(3), stop=STOP, limits=[9, 4, 6])
    )  # fmt: skip
    assert len(columns) == int(np.max(want.lengths)) < NEW
    got = np.stack(columns, axis=1)
    np.testing.assert_array_equal(got, want.tokens[:, : got.shape[1]])


def counting_step(params, tokens, state, *, valid=None):
    """A step that continues t with t + 1; the state counts the tokens read."""
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    return jax.nn.one_hot(tokens + 1, 97), state + valid.sum(axis=1)


@pytest.mark.slow_except("generate")
@pytest.mark.parametrize("call", ["generate", "stream", "traced"])
def test_limits_below_num_tokens_end_only_their_rows(call):
    """Without stop tokens; traced limits are clipped to 0..num_tokens."""
    prompt, state, limits = (
        np.array([[3], [11], [29], [41]]), jnp.zeros((4,), jnp.int32), [2, 0, 7, 1],
    )  # fmt: skip
    want = [[4, 5], [], list(range(30, 37)), [42]]
    if call == "stream":
        columns = list(stream(counting_step, {}, prompt, state, num_tokens=7, limits=limits))
        assert len(columns) == 7
        rows = [[int(t) for t in row if t >= 0] for row in np.stack(columns, axis=1)]
    else:
        run = partial(generate, counting_step, {}, prompt, num_tokens=7)
        if call == "traced":
            limits = jnp.array([2, -3, 99, 1])
            out = jax.jit(lambda state, limits: run(state, limits=limits))(state, limits)
        else:
            out = run(state, limits=limits)
        rows = [row.tolist() for row in out.rows()]
        assert out.lengths.tolist() == [2, 0, 7, 1]
        assert out.state.tolist() == [2, 1, 7, 1], "all but the last token was read"
        assert ((np.asarray(out.tokens) == -1).sum(axis=1) == [5, 7, 0, 6]).all()
    assert rows == want


@pytest.mark.slow
def test_finished_row_does_not_write_to_cache(rope):
    """Its state equals that of a shorter generation; the ring does not advance."""
    model = make(RING)
    limited = run(model, limits=[2, NEW, 2], sampler=None).state
    short = run(model, num_tokens=2, sampler=None).state
    for a, b in zip(jax.tree.leaves(limited), jax.tree.leaves(short), strict=True):
        for row in (0, 2):
            np.testing.assert_allclose(a[row], b[row], atol=1e-6)
        assert (np.asarray(a[1]) != np.asarray(b[1])).any()


# Kept, forked and continued states


@pytest.mark.long
def test_samples_from_forked_prompt_match_copied_prompts(rope):
    step, params, empty = rope
    count = 5
    one = prompts()[:1]
    _, prefix = jax.jit(partial(prefill, step))(params, one[:, :-1], empty(1), np.array([10]))
    keys = jax.random.split(jax.random.key(7), count)
    draw = partial(generate, step, params, num_tokens=NEW, sampler=SAMPLER, key=keys)
    got = draw(np.repeat(one[:, -1:], count, axis=0), batch_rows.fork(prefix, count))
    want = draw(np.repeat(one, count, axis=0), empty(count))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert len({tuple(row.tolist()) for row in np.asarray(got.tokens)}) == count
    again = draw(np.repeat(one[:, -1:], count, axis=0), batch_rows.fork(prefix, count))
    np.testing.assert_array_equal(again.tokens, want.tokens)


@pytest.mark.slow
def test_chat_turns_continue_from_previous_state(rope):
    """Each turn reads only the new tokens; the result equals reading everything again."""
    step, params, empty = rope
    state, text, pending = empty(1, 67), [], np.zeros((1, 0), np.int32)
    for turn in range(3):
        words = np.random.default_rng(turn).integers(0, VOCAB, (1, 5 + turn), dtype=np.int32)
        prompt = np.concatenate([pending, words], axis=1)
        text += words[0].tolist()
        out = generate(step, params, prompt, state, num_tokens=6)
        whole = generate(step, params, np.array([text]), empty(1, 67), num_tokens=6)
        np.testing.assert_array_equal(out.tokens, whole.tokens)
        text += out.tokens[0].tolist()
        state, pending = out.state, np.asarray(out.tokens)[:, -1:]
    assert int(state.length[0]) == len(text) - 1


@pytest.mark.slow_except("eager, viewed by NumPy")
@pytest.mark.parametrize("made", ["empty", "jit", "eager", "eager, viewed by NumPy"])
def test_consumed_state_is_rejected(rope, made):
    """This holds even if XLA cannot donate a buffer, for example because NumPy views it."""
    step, params, empty = rope
    state, model, prompt = empty(), build(ROPE), prompts()
    read = lambda params, tokens, cache: model.apply({"params": params}, tokens, cache=cache)  # noqa: E731
    if made != "empty":
        read = jax.jit(read) if made == "jit" else read
        _, state = read(params, prompt, state)
    views = [np.asarray(x) for x in jax.tree.leaves(state)] if "NumPy" in made else []
    before = [x.copy() for x in views]
    kept = batch_rows.fork(state, 1)
    out = generate(step, params, prompt[:, :2], state, num_tokens=2)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    for view, copy in zip(views, before, strict=True):
        np.testing.assert_array_equal(view, copy)
    search = partial(beam_search, num_beams=2)
    guess = partial(speculate, proposer=PromptLookup(2), num_draft=2)
    for call in (generate, stream, search, guess):
        with pytest.raises(ValueError, match=r"state was consumed .* fork\(state, 1\) keeps"):
            call(step, params, prompt, state, num_tokens=2)
    rest = {
        "prefill": lambda: prefill(step, params, prompt, state, [PROMPT] * len(prompt)),
        "apply": lambda: model.apply({"params": params}, prompt, cache=state),
        "step": lambda: step(params, prompt, state),
        "rewind_cache": lambda: rewind_cache(state, jnp.zeros(len(prompt), jnp.int32)),
        "fork": lambda: batch_rows.fork(state, 1),
        "gather_rows": lambda: batch_rows.gather_rows(state, jnp.arange(2)),
    }
    for name, call in rest.items():
        with pytest.raises(ValueError, match=r"was consumed by an earlier call: fork\("):
            call()
            pytest.fail(name)
    again = generate(step, params, prompt[:, :2], kept, num_tokens=2)
    np.testing.assert_array_equal(again.tokens, out.tokens)


def test_state_rows_can_be_gathered_forked_written_and_selected():
    rng = np.random.default_rng(1)
    shapes = [jax.eval_shape(partial(init_cache, ROPE, n, PROMPT)) for n in (3, 2)]
    state, other = jax.tree.map(
        lambda x: np.asarray(rng.normal(size=x.shape) * 100).astype(x.dtype), shapes
    )
    assert batch_rows.count_rows(state) == 3

    @jax.jit
    def changed(state, other):
        return (
            batch_rows.gather_rows(state, np.array([2, 0, 2, 1])),
            batch_rows.fork(state, 2),
            batch_rows.write_rows(state, np.array([2, 3]), other),
            batch_rows.select_rows(
                np.array([True, False, True]), jax.tree.map(jnp.zeros_like, state), state
            ),
        )

    found = state, *changed(state, other), other
    for leaf, a, b, c, d, other_leaf in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, leaf[[2, 0, 2, 1]])
        np.testing.assert_array_equal(b, leaf[[0, 0, 1, 1, 2, 2]])
        np.testing.assert_array_equal(c, np.concatenate([leaf[:2], other_leaf[:1]]))
        np.testing.assert_array_equal(d[1], leaf[1])
        assert not np.asarray(d)[[0, 2]].any()
    with pytest.raises(ValueError, match="copies is 0: must be an integer"):
        batch_rows.fork(state, 0)
    with pytest.raises(ValueError, match=r"\['2', '3'\]: must be equal"):
        batch_rows.count_rows((np.zeros(3), np.zeros((2, 3))))


# Compilation


@pytest.mark.slow
def test_prompt_lengths_in_one_bucket_share_program():
    """Limits, keys and states may differ; only a new bucket needs a new program."""
    step = CountingStep(build(ROPE))  # traced again each time, because it is user code
    params = parameters(ROPE)
    sizes = []
    for columns in range(1, 21):
        columns = min(columns, 16) if columns <= 16 else columns - 16
        out = generate(
            step, params, prompts(columns=columns), init_cache(ROPE, 3, 24), num_tokens=8,
            lengths=[columns, 1, max(1, columns // 2)], sampler=SAMPLER,
            key=jax.random.key(columns), stop=STOP, limits=[8, columns % 8, 3],
        )  # fmt: skip
        assert out.tokens.shape == (3, 8)
        sizes.append((programs(), len(step.calls)))
    assert len(step.calls) > 0 and set(sizes) == {sizes[0]}
    for change in (dict(columns=17, tokens=8), dict(columns=3, tokens=6)):
        before = programs()
        generate(step, params, prompts(columns=change["columns"]), init_cache(ROPE, 3, 24),
                 num_tokens=change["tokens"], sampler=SAMPLER, key=jax.random.key(0), stop=STOP,
                 limits=[5, 5, 3])  # fmt: skip
        assert programs() == before + 1, "a new bucket or num_tokens needs a new program"


@pytest.mark.slow
def test_generate_compiles_once_for_equal_arguments():
    """Also with a custom step, and for all tokens."""
    sizes = []
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(0, 79, (3, 5))
        out = generate(counting_step, {}, prompt, jnp.zeros((3,), jnp.int32), num_tokens=11,
                       key=jax.random.key(seed), limits=[11, seed, 7])  # fmt: skip
        assert out.tokens[0].tolist() == (prompt[0, -1] + np.arange(1, 12)).tolist()
        sizes.append(programs())
    assert set(sizes) == {sizes[0]}


def programs() -> int:
    return decode._generate.num_programs()


@pytest.mark.slow
@pytest.mark.long_except("while")
@pytest.mark.parametrize("early", [False, True], ids=["scan", "while"])
def test_cache_is_donated_and_never_copied(early):
    """Its arrays are aliased with the results, and no instruction copies an array of this shape."""
    config = dataclasses.replace(ROPE, num_layers=3)
    step, params, _ = make(config)
    state = init_cache(config, 3, 53)
    options = decode.DecodeOptions(Greedy(), (), STOP, True)
    rows = jnp.zeros(3, jnp.int32) + 2
    texts = decode.Prompts(
        jnp.zeros((3, 16), jnp.int32), rows, jax.random.split(jax.random.key(0), 3), rows + 5
    )
    lowered = decode._generate.by_value.lower(options, step, params, texts, state, 9, early)
    text = lowered.compile().as_text()
    shape = "x".join(map(str, state.layers[0].k.shape))
    assert shape == "3x53x1x6"
    aliased = re.search(r"input_output_alias=\{(.*)\}, entry", text)
    assert aliased and aliased.group(1).count("alias)") >= len(jax.tree.leaves(state))
    copies = re.findall(r"= f32\[3,53,1,6\]\S* copy\(", text)
    assert copies == []


# Padding on the left


def test_length_mask_moves_tokens_to_start_of_row():
    prompt, mask = (
        np.array([[9, 9, 4, 5], [4, 5, 9, 9], [4, 9, 9, 5]]),
        np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1]]),
    )
    for variant in (mask, mask == 1, mask.tolist(), jnp.asarray(mask)):
        tokens, lengths = check_prompt(prompt, variant)
        assert tokens.tolist() == [[4, 5, 0, 0]] * 3 and lengths.tolist() == [2, 2, 2]
    tokens, lengths = jax.jit(check_prompt)(prompt, mask == 1)
    assert tokens.tolist() == [[4, 5, 0, 0]] * 3 and lengths.tolist() == [2, 2, 2]
    for wrong, rule in (
        (mask[:, :3], r"lengths have shape \(3, 3\): must be \(3,\), or \(3, 4\) for a mask"),
        (mask - 1.0, "lengths are float64: must be integers, or a bool mask"),
        (mask * 2, "a mask that contains 2: must contain only 0 and 1, or be bool"),
        (mask * [[0], [1], [1]], r"lengths are \[0, 2, 2\]: must be from 1 to 4"),
    ):
        with pytest.raises(ValueError, match=rule):
            check_prompt(prompt, wrong)


@pytest.mark.slow
def test_left_padding_does_not_change_tokens(rope):
    step, params, empty = rope
    free = run(rope, sampler=None)
    shift = PROMPT - np.asarray(LENGTHS)
    left = np.stack([np.roll(row, n) for row, n in zip(prompts(), shift, strict=True)])
    mask = np.arange(PROMPT) >= shift[:, None]
    options = dict(num_tokens=NEW, lengths=mask)
    padded = generate(step, params, left, empty(), **options)
    np.testing.assert_array_equal(padded.tokens, free.tokens)
    np.testing.assert_array_equal(
        np.stack(list(stream(step, params, left, empty(), **options)), axis=1), free.tokens
    )
    logits = prefill(step, params, left, empty(), mask)[0]
    np.testing.assert_array_equal(
        logits, prefill(step, params, prompts(), empty(), jnp.asarray(LENGTHS))[0]
    )
    beams = beam_search(step, params, left, empty(), num_beams=1, **options)
    np.testing.assert_array_equal(beams.tokens[:, 0], free.tokens)
    guess = speculate(step, params, left, empty(), proposer=PromptLookup(), num_draft=2, **options)
    np.testing.assert_array_equal(guess.tokens, free.tokens)


# Refusals


@pytest.mark.slow
def test_invalid_arguments_are_rejected_before_compiling(rope):
    step = CountingStep(build(ROPE))
    state = init_cache(ROPE, 3, PROMPT + NEW)
    for rule, change in (
        (r"stop contains -1: token IDs must be integers", dict(stop=-1)),
        (r"stop contains 2\.5", dict(stop=[2.5])),
        (r"num_tokens is 2147483648: must be at most 2147483647", dict(num_tokens=2**31)),
        (r"stop is 31: must be from 0 to 30", dict(stop=[3, VOCAB])),
        (r"limits are float64\[3\]: must be integers \[3\]", dict(limits=[1.0, 2.0, 3.0])),
        (r"limits are int64\[2\]", dict(limits=[1, 2])),
        (r"limits are \[1, 2, 24\]: must be from 0 to 23", dict(limits=[1, 2, 24])),
        (r"limits are \[-1, 2, 3\]", dict(limits=[-1, 2, 3])),
        (r"processors is Ban", dict(processors=tj.Ban(2))),
        (r"processor is <class .*RepetitionPenalty'>: must be callable",
         dict(processors=[tj.RepetitionPenalty])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rule):
            generate(step, parameters(ROPE), prompts(), state, **dict(num_tokens=NEW) | change)

    def until(token):
        return generate(step, parameters(ROPE), prompts(), state, num_tokens=NEW, stop=token)

    with pytest.raises(ValueError, match=r"stop is JitTracer\(.*: must be a concrete token ID"):
        jax.jit(until)(3)
    assert [call for call in step.calls if call != (3, 1)] == []


@pytest.mark.slow
def test_row_limits_reduce_required_cache(rope):
    """A cache too small for `num_tokens` is enough for rows with lower limits."""
    step, params, empty = rope
    out = generate(step, params, prompts(), empty(3, 15), num_tokens=NEW, lengths=LENGTHS,
                   limits=[5, 13, 9])  # fmt: skip
    assert out.lengths.tolist() == [5, 13, 9] and (np.asarray(out.tokens[0, :5]) >= 0).all()
    with pytest.raises(ValueError, match="reach length 16: the limit is 15"):
        generate(step, params, prompts(), empty(3, 15), num_tokens=NEW, lengths=LENGTHS,
                 limits=[6, 13, 9])  # fmt: skip


# Inside user transformations


@pytest.mark.slow
def test_generation_works_under_jit_vmap_and_scan(rope):
    step, params, _ = rope
    greedy = run(rope, sampler=None, stop=STOP)

    def go(prompt, lengths):
        return generate(
            step, params, prompt, init_cache(ROPE, 3, PROMPT + NEW), num_tokens=NEW,
            lengths=lengths, stop=STOP,
        ).tokens  # fmt: skip

    lengths = jnp.asarray(LENGTHS)
    np.testing.assert_array_equal(jax.jit(go)(prompts(), lengths), greedy.tokens)
    flipped = prompts()[::-1], lengths[::-1]
    both = [jnp.stack(x) for x in zip((prompts(), lengths), flipped, strict=True)]
    got = jax.vmap(go)(*both)
    np.testing.assert_array_equal(got[0], greedy.tokens)
    np.testing.assert_array_equal(got[1], greedy.tokens[::-1])
    _, scanned = jax.lax.scan(lambda c, x: (c, go(*x)), 0, tuple(both))
    np.testing.assert_array_equal(scanned, got)


@pytest.mark.slow
def test_invalid_traced_values_make_only_their_row_nonfinite(rope):
    """A token outside the vocabulary, or a position past the cache, affects only its row."""
    step, params, _ = rope
    wrong = prompts().copy()
    wrong[1, 0] = VOCAB

    @jax.jit
    def go(prompt, capacity_left):
        return generate(step, params, prompt, init_cache(ROPE, 3, 14), num_tokens=9,
                        lengths=jnp.asarray(LENGTHS) + capacity_left * 0)  # fmt: skip

    out = go(wrong, jnp.int32(0))
    tokens = np.asarray(out.tokens)
    assert (tokens[1] == -1).all() and np.isnan(np.asarray(out.log_probs)[1]).all()
    assert (tokens[0, :4] >= 0).all() and (tokens[0, 4:] == -1).all()
    assert (tokens[2, :8] >= 0).all()


@pytest.mark.slow
def test_nonfinite_row_yields_minus_one_despite_stop_tokens(rope):
    """The row continues with token -1 and does not stop by itself."""
    step, params, empty = rope
    broken = jax.tree.map(lambda x: x, empty())
    first = broken.layers[0]
    key = dataclasses.replace(
        first, k=first.k.at[1, 0].set(math.nan), positions=first.positions.at[1, 0].set(0),
        length=first.length + jnp.array([0, 1, 0]),
    )  # fmt: skip
    state = dataclasses.replace(broken, layers=(key, *broken.layers[1:]))
    state = dataclasses.replace(
        state,
        layers=tuple(dataclasses.replace(x, length=key.length) for x in state.layers),
    )
    out = generate(step, params, prompts()[:, :5], state, num_tokens=4, sampler=Sample(),
                   key=jax.random.key(0), stop=STOP)  # fmt: skip
    clean = generate(step, params, prompts()[:, :5], empty(), num_tokens=4, sampler=Sample(),
                     key=jax.random.key(0), stop=STOP)  # fmt: skip
    assert (np.asarray(out.tokens)[1] == -1).all()
    for row in (0, 2):
        np.testing.assert_array_equal(out.tokens[row], clean.tokens[row])


class ChecksPassed(Exception):
    """Raised when the model is called, after all checks."""


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_prompt_and_generated_tokens_must_fit_cache(limit):
    """A row with limit 0 also reads its whole prompt; the last new token is not read."""

    class Reached(ModelStep):
        def read(self, *args, **kwargs):
            raise ChecksPassed

    step, room = Reached(build(ROPE)), PROMPT - max(limit - 1, 0)
    options = dict(num_tokens=3, limits=[limit])
    tokens, state = prompts(1, room + 1), init_cache(ROPE, 1, PROMPT)
    with pytest.raises(ValueError, match=rf"reach length {PROMPT + 1}: the limit is {PROMPT}"):
        generate(step, {}, tokens, state, **options)
    with pytest.raises(ChecksPassed):
        generate(step, {}, tokens[:, :room], state, **options)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_prompt_that_exactly_fits_cache_is_accepted(rope, limit):
    step, params, empty = rope
    tokens = prompts(1, PROMPT - max(limit - 1, 0))
    out = generate(step, params, tokens, empty(1, PROMPT), num_tokens=3, limits=[limit])
    assert out.lengths.tolist() == [limit]
    assert out.state.length.tolist() == [PROMPT]
