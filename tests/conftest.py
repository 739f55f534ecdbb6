"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if sys.version_info >= (3, 12):  # jax 0.12, whose interpreter of Mosaic GPU holds one of XLA's
    os.environ.setdefault("PJRT_NPROC", "8")  # threads for each warpgroup: two cores are too few

import jax
import numpy as np
import pytest

pytest.register_assert_rewrite("attention_suite", "published", "tolerances")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

gc.freeze()
gc.set_threshold(100_000, 20, 20)  # traces are many objects: looking for garbage is a tenth of all


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_120)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


@pytest.fixture(autouse=True)
def torch_begins_anew():
    """Where a test compares with torch, its models have the same initial values every time."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20_261_121)


@pytest.fixture(scope="module", autouse=True)
def own_programs():
    """A module's programs are its own, and leave the memory with it."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
    """For small arrays and many programs, where compiling costs more than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def usual_compilation():
    """For what XLA's optimisations may break, in a module that compiles quickly."""
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    if quick:
        jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", quick)
    if quick:
        jax.clear_caches()


SELDOM = tuple(
    line
    for line in Path(__file__).with_name("seldom.txt").read_text().splitlines()
    if not line.startswith("#")
)


def pytest_collection_modifyitems(config, items):
    """A class with `every_time` runs these tests of its suite; the others are `slow`, as is what
    stands in SELDOM. What a class names in `known` fails, with the reason."""
    names = [item.nodeid.removeprefix("tests/") for item in items]
    if not any("::" in argument for argument in config.args):
        files = {name.partition("::")[0] for name in names}
        for line in SELDOM:
            if line.partition("::")[0] in files and not any(n.startswith(line) for n in names):
                raise pytest.UsageError(f"tests/seldom.txt: no test begins with {line!r}")
    for item, name in zip(items, names, strict=True):
        known = getattr(item.cls, "known", {}).get(item.name)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known, strict=True))
        chosen = getattr(item.cls, "every_time", None)
        left = chosen is not None and not {item.name, item.originalname} & chosen
        if left or item.name in getattr(item.cls, "seldom", ()) or name.startswith(SELDOM):
            item.add_marker("slow")
