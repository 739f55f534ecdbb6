"""Run one pass of attention for a profiler, which records only the second call.

For example:

    ncu --profile-from-start off python -m benchmarks.first_light.profiled pallas backward
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
from collections.abc import Iterator
from typing import get_args

from benchmarks import attention, contenders, specs
from benchmarks.first_light import checks, rehearsal
from benchmarks.first_light.why import CASE
from benchmarks.specs import Direction


@contextlib.contextmanager
def profiling(rehearsed: bool) -> Iterator[None]:
    """Return a context that is recorded by a waiting profiler."""
    if rehearsed:
        yield
        return
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    steps = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),  # the context of XLA
        ("cuCtxSetCurrent", context),
        ("cuProfilerStart",),
    )
    for name, *arguments in steps:
        if status := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")
    yield
    driver.cuProfilerStop()


def main() -> None:
    """Call attention twice, the second time for the profiler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("implementation", choices=tuple(rehearsal.STANDS_IN))
    parser.add_argument("direction", choices=get_args(Direction))
    parser.add_argument(rehearsal.FLAG, action="store_true", help=rehearsal.SAID)
    given = parser.parse_args()
    [case] = [case for case in specs.ATTENTION if case.name == CASE]
    case = rehearsal.shrunk(case) if given.rehearse else case

    def twice() -> None:
        name = rehearsal.implementation(given.implementation, given.rehearse)
        options = attention._options(["--ours", name])
        with rehearsal.kernels(given.rehearse):
            call = contenders.builders(case, given.direction, options)[contenders.OURS]()
            call()
            with profiling(given.rehearse):
                call()

    checks.main_of(twice)


if __name__ == "__main__":
    main()
