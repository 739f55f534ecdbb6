"""Compile kernels/cpu, where there is a C++ compiler; pyproject.toml says everything else.

Without a compiler, or with TRANSFORMER_JAX_NATIVE=0, the package is installed without it:
`explain_attention` says so. The library is called by XLA and not by Python, so its name and its
wheel's tag are of no Python version.
"""

import os
import platform

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = "kernels/cpu/source"
UNITS = "wide", "avx2", "plain", "handlers"


class BuildNative(build_ext):
    """Build the library under a name without Python's version; leave it out where that fails."""

    def get_ext_filename(self, name: str) -> str:
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        import jaxlib  # of the build's own environment: the oldest version that is supported

        ext.include_dirs.append(os.path.join(os.path.dirname(jaxlib.__file__), "include"))
        super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # there is no PyInit


class TagNative(bdist_wheel):
    """Tag the wheel as one of a platform, for any Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not self.distribution.ext_modules

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def extensions() -> list[Extension]:
    """Return the library, where it is wanted and the platform is known."""
    if os.environ.get("TRANSFORMER_JAX_NATIVE") == "0" or platform.system() == "Windows":
        return []
    return [
        Extension(
            "transformer_jax.kernels.cpu._native",
            sources=[f"{SOURCE}/{name}.cpp" for name in UNITS],
            depends=[
                f"{SOURCE}/{name}.h"
                for name in ("attention", "backward", "call", "decode", "mask", "matmul", "vectors")
            ],
            extra_compile_args=[
                "-g0",
                "-std=c++17",
                "-O3",
                "-fno-math-errno",
                "-fvisibility=hidden",
            ],
            optional=True,
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative, "bdist_wheel": TagNative})
