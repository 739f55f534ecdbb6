"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_120)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


def pytest_collection_modifyitems(items):
    """A class with `every_time` runs these tests of its suite; the others are `slow`. What it names
    in `known` fails, with the reason."""
    for item in items:
        known = getattr(item.cls, "known", {}).get(item.name)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known, strict=True))
        chosen = getattr(item.cls, "every_time", None)
        seldom = item.name in getattr(item.cls, "seldom", ())
        if seldom or (chosen is not None and not {item.name, item.originalname} & chosen):
            item.add_marker("slow")
