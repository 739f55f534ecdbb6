"""Strict settings for all tests: rank promotion and key reuse are errors."""

import gc
import os
import re
import sys
from argparse import ArgumentTypeError
from contextlib import contextmanager
from functools import partial
from zlib import crc32

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRANSFORMER_JAX_CACHE"] = "0"  # commands must compile their programs themselves
if sys.version_info >= (3, 12):  # In jax 0.12, the interpreter of Mosaic GPU blocks one thread
    os.environ.setdefault("PJRT_NPROC", "8")  # of XLA per warpgroup, so two are too few.

import jax
import numpy as np
import pytest
from jax._src import compiler

pytest.register_assert_rewrite("tests.support")

from tests.support.compilation import supported_options  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # 10 % of the cost of a program's text
jax.config.update("jax_traceback_filtering", "off")  # most of the cost of raising an error

gc.freeze()
gc.set_threshold(
    100_000, 20, 20
)  # traces create many objects: by default gc takes 10 % of the time


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_120)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


@pytest.fixture(autouse=True)
def torch_seed():
    """Seed torch, so that its models have the same initial values in every run."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20_261_121)


PROGRAMS = 600
"""Compiled programs that a process keeps, about 2 MB each; modules share equal programs."""
compiled = 0


def count_programs(event, _, **__):
    global compiled
    compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count_programs)


@pytest.fixture(scope="module", autouse=True)
def clear_many_programs():
    global compiled
    yield
    if compiled > PROGRAMS:
        compiled = 0
        jax.clear_caches()
        gc.collect()
    gc.freeze()  # most of the remaining objects stay, so later collections may skip them


usual_options = compiler.get_compile_options


def quick_options(quick, *arguments, **settings):
    """Return JAX's compile options, with those for faster compilation if they are enabled."""
    options = usual_options(*arguments, **settings)
    if jax.config.read("jax_disable_most_optimizations"):
        options.env_option_overrides = [
            *options.env_option_overrides,
            *supported_options(quick).items(),
        ]
    return options


unoptimised_programs = False


@contextmanager
def compiling(*, quick):
    global unoptimised_programs
    supported_options(quick)  # compiles programs, so it must run before the settings change
    unoptimised_programs = True  # remain in JAX's caches after this module
    jax.config.update("jax_disable_most_optimizations", True)
    compiler.get_compile_options = partial(quick_options, quick)
    yield
    compiler.get_compile_options = usual_options
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def unoptimised_compilation():
    """Compile without XLA's optimisations, for many programs with small arrays."""
    with compiling(quick=False):
        yield


@pytest.fixture(scope="module")
def quick_compilation():
    """Compile without optimisations and with the older loops, if XLA still supports them.

    Equivalent programs may then differ in their last bits. Modules that compare bits of different
    programs use `unoptimised_compilation`.
    """
    with compiling(quick=True):
        yield


@pytest.fixture
def registering(monkeypatch):
    """Remove the kinds of models and tasks that a test registers."""
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
    """Compile with XLA's optimisations in a module that otherwise compiles quickly."""
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
    """Compile quickly while modules are imported, in each worker."""
    with compiling(quick=True):
        found = yield
    jax.clear_caches()
    return found


def pytest_collection_finish():
    gc.freeze()  # so that later collections skip the tests and all imported modules


def pytest_addoption(parser):
    parser.addoption(
        "--part", type=part, help="run only one part of the slow tests: 2/3 is the second third"
    )


def part(text):
    """Return (which, of how many) of "2/3"."""
    found = re.fullmatch(r"([1-9])/([1-9])", text)
    if found is None or found[1] > found[2]:
        raise ArgumentTypeError(f"part is {text!r}: must be I/N with I from 1 to N, such as 2/3")
    return int(found[1]), int(found[2])


def pytest_collection_modifyitems(config, items):
    """Mark tests as slow or long unless `slow_except` or `long_except` names them.

    On a test, these markers name its cases. On a class, they name tests, or one case as
    `test[case]`. `*` matches any characters. The nearest marker counts, that of a class before
    that of its base. Long tests are also slow. The attribute `known` of a class maps each test
    that is known to fail to the reason. A name that matches no test is an error.
    """
    unused: dict[tuple[str, str], set[str]] = {}
    for item in items:
        if " at 0x" in item.name:  # workers and parts need the same names in each process
            raise pytest.UsageError(f"{item.nodeid}: name contains a memory address")
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
    """Return the part of the slow tests that contains a test, from 1 to `parts`, in every run."""
    return crc32(name.encode()) % parts + 1


def nearest(item, kind):
    """Return the node ID of the nearest marker of a kind and the marker, or "" and None."""
    for node in reversed(item.listchain()):
        for mark in reversed(node.own_markers):
            if mark.name == kind:
                return node.nodeid, mark
    return "", None


def fits(name, own):
    """Whether a name of a marker, in which `*` matches any characters, matches a test."""
    return re.fullmatch(re.escape(name).replace(r"\*", ".*"), own) is not None
