"""The shape of the whole: which file may import which, and what importing the library costs."""

import ast
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.structure.drawing import draw, same_floors
from benchmarks.structure.imports import FLOORS, read, violations

ROOT = Path(__file__).parent.parent
PACKAGE, KERNELS = ROOT / "transformer_jax", ROOT / "kernels"

FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "torch", "tensorflow", "yaml"}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imports(path: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports, other libraries included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def test_imports_go_strictly_down_the_floors():
    assert len(read(ROOT)) > 80
    assert violations(ROOT) == []


def test_floors_list_every_place_once():
    listed = [place for places in FLOORS for place in places]
    there = {m.place for m in read(ROOT).values() if m.name.startswith("transformer_jax")}
    assert sorted(listed) == sorted(there)


def test_a_drawing_is_old_where_a_module_differs_and_not_where_only_its_length_does():
    drawing = draw(ROOT)
    assert "masks" in drawing and " lines<" in drawing
    longer = drawing.replace("0 lines<", "9 lines<")
    assert longer != drawing and same_floors(drawing, longer)
    assert not same_floors(drawing, drawing.replace("masks", "maske", 1))


@pytest.fixture
def small_house(tmp_path):
    """Write a project of a few empty files, and return a function that fills one of them."""

    def fill(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    for place in itertools.chain(*FLOORS):
        if place == "kernels":
            fill("kernels/__init__.py", "")
        elif place.startswith("__"):
            fill(f"transformer_jax/{place}.py", "")
        else:
            fill(f"transformer_jax/{place}/__init__.py", "")
    fill("train.py", "")
    return fill


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("transformer_jax/cache/a.py", "import transformer_jax.models", "models is above cache"),
        (
            "transformer_jax/cache/a.py",
            "def f():\n    from transformer_jax.attention import x",
            "attention is on the same floor as cache",
        ),
        (
            "transformer_jax/cache/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from transformer_jax.training import x",
            "imports transformer_jax.training for its types: training is above cache",
        ),
        ("transformer_jax/cli/a.py", "import train", "the package imports nothing outside it"),
        ("transformer_jax/cli/a.py", "from . import b", "relative import"),
        ("transformer_jax/cli/a.py", "import transformer_jax.none", "no such module"),
        ("kernels/a.py", "import transformer_jax.config", "kernels imports nothing of the package"),
        ("transformer_jax/new/__init__.py", "", "new: has no floor in FLOORS"),
    ],
)
def test_an_import_that_does_not_go_down_is_named(small_house, path, text, said):
    assert (
        violations(small_house("transformer_jax/text/a.py", "import transformer_jax.cache")) == []
    )
    (only,) = violations(small_house(path, text))
    assert said in only


def test_imports_in_a_circle_are_named(small_house):
    small_house("transformer_jax/cli/a.py", "import transformer_jax.cli.b")
    (only,) = violations(small_house("transformer_jax/cli/b.py", "import transformer_jax.cli.a"))
    assert only == ("cli: circular imports between transformer_jax.cli.a, transformer_jax.cli.b")


def test_every_package_is_installed():
    """`kernels/` is installed as `transformer_jax.kernels`, and packages are listed one by one."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = {
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in (("transformer_jax", PACKAGE), ("transformer_jax.kernels", KERNELS))
        for path in folder.rglob("__init__.py")
    }
    assert sorted(listed) == sorted(names)


def test_kernels_import_only_jax():
    files = list((ROOT / "kernels").rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            top = name.split(".")[0]
            allowed = top in ("jax", "jaxlib", "numpy") or top in sys.stdlib_module_names
            assert allowed or name.startswith("transformer_jax.kernels"), f"{path.name}: {name}"


def test_config_needs_the_standard_library_only():
    for path in (PACKAGE / "config").glob("*.py"):
        for name in imports(path):
            own = name.startswith(("transformer_jax.config", "transformer_jax.shown"))
            assert own or name.split(".")[0] in sys.stdlib_module_names, (
                f"{path.name} imports {name}"
            )


@pytest.mark.parametrize(
    "path", [*MODULES, ROOT / "train.py"], ids=lambda p: ".".join(p.parts[-2:])[:-3]
)
def test_nothing_unpickles_or_evaluates(path):
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False


def test_import_is_light_and_starts_no_backend():
    code = """
import json, sys
import transformer_jax
from jax._src import xla_bridge
heavy = ["optax", "grain", "orbax.checkpoint", "tyro", "tokenizers", "matplotlib", "torch"]
print(json.dumps({"backends": len(xla_bridge._backends), "public": len(transformer_jax.__all__),
                  "new": [m for m in heavy if m in sys.modules and m not in flax]}))
"""
    # flax imports some of these itself; what we add to that is ours.
    code = "import flax.linen, sys\nflax = set(sys.modules)\n" + code
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    seen = json.loads(out.stdout)
    assert seen["backends"] == 0
    assert seen["new"] == []
    assert seen["public"] > 20
