"""Cases, float64 formulas and runs of the Hopper kernels, shared by their tests."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import HOPPER_ROUNDS, Bfloat16Suite
from tests.support.tolerances import largest_error
from transformer_jax.kernels import Target, hopper
from transformer_jax.kernels.contract import Operands, Problem, Residuals, TileLists
from transformer_jax.kernels.dropout import keep
from transformer_jax.kernels.nvidia.schedule import prepare
from transformer_jax.kernels.program import program_of

program = functools.partial(program_of, num_q=3, num_k=2)
"""Create the program of a mask from a function of three query vectors and two key vectors."""

INTERPRETS = hopper.refuse(
    Target("hopper", True), False, *[jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)] * 3
)
needs_interpreter = pytest.mark.skipif(INTERPRETS is not None, reason=str(INTERPRETS))

NEAR = 6e-3  # relative to the largest value: products of bfloat16 weights, summed in float32
EXACT = 3e-6  # sums in float32


# Masks; the vectors are position and document.


@program
def causal(q, k):
    return (k[0] >= 0) & (q[0] >= k[0])


@program
def window_in_document(q, k):
    return causal(q, k) & (q[0] - k[0] < 101) & (q[1] == k[1])


@program
def without_a_key(q, k):
    return (k[0] >= 0) & (k[0] != 50) & (q[0] > -1000)


@program
def prefix_or_causal(q, k):
    return (k[0] >= 0) & ((k[0] < 71) | ~(q[0] < k[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    B: int = 1
    T: int = 167
    S: int = 211
    N: int = 2
    K: int = 1
    H: int = 64
    Hv: int = 64
    dtype: str = "bfloat16"
    visible: object = causal
    scale: float = 0.125
    softcap: float | None = None
    dropout_rate: float = 0.0
    bias: tuple[int, ...] | None = None  # shape; the last axes are T and S, or 1
    bias_dtype: str = "float32"
    slopes: bool = False
    sinks: bool = False

    @property
    def problem(self):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        softcap, rate = self.softcap, self.dropout_rate
        return Problem(self.scale, softcap, rate, self.visible, interpret=interpret)


def up(size, tile=128):
    return -(-size // tile) * tile


def draw(case, seed=0):
    """Draw padded operands and do; the queries are at the last positions of the keys."""
    c, rng = case, np.random.default_rng(seed)
    T, S = up(c.T), up(c.S)

    def padded(length, *shape, fill=0.0, dtype=c.dtype):
        array = rng.standard_normal((c.B, length, *shape))
        array = np.pad(array, ((0, 0), (0, up(length) - length), (0, 0), (0, 0)))
        return jnp.asarray(array, dtype)

    def vectors(length, end, first):
        position = np.arange(end) + first
        documents = np.arange(end) // 90 + np.arange(c.B)[:, None]
        position = np.where(np.arange(end) < length, position, -1)
        return jnp.asarray(position[None], jnp.int32), jnp.asarray(documents, jnp.int32)

    bias = None
    if c.bias:
        b, n, t, s = c.bias
        bias = np.zeros((b, n, up(t) if t > 1 else 1, up(s) if s > 1 else 1))
        bias[:, :, :t, :s] = rng.standard_normal(c.bias)
        bias = jnp.asarray(bias, c.bias_dtype)
    words = rng.integers(0, 2**32, (2, c.B, c.N), dtype=np.uint32)
    operands = Operands(
        query=padded(c.T, c.N, c.H),
        key=padded(c.S, c.K, c.H),
        value=padded(c.S, c.K, c.Hv),
        q_vectors=vectors(T, T, c.S - c.T),
        k_vectors=vectors(c.S, S, 0),
        bias=bias,
        slopes=jnp.asarray(0.03 * np.arange(1, c.N + 1)[None], jnp.float32) if c.slopes else None,
        sinks=jnp.asarray(np.linspace(-1, 2, c.N)[None], jnp.float32) if c.sinks else None,
        dropout=jnp.asarray(words) if c.dropout_rate else None,
    )
    return operands, padded(c.T, c.N, c.Hv)


def seen_by(case, operands):  # bool[B, 1, T, S]
    if case.visible is None:
        return np.ones((case.B, 1, operands.query.shape[1], operands.key.shape[1]), bool)
    q = tuple(np.asarray(v)[:, None, :, None] for v in operands.q_vectors)
    k = tuple(np.asarray(v)[:, None, None, :] for v in operands.k_vectors)
    mask = np.asarray(case.visible(q, k))
    return np.broadcast_to(mask, (case.B, *mask.shape[1:]))


def lists_of(mask, rows, columns):  # bool[B, N or 1, T, S] or its transpose
    B, N, T, S = mask.shape
    tiles = mask.reshape(B, N, T // rows, rows, S // columns, columns)
    full, some = tiles.all((3, 5)), tiles.any((3, 5))
    kind = np.where(full, 0, np.where(some, 1, 2))
    order = np.argsort(kind, axis=-1, kind="stable")
    seen = some.sum(-1)
    last = np.take_along_axis(order, np.maximum(seen - 1, 0)[..., None], -1)
    order = np.where(
        np.arange(order.shape[-1]) < seen[..., None], order, last * (seen > 0)[..., None]
    )
    return prepare(TileLists(*(jnp.asarray(x, jnp.int32) for x in (order, full.sum(-1), seen))))


def formulas(operands, mask, do, *, scale, softcap=None, rate=0.0, dlse=0.0):
    """Evaluate the contract's formulas in float64; the mask broadcasts to [B, N, T, S]."""
    o = operands
    wide = lambda x: np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)  # noqa: E731
    q, do = wide(o.query), wide(do)
    (B, T, N, _), (_, S, K, _) = q.shape, o.key.shape
    k, v = (np.repeat(wide(x), N // K, axis=2) for x in (o.key, o.value))
    s = np.einsum("btnh,bsnh->bnts", q, k) * scale
    slope = np.ones_like(s)
    if softcap:
        tanh = np.tanh(s / softcap)
        s, slope = softcap * tanh, 1 - tanh**2
    if o.bias is not None:
        s = s + wide(o.bias)
    far = np.abs(np.asarray(o.q_vectors[0])[:, :, None] - np.asarray(o.k_vectors[0])[:, None])
    if o.slopes is not None:
        s = s - wide(o.slopes)[:, :, None, None] * far[:, None]
    s = np.where(mask, s, -np.inf)
    dead = np.isneginf(s.max(-1))
    sink = -np.inf if o.sinks is None else wide(o.sinks)[:, :, None]
    m = np.where(dead, 0, np.maximum(s.max(-1), sink))
    total = np.exp(s - m[..., None]).sum(-1) + np.where(dead, 1, np.exp(sink - m))
    p = np.exp(s - m[..., None]) / total[..., None]
    f = np.ones_like(p)
    if rate:
        rows, columns = (jnp.arange(n, dtype=jnp.uint32) for n in (T, S))
        a, b = (word[:, :, None, None] for word in o.dropout)
        f = np.asarray(keep(a, b, rows[None, None, :, None], columns[None, None, None, :], rate))
        f = f / (1 - rate)
    out = np.einsum("bnts,bsnh->btnh", p * f, v)
    D = np.where(dead, 0, np.einsum("btnh,btnh->bnt", out, do) - dlse)
    ds = p * (f * np.einsum("btnh,bsnh->bnts", do, v) - D[..., None])
    du = ds * slope * scale
    by_group = lambda x: x.reshape(B, S, K, N // K, -1).sum(3)  # noqa: E731
    return {
        "out": out,
        "row_max": np.where(dead, -np.inf, m),
        "log_sum": np.log(total),
        "D": D,
        "dq": np.einsum("bnts,bsnh->btnh", du, k),
        "slope_rows": -(ds * far[:, None]).sum(-1),
        "dk": by_group(np.einsum("bnts,btnh->bsnh", du, q)),
        "dv": by_group(np.einsum("bnts,btnh->bsnh", p * f, do)),
        "ds": ds,
    }


def saved_of(results, do):
    """Return the exact residuals that the backward kernels read."""
    row_max = np.where(np.isneginf(results["row_max"]), np.inf, results["row_max"])
    rows = (row_max, results["log_sum"], results["D"])
    return Residuals(do, *(jnp.asarray(x, jnp.float32) for x in rows))


def oracle(case, operands, do):
    c = case
    mask = seen_by(c, operands)
    results = formulas(operands, mask, do, scale=c.scale, softcap=c.softcap, rate=c.dropout_rate)
    wide = np.asarray(jnp.asarray(do).astype(jnp.float32))
    return results, saved_of(results, jnp.asarray(wide))


def run_forward(case, operands, plan=None, kernel=hopper.forward):
    plan = plan or hopper.blocks("forward", case.H, case.Hv)
    lists = lists_of(seen_by(case, operands), plan.q, plan.k)
    forward = jax.jit(functools.partial(kernel, case.problem, blocks=plan))
    return dict(zip(("out", "row_max", "log_sum"), forward(operands, lists), strict=True))


def draw_few(case, seed=0, lengths=None):
    """Draw operands of T unpadded queries; vector 2 of the queries is the length of their row."""
    operands = draw(case, seed)[0].of_first_queries(case.T)
    c, at = case, np.arange(case.S - case.T, case.S)
    documents = at // 90 + np.arange(c.B)[:, None]  # documents of the keys at these positions
    lengths = np.full(c.B, c.S) if lengths is None else np.asarray(lengths)
    vectors = (documents, np.broadcast_to(lengths[:, None], documents.shape))
    vectors = tuple(jnp.asarray(x, jnp.int32) for x in vectors)
    return operands._replace(q_vectors=(operands.q_vectors[0], *vectors))


@program
def within_length(q, k):
    return (k[0] >= 0) & (k[0] < q[2])


def run_decode(case, operands, stages=2, module=hopper):  # few stages, so that they are reused
    plan = dataclasses.replace(module.blocks("decode", case.H, case.Hv), stages=stages)
    lists = lists_of(seen_by(case, operands), case.T, plan.k)
    decode = jax.jit(functools.partial(module.decode, case.problem, blocks=plan))
    return dict(zip(("out", "row_max", "log_sum"), decode(operands, lists), strict=True))


def run_gradients(case, operands, saved, kinds=("dq", "dkdv"), module=hopper):
    mask, results = seen_by(case, operands), {}
    for kind in kinds:
        plan = module.blocks(kind, case.H, case.Hv)
        turned = kind == "dkdv"
        lists = lists_of(mask.swapaxes(2, 3), plan.k, plan.q) if turned else (
            lists_of(mask, plan.q, plan.k)
        )  # fmt: skip
        function = getattr(module, f"backward_{kind}")
        function = jax.jit(functools.partial(function, case.problem, blocks=plan))
        got = function(operands, lists, saved=saved)
        names = {"dq": ("dq", "slope_rows"), "dkdv": ("dk", "dv")}.get(kind, ("bias",))
        results |= zip(names, got if isinstance(got, tuple) else (got,), strict=True)
    return {name: value for name, value in results.items() if value is not None}


def assert_near(got, expected, tolerance, name):
    got = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64)
    fully_masked = np.isneginf(expected)
    assert (np.isneginf(got) == fully_masked).all(), name
    got, expected = np.where(fully_masked, 0, got), np.where(fully_masked, 0, expected)
    assert largest_error(got, expected) <= tolerance * np.abs(expected).max() + 1e-6, name


NO_EFFECTS = (
    "the interpreter's callbacks are effects, which jax.checkpoint and jax.vmap do not support"
)


@pytest.mark.skipif(INTERPRETS is not None, reason=str(INTERPRETS))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns if products overflow
class InInterpreter(Bfloat16Suite):
    """Tests of the kernels in the interpreter, called through `dot_product_attention`."""

    target = Target("hopper", plgpu.InterpretGPUParams() if INTERPRETS is None else False)

    known = HOPPER_ROUNDS | {
        "test_rematerialization_does_not_change_gradients_with_dropout": NO_EFFECTS,
        "test_results_stay_float32_under_x64": "the interpreter's threads are outside the context "
        "that enables x64",
        "test_vmap_over_any_argument_matches_loop[('query',)]": NO_EFFECTS,
        "test_vmap_over_any_argument_matches_loop[('key', 'value')]": NO_EFFECTS,
        "test_vmap_over_any_argument_matches_loop[('valid', 'bias')]": NO_EFFECTS,
        "test_vmap_over_dense_mask_matches_loop": NO_EFFECTS,
    }
