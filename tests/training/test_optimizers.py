"""Optimizers against published formulas in float64 NumPy, and the parameters they apply to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tests.support.tolerances import assert_near
from transformer_jax.config import (
    SGD,
    Adafactor,
    AdamW,
    ConfigError,
    Lion,
    ModelConfig,
    Muon,
    ScheduleFree,
    TrainConfig,
)
from transformer_jax.models.factory import init_params
from transformer_jax.models.stack import stack_layers
from transformer_jax.training.batch import Batch
from transformer_jax.training.optimizers import (
    averaged_params,
    is_frozen,
    make_optimizer,
    matrix_dimensions,
    round_stochastically,
)
from transformer_jax.training.step import make_train_step, start_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

RATE, STEPS = 0.1, 4
BASE = TrainConfig(
    learning_rate=RATE, min_learning_rate=RATE, schedule="constant", warmup_steps=0, clip_norm=1e9
)
SHAPES = {
    "block_0": {"query": {"kernel": (5, 2, 3)}, "out": {"kernel": (2, 3, 5)}},
    "tokens": (7, 5),
}
SHAPES |= {"norm": {"scale": (5,)}}
LEAF = dict(is_leaf=lambda shape: isinstance(shape, tuple))


def followed(optimizer, rng, oracle):
    """Take steps with the optimizer and `oracle(name, p, g, n, state) -> p`; return both trees."""
    params = jax.tree.map(lambda shape: rng.standard_normal(shape), SHAPES, **LEAF)
    chain = make_optimizer(replace(BASE, optimizer=optimizer))

    @jax.jit
    def update(grads, state, params):
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state, memory = chain.init(ours), {}
    for n in range(STEPS):
        grads = jax.tree.map(lambda p: rng.standard_normal(p.shape), params)
        ours, state = update(
            jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads), state, ours
        )

        def step(path, p, g, n=n):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return oracle(name, p, g, n, memory.setdefault(name, {}))

        params = jax.tree_util.tree_map_with_path(step, params, grads)
    return ours, state, params, memory


def decayed(name):
    return 0.0 if name.endswith("scale") else 0.3


def adam_step(g, n, memory, beta1, beta2):
    mu = memory["mu"] = beta1 * memory.get("mu", 0.0) + (1 - beta1) * g
    nu = memory["nu"] = beta2 * memory.get("nu", 0.0) + (1 - beta2) * g**2
    return mu / (1 - beta1 ** (n + 1)) / (np.sqrt(nu / (1 - beta2 ** (n + 1))) + 1e-8)


def test_lion_steps_by_sign_of_mean_gradient(rng):
    def oracle(name, p, g, n, memory):
        mean = memory.get("mean", 0.0)
        step = np.sign(0.8 * mean + 0.2 * g)
        memory["mean"] = 0.9 * mean + 0.1 * g
        return p - RATE * (step + decayed(name) * p)

    ours, _, wanted, _ = followed(Lion(beta1=0.8, beta2=0.9, weight_decay=0.3), rng, oracle)
    jax.tree.map(lambda a, b: assert_near(a, b, 2e-6), ours, wanted)


def adafactor_step(g, n, memory, smallest):
    """Return algorithm 4 of Shazeer and Stern 2018 for one parameter, clipped at 0.5."""
    weight = 1 - (n + 1.0) ** -0.7
    square = g**2 + 1e-30
    if g.ndim >= 2 and sorted(g.shape)[-2] >= smallest:
        # the two longest axes, the longest last, and the mean over the others
        longest = np.argsort(g.shape, kind="stable")[-2:]
        d1, d0 = int(longest[0]), int(longest[1])
        row = weight * memory.get("row", 0.0) + (1 - weight) * square.mean(axis=d0, keepdims=True)
        column = weight * memory.get("column", 0.0)
        column = column + (1 - weight) * square.mean(axis=d1, keepdims=True)
        memory.update(row=row, column=column)
        moment = row * column / row.mean(axis=d1, keepdims=True)
    else:
        moment = memory["all"] = weight * memory.get("all", 0.0) + (1 - weight) * square
    step = g / np.sqrt(moment)
    return step / max(1.0, np.sqrt((step**2).mean()) / 0.5)


def test_adafactor_factors_second_moments_and_clips_each_step(rng):
    def oracle(name, p, g, n, memory):
        return p - RATE * (adafactor_step(g, n, memory, 3) + decayed(name) * p)

    settings = Adafactor(decay_rate=0.7, smallest_factored=3, clipping=0.5, weight_decay=0.3)
    ours, _, wanted, memory = followed(settings, rng, oracle)
    jax.tree.map(lambda a, b: assert_near(a, b, 5e-6), ours, wanted)
    assert {name for name, kept in memory.items() if "row" in kept} == {
        "block_0/query/kernel", "block_0/out/kernel", "tokens"
    }  # fmt: skip


BLOCK = {
    "attention": {"query": {"kernel": (11, 2, 3), "bias": (2, 3)}, "own_gain": (11,)},
    "feed_forward": {
        "router": {"kernel": (11, 5)},
        "up": {"kernel": (5, 11, 7), "bias": (5, 7), "a": (5, 11, 3), "b": (5, 3, 7)},
    },
    "norm": {"scale": (11,)},
}


def layers_of(rng, scale=1.0):
    """Return arrays of three looped blocks; those of the first are 50 times larger."""

    def drawn(size):
        draw = lambda shape: np.float32(size * rng.standard_normal(shape))  # noqa: E731
        return jax.tree.map(draw, BLOCK, **LEAF)

    return {f"block_{i}": drawn(50 * scale if i == 0 else scale) for i in range(3)}


@pytest.mark.slow_except("Muon")
@pytest.mark.parametrize(
    "optimizer",
    [
        Adafactor(smallest_factored=4, clipping=0.5),
        Adafactor(smallest_factored=999, clipping=0.5),
        AdamW(),
        SGD(momentum=0.7),
        Lion(),
        Muon(),
        ScheduleFree(),
    ],
    ids=lambda settings: (
        f"{type(settings).__name__} {getattr(settings, 'smallest_factored', '')}".strip()
    ),
)
def test_scanned_and_looped_stacks_receive_same_updates(optimizer, rng):
    """Includes a layer with a far larger gradient, and a vector with its own block."""
    chain = make_optimizer(replace(BASE, optimizer=optimizer))
    update, looped = jax.jit(chain.update), layers_of(rng, scale=0.1)
    scanned = stack_layers(looped)
    states = [chain.init(looped), chain.init(scanned)]
    for _ in range(3):
        grads = layers_of(rng)
        one, states[0] = update(grads, states[0], looped)
        two, states[1] = update(stack_layers(grads), states[1], scanned)
        jax.tree.map(lambda a, b: assert_near(a, b, 2e-6), two, stack_layers(one))
        add = lambda p, step: p + np.asarray(step)  # noqa: E731
        looped, scanned = jax.tree.map(add, looped, one), jax.tree.map(add, scanned, two)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one))


@pytest.mark.parametrize("blocks", ["block_0", "blocks"])
def test_adafactor_treats_each_expert_of_each_layer_separately(blocks, rng):
    shapes = {"kernel": (5, 11, 7), "bias": (5, 7), "a": (5, 11, 3)}
    layers = (3,) if blocks == "blocks" else ()
    chain = make_optimizer(
        replace(BASE, optimizer=Adafactor(
            decay_rate=0.7, smallest_factored=4, clipping=0.5, weight_decay=0.0
        ))
    )  # fmt: skip

    def drawn():  # the first expert of the first layer gets a far larger gradient
        found = {name: rng.standard_normal(layers + shape) for name, shape in shapes.items()}
        for leaf in found.values():
            leaf[(0,) * (len(layers) + 1)] *= 50
        return found

    nest = lambda tree: {blocks: {"feed_forward": {"up": jax.tree.map(np.float32, tree)}}}  # noqa: E731
    params = nest(drawn())
    state, memory = chain.init(params), {}
    for n in range(3):
        grads = drawn()
        step, state = jax.jit(chain.update)(nest(grads), state, params)
        for name, grad in grads.items():
            found = np.asarray(step[blocks]["feed_forward"]["up"][name])
            for at in np.ndindex(*layers, 5):
                layer_state = memory.setdefault((name, at), {})
                wanted = -RATE * adafactor_step(grad[at], n, layer_state, 4)
                assert_near(found[at], wanted, 5e-6, f"{name} {at}")
    assert {name for (name, _), layer_state in memory.items() if "row" in layer_state} == {"kernel"}


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_momentum_is_decayed_sum_of_gradients(rng, momentum):
    """w - rate g without momentum, as in the lectures; Polyak (1964) with momentum."""

    def oracle(name, p, g, n, memory):
        memory["sum"] = g + momentum * memory.get("sum", 0.0)
        return p - RATE * memory["sum"]

    ours, _, wanted, _ = followed(SGD(momentum=momentum), rng, oracle)
    jax.tree.map(lambda a, b: assert_near(a, b, 5e-6), ours, wanted)


def orthogonalised(matrix):
    """Apply five Newton-Schulz iterations (Jordan et al. 2024) to a float64 matrix."""
    x = matrix / np.linalg.norm(matrix)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.slow
def test_muon_orthogonalizes_block_matrices_and_uses_adamw_otherwise(rng):
    """The attention matrices are [D, (N H)] for the query and [(N H), D] for the output."""

    def oracle(name, p, g, n, memory):
        if not name.endswith("kernel"):
            return p - RATE * (adam_step(g, n, memory, 0.8, 0.9) + decayed(name) * p)
        mean = memory["mean"] = 0.7 * memory.get("mean", 0.0) + 0.3 * g
        ahead = (0.7 * mean / (1 - 0.7 ** (n + 2))) + 0.3 * g / (1 - 0.7 ** (n + 1))
        matrix = ahead.reshape(5, 6) if "query" in name else ahead.reshape(6, 5)
        step = orthogonalised(matrix) * 0.2 * np.sqrt(6)
        return p - RATE * (step.reshape(p.shape) + decayed(name) * p)

    settings = Muon(momentum=0.7, beta1=0.8, beta2=0.9, weight_decay=0.3)
    ours, _, wanted, _ = followed(settings, rng, oracle)
    jax.tree.map(lambda a, b: assert_near(a, b, 2e-5), ours, wanted)


def test_muon_treats_each_stacked_layer_as_separate_matrix():
    config = ModelConfig(d_model=22, num_heads=2, num_layers=3, max_len=13, glu=True)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    found = matrix_dimensions(params)
    assert found["embed"]["tokens"] is None and found["decoder"]["norm"]["scale"] is None
    block = found["decoder"]["block_1"]
    assert block["attention"]["query"]["kernel"] == ((0,), (1, 2))
    assert block["attention"]["out"]["kernel"] == ((0, 1), (2,))
    assert block["feed_forward"]["gate"]["kernel"] == ((0,), (1,))
    assert block["attention"]["query"]["bias"] is None
    stacked = matrix_dimensions(jax.eval_shape(stack_layers, params["decoder"]))["blocks"]
    assert stacked["attention"]["out"]["kernel"] == ((1, 2), (3,))


def test_schedule_free_is_evaluated_at_average_of_steps(rng):
    """z follows AdamW, x is the mean of all z, and gradients are taken at y between them."""

    def oracle(name, p, g, n, memory):
        z, x = memory.get("z", p), memory.get("x", p)
        nu = memory["nu"] = 0.9 * memory.get("nu", 0.0) + 0.1 * g**2
        step = g / (np.sqrt(nu / (1 - 0.9 ** (n + 1))) + 1e-8)
        z = z - RATE * (step + decayed(name) * p)
        x = x + (z - x) / (n + 1)
        memory.update(z=z, x=x)
        return 0.8 * x + 0.2 * z

    settings = ScheduleFree(beta1=0.8, beta2=0.9, weight_decay=0.3)
    ours, state, wanted, memory = followed(settings, rng, oracle)
    jax.tree.map(lambda a, b: assert_near(a, b, 5e-6), ours, wanted)
    used = jax.tree_util.tree_flatten_with_path(averaged_params(state, ours))[0]
    for path, leaf in used:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert_near(leaf, memory[name]["x"], 5e-6, name)


@pytest.mark.slow
@pytest.mark.long_except("AdamW")
@pytest.mark.parametrize(
    "optimizer",
    [AdamW(), SGD(momentum=0.7), Adafactor(), Lion(), Muon(), ScheduleFree()],
    ids=lambda o: type(o).__name__,
)
def test_frozen_parameters_do_not_change_with_any_optimizer(optimizer, rng):
    config = replace(BASE, optimizer=optimizer, frozen=("tokens",))
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), jnp.float32), SHAPES, **LEAF
    )
    chain = make_optimizer(config)
    state, now = chain.init(params), params
    for _ in range(3):
        updates, state = chain.update(jax.tree.map(jnp.ones_like, params), state, now)
        now = optax.apply_updates(now, updates)
    used = averaged_params(state, now)
    assert np.array_equal(now["tokens"], params["tokens"])
    assert_near(used["tokens"], np.asarray(params["tokens"]), 1e-6)
    assert np.abs(used["block_0"]["out"]["kernel"] - params["block_0"]["out"]["kernel"]).min() > 0


def test_frozen_name_matches_whole_path_components():
    names = ["block_1/bias", "block_1/kernel", "block_10/kernel", "embed/tokens"]
    params = unflatten_dict(dict.fromkeys(names, jnp.zeros(3)), sep="/")

    def frozen(*names):
        return [n for n, m in flatten_dict(is_frozen(names, params), sep="/").items() if m]

    assert frozen("block_1") == frozen("block_1/") == names[:2]
    assert frozen("block_10", "block_1/kernel") == names[1:3]
    for part in ("block_", "block", "block_1/ker", "embed/token", "tokens"):
        with pytest.raises(
            ConfigError, match=f"frozen contains {part!r}: no parameter name begins with it"
        ):
            frozen(part)


def test_frozen_gradients_do_not_affect_updates():
    """However large it is, a frozen gradient does not count in the clipped norm."""
    chain = make_optimizer(replace(BASE, frozen=("fixed",), clip_norm=1.0))
    params = {"fixed": np.ones((3, 5), np.float32), "moved": np.ones((5, 2), np.float32)}
    update, found = jax.jit(chain.update), []
    for size in (0.0, 1e6):
        state, updates = chain.init(params), None
        for frozen_gradient, slope in (
            (size, 0.25),
            (0.0, -0.125),
        ):  # the second step depends on the first
            grads = {"fixed": np.full((3, 5), frozen_gradient), "moved": np.full((5, 2), slope)}
            updates, state = update(jax.tree.map(np.float32, grads), state, params)
        found.append(updates)
    assert not np.any(found[1]["fixed"]) and np.all(found[0]["moved"])
    np.testing.assert_array_equal(found[0]["moved"], found[1]["moved"])


def linear_loss(params, batch, key):
    del key
    return jnp.sum(params["w"] * batch.tokens), jnp.float32(1)


@pytest.mark.slow
def test_bfloat16_parameters_follow_tiny_updates_on_average(rng):
    """Each step is 2^-12 of a weight, a sixteenth of what rounding to nearest would keep."""
    rates = dict(learning_rate=2**-12, min_learning_rate=2**-12)
    config = replace(BASE, optimizer=AdamW(weight_decay=0.0), **rates)
    optimizer = make_optimizer(config)
    step = make_train_step(linear_loss, optimizer)
    params = {"w": jnp.ones((64, 64))}
    state = start_state(params, optimizer, jax.random.key(3), param_dtype=jnp.bfloat16)
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.opt_state[1][0].mu["w"].dtype == jnp.float32
    batch = Batch(jnp.ones((1, 64, 64)), jnp.ones((1, 64, 64), jnp.int32))
    for _ in range(64):
        state, _ = step(state, batch)
    moved = 1 - np.asarray(state.params["w"], np.float64)
    assert set(np.unique(moved * 2**8)) <= set(range(-20, 20)) and len(np.unique(moved)) > 4
    assert moved.mean() == pytest.approx(64 * 2**-12, rel=0.03)


def test_stochastic_rounding_probability_equals_fractional_distance():
    """Near 1, bfloat16 has a spacing of 2^-7; representable values do not change."""
    x = np.full((3, 4096), 1.0, np.float32)
    x[0] += 2.0**-9
    x[1] += 2.0**-7
    found = np.asarray(jax.jit(round_stochastically)(x, jax.random.key(3))).astype(np.float64)
    assert set(found[0]) == {1.0, 1 + 2.0**-7}
    assert (found[0] > 1).mean() == pytest.approx(0.25, abs=0.03)
    assert set(found[1]) == {1 + 2.0**-7} and set(found[2]) == {1.0}


@pytest.mark.slow
def test_stochastic_rounding_preserves_exact_and_nonfinite_values():
    exact = jnp.array([0.0, 1.0, -3.5, 2.0**100, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    found = round_stochastically(exact, jax.random.key(0))
    assert np.array_equal(np.asarray(found, np.float32), np.asarray(exact), equal_nan=True)
    between = jnp.full(20_000, 1 + 2**-9, jnp.float32)  # a quarter of the spacing above 1
    found = np.asarray(round_stochastically(between, jax.random.key(1)), np.float32)
    assert set(np.unique(found)) == {1.0, 1.0 + 2**-7}
    assert (found > 1).mean() == pytest.approx(0.25, abs=0.015)


def test_parameter_average_matches_formula_and_skips_rejected_steps(rng):
    optimizer = make_optimizer(replace(BASE, optimizer=AdamW(weight_decay=0.0)))
    step = make_train_step(linear_loss, optimizer, ema_decay=0.75)
    start = rng.standard_normal((5, 3)).astype(np.float32)
    state = start_state({"w": jnp.asarray(start)}, optimizer, jax.random.key(0), average=True)
    average = start.astype(np.float64)
    for n in range(5):
        scale = np.nan if n == 2 else 1.0
        tokens = jnp.asarray(scale * rng.standard_normal((1, 5, 3)), jnp.float32)
        state, _ = step(state, Batch(tokens, jnp.zeros((1, 5), jnp.int32)))
        if n != 2:
            average = 0.75 * average + 0.25 * np.asarray(state.params["w"], np.float64)
    assert int(state.rejected) == 1
    assert_near(state.average["w"], average, 1e-6)
    assert state.eval_params is state.average
