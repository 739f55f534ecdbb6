"""Comparison of two versions of the library by their exported programs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

from benchmarks import versions


def write(path, function):
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(export.export(jax.jit(function))(x, x).serialize())


@pytest.mark.slow_except("0.0-0.0e+00")
@pytest.mark.parametrize(("changed", "found"), [(0.0, "0.0e+00"), (0.25, "2.5e-01")])
def test_largest_difference_between_versions_is_printed(tmp_path, capsys, changed, found):
    write(tmp_path / "old" / "add.bin", lambda x, y: {"sum": x + y, "none": x[:0]})
    write(tmp_path / "new" / "add.bin", lambda x, y: {"sum": x + y + changed, "none": x[:0]})
    directories = [str(tmp_path / name) for name in ("old", "new")]
    assert versions.main(["compare", *directories, "--seconds", "0.01"]) == 0
    printed = capsys.readouterr().out
    difference = re.search(r"largest difference ([\d.e+-]+)$", printed.strip())[1]
    assert printed.startswith("add ") and float(difference) == pytest.approx(float(found), abs=1e-6)


@pytest.mark.slow
def test_programs_for_installed_version_are_exported(tmp_path):
    assert versions.main(["export", str(tmp_path), "--only", "xla_causal_1x64"]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == {
        "xla_causal_1x64_forward",
        "xla_causal_1x64_gradient",
    }
    assert {"train_small", "decode_step"} <= versions.programs().keys()
