"""How fast is decoding compared with peers and with memory bandwidth?

    python -m benchmarks.decode --quick
    python -m benchmarks.decode --weights f32,bf16,int8 --out benchmarks/results/decode_cpu.json

Each contender runs one greedy `generate` call of a GPT-2 model after a random prompt, with the same
weights. The contenders are this library, Hugging Face in torch (also compiled, with a static
cache), CTranslate2, and llama.cpp. On a CPU, weights in bfloat16 and 8 bits are also measured.
Before timing, the logits after the prompt must agree with ours for unrounded weights, and in
float32 every token must agree. Each token reads every weight once, so the limit is the fastest read
of the same number of bytes by XLA or torch, timed in the same rounds. The last line shows the cost
of a cache with four times the capacity for the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from benchmarks import gpt2_peers, specs, timing
from benchmarks.gpt2_peers import COMPILED, LLAMA_CPP, XLLAMACPP, Peer, Weights
from benchmarks.peers import Absent
from benchmarks.specs import DecodeCase
from benchmarks.timing import Contender, Timing
from transformer_jax.decoding.generation import generate, prefill
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.quantized import quantize

OURS = "ours"
UNROUNDED = "ours, f32"
"""Contender with unrounded weights, for comparison with rounded ones."""
FIRST = ", first token"
QUESTION = "decoding: seconds per greedy generate call of ours, its peers and the memory's limit"
TOLERANCE: dict[Weights, float] = {"f32": 1e-3, "bf16": 0.25, "int8": 0.25, "int4": 2.0}
"""Largest allowed difference of a log-probability. Logits are between about -3 and 3."""
ROUNDS = {LLAMA_CPP: 0.02, XLLAMACPP: 0.02}
"""Largest allowed difference for contenders with rounded arithmetic, such as llama.cpp, which uses
a float16 table for GELU."""


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before), flush=True)
    before["limits"] = timing.limits("float32", clock)
    found: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []

    def write() -> None:  # after each case, because a run may be interrupted
        if options.out is not None:
            timing.write(options.out, QUESTION, before, {"cases": found, "capacity": growth})

    for case in _selected(options, before["platform"]):
        params = parameters(case)
        for kind in options.weights or (own_weights(case),):
            found.append(measure(case, params, kind, options, clock))
            write()
            print(_report(found[-1]), flush=True)
        if not options.skip_capacity and (case.batch == 1 or options.quick):
            growth.append(capacity_growth(case, params, options, clock))
            write()
            print(_growth_line(growth[-1]), flush=True)


def own_weights(case: DecodeCase) -> Weights:
    """Return the dtype of a case's parameters."""
    return "f32" if case.model.dtype == "float32" else "bf16"


def parameters(case: DecodeCase) -> dict[str, Any]:
    """Return random parameters in the compute dtype, with random biases and norms."""
    params = init_params(case.model, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        (leaf + 0.02 * jax.random.normal(key, leaf.shape)).astype(case.model.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def measure(
    case: DecodeCase,
    params: dict[str, Any],
    kind: Weights,
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Return timings, tokens per second, ratios, and the fraction of the limit for one case."""
    # as in the peers
    own = gpt2_peers.in_q4_0(params) if kind == "int4" else params
    rounded = partial(quantize, own, kind, embeddings=kind in ("int8", "int4"))
    held = params if kind == own_weights(case) else rounded()
    builders = {OURS: lambda: ours(case, held)}
    if held is not params:
        builders[UNROUNDED] = lambda: ours(case, params)
    for name, make in gpt2_peers.BUILDERS.items():
        builders[name] = partial(make, case, params, kind)
    unrounded = ours(case, params)
    expected = Peer(cache(unrounded.generate), cache(unrounded.logits), unrounded.token_bytes)
    size = ours(case, held).token_bytes
    reads = timing.reads(size)  # before peers use the rest of the memory
    peers: dict[str, Peer] = {}
    absent, differs = {}, {}
    for name, build_peer in builders.items():
        try:
            if name in options.without:
                raise Absent("left out")
            if name == COMPILED and not options.compiled and jax.default_backend() == "cpu":
                raise Absent("takes part on a processor with --compiled")
            peer = build_peer()
            differs[name] = difference(case, kind, name, peer, expected)
            peers[name] = peer
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = timing.brief(error)
    contenders = [
        contender
        for name, peer in peers.items()
        for contender in (
            Contender(name, partial(peer.generate, case.new)),
            Contender(name + FIRST, partial(peer.generate, 1)),
        )
    ]
    taken = timing.interleave(
        [*contenders, *reads], rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    read = timing.fastest(taken[r.name] for r in reads).samples
    per_token = {name: _per_token(taken, name, case.new) for name in peers}
    needed = {
        name: peer.token_bytes / size for name, peer in peers.items()
    }  # relative to the timed read
    return {
        "case": case.name,
        "new_tokens": case.new,
        "batch": case.batch,
        "dtype": case.model.dtype,
        "weights": kind,
        "weight_bytes": size,
        "token_bytes": {name: peer.token_bytes for name, peer in peers.items()},
        "timings": {name: t.summary() for name, t in taken.items()},
        "read_s": statistics.median(read),
        "token_s": {name: statistics.median(times) for name, times in per_token.items()},
        "share_of_limit": {
            name: _ratios([case.new * needed[name] * r for r in read], taken[name].samples)
            for name in peers
        },
        "token_share_of_limit": {
            name: _ratios([needed[name] * r for r in read], times)
            for name, times in per_token.items()
        },
        "speedup_of_ours": {
            name: _ratios(taken[name].samples, taken[OURS].samples)
            for name in peers
            if name != OURS
        },
        "token_speedup_of_ours": {
            name: _ratios(times, per_token[OURS])
            for name, times in per_token.items()
            if name != OURS
        },
        "differs": differs,
        "absent": absent,
    }


def difference(case: DecodeCase, kind: Weights, name: str, peer: Peer, expected: Peer) -> float:
    """Return the largest difference of a log-probability. Raise an error if it is too large."""
    both = [jax.nn.log_softmax(one.logits()) for one in (peer, expected)]
    found = float(abs(both[0] - both[1]).max())
    if not found <= max(TOLERANCE[kind], ROUNDS.get(name, 0.0)):
        raise AssertionError(f"{name} computes other logits: they differ by {found}")
    tokens = peer.generate(case.new)
    if tokens.shape != (case.batch, case.new):
        raise AssertionError(f"{name} returns tokens of shape {tokens.shape}")
    exact = kind == "f32" and name not in ROUNDS
    if exact and not np.array_equal(tokens, expected.generate(case.new)):
        raise AssertionError(f"{name} continues with other tokens than ours")
    return found


def ours(case: DecodeCase, params: dict[str, Any], capacity: int | None = None) -> Peer:
    """Return this library's `generate` call, which starts with an empty cache."""
    step = make_step(build(case.model))
    tokens, lengths = case.tokens(), case.lengths()
    chunk = 128 if case.prompt > 128 else None
    empty = partial(init_cache, case.model, case.batch, capacity or case.capacity)
    last = jax.jit(lambda params, state: prefill(step, params, tokens, state, lengths, chunk)[0])

    def call(new: int) -> np.ndarray:
        found = generate(
            step, params, tokens, empty(), num_tokens=new, lengths=lengths, chunk=chunk
        )
        return np.asarray(found.tokens)

    return Peer(call, lambda: np.asarray(last(params, empty())), _token_bytes(params))


def _token_bytes(params: dict[str, Any]) -> int:
    """Return the bytes of parameters read per token, including one row of the position table."""
    embed = {name: x for name, x in params["embed"].items() if name != "positions"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params | {"embed": embed}))


def capacity_growth(
    case: DecodeCase,
    params: dict[str, Any],
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Return the time per token with 4 times the cache capacity, relative to the default."""
    sizes = {str(n): ours(case, params, capacity=n) for n in (case.capacity, 4 * case.capacity)}
    contenders = [
        Contender(name + more, partial(peer.generate, new))
        for name, peer in sizes.items()
        for more, new in (("", case.new), (FIRST, 1))
    ]
    taken = timing.interleave(
        contenders, rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    own, large = (_per_token(taken, name, case.new) for name in sizes)
    return {
        "case": case.name,
        "capacities": [case.capacity, 4 * case.capacity],
        "token_s": [statistics.median(own), statistics.median(large)],
        "ratio": _ratios(large, own),
    }


def _per_token(taken: dict[str, Timing], name: str, new: int) -> list[float]:
    """Return the seconds per token in each round, without the prompt and the first token."""
    both = zip(taken[name].samples, taken[name + FIRST].samples, strict=True)
    return [(whole - first) / (new - 1) for whole, first in both]


def _ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles, over the rounds, of the ratio of two times."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, high = Timing(tuple(ratios), 0.0).quartiles
    return {"median": statistics.median(ratios), "quartiles": [low, high]}


def _show(spread: dict[str, Any], unit: str = "") -> str:
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f}{unit} ({low:.2f}-{high:.2f})"


def _report(found: dict[str, Any]) -> str:
    rows = []
    for name, share in found["share_of_limit"].items():
        taken, speedup = found["timings"][name], found["speedup_of_ours"].get(name)
        of_token = found["token_speedup_of_ours"].get(name)
        low, high = taken["quartiles_s"]
        rows.append(
            (
                name,
                f"{1e3 * taken['median_s']:.0f}",
                f"{1e3 * low:.0f}-{1e3 * high:.0f}",
                f"{1e3 * found['timings'][name + FIRST]['median_s']:.0f}",
                f"{1e3 * found['token_s'][name]:.2f}",
                f"{found['new_tokens'] * found['batch'] / taken['median_s']:,.0f}",
                _show(share),
                f"{found['token_share_of_limit'][name]['median']:.2f}",
                "" if speedup is None else _show(speedup),
                "" if of_token is None else f"{of_token['median']:.2f}",
                f"{found['differs'][name]:.0e}",
            )
        )
    header = (
        "", "ms, median", "middle half", "first", "ms a token", "tokens/s", "of the limit",
        "a token", f"ours is {timing.FASTER}", "a token", "differs",
    )  # fmt: skip
    rate = found["weight_bytes"] / found["read_s"]
    return "\n".join(
        [
            f"\n{found['case']}: {found['new_tokens']} tokens x {found['batch']} rows, "
            f"{found['dtype']}, weights in {found['weights']}, of which "
            f"{found['weight_bytes'] / 1e6:.0f} MB are read in "
            f"{1e3 * found['read_s']:.2f} ms ({rate / 1e9:.1f} GB/s)",
            timing.table(header, rows),
            *(f"{name}: {reason}" for name, reason in found["absent"].items()),
        ]
    )


def _growth_line(found: dict[str, Any]) -> str:
    (small, large), (own, four) = found["capacities"], found["token_s"]
    return (
        f"{found['case']}: {1e3 * own:.2f} ms a token in {small} slots, {1e3 * four:.2f} ms in "
        f"{large} with the same tokens: {_show(found['ratio'], 'x')}"
    )


def _selected(options: argparse.Namespace, platform: str) -> list[DecodeCase]:
    tag = "quick" if options.quick else "cpu" if platform == "cpu" else "gpu"
    return [case for case in specs.DECODE if tag in case.tags and options.only in case.name]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, a few rounds")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    kinds = ",".join(get_args(Weights))
    held = f"what weights are held in, of {kinds} (the model's dtype)"
    add("--weights", type=_weights, default=None, metavar="LIST", help=held)
    others = tuple(gpt2_peers.BUILDERS)
    add("--without", nargs="+", default=[], choices=others, metavar="NAME", help="to leave out")
    add("--compiled", action="store_true", help=f"{COMPILED}, on a processor too: a minute more")
    add("--repeats", type=int, default=None, help="rounds (10, or 3 with --quick)")
    add("--seconds", type=float, default=120.0, help="about the longest one case may take")
    add("--skip-capacity", action="store_true", help="leave out the larger cache")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, default=None, help="JSON to write")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 10
    return options


def _weights(text: str) -> tuple[Weights, ...]:
    kinds = [kind for kind in get_args(Weights) if kind in text.split(",")]
    if len(kinds) < len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be of {','.join(get_args(Weights))}")
    return tuple(kinds)


if __name__ == "__main__":
    main()
