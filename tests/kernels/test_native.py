"""The CPU kernels against float64: masks as programs, sizes around tiles, threads."""

import itertools
import operator
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits
from transformer_jax import (
    ALiBi,
    Causal,
    Dense,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
    dot_product_attention,
    explain_attention,
)
from transformer_jax.kernels import cpu
from transformer_jax.kernels.contract import Refused
from transformer_jax.kernels.program import program_of

pytestmark = [
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.skipif(isinstance(cpu.library(), str), reason=f"no kernels: {cpu.library()}"),
]


def run(program, q, k):
    """Evaluate a program for one pair in Python, register by register."""
    operations = (
        operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor,
        min, max, *(lambda x, y, f=f: int(f(x, y)) for f in
                    (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)),
        operator.lshift, operator.rshift,
    )  # fmt: skip
    numbers, constants = program.numbered(len(q), len(k), pairs=False)
    registers = [*q, *k, *constants]
    for at in range(0, len(numbers), 4):
        code, x, y, z = numbers[at : at + 4]
        x, y, z = registers[x], registers[y], registers[z]
        registers.append((z if x else y) if code == 16 else operations[code](x, y))
    return registers[-1]


@pytest.mark.slow_except("<lambda>6")
@pytest.mark.parametrize(
    "visible",
    [
        lambda q, k: (k[0] <= q[0]) & (k[0] >= 0),
        lambda q, k: ((k[0] <= q[0]) | (k[1] < 3)) & ~(q[1] == k[1]),
        lambda q, k: jnp.abs(q[0] - k[0]) <= 2,
        lambda q, k: jnp.where(q[1] == 1, k[0] > q[0], jnp.clip(k[0], 1, 2) == k[1]),
        lambda q, k: (k[0] << 1) - (q[0] >> 1) != -k[1] * 2,
        lambda q, k: k[0] >= 0,
        lambda q, k: q[0] == q[0],
        lambda q, k: jnp.asarray(True),
    ],
)
def test_native_mask_program_matches_predicate(visible):
    program = program_of(visible, 2, 2)
    for q in itertools.product(range(-1, 4), range(3)):
        for k in itertools.product(range(-1, 4), range(3)):
            wanted = visible(tuple(map(jnp.int32, q)), tuple(map(jnp.int32, k)))
            assert bool(run(program, q, k)) == bool(wanted), (q, k)


def test_unsupported_operations_are_rejected_with_reason():
    with pytest.raises(Refused, match=r"masks of 32-bit integers, but .* uses float32"):
        program_of(lambda q, k: q[0].astype(jnp.float32) < 0.5, 1, 1)
    with pytest.raises(Refused, match="does not support a mask that computes population_count"):
        program_of(lambda q, k: jax.lax.population_count(q[0]) < 2, 1, 1)
    x = jnp.zeros((1, 3, 1, 8))
    mask = Predicate(lambda q, k: jnp.sin(q - k) < 0)
    why = explain_attention(x, x, x, mask=mask)["native"]
    assert "supports only masks of 32-bit integers" in why
    with pytest.raises(NotImplementedError, match="native: supports only masks of 32-bit integers"):
        dot_product_attention(x, x, x, mask=mask, implementation="native")


def drawn(rng, T, S, N, K, H, Hv, B=2, dtype=np.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def double(q, k, v, seen, bias=0.0, softcap=None):
    """Return attention of float64 arrays, and the gradient of its sum times a fixed pattern."""
    q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]

    def attend(q, k, v):
        wide_k, wide_v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
        s = jnp.einsum("btnh,bsnh->bnts", q, wide_k) / np.sqrt(q.shape[3])
        s = softcap * jnp.tanh(s / softcap) if softcap else s
        s = jnp.where(seen, s + bias, -jnp.inf)
        top = jnp.where(seen.any(-1, keepdims=True), s.max(-1, keepdims=True), 0.0)
        p = jnp.where(seen, jnp.exp(s - jax.lax.stop_gradient(top)), 0.0)
        p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-300)
        return jnp.einsum("bnts,bsnh->btnh", p, wide_v)

    return attend(q, k, v), jax.grad(lambda *x: (pattern(attend(*x))).sum(), (0, 1, 2))(q, k, v)


def pattern(out):
    return out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)


def masks(rng, T, S):
    """Return masks of every kind with their visible pairs, bool[B or 1, N or 1, T, S]."""
    q, k = np.arange(T)[:, None], np.arange(S)
    ids = np.sort(rng.integers(0, 3, (2, max(T, S))), axis=1).astype(np.int32)
    lengths = rng.integers(1, S + 1, 2)
    dense = rng.random((2, 1, T, S)) < 0.3
    same = ids[:, None, :T, None] == ids[:, None, None, :S]
    return {
        "none": (None, np.ones((T, S), bool)),
        "causal": (Causal(), k <= q),
        "window": (Window(5, 2), (q - k < 5) & (k - q < 2)),
        "documents": (Causal() & Segments(ids[:, :T], ids[:, :S]), same & (k <= q)),
        "padding": (Padding(k[None] < lengths[:, None]), (k < lengths[:, None])[:, None, None]),
        "prefix or not": (
            Prefix(np.array([2, 3], np.int32)) | ~Causal(),
            (k < np.array([2, 3])[:, None])[:, None, None] | (k > q) | (k <= q) & False,
        ),
        "dense": (Dense(dense), dense),
    }  # fmt: skip


CASES = [
    # T, S, N, K, H, Hv: around panels of 16 and 32, groups of 6 and 12 rows, tiles of 96, 128, 256
    (1, 1, 1, 1, 1, 1), (5, 7, 2, 1, 3, 5), (12, 32, 2, 2, 16, 16), (13, 33, 3, 1, 17, 31),
    (97, 96, 2, 2, 8, 40), (96, 257, 4, 2, 32, 8), (100, 130, 2, 1, 40, 64), (1, 300, 4, 2, 64, 64),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("(1, 300, 4, 2, 64, 64)")
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_every_mask_matches_float64_near_tile_boundaries(sizes, rng):
    T, S = sizes[:2]
    arrays = drawn(rng, *sizes)
    for name, (mask, seen) in masks(rng, T, S).items():
        seen = np.broadcast_to(seen, (2, 1, T, S))

        def attend(*arrays, mask=mask):
            return dot_product_attention(*arrays, mask=mask, implementation="native")

        with jax.enable_x64(True):
            wanted, gradients = jax.tree.map(np.asarray, double(*arrays, seen))
        assert_near(attend(*arrays), wanted, FORWARD_F32, name)
        found = jax.grad(lambda *x, f=attend: pattern(f(*x)).sum(), (0, 1, 2))(*arrays)
        # compared together: gradients of a query that sees one key are zero up to rounding
        one, own = (np.concatenate([np.ravel(x) for x in tree]) for tree in (found, gradients))
        assert_near(one, own, GRADIENT_F32, name)


def test_results_do_not_depend_on_thread_count(rng):
    """Ten calls, whose tiles are distributed dynamically over threads, are bit-identical."""
    arrays = drawn(rng, 300, 300, 4, 2, 16, 16)
    call = jax.jit(
        jax.value_and_grad(
            lambda *x: dot_product_attention(*x, mask=Causal(), implementation="native").sum(),
            (0, 1, 2),
        )
    )
    first = call(*arrays)
    for _ in range(9):
        jax.tree.map(assert_same_bits, call(*arrays), first)


@pytest.mark.slow
def test_softcapped_scores_with_slopes_match_float64(rng):
    arrays = drawn(rng, 60, 70, 4, 2, 16, 8)
    bias = ALiBi(np.array([0.5, 0.25, 0.1, 0.0]))
    away = np.abs(np.arange(60)[:, None] - np.arange(70))
    wide = -np.asarray(bias.slopes, np.float64)[:, None, None] * away
    with jax.enable_x64(True):
        wanted, gradients = jax.tree.map(
            np.asarray, double(*arrays, np.ones((1, 1, 60, 70), bool), wide[None], 1.5)
        )

    def attend(*x):
        return dot_product_attention(*x, bias=bias, softcap=1.5, implementation="native")

    assert_near(attend(*arrays), wanted, FORWARD_F32)
    found = jax.grad(lambda *x: pattern(attend(*x)).sum(), (0, 1, 2))(*arrays)
    for one, own in zip(found, gradients, strict=True):
        assert_near(one, own, GRADIENT_F32)


FEW = [
    # B, T, S, N, K, H, Hv: of 1, 2, 4 rows and more; rows shorter than a register; several chunks
    (1, 1, 1, 1, 1, 1, 1), (2, 1, 33, 4, 2, 17, 24), (1, 3, 100, 5, 5, 3, 70),
    (2, 4, 257, 8, 2, 64, 20), (1, 1, 700, 3, 1, 130, 16), (1, 2, 300, 42, 14, 64, 64),
]  # fmt: skip


def few_arrays(rng, sizes, dtype):
    B, T, S, N, K, H, Hv = sizes
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def same_as_oracle(arrays, seen, dtype="float32", bias=None, **rest):
    """Compare output and lse with float64 of the same rounded inputs."""
    q, k, v = map(oracle.double, arrays)
    wanted = oracle.attention(q, k, v, mask=seen, bias=bias, **rest)

    def check(out, lse):
        assert_near(out, wanted.out, FEW_TOLERANCES[dtype])
        masked = np.isneginf(wanted.lse)
        np.testing.assert_array_equal(np.isneginf(lse), masked)
        assert_near(np.where(masked, 0, lse), np.where(masked, 0, wanted.lse), FORWARD_F32)

    return check


# inputs are already rounded, so only the output is rounded
FEW_TOLERANCES = {"float32": FORWARD_F32, "bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.slow_except(
    "neon-(1, 1, 1, 1, 1, 1, 1)-float16",
    "neon-(1, 3, 100, 5, 5, 3, 70)-float32",
    "neon-(2, 1, 33, 4, 2, 17, 24)-float16",
    "neon-(2, 1, 33, 4, 2, 17, 24)-float32",
)
@pytest.mark.parametrize("dtype", FEW_TOLERANCES)
@pytest.mark.parametrize("sizes", FEW, ids=str)
def test_few_queries_over_cache_match_float64(sizes, dtype, instructions, rng):
    """Rows of a cache are filled to different lengths; one is empty."""
    B, T, S, N, *_ = sizes
    arrays = few_arrays(rng, sizes, dtype)
    filled = np.array([S // 2 + 1, 0][:B])
    k_positions = np.where(np.arange(S) < filled[:, None], np.arange(S), -1).astype(np.int32)
    q_positions = (filled[:, None] - T + np.arange(T)).clip(0).astype(np.int32)
    seen = oracle.allowed(oracle.causal(), q_positions, k_positions, batch=B, heads=N)
    found = dot_product_attention(
        *arrays, mask=Causal(), q_positions=q_positions, k_positions=k_positions,
        return_lse=True, implementation="native",
    )  # fmt: skip
    same_as_oracle(arrays, seen, dtype)(*found)


@pytest.mark.slow_except("neon")
def test_every_option_works_with_few_queries(instructions, rng):
    sizes = B, T, S, N, *_ = 2, 3, 133, 10, 5, 40, 36
    arrays = few_arrays(rng, sizes, jnp.float32)
    bias = jnp.asarray(rng.normal(size=(1, N, T, S)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32)
    dense = rng.random((1, N, T, S)) < 0.2
    options = dict(softcap=2.0, sinks=sinks, scale=0.7)
    for shape in ((1, N, T, S), (1, 1, T, S), (1, N, 1, S), (1, N, T, 1)):
        part = bias[tuple(slice(n) for n in shape)]
        found = dot_product_attention(
            *arrays, mask=Dense(dense), bias=part, **options, return_lse=True,
            implementation="native",
        )  # fmt: skip
        wide = np.broadcast_to(oracle.double(part), bias.shape)
        same_as_oracle(arrays, np.broadcast_to(dense, (B, N, T, S)), bias=wide, **options)(*found)
    slopes = np.linspace(0.01, 0.5, N).astype(np.float32)
    positions = np.arange(S - T, S, dtype=np.int32)
    found = dot_product_attention(
        *arrays, bias=ALiBi(slopes), q_positions=positions, return_lse=True, implementation="native"
    )
    same_as_oracle(arrays, None, bias=oracle.alibi(slopes, positions, np.arange(S)))(*found)


@pytest.mark.slow
def test_few_queries_drop_the_same_weights_as_xla(instructions, rng):
    arrays = few_arrays(rng, (2, 3, 70, 4, 2, 16, 16), jnp.float32)
    options = dict(dropout_rate=0.4, dropout_key=jax.random.key(3))
    one, own = (
        dot_product_attention(*arrays, **options, implementation=name) for name in ("native", "xla")
    )
    assert_near(one, np.asarray(own, np.float64), FORWARD_F32)


@pytest.mark.slow_except("avx2-40--inf", "neon-40-nan", "neon-8--inf", "neon-8-inf")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("H", [8, 40])
def test_few_queries_output_nan_for_visible_nonfinite_values(bad, H, instructions, rng):
    """A key of head 0 and a value of head 1 are bad; each query sees some or none of them."""
    B, T, S, N, K = 1, 3, 100, 4, 2
    q, k, v = few_arrays(rng, (B, T, S, N, K, H, H), jnp.float32)
    k, v = k.at[0, 50, 0, 3].set(bad), v.at[0, 51, 1, H - 1].set(bad)
    seen = np.ones((1, 1, T, S), bool)
    seen[..., 0, 50], seen[..., 1, 51], seen[..., 2, 50:52] = False, False, False
    out, lse = dot_product_attention(
        q, k, v, mask=Dense(seen), return_lse=True, implementation="native"
    )
    lost = np.zeros((B, T, N), bool)
    lost[:, 1, :2], lost[:, 0, 2:] = True, True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(lost[..., None], out.shape))
    np.testing.assert_array_equal(np.isnan(lse), lost)
    clean = [np.where(np.isfinite(x), x, 0) for x in (q, k, v)]
    wanted = oracle.attention(*clean, mask=np.broadcast_to(seen, (B, N, T, S)))
    assert_near(np.where(lost[..., None], 0, out), np.where(lost[..., None], 0, wanted.out),
                FORWARD_F32)  # fmt: skip


@pytest.mark.slow
def test_few_queries_do_not_read_unfilled_cache_slots(rng):
    """Empty slots change no bit, and no program sorts tiles."""
    sizes = 1, 1, 640, 4, 2, 64, 64
    q, k, v = few_arrays(rng, sizes, jnp.float32)
    k_positions = jnp.where(jnp.arange(640) < 100, jnp.arange(640), -1)

    @jax.jit
    def attend(q, k, v, q_positions, k_positions):
        return dot_product_attention(
            q, k, v, mask=Causal(), q_positions=q_positions, k_positions=k_positions,
            implementation="native",
        )  # fmt: skip

    positions = jnp.array([99]), k_positions
    junk = [x.at[:, 100:].set(jnp.nan) for x in (k, v)]
    assert_same_bits(attend(q, *junk, *positions), attend(q, k, v, *positions))
    assert " sort(" not in attend.lower(q, k, v, *positions).compile().as_text()


@pytest.mark.slow
def test_library_built_from_different_sources_is_rejected_with_warning(tmp_path):
    """A copy of the sources gets another comment; the library is that of the original files."""
    copy = tmp_path / "cpu"
    shutil.copytree(Path(cpu.__file__).parent, copy)
    code = (
        "from transformer_jax.kernels import cpu\n"
        f"cpu.__file__ = {str(copy / '__init__.py')!r}\nprint(cpu.library())"
    )
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        outputs.append((done.stdout, done.stderr))
        with open(copy / "source" / "mask.h", "a") as file:
            file.write("// another\n")
    assert outputs[0][0].startswith("<CDLL") and not outputs[0][1]
    assert outputs[1][0] == "was compiled from different sources: install the package again\n"
    assert (
        "UserWarning: kernels/cpu/_native.so was compiled from different sources" in outputs[1][1]
    )


@pytest.mark.slow
@pytest.mark.long_except("sse9")
@pytest.mark.parametrize("name", ["sse9", "plain"])
def test_environment_variable_selects_instruction_set(name):
    code = (
        "import jax.numpy as jnp\nfrom transformer_jax import explain_attention\n"
        "from transformer_jax.kernels import cpu\n"
        "x = jnp.zeros((1, 2, 1, 4))\nprint(explain_attention(x, x, x)['native'])\n"
        "print(isinstance(cpu.library(), str) or cpu.instructions())"
    )
    environment = os.environ | {"TRANSFORMER_JAX_NATIVE": name}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    wanted = {
        "sse9": "TRANSFORMER_JAX_NATIVE is 'sse9': must be 0, 1 or one of avx512, avx2, neon, plain"
        "\nTrue\n",
        "plain": "None\nplain\n",
    }[name]
    assert out.stdout == wanted, out.stderr


@pytest.mark.slow
def test_missing_native_library_reports_reason():
    code = (
        "import jax.numpy as jnp\nfrom transformer_jax import explain_attention\n"
        "x = jnp.zeros((1, 2, 1, 4))\nprint(explain_attention(x, x, x)['native'])"
    )
    environment = os.environ | {"TRANSFORMER_JAX_NATIVE": "0"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert out.stdout == "TRANSFORMER_JAX_NATIVE is 0\n", out.stderr
