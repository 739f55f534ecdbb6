"""Learning rates against their formulas, and frozen parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.training.batch import Batch, batch_loss
from transformer_jax.training.optimizers import (
    learning_rate_schedule,
    make_optimizer,
    without_frozen,
)
from transformer_jax.training.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

PEAK, END, WARMUP, STEPS, DECAY = 0.7, 0.1, 7, 31, 5


def after_warmup(name, count):
    """Return the rate of an update after the warm-up, from the formula in float64."""
    left = STEPS - WARMUP
    share = min((count - WARMUP) / left, 1.0)
    match name:
        case "cosine":
            return END + (PEAK - END) * (1 + np.cos(np.pi * share)) / 2
        case "linear":
            return PEAK + (END - PEAK) * share
        case "inverse_sqrt":
            return max(PEAK * np.sqrt((WARMUP + 1) / (count + 1)), END)
        case "wsd":
            done = np.clip((count - (STEPS - DECAY)) / DECAY, 0.0, 1.0)
            return PEAK + (END - PEAK) * done
        case "constant":
            return PEAK
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["cosine", "linear", "inverse_sqrt", "wsd", "constant"])
def test_schedule_warms_up_linearly_then_follows_formula(name):
    config = TrainConfig(
        schedule=name, steps=STEPS, warmup_steps=WARMUP, learning_rate=PEAK,
        min_learning_rate=END, decay_steps=DECAY if name == "wsd" else None,
    )  # fmt: skip
    rate = learning_rate_schedule(config)
    found = jax.jit(rate)(np.arange(STEPS + 3))
    rising = [PEAK * (count + 1) / (WARMUP + 1) for count in range(WARMUP)]
    wanted = rising + [after_warmup(name, count) for count in range(WARMUP, STEPS + 3)]
    assert_near(found, np.array(wanted), 1e-6)


def test_run_can_end_during_warmup():
    config = TrainConfig(
        steps=WARMUP, warmup_steps=WARMUP, learning_rate=PEAK, min_learning_rate=END
    )
    found = learning_rate_schedule(config)(np.arange(WARMUP + 2))
    rising = [PEAK * (count + 1) / (WARMUP + 1) for count in range(WARMUP)]
    assert_near(found, np.array([*rising, END, END]), 1e-6)


def test_wsd_decays_over_a_tenth_of_steps_by_default():
    config = TrainConfig(
        schedule="wsd", steps=50, warmup_steps=0, learning_rate=1.0, min_learning_rate=0.0
    )
    rate = learning_rate_schedule(config)
    assert [float(rate(np.int32(n))) for n in (44, 45)] == [1.0, 1.0]
    assert float(rate(np.int32(47))) == pytest.approx(0.6)


@pytest.mark.long
def test_gradient_norm_and_products_cover_only_trained_parameters(rng):
    """With only one block's feed-forward layer trained, the norm is that of its gradient."""
    model = ModelConfig(vocab_size=5, d_model=6, num_heads=2, num_layers=2, d_ff=7, max_len=3)
    names = ("embed", "decoder/norm", "decoder/block_0", "decoder/block_1/attention",
             "decoder/block_1/norm_attention", "decoder/block_1/norm_feed_forward")  # fmt: skip
    text = jnp.asarray(rng.integers(0, 5, (4, 4)))
    batch, whole = Batch(text[:, :-1], text[:, 1:]), batch_loss(model)
    optimizer = make_optimizer(TrainConfig(frozen=names, warmup_steps=0))
    norms, operations = [], []
    for loss in (without_frozen(whole, names), whole):
        state = init_state(model, optimizer, 0)
        gradients = jax.grad(lambda p: whole(p, batch, None)[0])(state.params)
        micro = jax.tree.map(lambda leaf: leaf[None], batch)
        program = make_train_step(loss, optimizer).lower(state, micro).compile()
        operations.append(program.cost_analysis()["flops"])
        norms.append(float(program(state, micro)[1].grad_norm))
    trained = jax.tree.leaves(gradients["decoder"]["block_1"]["feed_forward"])
    wanted = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in trained))
    assert norms[0] == pytest.approx(wanted, 1e-5) and norms[1] > 1.1 * wanted
    assert operations[0] < 0.8 * operations[1]
