"""Random attention calls: the CPU kernels against NumPy in float64.

    python -m tests.kernels.fuzz_native --calls 5000 --seed 0 --processes 2

Each program (a choice of sizes and options) is compiled once and called with several draws of its
arrays: values, contents of masks, positions. Results and all gradients are compared. An error
counts if it exceeds the rounding errors of the largest sum, see `tolerances`.
"""

import argparse
import collections
import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import oracle
from tests.support.tolerances import GRADIENT_F32
from transformer_jax import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Predicate,
    Prefix,
    RelativeBias,
    Segments,
    Window,
    dot_product_attention,
)
from transformer_jax.kernels import Target, using

CALLS_OF_A_PROGRAM = 20  # a program compiles in a second, a call takes 5 ms
UNITS = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}  # relative error of one rounding
PREDICATES = {
    "every third": (lambda q, k: (q + 2 * k) % 3 != 0, lambda b, n, q, k: (q + 2 * k) % 3 != 0),
    "bits": (lambda q, k: (q ^ k) & 2 == 0, lambda b, n, q, k: (q ^ k) & 2 == 0),
    "near": (lambda q, k: jnp.abs(q - k) < 4, lambda b, n, q, k: abs(q - k) < 4),
}
EVERYTHING = lambda b, n, q, k: True  # noqa: E731


@dataclass(frozen=True)
class Kernels:
    """The kernels that compute a call, and the options that they support."""

    implementation: str
    target: Target | None = None  # the target, if not the device
    widths: tuple[int, ...] = (*range(1, 20), 32, 33, 64)
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "float16")
    scales: tuple[float | str | None, ...] = (None, None, 0.3, "array")
    biases: tuple[str, ...] = ("none", "none", "array", "alibi", "alibi learned", "t5")


NATIVE = Kernels("native")


class Program:
    """Sizes and options of a call; `call` draws its arrays and returns the errors."""

    def __init__(self, rng, kernels=NATIVE):
        self.rng, self.kernels = rng, kernels
        pick = lambda *of: of[rng.integers(len(of))]  # noqa: E731
        chance = lambda p: bool(rng.random() < p)  # noqa: E731
        self.B, self.K = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.N = self.K * int(rng.integers(1, 4))
        self.T = 1 if chance(0.25) else int(pick(*range(2, 20), 97, 130))
        longest = 300 if self.T < 3 and chance(0.5) else 40
        self.S = int(rng.integers(1, longest))
        self.H, self.Hv = (int(pick(*kernels.widths)) for _ in range(2))
        self.dtype = pick(*kernels.dtypes)
        self.scale = pick(*kernels.scales)
        self.softcap = pick(None, None, 1.5)
        self.rate = pick(0.0, 0.0, 0.25)
        self.sinks = chance(0.3)
        self.bias = pick(*kernels.biases)
        self.bias_dtype = pick("float32", self.dtype)
        self.bias_shape = tuple(
            1 if chance(0.4) else n for n in (self.B, self.N, self.T, self.S)
        )  # fmt: skip
        self.positions = pick("none", "none", "offset", "rows", "slots")
        self.nonfinite = chance(0.15)
        self.masks = [
            (pick("causal", "window", "padding", "segments", "prefix", "dense", *PREDICATES),
             pick("and", "or"), chance(0.2), int(rng.integers(1, 12)), chance(0.5))
            for _ in range(rng.integers(0, 4))
        ]  # fmt: skip
        self.compiled = jax.jit(self.attend)

    def options(self):
        """Return the names of the enabled options."""
        found = [self.dtype, *("mask " + name for name, *_ in self.masks)]
        if not self.masks:
            found.append("no mask")
        for name in ("sinks", "softcap", "nonfinite"):
            found += [name] if getattr(self, name) else []
        found += ["dropout"] * bool(self.rate) + ["grouped heads"] * (self.N > self.K)
        found += [f"bias {self.bias}"] * (self.bias != "none") + ["T = 1"] * (self.T == 1)
        found += [f"positions {self.positions}"] * (self.positions != "none")
        return found + ["scale that is an array"] * (self.scale == "array")

    def attend(self, arrays, fixed, mask, cotangents):
        """Return out, lse and the gradients of `arrays`, computed by the kernels."""

        def forward(arrays):
            bias = arrays.get("bias", fixed.get("bias"))
            if self.bias == "t5":
                bias = RelativeBias(arrays["bias"], bidirectional=True, max_distance=20)
            elif self.bias.startswith("alibi"):
                bias = ALiBi(bias)
            return dot_product_attention(
                arrays["query"], arrays["key"], arrays["value"],
                mask=mask, bias=bias, softcap=self.softcap, sinks=arrays.get("sinks"),
                scale=fixed["scale"] if self.scale == "array" else self.scale,
                q_positions=fixed.get("q"), k_positions=fixed.get("k"),
                dropout_rate=self.rate, dropout_key=fixed["dropout"] if self.rate else None,
                return_lse=True, implementation=self.kernels.implementation,
            )  # fmt: skip

        results, backward = jax.vjp(forward, arrays)
        return *results, backward(cotangents)[0]

    def draw_mask(self, q, k):
        """Return a mask with random content, and its visible pairs, bool[B, N, T, S]."""
        rng, longest = self.rng, max(q.max(), k.max()) + 1
        mask, seen = None, None
        for name, join, negated, number, by_head in self.masks:
            heads = 1
            if name == "causal":
                one, says = Causal(), oracle.causal()
            elif name == "window":
                one, says = Window(number, number // 2 + 1), oracle.window(number, number // 2 + 1)
            elif name == "padding":
                valid = rng.random((self.B, longest)) < 0.7
                one, says = Padding(jnp.asarray(valid)), oracle.padding(valid)
            elif name == "segments":
                ids = np.sort(rng.integers(0, 3, (self.B, longest)), axis=1).astype(np.int32)
                one, says = Segments(jnp.asarray(ids)), oracle.segments(ids)
            elif name == "prefix":
                lengths = rng.integers(0, longest + 1, self.B).astype(np.int32)
                one, says = Prefix(jnp.asarray(lengths)), oracle.prefix(lengths)
            elif name == "dense":
                heads = self.N if by_head else 1
                array = rng.random((self.B, heads, longest, longest)) < 0.4
                one, says = Dense(jnp.asarray(array)), oracle.dense(array)
            else:
                one, says = Predicate(PREDICATES[name][0]), PREDICATES[name][1]
            here = oracle.allowed(says, q, k, batch=self.B, heads=heads)
            if negated:
                one, here = ~one, ~here
            if mask is None:
                mask, seen = one, here
            elif join == "and":
                mask, seen = mask & one, seen & here
            else:
                mask, seen = mask | one, seen | here
        empty = oracle.allowed(EVERYTHING, q, k, batch=self.B)
        seen = empty if seen is None else seen & empty
        return mask, np.broadcast_to(seen, (self.B, self.N, self.T, self.S))

    def draw_positions(self):
        """Return the positions of queries and keys: [T] or [B, T], and [S] or [B, S]."""
        rng, q, k = self.rng, np.arange(self.T), np.arange(self.S)
        if self.positions == "offset":
            q = q + rng.integers(0, self.S + 1)
        elif self.positions == "rows":
            q = q + rng.integers(0, self.S + 1, (self.B, 1))
        elif self.positions == "slots":  # a ring buffer with empty slots
            q = q + rng.integers(0, self.S + 1, (self.B, 1))
            k = np.stack([rng.permutation(self.S) for _ in range(self.B)])
            k = np.where(rng.random(k.shape) < 0.3, -1, k)
        return q.astype(np.int32), k.astype(np.int32)

    def call(self):
        """Draw arrays; return the name of the worst result and its relative error."""
        rng, B, T, S, N, K, H, Hv = (
            self.rng, self.B, self.T, self.S, self.N, self.K, self.H, self.Hv
        )  # fmt: skip
        normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        rounded = lambda x, dtype: jnp.asarray(x, dtype)  # noqa: E731
        q_at, k_at = self.draw_positions()
        mask, seen = self.draw_mask(q_at, k_at)
        arrays = {
            "query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, Hv)
        }  # fmt: skip
        if self.nonfinite:
            for x in arrays.values():
                x[rng.random(x.shape) < 0.1 / x.shape[-1]] = rng.choice([np.nan, np.inf, -np.inf])
        arrays = {name: rounded(x, self.dtype) for name, x in arrays.items()}
        bad = {name: ~np.isfinite(oracle.double(x)).all(-1) for name, x in arrays.items()}
        clean = {
            name: np.where(bad[name][..., None], 0, oracle.double(x)) for name, x in arrays.items()
        }
        fixed = {"scale": jnp.float32(0.4), "dropout": jax.random.key(int(rng.integers(2**31)))}
        if self.positions != "none":
            fixed |= {"q": jnp.asarray(q_at), "k": jnp.asarray(k_at)}
        if self.sinks:
            arrays["sinks"] = rounded(normal(N), "float32")
        wide_q, wide_k = np.broadcast_to(q_at, (B, T)), np.broadcast_to(k_at, (B, S))
        away = -np.abs(wide_q[:, :, None] - wide_k[:, None]).astype(float)[:, None]  # [B, 1, T, S]
        bias = None
        if self.bias == "array":
            arrays["bias"] = rounded(normal(*self.bias_shape), self.bias_dtype)
            bias = oracle.double(arrays["bias"])
        elif self.bias.startswith("alibi"):
            slopes = rounded(np.abs(normal(N)) / 8, "float32")
            (arrays if self.bias == "alibi learned" else fixed)["bias"] = slopes
            bias = oracle.double(slopes)[:, None, None] * away
        elif self.bias == "t5":
            arrays["bias"] = rounded(normal(8, N), "float32")
            far = range(-1 - int(wide_q.max()), S + 1)
            where = {d: oracle.t5_bucket(d, bidirectional=True, buckets=8, longest=20) for d in far}
            buckets = np.vectorize(where.get, otypes=[int])(wide_k[:, None] - wide_q[:, :, None])
            bias = np.moveaxis(oracle.double(arrays["bias"])[buckets], -1, 1)
        do, dlse = rounded(normal(B, T, N, Hv), self.dtype), jnp.asarray(normal(B, T, N))
        where = self.kernels.target
        with contextlib.nullcontext() if where is None else using(where):
            found = jax.device_get(self.compiled(arrays, fixed, mask, (do, dlse)))

        # the expected results, by definition
        wide_bad = np.repeat(bad["key"] | bad["value"], N // K, axis=2)  # [B, S, N]
        lost = (seen & np.moveaxis(wide_bad, 1, 2)[:, :, None]).any(-1)
        lost |= np.moveaxis(bad["query"], 1, 2) & seen.any(-1)
        lost = np.moveaxis(lost, 1, 2)  # [B, T, N]
        keep = None
        if self.rate:
            words = np.asarray(jax.random.key_data(fixed["dropout"])).astype(np.uint64)
            keep = oracle.dropout_keep(words, self.rate, (B, N, T, S))
        scale = 0.4 if self.scale == "array" else self.scale
        options = {
            "mask": seen, "bias": bias, "scale": scale, "softcap": self.softcap, "keep": keep,
            "sinks": arrays.get("sinks"),
        }  # fmt: skip
        inputs = clean["query"], clean["key"], clean["value"]
        wanted = oracle.attention(*inputs, **options)
        passed = np.where(lost[..., None], 0, oracle.double(do)), np.where(lost, 0, dlse)
        gradients = oracle.attention_gradients(*inputs, *passed, **options)
        pairs = gradients.scores
        expected = {
            "out": np.where(lost[..., None], np.nan, wanted.out),
            "lse": np.where(lost, np.nan, wanted.lse),
            "query": gradients.query, "key": gradients.key, "value": gradients.value,
            "sinks": gradients.sinks,
        }  # fmt: skip
        if self.bias == "array":
            expected["bias"] = oracle.sum_to(pairs, self.bias_shape)
        elif self.bias == "alibi learned":
            expected["bias"] = (pairs * away).sum((0, 2, 3))
        elif self.bias == "t5":
            expected["bias"] = np.zeros((8, N))
            np.add.at(expected["bias"], buckets, np.moveaxis(pairs, 1, -1))
        found = {"out": found[0], "lse": found[1]} | found[2]
        sizes = self.sizes(clean, wanted.weights, keep, *passed, scale, away)
        return max(
            (compared(found[name], expected[name], sizes[name], self.dtype), name) for name in found
        )

    def sizes(self, clean, weights, keep, do, dlse, scale, away):
        """Return, for each result, the largest sum of the absolute values of its terms."""
        group = self.N // self.K
        k, v = (np.repeat(np.abs(clean[name]), group, axis=2) for name in ("key", "value"))
        q, do = np.abs(clean["query"]), np.abs(do)
        kept = weights if keep is None else weights * keep
        out = np.einsum("bnts,bsnh->btnh", kept, v)
        D = np.moveaxis((do * out).sum(-1) + np.abs(dlse), 1, 2)[..., None]
        dp = np.einsum("btnh,bsnh->bnts", do, v) * (1 if keep is None else keep)
        ds = weights * (dp + D)
        factor = 1 / np.sqrt(self.H) if scale is None else scale
        grouped = lambda x: x.reshape(*x.shape[:2], self.K, group, -1).sum(3)  # noqa: E731
        bias = ds
        if self.bias == "array":
            bias = oracle.sum_to(ds, self.bias_shape)
        elif self.bias != "none":
            bias = (ds * (-away if self.bias.startswith("alibi") else 1)).sum((0, 2, 3))
        return {
            "out": out.max(), "lse": 4.0,
            "query": factor * np.einsum("bnts,bsnh->btnh", ds, k).max(),
            "key": factor * grouped(np.einsum("bnts,btnh->bsnh", ds, q)).max(),
            "value": grouped(np.einsum("bnts,btnh->bsnh", kept, do)).max(),
            "bias": bias.max(), "sinks": D.sum((0, 2, 3)).max(),
        }  # fmt: skip


def compared(found, wanted, size, dtype):
    """Return the largest error relative to the allowed one; inf if NaN or -inf do not match."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found = found.astype(np.float64)
    special = ~np.isfinite(wanted)
    if not np.array_equal(found[special], wanted[special], equal_nan=True):
        return np.inf
    error = np.abs(found[~special] - wanted[~special])
    unit = UNITS[dtype]
    rounding = unit * np.abs(wanted[~special]) + (2**-24 if dtype == "float16" else 0)
    # D of bfloat16 comes from rounded outputs
    allowed = rounding + (GRADIENT_F32 + 2 * unit) * max(size, 1e-3)
    return float(np.nan_to_num(error / allowed, nan=np.inf).max(initial=0))


def fuzz(calls, seed, of_a_program=CALLS_OF_A_PROGRAM, kernels=NATIVE):
    """Make calls; return how often each option was on, the largest error, and the failures.

    Rejected calls are counted by their reason, and not as calls.
    """
    options, worst, failed = collections.Counter(), 0.0, []
    for start in range(0, calls, of_a_program):
        program = Program(np.random.default_rng([seed, start]), kernels)
        for at in range(start, min(calls, start + of_a_program)):
            try:
                error, name = program.call()
            except NotImplementedError as refused:
                options[f"refused: {refused}"] += 1
                continue
            options.update(program.options())
            worst = max(worst, error)
            if error > 1:
                settings = {
                    k: v
                    for k, v in vars(program).items()
                    if k not in ("rng", "compiled", "kernels")
                }
                failed.append(
                    f"seed {seed}, call {at}: {name} {error:.3g} of the allowed: {settings}"
                )
        program.compiled.clear_cache()
    return options, worst, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    start = time.perf_counter()
    if arguments.processes > 1:
        each = -(-arguments.calls // arguments.processes)
        running = [
            subprocess.Popen([sys.executable, "-m", "tests.kernels.fuzz_native", "--calls",
                              str(each), "--seed", str(arguments.seed * 1000 + p)])
            for p in range(arguments.processes)
        ]  # fmt: skip
        sys.exit(max(process.wait() for process in running))
    jax.config.update("jax_disable_most_optimizations", True)
    from transformer_jax.kernels import cpu

    options, worst, failed = fuzz(arguments.calls, arguments.seed)
    seconds = time.perf_counter() - start
    print(
        f"{arguments.calls} calls of seed {arguments.seed} by {cpu.instructions()}, "
        f"jax {jax.__version__}, "
        f"in {seconds:.0f} s: {len(failed)} wrong, largest error {worst:.2f} of the allowed"
    )
    print("calls with each option:", ", ".join(f"{k} {v}" for k, v in sorted(options.items())))
    print("\n".join(failed[:20]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
