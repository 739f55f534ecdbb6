"""Fuzz test of edits: random edits and ways to run a model, compared with one full pass.

    python -m tests.interpret.fuzz_edits --minutes 1 --seed 0

A case is a model, an edit, a batch of prompts of 1 to 40 tokens and a way to read and continue
them. Its log-probabilities must equal those of `model.edited(...).apply` on each sequence alone,
or the edit must be rejected. An edit of single tokens is never rejected, and an edit that needs all
tokens is not rejected if the prompt is read in one call.
"""

import argparse
import collections
import dataclasses
import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from tests.support.drawn import drawn
from transformer_jax import interpret
from transformer_jax.decoding.generation import prefill
from transformer_jax.models.factory import init_decode_state

VOCAB, D, N, MOST = 23, 12, 3, 48
BASE = tj.ModelConfig(
    vocab_size=VOCAB, d_model=D, num_layers=2, num_heads=N, head_dim=4, d_ff=9, max_len=MOST,
    init_std=0.5,
)  # fmt: skip
CONFIGS = {
    "learned": BASE,
    "scanned": dataclasses.replace(BASE, positions="rope", scan_layers=True),
    "window": dataclasses.replace(BASE, positions="rope", window=7, num_kv_heads=1),
    "lstm": tj.RecurrentConfig(vocab_size=VOCAB, d_embed=D, d_hidden=D, num_layers=2),
    "feed-forward": tj.WindowConfig(
        vocab_size=VOCAB, context=3, d_embed=4, d_hidden=D, num_layers=2
    ),
}
ENTRIES = (
    "apply", "left", "prefill", "chunks", "generate", "go on", "go on in chunks", "capture",
    "attention", "stream", "speculate", "draft", "serve", "beams", "step",
)  # fmt: skip
AT_ONCE = ("apply", "left", "prefill", "generate")
"""Methods that read each prompt in one call and do not continue it."""
REFUSED = re.compile(
    "edit of .*(needs all|needs the tokens|combines rows|sees padding)|at is .*must be from|reaches"
)


@functools.cache
def model_of(kind):
    return tj.build(CONFIGS[kind]), drawn(CONFIGS[kind])


def edits(kind, rng, length, rows):
    """Return edits by name, each with a flag: whether it changes every token independently."""
    config = CONFIGS[kind]
    names = [x for x in tj.places(config) if not x.endswith(("positions", "weights", "router"))]
    place = names[rng.integers(len(names))]
    width = {"logits": VOCAB, "embedding": 3 * 4 if kind == "feed-forward" else D}
    last = tj.places(config)[place][-1]
    headed = len(tj.places(config)[place]) == 4
    size = width.get(place, last)
    vector = rng.standard_normal(size).astype(np.float32)
    at = rng.choice(length, min(length, 2), replace=False).tolist()
    some = vector.reshape((1, 1, 1, -1) if headed else (1, 1, -1))

    def put(value, positions):
        here = (positions == at[0]).reshape(*positions.shape, *(1,) * (value.ndim - 2))
        return jnp.where(here, 0.3 * value + some, value)

    def centred(value):
        return value - value.mean(axis=1, keepdims=True)

    heads = {"heads": int(rng.integers(CONFIGS[kind].kv_heads))} if headed else {}
    found = {
        "zero": (interpret.zero(place, at=at, **heads), True),
        "add": (interpret.add(place, vector, at=at[0]), True),
        "steer": (interpret.add(place, vector), True),
        "function": ({place: lambda x: 0.5 * x + 0.1 * some}, True),
        "positions": ({place: put}, True),
        "mean": (interpret.mean(place, "tokens", at=at, **heads), False),
        "both": (interpret.mean(place), False),
        "rows": (interpret.mean(place, "rows"), False),
        "last": ({place: lambda x: x.at[:, -1].set(0.3)}, False),
        "first": ({place: lambda x: x.at[:, 0].set(0.3)}, False),
        "centred": ({place: centred}, False),
        "missing": (interpret.zero(place, at=MOST - 1), False),
    }
    return place, found


def run(kind, entry, edit, prompt, lengths, chunk):
    """Return the sequence of each row, i32[n], and log p of its tokens from `first[row]` on."""
    model, params = model_of(kind)
    rows, config = len(prompt), CONFIGS[kind]
    state = init_decode_state(config, params, rows, MOST)
    step = tj.make_step(model.edited(edit))
    texts = [prompt[i, :n] for i, n in enumerate(lengths)]
    if entry in ("apply", "left"):
        valid = np.arange(prompt.shape[1])[None] < lengths[:, None]
        tokens = prompt
        if entry == "left":
            tokens, valid = tokens[:, ::-1], valid[:, ::-1]
            tokens = np.stack(
                [np.roll(x[::-1], len(x) - n) for x, n in zip(tokens, lengths, strict=True)]
            )
        given = {"valid": valid}
        if isinstance(config, tj.ModelConfig):
            given = {"positions": np.where(valid, valid.cumsum(1) - 1, -1)}
        if (lengths == prompt.shape[1]).all():
            given = {}
        apply = jax.jit(model.edited(edit).apply)
        logits = apply({"params": params}, tokens, **given)[0]
        last = logits[:, -1] if entry == "left" else logits[np.arange(rows), lengths - 1]
        return texts, [x[None] for x in np.asarray(jax.nn.log_softmax(last))]
    if entry in ("prefill", "chunks"):
        read = jax.jit(lambda p, s: prefill(step, params, p, s, lengths, chunk))
        chunk = chunk if entry == "chunks" else None
        logits = read(prompt, state)[0]
        return texts, [x[None] for x in np.asarray(jax.nn.log_softmax(logits))]
    given, count = (step, params, prompt, state), 5
    if entry == "step":
        found, read = [], []
        for text in texts:
            state, found_row = init_decode_state(config, params, 1, MOST), []
            for token in text:
                logits, state = step(params, np.array([[token]]), state)
                found_row.append(np.asarray(jax.nn.log_softmax(logits[0, 0])))
            found.append(np.stack(found_row)), read.append(text)
        return read, found
    more = dict(num_tokens=count, lengths=lengths)
    if entry == "serve":
        requests = [tj.Request(text, count, id=i) for i, text in enumerate(texts)]
        empty = init_decode_state(config, params, 1, MOST)
        done = tj.serve_requests(step, params, requests, empty, slots=2, capacity=MOST, chunk=chunk)
        made = sorted(done, key=lambda x: x.id)
        if errors := [x.error for x in made if x.error]:
            raise ValueError(errors[0])
        tokens, values = [x.tokens for x in made], [x.log_probs for x in made]
    elif entry == "stream":
        tokens = np.stack(list(tj.stream(*given, **more)), 1)
        values = [None] * rows
    elif entry == "beams":
        made = tj.beam_search(*given, num_beams=2, **more)
        tokens = np.asarray(made.tokens)[:, 0]
        values = [np.asarray(made.log_probs)[i, 0] for i in range(rows)]
    elif entry in ("speculate", "draft"):
        proposer = tj.PromptLookup(2)
        if entry == "draft":
            own = init_decode_state(config, params, rows, MOST)
            proposer = tj.Draft(tj.make_step(model), params, own)
        made = tj.speculate(*given, proposer=proposer, num_draft=3, **more)
        tokens, values = np.asarray(made.tokens), np.asarray(made.log_probs)
    else:
        more |= {"num_tokens": 1 if entry == "generate" else count}
        more |= {"capture": ("logits",)} if entry == "capture" else {}
        more |= {"capture": ("block_*/attention/weights",)} if entry == "attention" else {}
        more |= {"chunk": chunk} if entry == "go on in chunks" else {}
        made = tj.generate(*given, **more)
        tokens, values = np.asarray(made.tokens), np.asarray(made.log_probs)
    return [np.append(a, b) for a, b in zip(texts, tokens, strict=True)], values


def wanted(kind, edit, sequence, together=None):
    """Return the log-probabilities [n, V] of the next token, computed in one pass."""
    model, params = model_of(kind)
    tokens = sequence[None] if together is None else together
    apply = jax.jit(model.edited(edit).apply)
    return np.asarray(jax.nn.log_softmax(apply({"params": params}, tokens)[0]))


def case(seed, at, kind=None, entry=None, which=None):
    """Run one case; return its name and its failure, or None."""
    rng = np.random.default_rng([seed, at])
    kind = kind or [*CONFIGS][rng.integers(len(CONFIGS))]
    entry = entry or ENTRIES[rng.integers(len(ENTRIES))]
    if entry == "attention" and kind in ("lstm", "feed-forward"):
        entry = "capture"
    if entry == "draft" and kind not in ("learned", "scanned"):
        entry = "speculate"
    if kind == "window" and entry in ("speculate", "draft"):  # a ring buffer cannot rewind
        entry = "serve"
    rows = int(rng.integers(1, 4))
    lengths = rng.integers(1, 41, rows)
    if rng.random() < 0.5:
        lengths[:] = lengths[0]
    if rng.random() < 0.3:
        lengths = np.minimum(lengths, 4)
    shortest, longest = int(lengths.min()), int(lengths.max())
    prompt = rng.integers(0, VOCAB, (rows, longest)).astype(np.int32)
    chunk = int(rng.integers(1, 20))
    place, drawn = edits(kind, rng, shortest, rows)
    which = which or [*drawn][rng.integers(len(drawn))]
    edit, by_token = drawn[which]
    state = place.startswith("layer") and kind == "lstm"
    ragged = shortest < longest
    told = f"{entry}, {kind}, {which} at {place}, lengths {lengths.tolist()}, chunk {chunk}"
    must = by_token or (
        entry in AT_ONCE and not state and which != "missing"
        and not (which in ("rows", "both", "last", "first", "centred") and ragged)
    )  # fmt: skip
    try:
        sequences, values = run(kind, entry, edit, prompt, lengths, chunk)
    except ValueError as error:
        if must:
            return told, f"refused: {error}"
        return told, None if REFUSED.search(str(error)) else f"raised {error}"
    if which == "missing":
        if entry not in ("prefill", "chunks", "step"):
            return told, "not refused"
        edit = {}  # a later call may read a token that the sequence does not have yet
    for row, (sequence, value) in enumerate(zip(sequences, values, strict=True)):
        first, read = int(lengths[row]), sequence
        if np.ndim(value) == 1 or value is None or np.ndim(value) == 0:
            read = sequence[:-1]
        together = None
        if (
            which in ("rows", "both") and rows > 1 and entry != "step"
        ):  # a step reads each row alone
            if ragged:
                continue  # a single row has another mean
            together = np.stack([s[: len(read)] for s in sequences])
        right = wanted(kind, edit, read, together)[row if together is not None else 0]
        if np.ndim(value) == 2:
            right = right[-len(value) :]
            found = value
        else:
            after, right = sequence[first:], right[first - 1 :]
            if value is None:  # only tokens
                found, right = right.max(axis=1), right[np.arange(len(after)), after]
            elif np.ndim(value) == 0:
                found, right = value, right[np.arange(len(after)), after].sum()
            else:
                found, right = value[: len(after)], right[np.arange(len(after)), after]
        if entry == "apply" and not must and np.isnan(found).all():
            continue  # rejected: a compiled call cannot raise for a traced mask, so the row is NaN
        worst = np.abs(np.asarray(found) - right).max()
        if not worst < 2e-3:
            return told, f"row {row} differs by {worst}"
    return told, None


def fuzz(seed, cases=None, minutes=None, **fixed):
    """Run `cases` cases, or for `minutes`; return the number of cases and the failures."""
    ran, failed, start, at = collections.Counter(), [], time.perf_counter(), 0
    while at < (cases or 10**9) and time.perf_counter() - start < 60 * (minutes or 10**9):
        name, wrong = case(seed, at, **fixed)
        ran[name.split(",")[0]] += 1
        if wrong:
            failed.append(f"seed {seed}, case {at}: {name}: {wrong}")
            print(failed[-1], flush=True)
        at += 1
    return ran, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if given.case is not None:
        name, wrong = case(given.seed, given.case)
        print(f"{name}: {wrong or 'right'}")
        sys.exit(bool(wrong))
    ran, failed = fuzz(given.seed, minutes=given.minutes)
    print(f"{ran.total()} cases of seed {given.seed}: {len(failed)} wrong;", dict(ran))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
