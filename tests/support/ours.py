"""Let a class of a test count as one of the package: its programs are found by value."""


def as_ours(kind):
    """Return the class as if the package had it; a foreign one is traced again at each call."""
    kind.__module__ = "transformer_jax.tests"
    return kind
