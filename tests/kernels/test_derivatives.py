"""Derivatives of `differentiable`: which code computes them, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from transformer_jax.kernels.derivatives import Passes, differentiable

X = jnp.asarray(np.linspace(0.1, 0.9, 5, dtype=np.float32))
Y = jnp.asarray(np.linspace(-0.7, 0.8, 5, dtype=np.float32))
V = jnp.asarray(np.linspace(1.3, -0.4, 5, dtype=np.float32))
ROWS = jnp.asarray(np.stack([X, Y]))  # JAX 0.10 cannot map NumPy arrays inside a trace
INDICES = np.array([3, 0, 4, 4, 1])
TWICE = 2.0  # factor that marks gradients of the backward pass


def sine(x, y, indices=INDICES, requested=None):
    """Return sin(x) y[indices], with a marked backward pass and unmarked plain code."""

    def plain(tree):
        return (jnp.sin(tree["x"]) * tree["y"][tree["indices"]],)

    def forward(tree):
        return plain(tree), (jnp.cos(tree["x"]), tree["indices"])

    def backward(tree, saved, cotangents, wanted):
        if requested is not None:
            requested.append(wanted)
        (cosine, indices), (dout,) = saved, cotangents
        dy = jnp.zeros_like(tree["y"]).at[indices].add(dout * jnp.sin(tree["x"]))
        return dict(x=TWICE * dout * cosine * tree["y"][indices], y=TWICE * dy, indices=None)

    tree = dict(x=x, y=y, indices=jnp.asarray(indices))
    return differentiable(plain, Passes(forward, backward, plain), tree)[0]


def plainly(x, y):
    return jnp.sin(x) * y[INDICES]


def both(way):
    """Apply a transformation to the function and to its plain version."""
    return (np.asarray(jax.jit(way, static_argnums=0)(f), np.float64) for f in (sine, plainly))


def gradient(f):
    return jax.grad(lambda x, y: (f(x, y) * V).sum(), (0, 1))


WAYS = {
    # computed by the backward pass: twice the gradient
    "grad": (TWICE, lambda f: jnp.stack(gradient(f)(X, Y))),
    "grad under vmap": (TWICE, lambda f: jax.vmap(gradient(f), (0, None))(ROWS, Y)[0]),
    "grad of vmap": (
        TWICE,
        lambda f: jax.grad(lambda y: (jax.vmap(f, (0, None))(ROWS, y) @ V).sum())(Y),
    ),
    "grad of vmap over another axis": (
        TWICE,
        lambda f: jax.grad(lambda x: (jax.vmap(f, (1, None))(x, Y) @ V).sum())(np.outer(X, Y)),
    ),
    "grad of remat": (
        TWICE, lambda f: jnp.stack(gradient(jax.checkpoint(f))(X, Y))
    ),
    "grad of scan": (
        TWICE,
        lambda f: jax.grad(
            lambda y: jax.lax.scan(lambda n, x: (n, f(x, y) * V), 0, ROWS)[1].sum()
        )(Y),
    ),
    # computed by the plain code
    "jvp": (1.0, lambda f: jax.jvp(f, (X, Y), (V, X))[1]),
    "jvp along one": (1.0, lambda f: jax.jvp(lambda y: f(X, y), (Y,), (V,))[1]),
    "linearize": (1.0, lambda f: jax.linearize(f, X, Y)[1](V, X)),
    "jacfwd": (1.0, lambda f: jax.jacfwd(f)(X, Y)),
    "jvp of vmap": (
        1.0,
        lambda f: jax.jvp(lambda y: jax.vmap(f, (0, None))(ROWS, y), (Y,), (V,))[1],
    ),
    "jvp of jvp's value": (
        1.0, lambda f: jax.jvp(lambda x: jax.jvp(f, (x, Y), (V, X))[0], (X,), (Y,))[1]
    ),
    "jvp of jvp": (1.0, lambda f: jax.jvp(lambda x: jax.jvp(f, (x, Y), (V, X))[1], (X,), (Y,))[1]),
    "jvp of jvp along what moves": (
        1.0,
        lambda f: jax.jvp(lambda x: jax.jvp(f, (x, Y), (x * V, X))[1], (X,), (Y,))[1],
    ),
    "jvp of a scan": (
        1.0,
        lambda f: jax.jvp(
            lambda y: jax.lax.scan(lambda n, x: (n, f(x, y)), 0, ROWS)[1], (Y,), (V,)
        )[1],
    ),
    "forward over reverse": (
        1.0, lambda f: jnp.stack(jax.jvp(gradient(f), (X, Y), (V, X))[1])
    ),
    "reverse over reverse": (
        1.0, lambda f: jax.grad(lambda x: (gradient(f)(x, Y)[0] * Y).sum())(X)
    ),
    "third order": (
        1.0, lambda f: jax.grad(lambda x: jax.grad(lambda x: gradient(f)(x, Y)[0][0])(x)[0])(X)
    ),
}  # fmt: skip


@pytest.mark.slow_except("jvp", "jvp along one", "jvp of jvp", "linearize", "jvp of jvp's value")
@pytest.mark.parametrize("name", WAYS)
def test_gradients_use_fused_backward_pass_and_other_derivatives_plain_code(name):
    factor, way = WAYS[name]
    found, plain = both(way)
    assert plain.any()
    np.testing.assert_allclose(found, factor * plain, rtol=2e-6, atol=1e-6)


def test_transposed_tangent_uses_fused_backward_pass():
    """Terms linear in the tangent are transposed, the others are differentiated."""
    by_tangent = lambda f: jax.grad(lambda v: (jax.jvp(f, (X, Y), (v, X))[1] * V).sum())(V)  # noqa: E731
    by_primal = lambda f: jax.grad(lambda x: (jax.jvp(f, (x, Y), (V, X))[1] * V).sum())(X)  # noqa: E731
    for way, factor in ((by_tangent, TWICE), (by_primal, 1.0)):
        found, plain = both(way)
        np.testing.assert_allclose(found, factor * plain, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
def test_backward_pass_computes_only_requested_gradients():
    requested: list = []
    jax.grad(lambda y: sine(X, y, requested=requested).sum())(jnp.asarray(Y))
    assert requested == [dict(x=False, y=True, indices=False)]


def test_undifferentiated_program_contains_no_derivative_code():
    text = str(jax.make_jaxpr(sine)(X, Y))
    assert "cos" not in text


@pytest.mark.slow
def test_gradients_of_replicated_arguments_are_summed_over_devices():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    def split(x, y):
        return sine(x[0], jax.lax.pcast(y, ("rows",), to="varying"))[None]

    found = jax.jit(jax.grad(lambda y: (split(X[None], y) * V[None]).sum()))(Y)
    np.testing.assert_allclose(found, TWICE * gradient(plainly)(X, Y)[1], rtol=2e-6, atol=1e-6)
    _, slope = jax.jit(lambda y: jax.jvp(lambda y: split(X[None], y), (y,), (jnp.asarray(V),)))(Y)
    np.testing.assert_allclose(slope[0], jax.jvp(plainly, (X, Y), (0 * X, V))[1], rtol=2e-6)
