"""How fast are new tokens, beside Hugging Face's and beside the memory they are read from?

    python -m benchmarks.decode --quick
    python -m benchmarks.decode --out benchmarks/results/decode_cpu.json

One greedy `generate` call of a GPT-2 after a random prompt, the same weights for all: ours, and
Hugging Face's in torch (on a GPU also compiled, with a static cache). Before anything is timed, the
logits after the prompt must agree, and in float32 every token. A token needs every weight once, so
the limit is the fastest read of as many bytes that XLA or torch can do, timed in the same rounds.
The last line asks what four times the cache's capacity costs while it holds the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import specs, timing
from benchmarks.peers import Absent, torch_and_device
from benchmarks.specs import DecodeCase
from benchmarks.timing import Contender, Timing
from transformer_jax.decoding.generation import generate, prefill
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params

OURS = "ours"
FIRST = ", first token"
QUESTION = "decoding: seconds per greedy generate call of ours, its peers and the memory's limit"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a logit from ours; the logits of these weights are within 3 or so."""


@dataclass(frozen=True)
class Peer:
    """Someone who decodes; both calls return when the numbers are there."""

    generate: Callable[[int], np.ndarray]
    """i32[B, n]: the prompts continued by n tokens."""
    logits: Callable[[], np.ndarray]
    """f32[B, V]: after each prompt."""


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before), flush=True)
    found: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []

    def write() -> None:  # after each case: a run may be cut short
        if options.out is not None:
            timing.write(options.out, QUESTION, before, {"cases": found, "capacity": growth})

    for case in _selected(options, before["platform"]):
        params = weights(case)
        found.append(measure(case, params, options, clock))
        write()
        print(_report(found[-1]), flush=True)
        if not options.skip_capacity and (case.batch == 1 or options.quick):
            growth.append(capacity_growth(case, params, options, clock))
            write()
            print(_growth_line(growth[-1]), flush=True)


def weights(case: DecodeCase) -> dict[str, Any]:
    """Random parameters in the compute dtype, biases and norms random too: each is put to use."""
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
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Timings, tokens per second, ratios and the share of the limit of one case."""
    builders: dict[str, Callable[[DecodeCase, dict[str, Any]], Peer]] = {
        OURS: ours,
        "Hugging Face": hugging_face,
    }
    if jax.default_backend() != "cpu":
        builders["Hugging Face, compiled"] = partial(hugging_face, compiled=True)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    reads = _reads(size, case.model.dtype)  # before a peer takes what is left of the memory
    peers: dict[str, Peer] = {}
    absent, differs = {}, {}
    expected = None
    for name, make in builders.items():
        try:
            peer = make(case, params)
            expected = expected or Peer(cache(peer.generate), cache(peer.logits))
            differs |= compare(case, {name: peer, OURS: expected})
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
    read = _fastest([taken[r.name] for r in reads])
    return {
        "case": case.name,
        "new_tokens": case.new,
        "batch": case.batch,
        "dtype": case.model.dtype,
        "weight_bytes": size * jnp.dtype(case.model.dtype).itemsize,
        "timings": {name: t.summary() for name, t in taken.items()},
        "read_s": statistics.median(read),
        "token_s": {name: statistics.median(_per_token(taken, name, case.new)) for name in peers},
        "share_of_limit": {
            name: _spread(
                [case.new * r / t for r, t in zip(read, taken[name].samples, strict=True)]
            )
            for name in peers
        },
        "speedup_of_ours": {
            name: _spread(
                [p / o for o, p in zip(taken[OURS].samples, taken[name].samples, strict=True)]
            )
            for name in peers
            if name != OURS
        },
        "differs": differs,
        "absent": absent,
    }


def compare(case: DecodeCase, peers: dict[str, Peer]) -> dict[str, float]:
    """The largest difference of a logit from ours; who computes something else is no peer."""
    logits = {name: peer.logits() for name, peer in peers.items()}
    differs = {name: float(np.abs(y - logits[OURS]).max()) for name, y in logits.items()}
    tokens = {name: peer.generate(case.new) for name, peer in peers.items()}
    for name, found in differs.items():
        if not found <= TOLERANCE[case.model.dtype]:
            raise AssertionError(f"{name} computes other logits: they differ by {found}")
        same = np.array_equal(tokens[name], tokens[OURS])
        if case.model.dtype == "float32" and not same:
            raise AssertionError(f"{name} continues with other tokens than ours")
    return differs


def ours(case: DecodeCase, params: dict[str, Any], capacity: int | None = None) -> Peer:
    """This library's `generate`, from an empty cache."""
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

    return Peer(call, lambda: np.asarray(last(params, empty())))


def hugging_face(case: DecodeCase, params: dict[str, Any], compiled: bool = False) -> Peer:
    """`GPT2LMHeadModel.generate` with our weights; shorter rows are padded on the left."""
    torch, device = torch_and_device()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from error
    cfg = case.model
    config = GPT2Config(
        vocab_size=cfg.vocab_size, n_positions=cfg.max_len, n_embd=cfg.d_model,
        n_layer=cfg.num_layers, n_head=cfg.num_heads, n_inner=cfg.ff_dim,
        layer_norm_epsilon=cfg.norm_eps, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):  # drawing 1.5 billion numbers takes a processor half a minute
        model = GPT2LMHeadModel(config)
    state = {name: torch.from_numpy(x) for name, x in gpt2_state(params, cfg.num_layers).items()}
    model.load_state_dict(state, strict=False)
    dtype = getattr(torch, cfg.dtype)
    model = model.eval().to(device=device, dtype=dtype)
    if model.num_parameters() != sum(leaf.size for leaf in jax.tree.leaves(params)):
        raise AssertionError(f"the peer has {model.num_parameters()} parameters")

    lengths = case.lengths()
    columns = np.arange(case.prompt)[None] - (case.prompt - lengths[:, None])  # of our own rows
    tokens = np.take_along_axis(case.tokens(), np.maximum(columns, 0), axis=1)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    mask = torch.from_numpy((columns >= 0).astype(np.int64)).to(device)
    more = {"cache_implementation": "static"} if compiled else {}

    def call(new: int, **options: Any) -> Any:
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new,
                pad_token_id=0, **more, **options,
            )  # fmt: skip

    def tokens_of(new: int) -> np.ndarray:
        return call(new)[:, case.prompt :].cpu().numpy().astype(np.int32)

    def logits() -> np.ndarray:
        found = call(1, return_dict_in_generate=True, output_logits=True)
        return found.logits[0].float().cpu().numpy()

    return Peer(tokens_of, logits)


def gpt2_state(params: dict[str, Any], layers: int) -> dict[str, np.ndarray]:
    """Our parameters under the names of Hugging Face's GPT-2, whose matrices are [in, out] too."""

    def array(leaf: jax.Array, *shape: int) -> np.ndarray:
        return np.array(leaf, np.float32).reshape(shape or leaf.shape)

    def norm(at: str, node: dict[str, Any]) -> dict[str, np.ndarray]:
        return {f"{at}.weight": array(node["scale"]), f"{at}.bias": array(node["bias"])}

    stack, embed = params["decoder"], params["embed"]
    width = embed["tokens"].shape[1]
    state = {
        "transformer.wte.weight": array(embed["tokens"]),
        "lm_head.weight": array(embed["tokens"]),
        "transformer.wpe.weight": array(embed["positions"]),
        **norm("transformer.ln_f", stack["norm"]),
    }
    for i in range(layers):
        at, block = f"transformer.h.{i}", stack[f"block_{i}"]
        attention, forward = block["attention"], block["feed_forward"]
        qkv = [attention[name] for name in ("query", "key", "value")]
        state |= norm(f"{at}.ln_1", block["norm_attention"])
        state |= norm(f"{at}.ln_2", block["norm_feed_forward"])
        state |= {
            f"{at}.attn.c_attn.weight": np.hstack([array(x["kernel"], width, -1) for x in qkv]),
            f"{at}.attn.c_attn.bias": np.hstack([array(x["bias"], -1) for x in qkv]),
            f"{at}.attn.c_proj.weight": array(attention["out"]["kernel"], -1, width),
            f"{at}.attn.c_proj.bias": array(attention["out"]["bias"]),
        }
        for theirs, mine in (("c_fc", "up"), ("c_proj", "down")):
            state[f"{at}.mlp.{theirs}.weight"] = array(forward[mine]["kernel"])
            state[f"{at}.mlp.{theirs}.bias"] = array(forward[mine]["bias"])
    return state


def capacity_growth(
    case: DecodeCase,
    params: dict[str, Any],
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """A token's time in a cache of 4 times the capacity, over that in the case's own."""
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
        "ratio": _spread([b / a for a, b in zip(own, large, strict=True)]),
    }


def _reads(size: int, dtype: str) -> list[Contender]:
    """Ways to read as many numbers once."""
    numbers = jax.random.normal(jax.random.key(2), (size,), dtype)
    total, largest = jax.jit(jnp.sum), jax.jit(jnp.max)
    reads = [
        Contender("read by XLA, sum", lambda: total(numbers).block_until_ready()),
        Contender("read by XLA, max", lambda: largest(numbers).block_until_ready()),
    ]
    try:
        import torch
    except ImportError:
        return reads
    if jax.default_backend() == "cpu":
        same = torch.from_dlpack(numbers)  # the same memory: its pages decide the rate
        reads.append(Contender("read by torch, sum", same.sum))
    return reads


def _fastest(reads: list[Timing]) -> tuple[float, ...]:
    """The samples of the read whose median is the least."""
    return min(reads, key=lambda read: read.median).samples


def _per_token(taken: dict[str, Timing], name: str, new: int) -> list[float]:
    """Seconds a token by rounds, without the prompt and the first."""
    both = zip(taken[name].samples, taken[name + FIRST].samples, strict=True)
    return [(whole - first) / (new - 1) for whole, first in both]


def _spread(ratios: list[float]) -> dict[str, Any]:
    """Median and middle half of the rounds."""
    low, high = Timing(tuple(ratios), 0.0).quartiles
    return {"median": statistics.median(ratios), "quartiles": [low, high]}


def _show(spread: dict[str, Any], unit: str = "") -> str:
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f}{unit} ({low:.2f}-{high:.2f})"


def _report(found: dict[str, Any]) -> str:
    rows = []
    for name, share in found["share_of_limit"].items():
        taken, speedup = found["timings"][name], found["speedup_of_ours"].get(name)
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
                "" if speedup is None else _show(speedup, "x"),
                f"{found['differs'][name]:.0e}",
            )
        )
    header = (
        "", "ms", "middle half", "first", "ms a token", "tokens/s", "of the limit", "ours is",
        "differs",
    )  # fmt: skip
    rate = found["weight_bytes"] / found["read_s"]
    return "\n".join(
        [
            f"\n{found['case']}: {found['new_tokens']} tokens x {found['batch']} rows, "
            f"{found['dtype']}; {found['weight_bytes'] / 1e6:.0f} MB of weights read in "
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
    add("--repeats", type=int, default=None, help="rounds (10, or 3 with --quick)")
    add("--seconds", type=float, default=120.0, help="about the longest one case may take")
    add("--skip-capacity", action="store_true", help="leave out the larger cache")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, default=None, help="JSON to write")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 10
    return options


if __name__ == "__main__":
    main()
