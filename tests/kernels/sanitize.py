"""Builds of the CPU kernels with sanitizers or for other processors, compared with float64.

    python -m tests.kernels.sanitize [address] [thread] [emulated] [suite] [--cases 400]

address     `native_driver.cpp`, with the address and undefined-behaviour sanitizers
thread      the same driver with the thread sanitizer: several calls at once on one thread pool
emulated    each instruction set under qemu-user, on a processor without wider ones, and NEON
suite       the Python tests of the kernels, with the library built with the first two sanitizers

The default is all of them. Missing tools are named and skipped; with --strict they are an error.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "kernels" / "cpu" / "source"
FLAGS = "-std=c++17 -fno-math-errno -Wall -Wextra -Werror -Wno-maybe-uninitialized -pthread".split()
NOT_OF_DRIVER = {"handlers", "older"}  # need XLA's headers; already in the system's libstdc++
ADDRESS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
THREAD = "-O1 -g -fsanitize=thread"
ARM = "aarch64-linux-gnu-g++"
EMULATED = {  # qemu has no AVX-512
    "plain": "qemu64",
    "avx2": "qemu64,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+movbe,+bmi1,+bmi2,+xsave",
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], help="default: all")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", action="store_true", help="fail if a tool is missing")
    arguments = parser.parse_args()
    skipped = []
    print(f"$ python -m tests.kernels.sanitize {' '.join(sys.argv[1:])}")
    print(f"{first_line('g++', '--version')}; {platform.machine()}: {', '.join(kernels())}")
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.ways or WAYS:
            print(f"== {name}", flush=True)
            skipped += WAYS[name](Path(work), arguments.cases, arguments.seed)
    for reason in skipped:
        print(f"SKIPPED: {reason}")
    if skipped and arguments.strict:
        sys.exit(1)
    print("all clean")


def address(work: Path, cases: int, seed: int) -> list[str]:
    driver = build(work / "address", "g++", ADDRESS)
    for name in kernels():
        run([driver, name, cases, seed, 3, 2])
    return []


def thread(work: Path, cases: int, seed: int) -> list[str]:
    driver = build(work / "thread", "g++", THREAD)
    for name in kernels():
        # with address randomisation the sanitizer does not start on some Linux kernels
        run(["setarch", "-R", driver, name, cases // 2, seed, 3, 3])
    return []


def emulated(work: Path, cases: int, seed: int) -> list[str]:
    skipped = []
    if shutil.which("qemu-x86_64") and platform.machine() == "x86_64":
        driver = build(work / "here", "g++", "-O3 -static")
        for name, processor in EMULATED.items():
            run(["qemu-x86_64", "-cpu", processor, driver, name, cases // 4, seed, 3, 2])
    else:
        skipped.append("x86-64 under emulation: needs qemu-x86_64 (qemu-user)")
    if shutil.which("qemu-aarch64") and shutil.which(ARM):
        driver = build(work / "aarch64", ARM, "-O3 -static")
        run(["qemu-aarch64", driver, "plain", cases // 4, seed, 3, 2])
    else:
        skipped.append(f"NEON: needs qemu-aarch64 (qemu-user) and {ARM}")
    return skipped


def suite(work: Path, cases: int, seed: int) -> list[str]:
    """Run the Python tests with an instrumented library, which needs the sanitizer libraries."""
    import jaxlib

    library = work / "suite"
    library.mkdir()
    headers = Path(jaxlib.__file__).parent / "include"
    flags = f"{ADDRESS} -fPIC -fvisibility=hidden -shared -isystem {headers}"
    build(library / "_native.so", "g++", flags, driver=False)
    code = (
        "import sys, pytest\n"
        "from transformer_jax.kernels import cpu\n"
        f"cpu.__file__ = {str(library / '__init__.py')!r}\n"  # the folder of the library
        "assert not isinstance(cpu.library(), str), cpu.library()\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    loaded = [first_line("g++", f"-print-file-name=lib{name}.so") for name in ("asan", "ubsan")]
    tests = "tests/kernels/test_native.py", "tests/kernels/test_fuzz_native.py"
    run(
        [sys.executable, "-c", code, "-p", "no:cacheprovider", "--timeout", "3000", *tests],
        # Python and XLA leak memory, and jaxlib throws; neither concerns the kernels
        {"LD_PRELOAD": ":".join(loaded), "ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    return []


WAYS = {"address": address, "thread": thread, "emulated": emulated, "suite": suite}


def kernels() -> list[str]:
    """Return the instruction sets that the library contains and this processor supports."""
    flags = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    wide = "avx512f" in flags and "avx512bw" in flags and "avx512dq" in flags
    return ["plain", *(["avx2"] if "avx2" in flags else []), *(["wide"] if wide else [])]


def build(target: Path, compiler: str, flags: str, *, driver: bool = True) -> Path:
    """Compile all units of the library in parallel, and link them."""
    units = sorted(SOURCE.glob("*.cpp"))
    if driver:
        units = [unit for unit in units if unit.stem not in NOT_OF_DRIVER]
        units.append(Path(__file__).with_name("native_driver.cpp"))
    folder = target.with_name(f"{target.name}.units")
    folder.mkdir()

    def compiled(unit: Path) -> Path:
        found = folder / f"{unit.stem}.o"
        command = [compiler, *FLAGS, *flags.split(), "-I", SOURCE, "-c", unit, "-o", found]
        subprocess.run([arg for arg in command if arg not in ("-shared", "-static")], check=True)
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    subprocess.run([compiler, *FLAGS, *flags.split(), *objects, "-o", target], check=True)
    return target


def first_line(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def run(command: list, more: dict[str, str] | None = None) -> None:
    """Run a command and print its output. Exit if it fails."""
    environment = os.environ | ENVIRONMENT | {"JAX_PLATFORMS": "cpu"} | (more or {})
    done = subprocess.run([str(x) for x in command], env=environment, cwd=ROOT)
    if done.returncode:
        sys.exit(f"FAILED with {done.returncode}: {' '.join(str(x) for x in command)}")


if __name__ == "__main__":
    main()
