"""Fuzz test that compares rows of random batches with the rows alone, and checks samplers.

    python -m tests.decoding.fuzz_rows --minutes 1 --seed 0

A program combines an implementation of keys, a sampler, processors and a decoding method. Each of
its cases draws prompts, lengths and keys, and decodes the rows together, in reverse order, and one
alone. For each program, the token frequencies of many keys are also compared with the softmax in
float64; a correct sampler fails 1 time in 10^6.
"""

import argparse
import collections
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from tests.support.oracle import chi_squared_level
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.samplers import Typical

CONFIG = tj.ModelConfig(
    vocab_size=37, d_model=8, num_layers=1, num_heads=2, max_len=32, positions="rope"
)
STEP = tj.make_step(tj.build(CONFIG))
PROMPT, NEW, CASES_OF_A_PROGRAM = 5, 6, 10
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
SAMPLERS = (
    tj.Sample(), tj.Sample(tj.Temperature(1.3)), tj.Sample(tj.TopK(7)), tj.Sample(tj.TopP(0.9)),
    tj.Sample(tj.MinP(0.05)), tj.Sample(Typical(0.8)), tj.Sample(tj.Temperature(1e30)),
    tj.Sample(tj.Temperature(0.7), tj.TopK(20), tj.TopP(0.95)),
)  # fmt: skip
PROCESSORS = (
    (), (tj.RepetitionPenalty(1.3),), (tj.PresencePenalty(0.5), tj.FrequencyPenalty(0.3)),
    (tj.NoRepeatNGram(2),), (tj.Ban(3, 5), tj.MinLength(3, 7)), (tj.Force(4, 2),),
)  # fmt: skip
ENTRIES = ("generate", "chunks", "fork", "stream", "speculate", "draft", "serve", "vmap")


@functools.cache
def params():
    return tj.init_params(CONFIG, jax.random.key(0))


def decode(entry, prompt, keys, lengths, sampler, processors, stop):
    """Return the tokens of each row as a list."""
    rows = len(prompt)
    state = tj.init_cache(CONFIG, rows, 32)
    more = dict(num_tokens=NEW, sampler=sampler, processors=processors, stop=stop)
    arguments = STEP, params(), prompt, state
    if entry == "vmap":
        logits = jnp.asarray(np.sin(prompt.sum(1)[:, None] * np.arange(1, 38) * 0.37) * 3)
        return np.asarray(jax.vmap(sampler)(keys, logits))[:, None].tolist()
    if entry == "stream":
        tokens = list(tj.stream(*arguments, key=keys, lengths=lengths, **more))
        return [[int(t) for t in row if t >= 0] for row in np.stack(tokens, 1)]
    if entry in ("speculate", "draft"):
        proposer = tj.PromptLookup(2)
        if entry == "draft":
            other = jax.tree.map(lambda x: x * 1.1, params())
            proposer = tj.Draft(STEP, other, tj.init_cache(CONFIG, rows, 32))
        made = tj.speculate(
            *arguments, proposer=proposer, num_draft=2, key=keys, lengths=lengths, **more
        )
        return [row.tolist() for row in made.rows()]
    if entry == "serve":
        requests = [
            tj.Request(prompt[i, : lengths[i]], NEW, key=keys[i], id=i) for i in range(rows)
        ]
        more.pop("num_tokens")
        empty = tj.init_cache(CONFIG, 1, 32)
        answers = tj.serve_requests(STEP, params(), requests, empty, slots=2, capacity=32, **more)
        return [answer.tokens.tolist() for answer in sorted(answers, key=lambda x: x.id)]
    if entry == "fork":
        state = fork(state, 1)
    chunk = 3 if entry == "chunks" else None
    made = tj.generate(*arguments[:3], state, key=keys, lengths=lengths, chunk=chunk, **more)
    return [row.tolist() for row in made.rows()]


def case(seed, at):
    """Run one case; return its name and an error message, or None."""
    rng = np.random.default_rng([seed, at // CASES_OF_A_PROGRAM])
    rows, kind = int(rng.integers(2, 5)), KEYS[rng.integers(len(KEYS))]
    entry = ENTRIES[at // CASES_OF_A_PROGRAM % len(ENTRIES)]
    sampler, processors = SAMPLERS[rng.integers(len(SAMPLERS))], PROCESSORS[rng.integers(6)]
    stop = () if rng.random() < 0.5 else (7, 11)
    rng = np.random.default_rng([seed, at, 1])
    prompt = rng.integers(0, 37, (rows, PROMPT)).astype(np.int32)
    lengths = rng.integers(1, PROMPT + 1, rows).astype(np.int32)
    number = int(rng.integers(2**31))

    def run(order):
        order = np.asarray(order)
        keys = jax.random.split(jax.random.key(number, impl=kind), rows)[order]
        options = sampler, processors, stop
        return decode(entry, prompt[order], keys, lengths[order], *options)

    name = f"{entry}, {kind}, {sampler}, {processors}, stop {stop}, {rows} rows"
    together = run(range(rows))
    reversed_order = run(range(rows)[::-1])[::-1]
    row = int(rng.integers(rows))
    alone = run([row])[0]
    if together != reversed_order:
        return name, f"in reverse order: {together} and {reversed_order}"
    if together[row] != alone:
        return name, f"row {row} alone: {together[row]} and {alone}"
    return name, frequencies(rng, kind) if at % CASES_OF_A_PROGRAM == 0 else None


def frequencies(rng, kind, draws=4000):
    """Return an error message if token frequencies differ from the softmax, otherwise None."""
    sampler = SAMPLERS[rng.integers(len(SAMPLERS))]
    logits = (rng.normal(size=37) * 2).astype(np.float32)
    x = np.asarray(sampler.distribution(jnp.asarray(logits)), np.float64)
    expected = np.exp(x - x.max())
    expected /= expected.sum()
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31)), impl=kind), draws)
    count = np.bincount(np.asarray(COUNTED(sampler, keys, logits)), minlength=37)
    if count[expected == 0].any():
        return f"{sampler} draws excluded tokens: {np.flatnonzero(count * (expected == 0))}"
    often = expected * draws >= 5
    pooled = [*count[often], count[~often].sum()], [*expected[often], expected[~often].sum()]
    got, share = (np.asarray(x, float) for x in pooled)
    got, share = got[share > 0], share[share > 0]
    statistic = ((got - draws * share) ** 2 / (draws * share)).sum()
    chance = chi_squared_level(statistic, max(len(got) - 1, 1))
    return None if chance > 1e-6 else f"{sampler}: chi-squared {statistic:.1f} of {len(got)}"


COUNTED = jax.jit(
    lambda sampler, keys, logits: jax.vmap(sampler, (0, None))(keys, logits), static_argnums=0
)


def fuzz(seed, cases=None, minutes=None):
    """Run a number of cases, or for some minutes; return counts by method and the errors."""
    ran, failed, start, at = collections.Counter(), [], time.perf_counter(), 0
    while at < (cases or 10**9) and time.perf_counter() - start < 60 * (minutes or 10**9):
        name, wrong = case(seed, at)
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
    parser.add_argument("--case", type=int, help="run only this case")
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    if args.case is not None:
        name, wrong = case(args.seed, args.case)
        print(f"{name}: {wrong or 'right'}")
        sys.exit(bool(wrong))
    ran, failed = fuzz(args.seed, minutes=args.minutes)
    print(f"{ran.total()} cases of seed {args.seed}: {len(failed)} failed;", dict(ran))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
