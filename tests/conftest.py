"""Strict settings for the whole suite: a leak of rank, key or dtype is an error, not a warning."""

import gc
import os
import re
import sys
from argparse import ArgumentTypeError
from contextlib import contextmanager
from functools import partial
from zlib import crc32

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRANSFORMER_JAX_CACHE"] = "0"  # commands of tests compile their own programs
if sys.version_info >= (3, 12):  # jax 0.12, whose interpreter of Mosaic GPU holds one of XLA's
    os.environ.setdefault("PJRT_NPROC", "8")  # threads for each warpgroup: two cores are too few

import jax
import numpy as np
import pytest
from jax._src import compiler

pytest.register_assert_rewrite("tests.support")

from tests.support.compilation import known  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # in a program's text: a tenth of its cost
jax.config.update("jax_traceback_filtering", "off")  # most of the time of an error that is raised

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


PROGRAMS = 600
"""Programs that a process keeps, of about 2 MB each: modules share what reads the same."""
compiled = 0


def count_programs(event, _, **__):
    global compiled
    compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count_programs)


@pytest.fixture(scope="module", autouse=True)
def many_programs_leave_the_memory():
    global compiled
    yield
    if compiled > PROGRAMS:
        compiled = 0
        jax.clear_caches()
        gc.collect()
    gc.freeze()  # what is left stays, mostly: a collection need not look at it again


usual_options = compiler.get_compile_options


def quick_options(quick, *arguments, **settings):
    """Return the options of a compilation as JAX makes them, with those that take less time."""
    options = usual_options(*arguments, **settings)
    if jax.config.read("jax_disable_most_optimizations"):
        options.env_option_overrides = [*options.env_option_overrides, *known(quick).items()]
    return options


unoptimised_programs = False


@contextmanager
def compiling(*, quick):
    global unoptimised_programs
    known(quick)  # which compiles
    unoptimised_programs = True  # in JAX's caches, after this module too
    jax.config.update("jax_disable_most_optimizations", True)
    compiler.get_compile_options = partial(quick_options, quick)
    yield
    compiler.get_compile_options = usual_options
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def unoptimised_compilation():
    """Compile without XLA's optimisations: for small arrays and many programs."""
    with compiling(quick=False):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """Compile without optimisations and with the older loops, where XLA still has them.

    Two programs that compute the same may then differ in their last bits; where a module's tests
    say that they do not, it takes `unoptimised_compilation`.
    """
    with compiling(quick=True):
        yield


@pytest.fixture
def registering(monkeypatch):
    """Forget the kinds of models and tasks that a test registers."""
    from transformer_jax.config import kinds

    for base, own in list(kinds._KINDS.items()):
        monkeypatch.setitem(kinds._KINDS, base, dict(own))
    yield
    monkeypatch.undo()
    kinds.kinds_of.cache_clear()
    kinds.field_hints.cache_clear()
    if "transformer_jax.cli.run_flags" in sys.modules:  # its flags include registered kinds
        sys.modules["transformer_jax.cli.run_flags"].FLAGS.collect()


@pytest.fixture
def usual_compilation():
    """For what XLA's optimisations may break, in a module that compiles quickly."""
    quick = jax.config.read("jax_disable_most_optimizations")
    global unoptimised_programs
    jax.config.update("jax_disable_most_optimizations", False)
    if unoptimised_programs:
        jax.clear_caches()
        unoptimised_programs = quick
    yield
    jax.config.update("jax_disable_most_optimizations", quick)
    if quick:
        jax.clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Compile quickly what modules compute where they are imported, in each worker."""
    with compiling(quick=True):
        found = yield
    jax.clear_caches()
    return found


def pytest_collection_finish():
    gc.freeze()  # tests and what they import: a collection after each module would look at them


def pytest_addoption(parser):
    parser.addoption(
        "--part", type=part, help="of the slow tests one part: 2/3 is the second third"
    )


def part(text):
    """Return (which, of how many) of "2/3"."""
    found = re.fullmatch(r"([1-9])/([1-9])", text)
    if found is None or found[1] > found[2]:
        raise ArgumentTypeError(f"part is {text!r}: must be I/N with I from 1 to N, such as 2/3")
    return int(found[1]), int(found[2])


def pytest_collection_modifyitems(config, items):
    """Mark as slow or long what `slow_except` and `long_except` do not name; what is long is slow.

    Both name cases of the test that they stand at, or, at a class, tests, of which
    `test[case]` is one case; `*` stands for any characters. The nearest of a kind counts, a class's
    before that of its base. A class's `known` holds the reason of each test that is known to fail.
    A name that fits nothing is an error.
    """
    unused: dict[tuple[str, str], set[str]] = {}
    for item in items:
        if " at 0x" in item.name:  # workers and parts need the same names in each process
            raise pytest.UsageError(f"{item.nodeid}: its name has an address in memory")
        own = {item.name, item.originalname}
        if hasattr(item, "callspec"):
            own.add(item.callspec.id)
        for tier in ("slow", "long"):
            kind = f"{tier}_except"
            where, mark = nearest(item, kind)
            if mark is not None:
                fitting = {name for name in mark.args if any(fits(name, x) for x in own)}
                if not fitting:
                    item.add_marker(tier)
                left = unused.setdefault((where.partition("[")[0], kind), set(mark.args))
                left -= fitting
        if item.get_closest_marker("long") is not None:
            item.add_marker("slow")
        known = getattr(item.cls, "known", {})
        if item.name in known:
            item.add_marker(pytest.mark.xfail(reason=known[item.name], strict=True))
        if known:
            where = item.nodeid.rpartition("::")[0]
            unused.setdefault((where, "known"), set(known)).discard(item.name)
    wrong = [f"{where}: {kind} names {left}" for (where, kind), left in unused.items() if left]
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("no such tests: " + "; ".join(wrong))
    if config.option.part is not None:
        which, parts = config.option.part
        left = {
            item
            for item in items
            if item.get_closest_marker("slow") and part_of(item.nodeid, parts) != which
        }
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def part_of(name, parts):
    """Return which part of the slow tests has a test, from 1 to `parts`: the same in every run."""
    return crc32(name.encode()) % parts + 1


def nearest(item, kind):
    """Return where the nearest marker of a kind stands, and the marker, if there is one."""
    for node in reversed(item.listchain()):
        for mark in reversed(node.own_markers):
            if mark.name == kind:
                return node.nodeid, mark
    return "", None


def fits(name, own):
    """Return whether a name of a marker, of which `*` is any characters, is that of a test."""
    return re.fullmatch(re.escape(name).replace(r"\*", ".*"), own) is not None
