"""Tests of mixtures of experts against sum_e w_e f_e(x) over the chosen experts in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError
from jax import export

from transformer_jax import LoraConfig, build, init_cache, init_params, num_params
from transformer_jax.config import ConfigError, Experts, ModelConfig
from transformer_jax.lectures.demos.drawings import block_items
from transformer_jax.models.experts import (
    ROUTED,
    ExpertFeedForward,
    block_size,
    by_expert,
    route,
    router_losses,
)
from transformer_jax.models.flops import active_params, forward_flops
from transformer_jax.models.lora import apply_lora, init_lora, with_adapters
from transformer_jax.models.places import places
from transformer_jax.models.quantized import quantize
from transformer_jax.models.stack import stack_layers
from transformer_jax.training.batch import Batch, batch_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=23, d_model=12, num_layers=1, num_heads=2, d_ff=20, max_len=16, glu=True,
    activation="silu", norm="rmsnorm", init_std=0.3, positions="rope", use_bias=False,
    experts=Experts(count=4, top_k=2),
)  # fmt: skip
TOKENS = np.arange(14, dtype=np.int32).reshape(2, 7)

ROUTERS = {
    "softmax of the chosen": Experts(count=4, top_k=2),
    "softmax over all": Experts(count=4, top_k=3, normalize=False, scale=1.5),
    "sigmoid": Experts(count=5, top_k=2, score="sigmoid", scale=2.0),
    "sigmoid with bias": Experts(count=5, top_k=2, score="sigmoid", selection_bias=True),
    "softmax with bias": Experts(count=4, top_k=2, selection_bias=True),
    "groups": Experts(count=6, top_k=2, groups=3, top_groups=2, normalize=False, scale=1.5),
    "groups ranked by two": Experts(
        count=8, top_k=3, groups=4, top_groups=2, group_best=2, score="sigmoid",
        selection_bias=True,
    ),
    "groups of scores": Experts(count=6, top_k=2, groups=2, group_best=2),
    "router with a bias": Experts(count=4, top_k=2, router_bias=True),
    "one": Experts(count=3, top_k=1, normalize=False),
    "shared": Experts(count=4, top_k=2, d_ff=6, shared_d_ff=8),
    "shared with a gate": Experts(count=4, top_k=2, d_ff=6, shared_d_ff=8, shared_gate=True),
    "all": Experts(
        count=5, top_k=2, d_ff=6, score="sigmoid", selection_bias=True, router_bias=True,
        scale=2.0, shared_d_ff=8, shared_gate=True,
    ),
}  # fmt: skip


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def chosen_weights(experts, logits, bias=None):
    """Return the weight of each expert [E] for a token, 0 for experts that are not chosen."""
    scores = softmax(logits) if experts.score == "softmax" else sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    groups = ranked.reshape(experts.groups, -1)
    best = np.sort(groups, axis=1)[:, -experts.group_best :].sum(axis=1)
    left = np.argsort(-best, kind="stable")[experts.top_groups :]
    groups = groups.copy()
    groups[left] = -np.inf
    chosen = np.argsort(-groups.ravel(), kind="stable")[: experts.top_k]
    weights = np.zeros(experts.count)
    weights[chosen] = scores[chosen] / (scores[chosen].sum() if experts.normalize else 1)
    return experts.scale * weights


def feed_forward(x, up, gate, down):
    return (silu(x @ gate) * (x @ up)) @ down


def mixture(experts, params, x):
    """Compute the feed-forward of tokens x [B, T, D] in float64, one expert at a time."""
    params = jax.tree.map(partial(np.asarray, dtype=np.float64), params)
    up, gate, down = (params[name]["kernel"] for name in ("up", "gate", "down"))
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape[:2]):
        logits = x[at] @ params["router"]["kernel"]
        if experts.router_bias:
            logits = logits + params["router"]["bias"]
        weights = chosen_weights(experts, logits, params.get("selection_bias"))
        for e in np.flatnonzero(weights):
            out[at] += weights[e] * feed_forward(x[at], up[e], gate[e], down[e])
        if experts.shared_d_ff is not None:
            shared = (params["shared"][name]["kernel"] for name in ("up", "gate", "down"))
            scale = sigmoid(x[at] @ params["shared_gate"]["kernel"]) if experts.shared_gate else 1
            out[at] += scale * feed_forward(x[at], *shared)
    return out


def made(experts, layers=1, seed=0):
    """Return a config with these experts and random parameters, including selection biases."""
    d_ff = None if experts.d_ff else CONFIG.d_ff
    config = replace(CONFIG, experts=experts, d_ff=d_ff, num_layers=layers)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return config, jax.tree.map_with_path(partial(drawn, rng), shapes)


def choose(experts, logits):
    return jax.jit(partial(route, experts))(np.float32(logits))


def drawn(rng, path, leaf):
    """Draw a parameter: norm scales near 1, and selection biases large enough to change choices."""
    name = path[-1].key
    mean, deviation = {"scale": (1, 0.1), "selection_bias": (0, 1)}.get(name, (0, 0.3))
    return rng.normal(mean, deviation, leaf.shape).astype(leaf.dtype)


@pytest.mark.slow_except("all")
@pytest.mark.parametrize("kind", ROUTERS)
def test_expert_outputs_and_gradients_match_float64(kind):
    """Compare outputs, and gradients with central differences."""
    experts = ROUTERS[kind]
    config, params = made(experts)
    own = params["decoder"]["block_0"]["feed_forward"]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(*TOKENS.shape, config.d_model))
    out = rng.normal(size=x.shape)

    def summed(own, x):
        y = ExpertFeedForward(config).apply({"params": own}, x)
        return (y * out.astype(np.float32)).sum(), y

    learn = jax.jit(jax.value_and_grad(summed, argnums=(0, 1), has_aux=True))
    (_, found), grads = jax.tree.map(np.asarray, learn(own, x.astype(np.float32)))
    own = jax.tree.map(partial(np.asarray, dtype=np.float64), own)
    np.testing.assert_allclose(found, mixture(experts, own, x), rtol=2e-5, atol=2e-6)
    directions = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), (own, x))
    if experts.selection_bias:
        assert not np.any(grads[0]["selection_bias"])
        directions[0]["selection_bias"][:] = 0
    step = 1e-6

    def moved(sign):
        params, x_moved = jax.tree.map(lambda a, b: a + sign * step * b, (own, x), directions)
        return (mixture(experts, params, x_moved) * out).sum()

    wanted = (moved(1) - moved(-1)) / (2 * step)
    pairs = zip(*map(jax.tree.leaves, (grads, directions)), strict=True)
    slope = sum(np.vdot(a, b) for a, b in pairs)
    np.testing.assert_allclose(slope, wanted, rtol=1e-4)


@pytest.mark.slow_except("two-40")
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("used", ["all", "one", "two"])
def test_rows_reach_assigned_expert_for_any_distribution(rows, used):
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 3)), rng.normal(size=(6, 3, 4))
    chosen = {"all": rng.integers(0, 6, rows), "one": np.full(rows, 4)}.get(used)
    chosen = rng.integers(1, 3, rows) if chosen is None else chosen
    meet = jax.jit(partial(by_expert, lambda x, w, _: x @ w))
    found = meet(x.astype(np.float32), chosen.astype(np.int32), w.astype(np.float32))
    wanted = np.einsum("ND,NDF->NF", x, w[chosen])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_block_size_is_at_most_half_of_average_rows_per_expert():
    sizes = [block_size(rows, 8) for rows in (1, 16, 31, 32, 64, 1024, 10**6)]
    assert sizes == [1, 1, 1, 2, 4, 64, 256]


def losses(logits, top_k, valid):
    """Return the balance loss and z-loss of the router logits [N, E] of valid tokens."""
    logits = logits[valid]
    used = np.zeros(logits.shape[1])
    for row in logits:
        used[np.argsort(-row, kind="stable")[:top_k]] += 1 / len(logits)
    balance = len(used) * (used * softmax(logits).mean(0)).sum()
    return balance, (np.log(np.exp(logits).sum(-1)) ** 2).mean()


@pytest.mark.parametrize("padded", [False, True])
def test_router_losses_match_formulas(padded):
    logits = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    valid = np.ones((3, 4), bool)
    valid[1, 2:] = not padded
    experts = Experts(count=5, top_k=2)
    charge = jax.jit(partial(router_losses, experts))
    found = charge(logits, valid if padded else None)
    wanted = losses(logits.reshape(-1, 5).astype(np.float64), 2, valid.ravel())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_balance_loss_is_one_for_uniform_routing():
    logits = np.tile(np.eye(4, dtype=np.float32) * 1e-4, (2, 1, 1))
    balance, _ = router_losses(Experts(count=4, top_k=1), jnp.asarray(logits))
    np.testing.assert_allclose(balance, 1, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_training_loss_includes_router_losses(scan, chunk):
    experts = Experts(count=4, top_k=2, balance_loss=0.5, z_loss=0.25)
    config, params = made(experts, layers=2)
    places = "block_0/feed_forward/router", "block_1/feed_forward/router"
    segments = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    labels = np.where(segments > 0, TOKENS, -100)
    batch = Batch(TOKENS, labels, segments=segments)
    apply = jax.jit(partial(build(config).apply, segments=segments, capture=places))
    _, _, found = apply({"params": params}, TOKENS)
    each = [
        losses(np.asarray(found[place], np.float64).reshape(-1, 4), 2, segments.ravel() > 0)
        for place in places
    ]
    balance, z = np.mean(each, axis=0)
    plain = replace(config, experts=replace(experts, balance_loss=0.0))
    without = jax.jit(batch_loss(plain, chunk=chunk))(params, batch, None)[0] - 0.25 * z
    if scan:
        config, params = replace(config, scan_layers=True), stack_layers(params)
    mean, weight = jax.jit(batch_loss(config, chunk=chunk))(params, batch, None)
    assert weight == 12
    np.testing.assert_allclose(mean - without, 0.5 * balance + 0.25 * z, rtol=1e-4)
    logged = partial(build(config).apply, mutable=[ROUTED])
    _, state = jax.eval_shape(logged, {"params": params}, TOKENS)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * TOKENS.size * 4


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_cached_decode_with_experts_matches_full_forward(scan):
    config, params = made(ROUTERS["shared with a gate"], layers=2)
    whole, _ = jax.jit(build(config).apply)({"params": params}, TOKENS)
    if scan:
        config, params = replace(config, scan_layers=True), stack_layers(params)
    cache, step = (
        init_cache(config, 2, 7),
        jax.jit(partial(build(config).apply, {"params": params})),
    )
    for t in range(7):
        logits, cache = step(TOKENS[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_nonfinite_token_does_not_affect_other_tokens():
    config, params = made(Experts(count=4, top_k=2))

    @jax.jit
    def apply(added):
        edit = {"block_0/feed_forward/input": lambda x: x.at[1, 3].add(added)}
        return build(config).edited(edit).apply({"params": params}, TOKENS)[0]

    whole, found = apply(0.0), apply(jnp.nan)
    np.testing.assert_array_equal(found[0], whole[0])
    others = np.delete(np.arange(7), 3)
    np.testing.assert_array_equal(found[1, others], whole[1, others])
    assert np.isnan(found[1, 3]).all()


@pytest.mark.slow
def test_expert_hidden_layer_can_be_captured_and_edited():
    config, params = made(Experts(count=4, top_k=2, normalize=False))
    hidden, router = "block_0/feed_forward/hidden", "block_0/feed_forward/router"
    place_in, place_out = "block_0/feed_forward/input", "block_0/feed_forward/output"
    without = {hidden: lambda h: h.at[:, :, 1].set(0)}
    seen = hidden, router, place_in, place_out
    apply = jax.jit(partial(build(config).edited(without).apply, capture=seen))
    _, _, found = apply({"params": params}, TOKENS)
    assert found[hidden].shape == (2, 7, 2, 20)
    only = replace(config.experts, top_k=1)
    x = np.asarray(found[place_in], np.float64)
    wanted = mixture(only, params["decoder"]["block_0"]["feed_forward"], x)
    np.testing.assert_allclose(found[place_out], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_editing_router_changes_selected_expert():
    config, params = made(Experts(count=4, top_k=1))
    own = params["decoder"]["block_0"]["feed_forward"]
    third = {"block_0/feed_forward/router": lambda r: r.at[:, :, 2].set(100.0)}
    places = "block_0/feed_forward/input", "block_0/feed_forward/output"
    apply = jax.jit(partial(build(config).edited(third).apply, capture=places))
    _, _, found = apply({"params": params}, TOKENS)
    x = np.asarray(found[places[0]], np.float64)
    matrices = (np.asarray(own[name]["kernel"][2]) for name in ("up", "gate", "down"))
    np.testing.assert_allclose(found[places[1]], feed_forward(x, *matrices), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "int8", "int4"])
def test_adapters_and_quantization_apply_per_expert(base):
    config, params = made(Experts(count=4, top_k=2))
    lora = LoraConfig(rank=2, targets=("up", "down", "router"))
    shapes = jax.eval_shape(lambda: init_lora(params, lora, jax.random.key(1)))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), shapes)
    assert adapters["decoder"]["block_0"]["feed_forward"]["up"]["a"].shape == (4, 12, 2)

    @jax.jit
    def fewer_bits(params):
        base_params = params if base == "float32" else quantize(params, base)
        is_leaf = lambda leaf: hasattr(leaf, "bits")  # noqa: E731
        return base_params, jax.tree.map(
            lambda x: x.astype(jnp.float32), base_params, is_leaf=is_leaf
        )

    base_params, plain = fewer_bits(params)
    if base != "float32":
        own = base_params["decoder"]["block_0"]["feed_forward"]
        assert own["up"]["kernel"].bits and isinstance(own["router"]["kernel"], jax.Array)
        for e in range(4):  # each expert has its own scales
            of = lambda tree: tree["decoder"]["block_0"]["feed_forward"]["up"]["kernel"][e]  # noqa: B023, E731
            one, alone = of(plain), of(params)
            _, wanted = fewer_bits({"block": {"up": {"kernel": alone}}})
            np.testing.assert_array_equal(one, wanted["block"]["up"]["kernel"])

    @jax.jit
    def logits(params):
        return build(config).apply({"params": params}, TOKENS)[0]

    unmerged = logits(with_adapters(base_params, adapters, lora))
    summed = logits(jax.jit(apply_lora, static_argnums=2)(plain, adapters, lora))
    np.testing.assert_allclose(unmerged, summed, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_several_adapters_per_expert_raise_error():
    _, params = made(Experts(count=4, top_k=2))
    lora = LoraConfig(rank=2, targets=("up",))
    several = [init_lora(params, lora, jax.random.key(i)) for i in range(2)]
    with pytest.raises(
        ValueError, match="feed_forward/up: an expert can only have a single adapter"
    ):
        with_adapters(params, several, lora, rows=jnp.array([0, 1]))


@pytest.mark.slow
def test_decode_step_reads_only_selected_experts():
    def read(count):
        experts = Experts(count=count, top_k=2)
        config = replace(CONFIG, experts=experts, d_model=64, d_ff=256, num_layers=1)
        shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
        cache = jax.eval_shape(partial(init_cache, config, 1, 8))
        step = jax.jit(lambda p, c, t: build(config).apply({"params": p}, t, cache=c)[0])
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return step.lower(shapes, cache, token).compile().cost_analysis()["bytes accessed"]

    few, many = read(4), read(64)
    one = 3 * 4 * 64 * 256  # bytes per expert
    assert 2 * one < few and many - few < one


def test_active_parameters_and_flops_include_only_selected_experts():
    config = replace(CONFIG, experts=Experts(count=8, top_k=2, d_ff=10, shared_d_ff=6), d_ff=None)
    attention = 12 * 12 * 4
    forward = 3 * 12 * 10
    rest = 12 * 8 + 3 * 12 * 6  # router and shared feed-forward
    assert num_params(config) == 23 * 12 + 3 * 12 + attention + 8 * forward + rest
    assert active_params(config) == 23 * 12 + 3 * 12 + attention + 2 * forward + rest
    products = 2 * (attention + 2 * forward + rest + 23 * 12)
    assert forward_flops(config, 5) == 5 * products + 15 * 2 * 2 * 12


def test_architecture_drawing_states_number_of_selected_experts():
    config = replace(CONFIG, experts=Experts(count=8, top_k=2, d_ff=10), d_ff=None)
    boxes = [item for item in block_items(config, "decoder") if getattr(item, "name", "") != ""]
    lines = next(box.lines for box in boxes if box.name == "feed_forward")
    assert lines == ["router: 2 of 8 experts", "gate 10 · up 10 · silu", "down 12"]


def test_selected_experts_are_sorted_by_score():
    logits = [[0.0, 3.0, 1.0], [2.0, 2.0, -1.0]]
    chosen, weights = choose(Experts(count=3, top_k=2), logits)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    np.testing.assert_allclose(weights, [[sigmoid(2.0), sigmoid(-2.0)], [0.5, 0.5]], rtol=1e-6)
    # sigmoids that round to 1 are still sorted
    logits = [20.0, 30.0, 1000.0, 19.0]
    chosen, weights = choose(Experts(count=4, top_k=2, score="sigmoid"), logits)
    assert chosen.tolist() == [2, 1]
    np.testing.assert_allclose(weights, [0.5, 0.5], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax of the chosen", "sigmoid", "sigmoid with bias"])
def test_nan_logit_makes_router_weights_nan(kind):
    experts = ROUTERS[kind]
    bias = jnp.zeros(experts.count) if experts.selection_bias else None
    for nan in (np.float32(np.nan), -np.float32(np.nan)):
        logits = jnp.arange(2.0 * experts.count).reshape(2, -1).at[1, 0].set(nan)
        _, weights = route(experts, logits, bias)
        assert np.isfinite(weights[0]).all() and np.isnan(weights[1]).all()


@pytest.mark.slow
def test_export_with_symbolic_batch_matches_model():
    config, params = made(Experts(count=4, top_k=2))
    model = build(config)
    logits = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens)[0])
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("b, 7"), jnp.int32)
    exported = export.export(logits)(jax.eval_shape(lambda: params), tokens)
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(params, TOKENS), logits(params, TOKENS), atol=1e-5)


@pytest.mark.slow
def test_empty_batch_produces_empty_output():
    config, params = made(Experts(count=4, top_k=2))
    own = params["decoder"]["block_0"]["feed_forward"]
    y = ExpertFeedForward(config).apply({"params": own}, jnp.zeros((0, 5, config.d_model)))
    assert y.shape == (0, 5, config.d_model)


@pytest.mark.slow
def test_backward_pass_does_not_copy_expert_matrices_per_block():
    def scratch(rows):
        def loss(x, w, chosen):
            return (by_expert(lambda x, own, _: x @ own[0][0], x, chosen, ((w, None),)) ** 2).sum()

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 4096), (4, 4096, 4096))]
        shapes.append(jax.ShapeDtypeStruct((rows,), jnp.int32))
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    copies = 16 * 4 * 4096**2  # bytes of 16 copies, one per block of 256 rows
    more = scratch(8192) - scratch(4096)
    assert more < copies / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(top_k=9), "top_k is 9: must be at most count, 8"),
        (dict(count=0), "count is 0: must be positive"),
        (dict(score="tanh"), "score is 'tanh': must be one of 'softmax', 'sigmoid'"),
        (dict(balance_loss=-1.0), "balance_loss is -1.0: must not be negative"),
        (dict(shared_gate=True), "shared_gate is True: needs shared_d_ff"),
        (dict(scale=0.0), "scale is 0.0: must be positive"),
        (dict(d_ff=6), "d_ff is 20: is not used: experts.d_ff is 6"),
    ],
)
def test_invalid_expert_configs_raise_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, experts=Experts(**changes))


def test_parameters_from_another_feed_forward_type_raise_error():
    _, params = made(Experts(count=4, top_k=2))
    dense = replace(CONFIG, experts=None)
    with pytest.raises(ScopeParamShapeError, match="feed_forward/up"):
        jax.eval_shape(build(dense).apply, {"params": params}, TOKENS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(groups=3), "groups is 3: must divide count, 8"),
        (dict(groups=2, top_groups=3), "top_groups is 3: must be at most groups, 2"),
        (dict(groups=4, group_best=3), "group_best is 3: must be at most 2, the size of a group"),
        (dict(groups=4, top_k=3), "top_k is 3: must be at most 2, the experts in top_groups"),
        (dict(top_groups=1, group_best=2), "group_best is 2: needs groups"),
    ],
)
def test_groups_that_cannot_be_chosen_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        Experts(**dict(count=8, top_k=2) | changes)


DENSE = replace(
    CONFIG, num_layers=3, d_ff=20,
    experts=Experts(count=4, top_k=2, d_ff=10, shared_d_ff=6, dense_layers=1),
)  # fmt: skip


def test_first_layers_have_a_feed_forward_network_without_experts():
    params = init_params(DENSE, jax.random.key(0))
    kernels = [params["decoder"][f"block_{i}"]["feed_forward"] for i in range(3)]
    assert kernels[0]["up"]["kernel"].shape == (12, 20) and "router" not in kernels[0]
    assert all(one["up"]["kernel"].shape == (4, 12, 10) for one in kernels[1:])
    attention, forward, rest = 12 * 12 * 4, 3 * 12 * 10, 12 * 4 + 3 * 12 * 6
    per_token = 3 * attention + 3 * 12 * 20 + 2 * (2 * forward + rest)
    assert active_params(DENSE) == 23 * 12 + 7 * 12 + per_token
    assert forward_flops(DENSE, 5) == 5 * 2 * (per_token + 23 * 12) + 3 * 15 * 2 * 2 * 12
    shapes = places(DENSE)
    assert shapes["block_0/feed_forward/hidden"] == ("B", "T", 20)
    assert "block_0/feed_forward/router" not in shapes
    assert shapes["block_1/feed_forward/hidden"] == ("B", "T", 2, 10)
    logits, _, found = build(DENSE).apply({"params": params}, TOKENS, capture=tuple(shapes))
    for name, value in found.items():
        assert value.shape == tuple(dict(B=2, T=7, S=7).get(n, n) for n in shapes[name]), name
    cache, parts = init_cache(DENSE, 2, 7), []
    for part in (TOKENS[:, :4], TOKENS[:, 4:]):
        one, cache = build(DENSE).apply({"params": params}, part, cache=cache)
        parts.append(one)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_layers=1), "experts.dense_layers is 1: must be below num_layers, 1"),
        (dict(scan_layers=True), "experts.dense_layers is 1: needs a looped stack"),
        (dict(kind="encoder-decoder"), "experts.dense_layers is 1: needs a looped stack"),
    ],
)
def test_layers_without_experts_need_a_looped_stack(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(DENSE, **changes)
