"""`score_mod`: a function of a score, held against NumPy in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import draw
from tests.support.devices import on_devices
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near, assert_same_bits
from transformer_jax import ALiBi, Causal, Dense, Segments, Window
from transformer_jax.attention.api import (
    IMPLEMENTATIONS,
    dot_product_attention,
    dot_product_attention_weights,
    explain_attention,
)
from transformer_jax.attention.arguments import check_call
from transformer_jax.attention.blockwise.core import _axis_names
from transformer_jax.kernels import Target, tpu, using
from transformer_jax.kernels.contract import Blocks
from transformer_jax.kernels.score_function import ScoreProgram

pytestmark = pytest.mark.usefixtures("unoptimised_compilation")


def test_every_array_of_a_call_has_axis_names():
    """They tell a mesh how to split the arrays, including those that `score_mod` captures."""
    arrays, table = arrays_of_case("everything"), jnp.arange(7)
    names = "query", "key", "value", "sinks"
    call = check_call(
        *(arrays[name] for name in names[:3]), sinks=arrays["sinks"], bias=ALiBi(arrays["slopes"]),
        mask=Causal() & Segments(jnp.asarray(IDS)), q_positions=jnp.asarray(Q_AT),
        score_mod=lambda s, b, h, q, k: s * arrays["weights"][q % 5] + table[k % 7],
    )  # fmt: skip
    assert [len(names) for names in _axis_names(call)] == [x.ndim for x in jax.tree.leaves(call)]


EVERYWHERE = "xla", "blockwise"
KINDS = "forward", "single_pass_rows", "dq", "dkdv", "bias", "score"
# tiles that divide no length
TPU = Target("tpu", True, blocks=tuple((kind, Blocks(16, 24)) for kind in KINDS))
WITH_TPU = *EVERYWHERE, pytest.param("pallas", marks=pytest.mark.slow)
B, T, S, N, K = 2, 45, 130, 4, 2
Q_AT = np.stack([np.arange(T) + 80, np.arange(T) + 31])
IDS = np.sort(np.random.default_rng(4).integers(0, 3, (B, 400)), axis=1)
CASES = {
    "alone": (dict(), np.ones((B, T, S), bool)),
    "causal": (dict(mask=Causal()), np.arange(S) <= Q_AT[:, :, None]),
    "everything": (
        dict(mask=Causal() & Window(60) & Segments(jnp.asarray(IDS)), softcap=2.0),
        (np.arange(S) <= Q_AT[:, :, None])
        & (np.arange(S) > Q_AT[:, :, None] - 60)
        & (IDS[np.arange(B)[:, None], Q_AT][:, :, None] == IDS[:, None, :S]),
    ),
}


def arrays_of_case(case: str) -> dict[str, jax.Array]:
    drawn = draw(5, batch=B, queries=T, keys=S, heads=N, kv_heads=K)
    rng = np.random.default_rng(6)
    more = dict(table=rng.normal(size=(B, N, 7)), weights=rng.normal(size=5))
    if case == "everything":
        more |= dict(slopes=rng.uniform(0.001, 0.01, N), sinks=rng.normal(size=N))
    names = "query", "key", "value", "out_cotangent", "lse_cotangent"
    return {n: drawn[n] for n in names} | {n: jnp.asarray(x, jnp.float32) for n, x in more.items()}


# Functions of a score; the same text serves JAX and NumPy


def modified(xp, arrays, score, b, h, q, k):
    """Depends on everything, with look-ups by pair."""
    turned = xp.where((q - k) % 3 == 0, score * arrays["weights"][(q + h) % 5], xp.tanh(score))
    return turned + arrays["table"][b, h, (q + k) % 7] * xp.sin(score)


def decay(xp, arrays, score, b, h, q, k):
    return score - xp.abs(arrays["weights"][h] * 0.1) * xp.abs(q - k)


def cap(xp, arrays, score, b, h, q, k):
    most = 2 + arrays["weights"][0] ** 2
    return most * xp.tanh(score / most) * (1 + 0.1 * h)


def look_ups(xp, arrays, score, b, h, q, k):
    """Looks up a value by row, head and query, one by key, and one by row, head and key."""
    turned = score * (1 + 0.2 * arrays["table"][b, h, q % 7]) + arrays["table"][b, h, k % 7]
    return turned + xp.sin(arrays["weights"][k % 5] * score)


def parity(xp, arrays, score, b, h, q, k):
    """Has integers and conditions of pairs, and hides some pairs by -inf."""
    odd = xp.where(q % 2 == k % 2, score * xp.abs(score), arrays["table"][b, h, 3])
    turned = xp.where((q - k) % 3 == 0, score * arrays["weights"][h], odd)
    return xp.where((h == 1) & ((q - k) // 5 == 2), -xp.inf, turned)


FUNCTIONS = {
    modified: ("table", "weights"),
    decay: ("weights",),
    cap: ("weights",),
    look_ups: ("table", "weights"),
    parity: ("table", "weights"),
}


def targeted(implementation):
    """Return a context in which "pallas" runs in the interpreter for TPUs."""
    return using(TPU) if implementation == "pallas" else contextlib.nullcontext()


def loss_of(implementation, function, options):
    def loss(inputs, out_cotangent, lse_cotangent):
        def score_mod(*args):
            return function(jnp, inputs, *args)

        bias = ALiBi(inputs["slopes"]) if "slopes" in inputs else None
        with targeted(implementation):
            out, lse = dot_product_attention(
                inputs["query"], inputs["key"], inputs["value"], score_mod=score_mod, bias=bias,
                sinks=inputs.get("sinks"), q_positions=jnp.asarray(Q_AT, jnp.int32),
                return_lse=True, implementation=implementation, **options,
            )  # fmt: skip
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return (out * out_cotangent).sum() + (seen * lse_cotangent).sum(), (out, lse)

    return loss


def in_numpy(inputs, function, visible, softcap):
    """Return the output and lse in float64, from loops over nothing but NumPy's broadcasting."""
    q, k, v = (inputs[n] for n in ("query", "key", "value"))
    score = np.einsum("bqnd,bknd->bnqk", q, np.repeat(k, N // K, 2)) / np.sqrt(q.shape[3])
    score = score if softcap is None else softcap * np.tanh(score / softcap)
    at = Q_AT[:, None, :, None], np.arange(S)[None, None, None]
    if "slopes" in inputs:
        score = score - inputs["slopes"][None, :, None, None] * np.abs(at[0] - at[1])
    b, h = np.arange(B)[:, None, None, None], np.arange(N)[None, :, None, None]
    score = np.where(visible[:, None], function(np, inputs, score, b, h, *at), -np.inf)
    sinks = inputs.get("sinks", np.full(N, -np.inf))[None, :, None]
    top = np.maximum(score.max(-1), np.where(np.isfinite(score.max(-1)), sinks, -np.inf))
    shift = np.where(np.isfinite(top), top, 0)
    p = np.exp(score - shift[..., None])
    total = p.sum(-1) + np.where(np.isfinite(top), np.exp(sinks - shift), 1)
    out = np.einsum("bnqk,bknd->bqnd", p / total[..., None], np.repeat(v, N // K, 2))
    return out, np.where(np.isfinite(top), shift + np.log(total), -np.inf).swapaxes(1, 2)


KERNEL_CASES = [
    ("everything", look_ups, "single_pass_rows"),
    ("causal", decay, "single_pass_rows"),
    ("everything", cap, "dq"),
    ("alone", parity, "dq"),
]


@pytest.mark.parametrize(
    ("case", "function", "implementation", "kind"),
    [
        *((case, modified, name, None) for case in CASES for name in EVERYWHERE),
        *(
            pytest.param(case, function, "pallas", kind, marks=[pytest.mark.slow] * (i > 0))
            for i, (case, function, kind) in enumerate(KERNEL_CASES)
        ),
    ],
)
def test_output_and_directional_derivatives_match_float64(
    case, function, implementation, kind, monkeypatch
):
    if kind == "dq":
        two = dataclasses.replace(tpu.BACKEND, sums_fit=lambda *sizes: False)
        monkeypatch.setattr(tpu, "BACKEND", two)
    options, visible = CASES[case]
    arrays = arrays_of_case(case)
    for name in {"table", "weights"} - {*FUNCTIONS[function]}:
        del arrays[name]
    cotangents = arrays.pop("out_cotangent"), arrays.pop("lse_cotangent")
    loss = loss_of(implementation, function, options)
    gradients, (out, lse) = jax.grad(loss, has_aux=True)(arrays, *cotangents)
    wide = {n: np.asarray(x, np.float64) for n, x in arrays.items()}
    expected = in_numpy(wide, function, visible, options.get("softcap"))
    assert_near(out, expected[0], FORWARD_F32)
    seen = np.isfinite(expected[1])
    np.testing.assert_array_equal(np.isfinite(lse), seen)
    assert_near(np.where(seen, lse, 0), np.where(seen, expected[1], 0), FORWARD_F32)

    def value(at):
        out, lse = in_numpy(at, function, visible, options.get("softcap"))
        return (out * np.asarray(cotangents[0], np.float64)).sum() + (
            np.where(seen, lse, 0) * np.asarray(cotangents[1], np.float64)
        ).sum()

    rng = np.random.default_rng(8)
    for name, x in wide.items():
        directions = rng.normal(size=(2, *x.shape))
        slopes = [
            (value(wide | {name: x + 1e-5 * d}) - value(wide | {name: x - 1e-5 * d})) / 2e-5
            for d in directions
        ]
        found = [(np.asarray(gradients[name], np.float64) * d).sum() for d in directions]
        size = np.linalg.norm(np.asarray(gradients[name], np.float64))
        assert size > 0
        np.testing.assert_allclose(found, slopes, rtol=0, atol=10 * GRADIENT_F32 * size)


@pytest.mark.parametrize("implementation", WITH_TPU)
def test_score_of_minus_infinity_hides_pair_and_nan_breaks_only_its_query(implementation):
    arrays = draw(9, batch=B, queries=T, keys=T, heads=N, kv_heads=K)
    inputs = arrays["query"], arrays["key"], arrays["value"]

    def evaluate(*inputs, **options):
        with targeted(implementation):
            return dot_product_attention(*inputs, implementation=implementation, **options)

    def hidden(s, b, h, q, k):
        return jnp.where((k <= q) & (q != 5), s, -jnp.inf)

    seen = jnp.tri(T, dtype=bool) & (jnp.arange(T) != 5)[:, None]
    mask = Dense(seen[None, None])
    outs = [
        jax.value_and_grad(lambda *x, o=o: (evaluate(*x, **o) ** 2).sum(), (0, 1, 2))(*inputs)
        for o in (dict(score_mod=hidden), dict(mask=mask))
    ]
    for one, other in zip(*map(jax.tree.leaves, outs), strict=True):
        assert_near(one, other, 1e-6)
    assert not evaluate(*inputs, score_mod=hidden)[:, 5].any()

    for bad in (jnp.nan, jnp.inf):

        def broken(s, b, h, q, k, bad=bad):
            return jnp.where((q == 7) & (k == 3) & (h == 1), bad, s)

        out = evaluate(*inputs, score_mod=broken)
        expected = np.zeros(out.shape, bool)
        expected[:, 7, 1] = True
        np.testing.assert_array_equal(np.isnan(out), expected)
        assert_near(np.where(expected, 0, out), np.where(expected, 0, evaluate(*inputs)), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [*EVERYWHERE, "pallas"])
def test_broken_query_passes_no_gradient(implementation):
    arrays = draw(17, batch=1, queries=19, keys=29, heads=2, kv_heads=1)
    inputs = arrays["query"], arrays["key"], arrays["value"], jnp.array([0.3, -0.2])

    def gradients(broken):
        def loss(query, key, value, weights):
            def score_mod(s, b, h, q, k):
                return jnp.where((q == 7) & (k == 3) & broken, jnp.nan, s * weights[h] - q)

            with targeted(implementation):
                out = dot_product_attention(
                    query, key, value, score_mod=score_mod, implementation=implementation
                )
            return (jnp.where(jnp.arange(19)[:, None, None] == 7, 0, out) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(*inputs)

    # as if the loss did not read the output of the query
    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert_near(found, expected, GRADIENT_F32)


@pytest.mark.parametrize("implementation", WITH_TPU)
def test_transformations_of_captured_array_match_loop(implementation):
    arrays = draw(10, batch=1, queries=17, keys=17, heads=2, kv_heads=1)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    table = jnp.linspace(-1, 1, 6).reshape(3, 2)

    def loss(row):
        with targeted(implementation):
            out = dot_product_attention(
                *inputs, score_mod=lambda s, b, h, q, k: s * (1 + row[h]), mask=Causal(),
                implementation=implementation, dropout_rate=0.2, dropout_key=jax.random.key(3),
            )  # fmt: skip
        return (out**2).sum()

    gradient = jax.jit(jax.grad(loss))
    each = jnp.stack([gradient(row) for row in table])
    assert_near(jax.jit(jax.vmap(jax.grad(loss)))(table), each, GRADIENT_F32)
    one = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones(2),))[1])(table[0])
    shifted = [np.asarray(gradient(table[0] + e)) for e in (0.01, -0.01)]
    assert_near(one, (shifted[0] - shifted[1]) / 0.02, 1e-3)


def test_rows_and_heads_of_later_tiles_have_their_own_indices():
    """With positions that differ by row and many heads, a tile has few rows and heads."""
    arrays = draw(15, batch=3, queries=20, keys=300, heads=16, kv_heads=16)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    at = jnp.arange(20)[None] + jnp.array([[0], [90], [200]])
    outs = [
        dot_product_attention(
            *inputs, mask=Causal(), q_positions=at, implementation=name,
            score_mod=lambda s, b, h, q, k: s * (1 + b) + h * k * 0.01,
        )
        for name in EVERYWHERE
    ]  # fmt: skip
    assert_near(outs[1], outs[0], 1e-5)


def test_weights_match_output():
    arrays = draw(11, batch=1, queries=20, keys=20, heads=2, kv_heads=2)
    options = dict(score_mod=lambda s, b, h, q, k: s * s - q, mask=Causal())
    weights = dot_product_attention_weights(arrays["query"], arrays["key"], **options)
    out = dot_product_attention(*(arrays[n] for n in ("query", "key", "value")), **options)
    assert_near(jnp.einsum("bnts,bsnh->btnh", weights, arrays["value"]), out, FORWARD_F32)


def test_same_function_written_again_is_compiled_once():
    def program(number, array=None):
        def function(s, b, h, q, k):
            return jnp.where(q > k, s * number, s if array is None else jnp.asarray(array)[h])

        scalars = jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4
        return ScoreProgram(jax.make_jaxpr(function)(*scalars).jaxpr)

    assert program(0.1) == program(0.1) and hash(program(0.1)) == hash(program(0.1))
    assert program(0.1) != program(np.nextafter(np.float32(0.1), np.float32(1)))
    assert program(0.1, np.arange(3.0)) == program(0.1, np.arange(3.0) + 1)  # an argument
    # the numbers of a captured array are arguments of the compiled program
    arrays = draw(12, batch=1, queries=8, keys=8, heads=2, kv_heads=2)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    outs = [
        dot_product_attention(*inputs, score_mod=lambda s, b, h, q, k, x=x: s * x[h])
        for x in (jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0]))
    ]
    plain = [
        dot_product_attention(*inputs, scale=np.array(x, np.float32) / inputs[0].shape[3] ** 0.5)
        for x in ([1, 2], [2, 1])
    ]
    for out, expected in zip(outs, plain, strict=True):
        assert_near(out, expected, FORWARD_F32)


@pytest.mark.parametrize("implementation", [*EVERYWHERE, "pallas"])
def test_constant_score_averages_the_visible_values(implementation):
    arrays = draw(14, batch=1, queries=9, keys=9, heads=2, kv_heads=2)
    with targeted(implementation):
        out = dot_product_attention(
            arrays["query"], arrays["key"], arrays["value"], mask=Causal(),
            score_mod=lambda s, b, h, q, k: 0.0, implementation=implementation,
        )  # fmt: skip
    means = (
        np.cumsum(np.asarray(arrays["value"], np.float64), axis=1) / np.arange(1, 10)[:, None, None]
    )
    assert_near(out, means, FORWARD_F32)


def test_identity_changes_no_bit_of_reference():
    arrays = draw(13, batch=1, queries=20, keys=20, heads=2, kv_heads=2)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    same = dot_product_attention(
        *inputs, score_mod=lambda s, b, h, q, k: s, mask=Causal(), implementation="xla"
    )
    assert_same_bits(same, dot_product_attention(*inputs, mask=Causal(), implementation="xla"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "score_mod is 3: must be a function"),
        (lambda s, b, h, q, k: s > 0, "score_mod <lambda> returned bool.*: must be one floating"),
        (lambda s, b, h, q, k: (s, s), "score_mod <lambda> returned .*: must be one floating"),
        (lambda s, b, h, q, k: s * jnp.ones(2), r"returned float32\[2\]: must be one floating"),
        (lambda s, q, k: s, r"score_mod <lambda>\(s, q, k\): must take five arguments"),
        (partial(lambda s, q: s), r"score_mod partial\(s, q\): must take five arguments"),
    ],
)
def test_wrong_function_raises_one_line_error(function, message):
    x = jnp.ones((1, 3, 1, 8))
    with pytest.raises(ValueError, match=message) as error:
        dot_product_attention(x, x, x, score_mod=function)
    assert "\n" not in str(error.value)


def test_other_implementations_refuse_by_name():
    x = jnp.ones((1, 256, 1, 64))
    found = explain_attention(x, x, x, score_mod=lambda s, b, h, q, k: s)
    assert found["xla"] is None and found["blockwise"] is None
    others = [name for name in IMPLEMENTATIONS if name not in EVERYWHERE and "pal" not in name]
    assert {found[name] for name in others} == {"does not support score_mod"}
    for name in ("ampere", "hopper"):
        with using(Target(name)):
            found = explain_attention(x, x, x, score_mod=lambda s, b, h, q, k: s)
        assert found["pallas"] == "supports score_mod only on a TPU"
    with pytest.raises(NotImplementedError, match="native: does not support score_mod"):
        dot_product_attention(x, x, x, score_mod=lambda s, b, h, q, k: s, implementation="native")


ARRAY = jnp.linspace(-1, 1, 6).reshape(2, 3)
REFUSED = {
    "a look-up": lambda s, b, h, q, k: s + ARRAY[h, (q - k) % 3],
    "reduce_sum": lambda s, b, h, q, k: s + (ARRAY[0] * s).sum(),
    "while": lambda s, b, h, q, k: jax.lax.while_loop(lambda x: x < q, lambda x: x + 1.0, s),
    "asinh": lambda s, b, h, q, k: jnp.arcsinh(s),
    "bfloat16": lambda s, b, h, q, k: s.astype(jnp.bfloat16) * 2,
}


@pytest.mark.parametrize("name", REFUSED)
def test_tpu_kernels_refuse_operations_by_name(name):
    x = jnp.ones((1, 256, 2, 64))
    with using(Target("tpu")):
        reason = explain_attention(x, x, x, score_mod=REFUSED[name])["pallas"]
        # the same operations are supported if they depend on a query alone
        before = explain_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: s + REFUSED[name](1.0 * q, b, h, q, h)
        )
    assert name in reason and "score_mod" in reason
    assert before["pallas"] is None


@pytest.mark.parametrize("implementation", [*EVERYWHERE, "pallas"])
def test_infinite_derivative_at_score_of_queries_without_keys_changes_nothing(rng, implementation):
    """sqrt |x| has no derivative at 0, the score of queries that see no key or fill a tile."""
    T, S, H, unseeing = 20, 30, 8, 3
    ids = jnp.asarray(np.where(np.arange(T) < unseeing, 1, 0)[None])
    mask = Segments(ids, jnp.zeros((1, S), jnp.int32))
    query, key, value = (rng.normal(size=(1, n, 1, H)).astype(np.float32) for n in (T, S, S))

    def attend(key, table):
        return dot_product_attention(
            query, key, value, mask=mask, scale=1.0, implementation=implementation,
            score_mod=lambda s, b, h, q, k: jnp.sqrt(jnp.abs(s * table[k])),
        ).sum()  # fmt: skip

    with using(TPU):
        found, of_table = jax.grad(attend, (0, 1))(key, jnp.ones(S))
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key, value))
    q = q[unseeing:]
    raw = q @ k.T
    p = np.exp(np.sqrt(np.abs(raw)))
    p /= p.sum(axis=1, keepdims=True)
    total = v.sum(axis=1)
    slope = p * (total - p @ total[:, None]) * np.sign(raw) / (2 * np.sqrt(np.abs(raw)))
    assert_near(found[0, :, 0], slope.T @ q, GRADIENT_F32)
    assert_near(of_table, (slope * raw).sum(axis=0), GRADIENT_F32)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 3])
def test_few_queries_are_computed_by_decode_kernel(T):
    arrays = arrays_of_case("causal")
    inputs = arrays["query"][:, :T], arrays["key"], arrays["value"]
    at = jnp.asarray(Q_AT[:, :T], jnp.int32)

    def attend(*inputs, implementation="pallas"):
        with using(Target("tpu", True)):
            return dot_product_attention(
                *inputs, mask=Causal(), q_positions=at, implementation=implementation,
                score_mod=partial(look_ups, jnp, arrays),
            )  # fmt: skip

    assert "attention_decode" in str(jax.make_jaxpr(attend)(*inputs))
    assert_near(attend(*inputs), attend(*inputs, implementation="xla"), 2 * FORWARD_F32)


def test_numbers_in_jitted_function_are_read_in_each_call():
    x = draw(16, batch=1, queries=8, keys=8, heads=2, kv_heads=2)["query"]

    def output(numbers):
        array = jnp.asarray(numbers)
        scaled = jax.jit(lambda s, h: s * array[h])
        return dot_product_attention(x, x, x, score_mod=lambda s, b, h, q, k: scaled(s, h))

    one, other = output([1.0, 2.0]), output([2.0, 1.0])
    assert_near(one[:, :, 0], dot_product_attention(x, x, x)[:, :, 0], FORWARD_F32)
    assert_near(other[:, :, 1], dot_product_attention(x, x, x)[:, :, 1], FORWARD_F32)


@pytest.mark.slow
def test_tpu_kernels_on_mesh_match_one_device():
    result = on_devices(4, "-m", "tests.multi_device.score_on_four", optimise=False)
    assert max(result["errors"].values()) < GRADIENT_F32
    assert result["query"] == ["data", None, "model"]
