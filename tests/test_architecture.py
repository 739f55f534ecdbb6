"""Architecture: which file may import which, and the cost of importing the library."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import transformer_jax
import transformer_jax.models.lora
from transformer_jax.attention import api

ROOT = Path(__file__).parent.parent
PACKAGE, KERNELS = ROOT / "transformer_jax", ROOT / "kernels"

FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "torch", "tensorflow", "yaml"}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
LIBRARY = [path for path in MODULES if "lectures" not in path.parts]
"""All modules except the lectures, which use the package as its users do."""


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def layers(container: str) -> list[set[str]]:
    """Return the layers of a contract from bottom to top."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (found,) = (c for c in tools["importlinter"]["contracts"] if c.get("containers") == [container])
    return [set(names.split(" | ")) for names in found["layers"][::-1]]


def floors() -> list[set[str]]:
    return layers("transformer_jax")[:-1]  # the last is __main__


def test_architecture_page_matches_layer_contract():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing = page.split("```")[1].replace("imports", "")
    rows = re.split(r"^ +(\d+) ", drawing, flags=re.M)[1:]
    drawn = {
        int(floor): set(re.findall(r"\w+", names))
        for floor, names in zip(rows[::2], rows[1::2], strict=True)
    }
    table: dict[int, set[str]] = {}
    for floor, names in re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.M):
        table.setdefault(int(floor), set()).update(re.findall(r"`(\w+)`", names))
    assert drawn == table == dict(enumerate(floors()))


def test_every_package_is_included_in_installation():
    """Packages are listed individually, those of `kernels/` under their name in the package."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = {
        ".".join((name, *path.parent.relative_to(folder).parts))
        for name, folder in (("transformer_jax", PACKAGE), ("transformer_jax.kernels", KERNELS))
        for path in folder.rglob("__init__.py")
    }
    assert sorted(listed) == sorted(names)


def test_bottom_layer_does_not_import_from_package():
    modules = [PACKAGE / f"{name}.py" for name in floors()[0] - {"kernels"}]
    kernels = list(KERNELS.rglob("*.py"))
    assert kernels
    for path in modules + kernels:
        others = {"jax", "jaxlib", "numpy"} | ({"flax"} if path in modules else set())
        for name in imports(path):
            allowed = path in kernels and name.startswith("transformer_jax.kernels")
            allowed |= name.split(".")[0] in others | sys.stdlib_module_names
            assert allowed, f"{path}: {name}"


def test_kernels_drawing_matches_layer_contract():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing = page.split("Inside `kernels`")[1].split("```")[1].replace("imports", "")
    drawn = [set(re.findall(r"\w+", line)) for line in drawing.strip().splitlines()]
    assert drawn[::-1] == layers("transformer_jax.kernels")
    assert set.union(*drawn) == {path.parent.name for path in KERNELS.glob("*/__init__.py")}


def test_kernels_folder_is_linked_into_package():
    """Editors, mypy and import-linter follow the link; the installed package has the folder."""
    assert (PACKAGE / "kernels").is_symlink() and (PACKAGE / "kernels").samefile(KERNELS)


@pytest.mark.slow
def test_attention_implementation_requires_one_file_and_one_entry():
    """Only the entry contains its name, and nothing outside its folder imports its class."""
    names = set(api.IMPLEMENTATIONS) - {"xla"}  # the reference, the fallback of derivatives
    classes = {type(api.IMPLEMENTATIONS[name]) for name in names}
    entries = PACKAGE / "attention" / "api.py"
    for path in {*LIBRARY, *KERNELS.rglob("*.py")} - {entries}:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        written = {node.value for node in nodes if isinstance(node, ast.Constant)} & names
        # jax.nn's name of an implementation, and the option of models with the same name
        others = {"cudnn", "invariant"} if path.name == "cudnn.py" else {"invariant"}
        assert written <= others, path
        imported = [x for x in nodes if isinstance(x, ast.ImportFrom)]
        for kind in classes:
            if any(kind.__name__ in [y.name for y in x.names] for x in imported):
                assert path.parent.name == kind.__module__.split(".")[-2] != "attention", path


@pytest.mark.slow
def test_no_module_imports_the_top_level_package():
    for path in LIBRARY:
        tree = ast.parse(path.read_text())
        assert "transformer_jax" not in {
            alias.name for x in ast.walk(tree) if isinstance(x, ast.Import) for alias in x.names
        }, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "transformer_jax":
                places = set().union(*floors())
                assert {alias.name for alias in node.names} <= places, f"{path}:{node.lineno}"


def test_config_imports_only_the_standard_library():
    for path in (PACKAGE / "config").glob("*.py"):
        for name in imports(path):
            allowed = name.startswith(
                ("transformer_jax.config", "transformer_jax.values", "transformer_jax.lectures")
            )
            assert allowed or name.split(".")[0] in sys.stdlib_module_names, (
                f"{path.name} imports {name}"
            )


@pytest.mark.slow_except(
    "attention.__init__", "attention.additive", "attention.api", "transformer_jax.__main__"
)
@pytest.mark.parametrize(
    "path", [*MODULES, ROOT / "train.py"], ids=lambda p: ".".join(p.parts[-2:])[:-3]
)
def test_no_module_unpickles_or_evaluates_data(path):
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False


@pytest.mark.slow
def test_importing_package_is_fast_and_starts_no_backend():
    code = """
import json, sys
import transformer_jax
from jax._src import xla_bridge
heavy = ["optax", "grain", "orbax.checkpoint", "tyro", "tokenizers", "matplotlib", "torch"]
print(json.dumps({"backends": len(xla_bridge._backends), "public": len(transformer_jax.__all__),
                  "new": [m for m in heavy if m in sys.modules and m not in flax]}))
"""
    # flax imports some of these itself, so test only what this package adds
    code = "import flax.linen, sys\nflax = set(sys.modules)\n" + code
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    seen = json.loads(out.stdout)
    assert seen["backends"] == 0
    assert seen["new"] == []
    assert 20 < seen["public"] <= 95


def test_package_docstring_lists_public_names():
    table = transformer_jax.__doc__.split("models.lora`:\n")[1].split("\nThe modules")[0]
    listed = [line[19:] for line in table.splitlines()]
    names = [name for line in listed for name in re.findall(r"\w+", line)]
    assert sorted(names) == sorted(transformer_jax.__all__)
    for name in transformer_jax.__all__:
        assert getattr(transformer_jax, name) is not None
    with pytest.raises(AttributeError, match=r"transformer_jax\.models import merge_lora"):
        transformer_jax.merge_lora  # noqa: B018


def test_modules_are_imported_on_attribute_access():
    code = """
import sys, transformer_jax as tj
names = "interpret", "pretrained", "server"
loaded = [f"transformer_jax.{name}" in sys.modules for name in names]
from transformer_jax import attention
assert tj.masks is attention.masks and tj.interpret.zero and tj.pretrained.load and tj.server
listed = {"interpret", "masks"} <= set(dir(tj))
print(any(loaded), listed, bool(tj.decoding.Slots and tj.training.fit))
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert out.stdout == "False True True\n"


def test_citation_file_has_package_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited[1] == transformer_jax.__version__
