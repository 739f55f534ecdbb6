"""Treat a class of a test like one of the package, whose programs are cached by value."""


def as_ours(kind):
    """Mark the class as part of the package; classes of other modules are traced at each call."""
    kind.__module__ = "transformer_jax.tests"
    return kind
