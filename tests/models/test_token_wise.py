"""Tests of `is_wise`: it must not accept functions that mix tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.token_wise import is_wise

B, T, N, H = 3, 5, 4, 6
MATRIX = np.random.default_rng(0).standard_normal((H, H)).astype(np.float32)
ROW = MATRIX[0].reshape(1, 1, 1, H)

BY_TOKEN = {
    "square": jnp.square, "zeros": jnp.zeros_like, "one head": lambda x: x.at[:, :, 2].set(0),
    "some heads": lambda x: x.at[:, :, jnp.array([1, 2])].set(0),
    "swapped heads": lambda x: x[:, :, jnp.array([1, 0, 3, 2])],
    "a feature": lambda x: x.at[..., 0].add(3.0), "added": lambda x: x + ROW,
    "projected": lambda x: x @ MATRIX,
    "a direction removed": lambda x: x - (x @ MATRIX[0])[..., None] * ROW,
    "normalised": lambda x: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5),
    "softmax": lambda x: jax.nn.softmax(x, -1), "gelu": jax.nn.gelu,
    "chosen": lambda x: jnp.where(x > 0, x, 0),
    "einsum": lambda x: jnp.einsum("btnh,hk->btnk", x, MATRIX),
    "reshaped": lambda x: (x.reshape(*x.shape[:2], -1)[..., ::-1]).reshape(x.shape),
    "stacked": lambda x: jnp.stack([x[:, :, i] for i in range(N)], 2),
    "largest by top_k": lambda x: jnp.where(x >= jax.lax.top_k(x, 2)[0][..., -1:], x, 0),
    "largest kept": lambda x: jnp.where(x >= jnp.sort(x, -1)[..., -2:-1], x, 0),
    "ramp": lambda x: x + jnp.arange(H, dtype=x.dtype).reshape(1, 1, 1, H),
    "half precision": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "jitted": jax.jit(lambda x: 2 * x),
    "projected from the left, by head": lambda x: jax.lax.dot_general(
        np.stack([MATRIX] * N), x, (((1,), (3,)), ((0,), (2,)))
    ).transpose(2, 3, 0, 1),
    "times its norm": lambda x: x * jnp.einsum("btnh,btnh->btn", x, x)[..., None],
    "looked up": lambda x: jnp.asarray(MATRIX)[jnp.clip(x[..., 0], 0, H - 1).astype(int)],
    "halves swapped": lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1),
    "features shifted": lambda x: jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], -1),
    "features padded": lambda x: jnp.pad(x[..., 1:], [(0, 0)] * 3 + [(0, 1)]),
}  # fmt: skip
OF_SEVERAL = {
    "mean": lambda x: x - x.mean(1, keepdims=True),
    "first token": lambda x: x.at[:, 0].set(0),
    "last token": lambda x: x.at[:, -1].set(0),
    "relative to the first token": lambda x: x - x[:, :1],
    "token 5 of a head": lambda x: x.at[:, 5, 2].set(0),
    "largest of tokens": lambda x: jnp.where(
        x >= jax.lax.top_k(x.swapaxes(1, -1), 1)[0].swapaxes(1, -1), x, 0
    ),
    "cumulative": lambda x: jnp.cumsum(x, 1),
    "reversed": lambda x: x[:, ::-1],
    "rolled": lambda x: jnp.roll(x, 1, axis=1),
    "numbered": lambda x: x * jnp.arange(x.shape[1]).reshape(1, -1, 1, 1),
    "of a fixed length": lambda x: x + np.ones((1, T, N, H), np.float32),
    "by the largest": lambda x: x / jnp.abs(x).max(),
    "flattened": lambda x: x.reshape(x.shape[0], -1)[:, ::-1].reshape(x.shape),
    "attention": lambda x: jnp.einsum("btnh,bsnh->btnh", x, x),
    "softmax over tokens": lambda x: jax.nn.softmax(x, 1),
    "prompts only": lambda x: x + ROW if x.shape[1] > 1 else x,
    "decoding only": lambda x: x + ROW if x.shape[1] == 1 else x,
    "divided by their number": lambda x: x / x.shape[1],
    "times their number": lambda x: x + ROW * x.shape[1],
    "a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, y: 2 * y, x),
}


@pytest.mark.parametrize("name", [*BY_TOKEN, *OF_SEVERAL])
def test_token_wise_functions_are_recognized(name):
    value = jax.ShapeDtypeStruct((B, 1, N, H), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        found = is_wise((BY_TOKEN | OF_SEVERAL)[name], [value], 1, 13)
    assert found == (name in BY_TOKEN)


@pytest.mark.parametrize("name", sorted(BY_TOKEN))
def test_token_wise_functions_commute_with_slicing(name):
    """Verify the table above on slices of a concrete array."""
    value = np.random.default_rng(1).standard_normal((B, T, N, H)).astype(np.float32)
    with jax.numpy_rank_promotion("allow"):
        whole = np.asarray(BY_TOKEN[name](jnp.asarray(value)))
        parts = [BY_TOKEN[name](jnp.asarray(value[:, t : t + 1])) for t in (0, T - 1)]
    np.testing.assert_allclose(whole[:, [0, T - 1]], np.concatenate(parts, 1), atol=1e-6)


def test_row_wise_functions_and_positions_are_recognized():
    value = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    positions = jax.ShapeDtypeStruct((B, T), jnp.int32)
    assert is_wise(lambda x: x.at[:, 0].set(0), [value], 0, B)
    assert not is_wise(lambda x: x - x.mean(0, keepdims=True), [value], 0, B)
    assert not is_wise(lambda x: x + np.ones((B, 1, 1), np.float32), [value], 0, B)
    by_itself = {
        "a number of each": lambda x: x + np.ones((B, 1, H), np.float32),
        "one": lambda x: x.at[1].add(MATRIX[0]),
        "some": lambda x: x.at[jnp.array([0, -1])].set(0),
        "chosen": lambda x: jnp.where((jnp.arange(B) == 1)[:, None, None], 0, x),
        "written over": lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((1, T, H)), (1, 0, 0)),
    }
    of_several = {
        "swapped": lambda x: x[jnp.array([1, 0, 2])],
        "copied": lambda x: x.at[0].set(x[1]),
        "added elsewhere": lambda x: x.at[jnp.array([1, 0, 2])].add(x),
        "written": lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0, 0)),
        "mean": lambda x: x - x.mean(0, keepdims=True),
        "rolled": lambda x: jnp.roll(x, 1, axis=0),
    }
    for name, function in (by_itself | of_several).items():
        assert is_wise(function, [value], 0, B, alike=False) == (name in by_itself), name
        assert not is_wise(function, [value], 0, B), name
    third = lambda x, p: jnp.where((p == 3)[..., None], 0, x)  # noqa: E731
    last = lambda x, p: jnp.where((p == p.max(1, keepdims=True))[..., None], 0, x)  # noqa: E731
    assert is_wise(third, [value, positions], 1, 13)
    assert not is_wise(last, [value, positions], 1, 13)


def test_token_wise_functions_may_close_over_traced_values():
    value, found = jax.ShapeDtypeStruct((B, 1, H), jnp.float32), []

    @jax.jit
    @jax.vmap
    def ask(strength):
        found.append(is_wise(lambda x: x * strength, [value], 1, 13))
        found.append(is_wise(lambda x: x.at[:, strength.astype(int)].set(0), [value], 1, 13))
        return strength

    ask(jnp.ones(2))
    assert found == [True, False]
