"""Compile kernels/cpu, where there is a C++ compiler; pyproject.toml says everything else.

Without a compiler, or with TRANSFORMER_JAX_NATIVE=0, the package is installed without it:
`explain_attention` says so. The library is called by XLA and knows nothing of Python: it is
compiled without Python's headers and flags, and its wheel is one of any version. Every .cpp file of
the folder is a unit of it; one that is for another processor is empty.

An editable install keeps an existing library if the sources, the compiler and the flags are the
same.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = "kernels/cpu/source"
LIBRARY = "kernels/cpu/_native.so"
COMPILERS = "g++", "c++", "clang++"
FLAGS = "-g0 -std=c++17 -O3 -fPIC -fno-math-errno -fvisibility=hidden"


class BuildNative(build_ext):
    """Build the library, or leave it out where that fails."""

    def get_ext_filename(self, name: str) -> str:
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        import jaxlib  # of the build's own environment: the oldest version that is supported

        headers = os.path.join(os.path.dirname(jaxlib.__file__), "include")
        compiler = find_compiler()
        compiling = FLAGS.split() + os.environ.get("CXXFLAGS", "").split()
        linking = link_flags() + os.environ.get("LDFLAGS", "").split()
        version = run([*compiler, "--version"]) + jaxlib.__version__
        hashes = digest(), short_hash(repr((compiler, version, compiling, linking)).encode())
        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        if self.editable_mode and hashes_of(LIBRARY) == hashes:
            shutil.copy2(LIBRARY, library)
            return
        os.makedirs(self.build_temp, exist_ok=True)
        compiling += [f'-DSOURCES="{hashes[0]}"', f'-DBUILT_WITH="{hashes[1]}"']

        def compile_unit(source: str) -> str:
            made = os.path.join(self.build_temp, os.path.basename(source) + ".o")
            run([*compiler, *compiling, "-isystem", headers, "-c", source, "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, ext.sources))
        run([*compiler, "-shared", *objects, "-o", library, *linking])


def short_hash(data: bytes) -> str:
    """Return the first 16 digits of a SHA-256 hash."""
    return hashlib.sha256(data).hexdigest()[:16]


def hashes_of(library: str) -> tuple[str, str] | None:
    """Return the hashes of the sources and of the commands of a library, or None."""
    try:
        loaded = ctypes.CDLL(os.path.abspath(library))
        functions = loaded.attention_sources, loaded.attention_built_with
    except (OSError, AttributeError):  # no library, or an older one
        return None
    for function in functions:
        function.restype = ctypes.c_char_p
    sources, built_with = (function().decode() for function in functions)
    return sources, built_with


def digest() -> str:
    """Return a hash of the sources, as kernels/cpu/__init__.py computes it again when it loads."""
    found = b""
    for path in sorted(path for kind in ("cpp", "h", "map") for path in glob(f"{SOURCE}/*.{kind}")):
        with open(path, "rb") as file:
            found += file.read()
    return short_hash(found)


class TagNative(bdist_wheel):
    """Tag the wheel as one of a platform, for any Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not self.distribution.ext_modules

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def find_compiler() -> list[str]:
    """Return the command that compiles C++: $CXX, or the first that is installed."""
    given = os.environ.get("CXX", "").split()
    found = given or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found:
        raise CompileError(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    return found


def link_flags() -> list[str]:
    """Return the flags that link a library for older systems.

    The library exports no C++ names, and contains the float16 functions that the compiler calls.
    For the other requirements, see source/older.cpp.
    """
    if platform.system() != "Linux":
        return []
    return ["-s", f"-Wl,--version-script={SOURCE}/exports.map", "-lgcc"]


def run(command: list[str]) -> str:
    """Return what a command prints; CompileError where it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or ""
        raise CompileError(f"{error}\n{said}") from error


def extensions() -> list[Extension]:
    """Return the library, where it is wanted and the platform is known."""
    if os.environ.get("TRANSFORMER_JAX_NATIVE") == "0" or platform.system() == "Windows":
        return []
    units = sorted(glob(f"{SOURCE}/*.cpp"))
    return [Extension("transformer_jax.kernels.cpu._native", units, optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative, "bdist_wheel": TagNative})
