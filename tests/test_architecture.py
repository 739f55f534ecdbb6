"""The shape of the whole: which file may import which, and what importing the library costs."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer_jax"

# A module may import those before it, never those behind it.
ORDER = [
    "config",
    "untrusted",
    "families",
    "flags",
    "meshes",
    "tiles",
    "integers",
    "masks",
    "positions",
    "cache",
    "dropout",
    "reference",
    "arguments",
    "blockwise_tiles",
    "blockwise_bias",
    "blockwise_parts",
    "blockwise",
    "mask_vectors",
    "pallas",
    "attention",
    "layers",
    "transformer",
    "recurrent",
    "models",
    "lora",
    "rows",
    "streaming",
    "sampling",
    "processors",
    "decode",
    "beam",
    "speculative",
    "slots",
    "losses",
    "text",
    "chat",
    "pretrained_text",
    "tokenizer_files",
    "data",
    "completion",
    "translation",
    "checkpoint",
    "command",
    "weights",
    "lora_files",
    "pretrained",
    "g2p",
    "progress",
    "run_folder",
    "text_model",
    "training_state",
    "training",
    "pretrained",
    "sentences",
    "generate",
    "convert",
]
CONFIG_MAY = {"__future__", "dataclasses", "difflib", "math", "typing", "collections"}
FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "torch", "tensorflow", "yaml"}


def imports(path: Path) -> set[str]:
    """Dotted names a file imports; of `from transformer_jax import x`, `transformer_jax.x`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.add(str(node.module))
            if node.module == "transformer_jax":
                found |= {f"transformer_jax.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(p for p in PACKAGE.glob("*.py") if p.stem not in ("__init__", "__main__"))
MODULES += sorted((PACKAGE / "families").glob("*.py"))


def place(path: Path) -> str:
    """Its name in the order; the files of a folder have one place."""
    return path.stem if path.parent == PACKAGE else path.parent.name


def test_every_module_has_its_place_in_the_order():
    assert len(MODULES) > 10
    assert {place(p) for p in MODULES} <= set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_imports_go_strictly_downwards(path):
    before = set(ORDER[: ORDER.index(place(path))])
    before |= {place(path)} - {path.stem}
    for name in imports(path):
        first, _, rest = name.partition(".")
        assert first not in ("train", "benchmarks", "tests"), name
        if first == "transformer_jax" and rest:
            assert rest.split(".")[0] in before | {"kernels"}, f"{path.stem} imports {rest}"


def test_kernels_import_only_jax():
    files = list((ROOT / "kernels").glob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            top = name.split(".")[0]
            allowed = top in ("jax", "jaxlib", "numpy") or top in sys.stdlib_module_names
            assert allowed or name.startswith("transformer_jax.kernels"), f"{path.name}: {name}"


def test_config_needs_the_standard_library_only():
    assert {name.split(".")[0] for name in imports(PACKAGE / "config.py")} <= CONFIG_MAY


@pytest.mark.parametrize("path", [*MODULES, ROOT / "train.py"], ids=lambda p: p.stem)
def test_nothing_unpickles_or_evaluates(path):
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False


@pytest.mark.parametrize(
    "before",
    [
        "import transformer_jax.generate",
        "import importlib; importlib.import_module('transformer_jax.generate')",
        "from transformer_jax.generate import __name__",
    ],
)
def test_generate_is_the_function_whatever_was_imported(before):
    """There is a module of that name too, for `python -m transformer_jax.generate`."""
    code = f"""
{before}
import transformer_jax
from transformer_jax import decode, generate
assert generate is transformer_jax.generate is decode.generate, generate
import transformer_jax.generate as again
assert again is generate, again
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


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
