"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRANSFORMER_JAX_CACHE"] = "0"  # commands of tests compile their own programs
if sys.version_info >= (3, 12):  # jax 0.12, whose interpreter of Mosaic GPU holds one of XLA's
    os.environ.setdefault("PJRT_NPROC", "8")  # threads for each warpgroup: two cores are too few

import jax
import numpy as np
import pytest
from jax._src import compiler

pytest.register_assert_rewrite("tests.support")

from tests.support.compilation import OLDER_LOOPS, has_older_loops  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # in a program's text: a tenth of its cost

SLOW = Path(__file__).parent / "slow.txt"

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


usual_options = compiler.get_compile_options


def options_with_older_loops(*arguments, **settings):
    """Return the options of a compilation as JAX makes them, with the older loops."""
    options = usual_options(*arguments, **settings)
    if jax.config.read("jax_disable_most_optimizations"):
        options.env_option_overrides = [*options.env_option_overrides, *OLDER_LOOPS.items()]
    return options


@pytest.fixture(scope="module")
def unoptimised_compilation():
    """Compile without XLA's optimisations: for small arrays and many programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def quick_compilation(unoptimised_compilation):
    """Compile without optimisations and with the older loops, where XLA still has them.

    Two programs that compute the same may then differ in their last bits; where a module's tests
    say that they do not, it takes `unoptimised_compilation`.
    """
    if has_older_loops():
        compiler.get_compile_options = options_with_older_loops
    yield
    compiler.get_compile_options = usual_options


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


def pytest_collection_modifyitems(config, items):
    """Mark slow tests, and tests that are known to fail.

    `@pytest.mark.slow_cases(...)` names beginnings of the ids of a test's slow cases, and
    `long_cases(...)` those of slow ones that are long too. A class with a shared suite names slow
    cases by test in `slow_cases`, or in `every_time` the tests that are not slow, and in `known`
    those that fail, with the reason. slow.txt lists more cases that are slow.
    """
    unused: dict[tuple[str, str], bool] = {}
    listed = {line for line in SLOW.read_text().splitlines() if not line.startswith("#")}
    names = {item.nodeid for item in items}
    if not any("::" in argument for argument in config.args):
        files = {name.partition("::")[0] for name in names}
        gone = sorted(n for n in listed - names if n.partition("::")[0] in files)
        if gone:
            raise pytest.UsageError(f"slow.txt lists tests that there are not: {', '.join(gone)}")
    for item in items:
        known = getattr(item.cls, "known", {}).get(item.name)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known, strict=True))
        chosen = getattr(item.cls, "every_time", None)
        slow = chosen is not None and not {item.name, item.originalname} & chosen
        slow |= item.nodeid in listed
        long = [b for mark in item.iter_markers("long_cases") for b in mark.args]
        marked = [b for mark in item.iter_markers("slow_cases") for b in mark.args] + long
        suite = getattr(item.cls, "slow_cases", {}).get(item.originalname, ())
        case = item.callspec.id if hasattr(item, "callspec") else ""
        for beginning in (*marked, *suite):
            found = f"{case}]".startswith(beginning)
            slow |= found
            if found and beginning in long:
                item.add_marker("long")
            if beginning in marked:
                test = item.nodeid.partition("[")[0], beginning
                unused[test] = unused.get(test, True) and not found
        if slow:
            item.add_marker("slow")
    wrong = [f"{test}: no case begins with {case!r}" for (test, case), no in unused.items() if no]
    if wrong and not any("[" in argument for argument in config.args):
        raise pytest.UsageError("; ".join(wrong))
