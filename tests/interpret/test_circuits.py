"""Circuits against NumPy's singular value decomposition of the explicit products."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, D, L, N, model_of, params_of
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import LoraConfig
from transformer_jax.interpret import circuits
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.lora import init_lora, with_adapters

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 20 * FORWARD_F32


def products(shape, circuit, *, fold=False, branch="attention", params=None):
    """Return M, f64[L, N, D, D], of every head from explicit products."""
    config, found = SHAPES[shape], np.zeros((L, N, D, D))
    params = params_of(shape) if params is None else params
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    side = "encoder" if config.kind == "encoder" or "/" in branch else "decoder"
    groups = N // (config.num_kv_heads or N)
    for i in range(L):
        block = params[side][f"block_{i}"]
        kernel = {name: own["kernel"] for name, own in block[branch.split("/")[-1]].items()}
        before = np.eye(D)
        if fold:
            norm = block["norm" if config.norm_order == "parallel_shared" else "norm_attention"]
            before = np.diag(norm["scale"] + bool(config.norm_unit_offset))
            if config.norm == "layernorm":
                before = (np.eye(D) - 1 / D) @ before
        for n in range(N):
            g = n // groups
            if circuit == "qk":
                reads, own = before @ kernel["query"][:, n], before @ kernel["key"][:, g]
                found[i, n] = reads @ own.T
            else:
                found[i, n] = before @ kernel["value"][:, g] @ kernel["out"][n]
    return found


@pytest.mark.slow_except("gpt2-ov-True-attention-True")
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(
    ("shape", "circuit", "fold", "branch"),
    [
        ("gpt2", "ov", True, "attention"), ("gpt2", "qk", True, "attention"),
        ("llama", "qk", False, "attention"), ("gemma", "ov", True, "attention"),
        ("t5", "qk", False, "cross_attention"), ("t5", "ov", True, "encoder/attention"),
        ("bert", "ov", False, "attention"), ("gptj", "ov", True, "attention"),
    ],
)  # fmt: skip
def test_singular_values_match_explicit_products(shape, circuit, fold, branch, scanned):
    model, params = model_of(shape, scanned=scanned)
    of = jax.jit(lambda own: circuits(model, own, circuit, fold_norm=fold, branch=branch))
    found = of(params)
    wanted = products(shape, circuit, fold=fold, branch=branch)
    R = SHAPES[shape].head_dim
    assert found.left.shape == found.right.shape == (L, N, D, R)
    assert_near(found.values, np.linalg.svd(wanted, compute_uv=False)[..., :R], NEAR)
    joined = np.einsum("lndr,lnr,lner->lnde", found.left, found.values, found.right)
    assert_near(joined, wanted, NEAR)
    for side in (found.left, found.right):
        gram = np.einsum("lndr,lndq->lnrq", side, side)
        assert_near(gram, np.broadcast_to(np.eye(R), gram.shape), NEAR)


@pytest.mark.slow
def test_singular_value_count_keeps_largest_and_supports_vmap():
    model, params = model_of("llama")
    whole, top = (circuits(model, params, "ov", count=count) for count in (None, 2))
    assert (np.diff(whole.values) <= 0).all()
    for found, all_of in zip(top, whole, strict=True):
        np.testing.assert_array_equal(found, all_of[..., :2])
    two = jax.tree.map(lambda x: np.stack([x, 2 * x]), params)
    mapped = jax.vmap(lambda own: circuits(model, own, "ov").values)(two)
    assert_near(mapped, np.stack([whole.values, 4 * whole.values]), NEAR)


def test_count_can_be_the_width_of_a_head():
    model, params = model_of("llama")
    found = jax.eval_shape(lambda own: circuits(model, own, "ov", count=6), params)
    assert (
        found.values.shape
        == jax.eval_shape(lambda p: circuits(model, p, "ov"), params).values.shape
    )


@pytest.mark.slow
def test_circuit_products_include_adapters():
    config = SHAPES["llama"]
    model, params = build(config), init_params(config, jax.random.key(3))
    lora = LoraConfig(rank=2, targets="all-linear")
    adapters = init_lora(params, lora, jax.random.key(5))
    adapters = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), adapters)
    adapted = with_adapters(params, adapters, lora)
    kernels = {}
    for i in range(L):
        own, parts = (x["decoder"][f"block_{i}"]["attention"] for x in (params, adapters))
        dense = {}
        for name in ("value", "out"):
            kernel = np.asarray(own[name]["kernel"], np.float64)
            added = np.float64(parts[name]["a"]) @ np.float64(parts[name]["b"])
            dense[name] = {"kernel": kernel + lora.alpha / lora.rank * added.reshape(kernel.shape)}
        kernels[f"block_{i}"] = {"attention": dense}
    wanted = products("llama", "ov", params={"decoder": kernels})
    found = circuits(model, adapted, "ov").values
    R = config.head_dim
    assert_near(found, np.linalg.svd(wanted, compute_uv=False)[..., :R], NEAR)


@pytest.mark.parametrize(
    ("shape", "changes", "arguments", "message"),
    [
        ("llama", {}, dict(circuit="vo"), "circuit is 'vo': must be 'qk' or 'ov'"),
        ("llama", {}, dict(count=7), r"count is 7: must be from 1 to 6"),
        ("llama", {}, dict(branch="cross_attention"), "branch is 'cross_attention': must be 'att"),
        (
            "llama",
            dict(qk_norm=True),
            dict(circuit="qk"),
            "not linear in the stream, because qk_norm",
        ),
        (
            "llama",
            dict(attention_gate=True),
            dict(circuit="ov"),
            "not linear in the stream, because attention_gate",
        ),
        (
            "post",
            {},
            dict(fold_norm=True),
            "fold_norm is True, but attention has no norm before it",
        ),
        (
            "t5",
            {},
            dict(fold_norm=True, branch="cross_attention"),
            "cross_attention, which reads two streams",
        ),
    ],
)
def test_invalid_circuit_arguments_are_rejected(shape, changes, arguments, message):
    model = build(dataclasses.replace(SHAPES[shape], **changes))
    with pytest.raises(ValueError, match=message):
        circuits(model, {}, **dict(circuit="ov") | arguments)
