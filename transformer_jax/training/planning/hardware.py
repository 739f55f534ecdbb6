"""Named hardware, which may not be attached, and the devices that programs are compiled for.

Programs can be compiled for devices that are not attached, but they cannot run. A TPU requires the
`libtpu` package, and an NVIDIA GPU requires JAX with CUDA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from transformer_jax.config import ConfigError
from transformer_jax.kernels import Target, using
from transformer_jax.training.planning.peaks import CHIPS, Chip

_GRIDS = {
    "2d": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16",
           256: "16x16"},
    "3d": {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8",
           256: "4x8x8", 512: "8x8x8"},
}  # fmt: skip
"""Slice shapes, keyed by the number of chips. v5e and v6e have two dimensions, and v5p has
three."""

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 141000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""
"""XLA's description of an H200 (GpuTargetConfigProto, text format)."""


@dataclass(frozen=True)
class Hardware:
    """Target hardware for a plan."""

    name: str
    chip: Chip | None
    """Published peak rates, or None for a CPU."""
    count: int
    """Number of chips. Each chip is one JAX device."""

    def devices(self) -> list[jax.Device]:
        """Return the devices to compile for, or raise ConfigError if their package is missing."""
        kind = self.name.split("-")[0]
        if kind == "cpu":
            return jax.devices()[: self.count]
        from jax.experimental import topologies

        if kind == "tpu":
            model = self.name.split("-")[1]
            shape = _GRIDS["3d" if model == "v5p" else "2d"][self.count]
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no host to query
            # compilation uses no TPU, so do not wait for /tmp/libtpu_lockfile
            os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            try:
                with _quiet():
                    found = topologies.get_topology_desc(f"{model}:{shape}", platform="tpu")
                return list(found.devices)
            except Exception as error:
                raise _missing(self.name, "pip install libtpu", error) from None
        try:
            found = topologies.get_topology_desc(
                "", platform="cuda", target_config=H200, topology=f"1x1x{self.count}"
            )
            return list(found.devices)
        except Exception as error:
            raise _missing(self.name, 'pip install "jax[cuda13]"', error) from None

    def lowering(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that lowers programs for these devices instead of the attached ones."""
        if self.chip is None or self.name.startswith("cpu"):
            return contextlib.nullcontext()
        return using(
            Target("tpu" if self.name.startswith("tpu") else "hopper", chip=self.chip.name)
        )

    @property
    def memory(self) -> int:
        """Return the memory per chip that JAX can use, in bytes.

        For a CPU, this is the memory of the machine. On a GPU, JAX uses three quarters of the
        memory, or the fraction that XLA_PYTHON_CLIENT_MEM_FRACTION specifies.
        """
        if self.chip is None:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.count
        if not self.name.startswith("h200"):
            return self.chip.memory
        text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
        try:
            return int(float(text) * self.chip.memory)
        except ValueError:
            message = f"XLA_PYTHON_CLIENT_MEM_FRACTION is {text!r}: must be a number"
            raise ConfigError(message) from None


def find_hardware(name: str) -> Hardware:
    """Return the hardware with a name such as cpu, h200, h200-8, tpu-v5e-256, or tpu-v5p-8.

    The number at the end is the number of chips, except for v5p, where Google uses the number of
    cores. A v5p chip has two cores, so tpu-v5p-8 has 4 chips. Raises ConfigError if the name is
    unknown or if no slice has this number of chips.
    """
    parts = name.split("-")
    last = parts[-1]
    number = last if last.isascii() and last.isdigit() and len(parts) > 1 else ""
    count = int(number or "1")
    head = name.removesuffix(f"-{number}") if number else name
    if count < 1:
        raise ConfigError(f"target is {name!r}: N must be at least 1")
    if head == "cpu":
        available = len(jax.devices())
        if count > available:
            raise ConfigError(
                f"target is {name!r}: needs {count} CPU devices, but there are {available}"
            )
        return Hardware(name, None, count)
    if head == "h200":
        if count not in (1, 2, 4, 8):
            raise ConfigError(f"target is {name!r}: N must be 1, 2, 4 or 8")
        return Hardware(name, CHIPS["h200"], count)
    model = head.removeprefix("tpu-")
    if head not in ("tpu-v5e", "tpu-v5p", "tpu-v6e"):
        rule = "must be cpu, h200, h200-N, tpu-v5e-N, tpu-v5p-N or tpu-v6e-N"
        raise ConfigError(f"target is {name!r}: {rule}")
    cores = 2 if model == "v5p" else 1
    grids = _GRIDS["3d" if model == "v5p" else "2d"]
    if count % cores or count // cores not in grids:
        rule = f"N must be one of {', '.join(str(n * cores) for n in grids)}"
        raise ConfigError(f"target is {name!r}: {rule}")
    return Hardware(name, CHIPS[model], count // cores)


def _missing(name: str, how: str, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())[:120]
    if name.startswith("tpu") and importlib.util.find_spec("libtpu") is not None:
        return ConfigError(f"target is {name!r}: libtpu is installed but cannot be used ({why})")
    return ConfigError(f"target is {name!r}: cannot compile for it here; {how} ({why})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output on standard error, including that of native libraries."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
