"""Steering vectors against explicit means, and rejected arguments."""

import jax
import numpy as np
import pytest

from tests.interpret.tiny import N, draw, model_of
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.interpret import steering_vector

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32


@pytest.mark.parametrize("over", ["last", "all"])
def test_embedding_steering_vector_matches_embedding_tables(over):
    model, params = model_of("gpt2")
    positive, negative = [[3, 5, 7, 11], [2, 19]], [[13], [17, 23, 29, 5]]
    found = steering_vector(model, params, positive, negative, "embedding", over=over)
    tables = [np.asarray(params["embed"][name], np.float64) for name in ("tokens", "positions")]

    def read(row: list[int]) -> np.ndarray:
        x = tables[0][row] + tables[1][: len(row)]
        return x[-1] if over == "last" else x.mean(axis=0)

    wanted = [np.mean([read(row) for row in rows], axis=0) for rows in (positive, negative)]
    assert_near(found, wanted[0] - wanted[1], NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["llama", "bert"])
def test_steering_vector_ignores_padding(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    place = "block_1/attention/heads"
    long, short = draw(3), draw(4, rows=3)[:, :4]
    rows = [long[0], short[0], short[1]]
    found = steering_vector(model, params, rows, long, place, over="all")

    read = jax.jit(lambda tokens: model.apply({"params": params}, tokens, capture=(place,))[2])
    value = lambda row: np.asarray(read(row[None])[place], np.float64)[0].mean(0)  # noqa: E731
    wanted = np.mean([value(row) for row in rows], 0) - np.mean([value(row) for row in long], 0)
    assert found.shape == (N, 6)
    assert_near(found, wanted, NEAR)
    assert np.abs(wanted).max() > 0.01


@pytest.mark.slow
def test_steering_accepts_array_or_list_of_rows():
    model, params = model_of("gpt2", scanned=True)
    edit = {"block_0/residual": lambda x: 2 * x}
    given, place = (draw(3), draw(4)), "block_1/residual"
    edited = model.edited(edit)
    of = jax.jit(lambda own, *rows: steering_vector(edited, own, *rows, place))
    found = of(params, *given)
    assert_near(found, steering_vector(edited, params, *map(list, given), place), NEAR)
    plain = steering_vector(model, params, draw(3), draw(4), "block_1/residual")
    assert np.abs(found - plain).max() > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(place="block_*/residual"), r"place is 'block_\*/residual': must be one place"),
        (dict(place="block_0/attention/weights"), "place is .*: must be one place with a value"),
        (dict(over="first"), "over is 'first': must be 'last' or 'all'"),
        (dict(positive=[]), r"positive is \[\]: must be rows of token IDs, each with at least one"),
        (dict(negative=[[3], []]), r"negative is \[\[3\], \[\]\]: must be rows"),
        (dict(positive="bad"), "positive is 'bad': must be rows of token IDs"),
        (dict(positive=[[3.5]]), r"positive is \[\[3.5\]\]: must be rows of token IDs"),
        (dict(positive=[3, 4]), r"positive is \[3, 4\]: must be rows of token IDs"),
        (dict(negative=[[2**40]]), "negative contains 1099511627776"),
        (dict(positions=None), "steering_vector does not accept positions"),
    ],
)
def test_invalid_steering_arguments_are_rejected(arguments, message):
    model, params = model_of("llama")
    given = dict(positive=draw(3), negative=draw(4), place="block_0/residual") | arguments
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda own: steering_vector(model, own, **given), params)
