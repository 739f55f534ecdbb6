"""The cache of compiled programs: its folder, and results with and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from transformer_jax.cli import programs
from transformer_jax.kernels import cpu

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from transformer_jax.cli.programs import keep_programs
keep_programs()
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rsplit("/", 1)[-1]))
from transformer_jax import Causal, dot_product_attention
x = jnp.asarray(np.random.default_rng(3).standard_normal((3, 1, 101, 2, 7)), jnp.float32)
def attend(x):
    return dot_product_attention(*x, mask=Causal(), implementation=sys.argv[1]).sum()
value, slope = jax.jit(jax.value_and_grad(attend))(x)
counts = {name: events.count(name) for name in ("cache_hits", "cache_misses")}
print(json.dumps(counts | {"value": float(value), "slope": float(jnp.abs(slope).sum())}))
"""


def process(home: Path, implementation: str, **environment: str):
    """Run the script with a cache folder; return its result and stderr."""
    kept = {name: value for name, value in os.environ.items() if name != programs.SWITCH}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, implementation],
        env=kept | {"XDG_CACHE_HOME": str(home)} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1]), found.stderr


@pytest.fixture
def restored():
    """Start without a cache folder, and restore the JAX settings that a command changes."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    show = programs.warnings.showwarning
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    programs.warnings.showwarning = show


@pytest.mark.slow
@pytest.mark.long_except("native")
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_second_process_reuses_programs_and_ignores_corrupt_cache(implementation, tmp_path):
    """Includes programs that call our native library, which the second process loads again."""
    if implementation == "native" and isinstance(cpu.library(), str):
        pytest.skip(str(cpu.library()))
    first, errors = process(tmp_path, implementation)
    assert not errors and first["cache_misses"] > 0 and first["cache_hits"] == 0
    second, errors = process(tmp_path, implementation)
    assert not errors and second["cache_misses"] == 0
    assert second["cache_hits"] == first["cache_misses"]
    for file in programs.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}).glob("*-cache"):
        file.write_bytes(file.read_bytes()[:-9])
    third, errors = process(tmp_path, implementation)
    assert len(errors.splitlines()) == 1 and "Error reading" in errors and third["cache_hits"] == 0
    for found in (second, third):
        assert (found["value"], found["slope"]) == (first["value"], first["slope"])


def test_unusable_cache_folder_prints_one_line_message(tmp_path, restored, capsys):
    (tmp_path / "transformer_jax").write_text("a file where the folder should be")
    programs.keep_programs({"XDG_CACHE_HOME": str(tmp_path)})
    errors = capsys.readouterr().err
    assert errors.startswith("compiled programs are not cached: ") and errors.count("\n") == 1
    assert jax.config.jax_compilation_cache_dir is None


def test_environment_variable_disables_cache_and_user_folder_is_respected(tmp_path, restored):
    given = {"XDG_CACHE_HOME": str(tmp_path)}
    programs.keep_programs(given | {programs.SWITCH: "0"})
    assert jax.config.jax_compilation_cache_dir is None and not list(tmp_path.iterdir())
    jax.config.update("jax_compilation_cache_dir", "of the user")
    programs.keep_programs(given)
    assert jax.config.jax_compilation_cache_dir == "of the user" and not list(tmp_path.iterdir())
    jax.config.update("jax_compilation_cache_dir", None)
    programs.keep_programs(given)
    assert jax.config.jax_compilation_cache_dir == str(programs.cache_folder(given))


def test_cache_folder_depends_on_processor_and_jaxlib(tmp_path, monkeypatch):
    given = {"XDG_CACHE_HOME": str(tmp_path)}
    one = programs.cache_folder(given)
    assert one == programs.cache_folder(given) and one.is_relative_to(tmp_path)
    read = Path.read_text
    lines = "processor: 0\nflags\t: fpu avx2\n\nprocessor: 1\n"
    for text in (lines, lines.replace("avx2", "avx512f")):
        monkeypatch.setattr(
            Path, "read_text", lambda p, t=text: t if str(p) == "/proc/cpuinfo" else read(p)
        )
        one, before = programs.cache_folder(given), one
        assert one.parent == before.parent and one != before
    monkeypatch.setattr(programs.jaxlib, "__version__", "0.0.7")
    assert programs.cache_folder(given) != one and "0.0.7" in programs.cache_folder(given).name


def test_relative_xdg_folder_is_ignored():
    """Rule of the XDG base directory specification."""
    for given in ({"XDG_CACHE_HOME": "relative"}, {"XDG_CACHE_HOME": ""}, {}):
        assert programs.cache_folder(given).is_relative_to(Path.home() / ".cache")


def test_least_recently_used_programs_are_removed_first(tmp_path, restored, monkeypatch):
    given = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = programs.cache_folder(given)
    folder.mkdir(parents=True)
    for age, name in enumerate("abcde"):
        (folder / name).write_bytes(bytes(11))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(programs, "MOST_BYTES", 34)
    programs.keep_programs(given)
    assert sorted(file.name for file in folder.iterdir()) == ["a", "b", "c"]
